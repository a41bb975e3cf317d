"""Outer configurations as arrays of degrees; `space` fills them in."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from planner.cost.microbatch import num_microbatches
from planner.cost.schedule import is_one_round
from planner.cost.shapes import distinct_rows
from planner.layout import divisors
from planner.specs.banned import searched_axes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from planner.numbers import Mask, Number, Rows
    from planner.specs.job import Job
    from planner.specs.recipe import Offload, Schedule


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
        if isinstance(index, slice):
            return self._map(lambda values: values[index])
        rows = np.asarray(index)
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows  # once for all degrees
        return self._map(lambda values: values.take(rows))

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
        ones = with_ones(len(first), schedule=self.schedule, **chosen)
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


def with_ones(length: int, *, schedule: Schedule, **given: Number) -> DegreeArrays:
    """Configurations with the given values, and a policy for each stage.

    Missing degrees are 1, and the keys of `_ZERO` are 0.
    """
    values = dict.fromkeys(_ARRAYS, 1) | dict.fromkeys(_ZERO, 0) | {"recompute": OWN}
    defaults: dict[str, Number] = {name: np.full(length, value, dtype=np.int64) for name, value in values.items()}
    return DegreeArrays(**(defaults | given), schedule=schedule)


def expert_options(job: Job) -> list[tuple[int, int]]:
    """Pairs (ep, etp) of degrees of expert parallelism and expert tensor parallelism that the engine offers."""
    if job.model.moe is None or "ep" not in searched_axes(job.engine):
        return [(1, 1)]
    n = job.cluster.num_devices
    widths = divisors(job.model.moe.ffn_hidden_size) if "etp" in searched_axes(job.engine) else [1]
    inner = [e for e in widths if e <= min(n, job.cluster.scale_up_devices)]
    return [(e, i) for e in divisors(job.model.moe.num_experts) for i in inner if e * i <= n]


def can_be_smaller(job: Job, degrees: DegreeArrays) -> Mask:
    """Whether microbatches of one sequence need no more memory, but for rounding, [n]; they break no other rule.

    Larger microbatches need more memory, and as long as the step has several microbatches, the number in flight is the
    same. In three cases the answer is no: a single microbatch accumulates no gradients, GPipe holds fewer microbatches
    if they are larger, and one round of interleaved microbatches may hold fewer gradients than several rounds
    (`reduced_early`).

    Source: derived here; tested against `least_stage_bytes` of each.
    """
    several = degrees.dp * degrees.mbs < job.training.global_batch_size
    if degrees.schedule == "interleaved" and job.engine.memory.whole_gradients == "piped":
        several &= ~is_one_round(degrees.pp, num_microbatches(job, degrees))
    return np.asarray(several & (degrees.schedule in ("1f1b", "interleaved")))
