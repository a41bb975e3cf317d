"""Bytes that are alive only for a short time: for the loss, or for the layer in its backward pass."""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.activations import activation_terms, inner_gradient_bytes, kept_bytes_of_layer, layer_activation_bytes
from planner.cost.adapters import frozen_bytes_per_param, largest_layer, trained_layer_params, trained_params
from planner.cost.layers import norm_is_one_kernel
from planner.cost.loss import logits_bytes, num_logits
from planner.cost.microbatch import num_microbatches, tokens_per_microbatch
from planner.cost.model_states import ends_beside_whole_gradients, model_state_bytes, whole_gradients
from planner.cost.operators import core_widths, layer_of
from planner.cost.optimizers import update_bytes
from planner.cost.parameters import head_params_on_device, layer_params_on_device, matrices_of_layer, vision_params
from planner.cost.stage import (
    by_policy,
    end_params,
    held_params,
    holds_head,
    largest_of_layers,
    shard_degree,
    shard_of,
)
from planner.cost.transfers import context_bytes
from planner.layout import offloads_optimizer
from planner.once import once
from planner.specs.recompute import FULL
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.cost.stage import Stage
    from planner.layout import Degrees
    from planner.numbers import Flag, Number
    from planner.specs.job import PoolJob


@once
def loss_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Logits and other tensors of the loss on the last stage, for one microbatch, and the head's gradient.

    In engines with `gradients_apart`, GPipe holds the logits of all microbatches, and 1F1B holds the previous
    microbatch's logits until the next logits are computed.

    Source: cost/loss.py; torch, distributed/pipelining/schedules.py (1F1B's loop keeps an output).
    """
    one = logits_bytes(job, layout) + _outputs_of_layers(job, layout, stage)
    if not job.engine.memory.gradients_apart:
        return holds_head(layout, stage) * one
    head = job.state_bytes.weights * head_params_on_device(job.model, job.engine, layout)
    piped = np.greater(layout.pp, 1)
    if layout.schedule == "gpipe":
        return holds_head(layout, stage) * (np.where(piped, num_microbatches(job, layout), 1) * one + head)
    return holds_head(layout, stage) * (one + np.maximum(np.where(piped & (layout.schedule == "1f1b"), one, 0.0), head))


def _outputs_of_layers(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the outputs of layers that a list holds until the forward pass ends, and that no layer keeps otherwise.

    Checkpoints keep their layer's input, and so do norms of one kernel; a norm of separate operators keeps a copy.

    Source: TRL 0.24, models/modeling_value_head.py (output_hidden_states); tests/cost/test_objectives.py counts.
    """
    if job.training.method.reads_logits or norm_is_one_kernel(job):
        return 0.0
    stored = stage.num_layers * by_policy(layout, stage, lambda policy: float(policy != FULL))
    return job.compute_bytes * job.model.hidden_size * tokens_per_microbatch(job, layout) * stored


def recompute_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes that recompute restores for the layer in its backward pass, for the kind of layer with the most.

    Source: Korthikanti et al. (2022), section 5.
    """

    def restored(experts: bool) -> Number:
        kept, whole = kept_bytes_of_layer(job, layout, stage, experts=experts, recomputing=True)
        return whole - kept

    return largest_of_layers(job, layout, stage, restored)


def transient_bytes(job: PoolJob, layout: Degrees, stage: Stage, stored: Number) -> Number:
    """Bytes that are alive only for a short time: the larger of the loss and one layer's backward pass.

    Embedding and head are one unit, which ZeRO-3 keeps gathered, with its gradient, until the backward pass ends. If
    the update of the weights needs more memory, the update's bytes count instead, less the `stored` activations, which
    are freed before the update. In a step of one microbatch, gradients take the place of activations as the backward
    pass goes on.

    Source: torch FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_state.py (the root is not resharded).
    """
    engine, weights = job.engine, job.state_bytes.weights
    # a tower's layers are separate units
    ends = end_params(job, layout, stage) - np.equal(stage.index, 0) * vision_params(job.model)
    head = holds_head(layout, stage) * head_params_on_device(job.model, engine, layout)
    gathered = np.greater_equal(layout.zero, 3) * weights * (ends if engine.memory.keeps_ends_gathered else head)
    kept = whole_gradients(job, layout) | (job.training.lora_rank > 0)  # frozen ends have no gradients
    reduced = np.where(kept, 0.0, weights * np.minimum(ends, engine.memory.reduced_params))
    loss, layer = loss_bytes(job, layout, stage), layer_backward_bytes(job, layout, stage)
    layer = layer + np.maximum(_held_input_bytes(job, layout, stage) - stored, 0.0)
    if engine.memory.bucket_buffers:
        reduced = 0.0 * reduced  # the head's gradient goes into a buffer, which exists from then on
        loss = loss + _buffers_between_passes(job, layout)
    beside, at_end = ends_beside_whole_gradients(job, layout, stage, stored)
    layer = layer + beside
    if engine.memory.gathers_head_apart:
        largest = _peak_with_separate_ends(job, layout, stage, stored, loss=loss, layer=layer, ends=ends)
    else:
        layer = layer + (gathered + reduced) * engine.memory.keeps_ends_gathered
        bucket, at_loss = _bucket_bytes(job, layout, stage, stored), not engine.memory.bucket_buffers
        live, ahead = _live_bytes(job, layout, stage)
        layer = layer + np.maximum(ahead - gathered_layers(job, layout, stage), 0.0)
        largest = np.maximum(loss + np.maximum(gathered, live) + reduced + bucket * at_loss, layer + bucket)
        later = _gradients_to_come(job, layout, stage)
        largest = largest - np.minimum(later, np.minimum(largest, largest - layer - bucket + stored))
    largest = np.maximum(np.maximum(largest, at_end), _gathered_reference(job, layout, stage, loss))
    largest = largest + _placeholder_bytes(job, layout, stage)
    if not offloads_optimizer(layout):  # else the update is made on the host
        largest = np.maximum(largest, update_bytes(job, layout, stage) - stored)
    return largest + lasting_buffer_bytes(job, layout)


def _gathered_reference(job: PoolJob, layout: Degrees, stage: Stage, loss: Number) -> Number:
    """Bytes in the forward pass of a reference model that ZeRO-3 gathers as one unit, while logits of both are alive.

    Source: TRL f2cd5771, models/utils.py (prepare_fsdp, `fully_shard` of the root alone) and trainer/dpo_trainer.py
    (_compute_loss); torch FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (unshard).
    """
    if job.training.reference_at != "resident" or not job.engine.memory.gathers_whole_reference:
        return 0.0
    gathers = np.greater_equal(layout.zero, 3) & np.greater(shard_degree(layout), 1)
    return gathers * (loss + job.state_bytes.weights * held_params(job, layout, stage).total)


def _peak_with_separate_ends(
    job: PoolJob, layout: Degrees, stage: Stage, stored: Number, *, loss: Number, layer: Number, ends: Number
) -> Number:
    """Peak of an FSDP2 step in which embedding and head are separate units: the largest of the sums at several moments.

    The last gather buffer lives until the backward pass begins. The gradient of an untied head is reduced while the
    last layer is gathered, and the reduced copy is alive during that layer's backward pass. The embedding's gradient is
    reduced last, when the `stored` activations are freed. A tied embedding is one unit that stays gathered; its two
    gradients and their sum are alive together. With HSDP the gradient sums of all layers are kept until the backward
    pass ends.

    Source: accelerate 1.15, utils/fsdp_utils.py (fsdp2_prepare_model); torch FSDP2, torch/distributed/fsdp/
    _fully_shard/_fsdp_param_group.py (wait_for_unshard, post_backward, AllReduceState), _fsdp_collectives.py
    (foreach_reduce); `planner verify` counts it.
    """
    gathered = np.greater_equal(layout.zero, 3) * job.state_bytes.weights
    whole = whole_gradients(job, layout) | (job.training.lora_rank > 0)  # frozen ends have no gradients
    waits, copied = np.where(whole, 0.0, job.state_bytes.weights), np.where(whole, 0.0, job.reduced_bytes)
    widened = job.state_bytes.grads * (job.state_bytes.grads > job.reduced_bytes)  # a sum in fp32 needs no other
    shard = np.where(whole, 0.0, job.reduced_bytes + widened) / shard_degree(layout)
    # one rank gathers without a buffer and not ahead; on several, foreach_reduce's loop refers to the last gradient
    several = np.greater(shard_degree(layout), 1)
    held = waits * several
    largest = largest_layer(job, layout, stage)
    gathered_layer, copied_layer = _gathered_bytes_per_param(job, layout) * largest, copied * largest
    # a layer's own reduction, when its weights and tensors are free: on one rank its result is as large as its copy
    own = (copied + shard) * largest + _gathered_ahead(job, layout, stage) - stored / np.maximum(stage.num_layers, 1)
    graded = job.training.method.reads_logits
    from_loss = (job.loss == "whole") * graded * job.compute_bytes * num_logits(job, layout)
    forward = loss - from_loss * holds_head(layout, stage)
    if job.model.tied_embeddings:
        layer = np.maximum(layer, own) + (gathered + waits) * ends
        last = np.maximum((gathered + 3 * waits) * ends + copied_layer, (held + copied + shard) * ends)
        moments: tuple[Number, ...] = (loss + gathered * ends, forward + gathered * ends + gathered_layer, layer)
    else:
        head = holds_head(layout, stage) * head_params_on_device(job.model, job.engine, layout)
        # a loss in chunks sums the head's gradients in the precision of their reduction, while the head is gathered
        reduced = (held + copied + shard) * head + gathered_layer * several
        if job.loss == "chunked":
            reduced = (gathered + 2 * copied + shard) * head
        last = (held + copied + shard) * (ends - head)
        layer = layer + graded * np.maximum(copied * head - _copy_beside(job, layout, stage), 0.0)
        own = own + gathered * (ends - head) * (several & np.less(stage.num_layers, 2))  # the embedding is ahead
        moments = (loss + gathered * head, forward + (1 + several) * gathered * head, graded * reduced, layer, own)
    summed = job.reduced_bytes * shard_of(job, layout, trained_params(job, layout, stage))
    kept = np.where(whole_gradients(job, layout), 0.0, np.greater(layout.hsdp, 1) * summed)
    at_end = np.maximum(last, layer + kept) - stored
    return np.maximum(np.maximum(at_end, 0.0), reduce(np.maximum, moments) - _gradients_to_come(job, layout, stage))


def _gradients_to_come(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the ledger's gradients that do not exist when the backward pass of a step's only microbatch begins.

    Source: torch.optim.Optimizer.zero_grad, which frees gradients (set_to_none).
    """
    alone = np.equal(layout.pp, 1) & np.equal(job.training.global_batch_size, layout.dp * layout.mbs)
    frees = job.engine.memory.whole_gradients != "lasting"
    return model_state_bytes(job, layout, stage)[1] * (alone & frees)


@once
def _largest_matrix(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Elements of the largest matrix of a stage's layers."""
    of_layer = partial(matrices_of_layer, job.model, layout)
    return largest_of_layers(job, layout, stage, lambda kind: reduce(np.maximum, of_layer(experts=kind)))


def layer_backward_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes that the layer in its backward pass needs beside stored activations, for the kind of layer that needs most.

    Three parts add up: the bytes that recompute restores; the weights that ZeRO-3 gathers for the present layer and
    prefetches for the next, up to the engine's bucket size; and, unless gradients are kept whole, the gradients that
    wait for their reduction and the copy that is being reduced.

    Source: Korthikanti et al. (2022), section 5; torch FSDP2, torch/distributed/fsdp/_fully_shard/ _fsdp_param_group.py
    (forward and backward prefetch).
    """
    inner = largest_of_layers(job, layout, stage, lambda kind: inner_gradient_bytes(job, layout, experts=kind))
    trained = largest_of_layers(job, layout, stage, lambda kind: trained_layer_params(job, layout, experts=kind).total)
    waiting, copy = np.minimum(trained, job.engine.memory.reduced_params), _copy_beside(job, layout, stage)
    if job.engine.memory.bucket_buffers:  # they are the copies, and each gradient is moved to them
        own, matrix = ~np.asarray(_shards_gradients(layout)), _largest_matrix(job, layout, stage)
        waiting, copy = np.where(own, waiting, np.minimum(waiting, matrix)), own * copy
    reduced = np.where(whole_gradients(job, layout), 0.0, job.state_bytes.weights * waiting) + copy + inner
    if job.engine.memory.gradients_apart:
        reduced = _gradients_of_layer(job, layout, stage)
    moved = gathered_layers(job, layout, stage) + reduced + _score_gradients(job, layout)
    # attention's gradients come after those of the feed-forward block, whose inner tensors (gate, up, their activation
    # and product) and two gradients are freed by then: three times the bytes of the gradients
    moved = moved + _dequantized_bytes(job, layout) + np.maximum(0.0, _gathered_context(job, layout) - 3.0 * inner)
    return recompute_bytes(job, layout, stage) + moved


@once
def _copy_beside(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the layer before's gradients that are being reduced, beside what a layer's backward pass gathers ahead.

    Under ZeRO-3 the backward pass of the last layer has no layer before it, and that of the first gathers nothing
    ahead. So a single layer has neither, and of two layers the copy counts as far as it exceeds the weights.

    Source: torch FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (_backward_prefetch, post_backward);
    `planner verify` counts it.
    """
    size = np.minimum(largest_layer(job, layout, stage, trained=True), job.engine.memory.reduced_params)
    copy = np.where(whole_gradients(job, layout), 0.0, job.reduced_bytes * size)
    if job.engine.memory.bucket_buffers:
        return copy
    has_before = np.greater(stage.num_layers, 1) | np.less(layout.zero, 3)
    return np.maximum(copy * has_before - _gathered_ahead(job, layout, stage) * np.less(stage.num_layers, 3), 0.0)


@once
def _gathered_ahead(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the weights that ZeRO-3 prefetches on several ranks, for the layer after the present one."""
    ahead = np.minimum(largest_layer(job, layout, stage), job.engine.memory.prefetched_params)
    several = np.greater(stage.num_layers, 1) * np.greater(shard_degree(layout), 1)
    return _gathered_bytes_per_param(job, layout) * ahead * several


@once
def gathered_layers(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the weights that ZeRO-3 gathers for the present layer and, on several ranks, prefetches for the next.

    Source: torch FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (forward and backward prefetch;
    unshard does nothing on one rank).
    """
    present = _gathered_bytes_per_param(job, layout) * np.minimum(1, stage.num_layers)
    return present * largest_layer(job, layout, stage) + _gathered_ahead(job, layout, stage)


def _live_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Number, Number]:
    """Bytes of gathered weights at the loss and in a layer's backward pass, in engines that gather far ahead.

    The engine keeps or gathers the weights that the backward pass needs next, until it holds as many elements as its
    limit allows; packed weights count as 16-bit elements. At the loss these are the head and the last layers, or the
    whole last layer, if its largest parameter exceeds the limit: all experts of a layer are two. Layers whose quantised
    weights stay with their products are among the activations. If all layers leave room, the whole embedding follows,
    unless no gradient reaches it: recompute asks for gradients at its output.

    Grouped products keep a view of the experts' weights, which stay on the device until the layer's backward pass,
    although they are released and gathered again. Not released are those that are needed within the limit's distance,
    through the head and back.

    Source: DeepSpeed, runtime/zero/partitioned_param_coordinator.py (__params_to_release, _fetch_sub_module_impl),
    stage3_max_live_parameters; transformers, enable_input_require_grads and integrations/moe.py (_grouped_linear);
    `planner verify` counts it.
    """
    most, ends = job.engine.memory.live_params * job.state_bytes.weights, end_params(job, layout, stage)
    if not most:
        return 0.0, 0.0
    head = job.state_bytes.weights * holds_head(layout, stage) * head_params_on_device(job.model, job.engine, layout)
    each, held = _gathered_bytes_per_param(job, layout), held_params(job, layout, stage)
    layers = each * (held.total - ends)
    again = by_policy(layout, stage, lambda policy: float(policy == FULL))
    embedding = np.maximum(job.state_bytes.weights * ends - head, 0.0) * (not job.training.lora_rank or again > 0)
    room = np.maximum(most - head, 0.0)
    whole = np.minimum(room + each * _largest_matrix(job, layout, stage), each * largest_layer(job, layout, stage))
    last = np.minimum(np.where(room > 0, np.maximum(room, whole), 0.0), layers)
    last = last * (job.training.frozen_weights == "16-bit")
    at_loss = head + last + embedding * np.less(layers + head, most)
    stays = np.clip((most / 2 - head) / np.maximum(layers, 1.0), 0.0, 1.0)
    viewed = each * held.experts * (1.0 - again) * (1.0 - stays)
    gathers = np.greater_equal(layout.zero, 3)
    return gathers * (at_loss + viewed), gathers * (np.minimum(layers + embedding, most) + viewed)


def _gathered_bytes_per_param(job: PoolJob, layout: Degrees) -> Number:
    """Bytes that ZeRO-3 gathers for each weight of a layer: frozen weights travel as they are stored."""
    each = frozen_bytes_per_param(job) if job.training.lora_rank else job.state_bytes.weights
    return np.greater_equal(layout.zero, 3) * each


def _bucket_bytes(job: PoolJob, layout: Degrees, stage: Stage, stored: Number) -> Number:
    """Bytes of the bucket of gradients that is being reduced, and of the buffers in which gradients are collected.

    The copy of a first bucket takes the place of the `stored` activations of the layers whose gradients fill it, after
    that of an untied head.

    Source: DeepSpeed, runtime/zero/stage_1_and_2.py (allreduce_bucket makes a copy; setup_buckets makes two buffers of
    reduce_bucket_size with overlap_comm, for models of any size); `planner verify` counts it.
    """
    bucket = job.engine.memory.gradient_bucket
    buffers, each = job.engine.memory.bucket_buffers * bucket, _shards_gradients(layout) * job.state_bytes.weights
    reduced = each * np.minimum(trained_params(job, layout, stage).total, bucket)
    if buffers:
        head = holds_head(layout, stage) * head_params_on_device(job.model, job.engine, layout)
        head = head * (job.training.method.reads_logits and not job.model.tied_embeddings)
        room = bucket - head - _largest_matrix(job, layout, stage)
        layers = room / np.maximum(largest_layer(job, layout, stage, trained=True), 1.0)
        freed = stored * np.clip(layers / np.maximum(stage.num_layers, 1), 0.0, 1.0)
        reduced = np.maximum(reduced - freed, 0.0)
    return each * buffers + reduced


def _buffers_between_passes(job: PoolJob, layout: Degrees) -> Number:
    """Bytes of the buffers that ZeRO-1 keeps between microbatches, because it reduces only after the last microbatch.

    Source: DeepSpeed, runtime/zero/stage_1_and_2.py (setup_buckets, _release_ipg_buffers); `planner verify` counts it.
    """
    size = job.state_bytes.weights * job.engine.memory.bucket_buffers * job.engine.memory.gradient_bucket
    adds_up = np.greater(job.training.global_batch_size, layout.dp * layout.mbs)
    return size * (_shards_gradients(layout) & np.equal(layout.zero, 1) & adds_up)


def lasting_buffer_bytes(job: PoolJob, layout: Degrees) -> Number:
    """Bytes of the one buffer for gradients that ZeRO-3 keeps during the whole run.

    Source: DeepSpeed, runtime/zero/stage3.py (_setup_for_real_optimizer); `planner verify` counts it.
    """
    size = job.state_bytes.weights * job.engine.memory.gradient_bucket * (job.engine.memory.bucket_buffers > 0)
    return np.greater_equal(layout.zero, 3) * size


def _shards_gradients(layout: Degrees) -> Flag:
    """Whether gradients are reduced in buckets: with ZeRO-1 and ZeRO-2, and no pipeline."""
    return np.equal(layout.pp, 1) & np.greater_equal(layout.zero, 1) & np.less(layout.zero, 3)


def _held_input_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the inputs of recomputed layers, and of their gradients, that live until the backward pass ends.

    A hook that frees a frozen unit's weights refers to the unit's inputs. Reentrant checkpoints detach the inputs, so
    the hook keeps them and their gradients.

    Source: torch FSDP1, torch/distributed/fsdp/_runtime_utils.py (_register_post_backward_reshard_only_hook);
    torch/utils/checkpoint.py (CheckpointFunction); counted by tests/trainer/test_frozen_units.py.
    """
    if not job.engine.memory.holds_frozen_inputs or not job.training.lora_rank:
        return 0.0
    (one,) = layer_activation_bytes(job, layout, policies=(FULL,))
    share = by_policy(layout, stage, lambda policy: float(policy == FULL))
    return np.greater_equal(layout.zero, 2) * 2 * one * share * stage.num_layers


def _placeholder_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of placeholder gradients, one per weight shape, if products add the real gradients to the sums themselves.

    Source: Megatron-LM, tensor_parallel/layers.py (grad_added_to_main_grad); Transformer Engine, pytorch/module/base.py
    (get_dummy_wgrad).
    """
    if not job.engine.memory.gradient_placeholders or job.training.lora_rank:
        return 0.0
    one_expert = layout.ep / job.model.moe.num_experts if job.model.moe is not None else 0.0

    def shapes(experts: bool) -> Number:
        held = layer_params_on_device(job.model, layout, experts=experts)
        return held.common + held.experts * one_expert

    largest = largest_of_layers(job, layout, stage, shapes)
    head = holds_head(layout, stage) * head_params_on_device(job.model, job.engine, layout)
    return job.compute_bytes * (largest + head)


def _score_gradients(job: PoolJob, layout: Degrees) -> Number:
    """Bytes of the gradient of one layer's attention scores: as many as the kept softmax has; 0 with a fused kernel.

    Source: derived here; softmax's backward pass reads the probabilities and their gradient, and writes the gradient of
        the scores.
    """
    return sum_of(term.num_bytes for term in activation_terms(job, layout, experts=False) if term.name == "softmax")


def _gathered_context(job: PoolJob, layout: Degrees) -> Number:
    """Bytes of what the backward pass of one layer's attention holds, where each pass gathers keys and values.

    Keys and values of all ranks; their own gradients in fp32, which the rank adds to and sends, and in 16 bits as a hop
    leaves them; of queries the sum in fp32, a hop's gradient, and the gradient of the output.

    Source: torch, distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention_backward.
    """
    if job.engine.communication.context_exchange != "gathered-ring" or not job.model.attends:
        return 0.0
    (own,), b = context_bytes(job, layout), job.compute_bytes
    queries = tokens_per_microbatch(job, layout) * core_widths(job.model, layout.tp)[0] / layout.tp
    held = own * (layout.cp + 8.0 / b + 1.0) + queries * (4.0 + 2.0 * b)
    return np.where(np.greater(layout.cp, 1), held, 0.0)


def _gradients_of_layer(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the temporary gradients in one layer's backward pass, less the tensors released by then.

    The first possible peak is in the feed-forward block, with gradients of the block's inner tensors (two for each
    released tensor), of the layer's output, and of the last matrix. The second possible peak is at the layer's end,
    with gradients of all weights in the compute precision, after the layer's kept tensors are freed. Unless gradients
    are kept whole, the previous layer's gradients are being reduced in fp32 at the same time. On one rank without a
    pipeline their sum is copied all the same, in the last microbatch.

    Source: derived here; counted in the trainer's own step by tests/trainer/test_memory_at_scale.py.
    """
    states, whole = job.state_bytes, whole_gradients(job, layout)
    summed_in_place = whole & (states.weights >= states.grads)
    reduces = ~np.asarray(whole) | (np.equal(layout.pp, 1) & np.equal(shard_degree(layout), 1))

    def of_layer(experts: bool) -> Number:
        kept, everything = kept_bytes_of_layer(job, layout, stage, experts=experts)
        held = layer_params_on_device(job.model, layout, experts=experts).total
        # bytes of one layer: (stages,), or (layouts, stages) of a search
        terms = {term.name: term.num_bytes for term in activation_terms(job, layout, experts=experts)}
        inner = sum_of(size for name, size in terms.items() if name.endswith(" inner")) / 2
        first = inner + terms["layer input"] + states.weights * _last_matrix(job, layout, experts=experts)
        before = states.grads * held * np.greater(stage.num_layers, 1) * reduces
        end = np.where(summed_in_place, 0.0, states.weights * held) + before - everything
        return np.maximum(first + np.maximum(before - kept, 0.0), end)

    return largest_of_layers(job, layout, stage, of_layer)


def _last_matrix(job: PoolJob, layout: Degrees, *, experts: bool) -> Number:
    """Elements of the last matrix of the feed-forward block, or of all expert blocks, on one device."""
    downs = [each for each in layer_of(job.model, experts=experts).products if each.ends_block]
    routed = [each for each in downs if each.count] or downs  # shared experts are computed beside routed ones
    return sum_of(each.held(layout) for each in routed)


def _dequantized_bytes(job: PoolJob, layout: Degrees) -> Number:
    """Bytes of a frozen matrix converted to 16 bits for its product: the largest matrix of a layer.

    Source: Dettmers et al., QLoRA (2023), section 3, equation 5.
    """
    if job.training.frozen_weights == "16-bit":
        return 0.0
    return job.compute_bytes * reduce(np.maximum, matrices_of_layer(job.model, layout, experts=False))
