"""The starters, which start a program on the hosts, by the value of `--on`; a module is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.later import Later, at

if TYPE_CHECKING:
    from planner.emit.start import Starter

STARTERS: Final[Later[Starter]] = Later(
    dict.fromkeys(("torchrun", "slurm", "kubeflow", "skypilot")), lambda name: at(f"emit.starters.{name}:STARTER")
)
