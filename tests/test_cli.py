"""The command line: options, exit codes, streams and documents."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
import yaml

from planner import shipped
from planner.answers import outcome
from planner.cli import cli, main
from planner.commands.emit import PROGRAMS
from planner.errors import EnvironmentProblem, ExitCode, PlannerError
from planner.plan import PLAN_FORMAT
from planner.show.library import glossary_view
from planner.show.screen import Screen, to_text
from planner.specs.by_name import load_model
from planner.specs.glossary import entries
from planner.specs.load import load_job

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = ["tiny-gpt", "dgx-a100", "--gpus", "2", "--global-batch", "8"]
TOO_BIG = ["gpt3-175b", "dgx-a100", "--gpus", "1", "--global-batch", "8"]
WORKLOAD = {
    "--nodes", "--gpus", "--seq-len", "--global-batch", "--precision", "--engine", "--set", "--headroom", "--failures",
    "--risk",
    "--allow-tp-across-nodes", "--allow-offload", "--calibration",
}  # fmt: skip
RUN = {
    "--data", "--tokenizer", "--document-mask", "--validation", "--validate-every", "--weights", "--export", "--steps",
    "--resume", "--checkpoint-every", "--keep-checkpoints", "--async-save", "--async-tp", "--profile", "--tensorboard",
    "--wandb",
}  # fmt: skip
EVERYWHERE = {"-q", "--quiet", "-h", "--help"}
FOREIGN = {"--from", "--model", "--define", "--args", "--ignore"}
CONTRACT = {
    "plan": WORKLOAD
    | {"--pin", "--forbid", "--objective", "--within", "--confidence", "--top", "--solver", "--time-limit", "--check"}
    | {"-o", "--output", "--force", "--stats", "--html", "--json"}
    | FOREIGN,
    "explain": WORKLOAD
    | {"--layout", "--why-not", "--what-if", "--schedules", "--collectives", "--batch", "--scaling", "--json"}
    | {"--html", "--trace", "--ranks", "--force", "--section", "--all"}
    | FOREIGN,
    "diff": {"--exit-code", "--json"},
    "verify": {"--rank", "--json"},
    "launch": RUN
    | {
        "--output",
        "--dry-run",
        "--calibration",
        "--smoke",
        "--force-unfit",
        "--node-rank",
        "--master-addr",
        "--master-port",
    },
    "emit": RUN | {"--to", "--on", "-o", "--output", "--smoke", "--force", "--force-unfit"},
    "accuracy": {"--calibration", "--json"},
    "calibrate": {"--plan", "-o", "--output", "--force"},
    "check": {"--plan", "--row", "--baseline", "--fail-on", "--json"},
    "measure": {"-o", "--output", "--model", "--seconds", "--nodes", "--force"}
    | {"--node-rank", "--master-addr", "--master-port"},
    "models": {"--json", "--from", "-o", "--output", "--force"},
    "clusters": {"--detect", "--json"},
    "engines": {"--json"},
    "glossary": {"--json"},
    "serve": set(),
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


# --- options and help ---------------------------------------------------------------------------------------------


def test_commands_and_options_are_those_of_the_contract() -> None:
    found = {
        name: {opt for param in command.params if isinstance(param, click.Option) for opt in param.opts} - EVERYWHERE
        for name, command in cli.commands.items()
    }
    assert found == CONTRACT


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], *([name, "--help"] for name in CONTRACT)])
def test_help_goes_to_standard_output(argv: list[str], capsys) -> None:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: planner")
    assert err == ""


def test_help_fits_the_screen(monkeypatch, capsys) -> None:
    """At 80 columns, `plan --help` has 60 lines at most, and no summary of a command is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("plan", "explain"):
        assert main([name, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) <= (60 if name == "plan" else 66)
        headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
        assert headings[:2] == ["Workload:", "Machine:"]
        assert headings[-1] == "Output:"
        assert "Options:" not in headings
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert "..." not in listed.partition("\n")[2]
    assert listed.count("\n    planner ") == 3


@pytest.mark.parametrize("where", ["before", "after"])
def test_quiet_leaves_only_results_and_errors(where: str, own_folder, capsys) -> None:
    model = "num_layers: 2, hidden_size: 64, num_heads: 4, ffn_hidden_size: 128, vocab_size: 50k"
    (own_folder / "m.yaml").write_text(f"{{name: m, architecture: llama, {model}, max_sequence_length: 64}}")
    job = ["m.yaml", *SMALL[1:]]

    def quiet(*words: str) -> list[str]:
        return ["-q", *words] if where == "before" else [*words, "--quiet"]

    assert main(["plan", *job]) == 0
    loud = capsys.readouterr()
    assert loud.err == "note: vocab_size: 50k is 50,000\n"
    assert main(quiet("plan", *job)) == 0
    assert capsys.readouterr().err == ""
    assert main(quiet("plan", *job, "-o", "p.json")) == 0
    assert main(quiet("plan", *job, "-o", "p.json")) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.startswith("error: p.json exists")
    assert main(quiet("emit", "p.json", "--to", "torch", "-o", "out")) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", list(CONTRACT))
def test_every_command_and_option_says_what_it_does(name: str) -> None:
    command = cli.commands[name]
    assert command.help
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, param.opts


def test_what_is_left_out_is_the_same_in_the_library() -> None:
    """The defaults of reading a job, and of the layouts that answers compare, equal those of `planner plan`."""
    command = cli.commands["plan"]
    asked = {param.name: param.get_default(click.Context(command)) for param in command.params}
    ours = {name: each.default for name, each in inspect.signature(load_job).parameters.items()}
    for name in ("engine", "allow_tp_across_nodes", "allow_offload"):
        assert (asked[name] or None) == (ours[name] or None), name
    assert asked["top"] == outcome._TOP


def test_help_needs_no_heavy_import() -> None:
    heavy = {"numpy", "pulp", "pydantic", "rich", "yaml", "torch"}
    code = f"import sys; from planner.cli import main; main(['--help']); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_end_of_the_process_collects_nothing() -> None:
    """At its end the interpreter collects what is not frozen, which took a tenth of each command's time."""
    code = (
        "import atexit, gc, sys\n"
        "sys.argv = ['planner', 'models']\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 100))\n"
        "from planner.cli import run; run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True"


def test_the_list_of_models_needs_no_document_that_is_read_and_counted() -> None:
    heavy = {"numpy", "pulp", "pydantic", "yaml", "torch"}
    code = f"import sys; from planner.cli import main; main(['models']); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_list_of_models_is_counted_anew_when_a_document_has_changed(own_folder, monkeypatch) -> None:
    """The list that is shipped equals the counted one; with a list of other documents nothing is read from it."""
    counted = shipped.counted_models()
    assert json.loads(shipped.MODELS.read_text(encoding="utf-8")) == counted
    assert shipped.models() == counted["models"]
    old = own_folder / "models.json"
    old.write_text(json.dumps({"digest": "of other documents", "models": []}), encoding="utf-8")
    monkeypatch.setattr(shipped, "MODELS", old)
    assert shipped.models() == counted["models"]


def test_a_fault_in_a_programs_table_stops_no_plan_for_another():
    """Every table but the own one raises at its import; the plan is made, and no other table is asked for."""
    tables = ("accelerate", "bridge", "deepspeed", "hugging_face", "megatron", "swift", "torch", "torchtitan")
    for engine, own in (
        ("torch", {"torch"}),
        ("megatron", {"megatron", "bridge", "swift"}),
        ("fsdp", {"accelerate", "hugging_face"}),
    ):
        broken = {f"planner.emit.programs.{name}" for name in tables if name not in own}
        code = (
            "import sys, planner.cli\n"
            "class Broken:\n"
            f"    def find_spec(self, name, *_):\n        assert name not in {broken}, name\n"
            "sys.meta_path.insert(0, Broken())\n"
            f"sys.exit(planner.cli.main(['plan', *{SMALL}, '--engine', '{engine}']))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == ExitCode.OK, done.stderr


def test_plan_and_explain_never_import_torch() -> None:
    code = f"import sys; from planner.cli import main; print(main(['plan', *{SMALL}]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


# --- exit codes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["plan"],
        ["plan", "tiny-gpt"],
        ["nonsense"],
        ["plan", *SMALL, "--headroom", "10"],
        ["plan", *SMALL, "--objective", "speed"],
        ["plan", "tiny-gpt", "dgx-a100", "--global-batch", "8..", "--nodes", "2"],
        ["explain", "tiny-gpt", "dgx-a100", "--global-batch", "8..16", "--layout", "tp=1"],
        ["plan", "tiny-gpt", "dgx-a100", "--global-batch", "8", "--nodes", "4..2"],
        ["plan", "tiny-gpt", "dgx-a100", "--global-batch", "8", "--nodes", "0..2"],
        ["plan", "tiny-gpt", "dgx-a100", "--global-batch", "8", "--nodes", "1..x"],
        ["plan", "tiny-gpt", "dgx-a100", "--global-batch", "8", "--nodes", "1..2", "--top", "5"],
        ["explain", "tiny-gpt", "dgx-a100", "--global-batch", "8", "--nodes", "1..2", "--layout", "tp=1"],
        ["plan", *SMALL, "--headroom", "100%"],
        ["plan", *SMALL, "--headroom", "-1%"],
        ["plan", *SMALL, "--headroom", "nan"],
        ["plan", *SMALL, "--top", "0"],
        ["plan", *SMALL, "--time-limit", "0"],
        ["plan", *SMALL, "--solver", "guess"],
        ["plan", *SMALL, "--pin", "tq=8"],
        ["plan", *SMALL, "--nodes", "2"],
        ["plan", *SMALL, "--stats", "-"],
        ["plan", *SMALL, "-o", "."],
        ["plan", "no-such-model", "dgx-a100", "--global-batch", "8"],
        ["plan", "tiny-gpt", "dgx-a100"],
        ["explain"],
        ["explain", *SMALL],
        ["explain", "a", "b", "c", "d", "--layout", "tp=1"],
        ["explain", *SMALL, "--layout", "tp=x"],
        ["explain", "plan.json", "--nodes", "2"],
        ["explain", "plan.json", "--layout", "tp=1"],
        ["diff", "plan.json"],
        ["diff", "-", "-"],
        ["launch", "plan.json", "--resume", "sometimes"],
        ["launch"],
        ["models", "no-such-model"],
        ["clusters", "no-such-cluster"],
    ],
)
def test_wrong_use_ends_with_2_and_one_message(argv: list[str], capsys) -> None:
    assert main(argv) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_a_mistyped_option_gets_a_suggestion(capsys) -> None:
    main(["plan", *SMALL, "--nodse", "2"])
    assert "--nodes" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "launch", "emit"])
