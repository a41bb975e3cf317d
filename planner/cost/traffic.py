"""Seconds of the transfers of a layout (transfers.py lists them), and the part that is exposed in the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.adapters import trained_params
from planner.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    ring_exchange_seconds,
    send_seconds,
)
from planner.cost.compute import PassSeconds, memory_bound_seconds
from planner.cost.groups import group
from planner.cost.transfers import state_transfers
from planner.once import once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from planner.cost.groups import Group
    from planner.cost.stage import Stage
    from planner.cost.transfers import Kind, Moment, Span, Transfer
    from planner.layout import Degrees, LayerDegrees
    from planner.numbers import Flag, Number
    from planner.specs.cluster import ClusterSpec, LinkSpec
    from planner.specs.job import PoolJob

_SECONDS: Final[dict[Kind, Callable[[Group, Number], Number]]] = {
    "all-gather": all_gather_seconds,
    "reduce-scatter": reduce_scatter_seconds,
    "all-reduce": all_reduce_seconds,
    "ring exchange": ring_exchange_seconds,
}


def network_of(job: PoolJob, where: Span) -> ClusterSpec:
    """The calibrated network for a group's transfers: the job's cluster, or the link between its pools."""
    across = job.across if where.across else None
    if across is not None:
        return _slower(across, job.calibration.network, job.calibration.network)
    return _slower(job.cluster, job.calibration.scale_up, job.calibration.network)


@once
def _slower(cluster: ClusterSpec, inner: float, outer: float) -> ClusterSpec:
    """The cluster with a slower network.

    inner: factor on times of the innermost link.
    outer: factor on times of all other links.
    """
    if inner == outer == 1:
        return cluster
    links = (_slower_link(link, outer if number else inner) for number, link in enumerate(cluster.links))
    return cluster.model_copy(update={"links": tuple(links)})


def _slower_link(link: LinkSpec, times: float) -> LinkSpec:
    changes = {key: getattr(link, key) * times for key in ("latency", "startup", "message")}
    changes["bandwidth"] = link.bandwidth / times
    if link.measured_bandwidth is not None:
        changes["measured_bandwidth"] = link.measured_bandwidth / times
    return link.model_copy(update=changes)


def priced(job: PoolJob, transfers: Sequence[Transfer]) -> Iterator[tuple[Transfer, Number]]:
    """Each transfer with the seconds of a single run; broadcasts.

    A single pair of ranks may reach less than the link's bandwidth (send_share of the engine profile).

    Source: collectives.py.
    """
    spans = {each.where for each in transfers if each.kind != "send"}
    groups = {where: group(network_of(job, where), where.size, where.stride, segment=where.segment) for where in spans}
    for each in transfers:
        if each.kind == "send":
            network, num_bytes = network_of(job, each.where), each.num_bytes / job.engine.communication.send_share
            yield each, send_seconds(network, each.where.stride, num_bytes, segment=each.where.segment)
        elif each.kind == "all-to-all":
            where = groups[each.where]
            yield (
                each,
                all_to_all_seconds(
                    where, each.num_bytes, copies=each.copies, groups=each.groups, message_bytes=each.message_bytes
                ),
            )
        else:
            where = groups[each.where]
            yield each, _SECONDS[each.kind](where, each.num_bytes) + each.host_seconds * np.greater(where.size, 1)


def busy_seconds(job: PoolJob, transfers: Sequence[Transfer]) -> dict[Moment, Number]:
    """Total seconds of the transfers in each moment (such as the forward pass), for one microbatch or one update.

    Source: sum of the transfers.
    """
    alike: dict[int, tuple[Mapping[Moment, Number], Number]] = {}  # equal times are multiplied once
    for each, seconds in priced(job, transfers):
        alike[id(each.times)] = each.times, alike.get(id(each.times), (None, 0.0))[1] + seconds
    found: dict[Moment, Number] = {}
    for counts, seconds in alike.values():
        for when, times in counts.items():
            found[when] = found[when] + times * seconds if when in found else times * seconds
    return {"forward": 0.0, "backward": 0.0, "first forward": 0.0, "last backward": 0.0, **found}


def hidden_tensor_parallel_seconds(job: PoolJob, layout: LayerDegrees, comm: Number, products: Number) -> Number:
    """Part of `comm` seconds of collectives that `products` seconds of matrix products hide.

    A product is cut into tp pieces, and each piece is computed while the next one is transferred. The time of one piece
    is exposed, and so is the time by which the collectives exceed the products. Without sequence parallelism the
    collectives are all-reduces, which are not cut.

    Source: Transformer Engine, user buffers; Megatron-LM, arguments.py (--tp-comm-overlap needs --sequence-parallel);
    Wang et al. (ASPLOS 2023), section 5.1.
    """
    if not job.engine.overlap.tensor_parallel:
        return 0.0 * comm
    could = np.minimum(comm * (1.0 - 1.0 / layout.tp) * np.equal(layout.sp, 1), products)
    return could * job.engine.overlap.tensor_parallel_share


def hidden_behind_weight_gradients(
    job: PoolJob, layout: LayerDegrees, comm: Number, weight_gradients: Number
) -> Number:
    """Part of `comm` seconds of a layer's backward collectives that the products for its weight gradients hide.

    The all-reduce of a column-parallel product's input gradient starts before the product's weight gradient is
    computed. Only the part that takes longer than the weight gradient is exposed. Column-parallel products hold about
    half of the weights. Without sequence parallelism all backward collectives are such all-reduces. With sequence
    parallelism the all-gather at the row-parallel products stays exposed.

    Source: Megatron-LM, megatron/core/tensor_parallel/layers.py; Korthikanti et al. (2022), section 4.2.2.
    """
    if not job.engine.overlap.weight_gradients:
        return 0.0 * comm
    return np.minimum(comm * np.where(np.equal(layout.sp, 1), 0.5, 1.0), weight_gradients / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSeconds:
    """Seconds of a stage's background transfers: data-parallel reductions and gathers, and copies to the host.

    A microbatch's seconds (busy_each, exposed) occur m times in a step, and seconds named `once` with each update of
    the weights. Busy seconds include hidden seconds.
    """

    busy_each: Number
    exposed: PassSeconds
    busy_once: Number
    exposed_once: Number


_SLOWED: Final = 0.3
"""Seconds of work that are lost while a collective runs beside the work for a second.

