"""Training by transformers' Trainer: settings shared by Accelerate and DeepSpeed, as keys of TrainingArguments and TRL.

Keys with the prefix `accelerate.` belong to Accelerate's file, `deepspeed.` to DeepSpeed's file, and `config.` to the
model's config.json. All other keys belong to TrainingArguments (transformers 5) and to TRL's ModelConfig and SFTConfig.
Accelerate and DeepSpeed share the functions that read, so the table of one also reads files of the other.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import yaml

from planner.emit.adapters import EXPERTS, PEFT, adapters_of, parts_of
from planner.emit.names import decisive, listed, names_beside, refusals, refused, still_open
from planner.emit.programs.hugging_face_model import config_of
from planner.emit.settings import choice, follows, known, number, numbers, pair, whole
from planner.emit.target import Refusal, Setting
from planner.errors import InputError
from planner.layout_text import offload_of
from planner.specs.huggingface.writing import model_from
from planner.specs.model import ModelSpec
from planner.specs.recompute import is_of_some_layers, policy_code
from planner.specs.training import OF_MEGATRON
from planner.specs.training import UNKNOWN_WEIGHTS as WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, How, Value, Values
    from planner.layout import Layout
    from planner.plan import Plan

MODEL: Final = "MODEL_NAME"
NAMES: Final = names_beside(__file__)
DATA, TOKENIZER = (placeholder for placeholder, _ in NAMES["yours"].values())
OPTIMIZERS: Final[dict[str, str]] = NAMES["optimizers"]
_OPTIMIZERS_READ: Final = {name: ours for ours, name in OPTIMIZERS.items()} | NAMES["optimizers_read"]
_DROPOUT: Final[dict[str, list[str]]] = NAMES["dropout"]
"""Model type -> keys of config.json for dropout whose default is not 0, or which must all have one probability."""


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Nested mappings as flat keys joined by dots; lists become tuples, and empty mappings are left out."""
    found: dict[str, Value] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = tuple(value) if isinstance(value, list | tuple) else value
    return found


def nested(values: Values, prefix: str = "") -> dict[str, Any]:
    """The nested mapping of the keys with this prefix; the inverse of `flat`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not key.startswith(prefix):
            continue
        *parents, last = key.removeprefix(prefix).split(".")
        inner = found
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = list(value) if isinstance(value, tuple) else value
    return found


_FILES: Final = ("accelerate.", "deepspeed.", "config.")
"""Prefixes of keys that do not belong to TrainingArguments."""
PLAIN: Final = "launch.plain"
"""Key that a reader adds if a launcher starts plain data parallelism, unless a key of the program shards."""


# --- the model ---------------------------------------------------------------------------------------------------


def _write_model(plan: Plan) -> Values:
    config = config_of(plan.model)
    if config is None:
        return {}
    names = _DROPOUT.get(config["model_type"], ["attention_dropout"])
    return flat(config | dict.fromkeys(names, plan.training.dropout), "config.")


def _read_model(given: Given) -> Mapping[str, Any]:
    config = nested(given.values, "config.")
    given.understood |= {key for key in given.values if key.startswith("config.")}
    drops = {each for names in (*_DROPOUT.values(), ["attention_dropout"]) for each in names}
    dropout = max((given.number(f"config.{each}") for each in drops & set(config)), default=0.0)
    if not (config := {key: value for key, value in config.items() if key not in drops}):
        return {}
    if (spec := model_from(config)) is None:
        raise InputError("the model's config.json is of no kind that is known here", where="config")
    found = {f"model.{name}": getattr(spec, name) for name in ModelSpec.model_fields if name != "name"}
    return found | {"training.dropout": dropout}


_OF_TRANSFORMERS: Final = {"state", "sparse_attention", "further_blocks"}
"""Blocks that only transformers' code can build; a model document describes only their cost."""


def is_named(plan: Plan) -> bool:
    """Whether the emitted program must load the model by a name or folder that the plan does not contain."""
    return bool(_OF_TRANSFORMERS & set(plan.model.features)) and config_of(plan.model) is None


