"""The estimate is a ledger: named lines whose sum is the total.

Nothing is added outside the ledger. `explain` prints the lines, the plan stores them, and the trainer writes
its own measurements under the same names, so predicted and measured join without a mapping table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, get_args

from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from planner.numbers import Number


Verdict = Literal["fits", "may not fit", "does not fit"]
"""The first from a chance of 1 - risk, the last below 5 %; by a plain limit nothing is between them."""
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)


class LineName(StrEnum):
    """The closed vocabulary of the ledger."""

    # memory of one device
    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    TRANSIENTS = "transients"
    RUNTIME = "runtime"
    # time of one optimizer step
    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    HEAD = "embedding_and_loss"
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
    """Seconds of one kind in an optimizer step: `busy` in all, of which `hidden` behind other work.

    stage: the pipeline stage that the line is about (the slowest one, or the one that ends last).
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
        """What the line adds to the step."""
        return self.busy_seconds - self.hidden_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What one device of a stage keeps in its host's memory, against its share of that."""

    limit_bytes: float
    lines: tuple[MemoryLine, ...]

    @property
    def total_bytes(self) -> float:
        """Sum of the lines."""
        return float(total_bytes(self.lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The memory ledger of one pipeline stage, against what a device may use; and of its host, where it offloads.

    limit_bytes: with up to so many the stage fits. most_bytes: beyond so many it does not; between them it may not fit.
    device_chance: that the peak stays within the whole memory of the device.
    """

    stage: int
    limit_bytes: float
    most_bytes: float
    device_chance: float
    lines: tuple[MemoryLine, ...]
    host: HostMemory | None = None

    @property
    def total_bytes(self) -> float:
        """Sum of the lines."""
        return float(total_bytes(self.lines))

    @property
    def host_fits(self) -> bool:
        """The host stays within its limit, or keeps nothing."""
        return self.host is None or self.host.total_bytes <= self.host.limit_bytes

    @property
    def fits(self) -> bool:
        """Device and host stay within their limits."""
        return self.total_bytes <= self.limit_bytes and self.host_fits

    @property
    def missing_bytes(self) -> float:
        """What is needed beyond the host's limit, or else beyond the device's; 0 where the stage fits."""
        if self.host is not None and not self.host_fits:
            return self.host.total_bytes - self.host.limit_bytes
        return max(0.0, self.total_bytes - self.limit_bytes)

    @property
    def verdict(self) -> Verdict:
        """Whether the stage fits, in words."""
        if self.fits:
            return "fits"
        return "may not fit" if self.host_fits and self.total_bytes <= self.most_bytes else "does not fit"

    @property
    def chance_of_fitting(self) -> float:
        """That of the device; none where the host is too small, whose memory has no band."""
        return self.device_chance if self.host_fits else 0.0


def worst_stage(memory: Sequence[StageMemory]) -> StageMemory:
    """The stage on which it depends whether a plan fits: of the least chance, then the one nearest to its limit.

    Stages share their error, so that a plan fits when this stage does (`planner.cost.chance`).
    """
    return max(memory, key=lambda stage: (-stage.chance_of_fitting, stage.total_bytes / stage.limit_bytes))


def verdict_of(memory: Iterable[StageMemory]) -> Verdict:
    """Whether a plan of these stages fits: the worst of what is said of each."""
    return max((stage.verdict for stage in memory), key=VERDICTS.index, default="fits")


def total_bytes(lines: Iterable[MemoryLine]) -> Number:
    """Sum of the lines, in bytes."""
    return sum_of(line.num_bytes for line in lines)


def total_exposed_seconds(lines: Iterable[TimeLine]) -> Number:
    """Sum of what the lines add to the step, in seconds."""
    return sum_of(line.exposed_seconds for line in lines)
