"""Seconds of computation of one layer and of the ends of the model: a roofline for each operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.parameters import padded_vocab

if TYPE_CHECKING:
    from planner.layout import Degrees
    from planner.specs.cluster import DeviceSpec
    from planner.specs.job import Job

__all__ = [
    "LayerSeconds",
    "accumulation_seconds",
    "head_seconds",
    "layer_seconds",
    "matmul_seconds",
    "memory_bound_seconds",
    "optimizer_seconds",
]

_TILES: Final = ((256, 128), (128, 256), (128, 128))
"""Output tiles of the matrix kernels that libraries choose from (CUTLASS defaults of the A100 and H100)."""

_ALIGNMENT: Final = 64
"""Widths that are multiples of 64 elements (128 bytes) use the tensor cores fully (NVIDIA, matrix multiplication
background user's guide, section 3)."""

_UNALIGNED_SHARE: Final = 0.75
"""What other widths reach of that: BLOOM's tuning runs with hidden size 14400 (1800 for each of 8 ranks) took
1.3 times as long as its neighbours of 14336."""

_FLASH_SHARE: Final = 0.75
"""Fused attention reaches this share of what a large matrix product reaches.

FlashAttention-2 (Dao 2023), figure 4 to 6: up to 73 % of an A100's peak forward and 63 % backward at head size
128, where large products reach 87 %.
"""

_FLASH_BACKWARD: Final = 2.5
"""Fused attention's backward pass does five products where the forward pass does two (Dao 2023, section 3.1)."""


def _kernel_share(device: DeviceSpec, m: Any, n: Any, k: Any, batch: Any) -> Any:
    """Share of peak that a product (m x k) (k x n) reaches: best tile's wave quantisation, and the depth ramp.

    Source: derived here. Waves of tiles over the device's processors, as in Calculon's and SimuMax's measured
    curves; the ramp K / (K + K0) carries the start-up of a tile's inner loop.
    """
    best = np.zeros(np.broadcast_shapes(np.shape(m), np.shape(n), np.shape(batch)))
    for rows, columns in _TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        waves = np.ceil(tiles / device.num_processors)
        best = np.maximum(best, m * n * batch / (waves * device.num_processors * rows * columns))
    ramp = k / (k + device.efficiency.matmul_half_depth)
    aligned = (np.mod(n, _ALIGNMENT) == 0) & (np.mod(k, _ALIGNMENT) == 0)
    return device.efficiency.matmul * best * ramp * np.where(aligned, 1.0, _UNALIGNED_SHARE)


def matmul_seconds(job: Job, m: Any, n: Any, k: Any, batch: Any = 1.0) -> Any:
    """Seconds of `batch` products (m x k) (k x n): the slower of arithmetic and memory traffic, and the launch.

    Source: roofline model, Williams et al. (CACM 2009).
    """
    device = job.cluster.device
    peak = device.peak[job.training.precision]
    arithmetic = 2.0 * m * n * k * batch / (peak * _kernel_share(device, m, n, k, batch))
    traffic = (m * k + k * n + m * n) * batch * job.compute_bytes
    return np.maximum(arithmetic, _stream_seconds(job, traffic)) + device.efficiency.launch


def _stream_seconds(job: Job, num_bytes: Any) -> Any:
    return num_bytes / (job.cluster.device.memory_bandwidth * job.cluster.device.efficiency.memory)


def memory_bound_seconds(job: Job, num_bytes: Any) -> Any:
    """Seconds of an operator that only moves bytes, with its launch.

    Source: roofline model, Williams et al. (CACM 2009).
    """
    return _stream_seconds(job, num_bytes) + job.cluster.device.efficiency.launch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer for one microbatch on one device, without communication.

    core_forward is the part of `forward` that selective recompute repeats.
    """

    forward: Any
    backward: Any
    core_forward: Any


def _tokens(job: Job, layout: Degrees) -> Any:
    return job.training.sequence_length * layout.mbs / layout.cp


def _linear_seconds(job: Job, tokens: Any, fan_in: Any, fan_out: Any) -> tuple[Any, Any]:
    """Forward, and backward (gradient of the input and of the weight), of one linear map.

    Source: backpropagation: two products of the forward's size.
    """
    forward = matmul_seconds(job, tokens, fan_out, fan_in)
    backward = matmul_seconds(job, tokens, fan_in, fan_out) + matmul_seconds(job, fan_out, fan_in, tokens)
    return forward, backward


def _attention_core_seconds(job: Job, layout: Degrees) -> tuple[Any, Any]:
    """Forward and backward seconds of softmax(Q K^T) V on one device.

    Fused kernels execute the causal half. The unfused kernels of 2021 execute the whole square and move the
    scores through memory: 9 a s^2 b bytes forward, 11 backward (softmax, mask and dropout in 16 bits).

    Source: Dao (2023), section 3.1; byte counts derived here from the operators' inputs and outputs.
    """
    model, s = job.model, job.training.sequence_length
    heads = layout.mbs * model.num_heads / layout.tp
    if job.training.attention == "flash":
        device = job.cluster.device
        flops = 2.0 * s * s / layout.cp * model.head_size * heads
        rate = device.peak[job.training.precision] * device.efficiency.matmul * _FLASH_SHARE
        forward = flops / rate + device.efficiency.launch
        return forward, _FLASH_BACKWARD * flops / rate + device.efficiency.launch
    rows = s / layout.cp
    scores = matmul_seconds(job, rows, s, model.head_size, heads)
    weighted = matmul_seconds(job, rows, model.head_size, s, heads)
    square = rows * s * heads * job.compute_bytes / 2
    forward = scores + weighted + memory_bound_seconds(job, 9.0 * square)
    return forward, 2.0 * (scores + weighted) + memory_bound_seconds(job, 11.0 * square)


def _memory_bound_layer_seconds(job: Job, layout: Degrees) -> tuple[Any, Any]:
    """Forward and backward seconds of norms, residual additions, activation function and head copies.

    Bytes per token in 16 bits: norm 4h forward, 10h backward; residual addition 6h, with dropout 7h, and as
    much again (+4h) backward; GELU 4f and 8f; SwiGLU 6f and 10f fused, 10f and 16f as separate operators;
    rotary positions 4 (a + g) d each way; unfused attention's transposes 16 a d and 22 a d.

    Source: derived here from the operators' inputs and outputs, checked in sum against SC'21 and Korthikanti.
    """
    model, tokens = job.model, _tokens(job, layout) * job.compute_bytes / 2
    h, f = model.hidden_size, model.ffn_hidden_size
    whole = tokens / np.where(np.asarray(layout.sp) == 1, layout.tp, 1)
    split = tokens / layout.tp
    residual = 7.0 if job.training.dropout else 6.0
    forward = [4.0 * h * whole] * 2 + [residual * h * whole] * 2
    backward = [10.0 * h * whole] * 2 + [(residual + 2.0) * h * whole] * 2
    if model.activation == "swiglu":
        fused = job.engine.fused_swiglu
        forward.append((6.0 if fused else 10.0) * f * split)
        backward.append((10.0 if fused else 16.0) * f * split)
    else:
        forward.append(4.0 * f * split)
        backward.append(8.0 * f * split)
    if model.position == "rope":
        rotary = 4.0 * (model.num_heads + model.num_kv_heads) * model.head_size * split
        forward.append(rotary)
        backward.append(rotary)
    if job.training.attention == "unfused":
        width = model.num_heads * model.head_size
        forward.append(16.0 * width * split)
        backward.append(22.0 * width * split)
    return sum(memory_bound_seconds(job, b) for b in forward), sum(memory_bound_seconds(job, b) for b in backward)


def layer_seconds(job: Job, layout: Degrees) -> LayerSeconds:
    """Seconds of one transformer layer for one microbatch, without communication.

    In eager mode a small layer cannot run faster than the host launches its operators: `layer_floor` of the
    device bounds the forward pass, and 1.6 times that the backward pass.

    Source: sum of the operators; the floor's ratio of 1.6 is the number of backward per forward operators.
    """
    model, tokens = job.model, _tokens(job, layout)
    h, t = model.hidden_size, layout.tp
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_size / t
    fc1_width = model.ffn_hidden_size * (2 if model.activation == "swiglu" else 1) / t
    linears = (
        _linear_seconds(job, tokens, h, qkv),
        _linear_seconds(job, tokens, model.num_heads * model.head_size / t, h),
        _linear_seconds(job, tokens, h, fc1_width),
        _linear_seconds(job, tokens, model.ffn_hidden_size / t, h),
    )
    core_forward, core_backward = _attention_core_seconds(job, layout)
    light_forward, light_backward = _memory_bound_layer_seconds(job, layout)
    floor = job.cluster.device.efficiency.layer_floor
    return LayerSeconds(
        forward=np.maximum(sum(f for f, _ in linears) + core_forward + light_forward, floor),
        backward=np.maximum(sum(b for _, b in linears) + core_backward + light_backward, 1.6 * floor),
        core_forward=core_forward,
    )


def head_seconds(job: Job, layout: Degrees) -> tuple[Any, Any]:
    """Forward and backward seconds of the output head and the loss for one microbatch, on the last stage.

    The loss reads and writes fp32 logits: 4 passes of 4 bytes forward, 3 backward.

    Source: derived here: cross entropy takes a maximum, a sum of exponentials and a difference.
    """
    tokens = _tokens(job, layout)
    vocab = padded_vocab(job.model, job.engine, layout)
    forward, backward = _linear_seconds(job, tokens, job.model.hidden_size, vocab)
    logits = tokens * vocab
    return forward + memory_bound_seconds(job, 16.0 * logits), backward + memory_bound_seconds(job, 12.0 * logits)


_OPTIMIZER_BYTES: Final = 52.0
"""Bytes moved per parameter: gradients zeroed 4, scaled 8, norm 4 and clipped 8, AdamW reads the gradient and
reads and writes master weight and both moments 28 (SimuMax's itemisation)."""


def optimizer_seconds(job: Job, num_params: Any) -> Any:
    """Seconds of clipping and AdamW over `num_params` parameters of one device's shard.

    Source: SimuMax, optimizer cost by memory traffic: 52 bytes per parameter.
    """
    return memory_bound_seconds(job, _OPTIMIZER_BYTES * num_params)


def accumulation_seconds(job: Job, num_params: Any) -> Any:
    """Seconds to add one microbatch's gradient of `num_params` parameters to the sum of the step.

    Source: engine profile, bytes moved per parameter.
    """
    if job.engine.accumulation_bytes == 0:
        return 0.0 * num_params
    return memory_bound_seconds(job, job.engine.accumulation_bytes * num_params)
