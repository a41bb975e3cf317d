"""Commands in the files of launchers: SkyPilot, dstack and jobs of Kubernetes, with the variables that these set.

Source: SkyPilot, docs/source/reference/yaml-spec.rst and running-jobs/environment-variables.rst; dstack,
docs/reference/dstack.yml/task.md; Kubernetes, core/v1 Container (command, args, env).
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import names_beside
from planner.errors import InputError
from planner.specs.yaml import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAMES: Final = names_beside(__file__)


def script_of(text: str, shown: str = "") -> str:
    """The commands that a launcher's file runs, behind the variables that it sets; any other text as it is.

    shown: the file's name, for mistakes.

    Raises:
        InputError: the file has anchors or aliases.
    """
    pieces = re.split(r"(?m)^---.*$", text) if re.search(NAMES["sign"], text, re.MULTILINE) else []
    try:
        parts = [parse_yaml(piece, shown).plain for piece in pieces if piece.strip()]
    except InputError as error:
        if any(each.message.startswith(("anchors", "aliases")) for each in error.mistakes):
            raise  # it is YAML
        return text
    commands = list(_found(parts, _commands))
    return "\n".join(dict.fromkeys([*_found(parts, _variables), *commands])) if commands else text


def _found(data: Any, lines: Any) -> Iterator[str]:
    """The lines of a mapping and of all mappings inside it."""
    yield from lines(data) if isinstance(data, dict) else ()
    for each in data.values() if isinstance(data, dict) else data if isinstance(data, list | tuple) else ():
        yield from _found(each, lines)


def _variables(data: dict[str, Any]) -> Iterator[str]:
    rows = data.get("env") or data.get("envs") or ()
    if isinstance(rows, dict):
        rows = [{"name": name, "value": value} for name, value in rows.items()]
    both = [map(row.get, ("name", "value")) if isinstance(row, dict) else (*str(row).split("=", 1), ()) for row in rows]
    yield from (f"export {name}={shlex.quote(str(value))}" for name, value, *_ in both if isinstance(value, str | int))
    counts = {name: re.search(r"(?:^|:)\s*(\d+)[^\w.]*$", str(data.get(key))) for key, name in NAMES["sizes"].items()}
    yield from (f"export {name}={count[1]}" for name, count in counts.items() if count)


def _commands(data: dict[str, Any]) -> Iterator[str]:
    words = _texts(data, ("command", "args"))
    inner = [word for word in words if " " in word.strip()]  # scripts, behind -c or alone
    yield from inner if "-c" in words or inner == words else [shlex.join(words)]
    yield from _texts(data, NAMES["scripts"])


def _texts(data: dict[str, Any], keys: Sequence[str]) -> list[str]:
    values = [value if isinstance(value, list | tuple) else (value,) for key in keys if (value := data.get(key))]
    return [str(each) for value in values for each in value if not isinstance(each, dict)]
