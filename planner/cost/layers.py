"""Seconds of computation of one transformer layer for one microbatch, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.adapters import adapted_matrices, constant_bytes_per_param, frozen_bytes_per_param
from planner.cost.compute import PassSeconds, linear_seconds, matmul_seconds, memory_bound_seconds
from planner.cost.microbatch import sequences_per_microbatch, tokens_per_microbatch
from planner.cost.mixers import mixer_shape
from planner.cost.operators import (
    core_widths,
    cross_attention_share,
    layer_of,
    output_width,
    share_with_experts,
    value_size,
)
from planner.cost.parameters import layer_params_on_device
from planner.cost.recompute import ACTIVATION, norm_modules
from planner.once import once
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from planner.cost.operators import Product
    from planner.layout import LayerDegrees
    from planner.numbers import Number
    from planner.specs.job import PoolJob
    from planner.specs.model import ModelSpec

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

    core: the part of the passes spent in the core of attention.
    parts: forward seconds of each part of a layer; the key names the modules (`planner.cost.recompute.modules_of`)
        whose recompute repeats the part.
    covered: seconds of exchanges, in both passes, during which the device would wait for the host anyway.
    """

    passes: PassSeconds
    core: PassSeconds
    parts: Mapping[frozenset[str], Number]
    covered: Number


@once
def choices_per_microbatch(job: PoolJob, layout: LayerDegrees) -> Number:
    """Pairs of token and expert of one microbatch on one rank: s b k / (c t), times the imbalance of the busiest rank.

    Source: Lepikhin et al., GShard (2020), section 2.
    """
    moe = job.model.moe
    return tokens_per_microbatch(job, layout) / layout.tp * (moe.experts_per_token * moe.imbalance if moe else 0)


@once
def own_tokens(job: PoolJob, layout: LayerDegrees) -> Number:
    """Tokens of one microbatch on which a rank runs norms: its own with sequence parallelism, else all of its group.

    Source: Korthikanti et al. (2022), section 4.2.2.
    """
    return tokens_per_microbatch(job, layout) / np.where(np.equal(layout.sp, 1), layout.tp, 1)


def rows_of(job: PoolJob, layout: LayerDegrees, product: Product) -> tuple[Number, Number]:
    """Rows that a product multiplies on one rank, and by how many matrices side by side.

    Each rank holds E / ep experts, and computes the choices of all etp ranks that share an expert. If every rank holds
    a matrix whole, each rank multiplies it by its own tokens.

    Source: Shoeybi et al., Megatron-LM (2019), section 3; Megatron-LM, megatron/core/transformer/moe.
    """
    if product.count:
        local = product.count / layout.ep
        return choices_per_microbatch(job, layout) * layout.etp / local, local
    if product.cut == "whole":
        routed = "moe" in product.modules  # tokens are divided before the router
        return tokens_per_microbatch(job, layout) / layout.tp if routed else own_tokens(job, layout), 1.0
    return tokens_per_microbatch(job, layout), 1.0


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
    launch = 2.0 * job.launch_seconds
    return PassSeconds(forward=seconds + moved + launch, backward_input=2.0 * (seconds + moved) + launch)


def _product_seconds(job: PoolJob, layout: LayerDegrees, product: Product) -> PassSeconds:
    """Seconds of one product in the mean layer; a dense feed-forward block runs tile by tile.

    Source: `planner.cost.compute.linear_seconds`.
    """
    (rows, batch), tiles = rows_of(job, layout, product), num_tiles(job, product)
    routes = product.cut == "whole" and "moe" in product.modules
    precision = job.expert_precision if product.count else job.core_precision if routes else None
    found = linear_seconds(job, rows / tiles, *product.sides(layout), batch, precision=precision)
    return found if product.share == tiles == 1 else found * (product.share * tiles)


def num_tiles(job: PoolJob, product: Product) -> int:
    """Number of tiles in which a product runs, one after the other: only dense feed-forward blocks have several.

    Source: DeepSpeed, runtime/sequence_parallel/ulysses_sp.py (TiledMLP).
    """
    return job.training.mlp_tiles if "mlp" in product.modules else 1


