"""What a log says about its own model, batch and layout, compared with the plan.

Source: programs.yaml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.cost.adapters import num_trained_params
from planner.cost.parameters import num_params
from planner.errors import Mistake
from planner.specs.text import any_of
from planner.specs.yaml import shipped_yaml

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
FORMS: Final[Any] = shipped_yaml(Path(__file__).with_name("programs.yaml")).plain
"""What programs write in their logs, as programs.yaml explains it."""

_PHRASES: Final = {key: re.compile(words + _COUNT) for key, (words, _) in FORMS["phrases"].items()}
_IS: Final = FORMS["options"] | {key: value for key, (_, value) in FORMS["phrases"].items()}
_OPTION: Final = re.compile(
    rf"(?:^|[\s:\]|])(?P<name>{'|'.join(FORMS['options'])}) (?:\.+ ?| )(?P<count>[0-9]{{1,15}})\s*$"
)
_MESH: Final = re.compile(r"device mesh with \[(?P<axes>[^\]]{0,200})\], \[(?P<count>[0-9, ]{1,99})\]")


def mistakes_of(name: str, lines: Sequence[Line], plan: Plan) -> list[Mistake]:
    """A mistake for each statement of a log that differs from the plan, at its first line."""
    hint = "give the plan that this log ran, or leave the log out"
    planned, found = _planned(plan), dict[str, Mistake]()
    batches: dict[int, tuple[int, int]] = {}
    for line in lines:
        for key, count, column in _stated(line.text):
            wanted = dict.fromkeys(planned[_IS[key]])
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
    for key, pattern in _PHRASES.items():
        if phrase := pattern.search(text):
            yield key, int(phrase["count"].replace(",", "")), phrase.start("count") + 1
    if mesh := _MESH.search(text):
        degrees = dict(zip(re.findall(r"\w+", mesh["axes"]), re.findall(r"[0-9]{1,15}", mesh["count"]), strict=False))
        for axis in ("pp", "cp", "tp"):  # axes of one device are left out
            yield axis, int(degrees.get(axis, 1)), mesh.start("count") + 1


def _planned(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The values that a log of the plan may state, by the names of programs.yaml; no value if any may be stated."""
    model, training, layout = plan.model, plan.training, plan.layout
    batch, length, moe, kv_heads = training.global_batch_size, training.sequence_length, model.moe, model.num_kv_heads
    trained, shards = num_trained_params(model, training), layout.dp * layout.cp // layout.hsdp
    degrees = {key: (int(getattr(layout, key)),) for key in ("tp", "pp", "cp", "ep", "dp", "interleave", "zero")}
    return {
        **degrees,
        "layers": (model.num_layers,),
        "hidden size": (model.hidden_size,),
        # with experts it may be the width of either block, and layers of several kinds have several widths
        "feed-forward": () if moe or model.layers else (model.ffn_hidden_size,),
        "heads": (model.num_heads,),
        # Megatron-LM prints its default of 1 if attention has no groups
        "groups": () if model.layers else (kv_heads, *([1] if kv_heads == model.num_heads else [])),
        "experts": (moe.num_experts if moe else 1,),
        "length": (length,),
        "tokens": (batch * length,),
        "batch": (batch,),
        # older versions multiply by all devices, also by those that share a sequence
        "batch of all ranks": (batch, batch * layout.tp * layout.cp),
        "microbatch": (layout.mbs,),
        "undivided microbatch": (layout.mbs,) if layout.pp == 1 else (),  # a pipeline divides it again
        # DeepSpeed's is the number of data-parallel ranks
        "world": (layout.world_size, *((layout.dp,) if plan.engine.name == "deepspeed" else ())),
        "parameters": (num_params(model),),
        # transformers counts the parameters on one rank; a tower may be frozen
        "trained": () if model.vision else (trained, trained // shards, trained // layout.tp),
    }
