"""Expert parallelism: each rank holds some of the routed experts, and all-to-alls move tokens to them and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from planner.trainer.feed_forward import MixtureOfExperts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from planner.trainer.feed_forward import Experts
    from planner.trainer.model import Transformer


def mixtures_of(part: nn.Module) -> list[MixtureOfExperts]:
    """The mixture-of-experts blocks inside a chunk or a layer."""
    return [module for module in part.modules() if isinstance(module, MixtureOfExperts)]


def apply_expert_parallel(part: Transformer, mesh: DeviceMesh) -> None:
    """Distribute the experts of every layer over the ranks of `mesh`, in order."""
    for mixture in mixtures_of(part):
        experts = mixture.experts
        for name, parameter in list(experts.named_parameters()):
            experts.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
        experts.read = DTensor.to_local  # type: ignore[assignment] # the weights are DTensors from here on
        exchange = _Exchange(mesh.get_group())
        experts.register_forward_pre_hook(exchange.to_experts)
        experts.register_forward_hook(exchange.to_tokens)


class _AllToAll(torch.autograd.Function):
    """An all-to-all of rows: `sent[i]` rows to rank i and `received[i]` rows from it; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = (sent, received), group
        return _exchange(x_TE, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return each gradient to the rank that sent the row."""
        sent, received = ctx.counts
        return _exchange(grads[0], received, sent, ctx.group), None, None, None


def _exchange(x_TE: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    out = x_TE.new_empty(sum(received), *x_TE.shape[1:])
    dist.all_to_all_single(out, x_TE.contiguous(), received, sent, group=group)
    return out


class _Exchange:
    """The hooks around a layer's experts, which send tokens to the ranks of their experts and results back.

    Lepikhin et al., GShard (2020), section 3.2. The host reads the counts, so no token is dropped or padded.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.order, self.sent, self.received = torch.empty(0), [0], [0]

    def to_experts(self, _: Experts, inputs: Any) -> tuple[Tensor, Tensor]:
        """Exchange rows sorted by expert, and the counts of all experts, for those of this rank's experts."""
        x_TE, counts_X = inputs
        ranks = dist.get_world_size(self.group)
        arriving = torch.empty_like(counts_X)
        dist.all_to_all_single(arriving, counts_X, group=self.group)
        arriving_RX = arriving.view(ranks, -1)
        self.sent, self.received = counts_X.view(ranks, -1).sum(1).tolist(), arriving_RX.sum(1).tolist()
        expert = torch.arange(arriving_RX.shape[1], device=x_TE.device).repeat(ranks).repeat_interleave(arriving)
        self.order = expert.argsort(stable=True)  # from order by rank, then expert, to order by expert
        rows = _AllToAll.apply(x_TE, self.sent, self.received, self.group)  # type: ignore[no-untyped-call] # torch's
        return rows[self.order], arriving_RX.sum(0)

    def to_tokens(self, _: Experts, __: Any, output: Tensor) -> Tensor:
        """Send the results of this rank's experts back to the tokens' ranks, in the original order."""
        back = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(self.order), device=output.device))
        result: Tensor = _AllToAll.apply(output[back], self.received, self.sent, self.group)  # type: ignore[no-untyped-call] # torch's
        return result
