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
Offload = Literal["none", "optimizer", "activations", "both"]


class EngineDefaults(InputDocument):
    """Settings of users who set nothing: the engine's defaults, or the settings of its published recipes.

    These settings fill the gaps of a `--layout` (planner/search/given.py), together with rules that follow from the
    engine's abilities.
    """

    recompute: Recompute = "none"
    etp: Literal["tp", "1"] = Field(default="1", description="experts are cut as the rest of the layer, or not by tp")
    sp: bool = Field(default=True, description="sequence parallelism with tp > 1")


class EngineAbilities(InputDocument):
    """Features that the engine can run."""

    axes: tuple[Literal["tp", "pp", "dp", "cp", "ep", "etp"], ...] = Field(description="mesh axes that may exceed 1")
    precisions: tuple[Precision, ...]
    optimizers: tuple[Optimizer, ...]
    memory_recipes: tuple[MemoryRecipe, ...] = Field(
        default=(),
        description="named recipes that it can keep; those of the literature are priced for every engine",
    )
    losses: tuple[Loss, ...] = Field(
        default=("whole",), min_length=1, description="how it computes the loss; by default the first way"
    )
    mlp_tiles: bool = Field(default=False, description="feed-forward blocks can be computed in parts of the sequence")
    cuda_graphs: tuple[CudaGraphs, ...] = Field(default=("none",), description="what it can capture in CUDA graphs")
    expert_overlap: bool = Field(
        default=False, description="exchanges of experts can run beside the other pass of another microbatch"
    )
    dropout: bool = Field(description="it trains with dropout")
    frozen_weights: tuple[FrozenWeights, ...] = Field(
        default=(), description="how it keeps frozen weights beside adapters (LoRA); none: it trains all weights"
    )
    adapters_priced_only: bool = Field(
        default=False,
        description="no program that runs its plans trains adapters; a published run is priced all the same",
    )
    fp8_adapters: bool = Field(default=False, description="frozen weights beside adapters can compute in fp8")
    model_features: tuple[str, ...] = Field(description="of ModelSpec.features, those that it runs")
    zero_stages: tuple[int, ...] = Field(description="ZeRO stages without a pipeline")
    replicates_shards: bool = Field(
        default=True, description="ZeRO may shard within replicas of a smaller group (HSDP)"
    )
    recompute: tuple[Recompute, ...] = Field(description="policies that a search tries, where the model has the parts")
    recompute_modules: tuple[Module, ...] = Field(
        default=(), description="parts of a layer of which any set can be recomputed alone"
    )
    recompute_some: tuple[Literal["full", "every"], ...] = Field(
        default=(), description="some layers can be recomputed whole: `full:k`, k of each chunk; `every:n`, every n-th"
    )
    recompute_some_by_hand: bool = Field(
        default=False,
        description="only a program of the user's own recomputes some layers: where a policy is left open, it is none "
        "of these",
    )
    tp_without_sp: bool = Field(description="tensor parallelism can run without sequence parallelism")
    repeats_kv_heads: bool = Field(
        default=False, description="tp may be a multiple of the key-value heads, which several ranks then have"
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
        default=False, description="stages may have different recompute policies; else one is for all"
    )
    context_parallel: bool = Field(default=True, description="context parallelism may be cut into stages")
    needs_filling: bool = Field(description="1F1B needs at least as many microbatches as stages")


