"""Sums of floats that are equal to the last digit under every version of Python."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")


def sum_of(values: Iterable[T]) -> T:
    """The sum of numbers or arrays from left to right, rounded after each addition; 0 if there are none.

    Python's own `sum` does the same up to 3.11; since 3.12 it compensates the rounding of floats. Documents must be
    equal byte for byte under every version, so this function sums their floats. For whole numbers `sum` is enough.
    """
    return reduce(operator.add, values, 0)  # type: ignore[return-value]
