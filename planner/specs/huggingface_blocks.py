"""Rules for the blocks of a Hugging Face config.json beyond plain attention: experts, windows, mixers, gates.

Each rule reads the keys of its block and fills our fields. The source of all rules is the code of the model types in
transformers 5.23 (configuration_*.py and modeling_*.py of each type).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from planner.specs.text import any_of, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from planner.specs.huggingface_config import Config

Rule = "Callable[[Config], None]"
Fields = dict[str, Any]

_FULL: Final = ("full_attention", "attention", "full", "hybrid_attention")


# --- kinds of layers ----------------------------------------------------------------------------------------------


def layers_by(key: str, kinds: Mapping[str, Callable[[Config], Fields]]) -> Callable[[Config], None]:
    """The number of layers of each kind, from a list of names in the file; layers with full attention are plain."""

    def rule(config: Config) -> None:
        names = config.entries(key)
        if not names:
            config.missing.append(key)
            return
        _put_kinds(config, key, names, kinds)

    return rule


def _put_kinds(config: Config, key: str, names: list[Any], kinds: Mapping[str, Callable[[Config], Fields]]) -> None:
    if len(names) != config.filled("num_layers"):
        config.refuse(key, f"`{key}` has {len(names)} entries for {config.filled('num_layers')} layers")
    for name in dict.fromkeys(map(str, names)):
        if name in kinds:
            config.add_kind(names.count(name), key, **kinds[name](config))
        elif name not in _FULL:
            known = any_of([*kinds, "full_attention"])
            config.refuse(
                key, f"layers of kind {quoted(name)} are a block that is not supported", f"supported: {known}"
            )


def kinds_in(config: Config, key: str, *known: str) -> list[str]:
    """The kinds of the layers in a list of names, each of which is `known`."""
    names = list(map(str, config.entries(key)))
    for name in names:
        if name not in known:
            config.refuse(key, f"layers of kind {quoted(name)} are a block that is not supported", any_of(known))
    return names


def every(period: int, offset: int, total: int) -> int:
    """How many of `total` layers are at position `offset` of their period."""
    return sum(1 for number in range(total) if number % period == offset) if period else 0


def window(key: str = "sliding_window", **fields: str) -> Callable[[Config], Fields]:
    """A kind of layers with a window; `fields` maps their own keys in the file to the fields that they replace."""

    def kind(config: Config) -> Fields:
        own = {target: config.size(name) for name, target in fields.items() if config.get(name) is not None}
        return {"sliding_window": config.count(key), **own}

    return kind


def windows(config: Config) -> None:
    """Which layers have windows: those of a list, all but every n-th if the file has a number instead, or none."""
    width = config.count("sliding_window")
    pattern = 0
    for key in ("sliding_window_pattern", "global_attn_every_n_layers", "no_rope_layer_interval", "no_rope_layers"):
        value = config.get(key)
        pattern = (
            value if key in ("sliding_window_pattern", "global_attn_every_n_layers") and type(value) is int else pattern
        )
    used = config.flag("use_sliding_window", True)
    kinds = config.entries("layer_types")
    if any(kind not in _FULL for kind in kinds):
        own = {"sliding_attention": window(), "chunked_attention": window("attention_chunk_size")}
        _put_kinds(config, "layer_types", kinds, own)
    elif not kinds and used and width and pattern > 1:
        layers = config.filled("num_layers")
        config.add_kind(layers - layers // pattern, "sliding_window", sliding_window=width)


# --- experts ------------------------------------------------------------------------------------------------------


def mixture(
    width: str = "moe_intermediate_size", *, shared: str = "", shared_width: str = "", shared_unit: str = ""
) -> Callable[[Config], None]:
    """Routed experts of one width, and shared experts by number (key `shared`) or by joint width (`shared_width`)."""

    def rule(config: Config) -> None:
        each = config.count(width)
        config.put("moe.ffn_hidden_size", each, width)
        if shared:
            unit = config.count(shared_unit) if shared_unit and config.get(shared_unit) else each
            config.put("moe.shared_ffn_hidden_size", config.count(shared) * unit, shared)
        elif shared_width:
            config.put("moe.shared_ffn_hidden_size", config.count(shared_width), shared_width)
        config.put("moe.num_dense_layers", _leading_dense_layers(config), width)
        if not each:
            config.missing.append(width)
        if not config.filled("ffn_hidden_size"):
            if config.document["moe"]["num_dense_layers"]:
                config.missing.append("intermediate_size")
            config.put("ffn_hidden_size", each, width)  # no layer is dense

    return rule


def _leading_dense_layers(config: Config) -> int:
    """The number of leading layers without experts, from a list of names, a list of numbers, or a number."""
    kinds = ["dense" if kind == "dense" else "sparse" for kind in config.entries("mlp_layer_types")]
    only, number = config.counts("mlp_only_layers"), 0
    for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_dense_layers"):
        number = config.count(key) or number
    if kinds:
        number = kinds.count("dense")
        if "dense" in kinds[number:]:
            config.refuse("mlp_layer_types", "only the first layers of `mlp_layer_types` may be dense")
    elif only:
        number = len(only)
        if sorted(only) != list(range(number)):
            config.refuse("mlp_only_layers", "`mlp_only_layers` may only name the first layers")
    for key in ("decoder_sparse_step", "moe_layer_interval", "moe_layer_freq"):
        step = config.get(key, 1)
        if step != 1 and not isinstance(step, list):
            config.refuse(key, f"`{key}` of {quoted(step)} is not supported", "supported: 1")
    return min(number, config.filled("num_layers"))


# --- attention ----------------------------------------------------------------------------------------------------


def gate(how: str, key: str = "") -> Callable[[Config], None]:
    """A gate on the output of attention, per `head` or per `element`; with `key`, only if that flag is true."""

    def rule(config: Config) -> None:
        if not key or config.get(key):
            config.put("attention_gate", how, key or "model_type")

    return rule


def norm_if(key: str, target: str, value: Any) -> Callable[[Config], None]:
    """Set `target` if the flag `key` is true."""

    def rule(config: Config) -> None:
        if config.flag(key):
            config.put(target, value, key)

    return rule


def both_biases(key: str) -> Callable[[Config], None]:
    """One config key says whether attention and the feed-forward block have biases."""

    def rule(config: Config) -> None:
        for target in ("attention_bias", "mlp_bias"):
            config.put(target, config.flag(key, True), key)

    return rule


def sparse(config: Config) -> None:
    """Every layer has an indexer, unless `layer_types` says which layers have one (`indexed_attention`)."""
    config.read.update(("indexer_rope_interleave", *_OF_INDEXERS))
    modes = _indexer_modes(config)
    if "shared" in modes:
        config.add_kind(modes.count("shared"), "index_topk_freq", sparse=indexer(config) | {"shared": True})
    kinds = kinds_in(config, "layer_types", *_FULL, "indexed_attention")
    if kinds and "indexed_attention" not in kinds:
        return
    config.put("sparse", indexer(config), "index_topk")


_OF_INDEXERS: Final = (
    *("index_n_heads", "index_head_dim", "index_topk"),
    *("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
)


def indexer(config: Config) -> Fields:
    """The indexer that chooses keys."""
    sizes = {"num_heads": "index_n_heads", "head_size": "index_head_dim", "top_k": "index_topk"}
    return {target: config.size(key) for target, key in sizes.items()}


def _indexer_modes(config: Config) -> list[str]:
    """Which layers choose keys, and which reuse the previous layer's keys: from a list, letters, or every n-th."""
    listed, letters = config.entries("indexer_types"), config.get("index_topk_pattern")
    if listed:
        return [str(each) for each in listed]
    if isinstance(letters, str):
        return ["shared" if letter == "S" else "full" for letter in letters]
    every_nth, offset = config.size("index_topk_freq", 1), config.count("index_skip_topk_offset", 2)
    layers = range(config.filled("num_layers"))
    return ["shared" if max(number - offset + 1, 0) % every_nth else "full" for number in layers]


