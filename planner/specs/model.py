"""The model document: the shape of a transformer, in counts only."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from planner.specs.blocks import (
    LatentAttention,
    Mixer,
    MixtureOfExperts,
    PatchEmbedding,
    RotaryScaling,
    SparseAttention,
    UnevenHeads,
    even_head_size,
    latent_head_size,
)
from planner.specs.document import InputDocument, Name
from planner.specs.yaml import shipped_yaml
from planner.units import whole_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROWS: Final[Any] = shipped_yaml(Path(__file__).with_name("architectures.yaml")).plain
ARCHITECTURES: Final[dict[str, dict[str, Any]]] = {
    name: {**_ROWS.get(row.get("like"), {}), **{key: value for key, value in row.items() if key != "like"}}
    for name, row in _ROWS.items()
}
"""Fields that follow from an architecture; the document can override each of them."""


class LayerKind(InputDocument):
    """Layers of a stack that differ from the plain layers; they are spread evenly over the stack.

    Each field replaces the same field of the model; missing fields keep the model's values.
    ffn_hidden_size: 0 means no feed-forward block.
    experts: false gives these layers an ordinary feed-forward block, in a model with experts.
    latent: false gives these layers plain attention, in a model with latent attention.
    """

    num_layers: int = Field(ge=1, le=10_000)
    mixer: Mixer | None = None
    attends: bool | None = None
    experts: bool = True
    latent: bool = True
    mla: LatentAttention | None = None
    sparse: SparseAttention | None = None
    num_heads: int | None = Field(default=None, ge=1, le=100_000)
    num_kv_heads: int | None = Field(default=None, ge=1, le=100_000)
    head_size: int | None = Field(default=None, ge=1, le=100_000)
    value_head_size: int | None = Field(default=None, ge=0, le=100_000)
    ffn_hidden_size: int | None = Field(default=None, ge=0, le=10_000_000)
    sliding_window: int | None = Field(default=None, ge=0, le=1_000_000_000)
    norms_per_layer: int | None = Field(default=None, ge=0, le=6)
    qk_norm: Literal["none", "head", "width"] | None = None
    qkv_bias: bool | None = None
    attention_bias: bool | None = None
    attention_sinks: bool | None = None
    attention_gate: Literal["none", "head", "element"] | None = None
    keys_are_values: bool | None = None
    shares_keys: bool | None = None
    shared_by: int | None = Field(default=None, ge=1, le=10_000)
    layer_matrix_params: int | None = Field(default=None, ge=0, le=10**15)
    layer_vector_params: int | None = Field(default=None, ge=0, le=10**12)

    def _mistakes(self) -> Iterator[str]:
        if self.num_layers % (self.shared_by or 1):
            yield f"shared_by: {self.shared_by} does not divide num_layers {self.num_layers} of this kind"

    def applied(self, model: ModelSpec) -> ModelSpec:
        """The model as if all of its layers were of this kind."""
        own = {key: value for key in _REPLACED if (value := getattr(self, key)) is not None}
        own |= {"layers": (), "moe": model.moe if self.experts else None}
        if not self.latent:
            own["mla"] = None
        if self.sliding_window is not None:
            own["global_every"] = 0 if self.sliding_window else 1
        return model.model_copy(update=own)


_REPLACED = tuple(name for name in LayerKind.model_fields if name not in ("num_layers", "experts", "latent"))


class VisionTower(InputDocument):
    """An image encoder in front of a decoder, and the projector that turns its patches into tokens of the sequence.

    encoder: a model of kind `encoder` with patches; its max_sequence_length is the number of patches of an image.
    tokens_per_image: tokens of an image in the decoder's sequence.
    images_per_sequence: mean number of images over the data.
    projector_params: parameters between the tower and the decoder; every token of an image is multiplied by them.
    """

    encoder: ModelSpec
    tokens_per_image: int = Field(ge=1, le=1_000_000_000)
    images_per_sequence: float = Field(default=1.0, ge=0, le=1_000_000)
    projector_params: int = Field(default=0, ge=0, le=10**15)

    def _mistakes(self) -> Iterator[str]:
        if self.encoder.kind != "encoder" or self.encoder.patches is None or self.encoder.output_head:
            yield "encoder: the tower is of kind encoder, with patches and without an output_head"


class ModelSpec(InputDocument):
    """A transformer, by default decoder-only.

    `architecture` implies norm, position, activation, biases and tied embeddings (`ARCHITECTURES`); a document may
    override each of them. After validation every field holds a value.

    num_layers: number of layers; for an encoder-decoder, of both stacks together.
    num_encoder_layers: number of these layers in the encoder.
    head_size: size of an attention head; with latent attention nope_head_size + rope_head_size.
    activation: `swiglu` means any gated feed-forward block (three matrices), `gelu` any other (two matrices).
    attention_bias: whether all four projections have biases.
    qkv_bias: whether only queries, keys and values have biases (Qwen2).
    norms_per_layer: 2; 4 with norms after the blocks too (Gemma 2), 1 if both blocks share a norm (Falcon-7B).
    parallel_attention: whether attention and feed-forward block read the same input and their outputs are added.
    sliding_window: number of tokens that local layers attend to; 0 means no window.
    global_every: n, if every n-th layer is global; 0 makes all layers local.
    qk_norm: norm of queries and keys, per head or over the whole width.
    rope_scaling: scaling of rotary positions (Llama 3.1); it changes no price.
    mtp_layers: number of layers that predict further tokens (DeepSeek-V3), in addition to `num_layers`.
    extra_positions: rows of the table of learned positions beyond max_sequence_length (OPT has 2).
    relative_buckets: rows of T5's table of relative positions; each stack has one table.
    embedding_norm: whether a norm follows the embedding.
    final_norm: whether a norm follows the last layer of each stack.
    output_head: whether there is a projection to the vocabulary.
    head_outputs: width of an untied head's output, if it is not the vocabulary: 1 for a reward model.
    num_token_types: number of token types (BERT).
    pooler: whether there is a pooler (BERT).
    patches: image patches in place of tokens (ViT).
    norm_bias: whether LayerNorm has a bias; `unweighted` norms have no parameters.
    wide_norms: whether norms multiply by their weights in fp32 (Gemma), and not after rounding (Llama).
    caps_logits: whether a tanh bounds the logits (Gemma 2).
    head_bias: whether the output head has a bias.
    ffn_hidden_size: width of the feed-forward block; 0 if layers have none.
    cross_attention: whether each layer also attends to an encoder that is not part of the model (the decoder of BART).
    value_head_size: size of a value head; 0 means head_size.
    keys_are_values: whether one projection gives both keys and values.
    shares_keys: whether the layer reuses the keys and values of an earlier layer and projects none.
    attention_gate: whether a projection weights attention's output, per head or per element.
    sparse: the indexer that chooses keys.
    mixer: a block in place of attention, or beside attention if `attends` is true.
    shared_by: number of layers that share one set of weights (Zamba); num_layers counts each of them.
    embedding_size: width of the embedding and of the vectors added to it; 0 means hidden_size.
    head_input_size: width that the head reads; 0 means the width of the embedding (ELECTRA).
    layers: kinds of layers that differ; all remaining layers are plain.
    layer_matrix_params: parameters in matrices of each layer that no other field covers.
    layer_vector_params: parameters in vectors of each layer that no other field covers.
    vision: a tower that reads images, on the first stage.
    table_params: parameters of tables outside the layers that no other field covers; tables are looked up, not
        multiplied.
    input_matrix_params: parameters of other matrices at the model's input.
    output_matrix_params: parameters of other matrices at the model's output.
    """

    name: Name
    architecture: Literal["gpt", "llama", "qwen2", "qwen3", "gemma", "neox", "falcon", "bert", "vit", "t5"]
    kind: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    num_layers: int = Field(ge=1, le=10_000)
    num_encoder_layers: int = Field(default=0, ge=0, le=10_000)
    hidden_size: int = Field(ge=1, le=1_000_000)
    num_heads: int = Field(ge=1, le=100_000)
    num_kv_heads: int = Field(default=0, ge=0, description="0 means as many as num_heads")
    head_size: int = Field(default=0, ge=0, le=100_000, description="0 means hidden_size / num_heads")
    ffn_hidden_size: int = Field(ge=0, le=10_000_000)
    vocab_size: int = Field(ge=1, le=100_000_000)
    max_sequence_length: int = Field(ge=1, le=1_000_000_000)
    norm: Literal["layernorm", "rmsnorm", "unweighted"]
    position: Literal["learned", "rope", "alibi", "relative", "none"]
    activation: Literal["gelu", "swiglu"]
    attention_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    norms_per_layer: int = Field(default=2, ge=0, le=6)
    norm_bias: bool = True
    wide_norms: bool = False
    caps_logits: bool = False
    qkv_bias: bool = False
    parallel_attention: bool = False
    qk_norm: Literal["none", "head", "width"] = "none"
    attends: bool = True
    mixer: Mixer | None = None
    layers: tuple[LayerKind, ...] = ()
    sparse: SparseAttention | None = None
    cross_attention: bool = False
    value_head_size: int = Field(default=0, ge=0, le=100_000)
    attention_gate: Literal["none", "head", "element"] = "none"
    keys_are_values: bool = False
    shares_keys: bool = False
    shared_by: int = Field(default=1, ge=1, le=10_000)
    embedding_size: int = Field(default=0, ge=0, le=1_000_000)
    head_input_size: int = Field(default=0, ge=0, le=1_000_000)
    head_bias: bool = False
    layer_matrix_params: int = Field(default=0, ge=0, le=10**15)
    layer_vector_params: int = Field(default=0, ge=0, le=10**12)
    table_params: int = Field(default=0, ge=0, le=10**15)
    input_matrix_params: int = Field(default=0, ge=0, le=10**15)
    output_matrix_params: int = Field(default=0, ge=0, le=10**15)
    attention_sinks: bool = False
    embedding_norm: bool = False
    final_norm: bool = True
    output_head: bool = True
    head_outputs: int = Field(default=0, ge=0, le=1_000_000)
    extra_positions: int = Field(default=0, ge=0, le=1_000_000)
    relative_buckets: int = Field(default=32, ge=1, le=1_000_000)
    num_token_types: int = Field(default=0, ge=0, le=1_000_000)
    pooler: bool = False
    patches: PatchEmbedding | None = None
    sliding_window: int = Field(default=0, ge=0, le=1_000_000_000)
    global_every: int = Field(default=1, ge=0, le=10_000)
    mtp_layers: int = Field(default=0, ge=0, le=100)
    moe: MixtureOfExperts | None = None
    mla: LatentAttention | None = None
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: RotaryScaling | None = None
    norm_epsilon: float = Field(default=1e-5, gt=0)
    vision: VisionTower | None = None

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
        heads, hidden = (whole_of(data.get(key)) for key in ("num_heads", "hidden_size"))
        if not (type(heads) is int and type(hidden) is int and heads > 0 and hidden > 0):
            return data  # reported by the fields themselves
        derived = dict(data)
        if not data.get("head_size"):
            derived["head_size"] = latent_head_size(data.get("mla")) or even_head_size(heads, hidden)
        derived["num_kv_heads"] = data.get("num_kv_heads") or heads
        return derived

    @field_validator("layers", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        """Turn a JSON list into a tuple."""
        return tuple(value) if isinstance(value, list) else value

    @field_validator("head_size", mode="before")
    @classmethod
    def _report_uneven_heads(cls, value: Any) -> Any:
        """Report heads that do not divide the width, together with the mistakes of other fields."""
        if isinstance(value, UnevenHeads):
            raise ValueError(str(value))  # noqa: TRY004 - pydantic reports ValueError
        return value

    def _mistakes(self) -> Iterator[str]:
        if self.num_heads % self.num_kv_heads:
            yield (
                f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                "each key-value head serves the same number of query heads"
            )
        if self.mla and self.head_size != self.mla.nope_head_size + self.mla.rope_head_size:
            yield f"head_size: {self.head_size} is not nope_head_size + rope_head_size of mla"
        if self.mla and (self.attention_bias or self.qkv_bias or self.qk_norm != "none"):
            yield "mla: latent attention has no attention_bias, qkv_bias or qk_norm"
        if self.moe and self.num_layers - self.moe.num_dense_layers < self.moe.layer_frequency:
            yield (
                f"moe: of {self.num_layers} layers none has experts with num_dense_layers "
                f"{self.moe.num_dense_layers} and layer_frequency {self.moe.layer_frequency}"
            )
        num = sum(kind.num_layers for kind in self.layers)
        if num > self.num_layers:
            yield f"layers: {num} layers of other kinds are more than num_layers {self.num_layers}"
        if (self.num_layers - num) % self.shared_by:
            yield f"shared_by: {self.shared_by} does not divide num_layers {self.num_layers - num}"
        yield from self._mistakes_of_kind()

    def _mistakes_of_kind(self) -> Iterator[str]:
        if self.kind != "encoder-decoder" and self.num_encoder_layers:
            yield f"num_encoder_layers: this is of an encoder-decoder, and kind is {self.kind}"
        if self.kind == "encoder-decoder" and not 0 < self.num_encoder_layers < self.num_layers:
            yield (
                f"num_encoder_layers: must be 1 to {self.num_layers - 1}: num_layers {self.num_layers} counts the "
                "layers of encoder and decoder together"
            )
        if self.kind != "decoder" and (self.moe or self.mla or self.mtp_layers):
            yield f"kind: moe, mla and mtp_layers are of decoders, not of an {self.kind}"
        if self.kind == "decoder" and (self.patches or self.pooler or self.num_token_types or not self.output_head):
            yield "kind: a decoder has an output_head, and no patches, pooler or num_token_types"
        if self.kind != "decoder" and self.vision:
            yield f"vision: a tower stands in front of a decoder, and kind is {self.kind}"
        if self.position == "relative" and self.kind != "encoder-decoder":
            yield f"position: relative is of encoder-decoders, and kind is {self.kind}"

    def kinds(self) -> tuple[tuple[int, ModelSpec], ...]:
        """The kinds of layers, each as a pair: how many, and the model as if all layers were of this kind."""
        return _kinds(self)

    def __hash__(self) -> int:
        """A hash of few fields, because formulas look up what they know of a model thousands of times."""
        return hash((self.name, self.num_layers, self.hidden_size, self.ffn_hidden_size, self.num_heads))

    def layer_has_experts(self, number: Any) -> Any:
        """Whether layer `number` (from 0; or an array of numbers) has experts: each n-th after the dense layers."""
        if self.moe is None:
            return number < 0  # none has
        behind = number - self.moe.num_dense_layers + 1
        return (behind > 0) & (behind % self.moe.layer_frequency == 0)

    def layer_is_global(self, number: Any) -> Any:
        """Whether layer `number` (from 0; or an array of numbers) attends to all tokens instead of a window."""
        if not self.sliding_window:
            return number >= 0  # all do
        return (number + 1) % self.global_every == 0 if self.global_every else number < 0

    def window_of_layer(self, number: int) -> int:
        """Attention window of layer `number` (from 0) in tokens; 0 means that a token attends to all earlier tokens."""
        return 0 if self.layer_is_global(number) else self.sliding_window

    def _has_further_blocks(self) -> bool:
        """Whether a layer, or an end of the model, has blocks that exist only in the model type's own code."""
        gated = any(model.attention_gate != "none" or not model.attends for _, model in self.kinds())
        odd = self.norm == "unweighted" or (self.norm == "layernorm" and not self.norm_bias)
        odd |= self.norms_per_layer not in (1, 2, 4) or bool(
            self.moe and self.moe.vector_params + self.moe.idle_params + self.moe.latent_size
        )
        odd |= self.shared_by > 1
        return odd or gated or bool(self.layers) or any(getattr(self, name) for name in _FURTHER)

    def written(self) -> dict[str, Any]:
        """The shortest document of this model, without defaults and without values that `architecture` implies."""
        given = self.model_dump(mode="json", exclude_defaults=True)
        implied = ARCHITECTURES[self.architecture]
        found = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in implied:
                if value != implied[name]:
                    found[name] = value
            elif name in given:
                found[name] = given[name]
        if self.num_kv_heads == self.num_heads:
            found.pop("num_kv_heads", None)
        if self.head_size == (latent_head_size(self.mla) or self.hidden_size / self.num_heads):
            found.pop("head_size", None)
        if self.vision:
            found["vision"] = {**found["vision"], "encoder": self.vision.encoder.written()}
        return found

    @property
    def features(self) -> tuple[str, ...]:
        """Features beyond the plain GPT and Llama blocks; an engine must list all of them to run the model."""
        used = {
            "encoder": self.kind != "decoder",
            "cross_attention": self.kind == "encoder-decoder",
            "moe": self.moe is not None,
            "mla": self.mla is not None,
            "mtp": self.mtp_layers > 0,
            "parallel_attention": self.parallel_attention,
            "norms": self.norms_per_layer != 2 or self.embedding_norm or not self.final_norm,
            "qk_norm": self.qk_norm != "none",
            "qkv_bias": self.qkv_bias and not self.attention_bias,
            "sliding_window": self.sliding_window > 0,
            "sinks": self.attention_sinks,
            "alibi": self.position == "alibi",
            "state": any(model.mixer is not None for _, model in self.kinds()),
            "sparse_attention": any(model.sparse is not None for _, model in self.kinds()),
            "further_blocks": self._has_further_blocks(),
            "vision": self.vision is not None,
        }
        return tuple(name for name, is_used in used.items() if is_used)


_FURTHER: tuple[str, ...] = (
    *("value_head_size", "keys_are_values", "shares_keys", "embedding_size", "head_input_size", "head_bias"),
    *("layer_matrix_params", "layer_vector_params", "table_params", "input_matrix_params", "output_matrix_params"),
    "cross_attention",
)


@lru_cache(maxsize=64)
def _kinds(model: ModelSpec) -> tuple[tuple[int, ModelSpec], ...]:
    if not model.layers:
        return ((model.num_layers, model),)
    plain = model.num_layers - sum(kind.num_layers for kind in model.layers)
    others = [(kind.num_layers, kind.applied(model)) for kind in model.layers]
    return tuple(([(plain, model.model_copy(update={"layers": ()}))] if plain else []) + others)
