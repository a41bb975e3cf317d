"""Megatron-Bridge's own recipes take the emitted overrides, and the configuration that it validates is the plan's.

MEGATRON_BRIDGE and MEGATRON_LM name checkouts (067f987d and d98e8a64 of 2026-08-22 were read), REAL_PYTHON an
interpreter that has transformers, omegaconf, hydra and triton; `python tools/real_parsers.py megatron-bridge` builds
one. Recipes of Llama nest the keys of the model in `model.transformer`; recipes of Qwen3 stand for all others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_plans import LAYOUTS, plan_of

from planner.emit.programs import PROGRAMS
from planner.emit.programs.bridge import _shown, overrides_for
from planner.emit.programs.hugging_face_model import config_of
from planner.emit.target import values_of

CHECKOUTS = [os.environ.get(name) for name in ("MEGATRON_BRIDGE", "MEGATRON_LM")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in CHECKOUTS, reason="MEGATRON_BRIDGE and MEGATRON_LM do not both name checkouts"),
]
RECIPES = {
    "llama3-8b": "llama3_8b_pretrain_2gpu_h100_bf16_config",
    "qwen3-8b": "qwen3_8b_pretrain_4gpu_h100_bf16_config",
    "qwen3-30b-a3b": "qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
}
OF_LLAMA = [case for case in LAYOUTS if case[0] == "llama3-8b"]
EVEN = [case for case in OF_LLAMA if "layers" not in case[2]]
CASES = [*OF_LLAMA, *(("qwen3-8b", *rest) for _, *rest in EVEN[2:7]), *(c for c in LAYOUTS if "qwen3" in c[0])]


@pytest.mark.timeout(600)
def test_a_recipe_takes_every_override_and_the_configuration_is_the_plans():
    cases = [case for case in CASES if case[0] in RECIPES]
    plans, jobs = [plan_of(case, "megatron-bridge") for case in cases], []
    for case, plan in zip(cases, plans, strict=True):
        values = values_of(PROGRAMS["megatron-bridge"], plan)
        words = [f"{path}={_shown(value)}" for path, value in overrides_for(values, plan).items()]
        config = {
            key: value for key, value in config_of(plan.model).items() if key not in ("rope_theta", "rope_scaling")
        }
        jobs.append(
            [
                plan.layout.world_size,
                config,
                ["--recipe", RECIPES[case[0]], "--mode", "pretrain", "--dataset", "mock", *words],
            ]
        )
    done = subprocess.run(
        [os.environ.get("REAL_PYTHON", sys.executable), Path(__file__).with_name("megatron_bridge.py"), *CHECKOUTS],
        input=json.dumps(jobs), capture_output=True, text=True, check=True, timeout=500,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    wrong = []
    for case, plan, found in zip(cases, plans, json.loads(done.stdout), strict=True):
        layout, training = plan.layout, plan.training
        wanted = {
            "model.tensor_model_parallel_size": layout.tp,
            "model.pipeline_model_parallel_size": layout.pp,
            "model.context_parallel_size": layout.cp,
            "model.expert_model_parallel_size": layout.ep,
            "model.virtual_pipeline_model_parallel_size": layout.interleave if layout.interleave > 1 else None,
            "model.sequence_parallel": bool(layout.sp and layout.tp > 1),
            "model.num_layers": plan.model.num_layers,
            "model.hidden_size": plan.model.hidden_size,
            "model.seq_length": training.sequence_length,
            "model.bf16": training.precision != "fp16",
            "train.micro_batch_size": layout.mbs,
            "train.global_batch_size": training.global_batch_size,
            "optimizer.lr": training.learning_rate,
            "ddp.use_distributed_optimizer": layout.zero > 0,
            "ddp.num_distributed_optimizer_instances": layout.hsdp,
        }
        if "refused" in found:
            wrong.append(f"{case}: {found['refused']}")
            continue
        off = {key: value for key, value in wanted.items() if found.get(key) != value}
        wrong += [f"{case}: {key} is {found.get(key)}, planned {value}" for key, value in off.items()]
    assert not wrong, "\n".join(wrong)
    assert len(cases) >= 20
