"""torchtitan's own ConfigManager, ParallelDims and models: every value of emitted files compared with the plan.

Release 0.3.0 comes from the package index; TORCHTITAN names a checkout of its repository (b5bcd76c was read), and
without one the tests of the newest form skip, saying so. REAL_PYTHON is an interpreter that has either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_torchtitan import assert_same, read_back
from torchtitan_expected import CASES, expected, plan_of, positions, recompute

from planner.cost.parameters import num_params
from planner.emit.bundle import write_bundle
from planner.emit.programs.hugging_face import flat
from planner.emit.target import How
from planner.layout_text import parse_layout
from planner.run_arguments import RunArguments
from planner.search.given import plan_for_layout
from planner.specs.load import load_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
CHECKOUT = os.environ.get("TORCHTITAN")
PYTHON = os.environ.get("REAL_PYTHON", sys.executable)
TARGETS = ("torchtitan", "torchtitan-0.3")


def reads(path: str | None) -> bool:
    code = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torchtitan'))"
    return subprocess.run([PYTHON, "-c", code], env=environment(path), check=False).returncode == 0


def environment(path: str | None) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    further = [each for each in (path, os.environ.get("TORCHTITAN_PACKAGES")) if each]
    return own | ({"PYTHONPATH": os.pathsep.join(further)} if further else {})


def source_of(to: str) -> str | None:
    """The folder that a target's torchtitan is imported from, or None for the installed release."""
    path = CHECKOUT if to == "torchtitan" else None
    if to == "torchtitan" and CHECKOUT is None:
        pytest.skip("TORCHTITAN names no checkout of torchtitan")
    if not reads(path):
        pytest.skip(f"{PYTHON} has no torchtitan")
    return path


@pytest.fixture(scope="module", params=TARGETS)
def answers(request, tmp_path_factory):
    to, path = request.param, source_of(request.param)
    plans, folders = [plan_of(case) for case in CASES], []
    for plan in plans:
        folders.append(tmp_path_factory.mktemp("case"))
        how = How(arguments=RunArguments(data=("hf:allenai/c4",)))
        write_bundle(plan, folders[-1], to, how=how, force_unfit=True)
    done = subprocess.run(
        [PYTHON, HERE / "torchtitan_config.py"],
        input=json.dumps([[str(folder), 16] for folder in folders]),
        capture_output=True, text=True, check=True, timeout=500, env=environment(path),
    )  # fmt: skip
    return to, list(zip(CASES, plans, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))


def sections_of(saved):
    """The saved configuration with a single group of parameters instead of a list of one group."""
    (group,) = saved["optimizer"]["param_groups"]
    assert (group["pattern"], group["optimizer_name"]) == (".*", "AdamW")
    return flat({**saved, "optimizer": group["optimizer_kwargs"], "model_spec": {}})


