"""Layouts of Megatron-Bridge's recipes by name: `python tools/bridge_recipes.py CHECKOUT RELEASE... > recipes.yaml`.

CHECKOUT is a git directory of Megatron-Bridge, each RELEASE a tag or commit, the newest first. Recipes are functions of
plain assignments; they are parsed and never run. A recipe counts if its degrees are numbers that stand in the function
itself, in one that it starts from, or in a constant of its module; one that decides a wanted key by a condition is left
out, and so are adapters. A later release has only the recipes that differ from those of the releases before it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any, Final

import yaml

WANTED: Final = {
    f"cfg.{section}.{key}": f"{section}.{key}"
    for section, keys in {
        "model": (
            "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
            "expert_tensor_parallel_size virtual_pipeline_model_parallel_size sequence_parallel seq_length "
            "recompute_granularity recompute_method recompute_num_layers recompute_modules "
            "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split cpu_offloading "
            "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout"
        ),
        "train": "global_batch_size micro_batch_size",
        "ddp": "use_distributed_optimizer use_megatron_fsdp data_parallel_sharding_strategy",
        "optimizer": "optimizer_cpu_offload use_precision_aware_optimizer",
    }.items()
    for key in keys.split()
} | {"cfg.mixed_precision": "mixed_precision"}
DEGREES: Final = [f"model.{each}_parallel_size" for each in ("tensor_model", "pipeline_model", "context")]
MOST: Final = 30
COMMON: Final = ("_pretrain_common", "_sft_common")
"""What recipes start from: common.py, which says nothing of a layout."""


def git(checkout: str, *words: str) -> str:
    """The output of git."""
    return subprocess.run(["git", "--git-dir", checkout, *words], capture_output=True, text=True, check=True).stdout  # noqa: S607


def value_of(node: ast.expr, constants: dict[str, Any]) -> Any:
    """A constant, a list of constants, or the name of a precision; raises ValueError for anything else."""
    if isinstance(node, ast.Call) and "mixed" in ast.unparse(node) and not node.keywords:
        return value_of(node.args[0], constants) if node.args else ast.unparse(node.func)
    return constants[node.id] if isinstance(node, ast.Name) and node.id in constants else ast.literal_eval(node)


def recipe_of(
    function: ast.FunctionDef, functions: dict[str, ast.FunctionDef], constants: dict[str, Any], depth: int = 0
) -> dict[str, Any] | None:
    """Wanted keys and values of a recipe; None if something else than plain assignments decides one."""
    found: dict[str, Any] = {}
    for line in function.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call) and ast.unparse(line.targets[0]) == "cfg":
            start = ast.unparse(line.value.func)
            if start in functions and depth < MOST:
                inner = recipe_of(functions[start], functions, constants, depth + 1)
            else:
                inner = {} if start in COMMON else None
            if inner is None:
                return None
            found |= inner
        elif isinstance(line, ast.Assign) and (key := WANTED.get(ast.unparse(line.targets[0]))):
            try:
                found[key] = value_of(line.value, constants)
            except ValueError:
                return None
        elif isinstance(line, ast.Expr) and "layout" in ast.unparse(line).partition("(")[0]:
            return None  # stages of its own
        elif isinstance(line, ast.If | ast.For | ast.With) and any(each in ast.unparse(line) for each in WANTED):
            return None
    return found


def recipes_of(checkout: str, release: str) -> dict[str, dict[str, Any]]:
    """Name -> keys and values of all recipes of a release."""
    paths = git(checkout, "ls-tree", "-r", "--name-only", release, "src/megatron/bridge/recipes").split()
    found: dict[str, dict[str, Any]] = {}
    aliases: dict[str, str] = {}
    for path in paths:
        if not path.endswith(".py"):
            continue
        tree = ast.parse(git(checkout, "show", f"{release}:{path}"))
        constants = {}
        for line in tree.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant):
                constants[ast.unparse(line.target)] = line.value.value
            if isinstance(line, ast.ImportFrom):
                aliases |= {each.asname: each.name for each in line.names if each.asname}
        functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        for name, function in functions.items():
            is_recipe = name.endswith("_config") and not name.startswith("_") and "peft" not in name
            told = recipe_of(function, functions, constants) if is_recipe and not function.args.args else None
            if told and "model.pipeline_model_parallel_layout" in told and told["model.pipeline_model_parallel_layout"]:
                continue
            if told and all(isinstance(told.get(key), int) for key in DEGREES):
                found[name] = {key: each for key, each in sorted(told.items()) if each is not None}
    return found | {new: found[old] for new, old in aliases.items() if old in found and new.endswith("_config")}


def main() -> None:
    """Print the document."""
    checkout, *releases = sys.argv[1:]
    print("# Layouts that Megatron-Bridge's recipes set, by release, newest first; written by tools/bridge_recipes.py.")
    print("# A release has only what the newer ones do not have, or have otherwise.")
    newest: dict[str, dict[str, Any]] = {}
    document: dict[str, Any] = {}
    for release in releases:
        told = recipes_of(checkout, release)
        new = {name: recipe for name, recipe in sorted(told.items()) if newest.get(name) != recipe}
        document |= {release.removeprefix("v")[:12]: new} if new else {}
        newest |= told
    print(yaml.safe_dump(document, sort_keys=False, width=118), end="")


if __name__ == "__main__":
    main()
