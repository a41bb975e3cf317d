"""Find changes, and pairs of changes, that make a job fit or meet its requirements; a search verifies each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.answers.changes import Change, change_of_training, kinds_of_training
from planner.answers.deadline import excess, fastest_in_time, is_kept
from planner.cost.estimate import memory_of_stages
from planner.errors import InputError
from planner.search.least_memory import LeastPeak, least_peak
from planner.search.objectives import LIMITS
from planner.search.reporter import Reporter
from planner.search.search import fastest_layout, fits
from planner.search.space.space import Space
from planner.specs.job import each_pool, with_training
from planner.units import format_seconds, format_usd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from planner.cost.run import Requirement
    from planner.layout import Layout
    from planner.plan_parts import ObjectiveName
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One or two changes that reach the goal, verified by a search, with the best layout after them."""

    change: str
    layout: Layout
    step_seconds: float
    tokens_per_second: float
    chance_of_fitting: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftedPin:
    """The cost of one pin or forbidden combination: the result of a search without it.

    remedy: the fastest layout without the pin, if one fits.
    least: otherwise the least memory need of the fullest stage without the pin; None if no layout is legal.
    """

    constraint: str
    remedy: Remedy | None
    least: LeastPeak | None


class InTime(NamedTuple):
    """The objective whose limits are to be met, and the required chance of meeting them."""

    objective: ObjectiveName
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Goal:
    """What a change has to reach: a layout that fits under the constraints, and that keeps the limits of `in_time`.

    planned: adds the limits of a job's programs to the constraints, or raises InputError if no program can run the job.
    """

    constraints: Constraints
    reporter: Reporter
    in_time: InTime | None = None
    planned: Callable[[Job, Constraints], Constraints] = lambda _, constraints: constraints

    def best(self, job: Job) -> tuple[Layout, float] | None:
        """The best layout that reaches the goal, and its step seconds; None if no layout does."""
        try:
            constraints = self.planned(job, self.constraints)
            if self.in_time is None:
                return fastest_layout(job, constraints, self.reporter)
            found = fastest_in_time(job, constraints, *self.in_time, reporter=self.reporter)
        except InputError:  # no legal layout after this change
            return None
        is_good = found and self.in_time and is_kept(job, *found, *self.in_time)
        return found if is_good else None

    def is_reached(self, job: Job) -> bool:
        """Whether any layout reaches the goal."""
        try:
            is_fitting = fits(Space(job, self.planned(job, self.constraints)))
            return is_fitting and (self.in_time is None or self.best(job) is not None)
        except InputError:  # no legal layout on this number of hosts
            return False


def remedies(job: Job, constraints: Constraints, reporter: Reporter | None = None, **more: Any) -> tuple[Remedy, ...]:
    """The smallest change of each kind that makes the job fit, sorted by tokens per device second, most first.

    If only more hosts make the job fit, pairs follow: for each two kinds of changes, the smallest pair that fits.
    more: `in_time` and `planned` of the goal (`_Goal`).
    """
    goal = _Goal(constraints=constraints, reporter=reporter or Reporter(), **more)
    hosts = [_more_hosts(job, number, goal) for number in range(len(job.pools))]
    kinds = [tuple(changes) for changes in _kinds(job, goal)]
    found = [remedy for changes in hosts if (remedy := _first_solved(changes, goal))]
    changed = [((each.words, other) for each in changes if (other := each.of(job))) for changes in kinds]
    single = [remedy for changes in changed if (remedy := _first_solved(changes, goal))]
    if not single:
        single = [
            remedy
            for one, other in combinations(kinds, 2)
            if (pair := _smallest_pair(job, one, other, goal)) and (remedy := _solved(*pair, goal))
        ]
    return tuple(sorted((*found, *single), key=lambda each: -each.tokens_per_second / each.layout.world_size))


def _kinds(job: Job, goal: _Goal) -> Iterator[Iterator[Change]]:
    """The changes of each kind, from the smallest to the largest."""
    yield from _later_or_less(job, goal)
    yield _shorter_sequences(job)
    yield _of_pools("headroom", "no headroom", job.headroom, headroom=0.0)
    yield from kinds_of_training(job)
    yield _of_pools("tp", "--allow-tp-across-nodes", not job.allow_tp_across_nodes, allow_tp_across_nodes=True)
    is_fixed = Space(job, goal.constraints).offloads != ("none",) or goal.constraints.mentions("offload")
    yield _of_pools("offload", "--allow-offload", not is_fixed, allow_offload=True)


def _first_solved(changes: Iterable[tuple[str, Job]], goal: _Goal) -> Remedy | None:
    """The smallest change of a kind that reaches the goal."""
    return next((found for each in changes if (found := _solved(*each, goal))), None)


def _smallest_pair(job: Job, one: Sequence[Change], other: Sequence[Change], goal: _Goal) -> tuple[str, Job] | None:
    """The first pair of changes, one from each sequence, that reaches the goal; None if no pair does.

    Pairs are tried in the order of the sum of their positions in the two sequences.
    """
    places = sorted(product(range(len(one)), range(len(other))), key=lambda place: (sum(place), place))
    first = [each.of(job) for each in one]
    pairs = [(f"{one[i].words} and {other[k].words}", (a := first[i]) and other[k].of(a)) for i, k in places]
    if not pairs or pairs[-1][1] is None or not goal.is_reached(pairs[-1][1]):
        return None
    return next((words, changed) for words, changed in pairs if changed and goal.is_reached(changed))


