"""Elementary functions that are equal to the last digit under every NumPy and on every processor.

NumPy has implementations of its own for processors with AVX-512. These implementations round differently from the
implementations for other processors, and differently again before NumPy 2. Sums, products, square roots, and log2 of
whole numbers are alike everywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.numbers import Number


def exp(values: Number) -> Number:
    """The exponential of a number, or of each element of an array."""
    return _of_each(math.exp, values)


def expm1(values: Number) -> Number:
    """The exponential less one, of a number or of each element of an array."""
    return _of_each(math.expm1, values)


def log(values: Number) -> Number:
    """The natural logarithm of a number of at least zero, or of each element of an array."""
    return _of_each(lambda value: math.log(value) if value else -math.inf, values)


def cos(values: Number) -> Number:
    """The cosine of a number, or of each element of an array."""
    return _of_each(math.cos, values)


def arccos(values: Number) -> Number:
    """The inverse cosine of a number, or of each element of an array."""
    return _of_each(math.acos, values)


def _of_each(function: Callable[[float], float], values: Number) -> Number:
    array = np.asarray(values, dtype=np.float64)
    return np.array([function(value) for value in array.ravel().tolist()]).reshape(array.shape)[()]
