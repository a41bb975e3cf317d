"""Feed-forward blocks: dense blocks, and mixtures of experts that drop no token.

This module knows nothing about parallelism. A mixture holds whole sequences by default; otherwise `add_counts` adds the
token counts of the ranks that hold the other parts.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from planner.specs.model import ModelSpec

BALANCE = 1e-3
"""Weight of the load-balancing loss: router_aux_loss_coef of transformers' Mixtral and Qwen2-MoE."""


class FeedForward(nn.Module):
    """GELU in tanh form, as in GPT-2, or SwiGLU (Shazeer 2020); from (B, S, hidden) to (B, S, hidden)."""

    def __init__(self, spec: ModelSpec, width: int, *, bias: bool) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.gate = nn.Linear(hidden, width, bias=bias) if spec.activation == "swiglu" else None
        self.up = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)

    def forward(self, x_BSE: Tensor) -> Tensor:
        """Apply the feed-forward network to every position."""
        if self.gate is None:
            inner = F.gelu(self.up(x_BSE), approximate="tanh")
        else:
            inner = F.silu(self.gate(x_BSE)) * self.up(x_BSE)
        result: Tensor = self.down(inner)
        return result


class Experts(nn.Module):
    """The routed experts: one weight tensor for all experts, applied to tokens sorted by expert.

    read: a function that reads a weight; a wrapper may hold more than the plain tensor.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None
        experts, hidden, width = spec.moe.num_experts, spec.hidden_size, spec.moe.ffn_hidden_size
        matrix = functools.partial(torch.empty, experts)
        self.gate = nn.Parameter(matrix(hidden, width)) if spec.activation == "swiglu" else None
        self.up = nn.Parameter(matrix(hidden, width))
        self.down = nn.Parameter(matrix(width, hidden))
        bias = spec.moe.expert_bias
        self.gate_bias = nn.Parameter(matrix(width)) if bias and self.gate is not None else None
        self.up_bias = nn.Parameter(matrix(width)) if bias else None
        self.down_bias = nn.Parameter(matrix(hidden)) if bias else None
        self.read: Callable[[Tensor], Tensor] = lambda weight: weight

    def forward(self, x_TE: Tensor, counts_X: Tensor) -> Tensor:
        """The experts' outputs for rows of tokens, where expert i has `counts_X[i]` consecutive rows."""
        up = self._map(x_TE, self.up, self.up_bias, counts_X)
        if self.gate is None:
            inner = F.gelu(up, approximate="tanh")
        else:
            inner = F.silu(self._map(x_TE, self.gate, self.gate_bias, counts_X)) * up
        return self._map(inner, self.down, self.down_bias, counts_X)

    def _map(self, x_TE: Tensor, weight: Tensor, bias: Tensor | None, counts_X: Tensor) -> Tensor:
        matrices = self.read(weight)
        if x_TE.dtype == torch.bfloat16 and x_TE.is_cuda:  # the grouped kernel takes only 16 bits
            ends = counts_X.cumsum(0).to(torch.int32)
            y: Tensor = F.grouped_mm(x_TE, matrices, offs=ends)
        else:
            runs = torch.split(x_TE, counts_X.tolist())
            y = torch.cat([run @ matrix for run, matrix in zip(runs, matrices, strict=True)])
        return y if bias is None else y + self.read(bias).repeat_interleave(counts_X, dim=0)


class _AddLoss(torch.autograd.Function):
    """Returns x unchanged, and makes the backward pass treat `loss` as a term of the training loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Pass x's gradient on, and give `loss` a gradient of one."""
        return grads[0], torch.ones_like(ctx.saved_tensors[0])


class MixtureOfExperts(nn.Module):
    """Each token passes through its top-k experts (Shazeer et al. 2017) and the shared experts; none is dropped.

    A loss for each sequence balances the experts' load: E / k times the sum over experts of (share of choices) * (mean
    probability), equations 17 to 20 of DeepSeek-V3 (arXiv 2412.19437) with softmax instead of sigmoid. Only the
    gradients contain it, not the reported loss. `balance_weight` is its weight for one sequence: `BALANCE` divided by
    the sequences of a step.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None
        moe = spec.moe
        self.top_k = moe.experts_per_token
        self.router = nn.Linear(spec.hidden_size, moe.num_experts, bias=moe.router_bias)
        self.experts = Experts(spec)
        width = moe.shared_ffn_hidden_size
        self.shared = FeedForward(spec, width, bias=False) if width else None
        self.shared_gate = nn.Linear(spec.hidden_size, 1, bias=False) if moe.shared_gate else None
        self.balance_weight = 0.0
        self.add_counts: Callable[[Tensor], Tensor] = lambda counts: counts

    def forward(self, x_BSE: Tensor) -> Tensor:
        """Apply to every position the experts that its router chooses."""
        scores_BSX = torch.softmax(self.router(x_BSE).float(), dim=-1)
        weights_BSK, chosen_BSK = scores_BSX.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        tokens_TE = x_BSE.flatten(0, 1)
        order = chosen_BSK.flatten().argsort(stable=True)
        counts_BX = F.one_hot(chosen_BSK.flatten(1), scores_BSX.shape[-1]).sum(1)
        routed = self.experts(tokens_TE[order // self.top_k], counts_BX.sum(0))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        routed_TKE = routed[back].unflatten(0, (-1, self.top_k))
        mixed: Tensor = (routed_TKE * weights_BSK.flatten(0, 1).to(routed.dtype)[..., None]).sum(1).view_as(x_BSE)
        if self.shared is not None:
            shared = self.shared(x_BSE)
            mixed = mixed + (shared if self.shared_gate is None else shared * self.shared_gate(x_BSE).sigmoid())
        if not self.training or not self.balance_weight:
            return mixed
        result: Tensor = _AddLoss.apply(mixed, self.balance_weight * self.balance_loss(scores_BSX, counts_BX))  # type: ignore[no-untyped-call] # torch's
        return result

    def balance_loss(self, scores_BSX: Tensor, counts_BX: Tensor) -> Tensor:
        """The balancing loss of the positions on this rank, summed over sequences (DeepSeek-V3, equation 17)."""
        choices_BX = self.add_counts(counts_BX).to(scores_BSX.dtype)
        choices_B1 = choices_BX.sum(-1, keepdim=True)  # k times the positions of a sequence
        share_BX = choices_BX / choices_B1 * scores_BSX.shape[-1]
        mean_BX = scores_BSX.sum(1) * self.top_k / choices_B1
        loss: Tensor = (share_BX * mean_BX).sum()
        return loss


def make_feed_forward(spec: ModelSpec, number: int) -> nn.Module:
    """The feed-forward block of layer `number`."""
    if spec.layer_has_experts(number):
        return MixtureOfExperts(spec)
    return FeedForward(spec, spec.ffn_hidden_size, bias=spec.mlp_bias)
