"""Hugging Face `config.json`: read as JSON, translated by a table for each `model_type`, never executed.

A key has the meaning and the default that the model type's class in the transformers library gives it. A key that
concerns attention or experts and that no table reads is an error, never a guess.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from planner.errors import InputError
from planner.specs.huggingface_config import Config
from planner.specs.huggingface_types import MISSING, TYPES
from planner.specs.huggingface_vision import (
    CAUSAL,
    PROJECTORS,
    TIES,
    TOWERS,
    WITH_SOUND,
    WITHOUT_TOWER,
    Join,
    add_vision,
)
from planner.specs.text import any_of, did_you_mean, printable, quoted
from planner.specs.yaml import MAX_DEPTH, MAX_NODES, document_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from planner.specs.huggingface_types import ModelType
    from planner.specs.yaml import Node

CONFIG_NAME: Final = "config.json"
_HARMLESS: Final = re.compile(
    r"""
    architectures | auto_map | quantization_config | torch_dtype | dtype | transformers_version | _\w+
    | \w*token_id | \w*token_index | \w*dropout | \w*pdrop | \w*dropout_(prob|rate) | initializer_\w+ | init_std
    | use_cache | output_\w+ | return_dict | gradient_checkpointing | pruned_heads | chunk_size_feed_forward
    | hidden_act | hidden_activation | activation_function | task_specific_params | summary_\w+ | \w*2\w*id\w*
    | id2label | label2id | problem_type | finetuning_task | tokenizer_class | prefix | language | bos | eos
    | pretraining_tp | slow_but_exact | \w*_softmax_fusion | attention_softmax_in_fp32 | bias_dropout_fusion
    | skip_bias_add\w* | apply_residual_connection_post_layernorm | layerdrop | n_ctx | reorder_and_upcast_attn
    | scale_attn_\w+ | attn_implementation | layer_norm_elementwise_affine | rotary_pct | rotary_emb_base
    | rope_\w+ | partial_rotary_factor | original_max_position_embeddings | query_pre_attn_scalar
    | attn_logit_softcapping | final_logit_softcapping | \w+_multiplier | logits_scaling | attn_scale | floor_scale
    | attn_temperature_tuning | router_aux_loss_coef | router_z_loss_coef | router_jitter_noise | norm_topk_prob
    | n_group | topk_group | topk_method | routed_scaling_factor | scoring_func | seq_aux | aux_loss_alpha | ep_size
    | moe_capacity_factor | experts_per_token | swiglu_limit | initial_context_length | clip_qkv | is_decoder
    | is_encoder_decoder | position_embedding_type | classifier_dropout | encoder_stride | cache_implementation
    | relative_attention_max_distance | use_qk_norm | tie_word_embeddings | expert_selection_fn
    | prefix_dense_sliding_window_pattern | shared_expert_combination_strategy | use_bidirectional_attention
    | mup_\w+ | \w+_multipliers | mamba_chunk_size | mamba_norm_before_gate | use_mamba\w* | use_associative_scan
    | num_logits_to_keep | attention_value_scale | moe_renormalize | kda_\w+ | rope_interleave | block_size
    | (full|linear)_attn_(alpha|beta)_factor | mlp_(alpha|beta)_factor | layer_group_size | routed_scaling_factor
    | head_wise_\w+ | moe_routed_scaling_factor | moe_apply_router_weight_on_input | moe_router_logit_softcapping
    | lambda_std_dev | prefix_lm | swiglu_alpha | rescale_every | linear_allow_neg_eigval | linear_(a_log|dt)_\w+
    | attention_probs_dropout_prob | input_jitter_noise | moe_shared_expert_overlap | residual_in_fp32 | moe_norm_min
    | num_expert_group | max_window_layers | scale_attention_softmax_in_fp32 | layer_rope_theta
    | router_scaling_factor | (encoder|decoder)_layerdrop | attention_type | num_random_blocks | forced_\w+
    | share_encoder_decoder_embeddings | apply_spec_augment | mask_\w+ | use_weighted_layer_sum
    | encoder_no_repeat_ngram_size | scale_embedding | use_task_id | static_position_embeddings | relative_max_distance
    | add_final_layer_norm | normalize_\w+ | disable_ngram_loss | ngram_\w+ | use_fast | image_token_index
    | mlp_hidden_act | mamba_hidden_act | use_expert_bias | rescale_prenorm_residual | end_n_top | start_n_top
    | mask_index | unk_index | lang_id | \w*_index | mtp_layers_block_type | ff_activation | use_mems_\w+
    | hidden_states_scale\w* | enable_moe_fp32_combine | rotary_dim | enable_lm_head_fp32 | resid_\w+ | embd_\w+
    | num_sliding_attention_heads | qk_scale_factor | moe_router_scaling_factor | post_norm_eps | layer_?scale_\w+
    | norm_(mean|std) | moe_router_dtype | full_attn_mod | normalization_function | init_method | mlp_expansion_factor
    | mamba_use_mlp | block_(norm_eps|mlp_init_scale|use_\w+|out_init_scale|dim) | moe_(capacity|gate|use_aux_free)
    | moe_router_activation_func | mla_use_nope | use_grouped_topk | moe_drop_tokens
    | moe_random_routing_dropped_token | capacity_factor | num_media_embeds
    """,
    re.VERBOSE,
)
"""Keys that change neither parameters nor prices, except for types whose table reads them."""
_CONCERNS: Final = re.compile(r"attn|attention|head|expert|moe|router|window|lora|kv|qk|layer|norm|mlp|ffn|bias|sink")
"""Parts of key names; a key with one of them may change the number of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """A model document made from a config.json; each value has the position of its key in the file.

    notes: sentences for the user about parts of the file that were not read.
    """

    tree: Node
    notes: tuple[str, ...]


