"""The names in Hugging Face checkpoints: the tensors that hold each of our parameters, and the config.json.

Sources: the state dicts and configuration classes of GPT2, Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE in the
transformers library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.specs.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a Hugging Face tensor.

    part, num_parts: which part, for a tensor that is cut along its output axis (GPT-2 keeps queries, keys and values in
    one tensor).
    transposed: whether the tensor is stored as (in, out) and ours as (out, in), or the other way around.
    """

    name: str
    part: int = 0
    num_parts: int = 1
    transposed: bool = False


_GPT2 = {
    "embedding.tokens": "wte",
    "embedding.positions": "wpe",
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
    "norm": "ln_f",
}
_LLAMA = {
    "embedding.tokens": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "norm": "model.norm",
}
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.{}", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts.{}.{}", ("gate_proj", "up_proj", "down_proj")),
}
"""Model type -> names of the router, of an expert's matrix, and of its gate, up and down parts."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_BUFFERS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


def model_type_of(spec: ModelSpec) -> str:
    """The `model_type` that has the model's blocks.

    Raises:
        InputError: no known type has these blocks.
    """
    found = next((kind for kind, fits in _KINDS.items() if fits(spec)), None)
    if found is None:
        raise InputError(
            f"{spec.name} has blocks for which no Hugging Face naming is known here",
            hint="weights are read and written for GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE blocks",
        )
    return found


def _is_gpt2(spec: ModelSpec) -> bool:
    blocks = (spec.norm, spec.position, spec.activation, spec.attention_bias, spec.mlp_bias)
    usual = blocks == ("layernorm", "learned", "gelu", True, True) and spec.num_kv_heads == spec.num_heads
    return usual and not spec.features and not spec.extra_positions


def _is_llama(spec: ModelSpec, *features: str, biases: bool = False) -> bool:
    """Whether the blocks are Llama's, apart from `features`; with `biases`, the blocks may have biases."""
    usual = (spec.norm, spec.position, spec.activation) == ("rmsnorm", "rope", "swiglu")
    unbiased = biases or not (spec.attention_bias or spec.mlp_bias)
    return usual and unbiased and set(spec.features) == set(features)


def _has_plain_experts(spec: ModelSpec) -> bool:
    moe = spec.moe
    return moe is not None and not (
        moe.shared_ffn_hidden_size
        or moe.num_dense_layers
        or moe.router_bias
        or moe.expert_bias
        or moe.layer_frequency > 1
    )


_KINDS: Final[dict[str, Callable[[ModelSpec], bool]]] = {
    "gpt2": _is_gpt2,
    "llama": lambda spec: _is_llama(spec, biases=True),
    "mistral": lambda spec: _is_llama(spec, "sliding_window") and not spec.global_every,
    "qwen2": lambda spec: _is_llama(spec, "qkv_bias"),
    "qwen3": lambda spec: _is_llama(spec, "qk_norm") and spec.qk_norm == "head",
    "mixtral": lambda spec: _is_llama(spec, "moe") and _has_plain_experts(spec),
    "qwen3_moe": lambda spec: _is_llama(spec, "moe", "qk_norm") and spec.qk_norm == "head" and _has_plain_experts(spec),
}
"""Model type -> a test whether a model has the type's blocks; the first type that matches is used."""


