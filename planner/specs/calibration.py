"""The calibration document: how much slower than the roofline measured runs were, and how sure that makes us."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from pydantic import Field

from planner.specs.document import Document, Name

if TYPE_CHECKING:
    from planner.specs.cluster import Precision

__all__ = ["UNCALIBRATED", "Calibration", "CalibrationEntry", "PrecisionClass", "find_entry", "precision_class"]

PrecisionClass = Literal["fp32", "16", "fp8", "fp4"]


class CalibrationEntry(Document):
    """Measured corrections for one device, engine, precision class and kind of layers; a missing key matches all.

    experts: whether the model has experts, whose kernels and exchanges are others.

    slowdown: computing takes this many times what the roofline says. attention: share of the 16-bit peak that
    fused attention reaches, in place of the device file's. low, high: 10 % and 90 % quantiles of measured over
    predicted step time on held-out runs. num_rows: measured runs behind it, from these sources.
    """

    device: Name | None = None
    engine: Name | None = None
    precision: PrecisionClass | None = None
    experts: bool | None = None
    slowdown: float = Field(gt=0, le=100)
    attention: float | None = Field(default=None, gt=0, le=1)
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=None, gt=0)
    num_rows: int = Field(default=0, ge=0)
    sources: tuple[str, ...] = ()


UNCALIBRATED: Final = CalibrationEntry(slowdown=1.0)
"""The data sheet and the device file alone, without an error band."""


class Calibration(Document):
    """Entries from the most to the least specific; the first that matches counts."""

    entries: tuple[CalibrationEntry, ...]


def precision_class(precision: Precision) -> PrecisionClass:
    """The class of a training precision: 16 for fp16 and bf16."""
    classes: dict[Precision, PrecisionClass] = {"fp32": "fp32", "fp16": "16", "bf16": "16", "fp8": "fp8", "fp4": "fp4"}
    return classes[precision]


def find_entry(
    calibration: Calibration, *, device: str, engine: str, precision: Precision, experts: bool
) -> CalibrationEntry:
    """The first entry that matches, or `UNCALIBRATED`."""
    wanted = {"device": device, "engine": engine, "precision": precision_class(precision), "experts": experts}
    for entry in calibration.entries:
        if all(getattr(entry, key) in (None, value) for key, value in wanted.items()):
            return entry
    return UNCALIBRATED
