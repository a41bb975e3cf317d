"""Global batch sizes that leave a choice: a range of sequences, or a number of tokens."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from planner.units import parse_count

COUNT_PATTERN: Final = r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?[kKMBGT]?"
BATCH_PATTERN: Final = rf"^\s*({COUNT_PATTERN}\s*\.\.\s*{COUNT_PATTERN}(\s+tokens)?|{COUNT_PATTERN}\s+tokens)\s*$"
"""What a choice of batch sizes looks like, as a regular expression for editors."""

_NEAR_TARGET: Final = 0.05
"""A number of tokens may be missed by this share, so that it can be cut into equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRange:
    """Sequences per optimizer step, from `least` to `most`; `target` is the number to be near to, if there is one."""

    least: int
    most: int
    target: float | None = None

    def sizes(self, most_sizes: int = 33) -> tuple[int, ...]:
        """Batch sizes to try, ascending: both ends and all multiples of a power of two between them.

        The power is the largest that leaves at least half of `most_sizes`; more sizes than that are never tried.
        """
        step = 1
        while (self.most - self.least) // step > most_sizes - 2:
            step *= 2
        inside = range(-(-self.least // step) * step, self.most + 1, step)
        return tuple(sorted({self.least, self.most, *inside}))


def read_batch(text: str, sequence_length: int) -> BatchRange:
    """Read `512..2048` (sequences), `2M..8M tokens` or `4M tokens`.

    Raises:
        ValueError: the text is none of these, or no whole number of sequences is meant.
    """
    if not re.match(BATCH_PATTERN, text):
        raise ValueError(f"{text!r} is no batch size; write 1024, 512..2048 or 4M tokens")
    in_tokens = text.strip().endswith("tokens")
    first, dots, last = text.strip().removesuffix("tokens").partition("..")
    length = sequence_length if in_tokens else 1
    counts = [parse_count(part) / length for part in ([first, last] if dots else [first])]
    if dots:
        least, most = math.ceil(counts[0]), math.floor(counts[1])
    else:
        nearest = round(counts[0])  # none where less than half a sequence is meant
        least = min(nearest, math.ceil(counts[0] * (1 - _NEAR_TARGET)))
        most = max(nearest, math.floor(counts[0] * (1 + _NEAR_TARGET)))
    if not 1 <= least <= most:
        of = f" of {sequence_length:,} tokens" if in_tokens else ""
        raise ValueError(f"{text!r} holds no whole number of sequences{of}")
    return BatchRange(least=least, most=most, target=None if dots else counts[0])
