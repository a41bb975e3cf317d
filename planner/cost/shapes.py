"""Price the layers of many configurations at once: configurations with the same shape of layer are priced once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from planner.layout import LayerDegrees
    from planner.numbers import Number

T = TypeVar("T")

_FEW: Final = 128  # fewer configurations are priced directly: finding equal shapes would take as long
_LARGEST: Final = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    """Distinct combinations of the degrees that set the shape of a layer.

    The class has no other degrees, so that a price that reads one fails.
    """

    tp: Number
    cp: Number
    ep: Number
    etp: Number
    mbs: Number
    sp: Number
    segment: Number


LAYER_KEYS: Final = tuple(f.name for f in fields(_Shapes))
"""Names of the degrees that set the shape of a layer."""


def alone(layout: LayerDegrees, tp: Number = 1) -> LayerDegrees:
    """Degrees of a device that holds whole layers, or of `tp` ranks, without context or expert parallelism."""
    return _Shapes(tp=tp, cp=1, ep=1, etp=1, mbs=layout.mbs, sp=0, segment=layout.segment)


def by_shape(layout: LayerDegrees, price: Callable[[LayerDegrees], T]) -> T:
    """The result of `price` for the layers of each configuration, computed once for each distinct shape of a layer.

    The result of `price` may contain numbers and arrays in dataclasses, mappings and tuples. Prices broadcast element
    by element, so the result equals `price(layout)` to the last bit. Configurations that are not arrays of one length
    are priced directly.
    """
    shape = _Shapes(**{key: getattr(layout, key) for key in LAYER_KEYS})
    columns = [np.asarray(getattr(shape, key)) for key in LAYER_KEYS]
    size = columns[0].size
    if size < _FEW or any(column.shape != (size,) for column in columns):
        return price(shape)
    first, position = distinct_rows(columns)
    if len(first) == size:
        return price(shape)
    distinct = _Shapes(**{key: column[first] for key, column in zip(LAYER_KEYS, columns, strict=True)})
    return spread(price(distinct), position)


def distinct_rows(columns: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Position of each distinct row in sorted order, and for each row the index of its distinct row.

    columns: the columns of the rows, each an array of n whole numbers from 0 on.

    Source: equal to the result of numpy.unique on the rows; each row is encoded as one number.
    """
    code, span = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        if span * size > _LARGEST:
            code, span = np.unique(code, return_inverse=True)[1], len(code)
        code, span = code * size + column, span * size
    _, first, position = np.unique(code, return_index=True, return_inverse=True)
    return first, position.ravel()


def spread(price: T, position: NDArray[np.int64]) -> T:
    """The prices at these positions.

    Arrays in dataclasses, mappings and tuples are indexed, and plain numbers do not change.
    """
    chosen: T = by_part(lambda part: part.take(position) if np.ndim(part) else part, price)
    return chosen


def by_part(of_parts: Callable[..., Any], *prices: Any) -> Any:
    """Prices of one form as one price: `of_parts` joins equal parts of their dataclasses, mappings and tuples.

    Source: derived here.
    """
    first = prices[0]
    if isinstance(first, tuple):
        return tuple(by_part(of_parts, *parts) for parts in zip(*prices, strict=True))
    if isinstance(first, Mapping):
        return {key: by_part(of_parts, *(each[key] for each in prices)) for key in first}
    if is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in fields(first)]
        return replace(first, **{name: by_part(of_parts, *(getattr(each, name) for each in prices)) for name in names})
    return of_parts(*prices)
