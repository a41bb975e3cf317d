"""The model as options of Megatron-Core, which Megatron-LM, Megatron-Bridge and ms-swift share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from planner.emit.target import Refusal, Setting, choice, only, same
from planner.errors import InputError
from planner.specs.model import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, Value, Values
    from planner.plan import Plan

_LLAMA_3_SCALING: Final = (1.0, 4.0, 8192)
"""The fixed frequency band of --use-rope-scaling. Source: Megatron-LM, rotary_pos_embedding.py."""


def _write_heads(plan: Plan) -> Values:
    model = plan.model
    found: dict[str, Value] = {"num_attention_heads": model.num_heads}
    if model.mla is None:
        found["kv_channels"] = model.head_size
        if model.num_kv_heads != model.num_heads:
            found |= {"group_query_attention": True, "num_query_groups": model.num_kv_heads}
    return found


def _read_heads(given: Given) -> Mapping[str, Any]:
    if "num_attention_heads" not in given:
        return {}
    heads = given.whole("num_attention_heads")
    grouped, groups, channels = given.flag("group_query_attention"), given.whole("num_query_groups"), given.whole(_HEAD)
    if given.flag("multi_latent_attention"):
        return {"model.num_heads": heads}
    found = {"model.num_heads": heads, "model.num_kv_heads": (groups or 1) if grouped or groups > 1 else heads}
    return found | ({"model.head_size": channels} if channels else {})


_HEAD: Final = "kv_channels"


def _read_width(given: Given) -> Mapping[str, Any]:
    """The default width of the feed-forward block. Source: Megatron-LM, arguments.py, validate_args."""
    if "hidden_size" not in given:
        return {}
    hidden = given.whole("hidden_size")
    default = int(4 * hidden * 2 / 3 / 64) * 64 if given.flag("swiglu") else 4 * hidden
    return {"model.hidden_size": hidden, "model.ffn_hidden_size": given.whole("ffn_hidden_size") or default}


def _read_layers(given: Given) -> Mapping[str, Any]:
    layers = given.whole("num_layers") or given.whole("encoder_num_layers")
    return {"model.num_layers": layers} if layers else {}


_POSITIONS: Final = ("max_sequence_length", "extra_positions", "position", "rope_theta", "rope_scaling")


def _write_positions(plan: Plan) -> Values:
    model = plan.model
    longest = max(model.max_sequence_length, plan.training.sequence_length) + model.extra_positions
    if model.position != "rope":
        return {"max_position_embeddings": longest, "position_embedding_type": "learned_absolute"}
    found: dict[str, Value] = {
        "max_position_embeddings": longest,
        "position_embedding_type": "rope",
        "rotary_base": int(model.rope_theta),
    }
    if model.mla is not None:
        found["rope_type"] = "rope"  # latent attention uses yarn by default
    if model.rope_scaling is not None:
        found |= {"use_rope_scaling": True, "rope_scaling_factor": model.rope_scaling.factor}
    return found


def _read_positions(given: Given) -> Mapping[str, Any]:
    longest = given.whole("max_position_embeddings") or given.whole("seq_length")
    kind = given.text("position_embedding_type", "learned_absolute")
    rotary = kind in ("rope", "yarn", "mrope") or given.flag("use_rotary_position_embeddings")
    found: dict[str, Any] = {"model.max_sequence_length": longest} if longest else {}
    if "num_layers" not in given:
        return {}
    found["model.position"] = "rope" if rotary or kind == "none" else "learned"
    if rotary and "rotary_base" in given:
        found["model.rope_theta"] = given.number("rotary_base")
    given.text("rope_type")
    if given.flag("use_rope_scaling"):
        found["model.rope_scaling"] = {"factor": given.number("rope_scaling_factor", 8.0)}
    return found


def _positions_fault(plan: Plan) -> tuple[str, str] | None:
    model, scaling = plan.model, plan.model.rope_scaling
    if model.position not in ("learned", "rope"):
        return f"model.position is {model.position}, for which Megatron-Core has no option", _OTHER_ENGINE
    if model.position == "rope" and model.rope_theta != int(model.rope_theta):
        return f"model.rope_theta is {model.rope_theta}, and --rotary-base is a whole number", "round it"
    band = scaling and (scaling.low_frequency, scaling.high_frequency, scaling.original_max_sequence_length)
    if band and band != _LLAMA_3_SCALING:
        why = "model.rope_scaling has another band than that of Llama 3"
        return why, "leave model.rope_scaling out: it has no price"
    return None


_OTHER_ENGINE: Final = "plan with another --engine, as torch"


def _has_bias(plan: Plan) -> bool | None:
    """True if all projections have a bias, False if no projection has one, None if only some have one."""
    model, moe = plan.model, plan.model.moe
    has_dense = moe is None or any(not model.layer_has_experts(layer) for layer in range(model.num_layers))
    found = {model.attention_bias, *([model.mlp_bias] if has_dense else [])}
    if moe is not None:
        found |= {moe.expert_bias, moe.router_bias}
    return found.pop() if len(found) == 1 else None


def _write_biases(plan: Plan) -> Values:
    if _has_bias(plan):
        return {}
    return {"disable_bias_linear": True, **({"add_qkv_bias": True} if plan.model.qkv_bias else {})}


def _read_biases(given: Given) -> Mapping[str, Any]:
    if "num_layers" not in given:
        return {}
    bias, of_qkv = not given.flag("disable_bias_linear"), given.flag("add_qkv_bias")
    if given.flag("multi_latent_attention"):
        return {"model.attention_bias": False, "model.mlp_bias": bias}
    return {"model.attention_bias": bias, "model.mlp_bias": bias, "model.qkv_bias": of_qkv and not bias}


def _biases_fault(plan: Plan) -> tuple[str, str] | None:
    if _has_bias(plan) is not None:
        return None
    why = "model.attention_bias, model.mlp_bias and those of experts differ, and Megatron-Core has all or none"
    return why, "set them alike in the model document"


def _write_window(plan: Plan) -> Values:
    """The size of the sliding window, and n if every n-th layer attends to all tokens."""
    model = plan.model
    if not model.sliding_window or model.global_every == 1:
        return {}
    every: dict[str, Value] = {"window_attn_skip_freq": model.global_every} if model.global_every else {}
    return {"window_size": f"{model.sliding_window},0", **every}


def _read_window(given: Given) -> Mapping[str, Any]:
    if "window_size" not in given:
        return {}
    size = re.search(r"-?[0-9]{1,9}", given.text("window_size"))
    if size is None:
        raise InputError("no size of a window", where="window_size")
    if int(size[0]) < 0:
        return {}
    return {"model.sliding_window": int(size[0]), "model.global_every": given.whole("window_attn_skip_freq")}


def _write_experts(plan: Plan) -> Values:
    """Options for experts and for the layers that have experts. Source: Megatron-LM, arguments.py, moe_freq_type."""
    model, moe = plan.model, plan.model.moe
    if moe is None:
        return {}
    has = [int(model.layer_has_experts(layer)) for layer in range(model.num_layers)]
    found: dict[str, Value] = {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }
    if not all(has):
        found["moe_layer_freq"] = f"([0]*{moe.num_dense_layers}+[1]*{len(has) - moe.num_dense_layers})"
        if moe.layer_frequency > 1:
            found["moe_layer_freq"] = "[" + ",".join(map(str, has)) + "]"
    if moe.shared_ffn_hidden_size:
        found["moe_shared_expert_intermediate_size"] = moe.shared_ffn_hidden_size
    if moe.shared_gate:
        found["moe_shared_expert_gate"] = True
    if moe.num_groups > 1:
        found |= {"moe_router_num_groups": moe.num_groups, "moe_router_group_topk": moe.groups_per_token}
    if moe.experts_per_token == 1:
        found["moe_router_pre_softmax"] = True
    return found


def _read_experts(given: Given) -> Mapping[str, Any]:
    experts = given.whole("num_experts") or given.whole("num_moe_experts")
    for key in ("moe_router_pre_softmax", "moe_grouped_gemm"):
        given.get(key)
    dispatcher = given.text("moe_token_dispatcher_type", "alltoall")
    if not experts:
        return {}
    if dispatcher == "allgather":
        given.understood.discard("moe_token_dispatcher_type")  # priced as an all-to-all
    dense, frequency = _dense_layers(given)
    biased = not given.flag("disable_bias_linear")
    width = given.whole("moe_ffn_hidden_size") or given.whole("ffn_hidden_size") or 4 * given.whole("hidden_size")
    found = {
        "num_experts": experts,
        "experts_per_token": given.whole("moe_router_topk", 2),
        "ffn_hidden_size": width,
        "shared_ffn_hidden_size": given.whole("moe_shared_expert_intermediate_size"),
        "shared_gate": given.flag("moe_shared_expert_gate"),
        "num_dense_layers": dense,
        "layer_frequency": frequency,
        "num_groups": given.whole("moe_router_num_groups", 1) or 1,
        "groups_per_token": given.whole("moe_router_group_topk", 1) or 1,
        "expert_bias": biased,
        "router_bias": biased,
    }
    return {"model.moe": {key: value for key, value in found.items() if value is not False}}


def _dense_layers(given: Given) -> tuple[int, int]:
    """The number of leading dense layers, and n if every n-th layer after them has experts."""
    text = given.text("moe_layer_freq", "1").strip("'\"").replace(" ", "")
    if re.fullmatch(r"[0-9]{1,4}", text):
        every = max(int(text), 1)
        # Megatron puts experts into layers 0, N, 2N...; our model document puts them into the last of each N layers
        return (0, 1) if every == 1 else _unlike_ours(text)
    has = _pattern(text)
    if 1 not in has:
        return _unlike_ours(text)
    dense = has.index(1)
    behind = has[dense:]
    for every in range(1, len(behind) + 1):
        start = dense - every + 1
        if start >= 0 and all(bool(each) == (n % every == 0) for n, each in enumerate(behind)):
            return start, every
    return _unlike_ours(text)


def _unlike_ours(text: str) -> tuple[int, int]:
    hint = "leading dense layers, and behind them each n-th with experts; give --model"
    raise InputError(f"{text[:80]!r}: layers with experts stand in no such order", where="moe_layer_freq", hint=hint)


def _pattern(text: str) -> list[int]:
    """The list that an expression such as `([0]*3+[1]*58)` describes; the text is parsed, not evaluated."""
    found: list[int] = []
    whole = re.fullmatch(r"\((.*)\)(?:\*([0-9]{1,4}))?", text)
    body, times = (whole[1], int(whole[2] or 1)) if whole and "(" not in whole[1] else (text, 1)
    for part in body.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*([0-9]{1,4}))?", part)
        if match is None:
            _unlike_ours(text)
        else:
            found += [int(each) for each in match[1].split(",")] * int(match[2] or 1)
        if len(found) > _MOST_LAYERS:
            _unlike_ours(text)
    return (found * times)[:_MOST_LAYERS]


_MOST_LAYERS: Final = 10_000


def _write_latent(plan: Plan) -> Values:
    mla = plan.model.mla
    if mla is None:
        return {}
    ranks: dict[str, Value] = {"q_lora_rank": mla.q_lora_rank} if mla.q_lora_rank else {}
    return {
        "multi_latent_attention": True,
        **ranks,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.nope_head_size,
        "qk_pos_emb_head_dim": mla.rope_head_size,
        "v_head_dim": mla.value_head_size,
    }


def _read_latent(given: Given) -> Mapping[str, Any]:
    """Sizes of latent attention, with the defaults of Megatron-LM, arguments.py, _add_mla_args."""
    if not given.flag("multi_latent_attention"):
        return {}
    found = {
        "q_lora_rank": given.whole("q_lora_rank"),
        "kv_lora_rank": given.whole("kv_lora_rank", 32),
        "nope_head_size": given.whole("qk_head_dim", 128),
        "rope_head_size": given.whole("qk_pos_emb_head_dim", 64),
        "value_head_size": given.whole("v_head_dim", 128),
    }
    return {"model.mla": found}


def _read_norm(given: Given) -> Mapping[str, Any]:
    if "num_layers" not in given and "encoder_num_layers" not in given:
        return {}
    return {"model.norm": given.choice("normalization", {name: ours for ours, name in _NORMS.items()}, "LayerNorm")}


def _flag(path: str, key: str, *, on: Any, off: Any) -> Setting:
    """A setting for a field with two values; the value `on` is written as a switch."""

    def read(given: Given) -> Mapping[str, Any]:
        return {path: on if given.flag(key) else off} if "num_layers" in given or given.flag(key) else {}

    name = path.partition(".")[2]
    return Setting(says=(path,), write=lambda plan: {key: True} if getattr(plan.model, name) == on else {}, read=read)


def _write_norms(plan: Plan) -> Values:
    """The option for norms of heads, which also controls norms inside latent attention (multi_latent_attention.py)."""
    return {"qk_layernorm": True} if plan.model.qk_norm == "head" or plan.model.mla else {}


def _read_norms(given: Given) -> Mapping[str, Any]:
    has, latent = given.flag("qk_layernorm"), given.flag("multi_latent_attention")
    return {"model.qk_norm": "head"} if has and not latent else {}


_NORMS: Final = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}

MODEL: Final = (
    Setting(says=("model.num_layers",), write=lambda plan: {"num_layers": plan.model.num_layers}, read=_read_layers),
    Setting(
        says=("model.hidden_size", "model.ffn_hidden_size"),
        write=lambda plan: {"hidden_size": plan.model.hidden_size, "ffn_hidden_size": plan.model.ffn_hidden_size},
        read=_read_width,
    ),
    Setting(says=("model.num_heads", "model.num_kv_heads", "model.head_size"), write=_write_heads, read=_read_heads),
    same("model.vocab_size", "vocab_size"),
    Setting(
        says=tuple(f"model.{name}" for name in _POSITIONS),
        write=_write_positions,
        read=_read_positions,
    ),
    Setting(says=("model.norm",), write=lambda plan: {"normalization": _NORMS[plan.model.norm]}, read=_read_norm),
    same("model.norm_epsilon", "norm_epsilon"),
    _flag("model.activation", "swiglu", on="swiglu", off="gelu"),
    Setting(says=("model.attention_bias", "model.mlp_bias", "model.qkv_bias"), write=_write_biases, read=_read_biases),
    _flag("model.tied_embeddings", "untie_embeddings_and_output_weights", on=False, off=True),
    Setting(says=("model.qk_norm",), write=_write_norms, read=_read_norms),
    choice("model.attention_sinks", "softmax_type", {True: "learnable", False: None}),
    Setting(says=("model.sliding_window", "model.global_every"), write=_write_window, read=_read_window),
    Setting(
        says=("model.mtp_layers",),
        write=lambda plan: {"mtp_num_layers": plan.model.mtp_layers} if plan.model.mtp_layers else {},
        read=lambda given: {"model.mtp_layers": given.whole("mtp_num_layers")} if "mtp_num_layers" in given else {},
    ),
    Setting(says=("model.moe",), write=_write_experts, read=_read_experts),
    Setting(says=("model.mla",), write=_write_latent, read=_read_latent),
)
"""Source: Megatron-LM, megatron/training/arguments.py and megatron/core/transformer/transformer_config.py."""


_OF_OTHER_KINDS: Final = (
    *("kind", "num_encoder_layers", "output_head", "num_token_types", "pooler", "patches", "relative_buckets"),
)


def _kind_fault(plan: Plan) -> tuple[str, str] | None:
    if plan.model.kind == "decoder":
        return None
    hint = "its own examples train BERT and T5; the plan can be explained"
    return f"model.kind is {plan.model.kind}, and pretrain_gpt.py trains decoders", hint


_NO_BLOCKS: Final = (
    *("norm_bias", "attends", "mixer", "layers", "sparse", "cross_attention", "value_head_size", "attention_gate"),
    *("keys_are_values", "shares_keys", "shared_by", "head_bias", "layer_matrix_params", "layer_vector_params"),
    *("embedding_size", "head_input_size"),
    *("table_params", "input_matrix_params", "output_matrix_params", "vision"),
)
"""Fields of blocks that pretrain_gpt.py cannot build, or builds only with experimental options not in this table.

