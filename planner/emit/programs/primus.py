"""Primus over Megatron-LM: write keys of Megatron-Core's table as the overrides of an experiment.

Source: Primus fd1eeabb (2026), primus/configs/modules/megatron/pre_trainer.yaml, models/megatron/language_model.yaml,
runner/primus-cli-direct.sh. An override has the name of an argument of Megatron-LM, not that of its option.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from planner.emit.hosts import yaml_file
from planner.emit.names import names_beside, refusals, translated
from planner.emit.programs.megatron import TARGET as MEGATRON
from planner.emit.programs.megatron import data_of, yours_of

if TYPE_CHECKING:
    from planner.emit.target import How, Place, Values
    from planner.plan import Plan

CHECKOUT: Final = "PRIMUS_PATH"
FILE: Final = "primus.yaml"
_NAMES: Final = names_beside(__file__)


def overrides_for(values: Values) -> dict[str, Any]:
    """The overrides of an experiment: Megatron-LM's defaults where Primus has others, and the values of the table."""
    given = {key: value for key, value in values.items() if value is not None}
    found = {**_NAMES["neutral"], **translated(given, _NAMES)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def _render(values: Values, plan: Plan, how: How) -> dict[str, str]:
    module = {**_NAMES["module"], "overrides": overrides_for({**values, **data_of(plan, how)})}
    document = {**_NAMES["experiment"], "exp_name": plan.model.name, "modules": {"pre_trainer": module}}
    return {FILE: yaml_file(plan, document)}


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:  # noqa: ARG001 - as the others
    """The command of Primus, which calls torchrun itself; torchrun's settings are environment variables."""
    where = f"NNODES=1 GPUS_PER_NODE={plan.layout.world_size}"
    if place is not None:
        where = f"NNODES={place.hosts} GPUS_PER_NODE={place.ranks} NODE_RANK={place.number} \\\n"
        where += f"  MASTER_ADDR={place.address} MASTER_PORT={place.port}"
    program = f'"${{{CHECKOUT}:?set it to a checkout of Primus}}/runner/primus-cli"'
    return f'env {where} \\\n  {program} direct -- train pretrain --config "$PWD/{FILE}"'


def _yours(plan: Plan, how: How) -> dict[str, str]:
    own = {key: text for key, text in yours_of(plan, how).items() if not key.startswith("$")}
    return {f"${CHECKOUT}": "a checkout of Primus with its submodules, set before the script is started", **own}


TARGET: Final = replace(
    MEGATRON,
    name="primus",
    program="Primus of August 2026 or later, over Megatron-LM",
    refuse=(*MEGATRON.refuse, *refusals(_NAMES["refuses"])),
    render=_render,
    command=_command,
    yours=_yours,
    install="git clone --recursive https://github.com/AMD-AGI/Primus, or the container docker.io/rocm/primus",
)
