"""Compare clusters and sizes: time and cost of a job on each, and the choices that no other choice beats."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from planner.cost.run import REFERENCE_TOKENS, devices_in_use, price_of
from planner.errors import InputError
from planner.plan import layout_to_dict, length_assumed
from planner.show.comparison_rows import (
    MEASURES,
    Measure,
    Row,
    marks,
    price_words,
    requirements_missed,
    run_to_dict,
    table,
)
from planner.show.screen import clean, section, stack
from planner.show.words import cluster_words, length_words, work_words
from planner.specs.cluster_documents import check_num_choices, cluster_tree, split_size
from planner.specs.mistakes import Mistakes
from planner.sums import sum_of
from planner.units import UNITS, format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Group

    from planner.cost.run import WholeRun
    from planner.plan import Plan
    from planner.plan_parts import ObjectiveName


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One cluster in one size.

    cluster: its name as the user gave it.
    hosts: the requested number; None if the cluster or --gpus sets it.
    why_not: the reason why no plan exists.
    on_front: whether the choice fits, meets the deadline and the budget if any choice does, and no other such choice
    beats it. A choice beats another if it is better in either time or the measure, and no worse in the remaining one.
    """

    cluster: str
    hosts: int | None = None
    plan: Plan | None = None
    why_not: str = ""
    on_front: bool = False

    @property
    def fits(self) -> bool:
        """Whether the choice has a plan and the plan fits."""
        return self.plan is not None and self.plan.fits is True

    @property
    def name(self) -> str:
        """The name in the cluster's document; without a plan, what the user gave."""
        return self.cluster if self.plan is None else self.plan.cluster.name

    @property
    def run(self) -> WholeRun | None:
        """The token budget on this cluster, or `REFERENCE_TOKENS`; None without a plan."""
        if self.plan is None:
            return None
        training = self.plan.training
        if training.tokens is None:
            training = training.model_copy(update={"tokens": REFERENCE_TOKENS})
        return replace(self.plan, training=training).run

    @property
    def usd_with_idle(self) -> float | None:
        """Cost of the run if idle devices are paid for too; None without a plan, or where a device has no price."""
        plan, run = self.plan, self.run
        prices = [(price_of(pool, plan.training), pool.num_devices) for pool in plan.cluster.pools] if plan else []
        if run is None or any(price is None for price, _ in prices):
            return None
        return run.seconds / UNITS["seconds"]["h"] * sum_of((price or 0.0) * count for price, count in prices)

    @property
    def chance_of_fitting(self) -> float | None:
        """The plan's chance of fitting; None without a plan, or if headroom replaces the chance."""
        return getattr(self.plan, "chance_of_fitting", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Choices in the order in which the user named them.

    measure: what is compared in addition to time: money, if every choice that fits has a price; else energy, if every
    device states its power; else device hours.
    objective: of each plan.
    """

    choices: tuple[Choice, ...]
    measure: Measure
    objective: ObjectiveName = "throughput"

    @property
    def planned(self) -> tuple[Choice, ...]:
        """The choices that have a plan."""
        return tuple(each for each in self.choices if each.plan is not None)

    @property
    def front(self) -> tuple[Choice, ...]:
        """The choices that no other choice beats, the fastest first."""
        return tuple(sorted((each for each in self.choices if each.on_front), key=self.costs))

    def name_of(self, choice: Choice) -> str:
        """The name of a choice, with its hosts if other sizes of the cluster are compared too.

        Where two clusters have the same name, it is what the user gave.
        """
        alike = [each for each in self.choices if each.name == choice.name]
        name = choice.name if len({each.cluster for each in alike}) == 1 else choice.cluster
        several = sum(each.cluster == choice.cluster for each in self.choices) > 1
        return f"{name} x {choice.hosts}" if several and choice.hosts else name

    def costs(self, choice: Choice) -> tuple[float, float]:
        """Seconds of the run, and its money, energy or device hours (`measure`)."""
        run = choice.run
        assert run is not None, "a choice without a plan costs nothing"
        return run.seconds, float(getattr(run, self.measure) or 0.0)


def sized_clusters(
    clusters: Sequence[str], nodes: int | Sequence[int] | None, gpus: int | None
) -> list[tuple[str, int | None]]:
    """Each cluster with each number of hosts that it is compared with; None if the cluster or `gpus` sets its size.

    Raises:
        InputError: a cluster is unknown or has two sizes, or there are too many choices; all mistakes are listed.
    """
    sizes = [nodes] if nodes is None or isinstance(nodes, int) else [*nodes]
    check_num_choices(len(set(clusters)) * len(sizes))
    mistakes, given = Mistakes(), {"--nodes": nodes, "--gpus": gpus}
    sized = [option for option, size in given.items() if size is not None]
    for name in clusters:
        mistakes.attempt(cluster_tree, name)
        if sized and split_size(name)[1]:
            mistakes.add(f"{sized[0]} and {name} both give the size of the cluster", hint="give one of them")
    mistakes.raise_if_any()
    named = map(split_size, dict.fromkeys(clusters))
    return [(cluster, int(hosts) if hosts else size) for cluster, hosts in named for size in sizes]


def side_by_side(
    pairs: Sequence[tuple[str, int | None]],
    plan_on: Callable[[str, int | None], Plan],
    objective: ObjectiveName = "throughput",
) -> SideBySide:
    """Plan a job on each cluster in each size; a choice without a plan holds the reason.

    plan_on: plans the job on a cluster with the given number of hosts.

    Raises:
        InputError: the job cannot be planned on any cluster.
        EnvironmentProblem: a file cannot be read.
    """
    choices: list[Choice] = []
    errors: list[InputError] = []
    for cluster, hosts in pairs:
        try:
            choices.append(Choice(cluster=cluster, hosts=hosts, plan=plan_on(cluster, hosts)))
        except InputError as error:
            errors.append(error)
            choices.append(Choice(cluster=cluster, hosts=hosts, why_not=error.mistakes[0].message))
    if errors and len(errors) == len(choices):
        raise InputError(*dict.fromkeys(mistake for error in errors for mistake in error.mistakes))
    return replace(with_front(choices), objective=objective)


def with_front(choices: Iterable[Choice]) -> SideBySide:
    """The choices, with `on_front` set."""
    choices = tuple(choices)
    found = SideBySide(choices=choices, measure=_measure([each for each in choices if each.fits]))
    fitting = [each for each in choices if each.fits]
    met = [each for each in fitting if each.run and not each.run.missed]
    costs = {id(each): found.costs(each) for each in met or fitting}

    def is_beaten(choice: Choice) -> bool:
        own = costs[id(choice)]
        return any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in costs.values())

    marked = (replace(each, on_front=id(each) in costs and not is_beaten(each)) for each in choices)
    return replace(found, choices=tuple(marked))


def _measure(choices: Sequence[Choice]) -> Measure:
    runs = [run for each in choices if (run := each.run)]
    for name in ("usd", "kilowatt_hours"):
        if runs and all(getattr(run, name) is not None for run in runs):
            return name
    return "device_hours"


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
    words = f"Nothing takes less time and less {MEASURES[found.measure][0]} than what is marked. Cost and energy {of}"
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
