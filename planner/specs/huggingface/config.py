"""A Hugging Face config.json during its translation: the keys that were read, and the origin of each value."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar, cast

from planner.errors import InputError, Mistake
from planner.specs.text import printable, quoted
from planner.specs.yaml import Node

T = TypeVar("T")

MOST: Final = 10**9
"""Largest number that a key may have, like the largest one that a field of our document may have."""
_LIMITS: Final = {"num_layers": (1, 10_000), "hidden_size": (1, MOST), "num_heads": (1, MOST)}
"""Limits of our fields that rules divide by or count to; they are within those of our document."""


_COMMAND: Final = (
    "`planner models --from {file} -o model.yaml` builds the module of the transformers library and describes it"
)


class NotInTable(InputError):
    """A model type, or a variant of it, that no row of the table reads; the library's own module may tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The keys of a config.json and the model document that is made from them.

    name, text: the file, for messages.
    values: the keys of the file.
    document: our fields, with nested documents inside.
    read: keys that were read.
    missing: required keys that the file lacks.
    notes: sentences for the user.
    inside: keys of the file inside of which the keys are, outermost first.
    """

    name: str
    text: str
    values: dict[str, Any]
    document: dict[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=lambda: {"model_type"})
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inside: tuple[str, ...] = ()
    _origins: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def get(self, key: str, default: object = None) -> object:
        """The value of a key, or `default` if it is missing or null; rules compute with the typed functions below."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def _typed(self, key: str, default: T, expected: str, *types: type) -> T:
        value: Any = self.get(key, default)
        if type(value) not in types:  # true is no number
            self.refuse(key, f"`{key}` must be {expected}, not {quoted(value)}")
        return cast("T", value)

    def count(self, key: str, default: int = 0, *, least: int = 0) -> int:
        """The whole number of a key, or `default` if it is missing or null.

        Raises:
            InputError: the value is no whole number from `least` to `MOST`.
        """
        return self._within(key, self._typed(key, default, "a whole number", int), least, MOST)

    def _within(self, key: str, value: int, least: int, most: float) -> int:
        if not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most}"
            self.refuse(key, f"`{key}` must be {limit}, not {quoted(value)}")
        return value

    def size(self, key: str, default: int = 0) -> int:
        """A count that must be positive; without a value and a default, the key is reported as missing."""
        if self.get(key, default) == 0 and self.values.get(key) is None:
            self.missing.append(".".join((*self.inside, key)))
            return 1
        return self.count(key, default, least=1)

    def counts(self, key: str, *default: int, least: int = 0, alone: bool = False) -> list[int]:
        """The list of whole numbers of a key, or `default` if it is missing or null.

        alone: whether the file may have a single number in place of a list of one.

        Raises:
            InputError: the value is no list of whole numbers from `least` to `MOST`.
        """
        value = self.get(key)
        is_one = alone and type(value) is int
        numbers: list[Any] = [value] if is_one else self.entries(key) or list(default)
        if any(type(each) is not int or not least <= each <= MOST for each in numbers):
            self.refuse(key, f"`{key}` must be whole numbers from {least} to {MOST}, not {quoted(value)}")
        return numbers

    def number(self, key: str, default: float) -> float:
        """The positive, finite number of a key, or `default` if it is missing or null.

        Raises:
            InputError: the value is no such number.
        """
        value = self._typed(key, default, "a number", int, float)
        if not 0 < value < MOST:
            self.refuse(key, f"`{key}` must be more than 0 and less than {MOST:g}, not {quoted(value)}")
        return value

    def entries(self, key: str) -> list[object]:
        """The list of a key; empty if it is missing or null.

        Raises:
            InputError: the value is not a list.
        """
        return self._typed(key, [], "a list", list)

    def flag(self, key: str, default: bool = False) -> bool:
        """The value of a key that must be true or false, or `default` if it is missing or null.

        Raises:
            InputError: the value is neither true nor false.
        """
        return self._typed(key, default, "true or false", bool)

    def part(self, key: str) -> Config:
        """The keys and values inside of a key; none if it is missing or null.

        Raises:
            InputError: the value does not hold keys and values.
        """
        values: dict[str, Any] = self._typed(key, {}, "keys and values", dict)
        return Config(name=self.name, text=self.text, values=values, missing=self.missing, inside=(*self.inside, key))

    def add(self, target: str, value: int) -> None:
        """Add a number of parameters to our field `target`."""
        self.put(target, self.ours(target) + value, "model_type")

    def add_kind(self, num_layers: int, origin: str, **fields: Any) -> None:
        """Add a kind of layers, with the fields in which they differ from the plain ones; equal kinds become one."""
        kinds = self.document.get("layers", ())
        same = [kind for kind in kinds if {**kind, "num_layers": 0} == {**fields, "num_layers": 0}]
        others = (kind for kind in kinds if kind not in same)
        number = num_layers + sum(kind["num_layers"] for kind in same)
        self.put("layers", (*others, {"num_layers": number, **fields}), origin)

    def ours(self, target: str) -> int:
        """The present value of our field `target`; 0 if it has none.

        Raises:
            InputError: the value is no whole number that can be one of our document.
        """
        document: Any = self.document
        for part in target.split("."):
            document = document.get(part, 0) if document else 0
        value, key = document, self._origins.get(target, (target,))[-1]
        if value is None and target not in _LIMITS:  # a rule may fill it; otherwise our document refuses it
            return 0
        if type(value) is not int:
            self.refuse(key, f"`{key}` must be a whole number, not {quoted(value)}")
        return self._within(key, value, *_LIMITS.get(target, (0, math.inf)))

    def put(self, target: str, value: Any, origin: str) -> None:
        """Set our field `target` (`moe.num_experts` for a nested field) from the key `origin`."""
        *parents, last = target.split(".")
        document = self.document
        for parent in parents:
            document = document.setdefault(parent, {})
        document[last] = value
        self._origins[target] = (*self.inside, origin)

    def adopt(self, prefix: str, other: Config) -> None:
        """Copy the fields of another part of the file to our document `prefix`, and add that part's notes."""
        for target, origin in other._origins.items():
            value: Any = other.document
            for part in target.split("."):
                value = value[part]
            self.put(f"{prefix}.{target}", value, "")
            self._origins[f"{prefix}.{target}"] = origin
        self.notes.extend(other.notes)

    def refuse(self, key: str, message: str, hint: str = "") -> NoReturn:
        """Raise an `InputError` that points at `key`."""
        raise InputError(self.mistake(key, message, hint))

    def unsupported(self, key: str, message: str, hint: str = "") -> NoReturn:
        """Raise a `NotInTable` that points at `key` and names the command that describes the module."""
        command = _COMMAND.format(file=shlex.quote(self.name))
        raise NotInTable(self.mistake(key, message, f"{hint}; or: {command}" if hint else command))

    def raise_if_missing(self) -> None:
        """Raise an `InputError` that names every missing required key."""
        if self.missing:
            keys = dict.fromkeys(key.split("|")[0] for key in self.missing)
            raise InputError(*(self.mistake(key, f"`{key}` is missing", "it has no default") for key in keys))

    def mistake(self, key: str, message: str, hint: str = "") -> Mistake:
        """A mistake at the first line that contains `key`."""
        where, line = self._place(tuple(key.split(".")) if "." in key else (*self.inside, key))
        return Mistake(message=printable(message, 300), where=where, hint=printable(hint, 400), source_line=line)

    def tree(self) -> Node:
        """The model document as nodes; each value has the position of the key that it was made from."""
        return self._node(self.document, "")

    def _node(self, document: dict[str, Any], prefix: str) -> Node:
        data: dict[str, Node] = {}
        for key, value in document.items():
            if isinstance(value, dict) and prefix + key not in self._origins:
                data[key] = self._node(value, f"{prefix}{key}.")
                continue
            where, line = self._place(self._origins[prefix + key])
            data[key] = _as_node(value, where, line)
        return Node(data=data, where=self.name)

    def _place(self, path: tuple[str, ...]) -> tuple[str, str]:
        """Position of a key as file:line:column, and its line; only the file if the key is not found.

        path: the keys inside of which the key is, and the key; the first `"key":` behind each of them counts.
        """
        place = -1
        for each in path:
            found = re.compile(rf'"{re.escape(each)}"\s*:').search(self.text, place + 1)
            if not found:
                return self.name, ""
            place = found.start()
        start = self.text.rfind("\n", 0, place) + 1
        line = self.text[start:].split("\n", 1)[0]
        return f"{self.name}:{self.text.count(chr(10), 0, place) + 1}:{place - start + 1}", printable(line)


def _as_node(value: Any, where: str, line: str) -> Node:
    """A value as a node; a value of an unsupported type stays text, so that the message can show it."""
    data: Any = value if isinstance(value, str | int | float) else str(value)
    if isinstance(value, tuple):
        data = tuple(_as_node(each, where, line) for each in value)
    elif isinstance(value, dict):
        data = {key: _as_node(each, where, line) for key, each in value.items()}
    return Node(data=data, where=where, key_where=where, source_line=line)
