"""The meaning of the keys of a Hugging Face config.json for models that read images: vision towers and projectors.

TOWERS has a row for each `model_type` of a vision_config, and PROJECTORS a row for each outer model type. The source of
all rules is the code in transformers 5.23: configuration_*.py and modeling_*.py of each type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from planner.specs.huggingface_config import MOST, Config
from planner.specs.huggingface_rules import ignore
from planner.specs.huggingface_types import ModelType

if TYPE_CHECKING:
    from collections.abc import Callable

_ASSUMED_SIDE: Final = 448
"""Assumed side of an image in pixels, for types that accept images of any size; data sets and preprocessors decide it.
"""


# --- towers -------------------------------------------------------------------------------------------------------


def _side(config: Config, key: str, default: int = 0) -> int:
    """A number of pixels, or the first number of a list."""
    return config.counts(key, default, alone=True)[0]


def _first(config: Config, *keys: str, default: int = 0) -> int:
    """The positive value of the first of these config keys that the file contains."""
    found = next((key for key in keys if config.values.get(key) is not None), keys[0])
    return config.size(found, default)


def _patches(*, bias: bool = True, class_tokens: int = 0, rows: str = "", learned: bool = True) -> Callable[..., None]:
    """The patches of an image.

    rows: the key with the number of learned positions; without it there is one for each patch.
    learned: whether there is a table of positions.
    """

    def rule(config: Config) -> None:
        size = _side(config, "patch_size")
        if not size:
            config.missing.append("patch_size")
            return
        side = max(1, (_side(config, "image_size") or _ASSUMED_SIDE) // size)
        if not config.get("image_size"):
            config.notes.append(f"images of {side * size} x {side * size} pixels are assumed, as the file has no size")
        config.put("patches.patch_size", size, "patch_size")
        config.put("patches.image_size", side * size, "image_size")
        config.put(
            "patches.num_channels", _first(config, "num_channels", "in_channels", "in_chans", default=3), "model_type"
        )
        config.put("patches.num_frames", config.count("temporal_patch_size", 1), "temporal_patch_size")
        config.put("patches.class_tokens", class_tokens, "model_type")
        config.put("patches.bias", bias, "model_type")
        config.put("max_sequence_length", side**2 + class_tokens, "image_size")
        config.put("vocab_size", 1, "model_type")
        config.put("output_head", False, "model_type")
        config.put("position", "none", "model_type")
        if learned:
            num_rows = config.count(rows) if rows else side**2 + class_tokens
            config.add("table_params", num_rows * config.filled("hidden_size"))

    return rule


def _tower(*rules: Callable[[Config], None], keys: dict[str, str] | None = None, **implied: Any) -> ModelType:
    """A stack of ViT blocks with additional rules, config keys and fields."""
    usual = {
        "num_hidden_layers|depth": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads|num_heads": "num_heads",
        "intermediate_size": "ffn_hidden_size",
        "layer_norm_eps|rms_norm_eps|norm_eps": "norm_epsilon",
    }
    own = keys or {}
    usual = {key: target for key, target in usual.items() if target not in implied}
    read = {key: target for key, target in usual.items() if target not in own.values()} | own
    return ModelType(
        architecture="vit",
        keys={key: target for key, target in read.items() if target},
        defaults={"layer_norm_eps|rms_norm_eps|norm_eps": 1e-6},
        implied=implied,
        rules=rules,
    )


def _by_ratio(config: Config) -> None:
    """Width of the feed-forward block, given as a multiple of the model's width."""
    config.put("ffn_hidden_size", int(config.filled("hidden_size") * config.number("mlp_ratio", 4)), "mlp_ratio")


def _pooling_head(config: Config) -> None:
    """SigLIP's head, which attends to all patches. No language model reads it, so it takes memory but no time."""
    if config.flag("vision_use_head", True):
        h, f = config.filled("hidden_size"), config.filled("ffn_hidden_size")
        config.add("table_params", h + 4 * h * (h + 1) + 2 * h + 2 * h * f + f + h)