def read_config(path: Path, name: str = "") -> HuggingFaceModel:
    """Read a config.json; messages call the file `name`.

    Raises:
        InputError: the file is missing, is not strict JSON, has an unknown model_type, or has keys that no table reads.
        EnvironmentProblem: the file cannot be read.
    """
    shown = printable(name or str(path))
    return config_from_text(document_text(path, shown), shown, _model_name(path))


def config_from_text(text: str, shown: str, model_name: str = "model") -> HuggingFaceModel:
    """The model document from the text of a config.json; messages call the file `shown`.

    Raises:
        InputError: the text is not strict JSON, or has an unknown model_type or keys that no table reads.
    """
    outer = _parse(text, shown)
    for key in ("text_config", "vision_config", "audio_config"):
        Config(name=shown, text=text, values=outer).part(key)
    config = Config(name=shown, text=text, values=outer)
    notes = []
    join = _join(outer, shown, text)
    if join is not None:
        config = join.text
    elif isinstance(outer.get("text_config"), dict):
        inner = {**outer["text_config"]}
        inner.setdefault("model_type", f"{outer.get('model_type')}_text")
        if "tie_word_embeddings" in outer and not _is_text_model(outer):
            inner["tie_word_embeddings"] = outer["tie_word_embeddings"]
        config = Config(name=shown, text=text, values=inner, inside=("text_config",))
        notes.append("only text_config is read: what surrounds the text model is neither counted nor priced")
    if isinstance(outer.get("audio_config"), dict) and str(outer.get("model_type")) not in WITH_SOUND:
        notes.append("audio_config is not read: a tower for sound is neither counted nor priced")
    if outer.get("auto_map"):
        notes.append("auto_map names code that comes with the checkpoint: it is not run, the model_type decides")
    model_type = _model_type(config)
    if model_type.recorded:
        _fill_in(config)
    config.put("name", model_name, "model_type")
    model_type.translate(config)
    if isinstance(outer.get("model_type"), str) and (rule := WITHOUT_TOWER.get(outer["model_type"])):
        rule(Config(name=shown, text=text, values=outer), config)
    _refuse_unread(config)
    if join is not None:
        add_vision(join, str(outer["model_type"]))
        _refuse_unread(join.tower)
    notes += [*config.notes, *_quantization(outer)]
    return HuggingFaceModel(tree=config.tree(), notes=tuple(notes))


