"""Read logs of training programs: for each program, the lines with step times.

Source: programs.yaml, which has the lines as these programs print them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from planner.errors import InputError, Mistake
from planner.evidence.logs.lines import Line, lines_of
from planner.evidence.logs.stated import BATCH, FORMS, mistakes_of
from planner.evidence.logs.steps import WARMUP_STEPS, Step
from planner.specs.text import any_of, printable
from planner.units import UNITS, format_seconds, parse_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TextIO

    from planner.plan import Plan
    from planner.specs.calibration import Counter

_NUMBER: Final = re.compile(
    r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?|nan|inf)", re.IGNORECASE
)
"""A number, perhaps with commas between groups of three digits; a comma before other digits may be a decimal point."""

_GROUP: Final = r"['\"]?(?P<{}>[-+\w.,]{{1,99}})"
_STEP: Final = r"(?P<step>[0-9]{1,15})"
_PEAK: Final = r"(?P<count>[0-9.]{1,20})"

_BAR_SECONDS: Final = 20
"""Smallest length of an interval of a progress bar, in seconds.

The bar shows whole seconds, so the error is at most 5 %.
"""

_FINE: Final = 0.01
"""Largest relative rounding error of a rate that needs no note."""

_RATE_ERROR: Final = 0.0005
"""Trainer rounds rates to three decimals."""

_MOST: Final = 1e9
"""Seconds of a run, and steps per second, that no run exceeds."""

_TRAINER: Final = ("fsdp", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """The format of the log lines of one program, whose parts follow each other, as programs.yaml explains it.

    loss: in front of the time or behind it; None if the line has none.
    """

    program: str
    engines: Sequence[str]
    step: re.Pattern[str]
    time: re.Pattern[str]
    time_is: str
    loss: re.Pattern[str] | None

    def seconds(self, number: float, plan: Plan) -> float:
        """The seconds of a step, from the number that stands in the line for its time."""
        if self.time_is in ("milliseconds", "seconds"):
            return number * UNITS["seconds"]["ms" if self.time_is == "milliseconds" else "s"]
        training, ranks = plan.training, plan.layout.world_size
        in_all = training.global_batch_size if self.time_is == "samples" else training.step_tokens / ranks
        return in_all / number if number else float("inf")


def _pattern(text: str, group: str = "") -> re.Pattern[str]:
    """A pattern, and behind it the text of a number as `group`."""
    return re.compile(text.replace("<step>", _STEP) + (_GROUP.format(group) if group else ""))


_PARTS: Final = (("step", ""), ("time", "time"), ("loss", "loss"))
_PROGRAMS: Final = tuple(
    _Lines(**{"loss": None, **form, **{part: _pattern(form[part], group) for part, group in _PARTS if part in form}})
    for form in FORMS["programs"]
)
_MEGATRON: Final = tuple(name for name in _PROGRAMS[0].engines if name.startswith("megatron"))

_BAR: Final = re.compile(
    r"%(?:\|[^|]{0,300}\|)? {0,9}(?P<step>[0-9]{1,15})/(?P<all>[0-9]{1,15}) "
    r"\[(?P<clock>(?:[0-9]{1,9}:)?[0-9]{1,2}:[0-9]{2})<[^],]{0,30}, {0,9}[0-9.?]{1,20}(?:it/s|s/it)\b"
)
_RANK: Final = re.compile(r"^\[?[0-9]+\]?:|\[(?:rank|default)[0-9]+\]:")
"""The mark of a process in front of its lines: `0:` by srun, `[rank0]:` by torchrun."""

_MARKS: Final = 80
"""Longest text with marks and time stamps in front of a line."""

_DESCRIBED: Final = re.compile(r"(?P<words>[^|\r{}]{1,99}): {0,9}[0-9]{1,3}$")
"""The description of a bar, in front of its percentage."""

_TELLS: Final = {name: _pattern(words, name) for name, words in FORMS["trainer"].items()}
"""Figures in lines of Hugging Face Trainer."""

_NUM_STEPS: Final = re.compile(r"Total optimization steps = (?P<count>[0-9,]{1,20})")
_WORDS: Final = FORMS["words"]
"""Every line that tells a time or the model has one of these words."""


class _Read(NamedTuple):
    """The steps that lines of one kind tell; engines: names of the engines whose runs have such lines."""

    program: str
    engines: Sequence[str]
    steps: list[Step]
    notes: list[str]


class OtherRun(InputError):
    """A record of a run says that another model, batch, layout or program ran than a plan says."""


class Log(NamedTuple):
    """The steps of a run, and its peak in bytes with the counter that the record names, if it tells one."""

    steps: list[Step]
    peak: tuple[float, Counter] | None


_PEAKS: Final = [
    (form["counter"], re.compile(form["line"].replace("<count>", _PEAK)), UNITS["bytes"][form["unit"]])
    for form in FORMS["peaks"]
]
"""Peaks in the lines of programs: the counter, the number, and its unit in bytes."""


def _peak(lines: Sequence[Line]) -> tuple[float, Counter] | None:
    """The largest peak of any rank, by the first counter that the lines tell."""
    for counter, pattern, unit in _PEAKS:
        if found := [_value(peak["count"]) for line in lines if (peak := pattern.search(line.text))]:
            return max(each or 0.0 for each in found) * unit, counter
    return None


def read_log(name: str, file: TextIO, plan: Plan, tell: Callable[[str], None] = lambda _: None) -> Log:
    """The steps and the peak of a log, read in the format of its program; `plan` is the plan of the run.

    file: a stream that keeps its line ends; it is read once.
    tell: called with each note about lines that are left out.

    Raises:
        OtherRun: a line shows that another model, batch, layout or program ran.
        InputError: no line is of a known program.
    """
    lines, last = [], 1
    for line in lines_of(file, name):
        last = line.number
        if any(word in line.text for word in _WORDS):
            lines.append(line)
    found = [_steps(name, program, lines, plan) for program in _PROGRAMS]
    found += [read for read in (_bar_steps(lines), _last_line(name, lines, plan)) if read]
    mistakes = mistakes_of(name, lines, plan)
    found = [read for read in found if read.steps]
    own = [read for read in found if plan.engine.name in read.engines]
    if found and not own:
        mistakes.append(_wrong_program(name, found[0], plan))
    if mistakes:
        raise OtherRun(*mistakes)
    if not own:
        raise _without_times(name, lines, last)
    for note in own[0].notes:
        tell(note)
    return Log(own[0].steps, _peak(lines))


def _wrong_program(name: str, read: _Read, plan: Plan) -> Mistake:
    first, engine = read.steps[0], plan.engine
    return Mistake(
        message=f"these are lines of {read.program}, and the plan's engine is {engine.name} ({engine.program})",
        where=f"{name}:{first.line}:{first.column}",
        hint=f"give a plan of this run, made with --engine {any_of(read.engines)}, or leave the log out",
    )


def _without_times(name: str, lines: Sequence[Line], last: int) -> InputError:
    for program in _PROGRAMS:
        for line in lines:
            if program.step.search(line.text) and (time := program.time.search(line.text)):
                words = f"no line has a time that can be read: `{printable(time['time'], 40)}`"
                hint = "numbers have a decimal point, and commas only between groups of three digits"
                return InputError(words, where=f"{name}:{line.number}:{line.start + time.start('time') + 1}", hint=hint)
    known = ", ".join(dict.fromkeys(each.program.partition(",")[0] for each in _PROGRAMS))
    hint = (
        f"known are the logs of {known} and Hugging Face Trainer, whose bar has no description; "
        "a table (.csv) takes the times of any program"
    )
    return InputError("no line tells the time of a step", where=f"{name}:{last}:1", hint=hint)


def _steps(name: str, program: _Lines, lines: Sequence[Line], plan: Plan) -> _Read:
    steps, unreadable, ramp = [], list[int](), list[tuple[int, str]]()
    for line in lines:
        step = program.step.search(line.text)
        time = program.time.search(line.text, step.end()) if step else None
        if step is None or time is None:
            continue
        batch = BATCH.search(line.text)
        if batch and int(batch["count"]) != plan.training.global_batch_size:
            ramp.append((line.number, step["step"]))
            continue
        said = program.loss.search(line.text, step.end()) if program.loss else None
        value, loss = _value(time["time"]), _value(said["loss"]) if said else None
        if value is None:
            unreadable.append(line.number)
            continue
        rank = _RANK.search(line.text[:_MARKS])
        steps.append(
            Step(
                number=int(step["step"]),
                seconds=program.seconds(value, plan),
                line=line.number,
                column=line.start + time.start("time") + 1,
                loss=loss,
                rank=rank[0] if rank else "",
            )
        )
    notes = []
    if ramp:
        notes.append(
            f"{name}:{ramp[0][0]}: {len(ramp)} steps with another batch, up to step {ramp[-1][1]}, are left out"
        )
    if unreadable:
        notes.append(f"{name}:{unreadable[0]}: {len(unreadable)} lines whose time is no number are left out")
    return _Read(program.program, program.engines, steps, notes)


def _value(text: str) -> float | None:
    """A number as a program prints it; None if it cannot be read without doubt."""
    text = text.strip(".,")
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _bar_steps(lines: Sequence[Line]) -> _Read | None:
    """Steps from the clock of Trainer's progress bar, over intervals of at least `_BAR_SECONDS`.

    The training bar has no description (ms-swift writes `Train`). If several bars have none, it is the one with
    Trainer's number of steps, or else the one that ran longest.
    """
    bars: dict[tuple[bool, int], list[_Shown]] = defaultdict(list)
    loss, total = None, None
    for line in lines:
        if said := _TELLS["loss"].search(line.text):
            loss = _value(said["loss"])
        if count := _NUM_STEPS.search(line.text):
            total = int(count["count"].replace(",", ""))
        for is_swift, found in _bars(line.text):
            clock, place = parse_clock(found["clock"]), (line.number, line.start + found.start("step") + 1)
            bars[is_swift, int(found["all"])].append(_Shown(int(found["step"]), clock, *place, loss))
    if not bars:
        return None
    (is_swift, _), shown = max(bars.items(), key=lambda bar: (bar[0][1] == total, max(each.clock for each in bar[1])))
    program = "ms-swift" if is_swift else "Hugging Face Trainer"
    return _Read(program, (*_TRAINER, *(_MEGATRON if is_swift else ())), list(_intervals(shown)), [])


def _bars(text: str) -> Iterator[tuple[bool, re.Match[str]]]:
    """The training bars of a line, and whether ms-swift drew them."""
    for found in _BAR.finditer(text):
        before = _RANK.sub("", text[max(0, found.start() - 120) : found.start()].lstrip())
        described = _DESCRIBED.search(before)
        words = described["words"].split()[-1] if described and described["words"].strip() else ""
        if words in ("", "Train"):
            yield words == "Train", found


def _intervals(shown: Sequence[_Shown]) -> Iterator[Step]:
    start = before = shown[0]
    for each in shown:
        if each.step < before.step or each.clock < before.clock:
            start = before = each
        elif before is start and each.step - start.step >= WARMUP_STEPS:
            before = each
        elif before is not start and each.clock - before.clock >= _BAR_SECONDS and each.step > before.step:
            count = each.step - before.step
            seconds = (each.clock - before.clock) / count
            yield Step(
                number=each.step, seconds=seconds, covers=count, line=each.line, column=each.column, loss=each.loss
            )
            before = each


class _Shown(NamedTuple):
    """A progress bar at one moment; clock: whole seconds since its start."""

    step: int
    clock: int
    line: int
    column: int
    loss: float | None


def _last_line(name: str, lines: Sequence[Line], plan: Plan) -> _Read | None:
    """The mean step of a whole run of Trainer, including warm-up, for logs without its progress bar.

    The rate in steps has three decimals. If that is coarse, a finer figure that agrees with it takes its place: the
    number of steps and the length of the run, or the rate in samples.
    """
    total = 0
    for line in lines:
        if count := _NUM_STEPS.search(line.text):
            total = int(count["count"].replace(",", ""))
        found = _TELLS["rate"].search(line.text)
        rate, runtime, samples = (_first(_TELLS[name], line.text) for name in ("rate", "runtime", "samples"))
        if found is None or not 0 < runtime < _MOST or not 0 <= rate < _MOST:
            continue
        low, high = max(rate - _RATE_ERROR, 0.0), rate + _RATE_ERROR
        finer = (total / runtime, samples / plan.training.global_batch_size)
        is_coarse = rate < _RATE_ERROR / _FINE
        exact = next(
            (each for each in finer if is_coarse and 0 < low <= each * (1 + _FINE) and each <= high * (1 + _FINE)), 0.0
        )
        if not (exact or rate):
            continue
        place = line.start + found.start("rate") + 1
        steps = max(1, round(runtime * (exact or rate)))
        notes = []
        if is_coarse and not exact:
            slowest = format_seconds(1 / low) if low else "any time"
            range_ = f"from {format_seconds(1 / high)} to {slowest}"
            notes = [f"{name}:{line.number}: a rate of {rate:g} is rounded; the step took {range_}"]
        step = Step(number=steps, seconds=1 / (exact or rate), covers=steps, line=line.number, column=place)
        return _Read("Hugging Face Trainer", _TRAINER, [step], notes)
    return None


def _first(pattern: re.Pattern[str], text: str) -> float:
    """The number behind a pattern; 0 if there is none."""
    found = pattern.search(text)
    return (_value(found[1]) or 0.0) if found else 0.0
