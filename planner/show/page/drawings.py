"""What the page's script draws: the executed step as arrays, deflated and without repetition, and the ranks' places."""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.answers.executed import PASS_NAMES
from planner.cost.groups import group
from planner.cost.run import devices_in_use
from planner.cost.segments import domain_devices
from planner.layout import AXES
from planner.show.screen import clean
from planner.show.words import line_label
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.answers.executed import ExecutedStep
    from planner.plan import Plan
    from planner.specs.cluster import ClusterSpec


_MOST_PASSES: Final = 1_000_000
"""Largest number of passes that are drawn; with more, a browser needs seconds to read them."""
_ROUNDING: Final = 1e-12


def timeline_data(step: ExecutedStep) -> dict[str, Any]:
    """Return the kinds of passes with their parts, the number of passes of each stage, and arrays over all passes.

    `passes` is the base64 text of three deflated little-endian arrays with one value per pass: the seconds that the
    stage waits before the pass (float32), the microbatch (uint32), and the index into `kinds` (uint16). All passes of
    one kind have the same duration.
    """
    passes, keys = step.timeline, list(step.kinds)
    counts = np.bincount(passes.stage, minlength=passes.pp)
    if len(passes.kind) > _MOST_PASSES:
        counts, data = np.zeros(passes.pp, dtype=int), b""
    else:
        data = _packed(step, keys, counts)
    return {
        "kinds": [
            {
                "name": PASS_NAMES[kind],
                "letter": kind,
                "chunk": chunk,
                "seconds": _length(step, (kind, chunk)),
                "parts": [[line_label(name), seconds] for name, seconds in step.kinds[kind, chunk].parts],
            }
            for kind, chunk in keys
        ],
        "counts": counts.tolist(),
        "num_passes": len(passes.kind),
        "passes": base64.b64encode(data).decode("ascii"),
        "pipeline_seconds": step.pipeline_seconds,
        "step_seconds": step.step_seconds,
        "tail": [[[line_label(name), seconds] for name, seconds in each] for each in step.tail],
        "interleave": passes.interleave,
    }


def _length(step: ExecutedStep, key: tuple[str, int]) -> float:
    return sum_of(seconds for _, seconds in step.kinds[key].parts)


def _packed(step: ExecutedStep, keys: list[tuple[str, int]], counts: Any) -> bytes:
    passes = step.timeline
    index = {key: number for number, key in enumerate(keys)}
    kind = np.array([index[str(k), int(c)] for k, c in zip(passes.kind, passes.chunk, strict=True)])
    seconds = np.array([_length(step, key) for key in keys])[kind]
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    before = np.roll(passes.start + seconds, 1)
    before[firsts] = 0.0
    waits = passes.start - before
    waits[waits < _ROUNDING * step.pipeline_seconds] = 0.0
    columns = (waits.astype("<f4"), passes.microbatch.astype("<u4"), kind.astype("<u2"))
    return zlib.compress(b"".join(column.tobytes() for column in columns), 9)


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
