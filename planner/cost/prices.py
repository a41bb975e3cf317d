"""Prices of a pipeline stage: seconds of one microbatch by cause, seconds once a step, and peak bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cost.compute import accumulation_seconds, head_seconds, memory_bound_seconds
from planner.cost.layers import layer_seconds, tokens_per_microbatch
from planner.cost.ledger import total_bytes
from planner.cost.memory import memory_lines, whole_gradients
from planner.cost.optimizers import newton_schulz_seconds, optimizer_seconds
from planner.cost.stage import by_policy, expert_shard_degree, held_params, layer_kinds, shard_degree
from planner.cost.traffic import (
    StageWindow,
    context_parallel_seconds,
    data_parallel_seconds,
    expert_parallel_seconds,
    pipeline_send_seconds,
    tensor_parallel_end_seconds,
    tensor_parallel_seconds,
    tied_embedding_seconds,
)

if TYPE_CHECKING:
    from planner.cost.stage import Stage
    from planner.layout import Degrees
    from planner.specs.job import Job

__all__ = ["StagePrices", "num_microbatches", "stage_bytes", "stage_prices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrices:
    """What one stage costs: seconds of one microbatch by cause, and once a step. Every field broadcasts."""

    compute: Any
    recompute: Any
    head: Any
    accumulation: Any
    tp_comm: Any
    cp_comm: Any
    ep_comm: Any
    pp_comm: Any
    pp_hidden: Any
    dp_busy_each: Any
    dp_exposed_each: Any
    dp_busy_once: Any
    dp_exposed_once: Any
    tied_embedding: Any
    optimizer: Any

    @property
    def microbatch_seconds(self) -> Any:
        """Seconds of one microbatch through the stage, forward and backward: t_r of the pipeline formula."""
        work = self.compute + self.recompute + self.head + self.accumulation
        exposed_send = self.pp_comm - self.pp_hidden
        return work + self.tp_comm + self.cp_comm + self.ep_comm + exposed_send + self.dp_exposed_each

    @property
    def tail_seconds(self) -> Any:
        """Seconds of the stage after its last microbatch: exposed reduction and the optimizer."""
        return self.dp_exposed_once + self.tied_embedding + self.optimizer


def num_microbatches(job: Job, layout: Degrees) -> Any:
    """Microbatches of one step on one data-parallel rank: B / (dp * mbs).

    Source: Narayanan et al. (SC 2021), section 3.
    """
    return job.training.global_batch_size / (layout.dp * layout.mbs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerWork:
    """Seconds of all layers of a stage for one microbatch, by cause and direction."""

    forward: Any = 0.0
    backward: Any = 0.0
    recompute: Any = 0.0
    tp_forward: Any = 0.0
    tp_backward: Any = 0.0
    cp: Any = 0.0
    ep_forward: Any = 0.0
    ep_backward: Any = 0.0


def _layer_work(job: Job, layout: Degrees, stage: Stage) -> _LayerWork:
    """Sum over the layers of a stage; full recompute repeats the forward pass and its collectives.

    Source: sum of the parts in layers.py and traffic.py.
    """
    total = _LayerWork()
    full = np.equal(stage.policy, 2)
    tp_forward, tp_backward = tensor_parallel_seconds(job, layout)
    for experts, count in layer_kinds(job, layout, stage):
        layer = layer_seconds(job, layout, experts=experts)
        exchange = expert_parallel_seconds(job, layout) if experts else 0.0
        core_backward = 2.5 * layer.core_forward
        ring_forward, ring_backward = context_parallel_seconds(job, layout, layer.core_forward, core_backward)
        selective = 0.5 * layer.forward if job.engine.selective_recompute == "operators" else layer.core_forward
        again = by_policy(stage.policy, (0.0, selective, layer.forward))
        total = _LayerWork(
            forward=total.forward + count * layer.forward,
            backward=total.backward + count * layer.backward,
            recompute=total.recompute + count * again,
            tp_forward=total.tp_forward + count * tp_forward,
            tp_backward=total.tp_backward + count * (tp_backward + np.where(full, tp_forward, 0.0)),
            cp=total.cp + count * (ring_forward + ring_backward + np.where(full, ring_forward, 0.0)),
            ep_forward=total.ep_forward + count * exchange,
            ep_backward=total.ep_backward + count * (exchange + np.where(full, exchange, 0.0)),
        )
    return total


def stage_prices(job: Job, layout: Degrees, stage: Stage) -> StagePrices:
    """Prices of a stage, or of arrays of layouts and stages that broadcast.

    Source: sum of the parts in layers.py, compute.py and traffic.py.
    """
    work = _layer_work(job, layout, stage)
    head_forward, head_backward = head_seconds(job, layout)
    heads = 1 + job.model.mtp_layers
    first, last = np.equal(stage.index, 0), np.equal(stage.index, layout.pp - 1)
    send = pipeline_send_seconds(job, layout)
    window = StageWindow(
        forward=work.forward + work.tp_forward + work.ep_forward,
        backward=work.backward + work.recompute + work.tp_backward + work.ep_backward,
    )
    dp = data_parallel_seconds(job, layout, stage, window)
    held = held_params(job, layout, stage)
    elements = tokens_per_microbatch(job, layout) * job.model.hidden_size
    lookup = memory_bound_seconds(job, 6.0 * job.compute_bytes * elements)
    ends = first.astype(float) + last
    accumulates = whole_gradients(job, layout) & np.greater(num_microbatches(job, layout), 1)
    shard = held.common / shard_degree(layout) + held.experts / expert_shard_degree(layout)
    return StagePrices(
        compute=work.forward + work.backward,
        recompute=work.recompute,
        head=last * heads * (head_forward + head_backward) + first * lookup,
        accumulation=np.where(accumulates, accumulation_seconds(job, held.total), 0.0),
        tp_comm=work.tp_forward + work.tp_backward + ends * tensor_parallel_end_seconds(job, layout),
        cp_comm=work.cp,
        ep_comm=work.ep_forward + work.ep_backward,
        pp_comm=send,
        pp_hidden=send if job.engine.overlaps_pipeline_sends else 0.0 * send,
        dp_busy_each=dp.busy_per_microbatch,
        dp_exposed_each=dp.exposed_per_microbatch,
        dp_busy_once=dp.busy_per_step,
        dp_exposed_once=dp.exposed_per_step,
        tied_embedding=tied_embedding_seconds(job, layout, stage),
        optimizer=optimizer_seconds(job, shard) + newton_schulz_seconds(job, layout, stage),
    )


def stage_bytes(job: Job, layout: Degrees, stage: Stage) -> Any:
    """Peak bytes of a stage: the sum of its memory ledger.

    Source: memory.py.
    """
    return total_bytes(memory_lines(job, layout, stage))
