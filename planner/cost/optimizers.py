"""State and memory traffic of optimizers: moments of AdamW, SGD, Adafactor and Muon, and the seconds of an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.adapters import trained_params
from planner.cost.compute import memory_bound_seconds
from planner.cost.operators import layer_of, norm_params
from planner.cost.parameters import layer_params_on_device
from planner.cost.shapes import alone
from planner.cost.stage import (
    end_params,
    expert_shard_divisor,
    holds_embedding,
    holds_head,
    layer_kinds,
    shard_degree,
    sum_over_layers,
)
from planner.once import once
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.cost.stage import Stage
    from planner.layout import Degrees
    from planner.numbers import Flag, Number
    from planner.specs.job import PoolJob
    from planner.specs.model import ModelSpec

Matrix = tuple[float, float, float]
"""Rows, columns, and number of matrices of this shape; the number is a fraction if only some layers have them."""

_EIGHT_BIT_BLOCK: Final = 2048
"""Values that share one fp32 scale (Dettmers et al. 2022, section 2)."""

_CLIPPING_BYTES: Final = 28.0
"""Bytes moved per parameter in addition to weights and moments, as SimuMax itemises them.

Bytes for each step: zeroing gradients 4, scaling 8, reading them for the norm 4, clipping 8, and reading them in the
update 4.
"""

_FACTOR_BYTES: Final = 4.0
"""Bytes of each of Adafactor's sums, which are fp32."""

_NUM_MOMENTS: Final = {"adamw": 2, "sgd": 1, "adafactor": 0, "muon": 1}
"""Number of running means, in the recipe's precision, for each parameter of a matrix."""

_NEWTON_SCHULZ_STEPS: Final = 5
"""Newton-Schulz iterations of Muon (Jordan et al. 2024; torch.optim.Muon, ns_steps)."""


def moment_bytes_per_param(job: PoolJob) -> float:
    """Bytes of running means for one parameter of a matrix; `extra_moment_bytes` adds state of any other form.

    AdamW keeps two means; its 8-bit form keeps one byte per mean, and an fp32 scale per block. SGD and Muon keep one
    momentum, Adafactor keeps none.

    Source: Loshchilov and Hutter (2019); Dettmers et al., 8-bit Optimizers (2022), section 2; torch.optim.SGD; Shazeer
    and Stern, Adafactor (2018), section 3; Jordan et al., Muon (2024).
    """
    if job.training.optimizer == "adamw-8bit":
        return 2 * (1 + 4 / _EIGHT_BIT_BLOCK)
    return _NUM_MOMENTS[job.training.optimizer] * job.state_bytes.moment


@once
def sums_last(job: PoolJob, layout: Degrees) -> Flag:
    """Whether fp32 gradient sums stay in memory until the update, so that the update makes no copies of gradients.

    Source: engine profile, pipeline_sums.
    """
    lasts = job.training.precision == "bf16" and job.training.memory_recipe == "engine"
    return np.greater(layout.pp, 1) & (job.engine.memory.pipeline_sums > 0 and lasts)


