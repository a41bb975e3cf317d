"""Runs what is emitted for Accelerate and DeepSpeed, on a CPU; see ranks.py.

Five stand-ins: Accelerate takes gloo for a backend of GPUs, the Trainer takes the CPU for a device with bf16,
DeepSpeed does not compile its kernel for processes of one host, memory for offload is not pinned, and a gather's
gradients are summed at once, because torch's way without NCCL takes the ranks of a group for ranks of the job.
Everything else is the programs' own. With `rows` a job is the reference: one process, which trains the model of the
same folder on these rows in a plain loop.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}

import datasets
import deepspeed
import peft
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import transformers.training_args
from accelerate.commands import launch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from ranks import Bytes, Seen, note_dropout, run_program, serve, states_of
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, set_seed

assert peft, LlamaForCausalLM  # imported once, for all ranks
datasets.disable_progress_bars()
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
torch.Tensor.pin_memory = lambda self, *_, **__: self
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
dist.nn.functional._AllGather.backward = staticmethod(lambda ctx, *grads: (None, summed(ctx.group, *grads)))
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def summed(group: Any, *gradients: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradients of a gather, one for each rank of the group, added up over the group."""
    whole = torch.stack(gradients)
    dist.all_reduce(whole, group=group)
    return whole[dist.get_rank(group)]


class Watch(TrainerCallback):
    """Takes down what a rank holds before and after the update of the weights, and the Trainer's own losses."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.trainer, self.bytes = seen, None, Bytes()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not isinstance(self.trainer.model_wrapped, DeepSpeedEngine):
            self.bytes = Bytes()
            self.bytes.add("params", (each.data for each in self.trainer.model_wrapped.parameters()))
            self.bytes.add("grads", (each.grad for each in self.trainer.model_wrapped.parameters()))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model = self.trainer.model_wrapped
        if not isinstance(model, DeepSpeedEngine):
            self.bytes.add("states", states_of(self.trainer.optimizer))
            self.seen |= {"bytes": self.bytes.of, "placements": sorted({placed(each) for each in model.parameters()})}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self.seen["losses"].append(logs["loss"])
            self.seen["norms"] += [logs["grad_norm"]] if "grad_norm" in logs else []  # ZeRO-0 tells none


def placed(parameter: torch.Tensor) -> str:
    """The names and sizes of a parameter's mesh, and how each axis cuts the parameter."""
    if not isinstance(parameter, dist.tensor.DTensor):
        return "whole"
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    return " ".join(f"{a}={size}:{cut}" for a, size, cut in zip(names, mesh.shape, parameter.placements, strict=True))


SUMS = ("all_grad_tensors", "averaged_gradients", "fp32_groups_gradients_flat", "grad_partitions_flat_buffer")
MASTERS = (
    *("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"),
    *("fp32_groups_flat", "fp32_groups"),
)
"""Where DeepSpeed's optimizers keep gradients and master weights: tensors, lists or dictionaries."""


def tensors_in(found: Any) -> list[torch.Tensor]:
    if isinstance(found, dict | list):
        return [each for row in (found.values() if isinstance(found, dict) else found) for each in tensors_in(row)]
    return [found] if isinstance(found, torch.Tensor) else []


def watch_deepspeed(seen: Seen) -> None:
    """Take down what DeepSpeed's engine holds: gradients at their peak between passes, the rest after each update."""
    take_step, backward, pipe_backward = (
        DeepSpeedEngine._take_model_step, DeepSpeedEngine.backward, PipelineEngine._exec_backward_pass
    )  # fmt: skip

    def held(self: DeepSpeedEngine) -> Bytes:
        found, model = Bytes(), list(self.module.parameters())
        found.add("params", (getattr(each, "ds_tensor", each).data for each in model))
        found.add("grads", (each.grad for each in model))
        found.add("grads", [each for name in SUMS for each in tensors_in(getattr(self.optimizer, name, None))])
        masters = [each for name in MASTERS for each in tensors_in(getattr(self.optimizer, name, None))]
        found.add("grads", (each.grad for each in masters))  # where offload keeps them
        seen["grads"] = max(seen.get("grads", 0), found.of.get("grads", 0))
        return found

    def after(function: Any) -> Any:
        def passed(self: DeepSpeedEngine, *arguments: Any, **options: Any) -> Any:
            answer = function(self, *arguments, **options)
            held(self)
            return answer

        return passed

    def step(self: DeepSpeedEngine, *arguments: Any, **options: Any) -> Any:
        found, own = held(self), self.optimizer
        answer = take_step(self, *arguments, **options)
        found.add("states", [each for name in MASTERS for each in tensors_in(getattr(own, name, None))])
        found.add("states", states_of(getattr(own, "optimizer", own)))
        stage = self.grid.get_stage_id() if isinstance(self, PipelineEngine) else 0
        held_bytes = {**found.of, "grads": seen["grads"]}
        seen.update(
            {
                "bytes": held_bytes,
                "zero": self.zero_optimization_stage(),
                "dp": dist.get_world_size(self.seq_data_parallel_group),
            }
        )
        seen["stage"] = stage
        return answer

    DeepSpeedEngine._take_model_step, DeepSpeedEngine.backward = step, after(backward)
    PipelineEngine._exec_backward_pass = after(pipe_backward)
    for code, function in list(PipelineEngine._INSTRUCTION_MAP.items()):
        if function is pipe_backward:
            PipelineEngine._INSTRUCTION_MAP[code] = PipelineEngine._exec_backward_pass


