"""Seconds of one operator on one device (a roofline), of the head, and of accumulating gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.loss import bytes_moved_per_logit, tokens_at_once
from planner.cost.microbatch import tokens_per_microbatch
from planner.cost.parameters import head_width, outputs_on_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.layout import LayerDegrees
    from planner.numbers import Flag, Number
    from planner.specs.cluster import DeviceSpec, Precision
    from planner.specs.job import PoolJob

_TILES: Final = ((256, 128), (128, 256), (128, 128))
"""Output tiles of the matrix kernels that libraries choose from (CUTLASS defaults of the A100 and H100)."""

_TILE_SIZES: Final = (128, 256)

_ALIGNMENT: Final = 64
"""Widths that are multiples of 64 elements (128 bytes) use the tensor cores fully (NVIDIA, matrix multiplication
background user's guide, section 3)."""

_UNALIGNED_SHARE: Final = 0.75
"""Speed of products whose widths are not multiples of `_ALIGNMENT`, relative to aligned products.

BLOOM's tuning runs with hidden size 14400 (1800 for each of 8 ranks) took 1.3 times as long as similar runs with 14336.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Seconds of one microbatch in each pass; every field broadcasts.

    The backward pass has two parts: the gradients of the inputs, for which the previous layer waits, and the gradients
    of the weights, for which no layer waits. Of a transformer layer's operators, only linear layers have seconds in
    `backward_weight`.
    """

    forward: Number = 0.0
    backward_input: Number = 0.0
    backward_weight: Number = 0.0

    @property
    def backward(self) -> Number:
        """Seconds of the whole backward pass."""
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> Number:
        """Seconds of all passes."""
        return self.forward + self.backward

    @property
    def without_weight_gradients(self) -> PassSeconds:
        """The seconds if the weights are frozen and have no gradients."""
        return PassSeconds(forward=self.forward, backward_input=self.backward_input)

    def delayed(self, forward: Number, backward: Number) -> PassSeconds:
        """The seconds with further seconds of both passes; both parts of the backward pass take longer alike."""
        longer = 1.0 + backward / self.backward
        return PassSeconds(
            forward=self.forward + forward,
            backward_input=self.backward_input * longer,
            backward_weight=self.backward_weight * longer,
        )

    def each(self, change: Callable[[Number], Number]) -> PassSeconds:
        """The seconds with `change` applied to those of every pass."""
        return PassSeconds(
            forward=change(self.forward),
            backward_input=change(self.backward_input),
            backward_weight=change(self.backward_weight),
        )

    def __add__(self, other: PassSeconds) -> PassSeconds:
        """The summed seconds of two parts that run one after the other."""
        return PassSeconds(
            forward=self.forward + other.forward,
            backward_input=self.backward_input + other.backward_input,
            backward_weight=self.backward_weight + other.backward_weight,
        )

    def __mul__(self, times: Number) -> PassSeconds:
        """The seconds multiplied by `times`, a count or a share."""
        return self.each(lambda seconds: seconds * times)


def _kernel_share(
    device: DeviceSpec, precision: Precision, m: Number, n: Number, k: Number, batch: Number, aligned: Flag
) -> Number:
    """Share of peak that a product (m x k) (k x n) reaches, from wave quantisation of the best tile and a ramp in k.

    Source: derived here from waves of tiles over the device's processors, as in Calculon's and SimuMax's measured
    curves. The ramp K / (K + K0) models the start of a tile's inner loop, which takes the same seconds in all
    precisions, so K0 grows with the peak.
    """
    down, across = ({size: np.ceil(each / size) for size in _TILE_SIZES} for each in (m, n))
    least: Number = np.inf  # elements that each processor computes, using the best tile
    for rows, columns in _TILES:
        waves = np.ceil(down[rows] * across[columns] * batch / device.num_processors)
        least = np.minimum(least, waves * (rows * columns))
    best = m * n * batch / (least * device.num_processors)
    narrow = precision in ("fp8", "fp4")
    faster = device.peak[precision] / device.peak["bf16"] if narrow and "bf16" in device.peak else 1.0
    ramp = k / (k + device.efficiency.matmul_half_depth * faster)
    return device.efficiency.matmul * best * ramp * np.where(aligned, 1.0, _UNALIGNED_SHARE)


def _is_aligned(width: Number) -> Flag:
    blocks = width / _ALIGNMENT  # dividing by a power of two does not round
    return np.equal(blocks, np.floor(blocks))


def matmul_seconds(
    job: PoolJob,
    m: Number,
    n: Number,
    k: Number,
    batch: Number = 1.0,
    *,
    precision: Precision | None = None,
    aligned: Flag | None = None,
    result_bytes: float | None = None,
) -> Number:
    """Seconds of `batch` products (m x k) (k x n): the slower of arithmetic and memory traffic, plus the launch.

    `precision` defaults to the training precision. `aligned`: whether the two widths are aligned; by default the widths
    of the right factor are tested. The number of tokens is not tested, because it is not a property of the model.
    `result_bytes`: bytes moved for each element of the result; by default it is written once, as activations are.

    Source: roofline model, Williams et al. (CACM 2009).
    """
    device = job.cluster.device
    precision = precision or job.training.precision
    if aligned is None:
        aligned = _is_aligned(n) & _is_aligned(k)
    share = _kernel_share(device, precision, m, n, k, batch, aligned)
    speed = job.engine.compute.low_precision_speed if precision in ("fp8", "fp4") else 1.0
    arithmetic = 2.0 * m * n * k * batch / (device.peak[precision] * share * speed)
    written = job.compute_bytes if result_bytes is None else result_bytes
    traffic = ((m * k + k * n) * job.compute_bytes + m * n * written) * batch
    return np.maximum(arithmetic, _stream_seconds(job, traffic)) + job.launch_seconds


def _stream_seconds(job: PoolJob, num_bytes: Number) -> Number:
    rate = job.cluster.device.memory_bandwidth * job.cluster.device.efficiency.memory
    return num_bytes / rate * job.calibration.memory


def memory_bound_seconds(job: PoolJob, num_bytes: Number) -> Number:
    """Seconds of an operator that only moves bytes, with its launch.

    Source: roofline model, Williams et al. (CACM 2009).
    """
    return _stream_seconds(job, num_bytes) + job.launch_seconds


def linear_seconds(
    job: PoolJob,
    tokens: Number,
    fan_in: Number,
    fan_out: Number,
    batch: Number = 1.0,
    *,
    precision: Precision | None = None,
) -> PassSeconds:
    """Seconds of one linear layer, or of `batch` linear layers: output, gradient of the input, gradient of the weight.

    In 8 or 4 bits the inputs and the output gradients are quantised first, in both orientations: 2 bytes are read and 2
    written for each element.

    If the product itself adds the gradient of the weight to the sum of the step, it reads and writes this sum.

    Source: backpropagation has two products of the forward pass's size; Transformer Engine for the casts; Megatron-LM,
    tensor_parallel/layers.py (gradient_accumulation_fusion, main_grad).
    """
    of = partial(matmul_seconds, job, precision=precision, aligned=_is_aligned(fan_in) & _is_aligned(fan_out))
    forward, backward = of(tokens, fan_out, fan_in, batch), of(tokens, fan_in, fan_out, batch)
    added = None if job.engine.compute.accumulation_bytes else 2.0 * job.state_bytes.grads
    weight = of(fan_out, fan_in, tokens, batch, result_bytes=added)
    if (precision or job.training.precision) in ("fp8", "fp4"):
        forward = forward + memory_bound_seconds(job, 4.0 * tokens * fan_in * batch)
        backward = backward + memory_bound_seconds(job, 4.0 * tokens * fan_out * batch)
    return PassSeconds(forward=forward, backward_input=backward, backward_weight=weight)


def head_seconds(job: PoolJob, layout: LayerDegrees, *, graded: bool = True) -> PassSeconds:
    """Seconds of the output head and the loss for one microbatch, on the last stage.

    graded: whether gradients are computed, too.

    A frozen head has no gradient. A chunked or fused linear loss runs the head's backward pass during the forward pass,
    and accumulates the head's gradient part by part.

    Source: cost/loss.py; torchtitan, components/loss.py (ChunkedLossWrapper).
    """
    tokens = tokens_per_microbatch(job, layout)
    vocab, at_once = outputs_on_device(job.model, job.engine, layout), tokens_at_once(job, layout)
    parts = tokens / at_once
    linear = linear_seconds(job, at_once, head_width(job.model), vocab, precision=job.core_precision) * parts
    if job.training.lora_rank:
        linear = linear.without_weight_gradients
    forward, backward = (
        memory_bound_seconds(job, each * tokens * vocab) if each else 0.0 for each in bytes_moved_per_logit(job)
    )
    whole = linear + PassSeconds(forward=forward, backward_input=backward)
    if not graded or not job.training.method.reads_logits:
        return PassSeconds(forward=whole.forward * job.calibration.slowdown)
    if job.loss in ("chunked", "fused-linear"):
        summed = job.state_bytes.grads if job.loss == "chunked" else job.compute_bytes
        added = memory_bound_seconds(job, (job.compute_bytes + 2.0 * summed) * vocab * head_width(job.model))
        whole = PassSeconds(forward=whole.total + (0.0 if job.training.lora_rank else (parts - 1.0) * added))
    slowed: PassSeconds = whole * job.calibration.slowdown
    return slowed


def accumulation_seconds(job: PoolJob, num_params: Number) -> Number:
    """Seconds to add one microbatch's gradient of `num_params` parameters to the sum of the step.

    Source: engine profile, bytes moved per parameter.
    """
    if job.engine.compute.accumulation_bytes == 0:
        return 0.0 * num_params
    return memory_bound_seconds(job, job.engine.compute.accumulation_bytes * num_params)