class EngineMemory(InputDocument):
    """Data that the engine keeps in a device's memory."""

    states: dict[Literal["fp32", "mixed"], StateBytes] = Field(min_length=2)
    whole_gradients: Literal["lasting", "piped", "accumulated"] = Field(
        description="where a device holds gradients of all its parameters. `lasting`: below ZeRO-2, in a buffer that "
        "lasts; `piped`: below ZeRO-2 while microbatches add up, and under a pipeline at every ZeRO stage; "
        "`accumulated`: at every ZeRO stage while microbatches add up (no_sync)"
    )
    pipeline_sums: float = Field(
        default=0,
        ge=0,
        description="bytes per parameter of fp32 sums of gradients, whole under a pipeline in bf16",
    )
    gradients_apart: bool = Field(
        default=False,
        description="gradients of activations and of one layer's weights are counted beside the sums they are added to",
    )
    vocab_multiple: int = Field(ge=1, description="the vocabulary is padded to this times tp")
    replicates_embedding: bool = Field(default=False, description="the embedding is whole on every tp rank")
    shards_positions: bool = Field(default=False, description="a learned table of positions is cut by tp")
    logits_bytes: float = Field(ge=0, description="bytes per logit at the loss, of 16-bit training")
    fused_logits_bytes: float = Field(
        default=2,
        ge=2,
        description="bytes per logit of a fused loss: 2 if the gradient is written over the logits, else 4",
    )
    whole_logits: bool = Field(default=False, description="every tp rank has all logits at the loss, not its part")
    keeps_joint_projection: bool = Field(
        default=False, description="the joint product of queries, keys and values stays beside their rotated copies"
    )
    score_bytes: float = Field(default=2, gt=0, description="kept for each score of attention without a fused kernel")
    regathers_inputs: bool = Field(description="sequence parallelism stores sharded inputs, gathers them again")
    fused_swiglu: bool
    norm_kernel: bool = Field(
        default=True, description="RMSNorm is one kernel; else it runs operator by operator in fp32, and keeps copies"
    )
    selective_recompute: Literal["attention-core", "operators", "light"] = Field(
        default="attention-core",
        description="what `selective` drops: scores of unfused attention; all but every second product's output; or "
        "(light) outputs of norms, of latent attention's up-projections, and of the gate",
    )
    fused_norms: bool = Field(
        default=False,
        description="a norm is part of the product behind it and is recomputed with that or not at all; those before "
        "latent attention and experts stand alone",
    )
    keeps_expert_outputs: bool = Field(
        default=True, description="the outputs of experts are kept for the gradient of the router's weights"
    )
    fp8_activations: bool = Field(default=False, description="in fp8, inputs of products are kept in 8 bits")
    fp8_gates: bool = Field(default=False, description="and so is what the activation function reads")
    fp8_weight_bytes: float = Field(
        default=0,
        ge=0,
        description="in fp8 without ZeRO, kept of each weight of a layer beside the 16-bit one: copy and transpose; "
        "with ZeRO they take its place",
    )
    gradient_placeholders: bool = Field(
        default=False,
        description="where products add to the gradient themselves, autograd has an empty 16-bit tensor, which is "
        "kept for each shape of a weight",
    )
    keeps_stage_outputs: bool = Field(
        default=False, description="a pipeline stage keeps what it sent for each microbatch in flight"
    )
    keeps_ends_gathered: bool = Field(
        default=True, description="ZeRO-3 keeps embedding and head gathered until the backward pass ends"
    )
    gathers_head_apart: bool = Field(
        default=False,
        description="ZeRO-3 gathers an untied head as a unit of its own, with the last norm, and frees its gradient "
        "when the loss is done",
    )
    shards_whole_experts: bool = Field(
        default=False, description="a rank's shard of the experts is a number of whole experts"
    )
    prefetched_params: float = Field(
        default=1e12, gt=0, description="parameters of the next layer that ZeRO-3 gathers ahead, at most"
    )
    live_params: float = Field(
        default=0,
        ge=0,
        description="gathered parameters that ZeRO-3 keeps from one pass to the next, at most, and the distance to "
        "their next use",
    )
    reduced_params: float = Field(
        default=1e12, gt=0, description="parameters whose gradients wait for their reduction, at most a layer's"
    )
    gradient_bucket: float = Field(
        default=0, ge=0, description="parameters of the bucket that gradients are copied to, with ZeRO and no pipeline"
    )
    bucket_buffers: int = Field(
        default=0,
        ge=0,
        description="buffers of that size for the gradients to come, which exist from the first gradient of a "
        "backward pass",
    )
    updated_params: float = Field(
        default=1e12, gt=0, description="parameters whose gradients the update of ZeRO-3 copies at a time, at most"
    )
    fragmentation: float = Field(
        ge=0,
        lt=1,
        description="share of activations and transients that the allocator cannot use, even where memory is short",
    )
    communicator_memory: Bytes | None = Field(
        default=None, description="for each mesh axis above 1, beside the device's reserved_memory"
    )


class EngineOffload(InputDocument):
    """Data that the engine keeps in the host's memory."""

    what: tuple[Offload, ...] = Field(description="what it can keep there")
    with_pipeline: Offload = Field(default="both", description="how much of that also under a pipeline")
    activations_of: tuple[Recompute, ...] = Field(
        default=("none", "selective", "full"), description="recompute policies whose activations it can offload"
    )
    optimizer_takes: Literal["states", "gradients", "weights"] = Field(
        default="states",
        description="what goes with an offloaded optimizer: its states alone; reduced gradients too, as they come; or "
        "(weights) those, and the shards of the weights, which go up for each gathering",
    )
    host_update_factor: float = Field(
        default=1,
        gt=0,
        description="seconds of the optimizer's update on the host over those of a fused one (CPU-Adam)",
    )