def watch_pipeline(seen: Seen) -> None:
    """Take down losses, rows and first weights of DeepSpeed's pipelines."""
    train, load = PipelineEngine.train_batch, PipelineEngine._next_batch

    def train_batch(self: PipelineEngine, *arguments: Any, **options: Any) -> Any:
        if not seen["losses"]:
            torch.save(self.module.state_dict(), f"first{dist.get_rank()}.pt")
        loss = train(self, *arguments, **options)
        seen["losses"].append(loss.item())
        return loss

    def next_batch(self: PipelineEngine) -> Any:
        batch = load(self)
        seen["rows"].append(batch[0].tolist())
        return batch

    PipelineEngine.train_batch, PipelineEngine._next_batch = train_batch, next_batch


def count_calls(seen: Seen) -> None:
    """Count how often a feed-forward block runs; again in the backward pass, if its layer is recomputed."""
    seen["calls"] = 0

    def count(module: torch.nn.Module, *_: Any) -> None:
        seen["calls"] += getattr(module, "counts_calls", False)

    torch.nn.modules.module.register_module_forward_pre_hook(count)


def note_host(seen: Seen) -> None:
    """Note the bytes that forward passes move to the host's memory."""
    plain, seen["on_host"] = torch.autograd.graph.save_on_cpu, 0

    def noted(*arguments: Any, **options: Any) -> Any:
        hooks = plain(*arguments, **options)
        pack = hooks.pack_hook

        def packed(tensor: torch.Tensor) -> Any:
            seen["on_host"] += tensor.nbytes
            return pack(tensor)

        hooks.pack_hook = packed
        return hooks

    torch.autograd.graph.save_on_cpu = noted


def mark_blocks(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        module.counts_calls = name.rpartition(".")[2] == "mlp"


def observe(job: dict[str, Any]) -> Seen:
    if "rows" in job:
        return reference(job)
    seen: Seen = {"losses": [], "norms": [], "rows": []}
    note_dropout(seen)
    note_host(seen)
    watch, real, step = Watch(seen), Trainer.__init__, Trainer.training_step
    watch_deepspeed(seen)
    watch_pipeline(seen)
    count_calls(seen)
    begin = deepspeed.initialize

    def initialize(*arguments: Any, **options: Any) -> Any:
        mark_blocks(options["model"])
        return begin(*arguments, **options)

    def make(self: Trainer, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        mark_blocks(self.model)
        watch.trainer = self
        self.add_callback(watch)

    def note(self: Trainer, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        seen["rows"].append(inputs["input_ids"].tolist())
        inputs = {key: each.contiguous() for key, each in inputs.items()}  # as copies between a GPU and the host are
        return step(self, model, inputs, *arguments, **options)

    deepspeed.initialize, Trainer.__init__, Trainer.training_step = initialize, make, note
    if Path("accelerate.yaml").exists():
        words = ["--config_file=accelerate.yaml", "--main_process_ip=127.0.0.1", "--main_process_port=1", "train.py"]
        arguments, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
        mine = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
        os.environ.update({k: v for k, v in prepare_multi_gpu_env(arguments).items() if k not in mine})
    run_program(job["words"])
    return seen


def reference(job: dict[str, Any]) -> Seen:
    """Losses of one process on the rows of each step; the optimizer is torch's plain AdamW, or SGD."""
    sys.path.insert(0, ".")
    import train

    settings = train.read("training.yaml", [])
    for key in ("distributed_config", "reshard_after_forward"):
        settings.pop(key, None)
    set_seed(settings["seed"])
    loss_of = pieces(settings) if Path("pipeline.py").exists() else whole(train, settings)
    model, losses, norms = loss_of.model, [], []
    named = [each for each in model.named_parameters() if each[1].requires_grad]
    groups = [
        {"params": [each for _, each in named if each.ndim > 1], "weight_decay": settings["weight_decay"]},
        {"params": [each for _, each in named if each.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings["adam_beta1"], settings["adam_beta2"])
    optimizer = torch.optim.AdamW(groups, settings["learning_rate"], betas, settings["adam_epsilon"], foreach=False)
    if settings["optim"] == "sgd":
        optimizer = torch.optim.SGD(groups, settings["learning_rate"], momentum=0.9)
    for rows in job["rows"]:
        loss = loss_of(torch.tensor(rows))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"], foreach=False))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": [each.item() for each in norms]}


class whole:  # noqa: N801 - called like a function
    """The loss of the Trainer's model."""

    def __init__(self, train: Any, settings: dict[str, Any]) -> None:
        self.model, _ = train.model_of(dict(settings))
        self.model.train()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=rows, labels=rows).loss


class pieces:  # noqa: N801 - as `whole`
    """The loss of the stages of pipeline.py, one behind the other, with the weights that the ranks began with."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import pipeline

        self.program, stages = pipeline, len(settings["pipeline"]["layers_per_stage"])
        self.loss = pipeline.loss_of(pipeline.outline(settings).config)
        table, bodies = pipeline.Table(settings), [pipeline.Body(settings, stage) for stage in range(stages)]
        self.tied = pipeline.outline(settings).config.tie_word_embeddings
        head = [] if self.tied else [pipeline.Head(settings)]
        self.model = torch.nn.ModuleList([table, *bodies, *head])
        found: dict[str, Any] = {}
        for path in sorted(Path().glob("first*.pt")):
            for name, value in torch.load(path).items():
                found.setdefault(name.replace("tied_modules.table", "0"), value)
        self.model.load_state_dict(found)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = rows
        for piece in self.model:
            hidden = piece(hidden)
        logits = self.program.tied_head(self.model[0], hidden) if self.tied else hidden
        return self.loss(logits, torch.nn.functional.pad(rows[:, 1:], (0, 1), value=-100))


if __name__ == "__main__":
    serve(observe)
