"""Parameters of every language model of the transformers library, counted on the meta device: the oracle of a test.

    python tools/hf_counts.py tests/published/huggingface_types.json [TYPE ...]

    python tools/hf_counts.py tests/published/hub_configs.json

The second command writes the parameter counts of the modules that transformers builds from the checkpoints'
configurations in the file. The first command writes, for each type of MODEL_FOR_CAUSAL_LM_MAPPING and
MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, the default configuration and the total and active parameter counts of its module.
The first command also writes the counts after single changes of the configuration. This program needs torch and
transformers; the test that reads the file needs neither package.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402, TID251 - the oracle, which nothing of the planner imports
import transformers  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto import modeling_auto as auto  # noqa: E402

UNUSED = re.compile(
    r"\w*token_id|\w*token_index|\w*dropout\w*|\w*pdrop|_\w+|initializer_\w+|init_std|id2label|label2id|transformers_version"
    r"|use_cache|output_\w+|return_dict|problem_type|chunk_size_feed_forward|dtype|summary_\w+|is_encoder_decoder"
    r"|begin_suppress_tokens|time_step_(min|max|floor|limit|init_scheme|scale)|tokenizer_class"
)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "emb_dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
WIDTHS = (
    "intermediate_size", "ffn_dim", "decoder_ffn_dim", "dim_ff", "dff", "d_inner", "n_inner", "ffn_hidden_size",
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "intermediate_size_mlp", "dense_intermediate_size",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "use_qk_norm", "qk_layernorm", "bias", "no_bias",
    "use_parallel_residual", "multi_query", "use_qkv_bias", "attention_out_bias", "lm_head_bias", "mamba_proj_bias",
    "mamba_conv_bias", "use_conv_bias", "conv_bias", "mamba_rms_norm", "add_bias_linear", "use_post_norm",
    "use_attention_gate", "use_sandwich_norm", "alibi", "new_decoder_architecture", "parallel_attn", "gating",
    "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block", "norm_bias", "is_moe", "qkv_bias", "enable_bias",
)  # fmt: skip
SIZES = (
    "head_dim", "q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "index_n_heads",
    "index_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "mamba_d_state", "mamba_d_conv", "mamba_n_groups", "state_size", "conv_kernel", "expand",
    "mamba_expand", "time_step_rank", "mamba_dt_rank", "ssm_state_size", "n_groups", "conv_L_cache", "lru_width",
    "num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace", "num_dense_layers",
    "kv_channels", "attention_hidden_size", "linear_num_heads", "linear_head_dim", "swa_head_dim",
    "swa_num_key_value_heads", "global_head_dim", "num_kv_shared_layers", "hidden_size_per_layer_input",
)  # fmt: skip
_ROPE = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")}
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass": {"text_config": {"rope_parameters": _ROPE}},
    "cohere_compass_text": {"rope_parameters": _ROPE},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
}
"""Keys that a type needs in addition to its default configuration, so that a module can be built."""


def described(config: Any) -> dict[str, Any]:
    """A configuration in the form of config.json, without the keys that do not affect a count."""
    return _kept(json.loads(config.to_json_string(use_diff=False)))


def _kept(values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if not UNUSED.fullmatch(key)}
    return {key: _kept(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _both(needed: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A change merged with the keys that a type needs, also inside nested configurations."""
    inside = {key: needed[key] | value for key, value in change.items() if isinstance(needed.get(key), dict)}
    return needed | change | inside


