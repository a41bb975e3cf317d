"""Price every run of a table and compare the prediction with the measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.cost.estimate import estimate
from planner.cost.ledger import LineName, StageMemory
from planner.cost.memory import CACHED_SHARE
from planner.errors import InputError
from planner.evidence.rows.jobs import Setup, Unsupported, job_of
from planner.made_by import with_corrections
from planner.search.given import plan_for_layout

if TYPE_CHECKING:
    from planner.evidence.rows.runs import Run
    from planner.specs.calibration import Calibration
    from planner.specs.job import PoolJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run with its prediction; without a prediction, `reason` says why.

    predicted_memory_bytes: memory of the fullest stage, for the counter that the row reports, or for the device's
    counter.
    peak_bytes: the need of the fullest stage, without memory that the allocator only keeps for later.
    fits: whether the need is within the memory limit with the default headroom.
    """

    run: Run
    setup: Setup | None = None
    reason: str = ""
    measured_seconds: float | None = None
    predicted_seconds: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    measured_memory_bytes: float | None = None
    predicted_memory_bytes: float | None = None
    peak_bytes: float | None = None
    fits: bool | None = None
    verdict: str = ""

    @property
    def is_unmeasured(self) -> bool:
        """Whether the run has no measurement, and no outcome, that a forecast can be compared with."""
        return self.measured_seconds is None and self.measured_memory_bytes is None and self.run.oom is None

    @property
    def error(self) -> float | None:
        """Relative error of tokens per second: measured step / predicted step - 1."""
        if self.measured_seconds is None or self.predicted_seconds is None:
            return None
        return self.measured_seconds / self.predicted_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory: predicted / measured - 1."""
        if self.measured_memory_bytes is None or self.predicted_memory_bytes is None:
            return None
        return self.predicted_memory_bytes / self.measured_memory_bytes - 1


def score(run: Run, corrections: Calibration | None = None) -> Row:
    """One run with its prediction, or with the reason why it cannot be priced; `corrections` replace the shipped ones.

    The forecast equals the output of `planner explain` for the row's question (`jobs.question_of`): both call the same
    functions.
    """
    measured = run.measured_step_seconds
    memory = run.mem_bytes or None
    unscored = Row(run=run, measured_seconds=measured, measured_memory_bytes=memory)
    setup = job_of(run)
    if isinstance(setup, Unsupported):
        return replace(unscored, reason=setup.reason)
    if corrections is not None:
        setup = replace(setup, job=with_corrections(setup.job, corrections).pools[0])
    try:
        plan = plan_for_layout(setup.job, setup.layout)
    except InputError as error:
        return replace(unscored, setup=setup, reason="; ".join(each.message for each in error.mistakes))
    low, high = plan.low_step_seconds, plan.high_step_seconds
    stages = [memory_by_class(setup.job, stage) for stage in plan.memory]
    return replace(
        unscored,
        setup=setup,
        predicted_seconds=plan.step_seconds * setup.share,
        low_seconds=low and low * setup.share,
        high_seconds=high and high * setup.share,
        predicted_memory_bytes=max(stage.get(run.mem_class, stage["device"]) for stage in stages),
        peak_bytes=max(stage.total_bytes for stage in plan.memory),
        fits=plan.fits,
        verdict=plan.verdict,
    )


def step_seconds(setup: Setup) -> float:
    """Seconds of the row's step."""
    return estimate(setup.job, setup.layout).step_seconds * setup.share


def memory_by_class(job: PoolJob, stage: StageMemory) -> dict[str, float]:
    """Bytes of a stage by the three usual counters.

    allocated: only tensors (torch.cuda.max_memory_allocated), that is, every line except the runtime.
    reserved: also memory that the allocator loses to fragmentation, or keeps for later while memory is free
    (max_memory_reserved).
    device: also the context and the communication buffers (nvidia-smi); it exceeds the device's memory only if the
    ledger's total does.

    Source: PyTorch, notes on CUDA memory management; `planner.cost.memory.CACHED_SHARE`.
    """
    by_name = {line.name: float(line.num_bytes) for line in stage.lines}
    runtime, used = by_name[LineName.RUNTIME], by_name[LineName.ACTIVATIONS] + by_name[LineName.TRANSIENTS]
    lost = job.engine.memory.fragmentation * used
    allocated, fixed = stage.total_bytes - runtime, runtime - lost
    room = job.whole_memory_bytes - allocated - fixed
    held = max(lost, min(CACHED_SHARE * used, room))
    return {"allocated": allocated, "reserved": allocated + held, "device": allocated + held + fixed}
