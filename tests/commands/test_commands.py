"""Each command called as a function: what it prints, returns and refuses."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from planner.commands import accuracy, calibrate, clusters, diff, emit, explain, glossary, launch, models, plan
from planner.commands.console import Console
from planner.commands.options import run_options, with_run_arguments
from planner.errors import EnvironmentProblem, ExitCode, InputError
from planner.run_arguments import RunArguments

SMALL = {"gpus": 2, "global_batch": 8}
RUNS = (Path(__file__).parents[1] / "published" / "measurements.csv").read_text().splitlines(keepends=True)
NOTHING = RunArguments()


@pytest.fixture
def console() -> Console:
    return Console(out=io.StringIO(), err=io.StringIO())


@pytest.fixture
def small(tmp_path, console) -> Path:
    path = tmp_path / "small.json"
    assert plan.run("tiny-gpt", "dgx-a100", console=console, output=path, **SMALL) == ExitCode.OK
    console.out.truncate(console.out.seek(0))
    return path


def test_options_that_no_other_program_takes_stand_apart() -> None:
    from planner.emit.programs import PROGRAMS
    from planner.run_arguments import option_name

    taken = {option_name(each) for name, target in PROGRAMS.items() if name != "torch" for each in target.takes}
    for command in (emit.command, launch.command):
        shared, _, ours = CliRunner().invoke(command, ["--help"]).output.partition("Options for plans of engine torch")
        listed = {word for word in ours.partition("For example:")[0].split() if word.startswith("--")}
        assert listed == {option_name(each.name) for each in fields(RunArguments)} - taken
        assert taken <= set(shared.split())


# --- results --------------------------------------------------------------------------------------------------------


def test_plan_prints_the_plan_that_it_writes(console, tmp_path) -> None:
    path, stats = tmp_path / "plan.json", tmp_path / "stats.json"
    code = plan.run("tiny-gpt", "dgx-a100", console=console, output=path, stats=stats, as_json=True, **SMALL)
    assert (code, console.err.getvalue()) == (ExitCode.OK, "")
    assert console.out.getvalue() == path.read_text()
    assert json.loads(stats.read_text())["num_priced"] > 0


def test_plan_offers_the_next_step_to_what_was_typed(console) -> None:
    plan.run("tiny-gpt", "dgx-a100", console=console, command_line="planner plan a b", **SMALL)
    lines = console.out.getvalue().splitlines()[-2:]
    assert lines == ["  planner plan a b -o plan.json", "  planner explain plan.json memory"]


def test_plan_compares_sizes(console) -> None:
    assert plan.run("tiny-gpt", "dgx-a100", console=console, sizes=range(1, 3), global_batch=16, as_json=True) == 0
    assert [each["nodes"] for each in json.loads(console.out.getvalue())["sizes"]] == [1, 2]


def test_plan_of_what_does_not_fit_writes_nothing_but_stats(console, tmp_path) -> None:
    path, stats = tmp_path / "plan.json", tmp_path / "stats.json"
    code = plan.run("gpt3-175b", "dgx-a100", console=console, output=path, stats=stats, gpus=1, global_batch=8)
    assert code == ExitCode.NOTHING_FITS
    assert console.out.getvalue().startswith("Nothing fits")
    assert (path.exists(), stats.exists()) == (False, True)


def test_explain_prices_a_layout_and_writes_page_and_timeline(console, tmp_path) -> None:
    page, timeline = tmp_path / "page.html", tmp_path / "timeline.json"
    targets = ["tiny-gpt", "dgx-a100"]
    assert explain.run(targets, console=console, layout="tp=2", html=page, trace=timeline, **SMALL) == ExitCode.OK
    assert console.out.getvalue() == ""
    assert console.err.getvalue() == f"wrote {page}\nwrote {timeline}\n"
    assert json.loads(timeline.read_text())["traceEvents"]
    assert explain.run(targets, console=console, layout="tp=2", **SMALL) == ExitCode.OK
    assert "tiny-gpt on 2 x" in console.out.getvalue()


def test_a_plan_may_come_from_the_console(small) -> None:
    source = io.TextIOWrapper(io.BytesIO(small.read_bytes()))
    console = Console(out=io.StringIO(), err=io.StringIO(), source=source)
    assert explain.run(["-"], console=console, as_json=True) == ExitCode.OK
    assert json.loads(console.out.getvalue()).items() >= json.loads(small.read_text()).items()


def test_diff_of_a_plan_and_itself_has_no_change(small, console) -> None:
    assert diff.run(str(small), str(small), console=console, as_json=True) == ExitCode.OK
    found = json.loads(console.out.getvalue())
    assert (found["inputs"], found["layout"]) == ([], [])


def test_launch_in_dry_runs_prints_what_emit_prints(small, console, capsys, monkeypatch) -> None:
    for start in ("lead", "follow"):
        monkeypatch.setattr(f"planner.launch.run.{start}", lambda *_, **__: pytest.fail("something was started"))
    arguments = RunArguments(steps=5, data=("a b.txt",))
    assert launch.run(small, console=console, arguments=arguments, dry_run=True) == ExitCode.OK
    assert emit.run(small, to="torchrun", console=console, arguments=arguments) == ExitCode.OK
    assert console.out.getvalue() == capsys.readouterr().out
    assert "--output=runs/small '--data=a b.txt' --steps=5\n" in console.out.getvalue()


def test_launch_compares_where_the_run_measured(small, console, tmp_path, monkeypatch) -> None:
    planned = json.loads(small.read_text())["step_seconds"]

    def train(plan_path: Path, *, output: Path, **_: object) -> int:
        output.mkdir()
        (output / "plan.json").write_text(plan_path.read_text())
        (output / "measurements.json").write_text(json.dumps({"step_seconds": 2 * planned}))
        return ExitCode.OK

    monkeypatch.setattr("planner.launch.launch", train)
    assert launch.run(small, console=console, arguments=NOTHING, output=tmp_path / "run") == ExitCode.OK
    assert "2.00" in console.out.getvalue()
    assert "planner calibrate" not in console.out.getvalue(), "there is no log to learn from"
    monkeypatch.setattr("planner.launch.launch", lambda *_, **__: ExitCode.DIVERGED)
    assert launch.run(small, console=console, arguments=NOTHING) == ExitCode.DIVERGED


def test_emit_writes_and_names_its_files(small, console, tmp_path) -> None:
    assert emit.run(small, to="slurm", console=console, arguments=NOTHING, output=tmp_path / "job") == ExitCode.OK
    *written, yours, data = console.err.getvalue().splitlines()
    assert data.startswith("still yours: --data SOURCE")
    assert written == [f"wrote {tmp_path}/job/{name}" for name in ("plan.json", "job.sbatch")]
    assert yours.startswith("still yours: learning rate 0.0003, warm-up steps 10, steps 100: equal to the defaults")
    assert emit.run(small, to="slurm", console=console, arguments=NOTHING) == ExitCode.OK
    assert console.out.getvalue() == (tmp_path / "job" / "job.sbatch").read_text()


def test_accuracy_lists_every_run(console, tmp_path) -> None:
    (tmp_path / "runs.csv").write_text("".join(RUNS[:4]))
    assert accuracy.run(tmp_path / "runs.csv", console=console, as_json=True) == ExitCode.OK
    assert [row["id"] for row in json.loads(console.out.getvalue())["rows"]] == [row.split(",")[0] for row in RUNS[1:4]]


def test_calibrate_of_one_run_says_which_runs_would_tell_more(console, tmp_path) -> None:
    (tmp_path / "runs.csv").write_text("".join(RUNS[:2]))
    assert calibrate.run([tmp_path / "runs.csv"], output=tmp_path / "mine.json", console=console) == ExitCode.OK
    shown = " ".join(console.out.getvalue().split())
    assert "does not tell slow computing from slow links. Add runs of" in shown


def test_calibrate_writes_what_other_commands_take(console, tmp_path) -> None:
    (tmp_path / "runs.csv").write_text("".join(RUNS[:3]))
    mine = tmp_path / "mine.json"
    assert calibrate.run([tmp_path / "runs.csv"], output=mine, console=console) == ExitCode.OK
    assert "left out" in console.out.getvalue()
    noted, written = console.err.getvalue().splitlines()
    assert "segment=16 is assumed in 2 rows from line 2 on" in noted
    assert written == f"wrote {mine}"
    console.out.truncate(console.out.seek(0))
    assert calibrate.run([tmp_path / "runs.csv"], output=Path("-"), console=console) == ExitCode.OK
    assert console.out.getvalue() == mine.read_text()
    assert accuracy.run(tmp_path / "runs.csv", console=console, calibration=mine, as_json=True) == ExitCode.OK
    assert explain.run(["tiny-gpt", "dgx-a100"], console=console, layout="tp=2", calibration=mine, **SMALL) == 0


@pytest.mark.parametrize(
    ("run", "keywords", "words"),
    [
        (models.run, {}, "llama3-8b"),
        (models.run, {"name": "tiny-gpt"}, "\nname: tiny-gpt\n"),
        (models.run, {"name": "tiny-gpt", "as_json": True}, '"name": "tiny-gpt"'),
        (clusters.run, {}, "dgx-h100"),
        (clusters.run, {"name": "dgx-h100"}, "\ndevices_per_host: 8\n"),
        (clusters.run, {"detect": True}, "\ndevices_per_host: "),
        (glossary.run, {"words": ["tp"]}, "matrix product"),
        (glossary.run, {"as_json": True}, '"bubble"'),
    ],
)
def test_lists_and_entries(run, keywords, words: str, console) -> None:
    assert run(**keywords, console=console) == ExitCode.OK
    assert words in console.out.getvalue()


def test_what_an_encoding_cannot_say_is_written_out() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(out=out).print("2 \u00d7 2\n")
    assert out.buffer.getvalue() == b"2 \\xd7 2\n"


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c, _: plan.run("tiny-gtp", "dgx-a100", console=c, **SMALL), InputError, "tiny-gtp"),
        (lambda c, f: plan.run("nothing", "no", console=c, output=f), InputError, "exists"),
        (
            lambda c, _: plan.run("nothing", "no", console=c, stats=Path("no/x")),
            EnvironmentProblem,
            "folder is missing",
        ),
        (lambda c, _: plan.run("nothing", "no", console=c, stats=Path("-")), InputError, "no file name"),
        (lambda c, _: explain.run(["tiny-gpt", "dgx-a100"], console=c), InputError, "which layout"),
        (lambda c, _: explain.run(["a", "b", "c", "d e"], console=c), InputError, "too many arguments: 'd e'"),
        (lambda c, f: explain.run([str(f)], console=c, ranks=True), InputError, "goes with --trace"),
        (lambda c, f: explain.run([str(f)], console=c, html=Path("-"), as_json=True), InputError, "only one of"),
        (lambda c, f: explain.run([str(f)], console=c, html=f), InputError, "exists"),
        (lambda c, _: diff.run("-", "-", console=c), InputError, "only one plan"),
        (lambda c, _: launch.run(Path("no.json"), console=c, arguments=NOTHING), EnvironmentProblem, r"no\.json"),
        (lambda c, _: emit.run(Path("-"), to="torchrun", console=c, arguments=NOTHING), InputError, "plan's file"),
        (lambda c, f: emit.run(f, to="megatron", console=c, arguments=NOTHING), InputError, "made for torch"),
        (lambda c, _: accuracy.run(Path("no.csv"), console=c), InputError, "no file"),
        (lambda c, f: calibrate.run([Path("no.csv")], output=f, console=c), InputError, "exists"),
        (lambda c, _: calibrate.run([Path("no.log")], output=Path("x.json"), console=c), InputError, "no such file"),
        (lambda c, _: models.run("tiny-gtp", console=c), InputError, "tiny-gtp"),
        (lambda c, _: clusters.run("dgx-x", console=c), InputError, "dgx-x"),
        (lambda c, _: clusters.run("dgx-h100", console=c, detect=True), InputError, "--detect"),
        (lambda c, _: glossary.run(["bubbel"], console=c), InputError, "bubbel"),
    ],
)
def test_what_cannot_be_done_raises_and_prints_nothing(call, error, words: str, console, plan_file) -> None:
    with pytest.raises(error, match=words):
        call(console, plan_file)
    assert console.out.getvalue() == ""


@pytest.mark.parametrize(
    ("call", "words", "hint"),
    [
        (lambda c, f, _: explain.run(["dgx-a100"], from_file=f, console=c), "is a plan", "`planner explain .*` expl"),
        (lambda c, f, _: calibrate.run([f], output=Path("x"), console=c), "is a plan, and holds", "--plan .*json"),
        (lambda c, _, s: calibrate.run([s], output=Path("x"), console=c), "is a script, and holds", "--plan PLAN"),
        (
            lambda c, f, _: plan.run("tiny-gpt", "dgx-a100", console=c, calibration=f, **SMALL),
            "is a plan",
            "calibrate RUN",
        ),
        (
            lambda c, _, s: plan.run("tiny-gpt", "dgx-a100", console=c, calibration=s, **SMALL),
            "is a script",
            "calibrate R",
        ),
        (lambda c, f, _: emit.run(f, to="deepspeed", console=c, arguments=NOTHING), "made for", "--engine deepspeed"),
        (
            lambda c, f, _: emit.run(f, to="megatron", console=c, arguments=NOTHING),
            "made for",
            "megatron or megatron-fsdp",
        ),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(call, words: str, hint: str, console, plan_file, tmp_path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\ntorchrun pretrain_gpt.py --num-layers 4\n")
    with pytest.raises(InputError, match=words) as error:
        call(console, plan_file, script)
    assert re.search(hint, error.value.mistakes[0].hint)


@pytest.mark.parametrize(
    "documents",
    [
        lambda f: {"model": str(f), "cluster": "dgx-a100"},
        lambda f: {"model": "tiny-gpt", "cluster": str(f)},
        lambda f: {"model": "tiny-gpt", "cluster": "dgx-a100", "training": str(f)},
    ],
)
def test_a_plan_or_a_script_is_no_document(documents, console, plan_file, tmp_path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\ntorchrun pretrain_gpt.py --num-layers 4\n")
    for file, kind, hint in ((plan_file, "a plan", "planner explain"), (script, "a script", "planner explain --from")):
        with pytest.raises(InputError) as error:
            plan.run(**documents(file), console=console, **SMALL)
        (mistake,) = error.value.mistakes
        assert f"{file} is {kind}" in mistake.message
        assert f"`{hint} {file}`" in mistake.hint


def test_a_large_plan_is_called_one_and_a_document_may_begin_like_a_script(console, plan_file, tmp_path) -> None:
    large, training = tmp_path / "large.json", tmp_path / "training.yaml"
    large.write_text(plan_file.read_text() + " " * 2**20)
    with pytest.raises(InputError, match="is a plan"):
        plan.run("tiny-gpt", str(large), console=console, **SMALL)
    training.write_text("#!yaml\nsequence_length: 64\nglobal_batch_size: 8\n")
    assert plan.run("tiny-gpt", "dgx-a100", str(training), console=console) == 0


def test_a_kind_of_file_is_listed_once(console, tmp_path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing of interest")
    with pytest.raises(InputError, match="of no kind") as error:
        explain.run(["dgx-a100"], from_file=path, console=console)
    kinds = error.value.mistakes[0].hint.removeprefix("known: ").split("; ")
    assert len(kinds) == len(set(kinds)) > 9


# --- options of a run -------------------------------------------------------------------------------------------------


def test_the_words_of_a_run_are_read_back(run_arguments: RunArguments) -> None:
    found = []
    command = click.command()(run_options(lambda **options: found.append(with_run_arguments(options))))
    done = CliRunner().invoke(command, run_arguments.options(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert found == [{"arguments": run_arguments}]
