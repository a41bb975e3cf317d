"""What a log says about its own model, batch and layout, compared with the plan.

Source: the lines as these programs print them: Megatron-LM, megatron/training/arguments.py; torchtitan, trainer.py and
distributed/parallel_dims.py; DeepSpeed, runtime/config.py; transformers, trainer.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from planner.cost.adapters import num_trained_params
from planner.cost.parameters import num_params
from planner.errors import Mistake
from planner.specs.text import any_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.evidence.logs.lines import Line
    from planner.plan import Plan

BATCH: Final = re.compile(r"global[ _]batch[ _]size\s{0,20}[:=]\s{0,20}(?P<count>[0-9]{1,15})")
"""The batch of one step, in a line of Megatron-LM; it grows during a ramp-up."""

_SAME: Final = {"total parameters": 0.02, "trainable parameters": 0.05}
"""Two parameter counts that differ by less than this share may belong to the same model.

A program may count parameters that it does not train, or count tied weights twice.
"""

_COUNT: Final = r"(?P<count>[0-9]{1,3}(?:,[0-9]{3}){1,8}|[0-9]{1,15})\b"
_PHRASES: Final = tuple(
    (key, re.compile(pattern + _COUNT))
    for key, pattern in (
        ("local batch size", r"Trainer is initialized with local batch size "),
        ("global batch size", r"Trainer is initialized with .{0,60}global batch size "),
        ("sequence length", r"Trainer is initialized with .{0,160}sequence length "),
        ("maximum context length", r"Trainer is initialized with .{0,160}maximum context length "),
        ("tokens per train step", r"Trainer is initialized with .{0,60}tokens per DP rank, "),
        ("pp", r"mesh with parallelism: .{0,99}\bpp="),
        ("cp", r"mesh with parallelism: .{0,99}\bcp="),
        ("tp", r"mesh with parallelism: .{0,99}\btp="),
        ("total parameters", r"size: (?=[0-9,]+ total parameters)"),
        ("Instantaneous batch size per device", r"Instantaneous batch size per device = "),
        ("Total train batch size", r"Total train batch size \(w\. parallel, distributed & accumulation\) = "),
        ("trainable parameters", r"Number of trainable parameters = "),
    )
)
_OPTIONS: Final = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_experts",
    "seq_length",
    "global_batch_size",
    "micro_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_size",
    "world_size",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization_stage",
)
_OPTION: Final = re.compile(rf"(?:^|[\s:\]|])(?P<name>{'|'.join(_OPTIONS)}) (?:\.+ ?| )(?P<count>[0-9]{{1,15}})\s*$")
_MESH: Final = re.compile(r"device mesh with \[(?P<axes>[^\]]{0,200})\], \[(?P<count>[0-9, ]{1,99})\]")


def mistakes_of(name: str, lines: Sequence[Line], plan: Plan) -> list[Mistake]:
    """A mistake for each statement of a log that differs from the plan, at its first line."""
    hint = "give the plan that this log ran, or leave the log out"
    planned, found = _planned(plan), dict[str, Mistake]()
    batches: dict[int, tuple[int, int]] = {}
    for line in lines:
        for key, count, column in _stated(line.text):
            wanted = dict.fromkeys(planned.get(key, ()))
            if key in found or any(abs(count - each) <= _SAME.get(key, 0) * each for each in wanted) or not wanted:
                continue
            said = f"the log counts {count:,} {key}" if key in _SAME else f"{key} is {count}"
            words = f"{said}, and {any_of(f'{each:,}' if key in _SAME else each for each in wanted)} in the plan"
            where = f"{name}:{line.number}:{line.start + column}"
            found[key] = Mistake(message=words, where=where, hint=hint, source_line=line.text)
        if batch := BATCH.search(line.text):
            batches.setdefault(int(batch["count"]), (line.number, line.start + batch.start("count") + 1))
    if batches and plan.training.global_batch_size not in batches:
        count, (number, column) = next(iter(batches.items()))
        words = f"the global batch is {count}, and {plan.training.global_batch_size} in the plan"
        found["batch"] = Mistake(message=words, where=f"{name}:{number}:{column}", hint=hint)
    return list(found.values())


def _stated(text: str) -> Iterator[tuple[str, int, int]]:
    """What is counted, the count, and its column from 1."""
    if (".." in text or "_per_gpu " in text) and (option := _OPTION.search(text)):
        yield option["name"], int(option["count"]), option.start("count") + 1
    for key, pattern in _PHRASES:
        if phrase := pattern.search(text):
            yield key, int(phrase["count"].replace(",", "")), phrase.start("count") + 1
    if mesh := _MESH.search(text):
        degrees = dict(zip(re.findall(r"\w+", mesh["axes"]), re.findall(r"[0-9]{1,15}", mesh["count"]), strict=False))
        for axis in ("pp", "cp", "tp"):  # axes of one device are left out
            yield axis, int(degrees.get(axis, 1)), mesh.start("count") + 1


def _planned(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The values that a log of the plan may state; no value if any may be stated."""
    model, training, layout = plan.model, plan.training, plan.layout
    batch, length, moe = training.global_batch_size, training.sequence_length, model.moe
    # Megatron-LM prints its default of 1 if attention has no groups
    groups = (model.num_kv_heads, *((1,) if model.num_kv_heads == model.num_heads else ()))
    trained, shards = num_trained_params(model, training), layout.dp * layout.cp // layout.hsdp
    counted = (trained, trained // shards, trained // layout.tp)  # transformers counts the parameters on one rank
    return {
        "num_layers": (model.num_layers,),
        "hidden_size": (model.hidden_size,),
        # with experts it may be the width of either block, and layers of several kinds have several widths
        "ffn_hidden_size": () if moe or model.layers else (model.ffn_hidden_size,),
        "num_attention_heads": (model.num_heads,),
        "num_query_groups": () if model.layers else groups,
        "num_experts": (moe.num_experts if moe else 1,),
        "seq_length": (length,),
        "sequence length": (length,),
        "maximum context length": (length,),
        "tokens per train step": (batch * length,),
        "global_batch_size": (batch,),
        "global batch size": (batch,),
        "train_batch_size": (batch,),
        # older versions multiply by all devices, also by those that share a sequence
        "Total train batch size": (batch, batch * layout.tp * layout.cp),
        "micro_batch_size": (layout.mbs,),
        "train_micro_batch_size_per_gpu": (layout.mbs,),
        "Instantaneous batch size per device": (layout.mbs,),
        "local batch size": (layout.mbs,) if layout.pp == 1 else (),  # a pipeline divides it again
        "tensor_model_parallel_size": (layout.tp,),
        "tp": (layout.tp,),
        "pipeline_model_parallel_size": (layout.pp,),
        "pp": (layout.pp,),
        "virtual_pipeline_model_parallel_size": (layout.interleave,),
        "context_parallel_size": (layout.cp,),
        "cp": (layout.cp,),
        "expert_model_parallel_size": (layout.ep,),
        "data_parallel_size": (layout.dp,),
        # DeepSpeed's is the number of data-parallel ranks
        "world_size": (layout.world_size, *((layout.dp,) if plan.engine.name == "deepspeed" else ())),
        "zero_optimization_stage": (layout.zero,),
        "total parameters": (num_params(model),),
        "trainable parameters": () if model.vision else counted,  # a tower may be frozen
    }
