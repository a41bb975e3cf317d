"""Activations kept for the backward pass: the tensors of one layer, and the peak of a stage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.adapters import adapted_matrices, frozen_bytes_per_param, widens_stream
from planner.cost.layers import norm_is_one_kernel, num_tiles, rows_of
from planner.cost.microbatch import tokens_per_microbatch
from planner.cost.mixers import mixer_shape
from planner.cost.operators import core_widths, cross_attention_share, layer_of, output_width
from planner.cost.recompute import ACTIVATION, modules_of, norm_modules
from planner.cost.schedule import held_microbatches
from planner.cost.stage import known_values, largest_of_layers, layer_kinds, mtp_layers, of_policies, policies_of
from planner.layout import offloads_activations
from planner.once import once
from planner.specs.recompute import FULL, NONE, SELECTIVE
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from planner.cost.stage import Stage
    from planner.layout import Degrees
    from planner.numbers import Flag, Number
    from planner.specs.job import PoolJob
    from planner.specs.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTerm:
    """One tensor that a layer keeps for its backward pass.

    num_bytes: bytes for one microbatch on one device.
    is_of_tile: whether the tensor belongs to one tile (`training.mlp_tiles`), whose backward pass computes it again.
    is_referred: whether an operator refers to the tensor without autograd's knowledge, so that no recompute drops it.
    saved: share of the tensor that operator-level selective recompute keeps (outputs of attention and of every second
        product).
    dropped: for each part of a layer that can be recomputed (`planner.specs.recompute.MODULES` and `ACTIVATION`), the
        share of the tensor that recompute of this part drops.
    """

    name: str
    num_bytes: Number
    is_input: bool = False
    is_of_tile: bool = False
    is_referred: bool = False
    saved: float = 0.0
    dropped: Mapping[str, float] = field(default_factory=dict)


def _norm_tensors(job: PoolJob) -> float:
    """Ratio of the bytes that a norm keeps to the bytes of its input: 1 if it is one kernel, else up to 4.

    Separate operators keep the input in fp32 and, for the gradient of a trained weight, a normalized copy in 16 bits
    (in fp32 if the weight is multiplied there), but not the 16-bit input.

    Source: transformers, LlamaRMSNorm and Gemma2RMSNorm (a product keeps its factors); `planner verify` counts these
    bytes.
    """
    if norm_is_one_kernel(job):
        return 1.0
    normalized = 2.0 if job.model.wide_norms else 1.0
    return 2.0 if job.training.lora_rank else 2.0 + normalized


@once
def activation_terms(job: PoolJob, layout: Degrees, *, experts: bool = False) -> tuple[ActivationTerm, ...]:
    """Tensors that one layer keeps for the backward pass of one microbatch on one device.

    Bytes per element of an (s b h) tensor:

    - norm inputs 2 + 2, and inputs of the two blocks 2 + 2
    - queries and attention output 2 each, keys and values 2 g/a each
    - GELU 2f/h + 2f/h, or SwiGLU 8f/h (6f/h fused)
    - dropout masks 1 each

    Unfused attention keeps softmax 2as/h, its dropout mask as/h and the scores after dropout 2as/h; fused attention
    keeps 4a/h of fp32 log-sum-exp instead. Without sequence parallelism every tensor-parallel rank keeps the whole norm
    inputs, block inputs and masks. Summed for a GPT without fused attention this is s b h (10 + 24/t + 5as/(ht)), or s
    b h (34 + 5as/h) / t with sequence parallelism.

    Source: Korthikanti et al. (2022), sections 4.1 to 4.3; the Llama block was checked against torch's saved tensors.
    """
    model, training = job.model, job.training
    if model.layers:
        return _mean_terms(job, layout, experts=experts)
    tokens = tokens_per_microbatch(job, layout)  # (layouts,), like all bytes below
    element = job.compute_bytes * tokens  # of one element of the width
    narrow = element * _narrow(job)
    sharded = np.where(np.equal(layout.sp, 1), layout.tp, 1)
    gathered = sharded if job.engine.memory.regathers_inputs else np.ones_like(sharded)
    h = model.hidden_size
    stream = element * (2 if widens_stream(job) else 1)
    before_attention, before_block = norm_modules(job, experts=experts)
    mask = tokens * (1.0 if training.dropout else 0.0)
    terms = [
        ActivationTerm(name="layer input", num_bytes=stream * h / sharded, is_input=True),
        ActivationTerm(
            name="attention input",
            num_bytes=narrow * h / gathered * _is_read_again(job, "attention input", experts=experts),
            dropped=dict.fromkeys(before_attention, 1.0),
        ),
        *_attention_terms(job, layout),
        ActivationTerm(name="attention dropout mask", num_bytes=mask * h / sharded),
        ActivationTerm(name="feed-forward dropout mask", num_bytes=mask * h / sharded),
    ]
    if not model.parallel_attention:
        terms.append(ActivationTerm(name="residual", num_bytes=stream * h / sharded))
    if model.norms_per_layer > 1:
        read = element if experts and model.moe is not None else narrow  # the router reads 16 bits
        kept = read * h / gathered * _is_read_again(job, "feed-forward input", experts=experts)
        dropped = dict.fromkeys(before_block, 1.0)
        terms.append(ActivationTerm(name="feed-forward input", num_bytes=kept, dropped=dropped))
    terms += _adapter_terms(job, layout, experts=experts)
    if not norm_is_one_kernel(job):
        kept = (_norm_tensors(job) * element - stream) * h / sharded
        for name, parts in (("attention", before_attention), ("feed-forward", before_block))[: model.norms_per_layer]:
            repeated = dict.fromkeys(parts, 1.0)
            terms.append(ActivationTerm(name=f"{name} norm in fp32", num_bytes=kept, dropped=repeated))
    extra_norms = max(0, model.norms_per_layer - 2)
    if extra_norms:
        after = extra_norms * _norm_tensors(job) * element * h / sharded
        terms.append(ActivationTerm(name="inputs of norms after blocks", num_bytes=after))
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
    return (*terms, *_block_terms(job, layout, experts=experts))


def _narrow(job: PoolJob) -> float:
    """Bytes kept for the input of a product, divided by the bytes of a 16-bit input.

    NVFP4 has 4 bits and an 8-bit scale for each 16 values.

    Source: DeepSeek-V3 (2024), section 3.3.3; Transformer Engine, pytorch/tensor/nvfp4_tensor.py.
    """
    low = {"fp8": 1 / 2, "fp4": (4 + 8 / 16) / 16}
    return low.get(job.training.precision, 1.0) if job.engine.memory.fp8_activations else 1.0


def _is_read_again(job: PoolJob, tensor: str, *, experts: bool) -> float:
    """1.0 if an input of products is kept, for the gradient of one of their matrices or of its adapter; else 0.0.

    Source: Hu et al., LoRA (2021), section 4.2; a frozen matrix passes gradients on without its input.
    """
    adapted = adapted_matrices(job.model, job.training, experts=experts)
    reads = {product.reads for product, _ in adapted if product.count or not job.training.lora_dropout}
    return float(not job.training.lora_rank or tensor in reads)


def _adapter_terms(job: PoolJob, layout: Degrees, *, experts: bool) -> Iterator[ActivationTerm]:
    """Outputs of the adapters' first matrices, and the inputs that only products with frozen weights read.

    The products of ZeRO-3, or of quantised weights, may keep such inputs, too. With dropout each adapter has an input
    and a mask of its own. A product with quantised weights refers to them until its backward pass, so weights that
    DeepSpeed gathered stay whole when it releases them. Checkpoints drop what autograd saves, and not these.

    Source: Hu et al., LoRA (2021), section 4.1; deepspeed, runtime/zero/linear.py (LinearFunctionForZeroStage3),
    partition_parameters.py (free_param); bitsandbytes, autograd/_functions.py (MatMul4Bit, ctx.tensors); peft,
    tuners/lora/layer.py (Linear); engine profile. `planner verify` counts it.
    """
    adapters = adapted_matrices(job.model, job.training, experts=experts)
    for product, _ in adapters:
        rows, batch = rows_of(job, layout, product)
        width = 1.0 * job.training.lora_rank
        if job.training.lora_dropout and not product.count:  # PEFT has none beside routed experts
            width = width + (1 + job.engine.memory.dropout_masks / job.compute_bytes) * product.sides(layout)[0]
        num_bytes = job.compute_bytes * width * product.share * rows * batch
        yield ActivationTerm(name="adapters", num_bytes=num_bytes, dropped=dict.fromkeys(product.modules, 1.0))
    memory, quantised = job.engine.memory, job.training.frozen_weights != "16-bit"
    if adapters and quantised and memory.zero3_keeps_inputs:
        for product in layer_of(job.model, experts=experts).products:
            num_bytes = np.equal(layout.zero, 3) * frozen_bytes_per_param(job) * product.held(layout)
            yield ActivationTerm(name="gathered frozen weights", num_bytes=num_bytes, is_referred=True)
    if not adapters or not np.any(keeps := _keeps_frozen_inputs(job, layout)):
        return
    frozen: Number = 0.0
    for product in {each.reads: each for each in layer_of(job.model, experts=experts).products}.values():
        if product.reads.endswith((" input", " inner")):  # the core of attention keeps the others
            (rows, batch), (width, _) = rows_of(job, layout, product), product.sides(layout)
            frozen = frozen + rows * batch * width * (1.0 - _is_read_again(job, product.reads, experts=experts))
    yield ActivationTerm(name="inputs of frozen weights", num_bytes=keeps * job.compute_bytes * frozen)


def _keeps_frozen_inputs(job: PoolJob, layout: Degrees) -> Flag:
    """Whether products with frozen weights keep their inputs; quantised products are not DeepSpeed's."""
    if job.training.frozen_weights != "16-bit":
        return job.engine.memory.quantised_keep_inputs
    return job.engine.memory.zero3_keeps_inputs and np.equal(layout.zero, 3)


