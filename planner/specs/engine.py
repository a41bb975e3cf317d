"""The engine profile: memory, overlap and abilities of the program that will run the plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.specs.cluster import Precision
from planner.specs.document import Bytes, InputDocument, Name, Seconds
from planner.specs.recipe import CudaGraphs, FrozenWeights, Loss, MemoryRecipe, Optimizer, StateBytes
from planner.specs.recompute import Module, Recompute
from planner.specs.text import any_of

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "pipedream"]
Offload = Literal["none", "optimizer", "activations", "both", "params+states", "params+states+activations"]


class EngineDefaults(InputDocument):
    """Settings that apply if the user sets nothing: the engine's defaults, or the settings of its published recipes.

    These settings fill the gaps of a `--layout` (planner/search/questions/given.py), together with rules that follow
    from the engine's abilities.
    """

    recompute: Recompute = "none"
    etp: Literal["tp", "1"] = Field(
        default="1", description="`tp`: tp also cuts the experts; `1`: experts are not cut by tp"
    )


class EngineAbilities(InputDocument):
    """Features that the engine can run."""

    axes: tuple[Literal["tp", "pp", "dp", "cp", "ep", "etp"], ...] = Field(
        description="axes of the mesh whose degree may exceed 1"
    )
    precisions: tuple[Precision, ...]
    optimizers: tuple[Optimizer, ...]
    memory_recipes: tuple[MemoryRecipe, ...] = Field(
        default=(),
        description="named memory recipes that the engine supports; recipes of the literature are priced for every "
        "engine",
    )
    losses: tuple[Loss, ...] = Field(
        default=("whole",),
        min_length=1,
        description="ways in which the engine computes the loss; the first is the default",
    )
    mlp_tiles: bool = Field(default=False, description="feed-forward blocks can be computed in parts of the sequence")
    cuda_graphs: tuple[CudaGraphs, ...] = Field(
        default=("none",), description="operators that the engine can capture in CUDA graphs"
    )
    expert_overlap: bool = Field(
        default=False,
        description="passes of two microbatches can run side by side, so that each hides the other's expert exchanges",
    )
    dropout: bool = Field(description="the engine trains with dropout")
    frozen_weights: tuple[FrozenWeights, ...] = Field(
        default=(),
        description="storage of frozen weights beside adapters (LoRA); an empty list means that the engine trains "
        "all weights",
    )
    adapters_priced_only: bool = Field(
        default=False,
        description="programs that run the engine's plans train no adapters; published runs with adapters are "
        "priced all the same",
    )
    fp8_adapters: bool = Field(default=False, description="frozen weights beside adapters can compute in 8 or 4 bits")
    model_features: tuple[str, ...] = Field(description="features of ModelSpec.features that the engine runs")
    zero_stages: tuple[int, ...] = Field(description="ZeRO stages without a pipeline")
    replicates_shards: bool = Field(
        default=True,
        description="ZeRO can shard within a smaller group, which is then replicated (HSDP)",
    )
    recompute: tuple[Recompute, ...] = Field(
        description="recompute policies that a search tries, if the model has these parts"
    )
    recompute_modules: tuple[Module, ...] = Field(
        default=(), description="parts of a layer that can be recomputed alone or in any combination"
    )
    recompute_some: tuple[Literal["full", "every"], ...] = Field(
        default=(),
        description="some layers can be recomputed whole. `full`: k layers of each chunk (`full:k`); `every`: every "
        "n-th layer (`every:n`)",
    )
    recompute_some_on_request: bool = Field(
        default=False,
        description="only a program written for this purpose recomputes some layers; a layout that leaves the "
        "policy open is assumed not to",
    )
    sp: tuple[Literal[0, 1], ...] = Field(
        min_length=1,
        description="values of sp (sequence parallelism) that layouts with tp > 1 can have; the first is the default",
    )
    repeats_kv_heads: bool = Field(
        default=False,
        description="tp may be a multiple of the number of key-value heads; several ranks then have the same head",
    )
    pads_vocabulary: bool = Field(default=True, description="a vocabulary that tp does not divide is padded")

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


class EnginePipeline(InputDocument):
    """Pipelines that the engine can run."""

    schedules: tuple[Schedule, ...]
    zero_stages: tuple[int, ...] = Field(description="ZeRO stages under a pipeline")
    uneven_stages: bool = Field(description="stages may hold different numbers of layers")
    recompute_per_stage: bool = Field(
        default=False, description="stages may have different recompute policies; otherwise all stages share one policy"
    )
    context_parallel: bool = Field(default=True, description="context parallelism can be combined with a pipeline")
    needs_filling: bool = Field(description="1F1B needs at least as many microbatches as stages")


class EngineMemory(InputDocument):
    """Data that the engine keeps in a device's memory."""

    states: dict[Literal["fp32", "mixed"], StateBytes] = Field(min_length=2)
    whole_gradients: Literal["lasting", "piped", "accumulated"] = Field(
        description="when a device holds gradients of all its parameters. `lasting`: below ZeRO-2, in a permanent "
        "buffer; `piped`: below ZeRO-2 while gradients of microbatches are summed, and under a pipeline "
        "at every ZeRO stage; `accumulated`: at every ZeRO stage while gradients of microbatches are "
        "summed (no_sync)"
    )
    pipeline_sums: float = Field(
        default=0,
        ge=0,
        description="bytes per parameter of further fp32 sums of gradients, which bf16 training keeps under a pipeline",
    )
    gradients_apart: bool = Field(
        default=False,
        description="gradients of activations and of one layer's weights count in addition to the sums to which "
        "they are added",
    )
    vocab_multiple: int = Field(ge=1, description="the vocabulary is padded to a multiple of this number times tp")
    replicates_embedding: bool = Field(default=False, description="every tp rank holds the whole embedding")
    shards_positions: bool = Field(default=False, description="tp cuts a learned table of positions")
    logits_bytes: float = Field(ge=0, description="bytes per logit at the loss, in 16-bit training")
    fused_logits_bytes: float = Field(
        default=2,
        ge=2,
        description="bytes per logit of a fused loss: 2 if the gradient overwrites the logits, otherwise 4",
    )
    loss_chunk_tokens: int = Field(
        default=0, ge=0, description="tokens of a part of a chunked loss; 0 if training.loss_chunks says their number"
    )
    whole_logits: bool = Field(
        default=False, description="every tp rank has all logits at the loss, not only its own part"
    )
    keeps_joint_projection: bool = Field(
        default=False,
        description="the joint product of queries, keys and values is kept in addition to the rotated queries and keys",
    )
    score_bytes: float = Field(
        default=2, gt=0, description="bytes kept for each attention score without a fused kernel"
    )
    regathers_inputs: bool = Field(description="sequence parallelism stores sharded inputs and gathers them again")
    fused_swiglu: bool
    norm_kernel: bool = Field(
        default=True,
        description="RMSNorm is one kernel; otherwise RMSNorm runs operator by operator in fp32 and keeps copies",
    )
    selective_recompute: Literal["attention-core", "operators", "light"] = Field(
        default="attention-core",
        description="what `selective` drops. `attention-core`: scores of unfused attention; `operators`: all "
        "outputs of operators except those of every second product; `light`: outputs of norms, of "
        "latent attention's up-projections, and of the gate",
    )
    fused_norms: bool = Field(
        default=False,
        description="a norm is fused with the product after it and is recomputed only together with this product; "
        "norms before latent attention and experts stand alone",
    )
    keeps_expert_outputs: bool = Field(
        default=True, description="the outputs of experts are kept for the gradient of the router's weights"
    )
    fp8_activations: bool = Field(default=False, description="in fp8 training, inputs of products are kept in 8 bits")
    fp8_gates: bool = Field(
        default=False, description="in fp8 training, inputs of the activation function are also kept in 8 bits"
    )
    fp8_weight_bytes: float = Field(
        default=0,
        ge=0,
        description="in fp8 training without ZeRO, bytes per weight of a layer for an 8-bit copy and its transpose, "
        "beside the 16-bit weight; with ZeRO the 8-bit copies replace the 16-bit weight",
    )
    fp8_frozen_bytes: float = Field(
        default=0,
        ge=0,
        description="in fp8 training, bytes per frozen weight of a layer beside adapters, half of them in fp4; 0 if "
        "frozen weights keep their 16 bits",
    )
    widens_stream: bool = Field(
        default=False,
        description="on one device, the inputs of quantised layers are fp32, as the weights outside these layers",
    )
    holds_frozen_inputs: bool = Field(
        default=False,
        description="units with frozen weights hold the inputs of recomputed layers, and the gradients of these "
        "inputs, until the backward pass ends",
    )
    gradient_placeholders: bool = Field(
        default=False,
        description="if products add to the gradient sums themselves, autograd gets an empty 16-bit tensor instead; "
        "one tensor is kept for each weight shape",
    )
    keeps_stage_outputs: bool = Field(
        default=False, description="a pipeline stage keeps its sent outputs for each microbatch in flight"
    )
    keeps_ends_gathered: bool = Field(
        default=True, description="ZeRO-3 keeps embedding and head gathered until the backward pass ends"
    )
    gathers_head_apart: bool = Field(
        default=False,
        description="ZeRO-3 gathers an untied head as a separate unit, with the last norm, and frees the head's "
        "gradient when the loss is done",
    )
    shards_whole_experts: bool = Field(
        default=False, description="each rank's shard of the experts is a whole number of experts"
    )
    prefetched_params: float = Field(
        default=1e12, gt=0, description="largest number of parameters of the next layer that ZeRO-3 gathers ahead"
    )
    live_params: float = Field(
        default=0,
        ge=0,
        description="largest number of gathered parameters that ZeRO-3 keeps from one pass to the next; also the "
        "largest distance to their next use, in parameters",
    )
    reduced_params: float = Field(
        default=1e12,
        gt=0,
        description="largest number of parameters, within one layer, whose gradients wait for their reduction",
    )
    gradient_bucket: float = Field(
        default=0,
        ge=0,
        description="parameters of the bucket into which gradients are copied, with ZeRO and without a pipeline",
    )
    bucket_buffers: int = Field(
        default=0,
        ge=0,
        description="number of buffers, each of the size of gradient_bucket, for further gradients; they exist from "
        "the first gradient of a backward pass",
    )
    zero3_keeps_inputs: bool = Field(
        default=False,
        description="whether products with frozen weights keep their inputs for the backward pass under ZeRO-3",
    )
    quantised_keep_inputs: bool = Field(
        default=False, description="whether products with quantised frozen weights keep their inputs"
    )
    updated_params: float = Field(
        default=1e12,
        gt=0,
        description="largest number of parameters whose gradients the update of ZeRO-3 copies at a time",
    )
    update_copies: float = Field(
        default=0,
        ge=0,
        description="copies of a moment that an update of AdamW makes: 1 if its operators run one by one (foreach)",
    )
    fragmentation: float = Field(
        ge=0,
        lt=1,
        description="memory that the allocator cannot use, as a share of activations and transients, even where "
        "memory is short",
    )
    communicator_memory: Bytes | None = Field(
        default=None, description="memory for each mesh axis above 1, in addition to the device's reserved_memory"
    )


