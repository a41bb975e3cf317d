"""Axes that a program was seen not to run: not searched, refused when pinned or emitted, and priced all the same.

No axis is banned today. The bans below were lifted by runs of tests/executed; here they stand again for a test.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from html import unescape

import pytest

from planner.answers.layout_remedies import layout_remedies
from planner.api import estimate_layout, explain_layout, plan_job
from planner.cli import main
from planner.emit.programs import PROGRAMS
from planner.errors import ExitCode, InputError
from planner.plan import write_plan
from planner.search.space.constraints import Constraints
from planner.search.space.space import Space
from planner.shipped import engine_profiles
from planner.show.nothing_fits import nothing_fits_to_dict
from planner.specs import banned
from planner.specs.by_name import load_engine
from planner.specs.load import load_job

SEEN = (  # the versions that ran once, and a word of what they did
    ("fsdp", "tp", "Accelerate 1.15.0 with transformers 5.23.0", "whole"),
    ("deepspeed", "tp", "DeepSpeed 0.19.8 with transformers 5.23.0", "stopped before the first step"),
    ("deepspeed", "cp", "DeepSpeed 0.19.8 with Accelerate 1.15.0", "stopped before the first step"),
)
WORK = {"gpus": 4, "global_batch": 8, "seq_len": 128}
WORDS = ["--gpus", "4", "--global-batch", "8", "--seq-len", "128"]


ROWS = tuple(
    banned.Ban(program="accelerate" if engine == "fsdp" else engine, axis=axis, tried=tried, seen=f"{word} it was")
    for engine, axis, tried, word in SEEN
)


@pytest.fixture
def bans(monkeypatch):
    monkeypatch.setattr(banned, "BANS", ROWS)


def priced(engine, axis):
    return estimate_layout("tiny-llama", "dgx-a100", layout=f"{axis}=2,zero=3,sp=0", engine=engine, **WORK)


def test_a_row_is_a_ban_and_bans_no_run_that_a_test_executes():
    rows = banned._PROGRAMS
    assert {(each.program, each.axis) for each in banned.BANS} == {
        (row.get("program", name), axis) for name, row in rows.items() for axis in row.get("banned", {})
    }
    for row in rows.values():
        kinds = [axis for kind in ("banned", "executed", "constructed") for axis in row.get(kind, ())]
        assert len(kinds) == len({*kinds})
    assert {row.get("program", name) for name, row in rows.items()} <= {*PROGRAMS}


def test_a_row_bans_for_the_program_that_it_names_or_else_is_called():
    stopped = {"tried": "version 1", "banned": {"tp": "stopped"}}
    found = banned._bans({"hf-trainer": {"program": "accelerate", **stopped}, "torch": stopped, "megatron": {}})
    assert [(each.program, each.axis, each.words) for each in found] == [
        (program, "tp", "with tp > 1 a run of version 1 stopped") for program in ("accelerate", "torch")
    ]


@pytest.mark.usefixtures("bans")
@pytest.mark.parametrize(("engine", "axis", "tried", "word"), SEEN)
def test_no_search_tries_a_banned_axis(engine, axis, tried, word):  # noqa: ARG001 - one table for all tests
    job = load_job(
        model="llama3-8b", cluster="dgx-a100", engine=engine, nodes=2, global_batch_size=64, sequence_length=4096
    )
    found = Space(job, Constraints()).partitions()
    assert len(found) > 0
    assert {*getattr(found, axis).tolist()} == {1}
    assert axis in job.engine.can.axes  # priced


@pytest.mark.usefixtures("bans")
@pytest.mark.parametrize("sign", ["={}", ">={}", ">1", "!=1"])
@pytest.mark.parametrize(("engine", "axis", "tried", "word"), SEEN)
def test_a_pin_on_a_banned_axis_is_refused_with_what_was_tried_and_the_way_out(engine, axis, tried, word, sign, capsys):
    words = ["plan", "tiny-llama", "dgx-a100", *WORDS, "--engine", engine, "--pin", axis + sign.format(2)]
    assert main(words) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert tried in told
    assert word in told
    assert f"{axis}=1" in told
    offered = set(re.findall(r"[a-z-]+", told.split("--engine")[-1])) - {"or"}
    assert offered >= {"torch", "torchtitan", "megatron"}
    assert offered & {"fsdp", "deepspeed", "nanotron"} == ({"fsdp"} if axis == "cp" else set())


@pytest.mark.usefixtures("bans")
def test_a_pin_that_leaves_the_axis_at_one_is_obeyed():
    plan = plan_job("tiny-llama", "dgx-a100", engine="fsdp", pin=["tp=1", "cp<=4"], **WORK)
    assert plan.layout.tp == 1


@pytest.mark.usefixtures("bans")
@pytest.mark.parametrize(("engine", "axis", "tried", "word"), SEEN)
def test_emit_and_launch_refuse_a_plan_that_holds_it(engine, axis, tried, word, tmp_path, capsys):
    """An older plan, or one that another tool wrote: read and priced, and not started."""
    path = tmp_path / "plan.json"
    write_plan(priced(engine, axis), path)
    (program,) = load_engine(engine).emits
    commands = (
        ["emit", str(path), "-o", str(tmp_path / "out")],
        ["emit", str(path), "--to", program, "--on", "slurm", "--smoke", "-o", str(tmp_path / "out")],
        ["launch", str(path), "--dry-run", "--output", str(tmp_path / "run")],
    )
    for each in commands:
        assert main(each) == ExitCode.BAD_INPUT
        told = capsys.readouterr().err
        assert tried in told
        assert word in told
        assert f"plan again with --pin {axis}=1, or --engine " in told
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.usefixtures("bans")
@pytest.mark.parametrize(("engine", "axis", "tried", "word"), SEEN)
def test_explain_prices_it_and_says_that_no_program_runs_it(engine, axis, tried, word, tmp_path, capsys, monkeypatch):
    plan = priced(engine, axis)
    words = ["explain", "tiny-llama", "dgx-a100", *WORDS, "--engine", engine, "--layout", f"{axis}=2,zero=3,sp=0"]
    page = tmp_path / "page.html"
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main([*words, "--html", str(page)]) == 0
    assert main(words) == 0
    for text in (document["not_run"], unescape(page.read_text()), " ".join(capsys.readouterr().out.split())):
        assert f"no emitted program runs this: with {axis} > 1 a run of {tried}" in text
        assert word in text
    monkeypatch.setattr(banned, "BANS", ())
    free = priced(engine, axis)
    assert (free.step_seconds, free.memory) == (plan.step_seconds, plan.memory)
    assert "not_run" not in json.loads(explain_layout(free).to_json())


@pytest.mark.usefixtures("bans")
def test_the_list_of_engines_says_which_axes_are_priced_only(capsys):
    only = {each["name"]: each["priced_only"] for each in engine_profiles() if each["priced_only"]}
    assert only == {"fsdp": ["tp"], "deepspeed": ["cp", "tp"]}
    assert main(["engines"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["fsdp"].split()[-2:] == ["accelerate", "tp"]
    assert rows["deepspeed"].split()[-3:] == ["deepspeed", "cp,", "tp"]
    assert rows["torch"].split()[-1] == "torch"


def test_every_axis_that_an_engine_offers_was_executed_constructed_or_banned(capsys):
    """No axis of an engine is offered on the word of a program's parser alone, and no row says two things."""
    assert main(["engines", "--json"]) == 0
    runs = {each["name"]: each["runs"] for each in json.loads(capsys.readouterr().out)}
    assert runs["megatron"]["megatron"]["cp"] == {"state": "constructed", "tried": "Megatron-LM d98e8a64"}
    assert runs["deepspeed"]["deepspeed"]["pp"]["run"].split()[1].startswith("pp=2")
    assert runs["fsdp"]["accelerate"]["ep"]["state"] == runs["deepspeed"]["deepspeed"]["cp"]["state"] == "executed"
    untested = {
        (name, program, axis)
        for name in runs  # an engine without a program prices plans, and none of them can be emitted
        for program, rows in runs[name].items()
        for axis in load_engine(name).can.axes
        if axis not in rows
    }
    assert untested == set()


