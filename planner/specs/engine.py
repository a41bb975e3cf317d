"""The engine profile: memory, overlap and abilities of the program that will run the plan."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.specs.cluster import Precision
from planner.specs.document import Bytes, InputDocument, Name, Seconds
from planner.specs.objective import ObjectiveName
from planner.specs.recipe import CudaGraphs, FrozenWeights, Loss, MemoryRecipe, Offload, Optimizer, Schedule, StateBytes
from planner.specs.recompute import Module, Recompute
from planner.specs.text import any_of


class _Explained(InputDocument):
    """A document whose docstrings explain its keys; schemas and error messages have these sentences, too."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Give each field its sentence of the docstring."""
        super().__pydantic_init_subclass__(**kwargs)
        pieces = re.split(rf"^ +({'|'.join(cls.model_fields)}): ", cls.__doc__ or "", flags=re.MULTILINE)
        for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
            cls.model_fields[name].description = " ".join(text.split()).removesuffix(".")


class EngineDefaults(_Explained):
    """Settings that apply if the user sets nothing: the engine's defaults, or the settings of its published recipes.

    These settings fill the gaps of a `--layout` (planner/search/given.py), together with rules that follow
    from the engine's abilities.

    etp: `tp`: tp also cuts the experts; `1`: experts are not cut by tp.
    """

    recompute: Recompute = "none"
    etp: Literal["tp", "1"] = "1"


class EngineAbilities(_Explained):
    """Features that the engine can run.

    axes: axes of the mesh whose degree may exceed 1.
    memory_recipes: named memory recipes that the engine supports; recipes of the literature are priced for every
    engine.
    losses: ways in which the engine computes the loss; the first is the default.
    mlp_tiles: feed-forward blocks can be computed in parts of the sequence.
    objectives: objectives by which programs train with the engine; `planner emit` writes runs of the first alone.
    cuda_graphs: operators that the engine can capture in CUDA graphs.
    expert_overlap: passes of two microbatches can run side by side, so that each hides the other's expert exchanges.
    dropout: the engine trains with dropout.
    frozen_weights: storage of frozen weights beside adapters (LoRA); an empty list means that the engine trains all
    weights.
    adapters_priced_only: programs that run the engine's plans train no adapters; published runs with adapters are
    priced all the same.
    fp8_adapters: frozen weights beside adapters can compute in 8 or 4 bits.
    model_features: features of ModelSpec.features that the engine runs.
    zero_stages: ZeRO stages without a pipeline.
    replicates_shards: ZeRO can shard within a smaller group, which is then replicated (HSDP).
    recompute: recompute policies that a search tries, if the model has these parts.
    recompute_modules: parts of a layer that can be recomputed alone or in any combination.
    recompute_some: some layers can be recomputed whole. `full`: k layers of each chunk (`full:k`); `every`: every n-th
    layer (`every:n`).
    recompute_some_on_request: only a program written for this purpose recomputes some layers; a layout that leaves the
    policy open is assumed not to.
    sp: values of sp (sequence parallelism) that layouts with tp > 1 can have; the first is the default.
    repeats_kv_heads: tp may be a multiple of the number of key-value heads; several ranks then have the same head.
    pads_vocabulary: a vocabulary that tp does not divide is padded.
    """

    axes: tuple[Literal["tp", "pp", "dp", "cp", "ep", "etp"], ...]
    precisions: tuple[Precision, ...]
    optimizers: tuple[Optimizer, ...]
    memory_recipes: tuple[MemoryRecipe, ...] = ()
    losses: tuple[Loss, ...] = Field(default=("whole",), min_length=1)
    mlp_tiles: bool = False
    objectives: tuple[ObjectiveName, ...] = ("next-token",)
    cuda_graphs: tuple[CudaGraphs, ...] = ("none",)
    expert_overlap: bool = False
    dropout: bool
    frozen_weights: tuple[FrozenWeights, ...] = ()
    adapters_priced_only: bool = False
    fp8_adapters: bool = False
    model_features: tuple[str, ...]
    zero_stages: tuple[int, ...]
    replicates_shards: bool = True
    recompute: tuple[Recompute, ...]
    recompute_modules: tuple[Module, ...] = ()
    recompute_some: tuple[Literal["full", "every"], ...] = ()
    recompute_some_on_request: bool = False
    sp: tuple[Literal[0, 1], ...] = Field(min_length=1)
    repeats_kv_heads: bool = False
    pads_vocabulary: bool = True

    @property
    def recompute_words(self) -> str:
        """The engine's recompute policies, for messages."""
        alone = [policy for policy in self.recompute if not set(policy.split("+")) <= set(self.recompute_modules)]
        some = {"full": "full:K for K layers of each chunk", "every": "every:N for every N-th layer"}
        modules = [f"any of {', '.join(self.recompute_modules)} joined by +"] if self.recompute_modules else []
        return any_of([*alone, *(some[each] for each in self.recompute_some), *modules])

    def recomputes(self, policy: str) -> bool:
        """Whether the engine has this recompute policy."""
        kind, partial, _ = policy.partition(":")
        if partial:
            return kind in self.recompute_some
        return policy in self.recompute or set(policy.split("+")) <= set(self.recompute_modules)


