"""ms-swift (Megatron-SWIFT): the table of Megatron-Core as options of `megatron sft`, whose model comes from the hub.

Source: ms-swift 4.6 (3602360a, 2026-08-22), swift/megatron/arguments/megatron_args.py.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from planner.emit.programs.megatron import TARGET as MEGATRON
from planner.emit.programs.megatron import as_flags
from planner.emit.programs.megatron_family import FAMILY, IGNORED
from planner.emit.programs.megatron_model import MODEL
from planner.emit.target import Target, only

if TYPE_CHECKING:
    from planner.emit.target import How, Place, Value, Values
    from planner.plan import Plan

HUB_MODEL: Final = "MODEL"
DATA: Final = "DATASET"
_OF_THE_HUB: Final = ("attention_dropout", "hidden_dropout")
"""Options that it does not have, because the model's configuration says them."""
_NOT_THERE: Final = ("overlap_cpu_optimizer_d2h_h2d",)
RENAMED: Final = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "seq_length": "max_length",
}
DEFAULTS: Final[dict[str, Value]] = {
    "micro_batch_size": "1",
    "global_batch_size": "16",
    "recompute_granularity": "selective",
    "use_distributed_optimizer": "true",
    "expert_tensor_parallel_size": "1",
    "attention_backend": "flash",
    "attention_dropout": "0",
    "hidden_dropout": "0",
    "bf16": "true",
}
"""What users have who set nothing, where Megatron-LM has something else."""


def _keys(plan: Plan) -> set[str]:
    return {key for setting in MODEL for key in setting.write(plan)}


def options_for(values: Values, plan: Plan) -> dict[str, Value]:
    """Options of `megatron sft` for the table's keys and values; its defaults that a plan does not want are written."""
    model = _keys(plan)
    kept = {key: value for key, value in values.items() if key not in (*model, *_OF_THE_HUB, *_NOT_THERE)}
    found: dict[str, Value] = {RENAMED.get(key, key): value for key, value in kept.items()}
    if plan.model.mtp_layers:
        found["mtp_num_layers"] = plan.model.mtp_layers
    if "recompute_granularity" not in found:
        found["recompute_granularity"] = "none"
    if not plan.layout.zero:
        found["use_distributed_optimizer"] = "false"
    return found | {"packing": True}


def _yours(plan: Plan, how: How) -> dict[str, str]:
    found = {HUB_MODEL: f"the model on the hub, as {plan.model.name}"}
    return found if how.arguments.data else found | {DATA: "a data set of ms-swift (--data)"}


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:
    """`megatron sft` calls torchrun itself, which reads its place from the environment."""
    options = "".join(f" \\\n  {shlex.join(words)}" for words in as_flags(options_for(values, plan), dashes=False))
    data = shlex.join(how.arguments.data or (DATA,))
    where = f"NPROC_PER_NODE={plan.layout.world_size}"
    if place is not None:
        where = (
            f"NNODES={place.hosts} NODE_RANK={place.number} MASTER_ADDR={place.address} MASTER_PORT={place.port} \\\n"
        )
        where += f"  NPROC_PER_NODE={place.ranks}"
    return f"env {where} \\\n  megatron sft --model {HUB_MODEL} --dataset {data}{options}"


_RECIPES: Final = ("engine", "megatron-18", "precision-aware-fp32", "precision-aware", "fp8-moments")

TARGET: Final = Target(
    name="ms-swift",
    program="ms-swift 4.6 or later, megatron sft",
    settings=FAMILY,
    refuse=(
        *MEGATRON.refuse,
        only("training.dropout", 0.0, why="the model's own configuration says it"),
        only("training.cuda_graphs", "none", why="ms-swift has no option for it"),
        only("training.expert_overlap", False, why="ms-swift has no option for it"),
        only(
            "layout.offload",
            "none",
            "optimizer",
            why="ms-swift offloads optimizer states alone",
            pin="--pin offload=none",
        ),
        only("layout.hsdp", 1, why="ms-swift has no option for it"),
        only("training.memory_recipe", *_RECIPES, why="ms-swift sums gradients in fp32"),
        only("training.precision", "bf16", "fp16", "fp8", why="ms-swift has no option for it", pin="--precision bf16"),
    ),
    command=_command,
    yours=_yours,
    takes=("data",),
    environment=MEGATRON.environment,
    ignores=(
        *IGNORED,
        "dataset*",
        "output_dir",
        "*_steps",
        "num_train_epochs",
        "packing",
        "padding_free",
        "train_type",
        "tuner_type",
        "attn_impl",
        "cached_*",
        "columns",
        "sys*",
        "save_*",
        "template",
        "use_hf",
        "*_format",
    ),
    executable="megatron",
    install="pip install ms-swift",
)
