"""The programs that can run plans, each with its table, by the value of `--to`; a table is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from planner.emit.target import Target

PLACES: Final = {
    "torch": "torch:TARGET",
    "accelerate": "accelerate:TARGET",
    "deepspeed": "deepspeed:TARGET",
    "llama-factory-accelerate": "own_files:LLAMA_FACTORY",
    "llama-factory-deepspeed": "own_files:LLAMA_FACTORY_DEEPSPEED",
    "axolotl-accelerate": "own_files:AXOLOTL",
    "axolotl-deepspeed": "own_files:AXOLOTL_DEEPSPEED",
    "megatron": "megatron:TARGET",
    "megatron-bridge": "bridge:TARGET",
    "ms-swift": "swift:TARGET",
    "primus": "primus:TARGET",
    "torchtitan": "torchtitan:TARGET",
    "torchtitan-0.3": "torchtitan:RELEASE",
}
"""Name of a program -> module and variable of its table."""


class _Programs(Mapping[str, "Target"]):
    """Tables by name. A fault in one table concerns only the plans for its program."""

    def __getitem__(self, name: str) -> Target:
        module, _, variable = PLACES[name].partition(":")
        target: Target = getattr(import_module(f"{__name__}.{module}"), variable)
        return target

    def __contains__(self, name: object) -> bool:
        return name in PLACES

    def __iter__(self) -> Iterator[str]:
        return iter(PLACES)

    def __len__(self) -> int:
        return len(PLACES)


PROGRAMS: Final = _Programs()
