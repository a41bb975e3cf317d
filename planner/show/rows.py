"""Facts of a plan as rows, each a name and words; tables of rows make the short answer and sections of `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from planner.cost.adapters import num_trained_params
from planner.cost.parameters import num_params
from planner.cost.run import devices_in_use
from planner.cost.transfers import unmeasured_dispatch
from planner.emit.plannable import not_run
from planner.layout import LENGTH
from planner.search.near_ties import more_or_less, slower_by
from planner.search.space.space import USUAL_SCHEDULES
from planner.show.columns import Columns, assignments
from planner.show.goodput import effective_words
from planner.show.screen import clean, indented
from planner.show.words import (
    certificate_sentence,
    layers_words,
    layout_words,
    length_words,
    limit_words,
    line_label,
    minimum_words,
    pools_words,
    proof_words,
    recompute_words,
    run_words,
    schedule_words,
    segment_words,
    short_layout,
    work_words,
)
from planner.specs.calibration import precision_class
from planner.specs.yaml import shipped_yaml
from planner.units import format_bytes, format_count, format_seconds
from planner.verdict import chance_words, fit_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.padding import Padding

    from planner.cost.ledger import StageMemory
    from planner.layout import Assumed
    from planner.plan import Plan

Words: TypeAlias = str | RenderableType
Rows: TypeAlias = "dict[str, Callable[[Plan], Words]]"
"""Rows by name; a row without words is left out."""

_MOST_KEYS: Final = 3
"""Keys that the short answer names; it counts the others."""

_SAID: Final[Any] = shipped_yaml(Path(__file__).with_suffix(".yaml")).plain


def rows_of(plan: Plan, rows: Rows) -> Padding | None:
    """Return the rows that have something to say of a plan; None if none has."""
    found = [
        (name, clean(words) if isinstance(words, str) else words) for name, of in rows.items() if (words := of(plan))
    ]
    return indented(Columns(found, wrap=(1,))) if found else None


def _layout(plan: Plan) -> Words:
    return Group(Text(layout_words(plan.layout), style="bold"), assignments(short_layout(plan.layout)))


def _loss(plan: Plan) -> Words:
    """State how the loss is computed; nothing for an unfused loss."""
    kind = plan.engine.can.losses[0] if plan.training.loss == "engine" else plan.training.loss
    return str(_SAID["loss"].get(kind, "")).format(chunks=plan.training.loss_chunks)


def _objective(plan: Plan) -> Words:
    """State what a step does besides training, and what of the objective has no price."""
    training, passes = plan.training, plan.training.ungraded_passes
    if training.objective == "next-token":
        return ""
    again = f"{passes} forward pass{'es' * (passes > 1)} without gradients for each sequence, "
    words = [training.objective, again + _SAID["reference"][training.reference_at] if passes else "no reference model"]
    words += [_SAID["rollouts"]] * training.method.generates
    words += [_SAID["engine"].format(training.rollout_memory)] * (training.rollout_memory > 0)
    return "; ".join(words)


def _trains(plan: Plan) -> Words:
    """State which parameters are trained, if some are frozen."""
    training = plan.training
    if not training.lora_rank:
        return ""
    trained, whole = num_trained_params(plan.model, training), num_params(plan.model)
    words = (
        f"{format_count(trained)} of {format_count(whole)} parameters: adapters of rank {training.lora_rank} beside "
    )
    frozen = f"the others are frozen in {training.frozen_weights.replace('16-bit', '16 bits')}"
    return f"{words}{', '.join(training.lora_targets)}; {frozen}"


def host_words(memory: Sequence[StageMemory]) -> Words:
    """State the host memory per device, for the stage that uses most; empty without offload."""
    hosts = [stage.host for stage in memory if stage.host is not None]
    if not hosts:
        return ""
    fullest = max(hosts, key=lambda host: host.total_bytes)
    parts = ", ".join(f"{line_label(line.name)} {format_bytes(float(line.num_bytes))}" for line in fullest.lines)
    over = fullest.total_bytes > fullest.limit_bytes
    limit = f"of {format_bytes(fullest.limit_bytes)} for each device; chance of fitting {chance_words(fullest.chance)}"
    return Text.assemble(parts, (f"  {limit}", "bold red" if over else "dim"))


def _idle(plan: Plan) -> Words:
    why = f": {plan.idle_reason}" if plan.idle_reason else ""
    return f"{plan.idle_devices:,} of {plan.cluster.num_devices:,} devices{why}" if plan.idle_devices else ""


def _not_searched(plan: Plan) -> Words:
    """Name the values of a given layout that no search tries unless they are pinned (docs/how-it-decides.md)."""
    layout, can, offload = plan.layout, plan.engine.can, "none" if plan.options.allow_offload else plan.layout.offload
    divides = plan.training.sequence_length // layout.cp % layout.tp == 0
    listed = [policy for policy in dict.fromkeys(layout.recompute) if policy not in can.recompute]
    found = [
        *[f"schedule={layout.schedule}"] * (layout.schedule not in USUAL_SCHEDULES),
        *["sp=0"] * (layout.tp > 1 > layout.sp and divides and 1 in can.sp),
        *[f"offload={offload} without --allow-offload"] * (offload != "none"),
        *(f"recompute={policy}" for policy in listed if not policy.startswith("full:")),
    ]
    return f"`planner plan` tries {' and '.join(found)} only if pinned" * bool(found and not plan.certificate)


def _keys(kind: str, form: Callable[[Assumed], str]) -> Callable[[Plan], Words]:
    """Return the function that lists the values of a kind, each in the words of `form`."""
    return lambda plan: "; ".join(form(each) for each in plan.assumed if each.kind == kind)


def _unknown(plan: Plan) -> Words:
    """Name the keys of a foreign file that leave the verdict unknown, each with the option that settles it."""
    found = _keys("open", lambda each: f"{each.key}={each.value}: {each.rule} ({each.settled_by})")(plan)
    return Text(clean(found), style="bold red") if found else ""


_misspelt = _keys("misspelt", lambda each: f"{each.key}={each.value} ({each.rule})")


def _counted(plan: Plan) -> Words:
    """Count the assumed values and the keys without a price, and name the first ones."""
    told = []
    for kind in ("assumed", "not priced"):
        found = [f"{each.key}={each.value}" for each in plan.assumed if each.kind == kind and each.key != LENGTH]
        more = ", ..." * (len(found) > _MOST_KEYS)
        told += [f"{len(found):,} {kind} ({', '.join(found[:_MOST_KEYS])}{more})"] if found else []
    return "; ".join(told)


def _own(plan: Plan) -> Words:
    """Compare the layout of the file from which the job was read; nothing for any other job."""
    own = plan.own
    if own is None:
        return ""
    if own.layout == plan.layout:
        return "has this layout"
    words = f"{format_seconds(own.step_seconds)}, {format_bytes(own.peak_bytes)}: {own.reason}"
    return Group(assignments(short_layout(own.layout)), Text(clean(words)))


def _step(plan: Plan) -> Words:
    in_all = plan.training.step_tokens / plan.step_seconds
    rate = f"{format_count(plan.tokens_per_second_per_device)} tokens/s per device, {format_count(in_all)} in all"
    return Text.assemble((format_seconds(plan.step_seconds), "bold"), f"; {rate}; MFU {plan.mfu:.1%}")


def _memory(plan: Plan) -> Words:
    return Text.assemble((plan.verdict, "" if plan.fits else "bold red"), f": {clean(fit_words(plan))}")


def _chosen_batch(plan: Plan) -> Words:
    if plan.batch is None:
        return ""
    batch = plan.batch
    sizes = f"{batch.chosen:,} of {batch.least:,} to {batch.most:,}"
    return f"{sizes}; {batch.advice.extra_tokens - 1:.0%} more tokens than a small batch"


def _kinds(plan: Plan) -> dict[str, str]:
    """Return the words for each property that makes a plan like a published run, or unlike all of them."""
    precision = f"{kind} bits" if (kind := precision_class(plan.training.precision)) == "16" else kind
    return {
        "device": " and ".join(pool.device.name for pool, _ in devices_in_use(plan.cluster, plan.layout)),
        "engine": f"engine {plan.engine.name}",
        "axes": f"axes {plan.band.axes if plan.band else ''}",
        "precision": precision,
        "experts": f"layers {'without' if plan.model.moe is None else 'with'} experts",
    }


def _is_calibrated(plan: Plan) -> bool:
    return any(each.low and each.high for each in plan.calibration)


def _num_runs(count: int) -> str:
    return f"{count:,} run{'s' if count != 1 else ''}"


def _band(plan: Plan) -> Words:
    """State the error band of the step time, and in a few words what it rests on."""
    band, low, high = plan.band, plan.low_step_seconds, plan.high_step_seconds
    if band is None or not low or not high:
        return "none: no published run is on such devices"
    kinds = _kinds(plan)
    new = ", ".join(kinds.get(key, key) for key in band.unseen)
    if _is_calibrated(plan):
        rests = f"rests on {_num_runs(band.num_near)} of --calibration{f'; wider: none has {new}' if new else ''}"
    elif new:
        rests = f"wider: no run behind it has {new}"
    else:
        rests = f"rests on {_num_runs(band.num_near)} like it" if band.num_near else "no run behind it is quite like it"
    span = f"8 of 10 runs: {format_seconds(low)} to {format_seconds(high)}"
    return f"{span}; {rests}{f'; one family of publishers, {band.family}' if band.family else ''}"


def _like_it(plan: Plan) -> Words:
    """Count the published runs that are like the plan in every property."""
    band, kinds = plan.band, _kinds(plan)
    if band is None or _is_calibrated(plan):
        return ""
    kinds["device"] = f"on {kinds['device']}"
    return f"{_num_runs(band.num_near)} {', '.join(kinds.values())}; others count less, the less similar they are"


def _publishers(plan: Plan) -> Words:
    words = "the band is wider because the corrections rest on one family of publishers"
    return f"{words}, {plan.band.family}" if plan.band and plan.band.family else ""


def _unmeasured(plan: Plan) -> list[str]:
    """Return the devices whose efficiencies nobody measured; they have the efficiencies of their generation."""
    devices = [pool.device for pool, _ in devices_in_use(plan.cluster, plan.layout)]
    return [f"{each.name} those of {each.generation}" for each in devices if "efficiency.matmul" in each.assumed]


def _device(plan: Plan) -> Words:
    found = _unmeasured(plan)
    return f"takes the efficiencies of its generation, which nobody measured on it: {' and '.join(found)}" * bool(found)


def _narrower(plan: Plan) -> Words:
    """State what would narrow the band where device or engine have no evidence, and how much it did elsewhere."""
    band, is_assumed = plan.band, bool(_unmeasured(plan))
    if band is None or _is_calibrated(plan) or not (is_assumed or {"device", "engine"} & set(band.unseen)):
        return ""
    from planner.evidence import NARROWED

    measure = "`planner measure` replaces assumed efficiencies in minutes; " * is_assumed
    most = max(NARROWED)
    learn = (
        f"it would be with {most} logs of your own runs (`planner calibrate`): on published clusters high / low fell"
    )
    return f"{measure}{learn} from {NARROWED[0]:.2f} to {NARROWED[most]:.2f}"


def _with_runs(plan: Plan) -> Words:
    """Name the layout that published runs speak for, if none speaks for the plan's."""
    other = plan.with_runs
    if other is None or plan.band is None:
        return ""
    layers = "without" if plan.model.moe is None else "with"
    none = f"no published run of {plan.engine.name} on layers {layers} experts has axes {plan.band.axes}"
    slower = slower_by(other.step_seconds / plan.step_seconds - 1)
    step = f"{format_seconds(other.step_seconds)}, {slower}, which is inside this plan's band"
    runs = f"{_num_runs(other.num_runs)} with axes {other.axes}, by {', '.join(other.families)}"
    words = f"{none}; the best with runs takes {step}, and rests on {runs}:"
    return Group(Text(clean(words)), assignments(short_layout(other.layout)))


