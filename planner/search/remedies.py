"""What would make a job fit that does not: single changes, each one verified by solving."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.errors import InputError
from planner.search.least_memory import LeastPeak, least_peak
from planner.search.reporter import Reporter
from planner.search.search import fastest_layout, fits
from planner.search.space.configurations import offloads_of
from planner.specs.job import each_pool, with_training

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.layout import Layout
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change that makes the job fit, verified by solving; with the fastest layout after it."""

    change: str
    layout: Layout
    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftedPin:
    """What one pin or forbidden combination costs: what is possible without it.

    remedy: the fastest layout without it, where one fits; else least: what the fullest stage needs at least without it,
    None where no legal layout is left.
    """

    constraint: str
    remedy: Remedy | None
    least: LeastPeak | None


def remedies(job: Job, constraints: Constraints, reporter: Reporter | None = None) -> tuple[Remedy, ...]:
    """Changes that make the job fit, the smallest one of each kind that does, most tokens per device second first."""
    reporter = reporter or Reporter()
    kinds = (
        *(_more_hosts(job, number, constraints) for number in range(len(job.pools))),
        _shorter_sequences(job),
        _less_headroom(job),
        _other_recipes(job),
        _other_optimizers(job),
        _wider_tensor_parallelism(job),
        _offload(job, constraints),
    )
    found = []
    for changes in kinds:
        for change, changed in changes:
            remedy = _solved(change, changed, constraints, reporter)
            if remedy is not None:
                found.append(remedy)
                break  # the smallest change of its kind
    return tuple(sorted(found, key=lambda each: -each.tokens_per_second / each.layout.world_size))


def lifted_pins(job: Job, constraints: Constraints, reporter: Reporter | None = None) -> tuple[LiftedPin, ...]:
    """What each pin and each forbidden combination costs."""
    reporter = reporter or Reporter()
    without = [(str(pin), constraints.without(pin)) for pin in constraints.pins]
    for index, combination in enumerate(constraints.forbidden):
        left = (*constraints.forbidden[:index], *constraints.forbidden[index + 1 :])
        without.append((f"forbidden {','.join(map(str, combination))}", replace(constraints, forbidden=left)))
    found = []
    for constraint, looser in without:
        remedy = _solved(f"without {constraint}", job, looser, reporter)
        least = None if remedy else _least_peak(job, looser)
        found.append(LiftedPin(constraint=constraint, remedy=remedy, least=least))
    return tuple(found)


def _solved(change: str, job: Job, constraints: Constraints, reporter: Reporter) -> Remedy | None:
    try:
        best = fastest_layout(job, constraints, reporter)
    except InputError:  # no legal layout after this change
        return None
    if best is None:
        return None
    layout, seconds = best
    tokens = job.training.global_batch_size * job.training.sequence_length
    return Remedy(change=change, layout=layout, step_seconds=seconds, tokens_per_second=tokens / seconds)


def _least_peak(job: Job, constraints: Constraints) -> LeastPeak | None:
    try:
        return least_peak(job, constraints)
    except InputError:
        return None


_MOST_TIMES_HOSTS = 256


def _more_hosts(job: Job, number: int, constraints: Constraints) -> Iterator[tuple[str, Job]]:
    """The smallest number of hosts of a pool on which a layout fits: doubled until one does, then halved in between."""
    cluster = job.pools[number].cluster
    few = many = cluster.hosts
    if cluster.links[-1].num_devices is not None:
        return  # the network ends here
    while not _fits(_on_hosts(job, number, many), constraints):
        few, many = many, 2 * many
        if many > _MOST_TIMES_HOSTS * cluster.hosts:
            return
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _fits(_on_hosts(job, number, middle), constraints) else (middle, many)
    of_pool = "" if len(job.pools) == 1 else f" of {cluster.name}"
    yield f"{many:,} hosts{of_pool} instead of {cluster.hosts:,}", _on_hosts(job, number, many)


def _fits(job: Job, constraints: Constraints) -> bool:
    try:
        return fits(job, constraints)
    except InputError:  # no legal layout on so many hosts
        return False


def _on_hosts(job: Job, number: int, hosts: int) -> Job:
    chosen = job.pools[number]
    larger = replace(chosen, cluster=chosen.cluster.model_copy(update={"hosts": hosts}))
    return each_pool(job, lambda pool: larger if pool is chosen else pool)


def _shorter_sequences(job: Job) -> Iterator[tuple[str, Job]]:
    """Half as long with twice as many in a batch, and so on: each step sees as many tokens."""
    length, batch = job.training.sequence_length, job.training.global_batch_size
    for factor in (2, 4, 8, 16, 32):
        if length % factor == 0:
            words = f"{batch * factor:,} sequences of {length // factor:,} tokens"
            yield words, with_training(job, sequence_length=length // factor, global_batch_size=batch * factor)


def _less_headroom(job: Job) -> Iterator[tuple[str, Job]]:
    if job.headroom:
        yield "no headroom", each_pool(job, lambda pool: replace(pool, headroom=0.0))


def _other_recipes(job: Job) -> Iterator[tuple[str, Job]]:
    """Other memory recipes of the engine, those that keep most first."""
    if job.training.precision == "fp32":
        return
    others = [each for each in job.engine.can.memory_recipes if each not in (job.training.memory_recipe, "engine")]
    changed = [(f"memory_recipe {each}", with_training(job, memory_recipe=each)) for each in others]
    yield from sorted(changed, key=lambda each: -_state_bytes(each[1]))


def _other_optimizers(job: Job) -> Iterator[tuple[str, Job]]:
    """Other optimizers of the engine, in its own order, with the engine's own recipe."""
    for each in job.engine.can.optimizers:
        if each != job.training.optimizer:
            yield f"optimizer {each}", with_training(job, optimizer=each, memory_recipe="engine")


def _state_bytes(job: Job) -> float:
    states = job.pools[0].state_bytes  # as the engine keeps them, whatever the pool
    return states.weights + states.grads + states.grad_copy + states.master + 2 * states.moment


def _offload(job: Job, constraints: Constraints) -> Iterator[tuple[str, Job]]:
    if offloads_of(job, constraints) == ("none",) and not constraints.mentions("offload"):
        yield "--allow-offload", each_pool(job, lambda pool: replace(pool, allow_offload=True))


def _wider_tensor_parallelism(job: Job) -> Iterator[tuple[str, Job]]:
    if not job.allow_tp_across_nodes:
        yield "--allow-tp-across-nodes", each_pool(job, lambda pool: replace(pool, allow_tp_across_nodes=True))
