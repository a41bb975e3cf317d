"""Count the memory of one rank for the files of `planner emit`: torchtitan's own trainer.

`python -m planner.trainer.rehearse_torchtitan FOLDER --rank N` imports planned.py from FOLDER. torchtitan's `Trainer`
builds and shards the model on fake tensors, and makes the step. The data, the checkpoints and the log are left out.
Everything else is as in `planner.trainer.rehearse`.
"""

from __future__ import annotations

import importlib
import math
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
    import torchtitan.trainer
import torchtitan.tools.utils
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common import RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.protocols import BaseModel

from planner.cost.ledger import LineName
from planner.trainer.measure import MemoryMeter
from planner.trainer.rehearse import Counter, FusedNorm, Unread, fake_ranks, main_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


def _attention(self: Any, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **_: Any) -> Any:  # noqa: ARG001
    """Attention by a kernel that keeps the same tensors as FlexAttention's, which has no backward pass on a CPU."""
    q_BNLH, k_BNLH, v_BNLH = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
    return F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, enable_gqa=True).transpose(1, 2)


def _fake_world(num_ranks: int, rank: int, mode: FakeTensorMode) -> AbstractContextManager[None]:
    """One rank of an imaginary world; weights are fake, and kernels that a CPU lacks have stand-ins."""

    def faked(method: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            with mode:
                return method(*arguments, **options)

        return run

    saved = activation_checkpoint._get_default_save_ops()  # noqa: SLF001 # there is no other
    kept = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}  # noqa: SLF001 # as FlexAttention's
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan sets it
    return fake_ranks(
        num_ranks,
        rank,
        mock.patch.object(torchtitan.tools.utils, "get_local_device", return_value=torch.device("cpu")),
        mock.patch.object(torchtitan.tools.utils, "get_peak_flops", return_value=1.0),
        mock.patch.object(BaseModel, "to_empty", faked(BaseModel.to_empty)),
        mock.patch.object(BaseModel, "init_weights", faked(BaseModel.init_weights)),
        mock.patch.object(Decoder, "get_attention_masks", return_value=None),
        mock.patch.object(FlexAttention, "forward", _attention),
        mock.patch.object(RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight)),  # type: ignore[no-untyped-call]
        mock.patch.object(activation_checkpoint, "_get_default_save_ops", return_value=saved | kept),
    )


def _config(folder: Path) -> Any:
    """The plan's configuration, with a dummy for parts that hold no tensors of the device."""
    sys.path.insert(0, str(folder))
    config = importlib.import_module("planned").planned()
    dummy = mock.MagicMock(enable=False, create_seed_checkpoint=False)
    built = dummy.build.return_value
    built.should_log.return_value = False
    built.device_memory_monitor.get_peak_stats.return_value = SimpleNamespace(
        max_reserved_gib=0.0, max_reserved_pct=0.0
    )
    for part in ("metrics", "tokenizer", "dataloader", "checkpoint"):
        setattr(config, part, dummy)
    # fully_shard of torch 2.13 does not accept the default backend's types; both backends shard in the same way
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def _batches(config: Any) -> Iterator[Any]:
    """Microbatches without data."""
    size = config.training.local_batch_size, config.training.seq_len
    while True:
        tokens, positions, labels = (torch.empty(size, dtype=torch.int64) for _ in range(3))
        yield {"input": tokens, "positions": positions}, labels


def counted(folder: Path, rank: int = 0) -> tuple[int, dict[LineName, int]]:
    """Peak bytes of one rank in a step, and the peak of each ledger line."""
    config, mode = _config(folder), FakeTensorMode(allow_non_fake_inputs=True)
    degrees = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
    num_ranks = math.prod(getattr(config.parallelism, f"{each}_degree") for each in degrees)
    counter = Counter(mode)
    with _fake_world(num_ranks, rank, mode), counter.watch(), Unread():  # type: ignore[no-untyped-call] # torch's
        trainer = torchtitan.trainer.Trainer(config)
        with mode:
            batches = _batches(config)
            trainer.train_step(batches)
            for optimizer in trainer.optimizers.optimizers:
                optimizer.zero_grad()
            states = counter.num_bytes
            counter.peak = 0
            trainer.train_step(batches)
            peak = counter.peak
            (model,) = trainer.model_parts
            wrapped = any(isinstance(each, CheckpointWrapper) for each in model.modules())
            layers: tuple[type, ...] = (CheckpointWrapper if wrapped else TransformerBlock,)
            meter = MemoryMeter([model], trainer.optimizers.optimizers[0], layers)
            with meter.watch():
                trainer.train_step(batches)
    return peak, {**meter.peak, LineName.OPTIMIZER_STATE: states}


if __name__ == "__main__":
    sys.exit(main_of("planner.trainer.rehearse_torchtitan", counted))
