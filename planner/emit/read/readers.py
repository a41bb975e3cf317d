"""The readers for all kinds of foreign files, in the order in which they are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.emit.read import hugging_face, megatron, nemo_rl, overrides, primus, torchtitan, verl

if TYPE_CHECKING:
    from planner.emit.read import Reader

READERS: Final[tuple[Reader, ...]] = (
    torchtitan.READER,
    torchtitan.COMMAND,
    verl.READER,
    verl.FILE,
    verl.SFT,
    overrides.SWIFT,
    overrides.BRIDGE,
    primus.PRIMUS_COMMAND,
    primus.PRIMUS_TITAN,
    primus.PRIMUS_BRIDGE,
    primus.PRIMUS,
    primus.BRIDGE_FILE,
    megatron.READER,
    nemo_rl.READER,
    *hugging_face.READERS,
)
