"""The training document: what must hold whatever the layout."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from planner.specs.cluster import Precision
from planner.specs.document import Document

__all__ = ["MemoryRecipe", "TrainingSpec"]

MemoryRecipe = Literal["engine", "textbook-20", "zero-16", "megatron-18"]


class TrainingSpec(Document):
    """The workload of one optimizer step, and the length of the run.

    global_batch_size: sequences per optimizer step.
    memory_recipe: bytes per parameter; `engine` takes what the engine really keeps.
    dropout: probability; 0 stores no masks.
    """

    sequence_length: int = Field(ge=1, le=100_000_000)
    global_batch_size: int = Field(ge=1, le=100_000_000)
    precision: Precision = "bf16"
    optimizer: Literal["adamw"] = "adamw"
    memory_recipe: MemoryRecipe = "engine"
    attention: Literal["flash", "unfused"] = "flash"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    tokens: float | None = Field(default=None, gt=0, description="token budget of the whole run")
    learning_rate: float = Field(default=3e-4, gt=0)
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=10, ge=0)
    steps: int = Field(default=100, ge=1, description="optimizer steps of `planner launch`")
    weight_decay: float = Field(default=0.1, ge=0)
    gradient_clip: float = Field(default=1.0, gt=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    seed: int = Field(default=1234, ge=0)

    @field_validator("tokens", "learning_rate", mode="before")
    @classmethod
    def _accept_counts(cls, value: Any) -> Any:
        return float(value) if type(value) is int else value
