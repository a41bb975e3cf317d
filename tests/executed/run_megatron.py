"""Runs what is emitted for Megatron-LM, on a CPU; see ranks.py. MEGATRON_LM names the checkout.

Stand-ins answer for torch.cuda, and options that the emitted script takes behind its own choose kernels that a CPU has.
Weights begin as a function of their whole name and shape, so that the reference is the same program on one rank.
"""

from __future__ import annotations

import os
import re
import sys
import typing
import warnings
import zlib
from copy import copy
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from cuda_stand_ins import stand_in
from ranks import Bytes, Seen, note_dropout, run_program, serve, states_of

CHECKOUT = os.environ["MEGATRON_LM"]
sys.path.insert(0, CHECKOUT)
warnings.simplefilter("ignore")
sys.modules["torchao"] = None  # type: ignore[assignment]
if not hasattr(typing, "override"):
    typing.override = lambda function: function  # type: ignore[attr-defined]
stand_in()


def sample_index(sizes: Any, documents: Any, length: int, epochs: int, tokens: int, _: bool, extra: int) -> Any:
    """Where each sample begins: an index into `documents`, and a token. Stands for a helper in C++."""
    starts_of_samples = np.arange((epochs * tokens - extra) // length + 1) * length
    ends = np.cumsum(sizes[documents])
    found = np.searchsorted(ends, starts_of_samples, side="right")
    return np.stack([found, starts_of_samples - (ends - sizes[documents])[found]], 1).astype(np.int32)


sys.modules["megatron.core.datasets.helpers_cpp"] = SimpleNamespace(  # type: ignore[assignment]
    build_sample_idx_int32=sample_index, build_sample_idx_int64=sample_index, __all__=[]
)

import gpt_builders
import megatron.core.datasets.utils
import megatron.core.utils
import megatron.training
from megatron.core import parallel_state as groups
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training import training

assert gpt_builders  # imported once, for all ranks
megatron.core.datasets.utils.compile_helpers = lambda: None
MAKE_NORM = WrappedTorchNorm.__new__


def norm_of(cls: type, config: Any, *arguments: Any, **options: Any) -> Any:
    """torch's norm; its weights see a part of the sequence, and their gradients are summed over all parts."""
    apart = copy(config)
    apart.sequence_parallel = False
    made = MAKE_NORM(cls, apart, *arguments, **options)
    for weight in made.parameters():
        weight.sequence_parallel = config.sequence_parallel
    return made


WrappedTorchNorm.__new__ = norm_of
AXES = {
    "tp": groups.get_tensor_model_parallel_rank, "pp": groups.get_pipeline_model_parallel_rank,
    "dp": groups.get_data_parallel_rank, "cp": groups.get_context_parallel_rank,
}  # fmt: skip


def begin(chunks: list[Any]) -> None:
    """Fill the weights; matrices that tensor parallelism cuts get their part of the whole matrix."""
    for chunk in chunks:
        modules = dict(chunk.named_modules())
        for name, weight in chunk.named_parameters():
            weight.data.copy_(value_of(whole_name(name, modules), weight))


def whole_name(name: str, modules: dict[str, Any]) -> str:
    """The name with numbers of layers and experts that count through all ranks."""
    name = name.removeprefix("module.")
    if found := re.search(r"(.*local_experts\.)(\d+)(\..*)", name):
        experts = sum(each.endswith(".linear_fc1") and found[1] in each for each in modules)
        name = f"{found[1]}{int(found[2]) + experts * groups.get_expert_model_parallel_rank()}{found[3]}"
    if found := re.search(r"(.*layers\.)(\d+)(\..*)", name):
        path = next(each for each in modules if each.removeprefix("module.") == f"{found[1]}{found[2]}")
        name = f"{found[1]}{modules[path].layer_number - 1}{found[3]}"
    is_tied = not megatron.training.get_args().untie_embeddings_and_output_weights
    return "embedding.word_embeddings.weight" if name == "output_layer.weight" and is_tied else name


def value_of(name: str, weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() < 2:
        return weight.data
    of_expert = "local_experts" in name
    size = (
        groups.get_expert_tensor_parallel_world_size() if of_expert else groups.get_tensor_model_parallel_world_size()
    )
    rank = groups.get_expert_tensor_parallel_rank() if of_expert else groups.get_tensor_model_parallel_rank()
    cut, size = (weight.partition_dim, size) if getattr(weight, "tensor_model_parallel", False) else (0, 1)
    shape = [length * (size if axis == cut else 1) for axis, length in enumerate(weight.shape)]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.02
    is_gated = "linear_fc1" in name and megatron.training.get_args().swiglu
    halves = whole.chunk(2, 0) if is_gated else (whole,)  # gate and up are cut one by one
    return torch.cat([half.chunk(size, cut)[rank if size > 1 else 0] for half in halves], 0)


def observe(job: dict[str, Any]) -> Seen:
    seen: Seen = {"losses": [], "rows": [], "calls": 0}
    note_dropout(seen)
    make, step, batch = (
        DistributedDataParallel.__init__,
        training.train_step,
        megatron.core.utils.get_batch_on_this_tp_rank,
    )

    def wrap(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        begin([self.module])
        for name, module in self.named_modules():
            module.counts_calls = name.rpartition(".")[2] == "mlp"

    def train_step(forward: Any, data: Any, model: list[Any], optimizer: Any, *rest: Any, **options: Any) -> Any:
        if "bytes" not in seen:  # the warm-up of fused kernels, before the first step, drops 0.1 in any case
            seen["dropout"] = []
        answer = step(forward, data, model, optimizer, *rest, **options)
        found, weights = Bytes(), [each for chunk in model for each in chunk.parameters()]
        found.add("params", (each.data for each in weights))
        found.add("grads", (getattr(each, "main_grad", None) for each in weights))
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            own = part.optimizer
            found.add("states", [each for group in own.param_groups for each in group["params"]])
            found.add("states", states_of(own))
        seen.update({"bytes": found.of, "place": {axis: rank() for axis, rank in AXES.items()}, "chunks": len(model)})
        seen["ep"] = groups.get_expert_model_parallel_world_size()
        if "lm loss" in answer[0]:
            seen["losses"].append(answer[0]["lm loss"].item())
        return answer

    def get_batch(*arguments: Any, **options: Any) -> Any:
        found = batch(*arguments, **options)
        if found.get("tokens") is not None:
            seen["rows"].append(found["tokens"].tolist())
        return found

    def count(module: torch.nn.Module, *_: Any) -> None:
        seen["calls"] += getattr(module, "counts_calls", False)

    DistributedDataParallel.__init__, training.train_step = wrap, train_step
    megatron.core.utils.get_batch_on_this_tp_rank = get_batch
    torch.nn.modules.module.register_module_forward_pre_hook(count)
    run_program(job["words"])
    return seen


if __name__ == "__main__":
    serve(observe)
