"""Layout and training as options of Megatron-Core: one table for Megatron-LM, Megatron-Bridge and ms-swift.

Keys are the names of Megatron-LM's options with underscores. The table also writes options whose default would
contradict the plan. Source: Megatron-LM d98e8a64 (2026-08-22), megatron/training/arguments.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from planner.emit.hosts import uneven_hosts
from planner.emit.names import decisive, listed, names_beside
from planner.emit.programs.megatron_layout import chunks_of
from planner.emit.programs.megatron_model import MODEL, MODEL_REFUSALS
from planner.emit.target import Refusal, Setting, follows, not_carried, number, only, whole
from planner.errors import InputError
from planner.layout import offloads_activations, offloads_optimizer
from planner.specs.pipeline_letters import LETTERS_KEY, letters_of
from planner.specs.recipe import NAMED_RECIPES
from planner.specs.recompute import canonical, policy_fault
from planner.specs.training import NEVER_CLIPS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, Value, Values
    from planner.plan import Plan

FSDP: Final = "megatron-fsdp"
"""The engine whose plans run with --use-megatron-fsdp."""


# --- layout ------------------------------------------------------------------------------------------------------


def _write_chunks(plan: Plan) -> Values:
    """The number of chunks per stage, or Megatron-Core's letters if chunks differ or the model has MTP layers."""
    layout, layers = plan.layout, plan.layout.layers_per_stage
    found: dict[str, Value] = {"pipeline_model_parallel_size": layout.pp}
    if layout.pp == 1:
        return found
    if len(set(layers)) == 1 and not plan.model.mtp_layers:
        return found | ({"num_virtual_stages_per_pipeline_rank": layout.interleave} if layout.interleave > 1 else {})
    return found | {LETTERS_KEY: letters_of(layers, plan.model.mtp_layers, layout.mtp)}


def _read_chunks(given: Given) -> Mapping[str, Any]:
    stages = max(given.whole("pipeline_model_parallel_size", 1), 1)
    interleave, layers, mtp = chunks_of(given, given.model.num_layers if given.model else 0)
    found: dict[str, Any] = {"layout.pp": stages, "layout.interleave": interleave}
    found["layout.schedule"] = "interleaved" if interleave > 1 else "1f1b"
    if layers is None and given.model and given.model.num_layers % (stages * interleave) == 0:
        layers = (given.model.num_layers // (stages * interleave),) * (stages * interleave)
    found |= {"layout.mtp": mtp} if mtp and set(mtp) != {stages * interleave - 1} else {}
    return found | ({"layout.layers_per_stage": layers} if layers else {})


def _write_experts(plan: Plan) -> Values:
    if plan.model.moe is None:
        return {}
    return {"expert_model_parallel_size": plan.layout.ep, "expert_tensor_parallel_size": plan.layout.etp}


def _read_experts(given: Given) -> Mapping[str, Any]:
    """Expert degrees; etp equals tp if the file gives no etp. Source: transformer_config.py, __post_init__."""
    ep, etp = given.whole("expert_model_parallel_size", 1) or 1, given.whole("expert_tensor_parallel_size")
    if given.model is not None and given.model.moe is None:
        return {"layout.ep": 1, "layout.etp": 1}
    return {"layout.ep": ep, "layout.etp": etp or given.whole("tensor_model_parallel_size", 1) or 1}


_SHARDING: Final = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}


def _write_zero(plan: Plan) -> Values:
    layout = plan.layout
    instances: dict[str, Value] = {"num_distributed_optimizer_instances": layout.hsdp} if layout.hsdp > 1 else {}
    if plan.engine.name == FSDP:
        return {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": _SHARDING[layout.zero],
            "use_distributed_optimizer": True,
            "no_gradient_accumulation_fusion": True,
            "ckpt_format": "fsdp_dtensor",
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            **instances,
        }
    if not layout.zero:
        return {"overlap_grad_reduce": True}
    in_8_bits: dict[str, Value] = {"fp8_param_gather": True} if plan.training.precision == "fp8" else {}
    overlap: dict[str, Value] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    return {"use_distributed_optimizer": True, **overlap, **instances, **in_8_bits}