class EngineCompute(InputDocument):
    """Costs of the engine's computing in addition to the device's efficiency."""

    attention_kernel: Literal["latest", "flash-2"] = Field(
        default="latest",
        description="fused attention written for the device's generation (cuDNN in Transformer Engine, "
        "FlashAttention-3 and 4), or FlashAttention-2",
    )
    fp8_experts: bool = Field(default=True, description="in fp8, products of routed experts are in 8 bits too")
    accumulation_bytes: float = Field(
        ge=0, description="bytes moved per parameter to add one microbatch's gradient, outside the matrix product"
    )
    reduction_bytes: float = Field(
        default=0, ge=0, description="bytes moved per parameter around the reduction of a step's gradients"
    )
    host_factor: float = Field(
        ge=0, description="host time of a layer over the device file's layer_floor (0: captured graphs)"
    )
    tp_host_factor: float = Field(default=1, ge=0, description="times the above with tensor parallelism")
    expert_host_factor: float = Field(ge=0, description="the same for a layer with experts")


_Messages = Annotated[int, Field(ge=1, le=1000)]


class EngineCommunication(InputDocument):
    """How the engine communicates."""

    context_exchange: Literal["ring", "gather", "all-to-all"] = Field(
        default="ring",
        description="context parallelism passes keys and values round a ring, gathers and keeps those of all ranks, or "
        "trades its part of the sequence for heads (Ulysses)",
    )
    dispatches_once_per_host: bool = Field(
        default=False, description="a token goes to each host once, whatever number of its experts are there"
    )
    fp8_dispatch: bool = Field(
        default=False, description="in fp8, tokens travel to their experts in 8 bits and back in 16"
    )
    reduces_whole: bool = Field(
        default=False, description="with ZeRO too, gradients are summed whole on every rank (all-reduce)"
    )
    reduces_16_bit: bool = Field(
        default=False,
        description="gradients are reduced in the 16 bits in which the backward pass makes them, and summed in fp32 "
        "afterwards",
    )
    broadcasts_weights: bool = Field(
        default=False,
        description="below ZeRO-3 each rank keeps whole matrices, and broadcasts the updated ones, rank after rank",
    )
    send_messages: tuple[_Messages, _Messages] = Field(
        default=(1, 1),
        description="messages in which a stage's output goes to the next stage, and in which its gradient comes back",
    )
    send_share: float = Field(
        default=1, gt=0, le=1, description="share of a link's bandwidth that a send between two pipeline ranks reaches"
    )
    rank_wait: Seconds = Field(
        default=0.0,
        ge=0,
        description="host time of a tensor-parallel collective for each rank of its group, under pipelines over hosts",
    )
    scatters_pipeline_sends: bool = Field(
        description="without sequence parallelism each tensor-parallel rank sends its share, gathered on arrival"
    )


class EngineOverlap(InputDocument):
    """Communication that the engine hides behind computing."""

    data_parallel: bool = Field(description="reductions of gradients and ZeRO's gathering of weights")
    sharded_data_parallel: bool = Field(default=True, description="the same with ZeRO, where it is so without")
    weight_gathering: bool = Field(
        default=True, description="updated weights are gathered beside the next forward pass, where reductions hide too"
    )
    tensor_parallel: bool = Field(
        default=False,
        description="with sequence parallelism, tensor-parallel collectives run in pieces beside the products next to "
        "them (--tp-comm-overlap)",
    )
    weight_gradients: bool = Field(
        default=False, description="the sum of input gradients over tensor-parallel ranks runs beside weight gradients"
    )
    pipeline_sends: Literal["none", "interleaved", "all"] = Field(
        default="none",
        description="sends between stages: none; those of interleaved schedules, while the next chunk computes; all",
    )
    paired_passes: bool = Field(
        default=False,
        description="passes that a schedule pairs (F&B of DualPipe) hide exchanges of experts and sends",
    )
    offload: bool = Field(default=False, description="copies to and from the host run beside computing")


class EngineSpec(InputDocument):
    """An engine profile; it is data, so the cost model reads it and never asks for the engine's name."""

    name: Name
    program: str = Field(description="what runs the plan")
    emits: tuple[str, ...] = Field(
        default=(),
        description="programs that `planner emit --to` writes a plan for, the usual one first; none: it is priced only",
    )
    stands_for: str = Field(
        default="", description="a program without a profile, which this one prices; error bands are then wider"
    )
    defaults: EngineDefaults = EngineDefaults()
    can: EngineAbilities
    pipeline: EnginePipeline
    memory: EngineMemory
    offload: EngineOffload
    compute: EngineCompute
    communication: EngineCommunication
    overlap: EngineOverlap