def _inner_tensors(job: PoolJob, last: float) -> float:
    """Number of kept tensors of the feed-forward width: 2 with GELU (its input and output), 3 or 4 with SwiGLU.

    SwiGLU keeps gate, up and their product, and as separate operators also the activated gate.
    last: 1.0 if the input of the block's last product (the output of GELU, or the product) is kept; else 0.0.
    """
    tensors = (3.0 if job.engine.memory.fused_swiglu else 4.0) if job.model.activation == "swiglu" else 2.0
    return tensors - 1.0 + last


def _inner_bytes(job: PoolJob, last: float) -> float:
    """Bytes of the kept feed-forward tensors for each token and each element of the feed-forward width.

    Source: Transformer Engine, pytorch/module/linear.py: the second product's input is saved in 8 bits; DeepSeek-V3
    (2024), section 3.3.3, also keeps the inputs of the activation function in 8 bits.
    """
    others = 0.5 if job.engine.memory.fp8_gates and job.training.precision in ("fp8", "fp4") else 1.0
    return job.compute_bytes * ((_inner_tensors(job, last) - last) * others + last * _narrow(job))


def inner_gradient_bytes(job: PoolJob, layout: Degrees, *, experts: bool) -> Number:
    """Bytes of the gradient of the activation function's inputs; the layer's kept tensors are alive at the same time.

    The gradient of the last product's input takes the place of this input, if it was kept; if only a frozen matrix
    reads the input, the gradient is in addition.

    Source: derived here; the tensors of the feed-forward block are the widest of a layer; `planner verify` counts them.
    """
    elements: Number = 0.0
    inputs = 2.0 if job.model.activation == "swiglu" else 1.0
    for product in layer_of(job.model, experts=experts).products:
        if product.ends_block:
            (rows, batch), (width, _) = rows_of(job, layout, product), product.sides(layout)
            kept = np.maximum(_is_read_again(job, product.reads, experts=experts), _keeps_frozen_inputs(job, layout))
            elements = elements + (inputs + 1.0 - kept) * product.share * rows * batch * width / num_tiles(job, product)
    return job.compute_bytes * elements


