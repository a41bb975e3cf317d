"""The space of a search: every configuration that the rules and the user's constraints allow for a job.

A partition of the devices (tp, sp, cp, pp, dp) determines how many devices work, and on which share of a layer. The
other keys (microbatch, interleave, ZeRO stage, replicas, experts) are filled in one by one. Rules apply as soon as the
values of their keys are known, so the full product of all keys is never built.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from planner.cost.recompute import absent_modules, idle_modules, modules_of
from planner.cost.schedule import EXECUTED
from planner.cost.segments import has_choice
from planner.layout import chunks_per_stage, divisors, offloads_activations
from planner.search.space.arrays import unrolled
from planner.search.space.configurations import OWN, DegreeArrays, can_be_smaller, expert_options, with_ones
from planner.search.space.constraints import Constraints
from planner.search.space.degree_rules import searched_ends, sequence_parallel
from planner.search.space.list_rules import no_full_recompute
from planner.search.space.placements import placements_of
from planner.search.space.policies import needs_recompute, some_layers
from planner.search.space.rules import RULES
from planner.search.space.segments import segments_to_try
from planner.specs.banned import searched_axes
from planner.specs.recompute import is_of_some_layers, policy_code, policy_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.numbers import Mask
    from planner.search.space.configurations import PolicyMasks, Refusals
    from planner.search.space.rule import Rule
    from planner.specs.job import Job
    from planner.specs.recipe import Offload, Schedule

USUAL_SCHEDULES: Final = ("1f1b", "interleaved")
"""Schedules that are considered without a pin.

