"""Documents beside the tables: names of a program, and patterns of its keys that no setting prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from planner.emit.target import Doubt, matches, only
from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planner.emit.target import Refusal, Value, Values


def names_beside(module: str) -> Any:
    """The YAML document beside a module; module: the module's file."""
    text = Path(module).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe loader


_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader takes a tenth of the time


def listed(lines: Sequence[str]) -> tuple[str, ...]:
    """Keys or patterns from lines that hold several of them, with blanks between."""
    return tuple(each for line in lines for each in line.split())


def decisive(rows: Sequence[Mapping[str, str]]) -> dict[str, Doubt]:
    """Pattern of a key -> its doubt, from rows of patterns (blanks between them), reason and field."""
    return {key: Doubt(row["why"], row.get("field", "")) for row in rows for key in row["keys"].split()}


def refusals(rows: Mapping[str, Mapping[str, Any]]) -> tuple[Refusal, ...]:
    """Refusals from field -> the values that the program has (`only`), the reason, and the option that helps.

    A row may name further fields that have a meaning only with other values (`says`).
    """

    def refusal(path: str, row: Mapping[str, Any]) -> Refusal:
        values = (tuple(each) if isinstance(each, list) else each for each in row["only"])
        found = only(path, *values, why=row["why"], pin=row.get("pin", ""))
        document = path.partition(".")[0]
        return replace(found, says=(path, *(f"{document}.{each}" for each in listed(row.get("says", ())))))

    return tuple(refusal(path, row) for path, row in rows.items())


def translated(values: Values, rows: Mapping[str, Any]) -> dict[str, Value]:
    """Keys and values of one program in the keys of another, by the rows of a document.

    said: key -> value -> keys of the other program; renamed: key -> its name there; drops: patterns of keys that the
    other program has no use for. strict: keys of `said` that have no other values. Other keys keep their names.

    Raises:
        InputError: a key of `strict` has another value.
    """
    found: dict[str, Value] = {}
    for key, value in values.items():
        known = {str(each).lower(): keys for each, keys in rows.get("said", {}).get(key, {}).items()}
        if (own := str(value).lower()) in known:  # a shell says true, and YAML True
            found |= known[own]
        elif key in rows.get("strict", ()):
            hint = f"known: {', '.join(each for each in known if each != 'none')}"
            raise InputError(f"{str(value)[:40]!r} has no price here", where=key, hint=hint)
        elif key in rows["renamed"] or not matches(key, listed(rows.get("drops", ()))):
            found[rows["renamed"].get(key, key)] = value
    return found