def _join(outer: dict[str, Any], shown: str, text: str) -> Join | None:
    """The three parts of the file of a model that reads images.

    None for other models and for files without a vision tower.
    """
    name = str(outer.get("model_type"))
    if name not in PROJECTORS or not isinstance(outer.get("vision_config"), dict):
        return None
    if _is_text_model(outer):
        return None
    known = _class_defaults().get(f"outer:{name}", {"keys": {}, "tower": "", "text": ""})
    whole = {**known["keys"], **outer}
    inner, inside = outer.get("text_config"), True
    kind = inner.get("model_type", known["text"]) if isinstance(inner, dict) else known["text"]
    sizes = _class_defaults().get(f"nested:{kind}", {}) if isinstance(inner, dict) else {}
    if not isinstance(inner, dict):
        inner = {key: value for key, value in outer.items() if key != "model_type" and not key.endswith("_config")}
        sizes, inside = {"model_type": name} if name in TYPES else {}, False
    inner = {"model_type": known["text"] or f"{name}_text", **sizes, **inner}
    if (tied := TIES.get(name, whole.get("tie_word_embeddings"))) is not None:
        inner["tie_word_embeddings"] = tied
    tower = outer["vision_config"]
    kind = tower.get("model_type")
    kind = known["tower"] if kind in (None, name) else kind
    if not kind:
        return None
    config = Config(name=shown, text=text, values=tower, inside=("vision_config",))
    if str(kind) not in TOWERS:
        words = f"`vision_config` has model_type {quoted(kind)}, which is not supported"
        config.refuse("model_type", words, f"{any_of(sorted(TOWERS))}")
    defaults = _class_defaults().get(f"tower:{kind}", {"keys": {}})["keys"]
    config = replace(config, values={**defaults, **tower, "model_type": kind})
    return Join(
        outer=Config(name=shown, text=text, values=whole),
        tower=config,
        text=Config(name=shown, text=text, values=inner, inside=("text_config",) * inside),
    )


def _is_text_model(outer: dict[str, Any]) -> bool:
    """Whether `architectures` names only the text model; then only the text model's own keys are read."""
    names = outer.get("architectures")
    return (
        isinstance(names, list)
        and str(outer.get("model_type")) not in CAUSAL
        and any(str(name).endswith("ForCausalLM") for name in names)
    )