def _model_fault(plan: Plan) -> tuple[str, str] | None:
    config = config_of(plan.model)
    if plan.model.vision:
        why = f"model.vision: {plan.model.name} reads images, which the script that is written does not load"
        return why, "`--set model.vision=null` plans its text alone"
    if config is None and not is_named(plan):
        return f"no model of transformers is built as {plan.model.name}", "plan for another --engine"
    kind = str(config["model_type"]) if config else plan.model.name
    if is_named(plan) and plan.layout.pp > 1:
        why = f"layout.pp is {plan.layout.pp}, and only transformers' own code runs {plan.model.name}"
        return why, "plan again with --pin pp=1"
    if plan.training.dropout and kind not in _DROPOUT:
        why = f"training.dropout is {plan.training.dropout:g}, which {kind} has not"
        return why, "plan with --set training.dropout=0"
    if plan.training.attention == "flash" and FLASH.get(kind, "sdpa") is None:
        return f"training.attention is flash, which {kind} has not", "plan with --set training.attention=unfused"
    if plan.layout.tp > 1 and plan.engine.name == "deepspeed" and kind == "gpt2":
        return f"layout.tp is {plan.layout.tp}, and AutoTP does not cut {kind}", "plan again with --pin tp=1"
    of_experts = {*plan.training.lora_targets} & {*EXPERTS, "gate", "up", "down", "all-linear"}
    if plan.training.lora_rank and plan.model.moe is not None and of_experts:
        why = f"training.lora_targets has {', '.join(sorted(of_experts))}, by which PEFT 0.19 finds routed experts too"
        return why, "plan with --set training.lora_targets=[query,key,value,output]"
    if plan.training.lora_rank and (kind in NAMES["fused_matrices"] or config is None):
        why = f"training.lora_rank: the matrices of {kind} are not kept one by one"
        return why, "plan with --set training.lora_rank=0"
    return None


# --- batch, precision, optimizer, loss, adapters -----------------------------------------------------------------


def _write_batch(plan: Plan) -> Values:
    layout, training = plan.layout, plan.training
    return {
        "per_device_train_batch_size": layout.mbs,
        "gradient_accumulation_steps": layout.num_microbatches(training.global_batch_size),
        "max_length": training.sequence_length,
        "packing": True,
    }


def _read_batch(given: Given) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    beside = given.whole("deepspeed.train_micro_batch_size_per_gpu")
    micro = given.whole("per_device_train_batch_size") or beside
    steps = given.whole("gradient_accumulation_steps") or given.whole("deepspeed.gradient_accumulation_steps")
    whole = given.whole("deepspeed.train_batch_size")
    if length := next(filter(None, map(given.whole, listed(NAMES["lengths"]))), 0):
        found["training.sequence_length"] = length
    if micro:
        found["layout.mbs"] = micro
    degrees = read_degrees(given)
    copies = given.num_devices // (degrees["tp"] * degrees["cp"] * max(len(_stages(given)), 1))
    if batch := whole or micro * max(steps, 1) * copies:
        found["training.global_batch_size"] = batch
    return found


def read_degrees(given: Given) -> dict[str, int]:
    """Tensor and context degrees, from the keys of any program that builds on Accelerate or DeepSpeed."""
    return {axis: max(1, *(given.whole(key) for key in listed(keys))) for axis, keys in NAMES["degrees"].items()}


def _stages(given: Given) -> tuple[int, ...]:
    """The number of layers of each pipeline stage, from the key that `pipeline.py` reads; empty without a pipeline."""
    layers = given.get("pipeline.layers_per_stage", ())
    if not isinstance(layers, tuple) or not all(type(each) is int and each > 0 for each in layers):
        raise InputError("no list of whole numbers", where="pipeline.layers_per_stage")
    return layers


AT_LOAD: Final = "distributed_config."
"""Keys of transformers' DistributedConfig, which cuts a model while it loads it."""


def _read_at_load(given: Given) -> dict[str, Any]:
    if not any(key.startswith(AT_LOAD) for key in given.values):
        return {}
    given.whole(f"{AT_LOAD}fsdp_size", 1)
    given.flag(f"{AT_LOAD}fsdp_mixed_precision")
    return {
        "zero": 3 if given.flag("reshard_after_forward", default=True) else 2,
        "replicas": given.whole(f"{AT_LOAD}dp_replicate_size", 1),
        "layout.ep": given.whole(f"{AT_LOAD}ep_size", 1),
    }


