"""The step as a waterfall, from the model's FLOPs at peak to the predicted step, and the rates behind it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field
from rich.text import Text

from planner.answers.operations import operations_of_step
from planner.cost.flops import attention_flops_per_token, flops_convention, model_flops_per_step, sc21_flops_per_step
from planner.cost.ledger import LineName, total_exposed_seconds
from planner.cost.microbatch import num_microbatches
from planner.cost.parameters import num_active_params, num_matmul_params
from planner.cost.prices import interleaving_terms, layout_prices
from planner.cost.schedule import cycle_seconds
from planner.cost.stage import pool_indices, stages_of
from planner.layout import offloads_optimizer
from planner.show.columns import Columns
from planner.show.figures import StepBar, seconds_scale
from planner.show.screen import clean, section
from planner.show.words import line_label, percent
from planner.specs.calibration import FACTORS
from planner.specs.document import Document
from planner.specs.job import each_pool
from planner.sums import sum_of
from planner.units import format_bytes, format_flops, format_rate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from rich.console import Group, RenderableType

    from planner.answers.operations import Operation
    from planner.cost.estimate import Estimate
    from planner.cost.ledger import TimeLine
    from planner.cost.prices import StagePrices
    from planner.layout import Layout
    from planner.specs.job import Job, PoolJob


class TimePart(Document):
    """One part of the waterfall: the seconds that it adds to the step; negative if it shortens the step."""

    name: str
    seconds: float
    formula: str
    numbers: str = Field(description="the formula with numbers")
    source: str
    bound: str = Field(description="the unit or link that limits the part")


class Waterfall(Document):
    """Parts whose sum is the step; the first is the model's FLOPs at the devices' peak."""

    parts: tuple[TimePart, ...]
    step_seconds: float


class Rate(Document):
    """FLOPs per second and their share of peak, by one convention of counting FLOPs."""

    name: str
    convention: str
    flops_per_step: float
    flops_per_second_per_device: float
    share_of_peak: float


# --- the parts --------------------------------------------------------------------------------------------------


def waterfall_of(job: Job, layout: Layout, priced: Estimate) -> Waterfall:
    """The parts of one step: the ideal time first, then the losses of a real machine.

    The parts of compute describe the mean stage. The first of them leaves out all losses of real kernels, and each
    further part adds one cause of loss. `imbalance` is the work by which the slowest stage exceeds the mean. The other
    parts are the ledger's own lines. On a mixed cluster each stage is weighted by the peak of its devices, so a split
    in proportion to the peak has no imbalance.
    """
    own = layout_prices(job, layout)
    exposed = {line.name: float(line.exposed_seconds) for line in priced.time}
    operations = operations_of_step(job, layout, priced.time)
    parts = [
        *_computing(job, layout),
        *_other_work(job, layout, priced.time, own),
        _imbalance(job, layout, own, exposed),
        *(_of_ledger(job, layout, line, own, operations) for line in priced.time if line.name not in _WORK),
    ]
    total = float(total_exposed_seconds(priced.time))
    return Waterfall(parts=tuple(part for part in parts if part.seconds), step_seconds=total)


_WORK = (LineName.COMPUTE, LineName.HEAD, LineName.UNGRADED, LineName.RECOMPUTE, LineName.ACCUMULATION)
"""Ledger lines of the slowest stage that the waterfall replaces by values of the mean stage."""


def _microbatches(count: float) -> str:
    return f"{count:,.0f} microbatch{'es' if count != 1 else ''}"


def _peaks(job: Job, layout: Layout) -> NDArray[np.float64]:
    """Peak FLOPs per second of a device of each stage, (pp,)."""
    peaks = np.array([pool.cluster.device.peak[job.training.precision] for pool in job.pools])
    found: NDArray[np.float64] = peaks[pool_indices(job, layout)]
    return found


def _mean(job: Job, layout: Layout, values: Any) -> float:
    """The mean over the stages, weighted by the peak of each stage's devices."""
    return float(np.average(np.broadcast_to(values, (layout.pp,)), weights=_peaks(job, layout)))


