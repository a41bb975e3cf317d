"""The programs that can run plans, each with its table, by the value of `--to`; a table is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.later import Later, at

if TYPE_CHECKING:
    from planner.emit.target import Target

PLACES: Final = {
    "torch": "emit.programs.torch:TARGET",
    "accelerate": "emit.programs.accelerate:TARGET",
    "deepspeed": "emit.programs.deepspeed:TARGET",
    "llama-factory-accelerate": "emit.programs.own_files:LLAMA_FACTORY",
    "llama-factory-deepspeed": "emit.programs.own_files:LLAMA_FACTORY_DEEPSPEED",
    "axolotl-accelerate": "emit.programs.own_files:AXOLOTL",
    "axolotl-deepspeed": "emit.programs.own_files:AXOLOTL_DEEPSPEED",
    "megatron": "emit.programs.megatron:TARGET",
    "megatron-bridge": "emit.programs.bridge:TARGET",
    "ms-swift": "emit.programs.swift:TARGET",
    "primus": "emit.programs.primus:TARGET",
    "torchtitan": "emit.programs.torchtitan:TARGET",
    "torchtitan-0.3": "emit.programs.torchtitan:RELEASE",
}
"""Name of a program -> module and variable of its table."""

PROGRAMS: Final[Later[Target]] = Later(PLACES, lambda name: at(PLACES[name]))
