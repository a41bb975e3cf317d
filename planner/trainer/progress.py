"""Progress on stderr: a live bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from planner.trainer.measure import peak_memory_bytes
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from planner.plan import Plan
    from planner.trainer.trainer import StepResult, Trainer

Show: TypeAlias = "Callable[[StepResult], None]"

SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def make_progress(trainer: Trainer, *, show: bool) -> Iterator[Show]:
    """A function that shows a finished step; it does nothing if `show` is false."""
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
    """Print the first step, then a line every few seconds, and the last step."""
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
    parts = [
        f"loss {result.loss:.4f}",
        f"grad norm {result.grad_norm:.3f}",
        f"{tokens_per_second_per_device(trainer.plan, result.seconds):,.0f} tokens/s per device",
    ]
    if share := mfu(trainer.plan, result.seconds):
        parts.append(f"MFU {share:.1%}")
    if num_bytes := peak_memory_bytes(trainer.device):
        parts.append(format_bytes(num_bytes))
    return "  ".join(parts)


def tokens_per_second_per_device(plan: Plan, step_seconds: float) -> float:
    """Tokens of the global batch divided by time and devices, counted as in the plan."""
    tokens = plan.training.global_batch_size * plan.training.sequence_length
    return tokens / step_seconds / plan.layout.world_size


def mfu(plan: Plan, step_seconds: float) -> float:
    """Model FLOPs utilization of a measured step, from the plan's FLOPs and the peak of its device."""
    return plan.mfu * plan.step_seconds / step_seconds


def spread(cpu_seconds: Sequence[float]) -> dict[str, Any]:
    """CPU time of each rank's process per step, to find a slow rank; every rank calls this function and gets all times.

    The times are medians over the steps. Wall time would show nothing, because ranks wait for each other in every step.
    The GPU's own time is not included.
    """
    everyone: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, statistics.median(cpu_seconds) if cpu_seconds else None)
    known = [seconds for seconds in everyone if seconds is not None]
    middle = statistics.median(known) if known else None
    return {"cpu_seconds": everyone, "largest_over_median": max(known) / middle if known and middle else None}