def _saved_share(model: ModelSpec) -> float:
    """Share of queries, keys and values that operator-level recompute keeps: outputs of every second product.

    These are queries and values; keys come from the second of the three products.
    """
    query, key, value = core_widths(model, 1)
    return 1.0 if model.shares_keys else float((query + value) / (query + key + value))


def _attention_terms(job: PoolJob, layout: Degrees) -> tuple[ActivationTerm, ...]:
    """Queries, keys, values, output and the kernel's tensors; latent attention also keeps its latents, unsharded.

    Engines that gather the context keep the keys and values of all cp ranks, and a second, joined copy of the output.
    Engines that exchange sequence parts for heads (Ulysses) keep the output twice: divided by heads, and divided by
    sequence.

    Attention in 8 bits keeps its inputs and its output in 8 bits. A trained product after it keeps an 8-bit copy of its
    own, so only beside frozen weights the output has fewer bytes.

    Source: Transformer Engine, pytorch/attention/dot_product_attention/backends.py (FusedAttnFunc, delayed scaling).
    """
    model, t, exchange = job.model, layout.tp, job.engine.communication.context_exchange
    cut = np.greater(layout.cp, 1)
    context = np.where(cut, layout.cp, 1) if exchange == "gather" else 1
    outputs = np.where(cut & ("ring" not in exchange), 2.0, 1.0)
    tokens = tokens_per_microbatch(job, layout)
    element = job.compute_bytes * tokens
    held = tokens if job.attention_precision == "fp8" else element
    further = _mixer_terms(job, layout)
    if not model.attends:
        return further
    query, key, value = core_widths(model, t)  # keys and values: (layouts,), as tp may exceed their heads
    if model.mla is None:
        if model.shares_keys:
            key, value = 0 * key, 0 * value  # the earlier layer keeps them
        read, saved, dropped = query + (key + value) * context, _saved_share(model), {}
    else:
        heads = layer_of(model, experts=False).width("key_value_up")  # keys without positions, and values
        values = np.where(cut, layout.cp * value, heads) if exchange == "gather" else heads
        read, saved, dropped = query + values + context * key, 0.5, {"mla_up_proj": 1.0}  # keys joined with positions
    output = held if job.training.lora_rank else element
    terms = [
        ActivationTerm(name="queries, keys and values", num_bytes=held * read / t, saved=saved, dropped=dropped),
        ActivationTerm(name="attention output", num_bytes=outputs * output * output_width(model) / t, saved=1.0),
    ]
    if model.mla is not None:
        layer = layer_of(model, experts=False)
        normed = sum(each.inputs for each in layer.products if each.reads == "latents")
        latents = _norm_tensors(job) * normed + layer.width("query_down") + layer.width("key_value_down")
        repeated = {"mla_up_proj": normed / latents}
        terms.append(ActivationTerm(name="latents", num_bytes=element * latents + 0.0 * t, dropped=repeated))
    elif job.engine.memory.keeps_joint_projection and model.position == "rope":
        rotated = 0 if model.shares_keys else query + key * (not model.keys_are_values)  # values are a view
        terms.append(ActivationTerm(name="joint projection", num_bytes=element * rotated / t))
    if model.qk_norm != "none" and model.mla is None:
        normed_bytes = _norm_tensors(job) * element * (query + key) / t
        terms.append(ActivationTerm(name="inputs of query and key norms", num_bytes=normed_bytes))
    terms += further
    if job.training.attention == "flash":
        terms.append(ActivationTerm(name="log-sum-exp", num_bytes=4.0 * tokens * model.num_heads / t, saved=1.0))
        return tuple(terms)
    core = {"core_attn": 1.0}
    square = tokens * job.training.sequence_length * model.num_heads / t
    each = job.compute_bytes if job.training.precision == "fp32" else job.engine.memory.score_bytes
    terms.append(ActivationTerm(name="softmax", num_bytes=each * square, dropped=core))
    if job.training.dropout:
        kept = (1.0 + job.compute_bytes) * square
        terms.append(ActivationTerm(name="softmax dropout", num_bytes=kept, dropped=core))
    return tuple(terms)