Source: Megatron-LM, core/models/gpt/gpt_layer_specs.py; Mamba layers are trained by another program, pretrain_mamba.py.
"""


def _blocks_fault(plan: Plan) -> tuple[str, str] | None:
    model = plan.model
    found = [
        f"model.{name}"
        for name in _NO_BLOCKS
        if getattr(model, name) != ModelSpec.model_fields[name].default
        and (name != "norm_bias" or model.norm == "layernorm")  # only LayerNorm has a bias
    ]
    if model.norm not in _NORMS:
        found.append(f"model.norm={model.norm}")
    if model.moe:
        found += [
            f"model.moe.{name}" for name in ("vector_params", "idle_params", "latent_size") if getattr(model.moe, name)
        ]
    if not found:
        return None
    return f"pretrain_gpt.py has no options that are written for {', '.join(found)}", _TRANSFORMERS


_TRANSFORMERS: Final = "plan with --engine fsdp or deepspeed, which train modules of transformers"


def _not_here(path: str, value: Any) -> Refusal:
    return only(path, value, why="Megatron-Core has no option for it", pin="another model or --engine")


MODEL_REFUSALS: Final = (
    Refusal(says=tuple(f"model.{name}" for name in _OF_OTHER_KINDS), fault=_kind_fault),
    Refusal(says=tuple(f"model.{name}" for name in _NO_BLOCKS), fault=_blocks_fault),
    Refusal(says=(), fault=_positions_fault),
    Refusal(says=(), fault=_biases_fault),
    only("model.qk_norm", "none", "head", why="Megatron-Core normalises each head", pin="another model or --engine"),
    _not_here("model.parallel_attention", False),
    _not_here("model.norms_per_layer", 2),
    _not_here("model.embedding_norm", False),
    _not_here("model.final_norm", True),
)