def _products(job: Job, layout: Layout) -> float:
    """Seconds of the layers, the embedding and the head in a step, on the mean stage."""
    prices = layout_prices(job, layout)
    return float(num_microbatches(job, layout)) * _mean(job, layout, prices.compute + prices.head + prices.ungraded)


def _with_device(job: PoolJob, *, bytes_are_free: bool, host_is_free: bool, calibrated: bool) -> PoolJob:
    """The job on a device without some of the losses of real devices; fused attention keeps its share of peak."""
    device = job.cluster.device
    free: dict[str, Any] = {"launch": 0.0, "layer_floor": 0.0} if host_is_free else {}
    efficiency = device.efficiency.model_copy(update=free)
    changes: dict[str, Any] = {"efficiency": efficiency}
    if bytes_are_free:
        changes["memory_bandwidth"] = 1e30
    cluster = job.cluster.model_copy(update={"device": device.model_copy(update=changes)})
    calibration = job.calibration if calibrated else job.calibration.model_copy(update=dict.fromkeys(FACTORS, 1.0))
    return replace(job, cluster=cluster, calibration=calibration)


def _of_pools(job: Job, layout: Layout, say: Callable[[PoolJob], str]) -> str:
    """The text of `say` for each pool in use, or one text if it is the same for all pools."""
    used = [pool for pool in job.pools if not layout.pools or pool.cluster.name in layout.pools]
    said = [say(pool) for pool in used]
    if len(set(said)) == 1:
        return said[0]
    return ", ".join(f"{words} on {pool.cluster.name}" for words, pool in zip(said, used, strict=True))


def _computing(job: Job, layout: Layout) -> Iterator[TimePart]:
    """The parts of compute: ideal, kernels, memory-bound operators, host, and the calibration from measured runs."""
    m, peak = float(num_microbatches(job, layout)), float(np.mean(_peaks(job, layout)))
    flops = model_flops_per_step(job.model, job.training)
    ideal = flops / (layout.world_size * peak)
    kernels, memory, host, measured = (
        _products(each_pool(job, partial(_with_device, bytes_are_free=a, host_is_free=b, calibrated=c)), layout)
        for a, b, c in ((True, True, False), (False, True, False), (False, False, False), (False, False, True))
    )
    of_devices = f"{layout.world_size:,} x {format_flops(peak)}/s{' on average' if layout.pools else ''}"
    roofline = "roofline, Williams et al. (CACM 2009); device file"
    precision, per = job.training.precision, f"{_microbatches(m)} x"
    launch = _of_pools(job, layout, lambda pool: f"{format_seconds(pool.cluster.device.efficiency.launch)} a launch")
    slower = _of_pools(job, layout, lambda pool: f"({pool.calibration.slowdown:.3f} - 1)")
    runs = _of_pools(job, layout, lambda pool: f"{pool.calibration.num_rows} runs")
    rate = _of_pools(job, layout, lambda pool: format_rate(_memory_rate(pool)))
    names = ", ".join(dict.fromkeys(name for pool in job.pools for name in pool.calibration.sources))
    parts = (
        ("ideal compute", ideal, "model FLOPs / (devices * peak)",
         f"{format_flops(flops)} / ({of_devices})",
         "Chowdhery et al., PaLM (2022), appendix B", precision),
        ("kernel efficiency", kernels - ideal, "products at the rate that their shapes reach - products at peak",
         f"{ideal / kernels:.1%} of peak: {per} {format_seconds(kernels / m)} - {format_seconds(ideal / m)}",
         roofline, precision),
        ("memory-bound operators", memory - kernels, "norms, activations, residuals, loss: bytes / memory bandwidth",
         f"{per} {format_seconds((memory - kernels) / m)} at {rate}",
         roofline, "memory"),
        ("host and launches", host - memory,
         "a launch for each operator; a layer takes no less than the host needs for it",
         f"{per} {format_seconds((host - memory) / m)} at {launch}",
         "device file, launch and layer_floor; engine profile, host_factor", "host"),
        ("calibration", measured - host, "(slowdown of measured runs - 1) * all of the above",
         f"{slower} x {format_seconds(host)}, {runs}",
         names or "no measured runs", "measured"),
    )  # fmt: skip
    for part in parts:
        yield TimePart.model_validate(dict(zip(TimePart.model_fields, part, strict=True)))


