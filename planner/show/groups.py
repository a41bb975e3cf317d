"""Section on a plan's communication groups, their collectives, and the time of an all-reduce by each algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text

from planner.show.columns import Columns
from planner.show.screen import clean, indented, section, stack
from planner.show.words import line_label
from planner.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from planner.explain.communication import Asynchronous, Collectives, GroupReport

_NAMES: Final = {"halving-doubling": "butterfly (halving and doubling)"}


def collectives_section(found: Collectives) -> Group:
    """Show each kind of group with its operations, then the reason why replicas wait for each other."""
    if not found.groups:
        return section("Collectives", Text("One device talks to nobody."))
    return stack(*(_group(each) for each in found.groups), _synchronous(found.asynchronous))


def _group(found: GroupReport) -> Group:
    ranks = ", ".join(map(str, found.first_ranks[:4]))
    if found.size > 4:
        ranks += f", ... {found.first_ranks[0] + (found.size - 1) * found.stride}"
    groups = "group" if found.num_groups == 1 else "groups"
    rate = f"{format_rate(found.bytes_per_second)} for each rank"
    if any(each.operation != "send" for each in found.uses):
        rate += " in a ring"
    rows: list[tuple[str, RenderableType]] = [
        ("ranks", f"{found.num_groups:,} {groups} of {found.size:,}; the first is {ranks}"),
        ("links", f"{clean(' and '.join(found.links))}, {rate}"),
        ("hidden", _hidden(found)),
    ]
    uses = Columns(
        [
            (
                clean(each.operation),
                format_bytes(each.num_bytes),
                f"{each.times_per_step:,.0f}",
                format_seconds(each.seconds),
                format_seconds(each.seconds_per_step),
            )
            for each in found.uses
        ],
        right=(1, 2, 3, 4),
        header=("", "bytes", "times", "each", "in a step"),
    )
    parts: list[RenderableType] = [Columns(rows, wrap=(1,)), uses]
    if found.algorithms:
        parts.append(_algorithms(found))
    title = line_label(found.line) + " of experts" * found.experts
    return section(title, *parts, note=clean(f"on {found.pool}") if found.pool else "")


def _hidden(found: GroupReport) -> str:
    """State how much of the group's communication is hidden and does not lengthen the step."""
    line = line_label(found.line)
    if not found.line_hidden_seconds:
        return f"nothing: all {format_seconds(found.line_busy_seconds)} of {line} make the step longer"
    exposed = found.line_busy_seconds - found.line_hidden_seconds
    hidden = f"{format_seconds(found.line_hidden_seconds)} of {line} behind other work"
    return f"{hidden}; {format_seconds(exposed) if exposed > 0 else 'nothing'} makes the step longer"


def _algorithms(found: GroupReport) -> Columns:
    rows = [
        (
            Text(clean(_NAMES.get(each.name, each.name)), style="bold" if each.chosen else ""),
            "-" if each.seconds is None else format_seconds(each.seconds),
            "in the estimate" if each.chosen else "",
        )
        for each in sorted(found.algorithms, key=lambda each: (each.seconds is None, each.seconds or 0.0))
    ]
    return Columns(rows, right=(1,), header=(f"all-reduce of {format_bytes(found.algorithm_bytes)} by", "each", ""))


def _synchronous(found: Asynchronous | None) -> Group | None:
    """Explain why gradients are reduced before every update, and the effect of replicas that do not wait."""
    if found is None:
        return None
    why = (
        "All replicas add their gradients before they update, so that every replica computes with the same weights "
        "and a step is the step of one large batch, whatever the number of devices."
    )
    saved = f"at most {format_seconds(found.saved_seconds)}, {found.saved_share:.1%} of the step: the exposed dp comm"
    late = (
        f"{found.num_workers} replicas that do not wait apply gradients {found.staleness_updates} updates late on "
        "average; the proof of Hogwild (Recht et al., 2011) asks for sparse gradients, and these are dense"
    )
    rows: list[tuple[str, RenderableType]] = [("would save", saved), ("would cost", late)]
    if found.server_seconds is not None:
        server = f"{format_seconds(found.server_seconds)} for each push and pull, with as many servers as replicas"
        rows.append(("would send", server))
    title = "Why synchronous all-reduce"
    return section(title, Text(why), Text("Updates without waiting (Hogwild)"), indented(Columns(rows, wrap=(1,))))