def test_a_plan_that_cannot_be_read_ends_with_5(command: str, capsys) -> None:
    assert main([command, "missing.json"]) == ExitCode.ENVIRONMENT
    assert "missing.json" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["explain", "a" * 300], ["explain", "--from", "a" * 300, "dgx-h100"],
                                  ["plan", *SMALL, "-o", "a" * 300]])  # fmt: skip
def test_a_name_that_no_file_can_have_is_a_mistake_as_others(argv: list[str], capsys) -> None:
    assert main(argv) == ExitCode.ENVIRONMENT
    assert "aaa" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1}', "\x00", "[" * 100_000])
def test_a_file_that_is_no_plan_ends_with_2(text: str, own_folder, capsys) -> None:
    (own_folder / "p.json").write_text(text)
    assert main(["explain", "p.json"]) == ExitCode.BAD_INPUT
    assert "Traceback" not in capsys.readouterr().err


def test_what_a_folder_refuses_ends_with_5_before_the_search(monkeypatch, capsys) -> None:
    monkeypatch.setattr("planner.api.plan_job", lambda *_, **__: pytest.fail("the search was started"))
    assert main(["plan", *SMALL, "-o", "missing/plan.json"]) == ExitCode.ENVIRONMENT
    assert "missing/plan.json" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [PlannerError, *PlannerError.__subclasses__()])
