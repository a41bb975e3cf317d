"""Seconds of computation of one transformer layer for one microbatch, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.adapters import adapted_matrices, frozen_bytes_per_param
from planner.cost.blocks import (
    expert_input_width,
    gate_params,
    indexer_matmul_params,
    output_width,
    qkv_width,
    value_size,
)
from planner.cost.compute import PassSeconds, linear_seconds, matmul_seconds, memory_bound_seconds
from planner.cost.mixers import mixer_shape
from planner.cost.parameters import cross_attention_share
from planner.cost.recompute import ACTIVATION, norm_modules
from planner.cost.stage import layer_params
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.layout import LayerDegrees
    from planner.numbers import Number
    from planner.specs.cluster import Precision
    from planner.specs.job import PoolJob
    from planner.specs.model import LatentAttention, MixtureOfExperts, ModelSpec

FLASH_BACKWARD: Final = 2.5
"""Fused attention's backward pass runs five products for every two of the forward pass (Dao 2023, section 3.1)."""

_HOP_SHARE: Final = 1 / 3
"""Operators of one hop of ring attention, divided by the operators of a layer: about 8 / 24.

The 8 are two slices, a send, a receive, the kernel, and three operators that correct the sum (Transformer Engine,
attention/dot_product_attention/context_parallel.py).
"""

_KERNEL_KEYS: Final = 256
"""Number of keys that a fused kernel could process in the time that its start and end take.

The value is two tiles of 128 keys (Dao 2023, section 3.3).
"""

_BACKWARD_OPERATORS: Final = 1.6
"""Backward operators launched for each forward operator in eager mode; the value is assumed.

Counted by torch's dispatcher, without views, the ratio is 1.0 for a layer of GPT-2 and 1.9 for a layer of Llama in
transformers 5.23, and 1.3 and 1.5 in our trainer. Host times of both passes of a layer, measured where the GPU waits
for the host, would replace the assumption.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer for one microbatch on one device, without communication.

    core_forward: the part of the forward pass spent in the core of attention.
    parts: forward seconds of each part of a layer; the key names the modules (`planner.cost.recompute.modules_of`)
        whose recompute repeats the part.
    """

    passes: PassSeconds
    core_forward: Number
    parts: Mapping[frozenset[str], Number]


def tokens_per_microbatch(job: PoolJob, layout: LayerDegrees) -> Number:
    """Tokens of one microbatch on one context-parallel rank: s b / c.

    Source: definition of context parallelism.
    """
    return job.training.sequence_length * layout.mbs / layout.cp


def core_widths(model: ModelSpec, tp: Number) -> tuple[int, Number, Number]:
    """Widths of the queries, keys and values that the core of attention reads, of all tensor-parallel ranks together.

    Every rank has at least one key-value head.

    Source: Megatron-LM, transformer/attention.py (num_query_groups_per_partition); DeepSeek-V2 (2024), section 2.1.
    """
    shared = np.maximum(model.num_kv_heads, tp) if model.mla is None else model.num_heads
    return model.num_heads * model.head_size, shared * model.head_size, shared * value_size(model)


def attention_span(model: ModelSpec, sequence_length: int, *, causal: bool, local: bool) -> float:
    """Keys that a query of one layer attends to, on average over queries.

    The number is s / 2 for a causal model, and s for encoders and for kernels that execute the whole square. A window
    of w keys in a `local` layer, or an indexer that chooses w keys, reduces the number to w - w^2 / (2 s). A decoder
    that follows an encoder also attends to the s positions of the encoder.

    Source: counting the pairs of a banded lower triangle.
    """
    s, w = float(sequence_length), float(model.sliding_window) if local else 0.0
    if model.sparse is not None:
        local, w = True, float(model.sparse.top_k)
    ahead = {"decoder": 0.0, "encoder": 1.0, "encoder-decoder": model.num_encoder_layers / model.num_layers}[model.kind]
    later = ahead if causal else 1.0  # share of the layers that attend to later positions
    cross = cross_attention_share(model) * s
    whole = (1 + later) / 2 * s
    if not local or not w or w >= s:
        return whole + cross
    return later * s + (1 - later) * (w - w * w / (2 * s)) + cross


