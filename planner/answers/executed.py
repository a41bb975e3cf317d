"""One executed step: every pass of every stage, the parts of each pass, and the tail after the last pass.

The ledger describes only the slowest stage, while here every stage does its own work in the order of the schedule. For
unequal stages the executed step can therefore differ from the ledger's step, whose closed form of the bubble is inexact
(cost/schedule_comparison.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.compute import PassSeconds
from planner.cost.estimate import timeline
from planner.cost.flops import chunk_flops
from planner.cost.ledger import LineName
from planner.cost.microbatch import num_microbatches
from planner.cost.prices import chunk_parts, layout_prices, num_updates
from planner.cost.simulate import simulate
from planner.cost.stage import pool_indices, stages_of
from planner.cost.transfers import transfers
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from planner.cost.prices import StagePrices
    from planner.cost.simulate import Timeline
    from planner.layout import Layout
    from planner.specs.job import Job

_ORDER: Final = (
    LineName.UNGRADED, LineName.RECOMPUTE, LineName.COMPUTE, LineName.HEAD, LineName.TP_COMM, LineName.CP_COMM,
    LineName.EP_COMM, LineName.ACCUMULATION, LineName.DP_COMM, LineName.PP_COMM, LineName.TIED_EMBEDDING,
    LineName.HOST_COMM, LineName.OPTIMIZER,
)  # fmt: skip
_PASSES: Final = {
    "F": ("forward",),
    "B": ("backward_input", "backward_weight"),
    "I": ("backward_input",),
    "W": ("backward_weight",),
}
"""For each kind of operation of a timeline, its passes in `PassSeconds`."""
PASS_NAMES: Final = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
"""The kinds in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind:
    """Times and FLOPs that all passes of one kind through one chunk share, on one device.

    parts: exposed seconds by ledger line, in the order of execution; their sum is the time of the pass.
    model_flops, recomputed_flops: FLOPs of the pass on one device (the mean of the replica's ranks).
    """

    parts: tuple[tuple[LineName, float], ...]
    model_flops: float
    recomputed_flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedStep:
    """Every pass of one step with its parts. All times are seconds; fields without a note have shape (stages,).

    timeline: the passes; the two passes of an overlapped pair follow each other, as torch runs them.
    kinds: the passes by kind and chunk.
    tail: the work on each stage after the end of the pipeline, in order; empty under pipedream, which updates after
    each backward pass.
    send: one send to a neighbour, if it is hidden; otherwise it is part of the passes.
    hidden_each: hidden communication of one microbatch, by line.
    hidden_once: hidden data-parallel communication of the whole step.
    bytes_per_second: for each line of communication, one rank's bytes divided by the line's seconds.
    """

    timeline: Timeline
    kinds: Mapping[tuple[str, int], PassKind]
    tail: tuple[tuple[tuple[LineName, float], ...], ...]
    send: float
    hidden_each: Mapping[LineName, NDArray[np.float64]]
    hidden_once: NDArray[np.float64]
    bytes_per_second: Mapping[LineName, NDArray[np.float64]]

    @property
    def pipeline_seconds(self) -> float:
        """Seconds from the start of the first pass to the end of the last pass."""
        return self.timeline.seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step: the passes and the longest tail."""
        return self.timeline.seconds + max(sum_of(seconds for _, seconds in each) for each in self.tail)


def executed_step(job: Job, layout: Layout) -> ExecutedStep:
    """Execute one step of a layout; under pipedream, the pipeline is empty at the start."""
    prices, pp = layout_prices(job, layout), layout.pp
    parts = chunk_parts(job, layout)
    tail = {
        LineName.DP_COMM: _of_stages(prices.dp.exposed_once, pp),
        LineName.TIED_EMBEDDING: _of_stages(prices.tied_embedding, pp),
        LineName.HOST_COMM: _of_stages(prices.host.exposed_once, pp),
        LineName.OPTIMIZER: _of_stages(prices.optimizer, pp),
    }
    hidden_each = _of_stages(prices.dp.busy_each - prices.dp.exposed.total, pp)
    hidden_once = _of_stages(prices.dp.busy_once - prices.dp.exposed_once, pp)
    passes = timeline(job, layout)
    if layout.schedule == "pipedream":
        for name, seconds in tail.items():
            parts[name] = parts.get(name, PassSeconds()) + PassSeconds(backward_weight=seconds)
        tail, hidden_each, hidden_once = {}, hidden_each + hidden_once, 0.0 * hidden_once
        m = layout.num_microbatches(job.training.global_batch_size)
        passes = simulate(layout.schedule, sum(parts.values(), PassSeconds()), m)
    return ExecutedStep(
        timeline=_pairs_apart(passes, sum(parts.values(), PassSeconds())),
        kinds=_kinds(job, layout, parts),
        tail=tuple(_seconds_of(tail, stage) for stage in range(pp)),
        send=float(np.max(prices.pp_hidden)) / (2 * layout.interleave),
        hidden_each={
            LineName.TP_COMM: _of_stages(prices.tp_hidden, pp),
            LineName.CP_COMM: _of_stages(prices.cp_hidden, pp),
            LineName.DP_COMM: hidden_each,
        },
        hidden_once=hidden_once,
        bytes_per_second=_bytes_per_second(job, layout, prices),
    )


def _of_stages(seconds: Any, pp: int) -> NDArray[np.float64]:
    return np.array(np.broadcast_to(seconds, pp), dtype=float)


def _seconds_of(lines: Mapping[LineName, NDArray[np.float64]], index: int) -> tuple[tuple[LineName, float], ...]:
    """The lines with more than 0 seconds, in the order in which a timeline shows them."""
    return tuple((name, float(lines[name][index])) for name in _ORDER if name in lines and lines[name][index] > 0)


def _pairs_apart(passes: Timeline, seconds: PassSeconds) -> Timeline:
    """The two passes of each overlapped pair, one after the other within the time of the pair."""
    both = np.flatnonzero(passes.overlapped)
    first, second = both[::2], both[1::2]
    work = np.zeros(len(passes.kind))
    for kind, names in _PASSES.items():
        each = np.sum([getattr(seconds, name) for name in names], axis=0)
        work += np.where(passes.kind == kind, each[passes.chunk], 0.0)
    work -= passes.hidden
    turn = passes.start[first] + (passes.end - passes.start)[first] * work[first] / (work[first] + work[second])
    start, end = passes.start.copy(), passes.end.copy()
    end[first], start[second] = turn, turn
    return replace(passes, start=start, end=end)


def _kinds(job: Job, layout: Layout, parts: Mapping[LineName, PassSeconds]) -> dict[tuple[str, int], PassKind]:
    flops, n = chunk_flops(job, layout), layout.num_chunks
    ranks = layout.tp * layout.cp
    again = flops["repeated"]
    kinds = {}
    for kind, names in _PASSES.items():
        lines = {
            line: np.sum([_of_stages(getattr(part, name), n) for name in names], axis=0) for line, part in parts.items()
        }
        model = np.sum([flops[name] for name in names], axis=0)
        recomputed = again if "backward_input" in names else 0.0 * again
        for chunk in range(n):
            kinds[kind, chunk] = PassKind(
                parts=_seconds_of(lines, chunk),
                model_flops=float(model[chunk]) / ranks,
                recomputed_flops=float(recomputed[chunk]) / ranks,
            )
    return kinds


def _bytes_per_second(job: Job, layout: Layout, prices: StagePrices) -> dict[LineName, NDArray[np.float64]]:
    m, updates = num_microbatches(job, layout), num_updates(job, layout)
    busy = {
        LineName.TP_COMM: m * prices.tp_comm,
        LineName.CP_COMM: m * prices.cp_comm,
        LineName.EP_COMM: m * prices.ep_comm,
        LineName.PP_COMM: m * prices.pp_comm,
        LineName.DP_COMM: m * prices.dp.busy_each + updates * prices.dp.busy_once,
        LineName.TIED_EMBEDDING: updates * prices.tied_embedding,
    }
    num_bytes = {name: np.zeros(layout.pp) for name in busy}
    stages, of_stage = stages_of(job, layout), pool_indices(job, layout)
    for index, pool in enumerate(job.pools):
        for each in transfers(pool, layout, stages):
            moved = each.times_per_step(m, updates) * each.num_bytes
            num_bytes[each.line] += np.where(of_stage == index, moved, 0.0)
    return {
        name: np.divide(num_bytes[name], seconds, out=np.zeros(layout.pp), where=_of_stages(seconds, layout.pp) > 0)
        for name, seconds in busy.items()
    }
