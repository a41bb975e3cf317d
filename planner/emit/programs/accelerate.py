"""Accelerate 1.15: FSDP2 with tensor and context parallelism; Trainer, TRL, Axolotl and LLaMA-Factory build on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.emit.hosts import num_hosts, uneven_hosts, yaml_file
from planner.emit.names import refusals, refused
from planner.emit.programs import hugging_face as shared
from planner.emit.programs.hugging_face_model import config_of, layer_class
from planner.emit.settings import follows
from planner.emit.target import Refusal, Setting, Target

if TYPE_CHECKING:
    from planner.emit.target import How, Place, Value, Values
    from planner.plan import Plan

FILE: Final = "accelerate.yaml"


def _is_cut_at_load(plan: Plan) -> bool:
    """Whether transformers cuts matrices and experts itself; Accelerate's FSDP then has nothing to shard."""
    return plan.layout.tp > 1 or plan.layout.ep > 1


def _cut_at_load(plan: Plan) -> Values:
    """The layout as keys of transformers' DistributedConfig, and what `train.py` and the Trainer do beside it.

    Source: transformers 5.23, distributed/configuration_utils.py, distributed/fsdp.py.
    """
    layout, training = plan.layout, plan.training
    sizes: dict[str, Value] = {
        "tp_size": layout.tp,
        "ep_size": layout.ep,
        "fsdp_size": layout.dp // layout.hsdp,
        "dp_replicate_size": layout.hsdp,
        "fsdp_mixed_precision": training.precision == "bf16" and training.memory_recipe != "pure-bf16",
    }
    return {
        **{f"{shared.AT_LOAD}{key}": value for key, value in sizes.items()},
        "reshard_after_forward": layout.zero == 3,
        "gradient_checkpointing": layout.recompute[0] == "full",
        "save_only_model": True,  # the Trainer cannot resume a model that is cut at load
    }


def _write_layout(plan: Plan) -> Values:
    """The layout as keys of Accelerate's file, named as in its dataclasses: Accelerate accepts unknown keys silently.

    Source: accelerate, commands/launch.py, parallelism_config.py, utils/dataclasses.py.
    """
    layout, training, is_cut = plan.layout, plan.training, _is_cut_at_load(plan)
    config = config_of(plan.model)
    wrapped = {"fsdp_config.fsdp_transformer_layer_cls_to_wrap": layer_class(config)} if config else {}
    precision = "no" if training.precision == "fp32" or training.memory_recipe == "pure-bf16" else training.precision
    found: dict[str, Value] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if is_cut else "FSDP",
        "mixed_precision": precision,
        "num_machines": num_hosts(plan),
        "num_processes": layout.world_size,
        "machine_rank": 0,
        "rdzv_backend": "static",
    }
    sharded: dict[str, Value] = {
        "fsdp_config.fsdp_version": 2,
        "fsdp_config.fsdp_reshard_after_forward": layout.zero == 3,
        "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **wrapped,  # default: the model's _no_split_modules (accelerate, utils/dataclasses.py)
        "fsdp_config.fsdp_activation_checkpointing": layout.recompute[0] == "full",
        "fsdp_config.fsdp_offload_params": layout.offload == "optimizer",
        "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "parallelism_config.parallelism_config_dp_replicate_size": layout.hsdp,
        "parallelism_config.parallelism_config_dp_shard_size": layout.dp // layout.hsdp,
        "parallelism_config.parallelism_config_cp_size": layout.cp,
    }
    # by default the Trainer reduces gradients once per step and keeps them unsharded until then
    reduced = {"accelerator_config.gradient_accumulation_kwargs.sync_each_batch": True}
    found |= {} if is_cut else sharded
    named = {f"accelerate.{key}": value for key, value in found.items()}
    return {**named, **(_cut_at_load(plan) if is_cut else {}), **reduced, **shared.write_some_layers(layout)}


def _advice(plan: Plan, how: How) -> tuple[str, ...]:  # noqa: ARG001 - as the others
    words = "checkpoints have weights alone: transformers 5.23 cannot resume a model that it cut while loading it"
    return (words,) if _is_cut_at_load(plan) else ()


def _render(values: Values, plan: Plan, how: How) -> dict[str, str]:
    return {FILE: yaml_file(plan, shared.nested(values, "accelerate.")), **shared.render(values, plan, how, {})}


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:  # noqa: ARG001 - the files say them
    words = f"accelerate launch --config_file={FILE}"
    if place is not None:
        words += f" \\\n  --machine_rank={place.number} --main_process_ip={place.address}"
        words += f" --main_process_port={place.port}"
    return f"{words} \\\n  train.py training.yaml"


TARGET: Final = Target(
    name="accelerate",
    program="Accelerate 1.15 with FSDP2 and transformers 5",
    settings=(
        *shared.SHARED,
        follows("layout.layers_per_stage"),  # the only stage has all layers
        Setting(
            says=tuple(f"layout.{key}" for key in ("tp", "cp", "ep", "zero", "hsdp", "recompute", "offload")),
            write=_write_layout,
            read=shared.read_layout,
        ),
    ),
    refuse=(
        *shared.REFUSALS,
        *refusals(shared.NAMES["refuses_of"]["accelerate"]),
        *refused(shared.NAMES["refused"]["accelerate"]),
        Refusal(says=(), fault=uneven_hosts),
    ),
    render=_render,
    command=_command,
    advice=_advice,
    **shared.OF_TRAINER,
    executable="accelerate",
    install="pip install accelerate==1.15.0 transformers datasets, and peft and bitsandbytes for LoRA",
)
