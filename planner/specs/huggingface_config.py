"""A Hugging Face config.json during its translation: the keys that were read, and the origin of each value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from planner.errors import InputError, Mistake
from planner.specs.text import printable, quoted
from planner.specs.yaml import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The keys of a config.json and the model document that is made from them.

    name, text: the file, for messages.
    values: the keys of the file.
    document: our fields, with nested documents inside.
    read: keys that were read.
    missing: required keys that the file lacks.
    notes: sentences for the user.
    """

    name: str
    text: str
    values: dict[str, Any]
    document: dict[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=lambda: {"model_type"})
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _origins: dict[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` if it is missing or null."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int = 0) -> int:
        """The value of a key that must be a whole number, or `default` if it is missing or null.

        Raises:
            InputError: the value is not a whole number.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(key, f"`{key}` must be a whole number, not {quoted(value)}")
        return value

    def entries(self, key: str) -> list[Any]:
        """The value of a key that must be a list; empty if it is missing or null.

        Raises:
            InputError: the value is not a list.
        """
        value = self.get(key, [])
        if not isinstance(value, list):
            self.refuse(key, f"`{key}` must be a list, not {quoted(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """The value of a key that must be true or false, or `default` if it is missing or null.

        Raises:
            InputError: the value is neither true nor false.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"`{key}` must be true or false, not {quoted(value)}")
        return value

    def add(self, target: str, value: int) -> None:
        """Add a number of parameters to our field `target`."""
        self.put(target, self.filled(target) + value, "model_type")

    def add_kind(self, num_layers: int, origin: str, **fields: Any) -> None:
        """Add a kind of layers, with the fields in which they differ from the other layers."""
        known = [
            kind for kind in self.document.get("layers", ()) if {**kind, "num_layers": 0} != {**fields, "num_layers": 0}
        ]
        same = sum(kind["num_layers"] for kind in self.document.get("layers", ()) if kind not in known)
        self.put("layers", (*known, {"num_layers": num_layers + same, **fields}), origin)

    def filled(self, target: str) -> int:
        """The present value of our field `target`; 0 if it is not a whole number, which is reported later."""
        value = self.document.get(target)
        return value if type(value) is int else 0

    def put(self, target: str, value: Any, origin: str) -> None:
        """Set our field `target` (`moe.num_experts` for a nested field) from the key `origin`."""
        *parents, last = target.split(".")
        document = self.document
        for parent in parents:
            document = document.setdefault(parent, {})
        document[last] = value
        self._origins[target] = origin

    def adopt(self, prefix: str, other: Config) -> None:
        """Copy the fields of another part of the file to our document `prefix`, and add that part's notes."""
        for target, origin in other._origins.items():
            value: Any = other.document
            for part in target.split("."):
                value = value[part]
            self.put(f"{prefix}.{target}", value, origin)
        self.notes.extend(other.notes)

    def refuse(self, key: str, message: str, hint: str = "") -> NoReturn:
        """Raise an `InputError` that points at `key`."""
        raise InputError(self.mistake(key, message, hint))

    def raise_if_missing(self) -> None:
        """Raise an `InputError` that names every missing required key."""
        if self.missing:
            keys = [key.split("|")[0] for key in self.missing]
            raise InputError(
                *(Mistake(message=f"`{key}` is missing", where=self.name, hint="it has no default") for key in keys)
            )

    def mistake(self, key: str, message: str, hint: str = "") -> Mistake:
        """A mistake at the first line that contains `key`."""
        where, line = self._place(key)
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

    def _place(self, key: str) -> tuple[str, str]:
        """Position of the first `"key":` as file:line:column, and its line; only the file if the key is not found."""
        found = re.search(rf'"{re.escape(key)}"\s*:', self.text)
        if not found:
            return self.name, ""
        before = self.text[: found.start()]
        start = before.rfind("\n") + 1
        line = self.text[start:].split("\n", 1)[0]
        return f"{self.name}:{before.count(chr(10)) + 1}:{found.start() - start + 1}", printable(line)


def _as_node(value: Any, where: str, line: str) -> Node:
    """A value as a node; a value of an unsupported type stays text, so that the message can show it."""
    data: Any = value if isinstance(value, str | int | float) else str(value)
    if isinstance(value, tuple):
        data = tuple(_as_node(each, where, line) for each in value)
    elif isinstance(value, dict):
        data = {key: _as_node(each, where, line) for key, each in value.items()}
    return Node(data=data, where=where, key_where=where, source_line=line)
