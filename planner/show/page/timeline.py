"""The executed step as arrays for the page's canvas; repeated data are stored once, and the arrays are deflated."""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.show.words import line_label
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.answers.executed import ExecutedStep

_MOST_PASSES: Final = 1_000_000
"""Largest number of passes that are drawn; with more, a browser needs seconds to read them."""
_NAMES: Final = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
_ROUNDING: Final = 1e-12


def timeline_data(step: ExecutedStep) -> dict[str, Any]:
    """Return the kinds of passes with their parts, the number of passes of each stage, and arrays over all passes.

    `passes` is the base64 text of three deflated little-endian arrays with one value per pass: the seconds that the
    stage waits before the pass (float32), the microbatch (uint32), and the index into `kinds` (uint16). All passes of
    one kind have the same duration.
    """
    passes, keys = step.timeline, list(step.kinds)
    counts = np.bincount(passes.stage, minlength=passes.pp)
    if len(passes.kind) > _MOST_PASSES:
        counts, data = np.zeros(passes.pp, dtype=int), b""
    else:
        data = _packed(step, keys, counts)
    return {
        "kinds": [
            {
                "name": _NAMES[kind],
                "letter": kind,
                "chunk": chunk,
                "seconds": _length(step, (kind, chunk)),
                "parts": [[line_label(name), seconds] for name, seconds in step.kinds[kind, chunk].parts],
            }
            for kind, chunk in keys
        ],
        "counts": counts.tolist(),
        "num_passes": len(passes.kind),
        "passes": base64.b64encode(data).decode("ascii"),
        "pipeline_seconds": step.pipeline_seconds,
        "step_seconds": step.step_seconds,
        "tail": [[[line_label(name), seconds] for name, seconds in each] for each in step.tail],
        "interleave": passes.interleave,
    }


def _length(step: ExecutedStep, key: tuple[str, int]) -> float:
    return sum_of(seconds for _, seconds in step.kinds[key].parts)


def _packed(step: ExecutedStep, keys: list[tuple[str, int]], counts: Any) -> bytes:
    passes = step.timeline
    index = {key: number for number, key in enumerate(keys)}
    kind = np.array([index[str(k), int(c)] for k, c in zip(passes.kind, passes.chunk, strict=True)])
    seconds = np.array([_length(step, key) for key in keys])[kind]
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    before = np.roll(passes.start + seconds, 1)
    before[firsts] = 0.0
    waits = passes.start - before
    waits[waits < _ROUNDING * step.pipeline_seconds] = 0.0
    columns = (waits.astype("<f4"), passes.microbatch.astype("<u4"), kind.astype("<u2"))
    return zlib.compress(b"".join(column.tobytes() for column in columns), 9)
