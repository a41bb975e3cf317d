"""Output of `planner plan --nodes A..B`: the Pareto front of time, cost and devices over all sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from planner.cost.goodput import kept_share
from planner.cost.run import devices_in_use, price_of, whole_run
from planner.plan import layout_to_dict
from planner.show.columns import Columns, assignments
from planner.show.screen import clean, section, stack
from planner.show.words import of_ten, short_layout
from planner.sums import sum_of
from planner.units import UNITS, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from planner.cost.run import WholeRun
    from planner.search.questions.sweep import Point, Sweep
    from planner.specs.job import Job

_MOST_ROWS = 16
_REFERENCE_TOKENS = 1_000_000_000  # without a token budget, costs are for this number of tokens


def sweep_view(found: Sweep) -> Group:
    """Show the front as a table, thinned out if it is long, and the best point for each objective."""
    job = found.job
    head = Text.assemble((clean(job.model.name), "bold"))
    head.append(f" on {clean(_sizes_words(job, found))}")
    head.append(f"\n{_batch_words(job)}, {job.training.precision}, engine {clean(job.engine.name)}", style="dim")
    if not found.front:
        return stack(head, Text("Nothing fits on any of these sizes."))
    best = _best_at(found)
    shown = _thinned(found.front, [point for point, _ in best])
    rows = [_row(job, point, ", ".join(words for other, words in best if other is point)) for point in shown]
    left = len(found.front) - len(shown)
    note = f"{left:,} points between them are left out, --json has all" if left else ""
    of_one_kind = len(job.pools) == 1
    title = "Nothing else is faster, cheaper and smaller at once"
    if not of_one_kind:
        title = "The fastest of each size that no other beats in time, cost and devices at once"
    header = (
        "hosts" if of_one_kind else " + ".join(_pool_names(job)),
        "devices",
        *(("batch",) if job.batch else ()),
        "step",
        "run" if job.training.tokens else "tokens/s",
        "cost",
        "layout",
    )
    last = len(header) - 1
    table = Columns(rows, right=tuple(range(last)), wrap=(last,), optional=(last - 3,), header=header)
    return stack(
        head,
        section(title, table, note=note),
        Text(f"Cost: {_cost_words(job)}. {_explanation(job, found)}", style="dim"),
    )


def _batch_words(job: Job) -> str:
    length = job.training.sequence_length
    if job.batch is None:
        return f"{job.training.global_batch_size:,} sequences of {length:,} tokens per step"
    return f"{job.batch.least:,} to {job.batch.most:,} sequences of {length:,} tokens per step, the best for each size"


def _pool_names(job: Job) -> list[str]:
    return [clean(pool.cluster.name) for pool in job.pools]


def _sizes_words(job: Job, found: Sweep) -> str:
    """Return `4 to 64 hosts of 8 x h100 (dgx-h100)`; for a mixed cluster, the hosts of each pool."""
    columns = zip(*((hosts,) if isinstance(hosts, int) else hosts for hosts, _ in found.sizes), strict=True)
    parts = []
    for pool, counts in zip(job.pools, columns, strict=True):
        least, most, cluster = min(counts), max(counts), pool.cluster
        number = f"{least:,} to {most:,} hosts" if len(job.pools) == 1 or most > least else f"{least:,} hosts"
        parts.append(f"{number} of {cluster.devices_per_host} x {cluster.device.name} ({cluster.name})")
    return ", ".join(parts)


def _best_at(found: Sweep) -> list[tuple[Point, str]]:
    best = [(found.front[0], "fewest devices")]
    if found.fastest and found.cheapest:
        best = [(found.fastest, "fastest"), *best, (found.cheapest, "cheapest")]
    in_time = found.fewest_in_time
    if in_time:
        chance = "" if in_time.deadline_chance is None else f" in {of_ten(in_time.deadline_chance)}"
        best.append((in_time, f"fewest by the deadline{chance}"))
    return best


def _thinned(points: Sequence[Point], kept: Sequence[Point]) -> list[Point]:
    """Return a limited number of evenly spaced points, including the points `kept`."""
    step = max(1, -(-len(points) // _MOST_ROWS))
    return [point for i, point in enumerate(points) if i % step == 0 or any(point is each for each in kept)]


def _row(job: Job, point: Point, words: str) -> list[RenderableType]:
    run = _run(job, point)
    time = format_seconds(run.seconds) if run else format_count(_tokens_per_second(job, point))
    return [
        " + ".join(f"{hosts:,}" for hosts in point.pools or (point.hosts,)),
        f"{point.num_devices:,}",
        *((f"{point.global_batch_size:,}",) if job.batch else ()),
        format_seconds(point.step_seconds),
        time,
        format_count(_cost(job, point)),
        Group(assignments(short_layout(point.layout)), *([Text(words, style="bold")] if words else [])),
    ]


def _run(job: Job, point: Point) -> WholeRun | None:
    in_use = devices_in_use(job.cluster, point.layout)
    training = job.training.model_copy(update={"global_batch_size": point.global_batch_size})
    share = kept_share(job, in_use)
    return whole_run(job.model, training, step_seconds=point.step_seconds, in_use=in_use, effective_share=share)


def _tokens_per_second(job: Job, point: Point) -> float:
    return job.training.sequence_length / point.sequence_seconds


def _cost(job: Job, point: Point) -> float:
    """Return the price of the run in US dollars, or its device hours without a price.

    Without a budget, for a billion tokens.
    """
    run, is_priced = _run(job, point), _is_priced(job)
    if run is not None:
        return run.usd if is_priced and run.usd is not None else run.device_hours
    in_use = devices_in_use(job.cluster, point.layout)
    rate = sum_of(count * (price_of(pool, job.training) or 0.0 if is_priced else 1.0) for pool, count in in_use)
    return rate / _tokens_per_second(job, point) / UNITS["seconds"]["h"] * _REFERENCE_TOKENS


def _is_priced(job: Job) -> bool:
    """Whether every pool of the cluster has a price."""
    return all(price_of(pool.cluster, job.training) is not None for pool in job.pools)


def _cost_words(job: Job) -> str:
    unit = "USD" if _is_priced(job) else "device hours"
    return f"{unit} of the run" if job.training.tokens else f"{unit} for a billion tokens"


def _explanation(job: Job, found: Sweep) -> str:
    missing = [hosts for hosts, point in found.sizes if point is None]
    one = "--nodes POOL=N" if any(point.pools for point in found.front) else "--nodes N"
    also = " and says what its batch does to the learning rate" if job.batch else ""
    words = f"Found by the dynamic program; `{one}` proves one size{also}. Idle devices of a host are not counted."
    last = missing[-1] if missing else 0
    if isinstance(last, tuple):
        return f"{words} Nothing fits on {len(missing):,} of the {len(found.sizes):,} sizes."
    return f"{words} Nothing fits on fewer than {last + 1:,} hosts." if missing else words


def sweep_to_dict(found: Sweep) -> dict[str, Any]:
    """Return the Pareto front and the fastest plan of each size as plain data."""
    job = found.job
    return {
        "format": 1,
        "model": job.model.model_dump(mode="json"),
        "cluster": job.cluster.model_dump(mode="json"),
        "training": job.training.model_dump(mode="json"),
        "batch": job.batch and {"least": job.batch.least, "most": job.batch.most, "target": job.batch.target},
        "engine": job.engine.name,
        "fits": bool(found.front),
        "confidence": found.confidence,
        "front": [_point_to_dict(found, point) for point in found.front],
        "sizes": [
            {"nodes": _nodes(job, hosts), "plan": point and _point_to_dict(found, point)}
            for hosts, point in found.sizes
        ],
    }


def _point_to_dict(found: Sweep, point: Point) -> dict[str, Any]:
    job, run = found.job, _run(found.job, point)
    return {
        "nodes": _nodes(job, point.pools or point.hosts),
        "num_devices": point.num_devices,
        "global_batch_size": point.global_batch_size,
        "step_seconds": point.step_seconds,
        "tokens_per_second": _tokens_per_second(job, point),
        "peak_bytes": point.peak_bytes,
        "run_seconds": run and run.seconds,
        "device_hours": run and run.device_hours,
        "usd": run and run.usd,
        "meets_deadline": found.meets_deadline(point),
        "deadline_chance": point.deadline_chance,
        "layout": layout_to_dict(point.layout),
    }


def _nodes(job: Job, hosts: int | tuple[int, ...]) -> int | dict[str, int]:
    """Return the number of hosts; for a mixed cluster, the number of each pool by its name."""
    if isinstance(hosts, int):
        return hosts
    return dict(zip((pool.cluster.name for pool in job.pools), hosts, strict=True))
