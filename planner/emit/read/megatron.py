"""Reader for command lines and scripts of Megatron-LM and of Megatron-DeepSpeed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from planner.emit.names import names_beside, translated
from planner.emit.programs import megatron
from planner.emit.read import OF_RECIPE, RANKS, Reader
from planner.emit.read.conditions import UNSET, whole_number
from planner.emit.read.options import option_words, options_of, with_ranks
from planner.specs.training import UNKNOWN_WEIGHTS

if TYPE_CHECKING:
    from planner.emit.target import Value, Values

_NAMES: Final = names_beside(__file__)
DEFAULTS: Final[dict[str, Value]] = _NAMES["defaults"]
"""Values of options that a command leaves out. Source: Megatron-LM d98e8a64, megatron/training/arguments.py."""


def _values(text: str) -> Values:
    words = option_words(text)
    found = translated(options_of(words), _NAMES["old"])
    if RANKS not in found and not re.search(_NAMES["placed"], text):
        found = with_ranks(found, words, text)
    if others := [word for word in words if _OTHER_SCRIPT.search(word)]:
        found["launch.script"] = others[-1]
    kind = found.get("tokenizer_type") or ("GPT2BPETokenizer" if found.get("merge_file") else None)
    if found.get("vocab_size") is None and kind in _NAMES["vocabularies"]:
        found["vocab_size"] = _NAMES["vocabularies"][kind]
    elif found.get("vocab_size") is not None and kind == "NullTokenizer":
        found["vocab_size"] = int(str(found["vocab_size"])) + 1
    if found.get("deepspeed"):
        found = _of_deepspeed(found)
    loaded = [key for key in ("load", "pretrained_checkpoint") if UNSET.search(str(found.get(key)))]
    return {**DEFAULTS, **found, **dict.fromkeys(loaded, UNKNOWN_WEIGHTS)}


_OTHER_SCRIPT: Final = re.compile(_NAMES["other_script"])


def _of_deepspeed(own: dict[str, Value]) -> dict[str, Value]:
    """Convert options of Megatron-DeepSpeed to options of Megatron-LM.

    In bf16 without ZeRO, DeepSpeed still shards the optimizer states (deepspeed, runtime/bf16_optimizer.py). Layers are
    split evenly, with or without embedding and logits counted as layers. Source: Megatron-DeepSpeed,
    megatron/arguments.py.
    """
    stage = own.get("zero_stage", f"in {own['deepspeed_config']}" if "deepspeed_config" in own else 0)
    own["zero_stage"] = "1" if str(stage) == "0" and own.get("bf16") else stage
    if groups := own.pop("num_key_value_heads", None):
        own |= {"group_query_attention": True, "num_query_groups": groups}
    found = translated(own, _NAMES["deepspeed"])
    method = str(found.get("pp_partition_method", "type:transformer"))
    ends = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    if method == "type:transformer|embedding" and _divides(found):
        found |= ends
    if method == "type:transformer" or ends.items() <= found.items():
        found.pop("pp_partition_method", None)
    return found


def _divides(found: Values) -> bool:
    """Whether the stages divide the number of layers evenly, with embedding and logits counted as two layers."""
    sizes = (str(found.get(key, "")) for key in ("num_layers", "pipeline_model_parallel_size"))
    layers, stages = (whole_number(each) or 0 for each in sizes)
    return stages > 0 and layers > 0 and (layers + 2) % stages == 0


def engine_of(values: Values) -> str:
    """The profile that prices a run with these options."""
    if values.get("deepspeed"):
        return "deepspeed"
    sharded = values.get("use_megatron_fsdp") or values.get("use_custom_fsdp")
    return "megatron-fsdp" if sharded else "megatron"


def _assumed(values: Values) -> dict[str, str]:
    """Degrees of a command that says neither degrees nor sizes: a script with code of its own has them."""
    is_said = any(f"{key}_model_parallel_size" in values for key in ("tensor", "pipeline"))
    return {} if is_said or "num_layers" in values else dict.fromkeys(("tp", "pp", "cp"), OF_RECIPE)


READER: Final = Reader(
    **_NAMES["reader"],
    values=_values,
    engine=engine_of,
    target=megatron.TARGET,
    assumed=_assumed,
)
