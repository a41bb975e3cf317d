"""From nodes to documents: pydantic's findings in plain words, at the line of the key."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args

from pydantic import ValidationError, WithJsonSchema

from planner.errors import InputError, Mistake
from planner.specs.document import Document
from planner.specs.settings import with_value
from planner.specs.text import any_of, closest, did_you_mean, quoted
from planner.units import whole_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic_core import ErrorDetails

    from planner.specs.yaml import Node

D = TypeVar("D", bound=Document)
Path: TypeAlias = "tuple[str | int, ...]"
"""Position of a value in a document: keys, and indices of lists."""

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_SUBJECT = re.compile(r"([a-z_]+): (.*)", re.DOTALL)


def validate(document: type[D], tree: Node) -> D:
    """The checked document from `tree`; whole numbers may be written like 128k and 4M (`planner.units.whole_of`).

    Raises:
        InputError: every mistake that the document's own rules find, at the position of its key.
    """
    try:
        return document.model_validate(tree.plain)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    counted = tree
    for each in errors:
        path, text = each["loc"], each["input"]
        if each["type"] == "int_type" and (count := whole_of(text, str(path[-1]))) != text:
            counted = with_value(counted, path, replace(_node_at(tree, path), data=count))
    if counted is tree:
        raise InputError(*_mistakes(document, tree, errors)) from None
    return validate(document, counted)


def fields_at(document: type[Document], path: Path) -> Mapping[str, Any]:
    """The fields of the nested document at `path`; empty if there is none."""
    current: type[Document] | None = document
    for step in path:
        if current is None:
            return {}
        field = current.model_fields.get(str(step))
        if field is not None:
            current = _document_in(field.annotation)
    return current.model_fields if current else {}


def _document_in(annotation: Any) -> type[Document] | None:
    if isinstance(annotation, type) and issubclass(annotation, Document):
        return annotation
    return next((found for each in get_args(annotation) if (found := _document_in(each))), None)


def _node_at(tree: Node, path: Path) -> Node:
    """The deepest node along `path`."""
    for step in path:
        if isinstance(tree.data, dict) and step in tree.data:
            tree = tree.data[str(step)]
        elif isinstance(tree.data, tuple) and isinstance(step, int) and step < len(tree.data):
            tree = tree.data[step]
        else:
            break
    return tree


def _mistakes(document: type[Document], tree: Node, errors: list[ErrorDetails]) -> Iterable[Mistake]:
    """One mistake for each error; a misspelt required key gives one mistake, not two.

    A list with wrong entries is not reported as too short, because corrected entries may make it long enough.
    """
    all_missing = {tuple(error["loc"]) for error in errors if error["type"] == "missing"}
    missing = set(all_missing)
    meant: dict[Path, str] = {}
    for error in errors:
        if error["type"] == "extra_forbidden":
            *parent, key = error["loc"]
            candidates = [str(path[-1]) for path in missing if path[:-1] == tuple(parent)]
            close = closest(str(key), candidates)
            if close:
                meant[tuple(error["loc"])] = close[0]
                missing.discard((*parent, close[0]))
    wrong_inside = {tuple(error["loc"][:depth]) for error in errors for depth in range(len(error["loc"]))}
    follows = {"missing": {*all_missing} - missing, "too_short": wrong_inside}
    kept = [error for error in errors if tuple(error["loc"]) not in follows.get(error["type"], ())]
    return dict.fromkeys(_mistake(document, tree, each, meant.get(tuple(each["loc"]))) for each in kept)


def _mistake(document: type[Document], tree: Node, error: ErrorDetails, meant: str | None) -> Mistake:
    path = tuple(step for step in error["loc"] if step != "[key]")
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return _rule_broken(tree, path, str(context["error"]))
    name = ".".join(str(step + 1) if isinstance(step, int) else step for step in path)
    node = _node_at(tree, path)
    fields = fields_at(document, path[:-1])
    if kind == "missing":
        return node.mistake(f"`{name}` is missing", _description(fields, path))
    if kind == "extra_forbidden":
        parts = {key: _document_in(field.annotation) for key, field in fields.items()}
        inside = [f"`{key}.{path[-1]}`" for key, part in parts.items() if part and path[-1] in part.model_fields]
        known = [meant] if meant else fields
        otherwise = f"it is {any_of(inside)}" if inside else f"keys here are {', '.join(fields)}"
        hint = did_you_mean(str(path[-1]), known, otherwise=otherwise)
        return node.mistake(f"unknown key {quoted(name)}", hint)
    if kind == "literal_error":
        return _not_one_of(node, name, error, key=error["loc"][-1] == "[key]")
    message, hint = _explained(kind, name, error["input"], context)
    return node.mistake(message or f"`{name}`: {error['msg']}", hint or _range(fields, path))


def _rule_broken(tree: Node, path: Path, message: str) -> Mistake:
    """A mistake from a rule of ours; a message about several keys begins with the key to blame (`num_heads: ...`)."""
    node = _node_at(tree, path)
    subject = _SUBJECT.fullmatch(message)
    if subject and isinstance(node.data, dict):
        node, message = _node_at(node, (subject[1],)), f"`{subject[1]}`: {subject[2]}"
    elif path:
        message = f"`{path[-1]}`: {message}"
    return node.mistake(message)


def _not_one_of(node: Node, name: str, error: ErrorDetails, *, key: bool) -> Mistake:
    allowed = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    found = error["input"]
    subject = f"unknown key {quoted(name)}" if key else f"`{name}` cannot be {quoted(found)}"
    known = f"one of {', '.join(allowed)}"
    close = did_you_mean(str(found), allowed)
    return node.mistake(subject, f"{close} It is {known}" if close else known)


def _explained(kind: str, name: str, found: Any, context: Mapping[str, Any]) -> tuple[str, str]:
    if kind in _EXPECTED:
        whole = isinstance(found, float) and found.is_integer() and abs(found) < 2**53
        hint = f"write {int(found)}" if whole and kind.startswith("int") else ""
        return f"`{name}` must be {_EXPECTED[kind]}, not {quoted(found)}", hint
    if kind in {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}:
        bound = _BOUNDS[next(key for key in context if key in _BOUNDS)]
        return f"`{name}` must be {bound} {next(iter(context.values())):.15g}, not {quoted(found)}", ""
    if kind == "string_pattern_mismatch":
        return f"`{name}` cannot be {quoted(found)}", "1 to 64 letters, digits, dots, underscores or hyphens"
    if kind == "too_short":
        least = context["min_length"]
        return f"`{name}` needs at least {'one entry' if least == 1 else f'{least} entries'}", ""
    return "", ""


def _range(fields: Mapping[str, Any], path: Path) -> str:
    field = fields.get(str(path[-1])) if path else None
    bounds = [
        f"{word} {value:.15g}"
        for constraint in (field.metadata if field else ())
        for key, word in _BOUNDS.items()
        if (value := getattr(constraint, key, None)) is not None
    ]
    return f"valid: {' and '.join(bounds)}" if bounds else _description(fields, path)


def _description(fields: Mapping[str, Any], path: Path) -> str:
    """A field's description, and the spelling of a quantity."""
    field = fields.get(str(path[-1])) if path else None
    if field is None:
        return ""
    schemas = [each.json_schema or {} for each in field.metadata if isinstance(each, WithJsonSchema)]
    examples = [f"write it as in `{path[-1]}: {each}`" for schema in schemas for each in schema.get("examples", ())]
    return "; ".join([*filter(None, [field.description]), *examples])
