"""A plan is checked when it is read: rules, figures, checksum, version; every fault ends with a message."""

from __future__ import annotations

import copy
import json
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import made_by
from planner.answers.plan_inputs import job_of
from planner.cli import main
from planner.cost import estimate as estimation
from planner.cost.estimate import estimate
from planner.errors import ExitCode, InputError
from planner.layout import Layout
from planner.layout_text import parse_layout
from planner.plan import Plan, plan_to_dict, plan_to_json
from planner.plan_file import plan_from_file
from planner.reading import read_plan
from planner.search.given import plan_for_layout
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.by_name import shipped_calibration
from planner.specs.job import Job
from planner.specs.load import load_job

OTHER = {"planner_version": "0.0.9", "digest": "0123456789abcdef", "calibration": "shipped"}


def job(**changes: Any) -> Job:
    given = {"model": "llama2-7b", "cluster": "dgx-a100", "nodes": 2, "sequence_length": 4096, "global_batch_size": 64}
    return load_job(**(given | {"settings": ("training.tokens=1e12",)} | changes))


@pytest.fixture(scope="module")
def made() -> Plan:
    """A plan with runners-up, a certificate, a band and a run."""
    found = search(job(), Constraints.parse(["pp=2"]), within=0.02)
    assert isinstance(found, Plan)
    assert found.runners_up
    assert found.certificate
    assert found.band
    return found


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., tuple[Plan, list[str]]]:
    """Write a text and read it as the commands do; returns the plan and the messages about it."""

    def read_text(text: str) -> tuple[Plan, list[str]]:
        path, told = tmp_path / "it.json", []
        path.write_text(text)
        return read_plan(path, tell=told.append), told

    return read_text


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a document with another value at a path such as `memory.0.limit_bytes`."""
    found = copy.deepcopy(document)
    inner: Any = found
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        inner = inner[step]
    inner[last] = value
    return found


# --- the same version -------------------------------------------------------------------------------------------


def test_a_plan_reads_back_equal_and_nothing_is_said(made, read) -> None:
    assert read(plan_to_json(made)) == (made, [])
    assert read(json.dumps(plan_to_dict(made))) == (made, [])


def test_a_layout_of_the_user_s_and_a_mixed_cluster_read_back_equal(read) -> None:
    mixed = load_job(model="llama3-8b", cluster="mixed-a100-h100", global_batch_size=64, sequence_length=4096)
    names = [pool.cluster.name for pool in mixed.pools]
    text = f"tp=8,pp=2,dp=1,mbs=1,pools={'/'.join(names)}"
    layout = parse_layout(text, num_layers=32, num_devices=dict.fromkeys(names, 8))
    own = parse_layout("tp=2,zero=1", num_layers=32, num_devices=16)
    for plan in (plan_for_layout(job(), own), plan_for_layout(mixed, layout)):
        assert plan.certificate is None
        assert read(plan_to_json(plan)) == (plan, [])


def test_a_layout_of_a_plan_is_priced_once(made, read, monkeypatch) -> None:
    """And the plan's own once more, with the corrections of all engines, for the engine's label."""
    priced: list[Layout] = []
    of_layout = estimation.layout_prices
    monkeypatch.setattr(estimation, "layout_prices", lambda *a: priced.append(a[1]) or of_layout(*a))
    text = plan_to_json(made)
    priced.clear()
    read(text)
    beside = (made.minimum, made.own, *made.runners_up)
    layouts = {each.layout for each in beside if each} | {made.layout}
    assert len(priced) == len(layouts) + 1
    assert set(priced) == layouts


FIGURES = [
    "step_seconds", "low_step_seconds", "high_step_seconds", "mfu", "hfu", "tokens_per_second_per_device",
    "band.low", "band.num_near", "memory.0.limit_bytes", "memory.1.lines.2.num_bytes", "time.0.busy_seconds",
    "time.3.hidden_seconds", "runners_up.0.step_seconds", "runners_up.0.peak_bytes", "calibration.0.slowdown",
    "memory.0.total_bytes", "run.usd", "run.seconds", "num_trained_params", "world_size", "idle_devices",
]  # fmt: skip


@pytest.mark.parametrize("path", FIGURES)
def test_an_edited_figure_is_refused_and_named(path, made, read) -> None:
    document = plan_to_dict(made)
    inner: Any = document
    for step in path.split("."):
        inner = inner[int(step) if step.isdigit() else step]
    edited = changed(document, path, (inner or 1.0) * 1.001 if not isinstance(inner, int) else inner + 1)
    with pytest.raises(InputError, match=r"it\.json was edited after it was written") as error:
        read(json.dumps(edited))
    if path.split(".")[0] not in ("run", "num_trained_params", "world_size", "idle_devices") and "total" not in path:
        name = path.replace(".0", "[0]").replace(".1", "[1]").replace(".2", "[2]").replace(".3", "[3]")
        assert f"{name} is " in str(error.value)
        assert "priced again" in str(error.value)


@pytest.mark.parametrize("path", ["step_seconds", "mfu", "memory.1.lines.2.num_bytes", "runners_up.0.step_seconds"])
def test_a_figure_that_was_edited_with_its_checksum_is_refused_too(path, made, read, stamped) -> None:
    document = plan_to_dict(made)
    inner: Any = document
    for step in path.split("."):
        inner = inner[int(step) if step.isdigit() else step]
    read(stamped(changed(document, path, inner * (1 + 1e-13))))  # another machine's last digit
    with pytest.raises(InputError, match="priced again"):
        read(stamped(changed(document, path, inner * (1 + 1e-7))))


def test_many_edited_figures_are_counted(made, read) -> None:
    document = plan_to_dict(made)
    for line in document["time"]:
        line["busy_seconds"] += 1.0
    with pytest.raises(InputError, match=r"time\[0\]\.busy_seconds is .*; and [1-9][0-9]* more"):
        read(json.dumps(document))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("certificate.gap", 0.5),
        ("certificate.num_legal", 1),
        ("certificate.status", "time limit"),
        ("certificate.solver", "oracle"),
        ("runners_up.0.reason", "far slower"),
        ("options.pins", []),
        ("training.learning_rate", 1.0),
        ("model.name", "mine"),
        ("made_by.planner_version", "9.9.9"),
        ("checksum", "0" * 16),
    ],
)
def test_what_cannot_be_priced_is_guarded_by_the_checksum(path, value, made, read, tmp_path) -> None:
    text = json.dumps(changed(plan_to_dict(made), path, value))
    with pytest.raises(InputError, match="was edited"):
        read(text)
    with pytest.raises(InputError, match="was edited"):  # the trainer, which has no formulas
        plan_from_file(tmp_path / "it.json")


RULES = [
    ("cluster.hosts", 1, "16 devices, and there are 8"),
    ("layout.dp", 1_000_000, "dp 1000000 "),
    ("model.num_layers", 1_000, "`layers_per_stage` sums to 32, and llama2-7b has 1000 layers"),
    ("training.global_batch_size", 7, "does not divide the global batch of 7"),
    ("engine.can.axes", ["dp"], "does not run pp=2"),
    ("training.precision", "fp8", "a100-80gb does not compute in fp8"),
    ("options.pins", ["tq=3"], "unknown layout key `tq`"),
]


@pytest.mark.parametrize(("path", "value", "message"), RULES)
def test_a_layout_against_its_own_documents_is_refused(
    path, value, message, made, read, stamped, capsys, tmp_path
) -> None:
    text = stamped(changed(plan_to_dict(made), path, value))
    with pytest.raises(InputError, match=message):
        read(text)
    path = str(tmp_path / "it.json")
    for command in (["explain"], ["emit"], ["launch", "--dry-run"], ["diff", path]):
        assert main([*command, path]) == ExitCode.BAD_INPUT
        assert capsys.readouterr().out == ""


def test_every_rule_that_is_broken_is_named(made, read, stamped) -> None:
    document = changed(changed(plan_to_dict(made), "layout.dp", 999), "layout.hsdp", 7)
    with pytest.raises(InputError) as error:
        read(stamped(document))
    assert len(error.value.mistakes) >= 3
    assert all("this layout cannot run" in each.message for each in error.value.mistakes)
    assert all(each.where.endswith("it.json") for each in error.value.mistakes)


@pytest.mark.parametrize(
    ("path", "value"),
    [("layout.pp", 10_000_000), ("layout.interleave", 10_000_000), ("step_seconds", 10**400), ("mfu", 10**39)],
)
def test_what_is_far_too_large_is_refused_at_once(path, value, made, read, stamped) -> None:
    with pytest.raises(InputError):
        read(stamped(changed(plan_to_dict(made), path, value)))


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999", "9" * 5000, "9" * 400])
def test_what_is_no_number_is_refused(number, made, read) -> None:
    text = plan_to_json(made).replace(f'"mfu": {made.mfu!r}', f'"mfu": {number}')
    with pytest.raises(InputError, match="not JSON"):
        read(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("certificate", {}),
        ("certificate", {"status": "optimal"}),
        ("certificate", 5),
        ("minimum.above", "tp=x"),
        ("certificate.num_pruned", []),
        ("band", {}),
        ("band.unseen", "device"),
        ("memory.0.lines", [{}]),
        ("memory.0.lines.0.formula", 5),
        ("memory.0.lines.0.name", "mystery"),
        ("memory.0.host", 3),
        ("time.0.bound", None),
        ("options", {}),
        ("options.headroom", 2),
        ("options.headroom", True),
        ("options.allow_offload", 1),
        ("options.pins", "tp=8"),
        ("options.pins", [3]),
        ("options.objective", "joy"),
        ("batch_choice", {"chosen": 3}),
        ("made_by", {}),
        ("calibration", []),
    ],
)
def test_a_part_of_a_wrong_kind_is_refused(path, value, made, read, stamped) -> None:
    with pytest.raises(InputError, match=r"not a valid plan document|was edited"):
        read(stamped(changed(plan_to_dict(made), path, value)))


def test_files_without_end_and_standard_input_are_limited(capsys) -> None:
    assert main(["explain", "/dev/zero"]) == ExitCode.BAD_INPUT
    assert "more than 33,554,432 bytes" in capsys.readouterr().err
    command = [sys.executable, "-m", "planner", "explain", "-"]
    with Path("/dev/zero").open("rb") as zeros:
        done = subprocess.run(command, stdin=zeros, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "standard input has more than" in done.stderr


# --- another version --------------------------------------------------------------------------------------------


def older(made: Plan, **changes: Any) -> dict[str, Any]:
    """The plan as a version with other formulas would have written it: all times are 10 % longer."""
    slow = replace(made, step_seconds=made.step_seconds * 1.1, mfu=made.mfu / 1.1, **changes)
    return plan_to_dict(slow) | {"made_by": OTHER}


def test_a_plan_of_other_formulas_is_priced_anew_and_both_figures_are_said(made, read, stamped) -> None:
    found, told = read(stamped(older(made)))
    assert len(told) == 1
    assert told[0].startswith("this plan was made with planner 0.0.9: it said ")
    assert found.step_seconds == made.step_seconds
    assert (found.made_by, found.proved_by) == (made.made_by, replace(made.made_by, **OTHER))
    assert replace(found, proved_by=None) == made
    again, told = read(plan_to_json(found))
    assert (again, told) == (found, [])


def test_a_plan_of_the_time_before_axes_of_runs_were_a_key_is_read(made, read, stamped) -> None:
    document = older(made)
    for keys in (document["minimum"]["keys"], document["certificate"]["recommendation"]["keys"]):
        del keys["unseen"]
    found, told = read(stamped(document))
    assert len(told) == 1
    assert found.minimum == made.minimum


def test_its_proof_is_not_said_of_the_figures_shown(made, stamped, tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    path.write_text(stamped(older(made)))
    assert main(["explain", str(path), "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().err.startswith("note: this plan was made with planner 0.0.9: it said ")
    page = (tmp_path / "page.html").read_text()
    assert "Proved by planner 0.0.9 with other formulas, not of the figures shown" in page


def test_an_edited_plan_of_another_version_is_refused(made, read) -> None:
    with pytest.raises(InputError, match="was edited"):
        read(json.dumps(older(made)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_has_no_price_is_refused(made, read, stamped) -> None:
    document = changed(older(made), "engine.memory.states.mixed.weights", 1e308)
    with pytest.raises(InputError, match="must not be more than 1e24"):
        read(stamped(document))


def test_a_runner_up_that_cannot_run_any_more_is_left_out(made, read, stamped) -> None:
    document = changed(older(made), "runners_up.0.layout.zero", 0)
    document = changed(document, "runners_up.0.layout.hsdp", 2)
    found, _ = read(stamped(document))
    assert len(found.runners_up) == len(made.runners_up) - 1
    with pytest.raises(InputError, match="was edited"):
        read(stamped(document | {"made_by": plan_to_dict(made)["made_by"]}))


def test_the_user_s_own_corrections_are_carried_by_the_plan(read, tmp_path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("entries:\n- {slowdown: 1.5, low: 0.9, high: 1.2, num_rows: 4}\n")
    plan = search(job(calibration=own), Constraints.parse(["pp=2"]))
    shipped = search(job(), Constraints.parse(["pp=2"]))
    assert plan.made_by.calibration == "own"
    assert plan.made_by.digest != shipped.made_by.digest
    own.unlink()
    assert read(plan_to_json(plan)) == (plan, [])


def test_evidence_of_the_user_s_own_stays_in_the_band(read, tmp_path) -> None:
    own = tmp_path / "own.yaml"
    evidence = "{device: a100-80gb, engine: torch, precision: '16', experts: false, axes: pp, ratios: [0.7, 1.0, 1.4]}"
    own.write_text(f"entries:\n- {{slowdown: 1.5}}\nevidence:\n- {evidence}\n")
    plan = search(job(calibration=own), Constraints.parse(["pp=2"]), within=0.02)
    assert plan.band
    assert plan.minimum.keys.unseen == 0
    assert read(plan_to_json(plan)) == (plan, [])


def test_shipped_corrections_are_those_of_the_shipped_file(made) -> None:
    assert made.made_by.calibration == "shipped"
    assert made_by.made_by(replace(job(), evidence=shipped_calibration().evidence[1:])).calibration == "own"


# --- the digest -------------------------------------------------------------------------------------------------


def digest_of(package: Path) -> str:
    """The digest that a copy of the package prints."""
    program = (
        "from planner.made_by import made_by\n"
        "from planner.specs.load import load_job\n"
        "job = load_job(model='tiny-gpt', cluster='dgx-a100', global_batch_size=8)\n"
        "print(made_by(job).digest, made_by(job).calibration)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=package.parent, env={"PATH": ""}, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def wheel(tmp_path) -> Path:
    """The package as in a wheel, with the shipped documents inside."""
    root, package = Path(planner.__file__).parents[1], tmp_path / "site" / "planner"
    shutil.copytree(root / "planner", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("models", "clusters"):
        shutil.copytree(root / name, package / "library" / name)
    return package


def test_the_digest_is_that_of_formulas_and_corrections_wherever_they_are(wheel) -> None:
    here = made_by.made_by(load_job(model="tiny-gpt", cluster="dgx-a100", global_batch_size=8)).digest
    assert digest_of(wheel) == f"{here} shipped\n"
    for name, matters in (("cost/flops.py", True), ("layout.py", True), ("show/words.py", False)):
        path = wheel / name
        before = path.read_bytes()
        path.write_bytes(before + b"# more\n")
        assert (digest_of(wheel) != f"{here} shipped\n") == matters, name
        path.write_bytes(before)
    corrections = wheel / "calibration.json"
    corrections.write_text(corrections.read_text() + "\n")
    assert digest_of(wheel) not in (f"{here} shipped\n", f"{here} own\n")


# --- format 1 ---------------------------------------------------------------------------------------------------


def of_format_1(plan: Plan) -> dict[str, Any]:
    """The plan as the first version wrote it."""
    document = plan_to_dict(plan) | {"format": 1, "planner_version": "0.1.0"}
    del document["made_by"], document["checksum"], document["proved_by"]
    return document | {"certificate": document["certificate"] or {}}


@pytest.mark.parametrize(
    "words",
    [
        "plan llama2-7b dgx-a100 --nodes 2 --seq-len 4096 --global-batch 64",
        "plan llama2-7b dgx-a100 --gpus 4 --global-batch 8 --headroom 10% --objective memory --allow-offload",
        "plan tiny-llama local-cpu --gpus 2 --global-batch 8 --engine fsdp --precision fp32 --set training.seed=7",
        "plan llama2-7b mixed-a100-h100 --global-batch 64 --seq-len 4096 --pin mbs<=2 --forbid zero=3,dp=2",
        "plan llama2-7b dgx-a100 --nodes 1 --global-batch 16..18 --set cluster.price=9USD/h --set model.num_layers=30",
    ],
)
def test_the_command_that_plans_again_makes_the_same_plan(words, tmp_path, capsys) -> None:
    assert main([*shlex.split(words), "--json"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "plan.json"
    path.write_text(text)
    path.write_text(json.dumps(of_format_1(read_plan(path))))
    assert main(["explain", str(path)]) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "not a valid plan document of format 3, which this planner reads: it has format 1" in said
    (command,) = [line.strip() for line in said.splitlines() if line.strip().startswith("planner ")]
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    again, was = json.loads(capsys.readouterr().out), json.loads(text)
    for section in ("waterfall", "rates", "peaks", "alternatives", "assumed", "checksum"):
        again.pop(section, None)
        was.pop(section, None)
    assert again == was


def test_a_plan_without_a_job_that_can_be_read_says_what_is_wrong(made, tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    for key, value, words in (
        ("model", {"name": "x"}, "num_layers"),
        ("training", None, "training"),
        ("options", {"pins": 3}, "pins"),
        ("batch_choice", 7, "int"),
    ):
        document = of_format_1(made) | {key: value}
        if value is None:
            del document[key]
        path.write_text(json.dumps(document))
        assert main(["plan", "--from", str(path)]) == ExitCode.BAD_INPUT
        said = capsys.readouterr().err
        assert "is not a plan with a job that this planner reads" in said
        assert words in said


# --- any edit at all --------------------------------------------------------------------------------------------

NASTY = [
    None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e308, 10**30, -(10**15), "", "x", "none", "tp=8", "\ud800",
    "\x1b[2J", [], [0], ["x"], [[]], {}, {"name": "x"}, {"stage": 0},
]  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of values in a document: leaves, and their containers."""
    if path:
        yield path
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield from places(data[key], (*path, key))


