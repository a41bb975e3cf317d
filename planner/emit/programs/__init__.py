"""The programs that can run plans, each with its table, by the value of `--to`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.emit.programs import accelerate, bridge, deepspeed, megatron, swift, torch, torchtitan

if TYPE_CHECKING:
    from planner.emit.target import Target

PROGRAMS: Final[dict[str, Target]] = {
    each.name: each
    for each in (
        torch.TARGET,
        accelerate.TARGET,
        deepspeed.TARGET,
        megatron.TARGET,
        bridge.TARGET,
        swift.TARGET,
        torchtitan.TARGET,
        torchtitan.RELEASE,
    )
}  # fmt: skip
