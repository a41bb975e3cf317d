"""The names in Hugging Face checkpoints: the tensors that hold each of our parameters, and the config.json.

Sources: the state dicts of GPT2, Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE and Seed-OSS in the transformers
library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from planner.errors import InputError
from planner.specs.huggingface.writing import config_of
from planner.specs.model import ARCHITECTURES

if TYPE_CHECKING:
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
_KINDS: Final = ("gpt2", "llama", "mistral", "qwen2", "seed_oss", "qwen3", "mixtral", "qwen3_moe")
"""The model types whose tensors have these names; the first that can be the model's is used."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_BUFFERS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


@cache
def _config_of(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of the model without its classes.

    Raises:
        InputError: no type whose naming is known here has the model's blocks.
    """
    config = next(filter(None, (config_of(each, _KINDS) for each in _same_blocks(spec))), None)
    if config is None:
        raise InputError(
            f"{spec.name} has blocks for which no Hugging Face naming is known here",
            hint="weights are those of GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE and Seed-OSS blocks",
        )
    return config


def _same_blocks(spec: ModelSpec) -> list[ModelSpec]:
    """The model, and models that compute the same: fields that its blocks do not use have their defaults."""
    unused = {
        "rope_theta rope_scaling": spec.position != "rope",
        "sliding_window global_every": spec.global_every == 1 or spec.sliding_window >= spec.max_sequence_length,
        "qkv_bias": spec.attention_bias,
        "norm_bias": spec.norm == "rmsnorm",
    }
    names = [name for fields, holds in unused.items() if holds for name in fields.split()]
    plain = {name: type(spec).model_fields[name].default for name in names}
    if moe := spec.moe:
        width = spec.ffn_hidden_size if moe.num_dense_layers or moe.layer_frequency > 1 else moe.ffn_hidden_size
        plain |= {"moe": moe.model_copy(update={"imbalance": 1.0}), "ffn_hidden_size": width}
    # an architecture only names defaults of other fields
    return [spec, *(spec.model_copy(update=plain | {"architecture": each}) for each in ARCHITECTURES)]


def model_type_of(spec: ModelSpec) -> str:
    """The `model_type` that has the model's blocks; raises as `_config_of`."""
    return str(_config_of(spec)["model_type"])


def pieces_of(name: str, spec: ModelSpec) -> tuple[Piece, ...]:
    """The tensors that hold parameter `name`: one tensor, or one for each expert, to be stacked.

    Raises:
        InputError: no type whose naming is known here has the model's blocks.
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


def whole_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json of the model; raises as `model_type_of`."""
    kind = model_type_of(spec)
    named = "GPT2LMHeadModel" if kind == "gpt2" else f"{kind.title().replace('_', '')}ForCausalLM"
    return {**_config_of(spec), "architectures": [named], "torch_dtype": dtype}