def _core_seconds(job: PoolJob, layout: LayerDegrees, *, local: bool) -> PassSeconds:
    """Seconds of softmax(Q K^T) V on one device; `local`: inside a sliding window.

    Fused kernels execute the causal half, or the band of a sliding window. In ring attention each hop launches its own
    kernel, and the kernel's start and end take time. A rank holds an early and a late part of the sequence, so a hop
    computes half a square for each part. On the slowest rank, all queries attend to half of the keys. The unfused
    kernels of 2021 execute the whole square and move the scores through memory: 9 a s^2 b bytes forward, 11 backward
    (softmax, mask and dropout in 16 bits). A fused kernel computes one exponential for each score in each pass, which
    bounds small heads.

    Source: Dao (2023), section 3.1; Transformer Engine, attention/dot_product_attention/context_parallel.py; byte
    counts derived here from the operators' inputs and outputs.
    """
    model, s = job.model, job.training.sequence_length
    if not model.attends:
        return _mixer_core_seconds(job, layout)
    sequences = sequences_per_microbatch(job, layout)
    heads = sequences * model.num_heads / layout.tp
    rows = s / layout.cp
    if job.training.attention == "flash":
        device = job.cluster.device
        width = head_widths(model)
        hops = _num_hops(job, layout)
        started = 1.0 + np.minimum(1, hops) * _KERNEL_KEYS / (rows / 2)
        attended = job.training.attended_tokens
        scores = rows * attention_span(model, attended, causal=True, local=local) * heads * started
        indexer = sequences * rows * indexer_flops_per_token(model, attended)
        # matrix units and exponentials work at the same time, so the slower of the two sets the kernel's time
        peak = device.peak[job.attention_precision]
        in_16_bits = device.peak.get("bf16", device.peak.get("fp16", peak))
        exponential = device.efficiency.flops_per_exponential * peak / in_16_bits
        forward, backward = (
            scores * max(times * 2.0 * width, exponential) + times * indexer for times in (1.0, FLASH_BACKWARD)
        )
        rate, launch = peak * job.attention_share, (1.0 + hops) * job.launch_seconds
        one = PassSeconds(forward=forward / rate + launch, backward_input=backward / rate + launch)
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
    """Number of times that ring attention sends keys and values to the neighbour; 0 for layers that mix no tokens."""
    if not (job.model.attends or job.model.mixer):
        return 0.0 * layout.cp
    return np.maximum(layout.cp - 1, 0) * ("ring" in job.engine.communication.context_exchange)


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


def _light_operators(
    job: PoolJob, layout: LayerDegrees, *, experts: bool
) -> Iterator[tuple[Number, float, float, frozenset[str], float]]:
    """The operators that mainly move bytes: elements on one rank, bytes, the modules that repeat them, how many.

    Bytes for each 16-bit element, forward and backward:

    - norm: 4 and 10
    - residual addition: 6 and 8; with dropout 7 and 9
    - rotary positions of queries and keys: 4 in each pass; queries alone in a layer that reuses earlier keys
    - norms of queries and keys: 4 and 10
    - transposes of unfused attention: 8 and 11 for each head's queries and values
    - GELU: 4 and 8; fused SwiGLU 6 and 10; SwiGLU as separate operators 10 and 16
    - beside experts, `_beside_experts`

    Source: derived here from the operators' inputs and outputs, checked in sum against SC'21 and Korthikanti.
    """
    model, training, again = job.model, job.training, norm_modules(job, experts=experts)
    own = own_tokens(job, layout) * model.hidden_size
    split = tokens_per_microbatch(job, layout) / layout.tp
    norm = _NORM_BYTES if norm_is_one_kernel(job) else _NORM_BYTES_BY_OPERATOR
    residual, cross = 7.0 if training.dropout else 6.0, cross_attention_share(model)
    nothing = frozenset[str]()
    for modules in (*again, nothing, nothing, nothing, nothing)[: model.norms_per_layer]:
        yield own, *norm, modules, 1.0
    yield own, residual, residual + 2.0, nothing, 1.0 if model.parallel_attention else 2.0
    if cross:
        yield own, *norm, nothing, cross
        yield own, residual, residual + 2.0, nothing, cross
    if model.attends:
        queries, keys, _ = core_widths(model, layout.tp)
        heads = (queries + keys * (not model.shares_keys)) * split
        if model.position == "rope":
            yield heads, 4.0, 4.0, frozenset(("mla_up_proj",)) if model.mla else nothing, 1.0
        if model.qk_norm != "none":
            yield heads, 4.0, 10.0, nothing, 1.0
    if training.attention == "unfused":
        yield model.num_heads * head_widths(model) * split, 8.0, 11.0, nothing, 1.0
    fused = job.engine.memory.fused_swiglu
    gate = ((6.0, 10.0) if fused else (10.0, 16.0)) if model.activation == "swiglu" else (4.0, 8.0)
    for product in layer_of(model, experts=experts).products:
        if not product.ends_block:
            continue
        (rows, batch), (inner, outputs) = rows_of(job, layout, product), product.sides(layout)
        tiles, modules = num_tiles(job, product), product.modules | {ACTIVATION}
        yield rows * batch * inner / tiles, *gate, modules | {"moe_act"} if product.count else modules, tiles
        yield from _beside_experts(product, rows * batch * outputs, 2.0 * rows * batch * inner)