def each_lifted(constraints: Constraints) -> Iterator[tuple[str, Constraints]]:
    """Each pin and each forbidden combination, in words, with the constraints that remain without it."""
    for pin in constraints.pins:
        yield str(pin), constraints.without(pin)
    for combination in constraints.forbidden:
        yield f"forbidden {','.join(map(str, combination))}", constraints.without(combination)


def lifted_pins(
    job: Job, lifted: Iterable[tuple[str, Constraints]], reporter: Reporter | None = None, **more: Any
) -> tuple[LiftedPin, ...]:
    """The cost of each pin and of each forbidden combination, by a search without it."""
    found = []
    for constraint, looser in lifted:
        goal = _Goal(constraints=looser, reporter=reporter or Reporter(), **more)
        remedy = _solved(f"without {constraint}", job, goal)
        least = None if remedy else _least_peak(job, goal)
        found.append(LiftedPin(constraint=constraint, remedy=remedy, least=least))
    return tuple(found)


def _solved(change: str, job: Job, goal: _Goal) -> Remedy | None:
    best = goal.best(job)
    if best is None:
        return None
    layout, seconds = best
    return Remedy(
        change=change,
        layout=layout,
        step_seconds=seconds,
        tokens_per_second=job.training.step_tokens / seconds,
        chance_of_fitting=min(stage.chance_of_fitting for stage in memory_of_stages(job, layout)),
    )


def _least_peak(job: Job, goal: _Goal) -> LeastPeak | None:
    try:
        return least_peak(Space(job, goal.planned(job, goal.constraints)))
    except InputError:
        return None


_MOST_TIMES_HOSTS = 256


def _more_hosts(job: Job, number: int, goal: _Goal) -> Iterator[tuple[str, Job]]:
    """The smallest number of hosts of a pool that reaches the goal, found by doubling and then by bisection."""
    cluster = job.pools[number].cluster
    few = many = cluster.hosts
    if cluster.links[-1].num_devices is not None:
        return  # the network ends here
    while not goal.is_reached(_on_hosts(job, number, many)):
        few, many = many, 2 * many
        if many > _MOST_TIMES_HOSTS * cluster.hosts:
            return
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if goal.is_reached(_on_hosts(job, number, middle)) else (middle, many)
    of_pool = "" if len(job.pools) == 1 else f" of {cluster.name}"
    yield f"{many:,} hosts{of_pool} instead of {cluster.hosts:,}", _on_hosts(job, number, many)


def _on_hosts(job: Job, number: int, hosts: int) -> Job:
    chosen = job.pools[number]
    larger = replace(chosen, cluster=chosen.cluster.model_copy(update={"hosts": hosts}))
    return each_pool(job, lambda pool: larger if pool is chosen else pool)


def _later_or_less(job: Job, goal: _Goal) -> Iterator[Iterator[Change]]:
    """A later deadline, a larger budget, and fewer tokens, with which the fastest or cheapest layout meets them."""
    training, asked = job.training, goal.in_time
    if asked is None or not training.tokens:
        return
    free = with_training(job, deadline=None, budget=None)
    ways: tuple[tuple[Requirement, ObjectiveName, Callable[[float], str]], ...] = (
        ("deadline", "throughput", format_seconds),
        ("budget", "cost", format_usd),
    )
    most = 1.0
    for limit, name, written in ways:
        given = getattr(training, limit)
        if limit not in LIMITS[asked.objective] or given is None:
            continue
        least = replace(goal, in_time=InTime(name, asked.confidence))
        best = least.best(with_training(job, **{limit: None})) or least.best(free)
        times = excess(with_training(free, **{limit: given}), *best, *asked) if best else 1.0
        if times > 1.0:
            more = 1.01 * times  # three digits are shown, so that one may be rounded
            value = written(given * more).replace(",", "")  # as documents read it
            yield iter([change_of_training(f"{limit} {value}", **{limit: value})])
            most = max(most, more)
    tokens = f"{training.tokens / most:.3g}"
    yield iter([change_of_training(f"tokens {tokens}", tokens=tokens)] if most > 1 else [])


def _shorter_sequences(job: Job) -> Iterator[Change]:
    """Sequences of half the length and twice the number, and so on; the tokens of a step stay the same."""
    length, batch = job.training.sequence_length, job.training.global_batch_size
    for factor in (2, 4, 8, 16, 32):
        if length % factor == 0:
            words = f"{batch * factor:,} sequences of {length // factor:,} tokens"
            yield change_of_training(words, sequence_length=length // factor, global_batch_size=batch * factor)


def _of_pools(kind: str, words: str, is_open: object, **changes: Any) -> Iterator[Change]:
    """A change of these fields of each pool's job, if it is open."""
    if is_open:
        yield Change(kind, words, lambda job: each_pool(job, lambda pool: replace(pool, **changes)))
