"""Regenerate the quotes of the documents: command output, the command reference, the schemas, the list of models.

`make docs` rewrites the files. `make docs-check` shows the difference and fails if anything would change. In a Markdown
file,

- the block after `<!-- command: planner ... -->` becomes the output of that command, which a pipe may shorten,
- the block after `<!-- command: python NAME -->` becomes the output of a program that the page shows,
- the block after `<!-- docstring: planner/... -->` becomes the docstring of that module,
- the text between `<!-- fields: NAME -->` and `<!-- fields: end -->` becomes the keys of that document's schema,
- the block after `<!-- file: NAME -->` is a file that the page's commands find in their folder.

The commands of one page run in their order in one folder, which is empty at first. A later command may therefore read
what an earlier one wrote.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from battery_commands import Planner

from planner import shipped
from planner.cli import cli
from planner.specs.schema import schemas as document_schemas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100
GENERATED = "\n<!-- written by `make docs`; edit the source instead -->\n"
BLOCK = re.compile(r"<!-- command: (?P<command>[^\n]+?) -->\n```console\n(?P<old>.*?)```\n", re.DOTALL)
FILE = re.compile(r"<!-- file: (?P<name>[\w.-]+) -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)
DOCSTRING = re.compile(r"<!-- docstring: (?P<path>\S+) -->\n```text\n.*?```\n", re.DOTALL)
FIELDS = re.compile(r"<!-- fields: (?P<name>(?!end)\w+) -->\n.*?<!-- fields: end -->\n", re.DOTALL)
ONE_COMMAND = re.compile(r"planner (?P<words>[^|<>&;$`]+)(?: \| (?P<pipe>(?:(?!planner ).)+))?")
ENVIRONMENT = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "xterm", "PYTHONUTF8": "1"}
ANSWERS = (0, 3)  # exit codes of results: it worked, or nothing fits


def run_in(folder: Path, planner: Planner | None = None) -> Callable[[str], str]:
    """A function that runs a command line in `folder` and returns what it prints to standard output.

    planner: runs one command without a shell, and the commands behind its pipe read what it printed.
    """
    python = f'set -o pipefail; python() {{ "{sys.executable}" "$@"; }}; planner() {{ python -m planner "$@"; }}; '

    def shell(command: str, given: str = "") -> subprocess.CompletedProcess[str]:
        line, variables = ["/bin/bash", "-c", command], os.environ | ENVIRONMENT
        return subprocess.run(
            line, cwd=folder, env=variables, input=given, capture_output=True, text=True, check=False
        )  # fmt: skip

    def run(command: str) -> str:
        if not command.startswith(("planner ", "python ")):
            sys.exit(f"only `planner` and `python` commands are quoted, not: {command}")
        one = ONE_COMMAND.fullmatch(command) if planner else None
        if planner and one:
            answer = planner.run(shlex.split(one["words"]), folder)
            if one["pipe"] and answer.returncode in ANSWERS:
                answer = shell(one["pipe"], answer.stdout)
        else:
            answer = shell(python + command)
        if answer.returncode not in ANSWERS:
            sys.exit(f"{command}\nended with exit code {answer.returncode}:\n{answer.stderr}")
        return answer.stdout

    return run


def write_files(text: str, folder: Path) -> None:
    """Write the files that a page shows into the folder in which its commands run."""
    for match in FILE.finditer(text):
        (folder / match["name"]).write_text(match["text"], encoding="utf-8")


def fill_blocks(text: str, run: Callable[[str], str]) -> str:
    """Replace every quoted block by the present output of its command."""

    def fill(match: re.Match[str]) -> str:
        output = "\n".join(line.rstrip() for line in run(match["command"]).strip("\n").splitlines())
        return f"<!-- command: {match['command']} -->\n```console\n$ {match['command']}\n{output}\n```\n"

    return BLOCK.sub(fill, text)


def fill_docstrings(text: str) -> str:
    """Replace every quoted docstring by the module's present docstring."""

    def fill(match: re.Match[str]) -> str:
        module = ast.parse((ROOT / match["path"]).read_text(encoding="utf-8"))
        return f"<!-- docstring: {match['path']} -->\n```text\n{ast.get_docstring(module)}\n```\n"

    return DOCSTRING.sub(fill, text)


def fill_fields(text: str) -> str:
    """Replace every table of keys by the keys of the document's schema."""
    found = document_schemas() if FIELDS.search(text) else {}
    return FIELDS.sub(
        lambda match: (
            f"<!-- fields: {match['name']} -->\n{key_tables(found[match['name']], match['name'])}<!-- fields: end -->\n"
        ),
        text,
    )


def key_tables(schema: dict[str, Any], heading: str) -> str:
    """Tables of the keys of a document, or of each of its forms, and then of the documents inside it.

    heading: heading of the document's own table. If the document may contain another of its kind, links lead there.
    """
    inner = dict(sorted(schema.get("$defs", {}).items()))
    forms = [form["$ref"].rpartition("/")[2] for form in schema.get("anyOf", ())]
    parts = [key_table(inner.pop(name)) for name in forms] or [key_table(schema)]
    own = str(schema.get("title"))
    parts += [f"\n#### {name}\n{key_table(each)}" for name, each in inner.items() if name != own]
    return "".join(parts).replace(f"(#{own.lower()})", f"(#{heading})")