def is_local(kind: ModelSpec) -> bool:
    """Whether all layers of this kind have a sliding window.

    Source: definition of the model document.
    """
    return kind.sliding_window > 0 and not kind.global_every


def head_widths(model: ModelSpec) -> int:
    """Sum of the sizes of a head's queries and values in the core of attention.

    Source: definition of the model document; DeepSeek-V2 (2024), section 2.1, for latent attention.
    """
    return model.head_size + value_size(model)


def indexer_flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """Forward FLOPs of the scores by which an indexer chooses keys: light queries times all earlier keys, 2 (s/2) n d.

    Source: DeepSeek-V3.2 (2025), section 2.1, equation 1.
    """
    if model.sparse is None or model.sparse.shared:
        return 0.0
    return float(sequence_length) * model.sparse.num_heads * model.sparse.head_size


def _mixer_projections(job: PoolJob, layout: LayerDegrees) -> list[PassSeconds]:
    """Seconds of a mixer's matrix products, and of products with the matrices in `layer_matrix_params`.

    Source: mixers.py; if every rank holds a matrix whole, each rank multiplies it by its own tokens.
    """
    model, tokens, h = job.model, tokens_per_microbatch(job, layout), job.model.hidden_size
    own = tokens / np.where(np.equal(layout.sp, 1), layout.tp, 1)
    shape = mixer_shape(model)
    maps = [linear_seconds(job, tokens, inputs, outputs / layout.tp) for inputs, outputs in shape.maps]
    maps += [linear_seconds(job, own, inputs, outputs) for inputs, outputs in shape.whole]
    if further := model.layer_matrix_params + indexer_matmul_params(model):
        maps.append(linear_seconds(job, own, h, further / h))
    if gate := gate_params(model):
        maps.append(linear_seconds(job, tokens, h, gate / h / layout.tp))
    return maps


def _mixer_core_seconds(job: PoolJob, layout: LayerDegrees) -> PassSeconds:
    """Seconds of a mixer's computation between its projections: a scan or chunks, and a convolution.

    The forward pass is assumed to reach the same share of the peak as fused attention, because no kernel times are
    known. The backward pass takes twice as long. Both passes add time for bytes read and written.

    Source: FLOPs of mixers.py; 4 bytes for each kept element, which is written and read in 16 bits.
    """
    shape = mixer_shape(job.model)
    if not shape.maps:
        return PassSeconds()
    tokens = tokens_per_microbatch(job, layout) / layout.tp
    device = job.cluster.device
    rate = device.peak[job.core_precision] * job.attention_share
    seconds = tokens * shape.core_flops / rate
    moved = memory_bound_seconds(job, 2.0 * job.compute_bytes * tokens * shape.kept)
    launch = 2.0 * device.efficiency.launch
    return PassSeconds(forward=seconds + moved + launch, backward_input=2.0 * (seconds + moved) + launch)


def _projection_seconds(job: PoolJob, layout: LayerDegrees) -> PassSeconds:
    """Seconds of the projections into and out of attention.

    Every tensor-parallel rank holds the whole down-projections of latent attention; with sequence parallelism each rank
    computes them for its own tokens. Cross-attention projects queries of the decoder, and keys and values of the
    encoder's output, which has the same length.

    Source: Shoeybi et al., Megatron-LM (2019), section 3; DeepSeek-V2 (2024), section 2.1.
    """
    model, tokens, t = job.model, tokens_per_microbatch(job, layout), layout.tp
    h = model.hidden_size
    further = _mixer_projections(job, layout)
    if not model.attends:
        return sum(further, PassSeconds())
    if model.mla is None:
        maps = [*further, linear_seconds(job, tokens, h, qkv_width(model) / t)]
    else:
        maps = [*further, *_latent_projections(job, layout, model.mla)]
    maps.append(linear_seconds(job, tokens, output_width(model) / t, h))
    share = cross_attention_share(model)
    if not share:
        return sum(maps, PassSeconds())
    query = model.num_heads * model.head_size
    query, key_value = query / t, (qkv_width(model) - query) / t
    cross = linear_seconds(job, tokens, h, query) + linear_seconds(job, tokens, h, key_value) + maps[-1]
    return sum(maps, cross * share)


