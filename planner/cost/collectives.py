"""Seconds of one collective on one group: latency and bandwidth of the links that the group spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from planner.specs.cluster import ClusterSpec

__all__ = [
    "Group",
    "all_gather_seconds",
    "all_reduce_seconds",
    "all_to_all_seconds",
    "group",
    "reduce_scatter_seconds",
    "ring_all_reduce_seconds",
    "send_seconds",
    "slowest_link",
    "tree_all_reduce_seconds",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a collective needs to know of its group; every field is a number or an array of groups.

    size: ranks. bandwidth: bytes per second that one rank sends in a ring through the group.
    ring_latency: seconds of one round through the ring. tree_latency: seconds up the tree and down again.
    """

    size: Any
    bandwidth: Any
    ring_latency: Any
    tree_latency: Any


def _members(cluster: ClusterSpec, size: Any, stride: Any, span: int | None) -> Any:
    """Ranks of a group that share one instance of a level of `span` devices; where groups differ, the fewest.

    Groups are laid end to end, so a group of extent size * stride starts at a multiple of it. If the extent and
    the span do not divide each other, some group straddles two instances, and its smaller part has
    gcd(extent, span) / stride ranks. The slowest group counts, because the others wait for it.

    Source: rank order of planner/layout.py.
    """
    if span is None or span >= cluster.num_devices:
        return size
    return np.minimum(size, np.maximum(1, np.gcd(size * stride, span) // stride))


def group(cluster: ClusterSpec, size: Any, stride: Any) -> Group:
    """The group of `size` ranks that are `stride` apart, on this cluster.

    Inside one level a ring runs at the level's bandwidth. Where it crosses to the next level, the q ranks that
    share an inner instance bring q network cards, so the ring gets q times a card's bandwidth there.

    Source: NCCL, graph search: one ring for each network card of the host; SimuMax shares cards the same way.
    """
    size, stride = np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64)
    bandwidth = np.full(np.broadcast_shapes(size.shape, stride.shape), np.inf)
    ring_latency = np.zeros_like(bandwidth)
    tree_latency = np.zeros_like(bandwidth)
    inside = np.ones_like(bandwidth)  # ranks that share one instance of the levels so far
    for link in cluster.links:
        members = _members(cluster, size, stride, link.num_devices)
        crosses = members > inside
        bandwidth = np.where(crosses, np.minimum(bandwidth, inside * link.bandwidth * link.efficiency), bandwidth)
        instances = members / inside  # inner instances that this level joins
        hops_in_ring = np.where(crosses, size / inside - size / members, 0.0)
        ring_latency = ring_latency + hops_in_ring * link.latency
        tree_latency = tree_latency + np.where(crosses, 2.0 * np.ceil(np.log2(instances)) * link.latency, 0.0)
        inside = members
    return Group(size=size, bandwidth=bandwidth, ring_latency=ring_latency, tree_latency=tree_latency)


def slowest_link(cluster: ClusterSpec, size: int, stride: int) -> str:
    """Name of the outermost link that a group crosses, `none` for a group of one.

    Source: rank order of planner/layout.py.
    """
    name, inside = "none", 1
    for link in cluster.links:
        members = int(_members(cluster, size, stride, link.num_devices))
        if members > inside:
            name, inside = link.name, members
    return name


def reduce_scatter_seconds(where: Group, num_bytes: Any) -> Any:
    """Ring reduce-scatter of `num_bytes` per rank: n - 1 steps of 1/n of the bytes.

    Source: Patarasuk and Yuan (JPDC 2009); nccl-tests, bus bandwidth factor (n - 1) / n.
    """
    share = (where.size - 1) / where.size
    return np.where(where.size > 1, share * num_bytes / where.bandwidth + where.ring_latency, 0.0)


def all_gather_seconds(where: Group, num_bytes: Any) -> Any:
    """Ring all-gather to `num_bytes` per rank: the steps of a reduce-scatter without the sum.

    Source: Patarasuk and Yuan (JPDC 2009); nccl-tests, bus bandwidth factor (n - 1) / n.
    """
    return reduce_scatter_seconds(where, num_bytes)


def ring_all_reduce_seconds(where: Group, num_bytes: Any) -> Any:
    """Ring all-reduce: a reduce-scatter and an all-gather.

    Source: Patarasuk and Yuan (JPDC 2009): 2 (n - 1) / n of the bytes, 2 (n - 1) steps.
    """
    return reduce_scatter_seconds(where, num_bytes) + all_gather_seconds(where, num_bytes)


def tree_all_reduce_seconds(where: Group, num_bytes: Any) -> Any:
    """Double binary tree all-reduce: twice the bytes through each rank, latency of the depth.

    Source: Sanders et al. (2009); NCCL 2.4: full bandwidth of 2 S / B with logarithmic latency, of which NCCL's
    tuning grants at most 0.92.
    """
    return np.where(where.size > 1, 2.0 * num_bytes / (0.92 * where.bandwidth) + where.tree_latency, 0.0)


def all_reduce_seconds(where: Group, num_bytes: Any) -> Any:
    """The cheaper of ring and tree, as NCCL chooses.

    Source: NCCL, src/graph/tuning.cc.
    """
    return np.minimum(ring_all_reduce_seconds(where, num_bytes), tree_all_reduce_seconds(where, num_bytes))


def send_seconds(cluster: ClusterSpec, stride: Any, num_bytes: Any) -> Any:
    """One rank sends to the rank `stride` further on: the innermost link that joins them.

    Source: alpha-beta model, Hockney (1994).
    """
    stride = np.asarray(stride, dtype=float)
    seconds = np.zeros(np.broadcast_shapes(stride.shape, np.shape(num_bytes)))
    reached = np.zeros(stride.shape, dtype=bool)
    for link in cluster.links:
        here = ~reached & (stride < (link.num_devices or np.inf))
        price = num_bytes / (link.bandwidth * link.efficiency) + link.latency
        seconds = np.where(here, price, seconds)
        reached = reached | here
    return seconds


def all_to_all_seconds(where: Group, num_bytes: Any) -> Any:
    """Every rank sends 1/n of its `num_bytes` to every rank of the group.

    Source: nccl-tests, bus bandwidth factor (n - 1) / n.
    """
    share = (where.size - 1) / where.size
    return np.where(where.size > 1, share * num_bytes / where.bandwidth + where.ring_latency, 0.0)