def test_each_kind_of_error_has_its_exit_code(kind: type[PlannerError], monkeypatch, capsys) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise kind("it failed", hint="do this")

    monkeypatch.setattr("planner.api.plan_job", fail)
    assert main(["plan", *SMALL]) == kind.exit_code
    assert capsys.readouterr().err == "error: it failed\nhelp: do this\n"


# --- documents ----------------------------------------------------------------------------------------------------

PLAN_KEYS = {
    "format", "model", "cluster", "training", "engine", "layout", "fits", "step_seconds", "low_step_seconds",
    "high_step_seconds", "tokens_per_second_per_device", "mfu", "hfu", "memory", "time", "runners_up", "certificate",
}  # fmt: skip
LAYOUT_KEYS = {"tp", "pp", "dp", "cp", "ep", "zero", "mbs", "interleave", "schedule", "recompute", "layers_per_stage"}


def check_plan_document(document: dict[str, Any]) -> None:
    assert set(document) >= PLAN_KEYS
    assert document["format"] == PLAN_FORMAT
    assert set(document["layout"]) >= LAYOUT_KEYS
    for stage in document["memory"]:
        told = {"fits", "verdict", "chance_of_fitting", "device_chance", "most_bytes"}
        assert set(stage) == {"stage", "total_bytes", "limit_bytes", "lines", "host"} | told
        assert all(set(line) >= {"name", "stage", "num_bytes", "formula", "source"} for line in stage["lines"])
        assert stage["total_bytes"] == pytest.approx(sum(line["num_bytes"] for line in stage["lines"]))
    assert all(
        set(line) >= {"name", "busy_seconds", "hidden_seconds", "formula", "source"} for line in document["time"]
    )
    exposed = sum(line["busy_seconds"] - line["hidden_seconds"] for line in document["time"])
    assert document["step_seconds"] == pytest.approx(exposed)


