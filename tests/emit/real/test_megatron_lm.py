"""Megatron-LM's own parser, from a checkout: every plan is parsed and validated, and every value compared with it.

MEGATRON_LM names the checkout (d98e8a64 of 2026-08-22 was read), REAL_PYTHON an interpreter that has torch, triton and
einops; `python tools/real_parsers.py megatron-lm` builds one.
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

from planner.emit.programs import PROGRAMS, megatron
from planner.emit.target import values_of

CHECKOUT = os.environ.get("MEGATRON_LM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no checkout of Megatron-LM"),
]
HERE = Path(__file__).parent
TARGET = PROGRAMS["megatron"]
CASES = [*((case, "megatron") for case in LAYOUTS), *((case, "megatron-fsdp") for case in SHARDED)]

DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.uint8": "fp8"}
SET_BY_VALIDATION = {
    "accumulate_allreduce_grads_in_fp32",  # on in bf16, where --grad-reduce-in-bf16 does not say otherwise
    "kv_channels",  # hidden size over heads, where latent attention says nothing
    "use_distributed_optimizer",  # Muon has one of its own
    "overlap_grad_reduce", "overlap_param_gather", "num_query_groups", "expert_tensor_parallel_size",
    "num_virtual_stages_per_pipeline_rank", "sequence_parallel", "moe_ffn_hidden_size", "recompute_modules",
    "attention_backend", "cuda_graph_impl", "max_position_embeddings", "add_qkv_bias",
}  # fmt: skip
"""Arguments that validation may fill in or change; their values are compared before validation."""


@pytest.fixture(scope="module")
def answers():
    plans = [plan_of(case, engine) for case, engine in CASES]
    commands = []
    for plan in plans:
        values = {**values_of(TARGET, plan), "mock_data": True, "tokenizer_type": "NullTokenizer"}
        words = [word for option in megatron.as_flags(values) for word in option]
        commands.append([plan.layout.world_size, dict(TARGET.environment(plan)), words])
    python = os.environ.get("REAL_PYTHON", sys.executable)
    done = subprocess.run(
        [python, HERE / "megatron_lm.py", str(CHECKOUT)],
        input=json.dumps(commands), capture_output=True, text=True, check=True, timeout=900,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    return list(zip(CASES, plans, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))


@pytest.mark.timeout(900)
def test_every_plan_is_accepted_and_every_value_is_the_plans(answers):
    wrong = []
    for case, plan, answer in answers:
        if "refused" in answer:
            wrong.append(f"{case}: {answer['refused']}")
            continue
        parsed = answer["before"]
        understood = {k: DTYPES.get(v, v) if isinstance(v, str) else v for k, v in answer["after"].items()}
        after = {**parsed, **{k: v for k, v in understood.items() if k not in SET_BY_VALIDATION}}
        wrong += [f"{case}: {each}" for found in (parsed, after) for each in differences(found, plan)]
    assert not wrong, "\n".join(wrong)
    assert len(answers) >= 60


@pytest.mark.timeout(900)
def test_the_configuration_of_the_model_is_built_from_it(answers):
    for case, plan, answer in answers:
        config, model = answer["config"], plan.model
        assert (config["num_layers"], config["hidden_size"]) == (model.num_layers, model.hidden_size), case
        assert config["hidden_dropout"] == config["attention_dropout"] == plan.training.dropout, case
        assert config["num_moe_experts"] == (model.moe.num_experts if model.moe else None), case
        assert config["tensor_model_parallel_size"] == plan.layout.tp, case
        assert config["pipeline_model_parallel_size"] == plan.layout.pp, case
        chunks = config["virtual_pipeline_model_parallel_size"]
        assert (chunks or 1) == plan.layout.interleave, case


def test_the_recorded_defaults_are_the_parsers():
    """The file tests/emit/megatron_defaults.json, on which the quick tests depend."""
    recorded = json.loads((HERE.parent / "megatron_defaults.json").read_text())
    done = subprocess.run(
        [os.environ.get("REAL_PYTHON", sys.executable), HERE / "megatron_lm.py", str(CHECKOUT), "--record"],
        input=json.dumps(sorted(recorded)), capture_output=True, text=True, check=True, timeout=600,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert json.loads(done.stdout[done.stdout.index("{\n") :]) == recorded
