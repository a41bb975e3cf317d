"""The ledger's memory beside what the trainer's own step holds, counted on fake tensors.

A fake tensor has a shape and no data, and a fake process group sends nothing: one rank of any layout runs its real
program, at real sizes, in seconds and without devices. What is counted are the storages that are alive, at their
peak. Not in it: what a GPU's allocator, its libraries' workspaces and NCCL take beyond that, and what one kernel needs
for itself while it runs.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined] # torch lists no names there
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.cost.ledger import LineName
from planner.layout import parse_layout
from planner.search.search import plan_for_layout
from planner.specs.load import load_job
from planner.trainer import parallelize
from planner.trainer.measure import MemoryMeter
from planner.trainer.model import Transformer
from planner.trainer.norms import RmsNorm
from planner.trainer.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.plan import Plan

GIB = 2**30
CASES: Final = (
    # model, layers (None: all), sequence, layout, rank
    ("llama3-8b", None, 4096, "dp=1,mbs=1,recompute=full", 0),
    ("llama3-8b", 4, 4096, "dp=1,mbs=1", 0),
    ("llama3-8b", 4, 4096, "dp=1,mbs=2", 0),
    ("llama3-8b", 4, 4096, "dp=1,mbs=2,recompute=full", 0),
    ("llama3.2-1b", 8, 4096, "dp=1,mbs=1", 0),
    ("llama3.2-1b", 8, 4096, "dp=1,mbs=4,recompute=full", 0),
    ("mpt-3b", 8, 2048, "dp=1,mbs=2", 0),
    ("mpt-3b", 8, 2048, "dp=1,mbs=4,recompute=full", 0),
    ("llama3-8b", 4, 4096, "dp=8,zero=1,mbs=2", 0),
    ("llama3-8b", 4, 4096, "dp=8,zero=3,mbs=2", 0),
    ("llama3-8b", 4, 4096, "tp=8,mbs=2", 0),
    ("llama3-8b", 4, 4096, "tp=2,dp=4,zero=3,mbs=2", 0),
    ("llama3-8b", 8, 4096, "pp=4,mbs=2", 0),
    ("llama3-8b", 8, 4096, "pp=4,mbs=2", 1),
    ("llama3-8b", 8, 4096, "pp=4,mbs=2", 3),
    ("llama3-8b", 8, 4096, "pp=2,interleave=2,mbs=2", 0),
)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Bytes of the storages of one fake mode that are alive, and their peak.

    FSDP2 gives storages back by resizing them, which no operator tells. DTensor asks operators about whole tensors
    that it never makes: `pause` keeps those out.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.mode, self.num_bytes, self.peak, self.paused = mode, 0, 0, False
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count what it made; of a DTensor its parts are counted."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is FakeTensor and tensor.fake_mode is self.mode and tensor.device.type != "meta":
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage in self._sizes:
            return
        size = [0]
        self._sizes[storage] = size
        if not self.paused:
            weakref.finalize(storage, self._resize, size, 0)
            self._resize(size, storage.nbytes())

    def _resize(self, size: list[int], num_bytes: int) -> None:
        self.num_bytes += num_bytes - size[0]
        size[0] = num_bytes
        self.peak = max(self.peak, self.num_bytes)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count inside the block."""
        resize = torch.UntypedStorage.resize_
        ask = ShardingPropagator._propagate_tensor_meta_non_cached  # noqa: SLF001 # there is no other

        def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            if storage in self._sizes:
                self._resize(self._sizes[storage], num_bytes)
            return result

        def asked(*arguments: Any, **options: Any) -> Any:
            self.paused = True
            try:
                return ask(*arguments, **options)
            finally:
                self.paused = False

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", asked),
            self,
        ):
            yield


class FusedNorm(torch.autograd.Function):
    """RMSNorm with the tensors that the GPU's one kernel reads and writes; the CPU has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Keeps its inputs and one number for each token."""
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As large as what they are gradients of."""
        x, weight, _scale = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class FakeCorpus:
    """Batches without data."""

    document_end = None

    def __init__(self, length: int) -> None:
        self.length = length

    def batch(self, _: int, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets."""
        return (torch.empty(num_samples, self.length, dtype=torch.int64), torch.empty(num_samples, self.length).long())


