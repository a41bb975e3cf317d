"""Blocks that mix tokens through a state of fixed size: Mamba, linear attention with a delta rule, RWKV, convolutions.

Each kind is described once, by its projections, its vectors and the FLOPs of its core. Parameters, FLOPs, bytes and
seconds are computed from this description.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.specs.blocks import Mixer
    from planner.specs.model import ModelSpec

Map = tuple[int, dict[str, int]]

_CHUNK: Final = 64
"""Tokens of a chunk that kernels of the delta rule compute at once (Yang et al., Gated DeltaNet, 2024, section 3.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerShape:
    """Parts of a layer's mixer.

    maps: matrix products as (inputs, outputs of each matrix by name); names are those of transformers' modules, except
        for queries, keys, values and outputs. Tensor parallelism divides the last product along its inputs, and the
        others along their outputs.
    whole: products with matrices that every rank holds whole (low-rank inputs).
    vectors: parameters in vectors, convolutions and norms.
    core_flops: forward FLOPs per token outside the projections.
    between: elements per token that the backward pass reads beside the products' outputs: outputs of the convolution,
        of the core and of its norm.
    """

    maps: tuple[Map, ...] = ()
    whole: tuple[Map, ...] = ()
    vectors: int = 0
    core_flops: float = 0.0
    between: int = 0

    @property
    def kept(self) -> int:
        """Elements per token that the backward pass reads in addition to the layer's input.

        The outputs of the last product are the residual's.
        """
        return sum(sum(outputs.values()) for _, outputs in (*self.maps[:-1], *self.whole)) + self.between


def _mamba(mixer: Mixer, h: int) -> MixerShape:
    """Mamba-1: inputs x and z; a convolution; time step, B and C of low rank from x; a scan over d N states.

    Source: Gu and Dao, Mamba (2023), section 3.4; transformers, models/mamba and models/jamba (the norms).
    """
    d, n, rank = mixer.num_heads * mixer.value_size, mixer.key_size, mixer.rank
    norms = rank + 2 * n if mixer.state_norms else 0
    return MixerShape(
        maps=(
            (h, {"in_proj": 2 * d}),
            (d, {"x_proj": rank + 2 * n}),
            (rank, {"dt_proj": d}),
            (d, {"out_proj": h}),
        ),
        vectors=_convolution(mixer, d) + d + d * n + d + norms + _biases(mixer, 2 * d, h),
        core_flops=_SCAN_FLOPS * d * n,
        between=d + d,
    )


def _mamba2(mixer: Mixer, h: int) -> MixerShape:
    """Mamba-2: x and z; B and C of each group; a time step of each head; a convolution over x, B and C.

    Source: Dao and Gu, Mamba-2 (2024), section 7.1; FLOPs of the scan as Megatron-LM counts them (training.py,
    mamba_layer_flops).
    """
    heads, d = mixer.num_heads, mixer.num_heads * mixer.value_size
    mixed = d + 2 * (mixer.num_key_heads or 1) * mixer.key_size
    into = d + mixed + heads
    return MixerShape(
        maps=((h, {"in_proj": into}), (d, {"out_proj": h})),
        vectors=_convolution(mixer, mixed) + 3 * heads + mixer.norm * d + _biases(mixer, into, h),
        core_flops=_SCAN_FLOPS * d * mixer.key_size,
        between=mixed + 2 * d,
    )


def _gated_deltanet(mixer: Mixer, h: int) -> MixerShape:
    """Gated DeltaNet: queries and keys of key heads; values, a gate, a decay and a step of value heads; a convolution.

    Source: Yang et al., Gated DeltaNet (2024), section 3; transformers, models/qwen3_next.
    """
    heads, keys = mixer.num_heads, (mixer.num_key_heads or mixer.num_heads) * mixer.key_size
    values = heads * mixer.value_size
    mixed = 2 * keys + values
    return MixerShape(
        maps=((h, {"in_proj_qkvz": mixed + values, "in_proj_ba": 2 * heads}), (values, {"out_proj": h})),
        vectors=_convolution(mixer, mixed) + 2 * heads + mixer.norm * mixer.value_size,
        core_flops=_delta_flops(mixer),
        between=mixed + 2 * values,
    )


def _kda(mixer: Mixer, h: int) -> MixerShape:
    """Kimi delta attention: a decay for each channel of a key; decay and output gate are of low rank.

    Source: Kimi Linear (2025), section 3; transformers, models/kimi_linear and models/bailing_hybrid.
    """
    heads, d = mixer.num_heads, mixer.num_heads * mixer.value_size
    read, names = (mixer.rank, ("f_b_proj", "g_b_proj")) if mixer.rank else (h, ("f_proj", "g_proj"))
    return MixerShape(
        maps=(
            (h, {"query": d, "key": d, "value": d, "b_proj": heads}),
            *((read, {name: d}) for name in names),
            (d, {"output": h}),
        ),
        whole=((h, {"f_a_proj": mixer.rank}), (h, {"g_a_proj": mixer.rank})) if mixer.rank else (),
        vectors=_convolution(mixer, 3 * d) + d + heads + mixer.norm * mixer.value_size,
        core_flops=_delta_flops(mixer),
        between=3 * d + 2 * d,
    )


def _lightning(mixer: Mixer, h: int) -> MixerShape:
    """Linear attention with a fixed decay, a norm and an output gate.

    Source: MiniMax-01 (2025), section 2.2; transformers, models/minimax.
    """
    d = mixer.num_heads * mixer.value_size
    return MixerShape(
        maps=((h, {"qkv_proj": 3 * d}), (h, {"output_gate": d}), (d, {"out_proj": h})),
        vectors=mixer.norm * d,
        core_flops=_delta_flops(mixer),
        between=2 * d,
    )


def _short_convolution(mixer: Mixer, h: int) -> MixerShape:
    """A gated convolution over a few tokens: two gates and an input of the model's width.

    Source: LFM2 (2025), transformers, models/lfm2.
    """
    d = mixer.num_heads * mixer.value_size
    return MixerShape(
        maps=((h, {"in_proj": 3 * d}), (d, {"out_proj": h})),
        vectors=_convolution(mixer, d) + _biases(mixer, 3 * d, h),
        core_flops=2.0 * mixer.kernel * d,
        between=d + d,
    )


def _rg_lru(mixer: Mixer, h: int) -> MixerShape:
    """Griffin's recurrent block: two branches, a convolution, and a linear recurrence whose gates are block-diagonal.

    Source: De et al., Griffin (2024), section 2.4; transformers, models/recurrent_gemma.
    """
    d = mixer.num_heads * mixer.value_size
    gates = tuple((d, {name: mixer.value_size}) for name in ("input_gate", "recurrent_gate"))
    return MixerShape(
        maps=((h, {"linear_x": d, "linear_y": d}), *gates, (d, {"linear_out": h})),
        vectors=_convolution(mixer, d) + d + 2 * d + _biases(mixer, 2 * d, h),
        core_flops=10.0 * d,
        between=d + d + 2 * (d - mixer.value_size),  # a gate has an output for each of its blocks
    )


def _rwkv(mixer: Mixer, h: int) -> MixerShape:
    """RWKV-4's time mixing: receptance, key and value of tokens, each mixed with the previous token.

    Source: Peng et al., RWKV (2023), section 3.1; transformers, models/rwkv.
    """
    d = mixer.num_heads * mixer.value_size
    return MixerShape(
        maps=((h, {"receptance": d, "key": d, "value": d}), (d, {"output": h})),
        vectors=2 * d + 3 * h,
        core_flops=10.0 * d,
        between=3 * h + d,
    )


def _mlstm(mixer: Mixer, h: int) -> MixerShape:
    """XLSTM's matrix memory: queries and keys narrower than values, an output gate, two gates of each head.

    Source: Beck et al., xLSTM 7B (2025), section 3; transformers, models/xlstm.
    """
    heads = mixer.num_heads
    keys, values = heads * mixer.key_size, heads * mixer.value_size
    return MixerShape(
        maps=(
            (h, {"query": keys, "key": keys, "value": values, "ogate": values, "igate": heads, "fgate": heads}),
            (values, {"out_proj": h}),
        ),
        vectors=2 * heads + values + mixer.bias * (2 * keys + 2 * values + h),
        core_flops=_delta_flops(mixer),
        between=2 * values,
    )


_SCAN_FLOPS: Final = 7.0
"""FLOPs of one element of Mamba's state for each token (Megatron-LM, training.py, mamba_layer_flops)."""

_KINDS: Final[dict[str, Callable[[Mixer, int], MixerShape]]] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "gated-deltanet": _gated_deltanet,
    "kda": _kda,
    "lightning": _lightning,
    "convolution": _short_convolution,
    "rg-lru": _rg_lru,
    "rwkv": _rwkv,
    "mlstm": _mlstm,
}


