"""Bytes that one device holds: states, activations in flight, transients and the runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.adapters import (
    adapted_matrices,
    frozen_bytes,
    frozen_bytes_per_param,
    trained_layer_params,
    trained_params,
)
from planner.cost.blocks import attention_params, expert_layer_params, ffn_matrices, ffn_params
from planner.cost.layers import tokens_per_microbatch
from planner.cost.ledger import LineName, MemoryLine
from planner.cost.optimizers import extra_moment_bytes, moment_bytes_per_param, update_bytes
from planner.cost.parameters import cross_attention_share, end_params_on_device, padded_vocab
from planner.cost.schedule import held_microbatches, weight_versions
from planner.cost.stage import (
    POLICIES,
    by_policy,
    expert_shard_degree,
    holds_head,
    layer_kinds,
    layer_params,
    shard_degree,
)
from planner.layout import offloads_activations, offloads_optimizer
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.cost.stage import Stage
    from planner.layout import Degrees
    from planner.specs.job import PoolJob
    from planner.specs.model import MixtureOfExperts

__all__ = [
    "ActivationTerm",
    "activation_terms",
    "allocator_share",
    "device_activation_bytes",
    "held_of_stage",
    "host_lines",
    "host_state_bytes_per_param",
    "kept_activation_bytes",
    "kept_shares",
    "layer_activation_bytes",
    "layer_backward_bytes",
    "loss_bytes",
    "memory_lines",
    "offloaded_activation_bytes",
    "recompute_bytes",
    "sent_bytes",
    "state_bytes_per_param",
    "stored_activation_bytes",
    "whole_gradients",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTerm:
    """One tensor that a layer keeps for its backward pass.

    num_bytes: bytes for one microbatch on one device. core: the scores of unfused attention. saved: the share that
    operator-level selective recompute keeps (outputs of attention and of every second product). light: the share that
    is the output of a norm, of an up-projection of latent attention, or of a gate.
    """

    name: str
    num_bytes: Any
    core: bool = False
    is_input: bool = False
    saved: float = 0.0
    light: float = 0.0


def activation_terms(job: PoolJob, layout: Degrees, *, experts: bool = False) -> tuple[ActivationTerm, ...]:
    """What one layer keeps for one microbatch on one device, tensor by tensor.

    In units of one 16-bit (s b h) tensor: norm inputs 2 + 2, inputs of the two blocks 2 + 2, queries, keys,
    values and attention output 2 each (keys and values g/a of that), GELU 2f/h + 2f/h or SwiGLU 8f/h (6f/h
    fused), dropout masks 1 each. Unfused attention keeps softmax 2as/h, its dropout mask as/h and the dropped
    scores 2as/h; fused attention keeps 4a/h of fp32 log-sum-exp instead. Without sequence parallelism the
    norm inputs, block inputs and masks are whole on every tensor-parallel rank. Summed for a GPT without
    fused attention this is s b h (10 + 24/t + 5as/(ht)), or s b h (34 + 5as/h) / t with sequence parallelism.

    Source: Korthikanti et al. (2022), sections 4.1 to 4.3; the Llama block was checked against torch's saved
    tensors.
    """
    model, training = job.model, job.training
    tokens = tokens_per_microbatch(job, layout)
    element = job.compute_bytes * tokens
    narrow = element * _narrow(job)
    sharded = np.where(np.equal(layout.sp, 1), layout.tp, 1)
    gathered = sharded if job.engine.memory.regathers_inputs else np.ones_like(sharded)
    h = model.hidden_size
    mask = tokens * (1.0 if training.dropout else 0.0)
    terms = [
        ActivationTerm(name="layer input", num_bytes=element * h / sharded, is_input=True),
        ActivationTerm(
            name="attention input", num_bytes=narrow * h / gathered * _is_read_again(job, _INPUTS), light=1.0
        ),
        *_attention_terms(job, layout),
        ActivationTerm(name="attention dropout mask", num_bytes=mask * h / sharded),
        ActivationTerm(name="feed-forward dropout mask", num_bytes=mask * h / sharded),
    ]
    if not model.parallel_attention:
        terms.append(ActivationTerm(name="residual", num_bytes=element * h / sharded))
    if model.norms_per_layer > 1:
        kept = narrow * h / gathered * _is_read_again(job, ("gate", "up"))
        terms.append(ActivationTerm(name="feed-forward input", num_bytes=kept, light=1.0))
    if adapters := adapted_matrices(model, training):
        down = element * training.lora_rank * len(adapters)
        terms.append(ActivationTerm(name="adapters", num_bytes=down))
    extra_norms = max(0, model.norms_per_layer - 2)
    if extra_norms:
        terms.append(ActivationTerm(name="inputs of norms after blocks", num_bytes=extra_norms * element * h / sharded))
    if experts and model.moe is not None:
        return (*terms, *_expert_terms(job, layout, model.moe))
    if share := cross_attention_share(model):
        cross = [
            ActivationTerm(name="input", num_bytes=element * h / gathered),
            *_attention_terms(job, layout),
            ActivationTerm(name="dropout mask", num_bytes=mask * h / sharded),
            ActivationTerm(name="residual", num_bytes=element * h / sharded),
        ]
        terms += [
            replace(term, name=f"cross-attention {term.name}", num_bytes=share * term.num_bytes) for term in cross
        ]
    inner = _inner_tensors(job) * narrow * model.ffn_hidden_size / layout.tp
    one = 1.0 / _inner_tensors(job)  # the first product's output, and the second's input
    return (*terms, ActivationTerm(name="feed-forward inner", num_bytes=inner, saved=one, light=one))


def _narrow(job: PoolJob) -> float:
    """Bytes of a kept input of a product over those of a 16-bit one.

    Source: DeepSeek-V3 (2024), section 3.3.3.
    """
    return 0.5 if job.engine.memory.fp8_activations and job.training.precision in ("fp8", "fp4") else 1.0


_INPUTS: Final = ("query", "key", "value")


def _is_read_again(job: PoolJob, matrices: tuple[str, ...]) -> float:
    """1.0 where the gradient of one of these matrices, or of its adapter, needs their input; 0.0 of frozen ones.

    Source: Hu et al., LoRA (2021), section 4.2; a frozen matrix passes gradients on without its input.
    """
    adapted = [name for name, _, _ in adapted_matrices(job.model, job.training)]
    return 1.0 if not job.training.lora_rank or set(matrices) & set(adapted) else 0.0


def _inner_tensors(job: PoolJob) -> float:
    """Tensors of the feed-forward width that are kept: input and output of GELU; of SwiGLU gate, up, product.

    The last of them is the second product's input, which a frozen one does not need again.
    """
    tensors = (3.0 if job.engine.memory.fused_swiglu else 4.0) if job.model.activation == "swiglu" else 2.0
    return tensors - 1.0 + _is_read_again(job, ("down",))


def _half(query: int, key: int) -> float:
    """Share of queries and values in queries, keys and values: the first and the third product's output."""
    return (query + key) / (query + 2 * key)


