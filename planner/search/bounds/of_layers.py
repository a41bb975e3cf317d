"""Least seconds of layers, whatever stages they are in: bounds of configurations before their stages are looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.cost.compute import head_seconds
from planner.cost.prices import num_microbatches, stage_parts
from planner.cost.schedule import EXECUTED, steady_count, step_seconds
from planner.cost.shapes import LAYER_KEYS
from planner.cost.stage import LayerKind, Stage, kinds_of_model, pattern_of, stage_of, timed_kinds
from planner.layout import divisors
from planner.search.space.configurations import expert_options
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from planner.cost.prices import StageParts
    from planner.numbers import Flag, Number
    from planner.search.space.configurations import DegreeArrays
    from planner.specs.job import Job, PoolJob

INSIDE = -1  # position of a stage that is neither the first nor the last of any pipeline


def kinds_main_first(job: Job) -> tuple[LayerKind, ...]:
    """The kinds of layers; those of what more layers have, experts or not, first, and of these those without a window.

    The others with as many parameters as the first are next.
    """
    kinds = kinds_of_model(job)
    with_experts = sum(kind.number for kind in kinds if kind.has_experts)
    main = 2 * with_experts >= job.model.num_layers
    return tuple(sorted(kinds, key=lambda kind: (kind.has_experts != main, kind.is_local)))


def stage_of_kind(kind: Sequence[Flag], *, index: Number, num_layers: Number, policy: Number) -> Stage:
    """A stage of layers of one kind only, given as whether they have experts and a window."""
    experts, local = (np.multiply(num_layers, each) for each in kind[:2])
    return Stage(
        index=index,
        num_layers=num_layers,
        policy=policy,
        num_expert_layers=experts,
        num_local_layers=local,
        num_local_expert_layers=np.multiply(experts, kind[1]),
    )


def num_main_layers(job: Job) -> int:
    """Layers of the main kinds, which `least_costs` puts first and `capacities_of_stages` counts."""
    kinds = kinds_main_first(job)
    return sum(kind.number for kind in kinds if kind.has_experts == kinds[0].has_experts)


def hides_exchanges(job: PoolJob, degrees: DegreeArrays) -> bool:
    """Whether overlapped pairs of passes can hide exchanges and sends, which no bound may count then."""
    paired = job.engine.overlap.paired_passes and degrees.schedule == "dualpipev"
    return paired or job.training.expert_overlap


def _least_layer_seconds(job: PoolJob, parts: StageParts, *, hides: bool) -> list[Number]:
    """Least seconds of one layer of each kind for one microbatch.

    Computation and tensor and expert parallel communication of a layer that recomputes nothing; broadcasts. hides:
    exchanges of experts may be hidden.
    """
    least = []
    for has_experts, is_local, _ in kinds_main_first(job):
        layer = parts.layers[has_experts, is_local]
        exchange = 2.0 * layer.ep if has_experts and not hides else 0.0
        exposed = sum_of(layer.tp) - sum_of(layer.tp_hidden)
        least.append(layer.passes.total + exposed + exchange)
    return least


def _mean_and_fastest(job: PoolJob, parts: StageParts) -> tuple[Number, Number]:
    """Least seconds of one layer for one microbatch: on average over the model's layers, and of its fastest kind.

    With any schedule of the engine: partitions of the devices have none yet.
    """
    hides = job.engine.overlap.paired_passes or job.training.expert_overlap
    mean: Number = 0.0
    fastest: Number = np.inf
    for kind, seconds in zip(kinds_main_first(job), _least_layer_seconds(job, parts, hides=hides), strict=True):
        mean, fastest = mean + kind.number / job.model.num_layers * seconds, np.minimum(fastest, seconds)
    return mean, fastest


_LOADS_PER_LAYER = 1000


def layer_loads(job: PoolJob, degrees: DegreeArrays) -> dict[LayerKind, NDArray[np.int64]]:
    """How much more than one of the fastest kind a layer of each kind takes, in whole numbers, [n]; 1 of one kind."""
    kinds = kinds_main_first(job)
    if len(kinds) == 1:
        return {kinds[0]: np.ones(len(degrees), dtype=np.int64)}
    least = np.stack(
        [
            np.broadcast_to(each, (len(degrees),))
            for each in _least_layer_seconds(job, stage_parts(job, degrees), hides=hides_exchanges(job, degrees))
        ]
    )
    loads = np.rint(_LOADS_PER_LAYER * least / least.min(axis=0)).astype(np.int64)
    return dict(zip(kinds, loads, strict=True))


class LayerBounds:
    """Least seconds of a layer and of the head for every tp, cp, microbatch and degrees of experts, priced once.

    Arrays are [partitions, microbatches, experts]: what differs in (tp, sp, cp, segment), each divisor of the batch,
    and each pair (ep, etp).
    """

    def __init__(self, job: PoolJob, partitions: DegreeArrays, pairs: Sequence[tuple[int, int]] | None = None) -> None:
        """Price the partitions; `pairs` of (ep, etp) are those of the job unless they are given."""
        self._job = job
        distinct, _ = partitions.distinct("tp", "sp", "cp", "segment")
        self._segments = np.unique(distinct.segment)
        self._partitions, order = np.unique(self._code(distinct), return_index=True)
        self._sizes = np.array(divisors(job.training.global_batch_size))
        pairs = sorted(pairs or expert_options(job))
        self._pairs = np.array([ep * _PLACE + etp for ep, etp in pairs])
        x = distinct.take(order).columns().columns()
        x = replace(x, mbs=self._sizes[:, np.newaxis])
        x = replace(x, ep=np.array([ep for ep, _ in pairs]), etp=np.array([etp for _, etp in pairs]))
        shape = (len(order), len(self._sizes), len(pairs))
        self._mean, self._fastest = (
            np.broadcast_to(each, shape) for each in _mean_and_fastest(job, stage_parts(job, x))
        )
        heads = (1 + job.model.mtp_layers) * head_seconds(job, x).total
        self._head = np.broadcast_to(heads, shape)[:, :, 0]

    def partition_bound_seconds(self, partitions: DegreeArrays) -> NDArray[np.float64]:
        """A step of these partitions takes at least this long, whatever microbatch, experts' degrees and the rest are.

        The slowest stage does at least its share of all layers of every sequence: T >= B / dp * L / pp * the least
        seconds of a layer and sequence over all microbatch sizes.

        Buys (`partition`): GPT-3 on 1,024 devices 0.57 s in place of 1.18, DeepSeek-V3 on 11,000 1.55 in place of 3.16.

        Source: derived here; tested to stay below the exact optimum.
        """
        batch, layers = self._job.training.global_batch_size, self._job.model.num_layers
        each = (self._mean.min(axis=2) / self._sizes).min(axis=1)[self._row_of(partitions)]
        return np.asarray(batch / partitions.dp * (layers / partitions.pp) * each)

    def timing_bound_seconds(self, degrees: DegreeArrays, *, any_experts: bool = False) -> NDArray[np.float64]:
        """The same with microbatch size and interleave known: T >= (m - 1/v) * slowest + all work / v.

        The slowest of S stages takes at least the mean of all work, and ceil(L / S) layers, and what the last
        stage needs for one layer in each chunk and the head. `any_experts`: whatever the degrees of experts are.

        Buys (`timing`): GPT-3 on 1,024 devices 0.54 s in place of 0.72, DeepSeek-V3 on 11,000 1.53 in place of over 15.

        Source: derived here; tested to stay below the exact optimum.
        """
        mean, fastest, head = self.layer_and_head_seconds(degrees, any_experts=any_experts)
        layers = self._job.model.num_layers
        m, v = num_microbatches(self._job, degrees), degrees.interleave
        work = layers * mean + head
        slowest = np.maximum(work / degrees.pp, np.ceil(layers / degrees.pp) * fastest)
        if degrees.schedule in EXECUTED:  # whose bubble has no such form, and whose head may be on any stage
            return np.asarray(m * np.maximum(work / degrees.pp, np.ceil(layers / degrees.pp) * fastest))
        slowest = np.maximum(slowest, v * fastest + head)
        return np.asarray(step_seconds(m, v, slowest, work))

    def layer_and_head_seconds(
        self, degrees: DegreeArrays, *, any_experts: bool = False
    ) -> tuple[Number, Number, Number]:
        """Least seconds of one microbatch: of a mean layer, of a layer of the fastest kind, and of the head."""
        row, size = self._row_of(degrees), np.searchsorted(self._sizes, degrees.mbs)
        head = self._head[row, size]
        if any_experts:
            return self._mean.min(axis=2)[row, size], self._fastest.min(axis=2)[row, size], head
        pair = np.searchsorted(self._pairs, degrees.ep * _PLACE + degrees.etp)
        return self._mean[row, size, pair], self._fastest[row, size, pair], head

    def layer_seconds_of_sequence(self, partitions: DegreeArrays) -> NDArray[np.float64]:
        """Least seconds of a layer of the fastest kind for one sequence, whatever the microbatch size is."""
        return np.asarray((self._fastest.min(axis=2) / self._sizes).min(axis=1)[self._row_of(partitions)])

    def _row_of(self, degrees: DegreeArrays) -> NDArray[np.int64]:
        return np.asarray(np.searchsorted(self._partitions, self._code(degrees)))

    def _code(self, degrees: DegreeArrays) -> Number:
        """One number for each (tp, sp, cp, segment)."""
        shape = (degrees.tp * 2 + degrees.sp) * _PLACE + degrees.cp
        if len(self._segments) == 1:
            return shape
        return shape * len(self._segments) + np.searchsorted(self._segments, degrees.segment)


_PLACE = 1 << 24  # more than any degree


class LayerShapes(NamedTuple):
    """The different layer shapes of configurations, which of them each has, and what stages of them consist of."""

    degrees: DegreeArrays
    position: NDArray[np.int64]
    parts: StageParts


def layer_shapes(job: PoolJob, degrees: DegreeArrays) -> LayerShapes:
    """The layer shapes of these configurations, each priced once."""
    distinct, position = degrees.distinct(*LAYER_KEYS)
    return LayerShapes(distinct, position, stage_parts(job, distinct))


def most_layers(
    job: PoolJob, degrees: DegreeArrays, cutoff_seconds: Number, shapes: LayerShapes | None = None
) -> NDArray[np.int64]:
    """Layers that no stage exceeds: the other stages need theirs, and the step must stay within the cutoff.

    So many layers in a row have at least so many whole periods of the pattern, less one for each chunk but the first.
    shapes: those of the configurations, where they are priced already.

    Buys where columns are priced (`most-layers`, medians of 3): Llama-3-70B on three pools 3.51 s in place of 8.52,
    Llama-3-405B on 16,384 devices 0.63 in place of 0.84; GPT-3 on 1,024 nothing.
    """
    v, layers = degrees.interleave, job.model.num_layers
    most = layers - v * (degrees.pp - 1)
    if np.any(np.isfinite(cutoff_seconds)):
        shapes = shapes or layer_shapes(job, degrees)
        distinct, position = shapes.degrees, shapes.position
        of_kinds = zip(
            kinds_main_first(job),
            _least_layer_seconds(job, shapes.parts, hides=hides_exchanges(job, degrees)),
            strict=True,
        )
        least = {kind[:2]: seconds for kind, seconds in of_kinds}
        left = cutoff_seconds
        if job.between is None and degrees.schedule not in EXECUTED:  # filling and draining take all work once
            work = sum(kind.number * least[kind[:2]] for kind in kinds_main_first(job)) + shapes.parts.head.total
            left = cutoff_seconds - np.broadcast_to(work, (len(distinct),))[position] / v
        steady = np.maximum(steady_count(num_microbatches(job, degrees), v), 1e-9)
        slowest = np.maximum(left, 0.0) / steady * (1 + 1e-9)
        each = np.broadcast_to(np.minimum.reduce(list(least.values())), (len(distinct),))[position]
        most = np.minimum(most, np.floor(slowest / each))
        pattern = pattern_of(job)
        if pattern.period > 1:
            one = stage_of(job, index=INSIDE, num_layers=pattern.period, policy=0, first=pattern.leading)
            held = timed_kinds(job, distinct, one)  # also a kind that only layers for further tokens may be, of none
            whole = sum_of(number * least[kind] for kind, number in held if kind in least)
            periods = np.floor(slowest / np.broadcast_to(whole, (len(distinct),))[position])
            most = np.minimum(most, pattern.leading + pattern.period * (periods + v) - v)
    return np.asarray(most, dtype=np.int64)
