"""The strict YAML reader: one document, plain values, and the position of every key and value.

The reader processes PyYAML's event stream in pure Python, so limits apply before anything is built. Scalars follow YAML
1.2: `1e9` is a number and `no` is text. The reader refuses features by which a document can mean something other than
it seems to: duplicate keys, aliases, anchors, tags, merge keys, several documents, numbers with leading zeros.
"""

from __future__ import annotations

import math
import re
import shlex
import stat
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import yaml

from planner.errors import EnvironmentProblem, InputError, Mistake
from planner.specs.files import MAX_LARGE_BYTES, kind_of
from planner.specs.text import printable, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BYTES: Final = 2**20
MAX_DEPTH: Final = 32
MAX_NODES: Final = 20_000
MAX_MISTAKES: Final = 20
_MAX_DIGITS: Final = 40

_FAST: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML was built with it

Scalar: TypeAlias = "str | int | float | bool | None"

_LINE_BREAK: Final = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # as PyYAML counts lines
_NULL: Final = re.compile(r"null|Null|NULL|~|")
_TRUE: Final = re.compile(r"true|True|TRUE")
_FALSE: Final = re.compile(r"false|False|FALSE")
_INT: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_NOT_FINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value of a document, and its position.

    data: a scalar, a dictionary of nodes or a tuple of nodes.
    where: "file:line:column" of the value, or the command-line option that set it.
    key_where: position of the value's key; empty for a list entry and for the document itself.
    source_line: the line of the file, for messages.
    """

    data: Scalar | dict[str, Node] | tuple[Node, ...]
    where: str
    key_where: str = ""
    source_line: str = ""

    @property
    def plain(self) -> Any:
        """The value without positions; lists become tuples, as documents declare them."""
        if isinstance(self.data, dict):
            return {key: node.plain for key, node in self.data.items()}
        if isinstance(self.data, tuple):
            return tuple(node.plain for node in self.data)
        return self.data

    @property
    def entries(self) -> dict[str, Node]:
        """The values of a dictionary, which the node is known to be."""
        assert isinstance(self.data, dict)
        return self.data

    def mistake(self, message: str, hint: str = "") -> Mistake:
        """A mistake at this position."""
        return Mistake(
            message=printable(message, 300),
            where=self.key_where or self.where,
            hint=printable(hint, 400),
            source_line=self.source_line,
        )


def _is_number(event: Any) -> bool:
    """Whether `!!float` stands before a scalar, as YAML 1.1 needs it before 1e-5; the only tag that is read."""
    return isinstance(event, yaml.ScalarEvent) and event.tag == "tag:yaml.org,2002:float"


def as_node(data: Any, where: str) -> Node:
    """Plain data, for example from JSON, as a document whose values all have the position `where`."""
    if isinstance(data, dict):
        return Node(data={key: as_node(value, where) for key, value in data.items()}, where=where)
    is_list = isinstance(data, list | tuple)
    return Node(data=tuple(as_node(each, where) for each in data) if is_list else data, where=where)


def read_yaml(path: Path, name: str = "") -> Node:
    """Read one document, a mapping, from a regular file; messages call the file `name`.

    Raises:
        InputError: the file is missing, too large, no regular file, or no valid document; all mistakes at once.
        EnvironmentProblem: the file cannot be read.
    """
    shown = printable(name or str(path))
    text = document_text(path, shown)
    try:
        return parse_yaml(text, shown)
    except InputError:
        if kind := kind_of(path.name, text):
            raise _wrong_kind(path, shown, kind) from None
        raise


@cache
def shipped_yaml(path: Path, name: str = "") -> Node:
    """Read one of the project's own documents, once in a process.

    libyaml gives the same events 15 times faster, but other words for a mistake, so users' documents do without it.
    """
    return _Reader(path.read_text(encoding="utf-8"), name or path.name, loader=_FAST).read()


class WrongKind(InputError):
    """The file is a plan or a script, and a document is expected."""


def document_text(path: Path, shown: str) -> str:
    """The text of a model, cluster, training, calibration or configuration document; messages call the file `shown`.

    Raises:
        WrongKind: the file is a plan.
        InputError: as `read_text`.
        EnvironmentProblem: the file cannot be read.
    """
    text = read_text(path, shown, MAX_LARGE_BYTES)
    if kind_of(path.name, text) == "a plan":
        raise _wrong_kind(path, shown, "a plan")
    if (num_bytes := path.stat().st_size) > MAX_BYTES:
        raise _too_large(shown, num_bytes, MAX_BYTES)
    return text


def _wrong_kind(path: Path, shown: str, kind: str) -> WrongKind:
    how = "planner explain" if kind == "a plan" else "planner explain --from"
    hint = f"`{how} {shlex.quote(str(path))}` explains it"
    return WrongKind(f"{shown} is {kind}; a document is expected here", hint=printable(hint))


def _too_large(shown: str, num_bytes: int, most: int) -> InputError:
    return InputError(f"{shown} has {num_bytes} bytes; a document has at most {most}")


def read_text(path: Path, shown: str, most: int = MAX_BYTES) -> str:
    """The text of a regular file of at most `most` bytes; messages call the file `shown`.

    Raises:
        InputError: the file is missing, too large, no regular file, or not UTF-8.
        EnvironmentProblem: the file cannot be read.
    """
    try:
        mode, num_bytes = (status := path.stat()).st_mode, status.st_size
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise InputError(f"{shown} is {kind}", hint="name a file")
        if num_bytes > most:
            raise _too_large(shown, num_bytes, most)
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        raise InputError(f"{shown} does not exist", hint="check the path") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {shown}: {error.strerror}") from None
    return _decode(content, shown)


def parse_yaml(text: str, name: str, *, is_foreign: bool = False) -> Node:
    """Read one document, a mapping, from text; another program's may give a key twice with the same scalar.

    Raises:
        InputError: the text is not a valid document; all mistakes at once, at most `MAX_MISTAKES`.
    """
    node = _Reader(text, name, is_foreign=is_foreign).read()
    if not isinstance(node.data, dict):
        raise InputError(
            Mistake(
                message=f"expected keys and values (`key: value`), found {quoted(node.plain)}",
                where=node.where,
                source_line=node.source_line,
            )
        )
    return node


def parse_value(text: str, where: str) -> Node:
    """Read the value of a command-line option by the rules of `parse_yaml`; every position is `where`.

    Raises:
        InputError: the text is not a value.
    """
    return _Reader(text, where, is_option=True).read()


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise InputError("this is not UTF-8 text", where=f"{name}:{line}:{column}", hint="save it as UTF-8") from None


class _Reader:
    """Builds the nodes of one document from events, and collects mistakes."""

    def __init__(
        self, text: str, name: str, *, is_option: bool = False, is_foreign: bool = False, loader: Any = yaml.SafeLoader
    ) -> None:
        self._text = text
        self._loader = loader
        self._name = name
        self._is_option = is_option
        self._is_foreign = is_foreign
        self._lines = [] if is_option else _LINE_BREAK.split(text)
        self._mistakes: list[Mistake] = []
        self._num_nodes = 0

    def read(self) -> Node:
        """The document's node.

        Raises:
            InputError: every mistake of the document.
        """
        events = self._events()
        root: Node | None = None
        for event in events:
            if not isinstance(event, yaml.NodeEvent):
                continue
            if root is not None:
                self._add(event.start_mark, "a second document begins here", "keep one document in a file")
                break
            root = self._node(event, events, depth=1)
        if root is None and not self._mistakes:
            what = "value" if self._is_option else "document"
            self._mistakes.append(Mistake(message=f"the {what} is empty", where=self._where(0, 0)))
        if self._mistakes:
            raise InputError(*self._mistakes)
        assert root is not None
        return root

    def _events(self) -> Iterator[Any]:
        try:
            yield from yaml.parse(self._text, Loader=self._loader)
        except yaml.reader.ReaderError as error:
            before = _LINE_BREAK.split(self._text[: error.position])
            self._stop(len(before) - 1, len(before[-1]), f"the character {error.character:#04x} may not stand in YAML")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line, mark.column) if mark else (0, 0)
            problem = error.problem or error.context or ""
            hint = "indent with blanks: YAML takes no tab" if "'\\t'" in problem else ""
            self._stop(line, column, f"this is not valid YAML: {problem}", hint)
        except (yaml.YAMLError, ValueError, OverflowError):  # PyYAML lets some bad escapes through as ValueError
            self._stop(0, 0, "this is not valid YAML: a bad escape or directive")

    def _node(self, event: Any, events: Iterator[Any], depth: int) -> Node:
        self._num_nodes += 1
        line, column = event.start_mark.line, event.start_mark.column
        if depth > MAX_DEPTH:
            self._stop(line, column, f"nested more than {MAX_DEPTH} levels deep")
        if self._num_nodes > MAX_NODES:
            self._stop(line, column, f"more than {MAX_NODES} values")
        self._check_plain(event)
        data: Any = None
        if isinstance(event, yaml.ScalarEvent):
            data = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            data = self._sequence(events, depth)
        elif isinstance(event, yaml.MappingStartEvent):
            data = self._mapping(events, depth)
        return Node(data=data, where=self._where(line, column), source_line=self._line(line))

    def _check_plain(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            self._add(event.start_mark, f"aliases are not read: `*{event.anchor}`", "write the value out")
        elif event.anchor is not None:
            self._add(event.start_mark, f"anchors are not read: `&{event.anchor}`", "remove it")
        elif event.tag is not None and not _is_number(event):
            self._add(event.start_mark, f"tags are not read: {quoted(event.tag)}", "remove it")

    def _sequence(self, events: Iterator[Any], depth: int) -> tuple[Node, ...]:
        items = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._node(event, events, depth + 1))
        return tuple(items)

    def _mapping(self, events: Iterator[Any], depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event, events, depth)
            value = self._node(next(events), events, depth + 1)
            if key is None:
                continue
            line, column = event.start_mark.line, event.start_mark.column
            if key in entries:
                first = entries[key].key_where.removeprefix(f"{self._name}:").split(":")[0]
                if not self._is_foreign or repr(entries[key].data) != repr(value.data):
                    words = f"{quoted(key)} is given twice, first in line {first}"
                    self._add(event.start_mark, words, "keep one of them")
                continue
            entries[key] = Node(
                data=value.data, where=value.where, key_where=self._where(line, column), source_line=self._line(line)
            )
        return entries

    def _key(self, event: Any, events: Iterator[Any], depth: int) -> str | None:
        if not isinstance(event, yaml.ScalarEvent):
            self._add(event.start_mark, "a key must be a plain word")
            self._node(event, events, depth + 1)
            return None
        self._check_plain(event)
        if event.value == "<<" and event.implicit[0]:
            self._add(event.start_mark, "merge keys (`<<`) are not read", "write the keys out")
            return None
        self._check_text(event)
        return str(event.value)

    def _scalar(self, event: Any) -> Scalar:
        text: str = event.value
        if not event.implicit[0] and not _is_number(event):  # quoted, or a block of text
            self._check_text(event)
            return text
        if _NULL.fullmatch(text):
            return None
        if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
            return text.lower() == "true"
        if _NOT_FINITE.fullmatch(text):
            self._add(event.start_mark, f"{quoted(text)} is not a finite number")
            return None
        if _INT.fullmatch(text):
            return self._int(event, text)
        return self._float(event, text) if _FLOAT.fullmatch(text) else text

    def _int(self, event: Any, text: str) -> int | None:
        if len(text) > _MAX_DIGITS:
            self._add(event.start_mark, f"{quoted(text)} is too large a number")
            return None
        try:
            return int(text, 0)
        except ValueError:  # 017 is 15 to some readers and 17 to others
            self._add(event.start_mark, f"{quoted(text)} has a leading zero", f"write {int(text)}")
            return None

    def _float(self, event: Any, text: str) -> float | None:
        value = float(text)
        if not math.isfinite(value):
            self._add(event.start_mark, f"{quoted(text)} is too large a number")
            return None
        return value

    def _check_text(self, event: Any) -> None:
        if any("\ud800" <= character <= "\udfff" for character in event.value):
            self._add(event.start_mark, "half of a surrogate pair is no character")

    def _where(self, line: int, column: int) -> str:
        return self._name if self._is_option else f"{self._name}:{line + 1}:{column + 1}"

    def _line(self, line: int) -> str:
        return printable(self._lines[line]) if line < len(self._lines) else ""

    def _add(self, mark: Any, message: str, hint: str = "") -> None:
        self._append(mark.line, mark.column, message, hint)
        if len(self._mistakes) >= MAX_MISTAKES:
            raise InputError(*self._mistakes)

    def _stop(self, line: int, column: int, message: str, hint: str = "") -> NoReturn:
        self._append(line, column, message, hint)
        raise InputError(*self._mistakes)

    def _append(self, line: int, column: int, message: str, hint: str) -> None:
        self._mistakes.append(
            Mistake(
                message=printable(message, 300),
                where=self._where(line, column),
                hint=printable(hint, 400),
                source_line=self._line(line),
            )
        )