def read_layout(given: Given) -> Mapping[str, Any]:
    """The layout of a file: degrees, ZeRO stage, replicas, recompute and offload."""
    degrees = read_degrees(given)
    found: dict[str, Any] = {f"layout.{key}": value for key, value in degrees.items()}
    if layers := _stages(given):
        found |= {"layout.pp": len(layers), "layout.layers_per_stage": layers}
    if degrees["tp"] > 1:
        found["layout.sp"] = 0
    replicas = given.whole("accelerate.parallelism_config.parallelism_config_dp_replicate_size", 1) or 1
    (fsdp, offload, is_hybrid), params = _read_fsdp(given), False
    at_load = _read_at_load(given)
    fsdp, replicas = at_load.pop("zero", fsdp), at_load.pop("replicas", replicas)
    found |= at_load
    is_plain = PLAIN in given
    if fsdp is not None:
        found["layout.zero"] = fsdp
        found["layout.hsdp"] = _num_hosts(given) if is_hybrid else replicas
    elif any(key.startswith("deepspeed.") for key in given.values):
        found["layout.zero"] = given.whole("deepspeed.zero_optimization.stage")
        offload, params = (given.text(key) in ("cpu", "nvme") for key in _DEVICES)
        for key in _DEVICES:
            if given.text(key) == "nvme":
                given.doubt(key, "no rate of a disk is known", "layout.offload")
        offload &= not given.flag("use_peft", default="lora_r" in given)  # their states are small wherever they are
        if params and not (offload and found["layout.zero"] == 3):
            why = "weights in the host's memory without ZeRO-3's states have no price"
            given.doubt(_DEVICES[1], why, "layout.offload")
            params = False
    elif is_plain:
        found["layout.zero"] = 0
    activations = given.flag("offload_activations")
    on_host = {"params": params, "states": offload, "activations": activations}
    found["layout.offload"] = offload_of(name for name, is_on in on_host.items() if is_on) or "none"
    is_full = [given.flag(key) for key in ("gradient_checkpointing", f"{_FSDP}activation_checkpointing")]
    found["layout.recompute"] = "full" if any(is_full) else given.text("recompute") or "none"
    return found


_FSDP: Final = "accelerate.fsdp_config.fsdp_"
_DEVICES: Final = tuple(f"deepspeed.zero_optimization.offload_{each}.device" for each in ("optimizer", "param"))
"""Keys of where DeepSpeed keeps the optimizer's states, and the weights."""


_STRATEGIES: Final[dict[str, tuple[int, bool]]] = NAMES["strategies"]
"""Strategy of FSDP -> its ZeRO stage, and whether each host shards by itself. Accelerate numbers them from 1 to 5.

Source: torch, distributed/fsdp/api.py, ShardingStrategy; accelerate, utils/constants.py, FSDP_SHARDING_STRATEGY.
"""
_STRATEGY: Final = "accelerate.fsdp_config.fsdp_sharding_strategy"


def _read_fsdp(given: Given) -> tuple[int | None, bool, bool]:
    """The ZeRO stage that the FSDP settings mean (None without FSDP), whether FSDP offloads, and whether per host."""
    named = given.text("fsdp")  # Trainer's own option: "full_shard auto_wrap offload"
    found = given.text("accelerate.distributed_type") == "FSDP"
    if not found and not named:
        return None, False, False
    offload = given.flag("accelerate.fsdp_config.fsdp_offload_params") or "offload" in named
    reshard = given.text("accelerate.fsdp_config.fsdp_reshard_after_forward", "true").lower()
    numbered = {str(number): name for number, name in enumerate(_STRATEGIES, 1)}
    words = re.findall(r"\w+", given.text(_STRATEGY, named or "full_shard").lower())
    names = [name for word in words if (name := numbered.get(word, word.strip("_"))) in _STRATEGIES]
    if not names and words != ["true"]:
        hint = f"known: {', '.join(_STRATEGIES).upper()}"
        raise InputError(f"{' '.join(words)[:80]!r} is no strategy of FSDP", where=_STRATEGY, hint=hint)
    zero, is_hybrid = _STRATEGIES[names[0] if names else "full_shard"]
    keeps = reshard in ("false", "shard_grad_op", "no_shard")
    return (2 if keeps and zero == 3 else zero), offload, is_hybrid


