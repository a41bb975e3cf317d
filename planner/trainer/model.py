"""Decoder-only transformers of the GPT and Llama families, in plain torch.

Nothing here knows about parallelism. A module counts its own heads from the width that its projections return,
so the same code runs whole and on a tensor-parallel share.
"""

from __future__ import annotations

import functools
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from planner.specs.model import ModelSpec

__all__ = ["Block", "Transformer", "initial_value"]

INITIAL_STD = 0.02  # Radford et al. 2019 (GPT-2); output projections are scaled by 1 / sqrt(2 * num_layers)


@functools.lru_cache(maxsize=4)
def rotary_table(
    length: int, head_size: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of Su et al. 2021 (RoFormer), each of shape (length, head_size), halves repeated.

    Computed in fp32, and shared by all layers.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHSD: Tensor, theta: float) -> Tensor:
    """Rotary position embedding with the halves of a head as the rotated pair (the Hugging Face convention)."""
    cos, sin = rotary_table(x_BHSD.shape[-2], x_BHSD.shape[-1], theta, x_BHSD.device, x_BHSD.dtype)
    first, second = x_BHSD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BHSD * cos + turned * sin


class _LeanRmsNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one number per token, like the fused CUDA kernel.

    torch 2.13 has no such kernel for CPUs: its composite form keeps two more tensors, in fp32.
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
        return dx.to(x.dtype), (grad * normed).sum(dim=(0, 1)).to(weight.dtype), None


class RmsNorm(nn.RMSNorm):
    """Zhang and Sennrich 2019; one fused kernel on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale every token (B, S, hidden) to a root mean square of one, then by the weight."""
        if x.is_cuda:
            return super().forward(x)
        result: Tensor = _LeanRmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call] # torch's
        return result


def make_norm(spec: ModelSpec) -> nn.Module:
    """LayerNorm or RMSNorm over the hidden size."""
    kind = nn.LayerNorm if spec.norm == "layernorm" else RmsNorm
    return kind(spec.hidden_size, eps=spec.norm_epsilon)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads; (B, S, hidden) to (B, S, hidden)."""

    def __init__(self, spec: ModelSpec, *, flash: bool) -> None:
        super().__init__()
        hidden, bias = spec.hidden_size, spec.attention_bias or spec.qkv_bias
        self.query = nn.Linear(hidden, spec.num_heads * spec.head_size, bias=bias)
        self.key = nn.Linear(hidden, spec.num_kv_heads * spec.head_size, bias=bias)
        self.value = nn.Linear(hidden, spec.num_kv_heads * spec.head_size, bias=bias)
        self.output = nn.Linear(spec.num_heads * spec.head_size, hidden, bias=spec.attention_bias)
        self.head_size = spec.head_size
        self.grouped = spec.num_kv_heads != spec.num_heads
        self.theta = spec.rope_theta if spec.position == "rope" else None
        self.flash = flash

    def _heads(self, x_BSE: Tensor) -> Tensor:
        return x_BSE.view(*x_BSE.shape[:-1], -1, self.head_size).transpose(1, 2)

    def forward(self, x_BSE: Tensor) -> Tensor:
        """Mix the sequence's positions, each with those before it."""
        query, key, value = (self._heads(project(x_BSE)) for project in (self.query, self.key, self.value))
        if self.theta is not None:
            query, key = rotate(query, self.theta), rotate(key, self.theta)
        if self.flash:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        else:
            with sdpa_kernel(SDPBackend.MATH):
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return result


class FeedForward(nn.Module):
    """GELU (tanh form, as GPT-2) or SwiGLU (Shazeer 2020); (B, S, hidden) to (B, S, hidden)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, ffn, bias = spec.hidden_size, spec.ffn_hidden_size, spec.mlp_bias
        self.gate = nn.Linear(hidden, ffn, bias=bias) if spec.activation == "swiglu" else None
        self.up = nn.Linear(hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x_BSE: Tensor) -> Tensor:
        """Apply the feed-forward network to every position."""
        if self.gate is None:
            inner = F.gelu(self.up(x_BSE), approximate="tanh")
        else:
            inner = F.silu(self.gate(x_BSE)) * self.up(x_BSE)
        result: Tensor = self.down(inner)
        return result


class Block(nn.Module):
    """One pre-norm transformer layer; with `recompute` the backward pass runs the forward pass again."""

    def __init__(self, spec: ModelSpec, *, flash: bool) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec, flash=flash)
        self.ffn_norm = make_norm(spec)
        self.ffn = FeedForward(spec)
        self.recompute = False

    def _layer(self, x_BSE: Tensor) -> Tensor:
        x_BSE = x_BSE + self.attention(self.attention_norm(x_BSE))
        result: Tensor = x_BSE + self.ffn(self.ffn_norm(x_BSE))
        return result

    def forward(self, x_BSE: Tensor) -> Tensor:
        """Apply the layer; only its input is kept for the backward pass when `recompute` is set."""
        if self.recompute and torch.is_grad_enabled():
            result: Tensor = checkpoint(self._layer, x_BSE, use_reentrant=False, preserve_rng_state=False)
            return result
        return self._layer(x_BSE)


class Embedding(nn.Module):
    """Token embeddings, plus learned positions where the family has them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        learned = spec.position == "learned"
        rows = spec.max_sequence_length + spec.extra_positions
        self.positions = nn.Embedding(rows, spec.hidden_size) if learned else None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Token ids to hidden states (B, S, hidden)."""
        x_BSE: Tensor = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSE = x_BSE + self.positions(torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None])
        return x_BSE


class Transformer(nn.Module):
    """A run of consecutive layers: the whole model, or one chunk of a pipeline.

    Layers keep their number in the whole model, so a parameter has one name in every layout. The first chunk
    also embeds the tokens; the last one returns logits. Tied embeddings that fall into different chunks are
    two parameters: the trainer keeps them equal.
    """

    def __init__(
        self, spec: ModelSpec, *, layers: range | None = None, first: bool = True, last: bool = True, flash: bool = True
    ) -> None:
        super().__init__()
        numbers = range(spec.num_layers) if layers is None else layers
        self.embedding = Embedding(spec) if first else None
        self.layers = nn.ModuleDict({str(number): Block(spec, flash=flash) for number in numbers})
        self.norm = make_norm(spec) if last else None
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False) if last else None
        self.tied = spec.tied_embeddings and first and last
        self.tie()

    def tie(self) -> None:
        """Make head and token embedding one parameter again (after a wrapper replaced either)."""
        if self.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, S), or hidden states from the chunk before, to hidden states or logits (B, S, vocab)."""
        x = x if self.embedding is None else self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def canonical_name(name: str, spec: ModelSpec) -> str:
    """The name under which a parameter is seeded and saved: a tied head is the token embedding."""
    return "embedding.tokens.weight" if spec.tied_embeddings and name == "head.weight" else name


@torch.no_grad()
def initial_value(
    name: str, shape: torch.Size, spec: ModelSpec, *, seed: int, device: torch.device | None = None
) -> Tensor:
    """The first value of the whole parameter `name`, fp32; depends on name and seed, never on the layout."""
    name = canonical_name(name, spec)
    if "norm" in name:
        return (torch.zeros if name.endswith("bias") else torch.ones)(shape, device=device)
    if name.endswith("bias"):
        return torch.zeros(shape, device=device)
    last = name.endswith(("attention.output.weight", "ffn.down.weight"))
    std = INITIAL_STD / math.sqrt(2 * spec.num_layers) if last else INITIAL_STD
    generator = torch.Generator(device=device or "cpu").manual_seed((seed << 32) + zlib.crc32(name.encode()))
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
