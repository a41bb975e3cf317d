"""Words for layouts, stages, ledger lines and other parts of a plan."""

from __future__ import annotations

import sys
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Final

from planner.cost.run import devices_in_use
from planner.cost.segments import num_domains
from planner.layout import even_split, format_layout, shortened_list
from planner.units import format_bytes, format_count, format_seconds, format_usd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.cost.ledger import LineName
    from planner.cost.run import WholeRun
    from planner.layout import Layout
    from planner.plan import Plan
    from planner.plan_parts import Certificate, ObjectiveName
    from planner.specs.cluster import AnyCluster, ClusterSpec
    from planner.specs.job import Job
    from planner.specs.training import TrainingSpec

_DEFAULTS: Final = {
    "cp": "1", "ep": "1", "hsdp": "1", "mbs": "1", "interleave": "1", "offload": "none",
}  # fmt: skip
"""Values of omitted keys that `--layout` assumes for every engine.

Keys whose default depends on other keys are missing; `short_layout` handles them.
"""


_BETTER: Final = {
    "throughput": ("", "is faster", "a layout may be up to {} faster"),
    "cost": ("", "costs less", "a layout may cost up to {} less"),
    "gpus": (" on as few devices", "is faster", "a layout may need up to {} fewer devices"),
    "memory": (" with as little memory", "is faster", "a layout with as little memory may be up to {} faster"),
}
"""For each objective: which layouts, what none of them does if the plan is optimal, and what one may do otherwise."""


def saved_words(objective: ObjectiveName, step_seconds: float) -> str:
    """Name the quantity of which the sensitivity table gives the saved share."""
    step = f"the {format_seconds(step_seconds)} step"
    if objective == "gpus":
        return f"share that is saved of the devices, or of {step} on as many devices"
    return f"share of the cost of {step} that is saved" if objective == "cost" else f"share of {step} that is saved"


def line_label(name: LineName | str) -> str:
    """Return the name of a ledger line for people: `tp_comm` is "tp comm"."""
    return str(name).replace("_", " ")


def short_layout(layout: Layout) -> str:
    """Return the layout without the keys that `--layout` assumes for every engine; `parse_layout` restores it."""
    parts = dict(part.split("=", 1) for part in format_layout(layout).split(","))
    num_layers = sum(layout.layers_per_stage)
    assumed = _DEFAULTS | {
        "schedule": "interleaved" if layout.interleave > 1 else "1f1b",
        "sp": "" if layout.tp > 1 else "0",
        "zero": "" if layout.dp * layout.cp > 1 else "0",
        "etp": "" if layout.ep > 1 else "1",
    }
    if num_layers % layout.num_chunks == 0:
        assumed["layers_per_stage"] = shortened_list(
            "/".join(map(str, even_split(num_layers, layout.pp, layout.interleave)))
        )
    shown = {key: text for key, text in parts.items() if text != assumed.get(key)}
    return ",".join(f"{key}={text}" for key, text in shown.items()) or "tp=1"


def layout_words(layout: Layout) -> str:
    """Describe the layout in a sentence: the degree of each axis, and the ZeRO stage."""
    axes = ((layout.tp, "tensor"), (layout.cp, "context"), (layout.ep, "expert"), (layout.dp, "data"))
    parts = [f"{degree}-way {name} parallel" for degree, name in axes if degree > 1]
    if layout.pp > 1:
        parts.insert(1 if layout.tp > 1 else 0, f"{layout.pp}-stage pipeline")
    if layout.zero:
        replicas = f" in {layout.hsdp} replicas" if layout.hsdp > 1 else ""
        parts.append(f"ZeRO-{layout.zero}{replicas}")
    return ", ".join(["one device"] * (layout.world_size == 1) + parts)


def schedule_words(plan: Plan) -> str:
    """Name the pipeline schedule and its number of microbatches."""
    layout = plan.layout
    num = layout.num_microbatches(plan.training.global_batch_size)
    batches = f"{num:,} microbatch{'es' if num != 1 else ''} of {layout.mbs}"
    if layout.pp == 1:
        return batches
    chunks = f", {layout.interleave} chunks per stage" if layout.interleave > 1 else ""
    not_run = "" if layout.schedule in plan.engine.pipeline.schedules else f" (which {plan.engine.name} does not run)"
    return f"{layout.schedule}{not_run}{chunks}, {batches}"


