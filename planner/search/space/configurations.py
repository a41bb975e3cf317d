"""Outer configurations as arrays: every partition of the devices with every combination of the other keys.

A partition of the devices (tp, sp, cp, pp, dp) determines how many devices work, and on which share of a layer. The
other keys (microbatch, interleave, ZeRO stage, replicas, experts) are filled in one by one. Rules apply as soon as the
values of their keys are known, so the full product of all keys is never built.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np

from planner.cost.schedule import EXECUTED
from planner.cost.segments import has_choice
from planner.cost.shapes import distinct_rows
from planner.errors import InputError, Mistake
from planner.layout import Layout, chunks_per_stage, divisors
from planner.search.space.rules import RULES, broken_rules, searched_ends
from planner.search.space.segments import segments_to_try
from planner.specs.banned import searched_axes
from planner.specs.text import any_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from planner.numbers import Number, Rows
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job
    from planner.specs.recipe import Offload, Schedule

_USUAL_SCHEDULES: Final = ("1f1b", "interleaved")
"""Schedules that are considered without a pin.

GPipe is left out because it takes as long as 1F1B and needs more memory. (With fewer microbatches than stages some
engines allow only GPipe. These layouts are not searched.) Schedules that can be priced only by executing them are left
out because that is too slow to do for every job.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeArrays:
    """Many outer configurations; every field but `schedule` and `offload` is an array of one length.

    segment, mtp_before: as in `Layout`, and also 0 until they are filled in.
    placement: number of the stages' placement in pools (`placements`); 0 on a uniform cluster, and until it is filled
    in.
    recompute: code of the policy of all stages, if the engine has one policy for all; `OWN` if each stage has its own.
    """

    tp: Number
    pp: Number
    dp: Number
    cp: Number
    ep: Number
    etp: Number
    zero: Number
    hsdp: Number
    mbs: Number
    interleave: Number
    sp: Number
    segment: Number
    placement: Number
    mtp_before: Number
    recompute: Number
    schedule: Schedule
    offload: Offload = "none"

    def __len__(self) -> int:
        """Number of configurations."""
        return len(self.tp)

    @property
    def world_size(self) -> Number:
        """Devices that each configuration uses."""
        return self.tp * self.pp * self.cp * self.dp

    def take(self, index: Rows | int) -> DegreeArrays:
        """The configurations at `index` (a mask, positions, a slice, or one position, which gives plain integers)."""
        if isinstance(index, (int, np.integer)):
            return self._map(lambda values: int(values[index]))
        return self._map(lambda values: values[index])

    def at_once(self) -> DegreeArrays:
        """One configuration of plain integers as arrays of length one."""
        return self._map(np.atleast_1d)

    def having(self, key: str, values: Number) -> DegreeArrays:
        """The same configurations with other values of one degree."""
        return replace(self, **{key: values})

    def numbers(self) -> dict[str, Number]:
        """The degrees and the placement by name, without the values that all configurations share."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def columns(self) -> DegreeArrays:
        """The same configurations with a trailing axis of length 1, to broadcast against each configuration's parts."""
        return self._map(lambda values: values[..., np.newaxis])

    def distinct(self, *keys: str) -> tuple[DegreeArrays, NDArray[np.int64]]:
        """The distinct values of these keys (other keys are 1), and the index of each configuration's values."""
        first, position = distinct_rows([getattr(self, key) for key in keys])
        chosen = {key: getattr(self, key)[first] for key in keys}
        ones = _with_ones(len(first), schedule=self.schedule, **chosen)
        return replace(ones, offload=self.offload), position

    @staticmethod
    def joined(parts: Sequence[DegreeArrays]) -> DegreeArrays:
        """Configurations end to end, with the schedule and the offload of the first part."""
        joined: dict[str, Number] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        return replace(parts[0], **joined)

    def _map(self, change: Callable[[Number], Number]) -> DegreeArrays:
        return replace(self, **{name: change(getattr(self, name)) for name in _ARRAYS})