def _other_work(job: Job, layout: Layout, time: Sequence[TimeLine], own: StagePrices) -> Iterator[TimePart]:
    """Recompute and gradient accumulation, on the mean stage."""
    m = float(num_microbatches(job, layout))
    for line in time:
        if line.name not in (LineName.RECOMPUTE, LineName.ACCUMULATION):
            continue
        each = _mean(job, layout, own.recompute if line.name == LineName.RECOMPUTE else own.accumulation)
        formula = line.formula.replace("the slowest stage", "the mean stage")
        numbers = f"{_microbatches(m)} x {format_seconds(each)}"
        yield TimePart.of(line, name=line.name.value, seconds=m * each, formula=formula, numbers=numbers)


def _imbalance(job: Job, layout: Layout, own: StagePrices, exposed: dict[LineName, float]) -> TimePart:
    m = float(num_microbatches(job, layout))
    slowest = sum_of(exposed.get(name, 0.0) for name in _WORK) / m
    mean = _mean(job, layout, own.compute + own.head + own.ungraded + own.recompute + own.accumulation)
    return TimePart(
        name="imbalance",
        seconds=m * (slowest - mean) if layout.pp > 1 else 0.0,
        formula="m * (work of the stage that sets the pace - mean work of the stages)",
        numbers=f"{m:,.0f} x ({format_seconds(slowest)} - {format_seconds(mean)})",
        source="derived here: the slowest stage counts once for each microbatch",
        bound="pipeline",
    )


def _of_ledger(job: Job, layout: Layout, line: TimeLine, own: StagePrices, operations: Sequence[Operation]) -> TimePart:
    of_stage = job.pools[pool_indices(job, layout)[line.stage]]
    numbers = "; ".join(
        f"{each.times:,.0f} x {each.kind} of {format_bytes(each.num_bytes)}, {format_seconds(each.seconds)} each"
        for each in operations
        if each.line == line.name
    )
    if line.name == LineName.BUBBLE and layout.schedule in ("1f1b", "interleaved"):
        per_stage = np.broadcast_to(own.microbatch_seconds, (layout.pp,))
        fill, slack = interleaving_terms(job, layout, stages_of(job, layout), own)
        slowest = float(np.max(per_stage))
        bottleneck = float(np.max(cycle_seconds(per_stage, slack, np.broadcast_to(slack, (layout.pp,))[-1])))
        total = format_seconds(float(np.sum(np.broadcast_to(fill, (layout.pp,)))))
        numbers = f"({total} - {format_seconds(bottleneck)}) / {layout.interleave}"
        if bottleneck > slowest:
            numbers += (
                f" + {num_microbatches(job, layout):,.0f} x ({format_seconds(bottleneck)} - {format_seconds(slowest)})"
            )
    if line.name == LineName.OPTIMIZER:
        streamed = max(0.0, float(line.busy_seconds) - of_stage.launch_seconds) * _memory_rate(of_stage)
        numbers = f"{format_bytes(streamed)} at {format_rate(_memory_rate(of_stage))}"
    if host_rate := _host_rate(of_stage, layout, line):
        numbers = f"{format_bytes(float(line.busy_seconds) * host_rate)} at {format_rate(host_rate)}"
    if line.hidden_seconds:
        numbers += f"; {format_seconds(float(line.hidden_seconds))} hidden"
    return TimePart.of(line, name=line.name.value, seconds=float(line.exposed_seconds), numbers=numbers)


