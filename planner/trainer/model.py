"""Decoder-only transformers in plain torch: blocks, embedding, and the layers that a rank holds.

This module knows nothing about parallelism: the same code runs on a whole model and on a share of it.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.trainer.attention import document_mask, make_attention, positions_of
from planner.trainer.feed_forward import make_feed_forward
from planner.trainer.norms import make_norm

if TYPE_CHECKING:
    from torch import Tensor

    from planner.specs.model import ModelSpec
    from planner.trainer.attention import Mask, Positions

INITIAL_STD = 0.02  # Radford et al. 2019 (GPT-2); output projections are scaled by 1 / sqrt(2 * num_layers)


class Block(nn.Module):
    """One pre-norm transformer layer; with `recompute` its backward pass repeats the forward pass.

    Gemma 2 has a third and a fourth norm after the blocks. In models with one norm, both blocks read its output.
    """

    def __init__(self, spec: ModelSpec, number: int, *, flash: bool) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec)
        self.attention = make_attention(spec, number, flash=flash)
        self.attention_post_norm = make_norm(spec) if spec.norms_per_layer > 2 else None
        self.ffn_norm = make_norm(spec) if spec.norms_per_layer > 1 else None
        self.ffn = make_feed_forward(spec, number)
        self.ffn_post_norm = make_norm(spec) if spec.norms_per_layer > 3 else None
        self.parallel = spec.parallel_attention
        self.recompute = False

    def _layer(self, x_BSE: Tensor, mask: Mask | None) -> Tensor:
        normed = self.attention_norm(x_BSE)
        attended = self.attention(normed, mask=mask)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        joined = x_BSE if self.parallel else x_BSE + attended
        if self.ffn_norm is not None:
            normed = self.ffn_norm(joined)
        elif not self.parallel:
            normed = joined
        fed = self.ffn(normed)
        if self.ffn_post_norm is not None:
            fed = self.ffn_post_norm(fed)
        result: Tensor = joined + attended + fed if self.parallel else joined + fed
        return result

    def forward(self, x_BSE: Tensor, mask: Mask | None = None) -> Tensor:
        """Apply the layer; with `recompute`, only its inputs are kept for the backward pass."""
        if self.recompute and torch.is_grad_enabled():
            result: Tensor = checkpoint(self._layer, x_BSE, mask, use_reentrant=False, preserve_rng_state=False)
            return result
        return self._layer(x_BSE, mask)


class Embedding(nn.Module):
    """Token embeddings, with learned positions and a norm in families that have them.

    held: ranges of positions of the token columns; None means all positions.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        rows = spec.max_sequence_length + spec.extra_positions
        self.positions = nn.Embedding(rows, spec.hidden_size) if spec.position == "learned" else None
        self.norm = make_norm(spec) if spec.embedding_norm else None
        self.held: Positions | None = None

    def forward(self, tokens_BS: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """Hidden states (B, S, hidden) of token ids; learned positions count from the start of the document."""
        x_BSE: Tensor = self.tokens(tokens_BS)
        if self.positions is not None:
            runs = self.held or positions_of(tokens_BS.shape[1])
            rows = torch.cat([torch.arange(run.start, run.stop, device=tokens_BS.device) for run in runs])
            x_BSE = x_BSE + self.positions(rows[None] if starts_BT is None else rows - starts_BT[:, rows])
        return x_BSE if self.norm is None else self.norm(x_BSE)


class Transformer(nn.Module):
    """Consecutive layers: the whole model, or one chunk of a pipeline.

    Layers keep their number in the whole model, so a parameter has one name in every layout. The first chunk also
    embeds the tokens, and the last chunk returns logits. If the chunks separate tied embeddings, there are two
    parameters, which the trainer keeps equal.
    """

    def __init__(
        self, spec: ModelSpec, *, layers: range | None = None, first: bool = True, last: bool = True, flash: bool = True
    ) -> None:
        super().__init__()
        numbers = range(spec.num_layers) if layers is None else layers
        self.embedding = Embedding(spec) if first else None
        self.layers = nn.ModuleDict({str(number): Block(spec, number, flash=flash) for number in numbers})
        self.norm = make_norm(spec) if last and spec.final_norm else None
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False) if last else None
        self.tied = spec.tied_embeddings and first and last
        self.tie()

    def tie(self) -> None:
        """Make the head and the token embedding one parameter again, after a wrapper replaced one of them."""
        if self.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.tokens.weight

    def forward(self, x: Tensor, *, starts_BT: Tensor | None = None) -> Tensor:
        """Turn token ids (B, S), or the previous chunk's hidden states, into hidden states or logits (B, S, vocab).

        starts_BT: for each position, the start of its document; None if attention may cross the ends of documents.
        """
        masks = [None] * len(self.layers) if starts_BT is None else self._document_masks(starts_BT)
        x = x if self.embedding is None else self.embedding(x, starts_BT)
        for block, mask in zip(self.layers.values(), masks, strict=True):
            x = block(x, mask)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)

    def _document_masks(self, starts_BT: Tensor) -> list[Mask]:
        """The mask of each layer; layers with the same window share a mask."""
        attentions = [block.attention for block in self.layers.values() if isinstance(block, Block)]
        if not attentions:
            return []
        rows = attentions[0].held or positions_of(starts_BT.shape[1])
        blocks = starts_BT.is_cuda and attentions[0].flash
        windows = {each.window for each in attentions}
        masks = {window: document_mask(starts_BT, rows, window, blocks=blocks) for window in windows}
        return [masks[each.window] for each in attentions]


def canonical_name(name: str, spec: ModelSpec) -> str:
    """A parameter's name for seeds and checkpoints; a tied head has the name of the token embedding."""
    return "embedding.tokens.weight" if spec.tied_embeddings and name == "head.weight" else name


@torch.no_grad()
def initial_value(
    name: str, shape: torch.Size, spec: ModelSpec, *, seed: int, device: torch.device | None = None
) -> Tensor:
    """The first value of the whole parameter `name` in fp32; it depends on name and seed, never on the layout."""
    name = canonical_name(name, spec)
    if "norm" in name:
        return (torch.zeros if name.endswith("bias") else torch.ones)(shape, device=device)
    if name.endswith("bias"):
        return torch.zeros(shape, device=device)
    last = name.endswith(("attention.output.weight", "ffn.down.weight", "shared.down.weight", "experts.down"))
    std = INITIAL_STD / math.sqrt(2 * spec.num_layers) if last else INITIAL_STD
    # the CPU generator uses 32 bits of a seed
    generator = torch.Generator(device=device or "cpu").manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
