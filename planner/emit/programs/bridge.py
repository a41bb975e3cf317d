"""Megatron-Bridge (NeMo): write the keys of Megatron-Core's table as overrides of a recipe, `section.key=value`.

Source: Megatron-Bridge 067f987d (2026-08-22), scripts/training/run_recipe.py, scripts/translate_mlm_to_bridge.py,
src/megatron/bridge/training/config.py, mixed_precision.py and peft/lora.py.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from planner.cost.adapters import matrices_of
from planner.emit.adapters import EXPERTS, MEGATRON, adapters_of, parts_of
from planner.emit.names import listed, names_beside, refusals
from planner.emit.programs.hugging_face_model import config_of
from planner.emit.programs.megatron import shown
from planner.emit.programs.megatron_family import DECISIVE, FAMILY, IGNORED, REFUSALS, connections
from planner.emit.settings import not_carried
from planner.emit.starters.torchrun import torchrun_start
from planner.emit.target import Refusal, Setting, Target, matches

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, How, Place, Value, Values
    from planner.plan import Plan

CHECKOUT: Final = "BRIDGE_PATH"
RECIPE: Final = "RECIPE"
DATA: Final = "DATASET"

_NAMES: Final = names_beside(__file__)
SECTIONS: Final = {section: listed(keys) for section, keys in _NAMES["sections"].items()}
"""Section of the configuration -> keys of the table with unchanged names; all other keys belong to section `model`."""

RENAMED: Final[dict[str, str]] = _NAMES["renamed"]
OVERLAP: Final = "comm_overlap.tp_comm_overlap"
"""Section `comm_overlap` of a recipe, if present, replaces the model's value. Source: training/comm_overlap.py."""
INVERTED: Final[dict[str, str]] = _NAMES["inverted"]
_LEFT_OUT: Final = listed(_NAMES["left_out"])
_PRECISIONS: Final[dict[str, dict[str, Value]]] = _NAMES["precisions"]
"""Precision -> keys of the model. An override cannot change a part of a `mixed_precision` that a recipe only names."""
_DTYPES: Final = {"model": ("params_dtype", "pipeline_dtype", "autocast_dtype"), "optimizer": ("params_dtype",)}
_SECTION_OF: Final = {key: section for section, keys in SECTIONS.items() for key in keys}


NEUTRAL: Final[dict[str, Value]] = _NAMES["neutral"]
"""Overrides that reset a recipe's values to Megatron-Core's defaults, for keys that the table does not write."""
NEUTRAL_EXPERTS: Final[dict[str, Value]] = _NAMES["neutral_experts"]


def overrides_for(values: Values, plan: Plan) -> dict[str, Value]:
    """The overrides of a recipe, with dotted keys, for keys and values of the table."""
    found: dict[str, Value] = {"mixed_precision": None, **NEUTRAL, **(NEUTRAL_EXPERTS if plan.model.moe else {})}
    if plan.layout.interleave > 1:
        found["model.virtual_pipeline_model_parallel_size"] = plan.layout.interleave
    is_half = plan.training.precision == "fp16"
    kind = "torch.float16" if is_half else "torch.bfloat16"
    for section, names in _DTYPES.items():
        found |= {f"{section}.bf16": not is_half, f"{section}.fp16": is_half}
        found |= {f"{section}.{name}": kind for name in names}
    found |= _PRECISIONS.get(plan.training.precision, {})
    found["ddp.grad_reduce_in_fp32"] = not values.get("grad_reduce_in_bf16") and (
        not is_half or bool(values.get("accumulate_allreduce_grads_in_fp32"))
    )
    if values.get("fp8_format"):
        gathers = bool(values.get("fp8_param_gather"))
        found |= {"model.fp8_param": gathers, "ddp.fp8_param_gather": gathers}
    for key, value in values.items():
        if key in _LEFT_OUT:
            continue
        if key in INVERTED:
            found[INVERTED[key]] = not value
            if key == "no_check_for_nan_in_loss_and_grad":  # the second check, which graphs of whole steps do not allow
                found["rerun_state_machine.check_for_nan_in_loss"] = not value
        else:
            found[RENAMED.get(key, f"{_SECTION_OF.get(key, 'model')}.{key}")] = value
    found["optimizer.use_distributed_optimizer"] = found["ddp.use_distributed_optimizer"]  # either one switches it on
    found |= _NAMES["with_graphs"] if values.get("cuda_graph_impl", "none") != "none" else {}
    found["model.activation_func"] = "silu" if values.get("swiglu") else "gelu"
    found["model.cpu_offloading"] = bool(values.get("cpu_offloading_num_layers"))
    return {_nested(path): value for path, value in found.items()} if _is_llama(plan) else found


def _is_llama(plan: Plan) -> bool:
    """Whether the model is built as Llama, whose recipes hold most keys of the model in a part of their own.

    Source: src/megatron/bridge/recipes/llama (get_model_config), models/gpt/model_config.py; other recipes have
    providers (to_megatron_provider), which hold all keys.
    """
    return (config_of(plan.model) or {}).get("model_type") == "llama"


def _nested(path: str) -> str:
    section, _, name = path.partition(".")
    return f"{_PART}{name}" if section == "model" and name not in _OUTER else path


_PART: Final = "model.transformer."
_OUTER: Final = listed(_NAMES["outer"])


