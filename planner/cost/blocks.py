"""Number of parameters in the blocks of a layer: norm, attention, feed-forward, experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.cost.mixers import mixer_shape

if TYPE_CHECKING:
    from planner.specs.model import LatentAttention, ModelSpec


def norm_params(model: ModelSpec) -> int:
    """Parameters of one norm: a weight, and for most LayerNorms a bias; 0 for norms without parameters.

    Source: definition of LayerNorm and RMSNorm; OLMo (arXiv 2402.00838), section 2.1, has norms without parameters.
    """
    if model.norm == "unweighted":
        return 0
    return model.hidden_size * (2 if model.norm == "layernorm" and model.norm_bias else 1)


def value_size(model: ModelSpec) -> int:
    """Size of a head's values: the size of its queries and keys, unless the model document gives another size.

    Source: definition of the model document; DeepSeek-V2 (2024), section 2.1, for latent attention.
    """
    return model.mla.value_head_size if model.mla else model.value_head_size or model.head_size


def projections(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Matrices of plain attention as (inputs, outputs), by name; matrices that the layer does not have are left out.

    Source: Ainslie et al., GQA (2023), section 2.2; definition of the model document.
    """
    h, keys, values = model.hidden_size, model.num_kv_heads * model.head_size, model.num_kv_heads * value_size(model)
    found = {"query": (h, model.num_heads * model.head_size)}
    found |= {} if model.shares_keys else {"key": (h, keys)}
    found |= {} if model.shares_keys or model.keys_are_values else {"value": (h, values)}
    return found | {"output": (output_width(model), h)}


def qkv_width(model: ModelSpec) -> int:
    """Width of queries, keys and values together: (a + g) d + g d_v.

    Source: Ainslie et al., GQA (2023), section 2.2.
    """
    return sum(outputs for name, (_, outputs) in projections(model).items() if name != "output")


def output_width(model: ModelSpec) -> int:
    """Width of attention's result, the input of its output projection: a d_v.

    Source: Vaswani et al. (2017), section 3.2.2.
    """
    return model.num_heads * value_size(model)


def gate_params(model: ModelSpec) -> int:
    """Parameters of the gate that scales the output of attention: h a by head, h a d_v by element.

    Source: Qiu et al., Gated Attention (arXiv 2505.06708), section 2.2.
    """
    if not model.attends or model.attention_gate == "none":
        return 0
    return model.hidden_size * (model.num_heads if model.attention_gate == "head" else output_width(model))


def indexer_matmul_params(model: ModelSpec) -> int:
    """Parameters of the indexer's matrices: queries of the light heads, one key for all heads, and each head's weight.

    Every tensor-parallel rank holds these matrices whole.

    Source: DeepSeek-V3.2 (2025), section 2.1; transformers, models/deepseek_v32 (Indexer).
    """
    if not model.sparse or model.sparse.shared or not model.attends:
        return 0
    read = model.mla.q_lora_rank if model.mla and model.mla.q_lora_rank else model.hidden_size
    queries = read * model.sparse.num_heads * model.sparse.head_size
    return queries + model.hidden_size * (model.sparse.head_size + model.sparse.num_heads)


def ffn_matrices(model: ModelSpec) -> int:
    """Number of matrices in a feed-forward block: 3 with a gate, else 2.

    Source: Shazeer (2020), GLU variants improve transformer.
    """
    return 3 if model.activation == "swiglu" else 2