def _latent_projections(job: PoolJob, layout: LayerDegrees, mla: LatentAttention) -> list[PassSeconds]:
    tokens, h = tokens_per_microbatch(job, layout), job.model.hidden_size
    own = tokens / np.where(np.equal(layout.sp, 1), layout.tp, 1)
    maps = [linear_seconds(job, own, h, mla.kv_lora_rank + mla.rope_head_size), *_up_projections(job, layout, mla)]
    return [*maps, linear_seconds(job, own, h, mla.q_lora_rank)] if mla.q_lora_rank else maps


def _up_projections(job: PoolJob, layout: LayerDegrees, mla: LatentAttention) -> list[PassSeconds]:
    """Seconds of the up-projections to queries, keys and values; queries without a latent use the layer's input."""
    tokens, heads = tokens_per_microbatch(job, layout), job.model.num_heads / layout.tp
    query = heads * (mla.nope_head_size + mla.rope_head_size)
    return [
        linear_seconds(job, tokens, mla.kv_lora_rank, heads * (mla.nope_head_size + mla.value_head_size)),
        linear_seconds(job, tokens, mla.q_lora_rank or job.model.hidden_size, query),
    ]


def _core_seconds(job: PoolJob, layout: LayerDegrees, *, local: bool) -> PassSeconds:
    """Seconds of softmax(Q K^T) V on one device; `local`: inside a sliding window.

    Fused kernels execute the causal half, or the band of a sliding window. In ring attention each hop launches its own
    kernel, and the kernel's start and end take time. A rank holds an early and a late part of the sequence, so a hop
    computes half a square for each part. On the slowest rank, all queries attend to half of the keys. The unfused
    kernels of 2021 execute the whole square and move the scores through memory: 9 a s^2 b bytes forward, 11 backward
    (softmax, mask and dropout in 16 bits).

    Source: Dao (2023), section 3.1; Transformer Engine, attention/dot_product_attention/context_parallel.py; byte
    counts derived here from the operators' inputs and outputs.
    """
    model, s = job.model, job.training.sequence_length
    if not model.attends:
        return _mixer_core_seconds(job, layout)
    heads = layout.mbs * model.num_heads / layout.tp
    rows = s / layout.cp
    if job.training.attention == "flash":
        device = job.cluster.device
        width = head_widths(model)
        hops = _num_hops(job, layout)
        started = 1.0 + np.minimum(1, hops) * _KERNEL_KEYS / (rows / 2)
        flops = 2.0 * rows * attention_span(model, s, causal=True, local=local) * width * heads * started
        flops = flops + layout.mbs * rows * indexer_flops_per_token(model, s)
        rate = device.peak[job.core_precision] * job.attention_share
        launch = (1.0 + hops) * job.launch_seconds
        one = PassSeconds(forward=flops / rate + launch, backward_input=FLASH_BACKWARD * flops / rate + launch)
        return one + _merge_seconds(job, layout) + _mixer_core_seconds(job, layout)
    scores = matmul_seconds(job, rows, s, model.head_size, heads, precision=job.core_precision)
    weighted = matmul_seconds(job, rows, value_size(model), s, heads, precision=job.core_precision)
    square = rows * s * heads * job.compute_bytes / 2
    one = PassSeconds(
        forward=scores + weighted + memory_bound_seconds(job, 9.0 * square),
        backward_input=2.0 * (scores + weighted) + memory_bound_seconds(job, 11.0 * square),
    )
    return one * (1.0 + cross_attention_share(model))


def _num_hops(job: PoolJob, layout: LayerDegrees) -> Number:
    """Number of times that ring attention sends keys and values to the neighbour."""
    return np.maximum(layout.cp - 1, 0) * (1.0 if job.engine.communication.context_exchange == "ring" else 0.0)


