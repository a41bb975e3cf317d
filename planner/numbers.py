"""Types of the numbers in formulas and in the search: a number for one layout, or an array for many layouts."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray


class _OneNumber:
    """Lets pydantic, which reads plans, accept one number where a formula may also take an array."""

    def __get_pydantic_core_schema__(self, _: Any, handler: Any) -> Any:
        return handler(int | float)


Number: TypeAlias = Annotated[Any, _OneNumber()]
"""`float | NDArray[Any]`: an int or float, or an array of them that broadcasts against the others.

One formula prices one layout (numbers) or a hundred thousand layouts (arrays). For mypy the type is Any. With the
union, mypy reports more than two hundred places in which only one of the two types can occur (`prices.layer[index]`,
`int(degrees.tp)`), or NumPy itself returns Any. The name `Number` is for readers.
"""

Flag: TypeAlias = Any
"""`bool | Mask`: whether a condition holds, for one layout or for each of many; it broadcasts as a `Number` does."""

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

Rows: TypeAlias = IntArray | Mask | slice
"""A selection of rows of an array: positions, a mask or a slice."""
