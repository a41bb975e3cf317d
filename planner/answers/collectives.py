"""Each group of a plan: its ranks, links and operations, and the cost of its reductions by other algorithms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field
from rich.text import Text

from planner.answers.operations import operations_of_step
from planner.answers.plan_inputs import job_of
from planner.cost.collectives import all_reduce_algorithms
from planner.cost.groups import group
from planner.cost.ledger import LineName
from planner.show.columns import Columns
from planner.show.screen import clean, indented, section, stack
from planner.show.words import line_label
from planner.specs.document import Document
from planner.specs.yaml import shipped_yaml
from planner.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group, RenderableType

    from planner.answers.operations import GroupShape, Operation
    from planner.cost.groups import Group as Ranks
    from planner.plan import Plan


_SAID: Final = shipped_yaml(Path(__file__).with_suffix(".yaml")).plain
_SUMS: Final = ("all-reduce", "reduce-scatter", "all-gather")
"""Operations that are an all-reduce or half of an all-reduce."""


class GroupUse(Document):
    """One operation of a group.

    seconds: the time of one run.
    num_bytes: bytes that one rank holds.
    """

    operation: str
    num_bytes: float
    times_per_step: float
    seconds: float
    seconds_per_step: float


class Algorithm(Document):
    """Seconds of one all-reduce of the group's bytes; null if the links cannot run the algorithm."""

    name: str
    seconds: float | None
    chosen: bool = Field(description="whether the estimate uses this algorithm, the cheapest of NCCL's algorithms")


class GroupReport(Document):
    """One kind of group: all groups of the kind are alike and communicate at the same time."""

    line: str
    experts: bool = Field(description="whether the group moves parameters of routed experts")
    line_busy_seconds: float = Field(
        description="busy seconds of the ledger line, which all groups with its name share"
    )
    line_hidden_seconds: float = Field(description="the part of these seconds that is hidden behind other work")
    pool: str = Field(
        default="", description="on a mixed cluster, the pool that contains the group; empty for a group across pools"
    )
    size: int
    stride: int
    num_groups: int
    first_ranks: tuple[int, ...] = Field(description="ranks of the first group; at most 16 ranks are listed")
    links: tuple[str, ...] = Field(description="levels of the network that the group crosses, innermost first")
    bytes_per_second: float = Field(description="bytes per second that one rank sends in a ring through the group")
    uses: tuple[GroupUse, ...]
    algorithm_bytes: float = Field(
        description="bytes of the all-reduce for which the algorithms are priced; 0 if there is none"
    )
    algorithms: tuple[Algorithm, ...]


class Asynchronous(Document):
    """Savings and cost of asynchronous updates (Hogwild; in practice a parameter server)."""

    saved_seconds: float = Field(description="exposed data-parallel communication of a step")
    saved_share: float
    num_workers: int
    staleness_updates: int = Field(description="updates by others between reading weights and applying a gradient")
    server_seconds: float | None = Field(
        description="seconds of a worker's push and pull, with as many servers as workers"
    )


class Collectives(Document):
    """All groups that communicate, and the alternative of asynchronous updates."""

    groups: tuple[GroupReport, ...]
    asynchronous: Asynchronous | None = Field(description="null without data parallelism")


def collectives_of(plan: Plan) -> Collectives:
    """The communication of every group of the plan in one step.

    Raises:
        InputError: the plan's options are not valid.
    """
    job = job_of(plan)
    operations = operations_of_step(job, plan.layout, plan.time)
    kinds: dict[tuple[LineName, GroupShape, bool], list[Operation]] = {}
    for each in operations:
        kinds.setdefault((each.line, each.where, each.experts), []).append(each)
    groups = tuple(_report(plan, uses) for uses in kinds.values())
    return Collectives(groups=groups, asynchronous=_asynchronous(plan, groups))


def _report(plan: Plan, uses: Sequence[Operation]) -> GroupReport:
    layout, line, where, network = plan.layout, uses[0].line, uses[0].where, uses[0].network
    priced = next(each for each in plan.time if each.name == line)
    found = group(network, where.size, where.stride, segment=layout.segment)
    summed = max((each.num_bytes for each in uses if each.kind in _SUMS), default=0.0)
    inside = where.pool and where.stride < layout.stride("pp")  # otherwise the group is between stages
    first = layout.pools.index(where.pool) * layout.stride("pp") if inside else 0
    ranks = range(first, first + where.size * where.stride, where.stride)
    stages = layout.pools.count(where.pool) if inside else layout.pp
    return GroupReport.of(
        where,
        line=line.value,
        experts=uses[0].experts,
        line_busy_seconds=float(priced.busy_seconds),
        line_hidden_seconds=float(priced.hidden_seconds),
        num_groups=stages * layout.stride("pp") // (layout.pp if line == LineName.TIED_EMBEDDING else where.size),
        first_ranks=tuple(ranks[:16]),
        links=tuple(level.link.name for level in found.levels),
        bytes_per_second=float(found.bandwidth),
        uses=tuple(
            GroupUse.of(
                each, operation=each.kind, times_per_step=each.times, seconds_per_step=each.times * each.seconds
            )
            for each in uses
        ),
        algorithm_bytes=summed,
        algorithms=_algorithms(found, summed) if summed else (),
    )


def _algorithms(where: Ranks, num_bytes: float) -> tuple[Algorithm, ...]:
    prices = {k: float(v) for k, v in all_reduce_algorithms(where, num_bytes).items()}
    offered = {name: prices[name] for name in ("ring", "tree", "in-network") if name in prices}
    chosen = min(offered, key=lambda name: offered[name])
    return tuple(
        Algorithm(name=name, seconds=seconds if math.isfinite(seconds) else None, chosen=name == chosen)
        for name, seconds in prices.items()
    )


def _asynchronous(plan: Plan, groups: Sequence[GroupReport]) -> Asynchronous | None:
    """Asynchronous updates: on average dp - 1 other workers update the weights before a worker's gradient arrives.

    Source: Recht et al., Hogwild (NIPS 2011); Dean et al., DistBelief (2012); Chen et al. (2016), section 2.
    """
    workers = plan.layout.dp
    line = next((each for each in plan.time if each.name == LineName.DP_COMM), None)
    if workers < 2 or line is None:
        return None
    saved = float(line.exposed_seconds)
    server = [
        each.seconds
        for found in groups
        if found.line == LineName.DP_COMM
        for each in found.algorithms
        if each.name == "parameter-server" and each.seconds is not None
    ]
    return Asynchronous(
        saved_seconds=saved,
        saved_share=saved / plan.step_seconds,
        num_workers=workers,
        staleness_updates=workers - 1,
        server_seconds=max(server, default=None),
    )


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
        parts.append(_algorithm_rows(found))
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


def _algorithm_rows(found: GroupReport) -> Columns:
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
    saved = f"at most {format_seconds(found.saved_seconds)}, {found.saved_share:.1%} of the step: the exposed dp comm"
    late = _SAID["late"].format(workers=found.num_workers, updates=found.staleness_updates)
    rows: list[tuple[str, RenderableType]] = [("would save", saved), ("would cost", late)]
    if found.server_seconds is not None:
        server = f"{format_seconds(found.server_seconds)} for each push and pull, with as many servers as replicas"
        rows.append(("would send", server))
    without = indented(Columns(rows, wrap=(1,)))
    return section("Why synchronous all-reduce", Text(_SAID["why"]), Text("Updates without waiting (Hogwild)"), without)