def _merge_seconds(job: PoolJob, layout: LayerDegrees) -> PassSeconds:
    """Seconds to add the results of each hop of ring attention: outputs, or gradients of queries, keys and values.

    A hop reads the new part and the sum, and writes the sum: 6 bytes per element in 16 bits. Engines that gather keys
    and values have only one part and nothing to add.

    Source: Liu et al., Ring Attention (2023), section 3; byte counts derived here from the operators' inputs and
    outputs.
    """
    model, hops = job.model, _num_hops(job, layout)
    tokens = tokens_per_microbatch(job, layout) / layout.tp
    num_bytes = 3.0 * job.compute_bytes * tokens
    return PassSeconds(
        forward=hops * memory_bound_seconds(job, num_bytes * output_width(model)),
        backward_input=hops * memory_bound_seconds(job, num_bytes * sum(core_widths(model, layout.tp))),
    )


def _ffn_seconds(
    job: PoolJob,
    tokens: Number,
    width: Number,
    batch: Number = 1.0,
    *,
    fan_in: int = 0,
    precision: Precision | None = None,
) -> PassSeconds:
    """Seconds of a feed-forward block of this width (or of `batch` experts), with its activation function.

    fan_in: width of the block's input and output; 0 means the model's width.

    Bytes that the activation function moves per token in 16 bits, forward and backward: GELU 4f and 8f; fused SwiGLU 6f
    and 10f; SwiGLU as separate operators 10f and 16f.

    Source: derived here from the operators' inputs and outputs.
    """
    if not np.any(width):
        return PassSeconds()
    gated = job.model.activation == "swiglu"
    h = fan_in or job.model.hidden_size
    up = linear_seconds(job, tokens, h, width * (2 if gated else 1), batch, precision=precision)
    down = linear_seconds(job, tokens, width, h, batch, precision=precision)
    fused = job.engine.memory.fused_swiglu
    moved = ((6.0, 10.0) if fused else (10.0, 16.0)) if gated else (4.0, 8.0)
    elements = tokens * width * batch * job.compute_bytes / 2
    forward, backward = (memory_bound_seconds(job, each * elements) for each in moved)
    return up + down + PassSeconds(forward=forward, backward_input=backward)


def _expert_seconds(job: PoolJob, layout: LayerDegrees, moe: MixtureOfExperts) -> PassSeconds:
    """Seconds of router, routed and shared experts, and of permuting tokens to their experts and back.

    Each rank holds E / ep experts. For each of the etp ranks that share an expert, the rank computes s b k / (c t)
    choices (pairs of token and expert). Permuting moves 8 h bytes per choice and direction (read and write, twice).

    Source: Lepikhin et al., GShard (2020), section 2; Megatron-LM, megatron/core/transformer/moe.
    """
    tokens = tokens_per_microbatch(job, layout)
    choices = tokens / layout.tp * moe.experts_per_token * moe.imbalance * layout.etp
    local, wide = moe.num_experts / layout.ep, expert_input_width(job.model)
    parts = [
        linear_seconds(job, tokens / layout.tp, job.model.hidden_size, moe.num_experts, precision=job.core_precision),
        _ffn_seconds(
            job, choices / local, moe.ffn_hidden_size / layout.etp, local, fan_in=wide, precision=job.expert_precision
        ),
    ]
    if moe.latent_size:
        into = linear_seconds(job, tokens / layout.tp, job.model.hidden_size, wide, precision=job.core_precision)
        back = linear_seconds(job, tokens / layout.tp, wide, job.model.hidden_size, precision=job.core_precision)
        parts += [into, back]
    if moe.shared_ffn_hidden_size:
        parts.append(_ffn_seconds(job, tokens, moe.shared_ffn_hidden_size / layout.tp))
    moved = 8.0 * choices * wide * job.compute_bytes / 2
    permuted = memory_bound_seconds(job, moved)
    return sum(parts, PassSeconds(forward=permuted, backward_input=permuted))


