"""The documents match the program: commands, options, files and terms."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from project_tools import load_tool

import planner
from planner.answers.report import Sections
from planner.cli import cli
from planner.cost.ledger import LineName
from planner.errors import ExitCode
from planner.evidence.rows.runs import Run
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
    for option in (param for param in command.params if isinstance(param, click.Option) and not param.hidden):
        assert option.help, option.opts
        assert all(name in section for name in option.opts), option.opts


def test_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [path for path, _ in commands(cli) if path not in readme]
    assert missing == []


# --- commands that the pages show ----------------------------------------------------------------------------------

PAGES = [path for path in DOCUMENTS if path.name not in ("CHANGELOG.md", "cli.md")]
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def shown_commands(text: str) -> list[str]:
    """The lines of `sh` blocks that start with `planner`, in order; a continued line is one line."""
    lines = (line for block in SHELL.findall(text) for line in block.replace("\\\n", "").splitlines())
    return [line for line in lines if line.startswith("planner ")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_shown_commands_have_only_options_that_exist(path: Path) -> None:
    known = dict(commands(cli))
    for line in shown_commands(path.read_text(encoding="utf-8")):
        words = line.split()
        options = {option for param in known[" ".join(words[:2])].params for option in param.opts}
        assert {word for word in words if word.startswith("-")} <= options, line


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "path", [path for path in PAGES if shown_commands(path.read_text(encoding="utf-8"))], ids=lambda path: path.name
)
def test_shown_commands_work_in_their_order(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tool = load_tool("docs")
    tool.write_files(text, tmp_path)
    for line in shown_commands(text):
        command = [sys.executable, "-m", *line.split()]
        answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, f"{line}\n{answer.stderr}"


def test_programs_that_a_page_shows_are_run(tmp_path: Path) -> None:
    tool = load_tool("docs")
    program = "<!-- file: first.py -->\n```python\nimport planner\nprint(len(planner.__all__) * 'x')\n```\n"
    text = f"{program}<!-- command: python first.py -->\n```console\nof yesterday\n```\n"
    tool.write_files(text, tmp_path)
    filled = tool.fill_blocks(text, tool.run_in(tmp_path))
    assert filled == text.replace("of yesterday", f"$ python first.py\n{len(planner.__all__) * 'x'}")


# --- reference pages -------------------------------------------------------------------------------------------------


def first_cells(page: str, heading: str) -> set[str]:
    """The names in the first column of the tables of one section."""
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"# {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")][1:]
    return {name.strip(" `") for row in rows for name in row.split(",")}


def test_every_exit_code_is_explained() -> None:
    assert first_cells("exit-codes.md", "Exit codes") == {str(code.value) for code in ExitCode}


def test_every_column_of_a_table_of_runs_is_explained() -> None:
    assert first_cells("formats.md", "RUNS.csv") == {field.name for field in fields(Run)}


def test_every_key_of_a_plan_is_explained() -> None:
    line = "explain tiny-gpt local-cpu --gpus 1 --seq-len 64 --global-batch 4 --precision fp32 --layout mbs=1 --json"
    answer = CliRunner().invoke(cli, line.split(), catch_exceptions=False)
    assert first_cells("formats.md", "The plan") == set(json.loads(answer.stdout)) - set(Sections.model_fields)


# --- what the documents point at --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(path.read_text(encoding="utf-8"))]
    missing = [t for t in targets if not t.startswith(("http://", "https://")) and not (path.parent / t).exists()]
    assert missing == []


def heading_anchors(path: Path) -> set[str]:
    """Valid `#...` links to a Markdown file: its headings, in lower case with hyphens."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_a_page_name_its_headings(path: Path) -> None:
    found = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", path.read_text(encoding="utf-8"))
    assert [each for each in found if each[1] not in heading_anchors(path.parent / each[0] if each[0] else path)] == []


def test_the_site_has_every_page_and_no_page_leaves_it() -> None:
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert set(re.findall(r"[\w/-]+\.md", str(navigation))) == pages
    for page in pages:
        targets = [match["target"] for match in LINK.finditer((docs / page).read_text(encoding="utf-8"))]
        inside = [(docs / page).parent / target for target in targets if "://" not in target]
        assert [target for target in inside if not target.resolve().is_relative_to(docs)] == []


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
