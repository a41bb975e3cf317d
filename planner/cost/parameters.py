"""How many parameters a model has, and how many of them one device holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from planner.layout import Degrees
    from planner.specs.engine import EngineSpec
    from planner.specs.model import ModelSpec

__all__ = [
    "attention_params",
    "embedding_params_on_device",
    "end_params_on_device",
    "ffn_params",
    "layer_params",
    "layer_params_on_device",
    "norm_params",
    "num_matmul_params",
    "num_params",
    "padded_vocab",
    "stage_params_on_device",
]


def norm_params(model: ModelSpec) -> int:
    """Parameters of one norm: a weight, and for LayerNorm a bias.

    Source: definition of LayerNorm and RMSNorm.
    """
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def _query_width(model: ModelSpec) -> int:
    return model.num_heads * model.head_size


def _qkv_width(model: ModelSpec) -> int:
    return (model.num_heads + 2 * model.num_kv_heads) * model.head_size


def _ffn_matrices(model: ModelSpec) -> int:
    return 3 if model.activation == "swiglu" else 2


def attention_params(model: ModelSpec) -> int:
    """Weights and biases of one attention block: h (a + 2g) d + a d h, biases (a + 2g) d + h.

    Source: Megatron-LM, megatron/training/theoretical_memory_usage.py.
    """
    weights = model.hidden_size * (_qkv_width(model) + _query_width(model))
    return weights + (_qkv_width(model) + model.hidden_size if model.attention_bias else 0)


def ffn_params(model: ModelSpec) -> int:
    """Weights and biases of one feed-forward block: 2 h f with GELU, 3 h f with SwiGLU.

    Source: Megatron-LM, megatron/training/theoretical_memory_usage.py.
    """
    weights = _ffn_matrices(model) * model.hidden_size * model.ffn_hidden_size
    inner_biases = (_ffn_matrices(model) - 1) * model.ffn_hidden_size
    return weights + (inner_biases + model.hidden_size if model.mlp_bias else 0)


def layer_params(model: ModelSpec) -> int:
    """Parameters of one transformer layer, with its two norms.

    Source: sum of the parts above.
    """
    return attention_params(model) + ffn_params(model) + 2 * norm_params(model)


def _position_params(model: ModelSpec) -> int:
    return model.max_sequence_length * model.hidden_size if model.position == "learned" else 0


def num_params(model: ModelSpec) -> int:
    """Parameters of the whole model, tied weights counted once, vocabulary not padded.

    Source: sum of the parts; checked against transformers' modules in the tests. For a GPT it equals
    12 L h^2 (1 + 13/(12h) + (V + s)/(12Lh)) plus the final norm, Narayanan et al. (SC 2021), equation 2.
    """
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return embeddings + _position_params(model) + model.num_layers * layer_params(model) + norm_params(model)


def num_matmul_params(model: ModelSpec) -> int:
    """Parameters that a token is multiplied with: all weight matrices and the output head.

    Source: Chowdhery et al., PaLM (2022), appendix B: embeddings and biases do no matrix product.
    """
    attention = model.hidden_size * (_qkv_width(model) + _query_width(model))
    ffn = _ffn_matrices(model) * model.hidden_size * model.ffn_hidden_size
    return model.num_layers * (attention + ffn) + model.vocab_size * model.hidden_size


def padded_vocab(model: ModelSpec, engine: EngineSpec, layout: Degrees) -> Any:
    """Vocabulary rows of one tensor-parallel rank: V padded to a multiple of (engine's multiple * tp), over tp.

    Source: Megatron-LM, --make-vocab-size-divisible-by; torch DTensor pads to a multiple of tp.
    """
    return np.ceil(model.vocab_size / (engine.vocab_multiple * layout.tp)) * engine.vocab_multiple


def layer_params_on_device(model: ModelSpec, layout: Degrees) -> Any:
    """Parameters of one layer on one tensor-parallel rank.

    Column-parallel weights and biases and row-parallel weights are cut by tp; row-parallel biases and norms
    are whole on every rank.

    Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """
    whole = 2 * norm_params(model)
    whole += model.hidden_size * (int(model.attention_bias) + int(model.mlp_bias))
    return (layer_params(model) - whole) / layout.tp + whole


def embedding_params_on_device(model: ModelSpec, engine: EngineSpec, layout: Degrees) -> Any:
    """Parameters of one (vocabulary x hidden) matrix on one tensor-parallel rank.

    Source: Shoeybi et al., Megatron-LM (2019), section 3: the embedding is cut along the vocabulary.
    """
    return padded_vocab(model, engine, layout) * model.hidden_size


def end_params_on_device(model: ModelSpec, engine: EngineSpec, layout: Degrees, stage: Any) -> Any:
    """Parameters outside the layers on one device: embeddings on the first stage, norm and head on the last.

    Tied embeddings are one matrix on one stage, and two copies when the pipeline has several.

    Source: Megatron-LM, megatron/core/models/gpt/gpt_model.py (shared embedding of first and last stage).
    """
    matrix = embedding_params_on_device(model, engine, layout)
    first, last = np.equal(stage, 0), np.equal(stage, layout.pp - 1)
    own_head = last & ~(first & model.tied_embeddings)
    return first * (matrix + _position_params(model)) + own_head * matrix + last * norm_params(model)


def stage_params_on_device(model: ModelSpec, engine: EngineSpec, layout: Degrees, stage: Any, num_layers: Any) -> Any:
    """Parameters that one device of a pipeline stage holds, before any ZeRO sharding.

    Source: sum of the layers and the ends.
    """
    return num_layers * layer_params_on_device(model, layout) + end_params_on_device(model, engine, layout, stage)
