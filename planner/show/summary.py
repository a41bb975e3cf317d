"""Output of `planner plan`: the layout, its cost, the runners-up, and a command to continue with."""

from __future__ import annotations

import shlex
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from planner.cost.adapters import num_trained_params
from planner.cost.ledger import total_exposed_seconds
from planner.cost.parameters import num_params
from planner.cost.run import devices_in_use
from planner.cost.transfers import unmeasured_dispatch
from planner.fit import chance_words, fit_words
from planner.layout import NOT_PRICED, UNKNOWN
from planner.search.near_ties import NEAR_TIE, more_or_less
from planner.search.objectives import WORTH_READING
from planner.show.columns import Columns, Flow, assignments
from planner.show.figures import MemoryBar, StepBar, bytes_scale, fill_of, seconds_scale
from planner.show.goodput import goodput_rows
from planner.show.screen import Command, clean, indented, section, stack
from planner.show.words import (
    certificate_sentence,
    cluster_words,
    fold_runs,
    layers_words,
    layout_words,
    limit_words,
    line_label,
    minimum_words,
    percent,
    pools_words,
    recompute_words,
    run_words,
    schedule_words,
    segment_words,
    short_layout,
    slowest_words,
    stage_range,
)
from planner.specs.banned import not_run
from planner.specs.calibration import precision_class
from planner.sums import sum_of
from planner.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderResult

    from planner.cost.ledger import StageMemory
    from planner.plan import Plan

_MOST_KEYS = 3  # keys without a price that are named; the others are counted
_MANY = 10  # largest number of rows; a longer table is folded in the middle


def summary(plan: Plan, command: str) -> Group:
    """Return the whole output of `planner plan`; `command` is the next command to suggest, empty if there is none."""
    return stack(
        heading(plan),
        indented(Columns(layout_rows(plan), wrap=(1,))),
        indented(Columns(_headline_rows(plan), wrap=(1,))),
        memory_section(plan.memory, note=limit_words(plan), is_known=plan.fits is not None),
        _time_section(plan),
        _batch_section(plan),
        _runners_up_section(plan),
        _proof_section(plan),
        section("Next", Command(text=command)) if command else None,
    )


def next_command(plan: Plan, command: str, saved_as: Path | None) -> str:
    """Return the command to suggest next: save the plan, launch it here, emit files for many hosts, or explain it."""
    if saved_as is None:
        return f"{clean(command)} -o plan.json"
    verb = "emit" if plan.engine.emits else "explain"  # emit writes no files for old programs
    if plan.engine.name == "torch" and plan.cluster.hosts == 1:
        verb = "launch"
    return f"planner {verb} {clean(shlex.quote(str(saved_as)))}"


def learning_commands(run: Path) -> tuple[str, ...]:
    """Return the commands to suggest after a run in a folder: calibrate with the run, then plan its job again."""
    calibrate = ["planner", "calibrate", str(run), "-o", "mine.json"]
    again = ["planner", "plan", "--from", str(run / "plan.json"), "--calibration", "mine.json"]
    return clean(shlex.join(calibrate)), clean(shlex.join(again))


def heading(plan: Plan) -> Text:
    """Return the heading of a plan: the model, the machines and the work of a step."""
    training = plan.training
    batch = f"{training.global_batch_size:,} sequences of {training.sequence_length:,} tokens per step"
    text = Text(clean(plan.model.name), style="bold")
    text.append(f" on {clean(cluster_words(plan.cluster))}", style="not bold")
    if not plan.fits:
        text.append(f"  {plan.verdict}", style="bold red")
    text.append(f"\n{batch}, {training.precision}, engine {clean(plan.engine.name)}", style="not bold dim")
    return text