NAMED = {
    "torch torch": "our trainer", "fsdp accelerate": "Accelerate under the Trainer", "megatron megatron": "Megatron-LM",
    "deepspeed deepspeed": "DeepSpeed under the Trainer",
}  # fmt: skip
"""Engine and program of `planner engines --json` -> what is started, unless the run has adapters or a pipeline."""


def started(key, run):
    """The program that a run starts."""
    if "lora_rank" in run:
        return "PEFT"
    return "DeepSpeed's pipeline.py" if key == "deepspeed deepspeed" and " pp=" in run else NAMED[key]


def test_six_programs_run_what_is_emitted_for_them(capsys):
    """Each run starts one program; what is only built, as by torchtitan and Megatron-Bridge, is counted apart."""
    assert main(["engines", "--json"]) == 0
    states = {"executed": {}, "constructed": {}}
    for engine in json.loads(capsys.readouterr().out):
        for program, axes in engine["runs"].items():
            for axis, row in axes.items():
                states[row["state"]].setdefault(f"{engine['name']} {program}", {})[axis] = row.get("run", "")
    counts = Counter(started(key, run) for key, axes in states["executed"].items() for run in axes.values())
    assert set(counts) == {*NAMED.values(), "PEFT", "DeepSpeed's pipeline.py"}
    assert len(counts) == 6
    assert sum(counts.values()) >= 71
    assert min(counts.values()) >= 2
    apart = {key: len(axes) for key, axes in states["constructed"].items() if key not in states["executed"]}
    sharded = {"megatron-fsdp megatron": 5, "megatron-fsdp primus": 5, "megatron-bridge megatron-bridge": 5}
    of_megatron = {"megatron primus": 6, "megatron ms-swift": 6}
    assert apart == {**sharded, **of_megatron, "torchtitan torchtitan-0.3": 5, "torchtitan torchtitan": 5}


