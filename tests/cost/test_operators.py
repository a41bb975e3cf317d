"""A layer on devices that count: with all but one resource free, seconds equal FLOPs or bytes, counted by hand here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from counting_device import FREE, counting

from planner.cost.compute import head_seconds, linear_seconds, matmul_seconds
from planner.cost.layers import layer_seconds
from planner.layout_text import parse_layout
from planner.specs.calibration import UNCALIBRATED

LENGTH = 8192


# One layer on one rank, all sizes multiples of a tile: linear maps as (rows, fan in, fan out), or with how many of
# them there are, and FLOPs of the attention core for each query and key. T: tokens of the rank's microbatch;
# own: those that it has to itself with sequence parallelism.
def llama3_8b(T, _own, t):
    attention = [(T, 4096, 6144 / t), (T, 4096 / t, 4096)]
    return [*attention, (T, 4096, 2 * 14336 / t), (T, 14336 / t, 4096)], 2 * 2 * 128 * 32 / t


def narrow_values(T, _own, t):
    """Llama 3's layer with keys of 256 beside values of 128, as MiMo-V2-Flash has 192 beside 128."""
    attention = [(T, 4096, (8192 + 2048 + 1024) / t), (T, 4096 / t, 4096)]
    return [*attention, (T, 4096, 2 * 14336 / t), (T, 14336 / t, 4096)], 2 * (256 + 128) * 32 / t


def gpt3_175b(T, _own, t):
    h = 12288
    return [(T, h, 3 * h / t), (T, h / t, h), (T, h, 4 * h / t), (T, 4 * h / t, h)], 2 * 2 * h / t


def t5_large(T, _own, t):
    """The mean of an encoder layer and a decoder layer, which has four more linear maps."""
    attention = [(T, 1024, 3 * 1024 / t), (T, 1024 / t, 1024)]
    cross = [(T, 1024, 1024 / t, 0.5), (T, 1024, 2 * 1024 / t, 0.5), (T, 1024 / t, 1024, 0.5)]
    return [*attention, *cross, (T, 1024, 4096 / t), (T, 4096 / t, 1024)], 2 * 2 * 1024 / t


def latent(T, own, t):
    """DeepSeek-V2, section 2.1: 16 heads with keys of 128 + 128 and values of 128 from a latent of 512."""
    return [(own, 2048, 512 + 128), (T, 512, 16 * 256 / t), (T, 16 * 128 / t, 2048)], 2 * (256 + 128) * 16 / t


def deepseek_v2_lite(T, own, t):
    """DeepSeek-V2-Lite does not compress queries."""
    attention, core = latent(T, own, t)
    ffn = [(T, 2048, 2 * 11264 / t), (T, 11264 / t, 2048)]
    return [*attention, (T, 2048, 16 * 256 / t), *ffn], core


def compressed_queries(T, own, t):
    attention, core = latent(T, own, t)
    ffn = [(T, 2048, 2 * 11264 / t), (T, 11264 / t, 2048)]
    return [*attention, (own, 2048, 1536), (T, 1536, 16 * 256 / t), *ffn], core


def experts(T, own, t):
    """128 experts of width 1408, 6 for each token, and shared experts of width 4096; with ep 8, 16 experts are here."""
    attention, core = latent(T, own, t)
    each = T / t * 6 / 16
    here = [(each, 2048, 2 * 1408, 16), (each, 1408, 2048, 16)]
    shared = [(T, 2048, 2 * 4096 / t), (T, 4096 / t, 2048)]
    return [*attention, (T, 2048, 16 * 256 / t), (T / t, 2048, 128), *here, *shared], core


LATENT = (
    *("model.mla.rope_head_size=128", "model.ffn_hidden_size=11264"),
    *("model.moe.num_experts=128", "model.moe.shared_ffn_hidden_size=4096", "model.moe.imbalance=1.0"),
)
LONG = (f"model.max_sequence_length={LENGTH}",)
CASES = {
    llama3_8b: ("llama3-8b", ()),
    narrow_values: ("llama3-8b", ("model.head_size=256", "model.value_head_size=128")),
    gpt3_175b: ("gpt3-175b", LONG),
    t5_large: ("t5-large", LONG),
    deepseek_v2_lite: ("deepseek-v2-lite", LATENT),
    compressed_queries: ("deepseek-v2-lite", (*LATENT, "model.mla.q_lora_rank=1536")),
    experts: ("deepseek-v2-lite", LATENT),
}
SPAN = {t5_large: (LENGTH + LENGTH / 2 + LENGTH) / 2}  # all in the encoder; half in the decoder, and all of the encoder


