"""Forward and backward passes of one optimizer step: gradient accumulation, or a pipeline schedule."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from planner.trainer.parallelize import COMPUTE_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import _PipelineStageBase

    from planner.plan import Plan
    from planner.trainer.loss_scale import LossScale
    from planner.trainer.model import Transformer

__all__ = ["Executor", "make_executor"]


class Executor(Protocol):
    """Runs all microbatches of a step and leaves reduced gradients on the parameters."""

    def forward_backward(self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor | None:
        """Token ids of this data-parallel rank, (sequences, S), to its part of the mean loss, scaled.

        starts: see `Transformer.forward`. None on pipeline stages that do not hold the loss.
        """
        ...


class Loss:
    """Cross entropy, summed over a microbatch and divided by the tokens of the whole step; times the loss scale.

    Gradients are therefore added everywhere (microbatches, replicas, shards) and never averaged.
    """

    def __init__(self, num_tokens: int, scale: LossScale) -> None:
        self.num_tokens, self.scale = num_tokens, scale

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of one microbatch; fp32 whatever the precision of the logits."""
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return total * (self.scale.factor / self.num_tokens)


class Accumulation:
    """One pipeline stage: microbatch after microbatch, with the gradient traffic that the ZeRO stage asks for.

    ZeRO-0 and 1 reduce gradients once, after the last microbatch; ZeRO-2 and 3 after each one, so that they
    never hold whole gradients. Below ZeRO-3 the weights stay gathered until the last backward pass.
    """

    def __init__(self, part: Transformer, plan: Plan, loss: Loss) -> None:
        self.part, self.loss = part, loss
        self.microbatch_size, self.zero = plan.layout.mbs, plan.layout.zero
        self.loss_context = _loss_context(plan)

    def forward_backward(self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor:
        """See `Executor`."""
        total = targets.new_zeros((), dtype=torch.float32)
        size = self.microbatch_size
        cut = [None] * len(tokens) if starts is None else torch.split(starts, size)
        batches = list(zip(torch.split(tokens, size), torch.split(targets, size), cut, strict=False))
        for index, (inputs, wanted, starts_BT) in enumerate(batches):
            self._prepare(last=index == len(batches) - 1)
            with self.loss_context():
                loss = self.loss(self.part(inputs, starts_BT=starts_BT), wanted)
                torch.autograd.backward(loss)
            total += _whole(loss.detach())
        return total

    def _prepare(self, *, last: bool) -> None:
        assert isinstance(self.part, FSDPModule)
        self.part.set_is_last_backward(last)
        self.part.set_requires_gradient_sync(last or self.zero >= 2)
        self.part.set_requires_all_reduce(last)
        self.part.set_reshard_after_backward(last or self.zero == 3)


_ONE_CHUNK = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL_CHUNKS = {
    "gpipe": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Pipeline:
    """A schedule of torch.distributed.pipelining over this rank's chunks."""

    def __init__(
        self, parts: list[Transformer], plan: Plan, mesh: DeviceMesh, device: torch.device, loss: Loss
    ) -> None:
        layout = plan.layout
        microbatches = layout.num_microbatches(plan.training.global_batch_size)
        group = mesh.get_group("pp")
        chunks = layout.chunks_of_stage(mesh.get_local_rank("pp"))
        stages: list[_PipelineStageBase] = [
            _make_stage(part, chunk, plan, device, group) for part, chunk in zip(parts, chunks, strict=True)
        ]
        # the loss is divided by the tokens of the step already: torch's default would divide once more
        if layout.interleave == 1:
            single = _ONE_CHUNK[layout.schedule]
            self.schedule: _PipelineSchedule = single(stages[0], microbatches, loss_fn=loss, scale_grads=False)
        else:
            several = _SEVERAL_CHUNKS[layout.schedule]
            self.schedule = several(stages, microbatches, loss_fn=loss, scale_grads=False)
        self.first, self.last = 0 in chunks, layout.num_chunks - 1 in chunks
        self.loss_context = _loss_context(plan)

    def forward_backward(self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor | None:
        """See `Executor`."""
        for_all: dict[str, Any] = (
            {} if starts is None else {"starts_BT": starts}
        )  # torch cuts it into microbatches for every stage
        losses: list[Tensor] = []
        with self.loss_context():
            self.schedule.step(
                *((tokens,) if self.first else ()),
                target=targets if self.last else None,
                losses=losses if self.last else None,
                return_outputs=False,
                **for_all,
            )
        return torch.stack([_whole(loss.detach()) for loss in losses]).sum() if self.last else None


def _make_stage(part: Transformer, chunk: int, plan: Plan, device: torch.device, group: ProcessGroup) -> PipelineStage:
    """A stage whose shapes are stated; torch would run one more microbatch just to find them out."""
    layout, training = plan.layout, plan.training
    dtype = COMPUTE_TYPES[training.precision]
    with torch.device("meta"):
        length = training.sequence_length // layout.cp
        tokens = torch.empty(layout.mbs, length, dtype=torch.int64)
        hidden = torch.empty(layout.mbs, length // layout.tp, plan.model.hidden_size, dtype=dtype, requires_grad=True)
        logits = torch.empty(layout.mbs, length, plan.model.vocab_size, dtype=dtype)
    return PipelineStage(
        part,
        chunk,
        layout.num_chunks,
        device,
        input_args=tokens if chunk == 0 else hidden,
        output_args=logits.requires_grad_() if chunk == layout.num_chunks - 1 else hidden,
        group=group,
    )


def make_executor(
    parts: list[Transformer], plan: Plan, mesh: DeviceMesh, device: torch.device, scale: LossScale
) -> Executor:
    """The executor of a plan: a pipeline where there is more than one stage."""
    loss = Loss(plan.training.global_batch_size * plan.training.sequence_length, scale)
    if plan.layout.pp > 1:
        return Pipeline(parts, plan, mesh, device, loss)
    return Accumulation(parts[0], plan, loss)


def _loss_context(plan: Plan) -> Callable[[], AbstractContextManager[None]]:
    """Logits that are sharded over the vocabulary need torch's loss_parallel around loss and backward pass."""
    return loss_parallel if plan.layout.tp > 1 else contextlib.nullcontext


def _whole(loss: Tensor) -> Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
