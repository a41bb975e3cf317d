"""Count the memory of one rank for the files of `planner emit`: transformers under DeepSpeed's ZeRO.

`python -m planner.trainer.rehearse_deepspeed FOLDER --rank N` reads deepspeed.json, training.yaml, config.json and
train.py from FOLDER. train.py builds the model on fake tensors, and DeepSpeed's own engine runs the step. Everything
else is as in `planner.trainer.rehearse`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

os.environ["DS_ACCELERATOR"] = "cpu"  # deepspeed reads it while it is imported
import deepspeed
from deepspeed.runtime.zero import partitioned_param_coordinator

from planner.cost.ledger import LineName
from planner.trainer.measure import MemoryMeter
from planner.trainer.rehearse import Counter, Unread, fake_ranks, main_of
from planner.trainer.rehearse_accelerate import OPTIMIZERS, model_of, one_sequence

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path


def _fake_world(num_ranks: int, rank: int) -> AbstractContextManager[None]:
    """One rank of an imaginary world; DeepSpeed finds a device with enough memory, and no other rank disagrees."""
    of_launcher = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks)}
    of_launcher |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    accelerator = type(deepspeed.accelerator.get_accelerator())
    return fake_ranks(
        num_ranks,
        rank,
        mock.patch.dict(os.environ, of_launcher),
        mock.patch.object(accelerator, "available_memory", return_value=2**60),
        mock.patch.object(accelerator, "is_fp16_supported", return_value=True),
        # would compile a kernel for processes of one host
        mock.patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op"),
        mock.patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks"),
        mock.patch.object(FakeTensor, "data_ptr", return_value=0, create=True),  # for a check of alignment
        one_sequence(),
    )


def _engine(folder: Path, settings: dict[str, Any], mode: FakeTensorMode) -> Any:
    """The engine that the Trainer makes from the files, with a model whose weights are fake."""
    model = model_of(folder, settings, mode)
    with mode:
        if settings["gradient_checkpointing"]:
            model.activation_checkpointing_enable()
        trained = [each for each in model.parameters() if each.requires_grad]
        groups = [[each for each in trained if each.ndim > 1], [each for each in trained if each.ndim == 1]]
        optimizer = OPTIMIZERS[settings["optim"]]([{"params": group} for group in groups if group])
        model.to = lambda *_, **__: model  # already on its device; fake tensors cannot be moved twice
        config = json.loads((folder / settings["deepspeed"]).read_text())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.train()
    return engine


def counted(folder: Path, rank: int = 0) -> tuple[int, dict[LineName, int]]:
    """Peak bytes of one rank in a step, and the peak of each ledger line."""
    settings = yaml.safe_load((folder / "training.yaml").read_text())
    config = json.loads((folder / settings["deepspeed"]).read_text())
    of_rank = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counter = Counter(mode)
    world = _fake_world(config["train_batch_size"] // of_rank, rank)
    with world, counter.watch(), Unread(), contextlib.chdir(folder):  # type: ignore[no-untyped-call] # torch's
        engine = _engine(folder, settings, mode)
        with mode:
            _step(engine, settings, counter)  # ZeRO-3 learns the order of the modules
            states = counter.num_bytes
            counter.peak = 0
            grads = _step(engine, settings, counter) - states
            peak = counter.peak
            meter = MemoryMeter([engine.module], engine.optimizer.optimizer, (GradientCheckpointingLayer,))
            with meter.watch():
                _step(engine, settings, counter)
    state = engine.optimizer.optimizer.state  # keys: flat master weights
    of_update = [*state, *(each for moments in state.values() for each in moments.values())]
    weights = [part for each in engine.module.parameters() for part in (each, getattr(each, "ds_tensor", each))]
    flat = getattr(engine.optimizer, "grad_partitions_flat_buffer", None)
    return peak, {
        LineName.PARAMS: _bytes_of(weights),
        LineName.GRADS: grads + (0 if flat is None else flat.untyped_storage().nbytes()),
        LineName.OPTIMIZER_STATE: _bytes_of(of_update),
        LineName.ACTIVATIONS: meter.peak[LineName.ACTIVATIONS],
    }


def _bytes_of(tensors: Iterable[Any]) -> int:
    storages = [each.untyped_storage() for each in tensors if isinstance(each, torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # noqa: SLF001 # its identity


def _step(engine: Any, settings: dict[str, Any], counter: Counter) -> int:
    """A step as the Trainer makes it with Accelerate's wrapper; return the bytes that are alive before the update."""
    size = (settings["per_device_train_batch_size"], settings["max_length"])
    for left in reversed(range(settings["gradient_accumulation_steps"])):
        tokens = torch.empty(size, dtype=torch.int64)
        engine.set_gradient_accumulation_boundary(is_boundary=not left)
        engine.backward(engine(input_ids=tokens, labels=tokens)["loss"], scale_wrt_gas=False)
    before = counter.num_bytes
    engine.step()
    return before


if __name__ == "__main__":
    sys.exit(main_of("planner.trainer.rehearse_deepspeed", counted))