@contextlib.contextmanager
def fake_world(num_ranks: int, rank: int, mode: FakeTensorMode) -> Iterator[None]:
    """One rank of a world that is not there; storage for weights is fake, and no value is ever looked at."""

    def to_empty(part: Transformer, *, device: torch.device) -> Any:
        with mode:
            return torch.nn.Module.to_empty(part, device=device)

    def warm_up(_: Any, stages: Any, *__: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC  # noqa: SLF001 # what the ranks would agree on

    def agree(*_: Any, **__: Any) -> tuple[float, float, bool, bool]:
        return 0.0, 1.0, False, False

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with (
            mock.patch.object(Transformer, "to_empty", to_empty),
            mock.patch.object(parallelize, "initialize"),
            mock.patch.object(Trainer, "_agree", agree),
            mock.patch.object(_PipelineSchedule, "_warmup_p2p", warm_up),
            mock.patch.object(RmsNorm, "forward", lambda norm, x: FusedNorm.apply(x, norm.weight)),  # type: ignore[no-untyped-call]
        ):
            yield
    finally:
        dist.destroy_process_group()


def counted(plan: Plan, rank: int = 0, *, lines: bool = False) -> tuple[int, dict[LineName, int]]:
    """Peak bytes of one rank in a step of the plan; with `lines` also those of lines, each at its own peak."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counter = Counter(mode)
    with fake_world(plan.layout.world_size, rank, mode), counter.watch():
        trainer = Trainer(plan, FakeCorpus(plan.training.sequence_length), torch.device("cpu"), num_steps=2)  # type: ignore[arg-type]
        states = counter.num_bytes
        with mode:
            trainer.step()
            peak = counter.peak
            if not lines:
                return peak, {}
            meter = MemoryMeter(trainer.chunks, trainer.optimizer)
            with meter.watch():
                trainer.step()
    return peak, {**meter.peak, LineName.OPTIMIZER_STATE: states}


def planned(plan: Plan, rank: int) -> dict[LineName, float]:
    """The ledger of this rank's stage, without what the runtime keeps for itself."""
    lines = plan.memory[plan.layout.coordinates(rank)["pp"]].lines
    return {LineName(line.name): float(line.num_bytes) for line in lines if line.name != LineName.RUNTIME}


def make_plan(model: str, layout: str, *, sequence: int, layers: int | None = None) -> Plan:
    """The plan of a layout on DGX H100, of a model that may be cut to some of its layers.

    It has twice as many microbatches as stages, at least four: so the first stage is full while it has gradients.
    """
    sizes = dict(part.split("=") for part in layout.split(","))
    microbatches = max(4, 2 * int(sizes.get("pp", "1")))
    batch = microbatches * int(sizes.get("dp", "1")) * int(sizes["mbs"])
    job = load_job(model=model, cluster="dgx-h100", gpus=8, sequence_length=sequence, global_batch_size=batch)
    if layers is not None:
        job = replace(job, model=job.model.model_copy(update={"num_layers": layers}))
    return plan_for_layout(job, parse_layout(layout, num_layers=job.model.num_layers, num_devices=1))


def main() -> None:
    """Print the table, a line at a time."""
    console = Console(width=200)
    console.print("GiB planned / counted; lines each at its own peak, transients what the whole peak leaves to them")
    for model, layers, sequence, layout, rank in CASES:
        plan = make_plan(model, layout, sequence=sequence, layers=layers)
        forecast, (peak, lines) = planned(plan, rank), counted(plan, rank, lines=True)
        whole = sum(forecast.values())
        lines[LineName.TRANSIENTS] = peak - sum(lines.values())
        cells = [f"{forecast[name] / GIB:.2f} / {lines[name] / GIB:.2f}" for name in forecast]
        name = f"{model}, {plan.model.num_layers} layers, {sequence} | {layout} | {rank}"
        total = f"{whole / GIB:.2f} / {peak / GIB:.2f} | {peak / whole:.3f}"
        console.print(f"| {name} | {' | '.join(cells)} | {total} |", highlight=False)


if __name__ == "__main__":
    main()
