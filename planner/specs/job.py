"""A job: all inputs that are given before a layout is chosen."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from planner.specs.calibration import UNCALIBRATED, CalibrationEntry, Spread
from planner.specs.recipe import NAMED_RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.specs.batch import BatchRange
    from planner.specs.calibration import Evidence
    from planner.specs.cluster import AnyCluster, ClusterSpec, LinkSpec, Precision
    from planner.specs.engine import EngineSpec
    from planner.specs.model import ModelSpec
    from planner.specs.recipe import Loss, StateBytes
    from planner.specs.training import TrainingSpec


_SPREAD: Final = Spread()
_FLASH_1: Final = 1.3
"""Time of FlashAttention's first version over that of its second.

The second is 1.3 to 2.5 times as fast as the first in Triton (Dao, FlashAttention-2, 2023, section 4). The value within
this range is chosen on the published runs of LLM Foundry.
"""
RISK: Final = 0.05
"""Accepted chance that a plan does not fit, unless `--risk` changes it."""
MOST_RISK: Final = 0.95
"""Upper limit of `--risk`: above it, "fits" and "does not fit" would overlap (`planner.cost.chance`)."""
LEAST_RISK: Final = 1e-6
"""Lower limit of `--risk`: no number of measured peaks supports a smaller chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The input of the cost model and the search: the documents, and the user's exceptions from rules.

    risk: accepted chance that a plan does not fit (`planner.cost.chance`).
    headroom: share of device memory that a plan leaves free; this plain limit, if given, replaces the chance.
    memory_share: share of the allowed memory that a search may use.
    allow_tp_across_nodes: lift the rule that tensor parallelism stays inside the scale-up domain.
    allow_offload: the search may keep states and activations in the hosts' memory.
    own_length: whether the sequence length is the model's own, because nobody gave one.
    batch: global batch sizes to choose from, if the user gives no single size; the training document has the largest.
    evidence: forecast errors of published runs.
    spread: how much wider than these errors a band is.
    members: the job on each pool of a mixed cluster.
    """

    model: ModelSpec
    cluster: AnyCluster
    training: TrainingSpec
    engine: EngineSpec
    risk: float = RISK
    headroom: float | None = None
    memory_share: float = 1.0
    allow_tp_across_nodes: bool = False
    allow_offload: bool = False
    own_length: bool = False
    batch: BatchRange | None = None
    evidence: tuple[Evidence, ...] = ()
    spread: Spread = _SPREAD
    members: tuple[PoolJob, ...] = ()

    @property
    def pools(self) -> tuple[PoolJob, ...]:
        """The job on each pool of its cluster; a cluster of one kind is one pool."""
        return self.members

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes per parameter, by the memory recipe of the training document; an engine may keep more in pure-bf16."""
        recipe, kept = self.training.memory_recipe, self.engine.memory.states
        named = (kept.get("pure-bf16") if recipe == "pure-bf16" else None) or NAMED_RECIPES.get(recipe)
        return named or kept["fp32" if self.training.precision == "fp32" else "mixed"]

    @property
    def loss(self) -> Loss:
        """How the output head and the loss are computed: the training document's choice, or the engine's default."""
        if not self.training.method.reads_logits:
            return "whole"
        return self.engine.can.losses[0] if self.training.loss == "engine" else self.training.loss

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element: 4 in fp32, else 2."""
        return 4 if self.training.precision == "fp32" else 2

    @property
    def reduced_bytes(self) -> float:
        """Bytes of one gradient element while ranks sum it: as accumulated, or as the backward pass produces it."""
        grads = self.state_bytes.grads
        return min(grads, self.compute_bytes) if self.engine.communication.reduces_16_bit else grads

    @property
    def core_precision(self) -> Precision:
        """Precision of attention and the output head: the training precision, or bf16 if training is in fp8 or fp4."""
        return "bf16" if self.training.precision in ("fp8", "fp4") else self.training.precision

    @property
    def attention_precision(self) -> Precision:
        """Precision of the two products of fused attention."""
        in_8_bits = self.training.precision in ("fp8", "fp4") and self.engine.compute.fp8_attention
        return "fp8" if in_8_bits else self.core_precision

    @property
    def expert_precision(self) -> Precision:
        """Precision of the routed experts' products."""
        return self.training.precision if self.engine.compute.fp8_experts else self.core_precision

    @property
    def has_hosts(self) -> bool:
        """Whether the host memory of every pool is known; without it nothing can be offloaded."""
        return all(pool.cluster.host is not None for pool in self.pools)

    @property
    def num_devices(self) -> int:
        """Devices in all pools."""
        return self.cluster.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJob(Job):
    """The job on one pool of equal hosts; it is the whole job if the cluster has no other pool.

    calibration: corrections from measured runs of the pool's device with this engine and precision.
    between: the link to the other pools; None if there are no other pools.
    """

    cluster: ClusterSpec
    calibration: CalibrationEntry = UNCALIBRATED
    between: LinkSpec | None = None

    @property
    def pools(self) -> tuple[PoolJob, ...]:
        """The pool itself."""
        return (self,)

    @property
    def attention_share(self) -> float:
        """Share of the 16-bit peak that the engine's fused attention reaches."""
        own, kernel = self.cluster.device.efficiency, self.engine.compute.attention_kernel
        share = own.attention if kernel == "latest" else own.attention_flash_2 or own.attention
        slower = self.calibration.core_attention * (_FLASH_1 if kernel == "flash-1" else 1.0)
        return self.calibration.attention or min(1.0, share / slower)

    @property
    def launch_seconds(self) -> float:
        """Host time per operator that the device cannot hide."""
        return self.cluster.device.efficiency.launch * self.calibration.host

    @property
    def whole_memory_bytes(self) -> float:
        """All memory of one device that a program can use, its context and buffers included, without headroom.

        The driver reports this number (`memory` in the device file): the card's memory less firmware and error
        correction. The ledger counts the context in its runtime line, so totals are compared with this number.
        """
        return self.cluster.device.memory

    @property
    def host_memory_bytes(self) -> float:
        """Host memory that training can use for each device; 0 if it is unknown."""
        host = self.cluster.host
        return host.memory * host.usable_share / self.cluster.devices_per_host if host else 0.0

    @property
    def across(self) -> ClusterSpec | None:
        """The network to the other pools, as a cluster with one link; None if there are no other pools."""
        return None if self.between is None else self.cluster.model_copy(update={"links": (self.between,)})


