"""The model as options of Megatron-Core, which Megatron-LM, Megatron-Bridge and ms-swift share."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import implied, listed, names_beside, refusals, refused
from planner.emit.settings import absent_unless, choice, flag, known, pair, parts_from, parts_of, refuse, same, whole
from planner.emit.target import Setting
from planner.errors import InputError
from planner.specs.model import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, Value, Values
    from planner.plan import Plan
    from planner.specs.blocks import MixtureOfExperts

_NAMES: Final = names_beside(__file__)


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
    found: dict[str, Any] = {"model.position": "rope" if rotary or kind == "none" else "learned"}
    if longest:
        found["model.max_sequence_length"] = longest
    if rotary and "rotary_base" in given:
        found["model.rope_theta"] = given.number("rotary_base")
    if given.flag("use_rope_scaling"):
        found["model.rope_scaling"] = {"factor": given.number("rope_scaling_factor", 8.0)}
    return found


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
    bias, of_qkv = not given.flag("disable_bias_linear"), given.flag("add_qkv_bias")
    if given.flag("multi_latent_attention"):
        return {"model.attention_bias": False, "model.mlp_bias": bias}
    return {"model.attention_bias": bias, "model.mlp_bias": bias, "model.qkv_bias": of_qkv and not bias}


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


def _has_experts(plan: Plan) -> bool:
    return plan.model.moe is not None


def _moe(plan: Plan) -> MixtureOfExperts:
    assert plan.model.moe is not None
    return plan.model.moe


def _write_frequency(plan: Plan) -> Values:
    """The layers that have experts, if not all have. Source: Megatron-LM, arguments.py, moe_freq_type."""
    moe = _moe(plan)
    has = [int(plan.model.layer_has_experts(layer)) for layer in range(plan.model.num_layers)]
    if all(has):
        return {}
    if moe.layer_frequency > 1:
        return {"moe_layer_freq": "[" + ",".join(map(str, has)) + "]"}
    return {"moe_layer_freq": f"([0]*{moe.num_dense_layers}+[1]*{len(has) - moe.num_dense_layers})"}


def _read_experts(given: Given) -> Mapping[str, Any]:
    experts = given.whole("num_experts") or given.whole("num_moe_experts")
    dispatcher = given.text("moe_token_dispatcher_type", "alltoall")
    if not experts:
        return {}
    if dispatcher == "allgather":
        given.understood.discard("moe_token_dispatcher_type")  # priced as an all-to-all
    dense, frequency = _dense_layers(given)
    sizes = parts_from(given, _EXPERTS)
    width = sizes["ffn_hidden_size"] or given.whole("ffn_hidden_size") or 4 * given.whole("hidden_size")
    found = {
        **sizes,
        **parts_from(given, _FURTHER),
        "num_experts": experts,
        "ffn_hidden_size": width,
        "num_dense_layers": dense,
        "layer_frequency": frequency,
        **{name: value for name, value in parts_from(given, _GROUPS).items() if value},
    }
    gate = {"shared_gate": True} if given.flag("moe_shared_expert_gate") else {}
    biases = {} if given.flag("disable_bias_linear") else {"expert_bias": True, "router_bias": True}
    return {"model.moe": found | gate | biases}


_EXPERTS, _FURTHER, _GROUPS, _LATENT = (_NAMES[part] for part in ("experts", "shared_experts", "groups", "latent"))
"""Sizes of experts and of latent attention -> option and default."""


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


def _read_latent(given: Given) -> Mapping[str, Any]:
    return {"model.mla": parts_from(given, _LATENT)} if given.flag("multi_latent_attention") else {}


def _described(*settings: Setting) -> tuple[Setting, ...]:
    """Settings whose defaults count only in a file that describes a model."""

    def limited(setting: Setting) -> Setting:
        def read(given: Given) -> Mapping[str, Any]:
            found = setting.read(given) if setting.read else {}
            return found if "num_layers" in given or "encoder_num_layers" in given else {}

        return replace(setting, read=read)

    return tuple(map(limited, settings))


def _read_norms(given: Given) -> Mapping[str, Any]:
    has, latent = given.flag("qk_layernorm"), given.flag("multi_latent_attention")
    return {"model.qk_norm": "head"} if has and not latent else {}


_NORMS: Final = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}

MODEL: Final = (
    replace(whole("model.num_layers", "num_layers"), read=_read_layers),
    pair(
        "model.hidden_size model.ffn_hidden_size",
        lambda plan: {"hidden_size": plan.model.hidden_size, "ffn_hidden_size": plan.model.ffn_hidden_size},
        _read_width,
    ),
    Setting(says=("model.num_heads", "model.num_kv_heads", "model.head_size"), write=_write_heads, read=_read_heads),
    same("model.vocab_size", "vocab_size"),
    *_described(
        Setting(says=tuple(f"model.{name}" for name in _POSITIONS), write=_write_positions, read=_read_positions),
        choice("model.norm", "normalization", _NORMS, "layernorm"),
    ),
    same("model.norm_epsilon", "norm_epsilon"),
    *_described(
        flag("model.activation", "swiglu", on="swiglu", off="gelu"),
        pair("model.attention_bias model.mlp_bias model.qkv_bias", _write_biases, _read_biases),
        flag("model.tied_embeddings", "untie_embeddings_and_output_weights", on=False, off=True),
    ),
    # the option also controls norms inside latent attention (multi_latent_attention.py)
    pair(
        "model.qk_norm",
        lambda plan: {"qk_layernorm": True} if plan.model.qk_norm == "head" or plan.model.mla else {},
        _read_norms,
    ),
    choice("model.attention_sinks", "softmax_type", {True: "learnable", False: None}),
    Setting(says=("model.sliding_window", "model.global_every"), write=_write_window, read=_read_window),
    whole("model.mtp_layers", "mtp_num_layers", absent=0),
    *absent_unless(
        _has_experts,
        Setting(says=("model.moe",), write=lambda plan: parts_of(_moe(plan), _EXPERTS), read=_read_experts),
        Setting(says=(), write=_write_frequency),
        Setting(says=(), write=lambda plan: parts_of(_moe(plan), _FURTHER)),
        Setting(says=(), write=lambda plan: parts_of(_moe(plan), _GROUPS) if _moe(plan).num_groups > 1 else {}),
    ),
    *implied(_NAMES["implied"]),
    pair("model.mla", lambda plan: parts_of(plan.model.mla, _LATENT) if plan.model.mla else {}, _read_latent),
    known("rope_type"),
)
"""Source: Megatron-LM, megatron/training/arguments.py and megatron/core/transformer/transformer_config.py."""


_NO_BLOCKS: Final[dict[str, dict[str, Any]]] = {
    f"model.{name}": {"only": [ModelSpec.model_fields[name].default], **_NAMES["no_block"]}
    for name in listed(_NAMES["no_blocks"])
}
"""Fields of blocks that pretrain_gpt.py cannot build, or builds only with experimental options not in this table.

Source: Megatron-LM, core/models/gpt/gpt_layer_specs.py; Mamba layers are trained by another program, pretrain_mamba.py.
"""

MODEL_REFUSALS: Final = (
    *refusals(_NO_BLOCKS),
    *refusals(_NAMES["refuses"]),
    *refused(_NAMES["refused"]),
    refuse(
        lambda plan: _has_bias(plan) is None,
        "model.attention_bias, model.mlp_bias and those of experts differ, and Megatron-Core has all or none",
        "set them alike in the model document",
    ),
)
