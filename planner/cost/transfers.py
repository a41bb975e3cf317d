"""The one list of the collectives and sends that a layout causes.

`transfers` lists the transfers of a pipeline stage. The time ledger sums over this list (traffic.py, with the prices of
collectives.py), and `explain --collectives`, the waterfall, the page and the trace show it. Every number broadcasts, so
the same functions serve one layout and a search of 100,000 layouts. The transfers of a layer depend on only a few
degrees, so the search can price them before it divides the layers among stages. Copies between a device and its host
are in offload.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from planner.cost.adapters import frozen_bytes, trained_params
from planner.cost.layers import choices_per_microbatch
from planner.cost.ledger import LineName
from planner.cost.microbatch import tokens_per_microbatch
from planner.cost.model_states import whole_gradients
from planner.cost.operators import (
    core_widths,
    cross_attention_share,
    layer_of,
    num_blocks,
    output_width,
    share_with_experts,
    value_size,
)
from planner.cost.parameters import embedding_params_on_device
from planner.cost.recompute import repeated_transfers
from planner.cost.stage import (
    by_policy,
    expert_padding,
    expert_shard_degree,
    holds_embedding,
    holds_head,
    layer_kinds,
    shard_degree,
    sum_over_layers,
)
from planner.layout import head_stage
from planner.sums import sum_of
from planner.units import UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from planner.cost.stage import Stage
    from planner.layout import Degrees, LayerDegrees, Layout
    from planner.numbers import Number
    from planner.specs.cluster import ClusterSpec
    from planner.specs.engine import EngineSpec
    from planner.specs.job import PoolJob
    from planner.specs.model import ModelSpec

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ring exchange", "send"]

Moment = Literal["forward", "backward", "first forward", "last backward"]
"""When a transfer runs: in the forward or the backward pass of every microbatch, or once per update of the weights.

