"""Global batch sizes among which the search may choose: a range of sequences, or a number of tokens."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from planner.units import parse_count

COUNT_PATTERN: Final = r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?[kKMBGT]?"
BATCH_PATTERN: Final = rf"^\s*({COUNT_PATTERN}\s*\.\.\s*{COUNT_PATTERN}(\s+tokens)?|{COUNT_PATTERN}\s+tokens)\s*$"
"""Regular expression for a choice of batch sizes; editors read it from the schema."""

_NEAR_TARGET: Final = 0.05
"""Allowed deviation from a target number of tokens, so that the batch divides evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRange:
    """Allowed sequences per optimizer step, from `least` to `most`.

    `target` is the preferred number of sequences, if the user gave a number of tokens.
    """

    least: int
    most: int
    target: float | None = None

    def sizes(self, most_sizes: int = 33) -> tuple[int, ...]:
        """Batch sizes to try, ascending: both ends of the range, and all multiples of one power of two between them.

        The power of two is the largest that gives at least half of `most_sizes` sizes. There are never more than
        `most_sizes` sizes.
        """
        step = 1
        while (self.most - self.least) // step > most_sizes - 2:
            step *= 2
        inside = range(-(-self.least // step) * step, self.most + 1, step)
        return tuple(sorted({self.least, self.most, *inside}))


def read_batch(text: str, sequence_length: int) -> BatchRange:
    """Read `512..2048` (sequences), `2M..8M tokens` or `4M tokens`.

    Raises:
        ValueError: the text has none of these forms, or the tokens are less than one sequence.
    """
    if not re.match(BATCH_PATTERN, text):
        raise ValueError(f"{text!r} is no batch size; write 1024, 512..2048 or '4M tokens'")
    in_tokens = text.strip().endswith("tokens")
    first, dots, last = text.strip().removesuffix("tokens").partition("..")
    length = sequence_length if in_tokens else 1
    counts = [parse_count(part) / length for part in ([first, last] if dots else [first])]
    if dots:
        least, most = math.ceil(counts[0]), math.floor(counts[1])
    else:
        nearest = round(counts[0])  # 0 for less than half a sequence
        least = min(nearest, math.ceil(counts[0] * (1 - _NEAR_TARGET)))
        most = max(nearest, math.floor(counts[0] * (1 + _NEAR_TARGET)))
    if dots and counts[0] > counts[1]:
        raise ValueError(f"{text!r} begins with the larger size; write {last.strip()}..{first.strip()}")
    if not 1 <= least <= most:
        of = f" of {sequence_length:,} tokens" if in_tokens else ""
        raise ValueError(f"{text!r} holds no whole number of sequences{of}")
    return BatchRange(least=least, most=most, target=None if dots else counts[0])
