"""Whether a measured step can be right: faster than the devices compute, or far from the forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.cost.estimate import estimate
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.accuracy.learn import Observation

FAR: Final = 5.0
"""Ratio of measured to forecast time, or its inverse, above which the two are hardly of one run."""


def faults_of(observed: Observation) -> tuple[str, str]:
    """Why a measured step is impossible, and why it is doubtful; both are empty if it may be right.

    A step is impossible if its model FLOPs exceed the peak of the devices, and doubtful if the forecast is `FAR` away.
    """
    priced = estimate(observed.job, observed.layout)
    measured = observed.measured_seconds / observed.share
    utilisation, ratio = priced.mfu * priced.step_seconds / measured, measured / priced.step_seconds
    step = f"a step of {format_seconds(measured)}"
    if utilisation > 1:
        return f"{step} would need {utilisation:.3g} times the peak FLOPs of the devices", ""
    if max(ratio, 1 / ratio) > FAR:
        forecast = format_seconds(priced.step_seconds)
        return "", f"{step} is far from the forecast of {forecast}: is it in seconds, and of this job?"
    return "", ""
