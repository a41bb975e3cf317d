"""Helpers for arrays: rows that are unrolled into parts, and the tolerances for equal numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from planner.numbers import IntArray

TIE = 1e-12
"""Step times with a smaller relative difference count as equal; it may come from rounding in sums of stage times."""

AGREEMENT = 1e-9
"""The largest relative difference at which two methods still agree on an optimum."""


def unrolled(counts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Unroll rows into parts: the row of each part, its number in the row, and the position of each row's first part.

    counts: number of parts of each row, [n]. The first two results have one entry for each part, the third has one for
    each row.
    """
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - first[owner], first
