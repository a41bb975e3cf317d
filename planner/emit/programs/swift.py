"""ms-swift (Megatron-SWIFT): write keys of Megatron-Core's table as options of `megatron sft`; the model is on the Hub.

Source: ms-swift 4.6 (3602360a, 2026-08-22), swift/megatron/arguments/megatron_args.py.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from planner.emit.adapters import EXPERTS, adapters_of, parts_of
from planner.emit.names import listed, names_beside, refusals, translated
from planner.emit.programs.megatron import TARGET as MEGATRON
from planner.emit.programs.megatron import as_flags
from planner.emit.programs.megatron_family import FAMILY, IGNORED, LOSS
from planner.emit.programs.megatron_model import MODEL
from planner.emit.settings import not_carried
from planner.emit.target import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, How, Place, Value, Values
    from planner.plan import Plan

HUB_MODEL: Final = "MODEL"
DATA: Final = "DATASET"
_NAMES: Final = names_beside(__file__)
DEFAULTS: Final[dict[str, Value]] = _NAMES["defaults"]
"""Defaults of ms-swift's options that differ from Megatron-LM's defaults."""


def options_for(values: Values, plan: Plan) -> dict[str, Value]:
    """Options of `megatron sft` for keys and values of the table, including defaults that the plan overrides."""
    model = {key for setting in MODEL for key in setting.write(plan)}
    found = translated({key: value for key, value in values.items() if key not in model}, _NAMES["options"])
    if plan.model.mtp_layers:
        found["mtp_num_layers"] = plan.model.mtp_layers
    found.setdefault("recompute_granularity", "none")
    if not plan.layout.zero:
        found["use_distributed_optimizer"] = "false"
    return found | {"packing": True}


def _yours(plan: Plan, how: How) -> dict[str, str]:
    found = {HUB_MODEL: f"the model on the hub, as {plan.model.name}"}
    return found if how.arguments.data else found | {DATA: "a data set of ms-swift (--data)"}


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:
    """The command `megatron sft`, which calls torchrun itself; torchrun's settings are environment variables."""
    options = "".join(f" \\\n  {shlex.join(words)}" for words in as_flags(options_for(values, plan), dashes=False))
    data = shlex.join(how.arguments.data or (DATA,))
    where = f"NPROC_PER_NODE={plan.layout.world_size}"
    if place is not None:
        where = f"NNODES={place.hosts} NODE_RANK={place.number} MASTER_ADDR={place.address}"
        where += f" MASTER_PORT={place.port} \\\n  NPROC_PER_NODE={place.ranks}"
    return f"env {where} \\\n  megatron sft --model {HUB_MODEL} --dataset {data}{options}"


def _read_adapters(given: Given) -> Mapping[str, Any]:
    """The adapters; ms-swift's default is rank 8 on all matrices of the layers."""
    kinds = {given.text("tuner_type"), given.text("train_type")}
    rank = given.whole("lora_rank", 8)
    parts = parts_of(given, "target_modules", "all-linear", {"all-linear": ("all-linear", *EXPERTS)})
    given.get("lora_alpha")
    return adapters_of(given, "target_modules", rank, parts) if "lora" in kinds else {}


TARGET: Final = replace(
    MEGATRON,
    name="ms-swift",
    program="ms-swift 4.6 or later, megatron sft",
    settings=(
        *FAMILY,
        LOSS,
        not_carried("training.weights"),
        Setting(says=("training.lora_rank",), write=lambda plan: {}, read=_read_adapters),  # noqa: ARG005 - read only
    ),
    refuse=(*MEGATRON.refuse, *refusals(_NAMES["refuses"])),
    command=_command,
    yours=_yours,
    takes=("data",),
    ignores=(*IGNORED, *listed(_NAMES["ignores"])),
    executable="megatron",
    install="pip install ms-swift",
)
