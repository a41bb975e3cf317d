"""All programs under all starters: scripts that bash and shellcheck accept, and complete outputs as golden files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from planner.emit.bundle import bundle_of, write_bundle
from planner.emit.programs import PROGRAMS
from planner.emit.starters import STARTERS
from planner.emit.target import How
from planner.layout_text import parse_layout
from planner.run_arguments import RunArguments
from planner.search.given import plan_for_layout
from planner.specs.load import load_job

LAYOUTS = {
    "accelerate": ("fsdp", "cp=2,zero=3,recompute=full"),
    "deepspeed": ("deepspeed", "zero=2,offload=optimizer,recompute=full"),
    "megatron": ("megatron", "tp=2,pp=2,zero=1,sp=1,layers_per_stage=9/7"),
    "megatron-bridge": ("megatron-bridge", "tp=2,pp=2,zero=1,sp=1,layers_per_stage=9/7"),
    "ms-swift": ("megatron", "tp=2,pp=2,zero=1,sp=1,layers_per_stage=9/7"),
    "primus": ("megatron", "tp=2,pp=2,zero=1,sp=1,layers_per_stage=9/7"),
    "torchtitan": ("torchtitan", "tp=2,zero=3,sp=1,recompute=full"),
    "torchtitan-0.3": ("torchtitan", "tp=2,zero=3,sp=1,recompute=full"),
}
HOSTILE = "a b'\"$(touch owned)`touch owned`;&.jsonl"


@cache
def plan_of(program):
    engine, layout = LAYOUTS[program]
    job = load_job(
        model="llama3.2-1b", cluster="dgx-h100", nodes=2, engine=engine, global_batch_size=64, sequence_length=1024
    )
    return plan_for_layout(job, parse_layout(layout, num_layers=job.model.num_layers, num_devices=16))


def how_of(program, data):
    given = {"data": (data,), "tokenizer": Path("/data/tokenizer")}
    return How(arguments=RunArguments(**{key: given[key] for key in given if key in PROGRAMS[program].takes}))


@pytest.mark.parametrize("on", STARTERS)
@pytest.mark.parametrize("program", LAYOUTS)
def test_bash_and_shellcheck_accept_the_scripts(program, on, tmp_path):
    write_bundle(plan_of(program), tmp_path / "out", program, on, how=how_of(program, HOSTILE), force_unfit=True)
    scripts = [path for path in (tmp_path / "out").iterdir() if path.suffix in (".sh", ".sbatch")]
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    found = subprocess.run([shellcheck, "--exclude=SC2016", *scripts], capture_output=True, text=True, check=False)
    assert found.stdout == ""


@pytest.mark.parametrize("program", LAYOUTS)
def test_what_a_program_gets_is_the_golden_one(program, golden):
    texts = bundle_of(plan_of(program), program, how=how_of(program, "/data/a b.jsonl"), force_unfit=True).texts
    own = {name: text for name, text in texts.items() if name != "train.py"}  # a file of its own in the tree
    golden(f"emit-{program}.txt", "".join(f"# --- {name}\n{text}" for name, text in sorted(own.items())))


@pytest.mark.parametrize("on", ["kubeflow", "skypilot"])
def test_what_a_starter_gets_is_the_golden_one(on, golden):
    made = bundle_of(plan_of("torchtitan"), on=on, how=how_of("torchtitan", "/data/a.jsonl"), force_unfit=True)
    golden(f"emit-{made.script}", made.texts[made.script])
