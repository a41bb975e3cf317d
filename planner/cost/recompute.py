"""Which parts of a layer a recompute policy repeats, and which share of the layers recomputes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.ledger import LineName
from planner.once import once
from planner.specs.recompute import FULL, SELECTIVE, modules_in, number_of_layers

if TYPE_CHECKING:
    from planner.numbers import Number
    from planner.specs.job import Job, PoolJob
    from planner.specs.model import ModelSpec

ACTIVATION: Final = "activation"
"""The activation functions of all feed-forward blocks; no engine recomputes only this part."""

_SELECTIVE: Final = {
    "attention-core": ("core_attn",),
    "light": (ACTIVATION, "layernorm", "mla_up_proj"),
    "operators": (),
}


@once
def modules_of(job: Job, policy: int) -> frozenset[str]:
    """Parts of a layer that a policy recomputes; empty for policies not made of parts (`full`, by operators).

    Source: Megatron-LM, megatron/core/transformer/transformer_config.py (recompute_modules); engine profile.
    """
    return frozenset(_SELECTIVE[job.engine.memory.selective_recompute] if policy == SELECTIVE else modules_in(policy))


def absent_modules(model: ModelSpec) -> dict[str, str]:
    """Parts of a layer that a model does not have, each with the feature that is missing.

    Source: Megatron-LM, megatron/core/transformer/transformer_config.py, which refuses some of them and ignores others.
    """
    absent = {}
    if model.mla is None:
        absent["mla_up_proj"] = "latent attention"
    if model.moe is None:
        absent |= dict.fromkeys(("moe", "moe_act"), "experts")
    if model.moe is None or not model.moe.shared_ffn_hidden_size:
        absent["shared_experts"] = "shared experts"
    return absent


def idle_modules(job: Job) -> frozenset[str]:
    """Parts of a layer whose recompute saves little or no memory for this job.

    Source: `absent_modules`; `norm_modules`; Dao (2023), section 3.1: fused attention keeps no scores.
    """
    model, dense = job.model, range(job.model.num_layers)
    idle = set(absent_modules(model))
    if job.training.attention == "flash":
        idle.add("core_attn")
    if not any("layernorm" in norm for norm in norm_modules(job, experts=model.moe is not None)):
        idle.add("layernorm")
    if 2 * np.sum(model.layer_has_experts(np.array(dense))) > model.num_layers:
        idle.add("mlp")
    return frozenset(idle)


@once
def norm_modules(job: Job, *, experts: bool) -> tuple[frozenset[str], frozenset[str]]:
    """Modules whose recompute repeats the norm before attention, and modules that repeat the second norm.

    The second norm comes before the feed-forward block or the experts.

    Source: Megatron-LM, megatron/core/models/gpt/gpt_layer_specs.py: a norm is fused with the product after it, except
    before latent attention and experts; transformer_layer.py: `layernorm` covers norms that stand alone.
    """
    fused = job.engine.memory.fused_norms
    attention = frozenset[str]() if fused and job.model.mla is None else frozenset(("layernorm",))
    return attention, frozenset(("layernorm",) if experts or not fused else ("mlp",))


def recomputing_share(policy: Number, num_layers: Number, num_chunks: Number) -> Number:
    """Share of a stage's layers that recompute, if only some do: k layers of each chunk, or every n-th layer.

    Source: Megatron-LM, megatron/core/recompute.py (block); torchtitan up to 2025, selective_ac_option (every n-th).
    """
    every, number = number_of_layers(policy)
    smaller, num_larger = np.divmod(num_layers, num_chunks)

    def of_chunk(layers: Number) -> Number:
        return np.where(every, layers // np.maximum(number, 1), np.minimum(number, layers))

    found = num_larger * of_chunk(smaller + 1) + (num_chunks - num_larger) * of_chunk(smaller)
    return found / np.maximum(num_layers, 1)


def repeats_part(job: Job, policy: int, parts: frozenset[str]) -> float:
    """How many times the backward pass computes a part of a layer again, not counting full recompute.

    parts: the modules whose recompute repeats the part. A feed-forward block in tiles is repeated under every policy.

    Source: Megatron-LM, megatron/core/transformer/transformer_config.py (recompute_modules); DeepSpeed,
    runtime/sequence_parallel/ulysses_sp.py (TiledMLP).
    """
    tiled = job.training.mlp_tiles > 1 and "mlp" in parts
    return float(tiled) + float(not parts.isdisjoint(modules_of(job, policy)))


def repeated_transfers(job: PoolJob, policy: int, line: LineName, *, experts: bool) -> float:
    """Share of a layer's forward transfers of one ledger line that a policy repeats.

    Full recompute repeats all transfers. Recompute of parts repeats the transfers inside them: the core of attention
    contains the context-parallel exchange, the feed-forward block contains half of the tensor-parallel collectives, and
    the experts contain the expert exchanges.

    Source: Chen et al., sublinear memory (2016): one more forward pass before the backward pass; Megatron-LM,
    transformer_layer.py and moe/moe_layer.py (transfers inside a checkpoint).
    """
    if policy == FULL:
        return 1.0
    modules = modules_of(job, policy)
    repeated = {
        LineName.CP_COMM: ("core_attn", 1.0),
        LineName.EP_COMM: ("moe", 1.0),
        LineName.TP_COMM: ("moe" if experts else "mlp", 0.5),
    }
    module, share = repeated[line]
    return share if module in modules else 0.0
