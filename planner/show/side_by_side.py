"""Output of `planner plan MODEL A,B,C`: a comparison of clusters and sizes as a table and as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from planner.cost.run import REFERENCE_TOKENS, devices_in_use
from planner.plan import layout_to_dict, length_assumed
from planner.show.comparison_rows import Row, marks, price_words, requirements_missed, run_to_dict, table
from planner.show.screen import clean, section, stack
from planner.show.words import cluster_words, length_words, work_words
from planner.units import UNITS, format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Group

    from planner.plan import Plan
    from planner.search.questions.side_by_side import Choice, Measure, SideBySide

MEASURES: Final[dict[Measure, str]] = {
    "usd": "cost",
    "kilowatt_hours": "energy",
    "device_hours": "device hours",
}
NAMES: Final = ("cluster", "devices")


def side_by_side_view(found: SideBySide) -> Group:
    """Show the choices as a table, with the choices that no other choice beats in bold."""
    plan = first_plan(found)
    head = Text.assemble((clean(plan.model.name), "bold"))
    head.append(f" on {len(found.choices)} clusters or sizes")
    head.append(f"\n{clean(job_words(plan))}", style="dim")
    rows = rows_of(found)
    shown = table(rows, best_at(found, rows), plan.training, NAMES)
    notes = [*requirements_missed(rows), explanation(found), *price_notes(found)]
    return stack(head, section("Side by side", shown), Text("\n".join(map(clean, notes)), style="dim"))


def first_plan(found: SideBySide) -> Plan:
    """Return the plan of the first choice that has one."""
    plan = found.planned[0].plan if found.planned else None
    assert plan is not None, "choices without any plan are an error"
    return plan


def rows_of(found: SideBySide) -> list[Row]:
    """Return a row for each choice, in their order."""
    return [_row(found, each) for each in found.choices]


def _row(found: SideBySide, choice: Choice) -> Row:
    plan, name = choice.plan, found.name_of(choice)
    if plan is None:
        return Row(names=(name, ""), why_not=choice.why_not, fits=False)
    cards = " + ".join(f"{count:,} x {pool.device.name}" for pool, count in devices_in_use(plan.cluster, plan.layout))
    return Row(
        names=(name, cards + f", {plan.idle_devices:,} idle" * bool(plan.idle_devices)),
        run=choice.run,
        layout=plan.layout,
        peak_bytes=plan.worst_stage.total_bytes,
        chance_of_fitting=choice.chance_of_fitting,
        fits=choice.fits,
        why_not="" if choice.fits else _lacking(plan),
        is_marked=choice.on_front,
    )


def _lacking(plan: Plan) -> str:
    missing = plan.worst_stage.missing_bytes
    return f"{plan.verdict}: {format_bytes(missing)} too much" if missing else plan.verdict


def best_at(found: SideBySide, rows: list[Row]) -> list[str]:
    """State what each row is best at, or that no other row beats it; empty if another beats it."""
    best = marks(rows, found.measure, found.objective)
    return [words or ("not beaten" if row.is_marked else "") for row, words in zip(rows, best, strict=True)]


def price_notes(found: SideBySide) -> list[str]:
    """State for each cluster whose price it has, and for each choice the cost with its idle devices."""
    named = {each.name: _price_source(each) for each in found.planned}
    idle = {
        found.name_of(each): usd
        for each in found.planned
        if each.plan and each.plan.idle_devices
        for usd in [each.usd_with_idle]
        if usd is not None
    }
    with_idle = [f"{name}: {format_count(usd)} USD if idle devices are paid for too" for name, usd in idle.items()]
    return [*(f"{cluster}: {source}" for cluster, source in named.items() if source), *with_idle]


def _price_source(choice: Choice) -> str:
    return "" if choice.plan is None else price_words(choice.cluster, choice.plan.cluster, choice.plan.training)


def job_words(plan: Plan) -> str:
    """Describe the training job in one line."""
    training = plan.training
    tokens = f"{format_count(training.tokens)} tokens" if training.tokens else "no token budget"
    words = f"{work_words(training)}, {training.precision}, engine {plan.engine.name}, {tokens}"
    return "; ".join(filter(None, (words, length_words(plan))))


def explanation(found: SideBySide) -> str:
    """Explain the marks and columns of the table."""
    of = f"of {'the run' if first_plan(found).training.tokens else 'a billion tokens'}, on the devices in use"
    words = f"Nothing takes less time and less {MEASURES[found.measure]} than what is marked. Cost and energy {of}"
    price = "" if found.measure == "usd" else "; a cluster without a price: --set cluster.price"
    return f"{words}{price}; devices at rated power. `planner plan MODEL CLUSTER` proves one, with runners-up."


def side_by_side_to_dict(found: SideBySide) -> dict[str, Any]:
    """Return the choices as plain data; without a token budget, times and costs refer to `tokens` tokens."""
    first = found.planned[0].plan if found.planned else None
    best = best_at(found, rows_of(found))
    return {
        "format": 1,
        "model": first and first.model.name,
        "assumed": [asdict(each) for each in (length_assumed(first) if first else ())],
        "tokens": (first and first.training.tokens) or REFERENCE_TOKENS,
        "objective": found.objective,
        "front_by": ["run_seconds", found.measure],
        "fits": bool(found.front),
        "choices": [_choice_to_dict(each, words) for each, words in zip(found.choices, best, strict=True)],
    }


def _choice_to_dict(choice: Choice, best: str) -> dict[str, Any]:
    plan, run = choice.plan, choice.run
    start = {"cluster": choice.cluster, "nodes": choice.hosts, "fits": choice.fits, "on_front": choice.on_front}
    if plan is None or run is None:
        return {**start, "why_not": choice.why_not}
    return {
        **start,
        "best": best,
        "why_not": "" if choice.fits else f"it {_lacking(plan)}",
        "num_devices": plan.layout.world_size,
        "idle_devices": plan.idle_devices,
        "usd_with_idle": choice.usd_with_idle,
        "on": cluster_words(plan.cluster),
        "step_seconds": plan.step_seconds,
        **run_to_dict(run),
        "days": run.seconds / UNITS["seconds"]["d"],
        "price_source": _price_source(choice),
        "chance_of_fitting": choice.chance_of_fitting,
        "layout": layout_to_dict(plan.layout),
    }
