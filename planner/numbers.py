"""Types of the numbers in formulas and in the search: of one layout, or of many at once as arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Number: TypeAlias = Any
"""`float | NDArray[Any]`: an int or float, or an array of them that broadcasts against the others.

One formula prices one layout (numbers) and a hundred thousand (arrays). mypy sees Any: of the union it reports more
than two hundred places where only one of the two can be (`prices.layer[index]`, `int(degrees.tp)`) or where NumPy
itself returns Any. The name is for readers.
"""

Flag: TypeAlias = Any
"""`bool | Mask`: whether something holds, of one layout, or of each of many; it broadcasts as a `Number` does."""

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

Rows: TypeAlias = IntArray | Mask | slice
"""Which rows of arrays: positions, a mask or a slice."""
