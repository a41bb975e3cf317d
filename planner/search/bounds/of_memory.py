"""Bounds from memory: the most layers that a stage can hold, and the least bytes of the fullest stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cost.chance import memory_limit_bytes
from planner.cost.prices import stage_bytes
from planner.search.bounds.of_layers import (
    kinds_main_first,
    leading_layers,
    mtp_of_last,
    num_main_layers,
    stage_of_kind,
)
from planner.search.space.arrays import unrolled
from planner.search.space.configurations import OWN
from planner.search.space.policies import choices_of
from planner.specs.recompute import FULL, NONE, policy_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from planner.numbers import Number
    from planner.search.space.configurations import DegreeArrays, PolicyMasks
    from planner.specs.job import Job, PoolJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Layers of the main kinds that each stage of each configuration can hold under each policy.

    owner: configuration of each stage, [stages].
    is_last: whether the stage is the last of its pipeline.
    layers: number of layers, [policies, stages], a whole number; 0 if the policy is not allowed.
    """

    owner: NDArray[np.int64]
    is_last: NDArray[np.bool_]
    layers: NDArray[np.float64]

    def in_all(self, layers: NDArray[np.float64], degrees: DegreeArrays) -> NDArray[np.float64]:
        """Sum over the stages of each configuration, [n]."""
        return np.asarray(np.bincount(self.owner, weights=layers, minlength=len(degrees)), dtype=np.float64)


def _whole(layers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Layers rounded down to whole numbers, with a tolerance, so that rounding errors never remove a layer."""
    return np.floor(layers * (1 + 1e-9))


def held_in_time(spare_seconds: Number, layer_seconds: Number, capacity: Number) -> Number:
    """Number of layers that each stage can hold within `spare_seconds` under its best policy, [stages].

    layer_seconds: seconds of one more layer, [policies, stages].
    capacity: layers that memory allows, [policies, stages].
    """
    held = np.zeros(np.shape(spare_seconds))
    for price, most in zip(layer_seconds, capacity, strict=True):
        held = np.maximum(held, np.minimum(most, _whole(spare_seconds / price)))
    return held


def capacities_of_stages(job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks) -> Capacities:
    """The layers that each stage can hold by its memory.

    From three layers on, and below two, memory grows at least as fast as from two to three layers.
    Between two stages it need not be linear, because the fullest moment of a stage depends on its microbatches in
    flight. Layers of uncounted kinds only add to the memory. A first stage with counted layers holds all leading
    layers, too.
    """
    owner, index, _ = unrolled(degrees.pp)
    each, last = degrees.take(owner), degrees.pp - 1
    limit = np.broadcast_to(memory_limit_bytes(job, degrees), degrees.pp.shape)[owner]
    layers = []
    choices = choices_of(degrees, policies)
    for policy, mask in zip(choices.policy, choices.allowed, strict=True):
        code = np.broadcast_to(policy, degrees.pp.shape)[owner]
        two, three = (_bytes_with(job, each, index, k, code) for k in (2, 3))
        most = np.maximum(2 + (limit - two) / np.maximum(three - two, 1.0), (index > 0) | (leading_layers(job) == 0))
        layers.append(np.where(mask[owner], _whole(most), 0.0))
    return Capacities(owner=owner, is_last=index == last[owner], layers=np.stack(layers))


def _bytes_with(job: PoolJob, degrees: DegreeArrays, index: Number, num_layers: int, policy: Number) -> Number:
    main, further = kinds_main_first(job)[0], mtp_of_last(job)
    stage = stage_of_kind(main, index=index, num_layers=num_layers, policy=policy, num_mtp=further)
    stage = replace(stage, num_layers=num_layers + np.equal(index, 0) * leading_layers(job))
    return np.asarray(np.broadcast_to(stage_bytes(job, degrees, stage), np.shape(index)))


def least_stage_bytes(job: PoolJob, degrees: DegreeArrays, policies: Sequence[int]) -> NDArray[np.float64]:
    """Lower bound of the bytes of each configuration's fullest stage, for any split of the layers.

    policies: the policies that a stage may have, if each stage has its own.

    At least one stage holds ceil(L / S) or more of the L layers of the main kinds. An inner stage needs less memory
    than an earlier inner stage, so the least need of the first, the last but one and the last stage is a lower bound
    for all stages.

    Source: derived here; tested against the priced columns.
    """
    main, layers = kinds_main_first(job)[0], np.ceil(num_main_layers(job) / degrees.pp)
    last = degrees.pp - 1
    index = np.stack([np.zeros_like(last), np.maximum(last - 1, 0), last])
    own = policies if np.any(np.equal(degrees.recompute, OWN)) else [degrees.recompute]
    further = mtp_of_last(job)
    shapes = [stage_of_kind(main, index=index, num_layers=layers, policy=code, num_mtp=further) for code in own]
    least = [np.broadcast_to(stage_bytes(job, degrees, shape), index.shape).min(axis=0) for shape in shapes]
    return np.asarray(np.minimum.reduce(least))


def least_shares(job: Job, degrees: DegreeArrays) -> NDArray[np.float64]:
    """Lower bound of the fullest stage's memory need under any policy, as a share of the largest pool's device, [n].

    Source: `least_stage_bytes`.
    """
    policies = [policy_code(policy) for policy in job.engine.can.recompute]
    shares = [least_stage_bytes(pool, degrees, policies) / memory_limit_bytes(pool, degrees) for pool in job.pools]
    return np.asarray(np.minimum.reduce(shares), dtype=np.float64)


def may_fit(job: Job, degrees: DegreeArrays, policies: Sequence[int]) -> NDArray[np.bool_]:
    """Whether memory may suffice in at least one pool and under at least one policy, by `least_stage_bytes`.

    Full recompute is tried first, because most configurations fit with it. Other policies are tried only for the
    remaining configurations.

    Gain (`may-fit`): over 30 -> 0.84 s for Llama-3-405B on 32 devices, where no layout fits; none for GPT-3 on 1,024.
    """
    fits: NDArray[Any] = np.zeros(len(degrees), dtype=np.bool_)
    several = np.any(np.equal(degrees.recompute, OWN))
    for pool, policy in product(job.pools, sorted(policies, key=lambda code: code != FULL) if several else [NONE]):
        left = np.flatnonzero(~fits)
        if len(left):
            rest = degrees.take(left)
            fits[left] = least_stage_bytes(pool, rest, [policy]) <= memory_limit_bytes(pool, rest)
    return fits