def _attention_terms(job: PoolJob, layout: Degrees) -> tuple[ActivationTerm, ...]:
    """Queries, keys, values, output and what the kernel keeps; latent attention keeps its latents too, whole.

    An engine that gathers the context keeps keys and values of all cp ranks, and the output a second time, joined; one
    that trades for heads keeps the output of its heads and that of its part of the sequence.
    """
    model, t, exchange = job.model, layout.tp, job.engine.communication.context_exchange
    cut = np.greater(layout.cp, 1)
    context = np.where(cut, layout.cp, 1) if exchange == "gather" else 1
    outputs = np.where(cut & (exchange != "ring"), 2.0, 1.0)
    tokens = tokens_per_microbatch(job, layout)
    element = job.compute_bytes * tokens
    if model.mla is None:
        query, key = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
        terms = [
            ActivationTerm(
                name="queries, keys and values",
                num_bytes=element * (query + 2 * key * context) / t,
                saved=_half(query, key),
            ),
            ActivationTerm(name="attention output", num_bytes=outputs * element * query / t, saved=1.0),
        ]
        if model.qk_norm != "none":
            terms.append(ActivationTerm(name="inputs of query and key norms", num_bytes=element * (query + key) / t))
    else:
        mla, heads = model.mla, model.num_heads
        query = heads * (mla.nope_head_size + mla.rope_head_size)
        latents = 2 * mla.q_lora_rank + 2 * mla.kv_lora_rank + mla.rope_head_size
        own = mla.nope_head_size + mla.value_head_size
        values = heads * (np.where(cut, layout.cp * mla.value_head_size, own) if exchange == "gather" else own)
        up = query + values + context * query  # keys are joined with positions
        terms = [
            ActivationTerm(name="latents", num_bytes=element * latents, light=0.5),
            ActivationTerm(name="queries, keys and values", num_bytes=element * up / t, saved=0.5, light=1.0),
            ActivationTerm(
                name="attention output", num_bytes=outputs * element * heads * mla.value_head_size / t, saved=1.0
            ),
        ]
    if job.training.attention == "flash":
        terms.append(ActivationTerm(name="log-sum-exp", num_bytes=4.0 * tokens * model.num_heads / t, saved=1.0))
        return tuple(terms)
    square = tokens * job.training.sequence_length * model.num_heads / t
    terms.append(ActivationTerm(name="softmax", num_bytes=job.compute_bytes * square, core=True))
    if job.training.dropout:
        kept = (1.0 + job.compute_bytes) * square
        terms.append(ActivationTerm(name="softmax dropout", num_bytes=kept, core=True))
    return tuple(terms)