# --- mixers -------------------------------------------------------------------------------------------------------


def mamba2(prefix: str = "mamba_", *, beside: bool = False) -> Callable[[Config], Fields]:
    """A Mamba-2 block; with `beside`, attention reads the same input in parallel (Falcon-H1)."""

    def kind(config: Config) -> Fields:
        names = {
            "mamba_": ("n_heads", "d_head", "d_state", "n_groups", "d_conv", "conv_bias", "proj_bias"),
            "": ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "use_conv_bias", "use_bias"),
        }[prefix]
        heads, size, state, groups, kernel, conv_bias, bias = (f"{prefix}{name}" for name in names)
        mixer: Fields = {
            "kind": "mamba2",
            "num_heads": config.size(heads),
            "value_size": _mamba_head_size(config, size, config.size(heads)),
            "key_size": config.count(state),
            "num_key_heads": config.count(groups),
            "kernel": config.count(kernel),
            "conv_bias": config.flag(conv_bias),
            "bias": config.flag(bias),
            "norm": config.flag("mamba_rms_norm", True),
        }
        config.get(f"{prefix}expand")
        if beside:  # one key for each of the two projections
            inner = mixer["num_heads"] * mixer["value_size"]
            into = 2 * inner + 2 * mixer["num_key_heads"] * mixer["key_size"] + mixer["num_heads"]
            both = into * mixer["bias"] + config.filled("hidden_size") * config.flag("projectors_bias")
            return {"mixer": mixer | {"bias": False}, "attends": True, "layer_vector_params": both}
        return {"mixer": mixer, "attends": False}

    return kind


