"""The calibration document: how much slower than the roofline measured runs were, and how far off forecasts are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field

from planner.specs.document import Document, Name

if TYPE_CHECKING:
    from planner.specs.cluster import Precision

PrecisionClass = Literal["fp32", "16", "fp8", "fp4"]


class CalibrationEntry(Document):
    """Measured corrections for a device, engine, precision class and kind of layers; a missing key matches all.

    experts: whether the model has experts, whose kernels and exchanges are others.

    slowdown: computing takes this many times what the roofline says; the entries that match multiply. memory, host,
    scale_up, network: the same of operators that only move bytes, of what the host takes for launches, layers and
    steps, of the innermost link, and of the links beyond it. core_attention: the same of the core of fused attention,
    in addition to slowdown. attention: share of the 16-bit peak that fused attention
    reaches, in place of the device file's and of core_attention. low, high: 10 % and 90 %
    quantiles of measured over predicted step time; without them the evidence of published runs speaks. alone: no
    entry after this one counts. num_rows: measured runs behind it, from these sources.
    """

    device: Name | None = None
    engine: Name | None = None
    precision: PrecisionClass | None = None
    experts: bool | None = None
    slowdown: float = Field(default=1.0, gt=0, le=100)
    memory: float = Field(default=1.0, gt=0, le=100)
    host: float = Field(default=1.0, gt=0, le=100)
    scale_up: float = Field(default=1.0, gt=0, le=100)
    network: float = Field(default=1.0, gt=0, le=100)
    core_attention: float = Field(default=1.0, gt=0, le=100)
    attention: float | None = Field(default=None, gt=0, le=1)
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=None, gt=0)
    alone: bool = False
    num_rows: int = Field(default=0, ge=0)
    sources: tuple[str, ...] = ()


FACTORS: Final = ("slowdown", "memory", "host", "scale_up", "network", "core_attention")
"""Fields that multiply over the entries that match."""

UNCALIBRATED: Final = CalibrationEntry()
"""The data sheet and the device file alone, without an error band."""


class Evidence(Document):
    """Measured over predicted step time of runs of one kind, forecast by a fit that had not seen their source.

    source: where the runs were published; the runs of each source together count alike. axes: what divides the work, as
    `planner.cost.band.axes_of` writes it. features: what else sets the runs apart, as `features_of` there names it.
    """

    source: str = ""

    device: Name
    engine: Name
    precision: PrecisionClass
    experts: bool
    axes: str
    features: tuple[str, ...] = ()
    ratios: tuple[float, ...] = Field(min_length=1)


Counter = Literal["allocated", "device", "needed", "reserved"]


class MemorySpread(Document):
    """Of measured over predicted bytes, as a logarithm: Student's t with 4 degrees of freedom.

    counter: which is read: PyTorch's allocated or reserved bytes, or the whole device (nvidia-smi); `needed` is what a
    run has to have lest it run out of memory, without what the allocator only keeps for later. engine: without it of
    every engine.
    """

    counter: Counter
    engine: Name | None = None
    location: float = Field(ge=-3, le=3)
    scale: float = Field(gt=0, le=3)
    num_rows: int = Field(default=0, ge=0)


class Spread(Document):
    """How much wider than the misses of published runs a band is (`planner.cost.band.spread_of`).

    tails: factor of the logit of a level, because a new source is less like the others than they are like each other.
    unseen: factor of the log width for a kind that no published run has. memory: how far off peaks of memory are.
    """

    tails: float = Field(default=1.25, gt=0)
    unseen: float = Field(default=1.5, ge=1)
    memory: tuple[MemorySpread, ...] = ()


class Calibration(Document):
    """Corrections from the most to the least specific, and what they rest on."""

    entries: tuple[CalibrationEntry, ...]
    evidence: tuple[Evidence, ...] = ()
    spread: Spread = Spread()


def precision_class(precision: Precision) -> PrecisionClass:
    """The class of a training precision: 16 for fp16 and bf16."""
    classes: dict[Precision, PrecisionClass] = {"fp32": "fp32", "fp16": "16", "bf16": "16", "fp8": "fp8", "fp4": "fp4"}
    return classes[precision]


def find_entry(
    calibration: Calibration, *, device: str, engine: str, precision: Precision, experts: bool
) -> CalibrationEntry:
    """What the matching entries say together; `UNCALIBRATED` where none matches.

    Slowdowns and other factors multiply. Everything else is that of the first entry that states it.
    """
    wanted = {"device": device, "engine": engine, "precision": precision_class(precision), "experts": experts}
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
    for key in ("attention", "low", "high", "num_rows", "sources"):
        found |= next(({key: value} for entry in matching if (value := getattr(entry, key))), {})
    found |= {key: math.prod(getattr(entry, key) for entry in matching) for key in FACTORS}
    return CalibrationEntry(**found)