class EngineOffload(InputDocument):
    """Data that the engine keeps in the host's memory."""

    what: tuple[Offload, ...] = Field(description="data that the engine can keep there")
    with_pipeline: Offload = Field(
        default="both", description="part of this data that the engine can also offload under a pipeline"
    )
    activations_of: tuple[Recompute, ...] = Field(
        default=("none", "selective", "full"),
        description="recompute policies with which the engine can offload activations",
    )
    optimizer_takes: Literal["states", "gradients", "weights"] = Field(
        default="states",
        description="data on the host with an offloaded optimizer. `states`: its states alone; `gradients`: also "
        "reduced gradients, as they are computed; `weights`: also the shards of the weights, which are "
        "copied to the device for each gathering",
    )
    host_update_factor: float = Field(
        default=1,
        gt=0,
        description="time of the optimizer's update on the host, divided by the time of a fused update (CPU-Adam)",
    )


class EngineCompute(InputDocument):
    """Costs of the engine's computing in addition to the device's efficiency."""

    attention_kernel: Literal["latest", "flash-2"] = Field(
        default="latest",
        description="`latest`: fused attention written for the device's generation (cuDNN in Transformer Engine, "
        "FlashAttention-3 and 4); `flash-2`: FlashAttention-2",
    )
    fp8_attention: bool = Field(
        default=False, description="in fp8 or fp4 training, the products of fused attention run in 8 bits"
    )
    low_precision_speed: float = Field(
        default=1.0, gt=0, le=2, description="speed of products in 8 or 4 bits, relative to one scale for each tensor"
    )
    fp8_experts: bool = Field(
        default=True, description="in fp8 training, products of routed experts also run in 8 bits"
    )
    accumulation_bytes: float = Field(
        ge=0, description="bytes moved per parameter to add one microbatch's gradient, outside the matrix product"
    )
    reduction_bytes: float = Field(
        default=0, ge=0, description="bytes moved per parameter around the reduction of a step's gradients"
    )
    host_factor: float = Field(
        ge=0,
        le=1e6,
        description="host time of a layer, divided by the device file's layer_floor; 0 with captured graphs",
    )
    tp_host_factor: float = Field(
        default=1, ge=0, le=1e6, description="further factor on the host time of a layer with tensor parallelism"
    )
    expert_host_factor: float = Field(ge=0, le=1e6, description="host_factor of a layer with experts")
    expert_cast_factor: float = Field(
        default=0, ge=0, le=1e6, description="what casts to 8 or 4 bits add to `expert_host_factor`"
    )
    expert_tp_factor: float = Field(
        default=0, ge=0, le=1e6, description="what tensor parallelism adds to `expert_host_factor`"
    )
    loops_over_experts: bool = Field(
        default=False, description="experts run one after the other, not as one grouped product"
    )


