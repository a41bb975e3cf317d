"""Matrices with adapters, by the names that PEFT and Megatron-Core give to modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from planner.cost.adapters import matrices_of
from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from planner.emit.target import Given

PLAIN: Final = ("query", "key", "value", "output", "gate", "up", "down")
"""Matrices of most models, for a file that names no model."""

EXPERTS: Final = ("expert_gate", "expert_up", "expert_down")

PEFT: Final[dict[str, str]] = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "query_down": "q_a_proj",
    "query_up": "q_b_proj",
    "key_value_down": "kv_a_proj_with_mqa",
    "key_value_up": "kv_b_proj",
    "shared_gate": "shared_expert_gate",
    **{name: name for name in ("in_proj", "x_proj", "dt_proj", "out_proj", "in_proj_qkvz", "in_proj_ba")},
}
"""Matrix -> module of transformers that holds it alone."""

MEGATRON: Final[dict[str, tuple[str, ...]]] = {
    "linear_qkv": ("query", "key", "value"),
    "linear_proj": ("output",),
    "linear_fc1": ("gate", "up", "expert_gate", "expert_up"),
    "linear_fc2": ("down", "expert_down"),
    "linear_q_proj": ("query",),
    "linear_q_down_proj": ("query_down",),
    "linear_q_up_proj": ("query_up",),
    "linear_kv_down_proj": ("key_value_down",),
    "linear_kv_up_proj": ("key_value_up",),
    "in_proj": ("in_proj",),
    "out_proj": ("out_proj",),
}
"""Module -> matrices that the module fuses. Source: Megatron-Bridge, peft/lora.py, target_modules."""


def adapters_of(given: Given, key: str, rank: int, parts: Iterable[str]) -> Mapping[str, Any]:
    """Adapters of this rank beside those of these matrices that the model has; `all-linear` becomes their names.

    Raises:
        InputError: the model has none of the matrices.
    """
    have = matrices_of(given.model) if given.model is not None else PLAIN
    wanted = set(parts)
    found = [name for name in have if name in wanted or ("all-linear" in wanted and name not in EXPERTS)]
    if not found:
        raise InputError("the model has none of these matrices", where=key, hint=f"known: {', '.join(have)}")
    return {"training.lora_rank": rank, "training.lora_targets": tuple(found)}
