"""ms-swift's own `megatron sft` reads the emitted options, and divides the ranks as the plan does.

REAL_PYTHON is an interpreter that has ms-swift 4.6: `python tools/real_parsers.py ms-swift`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from megatron_plans import LAYOUTS, plan_of

from planner.emit.programs import PROGRAMS
from planner.emit.programs.hugging_face_model import config_of
from planner.emit.programs.megatron import as_flags
from planner.emit.programs.swift import options_for
from planner.emit.target import refusals, values_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PYTHON = os.environ.get("REAL_PYTHON", sys.executable)
TARGET = PROGRAMS["ms-swift"]
KINDS = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM",
}  # fmt: skip
"""Type of transformers, which is ms-swift's name for it, too -> its class."""
CUT = ("mixtral-8x7b", 4, "tp=2,pp=2,ep=4,etp=2,zero=1,mbs=2", ())
"""A plan that cuts experts, without replicas, which ms-swift does not have."""


def cases(folder):
    """Plans, and the words behind `megatron sft`; the model is a folder with its config.json."""
    for case in (*LAYOUTS, CUT):
        plan = plan_of(case)
        config = config_of(plan.model) or {}
        if config.get("model_type") not in KINDS or refusals(TARGET, plan):
            continue
        home = folder / plan.model.name
        home.mkdir(exist_ok=True)
        document = {**config, "architectures": [KINDS[config["model_type"]]], "dtype": "bfloat16"}
        (home / "config.json").write_text(json.dumps(document), encoding="utf-8")
        options = as_flags(options_for(values_of(TARGET, plan), plan), dashes=False)
        words = ["--model", str(home), "--model_type", config["model_type"], "--template", "chatml", "--dataset", "x"]
        yield plan, [*words, *(word for option in options for word in option)]


def test_ms_swift_divides_the_ranks_as_the_plan(tmp_path):
    code = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('swift'))"
    if subprocess.run([PYTHON, "-c", code], check=False).returncode:
        pytest.skip(f"{PYTHON} has no ms-swift")
    plans, words = zip(*cases(tmp_path), strict=True)
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("ms_swift.py")],
        input=json.dumps([[plan.layout.world_size, each] for plan, each in zip(plans, words, strict=True)]),
        capture_output=True, text=True, check=False, timeout=800, env=os.environ | {"PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for plan, found in zip(plans, json.loads(done.stdout.strip().splitlines()[-1]), strict=True):
        assert "refused" not in found, (found, plan.training)
        layout = plan.layout
        wanted = {
            "rest": [],
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "data_parallel_size": layout.dp,
            "num_microbatches": layout.num_microbatches(plan.training.global_batch_size),
            "sequence_parallel": bool(layout.sp),
            "use_distributed_optimizer": bool(layout.zero),
            "micro_batch_size": layout.mbs,
            "max_length": plan.training.sequence_length,
            "virtual_pipeline_model_parallel_size": layout.interleave if layout.interleave > 1 else None,
        }
        if plan.model.moe:
            wanted["expert_tensor_parallel_size"] = layout.etp
        assert {key: found[key] for key in wanted} == wanted
