"""Timings of this machine's devices and links: `torchrun ... -m planner.trainer.probe REQUEST --output FILE`.

All ranks time their devices at the same moment, as in training: they begin each repetition together, and the time is
the slowest rank's. The result is the shortest of several repetitions, because other programs on the machine can only
lengthen one. REQUEST names the shapes (`planner.measure`). The parts for GPUs (16 and 8 bits, grouped products, copies
from page-locked memory, NCCL) have never run on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from planner.specs.model import ModelSpec
from planner.trainer.model import Transformer
from planner.trainer.norms import make_norm
from planner.trainer.tensor_parallel import apply_tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

REPEATS: Final = 15
SHORTEST: Final = 0.005  # seconds of one repetition, in which shorter work is done several times
TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
Row = dict[str, Any]
T = TypeVar("T")


class Probe:
    """One rank's stopwatch; every rank calls the same methods in the same order, and all stop at `deadline`."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.deadline = device, time.monotonic() + seconds
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def late(self) -> bool:
        """Whether the deadline has passed, by the clock of rank 0."""
        return self._most([float(self.rank == 0 and time.monotonic() > self.deadline)])[0] > 0

    def in_time(self, each: Iterable[T]) -> Iterator[T]:
        """Those that are begun before the deadline."""
        return itertools.takewhile(lambda _: not self.late(), each)

    def seconds(self, run: Callable[[], object], *, alone: bool = False) -> float:
        """The least time of a call on the slowest rank, in seconds, after some calls to warm up.

        alone: only the calls of rank 0 are timed, while the other ranks wait.
        """
        run()
        calls = self.rank == 0 or not alone
        times = max(1, round(SHORTEST / max(1e-6, self._most([self._clock(run, 1) if calls else 0.0])[0])))
        found = []
        for _ in range(REPEATS):
            dist.barrier()
            found.append(self._clock(run, times) if calls else 0.0)
        return min(self._most(found))

    def _clock(self, run: Callable[[], object], times: int) -> float:
        self._synchronize()
        started = time.perf_counter()
        for _ in range(times):
            run()
        self._synchronize()
        return (time.perf_counter() - started) / times

    def _most(self, numbers: Sequence[float]) -> list[float]:
        """The largest of the ranks' numbers at each position."""
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def products(self, shapes: Sequence[Sequence[int]], precision: str) -> list[Row]:
        """Dense products (m x k) (k x n)."""
        rows: list[Row] = []
        for m, n, k in self.in_time(shapes):
            run = self._product(m, n, k, precision)
            rows.append({"precision": precision, "m": m, "n": n, "k": k, "seconds": self.seconds(run)})
        return rows

    def alone(self, shape: Sequence[int], precision: str) -> Row:
        """Seconds of a product on all ranks at once, and on one rank while the others wait."""
        m, n, k = shape
        run = self._product(m, n, k, precision)
        return {"together_seconds": self.seconds(run), "seconds": self.seconds(run, alone=True)}

    def _product(self, m: int, n: int, k: int, precision: str) -> Callable[[], object]:
        if precision != "fp8":
            left, right = self._new(m, k, precision=precision), self._new(n, k, precision=precision)
            return lambda: F.linear(left, right)
        scale = torch.ones((), device=self.device)
        narrow = self._new(m, k).to(torch.float8_e4m3fn), self._new(n, k).to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(*narrow, scale, scale, out_dtype=torch.bfloat16)  # noqa: SLF001 # as torchao calls it

    def grouped(self, shapes: Sequence[Sequence[int]]) -> list[Row]:
        """One kernel that computes a product for each of `groups` experts, with m tokens each."""
        rows: list[Row] = []
        for groups, m, n, k in self.in_time(shapes):
            left, right = self._new(groups * m, k, precision="bf16"), self._new(groups, k, n, precision="bf16")
            ends = torch.arange(m, (groups + 1) * m, m, dtype=torch.int32, device=self.device)
            seconds = self.seconds(lambda a=left, b=right, e=ends: F.grouped_mm(a, b, offs=e))  # type: ignore[misc]
            rows.append({"precision": "bf16", "groups": groups, "m": m, "n": n, "k": k, "seconds": seconds})
        return rows

    def attention(self, lengths: Sequence[int], batch: int, heads: int, size: int, precision: str) -> list[Row]:
        """Causal attention of `batch` sequences, forward and backward.

        FLOPs count the causal half of the forward pass.
        """
        rows: list[Row] = []
        for length in self.in_time(lengths):
            q, k, v = (self._new(batch, heads, length, size, precision=precision).requires_grad_() for _ in range(3))

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            grad = torch.ones_like(q)
            both = self.seconds(lambda f=forward, g=grad: f().backward(g))  # type: ignore[misc]
            once = self.seconds(forward)
            flops = 2.0 * batch * heads * length * length * size
            rows.append({"length": length, "flops": flops, "forward_seconds": once, "backward_seconds": both - once})
        return rows

    def streaming(self, model: ModelSpec, tokens: int, precision: str) -> list[Row]:
        """Time the memory-bound operators of a layer in both passes, and also a plain copy and AdamW.

        num_bytes: bytes as `planner.cost.layers` counts them, by accesses to elements of an array of `tokens` x width.
        """
        hidden, width = model.hidden_size, model.ffn_hidden_size
        x, y = (self._new(tokens, hidden, precision=precision).requires_grad_() for _ in range(2))
        gate, up = (self._new(tokens, width, precision=precision).requires_grad_() for _ in range(2))
        norm = make_norm(model).to(self.device, x.dtype)
        source, target = self._new(2**24), self._new(2**24)
        held = torch.nn.Parameter(self._new(2**20))
        held.grad = torch.ones_like(held)
        optimizer = torch.optim.AdamW([held], fused=True)
        gated = model.activation == "swiglu"

        def activation() -> Tensor:
            return F.silu(gate) * up if gated else F.gelu(gate, approximate="tanh")

        operators: list[tuple[str, int, float, Callable[[], object]]] = [
            ("copy", 0, 2.0 * source.nbytes, lambda: target.copy_(source)),
            ("adamw", 0, 7.0 * held.nbytes, optimizer.step),
            ("norm", model.norms_per_layer, 7.0 * x.nbytes, _both_passes(lambda: norm(x), x)),
            ("residual", 2, 4.0 * x.nbytes, _both_passes(lambda: x + y, x)),
            (model.activation, 1, (13.0 if gated else 6.0) * gate.nbytes, _both_passes(activation, gate)),
        ]
        return [
            {"operator": name, "times": times, "num_bytes": num_bytes, "seconds": self.seconds(run)}
            for name, times, num_bytes, run in operators
        ]

    def launch(self) -> float:
        """Seconds of an operator with autograd on only 8 numbers, so that nearly all the time is the host's."""
        x = self._new(8).requires_grad_()
        return self.seconds(lambda: [x + 1.0 for _ in range(100)]) / 100

    def layer(self, model: ModelSpec, width: int, sequences: int, tokens: int, *, cut: bool = False) -> Row:
        """Seconds of a layer's forward pass, and of both passes, in eager mode.

        tokens: the tokens of one sequence.
        cut: whether tensor parallelism divides the layer over all ranks.
        """
        heads = max(self.ranks, width // 32)
        sizes = {"num_layers": 1, "hidden_size": width, "num_heads": heads, "ffn_hidden_size": 4 * width}
        rest = {"vocab_size": 256, "max_sequence_length": max(128, tokens)}
        plain = ModelSpec.model_validate({"name": "probe", "architecture": model.architecture, **sizes, **rest})
        part = Transformer(plain, layers=range(1), first=True, last=False, flash=True).to(self.device)
        if cut:
            apply_tensor_parallel(part, init_device_mesh(self.device.type, (self.ranks,)))
        ids = torch.zeros(sequences, tokens, dtype=torch.int64, device=self.device)
        both = self.seconds(lambda: part(ids).sum().backward())
        return {"forward_seconds": self.seconds(lambda: part(ids)), "seconds": both}

    def cut_layers(self, model: ModelSpec, width: int, tokens: int, sequences: Sequence[int]) -> list[Row]:
        """A layer whole on every rank, and divided over all ranks by tensor parallelism."""
        rows: list[Row] = []
        for each in sequences:
            whole, cut = (self.layer(model, width, each, tokens, cut=divided)["seconds"] for divided in (False, True))
            num_bytes = 4 * each * tokens * width
            rows.append({"ranks": self.ranks, "num_bytes": num_bytes, "seconds": cut, "whole_seconds": whole})
        return rows

    def collectives(self, sizes: Sequence[int], per_host: int) -> list[Row]:
        """Every collective by size, in groups of neighbours that work at the same time: within a host, and over all."""
        rows: list[Row] = []
        doubling = [2**power for power in range(1, 12) if 2**power < self.ranks and self.ranks % 2**power == 0]
        for members in sorted({*doubling, *([per_host] if self.ranks % per_host == 0 else []), self.ranks} - {1}):
            group, _ = dist.new_subgroups(group_size=members)  # type: ignore[no-untyped-call] # torch has no types here
            for operation, num_bytes in self.in_time(itertools.product(OPERATIONS, sizes)):
                seconds = self.seconds(self._collective(operation, num_bytes, group, members))
                where = {"ranks": members, "hosts": max(1, members // per_host)}
                rows.append({"operation": operation, **where, "num_bytes": num_bytes, "seconds": seconds})
        return rows

    def _collective(self, operation: str, num_bytes: int, group: Any, members: int) -> Callable[[], object]:
        """A function that runs one collective, for `seconds` to time.

        num_bytes: size of the input of a reduce-scatter on each rank, or of the output of an all-gather.
        """
        part = -(-num_bytes // (4 * members))
        whole, own = self._new(part * members), self._new(part)
        if operation == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        if operation == "all_gather":
            return lambda: dist.all_gather_single(whole, own, group=group)
        if operation == "reduce_scatter":
            return lambda: dist.reduce_scatter_single(own, whole, group=group)
        if operation == "all_to_all":
            return lambda: dist.all_to_all_single(whole, whole.clone(), group=group)
        here = dist.get_rank(group)
        after, before = ((here + step) % members for step in (1, -1))
        received = torch.empty_like(whole)

        def send() -> None:
            both = [
                dist.P2POp(dist.isend, whole, group=group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=group, group_peer=before),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return send

    def host_to_device(self, sizes: Sequence[int]) -> list[Row]:
        """Time copies from page-locked memory to the device."""
        rows: list[Row] = []
        for num_bytes in sizes:
            held = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
            there = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            seconds = self.seconds(lambda a=held, b=there: b.copy_(a, non_blocking=True))  # type: ignore[misc]
            rows.append({"num_bytes": num_bytes, "seconds": seconds})
        return rows

    def _new(self, *shape: int, precision: str = "fp32") -> Tensor:
        return torch.randn(shape, device=self.device).to(TYPES[precision])


def _both_passes(forward: Callable[[], Tensor], like: Tensor) -> Callable[[], object]:
    grad = torch.ones_like(like)
    return lambda: torch.autograd.backward(forward(), grad)


def measure(request: Row, device: torch.device) -> Row:
    """Every curve that this device has; if the time runs out, the last curves are short or missing."""
    probe, on_gpu = Probe(device, request["seconds"]), device.type == "cuda"
    model = ModelSpec.model_validate(request["model"])
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(probe.ranks)))
    wide = "bf16" if on_gpu else "fp32"
    curves: Row = {
        "format": 1,
        "device_kind": device.type,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "ranks": probe.ranks,
        "ranks_per_host": per_host,
        "model": model.name,
        "load_average": os.getloadavg()[0],
        "products": [row for each in request["precisions"] for row in probe.products(request["products"], each)],
        "streaming": probe.streaming(model, request["stream"]["tokens"], wide),
        "launch_seconds": probe.launch(),
        "layer_floor_seconds": probe.layer(model, 32, 1, 16)["forward_seconds"],
    }
    if not on_gpu and probe.ranks > 1:
        curves["alone"] = probe.alone(request["products"][0], wide)
        curves["cut_layers"] = probe.cut_layers(model, **request["cut_layers"])
    curves["attention"] = probe.attention(**request["attention"], precision=wide)
    curves["grouped"] = probe.grouped(request["grouped"]) if on_gpu else []
    curves["host_to_device"] = probe.host_to_device(request["copies"]) if on_gpu else []
    curves["collectives"] = probe.collectives(request["messages"], per_host) if probe.ranks > 1 else []
    curves["complete"] = not probe.late()
    return curves


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on every rank; rank 0 writes the result."""
    parser = argparse.ArgumentParser(prog="planner.trainer.probe", allow_abbrev=False)
    parser.add_argument("request", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    request = json.loads(options.request.read_text(encoding="utf-8"))
    device = torch.device("cpu")
    if request["kind"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        curves = measure(request, device)
        if dist.get_rank() == 0:
            options.output.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the curves are written; torch's threads sometimes abort while the interpreter is torn down