def _read_zero(given: Given) -> Mapping[str, Any]:
    sharded, gather = given.flag("use_distributed_optimizer"), given.flag("overlap_param_gather")
    replicas = given.whole("num_distributed_optimizer_instances", 1) or 1
    for key in ("ckpt_format", "no_gradient_accumulation_fusion", "fp8_param_gather", "overlap_grad_reduce"):
        given.get(key)
    if given.flag("use_megatron_fsdp") or given.flag("use_custom_fsdp"):
        back = {name: stage for stage, name in _SHARDING.items()}
        strategy = given.text("data_parallel_sharding_strategy", "optim_grads_params")
        if strategy not in back:
            raise InputError(f"{strategy[:80]!r} is no strategy", where="data_parallel_sharding_strategy")
        return {"layout.zero": back[strategy], "layout.hsdp": replicas}
    return {"layout.zero": int(sharded or gather), "layout.hsdp": replicas if sharded else 1}


def _write_recompute(plan: Plan) -> Values:
    policy = plan.layout.recompute[0]
    kind, _, number = policy.partition(":")
    if policy == "none":
        return {}
    if policy == "selective":
        return {"recompute_granularity": "selective"}
    if kind == "full" and number:
        method: Values = {"recompute_method": "block", "recompute_num_layers": int(number)}
        return {"recompute_granularity": "full", **method}
    if kind == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": tuple(policy.split("+"))}


def _read_recompute(given: Given) -> Mapping[str, Any]:
    """The recompute policy of the options. Source: Megatron-LM, transformer_config.py; transformer_block.py."""
    kind = given.text("recompute_granularity", "none").lower()
    if given.flag("checkpoint_activations"):  # the option's name until 2022
        kind = "full"
    if kind in ("none", "") and given.flag("recompute_activations"):
        kind = "selective"
    modules, method = given.get("recompute_modules"), given.text("recompute_method", "uniform")
    number = given.whole("recompute_num_layers", 1)
    if kind == "selective":
        names = modules if isinstance(modules, tuple | list) else str(modules or "core_attn").strip("[]").split(",")
        policy = "+".join(each.strip(" '\"") for part in names for each in str(part).split(",") if each.strip(" '\""))
        if fault := policy_fault(policy):
            raise InputError(f"{policy[:80]!r} has no price here", where="recompute_modules", hint=fault)
        policy = canonical(policy)
        return {"layout.recompute": "selective" if policy == "core_attn" else policy}
    if kind not in ("full", "none", "", "null"):
        raise InputError(f"{kind[:80]!r} has no price here", where="recompute_granularity", hint="full or selective")
    if kind != "full":
        return {"layout.recompute": "none"}
    if method == "block":
        return {"layout.recompute": f"full:{number}" if number else "none"}
    if number > 1:
        given.understood.discard("recompute_num_layers")  # keeps one input per group; priced as one per layer
    return {"layout.recompute": "full"}


def _recompute_fault(plan: Plan) -> tuple[str, str] | None:
    policies = sorted(set(plan.layout.recompute))
    if len(policies) > 1:
        hint = f"plan again with --pin recompute={policies[0]}, or another of them"
        return f"stages recompute {' and '.join(policies)}, and Megatron-Core has one policy for all", hint
    if policies[0].startswith("every:"):
        return f"layout.recompute is {policies[0]}, which Megatron-Core does not have", "plan with --pin recompute=full"
    return None


def _write_overlap(plan: Plan) -> Values:
    """The switch that overlaps pieces of tensor-parallel collectives with products; it needs sequence parallelism."""
    is_on = plan.engine.overlap.tensor_parallel and plan.layout.tp > 1 and plan.layout.sp
    return {"tp_comm_overlap": True} if is_on else {}


def _read_overlap(given: Given) -> Mapping[str, Any]:
    """Whether collectives are split into pieces that overlap with matrix products; by default as in the profile.

    Source: Megatron-LM, arguments.py, validate_args (sequence parallelism, which is off without tensor parallelism).
    """
    if "tp_comm_overlap" not in given:
        return {}
    is_on, tp = given.flag("tp_comm_overlap"), given.whole("tensor_model_parallel_size", 1)
    if is_on and not (given.flag("sequence_parallel") and tp > 1):
        hint = "add sequence_parallel with a tensor_model_parallel_size above 1, or remove tp_comm_overlap"
        raise InputError("it needs sequence parallelism, and is refused without", where="tp_comm_overlap", hint=hint)
    return {"engine.overlap.tensor_parallel": is_on}


