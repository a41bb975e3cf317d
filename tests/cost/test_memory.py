"""Memory compared with the published closed forms: ZeRO's table, Korthikanti's formulas and figure 1, the textbook."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.api import estimate_layout
from planner.cost.activations import (
    activation_terms,
    inner_gradient_bytes,
    layer_activation_bytes,
    stored_activation_bytes,
)
from planner.cost.estimate import estimate, memory_of_stages
from planner.cost.ledger import LineName
from planner.cost.loss import logits_bytes
from planner.cost.memory import host_lines, memory_lines
from planner.cost.model_states import state_bytes_per_param, whole_gradients
from planner.cost.stage import Stage, expert_padding, expert_shard_divisor
from planner.cost.transients import layer_backward_bytes
from planner.layout_text import parse_layout
from planner.specs.load import load_job

GIB = 2**30
OLD_GPT = ("training.attention=unfused", "training.dropout=0.1")

# Rajbhandari et al., ZeRO (SC 2020), table 1: GB per device for 7.5B parameters, stages 0 to 3
ZERO_7_5B = {
    1: (120, 120, 120, 120),
    4: (120, 52.5, 41.3, 30),
    16: (120, 35.6, 21.6, 7.5),
    64: (120, 31.4, 16.6, 1.88),
    256: (120, 30.4, 15.4, 0.47),
    1024: (120, 30.1, 15.1, 0.12),
}


@pytest.mark.parametrize(("degree", "stage"), [*itertools.product(ZERO_7_5B, range(4))])
def test_zero_table(make_job, degree, stage):
    job = make_job("megatron-7.5b", gpus=1024, batch=1024, settings=("training.memory_recipe=zero-16",))
    layout = parse_layout(f"dp={degree},zero={stage}", num_layers=36, num_devices=degree)
    per_param = sum(float(b) for b in state_bytes_per_param(job, layout))
    assert per_param * 7.5 == pytest.approx(ZERO_7_5B[degree][stage], abs=0.06)


def test_textbook_recipe_takes_20_gb_for_a_billion_parameters(make_job):
    job = make_job(settings=("training.memory_recipe=textbook-20",))
    layout = parse_layout("tp=1", num_layers=96, num_devices=1)
    assert sum(float(b) for b in state_bytes_per_param(job, layout)) * 1e9 == 20e9


@pytest.mark.parametrize("name", ["megatron-22b", "gpt3-175b", "megatron-529.6b"])
@pytest.mark.parametrize(("t", "b"), [(1, 1), (8, 1), (8, 4), (4, 2)])
def test_activations_of_one_layer_are_korthikantis(make_job, name, t, b):
    job = make_job(name, settings=OLD_GPT)
    m, s = job.model, 2048
    h, a = m.hidden_size, m.num_heads
    sbh = s * b * h
    for sp in (0, 1) if t > 1 else (0,):
        layout = parse_layout(f"tp={t},sp={sp},mbs={b}", num_layers=m.num_layers, num_devices=t)
        none, selective, full = (float(x) for x in layer_activation_bytes(job, layout))
        core = 5 * a * s / (h * t)
        assert none == pytest.approx(sbh * ((34 / t if sp else 10 + 24 / t) + core), rel=1e-12)
        assert selective == pytest.approx(sbh * (34 / t if sp else 10 + 24 / t), rel=1e-12)
        assert full == pytest.approx(sbh * 2 / (t if sp else 1), rel=1e-12)


# What one layer keeps of a token, in elements of 16 bits: `own` is whole on each rank of tensor parallelism unless
# sequence parallelism splits it, `inputs` too unless the engine gathers them
# again, `cut` is cut; and four bytes a head of scores.
def kept(own, inputs, cut, heads, t, gathers):
    return 2 * (own / t + inputs / (t if gathers else 1) + cut / t) + 4 * heads / t


LAYERS = {
    # layer input and residual; inputs of both blocks; queries, keys, values, output; gate, up and their product
    ("llama3-8b", "megatron"): lambda t: kept(2 * 4096, 2 * 4096, 6144 + 4096 + 3 * 14336, 32, t, True),
    ("llama3-8b", "torchtitan"): lambda t: kept(2 * 4096, 2 * 4096, 6144 + 4096 + 4 * 14336, 32, t, False),
    ("llama3-8b", "nanotron"): lambda t: kept(2 * 4096, 2 * 4096, 6144 + 4096 + 4 * 14336, 32, t, True),
    # both norms' input in fp32 and their result; the joint projection beside rotated queries and keys
    ("llama3-8b", "aleph-alpha-scaling"): lambda t: kept(
        2 * 4096 + 2 * 2 * 4096, 2 * 4096, 6144 + 4096 + 1024 + 4096 + 4 * 14336, 32, t, False
    ),
    # inputs of the norms of queries and keys
    ("qwen3-8b", "megatron"): lambda t: kept(2 * 4096, 2 * 4096, 6144 + 4096 + 5120 + 3 * 12288, 32, t, True),
    # norms after both blocks too
    ("gemma2-9b", "megatron"): lambda t: kept(4 * 3584, 2 * 3584, 8192 + 4096 + 3 * 14336, 16, t, True),
    # both blocks read one norm's output
    ("gpt-neox-20b", "megatron"): lambda t: kept(6144, 2 * 6144, 4 * 6144 + 2 * 24576, 64, t, True),
    # one norm, no second residual; each rank has the only head of keys and values
    ("palm-540b", "megatron"): lambda t: kept(18432, 18432, 2 * 12288 + 2 * 256 * t + 3 * 73728, 48, t, True),
    # cross-attention in half of the layers: its input, projections, output and residual once more
    ("t5-large", "megatron"): lambda t: kept(2.5 * 1024, 2.5 * 1024, 1.5 * 4 * 1024 + 2 * 4096, 1.5 * 16, t, True),
}


@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=4,sp=1", "tp=2,sp=1,mbs=3"])
@pytest.mark.parametrize(("name", "engine"), LAYERS)
def test_activations_of_a_layer_are_its_tensors(make_job, name, engine, text):
    job = make_job(name, engine=engine, sequence=512)
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=64)
    tokens = 512 * layout.mbs
    none, *_, full = layer_activation_bytes(job, layout)
    assert float(none) == pytest.approx(tokens * LAYERS[name, engine](layout.tp))
    assert float(full) == pytest.approx(tokens * 2 * job.model.hidden_size / layout.tp)


@pytest.mark.parametrize("t", [1, 4])
def test_operator_by_operator_every_second_product_stays(make_job, t):
    """Kept: queries, values, attention's output and scores, one of gate and up, two tensors of the hidden size."""
    job = make_job("llama3-8b", engine="torchtitan", sequence=512)
    layout = parse_layout(f"tp={t},sp={int(t > 1)}", num_layers=32, num_devices=64)
    _, selective, _ = layer_activation_bytes(job, layout)
    assert float(selective) == pytest.approx(512 * kept(2 * 4096, 0, 4096 + 1024 + 4096 + 14336, 32, t, False))


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (2, 2)])
def test_activations_of_experts_are_those_of_the_choices(make_job, ep, etp):
    """Mixtral: two choices per token, each with input, gate, up, product and output; 8 fp32 scores, kept twice."""
    job = make_job("mixtral-8x7b", engine="megatron", sequence=512, settings=("model.moe.imbalance=1.0",))
    t = 4
    layout = parse_layout(f"tp={t},ep={ep},etp={etp}", num_layers=32, num_devices=64)
    none, *_ = layer_activation_bytes(job, layout, experts=True)
    attention = kept(2 * 4096, 2 * 4096, 6144 + 4096, 32, t, True)
    choices = 2 / t * etp  # ranks that share an expert see each other's tokens
    experts = 8 * 8 / t + 2 * choices * (4096 + 3 * 14336 / etp + 4096 * job.engine.memory.keeps_expert_outputs)
    assert float(none) == pytest.approx(512 * (attention + experts))


