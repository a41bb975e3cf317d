"""Context parallelism: each rank holds two runs of positions of every sequence, one of the head, one of the tail.

The cp ranks cut a sequence into 2 cp runs; rank i takes run i and run 2 cp - 1 - i, so that all have the same share of
the causal square (as Llama 3, arXiv 2407.21783, section 3.3.2, does). Keys and values of all positions are gathered
in every layer; queries stay where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from planner.trainer.model import Block

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from planner.trainer.attention import Positions
    from planner.trainer.model import Transformer


def held_positions(length: int, cp: int, rank: int) -> Positions:
    """The runs of positions that rank `rank` of `cp` holds."""
    size = length // (2 * cp)
    return tuple(range(run * size, (run + 1) * size) for run in (rank, 2 * cp - 1 - rank))


def rows_of(x_BS: Tensor, positions: Positions) -> Tensor:
    """The columns of `x_BS` at these positions."""
    return torch.cat([x_BS[:, run.start : run.stop] for run in positions], dim=1)


class _GatherPositions(torch.autograd.Function):
    """(B, heads, own rows, size) to (B, heads, all positions in order, size); gradients are added and cut again."""

    @staticmethod
    def forward(ctx: Any, x_BHSD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        cp = dist.get_world_size(group)
        gathered = x_BHSD.new_empty(cp, *x_BHSD.shape)
        dist.all_gather(list(gathered.unbind()), x_BHSD.contiguous(), group=group)
        head, tail = gathered.chunk(2, dim=-2)
        runs = torch.cat((head, tail.flip(0)))  # (2 cp, B, heads, rows of a run, size)
        return runs.movedim(0, 2).flatten(2, 3)  # positions in order

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The transpose: every rank's gradient of a run goes to the rank that holds the run."""
        cp = dist.get_world_size(ctx.group)
        runs = torch.stack(grads[0].chunk(2 * cp, dim=2))
        both = torch.cat((runs[:cp], runs[cp:].flip(0)), dim=-2).contiguous()
        own = torch.empty_like(both[0])
        dist.reduce_scatter(own, list(both.unbind()), group=ctx.group)
        return own, None


def apply_context_parallel(part: Transformer, group: ProcessGroup, length: int) -> None:
    """Tell embedding and attention which positions their rows are, and attention how to see the other ranks'."""
    held = held_positions(length, dist.get_world_size(group), dist.get_rank(group))
    if part.embedding is not None:
        part.embedding.held = held
    for block in part.layers.values():
        assert isinstance(block, Block)
        block.attention.held = held
        block.attention.gather = lambda x_BHSD: _GatherPositions.apply(x_BHSD, group)  # type: ignore[no-untyped-call] # torch's
