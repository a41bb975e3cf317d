"""Prices of a pipeline stage: seconds of a microbatch (by cause), seconds spent once per step, and peak bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.adapters import trained_params
from planner.cost.chance import memory_limit_bytes
from planner.cost.compute import PassSeconds, accumulation_seconds, head_seconds, linear_seconds, memory_bound_seconds
from planner.cost.layers import layer_seconds
from planner.cost.ledger import LineName, total_bytes
from planner.cost.memory import host_lines, memory_lines
from planner.cost.microbatch import num_microbatches, tokens_per_microbatch
from planner.cost.model_states import whole_gradients
from planner.cost.offload import host_copy_seconds, host_update_seconds
from planner.cost.optimizers import newton_schulz_seconds, optimizer_seconds
from planner.cost.recompute import repeats_part
from planner.cost.schedule import chunk_terms, steady_count
from planner.cost.shapes import by_shape
from planner.cost.stage import (
    Stage,
    by_policy,
    by_pool,
    chunks_of,
    holds_embedding,
    holds_head,
    mtp_layers,
    pool_indices,
    shard_of,
    stages_of,
    timed_kinds,
)
from planner.cost.traffic import (
    busy_seconds,
    data_parallel_seconds,
    hidden_behind_weight_gradients,
    hidden_context_parallel_seconds,
    hidden_tensor_parallel_seconds,
)
from planner.cost.transfers import (
    context_transfers,
    end_transfers,
    expert_transfers,
    head_transfers,
    regathers_inputs,
    repeated_share,
    send_transfers,
    tensor_transfers,
    tied_transfers,
)
from planner.cost.vision import tower_seconds
from planner.layout import offloads_activations, offloads_optimizer
from planner.specs.recompute import FULL, SELECTIVE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planner.cost.traffic import BesideSeconds
    from planner.cost.transfers import Moment
    from planner.layout import Degrees, LayerDegrees, Layout
    from planner.numbers import Flag, Number
    from planner.specs.job import Job, PoolJob


_EXCHANGE_PROCESSORS: Final = 20
"""Processors of a device that run an exchange's kernels while its other processors compute products.

They are 20 of an H800's 132 processors (DeepSeek-V3 2024, section 3.2.2; deep_ep/buffer.py, Buffer.num_sms = 20).
"""

_OPERATORS_REPEATED: Final = 0.5
"""Share of a layer's forward seconds that recompute by operators repeats.

torchtitan saves attention and every second product (distributed/activation_checkpoint.py). Half of the time of norms
and activations is assumed to be repeated, too; a trace of one layer with and without selective recompute would replace
this assumption.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrices:
    """Costs of one stage: seconds of one microbatch by cause, and seconds spent once a step. Every field broadcasts.

    passes: the same seconds of one microbatch, split by pass instead of cause. Both splits have the same sum, except
        for exchanges that only pairs of passes hide (ep_hidden, and a part of pp_hidden; means over the microbatches).
    whole: the part of `passes` that belongs to the whole stage and to none of its chunks, by ledger line.
    forward: seconds of one forward pass of the stage's layers, without collectives and waits. Full recompute repeats
        this pass.
    ends: the embedding, or head and loss, with their collectives, in all passes.
    ungraded: computing of forward passes without gradients, of policy and reference.
    host, dp: copies to the host, and the reduction of gradients with the gathering of weights.
    """

    passes: PassSeconds
    whole: Mapping[LineName, PassSeconds]
    compute: Number
    forward: Number
    recompute: Number
    head: Number
    ends: Number
    ungraded: Number = 0.0
    accumulation: Number
    tp_comm: Number
    tp_hidden: Number
    cp_comm: Number
    cp_hidden: Number
    ep_comm: Number
    ep_hidden: Number = 0.0
    pp_comm: Number
    pp_hidden: Number
    host: BesideSeconds
    dp: BesideSeconds
    tied_embedding: Number
    optimizer: Number

    @property
    def microbatch_seconds(self) -> Number:
        """Seconds of one microbatch through the stage, forward and backward: t_r of the pipeline formula."""
        work = self.compute + self.recompute + self.head + self.ungraded + self.accumulation
        exposed_send, exposed_exchange = self.pp_comm - self.pp_hidden, self.ep_comm - self.ep_hidden
        exposed_tp = self.tp_comm - self.tp_hidden
        exposed_cp = self.cp_comm - self.cp_hidden
        beside = exposed_send + self.host.exposed.total + self.dp.exposed.total
        return work + exposed_tp + exposed_cp + exposed_exchange + beside

    @property
    def tail_seconds(self) -> Number:
        """Seconds of the stage after its last microbatch: exposed reduction, copies to the host and the optimizer."""
        return self.dp.exposed_once + self.tied_embedding + self.host.exposed_once + self.optimizer