def _parts_seconds(
    job: PoolJob, layout: LayerDegrees, moe: MixtureOfExperts | None, core: Number, block: Number
) -> dict[frozenset[str], Number]:
    """Forward seconds of each part that recompute can repeat; a key consists of the modules that repeat the part.

    The parts are the norms, the up-projections of latent attention with positions, the feed-forward block or the
    experts, and its activation function. A part that belongs to two modules is repeated once. The host's time for small
    operators is left out.
    core, block: forward seconds of the core of attention, and of the feed-forward block.

    Source: the same operators as in the forward pass; Megatron-LM, transformer_config.py (recompute_modules);
    DeepSeek-V3 (2024), section 3.2.3.
    """
    model, tokens, t = job.model, tokens_per_microbatch(job, layout), layout.tp
    own = tokens / np.where(np.equal(layout.sp, 1), t, 1)
    bytes_each = job.compute_bytes / 2
    norm = memory_bound_seconds(job, _norm_bytes(job)[0] * model.hidden_size * own * bytes_each)
    parts: dict[frozenset[str], Number] = {frozenset(("core_attn",)): core}

    def add(seconds: Number, *modules: str) -> None:
        parts[frozenset(modules)] = parts.get(frozenset(modules), 0.0) + seconds

    def activation(choices: Number, width: Number) -> Number:
        moved = (6.0 if job.engine.memory.fused_swiglu else 10.0) if model.activation == "swiglu" else 4.0
        return memory_bound_seconds(job, moved * choices * width * bytes_each)

    before_attention, before_block = norm_modules(job, experts=moe is not None)
    add(norm, *before_attention)
    if model.norms_per_layer > 1:
        add(norm, *before_block)
    if model.mla is not None:
        up = sum_of(one.forward for one in _up_projections(job, layout, model.mla))
        heads = (model.num_heads + model.num_kv_heads) * model.head_size
        add(up + memory_bound_seconds(job, 4.0 * heads * tokens / t * bytes_each), "mla_up_proj")
    if moe is None:
        gate = activation(tokens, model.ffn_hidden_size / t)
        add(gate, ACTIVATION, "mlp")
        add(block - gate, "mlp")
        return parts
    choices = tokens / t * moe.experts_per_token * moe.imbalance * layout.etp
    shared, shared_gate = 0.0, activation(tokens, moe.shared_ffn_hidden_size / t)
    gate = activation(choices, moe.ffn_hidden_size / layout.etp)
    if moe.shared_ffn_hidden_size:
        shared = _ffn_seconds(job, tokens, moe.shared_ffn_hidden_size / t).forward
        add(shared_gate, ACTIVATION, "moe", "shared_experts")
        add(shared - shared_gate, "moe", "shared_experts")
    add(gate, ACTIVATION, "moe", "moe_act")
    add(block - shared - gate, "moe")
    return parts


_NORM_BYTES: Final = (4.0, 10.0)
_NORM_BYTES_BY_OPERATOR: Final = (36.0, 92.0)
"""Bytes that a norm moves per 16-bit element, forward and backward: as one kernel, and operator by operator in fp32.

Source: inputs and outputs of each operator of RMSNorm in Llama (facebookresearch/llama, llama/model.py) and of its
derivatives, counted by a test as torch runs them.
"""


def norm_is_one_kernel(job: PoolJob) -> bool:
    """Whether norms run as one kernel; else they run operator by operator in fp32 and keep an additional tensor.

    Source: engine profile, norm_kernel; torch's LayerNorm is one operator everywhere.
    """
    return job.engine.memory.norm_kernel or job.model.norm != "rmsnorm"


def _norm_bytes(job: PoolJob) -> tuple[float, float]:
    return _NORM_BYTES if norm_is_one_kernel(job) else _NORM_BYTES_BY_OPERATOR


