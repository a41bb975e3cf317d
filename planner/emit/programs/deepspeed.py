"""DeepSpeed 0.19.8 under transformers' Trainer: ZeRO, AutoTP and Ulysses as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from planner.emit.programs import hugging_face as shared
from planner.emit.starters.torchrun import torchrun_start
from planner.emit.target import Refusal, Target, follows, only
from planner.layout import offloads_activations, offloads_optimizer

if TYPE_CHECKING:
    from planner.emit.target import How, Place, Value, Values
    from planner.plan import Plan

FILE: Final = "deepspeed.json"


def _write_layout(plan: Plan) -> Values:
    """DeepSpeed accepts unknown keys at the top without a word; these are from its own sources.

    Source: deepspeed, runtime/config.py, runtime/zero/config.py, runtime/precision_config.py.
    """
    layout, training = plan.layout, plan.training
    found: dict[str, Value] = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.mbs,
        "gradient_accumulation_steps": layout.num_microbatches(training.global_batch_size),
        "gradient_clipping": training.gradient_clip,
        "bf16.enabled": training.precision == "bf16",
        "fp16.enabled": training.precision == "fp16",
        "zero_optimization.stage": layout.zero,
        "zero_optimization.overlap_comm": layout.zero > 0,
        "zero_allow_untested_optimizer": True,
    }
    if training.memory_recipe == "pure-bf16":
        found |= {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
    if offloads_optimizer(layout):
        found |= {
            "zero_optimization.offload_optimizer.device": "cpu",
            "zero_optimization.offload_optimizer.pin_memory": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    if offloads_activations(layout):
        found["activation_checkpointing.cpu_checkpointing"] = True
    if layout.tp > 1:
        found["tensor_parallel.autotp_size"] = layout.tp
    if layout.cp > 1:
        found["sequence_parallel_size"] = layout.cp
    beside: dict[str, Value] = {"gradient_checkpointing": layout.recompute[0] == "full"}
    if layout.cp > 1:
        beside |= {"parallelism_config.sp_backend": "deepspeed", "parallelism_config.sp_size": layout.cp}
    return {**{f"deepspeed.{key}": value for key, value in found.items()}, **beside}


def _render(values: Values, plan: Plan, how: How) -> dict[str, str]:
    document = json.dumps(shared.nested(values, "deepspeed."), indent=2) + "\n"
    return {FILE: document, **shared.render(values, plan, how, {"deepspeed": FILE})}


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:  # noqa: ARG001 - the files say them
    return f"{torchrun_start(plan, place)} \\\n  train.py training.yaml"


def _offload_fault(plan: Plan) -> tuple[str, str] | None:
    if not offloads_optimizer(plan.layout) or plan.layout.zero:
        return None
    return (
        f"layout.offload is {plan.layout.offload} without ZeRO",
        "plan again with --pin zero=2, or --pin offload=none",
    )


TARGET: Final = Target(
    name="deepspeed",
    program="DeepSpeed 0.19.8 with transformers 5",
    settings=(
        *shared.SHARED,
        follows("layout.layers_per_stage"),  # one stage has all
        shared.layout_setting(
            *(f"layout.{key}" for key in ("tp", "cp", "zero", "recompute", "offload")), write=_write_layout
        ),
    ),
    refuse=(
        *shared.REFUSALS,
        only("layout.pp", 1, why="DeepSpeed's pipelines are code, which the Trainer does not start"),
        only("layout.hsdp", 1, why="DeepSpeed shards gradients and states over all ranks"),
        Refusal(says=(), fault=_offload_fault),
    ),
    render=_render,
    command=_command,
    yours=shared.yours,
    takes=shared.takes(),
    ignores=shared.IGNORED,
    install="pip install deepspeed==0.19.8 transformers accelerate datasets, and peft and bitsandbytes for LoRA",
)
