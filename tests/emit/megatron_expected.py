"""What Megatron-LM must understand of a plan, written by hand from its documentation, and not from our tables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.plan import Plan


def expected(plan: Plan) -> dict[str, Any]:
    """Names and values of Megatron-LM's arguments, including arguments that must keep their defaults."""
    return {**_model(plan), **_layout(plan), **_training(plan)}


def _model(plan: Plan) -> dict[str, Any]:
    model, moe, mla = plan.model, plan.model.moe, plan.model.mla
    dense = [not model.layer_has_experts(layer) for layer in range(model.num_layers)]
    biased = model.attention_bias
    longest = max(model.max_sequence_length, plan.training.sequence_length)
    window = model.sliding_window if model.global_every != 1 else 0
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_heads,
        "kv_channels": None if mla else model.head_size,
        "group_query_attention": not mla and model.num_kv_heads < model.num_heads,
        "num_query_groups": model.num_kv_heads if not mla and model.num_kv_heads < model.num_heads else 1,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": longest + model.extra_positions,
        "position_embedding_type": {"learned": "learned_absolute", "rope": "rope"}[model.position],
        "rotary_base": int(model.rope_theta) if model.position == "rope" else 10000,
        "rope_type": "rope" if mla else None,
        "use_rope_scaling": model.rope_scaling is not None,
        "rope_scaling_factor": model.rope_scaling.factor if model.rope_scaling else 8.0,
        "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[model.norm],
        "layernorm_epsilon": model.norm_epsilon,
        "swiglu": model.activation == "swiglu",
        "add_bias_linear": biased,
        "add_qkv_bias": model.qkv_bias and not biased,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "qk_layernorm": model.qk_norm == "head" or mla is not None,
        "softmax_type": "learnable" if model.attention_sinks else "vanilla",
        "window_size": [window, 0] if window else None,
        "window_attn_skip_freq": (model.global_every or None) if window else None,
        "mtp_num_layers": model.mtp_layers or None,
        "num_experts": moe.num_experts if moe else None,
        "moe_router_topk": moe.experts_per_token if moe else 2,
        "moe_ffn_hidden_size": moe.ffn_hidden_size if moe else None,
        "moe_shared_expert_intermediate_size": (moe.shared_ffn_hidden_size or None) if moe else None,
        "moe_shared_expert_gate": bool(moe and moe.shared_gate),
        "moe_layer_freq": 1 if not moe or not any(dense) else [int(not each) for each in dense],
        "moe_token_dispatcher_type": "alltoall" if moe else "allgather",
        "moe_grouped_gemm": moe is not None,
        "moe_router_num_groups": moe.num_groups if moe and moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.groups_per_token if moe and moe.num_groups > 1 else None,
        "moe_router_pre_softmax": bool(moe and moe.experts_per_token == 1),
        "multi_latent_attention": mla is not None,
        "q_lora_rank": (mla.q_lora_rank or None) if mla else None,
        "kv_lora_rank": mla.kv_lora_rank if mla else 32,
        "qk_head_dim": mla.nope_head_size if mla else 128,
        "qk_pos_emb_head_dim": mla.rope_head_size if mla else 64,
        "v_head_dim": mla.value_head_size if mla else 128,
    }  # fmt: skip


def _layout(plan: Plan) -> dict[str, Any]:
    layout, policy = plan.layout, plan.layout.recompute[0]
    letters = layout.pp > 1 and (len(set(layout.layers_per_stage)) > 1 or plan.model.mtp_layers)
    modules = None if policy in ("none", "selective") or policy.startswith("full") else policy.split("+")
    sharded = plan.engine.name == "megatron-fsdp"
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp == 1,
        "tp_comm_overlap": layout.sp == 1 and plan.engine.overlap.tensor_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "num_virtual_stages_per_pipeline_rank": layout.interleave if layout.interleave > 1 and not letters else None,
        "layers of chunks": list(layout.layers_per_stage) if letters else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp if plan.model.moe else None,
        "use_distributed_optimizer": sharded or layout.zero == 1,
        "use_megatron_fsdp": sharded,
        "data_parallel_sharding_strategy": {3: "optim_grads_params", 2: "optim_grads", 1: "optim", 0: "no_shard"}[
            layout.zero if sharded else 3
        ],
        "overlap_grad_reduce": True,
        "overlap_param_gather": layout.zero > 0,
        "num_distributed_optimizer_instances": layout.hsdp,
        "micro_batch_size": layout.mbs,
        "recompute_granularity": "full" if policy.startswith("full") else None if policy == "none" else "selective",
        "recompute_method": "block" if ":" in policy else "uniform" if policy == "full" else None,
        "recompute_num_layers": int(policy.partition(":")[2]) if ":" in policy else 1 if policy == "full" else None,
        "recompute_modules": modules,
        "optimizer_cpu_offload": layout.offload in ("optimizer", "both"),
        "cpu_offloading_num_layers": plan.model.num_layers - 1 if layout.offload in ("activations", "both") else 0,
    }


