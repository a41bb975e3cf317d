"""The documents say what is there: commands, options, files and terms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

from planner.cli import cli
from planner.cost.ledger import LineName
from planner.layout import Layout

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|work|home|root|opt|usr|mnt)/")


def commands(command: click.Command, path: tuple[str, ...] = ("planner",)) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(path), command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))


# --- the command reference --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "command"), list(commands(cli)), ids=lambda value: value if type(value) is str else ""
)
def test_every_command_and_option_is_documented_with_help(path: str, command: click.Command) -> None:
    reference = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = reference.partition(f"## {path}\n")[2].partition("\n## ")[0]
    assert command.help
    for option in (param for param in command.params if isinstance(param, click.Option)):
        assert option.help, option.opts
        assert all(name in section for name in option.opts), option.opts


def test_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [path for path, _ in commands(cli) if path not in readme]
    assert missing == []


# --- what the documents point at --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(path.read_text(encoding="utf-8"))]
    missing = [t for t in targets if not t.startswith(("http://", "https://")) and not (path.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", path.read_text(encoding="utf-8")))
    assert named <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_paths_of_one_machine(path: Path) -> None:
    assert MACHINE_PATH.findall(path.read_text(encoding="utf-8")) == []


def test_glossary_explains_every_name_of_the_layout_and_the_ledger() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = set(re.findall(r"`([a-z_0-9-]+)`", glossary))
    wanted = {field.name for field in fields(Layout)} | {name.value for name in LineName}
    assert wanted - terms == set()


def test_changelog_is_for_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changelog
