"""Megatron-Core's letters for the pieces of each pipeline chunk, as in `Et*3|(tt|)*29m|L`."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Final, NamedTuple

from planner.errors import InputError

LETTERS_KEY: Final = "pipeline_model_parallel_layout"
_MOST_LETTERS: Final = 100_000
_GROUP: Final = re.compile(r"\(([^()]*)\)(?:\*([0-9]{1,5}))?")
_REPEATED: Final = re.compile(r"([A-Za-z|])\*([0-9]{1,5})")


class Pieces(NamedTuple):
    """The number of layers of each chunk, and the chunk of each layer for multi-token prediction."""

    layers: tuple[int, ...]
    mtp: tuple[int, ...]


def letters_of(layers: tuple[int, ...], mtp_layers: int, mtp: tuple[int, ...] = ()) -> str:
    """The letters for embedding, layers of each chunk, MTP layers and loss, as in `Et*7|(t*9|)*2t*3|m|L`.

    mtp: the chunk of each MTP layer, or one chunk for all; empty for the last chunk.
    """
    last = len(layers) - 1
    places = mtp if len(mtp) == mtp_layers else (mtp or (last,)) * mtp_layers
    chunks = [
        "E" * (chunk == 0)
        + {0: "", 1: "t", 2: "tt"}.get(count, f"t*{count}")
        + "m" * places.count(chunk)
        + "L" * (chunk == last)
        for chunk, count in enumerate(layers)
    ]
    runs = [(text, len(list(same))) for text, same in groupby(chunks[:-1])]
    # a row of equal chunks is a group; Megatron-Core expands `t*4` inside a group after the group itself
    return "".join(f"({text}|)*{count}" if count > 2 else f"{text}|" * count for text, count in runs) + chunks[-1]


def pieces_of_letters(text: str, where: str = LETTERS_KEY) -> Pieces:
    """What each chunk of a layout such as `Et*3|(tt|)*29m|L` holds; the inverse of `letters_of`.

    A chunk that holds only the embedding, MTP layers or the loss has 0 layers.
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
    spread = spread.rstrip("|")
    if not re.fullmatch(r"E[t|]*[m|]*L", spread):
        hint = "as in Et*3|(tt|)*29m|L: E, then all t, then all m, then L"
        raise InputError(f"{text[:80]!r} is no pipeline layout", where=where, hint=hint)
    chunks = spread.split("|")
    mtp = [chunk for chunk, held in enumerate(chunks) for _ in range(held.count("m"))]
    return Pieces(tuple(held.count("t") for held in chunks), tuple(mtp))