def test_activations_of_latent_attention(make_job):
    """DeepSeek-V2-Lite: each rank has the whole latent of 512, before and after its norm, and 64 rotary positions."""
    job = make_job("deepseek-v2-lite", engine="megatron", sequence=512)
    for t in (1, 2):
        layout = parse_layout(f"tp={t},sp={int(t > 1)}", num_layers=27, num_devices=64)
        none, *_ = layer_activation_bytes(job, layout)
        heads = 16 * (128 + 64) + 16 * (128 + 128) + 16 * (128 + 64) + 16 * 128  # queries; keys, values; joined; output
        tensors = kept(2 * 2048, 2 * 2048, heads + 3 * 10944, 16, t, True)
        assert float(none) == pytest.approx(512 * (tensors + 2 * (2 * 512 + 64)))


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ((), 2),
        (("training.lora_rank=16", "training.lora_targets=[down]"), 2),
        (("training.lora_rank=16",), 3),
        (("training.lora_rank=16", "training.frozen_weights=nf4"), 3),
    ],
)
def test_the_gradient_of_a_product_takes_the_place_of_the_product_if_it_was_kept(make_job, settings, tensors):
    """Gradients of gate and up; and that of their product, which is not kept for a frozen matrix."""
    job = make_job("llama3-8b", engine="fsdp", gpus=2, sequence=512, settings=settings)
    layout = parse_layout("dp=2,zero=3", num_layers=32, num_devices=2)
    kept = job.engine.memory.quantised_keep_inputs and job.training.frozen_weights == "nf4"
    assert float(inner_gradient_bytes(job, layout, experts=False)) == 512 * 2 * (tensors - kept) * 14336


def test_one_layer_beside_adapters_is_what_transformers_holds():
    """Two layers with a small vocabulary, so that the peak is in a layer; bytes by `planner verify` (Accelerate)."""
    job = load_job(model="llama3-8b", cluster="dgx-h100", engine="fsdp", gpus=2, sequence_length=4096,
                   global_batch_size=4,
                   settings=("model.num_layers=2", "model.vocab_size=2048", "training.lora_rank=16"))  # fmt: skip
    layout = parse_layout("dp=2,zero=3,mbs=1,recompute=full", num_layers=2, num_devices=2)
    lines = memory_of_stages(job, layout)[0].lines
    assert sum(line.num_bytes for line in lines if line.name != "runtime") == pytest.approx(2.390e9, rel=0.03)


def test_of_frozen_matrices_only_inputs_of_adapters_stay(make_job):
    settings = ("training.lora_rank=16", "training.lora_targets=[query, value]")
    job = make_job("llama3-8b", engine="megatron", sequence=512, settings=settings)
    layout = parse_layout("tp=1", num_layers=32, num_devices=64)
    none, *_ = layer_activation_bytes(job, layout)
    # no input of the feed-forward block, which no trained matrix reads, and not the product of gate and up
    assert float(none) == pytest.approx(512 * (kept(3 * 4096, 0, 6144 + 4096 + 2 * 14336, 32, 1, True) + 2 * 2 * 16))


@pytest.mark.parametrize(
    ("exchange", "keys", "outputs"),
    [("ring", 1, 1), ("gathered-ring", 1, 1), ("gather", 4, 2), ("all-to-all", 1, 2)],
)
def test_context_parallel_ranks_keep_what_they_exchange(make_job, with_engine, exchange, keys, outputs):
    """Ranks that gather keep the keys and values of all four ranks, and the joined output beside their own output."""
    job = with_engine(
        make_job("llama3-8b", engine="megatron", sequence=512), communication={"context_exchange": exchange}
    )
    layout = parse_layout("cp=4", num_layers=32, num_devices=64)
    none, *_ = layer_activation_bytes(job, layout)
    attention = 4096 + 2 * 1024 * keys + 4096 * outputs
    assert float(none) == pytest.approx(128 * kept(2 * 4096, 2 * 4096, attention + 3 * 14336, 32, 1, True))


# Korthikanti et al. (2022), figure 1: activations of the first stage in GiB, without and with sequence
# parallelism and selective recompute; the values are formula values (Calculon's validation.py lists them).
FIGURE_1 = [
    ("megatron-22b", "tp=8,pp=1,mbs=4", 59.25, 9.5625),
    ("gpt3-175b", "tp=8,pp=8,mbs=1,interleave=3", 66.84375, 12.3515625),
    ("megatron-529.6b", "tp=8,pp=35,mbs=1,interleave=3", 114.0234375, 23.076171875),
    ("megatron-1t", "tp=8,pp=64,mbs=1", 131.25, 26.5625),
]


@pytest.mark.parametrize(("name", "text", "plain", "selective"), FIGURE_1)
def test_korthikanti_figure_1(make_job, name, text, plain, selective):
    job = make_job(name, gpus=1024, batch=2100, settings=OLD_GPT)
    for sp, policy, gib in ((0, 0, plain), (1, 1, selective)):
        layout = parse_layout(f"{text},dp=1,sp={sp}", num_layers=job.model.num_layers, num_devices=1024)
        stage = Stage(index=0, num_layers=job.model.num_layers / layout.pp, policy=policy)
        stored = stored_activation_bytes(job, layout, stage, 2100)
        assert float(stored) / GIB == pytest.approx(gib, rel=1e-12)


def test_states_never_grow_with_the_zero_stage(make_job):
    for engine, pp in itertools.product(("torch", "megatron"), (1, 4)):
        job = make_job("llama3-8b", engine=engine, gpus=64)
        totals = []
        for zero in range(4):
            layout = parse_layout(f"pp={pp},dp=8,zero={zero}", num_layers=32, num_devices=64)
            totals.append(sum(float(b) for b in state_bytes_per_param(job, layout)))
        assert totals == sorted(totals, reverse=True), (engine, pp)


