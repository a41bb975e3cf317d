"""The programs that the Makefile calls: setup, the document generator, the reports."""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from project_tools import load_tool

from planner.layout_text import parse_layout

ROOT = Path(__file__).resolve().parent.parent


# --- make help --------------------------------------------------------------------------------------------------

TARGETS = (
    *("help", "setup", "run", "test", "check", "beside", "prove", "lint", "types", "format", "docs", "docs-check"),
    *(
        "golden",
        "accuracy",
        "coverage",
        "plans",
        "calibrate",
        "bench",
        "pictures",
        "shape",
        "mutate",
        "battery",
        "wheel",
        "clean",
    ),
)


def test_every_target_says_what_it_does() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert tuple(sorted(re.findall(r"^([a-z-]+):[^=\n]*## \w", makefile, flags=re.MULTILINE))) == tuple(sorted(TARGETS))


# --- setup ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "kept"),
    [("2.11.0", True), ("2.13.0+cpu", True), ("3.0.0a0+git1", True), ("2.9.1", False), ("1.13.1", False), ("", False)],
)
def test_a_new_enough_torch_is_kept(version: str, kept: bool) -> None:
    assert load_tool("setup").is_new_enough(version) is kept


def pins(text: str) -> dict[str, Requirement]:
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


def test_a_kept_torch_is_not_constrained_and_all_else_is() -> None:
    tool = load_tool("setup")
    everything, without_torch = (pins(tool.constraints(keep_torch=keep)) for keep in (False, True))
    assert set(everything) > set(without_torch)
    assert "torch" in everything
    assert not {"torch", "sympy", "networkx"} & set(without_torch)


def test_constraints_pin_every_requirement_to_a_version_that_it_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = [each for group in project["project"]["optional-dependencies"].values() for each in group]
    tools = [each for group in project["dependency-groups"].values() for each in group]
    wanted = project["project"]["dependencies"] + extras + tools
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    for requirement in map(Requirement, wanted + project["build-system"]["requires"]):
        (pin,) = pinned[canonicalize_name(requirement.name)].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), requirement


# --- quoted output ----------------------------------------------------------------------------------------------

STALE = "Before.\n\n<!-- command: planner models -->\n```console\n$ planner\nold\n```\n\nAfter.\n"


def test_a_stale_block_is_replaced_and_nothing_else() -> None:
    filled = load_tool("docs").fill_blocks(STALE, lambda command: f"\noutput of {command}  \nsecond line\n\n")
    assert filled == STALE.replace("$ planner\nold", "$ planner models\noutput of planner models\nsecond line")


def test_filling_twice_changes_nothing() -> None:
    fill = load_tool("docs").fill_blocks
    once = fill(STALE, lambda _: "new\n\nlines\n")
    assert "new\n\nlines" in once
    assert fill(once, lambda _: "new\n\nlines\n") == once


def test_every_quoted_command_is_followed_by_its_block() -> None:
    tool = load_tool("docs")
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert text.count("<!-- command:") == len(tool.BLOCK.findall(text)), path


def test_a_pipe_may_cut_what_is_quoted(tmp_path: Path) -> None:
    assert load_tool("docs").run_in(tmp_path)("planner models | head -1").startswith("model ")


def test_a_page_brings_its_files(tmp_path: Path) -> None:
    load_tool("docs").write_files("x\n\n<!-- file: a.csv -->\n```csv\nb,c\n1,2\n```\n", tmp_path)
    assert (tmp_path / "a.csv").read_text() == "b,c\n1,2\n"


def test_keys_are_explained_by_the_docstring_and_by_their_fields() -> None:
    schema = {
        "description": "A thing.\n\nspeed: of it. weight, size: both\nof them.",
        "properties": {"speed": {"type": "integer", "minimum": 1}, "weight": {"enum": ["a"]}, "size": {"default": 2}},
        "required": ["speed"],
    }
    table = load_tool("docs").key_table(schema)
    assert table.split("\n") == [
        *("", "A thing.", "", "| key | takes | default | meaning |", "|---|---|---|---|"),
        "| `speed` | integer, at least 1 | **required** | of it. |",
        "| `weight` | `a` |  | both of them. |",
        "| `size` | text | `2` | both of them. |",
        "",
    ]