def test_plan_as_a_document_is_equal_in_every_run(capsys, own_folder) -> None:
    assert main(["plan", *SMALL, "--json", "-o", "a.json"]) == 0
    out, err = capsys.readouterr()
    check_plan_document(json.loads(out))
    assert err == ""
    assert (own_folder / "a.json").read_text() == out
    for option in (["--json"], ["-o", "-"]):
        assert main(["plan", *SMALL, *option]) == 0
        assert capsys.readouterr().out == out


def test_a_range_of_nodes_gives_the_front(capsys) -> None:
    argv = ["plan", "tiny-gpt", "dgx-a100", "--global-batch", "32", "--nodes", "1..3"]
    assert main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert document["fits"] is True
    assert [size["nodes"] for size in document["sizes"]] == [1, 2, 3]
    assert set(document["front"][0]) >= {"nodes", "num_devices", "step_seconds", "device_hours", "usd", "layout"}
    assert main(argv) == 0
    assert "fewest devices" in " ".join(capsys.readouterr().out.split())
    too_big = ["plan", "gpt3-175b", "dgx-a100", "--global-batch", "8", "--nodes", "1..2", "--json"]
    assert main(too_big) == ExitCode.NOTHING_FITS
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_ranges_of_nodes_and_batches_go_together(capsys) -> None:
    argv = ["plan", "tiny-gpt", "dgx-a100", "--global-batch", "8..16", "--nodes", "1..2"]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["batch"] == {"least": 8, "most": 16, "target": None}
    assert all(8 <= point["global_batch_size"] <= 16 for point in document["front"])
    assert main(argv) == 0
    assert "8 to 16 sequences" in " ".join(capsys.readouterr().out.split())


