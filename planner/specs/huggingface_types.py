"""The meaning of the keys of a Hugging Face config.json: one table for each `model_type`.

Defaults come from the configuration classes in the transformers library. A key without a default is required. `a|b`
means two spellings of one key.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from planner.specs.huggingface_blocks import (
    bamba,
    both_biases,
    convolution,
    gate,
    gated_deltanet,
    jamba,
    kda,
    layers_by,
    lightning,
    mamba2,
    mixture,
    nemotron_h,
    norm_if,
    pure_mamba,
    pure_mamba2,
    recurrent_gemma,
    rwkv,
    sparse,
    whole_stack,
    window,
    windows,
    xlstm,
    zamba,
    zamba2,
)
from planner.specs.huggingface_encoders import (
    bart,
    big_bird_bias,
    bigbird_pegasus_bias,
    ernie,
    head_by_architecture,
    learned_positions,
    narrow_embeddings,
    prompts,
    roc_bert,
    roformer,
    whisper,
    xmod,
)
from planner.specs.huggingface_families import (
    after_experts,
    cpmant,
    dbrx,
    differential,
    doge,
    dots3,
    ernie_bias,
    experts_head_bias,
    floor_head,
    further_words,
    gate_biases,
    gated_biases,
    gated_norms,
    gemma3n,
    gemma4,
    gpt_neo,
    granite_experts,
    hrm,
    hunyuan_experts,
    inner_norms,
    jetmoe,
    laguna,
    laguna_gate,
    latent_bias,
    latent_heads,
    lfm2_width,
    longcat,
    mimo,
    minimax_m2,
    minimax_m3,
    mllama,
    modernbert,
    moshi,
    mpt,
    multi_query,
    neox_japanese,
    never_tied,
    output_bias,
    persimmon,
    phi,
    qwen3_5,
    qwen3_next,
    shared_bias,
    stablelm,
    sub_norms,
    xlm,
    xlnet,
)
from planner.specs.huggingface_rules import (
    base_model,
    expert_groups,
    falcon,
    four_times_hidden,
    ignore,
    late_window,
    llama4,
    local_window,
    one_width,
    opt_embeddings,
    patch_positions,
    rotary,
    shared_experts,
    sparse_steps,
    two_stacks,
)
from planner.specs.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.specs.huggingface_config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """How the keys of one model_type become a model document.

    keys: key of the file -> our field; fields of nested documents begin with `moe.`, `mla.` or `patches.`.
    defaults: values of missing keys. A null key leaves the default of our field.
    implied: our fields that the type fixes.
    must: keys for which only one value is supported.
    rules: functions for fields that depend on more than one key.
    recorded: more keys, whose defaults are in huggingface_defaults.json (written by tools/hf_defaults.py).
    """

    architecture: str
    keys: dict[str, str]
    defaults: dict[str, Any] = field(default_factory=dict)
    implied: dict[str, Any] = field(default_factory=dict)
    must: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    rules: tuple[Callable[[Config], None], ...] = ()
    recorded: bool = True

    def translate(self, config: Config) -> None:
        """Fill the model document of `config`.

        Raises:
            InputError: a required key is missing, or its value fits no field of ours.
        """
        config.put("architecture", self.architecture, "model_type")
        for target, value in self.implied.items():
            config.put(target, value, "model_type")
        for key, target in self.keys.items():
            self._take(config, key, target)
        for key, allowed in self.must.items():
            if config.get(key, allowed[0]) not in allowed:
                wanted = " or ".join(quoted(value) for value in allowed)
                config.refuse(key, f"`{key}` of {quoted(config.get(key))} is not supported", f"supported: {wanted}")
        config.raise_if_missing()
        for rule in self.rules:
            rule(config)
        config.raise_if_missing()

    def _take(self, config: Config, key: str, target: str) -> None:
        spellings = key.split("|")
        config.read.update(spellings)
        found = next((each for each in spellings if each in config.values), "")
        if found:
            value = config.values[found]
        elif key in self.defaults:
            value = self.defaults[key]
        else:
            config.missing.append(key)
            return
        if value is not None or target in _NEVER_NULL:
            config.put(target, value, found or "model_type")


_NEVER_NULL: Final = (
    *("num_layers", "hidden_size", "num_heads", "vocab_size", "max_sequence_length"),
    *("moe.num_experts", "moe.experts_per_token", "mla.kv_lora_rank"),
    *("mla.nope_head_size", "mla.rope_head_size", "mla.value_head_size", "ffn_hidden_size", "moe.ffn_hidden_size"),
)
"""Our fields that have no default; a null of the file is refused at its key, unless a rule fills the field."""


_SHAPE: Final = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "vocab_size": "vocab_size",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_sequence_length",
}
_LLAMA_KEYS: Final = _SHAPE | {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_size",
    "tie_word_embeddings": "tied_embeddings",
    "rms_norm_eps": "norm_epsilon",
}
_LLAMA_DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
_BIASES: Final = {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_NO_BIASES: Final = {"attention_bias": False, "mlp_bias": False}
_TOP_K: Final = {"num_experts_per_tok": "moe.experts_per_token"}
_EXPERTS: Final = _TOP_K | {"num_experts|num_local_experts": "moe.num_experts"}
_LOCAL_EXPERTS: Final = _TOP_K | {"num_local_experts": "moe.num_experts"}
_SILU: Final = {"hidden_act": ("silu", "swish")}
_GEGLU: Final = {"tie_word_embeddings": True, "head_dim": 256}


def _llama_like(architecture: str = "llama", /, **parts: Any) -> ModelType:
    """A Llama block with additional `keys`, `defaults`, `implied`, `must` and `rules`."""
    return ModelType(
        architecture=architecture,
        keys=_LLAMA_KEYS | parts.get("keys", {}),
        defaults=_LLAMA_DEFAULTS | parts.get("defaults", {}),
        implied=parts.get("implied", {}),
        must=parts.get("must", _SILU),
        rules=(rotary, *parts.get("rules", ())),
    )


def _deepseek_like(num_shared: int, num_dense: int, groups: tuple[int, int], longest: int = 4096) -> ModelType:
    """A Llama-like model with latent attention, shared experts and routed experts."""
    return ModelType(
        architecture="llama",
        keys={key: target for key, target in _LLAMA_KEYS.items() if key != "head_dim"}
        | _TOP_K
        | {
            "n_routed_experts": "moe.num_experts",
            "moe_intermediate_size": "moe.ffn_hidden_size",
            "first_k_dense_replace": "moe.num_dense_layers",
            "num_nextn_predict_layers": "mtp_layers",
            "q_lora_rank": "mla.q_lora_rank",
            "kv_lora_rank": "mla.kv_lora_rank",
            "qk_nope_head_dim": "mla.nope_head_size",
            "qk_rope_head_dim": "mla.rope_head_size",
            "v_head_dim": "mla.value_head_size",
        },
        defaults=_LLAMA_DEFAULTS
        | {
            "num_key_value_heads": None,
            "first_k_dense_replace": num_dense,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 1536,
            "max_position_embeddings": longest,
        },
        must=_SILU | {"moe_layer_freq": (1,), "mlp_bias": (False,)},
        rules=(rotary, latent_heads, latent_bias, shared_experts(num_shared), expert_groups(*groups)),
    )


_GPT2: Final = ModelType(
    architecture="gpt",
    keys={
        "n_layer|num_hidden_layers": "num_layers",
        "n_embd|hidden_size": "hidden_size",
        "n_head|num_attention_heads": "num_heads",
        "n_positions|max_position_embeddings": "max_sequence_length",
        "vocab_size": "vocab_size",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tied_embeddings",
    },
    defaults={"n_positions|max_position_embeddings": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    must={"add_cross_attention": (False,)},
    rules=(four_times_hidden("n_inner"),),
)
_GPT_NEOX: Final = ModelType(
    architecture="neox",
    keys=_SHAPE
    | {
        "layer_norm_eps": "norm_epsilon",
        "tie_word_embeddings": "tied_embeddings",
        "attention_bias": "attention_bias",
        "use_parallel_residual": "parallel_attention",
    },
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    rules=(rotary,),
)
_OPT: Final = ModelType(
    architecture="gpt",
    keys={key: target for key, target in _SHAPE.items() if key != "intermediate_size"}
    | {"ffn_dim": "ffn_hidden_size", "tie_word_embeddings": "tied_embeddings"},
    defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
    implied={"extra_positions": 2},
    must={
        "do_layer_norm_before": (True,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "_remove_final_layer_norm": (False,),
    },
    rules=(opt_embeddings,),
)
_BLOOM: Final = ModelType(
    architecture="gpt",
    keys={
        "n_layer|num_hidden_layers": "num_layers",
        "hidden_size|n_embed": "hidden_size",
        "n_head|num_attention_heads": "num_heads",
        "vocab_size": "vocab_size",
        "seq_length": "max_sequence_length",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tied_embeddings",
    },
    defaults={"seq_length": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    implied={"position": "alibi", "embedding_norm": True},
    rules=(four_times_hidden(),),
)
_FALCON: Final = ModelType(
    architecture="falcon",
    keys={
        "num_hidden_layers|n_layer": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads|n_head": "num_heads",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_sequence_length",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tied_embeddings",
    },
    defaults={"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    rules=(rotary, four_times_hidden("ffn_hidden_size"), falcon),
)
_STARCODER2: Final = ModelType(
    architecture="gpt",
    keys=_SHAPE
    | {
        "num_key_value_heads": "num_kv_heads",
        "tie_word_embeddings": "tied_embeddings",
        "norm_epsilon": "norm_epsilon",
    },
    defaults={"max_position_embeddings": 4096, "tie_word_embeddings": True, "norm_epsilon": 1e-5},
    implied={"position": "rope"},
    must={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    rules=(both_biases("use_bias"), rotary, local_window(None, 0)),
)
_BERT: Final = ModelType(
    architecture="bert",
    keys=_SHAPE | {"type_vocab_size": "num_token_types", "layer_norm_eps": "norm_epsilon"},
    defaults={"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12},
    implied={"pooler": True},
    must={"position_embedding_type": ("absolute",), "add_cross_attention": (False,)},
    rules=(head_by_architecture(),),
)


def _bert(*rules: Callable[[Config], None], without: str = "", **implied: Any) -> ModelType:
    """BERT, with additional rules and fields."""
    keys = {key: target for key, target in _BERT.keys.items() if key != without}
    rules = rules or (head_by_architecture(),)
    return replace(_BERT, keys=keys, implied=_BERT.implied | implied, rules=rules)


_BART_KEYS: Final = {
    "decoder_layers|num_decoder_layers": "num_layers",
    "d_model|hidden_size": "hidden_size",
    "decoder_attention_heads|num_decoder_attention_heads": "num_heads",
    "decoder_ffn_dim": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings|max_target_positions": "max_sequence_length",
    "tie_word_embeddings": "tied_embeddings",
}


def _bart(*rules: Callable[[Config], None]) -> ModelType:
    """The decoder of a descendant of BART."""
    return ModelType(
        architecture="gpt",
        keys=_BART_KEYS,
        defaults={"tie_word_embeddings": True, "max_position_embeddings|max_target_positions": 1024},
        implied={"cross_attention": True},
        rules=rules,
    )


_MARIAN_KEYS: Final = {key: target for key, target in _BART_KEYS.items() if key != "vocab_size"} | {
    "decoder_vocab_size|vocab_size": "vocab_size"
}
_T5: Final = ModelType(
    architecture="t5",
    keys={
        "d_model": "hidden_size",
        "d_kv": "head_size",
        "d_ff": "ffn_hidden_size",
        "num_heads": "num_heads",
        "vocab_size": "vocab_size",
        "n_positions": "max_sequence_length",
        "relative_attention_num_buckets": "relative_buckets",
        "layer_norm_epsilon": "norm_epsilon",
    },
    defaults={"n_positions": 512, "relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-6},
    rules=(two_stacks,),
)
_VIT: Final = ModelType(
    architecture="vit",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ffn_hidden_size",
        "image_size": "patches.image_size",
        "patch_size": "patches.patch_size",
        "num_channels": "patches.num_channels",
        "layer_norm_eps": "norm_epsilon",
    },
    defaults={"image_size": 224, "patch_size": 16, "num_channels": 3, "layer_norm_eps": 1e-12},
    implied={"pooler": True},
    must={"qkv_bias": (True,)},
    rules=(patch_positions, base_model),
)

_LONGCAT: Final = {
    "num_layers": "num_layers",
    "ffn_hidden_size": "ffn_hidden_size",
}
_KIMI: Final = {
    "num_experts": "moe.num_experts",
    "num_experts_per_token|num_experts_per_tok": "moe.experts_per_token",
    "model_max_length|max_position_embeddings": "max_sequence_length",
    "num_nextn_predict_layers": "mtp_layers",
}
_MAMBA: Final = ModelType(
    architecture="llama",
    keys={
        "num_hidden_layers|n_layer": "num_layers",
        "hidden_size|d_model": "hidden_size",
        "vocab_size": "vocab_size",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tied_embeddings",
    },
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    implied={"position": "none", "norms_per_layer": 1, "max_sequence_length": 8192},
    rules=(pure_mamba,),
)
_RWKV: Final = ModelType(
    architecture="gpt",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "context_length": "max_sequence_length",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tied_embeddings",
    },
    implied={"position": "none", "embedding_norm": True, "attention_bias": False, "mlp_bias": False},
    rules=(rwkv,),
)
_XLSTM: Final = ModelType(
    architecture="llama",
    keys={
        "num_hidden_layers|num_blocks": "num_layers",
        "hidden_size|embedding_dim": "hidden_size",
        "num_heads": "num_heads",
        "vocab_size": "vocab_size",
        "tie_word_embeddings": "tied_embeddings",
        "norm_eps": "norm_epsilon",
    },
    implied={"position": "none", "max_sequence_length": 8192},
    must={"weight_mode": ("single",)},
    rules=(xlstm,),
)
_NEMOTRON_H: Final = ModelType(
    architecture="llama",
    keys={
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim|attention_head_dim": "head_size",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "tied_embeddings",
        "mlp_bias": "mlp_bias",
        "num_nextn_predict_layers": "mtp_layers",
        "layer_norm_epsilon|norm_eps|rms_norm_eps": "norm_epsilon",
    },
    implied={"activation": "gelu", "position": "none"},
    rules=(nemotron_h, never_tied),
)
_PERSIMMON: Final = ModelType(
    architecture="neox",
    keys=_SHAPE | {"tie_word_embeddings": "tied_embeddings", "layer_norm_eps": "norm_epsilon"},
    implied={"parallel_attention": False},
    rules=(rotary, persimmon),
)
_PHI: Final = ModelType(
    architecture="neox",
    keys=_SHAPE
    | {
        "num_key_value_heads": "num_kv_heads",
        "tie_word_embeddings": "tied_embeddings",
        "layer_norm_eps": "norm_epsilon",
    },
    implied={"norms_per_layer": 1, "head_bias": True},
    rules=(rotary, phi),
)
_GPTJ: Final = ModelType(
    architecture="neox",
    keys=_GPT2.keys,
    implied={"norms_per_layer": 1, "head_bias": True, "attention_bias": False},
    rules=(four_times_hidden("n_inner"),),
)
_GPT_NEO: Final = ModelType(
    architecture="gpt",
    keys={
        "num_layers|num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_heads|num_attention_heads": "num_heads",
        "max_position_embeddings": "max_sequence_length",
        "vocab_size": "vocab_size",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tied_embeddings",
    },
    implied={"attention_bias": False},
    rules=(four_times_hidden("intermediate_size"), gpt_neo),
)
_GPT_NEOX_JAPANESE: Final = ModelType(
    architecture="neox",
    keys={key: target for key, target in _SHAPE.items() if key != "intermediate_size"}
    | {"tie_word_embeddings": "tied_embeddings", "layer_norm_eps": "norm_epsilon"},
    implied={"attention_bias": False, "mlp_bias": False, "parallel_attention": False},
    rules=(rotary, neox_japanese),
)
_OPENAI_GPT: Final = replace(_GPT2, implied={"final_norm": False}, rules=(four_times_hidden(),))
_CTRL: Final = replace(
    _GPT2,
    keys=_GPT2.keys | {"dff": "ffn_hidden_size"},
    implied={"position": "none", "head_bias": True},
    rules=(),
)
_XGLM: Final = ModelType(
    architecture="gpt",
    keys={
        "num_layers|num_hidden_layers": "num_layers",
        "d_model|hidden_size": "hidden_size",
        "attention_heads|num_attention_heads": "num_heads",
        "ffn_dim": "ffn_hidden_size",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "tied_embeddings",
    },
    implied={"position": "none"},
    must={"add_cross_attention": (False,)},
)
_XLNET: Final = ModelType(
    architecture="gpt",
    keys={
        "n_layer": "num_layers",
        "d_model": "hidden_size",
        "n_head": "num_heads",
        "d_inner": "ffn_hidden_size",
        "vocab_size": "vocab_size",
        "tie_word_embeddings": "tied_embeddings",
    },
    implied={
        "position": "none",
        "attention_bias": False,
        "head_bias": True,
        "final_norm": False,
        "max_sequence_length": 512,
    },
    rules=(xlnet,),
)
_XLM: Final = ModelType(
    architecture="gpt",
    keys={
        "n_layers": "num_layers",
        "emb_dim": "hidden_size",
        "n_heads": "num_heads",
        "vocab_size|n_words": "vocab_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "tied_embeddings",
    },
    implied={"embedding_norm": True, "final_norm": False, "head_bias": True},
    rules=(xlm,),
)
_DBRX: Final = ModelType(
    architecture="llama",
    keys={
        "n_layers": "num_layers",
        "d_model": "hidden_size",
        "n_heads": "num_heads",
        "vocab_size": "vocab_size",
        "max_seq_len": "max_sequence_length",
        "tie_word_embeddings": "tied_embeddings",
    },
    implied={"norm": "layernorm", "norm_bias": False},
    rules=(dbrx, ignore("num_key_value_heads")),
)
_BIOGPT: Final = ModelType(
    architecture="gpt",
    keys=_SHAPE | {"layer_norm_eps": "norm_epsilon", "tie_word_embeddings": "tied_embeddings"},
    implied={"extra_positions": 2},
)
_MPT: Final = ModelType(
    architecture="gpt",
    keys={
        "n_layers": "num_layers",
        "d_model": "hidden_size",
        "n_heads": "num_heads",
        "max_seq_len": "max_sequence_length",
        "vocab_size": "vocab_size",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tied_embeddings",
    },
    implied={"position": "alibi", "attention_bias": False, "mlp_bias": False, "norm_bias": False},
    rules=(mpt,),
)
_CPMANT: Final = ModelType(
    architecture="llama",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
        "dim_head": "head_size",
        "dim_ff": "ffn_hidden_size",
        "vocab_size": "vocab_size",
        "position_bias_max_distance": "max_sequence_length",
        "eps": "norm_epsilon",
    },
    implied={"position": "none"},
    rules=(cpmant,),
)


NEEDED: Final = ("num_layers", "hidden_size", "num_heads", "vocab_size", "ffn_hidden_size")
_NEEDED_OF_EXPERTS: Final = ("moe.num_experts", "moe.experts_per_token")


def _optional(keys: dict[str, str]) -> dict[str, Any]:
    """Keys that may be missing; if one is missing, our field keeps its own default."""
    return {key: None for key, target in keys.items() if target not in (*NEEDED, *_NEEDED_OF_EXPERTS)}


def _decoder(*rules: Callable[[Config], None], keys: dict[str, str] | None = None, **implied: Any) -> ModelType:
    """A Llama block with additional rules, keys and fields."""
    own = keys or {}
    usual = _LLAMA_KEYS | {"num_nextn_predict_layers": "mtp_layers"}
    read = {key: target for key, target in usual.items() if target not in own.values()} | own
    return ModelType(
        architecture="llama",
        keys=read,
        defaults=_optional(read) | _LLAMA_DEFAULTS,
        implied=implied,
        rules=(rotary, *rules),
    )


def _experts(*rules: Callable[[Config], None], keys: dict[str, str] | None = None, **implied: Any) -> ModelType:
    """A Llama block with experts in place of the feed-forward block."""
    own = keys or {}
    usual = {
        "num_experts|num_local_experts|n_routed_experts": "moe.num_experts",
        "num_experts_per_tok|num_experts_per_token": "moe.experts_per_token",
    }
    read = {key: target for key, target in usual.items() if target not in own.values()}
    found = _decoder(*rules, keys=read | own, **implied)
    return replace(found, defaults=found.defaults | {"intermediate_size": None})


def _latent(*rules: Callable[[Config], None], keys: dict[str, str] | None = None, **implied: Any) -> ModelType:
    """A Llama block with latent attention."""
    own = {
        "q_lora_rank": "mla.q_lora_rank",
        "kv_lora_rank": "mla.kv_lora_rank",
        "qk_nope_head_dim": "mla.nope_head_size",
        "qk_rope_head_dim": "mla.rope_head_size",
        "v_head_dim": "mla.value_head_size",
    }
    found = _decoder(latent_heads, latent_bias, *rules, keys=own | (keys or {}), **implied)
    return replace(found, keys={key: target for key, target in found.keys.items() if key != "head_dim"})


_QKV_BIAS: Final = {"attention_bias": "qkv_bias"}
_ALL_BIASES: Final = _BIASES
_ATTENTION_BIAS: Final = {"attention_bias": "attention_bias"}
_LATENT_EXPERTS: Final = _TOP_K | {"n_routed_experts": "moe.num_experts"}
_LAYER_NORM: Final[dict[str, Any]] = {"norm": "layernorm"}
_COHERE: Final[dict[str, Any]] = {
    "norm": "layernorm",
    "norm_bias": False,
    "norms_per_layer": 1,
    "parallel_attention": True,
}
_COHERE_KEYS: Final = _ATTENTION_BIAS | {"layer_norm_eps": "norm_epsilon"}
_GEMMA4: Final = _decoder(gemma4, keys=_ATTENTION_BIAS, qk_norm="head", norms_per_layer=4)
_TIED: Final[dict[str, tuple[Any, ...]]] = {"tie_word_embeddings": (True,)}
_ZAMBA: Final = {"attention_head_dim": "head_size"}
_JETMOE_KEYS: Final = {"kv_channels": "head_size", "num_key_value_heads": "num_kv_heads"}
_JETMOE_LIKE: Final = _experts(mixture("intermediate_size"), jetmoe, keys=_JETMOE_KEYS)
_JETMOE: Final = replace(
    _JETMOE_LIKE, keys={key: target for key, target in _JETMOE_LIKE.keys.items() if target != "num_heads"}
)
_MIMO: Final = _QKV_BIAS | {"v_head_dim": "value_head_size", "rms_norm_eps|layernorm_epsilon": "norm_epsilon"}
_QWEN3_5: Final = {"mtp_num_hidden_layers": "mtp_layers"}
_DELTA: Final = {"linear_attention": gated_deltanet}

TYPES: dict[str, ModelType] = {
    "bert": _BERT,
    "bloom": _BLOOM,
    "deepseek_v2": _deepseek_like(2, 0, (1, 1), longest=2048),
    "deepseek_v3": _deepseek_like(1, 3, (8, 4)),
    "falcon": _FALCON,
    "gemma": _llama_like(
        "gemma",
        keys={"attention_bias": "attention_bias"},
        implied={"norms_per_layer": 2},
        must={},
        defaults=_GEGLU | {"max_position_embeddings": 8192, "attention_bias": False},
    ),
    "gemma2": _llama_like(
        "gemma",
        keys=_BIASES,
        defaults=_GEGLU | _NO_BIASES | {"max_position_embeddings": 8192},
        must={},
        rules=(local_window(4096, 2),),
    ),
    "gemma3_text": _llama_like(
        "gemma",
        keys=_BIASES,
        defaults=_GEGLU | _NO_BIASES | {"max_position_embeddings": 131072},
        implied={"qk_norm": "head"},
        must={},
        rules=(local_window(4096, 6),),
    ),
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "gpt_oss": _llama_like(
        keys=_LOCAL_EXPERTS | {"attention_bias": "attention_bias"},
        defaults={"head_dim": 64, "attention_bias": True, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        implied={"attention_sinks": True, "moe.expert_bias": True, "moe.router_bias": True},
        rules=(one_width, local_window(128, 2)),
    ),
    "granite": _llama_like(keys=_BIASES, defaults=_NO_BIASES | {"num_key_value_heads": None}),
    "kimi_k2": _deepseek_like(1, 3, (8, 4)),
    "llama": _llama_like(keys=_BIASES, defaults=_NO_BIASES | {"num_key_value_heads": None}),
    "llama4_text": _llama_like(
        keys=_LOCAL_EXPERTS
        | {
            "attention_bias": "attention_bias",
            "intermediate_size_mlp": "ffn_hidden_size",
            "interleave_moe_layer_step": "moe.layer_frequency",
        },
        defaults={
            "attention_bias": False,
            "interleave_moe_layer_step": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
        },
        rules=(llama4,),
    ),
    "mistral": _llama_like(defaults={"max_position_embeddings": 131072}, rules=(local_window(4096, 0),)),
    "mixtral": _llama_like(
        keys=_LOCAL_EXPERTS,
        defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        rules=(one_width, local_window(None, 0)),
    ),
    "nemotron": _llama_like(
        keys=_BIASES | {"norm_eps": "norm_epsilon"},
        defaults=_NO_BIASES | {"num_key_value_heads": None, "max_position_embeddings": 4096, "norm_eps": 1e-5},
        implied={"norm": "layernorm", "activation": "gelu"},
        must={"hidden_act": ("relu2",)},
    ),
    "olmo2": _llama_like(
        keys={"attention_bias": "attention_bias"},
        defaults={"attention_bias": False, "num_key_value_heads": None, "rms_norm_eps": 1e-5},
        implied={"qk_norm": "width"},
    ),
    "olmoe": _llama_like(
        keys=_EXPERTS | {"attention_bias": "attention_bias"},
        defaults={
            "attention_bias": False,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
        },
        implied={"qk_norm": "width"},
        rules=(one_width,),
    ),
    "opt": _OPT,
    "phi3": _llama_like(
        defaults={"num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        rules=(local_window(None, 0),),
    ),
    "qwen2": _llama_like("qwen2", defaults={"max_position_embeddings": 32768}, rules=(late_window,)),
    "qwen2_moe": _llama_like(
        "qwen2",
        keys=_EXPERTS
        | {
            "qkv_bias": "qkv_bias",
            "moe_intermediate_size": "moe.ffn_hidden_size",
            "shared_expert_intermediate_size": "moe.shared_ffn_hidden_size",
            "decoder_sparse_step": "moe.layer_frequency",
        },
        defaults={"max_position_embeddings": 32768, "decoder_sparse_step": 1, "qkv_bias": True},
        implied={"moe.shared_gate": True},
        rules=(late_window, sparse_steps),
    ),
    "qwen3": _llama_like(
        "qwen3",
        keys={"attention_bias": "attention_bias"},
        defaults={"head_dim": 128, "attention_bias": False, "max_position_embeddings": 32768},
        rules=(late_window,),
    ),
    "qwen3_moe": _llama_like(
        "qwen3",
        keys=_EXPERTS
        | {
            "attention_bias": "attention_bias",
            "moe_intermediate_size": "moe.ffn_hidden_size",
            "decoder_sparse_step": "moe.layer_frequency",
        },
        defaults={"attention_bias": False, "max_position_embeddings": 32768, "decoder_sparse_step": 1},
        rules=(late_window, sparse_steps),
    ),
    "starcoder2": _STARCODER2,
    "t5": _T5,
    "vit": _VIT,
    # decoders
    "apertus": replace(
        _decoder(keys=_ATTENTION_BIAS, activation="gelu", qk_norm="head", layer_vector_params=2),
        must={"qk_norm": (True,)},
    ),
    "arcee": _decoder(keys=_BIASES, activation="gelu"),
    "bitnet": _decoder(sub_norms, keys=_ATTENTION_BIAS),
    "cohere": _decoder(norm_if("use_qk_norm", "qk_norm", "width"), keys=_COHERE_KEYS, **_COHERE),
    "cohere2": _decoder(windows, keys=_COHERE_KEYS, **_COHERE),
    "cwm": _decoder(windows, keys=_BIASES),
    "diffllama": _decoder(differential, keys=_ATTENTION_BIAS),
    "doge": _decoder(doge, keys=_BIASES, qk_norm="head"),
    "ernie4_5": _decoder(ernie_bias, keys={"use_bias": "attention_bias"}),
    "exaone4": _decoder(windows, qk_norm="head"),
    "glm": _decoder(keys=_QKV_BIAS),
    "glm4": _decoder(keys=_QKV_BIAS, norms_per_layer=4),
    "granite_swa": _decoder(windows, keys=_BIASES, attention_sinks=True),
    "helium": _decoder(keys=_QKV_BIAS | {"mlp_bias": "mlp_bias"}),
    "hunyuan_v1_dense": _decoder(keys=_ATTENTION_BIAS, qk_norm="head"),
    "hrm_text": _decoder(hrm, gated_biases, keys=_BIASES, norm="unweighted", attention_gate="element"),
    "hyperclovax": _decoder(norm_if("use_post_norm", "norms_per_layer", 4), keys=_BIASES),
    "internlm3": _decoder(keys=_BIASES),
    "iquestcoder": _decoder(keys=_BIASES),
    "jais2": _decoder(keys=_BIASES | {"layer_norm_eps": "norm_epsilon"}, norm="layernorm", activation="gelu"),
    "ministral": _decoder(windows),
    "ministral3": _decoder(windows),
    "nanochat": _decoder(keys=_ATTENTION_BIAS, norm="unweighted", activation="gelu"),
    "olmo": _decoder(keys=_ATTENTION_BIAS, norm="unweighted"),
    "olmo3": _decoder(windows, keys=_ATTENTION_BIAS, qk_norm="width"),
    "seed_oss": _decoder(output_bias("attention_out_bias"), keys=_QKV_BIAS | {"mlp_bias": "mlp_bias"}),
    "smollm3": _decoder(windows, keys=_BIASES),
    "stablelm": _decoder(stablelm, keys={"use_qkv_bias": "qkv_bias", "layer_norm_eps": "norm_epsilon"}, **_LAYER_NORM),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma3n_text": replace(
        _decoder(gemma3n, keys=_ATTENTION_BIAS, qk_norm="head", norms_per_layer=4),
        keys={key: target for key, target in (_LLAMA_KEYS | _ATTENTION_BIAS).items() if key != "intermediate_size"},
    ),
    "mllama_text_model": _decoder(mllama, never_tied),
    "vaultgemma": _decoder(windows, keys=_ATTENTION_BIAS),
    "moshi": _decoder(moshi, keys={"ffn_dim": "ffn_hidden_size"}),
    "xlnet": _XLNET,
    "xlm": _XLM,
    "persimmon": _PERSIMMON,
    "phi": _PHI,
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "gpt-sw3": _GPT2,
    "gpt_bigcode": replace(_GPT2, rules=(*_GPT2.rules, multi_query)),
    "gpt_neo": _GPT_NEO,
    "gpt_neox_japanese": _GPT_NEOX_JAPANESE,
    "openai-gpt": _OPENAI_GPT,
    "ctrl": _CTRL,
    "xglm": _XGLM,
    "biogpt": _BIOGPT,
    "mpt": _MPT,
    "cpmant": _CPMANT,
    "modernbert-decoder": _decoder(modernbert, keys={"norm_eps": "norm_epsilon"}, embedding_norm=True),
    # latent attention
    "minicpm3": _latent(keys={"mlp_bias": "mlp_bias"}),
    "youtu": _latent(),
    "axk1": _latent(mixture(shared="n_shared_experts"), expert_groups(1, 1), after_experts, keys=_LATENT_EXPERTS),
    "axk2": _latent(mixture(shared="n_shared_experts"), sparse, gated_norms, keys=_LATENT_EXPERTS),
    "dots3_note_text": _latent(
        mixture(shared="n_shared_experts", shared_unit="shared_experts_intermediate_size"),
        expert_groups(1, 1),
        dots3,
        keys=_LATENT_EXPERTS,
        attention_gate="head",
    ),
    "deepseek_v32": _latent(mixture(shared="n_shared_experts"), expert_groups(8, 4), sparse, keys=_LATENT_EXPERTS),
    "glm_moe_dsa": _latent(mixture(shared="n_shared_experts"), expert_groups(1, 1), sparse, keys=_LATENT_EXPERTS),
    "glm4_moe_lite": _latent(mixture(shared="n_shared_experts"), expert_groups(1, 1), keys=_LATENT_EXPERTS),
    "longcat_flash": _latent(longcat, keys=_LONGCAT),
    # experts
    "afmoe": _experts(
        mixture(shared="num_shared_experts"),
        windows,
        keys=_ATTENTION_BIAS,
        **{"moe.router_bias": True},
        attention_gate="element",
        qk_norm="head",
        norms_per_layer=4,
    ),
    "aria_text": _experts(
        mixture("intermediate_size", shared="moe_num_shared_experts"),
        shared_bias("mlp_bias"),
        keys=_BIASES | {"moe_num_experts": "moe.num_experts", "moe_topk": "moe.experts_per_token"},
    ),
    "beam": _experts(
        mixture(),
        windows,
        expert_groups(8, 4),
        gate_biases,
        keys=_ATTENTION_BIAS,
        qk_norm="head",
        attention_gate="element",
        norms_per_layer=4,
    ),
    "cohere2_moe": _experts(
        mixture("intermediate_size", shared="num_shared_experts"), windows, keys=_COHERE_KEYS, **_COHERE
    ),
    "dbrx": _DBRX,
    "dots1": _experts(
        mixture(shared="n_shared_experts"), expert_groups(1, 1), windows, keys=_ATTENTION_BIAS, qk_norm="head"
    ),
    "ernie4_5_moe": _experts(
        mixture(shared="moe_num_shared_experts"),
        ernie_bias,
        shared_bias("use_bias"),
        experts_head_bias,
        keys={"moe_num_experts": "moe.num_experts", "moe_k": "moe.experts_per_token", "use_bias": "attention_bias"},
        **{"moe.router_bias": True},
    ),
    "exaone_moe": _experts(mixture(shared="num_shared_experts"), expert_groups(1, 1), windows, qk_norm="head"),
    "flex_olmo": _experts(mixture("intermediate_size"), keys=_ATTENTION_BIAS, qk_norm="width"),
    "flint": _experts(
        mixture(shared_width="shared_expert_intermediate_size"),
        windows,
        keys=_ATTENTION_BIAS,
        qk_norm="head",
        attention_sinks=True,
    ),
    "glm4_moe": _experts(
        floor_head,
        mixture(shared="n_shared_experts"),
        expert_groups(1, 1),
        norm_if("use_qk_norm", "qk_norm", "head"),
        keys=_QKV_BIAS | {"num_nextn_predict_layers": "mtp_layers"},
    ),
    "granitemoe": _experts(mixture("intermediate_size"), keys=_ATTENTION_BIAS),
    "granitemoeshared": _experts(
        mixture("intermediate_size", shared_width="shared_intermediate_size"), keys=_ATTENTION_BIAS
    ),
    "granitemoe_swa": _experts(
        mixture("intermediate_size", shared_width="shared_intermediate_size"),
        windows,
        keys=_ATTENTION_BIAS,
        attention_sinks=True,
    ),
    "hunyuan_v1_moe": _experts(
        hunyuan_experts,
        keys=_ATTENTION_BIAS | {"num_experts": "moe.num_experts", "moe_topk": "moe.experts_per_token"},
        qk_norm="head",
    ),
    "hy_v3": _experts(mixture(shared="num_shared_experts"), shared_bias("mlp_bias"), keys=_BIASES, qk_norm="head"),
    "jetmoe": _JETMOE,
    "kolibri1": _experts(
        mixture(shared_width="shared_expert_intermediate_size"), windows, qk_norm="head", norms_per_layer=4
    ),
    "laguna": _experts(
        mixture(shared_width="shared_expert_intermediate_size"),
        laguna,
        laguna_gate,
        keys=_ATTENTION_BIAS,
        qk_norm="head",
        **{"moe.router_bias": True},
    ),
    "mellum": _experts(mixture(), windows, keys=_ATTENTION_BIAS, qk_norm="head"),
    "mimo_v2_flash": _experts(mixture(), expert_groups(1, 1), mimo, keys=_MIMO),
    "minimax_m2": _experts(
        mixture("intermediate_size"), minimax_m2, keys={"num_mtp_modules": "mtp_layers"}, qk_norm="width"
    ),
    "minimax_m3_vl_text": _experts(
        mixture("intermediate_size", shared_width="shared_intermediate_size"),
        minimax_m3,
        qk_norm="head",
    ),
    "phimoe": _experts(
        mixture("intermediate_size"), keys=_ATTENTION_BIAS | {"lm_head_bias": "head_bias"}, **_LAYER_NORM
    ),
    "solar_open": _experts(mixture(shared="n_shared_experts"), expert_groups(1, 1), keys=_QKV_BIAS),
    # mixers: linear attention, state spaces, convolutions
    "bamba": _decoder(bamba, keys=_BIASES),
    "bailing_hybrid": _latent(
        mixture(shared="num_shared_experts"),
        expert_groups(8, 4),
        never_tied,
        layers_by("layer_types", {"linear_attention": kda(low_rank=False)}),
        keys=_KIMI,
        attention_gate="head",
    ),
    "falcon_h1": _decoder(whole_stack(mamba2(beside=True)), keys=_BIASES),
    "falcon_mamba": _MAMBA,
    "mamba": _MAMBA,
    "mamba2": replace(_MAMBA, rules=(pure_mamba2,), defaults=_MAMBA.defaults | {"tie_word_embeddings": False}),
    "granitemoehybrid": _experts(
        granite_experts,
        layers_by("layer_types", {"linear_attention": mamba2(), "mamba": mamba2()}),
        keys=_ATTENTION_BIAS,
    ),
    "jamba": _experts(jamba),
    "kimi_linear": _latent(
        mixture(shared="num_shared_experts"),
        expert_groups(1, 1),
        never_tied,
        layers_by("layer_types", {"linear_attention": kda(low_rank=True)}),
        keys=_KIMI,
    ),
    "lfm2": _decoder(
        lfm2_width, layers_by("layer_types", {"conv": convolution}), keys={"norm_eps": "norm_epsilon"}, qk_norm="head"
    ),
    "lfm2_moe": _experts(
        mixture(), layers_by("layer_types", {"conv": convolution}), keys={"norm_eps": "norm_epsilon"}, qk_norm="head"
    ),
    "lfm3": _decoder(
        gate("head", "use_attention_gate"),
        norm_if("use_sandwich_norm", "norms_per_layer", 4),
        layers_by("layer_types", {"conv": convolution, "sliding_attention": window()}),
        keys=_ATTENTION_BIAS | {"norm_eps": "norm_epsilon"},
        qk_norm="head",
    ),
    "minimax": _experts(mixture("intermediate_size"), layers_by("layer_types", {"linear_attention": lightning})),
    "nemotron_h": _NEMOTRON_H,
    "olmo_hybrid": _decoder(
        layers_by("layer_types", {"linear_attention": lambda config: gated_deltanet(config) | {"qk_norm": "none"}}),
        keys=_ATTENTION_BIAS,
        qk_norm="width",
    ),
    "qwen3_5_text": _decoder(
        layers_by("layer_types", _DELTA),
        gated_biases,
        qwen3_5,
        keys=_ATTENTION_BIAS | _QWEN3_5,
        attention_gate="element",
        qk_norm="head",
    ),
    "qwen3_5_moe_text": _experts(
        mixture(shared_width="shared_expert_intermediate_size"),
        layers_by("layer_types", _DELTA),
        gated_biases,
        qwen3_5,
        keys=_ATTENTION_BIAS | _QWEN3_5,
        attention_gate="element",
        qk_norm="head",
        **{"moe.shared_gate": True},
    ),
    "qwen3_next": _experts(
        mixture(shared_width="shared_expert_intermediate_size"),
        qwen3_next,
        gated_biases,
        keys=_ATTENTION_BIAS,
        attention_gate="element",
        qk_norm="head",
        **{"moe.shared_gate": True},
    ),
    "recurrent_gemma": _decoder(recurrent_gemma, keys=_QKV_BIAS, mlp_bias=True),
    "rwkv": _RWKV,
    "xlstm": _XLSTM,
    "zamba": replace(_decoder(zamba, keys=_ZAMBA, position="none"), must=_TIED),
    "zamba2": replace(_decoder(zamba2, keys=_ZAMBA), must=_TIED),
    # descendants of BERT
    "bert-generation": _bert(head_by_architecture(transform=False), without="type_vocab_size", pooler=False),
    "big_bird": _bert(head_by_architecture(pooled=True), big_bird_bias),
    "camembert": _bert(),
    "data2vec-text": _bert(),
    "electra": _bert(narrow_embeddings(to="embedding_size")),
    "ernie": _bert(ernie, head_by_architecture()),
    "megatron-bert": _bert(head_by_architecture(), final_norm=True, embedding_norm=False),
    "rembert": _bert(narrow_embeddings(to="input_embedding_size", out="output_embedding_size", reads=1664)),
    "roberta": _bert(),
    "roberta-prelayernorm": _bert(head_by_architecture(), final_norm=True),
    "roc_bert": _bert(roc_bert, head_by_architecture()),
    "roformer": _bert(roformer, head_by_architecture()),
    "xlm-roberta": _bert(),
    "xlm-roberta-xl": _bert(head_by_architecture(), final_norm=True, embedding_norm=False),
    "xmod": _bert(xmod, head_by_architecture()),
    # decoders of BART's descendants
    "bart": _bart(bart(extra=2)),
    "bigbird_pegasus": _bart(bart(biases=False, tied=False), bigbird_pegasus_bias),
    "blenderbot": _bart(bart(embedding_norm=False, final_norm=True)),
    "blenderbot-small": _bart(bart()),
    "marian": replace(_bart(bart(embedding_norm=False)), keys=_MARIAN_KEYS),
    "mbart": _bart(bart(extra=2, final_norm=True)),
    "mvp": _bart(bart(extra=2), prompts),
    "pegasus": _bart(bart(embedding_norm=False, final_norm=True)),
    "plbart": _bart(bart(extra=2)),
    "trocr": _bart(bart(extra=2), learned_positions),
    "whisper": _bart(bart(embedding_norm=False, final_norm=True), whisper),
}

TYPES |= {
    # texts of models that read images
    "qwen2_vl_text": TYPES["qwen2"],
    "qwen2_5_vl_text": TYPES["qwen2"],
    "qwen3_vl_text": TYPES["qwen3"],
    "cohere_compass_text": _decoder(windows, keys=_COHERE_KEYS, **_COHERE),
    "emu3_text_model": _decoder(keys=_BIASES),
    "git": ModelType(
        architecture="gpt",
        keys=_SHAPE | {"layer_norm_eps": "norm_epsilon", "tie_word_embeddings": "tied_embeddings"},
        implied={"embedding_norm": True, "final_norm": False, "head_bias": True},
    ),
    "granite_docling_text": TYPES["granite"],
    "idefics": _decoder(ignore("cross_layer_interval", "qk_layer_norms", "freeze_text_layers", "freeze_vision_layers")),
    "qwen2_5_omni_text": TYPES["qwen2"],
    "qwen3_omni_moe_text": replace(TYPES["qwen3_moe"], rules=(floor_head, *TYPES["qwen3_moe"].rules)),
    "hunyuan_vl_text": _decoder(keys=_ATTENTION_BIAS, qk_norm="head"),
    "muse_glimmer_text": _decoder(windows, keys=_ATTENTION_BIAS, norms_per_layer=4, attention_gate="element"),
    "kosmos_2_text_model": replace(
        _XGLM,
        keys={
            "layers": "num_layers",
            "embed_dim": "hidden_size",
            "attention_heads": "num_heads",
            "ffn_dim": "ffn_hidden_size",
            "vocab_size": "vocab_size",
            "max_position_embeddings": "max_sequence_length",
            "tie_word_embeddings": "tied_embeddings",
            "layer_norm_eps": "norm_epsilon",
        },
        rules=(inner_norms,),
    ),
    "step3p5": _experts(
        mixture(shared_width="share_expert_dim"),
        shared_bias("mlp_bias"),
        layers_by("layer_types", {"sliding_attention": window(num_sliding_attention_heads="num_heads")}),
        keys=_BIASES,
        qk_norm="head",
        attention_gate="head",
    ),
    "qwen3_vl_moe_text": TYPES["qwen3_moe"],
    "cosmos3_edge_text": _decoder(keys=_BIASES, activation="gelu"),
    "glm4v_text": _decoder(norms_per_layer=4, qkv_bias=True),
    "glm_ocr_text": _decoder(norms_per_layer=4),
    "glm4v_moe_text": _experts(floor_head, mixture(shared="n_shared_experts"), expert_groups(1, 1), keys=_QKV_BIAS),
    "mistral4": _latent(mixture(shared="n_shared_experts"), expert_groups(1, 1), keys=_LATENT_EXPERTS),
    "molmo2_text": _decoder(further_words, keys=_QKV_BIAS, qk_norm="head"),
    "paddleocr_vl_text": TYPES["ernie4_5"],
}

_TYPED: Final = (
    "bert",
    "bloom",
    "deepseek_v2",
    "deepseek_v3",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "kimi_k2",
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmoe",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "starcoder2",
    "t5",
    "vit",
)
TYPES |= {name: replace(TYPES[name], recorded=False) for name in _TYPED}  # their defaults are in the tables above

MISSING: Final[dict[str, str]] = {
    "blt": "a stack of its own for bytes, and patches of them",
    "deepseek_v4": "compressed attention with queries and outputs of low rank, and hyper-connections",
    "gemma4_assistant": "layers that read another model's keys and values",
    "gemma4_unified_assistant": "layers that read another model's keys and values",
    "hy_v4": "hyper-connections, and indexers that layers share",
    "inkling2_text": "relative attention with convolutions of keys and values",
    "inkling_text": "relative attention with convolutions of keys and values",
    "musicgen": "codebooks of audio",
    "musicgen_melody": "codebooks of audio",
    "phi4_multimodal": "towers of images and audio with adapters",
    "prophetnet": "streams for further tokens",
    "qwen4_exp_text": "what its default configuration does not describe",
    "reformer": "attention by hashing, and reversible layers",
    "blip_text_model": "a decoder of BERT's kind that attends to images",
    "chameleon": "codebooks of images",
    "deepseek_ocr2": "a tower that is a language model",
    "diffusion_gemma": "diffusion in place of the next token",
    "ernie4_5_vl_moe_text": "experts of their own for images",
    "evolla": "a tower for proteins",
    "glm5_next_text": "hyper-connections",
    "granite4_vision": "a tower with deep-stacked queries",
    "kosmos_2_5_text_model": "a decoder whose tower reads patches of any shape",
    "mistral_large4_text": "indexers and keys that layers share",
    "muse_spark_text": "a tower for sound",
    "pi0": "a second stack for actions",
    "pix2struct_text_model": "an encoder of patches before the decoder",
    "pp_formulanet_text": "an encoder of patches before the decoder",
    "t5gemma2": "an encoder before the decoder that reads images",
    "udop": "an encoder of text and patches before the decoder",
    "unlimited_ocr_text": "two towers, one behind the other",
    "vision-encoder-decoder": "an encoder of patches before the decoder",
    "zaya": "attention with convolutions, and a router with layers of its own",
}
"""Model types of transformers 5.23 that cannot be read, each with the block that our models lack."""