def priced(make_job, by_hand, text, unit, *settings, exchange="gather"):
    """Seconds of the layer, its layout, all tokens and the rank's own tokens, and the linear maps."""
    name, own_settings = CASES[by_hand]
    job = counting(make_job(name, settings=(*own_settings, *settings), sequence=LENGTH), unit)
    communication = job.engine.communication.model_copy(update={"context_exchange": exchange})
    apart = job.engine.memory.model_copy(update={"fused_norms": False})
    job = replace(job, engine=job.engine.model_copy(update={"communication": communication, "memory": apart}))
    ep = ",ep=8" if by_hand is experts else ""
    layout = parse_layout(text + ep, num_layers=job.model.num_layers, num_devices=64)
    T = LENGTH * layout.mbs / layout.cp
    own = T / layout.tp if layout.sp else T
    return layer_seconds(job, layout, experts=by_hand is experts), layout, T, own, *by_hand(T, own, layout.tp)


def flops_of(maps):
    return sum(2 * rows * fan_in * fan_out * (many or [1])[0] for rows, fan_in, fan_out, *many in maps)


def bytes_of(maps, weight=2):
    """Bytes of products in 16 bits: both factors are read, and the product is written.

    weight: bytes moved for each element of the weight, or of its gradient.
    """
    return sum(
        (2 * rows * (fan_in + fan_out) + weight * fan_in * fan_out) * (many or [1])[0]
        for rows, fan_in, fan_out, *many in maps
    )


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=2,sp=1", "tp=8,sp=1", "tp=8,sp=0", "tp=2,cp=2,mbs=3", "tp=1,cp=4"])
@pytest.mark.parametrize("by_hand", CASES)
def test_a_layer_takes_the_flops_of_its_products(make_job, by_hand, text, exchange):
    found, layout, T, _, maps, each = priced(make_job, by_hand, text, "flops", exchange=exchange)
    rows = LENGTH / layout.cp
    # a kernel for each hop, two tiles of keys beside the half of its rows that the last rank's queries all see
    started = 1 + 256 / (rows / 2) if exchange == "ring" and layout.cp > 1 else 1
    core = each * T * SPAN.get(by_hand, LENGTH / 2) * started
    assert found.core.forward == pytest.approx(core)
    assert found.passes.forward == pytest.approx(flops_of(maps) + core)
    assert found.passes.backward_input == pytest.approx(flops_of(maps) + 2.5 * core)  # five products for two (Dao 2023)
    assert found.passes.backward_weight == pytest.approx(flops_of(maps))


@pytest.mark.parametrize("text", ["tp=1,sp=0,ep=8", "tp=2,sp=1,ep=8"])
def test_in_8_bit_training_only_the_router_multiplies_in_16_bits(make_job, text):
    """DeepSeek-V3 (2024), section 3.3.1: gates stay in 16 bits; on the device, products in 8 bits are free."""
    settings = (*LATENT, "engine.compute.fp8_experts=true")
    job = make_job("deepseek-v2-lite", "dgx-h100", precision="fp8", settings=settings, sequence=LENGTH)
    job = counting(job, "flops")
    device = job.cluster.device
    device = device.model_copy(update={"peak": {**device.peak, "fp8": FREE}})
    job = replace(job, cluster=job.cluster.model_copy(update={"device": device}))
    layout = parse_layout(text, num_layers=27, num_devices=64)
    found = layer_seconds(job, layout, experts=True).passes.backward_weight
    assert found == pytest.approx(2 * LENGTH / layout.tp * 2048 * 128)


def test_numbers_of_tokens_need_no_alignment_and_widths_do(make_job):
    """100 tokens need no padding; a width of 1,800 fills 15 tiles of 128 and reaches three quarters of the rate."""
    job = counting(make_job("llama3-8b"), "flops")
    assert linear_seconds(job, 100, 1792, 512).backward_weight == 2 * 100 * 1792 * 512
    assert linear_seconds(job, 100, 1800, 512).backward_weight == pytest.approx(2 * 100 * 15 * 128 * 512 / 0.75)