_Messages = Annotated[int, Field(ge=1, le=1000)]


class EngineCommunication(InputDocument):
    """How the engine communicates."""

    context_exchange: Literal["ring", "gathered-ring", "gather", "all-to-all"] = Field(
        default="ring",
        description="`ring`: context parallel ranks pass keys and values round a ring; `gathered-ring`: they gather "
        "keys and values in each pass, compute as in a ring, and pass gradients round; `gather`: each rank gathers and "
        "keeps the keys and values of all ranks; `all-to-all`: each rank trades its part of the sequence for heads "
        "(Ulysses)",
    )
    dispatches_once_per_host: bool = Field(
        default=False, description="a token goes to each host once, even if several of its experts are there"
    )
    lone_gather: Seconds = Field(
        default=0.0,
        ge=0,
        description="host time of a ZeRO-3 gather of one matrix; if experts run in a loop, each of their matrices is "
        "gathered alone; 0: a layer is gathered as a whole",
    )
    fp8_dispatch: bool = Field(
        default=False, description="in fp8 training, tokens travel to their experts in 8 bits and back in 16 bits"
    )
    reduces_whole: bool = Field(
        default=False, description="even with ZeRO, every rank gets the whole sums of the gradients (all-reduce)"
    )
    reduces_16_bit: bool = Field(
        default=False,
        description="gradients are reduced in 16 bits, as the backward pass makes them, and summed in fp32 afterwards",
    )
    broadcasts_weights: bool = Field(
        default=False,
        description="below ZeRO-3 a rank's shard is whole matrices, and one rank after the other broadcasts its "
        "updated matrices",
    )
    send_messages: tuple[_Messages, _Messages] = Field(
        default=(1, 1),
        description="number of messages for a stage's output to the next stage, and for the gradient that comes back",
    )
    send_share: float = Field(
        default=1, gt=0, le=1, description="share of a link's bandwidth that a send between two pipeline ranks reaches"
    )
    rank_wait: Seconds = Field(
        default=0.0,
        ge=0,
        description="host time that a tensor-parallel collective needs for each rank of its group, in pipelines "
        "over several hosts",
    )
    scatters_pipeline_sends: bool = Field(
        description="without sequence parallelism, each tensor-parallel rank sends only its share; the shares are "
        "gathered on arrival"
    )


