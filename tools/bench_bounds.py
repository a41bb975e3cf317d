"""Measure the gain of each bound: CPU seconds of `search` with and without the bound (`bench_search.py --without`).

A bound is switched off by a replacement function that rules nothing out, in a separate process.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

import planner.search.best_first as the_search
from planner.answers.remedies import remedies
from planner.search.bounds import least_costs, of_layers, of_pools, of_steps
from planner.search.bounds.of_layers import most_layers
from planner.search.bounds.of_pools import PoolBounds
from planner.search.footprint import NothingFits
from planner.search.least_memory import least_peak
from planner.search.optimum import integer_program, pricing
from planner.search.search import search
from planner.search.space.arrays import AGREEMENT
from planner.search.space.constraints import Constraints
from planner.search.space.space import Space
from planner.specs.load import load_job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from planner.specs.job import Job

MEMORY = 12 * 2**30  # bytes of address space that a search may take

# name: model, cluster, GPUs, sequence length, global batch, engine
JOBS: dict[str, tuple[str, str, int, int, int, str]] = {
    "gpt3-1k": ("gpt3-175b", "dgx-a100", 1024, 2048, 1536, "torch"),
    "llama-16k": ("llama3-405b", "dgx-h100", 16384, 8192, 2048, "torch"),
    "deepseek-2k": ("deepseek-v3", "hgx-h800", 2048, 4096, 15360, "megatron"),
    "deepseek-11k": ("deepseek-v3", "gb200-nvl72", 11000, 4096, 15360, "megatron"),
    "llama-100k": ("llama3-405b", "dgx-h100", 100000, 8192, 10000, "torch"),
    "gpt3-100k": ("gpt3-175b", "dgx-a100", 100000, 2048, 100000, "torch"),
    "deepseek-100k": ("deepseek-v3", "gb200-nvl72", 100000, 4096, 15360, "megatron"),
    "three-pools": ("llama3-70b", "tools/three-pools.yaml", 0, 8192, 1024, "torch"),
    "nothing-fits": ("llama3-405b", "dgx-a100", 32, 8192, 64, "torch"),  # with its remedies
}


def _zeros(_: Any, degrees: Any, *__: Any, **___: Any) -> Any:
    return np.zeros(len(degrees))


def _all(_: Any, degrees: Any, *__: Any, **___: Any) -> Any:
    return np.ones(len(degrees), dtype=bool)


def _nothing(*_: Any) -> None:
    """The replacement for a step of the search whose only effect is a lower cutoff."""


def _before_memory(job: Any, degrees: Any, least: Any, *_: Any) -> Any:
    return of_steps._least_step(job, degrees, least, 0.0)  # noqa: SLF001 - a bound is switched off where it is


def _without_cutoff(job: Any, degrees: Any, *_: Any) -> Any:
    return most_layers(job, degrees, np.inf)


def _all_columns(candidates: Any, _: Any) -> Any:
    return [np.ones(each.num_columns, dtype=bool) for each in candidates]


def _all_numbers(candidates: Any, _: Any) -> Any:
    return {index: np.arange(each.num_columns) for index, each in enumerate(candidates) if each.num_columns}


def _no_layers(_: Any, num_stages: Any, __: Any) -> Any:
    return 0.0 * num_stages


# name: for each module that uses the bound, its name there and the replacement
BOUNDS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "partition": ((PoolBounds, "partition_bound_seconds", _zeros),),
    "timing": ((PoolBounds, "timing_bound_seconds", _zeros),),
    "any-policy": ((the_search, "least_seconds_of_any_policy", _zeros),),
    "any-replicas": ((PoolBounds, "sharded_bound_seconds", _zeros),),
    "replicas": ((the_search, "replicas_bound_seconds", _zeros),),
    "step": ((of_pools, "lower_bound_seconds", _zeros),),
    "memory-phase": ((of_steps, "_bound_by_memory", _before_memory),),
    "whole-layers": tuple((each, "layers_of_slowest", _no_layers) for each in (of_layers, of_steps)),
    "tail": ((least_costs, "_least_tail", _zeros),),
    "transfer": tuple((each, "least_transfer", _zeros) for each in (least_costs, of_steps)),
    "holds-in-time": ((of_steps, "_holds_in_time", _all), (of_pools, "_least_in_time", lambda *a: a[4][2])),
    "first-assignments": ((the_search._Search, "_try_even", _nothing),),  # noqa: SLF001
    "splits": ((the_search._Search, "_try_splits", _nothing),),  # noqa: SLF001
    "may-fit": ((the_search, "may_fit", _all),),
    "most-layers": ((pricing, "most_layers", _without_cutoff),),
    "prune": ((the_search, "prune", _all_columns),),
    "columns": ((integer_program, "columns_within", _all_numbers),),
}


def used_seconds() -> float:
    """CPU seconds of this process and of the processes that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def job_named(name: str) -> Job:
    """The job of a row of JOBS."""
    model, cluster, gpus, sequence, batch, engine = JOBS[name]
    return load_job(
        model=model,
        cluster=cluster,
        gpus=gpus or None,
        sequence_length=sequence,
        global_batch_size=batch,
        engine=engine,
    )