def _expert_terms(job: PoolJob, layout: Degrees, moe: MixtureOfExperts) -> tuple[ActivationTerm, ...]:
    """What the experts keep: fp32 router scores, permuted inputs, inner tensors and outputs of every choice."""
    tokens = tokens_per_microbatch(job, layout)
    element = job.compute_bytes
    narrow = element * _narrow(job)
    choices = tokens / layout.tp * moe.experts_per_token * moe.imbalance * layout.etp
    inner = _inner_tensors(job)
    shared = inner * narrow * tokens * moe.shared_ffn_hidden_size / layout.tp
    return (
        ActivationTerm(name="router", num_bytes=8.0 * tokens / layout.tp * moe.num_experts),
        ActivationTerm(name="expert inputs", num_bytes=narrow * choices * job.model.hidden_size),
        ActivationTerm(
            name="expert inner",
            num_bytes=inner * narrow * choices * moe.ffn_hidden_size / layout.etp,
            saved=1.0 / inner,
            light=1.0 / inner,
        ),
        ActivationTerm(
            name="expert outputs",
            num_bytes=element * choices * job.model.hidden_size * job.engine.memory.keeps_expert_outputs,
        ),
        ActivationTerm(name="shared expert inner", num_bytes=shared, light=1.0 / inner),
    )


def kept_shares(job: PoolJob, term: ActivationTerm) -> tuple[float, float, float]:
    """Share of one tensor that each policy of `stage.POLICIES` keeps; operator by operator, a second (s b h) tensor.

    Full recompute keeps the layer's input. Selective recompute drops the attention core, or, operator by
    operator, keeps the input, the outputs of attention and of every second product, and one (s b h) output; or it
    drops what is light to make again.

    Source: Korthikanti et al. (2022), section 5; torchtitan, distributed/activation_checkpoint.py; DeepSeek-V3 (2024),
    sections 3.2.3 and 3.3.3.
    """
    selective = 0.0 if term.core else 1.0
    if job.engine.memory.selective_recompute == "operators":
        selective = 2.0 * term.is_input + term.saved
    elif job.engine.memory.selective_recompute == "light":
        selective = (1.0 - term.light) * selective
    return 1.0, selective, float(term.is_input)