def _difference(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Keys whose values differ; for nested configurations, the differing keys inside them."""
    return {
        key: _difference(value, before[key]) if isinstance(value, dict) and isinstance(before.get(key), dict) else value
        for key, value in now.items()
        if before.get(key, "") != value
    }


def _uneven(config: Any) -> bool:
    """Whether key-value heads do not divide the heads; the library builds this model but cannot run it."""
    text, tower = described(config.get_text_config()), described(config).get("vision_config") or {}
    width = tower.get("embed_dim", tower.get("hidden_size"))
    of_tower = tower.get("num_heads", tower.get("num_attention_heads", tower.get("attention_heads")))
    if type(width) is int and type(of_tower) is int and width % of_tower:
        return True
    heads, kv = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if text.get("model_type") == "helium":  # square output projection: all heads together are as wide as the model
        return bool(text["num_attention_heads"] * text["head_dim"] != text["hidden_size"])
    return type(heads) is int and type(kv) is int and kv > 0 and heads % kv > 0


def built(mapping: Any, config: Any) -> Any:
    """The module of a configuration, without memory for its parameters."""
    kind = mapping[type(config)]
    kind = kind[0] if isinstance(kind, list | tuple) else kind
    wanted = kind.config_class
    if wanted is not None and not isinstance(config, wanted) and mapping is auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        config = config.get_text_config()
    with torch.device("meta"):
        module = kind(config)
    module.tie_weights()
    return module


def counted(module: Any) -> dict[str, int]:
    """Total parameters, and active ones, without the routed experts that the router does not choose for a token."""
    parameters = dict(module.named_parameters())
    total = sum(each.numel() for each in parameters.values())
    return {"num_params": total, "num_active_params": total - sum(_idle(module, name) for name in parameters)}


def _idle(module: Any, name: str) -> int:
    if not re.search(r"(?<!shared_)experts\.|(?<!shared_)mlp\.(input|output)_linear\.weight", name):
        return 0
    config = module.config.get_text_config()
    experts = next((n for key in EXPERTS if (n := getattr(config, key, None))), 0)
    chosen = next((n for key in CHOSEN if (n := getattr(config, key, None))), 0)
    chosen = chosen[0] if isinstance(chosen, list) else chosen
    inner = getattr(config, "ffn_config", None)  # of DBRX
    experts, chosen = experts or getattr(inner, "moe_num_experts", 0), chosen or getattr(inner, "moe_top_k", 0)
    parameter = module.get_parameter(name)
    if not experts or not chosen or re.search(r"self_attention\.experts\.(router|bias)", name):  # of JetMoE
        return 0
    return int(parameter.numel() * (experts - chosen) // experts)


def all_changes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Changes to try, of the configuration and of its nested configurations."""
    nested = [name for name in ("text_config", "vision_config") if isinstance(values.get(name), dict)]
    inside = [
        {name: {"model_type": values[name].get("model_type"), **change}}
        for name in nested
        for change in changes(values[name])
    ]
    return [*changes(values), *inside]


def changes(values: dict[str, Any]) -> list[dict[str, Any]]:  # noqa: C901 - a list of things to try
    """Changes to try, one at a time; with some of them no module can be built."""

    def first(keys: tuple[str, ...]) -> tuple[str, int]:
        found = [(key, value) for key in keys if type(value := values.get(key)) is int and value > 0]
        return found[0] if found else ("", 0)

    tried: list[dict[str, Any]] = []
    layers, n = first(LAYERS)
    hidden, h = first(HIDDEN)
    heads, a = first(HEADS)
    if layers:
        tried += [{layers: n // 2 + 2}, {layers: n + 3}, {layers: 8}]
    if hidden:
        tried += [{hidden: 2 * h}, {hidden: h + 4 * a * max(1, h // a // 8) if a else h + 512}]
    if heads:
        tried += [{heads: a // 2}, {heads: 2 * a}]
    kv = values.get("num_key_value_heads")
    if hidden and type(size := values.get("head_dim")) is int:
        tried.append({hidden: 2 * h, "head_dim": 2 * size})
    if type(kv) is int and a:
        tried += [{"num_key_value_heads": a // 2 if kv != a // 2 else a}, {"num_key_value_heads": 1}]
    for key in WIDTHS:
        if type(value := values.get(key)) is int:
            tried.append({key: value + 192})
    experts, count = first(EXPERTS)
    chosen, k = first(CHOSEN)
    if experts and chosen:
        tried += [{experts: 2 * count, chosen: k + 1}, {experts: 4 * count}]
    for key in SIZES:
        if type(value := values.get(key)) is int:
            tried.append({key: value * 2 if value else 2})
    tried += [{key: not value} for key in FLAGS if type(value := values.get(key)) is bool]
    if type(size := values.get("vocab_size")) is int:
        tried.append({"vocab_size": size + 1000})
    return tried


def cases(mapping: Any, name: str) -> dict[str, Any]:
    """The record of one type: its default configuration, and the counts of it and of each changed configuration.

    follows: keys whose default depends on other keys.
    """
    needed = NEEDED.get(name, {})
    kind = CONFIG_MAPPING[name]
    try:
        config = kind(**needed)
        module = built(mapping, config)
        counts = counted(module)
    except Exception as error:  # noqa: BLE001 - whatever a default configuration lacks
        return {"not_built": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    default = described(config) | {"architectures": [type(module).__name__]}
    found: list[dict[str, Any]] = [{"change": {}, **counts}]
    follows: set[str] = set()
    for change in all_changes(described(config)):
        try:
            other = kind(**_both(needed, change))
            result = counted(built(mapping, other))
        except Exception:  # noqa: BLE001, S112 - many changes contradict other keys
            continue
        now = described(other)
        if _uneven(other):
            continue
        known = {json.dumps(each["change"], sort_keys=True) for each in found}
        changed = _difference(now | {"architectures": default["architectures"]}, default)
        follows |= set(changed) - set(change)
        changed |= {key: value for key, value in change.items() if not isinstance(value, dict)}
        if json.dumps(changed, sort_keys=True) not in known:
            found.append({"change": changed, **result})
    return {"config": default, "follows": sorted(follows), "cases": found}


def of_checkpoint(values: dict[str, Any]) -> dict[str, int]:
    """The parameters of the module of a checkpoint's config.json, with its image tower if it has one."""
    config = CONFIG_MAPPING[values["model_type"]](**{key: each for key, each in values.items() if key != "model_type"})
    reads_images = values.get("vision_config") and type(config) in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    mapping = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if reads_images else auto.MODEL_FOR_CAUSAL_LM_MAPPING
    return counted(built(mapping, config))


def of_checkpoints(target: Path, data: dict[str, Any]) -> None:
    """Write the parameter count of each checkpoint next to its configuration."""
    lines = []
    for name, each in sorted(data["checkpoints"].items()):
        found = {"config": each["config"], "card": each["card"], **of_checkpoint(each["config"])}
        lines.append(f"{json.dumps(name)}: {json.dumps(found, separators=(',', ':'))}")
        print(name, found["num_params"], found["num_active_params"], flush=True)
    head = json.dumps({"source": data["source"], "transformers": transformers.__version__})
    target.write_text(f'{head[:-1]},\n"checkpoints": {{\n' + ",\n".join(lines) + "\n}}\n")


def main(path: str, *names: str) -> None:
    """Write the file; with names, count only these types again."""
    transformers.logging.set_verbosity_error()
    target = Path(path)
    data = json.loads(target.read_text()) if target.exists() else {}
    if "checkpoints" in data:
        of_checkpoints(target, data)
        return
    data["transformers"] = transformers.__version__
    for part, mapping, listed in (
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("image_text", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        types = data.setdefault(part, {})
        for name in sorted(listed):
            if not names or name in names or part in names:
                types[name] = cases(mapping, name)
                tower = (types[name].get("config", {}).get("vision_config") or {}).get("model_type")
                if isinstance(tower, str) and tower in CONFIG_MAPPING:
                    data.setdefault("towers", {})[tower] = {"config": described(CONFIG_MAPPING[tower]())}
                write(target, data)
                print(part, name, len(types[name].get("cases", ())), types[name].get("not_built", ""), flush=True)


def write(target: Path, data: dict[str, Any]) -> None:
    """Write all records, one line for each type."""
    parts = ",\n".join(
        f'"{part}": {{\n'
        + ",\n".join(f'"{name}": {json.dumps(types[name], separators=(",", ":"))}' for name in sorted(types))
        + "\n}"
        for part in ("causal", "image_text", "towers")
        if (types := data.get(part)) is not None
    )
    target.write_text(f'{{"transformers": "{data["transformers"]}",\n{parts}}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