def num_updates(job: Job, layout: Degrees) -> Number:
    """Updates of the weights in a step: one; under PipeDream one after every microbatch.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.3.
    """
    return num_microbatches(job, layout) if layout.schedule == "pipedream" else 1.0


_IN_LAYERS: Final = (LineName.TP_COMM, LineName.CP_COMM, LineName.EP_COMM)
"""Ledger lines of the collectives that run inside layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Seconds of one microbatch in the layers and ends of a stage or of a chunk, by cause.

    The chunks' seconds add up to the stage's seconds.

    forward: seconds of the layers' forward passes, without collectives and waits.
    ungraded, ungraded_ends: computing of forward passes without gradients, and the part of the model's ends in it.
    busy, hidden: seconds of the layers' collectives by ledger line, and the part that computing hides.
    """

    layers: PassSeconds
    forward: Number
    recompute: Number
    ends: PassSeconds
    tp_ends: PassSeconds
    ungraded: Number
    ungraded_ends: Number
    busy: Mapping[LineName, PassSeconds]
    hidden: Mapping[LineName, PassSeconds]

    def exposed(self, line: LineName) -> PassSeconds:
        """Seconds of the layers' collectives of a ledger line, without the hidden part."""
        return self.busy[line] + self.hidden[line] * -1.0

    @property
    def by_line(self) -> dict[LineName, PassSeconds]:
        """All exposed seconds by ledger line; recompute runs before the gradients of the inputs."""
        return {
            LineName.COMPUTE: self.layers,
            LineName.RECOMPUTE: PassSeconds(backward_input=self.recompute),
            LineName.HEAD: self.ends,
            LineName.UNGRADED: PassSeconds(forward=self.ungraded),
            LineName.TP_COMM: self.exposed(LineName.TP_COMM) + self.tp_ends,
            LineName.CP_COMM: self.exposed(LineName.CP_COMM),
            LineName.EP_COMM: self.exposed(LineName.EP_COMM),
        }

    @property
    def passes(self) -> PassSeconds:
        """All exposed seconds by pass."""
        return sum(self.by_line.values(), PassSeconds())