def layer_activation_bytes(job: PoolJob, layout: Degrees, *, experts: bool = False) -> tuple[Any, Any, Any]:
    """Bytes of one layer for one microbatch under each policy of `stage.POLICIES`.

    Source: `activation_terms`, each with its `kept_shares`.
    """
    kept = [(term.num_bytes, kept_shares(job, term)) for term in activation_terms(job, layout, experts=experts)]
    none = sum_of(size for size, _ in kept)
    selective, full = (sum_of(size * shares[policy] for size, shares in kept if shares[policy]) for policy in (1, 2))
    return none, selective, full


def stored_activation_bytes(job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Any) -> Any:
    """Activations that a stage stores at its peak: bytes per layer, times layers, times microbatches in flight.

    Where the gradients of the weights come later, microbatches that wait for them hold their layers whole. Some engines
    keep the outputs that a stage has sent as well, each of the size of a layer's input.

    Source: Korthikanti et al. (2022), section 4.2.3; Qi et al., Zero Bubble (2023), section 2; DeepSpeed,
    runtime/pipe/engine.py (pipe_buffers).
    """
    return _at_peak(job, layout, stage, num_microbatches, sent_bytes(job, layout, stage))


def offloaded_activation_bytes(job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Any) -> Any:
    """The part of the same that waits in the host's memory: what layers keep, and not what stages have sent.

    Source: as `stored_activation_bytes`.
    """
    if not offloads_activations(layout):
        return 0.0 * np.asarray(stage.num_layers)
    return _at_peak(job, layout, stage, num_microbatches, 0.0)


def _at_peak(job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Any, besides: Any) -> Any:
    """Bytes that layers keep, and `besides` them for each microbatch, over all microbatches at the fullest moment."""
    moments = held_of_stage(layout, stage, num_microbatches)
    kept, whole = kept_activation_bytes(job, layout, stage)
    stored = [before * (kept + besides) + waiting * whole for before, waiting in moments]
    return np.maximum.reduce(np.broadcast_arrays(*stored))


def held_of_stage(layout: Degrees, stage: Stage, num_microbatches: Any) -> tuple[tuple[Any, Any], ...]:
    """What a stage holds in the moments that can be its fullest, in microbatches through all of its layers.

    Of an interleaved stage whose chunks differ as if all were its largest: in steady state the first chunks are
    entered while the last ones are left, so that it is mostly the larger ones that are held.

    Source: `planner.cost.schedule.held_microbatches`; chunks that differ: tested against executed schedules.
    """
    moments = held_microbatches(layout.schedule, layout.pp, stage.index, num_microbatches, layout.interleave)
    if stage.largest_chunk is None:
        return moments
    share = layout.interleave * stage.largest_chunk / stage.num_layers
    return tuple((before * share, waiting * share) for before, waiting in moments)


def kept_activation_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Any, Any]:
    """What the layers of a stage keep of one microbatch under their policy, and without recompute.

    Source: `layer_activation_bytes`, layer by layer.
    """
    kept: Any = 0.0
    whole: Any = 0.0
    for experts, count in layer_kinds(job, layout, stage):
        of_policies = layer_activation_bytes(job, layout, experts=experts)
        kept, whole = kept + count * by_policy(stage.policy, of_policies), whole + count * of_policies[0]
    return kept, whole


def _on_the_way_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Any:
    """Offloaded activations that the device has all the same: of the layer that computes, and the one being copied.

    Source: derived here from two buffers that take turns, as in Megatron-LM, fine_grained_activation_offload.py.
    """
    largest: Any = 0.0
    for experts, count in layer_kinds(job, layout, stage):
        one = by_policy(stage.policy, layer_activation_bytes(job, layout, experts=experts))
        largest = np.maximum(largest, np.where(np.greater(count, 0), one, 0.0))
    return largest * np.minimum(2, stage.num_layers)


def device_activation_bytes(job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Any) -> Any:
    """What of the stored activations a device has at its peak.

    Source: `stored_activation_bytes`, less what waits on the host.
    """
    stored = stored_activation_bytes(job, layout, stage, num_microbatches)
    if not offloads_activations(layout):
        return stored
    left = stored - offloaded_activation_bytes(job, layout, stage, num_microbatches)
    return np.minimum(stored, left + _on_the_way_bytes(job, layout, stage))


