"""Rows of a comparison of clusters or of sizes: the same columns, marks and data for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Group
from rich.text import Text

from planner.show.columns import Columns, assignments
from planner.show.screen import clean
from planner.show.words import of_ten, short_layout
from planner.specs.cluster_documents import cluster_names, load_cluster
from planner.specs.library import price_source
from planner.specs.uniform import uniform_cluster
from planner.units import exact_quantity, format_count, format_seconds
from planner.verdict import chance_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from planner.cost.run import Requirement, WholeRun
    from planner.layout import Layout
    from planner.plan_parts import ObjectiveName
    from planner.specs.cluster import AnyCluster
    from planner.specs.training import TrainingSpec

Measure = Literal["usd", "kilowatt_hours", "device_hours"]

MEASURES: Final[dict[Measure, tuple[str, str, str]]] = {
    "usd": ("cost", "cheapest", "USD"),
    "kilowatt_hours": ("energy", "least energy", "kWh"),
    "device_hours": ("device hours", "fewest device hours", "h"),
}
"""For each measure: its name, what the least is called, and its unit."""
_WITHIN: Final[dict[Requirement, str]] = {"deadline": "in time", "budget": "within the budget"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cluster or size, and the run on it.

    names: the cells before the run; each has its heading in the table.
    run: of the token budget, or of `REFERENCE_TOKENS`; None if nothing can be planned.
    why_not: the reason why nothing can be planned, or why the plan does not count.
    is_marked: whether no other row beats it.
    """

    names: tuple[str, ...]
    run: WholeRun | None = None
    layout: Layout | None = None
    peak_bytes: float = 0.0
    chance_of_fitting: float | None = None
    fits: bool = True
    why_not: str = ""
    is_marked: bool = False


def figures(row: Row, training: TrainingSpec) -> dict[str, str]:
    """Return the run's figures by their headings; a figure that is unknown is empty."""
    run, by = row.run, training.tokens is not None
    limits = (f"meets {_given(training.deadline, 'seconds')}", f"within {_given(training.budget, 'usd')}")
    headings = ("run" if by else "tokens/s", "8 of 10", "cost", "device hours", "energy", "fits", *limits)
    if run is None:
        return dict.fromkeys(headings, "")
    low, high = run.low_seconds, run.high_seconds
    ends = [format_seconds(each) if by else format_count(run.tokens / each) for each in (low, high) if each]
    cells = (
        format_seconds(run.seconds) if by else format_count(run.tokens / run.seconds),
        " to ".join(ends if by else ends[::-1]),
        "" if run.usd is None else f"{format_count(run.usd)} USD",
        format_count(run.device_hours) if run.usd is None else "",
        "" if run.kilowatt_hours is None else f"{format_count(run.kilowatt_hours)} kWh",
        "" if row.chance_of_fitting is None else chance_words(row.chance_of_fitting),
        *(_met(run, limit) for limit in ("deadline", "budget")),
    )
    return dict(zip(headings, cells, strict=True))


def all_figures(rows: Sequence[Row], training: TrainingSpec) -> tuple[list[str], list[dict[str, str]]]:
    """Return the headings under which any row has a figure, and the figures of each row."""
    cells = [figures(row, training) for row in rows]
    return [heading for heading in cells[0] if any(each[heading] for each in cells)], cells


def _given(value: float | None, kind: str) -> str:
    return exact_quantity(value, kind) if value is not None else kind


def _met(run: WholeRun, limit: str) -> str:
    """State in how many of ten runs a requirement is met; empty without the requirement."""
    is_met, chance = getattr(run, f"meets_{limit}"), getattr(run, f"{limit}_chance")
    if is_met is None:
        return ""
    if chance is None:
        return "yes" if is_met else "no"
    return "no" if chance < 0.1 else of_ten(chance).removesuffix(" runs")


