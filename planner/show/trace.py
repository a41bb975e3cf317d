"""The executed step in the Trace Event Format, which Perfetto and chrome://tracing open.

The first process is the ledger, with its lines end to end; their sum is the step time of the estimate. Every other
process is a pipeline stage, or with `ranks` a rank of one replica. A process shows the stage's passes in the order of
the schedule, each divided into the ledger's lines, and hidden communication in separate threads. The lines of a pass
are drawn one after another, although in reality the layers of a chunk alternate between computing and communicating.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.answers.executed import PASS_NAMES, executed_step
from planner.answers.plan_inputs import job_of
from planner.cost.ledger import LineName
from planner.errors import InputError
from planner.layout import format_layout, stage_of_chunk
from planner.show.words import line_label
from planner.specs.yaml import shipped_yaml
from planner.sums import sum_of
from planner.units import UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from planner.answers.executed import ExecutedStep
    from planner.layout import Layout
    from planner.plan import Plan

_MOST_EVENTS: Final = 4_000_000
"""Largest number of events, about 800 MB of text, that Perfetto's user interface can load in a browser."""
_TICKS_PER_MICROSECOND: Final = 1000
_SAID: Final[Any] = shipped_yaml(Path(__file__).with_suffix(".yaml")).plain
_CATEGORIES: Final = {LineName(line): name for name, lines in _SAID["categories"].items() for line in lines}
_PASSES, _SENDS, _ONCE, _EXCHANGES = 1, 2, 6, 7
_THREADS: Final = dict(enumerate(_SAID["threads"], 1))
_HIDDEN_EACH: Final = {LineName.TP_COMM: 3, LineName.CP_COMM: 4, LineName.DP_COMM: 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """A time interval on a thread of the trace, in seconds."""

    thread: int
    name: str
    category: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)


