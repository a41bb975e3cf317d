"""Price every way to fill the stages of configurations, and build the layout of a choice."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.cost.microbatch import num_microbatches
from planner.cost.prices import interleaving_terms, stage_fits, stage_prices
from planner.cost.schedule import EXECUTED, steady_count
from planner.cost.stage import Pattern, Stage, pattern_of, stage_of, with_borders
from planner.layout import Layout, balanced_chunks, of_chunks
from planner.search.bounds.even_splits import can_interleave
from planner.search.bounds.of_layers import layer_loads, layer_shapes, most_layers
from planner.search.optimum.candidate import Candidate
from planner.search.space.arrays import unrolled
from planner.search.space.degree_rules import searched_ends
from planner.search.space.placements import placements_of
from planner.search.space.policies import choices_of
from planner.specs.recompute import policy_code, policy_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from planner.numbers import Flag, FloatArray, Number, Rows
    from planner.search.space.configurations import DegreeArrays, PolicyMasks
    from planner.search.space.space import Space
    from planner.specs.job import Job, PoolJob

_COLUMNS_AT_ONCE = 200_000


def price_candidates(
    space: Space, degrees: DegreeArrays, policies: PolicyMasks, *, cutoff_seconds: Number = np.inf
) -> list[Candidate]:
    """Prices of every way to fill each stage of these configurations that fits into memory.

    cutoff_seconds: one number, or one for each configuration. Columns that alone make the step longer than this are
    left out.
    """
    job = space.job
    fewest, most = _layer_range(job, degrees, cutoff_seconds)
    ways = len(choices_of(degrees, policies).policy)
    num_columns = degrees.pp * np.maximum(most - fewest + 1, 0) * ways * _states(job, degrees).num_states
    candidates: list[Candidate] = []
    for part in _parts(num_columns):
        chosen = {policy: mask[part] for policy, mask in policies.items()}
        x = degrees.take(part)
        columns = _stages(space, x, fewest[part], most[part], chosen)
        candidates += _candidates(job, x, columns)
    return candidates


def _states(job: Job, degrees: DegreeArrays) -> Pattern:
    """The pattern whose states are those in which stages of these configurations may begin.

    For interleaved stages the pattern has one state, because their number of layers determines which layers they hold.

    Source: `planner.cost.stage.stage_of`.
    """
    return Pattern() if degrees.schedule == "interleaved" else pattern_of(job)


def _parts(num_columns: NDArray[np.int64]) -> Iterator[slice]:
    """Slices of consecutive configurations.

    Each slice has a limited number of columns, which limits the memory of pricing.
    """
    first, total = 0, 0
    for index, count in enumerate(num_columns.tolist()):
        if total and total + count > _COLUMNS_AT_ONCE:
            yield slice(first, index)
            first, total = index, 0
        total += count
    if len(num_columns):
        yield slice(first, len(num_columns))


def _layer_range(
    job: Job, degrees: DegreeArrays, cutoff_seconds: Number
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Fewest and most layers of a stage, if no stage exceeds the cutoff and all stages together hold all layers."""
    layers, v = job.model.num_layers, degrees.interleave
    if not job.engine.pipeline.uneven_stages:
        return layers // degrees.pp, layers // degrees.pp
    stages = placements_of(job, degrees).stages
    most_of = np.stack([most_layers(pool, degrees, cutoff_seconds) for pool in job.pools], axis=1)
    most, least = np.where(stages > 0, most_of, 0).max(axis=1), np.where(stages > 0, most_of, layers).min(axis=1)
    fewest = v - (searched_ends(job) > 0)
    return np.maximum(fewest, layers - ((stages * most_of).sum(axis=1) - least)), most


