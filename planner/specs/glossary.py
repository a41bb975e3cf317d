"""The words of the program: docs/glossary.md as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from planner.errors import InputError
from planner.specs.library import glossary_file
from planner.specs.text import did_you_mean, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENTRY: Final = re.compile(r"^- (.*(?:\n  .*)*)", re.MULTILINE)
_MARKUP: Final = re.compile(r"`|\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)")
"""Code, bold, and italics, which is no product: an asterisk at the start or the end of a word."""
_TERM: Final = re.compile(r"\*\*(.+?)\*\*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry: the terms that it explains, the first of them its name, and its text without markup."""

    section: str
    terms: tuple[str, ...]
    text: str


@cache
def entries() -> tuple[Entry, ...]:
    """Every entry in the order of the page."""
    _, *parts = glossary_file().read_text(encoding="utf-8").split("\n## ")
    return tuple(
        _entry(title, body)
        for title, _, text in (part.partition("\n") for part in parts)
        for body in _ENTRY.findall(text)
    )


def _entry(title: str, body: str) -> Entry:
    """Terms stand in bold, wherever in the entry; what follows the first one up to the colon is another name."""
    body = re.sub(r"\s*\n\s*", " ", body)
    plain = _MARKUP.sub("", body)
    names = plain.partition(":")[0].split(", ")
    terms = (*names, *(term.strip("`") for term in _TERM.findall(body)))
    return Entry(section=title, terms=tuple(dict.fromkeys(terms)), text=plain)


def _key(word: str) -> str:
    return re.sub(r"[\s_-]+", " ", word.strip().lower())


@cache
def _by_term() -> dict[str, Entry]:
    """The entry of every term; where two have one, that which is named by it."""
    found = {_key(term): entry for entry in entries() for term in entry.terms}
    return found | {_key(entry.terms[0]): entry for entry in reversed(entries())}


def entry_for(word: str) -> Entry | None:
    """The entry that explains a word, in the singular or the plural."""
    key = _key(word)
    return _by_term().get(key) or _by_term().get(key.removesuffix("s"))


def entries_of(words: Iterable[str]) -> tuple[Entry, ...]:
    """The entries of the words: those that explain each, else those with a term in which it stands; without any, all.

    Raises:
        InputError: a word that no term has.
    """
    found = [entry for word in words for entry in _matches(word)]
    return tuple(dict.fromkeys(found)) or entries()


def _matches(word: str) -> list[Entry]:
    if exact := entry_for(word):
        return [exact]
    key = _key(word)
    if key and (inside := [each for each in entries() if any(key in _key(term) for term in each.terms)]):
        return inside
    hint = did_you_mean(key, _by_term(), otherwise="`planner glossary` lists all terms")
    raise InputError(f"the glossary has no `{printable(word, 40)}`", hint=hint)


def section_anchor(entry: Entry) -> str:
    """The address of the entry's section on its page."""
    return re.sub(r"\s+", "-", entry.section.lower())
