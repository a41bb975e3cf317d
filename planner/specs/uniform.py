"""The single pool of a job or of a cluster, for answers that support only one kind of device."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.specs.cluster import AnyCluster, ClusterSpec
    from planner.specs.job import Job, PoolJob

T = TypeVar("T")


def uniform_job(job: Job) -> PoolJob:
    """The job, if its cluster has only one kind of device.

    Raises:
        InputError: the cluster is mixed.
    """
    return _only(job.pools, job.cluster.name)


def uniform_cluster(cluster: AnyCluster) -> ClusterSpec:
    """The cluster, if it has only one kind of device.

    Raises:
        InputError: the cluster is mixed.
    """
    return _only(cluster.pools, cluster.name)


def _only(pools: Sequence[T], cluster: str) -> T:
    if len(pools) > 1:
        raise InputError(f"{cluster} is a mixed cluster", hint="this is answered for clusters of one kind only")
    return pools[0]
