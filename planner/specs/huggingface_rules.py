"""Rules for fields of a model document that depend on more than one key of a Hugging Face config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from planner.specs.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.specs.huggingface_config import Config

_LLAMA3_SCALING: Final = {
    "factor": "factor",
    "low_freq_factor": "low_frequency",
    "high_freq_factor": "high_frequency",
    "original_max_position_embeddings": "original_max_sequence_length",
}


def rotary(config: Config) -> None:
    """Rotary base and scaling, from `rope_theta` and `rope_scaling`; transformers 5 keeps both in `rope_parameters`."""
    parameters = config.get("rope_parameters", {})
    inside = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    theta = config.get("rope_theta", inside)
    if theta is not None:
        config.put("rope_theta", theta, "rope_theta" if "rope_theta" in config.values else "rope_parameters")
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key, {})
    if not isinstance(scaling, dict):
        return
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":
        for name, target in _LLAMA3_SCALING.items():
            if name not in scaling:
                config.refuse(key, f"`{key}` of type llama3 has no `{name}`", f"it has {', '.join(_LLAMA3_SCALING)}")
            config.put(f"rope_scaling.{target}", scaling[name], name)
    elif kind != "default":
        config.notes.append(f"`{key}` of type {quoted(kind)} is not read: it changes no price, but what is computed")


def four_times_hidden(*keys: str) -> Callable[[Config], None]:
    """Feed-forward width: the value of one of `keys`, or four times the hidden size."""

    def rule(config: Config) -> None:
        given = next((key for key in keys if config.get(key) is not None), "")
        if given:
            config.put("ffn_hidden_size", config.get(given), given)
        else:
            config.put("ffn_hidden_size", 4 * config.filled("hidden_size"), "hidden_size")

    return rule


def local_window(default: int | None, every: int) -> Callable[[Config], None]:
    """Local attention with `sliding_window`. Every `every`-th layer is global (0: none) unless the file has a list."""

    def rule(config: Config) -> None:
        window = config.count("sliding_window") if "sliding_window" in config.values else default
        pattern = config.count("sliding_window_pattern") or config.count("_sliding_window_pattern") or every
        kinds = config.entries("layer_types")
        if kinds:
            pattern = _pattern(config, kinds)
        if not window or pattern == 1 or window >= config.filled("max_sequence_length"):
            return
        config.put("sliding_window", window, "sliding_window")
        config.put("global_every", pattern, "layer_types" if kinds else "sliding_window_pattern")

    return rule


def _pattern(config: Config, kinds: list[Any]) -> int:
    """The period of global layers in `layer_types`; 0 if no layer is global."""
    is_global = [kind == "full_attention" for kind in kinds]
    every = is_global.index(True) + 1 if True in is_global else 0
    regular = [bool(every) and (layer + 1) % every == 0 for layer in range(len(is_global))]
    if regular != is_global:
        config.refuse("layer_types", "`layer_types` is no regular pattern", "every n-th layer is full_attention")
    return every


def late_window(config: Config) -> None:
    """Qwen: local attention after the first `max_window_layers` layers; the published models turn it off."""
    config.get("sliding_window")
    full = config.count("max_window_layers")
    if config.flag("use_sliding_window") and full < config.filled("num_layers"):
        config.refuse("use_sliding_window", "local attention in some layers only is not supported")
    if any(kind != "full_attention" for kind in config.entries("layer_types")):
        config.refuse("layer_types", "local attention in some layers only is not supported")


def sparse_steps(config: Config) -> None:
    """Qwen: experts in every `decoder_sparse_step`-th layer, except the layers in `mlp_only_layers`."""
    dense = config.entries("mlp_only_layers")
    if dense != list(range(len(dense))):
        config.refuse("mlp_only_layers", "`mlp_only_layers` may only name the first layers")
    config.put("moe.num_dense_layers", len(dense), "mlp_only_layers")


def one_width(config: Config) -> None:
    """Experts whose width is `intermediate_size`; no layer is dense."""
    config.put("moe.ffn_hidden_size", config.get("intermediate_size"), "intermediate_size")


def shared_experts(num_shared: int) -> Callable[[Config], None]:
    """Shared experts as wide as `num_shared` routed experts; newer files also derive head sizes from other keys."""

    def rule(config: Config) -> None:
        num = config.count("n_shared_experts") if "n_shared_experts" in config.values else num_shared
        config.get("head_dim")
        config.get("qk_head_dim")
        config.put("moe.shared_ffn_hidden_size", num * config.count("moe_intermediate_size"), "n_shared_experts")

    return rule


def expert_groups(num_groups: int, chosen: int) -> Callable[[Config], None]:
    """A router that first chooses `topk_group` of `n_group` groups of experts, unless `topk_method` is `greedy`."""

    def rule(config: Config) -> None:
        groups, limit = config.count("n_group", num_groups), config.count("topk_group", chosen)
        if groups > 1 and config.get("topk_method", "group_limited_greedy") != "greedy":
            config.put("moe.num_groups", groups, "n_group")
            config.put("moe.groups_per_token", limit, "topk_group")

    return rule


def llama4(config: Config) -> None:
    """A shared expert as wide as a routed one; layers with rotary positions attend within chunks."""
    width, step = config.get("intermediate_size"), config.size("interleave_moe_layer_step", 1)
    config.put("moe.ffn_hidden_size", width, "intermediate_size")
    config.put("moe.shared_ffn_hidden_size", width, "intermediate_size")
    regular = list(range(step - 1, config.filled("num_layers"), step))
    if config.entries("moe_layers") not in ([], regular):
        config.refuse("moe_layers", "`moe_layers` is not every `interleave_moe_layer_step`-th layer")
    config.read.update(("no_rope_layers", "no_rope_layer_interval", "layer_types"))
    chunk = config.count("attention_chunk_size", 8192)
    if chunk and chunk < config.filled("max_sequence_length"):
        config.put("sliding_window", chunk, "attention_chunk_size")
        config.put("global_every", 4, "attention_chunk_size")
        config.notes.append("attention within chunks is priced as a sliding window of their length")


def falcon(config: Config) -> None:
    """Both kinds of Falcon block: one key-value head and one norm (7B), or groups of heads and two norms (40B)."""
    new = config.flag("new_decoder_architecture")
    parallel = config.flag("parallel_attn", True)
    heads = config.document.get("num_heads")
    if new:
        config.put("num_kv_heads", config.get("num_kv_heads", heads), "num_kv_heads")
    else:
        config.get("num_kv_heads")
        config.put("num_kv_heads", 1 if config.flag("multi_query", True) else heads, "multi_query")
    norms = config.count("num_ln_in_parallel_attn", 2 if new else 1)
    config.put("norms_per_layer", norms if new or parallel else 2, "new_decoder_architecture")
    config.put("parallel_attention", new or parallel, "parallel_attn")
    if config.flag("alibi"):
        config.put("position", "alibi", "alibi")
    for target in ("attention_bias", "mlp_bias"):
        config.put(target, config.flag("bias"), "bias")


def opt_embeddings(config: Config) -> None:
    """Refuse OPT-350m, which projects its embeddings; no field of ours describes this."""
    width = config.filled("hidden_size")
    if (narrow := config.count("word_embed_proj_dim", width)) != width:
        words = f"embeddings of {narrow}, not as wide as the model (`hidden_size` is {width}), are not supported"
        config.refuse("word_embed_proj_dim", words)


def two_stacks(config: Config) -> None:
    """T5: layers of both stacks, the head, and a gated feed-forward block from version 1.1 on."""
    encoder = config.count("num_layers")
    config.put("num_encoder_layers", encoder, "num_layers")
    config.put("num_layers", encoder + config.count("num_decoder_layers", encoder), "num_layers")
    gated = config.word("feed_forward_proj", "relu").startswith("gated-")
    config.put("activation", "swiglu" if gated else "gelu", "feed_forward_proj")
    if not config.flag("tie_word_embeddings", True):
        config.notes.append(
            "transformers 5 ties the output head of every T5, and so does the count; "
            "the first checkpoints of version 1.1 have a head of their own (--set model.tied_embeddings=false)"
        )


def patch_positions(config: Config) -> None:
    """One position for each patch and one for the class token."""
    side = config.size("image_size", 224) // config.size("patch_size", 16)
    config.put("max_sequence_length", side**2 + 1, "image_size")
    config.put("vocab_size", 1, "model_type")


def base_model(config: Config) -> None:
    """Encoders, whose parameters are counted without a head."""
    config.notes.append("counted as the base model with its pooler, without a head for a task")


def ignore(*keys: str) -> Callable[[Config], None]:
    """Keys that change neither parameters nor prices."""

    def rule(config: Config) -> None:
        config.read.update(keys)

    return rule
