"""Context parallelism: each rank holds two parts of every sequence, one near its head and one near its tail.

A sequence has 2 cp parts, and rank i holds part i and part 2 cp - 1 - i. Every rank then has the same share of the
causal square, as in Llama 3 (arXiv 2407.21783, section 3.3.2). Every layer gathers the keys and values of all
positions; queries stay on their ranks.
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
    """The ranges of positions that rank `rank` of `cp` holds."""
    size = length // (2 * cp)
    return tuple(range(run * size, (run + 1) * size) for run in (rank, 2 * cp - 1 - rank))


def rows_of(x_BS: Tensor, positions: Positions) -> Tensor:
    """The columns of `x_BS` at these positions."""
    return torch.cat([x_BS[:, run.start : run.stop] for run in positions], dim=1)


class _GatherPositions(torch.autograd.Function):
    """From (B, heads, own rows, size) to (B, heads, all positions in order, size).

    The backward pass adds up the gradients and cuts them again.
    """

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
        """The transpose of the gather: every rank sends the gradient of a part to the rank that holds the part."""
        cp = dist.get_world_size(ctx.group)
        runs = torch.stack(grads[0].chunk(2 * cp, dim=2))
        both = torch.cat((runs[:cp], runs[cp:].flip(0)), dim=-2).contiguous()
        own = torch.empty_like(both[0])
        dist.reduce_scatter(own, list(both.unbind()), group=ctx.group)
        return own, None


def apply_context_parallel(part: Transformer, group: ProcessGroup, length: int) -> None:
    """Set up context parallelism: each rank holds some positions, and attention gathers all keys and values."""
    held = held_positions(length, dist.get_world_size(group), dist.get_rank(group))
    if part.embedding is not None:
        part.embedding.held = held
    for block in part.layers.values():
        assert isinstance(block, Block)
        block.attention.held = held
        block.attention.gather = lambda x_BHSD: _GatherPositions.apply(x_BHSD, group)  # type: ignore[no-untyped-call] # torch's
