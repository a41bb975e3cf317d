"""Turn plain modules into this rank's share of the plan.

The steps have a fixed order:

1. cut the model into pipeline chunks on the meta device,
2. use 8-bit products,
3. apply tensor and sequence parallelism (DTensor),
4. apply context and expert parallelism,
5. apply recompute,
6. apply FSDP2, also to a group of one rank in 16 bits, because it keeps fp32 shards beside the weights that compute,
7. allocate storage, and
8. fill in the values, which names and the seed determine.
"""

from __future__ import annotations

import itertools
import warnings
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from planner.trainer.context_parallel import apply_context_parallel
from planner.trainer.expert_parallel import apply_expert_parallel, mixtures_of
from planner.trainer.feed_forward import BALANCE
from planner.trainer.float8 import apply_float8
from planner.trainer.mesh import sharded_axes
from planner.trainer.model import Block, Transformer, initial_value
from planner.trainer.tensor_parallel import apply_tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from planner.layout import Layout
    from planner.plan import Plan
    from planner.trainer.mesh import Meshes

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Types of computation apart from 8-bit products; weights, gradient sums and optimizer states are fp32."""

SMALL_BYTES = 25 * 2**20
"""Weights of a chunk that sends its gradients together, as DistributedDataParallel does (its `bucket_cap_mb`)."""


def build_chunks(plan: Plan, meshes: Meshes, device: torch.device) -> list[Transformer]:
    """This rank's chunks of the model in model order, sharded, on `device` and with their initial values."""
    layout = plan.layout
    ends = list(accumulate(layout.layers_per_stage))
    chunks = []
    for chunk in layout.chunks_of_stage(meshes.dense.get_local_rank("pp")):
        with torch.device("meta"):
            part = Transformer(
                plan.model,
                layers=range(ends[chunk] - layout.layers_per_stage[chunk], ends[chunk]),
                first=chunk == 0,
                last=chunk == layout.num_chunks - 1,
                flash=plan.training.attention == "flash",
            )
        if plan.training.precision == "fp8":
            apply_float8(part, layout, emulate=device.type == "cpu")
        if layout.tp > 1:
            apply_tensor_parallel(part, meshes.dense["tp"])
        if meshes.context is not None:
            apply_context_parallel(part, meshes.context, plan.training.sequence_length)
        if layout.ep > 1 and meshes.experts is not None:
            apply_expert_parallel(part, meshes.experts["ep"])
        apply_load_balancing(part, meshes.sequence)
        apply_recompute(part, layout.recompute[chunk])
        apply_data_parallel(part, plan, meshes)
        part.to_empty(device=device)
        part.tie()
        initialize(part, plan, device)
        chunks.append(part)
    return chunks


def apply_load_balancing(part: Transformer, group: ProcessGroup | None) -> None:
    """Count the experts' tokens over whole sequences, whose parts are on the ranks of `group`."""

    def over_sequence(counts: Tensor) -> Tensor:
        whole = counts.clone()
        dist.all_reduce(whole, group=group)
        return whole

    for mixture in mixtures_of(part):
        if group is not None:
            mixture.add_counts = over_sequence


def set_balance_weight(parts: Iterable[Transformer], num_sequences: int, scale: float) -> None:
    """Weight the load-balancing loss so that it is the mean over a step's sequences, with the loss scale `scale`."""
    for part in parts:
        for mixture in mixtures_of(part):
            mixture.balance_weight = scale * BALANCE / num_sequences


def apply_recompute(part: Transformer, policy: str) -> None:
    """Make every layer of the chunk recompute its forward pass, if the policy is `full`."""
    for block in part.layers.values():
        assert isinstance(block, Block)
        block.recompute = policy == "full"


def compiles(layout: Layout, device: torch.device) -> bool:
    """Whether a run compiles its layers: on GPUs, except with schedules that split the backward pass (torch's rule)."""
    return device.type == "cuda" and layout.schedule not in ("zbv", "dualpipev")


