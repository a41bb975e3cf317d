"""The readers for all kinds of foreign files, in the order in which they are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.emit.read import hugging_face, megatron, nemo_rl, overrides, primus, torchtitan, verl

if TYPE_CHECKING:
    from planner.emit.read import Reader

READERS: Final[tuple[Reader, ...]] = (
    torchtitan.READER,
    torchtitan.COMMAND,
    *verl.READERS,
    overrides.SWIFT,
    overrides.BRIDGE,
    *primus.READERS,
    megatron.READER,
    nemo_rl.COMMAND,
    nemo_rl.READER,
    *hugging_face.READERS,
)