The value is chosen on published runs, with whole families held out. A collective takes processors (24 channels of NCCL
inside a host, of an H100's 132), memory bandwidth and power from the work. Lee et al. (arXiv 2507.03114) measured that
computing is 18.9 % slower beside collectives, and that a step without overlap takes only 10.2 % longer: averages to
which 0.6 would correspond.
"""


def _not_hidden(seconds: Number, num_units: Number, window: Number, overlaps: Flag) -> Number:
    """Exposed part of `seconds` of transfers in `num_units` equal pieces, if `window` seconds of work can hide pieces.

    The last piece is always exposed, because no work follows that could hide it. Beside the other pieces, of C seconds,
    W seconds of work (`window`) take `_SLOWED` times C longer. Both together take max(C, W + a C), so at most (1 - a) C
    seconds are hidden.

    Source: derived here from bucketed overlap, Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3, and as
    `planner.cost.prices.hidden_expert_seconds`.
    """
    last = seconds / np.maximum(num_units, 1)
    others = seconds - last
    return np.where(overlaps, last + np.maximum(_SLOWED * others, others - window), seconds)


def data_parallel_seconds(job: PoolJob, layout: Degrees, stage: Stage, window: PassSeconds) -> BesideSeconds:
    """Seconds of one stage's data-parallel communication, and their exposed part.

    The last microbatch's backward pass and the first forward pass hide transfers that run once per step; passes without
    gradients hide nothing of them, because the policy's own modules start and await the gathers. ZeRO-3 gathers one
    layer ahead, so a gather is exposed by the time by which it exceeds a layer's work, and at least by the time that
    the work loses beside it. On a CPU nothing is hidden, because the cores that compute also move the messages.
    `window` are the seconds of the stage's layers for one microbatch, which can hide communication.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 7; overlap layer by layer as torch FSDP2 prefetches.
    """
    busy, layers = busy_seconds(job, state_transfers(job, layout, stage)), stage.num_layers
    share = np.maximum(layers - 1, 0) / np.maximum(layers, 1)
    front, back = share * window.forward, share * window.backward
    first = front / (1 + job.training.ungraded_passes)
    beside: dict[Moment, Number] = {"forward": front, "first forward": first, "backward": back, "last backward": back}
    overlap = job.engine.overlap
    overlaps = overlap.data_parallel & (np.equal(layout.zero, 0) | overlap.sharded_data_parallel)
    overlaps &= job.cluster.kind != "cpu"
    hides = {when: overlaps & (overlap.weight_gathering | (when != "first forward")) for when in beside}
    exposed = {when: _not_hidden(busy[when], layers, work, hides[when]) for when, work in beside.items()}
    copies: Number = 0.0
    if job.engine.compute.reduction_bytes:
        num_bytes = job.engine.compute.reduction_bytes * trained_params(job, layout, stage).total
        copied = np.less_equal(layout.zero, 1) & np.greater(layout.dp * layout.cp, 1)
        copies = np.where(copied, memory_bound_seconds(job, num_bytes), 0.0)
    return BesideSeconds(
        busy_each=busy["backward"] + busy["forward"],
        exposed=PassSeconds(forward=exposed["forward"], backward_input=exposed["backward"]),
        busy_once=busy["last backward"] + busy["first forward"] + copies,
        exposed_once=exposed["last backward"] + exposed["first forward"] + copies,
    )


_HOP_PROCESSORS: Final = (32, 4)
"""Processors that run the sends of a hop, inside a scale-up domain and beyond it.

NCCL uses two processors for each NVLink (at most 32, the channels of a communicator), and one for each 14 GB/s of a 50
GB/s adapter (src/graph/paths.cc, ncclTopoGetNchannels and ncclTopoComputeP2pChannels).
"""


def hidden_context_parallel_seconds(job: PoolJob, layout: LayerDegrees, exchange: Number, core: Number) -> Number:
    """Hidden seconds of one pass's ring exchange: each hop runs beside a part of the attention core.

    While a hop takes C seconds, attention continues on the share 1 - a of the processors, so (1 - a) C seconds are
    hidden. Engines that gather keys and values, or exchange sequence for heads, hide nothing.

    Source: Liu et al., Ring Attention (2023), section 3; derived here, as `planner.cost.prices.hidden_expert_seconds`.
    """
    if job.engine.communication.context_exchange != "ring":
        return np.zeros(np.shape(exchange))
    inside = np.less_equal(layout.tp * layout.cp, job.cluster.scale_up_devices)
    taken = np.where(inside, *_HOP_PROCESSORS) / job.cluster.device.num_processors
    return np.minimum((1.0 - np.minimum(taken, 0.5)) * exchange, np.maximum(layout.cp - 1, 0) * core / layout.cp)