def _num_hosts(given: Given) -> int:
    """The number of replicas of a model that each host shards by itself."""
    if not given.per_host or given.num_devices % given.per_host:
        given.doubt(_STRATEGY, "the number of devices of a host is not known", "layout.hsdp")
        return 1
    return given.num_devices // given.per_host


def _write_precision(plan: Plan) -> Values:
    training, pure = plan.training, plan.training.memory_recipe == "pure-bf16"
    return {  # the Trainer refuses a file of DeepSpeed that has another precision
        "bf16": training.precision == "bf16" and (not pure or plan.engine.name == "deepspeed"),
        "fp16": training.precision == "fp16",
        "dtype": {"fp16": "float16"}.get(training.precision, "bfloat16") if pure or training.lora_rank else "float32",
    }


def _read_precision(given: Given) -> Mapping[str, Any]:
    mixed = given.text("accelerate.mixed_precision", "no")
    bf16 = given.text("bf16").lower() == "auto" or given.flag("bf16") or given.flag("deepspeed.bf16.enabled")
    fp16 = given.flag("fp16") or given.flag("deepspeed.fp16.enabled")
    dtype = given.text("dtype", given.text("torch_dtype", ""))
    pure = dtype == "bfloat16" and not (bf16 or fp16 or mixed != "no") and not given.get("use_peft")
    pure = pure or given.flag("deepspeed.bf16.bf16_master_weights_and_grads")
    found: dict[str, Any] = {"training.precision": "bf16" if bf16 or pure else "fp16" if fp16 else mixed}
    if found["training.precision"] == "no":
        found["training.precision"] = "fp32" if dtype in ("", "float32", "auto") else "bf16"
    if pure:
        found["training.memory_recipe"] = "pure-bf16"
    return found


_SCHEDULES: Final[dict[str, str]] = NAMES["schedules"]
"""Schedule -> the Trainer's name. Source: transformers 5.23, trainer_utils.py (SchedulerType) and optimization.py."""


_OF_SCHEDULE: Final = ("schedule", "min_learning_rate_ratio", "warmup_steps", "warmup_ratio", "steps", "epochs")


def _write_schedule(plan: Plan) -> Values:
    """The schedule and the length of the run; `pipeline.py` counts steps alone, so that its epochs are not carried."""
    training, has_epochs = plan.training, plan.layout.pp == 1
    found: dict[str, Value] = {"lr_scheduler_type": _SCHEDULES.get(training.schedule, "cosine")}
    if found["lr_scheduler_type"] == "cosine" and training.min_learning_rate_ratio:
        found = {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs.min_lr_rate": training.min_learning_rate_ratio,
        }
    found["warmup_steps"] = training.warmup_steps or (training.warmup_ratio if has_epochs else 0) or 0
    if training.epochs and has_epochs:
        return found | {"num_train_epochs": training.epochs}
    return found | {"max_steps": training.steps}


def _read_schedule(given: Given) -> Mapping[str, Any]:
    """The schedule, the warm-up and the length of the run; a share as warmup_steps is a ratio, as in transformers 5."""
    found: dict[str, Any] = {}
    name = given.text("lr_scheduler_type")
    if name:
        back = {theirs: ours for ours, theirs in _SCHEDULES.items()} | {"cosine_with_min_lr": "cosine"}
        least = given.number("lr_scheduler_kwargs.min_lr") / (given.number("learning_rate") or 1.0)
        least = given.number("lr_scheduler_kwargs.min_lr_rate", least) if name == "cosine_with_min_lr" else 0.0
        found |= {"training.schedule": back.get(name, name), "training.min_learning_rate_ratio": least}
    if name or "warmup_steps" in given or "warmup_ratio" in given:
        steps, ratio = given.number("warmup_steps"), given.number("warmup_ratio")
        steps, ratio = (0, 0) if name == "constant" else (steps, 0) if steps >= 1 else (0, steps or ratio)
        found |= {"training.warmup_steps": int(steps), "training.warmup_ratio": ratio}
    steps, epochs = given.number("max_steps"), given.number("num_train_epochs")
    return found | ({"training.steps": int(steps)} if steps > 0 else {"training.epochs": epochs} if epochs > 0 else {})