def _mixer_terms(job: PoolJob, layout: Degrees) -> tuple[ActivationTerm, ...]:
    """Kept tensors of a mixer and of attention's gate, and kept outputs of an indexer and of `layer_matrix_params`.

    The mixer's kernels also keep states at the borders of chunks; these states are smaller than the tensors counted
    here.
    """
    model, element = job.model, job.compute_bytes * tokens_per_microbatch(job, layout)
    width = layer_of(model, experts=False).width
    kept = mixer_shape(model).kept + width("attention_gate")
    whole = sum(width(name) for name in ("further", "index_query", "index_key", "index_weights"))
    return tuple(
        ActivationTerm(name=name, num_bytes=element * size)
        for name, size in (("mixer", kept / layout.tp), ("further blocks", whole + 0.0 * layout.tp))
        if np.any(size)
    )


def _mean_terms(job: PoolJob, layout: Degrees, *, experts: bool) -> tuple[ActivationTerm, ...]:
    """Kept tensors of the mean layer, for a model with several kinds of layers; tensors match by name and modules."""
    found: dict[tuple[str, ...], ActivationTerm] = {}
    for num, kind in job.model.kinds():
        for term in activation_terms(replace(job, model=kind), layout, experts=experts):
            size = num / job.model.num_layers * term.num_bytes
            key = term.name, *term.dropped
            before = found.get(key)
            found[key] = replace(term, num_bytes=size + (before.num_bytes if before else 0.0))
    return tuple(found.values())


