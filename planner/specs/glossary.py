"""The terms of the program: docs/glossary.md as data."""

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
"""Markup to remove: code, bold and italics. An asterisk inside a word is a product and stays."""
_TERM: Final = re.compile(r"\*\*(.+?)\*\*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry: its text without markup, and the terms that it explains; the first term is its name."""

    section: str
    terms: tuple[str, ...]
    text: str


@cache
def entries() -> tuple[Entry, ...]:
    """Every entry, in the order of the page."""
    _, *parts = glossary_file().read_text(encoding="utf-8").split("\n## ")
    return tuple(
        _entry(title, body)
        for title, _, text in (part.partition("\n") for part in parts)
        for body in _ENTRY.findall(text)
    )


def _entry(title: str, body: str) -> Entry:
    """Read one entry. Its terms are the bold words, and the names before the first colon."""
    body = re.sub(r"\s*\n\s*", " ", body)
    plain = _MARKUP.sub("", body)
    names = plain.partition(":")[0].split(", ")
    terms = (*names, *(term.strip("`") for term in _TERM.findall(body)))
    return Entry(section=title, terms=tuple(dict.fromkeys(terms)), text=plain)


def _key(word: str) -> str:
    return re.sub(r"[\s_-]+", " ", word.strip().lower())


@cache
def _by_term() -> dict[str, Entry]:
    """Each term with its entry; if two entries explain a term, the entry that is named after it wins."""
    found = {_key(term): entry for entry in entries() for term in entry.terms}
    return found | {_key(entry.terms[0]): entry for entry in reversed(entries())}


def entry_for(word: str) -> Entry | None:
    """The entry that explains a word, given in the singular or the plural."""
    key = _key(word)
    return _by_term().get(key) or _by_term().get(key.removesuffix("s"))


def entries_of(words: Iterable[str]) -> tuple[Entry, ...]:
    """The entries that explain these words; all entries if there are no words.

    A word that no entry explains selects every entry with a term that contains the word.

    Raises:
        InputError: no term contains the word.
    """
    found = [entry for word in words for entry in _matches(word)]
    return tuple(dict.fromkeys(found)) or entries()


def _matches(word: str) -> list[Entry]:
    key = _key(word)
    if exact := entry_for(word):
        homonyms = [each for each in entries() if {key, key.removesuffix("s")} & {*map(_key, each.terms)}]
        return [exact, *(each for each in homonyms if each != exact)]
    if key and (inside := [each for each in entries() if any(key in _key(term) for term in each.terms)]):
        return inside
    hint = did_you_mean(key, _by_term(), otherwise="`planner glossary` lists all terms")
    raise InputError(f"the glossary has no `{printable(word, 40)}`", hint=hint)


def section_anchor(entry: Entry) -> str:
    """The address of the entry's section on its page."""
    return re.sub(r"\s+", "-", entry.section.lower())
