"""Compare a search with the same search that knows good layouts from the start (`make bench`).

`python tools/bench_seeded.py [JOB ...]` searches each job with three runners-up, and again with the minimum and the
runners-up of this answer as known layouts. The ratio of their CPU seconds is what a search spends because it does not
know a good layout. On pools, the yardstick knows the minimum alone and looks for no runners-up. Both answers must be
equal.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from bench_bounds import JOBS, job_named, used_seconds
from rich.console import Console
from rich.table import Table

import planner.search.search as the_search
from planner.cost.estimate import estimate
from planner.plan_parts import WITHIN
from planner.search.best_first import best_first
from planner.search.footprint import NothingFits
from planner.search.objectives import BestKinds
from planner.search.space.arrays import AGREEMENT
from planner.search.space.constraints import Constraints

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.layout import Layout
    from planner.plan import Plan
    from planner.specs.job import Job

MOST = {
    "gpt3-1k": 1.5,
    "deepseek-2k": 1.5,
    "deepseek-11k": 1.5,
    "llama-100k": 1.2,
    "three-pools": 2.0,
}
REPEATS = 5


@contextmanager
def knowing(job: Job, layouts: Sequence[Layout]) -> Iterator[None]:
    """Searches of this job know these layouts from the start."""

    class Seeded(BestKinds):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            for each in layouts:
                seconds = float(estimate(job, each).step_seconds) * (1 + AGREEMENT)
                self.add(each, self.objective.devices_of(job, each), seconds)

    with (
        mock.patch.object(the_search, "BestKinds", Seeded),
        mock.patch.object(the_search, "best_first", partial(best_first, has_incumbent=True)),
    ):
        yield


def _timed(job: Job, top: int) -> tuple[float, Plan]:
    gc.collect()
    before = used_seconds()
    found = the_search.search(job, Constraints(), top=top, within=WITHIN)
    after = used_seconds()
    assert not isinstance(found, NothingFits)
    return after - before, found


def ratio(name: str, repeats: int = REPEATS) -> tuple[float, float, float]:
    """Median CPU seconds of the search and of its yardstick, and the median of their ratios.

    Raises:
        AssertionError: the two answers differ.
    """
    job = job_named(name)
    _, plan = _timed(job, 3)
    assert plan.minimum is not None
    pooled = len(job.pools) > 1
    known = [plan.minimum.layout] if pooled else [plan.minimum.layout, *(each.layout for each in plan.runners_up)]
    pairs = []
    for _ in range(repeats):
        own, found = _timed(job, 3)
        with knowing(job, known):
            other, seeded = _timed(job, 0 if pooled else 3)
        assert (found.layout, found.minimum) == (seeded.layout, seeded.minimum), name
        assert pooled or found.runners_up == seeded.runners_up, name
        pairs.append((own, other))
    own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return own, other, statistics.median(one / two for one, two in pairs)


def seeded(names: Sequence[str] = tuple(MOST), repeats: int = REPEATS) -> Table:
    """A row for each job."""
    title = f"searches, and the same with known layouts: CPU seconds, medians of {repeats} in turn"
    table = Table("job", "search", "with known layouts", "ratio", "at most", title=title)
    for name in names:
        own, other, times = ratio(name, repeats)
        table.add_row(name, f"{own:.2f}", f"{other:.2f}", f"{times:.2f}", f"{MOST[name]:g}" if name in MOST else "-")
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What a search spends because it does not know a good layout.")
    parser.add_argument("job", nargs="*", choices=[*JOBS, []], metavar="JOB")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    Console(width=110).print(seeded(options.job or tuple(MOST), options.repeats))


if __name__ == "__main__":
    main()
