"""Select the segments of scale-up domains to try: the segments that no other segment makes useless.

In domains of more than 64 hosts, only powers of two and the whole domain are considered.
"""

from __future__ import annotations

from itertools import chain, permutations
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.segments import domain_devices, is_possible
from planner.cost.shapes import distinct_rows
from planner.search.space.degree_rules import tp_within_pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.numbers import IntArray
    from planner.search.space.constraints import Constraints
    from planner.specs.cluster import ClusterSpec
    from planner.specs.job import PoolJob

_MOST_TRIED: Final = 64  # hosts of a domain up to which every segment is tried; larger domains use powers of two


def segments_to_try(
    job: PoolJob, constraints: Constraints, tp: IntArray, inner: IntArray, pp: IntArray
) -> tuple[IntArray, IntArray]:
    """Partitions of the devices with each segment that may be the best: positions of the partitions, and the segments.

    inner, tp, pp: devices per stage, tensor and pipeline parallel degree of each partition, [n]. A partition without a
    possible segment gets the last segment, so that a rule can refuse it with a reason.
    """
    cluster, most = job.cluster, job.cluster.hosts_per_domain
    every = range(1, most + 1) if most <= _MOST_TRIED else [2**power for power in range(most.bit_length())]
    fixed = constraints.value_of("segment") or cluster.segment
    tried = constraints.left_of("segment", [int(fixed)] if fixed else sorted({*every, most}))
    if not tried:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    first, position = distinct_rows([tp, inner, pp])
    tp, inner, pp = tp[first], inner[first], pp[first]
    possible = np.array([is_possible(cluster, inner * pp, size) & tp_within_pool(job, tp, size) for size in tried])
    is_forbidden = any(condition.key == "segment" for condition in chain(*constraints.forbidden))
    chosen = possible.copy() if is_forbidden else _useful(cluster, tried, possible, inner, pp)
    chosen[-1] |= ~possible.any(axis=0)
    number, row = np.nonzero(chosen[:, position])
    return row, np.array(tried, dtype=np.int64)[number]


def _useful(
    cluster: ClusterSpec, segments: list[int], possible: NDArray[np.bool_], inner: IntArray, pp: IntArray
) -> NDArray[np.bool_]:
    """Whether each possible segment is useful (no other makes it useless), [segments, n]; fewest hosts first.

    The price of a group depends on the segment only through g, the greatest common divisor of the group's extent (its
    size times its stride) and the devices used of each domain: g / stride ranks share a domain. A group is assumed to
    be no slower if more of its ranks share a domain, because the link inside a domain is faster. The latency that a
    tree over few domains saves is ignored. The extent of a group inside a stage divides the stage's devices. In units
    of the stage's devices, the extent is 2 for a send, pp for the whole pipeline, and 2 (pp - 1) for a tied embedding.
    Segment A therefore makes segment B useless if two conditions hold. First, A's g of two stages is a multiple of B's
    g. Second, A keeps the pipeline and its ends together whenever B does. If two segments make each other useless, the
    segment with more hosts is kept.

    Source: `planner.cost.collectives`; tested against a search over every segment.
    """
    world, ends = inner * pp, 2 * np.maximum(pp - 1, 1) * inner
    spans = [domain_devices(cluster, size) for size in segments]
    shared = [np.gcd(2 * inner, span) for span in spans]
    whole = [np.stack([span % world == 0, np.gcd(ends, span) == ends]) for span in spans]
    useful = possible.copy()
    for one, other in permutations(range(len(segments)), 2):
        as_good = (shared[other] % shared[one] == 0) & (whole[other] >= whole[one]).all(axis=0)
        alike = (shared[other] == shared[one]) & (whole[other] == whole[one]).all(axis=0)
        useful[one] &= ~(possible[other] & as_good & (~alike | (other > one)))
    return useful
