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
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import accelerate.utils as of_accelerate
import torch
import transformers.masking_utils
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import fsdp_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.quantizers.base import get_keys_to_not_convert

from planner.cost.ledger import LineName
from planner.trainer.measure import MemoryMeter
from planner.trainer.parallelize import local_tensor
from planner.trainer.rehearse import Counter, fake_ranks, main_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
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


def one_sequence() -> AbstractContextManager[Any]:
    """The function of transformers that reads values of positions finds them all in one sequence."""
    return mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", return_value=None)


def _fake_world(num_ranks: int, rank: int) -> AbstractContextManager[None]:
    """One rank of an imaginary world, in which Accelerate finds GPUs."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 # it outlives an Accelerator
    kind = of_accelerate.DistributedType.MULTI_GPU
    return fake_ranks(
        num_ranks,
        rank,
        mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": "cpu"}),
        mock.patch.object(PartialState, "_prepare_backend", return_value=("fake", kind)),
        one_sequence(),
    )


def model_of(folder: Path, settings: dict[str, Any], mode: FakeTensorMode) -> Any:
    """The model of train.py on fake tensors; its frozen matrices in 4 bits if the settings say so.

    FlashAttention has no kernel for CPUs; torch's own keeps tensors of the same sizes.
    """
    spec = importlib.util.spec_from_file_location("train", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    of_models, four = program.AutoModelForCausalLM, settings.get("load_in_4bit")
    if "flash" in settings["attn_implementation"]:
        settings["attn_implementation"] = "kernel_of_cpus"
        transformers.AttentionInterface.register("kernel_of_cpus", _attention)
    made = partial(_with_frozen, of_models.from_config) if four else of_models.from_config
    with torch.device("meta"), mock.patch.object(of_models, "from_config", made):
        model, _ = program.model_of(settings)
    model.config.use_cache = False  # as the Trainer sets it
    with mode:
        model.to_empty(device="cpu")
        model.tie_weights()
        if four:
            _quantize(model)
    return model


def _attention(*inputs: Any, softcap: float | None = None, **further: Any) -> Any:
    """Attention of torch, which caps no scores."""
    del softcap
    return sdpa_attention_forward(*inputs, **further)


def _with_frozen(from_config: Callable[..., Any], config: Any, *, dtype: torch.dtype, **options: Any) -> Any:
    """The model with the modules that `from_pretrained` makes of linear maps, if it loads weights in 4 bits."""
    model = from_config(config, dtype=dtype, **options)
    kinds = {"bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype}
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, **kinds)
    model.is_loaded_in_4bit = True  # for peft
    return replace_with_bnb_linear(model, get_keys_to_not_convert(model), how)


def _quantize(model: torch.nn.Module) -> None:
    """Pack the frozen matrices with the shapes of bitsandbytes' kernels; its class of parameters cannot be fake."""
    import bitsandbytes as of_four_bits

    def forward(module: Any, x: torch.Tensor) -> Any:
        read = x.to(module.compute_dtype)
        return of_four_bits.matmul_4bit(read, module.weight, module.quant_state, bias=module.bias).to(x.dtype)

    of_four_bits.nn.Linear4bit.forward = forward
    # the table of 8 bits, which is computed from values
    of_four_bits.functional.create_dynamic_map = lambda *_, **__: torch.empty(256)
    how = {"compress_statistics": True, "quant_type": "nf4"}
    for each in model.modules():
        if isinstance(each, of_four_bits.nn.Linear4bit):
            weight, kind = each.weight.to(each.compute_dtype), each.quant_storage
            packed, each.quant_state = of_four_bits.functional.quantize_4bit(weight, quant_storage=kind, **how)
            each.weight = torch.nn.Parameter(packed, requires_grad=False)


def counted(folder: Path, rank: int = 0) -> tuple[int, dict[LineName, int]]:
    """Peak bytes of one rank in a step, and the peak of each ledger line."""
    settings, launch = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("training", "accelerate"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counter = Counter(mode)
    with _fake_world(launch["num_processes"], rank), counter.watch(), contextlib.chdir(folder):
        accelerator = _accelerator(launch)  # a device mesh reads values
        model, mesh = model_of(folder, settings, mode), init_device_mesh("cpu", (launch["num_processes"],))
        with mode, mock.patch.object(_fully_shard, "_init_default_mesh", return_value=mesh):
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
