"""Parts of a plan other than its layout and ledger: the user's options, the proof, and the version of the planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from pydantic import Field, InstanceOf, PlainSerializer, WithJsonSchema

from planner.cost.critical_batch import BatchAdvice
from planner.layout import Layout, format_layout
from planner.specs.job import LEAST_RISK, MOST_RISK, RISK

ObjectiveName = Literal["throughput", "cost", "gpus", "memory"]
"""The quantity that a plan optimizes."""

WITHIN: Final = 0.02
"""Default of the share of the objective by which a plan may be worse than the minimum (`--within`)."""
CONFIDENCE: Final = 0.8
"""Default of the required chance that a plan meets its deadline and budget (`--confidence`)."""

WrittenLayout = Annotated[InstanceOf[Layout], PlainSerializer(format_layout), WithJsonSchema({"type": "string"})]
"""A layout that a document of JSON holds as `--layout` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """The version of the planner that priced a plan or proved it.

    digest: hash of everything that determines the prices; equal digests give equal prices (`planner.made_by`).
    calibration: either `shipped`, or `own` for the user's corrections, which are stored in the plan.
    """

    planner_version: str
    digest: str
    calibration: Literal["shipped", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLabel:
    """Difference between two forecasts: with the engine's own corrections, and with the corrections of all engines.

    share: how much longer the step is with the engine's own corrections; negative if it is shorter.
    num_runs: published runs of the engine on the device, to which its corrections were fitted.
    """

    share: float
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of the user that are not in the documents.

    risk: accepted chance that the plan does not fit.
    headroom: share of device memory that is left free; None if the chance sets the limit.
    confidence: required chance of meeting the deadline; None if the forecast alone decides.
    pins, forbidden: as on the command line; empty for a layout that the user gave, which is priced as given, but for
        degrees that the program of its file has no key for.
    within: share of the objective by which the plan may be worse than the optimum.
    """

    headroom: Annotated[float, Field(ge=0, lt=1)] | None = None
    risk: Annotated[float, Field(ge=LEAST_RISK, le=MOST_RISK)] = RISK
    confidence: float | None = None
    allow_tp_across_nodes: bool
    allow_offload: bool
    objective: ObjectiveName = "throughput"
    within: float = 0.0
    pins: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Keys:
    """What makes a layout easy to run; smaller values are better, and a key decides only if all earlier keys are equal.

    machines: hosts in use.
    unseen: 0 if published runs of the plan's kind (`search.ranking.runs_like`) have its axes, else 1; 0 in older plans.
    axes: how many of tp, pp, cp and ep are above 1.
    by_hand: 0 if recompute is one switch (none, full, or one set of modules for all stages); 1 if it takes a loop over
        layers, because stages differ or only some layers of a stage are recomputed.
    chunks: chunks of a stage (`interleave`).
    risk: class of the chance of not fitting: 0 up to 1 %, 1 up to 5 %, 2 above.
    uneven: 0 if all stages but the first and the last hold equally many layers, in equal chunks, else 1.
    """

    machines: int
    unseen: int = 0
    axes: int
    by_hand: int
    chunks: int
    risk: int
    uneven: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """How a plan was chosen among the layouts near the optimum (`planner.search.recommendation`).

    within: share by which the layouts may exceed the optimum.
    num_listed: number of layouts in the list.
    keys: the keys of the plan, the least of the list; the plan is the fastest layout with these keys.
    """

    within: float
    num_listed: int
    keys: Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proof of a plan, in seconds of a step for every objective, and counts of what the search examined.

    gap: share by which an unknown layout could at most be better than the optimum found.
    dynamic_program_seconds: the optimum found by the second method; None if the second method did not run.
    num_refused_by_rule: configurations of degrees that a rule forbids, by rule.
    num_pruned: legal configurations that were ruled out, by reason.
    not_searched: layouts that the search left out because of the model's kinds of layers, in words.
    num_decided: configurations in the integer program, that is, all whose lower bounds do not exceed its optimum.
    num_bounds_checked: ruled-out configurations that were solved as well, to check their bounds and both methods.
    num_layouts_drawn: layouts drawn by the rules of `explain` and priced one by one; none is better than the optimum.
    recommendation: how the plan was chosen near the optimum; None if only the optimum was asked for.
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
    num_layouts_drawn: int = 0
    not_searched: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    recommendation: Recommendation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedBatch:
    """A global batch size and the results of its best layout; the results are None if no layout fits or is legal."""

    global_batch_size: int
    tokens_per_second: float | None = None
    num_devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """Learning rates at the chosen batch, scaled from the document's rate.

    The document's rate is assumed to be meant for a batch of `of_batch` sequences.
    """

    given: float
    of_batch: float
    linear: float
    square_root: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """How the global batch size was chosen: the user's range, the tried sizes, and advice on the batch."""

    chosen: int
    least: int
    most: int
    tried: tuple[TriedBatch, ...]
    advice: BatchAdvice
    learning_rate: LearningRates
