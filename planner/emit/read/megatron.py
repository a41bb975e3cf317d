"""Command lines and scripts of Megatron-LM."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from planner.emit.programs import megatron
from planner.emit.read import Reader
from planner.emit.read.options import options_of
from planner.emit.read.shell import option_words

if TYPE_CHECKING:
    from planner.emit.target import Value, Values

_VOCABULARIES: Final = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokenizers with one vocabulary. Source: the vocabularies of GPT-2 and Llama 2, which these read."""

_OWN_OPTION: Final = re.compile(r"--((tensor-)?model-parallel-size|micro-batch-size|num-layers|global-batch-size)\b")


def _values(text: str) -> Values:
    found: dict[str, Value] = options_of(option_words(text))
    kind = found.get("tokenizer_type") or ("GPT2BPETokenizer" if found.get("merge_file") else None)
    if found.get("vocab_size") is None and kind in _VOCABULARIES:
        found["vocab_size"] = _VOCABULARIES[str(kind)]
    elif found.get("vocab_size") is not None and kind == "NullTokenizer":
        found["vocab_size"] = int(str(found["vocab_size"])) + 1
    if "model_parallel_size" in found:  # until 2021
        found.setdefault("tensor_model_parallel_size", found.pop("model_parallel_size"))
    return found


def _engine(values: Values) -> str:
    sharded = values.get("use_megatron_fsdp") or values.get("use_custom_fsdp")
    return "megatron-fsdp" if sharded else "megatron"


READER: Final = Reader(
    name="a command line of Megatron-LM",
    recognises=lambda name, text: _OWN_OPTION.search(text) is not None,  # noqa: ARG005 - as the others
    values=_values,
    engine=_engine,
    target=megatron.TARGET,
    is_shell=True,
)
