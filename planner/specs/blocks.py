"""The blocks of a model document: experts, attention and its positions, mixers, patches of images; in counts only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from planner.specs.document import InputDocument

if TYPE_CHECKING:
    from collections.abc import Iterator


class MixtureOfExperts(InputDocument):
    """Experts in place of the feed-forward block.

    ffn_hidden_size: width of one routed expert.
    shared_ffn_hidden_size: width of all shared experts together.
    num_dense_layers: number of leading layers with an ordinary feed-forward block.
    layer_frequency: n, if only every n-th layer after the leading layers has experts.
    expert_bias: whether both matrices of an expert (three with a gate) have a bias.
    shared_gate: whether a learned gate weights the output of the shared experts (Qwen2-MoE).
    vector_params: parameters of a layer with experts that no other field covers.
    num_groups: number of groups of consecutive experts.
    groups_per_token: number of these groups from which a token's experts come.
    latent_size: width of the latent vector that routed experts read and write; 0 means hidden_size (Nemotron 3).
    idle_params: in each layer with experts, parameters of attention's own experts that a token does not use (JetMoE).
    imbalance: tokens of the busiest rank divided by the mean over ranks.
    """

    num_experts: int = Field(ge=2, le=100_000)
    experts_per_token: int = Field(ge=1, le=10_000)
    ffn_hidden_size: int = Field(ge=1, le=10_000_000)
    shared_ffn_hidden_size: int = Field(default=0, ge=0, le=10_000_000)
    num_dense_layers: int = Field(default=0, ge=0, le=10_000)
    layer_frequency: int = Field(default=1, ge=1, le=10_000)
    num_groups: int = Field(default=1, ge=1, le=100_000)
    groups_per_token: int = Field(default=1, ge=1, le=10_000)
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    vector_params: int = Field(default=0, ge=0, le=10**12)
    latent_size: int = Field(default=0, ge=0, le=1_000_000)
    idle_params: int = Field(default=0, ge=0, le=10**15)
    imbalance: float = Field(default=1.0, ge=1, le=1_000)

    def _mistakes(self) -> Iterator[str]:
        if self.experts_per_token > self.num_experts:
            yield f"experts_per_token: {self.experts_per_token} is more than num_experts {self.num_experts}"
        if self.groups_per_token > self.num_groups:
            yield f"groups_per_token: {self.groups_per_token} is more than num_groups {self.num_groups}"
        if self.num_experts % self.num_groups:
            yield f"num_groups: {self.num_groups} does not divide num_experts {self.num_experts}"


class LatentAttention(InputDocument):
    """Multi-head latent attention (DeepSeek-V2): queries and key-values go through low-rank projections.

    q_lora_rank: 0 means that queries have one full projection.
    """

    q_lora_rank: int = Field(default=0, ge=0, le=1_000_000)
    kv_lora_rank: int = Field(ge=1, le=1_000_000)
    nope_head_size: int = Field(ge=1, le=100_000)
    rope_head_size: int = Field(ge=0, le=100_000)
    value_head_size: int = Field(ge=1, le=100_000)


class SparseAttention(InputDocument):
    """An indexer with light heads of its own that chooses `top_k` keys for each query (DeepSeek-V3.2).

    With latent attention the indexer computes its queries from the compressed query latent.
    shared: the layer has no indexer and reuses the keys that the previous layer selected (GLM-5.2).
    """

    num_heads: int = Field(ge=1, le=100_000)
    head_size: int = Field(ge=1, le=100_000)
    top_k: int = Field(ge=1, le=1_000_000_000)
    shared: bool = False


class Mixer(InputDocument):
    """A block that mixes tokens through a state of fixed size: linear attention, a state space, or a short convolution.

    num_heads: number of value heads.
    num_key_heads: number of query and key heads, or of Mamba-2's groups; 0 means num_heads.
    key_size: size of a query and key head, or the state size of Mamba.
    value_size: size of a value head.
    kernel: taps of the convolution before the state; 0 means that there is none.
    rank: rank of gates and time steps; 0 means a full matrix.
    bias: whether the projections have biases.
    conv_bias: whether the convolution has a bias.
    norm: norm of the output.
    state_norms: whether a token's inputs to the state are normalised (Jamba).
    """

    kind: Literal["mamba", "mamba2", "gated-deltanet", "kda", "lightning", "convolution", "rg-lru", "rwkv", "mlstm"]
    num_heads: int = Field(ge=1, le=1_000_000)
    num_key_heads: int = Field(default=0, ge=0, le=1_000_000)
    key_size: int = Field(default=0, ge=0, le=1_000_000)
    value_size: int = Field(ge=1, le=1_000_000)
    kernel: int = Field(default=0, ge=0, le=10_000)
    rank: int = Field(default=0, ge=0, le=1_000_000)
    bias: bool = False
    conv_bias: bool = False
    norm: bool = True
    state_norms: bool = False


class RotaryScaling(InputDocument):
    """Slower rotary positions, for contexts longer than those of pre-training, as in Llama 3.1.

    A pair of channels with fewer than `low_frequency` turns in `original_max_sequence_length` tokens has its frequency
    divided by `factor`. A pair with more than `high_frequency` turns keeps its frequency. Between these two limits the
    change is gradual.
    """

    factor: float = Field(ge=1)
    low_frequency: float = Field(default=1.0, gt=0)
    high_frequency: float = Field(default=4.0, gt=0)
    original_max_sequence_length: int = Field(default=8192, ge=1, le=1_000_000_000)

    def _mistakes(self) -> Iterator[str]:
        if self.low_frequency > self.high_frequency:
            yield f"high_frequency: {self.high_frequency} is below low_frequency {self.low_frequency}"


class PatchEmbedding(InputDocument):
    """Projected square patches of a square image, which replace the token embedding.

    num_frames: number of video frames that a patch spans (Qwen2-VL).
    class_tokens: number of tokens in addition to the patches.
    bias: whether the projection has a bias.
    """

    image_size: int = Field(ge=1, le=100_000)
    patch_size: int = Field(ge=1, le=100_000)
    num_channels: int = Field(default=3, ge=1, le=1_000)
    num_frames: int = Field(default=1, ge=1, le=1_000)
    class_tokens: int = Field(default=1, ge=0, le=1_000)
    bias: bool = True

    def _mistakes(self) -> Iterator[str]:
        if self.image_size % self.patch_size:
            yield f"patch_size: {self.patch_size} does not divide image_size {self.image_size}"


def latent_head_size(mla: Any) -> int:
    """Head size of queries and keys in an unchecked `mla` mapping; 0 if the mapping does not describe it."""
    if isinstance(mla, LatentAttention):
        return mla.nope_head_size + mla.rope_head_size
    nope, rope = (mla.get(key) if isinstance(mla, dict) else 0 for key in ("nope_head_size", "rope_head_size"))
    return nope + rope if type(nope) is int and type(rope) is int else 0


class UnevenHeads(str):
    """A placeholder for the head size when heads do not divide the width; its text says so."""

    __slots__ = ()


def even_head_size(num_heads: int, hidden_size: int) -> int | UnevenHeads:
    """The size of heads that share the width, or what is wrong with it."""
    if hidden_size % num_heads:
        low = hidden_size // num_heads * num_heads
        return UnevenHeads(
            f"num_heads: {num_heads} does not divide hidden_size {hidden_size}; nearest hidden_size that it divides: "
            f"{low or num_heads} or {low + num_heads}, or state head_size"
        )
    return hidden_size // num_heads
