"""What a layer is: one list of its matrix products and vectors.

Parameters, a rank's share of them, FLOPs, seconds, the optimizer's matrices, adapters and the number of tensors are
sums over this list, and kept tensors take their widths from it. What lies between the products is named beside them:
`core_widths` for attention, `between` in mixers.py for a mixer, norms and residuals in `activations`. `transfers`
counts the collectives of a layer by its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from planner.cost.mixers import mixer_shape
from planner.once import once
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from planner.layout import LayerDegrees
    from planner.numbers import Number
    from planner.specs.blocks import LatentAttention, SparseAttention
    from planner.specs.model import ModelSpec

Cut = Literal["columns", "rows", "whole"]
"""What tensor parallelism divides: the outputs of a product, its inputs (the ranks' results are summed), or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of tokens with a matrix, or with several matrices that read the same input side by side.

    outputs: outputs of each matrix, by the name that adapters use.
    cut: what tensor parallelism divides; expert tensor parallelism divides routed experts in the same way.
    count: number of routed experts, which expert parallelism divides; 0 for other products.
    active: how many of them a token uses.
    reads: the tensor that the product multiplies; products that read the same tensor keep it once.
    biased: whether each output has a bias.
    modules: parts of a layer whose recompute repeats the product (`planner.specs.recompute.MODULES`).
    share: share of the layers that have the product.
    shared_by: number of layers that share the matrices.
    width: outputs of all matrices together.
    """

    inputs: int
    outputs: Mapping[str, float]
    cut: Cut = "columns"
    count: int = 0
    active: int = 1
    reads: str = "attention input"
    biased: bool = False
    modules: frozenset[str] = frozenset()
    share: float = 1.0
    shared_by: int = 1
    width: float = field(init=False)

    def __post_init__(self) -> None:
        """Add up the outputs."""
        object.__setattr__(self, "width", sum(self.outputs.values()))

    @property
    def ends_block(self) -> bool:
        """Whether the product is the last of a feed-forward block or of experts."""
        return self.reads.endswith(" inner")

    @property
    def params_of_token(self) -> float:
        """Parameters that a token of the mean layer is multiplied by."""
        return self.share * self.active * self.inputs * self.width

    @property
    def num_held(self) -> float:
        """Products of this shape whose matrices the mean layer holds."""
        return self.share / self.shared_by * (self.count or 1)

    def held(self, layout: LayerDegrees) -> Number:
        """Elements of the matrices on one rank, of the mean layer."""
        inputs, outputs = self.sides(layout)
        return self.num_held * inputs * outputs / (layout.ep if self.count else 1)

    def sides(self, layout: LayerDegrees, outputs: float | None = None) -> tuple[Number, Number]:
        """Inputs and outputs on one rank: of the whole product, or of one of its matrices."""
        t, width = layout.etp if self.count else layout.tp, self.width if outputs is None else outputs
        return self.inputs / t if self.cut == "rows" else self.inputs, width / t if self.cut == "columns" else width


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """Parameters of a layer that are in no matrix: norms, convolutions, decays.

    cut: whether tensor parallelism divides them.
    idle: whether a token does not use them.
    share, shared_by: as in `Product`.
    """

    size: int
    cut: bool = False
    idle: bool = False
    share: float = 1.0
    shared_by: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The operators of a layer that have parameters."""

    products: tuple[Product, ...]
    vectors: tuple[Vectors, ...]

    def width(self, name: str) -> float:
        """Outputs of the first matrix of this name; 0 if the layer has none."""
        return next((each.outputs[name] for each in self.products if name in each.outputs), 0)


@lru_cache(maxsize=512)  # each count of each candidate asks for it
def layer_of(model: ModelSpec, *, experts: bool) -> Layer:
    """The operators of a layer with experts, or of a layer with an ordinary feed-forward block.

    For a model with several kinds of layers the list has the operators of all kinds, each with its share of the layers.
    In an encoder-decoder each operator of cross-attention has the decoder's share.

    Source: the functions below, and mixers.py.
    """
    products, vectors = list[Product](), list[Vectors]()
    for num, kind in model.kinds():
        for each in _operators(kind, experts=experts):
            own = replace(each, share=each.share * (num / model.num_layers), shared_by=kind.shared_by)
            products.append(own) if isinstance(own, Product) else vectors.append(own)
    return Layer(products=tuple(products), vectors=tuple(vectors))


def share_with_experts(model: ModelSpec) -> float:
    """Share of the kinds of layers that have experts: 1 for a mixture whose layers are of one kind.

    Source: definition of the model document.
    """
    return sum_of(each.share for each in layer_of(model, experts=True).products if "router" in each.outputs)


def num_blocks(model: ModelSpec) -> int:
    """Blocks of a layer, for a model whose layers are of one kind: one that mixes tokens, and a feed-forward block.

    A block ends in the products whose results the tensor-parallel ranks add up; products side by side end one block.

    Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """
    layer = layer_of(model, experts=model.moe is not None)
    return len({each.ends_block for each in layer.products if each.cut == "rows"})


def _operators(model: ModelSpec, *, experts: bool) -> Iterator[Product | Vectors]:
    """The operators of a layer, for a model whose layers are of one kind."""
    shape, h = mixer_shape(model), model.hidden_size
    for number, (inputs, outputs) in enumerate(shape.maps, start=1):
        yield Product(
            inputs=inputs,
            outputs=outputs,
            cut="rows" if number == len(shape.maps) else "columns",
            reads="attention input" if number == 1 else "mixer",
        )
    yield from (Product(inputs=inputs, outputs=outputs, cut="whole") for inputs, outputs in shape.whole)
    yield Vectors(size=shape.vectors, cut=True)
    yield Vectors(size=model.norms_per_layer * norm_params(model) + model.layer_vector_params)
    if model.layer_matrix_params:
        yield Product(inputs=h, outputs={"further": model.layer_matrix_params / h}, cut="whole")
    if model.attends:
        yield from _attention(model)
        if share := cross_attention_share(model):
            yield from (replace(each, share=share) for each in _cross_attention(model))
    yield from _experts(model) if experts and model.moe else _feed_forward(model)


def norm_params(model: ModelSpec) -> int:
    """Parameters of one norm: a weight, and for most LayerNorms a bias; 0 for norms without parameters.

    Source: definition of LayerNorm and RMSNorm; OLMo (arXiv 2402.00838), section 2.1, has norms without parameters.
    """
    if model.norm == "unweighted":
        return 0
    return model.hidden_size * (2 if model.norm == "layernorm" and model.norm_bias else 1)


@once
def cross_attention_share(model: ModelSpec) -> float:
    """Share of the layers that also attend to an encoder: the decoder's share in an encoder-decoder.

    An encoder-decoder runs on one stage, and each of its layers is priced as the mean of all its layers.

    Source: definition of the model document.
    """
    if model.kind == "encoder-decoder":
        return 1.0 - model.num_encoder_layers / model.num_layers
    return float(model.cross_attention)


# --- attention --------------------------------------------------------------------------------------------------


@once
def value_size(model: ModelSpec) -> int:
    """Size of a head's values: the size of its queries and keys, unless the model document gives another size.

    Source: definition of the model document; DeepSeek-V2 (2024), section 2.1, for latent attention.
    """
    return model.mla.value_head_size if model.mla else model.value_head_size or model.head_size


def output_width(model: ModelSpec) -> int:
    """Width of attention's result, the input of its output projection: a d_v.

    Source: Vaswani et al. (2017), section 3.2.2.
    """
    return model.num_heads * value_size(model)


@once
def core_widths(model: ModelSpec, tp: Number) -> tuple[int, Number, Number]:
    """Widths of the queries, keys and values that the core of attention reads, of all tensor-parallel ranks together.

    Every rank has at least one key-value head.

    Source: Megatron-LM, transformer/attention.py (num_query_groups_per_partition); DeepSeek-V2 (2024), section 2.1.
    """
    shared = np.maximum(model.num_kv_heads, tp) if model.mla is None else model.num_heads
    return model.num_heads * model.head_size, shared * model.head_size, shared * value_size(model)


def _attention(model: ModelSpec) -> Iterator[Product | Vectors]:
    """Projections of attention: plain or from latents, with its gate, its indexer, its sinks and inner norms.

    Every rank holds projections to latents, and the indexer, whole. Norms of queries and keys are per head or over the
    whole width.

    Source: Ainslie et al., GQA (2023), section 2.2; Qiu et al., Gated Attention (2025), section 2.2; Qwen3 (2025),
    section 2; OLMo 2 (arXiv 2501.00656), section 3; transformers' modules for biases and sinks.
    """
    h, heads = model.hidden_size, model.num_heads
    yield from _latents(model, model.mla) if model.mla else _projections(model)
    yield Product(
        inputs=output_width(model),
        outputs={"output": h},
        cut="rows",
        reads="attention output",
        biased=model.attention_bias,
    )
    if model.attention_gate != "none":
        yield Product(
            inputs=h, outputs={"attention_gate": heads if model.attention_gate == "head" else output_width(model)}
        )
    if model.sparse and not model.sparse.shared:
        yield from _indexer(model, model.sparse)
    if model.attention_sinks:
        yield Vectors(size=heads, cut=True)
    if model.qk_norm != "none" and model.mla is None:
        own = (model.head_size,) * 2 if model.qk_norm == "head" else core_widths(model, 1)
        yield Vectors(size=int(sum(own[: 1 if model.shares_keys else 2])))


def _projections(model: ModelSpec) -> Iterator[Product]:
    """Queries, keys and values; a layer may take the values from the keys, or both from an earlier layer."""
    outputs = dict(zip(("query", "key", "value"), map(int, core_widths(model, 1)), strict=True))
    for name in ("key", "value") if model.shares_keys else ("value",) if model.keys_are_values else ():
        del outputs[name]
    yield Product(inputs=model.hidden_size, outputs=outputs, biased=model.attention_bias or model.qkv_bias)


def _latents(model: ModelSpec, mla: LatentAttention) -> Iterator[Product | Vectors]:
    """Queries from a latent or from the hidden state, and keys and values from a latent, with the latents' norms.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
    """
    h, heads, rank, again = model.hidden_size, model.num_heads, mla.q_lora_rank, frozenset(("mla_up_proj",))
    down = {"key_value_down": mla.kv_lora_rank + mla.rope_head_size}
    up = {"key_value_up": heads * (mla.nope_head_size + mla.value_head_size)}
    query = {"query_up" if rank else "query": heads * (mla.nope_head_size + mla.rope_head_size)}
    yield Product(inputs=h, outputs=down, cut="whole", biased=model.attention_bias)
    yield Product(inputs=mla.kv_lora_rank, outputs=up, reads="latents", modules=again)
    yield Product(inputs=rank or h, outputs=query, reads="latents" if rank else "attention input", modules=again)
    if rank:
        yield Product(inputs=h, outputs={"query_down": rank}, cut="whole", biased=model.attention_bias)
    yield Vectors(size=rank + mla.kv_lora_rank)


def _indexer(model: ModelSpec, sparse: SparseAttention) -> Iterator[Product | Vectors]:
    """Queries of the light heads, one key for all heads with a LayerNorm, and each head's weight.

    Source: DeepSeek-V3.2 (2025), section 2.1; transformers, models/deepseek_v32 (Indexer).
    """
    h, read = model.hidden_size, (model.mla.q_lora_rank if model.mla else 0) or model.hidden_size
    yield Product(inputs=read, outputs={"index_query": sparse.num_heads * sparse.head_size}, cut="whole")
    yield Product(inputs=h, outputs={"index_key": sparse.head_size, "index_weights": sparse.num_heads}, cut="whole")
    yield Vectors(size=2 * sparse.head_size)


def _cross_attention(model: ModelSpec) -> Iterator[Product | Vectors]:
    """Attention whose keys and values come from an encoder's output, and its norm.

    Source: Raffel et al., T5 (2020), section 2.1.
    """
    for each in _attention(model):
        if isinstance(each, Product) and "query" in each.outputs:
            yield replace(each, outputs={"query": each.outputs["query"]})
            yield replace(each, outputs={name: each.outputs[name] for name in each.outputs if name != "query"})
        else:
            yield each
    yield Vectors(size=norm_params(model) + model.layer_vector_params)  # biases of the second attention, too


# --- feed-forward blocks ----------------------------------------------------------------------------------------


def _feed_forward(model: ModelSpec) -> Iterator[Product]:
    """The dense feed-forward block; some layers have none."""
    if model.ffn_hidden_size:
        reads = "attention input" if model.norms_per_layer == 1 else "feed-forward input"
        own = Product(inputs=model.hidden_size, outputs={}, reads=reads, modules=frozenset(("mlp",)))
        yield from _block(model, replace(own, biased=model.mlp_bias), model.ffn_hidden_size, "feed-forward inner")


def _block(model: ModelSpec, into: Product, inner: int, name: str, prefix: str = "") -> Iterator[Product]:
    """Two products with an activation function between them: 2 h f with GELU, 3 h f with SwiGLU.

    into: the first product, without its matrices.
    name: the tensor between the products.
    prefix: of the names of the matrices.

    Source: Shazeer (2020), GLU variants improve transformer.
    """
    names = ("gate", "up") if model.activation == "swiglu" else ("up",)
    yield replace(into, outputs={prefix + each: inner for each in names})
    yield replace(into, inputs=inner, outputs={f"{prefix}down": into.inputs}, cut="rows", reads=name)


def _experts(model: ModelSpec) -> Iterator[Product | Vectors]:
    """Router, routed experts with a latent around them, and shared experts with their gate; every rank has the router.

    Source: Megatron-LM, megatron/core/transformer/moe (router.py, experts.py, shared_experts.py); DeepSeekMoE (2024),
    section 3.2; Nemotron 3 (NVIDIA, 2025) for the latent.
    """
    moe = model.moe
    assert moe is not None
    own = Product(inputs=model.hidden_size, outputs={}, reads="feed-forward input", modules=frozenset(("moe",)))
    wide = replace(own, inputs=moe.latent_size or own.inputs)
    routed = replace(wide, reads="expert input", count=moe.num_experts, active=moe.experts_per_token)
    yield replace(own, outputs={"router": moe.num_experts}, cut="whole")
    yield from _block(model, replace(routed, biased=moe.expert_bias), moe.ffn_hidden_size, "expert inner", "expert_")
    if moe.latent_size:
        yield replace(own, outputs={"latent_down": wide.inputs}, cut="whole")
        yield replace(wide, outputs={"latent_up": own.inputs}, reads="expert output", cut="whole")
    if moe.shared_ffn_hidden_size:
        shared = replace(own, modules=frozenset(("moe", "shared_experts")))
        yield from _block(model, shared, moe.shared_ffn_hidden_size, "shared expert inner")
    if moe.shared_gate:
        yield replace(own, outputs={"shared_gate": 1}, cut="whole")
    yield Vectors(size=moe.vector_params + (moe.num_experts if moe.router_bias else 0))
    yield Vectors(size=moe.idle_params, idle=True)