Once per update means in the first forward pass after the update, or in the last backward pass before it.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """The ranks of a group: `size` ranks, each `stride` from the next. Transfers in one group share this object.

    segment: hosts that the layout uses in each scale-up domain, as in `Layout`.
    across: whether the ranks are in different pools.

    For a send the ranks are the stages of the pipeline.
    """

    size: Number
    stride: Number
    segment: Number = 0
    across: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One kind of collective or send.

    line: the ledger line of the transfer.
    num_bytes: size of one rank's vector, as in collectives.py.
    times: how often the transfer happens in each `Moment`.
    experts: whether the transfer moves parameters of routed experts.
    copies, groups, message_bytes: arguments of `all_to_all_seconds`, for an all-to-all.
    host_seconds: host time of each collective before it starts; not for sends and all-to-alls.
    """

    line: LineName
    kind: Kind
    where: Span
    num_bytes: Number
    times: Mapping[Moment, Number]
    experts: bool = False
    copies: int = 1
    groups: tuple[int, int] | None = None
    message_bytes: float = 0.0
    host_seconds: Number = 0.0

    def times_per_step(self, num_microbatches: Number, num_updates: Number) -> Number:
        """How often the transfer runs in a step; 0 in a group of one rank."""
        often = {"forward": num_microbatches, "backward": num_microbatches}
        times = sum_of(n * often.get(when, num_updates) for when, n in self.times.items())
        return np.where(np.greater(self.where.size, 1), times, 0.0)


def _span(layout: LayerDegrees, size: Number, stride: Number, *, across: bool = False) -> Span:
    return Span(size=size, stride=stride, segment=layout.segment, across=across)


def _both_ways(times: Number) -> dict[Moment, Number]:
    """The same number of runs in the forward and in the backward pass."""
    return {"forward": times, "backward": times}


def transfers(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Transfer, ...]:
    """All transfers of a stage, or of arrays of layouts and stages; broadcasts.

    Source: the functions below.
    """
    ends = 1.0 * holds_embedding(stage) + holds_head(layout, stage)
    in_layers = partial(_in_layers, job, layout, stage)
    with_ends = zip(in_layers(tensor_transfers(job, layout)), end_transfers(job, layout), strict=True)
    of_passes = (
        *(_with_ends(each, end, ends) for each, end in with_ends),
        *in_layers(head_transfers(job, layout)),
        *in_layers(context_transfers(job, layout)),
        *in_layers(expert_transfers(job, layout), only_experts=True),
        *send_transfers(job, layout, stage),
    )
    if passes := job.training.ungraded_passes:
        again = ({**each.times, "forward": (1 + passes) * each.times.get("forward", 0.0)} for each in of_passes)
        of_passes = tuple(replace(each, times=times) for each, times in zip(of_passes, again, strict=True))
    return *of_passes, *state_transfers(job, layout, stage), *tied_transfers(job, layout, stage)


def _in_layers(
    job: PoolJob, layout: Degrees, stage: Stage, of_layer: Iterable[Transfer], *, only_experts: bool = False
) -> Iterator[Transfer]:
    """The transfers of one layer, with the number of runs summed over the layers of a stage."""
    kinds = [kind for kind in layer_kinds(job, layout, stage) if kind[0] or not only_experts]
    for each in of_layer:
        forward, backward = (each.times.get(when, 0.0) for when in ("forward", "backward"))
        again = sum_of(
            count * repeated_share(job, layout, stage, each.line, experts=experts) for experts, count in kinds
        )
        layers = sum_of(count for _, count in kinds)
        yield replace(each, times={"forward": layers * forward, "backward": layers * backward + again * forward})


def _with_ends(of_layers: Transfer, of_end: Transfer, ends: Number) -> Transfer:
    return replace(of_layers, times={when: n + ends * of_end.times[when] for when, n in of_layers.times.items()})


def repeated_share(job: PoolJob, layout: Degrees, stage: Stage, line: LineName, *, experts: bool) -> Number:
    """Share of a layer's forward transfers of one ledger line that a stage's recompute repeats.

    Source: `planner.cost.recompute.repeated_transfers`.
    """
    return by_policy(layout, stage, partial(repeated_transfers, job, line=line, experts=experts))


# --- transfers of every microbatch ------------------------------------------------------------------------------


def _activation_bytes(job: PoolJob, layout: LayerDegrees) -> Number:
    """Bytes of one whole (s b h) activation of one microbatch on one context-parallel rank."""
    return tokens_per_microbatch(job, layout) * job.model.hidden_size * job.compute_bytes


def tensor_transfers(job: PoolJob, layout: LayerDegrees) -> tuple[Transfer, ...]:
    """Tensor-parallel collectives of one layer.

    Each pass has two all-reduces; with sequence parallelism it has two all-gathers and two reduce-scatters, which move
    the same bytes. Parallel attention needs half as many collectives, and cross-attention adds one of each kind per
    pass. Engines that keep the rank's part of the inputs gather them again in the backward pass.

    Source: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2.2; Chowdhery et al.,
    PaLM (2022), section 2 for parallel attention.
    """
    blocks = 1.0 if job.model.parallel_attention else 2.0
    if job.model.layers or not job.model.ffn_hidden_size:  # a layer may have only one of the two blocks
        blocks = sum_of(num / job.model.num_layers * min(blocks, num_blocks(kind)) for num, kind in job.model.kinds())
    return _tensor(job, layout, blocks + cross_attention_share(job.model), 1.0 + regathers_inputs(job))


def regathers_inputs(job: PoolJob) -> bool:
    """Whether the backward pass gathers inputs of column-parallel products again, for the gradients of their weights.

    Source: Korthikanti et al. (2022), section 4.2.2; Megatron-LM, tensor_parallel/layers.py (wgrad_compute).
    """
    return job.engine.memory.regathers_inputs and not job.training.lora_rank


def head_transfers(job: PoolJob, layout: LayerDegrees) -> tuple[Transfer, ...]:
    """Collectives of one layer that replicate key-value heads, if there are more tensor-parallel ranks than heads.

    Each rank projects its share of queries, keys and values, gathers the shares of all ranks and selects its own heads.
    In the backward pass a reduce-scatter sums the gradients.

    Source: Megatron-LM, transformer/attention.py (all_gather_last_dim_from_tensor_parallel_region).
    """
    model = job.model
    if model.mla is not None or not job.engine.can.repeats_kv_heads:
        return ()
    width = sum(layer_of(model, experts=False).width(name) for name in ("query", "key", "value"))
    num_bytes = tokens_per_microbatch(job, layout) * width * job.compute_bytes
    once = np.where(np.greater(layout.tp, model.num_kv_heads), 1.0, 0.0)
    of = partial(Transfer, line=LineName.TP_COMM, where=_span(layout, layout.tp, 1), num_bytes=num_bytes)
    return of(kind="all-gather", times={"forward": once}), of(kind="reduce-scatter", times={"backward": once})


def end_transfers(job: PoolJob, layout: LayerDegrees) -> tuple[Transfer, ...]:
    """Tensor-parallel collectives of the embedding or the head, of the same kinds as in a layer.

    Each end of the model has one all-reduce (or an all-gather and a reduce-scatter), half of it in each pass.

    Source: Shoeybi et al., Megatron-LM (2019), section 3: vocabulary-parallel embedding and cross entropy.
    """
    return _tensor(job, layout, 0.5)


def _tensor(job: PoolJob, layout: LayerDegrees, pairs: float, gathers: float = 1.0) -> tuple[Transfer, ...]:
    sequence = np.where(np.equal(layout.sp, 1), pairs, 0.0)
    both, again = _both_ways(sequence), {**_both_ways(sequence), "backward": gathers * sequence}
    times: dict[Kind, Any] = {"all-gather": again, "reduce-scatter": both, "all-reduce": _both_ways(pairs - sequence)}
    where, num_bytes = _span(layout, layout.tp, 1), _activation_bytes(job, layout)
    of = partial(Transfer, line=LineName.TP_COMM, where=where, num_bytes=num_bytes)
    return tuple(of(kind=kind, times=each) for kind, each in times.items())


def context_transfers(job: PoolJob, layout: LayerDegrees) -> tuple[Transfer, ...]:
    """Context-parallel exchanges of one layer, or of the mean layer: of each size of heads, as often as layers have it.

    In ring attention each rank sends keys and values c - 1 times to its neighbour, and in the backward pass their
    gradients too. Torch gathers keys and values in each pass, and sends their gradients round in fp32, in c hops. Some
    engines instead gather keys and values before the core of attention, and reduce their gradients after it. Ulysses
    exchanges the rank's part of the sequence for a part of the heads before the core, and reverses the exchange after
    the core. A mixer is assumed to exchange as much as the model's attention; layers with neither exchange nothing.

    Source: Liu et al., Ring Attention (2023), section 3; Megatron-LM, cp_comm_type p2p; torch, distributed/tensor/
    experimental/_context_parallel/_attention.py; Llama 3 (2024), section 3.3.2, for gathering; Jacobs et al., DeepSpeed
    Ulysses (2023), section 3, for exchanging.
    """
    shares: dict[tuple[Number, ...], tuple[ModelSpec, float]] = {}
    for num, kind in job.model.kinds():
        if kind.attends or kind.mixer:
            sizes = core_widths(kind, 1)
            shares[sizes] = kind, num / job.model.num_layers + shares.get(sizes, (kind, 0.0))[1]
    return tuple(
        _as_often(each, share)
        for kind, share in shares.values()
        for each in _context_transfers(replace(job, model=kind) if job.model.layers else job, layout)
    )


def _as_often(transfer: Transfer, share: float) -> Transfer:
    """The transfer of a share of the layers as one of the mean layer."""
    return replace(transfer, times={when: share * times for when, times in transfer.times.items()})


def _context_transfers(job: PoolJob, layout: LayerDegrees) -> tuple[Transfer, ...]:
    exchanged = context_bytes(job, layout)
    of = partial(Transfer, line=LineName.CP_COMM, where=_span(layout, layout.cp, layout.tp))
    if job.engine.communication.context_exchange == "all-to-all":
        of = partial(of, times=_both_ways(1.0))
        return tuple(of(kind="all-to-all", num_bytes=each) for each in exchanged)
    (num_bytes,) = exchanged
    if job.engine.communication.context_exchange == "gather":
        whole = layout.cp * num_bytes
        return (
            of(kind="all-gather", num_bytes=whole, times={"forward": 1.0}),
            of(kind="reduce-scatter", num_bytes=whole, times={"backward": 1.0}),
        )
    hops = np.maximum(layout.cp - 1, 0)
    if job.engine.communication.context_exchange == "gathered-ring":
        gradients = num_bytes * 4.0 / job.compute_bytes  # summed in fp32 on their way back to their rank
        return (
            of(kind="all-gather", num_bytes=layout.cp * num_bytes, times=_both_ways(1.0)),
            of(kind="ring exchange", num_bytes=gradients, times={"backward": np.minimum(hops, 1) + hops}),
        )
    return (of(kind="ring exchange", num_bytes=num_bytes, times={"forward": hops, "backward": 2 * hops}),)


def context_bytes(job: PoolJob, layout: LayerDegrees) -> tuple[Number, ...]:
    """Bytes of keys and values that one rank exchanges in one layer of a kind and pass of context parallelism.

    An engine that exchanges sequence for heads sends queries, keys, values and outputs separately; key-value heads are
    repeated if there are fewer heads than ranks.

    Source: definition; Jacobs et al., DeepSpeed Ulysses (2023), section 3.
    """
    model, t = job.model, layout.tp
    elements = tokens_per_microbatch(job, layout) * job.compute_bytes
    queries, keys, values = (width / t for width in core_widths(model, t))
    if job.engine.communication.context_exchange != "all-to-all":
        return (elements * (keys + values),)
    keys, values = np.maximum(keys, layout.cp * model.head_size), np.maximum(values, layout.cp * value_size(model))
    return tuple(elements * width for width in (queries, keys, values, output_width(model) / t))


MEASURED_DISPATCH: Final = ("switch", "fat-tree")
"""Kinds of links on which published runs sent a token to each host once: NVLink, and InfiniBand.