class EnginePipeline(_Explained):
    """Pipelines that the engine can run.

    zero_stages: ZeRO stages under a pipeline.
    uneven_stages: stages may hold different numbers of layers.
    divides_by_cost: stages hold equal parts of the model's parameters, those of the head included. Published runs are
        read so; the search has every split.
    places_ends: the first and last chunk may hold the embedding and the loss without a layer, and layers for
    multi-token prediction may stand in a chunk before the loss.
    recompute_per_stage: stages may have different recompute policies; otherwise all stages share one policy.
    context_parallel: context parallelism can be combined with a pipeline.
    needs_filling: 1F1B needs at least as many microbatches as stages.
    """

    schedules: tuple[Schedule, ...]
    zero_stages: tuple[int, ...]
    uneven_stages: bool
    divides_by_cost: bool = False
    places_ends: bool = False
    recompute_per_stage: bool = False
    context_parallel: bool = True
    needs_filling: bool


class EngineMemory(_Explained):
    """Data that the engine keeps in a device's memory.

    whole_gradients: when a device holds gradients of all its parameters. `lasting`: below ZeRO-2, in a permanent
    buffer; `piped`: below ZeRO-2 while gradients of microbatches are summed, and under a pipeline at every ZeRO stage;
    `accumulated`: at every ZeRO stage while gradients of microbatches are summed (no_sync).
    pipeline_sums: bytes per parameter of further fp32 sums of gradients, which bf16 training keeps under a pipeline.
    shards_alone: in fp32, shards are kept beside the weights even if no other rank holds shards or copies of them.
    gradients_apart: gradients of activations and of one layer's weights count in addition to the sums to which they are
    added.
    vocab_multiple: the vocabulary is padded to a multiple of this number times tp.
    replicates_embedding: every tp rank holds the whole embedding.
    shards_positions: tp cuts a learned table of positions.
    logits_bytes: bytes per logit at the loss, in 16-bit training.
    fused_logits_bytes: bytes per logit of a fused loss: 2 if the gradient overwrites the logits, otherwise 4.
    loss_chunk_tokens: tokens of a part of a chunked loss; 0 if training.loss_chunks says their number.
    whole_logits: every tp rank has all logits at the loss, not only its own part.
    keeps_joint_projection: the joint product of queries, keys and values is kept in addition to the rotated queries and
    keys.
    score_bytes: bytes kept for each attention score without a fused kernel.
    regathers_inputs: sequence parallelism stores sharded inputs and gathers them again.
    norm_kernel: RMSNorm is one kernel; otherwise RMSNorm runs operator by operator in fp32 and keeps copies.
    selective_recompute: what `selective` drops. `attention-core`: scores of unfused attention; `operators`: all outputs
    of operators except those of every second product; `light`: outputs of norms, of latent attention's up-projections,
    and of the gate.
    fused_norms: a norm is fused with the product after it and is recomputed only together with this product; norms
    before latent attention and experts stand alone.
    keeps_expert_outputs: the outputs of experts are kept for the gradient of the router's weights.
    fp8_activations: in fp8 training, inputs of products are kept in 8 bits.
    fp8_gates: in fp8 and fp4 training, inputs of the activation function are also kept, in 8 bits.
    dropout_masks: bytes kept for each element that an adapter's dropout reads; torch's mask has one, one of bits 1/8.
    fp8_weight_bytes: in fp8 training without ZeRO, bytes per weight of a layer for an 8-bit copy and its transpose,
    beside the 16-bit weight; with ZeRO the 8-bit copies replace the 16-bit weight.
    fp8_frozen_bytes: in fp8 training, bytes per frozen weight of a layer beside adapters, half of them in fp4; 0 if
    frozen weights keep their 16 bits.
    quantised_ends: bytes per weight outside quantised layers.
    quantised_constants: bytes per 4-bit weight of its constants: by default quantised themselves (double quantisation);
    fp32 for each 64 weights are 0.0625.
    widens_stream: on one device, the inputs of quantised layers are fp32, as the weights outside these layers.
    holds_frozen_inputs: units with frozen weights hold the inputs of recomputed layers, and the gradients of these
    inputs, until the backward pass ends.
    gradient_placeholders: if products add to the gradient sums themselves, autograd gets an empty 16-bit tensor
    instead; one tensor is kept for each weight shape.
    keeps_stage_outputs: a pipeline stage keeps its sent outputs for each microbatch in flight.
    keeps_ends_gathered: ZeRO-3 keeps embedding and head gathered until the backward pass ends.
    gathers_head_apart: ZeRO-3 gathers an untied head as a separate unit, with the last norm, and frees the head's
    gradient when the loss is done.
    shards_whole_experts: each rank's shard of the experts is a whole number of experts.
    prefetched_params: largest number of parameters of the next layer that ZeRO-3 gathers ahead.
    live_params: largest number of gathered parameters that ZeRO-3 keeps from one pass to the next; also the largest
    distance to their next use, in parameters.
    reduced_params: largest number of parameters, within one layer, whose gradients wait for their reduction.
    gradient_bucket: parameters of the bucket into which gradients are copied, with ZeRO and without a pipeline.
    bucket_buffers: number of buffers, each of the size of gradient_bucket, for further gradients; they exist from the
    first gradient of a backward pass.
    zero3_keeps_inputs: whether products with frozen weights keep their inputs for the backward pass under ZeRO-3.
    quantised_keep_inputs: whether products with quantised frozen weights keep their inputs.
    updated_params: largest number of parameters whose gradients the update of ZeRO-3 copies at a time.
    update_copies: copies of a moment that an update of AdamW makes: 1 if its operators run one by one (foreach).
    log_probability_bytes: bytes of a logit from which log-probabilities are taken, in 16-bit training; 0: the loss of
    every objective needs `logits_bytes`.
    reference_bytes: bytes per weight of a reference model, which ZeRO-3 shards like the trained model.
    gathers_whole_reference: ZeRO-3 gathers a reference model as one unit.
    fragmentation: memory that the allocator cannot use, as a share of activations and transients, even where memory is
    short.
    communicator_memory: memory for each mesh axis above 1, in addition to the device's reserved_memory.
    """

    states: dict[Literal["fp32", "mixed", "pure-bf16"], StateBytes] = Field(min_length=2)
    whole_gradients: Literal["lasting", "piped", "accumulated"]
    pipeline_sums: float = Field(default=0, ge=0)
    shards_alone: bool = True
    gradients_apart: bool = False
    vocab_multiple: int = Field(ge=1)
    replicates_embedding: bool = False
    shards_positions: bool = False
    logits_bytes: float = Field(ge=0)
    fused_logits_bytes: float = Field(default=2, ge=2)
    loss_chunk_tokens: int = Field(default=0, ge=0)
    whole_logits: bool = False
    keeps_joint_projection: bool = False
    score_bytes: float = Field(default=2, gt=0)
    regathers_inputs: bool
    fused_swiglu: bool
    norm_kernel: bool = True
    selective_recompute: Literal["attention-core", "operators", "light"] = "attention-core"
    fused_norms: bool = False
    keeps_expert_outputs: bool = True
    fp8_activations: bool = False
    fp8_gates: bool = False
    dropout_masks: float = Field(default=1.0, ge=0)
    fp8_weight_bytes: float = Field(default=0, ge=0)
    fp8_frozen_bytes: float = Field(default=0, ge=0)
    quantised_ends: float = Field(default=2.0, gt=0)
    quantised_constants: float = Field(default=0.127 / 8, ge=0)
    widens_stream: bool = False
    holds_frozen_inputs: bool = False
    gradient_placeholders: bool = False
    keeps_stage_outputs: bool = False
    keeps_ends_gathered: bool = True
    gathers_head_apart: bool = False
    shards_whole_experts: bool = False
    prefetched_params: float = Field(default=1e12, gt=0)
    live_params: float = Field(default=0, ge=0)
    reduced_params: float = Field(default=1e12, gt=0)
    gradient_bucket: float = Field(default=0, ge=0)
    bucket_buffers: int = Field(default=0, ge=0)
    zero3_keeps_inputs: bool = False
    quantised_keep_inputs: bool = False
    updated_params: float = Field(default=1e12, gt=0)
    update_copies: float = Field(default=0, ge=0)
    log_probability_bytes: float = Field(default=0, ge=0)
    reference_bytes: float = Field(default=2.0, gt=0)
    gathers_whole_reference: bool = False
    fragmentation: float = Field(ge=0, lt=1)
    communicator_memory: Bytes | None = None


