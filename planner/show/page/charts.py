"""Geometry of the page's charts: bars in percent of the bar's full width, points in the units of the SVG drawing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planner.answers.waterfall import placed_parts
from planner.show.comparison_rows import MEASURES
from planner.show.figures import bytes_scale, seconds_scale
from planner.show.words import fold_runs, line_label, percent, short_layout, stage_range
from planner.units import UNITS, format_bytes, format_count, format_seconds, format_usd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from planner.answers.peak import Alternative, StagePeak
    from planner.answers.scaling import ReplicaCount, Scaling
    from planner.answers.side_by_side import Choice, SideBySide
    from planner.answers.waterfall import Waterfall
    from planner.cost.ledger import StageMemory
    from planner.plan import Plan

_WIDTH: Final = 400.0
_HEIGHT: Final = 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 14.0, 14.0, 34.0
_TICKS: Final = 4
_MOST_ROWS: Final = 16
"""Largest number of rows; adjacent stages of a longer pipeline share a row, which shows their fullest stage."""
_NAMED_FROM: Final = 0.13
"""A part of a bar shows its name inside only if the part fills at least this share of the bar."""


# --- bars -------------------------------------------------------------------------------------------------------


def memory_rows(plan: Plan, peaks: Sequence[StagePeak]) -> dict[str, Any]:
    """Return a stacked bar of each stage's memory against its limit; similar stages share the fullest stage's row."""
    full = max(max(stage.total_bytes, stage.limit_bytes) for stage in plan.memory)
    groups = fold_runs(
        plan.memory, lambda stage: [format_bytes(float(line.num_bytes)) for line in stage.lines], _MOST_ROWS
    )
    moments = {peak.stage: peak.moment for peak in peaks}
    return {
        "names": [(line.name.value, line_label(line.name)) for line in plan.memory[0].lines],
        "rows": [_memory_row(group, full, moments) for group in groups],
    }


def _memory_row(group: Sequence[StageMemory], full: float, moments: dict[int, str]) -> dict[str, Any]:
    stage = max(group, key=lambda each: each.total_bytes)
    parts, at = [], 0.0
    for line in stage.lines:
        share = float(line.num_bytes) / full
        label, size = line_label(line.name), format_bytes(float(line.num_bytes))
        parts.append(
            {
                "key": line.name.value, "x": _share(at), "width": _share(share), "size": size, "name": label,
                "text": label if share > _NAMED_FROM else "",
            }
        )  # fmt: skip
        at += share
    return {
        "label": stage_range([each.stage for each in group]),
        "parts": parts,
        "limit": _share(stage.limit_bytes / full),
        "total": format_bytes(stage.total_bytes),
        "of_limit": f"{stage.total_bytes / stage.limit_bytes:.0%}",
        "over": stage.total_bytes > stage.limit_bytes,
        "free": format_bytes(stage.limit_bytes - stage.total_bytes),
        "moment": moments.get(stage.stage, ""),
    }


def _share(value: float) -> str:
    return f"{value:.3%}"


def waterfall_rows(waterfall: Waterfall) -> list[dict[str, Any]]:
    """Return a bar for each part, starting at the end of the previous part; a part that saves time points backwards."""
    full, placed = waterfall.step_seconds, list(placed_parts(waterfall))
    highest = max(full, *(start + max(part.seconds, 0.0) for part, start in placed))
    rows = [
        {
            "name": line_label(part.name), "x": _share(max(0.0, start) / highest),
            "width": _share(abs(part.seconds) / highest), "back": part.seconds < 0,
            "seconds": format_seconds(part.seconds), "share": percent(part.seconds / full), "bound": part.bound,
        }
        for part, start in placed
    ]  # fmt: skip
    total = {"name": "step", "x": "0%", "width": _share(full / highest), "back": False, "share": "100%", "bound": ""}
    return [*rows, total | {"seconds": format_seconds(full)}]


# --- points -----------------------------------------------------------------------------------------------------


class _Axis(NamedTuple):
    """One axis: its range of values, and the range of coordinates on which it is drawn."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return round(self.start + (min(max(value, self.low), self.high) - self.low) / span * (self.end - self.start), 2)

    def has(self, value: float) -> bool:
        """Whether a value has its place on the axis; another stands at the end of the axis."""
        return self.low <= value <= self.high

    def ticks(self, text: Callable[[float], str], unit: float = 1.0) -> list[dict[str, Any]]:
        """Return tick values within the axis that are round numbers in the displayed unit."""
        rough = (self.high - self.low) / unit / _TICKS or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step = unit * next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
        first = math.ceil(self.low / step - 1e-9)
        values = [step * number for number in range(first, int(self.high / step + 1e-9) + 1)]
        return [{"at": self(value), "text": text(value)} for value in values]