There the devices start transfers themselves. On other links a proxy on the host starts them. Where the link's document
tells the time of a message (`message`), this time is priced; elsewhere no published run tells whether this is faster
than an all-to-all.
"""


def unmeasured_dispatch(model: ModelSpec, engine: EngineSpec, cluster: ClusterSpec, layout: Layout) -> str:
    """The link whose dispatch of tokens to experts, once per host, nobody measured; empty if there is no such link.

    Source: the published runs with a dispatcher, which a test counts by kind of link.
    """
    size = layout.ep * layout.etp
    if model.moe is None or layout.ep == 1 or not engine.communication.dispatches_once_per_host:
        return ""
    spanned = next(each for each in cluster.links if (each.num_devices or cluster.num_devices) >= size)
    return "" if spanned.kind in MEASURED_DISPATCH or spanned.message else spanned.name


def expert_transfers(job: PoolJob, layout: LayerDegrees) -> tuple[Transfer, ...]:
    """Exchanges of tokens in a layer with experts, equally many in both passes; of several kinds, in the mean layer.

    Each rank sends its tokens' choices to the ranks of their experts and receives the results: two exchanges of (ep -
    1) / ep of s b k h / (c t) elements. Ranks that share an expert (etp) also gather and reduce tokens. If the engine
    sends a token to each host only once, choices of a token on the same host share one copy. If the router chooses
    among few groups of experts, more choices share a copy. Tokens in 8 bits carry an fp32 scale for each 128 elements.

    Source: Lepikhin et al., GShard (2020), section 3.2; Megatron-LM, moe/token_dispatcher.py (alltoall); DeepSeek-V3
    (2024), sections 3.2.2 and 3.3.2, for groups and 8-bit dispatch.
    """
    moe = job.model.moe
    if moe is None:
        return ()
    width = moe.latent_size or job.model.hidden_size
    num_bytes = choices_per_microbatch(job, layout) * width * job.compute_bytes
    copies = moe.experts_per_token if job.engine.communication.dispatches_once_per_host else 1
    groups = (moe.num_groups, moe.groups_per_token) if moe.groups_per_token < moe.num_groups else None
    where, shared = _span(layout, layout.ep, layout.etp), _span(layout, layout.etp, 1)
    of = partial(Transfer, line=LineName.EP_COMM, times=_both_ways(1.0))
    token = width * job.compute_bytes * float(job.engine.communication.dispatches_once_per_host)
    exchange = partial(of, kind="all-to-all", where=where, copies=copies, groups=groups)
    low = job.engine.communication.fp8_dispatch and job.training.precision in ("fp8", "fp4")
    exchanges = [exchange(num_bytes=num_bytes, message_bytes=token, times=_both_ways(1.0 if low else 2.0))]
    if low:
        share = (1.0 + 4.0 / 128) / 2
        exchanges.insert(0, exchange(num_bytes=num_bytes * share, message_bytes=token * share))
    kinds: tuple[Kind, ...] = ("all-gather", "reduce-scatter")
    exchanges += [of(kind=kind, where=shared, num_bytes=num_bytes * layout.etp) for kind in kinds]
    return tuple(_as_often(each, share_with_experts(job.model)) for each in exchanges)


def send_transfers(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Transfer, ...]:
    """Sends of a stage: an activation to the next stage and a gradient to the previous stage, per chunk.

    With sequence parallelism each tensor-parallel rank sends its own part. Without sequence parallelism every rank
    sends the whole tensor, or (scatter/gather) its share, which the receivers gather over the tensor-parallel group.
    Either neighbour may be in another pool; sends to such a neighbour are counted half in the forward and half in the
    backward pass. A layer for multi-token prediction before the last chunk has an output of its own, which travels to
    the loss beside the model's.

    Source: Narayanan et al. (SC 2021), sections 3.2 and 4.1.
    """
    num_bytes, stride = _activation_bytes(job, layout), layout.dp * layout.cp * layout.tp
    gathers = np.equal(layout.sp, 0) & job.engine.communication.scatters_pipeline_sends
    sent = num_bytes / np.where(np.equal(layout.sp, 1) | gathers, layout.tp, 1)
    chunks = np.where(np.greater(layout.pp, 1), layout.interleave, 0)
    beyond = chunks * stage.num_crossings / 2 if job.between is not None else 0
    of = partial(Transfer, line=LineName.PP_COMM)
    send = partial(of, kind="send", num_bytes=sent)
    found = [send(where=_span(layout, layout.pp, stride), times=_both_ways(chunks - beyond))]
    if stage.num_mtp is not None:
        last = holds_head(layout, stage)
        outputs: dict[Moment, Number] = {
            "forward": np.where(last, 0.0, stage.num_mtp),
            "backward": np.where(last, job.model.mtp_layers - stage.num_mtp, 0.0),
        }
        found.append(send(where=found[0].where, times=outputs))
    forward, backward = (number - 1 for number in job.engine.communication.send_messages)
    if forward or backward:  # additional small messages, whose bytes are not counted
        described: dict[Moment, Number] = {"forward": forward * chunks, "backward": backward * chunks}
        found.append(of(kind="send", num_bytes=0.0, where=found[0].where, times=described))
    if job.between is not None:
        found.append(send(where=_span(layout, layout.pp, stride, across=True), times=_both_ways(beyond)))
    if job.engine.communication.scatters_pipeline_sends:
        where, times = _span(layout, layout.tp, 1), _both_ways(np.where(gathers, chunks, 0))
        found.append(of(kind="all-gather", where=where, num_bytes=num_bytes, times=times))
    return tuple(found)


# --- transfers of gradients and weights -------------------------------------------------------------------------


def state_transfers(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Transfer, ...]:
    """Data-parallel collectives: they reduce gradients for the optimizer, and gather weights.

    ZeRO-0 all-reduces over all replicas. From ZeRO-1 on, gradients are reduce-scattered in the shard group, then the
    shard is all-reduced over the replicas of the group (HSDP); weights are gathered in the shard group. ZeRO-0 and 1
    reduce once per update, ZeRO-1 and 2 gather once. ZeRO-2 and 3 reduce after every microbatch, unless the engine
    accumulates whole gradients. ZeRO-3 gathers weights for every pass, frozen weights and those of a reference model
    included. ZeRO-2 and 3 reduce layer by layer, and ZeRO-3 gathers layer by layer, each call with its own latency. If
    experts run in a loop, some engines gather each of their matrices alone, after host time of its own (`lone_gather`).
    In engines that shard whole tensors, each rank broadcasts its tensors instead of an all-gather, which costs the
    latency of one ring pass per rank.

    Ranks are in the order of planner/layout.py: tp, then cp, then dp; a shard group is a run of dp * cp / hsdp ranks.
    Experts are spread over runs of ep * etp ranks, so the replicas of an expert are ep * etp ranks apart.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 7.
    """
    held, frozen, zero = trained_params(job, layout, stage), frozen_bytes(job, layout, stage), np.asarray(layout.zero)
    whole = (zero <= 1) | whole_gradients(job, layout)
    # shares, 1 or 0: gradients wait for the last backward pass; weights are gathered once an update, or in every pass
    late, once, each_pass = (np.where(chosen, 1.0, 0.0) for chosen in (whole, (zero == 1) | (zero == 2), zero == 3))
    layers, wait = np.maximum(stage.num_layers, 1), job.engine.communication.rank_wait
    reductions = np.where(zero >= 2, layers, 1)  # calls, of equal parts
    reduces: dict[Moment, Number] = {"backward": reductions * (1.0 - late), "last backward": reductions * late}

    def of_states(
        num_params: Number, frozen_bytes: Number, shards: Number, ranks: Number, stride: Number, experts: bool
    ) -> tuple[Transfer, ...]:
        shard = _span(layout, shards, stride)
        scatter, parts = shard, shards
        if job.engine.communication.reduces_whole:
            scatter, parts = _span(layout, 1, stride), 1.0
        replicas = _span(layout, ranks / parts, stride * parts)
        broadcasts = job.engine.communication.broadcasts_weights
        updated = np.minimum(shards, _num_tensors(job, layout, stage, of_experts=experts)) if broadcasts else 1
        is_alone = experts and job.engine.compute.loops_over_experts and job.engine.communication.lone_gather > 0
        parts_of_gather = _num_tensors(job, layout, stage, of_experts=True) if is_alone else layers
        gatherings = np.where(zero == 3, parts_of_gather, updated)
        waits = job.calibration.host * job.engine.communication.lone_gather * is_alone * (zero == 3)
        gathers: dict[Moment, Number] = {"first forward": updated * once, "backward": gatherings * each_pass}
        gathers["forward"] = gathers["backward"] * (1.0 + job.training.ungraded_passes)
        grads, weights = job.reduced_bytes * num_params, job.state_bytes.weights * num_params
        of = partial(Transfer, line=LineName.DP_COMM, experts=experts)
        reduced, gathered = grads / reductions, (weights + (zero >= 3) * frozen_bytes) / gatherings
        found = (
            of(kind="reduce-scatter", where=scatter, num_bytes=reduced, times=reduces),
            of(kind="all-reduce", where=replicas, num_bytes=reduced / parts, times=reduces),
            of(kind="all-gather", where=shard, num_bytes=gathered, times=gathers, host_seconds=waits),
        )
        return tuple(_checked(job, layout, stage, each) for each in found) if wait else found

    ranks, stride = layout.dp * layout.cp, layout.ep * layout.etp
    common = of_states(held.common, frozen.common, shard_degree(layout), ranks, layout.tp, experts=False)
    if job.model.moe is None:
        return common
    copies, padding = np.maximum(1, ranks * layout.tp // stride), expert_padding(job, layout)
    trained, rest = (padding * each.experts for each in (held, frozen))
    return *common, *of_states(trained, rest, expert_shard_degree(layout), copies, stride, experts=True)


_BUCKET_BYTES: Final = 25 * UNITS["bytes"]["MiB"]
"""Gradients that torch's DDP reduces in one call (nn/parallel/distributed.py, bucket_cap_mb)."""