def _label(plan: Plan) -> Words:
    """State how much the engine's own calibration changes the step time, if the effect is large."""
    label = plan.engine_label
    if label is None:
        return ""
    device, engine = plan.cluster.pools[0].device.name, plan.engine.name
    runs = _num_runs(label.num_runs) if label.num_runs else "no run"
    if plan.band and plan.band.family:
        words = f"corrections rest on one family of publishers, {plan.band.family} ({runs} on {device}), and move the "
        return f"{words}forecast by {abs(label.share):.0%}; this forecast is not compared with those for other engines"
    moved = f"{more_or_less(label.share, 'slower', 'faster')} than with the corrections that all engines share"
    return f"forecast {moved}; no feature of {engine} explains the difference, which rests on {runs} on {device}"


def _dispatch(plan: Plan) -> Words:
    """Say that nobody measured the dispatcher of tokens on this network."""
    link = unmeasured_dispatch(plan.model, plan.engine, plan.cluster.pools[0], plan.layout)
    return f"DeepEP or HybridEP sends tokens to experts; its gain over an all-to-all is not measured on {link}" * bool(
        link
    )


ANSWER: Final[Rows] = {
    "unknown": _unknown,
    "layout": _layout,
    "schedule": schedule_words,
    "objective": _objective,
    "trains": _trains,
    "on the host": lambda plan: host_words(plan.memory),
    "not run": not_run,
    "not searched": _not_searched,
    "idle": _idle,
    "misspelt": _misspelt,
    "assumed": _counted,
    "batch": _chosen_batch,
    "step": _step,
    "your file": _own,
    "band": _band,
    "narrower": _narrower,
    "with runs": _with_runs,
    "memory": _memory,
    "whole run": run_words,
    "effective": effective_words,
    "proof": proof_words,
    "warning": lambda plan: "; ".join(plan.certificate.warnings) if plan.certificate else "",
}
"""The short answer, shared by `plan` and `explain`; what would mislead if it were left out stands here."""

