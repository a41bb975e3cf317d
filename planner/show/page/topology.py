"""Where the ranks stand: what the page needs to draw hosts and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.cost.collectives import group
from planner.layout import AXES
from planner.show.screen import clean
from planner.specs.cluster import ClusterSpec

if TYPE_CHECKING:
    from planner.plan import Plan

__all__ = ["topology_data"]


def topology_data(plan: Plan) -> dict[str, Any]:
    """Degrees and strides of the axes, hosts, and the links that a group along each axis crosses."""
    layout, cluster = plan.layout, plan.cluster
    assert isinstance(cluster, ClusterSpec), "a mixed cluster has no page"
    return {
        "axes": [
            {
                "name": axis,
                "degree": layout.degrees[axis],
                "stride": layout.stride(axis),
                "links": [
                    clean(level.link.name) for level in group(cluster, layout.degrees[axis], layout.stride(axis)).levels
                ],
            }
            for axis in AXES
        ],
        "world_size": layout.world_size,
        "num_devices": cluster.num_devices,
        "devices_per_host": cluster.devices_per_host,
    }