def test_more_recompute_stores_less_and_brings_back_more(make_job):
    job = make_job("llama3-8b", engine="torch")
    layout = parse_layout("tp=2,pp=4,dp=2", num_layers=32, num_devices=16)
    for r in range(4):
        none, full = (
            {
                line.name: float(line.num_bytes)
                for line in memory_lines(job, layout, Stage(index=r, num_layers=8, policy=p))
            }
            for p in (0, 2)
        )
        assert full[LineName.ACTIVATIONS] < none[LineName.ACTIVATIONS]
        assert full[LineName.TRANSIENTS] >= none[LineName.TRANSIENTS]
        assert full[LineName.PARAMS] == none[LineName.PARAMS]


def test_earlier_stages_hold_more_microbatches(make_job):
    job = make_job("llama3-8b", engine="torch")
    layout = parse_layout("tp=2,pp=8,dp=2", num_layers=32, num_devices=32)
    stored = stored_activation_bytes(job, layout, Stage(index=np.arange(8), num_layers=4, policy=0), 32)
    assert np.all(np.diff(stored) < 0)
    assert stored[0] == pytest.approx(8 * stored[-1])


def test_every_line_broadcasts_over_stages_like_one_at_a_time(make_job):
    job = make_job("llama3-70b", engine="torch", gpus=128)
    layout = parse_layout("tp=8,pp=4,dp=4,zero=1,mbs=2", num_layers=80, num_devices=128)
    together = memory_lines(
        job, layout, Stage(index=np.arange(4), num_layers=np.full(4, 20), policy=np.array([2, 2, 0, 0]))
    )
    for r, policy in enumerate((2, 2, 0, 0)):
        alone = memory_lines(job, layout, Stage(index=r, num_layers=20, policy=policy))
        for a, b in zip(together, alone, strict=True):
            assert np.broadcast_to(a.num_bytes, (4,))[r] == pytest.approx(float(b.num_bytes), rel=1e-15)


def lines_of(job, text, **stage):
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=job.cluster.num_devices)
    lines = memory_lines(job, layout, Stage(**({"index": 0, "num_layers": job.model.num_layers, "policy": 0} | stage)))
    return {line.name: float(line.num_bytes) for line in lines}


def test_the_loss_and_a_recomputed_layer_are_never_alive_together(make_job, with_engine):
    """With whole gradients and without ZeRO-3, transients are the larger of loss and layer, computed here by hand.

    The layer also has the gradients of gate and up. In both cases there is a placeholder for each matrix and for the
    head.
    """
    job = make_job("llama3-8b", engine="megatron", gpus=8, sequence=8192)
    tokens, vocab, hidden, layer = 8192, 128256, 4096, 218_112_000
    empty = 2 * (layer + vocab * hidden)
    assert lines_of(job, "dp=8", policy=2)[LineName.TRANSIENTS] == 6 * tokens * vocab + empty
    layout = parse_layout("dp=8", num_layers=32, num_devices=8)
    none, _, full = (float(x) for x in layer_activation_bytes(job, layout))
    small = with_engine(job, memory={"logits_bytes": 0.1})
    inner = 2 * tokens * 2 * 14336
    assert lines_of(small, "dp=8", policy=2)[LineName.TRANSIENTS] == pytest.approx(none - full + inner + empty)


def test_zero_3_holds_the_ends_and_two_layers_or_the_loss(make_job, with_engine):
    one_unit = {"logits_bytes": 0, "gathers_head_apart": False}
    job = make_job("llama3-8b", engine="fsdp", gpus=8, batch=16)
    job = with_engine(job, memory=one_unit, communication={"reduces_16_bit": False})
    layer, ends = 218_112_000, 2 * 128256 * 4096 + 4096
    # 16-bit weights of two layers, one layer's gradient in 16 bits and in fp32; weights and gradients of the ends; the
    # gradient of gate and up
    expected = 2 * 2 * layer + (2 + 4) * layer + (2 + 2) * ends + 2 * 2048 * 2 * 14336
    assert lines_of(job, "dp=8,zero=3")[LineName.TRANSIENTS] == expected


def test_a_head_that_is_a_unit_is_gathered_at_the_loss_and_reduced_after_it(make_job, with_engine):
    job = make_job("llama3-8b", engine="fsdp", gpus=8, batch=16)
    layer, logits, head = 218_112_000, 2048 * 128256, 128256 * 4096
    long = make_job("llama3-8b", engine="fsdp", gpus=8, batch=16, sequence=8192)
    assert lines_of(long, "dp=8,zero=3")[LineName.TRANSIENTS] == 12 * 4 * logits + 2 * head
    # the forward pass has no gradient of the logits yet, and the buffer of the gathering beside what came of it
    assert lines_of(job, "dp=8,zero=3")[LineName.TRANSIENTS] == (12 - 2) * logits + (2 + 2) * head
    # the gradient and its copy, an eighth of it summed and in fp32, and the last layer
    free = with_engine(job, memory={"logits_bytes": 0})
    assert lines_of(free, "dp=8,zero=3")[LineName.TRANSIENTS] == (2 + 2 + (2 + 4) / 8) * head + 2 * layer


def test_sums_of_replicas_are_kept_until_the_backward_pass_ends(make_job, with_engine):
    """With half as many shards, each shard is twice as long; the activations of all layers are freed before the end."""
    job = with_engine(make_job("llama3-8b", engine="fsdp", gpus=16, batch=32), memory={"logits_bytes": 0})
    lines = lines_of(job, "dp=16,zero=3,hsdp=2", policy=1)
    layer, head, inner = 218_112_000, 128256 * 4096, 2 * 2048 * 2 * 14336
    params = 32 * layer + 2 * head + 4096
    recomputed = lines_of(job, "dp=16,zero=3", policy=1)[LineName.TRANSIENTS]
    assert recomputed == (2 + 2 + (2 + 4) / 16) * head + 2 * layer
    in_layer = (2 + 2 + 2) * layer + 2 * head + inner  # and what recompute brings back
    at_the_end = lines[LineName.TRANSIENTS] + lines[LineName.ACTIVATIONS]
    assert at_the_end > in_layer + 2 * params / 8


def test_collectives_over_experts_are_as_long_as_the_fullest_shard(make_job):
    job = make_job("mixtral-8x7b", engine="fsdp", gpus=24, batch=24)
    for ranks, padding in ((4, 1), (8, 1), (3, 9 / 8), (16, 2), (24, 3)):
        layout = parse_layout(f"dp={ranks},zero=3", num_layers=32, num_devices=ranks)
        assert expert_padding(job, layout) == pytest.approx(padding)


