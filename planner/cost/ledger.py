"""The estimate as a ledger: named lines whose sum is the total.

No cost is added outside the ledger. `explain` prints the lines, the plan stores them, and the trainer writes its
measurements under the same names. Predictions and measurements can therefore be joined without a table of names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

from pydantic import Field

from planner.numbers import Number
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Verdict = Literal["fits", "may not fit", "does not fit", "unknown"]
"""A plan *fits* if its chance of fitting is at least 1 - risk, and *does not fit* if the chance is below 5 %.

If the user sets the limit as a headroom, *may not fit* does not occur. A plan is *unknown* if a key of a foreign file
decides it and has no price; a stage never is.
"""
Limit = Annotated[int | float, Field(gt=0)]
"""A limit in bytes."""
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)


class LineName(StrEnum):
    """All names of lines in the ledger."""

    # memory of one device
    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    TRANSIENTS = "transients"
    RUNTIME = "runtime"
    REFERENCE_PARAMS = "reference_params"
    ROLLOUT = "rollout_engine"
    # time of one optimizer step
    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    HEAD = "embedding_and_loss"
    UNGRADED = "passes_without_gradients"
    ACCUMULATION = "grad_accumulation"
    TP_COMM = "tp_comm"
    CP_COMM = "cp_comm"
    EP_COMM = "ep_comm"
    PP_COMM = "pp_comm"
    HOST_COMM = "host_comm"
    BUBBLE = "bubble"
    DP_COMM = "dp_comm"
    TIED_EMBEDDING = "tied_embedding_comm"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Bytes of one kind on one device of a pipeline stage."""

    name: LineName
    num_bytes: Number
    formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """Seconds of one kind in an optimizer step: `busy` is the total, and `hidden` the part that runs during other work.

    stage: the pipeline stage of the line (the slowest stage, or the stage that ends last).
    bound: the unit or link that limits the line, for example `bf16`, `nvlink` or `infiniband`.
    """

    name: LineName
    stage: int = 0
    busy_seconds: Number
    hidden_seconds: Number = 0.0
    formula: str
    source: str
    bound: str = ""

    @property
    def exposed_seconds(self) -> Number:
        """Seconds that the line adds to the step."""
        return self.busy_seconds - self.hidden_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """A memory ledger and its limits.

    limit_bytes: largest total that fits.
    most_bytes: largest total that may fit; above it, it does not fit.
    """

    limit_bytes: Limit
    most_bytes: Limit
    lines: tuple[MemoryLine, ...]

    @property
    def total_bytes(self) -> float:
        """Sum of the lines."""
        return float(total_bytes(self.lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory(MemoryLedger):
    """Memory that one device of a stage uses on its host.

    chance: chance that the device's share of the host's memory holds it; None as `StageMemory.device_chance`.
    """

    chance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory(MemoryLedger):
    """The memory ledger of a device of one pipeline stage; also the ledger of its host, if the layout offloads.

    device_chance: chance that the peak stays within the whole memory of the device; None in a document of a plan whose
    verdict is unknown.
    """

    stage: int
    device_chance: float | None
    host: HostMemory | None = None

    @property
    def host_fits(self) -> bool:
        """Whether the host stays within its limit; true without offloaded memory."""
        return self.host is None or self.host.total_bytes <= self.host.limit_bytes

    @property
    def fits(self) -> bool:
        """Whether device and host stay within their limits."""
        return self.total_bytes <= self.limit_bytes and self.host_fits

    @property
    def missing_bytes(self) -> float:
        """Bytes by which the stage exceeds the host's limit, or else the device's limit; 0 if it fits."""
        if self.host is not None and not self.host_fits:
            return self.host.total_bytes - self.host.limit_bytes
        return max(0.0, self.total_bytes - self.limit_bytes)

    @property
    def verdict(self) -> Verdict:
        """Whether the stage fits, in words."""
        if self.fits:
            return "fits"
        held: tuple[MemoryLedger, ...] = (self,) if self.host is None else (self, self.host)
        return "may not fit" if all(each.total_bytes <= each.most_bytes for each in held) else "does not fit"

    @property
    def chance_of_fitting(self) -> float:
        """Chance that the memory of the device suffices, or that of its host, whichever is the lower.

        Both are forecast by one ledger, so they share their error as stages do.
        """
        return min(self.device_chance or 0.0, 1.0 if self.host is None else self.host.chance or 0.0)


def worst_stage(memory: Sequence[StageMemory]) -> StageMemory:
    """The stage that decides whether a plan fits: it has the lowest chance or, of equals, is nearest to its limit.

    Stages share their forecast error, so a plan fits if this stage fits (`planner.cost.chance`).
    """
    return max(memory, key=lambda stage: (-stage.chance_of_fitting, stage.total_bytes / stage.limit_bytes))


def verdict_of(memory: Iterable[StageMemory]) -> Verdict:
    """Whether a plan of these stages fits: the worst verdict of any stage."""
    return max((stage.verdict for stage in memory), key=VERDICTS.index, default="fits")


def total_bytes(lines: Iterable[MemoryLine]) -> Number:
    """Sum of the lines, in bytes."""
    return sum_of(line.num_bytes for line in lines)


def total_exposed_seconds(lines: Iterable[TimeLine]) -> Number:
    """Sum of the seconds that the lines add to the step."""
    return sum_of(line.exposed_seconds for line in lines)