def compile_layers(parts: Iterable[Transformer], backend: str = "inductor", *, async_tp: ProcessGroup | None) -> None:
    """Compile every layer; code that cannot be compiled runs uncompiled (TORCH_COMPILE_DISABLE=1 disables compilation).

    Layers with experts read counts on the host, which breaks the graph.
    async_tp: tensor-parallel ranks compute with pieces of each other's tensors while further pieces arrive (Wang et al.
    2023, Overlap Communication with Dependent Computation).
    """
    if async_tp is not None:
        torch._inductor.config._micro_pipeline_tp = True  # noqa: SLF001 # as torchtitan switches it on
        with warnings.catch_warnings():  # torch 2.13 deprecates the call, but its compiler pass still needs it
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(async_tp.group_name)
    torch._dynamo.config.suppress_errors = True  # noqa: SLF001 # torch's documented switch
    for part in parts:
        for block in part.layers.values():
            if not mixtures_of(block):
                block.compile(backend=backend)


def apply_data_parallel(part: Transformer, plan: Plan, meshes: Meshes) -> None:
    """Apply FSDP2 to every layer, to the embedding, and to all other modules.

    Gradients are summed, because the loss is already a mean. A small chunk whose weights stay whole during a step is
    one unit: a unit's hooks would take longer than it could save by sending its gradients early.

    Routed experts have their own mesh, because other ranks hold copies of them. FSDP2 has nothing to do in fp32 if no
    other rank holds copies or shards of a weight: its hooks would only take time.
    """
    if plan.training.precision == "fp32" and plan.layout.dp * plan.layout.cp == 1 and meshes.experts is None:
        return
    policy = MixedPrecisionPolicy()
    if plan.training.precision != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE_TYPES[plan.training.precision], reduce_dtype=torch.float32)
    reshard = plan.layout.zero == 3
    units: list[nn.Module] = [] if part.embedding is None or part.tied else [part.embedding]
    units += part.layers.values()
    if not reshard and sum(parameter.nbytes for parameter in part.parameters()) <= SMALL_BYTES:
        units = []

    def shard(module: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
        fully_shard(module, mesh=mesh[sharded_axes(mesh)], mp_policy=policy, reshard_after_forward=reshard)

    for mixture in mixtures_of(part):
        assert meshes.experts is not None
        shard(mixture.experts, meshes.experts, reshard=reshard)
    for unit in units:
        shard(unit, meshes.dense, reshard=reshard)
    shard(part, meshes.dense, reshard=False)
    _gather_ahead(part)
    for module in fsdp_modules([part]):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def _gather_ahead(part: Transformer) -> None:
    """Make each unit request the next unit's weights before it computes, and the previous unit's in the backward pass.

    FSDP2 by itself requests weights when their unit starts. This may be too late, because the host waits for the counts
    of the experts.
    """
    assert isinstance(part, FSDPModule)
    order = [fsdp_modules([module]) for module in (part.embedding, *part.layers.values()) if module is not None]
    order = [[part], *(units for units in order if units)]
    for (unit, *_), following in itertools.pairwise(order):
        unit.set_modules_to_forward_prefetch(following)
    for (unit, *_), before in itertools.pairwise([order[0], *reversed(order[1:])]):
        unit.set_modules_to_backward_prefetch(before)


def fsdp_modules(parts: Iterable[nn.Module]) -> list[FSDPModule]:
    """Every FSDP2 unit of these chunks."""
    return [module for part in parts for module in part.modules() if isinstance(module, FSDPModule)]


@torch.no_grad()
def initialize(part: Transformer, plan: Plan, device: torch.device) -> None:
    """Initialize every parameter: its name and the seed determine the whole value, and the rank keeps its shard."""
    for name, parameter in part.named_parameters():
        whole = initial_value(name, parameter.shape, plan.model, seed=plan.training.seed, device=device)
        set_share(parameter, whole)


@torch.no_grad()
def set_share(parameter: Tensor, whole: Tensor) -> None:
    """Give a parameter this rank's share of its whole value; every rank has the same value, so nothing is sent."""
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    local_tensor(parameter).copy_(local_tensor(whole))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