def _work(job: PoolJob, layout: Degrees, stage: Stage, parts: StageParts) -> _Work:
    """Sum over the layers and the ends; recompute repeats all or parts of the forward pass and its collectives.

    Source: sum of the parts in layers.py, compute.py and traffic.py.
    """
    layers, forward, recompute = PassSeconds(), 0.0, 0.0
    passes = job.training.ungraded_passes
    busy, hidden = (dict.fromkeys(_IN_LAYERS, PassSeconds()) for _ in range(2))
    for kind, count in timed_kinds(job, layout, stage):
        layer = parts.layers[kind]
        layers += _waiting_for_ranks(job, layout, layer) * count
        forward = forward + count * layer.passes.forward
        recompute = recompute + count * _repeated_seconds(job, layout, stage, layer)
        for line in _IN_LAYERS:
            share = repeated_share(job, layout, stage, line, experts=kind[0])
            busy[line] += _with_repeated(layer.busy[line], share, passes) * count
            beside = line != LineName.EP_COMM  # nothing hides what recompute and other passes exchange again
            hidden[line] += _with_repeated(layer.hidden[line], beside * share, beside * passes) * count
    hidden[LineName.EP_COMM] *= _share_in_pairs(job, layout) if job.training.expert_overlap else 0.0
    first, last = holds_embedding(stage), holds_head(layout, stage)
    mtp = parts.mtp * mtp_layers(job, layout, stage)
    ungraded_ends = passes * (parts.lookup.forward * first + parts.ungraded_head * last + mtp.forward)
    return _Work(
        layers=layers,
        forward=forward,
        recompute=recompute,
        ends=parts.lookup * first + parts.head * last + mtp,
        tp_ends=_with_repeated(parts.tp_end, 0.0, passes) * (first.astype(float) + last),
        ungraded=passes * layers.forward + ungraded_ends,
        ungraded_ends=ungraded_ends,
        busy=busy,
        hidden=hidden,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """Seconds of one microbatch in one layer.

    parts: forward seconds of each part of a layer, by the recompute modules that repeat the part (`LayerSeconds`).
    busy, hidden: seconds of the collectives by ledger line, and the part that computing hides; exchanges of experts
        are hidden only if passes run in pairs.
    """

    passes: PassSeconds
    parts: Mapping[frozenset[str], Number]
    busy: Mapping[LineName, PassSeconds]
    hidden: Mapping[LineName, PassSeconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """Seconds of one microbatch in the parts of a stage: in a layer of each kind, and in the model's ends.

    layers: the key says whether the layer has experts, and whether its attention has a window.
    head: head and loss, once for the model and once for each layer for multi-token prediction.
    ungraded_head: the same in a forward pass without gradients, in which Megatron-LM computes all heads, too
        (transformer/multi_token_prediction.py, process_mtp_loss).
    mtp: what such a layer has before its transformer layer.
    """

    layers: Mapping[tuple[bool, bool], LayerParts]
    lookup: PassSeconds
    head: PassSeconds
    ungraded_head: Number
    mtp: PassSeconds
    tp_end: PassSeconds


def stage_parts(job: PoolJob, layout: Degrees) -> StageParts:
    """Prices of the parts of a stage in each configuration, computed once for each distinct shape of a layer.

    Source: layers.py, compute.py and traffic.py.
    """
    kinds = [kind for kind, _ in timed_kinds(job, layout, Stage(index=0, num_layers=1, policy=0))]
    return by_shape(layout, lambda shape: _parts_of_stage(job, shape, kinds))


def _parts_of_stage(job: PoolJob, layout: LayerDegrees, kinds: Sequence[tuple[bool, bool]]) -> StageParts:
    tp, heads, cp, ep, end = (
        _each_way(busy_seconds(job, find(job, layout)))
        for find in (tensor_transfers, head_transfers, context_transfers, expert_transfers, end_transfers)
    )

    endless = PassSeconds(forward=np.inf, backward_input=np.inf, backward_weight=np.inf)
    exposed = tp + _hidden_of_layer(job, layout, endless, tp) * -1.0  # at least

    def layer(experts: bool, local: bool) -> LayerParts:
        # an all-to-all makes the host wait for its sizes; DeepEP and HybridEP keep the sizes on the device
        ahead = ep.forward if experts and job.engine.communication.dispatches_once_per_host else 0.0
        priced = layer_seconds(job, layout, experts=experts, local=local, exchanges=ahead, collectives=exposed)
        exchange = ep * float(experts)
        beside = np.minimum(priced.passes.total, exchange.total - priced.covered)  # a wait hides seconds only once
        hidden = {
            LineName.TP_COMM: _hidden_of_layer(job, layout, priced.passes + priced.core * -1.0, tp),
            LineName.CP_COMM: PassSeconds(
                forward=hidden_context_parallel_seconds(job, layout, cp.forward, priced.core.forward),
                backward_input=hidden_context_parallel_seconds(job, layout, cp.backward, priced.core.backward),
            ),
            LineName.EP_COMM: _halves(hidden_expert_seconds(job, exchange.total, beside)),
        }
        busy = dict(zip(_IN_LAYERS, (tp + heads, cp, exchange), strict=True))
        return LayerParts(passes=priced.passes, parts=priced.parts, busy=busy, hidden=hidden)

    passes, losses = job.training.ungraded_passes, 1.0 + job.model.mtp_layers
    return StageParts(
        layers={kind: layer(*kind) for kind in kinds},
        lookup=_lookup(job, layout) + tower_seconds(job, layout),
        head=head_seconds(job, layout) * losses,
        ungraded_head=head_seconds(job, layout, graded=False).forward * losses if passes else 0.0,
        mtp=_mtp_seconds(job, layout),
        tp_end=end,
    )


_EAGER_OVERLAP: Final = 0.65
"""Share, of the seconds that pairs of passes could hide, that they do hide while the host launches each operator.

The value is chosen on published steps of one job with and without the overlap, by an all-to-all (42.0 and 31.3 s) and
by HybridEP (24.7 and 21.0 s). Source: NVIDIA, Megatron-Bridge, skills/nemo-mbridge-perf-expert-parallel-overlap.
"""


def hidden_expert_seconds(job: PoolJob, exchanges: Number, computing: Number) -> Number:
    """Hidden seconds of the expert exchanges of a layer's two passes, if the two passes run as a pair.

    Exchanges take C seconds. Meanwhile W seconds of computing run on the share 1 - a of the processors that exchanges
    leave free. Together both take max(C, W + a C), so min(W, (1 - a) C) seconds could be hidden. All of them are if a
    CUDA graph holds the step; else `_EAGER_OVERLAP` of them.

    Source: Megatron-LM, pipeline_parallel/combined_1f1b.py; DeepSeek-V3 (2024), sections 3.2.1 and 3.2.2.
    """
    reached = 1.0 if job.training.cuda_graphs == "step" else _EAGER_OVERLAP
    return reached * np.minimum(computing, (1.0 - exchange_share(job)) * exchanges)


def _share_in_pairs(job: PoolJob, layout: Degrees) -> Number:
    """Share of the microbatches whose passes run in pairs; passes that fill or drain the pipeline have no partner.

    The formula of a step has two parts. The passes in (m - 1/v) t_max run in pairs. The one pass of a microbatch
    through the pipeline, 1/v of each stage's time, runs alone.

    Source: derived here from `planner.cost.schedule.step_seconds`, for equal stages.
    """
    steady = steady_count(num_microbatches(job, layout), layout.interleave)
    return steady / (steady + layout.pp / layout.interleave)


def _each_way(busy: Mapping[Moment, Number]) -> PassSeconds:
    return PassSeconds(forward=busy["forward"], backward_input=busy["backward"])


def _hidden_of_layer(
    job: PoolJob, layout: LayerDegrees, products: PassSeconds, collectives: PassSeconds
) -> PassSeconds:
    """Seconds of a layer's tensor-parallel collectives that its own matrix products hide.

    Of three collectives of the backward pass one gathers inputs of column-parallel products again, beside the products
    for the gradients of these inputs.

    Source: Korthikanti et al. (2022), section 4.2.2; Megatron-LM, megatron/core/tensor_parallel/layers.py.
    """
    again = np.where(np.equal(layout.sp, 1), collectives.backward / 3.0, 0.0) * regathers_inputs(job)
    backward = collectives.backward - again
    beside_products = hidden_tensor_parallel_seconds(job, layout, backward, products.backward)
    beside_weights = hidden_behind_weight_gradients(job, layout, backward, products.backward_weight)
    return PassSeconds(
        forward=hidden_tensor_parallel_seconds(job, layout, collectives.forward, products.forward),
        backward_input=np.maximum(beside_products, beside_weights) + np.minimum(again, products.backward_input / 2.0),
    )


def _repeated_seconds(job: PoolJob, layout: Degrees, stage: Stage, layer: LayerParts) -> Number:
    """Forward seconds of a layer that the backward pass repeats, without collectives."""
    operators = _OPERATORS_REPEATED if job.engine.memory.selective_recompute == "operators" else 0.0
    of_whole = {FULL: 1.0, SELECTIVE: operators}
    repeated = layer.passes.forward * by_policy(layout, stage, lambda policy: of_whole.get(policy, 0.0))
    for parts, seconds in layer.parts.items():
        repeated = repeated + seconds * by_policy(layout, stage, partial(repeats_part, job, parts=parts))
    return repeated


def _waiting_for_ranks(job: PoolJob, layout: Degrees, layer: LayerParts) -> PassSeconds:
    """Seconds of a layer's passes in runs whose host waits for all tensor-parallel ranks at each collective.

    The engine states this wait (`rank_wait`). A layer has 4 collectives in its forward pass, and 6 in its backward
    pass, which gathers the inputs of column-parallel products again. The device computes and communicates during the
    wait.

    Source: torch, distributed/c10d/ProcessGroupWrapper.cpp (runCollectiveChecks): one rank awaits each of the others.
    """
    passes, wait = layer.passes, job.engine.communication.rank_wait
    if not wait:
        return passes
    of_call = wait * np.where(np.greater(layout.tp, 1), layout.tp, 0)
    busy = passes + layer.busy[LineName.TP_COMM] + layer.hidden[LineName.TP_COMM] * -1.0
    calls = (4.0, busy.forward), (6.0, busy.backward)
    return passes.delayed(*(np.maximum(0.0, number * of_call - work) for number, work in calls))


def _with_repeated(collectives: PassSeconds, share: Number, passes: int) -> PassSeconds:
    """Collectives with those of further forward passes, and in the backward pass with what recompute repeats.

    share: the repeated share of the forward pass's collectives.
    """
    return collectives + PassSeconds(forward=passes * collectives.forward, backward_input=share * collectives.forward)


def _halves(seconds: Number) -> PassSeconds:
    """The seconds, divided equally between the forward and the backward pass."""
    return PassSeconds(forward=seconds / 2, backward_input=seconds / 2)


def _mtp_seconds(job: PoolJob, layout: LayerDegrees) -> PassSeconds:
    """Seconds of a multi-token prediction layer outside its transformer layer: a look-up, a projection of two states.

    Its head runs where the loss is.

    Source: DeepSeek-V3 (2024), section 2.2; Megatron-LM, megatron/core/models/gpt/gpt_model.py (_postprocess).
    """
    if not job.model.mtp_layers:
        return PassSeconds()
    tokens, h = tokens_per_microbatch(job, layout), job.model.hidden_size
    joined = linear_seconds(job, tokens, 2 * h, h / layout.tp) * job.calibration.slowdown
    return _lookup(job, layout) + joined


def _lookup(job: PoolJob, layout: LayerDegrees) -> PassSeconds:
    """Seconds of the embedding: forward reads and writes rows, backward reads gradients and updates unfrozen rows.

    Source: derived here from the operators' inputs and outputs.
    """
    elements = tokens_per_microbatch(job, layout) * job.model.hidden_size
    seconds = memory_bound_seconds(job, 6.0 * job.compute_bytes * elements)
    return PassSeconds(forward=seconds / 3, backward_weight=0.0 if job.training.lora_rank else seconds * 2 / 3)


def stage_prices(job: PoolJob, layout: Degrees, stage: Stage, parts: StageParts | None = None) -> StagePrices:
    """Prices of one stage, or of arrays of layouts and stages; broadcasts.

    parts: prices of the layouts' parts, if they are already computed.

    Source: sum of the parts in layers.py, compute.py and traffic.py.
    """
    work = _work(job, layout, stage, parts or stage_parts(job, layout))
    sends_of_pass = _each_way(busy_seconds(job, send_transfers(job, layout, stage)))
    send = sends_of_pass.total + job.training.ungraded_passes * sends_of_pass.forward
    exposed = work.exposed(LineName.TP_COMM) + work.exposed(LineName.EP_COMM)
    again = PassSeconds(forward=work.ungraded - work.ungraded_ends, backward_input=work.recompute)
    dp = data_parallel_seconds(job, layout, stage, work.layers + exposed + again)
    # passes without gradients keep no activations, so no copies of activations run beside them
    beside = PassSeconds(backward_input=work.recompute) if offloads_activations(layout) else again
    copies = host_copy_seconds(job, layout, stage, work.layers + exposed + beside)
    held = trained_params(job, layout, stage)
    accumulates = whole_gradients(job, layout) & np.greater(num_microbatches(job, layout), 1)
    accumulation = np.where(accumulates, accumulation_seconds(job, held.total), 0.0)
    sends = job.engine.overlap.pipeline_sends
    between_chunks = (sends == "interleaved") & np.greater(layout.interleave, 1)
    hidden_send = np.where((sends == "all") | between_chunks, send, 0.0)
    whole = {
        LineName.PP_COMM: _halves(send - hidden_send),
        LineName.HOST_COMM: copies.exposed,
        LineName.DP_COMM: dp.exposed,
        LineName.ACCUMULATION: PassSeconds(backward_weight=accumulation),
    }
    shard = shard_of(job, layout, held)
    return StagePrices(
        passes=sum(whole.values(), work.passes),
        whole=whole,
        compute=work.layers.total,
        forward=work.forward,
        recompute=work.recompute,
        head=work.ends.total,
        ends=work.ends.total + work.tp_ends.total + work.ungraded_ends,
        ungraded=work.ungraded,
        accumulation=accumulation,
        tp_comm=work.busy[LineName.TP_COMM].total + work.tp_ends.total,
        tp_hidden=work.hidden[LineName.TP_COMM].total,
        cp_comm=work.busy[LineName.CP_COMM].total,
        cp_hidden=work.hidden[LineName.CP_COMM].total,
        ep_comm=work.busy[LineName.EP_COMM].total,
        ep_hidden=work.hidden[LineName.EP_COMM].total,
        pp_comm=send,
        pp_hidden=hidden_send,
        host=copies,
        dp=dp,
        tied_embedding=busy_seconds(job, tied_transfers(job, layout, stage))["last backward"],
        optimizer=_update_seconds(job, layout, stage, shard),
    )


def interleaving_terms(job: Job, layout: Degrees, stage: Stage, prices: StagePrices) -> tuple[Number, Number]:
    """A stage's share of filling and draining, and its slack: how long the model's last chunk may take without a wait.

    The slack is 0 unless stages are interleaved.

    A chunk of n layers is priced as n times the stage's mean layer; layers for multi-token prediction are part of the
    stage's last chunk.

    Source: `planner.cost.schedule.chunk_terms`.
    """
    seconds = prices.microbatch_seconds
    if layout.schedule != "interleaved":
        return seconds, 0.0 * seconds
    is_last, further = holds_head(layout, stage), mtp_layers(job, layout, stage)
    layer = (seconds - prices.ends) / np.maximum(stage.num_layers + further, 1)
    even = stage.num_layers / layout.interleave
    return chunk_terms(
        stage_seconds=seconds,
        layer_seconds=layer,
        num_layers=stage.num_layers,
        largest_chunk=even if stage.largest_chunk is None else stage.largest_chunk,
        last_chunk=np.floor(even) if stage.last_chunk is None else stage.last_chunk,
        end_seconds=(is_last | np.greater(further, 0)) * prices.ends + further * layer,
        is_last=is_last,
        pp=layout.pp,
        num_microbatches=num_microbatches(job, layout),
        interleave=layout.interleave,
    )


_GRAPH_SHARE: Final = 1 / 6
"""Share of the host's fixed work per step that is left if a CUDA graph holds the whole step: data and logging.

The value is assumed: 10 of 60 ms.
"""


def _update_seconds(job: PoolJob, layout: Degrees, stage: Stage, num_params: Number) -> Number:
    """Seconds that the optimizer needs to update a shard, on device or host, plus the host's fixed work per step.

    Source: optimizers.py, and offload.py for the host.
    """
    floor = step_floor_seconds(job)
    if offloads_optimizer(layout):
        return floor + host_update_seconds(job, num_params)
    return floor + optimizer_seconds(job, num_params) + newton_schulz_seconds(job, layout, stage)


def step_floor_seconds(job: PoolJob) -> float:
    """Seconds of the host's fixed work per step, which are part of every stage's tail.

    Source: `step_floor` of the device file.
    """
    in_graph = _GRAPH_SHARE if job.training.cuda_graphs == "step" else 1.0
    return in_graph * job.cluster.device.efficiency.step_floor * job.calibration.host


def layout_prices(job: Job, layout: Layout) -> StagePrices:
    """Prices of all stages of one layout, each stage in its own pool; arrays of shape (pp,).

    Source: as `stage_prices`.
    """
    stages = stages_of(job, layout)
    return by_pool(job, pool_indices(job, layout), lambda pool: stage_prices(pool, layout, stages))


def chunk_parts(job: Job, layout: Layout) -> dict[LineName, PassSeconds]:
    """Seconds of one microbatch through each chunk of one layout, by ledger line; arrays of shape (chunks,).

    Each chunk, in model order, has its own layers and ends. Costs of a whole stage (sends, gradient accumulation,
    ZeRO's traffic) are divided among its chunks in proportion to their layers, or equally if it has none. The chunks of
    a stage sum to `stage_prices`.

    Source: as `stage_prices`.
    """
    stages, chunks = stages_of(job, layout), chunks_of(job, layout)
    held = stages.num_layers[chunks.index]
    share = np.where(held > 0, chunks.num_layers / np.maximum(held, 1), 1 / layout.interleave)
    pool = pool_indices(job, layout)[chunks.index]
    own = by_pool(job, pool, lambda each: _work(each, layout, chunks, stage_parts(each, layout)).by_line)
    whole = layout_prices(job, layout).whole
    return {name: part.each(lambda v: np.broadcast_to(v, layout.num_chunks)) for name, part in own.items()} | {
        name: part.each(lambda v: share * np.broadcast_to(v, layout.pp)[chunks.index]) for name, part in whole.items()
    }


def exchange_parts(job: Job, parts: Mapping[LineName, PassSeconds]) -> PassSeconds:
    """Seconds of each chunk that overlapped pairs of passes can hide: expert exchanges and sends between stages.

    Source: DeepSeek-V3 (2024), section 3.2.1.
    """
    hides = float(job.engine.overlap.paired_passes)
    return (parts[LineName.EP_COMM] + parts[LineName.PP_COMM]) * hides


def exchange_share(job: Job) -> float:
    """Share of a device's processors that communication occupies: 20 processors of the device with the fewest.

    On a device with fewer than 40 processors the share is assumed to be one half, because no measurement is known.

    Source: DeepSeek-V3 (2024), section 3.2.2; DeepEP, Buffer.set_num_sms.
    """
    fewest = min(pool.cluster.device.num_processors for pool in job.pools)
    return min(0.5, _EXCHANGE_PROCESSORS / fewest)


def stage_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Peak bytes of a stage: the sum of its memory ledger.

    Source: memory.py.
    """
    return total_bytes(memory_lines(job, layout, stage))


def stage_fits(job: PoolJob, layout: Degrees, stage: Stage) -> Flag:
    """Whether a stage stays within the memory that a plan may use on a device and on its host.

    Source: memory.py.
    """
    fits = stage_bytes(job, layout, stage) <= memory_limit_bytes(job, layout)
    on_host = host_lines(job, layout, stage)
    return fits & (total_bytes(on_host) <= memory_limit_bytes(job, layout, of_host=True)) if on_host else fits
