"""Rules for single model types, for the parts that only their own code has.

The source of all rules is the code in transformers 5.23: configuration_*.py and modeling_*.py of each type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.specs.huggingface_blocks import (
    Fields,
    gated_deltanet,
    indexer,
    kinds_in,
    layers_by,
    mamba2,
    mixture,
    window,
    windows,
)
from planner.specs.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.specs.huggingface_config import Config


def latent_heads(config: Config) -> None:
    """Ignore plain attention's keys for heads, which newer files repeat; latent attention has its own keys for them."""
    config.read.update(("head_dim", "qk_head_dim", "rope_interleave"))
    config.get("num_key_value_heads")
    config.document.pop("num_kv_heads", None)


def latent_bias(config: Config) -> None:
    """Biases of the projections to the latents and of the output projection."""
    if config.flag("attention_bias"):
        of = ("mla.q_lora_rank", "mla.kv_lora_rank", "mla.rope_head_size", "hidden_size")
        config.add("layer_vector_params", sum(map(config.filled, of)))


def sub_norms(config: Config) -> None:
    """BitNet: a norm before the output projection, and a norm before the last matrix of the feed-forward block."""
    config.add("layer_vector_params", config.filled("hidden_size") + config.filled("ffn_hidden_size"))


def differential(config: Config) -> None:
    """DiffLlama: four vectors of a head's size, which weigh the two softmaxes."""
    size = config.filled("head_size") or config.filled("hidden_size") // max(1, config.filled("num_heads"))
    config.add("layer_vector_params", 4 * size)


def doge(config: Config) -> None:
    """Doge: values produce a decay for each key-value head, and residual connections have learned weights."""
    if config.flag("is_moe"):
        config.refuse("is_moe", "cross-domain experts of Doge are a block that is not supported")
    config.read.update(("num_experts", "num_experts_per_tok", "keep_window_size"))
    hidden, heads = config.filled("hidden_size"), max(1, config.filled("num_heads"))
    kv_heads = config.filled("num_kv_heads") or heads
    size = config.filled("head_size") or hidden // heads
    config.add("layer_matrix_params", kv_heads * kv_heads * size)
    config.add("layer_vector_params", 2 * hidden + kv_heads + (kv_heads if config.flag("attention_bias") else 0))


def ernie_bias(config: Config) -> None:
    """One config key says whether attention and the feed-forward block have biases."""
    config.put("mlp_bias", config.flag("use_bias"), "use_bias")
    config.get("moe_layer_end_index")


def shared_bias(key: str) -> Callable[[Config], None]:
    """Biases of the shared experts."""

    def rule(config: Config) -> None:
        shared = config.filled("moe.shared_ffn_hidden_size")
        if config.flag(key) and shared:
            config.put("moe.vector_params", 2 * shared + config.filled("hidden_size"), key)

    return rule