def _training(plan: Plan) -> dict[str, Any]:
    training, layout = plan.training, plan.layout
    recipe = "megatron-18" if training.memory_recipe == "engine" else training.memory_recipe
    moments = {"precision-aware-fp32": "bf16", "precision-aware": "bf16", "fp8-moments": "fp8"}.get(recipe, "fp32")
    half = training.precision == "fp16"
    graphs = {"none": "none", "layers": "transformer_engine", "step": "full_iteration"}[training.cuda_graphs]
    odd = plan.model.mla is not None or plan.model.attention_sinks
    discarded = {"layernorm", "moe_act"} & {*layout.recompute[0].split("+")}
    return {
        "global_batch_size": training.global_batch_size,
        "seq_length": training.sequence_length,
        "bf16": training.precision in ("bf16", "fp8", "fp4"),
        "fp16": half,
        "fp8": "hybrid" if training.precision == "fp8" else None,
        "fp4": "e2m1" if training.precision == "fp4" else None,
        "fp8_recipe": "tensorwise" if training.precision == "fp8" and discarded else "delayed",
        "fp8_param_gather": training.precision == "fp8" and layout.zero > 0,
        "optimizer": {"adamw": "adam", "sgd": "sgd", "muon": "muon"}[training.optimizer],
        "use_precision_aware_optimizer": moments != "fp32" or layout.offload in ("optimizer", "both"),
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
        "main_grads_dtype": "bf16" if recipe in ("precision-aware", "fp8-moments") else "fp32",
        "grad_reduce_in_bf16": recipe == "zero-16" and not half,
        "accumulate_allreduce_grads_in_fp32": half and recipe == "megatron-18",
        "attention_backend": "unfused" if training.attention == "unfused" else "auto" if odd else "flash",
        "cuda_graph_impl": graphs,
        "overlap_moe_expert_parallel_comm": training.expert_overlap,
        "attention_dropout": training.dropout,
        "hidden_dropout": training.dropout,
        "lr": training.learning_rate,
        "min_lr": round(training.learning_rate * training.min_learning_rate_ratio, 12),
        "lr_decay_style": "cosine",
        "lr_warmup_iters": min(training.warmup_steps, training.steps - 1),
        "lr_decay_iters": training.steps,
        "train_iters": training.steps,
        "eval_interval": training.steps,  # the program divides by it
        "weight_decay": training.weight_decay,
        "clip_grad": training.gradient_clip,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "adam_eps": training.adam_epsilon,
        "seed": training.seed,
    }


def chunks_in_letters(letters: str) -> list[int]:
    """Layers of each chunk of a text such as `Et*3|(t*4|)*7t*3mL`: first groups are written out, then letters."""
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        letters = re.sub(repeated, lambda match: match[1] * int(match[2]), letters)
    return [chunk.count("t") for chunk in letters.split("|")]


def differences(found: dict[str, Any], plan: Plan) -> list[str]:
    """Differences between Megatron-LM's arguments and the plan."""
    letters = found.get("pipeline_model_parallel_layout")
    understood = {**found, "layers of chunks": chunks_in_letters(letters) if letters else None}
    wrong = []
    for name, value in expected(plan).items():
        here = understood[name]
        here = getattr(here, "name", here)  # an enumeration
        here = list(here) if isinstance(here, tuple) and isinstance(value, list) else here
        if here != value:
            wrong.append(f"{name}: {here} in place of {value}")
    return wrong