def _block_terms(job: PoolJob, layout: Degrees, *, experts: bool) -> Iterator[ActivationTerm]:
    """Inner tensors of feed-forward blocks; of experts also fp32 router scores, inputs and outputs of each choice."""
    for product in layer_of(job.model, experts=experts).products:
        dropped = dict.fromkeys(product.modules, 1.0)
        (rows, batch), (inputs, outputs) = rows_of(job, layout, product), product.sides(layout)
        if "router" in product.outputs:
            yield ActivationTerm(name="router", num_bytes=8.0 * rows * outputs, dropped=dropped)
        if not product.ends_block:
            continue
        last, tiles = _is_read_again(job, product.reads, experts=experts), num_tiles(job, product)
        one = 1.0 / _inner_tensors(job, last)  # the first product's output, and the second's input
        parts = {ACTIVATION: one, "moe_act": one} if product.count else {ACTIVATION: one}
        inner = _inner_bytes(job, last) * rows * batch * inputs / tiles
        yield ActivationTerm(
            name=product.reads, num_bytes=inner, saved=one, dropped=parts | dropped, is_of_tile=tiles > 1
        )
        if product.count:
            wide = job.compute_bytes * rows * batch * outputs
            read = _narrow(job) * _is_read_again(job, "expert input", experts=experts)
            kept = job.engine.memory.keeps_expert_outputs
            yield ActivationTerm(name="expert inputs", num_bytes=read * wide, dropped=dropped)
            yield ActivationTerm(name="expert outputs", num_bytes=kept * wide, dropped=dropped)


def kept_share(job: PoolJob, term: ActivationTerm, policy: int) -> float:
    """Share of one tensor that a policy keeps.

    No policy keeps a tensor of a tile. Full recompute keeps the layer's input. Operator-level recompute keeps the
    input, the outputs of attention and of every second product, and one more (s b h) output. Recompute of parts drops
    the tensors inside these parts. If two parts share tensors, one part contains the other, so the dropped share is the
    larger of their two shares.

    Source: Korthikanti et al. (2022), section 5; torchtitan, distributed/activation_checkpoint.py; DeepSeek-V3 (2024),
    sections 3.2.3 and 3.3.3; Megatron-LM, megatron/core/transformer (transformer_layer.py, multi_latent_attention.py,
    moe/experts.py, moe/moe_layer.py), where each module of recompute_modules is checkpointed; DeepSpeed,
    runtime/sequence_parallel/ulysses_sp.py (TiledMLP).
    """
    if term.is_of_tile:
        return 0.0
    if term.is_referred:
        return 1.0
    if policy == FULL:
        return float(term.is_input)
    if policy == SELECTIVE and job.engine.memory.selective_recompute == "operators":
        return 2.0 * term.is_input + term.saved
    modules = modules_of(job, policy)
    return 1.0 - max((share for module, share in term.dropped.items() if module in modules), default=0.0)