def _light_seconds(job: PoolJob, layout: LayerDegrees) -> PassSeconds:
    """Seconds of the operators that mainly move bytes: norms, residual additions, positions, transposes of heads.

    Bytes per token in 16 bits, forward and backward:

    - norm: 4h and 10h
    - residual addition: 6h and 8h; with dropout 7h and 9h
    - rotary positions: 4 (a + g) d in each pass, 4 a d in a layer that reuses the keys of an earlier one
    - norms of queries and keys: as positions, and 2.5 times as much
    - transposes of unfused attention: 8 a (d + d_v) and 11 a (d + d_v)

    Source: derived here from the operators' inputs and outputs, checked in sum against SC'21 and Korthikanti.
    """
    model = job.model
    tokens = tokens_per_microbatch(job, layout) * job.compute_bytes / 2
    whole = tokens / np.where(np.equal(layout.sp, 1), layout.tp, 1)
    split = tokens / layout.tp
    h, residuals = model.hidden_size, 1 if model.parallel_attention else 2
    residual = 7.0 if job.training.dropout else 6.0
    norm = _norm_bytes(job)
    forward = [norm[0] * h * whole] * model.norms_per_layer + [residual * h * whole] * residuals
    backward = [norm[1] * h * whole] * model.norms_per_layer + [(residual + 2.0) * h * whole] * residuals
    queries, keys, _ = core_widths(model, layout.tp)
    heads = 4.0 * (queries + keys * (not model.shares_keys)) * split
    if not model.attends:
        heads = 0.0 * split
    if model.position == "rope":
        forward.append(heads)
        backward.append(heads)
    if model.qk_norm != "none":
        forward.append(heads)
        backward.append(2.5 * heads)
    if job.training.attention == "unfused":
        width = model.num_heads * head_widths(model)
        forward.append(8.0 * width * split)
        backward.append(11.0 * width * split)
    light = PassSeconds(
        forward=sum_of(memory_bound_seconds(job, num_bytes) for num_bytes in forward),
        backward_input=sum_of(memory_bound_seconds(job, num_bytes) for num_bytes in backward),
    )
    cross = PassSeconds(  # one more norm and one more residual addition
        forward=memory_bound_seconds(job, (4.0 + residual) * h * whole),
        backward_input=memory_bound_seconds(job, (12.0 + residual) * h * whole),
    )
    return light + cross * cross_attention_share(model)


def _adapter_seconds(job: PoolJob, layout: LayerDegrees) -> PassSeconds:
    """Seconds of a layer's adapters: two products, to rank r and back, and one addition for each adapted matrix.

    Source: Hu et al., LoRA (2021), section 4.1; 6 bytes are moved for each element of the addition.
    """
    tokens, rank, t = tokens_per_microbatch(job, layout), job.training.lora_rank, layout.tp
    total = PassSeconds()
    for name, inputs, outputs in adapted_matrices(job.model, job.training):
        rows = name in ("output", "down")
        total += linear_seconds(job, tokens, inputs / (t if rows else 1), rank, precision=job.core_precision)
        total += linear_seconds(job, tokens, rank, outputs / (1 if rows else t), precision=job.core_precision)
        total += PassSeconds(forward=memory_bound_seconds(job, 6.0 * tokens * outputs / (1 if rows else t)))
    return total


def _dequantized_seconds(job: PoolJob, layout: LayerDegrees, *, experts: bool) -> PassSeconds:
    """Seconds of converting the quantised weights of a layer to 16 bits, in the forward and in the backward pass.

    Source: Dettmers et al., QLoRA (2023), section 3, equation 5: read in 4 bits, written in 16.
    """
    if job.training.frozen_weights == "16-bit":
        return PassSeconds()
    held = layer_params(job, layout, experts=experts).total
    seconds = memory_bound_seconds(job, (frozen_bytes_per_param(job) + job.compute_bytes) * held)
    return PassSeconds(forward=seconds, backward_input=seconds)


