"""One rank's step of a plan on fake tensors, and the bytes that it holds: `python -m planner.trainer.rehearse PLAN`.

A fake tensor has a shape but no data, and a fake process group sends nothing. Without devices, one rank of any layout
can therefore run its real program at real sizes in seconds. The result is the peak of the bytes in live storages. The
result excludes memory that a GPU's allocator holds beyond these bytes, library workspaces, NCCL, and the memory that a
kernel uses while it runs. Layers are not compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined] # torch lists no names there
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.cost.ledger import LineName
from planner.errors import ExitCode, PlannerError
from planner.plan_file import plan_from_file
from planner.trainer import parallelize
from planner.trainer.expert_parallel import _AllToAll, _Exchange
from planner.trainer.feed_forward import Experts
from planner.trainer.measure import MemoryMeter
from planner.trainer.model import Transformer
from planner.trainer.norms import RmsNorm
from planner.trainer.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from planner.plan import Plan


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Bytes of the live storages of one fake mode, and their peak.

    FSDP2 frees storages by resizing them, and no operator shows that. DTensor calls operators on whole tensors that it
    never allocates; `pause` excludes these calls.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.mode, self.num_bytes, self.peak, self.paused = mode, 0, 0, False
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count its results; for a DTensor, count its local parts."""
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


class Unread(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """A mode in which every value that a program reads is 0, so that no gradient overflows and no norm is infinite."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, unless it reads a value."""
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 # there is no other name
            return 0.0 if args[0].dtype.is_floating_point else 0
        return func(*args, **(kwargs or {}))


class FusedNorm(torch.autograd.Function):
    """RMSNorm with the tensors that the GPU's single kernel reads and writes; CPUs have no such kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Store the inputs and one number for each token."""
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients with the sizes of the inputs."""
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


def warm_up(_: Any, stages: Any, *__: Any) -> None:
    """`_PipelineSchedule._warmup_p2p` without messages between ranks."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC  # noqa: SLF001 # what the ranks would agree on


@contextlib.contextmanager
def fake_ranks(num_ranks: int, rank: int, *stand_ins: AbstractContextManager[Any]) -> Iterator[None]:
    """One rank of an imaginary world, with stand-ins for what it lacks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with contextlib.ExitStack() as stack:
            for each in stand_ins:
                stack.enter_context(each)
            yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers meshes by their shape, with the groups of this world
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call] # torch's


def fake_world(num_ranks: int, rank: int, mode: FakeTensorMode) -> AbstractContextManager[None]:
    """One rank of our trainer; storage of weights is fake, and no value is ever read."""

    def to_empty(part: Transformer, *, device: torch.device) -> Any:
        with mode:
            return torch.nn.Module.to_empty(part, device=device)

    def agree(*_: Any, **__: Any) -> tuple[float, float, bool, bool]:
        return 0.0, 1.0, False, False

    return fake_ranks(
        num_ranks,
        rank,
        mock.patch.object(Transformer, "to_empty", to_empty),
        mock.patch.object(parallelize, "initialize"),
        mock.patch.object(Trainer, "_agree", agree),
        mock.patch.object(_PipelineSchedule, "_warmup_p2p", warm_up),
        mock.patch.object(_Exchange, "to_experts", _balanced),
        mock.patch.object(Experts, "_map", _grouped),
        mock.patch.object(RmsNorm, "forward", lambda norm, x: FusedNorm.apply(x, norm.weight)),  # type: ignore[no-untyped-call]
    )


def _balanced(exchange: _Exchange, _: Experts, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`_Exchange.to_experts` with the same number of rows between all ranks, because there are no counts to read."""
    x_TE, counts_X = inputs
    ranks = dist.get_world_size(exchange.group)
    exchange.sent = exchange.received = [len(x_TE) // ranks] * ranks
    exchange.order = torch.empty(len(x_TE), dtype=torch.int64)
    rows = _AllToAll.apply(x_TE, exchange.sent, exchange.received, exchange.group)  # type: ignore[no-untyped-call] # torch's
    return rows[exchange.order], counts_X.view(ranks, -1).sum(0)


def _grouped(experts: Experts, x_TE: torch.Tensor, weight: Any, bias: Any, counts_X: torch.Tensor) -> torch.Tensor:
    """`Experts._map` as on a GPU: one grouped product, whatever the counts are."""
    y: torch.Tensor = F.grouped_mm(x_TE, experts.read(weight), offs=counts_X.cumsum(0).to(torch.int32))
    return y if bias is None else y + experts.read(bias).repeat_interleave(counts_X, dim=0, output_size=len(x_TE))


def counted(plan: Plan, rank: int = 0, *, lines: bool = False) -> tuple[int, dict[LineName, int]]:
    """Peak bytes of one rank in a step of the plan; with `lines`, also the peak of each ledger line."""
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


def main_of(
    name: str, count: Callable[[Path, int], tuple[int, dict[LineName, int]]], arguments: Sequence[str] | None = None
) -> ExitCode:
    """The program `python -m NAME PATH --rank N`: print the peak of a rank's memory and its ledger lines as JSON."""
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        peak, lines = count(options.path.resolve(), options.rank)
    except PlannerError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return error.exit_code
    sys.stdout.write(json.dumps({"peak_bytes": peak, "lines": lines}) + "\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main_of("planner.trainer.rehearse", lambda path, rank: counted(plan_from_file(path), rank, lines=True)))
