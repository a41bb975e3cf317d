"""The base of every input document: frozen and strict, with quantities that have units."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from planner.units import KINDS, UNITS, exact_quantity, parse_quantity

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXAMPLES: Final = {
    "bytes": "80 GiB",
    "bytes_per_second": "25 GB/s",
    "flops_per_second": "312 TFLOP/s",
    "seconds": "8 us",
    "watts": "700 W",
    "usd_per_hour": "2.50 USD/h per device",
    "usd": "2 MUSD",
}


class Document(BaseModel, defer_build=True):
    """A frozen document; it refuses unknown keys and coerces nothing silently.

    Its validator is built when the first document is read: a command builds only those that it uses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="null")

    @classmethod
    def of(cls, source: object, **fields: Any) -> Self:
        """The document with `fields`; attributes of `source` with the same names are the others."""
        return cls(**{name: getattr(source, name) for name in cls.model_fields if name not in fields}, **fields)


_LARGEST: Final = 1e24
_SMALLEST: Final = 1e-40
"""Limits of the numbers in an input document, apart from 0. Beyond these, a forecast could become infinite."""


class InputDocument(Document):
    """A document that a user writes; numbers beyond `_LARGEST` and `_SMALLEST` are refused.

    One function checks the numbers of all fields, because building a validator for each field takes a third of the
    time in which a plan is read.
    """

    def _mistakes(self) -> Iterator[str]:
        """Contradictions between fields, in words that name a field; the first one is reported."""
        yield from ()

    def _sizes(self) -> Iterator[str]:
        """Numbers that are too large or too small, also inside lists and mappings."""
        for key, value in self:
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
            sizes = [abs(each) for each in parts if isinstance(each, int | float)]
            if any(each > _LARGEST for each in sizes):
                yield f"{key}: must not be more than 1e24"
            if any(0 < each < _SMALLEST for each in sizes):
                yield f"{key}: must be 0, or at least 1e-40"

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for mistake in chain(self._sizes(), self._mistakes()):
            raise ValueError(mistake)
        return self


def _read(kind: str) -> BeforeValidator:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str):
            examples = ", ".join(list(UNITS[kind])[:7])
            raise ValueError(f"{value!r} has no unit; write a number and a unit ({examples})")  # noqa: TRY004
        return parse_quantity(value, kind)

    return BeforeValidator(read)


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("must be more than zero")
    return value


def _at_least(least: float) -> AfterValidator:
    """A limit for rates; with slower devices and links, bounds of the search lose their digits."""

    def check(value: float) -> float:
        if value < least:
            raise ValueError(f"must be at least {least:g} per second")
        return value

    return AfterValidator(check)


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError("must be at least zero")
    return value


def _quantity(kind: str) -> Any:
    units = "|".join(sorted(UNITS[kind], key=len, reverse=True))
    schema = {
        "type": "string",
        "description": f"a number and a unit of {KINDS[kind]}",
        "examples": [_EXAMPLES[kind]],
        "pattern": rf"^\s*[0-9.]+([eE][+-]?[0-9]+)?\s*({units})(\s+per device)?\s*$",
    }
    return (
        _read(kind),
        PlainSerializer(lambda value: exact_quantity(value, kind)),
        WithJsonSchema(schema),
    )


Bytes = Annotated[float, *_quantity("bytes"), AfterValidator(_positive)]
Bandwidth = Annotated[float, *_quantity("bytes_per_second"), _at_least(1)]
FlopsPerSecond = Annotated[float, *_quantity("flops_per_second"), _at_least(1e6)]
Seconds = Annotated[float, *_quantity("seconds"), AfterValidator(_not_negative)]
Watts = Annotated[float, *_quantity("watts"), AfterValidator(_positive)]
UsdPerHour = Annotated[float, *_quantity("usd_per_hour"), AfterValidator(_positive)]
Usd = Annotated[float, *_quantity("usd"), AfterValidator(_positive)]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
"""A name that can be part of file names, job names and scripts: letters, digits, dot, underscore and hyphen."""