class EngineOffload(_Explained):
    """Data that the engine keeps in the host's memory.

    what: data that the engine can keep there.
    with_pipeline: part of this data that the engine can also offload under a pipeline.
    activations_of: recompute policies with which the engine can offload activations.
    optimizer_takes: data on the host with an offloaded optimizer. `states`: its states alone; `gradients`: also reduced
    gradients, as they are computed; `weights`: also the shards of the weights, which are copied to the device for each
    gathering.
    host_update_factor: time of the optimizer's update on the host, divided by the time of a fused update (CPU-Adam).
    """

    what: tuple[Offload, ...]
    with_pipeline: Offload = "both"
    activations_of: tuple[Recompute, ...] = ("none", "selective", "full")
    optimizer_takes: Literal["states", "gradients", "weights"] = "states"
    host_update_factor: float = Field(default=1, gt=0)


class EngineCompute(_Explained):
    """Costs of the engine's computing in addition to the device's efficiency.

    layers_of: the engine whose layers, operators and kernels this one runs; empty: it has layers of its own.
    attention_kernel: `latest`: fused attention written for the device's generation (cuDNN in Transformer Engine,
    FlashAttention-3 and 4); `flash-2`: FlashAttention-2; `flash-1`: that of 2022, written in Triton.
    fp8_attention: in fp8 or fp4 training, the products of fused attention run in 8 bits.
    low_precision_speed: speed of products in 8 or 4 bits, relative to those with one scale for each tensor.
    fp8_experts: in fp8 training, products of routed experts also run in 8 bits.
    accumulation_bytes: bytes moved per parameter to add one microbatch's gradient, outside the matrix product.
    reduction_bytes: bytes moved per parameter around the reduction of a step's gradients.
    host_factor: host time of a layer, divided by the device file's layer_floor; 0 with captured graphs.
    tp_host_factor: further factor on the host time of a layer with tensor parallelism.
    expert_host_factor: host_factor of a layer with experts.
    expert_cast_factor: what casts to 8 or 4 bits add to `expert_host_factor`.
    expert_tp_factor: what tensor parallelism adds to `expert_host_factor`; with casts, the larger of the two counts.
    loops_over_experts: experts run one after the other, not as one grouped product.
    """

    layers_of: str = ""
    attention_kernel: Literal["latest", "flash-2", "flash-1"] = "latest"
    fp8_attention: bool = False
    low_precision_speed: float = Field(default=1.0, gt=0, le=2)
    fp8_experts: bool = True
    accumulation_bytes: float = Field(ge=0)
    reduction_bytes: float = Field(default=0, ge=0)
    host_factor: float = Field(ge=0, le=1e6)
    tp_host_factor: float = Field(default=1, ge=0, le=1e6)
    expert_host_factor: float = Field(ge=0, le=1e6)
    expert_cast_factor: float = Field(default=0, ge=0, le=1e6)
    expert_tp_factor: float = Field(default=0, ge=0, le=1e6)
    loops_over_experts: bool = False


