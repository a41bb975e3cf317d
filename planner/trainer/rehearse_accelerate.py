"""Count the memory of one rank for the files of `planner emit`: transformers under Accelerate's FSDP2.

`python -m planner.trainer.rehearse_accelerate FOLDER --rank N` reads accelerate.yaml, training.yaml, config.json and
train.py from FOLDER. train.py builds the model on fake tensors, Accelerate shards it, and the step allocates memory as
transformers' Trainer does. Everything else is as in `planner.trainer.rehearse`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import accelerate.utils as of_accelerate
import torch
import torch.distributed as dist
import transformers.masking_utils
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import fsdp_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.cost.ledger import LineName
from planner.trainer.measure import MemoryMeter
from planner.trainer.parallelize import local_tensor
from planner.trainer.rehearse import Counter, main_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIXTEEN_BITS: Final = 2
OPTIMIZERS: Final[dict[str, Any]] = {
    "adamw_torch_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}


def _accelerator(launch: dict[str, Any]) -> Accelerator:
    """The accelerator that `accelerate launch` makes from this file, except that no weights are read."""
    given = {key.removeprefix("fsdp_"): value for key, value in launch["fsdp_config"].items()}
    layer = given.pop("transformer_layer_cls_to_wrap", None)
    plugin = of_accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=given.pop("version"),
        cpu_offload=given.pop("offload_params"),
        **given,
        transformer_cls_names_to_wrap=[layer] if layer else None,
        cpu_ram_efficient_loading=False,
    )
    degrees = {key.removeprefix("parallelism_config_"): value for key, value in launch["parallelism_config"].items()}
    return Accelerator(
        mixed_precision=launch["mixed_precision"],
        fsdp_plugin=plugin,
        parallelism_config=of_accelerate.ParallelismConfig(**degrees),
    )


@contextlib.contextmanager
def _fake_world(num_ranks: int, rank: int) -> Iterator[None]:
    """One rank of an imaginary world, in which Accelerate finds GPUs."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    kind = of_accelerate.DistributedType.MULTI_GPU
    try:
        with (
            mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": "cpu"}),
            mock.patch.object(PartialState, "_prepare_backend", return_value=("fake", kind)),
            # reads values of positions; here all belong to one sequence
            mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", return_value=None),
        ):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 # it outlives an Accelerator
        dist.destroy_process_group()


def program_of(folder: Path) -> Any:
    """The module train.py."""
    spec = importlib.util.spec_from_file_location("train", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counted(folder: Path, rank: int = 0) -> tuple[int, dict[LineName, int]]:
    """Peak bytes of one rank in a step, and the peak of each ledger line."""
    settings, launch = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("training", "accelerate"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counter = Counter(mode)
    with _fake_world(launch["num_processes"], rank), counter.watch(), contextlib.chdir(folder):
        accelerator = _accelerator(launch)  # a device mesh reads values
        with torch.device("meta"):
            model, _ = program_of(folder).model_of(settings)
        model.config.use_cache = False  # as the Trainer sets it
        with mode:
            model.to_empty(device="cpu")
            model.tie_weights()
            accelerator.state.fsdp_plugin.set_auto_wrap_policy(model)
            if accelerator.state.fsdp_plugin.activation_checkpointing:
                model = fsdp_utils.fsdp2_apply_ac(accelerator, model)
            layers = _layers(model, accelerator)
            model = fsdp_utils.fsdp2_prepare_model(accelerator, model).train()
            optimizer = OPTIMIZERS[settings["optim"]]([each for each in model.parameters() if each.requires_grad])
            _step(accelerator, model, optimizer, settings)
            states = counter.num_bytes
            counter.peak = 0  # the model was built whole; a real run does this in host memory
            _step(accelerator, model, optimizer, settings)
            peak = counter.peak
            meter = MemoryMeter([model], optimizer, layers)
            with meter.watch():
                _step(accelerator, model, optimizer, settings)
    # if weights are in 16 bits, the shards are not a master copy
    shards = [local_tensor(each) for each in model.parameters()]
    weights = sum(each.nbytes for each in shards if each.element_size() == SIXTEEN_BITS)
    meter.peak[LineName.PARAMS] += weights
    return peak, {**meter.peak, LineName.OPTIMIZER_STATE: states - weights}


def _step(accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
    """Allocate and free memory as a step of `transformers.Trainer` does."""
    size, num_batches = (settings["per_device_train_batch_size"], settings["max_length"]), "gradient_accumulation_steps"
    accumulates = settings.get("accelerator_config", {}).get("gradient_accumulation_kwargs", {})
    for left in reversed(range(settings[num_batches])):
        waits = left and not accumulates.get("sync_each_batch")
        with accelerator.no_sync(model) if waits else contextlib.nullcontext():
            tokens = torch.empty(size, dtype=torch.int64)
            accelerator.backward(model(input_ids=tokens, labels=tokens)["loss"])
    if settings["max_grad_norm"] > 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
    optimizer.step()
    model.zero_grad()


def _layers(model: torch.nn.Module, accelerator: Accelerator) -> tuple[type, ...]:
    """Classes of the layers; with recompute, classes of their wrappers, which run once."""
    policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy(accelerator.state.fsdp_plugin, model)
    found = {type(each) for each in model.modules() if policy is not None and policy(each)}
    wrappers = tuple(each for each in found if issubclass(each, CheckpointWrapper))
    return wrappers or tuple(found)


if __name__ == "__main__":
    sys.exit(main_of("planner.trainer.rehearse_accelerate", counted))
