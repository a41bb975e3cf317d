"""Read logs of training programs: for each program, the lines with step times and the lines about the model.

Source: the lines as these programs print them: Megatron-LM d98e8a64, megatron/training/training.py; torchtitan,
torchtitan/components/metrics.py; DeepSpeed 038beb63, deepspeed/utils/timer.py and runtime/pipe/engine.py; transformers,
Trainer's bar of tqdm and its last line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planner.calibrate.steps import WARMUP_STEPS, Step
from planner.cost.parameters import num_params
from planner.errors import InputError, Mistake
from planner.units import parse_clock, parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from planner.plan import Plan

_NUMBER: Final = r"[-+]?(?:[0-9][0-9,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?|nan|inf)"
_MILLISECOND: Final = parse_quantity("1 ms", "seconds")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_SAME_PARAMETERS: Final = 0.02
"""Two parameter counts that differ by less than this share may belong to the same model.

A program may count parameters that it does not train, or count tied weights twice.
"""

_BAR_SECONDS: Final = 20
"""Smallest length of an interval of a progress bar, in seconds.

The bar shows whole seconds, so the error is at most 5 %.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """The format of the log lines of one program.

    pattern: a regular expression with groups `step`, `time` and possibly `loss`.
    seconds: function from the time in the line to the seconds of a step.
    """

    program: str
    pattern: re.Pattern[str]
    seconds: Callable[[float, Plan], float]


def _tokens(plan: Plan) -> int:
    return plan.training.global_batch_size * plan.training.sequence_length


_PROGRAMS: Final = (
    _Lines(
        program="Megatron-LM",
        pattern=re.compile(
            rf"iteration\s*=?\s*(?P<step>\d+)\s*/.*?elapsed[ _]time[ _]per[ _]iteration[ _]\(?ms\)?\s*[:=]\s*"
            rf"(?P<time>{_NUMBER})(?:.*?\blm[ _]loss\s*[:=]\s*(?P<loss>{_NUMBER}))?",
            re.IGNORECASE,
        ),
        seconds=lambda time, _: time * _MILLISECOND,
    ),
    _Lines(
        program="torchtitan",
        pattern=re.compile(
            rf"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>{_NUMBER}).*?\btps:\s*(?P<time>{_NUMBER})", re.IGNORECASE
        ),
        seconds=lambda rate, plan: _tokens(plan) / plan.layout.world_size / rate if rate else float("inf"),
    ),
    _Lines(
        program="DeepSpeed",
        pattern=re.compile(rf"global_step=(?P<step>\d+),.*?CurrSamplesPerSec=(?P<time>{_NUMBER})", re.IGNORECASE),
        seconds=lambda rate, plan: plan.training.global_batch_size / rate if rate else float("inf"),
    ),
    _Lines(
        program="DeepSpeed, pipeline",
        pattern=re.compile(
            rf"steps:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>{_NUMBER}).*?iter time \(s\):\s*(?P<time>{_NUMBER})",
            re.IGNORECASE,
        ),
        seconds=lambda time, _: time,
    ),
)

_BAR: Final = re.compile(r"(?P<step>\d+)/(?P<all>\d+) \[(?P<clock>(?:\d+:)?\d+:\d\d)<")
_LOSS: Final = re.compile(rf"\{{'loss': '?(?P<loss>{_NUMBER})")
_LAST: Final = re.compile(
    rf"'train_runtime':\s*'?(?P<time>{_NUMBER}).*?'train_steps_per_second':\s*'?(?P<rate>{_NUMBER})"
)
_OPTION: Final = re.compile(r"^\s*(?:\S+:\s*)?(?P<name>[a-z][a-z0-9_]+) \.{3,} ?(?P<value>\S+)\s*$")
_TITAN_SIZE: Final = re.compile(r"\bsize:\s*(?P<count>[0-9][0-9,]*) total parameters")
_BATCH: Final = re.compile(r"global[ _]batch[ _]size\s*[:=]\s*(?P<count>\d+)")


def read_log(name: str, text: str, plan: Plan) -> list[Step]:
    """The steps of a log, read in the format of its program; `plan` is the plan of the run.

    Raises:
        InputError: a line shows that another model or batch ran, or no line is of a known program.
    """
    lines = [_COLOUR.sub("", line) for line in text.split("\n")]
    _check_model(name, lines, plan)
    for program in _PROGRAMS:
        if steps := list(_steps(program, lines, plan)):
            return steps
    if steps := _bar_steps(lines) or _last_line(lines):
        return steps
    known = ", ".join(dict.fromkeys(each.program.partition(",")[0] for each in _PROGRAMS))
    hint = f"known are the logs of {known} and Hugging Face Trainer; a table (.csv) takes the times of any program"
    raise InputError("no line tells the time of a step", where=f"{name}:{len(lines)}:1", hint=hint)