_Messages = Annotated[int, Field(ge=1, le=1000)]


class EngineCommunication(_Explained):
    """How the engine communicates.

    context_exchange: `ring`: context parallel ranks pass keys and values round a ring; `gathered-ring`: they
    gather keys and values in each pass, compute as in a ring, and pass gradients round; `gather`: each rank gathers and
    keeps the keys and values of all ranks; `all-to-all`: each rank trades its part of the sequence for heads (Ulysses).
    dispatches_once_per_host: a token goes to each host once, even if several of its experts are there.
    lone_gather: host time of a ZeRO-3 gather of one matrix; if experts run in a loop, each of their matrices is
    gathered alone; 0: a layer is gathered as a whole.
    fp8_dispatch: in fp8 training, tokens travel to their experts in 8 bits and back in 16 bits.
    reduces_whole: even with ZeRO, every rank gets the whole sums of the gradients (all-reduce).
    reduces_16_bit: gradients are reduced in 16 bits, as the backward pass makes them, and summed in fp32 afterwards.
    broadcasts_weights: below ZeRO-3 a rank's shard is whole matrices, and one rank after the other broadcasts its
    updated matrices.
    send_messages: number of messages for a stage's output to the next stage, and for the gradient that comes back.
    send_share: share of a link's bandwidth that a send between two pipeline ranks reaches.
    rank_wait: host time that a tensor- or data-parallel collective needs for each rank of its group, while torch checks
    that all ranks call the same (TORCH_DISTRIBUTED_DEBUG=DETAIL).
    scatters_pipeline_sends: without sequence parallelism, each tensor-parallel rank sends only its share; the shares
    are gathered on arrival.
    """

    context_exchange: Literal["ring", "gathered-ring", "gather", "all-to-all"] = "ring"
    dispatches_once_per_host: bool = False
    lone_gather: Seconds = Field(default=0.0, ge=0)
    fp8_dispatch: bool = False
    reduces_whole: bool = False
    reduces_16_bit: bool = False
    broadcasts_weights: bool = False
    send_messages: tuple[_Messages, _Messages] = (1, 1)
    send_share: float = Field(default=1, gt=0, le=1)
    rank_wait: Seconds = Field(default=0.0, ge=0)
    scatters_pipeline_sends: bool