def _write_weights(plan: Plan) -> Values:
    """Weights in transformers' form; adapters are always trained beside weights, and pipelines start at random."""
    weights = plan.training.weights or (WEIGHTS if plan.training.lora_rank else None)
    if weights is None or plan.layout.pp > 1:
        return {}
    return {"weights": WEIGHTS if weights.startswith(OF_MEGATRON) else weights}


def _read_weights(given: Given) -> Mapping[str, Any]:
    weights = given.text("weights", WEIGHTS)
    is_said = weights != WEIGHTS or ("weights" in given and not given.flag("use_peft"))
    return {"training.weights": weights} if is_said else {}


def _read_optimizer(given: Given) -> Mapping[str, Any]:
    name = given.text("optim", given.text("deepspeed.optimizer.type", "")).lower()
    if name and name not in _OPTIMIZERS_READ:
        known = ", ".join(sorted(_OPTIMIZERS_READ))
        raise InputError(f"{name[:60]!r} has no price here", where="optim", hint=f"known: {known}")
    return {"training.optimizer": _OPTIMIZERS_READ[name]} if name else {}


FLASH: Final = {"gemma2": "flash_attention_2", "gpt_oss": "kernels-community/vllm-flash-attn3", "bloom": None}
"""Model type that torch's own attention does not support -> the kernel to use instead (None if there is no kernel).

Source: transformers 5.23, models/*/modeling_*.py: _supports_sdpa, _compatible_flash_implementations.
"""


def _write_kernels(plan: Plan) -> Values:
    training = plan.training
    kind = str((config_of(plan.model) or {}).get("model_type"))
    flash = FLASH.get(kind, "sdpa")
    found: dict[str, Value] = {"attn_implementation": flash if training.attention == "flash" else "eager"}
    if training.loss in ("engine", "whole"):
        return found | {"use_liger_kernel": False}
    kernels = {"cross_entropy": training.loss == "fused", "fused_linear_cross_entropy": training.loss == "fused-linear"}
    kernels |= dict.fromkeys(("rope", "rms_norm", "swiglu"), False)
    return found | {"use_liger_kernel": True} | {f"liger_kernel_config.{key}": value for key, value in kernels.items()}


def _read_kernels(given: Given) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if "attn_implementation" in given:
        found["training.attention"] = "unfused" if given.text("attn_implementation") == "eager" else "flash"
    linear = given.flag("liger_kernel_config.fused_linear_cross_entropy", default=True)
    if given.flag("use_liger_kernel"):
        found["training.loss"] = "fused-linear" if linear else "fused"
    return found


def _write_adapters(plan: Plan) -> Values:
    training = plan.training
    if not training.lora_rank:
        return {}
    four, targets = training.frozen_weights == "nf4", training.lora_targets
    every = "all-linear" in targets  # a word that PEFT knows alone, and not in a list
    is_nested = plan.engine.memory.quantised_constants < _FP32_CONSTANTS
    return {
        "use_peft": True,
        "lora_r": training.lora_rank,
        "lora_alpha": 2 * training.lora_rank,
        "lora_dropout": training.lora_dropout,
        "lora_target_modules": "all-linear" if every else tuple(PEFT.get(each, each) for each in targets),
        "load_in_4bit": four,
        **({"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": is_nested} if four else {}),
    }


def _read_adapters(given: Given) -> Mapping[str, Any]:
    rank = given.whole("lora_r", 16 if given.flag("use_peft") else 0)  # TRL's default, trl/trainer/model_config.py
    if not rank or not given.flag("use_peft", default=True):
        return {}
    found: dict[str, Any] = {"training.lora_dropout": given.number("lora_dropout")}
    parts = parts_of(given, "lora_target_modules", "q_proj,v_proj")  # PEFT's for most types, utils/constants.py
    parts += [f"expert_{each}" for each in parts]  # PEFT finds experts, too, though one tensor holds their matrices
    found |= adapters_of(given, "lora_target_modules", rank, parts)
    if given.flag("load_in_4bit"):
        found["training.frozen_weights"] = "nf4"
        found |= {} if given.flag("use_bnb_nested_quant") else {"engine.memory.quantised_constants": _FP32_CONSTANTS}
    return found


