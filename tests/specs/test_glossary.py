"""The glossary as data: every term of the page is found, and every word of the output has an entry."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from planner.cost.collectives import all_reduce_algorithms
from planner.cost.groups import group
from planner.cost.ledger import LineName
from planner.cost.schedule_comparison import SCHEDULES
from planner.errors import InputError
from planner.layout import Layout
from planner.specs.cluster_documents import load_cluster
from planner.specs.glossary import entries, entries_of, entry_for

PAGE = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")


def read_by_a_markdown_parser() -> tuple[list[tuple[str, str]], list[str]]:
    """(section, text) of every list item, and every bold text."""
    items, bold, section, before = [], [], "", ""
    for token in MarkdownIt().parse(PAGE):
        if token.type != "inline":
            before = token.type
            continue
        parts = token.children or []
        text = "".join(" " if part.type == "softbreak" else part.content for part in parts)
        if before == "heading_open":
            section = text
        elif token.level > 1:
            items.append((section, text))
            inside = [sum(1 if p.type == "strong_open" else -1 if p.type == "strong_close" else 0 for p in parts[:i])
                      for i in range(len(parts))]  # fmt: skip
            bold += [part.content for part, deep in zip(parts, inside, strict=True) if deep and part.content]
    return items, bold


ITEMS, BOLD = read_by_a_markdown_parser()


def test_every_entry_of_the_page_is_there() -> None:
    assert [(each.section, each.text) for each in entries()] == ITEMS
    assert len(ITEMS) > 80


@pytest.mark.parametrize("term", sorted(set(BOLD)))
def test_every_term_in_bold_is_found_however_it_is_written(term: str) -> None:
    for word in (term, term.upper(), term.replace("_", " "), f" {term} "):
        found = entry_for(word)
        assert found is not None
        assert term.lower() in found.text.lower()


def test_every_word_of_the_output_has_an_entry() -> None:
    algorithms = all_reduce_algorithms(group(load_cluster("gb200-nvl72"), 8, 1), 1e9)
    shown = [
        *(field.name for field in fields(Layout)),
        *(name.value for name in LineName),
        *SCHEDULES,
        *({"halving-doubling": "butterfly"}.get(name, name) for name in algorithms),
        *("ideal compute", "kernel efficiency", "memory-bound operators", "host and launches", "calibration"),
        *("imbalance", "MFU", "HFU", "band", "runner-up", "near tie", "limit", "stages", "busy", "hidden", "exposed"),
    ]
    assert [word for word in shown if entry_for(word) is None] == []


def test_no_entry_is_named_twice() -> None:
    names = [each.terms[0] for each in entries()]
    assert [name for name in names if names.count(name) > 1] == []


def test_a_part_of_a_term_finds_all_that_have_it() -> None:
    assert {each.terms[0] for each in entries_of(["embedding"])} == {"embedding_and_loss", "tied_embedding_comm"}
    degrees = {each.terms[0] for each in entries_of(["parallel degree"])}
    assert degrees == {"tp", "pp", "dp", "cp", "ep", "etp"}
    assert entries_of(["hfu", "mfu"]) == entries_of(["MFU"])
    assert entries_of([]) == entries()


@given(st.text(min_size=1))
def test_any_word_has_an_answer_or_a_mistake(word: str) -> None:
    try:
        found = entries_of([word])
    except InputError:
        found = entries()
    assert found


def test_a_word_like_no_term_is_told_where_all_terms_are() -> None:
    with pytest.raises(InputError) as caught:
        entries_of(["qqqqqqqq"])
    (mistake,) = caught.value.mistakes
    assert "`planner glossary` lists all terms" in (mistake.hint or "")