def layout_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """Describe the layout in words and in the syntax of the command line."""
    layout = plan.layout
    layers = [layout.layers_of_stage(stage) for stage in range(layout.pp)]
    rows: list[tuple[str, RenderableType]] = [
        *_open_rows(plan),
        ("layout", Group(Text(layout_words(layout), style="bold"), assignments(short_layout(layout)))),
        ("schedule", schedule_words(plan)),
        *([("pools", clean(pools_words(layout)))] if layout.pools else []),
        *([("racks", clean(segment_words(plan.cluster.pools[0], layout)))] if layout.segment else []),
        ("layers", layers_words(layers)),
        ("recompute", recompute_words(layout)),
        *host_rows(plan.memory),
        *loss_rows(plan),
        *overlap_rows(plan),
        *trained_rows(plan),
        *assumed_rows(plan),
        *([("not run", clean(why))] if (why := not_run(plan.engine, plan.layout)) else []),
    ]
    idle = plan.cluster.num_devices - layout.world_size
    why = f": {clean(plan.idle_reason)}" if plan.idle_reason else ""
    return [*rows, ("idle", f"{idle:,} of {plan.cluster.num_devices:,} devices{why}")] if idle else rows


def _open_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """Name the keys of a foreign file that leave the verdict unknown, each with the option that settles it."""
    keys = [each for each in plan.assumed if each.settled_by]
    parts = [f"{each.key}={each.value}: {each.rule} ({each.settled_by})" for each in keys]
    return [("unknown", Text(clean("; ".join(parts)), style="bold red"))] if parts else []


def assumed_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """List the assumed settings, and the settings of a foreign file that change no figure."""
    unknown = [each for each in plan.assumed if each.rule.startswith(UNKNOWN)]
    filled = [
        str(each) for each in plan.assumed if each.rule != NOT_PRICED and each not in unknown and not each.settled_by
    ]
    left_out = [f"{each.key}={each.value}" for each in plan.assumed if each.rule == NOT_PRICED]
    misspelt = [f"{each.key}={each.value} ({each.rule.removeprefix(f'{UNKNOWN}; ')})" for each in unknown]
    if len(left_out) > _MOST_KEYS:
        left_out = [f"{len(left_out)} further keys: {', '.join(left_out[:_MOST_KEYS])}, ..."]
    rows = (("assumed", filled), ("misspelt", misspelt), ("not priced", left_out))
    return [(name, clean("; ".join(parts))) for name, parts in rows if parts]


def loss_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """State how the loss and feed-forward blocks are computed; no row for an unfused loss and blocks without tiles."""
    training = plan.training
    words = {
        "fused": "one kernel for all logits of a microbatch",
        "chunked": f"output head and loss of {training.loss_chunks} parts of a microbatch, one after the other",
        "fused-linear": "output head and loss in one kernel, for few tokens at a time",
    }
    way = plan.engine.can.losses[0] if training.loss == "engine" else training.loss
    rows: list[tuple[str, RenderableType]] = [("loss", words[way])] if way in words else []
    if training.mlp_tiles > 1:
        rows.append(("feed-forward", f"{training.mlp_tiles} parts of the sequence, one after the other"))
    return rows


def overlap_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """State the overlaps set by the training document: CUDA graphs, and expert exchanges beside other microbatches."""
    words = {"layers": "each layer, but for its routed experts", "step": "both passes of a step"}
    graphs, rows = plan.training.cuda_graphs, list[tuple[str, RenderableType]]()
    if graphs in words:
        rows.append(("CUDA graphs", words[graphs]))
    if plan.training.expert_overlap:
        rows.append(("experts", "exchanges of a microbatch beside the other pass of another one"))
    return rows


def trained_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """State which parameters are trained, if some are frozen."""
    training = plan.training
    if not training.lora_rank:
        return []
    trained, whole = num_trained_params(plan.model, training), num_params(plan.model)
    words = (
        f"{format_count(trained)} of {format_count(whole)} parameters: adapters of rank {training.lora_rank} beside "
    )
    frozen = f"the others are frozen in {training.frozen_weights.replace('16-bit', '16 bits')}"
    return [("trains", f"{words}{', '.join(training.lora_targets)}; {frozen}")]


