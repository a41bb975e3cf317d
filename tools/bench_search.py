"""Measure the time of the search by devices and by layers, and the time of each solving method alone.

`python tools/bench_search.py --without NAME` measures the gain of a bound; `--list` prints the names of the bounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from bench_bounds import BOUNDS, JOBS, used_seconds, without_bound
from rich.console import Console
from rich.table import Table

from planner.search.best_first import best_first
from planner.search.decision import contenders
from planner.search.objectives import THROUGHPUT, BestKinds
from planner.search.optimum.dynamic_program import best_choice
from planner.search.optimum.integer_program import solve_program
from planner.search.optimum.pruning import incumbent, lower_bounds
from planner.search.reporter import Reporter
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.search.space.space import Space
from planner.specs.load import load_job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.search.optimum.candidate import Candidate

REPEATS = 3
WIDTH = 50  # characters of the longest bar
DEVICES = (64, 256, 1024, 4096, 16384, 65536, 262144)
LAYERS = (12, 24, 48, 96, 192, 384)
WITHIN = 0.001  # above the incumbent: the upper bound that the search gives the integer program

# model, cluster, GPUs, sequence length, global batch
SOLVED: tuple[tuple[str, str, int, int, int], ...] = (
    ("megatron-22b", "dgx-a100", 8, 2048, 4),
    ("gpt3-175b", "dgx-a100", 1024, 2048, 1536),
    ("megatron-1t", "dgx-a100", 3072, 2048, 3072),
    ("llama3-405b", "dgx-h100", 16384, 8192, 2048),
    ("deepseek-v3", "dgx-h100", 2048, 4096, 15360),
)


def _seconds(num_devices: int, num_layers: int) -> float:
    """CPU seconds of one search for GPT-3 with 12 sequences per 8 devices, without the solver's process (0.02 s)."""
    job = load_job(
        model="gpt3-175b",
        cluster="dgx-a100",
        engine="torch",
        gpus=num_devices,
        sequence_length=2048,
        global_batch_size=max(96, num_devices * 3 // 2),
        settings=(f"model.num_layers={num_layers}",),
    )
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        search(job, Constraints())
        times.append(time.process_time() - start)
    return statistics.median(times)


def _bars(title: str, seconds: dict[int, float]) -> list[str]:
    longest = max(seconds.values())
    lines = [f"{size:>9,}  {value:5.2f}  {'#' * round(WIDTH * value / longest)}" for size, value in seconds.items()]
    return [title, *lines]


def growth() -> str:
    """Two plots: by devices for 96 layers, and by layers for 1,024 devices."""
    by_devices = {count: _seconds(count, 96) for count in DEVICES}
    by_layers = {count: _seconds(1024, count) for count in LAYERS}
    lines = _bars("  devices  CPU s, 96 layers of GPT-3", by_devices)
    return "\n".join([*lines, "", *_bars("   layers  CPU s, 1,024 devices", by_layers)])


def _cpu_seconds(work: Callable[[], float]) -> tuple[float, float]:
    """Median CPU seconds of the work, child processes included, and its result."""
    times, answer = [], np.nan
    for _ in range(REPEATS):
        before = used_seconds()
        answer = work()
        times.append(used_seconds() - before)
    return statistics.median(times), answer


def _by_program(candidates: Sequence[Candidate], solver: str, within: float) -> float:
    known = incumbent(candidates, lower_bounds(candidates).candidate) if np.isfinite(within) else None
    limit = known.objective_seconds * (1 + within) if known else None
    return solve_program(candidates, upper_bound=limit, solver=solver).bound_seconds  # type: ignore[arg-type]


def _by_dynamic_program(candidates: Sequence[Candidate]) -> float:
    least = np.inf
    for each in sorted(candidates, key=lambda each: lower_bounds([each]).candidate[0]):
        choice = best_choice(each, cutoff=least)
        least = choice.objective_seconds if choice else least
    return least


def solvers() -> Table:
    """Solve the candidates left by the search with each method alone; all methods must find the same step time.

    Raises:
        AssertionError: two methods disagree.
    """
    table = Table("job", "candidates", "columns", title="one solve of what the search leaves, CPU seconds")
    ways: dict[str, Callable[[Sequence[Candidate]], float]] = {
        "dynamic program": _by_dynamic_program,
        "CBC, bound + 0.1 %": partial(_by_program, solver="cbc", within=WITHIN),
        "CBC alone": partial(_by_program, solver="cbc", within=np.inf),
        "HiGHS alone": partial(_by_program, solver="highs", within=np.inf),
    }
    for name in ways:
        table.add_column(name)
    for model, cluster, gpus, sequence, batch in SOLVED:
        job = load_job(
            model=model,
            cluster=cluster,
            engine="megatron",
            gpus=gpus,
            sequence_length=sequence,
            global_batch_size=batch,
        )
        near = best_first(Space(job, Constraints()), BestKinds(THROUGHPUT, 4), Reporter()).near
        candidates = [each.candidate for group in contenders(near, THROUGHPUT) for each in group]
        found = {name: _cpu_seconds(partial(way, candidates)) for name, way in ways.items()}
        steps = [step for _, step in found.values()]
        assert np.allclose(steps, steps[0], rtol=1e-6), f"{model}: {steps}"
        columns = sum(each.num_columns for each in candidates)
        times = (f"{seconds:.2f}" for seconds, _ in found.values())
        table.add_row(f"{model}, {gpus:,} devices", str(len(candidates)), f"{columns:,}", *times)
    return table


def main() -> None:
    """Print the gain of a bound or, without arguments, the tables of this module."""
    parser = argparse.ArgumentParser(description="What the search takes, and what each of its bounds buys.")
    parser.add_argument("--list", action="store_true", help="name the bounds and the jobs")
    parser.add_argument("--without", action="append", choices=[*BOUNDS, "each"], metavar="NAME", default=[])
    parser.add_argument("--job", action="append", choices=list(JOBS), metavar="NAME", default=[])
    parser.add_argument("--limit", type=int, default=30, help="CPU seconds of one search")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    console = Console(width=110)
    if options.list:
        console.print("bounds:", ", ".join(BOUNDS))
        console.print("jobs:", ", ".join(JOBS))
        return
    for bound in list(BOUNDS) if "each" in options.without else options.without:
        console.print(without_bound(bound, options.job or list(JOBS), limit=options.limit, repeats=options.repeats))
    if not options.without:
        console.print(solvers())
        console.print(growth())


if __name__ == "__main__":
    main()