def test_every_file_is_accepted_and_every_value_is_the_plans(answers):
    to, cases = answers
    wrong = []
    for case, plan, answer in cases:
        if "refused" in answer:
            wrong.append(f"{case}: {answer['refused']}")
            continue
        found = sections_of(answer["saved"])
        wanted = expected(plan, release=to != "torchtitan")
        for key, value in wanted.items():
            there = found.get(key)
            if json.loads(json.dumps(there)) != value:
                wrong.append(f"{case}: {key} is {there}, and not {value}")
        layout = plan.layout
        degrees = [layout.hsdp, layout.dp // layout.hsdp, layout.cp, layout.tp, layout.pp, layout.ep]
        if answer["degrees"] != degrees:
            wrong.append(f"{case}: degrees {answer['degrees']}, and not {degrees}")
        if answer["recompute"] != recompute(plan):
            wrong.append(f"{case}: recomputes as {answer['recompute']}")
        wrong += [
            f"{case}: rope {key} is {answer['rope'][key]}, and not {value}"
            for key, value in positions(plan, release=to != "torchtitan").items()
            if [float(each) if not isinstance(value, str) else each for each in answer["rope"][key]] != [value]
        ]
        if answer["epsilons"] != [plan.model.norm_epsilon]:
            wrong.append(f"{case}: epsilons {answer['epsilons']}")
    assert not wrong, "\n".join(wrong)


def test_the_model_has_the_parameters_that_were_priced(answers):
    """The program itself builds the model without memory; every weight matches, except its additional router biases."""
    for case, plan, answer in answers[1]:
        assert abs(answer["parameters"] - num_params(plan.model)) <= 2e-5 * answer["parameters"], case


def test_what_it_saves_reads_back_as_the_plan(answers):
    for _, plan, answer in answers[1]:
        assert answer["loss"] == (
            "CrossEntropyLoss.Config" if plan.training.loss == "whole" else "ChunkedLossWrapper.Config"
        )
        name, facts = read_back(json.dumps(answer["saved"]), plan)
        assert name == plan.model.name
        every = plan.model.moe is not None and plan.model.moe.num_dense_layers == 0
        assert_same(facts, plan, ("ffn_hidden_size",) if every else ())  # no layer has a block of that width


AXES = {
    "fsdp": ("tiny-llama", "dp=4,zero=3", 4),
    "dp_replicate": ("tiny-llama", "dp=4,zero=3,hsdp=2", 4),
    "tp": ("tiny-llama", "tp=2,dp=2,zero=3,sp=1", 4),
    "cp": ("tiny-llama", "cp=2,dp=2,zero=3", 4),
    "pp": ("tiny-llama", "pp=2,dp=2,zero=1", 4),
    "interleave": ("tiny-llama", "pp=2,dp=2,zero=1,interleave=2,schedule=interleaved", 4),
    "zbv": ("tiny-llama", "pp=2,dp=2,zero=1,schedule=zbv", 4),
    "gpipe": ("tiny-llama", "pp=2,dp=2,zero=1,schedule=gpipe", 4),
    "uneven stages": ("tiny-llama", "pp=2,dp=2,zero=1,layers_per_stage=3/1", 4),
    "ep": ("qwen3-30b-a3b", "dp=4,ep=4,zero=3", 4),
}


@pytest.mark.parametrize("to", TARGETS)
def test_ranks_that_torchtitan_builds_hold_the_ledgers_parameters(to, tmp_path):
    """Construction alone: no CPU runs fully_shard's step here, so these axes do not count as executed."""
    path = source_of(to)
    plans, folders = {}, {}
    for name, (model, text, world) in AXES.items():
        settings = ("training.steps=4", f"model.num_layers={2 if name == 'ep' else 4}")
        job = load_job(
            model=model, cluster="dgx-h100", engine="torchtitan", gpus=world, global_batch_size=8, sequence_length=128,
            settings=settings,
        )  # fmt: skip
        layout = parse_layout(f"{text},mbs=1", num_layers=job.model.num_layers, num_devices=world)
        plans[name], folders[name] = plan_for_layout(job, layout), tmp_path / name.replace(" ", "-")
        how = How(arguments=RunArguments(data=("hf:allenai/c4",)))
        write_bundle(plans[name], folders[name], to, how=how, force_unfit=True)
    done = subprocess.run(
        [PYTHON, HERE / "torchtitan_ranks.py"],
        input=json.dumps([[str(folders[name]), AXES[name][2]] for name in AXES]),
        capture_output=True, text=True, check=False, timeout=500,
        env=environment(os.pathsep.join(filter(None, (path, str(HERE.parents[2]))))),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    wrong, answers = [], json.loads(done.stdout.strip().splitlines()[-1])
    ranks = [(name, rank) for name, (*_, world) in AXES.items() for rank in range(world)]
    for (name, rank), seen in zip(ranks, answers, strict=True):
        layout = plans[name].layout
        stage = plans[name].memory[layout.coordinates(rank)["pp"]]
        lines = {line.name: float(line.num_bytes) for line in stage.lines}
        wanted = lines["optimizer_state"] / 3  # 4 bytes of fp32 weights beside 8 of two moments
        shape = {"dp_replicate": layout.hsdp, "cp": layout.cp, "tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
        if isinstance(seen, str) or abs(seen["bytes"] - wanted) > 256 or not shape.items() <= seen["degrees"].items():
            wrong.append(f"{name}, rank {rank}: {seen}, planned {wanted:.0f} and {shape}")
    assert wrong == []
