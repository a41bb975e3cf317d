"""Bytes measured in a real step, compared with counts that follow from the shapes, and with the plan's ledger."""

from __future__ import annotations

import pytest

from planner.cost.estimate import estimate
from planner.cost.parameters import num_params
from planner.specs.job import PoolJob


def planned(plan, stage: int) -> dict[str, float]:
    job = PoolJob(model=plan.model, cluster=plan.cluster, training=plan.training, engine=plan.engine)
    return {line.name: line.num_bytes for line in estimate(job, plan.layout).memory[stage].lines}


def test_states_are_what_the_shapes_say(run_job, make_plan):
    plan = make_plan("dp=1,mbs=4")
    found = run_job("memory", plan, steps=1)
    params = num_params(plan.model)
    assert found["params"] == [4 * params]
    assert found["optimizer_state"] == [8 * params]
    assert found["grads"] == [4 * params]


@pytest.mark.parametrize(("layout", "share"), [("zero=0", 1), ("zero=1", 1), ("zero=2", 0.5)])
def test_gradients_accumulate_whole_below_zero_2(layout, share, run_job, make_plan):
    plan = make_plan(f"dp=2,mbs=2,{layout}")
    assert run_job("memory", plan, steps=1)["grads"] == [4 * num_params(plan.model) * share]


def test_zero_3_frees_weights_and_gradients(run_job, make_plan):
    plan = make_plan("dp=2,zero=3,mbs=2")
    found = run_job("memory", plan, steps=1)
    params = num_params(plan.model)
    last_unit = 4 * (256 * 32 + 32)  # head and final norm, the unit that FSDP2's root keeps
    assert found["params"] == [last_unit]
    assert found["grads"] == [4 * params / 2]
    assert found["optimizer_state"] == [12 * params / 2]


def test_activations_of_one_layer_are_counted_by_hand(run_job, make_plan):
    """fp32, 8 sequences of 32 tokens; widths in units of the hidden size, for each of 4 Llama layers."""
    found = run_job("memory", make_plan("dp=1,mbs=8"), steps=1)
    attention = 2 + 1 + 2 * 0.5 + 1  # norm and block inputs, queries, keys and values of 2 of 4 heads, output
    ffn = 2 + 4 * 2  # norm and block inputs; gate, its SiLU, up and their product, each twice the hidden size
    per_token = 4 * 32 * (attention + ffn) + 4 * 4 + 2 * 4  # log-sum-exp of 4 heads, two norms' scales
    rotary = 2 * 32 * 8 * 4
    assert found["activations"] == [4 * 8 * 32 * per_token + rotary]


@pytest.mark.parametrize(
    ("model", "layout", "training"),
    [
        ("gpt", "dp=1,mbs=4", {"precision": "bf16"}),
        ("llama", "tp=2,mbs=4", {}),
        ("llama", "pp=2,mbs=2", {}),
        ("llama", "pp=2,mbs=2,schedule=naive", {}),
        ("tied-llama", "pp=2,mbs=2,interleave=2", {}),
        ("llama", "pp=2,mbs=1,recompute=full/none", {"precision": "bf16"}),
        pytest.param(
            "llama", "pp=2,dp=2,zero=1,mbs=1,recompute=full/none", {"precision": "bf16"}, marks=pytest.mark.slow
        ),
        ("olmo", "dp=1,mbs=4", {}),
        ("llama", "cp=2,mbs=4", {}),
    ],
)
def test_the_plans_ledger_is_what_a_step_holds(model, layout, training, run_job, make_plan):
    plan = make_plan(layout, model, **training)
    found = run_job("memory", plan, steps=1)
    for stage in range(plan.layout.pp):
        ledger = planned(plan, stage)
        for name in ("params", "optimizer_state", "activations"):
            # norm scales and rotary tables are below the ledger's resolution, and large in a model this small
            assert found[name][stage] == pytest.approx(ledger[name], rel=0.03), (name, stage)


@pytest.mark.parametrize(
    ("layout", "training"),
    [
        ("pp=2,dp=2,zero=1,mbs=2", {}),
        pytest.param("pp=2,dp=2,zero=0,mbs=1,interleave=2", {"precision": "bf16"}, marks=pytest.mark.slow),
        ("pp=2,mbs=1,schedule=zbv", {}),
        ("pp=2,mbs=1,schedule=zbv", {"precision": "bf16"}),  # torch leaves those of the last pass in 16 bits
    ],
)
def test_a_pipeline_adds_up_whole_gradients(layout, training, run_job, make_plan):
    """This includes schedules in which the first stage runs all forward passes before its first backward pass."""
    plan = make_plan(layout, **training)
    found = run_job("memory", plan, steps=1)["grads"]
    assert found == [planned(plan, stage)["grads"] for stage in range(2)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [("moe", "dp=1,mbs=4"), ("mla", "dp=1,mbs=4"), pytest.param("mla", "tp=2,mbs=4", marks=pytest.mark.slow)],
)
def test_experts_and_latents_hold_what_the_ledger_says(model, layout, run_job, make_plan):
    """Indices of tokens and gates of shared experts have no line, and are large in layers of width 32."""
    plan = make_plan(layout, model)
    found, ledger = run_job("memory", plan, steps=1), planned(plan, 0)
    for name in ("params", "optimizer_state"):
        assert found[name] == [pytest.approx(ledger[name], rel=2e-3)]
    assert found["activations"] == [pytest.approx(ledger["activations"], rel=0.12)]
