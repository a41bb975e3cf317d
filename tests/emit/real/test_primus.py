"""Primus' own parser and builder of arguments: every experiment is read and checked, and compared with its plan.

PRIMUS names a checkout with its submodule third_party/Megatron-LM (fd1eeabb and d3528a21 were read), REAL_PYTHON an
interpreter that has torch, triton and einops; `python tools/real_parsers.py primus` builds one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_expected import differences
from megatron_plans import LAYOUTS, SHARDED, plan_of

from planner.emit.bundle import bundle_of
from planner.emit.programs import PROGRAMS
from planner.emit.programs.primus import FILE
from planner.emit.target import How, refusals

CHECKOUT = os.environ.get("PRIMUS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHECKOUT is None, reason="PRIMUS names no checkout of Primus"),
    pytest.mark.timeout(900),
]
TARGET = PROGRAMS["primus"]
OWN = json.loads((Path(__file__).parents[1] / "primus_defaults.json").read_text(encoding="utf-8"))
"""What the quick tests take for the values of Primus' files."""
AXES = {"megatron": {"tp", "pp", "dp", "cp", "ep", "etp"}, "megatron-fsdp": {"tp", "dp", "cp", "ep", "etp"}}
"""Engine -> what its plans divide, all of it in some plan."""


def test_every_experiment_is_accepted_and_every_value_is_the_plans(tmp_path):
    plans, jobs = [], []
    for case, engine in [*((each, "megatron") for each in LAYOUTS), *((each, "megatron-fsdp") for each in SHARDED)]:
        plan = plan_of(case, engine)
        if refusals(TARGET, plan):
            continue
        path = tmp_path / f"{len(jobs)}.yaml"
        path.write_text(bundle_of(plan, "primus", how=How(), force_unfit=True).texts[FILE], encoding="utf-8")
        plans.append(plan)
        jobs.append([plan.layout.world_size, dict(TARGET.environment(plan)), str(path)])
    done = subprocess.run(
        [os.environ.get("REAL_PYTHON", sys.executable), Path(__file__).with_name("primus_arguments.py"), str(CHECKOUT)],
        input=json.dumps(jobs), capture_output=True, text=True, check=False, timeout=800, cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    wrong, divided = [], {engine: set() for engine in AXES}
    for plan, answer in zip(plans, json.loads(done.stdout), strict=True):
        found = answer.get("before", {})
        faults = [answer["refused"][:300]] if "refused" in answer else differences(found, plan)
        wrong += [f"{plan.model.name}, {plan.layout}: {each}" for each in (*faults, *answer["unknown"])]
        files = answer["files"]
        wrong += [f"Primus' files say {key}: {files[key]}" for key in OWN.keys() & files if files[key] != OWN[key]]
        divided[plan.engine.name] |= {axis for axis in AXES["megatron"] if getattr(plan.layout, axis) > 1}
        config = answer.get("config", {})
        degrees = (config.get("tensor_model_parallel_size"), config.get("pipeline_model_parallel_size"))
        if degrees != (plan.layout.tp, plan.layout.pp):
            wrong.append(f"{plan.model.name}, {plan.layout}: the model is built for tp and pp of {degrees}")
    assert wrong == []
    assert divided == AXES
    assert len(plans) >= 60