def _mamba_head_size(config: Config, key: str, heads: int) -> int:
    """Head size of Mamba-2: as given, or the inner width divided by the heads."""
    config.get(key)
    if width := config.count("mamba_d_ssm"):
        return width // max(1, heads)
    if config.get(key, "auto") != "auto":
        return config.size(key)
    return config.size("mamba_expand", 2) * config.filled("hidden_size") // max(1, heads)


def mamba1(config: Config) -> Fields:
    """A Mamba-1 block of Jamba."""
    mixer = {
        "kind": "mamba",
        "num_heads": 1,
        "value_size": config.size("mamba_expand", 2) * config.filled("hidden_size"),
        "key_size": config.count("mamba_d_state"),
        "rank": _time_step_rank(config, "mamba_dt_rank"),
        "kernel": config.count("mamba_d_conv"),
        "conv_bias": config.flag("mamba_conv_bias"),
        "bias": config.flag("mamba_proj_bias"),
        "state_norms": True,
    }
    return {"mixer": mixer, "attends": False}


def _time_step_rank(config: Config, key: str) -> int:
    rank = config.get(key, "auto")
    return -(-config.filled("hidden_size") // 16) if rank == "auto" else config.count(key)


def gated_deltanet(config: Config) -> Fields:
    """Gated DeltaNet as in Qwen3-Next."""
    mixer = {
        "kind": "gated-deltanet",
        "num_heads": config.size("linear_num_value_heads"),
        "num_key_heads": config.count("linear_num_key_heads"),
        "key_size": config.count("linear_key_head_dim"),
        "value_size": config.size("linear_value_head_dim"),
        "kernel": config.count("linear_conv_kernel_dim"),
    }
    return {"mixer": mixer, "attends": False, "attention_gate": "none", "layer_vector_params": 0}


def kda(*, low_rank: bool) -> Callable[[Config], Fields]:
    """Kimi delta attention, whose gates are low-rank or full matrices."""

    def kind(config: Config) -> Fields:
        size = config.size("linear_head_dim")
        mixer = {
            "kind": "kda",
            "num_heads": config.size("linear_num_heads"),
            "key_size": size,
            "value_size": size,
            "rank": size if low_rank else 0,
            "kernel": config.count("linear_conv_kernel_dim"),
        }
        config.get("short_conv_kernel_size")
        own = {"attends": False, "latent": False, "attention_gate": "none", "layer_vector_params": 0}
        return {"mixer": mixer, **own}

    return kind


def lightning(config: Config) -> Fields:
    """Lightning attention, with the same heads as attention."""
    heads = config.filled("num_heads")
    size = config.filled("head_size") or config.filled("hidden_size") // max(1, heads)
    mixer = {"kind": "lightning", "num_heads": heads, "key_size": size, "value_size": size}
    return {"mixer": mixer, "attends": False}


def convolution(config: Config) -> Fields:
    """The gated short convolution of LFM2."""
    mixer = {
        "kind": "convolution",
        "num_heads": 1,
        "value_size": config.filled("hidden_size"),
        "kernel": config.count("conv_L_cache"),
        "bias": config.flag("conv_bias"),
        "conv_bias": config.flag("conv_bias"),
    }
    return {"mixer": mixer, "attends": False, "attention_gate": "none"}


def whole_stack(kind: Callable[[Config], Fields]) -> Callable[[Config], None]:
    """Give every layer a mixer of this kind."""

    def rule(config: Config) -> None:
        for target, value in kind(config).items():
            config.put(target, value, "model_type")

    return rule


def pure_mamba(config: Config) -> None:
    """Mamba: each layer is one norm and one block, without attention and without a feed-forward block."""
    mixer = {
        "kind": "mamba",
        "num_heads": 1,
        "value_size": config.count("intermediate_size") or config.count("expand", 2) * config.filled("hidden_size"),
        "key_size": config.count("state_size"),
        "rank": _time_step_rank(config, "time_step_rank"),
        "kernel": config.count("conv_kernel"),
        "conv_bias": config.flag("use_conv_bias"),
        "bias": config.flag("use_bias"),
    }
    config.get("expand")
    for target, value in {"mixer": mixer, "attends": False, "ffn_hidden_size": 0, "num_heads": 1}.items():
        config.put(target, value, "model_type")


def pure_mamba2(config: Config) -> None:
    """Mamba-2 alone."""
    whole_stack(mamba2(""))(config)
    config.get("expand")
    config.put("num_heads", config.count("num_heads"), "num_heads")
    config.put("ffn_hidden_size", 0, "model_type")


def jamba(config: Config) -> None:
    """Attention in one layer of every n, Mamba elsewhere; experts in one layer of every k."""
    layers = config.filled("num_layers")
    period, offset = config.count("attn_layer_period"), config.count("attn_layer_offset")
    if (others := layers - every(period, offset, layers)) and (fields := mamba1(config)):
        config.add_kind(others, "attn_layer_period", **fields)
    frequency, first = config.count("expert_layer_period"), config.count("expert_layer_offset")
    if not config.filled("ffn_hidden_size"):
        config.missing.append("intermediate_size")
    config.put("moe.ffn_hidden_size", config.filled("ffn_hidden_size"), "intermediate_size")
    if first != frequency - 1:
        config.refuse("expert_layer_offset", "experts must be in the last layer of each `expert_layer_period`")
    config.put("moe.layer_frequency", frequency, "expert_layer_period")


def zamba(config: Config) -> None:
    """Mamba-1 in each layer; before some layers a shared attention block, with one matrix of the layer's own."""
    mixer = mamba1(config)["mixer"] | {"state_norms": False}
    config.get("n_mamba_heads")
    _shared_blocks(config, mixer, config.entries("layers_block_type").count("hybrid"), blocks=1, adapters=0)


def zamba2(config: Config) -> None:
    """Zamba with Mamba-2, several shared blocks in turn, and adapters in each layer that uses one."""
    mixer = {
        "kind": "mamba2",
        "num_heads": config.size("n_mamba_heads"),
        "value_size": config.size("mamba_headdim"),
        "key_size": config.count("mamba_d_state"),
        "num_key_heads": config.count("mamba_ngroups"),
        "kernel": config.count("mamba_d_conv"),
        "conv_bias": True,
        "bias": config.flag("add_bias_linear"),
    }
    config.read.update(("kv_channels", "num_query_groups", "hybrid_layer_ids", "mamba_expand", "use_conv_bias"))
    config.put("mlp_bias", config.flag("add_bias_linear"), "add_bias_linear")
    width = config.count("attention_hidden_size")
    adapters = config.filled("hidden_size") + 2 * config.filled("ffn_hidden_size")
    if config.flag("use_shared_attention_adapter"):
        adapters += 6 * width
    hybrid = config.entries("layers_block_type").count("hybrid")
    _shared_blocks(config, mixer, hybrid, config.count("num_mem_blocks", 1), config.count("adapter_rank") * adapters)


def _shared_blocks(config: Config, mixer: Fields, hybrid: int, blocks: int, adapters: int) -> None:
    """`blocks` attention blocks that `hybrid` layers use alternately.

    Each use counts as a layer before the mixer's layer.

    Attention reads the layer's input together with the embedding. Source: Zamba (arXiv 2405.16712), section 2.
    """
    layers, h, wide = config.filled("num_layers"), config.filled("hidden_size"), config.count("attention_hidden_size")
    kinds_in(config, "layers_block_type", "hybrid", "mamba", "linear_attention")
    config.read.update(("attn_layer_period", "attn_layer_offset"))
    queries = config.filled("num_heads")
    size, heads = config.filled("head_size"), queries + 2 * (config.filled("num_kv_heads") or queries)
    own: Fields = {"attends": False, "mixer": mixer, "ffn_hidden_size": 0, "norms_per_layer": 1}
    if layers > hybrid:
        config.add_kind(layers - hybrid, "layers_block_type", **own)
    if hybrid:
        config.add_kind(hybrid, "layers_block_type", **own, layer_matrix_params=h * h + adapters)
    for block in range(min(blocks, hybrid)):
        uses = len(range(block, hybrid, blocks))
        block_fields = {"layer_matrix_params": max(0, wide - h) * heads * size, "layer_vector_params": max(0, wide - h)}
        config.add_kind(uses, "layers_block_type", shared_by=uses, **block_fields)
    config.put("num_layers", layers + hybrid, "num_hidden_layers")


def bamba(config: Config) -> None:
    """Mamba-2 in all layers except the layers in a list."""
    config.get("layer_types")
    attention = config.entries("attn_layer_indices")
    if others := config.filled("num_layers") - len(attention):
        config.add_kind(others, "attn_layer_indices", **mamba2()(config))


_OF_EXPERTS: Final = (
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
)


def nemotron_h(config: Config) -> None:
    """One block per layer (Mamba-2, attention, experts or feed-forward), from a list or a string of letters."""
    key = "layers_block_type"
    letters = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        key = "hybrid_override_pattern"
        names: list[Any] = [letters.get(letter, letter) for letter in pattern]
    else:
        names = [
            {"mamba": "linear_attention", "attention": "full_attention"}.get(str(n), n) for n in config.entries(key)
        ]
    config.put("num_layers", len(names), key)
    config.get("num_hidden_layers")
    block = {"experts": False, "norms_per_layer": 1}

    def mamba(config: Config) -> Fields:
        size, heads = config.size("mamba_head_dim"), config.size("mamba_num_heads")
        mixer = {
            "kind": "mamba2",
            "num_heads": heads,
            "value_size": size,
            "key_size": config.count("ssm_state_size"),
            "num_key_heads": config.count("n_groups"),
            "kernel": config.count("conv_kernel"),
            "conv_bias": config.flag("use_conv_bias"),
            "bias": config.flag("use_bias"),
        }
        config.get("mamba_proj_bias")
        return {"mixer": mixer, "attends": False, "ffn_hidden_size": 0, **block}

    config.put("norms_per_layer", 1, "model_type")
    if experts := names.count("moe"):
        config.put("moe.num_experts", config.count("n_routed_experts"), "n_routed_experts")
        config.put("moe.experts_per_token", config.count("num_experts_per_tok"), "num_experts_per_tok")
        config.put("moe.ffn_hidden_size", config.count("moe_intermediate_size"), "moe_intermediate_size")
        config.get("n_shared_experts")  # one block of the width that is given
        shared = config.count("moe_shared_expert_intermediate_size")
        config.put("moe.shared_ffn_hidden_size", shared, "moe_shared_expert_intermediate_size")
        config.put("moe.latent_size", config.count("moe_latent_size"), "moe_latent_size")
        config.add_kind(experts, key, attends=False, norms_per_layer=1)
    kinds: dict[str, Callable[[Config], Fields]] = {
        "linear_attention": mamba,
        "full_attention": lambda _: {"ffn_hidden_size": 0, **block},
        "mlp": lambda _: {"attends": False, **block},
    }
    for name in dict.fromkeys(map(str, names)):
        if name in kinds:
            config.add_kind(names.count(name), key, **kinds[name](config))
        elif name != "moe":
            config.refuse(key, f"layers of kind {quoted(name)} are a block that is not supported")
    # the library gives attention no biases here
    config.read.update(("expand", "chunk_size", "attention_bias", "layers_block_type", "time_step_rank", *_OF_EXPERTS))
    if config.flag("mlp_bias") and experts:
        config.put("moe.expert_bias", False, "mlp_bias")
        shared = config.count("moe_shared_expert_intermediate_size")
        config.put("moe.vector_params", shared + config.filled("hidden_size"), "mlp_bias")


def recurrent_gemma(config: Config) -> None:
    """Recurrent blocks and local attention in turn; each of the two feed-forward inputs has half the width."""
    pattern, layers = config.entries("block_types") or config.entries("_block_types"), config.filled("num_layers")
    names = [str(pattern[number % len(pattern)]) for number in range(layers)] if pattern else []
    width = config.count("lru_width") or config.filled("hidden_size")
    heads = max(1, config.filled("num_heads"))
    mixer = {
        "kind": "rg-lru",
        "num_heads": heads,
        "value_size": width // heads,
        "kernel": config.count("conv1d_width"),
        "conv_bias": True,
        "bias": True,
    }
    config.put("ffn_hidden_size", config.count("intermediate_size") // 2, "intermediate_size")
    config.put("sliding_window", config.count("attention_window_size"), "attention_window_size")
    config.put("global_every", 0, "attention_window_size")
    config.put("layer_vector_params", config.filled("hidden_size"), "model_type")  # the bias of attention's output
    recurrent = {"mixer": mixer, "attends": False, "layer_vector_params": 0, "sliding_window": 0}
    if num := names.count("recurrent"):
        config.add_kind(num, "block_types", **recurrent)


def rwkv(config: Config) -> None:
    """RWKV-4: time mixing replaces attention, and the feed-forward block has its own receptance."""
    hidden = config.filled("hidden_size")
    width = config.count("attention_hidden_size") or hidden
    config.put("mixer", {"kind": "rwkv", "num_heads": 1, "value_size": width}, "model_type")
    config.put("attends", False, "model_type")
    config.put("num_heads", 1, "model_type")
    config.put("ffn_hidden_size", config.count("intermediate_size") or 4 * hidden, "intermediate_size")
    config.put("layer_matrix_params", hidden * hidden, "model_type")
    config.put("layer_vector_params", 2 * hidden, "model_type")


def xlstm(config: Config) -> None:
    """xLSTM: a matrix memory replaces attention, and the width of the feed-forward block is rounded."""
    if config.flag("use_bias"):
        config.refuse("use_bias", "biases of xLSTM are not supported")
    config.put("tied_embeddings", False, "model_type")  # the library ties nothing here
    config.read.update(
        ("add_out_norm", "norm_reduction_force_float32", "chunkwise_kernel", "sequence_kernel", "step_kernel")
    )
    hidden, heads = config.filled("hidden_size"), config.size("num_heads")

    def rounded(factor: float, to: int) -> int:
        return int(-(-(hidden * factor) // to) * to)

    keys, values = rounded(config.number("qk_dim_factor", 0.5), 64), rounded(config.number("v_dim_factor", 1.0), 64)
    mixer = {"kind": "mlstm", "num_heads": heads, "key_size": keys // heads, "value_size": values // heads}
    mixer["bias"] = config.flag("use_bias")
    multiple = config.size("ffn_round_up_to_multiple_of", 64)
    config.put("mixer", mixer, "model_type")
    config.put("attends", False, "model_type")
    config.put("ffn_hidden_size", rounded(config.number("ffn_proj_factor", 2.667), multiple), "ffn_proj_factor")
