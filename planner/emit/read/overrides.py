"""Overrides of Megatron-Bridge and verl (`section.key=value`), and the command line of ms-swift."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.emit.names import names_beside, translated
from planner.emit.programs import bridge, swift
from planner.emit.read import HOSTS, MODEL, OF_RECIPE, RANKS, Reader
from planner.emit.read.options import option_words, options_of, overrides_of
from planner.emit.read.shell import commands_of

if TYPE_CHECKING:
    from planner.emit.target import Values

_NAMES: Final = names_beside(__file__)
_RECIPES: Final = str(Path(__file__).with_name("recipes"))
_MIXED: Final = re.compile(r"['\"]?mixed_precision=([\w]+)")


def _bridge_command(text: str) -> Values:
    words = option_words(text)
    named = (match[1] for word in words if (match := _MIXED.fullmatch(word.strip("'\""))))
    own = overrides_of(words)
    recipe = recipe_of(str(own.get("recipe")))
    return bridge_values({**recipe, **own}, next(named, str(recipe.get("mixed_precision", "bf16_mixed"))))


def recipe_of(name: str) -> Values:
    """The keys and values of a recipe with this name in the newest release that has it; empty if none is known."""
    if not name.endswith("_config"):
        return {}
    releases = names_beside(_RECIPES)
    release = next((each for each, recipes in releases.items() if name in recipes), "")
    return {**_NAMES["plain"], **releases[release][name], OF_RELEASE: release} if release else {}


def recipe_names() -> set[str]:
    """The names of all recipes that are known."""
    return {name for recipes in names_beside(_RECIPES).values() for name in recipes}


OF_RELEASE: Final = "launch.recipe"
"""Key for the release whose recipe gave what a script leaves open."""


def bridge_values(overrides: Values, mixed: str = "bf16_mixed") -> Values:
    """Keys and values of a recipe's overrides, with the defaults of the recipes: gradient sums in 16 bits.

    mixed: the name of the recipe's precision.
    """
    own = dict(overrides)
    recipe, model = own.pop("recipe", None), own.pop("model", None)
    said = translated(bridge.family_keys(translated(own, _NAMES["launcher"])), _NAMES["short"])
    found = {**_NAMES["defaults"], **bridge.family_keys({"mixed_precision": mixed}), **said}
    name = str(model or recipe or "")
    stem = re.sub(r"_(pretrain|sft|peft|lora|dora).*$", "", name).replace("_", "-")
    return found | ({MODEL: stem} if stem else {})


def _assumed(values: Values) -> dict[str, str]:
    if release := values.get(OF_RELEASE):
        return {"recompute": f"as the recipe of Megatron-Bridge {release}, like all that the file does not say"}
    return {key: OF_RECIPE for key, name in _NAMES["degrees"].items() if name not in values}


BRIDGE: Final = Reader(
    **_NAMES["readers"]["bridge"],
    values=_bridge_command,
    engine=lambda values: "megatron-bridge",  # noqa: ARG005 - as the others
    target=bridge.TARGET,
    assumed=_assumed,
)


def sizes_of(text: str, ranks: str = "NPROC_PER_NODE") -> Values:
    """The numbers of hosts and ranks that a script of ms-swift, or of another program, has in its environment."""
    sizes = options_of(commands_of(f"{text}\n: --nnodes=${{NNODES:-}} --nproc-per-node=${{{ranks}:-}}")[-1])
    return {key: sizes[key] for key in (HOSTS, RANKS) if sizes.get(key)}


def _swift_values(text: str) -> Values:
    """Keys and values of an ms-swift command, with ms-swift's defaults and the number of ranks from its environment."""
    own = options_of(option_words(text))
    own = {key: value for key, value in own.items() if value != "none" or key == "recompute_granularity"}
    found = translated({**swift.DEFAULTS, **own}, _NAMES["ms_swift"])
    found |= sizes_of(text)
    if re.search(r"\bmegatron\s+rlhf\b", text):
        found.setdefault("rlhf_type", "dpo")
        found.setdefault("use_vllm", found["rlhf_type"] == "grpo")  # Megatron-Core generates nothing
    return found


SWIFT: Final = Reader(
    **_NAMES["readers"]["ms_swift"],
    values=_swift_values,
    engine=lambda values: "megatron",  # noqa: ARG005 - as the others
    target=swift.TARGET,
)
