"""A run's own measurements, under the names of the planner's ledger."""

from __future__ import annotations

import contextlib
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from planner.cost.ledger import LineName
from planner.trainer.model import Block
from planner.trainer.parallelize import fsdp_modules, local_tensor
from planner.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    from planner.trainer.trainer import StepResult, Trainer
    from planner.trainer.waiting import WaitSampler

WARMUP_STEPS = 2
NO_PEAK = "part of the resident memory; the CPU allocator keeps no peak of its own"
ON_GPU = "overlaps with other work on the GPU and is not timed apart"
TOO_SHORT = "no step was run after the warm-up"
TOGETHER = {
    LineName.COMPUTE: (LineName.RECOMPUTE, LineName.HEAD, LineName.ACCUMULATION),
    LineName.BUBBLE: (LineName.PP_COMM,),
}
"""Ledger lines that are measured together, under the name of the first."""
MEMORY = (
    LineName.PARAMS,
    LineName.GRADS,
    LineName.OPTIMIZER_STATE,
    LineName.ACTIVATIONS,
    LineName.TRANSIENTS,
    LineName.RUNTIME,
)


class MemoryMeter:
    """Bytes of weights, gradients and activations on one rank, each at its peak during one step.

    Only the activations of layers are counted. The meter counts storages, so a view adds nothing, and a tensor that two
    operators keep is counted once. The meter works on every device, because it asks autograd and FSDP2 instead of the
    allocator. The meter costs time, so only a warm-up step runs under it.

    layers: the classes of layers.
    """

    def __init__(
        self, parts: Iterable[nn.Module], optimizer: torch.optim.Optimizer, layers: tuple[type, ...] = (Block,)
    ) -> None:
        self.peak = {LineName.PARAMS: 0, LineName.GRADS: 0, LineName.ACTIVATIONS: 0}
        self._parts, self._optimizer, self._layers = list(parts), optimizer, layers
        self._weights: dict[int, torch.UntypedStorage] = {}
        self._uses: dict[int, int] = {}
        self._activation_bytes = 0
        self._in_layer = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Measure the step inside the block."""
        modules = [module for part in self._parts for module in part.modules()]
        handles = [module.register_forward_pre_hook(self._before_forward) for module in modules]
        handles += [part.register_forward_hook(self._after_forward) for part in self._parts]
        handles += [
            module.register_forward_hook(self._leave_layer) for module in modules if isinstance(module, self._layers)
        ]
        handles.append(self._optimizer.register_step_pre_hook(self._before_update))
        try:
            with saved_tensors_hooks(self._pack, lambda kept: kept.tensor if isinstance(kept, _Kept) else kept):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """Record the storages of gathered parameters; FSDP2 makes them just before a module runs."""
        self._in_layer |= isinstance(module, self._layers)
        for parameter in module.parameters(recurse=False):
            storage = _storage(parameter)
            self._weights[_identity(storage)] = storage

    def _leave_layer(self, *_: Any) -> None:
        self._in_layer = False

    def _after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        """After all layers have run, count the weights that stay gathered, and the gradients of earlier microbatches.

        The first stage of a pipeline may run all its forward passes first, so both are counted again at each backward
        pass.
        """
        self._note(LineName.PARAMS, sum(storage.nbytes() for storage in self._weights.values()))
        self._before_update()
        made = next((each for each in tree_leaves(output) if getattr(each, "requires_grad", False)), None)
        if made is not None:
            made.register_hook(self._before_update)

    def _before_update(self, *_: Any) -> None:
        """Count the gradients that exist before the update, whole or sharded."""
        sharded = [p.grad for part in self._parts for p in part.parameters() if p.grad is not None]
        once = {id(gradient): gradient for gradient in (*sharded, *_whole_gradients(self._parts))}
        storages = {_identity(s): s.nbytes() for s in map(_storage, once.values())}
        self._note(LineName.GRADS, sum(storages.values()))

    def _pack(self, tensor: Tensor) -> _Kept | Tensor:
        """Count only tensors that layers keep; the ledger's activations exclude embedding, head and loss."""
        return _Kept(self, tensor) if self._in_layer else tensor

    def add(self, storage: torch.UntypedStorage, uses: int) -> None:
        """Record that autograd keeps (1) or drops (-1) a tensor in `storage`; weights are not counted."""
        key = _identity(storage)
        if key in self._weights:
            return
        before = self._uses.pop(key, 0)
        after = before + uses
        if after:
            self._uses[key] = after
        self._activation_bytes += storage.nbytes() * (bool(after) - bool(before))
        self._note(LineName.ACTIVATIONS, self._activation_bytes)

    def _note(self, name: LineName, num_bytes: int) -> None:
        self.peak[name] = max(self.peak[name], num_bytes)


class _Kept:
    """Stands for a tensor that autograd keeps; when autograd drops it, this object is deleted and reports it."""

    __slots__ = ("meter", "storage", "tensor")

    def __init__(self, meter: MemoryMeter, tensor: Tensor) -> None:
        self.meter, self.tensor = meter, tensor.detach()  # an operator's own output would keep the operator alive
        self.storage = _storage(tensor)  # asked once: a collective's result changes its storage when it arrives
        meter.add(self.storage, 1)

    def __del__(self) -> None:
        self.meter.add(self.storage, -1)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_tensor(tensor.detach()).untyped_storage()


def _identity(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)  # noqa: SLF001 # torch offers no other identity of a storage