def trace_text(plan: Plan, *, ranks: bool = False) -> Iterator[str]:
    """Return the trace as pieces of JSON text, one event on a line.

    Raises:
        InputError: the trace has more events than a viewer can load, or the plan's options are not valid.
    """
    job = job_of(plan)
    step = executed_step(job, plan.layout)
    _check_size(plan.layout, step, ranks=ranks)
    about = {
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "engine": plan.engine.name,
        "layout": format_layout(plan.layout),
        "estimate_step_seconds": plan.step_seconds,
        "executed_step_seconds": step.step_seconds,
        "executed_pipeline_seconds": step.pipeline_seconds,
        "note": _SAID["note"],
    }
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)},\n"traceEvents": [\n'
    comma = ""
    for event in _events(plan, step, ranks=ranks):
        yield comma + json.dumps(event, allow_nan=False)
        comma = ",\n"
    yield "\n]}\n"


def _check_size(layout: Layout, step: ExecutedStep, *, ranks: bool) -> None:
    kinds = step.timeline.kind
    most = 3 + max(len(kind.parts) for kind in step.kinds.values())
    count = len(kinds) * most * (layout.tp * layout.cp if ranks else 1)
    if count > _MOST_EVENTS:
        hint = "leave out --ranks" if ranks else "trace a smaller global batch, which repeats the same pattern less"
        raise InputError(f"the trace would have up to {count:,} events, too many for a viewer", hint=hint)


def _events(plan: Plan, step: ExecutedStep, *, ranks: bool) -> Iterator[dict[str, Any]]:
    layout = plan.layout
    hidden = dict.fromkeys(range(2, 2 + len(plan.time)), "hidden")
    yield from _process(0, "ledger: the step of the estimate", _ledger(plan), {1: "exposed"} | hidden)
    for stage in range(layout.pp):
        slices = list(_stage(layout, step, stage))
        names = _ranks_of_stage(layout, stage) if ranks else {1 + stage: f"stage {stage}"}
        for process, name in names.items():
            yield from _process(process, f"{name}, {_layers(layout, stage)}", slices, _THREADS)


def _ranks_of_stage(layout: Layout, stage: int) -> dict[int, str]:
    """Return the names of a stage's ranks in the first data-parallel replica, by process id of the trace."""
    found = {}
    for cp in range(layout.cp):
        for tp in range(layout.tp):
            rank = layout.rank_of({"pp": stage, "dp": 0, "cp": cp, "tp": tp})
            found[1 + rank] = f"stage {stage}, rank {rank} (tp {tp}, cp {cp})"
    return found


def _layers(layout: Layout, stage: int) -> str:
    count = layout.layers_of_stage(stage)
    return f"{count} layer{'s' if count != 1 else ''}"


# --- what is drawn ----------------------------------------------------------------------------------------------


def _ledger(plan: Plan) -> Iterator[_Slice]:
    """Draw the step and its ledger lines end to end, and the hidden part of each line on a thread of its own.

    A hidden part ends with the computing, which hides it.
    """
    yield _Slice(thread=1, name="step", category="step", start=0.0, end=plan.step_seconds)
    computing = [line for line in plan.time if _CATEGORIES.get(line.name) in ("compute", "recompute")]
    work = sum_of(float(line.exposed_seconds) for line in computing)
    at, thread = 0.0, 1
    for line in plan.time:
        exposed, hidden = float(line.exposed_seconds), float(line.hidden_seconds)
        args = {
            "stage": line.stage, "busy_seconds": float(line.busy_seconds), "hidden_seconds": hidden,
            "formula": line.formula, "source": line.source, "bound": line.bound,
        }  # fmt: skip
        if exposed > 0:
            yield _line(1, line.name, at, exposed, args)
        if hidden > 0:
            thread += 1
            yield _line(thread, line.name, max(0.0, work - hidden), hidden, args)
        at += max(exposed, 0.0)


def _line(thread: int, name: LineName, start: float, seconds: float, args: dict[str, Any]) -> _Slice:
    category = _CATEGORIES.get(name, "collective")
    return _Slice(thread=thread, name=line_label(name), category=category, start=start, end=start + seconds, args=args)


def _stage(layout: Layout, step: ExecutedStep, stage: int) -> Iterator[_Slice]:
    own = np.flatnonzero(step.timeline.stage == stage)
    yield from _passes(step, stage, own)
    yield from _hidden_sends(layout, step, stage, own)
    yield from _hidden_collectives(step, stage, own)
    at = step.pipeline_seconds
    for name, seconds in step.tail[stage]:
        yield _line(_PASSES, name, at, seconds, _bytes(step, name, stage, seconds))
        at += seconds


def _bytes(step: ExecutedStep, name: LineName, stage: int, seconds: float) -> dict[str, Any]:
    """Return the bytes of one slice of a communication line, in proportion to the slice's seconds."""
    rate = step.bytes_per_second.get(name)
    return {} if rate is None else {"num_bytes": round(float(rate[stage]) * seconds)}


def _passes(step: ExecutedStep, stage: int, own: NDArray[np.int64]) -> Iterator[_Slice]:
    passes = step.timeline
    for index in own:
        kind, chunk = str(passes.kind[index]), int(passes.chunk[index])
        start, end = float(passes.start[index]), float(passes.end[index])
        what = step.kinds[kind, chunk]
        args = {
            "microbatch": int(passes.microbatch[index]), "chunk": chunk,
            "model_flops": what.model_flops, "recomputed_flops": what.recomputed_flops,
        }  # fmt: skip
        name, category = PASS_NAMES[kind], "forward" if kind == "F" else "backward"
        yield _Slice(thread=_PASSES, name=name, category=category, start=start, end=end, args=args)
        hides = float(passes.hidden[index])
        paired: dict[LineName, float] = {
            line: whole for line, whole in what.parts if line in (LineName.EP_COMM, LineName.PP_COMM)
        }
        share = hides / sum_of(paired.values()) if hides else 0.0
        behind = start
        for line, whole in paired.items():
            if share > 0:
                seconds = share * whole
                yield _line(_EXCHANGES, line, behind, seconds, _bytes(step, line, stage, seconds))
                behind += seconds
        for line, whole in what.parts:
            seconds = whole * (1.0 - share) if line in paired else whole
            stop = min(start + seconds, end)
            yield _line(_PASSES, line, start, stop - start, _bytes(step, line, stage, seconds))
            start = stop


def _hidden_sends(layout: Layout, step: ExecutedStep, stage: int, own: NDArray[np.int64]) -> Iterator[_Slice]:
    """Draw the sends to adjacent stages that the next pass hides, one after another on the link."""
    if step.send <= 0:
        return
    passes, free = step.timeline, 0.0
    for index in own[np.isin(passes.kind[own], ("F", "B", "I"))]:
        kind, chunk = passes.kind[index], int(passes.chunk[index])
        other = chunk + 1 if kind == "F" else chunk - 1
        to = int(stage_of_chunk(layout.schedule, layout.pp, other)) if 0 <= other < layout.num_chunks else stage
        if to == stage:
            continue
        start = max(free, float(passes.end[index]))
        free = start + step.send
        args = {"microbatch": int(passes.microbatch[index]), "to_stage": to}
        yield _line(_SENDS, LineName.PP_COMM, start, step.send, args | _bytes(step, LineName.PP_COMM, stage, step.send))


def _hidden_collectives(step: ExecutedStep, stage: int, own: NDArray[np.int64]) -> Iterator[_Slice]:
    """Draw hidden collectives: a microbatch's beside its passes, and the step's so that they end with the last pass."""
    passes = step.timeline
    starts, lengths = passes.start[own], passes.end[own] - passes.start[own]
    for name, each in step.hidden_each.items():
        share = float(each[stage]) * len(np.unique(passes.microbatch[own])) / float(lengths.sum())
        for start, seconds in zip(starts.tolist(), (share * lengths).tolist(), strict=True):
            if seconds > 0:
                yield _line(_HIDDEN_EACH[name], name, start, seconds, _bytes(step, name, stage, seconds))
    once = float(step.hidden_once[stage])
    if once > 0:
        start = max(0.0, float(passes.end[own].max()) - once)
        yield _line(_ONCE, LineName.DP_COMM, start, once, _bytes(step, LineName.DP_COMM, stage, once))


# --- events -----------------------------------------------------------------------------------------------------


def _process(process: int, name: str, slices: Iterable[_Slice], threads: dict[int, str]) -> Iterator[dict[str, Any]]:
    """Return the events of a process, its named threads and its slices; times are in microseconds."""
    found = list(slices)
    yield _meta("process_name", process, 0, name=name)
    yield _meta("process_sort_index", process, 0, sort_index=process)
    for thread in sorted({each.thread for each in found}):
        yield _meta("thread_name", process, thread, name=threads[thread])
        yield _meta("thread_sort_index", process, thread, sort_index=thread)
    starts, ends = (_ticks(times) for times in zip(*((each.start, each.end) for each in found), strict=True))
    begins, lengths = _microseconds(starts), _microseconds(ends - starts)
    for each, begin, length in zip(found, begins, lengths, strict=True):
        event = {"ph": "X", "pid": process, "tid": each.thread, "ts": begin, "dur": length}
        yield event | {"name": each.name, "cat": each.category, "args": each.args}


def _meta(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": args}


def _ticks(seconds: Iterable[float]) -> NDArray[np.int64]:
    """Round to nanoseconds, as Perfetto does, so that adjacent slices stay adjacent and parts stay in their pass."""
    return np.rint(np.fromiter(chain(seconds), dtype=float) / UNITS["seconds"]["ns"]).astype(np.int64)


def _microseconds(ticks: NDArray[np.int64]) -> list[float]:
    """Convert nanoseconds to microseconds, as doubles that give the same nanoseconds when multiplied and truncated."""
    found = ticks / _TICKS_PER_MICROSECOND
    short = np.floor(found * _TICKS_PER_MICROSECOND) < ticks
    times: list[float] = np.where(short, np.nextafter(found, np.inf), found).tolist()
    return times