def test_a_range_of_batches_is_chosen_from_and_explained(capsys) -> None:
    argv = ["plan", "tiny-gpt", "dgx-a100", "--gpus", "2", "--global-batch", "8..12"]
    assert main([*argv, "--json", "-o", "p.json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert 8 <= document["training"]["global_batch_size"] == document["batch_choice"]["chosen"] <= 12
    assert [each["global_batch_size"] for each in document["batch_choice"]["tried"]] == [8, 9, 10, 11, 12]
    assert set(document["batch_choice"]["learning_rate"]) == {"given", "of_batch", "linear", "square_root"}
    assert main(["explain", "p.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).items() >= document.items()
    assert main(["explain", "p.json", "batch"]) == 0
    out = capsys.readouterr().out
    assert "critical" in out
    assert "square root rule" in out


def test_what_may_not_fit_is_told_written_and_ends_with_3(capsys) -> None:
    argv = ["plan", *SMALL, "--pin", "dp=2,zero=0", "--json"]
    assert main(argv) == 0
    peak = json.loads(capsys.readouterr().out)["memory"][0]["total_bytes"]
    small = ["--set", f"device.memory={peak / 2**30:.6f}GiB"]
    assert main([*argv, *small, "-o", "p.json"]) == ExitCode.NOTHING_FITS
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["fits"], found["verdict"]) == (False, "may not fit")
    assert 0.05 <= found["chance_of_fitting"] < 0.95
    written = json.loads(Path("p.json").read_text())
    assert written.items() <= found.items()
    assert set(found) - set(written) == {"remedies", "pins"}
    assert "no layout fits; this one is the likeliest to" in err
    assert main(["launch", "p.json", "--dry-run"]) == 0
    assert "may not fit into memory" in capsys.readouterr().err
    assert main([*argv, *small, "--risk", "90%"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "fits"


def test_what_does_not_fit_is_started_with_force_alone(capsys) -> None:
    assert main(["explain", *SMALL, "--layout", "dp=2", "--headroom", "99.99%", "--json"]) == 0
    Path("large.json").write_text(capsys.readouterr().out)
    assert main(["launch", "large.json", "--dry-run"]) == ExitCode.NOTHING_FITS
    assert "--force-unfit" in capsys.readouterr().err
    assert main(["launch", "large.json", "--dry-run", "--force-unfit"]) == 0
    assert "does not fit into memory" in capsys.readouterr().err


def test_a_deadline_that_no_layout_meets_ends_with_3(capsys) -> None:
    budget = ["--set", "training.tokens=1e12", "--set", "training.deadline=1 s"]
    assert main(["plan", *SMALL, "--objective", "gpus", *budget]) == ExitCode.NOTHING_FITS
    out, err = capsys.readouterr()
    assert "MISSES the deadline" in out
    assert "no layout meets the deadline" in err


def test_explain_gives_the_plan_back_and_more(plan_file, capsys) -> None:
    assert main(["explain", str(plan_file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document | json.loads(plan_file.read_text()) == document
    assert set(document) >= {"waterfall", "rates", "peaks", "alternatives"}


def test_explain_prices_the_layout_that_is_asked_for(capsys) -> None:
    assert main(["explain", *SMALL, "--layout", "tp=2,pp=1,mbs=2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_plan_document(document)
    assert (document["layout"]["tp"], document["layout"]["mbs"], document["fits"]) == (2, 2, True)


def test_explain_of_what_does_not_fit_is_an_answer(capsys) -> None:
    argv = ["explain", "gpt3-175b", "dgx-a100", "--gpus", "8", "--global-batch", "8", "--layout", "tp=8"]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main(argv) == 0
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["zb-h1", "pipedream"])
def test_a_schedule_that_the_engine_lacks_is_explained_and_not_started(schedule: str, own_folder, capsys) -> None:
    layout = ["--layout", f"pp=2,schedule={schedule}", "--global-batch", "8"]
    assert main(["explain", "tiny-llama", "local-cpu", *layout, "--json"]) == 0
    (own_folder / "priced.json").write_text(capsys.readouterr().out)
    assert main(["explain", "priced.json"]) == 0
    assert "torch does not run" in capsys.readouterr().out
    for command in (["launch", "priced.json"], ["emit", "priced.json"]):
        assert main([*command, *(["--to", "torchrun"] if command[0] == "emit" else [])]) == 2
        assert f"schedule is {schedule}" in capsys.readouterr().err


def test_nothing_fits_ends_with_3_and_still_answers(capsys, own_folder) -> None:
    assert main(["plan", *TOO_BIG, "--json", "-o", "a.json"]) == ExitCode.NOTHING_FITS
    document = json.loads(capsys.readouterr().out)
    check_plan_document(document)
    assert document["fits"] is False
    assert document["dominating"] in {line["name"] for line in document["memory"][0]["lines"]}
    assert main(["plan", *TOO_BIG]) == ExitCode.NOTHING_FITS
    out, err = capsys.readouterr()
    assert out.startswith("Nothing fits")
    assert err == ""
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize("command", ["models", "clusters"])
def test_what_is_shipped_as_a_list_and_one_by_one(command: str, capsys) -> None:
    assert main([command, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert all(entry["name"] and entry["source"] for entry in entries)
    assert main([command]) == 0
    table = capsys.readouterr().out
    for entry in entries:
        assert entry["name"] in table.split()
        assert main([command, entry["name"], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == entry["name"]


def test_engines_as_a_list_and_one_by_one(capsys) -> None:
    assert main(["engines", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert main(["engines"]) == 0
    table = capsys.readouterr().out
    for entry in entries:
        assert entry["name"] in table.split()
        assert all(name in PROGRAMS for name in entry["emits"])
    assert main(["engines", "nanotron"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert main(["engines", "nanotron", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shown
    assert main(["engines", "megatrn"]) == ExitCode.BAD_INPUT
    assert "did you mean `megatron`" in capsys.readouterr().err


def test_every_command_shows_examples_that_it_reads() -> None:
    for name, command in cli.commands.items():
        examples = [line.split() for line in (command.epilog or "").splitlines() if line.startswith("  planner ")]
        assert examples, name
        for _, verb, *arguments in examples:
            assert verb == name
            command.make_context(verb, arguments if ">" not in arguments else arguments[: arguments.index(">")])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--engine", "nemo"], "write --engine megatron-bridge"),
        (["--engine", "FSDP2"], "write --engine fsdp"),
        (["--pin", "tensor_parallel_size=2"], "did you mean `tp`?"),
        (["--pin", "zero3"], "did you mean `zero`?"),
        (["--pin", "gas=8"], "global batch / (dp * mbs)"),
        (["--global-batch", "4M"], "4M tokens"),
    ],
)
def test_words_of_other_programs_are_answered_with_ours(asked: list[str], told: str, capsys) -> None:
    assert main(["plan", *SMALL, *asked]) == ExitCode.BAD_INPUT
    assert told in " ".join(capsys.readouterr().err.split())


def test_sizes_on_which_nothing_fits(capsys) -> None:
    asked = ["plan", "gpt3-175b", "dgx-a100", "--nodes", "1..2", "--global-batch", "8", "--seq-len", "2048"]
    assert main([*asked, "--pin", "recompute=none,tp=1"]) == ExitCode.NOTHING_FITS
    assert "Nothing fits on any of these sizes." in capsys.readouterr().out


def test_the_glossary_explains_a_word_and_refuses_what_is_none(capsys) -> None:
    assert main(["glossary", "tp", "BUBBLE"]) == 0
    assert "ranks that share each matrix product" in capsys.readouterr().out
    shown = " ".join(
        to_text(
            glossary_view([{"section": each.section, "text": each.text} for each in entries()]), Screen(width=10_000)
        ).split()
    )
    assert [each.text for each in entries() if " ".join(each.text.split()) not in shown] == []
    assert main(["glossary", "--json"]) == 0
    assert {"tp", "bubble", "HFU"} <= {term for each in json.loads(capsys.readouterr().out) for term in each["terms"]}
    assert main(["glossary", "bubbel"]) == ExitCode.BAD_INPUT
    assert "did you mean `bubble`" in capsys.readouterr().err


def test_models_list_their_size(capsys) -> None:
    main(["models", "--json"])
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert set(next(iter(entries.values()))) >= {"name", "num_params", "num_active_params", "source"}
    assert entries["llama3-8b"]["num_params"] == 8_030_261_248  # the sum of the published checkpoint's tensors


@pytest.mark.parametrize(("command", "name"), [("models", "tiny-llama"), ("clusters", "gb200-nvl72")])
def test_one_entry_is_a_document_that_reads_back(command: str, name: str, own_folder, capsys) -> None:
    assert main([command, name]) == 0
    (own_folder / "own.yaml").write_text(capsys.readouterr().out)
    assert main([command, name, "--json"]) == 0
    shipped = json.loads(capsys.readouterr().out)
    assert main([command, "own.yaml", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own == {key: value for key, value in shipped.items() if key != "source"}


def test_a_hugging_face_file_becomes_a_document_of_ours(own_folder, capsys) -> None:
    """It means the same model, is short, says on standard error what was not read, and replaces nothing unasked."""
    config = json.loads((Path(__file__).parent / "published" / "huggingface.json").read_text())["models"][
        "qwen3-30b-a3b"
    ]
    (own_folder / "qwen").mkdir()
    (own_folder / "qwen" / "config.json").write_text(
        json.dumps({**config["config"], "auto_map": {"AutoModel": "x.py"}})
    )
    assert main(["models", "--from", "qwen", "-o", "own.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "note: auto_map" in err
    assert "wrote own.yaml" in err
    text = (own_folder / "own.yaml").read_text()
    assert len(text.splitlines()) <= 20
    assert load_model("own.yaml") == load_model("qwen")
    assert main(["models", "--from", "qwen/config.json", "-o", "own.yaml"]) == 2
    assert "own.yaml exists" in capsys.readouterr().err
    assert main(["models", "--from", "qwen/config.json", "-o", "own.yaml", "--force"]) == 0
    capsys.readouterr()
    for written in (["-o", "-"], []):
        assert main(["models", "--from", "qwen", *written]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == text.splitlines()[1:]
    for wrong in (["-o", "x.yaml"], ["--force"], ["llama3-8b", "--from", "qwen"], ["--from", "qwen", "--json"]):
        assert main(["models", *wrong]) == 2
        assert "--from" in capsys.readouterr().err


# --- questions ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_plan(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("plans") / "small.json"
    assert main(["plan", *SMALL, "--pin", "mbs=1", "-o", str(path)]) == 0
    return str(path)


@pytest.fixture(scope="module")
def explained(small_plan) -> dict[str, Any]:
    """The answer of `planner explain` without a question."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["explain", small_plan, "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["--why-not", "tp=2"], "why_not"),
        (["--what-if", "nvlink.bandwidth=x2"], "what_if"),
        (["--what-if"], "sensitivity"),
        (["--schedules"], "schedules"),
        (["--collectives"], "collectives"),
        (["--batch"], "batch"),
        (["--scaling", "1..4"], "scaling"),
    ],
)
def test_each_question_adds_one_key_and_one_section(argv, key, small_plan, explained, validator_of, capsys) -> None:
    assert main(["explain", small_plan, *argv, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert {name: value for name, value in document.items() if name != key} == explained
    validator_of("explanation").validate(document)
    assert err == ""
    assert main(["explain", small_plan, *argv]) == 0
    assert "tiny-gpt on 2 x" in capsys.readouterr().out


def test_why_not_on_the_command_line_is_plan_with_a_pin(small_plan, capsys) -> None:
    assert main(["explain", small_plan, "--why-not", "tp=2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["why_not"]
    assert main(["plan", *SMALL, "--pin", "mbs=1,tp=2", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert found["outcome"]["difference"]["after"]["step_seconds"] == alone["step_seconds"]


def test_what_if_on_the_command_line_is_plan_with_a_setting(small_plan, capsys) -> None:
    assert main(["explain", small_plan, "--what-if", "device.memory=x0.5", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["what_if"]
    half = "--set device.memory=" + json.loads(Path(small_plan).read_text())["cluster"]["device"]["memory"]
    number, unit = half.removeprefix("--set device.memory=").split()
    assert main(["plan", *SMALL, "--pin", "mbs=1", "--set", f"device.memory={float(number) / 2} {unit}", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert found["outcome"]["difference"]["after"]["step_seconds"] == alone["step_seconds"]


def test_questions_go_with_a_layout_too(capsys) -> None:
    argv = ["explain", *SMALL, "--layout", "tp=1,mbs=1", "--what-if", "device.memory=x2", "--what-if", "--collectives"]
    assert main([*argv, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) >= {"what_if", "sensitivity", "collectives"}


def test_diff_of_two_plans(small_plan, capsys) -> None:
    assert main(["plan", *SMALL, "--pin", "tp=2", "-o", "other.json"]) == 0
    capsys.readouterr()
    assert main(["diff", small_plan, "other.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["after"]["step_seconds"] == json.loads(Path("other.json").read_text())["step_seconds"]
    assert {"path": "tp", "before": "1", "after": "2"} in found["layout"]
    assert main(["diff", small_plan, small_plan, "--exit-code"]) == 0
    assert main(["diff", small_plan, "other.json", "--exit-code"]) == 7
    capsys.readouterr()
    assert main(["diff", small_plan, "other.json"]) == 0
    assert "Totals" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["--why-not", "tq=2"],
        ["--why-not", "everything"],
        ["--why-not", "a" * 300],
        ["--what-if", "nvlink.bandwidth"],
        ["--what-if", "device.memroy=x2"],
        ["--scaling", "8"],
        ["--scaling", "1..[/bold]"],
        ["--what-if", "\x1b[2J=x2"],
        ["--why-not", "tp=\u202e8"],
    ],
)
def test_a_question_that_cannot_be_read_ends_with_2(argv: list[str], small_plan, capsys) -> None:
    assert main(["explain", small_plan, *argv]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert not set(err) & {"\x1b", "\u202e"}


# --- files --------------------------------------------------------------------------------------------------------


def test_without_o_nothing_is_written(own_folder, capsys) -> None:
    assert main(["plan", *SMALL]) == 0
    assert list(own_folder.iterdir()) == []
    save, explain = capsys.readouterr().out.splitlines()[-2:]
    assert save.endswith("-o plan.json")
    assert explain == "  planner explain plan.json memory"


@pytest.mark.parametrize("option", ["-o", "--stats"])
def test_an_existing_file_is_replaced_only_by_force(option: str, own_folder) -> None:
    path = own_folder / "kept"
    path.write_text("precious")
    assert main(["plan", *SMALL, option, "kept"]) == ExitCode.BAD_INPUT
    assert path.read_text() == "precious"
    assert main(["plan", *SMALL, option, "kept", "--force"]) == 0
    assert json.loads(path.read_text())


@pytest.mark.parametrize("option", ["-o", "--stats"])
def test_force_never_replaces_what_is_no_file(option: str, own_folder) -> None:
    # a socket stands for a device: whoever breaks the code must not lose /dev/null to this test
    with socket.socket(socket.AF_UNIX) as special:
        special.bind("special")
        assert main(["plan", *SMALL, option, "special", "--force"]) == ExitCode.BAD_INPUT
        assert (own_folder / "special").is_socket()


def test_next_command_can_be_typed(capsys) -> None:
    assert main(["plan", *SMALL, "-o", "my plan.json"]) == 0
    launch, explain = capsys.readouterr().out.splitlines()[-2:]
    assert launch == "  planner launch 'my plan.json'"
    assert explain == "  planner explain 'my plan.json' memory"
    assert main(shlex.split(explain)[1:]) == 0
    assert "Memory of each stage" in capsys.readouterr().out


def test_launch_shows_the_command_of_each_host_for_another_program(capsys) -> None:
    job = ["tiny-gpt", "dgx-a100", "--nodes", "2", "--seq-len", "128", "--global-batch", "32", "--engine", "megatron"]
    assert main(["plan", *job, "--pin", "dp=16", "-o", "m.json"]) == 0
    capsys.readouterr()
    assert main(["launch", "m.json", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("# On all hosts at once; NUMBER is the host's own")
    assert told.endswith(
        "# host 0:\nbash runs/m/run.sh 0 HOST PORT\n# host 1:\nbash runs/m/host-1/run.sh 1 HOST PORT\n"
    )
    assert main(["launch", "m.json", "--dry-run", "--node-rank", "1", "--master-addr", "head"]) == 0
    assert capsys.readouterr().out == "bash runs/m/host-1/run.sh 1 head 29500\n"


def test_launch_shows_its_command_on_request(capsys) -> None:
    assert main(["plan", *SMALL, "-o", "p.json"]) == 0
    capsys.readouterr()
    assert main(["launch", "p.json", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("torchrun ")
    assert "runs/p" in shown
    assert main(["emit", "p.json", "--to", "torchrun"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("option", "written", "code"),
    [
        ("--validation", "50%", 0),
        ("--validation", "0.5", 0),
        ("--validation", "50.1%", 2),
        ("--validation", "0%", 0),
        ("--validation", "-1%", 2),
        ("--headroom", "99%", 0),
        ("--headroom", "0.99", 0),
        ("--headroom", "1", 2),
        ("--headroom", "99", 2),
    ],
)
def test_shares_are_percentages_or_parts_of_one_up_to_their_bound(option, written, code, plan_file, capsys) -> None:
    """At most half of the data may be held out; all memory except the last bit may be left free."""
    fits = ["explain", *SMALL, "--layout", "tp=1"]
    argv = ["emit", str(plan_file), "--to", "torchrun"] if option == "--validation" else fits
    assert main([*argv, option, written]) == code
    out, err = capsys.readouterr()
    if code:
        assert f"{written!r}" in err
    elif option == "--validation":
        assert set(re.findall(r"--validation=(\S+)", out)) == ({"0.5"} if written != "0%" else set())


def test_tokens_of_a_run_are_called_assumed_where_nobody_gave_them(capsys) -> None:
    ranged = ["plan", "tiny-gpt", "dgx-a100", "--gpus", "2", "--global-batch", "8..16"]
    for name, more, is_assumed in (("a.json", [], True), ("b.json", ["--set", "training.tokens=1B"], False)):
        assert main([*ranged, *more, "-o", name]) == 0
        capsys.readouterr()
        assert main(["explain", name, "batch"]) == 0
        assert ("tokens assumed" in capsys.readouterr().out) == is_assumed


# --- hostile text ---

HOSTILE = ["[/bold]", "[red]x[/red]", "\x1b[2J", "\x1b]0;t\x07", "a\u202eb", "$(touch owned)", "`touch owned`", "a\nb"]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "make", [lambda n: ["models", n], lambda n: ["explain", n], lambda n: ["plan", n, n], lambda n: [n]]
)
def test_hostile_names_are_shown_and_not_obeyed(
    name: str, make: Callable[[str], list[str]], own_folder, capsys
) -> None:
    assert main(make(name)) in (ExitCode.BAD_INPUT, ExitCode.ENVIRONMENT)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert not set(err) & {"\x1b", "\x07", "\u202e"}
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize("name", ["[red] $(id) `id`.json", "\x1b[2J.json", "caf\u00e9.json", "a'b.json"])
def test_hostile_file_names_work(name: str, own_folder, capsys) -> None:
    assert main(["plan", *SMALL, "-o", name]) == 0
    assert (own_folder / name).is_file()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert main(["explain", name]) == 0
    capsys.readouterr()
    assert main(["explain", name, "--trace", f"{name}.trace"]) == 0
    assert main(["emit", name, "--to", "torchrun", "-o", f"{name}.folder"]) == 0
    assert "\x1b" not in capsys.readouterr().err


def test_hostile_text_inside_a_plan_is_shown_and_not_obeyed(plan_file, stamped, capsys) -> None:
    hostile = "".join(HOSTILE)
    document = json.loads(plan_file.read_text())
    document["flops_convention"] = document["runners_up"][0]["reason"] = hostile
    for line in [*document["time"], *(line for stage in document["memory"] for line in stage["lines"])]:
        line |= {"formula": hostile, "source": hostile}
    plan_file.write_text(stamped(document))
    assert main(["explain", str(plan_file), "--all"]) == 0
    out = capsys.readouterr().out
    assert not set(out) & {"\x1b", "\x07", "\u202e"}
    assert "[/bold][red]x[/red]" in re.sub(r"\s+", "", out)


def test_an_error_that_is_not_a_stream_s_keeps_its_traceback(monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "no such file", "forgotten.txt")

    monkeypatch.setattr("planner.api.plan_job", fail)
    with pytest.raises(FileNotFoundError):
        main(["plan", *SMALL])


def test_environment_problem_is_what_a_full_disk_becomes() -> None:
    assert EnvironmentProblem("x").exit_code == ExitCode.ENVIRONMENT == 5


INTERRUPTED_IMPORT = """
import os, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "planner.commands.console":
            os.kill(os.getpid(), int(sys.argv[1]))
sys.meta_path.insert(0, Interrupts())
from planner.__main__ import start
start()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_imports_ends_without_a_traceback(number: int, code: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_plan_that_was_interrupted_is_written_and_exits_with_130(own_folder, monkeypatch) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.search.decision.solve", interrupted)
    assert main(["plan", *SMALL, "-o", "plan.json"]) == 130
    monkeypatch.undo()
    monkeypatch.chdir(own_folder)
    assert json.loads(Path("plan.json").read_text(encoding="utf-8"))["certificate"]["status"] == "interrupted"


@pytest.mark.parametrize("argv", [["plan"], ["explain", "--from", "train.sh"], ["emit"]])
def test_a_missing_argument_is_answered_with_examples(argv, capsys) -> None:
    assert main(argv) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "Missing argument" in told
    assert f"\n  planner {argv[0]} " in told