def pieces_of(name: str, spec: ModelSpec) -> tuple[Piece, ...]:
    """The tensors that hold parameter `name`: one tensor, or one for each expert, to be stacked.

    Raises:
        InputError: see `model_type_of`.
    """
    kind = model_type_of(spec)
    if name == "head.weight":
        return (Piece(name="lm_head.weight"),)
    layer = _LAYER.fullmatch(name)
    inner = layer[2] if layer else name
    prefix = "" if layer is None else f"{'transformer.h' if kind == 'gpt2' else 'model.layers'}.{layer[1]}."
    if inner.startswith(("ffn.router", "ffn.experts")):
        return _expert_pieces(inner, prefix, kind, spec)
    module, _, leaf = inner.rpartition(".")
    if kind != "gpt2":
        return (Piece(name=f"{prefix}{_LLAMA[module]}.{leaf}"),)
    prefix = prefix or "transformer."
    fused = ("attention.query", "attention.key", "attention.value")
    if module in fused:
        part, transposed = fused.index(module), leaf == "weight"
        return (Piece(name=f"{prefix}attn.c_attn.{leaf}", part=part, num_parts=3, transposed=transposed),)
    is_matrix = leaf == "weight" and module.startswith(("attention.", "ffn."))
    return (Piece(name=f"{prefix}{_GPT2[module]}.{leaf}", transposed=is_matrix),)


def _expert_pieces(inner: str, prefix: str, kind: str, spec: ModelSpec) -> tuple[Piece, ...]:
    assert spec.moe is not None
    router, expert, matrices = _EXPERTS[kind]
    if inner == "ffn.router.weight":
        return (Piece(name=f"{prefix}{router}.weight"),)
    matrix = matrices[("gate", "up", "down").index(inner.rpartition(".")[2])]
    names = (f"{prefix}{expert.format(number, matrix)}.weight" for number in range(spec.moe.num_experts))
    return tuple(Piece(name=name, transposed=True) for name in names)


def is_no_parameter(name: str, spec: ModelSpec) -> bool:
    """Whether a checkpoint's tensor is a buffer of old versions, or the second copy of a tied embedding."""
    return _BUFFERS.fullmatch(name) is not None or (spec.tied_embeddings and name == "lm_head.weight")


def config_of(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json of the model.

    Raises:
        InputError: see `model_type_of`.
    """
    kind = model_type_of(spec)
    classes = {"gpt2": "GPT2LMHeadModel", "qwen3_moe": "Qwen3MoeForCausalLM"}
    common: dict[str, Any] = {
        "model_type": kind,
        "architectures": [classes.get(kind, f"{kind.capitalize()}ForCausalLM")],
        "torch_dtype": dtype,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    if kind == "gpt2":
        return common | {
            "n_layer": spec.num_layers,
            "n_embd": spec.hidden_size,
            "n_head": spec.num_heads,
            "n_inner": spec.ffn_hidden_size,
            "n_positions": spec.max_sequence_length,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": spec.norm_epsilon,
        }
    return (
        common
        | {
            "num_hidden_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_size,
            "intermediate_size": spec.ffn_hidden_size,
            "max_position_embeddings": spec.max_sequence_length,
            "hidden_act": "silu",
            "rms_norm_eps": spec.norm_epsilon,
            "rope_theta": spec.rope_theta,
        }
        | _scaling(spec)
        | _special(kind, spec)
    )


def _scaling(spec: ModelSpec) -> dict[str, Any]:
    """The key of scaled rotary positions, in a form that both transformers 4 and 5 read."""
    scaling = spec.rope_scaling
    if scaling is None:
        return {}
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency,
            "high_freq_factor": scaling.high_frequency,
            "original_max_position_embeddings": scaling.original_max_sequence_length,
        }
    }


def _special(kind: str, spec: ModelSpec) -> dict[str, Any]:
    """Keys that only some model types have."""
    experts: dict[str, Any] = {}
    if spec.moe is not None:
        experts = {"num_experts_per_tok": spec.moe.experts_per_token}
        if kind == "mixtral":
            experts |= {"num_local_experts": spec.moe.num_experts, "intermediate_size": spec.moe.ffn_hidden_size}
        else:
            experts |= {
                "num_experts": spec.moe.num_experts,
                "moe_intermediate_size": spec.moe.ffn_hidden_size,
                "norm_topk_prob": True,
            }
    special: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": spec.attention_bias, "mlp_bias": spec.mlp_bias},
        "mistral": {"sliding_window": spec.sliding_window},
        "mixtral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"attention_bias": False},
        "qwen3_moe": {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    }
    return special[kind] | experts
