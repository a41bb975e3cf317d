"""The fastest layout for each size of the cluster, and the size above which more devices gain too little.

For the same cluster `planner plan` may choose a layout that is up to 2 % slower and easier to run
(`planner.search.recommendation`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pydantic import Field
from rich.text import Text

from planner.answers.plan_inputs import constraints_of, job_of
from planner.answers.waterfall import waterfall_of
from planner.cost.estimate import estimate
from planner.cost.run import devices_in_use
from planner.cost.segments import with_segment
from planner.errors import InputError
from planner.plan_parts import WrittenLayout
from planner.search.space.rules import broken_rules
from planner.show.columns import Columns, assignments
from planner.show.screen import clean, section
from planner.show.words import line_label, short_layout
from planner.specs.change import change_job
from planner.specs.document import Document
from planner.specs.text import printable
from planner.units import format_count, format_seconds, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Group, RenderableType

    from planner.layout import Layout
    from planner.plan import Plan
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job


_RANGE: Final = re.compile(r"(\d{1,7})\.\.(\d{1,7})")
_WORTH: Final = 0.8
"""The least worthwhile efficiency: below it, doubling the devices gives less than 1.6 times the speed."""


_NOTICEABLE: Final = 5e-4


class SizedPlan(Document):
    """The fastest layout for one number of devices; if no layout exists, `missing` has the reason."""

    num_devices: int
    num_used: int = Field(description="devices that the layout uses")
    layout: WrittenLayout | None
    step_seconds: float | None
    tokens_per_second: float | None
    efficiency: float | None = Field(
        description="tokens per second and device, divided by those of the most efficient size"
    )
    grown_line: str | None = Field(
        description="the part of the waterfall that grew most, compared with the most efficient size"
    )
    grown_share: float | None = Field(
        description="growth of this part in device seconds, as a share of the step's device seconds"
    )
    missing: str | None


class Scaling(Document):
    """Sizes in doubling steps at the same global batch (strong scaling)."""

    sizes: tuple[SizedPlan, ...]
    most_efficient: int | None = Field(description="the number of devices with most tokens per second and device")
    breaks_at: int | None = Field(
        description="first number of devices above most_efficient with an efficiency below 80 %"
    )
    breaks_by: str | None = Field(description="the part of the waterfall that grew most at this number of devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """The best plan for one number of devices, with the device seconds of each part of its waterfall.

    The waterfall is used instead of the ledger, because the ledger describes the slowest stage, which differs from size
    to size.
    """

    num_devices: int
    layout: Layout
    step_seconds: float
    device_seconds: dict[str, float]

    @property
    def cost(self) -> float:
        """Device seconds of a step."""
        return self.num_devices * self.step_seconds


def scaling_of(plan: Plan, sizes: str, tell: Callable[[str], None] = lambda _: None) -> Scaling:
    """The fastest layout for each number of devices in `A..B`; `tell` is called with each number before its search.

    Raises:
        InputError: the text is not a range, or the plan's pins are not valid.
    """
    job, constraints = job_of(plan), constraints_of(plan)
    found: dict[int, _Priced | str] = {}
    for count in sizes_between(sizes, job):
        tell(f"the fastest layout for {count:,} devices")
        found[count] = _best(job, constraints, count)
    best = min((each for each in found.values() if isinstance(each, _Priced)), key=lambda each: each.cost, default=None)
    rows = tuple(_row(count, each, best, float(job.training.step_tokens)) for count, each in found.items())
    if best is None:
        return Scaling(sizes=rows, most_efficient=None, breaks_at=None, breaks_by=None)
    larger = (row for row in rows if row.num_devices > best.num_devices)
    broken = next((row for row in larger if row.efficiency is not None and row.efficiency < _WORTH), None)
    return Scaling(
        sizes=rows,
        most_efficient=best.num_devices,
        breaks_at=broken.num_devices if broken else None,
        breaks_by=broken.grown_line if broken else None,
    )


def _best(job: Job, constraints: Constraints, count: int) -> _Priced | str:
    """The best plan for `count` devices, or the reason why no plan exists."""
    from planner.search.search import fastest_layout  # other answers only price

    try:
        sized = change_job(job, _size(job, count), option="--scaling")
        found = fastest_layout(sized, constraints)
    except InputError as error:
        return error.mistakes[0].message
    if found is None:
        return "nothing fits"
    priced = estimate(sized, found[0])
    return _Priced(
        num_devices=count,
        layout=found[0],
        step_seconds=priced.step_seconds,
        device_seconds={part.name: count * part.seconds for part in waterfall_of(sized, found[0], priced).parts},
    )


def _size(job: Job, count: int) -> str:
    """The `--set` change to `count` devices; the pools of a mixed cluster grow and shrink together."""
    if len(job.pools) == 1:
        return f"gpus={count}"
    clusters = (pool.cluster for pool in job.pools)
    return ",".join(f"{cluster.name}.hosts={cluster.hosts * count // job.num_devices}" for cluster in clusters)


def _row(count: int, found: _Priced | str, best: _Priced | None, tokens: float) -> SizedPlan:
    if isinstance(found, str) or best is None:
        nothing = dict.fromkeys(set(SizedPlan.model_fields) - {"num_devices", "num_used", "missing"})
        return SizedPlan(num_devices=count, num_used=0, missing=str(found), **nothing)
    name, share = _grown(best, found)
    return SizedPlan.of(
        found,
        num_used=found.layout.world_size,
        tokens_per_second=tokens / found.step_seconds,
        efficiency=best.cost / found.cost,
        grown_line=name,
        grown_share=share,
        missing=None,
    )


def _grown(best: _Priced, now: _Priced) -> tuple[str | None, float]:
    """The part whose device seconds grew most, and its growth as a share of the new cost; None if the share is tiny."""
    growth = {name: seconds - best.device_seconds.get(name, 0.0) for name, seconds in now.device_seconds.items()}
    name = max(growth, key=lambda each: growth[each])
    share = growth[name] / now.cost
    return (name, share) if share > _NOTICEABLE else (None, 0.0)


def sizes_between(text: str, job: Job) -> Iterator[int]:
    """Numbers of devices in doubling steps: parts of one host, then whole hosts; both ends of `A..B` if they exist.

    For a mixed cluster, all pools are halved or doubled together, as long as every pool has whole hosts.

    Raises:
        InputError: the text is not a range, or no size of the mixed cluster is in the range.
    """
    match = _RANGE.fullmatch("..".join(str(whole_of(each.strip())) for each in text.split("..")))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        hint = "write FROM..TO devices, for example 1..1024"
        raise InputError(f"`{printable(text, 40)}` is no range of sizes", where="--scaling", hint=hint)
    low, high = int(match[1]), int(match[2])
    if len(job.pools) > 1:
        yield from _sizes_of_pools(job, low, high)
        return
    host = job.pools[0].cluster.devices_per_host
    parts = [1 << n for n in range(host.bit_length()) if 1 << n < host]
    hosts = [host << n for n in range(max(0, (high // host).bit_length()))]
    ends = [end for end in (low, high) if end < host or end % host == 0]
    yield from (size for size in sorted({*parts, *hosts, *ends}) if low <= size <= high)


def _sizes_of_pools(job: Job, low: int, high: int) -> Iterator[int]:
    size, common = job.num_devices, math.gcd(*(pool.cluster.hosts for pool in job.pools))
    least = size // (common & -common)  # halve as long as every pool has whole hosts
    sizes = [least << n for n in range(max(0, (high // least).bit_length())) if low <= least << n <= high]
    if not sizes:
        hint = f"its pools grow together, to {least:,}, {2 * least:,}, {4 * least:,} devices and so on"
        raise InputError("no size of this mixed cluster lies in the range", where=f"--scaling {low}..{high}", hint=hint)
    yield from sizes


_DOUBLINGS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCount:
    """The layout with another data-parallel degree at the same global batch (strong scaling)."""

    num_devices: int
    step_seconds: float
    fits: bool


def replicas_of(plan: Plan) -> tuple[ReplicaCount, ...]:
    """The layout with the data-parallel degree halved and doubled, as often as the rules allow.

    Raises:
        InputError: the plan's options are not valid.
    """
    job, layout = job_of(plan), plan.layout
    found = []
    for power in range(-_DOUBLINGS, _DOUBLINGS + 1):
        dp = layout.dp * 2**power
        if dp != int(dp):
            continue
        other = replace(layout, dp=int(dp))
        try:
            sized = job if power == 0 else change_job(job, _size_for(job, other))
        except InputError:  # no cluster has this number of devices
            continue
        other = with_segment(sized.cluster, other)
        if power and broken_rules(sized, other):
            continue
        priced = estimate(sized, other)
        found.append(ReplicaCount(num_devices=other.world_size, step_seconds=priced.step_seconds, fits=priced.fits))
    return tuple(found)


def _size_for(job: Job, layout: Layout) -> str:
    """The `--set` change that gives the cluster as many devices as the layout has.

    In a mixed cluster, each pool gets hosts for its stages.
    """
    if len(job.pools) == 1:
        return f"gpus={layout.world_size}"
    in_use = devices_in_use(job.cluster, layout)
    return ",".join(f"{pool.name}.hosts={-(-count // pool.devices_per_host)}" for pool, count in in_use)


def scaling_section(found: Scaling) -> Group:
    """Show step time, tokens per second and efficiency of each size, and the ledger line that grew most."""
    rows: list[list[RenderableType]] = []
    for each in found.sizes:
        if each.step_seconds is None or each.tokens_per_second is None or each.efficiency is None:
            rows.append([f"{each.num_devices:,}", "", "", "", "", Text(clean(each.missing or ""), style="dim")])
            continue
        grown = f"{line_label(each.grown_line)} {each.grown_share:.1%}" if each.grown_line else ""
        layout = assignments(short_layout(each.layout) if each.layout else "")
        speed = format_count(each.tokens_per_second)
        time = format_seconds(each.step_seconds)
        rows.append([f"{each.num_devices:,}", time, speed, f"{each.efficiency:.0%}", grown, layout])
    header = ("devices", "step", "tokens/s", "of linear", "lost most to", "layout")
    table = Columns(rows, right=(0, 1, 2, 3), wrap=(5,), optional=(5,), header=header)
    return section(
        "Scaling", table, Text(_verdict(found)), note="the fastest layout for each size, the same global batch"
    )


def _verdict(found: Scaling) -> str:
    if found.most_efficient is None:
        return "Nothing fits on any of these sizes."
    best = f"Linear is the speed per device of the most efficient size, {found.most_efficient:,} devices."
    lost = "Lost most to: what grew most in device seconds against that size, over those of the whole step."
    if found.breaks_at is None:
        return f"{best} {lost} No size above it falls below 80 %."
    by = f", by {line_label(found.breaks_by)}" if found.breaks_by else ""
    return f"{best} {lost} At {found.breaks_at:,} devices it falls below 80 %{by}."
