"""Forward and backward passes of one optimizer step: gradient accumulation, or a pipeline schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
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
from torch.utils.checkpoint import GraphExecGroup

from planner.trainer.cross_entropy import cross_entropy
from planner.trainer.parallelize import COMPUTE_TYPES, fsdp_modules, local_tensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

    from planner.plan import Plan
    from planner.trainer.loss_scale import LossScale
    from planner.trainer.model import Transformer


class Executor(Protocol):
    """Runs all microbatches of a step, and leaves reduced gradients on the parameters."""

    def forward_backward(self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor | None:
        """Run the token ids (sequences, S) of this data-parallel rank; return its scaled part of the mean loss.

        The result is None on pipeline stages without the loss.
        starts: see `Transformer.forward`.
        """
        ...


class Loss:
    """Cross entropy: summed over a microbatch, divided by the step's tokens, and multiplied by the loss scale.

    Gradients are therefore always added (over microbatches, replicas and shards) and never averaged.
    """

    def __init__(self, num_tokens: int, scale: LossScale) -> None:
        self.num_tokens, self.scale = num_tokens, scale

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of one microbatch, in fp32 for logits of any precision; the backward pass overwrites the logits."""
        group = logits.device_mesh.get_group() if isinstance(logits, DTensor) else None
        total = cross_entropy(local_tensor(logits).flatten(0, 1), targets.flatten(), group)
        return total * (self.scale.factor / self.num_tokens)


class Accumulation:
    """One pipeline stage that runs one microbatch after another, with the gradient traffic of the ZeRO stage.

    ZeRO-0 and 1 reduce gradients once, after the last microbatch. ZeRO-2 and 3 reduce them after each microbatch, so
    that no rank holds whole gradients. Below ZeRO-3 the weights stay gathered until the last backward pass.
    """

    def __init__(self, part: Transformer, plan: Plan, loss: Loss) -> None:
        self.part, self.loss, self.units = part, loss, fsdp_modules([part])
        self.microbatch_size, self.zero = plan.layout.mbs, plan.layout.zero

    def forward_backward(self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor:
        """See `Executor`."""
        total = targets.new_zeros((), dtype=torch.float32)
        size = self.microbatch_size
        cut = [None] * len(tokens) if starts is None else torch.split(starts, size)
        batches = list(zip(torch.split(tokens, size), torch.split(targets, size), cut, strict=False))
        for index, (inputs, wanted, starts_BT) in enumerate(batches):
            self._prepare(last=index == len(batches) - 1)
            loss = self.loss(self.part(inputs, starts_BT=starts_BT), wanted)
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def _prepare(self, *, last: bool) -> None:
        for unit in self.units:  # by itself FSDP2 would look for its units among all modules, each time
            unit.set_is_last_backward(last)
            unit.set_requires_gradient_sync(last or self.zero >= 2, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or self.zero == 3, recurse=False)


class ScheduleNaive(Schedule1F1B):
    """A schedule with one microbatch in flight: every stage runs its backward pass before its next forward pass.

    In 1F1B a stage runs ahead by as many forward passes as there are stages from itself to the last stage, both
    included. Here each stage runs ahead as if it were the last stage, and any number of microbatches is allowed.
    """

    def __init__(self, stage: _PipelineStageBase, n_microbatches: int, **options: Any) -> None:
        super(Schedule1F1B, self).__init__(stage=stage, n_microbatches=n_microbatches, **options)
        self._num_stages = stage.stage_index + 1


_ONE_CHUNK = {"naive": ScheduleNaive, "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
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

    def forward_backward(self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor | None:
        """See `Executor`."""
        for_all: dict[str, Any] = {} if starts is None else {"starts_BT": starts}  # torch cuts it for every stage
        losses: list[Tensor] = []
        self.schedule.step(
            *((tokens,) if self.first else ()),
            target=targets if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
            **for_all,
        )
        return torch.stack([loss.detach() for loss in losses]).sum() if self.last else None


class _Stage(PipelineStage):
    """A stage that has receive buffers only while it needs them; torch's stage has one for every microbatch of a step.

    A tensor on the meta device replaces a missing buffer and records its size.
    """

    def _setup_forward_recv_info(self, *arguments: Any) -> None:
        super()._setup_forward_recv_info(*arguments)
        for expected in self.args_recv_info.values():
            _allocate(expected, "meta")

    def _create_grad_recv_info(self, *arguments: Any) -> tuple[_RecvInfo, ...]:
        expected = super()._create_grad_recv_info(*arguments)
        _allocate(expected, "meta")
        return expected

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffer for a microbatch's input."""
        _allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffer for the gradient of a microbatch's output."""
        _allocate(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Release the buffer after the forward pass; autograd and the schedule keep the input while they need it."""
        output = super().forward_one_chunk(fwd_chunk_id, *arguments, **options)
        _allocate(self.args_recv_info[fwd_chunk_id], "meta")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        """Release the gradient of the output after its use, and the loss, which would keep the stage's input alive."""
        super().backward_one_chunk(bwd_chunk_id, *arguments, **options)
        _allocate(self.grad_recv_info.get(bwd_chunk_id, ()), "meta")
        if options.get("loss") is not None:
            options["loss"].detach_()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        """Add the gradients to their fp32 sums at once, and recompute each layer once.

        FSDP2 leaves the gradients in 16 bits until the next backward pass of the chunk, and until then adds those of
        further microbatches in 16 bits. torch runs a backward pass for each matrix, of which each would recompute the
        whole layer, and keep what it does not read.
        """
        with GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **options)
        for unit in fsdp_modules([self.submod]):
            group = unit._get_fsdp_state()._fsdp_param_group  # noqa: SLF001 # torch has no public name
            for each in group.fsdp_params if group is not None else ():
                each.accumulate_unsharded_grad_if_needed()
                each.to_accumulated_grad_if_needed()


def _allocate(expected: tuple[_RecvInfo, ...], device: torch.device | str) -> None:
    """Give the expected tensors memory on a device; the device "meta" frees it."""
    for each in expected:
        if each.buffer is not None:
            each.buffer = torch.empty_like(each.buffer, device=device, requires_grad=each.buffer.requires_grad)


def _make_stage(part: Transformer, chunk: int, plan: Plan, device: torch.device, group: ProcessGroup) -> _Stage:
    """A stage with given shapes; without them torch would run another microbatch to find the shapes."""
    layout, training = plan.layout, plan.training
    dtype = COMPUTE_TYPES[training.precision]
    with torch.device("meta"):
        length = training.sequence_length // layout.cp
        tokens = torch.empty(layout.mbs, length, dtype=torch.int64)
        hidden = torch.empty(layout.mbs, length // layout.tp, plan.model.hidden_size, dtype=dtype, requires_grad=True)
        logits = torch.empty(layout.mbs, length, plan.model.vocab_size, dtype=dtype)
    return _Stage(
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
    """The executor of a plan: a pipeline if there is more than one stage."""
    loss = Loss(plan.training.global_batch_size * plan.training.sequence_length, scale)
    if plan.layout.pp > 1:
        return Pipeline(parts, plan, mesh, device, loss)
    return Accumulation(parts[0], plan, loss)
