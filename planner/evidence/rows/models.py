"""Build the model of a run from the row's own shape and from the known values of its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from planner.evidence.rows.knowledge import UnpricedRun, first_match, knowledge, normalized
from planner.specs.by_name import load_model, model_names, of_hub
from planner.specs.model import ModelSpec
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.evidence.rows.runs import Run

_PRICED: Final = ("", "dense", "moe", "moe-mla", "mla", "dense-mla")
_MLA_KEYS: Final = ("q_lora_rank", "kv_lora_rank", "nope_head_size", "rope_head_size", "value_head_size")
_MOE_KEYS: Final = ("layer_frequency", "router_bias", "expert_bias", "shared_gate", "num_groups", "groups_per_token")
_SHAPE: Final = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "ffn_hidden_size": "ffn",
    "vocab_size": "vocab",
}
"""Field of the model document -> column."""

_EXPERTS: Final = {
    "num_experts": "n_experts",
    "experts_per_token": "top_k",
    "ffn_hidden_size": "moe_ffn",
    "shared_ffn_hidden_size": "shared_ffn",
    "num_dense_layers": "n_dense_layers",
}
"""Field of the experts' document -> column."""


def model_of(run: Run) -> ModelSpec:
    """The model document of a row.

    Layers, widths and vocabulary are the row's own, so that a truncated or widened model is priced as it ran. If the
    row leaves some of them blank and names a shipped model, it is that model with the row's own values. Otherwise
    aliases.yaml has what no column has: head size, latent attention, windows and biases.

    Raises:
        UnpricedRun: the row does not state the shape, or no model can have the shape.
    """
    if run.arch.lower() not in _PRICED:
        raise UnpricedRun(f"architecture {printable(run.arch, 40)}")
    name = normalized(run.model)
    blank = {field for field, column in _SHAPE.items() if not getattr(run, column)}
    shipped = _shipped(run.model) if blank else None
    if shipped is not None and (blank != {"num_kv_heads"} or run.heads == shipped.num_heads):
        return _checked(_changed(shipped, run))
    family = first_match(name, knowledge("aliases")["families"]) or {}
    gated = bool(run.glu) if run.glu is not None else _is_gated(family)
    shape = _shape(run)
    document = {key: value for key, value in family.items() if key not in ("match", *_MLA_KEYS, *_MOE_KEYS)}
    document |= {
        "name": re.sub(r"[^a-z0-9._-]", "", name)[:64] or "unnamed",
        "architecture": family.get("architecture", "llama" if gated else "gpt"),
        "activation": "swiglu" if gated else "gelu",
        "max_sequence_length": run.seq or 1,
        "moe": _experts(run, family),
        "mla": _latent_attention(run, family),
        "mtp_layers": run.mtp_layers or 0,
        **shape,
    }
    if document["mla"]:
        document.pop("head_size", None)
        document |= {"num_kv_heads": shape["num_heads"], "qk_norm": "none"}
    return _checked(document)


def _checked(document: Mapping[str, Any]) -> ModelSpec:
    try:
        return ModelSpec.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnpricedRun(printable(f"model shape: {where} {first['msg']}", 120)) from None


def _is_gated(family: Mapping[str, Any]) -> bool:
    return family.get("architecture", "llama") not in ("gpt", "neox", "falcon")


def _changed(shipped: ModelSpec, run: Run) -> dict[str, Any]:
    """The document of a shipped model, with the row's own values."""
    document = shipped.model_dump()
    document |= {field: value for field, column in _SHAPE.items() if (value := getattr(run, column))}
    document["max_sequence_length"] = max(shipped.max_sequence_length, run.seq or 1)
    if run.mtp_layers is not None:
        document["mtp_layers"] = run.mtp_layers
    own = {field: value for field, column in _EXPERTS.items() if (value := getattr(run, column))}
    document["moe"] = document["moe"] | own if shipped.moe is not None else _experts(run, {})
    return document


def _shape(run: Run) -> dict[str, int]:
    """Counts and widths of a row that states them all; heads for keys and values may be blank."""
    own: dict[str, int | None] = {field: getattr(run, column) for field, column in _SHAPE.items()}
    own["num_kv_heads"] = own["num_kv_heads"] or own["num_heads"]
    if not own["ffn_hidden_size"] and own["hidden_size"] and run.moe_ffn:
        own["ffn_hidden_size"] = run.moe_ffn  # every layer has experts
    unknown = [column for field, column in _SHAPE.items() if not own[field]]
    if unknown:
        named = f"no shipped model is called {printable(run.model, 40)}, and the row" if run.model else "the row"
        raise UnpricedRun(f"{named} does not state {', '.join(unknown)}")
    return {field: int(value or 0) for field, value in own.items()}


def _shipped(name: str) -> ModelSpec | None:
    """The shipped model of this name, of another usual name, or of this id on the Hugging Face Hub."""
    target = knowledge("aliases")["shipped"].get(normalized(name), normalized(name))
    target = target if target in model_names() else of_hub(name.strip())
    return load_model(target) if target else None


def _experts(run: Run, family: Mapping[str, Any]) -> dict[str, Any] | None:
    if not run.n_experts or run.n_experts < 2:
        if run.arch.lower().startswith("moe"):
            raise UnpricedRun("number of experts not stated")
        return None
    if not run.top_k:
        raise UnpricedRun("experts per token not stated")
    width = run.moe_ffn or run.ffn
    if not width:
        raise UnpricedRun("width of the experts not stated")
    return {
        "num_experts": run.n_experts,
        "experts_per_token": run.top_k,
        "ffn_hidden_size": width,
        "shared_ffn_hidden_size": run.shared_ffn or 0,
        "num_dense_layers": run.n_dense_layers or 0,
        **{key: family[key] for key in _MOE_KEYS if key in family},
    }


def _latent_attention(run: Run, family: Mapping[str, Any]) -> dict[str, Any] | None:
    if "mla" not in run.arch.lower():
        return None
    known = knowledge("aliases")["latent_attention"]
    return {key: family.get(key, known[key]) for key in _MLA_KEYS}
