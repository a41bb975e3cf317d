"""Number of parameters of a model, and of the part that one device holds.

A model is a stack of equal layers, with these exceptions: dense layers may precede the layers with experts, an
encoder's layers precede the decoder's layers, which also have cross-attention, and hybrid models have several kinds of
layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.operators import layer_of, norm_params
from planner.layout import head_stage
from planner.once import once
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.layout import Degrees, LayerDegrees
    from planner.numbers import Number
    from planner.specs.engine import EngineSpec
    from planner.specs.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParams:
    """Parameters on one device of a stage, before ZeRO: common parameters, and routed experts.

    The two differ in their replicas: common parameters have dp * cp replicas, experts dp * cp * tp / (ep * etp).
    """

    common: Number
    experts: Number

    @property
    def total(self) -> Number:
        """Common parameters and routed experts together."""
        return self.common + self.experts

    def __add__(self, other: HeldParams) -> HeldParams:
        """The parameters of two parts of a stage."""
        return HeldParams(common=self.common + other.common, experts=self.experts + other.experts)

    def __mul__(self, times: Number) -> HeldParams:
        """The parameters of several equal layers."""
        return HeldParams(common=self.common * times, experts=self.experts * times)


def layer_params(model: ModelSpec, *, experts: bool) -> float:
    """Parameters of one layer, all routed experts included; for several kinds of layers the mean.

    Weights that layers share are divided by the number of layers.

    Source: as `layer_params_on_device`, on one device.
    """
    cut, whole, routed = _held(model, experts=experts)
    return cut + whole + routed


@lru_cache(maxsize=512)
def _held(model: ModelSpec, *, experts: bool) -> tuple[float, float, float]:
    """Parameters of a layer that tensor parallelism divides, that every rank holds whole, and of routed experts.

    A bias of a product that is cut along its inputs is whole, except in experts.
    """
    layer, cut, whole, routed = layer_of(model, experts=experts), 0.0, 0.0, 0.0
    for each in layer.products:
        weights, biases = (each.num_held * each.width * size for size in (each.inputs, each.biased))
        if each.count:
            routed += weights + biases
        elif each.cut == "whole":
            whole += weights + biases
        else:
            cut += weights + (biases if each.cut == "columns" else 0)
            whole += biases if each.cut == "rows" else 0
    for vectors in layer.vectors:
        size = vectors.share / vectors.shared_by * vectors.size
        cut, whole = cut + size * vectors.cut, whole + size * (not vectors.cut)
    return cut, whole, routed


@once
def layer_params_on_device(model: ModelSpec, layout: LayerDegrees, *, experts: bool) -> HeldParams:
    """Parameters of one layer on one device; for several kinds of layers, and for an encoder-decoder, the mean.

    tp divides column-parallel weights and biases and row-parallel weights, and ep * etp divides routed experts. Every
    rank holds the other parameters whole (row-parallel biases, norms, down-projections, router).

    Source: Shoeybi et al., Megatron-LM (2019), section 3; Megatron-LM, megatron/core/transformer/moe/experts.py.
    """
    cut, whole, routed = _held(model, experts=experts)
    return HeldParams(common=cut / layout.tp + whole, experts=routed / (layout.ep * layout.etp))


@once
def num_moe_layers(model: ModelSpec) -> int:
    """Number of layers with experts: every layer_frequency-th layer after the leading dense layers.

    Source: definition; DeepSeek-V2 (first_k_dense_replace), Llama 4 (interleave_moe_layer_step).
    """
    return (model.num_layers - model.moe.num_dense_layers) // model.moe.layer_frequency if model.moe else 0


def _all_layer_params(model: ModelSpec) -> int:
    """Parameters of all layers; experts are spread evenly over the kinds of layers."""
    num = num_moe_layers(model)
    return round(
        num * layer_params(model, experts=True) + (model.num_layers - num) * layer_params(model, experts=False)
    )


@once
def _embedding_width(model: ModelSpec) -> int:
    return model.embedding_size or model.hidden_size


def head_width(model: ModelSpec) -> int:
    """Width of the output head's input: the width of the model, except in a few models (ELECTRA, RemBERT).

    Source: definition of the model document.
    """
    return model.head_input_size or _embedding_width(model)


def num_outputs(model: ModelSpec) -> int:
    """Outputs of the head for a token: the vocabulary, or what a head of another kind has.

    Source: definition of the model document.
    """
    return model.head_outputs or model.vocab_size


def _num_stacks(model: ModelSpec) -> int:
    return 2 if model.kind == "encoder-decoder" else 1


def _position_params(model: ModelSpec) -> int:
    """Parameters of tables of positions: one row per position, or T5's buckets for each head and stack."""
    if model.position == "learned":
        return (model.max_sequence_length + model.extra_positions) * _embedding_width(model)
    return _num_stacks(model) * model.relative_buckets * model.num_heads if model.position == "relative" else 0


