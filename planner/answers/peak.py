"""The moment of a stage's peak memory, its activations then, its expected range, and changes that save memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field
from rich.text import Text

from planner.answers.layout_remedies import FittingChange, single_changes
from planner.answers.operations import stage_at
from planner.cost.activations import (
    activation_terms,
    device_activation_bytes,
    held_of_stage,
    kept_activation_bytes,
    kept_share,
    sent_bytes,
)
from planner.cost.estimate import estimate
from planner.cost.ledger import Verdict, worst_stage
from planner.cost.memory_band import memory_distribution
from planner.cost.optimizers import update_bytes
from planner.cost.stage import by_policy, layer_kinds, pool_indices, stages_of
from planner.cost.transients import (
    gathered_layers,
    lasting_buffer_bytes,
    layer_backward_bytes,
    loss_bytes,
    recompute_bytes,
    transient_bytes,
)
from planner.cost.vision import tower_bytes_at_peak
from planner.layout import offloads_activations, offloads_optimizer
from planner.plan_parts import WrittenLayout
from planner.search.space.rules import broken_rules
from planner.show.columns import Columns, assignments
from planner.show.figures import bytes_scale
from planner.show.screen import clean, section
from planner.show.words import change, percent, short_layout
from planner.specs.document import Document
from planner.specs.recompute import modules_in
from planner.sums import sum_of
from planner.units import format_bytes, format_seconds
from planner.verdict import chance_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Group, RenderableType

    from planner.cost.stage import Stage
    from planner.layout import Layout
    from planner.plan import Plan
    from planner.specs.job import Job, PoolJob


class ActivationPart(Document):
    """One kind of tensor that a stage holds at its peak; activations are of all its layers and microbatches."""

    name: str
    num_bytes: float


class StagePeak(Document):
    """The moment at which a stage is fullest, and its activations at that moment."""

    stage: int
    moment: str
    microbatches_in_flight: float
    bytes_per_microbatch: float = Field(description="bytes of one more microbatch in flight")
    activations: tuple[ActivationPart, ...] = Field(description="largest first; their sum is the ledger's line")
    transients: tuple[ActivationPart, ...] = Field(
        default=(), description="what is alive for a short time, largest first; their sum is the ledger's line"
    )


class Alternative(Document):
    """A layout with one key changed, and its memory and time."""

    change: str
    layout: WrittenLayout
    broken_rules: tuple[str, ...] = Field(description="why the layout cannot run; nothing is priced then")
    peak_bytes: float | None
    fits: bool
    step_seconds: float | None
    verdict: Verdict | None = None
    chance_of_fitting: float | None = None
    missing_bytes: float = Field(
        default=0.0,
        description="bytes of the worst stage above the limit; above its host's limit if the host's memory is too "
        "small",
    )
    missing_on_host: bool = False


# --- the moment -------------------------------------------------------------------------------------------------


def peaks_of(job: Job, layout: Layout) -> tuple[StagePeak, ...]:
    """The peak of each stage, in the backward pass of the first microbatch that ends (cost/memory.py)."""
    stages, pools = stages_of(job, layout), job.pools
    own = [pools[pool] for pool in pool_indices(job, layout)]
    return tuple(_peak_of_stage(own[r], layout, stage_at(stages, r)) for r in range(layout.pp))


def _peak_of_stage(job: PoolJob, layout: Layout, stage: Stage) -> StagePeak:
    m = layout.num_microbatches(job.training.global_batch_size)
    moments = held_of_stage(job, layout, stage, m)
    stored = device_activation_bytes(job, layout, stage, m) + tower_bytes_at_peak(job, layout, stage, m)
    found = [_held_at(job, layout, stage, float(before), float(waiting)) for before, waiting in moments]
    in_flight, each, parts = max(found, key=lambda moment: sum_of(moment[2].values()))
    return StagePeak(
        stage=int(stage.index),
        moment=_moment(job, layout, stage),
        microbatches_in_flight=in_flight,
        bytes_per_microbatch=each * (1 + job.engine.memory.fragmentation),
        activations=_ordered(parts),
        transients=_ordered(_transients(job, layout, stage, float(stored))),
    )


def _ordered(parts: Mapping[str, float]) -> tuple[ActivationPart, ...]:
    ordered = sorted(parts.items(), key=lambda part: (-part[1], part[0]))
    return tuple(ActivationPart(name=name, num_bytes=size) for name, size in ordered if size)


def _transients(job: PoolJob, layout: Layout, stage: Stage, stored: float) -> dict[str, float]:
    """The parts of the ledger's transients, by name: those of the loss, of one layer or of the update, and the rest.

    stored: bytes of the activations at the peak.
    """
    total, lasting = float(transient_bytes(job, layout, stage, stored)), float(lasting_buffer_bytes(job, layout))
    update = 0.0 if offloads_optimizer(layout) else float(update_bytes(job, layout, stage)) - stored
    loss, layer = (float(of(job, layout, stage)) for of in (loss_bytes, layer_backward_bytes))
    if update >= total - lasting:
        return {"update of the weights, beyond the activations": update, "buffer for gradients": lasting}
    again, gathered = (float(of(job, layout, stage)) for of in (recompute_bytes, gathered_layers))
    parts = {"logits and loss": loss}
    if layer > loss:
        rest = layer - again - gathered
        parts = {"gathered weights of layers": gathered, "one layer computed again": again, "gradients of it": rest}
    rest = total - max(loss, layer)
    return parts | {"embedding, head and buffers" if rest > 0 else "gradients that do not exist yet": rest}


def _held_at(
    job: PoolJob, layout: Layout, stage: Stage, before: float, waiting: float
) -> tuple[float, float, dict[str, float]]:
    """Number of held microbatches, bytes of one microbatch, and bytes of each tensor over all microbatches.

    before: microbatches whose backward pass has not begun; they hold the tensors that the recompute policy keeps.
    waiting: microbatches that wait for the gradients of their weights; they hold more (cost/activations.py).
    """
    sent = float(sent_bytes(job, layout, stage))
    if offloads_activations(layout):
        m = layout.num_microbatches(job.training.global_batch_size)
        on_the_way = float(device_activation_bytes(job, layout, stage, m)) - before * sent
        parts = {"on their way to the host and back": on_the_way, "outputs sent to the next stage": before * sent}
        return before + waiting, sent, parts
    each, parts = 0.0, dict[str, float]()
    for experts, count in layer_kinds(job, layout, stage):
        for term in activation_terms(job, layout, experts=experts):
            kept = (
                float(by_policy(layout, stage, partial(kept_share, job, term))) * float(count) * float(term.num_bytes)
            )
            each += kept
            parts[term.name] = parts.get(term.name, 0.0) + (before + waiting) * kept
    parts["kept for the gradients of weights"] = waiting * (float(kept_activation_bytes(job, layout, stage)[1]) - each)
    return before + waiting, each + sent, parts | {"outputs sent to the next stage": before * sent}


def _moment(job: PoolJob, layout: Layout, stage: Stage) -> str:
    """The work that runs at the peak, in words."""
    if float(loss_bytes(job, layout, stage)) > float(layer_backward_bytes(job, layout, stage)):
        return "loss of the first microbatch that turns to its backward pass"
    gathers = ", with gathered weights of two layers" if layout.zero == 3 else ""
    what = "parts of one layer" if modules_in(int(stage.policy)) else "one layer"
    again = f", {what} computed again" if float(recompute_bytes(job, layout, stage)) else ""
    return f"start of the first backward pass{again}{gathers}"


# --- neighbours -------------------------------------------------------------------------------------------------


def alternatives_of(job: Job, layout: Layout) -> tuple[Alternative, ...]:
    """For each key the best layout with another value of this key alone (`single_changes`)."""
    return tuple(_priced(*each) for each in single_changes(job, layout))


def _priced(change: str, job: Job, layout: Layout) -> Alternative:
    broken = broken_rules(job, layout)
    priced = None if broken else estimate(job, layout)
    worst = worst_stage(priced.memory) if priced else None
    return Alternative(
        change=change,
        layout=layout,
        broken_rules=broken,
        peak_bytes=priced.peak_bytes if priced else None,
        fits=bool(priced and priced.fits),
        verdict=priced.verdict if priced else None,
        chance_of_fitting=worst.chance_of_fitting if worst else None,
        missing_bytes=worst.missing_bytes if worst else 0.0,
        missing_on_host=worst is not None and not worst.host_fits,
        step_seconds=priced.step_seconds if priced else None,
    )


class MemoryBand(Document):
    """The range that contains the peak of 8 of 10 runs like the plan.

    The allocator may hold more memory as long as memory is free.
    """

    stage: int = Field(description="number of the fullest stage")
    low_bytes: float
    high_bytes: float
    chance_of_fitting: float = Field(description="chance that the peak is at most the whole memory of the device")


def memory_band_of(job: Job, plan: Plan) -> MemoryBand | None:
    """The band of the fullest stage's peak; None for a mixed cluster, for a CPU, and without evidence."""
    if len(job.pools) > 1 or job.pools[0].cluster.device.kind == "cpu":
        return None
    found = memory_distribution(job, plan.layout)
    if found is None:
        return None
    stage = max(plan.memory, key=lambda each: each.total_bytes)
    whole = job.pools[0].cluster.device.memory
    return MemoryBand(
        stage=stage.stage,
        low_bytes=stage.total_bytes * found.quantile(0.1),
        high_bytes=stage.total_bytes * found.quantile(0.9),
        chance_of_fitting=found.chance(whole / stage.total_bytes),
    )