def sent_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Any:
    """What a stage has sent to the next and keeps, for one microbatch, of engines that keep it.

    Source: DeepSpeed, runtime/pipe/engine.py (pipe_buffers).
    """
    if not job.engine.memory.keeps_stage_outputs:
        return 0.0
    sent = layer_activation_bytes(job, layout)[POLICIES.index("full")] * layout.interleave
    return np.where(np.less(stage.index, layout.pp - 1), sent, 0.0)


def whole_gradients(job: PoolJob, layout: Degrees) -> Any:
    """Whether a device accumulates gradients of all its parameters.

    Below ZeRO-2 it does, and under the pipelines of engines that keep them whole there, or wherever microbatches
    add up in engines that reduce once a step. FSDP has no lasting buffer for it: with one microbatch and no
    pipeline each gradient is reduced at once.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5; engine profile for what differs.
    """
    where = job.engine.memory.whole_gradients
    adds_up = np.greater(layout.pp, 1) | np.greater(job.training.global_batch_size, layout.dp * layout.mbs)
    if where == "accumulated":
        return adds_up
    if where == "lasting":
        return np.less(layout.zero, 2)
    return (np.less(layout.zero, 2) & adds_up) | np.greater(layout.pp, 1)


def state_bytes_per_param(job: PoolJob, layout: Degrees, *, experts: bool = False) -> tuple[Any, Any, Any]:
    """Bytes per parameter (of a matrix) of weights, gradients and optimizer state on one device.

    ZeRO-1 shards the optimizer state, ZeRO-2 the gradients too, ZeRO-3 the weights too; `whole_gradients` says
    where gradients are whole. What is offloaded (`host_state_bytes_per_param`) is not on the device.

    Source: Rajbhandari et al., ZeRO (SC 2020), figure 1; engine profile for what differs.
    """
    states, offloads = job.state_bytes, offloads_optimizer(layout)
    x = expert_shard_degree(layout) if experts else shard_degree(layout)
    at_home = 0.0 if offloads and job.engine.offload.optimizer_takes == "weights" else states.sharded_weights / x
    weights = np.where(np.greater_equal(layout.zero, 3), at_home, states.weights)
    kept = states.grads + states.grad_copy
    reduced = 0.0 if offloads and job.engine.offload.optimizer_takes != "states" else kept / x
    grads = np.where(whole_gradients(job, layout), kept, reduced)
    if offloads:
        return weights, grads, 0.0 * x
    step_grads = np.where(np.less(layout.zero, 3), states.step_grads, 0.0)
    return weights, grads, (states.master + step_grads + moment_bytes_per_param(job)) / x


def host_state_bytes_per_param(job: PoolJob) -> float:
    """Bytes on the host for each parameter of a device's shard whose update it makes.

    fp32 gradients, weights and moments: 16 of AdamW in mixed precision.

    Source: Ren et al., ZeRO-Offload (USENIX ATC 2021), section 3; DeepSpeed, runtime/zero/stage_1_and_2.py
    (estimate_zero2_model_states_mem_needs); Megatron-LM, optimizer/cpu_offloading/hybrid_optimizer.py.
    """
    states = job.state_bytes
    return 4.0 + (states.master or states.weights) + moment_bytes_per_param(job)


def loss_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Any:
    """Logits and what the loss makes of them on the last stage, for one microbatch; the head's gradient beside them.

    In engines that keep gradients apart until they are added up, GPipe holds the logits of all microbatches, and 1F1B
    those of the microbatch before until the next ones are there.

    Source: engine profile, bytes per logit; torch, distributed/pipelining/schedules.py (1F1B's loop keeps an output).
    """
    tokens = tokens_per_microbatch(job, layout)
    copies = layout.tp if job.engine.memory.whole_logits else 1
    per_logit = job.engine.memory.logits_bytes * copies + (job.compute_bytes - 2)
    rows = padded_vocab(job.model, job.engine, layout)
    one = per_logit * tokens * rows
    if not job.engine.memory.gradients_apart:
        return holds_head(layout, stage) * one
    head = job.state_bytes.weights * rows * job.model.hidden_size
    piped = np.greater(layout.pp, 1)
    if layout.schedule == "gpipe":
        m = job.training.global_batch_size / (layout.dp * layout.mbs)
        return holds_head(layout, stage) * (np.where(piped, m, 1) * one + head)
    before = np.where(piped & (layout.schedule == "1f1b"), one, 0.0)
    return holds_head(layout, stage) * (one + np.maximum(before, head))


