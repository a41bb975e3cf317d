"""What stands in a plan beside its layout and its ledger: what was asked, what was proved, and who priced it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from planner.cost.critical_batch import BatchAdvice  # noqa: TC001 - read when a plan is
from planner.specs.job import RISK

ObjectiveName = Literal["throughput", "cost", "gpus", "memory"]
"""What a plan is to be best at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """Who priced a plan, or proved it.

    digest: of what the prices follow from; equal digests give equal prices (`planner.made_by`).
    calibration: `shipped`, or `own` for corrections of the user's, which are in the plan.
    """

    planner_version: str
    digest: str
    calibration: Literal["shipped", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLabel:
    """What the engine's name does to a forecast, beyond what its profile says of the program.

    share: how much longer the step is than with the corrections that runs of all engines share; below 0 it is shorter.
    num_runs: published runs of the engine on the device, which the difference rests on.
    """

    share: float
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What the user asked for beside the documents.

    risk: the plan was to fit with a chance of 1 - risk. headroom: share of device memory that is left free; None where
    the chance sets the limit. confidence: chance of meeting the deadline that was asked for; None where the forecast
    decides. pins, forbidden: as on the command line; none for a layout of the user's, which is priced as it is. within:
    share of the objective that a simpler layout may cost.
    """

    headroom: float | None = None
    risk: float = RISK
    confidence: float | None = None
    allow_tp_across_nodes: bool
    allow_offload: bool
    objective: ObjectiveName = "throughput"
    within: float = 0.0
    pins: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """How simple a layout is; less is simpler, and an earlier key counts before all later ones.

    idle: devices that are left over. recomputed: tenths of the layers' forward pass that are computed again, begun ones
    counted whole. interleave: class of the chunks of a stage: 0 for one, 1 up to 4, 2 up to 8, 3 above. uneven: 0 where
    all stages but the first and the last hold equally many layers, in equal chunks, else 1. axes: how many of tp, pp,
    cp and ep are above 1. risk: class of the chance of not fitting: 0 up to 1 %, 1 up to 5 %, 2 above.
    """

    idle: int
    recomputed: int
    interleave: int
    uneven: int
    axes: int
    risk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimplestProof:
    """What proves that a plan is the simplest layout within a share of the optimum, the fastest of equally simple ones.

    keys: of the plan, by both methods. seconds: of its step, by the dynamic program. num_decided, num_columns: on which
    the integer programs decided, after keys and lower bounds.
    """

    within: float
    status: Literal["optimal", "time limit"]
    solver: str
    keys: Keys
    seconds: float
    num_decided: int
    num_columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What proves a plan, in seconds of a step whatever the objective, and what the search looked at.

    gap: no layout is better than the optimum that was found by more than this share. dynamic_program_seconds: the same
    optimum by the second method; None where it was not asked. num_refused_by_rule, num_pruned: configurations of
    degrees that a rule forbids, and legal ones that were ruled out for a reason. num_decided: those on which the
    integer program decided, all whose lower bounds are at most its own answer. num_bounds_checked: ruled-out ones that
    were solved all the same, to check the bounds. simplest: what proves that the plan is the simplest layout within a
    share of that optimum; None where the plan is the optimum because nothing else was asked for.
    """

    objective: ObjectiveName
    status: Literal["optimal", "time limit", "infeasible", "interrupted", "out of time"]
    solver: str
    objective_seconds: float
    gap: float
    dynamic_program_seconds: float | None
    num_cuts: int
    num_cuts_pruned: int
    num_legal: int
    num_refused_by_rule: dict[str, int] = field(default_factory=dict)
    num_pruned: dict[str, int] = field(default_factory=dict)
    num_priced: int
    num_decided: int
    num_columns: int
    num_bounds_checked: int = 0
    warnings: tuple[str, ...] = ()
    simplest: SimplestProof | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedBatch:
    """A global batch size, and what the best layout does with it: nothing where none fits or is legal."""

    global_batch_size: int
    tokens_per_second: float | None = None
    num_devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """The training document's learning rate, taken as that of `of_batch` sequences, at the batch that was chosen."""

    given: float
    of_batch: float
    linear: float
    square_root: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """How the global batch size was chosen: the sizes that were left open, those that were tried, and what is known."""

    chosen: int
    least: int
    most: int
    tried: tuple[TriedBatch, ...]
    advice: BatchAdvice
    learning_rate: LearningRates
