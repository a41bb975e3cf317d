"""A job: everything that is given before a layout is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.specs.calibration import UNCALIBRATED, CalibrationEntry
from planner.specs.engine import StateBytes

if TYPE_CHECKING:
    from planner.specs.cluster import ClusterSpec, Precision
    from planner.specs.engine import EngineSpec
    from planner.specs.model import ModelSpec
    from planner.specs.training import TrainingSpec

__all__ = ["Job"]

_NAMED_RECIPES = {
    # Rajbhandari et al., ZeRO (SC 2020), section 3.1: fp16 weights 2, gradients 2, optimizer K = 12
    "zero-16": StateBytes(weights=2, sharded_weights=2, grads=2, optimizer=12),
    # the lecture's textbook figure: 2M + 2M + 16M, so that 1B parameters take 20 GB
    "textbook-20": StateBytes(weights=2, sharded_weights=2, grads=2, optimizer=16),
    # Megatron-LM, theoretical_memory_usage.py: fp32 main gradients
    "megatron-18": StateBytes(weights=2, sharded_weights=2, grads=4, optimizer=12),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The input of the cost model and the search.

    headroom: share of device memory that a plan leaves free.
    allow_tp_across_nodes: lift the rule that tensor parallelism stays inside the scale-up domain.
    calibration: corrections from measured runs of this device, engine and precision.
    """

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    engine: EngineSpec
    headroom: float = 0.05
    allow_tp_across_nodes: bool = False
    calibration: CalibrationEntry = UNCALIBRATED

    @property
    def attention_share(self) -> float:
        """Share of the 16-bit peak that fused attention reaches."""
        return self.calibration.attention or self.cluster.device.efficiency.attention

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes per parameter by the memory recipe of the training document."""
        if self.training.memory_recipe != "engine":
            return _NAMED_RECIPES[self.training.memory_recipe]
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
