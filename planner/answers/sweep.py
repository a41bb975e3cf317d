"""Find the best layouts of clusters of many sizes in one pass: the Pareto front of time, cost and devices."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, TypeAlias

from planner.answers.batch_choice import AS_GOOD, best_batch
from planner.cost.band import band, chance_of_budget, chance_of_deadline
from planner.cost.estimate import estimate
from planner.cost.goodput import kept_share
from planner.cost.run import REFERENCE_TOKENS, billed_devices, devices_in_use, whole_run
from planner.errors import InputError
from planner.layout import divisors
from planner.plan_parts import CONFIDENCE
from planner.search.best_first import best_first
from planner.search.objectives import Staircase
from planner.search.reporter import Reporter
from planner.search.search import fastest_layout
from planner.search.space.arrays import TIE
from planner.search.space.refusals import check_pins
from planner.search.space.space import Space
from planner.specs.job import each_pool, with_training

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.cost.run import WholeRun
    from planner.layout import Layout
    from planner.plan_parts import ObjectiveName
    from planner.search.found import Assigned
    from planner.search.space.constraints import Constraints
    from planner.specs.batch import BatchRange
    from planner.specs.cluster import ClusterSpec
    from planner.specs.job import Job, PoolJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A layout, and the smallest cluster on which this layout is the fastest; this cluster has `hosts` hosts.

    billed_devices: devices in use; each counts as its price divided by the price of the cheapest pool's device.
    pools: the hosts of each pool of a mixed cluster; their sum is `hosts`.
    band: the range of step times, as shares of the forecast; None if it is unknown.
    deadline_chance, budget_chance: chance that a run with the layout meets the requirement; None if there is none, or
    the chance is unknown.
    """

    hosts: int
    layout: Layout
    step_seconds: float
    peak_bytes: float
    billed_devices: float
    global_batch_size: int
    pools: tuple[int, ...] = ()
    band: tuple[float, float] | None = None
    chance_of_fitting: float | None = None
    deadline_chance: float | None = None
    budget_chance: float | None = None

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return self.layout.world_size

    @property
    def sequence_seconds(self) -> float:
        """Seconds of a step divided by its sequences, to compare different batches."""
        return self.step_seconds / self.global_batch_size

    @property
    def device_seconds(self) -> float:
        """Billed devices times seconds per sequence: the cost of a sequence in device seconds instead of money.

        Idle devices are not counted.
        """
        return self.billed_devices * self.sequence_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The fastest layout of each size of cluster, and the Pareto front.

    job: the user's job on one of the sizes.
    sizes: for each number of hosts (on a mixed cluster, for each combination of the pools' hosts) the fastest layout,
    as a search at that size finds it; None if no layout fits. If the batch is a range, each size has the batch with the
    least time per sequence.
    front: layouts that no other layout beats in time, cost and devices at once, fewest devices first. On a uniform
    cluster the front holds the fastest layout, the cheapest layout, and for any deadline the layout with the fewest
    devices. On a mixed cluster the front holds only the fastest layout of each size.
    confidence: required chance of meeting deadline and budget. Only layouts of the front are checked, so a slower
    layout with a smaller forecast error is never found.
    objective: what the user asked for.
    """

    job: Job
    sizes: tuple[tuple[int | tuple[int, ...], Point | None], ...]
    front: tuple[Point, ...]
    constraints: Constraints
    confidence: float = CONFIDENCE
    objective: ObjectiveName = "throughput"

    @property
    def fastest(self) -> Point | None:
        """The point with the least time per sequence; None if no layout fits."""
        return min(self.front, key=lambda point: (point.sequence_seconds, point.num_devices), default=None)

    @property
    def cheapest(self) -> Point | None:
        """The point of least cost; None where no layout fits."""
        return min(self.front, key=lambda point: (point.device_seconds, point.num_devices), default=None)

    def fewest_within(self, longest_sequence_seconds: float) -> Point | None:
        """The point with the fewest devices that takes at most `longest_sequence_seconds` per sequence, or None.

        Programs ask this: docs/python.md.
        """
        return next((point for point in self.front if point.sequence_seconds <= longest_sequence_seconds), None)

    def run(self, point: Point) -> WholeRun:
        """The token budget, or `REFERENCE_TOKENS`, with the layout of a point."""
        job, in_use = self.job, devices_in_use(self.job.cluster, point.layout)
        changes = {"global_batch_size": point.global_batch_size, "tokens": job.training.tokens or REFERENCE_TOKENS}
        training, share = job.training.model_copy(update=changes), kept_share(job, in_use)
        seconds, ends = point.step_seconds, point.band or ()
        found = whole_run(job.model, training, step_seconds=seconds, in_use=in_use, effective_share=share)
        assert found is not None, "the number of tokens is given"
        chances = {"deadline_chance": point.deadline_chance, "budget_chance": point.budget_chance}
        low, high = (*(seconds * end for end in ends), None, None)[:2]
        return found.judged((low, high), self.confidence, **chances)


def sweep_of(
    job: Job, constraints: Constraints, hosts: Sequence[int] | Mapping[str, Sequence[int]], *more: Any, **asked: Any
) -> Sweep:
    """`sweep` of a uniform cluster, or `sweep_pools` of a mixed one, whose hosts are named by pool.

    Raises:
        InputError: as these functions, or a size without hosts.
    """
    if any(min(each) < 1 for each in (hosts.values() if isinstance(hosts, Mapping) else [hosts])):
        raise InputError("a cluster has at least one host", where="--nodes")
    if isinstance(hosts, Mapping):
        return sweep_pools(job, constraints, hosts, *more, **asked)
    (pool,) = job.pools
    return sweep(pool, constraints, hosts, *more, **asked)


def sweep(
    job: PoolJob,
    constraints: Constraints,
    hosts: Sequence[int],
    reporter: Reporter | None = None,
    **asked: Any,
) -> Sweep:
    """The fastest layout for every number of hosts, and the front of all these layouts.

    Each layout is priced once for all cluster sizes at which its price is the same. The price changes only with the
    innermost network level that spans the whole cluster. The dynamic program finds the optima.
    asked: `confidence` and `objective` of the sweep.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    sized = [(count, _with_hosts(job, count)) for count in sorted(set(hosts))]
    num_first = sized[0][1].cluster.num_devices

    def of_batch(size: int, rivals: Sequence[Point]) -> _Found:
        sizes: _Sizes = []
        points: list[Point] = []
        for _, alike in groupby(sized, key=lambda each: _geometry(each[1].cluster)):
            group = list(alike)
            batched = with_training(group[-1][1], global_batch_size=size)
            of_group = [rival for rival in rivals if group[0][0] <= rival.hosts <= group[-1][0]]
            steps = _staircase(batched, constraints, num_first, of_group, reporter or Reporter())
            stairs = [replace(point, hosts=max(point.hosts, group[0][0])) for point in steps]
            points += stairs
            worlds = [max(point.num_devices, num_first) for point in stairs]
            for count, sized_job in group:
                fitting = bisect.bisect_right(worlds, sized_job.cluster.num_devices)
                sizes.append((count, stairs[fitting - 1] if fitting else None))
        return sizes, points

    sizes, points = _of_batches(job, constraints, of_batch)
    return Sweep(job=job, sizes=tuple(sizes), front=_best_in_something(points), constraints=constraints, **asked)


def sweep_pools(
    job: Job,
    constraints: Constraints,
    hosts: Mapping[str, Sequence[int]],
    reporter: Reporter | None = None,
    **asked: Any,
) -> Sweep:
    """The fastest layout for every combination of hosts of the named pools; other pools keep their hosts.

    Each size is a separate search, because a layout that fits on one mixture may not fit on another. The dynamic
    program finds the optima.
    asked: `confidence` and `objective` of the sweep.

    Raises:
        InputError: no size has a legal layout under the constraints.
    """
    own = [hosts.get(pool.cluster.name, (pool.cluster.hosts,)) for pool in job.pools]

    def of_batch(size: int, _: Sequence[Point]) -> _Found:
        sizes: _Sizes = []
        refused: InputError | None = None
        for counts in product(*own):
            try:
                sizes.append((counts, _point_of_pools(job, constraints, counts, size, reporter)))
            except InputError as error:
                refused = error
                sizes.append((counts, None))
        points = [point for _, point in sizes if point]
        if refused and not points:
            raise refused
        return sizes, points

    sizes, points = _of_batches(job, constraints, of_batch)
    return Sweep(job=job, sizes=tuple(sizes), front=_best_in_something(points), constraints=constraints, **asked)


_Sizes: TypeAlias = "list[tuple[int | tuple[int, ...], Point | None]]"
_Found: TypeAlias = "tuple[_Sizes, list[Point]]"


def _of_batches(job: Job, constraints: Constraints, of_batch: Callable[[int, Sequence[Point]], _Found]) -> _Found:
    """The points of one batch size.

    For a range of batch sizes, the result has the best point for each size of cluster and number of devices.

    of_batch: finds the points of a batch size. The function may leave out points that are slower than the points of
    other batch sizes by more than `AS_GOOD`. Batch sizes with many divisors come first, because they are hard to beat.
    """
    check_pins(Space(job, constraints))
    if job.batch is None:
        return of_batch(job.training.global_batch_size, ())
    found: list[_Found] = []
    refused: InputError | None = None
    for size in sorted(job.batch.sizes(), key=lambda size: (-len(divisors(size)), size)):
        try:
            found.append(of_batch(size, [point for _, points in found for point in points]))
        except InputError as error:  # no legal layout with this batch
            refused = error
    if refused and not found:
        raise refused
    sizes: _Sizes = []
    for of_size in zip(*(sizes for sizes, _ in found), strict=True):
        sizes.append((of_size[0][0], _of_best_batch(job.batch, [point for _, point in of_size if point])))
    points = sorted((point for _, points in found for point in points), key=_place)
    by_place = (_of_best_batch(job.batch, list(alike)) for _, alike in groupby(points, key=_place))
    return sizes, [point for point in by_place if point]


def _place(point: Point) -> tuple[int, tuple[int, ...]]:
    return point.num_devices, point.pools


def _of_best_batch(batch: BatchRange, points: Sequence[Point]) -> Point | None:
    """The point of the batch that `choose_batch` would choose."""
    fastest: dict[int, Point] = {}
    for point in sorted(points, key=lambda each: (each.sequence_seconds, each.hosts)):
        fastest.setdefault(point.global_batch_size, point)
    if not fastest:
        return None
    return fastest[best_batch({size: (each.sequence_seconds, 0.0) for size, each in fastest.items()}, batch)]


def _point_of_pools(
    job: Job, constraints: Constraints, counts: tuple[int, ...], size: int, reporter: Reporter | None
) -> Point | None:
    of_pool = dict(zip((pool.cluster.name for pool in job.pools), counts, strict=True))
    sized = each_pool(job, lambda pool: _with_hosts(pool, of_pool[pool.cluster.name]))
    sized = with_training(sized, global_batch_size=size)
    found = fastest_layout(sized, constraints, reporter)
    return found and replace(_point(sized, found[0]), hosts=sum(counts), pools=counts)


def _best_in_something(points: Sequence[Point]) -> tuple[Point, ...]:
    """Points that no other point beats in devices, cost and seconds at once.

    Of equal points, the one with the fewest hosts is kept.
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.num_devices, p.device_seconds, p.sequence_seconds, p.hosts)):
        worse = (
            each.sequence_seconds <= point.sequence_seconds * (1 + TIE)
            and each.device_seconds <= point.device_seconds * (1 + TIE)
            for each in front
        )
        if not any(worse):
            front.append(point)
    return tuple(front)


def _with_hosts(job: PoolJob, hosts: int) -> PoolJob:
    return replace(job, cluster=job.cluster.model_copy(update={"hosts": hosts}))


def _geometry(cluster: ClusterSpec) -> tuple[int, ...]:
    """The numbers that prices and rules read from the cluster's size; they determine the price of a layout."""
    spans = [link.num_devices or math.inf for link in cluster.links]
    return (cluster.scale_up_devices, *(int(span >= cluster.num_devices) for span in spans))


def _staircase(
    job: Job, constraints: Constraints, num_first: int, rivals: Sequence[Point], reporter: Reporter
) -> list[Point]:
    """Layouts that are faster than every layout on no more devices, fewest devices first.

    Layouts with up to `num_first` devices are treated as equal in devices, because they compete on the smallest
    cluster.
    rivals: points of other batch sizes. Layouts that are slower for each sequence by more than `AS_GOOD` are not
    searched.
    """
    best = Staircase(num_first)
    for rival in rivals:
        longest = rival.sequence_seconds * job.training.global_batch_size * (1 + AS_GOOD) * (1 + TIE)
        best.add(rival.layout, rival.num_devices, longest)
    found = best_first(Space(job, constraints), best, reporter, has_incumbent=bool(rivals))

    def order(assigned: Assigned) -> tuple[int, float]:
        return max(assigned.degrees.world_size, num_first), assigned.seconds

    steps: list[Assigned] = []
    for assigned in sorted(found.layouts, key=order):
        if not steps or assigned.seconds < steps[-1].seconds * (1 - TIE):
            steps.append(assigned)
    return [_point(job, found.layout_of(assigned)) for assigned in steps]


def _point(job: Job, layout: Layout) -> Point:
    """The point of a layout on the smallest number of hosts with enough devices."""
    priced, in_use, spread = estimate(job, layout), devices_in_use(job.cluster, layout), band(job, layout)
    return Point(
        hosts=sum(-(-count // cluster.devices_per_host) for cluster, count in in_use),
        layout=layout,
        step_seconds=priced.step_seconds,
        peak_bytes=priced.peak_bytes,
        billed_devices=billed_devices(job.cluster, job.training, layout),
        global_batch_size=job.training.global_batch_size,
        band=(spread.low, spread.high) if spread else None,
        chance_of_fitting=min(stage.chance_of_fitting for stage in priced.memory),
        deadline_chance=chance_of_deadline(job, layout, priced.step_seconds),
        budget_chance=chance_of_budget(job, layout, priced.step_seconds),
    )
