"""Least prices of the stages of configurations, from stages with the most layers: what lower bounds are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.compute import PassSeconds
from planner.cost.prices import stage_prices, step_floor_seconds
from planner.cost.shapes import distinct_rows
from planner.cost.traffic import data_parallel_seconds
from planner.search.bounds.of_layers import (
    INSIDE,
    kinds_main_first,
    layer_shapes,
    most_layers,
    mtp_of_last,
    num_main_layers,
    stage_of_kind,
)
from planner.search.space.policies import choices_of
from planner.specs.recompute import NONE, is_of_some_layers, whole_policy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.cost.prices import StagePrices
    from planner.numbers import Number, Rows
    from planner.search.bounds.of_layers import LayerShapes
    from planner.search.space.configurations import DegreeArrays, PolicyMasks
    from planner.search.space.policies import PolicyChoices
    from planner.specs.job import Job, PoolJob


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastCosts:
    """Least prices of the stages of configurations; the leading axes are kinds of layers and choices of a policy.

    layer: seconds of one more layer, [kinds, choices, n]; infinite if a policy is not allowed.
    num_main: number of main kinds, which come first and all have the same number of parameters.
    send: seconds of each stage's send, [n].
    ends: seconds of the model outside its layers, [n].
    last: the part of `ends` that is on the last stage wherever multi-token prediction may stand, [n].
    tail: seconds of the longest tail, [n], of `least_transfer` as well unless the prices hold for any replicas.
    most: the most layers of a stage, [n].
    window: the most seconds of communication that a stage can hide, behind one layer of the main kinds and behind all
    other layers together, two arrays [choices, n].
    update: seconds of the optimizer on a stage that holds the most layers, [n].
    """

    layer: Number
    num_main: int
    send: Number
    ends: Number
    last: Number
    tail: Number
    most: Number
    window: Number
    update: Number

    @property
    def main(self) -> Number:
        """Seconds of one more layer of the fastest of the main kinds, [policies, n]."""
        return self.layer[: self.num_main].min(axis=0)

    def take(self, index: Rows) -> LeastCosts:
        """The prices of these configurations."""
        arrays = ("layer", "send", "ends", "last", "tail", "most", "window", "update")
        return replace(self, **{name: getattr(self, name)[..., index] for name in arrays})


def least_costs(
    job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks, cutoff_seconds: Number, any_replicas: bool
) -> LeastCosts:
    """Least prices of a layer, from stages with the most layers, where the most layers share launches and latencies.

    The exposed part of a data-parallel collective grows less than proportionally with the layers, so its price per
    layer in the largest stage is a lower bound, too. The same is true of the price of a layer if k layers of each chunk
    recompute. If a stage can hold two kinds of layers, computing one kind can hide the traffic of the other. The prices
    of layers then exclude the exposed part, and `least_transfer` is a lower bound of it, which is added once per step.
    Layers for multi-token prediction belong to the last stage, which hides traffic behind them and moves their weights.
    """
    main, n, shapes = kinds_main_first(job)[0], len(degrees), layer_shapes(job, degrees)
    most = np.maximum(most_layers(job, degrees, cutoff_seconds, shapes), 1) + job.model.mtp_layers
    counts_alike = _counts_alike(job)
    choices = choices_of(degrees, policies)
    stage = stage_of_kind(main, index=INSIDE, num_layers=most, policy=choices.policy)
    parts = shapes.of_each()
    prices = stage_prices(job, degrees, stage, parts)
    send = prices.pp_comm - prices.pp_hidden
    each = prices.microbatch_seconds - send
    hiding = prices  # if only some layers recompute, a smaller stage may recompute all its layers, and so hide more
    if any(map(is_of_some_layers, policies)):
        codes, which = np.unique(choices.policy, return_inverse=True)
        whole = np.array([whole_policy(code) for code in codes.tolist()])[which.reshape(choices.policy.shape)]
        stage = stage_of_kind(main, index=INSIDE, num_layers=most, policy=whole)
        hiding = stage_prices(job, degrees, stage, parts)
    once = hiding.tail_seconds
    others, ends, last = _small_prices(job, shapes, policies, choices)
    if any_replicas or len(others) or not counts_alike:
        each = each - prices.dp.exposed.total
    if len(others) or not counts_alike:
        each = each - prices.host.exposed.total
    if any_replicas:
        once = once - hiding.dp.exposed_once
    if _takes_turns(job) or not counts_alike:
        once = prices.optimizer
    shape = (len(choices.policy), n)
    tail = _least_tail(job, degrees, np.broadcast_to(once, shape), most)
    counts = np.array([kind.number for kind in kinds_main_first(job)[1:]])[:, np.newaxis, np.newaxis]
    layer = np.concatenate([np.broadcast_to(each, shape)[np.newaxis] / most, others])
    least = LeastCosts(
        layer=np.where(choices.allowed, layer, np.inf),
        num_main=sum(kind.has_experts == main.has_experts for kind in kinds_main_first(job)),
        send=np.broadcast_to(send, (n,)),
        ends=ends,
        last=last if any_replicas else np.where(degrees.mtp_before > 0, last, ends),
        tail=tail,
        most=most,
        window=np.stack(np.broadcast_arrays(_in_proportion(hiding) / most, (counts * others).sum(axis=0))),
        update=np.broadcast_to(prices.optimizer, shape).min(axis=0),
    )
    return least if any_replicas else replace(least, tail=np.maximum(tail, least_transfer(job, degrees, least)))


def _small_prices(
    job: PoolJob, shapes: LayerShapes, policies: PolicyMasks, choices: PolicyChoices
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of a layer of each kind but the first, [kinds - 1, choices, n], and `ends` and `last` of `LeastCosts`.

    The prices include only work that is proportional to the layers, which depends on few degrees. If a policy
    recomputes only some layers, the layers of a further kind may be among the layers that do not recompute.
    """
    distinct = shapes.degrees.having("pp", np.full(len(shapes.degrees), 2))
    main, *others = kinds_main_first(job)
    of_others = [NONE if is_of_some_layers(code) else code for code in policies]
    mtp, apart = job.model.mtp_layers, mtp_of_last(job) is not None
    rows = [
        *((index, 0, number, main.has_experts, main.is_local) for index, number in ((INSIDE, 0), (1, mtp), (1, 0))),
        *((INSIDE, policy, 0, kind.has_experts, kind.is_local) for kind in others for policy in of_others),
    ]
    index, policy, further, *kind = (np.array(column)[:, np.newaxis] for column in zip(*rows, strict=True))
    stage = stage_of_kind(kind, index=index, num_layers=1, policy=policy, num_mtp=further if mtp else None)
    prices = stage_prices(job, distinct, stage, shapes.parts)
    seconds = np.broadcast_to(_in_proportion(prices) - prices.ep_hidden, (len(rows), len(distinct)))
    inside, whole, without = seconds[:3, shapes.position]
    of_kinds = seconds[3:].reshape(len(others), len(policies), len(distinct))
    last = (without if apart else whole) - inside
    return of_kinds[:, choices.which, shapes.position], whole - inside, last