_FAR: Final = 2.0
"""A value beyond this multiple of the largest near value stands at the edge of a chart."""


def _around(values: Iterable[float], *, start: float, end: float, near: Iterable[float] = ()) -> _Axis:
    """Return an axis with a margin around the values, and around each of `near` that is not far from them."""
    found = list(values)
    found += [each for each in near if min(found) / _FAR <= each <= max(found) * _FAR]
    room = 0.08 * ((max(found) - min(found)) or abs(max(found)) or 1.0)
    return _Axis(max(0.0, min(found) - room), max(found) + room, start, end)


_FRAME: Final = {"left": _LEFT, "right": _WIDTH - _RIGHT, "top": _TOP, "bottom": _HEIGHT - _BOTTOM}


class _Row(NamedTuple):
    """A layout to compare with the plan; with offload its device memory may fit while its host memory does not."""

    kind: str
    layout: str
    seconds: float
    num_bytes: float
    why: str
    fits: bool


def front_chart(plan: Plan, alternatives: Sequence[Alternative]) -> dict[str, Any]:
    """Chart step time against memory for the plan, its runners-up and its neighbours, with their Pareto front."""
    peak = max(stage.total_bytes for stage in plan.memory)
    limit = plan.memory[0].limit_bytes
    rows: list[_Row] = [
        _Row("plan", short_layout(plan.layout), plan.step_seconds, peak, "the plan", plan.fits is not False)
    ]
    rows += [
        _Row("runner-up", short_layout(r.layout), r.step_seconds, r.peak_bytes, r.reason, r.peak_bytes <= limit)
        for r in plan.runners_up
    ]
    rows += [
        _Row("neighbour", short_layout(each.layout), each.step_seconds,
             each.peak_bytes, f"the plan with {each.change}", each.fits)
        for each in alternatives if each.step_seconds is not None and each.peak_bytes is not None
    ]  # fmt: skip
    fitting = sorted((row.seconds, row.num_bytes) for row in rows if row.fits)
    near = rows[: 1 + len(plan.runners_up)]
    slowest, largest = (_FAR * max(each) for each in ([row.seconds for row in near], [peak, limit]))
    x = _around((row.seconds for row in rows if row.seconds <= slowest), start=_LEFT, end=_WIDTH - _RIGHT)
    sizes = [row.num_bytes for row in rows if row.num_bytes <= largest]
    y = _around(sizes, start=_HEIGHT - _BOTTOM, end=_TOP, near=[limit])
    front = [own for own in fitting if not any(s <= own[0] and b <= own[1] and (s, b) != own for s, b in fitting)]
    return {
        "frame": _FRAME,
        "limit": y(limit) if y.low <= limit <= y.high else None,
        "x_ticks": x.ticks(format_seconds, seconds_scale([x.high]).factor),
        "y_ticks": y.ticks(format_bytes, bytes_scale([y.high]).factor),
        "front": " ".join(f"{x(seconds)},{y(num_bytes)}" for seconds, num_bytes in front),
        "points": [
            {
                "number": number, "kind": kind, "x": x(seconds), "y": y(num_bytes), "layout": layout, "why": why,
                "seconds": format_seconds(seconds), "memory": format_bytes(num_bytes), "fits": fits,
                "on_front": fits and (seconds, num_bytes) in front,
                "far": _far((x, seconds, format_seconds), (y, num_bytes, format_bytes)),
                "left": x(seconds) > _WIDTH * 0.75 and not (x.has(seconds) and y.has(num_bytes)),
            }
            for number, (kind, layout, seconds, num_bytes, why, fits) in enumerate(rows, start=1)
        ],
    }  # fmt: skip


def _far(*placed: tuple[_Axis, float, Callable[[float], str]]) -> list[str]:
    """Return the figures that have no place on their axis, as text."""
    return [text(value) for axis, value, text in placed if not axis.has(value)]