def peak_section(plan: Plan, peaks: Sequence[StagePeak], band: MemoryBand | None = None) -> Group:
    """Show the moment of the fullest stage's memory peak, and its activations at that moment."""
    fullest = plan.worst_stage
    peak = next(each for each in peaks if each.stage == fullest.stage)
    scale = bytes_scale(part.num_bytes for part in peak.activations)
    total = sum_of(part.num_bytes for part in peak.activations)
    rows = [(clean(part.name), scale(part.num_bytes), percent(part.num_bytes / total)) for part in peak.activations]
    free = fullest.limit_bytes - fullest.total_bytes
    left = f"{format_bytes(free)} are free" if free >= 0 else f"{format_bytes(-free)} are missing"
    count = f"{peak.microbatches_in_flight:,.4g}"
    words = f"{clean(peak.moment)}; {count} microbatch{'es' if count != '1' else ''} in flight"
    return section(
        f"Peak of stage {peak.stage}",
        Text(words),
        Text(f"One more microbatch in flight takes {format_bytes(peak.bytes_per_microbatch)}; {left}."),
        *([Text(_spread(band))] if band else []),
        Columns(rows, right=(1, 2), header=("activations", scale.unit, "share")),
    )


def transients_section(plan: Plan, peaks: Sequence[StagePeak]) -> Group | None:
    """Show the parts of the fullest stage's transients; None if it has none."""
    peak = next(each for each in peaks if each.stage == plan.worst_stage.stage)
    if not peak.transients:
        return None
    scale = bytes_scale(part.num_bytes for part in peak.transients)
    rows = [(clean(part.name), scale(part.num_bytes)) for part in peak.transients]
    return section(f"Transients of stage {peak.stage}, {scale.unit}", Columns(rows, right=(1,)))