def job_on(cluster: AnyCluster, calibrations: Sequence[CalibrationEntry], **common: Any) -> Job:
    """The job on a cluster, with one calibration for each pool; all pools have the fields of `common`."""
    entries = zip(cluster.pools, calibrations, strict=True)
    pools = (PoolJob(cluster=pool, calibration=entry, between=cluster.between, **common) for pool, entry in entries)
    return join_pools(cluster, tuple(pools))


def each_pool(job: Job, change: Callable[[PoolJob], PoolJob]) -> Job:
    """The job with the same change on each pool of its cluster."""
    return join_pools(job.cluster, tuple(map(change, job.pools)))


def with_training(job: Job, **changes: Any) -> Job:
    """The job with other values in its training document."""
    training = job.training.model_copy(update=changes)
    return each_pool(job, lambda pool: replace(pool, training=training))


def join_pools(cluster: AnyCluster, pools: tuple[PoolJob, ...]) -> Job:
    """The job on these pools, with the cluster document that they form; the first pool supplies all shared fields."""
    if len(pools) == 1:
        return pools[0]
    shared = {f.name: getattr(pools[0], f.name) for f in fields(Job) if f.name not in ("cluster", "members")}
    cluster = cluster.model_copy(update={"pools": tuple(pool.cluster for pool in pools)})
    return Job(cluster=cluster, members=pools, **shared)
