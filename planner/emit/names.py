"""Documents beside the tables: names of a program, and patterns of its keys that no setting prices."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from planner.emit.settings import field_of, fixed, not_carried
from planner.emit.target import Doubt, Refusal, Target, matches
from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from planner.emit.target import Given, How, Setting, Value, Values
    from planner.plan import Plan


def names_beside(module: str) -> Any:
    """The YAML document beside a module; module: the module's file."""
    text = Path(module).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe loader


def only_read(rows: Mapping[str, Any], *reads: Callable[[Given], Mapping[str, Any]]) -> Target:
    """A program whose files are read and never written; rows: its document; reads: read a part of its fields each."""
    return Target(
        name=rows["name"],
        program=rows["program"],
        settings=tuple(replace(not_carried(*listed(rows["says"])), read=each) for each in reads),
        command=lambda values, plan, how, place: "",  # noqa: ARG005 - nothing is emitted
        ignores=listed(rows["ignores"]),
        decides=decisive(rows.get("decides", ())),
        switches=listed(rows["switches"]),
    )


_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader takes a tenth of the time


def listed(lines: Sequence[str]) -> tuple[str, ...]:
    """Keys or patterns from lines that hold several of them, with blanks between."""
    return tuple(each for line in lines for each in line.split())


def decisive(rows: Sequence[Mapping[str, str]]) -> dict[str, Doubt]:
    """Pattern of a key -> its doubt, from rows of patterns (blanks between them), reason and field."""
    return {key: Doubt(row["why"], row.get("field", "")) for row in rows for key in row["keys"].split()}


def refusals(rows: Mapping[str, Mapping[str, Any]]) -> tuple[Refusal, ...]:
    """Refusals from field -> the values that the program has (`only`), the reason, and the option that helps (`pin`).

    A row may name further fields that have a meaning only with other values (`says`).
    """

    def conditions(path: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
        document, _, name = path.partition(".")
        first = str(row["only"][0]).lower()
        way = row.get("pin") or (f"--pin {name}={first}" if document == "layout" else f"--set {path}={first}")
        says = [path, *(f"{document}.{each}" for each in listed(row.get("says", ())))]
        return {"when": {path: ["not in", row["only"]]}, "shows": [path], "why": row["why"], "way": way, "says": says}

    return refused([conditions(path, row) for path, row in rows.items()])


def refused(rows: Sequence[Mapping[str, Any]]) -> tuple[Refusal, ...]:
    """The refusals of a document: plans for which all conditions `when` of a row hold, `why`, and the option to use.

    A condition is a field with a sign and a value, or with another field of the layout; fields of a part that the plan
    has not are null. `shows`: fields whose values stand before the reason.
    """

    def refusal(row: Mapping[str, Any]) -> Refusal:
        shows = row.get("shows", [path for path in row["when"] if path.startswith(("layout.", "training."))])

        def fault(plan: Plan) -> tuple[str, str] | None:
            if not holds(row["when"], plan):
                return None
            told = ", ".join([*(f"{path} is {_told(field_of(plan, path))}" for path in shows), f"and {row['why']}"])
            return told.removeprefix("and "), f"plan again with {row['way']}"

        return Refusal(says=tuple(row.get("says", ())), fault=fault)

    return tuple(map(refusal, rows))


def _told(value: Any) -> Any:
    return " and ".join(dict.fromkeys(map(str, value))) if isinstance(value, tuple) else value


def holds(conditions: Mapping[str, Sequence[Any]], plan: Plan) -> bool:
    """Whether all conditions of a document hold for a plan."""

    def is_so(path: str, sign: str, value: Any) -> bool:
        found = field_of(plan, path)
        value = field_of(plan, value) if str(value).startswith("layout.") else value
        return bool(_SIGNS[sign](found, value))

    return all(is_so(path, *condition) for path, condition in conditions.items())


def implied(rows: Sequence[Mapping[str, Any]]) -> tuple[Setting, ...]:
    """Settings of a document: `keys` that have these values if all conditions `when` hold, as in `refused`."""
    return tuple(fixed(row["keys"], partial(holds, row["when"])) for row in rows)


def _is_among(found: Any, values: Sequence[Any]) -> bool:
    return found in [tuple(each) if isinstance(each, list) else each for each in values]


def _are_like(found: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(set(found)) == 1 and matches(found[0], patterns)


_SIGNS: Final[dict[str, Callable[[Any, Any], object]]] = {
    ">": operator.gt,
    "<": operator.lt,
    "is": operator.eq,
    "not": operator.ne,
    "%": operator.mod,
    "in": _is_among,
    "not in": lambda found, values: not _is_among(found, values),
    "like": _are_like,
    "unlike": lambda found, patterns: not _are_like(found, patterns),
}
"""`like` and `unlike`: whether all stages have one policy, which fits one of several patterns."""


def still_open(rows: Mapping[str, tuple[str, str]], how: How) -> dict[str, str]:
    """Placeholder -> meaning, for options of the run that nobody gave; rows: option -> placeholder and meaning."""
    return {key: text for name, (key, text) in rows.items() if not (how.smoke or getattr(how.arguments, name))}


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
