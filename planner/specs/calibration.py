"""The calibration document: how much slower than the roofline measured runs were, and the error of forecasts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field

from planner.specs.document import Document, Name

if TYPE_CHECKING:
    from planner.specs.cluster import Precision

PrecisionClass = Literal["fp32", "16", "fp8", "fp4"]


class CalibrationEntry(Document):
    """Measured corrections for a device, engine, precision class and kind of layers; a missing key matches any value.

    experts: whether the model has experts, which need other kernels and exchanges.
    layers: the engine whose layers run; engines around one library (Megatron-Core) share it.
    attention_kernel: the engine's kernel of fused attention, as in the engine's profile.
    slowdown: factor on the roofline's compute time; the factors of all matching entries multiply.
    memory: the same factor for operators that only move bytes.
    host: the same factor for the host's time for launches, layers and steps.
    scale_up: the same factor for the innermost link.
    network: the same factor for the links beyond the innermost one.
    core_attention: the same factor for the core of fused attention, in addition to `slowdown`.
    attention: share of the 16-bit peak that fused attention reaches; it replaces the device file's share and
    core_attention.
    low, high: 10 % and 90 % quantiles of measured over predicted step time; without them the band comes from published
    runs.
    alone: the search for matching entries ends at this entry.
    kinds: what the runs behind `low` and `high` had (`planner.cost.band.kinds_of`); each other kind widens the band.
    num_rows: number of measured runs behind the entry.
    sources: where these runs were published.
    family: the family of publishers without whose runs less than half of the engine's correction would be left.
    """

    device: Name | None = None
    engine: Name | None = None
    precision: PrecisionClass | None = None
    experts: bool | None = None
    layers: Name | None = None
    attention_kernel: Name | None = None
    slowdown: float = Field(default=1.0, gt=0, le=100)
    memory: float = Field(default=1.0, gt=0, le=100)
    host: float = Field(default=1.0, gt=0, le=100)
    scale_up: float = Field(default=1.0, gt=0, le=100)
    network: float = Field(default=1.0, gt=0, le=100)
    core_attention: float = Field(default=1.0, gt=0, le=100)
    attention: float | None = Field(default=None, gt=0, le=1)
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=None, gt=0)
    kinds: tuple[str, ...] = ()
    alone: bool = False
    num_rows: int = Field(default=0, ge=0)
    sources: tuple[str, ...] = ()
    family: str = ""


FACTORS: Final = ("slowdown", "memory", "host", "scale_up", "network", "core_attention")
"""Fields that multiply over all matching entries."""

UNCALIBRATED: Final = CalibrationEntry()
"""No correction: the data sheet and the device file alone, without an error band."""


class Evidence(Document):
    """Measured over predicted step times of one kind of runs, each forecast by a fit that excluded the run's source.

    source: where the runs were published; every source has the same total weight.
    family: the family of publishers of the source, whose sources share authors, programs and machines.
    axes: the axes that divide the work, as `planner.cost.band.axes_of` writes them.
    features: further properties of the runs, as `planner.cost.band.features_of` names them.
    """

    source: str = ""
    family: str = ""

    device: Name
    engine: Name
    precision: PrecisionClass
    experts: bool
    axes: str
    features: tuple[str, ...] = ()
    ratios: tuple[float, ...] = Field(min_length=1)


Counter = Literal["allocated", "device", "needed", "reserved"]


class MemorySpread(Document):
    """Distribution of log(measured / predicted bytes): Student's t with 4 degrees of freedom.

    counter: the measured quantity: PyTorch's allocated or reserved bytes, or the whole device (nvidia-smi). `needed` is
    the memory below which a run fails; it does not include blocks that the allocator only keeps for later.
    engine: the engine of the runs; without a value the distribution holds for every engine.
    """

    counter: Counter
    engine: Name | None = None
    location: float = Field(ge=-3, le=3)
    scale: float = Field(gt=0, le=3)
    num_rows: int = Field(default=0, ge=0)


class Spread(Document):
    """How much wider a band is than the errors of published runs (tools/band_widths.py).

    tails: factor on the logit of a quantile level, because a new source differs from the known sources more than the
    known sources differ from each other.
    unseen: factor on the log width for a kind of run that nobody has published.
    one_family: factor on the log width where the engine's corrections rest on one family of publishers.
    memory: distributions of the errors of peak memory.
    """

    tails: float = Field(default=1.25, gt=0)
    unseen: float = Field(default=1.5, ge=1)
    one_family: float = Field(default=1.0, ge=1)
    memory: tuple[MemorySpread, ...] = ()


class Calibration(Document):
    """Corrections, the most specific entry first, and the evidence behind them."""

    entries: tuple[CalibrationEntry, ...]
    evidence: tuple[Evidence, ...] = ()
    spread: Spread = Spread()


def precision_class(precision: Precision) -> PrecisionClass:
    """The class of a training precision: 16 for fp16 and bf16."""
    classes: dict[Precision, PrecisionClass] = {"fp32": "fp32", "fp16": "16", "bf16": "16", "fp8": "fp8", "fp4": "fp4"}
    return classes[precision]


def find_entry(
    calibration: Calibration,
    *,
    device: str,
    engine: str,
    precision: Precision,
    experts: bool,
    layers_of: str = "",
    kernel: str = "latest",
) -> CalibrationEntry:
    """The combination of all matching entries; `UNCALIBRATED` if none matches.

    layers_of, kernel: as in the engine's profile.

    Slowdowns and other factors multiply. Every other value comes from the first entry that has it.
    """
    wanted = {"device": device, "engine": engine, "precision": precision_class(precision), "experts": experts}
    wanted |= {"layers": layers_of or engine, "attention_kernel": kernel}
    matching = [
        entry
        for entry in calibration.entries
        if all(getattr(entry, key) in (None, value) for key, value in wanted.items())
    ]
    alone = next((number for number, entry in enumerate(matching, 1) if entry.alone), len(matching))
    matching = matching[:alone]
    if not matching:
        return UNCALIBRATED
    found: dict[str, Any] = {
        key: value for key, value in wanted.items() if any(getattr(entry, key) is not None for entry in matching)
    }
    for key in ("attention", "low", "high", "kinds", "num_rows", "sources", "family"):
        found |= next(({key: value} for entry in matching if (value := getattr(entry, key))), {})
    found |= {key: math.prod(getattr(entry, key) for entry in matching) for key in FACTORS}
    return CalibrationEntry(**found)
