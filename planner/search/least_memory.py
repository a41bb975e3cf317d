"""The least memory of a device with which a job can be trained at all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.prices import stage_bytes
from planner.cost.stage import POLICIES, stage_of
from planner.search.candidates import price_candidates
from planner.search.degrees import allowed_policies, legal_degrees
from planner.search.step_bounds import least_stage_bytes

if TYPE_CHECKING:
    from planner.search.candidate import Candidate, FloatArray
    from planner.search.constraints import Constraints
    from planner.search.degrees import DegreeArrays
    from planner.specs.job import Job

__all__ = ["least_peak_bytes", "within_bytes"]


def within_bytes(job: Job, limit_bytes: float) -> Job:
    """The same job on devices of which a plan may use `limit_bytes`."""
    return replace(job, headroom=1.0 - limit_bytes / job.cluster.device.memory)


def least_peak_bytes(job: Job, constraints: Constraints) -> float:
    """Bytes of the fullest stage of the layout whose fullest stage needs least, over all legal layouts.

    Configurations are taken in the order of a lower bound (`least_stage_bytes`) until it exceeds the best.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    unlimited = within_bytes(job, math.inf)
    policies = [POLICIES.index(p) for p in job.engine.recompute]
    waiting: list[tuple[float, DegreeArrays, int]] = []
    for degrees in legal_degrees(job, constraints, with_replicas=False):
        bounds = least_stage_bytes(job, degrees, policies)
        waiting += [(float(bound), degrees, i) for i, bound in enumerate(bounds)]
    waiting.sort(key=lambda entry: entry[0])
    best = math.inf
    for bound, degrees, i in waiting:
        if bound >= best:
            break
        one, alone = degrees.take(i), degrees.take(slice(i, i + 1))
        policies_of_one = allowed_policies(job, constraints, alone)
        (priced,) = price_candidates(unlimited, alone, policies_of_one, constraints=constraints)
        shape = stage_of(job, index=priced.stage, num_layers=priced.layers, policy=priced.policy)
        num_bytes = np.broadcast_to(stage_bytes(job, one, shape), priced.stage.shape)
        best = min(best, _least_maximum(priced, num_bytes))
    return best


def _least_maximum(candidate: Candidate, num_bytes: FloatArray) -> float:
    """The least, over all splits of the layers, of the fullest stage's bytes; a dynamic program over stages."""
    layers = candidate.num_layers
    least = np.full(layers + 1, np.inf)  # of the stages so far, by the layers that they hold
    least[0] = 0.0
    for stage in range(candidate.num_stages):
        here = candidate.stage == stage
        each = np.full(layers + 1, np.inf)  # of this stage, by its layers
        np.minimum.at(each, candidate.layers[here], num_bytes[here])
        longer = np.full(layers + 1, np.inf)
        for count in np.flatnonzero(np.isfinite(each)):
            np.minimum(longer[count:], np.maximum(least[: layers + 1 - count], each[count]), out=longer[count:])
        least = longer
    return float(least[layers])