class EngineOverlap(InputDocument):
    """Communication that the engine hides behind computing."""

    data_parallel: bool = Field(description="reductions of gradients and ZeRO's gathering of weights")
    sharded_data_parallel: bool = Field(default=True, description="`data_parallel` holds with ZeRO too")
    weight_gathering: bool = Field(
        default=True,
        description="updated weights are gathered beside the next forward pass, if reductions are hidden too",
    )
    tensor_parallel: bool = Field(
        default=False,
        description="with sequence parallelism, tensor-parallel collectives run in pieces beside the neighbouring "
        "matrix products (--tp-comm-overlap)",
    )
    tensor_parallel_share: float = Field(
        default=1.0, gt=0, le=1, description="share of what `tensor_parallel` could hide that is hidden"
    )
    weight_gradients: bool = Field(
        default=False,
        description="the sum of input gradients over tensor-parallel ranks runs beside the computing of weight "
        "gradients",
    )
    pipeline_sends: Literal["none", "interleaved", "all"] = Field(
        default="none",
        description="sends between stages that are hidden. `none`: no sends; `interleaved`: sends of interleaved "
        "schedules, while the next chunk computes; `all`: all sends",
    )
    paired_passes: bool = Field(
        default=False,
        description="passes that a schedule pairs (F&B of DualPipe) hide expert exchanges and sends",
    )
    offload: bool = Field(default=False, description="copies to and from the host run beside computing")


class EngineSpec(InputDocument):
    """An engine profile: data that the cost model reads, so that no formula depends on the engine's name."""

    name: Name
    program: str = Field(description="program that runs the plan")
    emits: tuple[str, ...] = Field(
        default=(),
        description="programs for which `planner emit --to` writes a plan, the usual program first; an empty list "
        "means that plans are only priced",
    )
    stands_for: str = Field(
        default="",
        description="a program without a profile of its own, priced by this profile; error bands are then wider",
    )
    defaults: EngineDefaults = EngineDefaults()
    can: EngineAbilities
    pipeline: EnginePipeline
    memory: EngineMemory
    offload: EngineOffload
    compute: EngineCompute
    communication: EngineCommunication
    overlap: EngineOverlap
