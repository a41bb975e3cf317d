"""Every way to cut the training step gives the losses and gradient norms of one plain process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

STEPS = 10
LOSS, NORM = 1e-4, 1e-3  # the worst seen is 1e-6 and 3e-6; a wrong scale is off by more than 0.1

COMPOSITIONS = [
    ("llama", "dp=1,mbs=2"),
    ("gpt", "dp=2,zero=0,mbs=2"),
    ("llama", "dp=2,zero=1,mbs=1"),
    ("gpt", "dp=2,zero=2,mbs=2"),
    ("tied-llama", "dp=2,zero=3,mbs=2"),
    ("llama", "dp=4,zero=3,hsdp=2,mbs=1"),
    ("gpt", "tp=2,mbs=8"),
    ("llama", "tp=2,mbs=4,recompute=full"),
    ("tied-llama", "pp=2,mbs=2"),
    ("gpt", "pp=2,mbs=2,schedule=gpipe,layers_per_stage=3/1"),
    ("llama", "pp=2,mbs=2,interleave=2"),
    ("tied-llama", "pp=4,mbs=2,recompute=full/none/none/full"),
    ("gpt", "pp=2,dp=2,zero=1,mbs=1"),
    ("tied-llama", "tp=2,pp=2,dp=2,zero=1,mbs=2"),
]
WIDE = [("gpt", "tp=4,mbs=8"), ("tied-llama", "tp=4,mbs=4,recompute=full")]  # llama has two key-value heads
MODELS = ("llama", "tied-llama", "gpt")
MORE = [
    "dp=2,zero=0,mbs=4",
    "dp=2,zero=1,mbs=2",
    "dp=2,zero=2,mbs=1,recompute=full",
    "dp=2,zero=3,mbs=4,recompute=full",
    "dp=4,zero=1,hsdp=2,mbs=1",
    "dp=4,zero=2,hsdp=2,mbs=1",
    "dp=8,zero=3,mbs=1",
    "tp=2,dp=2,zero=0,mbs=2",
    "tp=2,dp=2,zero=1,mbs=2",
    "tp=2,dp=2,zero=2,mbs=2",
    "tp=2,dp=2,zero=3,mbs=2,recompute=full",
    "tp=2,dp=4,zero=3,hsdp=2,mbs=2",
    "tp=2,pp=2,mbs=2",
    "tp=2,pp=2,mbs=2,interleave=2",
    "pp=2,mbs=1,layers_per_stage=1/3,recompute=none/full",
    "pp=2,mbs=2,interleave=2,schedule=gpipe",
    "pp=2,dp=2,zero=0,mbs=1,interleave=2",
    "pp=4,dp=2,zero=1,mbs=1",
    "tp=2,pp=2,dp=2,zero=0,mbs=1,interleave=2,recompute=full",
]


@pytest.fixture(scope="module")
def reference(run_job: Callable[..., Any], make_plan: Callable[..., Any]) -> Callable[[str], Any]:
    @functools.cache
    def losses(model: str) -> Any:
        return run_job("reference", make_plan("dp=1", model), steps=STEPS)

    return losses


def distance(found: Any, wanted: Any) -> tuple[float, float]:
    pairs = list(zip(found, wanted, strict=True))
    return (
        max(abs(mine[0] - other[0]) for mine, other in pairs),
        max(abs(mine[1] - other[1]) / other[1] for mine, other in pairs),
    )


def assert_same_training(found: Any, wanted: Any) -> None:
    loss, norm = distance(found, wanted)
    assert loss <= LOSS
    assert norm <= NORM


@pytest.mark.parametrize(("model", "layout"), COMPOSITIONS)
def test_a_layout_trains_like_one_process(model, layout, run_job, make_plan, reference):
    assert_same_training(run_job("steps", make_plan(layout, model), steps=STEPS), reference(model))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), [*WIDE, *itertools.product(MODELS, MORE)])
def test_every_other_layout_trains_like_one_process(model, layout, run_job, make_plan, reference):
    assert_same_training(run_job("steps", make_plan(layout, model), steps=STEPS), reference(model))


@pytest.mark.parametrize(
    ("layout", "fault"), [("dp=2,mbs=2", "wrong_loss_scale"), ("pp=2,mbs=2", "wrong_pipeline_scale")]
)
def test_a_wrong_gradient_scale_is_noticed(layout, fault, run_job, make_plan, reference):
    found = run_job("steps", make_plan(layout), steps=STEPS, **{fault: True})
    assert distance(found, reference("llama"))[1] > 100 * NORM


def test_bf16_follows_bf16_on_one_device(run_job, make_plan):
    alone = run_job("steps", make_plan("dp=1,mbs=8", precision="bf16"), steps=STEPS)
    cut = run_job("steps", make_plan("dp=2,zero=3,mbs=2,recompute=full", precision="bf16"), steps=STEPS)
    loss, norm = distance(cut, alone)
    assert loss <= 2e-2
    assert norm <= 5e-2


def test_unfused_attention_trains_the_same(run_job, make_plan, reference):
    found = run_job("steps", make_plan("dp=1,mbs=4", attention="unfused"), steps=STEPS)
    assert_same_training(found, reference("llama"))
