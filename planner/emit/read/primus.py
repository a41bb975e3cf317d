"""Readers for YAML of two programs over Megatron-Core: Primus' experiments, and overrides of Megatron-Bridge's recipes.

Source: Primus, examples/megatron/configs, primus/configs/modules/megatron/pre_trainer.yaml (read 2026-11-26);
runner/primus-cli-slurm.sh and primus-cli-slurm-entry.sh; Megatron-Bridge, scripts/training
(`--config-file`), examples/recipes/*/conf.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import decisive, listed, names_beside, translated
from planner.emit.programs import megatron
from planner.emit.programs.bridge import LORA
from planner.emit.programs.hugging_face import flat
from planner.emit.read import HOSTS, MODEL, Reader, torchtitan
from planner.emit.read.megatron import DEFAULTS, engine_of
from planner.emit.read.options import document_of, options_of
from planner.emit.read.overrides import BRIDGE, bridge_values, sizes_of
from planner.emit.read.shell import commands_of
from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.emit.target import Values

_NAMES: Final = names_beside(__file__)
_VARIABLE: Final = re.compile(r"\$\{\w+:([^{}]*)\}")
"""`${NAME:value}`: the value of an environment variable, with the value that stands without it."""
_OF_MEGATRON: Final = re.compile(r"^\s+framework:\s*['\"]?(?!megatron\b)(\w+)", re.MULTILINE)


def _document(text: str) -> dict[str, Any]:
    return document_of(_VARIABLE.sub(lambda match: match[1], text))


def _primus_values(text: str) -> Values:
    """Megatron-Core's options, with those that Primus' own files set before the experiment's."""
    if other := _OF_MEGATRON.search(text):
        hint = "the framework's own file or command can be read"
        words = f"only megatron is read of Primus' frameworks, and not {other[1]}"
        raise InputError(words, where="framework", hint=hint)
    name, config, own = _experiment(text)
    said = {key: value for key, value in flat(own).items() if value is not None}
    said = {key: each for key, each in said.items() if said.get("lora.enabled") or not key.startswith("lora.")}
    base = _NAMES["bases"].get(name)
    before = {**DEFAULTS, **_NAMES["defaults"], **_NAMES["of_module"].get(config, {}), **(base or {})}
    found = {**before, **translated(said, _NAMES)}
    if found.get("moe_enable_deepep"):
        found["moe_token_dispatcher_type"] = "flex"  # noqa: S105 # Primus' own dispatcher takes DeepEP's place in it
    if found.pop("use_torch_fsdp2", False):
        found |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    return found | ({MODEL: name} if name and base is None else {})


def _experiment(text: str) -> tuple[str, str, dict[str, Any]]:
    """The names of the only module's model and base file, and its overrides."""
    modules = _document(text).get("modules")
    runs = [each for each in modules.values() if isinstance(each, dict)] if isinstance(modules, dict) else []
    if len(runs) != 1 or not isinstance(own := runs[0].get("overrides", {}), dict):
        raise InputError("expected one module with its overrides", where="modules")
    return str(runs[0].get("model") or "").removesuffix(".yaml"), str(runs[0].get("config")), own


def _titan_values(text: str) -> Values:
    name, _, own = _experiment(text)
    if name.endswith("fp8"):
        own = {**own, "model": {"converters": ["quantize.linear.float8"], **own.get("model", {})}}
    return {**torchtitan.READER.values(json.dumps(own)), MODEL: name}


def _of_bridge(text: str) -> Values:
    name, _, own = _experiment(text)
    has_adapters = own.get("peft") == "lora"
    said = {key: value for key, value in flat(own).items() if value is not None and (has_adapters or key != "peft_dim")}
    return {**bridge_values(translated(said, _NAMES["bridge"])), MODEL: name.replace("_", "-")}


PRIMUS: Final = Reader(
    **_NAMES["readers"]["megatron"],
    values=_primus_values,
    engine=engine_of,
    target=replace(
        megatron.TARGET,
        settings=(*megatron.TARGET.settings, LORA),
        ignores=(*megatron.TARGET.ignores, *listed(_NAMES["ignores"])),
        decides={**megatron.TARGET.decides, **decisive(_NAMES["decides"])},
    ),
    assumed=lambda values: {"zero": _NAMES["sharded"]} if values.get("use_distributed_optimizer") else {},
)


def _of_command(text: str) -> Values:
    """The sizes and the options of Primus' own command, which calls torchrun, and the name of its experiment."""
    words = next((each for each in commands_of(text) if any(map(_COMMAND.search, each))), [])
    start = words.index("--") if "slurm" in words and "--" in words else 0  # what stands before is Slurm's
    own = translated(options_of([each for each in words[start:] if not each.startswith("${@")]), _NAMES)
    own["config"] = str(own.get("config")).removeprefix("$PWD/")
    hosts = _HOSTS.search(" ".join(words[:start]))
    sizes = sizes_of("\n".join([text, *filter(_SIZE.match, words)]), "GPUS_PER_NODE")
    return {**own, **sizes, **({HOSTS: hosts[1]} if hosts else {})}


_COMMAND: Final = re.compile(r"\bprimus-cli\b|\bprimus/cli/main\.py\b")
_SIZE: Final = re.compile(r"(NNODES|GPUS_PER_NODE)=")
_HOSTS: Final = re.compile(r"\s(?:-N\s*|--nodes[\s=])(\S+)")

PRIMUS_COMMAND: Final = replace(
    PRIMUS, **_NAMES["readers"]["command"], values=_of_command, files={"config": _primus_values}, is_shell=True
)


def _bridge_document(text: str) -> Values:
    return bridge_values({key: value for key, value in flat(_document(text)).items() if value is not None})


BRIDGE_FILE: Final = replace(BRIDGE, **_NAMES["readers"]["overrides"], values=_bridge_document, is_shell=False)


def _through(base: Reader, kind: str, values: Callable[[str], Values], *ignores: str) -> Reader:
    """The reader of a program that Primus starts, whose experiments have further keys without a price."""
    target = replace(base.target, ignores=(*base.target.ignores, *ignores))
    return replace(base, **_NAMES["readers"][kind], values=values, target=target)


PRIMUS_TITAN: Final = _through(torchtitan.READER, "torchtitan", _titan_values, "primus_turbo.*")
PRIMUS_BRIDGE: Final = _through(BRIDGE_FILE, "bridge", _of_bridge, *listed(_NAMES["ignores"]))
READERS: Final = (PRIMUS_COMMAND, PRIMUS_TITAN, PRIMUS_BRIDGE, PRIMUS, BRIDGE_FILE)
