"""Segments: how a job is placed in scale-up domains that have several hosts.

A segment is the number of hosts that a layout uses in each domain, as in Slurm. Ranks fill one segment after another,
in the order of planner/layout.py. A group whose ranks are in two segments communicates over the network between
domains. The segment therefore decides which groups stay in one domain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from planner.layout import divisors
from planner.once import once

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.numbers import Number
    from planner.specs.cluster import AnyCluster, ClusterSpec


@once
def domain_devices(cluster: ClusterSpec, segment: Number) -> Number:
    """Devices that a layout uses in each scale-up domain: the devices of `segment` hosts, or all for 0; broadcasts.

    Source: definition; the cluster document may fix the segment if the layout leaves it open.
    """
    most = cluster.hosts_per_domain
    if most > 1 and cluster.segment is not None:
        segment = np.where(np.equal(segment, 0), cluster.segment, segment)
    if most == 1 or not np.any(segment):
        return cluster.scale_up_devices
    is_part = np.greater(segment, 0) & np.less(segment, most)
    return np.where(is_part, segment * cluster.devices_per_host, cluster.scale_up_devices)


def has_choice(cluster: AnyCluster) -> bool:
    """Whether layouts on this cluster can choose a segment: the cluster has one kind of device and several domains.

    Source: definition.
    """
    if len(cluster.pools) > 1:
        return False
    (pool,) = cluster.pools
    return pool.hosts_per_domain > 1 and (pool.segment is not None or pool.num_devices > pool.scale_up_devices)


def num_domains(cluster: ClusterSpec, world_size: Number, segment: Number) -> Number:
    """Number of domains in which a layout of `world_size` devices uses hosts; broadcasts.

    Source: definition.
    """
    return -(-world_size // domain_devices(cluster, segment))


def is_possible(cluster: ClusterSpec, world_size: Number, segment: Number) -> Number:
    """Whether a scheduler can give a layout of `world_size` devices this segment; broadcasts.

    A layout uses either all hosts of each domain (any number in the last), or the same number of hosts in every domain.
    The cluster must have enough domains, if its document states their number.

    Source: Slurm, topology guide, --segment: a number of nodes larger than the segment has to be a multiple of it.
    """
    most, hosts = cluster.hosts_per_domain, -(-world_size // cluster.devices_per_host)
    whole = np.equal(segment, 0) | np.equal(segment, most)
    alike = np.less(segment, most) & (hosts % np.maximum(segment, 1) == 0)
    fixed = np.equal(segment, 0) | np.equal(segment, cluster.segment or segment)
    enough = num_domains(cluster, world_size, segment) <= (cluster.domains or np.inf)
    return (whole | alike) & fixed & enough


def segments_of(cluster: ClusterSpec, world_size: int) -> list[int]:
    """The segments that a layout of `world_size` devices can have, largest first.

    Source: `is_possible`.
    """
    most, hosts = cluster.hosts_per_domain, -(-world_size // cluster.devices_per_host)
    sizes = [cluster.segment] if cluster.segment else sorted({most, *(d for d in divisors(hosts) if d < most)})[::-1]
    return [size for size in sizes if is_possible(cluster, world_size, size)]


def with_segment(cluster: AnyCluster, layout: Layout) -> Layout:
    """The layout with a default segment, if none is given: the segment that keeps most ranks of each group together.

    Segments are compared by how well they keep tp groups together. Ties are broken by etp groups, then by ep, cp and
    data-parallel groups, and then by the pipeline. If segments are still equal, the largest is chosen. If the cluster
    leaves no choice, the segment stays 0.

    Source: planner/cost/collectives.py, members of a group in one domain; checked by a count over all ranks.
    """
    if layout.segment or not has_choice(cluster):
        return layout
    (pool,) = cluster.pools
    inner = layout.stride("pp")
    extents = (layout.tp, layout.etp, layout.ep * layout.etp, layout.cp * layout.tp, inner, layout.world_size)

    def together(segment: int) -> tuple[int, ...]:
        span = int(domain_devices(pool, segment))
        return (*(int(np.gcd(extent, span)) for extent in extents), segment)

    return replace(layout, segment=max(segments_of(pool, layout.world_size), key=together, default=0))
