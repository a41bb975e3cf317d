"""Cross entropy without additional buffers: the gradient of the logits is written over the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

ELEMENTS_AT_ONCE = 2**24
"""Number of logits in fp32 at a time: 64 MiB, and another 64 MiB for torch's intermediate results."""


def cross_entropy(logits_TV: Tensor, targets_T: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the tokens of -log softmax(logits)[target], fp32; the backward pass overwrites `logits_TV`.

    group: the ranks that hold equal parts of the vocabulary, in order; None if each rank holds whole rows.

    Source: Shoeybi et al., Megatron-LM (2019), section 3 (ranks exchange two numbers for each token, not the logits);
        Hsu et
    al., Liger Kernel (arXiv 2410.10989; the gradient in place of the logits).
    """
    total: Tensor = _CrossEntropy.apply(logits_TV, targets_T, group)  # type: ignore[no-untyped-call] # torch's
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, group: ProcessGroup | None) -> Tensor:
        rank = 0 if group is None else dist.get_rank(group)
        column_T = targets_T - rank * logits_TV.shape[1]
        here_T = (column_T >= 0) & (column_T < logits_TV.shape[1])
        column_T = torch.where(here_T, column_T, 0)
        wanted_T = logits_TV.gather(1, column_T[:, None])[:, 0].float() * here_T
        log_sum_T = torch.cat([rows.float().logsumexp(1) for rows in _blocks(logits_TV)])
        if group is not None:
            log_sum_T, wanted_T = _over_vocabulary(log_sum_T, wanted_T, group)
        ctx.save_for_backward(logits_TV, column_T, here_T, log_sum_T)
        return (log_sum_T - wanted_T).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Softmax minus one at the target, multiplied by the gradient of the sum."""
        logits_TV, column_T, here_T, log_sum_T = ctx.saved_tensors
        at = 0
        for rows in _blocks(logits_TV):
            block = slice(at, at := at + len(rows))
            softmax = rows.float().sub_(log_sum_T[block, None]).exp_()  # if `rows` is fp32, this is `rows` itself
            softmax.scatter_add_(1, column_T[block, None], -here_T[block, None].float())
            softmax.mul_(grads[0])
            if softmax.dtype != rows.dtype:
                rows.copy_(softmax)
        return logits_TV, None, None


def _blocks(logits_TV: Tensor) -> tuple[Tensor, ...]:
    return torch.split(logits_TV, max(1, ELEMENTS_AT_ONCE // logits_TV.shape[1]))


def _over_vocabulary(log_sum_T: Tensor, wanted_T: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The log-sum and the target's logit over the whole vocabulary, combined from the ranks' parts."""
    own_NT = torch.stack((log_sum_T, wanted_T))
    parts = [torch.empty_like(own_NT) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own_NT, group=group)
    log_sums_RT, wanted_RT = torch.stack(parts, dim=1)
    return log_sums_RT.logsumexp(0), wanted_RT.sum(0)
