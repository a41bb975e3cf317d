"""Output of `planner accuracy`: errors by group, the rows with the largest errors, and rows that cannot be priced."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.text import Text

from planner.show.columns import Columns
from planner.show.screen import clean, section, stack
from planner.sums import sum_of
from planner.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Group as Lines

    from planner.evidence.compare.groups import Group
    from planner.evidence.compare.report import Report
    from planner.evidence.compare.score import Row
    from planner.evidence.compare.sweeps import Sweep

_HEADER = ("", "rows", "median", "mean", "p90", "ratio", "null")
_LEGEND = (
    "Errors are |measured / predicted - 1| of tokens per second; ratio is the median of measured / predicted; "
    "null is the median error of the null model: each GPU at the rate that it reached in other sources."
)
_MOST_REASONS = 12
_MOST_WORST = 8


def accuracy(report: Report) -> Lines:
    """Format the accuracy report for a screen; errors are in percent."""
    return stack(
        Text(_LEGEND, style="dim"),
        *(_groups(by, report.groups) for by in dict.fromkeys(group.by for group in report.groups)),
        *(_groups(by, report.memory_groups) for by in dict.fromkeys(group.by for group in report.memory_groups)),
        _outcomes(report),
        _sweeps(report.sweeps),
        _worst(report.rows),
        _assumed(report.rows),
        _unsupported(report.rows),
        _unmeasured(report.rows),
    )


def _groups(by: str, groups: Iterable[Group]) -> Lines:
    shown = sorted((group for group in groups if group.by == by), key=lambda group: -group.num_rows)
    rows = [
        (
            clean(group.value),
            str(group.num_rows),
            *map(_percent, (group.median, group.mean, group.p90)),
            f"{group.ratio:.2f}",
            "" if group.null_median is None else _percent(group.null_median),
        )
        for group in shown
    ]
    has_null = any(group.null_median is not None for group in shown)
    title = {"all": "Errors of tokens per second", "memory": "Errors of memory, by counter"}.get(by, f"By {by}")
    if not has_null:
        rows = [row[:-1] for row in rows]
    columns = Columns(rows, right=range(1, 7), wrap=(0,), optional=(6, 5), header=_HEADER[: 6 + has_null])
    return section(title, columns)


def _outcomes(report: Report) -> Lines:
    found = report.outcomes
    lines = [
        ("ran out of memory", str(found.num_oom), "predicted not to fit", str(found.caught)),
        ("ran", str(found.num_ran), "told that they do not fit", str(found.false_alarms)),
    ]
    return section("Verdicts on memory", Columns(lines, right=(1, 3)))


def _sweeps(found: Sequence[Sweep]) -> Lines | None:
    if not found:
        return None
    rows = [_sweep_cells(source, found) for source in dict.fromkeys(sweep.source for sweep in found)]
    header = ("", "sweeps", "regret", "by chance", "pairs in order")
    note = "means; pairs that measured more than 3 % apart"
    table = Columns([*rows, _sweep_cells("", found)], right=range(1, 5), wrap=(0,), optional=(3,), header=header)
    return section("Choice among the layouts that a source tried", table, note=note)


def _sweep_cells(source: str, found: Sequence[Sweep]) -> tuple[str, ...]:
    """Return table cells: means over the sweeps of one source, or of all sources."""
    own = [sweep for sweep in found if source in ("", sweep.source)]
    regret, chance = (sum_of(getattr(sweep, name) for sweep in own) / len(own) for name in ("regret", "random_regret"))
    ordered, clear = sum(sweep.ordered_pairs for sweep in own), sum(sweep.clear_pairs for sweep in own)
    label = clean(source) or "all"
    return label, str(len(own)), _percent(regret), _percent(chance), f"{ordered} of {clear}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _worst(rows: Iterable[Row]) -> Lines | None:
    scored = [(abs(row.error), row) for row in rows if row.error is not None]
    worst = sorted(scored, key=lambda each: -each[0])[:_MOST_WORST]
    lines = [
        (
            clean(row.run.id),
            clean(row.run.source_set),
            clean(f"{row.run.model} {row.run.gpus or '?'} {row.run.gpu} {row.run.precision_class}"),
            format_seconds(row.measured_seconds or 0),
            format_seconds(row.predicted_seconds or 0),
        )
        for _, row in worst
    ]
    header = ("", "source", "run", "measured", "predicted")
    return section("Worst rows", Columns(lines, right=(3, 4), wrap=(1, 2), header=header)) if lines else None


def _assumed(rows: Iterable[Row]) -> Lines | None:
    """List the settings that rows leave out, with the rule that fills each; the most frequent settings come first."""
    rules = Counter((each.key, each.rule) for row in rows if row.setup for each in row.setup.assumed)
    lines = [(str(count), clean(key), clean(rule)) for (key, rule), count in rules.most_common(_MOST_REASONS)]
    return section("Assumed", Columns(lines, right=(0,), wrap=(1, 2), header=("rows", "", "rule"))) if lines else None


def _unmeasured(rows: Iterable[Row]) -> Lines | None:
    """Name the rows that no forecast can be compared with."""
    names = [row.run.id for row in rows if not row.reason and row.is_unmeasured]
    if not names:
        return None
    shown = ", ".join(map(clean, names[:_MOST_REASONS])) + ", ..." * (len(names) > _MOST_REASONS)
    words = f"no step time, tokens per second, memory or outcome can be read: {shown}"
    return section("Not compared", Text(words), note=f"{len(names)} rows")


def _unsupported(rows: Iterable[Row]) -> Lines | None:
    rows = tuple(rows)
    reasons = Counter(row.reason for row in rows if row.reason)
    if not reasons:
        return None
    lines = [(str(count), clean(reason)) for reason, count in reasons.most_common(_MOST_REASONS)]
    note = f"{reasons.total()} of {len(rows)} rows"
    return section("Not priced", Columns(lines, right=(0,), wrap=(1,)), note=note)
