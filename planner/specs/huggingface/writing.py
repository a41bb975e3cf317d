"""Write a model as a config.json of transformers, with the same tables that read config.json back into a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from planner.errors import InputError
from planner.specs.huggingface import config_from_text
from planner.specs.huggingface.rules import LLAMA3_SCALING
from planner.specs.huggingface.table import row
from planner.specs.model import ModelSpec
from planner.specs.validate import validate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_MORE: Final[dict[str, dict[str, Any]]] = {
    **{key: {"hidden_activation": "gelu_pytorch_tanh"} for key in ("gemma", "gemma2", "gemma3_text")},
    **{key: {"use_sliding_window": False} for key in ("qwen2", "qwen3", "qwen3_moe", "qwen2_moe")},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},  # the class's defaults are 0.1
}
"""Further keys of a model type, whose defaults are not what our layers compute."""
_LISTS_WINDOWS: Final = ("gemma2", "gemma3_text", "gpt_oss")
"""The types whose layers follow `layer_types`; the other types with windows, such as Mistral, window every layer.

Source: models/*/modeling_*.py in transformers 5.23.
"""


def config_of(spec: ModelSpec, kinds: Iterable[str]) -> dict[str, Any] | None:
    """A config.json of the first of these types that our reader converts back into this model; None if there is none.

    A model document cannot distinguish some types, such as DeepSeek-V2 and V3, which differ in their routers. The type
    that occurs in the model's name is tried first.
    """
    for kind in sorted(kinds, key=lambda each: each.replace("_", "-") not in spec.name):
        for config in _candidates(kind, spec):
            if model_from(config, spec.name) == spec:
                return config
    return None


def model_from(config: Mapping[str, Any], name: str = "model") -> ModelSpec | None:
    """The model of a config.json; None if our tables cannot read it."""
    try:
        return validate(ModelSpec, config_from_text(json.dumps(config), "config.json", name).tree).model_copy(
            update={"name": name}
        )
    except InputError:
        return None


def _candidates(name: str, spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Possible configs of one model type: the keys of the type's fields, and further keys that its reader uses."""
    kind = row(name)
    config: dict[str, Any] = {"model_type": name}
    config |= {key: allowed[0] if isinstance(allowed, list) else allowed for key, allowed in kind.must.items()}
    for keys, target in kind.keys.items():
        found: Any = spec
        for part in target.split("."):
            found = getattr(found, part, None)
        if found is not None:
            config[keys.split("|")[0]] = found
    if spec.position == "rope":
        config["rope_theta"] = spec.rope_theta
    if scaling := spec.rope_scaling:
        named = {name: getattr(scaling, ours) for name, ours in LLAMA3_SCALING.items()}
        config["rope_scaling"] = {"rope_type": "llama3", **named}
    config |= _MORE.get(name, {}) | _of_window(name, spec) | _of_experts(name, spec)
    yield config
    if width := {"gpt2": "n_inner", "opt": "ffn_dim"}.get(name):
        yield {**config, width: spec.ffn_hidden_size}


def _of_window(name: str, spec: ModelSpec) -> dict[str, Any]:
    if not spec.sliding_window:
        return {"sliding_window": None} if name in ("mistral", "mixtral", "phi3") else {}
    kinds = ["full_attention" if spec.layer_is_global(each) else "sliding_attention" for each in range(spec.num_layers)]
    mixed = {"layer_types": kinds} if name in _LISTS_WINDOWS and spec.global_every else {}
    return {"sliding_window": spec.sliding_window, **mixed}


def _of_experts(name: str, spec: ModelSpec) -> dict[str, Any]:
    if (moe := spec.moe) is None:
        return {}
    found: dict[str, Any] = {}
    if name in ("mixtral", "gpt_oss", "olmoe"):
        found["intermediate_size"] = moe.ffn_hidden_size
    if name in ("qwen3_moe", "qwen2_moe"):
        found |= {"mlp_only_layers": list(range(moe.num_dense_layers)), "norm_topk_prob": name == "qwen3_moe"}
    if name == "deepseek_v2" and moe.num_groups > 1:
        found["topk_method"] = "group_limited_greedy"
    if name.startswith("deepseek"):
        found |= {
            "n_shared_experts": moe.shared_ffn_hidden_size // moe.ffn_hidden_size,
            "n_group": moe.num_groups,
            "topk_group": moe.groups_per_token,
        }
        if spec.mla is not None and not spec.mla.q_lora_rank:
            found["q_lora_rank"] = None
    return found
