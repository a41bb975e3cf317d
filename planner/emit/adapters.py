"""Matrices with adapters, by the names that PEFT and Megatron-Core give to modules."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from planner.cost.adapters import matrices_of
from planner.emit.names import names_beside
from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from planner.emit.target import Given

PLAIN: Final = ("query", "key", "value", "output", "gate", "up", "down")
"""Matrices of most models, for a file that names no model."""

EXPERTS: Final = ("expert_gate", "expert_up", "expert_down")

_NAMES: Final = names_beside(__file__)
PEFT: Final[dict[str, str]] = _NAMES["peft"]
"""Matrix -> module of transformers that holds it alone."""

MEGATRON: Final = {module: tuple(parts) for module, parts in _NAMES["megatron"].items()}
"""Module -> matrices that the module fuses."""


_ALL: Final = dict.fromkeys(("all-linear", "all"), ("all-linear",))
MODULES: Final[Mapping[str, tuple[str, ...]]] = {name: (part,) for part, name in PEFT.items()} | MEGATRON | _ALL
"""Module of PEFT or Megatron-Core, or a word for all of them -> matrices that it holds."""


def parts_of(
    given: Given, key: str, default: str, own: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> list[str]:
    """The matrices of the modules that a key names in a list or a text; own: a program's further names.

    Raises:
        InputError: a module that is not known.
    """
    named, known = given.get(key) or default, {**MODULES, **own}
    names = named if isinstance(named, tuple) else re.findall(r"[\w.*-]+", str(named))
    if unknown := [str(each) for each in names if str(each) not in known]:
        raise InputError(f"{unknown[0][:60]!r} has no price here", where=key, hint=f"known: {', '.join(known)}")
    return [part for each in names for part in known[str(each)]]


def adapters_of(given: Given, key: str, rank: int, parts: Iterable[str]) -> Mapping[str, Any]:
    """Adapters of this rank beside those of these matrices that the model has; `all-linear` becomes their names.

    Raises:
        InputError: the model has none of the matrices.
    """
    have = matrices_of(given.model) if given.model is not None else PLAIN
    wanted = set(parts)
    found = [name for name in have if name in wanted or ("all-linear" in wanted and name not in EXPERTS)]
    if not found:
        raise InputError("the model has none of these matrices", where=key, hint=f"known: {', '.join(have)}")
    return {"training.lora_rank": rank, "training.lora_targets": tuple(found)}