def host_rows(memory: Sequence[StageMemory]) -> list[tuple[str, RenderableType]]:
    """State the host memory per device, for the stage that uses most; no rows without offload."""
    hosts = [stage.host for stage in memory if stage.host is not None]
    if not hosts:
        return []
    fullest = max(hosts, key=lambda host: host.total_bytes)
    parts = ", ".join(f"{line_label(line.name)} {format_bytes(float(line.num_bytes))}" for line in fullest.lines)
    over = fullest.total_bytes > fullest.limit_bytes
    limit = f"of {format_bytes(fullest.limit_bytes)} for each device"
    return [("on the host", Text.assemble(parts, (f"  {limit}", "bold red" if over else "dim")))]


def band_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """State the error band of the step time and the number of published runs behind it; no rows without a band."""
    low, high, band = plan.low_step_seconds, plan.high_step_seconds, plan.band
    if band is None or not low or not high:
        return []
    device = " and ".join(pool.device.name for pool, _ in devices_in_use(plan.cluster, plan.layout))
    both = f"on {device} with engine {plan.engine.name}"
    precision = f"{kind} bits" if (kind := precision_class(plan.training.precision)) == "16" else kind
    layers = "without experts" if plan.model.moe is None else "with experts"
    names = {
        "device": f"is on {device}",
        "engine": f"has engine {plan.engine.name}",
        "axes": f"has axes {band.axes}",
        "precision": f"has {precision} {both}",
        "experts": f"has layers {layers} {both}",
    }
    runs = "1 run" if band.num_near == 1 else f"{band.num_near} runs"
    own = next((each for each in plan.calibration if each.low and each.high), None)
    if own is not None:
        rests = f"rests on {runs} of --calibration {both}"
        rests += f"; wider: none of them has {', '.join(band.unseen)}" if band.unseen else ""
    elif band.unseen:
        rests = f"wider: no published run {', and none '.join(names.get(key, f'has {key}') for key in band.unseen)}"
    else:
        like = f"on {device}, engine {plan.engine.name}, axes {band.axes}, {precision}, {layers}"
        rests = f"rests on {runs} {like}, and on less similar runs"
        if not band.num_near:
            rests = f"no published run is {like}, so the band rests on less similar runs"
    if band.family:
        rests += f"; wider: the corrections {both} rest on one family of publishers, {band.family}"
    return [
        ("band", Text(f"8 of 10 runs: {format_seconds(low)} to {format_seconds(high)}; {clean(rests)}", style="dim")),
        *_unmeasured_rows(plan),
        *_label_rows(plan),
        *_dispatch_rows(plan),
    ]


def _label_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """State how much the engine's own calibration changes the step time, if the effect is large."""
    label = plan.engine_label
    if label is None:
        return []
    device, engine = plan.cluster.pools[0].device.name, plan.engine.name
    runs = f"{label.num_runs:,} run{'s' if label.num_runs != 1 else ''}" if label.num_runs else "no run"
    moved = f"{more_or_less(label.share, 'slower', 'faster')} than with the corrections that all engines share"
    words = f"forecast {moved}; no feature of {engine} explains the difference, which rests on {runs} on {device}"
    if plan.band and plan.band.family:
        words = f"corrections rest on one family of publishers, {plan.band.family} ({runs} on {device}), and move the "
        words += f"forecast by {abs(label.share):.0%}; this forecast is not compared with those for other engines"
    return [("engine", Text(clean(words), style="dim"))]


def _dispatch_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """Say that nobody measured the dispatcher of tokens on this network."""
    link = unmeasured_dispatch(plan.model, plan.engine, plan.cluster.pools[0], plan.layout)
    words = f"DeepEP or HybridEP sends tokens to experts; its gain over an all-to-all is not measured on {clean(link)}"
    return [("dispatch", Text(words, style="dim"))] if link else []


def _unmeasured_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """Name the devices whose efficiencies nobody measured; they have the efficiencies of their generation."""
    devices = [pool.device for pool, _ in devices_in_use(plan.cluster, plan.layout)]
    found = [f"{each.name} those of {each.generation}" for each in devices if "efficiency.matmul" in each.assumed]
    taken = f"takes the efficiencies of its generation, which nobody measured on it: {' and '.join(found)}"
    return [("device", Text(clean(taken), style="dim"))] if found else []


