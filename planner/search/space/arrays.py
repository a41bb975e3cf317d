"""Rows of parts, and how near two numbers are that it takes for equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from planner.numbers import IntArray

TIE = 1e-12
"""Step times that differ by less, relatively, are equal: it is what rounding does to a sum of stage times."""

AGREEMENT = 1e-9
"""Two methods must agree on an optimum to this, relatively."""


def unrolled(counts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Rows with so many parts each, part by part: of each part its row and its number in it, and each row's first.

    counts: [n]. Returns [sum of counts] twice, and [n].
    """
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - first[owner], first