def _write_offload(plan: Plan) -> Values:
    """Options that offload optimizer states, or the activations of all layers but the last, to the host."""
    found: dict[str, Value] = {}
    if offloads_optimizer(plan.layout):
        found |= {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True, _AWARE: True}
    if offloads_activations(plan.layout):
        found["cpu_offloading_num_layers"] = plan.model.num_layers - 1
    return found


def _read_offload(given: Given) -> Mapping[str, Any]:
    optimizer, layers = given.flag("optimizer_cpu_offload"), given.whole("cpu_offloading_num_layers")
    for key in ("overlap_cpu_optimizer_d2h_h2d", "cpu_offloading"):
        given.get(key)
    if optimizer and given.number("optimizer_offload_fraction", 1.0) < 1:
        given.doubt("optimizer_offload_fraction", "a part of the states on the host has no price", "layout.offload")
    names = {(True, True): "both", (True, False): "optimizer", (False, True): "activations", (False, False): "none"}
    return {"layout.offload": names[optimizer, layers > 0]}


_AWARE: Final = "use_precision_aware_optimizer"


# --- training ----------------------------------------------------------------------------------------------------

_PRECISION: Final[dict[str, dict[str, Value]]] = {
    "fp32": {},
    "fp16": {"fp16": True},
    "bf16": {"bf16": True},
    "fp8": {"bf16": True, "fp8_format": "hybrid"},
    "fp4": {"bf16": True, "fp4_format": "e2m1"},
}


def _read_precision(given: Given) -> Mapping[str, Any]:
    half, bf16 = given.flag("fp16"), given.flag("bf16")
    eight, four = given.text("fp8_format") or given.text("fp8"), given.text("fp4_format") or given.text("fp4")
    given.get("fp8_recipe")
    found = "fp4" if _is_set(four) else "fp8" if _is_set(eight) else "fp16" if half else "bf16" if bf16 else "fp32"
    return {"training.precision": found}


def _is_set(text: str) -> bool:
    return text.lower() not in ("", "none", "null", "false")


