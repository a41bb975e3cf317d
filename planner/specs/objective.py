"""Objectives of training, from a table: next tokens, preferences, rewards, and answers that the model generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from planner.specs.yaml import shipped_yaml

ObjectiveName = Literal["next-token", "dpo", "kto", "orpo", "reward", "value-head", "grpo"]
Reference = Literal["resident", "policy", "host", "none"]
"""Where the weights of a reference model are: on the devices beside the trained model's; they are the trained model's
own, without its adapters; in the host's memory during a training step; or nowhere, because no step reads them."""


class Objective(NamedTuple):
    """What a step computes and keeps beside the passes of the model that it trains; the table explains the fields."""

    sequences: int = 1
    policy_passes: int = 0
    reference: Reference = "none"
    reference_passes: int = 0
    outputs: int = 0
    reads_logits: bool = True
    logit_copies: int = 0
    narrow_copies: float = 0.0
    generates: bool = False


_TABLE: Final[Any] = shipped_yaml(Path(__file__).with_name("objectives.yaml")).plain
OBJECTIVES: Final[dict[str, Objective]] = {name: Objective(**row) for name, row in _TABLE.items()}