_FP32_CONSTANTS: Final = 4 / 64  # bytes per weight: fp32 for each 64 of them, the default of BitsAndBytesConfig
_OF_ADAPTERS: Final = ("lora_rank", "lora_targets", "lora_dropout", "frozen_weights")

SHARED: Final = (
    Setting(says=("model", "training.dropout"), write=_write_model, read=_read_model),
    pair("layout.mbs training.global_batch_size training.sequence_length", _write_batch, _read_batch),
    Setting(says=("training.precision", "training.memory_recipe"), write=_write_precision, read=_read_precision),
    replace(choice("training.optimizer", "optim", OPTIMIZERS), read=_read_optimizer),
    number("training.learning_rate", "learning_rate"),
    Setting(says=tuple(f"training.{name}" for name in _OF_SCHEDULE), write=_write_schedule, read=_read_schedule),
    *numbers(NAMES["numbers"]),
    whole("training.seed", "seed"),
    Setting(says=("training.weights",), write=_write_weights, read=_read_weights),
    Setting(says=("training.attention", "training.loss"), write=_write_kernels, read=_read_kernels),
    Setting(says=tuple(f"training.{name}" for name in _OF_ADAPTERS), write=_write_adapters, read=_read_adapters),
    follows("layout.dp", "layout.mtp", "layout.pools", "layout.segment", "training.loss_chunks"),
    known(*listed(NAMES["known"])),
)


def write_some_layers(layout: Layout) -> Values:
    """A key of `train.py` and `pipeline.py` if only some layers are recomputed."""
    policy = layout.recompute[0]
    return {"recompute": policy} if is_of_some_layers(policy_code(policy)) else {}


REFUSALS: Final = (
    Refusal(says=(), fault=_model_fault),
    *refused(NAMES["refused"]["trainer"]),
    *refusals(NAMES["refuses"]),
)


def render(values: Values, plan: Plan, how: How, further: Mapping[str, Any]) -> dict[str, str]:
    """Files with the model, the training settings and the program that runs the training, name -> text."""
    training = nested({key: value for key, value in values.items() if not key.startswith(_FILES)}) | dict(further)
    stated = training.pop("weights", None)
    data = ["mock"] if how.smoke else list(how.arguments.data or (DATA,))
    tokenizer = "none" if how.smoke else str(how.arguments.tokenizer or TOKENIZER)
    training |= {"data": data, "tokenizer": tokenizer, "output_dir": "run", "remove_unused_columns": False}
    weights = how.arguments.weights or (None if how.smoke else stated)
    training |= {"weights": str(weights)} if weights else {}
    model = nested(values, "config.")
    training |= {"model": MODEL} if is_named(plan) else {}
    return {
        **({} if is_named(plan) else {"config.json": json.dumps(model, indent=2) + "\n"}),
        "training.yaml": yaml.safe_dump(training, sort_keys=False),
        "train.py": TRAIN,
    }


def yours(plan: Plan, how: How) -> dict[str, str]:
    """Placeholder -> meaning, for values that the plan does not decide."""
    found: dict[str, str] = {}
    if is_named(plan):
        found[MODEL] = f"the folder or name of a Hugging Face model, whose config.json is that of {plan.model.name}"
    found |= still_open(NAMES["yours"], how)
    if _write_weights(plan).get("weights") == WEIGHTS and not how.smoke and not how.arguments.weights:
        found[WEIGHTS] = "the weights that the training starts from, or that adapters are trained beside (--weights)"
    return found


IGNORED: Final = listed(NAMES["ignores"])
"""Patterns of keys that do not change the priced bytes and seconds of a step."""
DECISIVE: Final = decisive(NAMES["decides"])
"""Patterns of keys that decide the answer and have no price."""

TRAIN: Final = files("planner.emit.programs").joinpath("train.py.txt").read_text(encoding="utf-8")
"""Source text of the program that Accelerate and DeepSpeed start; only this program imports torch."""


_KEYS: Final = {"ignores": IGNORED, "decides": DECISIVE, "switches": listed(NAMES["switches"])}
OF_TRAINER: Final[dict[str, Any]] = {"yours": yours, "takes": ("data", "tokenizer", "weights"), **_KEYS}
"""What the files of Accelerate and DeepSpeed, which the Trainer runs, have in common."""