def down_projection_params(model: ModelSpec, mla: LatentAttention) -> int:
    """Parameters of the down-projections to the latents of queries and of keys and values: h (r_q + r_kv + d_r).

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    return model.hidden_size * (mla.q_lora_rank + mla.kv_lora_rank + mla.rope_head_size)


def _latent_matmul_params(model: ModelSpec, mla: LatentAttention) -> int:
    """Parameters of the matrices of latent attention; if the query rank is 0, queries have no latent.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
    """
    queries = (mla.q_lora_rank or model.hidden_size) * model.num_heads * model.head_size
    keys_values = mla.kv_lora_rank * model.num_heads * (mla.nope_head_size + mla.value_head_size)
    output = model.num_heads * mla.value_head_size * model.hidden_size
    return down_projection_params(model, mla) + queries + keys_values + output


def attention_matmul_params(model: ModelSpec) -> int:
    """Parameters of the matrices that mix tokens in a layer: attention's h (a + 2g) d + a d h, a mixer's, or both.

    Latent attention has its own matrices. The sum includes the matrices of an output gate and of an indexer, and
    `layer_matrix_params` of the model.

    Source: Megatron-LM, megatron/training/theoretical_memory_usage.py; mixers.py.
    """
    found = mixer_shape(model).matmul_params + model.layer_matrix_params
    if not model.attends:
        return found
    found += gate_params(model) + indexer_matmul_params(model)
    if model.mla:
        return found + _latent_matmul_params(model, model.mla)
    return found + model.hidden_size * (qkv_width(model) + output_width(model))


def attention_norm_params(model: ModelSpec) -> int:
    """Parameters of the norms inside attention: of queries and keys (per head or over the whole width), or of latents.

    Source: Qwen3 (arXiv 2505.09388), section 2; OLMo 2 (arXiv 2501.00656), section 3; DeepSeek-V2, appendix C.
    """
    if not model.attends:
        return 0
    indexer = 2 * model.sparse.head_size if model.sparse and not model.sparse.shared else 0  # LayerNorm of its key
    if model.mla:
        return indexer + model.mla.q_lora_rank + model.mla.kv_lora_rank
    if model.qk_norm == "none":
        return indexer
    normed = [outputs for name, (_, outputs) in projections(model).items() if name in ("query", "key")]
    return indexer + (sum(normed) if model.qk_norm == "width" else model.head_size * len(normed))


def _attention_biases(model: ModelSpec) -> int:
    inner = qkv_width(model) if model.attention_bias or model.qkv_bias else 0
    return inner + (model.hidden_size if model.attention_bias else 0)


def attention_params(model: ModelSpec) -> int:
    """Parameters of one attention block: matrices, biases (a + 2g) d + h, inner norms, one sink for each head.

    Source: Megatron-LM, megatron/training/theoretical_memory_usage.py; transformers' modules for the rest.
    """
    found = attention_matmul_params(model) + mixer_shape(model).vectors + model.layer_vector_params
    if not model.attends:
        return found
    sinks = model.num_heads if model.attention_sinks else 0
    return found + _attention_biases(model) + attention_norm_params(model) + sinks


def _ffn_biases(model: ModelSpec, ffn_hidden_size: int) -> int:
    return (ffn_matrices(model) - 1) * ffn_hidden_size + model.hidden_size


def ffn_params(model: ModelSpec) -> int:
    """Weights and biases of one dense feed-forward block: 2 h f with GELU, 3 h f with SwiGLU.

    Source: Megatron-LM, megatron/training/theoretical_memory_usage.py.
    """
    weights = ffn_matrices(model) * model.hidden_size * model.ffn_hidden_size
    if not weights:
        return 0
    return weights + (_ffn_biases(model, model.ffn_hidden_size) if model.mlp_bias else 0)


def expert_input_width(model: ModelSpec) -> int:
    """Width of the inputs and outputs of routed experts: the model's width, or the width of a latent.

    Source: Nemotron 3 (NVIDIA, 2025), LatentMoE; transformers, models/nemotron_h.
    """
    return (model.moe.latent_size if model.moe else 0) or model.hidden_size


def latent_expert_params(model: ModelSpec) -> int:
    """Parameters of the matrices from the model's width to the latent of the experts and back; every rank holds them.

    Source: as `expert_input_width`.
    """
    return 2 * model.hidden_size * model.moe.latent_size if model.moe else 0


def expert_params(model: ModelSpec) -> int:
    """Weights and biases of one routed expert.

    Source: as `ffn_params`, with the expert's own width.
    """
    if not model.moe:
        return 0
    width = model.moe.ffn_hidden_size
    weights = ffn_matrices(model) * expert_input_width(model) * width
    return weights + (_ffn_biases(model, width) if model.moe.expert_bias else 0)


def expert_layer_params(model: ModelSpec) -> int:
    """Parameters of the routed experts of one MoE layer; 0 for a dense model; a mean if only some layers have experts.

    Source: Megatron-LM, megatron/training/theoretical_memory_usage.py: num_experts feed-forward blocks.
    """
    return model.moe.num_experts * expert_params(model) if model.moe else 0


def shared_matmul_params(model: ModelSpec) -> int:
    """Parameters of the matrices of the shared experts of one MoE layer.

    Source: DeepSeekMoE (arXiv 2401.06066), section 3.2.
    """
    return ffn_matrices(model) * model.hidden_size * model.moe.shared_ffn_hidden_size if model.moe else 0


def router_params(model: ModelSpec) -> int:
    """Parameters of the router: h E weights, E biases, h for the shared experts' gate, latent matrices, and vectors.

    Source: Megatron-LM, megatron/core/transformer/moe/router.py and shared_experts.py.
    """
    if not model.moe:
        return 0
    bias = model.moe.num_experts if model.moe.router_bias else 0
    further = model.moe.vector_params + model.moe.idle_params + latent_expert_params(model)
    return model.hidden_size * (model.moe.num_experts + int(model.moe.shared_gate)) + bias + further