def floor_head(config: Config) -> None:
    """The head size if the heads do not divide the width: the quotient, rounded down."""
    if not config.filled("head_size"):
        config.put("head_size", config.filled("hidden_size") // max(1, config.filled("num_heads")), "hidden_size")


def output_bias(key: str) -> Callable[[Config], None]:
    """A bias on the output projection only."""

    def rule(config: Config) -> None:
        if config.flag(key):
            config.add("layer_vector_params", config.filled("hidden_size"))

    return rule


def stablelm(config: Config) -> None:
    """StableLM: one norm if both blocks read the same input, and norms of each head."""
    if config.flag("use_parallel_residual"):
        config.put("parallel_attention", True, "use_parallel_residual")
        config.put("norms_per_layer", 1, "use_parallel_residual")
    if config.flag("qk_layernorm"):
        config.put("qk_norm", "width", "qk_layernorm")


def moshi(config: Config) -> None:
    """Moshi: each input of the gate has half of `ffn_dim`, and the embedding has one more row."""
    config.put("ffn_hidden_size", config.filled("ffn_hidden_size") // 2, "ffn_dim")
    config.put("table_params", config.filled("hidden_size"), "model_type")
    config.put("tied_embeddings", False, "model_type")
    windows(config)


def multi_query(config: Config) -> None:
    """One key-value head (multi-query), or as many as there are heads."""
    config.get("num_key_value_heads")
    one = config.flag("multi_query", True)
    config.put("num_kv_heads", 1 if one else config.filled("num_heads"), "multi_query")


def gpt_neo(config: Config) -> None:
    """GPT-Neo: a bias on the output projection only; a list of repeated patterns names the local layers."""
    config.add("layer_vector_params", config.filled("hidden_size"))
    names = config.entries("attention_layers")
    for entry in config.entries("attention_types") if not names else ():
        match entry:
            case [list() as kinds, int() as times] if times <= config.filled("num_layers"):
                names = [*names, *kinds * times]
            case _:
                config.refuse("attention_types", "`attention_types` must hold pairs of kinds and a number of times")
    config.get("attention_types")
    width = config.count("window_size", 256)
    if (local := names.count("local")) and width < config.filled("max_sequence_length"):
        config.add_kind(local, "attention_layers", sliding_window=width)


def neox_japanese(config: Config) -> None:
    """A bias after attention in the last layer only."""
    config.put(
        "ffn_hidden_size",
        config.count("intermediate_multiple_size", 4) * config.filled("hidden_size"),
        "intermediate_multiple_size",
    )
    config.put("table_params", config.filled("hidden_size"), "model_type")


def persimmon(config: Config) -> None:
    """Persimmon: the LayerNorms of queries and keys have biases."""
    if config.flag("qk_layernorm", True):
        config.put("qk_norm", "head", "qk_layernorm")
        config.add("layer_vector_params", 2 * (config.filled("hidden_size") // max(1, config.filled("num_heads"))))


def phi(config: Config) -> None:
    """Phi: LayerNorms of queries and keys with biases, which its files turn off."""
    if config.flag("qk_layernorm"):
        persimmon(config)


def mpt(config: Config) -> None:
    """MPT: ALiBi positions, no biases in norms and matrices, and a width that is a multiple of the hidden size."""
    ratio = config.number("expansion_ratio", 4)
    config.put("ffn_hidden_size", int(ratio * config.filled("hidden_size")), "expansion_ratio")
    config.read.update(
        (
            "embedding_fraction",
            "init_device",
            "learned_pos_emb",
            "norm_type",
            "no_bias",
            "resid_pdrop",
            "use_norm_bias",
        )
    )
    attention = config.part("attn_config")
    if attention.word("attn_type", "multihead_attention") != "multihead_attention":
        attention.refuse("attn_type", "only `attn_type` multihead_attention is supported")
    if attention.flag("qk_ln"):
        attention.refuse("qk_ln", "`qk_ln` is a block that is not supported")


def cpmant(config: Config) -> None:
    """CPM-Ant: tables of prompts and segments, and learned positions per bucket, segment and head."""
    h, segments = config.filled("hidden_size"), config.count("segment_types")
    prompts = config.count("prompt_types") * config.count("prompt_length")
    buckets = (config.count("position_bias_num_buckets") + segments**2) * config.filled("num_heads")
    config.put("table_params", (prompts + segments) * h + buckets, "prompt_length")
    config.put("tied_embeddings", False, "model_type")


def modernbert(config: Config) -> None:
    """ModernBERT: no norm before the first block, and a square matrix and a norm before the head."""
    h, bias = config.filled("hidden_size"), config.flag("attention_bias")
    config.read.update(("local_attention", "classifier_bias", "classifier_activation"))
    norm = (2 if config.flag("norm_bias") else 1) * h
    config.put("norm", "layernorm", "norm_bias")
    config.put("norm_bias", config.flag("norm_bias"), "norm_bias")
    config.put("attention_bias", bias, "attention_bias")
    if config.flag("mlp_bias"):
        config.add("layer_vector_params", 2 * config.filled("ffn_hidden_size") + h)
    config.put("output_matrix_params", h * h + norm + (h if config.flag("classifier_bias") else 0), "model_type")
    config.put("head_bias", config.flag("decoder_bias", True), "decoder_bias")
    config.get("norm_eps")
    layers = config.filled("num_layers")
    names = kinds_in(config, "layer_types", "sliding_attention", "full_attention")
    local = names.count("sliding_attention")
    first = {"norms_per_layer": 1}
    if names and names[0] == "sliding_attention":
        config.add_kind(1, "model_type", sliding_window=config.count("sliding_window"), **first)
        local -= 1
    elif layers:
        config.add_kind(1, "model_type", **first)
    if local > 0:
        config.add_kind(local, "layer_types", sliding_window=config.count("sliding_window"))


def experts_head_bias(config: Config) -> None:
    """The head has a bias if the blocks have biases."""
    config.put("head_bias", config.flag("use_bias"), "use_bias")


def gated_biases(config: Config) -> None:
    """Biases of attention whose query projection also computes the output's gate: one more per element of the gate."""
    if config.flag("attention_bias"):
        size = config.filled("head_size") or config.filled("hidden_size") // max(1, config.filled("num_heads"))
        config.add("layer_vector_params", config.filled("num_heads") * size)


def never_tied(config: Config) -> None:
    """The library's code never ties the head of this type, even if the file says so."""
    config.put("tied_embeddings", False, "model_type")


def laguna_gate(config: Config) -> None:
    """A gate for each head, or for each element."""
    per_head = config.get("gating") in (True, None, "per-head")
    config.put("attention_gate", "head" if per_head else "element", "gating")


def xlnet(config: Config) -> None:
    """XLNet: each layer has a matrix for relative positions, and each head has three biases and two segments."""
    h = config.filled("hidden_size")
    config.add("layer_matrix_params", h * h)
    config.add("layer_vector_params", 5 * h)
    config.put("table_params", h, "model_type")
    config.read.update(("layer_norm_eps", "d_head", "attn_type", "mem_len", "clamp_len", "same_length", "bi_data"))


def xlm(config: Config) -> None:
    """XLM: a feed-forward block of four times the width, and embeddings of languages."""
    h, languages = config.filled("hidden_size"), config.count("n_langs", 1)
    config.put("ffn_hidden_size", 4 * h, "emb_dim")
    if languages > 1 and config.flag("use_lang_emb", True):
        config.put("table_params", languages * h, "n_langs")
    config.read.update(("layer_norm_eps", "sinusoidal_embeddings", "asm", "causal", "is_encoder", "gelu_activation"))


def dbrx(config: Config) -> None:
    """DBRX: nested documents describe attention and experts."""
    attention, block = config.part("attn_config"), config.part("ffn_config")
    config.put("num_kv_heads", attention.size("kv_n_heads", 1), "attn_config")
    config.put("moe.num_experts", block.size("moe_num_experts", 4), "ffn_config")
    config.put("moe.experts_per_token", block.size("moe_top_k", 1), "ffn_config")
    for target in ("moe.ffn_hidden_size", "ffn_hidden_size"):
        config.put(target, block.size("ffn_hidden_size", 3584), "ffn_config")


def gated_norms(config: Config) -> None:
    """A.X-K2: one product computes the latent queries and the output gates, and norms have low-rank gates."""
    h, rank = config.filled("hidden_size"), config.count("gated_norm_rank")
    latents = config.size("q_lora_rank") * config.filled("num_heads")
    keys = config.filled("mla.nope_head_size") + config.filled("mla.rope_head_size")
    config.add("layer_matrix_params", latents * keys)
    config.add("layer_matrix_params", 2 * latents * config.filled("mla.value_head_size") + 2 * h * rank)
    config.put("moe.vector_params", 2 * h * rank, "gated_norm_rank")


def dots3(config: Config) -> None:
    """Layers with windows have other latents, a norm of the rotary key, and a gate for each head."""
    targets = {"kv_lora_rank": "kv_lora_rank", "q_lora_rank": "q_lora_rank", "qk_nope_head_dim": "nope_head_size",
               "qk_rope_head_dim": "rope_head_size", "v_head_dim": "value_head_size"}  # fmt: skip
    listed, latents = config.part("per_layer_config"), {each: config.filled(f"mla.{each}") for each in targets.values()}
    if config.flag("attention_bias"):
        config.refuse("attention_bias", "`attention_bias` beside layers of different latents is not supported")
    for number, name in enumerate(kinds_in(config, "layer_types", "sliding_attention", "indexed_attention")):
        key = f"{number:02d}"
        changed = listed.part(key if key in listed.values else str(number))
        own = latents | {targets[key]: changed.size(key) for key in targets if changed.get(key) is not None}
        fields: Fields = {"mla": own} if own != latents else {}
        if changed.get("num_attention_heads") is not None:
            fields |= dict.fromkeys(("num_heads", "num_kv_heads"), changed.size("num_attention_heads"))
        fields["layer_vector_params"] = own["rope_head_size"]
        if "mla" in fields or "num_heads" in fields:
            fields["head_size"] = own["nope_head_size"] + own["rope_head_size"]
        local = name == "sliding_attention"
        fields |= {"sliding_window": config.count("sliding_window")} if local else {"sparse": indexer(config)}
        config.add_kind(1, "layer_types", **fields)


def after_experts(config: Config) -> None:
    """An additional norm after the experts."""
    config.put("moe.vector_params", config.filled("hidden_size"), "model_type")


def longcat(config: Config) -> None:
    """LongCat: each layer has two attentions, two feed-forward blocks, and experts beside the second block.

    Some of the experts do nothing.
    """
    each, layers, h = config.count("expert_ffn_hidden_size"), config.count("num_layers"), config.filled("hidden_size")
    idle, experts = config.count("zero_expert_num"), config.count("n_routed_experts")
    config.put("num_layers", 2 * layers, "num_layers")
    config.put("moe.num_experts", experts, "n_routed_experts")
    config.put("moe.experts_per_token", config.count("moe_topk"), "moe_topk")
    config.put("moe.ffn_hidden_size", each, "expert_ffn_hidden_size")
    config.put("moe.shared_ffn_hidden_size", config.filled("ffn_hidden_size"), "ffn_hidden_size")
    config.put("moe.layer_frequency", 2, "num_layers")
    config.put("moe.vector_params", idle * h, "zero_expert_num")
    config.notes.append(
        "experts that pass a token on are in the router and never chosen, so that a token takes more time"
    )


def gate_biases(config: Config) -> None:
    """A bias of each head's gate."""
    config.add("layer_vector_params", config.filled("num_heads"))


def granite_experts(config: Config) -> None:
    """Routed and shared experts; without routed experts (Granite 4 Micro), a dense block as wide as the shared one."""
    mamba2()(config)  # files without such layers have the keys too
    if config.get("num_local_experts") != 0:
        mixture("intermediate_size", shared_width="shared_intermediate_size")(config)
        return
    config.document.pop("moe", None)
    config.put("ffn_hidden_size", config.count("shared_intermediate_size"), "shared_intermediate_size")


def hunyuan_experts(config: Config) -> None:
    """Numbers and width of chosen and shared experts; a list with one entry per layer must repeat one number."""

    def one(key: str, default: int) -> int:
        value, *others = set(config.counts(key, default, alone=True))
        if others:
            config.refuse(key, f"`{key}` that differs from layer to layer is not supported")
        return value

    config.read.update(
        ("attention_head_dim", "norm_type", "use_mixed_mlp_moe")
    )  # of older files, as the class builds it
    width = one("moe_intermediate_size", 0) or config.filled("ffn_hidden_size")
    if not config.filled("ffn_hidden_size"):
        config.missing.append("intermediate_size")
    config.put("moe.experts_per_token", one("moe_topk", 1), "moe_topk")
    config.put("moe.ffn_hidden_size", width, "intermediate_size")
    config.put(
        "moe.shared_ffn_hidden_size",
        one("num_shared_expert", 1) * config.filled("ffn_hidden_size"),
        "intermediate_size",
    )


def per_layer(config: Config, names: dict[str, str]) -> dict[int, Fields]:
    """The fields that `per_layer_config` changes, by layer number. Keys that are not in `names` are refused."""
    listed = config.part("per_layer_config")
    found: dict[int, Fields] = {}
    for number in listed.values:
        changed = listed.part(number)
        strange = set(changed.values) - set(names)
        if strange or not number.isdecimal():
            config.refuse(
                "per_layer_config", f"{quoted(min(strange, default=number))} for a single layer is not supported"
            )
        found[int(number)] = {names[key]: changed.size(key) for key in changed.values}
    return found


def single_layers(config: Config, fields: Callable[[int, str], Fields], names: dict[str, str]) -> None:
    """A kind of layers for each combination of `layer_types` and `per_layer_config`; all other layers are plain."""
    kinds, single = config.entries("layer_types"), per_layer(config, names)
    for number, name in enumerate(map(str, kinds)):
        own = fields(number, name) | single.get(number, {})
        if own:
            config.add_kind(1, "layer_types", **own)


_ATTENTION_SHAPE = {"head_dim": "head_size", "num_key_value_heads": "num_kv_heads", "num_attention_heads": "num_heads",
                    "v_head_dim": "value_head_size", "sliding_window": "sliding_window"}  # fmt: skip


def mimo(config: Config) -> None:
    """Layers with a window have sinks and other key-value heads: twice as many, unless the file says otherwise."""
    for key in ("attention_chunk_size", "sliding_window_size", "swa_rope_theta", "add_full_attention_sink_bias"):
        config.get(key)  # repeat the window's size, and say that other layers have no sinks
    if config.flag("add_full_attention_sink_bias") or not config.flag("add_swa_attention_sink_bias", True):
        config.refuse("add_full_attention_sink_bias", "sinks elsewhere than in layers with windows are not supported")
    old = {"swa_num_key_value_heads": "num_kv_heads", "swa_num_attention_heads": "num_heads"}
    old |= {"swa_head_dim": "head_size", "swa_v_head_dim": "value_head_size"}
    twice = {"num_kv_heads": 2 * config.size("num_key_value_heads"), "attention_sinks": True}
    local = twice | window(**old)(config)
    single_layers(config, lambda _, name: dict(local) if name == "sliding_attention" else {}, _ATTENTION_SHAPE)


def laguna(config: Config) -> None:
    """Heads of each layer from one list, windows from another."""
    heads = config.counts("num_attention_heads_per_layer", least=1)
    own = {"sliding_window": config.count("sliding_window")}
    usual = config.filled("num_heads")

    def fields(number: int, name: str) -> Fields:
        count = heads[number] if number < len(heads) else usual
        return (own if name == "sliding_attention" else {}) | ({"num_heads": count} if count != usual else {})

    single_layers(config, fields, _ATTENTION_SHAPE)


def minimax_m2(config: Config) -> None:
    """MiniMax-M2: all layers attend to all tokens, norms of queries and keys span all heads, no expert is shared."""
    if config.get("qk_norm_type", "per_layer") != "per_layer":
        config.refuse("qk_norm_type", "only `qk_norm_type` per_layer is supported")
    if set(map(str, config.entries("attn_type_list"))) - {"1"}:
        config.refuse("attn_type_list", "layers with linear attention are a block that is not supported here")
    if config.count("shared_intermediate_size"):
        config.refuse("shared_intermediate_size", "shared experts are a block that is not supported here")
    config.read.update(("use_routing_bias", "use_mtp", "mtp_transformer_layers"))


def minimax_m3(config: Config) -> None:
    """MiniMax-M3: dense layers are wider than experts, and in some layers an indexer chooses blocks of keys."""
    config.put("ffn_hidden_size", config.count("dense_intermediate_size"), "dense_intermediate_size")
    of_indexer = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
    *_, block, blocks = (config.count(key) for key in of_indexer)
    config.read.update(("index_local_blocks", "rotary_dim"))
    if any("sparse" in str(kind) or "index" in str(kind) for kind in config.entries("layer_types")):
        config.refuse("layer_types", f"an indexer of blocks ({blocks * block} keys) is a block that is not supported")


def lfm2_width(config: Config) -> None:
    """LFM2: two thirds of the width, times a factor, rounded up to a multiple."""
    config.get("conv_bias")
    width, multiple = config.filled("ffn_hidden_size"), config.size("block_multiple_of", 256)
    if config.flag("block_auto_adjust_ff_dim", True):
        width = 2 * width // 3
        if config.get("block_ffn_dim_multiplier") is not None:
            width = int(config.number("block_ffn_dim_multiplier", 1) * width)
            width = multiple * -(-width // multiple)
    config.put("ffn_hidden_size", width, "intermediate_size")
    config.read.update(("full_attn_idxs", "num_heads"))  # repeat which layers have attention, and the number of heads


def qwen3_5(config: Config) -> None:
    """Qwen3.5: attention's output always has a gate, and the list of layers makes the key for every n-th redundant."""
    if not config.flag("attn_output_gate", True):
        config.refuse("attn_output_gate", "attention without a gate of its output is not supported here")
    config.read.update(("full_attention_interval", "mtp_use_dedicated_embeddings"))


def qwen3_next(config: Config) -> None:
    """Every `full_attention_interval`-th layer has attention, if the file has no list."""
    interval = config.count("full_attention_interval", 4)
    if config.entries("layer_types"):
        layers_by("layer_types", {"linear_attention": gated_deltanet})(config)
    elif interval:
        layers = config.filled("num_layers")
        config.add_kind(layers - layers // interval, "full_attention_interval", **gated_deltanet(config))


def gemma4(config: Config) -> None:
    """Gemma 4: global layers with their own heads, embeddings in each layer, reused keys, and experts."""
    h, layers = config.filled("hidden_size"), config.filled("num_layers")
    size, words = config.count("hidden_size_per_layer_input"), config.count("vocab_size_per_layer_input")
    if size:
        config.put("table_params", words * layers * size + size, "vocab_size_per_layer_input")
        config.put("input_matrix_params", h * layers * size, "hidden_size_per_layer_input")
        config.add("layer_matrix_params", 2 * h * size)
        config.add("layer_vector_params", h)
    if config.flag("enable_moe_block"):
        _gemma4_experts(config)
    else:
        config.read.update(("moe_intermediate_size", "num_experts", "top_k_experts"))
    shared, wide = config.count("num_kv_shared_layers"), config.flag("use_double_wide_mlp")
    local = {"sliding_window": config.count("sliding_window")}
    whole: Fields = {"keys_are_values": True} if config.flag("attention_k_eq_v") else {}
    for key, target in {"global_head_dim": "head_size", "num_global_key_value_heads": "num_kv_heads"}.items():
        if config.get(key) is not None:
            whole[target] = config.count(key)
    width = config.filled("ffn_hidden_size")

    def fields(number: int, name: str) -> Fields:
        late: Fields = {}
        if shared and number >= layers - shared:
            late = {"shares_keys": True} | ({"ffn_hidden_size": 2 * width} if wide else {})
        return (local if name == "sliding_attention" else whole) | late

    single_layers(config, fields, _ATTENTION_SHAPE)


def _gemma4_experts(config: Config) -> None:
    """Experts beside a dense block, which every token passes like a shared expert; also three norms and two scales."""
    experts, h = config.count("num_experts"), config.filled("hidden_size")
    config.put("moe.num_experts", experts, "num_experts")
    config.put("moe.experts_per_token", config.count("top_k_experts"), "top_k_experts")
    config.put("moe.ffn_hidden_size", config.count("moe_intermediate_size"), "moe_intermediate_size")
    config.put("moe.shared_ffn_hidden_size", config.filled("ffn_hidden_size"), "intermediate_size")
    config.put("moe.vector_params", 4 * h + experts, "model_type")


def gemma3n(config: Config) -> None:
    """Gemma 3n: additional streams (AltUp), a low-rank residual (Laurel), embeddings in each layer, and shared K/V."""
    h, layers, streams = config.filled("hidden_size"), config.filled("num_layers"), config.count("altup_num_inputs")
    size, rank = config.count("hidden_size_per_layer_input"), config.count("laurel_rank")
    widths = set(config.counts("intermediate_size", alone=True))
    if len(widths) != 1:
        config.refuse("intermediate_size", "widths that differ from layer to layer are not supported")
    config.put("ffn_hidden_size", next(iter(widths)), "intermediate_size")
    config.put(
        "table_params", config.count("vocab_size_per_layer_input") * layers * size + size, "vocab_size_per_layer_input"
    )
    config.put("input_matrix_params", h * layers * size + (streams - 1) * h * h, "altup_num_inputs")
    config.put("output_matrix_params", (streams - 1) * h * h, "altup_num_inputs")
    config.add("layer_matrix_params", 2 * h * size + 2 * h * rank + h * streams + streams**2 + streams**3)
    config.add("layer_vector_params", 4 * h)
    shared, local = config.count("num_kv_shared_layers"), {"sliding_window": config.count("sliding_window")}
    config.get("activation_sparsity_pattern")

    def fields(number: int, name: str) -> Fields:
        late = {"shares_keys": True} if shared and number >= layers - shared else {}
        return (local if name == "sliding_attention" else {}) | late

    single_layers(config, fields, _ATTENTION_SHAPE)


def mllama(config: Config) -> None:
    """Mllama: some layers attend to the image instead of the text, with two gates and norms of queries and keys."""
    listed = config.entries("cross_attention_layers")
    config.put("table_params", 8 * config.filled("hidden_size"), "model_type")
    own = [number for number in listed if isinstance(number, int) and number < config.filled("num_layers")]
    if own:
        config.add_kind(len(own), "cross_attention_layers", qk_norm="head", layer_vector_params=2)


def further_words(config: Config) -> None:
    """Rows of the embedding that the head does not have (Molmo 2)."""
    config.add("table_params", config.count("additional_vocab_size") * config.filled("hidden_size"))
    if config.get("qk_norm_type", "qwen3") != "qwen3" or config.flag("norm_after"):
        config.refuse("qk_norm_type", "norms over the whole width, or behind the blocks, are not supported here")


def inner_norms(config: Config) -> None:
    """Norms inside both blocks: of attention's output, and of the inner width of the feed-forward block (Kosmos-2)."""
    config.add("layer_vector_params", 2 * (config.filled("hidden_size") + config.filled("ffn_hidden_size")))


def jetmoe(config: Config) -> None:
    """JetMoE: experts of queries and outputs; a token uses only the heads of its own experts."""
    h, kv, size = config.filled("hidden_size"), config.filled("num_kv_heads"), config.filled("head_size")
    experts, chosen = config.count("num_local_experts"), config.count("num_experts_per_tok")
    config.get("num_attention_heads")
    config.put("num_heads", chosen * kv, "num_key_value_heads")
    config.put("moe.idle_params", (experts - chosen) * 2 * h * kv * size, "model_type")
    config.put("layer_matrix_params", h * experts, "model_type")
    config.put("layer_vector_params", 2 * h, "model_type")
    config.notes.append("experts of attention are counted as whole on each rank, and priced as heads that a token has")


def hrm(config: Config) -> None:
    """Two stacks that a token passes several times: in each cycle the fast one several times, then the slow one."""
    each, slow, fast = config.size("num_layers_per_stack"), config.size("H_cycles", 2), config.size("L_cycles", 3)
    config.get("num_hidden_layers")
    config.read.update(("L_bp_cycles", "embedding_scale", "prefix_lm"))
    config.put("num_layers", each * slow * (fast + 1), "num_layers_per_stack")
    config.put("table_params", config.filled("hidden_size"), "model_type")
    config.add_kind(each * slow * fast, "L_cycles", shared_by=slow * fast)
    config.add_kind(each * slow, "H_cycles", shared_by=slow)
    config.notes.append("the backward pass is priced for every run of a stack; L_bp_cycles leaves some of them out")