def layer_activation_bytes(
    job: PoolJob, layout: Degrees, *, experts: bool = False, policies: Sequence[int] = (NONE, SELECTIVE, FULL)
) -> tuple[Number, ...]:
    """Bytes that one layer keeps for one microbatch under each of these policies.

    Source: `activation_terms`, each multiplied by its `kept_share`.
    """
    terms = activation_terms(job, layout, experts=experts)
    kept = [[(term.num_bytes, kept_share(job, term, policy)) for term in terms] for policy in policies]
    return tuple(sum_of(size if share == 1.0 else size * share for size, share in each if share) for each in kept)


@once
def kept_bytes_of_layer(
    job: PoolJob, layout: Degrees, stage: Stage, *, experts: bool, recomputing: bool = False
) -> tuple[Number, Number]:
    """Bytes that one layer keeps for one microbatch under the policy of its stage, and without recompute.

    recomputing: if only some of the stage's layers recompute, return the bytes of a layer that does.

    Source: `activation_terms`, each multiplied by its `kept_share`.
    """
    terms, policies = activation_terms(job, layout, experts=experts), policies_of(stage)
    alike: dict[tuple[float, ...], Number] = {}  # shares that the policies keep -> bytes of the tensors
    for term in terms:
        shares = tuple(kept_share(job, term, policy) for policy in policies)
        alike[shares] = alike.get(shares, 0.0) + term.num_bytes
    kept = sum_of(
        num_bytes * of_policies(layout, stage, known_values(shares), recomputing=recomputing)
        for shares, num_bytes in alike.items()
    )
    return kept, sum_of(alike.values())


def stored_activation_bytes(job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Number) -> Number:
    """Activations that a stage stores at its peak: bytes per layer, times layers, times microbatches in flight.

    If weight gradients are computed in a later pass, microbatches that wait for it keep more (`kept_activation_bytes`).
    Some engines also keep the outputs that a stage has sent, each as large as a layer's input.

    Source: Korthikanti et al. (2022), section 4.2.3; Qi et al., Zero Bubble (2023), section 2; DeepSpeed,
    runtime/pipe/engine.py (pipe_buffers).
    """
    return _at_peak(job, layout, stage, num_microbatches, sent_bytes(job, layout, stage))


def offloaded_activation_bytes(job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Number) -> Number:
    """Bytes of the stored activations that are in the host's memory: tensors kept by layers, not outputs of stages.

    Source: as `stored_activation_bytes`.
    """
    if not offloads_activations(layout):
        return 0.0 * np.asarray(stage.num_layers)
    return _at_peak(job, layout, stage, num_microbatches, 0.0)


def _at_peak(job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Number, besides: Number) -> Number:
    """Peak bytes of the activations of all microbatches, with `besides` additional bytes for each microbatch."""
    moments = held_of_stage(job, layout, stage, num_microbatches)
    kept, waits = kept_activation_bytes(job, layout, stage)
    stored = [before * (kept + besides) + waiting * waits for before, waiting in moments]
    return np.maximum.reduce(np.broadcast_arrays(*stored))


