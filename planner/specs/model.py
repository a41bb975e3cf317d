"""The model document: the shape of a transformer, in counts only."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from planner.specs.document import Document, Name

__all__ = ["ARCHITECTURES", "ModelSpec"]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt": {
        "norm": "layernorm",
        "position": "learned",
        "activation": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "tied_embeddings": True,
    },
    "llama": {
        "norm": "rmsnorm",
        "position": "rope",
        "activation": "swiglu",
        "attention_bias": False,
        "mlp_bias": False,
        "tied_embeddings": False,
    },
}
"""What an architecture implies; each value can be overridden in the document."""


class ModelSpec(Document):
    """A decoder-only transformer.

    `architecture` implies norm, position, activation, biases and tied embeddings (`ARCHITECTURES`); a document
    may override each of them. After validation every field holds a value.
    """

    name: Name
    architecture: Literal["gpt", "llama"]
    num_layers: int = Field(ge=1, le=10_000)
    hidden_size: int = Field(ge=1, le=1_000_000)
    num_heads: int = Field(ge=1, le=100_000)
    num_kv_heads: int = Field(default=0, ge=0, description="0: as many as num_heads")
    head_size: int = Field(default=0, ge=0, description="0: hidden_size / num_heads")
    ffn_hidden_size: int = Field(ge=1, le=10_000_000)
    vocab_size: int = Field(ge=1, le=100_000_000)
    max_sequence_length: int = Field(ge=1, le=1_000_000_000)
    norm: Literal["layernorm", "rmsnorm"]
    position: Literal["learned", "rope"]
    activation: Literal["gelu", "swiglu"]
    attention_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_epsilon: float = Field(default=1e-5, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _apply_architecture(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {**ARCHITECTURES.get(str(data.get("architecture")), ARCHITECTURES["llama"]), **data}
        return data

    @model_validator(mode="before")
    @classmethod
    def _derive_heads(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        heads, hidden = data.get("num_heads"), data.get("hidden_size")
        if not (type(heads) is int and type(hidden) is int and heads > 0 and hidden > 0):
            return data  # reported by the fields themselves
        derived = dict(data)
        if not data.get("head_size"):
            if hidden % heads:
                low = hidden // heads * heads
                raise ValueError(
                    f"num_heads: {heads} does not divide hidden_size {hidden}; nearest hidden_size that it divides: "
                    f"{low or heads} or {low + heads}, or state head_size"
                )
            derived["head_size"] = hidden // heads
        derived["num_kv_heads"] = data.get("num_kv_heads") or heads
        return derived

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                "each key-value head serves the same number of query heads"
            )
        return self
