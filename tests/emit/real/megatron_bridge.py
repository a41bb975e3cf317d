"""Megatron-Bridge's own recipes and overrides on a machine without GPUs, with stand-ins for packages that it lacks.

A process of its own: `python megatron_bridge.py BRIDGE MEGATRON < jobs.json > understood.json`, with checkouts of
Megatron-Bridge and Megatron-LM. jobs: [world size, config.json as a mapping, words behind run_recipe.py] of each plan.
The answer has the fields of the validated model, training and optimizer configurations.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
import typing
from typing import Any
from unittest.mock import MagicMock

ABSENT = ["transformer_engine", "modelopt", "nvidia_resiliency_ext", "megatron.energon"]
"""Packages that need a GPU to be built; those that an import misses are added."""


class FusedAdam:
    """The arguments of Transformer Engine's optimizer that Megatron-Core looks for."""

    def __init__(
        self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
    ) -> None: ...


class Package(types.ModuleType):
    """A package in which every name exists."""

    __path__: list[str] = []  # noqa: RUF012 - as in modules
    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "FusedAdam":
            return FusedAdam
        setattr(
            self,
            name,
            type(name, (), {"__init__": lambda *_, **__: None}) if name[:1].isupper() else MagicMock(name=name),
        )
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> Any:
        if any(name == each or name.startswith(f"{each}.") for each in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def program(bridge: str, megatron: str) -> Any:
    """scripts/training/run_recipe.py, imported."""
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    sys.path[:0] = [f"{bridge}/src", megatron, f"{bridge}/scripts/training"]
    sys.meta_path.append(Finder())
    for name in ("run_recipe", "megatron.bridge.recipes"):
        while name not in sys.modules:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                ABSENT.append(str(error.name).split(".")[0])
                if ABSENT[-1] == "megatron":
                    raise
    sys.modules["megatron.core.optimizer.optimizer_config"].is_te_min_version = lambda *_, **__: True
    return sys.modules["run_recipe"]


def understood(run_recipe: Any, world: int, config: dict[str, Any], words: list[str]) -> dict[str, Any]:
    from transformers import AutoConfig

    architectures = {
        "llama": ["LlamaForCausalLM"],
        "qwen3_moe": ["Qwen3MoeForCausalLM"],
        "qwen3": ["Qwen3ForCausalLM"],
    }[config["model_type"]]
    plain = AutoConfig.for_model(**config, architectures=architectures)
    AutoConfig.from_pretrained = staticmethod(lambda *_, **__: plain)  # recipes ask the Hub for it
    os.environ["WORLD_SIZE"] = str(world)
    args, overrides = run_recipe.parse_args(words)
    recipe = run_recipe._apply_dataset(run_recipe._load_selected_recipe(args), args)
    recipe = run_recipe.apply_cli_overrides(recipe, overrides)
    recipe = run_recipe.sync_model_pipeline_layout(recipe, cli_overrides=overrides)
    recipe = run_recipe.sync_finetuning_cp_invariants(recipe, mode="pretrain")
    recipe = run_recipe.sync_model_dataset_sequence_length(run_recipe.sync_offline_packing_alignment(recipe))
    recipe.validate()
    kinds = (str, int, float, bool, type(None))
    parts = {part: getattr(recipe, part) for part in ("model", "train", "optimizer", "ddp")}
    nested = getattr(recipe.model, "transformer", None)
    return {
        f"{part}.{field.name}": value
        for part, holder in (*parts.items(), *([("model", nested)] if nested else []))
        for field in dataclasses.fields(holder)
        if isinstance(value := getattr(holder, field.name, None), kinds)
    }


def main() -> None:
    answers, out = [], os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run_recipe = program(*sys.argv[1:])
    for job in json.loads(sys.stdin.read()):
        try:
            answers.append(understood(run_recipe, *job))
        except Exception as error:  # noqa: BLE001 - the test shows it
            answers.append({"refused": f"{type(error).__name__}: {error}"})
    out.write(json.dumps(answers))
    out.flush()


if __name__ == "__main__":
    main()