def choices_chart(found: SideBySide) -> dict[str, Any]:
    """Chart the run's time against its cost on each cluster where it fits; a line joins the Pareto-optimal choices.

    A bar from the low to the high end of a run's time shows its cost at each, because the cost grows with the time.
    """
    rows = [(number, each, *found.costs(each)) for number, each in enumerate(found.choices, start=1) if each.fits]
    training = next(each.plan.training for each in found.planned if each.plan)
    bars = {number: [end / seconds for end in _ends(each)] for number, each, seconds, _ in rows}
    shares = [(row, share) for row in rows for share in (1.0, *bars[row[0]])]
    longest = [training.deadline] if training.deadline else []
    most = [training.budget] if training.budget and found.measure == "usd" else []
    x = _around([row[2] * share for row, share in shares], start=_LEFT, end=_WIDTH - _RIGHT, near=longest)
    y = _around([row[3] * share for row, share in shares], start=_HEIGHT - _BOTTOM, end=_TOP, near=most)
    unit = MEASURES[found.measure][2]
    shown = next((UNITS["seconds"][name] for name in ("d", "h") if x.high >= 2 * UNITS["seconds"][name]), 1.0)
    upright = {"y1": _FRAME["top"], "y2": _FRAME["bottom"]}
    level = {"x1": _FRAME["left"], "x2": _FRAME["right"]}
    return {
        "frame": _FRAME,
        "unit": unit,
        "x_ticks": x.ticks(format_seconds, shown),
        "y_ticks": y.ticks(format_count),
        "front": " ".join(f"{x(seconds)},{y(amount)}" for seconds, amount in map(found.costs, found.front)),
        "limits": [
            *(upright | {"x1": x(at), "x2": x(at), "text": f"the deadline, {format_seconds(at)}"} for at in longest),
            *(level | {"y1": y(at), "y2": y(at), "text": f"the budget, {format_usd(at)}"} for at in most),
        ],
        "points": [
            {
                "number": number, "x": x(seconds), "y": y(amount), "name": found.name_of(each),
                "on_front": each.on_front, "time": format_seconds(seconds), "amount": f"{format_count(amount)} {unit}",
                "bar": [at for share in bars[number] for at in (x(seconds * share), y(amount * share))],
            }
            for number, each, seconds, amount in rows
        ],
    }  # fmt: skip


def _ends(choice: Choice) -> list[float]:
    run = choice.run
    return [run.low_seconds, run.high_seconds] if run and run.low_seconds and run.high_seconds else []


def scaling_chart(plan: Plan, planned: Scaling | None, replicas: Sequence[ReplicaCount]) -> dict[str, Any]:
    """Chart the speed as a share of linear speed-up, against the number of devices.

    The points are the best plan of each size if `planned` is given, else the plan's layout with more replicas.
    """
    tokens = plan.training.step_tokens
    if planned is not None:
        sizes = [(s.num_devices, s.step_seconds, s.layout or "", True) for s in planned.sizes if s.step_seconds]
    else:
        sizes = [(each.num_devices, each.step_seconds, "", each.fits) for each in replicas]
    cheapest = min((count * seconds for count, seconds, _, fits in sizes if fits), default=None)
    cheapest = cheapest or min((count * seconds for count, seconds, *_ in sizes), default=1.0)
    rows = [(count, seconds, cheapest / (count * seconds), layout, fits) for count, seconds, layout, fits in sizes]
    logs = [math.log2(row[0]) for row in rows] or [0.0]
    x = _around(logs, start=_LEFT, end=_WIDTH - _RIGHT)
    y = _Axis(0.0, max(1.05, 1.05 * max((row[2] for row in rows), default=1.0)), _HEIGHT - _BOTTOM, _TOP)
    return {
        "planned": planned is not None,
        "frame": _FRAME,
        "ideal": y(1.0),
        "x_ticks": [{"at": x(math.log2(row[0])), "text": f"{row[0]:,}"} for row in rows[:: max(1, len(rows) // 6)]],
        "y_ticks": y.ticks(lambda value: f"{value:.0%}"),
        "line": " ".join(f"{x(math.log2(row[0]))},{y(row[2])}" for row in rows),
        "points": [
            {
                "x": x(math.log2(count)), "y": y(share), "devices": f"{count:,}", "seconds": format_seconds(seconds),
                "speed": f"{format_count(tokens / seconds)} tokens/s", "share": f"{share:.0%}", "layout": layout,
                "fits": fits, "here": count == plan.layout.world_size,
            }
            for count, seconds, share, layout, fits in rows
        ],
    }  # fmt: skip
