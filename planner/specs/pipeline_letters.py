"""Megatron-Core's letters for the layers of each pipeline chunk, as in `Et*3|(tt|)*29m|L`."""

from __future__ import annotations

import re
from typing import Final

from planner.errors import InputError

LETTERS_KEY: Final = "pipeline_model_parallel_layout"
_MOST_LETTERS: Final = 100_000
_GROUP: Final = re.compile(r"\(([^()]*)\)(?:\*([0-9]{1,5}))?")
_REPEATED: Final = re.compile(r"([A-Za-z|])\*([0-9]{1,5})")


def letters_of(layers: tuple[int, ...], mtp_layers: int) -> str:
    """The layout letters for embedding, layers of each chunk, MTP layers and loss, as in `Et*7|t*9|t*7L`."""
    first, *middle, last = (f"t*{count}" for count in layers)
    return "|".join((f"E{first}", *middle, f"{last}{'m' * mtp_layers}L"))


def layers_of_letters(text: str, where: str = LETTERS_KEY) -> tuple[int, ...]:
    """The number of layers of each chunk of a layout such as `Et*3|(tt|)*29m|L`; the inverse of `letters_of`.

    A chunk that holds only the embedding or the loss has 0 layers.
    Source: Megatron-LM, core/transformer/pipeline_parallel_layer_layout.py.

    Raises:
        InputError: the text is not a layout of this form, or it is very long.
    """
    spread = re.sub(r"[\s,]", "", text.strip("'\""))
    for pattern in (_GROUP, _REPEATED, _GROUP):
        for _ in range(8):
            sizes = [len(match[1]) * int(match[2] or 1) for match in pattern.finditer(spread)]
            if not sizes:
                break
            if sum(sizes) > _MOST_LETTERS:
                raise InputError("the layout has too many layers", where=where)
            spread = pattern.sub(lambda match: match[1] * int(match[2] or 1), spread)
    if not re.fullmatch(r"[EtmL|]+", spread):
        raise InputError(f"{text[:80]!r} is no pipeline layout", where=where, hint="as in Et*3|(tt|)*29mL")
    return tuple(chunk.count("t") for chunk in spread.rstrip("|").split("|"))
