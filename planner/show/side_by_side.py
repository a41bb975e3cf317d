"""Output of `planner plan MODEL A,B,C`: a comparison of clusters and sizes as a table, as data and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.text import Text

from planner.fit import chance_words
from planner.plan import layout_to_dict
from planner.search.questions.side_by_side import REFERENCE_TOKENS
from planner.show.columns import Columns, assignments
from planner.show.screen import clean, section, stack
from planner.show.words import cluster_words, short_layout
from planner.specs.cluster_documents import load_cluster
from planner.specs.library import price_source
from planner.specs.uniform import uniform_cluster
from planner.units import UNITS, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.plan import Plan
    from planner.search.questions.side_by_side import Choice, Measure, SideBySide

MEASURES: Final[dict[Measure, str]] = {
    "usd": "cost",
    "kilowatt_hours": "energy",
    "device_hours": "device hours",
}


def side_by_side_view(found: SideBySide) -> Group:
    """Show the choices as a table, with the choices that no other choice beats in bold."""
    first = found.planned[0].plan if found.planned else None
    assert first is not None, "choices without any plan are an error"
    head = Text.assemble((clean(first.model.name), "bold"))
    head.append(f" on {len(found.choices)} clusters or sizes")
    head.append(f"\n{clean(job_words(first))}", style="dim")
    header = ["cluster", "devices", time_header(first), "8 of 10", "cost", "energy", "chance", "layout"]
    rows = [_row(found, each) for each in found.choices]
    if all(each.chance_of_fitting is None for each in found.choices):
        header, rows = [*header[:6], header[7]], [[*row[:6], row[7]] for row in rows]
    last = len(header) - 1
    table = Columns(rows, right=range(1, last), wrap=(last,), optional=(3, 6, 5)[: last - 4], header=header)
    notes = [explanation(found), *price_notes(found)]
    return stack(head, section("Side by side", table), Text("\n".join(map(clean, notes)), style="dim"))


def price_notes(found: SideBySide) -> list[str]:
    """Name the price list of each price, for shipped clusters whose price the user has not changed."""
    sources = {each.cluster: source for each in found.planned if (source := _price_source(each))}
    return [f"{cluster}: {source}" for cluster, source in sources.items()]


def _price_source(choice: Choice) -> str:
    if choice.plan is None or choice.plan.training.price is not None or len(choice.plan.cluster.pools) > 1:
        return ""
    source, price = price_source(choice.cluster), choice.plan.cluster.pools[0].price
    return source if source and price == uniform_cluster(load_cluster(choice.cluster)).price else ""


def job_words(plan: Plan) -> str:
    """Describe the training job in one line."""
    training = plan.training
    batch = f"{training.global_batch_size:,} sequences of {training.sequence_length:,} tokens per step"
    tokens = f"{format_count(training.tokens)} tokens" if training.tokens else "no token budget"
    return f"{batch}, {training.precision}, engine {plan.engine.name}, {tokens}"


def time_header(plan: Plan) -> str:
    """Return the heading of the column of times."""
    return "run" if plan.training.tokens else "tokens/s"


def explanation(found: SideBySide) -> str:
    """Explain the marks and columns of the table."""
    of = "of the run" if found.planned[0].plan and found.planned[0].plan.training.tokens else "of a billion tokens"
    words = f"Nothing takes less time and less {MEASURES[found.measure]} than what is marked. Cost and energy {of}"
    price = (
        "list prices, or --set cluster.price" if found.measure == "usd" else "some have no price: --set cluster.price"
    )
    return f"{words}: {price}; devices at rated power. `planner plan MODEL CLUSTER` proves one, with runners-up."


def names_of(found: SideBySide, choice: Choice) -> str:
    """Return the name of the choice's cluster, with its size if the table has several sizes of this cluster."""
    several = sum(each.cluster == choice.cluster for each in found.choices) > 1
    return f"{choice.cluster} x {choice.hosts}" if several and choice.hosts else choice.cluster