@pytest.mark.parametrize("ranks", [1, 2, 7, 8, 9, 16, 64])
def test_stacked_experts_are_cut_into_whole_ones_as_torch_cuts_them(make_job, ranks):
    torch = pytest.importorskip("torch")
    job = make_job("mixtral-8x7b", engine="fsdp", gpus=64, batch=64)
    layout = parse_layout(f"dp={ranks},zero=3", num_layers=32, num_devices=ranks)
    fullest = max(len(each) for each in torch.chunk(torch.arange(8), ranks))
    assert expert_shard_divisor(job, layout) == 8 / fullest
    assert expert_shard_divisor(make_job("mixtral-8x7b", engine="torchtitan", gpus=64, batch=64), layout) == ranks


def test_deepspeed_gathers_and_reduces_by_buckets(make_job, with_engine):
    """A billion weights that the backward pass needs next are gathered, and the buffer of the whole run exists."""
    job = make_job("llama3-8b", engine="deepspeed", gpus=8, batch=8)
    layer, inner = 218_112_000, 2 * 2 * 2048 * 14336
    in_layer = 2 * 10**9 + (2 + 2) * layer + inner + 2 * 500_000_000
    assert lines_of(with_engine(job, memory={"logits_bytes": 0}), "dp=8,zero=3")[LineName.TRANSIENTS] == in_layer
    loss = 12 * 2048 * 128256
    assert lines_of(job, "dp=8,zero=3")[LineName.TRANSIENTS] == loss + 2 * 10**9 + 2 * 500_000_000


@pytest.mark.parametrize(
    ("model", "engine", "lora", "recompute", "counted"),
    [
        ("gemma2-2b", "fsdp", 0, "none", 16.195e9),  # the tanh that caps logits, and norms in fp32
        ("gemma2-2b", "fsdp", 16, "none", 10.019e9),
        ("gemma2-2b", "fsdp", 0, "full", 15.185e9),
        ("gemma2-2b", "deepspeed", 16, "none", 11.619e9),
        ("gemma2-2b", "deepspeed", 0, "none", 17.662e9),
        ("qwen3-30b-a3b", "fsdp", 0, "none", 20.137e9),
        ("qwen3-30b-a3b", "fsdp", 16, "none", 6.757e9),
        ("qwen3-30b-a3b", "fsdp", 0, "full", 19.646e9),
        ("qwen3-30b-a3b", "deepspeed", 0, "full", 22.263e9),
        ("qwen3-30b-a3b", "deepspeed", 16, "none", 11.051e9),  # a view keeps the experts' gathered weights
        ("mixtral-8x7b", "deepspeed", 0, "none", 36.413e9),  # a layer is larger than the limit of gathered weights
    ],
)
def test_capped_logits_and_experts_are_counted(model, engine, lora, recompute, counted):
    """Counts of `planner verify` of transformers 5.23: 2 ranks, ZeRO-3, 2,048 tokens, Gemma with 3 layers, others 2.

    In place of FlashAttention 2, torch's kernel ran; it keeps tensors of the same sizes.
    """
    layers = 3 if model == "gemma2-2b" else 2
    settings = (f"model.num_layers={layers}", *([f"training.lora_rank={lora}"] if lora else []))
    job = load_job(model=model, cluster="dgx-h100", engine=engine, gpus=2, global_batch_size=4,
                   sequence_length=2048, settings=settings)  # fmt: skip
    layout = parse_layout(f"dp=2,zero=3,mbs=1,recompute={recompute}", num_layers=layers, num_devices=2)
    (stage,) = estimate(job, layout).memory
    total = stage.total_bytes - sum(line.num_bytes for line in stage.lines if line.name == LineName.RUNTIME)
    assert total == pytest.approx(counted, rel=0.01 if model == "gemma2-2b" else 0.04)


def test_each_layer_keeps_its_experts_gathered_until_its_backward_pass():
    """As above with 4 layers of Qwen: 15.333 GB, of which 2 further layers of 604 M weights of experts are 2.416 GB."""
    found = []
    for layers in (2, 4):
        settings = (f"model.num_layers={layers}", "training.lora_rank=16")
        job = load_job(model="qwen3-30b-a3b", cluster="dgx-h100", engine="deepspeed", gpus=2, global_batch_size=4,
                       sequence_length=2048, settings=settings)  # fmt: skip
        layout = parse_layout("dp=2,zero=3,mbs=1,recompute=none", num_layers=layers, num_devices=2)
        lines = {line.name: float(line.num_bytes) for line in estimate(job, layout).memory[0].lines}
        found.append(lines)
    experts = 128 * 3 * 2048 * 768
    assert found[1][LineName.TRANSIENTS] - found[0][LineName.TRANSIENTS] == pytest.approx(2 * 2 * experts, rel=0.01)
    assert sum(each for name, each in found[1].items() if name != LineName.RUNTIME) == pytest.approx(15.333e9, rel=0.04)


def test_each_group_of_ranks_has_buffers(make_job, with_engine):
    job = with_engine(make_job("mixtral-8x7b", engine="megatron", gpus=8), memory={"fragmentation": 0.0})
    stage = {"num_layers": 16, "num_expert_layers": 16}
    for text, groups in (("dp=1", 0), ("tp=2,sp=1,dp=4", 2), ("tp=2,sp=1,dp=4,ep=4", 3), ("pp=2,cp=2,dp=2,ep=4", 3)):
        runtime = lines_of(job, text, **stage)[LineName.RUNTIME]
        assert runtime == pytest.approx(job.cluster.device.reserved_memory + groups * 0.25 * GIB)