class _Columns(NamedTuple):
    """Columns: the configuration of each column, its stage with layers and policy, and the stage's pool.

    start: state of the layers' pattern in which the stage begins.
    last: layers of the stage's last chunk.
    """

    owner: NDArray[np.int64]
    stage: Stage
    start: NDArray[np.int64]
    last: NDArray[np.int64]
    pool: NDArray[np.int64]

    def take(self, rows: Rows) -> _Columns:
        """The columns at `rows`; a field of `Stage` that is one value for all columns stays one value."""
        values = {f.name: getattr(self.stage, f.name) for f in fields(Stage)}
        chosen = {name: value[rows] if np.ndim(value) else value for name, value in values.items()}
        return _Columns(self.owner[rows], Stage(**chosen), self.start[rows], self.last[rows], self.pool[rows])


def _stages(
    space: Space, degrees: DegreeArrays, fewest: NDArray[np.int64], most: NDArray[np.int64], policies: PolicyMasks
) -> _Columns:
    """Columns for every combination of stage, start, number of layers and policy that fits into memory."""
    job = space.job
    choices, states = choices_of(degrees, policies), _states(job, degrees)
    num_policies = len(choices.policy)
    ways = num_policies * states.num_states
    per_stage = np.maximum(most - fewest + 1, 0) * ways
    num_columns = degrees.pp * per_stage
    owner, position, _ = unrolled(num_columns)
    index, within = np.divmod(position, np.maximum(per_stage, 1)[owner])
    count, way = np.divmod(within, ways)
    start, which = np.divmod(way, num_policies)
    layers = fewest[owner] + count
    keep, policy = choices.allowed[which, owner], choices.policy[which, owner]
    if degrees.schedule == "interleaved":
        keep = keep & can_interleave(job, degrees.take(owner), index, layers)
    else:
        keep = keep & _can_begin(states, job, degrees.pp[owner], (fewest[owner], most[owner]), index, layers, start)
    rows = np.flatnonzero(keep)
    row, last = _last_chunks(job, degrees.take(owner[rows]), index[rows], layers[rows])
    rows = rows[row]
    kept = _meets_lists(space, degrees.take(owner[rows]), index[rows], layers[rows], last, policy[rows])
    rows, last = rows[kept], last[kept]
    owner, start = owner[rows], start[rows]
    shape = {"index": index[rows], "num_layers": layers[rows], "policy": policy[rows], "first": start}
    stage = stage_of(job, **shape, layout=degrees.take(owner), last_chunk=last)
    columns = _in_pools(job, degrees, _Columns(owner, stage, start, last, np.zeros_like(owner)))
    fits = _priced(job, degrees, columns, lambda pool, x, own: (stage_fits(pool, x.take(own.owner), own.stage),))[0]
    return columns.take(fits.astype(bool))


