"""The location of the shipped documents: inside an installed package, or beside it in a checkout."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final, Literal

PACKAGE: Final = Path(__file__).parents[1]
"""The folder of the package; pip writes it out, so that its files need no `importlib.resources`."""

Kind = Literal["models", "clusters", "clusters/devices", "clusters/generations", "engines", "evidence/profiles"]


@cache
def folder(kind: Kind) -> Path:
    """The folder of shipped documents of one kind."""
    if kind in ("engines", "evidence/profiles"):
        return PACKAGE / kind
    inside = PACKAGE / "library" / kind  # a wheel
    return inside if inside.is_dir() else PACKAGE.parent / kind


def glossary_file() -> Path:
    """The page that explains the program's terms; the site, the terminal and reports all use it."""
    inside = PACKAGE / "library" / "glossary.md"  # a wheel
    return inside if inside.is_file() else PACKAGE.parent / "docs" / "glossary.md"


@cache
def names(kind: Kind) -> tuple[str, ...]:
    """Names of the shipped documents; numbers in names sort by value."""
    found = (path.stem for path in folder(kind).glob("*.yaml"))
    return tuple(sorted(found, key=_by_number))


def _by_number(name: str) -> list[tuple[float, str]]:
    parts = re.findall(r"([^0-9]+)|([0-9]+(?:\.[0-9]+)?)", name)
    return [(float(number or 0), word) for word, number in parts]


def path_of(kind: Kind, name: str) -> Path:
    """The file of a shipped document."""
    return folder(kind) / f"{name}.yaml"


def header(kind: Kind, name: str) -> str:
    """The source that a shipped document names in its first comment line."""
    with path_of(kind, name).open(encoding="utf-8") as file:
        return file.readline().lstrip("#").strip()


def price_source(cluster: str) -> str:
    """The source of a shipped cluster's price: the comment after it; empty for other clusters."""
    if cluster not in names("clusters"):
        return ""
    text = path_of("clusters", cluster).read_text(encoding="utf-8")
    found = re.search(r"^price: [^#\n]*#\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
