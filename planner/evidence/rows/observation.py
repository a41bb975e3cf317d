"""A measured run from which corrections can be learnt, and whether its step can be right."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from planner.cost.estimate import estimate
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.specs.job import PoolJob

_FAR: Final = 5.0
"""Ratio of a measured to a forecast step, or its inverse, above which a mistake in the units is likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A measured run, with its job (under the shipped calibration) and its layout.

    where: the file, and the line of a table, for messages.
    share: the run's step as a share of the priced step.
    """

    where: str
    job: PoolJob
    layout: Layout
    measured_seconds: float
    share: float = 1.0

    @property
    def source(self) -> str:
        """The name of the file or folder of the run."""
        return PurePath(re.sub(r":[0-9]+$", "", self.where)).name

    @property
    def kind(self) -> tuple[str, str]:
        """The device and the engine, for which one correction is learnt."""
        return self.job.cluster.device.name, self.job.engine.name


def faults_of(observed: Observation) -> tuple[str, str]:
    """Why a measured step is impossible, and why it is doubtful; both are empty if it may be right.

    A step is impossible if its model FLOPs exceed the peak of the devices. On a CPU every step is possible, because the
    peak is only an example: processes may have more threads.
    """
    job, device = observed.job, observed.job.cluster.device
    priced = estimate(job, observed.layout)
    own = device.peak[job.training.precision]
    most = max(own, device.peak.get("bf16", own))  # fp32 may compute in TF32
    measured = observed.measured_seconds / observed.share
    times = measured / priced.step_seconds
    of_peak, step = priced.mfu / times * own / most, f"a step of {format_seconds(measured)}"
    if of_peak > 1 and device.kind != "cpu":
        return f"{step} would need {of_peak:.3g} times the peak FLOPs of the devices", ""
    if max(times, 1 / times) > _FAR:
        ratio = f"{round(times, 1):g} times as long" if times > 1 else f"{round(1 / times, 1):g} times as short"
        forecast = format_seconds(priced.step_seconds)
        return "", f"{step} is {ratio} as the forecast of {forecast}; is the unit wrong, or is it another run?"
    return "", ""