def family_keys(overrides: Values) -> dict[str, Value]:
    """The table's keys and values for overrides; the inverse of `overrides_for`. Unknown keys keep their names."""
    back = {path: key for key, path in RENAMED.items()} | {OVERLAP: "tp_comm_overlap"}
    turned = {path: key for key, path in INVERTED.items()}
    found: dict[str, Value] = {}
    for given, value in overrides.items():
        path = given.replace(_PART, "model.")
        section, _, name = path.partition(".")
        if path in turned:
            found[turned[path]] = not _is_on(value)
        elif path in back:
            found[back[path]] = value
        elif path == "mixed_precision":
            found |= _precision_keys(str(value)) if value not in (None, "null") else {}
        elif name == "grad_reduce_in_fp32":
            found["grad_reduce_in_bf16"] = not _is_on(value)
        elif path == "model.activation_func":
            found.setdefault("swiglu", value == "silu")
        elif section in ("model", *SECTIONS, "mixed_precision"):
            found["virtual_pipeline_model_parallel_size" if name.startswith("virtual_pipeline") else name] = value
        else:
            found[path] = value
    if found.get("fp16"):
        found["accumulate_allreduce_grads_in_fp32"] = not found.pop("grad_reduce_in_bf16", False)
    return found


def _is_on(value: Value) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")


def _precision_keys(name: str) -> dict[str, Value]:
    rows = _NAMES["precision_names"].items()
    return {key: value for pattern, keys in rows if matches(name, [pattern]) for key, value in keys.items()}


def _modules_of(plan: Plan) -> list[str] | None:
    """Modules that hold the matrices with adapters; None if only some matrices of a module have adapters."""
    wanted, have = set[str](plan.training.lora_targets), set(matrices_of(plan.model))
    modules = {name: parts for name, parts in MEGATRON.items() if plan.model.mla or name != _OF_LATENT}
    own = {module: have & set(parts) for module, parts in modules.items()}
    if "all-linear" in wanted:
        wanted |= {name for name in have if name not in EXPERTS}
    found = [module for module, parts in own.items() if parts and parts <= wanted]
    return found if wanted - {"all-linear"} == set().union(*(own[module] for module in found)) else None


_OF_LATENT: Final = "linear_q_proj"
"""The module that holds the queries of latent attention; in other models `linear_qkv` does."""


def _write_adapters(plan: Plan) -> Values:
    rank = plan.training.lora_rank
    return {"dim": rank, "target_modules": tuple(_modules_of(plan) or ())} if rank else {}


def _read_adapters(given: Given) -> Mapping[str, Any]:
    if "dim" not in given:
        return {}
    parts = parts_of(given, "target_modules", "linear_qkv,linear_proj,linear_fc1,linear_fc2")
    return adapters_of(given, "target_modules", given.whole("dim"), parts)


LORA: Final = Setting(says=("training.lora_rank", "training.lora_targets"), write=_write_adapters, read=_read_adapters)


def _adapters_fault(plan: Plan) -> tuple[str, str] | None:
    if not plan.training.lora_rank or _modules_of(plan):
        return None
    message = f"training.lora_targets is {', '.join(plan.training.lora_targets)}, and its modules hold several matrices"
    hint = "--set training.lora_targets=[query,key,value]: query, key and value are one, and so are gate and up"
    return message, hint


def _write_loss(plan: Plan) -> Values:
    """Options of the loss.

    They are always written, because recipes fuse the loss and the planner's default does not.
    """
    kernel = "te" if plan.training.loss == "fused" else "native"
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": kernel}


def _read_loss(given: Given) -> Mapping[str, Any]:
    given.get("cross_entropy_loss_fusion")
    return {"training.loss": "fused" if given.text("cross_entropy_fusion_impl", "native") == "te" else "engine"}


def _yours(plan: Plan, how: How) -> dict[str, str]:
    found = {f"${CHECKOUT}": "a checkout of Megatron-Bridge of August 2026 or later, set before the script is started"}
    kind = "Llama, whose keys these are" if _is_llama(plan) else f"a model like {plan.model.name}, but not of Llama"
    found[f"${RECIPE}"] = f"the recipe that the overrides change, of {kind}"
    if not how.smoke:
        found[f"${DATA}"] = "the name of a data set of run_recipe.py, or mock"
    return found


def _advice(plan: Plan, how: How) -> tuple[str, ...]:  # noqa: ARG001 - as the others
    if not (plan.engine.overlap.tensor_parallel and plan.layout.tp > 1 and plan.layout.sp):
        return ()
    return (f"{OVERLAP}=true behind the script's options, if the recipe has a section comm_overlap",)


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:
    program = f'"${{{CHECKOUT}:?set it to a checkout of Megatron-Bridge}}/scripts/training/run_recipe.py"'
    data = "mock" if how.smoke else f'"${{{DATA}:?name a data set, or mock}}"'
    mode = "lora" if plan.training.lora_rank else "pretrain"
    lines = [
        torchrun_start(plan, place),
        program,
        f'--recipe "${{{RECIPE}:?name a recipe}}" --mode {mode} --dataset {data}',
        *(shlex.quote(f"{path}={_shown(value)}") for path, value in overrides_for(values, plan).items()),
    ]
    return " \\\n  ".join(lines)


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(map(shown, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else shown(value)


TARGET: Final = Target(
    name="megatron-bridge",
    program="Megatron-Bridge of August 2026 or later, scripts/training/run_recipe.py",
    settings=(
        *FAMILY,
        not_carried("training.weights"),
        Setting(says=("training.loss",), write=_write_loss, read=_read_loss),
        LORA,
    ),
    refuse=(*REFUSALS, *refusals(_NAMES["refuses"]), Refusal(says=(), fault=_adapters_fault)),
    command=_command,
    yours=_yours,
    advice=_advice,
    environment=connections,
    ignores=(*IGNORED, *listed(_NAMES["ignores"])),
    decides=DECISIVE,
    install="git clone https://github.com/NVIDIA-NeMo/Megatron-Bridge, or the container nvcr.io/nvidia/nemo",
)