def _steps(program: _Lines, lines: Sequence[str], plan: Plan) -> Iterator[Step]:
    for number, line in enumerate(lines, 1):
        found = program.pattern.search(line)
        if found is None:
            continue
        batch = _BATCH.search(line)
        if batch and int(batch["count"]) != plan.training.global_batch_size:
            continue  # the batch size is still ramping up
        loss = found.groupdict().get("loss")
        yield Step(
            number=int(found["step"]),
            seconds=program.seconds(_value(found["time"]), plan),
            line=number,
            column=found.start("time") + 1,
            loss=None if loss is None else _value(loss),
        )


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _bar_steps(lines: Sequence[str]) -> list[Step]:
    """Steps from a progress bar's clock, over intervals of at least `_BAR_SECONDS`, for the bar that ran longest."""
    bars: dict[int, list[_Shown]] = defaultdict(list)
    loss = None
    for number, line in enumerate(lines, 1):
        if said := _LOSS.search(line):
            loss = _value(said["loss"])
        for found in _BAR.finditer(line):
            clock = parse_clock(found["clock"])
            bars[int(found["all"])].append(_Shown(int(found["step"]), clock, number, found.start() + 1, loss))
    if not bars:
        return []
    steps: list[Step] = []
    shown = max(bars.values(), key=lambda bar: max(each.clock for each in bar))
    start = before = shown[0]
    for each in shown:
        if each.step < before.step or each.clock < before.clock:
            start = before = each
        elif before is start and each.step - start.step >= WARMUP_STEPS:
            before = each
        elif before is not start and each.clock - before.clock >= _BAR_SECONDS and each.step > before.step:
            count = each.step - before.step
            seconds = (each.clock - before.clock) / count
            place: dict[str, Any] = {"line": each.line, "column": each.column, "loss": each.loss}
            steps.append(Step(number=each.step, seconds=seconds, covers=count, **place))
            before = each
    return steps


class _Shown(NamedTuple):
    """A progress bar at one moment; clock: whole seconds since its start."""

    step: int
    clock: int
    line: int
    column: int
    loss: float | None


def _last_line(lines: Sequence[str]) -> list[Step]:
    """The mean step of a whole run of Trainer, including warm-up, for logs without its progress bar."""
    for number, line in enumerate(lines, 1):
        found = _LAST.search(line)
        if found and _value(found["rate"]) > 0:
            rate = _value(found["rate"])
            steps = round(_value(found["time"]) * rate)
            return [Step(number=steps, seconds=1 / rate, line=number, column=found.start("rate") + 1, covers=steps)]
    return []


def _check_model(name: str, lines: Sequence[str], plan: Plan) -> None:
    """Refuse a log whose own lines show that another model ran; the message quotes the line."""
    model, training, layout = plan.model, plan.training, plan.layout
    said = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "seq_length": training.sequence_length,
        "global_batch_size": training.global_batch_size,
        "micro_batch_size": layout.mbs,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "world_size": layout.world_size,
    }
    hint = "give the plan that this log ran, or leave the log out"
    mistakes = []
    batches: dict[int, tuple[int, int]] = {}
    for number, line in enumerate(lines, 1):
        if (option := _OPTION.match(line)) and option["value"] != str(said.get(option["name"], option["value"])):
            words = f"{option['name']} is {option['value']}, and {said[option['name']]} in the plan"
            mistakes.append(
                Mistake(
                    message=words, where=f"{name}:{number}:{option.start('value') + 1}", hint=hint, source_line=line
                )
            )
        if size := _TITAN_SIZE.search(line):
            count, planned = int(size["count"].replace(",", "")), num_params(model)
            if abs(count / planned - 1) > _SAME_PARAMETERS:
                words = f"the log's model has {count:,} parameters, and {model.name} of the plan {planned:,}"
                mistakes.append(Mistake(message=words, where=f"{name}:{number}:{size.start('count') + 1}", hint=hint))
        if batch := _BATCH.search(line):
            batches[int(batch["count"])] = number, batch.start("count") + 1
    if batches and training.global_batch_size not in batches:
        count, (number, column) = next(iter(batches.items()))
        words = f"the global batch is {count}, and {training.global_batch_size} in the plan"
        mistakes.append(Mistake(message=words, where=f"{name}:{number}:{column}", hint=hint))
    if mistakes:
        raise InputError(*mistakes)
