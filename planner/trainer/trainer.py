"""One rank of a training job: its share of the model, its optimizer, and one step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from planner.trainer.context_parallel import held_positions, rows_of
from planner.trainer.data import document_starts
from planner.trainer.loss_scale import LossScale
from planner.trainer.mesh import make_meshes
from planner.trainer.obstacles import check_plan
from planner.trainer.optimizer import clip, learning_rate, make_optimizer, squared_norm
from planner.trainer.parallelize import build_chunks, compile_layers, local_tensor, set_balance_weight
from planner.trainer.pipeline import make_executor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from planner.plan import Plan
    from planner.trainer.data import Corpus

ReadBatch: TypeAlias = "Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one optimizer step, which is equal on every rank except for the seconds.

    finite: false if the loss or the gradient norm is not a number; the weights are then unchanged.
    stop, save: whether some rank asked to stop, or to save.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    optimizer_seconds: float
    finite: bool
    stop: bool
    save: bool


class Trainer:
    """This rank's part of the job; every rank makes a Trainer, and all call `step` together.

    `step_number` counts finished optimizer steps.
    """

    def __init__(self, plan: Plan, corpus: Corpus, device: torch.device, *, num_steps: int) -> None:
        check_plan(plan)
        self.plan, self.corpus, self.device, self.num_steps = plan, corpus, device, num_steps
        meshes = make_meshes(plan.layout, device.type, has_experts=plan.model.moe is not None)
        self.mesh = meshes.dense
        self.chunks = build_chunks(plan, meshes, device)
        self._parameters = {name: each for chunk in self.chunks for name, each in chunk.named_parameters()}
        self.optimizer = make_optimizer(self.parameters(), plan.training)
        self.scale = LossScale(plan.training.precision)
        self.executor = make_executor(self.chunks, plan, self.mesh, device, self.scale)
        self.step_number = 0
        self._tied_group = self._make_tied_group()

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their name in the whole model."""
        return self._parameters

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters without the second copy of tied embeddings in a pipeline."""
        copied = self.plan.model.tied_embeddings and self.plan.layout.num_chunks > 1
        return {name: p for name, p in self.parameters().items() if not (copied and name == "head.weight")}

    def step(self, *, stop: bool = False, save: bool = False) -> StepResult:
        """Run one optimizer step; if the loss or the gradients are not finite, the weights do not change.

        stop, save: this rank's request to all ranks after the step.
        """
        started = time.perf_counter()
        batch = self._batch(self.corpus.batch, self.step_number)
        total, grad_norm, stop, save = self._loss_and_gradients(batch, stop=stop, save=save)
        while math.isfinite(total) and not math.isfinite(grad_norm) and self.scale.shrinks():
            self.optimizer.zero_grad()
            total, grad_norm, stop, save = self._loss_and_gradients(batch, stop=stop, save=save)
        rate = learning_rate(self.step_number + 1, self.num_steps, self.plan.training)
        before_optimizer = time.perf_counter()
        finite = math.isfinite(total) and math.isfinite(grad_norm)
        if finite:
            self._update(grad_norm, rate)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        finished = time.perf_counter()
        return StepResult(
            loss=total,
            grad_norm=grad_norm,
            learning_rate=rate,
            seconds=finished - started,
            optimizer_seconds=finished - before_optimizer,
            finite=finite,
            stop=stop,
            save=save,
        )

    def validation_loss(self, num_batches: int) -> float:
        """Mean loss of the first held-out batches.

        Pipeline schedules have only training passes, so such a pass computes the loss, and its gradients are dropped.
        """
        total = 0.0
        for number in range(num_batches):
            batch = self._batch(self.corpus.held_out_batch, number)
            total += self._loss_and_gradients(batch, stop=False, save=False)[0]
            self.optimizer.zero_grad()
        return total / num_batches

    def compile_layers(self, backend: str = "inductor", *, async_tp: bool = False) -> None:
        """Prepare the layers for compilation, which takes place during the next step."""
        compile_layers(self.chunks, backend, async_tp=self.mesh.get_group("tp") if async_tp else None)

    def _loss_and_gradients(
        self, batch: list[torch.Tensor], *, stop: bool, save: bool
    ) -> tuple[float, float, bool, bool]:
        """Loss, gradient norm, stop and save over all ranks; the scaled gradients stay on the parameters."""
        scale = self.scale.factor
        set_balance_weight(self.chunks, self.plan.training.global_batch_size, scale)
        loss = self.executor.forward_backward(*batch)
        self._add_partial_gradients()
        self._add_tied_gradients()
        total, squares, stop, save = self._agree(loss, stop=stop, save=save)
        return total / scale, math.sqrt(squares) / scale, stop, save

    def _batch(self, read: ReadBatch, number: int) -> list[torch.Tensor]:
        """Inputs and targets of a global batch: the positions of this rank, in this rank's sequences.

        With document masks, the result also has the documents' starts for all positions, because keys come from other
        ranks too.
        """
        layout, training = self.plan.layout, self.plan.training
        here = layout.coordinates(dist.get_rank())
        rows = training.global_batch_size // layout.dp
        whole = read(number * training.global_batch_size + here["dp"] * rows, rows)
        end = self.corpus.document_end
        starts = () if end is None else (document_starts(whole[0], end),)
        if layout.cp > 1:
            held = held_positions(training.sequence_length, layout.cp, here["cp"])
            whole = (rows_of(whole[0], held), rows_of(whole[1], held))
        return [_sent(tensor, self.device) for tensor in (*whole, *starts)]

    def _agree(self, loss: torch.Tensor | None, *, stop: bool, save: bool) -> tuple[float, float, bool, bool]:
        """Loss, squared gradient norm, stop and save over all ranks, in one all-reduce of four numbers."""
        counts = loss is not None and self.mesh.get_local_rank("tp") == 0
        part = loss if loss is not None and counts else torch.zeros((), device=self.device)
        asked = torch.tensor([float(stop), float(save)], device=self.device)
        squares = squared_norm(self.own_parameters().values())
        shared = torch.cat((torch.stack((part.float(), squares)), asked))
        dist.all_reduce(shared)
        total, squares_of_all, num_stop, num_save = shared.tolist()
        return total, squares_of_all, num_stop > 0, num_save > 0

    def _update(self, grad_norm: float, rate: float) -> None:
        norm = torch.tensor(grad_norm, device=self.device)
        clip(self.parameters().values(), norm, self.plan.training, scale=self.scale.factor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        self.scale.note_good_step()

    def _make_tied_group(self) -> dist.ProcessGroup | None:
        """The ranks of the first and last stage with the same share of the tied embedding, or None."""
        layout = self.plan.layout
        together = layout.num_chunks - 1 in layout.chunks_of_stage(0)
        if not self.plan.model.tied_embeddings or together:
            return None
        stage_size = layout.world_size // layout.pp
        pairs = [
            [rank, layout.rank_of({**layout.coordinates(rank), "pp": layout.pp - 1})] for rank in range(stage_size)
        ]
        group, _ = dist.new_subgroups_by_enumeration(pairs)  # type: ignore[no-untyped-call] # torch has no types here
        return group if layout.coordinates(dist.get_rank())["pp"] in (0, layout.pp - 1) else None

    def _add_partial_gradients(self) -> None:
        """Add up gradients of norms under tensor parallelism; with FSDP2 they are whole already."""
        every: Any = self.parameters().values()
        for each in every:
            if isinstance(each.grad, DTensor) and each.grad.placements != each.placements:
                each.grad = each.grad.redistribute(placements=each.placements)

    def _add_tied_gradients(self) -> None:
        """Add the gradients of tied embeddings in two chunks, so that both copies get the same update."""
        if not self.plan.model.tied_embeddings or self.plan.layout.num_chunks == 1:
            return
        ends = ("embedding.tokens.weight", "head.weight")
        held = [p.grad for name, p in self.parameters().items() if name in ends and p.grad is not None]
        gradients = [local_tensor(gradient) for gradient in held]
        if self._tied_group is not None:
            for gradient in gradients:
                dist.all_reduce(gradient, group=self._tied_group)
        elif len(gradients) == 2:  # a pipeline in the shape of a V starts and ends on one stage
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`; a GPU copies it from page-locked memory while the host continues."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