@pytest.mark.usefixtures("bans")
def test_answers_offer_no_banned_axis():
    """Changes that make a layout fit, other layouts that a question asks for, and what is said when nothing fits."""
    plan = estimate_layout(
        "llama3-70b", "dgx-h100", layout="zero=3,recompute=none", engine="fsdp", gpus=16, global_batch=16, seq_len=4096
    )
    job = load_job(
        model="llama3-70b", cluster="dgx-h100", engine="fsdp", nodes=2, global_batch_size=16, sequence_length=4096
    )
    changes = [each.change for each in layout_remedies(job, plan.layout)]
    assert changes
    assert not any("tp=" in each for each in changes)
    (answer,) = explain_layout(priced("fsdp", "cp"), why_not="tp=2").sections.why_not
    assert any("Accelerate 1.15.0" in each for each in answer.outcome.rules)
    assert [each.split(":")[0] for each in nothing_fits_to_dict(plan)["notes"]] == ["engine fsdp"]


def test_an_axis_is_banned_for_an_engine_only_if_all_its_programs_are(monkeypatch):
    row = banned.Ban(program="megatron", axis="cp", tried="Megatron-LM", seen="stopped")
    monkeypatch.setattr(banned, "BANS", (row,))
    assert banned.bans_of(load_engine("megatron")) == {}  # ms-swift is another of its programs
    assert banned.bans_of(load_engine("megatron-fsdp")) == {}  # and so is Primus
    monkeypatch.setattr(banned, "BANS", (row, banned.Ban(program="primus", axis="cp", tried="Primus", seen="stopped")))
    assert banned.bans_of(load_engine("megatron-fsdp"))["cp"].program == "primus"  # the last that was tried
    assert banned.bans_of(load_engine("nanotron")) == {}
    others = ("ms-swift", "primus")
    both = (row, *(banned.Ban(program=each, axis="cp", tried=each, seen="stopped") for each in others))
    monkeypatch.setattr(banned, "BANS", both)
    with pytest.raises(InputError, match="engine megatron: with cp > 1"):
        plan_job("tiny-llama", "dgx-a100", engine="megatron", pin="cp=2", **WORK)


FILE = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 4
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}
parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 2}
"""


@pytest.mark.usefixtures("bans")
def test_a_file_with_a_banned_axis_is_priced_and_planned_without_it(tmp_path, capsys):
    path = tmp_path / "accelerate.yaml"
    path.write_text(FILE, encoding="utf-8")
    words = ["--from", str(path), "--model", "tiny-llama", "dgx-a100", "--global-batch", "8", "--seq-len", "128"]
    assert main(["explain", *words, "--json"]) == 0
    priced_as_it_is = json.loads(capsys.readouterr().out)
    assert priced_as_it_is["layout"]["tp"] == 2
    assert "no emitted program runs this" in priced_as_it_is["not_run"]
    assert main(["plan", *words, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["layout"]["tp"] == 1
    assert json.loads(told.out)["own"]["layout"]["tp"] == 2
