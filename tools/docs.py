"""Regenerate what the documents quote: command output, the command reference, the formulas, the schemas.

`make docs` rewrites the files, `make docs-check` fails with the difference if anything would change. In a
Markdown file, the block after `<!-- command: planner ... -->` is replaced by the real output of that command.
The commands of one file run in one empty folder, in their order, so a later one may read what an earlier one wrote.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.cli import cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100
QUOTING = ("README.md", "docs/guide.md")
GENERATED = "\n<!-- written by `make docs`; edit the source instead -->\n"
BLOCK = re.compile(r"<!-- command: (?P<command>[^\n]+?) -->\n```console\n(?P<old>.*?)```\n", re.DOTALL)
ANSWERS = (0, 3)  # exit codes of results: it worked, or nothing fits


def run_in(folder: Path) -> Callable[[str], str]:
    """A function that runs a command line in `folder` and returns what it prints to standard output."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "xterm", "PYTHONUTF8": "1"}

    def run(command: str) -> str:
        program, *arguments = shlex.split(command)
        if program != "planner":
            sys.exit(f"only `planner` commands are quoted, not: {command}")
        line = [sys.executable, "-m", "planner", *arguments]
        answer = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if answer.returncode not in ANSWERS:
            sys.exit(f"{command}\nended with exit code {answer.returncode}:\n{answer.stderr}")
        return answer.stdout

    return run


def fill_blocks(text: str, run: Callable[[str], str]) -> str:
    """Replace every quoted block by the present output of its command."""

    def fill(match: re.Match[str]) -> str:
        output = "\n".join(line.rstrip() for line in run(match["command"]).strip("\n").splitlines())
        return f"<!-- command: {match['command']} -->\n```console\n$ {match['command']}\n{output}\n```\n"

    return BLOCK.sub(fill, text)


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


def formula_reference() -> str:
    """docs/cost-model.md: the docstrings of planner/cost, module by module."""
    parts = ["# The cost model\n", GENERATED]
    for path in sorted((ROOT / "planner" / "cost").glob("[a-z]*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        parts.append(f"\n## cost/{path.name}\n\n{ast.get_docstring(module)}\n")
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
        parts += [f"\n### {f.name}\n\n```text\n{signature(f)}\n\n{ast.get_docstring(f)}\n```\n" for f in functions]
    return "".join(parts)


def signature(function: ast.FunctionDef) -> str:
    """A function's head on one line."""
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{function.name}({ast.unparse(function.args)}){returns}"


def schemas(folder: Path) -> dict[Path, str]:
    """docs/schemas/*.json, as the documents' own modules write them."""
    for module in ("planner.specs.schema", "planner.explain.schema"):
        subprocess.run([sys.executable, "-m", module, str(folder)], check=True, capture_output=True)
    return {ROOT / "docs" / "schemas" / path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def quoting_documents() -> dict[Path, str]:
    """The documents that quote commands, with their blocks filled."""
    filled = {}
    for path in (ROOT / name for name in QUOTING if (ROOT / name).exists()):
        with tempfile.TemporaryDirectory() as folder:
            filled[path] = fill_blocks(path.read_text(encoding="utf-8"), run_in(Path(folder)))
    return filled


def generate() -> dict[Path, str]:
    """Every generated file and what it should contain."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = schemas(Path(folder)) | quoting_documents()
    wanted[ROOT / "docs" / "cli.md"] = command_reference()
    wanted[ROOT / "docs" / "cost-model.md"] = formula_reference()
    return wanted


def difference(path: Path, new: str) -> str:
    """What would change in a file, as a unified diff; empty if nothing."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    name = str(path.relative_to(ROOT))
    return "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, f"{name} (now)"))


def main() -> int:
    """Write what changed, or with --check only show it; returns the exit code."""
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