_ARRAYS: Final = tuple(f.name for f in fields(DegreeArrays) if f.name not in ("schedule", "offload"))

OWN: Final = 3
"""Takes the place of a policy's code if each stage has its own policy."""

_ZERO: Final = ("sp", "zero", "segment", "placement", "mtp_before")

PolicyMasks: TypeAlias = "dict[int, NDArray[np.bool_]]"
"""Which configurations may use each recompute policy, by the policy's code."""

Refusals: TypeAlias = dict[str, int]
"""Number of configurations that each rule refused; a configuration that breaks several rules counts for the first."""


def _with_ones(length: int, *, schedule: Schedule, **given: Number) -> DegreeArrays:
    """Configurations with the given values, and a policy for each stage.

    Missing degrees are 1, and the keys of `_ZERO` are 0.
    """
    values = dict.fromkeys(_ARRAYS, 1) | dict.fromkeys(_ZERO, 0) | {"recompute": OWN}
    defaults: dict[str, Number] = {name: np.full(length, value, dtype=np.int64) for name, value in values.items()}
    return DegreeArrays(**(defaults | given), schedule=schedule)


class _Enumeration:
    """Configurations that grow key by key; rules and constraints apply as soon as all keys that they read are known."""

    def __init__(self, job: Job, constraints: Constraints, refused: Refusals, start: DegreeArrays) -> None:
        self._job, self._constraints, self._refused = job, constraints, refused
        self.degrees = start

    def cross(self, key: str, options: Sequence[int]) -> None:
        """Combine every configuration with every value of `key` that the pins allow."""
        values = np.array(self._constraints.left_of(key, options), dtype=np.int64)
        if len(values) == 1:
            self.degrees = self.degrees.having(key, np.repeat(values, len(self.degrees)))
            return
        rows = np.repeat(np.arange(len(self.degrees)), len(values))
        self.degrees = self.degrees.take(rows).having(key, np.tile(values, len(self.degrees)))

    def obey(self, *keys: str, among: tuple[str, ...]) -> None:
        """Drop configurations that break a rule.

        Only rules that read one of `keys`, and no key outside `among`, are checked.
        """
        if not len(self.degrees):
            return
        keep, left = np.ones(len(self.degrees), dtype=bool), len(self.degrees)
        for rule in RULES:
            if set(rule.reads) <= set(among) and set(rule.reads or ("tp",)) & set(keys):
                keep &= rule.holds(self._job, self.degrees)
                self._refused[rule.name] = self._refused.get(rule.name, 0) + left - int(keep.sum())
                left = int(keep.sum())
        if left < len(keep):
            self.degrees = self.degrees.take(keep)


_PARTITION: Final = ("tp", "sp", "cp", "pp", "dp", "segment")
_TIMING: Final = ("mbs", "interleave", "schedule")
_EXPERTS: Final = ("ep", "etp")