def _windows(config: Config) -> None:
    """Layers that attend within windows of `window_size` pixels; a few layers attend to everything (Qwen2.5-VL)."""
    size = max(1, config.count("window_size", 112) // max(1, _side(config, "patch_size")))
    whole = len(config.entries("fullatt_block_indexes"))
    if 0 < whole < config.filled("num_layers"):
        config.add_kind(config.filled("num_layers") - whole, "window_size", sliding_window=size**2)


def _key_value_heads(config: Config) -> None:
    config.put("num_kv_heads", config.count("num_key_value_heads"), "num_key_value_heads")


def _attention_bias(config: Config) -> None:
    config.put("attention_bias", config.flag("attention_bias", True), "attention_bias")


def _muse(config: Config) -> None:
    """Muse: a special key says how many frames a patch spans, and the table of positions has a size of its own."""
    config.values["temporal_patch_size"] = config.size("patch_temporal", 1)
    rows = config.count("pos_emb_height") * config.count("pos_emb_width")
    config.add("table_params", rows * config.filled("hidden_size"))


def _hunyuan(config: Config) -> None:
    """HunyuanOCR: a table of positions for the largest image."""
    side = config.count("max_image_size") // max(1, config.count("patch_size"))
    config.add("table_params", (side**2 + 1) * config.filled("hidden_size"))


def _qkv_bias(config: Config) -> None:
    """The output projection always has a bias; the projections to Q, K and V have biases if the file says so."""
    if not config.flag("qkv_bias", True):
        config.put("attention_bias", False, "qkv_bias")
        config.add("layer_vector_params", config.filled("hidden_size"))


def _inner_bias(config: Config) -> None:
    config.put("qkv_bias", config.flag("attention_bias"), "attention_bias")


def _biases(config: Config) -> None:
    """One config key says whether attention and the feed-forward block have biases (GLM-OCR)."""
    for target in ("attention_bias", "mlp_bias"):
        config.put(target, config.flag("attention_bias"), "attention_bias")


def _glm(config: Config) -> None:
    """GLM-4V: the feed-forward block has the width of the text model, and a norm follows the patches."""
    config.put("ffn_hidden_size", config.count("out_hidden_size"), "out_hidden_size")
    config.add("table_params", config.filled("hidden_size"))


def _internvl(config: Config) -> None:
    """InternViT: the output always has a bias, both blocks have scales, and there is a norm only without pooling."""
    h, rms = config.filled("hidden_size"), config.get("norm_type") == "rms_norm"
    config.put("qkv_bias", config.flag("attention_bias"), "attention_bias")
    config.put("layer_vector_params", 3 * h, "model_type")
    config.put("norm", "rmsnorm" if rms else "layernorm", "norm_type")
    if config.flag("use_qk_norm"):
        config.put("qk_norm", "width", "use_qk_norm")
    config.put("final_norm", not config.flag("use_mean_pooling", True), "use_mean_pooling")
    config.add("table_params", h if config.flag("use_mask_token") else 0)
    if not config.flag("use_absolute_position_embeddings"):
        config.add("table_params", -config.filled("max_sequence_length") * h)


def _mllama(config: Config) -> None:
    """Mllama: global layers with two gates each, tables of tiles, and gates of these tables."""
    h, tokens = config.filled("hidden_size"), config.filled("max_sequence_length")
    further = config.count("num_global_layers")
    tiles = config.count("max_num_tiles", 4)
    kinds = len(config.entries("supported_aspect_ratios")) + 1
    config.add("num_layers", further)
    config.add("table_params", 2 * further + 3 + kinds * tiles * tokens * h + 2 * kinds * tiles * h)


def _minicpm(config: Config) -> None:
    """MiniCPM-V: after some layers, attention and a wide block merge windows of patches."""
    h, f = config.filled("hidden_size"), config.filled("ffn_hidden_size")
    window = math.prod(config.counts("window_kernel_size", 2, 2, least=1))
    inner = window * h
    config.add(
        "output_matrix_params", 4 * h * (h + 1) + 2 * h + 2 * inner + inner * window * f + window * f * (h + 1) + h
    )


def _radio(config: Config) -> None:
    """RADIO: a table for the largest image, registers, scales of both blocks, and separate patches of videos."""
    h, size = config.filled("hidden_size"), config.size("patch_size", 16)
    config.put("qkv_bias", config.flag("qkv_bias", True), "qkv_bias")
    config.put("layer_vector_params", 2 * h, "model_type")
    registers = config.count("num_cls_tokens") + config.count("num_registers")
    config.add(
        "table_params", ((config.count("max_img_size") // size) ** 2 + registers + config.count("video_patch_dim")) * h
    )


def _sam(config: Config) -> None:
    """SAM: windows in most layers, tables of relative positions in all layers, and a neck of two convolutions."""
    h, heads = config.filled("hidden_size"), max(1, config.filled("num_heads"))
    window, side = config.count("window_size"), round(config.filled("max_sequence_length") ** 0.5)
    whole = sum(number < config.filled("num_layers") for number in config.counts("global_attn_indexes"))
    local = config.filled("num_layers") - whole
    if config.flag("use_rel_pos", True):
        config.add("table_params", 2 * (h // heads) * (whole * (2 * side - 1) + local * (2 * window - 1)))
    if not config.flag("use_abs_pos", True):
        config.add("table_params", -(side**2) * h)
    if local > 0 and whole:
        config.add_kind(local, "window_size", sliding_window=window**2)
    out = config.count("output_channels", 256)
    config.put("output_matrix_params", h * out + 9 * out * out + 4 * out, "model_type")


def _lfm3(config: Config) -> None:
    """LFM3-VL: gated short convolutions in place of attention in most layers."""
    mixer = {"kind": "convolution", "num_heads": 1, "value_size": config.filled("hidden_size")}
    mixer["kernel"] = config.count("conv_kernel_size") ** 2  # of an image
    if number := config.entries("layer_types").count("conv"):
        config.add_kind(number, "layer_types", mixer=mixer, attends=False)


def _step(config: Config) -> None:
    """Step 3.7: scales of both blocks, and two convolutions that merge patches; the convolutions take no time."""
    h = config.filled("hidden_size")
    config.put("layer_vector_params", 2 * h, "model_type")
    config.add("table_params", 90 * h * h + 6 * h)


def _gemma4(config: Config) -> None:
    """Gemma 4: positions by row and column, and pooling of the patches at the end."""
    config.add("table_params", 2 * config.count("position_embedding_size", 10240) * config.filled("hidden_size"))
    config.read.update(("pooling_kernel_size", "standardize", "use_clipped_linears", "default_output_length"))
    config.read.update(("max_position_embeddings", "attention_bias", "global_head_dim"))  # the library reads none


def _janus(config: Config) -> None:
    """Janus: the output always has a bias, and queries and keys have LayerNorms."""
    h = config.filled("hidden_size")
    if not config.flag("attention_bias", True):
        config.put("attention_bias", False, "attention_bias")
        config.add("layer_vector_params", h)
    if config.flag("use_qk_norm"):
        config.put("qk_norm", "width", "use_qk_norm")
        config.add("layer_vector_params", 2 * h)
    config.read.update(("depth", "num_image_tokens", "projection_dim"))


def _ovis(config: Config) -> None:
    """Ovis2: a head that distributes each patch over a visual vocabulary."""
    h = config.filled("hidden_size")
    words = config.size("vocab_size") - config.count("num_visual_indicator_tokens")
    stride = config.count("hidden_stride", 1) ** 2
    config.put("qkv_bias", config.flag("qkv_bias"), "qkv_bias")
    config.put("attention_bias", config.flag("qkv_bias"), "qkv_bias")
    config.put("mlp_bias", config.flag("mlp_bias"), "mlp_bias")
    config.add("output_matrix_params", words * h * stride + 2 * words)


def _kimi(config: Config) -> None:
    """A table of positions by row and column; checkpoints spell some config keys in their own way."""
    rows = _first(config, "init_pos_emb_height", "pos_emb_height") * _first(
        config, "init_pos_emb_width", "pos_emb_width"
    )
    config.read.update(("pos_emb_height", "pos_emb_width", "init_pos_emb_time", "pos_emb_time", "merge_type"))
    config.add("table_params", rows * config.filled("hidden_size"))


_KIMI: Final = {
    "vt_num_hidden_layers|num_hidden_layers": "num_layers",
    "vt_hidden_size|hidden_size": "hidden_size",
    "vt_num_attention_heads|num_attention_heads": "num_heads",
    "vt_intermediate_size|intermediate_size": "ffn_hidden_size",
}
_RMS: Final[dict[str, Any]] = {"norm": "rmsnorm", "activation": "swiglu"}
_NO_BIAS: Final[dict[str, Any]] = {"attention_bias": False, "mlp_bias": False}
_RATIO: Final[dict[str, Any]] = {"ffn_hidden_size": 0}
_NO_NORM: Final[dict[str, Any]] = {"final_norm": False}
_SIGLIP: Final = _tower(_patches())
_CLIP: Final = _tower(_patches(bias=False, class_tokens=1), embedding_norm=True)
_BLIP: Final = _tower(_patches(class_tokens=1), _qkv_bias)
_QWEN2_5: Final = _tower(_patches(bias=False, learned=False), _windows, **_RMS, **_NO_NORM)
_QWEN3: Final = _tower(_patches(rows="num_position_embeddings"), **_NO_NORM)
_GLM4V: Final = _tower(_patches(), _glm, _inner_bias, **_RMS, **_NO_BIAS)
_GLM_OCR: Final = _tower(_patches(learned=False), _biases, **_RMS, qk_norm="head")
_SAM: Final = _tower(_patches(), _qkv_bias, _sam, keys={"mlp_dim": "ffn_hidden_size"}, **_NO_NORM)
_MUSE: Final = _tower(_muse, _patches(bias=False, learned=False), ignore("layer_types"), embedding_norm=True)
_INTERNVL: Final = _tower(_patches(class_tokens=1), _internvl, attention_bias=False)
_GEMMA4: Final = _tower(
    _patches(bias=False, learned=False),
    _key_value_heads,
    _gemma4,
    keys={"head_dim": "head_size"},
    **_RMS,
    **_NO_BIAS,
    **_NO_NORM,
    norms_per_layer=4,
    qk_norm="head",
)
_MINICPM: Final = _tower(_patches(), _minicpm, ignore("insert_layer_id"))

TOWERS: Final[dict[str, ModelType]] = {
    "blip_vision_model": _BLIP,
    "blip_2_vision_model": _BLIP,
    "clip_vision_model": _CLIP,
    "cohere_compass_vision": _QWEN3,
    "cosmos3_edge_vision": _tower(_patches(rows="num_patches")),
    "exaone4_5_vision": _tower(_patches(bias=False, learned=False), _windows, _key_value_heads, **_RMS, **_NO_NORM),
    "gemma4_vision": _GEMMA4,
    "git_vision_model": _CLIP,
    "glm4v_vision": _GLM4V,
    "glm4v_moe_vision": _GLM4V,
    "glm_ocr_vision": _GLM_OCR,
    "got_ocr2_vision": _SAM,
    "hunyuan_vl_vision": _tower(_patches(learned=False), _hunyuan, ignore("num_key_value_heads"), **_NO_NORM),
    "granite_docling_vision": _SIGLIP,
    "idefics_vision": _tower(
        _patches(bias=False, class_tokens=1), keys={"embed_dim": "hidden_size"}, embedding_norm=True
    ),
    "idefics2_vision": _SIGLIP,
    "idefics3_vision": _SIGLIP,
    "instructblip_vision_model": _BLIP,
    "instructblipvideo_vision_model": _BLIP,
    "internvl_vision": _INTERNVL,
    "janus_vision_model": _tower(_by_ratio, _patches(), _janus, keys={"num_hidden_layers": "num_layers"}, **_RATIO),
    "kimi_k25_vision": _tower(
        _patches(learned=False), _kimi, ignore("video_attn_type", "mm_hidden_size", "text_hidden_size"), keys=_KIMI
    ),
    "kosmos_2_vision_model": _CLIP,
    "lfm3_vl_vision": _tower(
        _patches(bias=False, learned=False),
        _key_value_heads,
        _lfm3,
        **_RMS,
        **_NO_BIAS,
        **_NO_NORM,
        embedding_norm=True,
        qk_norm="head",
    ),
    "llama4_vision_model": _tower(_patches(bias=False, class_tokens=1), embedding_norm=True),
    "minicpm_ocr_vision": _MINICPM,
    "minicpmv4_6_vision": _MINICPM,
    "minicpmv4_7_vision": _MINICPM,
    "minimax_m3_vl_vision": _tower(_patches(bias=False, learned=False), embedding_norm=True, **_NO_NORM),
    "mllama_vision_model": _tower(
        _patches(bias=False, class_tokens=1),
        _mllama,
        ignore("intermediate_layers_indices"),
        keys={"num_attention_heads|attention_heads": "num_heads"},
        embedding_norm=True,
        attention_bias=False,
    ),
    "molmo2_vision": _tower(
        _patches(rows="num_position_embeddings"),
        _key_value_heads,
        _attention_bias,
        keys={"head_dim": "head_size"},
        **_NO_NORM,
    ),
    "muse_glimmer_vision": _MUSE,
    "ovis2_vision": _tower(_patches(), _ovis, embedding_norm=True, **_RMS),
    "paddleocr_vl_vision": _SIGLIP,
    "pp_chart2table_vision": _SAM,
    "pixtral": _tower(
        _patches(bias=False, learned=False), ignore("head_dim"), embedding_norm=True, **_RMS, **_NO_BIAS, **_NO_NORM
    ),
    "qianfan_ocr_vision": _INTERNVL,
    "qwen2_vl_vision": _tower(
        _by_ratio, _patches(bias=False, learned=False), keys={"embed_dim": "hidden_size"}, **_RATIO, **_NO_NORM
    ),
    "qwen2_5_vl_vision": _QWEN2_5,
    "qwen2_5_omni_vision_encoder": _QWEN2_5,
    "qwen3_omni_moe_vision_encoder": _QWEN3,
    "qwen3_vl_vision": _QWEN3,
    "qwen3_vl_moe_vision": _QWEN3,
    "qwen3_5_vision": _QWEN3,
    "qwen3_5_moe_vision": _QWEN3,
    "radio": _tower(_by_ratio, _patches(bias=False, learned=False), _radio, **_RATIO, **_NO_NORM),
    "siglip_vision_model": _tower(_patches(), _pooling_head),
    "siglip2_vision_model": _tower(_patches(rows="num_patches"), _pooling_head),
    "smolvlm_vision": _SIGLIP,
    "step3p5_vision": _tower(_patches(bias=False), _step, ignore("mlp_ratio"), embedding_norm=True, **_NO_NORM),
    "video_llama_3_vision": _tower(_patches(learned=False)),
}


# --- projectors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The parts of a config.json that a projector's rule reads: the outer keys, the tower's and the text model's."""

    outer: Config
    tower: Config
    text: Config

    @property
    def hidden(self) -> int:
        """Width of the tower."""
        return self.tower.filled("hidden_size")

    @property
    def wide(self) -> int:
        """Width of the text model."""
        return self.text.filled("hidden_size")

    @property
    def merged(self) -> int:
        """Width of the patches that become one token together: spatial_merge_size rows and columns of patches."""
        return self.hidden * self.tower.count("spatial_merge_size", 2) ** 2

    @property
    def shuffled(self) -> int:
        """Width of the patches that are shuffled to one token: 1 / downsample_ratio rows and columns of patches."""
        return self.hidden * int(1 / self.outer.number("downsample_ratio", 0.5)) ** 2

    @property
    def out(self) -> int:
        """Width of the tower's output."""
        return self.tower.count("out_hidden_size")


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return outputs * (inputs + bias)


def _two(inputs: int, middle: int, outputs: int, *, bias: bool = True) -> int:
    return _linear(inputs, middle, bias=bias) + _linear(middle, outputs, bias=bias)


def _layers_read(join: Join) -> int:
    """Number of tower layers whose outputs the projector reads together."""
    read = join.outer.counts("vision_feature_layer", -2, least=-MOST, alone=True)  # -1 is the last layer
    return len(join.outer.counts("vision_feature_layers", *read, least=-MOST, alone=True))


def _llava(*, newline: bool = False) -> Callable[[Join], int]:
    """Two layers; with `newline`, a token that ends rows of patches."""

    def params(join: Join) -> int:
        bias = join.outer.flag("multimodal_projector_bias", True)
        return _two(_layers_read(join) * join.hidden, join.wide, join.wide, bias=bias) + newline * join.wide

    return params


def _vipllava(join: Join) -> int:
    width = _layers_read(join) * join.hidden
    return 2 * width + _two(width, join.wide, join.wide)


def _qwen2(join: Join) -> int:
    """Two layers, and a norm of each patch before patches are merged."""
    out = join.out or join.tower.count("hidden_size")
    norm = join.hidden * (1 if join.tower.document.get("norm") == "rmsnorm" else 2)
    return norm + _two(join.merged, join.merged, out)


def _qwen3(join: Join) -> int:
    """The merger, and another one for each tower layer whose patches go to the text's first layers."""
    deep = len(join.tower.entries("deepstack_visual_indexes"))
    each = _two(join.merged, join.merged, join.out)
    return 2 * join.hidden + each + deep * (2 * join.merged + each)


def _glm4v(inner: Callable[[Join], int]) -> Callable[[Join], int]:
    """A convolution that merges patches, a projection with its norm, and a gated block of width `inner`."""

    def params(join: Join) -> int:
        out = join.out
        return _linear(join.merged, out) + out * out + 2 * out + 3 * out * inner(join)

    return params


def _pixtral(join: Join) -> int:
    """A norm, a merger of patches, and two layers."""
    squares = join.outer.count("spatial_merge_size", 2) ** 2
    bias = join.outer.flag("multimodal_projector_bias")
    merge = join.hidden + _linear(squares * join.hidden, join.hidden, bias=False)
    return merge + _two(join.hidden, join.wide, join.wide, bias=bias)


def _cohere(*, norm: bool) -> Callable[[Join], int]:
    """Two layers with a gate between them; patches are first moved to channels."""

    def params(join: Join) -> int:
        width = join.hidden * join.outer.size("downsample_factor", 2) ** 2
        middle = join.outer.count("alignment_intermediate_size") or join.wide
        return 2 * width * norm + _linear(width, middle) + _linear(middle // 2, join.wide)

    return params


def _internvl_join(join: Join) -> int:
    width = join.shuffled
    return 2 * width + _two(width, join.wide, join.wide)


def _q_former(*, instructed: bool) -> Callable[[Join], int]:
    """BLIP-2: a small BERT whose queries attend to the patches; with `instructed`, it reads the question too."""

    def params(join: Join) -> int:
        own = join.outer.part("qformer_config")
        h, f, layers = own.size("hidden_size"), own.size("intermediate_size"), own.size("num_hidden_layers")
        seen, every = own.size("encoder_hidden_size"), own.size("cross_attention_frequency")
        block = _two(h, f, h) + 2 * h
        crossing = 2 * _linear(h, h) + 2 * _linear(seen, h) + 2 * h
        found = layers * (4 * _linear(h, h) + 2 * h + (1 + instructed) * block) + -(-layers // every) * crossing + 2 * h
        if instructed:
            found += (own.size("vocab_size") + own.size("max_position_embeddings")) * h
        return found + join.outer.count("num_query_tokens", 32) * h + _linear(h, join.wide)

    return params


def _perceiver(join: Join) -> int:
    """Idefics2: a gated block, and layers in which a few latent vectors attend to the patches."""
    own = join.outer.part("perceiver_config")
    t, inner, size = join.wide, join.text.filled("ffn_hidden_size"), own.size("resampler_head_dim")
    heads, keys = own.size("resampler_n_heads") * size, own.size("num_key_value_heads") * size
    layer = 3 * t + 2 * t * heads + 2 * t * keys + 3 * t * 4 * t
    gated = 2 * join.hidden * inner + inner * t
    return gated + own.size("resampler_n_latents") * t + own.size("resampler_depth") * layer + t


def _aria(join: Join) -> int:
    h, t = join.hidden, join.wide
    latents = join.outer.count("max_value_projector_patch_to_query_dict", 256)
    attention = 3 * h * h + 4 * _linear(h, h) + _linear(h, h) + 4 * h
    return latents * h + attention + 2 * h + h * t + t * t


def _llama4(join: Join) -> int:
    outer = join.tower
    middle = outer.count("projector_input_dim")
    adapter = _two(join.tower.filled("ffn_hidden_size"), middle, outer.count("projector_output_dim"), bias=False)
    return adapter + outer.count("vision_output_dim") * join.wide


def _lfm2(join: Join) -> int:
    width = join.hidden * join.outer.size("downsample_factor", 2) ** 2
    middle, bias = join.outer.count("projector_hidden_size"), join.outer.flag("projector_bias", True)
    norm = 2 * width if join.outer.flag("projector_use_layernorm", True) else 0
    return norm + _two(width, middle, join.wide, bias=bias)


def _merged_join(join: Join) -> int:
    """A norm of each patch, and two layers for merged patches."""
    return 2 * join.hidden + _two(join.merged, join.merged, join.wide)


def _kimi_join(join: Join) -> int:
    width = join.hidden * math.prod(join.tower.counts("merge_kernel_size", 2, 2, least=1))
    return 2 * join.outer.count("projection_hidden_size", join.hidden) + _two(width, width, join.wide)


def _minimax(join: Join) -> int:
    middle, merged = join.outer.count("projector_hidden_size"), join.outer.count("merged_hidden_size")
    return _two(join.hidden, middle, join.wide) + _two(merged, middle, join.wide)


def _minicpm_join(join: Join) -> int:
    width, times = 4 * join.hidden, join.outer.count("merger_times", 1)
    inner = (times - 1) * (2 * width + _two(width, width, join.hidden))
    return inner + 2 * width + _two(width, width, join.wide)


def _radio_join(join: Join) -> int:
    width = join.shuffled
    return width + _two(width, join.outer.count("projector_hidden_size"), join.wide, bias=False)


def _got(join: Join) -> int:
    """Two convolutions that merge patches, and one layer."""
    width = join.tower.count("output_channels", 256)
    return 9 * width * 2 * width + 9 * 2 * width * join.wide + _linear(join.wide, join.wide)


def _molmo2(join: Join) -> int:
    """Attention that pools patches of some tower layers, and a gated block."""
    own = join.outer.part("adapter_config")
    h, size, bias = own.size("hidden_size"), own.size("head_dim"), own.flag("attention_bias")
    read = len(own.counts("vision_feature_layer", least=-MOST)) * h
    if not read:
        own.refuse("vision_feature_layer", "`adapter_config` names no `vision_feature_layer`")
    queries, keys = own.size("num_attention_heads") * size, own.size("num_key_value_heads") * size
    pooling = _linear(read, queries, bias=bias) + 2 * _linear(read, keys, bias=bias) + _linear(queries, h)
    return pooling + own.size("intermediate_size") * (2 * h + own.size("text_hidden_size"))


def _held(tower: Config) -> int:
    """Parameters of a second, plain tower that our document cannot describe, counted as in cost/parameters.py."""
    h, f, patches = tower.filled("hidden_size"), tower.filled("ffn_hidden_size"), tower.document["patches"]
    layer = 4 * _linear(h, h) + 4 * h + _two(h, f, h)
    pixels = patches["num_channels"] * patches["patch_size"] ** 2
    norms = tower.document.get("final_norm", True) + tower.document.get("embedding_norm", False)
    ends = h * (pixels + patches["bias"] + patches["class_tokens"] + 2 * norms)
    return int(tower.filled("num_layers") * layer + ends) + sum(
        map(tower.filled, ("table_params", "output_matrix_params"))
    )


def _video_llava(join: Join) -> int:
    """A second tower for videos; it needs memory, but no time for data with images only."""
    join.tower.add("table_params", _held(join.tower))
    return _llava()(join)


def _deepseek_hybrid(join: Join) -> int:
    """SAM as a second tower, with convolutions after it; each half of a token has its own projection."""
    sam = join.outer.part("high_res_vision_config")
    _SAM.translate(sam)
    width, t = sam.count("output_channels", 256), join.wide
    neck = sam.filled("hidden_size") * width + 9 * width * width + 4 * width
    wide = 9 * width * 2 * width + 9 * 2 * width * 4 * width
    join.tower.add("table_params", _held(sam) + neck + wide + 1)
    join.tower.notes.append(
        "the second tower, for high resolution, is counted and held, and its seconds are not priced"
    )
    return _linear(join.hidden, t // 2) + _linear(4 * width, t // 2) + _linear(t, t)


def _git(join: Join) -> int:
    return _linear(join.hidden, join.wide) + 2 * join.wide


def _idefics(join: Join) -> int:
    """Gated blocks that attend to the patches, between the layers of the text; counted as part of these layers."""
    for key in ("use_resampler", "qk_layer_norms"):
        if join.outer.flag(key):
            join.outer.refuse(key, f"`{key}` is a block that is not supported here")
    if join.outer.word("alpha_type", "float") != "float":
        join.outer.refuse("alpha_type", "an `alpha_type` other than float is not supported here")
    if join.outer.count("cross_layer_interval", 1) != 1:
        join.outer.refuse("cross_layer_interval", "blocks that attend to images only in some layers are not supported")
    t = join.wide
    join.text.add("layer_matrix_params", 2 * t * t + 2 * join.hidden * t + 3 * t * join.text.filled("ffn_hidden_size"))
    join.text.add("layer_vector_params", 2 * t + 2)
    join.text.add("table_params", 2 * join.outer.count("additional_vocab_size") * t)
    return 0


def _granite_docling(join: Join) -> int:
    """A coarse and a fine path, each with mergers for tower layers whose patches go to the text's first layers."""
    h, out, deep = join.hidden, join.out, len(join.tower.entries("deepstack_visual_indexes"))
    side = join.tower.count("scale_factor", 4)
    ways = [side, side // 2] if join.tower.flag("use_fine_route") else [side]
    each = (way * way * h for way in ways)
    paths = sum(width * out + deep * (2 * width + _two(width, out, out)) for width in each)
    return 2 * h + paths + 4 * out + out * out


def _audio(join: Join, *, key_bias: bool) -> tuple[Config, int, int, int]:
    """The audio tower (`audio_config`), its width, that of its output, and the parameters of its layers and norm."""
    own = join.outer.part("audio_config")
    d, f = own.size("d_model"), own.size("encoder_ffn_dim")
    layer = 4 * _linear(d, d) - (0 if key_bias else d) + 4 * d + _two(d, f, d)
    return own, d, own.count("output_dim") or join.out, own.size("encoder_layers") * layer + 2 * d


def _qwen2_omni(join: Join) -> int:
    """The merger, and the audio tower, which needs memory, but no time for data with images only."""
    own, d, out, layers = _audio(join, key_bias=False)
    ends = _linear(3 * own.size("num_mel_bins"), d) + _linear(3 * d, d) + 2 * out + _linear(d, out)
    join.tower.add("table_params", layers + ends)
    return _qwen2(join)


def _qwen3_omni(join: Join) -> int:
    own, d, out, layers = _audio(join, key_bias=True)
    c, bins = own.size("downsample_hidden_size"), -(-own.size("num_mel_bins") // 8)  # three convolutions of stride 2
    ends = _linear(9, c) + 2 * _linear(9 * c, c) + c * bins * d + _linear(d, d) + _linear(d, out)
    join.tower.add("table_params", layers + ends)
    return _qwen3(join)


def _kosmos(join: Join) -> int:
    """Latent vectors that attend to the patches."""
    t = join.wide
    return join.outer.count("latent_query_num", 64) * t + _linear(join.hidden, t) + 4 * _linear(t, t)


def _hunyuan_join(join: Join) -> int:
    """Two convolutions, a layer, two norms, and four vectors that separate patches."""
    h, t = join.hidden, join.wide
    return _linear(join.merged, 2 * h) + _linear(2 * h, 4 * h) + _linear(4 * h, t) + h + t + 4 * h + 3 * t


def _ovis_join(join: Join) -> int:
    """A table of visual words; outer config keys give its width."""
    wide = join.outer.count("hidden_size", join.wide)
    if wide != join.wide and not join.outer.flag("tie_word_embeddings", True):
        join.outer.refuse("hidden_size", f"`hidden_size` {wide} is not that of text_config, {join.wide}")
    return join.tower.count("vocab_size") * wide


def _janus_join(join: Join) -> int:
    """Layers after the tower. The parts that generate images need memory, but no time if images are only read."""
    join.tower.add("table_params", _drawn(join.outer.part("vq_config"), join.wide))
    p = join.tower.count("projection_dim", 2048)
    return _linear(join.hidden, p) + (join.tower.size("depth", 2) - 1) * _linear(p, p)


def _drawn(own: Config, wide: int) -> int:
    """Janus's codebook of images: an encoder and a decoder of convolutions, two layers before the text, and a head."""
    base, latent, inner = own.count("base_channels", 128), own.count("latent_channels", 256), own.count("embed_dim", 8)
    words, p, blocks = (
        own.count("num_embeddings", 16384),
        own.count("projection_dim", 2048),
        own.count("num_res_blocks", 2),
    )
    widths = [base * each for each in own.counts("channel_multiplier", 1, 1, 2, 2, 4)]

    def block(inputs: int, outputs: int) -> int:
        short = _linear(inputs, outputs) if inputs != outputs else 0
        return 2 * inputs + _linear(9 * inputs, outputs) + 2 * outputs + _linear(9 * outputs, outputs) + short

    def stack(start: int, order: list[int], num: int) -> int:
        starts = [start, *order[:-1]]
        return sum(
            block(first, width) + (num - 1) * block(width, width) for first, width in zip(starts, order, strict=True)
        )

    def attention(width: int) -> int:
        return 2 * width + 4 * _linear(width, width)

    last = widths[-1]
    middle = 2 * block(last, last) + (1 + blocks) * attention(last)
    down = _linear(9 * own.count("in_channels", 3), base) + stack(base, widths, blocks) + middle
    down += sum(_linear(9 * width, width) for width in widths[:-1])
    down += 2 * last + _linear(9 * last, latent * (1 + own.flag("double_latent")))
    up = _linear(9 * latent, last) + middle + attention(last) + stack(last, widths[::-1], blocks + 1)
    up += sum(_linear(9 * width, width) for width in widths[1:])
    up += 2 * base + _linear(9 * base, own.count("out_channels", 3))
    codes = words * inner + _linear(latent, inner) + _linear(inner, latent)
    ends = words * inner + _linear(inner, p) + (own.count("num_hidden_layers", 2) - 1) * _linear(p, p)
    return down + up + codes + ends + _two(own.count("image_token_embed_dim", wide), p, words)


PROJECTORS: Final[dict[str, Callable[[Join], int]]] = {
    "aria": _aria,
    "aya_vision": _cohere(norm=True),
    "blip-2": _q_former(instructed=False),
    "cohere2_vision": _cohere(norm=False),
    "cohere_compass": _qwen3,
    "cosmos3_edge": lambda join: (
        2 * join.hidden + _two(join.merged, join.outer.count("projector_hidden_size"), join.wide)
    ),
    "cosmos3_omni": _qwen3,
    "deepseek_vl": lambda join: _two(join.hidden, join.wide, join.wide),
    "deepseek_vl_hybrid": _deepseek_hybrid,
    "exaone4_5": _qwen2,
    "gemma3": lambda join: join.hidden * join.wide + join.hidden,
    "gemma4": lambda join: join.hidden * join.wide,
    "git": _git,
    "glm46v": _glm4v(lambda join: join.tower.count("intermediate_size")),
    "glm4v": _glm4v(lambda join: join.tower.count("intermediate_size")),
    "glm4v_moe": _glm4v(lambda join: join.tower.count("intermediate_size")),
    "glm_ocr": _glm4v(lambda join: join.out * join.tower.count("in_channels")),
    "glmga": _glm4v(lambda join: join.tower.count("intermediate_size")),
    "got_ocr2": _got,
    "granite_docling": _granite_docling,
    "hunyuan_vl": _hunyuan_join,
    "hyperclovax_vision_v2": lambda join: _qwen2(join) + _linear(join.out, join.wide),
    "idefics": _idefics,
    "idefics2": _perceiver,
    "idefics3": lambda join: join.hidden * join.outer.size("scale_factor", 2) ** 2 * join.wide,
    "instructblip": _q_former(instructed=True),
    "instructblipvideo": _q_former(instructed=True),
    "internvl": _internvl_join,
    "janus": _janus_join,
    "kimi_k25": _kimi_join,
    "kosmos-2": _kosmos,
    "lfm2_vl": _lfm2,
    "lfm3_vl": lambda join: (
        2 * join.hidden
        + _two(
            join.merged,
            join.outer.count("projector_hidden_size"),
            join.wide,
            bias=join.outer.flag("projector_bias", True),
        )
    ),
    "lighton_ocr": _pixtral,
    "llama4": _llama4,
    "llava": _llava(),
    "llava_next": _llava(newline=True),
    "llava_next_video": _llava(newline=True),
    "llava_onevision": _llava(newline=True),
    "minicpm_ocr": _minicpm_join,
    "minicpmv4_6": _minicpm_join,
    "minicpmv4_7": _minicpm_join,
    "minimax_m3_vl": _minimax,
    "mistral3": _pixtral,
    "mistral_large4": _pixtral,
    "mllama": lambda join: _linear(join.tower.count("vision_output_dim"), join.wide),
    "molmo2": _molmo2,
    "muse_glimmer": lambda join: (
        _two(
            join.outer.count("out_hidden_size"),
            join.outer.count("projector_hidden_size"),
            join.outer.count("projector_hidden_size"),
            bias=False,
        )
        + join.outer.count("projector_hidden_size") * join.wide
    ),
    "nemotron_h_omni": _radio_join,
    "ovis2": _ovis_join,
    "paddleocr_vl": _merged_join,
    "paligemma": lambda join: _linear(join.hidden, join.tower.count("projection_dim", join.wide)),
    "pp_chart2table": _got,
    "qianfan_ocr": _internvl_join,
    "qwen2_5_omni_thinker": _qwen2_omni,
    "qwen3_omni_moe_thinker": _qwen3_omni,
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "shieldgemma2": lambda join: join.hidden * join.wide + join.hidden,
    "step3p7": lambda join: 4 * join.hidden * join.wide,
    "smolvlm": lambda join: join.hidden * join.outer.size("scale_factor", 2) ** 2 * join.wide,
    "video_llava": _video_llava,
    "video_llama_3": lambda join: _two(join.hidden, join.wide, join.wide),
    "vipllava": _vipllava,
}
"""Parameters between tower and text, by outer model_type."""


def _fuyu(outer: Config, text: Config) -> None:
    pixels = outer.count("patch_size", 30) ** 2 * outer.count("num_channels", 3)
    text.add("input_matrix_params", (pixels + 1) * text.filled("hidden_size"))


def _gemma4_unified(outer: Config, text: Config) -> None:
    """Norms of pixels, patches and positions, and a second matrix to the text's width."""
    if outer.get("vision_config") is None:
        return
    tower = outer.part("vision_config")
    wide = tower.count("mm_embed_dim", 3840)
    pixels = 3 * (tower.count("patch_size", 16) * tower.count("pooling_kernel_size", 3)) ** 2
    into = tower.count("output_proj_dims", 3840) * text.filled("hidden_size")
    text.add("input_matrix_params", 2 * pixels + _linear(pixels, wide) + 4 * wide + into)
    text.add("table_params", 2 * tower.count("mm_posemb_size", 1120) * wide)


WITH_SOUND: Final = {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
"""Types whose audio tower is counted."""
WITHOUT_TOWER: Final[dict[str, Callable[[Config, Config], None]]] = {"fuyu": _fuyu, "gemma4_unified": _gemma4_unified}
"""Types without a tower, which project patches directly: the rule for each, on the outer and text config keys."""
CAUSAL: Final = {"fuyu", "git"}
"""Types whose class for causal language models also reads images."""
TIES: Final = {
    **dict.fromkeys(("hunyuan_vl", "kosmos-2", "paddleocr_vl"), True),
    **dict.fromkeys(("cosmos3_edge", "molmo2", "muse_glimmer", "step3p7"), False),
    **dict.fromkeys(("llama4", "shieldgemma2")),
}
"""Types that ignore the outer tie_word_embeddings -> whether embedding and head are tied; None: see text_config."""


OUTER_KEYS: Final = {
    *("adapter_config", "alignment_intermediate_size", "audio_config", "downsample_factor", "downsample_ratio"),
    *("hidden_size", "image_seq_length", "latent_query_num", "max_value_projector_patch_to_query_dict"),
    *("merged_hidden_size", "merger_times", "mm_tokens_per_image", "multimodal_projector_bias", "num_query_tokens"),
    *("out_hidden_size", "perceiver_config", "projection_hidden_size", "projector_bias", "projector_hidden_size"),
    *("projector_use_layernorm", "qformer_config", "scale_factor", "spatial_merge_size", "tie_word_embeddings"),
    *("vision_feature_layer", "vision_feature_layers", "vq_config"),
}
"""Keys beside text_config and vision_config that projectors read."""
TOWER_KEYS: Final = {
    *("deepstack_visual_indexes", "in_channels", "merge_kernel_size", "out_hidden_size", "output_channels"),
    *("pixel_shuffle_ratio", "projection_dim", "projection_intermediate_size", "projector_input_dim"),
    *("projector_output_dim", "spatial_merge_size", "vision_output_dim", "vocab_size", "intermediate_size"),
    *("hidden_size", "scale_factor", "use_fine_route", "depth", "pooling_kernel_size"),
}
"""Keys of vision_config that projectors read."""


def _tokens(join: Join) -> int:
    """Tokens of an image in the sequence: the number in the file, or the patches divided by the patches per token."""
    for key in (
        "mm_tokens_per_image",
        "num_query_tokens",
        "image_seq_length",
        "max_value_projector_patch_to_query_dict",
    ):
        if key in join.outer.values:
            return join.outer.size(key, 1)
    if join.outer.get("perceiver_config") is not None:
        return join.outer.part("perceiver_config").size("resampler_n_latents", 64)
    side = max(join.tower.count("spatial_merge_size"), join.outer.count("spatial_merge_size"), 1)
    side *= max(1, join.tower.count("pooling_kernel_size"))
    side *= join.outer.size("scale_factor", 1) * join.outer.size("downsample_factor", 1)
    for config, key in ((join.outer, "downsample_ratio"), (join.tower, "pixel_shuffle_ratio")):
        side *= round(1 / config.number(key, 1))
    patches = join.tower.filled("max_sequence_length") - join.tower.document["patches"]["class_tokens"]
    return max(1, int(patches) // side**2)


def add_vision(join: Join, model_type: str) -> None:
    """Add the tower to the model document of the text.

    Raises:
        InputError: a required key is missing, or its value fits no field of ours.
    """
    TOWERS[str(join.tower.values["model_type"])].translate(join.tower)
    join.tower.put("name", "vision", "model_type")
    params, tokens = PROJECTORS[model_type](join), _tokens(join)
    for part in (join.outer, join.tower, join.text):
        part.raise_if_missing()
    join.text.adopt("vision.encoder", join.tower)
    join.text.put("vision.projector_params", params, "vision_config")
    join.text.put("vision.tokens_per_image", tokens, "vision_config")
    join.text.notes.append(
        "one image in each sequence is assumed, a part of the tokens that are asked for; vision.images_per_sequence"
    )