def best_at(found: SideBySide, choice: Choice) -> str:
    """State what a choice is best at, or that no choice beats it; empty if another choice beats it."""
    if not choice.on_front:
        return ""
    quickest = choice is found.front[0]
    least = choice is min(found.front, key=lambda each: found.costs(each)[1])
    words = {"usd": "cheapest", "kilowatt_hours": "least energy", "device_hours": "fewest device hours"}
    parts = [*["fastest"] * quickest, *[words[found.measure]] * least]
    return " and ".join(parts) or "not beaten"


def time_words(choice: Choice) -> str:
    """Return the duration of the run, or tokens per second without a token budget."""
    plan, run = choice.plan, choice.run
    if plan is None or run is None:
        return ""
    return format_seconds(run.seconds) if plan.training.tokens else format_count(REFERENCE_TOKENS / run.seconds)


def band_words(choice: Choice) -> str:
    """Return the interval in which 8 of 10 runs lie; empty without an error band."""
    plan, run = choice.plan, choice.run
    if plan is None or run is None or not plan.low_step_seconds or not plan.high_step_seconds:
        return ""
    ends = [run.seconds * each / plan.step_seconds for each in (plan.low_step_seconds, plan.high_step_seconds)]
    if plan.training.tokens:
        return " to ".join(map(format_seconds, ends))
    return " to ".join(format_count(REFERENCE_TOKENS / each) for each in reversed(ends))


def figures(choice: Choice) -> tuple[str, str, str]:
    """Return cost, energy and chance of fitting as text; each is empty if it is unknown."""
    run, chance = choice.run, choice.chance_of_fitting
    if run is None:
        return "", "", ""
    usd = "" if run.usd is None else f"{format_count(run.usd)} USD"
    energy = "" if run.kilowatt_hours is None else f"{format_count(run.kilowatt_hours)} kWh"
    return usd, energy, "" if chance is None else chance_words(chance)


def _row(found: SideBySide, choice: Choice) -> list[RenderableType]:
    style = "bold" if choice.on_front else ""
    name = Text(clean(names_of(found, choice)), style=style)
    plan = choice.plan
    if plan is None:
        return [name, *[""] * 6, Text(f"cannot be planned: {clean(choice.why_not)}", style="dim")]
    words = best_at(found, choice) or ("" if choice.fits else plan.verdict)
    layout = Group(assignments(short_layout(plan.layout)), *([Text(words, style="bold")] if words else []))
    numbers = (f"{plan.layout.world_size:,}", time_words(choice), band_words(choice), *figures(choice))
    return [name, *(Text(each, style=style) for each in numbers), layout]


def side_by_side_to_dict(found: SideBySide) -> dict[str, Any]:
    """Return the choices as plain data; without a token budget, times and costs refer to `tokens` tokens."""
    first = found.planned[0].plan if found.planned else None
    return {
        "format": 1,
        "model": first and first.model.name,
        "tokens": (first and first.training.tokens) or REFERENCE_TOKENS,
        "front_by": ["run_seconds", found.measure],
        "fits": bool(found.front),
        "choices": [_choice_to_dict(each) for each in found.choices],
    }


def _choice_to_dict(choice: Choice) -> dict[str, Any]:
    plan, run = choice.plan, choice.run
    start = {"cluster": choice.cluster, "nodes": choice.hosts, "fits": choice.fits, "on_front": choice.on_front}
    if plan is None or run is None:
        return {**start, "why_not": choice.why_not}
    low, high = (
        end and run.seconds * end / plan.step_seconds for end in (plan.low_step_seconds, plan.high_step_seconds)
    )
    return {
        **start,
        "why_not": "" if choice.fits else f"it {plan.verdict}",
        "num_devices": plan.layout.world_size,
        "on": cluster_words(plan.cluster),
        "step_seconds": plan.step_seconds,
        "run_seconds": run.seconds,
        "low_run_seconds": low,
        "high_run_seconds": high,
        "days": run.seconds / UNITS["seconds"]["d"],
        "device_hours": run.device_hours,
        "usd": run.usd,
        "price_source": _price_source(choice),
        "kilowatt_hours": run.kilowatt_hours,
        "meets_deadline": run.meets_deadline,
        "chance_of_fitting": choice.chance_of_fitting,
        "layout": layout_to_dict(plan.layout),
    }