def _least_tail(
    job: PoolJob, degrees: DegreeArrays, tail_seconds: NDArray[np.float64], most: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Least seconds of the longest tail, derived from the tail of a stage with the most layers, all of the first kind.

    The first kind is the slowest of the main kinds, and its computation hides most. At least one stage has only layers
    of the main kinds, and has at least q layers. The model's leading layers, if it has any, fill the first stages, and
    at most one stage holds both leading layers and layers of the main kinds. If dense layers and layers with experts
    alternate, layers of the other kind lie between the q layers. `tail_seconds` is then only the optimizer's time,
    which the other layers can only increase.

    Gain (`tail`, least of 15): 0.68 -> 0.62 s for Llama-3-405B on 16,384 devices; none for GPT-3 on 1,024.
    """
    others: Number = degrees.pp
    rest: Number = num_main_layers(job)
    if rest < job.model.num_layers and not _takes_turns(job):
        rest, others = rest - most, np.maximum(others - 1, 1)
    layers = np.maximum(np.ceil(rest / others), 0)
    floor = step_floor_seconds(job)
    return np.asarray(floor + layers / most * (tail_seconds.min(axis=0) - floor))


_TRAFFIC_KEYS: Final = ("tp", "sp", "cp", "pp", "dp", "segment", "etp", "ep", "zero", "hsdp")
"""The keys that traffic between data-parallel ranks reads in a pipeline."""


def least_transfer(job: PoolJob, degrees: DegreeArrays, least: LeastCosts) -> NDArray[np.float64]:
    """Least seconds of the longest tail, from the traffic of the stage with the most layers of the main kinds.

    This stage has k layers of the main kinds, from q = ceil(L / S) to the most. Other layers only add to its traffic
    and its update. The traffic that its layers cannot hide is exposed; this is at least the traffic of one layer. The
    time to move k layers is concave in k (latencies, and the quickest algorithm for the bytes), and the time that k
    layers hide is proportional to k. So the difference is smallest at one of the two ends of the range of k.

    least: prices of the same configurations, possibly those that hold for any replicas. The bound is 0 where layers for
    multi-token prediction are of another kind than the main kinds.

    Gain (`transfer`), 100,000 devices: 10.42 -> 5.10 s for DeepSeek-V3 (both ends of k: 3.67), 1.03 -> 0.96 for GPT-3.

    Source: derived here; tested against all ways to partition small models.
    """
    if not _counts_alike(job):
        return np.zeros(len(degrees))
    layers, (each, others) = np.ceil(num_main_layers(job) / degrees.pp), least.window
    moved, exposed = [], []
    for count in (layers, np.maximum(layers, least.most)):
        keys = [getattr(degrees, key) for key in _TRAFFIC_KEYS]
        first, position = distinct_rows([*keys, count.astype(np.int64)])
        stage = stage_of_kind(kinds_main_first(job)[0], index=INSIDE, num_layers=count[first], policy=0)
        seconds = data_parallel_seconds(job, degrees.take(first), stage, PassSeconds()).busy_once
        moved.append(np.broadcast_to(seconds, first.shape)[position])
        hidden = (each * count + others).max(axis=0) if job.engine.overlap.data_parallel else 0.0
        exposed.append(moved[-1] - hidden)
    floor = step_floor_seconds(job)
    updated = floor + np.minimum(layers / least.most, 1.0) * (least.update - floor)
    return np.asarray(updated + np.maximum(moved[0] / np.maximum(layers, least.most), np.minimum(*exposed)))


def _counts_alike(job: Job) -> bool:
    """Whether layers for multi-token prediction, if there are any, count as layers of the first main kind."""
    return not job.model.mtp_layers or kinds_main_first(job)[0][:2] == (job.model.moe is not None, False)


def _takes_turns(job: Job) -> bool:
    """Whether dense layers and layers with experts alternate after the leading layers."""
    return job.model.moe is not None and job.model.moe.layer_frequency > 1


def _in_proportion(prices: StagePrices) -> Number:
    """Seconds that grow in proportion to the layers, with exchanges that passes hide, plus those of the two ends."""
    work = prices.compute + prices.recompute + prices.head + prices.ungraded
    exposed = (prices.tp_comm - prices.tp_hidden) + (prices.cp_comm - prices.cp_hidden)
    return work + exposed + prices.ep_comm