def _host_rate(job: PoolJob, layout: Layout, line: TimeLine) -> float:
    """Bytes per second of a line that the host's memory, or the link to it, limits; 0 for other lines."""
    host = job.cluster.host
    if host is None or layout.offload == "none":
        return 0.0
    if line.name == LineName.HOST_COMM:
        return host.bandwidth * host.efficiency
    on_host = line.name == LineName.OPTIMIZER and offloads_optimizer(layout)
    return host.memory_bandwidth * host.memory_efficiency / job.cluster.devices_per_host if on_host else 0.0


def _memory_rate(job: PoolJob) -> float:
    return job.cluster.device.memory_bandwidth * job.cluster.device.efficiency.memory / job.calibration.memory


# --- the rates --------------------------------------------------------------------------------------------------


def rates_of(job: Job, layout: Layout, priced: Estimate) -> tuple[Rate, ...]:
    """The speed of the step by each convention of counting FLOPs in papers."""
    model, training = job.model, job.training
    tokens = float(training.step_tokens)
    flops = model_flops_per_step(model, training)
    whole = attention_flops_per_token(model, training.attended_tokens, causal=False)
    conventions = [
        ("MFU", flops_convention(training), flops),
        ("HFU", "the same with recomputed forward passes", flops * priced.hfu / priced.mfu),
        (
            "MFU, whole square",
            "attention counted as the full square (PaLM, 2022, appendix B)",
            3.0 * (2.0 * num_matmul_params(model) + whole) * tokens,
        ),
        ("6 N D", "6 per active parameter and token, attention left out", 6.0 * num_active_params(model) * tokens),
    ]
    if model.architecture == "gpt" and model.moe is None and model.ffn_hidden_size == 4 * model.hidden_size:
        words = "recompute always counted, full square (Narayanan et al., SC 2021, equation 3)"
        conventions.append(("SC'21", words, sc21_flops_per_step(model, training)))
    peak, device_seconds = float(np.mean(_peaks(job, layout))), priced.step_seconds * layout.world_size
    return tuple(
        Rate(
            name=name,
            convention=words,
            flops_per_step=count,
            flops_per_second_per_device=count / device_seconds,
            share_of_peak=count / device_seconds / peak,
        )
        for name, words, count in conventions
    )


def placed_parts(waterfall: Waterfall) -> Iterator[tuple[TimePart, float]]:
    """Each part, and the seconds at which its bar starts: the end of the previous part, or its own end if it saves."""
    at = 0.0
    for part in waterfall.parts:
        yield part, at + min(part.seconds, 0.0)
        at += part.seconds


def waterfall_section(waterfall: Waterfall, slowest: str) -> Group:
    """Show each part as a bar that starts at the end of the previous bar; a part that saves time points backwards.

    slowest: the stage of the parts that are not computing, in words.
    """
    total = waterfall.step_seconds
    scale = seconds_scale([total])
    rows: list[list[RenderableType]] = []
    for part, start in placed_parts(waterfall):
        bar = StepBar(before_seconds=start, seconds=abs(part.seconds), full_seconds=total)
        share = percent(part.seconds / total)
        bound = Text(clean(part.bound), style="dim")
        rows.append([line_label(part.name), bar, scale(part.seconds), share, bound])
    rows.append([Text("step", style="bold"), "", Text(scale(total), style="bold"), "100%"])
    table = Columns(rows, right=(2, 3), wrap=(1,), optional=(1, 4, 3), header=("", "", scale.unit, "share", "bound by"))
    return section(
        "From peak to predicted", table, note="; other ".join(filter(None, ("computing on the mean stage", slowest)))
    )


def rates_section(rates: Iterable[Rate]) -> Group:
    """Show the speed of the step by each convention of counting FLOPs or tokens."""
    rows = [
        (
            clean(rate.name),
            f"{rate.share_of_peak:.1%}",
            f"{format_flops(rate.flops_per_second_per_device)}/s",
            Text(clean(rate.convention), style="dim"),
        )
        for rate in rates
    ]
    table = Columns(rows, right=(1, 2), wrap=(3,), optional=(3,), header=("", "of peak", "per device", "FLOPs counted"))
    return section("Rates", table)