def recompute_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Any:
    """What recompute brings back for the one layer whose backward pass runs; the larger kind counts.

    Source: Korthikanti et al. (2022), section 5.
    """
    largest: Any = 0.0
    for experts, count in layer_kinds(job, layout, stage):
        everything, selective, full = layer_activation_bytes(job, layout, experts=experts)
        back = by_policy(stage.policy, (np.zeros_like(everything), everything - selective, everything - full))
        largest = np.maximum(largest, np.where(np.greater(count, 0), back, 0.0))
    return largest


def _transient_bytes(job: PoolJob, layout: Degrees, stage: Stage, stored: Any) -> Any:
    """What is alive only for a moment: the larger of the loss, and the layer whose backward pass runs.

    The ends (embedding, head) are one unit that ZeRO-3 keeps gathered, with its gradient, until the backward pass ends.
    Where the update makes more than that, it counts, less the `stored` activations, which are gone by then.

    Source: torch FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_state.py (the root is not resharded).
    """
    engine, weights = job.engine, job.state_bytes.weights
    ends = end_params_on_device(job.model, engine, layout, stage.index)
    gathered = np.greater_equal(layout.zero, 3) * weights * ends
    kept = whole_gradients(job, layout) | (job.training.lora_rank > 0)  # frozen ends have none
    reduced = np.where(kept, 0.0, weights * np.minimum(ends, engine.memory.reduced_params))
    loss, layer = loss_bytes(job, layout, stage), layer_backward_bytes(job, layout, stage)
    layer = layer + (gathered + reduced) * engine.memory.keeps_ends_gathered
    largest = np.maximum(loss + gathered + reduced, layer)
    if offloads_optimizer(layout):  # the update is made on the host
        return largest
    return np.maximum(largest, update_bytes(job, layout, stage) - stored)


def layer_backward_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Any:
    """What the layer needs whose backward pass runs, beside what is stored; the larger kind counts.

    What recompute brings back, the weights that ZeRO-3 gathers (one layer computes, the next is prefetched, at most as
    far as the engine's bucket reaches) and, where gradients are not kept whole, those that wait to be reduced.

    Source: Korthikanti et al. (2022), section 5; torch FSDP2, torch/distributed/fsdp/_fully_shard/
    _fsdp_param_group.py (forward and backward prefetch).
    """
    states = job.state_bytes
    layer: Any = 0.0
    trained: Any = 0.0
    for experts, count in layer_kinds(job, layout, stage):
        held, changed = (params(job, layout, experts=experts).total for params in (layer_params, trained_layer_params))
        layer = np.maximum(layer, np.where(np.greater(count, 0), held, 0.0))
        trained = np.maximum(trained, np.where(np.greater(count, 0), changed, 0.0))
    ahead = np.minimum(layer, job.engine.memory.prefetched_params) * np.minimum(1, stage.num_layers - 1)
    each = frozen_bytes_per_param(job) if job.training.lora_rank else states.weights
    gathered = np.greater_equal(layout.zero, 3) * each * (np.minimum(1, stage.num_layers) * layer + ahead)
    waiting = np.minimum(trained, job.engine.memory.reduced_params)
    reduced = np.where(whole_gradients(job, layout), 0.0, (states.weights + states.grads) * waiting)
    if job.engine.memory.gradients_apart:
        reduced = _gradients_of_layer(job, layout, stage)
    return recompute_bytes(job, layout, stage) + gathered + reduced + _dequantized_bytes(job, layout)


