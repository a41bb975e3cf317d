"""What Megatron-LM asks of torch.cuda, answered by a CPU: `stand_in()` before the program is imported."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Event:
    """Also a stream: everything is done as soon as it is asked for."""

    cuda_stream, device = 0, CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Generator:
    def __init__(self) -> None:
        self.set_state, self.get_state = torch.set_rng_state, torch.get_rng_state

    def clone_state(self) -> Generator:
        return self


class OnTheCPU(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU, and their types are named as those of a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("device") is not None:
            options["device"] = _here(options["device"])
        options.pop("pin_memory", None)
        if function is torch.Tensor.to:
            args = (args[0], *(_here(each) for each in args[1:]))
        answer = function(*args, **options)
        if function is torch.Tensor.type and len(args) == 1:
            return answer.replace("torch.", "torch.cuda.")
        return answer


def _here(device: Any) -> Any:
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return CPU if is_number or (isinstance(device, str | torch.device) and "cuda" in str(device)) else device


def _typed(kind: torch.dtype) -> type:
    """A class such as torch.cuda.FloatTensor."""

    class Typed(type):
        def __instancecheck__(cls, each: Any) -> bool:
            return isinstance(each, torch.Tensor) and each.dtype == kind

        def __call__(cls, *given: Any) -> torch.Tensor:
            return torch.tensor(given[0], dtype=kind) if isinstance(given[0], list | tuple) else torch.zeros(*given)

    return Typed("Tensor", (), {})


def _over_gloo() -> None:
    """Collectives that gloo lacks, from those that it has."""
    begin, group_of = dist.init_process_group, dist.new_group
    known = {"ranks", "timeout", "group_desc", "use_local_synchronization"}

    def initialize(*_: Any, **options: Any) -> Any:
        return begin(**{**options, "backend": "gloo", "device_id": None})

    def new_group(*args: Any, **options: Any) -> Any:
        return group_of(*args, **{key: value for key, value in options.items() if key in known})

    def add(tensor: Any, op: Any, group: Any) -> None:  # at once, also where Megatron-LM collects several
        options = dist.AllreduceOptions()
        options.reduceOp = op
        (group or dist.distributed_c10d._get_default_group()).allreduce([tensor], options).wait()

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        mean = op == dist.ReduceOp.AVG
        add(tensor, dist.ReduceOp.SUM if mean else op, group)
        if mean:
            tensor.div_(dist.get_world_size(group))
        return Event() if async_op else None

    def reduce_scatter(
        to: Any, given: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        whole = given.clone()
        all_reduce(whole, op, group)
        to.copy_(whole.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)].view_as(to))
        return Event() if async_op else None

    dist.init_process_group, dist.new_group, dist.all_reduce = initialize, new_group, all_reduce
    dist.reduce_scatter_tensor = dist._reduce_scatter_base = reduce_scatter


def stand_in() -> None:
    cuda, nothing = torch.cuda, dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0)
    nothing |= {"max_memory_reserved": 0, "current_device": 0, "device_count": 8, "get_device_name": "cpu"}
    nothing |= dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed"))
    nothing |= {"manual_seed_all": None, "is_available": True, "is_bf16_supported": True, "_lazy_init": None}
    nothing |= {
        "is_current_stream_capturing": False,
        "get_device_capability": (9, 0),
        "mem_get_info": (1 << 36, 1 << 36),
    }
    properties = SimpleNamespace(multi_processor_count=108, name="cpu", total_memory=80 << 30, major=9, minor=0)
    nothing |= {"get_device_properties": properties, "memory_stats": dict.fromkeys((), 0)}
    for name, answer in nothing.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    cuda.Event = cuda.Stream = Event
    cuda.current_stream = cuda.default_stream = Event
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    cuda._lazy_call = lambda function, **_: function()
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.default_generators = [Generator()] * 16
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(torch.optim.Optimizer, name, lambda _: None)
    torch.Tensor.cuda = torch.nn.Module.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.Tensor.record_stream = lambda *_: None
    kinds = {"Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Long": torch.int64}
    for name, kind in (kinds | {"Int": torch.int32, "Double": torch.float64, "Byte": torch.uint8}).items():
        setattr(cuda, f"{name}Tensor", _typed(kind))
    empty = torch.empty  # backward passes inside others run without the mode
    torch.empty = lambda *sizes, device=None, **options: empty(*sizes, device=_here(device), **options)
    new_empty = torch.Tensor.new_empty
    torch.Tensor.new_empty = lambda self, *sizes, device=None, **options: new_empty(
        self, *sizes, device=_here(device), **options
    )
    _over_gloo()
    OnTheCPU().__enter__()
