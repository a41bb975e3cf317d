"""Rules of the table of model types that are no formula: patterns of layers, experts, positions, patches.

A row of types.yaml names its rules. The source of all of them is the code of the model types in transformers 5.23
(configuration_*.py and modeling_*.py of each type).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from planner.specs.huggingface.formulas import Scope
from planner.specs.text import any_of, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from planner.specs.huggingface.config import Config

FULL: Final = ("full_attention", "attention", "full", "hybrid_attention", "1")
"""Names of layers that attend to all tokens."""
_ASSUMED_SIDE: Final = 448
"""Assumed side of an image in pixels, for types that accept images of any size; data sets and preprocessors decide it.
"""
LLAMA3_SCALING: Final = {
    "factor": "factor",
    "low_freq_factor": "low_frequency",
    "high_freq_factor": "high_frequency",
    "original_max_position_embeddings": "original_max_sequence_length",
}


# --- kinds of layers ----------------------------------------------------------------------------------------------


def kinds(config: Config, of: str, optional: bool = False, **known: Mapping[str, Any]) -> None:
    """The number of layers of each kind, from the list `of` in the file; layers with full attention are plain.

    known: the fields of each kind by its name in the list.
    """
    names = _listed(config, of)
    config.missing.extend(() if names or optional else (of,))
    _refuse_others(config, of, names, (*known, *FULL), f"supported: {any_of([*known, 'full_attention'])}")
    for name in dict.fromkeys(names):
        if name in known:
            config.add_kind(names.count(name), of, **Scope(config=config).worked_out(known[name]))


def _refuse_others(config: Config, of: str, names: Iterable[str], known: Iterable[str], hint: str = "") -> None:
    """Refuse a list that names a layer of a kind that is not known."""
    if others := [name for name in names if name not in known]:
        config.unsupported(of, f"layers of kind {quoted(others[0])} are a block that is not supported", hint)


def _listed(config: Config, of: str) -> list[str]:
    """The name of each layer in the list `of`, or nothing if the file has no such list."""
    names = list(map(str, config.entries(of)))
    if names and len(names) != config.ours("num_layers"):
        config.refuse(of, f"`{of}` has {len(names)} entries for {config.ours('num_layers')} layers")
    return names


def windows(config: Config) -> None:
    """Which layers have windows: those of a list, all but every n-th if the file has a number instead, or none."""
    width = config.count("sliding_window")
    counts = [config.get(key) for key in ("sliding_window_pattern", "global_attn_every_n_layers")]
    config.read.update(("no_rope_layer_interval", "no_rope_layers"))
    period = next((each for each in counts if type(each) is int), 0)
    used, names = config.flag("use_sliding_window", True), config.entries("layer_types")
    if any(name not in FULL for name in names):
        local = {"sliding_window": "=sliding_window or 0"}
        chunked = {"sliding_window": "=attention_chunk_size or 0"}
        kinds(config, "layer_types", sliding_attention=local, chunked_attention=chunked)
    elif not names and used and width and period > 1:
        layers = config.ours("num_layers")
        config.add_kind(layers - layers // period, "sliding_window", sliding_window=width)


def local_window(config: Config, every: int = 0, of: str = "sliding_window", *, alike: bool = False) -> None:
    """Local attention, as wide as `of` says. Every `every`-th layer is global (0: none), or those that a list names.

    alike: whether the type's module gives every layer the window, whatever a list says. Source: transformers 5.23,
    models/mixtral/modeling_mixtral.py, and those of phi3 and starcoder2 (mask_function).
    """
    width, names = config.count(of), config.entries("layer_types")
    period = config.count("sliding_window_pattern") or config.count("_sliding_window_pattern") or every
    if names:
        is_global = [name == "full_attention" for name in names]
        period = is_global.index(True) + 1 if True in is_global else 0
        if is_global != [bool(period) and (layer + 1) % period == 0 for layer in range(len(names))]:
            hint = "every n-th layer is full_attention"
            config.unsupported("layer_types", "`layer_types` is no regular pattern", hint)
        if alike and width and period:
            config.unsupported("layer_types", "this type gives every layer the window", "leave out `layer_types`")
    if width and period != 1 and width < config.ours("max_sequence_length"):
        config.put("sliding_window", width, of)
        config.put("global_every", period, "layer_types" if names else "sliding_window_pattern")


def late_window(config: Config) -> None:
    """Qwen: local attention after the first `max_window_layers` layers; the published models turn it off."""
    config.get("sliding_window")
    late, used = config.count("max_window_layers") < config.ours("num_layers"), config.flag("use_sliding_window")
    listed = any(kind != "full_attention" for kind in config.entries("layer_types"))
    if (late and used) or listed:
        key = "layer_types" if listed else "use_sliding_window"
        config.unsupported(key, "local attention in some layers only is not supported")


def llama4(config: Config) -> None:
    """Layers attend within chunks, but for the global ones: those of `layer_types`, or else those without positions."""
    regular = list(range(config.size("interleave_moe_layer_step", 1) - 1, config.ours("num_layers"),
                         config.size("interleave_moe_layer_step", 1)))  # fmt: skip
    if config.entries("moe_layers") not in ([], regular):
        config.unsupported("moe_layers", "`moe_layers` is not every `interleave_moe_layer_step`-th layer")
    if (rotary := config.entries("no_rope_layers")) and not config.entries("layer_types"):
        config.values["layer_types"] = ["chunked_attention" if each else "full_attention" for each in rotary]
    local_window(config, config.count("no_rope_layer_interval", 4), of="attention_chunk_size")
    if config.ours("sliding_window"):
        config.notes.append("attention within chunks is priced as a sliding window of their length")


def single_layers(config: Config, late: Mapping[str, Any] | None = None, **known: Mapping[str, Any]) -> None:
    """A kind of layers for each combination of `layer_types` and `per_layer_config`; all other layers are plain.

    late: fields of the last layers, which reuse keys and values (`num_kv_shared_layers`).
    known: the fields of layers by their names in `layer_types`; a field without a value is left out.
    """
    scope, listed = Scope(config=config), config.part("per_layer_config")
    single: dict[int, dict[str, Any]] = {}
    for number in listed.values:
        changed = listed.part(number)
        strange = set(changed.values) - set(_OF_ONE_LAYER)
        if strange or not number.isdecimal():
            words = f"{quoted(min(strange, default=number))} for a single layer is not supported"
            config.unsupported("per_layer_config", words)
        single[int(number)] = {_OF_ONE_LAYER[key]: changed.size(key) for key in changed.values}
    first_late = config.ours("num_layers") - (config.count("num_kv_shared_layers") if late else 0)
    for place, name in enumerate(_listed(config, "layer_types")):
        own = scope.worked_out({**known.get(name, {}), **((late or {}) if place >= first_late else {})})
        fields = {key: value for key, value in own.items() if value is not None} | single.get(place, {})
        if fields:
            config.add_kind(1, "layer_types", **fields)


_OF_ONE_LAYER: Final = {
    "head_dim": "head_size", "num_key_value_heads": "num_kv_heads", "num_attention_heads": "num_heads",
    "v_head_dim": "value_head_size", "sliding_window": "sliding_window",
}  # fmt: skip


def nemotron_h(config: Config) -> None:
    """One block per layer (Mamba-2, attention, experts or feed-forward), from a list or a string of letters."""
    letters = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    older = {"mamba": "linear_attention", "attention": "full_attention"}
    pattern, key = config.get("hybrid_override_pattern"), "layers_block_type"
    if isinstance(pattern, str):
        names = [letters.get(letter, letter) for letter in pattern]
    else:
        names = [older.get(str(name), str(name)) for name in config.entries(key)]
    config.put("num_layers", len(names), "hybrid_override_pattern" if isinstance(pattern, str) else key)
    config.values[key] = sorted(names, key=lambda name: name != "moe")
    if "moe" not in names:
        config.document.pop("moe", None)


def shared_blocks(config: Config, mixer: Mapping[str, Any], adapters: str) -> None:
    """Zamba 2: attention blocks that some layers use in turn; each use counts as a layer before the mixer's layer.

    Attention reads the layer's input together with the embedding. Source: Zamba (arXiv 2405.16712), section 2.

    mixer: the fields of the mixer.
    adapters: formula of the parameters that belong to one use.
    """
    scope, key = Scope(config=config), "layers_block_type"
    names = list(map(str, config.entries(key)))
    _refuse_others(config, key, names, ("hybrid", "mamba", "linear_attention"))
    layers, hybrid, blocks = config.ours("num_layers"), names.count("hybrid"), config.count("num_mem_blocks", 1)
    h, wide = config.ours("hidden_size"), max(0, config.count("attention_hidden_size") - config.ours("hidden_size"))
    own = {"attends": False, "mixer": scope.worked_out(mixer), "ffn_hidden_size": 0, "norms_per_layer": 1}
    if layers > hybrid:
        config.add_kind(layers - hybrid, key, **own)
    if hybrid:
        config.add_kind(hybrid, key, **own, layer_matrix_params=h * h + scope.number(adapters))
    for block in range(min(blocks, hybrid)):
        uses = len(range(block, hybrid, blocks))
        further = {"layer_matrix_params": wide * scope.number("=(a + 2*g)*d"), "layer_vector_params": wide}
        config.add_kind(uses, key, shared_by=uses, **further)
    config.put("num_layers", layers + hybrid, "num_hidden_layers")


# --- experts and attention ----------------------------------------------------------------------------------------


def mixture(config: Config) -> None:
    """The leading layers without experts, from a list of names, a list of numbers, or a number."""
    names = ["dense" if kind == "dense" else "sparse" for kind in config.entries("mlp_layer_types")]
    only, number = config.counts("mlp_only_layers"), 0
    for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_dense_layers"):
        number = config.count(key) or number
    if names:
        number = names.count("dense")
        if "dense" in names[number:]:
            config.unsupported("mlp_layer_types", "only the first layers of `mlp_layer_types` may be dense")
    elif only:
        number = len(only)
        if sorted(only) != list(range(number)):
            config.unsupported("mlp_only_layers", "`mlp_only_layers` may only name the first layers")
    for key in ("decoder_sparse_step", "moe_layer_interval", "moe_layer_freq"):
        step = config.get(key, 1)
        if step != 1 and not isinstance(step, list):
            config.unsupported(key, f"`{key}` of {quoted(step)} is not supported", "supported: 1")
    config.put("moe.num_dense_layers", min(number, config.ours("num_layers")), "model_type")
    if not config.ours("ffn_hidden_size"):
        config.missing.extend(["intermediate_size"] * bool(number))
        config.put("ffn_hidden_size", config.ours("moe.ffn_hidden_size"), "model_type")  # no layer is dense


def sparse_steps(config: Config) -> None:
    """Qwen: experts in every `decoder_sparse_step`-th layer of the model, except the layers in `mlp_only_layers`.

    Our documents count the steps from the end of the dense layers, so these become a multiple of the step.
    """
    dense, step = config.entries("mlp_only_layers"), config.size("decoder_sparse_step", 1)
    if dense != list(range(len(dense))):
        config.unsupported("mlp_only_layers", "`mlp_only_layers` may only name the first layers")
    config.put("moe.num_dense_layers", len(dense) // step * step, "mlp_only_layers")


def expert_groups(config: Config, groups: int = 1) -> None:
    """A router that first chooses `topk_group` of `n_group` groups of experts, unless `topk_method` is `greedy`."""
    groups, limit = config.count("n_group", groups), config.count("topk_group", 1)
    if groups > 1 and config.get("topk_method") != "greedy":
        config.put("moe.num_groups", groups, "n_group")
        config.put("moe.groups_per_token", limit, "topk_group")


def no_experts(config: Config) -> None:
    """Granite 4 Micro: without routed experts, a dense block as wide as the shared one."""
    if config.get("num_local_experts") == 0:
        config.document.pop("moe", None)
        config.put("ffn_hidden_size", config.count("shared_intermediate_size"), "shared_intermediate_size")


def sparse(config: Config) -> None:
    """Every layer has an indexer, unless `layer_types` says which layers have one (`indexed_attention`)."""
    sizes = {"num_heads": "index_n_heads", "head_size": "index_head_dim", "top_k": "index_topk"}
    indexer = {target: config.size(key) for target, key in sizes.items()}
    letters = config.get("index_topk_pattern")
    every_nth, offset = config.size("index_topk_freq", 1), config.count("index_skip_topk_offset", 2)
    if listed := config.entries("indexer_types"):
        modes = [str(each) for each in listed]
    elif isinstance(letters, str):
        modes = ["shared" if letter == "S" else "full" for letter in letters]
    else:
        behind = (max(number - offset + 1, 0) for number in range(config.ours("num_layers")))
        modes = ["shared" if number % every_nth else "full" for number in behind]
    if shared := modes.count("shared"):
        config.add_kind(shared, "index_topk_freq", sparse=indexer | {"shared": True})
    names = list(map(str, config.entries("layer_types")))
    _refuse_others(config, "layer_types", names, (*FULL, "indexed_attention"))
    if not names or "indexed_attention" in names:
        config.put("sparse", indexer, "index_topk")


# --- ends ---------------------------------------------------------------------------------------------------------


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
        for name, target in LLAMA3_SCALING.items():
            if name not in scaling:
                config.refuse(key, f"`{key}` of type llama3 has no `{name}`", f"it has {', '.join(LLAMA3_SCALING)}")
            config.put(f"rope_scaling.{target}", scaling[name], name)
    elif kind != "default":
        config.notes.append(f"`{key}` of type {quoted(kind)} is not read: it changes no price, but what is computed")


def head_by_architecture(config: Config) -> None:
    """BERT: a language model's head, behind a square matrix and a norm, if `architectures` names one, or a pooler."""
    names = config.get("architectures", [])
    name = str(names[0]) if isinstance(names, list) and names else ""
    if not any(part in name for part in ("LM", "CausalLM", "Decoder", "PreTraining")):
        config.notes.append("counted as the base model with its pooler, without a head for a task")
        return
    hidden = config.ours("hidden_size")
    own = hidden * hidden + 3 * hidden
    for target in ("output_head", "head_bias"):
        config.put(target, True, "architectures")
    config.put("pooler", "PreTraining" in name, "architectures")
    if not config.flag("tie_word_embeddings", True):
        config.put("tied_embeddings", False, "tie_word_embeddings")
        own += config.ours("vocab_size")  # the model has the bias twice, in the head and beside it
    config.put("output_matrix_params", own, "architectures")