def _spread(band: MemoryBand) -> str:
    span = f"{format_bytes(band.low_bytes)} and {format_bytes(band.high_bytes)}"
    chance = f"at most the device's memory in {percent(band.chance_of_fitting)} of runs"
    return f"8 of 10 runs have the peak of stage {band.stage} between {span}; it is {chance}."


def _missing(found: Alternative) -> str:
    """State the memory that an alternative lacks, or its chance of fitting if it may fit."""
    over = f"{format_bytes(found.missing_bytes)} too much{' on the host' if found.missing_on_host else ''}"
    if found.verdict != "may not fit" or found.chance_of_fitting is None:
        return over
    return f"may not fit: {chance_words(found.chance_of_fitting)}"


def fitting_section(plan: Plan, changes: Sequence[FittingChange]) -> Group | None:
    """Show the smallest changes that make a layout fit into memory; None if the layout already fits."""
    if plan.fits is not False:
        return None
    if not changes:
        return section("What would make it fit", Text("no change of one key, or of two"))
    rows = [
        (
            Text(clean(each.change), style="bold"),
            format_seconds(each.step_seconds),
            change(each.step_seconds / plan.step_seconds - 1),
            chance_words(each.chance_of_fitting),
            assignments(short_layout(each.layout)),
        )
        for each in changes
    ]
    table = Columns(rows, right=(1, 2, 3), wrap=(0, 4), header=("change", "step", "", "fits", "layout then"))
    return section("What would make it fit", table, note="single changes, then pairs; each one priced")


def alternatives_section(plan: Plan, alternatives: Sequence[Alternative]) -> Group | None:
    """Show peak, limit and step with one layout key changed at a time, or the rule that forbids the change."""
    if not alternatives:
        return None
    rows: list[list[RenderableType]] = []
    for each in alternatives:
        if each.peak_bytes is None or each.step_seconds is None:
            rows.append(
                [each.change, "", "", "", Text(f"against a rule: {clean('; '.join(each.broken_rules))}", style="dim")]
            )
            continue
        verdict = Text("fits") if each.fits else Text(_missing(each), style="bold red")
        slower = change(each.step_seconds / plan.step_seconds - 1)
        rows.append([each.change, format_bytes(each.peak_bytes), format_seconds(each.step_seconds), slower, verdict])
    header = ("change", "memory", "step", "", "")
    return section(
        "What else it could be, one change at a time", Columns(rows, right=(1, 2, 3), wrap=(0, 4), header=header)
    )