def _whole_gradients(parts: list[nn.Module]) -> Iterator[Tensor]:
    """Gradients that FSDP2 accumulates before it shards them; no public attribute gives access to them."""
    for module in fsdp_modules(parts):
        for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                for gradient in (parameter.unsharded_accumulated_grad, whole.grad if whole is not None else None):
                    if gradient is not None:
                        yield gradient


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak of this rank's memory: allocated on a GPU, resident on a CPU; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")  # proc(5); getrusage would count the process that started this one too
    lines = status.read_text().splitlines() if status.exists() else []
    peak = next((line for line in lines if line.startswith("VmHWM:")), None)
    return None if peak is None else int(parse_quantity(peak.split(":")[1].strip().replace("kB", "KiB"), "bytes"))


def _memory_of_rank(trainer: Trainer, meter: MemoryMeter) -> dict[LineName, int | None]:
    moments = [state[name] for state in trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    shards = trainer.parameters().values() if fsdp_modules(trainer.chunks) else ()  # else the weights themselves
    states = {_identity(s): s.nbytes() for s in map(_storage, [*shards, *moments])}
    lines: dict[LineName, int | None] = {**meter.peak, LineName.OPTIMIZER_STATE: sum(states.values())}
    if trainer.device.type != "cuda":
        return lines | {LineName.TRANSIENTS: None, LineName.RUNTIME: None}
    known = sum(value for value in lines.values() if value is not None)
    free, total = torch.cuda.mem_get_info(trainer.device)
    rest = max(0, torch.cuda.max_memory_allocated(trainer.device) - known)
    return lines | {
        LineName.TRANSIENTS: rest,
        LineName.RUNTIME: total - free - torch.cuda.memory_allocated(trainer.device),
    }


def measurements(
    trainer: Trainer, meter: MemoryMeter, results: list[StepResult], waits: WaitSampler | None = None
) -> dict[str, Any]:
    """The document DIR/measurements.json; every rank calls this function, and all get the same document.

    A memory line has one number for each pipeline stage, the largest over the stage's ranks. A line without a
    measurement is null and gives the reason. The line of transients is the allocator's peak less the other lines.

    Time lines add up to the step. Each time line is a mean over the ranks of the stage that waits least, because the
    ledger describes the slowest stage. `includes` names further lines that a line's measurement contains.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    waited = dict(waits.seconds) if waits is not None else {}
    mine = (
        trainer.mesh.get_local_rank("pp"),
        _memory_of_rank(trainer, meter),
        peak_memory_bytes(trainer.device),
        {name: seconds / waits.num_steps for name, seconds in waited.items()} if waits and waits.num_steps else None,
    )
    dist.all_gather_object(everyone, mine)
    stages = [[each for each in everyone if each[0] == stage] for stage in range(trainer.plan.layout.pp)]
    steady = results[WARMUP_STEPS:] or results
    step_seconds = statistics.median(result.seconds for result in steady) if steady else None
    training = trainer.plan.training
    tokens = training.global_batch_size * training.sequence_length / trainer.plan.layout.world_size
    return {
        "format": 1,
        "device_kind": trainer.device.type,
        "num_steps": len(results),
        "step_seconds": step_seconds,
        "tokens_per_second_per_device": tokens / step_seconds if step_seconds else None,
        "peak_memory_bytes": [_largest(peak for _, _, peak, _ in stage) for stage in stages],
        "memory": {name: _memory_line(name, stages) for name in MEMORY},
        "time": _times(trainer, steady, step_seconds, [[waited for *_, waited in stage] for stage in stages]),
    }


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _memory_line(name: LineName, stages: list[list[Any]]) -> dict[str, Any]:
    per_stage = [_largest(lines[name] for _, lines, _, _ in stage) for stage in stages]
    measured = None not in per_stage
    return {"num_bytes": per_stage if measured else None, "reason": "" if measured else NO_PEAK}


def _times(
    trainer: Trainer,
    steady: list[StepResult],
    step_seconds: float | None,
    waited: list[list[dict[LineName, float] | None]],
) -> dict[LineName, Any]:
    """The time lines; `waited` has, for each rank of each stage, seconds per step by line."""
    names = [name for name in LineName if name not in MEMORY]
    measured: dict[LineName, float] = {}
    reason = ON_GPU if trainer.device.type == "cuda" else TOO_SHORT
    if steady:
        measured[LineName.OPTIMIZER] = statistics.median(result.optimizer_seconds for result in steady)
    ranks = [[rank for rank in stage if rank is not None] for stage in waited]
    if step_seconds is not None and all(ranks):
        slowest = min(ranks, key=lambda stage: sum(sum(rank.values()) for rank in stage) / len(stage))
        alone = {other for together in TOGETHER.values() for other in together}
        measured |= {
            name: statistics.fmean(rank.get(name, 0.0) for rank in slowest)
            for name in names
            if name not in alone | {LineName.COMPUTE, LineName.OPTIMIZER}
        }
        measured[LineName.COMPUTE] = max(0.0, step_seconds - sum(measured.values()))
    return {name: _time_line(name, measured, reason) for name in names}


def _time_line(name: LineName, measured: dict[LineName, float], reason: str) -> dict[str, Any]:
    if name in measured:
        return {"seconds": measured[name], "includes": list(TOGETHER.get(name, ())), "reason": ""}
    within = next((first for first, others in TOGETHER.items() if name in others and first in measured), None)
    return {"seconds": None, "includes": [], "reason": f"measured together with {within}" if within else reason}
