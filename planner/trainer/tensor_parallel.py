"""Tensor and sequence parallelism: how DTensor cuts each weight of a chunk over the tp ranks.

The first matrix of a block is cut by columns, the last by rows (Shoeybi et al. 2019). Between blocks every rank holds
its part of the positions (Korthikanti et al. 2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from planner.trainer.attention import LatentAttention
from planner.trainer.feed_forward import MixtureOfExperts
from planner.trainer.model import Block, Transformer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

_Plan = dict[str, ParallelStyle]
_GATHER = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
_LOCAL = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True)
_ON_OWN_ROWS = SequenceParallel(use_local_output=True)


class _Style(ParallelStyle):
    """A DTensor style: `weights` says how parameters are cut, `inputs` how an input is cut.

    The output is a local tensor.

    gathered: every rank gets the whole output and uses a part of it, so the ranks' gradients must be added.
    """

    def __init__(self, weights: Placement, inputs: Placement, *, gathered: bool = False) -> None:
        super().__init__()
        self.weights, self.inputs, self.gathered = weights, inputs, gathered

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._partition, self._before, self._after)  # type: ignore[arg-type] # torch's hooks have wider types

    def _partition(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [self.weights])))

    def _before(self, _: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        first = inputs[0]
        return first if isinstance(first, DTensor) else DTensor.from_local(first, mesh, [self.inputs], run_check=False)

    def _after(self, _: nn.Module, output: Any, __: DeviceMesh) -> Tensor:
        if self.gathered:
            result: Tensor = output.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        else:
            result = output.to_local()
        return result


class _Lookup(ParallelStyle):
    """A lookup in a table that is cut by rows; each position's row comes from the rank that holds it.

    DTensor's own lookup allocates the gradient of the whole table on every rank, and cuts it after the last microbatch.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        table = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(table))
        first = device_mesh.get_local_rank() * -(-len(table) // device_mesh.size())

        def forward(rows_BS: Tensor) -> Tensor:
            """The rows of the table for this rank's positions; the function waits until the ranks' sums have arrived.

            The wait is necessary because torch.compile loses the gradient of a collective's unfinished result.
            """
            assert isinstance(module.weight, DTensor)
            own = module.weight.to_local()
            here = (rows_BS >= first) & (rows_BS < first + len(own))
            found = F.embedding(torch.where(here, rows_BS - first, 0), own) * here[..., None]
            summed = DTensor.from_local(found, device_mesh, [Partial()], run_check=False)
            result: Tensor = summed.redistribute(placements=[Shard(1)]).to_local()
            return result.clone()  # a module under FSDP2 must not return a view

        module.forward = forward  # type: ignore[assignment, method-assign] # torch's styles only have hooks around it
        return module


def apply_tensor_parallel(part: Transformer, mesh: DeviceMesh) -> None:
    """Cut the chunk over the ranks of `mesh`; residuals are cut along the sequence."""
    plan: _Plan = {}
    if part.embedding is not None:
        lookup = _Lookup()
        plan |= {
            f"embedding.{name}": _ON_OWN_ROWS if name == "norm" else lookup
            for name, _ in part.embedding.named_children()
        }
    for number, block in part.layers.items():
        assert isinstance(block, Block)
        plan |= {f"layers.{number}.{name}": style for name, style in _block_plan(block).items()}
    if part.norm is not None:
        plan["norm"] = SequenceParallel()
    if part.head is not None:
        # logits stay sharded over the vocabulary: the loss reduces two numbers per token instead of gathering
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(part, mesh, plan)
    part.tie()


def _block_plan(block: Block) -> _Plan:
    plan: _Plan = {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    plan |= dict.fromkeys(("attention_post_norm", "ffn_post_norm"), _ON_OWN_ROWS)
    plan = {name: style for name, style in plan.items() if getattr(block, name) is not None}
    attention = (
        _latent_plan(block.attention) if isinstance(block.attention, LatentAttention) else _attention_plan(block)
    )
    ffn = _experts_plan(block.ffn) if isinstance(block.ffn, MixtureOfExperts) else _columns_then_rows(block.ffn, "down")
    plan |= {f"attention{name}": style for name, style in attention.items()}
    return plan | {f"ffn{name}": style for name, style in ffn.items()}


def _columns_then_rows(module: nn.Module, last: str) -> _Plan:
    """Gather the positions; the last map is cut by inputs, all other maps by outputs."""
    row = RowwiseParallel(output_layouts=Shard(1))
    return {"": _GATHER} | {
        f".{name}": row if name == last else ColwiseParallel()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear)
    }


def _attention_plan(block: Block) -> _Plan:
    plan = _columns_then_rows(block.attention, "output")
    if block.attention.query_norm is not None:
        # norms of single heads: heads are cut; norms of the whole width: the width is cut
        whole = block.attention.norm_whole_width
        style = _Style(Shard(0), Shard(-1)) if whole else _Style(Replicate(), Shard(1))
        plan |= {".query_norm": style, ".key_norm": style}
    return plan


def _latent_plan(attention: LatentAttention) -> _Plan:
    """Each rank projects its own positions to the latents; then the latents are gathered, and heads are cut."""
    plan: _Plan = {name: SequenceParallel() for name in (".key_value_down", ".key_value_norm")}
    if attention.query_down is not None:
        plan |= {name: SequenceParallel() for name in (".query_down", ".query_norm")}
    plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in (".query_up", ".key_value_up")}
    if attention.rotary_key is not None:
        plan[".rotary_key"] = _Style(Replicate(), Shard(1), gathered=True)
    return plan | {".output": RowwiseParallel(output_layouts=Shard(1))}


def _experts_plan(mixture: MixtureOfExperts) -> _Plan:
    """Each rank routes its own positions; shared experts are cut, routed experts are not."""
    plan: _Plan = {"": _LOCAL, ".router": _ON_OWN_ROWS}
    if mixture.shared is not None:
        plan |= {f".shared{name}": style for name, style in _columns_then_rows(mixture.shared, "down").items()}
    if mixture.shared_gate is not None:
        plan[".shared_gate"] = _ON_OWN_ROWS
    return plan
