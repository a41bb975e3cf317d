"""What torchtitan must understand of a plan, written by hand from its documentation, and not from our tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.load import load_job

if TYPE_CHECKING:
    from planner.plan import Plan

NUMBERS = tuple(
    f"training.{each}"
    for each in (
        *("learning_rate=1e-4", "min_learning_rate_ratio=0.05", "warmup_steps=20", "steps=1000", "seed=7"),
        *("weight_decay=0.05", "gradient_clip=0.5", "adam_beta1=0.8", "adam_beta2=0.99", "adam_epsilon=1e-6"),
    )
)
CASES = (
    ("llama3-8b", "tp=2,pp=2,zero=1,sp=1,interleave=2,schedule=interleaved,mbs=2", NUMBERS),
    ("llama3-8b", "pp=2,zero=3,layers_per_stage=17/15,recompute=full", ("training.loss=whole",)),
    ("llama3-8b", "pp=2,zero=1,schedule=zbv,recompute=full", ()),
    ("llama3-8b", "pp=4,zero=1,schedule=gpipe", ("training.loss_chunks=4",)),
    ("llama3-8b", "zero=2,hsdp=2,recompute=none", ("model.rope_theta=10000.0", "model.norm_epsilon=1e-6")),
    ("llama3-8b", "zero=3,offload=optimizer", ("training.memory_recipe=pure-bf16",)),
    ("llama3.2-1b", "zero=3,mbs=4,recompute=selective", ("training.precision=fp32",)),
    ("llama3-405b", "zero=3,tp=8,sp=1,recompute=full", ("model.max_sequence_length=262144",)),
    ("qwen3-30b-a3b", "ep=4,zero=3,cp=2", ("model.rope_theta=5e6",)),
    ("deepseek-v2-lite", "ep=8,zero=2,recompute=full", ()),
    ("gpt-oss-20b", "zero=3,recompute=selective", ()),
    ("llama2-7b", "tp=2,zero=3,sp=1,recompute=full", ()),
    ("qwen2.5-7b", "pp=2,zero=1,layers_per_stage=15/13,schedule=gpipe", ("model.norm_epsilon=1e-5",)),
    ("qwen2.5-1.5b", "zero=2", ()),
    ("mixtral-8x7b", "ep=8,zero=3,recompute=full", ()),
    ("llama3-8b", "pp=2,zero=3", ("model.num_layers=30", "model.vocab_size=100000")),
    ("qwen3-30b-a3b", "ep=4,zero=3", ("model.num_layers=16", "model.moe.num_experts=32")),
)
SHAPES = {
    "llama2-7b": ("llama3", 32, 4096, 32, 32, 128, 11008, 32000, False, False, False, 0, 0, 0),
    "qwen2.5-7b": ("llama3", 28, 3584, 28, 4, 128, 18944, 152064, False, True, False, 0, 0, 0),
    "qwen2.5-1.5b": ("llama3", 28, 1536, 12, 2, 128, 8960, 151936, True, True, False, 0, 0, 0),
    "mixtral-8x7b": ("qwen3", 32, 4096, 32, 8, 128, 14336, 32000, False, False, False, 8, 2, 14336),
    "llama3-8b": ("llama3", 30, 4096, 32, 8, 128, 14336, 100000, False, False, False, 0, 0, 0),
    "qwen3-30b-a3b": ("qwen3", 16, 2048, 32, 4, 128, 6144, 151936, False, False, True, 32, 8, 768),
}
"""Of models that no registry has, by their config.json: whose blocks, layers, width, heads, key-value heads, size of a
head, width of the feed-forward block, vocabulary, tied, bias of queries, keys and values, norm of each head; experts,
experts of a token, width of an expert."""
SIZES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "ffn_hidden_size", "vocab_size"),
    *("tied_embeddings", "qkv_bias", "qk_norm", "num_experts", "experts_per_token", "expert_ffn_hidden_size"),
)


def shape_of(case: tuple[str, str, tuple[str, ...]]) -> tuple[str, dict[str, Any]] | None:
    """The package whose blocks a case's model has, and the sizes; None if the registry has the model."""
    model, _, settings = case
    own = model in SHAPES and (
        model not in ("llama3-8b", "qwen3-30b-a3b") or any("num_layers" in each for each in settings)
    )
    return (SHAPES[model][0], dict(zip(SIZES, SHAPES[model][1:], strict=True))) if own else None


FP8 = ("llama3-8b", "zero=3,recompute=full", ("training.precision=fp8",))
FP8_OF_ITS_OWN = ("llama2-7b", "zero=3,recompute=full", ("training.precision=fp8",))
"""A program that reads this case needs torchao, and a device that computes in 8 bits."""