@pytest.mark.parametrize(
    ("microbatches", "stage", "counted"), [(2, 0, 11.976e9), (2, 1, 13.141e9), (4, 0, 13.883e9), (4, 1, 14.886e9)]
)
def test_one_round_of_interleaved_microbatches_reduces_chunk_by_chunk(microbatches, stage, counted):
    """Bytes alive at the peak of the trainer's own step on fake tensors (planner.trainer.rehearse.counted)."""
    job = load_job(model="llama3-8b", cluster="dgx-h100", gpus=8, sequence_length=2048,
                   global_batch_size=4 * microbatches, settings=("model.num_layers=8",))  # fmt: skip
    layout = parse_layout("pp=2,interleave=2,dp=4,zero=1,mbs=1,recompute=full", num_layers=8, num_devices=8)
    lines = memory_of_stages(job, layout)[stage].lines
    assert sum(line.num_bytes for line in lines if line.name != "runtime") == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("model", "text", "sequence", "stage", "counted"),
    [
        ("llama3-8b", "pp=2,dp=4", 4096, 0, 14.226e9),
        ("llama3-8b", "pp=2,dp=4", 4096, 1, 15.890e9),
        ("llama3-8b", "pp=4,dp=2", 2048, 0, 13.675e9),
        ("llama3-8b", "pp=4,dp=2", 2048, 3, 14.199e9),
        ("llama3-8b", "pp=2,interleave=2,dp=4", 2048, 0, 13.883e9),
        ("llama3-8b", "pp=2,interleave=2,dp=4", 2048, 1, 14.886e9),
        ("llama3.2-1b", "pp=2,dp=4", 2048, 0, 5.359e9),
        ("llama3.2-1b", "pp=2,dp=4", 2048, 1, 5.937e9),
    ],
)
def test_embedding_and_head_of_pipelines_beside_whole_gradients(model, text, sequence, stage, counted):
    """Eight layers, two microbatches a stage: bytes of the trainer's own step (planner.trainer.rehearse.counted)."""
    sizes = {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    job = load_job(model=model, cluster="dgx-h100", gpus=8, sequence_length=sequence,
                   global_batch_size=2 * sizes["pp"] * sizes["dp"], settings=("model.num_layers=8",))  # fmt: skip
    layout = parse_layout(f"{text},zero=1,mbs=1,recompute=full", num_layers=8, num_devices=8)
    lines = memory_of_stages(job, layout)[stage].lines
    assert sum(line.num_bytes for line in lines if line.name != "runtime") == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "recompute", "stage", "counted"),
    [
        ("torch", "full", 0, 38.936e9),
        ("torch", "full", 1, 19.701e9),
        ("torch", "none", 0, 42.831e9),
        ("torch", "none", 1, 22.538e9),
        ("torchtitan", "full", 1, 27.561e9),  # torch's own stage, which computes a layer again for each matrix
    ],
)
def test_a_pass_for_weights_holds_what_it_computes_again(engine, recompute, stage, counted):
    """ZB-V, four microbatches and two layers a chunk: bytes of the trainer's own step (planner.trainer.rehearse)."""
    job = load_job(model="llama3-8b", cluster="dgx-h100", gpus=2, sequence_length=4096, global_batch_size=4,
                   engine=engine, settings=("model.num_layers=8",))  # fmt: skip
    text = f"pp=2,zero=1,schedule=zbv,mbs=1,recompute={recompute}"
    lines = memory_of_stages(job, parse_layout(text, num_layers=8, num_devices=2))[stage].lines
    assert sum(line.num_bytes for line in lines if line.name != "runtime") == pytest.approx(counted, rel=0.02)


def lines_of_one_round(chunks, stage, vocab_size=128256):
    layers = sum(map(int, chunks.split("/")))
    job = load_job(model="llama3-8b", cluster="dgx-h100", gpus=8, sequence_length=2048, global_batch_size=8,
                   settings=(f"model.num_layers={layers}", f"model.vocab_size={vocab_size}"))  # fmt: skip
    text = f"pp=2,interleave={(chunks.count('/') + 1) // 2},layers_per_stage={chunks},dp=4,zero=1,mbs=1,recompute=full"
    lines = memory_of_stages(job, parse_layout(text, num_layers=layers, num_devices=8))[stage].lines
    return {line.name: line.num_bytes for line in lines if line.name != "runtime"}


@pytest.mark.parametrize(("chunks", "counted"), [("2/2/1/1", 3.79), ("3/3/2/2", 4.80), ("2/2/1/1/1/1", 3.99)])
def test_the_chunk_that_one_round_leaves_whole_is_the_largest(chunks, counted):
    """GiB of the first stage's gradients, by `planner verify`."""
    assert lines_of_one_round(chunks, 0)["grads"] / GIB == pytest.approx(counted, rel=2e-3)


def test_a_large_head_is_reduced_before_the_largest_chunk_and_a_small_one_is_no_excuse():
    """All bytes of the last stage, and its gradients if the head is smaller than a layer; by `planner verify`."""
    assert sum(lines_of_one_round("2/2/1/1", 1).values()) == pytest.approx(11.162e9, rel=0.02)
    assert 2.029e9 < lines_of_one_round("2/2/1/1", 1, vocab_size=16000)["grads"] < 1.1 * 2.029e9


