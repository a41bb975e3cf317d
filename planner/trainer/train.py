"""A training run: steps, progress, metrics, checkpoints, and the reason for its end."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from planner.errors import ExitCode, InputError
from planner.specs.text import printable
from planner.trainer.checkpoint import Saver, restore
from planner.trainer.heartbeat import heartbeat
from planner.trainer.hugging_face import model_type_of
from planner.trainer.loggers import make_loggers
from planner.trainer.measure import WARMUP_STEPS, MemoryMeter, measurements, peak_memory_bytes
from planner.trainer.parallelize import compiles
from planner.trainer.progress import make_progress, mfu, spread, tokens_per_second_per_device
from planner.trainer.verdict import forget_failures, write_status
from planner.trainer.waiting import WaitSampler
from planner.trainer.weights import export_weights, load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from planner.trainer.loggers import Logger
    from planner.trainer.options import RunOptions
    from planner.trainer.trainer import StepResult, Trainer

CHECKPOINT_SECONDS = 600.0
VALIDATION_BATCHES = 10
STEPS_SAMPLED = 20
RESULTS_KEPT = 1000  # the newest steps, for the medians of measurements.json


def run(trainer: Trainer, options: RunOptions) -> ExitCode:
    """Train to the last step; every rank calls this function.

    Returns:
        OK, PREEMPTED after a signal (the state is saved), or DIVERGED (the weights are as before the step).
    """
    options.output.mkdir(parents=True, exist_ok=True)
    with heartbeat(options.output, dist.get_rank()):
        if options.export is not None:
            model_type_of(trainer.plan.model)  # refuses a model without a naming now, and not behind the last step
        _resume(trainer, options)
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)
        return _Run(trainer, options).to_the_end()


def _resume(trainer: Trainer, options: RunOptions) -> None:
    """Load the checkpoint to resume from; without one, load the initial weights."""
    if options.resume not in ("auto", "never") and not options.resume.isdigit():
        raise InputError(f"--resume {options.resume} is no step", hint="give auto, never or a step")
    step = int(options.resume) if options.resume.isdigit() else None
    restored = None if options.resume == "never" else restore(trainer, options.checkpoints, step)
    if restored is None and options.weights is not None:
        load_weights(trainer, options.weights)
    elif restored is not None and dist.get_rank() == 0:
        sys.stderr.write(f"going on from the checkpoint of step {restored}, of {trainer.num_steps} steps\n")


class _Run:
    """The state of the loop between steps."""

    def __init__(self, trainer: Trainer, options: RunOptions) -> None:
        self.trainer, self.options = trainer, options
        self.chief = dist.get_rank() == 0
        self.stop = threading.Event()
        self.results: deque[StepResult] = deque(maxlen=RESULTS_KEPT)
        self.cpu_seconds: deque[float] = deque(maxlen=RESULTS_KEPT)
        self.saved_at = time.monotonic()
        self.saver = Saver(options.checkpoints, keep=options.keep_checkpoints, background=options.async_save)
        self.loggers: list[Logger] = []
        self.waits = WaitSampler(trainer.plan.layout) if trainer.device.type == "cpu" else None

    def to_the_end(self) -> ExitCode:
        """Run the remaining steps, then write measurements and verdict."""
        trainer, options = self.trainer, self.options
        meter = MemoryMeter(trainer.chunks, trainer.optimizer)
        dist.barrier()  # the verdict of a rank that fails before this point is final: no code below overwrites it
        if self.chief:
            _forget_later_steps(options.output / "metrics.jsonl", trainer.step_number)
            forget_failures(options.output)
            self.loggers = make_loggers(
                options.output, trainer.plan, tensorboard=options.tensorboard, wandb=options.wandb
            )
            write_status(options.output, "running", trainer.step_number)
            if trainer.step_number >= trainer.num_steps:
                self._say_that_nothing_is_left()
        code = ExitCode.OK
        with _signals_set(self.stop), make_progress(trainer, show=self.chief) as show:
            while trainer.step_number < trainer.num_steps and code is ExitCode.OK:
                with self._watched(meter):
                    result = self._step()
                if len(self.results) == 1 and compiles(trainer.plan.layout, trainer.device):
                    # the first step measures memory: it asks autograd, operator by operator
                    trainer.compile_layers(async_tp=options.async_tp)
                if result.finite:
                    show(result)
                code = self._after(result)
        self.saver.wait()
        if code is ExitCode.OK and options.export is not None:
            export_weights(trainer, options.export, options.weights)
        document = measurements(trainer, meter, list(self.results), self.waits) | {"ranks": spread(self.cpu_seconds)}
        if self.chief:
            for logger in self.loggers:
                logger.close()
            if self.results:  # without new steps, the measurements of the earlier steps stay
                (options.output / "measurements.json").write_text(json.dumps(document, indent=1) + "\n")
            self._write_verdict(code)
        dist.barrier()
        return code

    def _say_that_nothing_is_left(self) -> None:
        trainer, folder = self.trainer, self.options.output
        sys.stderr.write(
            f"note: the run in {printable(str(folder))} is at step {trainer.step_number} of {trainer.num_steps}, so no "
            f"step is trained; --steps {trainer.num_steps * 2} trains further, and --output starts another run\n"
        )

    def _watched(self, meter: MemoryMeter) -> AbstractContextManager[None]:
        """Watch the memory of the first step, and the waiting times of some steps after the warm-up."""
        if not self.results:
            return meter.watch()
        if self.waits is not None and WARMUP_STEPS <= len(self.results) < WARMUP_STEPS + STEPS_SAMPLED:
            return self.waits.watch()
        return contextlib.nullcontext()

    def _step(self) -> StepResult:
        by_clock = self.options.checkpoint_every is None
        save_now = by_clock and time.monotonic() - self.saved_at > CHECKPOINT_SECONDS
        asked = self.chief and (self.options.output / "stop").exists()  # `planner launch` asks this way
        before = time.process_time()
        with self._profiled():
            self.results.append(self.trainer.step(stop=asked or self.stop.is_set(), save=save_now))
        self.cpu_seconds.append(time.process_time() - before)
        return self.results[-1]

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        """Record the requested step as a trace of each rank, for chrome://tracing and Perfetto."""
        if self.trainer.step_number + 1 != self.options.profile:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        folder = self.options.output / "profile"
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank-{dist.get_rank()}.json"))

    def _after(self, result: StepResult) -> ExitCode:
        if not result.finite:
            return ExitCode.DIVERGED
        step, every = self.trainer.step_number, self.options.checkpoint_every
        last = step == self.trainer.num_steps
        validated = self._validate() if last or step % self.options.validate_every == 0 else {}
        for logger in self.loggers:
            logger.log(self._record(result) | validated)
        if result.save or result.stop or last or (every and step % every == 0):
            self.saver.save(self.trainer)
            self.saved_at = time.monotonic()
        return ExitCode.PREEMPTED if result.stop and not last else ExitCode.OK

    def _validate(self) -> dict[str, float | None]:
        """Loss of a limited number of held-out samples, in whole batches."""
        batches = self.trainer.corpus.num_held_out // self.trainer.plan.training.global_batch_size
        if batches == 0:
            return {}
        return {"validation_loss": self.trainer.validation_loss(min(batches, VALIDATION_BATCHES))}

    def _record(self, result: StepResult) -> dict[str, float | None]:
        training = self.trainer.plan.training
        return {
            "step": self.trainer.step_number,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "tokens": self.trainer.step_number * training.global_batch_size * training.sequence_length,
            "step_seconds": result.seconds,
            "peak_memory_bytes": peak_memory_bytes(self.trainer.device),
            "tokens_per_second_per_device": tokens_per_second_per_device(self.trainer.plan, result.seconds),
            "mfu": mfu(self.trainer.plan, result.seconds),
        }

    def _write_verdict(self, code: ExitCode) -> None:
        step, output = self.trainer.step_number, self.options.output
        if code is ExitCode.DIVERGED:
            result = self.results[-1]
            reason = f"loss {result.loss} and gradient norm {result.grad_norm} at step {step + 1}"
            write_status(output, "diverged", step, reason)
        elif code is ExitCode.PREEMPTED:
            (output / "stop").unlink(missing_ok=True)
            write_status(output, "saved", step, "stopped by a signal")
        else:
            write_status(output, "done", step)


def _forget_later_steps(metrics: Path, step: int) -> None:
    """Remove metrics of steps after the checkpoint, which will run again.

    Also remove an incomplete line after a crash or on a full disk.
    """
    if metrics.exists():
        lines = [line for line in metrics.read_text().splitlines() if _step_of(line) <= step]
        draft = metrics.with_name(f".{metrics.name}.tmp")
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.replace(metrics)


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


@contextlib.contextmanager
def _signals_set(flag: threading.Event) -> Iterator[None]:
    """Let SIGTERM, SIGINT and SIGUSR1 only set a flag; all ranks agree on it at the end of the step."""
    before = {
        each: signal.signal(each, lambda *_: flag.set()) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
