"""Read the YAML files beside this module, which add values that tables leave out, and compare names."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.specs.yaml import shipped_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping


class UnpricedRun(Exception):
    """A row that cannot be priced; the exception's text is the reason for the user."""


@cache
def knowledge(name: str) -> Mapping[str, Any]:
    """One of the YAML files beside this module, as plain values."""
    plain = shipped_yaml(Path(__file__).with_name(f"{name}.yaml")).plain
    assert isinstance(plain, dict)
    return plain


def normalized(name: str) -> str:
    """A name in lower case, with one hyphen for blanks and underscores."""
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def first_match(name: str, entries: Any) -> Mapping[str, Any] | None:
    """The first entry whose `match` pattern covers a normalized name."""
    return next((entry for entry in entries if fnmatchcase(name, entry["match"])), None)