def _beside_experts(
    product: Product, outputs: Number, halves: Number
) -> Iterator[tuple[Number, float, float, frozenset[str], float]]:
    """The operators around the last product of routed experts, as in `_light_operators`; none for other products.

    Permuting tokens to their experts and back moves 8 bytes for each output in each pass (read and write, twice).
    Biases are separate operators: 28 and 36 bytes for each output, and 8 and 14 for the clamps of both halves of the
    gate.
    outputs, halves: elements of the experts' outputs over all choices, and of both halves of the gate.

    Source: Megatron-LM d98e8a64, moe/experts.py (_apply_bias), fusions/fused_bias_geglu.py.
    """
    if product.count:
        yield outputs, 8.0, 8.0, product.modules, 1.0
    if product.count and product.biased:
        yield outputs, 28.0, 36.0, product.modules, 1.0
        yield halves, 8.0, 14.0, product.modules | {ACTIVATION, "moe_act"}, 1.0


def _operators(job: PoolJob, layout: LayerDegrees, *, experts: bool) -> Iterator[tuple[PassSeconds, frozenset[str]]]:
    """Seconds of each operator without the core of attention, and the modules whose recompute repeats it."""
    for product in layer_of(job.model, experts=experts).products:
        yield _product_seconds(job, layout, product), product.modules
    for elements, forward, backward, modules, times in _light_operators(job, layout, experts=experts):
        forward_seconds, backward_seconds = (
            times * memory_bound_seconds(job, each * elements * (job.compute_bytes / 2)) for each in (forward, backward)
        )
        yield PassSeconds(forward=forward_seconds, backward_input=backward_seconds), modules


def _adapter_seconds(job: PoolJob, layout: LayerDegrees, *, experts: bool) -> PassSeconds:
    """Seconds of a layer's adapters: two products, to rank r and back, and one addition for each adapted matrix.

    With dropout each adapter has an input of its own: a pass reads and writes its elements, and their mask.

    Source: Hu et al., LoRA (2021), section 4.1; 6 bytes are moved for each element of the addition; peft,
    tuners/lora/layer.py (Linear; ParamWrapper, beside routed experts, has no dropout).
    """
    rank, masks, total = job.training.lora_rank, job.engine.memory.dropout_masks, PassSeconds()
    for product, outputs in adapted_matrices(job.model, job.training, experts=experts):
        (rows, batch), (fan_in, fan_out) = rows_of(job, layout, product), product.sides(layout, outputs)
        one = linear_seconds(job, rows, fan_in, rank, batch, precision=job.core_precision)
        one += linear_seconds(job, rows, rank, fan_out, batch, precision=job.core_precision)
        one += PassSeconds(forward=memory_bound_seconds(job, 6.0 * rows * batch * fan_out))
        if job.training.lora_dropout and not product.count:
            dropped = memory_bound_seconds(job, (2.0 * job.compute_bytes + masks) * rows * fan_in)
            one += PassSeconds(forward=dropped, backward_input=dropped)
        total += one * product.share
    return total


def _dequantized_seconds(job: PoolJob, layout: LayerDegrees, *, experts: bool) -> PassSeconds:
    """Seconds of converting the quantised weights of a layer to 16 bits, in the forward and in the backward pass.

    Source: Dettmers et al., QLoRA (2023), section 3, equation 5: read in 4 bits, written in 16.
    """
    if job.training.frozen_weights == "16-bit":
        return PassSeconds()
    held = layer_params_on_device(job.model, layout, experts=experts).total
    read = frozen_bytes_per_param(job) + constant_bytes_per_param(job)
    seconds = memory_bound_seconds(job, (read + job.compute_bytes) * held)
    return PassSeconds(forward=seconds, backward_input=seconds)


_LOOP_FACTOR: Final = 0.4
"""Host time to launch one expert's forward pass alone, in units of the device's `layer_floor`: 0.12 ms of 0.3 ms.

These are about 12 operators of 10 us. Source: transformers 4.57, models/qwen3_moe/modeling_qwen3_moe.py
(Qwen3MoeSparseMoeBlock); the time of an operator is assumed.
"""


