"""Layout and training as options of Megatron-Core: one table for Megatron-LM, Megatron-Bridge and ms-swift.

Keys are the names of Megatron-LM's options with underscores. The table also writes options whose default would
contradict the plan. Source: Megatron-LM d98e8a64 (2026-08-22), megatron/training/arguments.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from planner.emit.hosts import uneven_hosts
from planner.emit.names import decisive, implied, listed, names_beside, refusals, refused
from planner.emit.programs.megatron_layout import chunks_of
from planner.emit.programs.megatron_model import MODEL, MODEL_REFUSALS
from planner.emit.settings import absent_unless, choice, fixed, flag, follows, known, not_carried, numbers, pair, whole
from planner.emit.target import Refusal, Setting
from planner.errors import InputError
from planner.layout import offloads_activations
from planner.layout_text import offload_of
from planner.specs.pipeline_letters import LETTERS_KEY, letters_of
from planner.specs.recipe import NAMED_RECIPES
from planner.specs.recompute import canonical, policy_fault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, Value, Values
    from planner.plan import Plan

_NAMES: Final = names_beside(__file__)
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


def _read_experts(given: Given) -> Mapping[str, Any]:
    """Expert degrees; etp equals tp if the file gives no etp. Source: transformer_config.py, __post_init__."""
    ep, etp = given.whole("expert_model_parallel_size", 1) or 1, given.whole("expert_tensor_parallel_size")
    if given.model is not None and given.model.moe is None:
        return {"layout.ep": 1, "layout.etp": 1}
    return {"layout.ep": ep, "layout.etp": etp or given.whole(_TP, 1) or 1}


_SHARDING: Final = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}


def _is_fsdp(plan: Plan) -> bool:
    return plan.engine.name == FSDP


def _shards(plan: Plan) -> bool:
    return bool(plan.layout.zero) or _is_fsdp(plan)


def _read_zero(given: Given) -> Mapping[str, Any]:
    sharded, gather = given.flag("use_distributed_optimizer"), given.flag("overlap_param_gather")
    replicas = given.whole("num_distributed_optimizer_instances", 1) or 1
    if given.flag("use_megatron_fsdp") or given.flag("use_custom_fsdp"):
        back = {name: stage for stage, name in _SHARDING.items()}
        zero = given.choice("data_parallel_sharding_strategy", back, "optim_grads_params")
        return {"layout.zero": zero, "layout.hsdp": replicas}
    return {"layout.zero": int(sharded or gather), "layout.hsdp": replicas if sharded else 1}


def _write_recompute(plan: Plan) -> Values:
    policy = plan.layout.recompute[0]
    kind, _, number = policy.partition(":")
    if policy == "none":
        return {}
    if policy == "selective":
        return {"recompute_granularity": "selective"}
    if kind == "full":
        method = "block" if number else "uniform"
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": int(number or 1)}
    return {"recompute_granularity": "selective", "recompute_modules": tuple(policy.split("+"))}


def _read_recompute(given: Given) -> Mapping[str, Any]:
    """The recompute policy of the options. Source: Megatron-LM, transformer_config.py; transformer_block.py."""
    kind = given.text("recompute_granularity", "none").lower()
    old = given.text("activations_checkpoint_method")  # the options' names in 2022, and until then
    if given.flag("checkpoint_activations") or old:
        kind = "full"
    if given.flag("recompute_activations"):  # whatever the granularity is; arguments.py, validate_args
        kind = "selective"
    modules, method = given.get("recompute_modules"), given.text("recompute_method", old or "uniform")
    number = given.whole("recompute_num_layers", given.whole("activations_checkpoint_num_layers", 1))
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
        is_all = given.model is not None and number >= given.model.num_layers
        return {"layout.recompute": "full" if is_all else f"full:{number}" if number else "none"}
    if number > 1:
        given.understood.discard("recompute_num_layers")  # keeps one input per group; priced as one per layer
    return {"layout.recompute": "full"}


def _read_overlap(given: Given) -> Mapping[str, Any]:
    """Whether collectives are split into pieces that overlap with matrix products; by default as in the profile.

    Source: Megatron-LM, arguments.py, validate_args (sequence parallelism, which is off without tensor parallelism).
    """
    if "tp_comm_overlap" not in given:
        return {}
    is_on, tp = given.flag("tp_comm_overlap"), given.whole(_TP, 1)
    if is_on and not (given.flag("sequence_parallel") and tp > 1):
        hint = "add sequence_parallel with a tensor_model_parallel_size above 1, or remove tp_comm_overlap"
        raise InputError("it needs sequence parallelism, and is refused without", where="tp_comm_overlap", hint=hint)
    return {"engine.overlap.tensor_parallel": is_on}


def _read_offload(given: Given) -> Mapping[str, Any]:
    optimizer, layers = given.flag("optimizer_cpu_offload"), given.whole("cpu_offloading_num_layers")
    optimizer &= "lora" not in (given.get("tuner_type"), given.get("train_type"))  # their states are small anywhere
    if optimizer and given.number("optimizer_offload_fraction", 1.0) < 1:
        given.doubt("optimizer_offload_fraction", "a part of the states on the host has no price", "layout.offload")
    on_host = [name for name, is_on in (("states", optimizer), ("activations", layers)) if is_on]
    return {"layout.offload": offload_of(on_host) or "none"}


_TP: Final = "tensor_model_parallel_size"
_AWARE: Final = "use_precision_aware_optimizer"


# --- training ----------------------------------------------------------------------------------------------------

_PRECISION: Final[dict[str, dict[str, Value]]] = _NAMES["precisions"]


def _read_precision(given: Given) -> Mapping[str, Any]:
    half, bf16 = given.flag("fp16"), given.flag("bf16")
    eight, four = given.text("fp8_format") or given.text("fp8"), given.text("fp4_format") or given.text("fp4")
    found = "fp4" if _is_set(four) else "fp8" if _is_set(eight) else "fp16" if half else "bf16" if bf16 else "fp32"
    return {"training.precision": found}


def _is_set(text: str) -> bool:
    return text.lower() not in ("", "none", "null", "false")


_RECIPES: Final[dict[str, dict[str, Value]]] = _NAMES["recipes"]
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
    if training.precision == "fp16" and recipe in ("megatron-18", "zero-16"):  # fp16 sums in 16 bits by default
        return {"accumulate_allreduce_grads_in_fp32": True} if recipe == "megatron-18" else {}
    return _RECIPES[recipe]


def _read_recipe(given: Given) -> Mapping[str, Any]:
    """The name of the memory recipe, even if it is the engine's default.

    A file for DeepSpeed gets no name, because DeepSpeed has its own recipes; Megatron-DeepSpeed computes otherwise than
    the models of transformers, for which the profile stands.
    """
    if given.flag("deepspeed"):
        found: dict[str, Any] = _NAMES["megatron_deepspeed"]
        return found
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


def _keeps_recipe(plan: Plan) -> bool:
    """Whether a memory recipe has options: training in 16 bits without Megatron-FSDP."""
    return plan.training.precision != "fp32" and not _is_fsdp(plan)


_OPTIMIZERS: Final = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
_GRAPHS: Final = {"layers": "transformer_engine", "step": "full_iteration", "none": None}


def _attention_of(plan: Plan) -> Values:
    """The attention kernel; `auto` selects a fused kernel if flash-attention has none (sinks, latent attention)."""
    if plan.training.attention == "unfused":
        return {"attention_backend": "unfused"}
    return {"attention_backend": "auto" if plan.model.mla or plan.model.attention_sinks else "flash"}


def _read_attention(given: Given) -> Mapping[str, Any]:
    backend = given.text("attention_backend", "auto").rpartition(".")[2]
    return {"training.attention": "unfused" if backend in ("unfused", "local") else "flash"}


def _modules_in_graphs(plan: Plan) -> Values:
    """The modules of a layer that CUDA graphs can hold, as transformer_config.py has it: those with fixed sizes."""
    moe = plan.model.moe
    experts = ("moe_router", "moe_preprocess") if moe else ()
    mlp = ("mlp",) if moe is None or moe.num_dense_layers or moe.layer_frequency > 1 else ()
    return {"cuda_graph_modules": ("attn", *experts, *(() if plan.training.expert_overlap else mlp))}


def _read_graphs(given: Given) -> Mapping[str, Any]:
    modules = given.get("cuda_graph_modules")
    kinds = {"none": "none", "full_iteration": "step", "transformer_engine": "layers", "local": "layers"}
    kind = given.choice("cuda_graph_impl", kinds, "none")
    return {"training.cuda_graphs": "step" if modules and "full_iteration" in str(modules) else kind}


def _read_dropout(given: Given) -> Mapping[str, Any]:
    """The larger of the two dropout rates; each defaults to 0.1. Source: transformer_config.py."""
    hidden, attention = given.number("hidden_dropout", 0.1), given.number("attention_dropout", 0.1)
    return {"training.dropout": max(hidden, attention)}


_STYLES: Final[dict[str, str]] = _NAMES["schedules"]
"""Schedule -> --lr-decay-style."""


_RATES: Final = "learning_rate schedule min_learning_rate_ratio warmup_steps warmup_ratio steps"


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
    whole("layout.tp", _TP, 1),
    replace(  # off if tp is 1: arguments.py, validate_args
        flag("layout.sp", "sequence_parallel", on=1, off=0),
        read=lambda given: {"layout.sp": int(given.flag("sequence_parallel") and given.whole(_TP, 1) > 1)},
    ),
    pair("layout.pp layout.interleave layout.schedule layout.layers_per_stage layout.mtp", _write_chunks, _read_chunks),
    whole("layout.cp", "context_parallel_size", 1),
    *absent_unless(
        lambda plan: plan.model.moe,
        replace(whole("layout.ep", "expert_model_parallel_size"), read=_read_experts),
        replace(whole("layout.etp", "expert_tensor_parallel_size"), read=None),
    ),
    *absent_unless(
        _is_fsdp, replace(choice("layout.zero", "data_parallel_sharding_strategy", _SHARDING), read=_read_zero)
    ),
    fixed({"use_distributed_optimizer": True}, _shards),
    *implied(_NAMES["implied"]),
    fixed({"overlap_grad_reduce": True}),
    fixed({"overlap_param_gather": True}, _shards),
    *absent_unless(_shards, replace(whole("layout.hsdp", "num_distributed_optimizer_instances", absent=1), read=None)),
    whole("layout.mbs", "micro_batch_size"),
    Setting(says=("layout.recompute",), write=_write_recompute, read=_read_recompute),
    *absent_unless(
        lambda plan: plan.layout.tp > 1 and plan.layout.sp,  # the overlap needs sequence parallelism
        replace(flag("engine.overlap.tensor_parallel", "tp_comm_overlap"), read=_read_overlap),
    ),
    *absent_unless(
        lambda plan: offloads_activations(plan.layout),
        # activations of all layers but the last
        pair("layout.offload", lambda plan: {"cpu_offloading_num_layers": plan.model.num_layers - 1}, _read_offload),
    ),
    known("cpu_offloading", "use_flash_attn", "fp8_recipe", "no_check_for_nan_in_loss_and_grad"),
    follows("layout.dp", "layout.pools", "layout.segment"),  # derived from the ranks and their hosts
)

TRAINING: Final = (
    whole("training.global_batch_size", "global_batch_size"),
    whole("training.sequence_length", "seq_length"),
    Setting(says=("training.precision",), write=lambda plan: _PRECISION[plan.training.precision], read=_read_precision),
    choice("training.optimizer", "optimizer", _OPTIMIZERS, "adamw", dist_muon="muon"),
    *absent_unless(_keeps_recipe, Setting(says=("training.memory_recipe",), write=_write_recipe, read=_read_recipe)),
    Setting(says=("training.attention",), write=_attention_of, read=_read_attention),
    replace(choice("training.cuda_graphs", "cuda_graph_impl", _GRAPHS), read=_read_graphs),
    *absent_unless(lambda plan: plan.training.cuda_graphs == "layers", Setting(says=(), write=_modules_in_graphs)),
    flag("training.expert_overlap", "overlap_moe_expert_parallel_comm"),
    pair(
        "training.dropout",
        lambda plan: {"attention_dropout": plan.training.dropout, "hidden_dropout": plan.training.dropout},
        _read_dropout,
    ),
    Setting(says=tuple(f"training.{name}" for name in _RATES.split()), write=_write_rates, read=_read_rates),
    *numbers(_NAMES["numbers"]),
    whole("training.seed", "seed"),
    not_carried("training.epochs"),
)


REFUSALS: Final = (
    *MODEL_REFUSALS,
    *refusals(_NAMES["refuses"]),
    *refused(_NAMES["refused"]),
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
PRETRAIN: Final = refusals(_NAMES["refuses_pretrain"])
"""Refusals of pretrain_gpt.py alone."""
NO_CHUNKS: Final = follows("training.loss_chunks")  # for the chunked loss, which is refused
FAMILY: Final = (*MODEL, *LAYOUT, *TRAINING, NO_CHUNKS)


def connections(plan: Plan) -> Mapping[str, str]:
    """CUDA_DEVICE_MAX_CONNECTIONS: 32 if streams must overlap (expert overlap, Megatron-FSDP), else 1 to keep order."""
    many = plan.training.expert_overlap or plan.engine.name == FSDP
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "32" if many else "1"}


IGNORED: Final = listed(_NAMES["ignores"])
"""Options that do not change the priced bytes and seconds of a step."""
DECISIVE: Final = decisive(_NAMES["decides"])
"""Options that decide the answer and have no price. Source: Megatron-LM, training/arguments.py."""
