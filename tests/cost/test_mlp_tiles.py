"""Feed-forward blocks computed in parts of the sequence (DeepSpeed, TiledMLP), compared with counts by hand."""

from __future__ import annotations

import pytest

from planner.cost.estimate import estimate
from planner.cost.flops import chunk_flops
from planner.cost.ledger import LineName
from planner.layout_text import parse_layout
from planner.search.space.rules import broken_rules

LAYERS, HIDDEN, WIDTH, TOKENS = 32, 4096, 14_336, 32_768  # Llama-3-8B


def case(make_job, text, tiles, model="llama3-8b", engine="deepspeed"):
    settings = (f"training.mlp_tiles={tiles}", f"training.loss={'fused-linear' if engine == 'deepspeed' else 'whole'}")
    job = make_job(model, "dgx-h100", gpus=8, batch=8, sequence=TOKENS, engine=engine, settings=settings)
    return job, parse_layout(text, num_layers=job.model.num_layers, num_devices=8)


def line_of(job, layout, name):
    (stage,) = estimate(job, layout).memory
    return sum(line.num_bytes for line in stage.lines if line.name == name)


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_keep_no_tensor_of_the_block(make_job, tp):
    """Without tiles, 4 tensors are kept, with 2 bytes per token and element: gate, up, their activation and product."""
    text = f"zero=1,tp={tp},mbs=1,recompute=none"
    kept = [line_of(*case(make_job, text, tiles), "activations") for tiles in (1, 16)]
    assert kept[0] - kept[1] == pytest.approx(LAYERS * 4 * 2 * TOKENS * WIDTH / tp)


def test_the_backward_pass_holds_one_tile(make_job):
    """Of one tile: gate, up, their activation and product, and the gradients of gate and up, with 2 bytes each."""
    transients = [line_of(*case(make_job, "zero=3,recompute=full", tiles), "transients") for tiles in (2, 4)]
    assert transients[0] - transients[1] == pytest.approx((4 + 2) * 2 * TOKENS * WIDTH * (1 / 2 - 1 / 4))


@pytest.mark.parametrize(("policy", "whole"), [("none", 0), ("full", 1)])
def test_the_backward_pass_repeats_the_products(make_job, policy, whole):
    """Three products of hidden size times width per token are repeated once more than by recompute alone."""
    plain, tiled = (chunk_flops(*case(make_job, f"zero=3,recompute={policy}", tiles)) for tiles in (1, 4))
    product = 2 * 3 * HIDDEN * WIDTH * TOKENS * LAYERS
    assert tiled["repeated"].sum() - plain["repeated"].sum() == pytest.approx(product)
    assert (plain["repeated"].sum() > 0) == bool(whole)
    seconds = {}
    for tiles in (1, 4):
        job, layout = case(make_job, f"zero=3,recompute={policy}", tiles)
        time = {line.name: line.exposed_seconds for line in estimate(job, layout).time}
        seconds[tiles] = float(time.get(LineName.RECOMPUTE, 0.0))
    peak = 989e12  # H100 in 16 bits
    assert seconds[4] - seconds[1] > product / peak


def test_other_engines_and_experts_are_refused(make_job):
    for engine, model, words in (("megatron", "llama3-8b", "at once"), ("deepspeed", "mixtral-8x7b", "has experts")):
        job, layout = case(make_job, "tp=8,zero=1", 4, model=model, engine=engine)
        assert [why for why in broken_rules(job, layout) if words in why and "training.mlp_tiles=1" in why]
    assert broken_rules(*case(make_job, "zero=3", 4)) == ()