def _host_factors(job: PoolJob, layout: LayerDegrees, *, experts: bool) -> tuple[Number, Number]:
    """Host time of a layer and of its ring's hops, in units of the device's `layer_floor`.

    A CUDA graph of the step leaves none of both. In a layer with experts, a graph of layers does not contain the
    operators after the router; it is assumed to contain as many operators as a dense layer has. A host trace of one
    layer would replace this assumption. Where a program loops over experts, or the device has no grouped product, the
    host launches each expert's products.

    Source: engine profile; Megatron-LM, transformer_config.py (cuda_graph_modules); the device's generation.
    """
    compute, graphs = job.engine.compute, job.training.cuda_graphs
    if graphs == "step" or (graphs == "layers" and not experts):
        return 0.0, 0.0
    factor: Number = compute.host_factor
    if experts:
        casts = compute.expert_cast_factor * (job.training.precision in ("fp8", "fp4"))
        factor = compute.expert_host_factor + np.maximum(casts, compute.expert_tp_factor * np.greater(layout.tp, 1))
    each: Number = 0.0
    loops = compute.loops_over_experts or not job.cluster.device.efficiency.grouped_products  # one kernel for all
    if experts and job.model.moe is not None and loops:
        each = _LOOP_FACTOR * job.model.moe.num_experts / layout.ep
    if graphs == "layers":
        return np.maximum(0.0, factor - compute.host_factor) + each, 0.0
    return factor + each, _num_hops(job, layout) * (_HOP_SHARE * compute.host_factor)


def layer_seconds(
    job: PoolJob,
    layout: LayerDegrees,
    *,
    experts: bool = False,
    local: bool = False,
    exchanges: Number = 0.0,
    collectives: PassSeconds = PassSeconds(),  # noqa: B008
) -> LayerSeconds:
    """Seconds of one transformer layer for one microbatch, without communication.

    In eager mode a small layer cannot run faster than the host launches its operators. The forward pass therefore takes
    at least the device's `layer_floor` times the engine's factor, plus the host time of a ring's hops. The backward
    pass takes at least 1.6 times as long. The calibration's `slowdown` multiplies the roofline times of all operators.
    For a model with several kinds of layers the result is the mean layer.

    experts: whether the layer has experts in place of its feed-forward block.
    local: whether its attention has a sliding window.
    exchanges: seconds of each pass's exchanges in the mean layer, during which the host runs ahead; the device then
        waits less for it.
    collectives: seconds of the layer's exposed tensor-parallel collectives, during which the host also runs ahead.

    Source: sum of the operators; the floor's ratio of 1.6 is about the number of backward per forward operators.
    """
    if job.model.layers:
        return _mean_seconds(job, layout, experts=experts, local=local, exchanges=exchanges, collectives=collectives)
    experts = experts and job.model.moe is not None
    # every time is a number, or an array with one entry for each configuration: (layouts,)
    whole = core = _core_seconds(job, layout, local=local)
    parts: dict[frozenset[str], Number] = {frozenset(("core_attn",)): core.forward}
    for seconds, modules in _operators(job, layout, experts=experts):
        whole += seconds
        if modules:
            parts[modules] = parts.get(modules, 0.0) + seconds.forward
    if job.training.lora_rank:
        whole = whole.without_weight_gradients + _adapter_seconds(job, layout, experts=experts)
        whole += _dequantized_seconds(job, layout, experts=experts)
    split = np.where(np.greater(layout.tp, 1), job.engine.compute.tp_host_factor, 1.0)
    factor, hops = _host_factors(job, layout, experts=experts)
    floor = job.cluster.device.efficiency.layer_floor * job.calibration.host * (factor + hops) * split
    slowdown = job.calibration.slowdown
    whole = whole * slowdown
    busy = whole + collectives
    floors = (floor, busy.forward), (_BACKWARD_OPERATORS * floor, busy.backward)
    idle = [np.maximum(0.0, least - work) for least, work in floors]
    covered = sum_of(np.minimum(each, exchanges) for each in idle)
    passes = whole.delayed(*(np.maximum(0.0, each - exchanges) for each in idle))
    return LayerSeconds(
        passes=passes,
        core=core * slowdown,
        parts={modules: slowdown * seconds for modules, seconds in parts.items()},
        covered=covered,
    )


def _mean_seconds(job: PoolJob, layout: LayerDegrees, *, local: bool, exchanges: Number, **alike: Any) -> LayerSeconds:
    """The mean over the kinds of layers, which are spread evenly over the stack."""
    passes, core, parts, covered = PassSeconds(), PassSeconds(), dict[frozenset[str], "Number"](), 0.0
    for num, kind in job.model.kinds():
        share, own = num / job.model.num_layers, replace(job, model=kind)
        ahead = exchanges / share_with_experts(job.model) if kind.moe else 0.0
        one = layer_seconds(own, layout, local=local or is_local(kind), exchanges=ahead, **alike)
        passes, core, covered = passes + one.passes * share, core + one.core * share, covered + one.covered * share
        for modules, seconds in one.parts.items():
            parts[modules] = parts.get(modules, 0.0) + share * seconds
    return LayerSeconds(passes=passes, core=core, parts=parts, covered=covered)