def _input_params(model: ModelSpec) -> int:
    """Parameters of the input without the token embedding: positions, token types, and the norm after them."""
    width = _embedding_width(model)
    types = model.num_token_types * width + model.table_params + model.input_matrix_params
    norm = norm_params(model) * width // model.hidden_size if model.embedding_norm else 0
    return _position_params(model) + types + norm


def _embedding_params(model: ModelSpec) -> int:
    """Parameters of the token embedding V h, or of the projection of patches with its bias and the class token.

    Source: Dosovitskiy et al., ViT (2021), equation 1.
    """
    if model.patches is None:
        return model.vocab_size * _embedding_width(model)
    return model.hidden_size * (_patch_pixels(model) + model.patches.bias + model.patches.class_tokens)


def _patch_pixels(model: ModelSpec) -> int:
    patches = model.patches
    return patches.num_channels * patches.num_frames * patches.patch_size**2 if patches else 0


def _output_params(model: ModelSpec) -> int:
    """Parameters of final norms, BERT's pooler, the head's bias and matrices before the head, but not the head."""
    norms = _num_stacks(model) * norm_params(model) if model.final_norm else 0
    pooler = model.hidden_size * (model.hidden_size + 1) if model.pooler else 0
    bias = model.vocab_size if model.head_bias else 0
    return norms + pooler + bias + model.output_matrix_params


def _has_own_head(model: ModelSpec) -> bool:
    return model.output_head and (model.patches is not None or not model.tied_embeddings)


def num_params(model: ModelSpec) -> int:
    """Parameters of the whole model without `mtp_params`; tied weights count once, and the vocabulary is not padded.

    Source: sum of the parts; checked against transformers' modules in the tests. For a GPT it equals 12 L h^2 (1 +
    13/(12h) + (V + s)/(12Lh)) plus the final norm, Narayanan et al. (SC 2021), equation 2.
    """
    head = num_outputs(model) * head_width(model) if _has_own_head(model) else 0
    ends = _embedding_params(model) + _input_params(model) + _output_params(model) + head
    return ends + _all_layer_params(model) + vision_params(model)


def vision_params(model: ModelSpec) -> int:
    """Parameters of the tower that reads images and of its projector; 0 without one.

    Source: definition of the model document.
    """
    return num_params(model.vision.encoder) + model.vision.projector_params if model.vision else 0


def num_active_params(model: ModelSpec) -> int:
    """Parameters that one token uses: `num_params` without the routed experts that the router does not choose.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 4.2, counts the same parameters, embedding and head included.
    """
    layer = layer_of(model, experts=True)
    routed = (each for each in layer.products if each.count)
    idle = [
        (each.count - each.active) * (each.inputs + each.biased) * each.width * each.share / each.shared_by
        for each in routed
    ] + [each.size * each.share / each.shared_by for each in layer.vectors if each.idle]
    return num_params(model) - round(num_moe_layers(model) * sum_of(idle))


def mtp_params(model: ModelSpec) -> int:
    """Parameters of the layers for multi-token prediction: each has a projection 2h h, three norms and one layer.

    These layers use the embedding and head of the model.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; its checkpoint's README_WEIGHTS.md counts 11.5 billion.
    """
    return model.mtp_layers * (round(layer_params(model.kinds()[0][1], experts=True)) + _mtp_extra_params(model))


def _mtp_extra_params(model: ModelSpec) -> int:
    return 2 * model.hidden_size**2 + 3 * norm_params(model)


@lru_cache(maxsize=512)
def layer_matmul_params(model: ModelSpec, *, experts: bool) -> float:
    """Parameters in the matrix products of one token in one layer, with an ordinary feed-forward block or with experts.

    For several kinds of layers, and for an encoder-decoder, the result is the mean.

    Source: as `num_matmul_params`.
    """
    return sum_of(each.params_of_token for each in layer_of(model, experts=experts).products)


def num_matmul_params(model: ModelSpec) -> int:
    """Parameters in the matrix products of one token: all weight matrices and the output head.

    Of the routed experts, only those that the router chooses are counted. Layers for multi-token prediction are
    counted, each with a head.

    Source: Chowdhery et al., PaLM (2022), appendix B: embeddings and biases do no matrix product.
    """
    dense, typical = (layer_matmul_params(model, experts=each) for each in (False, True))
    num_typical = num_moe_layers(model)
    layers = num_typical * typical + (model.num_layers - num_typical) * dense
    head = num_outputs(model) * head_width(model) if model.output_head else 0
    patches = _patch_pixels(model) * model.hidden_size
    ends = head + patches + model.input_matrix_params + model.output_matrix_params
    return round(layers + ends + model.mtp_layers * (typical + 2 * model.hidden_size**2 + head))