def _parse(text: str, name: str) -> dict[str, Any]:
    """Parse strict JSON: no comments, no NaN, no repeated keys, and the nesting and length limits of our documents.

    Infinity is read, in Python's spelling, because Mamba's files limit time steps to infinity.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{quoted(twice)} is given twice", where=name, hint="keep one of them")
        return found

    def constant(written: str) -> float:
        if written == "NaN":
            raise InputError("NaN is not a finite number", where=name)
        return float(written)

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise InputError(f"this is not valid JSON: {error.msg}", where=where) from None
    except RecursionError:
        raise InputError(f"nested more than {MAX_DEPTH} levels deep", where=name) from None
    except ValueError:  # more digits than Python converts
        raise InputError("a number is too long", where=name) from None
    if not isinstance(data, dict):
        raise InputError("expected an object with keys and values", where=name)
    if sum(1 for _ in _walk(data, name)) > MAX_NODES:
        raise InputError(f"more than {MAX_NODES} values", where=name)
    return data


def _walk(value: Any, name: str, depth: int = 1) -> Iterator[Any]:
    if depth > MAX_DEPTH:
        raise InputError(f"nested more than {MAX_DEPTH} levels deep", where=name)
    yield value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from _walk(child, name, depth + 1)


@cache
def _class_defaults() -> dict[str, dict[str, Any]]:
    """Default values of missing keys, by model type.

    Source: configuration classes of transformers 5.23, recorded by tools/hf_counts.py.
    """
    text = files("planner").joinpath("specs", "huggingface_defaults.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


_ANOTHER_WAY: Final = {
    "mlp_layer_types": ("first_k_dense_replace", "num_dense_layers", "mlp_only_layers"),
    "layer_types": ("sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers", "index_topk"),
    "indexer_types": ("index_topk",),
    "per_layer_config": ("global_head_dim", "num_global_key_value_heads"),
    "layers_block_type": ("hybrid_override_pattern",),
    "attention_layers": ("attention_types",),
    "num_attention_heads": ("kv_channels",),
}
"""Older keys that express a list of layers in another way."""


_OLDER_LISTS: Final = {
    "hybrid_layer_pattern": ("layer_types", {"0": "full_attention", "1": "sliding_attention"}),
    "moe_layer_freq": ("mlp_layer_types", {"0": "dense", "1": "sparse"}),
}
"""Lists of numbers that the library now writes as lists of names."""


_OLDER_KEYS: Final = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
"""Keys in LFM2's files that the library's class reads under other names."""


def _spell_anew(values: dict[str, Any]) -> None:
    """Rename older keys to the library's present spelling, and turn lists of layer numbers into lists of names."""
    for older, key in _OLDER_KEYS.items():
        if older in values:
            values[key] = values.pop(older)
    layers, attending = values.get("num_hidden_layers"), values.get("full_attn_idxs")
    mixing = values.pop("linear_attn_config", None) if isinstance(values.get("linear_attn_config"), dict) else {}
    if mixing:  # of Kimi Linear, which counts layers from 1
        attending = mixing.get("full_attn_layers")
        renamed = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        renamed["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        values.update({key: mixing[older] for older, key in renamed.items() if older in mixing})
    if values.get("layer_types") is None and type(layers) is int and isinstance(attending, list):
        first, other = (1, "linear_attention") if mixing else (0, "conv")
        numbers = range(first, min(layers, MAX_NODES) + first)
        values["layer_types"] = ["full_attention" if number in attending else other for number in numbers]


def _has_no_windows(config: Config) -> bool:
    """Whether all layers attend to all tokens, for a file without a list of layers."""
    unused = config.values.get("use_sliding_window") is False
    return unused or ("sliding_window" in config.values and config.values["sliding_window"] is None)


def _fill_in(config: Config) -> None:
    """Fill in the class's defaults of missing keys.

    Values that the class derives from other keys must be in the file.
    """
    _spell_anew(config.values)
    for older, (key, names) in _OLDER_LISTS.items():
        listed = config.values.get(older)
        if isinstance(listed, list) and config.values.get(key) is None:
            config.values[key] = [names.get(str(each), str(each)) for each in listed]
            del config.values[older]
    known = _class_defaults().get(str(config.values["model_type"]), {"keys": {}, "follows": []})
    for key in known["follows"]:
        said = any(each in config.values for each in _ANOTHER_WAY.get(key, ()))
        if config.values.get(key) is None and not said and not (key == "layer_types" and _has_no_windows(config)):
            config.missing.append(key)
    config.values.update({**known["keys"], **config.values})


def _model_type(config: Config) -> ModelType:
    name = config.values.get("model_type")
    supported = f"{len(TYPES)} types are supported, such as llama, qwen3_moe, deepseek_v3 and nemotron_h"
    if name is None:
        raise InputError("`model_type` is missing", where=config.name, hint=supported)
    if not isinstance(name, str) or name not in TYPES:
        if block := MISSING.get(str(name)):
            config.refuse("model_type", f"model_type {quoted(name)} is not supported: it has {block}", supported)
        close = did_you_mean(str(name), TYPES)
        config.refuse("model_type", f"model_type {quoted(name)} is not supported", f"{close} {supported}".strip())
    return TYPES[name]


def _refuse_unread(config: Config) -> None:
    """Refuse unread keys, unless they are known to change neither parameters nor prices."""
    unread = [
        key
        for key, value in config.values.items()
        if key not in config.read and not _HARMLESS.fullmatch(key) and value not in (None, False, 0, "", [], {})
    ]
    unknown = [key for key in unread if _CONCERNS.search(key)]
    if unknown:
        hint = f"keys of this model_type: {', '.join(sorted(config.read))}"
        raise InputError(
            *(
                config.mistake(key, f"`{printable(key, 60)}` concerns the layers and is not read", hint)
                for key in unknown
            )
        )
    if unread:
        config.notes.append(f"not read: {printable(', '.join(sorted(unread)), 200)}")


def _quantization(config: dict[str, Any]) -> list[str]:
    if not config.get("quantization_config"):
        return []
    return ["quantization_config is not read: the plan trains in the precision that it is asked for"]


def _model_name(path: Path) -> str:
    stem = path.resolve().parent.name if path.name == CONFIG_NAME else path.stem
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem)[:64] or "model"