def edit_one_place(rng: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(document)
    inner: Any = found
    *steps, last = rng.choice(list(places(document)))
    for step in steps:
        inner = inner[step]
    value, choices = inner[last], [rng.choice(NASTY), rng.choice(NASTY)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        choices += [value * 2, value + 1, -value, value * (1 + 1e-6)]
    inner[last] = rng.choice(choices)
    return found


def check_edits(seed: int, made: Plan, path: Path, stamped: Callable[[dict[str, Any]], str]) -> None:
    """The result is an equal plan or a mistake with a message, also if the checksum fits the edited document."""
    document = plan_to_dict(made)
    edited = edit_one_place(random.Random(seed), document)
    is_same = json.dumps(edited) == json.dumps(document)
    for text in (json.dumps(edited), stamped(edited)):
        path.write_text(text)
        try:
            found = read_plan(path)
        except InputError as error:
            said = str(error)
        else:
            said = ""
        assert said.replace("\n", "").isprintable()
        if said:
            assert not is_same
        else:
            assert found == made or text == stamped(edited)
            priced = estimate(job_of(found), found.layout)
            assert found.step_seconds == pytest.approx(priced.step_seconds, rel=1e-9)
            assert found.fits == priced.fits


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_edit_of_a_plan(made, tmp_path, stamped) -> None:
    for seed in range(75):
        check_edits(seed, made, tmp_path / "it.json", stamped)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_many_edits_of_a_plan(made, tmp_path, stamped) -> None:
    for seed in range(75, 5_000):
        check_edits(seed, made, tmp_path / "it.json", stamped)