def test_a_failing_command_stops_the_generation(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit code 2"):
        load_tool("docs").run_in(tmp_path)("planner no-such-command")


# --- reports ----------------------------------------------------------------------------------------------------

SAMPLE = '''"""A module."""

def f(
    a: int,
) -> str:
    """What it returns."""
    # why

    return """two
lines"""
'''


def test_lines_of_code_are_neither_comments_nor_docstrings_nor_blank() -> None:
    assert load_tool("shape").code_lines(SAMPLE) == {3, 4, 5, 9, 10}


def test_closed_forms_are_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tool("closed_forms").main() == 0
    assert "145.6" in capsys.readouterr().out


def test_a_wrong_closed_form_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tool = load_tool("closed_forms")
    monkeypatch.setitem(tool.SC21_PARAMS, "megatron-1t", 1010.0)
    assert tool.main() == 1
    assert "1010" in capsys.readouterr().out


# --- plans ----------------------------------------------------------------------------------------------------------


def parts(text: str) -> tuple[set[str], float]:
    """The values of a layout, and its step in seconds, in a row of the page or a line of the tool."""
    (seconds,) = re.findall(r"([0-9.]+) s\b", text)
    return set(re.findall(r"\w+=[\w+:]+(?=[,:`])", text)), float(seconds)


@pytest.mark.slow
def test_the_page_has_the_plans_that_the_tool_prints(capsys: pytest.CaptureFixture[str]) -> None:
    load_tool("plans").both_answers()
    printed = re.findall(r"(?m)^(\S.*)\n  minimum  (.*)\n  plan     (.*)\n", capsys.readouterr().out)
    page = (ROOT / "docs" / "how-it-decides.md").read_text(encoding="utf-8")
    assert len(printed) == 12
    for name, least, plan in printed:
        (cells,) = (line.split("|")[2:4] for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert (cells[1].strip() == "the same") == (plan == least)
        for cell, line in zip(cells if plan != least else cells[:1], (least, plan), strict=False):
            (values, seconds), (found, exact) = parts(cell), parts(line)
            assert values <= found
            assert seconds == pytest.approx(exact, rel=0.005)


def test_a_step_is_divided_by_that_of_equal_stages() -> None:
    tool = load_tool("plans")
    job = tool.sized("llama3-8b", "dgx-h100", "megatron", 1, 8192, 32)
    at = (parse_layout(f"tp=2,{text}", num_layers=32, num_devices=8) for text in ("pp=1", "pp=2", "pp=4"))
    alone, halves, quarters = (tool.above_balance(job, layout) for layout in at)
    assert alone == pytest.approx(1)
    assert 1 < halves < quarters  # the loss is longer beside a quarter of the layers


# --- mutants ----------------------------------------------------------------------------------------------------


def test_every_way_to_break_the_proof_is_a_change_of_the_code() -> None:
    """`changes` raises where a file no longer has a text, or has it twice."""
    found = load_tool("mutate_proof").changes()
    assert len(set(found)) == len(found) >= 60
    assert all(before != after for _, before, after in found)


TOY = '''"""A toy."""

__all__ = ["area"]
LIMIT = 10


def area(width: int | None, height: int = 1) -> int:
    """Width times height."""
    if not width:
        raise ValueError(f"no width, {1 + 1} things")
    return width * height


def unused(x: int) -> int:
    return x + LIMIT
'''


def test_mutants_are_of_the_code_and_the_same_for_a_seed() -> None:
    draw = load_tool("mutants").draw
    drawn = [list(draw({"toy.py": TOY}, 12, random.Random(seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {mutant.change for mutant in drawn[0]} == {
        *("10 -> 11", "10 -> 9", "1 -> 2", "1 -> 0", "not width -> width", "width * height -> width / height"),
        *("width * height -> width", "x + LIMIT -> x - LIMIT", "x + LIMIT -> x"),
        "if not width:\n    raise ValueError(f'no width, {1 + 1} things') -> pass",
        "raise ValueError(f'no width, {1 + 1} things') -> pass",
    }
    for mutant in drawn[0]:
        assert TOY.splitlines()[mutant.line - 1].strip() == mutant.code
        compile(mutant.source, "toy.py", "exec")


def test_a_mutant_is_killed_by_the_test_that_notices_it_and_else_survives(tmp_path: Path) -> None:
    tool = load_tool("mutate")
    files = {
        "planner/__init__.py": "",
        "planner/cost/__init__.py": "",
        "planner/cost/toy.py": TOY,
        "tests/test_area.py": "from planner.cost.toy import area\n\ndef test_area():\n    assert area(3, 1) == 3\n",
        "tests/test_none.py": "import pytest\nfrom planner.cost.toy import area\n\n"
        "def test_none():\n    with pytest.raises(ValueError):\n        area(None)\n",
        "tools/mutants-equivalent.yaml": "- file: planner/cost/toy.py\n  code: LIMIT = 10\n"
        "  change: 10 -> 11\n  reason: so\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    tool.record(tmp_path, [])
    code = tool.sources(tmp_path, "planner")
    expected = {
        "raise ValueError(f'no width, {1 + 1} things') -> pass": ("killed", "tests/test_none.py::test_none"),
        "width * height -> width": ("survived", ""),
        "x + LIMIT -> x": ("survived", "no test executes it"),
        "10 -> 11": ("equivalent", "so"),
    }
    drawn = [each for each in tool.draw(code, 60, random.Random(1)) if each.change in expected]
    found = {mutant.change: outcome for mutant, outcome in tool.outcomes(tmp_path, drawn, 60.0)}
    assert {change: (outcome.verdict, outcome.by) for change, outcome in found.items()} == expected
    assert found["width * height -> width"].num_tests == 1
    assert tool.sources(tmp_path, "planner") == code
    (tmp_path / "planner/cost/newer.py").write_text(TOY, encoding="utf-8")
    with pytest.raises(SystemExit, match="is newer than the record"):
        tool.Record(tmp_path).tests_of("planner/cost/newer.py", range(8, 9))


def test_lines_of_a_record_are_found_again_in_a_changed_file() -> None:
    find = load_tool("mutate").lines_before
    before, after = "a\nb\nc\nd\n", "new\na\nb\nother\nd\n"
    assert [find(before, after, range(line, line + 1)) for line in (2, 3, 5)] == [{1}, {2}, {4}]
    assert 3 in find(before, after, range(4, 5))
    assert find(before, before, range(2, 4)) == {2, 3}


def test_every_mutant_known_to_be_equivalent_is_of_a_line_that_exists() -> None:
    claims = load_tool("mutate").claimed(ROOT)
    assert claims
    for claim in claims:
        lines = (ROOT / claim["file"]).read_text(encoding="utf-8").splitlines()
        assert claim["code"] in map(str.strip, lines), claim


def test_every_bound_whose_gain_is_stated_can_be_left_out() -> None:
    """Each name of a gain is known to the tool that measures gains, and each part that the tool replaces exists."""
    bounds = load_tool("bench_bounds").BOUNDS
    sources = [path.read_text() for path in Path("planner/search").rglob("*.py")]
    stated = {name for source in sources for name in re.findall(r"Gain[^(:]*\(`([a-z-]+)`", source)}
    assert stated
    assert stated <= set(bounds)
    missing = [(name, part) for name, parts in bounds.items() for owner, part, _ in parts if not hasattr(owner, part)]
    assert not missing


def test_every_way_to_break_the_proof_is_of_a_line_that_exists() -> None:
    changes = yaml.safe_load(Path("tools/mutants-proof.yaml").read_text())
    sources = {each["file"]: Path("planner", each["file"]).read_text() for each in changes}
    gone = [(each["file"], old) for each in changes for old, _ in each["changes"] if old not in sources[each["file"]]]
    assert not gone
