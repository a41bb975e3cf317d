"""A job: everything that is given before a layout is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from planner.specs.calibration import UNCALIBRATED, CalibrationEntry
from planner.specs.cluster import MixedClusterSpec
from planner.specs.recipe import NAMED_RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.specs.batch import BatchRange
    from planner.specs.calibration import Evidence
    from planner.specs.cluster import AnyCluster, ClusterSpec, LinkSpec, Precision
    from planner.specs.engine import EngineSpec
    from planner.specs.model import ModelSpec
    from planner.specs.recipe import StateBytes
    from planner.specs.training import TrainingSpec

__all__ = ["AnyJob", "Job", "MixedJob", "each_pool", "job_on", "pools_of", "with_training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The input of the cost model and the search.

    headroom: share of device memory that a plan leaves free.
    allow_tp_across_nodes: lift the rule that tensor parallelism stays inside the scale-up domain.
    allow_offload: the search may keep states and activations in the hosts' memory.
    calibration: corrections from measured runs of this device, engine and precision.
    batch: global batch sizes to choose from, where the user gives no single one; the training document has the largest.
    evidence: how far off forecasts of published runs were.
    between: of one pool of a mixed cluster, the link to the other pools.
    """

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    engine: EngineSpec
    headroom: float = 0.05
    allow_tp_across_nodes: bool = False
    allow_offload: bool = False
    calibration: CalibrationEntry = UNCALIBRATED
    batch: BatchRange | None = None
    evidence: tuple[Evidence, ...] = ()
    between: LinkSpec | None = None

    @property
    def attention_share(self) -> float:
        """Share of the 16-bit peak that fused attention reaches."""
        return self.calibration.attention or self.cluster.device.efficiency.attention

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes per parameter by the memory recipe of the training document."""
        if self.training.memory_recipe != "engine":
            return NAMED_RECIPES[self.training.memory_recipe]
        return self.engine.states["fp32" if self.training.precision == "fp32" else "mixed"]

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element: 4 in fp32, else 2."""
        return 4 if self.training.precision == "fp32" else 2

    @property
    def core_precision(self) -> Precision:
        """What attention and the output head compute in: the training's precision, 16 bits where it is 8 or 4."""
        return "bf16" if self.training.precision in ("fp8", "fp4") else self.training.precision

    @property
    def expert_precision(self) -> Precision:
        """What products of routed experts are computed in."""
        return self.training.precision if self.engine.fp8_experts else self.core_precision

    @property
    def memory_limit_bytes(self) -> float:
        """What a plan may use of one device."""
        return self.cluster.device.memory * (1 - self.headroom)

    @property
    def host_limit_bytes(self) -> float:
        """What a plan may use of its host's memory for each device; 0 where that is not known."""
        host = self.cluster.host
        return host.memory * host.usable_share / self.cluster.devices_per_host if host else 0.0

    @property
    def has_host(self) -> bool:
        """Whether the memory of the hosts is known, so that something can be kept there."""
        return self.cluster.host is not None

    @property
    def across(self) -> ClusterSpec | None:
        """The network from this pool to the others as a cluster of one link; None where there are no others."""
        return None if self.between is None else self.cluster.model_copy(update={"links": (self.between,)})

    @property
    def num_devices(self) -> int:
        """Devices in the cluster."""
        return self.cluster.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedJob:
    """The same training on a mixed cluster: a job for each pool, which differ in cluster and calibration only."""

    cluster: MixedClusterSpec
    pools: tuple[Job, ...]

    @property
    def model(self) -> ModelSpec:
        """What is trained."""
        return self.pools[0].model

    @property
    def training(self) -> TrainingSpec:
        """How it is trained."""
        return self.pools[0].training

    @property
    def engine(self) -> EngineSpec:
        """The program that trains it."""
        return self.pools[0].engine

    @property
    def batch(self) -> BatchRange | None:
        """Global batch sizes to choose from, where the user gives no single one."""
        return self.pools[0].batch

    @property
    def headroom(self) -> float:
        """Share of device memory that a plan leaves free, in every pool."""
        return self.pools[0].headroom

    @property
    def allow_tp_across_nodes(self) -> bool:
        """Whether tensor parallelism may leave the scale-up domain."""
        return self.pools[0].allow_tp_across_nodes

    @property
    def allow_offload(self) -> bool:
        """Whether the search may keep states and activations in the hosts' memory."""
        return self.pools[0].allow_offload

    @property
    def has_host(self) -> bool:
        """Whether the memory of the hosts of every pool is known."""
        return all(pool.has_host for pool in self.pools)

    @property
    def num_devices(self) -> int:
        """Devices in all pools."""
        return self.cluster.num_devices


AnyJob: TypeAlias = Job | MixedJob


def pools_of(job: AnyJob) -> tuple[Job, ...]:
    """The job on each pool of its cluster; a uniform cluster is one pool."""
    return job.pools if isinstance(job, MixedJob) else (job,)


def job_on(cluster: AnyCluster, calibrations: Sequence[CalibrationEntry], **common: Any) -> AnyJob:
    """The job on a cluster: on a mixed one a job for each pool, with its own calibration; all share `common`."""
    mixed = cluster if isinstance(cluster, MixedClusterSpec) else None
    jobs = tuple(
        Job(cluster=pool, calibration=entry, between=mixed.between if mixed else None, **common)
        for pool, entry in zip(cluster.pools, calibrations, strict=True)
    )
    return MixedJob(cluster=mixed, pools=jobs) if mixed else jobs[0]


def each_pool(job: AnyJob, change: Callable[[Job], Job]) -> AnyJob:
    """The job changed on each pool of its cluster alike."""
    if isinstance(job, Job):
        return change(job)
    pools = tuple(map(change, job.pools))
    cluster = job.cluster.model_copy(update={"pools": tuple(pool.cluster for pool in pools)})
    return MixedJob(cluster=cluster, pools=pools)


def with_training(job: AnyJob, **changes: Any) -> AnyJob:
    """The job with other values in its training document."""
    training = job.training.model_copy(update=changes)
    return each_pool(job, lambda pool: replace(pool, training=training))