def cluster_words(cluster: AnyCluster) -> str:
    """Describe the cluster: number and kind of devices and number of hosts, pool by pool in a mixed cluster."""
    if len(cluster.pools) > 1:
        return f"{', '.join(map(cluster_words, cluster.pools))} of {cluster.name}"
    (pool,) = cluster.pools
    hosts = f"{cluster.hosts:,} host{'s' if cluster.hosts != 1 else ''} of {pool.devices_per_host}"
    return f"{cluster.num_devices:,} x {pool.device.name} ({cluster.name}, {hosts})"


def layers_words(layers: Sequence[int]) -> str:
    """List the layers of each stage, with equal neighbours joined: 24, 24, 24, 23 becomes "3 x 24, 23 per stage"."""
    runs = [(value, len(list(group))) for value, group in groupby(layers)]
    if len(runs) == 1:
        return f"{layers[0]} on each stage" if len(layers) > 1 else f"{layers[0]}"
    return ", ".join(f"{count} x {value}" if count > 1 else f"{value}" for value, count in runs) + " per stage"


def slowest_words(plan: Plan) -> str:
    """State whose lines the time of a step has, and how far this stage is from the others; empty without a pipeline."""
    if plan.layout.pp == 1:
        return ""
    slowest, *last = dict.fromkeys(line.stage for line in plan.time)
    after = f"; after the last microbatch, of stage {last[0]}" if last else ""
    return f"lines of stage {slowest}, {plan.slowest_of_mean:.2f} times the mean of all stages{after}"


def recompute_words(layout: Layout) -> str:
    """Name the recompute policy, stage by stage if stages differ."""
    policies = [layout.recompute_of_stage(stage) for stage in range(layout.pp)]
    if len(set(policies)) == 1:
        return policies[0]
    runs = [(policy, [stage for stage, _ in group]) for policy, group in groupby(enumerate(policies), lambda i: i[1])]
    return ", ".join(f"{policy} on {stage_range(stages)}" for policy, stages in runs)


def stage_range(stages: Sequence[int]) -> str:
    """Name consecutive stages: `stage 3` or `stages 2..6`."""
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}..{stages[-1]}"


