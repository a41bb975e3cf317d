"""Progress on stderr: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from planner.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from planner.trainer.trainer import StepResult, Trainer

__all__ = ["Show", "make_progress"]

Show: TypeAlias = "Callable[[StepResult], None]"

SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def make_progress(trainer: Trainer, *, show: bool) -> Iterator[Show]:
    """A function that shows a finished step; it does nothing where `show` is false."""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    if not show:
        yield lambda _: None
    elif console.is_terminal:
        with _bar(console) as bar:
            yield _on_bar(bar, trainer)
    else:
        yield _as_lines(console, trainer)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    return Progress(*columns, TextColumn("time left"), TimeRemainingColumn(), console=console)


def _on_bar(bar: Progress, trainer: Trainer) -> Show:
    task = bar.add_task("", total=trainer.num_steps, completed=trainer.step_number)

    def show(result: StepResult) -> None:
        bar.update(task, completed=trainer.step_number, description=_describe(result, trainer))

    return show


def _as_lines(console: Console, trainer: Trainer) -> Show:
    """The first step, then a line every few seconds, and the last step."""
    shown_at = -SECONDS_BETWEEN_LINES

    def show(result: StepResult) -> None:
        nonlocal shown_at
        left = trainer.num_steps - trainer.step_number
        if left and time.monotonic() - shown_at < SECONDS_BETWEEN_LINES:
            return
        shown_at = time.monotonic()
        time_left = f"time left {format_seconds(left * result.seconds)}"
        console.print(f"step {trainer.step_number}/{trainer.num_steps}  {_describe(result, trainer)}  {time_left}")

    return show


def _describe(result: StepResult, trainer: Trainer) -> str:
    training = trainer.plan.training
    speed = training.global_batch_size * training.sequence_length / result.seconds
    return f"loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  {speed:,.0f} tokens/s"
