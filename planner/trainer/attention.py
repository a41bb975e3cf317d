"""Causal self-attention: grouped heads, latent attention, sliding windows, rotary positions.

This module knows nothing about parallelism. An attention block derives its number of heads from the width of its
projections. By default it holds all positions; `held` names the positions of its rows, and `gather` collects the keys
and values of all positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from planner.trainer.norms import RmsNorm

if TYPE_CHECKING:
    from torch import Tensor

    from planner.specs.blocks import RotaryScaling
    from planner.specs.model import ModelSpec

Positions = tuple[range, ...]
"""Ranges of positions in the sequence, in the order of the rows."""

Gather = Callable[[torch.Tensor], torch.Tensor]
"""A function from the rank's own rows (B, heads, rows, size) to the rows of all positions, in order."""

Mask = torch.Tensor | BlockMask
"""The keys that each query may attend to, as (B, 1, rows, T) or as blocks for a kernel that skips the other blocks."""


def positions_of(length: int) -> Positions:
    """All positions of an undivided sequence."""
    return (range(length),)


def rotary_frequencies(
    head_size: int, theta: float, scaling: RotaryScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Radians per position of each rotated pair (Su et al. 2021), in fp32; `scaling` reduces low frequencies.

    Llama 3.1 (`apply_scaling` of its reference code) keeps the frequency of waves that fit at least `high_frequency`
    times into the original length. Waves that fit at most `low_frequency` times have their frequency divided. Between
    the two limits the frequencies are blended.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    plain: Tensor = theta**-exponents
    if scaling is None:
        return plain
    turns = scaling.original_max_sequence_length * plain / (2 * math.pi)
    band = max(scaling.high_frequency - scaling.low_frequency, 1e-6)  # empty in Llama 4 Scout
    kept = (turns - scaling.low_frequency) / band
    return torch.lerp(plain / scaling.factor, plain, kept.clamp(0, 1))


@functools.lru_cache(maxsize=8)
def rotary_table(
    positions: Positions,
    head_size: int,
    theta: float,
    scaling: RotaryScaling | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary positions, each of shape (positions, head_size), with the halves repeated.

    The tables are computed in fp32, and all layers share them.
    """
    rows = torch.cat([torch.arange(r.start, r.stop, dtype=torch.float32, device=device) for r in positions])
    angles = torch.outer(rows, rotary_frequencies(head_size, theta, scaling, device))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(
    x_BHSD: Tensor, theta: float, positions: Positions | None = None, scaling: RotaryScaling | None = None
) -> Tensor:
    """Rotary position embedding with the halves of a head as the rotated pair (the Hugging Face convention)."""
    runs = positions or positions_of(x_BHSD.shape[-2])
    cos, sin = rotary_table(runs, x_BHSD.shape[-1], theta, scaling, x_BHSD.device, x_BHSD.dtype)
    first, second = x_BHSD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BHSD * cos + turned * sin


@functools.lru_cache(maxsize=64)
def _visible(rows: range, keys: range, window: int, device: torch.device) -> Tensor:
    """Whether each query of `rows` may attend to each key: a key at its own position, or at an earlier one.

    A key must be less than `window` positions earlier; 0 means no limit.
    """
    distance = torch.arange(rows.start, rows.stop, device=device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=device)
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _blocks(positions: Positions, window: int) -> Positions:
    """Ranges of positions no longer than a window, so that each range needs the keys of at most two windows."""
    if not window:
        return positions
    return tuple(
        range(at, min(at + window, run.stop)) for run in positions for at in range(run.start, run.stop, window)
    )


def document_mask(starts_BT: Tensor, positions: Positions, window: int, *, blocks: bool) -> Mask:
    """A mask by which a query attends only to its own document, to no later position and to no key outside the window.

    starts_BT: for each position of the sequence, the start of its document.
    window: number of positions; 0 means no window.
    blocks: make the mask in blocks, for flex attention.
    """
    device, length = starts_BT.device, starts_BT.shape[1]
    rows = torch.cat([torch.arange(run.start, run.stop, device=device) for run in positions])
    if not blocks:
        causal = torch.cat([_visible(run, range(length), window, device) for run in positions])
        return ((torch.arange(length, device=device) >= starts_BT[:, rows, None]) & causal)[:, None]
    starts_BR = starts_BT[:, rows]

    def visible(batch: Tensor, _: Tensor, row: Tensor, key: Tensor) -> Tensor:
        distance = rows[row] - key
        return (distance >= 0) & (distance < (window or length)) & (key >= starts_BR[batch, row])

    mask: BlockMask = _compiled(create_block_mask)(visible, len(starts_BT), None, len(rows), length, device)
    return mask


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function; flex attention without compilation computes the whole square."""
    return torch.compile(function, dynamic=False)


def attend(
    query_BHSD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    positions: Positions,
    window: int,
    mask: Mask | None = None,
) -> Tensor:
    """Softmax attention of the queries at `positions` to the keys of all earlier positions, or of the window.

    mask: a mask from `document_mask`, which replaces these rules.
    """
    length = key_BHTD.shape[-2]
    grouped = query_BHSD.shape[1] != key_BHTD.shape[1]
    if isinstance(mask, BlockMask):
        result: Tensor = _compiled(flex_attention)(
            query_BHSD, key_BHTD, value_BHTD, block_mask=mask, enable_gqa=grouped
        )
        return result
    blocks = _blocks(positions, window if window < length else 0)
    mixed, width = [], value_BHTD.shape[-1]
    if width != query_BHSD.shape[-1] and not query_BHSD.is_cuda:  # the CPU's fused kernel needs equal head sizes
        value_BHTD = F.pad(value_BHTD, (0, query_BHSD.shape[-1] - width))
    if mask is not None:
        groups = query_BHSD.shape[1] // key_BHTD.shape[1]  # GPU kernels with a mask do not support grouped heads
        key_BHTD, value_BHTD = (each.repeat_interleave(groups, dim=1) for each in (key_BHTD, value_BHTD))
        return F.scaled_dot_product_attention(query_BHSD, key_BHTD, value_BHTD, attn_mask=mask)[..., :width]
    for rows, query in zip(blocks, torch.split(query_BHSD, [len(block) for block in blocks], dim=-2), strict=True):
        keys = range(max(0, rows.start - window + 1) if window else 0, rows.stop)
        square = len(rows) == len(keys) and (not window or len(rows) <= window)
        mixed.append(
            F.scaled_dot_product_attention(
                query,
                key_BHTD[..., keys.start : keys.stop, :],
                value_BHTD[..., keys.start : keys.stop, :],
                attn_mask=None if square else _visible(rows, keys, window, query.device),
                is_causal=square,
                enable_gqa=grouped,
            )[..., :width]
        )
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=-2)


class Attention(nn.Module):
    """Causal self-attention from (B, S, hidden) to (B, S, hidden).

    held: ranges of positions of the rows; None means all positions.
    gather: a function as in `Gather`; None means the identity.
    """

    def __init__(self, spec: ModelSpec, number: int, *, flash: bool) -> None:
        super().__init__()
        self.head_size = spec.head_size
        self.theta = spec.rope_theta if spec.position == "rope" else None
        self.scaling = spec.rope_scaling
        self.window = spec.window_of_layer(number)
        self.flash = flash
        self.held: Positions | None = None
        self.gather: Gather | None = None

    def _heads(self, x_BSE: Tensor, head_size: int) -> Tensor:
        return x_BSE.view(*x_BSE.shape[:-1], -1, head_size).transpose(1, 2)

    def _rotated(self, x_BHSD: Tensor) -> Tensor:
        return x_BHSD if self.theta is None else rotate(x_BHSD, self.theta, self.held, self.scaling)

    def _mix(self, query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, mask: Mask | None) -> Tensor:
        """Attention of each position to the earlier positions, as (B, S, heads * size)."""
        runs = self.held or positions_of(query_BHSD.shape[-2])
        if self.gather is not None:
            key_BHSD, value_BHSD = self.gather(key_BHSD), self.gather(value_BHSD)
        if self.flash:
            mixed = attend(query_BHSD, key_BHSD, value_BHSD, runs, self.window, mask)
        else:
            with sdpa_kernel(SDPBackend.MATH):
                mixed = attend(query_BHSD, key_BHSD, value_BHSD, runs, self.window, mask)
        return mixed.transpose(1, 2).flatten(-2)


class GroupedAttention(Attention):
    """Attention with shared key-value heads (Ainslie et al. 2023).

    Queries and keys are normalised if the model says so.
    """

    def __init__(self, spec: ModelSpec, number: int, *, flash: bool) -> None:
        super().__init__(spec, number, flash=flash)
        hidden, bias = spec.hidden_size, spec.attention_bias or spec.qkv_bias
        queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.query = nn.Linear(hidden, queries, bias=bias)
        self.key = nn.Linear(hidden, keys, bias=bias)
        self.value = nn.Linear(hidden, keys, bias=bias)
        self.output = nn.Linear(queries, hidden, bias=spec.attention_bias)
        self.norm_whole_width = spec.qk_norm == "width"
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if spec.qk_norm != "none":
            widths = (queries, keys) if self.norm_whole_width else (spec.head_size, spec.head_size)
            self.query_norm, self.key_norm = (RmsNorm(width, eps=spec.norm_epsilon) for width in widths)

    def _project(self, x_BSE: Tensor, projection: nn.Module, norm: nn.Module | None) -> Tensor:
        flat = projection(x_BSE)
        if norm is None:
            return self._heads(flat, self.head_size)
        if self.norm_whole_width:
            return self._heads(norm(flat), self.head_size)
        normed: Tensor = norm(self._heads(flat, self.head_size))
        return normed

    def forward(self, x_BSE: Tensor, *, mask: Mask | None = None) -> Tensor:
        """Let each position attend to earlier positions, or to the positions in `mask`."""
        query = self._rotated(self._project(x_BSE, self.query, self.query_norm))
        key = self._rotated(self._project(x_BSE, self.key, self.key_norm))
        result: Tensor = self.output(self._mix(query, key, self._heads(self.value(x_BSE), self.head_size), mask))
        return result


class LatentAttention(Attention):
    """Attention with low-rank latents for queries, keys and values, and one rotary key for all heads (DeepSeek-V2)."""

    def __init__(self, spec: ModelSpec, number: int, *, flash: bool) -> None:
        super().__init__(spec, number, flash=flash)
        assert spec.mla is not None
        mla, hidden, heads = spec.mla, spec.hidden_size, spec.num_heads
        self.sizes = (mla.nope_head_size, mla.rope_head_size)
        self.query_down = nn.Linear(hidden, mla.q_lora_rank, bias=False) if mla.q_lora_rank else None
        self.query_norm = RmsNorm(mla.q_lora_rank, eps=spec.norm_epsilon) if mla.q_lora_rank else None
        self.query_up = nn.Linear(mla.q_lora_rank or hidden, heads * spec.head_size, bias=False)
        self.key_value_down = nn.Linear(hidden, mla.kv_lora_rank, bias=False)
        self.key_value_norm = RmsNorm(mla.kv_lora_rank, eps=spec.norm_epsilon)
        self.key_value_up = nn.Linear(mla.kv_lora_rank, heads * (mla.nope_head_size + mla.value_head_size), bias=False)
        self.rotary_key = nn.Linear(hidden, mla.rope_head_size, bias=False) if mla.rope_head_size else None
        self.output = nn.Linear(heads * mla.value_head_size, hidden, bias=False)
        self.value_size = mla.value_head_size

    def forward(self, x_BSE: Tensor, *, mask: Mask | None = None) -> Tensor:
        """Let each position attend to earlier positions, or to the positions in `mask`."""
        nope, rope = self.sizes
        latent = (
            x_BSE if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x_BSE))
        )
        query = self._heads(self.query_up(latent), self.head_size)
        up = self._heads(self.key_value_up(self.key_value_norm(self.key_value_down(x_BSE))), nope + self.value_size)
        key, value = torch.split(up, [nope, self.value_size], dim=-1)
        if self.rotary_key is not None:
            fixed, turned = torch.split(query, [nope, rope], dim=-1)
            query = torch.cat((fixed, self._rotated(turned)), dim=-1)
            shared = self._rotated(self._heads(self.rotary_key(x_BSE), rope))
            key = torch.cat((key, shared.expand(-1, key.shape[1], -1, -1)), dim=-1)
        result: Tensor = self.output(self._mix(query, key, value, mask))
        return result


def make_attention(spec: ModelSpec, number: int, *, flash: bool) -> Attention:
    """The attention block of layer `number`."""
    kind = GroupedAttention if spec.mla is None else LatentAttention
    return kind(spec, number, flash=flash)
