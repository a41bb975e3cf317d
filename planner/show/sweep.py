"""Output of `planner plan --nodes A..B`: the Pareto front of time, cost and devices over all sizes."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from planner.plan import layout_to_dict, length_assumed
from planner.show.comparison_rows import Row, marks, price_words, requirements_missed, run_to_dict, table
from planner.show.screen import clean, section, stack
from planner.show.words import length_words, work_words
from planner.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group

    from planner.answers.sweep import Point, Sweep
    from planner.show.comparison_rows import Measure
    from planner.specs.job import Job

_MOST_ROWS = 16


def sweep_view(found: Sweep) -> Group:
    """Show the front as a table, thinned out if it is long, and the best point for each objective."""
    job = found.job
    head = Text.assemble((clean(job.model.name), "bold"))
    head.append(f" on {clean(_sizes_words(job, found))}")
    head.append(f"\n{_batch_words(job)}, {job.training.precision}, engine {clean(job.engine.name)}", style="dim")
    head.append("\n" * bool(own := length_words(job)) + own)
    if not found.front:
        return stack(head, Text("Nothing fits on any of these sizes."))
    rows = [_row(found, point) for point in found.front]
    best = marks(rows, _measure(rows), "gpus", found.objective)
    step = max(1, -(-len(rows) // _MOST_ROWS))
    shown = [at for at, words in enumerate(best) if at % step == 0 or words]
    left = len(rows) - len(shown)
    note = f"{left:,} points between them are left out, --json has all" if left else ""
    title = "Nothing else is faster, cheaper and smaller at once"
    if len(job.pools) > 1:
        title = "The fastest of each size that no other beats in time, cost and devices at once"
    hosts = "hosts" if len(job.pools) == 1 else " + ".join(_pool_names(job))
    names = (hosts, "devices", *["batch"] * bool(job.batch), "step")
    notes = [*requirements_missed(rows), _explanation(job, found)]
    return stack(
        head,
        section(title, table([rows[at] for at in shown], [best[at] for at in shown], job.training, names), note=note),
        Text("\n".join(map(clean, notes)), style="dim"),
    )


def _row(found: Sweep, point: Point) -> Row:
    hosts = " + ".join(f"{hosts:,}" for hosts in point.pools or (point.hosts,))
    batch = [f"{point.global_batch_size:,}"] * bool(found.job.batch)
    return Row(
        names=(hosts, f"{point.num_devices:,}", *batch, format_seconds(point.step_seconds)),
        run=replace(found.run(point), kilowatt_hours=None),
        layout=point.layout,
        peak_bytes=point.peak_bytes,
        chance_of_fitting=point.chance_of_fitting,
    )


def _measure(rows: Sequence[Row]) -> Measure:
    return "usd" if all(row.run and row.run.usd is not None for row in rows) else "device_hours"


def _batch_words(job: Job) -> str:
    if job.batch is None:
        return work_words(job.training)
    length = job.training.sequence_length
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


def _explanation(job: Job, found: Sweep) -> str:
    missing = [hosts for hosts, point in found.sizes if point is None]
    one = "--nodes POOL=N" if any(point.pools for point in found.front) else "--nodes N"
    also = " and says what its batch does to the learning rate" if job.batch else ""
    price = price_words(job.cluster.name, job.cluster, job.training)
    of = "of the run" if job.training.tokens else "of a billion tokens"
    words = f"Cost {of}{f': {price}' if price else ''}. Found by the dynamic program; `{one}` proves one size{also}. "
    words += "Idle devices of a host are not counted."
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
        "assumed": [asdict(each) for each in length_assumed(job)],
        "batch": job.batch and {"least": job.batch.least, "most": job.batch.most, "target": job.batch.target},
        "engine": job.engine.name,
        "fits": bool(found.front),
        "objective": found.objective,
        "confidence": found.confidence,
        "front": [_point_to_dict(found, point) for point in found.front],
        "sizes": [
            {"nodes": _nodes(job, hosts), "plan": point and _point_to_dict(found, point)}
            for hosts, point in found.sizes
        ],
    }


def _point_to_dict(found: Sweep, point: Point) -> dict[str, Any]:
    job = found.job
    return {
        "nodes": _nodes(job, point.pools or point.hosts),
        "num_devices": point.num_devices,
        "global_batch_size": point.global_batch_size,
        "step_seconds": point.step_seconds,
        "tokens_per_second": job.training.step_tokens / job.training.global_batch_size / point.sequence_seconds,
        "peak_bytes": point.peak_bytes,
        "chance_of_fitting": point.chance_of_fitting,
        **run_to_dict(found.run(point) if job.training.tokens else None),
        "layout": layout_to_dict(point.layout),
    }


def _nodes(job: Job, hosts: int | tuple[int, ...]) -> int | dict[str, int]:
    """Return the number of hosts; for a mixed cluster, the number of each pool by its name."""
    if isinstance(hosts, int):
        return hosts
    return dict(zip((pool.cluster.name for pool in job.pools), hosts, strict=True))