_MOMENTS_16: Final[dict[str, Value]] = {_AWARE: True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
_MOMENTS_8: Final[dict[str, Value]] = {_AWARE: True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
_RECIPES: Final[dict[str, dict[str, Value]]] = {
    "megatron-18": {},
    "zero-16": {"grad_reduce_in_bf16": True},
    "precision-aware-fp32": _MOMENTS_16,
    "precision-aware": {**_MOMENTS_16, "main_grads_dtype": "bf16"},
    "fp8-moments": {**_MOMENTS_8, "main_grads_dtype": "bf16"},
}
"""Memory recipe -> options for bf16 training, where gradients are summed in fp32 by default."""


def _recipe_of(plan: Plan) -> str:
    """The name of the memory recipe; for `engine`, the named recipe that keeps the same states as the engine."""
    recipe = plan.training.memory_recipe
    if recipe != "engine":
        return recipe
    kept = plan.engine.memory.states["mixed"]
    return next((name for name in ("megatron-18", "zero-16") if NAMED_RECIPES[name] == kept), "megatron-18")


def _write_recipe(plan: Plan) -> Values:
    training, recipe = plan.training, _recipe_of(plan)
    if training.precision == "fp32" or plan.engine.name == FSDP:
        return {}
    if training.precision == "fp16" and recipe in ("megatron-18", "zero-16"):  # fp16 sums in 16 bits by default
        return {"accumulate_allreduce_grads_in_fp32": True} if recipe == "megatron-18" else {}
    return _RECIPES[recipe]


def _read_recipe(given: Given) -> Mapping[str, Any]:
    """The name of the memory recipe, even if it is the engine's default.

    A file for DeepSpeed gets no name, because DeepSpeed has its own recipes.
    """
    if given.flag("deepspeed"):
        return {}
    aware, moment = given.flag(_AWARE), given.text("exp_avg_dtype", "fp32").rpartition(".")[2]
    main, second = given.text("main_grads_dtype", "fp32"), given.text("exp_avg_sq_dtype", "fp32").rpartition(".")[2]
    in_16, in_32 = given.flag("grad_reduce_in_bf16"), given.flag("accumulate_allreduce_grads_in_fp32")
    if aware and moment != second:
        given.doubt("exp_avg_sq_dtype", "moments of two precisions have no price", "training.memory_recipe")
    if aware and moment in ("fp8", "float8", "uint8"):
        return {"training.memory_recipe": "fp8-moments"}
    if aware and moment in ("bf16", "bfloat16", "fp16", "float16"):
        is_16 = main.rpartition(".")[2] in ("bf16", "bfloat16", "fp16", "float16")
        return {"training.memory_recipe": "precision-aware" if is_16 else "precision-aware-fp32"}
    if not (given.flag("bf16") or given.flag("fp16")):
        return {}
    sums_in_32 = in_32 if given.flag("fp16") else not in_16
    return {"training.memory_recipe": "megatron-18" if sums_in_32 else "zero-16"}


def _recipe_fault(plan: Plan) -> tuple[str, str] | None:
    training, recipe = plan.training, _recipe_of(plan)
    if training.precision == "fp32":
        return None
    if plan.engine.name == FSDP:
        if training.memory_recipe == "engine":
            return None
        return f"training.memory_recipe is {recipe}, and Megatron-FSDP keeps its own", _ENGINES_RECIPE
    if recipe not in _RECIPES:
        return f"training.memory_recipe is {recipe}, which Megatron-LM does not keep", _ENGINES_RECIPE
    if recipe not in ("megatron-18", "zero-16") and not plan.layout.zero:
        hint = f"plan with zero=1, or {_ENGINES_RECIPE}"
        return f"training.memory_recipe is {recipe}, which Megatron-LM does not keep without ZeRO", hint
    return None


_ENGINES_RECIPE: Final = "--set training.memory_recipe=engine"
_OPTIMIZERS: Final = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}


def _read_optimizer(given: Given) -> Mapping[str, Any]:
    back = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
    return {"training.optimizer": given.choice("optimizer", back, "adam")}


def _write_attention(plan: Plan) -> Values:
    """The attention kernel; `auto` selects a fused kernel if flash-attention has none (sinks, latent attention)."""
    if plan.training.attention == "unfused":
        return {"attention_backend": "unfused"}
    return {"attention_backend": "auto" if plan.model.mla or plan.model.attention_sinks else "flash"}


def _read_attention(given: Given) -> Mapping[str, Any]:
    backend = given.text("attention_backend", "auto").rpartition(".")[2]
    given.get("use_flash_attn")
    return {"training.attention": "unfused" if backend in ("unfused", "local") else "flash"}


def _write_graphs(plan: Plan) -> Values:
    """Options for CUDA graphs of the forward and backward pass, or only of layer modules with fixed sizes."""
    moe = plan.model.moe
    if plan.training.cuda_graphs == "none":
        return {}
    if plan.training.cuda_graphs == "step":
        return {"cuda_graph_impl": "full_iteration", "no_check_for_nan_in_loss_and_grad": True}
    modules = ["attn", *(["moe_router", "moe_preprocess"] if moe else [])]
    if moe is None or moe.num_dense_layers or moe.layer_frequency > 1:
        modules.append("mlp")
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": tuple(modules)}


def _read_graphs(given: Given) -> Mapping[str, Any]:
    modules = given.get("cuda_graph_modules")
    given.get("no_check_for_nan_in_loss_and_grad")
    kinds = {"none": "none", "full_iteration": "step", "transformer_engine": "layers", "local": "layers"}
    kind = given.choice("cuda_graph_impl", kinds, "none")
    return {"training.cuda_graphs": "step" if modules and "full_iteration" in str(modules) else kind}


def _read_dropout(given: Given) -> Mapping[str, Any]:
    """The larger of the two dropout rates; each defaults to 0.1. Source: transformer_config.py."""
    hidden, attention = given.number("hidden_dropout", 0.1), given.number("attention_dropout", 0.1)
    return {"training.dropout": max(hidden, attention)}


_STYLES: Final = {
    "inverse_sqrt": "inverse-square-root",
    **{each: each for each in ("cosine", "linear", "constant", "WSD")},
}
"""Schedule -> --lr-decay-style."""


_RATES: Final = ("learning_rate", "schedule", "min_learning_rate_ratio", "warmup_steps", "warmup_ratio", "steps")


def _write_rates(plan: Plan) -> Values:
    training = plan.training
    share: dict[str, Value] = {"lr_warmup_fraction": training.warmup_ratio}
    return {
        "lr": training.learning_rate,
        "min_lr": float(f"{training.learning_rate * training.min_learning_rate_ratio:.9g}"),
        "lr_decay_style": _STYLES.get(training.schedule, "cosine"),
        "lr_decay_iters": training.steps,
        "train_iters": training.steps,
        "lr_warmup_iters": min(training.warmup_steps, training.steps - 1),
        **(share if training.warmup_ratio and not training.warmup_steps else {}),
    }


def _read_rates(given: Given) -> Mapping[str, Any]:
    """The learning rate, and steps given as iterations or samples. Source: training/training.py, update_train_iters."""
    found: dict[str, Any] = {}
    if "lr_decay_style" in given:
        style = given.text("lr_decay_style")
        found["training.schedule"] = next((ours for ours, theirs in _STYLES.items() if theirs == style), style)
    batch = max(given.whole("global_batch_size"), 1)
    steps = given.whole("train_iters") or given.whole("train_samples") // batch
    if given.whole("lr_decay_iters", steps) != steps:
        given.understood.discard("lr_decay_iters")  # a plan's rate decays until the last step
    if "lr" in given and (rate := given.number("lr")) > 0:
        found["training.learning_rate"] = rate
        found["training.min_learning_rate_ratio"] = min(round(given.number("min_lr", 0.0) / rate, 9), 1.0)
    elif "min_lr" in given and not given.number("min_lr"):
        found["training.min_learning_rate_ratio"] = 0.0
    if ratio := given.number("lr_warmup_fraction"):
        found |= {"training.warmup_ratio": ratio, "training.warmup_steps": 0}
    elif "lr_warmup_iters" in given or "lr_warmup_samples" in given:
        found["training.warmup_steps"] = given.whole("lr_warmup_iters") or given.whole("lr_warmup_samples") // batch
    return found | ({"training.steps": steps} if steps else {})


LAYOUT: Final = (
    whole("layout.tp", "tensor_model_parallel_size", 1),
    Setting(
        says=("layout.sp",),
        write=lambda plan: {"sequence_parallel": True} if plan.layout.sp else {},
        read=lambda given: {  # off if tp is 1: arguments.py, validate_args
            "layout.sp": int(given.flag("sequence_parallel") and given.whole("tensor_model_parallel_size", 1) > 1)
        },
    ),
    Setting(
        says=("layout.pp", "layout.interleave", "layout.schedule", "layout.layers_per_stage", "layout.mtp"),
        write=_write_chunks,
        read=_read_chunks,
    ),
    whole("layout.cp", "context_parallel_size", 1),
    Setting(says=("layout.ep", "layout.etp"), write=_write_experts, read=_read_experts),
    Setting(says=("layout.zero", "layout.hsdp"), write=_write_zero, read=_read_zero),
    whole("layout.mbs", "micro_batch_size"),
    Setting(says=("layout.recompute",), write=_write_recompute, read=_read_recompute),
    Setting(says=("engine.overlap.tensor_parallel",), write=_write_overlap, read=_read_overlap),
    Setting(says=("layout.offload",), write=_write_offload, read=_read_offload),
    follows("layout.dp", "layout.pools", "layout.segment"),  # derived from the ranks and their hosts
)

TRAINING: Final = (
    whole("training.global_batch_size", "global_batch_size"),
    whole("training.sequence_length", "seq_length"),
    Setting(says=("training.precision",), write=lambda plan: _PRECISION[plan.training.precision], read=_read_precision),
    Setting(
        says=("training.optimizer",),
        write=lambda plan: {"optimizer": _OPTIMIZERS[plan.training.optimizer]},
        read=_read_optimizer,
    ),
    Setting(says=("training.memory_recipe",), write=_write_recipe, read=_read_recipe),
    Setting(says=("training.attention",), write=_write_attention, read=_read_attention),
    Setting(says=("training.cuda_graphs",), write=_write_graphs, read=_read_graphs),
    Setting(
        says=("training.expert_overlap",),
        write=lambda plan: {"overlap_moe_expert_parallel_comm": True} if plan.training.expert_overlap else {},
        read=lambda given: {"training.expert_overlap": given.flag("overlap_moe_expert_parallel_comm")},
    ),
    Setting(
        says=("training.dropout",),
        write=lambda plan: {"attention_dropout": plan.training.dropout, "hidden_dropout": plan.training.dropout},
        read=_read_dropout,
    ),
    Setting(
        says=tuple(f"training.{name}" for name in _RATES),
        write=_write_rates,
        read=_read_rates,
    ),
    number("training.weight_decay", "weight_decay"),
    number("training.gradient_clip", "clip_grad", zero=NEVER_CLIPS),
    number("training.adam_beta1", "adam_beta1"),
    number("training.adam_beta2", "adam_beta2"),
    number("training.adam_epsilon", "adam_eps"),
    whole("training.seed", "seed"),
    not_carried("training.epochs"),
)


def _experts_fault(plan: Plan) -> tuple[str, str] | None:
    if plan.model.moe is None or plan.layout.tp == 1 or plan.layout.sp:
        return None
    return "experts with tp > 1 and sp=0, which the layer of experts refuses", "plan again with --pin sp=1"


REFUSALS: Final = (
    *MODEL_REFUSALS,
    only("layout.schedule", "1f1b", "interleaved", why="Megatron-Core does not run it", pin="--pin schedule=1f1b"),
    only("training.optimizer", *_OPTIMIZERS, why="Megatron-LM does not have it"),
    only("training.precision", *_PRECISION, why="Megatron-LM does not have it"),
    only("training.mean_sample_tokens", 0, why="emitted files keep no borders between packed samples"),
    only("training.mlp_tiles", 1, why="Megatron-LM computes feed-forward blocks at once"),
    Refusal(says=(), fault=_recompute_fault),
    Refusal(says=(), fault=_recipe_fault),
    Refusal(says=(), fault=_experts_fault),
    Refusal(says=(), fault=uneven_hosts),
)


def _read_loss(given: Given) -> Mapping[str, Any]:
    """The loss. Megatron-Core's own fusion keeps the same tensors as separate operators: softmax in fp32, no logits.

    Source: Megatron-LM, core/fusions/fused_cross_entropy.py; arguments.py refuses Transformer Engine's fusion.
    """
    given.get("cross_entropy_loss_fusion")
    if given.text("cross_entropy_fusion_impl", "native") != "native":
        given.doubt("cross_entropy_fusion_impl", "this kernel of the loss has no price", "training.loss")
    return {}


LOSS: Final = Setting(says=("training.loss",), write=lambda plan: {}, read=_read_loss)  # noqa: ARG005 - as the others
WHOLE_LOSS: Final = only(
    "training.loss", "engine", "whole", why="Megatron-LM computes it whole, in operators of its own"
)
NO_CHUNKS: Final = follows("training.loss_chunks")  # for the chunked loss, which is refused
FAMILY: Final = (*MODEL, *LAYOUT, *TRAINING, NO_CHUNKS)


def connections(plan: Plan) -> Mapping[str, str]:
    """CUDA_DEVICE_MAX_CONNECTIONS: 32 if streams must overlap (expert overlap, Megatron-FSDP), else 1 to keep order."""
    many = plan.training.expert_overlap or plan.engine.name == FSDP
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "32" if many else "1"}


_NAMES: Final = names_beside(__file__)
IGNORED: Final = listed(_NAMES["ignores"])
"""Options that do not change the priced bytes and seconds of a step."""
DECISIVE: Final = decisive(_NAMES["decides"])
"""Options that decide the answer and have no price. Source: Megatron-LM, training/arguments.py."""
