"""Sums of floats that have the same last digit under every Python."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")


def sum_of(values: Iterable[T]) -> T:
    """The sum of numbers or arrays from left to right, rounded after each addition; 0 of nothing.

    Python's own `sum` does the same up to 3.11; since 3.12 it makes up for the rounding of floats. Documents are equal
    byte for byte, so floats of theirs are summed here; whole numbers may be summed with `sum`.
    """
    return reduce(operator.add, values, 0)  # type: ignore[return-value]
