"""The whole estimate of one layout, put together from the prices of its stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.chance import chance_of_fitting, memory_limit_bytes, most_peak_bytes, spread_of
from planner.cost.compute import PassSeconds
from planner.cost.flops import chunk_flops, model_flops_per_step
from planner.cost.groups import slowest_link
from planner.cost.ledger import (
    HostMemory,
    LineName,
    MemoryLine,
    StageMemory,
    TimeLine,
    Verdict,
    total_bytes,
    total_exposed_seconds,
    verdict_of,
)
from planner.cost.memory import host_lines, memory_lines
from planner.cost.microbatch import num_microbatches
from planner.cost.prices import (
    StagePrices,
    chunk_parts,
    exchange_parts,
    exchange_share,
    interleaving_terms,
    layout_prices,
)
from planner.cost.schedule import EXECUTED, bubble_of, exists, interleaved_bubble_seconds, steady_seconds
from planner.cost.simulate import Timeline, simulate
from planner.cost.stage import by_pool, pattern_of, pool_indices, stages_of
from planner.layout import balanced_chunks, last_chunks, offloads_optimizer
from planner.specs.yaml import shipped_yaml
from planner.sums import sum_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.cost.stage import Stage
    from planner.layout import Layout
    from planner.numbers import Number
    from planner.specs.job import Job, PoolJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The ledger of one layout, and the figures derived from its totals.

    pipeline_seconds: the part of the step in which microbatches pass through the pipeline, bubble included; the tail
        follows it.
    slowest_of_mean: seconds of the slowest stage, whose lines `time` holds, divided by the mean of all stages.
    mfu: model FLOPs per second over peak (flops.MODEL_FLOPS_CONVENTION).
    hfu: the same ratio, with the recomputed forward passes counted as useful.
    """

    memory: tuple[StageMemory, ...]
    time: tuple[TimeLine, ...]
    pipeline_seconds: float
    slowest_of_mean: float
    mfu: float
    hfu: float
    tokens_per_second_per_device: float

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step: the sum of the exposed lines."""
        return float(total_exposed_seconds(self.time))

    @property
    def tail_seconds(self) -> float:
        """Seconds of the step after the last microbatch: exposed reduction and the optimizer."""
        return self.step_seconds - self.pipeline_seconds

    @property
    def fits(self) -> bool:
        """Whether every stage stays within its memory limit."""
        return all(stage.fits for stage in self.memory)

    @property
    def verdict(self) -> Verdict:
        """Whether the layout fits, in words."""
        return verdict_of(self.memory)

    @property
    def peak_bytes(self) -> float:
        """Largest peak of any stage, in bytes."""
        return max(stage.total_bytes for stage in self.memory)


def memory_of_stages(job: Job, layout: Layout) -> tuple[StageMemory, ...]:
    """The memory ledger of every stage, for its device and its host; on a mixed cluster each stage uses its own pool.

    Source: memory.py.
    """
    stages, pools, of_stage = stages_of(job, layout), job.pools, pool_indices(job, layout)
    lines = by_pool(job, of_stage, lambda pool: memory_lines(pool, layout, stages))
    on_host = by_pool(job, of_stage, lambda pool: host_lines(pool, layout, stages))
    limits = [(_limits(pool, layout), _limits(pool, layout, of_host=True), spread_of(pool, layout)) for pool in pools]
    found = []
    for r, (own, of_host) in enumerate(zip(_of_stages(lines, layout.pp), _of_stages(on_host, layout.pp), strict=True)):
        pool, (of_device, room, spread), host = pools[of_stage[r]], limits[of_stage[r]], None
        chance = float(chance_of_fitting(total_bytes(own), pool.whole_memory_bytes, spread))
        if of_host:
            held = float(chance_of_fitting(total_bytes(of_host), pool.host_memory_bytes, spread))
            host = HostMemory(lines=of_host, chance=held, **room)
        found.append(StageMemory(stage=r, lines=own, host=host, device_chance=chance, **of_device))
    return tuple(found)


def _limits(pool: PoolJob, layout: Layout, *, of_host: bool = False) -> dict[str, float]:
    return {
        "limit_bytes": float(memory_limit_bytes(pool, layout, of_host=of_host)),
        "most_bytes": float(most_peak_bytes(pool, layout, of_host=of_host)),
    }


def estimate(job: Job, layout: Layout) -> Estimate:
    """Price one layout: memory of every stage, and the time of a step; on a mixed cluster each stage uses its own pool.

    The step takes m t_max + bubble + the longest tail (under PipeDream a tail follows every microbatch). The ledger of
    the step has lines of the slowest stage and of the stage with the longest tail. For GPipe, 1F1B and interleaved
    stages the bubble is the closed form, which the search minimises. The closed form covers only the chunks that the
    search builds. An interleaved schedule is executed instead if chunks without an end of the model differ by more than
    one layer, if smaller chunks come first, or if chunks differ in their kinds of layers.

    Source: schedule.py.
    """
    stages, of_stage = stages_of(job, layout), pool_indices(job, layout)
    prices, executed = layout_prices(job, layout), None
    if layout.schedule in EXECUTED or _has_chunks_of_its_own(job, layout):
        executed = timeline(job, layout)
        prices = _with_hidden_exchanges(job, layout, prices, executed)
    slowest, mean = float(np.max(prices.microbatch_seconds)), float(np.mean(prices.microbatch_seconds))
    work = float(steady_seconds(num_microbatches(job, layout), slowest))
    bubble = max(0.0, executed.seconds - work) if executed else _bubble_seconds(job, layout, prices, stages)
    time = _time_lines(job, layout, prices, bubble)
    step_seconds = float(total_exposed_seconds(time))
    flops = model_flops_per_step(job.model, job.training)
    shares = [float(np.mean(of_stage == pool)) for pool in range(len(job.pools))]
    each = (pool.cluster.device.peak[job.training.precision] for pool in job.pools)
    peak = sum_of(peak * share for peak, share in zip(each, shares, strict=True))
    mfu = flops / (step_seconds * layout.world_size * peak)
    repeated = float(chunk_flops(job, layout)["repeated"].sum()) * job.training.global_batch_size / layout.mbs
    return Estimate(
        memory=memory_of_stages(job, layout),
        time=time,
        pipeline_seconds=work + bubble,
        slowest_of_mean=slowest / mean if layout.pp > 1 else 1.0,
        mfu=mfu,
        hfu=mfu * (1.0 + repeated / flops),
        tokens_per_second_per_device=job.training.step_tokens / (step_seconds * layout.world_size),
    )


def _has_chunks_of_its_own(job: Job, layout: Layout) -> bool:
    """Whether the interleaved schedule exists and has chunks that the search would not make.

    If kinds of layers repeat, the search makes only equal chunks of whole periods, without leading layers.
    """
    m = layout.num_microbatches(job.training.global_batch_size)
    if layout.schedule != "interleaved" or not exists(layout.schedule, layout.pp, m, layout.interleave):
        return False
    pattern, of_stages = pattern_of(job), tuple(layout.layers_of_stage(stage) for stage in range(layout.pp))
    if pattern.period > 1:
        equal = len(set(layout.layers_per_stage)) == 1 and layout.layers_per_stage[0] % pattern.period == 0
        return bool(pattern.leading) or not equal
    return layout.layers_per_stage != balanced_chunks(of_stages, layout.interleave, last=last_chunks(layout))


def _of_stages(lines: tuple[MemoryLine, ...], pp: int) -> list[tuple[MemoryLine, ...]]:
    """The lines of each stage; in `lines`, each line holds the bytes of all stages as an array."""
    of_lines = [np.broadcast_to(line.num_bytes, (pp,)).tolist() for line in lines]
    return [
        tuple(replace(line, num_bytes=float(num_bytes[r])) for line, num_bytes in zip(lines, of_lines, strict=True))
        for r in range(pp)
    ]


def timeline(job: Job, layout: Layout) -> Timeline:
    """Start and end of each pass of one step on each stage, from executing the schedule with the seconds of each chunk.

    `seconds` is the end of the last pass; gradient reduction and optimizer (`Estimate.tail_seconds`) follow after it.

    Source: simulate.py.
    """
    m = int(num_microbatches(job, layout))
    parts, share = chunk_parts(job, layout), exchange_share(job)
    seconds, exchange = sum(parts.values(), PassSeconds()), exchange_parts(job, parts)
    return simulate(layout.schedule, seconds, m, interleave=layout.interleave, exchange=exchange, exchange_share=share)


def _with_hidden_exchanges(job: Job, layout: Layout, prices: StagePrices, executed: Timeline) -> StagePrices:
    """The prices without the exchanges and sends that pairs of passes hide; all values are means per microbatch."""
    if not executed.hidden.any():
        return prices
    parts, chunks = chunk_parts(job, layout), layout.num_chunks
    experts, both = parts[LineName.EP_COMM], exchange_parts(job, parts)
    share = np.where(
        executed.kind == "F",
        _share(experts.forward, both.forward, chunks)[executed.chunk],
        _share(experts.backward, both.backward, chunks)[executed.chunk],
    )
    m = num_microbatches(job, layout)
    exchanges, sends = (
        np.bincount(executed.stage, weights=weights * executed.hidden, minlength=layout.pp) / m
        for weights in (share, 1.0 - share)
    )
    return replace(prices, ep_hidden=prices.ep_hidden + exchanges, pp_hidden=prices.pp_hidden + sends)


def _share(part: Number, whole: Number, num_chunks: int) -> NDArray[np.float64]:
    part, whole = np.broadcast_to(part, num_chunks), np.broadcast_to(whole, num_chunks)
    share: NDArray[np.float64] = np.divide(part, whole, out=np.zeros(num_chunks), where=whole > 0)
    return share


def _bubble_seconds(job: Job, layout: Layout, prices: StagePrices, stages: Stage) -> float:
    m = num_microbatches(job, layout)
    if layout.schedule == "interleaved":
        seconds = np.broadcast_to(prices.microbatch_seconds, (layout.pp,))
        fill, slack = (np.broadcast_to(each, (layout.pp,)) for each in interleaving_terms(job, layout, stages, prices))
        return float(interleaved_bubble_seconds(seconds, fill, slack, m, layout.interleave))
    passes = prices.passes.each(lambda seconds: np.broadcast_to(seconds, layout.pp))
    return float(bubble_of(layout.schedule, passes, num_microbatches=m, interleave=layout.interleave))


def _time_lines(job: Job, layout: Layout, prices: StagePrices, bubble: float) -> tuple[TimeLine, ...]:
    """The time ledger of one layout: lines of the slowest stage, and of the stage with the longest tail."""
    per_stage = np.broadcast_to(prices.microbatch_seconds, (layout.pp,))
    slow, last = int(np.argmax(per_stage)), int(np.argmax(np.broadcast_to(prices.tail_seconds, (layout.pp,))))
    m = float(num_microbatches(job, layout))
    pools, of_stage = job.pools, pool_indices(job, layout)
    return (
        *_microbatch_lines(pools[of_stage[slow]], layout, prices, slow, m),
        _line(LineName.BUBBLE, slow, bubble, "pipeline", of=layout.schedule),
        *_tail_lines(pools[of_stage[last]], layout, prices, (slow, last), m),
    )


def _at(pp: int, index: int, of_stages: Number) -> float:
    """The number of one of `pp` stages."""
    return float(np.broadcast_to(of_stages, pp)[index])


_SAID: Final[Any] = shipped_yaml(Path(__file__).with_name("time_lines.yaml")).plain
"""Formula and source of the lines of time, and of kinds of a line."""


def _line(
    name: LineName, stage: int, busy: float, bound: str, hidden: float = 0.0, of: str = "", **words: str
) -> TimeLine:
    """A line of time, in seconds; `of` chooses among formulas, and `words` are what the formula leaves open."""
    said = _SAID.get(of) or _SAID[name]
    return TimeLine(
        name=name,
        stage=stage,
        busy_seconds=busy,
        hidden_seconds=hidden,
        formula=said["formula"].format(**words),
        source=said["source"],
        bound=bound,
    )


def _microbatch_lines(job: PoolJob, layout: Layout, own: StagePrices, stage: int, m: float) -> tuple[TimeLine, ...]:
    """Lines for the work of the slowest stage in every microbatch; own: the prices of all stages."""
    link, at = partial(slowest_link, job.cluster, segment=layout.segment), partial(_at, layout.pp, stage)
    unit = job.training.precision
    seconds = {
        LineName.COMPUTE: (own.compute, 0.0, unit),
        LineName.RECOMPUTE: (own.recompute, 0.0, unit),
        LineName.HEAD: (own.head, 0.0, unit),
        **({LineName.UNGRADED: (own.ungraded, 0.0, unit)} if job.training.ungraded_passes else {}),
        LineName.ACCUMULATION: (own.accumulation, 0.0, "memory"),
        LineName.TP_COMM: (own.tp_comm, own.tp_hidden, link(layout.tp, 1)),
        LineName.CP_COMM: (own.cp_comm, own.cp_hidden, link(layout.cp, layout.tp)),
        LineName.EP_COMM: (own.ep_comm, own.ep_hidden, link(layout.ep, layout.etp)),
        LineName.PP_COMM: (own.pp_comm, own.pp_hidden, _pipeline_link(job, layout)),
    }
    tower = " and tower of images" if job.model.vision else ""
    kinds = {LineName.CP_COMM: job.engine.communication.context_exchange}
    return tuple(
        _line(name, stage, m * at(busy), bound, m * at(hidden), of=kinds.get(name, ""), tower=tower)
        for name, (busy, hidden, bound) in seconds.items()
    )


def _pipeline_link(job: PoolJob, layout: Layout) -> str:
    """Name of the slowest link that the pipeline crosses."""
    if job.between is not None and len(set(layout.pools)) > 1:
        return job.between.name
    return slowest_link(job.cluster, layout.pp, layout.stride("pp"), segment=layout.segment)


def _tail_lines(
    job: PoolJob, layout: Layout, prices: StagePrices, slow_and_last: tuple[int, int], m: float
) -> tuple[TimeLine, ...]:
    """Lines for the tail of the stage that ends last, and for the slowest stage's traffic in every microbatch."""
    own, tail = (partial(_at, layout.pp, stage) for stage in slow_and_last)
    stage, dp, host = slow_and_last[1], prices.dp, prices.host
    updates, of_all = (m, "m * ") if layout.schedule == "pipedream" else (1.0, "")
    busy = m * own(dp.busy_each) + updates * tail(dp.busy_once)
    exposed = m * own(dp.exposed.total) + updates * tail(dp.exposed_once)
    host_busy = m * own(host.busy_each) + updates * tail(host.busy_once)
    host_hidden = m * own(host.busy_each - host.exposed.total) + updates * tail(host.busy_once - host.exposed_once)
    link = slowest_link(job.cluster, layout.dp * layout.cp, layout.tp, segment=layout.segment)
    tied, ends = updates * tail(prices.tied_embedding), _pipeline_link(job, layout)
    bound = "host memory" if offloads_optimizer(layout) else "memory"
    return (
        _line(LineName.DP_COMM, stage, busy, link, busy - exposed, updates=of_all),
        _line(LineName.TIED_EMBEDDING, stage, tied, ends, updates=of_all),
        _line(LineName.HOST_COMM, stage, host_busy, "host link", host_hidden),
        _line(LineName.OPTIMIZER, stage, updates * tail(prices.optimizer), bound, of=bound, updates=of_all),
    )
