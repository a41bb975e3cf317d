"""Number of parameters of a model, and of the part that one device holds.

A model is a stack of equal layers, with these exceptions: dense layers may precede the layers with experts, an
encoder's layers precede the decoder's layers, which also have cross-attention, and hybrid models have several kinds of
layers. `layer_params` counts a layer of the most common kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from planner.cost.blocks import (
    attention_matmul_params,
    attention_norm_params,
    attention_params,
    down_projection_params,
    expert_input_width,
    expert_layer_params,
    expert_params,
    ffn_matrices,
    ffn_params,
    indexer_matmul_params,
    latent_expert_params,
    norm_params,
    router_params,
    shared_matmul_params,
)
from planner.cost.mixers import mixer_shape
from planner.layout import head_stage
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.layout import Degrees, LayerDegrees
    from planner.numbers import Number
    from planner.specs.engine import EngineSpec
    from planner.specs.model import ModelSpec


def _layer_without_ffn(model: ModelSpec) -> int:
    return attention_params(model) + model.norms_per_layer * norm_params(model)


def _layer(model: ModelSpec, *, experts: bool) -> int:
    """Parameters of one layer of a model whose layers are of one kind."""
    if not experts or model.moe is None:
        return _layer_without_ffn(model) + ffn_params(model)
    return _layer_without_ffn(model) + expert_layer_params(model) + shared_matmul_params(model) + router_params(model)


def dense_layer_params(model: ModelSpec) -> int:
    """Parameters of one layer with an ordinary feed-forward block: attention, feed-forward, norms.

    Source: sum of the parts above.
    """
    return _layer(model, experts=False)


def moe_layer_params(model: ModelSpec) -> int:
    """Parameters of one layer with experts: attention, all routed experts, shared experts, router, norms.

    Source: sum of the parts above.
    """
    return _layer(model, experts=True)


def cross_attention_share(model: ModelSpec) -> float:
    """Share of the layers that also attend to the encoder: the decoder's share in an encoder-decoder, else 0.

    An encoder-decoder runs on one stage, and each of its layers is priced as the mean of all its layers.

    Source: definition of the model document.
    """
    if model.kind == "encoder-decoder":
        return 1.0 - model.num_encoder_layers / model.num_layers
    return float(model.cross_attention)


def _cross_attention_params(model: ModelSpec) -> int:
    """Additional parameters of a decoder's layer compared with an encoder's: attention to the encoder, and its norm.

    Source: Raffel et al., T5 (2020), section 2.1.
    """
    return attention_params(model) + norm_params(model) if cross_attention_share(model) else 0


def layer_params(model: ModelSpec) -> int:
    """Parameters of one layer of the most common kind: with experts if the model has any, else dense.

    For an encoder-decoder this is a decoder's layer, with cross-attention.

    Source: sum of the parts above.
    """
    if model.moe:
        return moe_layer_params(model)
    return dense_layer_params(model) + _cross_attention_params(model)


def num_moe_layers(model: ModelSpec) -> int:
    """Number of layers with experts: every layer_frequency-th layer after the leading dense layers.

    Source: definition; DeepSeek-V2 (first_k_dense_replace), Llama 4 (interleave_moe_layer_step).
    """
    return (model.num_layers - model.moe.num_dense_layers) // model.moe.layer_frequency if model.moe else 0


def _all_layer_params(model: ModelSpec) -> int:
    """Parameters of all layers; experts are spread evenly over the kinds of layers."""
    if model.moe or model.layers or model.shared_by > 1:
        with_experts = num_moe_layers(model)
        dense = model.num_layers - with_experts
        layers = (
            num // kind.shared_by * (with_experts * _layer(kind, experts=True) + dense * _layer(kind, experts=False))
            for num, kind in model.kinds()
        )
        return sum(layers) // model.num_layers
    decoder_layers = model.num_layers - model.num_encoder_layers
    return model.num_layers * dense_layer_params(model) + decoder_layers * _cross_attention_params(model)


def _embedding_width(model: ModelSpec) -> int:
    return model.embedding_size or model.hidden_size


def head_width(model: ModelSpec) -> int:
    """Width of the output head's input: the width of the model, except in a few models (ELECTRA, RemBERT).

    Source: definition of the model document.
    """
    return model.head_input_size or _embedding_width(model)


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
    head = model.vocab_size * head_width(model) if _has_own_head(model) else 0
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
    if not model.moe:
        return num_params(model)
    idle = (model.moe.num_experts - model.moe.experts_per_token) * expert_params(model) + model.moe.idle_params
    with_experts = sum(num // kind.shared_by for num, kind in model.kinds() if kind.moe)
    return num_params(model) - num_moe_layers(model) * with_experts * idle // model.num_layers


def mtp_params(model: ModelSpec) -> int:
    """Parameters of the layers for multi-token prediction: each has a projection 2h h, three norms and one layer.

    These layers use the embedding and head of the model.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; its checkpoint's README_WEIGHTS.md counts 11.5 billion.
    """
    return model.mtp_layers * (layer_params(model.kinds()[0][1]) + _mtp_extra_params(model))


def _mtp_extra_params(model: ModelSpec) -> int:
    return 2 * model.hidden_size**2 + 3 * norm_params(model)


def layer_matmul_params(model: ModelSpec, *, experts: bool) -> int:
    """Parameters in the matrix products of one token in one layer, with an ordinary feed-forward block or with experts.

    Cross-attention is left out. For several kinds of layers the result is the mean.

    Source: as `num_matmul_params`.
    """
    if model.layers:
        kinds = [(num, layer_matmul_params(kind, experts=experts)) for num, kind in model.kinds()]
        return round(sum(num * params for num, params in kinds) / model.num_layers)
    attention = attention_matmul_params(model)
    matrices = ffn_matrices(model) * model.hidden_size
    if not experts or model.moe is None:
        return attention + matrices * model.ffn_hidden_size
    routed = model.moe.experts_per_token * model.moe.ffn_hidden_size * ffn_matrices(model) * expert_input_width(model)
    routed += latent_expert_params(model) + model.hidden_size * (model.moe.num_experts + int(model.moe.shared_gate))
    return attention + matrices * model.moe.shared_ffn_hidden_size + routed


def num_matmul_params(model: ModelSpec) -> int:
    """Parameters in the matrix products of one token: all weight matrices and the output head.

    Of the routed experts, only those that the router chooses are counted. Layers for multi-token prediction are
    counted, each with a head.

    Source: Chowdhery et al., PaLM (2022), appendix B: embeddings and biases do no matrix product.
    """
    typical = dense = layer_matmul_params(model, experts=False)
    if model.moe:
        typical = layer_matmul_params(model, experts=True)
    elif cross_attention_share(model):
        typical = dense + attention_matmul_params(model)
    num_typical = num_moe_layers(model) if model.moe else model.num_layers - model.num_encoder_layers
    layers = num_typical * typical + (model.num_layers - num_typical) * dense
    head = model.vocab_size * head_width(model) if model.output_head else 0
    patches = _patch_pixels(model) * model.hidden_size
    ends = head + patches + model.input_matrix_params + model.output_matrix_params
    return layers + ends + model.mtp_layers * (typical + 2 * model.hidden_size**2 + head)


def padded_vocab(model: ModelSpec, engine: EngineSpec, layout: LayerDegrees) -> Number:
    """Vocabulary rows of one tensor-parallel rank: V padded to a multiple of (engine's multiple * tp), over tp.

    Source: Megatron-LM, --make-vocab-size-divisible-by; torch DTensor pads to a multiple of tp.
    """
    return np.ceil(model.vocab_size / (engine.memory.vocab_multiple * layout.tp)) * engine.memory.vocab_multiple


def _whole_params(model: ModelSpec, *, experts: bool) -> int:
    """Parameters of one layer that every tensor-parallel rank holds whole.

    These are norms, row-parallel biases, latent attention's down-projections, the indexer, low-rank inputs of mixers,
    the router, and the parameters in `layer_vector_params`. `experts`: whether the layer has experts.

    Source: Megatron-LM: only column- and row-parallel weights are cut (transformer/moe/router.py and
    transformer/multi_latent_attention.py hold the others whole).
    """
    whole = model.norms_per_layer * norm_params(model) + attention_norm_params(model)
    whole += mixer_shape(model).whole_params + model.layer_matrix_params + model.layer_vector_params
    if model.attends:
        whole += model.hidden_size if model.attention_bias else 0
        whole += down_projection_params(model, model.mla) if model.mla else 0
        whole += indexer_matmul_params(model)
    if experts and model.moe:
        return whole + router_params(model)
    return whole + (model.hidden_size if model.mlp_bias and model.ffn_hidden_size else 0)


def dense_layer_params_on_device(model: ModelSpec, layout: LayerDegrees) -> Number:
    """Parameters of one dense layer on one tensor-parallel rank; for an encoder-decoder, of an encoder's layer.

    Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """
    if model.layers:
        kinds = ((num, dense_layer_params_on_device(kind, layout)) for num, kind in model.kinds())
        return sum_of(num / model.num_layers * params for num, params in kinds)
    whole = _whole_params(model, experts=False)
    return ((dense_layer_params(model) - whole) / layout.tp + whole) / model.shared_by


def expert_layer_params_on_device(model: ModelSpec, layout: LayerDegrees) -> Number:
    """Parameters of the routed experts of one MoE layer on one device: ep divides the experts, etp divides each expert.

    Source: Megatron-LM, megatron/core/transformer/moe/experts.py.
    """
    return expert_layer_params(model) / (getattr(layout, "ep", 1) * getattr(layout, "etp", 1))


def layer_params_on_device(model: ModelSpec, layout: LayerDegrees) -> Number:
    """Parameters of one layer (see `layer_params`) on one device; for an encoder-decoder, of its mean layer.

    tp divides column-parallel weights and biases and row-parallel weights, and ep * etp divides routed experts. Every
    rank holds the other parameters whole (row-parallel biases, norms, down-projections, router). For several kinds of
    layers the result is the mean.

    Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """
    if model.layers:
        kinds = ((num, layer_params_on_device(kind, layout)) for num, kind in model.kinds())
        return sum_of(num / model.num_layers * params for num, params in kinds)
    if model.moe:
        whole = _whole_params(model, experts=True)
        cut = moe_layer_params(model) - expert_layer_params(model) - whole
        return (cut / layout.tp + whole) / model.shared_by + expert_layer_params_on_device(model, layout)
    return dense_layer_params_on_device(model, layout) + _mean_cross_attention_on_device(model, layout)


def _mean_cross_attention_on_device(model: ModelSpec, layout: LayerDegrees) -> Number:
    """Parameters of the decoder's cross-attention on one device, averaged over the layers of encoder and decoder."""
    whole = norm_params(model) + (model.hidden_size if model.attention_bias else 0)
    return cross_attention_share(model) * ((_cross_attention_params(model) - whole) / layout.tp + whole)


def embedding_params_on_device(model: ModelSpec, engine: EngineSpec, layout: LayerDegrees) -> Number:
    """Parameters of the embedding on one tensor-parallel rank: its share of the (vocabulary x hidden) matrix.

    Every rank holds the whole projection of patches, and in some engines also a whole untied embedding.

    Source: Shoeybi et al., Megatron-LM (2019), section 3: the embedding is cut along the vocabulary.
    """
    if model.patches:
        return _embedding_params(model) + 0 * layout.tp
    copies = layout.tp if engine.memory.replicates_embedding and not model.tied_embeddings else 1
    return padded_vocab(model, engine, layout) * _embedding_width(model) * copies


def end_params_on_device(model: ModelSpec, engine: EngineSpec, layout: Degrees, stage: Number) -> Number:
    """Parameters outside the layers on one device: embeddings on the first stage, norm and head on the last.

    Tied embeddings are one matrix if the pipeline has one stage, and two copies if it has several. Every
    tensor-parallel rank holds a learned table of positions whole, unless the engine divides it like the embedding. With
    multi-token prediction the last stage also holds the embedding, and the projections and norms of the additional
    layers; the additional layers themselves are counted with the other layers. Each rank of the first stage holds the
    whole vision tower.

    Source: Megatron-LM, megatron/core/models/gpt/gpt_model.py (shared embedding of first and last stage) and
    megatron/core/transformer/multi_token_prediction.py.
    """
    embedding = embedding_params_on_device(model, engine, layout)
    first, last = np.equal(stage, 0), np.equal(stage, head_stage(layout))
    shared = (not _has_own_head(model)) & np.equal(layout.pp, 1)  # a V starts and ends on one stage, in two chunks
    own_head = last & ~(first & shared) & model.output_head
    matrix = padded_vocab(model, engine, layout) * head_width(model)
    cut = _position_params(model) * (1 - 1 / layout.tp) if engine.memory.shards_positions else 0
    held = (
        first * (embedding + _input_params(model) + vision_params(model) - cut)
        + own_head * matrix
        + last * _output_params(model)
    )
    if not model.mtp_layers:
        return held
    again = last & ~first & (not model.tied_embeddings)
    return held + last * model.mtp_layers * _mtp_extra_params(model) + again * matrix