def _gradients_of_layer(job: PoolJob, layout: Degrees, stage: Stage) -> Any:
    """Gradients that are alive only while one layer's backward pass runs, less what it has released by then.

    First those of the feed-forward block: of its inner tensors (two for each that is released), of the layer's output
    and of the last matrix. At the end those of all weights, in the precision that computes; what the layer kept is
    gone. Where gradients are reduced layer by layer, those of the layer before are on their way in fp32: in every
    microbatch, or in the last one, when no pipeline holds others.

    Source: derived here; counted in the trainer's own step by tests/trainer/test_memory_at_scale.py.
    """
    states, whole = job.state_bytes, whole_gradients(job, layout)
    summed_in_place = whole & (states.weights >= states.grads)
    reduces = ~np.asarray(whole) | np.equal(layout.pp, 1)
    largest: Any = 0.0
    for experts, count in layer_kinds(job, layout, stage):
        of_policies = layer_activation_bytes(job, layout, experts=experts)
        held = layer_params(job, layout, experts=experts).total
        terms = {term.name: term.num_bytes for term in activation_terms(job, layout, experts=experts)}
        inner = sum_of(size for name, size in terms.items() if name.endswith(" inner")) / 2
        last = states.weights * held * _last_matrix_share(job, experts=experts)
        first = inner + terms["layer input"] + last
        before = states.grads * held * np.greater(stage.num_layers, 1) * reduces
        end = np.where(summed_in_place, 0.0, states.weights * held) + before - of_policies[0]
        then = before - by_policy(stage.policy, of_policies)
        each = np.maximum(first + np.maximum(then, 0.0), end)
        largest = np.maximum(largest, np.where(np.greater(count, 0), each, 0.0))
    return largest


def _last_matrix_share(job: PoolJob, *, experts: bool) -> float:
    """Share of a layer's parameters that is in the feed-forward block's last matrix, or in those of all experts.

    Source: `planner.cost.blocks`.
    """
    block = expert_layer_params(job.model) if experts else ffn_params(job.model)
    return block / ffn_matrices(job.model) / (block + attention_params(job.model))


def _dequantized_bytes(job: PoolJob, layout: Degrees) -> Any:
    """The matrix that is multiplied with, in 16 bits again: the largest of a layer.

    Source: Dettmers et al., QLoRA (2023), section 3, equation 5.
    """
    if job.training.frozen_weights == "16-bit":
        return 0.0
    widest = max(job.model.ffn_hidden_size, job.model.num_heads * job.model.head_size)
    return job.compute_bytes * job.model.hidden_size * widest / layout.tp


def allocator_share(job: PoolJob, layout: Degrees) -> Any:
    """Share of the activations that the allocator loses.

    Source: engine profile, fragmentation.
    """
    alone, piped = job.engine.memory.fragmentation, job.engine.memory.pipeline_fragmentation
    return alone if piped is None else np.where(np.greater(layout.pp, 1), piped, alone)


def _runtime_bytes(job: PoolJob, layout: Degrees, stored: Any) -> Any:
    """Device context and communication buffers, and what the allocator loses.

    Source: device file, reserved_memory; engine profile, communicator_memory and fragmentation.
    """
    axes = (layout.tp, layout.pp, layout.dp * layout.cp)
    groups = sum_of(np.greater(degree, 1) * 1.0 for degree in axes)
    buffers = job.cluster.device.reserved_memory + (job.engine.memory.communicator_memory or 0.0) * groups
    return buffers + allocator_share(job, layout) * stored


def _state_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Any, Any, Any]:
    """Bytes of weights, gradients and optimizer state of one device, experts by their own shard group.

    Source: `state_bytes_per_param`, and what the optimizer keeps beside that.
    """
    held, frozen = trained_params(job, layout, stage), frozen_bytes(job, layout, stage)
    on_device = 0.0 if offloads_optimizer(layout) else 1.0
    more, more_routed = (on_device * each for each in extra_moment_bytes(job, layout, stage))
    common = state_bytes_per_param(job, layout)
    weights, grads, optimizer = (each * held.common for each in common)
    optimizer = optimizer + more / shard_degree(layout)
    shards = np.greater_equal(layout.zero, 3)
    weights = weights + frozen.common / np.where(shards, shard_degree(layout), 1)
    weights = weights + frozen.experts / np.where(shards, expert_shard_degree(layout), 1)
    if job.model.moe is None:
        return weights, grads, optimizer
    routed = [each * held.experts for each in state_bytes_per_param(job, layout, experts=True)]
    optimizer = optimizer + routed[2] + more_routed / expert_shard_degree(layout)
    return weights + routed[0], grads + routed[1], optimizer


