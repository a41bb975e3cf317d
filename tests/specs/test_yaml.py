"""The YAML reader: what it accepts, with JSON and PyYAML as oracles, and what it refuses, with the place."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import EnvironmentProblem, InputError
from planner.specs import library
from planner.specs.yaml import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_MISTAKES,
    MAX_NODES,
    parse_value,
    parse_yaml,
    read_yaml,
    shipped_yaml,
)

WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30)
NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)


def documents(words: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    values = st.recursive(
        st.none() | st.booleans() | NUMBERS | words,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
        max_leaves=20,
    )
    return st.dictionaries(words, values, min_size=1, max_size=5)


def with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_tuples(each) for key, each in value.items()}
    return tuple(with_tuples(each) for each in value) if isinstance(value, list) else value


def same(one: Any, two: Any) -> bool:
    """Equal, and of equal types: 1 is not true and 1 is not 1.0."""
    return repr(one) == repr(two)


@given(documents(WORDS))
def test_json_reads_as_json_does(document: dict[str, Any]) -> None:
    """YAML 1.2 contains JSON."""
    node = parse_yaml(json.dumps(document, ensure_ascii=False), "x.yaml")
    assert same(node.plain, with_tuples(document))


@given(documents(WORDS.map(lambda word: f"w{word}")), st.booleans())
def test_what_pyyaml_writes_reads_back(document: dict[str, Any], flow: bool) -> None:
    """Both indented and flow style; PyYAML writes YAML 1.1, where text such as 0E0 is no number."""
    text = yaml.safe_dump(document, default_flow_style=flow, sort_keys=False, allow_unicode=True)
    assert same(parse_yaml(text, "x.yaml").plain, with_tuples(document))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # https://yaml.org/spec/1.2.2/ section 10.3.2, core schema
        ("1e9", 1e9),
        ("1.0e3", 1000.0),
        ("12e03", 12000.0),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("+7", 7),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("'12'", "12"),
        ('"true"', "true"),
        ("80 GiB", "80 GiB"),
        ("=", "="),
    ],
)
def test_core_scalars(text: str, value: Any) -> None:
    assert same(parse_yaml(f"key: {text}", "x.yaml").plain, {"key": value})
    assert same(parse_value(text or "~", "--set").plain, value)


def at(node: Any, *steps: str | int) -> Any:
    for step in steps:
        node = node.data[step]
    return node


def test_positions_are_those_of_the_text() -> None:
    tree = parse_yaml("a: 1\nlinks:\n  - {name: x, spans: 8}\n  - name: 'y'\n", "c.yaml")
    assert (at(tree, "links", 0).where, at(tree, "links", 1).where) == ("c.yaml:3:5", "c.yaml:4:5")
    spans, name = at(tree, "links", 0, "spans"), at(tree, "links", 1, "name")
    assert (spans.key_where, spans.where) == ("c.yaml:3:15", "c.yaml:3:22")
    assert spans.source_line == "  - {name: x, spans: 8}"
    assert (name.key_where, name.where) == ("c.yaml:4:5", "c.yaml:4:11")


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_byte_order_mark_and_windows_lines_change_nothing(tmp_path: Path, bom: str, newline: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(f"{bom}a: 1{newline}b: 2{newline}".encode())
    node = read_yaml(path, "x.yaml")
    assert node.plain == {"a": 1, "b": 2}
    assert (at(node, "a").key_where, at(node, "b").key_where) == ("x.yaml:1:1", "x.yaml:2:1")


def refusals(text: str) -> list[tuple[str, str]]:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "x.yaml")
    return [(mistake.where, mistake.message) for mistake in caught.value.mistakes]


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3:1", "`a` is given twice, first in line 1"),
        ("a: {b: 1, b: 2}", "x.yaml:1:11", "`b` is given twice, first in line 1"),
        ("'a': 1\na: 2", "x.yaml:2:1", "`a` is given twice, first in line 1"),
        ("a: &x 1", "x.yaml:1:4", "anchors are not read: `&x`"),
        ("a: *x", "x.yaml:1:4", "aliases are not read: `*x`"),
        ("a: &x [*x]", "x.yaml:1:4", "anchors are not read: `&x`"),
        ("a: !!int 3", "x.yaml:1:4", "tags are not read"),
        ("a: !!python/object/apply:os.system [echo]", "x.yaml:1:4", "tags are not read"),
        ("! a: 1", "x.yaml:1:1", "tags are not read"),
        ("<<: {a: 1}", "x.yaml:1:1", "merge keys"),
        ("a: 1\n---\nb: 2", "x.yaml:3:1", "a second document begins here"),
        ("a: 017", "x.yaml:1:4", "`017` has a leading zero"),
        ("a: -01", "x.yaml:1:4", "`-01` has a leading zero"),
        ("a: .nan", "x.yaml:1:4", "`.nan` is not a finite number"),
        ("a: -.inf", "x.yaml:1:4", "`-.inf` is not a finite number"),
        ("a: 1e999", "x.yaml:1:4", "`1e999` is too large a number"),
        ("a: " + "9" * 5000, "x.yaml:1:4", "is too large a number"),
        ("a:\n\tb: 2", "x.yaml:2:1", "this is not valid YAML"),
        ("a: [1, 2", "x.yaml:1:9", "this is not valid YAML"),
        ("a: 'b", "x.yaml:1:6", "this is not valid YAML"),
        ("a: b: c", "x.yaml:1:5", "this is not valid YAML"),
        ("a: 1\nb: \x00", "x.yaml:2:4", "the character 0x00 may not stand in YAML"),
        ("a: \x1b[31m", "x.yaml:1:4", "the character 0x1b may not stand in YAML"),
        ('a: "\\U0011FFFF"', "x.yaml:1:1", "this is not valid YAML"),
        ('a: "\\UFFFFFFFF"', "x.yaml:1:1", "this is not valid YAML"),
        ('a: "\\ud800"', "x.yaml:1:4", "half of a surrogate pair"),
        ("? [a]\n: 1", "x.yaml:1:3", "a key must be a plain word"),
        ("{a: 1}: 2", "x.yaml:1:1", "a key must be a plain word"),
        ("", "x.yaml:1:1", "the document is empty"),
        ("# only a comment\n", "x.yaml:1:1", "the document is empty"),
        ("---\n", "x.yaml:2:1", "expected keys and values (`key: value`), found `null`"),
        ("just text", "x.yaml:1:1", "expected keys and values (`key: value`), found `just text`"),
        ("- a\n- b", "x.yaml:1:1", "expected keys and values (`key: value`), found a list"),
        ("%YAML 3.0\n---\na: 1", "x.yaml:1:1", "this is not valid YAML"),
    ],
)
def test_refused_with_its_place(text: str, where: str, message: str) -> None:
    found = refusals(text)
    assert found[0][0] == where
    assert message in found[0][1]


def test_every_mistake_is_reported_at_once_up_to_a_cap() -> None:
    assert [where for where, _ in refusals("a: .nan\nb: 017\na: 2\nc: &x 1")] == [
        f"x.yaml:{n}:{c}" for n, c in ((1, 4), (2, 4), (3, 1), (4, 4))
    ]
    assert len(refusals("\n".join(f"k{n}: .nan" for n in range(100)))) == MAX_MISTAKES


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 5, 3_000, 100_000])
def test_depth_is_limited_before_anything_is_built(opening: str, depth: int) -> None:
    assert any(
        "nested more than 32 levels" in message or "not valid YAML" in message
        for _, message in refusals("k:\n  " + opening * depth)
    )


def test_depth_up_to_the_limit_is_read() -> None:
    inner = MAX_DEPTH - 1
    value = parse_yaml("k: " + "[" * inner + "]" * inner, "x").plain["k"]
    assert re.sub(r"[,\s]", "", repr(value)) == "(" * inner + ")" * inner


def test_the_number_of_values_is_limited() -> None:
    assert "more than 20000 values" in refusals(f"k: [{'1,' * MAX_NODES}]")[-1][1]
    assert len(parse_yaml(f"k: [{'1,' * (MAX_NODES - 2)}]", "x").plain["k"]) == MAX_NODES - 2


def unreadable(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_yaml(path)
    return str(caught.value)


def test_only_regular_files_of_a_sane_size_are_read(tmp_path: Path) -> None:
    fifo, large, latin, utf16 = (tmp_path / name for name in ("fifo", "large.yaml", "latin.yaml", "utf16.yaml"))
    os.mkfifo(fifo)
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    latin.write_bytes(b"a: 1\nname: caf\xe9\n")
    utf16.write_text("a: 1", encoding="utf-16")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "not a regular file" in unreadable(fifo)
    assert "is a directory" in unreadable(tmp_path)
    assert "not a regular file" in unreadable(Path("/dev/zero"))
    assert "has 1048577 bytes" in unreadable(large)
    assert "latin.yaml:2:10: this is not UTF-8 text" in unreadable(latin)
    assert "utf16.yaml:1:1: this is not UTF-8 text" in unreadable(utf16)
    assert "does not exist" in unreadable(tmp_path / "missing.yaml")
    assert "does not exist" in unreadable(large / "below-a-file.yaml")
    assert "does not exist" in unreadable(Path("nul\0byte"))
    with pytest.raises(EnvironmentProblem, match="cannot read"):
        read_yaml(loop)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_give_a_document_or_an_input_error(content: bytes) -> None:
    try:
        shown = repr(parse_yaml(content.decode("utf-8", "replace"), "x").plain)
    except InputError as error:
        shown = str(error).replace("\n", "")
    assert shown.isprintable()


def test_hostile_text_is_shortened_and_printable() -> None:
    (_, message), *_ = refusals("a: !<" + "%1B" * 4000 + "> 1")
    assert len(message) < 400
    assert message.isprintable()


def test_random_yaml_punctuation_never_escapes() -> None:
    """A denser attack than random bytes: only characters with a meaning in YAML."""
    rng = random.Random(0)
    alphabet = [*"ab:-?[]{},&*!|>'\"%@`#\n \t\\~01.e<", "---", "...", "\\x", "\\u", "!!", "<<", "%TAG ! x", "? "]
    for _ in range(3_000):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 40)))
        try:
            parse_yaml(text, "x")
        except InputError:
            continue


def test_a_tab_has_a_way_out(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("fsdp_config:\n\tfsdp_version: 2\n")
    with pytest.raises(InputError, match="indent with blanks"):
        read_yaml(path)
    path.write_text("a: {b\n")
    with pytest.raises(InputError) as other:
        read_yaml(path)
    assert "blanks" not in str(other.value)


SHIPPED = sorted(
    path
    for kind in ("models", "clusters", "clusters/devices", "clusters/generations", "engines")
    for path in library.folder(kind).glob("*.yaml")
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_documents_read_the_same_by_libyaml(path):
    """Values, and the position of each: what the slow reader gives."""
    assert shipped_yaml(path, "it") == read_yaml(path, "it")