def patches(config: Config) -> None:
    """The patches of an image; `patches.class_tokens` of the row stand beside them."""
    class_tokens = config.ours("patches.class_tokens")
    size = config.counts("patch_size", 0, alone=True)[0]
    if not size:
        config.missing.append("patch_size")
        return
    side = max(1, (config.counts("image_size", 0, alone=True)[0] or _ASSUMED_SIDE) // size)
    if not config.get("image_size"):
        config.notes.append(f"images of {side * size} x {side * size} pixels are assumed, as the file has no size")
    channels = ("num_channels", "in_channels", "in_chans")
    config.put("patches.patch_size", size, "patch_size")
    config.put("patches.image_size", side * size, "image_size")
    key = next((key for key in channels if config.values.get(key) is not None), "num_channels")
    config.put("patches.num_channels", config.size(key, 3), "model_type")
    config.put("patches.num_frames", config.count("temporal_patch_size", 1), "temporal_patch_size")
    config.put("patches.class_tokens", class_tokens, "model_type")
    config.put("max_sequence_length", side**2 + class_tokens, "image_size")


RULES: Final[dict[str, Callable[..., None]]] = {
    rule.__name__: rule
    for rule in (
        *(kinds, windows, local_window, late_window, llama4, single_layers, nemotron_h, shared_blocks),
        *(mixture, sparse_steps, expert_groups, no_experts, sparse, rotary, head_by_architecture, patches),
    )
}
"""Rules by their names in the table."""
