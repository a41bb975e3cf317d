"""Training recipes as data: bytes per parameter, and the state of each optimizer."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from planner.specs.document import InputDocument

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


NAMED_RECIPES: Final = {
    # Rajbhandari et al., ZeRO (SC 2020), section 3.1: fp16 weights 2, gradients 2, optimizer K = 12. Megatron without
    # --accumulate-allreduce-grads-in-fp32 and NeMo with grad_reduce_in_fp32=False keep the same
    "zero-16": StateBytes(weights=2, sharded_weights=2, grads=2, master=4),
    # the lecture's textbook figure: 2M + 2M + 16M (fp32 weights, gradients and both moments): 1B parameters take 20 GB
    "textbook-20": StateBytes(weights=2, sharded_weights=2, grads=2, master=8),
    # Megatron-LM, theoretical_memory_usage.py: fp32 main gradients
    "megatron-18": StateBytes(weights=2, sharded_weights=2, grads=4, master=4),
    # everything in bf16 and no master weights: torchtitan, training.dtype = bfloat16
    "pure-bf16": StateBytes(weights=2, sharded_weights=2, grads=2, master=0, moment=2),
    # Megatron-LM, --use-precision-aware-optimizer with --exp-avg-dtype bf16 and --exp-avg-sq-dtype bf16; DeepSeek-V3
    # (2024), section 3.3.3, keeps its moments in bf16. fp32 gradients, master weights whole. The update unpacks the
    # moments of all its parameters (Transformer Engine, pytorch/optimizers/fused_adam.py, get_unscaled_state)
    "precision-aware-fp32": StateBytes(weights=2, sharded_weights=2, grads=4, master=4, moment=2, moment_copy=4),
    # the same with --main-grads-dtype bf16; the 16 bits of the master weights that the bf16 weights lack are stored
    # (store_param_remainders of Megatron-LM's optimizer_config.py, on by default)
    "precision-aware": StateBytes(weights=2, sharded_weights=2, grads=2, master=2, moment=2, moment_copy=4),
    # the same with --exp-avg-dtype fp8 and --exp-avg-sq-dtype fp8
    "fp8-moments": StateBytes(weights=2, sharded_weights=2, grads=2, master=2, moment=1, moment_copy=4),
}
"""The bytes of each named recipe; `engine` means the bytes in the engine's profile."""

ADAM_RECIPES: Final = ("textbook-20", "zero-16", "megatron-18")
"""Recipes from the literature that assume Adam's state."""