def _checked(job: PoolJob, layout: Degrees, stage: Stage, transfer: Transfer) -> Transfer:
    """A transfer before each call of which the host awaits every rank of its group (`rank_wait`).

    Without ZeRO the calls are DDP's buckets. A matrix that is larger than a bucket is one.

    Source: torch, distributed/c10d/ProcessGroupWrapper.cpp (runCollectiveChecks).
    """
    matrices = sum_over_layers(job, layout, stage, lambda experts: len(layer_of(job.model, experts=experts).products))
    filled = transfer.num_bytes * job.compute_bytes / job.reduced_bytes / _BUCKET_BYTES
    calls = np.where(np.equal(layout.zero, 0), np.minimum(matrices + 1, filled), 1.0)
    waits = job.engine.communication.rank_wait * transfer.where.size * calls
    return replace(transfer, host_seconds=transfer.host_seconds + waits)


def _num_tensors(job: PoolJob, layout: Degrees, stage: Stage, *, of_experts: bool) -> Number:
    """Tensors that one rank holds of a stage's layers: those of its routed experts, or the others with the norms.

    Queries, keys and values are one tensor.

    Source: InternLM, internlm/model/modules/mha.py (Wqkv) and mlp.py (w1, w2, w3); layer_of.
    """

    def of_layer(experts: bool) -> Number:
        products = [each for each in layer_of(job.model, experts=experts).products if bool(each.count) == of_experts]
        held = ((1 if "query" in each.outputs else len(each.outputs)) * each.num_held for each in products)
        return sum_of(held) / layout.ep if of_experts else sum_of(held) + job.model.norms_per_layer

    return np.maximum(sum_over_layers(job, layout, stage, of_layer), 1)


def tied_transfers(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Transfer, ...]:
    """The all-reduce of the gradients of a tied embedding's two copies, on the first and the last stage.

    Source: Megatron-LM, megatron/core/distributed/finalize_model_grads.py.
    """
    if not job.model.tied_embeddings or job.training.lora_rank:
        return ()
    last = head_stage(layout)
    size, stride = np.where(np.greater(last, 0), 2, 1), np.maximum(last * layout.dp * layout.cp * layout.tp, 1)
    is_end = np.equal(stage.index, 0) | np.equal(stage.index, last)
    num_bytes = job.state_bytes.grads * embedding_params_on_device(job.model, job.engine, layout)
    of = partial(Transfer, line=LineName.TIED_EMBEDDING, kind="all-reduce", num_bytes=num_bytes)
    return tuple(
        of(
            where=_span(layout, size, stride, across=across),
            times={"last backward": np.where(is_end & np.equal(stage.ends_apart, across), 1.0, 0.0)},
        )
        for across in ((False, True) if job.between is not None else (False,))
    )