@once
def held_of_stage(
    job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Number
) -> tuple[tuple[Number, Number], ...]:
    """Microbatches that a stage holds, at each moment at which its memory can peak; pairs as in `held_microbatches`.

    An interleaved stage with unequal chunks is counted as if all its chunks had the size of the largest: in steady
    state the stage mostly holds microbatches in its larger chunks. Layers for multi-token prediction fill up the
    stage's last chunk, where it is smaller. If expert exchanges overlap with another
    microbatch's pass, the stage holds one more layer, because a forward pass fills memory layer by layer while a
    backward pass frees it.

    Source: `planner.cost.schedule.held_microbatches`; chunks that differ: tested against executed schedules; one more
    layer: Megatron-LM, models/common/model_chunk_schedule_plan.py (run); its warm-up holds one chunk more, like plain
    1F1B, which enters a chunk before it leaves another (pipeline_parallel/schedules.py, get_pp_rank_microbatches).
    """
    moments = held_microbatches(layout.schedule, layout.pp, stage.index, num_microbatches, layout.interleave)
    if stage.largest_chunk is not None:
        held = np.maximum(stage.num_layers + mtp_layers(job, layout, stage), 1)
        share = np.maximum(layout.interleave * stage.largest_chunk / held, 1.0)
        moments = tuple((before * share, waiting * share) for before, waiting in moments)
    if not job.training.expert_overlap:
        return moments
    one = 1 / np.maximum(stage.num_layers, 1)
    return tuple(
        (before + np.where(np.less(before, num_microbatches), one, 0.0), waiting) for before, waiting in moments
    )


@once
def kept_activation_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Number, Number]:
    """Bytes that the layers of a stage keep for one microbatch: before its backward pass, and until that for weights.

    In between, most engines keep all tensors. torch's stages free what the pass for inputs computed again, and keep the
    gradients of outputs.

    Source: `layer_activation_bytes`, layer by layer; torch, utils/checkpoint.py (unpack_hook), distributed/pipelining/
    _backward.py (stage_backward_input, param_groups); counted in the trainer's own step, tests/cost/test_memory.py.
    """
    before, waits, frees = [], [], job.engine.memory.whole_gradients == "piped"
    for kind, count in layer_kinds(job, layout, stage):
        kept, whole = kept_bytes_of_layer(job, layout, stage, experts=kind)
        before.append(count * kept)
        waits.append(count * (kept + _output_gradient_bytes(job, layout, experts=kind) if frees else whole))
    return sum_of(before), sum_of(waits)


def _output_gradient_bytes(job: PoolJob, layout: Degrees, *, experts: bool) -> Number:
    """Bytes of the gradients of what the matrices and the norms of one layer give."""
    products, norms = layer_of(job.model, experts=experts).products, job.model.norms_per_layer * job.model.hidden_size
    rows = ((each, *rows_of(job, layout, each)) for each in products)
    given = sum_of(each.share * num_rows * batch * each.sides(layout)[1] for each, num_rows, batch in rows)
    return job.compute_bytes * (given + norms * tokens_per_microbatch(job, layout) / layout.tp)


def _on_the_way_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of offloaded activations still on the device: one layer that computes, and one layer that is being copied.

    Source: derived here from two buffers that take turns, as in Megatron-LM, fine_grained_activation_offload.py.
    """
    largest = largest_of_layers(
        job, layout, stage, lambda kind: kept_bytes_of_layer(job, layout, stage, experts=kind)[0]
    )
    return largest * np.minimum(2, stage.num_layers)


def device_activation_bytes(job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Number) -> Number:
    """Bytes of the stored activations that a device holds at its peak.

    Source: `stored_activation_bytes`, less the bytes on the host.
    """
    stored = stored_activation_bytes(job, layout, stage, num_microbatches)
    if not offloads_activations(layout):
        return stored
    left = stored - offloaded_activation_bytes(job, layout, stage, num_microbatches)
    return np.minimum(stored, left + _on_the_way_bytes(job, layout, stage))


def sent_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of one microbatch's outputs that a stage keeps after sending; 0 in most engines, which free sent outputs.

    Source: DeepSpeed, runtime/pipe/engine.py (pipe_buffers).
    """
    if not job.engine.memory.keeps_stage_outputs:
        return 0.0
    (one,) = layer_activation_bytes(job, layout, policies=(FULL,))
    return np.where(np.less(stage.index, layout.pp - 1), one * layout.interleave, 0.0)
