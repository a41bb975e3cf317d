"""One rank of a training job: its model share, its optimizer, and one step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from planner.errors import InputError, Mistake
from planner.trainer.mesh import make_mesh
from planner.trainer.optimizer import clip, learning_rate, make_optimizer, squared_norm
from planner.trainer.parallelize import build_chunks, local_tensor
from planner.trainer.pipeline import make_executor

if TYPE_CHECKING:
    from torch import nn

    from planner.plan import Plan
    from planner.trainer.data import Corpus

__all__ = ["StepResult", "Trainer", "check_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did; equal on every rank but for the seconds.

    finite: false when loss or gradient norm is not a number, and the weights were left as they were.
    stop, save: some rank asked to stop, or to save.
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
    """This rank's part of the job; every rank makes one and calls `step` in turn.

    `step_number` counts finished optimizer steps.
    """

    def __init__(self, plan: Plan, corpus: Corpus, device: torch.device, *, num_steps: int) -> None:
        check_plan(plan)
        self.plan, self.corpus, self.device, self.num_steps = plan, corpus, device, num_steps
        self.mesh = make_mesh(plan.layout, device.type)
        self.chunks = build_chunks(plan, self.mesh, device)
        self.optimizer = make_optimizer(self.parameters().values(), plan.training)
        self.executor = make_executor(self.chunks, plan, self.mesh, device)
        self.step_number = 0
        self._tied_group = self._make_tied_group()

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their name in the whole model."""
        return {name: parameter for chunk in self.chunks for name, parameter in chunk.named_parameters()}

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters without the second copy that tied embeddings have under a pipeline."""
        copied = self.plan.model.tied_embeddings and self.plan.layout.num_chunks > 1
        return {name: p for name, p in self.parameters().items() if not (copied and name == "head.weight")}

    def step(self, *, stop: bool = False, save: bool = False) -> StepResult:
        """Run one optimizer step; the weights stay as they are if loss or gradients are not finite.

        stop, save: what this rank asks all ranks to do after the step.
        """
        started = time.perf_counter()
        layout, training = self.plan.layout, self.plan.training
        rows = training.global_batch_size // layout.dp
        row = self.mesh.get_local_rank("dp_replicate") * self.mesh["dp_shard"].size()
        row += self.mesh.get_local_rank("dp_shard")
        batch = self.corpus.batch(self.step_number * training.global_batch_size + row * rows, rows)
        loss = self.executor.forward_backward(*(tensor.to(self.device) for tensor in batch))
        self._add_tied_gradients()
        total, squares, stop, save = self._agree(loss, stop=stop, save=save)
        grad_norm = math.sqrt(squares)
        rate = learning_rate(self.step_number + 1, self.num_steps, training)
        before_optimizer = time.perf_counter()
        finite = math.isfinite(total) and math.isfinite(grad_norm)
        if finite:
            self._update(grad_norm, rate)
        self._synchronize()
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
        clip(self.parameters().values(), torch.tensor(grad_norm, device=self.device), self.plan.training)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _make_tied_group(self) -> dist.ProcessGroup | None:
        """Ranks of the first and the last stage that hold the same share of the tied embedding, or None."""
        layout = self.plan.layout
        if not self.plan.model.tied_embeddings or layout.pp == 1:
            return None
        stage_size = layout.world_size // layout.pp
        pairs = [
            [rank, layout.rank_of({**layout.coordinates(rank), "pp": layout.pp - 1})] for rank in range(stage_size)
        ]
        group, _ = dist.new_subgroups_by_enumeration(pairs)  # type: ignore[no-untyped-call] # torch has no types here
        return group if layout.coordinates(dist.get_rank())["pp"] in (0, layout.pp - 1) else None

    def _add_tied_gradients(self) -> None:
        """Tied embeddings on two stages: add their gradients, so that both copies make the same update."""
        if self._tied_group is None:
            return
        for name, parameter in self.parameters().items():
            if name in ("embedding.tokens.weight", "head.weight") and parameter.grad is not None:
                dist.all_reduce(local_tensor(parameter.grad), group=self._tied_group)


def check_plan(plan: Plan) -> None:
    """Refuse what this trainer cannot run, before any process group exists.

    Raises:
        InputError: with every obstacle at once.
    """
    mistakes = [Mistake(message=message, hint=hint) for bad, message, hint in _obstacles(plan) if bad]
    if mistakes:
        raise InputError(*mistakes)


def _obstacles(plan: Plan) -> list[tuple[bool, str, str]]:
    layout, model, training = plan.layout, plan.model, plan.training
    microbatches = layout.num_microbatches(training.global_batch_size)
    rounds = max(1, microbatches // layout.pp)
    again = "make a plan for `--engine torch`"
    vocab = model.vocab_size if layout.tp > 1 else 0
    strange = set(model.features) - set(plan.engine.model_features)
    sizes = (model.num_heads, model.num_kv_heads, model.ffn_hidden_size, vocab, training.sequence_length)
    return [
        (bool(strange), f"the trainer has no {', '.join(sorted(strange))}", "choose another model or engine"),
        (not (model.final_norm and model.output_head), "the model needs a final norm and an output head", ""),
        (layout.cp * layout.ep * layout.etp > 1, "the torch engine has no context or expert parallelism", again),
        (layout.tp > 1 and layout.sp == 0, "tensor parallelism comes with sequence parallelism", "set sp=1"),
        (any(size % layout.tp for size in sizes), f"tp={layout.tp} does not divide {sizes}", again),
        (layout.schedule not in ("1f1b", "interleaved", "gpipe"), f"no schedule {layout.schedule}", again),
        (layout.schedule == "1f1b" and layout.interleave > 1, "1f1b has one chunk per stage", "use interleaved"),
        (layout.interleave > 1 and layout.pp == 1, "interleave needs a pipeline", "set interleave=1"),
        ("selective" in layout.recompute, "recompute is none or full", again),
        (0 in layout.layers_per_stage, "every chunk needs a layer", again),
        (sum(layout.layers_per_stage) != model.num_layers, "layers_per_stage does not sum to the layers", again),
        (layout.pp > 1 and layout.zero > 1, "a pipeline keeps gradients whole: zero is 0 or 1", again),
        (layout.zero > 0 and layout.dp % layout.hsdp > 0, "hsdp must divide dp", again),
        (
            training.global_batch_size % (layout.dp * layout.mbs) > 0,
            f"dp * mbs = {layout.dp * layout.mbs} does not divide the batch {training.global_batch_size}",
            again,
        ),
        (
            layout.pp > 1 and microbatches < layout.pp and layout.schedule != "gpipe",
            f"{microbatches} microbatches cannot fill {layout.pp} stages",
            again,
        ),
        (
            layout.schedule == "interleaved" and microbatches % rounds > 0,
            f"{microbatches} microbatches are not a multiple of {rounds} rounds",
            again,
        ),
        (training.precision == "fp16", "fp16 needs loss scaling, which this trainer lacks", "use bf16 or fp32"),
        (training.dropout > 0, "this trainer has no dropout", "set training.dropout to 0"),
        (
            training.sequence_length > model.max_sequence_length and model.position == "learned",
            f"sequence_length is above the {model.max_sequence_length} learned positions",
            "shorten --seq-len",
        ),
    ]