@pytest.mark.parametrize(("precision", "pp", "each"), [("bf16", 4, 6), ("fp16", 4, 2), ("bf16", 1, 2)])
def test_pipelines_in_bf16_sum_in_fp32(make_job, precision, pp, each):
    """BF16_Optimizer keeps 2 bytes of autograd's gradient and 4 bytes of the sum; other optimizers sum in 16 bits."""
    job = make_job("gpt3-175b", engine="deepspeed", gpus=64, batch=64, precision=precision, cluster="dgx-h100")
    lines = lines_of(job, f"tp=8,pp={pp},dp={8 // pp},zero=1,sp=0", num_layers=8, policy=2)
    params = lines[LineName.PARAMS] / 2
    assert lines[LineName.GRADS] == each * params
    assert lines[LineName.OPTIMIZER_STATE] * (8 // pp) == pytest.approx(12 * params)


@pytest.mark.parametrize(("text", "buckets"), [("dp=8,zero=0", 0), ("dp=8,zero=1", 2), ("pp=2,dp=4,zero=1", 0)])
def test_gradients_pass_through_a_bucket(make_job, with_engine, text, buckets):
    """ZeRO-1 keeps two buffers of 500 million 16-bit parameters between the microbatches of a step.

    Pipelines reduce gradients in another way. `planner verify` counts the buffers in DeepSpeed's own step.
    """
    job = make_job("llama3-8b", engine="deepspeed", gpus=8, batch=64)
    small = with_engine(job, memory={"gradient_bucket": 0})
    found, without = (lines_of(each, text, num_layers=16)[LineName.TRANSIENTS] for each in (job, small))
    assert found - without == buckets * 2 * 500_000_000


def test_in_8_bits_inputs_of_products_are_kept_and_what_the_gate_reads_is_not(make_job):
    """Transformer Engine: 8-bit inputs of both blocks and the second product; 16-bit gate, up and attention output."""
    job = make_job("llama3-8b", engine="megatron", gpus=8, sequence=512, precision="fp8", cluster="dgx-h100")
    layout = parse_layout("dp=8", num_layers=32, num_devices=8)
    saved = [float(layer_activation_bytes(each, layout)[0]) for each in (with_precision(job, "bf16"), job)]
    assert saved[0] - saved[1] == 512 * (2 * 4096 + 14336)
    experts = make_job(
        "mixtral-8x7b", engine="megatron", gpus=8, sequence=512, precision="fp8", cluster="dgx-h100",
        settings=("model.moe.imbalance=1.0",),
    )  # fmt: skip
    of_layer = [
        float(layer_activation_bytes(each, layout, experts=True)[0])
        for each in (with_precision(experts, "bf16"), experts)
    ]
    # input of attention; of two choices a token their inputs and products; the router reads 16 bits
    assert of_layer[0] - of_layer[1] == pytest.approx(512 * (4096 + 2 * (4096 + 14336)))
    # and of each weight of a layer its copy and that transposed, where the weights themselves are not kept so
    for zero, each in ((0, 2), (1, 0)):
        weights = [lines_of(of, f"dp=8,zero={zero}")[LineName.PARAMS] for of in (job, with_precision(job, "bf16"))]
        assert weights[0] - weights[1] == each * 32 * 218_112_000


def test_experts_share_placeholders_of_one_shape(make_job, with_engine):
    """Mixtral: attention, router and norms of a layer, and one of its experts; the first of two stages has no head."""
    job = make_job("mixtral-8x7b", engine="megatron", gpus=8)
    without = with_engine(job, memory={"gradient_placeholders": False})
    stage = {"num_layers": 16, "num_expert_layers": 16}
    found = [lines_of(each, "pp=2,ep=4,dp=4", **stage)[LineName.TRANSIENTS] for each in (job, without)]
    expert, common = 3 * 4096 * 14336, 4096 * (4096 + 2 * 1024 + 4096) + 8 * 4096 + 2 * 4096
    assert found[0] - found[1] == 2 * (common + expert)


def test_moments_in_few_bits_are_unpacked_when_no_activation_is_held(make_job):
    """8 bytes for each parameter of the shard; the peak of transients is of the backward pass or of the update."""
    job = make_job("llama3-8b", engine="megatron", gpus=8, sequence=8192)
    aware = replace(job, training=job.training.model_copy(update={"memory_recipe": "precision-aware"}))
    for text, shards in (("dp=8,zero=1", 8), ("dp=8,zero=0", 1)):
        lines = lines_of(aware, text, policy=2)
        backward = lines_of(job, text, policy=2)[LineName.TRANSIENTS]
        update = 8 * 8_030_261_248 / shards - lines[LineName.ACTIVATIONS]
        assert lines[LineName.TRANSIENTS] == max(backward, update)
    assert update > backward


def test_attention_without_a_kernel_needs_the_gradient_of_its_scores(make_job, with_engine):
    """Full recompute and no logits: the recomputed layer with its 4-byte scores, and the gradient of the scores."""
    memory = {"logits_bytes": 0, "score_bytes": 4}
    job = with_engine(make_job("gpt3-175b", engine="megatron-2021", gpus=8, settings=OLD_GPT), memory=memory)
    fused = with_engine(make_job("gpt3-175b", engine="megatron-2021", gpus=8), memory=memory)
    scores = 2048 * 2048 * 96 / 8
    masks = (1 + 2) * scores + 2 * 2048 * 12288 - 4 * 96 / 8 * 2048  # of scores and of both blocks, no log-sum-exp
    lines = [lines_of(each, "tp=8,sp=0", policy=2)[LineName.TRANSIENTS] for each in (job, fused)]
    assert lines[0] - lines[1] == pytest.approx(2 * 4 * scores + masks)


def test_light_recompute_in_8_bits_keeps_what_the_report_says(make_job):
    """Bytes per token of one layer of DeepSeek-V3: norms, up-projections and the gate's output are recomputed."""
    job = make_job("deepseek-v3", cluster="hgx-h800", engine="hai-llm", gpus=2048, sequence=4096, precision="fp8")
    layout = parse_layout("pp=16,ep=64", num_layers=61, num_devices=2048)
    _, kept, _ = layer_activation_bytes(job, layout, experts=True)
    h, heads, choices = 7168, 128, 8
    attention = 2 * h + 2 * (1536 + 512 + 64) + 2 * heads * 128 + 4 * heads  # input, latents, output, log-sum-exp
    experts = 2 * h + 8 * 256 + choices * h + 2 * choices * 2048 + 2 * 2048  # residual, router, inputs, gate and up
    assert float(kept) == pytest.approx(4096 * (attention + experts))


def test_inputs_of_products_are_kept_in_8_bits(make_job):
    """A dense layer of DeepSeek-V3 (section 3.3.3): the inputs of both blocks, and gate, up and their product."""
    job = make_job("deepseek-v3", cluster="hgx-h800", engine="hai-llm", gpus=2048, sequence=4096, precision="fp8")
    layout = parse_layout("pp=16,ep=64", num_layers=61, num_devices=2048)
    kept = [float(layer_activation_bytes(each, layout)[0]) / 4096 for each in (job, with_precision(job, "bf16"))]
    narrow, h, heads = 2 * 7168 + 3 * 18432, 7168, 128
    latents, keys_and_values = 2 * 1536 + 2 * 512 + 64, heads * (192 + 192 + 128 + 128)
    wide = 2 * (2 * h + latents + keys_and_values + heads * 128) + 4 * heads
    assert kept == [pytest.approx(wide + narrow), pytest.approx(wide + 2 * narrow)]


def with_precision(job, precision):
    return replace(job, training=job.training.model_copy(update={"precision": precision}))


def test_gradients_that_add_up_unsharded_are_whole_at_every_stage(make_job):
    engine = make_job("llama3-8b", engine="kempnerforge", gpus=8, batch=64)
    params = 8_030_261_248
    for batch, share in ((64, 1), (8, 1 / 8)):
        job = make_job("llama3-8b", engine="kempnerforge", gpus=8, batch=batch)
        assert lines_of(job, "dp=8,zero=3")[LineName.GRADS] == 4 * params * share
    assert lines_of(engine, "dp=8,zero=3")[LineName.OPTIMIZER_STATE] == 4 * params / 8


def test_what_a_profile_adds(make_job, with_engine):
    job = make_job("gpt3-175b", engine="deepspeed", gpus=64)
    text, stage = "tp=8,pp=8,dp=1,sp=0,mbs=2", {"num_layers": 12, "policy": 2}
    with_outputs = lines_of(job, text, **stage)
    without = lines_of(with_engine(job, memory={"keeps_stage_outputs": False}), text, **stage)
    sent = 2 * 2048 * 2 * 12288 * 8  # one 16-bit activation for each of 8 microbatches in flight
    assert with_outputs[LineName.ACTIVATIONS] - without[LineName.ACTIVATIONS] == sent
    last = lines_of(job, text, **stage | {"index": 7})
    assert last[LineName.ACTIVATIONS] == without[LineName.ACTIVATIONS] / 8
    quiet = lines_of(with_engine(job, memory={"communicator_memory": None}), text, **stage)
    assert with_outputs[LineName.RUNTIME] - quiet[LineName.RUNTIME] == pytest.approx(2 * 1.3 * GIB)
    llama = make_job("llama3-8b", engine="kempnerforge", gpus=8)
    cut = lines_of(with_engine(llama, memory={"replicates_embedding": False}), "tp=8,sp=1")
    assert lines_of(llama, "tp=8,sp=1")[LineName.PARAMS] - cut[LineName.PARAMS] == 2 * 128256 * 4096 * 7 / 8
    # logits gathered before the loss do not shrink with tp
    gathered = [lines_of(llama, f"tp={t},sp={int(t > 1)}", policy=2)[LineName.TRANSIENTS] for t in (1, 8)]
    assert gathered[0] == gathered[1] == 6.5 * 2048 * 128256


def test_ranks_beyond_the_key_value_heads_keep_one_head_each(make_job):
    """With tp=8 and two key-value heads, a rank keeps 4 query heads, 1 key head and 1 value head of 128 numbers."""
    layout = parse_layout("tp=8", num_layers=32, num_devices=8)
    one, eight = (make_job("llama3-8b", settings=(f"model.num_kv_heads={heads}",), sequence=1024) for heads in (2, 8))
    kept = [
        next(each.num_bytes for each in activation_terms(job, layout) if each.name.startswith("queries"))
        for job in (one, eight)
    ]
    assert list(map(float, kept)) == [1024 * (4 + 1 + 1) * 128 * 2] * 2


# of Llama 3 8B's 128,256 logits and 4,096 hidden numbers for each of T tokens, in bytes
LOSSES = {
    ("torchtitan", "whole"): lambda T: 10 * T * 128256,
    ("torchtitan", "engine"): lambda T: 10 * T / 8 * 128256 + (4 + 2) * T * 4096,  # its recipes have 8 chunks
    ("megatron-bridge", "fused"): lambda T: 2 * T * 128256,
    # Liger-Kernel, fused_linear_cross_entropy.py: next power of two of T / ceil(V / h)
    ("fsdp", "fused-linear"): lambda T: 2 * {8192: 256, 12288: 512}[T] * 128256 + 2 * T * 4096,
}


@pytest.mark.parametrize("length", [8192, 12288])
@pytest.mark.parametrize(("engine", "loss"), LOSSES)
def test_what_a_loss_keeps_of_its_logits(make_job, engine, loss, length):
    job = make_job("llama3-8b", engine=engine, sequence=length, settings=(f"training.loss={loss}",))
    layout = parse_layout("mbs=1", num_layers=32, num_devices=1)
    assert float(logits_bytes(job, layout)) == LOSSES[engine, loss](length)


def test_ligers_loss_frees_what_was_published(make_job):
    """stas00/ml-engineering, when-to-upgrade-gpus: 99 -> 80 GiB with Liger; Llama 3 8B, ZeRO-2 on 8 H200, 8,192 tokens.

    Liger's other kernels, for norms and SwiGLU, free the rest of the 19 GiB.
    """
    layout = parse_layout("dp=8,zero=2,mbs=1", num_layers=32, num_devices=8)
    peaks = []
    for loss in ("whole", "fused-linear"):
        job = make_job(
            "llama3-8b", "dgx-h200", engine="deepspeed", gpus=8, batch=8, sequence=8192,
            settings=(f"training.loss={loss}",),
        )  # fmt: skip
        lines = memory_lines(job, layout, Stage(index=0, num_layers=32, policy=0))
        peaks.append(sum(float(line.num_bytes) for line in lines) / GIB)
    assert 8 < peaks[0] - peaks[1] < 19


def test_logits_that_are_gathered_before_the_loss_do_not_shrink_with_tp(make_job):
    job = make_job("llama3-8b", engine="fsdp", sequence=8192, settings=("training.loss=fused-linear",))
    assert job.engine.memory.whole_logits
    layouts = [parse_layout(f"tp={tp}", num_layers=32, num_devices=8) for tp in (1, 2, 8)]
    found = {float(logits_bytes(job, layout)) for layout in layouts}
    assert found == {LOSSES["fsdp", "fused-linear"](8192)}


def test_gradients_of_a_layer_and_those_of_the_one_before_are_alive_together(make_job):
    """Llama 3 8B in torch, few tokens: at a layer's end its gradients are in 16 bits, the previous layer's in 32.

    The previous layer's gradients are still being reduced then, and the layer's kept tensors are freed. A stage with a
    single layer has no previous layer.
    """
    job = make_job("llama3-8b", engine="torch", gpus=8, batch=8, sequence=128)
    layout = parse_layout("dp=8,zero=2,mbs=1", num_layers=32, num_devices=8)
    params = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    kept = float(layer_activation_bytes(job, layout)[0])
    found = [float(layer_backward_bytes(job, layout, Stage(index=0, num_layers=n, policy=0))) for n in (1, 32)]
    assert found == [pytest.approx(2 * params - kept), pytest.approx((2 + 4) * params - kept)]


def test_gradients_of_a_feed_forward_block_are_alive_with_that_of_its_last_matrix(make_job):
    """Many tokens: gradients of gate, of the up projection and of the layer's output, and of a matrix in 16 bits."""
    job = make_job("llama3-8b", engine="torch", gpus=8, batch=8, sequence=8192)
    layout = parse_layout("dp=8,zero=2,mbs=1", num_layers=32, num_devices=8)
    found = float(layer_backward_bytes(job, layout, Stage(index=0, num_layers=1, policy=0)))
    assert found == pytest.approx(8192 * 2 * (2 * 14336 + 4096) + 2 * 4096 * 14336)


@pytest.mark.parametrize(
    ("gpus", "layers", "sequence", "counted"),
    [
        (1, 1, 512, 39.029),  # a layer's own reduction: its copy, their sum, and the sum in fp32
        (1, 2, 512, 62.254),
        (2, 1, 2048, 21.243),  # the same, of which two ranks sum half each
        (2, 2, 2048, 35.511),  # and a layer that is gathered ahead
        (2, 3, 2048, 48.984),  # a layer with its gradients, one ahead, and a copy of the one before
        (4, 2, 512, 21.692),  # never both of the latter
    ],
)
def test_few_layers_of_experts_take_the_bytes_of_the_real_program(gpus, layers, sequence, counted):
    """Mixtral 8x7B, whose layers are larger than its head: `planner verify` of transformers 5.23 under FSDP2."""
    settings, layout = [f"model.num_layers={layers}"], f"dp={gpus},zero=3,mbs=1,recompute=full,ep=1"
    given = {"gpus": gpus, "global_batch": 2 * gpus, "seq_len": sequence, "settings": settings, "engine": "fsdp"}
    plan = estimate_layout("mixtral-8x7b", "dgx-h100", layout=layout, **given)
    held = sum(float(line.num_bytes) for line in plan.memory[0].lines if line.name != LineName.RUNTIME)
    assert held == pytest.approx(counted * 1e9, rel=0.012)


@pytest.mark.parametrize(("gpus", "mbs", "gib"), [(1, 4, 67.47), (1, 8, 67.47), (2, 2, 33.74), (2, 4, 33.74)])
def test_a_step_of_one_microbatch_peaks_in_an_update_that_is_not_fused(make_job, gpus, mbs, gib):
    """Published peaks of Mistral-7B in 16 bits (fms-acceleration, a100_80gb.csv): five copies of the weights."""
    settings = ("training.memory_recipe=pure-bf16", "engine.memory.update_copies=1")
    job = make_job("mistral-7b", gpus=gpus, batch=gpus * mbs, sequence=4096, engine="fsdp", settings=settings)
    lines = lines_of(job, f"dp={gpus},zero=3,mbs={mbs}", policy=2)
    told = sum(size for name, size in lines.items() if name != LineName.RUNTIME)
    assert told / 2**30 == pytest.approx(gib, rel=0.01)


def test_gradients_take_the_place_of_activations_in_a_step_of_one_microbatch(make_job):
    one, two = (
        make_job("llama3-8b", engine="fsdp", gpus=8, batch=each, sequence=8192, precision="bf16") for each in (8, 16)
    )
    alone, adds_up = (lines_of(job, "dp=8,zero=3") for job in (one, two))
    assert alone[LineName.GRADS] == adds_up[LineName.GRADS]
    assert adds_up[LineName.TRANSIENTS] - alone[LineName.TRANSIENTS] == alone[LineName.GRADS]
    # Megatron's buffer of gradients lasts
    one, two = (make_job("llama3-8b", gpus=8, batch=each, sequence=8192) for each in (8, 16))
    assert lines_of(one, "dp=8,zero=1") == lines_of(two, "dp=8,zero=1")


@pytest.mark.parametrize("offload", ["none", "activations"])
def test_gpipe_keeps_every_microbatch_of_a_replica_on_the_device_or_on_the_host(make_job, offload):
    """A batch of 64 on 4 replicas is 8 microbatches of 2 sequences; a stage has 8 of 32 layers."""
    job = make_job("llama3-8b", "dgx-h100", engine="megatron", gpus=16, batch=64)
    layout = parse_layout(f"pp=4,dp=4,mbs=2,schedule=gpipe,offload={offload}", num_layers=32, num_devices=16)
    stage = Stage(index=np.arange(4), num_layers=np.full(4, 8), policy=np.zeros(4, dtype=int))
    lines = memory_lines(job, layout, stage) if offload == "none" else host_lines(job, layout, stage)
    [stored] = [line.num_bytes for line in lines if line.name == LineName.ACTIVATIONS]
    [of_layer] = layer_activation_bytes(job, layout, policies=(0,))
    assert stored == pytest.approx(np.full(4, 8 * 8 * float(of_layer)))


def test_only_quantised_weights_are_converted_for_their_products(make_job):
    """In 16 bits, as large as the largest matrix of a layer: the down projection, 14,336 x 4,096."""
    stage, layout = Stage(index=0, num_layers=32, policy=0), parse_layout("dp=8", num_layers=32, num_devices=8)
    lora = ("training.lora_rank=8",)
    plain, low = (
        make_job("llama3-8b", engine="deepspeed", gpus=8, settings=settings)
        for settings in (lora, (*lora, "training.frozen_weights=nf4"))
    )
    assert layer_backward_bytes(low, layout, stage) - layer_backward_bytes(plain, layout, stage) == 2 * 14336 * 4096


@pytest.mark.parametrize(("text", "whole"), [("pp=2,dp=4", True), ("pp=4,dp=2", True), ("dp=8,zero=2", False)])
def test_a_pipeline_of_two_stages_adds_gradients_up_for_a_single_microbatch(make_job, text, whole):
    layout = f"{text},mbs=1"
    job = make_job("llama3-8b", gpus=8, batch=int(text[text.index("dp=") + 3]), engine="megatron")
    job = replace(job, engine=job.engine.model_copy(update={
        "memory": job.engine.memory.model_copy(update={"whole_gradients": "accumulated"})}))  # fmt: skip
    assert bool(whole_gradients(job, parse_layout(layout, num_layers=32, num_devices=8))) == whole


def test_a_layout_fits_only_if_every_stage_does(make_job):
    """The logits of 32 sequences, 32 x 2,048 x 128,256 x 2 bytes at the least, are on the last stage alone."""
    job = make_job("llama3-8b", gpus=16, batch=256, engine="megatron")
    found = estimate(job, parse_layout("pp=2,dp=8,zero=1,mbs=32,recompute=full", num_layers=32, num_devices=16))
    assert [stage.fits for stage in found.memory] == [True, False]
    assert not found.fits


def test_attention_in_8_bits_keeps_its_tensors_in_8_bits(make_job):
    """Transformer Engine's FusedAttnFunc saves q, k, v, out in 8 bits; a trained projection saves its own copy."""
    tokens, sizes = 4096, 4096 + 2 * 1024  # Llama 3 8B: queries, and keys and values of 8 of 32 heads
    found = {}
    for bits in ("true", "false"):
        for rank in (0, 8):
            settings = (f"engine.compute.fp8_attention={bits}", f"training.lora_rank={rank}")
            job = make_job(
                "llama3-8b", "dgx-h100", gpus=8, batch=8, sequence=tokens, precision="fp8", engine="megatron",
                settings=settings,
            )  # fmt: skip
            layout = parse_layout("dp=8,zero=1,mbs=1", num_layers=32, num_devices=8)
            terms = {term.name: float(np.ravel(term.num_bytes)[0]) for term in activation_terms(job, layout)}
            found[bits, rank] = terms["queries, keys and values"] / tokens, terms["attention output"] / tokens
    assert found["false", 0] == found["false", 8] == (2 * sizes, 2 * 4096)
    assert found["true", 8] == (sizes, 4096)
    assert found["true", 0] == (sizes, 2 * 4096)


@pytest.mark.parametrize("ranks", [2, 3, 8, 24, 64])
@pytest.mark.parametrize("tp", [1, 2])
def test_matrices_that_the_borders_of_shards_cut_stay_whole_on_both_ranks(ranks, tp):
    """Oracle: DeepSpeed's rule on the parameters of transformers' Llama 3 8B, rank by rank.

    AutoTP keeps the embedding whole. Executed: tests/executed, deepspeed, `matrices cut by shards`.
    """
    h, f, rows = 4096, 14336, 128256
    layer = [h * h, 1024 * h, 1024 * h, h * h, h * f, h * f, h * f]
    sizes = [rows * h, *(size // tp for size in 32 * layer), rows * h // tp]
    shard, most = sum(sizes) / ranks, 0.0
    for rank in range(ranks):
        begun, held = 0, 0
        for size in sizes:
            held += size * (begun < (rank + 1) * shard - 0.5 and begun + size > rank * shard + 0.5)
            begun += size
        most = max(most, held - shard)
    found = {}
    for zero in (2, 3):
        plan = estimate_layout(  # ZeRO-3 shards every tensor and cuts none
            "llama3-8b", "dgx-h100", layout=f"tp={tp},sp=0,dp={ranks},zero={zero},mbs=1", engine="deepspeed",
            gpus=ranks * tp, seq_len=2048, global_batch=ranks,
        )  # fmt: skip
        found[zero] = {line.name: float(line.num_bytes) for line in plan.memory[0].lines}["grads"]
    assert found[2] - found[3] == pytest.approx(2 * most, abs=1e3 * ranks)