def plan_of(case: tuple[str, str, tuple[str, ...]]) -> Plan:
    """The plan of a case on two hosts of eight."""
    model, layout, settings = case
    precision = next((each.partition("=")[2] for each in settings if each.startswith("training.precision=")), "bf16")
    rest = [each for each in settings if not each.startswith("training.precision=")]
    job = load_job(
        model=model, cluster="dgx-h100", nodes=2, engine="torchtitan", global_batch_size=64, sequence_length=1024,
        precision=precision, settings=rest,
    )  # fmt: skip
    return plan_for_layout(job, parse_layout(layout, num_layers=job.model.num_layers, num_devices=16))


def expected(plan: Plan, *, release: bool) -> dict[str, Any]:
    """Fields of Trainer.Config by their dotted names, in the units of a release 0.3.0 or of the newest source."""
    layout, training = plan.layout, plan.training
    found = {
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.enable_sequence_parallel": layout.sp == 1,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.expert_parallel_degree": layout.ep,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.data_parallel_replicate_degree": layout.hsdp,
        "parallelism.data_parallel_shard_degree": layout.dp // layout.hsdp,
        "parallelism.fsdp_reshard_after_forward": {1: "never", 2: "never", 3: "always"}[layout.zero],
        "training.enable_cpu_offload": layout.offload == "optimizer",
        "training.dtype": "bfloat16" if training.memory_recipe == "pure-bf16" else "float32",
        "training.mixed_precision_param": "float32" if training.precision == "fp32" else "bfloat16",
        "training.disable_cuda_graphs": True,
        "training.steps": training.steps,
        "training.max_norm": training.gradient_clip,
        "optimizer.lr": training.learning_rate,
        "optimizer.betas": [training.adam_beta1, training.adam_beta2],
        "optimizer.eps": training.adam_epsilon,
        "optimizer.weight_decay": training.weight_decay,
        "lr_scheduler.warmup_steps": training.warmup_steps,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": training.min_learning_rate_ratio,
        "debug.seed": training.seed,
        "compile.enable": False,
        "hf_assets_path": "TOKENIZER_PATH",
    }
    if layout.pp > 1:
        names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
        found["parallelism.pipeline_parallel_schedule"] = names[layout.schedule]
        found["parallelism.module_fqns_per_model_part"] = modules(plan)
    if training.loss != "whole":
        found["loss.num_chunks"] = training.loss_chunks
    return found | (sequences(plan) if release else tokens(plan))


def modules(plan: Plan) -> list[list[str]]:
    """Every module of the model once, in model order."""
    names = [f"layers.{number}" for number in range(plan.model.num_layers)]
    parts: list[list[str]] = []
    for count in plan.layout.layers_per_stage:
        parts.append(names[:count])
        names = names[count:]
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "lm_head"]]


def tokens(plan: Plan) -> dict[str, int]:
    """The batch in tokens: of one rank's microbatch, and of all ranks."""
    length, batch = plan.training.sequence_length, plan.training.global_batch_size
    found = {
        "training.num_tokens_per_microbatch_per_dp_rank": plan.layout.mbs * length,
        "training.num_tokens_per_train_step": batch * length,
        "training.max_context_length": length,
    }
    in_flight = batch // plan.layout.dp // plan.layout.mbs
    return found | ({"parallelism.num_pp_microbatches": in_flight} if plan.layout.pp > 1 else {})


def sequences(plan: Plan) -> dict[str, int]:
    """The batch in sequences; with a pipeline, a rank's whole batch is cut into microbatches."""
    batch, piped = plan.training.global_batch_size, plan.layout.pp > 1
    found = {
        "training.local_batch_size": batch // plan.layout.dp if piped else plan.layout.mbs,
        "training.global_batch_size": batch,
        "training.seq_len": plan.training.sequence_length,
    }
    return found | ({"parallelism.pipeline_parallel_microbatch_size": plan.layout.mbs} if piped else {})


def recompute(plan: Plan) -> str:
    """The class of the recomputation."""
    return {"none": "NoneType", "full": "FullAC.Config", "selective": "SelectiveAC.Config"}[plan.layout.recompute[0]]


def positions(plan: Plan, *, release: bool) -> dict[str, Any]:
    """Fields of RoPE.Config in all layers."""
    model, scaling = plan.model, plan.model.rope_scaling
    length = max(model.max_sequence_length, plan.training.sequence_length)
    found: dict[str, Any] = {"theta": model.rope_theta, "max_seq_len" if release else "max_context_length": length}
    if model.name.startswith(("deepseek", "gpt-oss")):
        return found | {"scaling": "yarn"}  # of the registry: a model document has no words for it
    if scaling is None:
        return found | {"scaling": "none"}
    band = {"low_freq_factor": scaling.low_frequency, "high_freq_factor": scaling.high_frequency}
    start = {"original_max_position_embeddings": scaling.original_max_sequence_length}
    return found | {"scaling": "llama", "scaling_factor": scaling.factor, **band, **start}