def _answer(name: str) -> tuple[float, ...]:
    """Step seconds of the optimum; if nothing fits, step seconds with each remedy, and the bytes of the least peak."""
    job = job_named(name)
    plan = search(job, Constraints())
    if isinstance(plan, NothingFits):
        least = least_peak(Space(job, Constraints()))
        return (least.num_bytes, *sorted(each.step_seconds for each in remedies(job, Constraints())))
    return (plan.step_seconds,)


def _run(name: str, without: str | None, limit: int, answer: Connection) -> None:
    """One search in this process, which ends after `limit` CPU seconds."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for place, attribute, replacement in BOUNDS[without] if without else ():
        assert hasattr(place, attribute), f"{place} has no {attribute}"
        setattr(place, attribute, replacement)
    start = used_seconds()
    found = _answer(name)
    answer.send((used_seconds() - start, found))


def measure(name: str, without: str | None, limit: int) -> tuple[float, tuple[float, ...] | None]:
    """CPU seconds of one search, including its solver, and the answer; None if the search did not end in time.

    Raises:
        RuntimeError: the search failed.
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_run, args=(name, without, limit, theirs))
    process.start()
    theirs.close()
    try:
        seconds, answer = ours.recv()
    except EOFError:
        seconds, answer = float("inf"), None
    process.join()
    if process.exitcode not in (0, -signal.SIGXCPU, -signal.SIGKILL):
        raise RuntimeError(f"{name} without {without} ended with exit code {process.exitcode}")
    return seconds, answer


def _figure(runs: Sequence[float], limit: int) -> str:
    median = statistics.median(runs)
    return f"> {limit}" if median == float("inf") else f"{median:.2f} ({min(runs):.2f}-{max(runs):.2f})"


def without_bound(bound: str, jobs: Sequence[str], *, limit: int, repeats: int) -> Table:
    """Alternate searches with and without a bound; a search that did not end within the limit is not repeated.

    Raises:
        AssertionError: the answers differ.
    """
    table = Table("job", "with", "without", title=f"CPU seconds of a search without {bound}, median (least-most)")
    for name in jobs:
        runs: dict[str | None, list[float]] = {None: [], bound: []}
        for _ in range(repeats):
            (seconds, first), (other, second) = (measure(name, each, limit) for each in (None, bound))
            runs[None].append(seconds)
            runs[bound].append(other)
            if first is None or second is None:
                break
            assert np.allclose(first, second, rtol=AGREEMENT), f"{name}: {first} with {bound}, {second} without"
        table.add_row(name, _figure(runs[None], limit), _figure(runs[bound], limit))
    return table
