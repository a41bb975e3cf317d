"""The norms of the models: an RMSNorm that stores little for the backward pass, and torch's LayerNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from planner.specs.model import ModelSpec


class _LeanRmsNorm(torch.autograd.Function):
    """RMSNorm that stores its input and one number per token, like the fused CUDA kernel.

    torch 2.13 has no fused kernel for CPUs, and its composite form stores two more tensors in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x * scale: dx = scale * (g w - n * mean(g w n)), dw = sum of g n over the tokens."""
        x, weight, scale = ctx.saved_tensors
        grad, normed = grads[0].float(), x.float() * scale
        weighted = grad * weight.float()
        dx = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad * normed).sum(dim=tuple(range(x.ndim - 1))).to(weight.dtype), None


class RmsNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019), with one fused kernel on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale every token (..., width) to a root mean square of one, and multiply it by the weight."""
        if x.is_cuda:
            return super().forward(x)
        result: Tensor = _LeanRmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call] # torch's
        return result


def make_norm(spec: ModelSpec) -> nn.Module:
    """LayerNorm or RMSNorm over the hidden size."""
    kind = nn.LayerNorm if spec.norm == "layernorm" else RmsNorm
    return kind(spec.hidden_size, eps=spec.norm_epsilon)