@pytest.mark.parametrize(
    ("engine", "recipe", "moved"),
    [("megatron", "engine", 8), ("megatron", "zero-16", 4), ("fsdp", "engine", 2)],
    ids=["fp32 sum", "16-bit sum", "added later"],
)
def test_gradients_that_the_product_adds_to_a_sum_are_read_and_written_there(make_job, engine, recipe, moved):
    """By hand, of 100 tokens and widths of 1,792 and 512: both factors in 16 bits, and the sum once each way."""
    job = counting(make_job("llama3-8b", engine=engine, settings=(f"training.memory_recipe={recipe}",)), "bytes")
    found = linear_seconds(job, 100, 1792, 512)
    assert found.backward_weight == 2 * 100 * (1792 + 512) + moved * 1792 * 512
    assert found.forward == found.backward_input == 2 * (100 * (1792 + 512) + 1792 * 512)


@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=2,sp=1", "tp=2,cp=2,mbs=3"])
def test_adapters_add_two_thin_products_to_each_matrix_and_frozen_weights_have_no_gradients(make_job, text):
    targets = "training.lora_targets=[query, key, value, output, gate, up, down]"
    found, layout, T, _, maps, each = priced(make_job, llama3_8b, text, "flops", "training.lora_rank=128", targets)
    t = layout.tp
    by_columns = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 14336), (4096, 14336)]
    thin = [one for a, b in by_columns for one in ((T, a, 128), (T, 128, b / t))]
    thin += [one for a, b in ((4096, 4096), (14336, 4096)) for one in ((T, a / t, 128), (T, 128, b))]
    core = each * T * LENGTH / 2
    assert found.passes.forward == pytest.approx(flops_of(maps) + flops_of(thin) + core)
    assert found.passes.backward_input == pytest.approx(flops_of(maps) + flops_of(thin) + 2.5 * core)
    assert found.passes.backward_weight == pytest.approx(flops_of(thin))


# --- bytes --------------------------------------------------------------------------------------------------------


# Operators beside the products, forward and backward, in elements for each token: tensors read and written.
NORM, ROTARY, GATE, GELU, PERMUTED = (2, 5), (2, 2), (3, 5), (2, 4), (4, 4)
RESIDUAL = (3, 4)
DROPPED = (3.5, 4.5)  # the mask is a byte


def of(width, *operators):
    return [width * sum(each) for each in zip(*operators, strict=True)]