LAYOUT: Final[Rows] = {
    "layout": _layout,
    "schedule": schedule_words,
    "pools": lambda plan: pools_words(plan.layout) if plan.layout.pools else "",
    "racks": lambda plan: segment_words(plan.cluster.pools[0], plan.layout) if plan.layout.segment else "",
    "layers": lambda plan: layers_words([plan.layout.layers_of_stage(stage) for stage in range(plan.layout.pp)]),
    "recompute": lambda plan: recompute_words(plan.layout),
    "on the host": lambda plan: host_words(plan.memory),
    "objective": _objective,
    "loss": _loss,
    "feed-forward": lambda plan: _SAID["tiles"].format(plan.training.mlp_tiles) if plan.training.mlp_tiles > 1 else "",
    "samples": lambda plan: _SAID["samples"].format(n) if (n := plan.training.mean_sample_tokens) else "",
    "CUDA graphs": lambda plan: _SAID["graphs"].get(plan.training.cuda_graphs, ""),
    "experts": lambda plan: _SAID["overlap"] if plan.training.expert_overlap else "",
    "trains": _trains,
    "not run": not_run,
    "idle": _idle,
}

FACTS: Final[Rows] = {
    "layout": lambda plan: layout_words(plan.layout),
    "as an option": lambda plan: short_layout(plan.layout),
    **{name: LAYOUT[name] for name in ("schedule", "layers", "recompute", "racks", "not run")},
    "work": lambda plan: "; ".join(filter(None, (work_words(plan.training), length_words(plan)))),
    "precision, engine": lambda plan: f"{plan.training.precision}, {plan.engine.name}",
    "memory": lambda plan: f"{plan.verdict}: {fit_words(plan)}; {limit_words(plan)}",
    "MFU counts": lambda plan: plan.flops_convention,
    "whole run": run_words,
}
"""Facts at the top of the page."""

BAND: Final[Rows] = {
    "band": _band,
    "like it": _like_it,
    "publishers": _publishers,
    "device": _device,
    "engine": _label,
    "dispatch": _dispatch,
    "narrower": _narrower,
}

PROOF: Final[Rows] = {
    "proof": certificate_sentence,
    "minimum": minimum_words,
    "warning": lambda plan: "; ".join(plan.certificate.warnings) if plan.certificate else "",
}

ASSUMED: Final[Rows] = {
    "unknown": _unknown,
    "assumed": _keys("assumed", str),
    "misspelt": _misspelt,
    "not priced": _keys("not priced", lambda each: f"{each.key}={each.value}"),
}