def update_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of copies that an update makes: of moments, and of the gradients of a device's shard.

    The copies are freed before the next forward pass. Dense parameters and routed experts have separate optimizers,
    which run one after the other. ZeRO-3 updates its shard in groups of parameters.

    Source: Transformer Engine, pytorch/optimizers/fused_adam.py (get_unscaled_state, for all parameters of a group);
    Megatron-LM, core/optimizer (ChainedOptimizer); DeepSpeed, runtime/zero/stage_1_and_2.py (step) and stage3.py
    (_prepare_fp32_grad_for_sub_group), which `planner verify` counts; torch/optim/adam.py (_multi_tensor_adam).
    """
    states = job.state_bytes
    moments = states.moment_copy * _NUM_MOMENTS.get(job.training.optimizer, 0)
    if job.training.optimizer == "adamw":
        moments += states.moment * job.engine.memory.update_copies
    gradients = np.where(sums_last(job, layout), 0.0, states.step_grads)
    if not moments and not states.step_grads:
        return 0.0
    held = trained_params(job, layout, stage)
    shard = np.maximum(held.common / shard_degree(layout), held.experts / expert_shard_divisor(job, layout))
    at_once = np.where(np.less(layout.zero, 3), shard, np.minimum(shard, job.engine.memory.updated_params))
    return moments * shard + gradients * at_once


def layer_matrices(model: ModelSpec, *, experts: bool) -> tuple[tuple[Matrix, ...], tuple[Matrix, ...]]:
    """Weight matrices of one layer: first the common matrices, then the matrices of the routed experts.

    Source: `planner.cost.operators`, matrix by matrix.
    """
    products = layer_of(model, experts=experts).products
    common, routed = (
        tuple((rows, each.inputs, each.share * max(1, each.count)) for each in part for rows in each.outputs.values())
        for part in ([each for each in products if not each.count], [each for each in products if each.count])
    )
    return common, routed


def _size(matrices: tuple[Matrix, ...]) -> float:
    return sum_of(rows * columns * count for rows, columns, count in matrices)


def _sides(matrices: tuple[Matrix, ...]) -> float:
    return sum_of((rows + columns) * count for rows, columns, count in matrices)


def _schulz_flops(matrices: tuple[Matrix, ...]) -> float:
    """FLOPs of Newton-Schulz: 4 m^2 n + 2 m^3 per iteration X <- a X + (b A + c A^2) X with A = X X^T, for m <= n."""
    shapes = ((min(rows, columns), max(rows, columns), count) for rows, columns, count in matrices)
    return _NEWTON_SCHULZ_STEPS * sum_of(count * (4.0 * m * m * n + 2.0 * m**3) for m, n, count in shapes)


@once
def extra_moment_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Number, Number]:
    """Bytes of optimizer state beyond `moment_bytes_per_param`, for common weights and for experts, before ZeRO.

    Muon leaves embeddings, head and vectors to AdamW, which keeps a second mean for them. Adafactor keeps fp32 sums of
    rows and columns of each matrix, and a whole mean for each vector. tp is assumed to divide the sums like the
    matrices, and the sums are less than a thousandth of the parameters.

    Source: Jordan et al., Muon (2024); Shazeer and Stern, Adafactor (2018), section 3; torch.optim.Adafactor.
    """
    if job.training.optimizer not in ("muon", "adafactor"):
        return 0.0, 0.0
    common: Number = end_params(job, layout, stage) + 0.0
    if job.training.optimizer == "adafactor":
        common = _end_sides(job, layout, stage, common)
    routed: Number = 0.0
    for experts, count in layer_kinds(job, layout, stage):
        shared, own = layer_matrices(job.model, experts=experts)
        held, whole = (
            layer_params_on_device(job.model, layout, experts=experts),
            layer_params_on_device(job.model, alone(layout), experts=experts),
        )
        vectors = (whole.common - _size(shared)) * held.common / whole.common
        common = common + count * vectors
        if own:
            routed = routed + count * (whole.experts - _size(own)) * held.experts / whole.experts
        if job.training.optimizer == "adafactor":
            common = common + count * _sides(shared) * held.common / whole.common
            routed = routed + (count * _sides(own) * held.experts / whole.experts if own else 0.0)
    each = _FACTOR_BYTES if job.training.optimizer == "adafactor" else job.state_bytes.moment
    return each * common, each * routed


def _end_sides(job: PoolJob, layout: Degrees, stage: Stage, num_params: Number) -> Number:
    """Number of rows and columns of embedding, positions and head on one device; the final norm is not counted here."""
    h = job.model.hidden_size
    first, last = holds_embedding(stage), holds_head(layout, stage)
    own_head = last & ~(first & job.model.tied_embeddings)
    matrices = first * (1.0 + (job.model.position == "learned")) + own_head
    norms = last * (norm_params(job.model) / h if job.model.final_norm else 0.0)
    return num_params / h + h * matrices + (h - 1) * norms


def newton_schulz_seconds(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Seconds that Muon needs to orthogonalize a stage's matrix updates, divided over tp and the ZeRO shards.

    Source: Jordan et al., Muon (2024); Liu et al., Muon is scalable for LLM training (2025), section 2.3, for the
    division over ranks.
    """
    if job.training.optimizer != "muon":
        return 0.0

    def flops(experts: bool) -> Number:
        shared, own = layer_matrices(job.model, experts=experts)
        of_shared = _schulz_flops(shared) / (layout.tp * shard_degree(layout))
        return of_shared + _schulz_flops(own) / (layout.ep * layout.etp * expert_shard_divisor(job, layout))

    device = job.cluster.device
    rate = device.peak[job.core_precision] * device.efficiency.matmul
    return sum_over_layers(job, layout, stage, flops) / rate


def optimizer_seconds(job: PoolJob, num_params: Number) -> Number:
    """Seconds of clipping and updating `num_params` parameters of one device's shard.

    Clipping and reading the gradient move 28 bytes per parameter. Weights and moments are read and written, which makes
    52 bytes per parameter in total for AdamW in fp32. Adafactor also reads the gradient again, and writes and reads its
    update: 12 further bytes.

    Source: SimuMax, optimizer cost by memory traffic; sizes of the states.
    """
    states = job.state_bytes
    kept = (states.master or states.weights) + moment_bytes_per_param(job)
    extra = 12.0 if job.training.optimizer == "adafactor" else 0.0
    return memory_bound_seconds(job, (_CLIPPING_BYTES + 2.0 * kept + extra) * num_params)