def _headline_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    rate = plan.tokens_per_second_per_device
    in_all = plan.training.global_batch_size * plan.training.sequence_length / plan.step_seconds
    speed = f"{format_count(rate)} tokens/s per device, {format_count(in_all)} tokens/s in all"
    mfu = Text.assemble((f"{plan.mfu:.1%}", "bold"), (f"  {clean(plan.flops_convention)}", "dim"))
    rows: list[tuple[str, RenderableType]] = [
        ("step", Text(format_seconds(plan.step_seconds), style="bold")),
        *band_rows(plan),
        ("memory", Text.assemble((plan.verdict, "" if plan.fits else "bold red"), f": {clean(fit_words(plan))}")),
        ("speed", speed),
        ("MFU", mfu),
        ("HFU", Text.assemble(f"{plan.hfu:.1%}", ("  with what is computed again", "dim"))),
        *_minimum_rows(plan),
    ]
    if budget := run_words(plan):
        rows.append(("whole run", budget))
    return [*rows, *goodput_rows(plan)]


def _minimum_rows(plan: Plan) -> list[tuple[str, RenderableType]]:
    """State the proven minimum of the objective and the plan's value; no rows without a search."""
    if plan.minimum is None:
        return []
    words = Text(minimum_words(plan))
    if plan.minimum.layout == plan.layout:
        return [("minimum", words)]
    return [("minimum", Group(assignments(short_layout(plan.minimum.layout)), words))]


def memory_section(memory: Sequence[StageMemory], *, note: str, is_known: bool = True) -> Group:
    """Show a bar of each stage's memory against its limit; stages that look alike share a row.

    is_known: whether all that the stages need has a price; else no chance is shown.
    """
    full = max(max(stage.total_bytes, stage.limit_bytes) for stage in memory)
    scale = bytes_scale(stage.total_bytes for stage in memory)
    folded = fold_runs(
        memory, lambda stage: (stage.limit_bytes, [scale(float(line.num_bytes)) for line in stage.lines])
    )
    rows = [
        (
            stage_range([stage.stage for stage in group]),
            MemoryBar(memory=fullest, full_bytes=full),
            scale(fullest.total_bytes),
            _share_of_limit(fullest),
            Text(
                chance_words(fullest.chance_of_fitting if is_known else None),
                style="" if fullest.fits and is_known else "bold red",
            ),
        )
        for group in _fold_middle(folded)
        for fullest in (max(group, key=lambda stage: stage.total_bytes / stage.limit_bytes),)
    ]
    header = ("", "", scale.unit, "of limit", "fits")
    table = Columns(rows, right=(2, 3, 4), wrap=(1,), optional=(1,), header=header)
    return section("Memory of a device", table, _Legend(memory), note=note)


def _share_of_limit(stage: StageMemory) -> Text:
    over = stage.total_bytes > stage.limit_bytes
    return Text(f"{stage.total_bytes / stage.limit_bytes:.0%}", style="bold red" if over else "")


