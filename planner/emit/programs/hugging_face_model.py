"""The types of transformers in which a model can be written, and the classes of their layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import names_beside
from planner.specs.huggingface import writing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.specs.model import ModelSpec

_FIRST: Final = ("llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral", "deepseek_v3", "gpt2")
LAYERS: Final[dict[str, str]] = names_beside(__file__)["layers"]
"""Type of a causal model -> class of its layers. Source: transformers 5, models/*/modeling_*.py."""


def config_of(spec: ModelSpec) -> dict[str, Any] | None:
    """A config.json that our reader converts back into this model; None if no model type of transformers matches."""
    return writing.config_of(spec, dict.fromkeys((*_FIRST, *LAYERS)))


def layer_class(config: Mapping[str, Any]) -> str:
    """The class name of a model's layers; FSDP wraps each instance of this class."""
    return LAYERS[str(config["model_type"])]
