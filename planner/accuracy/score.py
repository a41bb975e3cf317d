"""Prices every run of a table and sets the prediction beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.accuracy.jobs import Setup, Unsupported, job_of
from planner.cost.band import band
from planner.cost.estimate import estimate
from planner.cost.ledger import LineName, StageMemory
from planner.cost.limits import unpriced
from planner.cost.memory import CACHED_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from planner.accuracy.runs import Run
    from planner.layout import Layout
    from planner.specs.engine import Recompute
    from planner.specs.job import PoolJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run beside its prediction; `reason` says why there is none.

    predicted_memory_bytes: of the fullest stage, in the class of the row's own figure (device where it has none).
    fits: within the memory limit with the default headroom; with full recompute where the row states no policy and
    none other fits.
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
    fits: bool | None = None

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


def score_all(runs: Iterable[Run]) -> tuple[Row, ...]:
    """Every run with its prediction, in order; none is left out."""
    return tuple(score(run) for run in runs)


def score(run: Run) -> Row:
    """One run with its prediction, or with the reason why it cannot be priced."""
    measured = run.measured_step_seconds
    memory = run.mem_bytes or None
    unscored = Row(run=run, measured_seconds=measured, measured_memory_bytes=memory)
    setup = job_of(run)
    if isinstance(setup, Unsupported):
        return replace(unscored, reason=setup.reason)
    reason = _why_not(setup.job, setup.layout)
    if reason:
        return replace(unscored, setup=setup, reason=reason)
    setup = settled(setup)
    priced = _price(setup)
    spread = band(setup.job, setup.layout)
    return replace(
        unscored,
        setup=setup,
        predicted_seconds=priced.seconds,
        low_seconds=priced.seconds * spread.low if spread else None,
        high_seconds=priced.seconds * spread.high if spread else None,
        predicted_memory_bytes=priced.memory.get(run.mem_class, priced.memory["device"]),
        fits=priced.fits,
    )


def _why_not(job: PoolJob, layout: Layout) -> str:
    """Why an estimate would mean nothing; empty when it means something."""
    reasons = unpriced(job, layout)
    if reasons:
        return ", ".join(reasons)
    if job.training.precision not in job.cluster.device.peak:
        return f"{job.cluster.device.name} does not compute in {job.training.precision}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """The estimate of a row in the figures that it is compared by; bytes of the fullest stage, by class."""

    seconds: float
    memory: dict[str, float]
    fits: bool


def settled(setup: Setup) -> Setup:
    """The setup with as much recompute as the memory demands, where the row does not state its policy.

    A recipe recomputes no more than it must (Megatron's recompute_num_layers and recompute_modules count it out).
    So where the assumed policy exceeds the device's memory, the price lies between that policy and full recompute,
    at the share of layers that brings the fullest stage down to it. No headroom is kept: recipes leave none.
    """
    if not setup.assumes_recompute:
        return setup
    base = _priced(setup, setup.layout).memory["device"]
    limit = setup.job.cluster.device.memory
    if base <= limit:
        return setup
    saved = base - _priced(setup, _full(setup.layout)).memory["device"]
    share = min(1.0, (base - limit) / saved) if saved > 0 else 0.0
    kept = tuple(each for each in setup.assumed if not each.startswith("recompute"))
    words = f"recompute of {share:.0%} of the layers, to fit"
    return replace(setup, assumed=(*kept, words), recomputed_share=share)


def step_seconds(setup: Setup) -> float:
    """Seconds of the row's step; `setup` is settled."""
    seconds = estimate(setup.job, setup.layout).step_seconds
    if setup.recomputed_share:
        full = estimate(setup.job, _full(setup.layout)).step_seconds
        seconds += setup.recomputed_share * (full - seconds)
    return seconds * setup.share


def _full(layout: Layout) -> Layout:
    policy: Recompute = "full"
    return replace(layout, recompute=(policy,) * layout.num_chunks)


def _price(setup: Setup) -> _Priced:
    """The price of a settled setup: between its own policy and full recompute."""
    base, share = _priced(setup, setup.layout), setup.recomputed_share
    if not share and (base.fits or not setup.assumes_recompute):
        return base
    full = _priced(setup, _full(setup.layout))
    if not share:
        return replace(base, fits=full.fits)  # without headroom it fits as assumed, and with it under another policy
    return _Priced(
        seconds=(1 - share) * base.seconds + share * full.seconds,
        memory={kind: (1 - share) * base.memory[kind] + share * full.memory[kind] for kind in base.memory},
        fits=full.fits,
    )


def _priced(setup: Setup, layout: Layout) -> _Priced:
    priced = estimate(setup.job, layout)
    stages = [memory_by_class(setup.job, stage) for stage in priced.memory]
    return _Priced(
        seconds=priced.step_seconds * setup.share,
        memory={kind: max(stage[kind] for stage in stages) for kind in stages[0]},
        fits=priced.fits,
    )


def memory_by_class(job: PoolJob, stage: StageMemory) -> dict[str, float]:
    """What the three usual counters would show for a stage, in bytes.

    allocated: tensors alone (torch.cuda.max_memory_allocated), every line but the runtime. reserved: with what the
    allocator loses, or keeps for later while there is room (max_memory_reserved). device: with context and buffers of
    communication (nvidia-smi); above the device's memory only where the ledger's total is.

    Source: PyTorch, notes on CUDA memory management; `planner.cost.memory.CACHED_SHARE`.
    """
    by_name = {line.name: float(line.num_bytes) for line in stage.lines}
    runtime, used = by_name[LineName.RUNTIME], by_name[LineName.ACTIVATIONS] + by_name[LineName.TRANSIENTS]
    lost = job.engine.memory.fragmentation * used
    allocated, fixed = stage.total_bytes - runtime, runtime - lost
    room = job.whole_memory_bytes - allocated - fixed
    held = max(lost, min(CACHED_SHARE * used, room))
    return {"allocated": allocated, "reserved": allocated + held, "device": allocated + held + fixed}