@once
def padded_vocab(model: ModelSpec, engine: EngineSpec, layout: LayerDegrees) -> Number:
    """Vocabulary rows of one tensor-parallel rank: V padded to a multiple of (engine's multiple * tp), over tp.

    Source: Megatron-LM, --make-vocab-size-divisible-by; torch DTensor pads to a multiple of tp.
    """
    return np.ceil(model.vocab_size / (engine.memory.vocab_multiple * layout.tp)) * engine.memory.vocab_multiple


@once
def outputs_on_device(model: ModelSpec, engine: EngineSpec, layout: LayerDegrees) -> Number:
    """Outputs of the head on one tensor-parallel rank: its rows of the vocabulary, or all of another head's outputs.

    Source: as `padded_vocab`; transformers' sequence classifiers have no tensor parallel plan for their head.
    """
    return model.head_outputs + 0 * layout.tp if model.head_outputs else padded_vocab(model, engine, layout)


def embedding_params_on_device(model: ModelSpec, engine: EngineSpec, layout: LayerDegrees) -> Number:
    """Parameters of the embedding on one tensor-parallel rank: its share of the (vocabulary x hidden) matrix.

    Every rank holds the whole projection of patches, and in some engines also a whole untied embedding.

    Source: Shoeybi et al., Megatron-LM (2019), section 3: the embedding is cut along the vocabulary.
    """
    if model.patches:
        return _embedding_params(model) + 0 * layout.tp
    copies = layout.tp if engine.memory.replicates_embedding and not model.tied_embeddings else 1
    return padded_vocab(model, engine, layout) * _embedding_width(model) * copies


@once
def head_params_on_device(model: ModelSpec, engine: EngineSpec, layout: LayerDegrees) -> Number:
    """Parameters of the output head on one tensor-parallel rank: its share of the (vocabulary x width) matrix.

    Source: as `outputs_on_device`.
    """
    return outputs_on_device(model, engine, layout) * head_width(model)


def matrices_of_layer(model: ModelSpec, layout: LayerDegrees, *, experts: bool) -> list[Number]:
    """Elements of the matrices of one layer on one rank; all experts of a layer are two.

    Source: as `matrices_in_order`.
    """
    return [
        each.num_held * inputs * size / (layout.ep if each.count else 1)
        for each in layer_of(model, experts=experts).products
        for width in ([None] if each.count else each.outputs.values())
        for inputs, size in [each.sides(layout, width)]
    ]


def matrices_in_order(model: ModelSpec, engine: EngineSpec, layout: LayerDegrees) -> list[Number]:
    """Elements of the matrices on one rank, in the order of transformers' modules; all experts of a layer are two.

    The projections of queries, keys and values are matrices of their own, also where a program packs them.

    Source: transformers 5.23, models/llama/modeling_llama.py and models/mixtral/modeling_mixtral.py.
    """
    of_layers = {kind: matrices_of_layer(model, layout, experts=kind) for kind in {False, model.moe is not None}}
    found = [embedding_params_on_device(model, engine, layout), _position_params(model) + 0 * layout.tp]
    for has_experts in model.layer_has_experts(np.arange(model.num_layers)):
        found += of_layers[bool(has_experts)]
    return [*found, head_params_on_device(model, engine, layout) * (_has_own_head(model) and model.output_head)]


@once
def end_params_on_device(
    model: ModelSpec, engine: EngineSpec, layout: Degrees, stage: Number, num_mtp: Number
) -> Number:
    """Parameters outside the layers on one device: embeddings on the first stage, norm and head on the last.

    Tied embeddings are one matrix if the pipeline has one stage, and two copies if it has several. Every
    tensor-parallel rank holds a learned table of positions whole, unless the engine divides it like the embedding. A
    stage with layers for multi-token prediction also holds the embedding, and their projections and norms; the layers
    themselves are counted with the other layers. Each rank of the first stage holds the whole vision tower.

    num_mtp: layers for multi-token prediction on the stage.

    Source: Megatron-LM, megatron/core/models/gpt/gpt_model.py (shared embedding of first and last stage) and
    megatron/core/transformer/multi_token_prediction.py.
    """
    embedding = embedding_params_on_device(model, engine, layout)
    first, last = np.equal(stage, 0), np.equal(stage, head_stage(layout))
    shared = (not _has_own_head(model)) & np.equal(layout.pp, 1)  # a V starts and ends on one stage, in two chunks
    own_head = last & ~(first & shared) & model.output_head
    matrix = head_params_on_device(model, engine, layout)
    cut = _position_params(model) * (1 - 1 / layout.tp) if engine.memory.shards_positions else 0
    held = (
        first * (embedding + _input_params(model) + vision_params(model) - cut)
        + own_head * matrix
        + last * _output_params(model)
    )
    if not model.mtp_layers:
        return held
    has_matrix = first | (last & model.tied_embeddings)
    again = np.greater(num_mtp, 0) & ~has_matrix
    return held + num_mtp * _mtp_extra_params(model) + again * matrix