def _last_chunks(
    job: Job, x: DegreeArrays, index: NDArray[np.int64], layers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each stage with some layers, every number of layers that its last chunk may have: (position, last chunk).

    All chunks are balanced. Only the last chunk may have fewer layers, down to none, where it holds the loss or layers
    for multi-token prediction; and a first stage with a layer less than chunks begins with the embedding alone, unless
    the model has leading layers, which the first chunk holds. Stages with too few layers are left out.
    """
    v, final, apart = x.interleave, index == x.pp - 1, x.mtp_before > 0
    even = layers // v
    if not searched_ends(job):
        rows = np.flatnonzero(layers >= v)
        return rows, even[rows]
    holds_end = (final | (apart & (index == x.pp - 2))) & (x.pp > 1)
    alone = (index == 0) & (layers < v) & (pattern_of(job).leading == 0)  # the embedding
    possible = np.where(holds_end | alone & (x.pp > 1), layers >= v - 1, layers >= v)
    row, fewer, _ = unrolled(np.where(possible, np.where(holds_end & (v > 1) & ~alone, even + 1, 1), 0))
    last = np.where(alone & (v > 1), 1, even)[row] - fewer
    kept = ~(final & apart)[row] | (last == 0)  # no layer follows multi-token prediction
    return row[kept], last[kept]


def _can_begin(
    states: Pattern,
    job: Job,
    pp: Number,
    layer_range: tuple[Number, Number],
    index: NDArray[np.int64],
    layers: NDArray[np.int64],
    start: NDArray[np.int64],
) -> Flag:
    """Whether stages can begin in their states, if all other stages hold layers within `layer_range`; broadcasts."""
    if states.num_states == 1:
        return np.True_
    fewest, most = layer_range
    after, others = pp - 1 - index, job.model.num_layers - layers
    earliest = np.maximum(index * fewest, others - after * most)
    return states.has_position(start, earliest, np.minimum(index * most, others - after * fewest))


def with_steps_up_to(
    job: Job, degrees: DegreeArrays, candidates: Sequence[Candidate], cutoff_seconds: FloatArray
) -> list[Candidate]:
    """The candidates, reduced to the columns that `price_candidates` would return for these shorter steps, [n]."""
    if not candidates or degrees.schedule in EXECUTED:
        return list(candidates)
    fewest, most = (each.tolist() for each in _layer_range(job, degrees, cutoff_seconds))
    kept = []
    for candidate, pp, least, longest in zip(candidates, degrees.pp.tolist(), fewest, most, strict=True):
        layers, index = candidate.layers, candidate.stage
        mask = (layers >= least) & (layers <= longest)
        mask &= _can_begin(candidate.pattern, job, pp, (least, longest), index, layers, candidate.start)
        kept.append(candidate if mask.all() else candidate.keep(mask))
    return kept


def _in_pools(job: Job, degrees: DegreeArrays, columns: _Columns) -> _Columns:
    """The columns with the pool of each stage, on a cluster with several pools."""
    if len(job.pools) == 1:
        return columns
    owner, place = columns.owner, placements_of(job, degrees)
    stage = with_borders(columns.stage, degrees.take(owner), lambda stages: place.pool_of(owner, stages))
    return columns._replace(stage=stage, pool=place.pool_of(owner, stage.index))


def _priced(
    job: Job,
    degrees: DegreeArrays,
    columns: _Columns,
    prices: Callable[[PoolJob, DegreeArrays, _Columns], tuple[Number, ...]],
) -> tuple[NDArray[np.float64], ...]:
    """The prices of each column, computed with the job on the pool of its stage."""
    if len(job.pools) == 1:
        found = prices(job.pools[0], degrees, columns)
        return tuple(np.broadcast_to(each, columns.owner.shape) for each in found)
    if not len(columns.owner):
        return (np.zeros(0),) * 4
    rows = [np.flatnonzero(columns.pool == number) for number in range(len(job.pools))]
    of_pools = [
        _priced(pool, degrees, columns.take(own), prices) for pool, own in zip(job.pools, rows, strict=True) if len(own)
    ]
    back = np.argsort(np.concatenate(rows))
    return tuple(np.concatenate(parts)[back] for parts in zip(*of_pools, strict=True))


def _stage_seconds(job: PoolJob, degrees: DegreeArrays, columns: _Columns) -> tuple[Number, ...]:
    """Seconds of a stage: one microbatch, its share of filling and draining, the last chunk's slack, and the tail."""
    x, stage = degrees.take(columns.owner), columns.stage
    prices = stage_prices(job, x, stage, layer_shapes(job, degrees).of_each(columns.owner))
    fill, slack = interleaving_terms(job, x, stage, prices)
    return prices.microbatch_seconds, fill / x.interleave, slack, prices.tail_seconds


def _candidates(job: Job, degrees: DegreeArrays, columns: _Columns) -> Iterator[Candidate]:
    """Price the columns and yield a candidate for each configuration."""
    owner, stage = columns.owner, columns.stage
    seconds, passes, slack, tail = (
        np.asarray(each, dtype=float) for each in _priced(job, degrees, columns, _stage_seconds)
    )
    ends = np.searchsorted(owner, np.arange(len(degrees) + 1)).tolist()
    m, states, (load, total_load) = num_microbatches(job, degrees), _states(job, degrees), _loads(job, degrees, columns)
    steady = steady_count(m, degrees.interleave).tolist()
    named = (degrees.tp, degrees.pp, degrees.dp, degrees.zero, degrees.mbs, degrees.interleave)
    for i, (tp, pp, dp, zero, mbs, v) in enumerate(zip(*(values.tolist() for values in named), strict=True)):
        own = slice(ends[i], ends[i + 1])
        yield Candidate(
            name=f"tp={tp},pp={pp},dp={dp},zero={zero},mbs={mbs},v={v}",
            num_layers=job.model.num_layers,
            num_stages=pp,
            steady_count=steady[i],
            constant_seconds=0.0,
            pattern=states,
            total_load=int(total_load[i]),
            stage=stage.index[own],
            start=columns.start[own],
            layers=stage.num_layers[own],
            last=columns.last[own],
            load=load[own],
            policy=stage.policy[own],
            seconds=seconds[own],
            pass_seconds=passes[own],
            slack_seconds=slack[own],
            tail_seconds=tail[own],
        )


def _loads(job: Job, degrees: DegreeArrays, columns: _Columns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Layers weighted by kind: the load of each column, and the total load of each configuration.

    Bounds are valid with any weights. They are tight if each kind weighs as many seconds as on the first pool.
    """
    loads = layer_loads(job.pools[0], degrees)
    total = sum(kind.number * load for kind, load in loads.items())
    own = sum(columns.stage.number_of(*kind[:2]) * load[columns.owner] for kind, load in loads.items())
    return np.asarray(own, dtype=np.int64), np.asarray(total, dtype=np.int64)


def _meets_lists(
    space: Space, degrees: DegreeArrays, index: Number, layers: Number, last: Number, policy: Number
) -> Flag:
    """Whether columns agree with the user's pinned lists, which have one entry for each chunk.

    If no assignment of these stages gives the pinned list (`layout_at`), no column agrees.
    """
    keep = np.ones(np.shape(index), dtype=bool)
    for key, values in (("layers_per_stage", layers), ("recompute", policy)):
        pinned = space.constraints.per_chunk(key)
        if pinned is None:
            continue
        entries = np.array([int(each) if key == "layers_per_stage" else policy_code(each) for each in pinned])
        for v in set(degrees.interleave.tolist()):
            if len(entries) % v:
                keep &= degrees.interleave != v
                continue
            here = (degrees.interleave == v) & (degrees.pp * v == len(entries))
            chunks = entries.reshape(v, -1)
            stage = np.minimum(index, chunks.shape[1] - 1)
            if key == "layers_per_stage":
                of_stage, ends = chunks.sum(axis=0), tuple(chunks[-1].tolist())
                alike = tuple(entries.tolist()) == balanced_chunks(tuple(of_stage.tolist()), v, last=ends)
                alike = alike & (last == chunks[-1][stage])
            else:
                of_stage = chunks[0]
                alike = tuple(entries.tolist()) == tuple(of_stage) * v
            keep &= (degrees.interleave != v) | (here & alike & (values == of_stage[stage]))
    return keep


def layout_at(
    degrees: DegreeArrays,
    layers: Sequence[int],
    policies: Sequence[int],
    pools: tuple[str, ...] = (),
    last: Sequence[int] | None = None,
) -> Layout:
    """The layout of one configuration with the given layers, recompute policy and pool of each stage.

    last: layers of each stage's last chunk; None if all chunks are balanced.
    """
    recompute = tuple(map(policy_name, policies))
    others = ("placement", "recompute", "mtp_before")
    numbers = {key: value for key, value in degrees.numbers().items() if key not in others}
    ends = None if last is None else tuple(map(int, last))
    return Layout(
        **numbers,
        pools=pools,
        schedule=degrees.schedule,
        offload=degrees.offload,
        layers_per_stage=balanced_chunks(tuple(map(int, layers)), degrees.interleave, degrees.schedule, ends),
        mtp=(degrees.pp * degrees.interleave - 1 - degrees.mtp_before,) if degrees.mtp_before else (),
        recompute=of_chunks(recompute, degrees.interleave, degrees.schedule),
    )