def fold_runs(items: Sequence[Any], alike: Callable[[Any], Any], most: int = sys.maxsize) -> list[list[Any]]:
    """Group consecutive items for which `alike` returns the same value, and neighbours so that there are `most`."""
    groups = [list(group) for _, group in groupby(items, alike)]
    size = -(-len(groups) // most)
    return [list(chain(*groups[first : first + size])) for first in range(0, len(groups), size or 1)]


def work_words(training: TrainingSpec) -> str:
    """Describe the work of a step."""
    each = "pairs of sequences" if training.method.sequences > 1 else "sequences"
    return f"{training.global_batch_size:,} {each} of {training.sequence_length:,} tokens per step"


def length_words(of: Plan | Job) -> str:
    """State that the sequence length is the model's own; empty if it was given."""
    length = of.training.sequence_length
    return f"sequence length {length:,} is the model's own; --seq-len sets another" * of.own_length


def certificate_sentence(plan: Plan) -> str:
    """State the search's proof and the number of examined layouts; empty for a layout that the user chose.

    A plan is called optimal only if no layout beats it. If the plan is another layout instead, the sentence compares
    it with the proven minimum. If the proof was made with the formulas of another version, the sentence says that it
    does not cover the figures shown.
    """
    certificate, other = plan.certificate, plan.proved_by
    if certificate is None:
        return ""
    said = f"{_claim(plan, certificate)} {_counts(certificate)}"
    if certificate.not_searched:
        said = f"{said} Not searched: {'; '.join(certificate.not_searched)}."
    if other is None:
        return said
    return f"Proved by planner {other.planner_version} with other formulas, not of the figures shown; it said: {said}"


def proof_words(plan: Plan) -> str:
    """State in one line what the search proved; empty for a layout that the user chose."""
    certificate, least = plan.certificate, plan.minimum
    if certificate is None:
        return ""
    if plan.proved_by:
        return f"by planner {plan.proved_by.planner_version} with other formulas, not of these figures"
    near, (which, better, may) = certificate.recommendation, _BETTER[certificate.objective]
    within = f"within {100 * near.within:.3g}%" if near else ""
    none, more = "" if plan.fits else "none fits; ", "; not all was searched" if certificate.not_searched else ""
    if certificate.status != "optimal":
        words = f"best found ({certificate.status}): {may.format(f'{_gap(plan, certificate):.2%}')}"
    elif none:
        words = f"of the likeliest to fit no other{which} {better}"
    elif near and least and least.layout != plan.layout:
        listed = f"easiest to run of {near.num_listed:,} layouts"
        words = f"{listed} {within} of the proven minimum, {format_seconds(least.step_seconds)}"
    else:
        easier = f"; easiest of {near.num_listed:,} {within}" if near and near.num_listed > 1 else ""
        words = f"optimal by forecast of all layouts searched{which}{easier}"
    return f"{none}{words}{more}"


def _gap(plan: Plan, certificate: Certificate) -> float:
    """Return the share by which an unknown layout could at most be better than the plan."""
    return 1 - (1 - certificate.gap) / (1 + (plan.minimum.above if plan.minimum else 0.0))


def _claim(plan: Plan, certificate: Certificate) -> str:
    near, (which, better, may) = certificate.recommendation, _BETTER[certificate.objective]
    none = "" if plan.fits else "None fits. "
    if certificate.status != "optimal":
        gap = _gap(plan, certificate)
        easiest = f" It is the easiest to run within {near.within:.3g} of the best that was found." if near else ""
        return f"{none}Not proved optimal ({certificate.status}): {may.format(f'{gap:.2%}')}.{easiest}"
    layout = f"layout{which} in the search space {better}"
    if none:
        return f"{none}Of the layouts that are likeliest to fit, by the forecast no other {layout}."
    if near is None or plan.minimum is None:
        return f"Optimal: by the forecast no other {layout}."
    listed = f"{near.num_listed:,} layouts within {100 * near.within:.3g}%"
    if plan.minimum.layout == plan.layout:
        return f"Optimal: by the forecast no other {layout}. It is the easiest to run of {listed} of it."
    least = f"{short_layout(plan.minimum.layout)} ({format_seconds(plan.minimum.step_seconds)})"
    return f"The easiest to run of {listed} of the proven minimum: by the forecast no {layout} than {least}."


def minimum_words(plan: Plan) -> str:
    """State the proven minimum, how much better it is, and what the plan has for it; empty without a search."""
    least = plan.minimum
    if least is None:
        return ""
    if least.layout == plan.layout:
        return "the plan itself"
    faster = f"{format_seconds(least.step_seconds)}, {least.above:.1%} better, {format_bytes(least.peak_bytes)}"
    return f"{short_layout(least.layout)}: {faster}; the plan has {least.reason}"


def _counts(certificate: Certificate) -> str:
    """State how many layouts lower bounds ruled out, and which method decided among the others."""
    if certificate.status in ("interrupted", "out of time"):
        return ""
    num_legal, num_decided = certificate.num_legal, certificate.num_decided
    cuts, whole = certificate.num_cuts, certificate.num_cuts_pruned
    of_cuts = f"{whole:,} of {cuts:,} ways to cut the devices, and " if whole else ""
    ruled_out, memory = num_legal - num_decided, certificate.num_pruned.get("memory", 0)
    counts = {"cannot fit": memory, "cannot be better": ruled_out - memory}
    why = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
    rest = f"{' of the others' if whole else ''}{f' ({why})' if why else ''}"
    bounds = f"Lower bounds rule out {of_cuts}{ruled_out:,} of {num_legal:,} configurations{rest}."
    if certificate.num_bounds_checked:
        bounds += f" {certificate.num_bounds_checked:,} of these were solved all the same, and no bound was too high."
    if certificate.num_layouts_drawn:
        bounds += f" {certificate.num_layouts_drawn:,} layouts drawn by the rules of `explain` are no better."
    left = f"the {num_decided:,} that are left" if num_decided != 1 else "the one that is left"
    if certificate.solver == "dynamic program":
        return f"{bounds} A dynamic program alone decided on {left}."
    solver = certificate.solver.upper()
    if certificate.status == "time limit":
        return f"{bounds} {solver} did not finish on {left}; the plan is a dynamic program's optimum of them."
    return f"{bounds} {solver} and a dynamic program decided on {left}, each on its own, and agree on the best."


def run_words(plan: Plan) -> str:
    """State the duration and the cost of the whole token budget; empty without a budget."""
    run = plan.run
    if run is None:
        return ""
    amounts = [f"{format_count(run.device_hours)} device hours"]
    if run.usd is not None:
        amounts.append(f"{format_count(run.usd)} USD")
    if run.kilowatt_hours is not None:
        amounts.append(f"{format_count(run.kilowatt_hours)} kWh at rated power")
    span = ""
    if run.low_seconds and run.high_seconds:
        span = f" ({format_seconds(run.low_seconds)} to {format_seconds(run.high_seconds)} in 8 of 10 runs)"
    words = f"{format_count(run.tokens)} tokens in {format_seconds(run.seconds)}{span}: {', '.join(amounts)}"
    words += " of the devices in use" * bool(plan.idle_devices)
    return "; ".join((words, *requirement_words(run)))


def requirement_words(run: WholeRun) -> list[str]:
    """State for the deadline and for the budget, if they are given, whether the run meets it and with which chance."""
    words = []
    for what, is_met, chance in (
        (f"the deadline of {format_seconds(run.deadline_seconds or 0)}", run.meets_deadline, run.deadline_chance),
        (f"the budget of {format_usd(run.budget_usd or 0)}", run.meets_budget, run.budget_chance),
    ):
        if is_met is not None and chance is None:
            words.append(f"{'meets' if is_met else 'MISSES'} {what}")
        elif is_met is not None and chance is not None:
            words.append(f"{f'meets {what} in' if is_met else f'MISSES {what}: met in'} {of_ten(chance)}")
    return words


def of_ten(chance: float) -> str:
    """Return a chance as `8 of 10 runs`, rounded down; never `0 of 10` or `10 of 10`, which would be promises."""
    count = int(10 * chance + 1e-9)
    return "fewer than 1 of 10 runs" if count == 0 else f"{'more than ' if count > 9 else ''}{min(count, 9)} of 10 runs"


def percent(share: float) -> str:
    """Format a share in whole percent; a share above zero never becomes 0 %."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def change(share: float) -> str:
    """Format a relative change: `+3.1%`, `-12%`; a change that rounds to zero becomes a dash."""
    digits = 1 if abs(share) < 0.0995 else 0
    text = f"{share:+,.{digits}%}"
    return "-" if text.strip("+-") in ("0.0%", "0%") else text


def limit_words(plan: Plan) -> str:
    """State the memory limit of one device, for each kind of device that the plan uses."""
    limits = dict(zip(plan.layout.pools or ("",), (stage.limit_bytes for stage in plan.memory), strict=False))
    used = [(limits.get(pool.name, limits.get("", 0.0)), pool) for pool, _ in devices_in_use(plan.cluster, plan.layout)]
    limit, first = used[0]
    share = f"{1 - limit / first.device.memory:.0%}"
    if plan.options.headroom is None:
        each = ", ".join(f"{format_bytes(limit)} of {format_bytes(pool.device.memory)}" for limit, pool in used)
        return f"limit {each}, where the chance is {1 - plan.options.risk:.3g}"
    if len(used) == 1:
        return f"limit {format_bytes(limit)}, {share} of {format_bytes(first.device.memory)} left free"
    each = ", ".join(f"{format_bytes(limit)} on {pool.name}" for limit, pool in used)
    return f"limit {each}, {share} left free"


def segment_words(cluster: ClusterSpec, layout: Layout) -> str:
    """State how many hosts the layout uses in each scale-up domain, and the number of domains."""
    count, most = int(num_domains(cluster, layout.world_size, layout.segment)), cluster.hosts_per_domain
    name = cluster.links[0].name
    domains = f"{count:,} {name} domain{'s' if count != 1 else ''}"
    taken = f"all {most}" if layout.segment == most else f"{layout.segment} of the {most}"
    assumed = "" if cluster.domains else "; as many are assumed to be free"
    return f"{taken} hosts of each of {domains}{assumed}"


def pools_words(layout: Layout) -> str:
    """State which stages run on which pool of a mixed cluster."""
    runs = groupby(range(layout.pp), key=lambda stage: layout.pools[stage])
    return ", ".join(f"{stage_range(list(stages))} on {pool}" for pool, stages in runs)
