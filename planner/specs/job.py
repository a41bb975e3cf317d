"""A job: everything that is given before a layout is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.specs.calibration import UNCALIBRATED, CalibrationEntry
from planner.specs.recipe import NAMED_RECIPES

if TYPE_CHECKING:
    from planner.specs.batch import BatchRange
    from planner.specs.calibration import Evidence
    from planner.specs.cluster import ClusterSpec, Precision
    from planner.specs.engine import EngineSpec
    from planner.specs.model import ModelSpec
    from planner.specs.recipe import StateBytes
    from planner.specs.training import TrainingSpec

__all__ = ["Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The input of the cost model and the search.

    headroom: share of device memory that a plan leaves free.
    allow_tp_across_nodes: lift the rule that tensor parallelism stays inside the scale-up domain.
    allow_offload: the search may keep states and activations in the hosts' memory.
    calibration: corrections from measured runs of this device, engine and precision.
    batch: global batch sizes to choose from, where the user gives no single one; the training document has the largest.
    evidence: how far off forecasts of published runs were.
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
    def memory_limit_bytes(self) -> float:
        """What a plan may use of one device."""
        return self.cluster.device.memory * (1 - self.headroom)

    @property
    def host_limit_bytes(self) -> float:
        """What a plan may use of its host's memory for each device; 0 where that is not known."""
        host = self.cluster.host
        return host.memory * host.usable_share / self.cluster.devices_per_host if host else 0.0