@lru_cache(maxsize=512)
def mixer_shape(model: ModelSpec) -> MixerShape:
    """Parts of the mixer of a model's layers; empty if the model has no mixer.

    Source: given in the function of each kind.
    """
    return _KINDS[model.mixer.kind](model.mixer, model.hidden_size) if model.mixer else MixerShape()


def mixer_heads(model: ModelSpec) -> int:
    """Number of a mixer's heads, or of its channels if it has only one head; tp must divide this number.

    Source: Megatron-LM, megatron/core/ssm/mamba_mixer.py and gated_delta_net.py; definition of the model document.
    """
    found = [kind.mixer for _, kind in model.kinds() if kind.mixer is not None]
    return gcd(*(each.num_heads if each.num_heads > 1 else each.value_size for each in found))


def _convolution(mixer: Mixer, channels: int) -> int:
    """Parameters of a depthwise convolution, which has its own kernel for each channel."""
    return channels * (mixer.kernel + mixer.conv_bias) if mixer.kernel else 0


def _biases(mixer: Mixer, *outputs: int) -> int:
    return sum(outputs) if mixer.bias else 0


def _delta_flops(mixer: Mixer) -> float:
    """FLOPs per token of a chunked linear recurrence over a state of K times V in each head.

    Within a chunk of C tokens, the correction and the output each compute the causal half of a C x C matrix of scores,
    and then sums weighted by these scores.
    Between chunks the state is read and written, with a product of 2 K V FLOPs for each.

    Source: derived here from Yang et al., Gated DeltaNet (2024), section 3.3.
    """
    pairs = 2.0 * _CHUNK * (mixer.key_size + mixer.value_size)
    return mixer.num_heads * (pairs + 4.0 * mixer.key_size * mixer.value_size)
