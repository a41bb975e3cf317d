"""Training recipes as data: bytes per parameter, and the state of each optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from planner.specs.document import InputDocument
from planner.specs.yaml import shipped_yaml

Optimizer = Literal["adamw", "adamw-8bit", "sgd", "adafactor", "muon"]
Loss = Literal["whole", "fused", "chunked", "fused-linear"]
CudaGraphs = Literal["none", "layers", "step"]
Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "pipedream"]
Offload = Literal["none", "optimizer", "activations", "both", "params+states", "params+states+activations"]
_OfPlainLayers = Literal["query", "key", "value", "output", "gate", "up", "down", "all-linear"]
_OfExperts = Literal["expert_gate", "expert_up", "expert_down", "shared_gate", "latent_down", "latent_up"]
_OfAttention = Literal["query_down", "query_up", "key_value_down", "key_value_up", "attention_gate"]
_OfIndexers = Literal["index_query", "index_key", "index_weights"]
_OfStates = Literal["in_proj", "x_proj", "dt_proj", "out_proj", "in_proj_qkvz", "in_proj_ba", "qkv_proj", "output_gate"]
_OfKimi = Literal["b_proj", "f_proj", "g_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
_OfRecurrences = Literal["linear_x", "linear_y", "input_gate", "recurrent_gate", "linear_out", "receptance"]
_OfMatrixMemory = Literal["ogate", "igate", "fgate"]
Projection = Literal[
    _OfPlainLayers, _OfExperts, _OfAttention, _OfIndexers, _OfStates, _OfKimi, _OfRecurrences, _OfMatrixMemory
]
"""Matrices that can have an adapter, by the names of `planner.cost.operators` and of transformers' modules."""
FrozenWeights = Literal["16-bit", "nf4"]
MemoryRecipe = Literal[
    "engine",
    "textbook-20",
    "zero-16",
    "megatron-18",
    "pure-bf16",
    "precision-aware-fp32",
    "precision-aware",
    "fp8-moments",
]


class StateBytes(InputDocument):
    """Bytes kept for each parameter.

    weights: the weights that the forward and backward passes use; unsharded below ZeRO-3.
    sharded_weights: the part of these weights that ZeRO-3 keeps between uses; 0 if ZeRO-3 makes the weights from the
    master weights.
    grads: accumulated gradients; sharded from ZeRO-2 on, if the engine can.
    grad_copy: a 16-bit gradient in addition to the fp32 sum, sharded and freed with it.
    master: the optimizer's master weights, if they are a copy separate from `weights`; sharded from ZeRO-1 on.
    zero_master: further master weights from ZeRO-1 on: a copy even if `weights` are in fp32.
    step_grads: copies of gradients that the update makes, when no activations are in memory; sharded like the optimizer
    state.
    moment: one running mean of the optimizer (AdamW has two, SGD one); sharded with the master weights.
    moment_copy: fp32 copy of a low-precision moment, which the update makes when no activations are in memory.
    """

    weights: float = Field(ge=0)
    sharded_weights: float = Field(ge=0)
    grads: float = Field(ge=0)
    grad_copy: float = Field(default=0, ge=0)
    master: float = Field(ge=0)
    zero_master: float = Field(default=0, ge=0)
    step_grads: float = Field(default=0, ge=0)
    moment: float = Field(default=4, ge=0)
    moment_copy: float = Field(default=0, ge=0)


_ROWS: Final[Any] = shipped_yaml(Path(__file__).with_name("recipes.yaml")).plain
NAMED_RECIPES: Final = {name: StateBytes(**row) for name, row in _ROWS.items()}
"""The bytes of each named recipe; `engine` means the bytes in the engine's profile."""

ADAM_RECIPES: Final = ("textbook-20", "zero-16", "megatron-18")
"""Recipes from the literature that assume Adam's state."""
