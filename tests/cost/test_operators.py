"""A layer on devices that count: with all but one resource free, seconds are FLOPs or bytes, here counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.layers import layer_seconds
from planner.layout import parse_layout
from planner.specs.calibration import UNCALIBRATED

FREE = 1e300


def counting(job, unit):
    """The job on a device that takes a second for each FLOP, or for each byte, and for nothing else."""
    rate = 1.0 if unit == "flops" else FREE
    device = job.cluster.device
    share = device.efficiency.model_copy(
        update={"matmul": 1.0, "matmul_half_depth": 0.0, "attention": 1.0, "memory": 1.0, "launch": 0.0}
        | {"layer_floor": 0.0}
    )
    values = {"peak": dict.fromkeys(device.peak, rate), "memory_bandwidth": FREE if unit == "flops" else 1.0}
    device = device.model_copy(update=values | {"num_processors": 1, "efficiency": share})
    return replace(job, cluster=job.cluster.model_copy(update={"device": device}), calibration=UNCALIBRATED)


# One layer on one rank, all sizes multiples of a kernel's tile: linear maps as (rows, fan in, fan out), and FLOPs of
# the attention core. T: tokens of the rank's microbatch; own: those that it has to itself with sequence parallelism.
def llama3_8b(T, _own, t, span):
    attention = [(T, 4096, 6144 / t), (T, 4096 / t, 4096)]
    return [*attention, (T, 4096, 2 * 14336 / t), (T, 14336 / t, 4096)], 2 * T * span * 2 * 128 * 32 / t


def gpt3_175b(T, _own, t, span):
    h = 12288
    return [(T, h, 3 * h / t), (T, h / t, h), (T, h, 4 * h / t), (T, 4 * h / t, h)], 2 * T * span * 2 * h / t


LATENT = (
    *("model.mla.rope_head_size=128", "model.ffn_hidden_size=11264"),
    *("model.moe.num_experts=128", "model.moe.shared_ffn_hidden_size=4096", "model.moe.imbalance=1.0"),
)


def latent(T, own, t, span):
    """DeepSeek-V2, section 2.1: 16 heads with keys of 128 + 128 and values of 128 from a latent of 512."""
    attention = [(own, 2048, 512 + 128), (T, 512, 16 * 256 / t), (T, 16 * 128 / t, 2048)]
    return attention, 2 * T * span * (256 + 128) * 16 / t


def deepseek_v2_lite(T, own, t, span):
    """Queries are not compressed."""
    attention, core = latent(T, own, t, span)
    ffn = [(T, 2048, 2 * 11264 / t), (T, 11264 / t, 2048)]
    return [*attention, (T, 2048, 16 * 256 / t), *ffn], core


def compressed_queries(T, own, t, span):
    attention, core = latent(T, own, t, span)
    ffn = [(T, 2048, 2 * 11264 / t), (T, 11264 / t, 2048)]
    return [*attention, (own, 2048, 1536), (T, 1536, 16 * 256 / t), *ffn], core


def experts(T, own, t, span):
    """128 experts of 1408, 6 for each token, and shared ones of 4096; ep is 8, so 16 experts are here."""
    attention, core = latent(T, own, t, span)
    here = [(T / t * 6, 2048, 2 * 1408), (T / t * 6, 1408, 2048)]
    shared = [(T, 2048, 2 * 4096 / t), (T, 4096 / t, 2048)]
    return [*attention, (T, 2048, 16 * 256 / t), (T / t, 2048, 128), *here, *shared], core


CASES = {
    llama3_8b: ("llama3-8b", ()),
    gpt3_175b: ("gpt3-175b", ("model.max_sequence_length=8192",)),
    deepseek_v2_lite: ("deepseek-v2-lite", LATENT),
    compressed_queries: ("deepseek-v2-lite", (*LATENT, "model.mla.q_lora_rank=1536")),
    experts: ("deepseek-v2-lite", LATENT),
}


@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=2,sp=1", "tp=8,sp=1", "tp=8,sp=0", "tp=2,cp=2,mbs=3"])
@pytest.mark.parametrize("by_hand", CASES)
def test_a_layer_takes_the_flops_of_its_products(make_job, by_hand, text):
    name, settings = CASES[by_hand]
    job = counting(make_job(name, settings=settings, sequence=8192), "flops")
    ep = 8 if by_hand is experts else 1
    layout = parse_layout(f"{text},ep={ep}", num_layers=job.model.num_layers, num_devices=64)
    T = 8192 * layout.mbs / layout.cp
    own = T / layout.tp if layout.sp else T
    products, core = by_hand(T, own, layout.tp, 4096)
    linear = sum(2 * rows * fan_in * fan_out for rows, fan_in, fan_out in products)
    found = layer_seconds(job, layout, experts=by_hand is experts)
    hops = 1 + (layout.cp > 1) * 256 * layout.cp / 8192 if job.engine.context_exchange == "ring" else 1
    assert found.core_forward == pytest.approx(core * hops)
    assert found.passes.forward == pytest.approx(linear + core * hops)
    assert found.passes.backward_input == pytest.approx(linear + 2.5 * core * hops)  # five products for two (Dao 2023)
    assert found.passes.backward_weight == pytest.approx(linear)


# What the other operators of a layer move, forward and backward, in elements for each token: tensors read and written.
# The first pair is of every rank of tensor parallelism unless tokens are split, the second is cut.
def light(hidden, heads, *, rope):
    norm, residual = (2 * hidden, 5 * hidden), (3 * hidden, 4 * hidden)
    whole = tuple(2 * (a + b) for a, b in zip(norm, residual, strict=True))
    return whole, (2 * heads, 2 * heads) if rope else (0, 0)


@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=2,sp=1", "tp=8,sp=0", "tp=2,cp=2,mbs=3"])
@pytest.mark.parametrize("by_hand", [llama3_8b, gpt3_175b])
def test_a_layer_takes_the_bytes_of_its_operators(make_job, by_hand, text):
    name, settings = CASES[by_hand]
    job = counting(make_job(name, settings=settings, sequence=8192), "bytes")
    job = replace(job, engine=job.engine.model_copy(update={"context_exchange": "gather"}))
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=64)
    T, t = 8192 * layout.mbs / layout.cp, layout.tp
    own = T / t if layout.sp else T
    products, _ = by_hand(T, own, t, 4096)
    linear = sum(2 * (rows * fan_in + fan_in * fan_out + rows * fan_out) for rows, fan_in, fan_out in products)
    if by_hand is llama3_8b:  # the gate: two halves read, one written; three read, two written
        (norms, backward), heads = light(4096, 4096 + 1024, rope=True)
        act = (3 * 14336, 5 * 14336)
    else:  # GELU: read and written; the gradient as well, and what came in twice
        (norms, backward), heads = light(12288, 0, rope=False)
        act = (2 * 4 * 12288, 4 * 4 * 12288)
    found = layer_seconds(job, layout).passes
    assert found.forward == pytest.approx(linear + 2 * (norms * own + (heads[0] + act[0]) * T / t))
    assert found.backward_input == pytest.approx(linear + 2 * (backward * own + (heads[1] + act[1]) * T / t))
    assert found.backward_weight == pytest.approx(linear)