GPipe is left out because it takes as long as 1F1B and needs more memory. (With fewer microbatches than stages some
engines allow only GPipe. These layouts are not searched.) Schedules that can be priced only by executing them are left
out because that is too slow to do for every job.
"""

_ORDER: Final = (
    *("tp", "sp", "cp", "pp", "dp", "segment"),
    *("mbs", "interleave", "schedule", "etp", "ep", "zero", "offload", "hsdp"),
)
"""Keys in the order in which configurations get their values."""

_BLOCK: Final = 256  # partitions at a time


class Space:
    """The job, the user's constraints, and the configurations that both and the rules allow.

    Each step takes configurations of the step before, and returns them with every legal value of its keys. It adds the
    number of configurations that each rule refuses to `refused`, if given.
    """

    def __init__(self, job: Job, constraints: Constraints | None = None) -> None:
        self.job, self.constraints = job, constraints or Constraints()

    def of(self, job: Job) -> Space:
        """The space of another job under the same constraints."""
        return Space(job, self.constraints)

    def under(self, constraints: Constraints) -> Space:
        """The space of the same job under other constraints."""
        return Space(self.job, constraints)

    def partitions(self, refused: Refusals | None = None) -> DegreeArrays:
        """Every legal partition of the devices (tp, sp, cp, pp, dp, segment); all other keys are 1.

        Sequence parallelism is on if possible, unless it is pinned. A partition may leave devices idle.
        """
        job, n, axes = self.job, self.job.cluster.num_devices, searched_axes(self.job.engine)
        options: dict[str, Sequence[int]] = {
            "tp": divisors(job.model.num_heads),
            "cp": divisors(max(1, job.training.sequence_length // 2)),
            "pp": range(1, job.model.num_layers + searched_ends(job) + 1),
            "dp": divisors(job.training.global_batch_size),
        }
        chooses = has_choice(job.cluster) or self.constraints.mentions("segment")
        x = with_ones(1, schedule="1f1b")
        for key, values in options.items():
            x = self._cross(x, key, [value for value in values if value <= n] if key in axes else [1])
            x = x.take(x.tp * x.pp * x.dp * x.cp <= n)
            if key == "cp":
                x = self._obeying(self._with_sequence_parallelism(x), refused, "tp", "sp", "cp", placed=not chooses)
            elif key != "tp":
                x = self._obeying(x, refused, key, placed=not chooses)
        x = x.take(self.constraints.fills_hosts(x.world_size))
        return self._obeying(self._with_segments(x), refused, "segment") if chooses else x

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Schedules to consider: the engine's usual schedules, or the pinned schedule.

        DualPipeV is a usual schedule if its pairs of passes hide their exchanges, all devices are equal, and no stages
        are pinned.
        """
        pinned, engine = self.constraints.value_of("schedule"), self.job.engine
        pairs = engine.overlap.paired_passes and not self.constraints.lists and len(self.job.pools) == 1
        usual = (*USUAL_SCHEDULES, *(("dualpipev",) if pairs else ()))
        return tuple(s for s in engine.pipeline.schedules if (s == pinned if pinned else s in usual))

    @property
    def offloads(self) -> tuple[Offload, ...]:
        """Offloads to consider, `none` first; other offloads only if the user allows or pins offload."""
        pinned = self.constraints.value_of("offload")
        if pinned:
            return (cast("Offload", pinned),)
        allowed = self.job.allow_offload or any(pin.key == "offload" for pin in self.constraints.pins)
        return self.job.engine.offload.what if allowed and self.job.has_hosts else ("none",)

    def timings(self, partitions: DegreeArrays, schedule: Schedule, refused: Refusals | None = None) -> DegreeArrays:
        """The partitions with every legal microbatch size and interleave of one schedule."""
        dp, x = partitions.dp, replace(partitions, schedule=schedule)
        if schedule == "interleaved" or schedule in EXECUTED:
            x = x.take(x.pp > 1)
        x = self._cross(x, "mbs", divisors(self.job.training.global_batch_size // int(dp.min(initial=1))))
        x = self._obeying(x, refused, "mbs")
        if schedule != "interleaved":
            x = self._cross(x, "interleave", [chunks_per_stage(schedule)])
        else:
            deepest = int(x.pp.max(initial=0))
            options = [self.constraints.left_of("interleave", self._interleaves(pp)) for pp in range(1, deepest + 1)]
            count = np.array([0, *map(len, options)])
            row, number, _ = unrolled(count[x.pp])
            x, number = x.take(row), number + (np.cumsum(count) - count)[x.pp[row]]
            x = x.having("interleave", np.array([*chain.from_iterable(options)], dtype=np.int64)[number])
        return self._obeying(x, refused, "interleave", "schedule")

    def experts(self, timed: DegreeArrays, refused: Refusals | None = None) -> DegreeArrays:
        """The configurations with every legal pair of degrees for experts."""
        outer, inner = zip(*expert_options(self.job), strict=True)
        x = self._cross(self._cross(timed, "etp", sorted({*inner})), "ep", sorted({*outer}))
        return self._obeying(x, refused, "etp", "ep")

    def zero(self, degrees: DegreeArrays, offload: Offload, refused: Refusals | None = None) -> DegreeArrays:
        """The configurations with every ZeRO stage that is legal with `offload`."""
        engine = self.job.engine
        x = self._cross(
            replace(degrees, offload=offload), "zero", sorted({*engine.can.zero_stages, *engine.pipeline.zero_stages})
        )
        return self._obeying(x, refused, "zero", "offload")

    def replicas(self, degrees: DegreeArrays, refused: Refusals | None = None, *, every: bool = True) -> DegreeArrays:
        """The configurations with every number of replicas of the sharded group (HSDP) that the constraints allow.

        A shard group of one rank is the same as ZeRO-0, and is left out unless it is pinned. Multi-token prediction may
        stand before the loss.
        """
        pinned = self.constraints.value_of("hsdp")
        every = every and self.job.engine.can.replicates_shards
        x = self._cross(degrees, "hsdp", [int(pinned)] if pinned else replica_counts(degrees) if every else [1])
        x = self._obeying(x, refused, "hsdp")
        if not pinned:
            x = x.take((x.hsdp == 1) | (x.hsdp < x.dp * x.cp))
        x = x.take(self.constraints.allowed(x))
        if len(x) and self.job.model.mtp_layers and searched_ends(self.job) and x.schedule not in EXECUTED:
            apart = x.take(x.pp > 1)
            x = DegreeArrays.joined([x, apart.having("mtp_before", np.ones_like(apart.pp))])
        return x.take(self.constraints.allows_ends(x.pp * x.interleave, x.mtp_before)) if len(x) else x

    def policies(self, degrees: DegreeArrays) -> PolicyMasks:
        """Which configurations may use which recompute policy.

        A policy may be used if it is pinned, if it is in the engine's profile and of use to this model, or if it
        recomputes only some layers and `with_policies` has already given it to a configuration.
        """
        offered = [p for p in self.job.engine.can.recompute if self.is_of_use(p)]
        pinned = self.constraints.value_of("recompute")
        offered += sorted(set(pinned.split("/") if pinned else ()) - set(offered))
        have = set(np.unique(degrees.recompute).tolist()) - {OWN}
        offered += sorted(set(map(policy_name, filter(is_of_some_layers, have))) - set(offered))
        if no_full_recompute(self.job):
            offered = [p for p in offered if p.partition(":")[0] != "full"]
        if offloads_activations(degrees):
            offered = [p for p in offered if p in self.job.engine.offload.activations_of]
        masks = {policy_code(p): self.constraints.allows_policy(p, degrees) for p in offered}
        own = np.equal(degrees.recompute, OWN)
        masks = {code: mask & (own | np.equal(degrees.recompute, code)) for code, mask in masks.items()}
        shape = np.shape(degrees.tp)
        return {code: np.broadcast_to(mask, shape) for code, mask in masks.items() if np.any(mask) or not np.size(mask)}

    def with_policies(self, degrees: DegreeArrays) -> DegreeArrays:
        """The configurations, repeated for each allowed policy if an engine uses one policy for all stages."""
        allowed = self.policies(degrees)
        if self.job.engine.pipeline.recompute_per_stage or not allowed:
            return degrees
        rows = [(degrees.take(mask), code) for code, mask in allowed.items()]
        rows += self._of_some_layers(degrees)
        return DegreeArrays.joined([some.having("recompute", np.full(len(some), code)) for some, code in rows])

    def complete(
        self,
        partitions: DegreeArrays,
        refused: Refusals | None = None,
        *,
        with_replicas: bool = True,
        smallest: bool = False,
    ) -> Iterator[DegreeArrays]:
        """Every configuration of these partitions without policies, in blocks of one schedule and offload.

        with_replicas, smallest: as in `blocks`.
        """
        for schedule in self.schedules:
            timed = self.timings(partitions, schedule, refused)
            if smallest:
                timed = timed.take((timed.mbs == 1) | ~can_be_smaller(self.job, timed))
            spread = self.experts(timed, refused)
            for offload in self.offloads:
                degrees = self.replicas(self.zero(spread, offload, refused), refused, every=with_replicas)
                if len(degrees):
                    yield degrees

    def blocks(
        self, refused: Refusals | None = None, *, with_replicas: bool, smallest: bool = False
    ) -> Iterator[DegreeArrays]:
        """Every configuration that the rules and the constraints allow, without policies.

        with_replicas: include every number of replicas of the sharded group; otherwise only one replica.
        smallest: leave out configurations of which one with smaller microbatches needs no more memory
        (`can_be_smaller`).
        """
        smallest = smallest and not (self.constraints.mentions("mbs") or self.constraints.mentions("recompute"))
        partitions = self.partitions(refused)
        for first in range(0, len(partitions), _BLOCK):
            block = partitions.take(slice(first, first + _BLOCK))
            yield from self.complete(block, refused, with_replicas=with_replicas, smallest=smallest)

    def legal(self, degrees: DegreeArrays) -> Mask:
        """Whether all rules and constraints allow each of these complete configurations, [n]."""
        x = degrees
        mask = self.constraints.allowed(x) & self.constraints.allows_ends(x.pp * x.interleave, x.mtp_before)
        return np.asarray(np.logical_and.reduce([mask, *(rule.holds(self.job, x) & mask for rule in RULES)]))

    def has_pinned_pools(self, degrees: DegreeArrays) -> Mask:
        """Whether the placements equal the user's pinned placement; true without such a pin, [n]."""
        alike, pinned = np.ones(len(degrees), dtype=bool), self.constraints.value_of("pools")
        if pinned is None:
            return alike
        names = [pool.cluster.name for pool in self.job.pools]
        wanted = [names.index(name) if name in names else -1 for name in pinned.split("/")]
        placements, rows = placements_of(self.job, degrees), np.arange(len(degrees))
        alike = degrees.pp == len(wanted)
        for stage, pool in enumerate(wanted):
            alike = alike & (placements.pool_of(rows, np.minimum(stage, degrees.pp - 1)) == pool)
        return np.asarray(alike)

    def _cross(self, degrees: DegreeArrays, key: str, options: Sequence[int]) -> DegreeArrays:
        """Combine every configuration with every value of `key` that the pins allow."""
        values = np.array(self.constraints.left_of(key, options), dtype=np.int64)
        if len(values) == 1:
            return degrees.having(key, np.repeat(values, len(degrees)))
        rows = np.repeat(np.arange(len(degrees)), len(values))
        return degrees.take(rows).having(key, np.tile(values, len(degrees)))

    def _obeying(
        self, degrees: DegreeArrays, refused: Refusals | None, *keys: str, placed: bool = False
    ) -> DegreeArrays:
        """The configurations that break no rule that reads one of `keys`, and no later key.

        placed: the segment is known, too.
        """
        if not len(degrees):
            return degrees
        keep, left = np.ones(len(degrees), dtype=bool), len(degrees)
        for rule in _rules_on(keys, placed):
            keep &= rule.holds(self.job, degrees)
            if refused is not None:
                refused[rule.name] = refused.get(rule.name, 0) + left - int(keep.sum())
            left = int(keep.sum())
        return degrees.take(keep) if left < len(keep) else degrees

    def _with_segments(self, degrees: DegreeArrays) -> DegreeArrays:
        """The partitions with every segment that may be the best; 0 if a domain is one host, and on mixed clusters."""
        pool = self.job.pools[0]
        if len(self.job.pools) > 1 or pool.cluster.hosts_per_domain == 1:
            return degrees.take(self.constraints.only("segment").allowed(degrees))
        inner = degrees.tp * degrees.cp * degrees.dp
        row, segment = segments_to_try(pool, self.constraints, degrees.tp, inner, degrees.pp)
        return degrees.take(row).having("segment", segment)

    def _with_sequence_parallelism(self, degrees: DegreeArrays) -> DegreeArrays:
        """Each partition with sequence parallelism if possible, unless a pin says otherwise."""
        own, pinned = self.constraints.only("sp", "tp", "cp"), self.constraints.value_of("sp")
        on = degrees.having("sp", np.ones_like(degrees.tp))
        can = sequence_parallel.holds(self.job, on) & replace(own, pins=()).allowed(on)
        with_sp = degrees.having("sp", np.full_like(degrees.tp, int(pinned)) if pinned else can.astype(np.int64))
        return with_sp.take(own.allowed(with_sp))

    def _interleaves(self, pp: int) -> list[int]:
        """Numbers of chunks per stage to try: every number, or only the smallest for each chunk size if none is pinned.

        More chunks of the same size make no pass shorter.
        """
        num_layers, every = self.job.model.num_layers, self.constraints.mentions("interleave")
        most = (num_layers + searched_ends(self.job)) // pp
        largest = {v: -(-num_layers // (pp * v)) for v in range(2, most + 1)}
        return [v for v in largest if every or largest.get(v - 1) != largest[v]]

    def is_of_use(self, policy: str) -> bool:
        """Whether the model has every part that the policy names, and not all parts that it recomputes are idle."""
        parts, absent = modules_of(self.job, policy_code(policy)), absent_modules(self.job.model)
        return absent.keys().isdisjoint(policy.split("+")) and not (parts and parts <= idle_modules(self.job))

    def _of_some_layers(self, degrees: DegreeArrays) -> list[tuple[DegreeArrays, int]]:
        """Configurations with each policy that recomputes only some layers.

        Only configurations that need recompute are used, and only with policies that recompute fewer layers than a
        chunk of the even split has.
        """
        job, counts = self.job, some_layers(self.job)
        is_fixed = self.constraints.value_of("recompute") or no_full_recompute(job) or offloads_activations(degrees)
        if not counts or is_fixed:
            return []
        degrees = degrees.take(needs_recompute(job, degrees))
        found = []
        for count in counts:
            policy, own = f"full:{count}", count * degrees.pp * degrees.interleave < job.model.num_layers
            mask = np.broadcast_to(self.constraints.allows_policy(policy, degrees) & own, np.shape(degrees.tp))
            found.append((degrees.take(mask), policy_code(policy)))
        return found


@cache
def _rules_on(keys: tuple[str, ...], placed: bool) -> tuple[Rule, ...]:
    """The rules that read one of `keys`, and no key after the last of them; rules without keys are read with tp.

    placed: the segment counts as known.
    """
    known = {*_ORDER[: _ORDER.index(keys[-1]) + 1], *(("segment",) if placed else ())}
    return tuple(rule for rule in RULES if {*rule.reads} <= known and {*(rule.reads or ("tp",))} & {*keys})


def replica_counts(degrees: DegreeArrays) -> list[int]:
    """Possible numbers of replicas of the sharded group: the divisors of any configuration's dp."""
    return sorted({replicas for dp in set(degrees.dp.tolist()) for replicas in divisors(dp)})