def device_partitions(job: Job, constraints: Constraints, refused: Refusals) -> DegreeArrays:
    """Every legal partition of the devices (tp, sp, cp, pp, dp, segment); all other keys are 1.

    Sequence parallelism is on if possible, unless it is pinned. A partition may leave devices idle.
    """
    n, sequence = job.cluster.num_devices, job.training.sequence_length
    enumeration = _Enumeration(job, constraints, refused, _with_ones(1, schedule="1f1b"))
    options: tuple[tuple[str, Sequence[int]], ...] = (
        ("tp", divisors(job.model.num_heads)),
        ("cp", divisors(max(1, sequence // 2))),
        ("pp", range(1, job.model.num_layers + searched_ends(job) + 1)),
        ("dp", divisors(job.training.global_batch_size)),
    )
    chooses = has_choice(job.cluster) or constraints.mentions("segment")
    axes = searched_axes(job.engine)
    set_keys: tuple[str, ...] = ("tp", "sp", "cp") if chooses else ("tp", "sp", "cp", "segment")
    for key, values in options:
        enumeration.cross(key, [value for value in values if value <= n] if key in axes else [1])
        x = enumeration.degrees
        enumeration.degrees = x.take(x.tp * x.pp * x.dp * x.cp <= n)
        if key == "cp":
            enumeration.degrees = _with_sequence_parallelism(job, constraints, enumeration.degrees)
            enumeration.obey("tp", "sp", "cp", among=set_keys)
        elif key != "tp":
            set_keys = (*set_keys, key)
            enumeration.obey(key, among=set_keys)
    x = enumeration.degrees
    enumeration.degrees = x.take(constraints.fills_hosts(x.world_size))
    if chooses:
        enumeration.degrees = _with_segments(job, constraints, enumeration.degrees)
        enumeration.obey("segment", among=_PARTITION)
    return enumeration.degrees


def _with_segments(job: Job, constraints: Constraints, degrees: DegreeArrays) -> DegreeArrays:
    """The partitions with every segment that may be the best; 0 if a domain is one host, and on mixed clusters."""
    pool = job.pools[0]
    if len(job.pools) > 1 or pool.cluster.hosts_per_domain == 1:
        return degrees.take(constraints.only("segment").allowed(degrees))
    row, segment = segments_to_try(pool, constraints, degrees.tp, degrees.tp * degrees.cp * degrees.dp, degrees.pp)
    return degrees.take(row).having("segment", segment)


def _with_sequence_parallelism(job: Job, constraints: Constraints, degrees: DegreeArrays) -> DegreeArrays:
    """Each partition with sequence parallelism if possible, unless a pin says otherwise."""
    own, pinned = constraints.only("sp", "tp", "cp"), constraints.value_of("sp")
    divides = job.training.sequence_length // degrees.cp % degrees.tp == 0
    can = (degrees.tp > 1) & divides & (1 in job.engine.can.sp)
    may = replace(own, pins=()).allowed(degrees.having("sp", np.ones_like(degrees.tp)))
    sp = np.full_like(degrees.tp, int(pinned)) if pinned else (can & may).astype(np.int64)
    with_sp = degrees.having("sp", sp)
    return with_sp.take(own.allowed(with_sp))


def schedules_of(job: Job, constraints: Constraints) -> tuple[Schedule, ...]:
    """Schedules to consider: the engine's usual schedules, or the pinned schedule.

    DualPipeV is a usual schedule if its pairs of passes hide their exchanges, all devices are equal, and no stages are
    pinned.
    """
    pinned = constraints.value_of("schedule")
    free = not (constraints.per_chunk("layers_per_stage") or constraints.per_chunk("recompute"))
    pairs = ("dualpipev",) if job.engine.overlap.paired_passes and free and len(job.pools) == 1 else ()
    usual = (*_USUAL_SCHEDULES, *pairs)
    return tuple(s for s in job.engine.pipeline.schedules if (s == pinned if pinned else s in usual))


def offloads_of(job: Job, constraints: Constraints) -> tuple[Offload, ...]:
    """Offloads to consider, `none` first; other offloads only if the user allows or pins offload."""
    pinned = constraints.value_of("offload")
    if pinned:
        return (cast("Offload", pinned),)
    allowed = job.allow_offload or any(pin.key == "offload" for pin in constraints.pins)
    return job.engine.offload.what if allowed and job.has_hosts else ("none",)


def fill_timing(
    job: Job, constraints: Constraints, partitions: DegreeArrays, schedule: Schedule, refused: Refusals
) -> DegreeArrays:
    """The partitions with every legal microbatch size and interleave of one schedule."""
    dp = partitions.dp
    partitions = replace(partitions, schedule=schedule)
    pipelines_only = schedule == "interleaved" or schedule in EXECUTED
    enumeration = _Enumeration(
        job, constraints, refused, partitions.take(partitions.pp > 1) if pipelines_only else partitions
    )
    enumeration.cross("mbs", divisors(job.training.global_batch_size // int(dp.min(initial=1))))
    enumeration.obey("mbs", among=(*_PARTITION, "mbs"))
    every = constraints.mentions("interleave")
    options = {pp: _interleaves(job, pp, every=every) for pp in sorted(set(enumeration.degrees.pp.tolist()))}
    several = sorted(set(chain.from_iterable(options.values())))
    enumeration.cross("interleave", several if schedule == "interleaved" else [chunks_per_stage(schedule)])
    if schedule == "interleaved":
        x = enumeration.degrees
        keep = [np.isin(x.interleave, values) & (x.pp == pp) for pp, values in options.items()]
        enumeration.degrees = x.take(np.logical_or.reduce(keep)) if keep else x
    enumeration.obey("interleave", "schedule", among=(*_PARTITION, *_TIMING))
    return enumeration.degrees


def _interleaves(job: Job, pp: int, *, every: bool) -> list[int]:
    """Numbers of chunks per stage to try: `every` number, or only the smallest number for each chunk size.

    More chunks of the same size make no pass shorter.
    """
    num_layers = job.model.num_layers
    largest = {v: -(-num_layers // (pp * v)) for v in range(2, (num_layers + searched_ends(job)) // pp + 1)}
    return [v for v in largest if every or largest.get(v - 1) != largest[v]]


def expert_options(job: Job) -> list[tuple[int, int]]:
    """Pairs (ep, etp) of degrees of expert parallelism and expert tensor parallelism that the engine offers."""
    if job.model.moe is None or "ep" not in searched_axes(job.engine):
        return [(1, 1)]
    n = job.cluster.num_devices
    widths = divisors(job.model.moe.ffn_hidden_size) if "etp" in searched_axes(job.engine) else [1]
    inner = [e for e in widths if e <= min(n, job.cluster.scale_up_devices)]
    return [(e, i) for e in divisors(job.model.moe.num_experts) for i in inner if e * i <= n]


def fill_experts(job: Job, constraints: Constraints, timed: DegreeArrays, refused: Refusals) -> DegreeArrays:
    """The configurations with every legal pair of degrees for experts."""
    enumeration = _Enumeration(job, constraints, refused, timed)
    options = expert_options(job)
    enumeration.cross("etp", sorted({inner for _, inner in options}))
    enumeration.cross("ep", sorted({outer for outer, _ in options}))
    enumeration.obey("ep", "etp", among=(*_PARTITION, *_TIMING, *_EXPERTS))
    return enumeration.degrees


def fill_zero(
    job: Job, constraints: Constraints, degrees: DegreeArrays, offload: Offload, refused: Refusals
) -> DegreeArrays:
    """The configurations with every ZeRO stage that is legal with `offload`."""
    enumeration = _Enumeration(job, constraints, refused, replace(degrees, offload=offload))
    enumeration.cross("zero", sorted({*job.engine.can.zero_stages, *job.engine.pipeline.zero_stages}))
    enumeration.obey("zero", "offload", among=(*_PARTITION, *_TIMING, *_EXPERTS, "zero", "offload"))
    return enumeration.degrees


def fill_replicas(
    job: Job, constraints: Constraints, degrees: DegreeArrays, refused: Refusals, *, every: bool = True
) -> DegreeArrays:
    """The configurations with every number of replicas of the sharded group (HSDP) that the constraints allow.

    A shard group of one rank is the same as ZeRO-0, and is left out unless it is pinned. Multi-token prediction may
    stand before the loss.
    """
    enumeration = _Enumeration(job, constraints, refused, degrees)
    pinned = constraints.value_of("hsdp")
    every = every and job.engine.can.replicates_shards
    enumeration.cross("hsdp", [int(pinned)] if pinned else _replica_counts(degrees) if every else [1])
    enumeration.obey("hsdp", among=(*_PARTITION, *_TIMING, *_EXPERTS, "zero", "offload", "hsdp"))
    x = enumeration.degrees
    if not pinned:
        x = x.take((x.hsdp == 1) | (x.hsdp < x.dp * x.cp))
    x = x.take(constraints.allowed(x))
    return _with_mtp(job, constraints, x) if len(x) else x


def _with_mtp(job: Job, constraints: Constraints, x: DegreeArrays) -> DegreeArrays:
    """The configurations with multi-token prediction beside the loss, and where possible one chunk before it."""
    if job.model.mtp_layers and searched_ends(job) and x.schedule not in EXECUTED:
        apart = x.take(x.pp > 1)
        x = DegreeArrays.joined([x, apart.having("mtp_before", np.ones_like(apart.pp))])
    return x.take(constraints.allows_ends(x.pp * x.interleave, x.mtp_before))


def _replica_counts(degrees: DegreeArrays) -> list[int]:
    """Possible numbers of replicas of the sharded group: the divisors of any configuration's dp."""
    return sorted({replicas for dp in set(degrees.dp.tolist()) for replicas in divisors(dp)})


_MOST_NAMED: Final = 6  # values of a degree that a message lists
_SMALLEST: Final = Layout(recompute=("none",), layers_per_stage=(1,))


def legal_blocks(
    job: Job, constraints: Constraints, refused: Refusals, *, with_replicas: bool, smallest: bool = False
) -> Iterator[DegreeArrays]:
    """Every configuration that the rules and the constraints allow, without policies; counts what the rules refuse.

    with_replicas: include every number of replicas of the sharded group; otherwise only one replica.
    smallest: leave out configurations of which one with smaller microbatches needs no more memory (`can_be_smaller`).
    """
    smallest = smallest and not (constraints.mentions("mbs") or constraints.mentions("recompute"))
    partitions = device_partitions(job, constraints, refused)
    for first in range(0, len(partitions), _BLOCK):
        block = partitions.take(slice(first, first + _BLOCK))
        for schedule in schedules_of(job, constraints):
            timed = fill_timing(job, constraints, block, schedule, refused)
            if smallest:
                timed = timed.take((timed.mbs == 1) | ~can_be_smaller(job, timed))
            spread = fill_experts(job, constraints, timed, refused)
            for offload in offloads_of(job, constraints):
                degrees = fill_zero(job, constraints, spread, offload, refused)
                degrees = fill_replicas(job, constraints, degrees, refused, every=with_replicas)
                if len(degrees):
                    yield degrees


_BLOCK: Final = 256  # partitions at a time


def can_be_smaller(job: Job, degrees: DegreeArrays) -> NDArray[np.bool_]:
    """Whether microbatches of one sequence need no more memory, but for rounding, [n]; they break no other rule.

    Larger microbatches need more memory, and as long as the step has several microbatches, the number in flight is the
    same. In two cases the answer is no: a single microbatch accumulates no gradients, and GPipe holds fewer
    microbatches if they are larger.

    Source: derived here; tested against `least_stage_bytes` of each.
    """
    several = degrees.dp * degrees.mbs < job.training.global_batch_size
    return np.asarray(several & (degrees.schedule in ("1f1b", "interleaved")))


def no_candidate(job: Job, refused: Refusals, constraints: Constraints) -> InputError:
    """The error for the user when the rules and the pins allow no layout."""
    worst = max(RULES, key=lambda rule: refused.get(rule.name, 0))
    # a rule that reads no degree has the same result for every layout
    why = worst.needs if worst.reads else worst.fault(job, _SMALLEST)
    if constraints.forbidden and _leaves_some(job, replace(constraints, forbidden=()), {}):
        return _all_forbidden(job, constraints)
    pins = ", ".join(map(str, constraints.pins))
    without_pins: Refusals = {}
    if pins and not _leaves_some(job, replace(constraints, pins=()), without_pins):
        return no_candidate(job, without_pins, replace(constraints, pins=()))
    if not pins:
        remedy = "change the batch size or the number of devices" if worst.reads else ""
        return InputError(f"no legal layout exists: {why}", hint=remedy)
    alone = _pinned_alone(job, constraints)
    of_each = [broken_rules(job, each, except_for=("pools",), searched=True) for each in alone]
    faults = dict.fromkeys(chain(*of_each)) if all(of_each) else (_legal_values(job, constraints),)
    hint = f"{_pin_to_drop(job, constraints)}; `planner explain MODEL CLUSTER --layout ...` checks one layout"
    why = "; ".join(faults)  # one pin may break several rules
    return InputError(Mistake(message=f"no layout meets the pins {pins}: {why}", where="--pin", rule=why, hint=hint))


def _pinned_alone(job: Job, constraints: Constraints) -> Iterator[Layout]:
    """The simplest layout with the pinned degrees; if experts overlap in a pipeline, also the one with two chunks."""
    pinned = {pin.key: int(pin.value) for pin in constraints.pins if pin.is_numeric and pin.sign == "="}
    overlaps = job.training.expert_overlap and pinned.get("pp", 1) > 1
    if overlaps and not {"ep", "dp"} & pinned.keys():
        pinned["ep"] = pinned["dp"] = next((ep for ep, _ in expert_options(job) if ep > 1), 1)
    for interleave in (1, 2) if overlaps and "interleave" not in pinned else (pinned.get("interleave", 1),):
        schedule: Schedule = "interleaved" if interleave > 1 else "1f1b"
        sp = job.engine.can.sp[0] if pinned.get("tp", 1) > 1 else 0
        values: dict[str, Any] = {"pp": 1 if interleave == 1 else 2, "sp": sp} | pinned
        zeros = (job.engine.can if values["pp"] == 1 else job.engine.pipeline).zero_stages
        values = {"zero": min(zeros, default=0)} | values | {"interleave": interleave, "schedule": schedule}
        values["offload"] = constraints.value_of("offload") or "none"
        chunks = values["pp"] * interleave
        yield Layout(**values, layers_per_stage=(1,) * chunks, recompute=("none",) * chunks)


def _all_forbidden(job: Job, constraints: Constraints) -> InputError:
    """The error for the user when legal layouts exist, and all of them are forbidden."""
    every = constraints.forbidden
    alone = [each for each in every if _leaves_some(job, constraints.but_for(each), {})] or every
    named = " and ".join(",".join(map(str, each)) for each in alone)
    return InputError(f"every legal layout is forbidden, by {named}", where="--forbid", hint="forbid less")


def _legal_values(job: Job, constraints: Constraints) -> str:
    """The values that pinned degrees can have in legal layouts, to explain why no legal layout meets the pins."""
    values: dict[str, set[int]] = {pin.key: set() for pin in constraints.pins if pin.is_numeric}
    for degrees in legal_blocks(job, replace(constraints, pins=()), {}, with_replicas=False):
        for key in values:
            values[key] |= set(_replica_counts(degrees) if key == "hsdp" else getattr(degrees, key).tolist())
    named = [
        f"{key} {any_of(sorted(each)) if len(each) <= _MOST_NAMED else f'{min(each)} to {max(each)}'}"
        for key, each in values.items()
        if not any(_meets(constraints, key, value) for value in each)
    ]
    return f"legal layouts have {', and '.join(named)}" if named else "no legal layout has all of them"


def _meets(constraints: Constraints, key: str, value: int) -> bool:
    alone: dict[str, Any] = {key: value}
    return all(pin.holds(replace(_SMALLEST, **alone)) for pin in constraints.pins if pin.key == key)


def _leaves_some(job: Job, constraints: Constraints, refused: Refusals) -> bool:
    return any(True for _ in legal_blocks(job, constraints, refused, with_replicas=False))


def _pin_to_drop(job: Job, constraints: Constraints) -> str:
    """The pins without which legal layouts exist."""
    if len(constraints.pins) == 1:
        return f"drop {constraints.pins[0]}"
    alone = [str(pin) for pin in constraints.pins if _leaves_some(job, constraints.without(pin), {})]
    return f"drop {' or '.join(alone)}" if alone else "dropping one of them is not enough; drop two or more"
