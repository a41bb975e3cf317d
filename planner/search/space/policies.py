"""Recompute policies: the policies that configurations may use, and the choices of their stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.cost.prices import stage_fits
from planner.cost.stage import stage_of
from planner.search.space.configurations import OWN, DegreeArrays
from planner.specs.recompute import NONE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.numbers import Mask
    from planner.search.space.configurations import PolicyMasks
    from planner.specs.job import Job


def some_layers(job: Job) -> list[int]:
    """How many layers of each chunk the search tries to recompute in full: 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    The list is empty if the engine cannot recompute only some layers, or if the cluster has several pools.
    """
    if "full" not in job.engine.can.recompute_some or len(job.pools) > 1:
        return []
    powers = [1 << power for power in range(job.model.num_layers.bit_length())]
    return sorted({count for power in powers for count in (power, 3 * power) if count < job.model.num_layers})


def needs_recompute(job: Job, degrees: DegreeArrays) -> Mask:
    """Whether the first, the second or the last stage of the even split does not fit without recompute, [n].

    Source: derived here; tested against ledgers.
    """
    (pool,) = job.pools
    last, smaller, num_larger = degrees.pp - 1, *np.divmod(job.model.num_layers, degrees.pp)
    index = np.stack([np.zeros_like(last), np.minimum(1, last), last])  # [3, n]
    layers, first = smaller + (index < num_larger), index * smaller + np.minimum(index, num_larger)
    stage = stage_of(job, index=index, num_layers=layers, policy=NONE, first=first, layout=degrees)
    fits = np.broadcast_to(stage_fits(pool, degrees, stage), index.shape)
    return np.asarray(~fits.all(axis=0), dtype=np.bool_)


class PolicyChoices(NamedTuple):
    """The policies between which the stages of each configuration can choose, [choices, n] each.

    policy: codes.
    allowed: whether the configuration may choose the policy.
    which: position of the policy in the masks.
    """

    policy: NDArray[np.int64]
    allowed: NDArray[np.bool_]
    which: NDArray[np.int64]


def choices_of(degrees: DegreeArrays, policies: PolicyMasks) -> PolicyChoices:
    """The policies that stages can choose: one if all stages share a policy, otherwise every policy."""
    codes, masks = np.array(list(policies), dtype=np.int64), np.stack(list(policies.values()))
    if np.all(np.not_equal(degrees.recompute, OWN)):
        which = np.argmax(masks, axis=0)[np.newaxis]
        return PolicyChoices(codes[which], np.any(masks, axis=0)[np.newaxis], which)
    which = np.broadcast_to(np.arange(len(codes))[:, np.newaxis], masks.shape)
    return PolicyChoices(codes[which], masks, which)