def key_table(schema: dict[str, Any]) -> str:
    """The table of a document's keys, their values and meanings.

    A meaning comes from the field, or from the docstring.
    """
    keys = schema.get("properties", {})
    intro, explained = read_docstring(schema.get("description", ""), set(keys))
    lines = [f"\n{intro}\n", "| key | takes | default | meaning |", "|---|---|---|---|"]
    for key, field in keys.items():
        value = field.get("default")
        default = "" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"
        default = "**required**" if key in schema.get("required", ()) else default
        meaning = own_description(field) or explained.get(key) or ""
        lines.append(f"| `{key}` | {taken(field)} | {default} | {meaning.replace('|', '&#124;')} |")
    return "\n".join(lines) + "\n"


def read_docstring(text: str, keys: set[str]) -> tuple[str, dict[str, str]]:
    """The general part of a docstring, and the part about each key (`key: ...`, also after a full stop)."""
    names = "|".join(sorted(keys, key=len, reverse=True)) or "$^"
    pieces = re.split(rf"(?:^|(?<=[.;] )|(?<=\n))((?:{names})(?:, (?:{names}))*): ", text)
    explained = {
        key: " ".join(piece.split()).rstrip(";")
        for heads, piece in zip(pieces[1::2], pieces[2::2], strict=True)
        for key in heads.split(", ")
    }
    return " ".join(pieces[0].split()), explained


def own_description(field: dict[str, Any]) -> str:
    """A field's description, if it is more than its unit."""
    text = str(field.get("description", ""))
    return "" if text.startswith("a number and a unit") else text


def taken(field: dict[str, Any]) -> str:
    """The values that a key takes, in words."""
    if "anyOf" in field:
        return " or ".join(taken(each) for each in field["anyOf"] if each.get("type") != "null")
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    kind = "integer" if "integer" in (given := field.get("type", "text")) else str(given)  # counts are also texts, 128k
    if kind == "array":
        return f"list of {taken(field.get('items', {}))}"
    if kind == "object":
        return f"{taken(field['additionalProperties'])} for each key" if "additionalProperties" in field else "keys"
    if kind == "boolean":
        return "`true`, `false`"
    if kind in ("integer", "number"):
        return kind + bounds(field)
    unit = str(field.get("description", ""))
    if unit.startswith("a number and"):
        return unit.removeprefix("a number and a unit of ") + " with unit"
    return f"as in `{field['examples'][0]}`" if "examples" in field else "text"


def bounds(field: dict[str, Any]) -> str:
    """The range of a number, in words."""
    words = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "exclusiveMaximum": "below"}
    return "".join(f", {word} {field[key]:,}" for key, word in words.items() if key in field)


def command_reference() -> str:
    """docs/cli.md: the help text of every command."""
    parts = ["# Commands\n", GENERATED]
    for context in walk(cli, "planner", None):
        text = context.command.get_help(context).rstrip()
        parts.append(f"\n## {context.command_path}\n\n```text\n{text}\n```\n")
    return "".join(parts)


def walk(command: click.Command, name: str, parent: click.Context | None) -> Iterator[click.Context]:
    """The contexts of a command and of all its subcommands, as click itself would make them."""
    context = click.Context(command, parent, name, terminal_width=WIDTH, max_content_width=WIDTH)
    context.help_option_names = command.context_settings.get("help_option_names", context.help_option_names)
    yield context
    if isinstance(command, click.Group):
        for each in command.commands:
            yield from walk(command.commands[each], each, context)


def schemas(folder: Path) -> dict[Path, str]:
    """docs/schemas/*.json, as the documents' own modules write them."""
    for module in ("planner.specs.schema", "planner.show.schema"):
        subprocess.run([sys.executable, "-m", module, str(folder)], check=True, capture_output=True)
    return {ROOT / "docs" / "schemas" / path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def listed_models() -> str:
    """planner/models.json: a line for each shipped model."""
    found = shipped.counted_models()
    lines = ",\n".join(f"  {json.dumps(each)}" for each in found["models"])
    return f'{{\n "digest": "{found["digest"]}",\n "models": [\n{lines}\n ]\n}}\n'


def filled(path: Path, planner: Planner) -> str:
    """A document with all its quotes renewed."""
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        write_files(text, Path(folder))
        return fill_fields(fill_docstrings(fill_blocks(text, run_in(Path(folder), planner))))


def quoting_documents() -> dict[Path, str]:
    """The documents that quote something, with their quotes renewed; each thread has a planner for its commands."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    quoting = [path for path in paths if "make docs`" not in path.read_text(encoding="utf-8").partition("\n## ")[0]]
    own = threading.local()
    with contextlib.ExitStack() as planners:

        def start() -> None:
            own.planner = planners.enter_context(Planner(**ENVIRONMENT))

        with ThreadPoolExecutor(max_workers=os.cpu_count(), initializer=start) as pool:
            return dict(zip(quoting, pool.map(lambda path: filled(path, own.planner), quoting), strict=True))


def generate() -> dict[Path, str]:
    """Every generated file with its wanted content."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = schemas(Path(folder)) | quoting_documents()
    wanted[ROOT / "docs" / "cli.md"] = command_reference()
    wanted[shipped.MODELS] = listed_models()
    return wanted


def difference(path: Path, new: str) -> str:
    """The changes to a file as a unified diff; empty if there are none."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    name = str(path.relative_to(ROOT))
    return "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, f"{name} (now)"))


def main() -> int:
    """Write the changes, or with --check only show them; returns the exit code."""
    parser = argparse.ArgumentParser(description="Regenerate what the documents quote.")
    parser.add_argument("--check", action="store_true", help="fail if anything would change")
    check = parser.parse_args().check
    changed = {path: (text, change) for path, text in generate().items() if (change := difference(path, text))}
    for path, (text, change) in changed.items():
        if check:
            print(change)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    if check and changed:
        print("the documents are not current; run `make docs` and read the difference")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
