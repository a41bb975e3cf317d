"""DeepSpeed 0.19.8: ZeRO, AutoTP and Ulysses as JSON for transformers' Trainer; another program runs pipelines."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from planner.emit.names import implied, names_beside, refusals, refused
from planner.emit.programs import hugging_face as shared
from planner.emit.settings import pair, whole
from planner.emit.starters.torchrun import torchrun_start
from planner.emit.target import Target

if TYPE_CHECKING:
    from planner.emit.target import How, Place, Value, Values
    from planner.plan import Plan

FILE: Final = "deepspeed.json"
PIPELINE: Final = files("planner.emit.programs").joinpath("pipeline.py.txt").read_text(encoding="utf-8")
"""Source text of the program that runs plans with a pipeline; it reads model and data in the same way as `train.py`."""


def _write_layout(plan: Plan) -> Values:
    """The layout as keys of DeepSpeed's file, named as in its sources: DeepSpeed accepts unknown top keys silently.

    Source: deepspeed, runtime/config.py, runtime/zero/config.py, runtime/precision_config.py.
    """
    layout, training = plan.layout, plan.training
    # transformers counts a batch for each rank of a tensor-parallel group, and Accelerate for one of ZeRO's; where the
    # batch is not given, both leave it to DeepSpeed
    found: dict[str, Value] = {
        **({"train_batch_size": training.global_batch_size} if layout.tp * layout.cp == 1 else {}),
        "train_micro_batch_size_per_gpu": layout.mbs,
        "gradient_accumulation_steps": layout.num_microbatches(training.global_batch_size),
        "gradient_clipping": training.gradient_clip,
        "bf16.enabled": training.precision == "bf16",
        "fp16.enabled": training.precision == "fp16",
        "zero_optimization.stage": layout.zero,
        "zero_optimization.overlap_comm": layout.zero > 0 and layout.pp == 1,  # pipelines reduce after the last pass
        "zero_allow_untested_optimizer": True,
    }
    if layout.tp > 1:
        found["tensor_parallel.autotp_size"] = layout.tp
    checkpoints = layout.recompute[0] == "full"
    beside: dict[str, Value] = {"gradient_checkpointing": checkpoints, **shared.write_some_layers(layout)}
    if layout.cp > 1:
        found["sequence_parallel_size"] = layout.cp
        beside |= {"parallelism_config.sp_backend": "deepspeed", "parallelism_config.sp_size": layout.cp}
        beside |= {"parallelism_config.dp_shard_size": layout.dp}
    if layout.pp > 1:
        beside["pipeline.layers_per_stage"] = layout.layers_per_stage
    return {**{f"deepspeed.{key}": value for key, value in found.items()}, **beside}


def _render(values: Values, plan: Plan, how: How) -> dict[str, str]:
    document = json.dumps(shared.nested(values, "deepspeed."), indent=2) + "\n"
    program = {"pipeline.py": PIPELINE} if plan.layout.pp > 1 else {}
    return {FILE: document, **shared.render(values, plan, how, {"deepspeed": FILE}), **program}


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:  # noqa: ARG001 - the files say them
    program = "pipeline.py" if plan.layout.pp > 1 else "train.py"
    return f"{torchrun_start(plan, place)} \\\n  {program} training.yaml"


TARGET: Final = Target(
    name="deepspeed",
    program="DeepSpeed 0.19.8 with transformers 5",
    settings=(
        *shared.SHARED,
        pair(
            "layout.tp layout.pp layout.cp layout.zero layout.layers_per_stage layout.recompute layout.offload",
            _write_layout,
            shared.read_layout,
        ),
        *implied(names_beside(__file__)["implied"]),
        whole("training.mlp_tiles", "mlp_tiles", absent=1),
    ),
    refuse=(
        *shared.REFUSALS,
        *refused(shared.NAMES["refused"]["deepspeed"]),
        *refusals(shared.NAMES["refuses_of"]["deepspeed"]),
    ),
    render=_render,
    command=_command,
    **shared.OF_TRAINER,
    install="pip install deepspeed==0.19.8 transformers accelerate datasets, and peft and bitsandbytes for LoRA",
)
