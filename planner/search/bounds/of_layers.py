"""Least seconds of layers in any stage, for bounds of configurations whose stages are not considered yet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.cost.compute import head_seconds
from planner.cost.ledger import LineName
from planner.cost.microbatch import num_microbatches
from planner.cost.prices import stage_parts, step_floor_seconds
from planner.cost.schedule import EXECUTED, steady_count, step_seconds
from planner.cost.shapes import LAYER_KEYS, by_part, spread
from planner.cost.stage import LayerKind, Stage, kinds_of_model, pattern_of, stage_of, timed_kinds
from planner.layout import divisors
from planner.search.space.arrays import TIE
from planner.search.space.configurations import expert_options
from planner.search.space.degree_rules import searched_ends
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from planner.cost.prices import StageParts
    from planner.numbers import Flag, Number, Rows
    from planner.search.space.configurations import DegreeArrays
    from planner.specs.job import Job, PoolJob

INSIDE = -1  # position of a stage that is neither the first nor the last of any pipeline


def kinds_main_first(job: Job) -> tuple[LayerKind, ...]:
    """The kinds of layers, main kinds first.

    The main kinds are the kinds with experts if at least half of the layers have experts, else the kinds without.

    Among the main kinds, and among the other kinds, kinds without a sliding window come first.
    """
    kinds = kinds_of_model(job)
    with_experts = sum(kind.number for kind in kinds if kind.has_experts)
    main = 2 * with_experts >= job.model.num_layers
    return tuple(sorted(kinds, key=lambda kind: (kind.has_experts != main, kind.is_local)))


def stage_of_kind(
    kind: Sequence[Flag], *, index: Number, num_layers: Number, policy: Number, num_mtp: Number | None = None
) -> Stage:
    """A stage of layers of one kind; `kind` tells whether these layers have experts and whether they have a window."""
    experts, local = (np.multiply(num_layers, each) for each in kind[:2])
    return Stage(
        index=index,
        num_layers=num_layers,
        policy=policy,
        num_mtp=num_mtp,
        num_expert_layers=experts,
        num_local_layers=local,
        num_local_expert_layers=np.multiply(experts, kind[1]),
    )


def mtp_of_last(job: Job) -> int | None:
    """Layers for multi-token prediction that the last stage holds in every layout; None if it always holds all."""
    return 0 if job.model.mtp_layers and searched_ends(job) else None


def leading_layers(job: Job) -> int:
    """Layers without experts that all stand before the layers of the main kinds; 0 where kinds of layers repeat.

    A stage holds layers of the main kinds only beside all of these layers, or behind the stages that hold them.
    """
    pattern = pattern_of(job)
    return pattern.leading if pattern.period == 1 and kinds_main_first(job)[0].has_experts else 0


def num_main_layers(job: Job) -> int:
    """Number of layers of the main kinds.

    These kinds come first in `least_costs`, and `capacities_of_stages` counts them.
    """
    kinds = kinds_main_first(job)
    return sum(kind.number for kind in kinds if kind.has_experts == kinds[0].has_experts)


def layers_of_slowest(num_layers: int, num_stages: Number, ends: Sequence[Number]) -> Number:
    """Least time of the slowest of S stages over all splits of the layers, in units of a layer, [n].

    ends: units of other work, each on a stage of its own, [n].

    In time k + f, with a whole k and f < 1, a stage holds k layers, and one with other work e holds k + floor(f - e).
    All stages together hold S k + sum floor(f - e) layers, which grows only where f is 0 or the fraction of an e.

    Source: derived here; tested against all ways to divide the layers.
    """
    ends = [np.maximum(end - TIE, 0.0) for end in ends]
    least: Number = np.inf
    for fraction in (0.0, *(end - np.floor(end) for end in ends)):
        lost = sum(np.ceil(end - fraction - TIE) for end in ends)
        least = np.minimum(least, np.ceil((num_layers + lost) / num_stages) + fraction)
    return np.maximum(least, reduce(np.maximum, ends))


def hides_exchanges(job: PoolJob, degrees: DegreeArrays) -> bool:
    """Whether overlapped pairs of passes can hide exchanges and sends.

    Bounds must then leave out exchanges and sends.
    """
    paired = job.engine.overlap.paired_passes and degrees.schedule == "dualpipev"
    return paired or job.training.expert_overlap


def _least_layer_seconds(job: PoolJob, parts: StageParts, *, hides: bool) -> list[Number]:
    """Least seconds of one layer of each kind for one microbatch.

    The time includes computation and tensor and expert parallel communication, without recompute; it broadcasts.
    hides: whether exchanges of experts may be hidden; the time then leaves them out.
    """
    least = []
    for has_experts, is_local, _ in kinds_main_first(job):
        layer = parts.layers[has_experts, is_local]
        exchange = 0.0 if hides else layer.busy[LineName.EP_COMM].total
        exposed = layer.busy[LineName.TP_COMM].total - layer.hidden[LineName.TP_COMM].total
        least.append(layer.passes.total + exposed + exchange + job.training.ungraded_passes * layer.passes.forward)
    return least


def _mean_fastest_main(job: PoolJob, parts: StageParts) -> tuple[Number, Number, Number]:
    """Least seconds of one layer for one microbatch: the mean over the layers, the fastest kind, the fastest main kind.

    The values hold for any schedule of the engine, because partitions of the devices have no schedule yet.
    """
    hides = job.engine.overlap.paired_passes or job.training.expert_overlap
    kinds, least = kinds_main_first(job), _least_layer_seconds(job, parts, hides=hides)
    mean = sum(kind.number / job.model.num_layers * seconds for kind, seconds in zip(kinds, least, strict=True))
    num_main = sum(kind.has_experts == kinds[0].has_experts for kind in kinds)
    return mean, reduce(np.minimum, least), reduce(np.minimum, least[:num_main])


_LOADS_PER_LAYER = 1000


def layer_loads(job: PoolJob, degrees: DegreeArrays) -> dict[LayerKind, NDArray[np.int64]]:
    """The time of a layer of each kind relative to the fastest kind, in whole numbers, [n]."""
    kinds = kinds_main_first(job)
    if len(kinds) == 1:
        return {kinds[0]: np.ones(len(degrees), dtype=np.int64)}
    shapes = layer_shapes(job, degrees)
    each = _least_layer_seconds(job, shapes.parts, hides=hides_exchanges(job, degrees))
    least = np.stack([np.broadcast_to(seconds, (len(shapes.degrees),)) for seconds in each])[:, shapes.position]
    loads = np.rint(_LOADS_PER_LAYER * least / least.min(axis=0)).astype(np.int64)
    return dict(zip(kinds, loads, strict=True))


class LayerBounds:
    """Least seconds of a layer and of the head, priced once for every tp, cp, microbatch size, ep and etp.

    The arrays have three axes: the partitions that differ in (tp, sp, cp, segment), the microbatch sizes (divisors of
    the batch), and the pairs (ep, etp).
    """

    def __init__(self, job: PoolJob, partitions: DegreeArrays, pairs: Sequence[tuple[int, int]] | None = None) -> None:
        """Price the partitions; `pairs` lists the (ep, etp) to price, by default all pairs of the job."""
        self._job = job
        distinct, _ = partitions.distinct("tp", "sp", "cp", "segment")
        self._segments = np.unique(distinct.segment)
        self._partitions, order = np.unique(self._code(distinct), return_index=True)
        self._sizes = np.array(divisors(job.training.global_batch_size))
        pairs = sorted(pairs or expert_options(job))
        self._pairs = np.array([ep * _PLACE + etp for ep, etp in pairs])
        x = distinct.take(order).columns().columns()
        ep, etp = np.array(pairs).T
        x = replace(x, mbs=self._sizes[:, np.newaxis], ep=ep, etp=etp)
        shape = (len(order), len(self._sizes), len(pairs))
        self._of_layer = [np.broadcast_to(each, shape) for each in _mean_fastest_main(job, stage_parts(job, x))]
        heads = (1 + job.model.mtp_layers) * head_seconds(job, x).total
        self._head = np.broadcast_to(heads, shape)[:, :, 0]

    def partition_bound_seconds(self, partitions: DegreeArrays) -> NDArray[np.float64]:
        """Lower bound of a step of these partitions, valid for all values of the missing keys.

        The slowest stage computes at least its share of all layers for every sequence: T >= B / dp * L / pp * x, where
        x is the least time of one layer for one sequence over all microbatch sizes.

        Gain (`partition`): 1.18 -> 0.57 s for GPT-3 on 1,024 devices, 3.16 -> 1.55 for DeepSeek-V3 on 11,000.

        Source: derived here; tested to stay below the exact optimum.
        """
        batch, layers = self._job.training.global_batch_size, self._job.model.num_layers
        each = (self._of_layer[0].min(axis=2) / self._sizes).min(axis=1)[self._row_of(partitions)]
        return np.asarray(batch / partitions.dp * (layers / partitions.pp) * each + step_floor_seconds(self._job))

    def timing_bound_seconds(self, degrees: DegreeArrays, *, any_experts: bool = False) -> NDArray[np.float64]:
        """Lower bound of a step with microbatch size and interleave known: T >= (m - 1/v) * slowest + all work / v.

        Four values bound the slowest of S stages from below: the mean of all work, the time of ceil(L / S) layers, the
        least time in which stages hold all layers of the main kinds beside the head and, where stages are interleaved,
        the leading layers on the first of them (`layers_of_slowest`), and the last stage's time for one layer in each
        chunk (but the last, which may hold the loss alone) and the head.
        any_experts: make the bound valid for every degree of experts.

        Gain (`timing`): 0.72 -> 0.54 s for GPT-3 on 1,024 devices, over 15 -> 1.53 for DeepSeek-V3 on 11,000.

        Source: derived here; tested to stay below the exact optimum.
        """
        mean, fastest, main, head = self.layer_and_head_seconds(degrees, any_experts=any_experts)
        layers = self._job.model.num_layers
        m, v = num_microbatches(self._job, degrees), degrees.interleave
        work = layers * mean + head
        slowest = np.maximum(work / degrees.pp, np.ceil(layers / degrees.pp) * fastest)
        floor = step_floor_seconds(self._job)
        if degrees.schedule in EXECUTED:  # the formula does not cover their bubble; the head may be on any stage
            return np.asarray(m * slowest + floor)
        leading = leading_layers(self._job) if degrees.schedule == "interleaved" else 0
        ends = (head / (1 + self._job.model.mtp_layers) / main, leading * fastest / main)
        whole = main * layers_of_slowest(num_main_layers(self._job), degrees.pp, ends)
        slowest = np.maximum(slowest, np.where(degrees.pp > 1, whole, 0.0))
        slowest = np.maximum(slowest, (v - (searched_ends(self._job) > 0) * (degrees.pp > 1)) * fastest + head)
        return np.asarray(step_seconds(m, v, slowest, work, floor))

    def layer_and_head_seconds(self, degrees: DegreeArrays, *, any_experts: bool = False) -> tuple[Number, ...]:
        """Least seconds of a microbatch in a mean layer, in one of the fastest kind, of the main kinds; in the head."""
        row, size = self._row_of(degrees), np.searchsorted(self._sizes, degrees.mbs)
        head = self._head[row, size]
        if any_experts:
            return (*(each.min(axis=2)[row, size] for each in self._of_layer), head)
        pair = np.searchsorted(self._pairs, degrees.ep * _PLACE + degrees.etp)
        return (*(each[row, size, pair] for each in self._of_layer), head)

    def layer_seconds_of_sequence(self, partitions: DegreeArrays) -> NDArray[np.float64]:
        """Seconds per sequence of a layer of the fastest kind, with the microbatch size that makes them least."""
        return np.asarray((self._of_layer[1].min(axis=2) / self._sizes).min(axis=1)[self._row_of(partitions)])

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
    """The distinct layer shapes of configurations, the shape of each configuration, and the prices of each shape."""

    degrees: DegreeArrays
    position: NDArray[np.int64]
    parts: StageParts

    def of_each(self, rows: Rows = slice(None)) -> StageParts:
        """The prices of the configurations at `rows`."""
        return spread(self.parts, self.position[rows])


class _Priced:
    """The layer shapes of a job that were priced so far; a block of configurations shares most of them with others."""

    def __init__(self, job: PoolJob) -> None:
        self.job = job
        self._rows: dict[tuple[int, ...], int] = {}  # of each shape
        self._parts: StageParts | None = None

    def parts(self, distinct: DegreeArrays) -> StageParts:
        """The prices of these shapes, each priced when it is first asked for."""
        shapes = list(zip(*(getattr(distinct, key).tolist() for key in LAYER_KEYS), strict=True))
        new = [position for position, shape in enumerate(shapes) if shape not in self._rows]
        if new or self._parts is None:
            known, more = len(self._rows), stage_parts(self.job, distinct.take(np.array(new, dtype=np.int64)))
            self._rows |= {shapes[position]: known + number for number, position in enumerate(new)}
            self._parts = by_part(partial(_joined, (known, len(new))), self._parts, more) if self._parts else more
        return spread(self._parts, np.array([self._rows[shape] for shape in shapes], dtype=np.int64))


def _joined(sizes: tuple[int, int], known: Number, more: Number) -> Number:
    """Prices of known and of further shapes in one array; a number that all shapes share stays a number."""
    if np.ndim(known) == np.ndim(more) == 0 and known == more:
        return known
    return np.concatenate([np.broadcast_to(each, (n,)) for each, n in zip((known, more), sizes, strict=True)])


_PRICED: dict[int, _Priced] = {}  # by the identity of the job, which the value keeps alive


def forget_shapes() -> None:
    """Forget the prices of earlier searches, so that a search depends on none of them, not even in its time."""
    _PRICED.clear()


def layer_shapes(job: PoolJob, degrees: DegreeArrays) -> LayerShapes:
    """The layer shapes of these configurations, each priced once in a search."""
    distinct, position = degrees.distinct(*LAYER_KEYS)
    return LayerShapes(distinct, position, _PRICED.setdefault(id(job), _Priced(job)).parts(distinct))


def most_layers(
    job: PoolJob, degrees: DegreeArrays, cutoff_seconds: Number, shapes: LayerShapes | None = None
) -> NDArray[np.int64]:
    """Upper bound of a stage's layers: the other stages need layers too, and the step must stay within the cutoff.

    Consecutive layers contain at least a known number of whole periods of the pattern; each chunk after the first may
    contain one period less.
    shapes: the layer shapes of the configurations, if already priced.

    Gain (`most-layers`, medians of 3): three pools 8.52 -> 3.51 s, Llama-3-405B on 16,384 0.84 -> 0.63; GPT-3 none.
    """
    v, layers = degrees.interleave, job.model.num_layers
    most = layers - np.maximum(v * (degrees.pp - 1) - searched_ends(job), 0)
    if np.any(np.isfinite(cutoff_seconds)):
        shapes = shapes or layer_shapes(job, degrees)
        distinct, position = shapes.degrees, shapes.position
        of_kinds = zip(
            kinds_main_first(job),
            _least_layer_seconds(job, shapes.parts, hides=hides_exchanges(job, degrees)),
            strict=True,
        )
        least = {kind[:2]: seconds for kind, seconds in of_kinds}
        left = cutoff_seconds - step_floor_seconds(job)
        if job.between is None and degrees.schedule not in EXECUTED:  # filling and draining include all work once
            work = sum(kind.number * least[kind[:2]] for kind in kinds_main_first(job)) + shapes.parts.head.total
            left = left - np.broadcast_to(work, (len(distinct),))[position] / v
        steady = np.maximum(steady_count(num_microbatches(job, degrees), v), 1e-9)
        slowest = np.maximum(left, 0.0) / steady * (1 + 1e-9)
        each = reduce(np.maximum, least.values())  # a stage saves the difference for each layer of another kind
        saved = sum(kind.number * (each - least[kind[:2]]) for kind in kinds_main_first(job))
        fastest = reduce(np.minimum, least.values())
        each, saved, fastest = (np.broadcast_to(x, (len(distinct),))[position] for x in (each, saved, fastest))
        most = np.minimum(most, np.floor(np.minimum(slowest / fastest, (slowest + saved) / each)))
        pattern = pattern_of(job)
        if pattern.period > 1:
            one = stage_of(job, index=INSIDE, num_layers=pattern.period, policy=0, first=pattern.leading)
            held = timed_kinds(job, distinct, one)  # also a kind that only multi-token prediction layers may have
            whole = sum_of(number * least[kind] for kind, number in held if kind in least)
            periods = np.floor(slowest / np.broadcast_to(whole, (len(distinct),))[position])
            most = np.minimum(most, pattern.leading + pattern.period * (periods + v) - v)
    return np.asarray(most, dtype=np.int64)