class EngineOverlap(_Explained):
    """Communication that the engine hides behind computing.

    data_parallel: reductions of gradients and ZeRO's gathering of weights.
    sharded_data_parallel: `data_parallel` holds with ZeRO too.
    weight_gathering: updated weights are gathered beside the next forward pass, if reductions are hidden too.
    tensor_parallel: with sequence parallelism, tensor-parallel collectives run in pieces beside the neighbouring matrix
    products (--tp-comm-overlap).
    tensor_parallel_share: share of what `tensor_parallel` could hide that is hidden.
    weight_gradients: the sum of input gradients over tensor-parallel ranks runs beside the computing of weight
    gradients.
    pipeline_sends: sends between stages that are hidden. `none`: no sends; `interleaved`: sends of interleaved
    schedules, while the next chunk computes; `all`: all sends.
    paired_passes: passes that a schedule pairs (F&B of DualPipe) hide expert exchanges and sends.
    offload: copies to and from the host run beside computing.
    """

    data_parallel: bool
    sharded_data_parallel: bool = True
    weight_gathering: bool = True
    tensor_parallel: bool = False
    tensor_parallel_share: float = Field(default=1.0, gt=0, le=1)
    weight_gradients: bool = False
    pipeline_sends: Literal["none", "interleaved", "all"] = "none"
    paired_passes: bool = False
    offload: bool = False


class EngineSpec(_Explained):
    """An engine profile: data that the cost model reads, so that no formula depends on the engine's name.

    program: program that runs the plan.
    emits: programs for which `planner emit --to` writes a plan, the usual program first; an empty list means that plans
    are only priced.
    stands_for: a program without a profile of its own, priced by this profile; error bands are then wider.
    """

    name: Name
    program: str
    emits: tuple[str, ...] = ()
    stands_for: str = ""
    defaults: EngineDefaults = EngineDefaults()
    can: EngineAbilities
    pipeline: EnginePipeline
    memory: EngineMemory
    offload: EngineOffload
    compute: EngineCompute
    communication: EngineCommunication
    overlap: EngineOverlap
