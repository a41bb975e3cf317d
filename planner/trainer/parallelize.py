"""Turn plain modules into this rank's share of the plan.

The order is fixed: cut into pipeline chunks on the meta device, tensor and sequence parallelism (DTensor),
recompute, FSDP2 (also for one device: it brings mixed precision and the optimizer's fp32 shards), then
storage, then values seeded by name.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from planner.trainer.mesh import sharded_axes
from planner.trainer.model import Block, Transformer, initial_value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from planner.layout import Layout
    from planner.plan import Plan

__all__ = ["build_chunks", "fsdp_modules", "local_tensor"]


def build_chunks(plan: Plan, mesh: DeviceMesh, device: torch.device) -> list[Transformer]:
    """This rank's chunks of the model, in model order, sharded, on `device` and with their first values."""
    layout = plan.layout
    ends = list(accumulate(layout.layers_per_stage))
    chunks = []
    for chunk in layout.chunks_of_stage(mesh.get_local_rank("pp")):
        with torch.device("meta"):
            part = Transformer(
                plan.model,
                layers=range(ends[chunk] - layout.layers_per_stage[chunk], ends[chunk]),
                first=chunk == 0,
                last=chunk == layout.num_chunks - 1,
                flash=plan.training.attention == "flash",
            )
        if layout.tp > 1:
            apply_tensor_parallel(part, mesh["tp"])
        apply_recompute(part, layout.recompute[chunk])
        apply_data_parallel(part, layout, mesh, plan.training.precision)
        part.to_empty(device=device)
        initialize(part, plan, device)
        chunks.append(part)
    return chunks


def apply_tensor_parallel(part: Transformer, mesh: DeviceMesh) -> None:
    """Shoeybi et al. 2019 (column, then row) with Korthikanti et al. 2022 (sequence-sharded residuals)."""
    plan: dict[str, ParallelStyle] = {}
    if part.embedding is not None:
        lookup = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan |= {f"embedding.{name}": lookup for name, _ in part.embedding.named_children()}
    for number, block in part.layers.items():
        plan |= {f"layers.{number}.{name}": style for name, style in _block_plan(block).items()}
    if part.head is not None:
        plan["norm"] = SequenceParallel()
        # logits stay sharded over the vocabulary: the loss reduces two numbers per token instead of gathering
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(part, mesh, plan)
    part.tie()


def _block_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    plan |= {"attention": gather, "ffn": gather}
    for module, last in (("attention", "output"), ("ffn", "down")):
        for name, _ in block.get_submodule(module).named_children():
            row = RowwiseParallel(output_layouts=Shard(1))
            plan[f"{module}.{name}"] = row if name == last else ColwiseParallel()
    return plan


def apply_recompute(part: Transformer, policy: str) -> None:
    """Set every layer of the chunk to recompute its forward pass, where the plan says `full`."""
    for block in part.layers.values():
        assert isinstance(block, Block)
        block.recompute = policy == "full"


def apply_data_parallel(part: Transformer, layout: Layout, mesh: DeviceMesh, precision: str) -> None:
    """FSDP2 on every layer, on the embedding, and on the rest; sums gradients, for the loss is a mean already."""
    shard_mesh = mesh[sharded_axes(layout)]
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reshard = layout.zero == 3
    if part.embedding is not None and not part.tied:
        fully_shard(part.embedding, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=reshard)
    for block in part.layers.values():
        fully_shard(block, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(part, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules([part]):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def fsdp_modules(parts: Iterable[nn.Module]) -> list[FSDPModule]:
    """Every FSDP2 unit of these chunks."""
    return [module for part in parts for module in part.modules() if isinstance(module, FSDPModule)]


@torch.no_grad()
def initialize(part: Transformer, plan: Plan, device: torch.device) -> None:
    """Give every parameter its share of the value that its name and the seed determine."""
    for name, parameter in part.named_parameters():
        whole = initial_value(name, parameter.shape, plan.model, seed=plan.training.seed, device=device)
        assert isinstance(parameter, DTensor)
        # every rank made the same value, so nothing is sent
        share = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local_tensor(parameter).copy_(share.to_local())


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