def _fold_middle(groups: list[list[StageMemory]]) -> list[list[StageMemory]]:
    """Return at most ten rows; adjacent stages of a long pipeline share a row, which shows their fullest stage."""
    size = -(-len(groups) // _MANY)
    return [list(chain(*groups[first : first + size])) for first in range(0, len(groups), size)]


class _Legend:
    """The legend of the bars' fills, in Unicode or ASCII as the screen allows."""

    def __init__(self, memory: Sequence[StageMemory]) -> None:
        self._names = [line.name for line in memory[0].lines if any(_bytes_of(stage, line.name) for stage in memory)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        items = []
        for name in self._names:
            fill = fill_of(name)
            mark = fill.ascii if options.ascii_only else fill.mark
            items.append(Text.assemble((mark, fill.color), (f" {line_label(name)}", "dim")))
        yield Flow(items)


def _bytes_of(stage: StageMemory, name: str) -> float:
    return sum_of(float(line.num_bytes) for line in stage.lines if line.name == name)


def _time_section(plan: Plan) -> Group:
    """Show the step as a waterfall: the bar of each line starts at the end of the previous bar."""
    total = float(total_exposed_seconds(plan.time))
    scale = seconds_scale([total])
    shown = [line for line in plan.time if line.busy_seconds > 0]
    any_hidden = any(line.hidden_seconds > 0 for line in shown)
    rows: list[list[RenderableType]] = []
    before = 0.0
    for line in shown:
        exposed = float(line.exposed_seconds)
        bar = StepBar(before_seconds=before, seconds=exposed, full_seconds=total)
        hidden = [Text(scale(float(line.hidden_seconds)) if line.hidden_seconds > 0 else "", style="dim")]
        rows.append([line_label(line.name), bar, scale(exposed), percent(exposed / total), *hidden * any_hidden])
        before += exposed
    rows.append([Text("step", style="bold"), "", Text(scale(total), style="bold"), "100%"])
    header = ["", "", scale.unit, "share", *["hidden"] * any_hidden]
    table = Columns(rows, right=(2, 3, 4), wrap=(1,), optional=(1, 4, 3), header=header)
    return section("Time of a step", table, note=slowest_words(plan))


def _batch_section(plan: Plan) -> Group | None:
    """State how the batch size was chosen, its cost in tokens, and the learning rate for it."""
    if plan.batch is None:
        return None
    batch, advice, rate = plan.batch, plan.batch.advice, plan.batch.learning_rate
    speeds = [each.tokens_per_second for each in batch.tried if each.tokens_per_second]
    length = plan.training.sequence_length
    assumed = f"{format_count(advice.run_tokens)} tokens assumed" if advice.run_tokens_assumed else ""
    sizes = f"{batch.chosen:,} of {batch.least:,} to {batch.most:,} sequences"
    rows: list[tuple[str, RenderableType]] = [("chosen", f"{sizes}, {len(batch.tried)} sizes tried")]
    if speeds:
        rows.append(("speed", f"{format_count(min(speeds))} to {format_count(max(speeds))} tokens/s over these sizes"))
    for each in advice.estimates:
        sequences = f"{format_count(each.num_tokens)} tokens, {each.num_tokens / length:,.0f} sequences"
        rows.append((each.kind, Text.assemble(sequences, (f"  {clean(each.source)}", "dim"))))
    extra = f"{advice.extra_tokens - 1:.0%} more tokens than a small batch for the same loss, by the critical one"
    rates = f"{rate.linear:.3g} by the linear, {rate.square_root:.3g} by the square root rule"
    given = f"  if {rate.given:.3g} is right for {rate.of_batch:,.0f} sequences"
    rows += [("price", extra), ("learning rate", Text.assemble(rates, (given, "dim")))]
    return section("Batch", Columns(rows, wrap=(1,)), note=assumed)


def _runners_up_section(plan: Plan) -> Group | None:
    if not plan.runners_up and plan.certificate is not None:
        words = f"None: no layout with another tp, pp or ep, or with or without ZeRO-3, is within {WORTH_READING:.0%}."
        return section("Runners-up", Text(words, style="dim"))
    if not plan.runners_up:
        return None
    rows = [
        (
            format_seconds(runner.step_seconds),
            format_bytes(runner.peak_bytes),
            Group(
                assignments(short_layout(runner.layout)),
                Text(clean(runner.reason + ("; near tie" if runner.near_tie else "")), style="dim"),
            ),
        )
        for runner in plan.runners_up
    ]
    ties = any(runner.near_tie for runner in plan.runners_up)
    header = ("step", "memory", "layout, and why it is not the plan")
    table = Columns(rows, right=(0, 1), wrap=(2,), header=header)
    note = f"near tie: less than {NEAR_TIE:.0%} apart; measured, the order may be the other" if ties else ""
    return section("Runners-up", table, note=note)


def _proof_section(plan: Plan) -> Group | None:
    if plan.certificate is None:
        return None
    words = (certificate_sentence(plan), *plan.certificate.warnings)
    return section("Proof", *(Text(clean(each)) for each in words))
