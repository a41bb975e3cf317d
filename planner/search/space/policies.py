"""Recompute policies: the policies that configurations may use, and the choices of their stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.cost.prices import stage_fits
from planner.cost.recompute import absent_modules, idle_modules, modules_of
from planner.cost.stage import stage_of
from planner.layout import offloads_activations
from planner.search.space.configurations import OWN, DegreeArrays, Refusals, legal_blocks, no_candidate
from planner.search.space.list_rules import no_full_recompute
from planner.specs.recompute import NONE, is_of_some_layers, policy_code, policy_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from planner.numbers import Mask
    from planner.search.space.configurations import PolicyMasks
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job


def allowed_policies(job: Job, constraints: Constraints, degrees: DegreeArrays) -> PolicyMasks:
    """Which configurations may use which recompute policy.

    A policy may be used if it is pinned, if it is in the engine's profile and of use to this model, or if it recomputes
    only some layers and `with_policies` has already given it to a configuration.
    """
    offered = [p for p in job.engine.can.recompute if _is_of_use(job, p)]
    pinned = constraints.value_of("recompute")
    offered += sorted(set(pinned.split("/") if pinned else ()) - set(offered))
    have = set(np.unique(degrees.recompute).tolist()) - {OWN}
    offered += sorted(set(map(policy_name, filter(is_of_some_layers, have))) - set(offered))
    if no_full_recompute(job):
        offered = [p for p in offered if p.partition(":")[0] != "full"]
    if offloads_activations(degrees):
        offered = [p for p in offered if p in job.engine.offload.activations_of]
    masks = {policy_code(p): constraints.allows_policy(p, degrees) for p in offered}
    own = np.equal(degrees.recompute, OWN)
    masks = {code: mask & (own | np.equal(degrees.recompute, code)) for code, mask in masks.items()}
    shape = np.shape(degrees.tp)
    return {code: np.broadcast_to(mask, shape) for code, mask in masks.items() if np.any(mask) or not np.size(mask)}


def _is_of_use(job: Job, policy: str) -> bool:
    """Whether the model has every part that the policy names, and not all parts that it recomputes are idle."""
    parts, absent = modules_of(job, policy_code(policy)), absent_modules(job.model)
    return absent.keys().isdisjoint(policy.split("+")) and not (parts and parts <= idle_modules(job))


def with_policies(job: Job, constraints: Constraints, degrees: DegreeArrays) -> DegreeArrays:
    """The configurations, repeated for each allowed policy if an engine uses one policy for all stages."""
    allowed = allowed_policies(job, constraints, degrees)
    if job.engine.pipeline.recompute_per_stage or not allowed:
        return degrees
    rows = [(degrees.take(mask), code) for code, mask in allowed.items()]
    rows += _of_some_layers(job, constraints, degrees)
    return DegreeArrays.joined([some.having("recompute", np.full(len(some), code)) for some, code in rows])


def legal_degrees(
    job: Job, constraints: Constraints, *, with_replicas: bool = True, smallest: bool = False
) -> Iterator[DegreeArrays]:
    """Every outer configuration that the rules and the constraints allow, in blocks of one schedule and offload.

    with_replicas, smallest: as in `legal_blocks`.

    Raises:
        InputError: no legal configuration is left; the message names the rule that refused most.
    """
    refused: Refusals = {}
    none = True
    for degrees in legal_blocks(job, constraints, refused, with_replicas=with_replicas, smallest=smallest):
        none = False
        yield with_policies(job, constraints, degrees)
    if none and smallest:  # the message counts configurations of all microbatches
        yield from legal_degrees(job, constraints, with_replicas=with_replicas)
    elif none:
        raise no_candidate(job, refused, constraints)


def some_layers(job: Job) -> list[int]:
    """How many layers of each chunk the search tries to recompute in full: 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    The list is empty if the engine cannot recompute only some layers, or if the cluster has several pools.
    """
    if "full" not in job.engine.can.recompute_some or len(job.pools) > 1:
        return []
    powers = [1 << power for power in range(job.model.num_layers.bit_length())]
    return sorted({count for power in powers for count in (power, 3 * power) if count < job.model.num_layers})


def _of_some_layers(job: Job, constraints: Constraints, degrees: DegreeArrays) -> list[tuple[DegreeArrays, int]]:
    """Configurations with each policy that recomputes only some layers.

    Only configurations that need recompute are used, and only with policies that recompute fewer layers than a chunk of
    the even split has.
    """
    counts = some_layers(job)
    if not counts or constraints.value_of("recompute") or no_full_recompute(job) or offloads_activations(degrees):
        return []
    degrees = degrees.take(needs_recompute(job, degrees))
    found = []
    for count in counts:
        policy = f"full:{count}"
        mask = constraints.allows_policy(policy, degrees) & (
            count * degrees.pp * degrees.interleave < job.model.num_layers
        )
        found.append((degrees.take(np.broadcast_to(mask, np.shape(degrees.tp))), policy_code(policy)))
    return found


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
