"""What the keys of a Hugging Face config.json mean, a table for each `model_type`.

Defaults are those of the configuration classes in the transformers library; a key without a default must be
given. `a|b` are two spellings of one key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from planner.specs.huggingface_rules import (
    base_model,
    expert_groups,
    falcon,
    four_times_hidden,
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

    keys: config key to our field, `moe.` and `mla.` and `patches.` before those of the nested documents.
    defaults: what a missing key means. A key that is null leaves our field to its own default.
    implied: our fields that the type fixes. must: config keys with the only values that are read.
    rules: for what is more than one key to one field.
    """

    architecture: str
    keys: dict[str, str]
    defaults: dict[str, Any] = field(default_factory=dict)
    implied: dict[str, Any] = field(default_factory=dict)
    must: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    rules: tuple[Callable[[Config], None], ...] = ()

    def translate(self, config: Config) -> None:
        """Fill the model document of `config`.

        Raises:
            InputError: a key is missing, or has a value that no field of ours can hold.
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
        if value is not None:
            config.put(target, value, found or "model_type")


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
    """A Llama block with `keys`, `defaults`, `implied`, `must` and `rules` of its own."""
    return ModelType(
        architecture=architecture,
        keys=_LLAMA_KEYS | parts.get("keys", {}),
        defaults=_LLAMA_DEFAULTS | parts.get("defaults", {}),
        implied=parts.get("implied", {}),
        must=parts.get("must", _SILU),
        rules=(rotary, *parts.get("rules", ())),
    )


def _deepseek_like(num_shared: int, num_dense: int, groups: tuple[int, int], longest: int = 4096) -> ModelType:
    """Latent attention, shared and routed experts."""
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
        must=_SILU | {"moe_layer_freq": (1,), "attention_bias": (False,), "mlp_bias": (False,)},
        rules=(rotary, shared_experts(num_shared), expert_groups(*groups)),
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
    must={"bias": (False,)},
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
    must={"use_bias": (True,), "mlp_type": ("default",), "norm_type": ("layer_norm",)},
    rules=(rotary, local_window(None, 0)),
)
_BERT: Final = ModelType(
    architecture="bert",
    keys=_SHAPE | {"type_vocab_size": "num_token_types", "layer_norm_eps": "norm_epsilon"},
    defaults={"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12},
    implied={"pooler": True},
    must={"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)},
    rules=(base_model,),
)
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

TYPES: Final[dict[str, ModelType]] = {
    "bert": _BERT,
    "bloom": _BLOOM,
    "deepseek_v2": _deepseek_like(2, 0, (1, 1), longest=2048),
    "deepseek_v3": _deepseek_like(1, 3, (8, 4)),
    "falcon": _FALCON,
    "gemma": _llama_like(
        "gemma", implied={"norms_per_layer": 2}, must={}, defaults=_GEGLU | {"max_position_embeddings": 8192}
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
            "moe_intermediate_size": "moe.ffn_hidden_size",
            "shared_expert_intermediate_size": "moe.shared_ffn_hidden_size",
            "decoder_sparse_step": "moe.layer_frequency",
        },
        defaults={"max_position_embeddings": 32768, "decoder_sparse_step": 1},
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
}
