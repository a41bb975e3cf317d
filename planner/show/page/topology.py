"""Placement of the ranks, as data from which the page draws hosts and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.cost.collectives import group
from planner.cost.run import devices_in_use
from planner.cost.segments import domain_devices
from planner.layout import AXES
from planner.show.screen import clean

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.specs.cluster import ClusterSpec


def topology_data(plan: Plan) -> dict[str, Any]:
    """Return degrees and strides of the axes, and the pools in rank order; a uniform cluster is one pool."""
    layout = plan.layout
    axes = [{"name": axis, "degree": layout.degrees[axis], "stride": layout.stride(axis)} for axis in AXES]
    return {"axes": axes, "world_size": layout.world_size, "pools": _pools(plan)}


def _pools(plan: Plan) -> list[dict[str, Any]]:
    """Return for each pool its hosts, first rank and number of ranks, and the links of a group along each axis."""
    used = {pool.name: count for pool, count in devices_in_use(plan.cluster, plan.layout)}
    order = list(dict.fromkeys(plan.layout.pools))
    pools = sorted(plan.cluster.pools, key=lambda pool: order.index(pool.name) if pool.name in order else len(order))
    found, first = [], 0
    for pool in pools:
        count = used.get(pool.name, 0)
        found.append(
            {
                "name": clean(pool.name) if len(pools) > 1 else "",
                "hosts": pool.hosts,
                "devices_per_host": pool.devices_per_host,
                "domain": _domain(plan, pool),
                "first": first,
                "num_ranks": count,
                "links": {axis: _links(plan, pool, axis) for axis in AXES},
            }
        )
        first += count
    return found


def _domain(plan: Plan, pool: ClusterSpec) -> dict[str, Any] | None:
    """Return the name of the scale-up domain and its number of used hosts; None if a domain is one host."""
    taken = int(domain_devices(pool, plan.layout.segment)) // pool.devices_per_host
    return {"name": clean(pool.links[0].name), "hosts": taken} if pool.hosts_per_domain > 1 else None


def _links(plan: Plan, pool: ClusterSpec, axis: str) -> list[str]:
    layout = plan.layout
    if axis == "pp" and len(set(layout.pools)) > 1 and plan.cluster.between:
        return [clean(plan.cluster.between.name)]
    found = group(pool, layout.degrees[axis], layout.stride(axis), segment=layout.segment)
    return [clean(level.link.name) for level in found.levels]