def marks(rows: Sequence[Row], measure: Measure, *objectives: ObjectiveName) -> list[str]:
    """Return what each row is best at, among the rows that meet the deadline and the budget, if there are any.

    objectives: what counts besides time and the measure. Of equals the faster is best, and of these the cheaper.
    """
    fitting = [row for row in rows if row.fits and row.run]
    given = [limit for limit in _WITHIN if any(getattr(row.run, f"meets_{limit}") is not None for row in fitting)]
    met = [row for row in fitting if row.run and not row.run.missed] if given else []
    within = f" {' and '.join(_WITHIN[limit] for limit in given)}" if met else ""

    def order(row: Row) -> dict[str, float]:
        run = row.run
        assert run is not None, "a row without a run is no best one"
        num_devices = run.device_hours / run.seconds
        more = {"gpus": {"fewest devices": num_devices}, "memory": {"least memory": row.peak_bytes}}
        by = {"fastest": run.seconds, MEASURES[measure][1]: float(getattr(run, measure) or 0.0)}
        return by | {label: value for name in objectives for label, value in more.get(name, {}).items()}

    found: dict[int, list[str]] = {}
    for label in order((met or fitting)[0]) if fitting else ():
        best = min(met or fitting, key=lambda row: (order(row)[label], *order(row).values()))
        found.setdefault(id(best), []).append(label)
    return [f"{' and '.join(found[id(row)])}{within}" if id(row) in found else "" for row in rows]


def table(rows: Sequence[Row], words: Sequence[str], training: TrainingSpec, names: Sequence[str]) -> Columns:
    """Return the table of rows; on a narrow screen, what has no room in a row stands below its layout.

    words: for each row, what it is best at. names: the headings of the cells before the run.
    """
    kept, cells = all_figures(rows, training)
    header = [*names, *kept, "layout"]
    shown = [
        [
            *(Text(clean(each), style="bold" if row.is_marked else "") for each in (*row.names, *map(found.get, kept))),
            _layout(row, best),
        ]
        for row, found, best in zip(rows, cells, words, strict=True)
    ]
    last, named = len(header) - 1, not all(row.names[0][:1].isdigit() for row in rows)
    first = ("energy", "8 of 10", "device hours", "fits")  # what a narrow screen folds first
    folded = [header.index(each) for each in (*first, *kept[:1:-1]) if each in kept]
    return Columns(shown, right=range(named, last), wrap=(last,), optional=folded, fold=True, header=header)


def _layout(row: Row, best: str) -> RenderableType:
    if row.layout is None:
        return Text(f"cannot be planned: {clean(row.why_not)}", style="dim")
    words = best or row.why_not
    return Group(assignments(short_layout(row.layout)), *([Text(words, style="bold")] if words else []))


def run_to_dict(run: WholeRun | None) -> dict[str, Any]:
    """Return time, cost and requirements of a run as plain data."""
    ends = {"run_seconds": "seconds", "low_run_seconds": "low_seconds", "high_run_seconds": "high_seconds"}
    same = ("device_hours", "usd", "kilowatt_hours")
    limits = [key for limit in _WITHIN for key in (f"meets_{limit}", f"{limit}_chance")]
    return {key: run and getattr(run, name) for key, name in (ends | {each: each for each in (*same, *limits)}).items()}


def price_words(name: str, cluster: AnyCluster, training: TrainingSpec) -> str:
    """State whose price a cluster has; empty without a price, and for pools."""
    price = cluster.pools[0].price if training.price is None else training.price
    if len(cluster.pools) > 1 or price is None:
        return ""
    if training.price is None and name in cluster_names() and price == uniform_cluster(load_cluster(name)).price:
        return f"list price, {price_source(name) or 'without a source'}"
    whose = "the price of your file or of --set" if training.price is None else "training.price"
    return f"{whose}, {exact_quantity(price, 'usd_per_hour')} for each device"


def requirements_missed(rows: Sequence[Row]) -> list[str]:
    """Say that no row meets the deadline and the budget; empty if one does, or nothing is required."""
    runs = [row.run for row in rows if row.fits and row.run]
    if not runs or not all(run.missed for run in runs):
        return []
    missed = [limit for limit in _WITHIN if any(limit in run.missed for run in runs)]
    return [f"None of them is {' and '.join(_WITHIN[limit] for limit in missed)} with the confidence asked for."]
