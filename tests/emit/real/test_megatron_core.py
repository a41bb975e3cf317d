"""megatron-core of the package index: its configuration and its count of microbatches, built from emitted files."""

from __future__ import annotations

import pytest
from megatron_plans import LAYOUTS, plan_of

from planner.emit.programs import PROGRAMS
from planner.emit.target import values_of

pytestmark = pytest.mark.slow
configs = pytest.importorskip("megatron.core.transformer.transformer_config", reason="megatron-core is not installed")

RENAMED = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
}
INVERTED = {"disable_bias_linear": "add_bias_linear"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [case for case in LAYOUTS if case[0] != "gpt-oss-20b"], ids=str)
def test_the_configuration_takes_what_is_emitted(case):
    """Keys of the table that are fields of TransformerConfig have the plan's values after its own checks."""
    plan = plan_of(case)
    values = values_of(PROGRAMS["megatron"], plan)
    kind = configs.MLATransformerConfig if plan.model.mla else configs.TransformerConfig
    fields = kind.__dataclass_fields__
    given = {RENAMED.get(key, key): value for key, value in values.items() if RENAMED.get(key, key) in fields}
    given |= {INVERTED[key]: not value for key, value in values.items() if key in INVERTED}
    for left_out in ("moe_layer_freq", "pipeline_model_parallel_layout", "attention_backend", "fp8_param_gather"):
        given.pop(left_out, None)  # read by the parser of the whole program first
    given.pop("cuda_graph_impl", None)
    if "recompute_modules" in given:
        given["recompute_modules"] = list(given["recompute_modules"])
    if plan.training.precision == "fp8":
        given.pop("fp8_format", None)
    if plan.layout.pp > 1 and (len(set(plan.layout.layers_per_stage)) > 1 or plan.model.mtp_layers):
        given.pop("pipeline_model_parallel_size")
    given.setdefault("pipeline_dtype", __import__("torch").bfloat16)
    given["gradient_accumulation_fusion"] = False
    given["apply_rope_fusion"] = False
    built = kind(**given)
    assert built.num_layers == plan.model.num_layers
    assert built.tensor_model_parallel_size == plan.layout.tp
    assert built.context_parallel_size == plan.layout.cp
    assert built.hidden_dropout == built.attention_dropout == plan.training.dropout
    assert built.sequence_parallel == (plan.layout.sp == 1)
    if plan.model.moe:
        assert built.expert_model_parallel_size == plan.layout.ep
        assert built.moe_router_topk == plan.model.moe.experts_per_token


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [LAYOUTS[i] for i in (0, 6, 14, 38, 51)], ids=str)
def test_the_microbatches_are_the_plans(case):
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator as Calculator

    plan = plan_of(case)
    batch = plan.training.global_batch_size
    found = Calculator(batch, plan.layout.mbs, plan.layout.dp, decrease_batch_size_if_needed=False, rank=0)
    assert found.get() == plan.layout.num_microbatches(batch)