def _host_factors(job: PoolJob, layout: LayerDegrees, *, experts: bool) -> tuple[float, Number]:
    """Host time of a layer and of its ring's hops, in units of the device's `layer_floor`; 0 inside CUDA graphs.

    In a layer with experts, a CUDA graph does not contain the operators after the router. The graph is assumed to
    contain as many operators as a dense layer has; a host trace of one layer would replace this assumption.

    Source: engine profile; Megatron-LM, transformer_config.py (cuda_graph_modules).
    """
    compute, graphs = job.engine.compute, job.training.cuda_graphs
    if graphs == "step" or (graphs == "layers" and not experts):
        return 0.0, 0.0
    if graphs == "layers":
        return max(0.0, compute.expert_host_factor - compute.host_factor), 0.0
    hops = _num_hops(job, layout) * (_HOP_SHARE * compute.host_factor)
    return compute.expert_host_factor if experts else compute.host_factor, hops


def layer_seconds(
    job: PoolJob, layout: LayerDegrees, *, experts: bool = False, local: bool = False, exchanges: Number = 0.0
) -> LayerSeconds:
    """Seconds of one transformer layer for one microbatch, without communication.

    `experts`: a layer with experts instead of its feed-forward block; `local`: a layer with a sliding window. In eager
    mode a small layer cannot run faster than the host launches its operators. The forward pass therefore takes at least
    the device's `layer_floor` times the engine's factor, plus the host time of a ring's hops. The backward pass takes
    at least 1.6 times as long. `exchanges`: seconds of collectives in each pass during which the host runs ahead; the
    device then waits less for the host. The calibration's `slowdown` multiplies the roofline times of all operators.

    For a model with several kinds of layers the result is the mean layer.

    Source: sum of the operators; the floor's ratio of 1.6 is about the number of backward per forward operators.
    """
    if job.model.layers:
        return _mean_seconds(job, layout, experts=experts, local=local)
    moe = job.model.moe if experts else None
    tokens = tokens_per_microbatch(job, layout)
    core = _core_seconds(job, layout, local=local)
    tiles = job.training.mlp_tiles
    block = (
        _expert_seconds(job, layout, moe)
        if moe
        else _ffn_seconds(job, tokens / tiles, job.model.ffn_hidden_size / layout.tp) * tiles
    )
    whole = _projection_seconds(job, layout) + core + block + _light_seconds(job, layout)
    if job.training.lora_rank:
        whole = whole.without_weight_gradients + _adapter_seconds(job, layout)
        whole += _dequantized_seconds(job, layout, experts=experts)
    split = np.where(np.greater(layout.tp, 1), job.engine.compute.tp_host_factor, 1.0)
    factor, hops = _host_factors(job, layout, experts=moe is not None)
    floor = job.cluster.device.efficiency.layer_floor * job.calibration.host * (factor + hops) * split
    slowdown = job.calibration.slowdown
    whole = whole * slowdown
    backward_floor = np.maximum(0.0, _BACKWARD_OPERATORS * floor - exchanges)
    floor = np.maximum(0.0, floor - exchanges)
    stretch = np.maximum(1.0, backward_floor / whole.backward)  # both parts of the backward pass wait for the host
    passes = PassSeconds(
        forward=np.maximum(whole.forward, floor),
        backward_input=whole.backward_input * stretch,
        backward_weight=whole.backward_weight * stretch,
    )
    parts = _parts_seconds(job, layout, moe, core.forward, block.forward)
    return LayerSeconds(
        passes=passes,
        core_forward=slowdown * core.forward,
        parts={modules: slowdown * seconds for modules, seconds in parts.items()},
    )


def _mean_seconds(job: PoolJob, layout: LayerDegrees, *, experts: bool, local: bool) -> LayerSeconds:
    """The mean over the kinds of layers, which are spread evenly over the stack."""
    passes, core, parts = PassSeconds(), 0.0, dict[frozenset[str], "Number"]()
    for num, kind in job.model.kinds():
        share = num / job.model.num_layers
        one = layer_seconds(replace(job, model=kind), layout, experts=experts, local=local or is_local(kind))
        passes, core = passes + one.passes * share, core + share * one.core_forward
        for modules, seconds in one.parts.items():
            parts[modules] = parts.get(modules, 0.0) + share * seconds
    return LayerSeconds(passes=passes, core_forward=core, parts=parts)