def memory_lines(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[MemoryLine, ...]:
    """The memory ledger of one device of a stage at its peak; every line broadcasts over layouts and stages.

    The peak is taken in the backward pass of the first microbatch: states, all stored activations, and the
    larger of the loss and one recomputed layer; or in the update, where that takes more.

    Source: each line names its own.
    """
    m = job.training.global_batch_size / (layout.dp * layout.mbs)
    weights, grads, optimizer = _state_bytes(job, layout, stage)
    weights = weights * weight_versions(layout.schedule, layout.pp, stage.index, m)
    stashed = " * versions (weight stashing)" if layout.schedule == "pipedream" else ""
    stored = device_activation_bytes(job, layout, stage, m)
    zero_source = "Rajbhandari et al., ZeRO (SC 2020); engine profile"
    return (
        MemoryLine(
            name=LineName.PARAMS,
            num_bytes=weights,
            formula="parameters of the stage / tp * weight bytes (/ shard degree from ZeRO-3)" + stashed,
            source=zero_source,
        ),
        MemoryLine(
            name=LineName.GRADS,
            num_bytes=grads,
            formula="parameters of the stage / tp * gradient bytes (/ shard degree from ZeRO-2)",
            source=zero_source,
        ),
        MemoryLine(
            name=LineName.OPTIMIZER_STATE,
            num_bytes=optimizer,
            formula="parameters of the stage / tp * (master weights + moments) (/ shard degree from ZeRO-1)",
            source=zero_source,
        ),
        MemoryLine(
            name=LineName.ACTIVATIONS,
            num_bytes=stored,
            formula="bytes per layer under the recompute policy * layers * microbatches in flight",
            source="Korthikanti et al. (2022), sections 4.1 to 4.3",
        ),
        MemoryLine(
            name=LineName.TRANSIENTS,
            num_bytes=_transient_bytes(job, layout, stage, stored),
            formula="max(logits and loss, one recomputed layer and its gathered ZeRO units) + gathered ends,"
            " or what the update takes beyond the activations",
            source="Korthikanti et al. (2022), section 5; torch FSDP2 prefetch",
        ),
        MemoryLine(
            name=LineName.RUNTIME,
            num_bytes=_runtime_bytes(job, layout, stored),
            formula="device context and communication buffers + allocator's share of the activations",
            source="device file, reserved_memory; engine profile, fragmentation",
        ),
    )


def host_lines(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[MemoryLine, ...]:
    """What one device of a stage keeps in its host's memory; nothing where the layout offloads nothing.

    Source: each line names its own.
    """
    lines = []
    if offloads_optimizer(layout):
        held, each = trained_params(job, layout, stage), host_state_bytes_per_param(job)
        more, more_routed = extra_moment_bytes(job, layout, stage)
        common = (each * held.common + more) / shard_degree(layout)
        routed = (each * held.experts + more_routed) / expert_shard_degree(layout)
        lines.append(
            MemoryLine(
                name=LineName.OPTIMIZER_STATE,
                num_bytes=common + routed,
                formula="parameters of the stage / tp / shard degree * (fp32 gradients + master weights + moments)",
                source="Ren et al., ZeRO-Offload (2021), section 3",
            )
        )
    if offloads_activations(layout):
        m = job.training.global_batch_size / (layout.dp * layout.mbs)
        lines.append(
            MemoryLine(
                name=LineName.ACTIVATIONS,
                num_bytes=offloaded_activation_bytes(job, layout, stage, m),
                formula="bytes per layer under the recompute policy * layers * microbatches in flight",
                source="Korthikanti et al. (2022), sections 4.1 to 4.3",
            )
        )
    return tuple(lines)