HEADS = 4096 + 1024  # queries and keys
MOVED = {  # of all tokens unless they are split; cut by tp
    llama3_8b: (of(4096, NORM, NORM, RESIDUAL, RESIDUAL), [2 * HEADS + 3 * 14336, 2 * HEADS + 5 * 14336]),
    gpt3_175b: (of(12288, NORM, NORM, RESIDUAL, RESIDUAL), of(4 * 12288, GELU)),
}
TEXTS = ["tp=1,sp=0", "tp=2,sp=1", "tp=8,sp=0", "tp=2,cp=2,mbs=3"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("by_hand", MOVED)
def test_a_layer_takes_the_bytes_of_its_operators(make_job, by_hand, text):
    found, layout, T, own, maps, _ = priced(make_job, by_hand, text, "bytes")
    whole, cut = MOVED[by_hand]
    moved = [2 * (a * own + b * T / layout.tp) for a, b in zip(whole, cut, strict=True)]
    assert found.passes.forward == pytest.approx(bytes_of(maps) + moved[0])
    assert found.passes.backward_input == pytest.approx(bytes_of(maps) + moved[1])
    # the product of a gradient reads and writes a sum in fp32
    assert found.passes.backward_weight == pytest.approx(bytes_of(maps, weight=8))


def test_norms_of_heads_and_dropout_move_what_they_read_and_write(make_job):
    for text in TEXTS:
        plain, layout, T, own, *_ = priced(make_job, llama3_8b, text, "bytes")
        normed, *_ = priced(make_job, llama3_8b, text, "bytes", "model.qk_norm=head")
        forward, backward = (2 * each * T / layout.tp for each in of(HEADS, NORM))
        assert normed.passes.forward - plain.passes.forward == pytest.approx(forward, rel=1e-6)
        assert normed.passes.backward - plain.passes.backward == pytest.approx(backward, rel=1e-6)
        plain, layout, T, own, *_ = priced(make_job, gpt3_175b, text, "bytes")
        dropped, *_ = priced(make_job, gpt3_175b, text, "bytes", "training.dropout=0.1")
        for name, index in (("forward", 0), ("backward_input", 1)):
            more = 2 * own * 2 * 12288 * (DROPPED[index] - RESIDUAL[index])
            assert getattr(dropped.passes, name) - getattr(plain.passes, name) == pytest.approx(more, rel=1e-6)


@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=8,sp=0", "tp=2,mbs=3"])
def test_unfused_attention_moves_the_square_of_scores(make_job, text):
    """Two products per head; softmax, mask and dropout move 9 bytes a score forward, 11 backward; heads are copied."""
    fused, layout, T, *_ = priced(make_job, gpt3_175b, text, "bytes")
    found, *_ = priced(make_job, gpt3_175b, text, "bytes", "training.attention=unfused")
    s, heads = LENGTH, layout.mbs * 96 / layout.tp
    products = 2 * 2 * heads * (s * 128 + 128 * s + s * s)
    copied = 12288 * T / layout.tp
    forward = found.passes.forward - fused.passes.forward
    backward = found.passes.backward_input - fused.passes.backward_input
    assert found.core.forward == pytest.approx(products + 9 * heads * s * s)
    assert forward == pytest.approx(products + 9 * heads * s * s + 16 * copied)
    assert backward == pytest.approx(2 * products + 11 * heads * s * s + 22 * copied)
    for by_hand, widths in ((gpt3_175b, 96 * (128 + 128)), (narrow_values, 32 * (256 + 128))):
        counted, *_ = priced(make_job, by_hand, text, "flops", "training.attention=unfused")
        assert counted.core.forward == pytest.approx(2 * layout.mbs / layout.tp * s * s * widths)


@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=2,sp=1", "tp=2,cp=2,mbs=2"])
def test_experts_read_their_weights_and_move_tokens_there_and_back(make_job, text):
    found, layout, T, own, maps, _ = priced(make_job, experts, text, "bytes")
    t = layout.tp
    heads = of((16 + 16) * 256, ROTARY)
    gates = of(T / t * 6 * 1408 + T / t * 4096, GATE)
    for index, name in enumerate(("forward", "backward_input")):
        light = own * of(2048, NORM, NORM, RESIDUAL, RESIDUAL)[index] + heads[index] * T / t
        moved = of(T / t * 6 * 2048, PERMUTED)[index]
        assert getattr(found.passes, name) == pytest.approx(bytes_of(maps) + 2 * (light + moved + gates[index])), name


@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=2,sp=1"])
def test_adapters_of_experts_move_what_their_products_and_additions_do(make_job, text):
    """For each of 16 experts, products to rank 128 and back; an addition reads two tensors and writes one."""
    lora = ("training.lora_rank=128", "training.lora_targets=[expert_up, expert_down]")
    plain, _, T, _, _, _ = priced(make_job, experts, text, "bytes")
    found, layout, *_ = priced(make_job, experts, text, "bytes", *lora)
    each = T / layout.tp * 6 / 16
    thin = [(each, a, b, 16) for a, b in ((2048, 128), (128, 2 * 1408), (1408, 128), (128, 2048))]
    more = bytes_of(thin) + 2 * 3 * 16 * each * (2 * 1408 + 2048)
    assert found.passes.forward - plain.passes.forward == pytest.approx(more, rel=1e-6)


@pytest.mark.parametrize(
    ("by_hand", "module", "repeated"),  # which of the linear maps above
    [
        (llama3_8b, "mlp", slice(2, 4)),
        (gpt3_175b, "mlp", slice(2, 4)),
        (deepseek_v2_lite, "mla_up_proj", slice(1, 4, 2)),
        (experts, "mla_up_proj", slice(1, 4, 2)),
        (experts, "moe", slice(4, 9)),
        (experts, "shared_experts", slice(7, 9)),
        (experts, "moe_act", slice(0)),
        (llama3_8b, "layernorm", slice(0)),
    ],
)
@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=2,sp=1"])
def test_a_part_of_a_layer_repeats_its_products(make_job, by_hand, module, repeated, text):
    found, _, _, _, maps, _ = priced(make_job, by_hand, text, "flops")
    seconds = sum(each for parts, each in found.parts.items() if module in parts)
    assert seconds == pytest.approx(flops_of(maps[repeated]))


@pytest.mark.parametrize("by_hand", [llama3_8b, gpt3_175b, deepseek_v2_lite, compressed_queries, experts])
@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=2,sp=1", "tp=2,cp=2,mbs=2"])
def test_light_recompute_repeats_norms_the_gate_and_what_comes_from_a_latent(make_job, by_hand, text):
    found, layout, T, own, *_ = priced(make_job, by_hand, text, "bytes")
    t = layout.tp
    width, ffn = {llama3_8b: (4096, 14336), gpt3_175b: (12288, 0), experts: (2048, 6 * 1408 + 4096)}.get(
        by_hand, (2048, 11264)
    )
    activation = GELU[0] * 4 * 12288 if by_hand is gpt3_175b else GATE[0] * ffn
    again = 2 * (2 * NORM[0] * width * own + activation * T / t)
    if by_hand not in (llama3_8b, gpt3_175b):
        queries = 1536 if by_hand is compressed_queries else 2048
        again += bytes_of([(T, 512, 16 * 256 / t), (T, queries, 16 * 256 / t)])
        again += 2 * ROTARY[0] * 2 * 16 * 256 * T / t
    repeated = [seconds for parts, seconds in found.parts.items() if parts & {"activation", "layernorm", "mla_up_proj"}]
    assert sum(repeated) == pytest.approx(again)


@pytest.mark.parametrize(
    ("by_hand", "outputs", "gradients"),
    [
        (llama3_8b, 4096, 4096 + 2 * 1024),
        (narrow_values, 4096, 8192 + 2048 + 1024),
        (deepseek_v2_lite, 16 * 128, 16 * (256 + 256 + 128)),
    ],
)
@pytest.mark.parametrize("text", ["tp=1,cp=4", "tp=2,cp=2,mbs=3"])
def test_a_hop_of_a_ring_adds_a_part_to_the_sum(make_job, by_hand, outputs, gradients, text):
    """A hop reads part and sum, and writes the sum: outputs forward; gradients of queries, keys, values backward."""
    gathered, layout, T, *_ = priced(make_job, by_hand, text, "bytes")
    ring, *_ = priced(make_job, by_hand, text, "bytes", exchange="ring")
    hops, cut = layout.cp - 1, T / layout.tp
    assert ring.core.forward - gathered.core.forward == pytest.approx(hops * 2 * 3 * outputs * cut)
    backward = ring.passes.backward_input - gathered.passes.backward_input
    assert backward == pytest.approx(hops * 2 * 3 * gradients * cut, rel=1e-6)


@pytest.mark.parametrize("text", ["tp=1,sp=0", "tp=2,sp=1"])
def test_quantised_weights_are_unpacked_for_both_passes(make_job, text):
    """Weights are read in 4 bits, with 0.127 bits of constants, and written in 16 bits."""
    lora = ("training.lora_rank=128", "training.precision=bf16")
    plain, layout, *_ = priced(make_job, llama3_8b, text, "bytes", *lora)
    packed, *_ = priced(make_job, llama3_8b, text, "bytes", *lora, "training.frozen_weights=nf4")
    held = (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) / layout.tp + 2 * 4096
    for name in ("forward", "backward_input"):
        more = getattr(packed.passes, name) - getattr(plain.passes, name)
        assert more == pytest.approx(held * (4 + 0.127 + 16) / 8, rel=1e-6), name
    assert packed.passes.backward_weight == plain.passes.backward_weight


# bytes for each logit and, times V h, those of the weights: 3 products read or write them in each part; parts add up;
# Megatron's third product reads and writes a sum, in fp32, and Bridge's in 16 bits
LOSSES = {
    ("megatron", "whole"): (2 * 3 + 28, 2 * 2 + 8),
    ("megatron-bridge", "fused"): (2 * 3 + 10, 2 * 2 + 4),
    ("torchtitan", "chunked"): (2 * 3 + 28, 8 * 2 * 3 + 7 * (2 + 2 * 4)),
    # ceil(128256 / 4096) = 32 parts
    ("deepspeed", "fused-linear"): (2 * 3 + 6, 32 * 2 * 3 + 31 * (2 + 2 * 2)),
}


@pytest.mark.parametrize(("engine", "loss"), LOSSES)
def test_bytes_of_head_and_loss_by_hand(make_job, engine, loss):
    """Two sequences: hidden states are read and written by each of three products."""
    settings = (f"training.loss={loss}",)
    job = counting(make_job("llama3-8b", engine=engine, sequence=LENGTH, settings=settings), "bytes")
    layout = parse_layout("mbs=2", num_layers=32, num_devices=1)
    tokens, vocab, h = 2 * LENGTH, 128256, 4096
    of_logits, of_weights = LOSSES[engine, loss]
    by_hand = tokens * vocab * of_logits + vocab * h * of_weights + tokens * h * 2 * 3
    assert head_seconds(job, layout).total == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize("tp", [1, 8])
def test_a_gate_of_attention_is_one_more_product_that_tensor_parallelism_cuts(make_job, tp):
    """Qiu et al. (arXiv 2505.06708), section 2.2, by element: a product from hidden state to 32 heads of 128."""
    layout = parse_layout(f"tp={tp}", num_layers=32, num_devices=8)
    gated, plain = (
        layer_seconds(
            counting(make_job("llama3-8b", settings=(f"model.attention_gate={gate}",), sequence=LENGTH), "flops"),
            layout,
        ).passes.forward
        for gate in ("element", "none")
    )
    assert gated - plain == pytest.approx(2 * LENGTH * 4096 * 32 * 128 / tp)


@pytest.mark.parametrize(("cluster", "ratio"), [("dgx-h100", 0.60 / 0.35), ("dgx-a100", 1.0), ("dgx-b200", 1.0)])
def test_the_second_flash_attention_is_slower_on_hopper_alone(make_job, cluster, ratio):
    """Shah et al. (2024): 35 % of the peak of an H100 with FlashAttention-2, about 60 % with kernels written for it.

    Dao (2023), section 4: FlashAttention-2 is 1.3 to 2.5 times as fast as the first version in Triton.
    """

    def core(kernel):
        settings = (f"engine.compute.attention_kernel={kernel}",)
        job = replace(make_job("llama3-8b", cluster, settings=settings), calibration=UNCALIBRATED)
        free = job.cluster.device.efficiency.model_copy(update={"launch": 0.0})
        device = job.cluster.device.model_copy(update={"efficiency": free})
        job = replace(job, cluster=job.cluster.model_copy(update={"device": device}))
        return layer_seconds(job, parse_layout("tp=1", num_layers=32, num_devices=8)).core.forward

    assert core("flash-2") / core("latest") == pytest.approx(ratio)
    assert 1.299 < core("flash-1") / core("flash-2") < 2.5


def test_the_factor_of_attentions_core_is_a_time(make_job):
    job = replace(make_job("llama3-8b", "dgx-h100"), calibration=UNCALIBRATED)
    slower = replace(job, calibration=UNCALIBRATED.model_copy(update={"core_attention": 1.5}))
    assert slower.attention_share == pytest.approx(job.attention_share / 1.5)
    own = replace(job, calibration=UNCALIBRATED.model_copy(update={"core_attention": 1.5, "attention": 0.4}))
    assert own.attention_share == 0.4  # a user's runs say the share itself
    faster = replace(job, calibration=UNCALIBRATED.model_copy(update={"core_attention": 0.1}))
    assert faster.attention_share == 1  # no kernel exceeds the peak


@pytest.mark.parametrize(("precision", "factor"), [("fp8", 1 / 0.7), ("bf16", 1)])
def test_kernels_with_a_scale_for_each_row_are_slower_only_in_8_bits(make_job, precision, factor):
    """At 0.7 of the speed a product's arithmetic takes 1 / 0.7 as long; 16-bit products do not change."""
    seconds = []
    for speed in (1, 0.7):
        settings = (f"engine.compute.low_precision_speed={speed}",)
        # H100, not the A100 of the default cluster, has products in 8 bits
        job = make_job("llama3-8b", "dgx-h100", engine="torchtitan", precision=precision, settings=settings)
        seconds.append(float(matmul_seconds(counting(job, "flops"), 4096, 4096, 4096)))
    assert seconds[1] / seconds[0] == pytest.approx(factor)
