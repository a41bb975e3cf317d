"""Output of `planner glossary`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from planner.show.screen import clean, section, stack

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.console import Group

    from planner.specs.glossary import Entry


def glossary_to_dict(found: Collection[Entry]) -> list[dict[str, Any]]:
    """Return the entries as plain data for JSON."""
    return [{"terms": list(each.terms), "section": each.section, "text": each.text} for each in found]


def glossary_view(found: Collection[Entry]) -> Group:
    """Show the entries below the headings of their sections."""
    sections = dict.fromkeys(each.section for each in found)
    return stack(*(section(title, *(_line(each) for each in found if each.section == title)) for title in sections))


def _line(entry: Entry) -> Text:
    name, _, words = entry.text.partition(":")
    return Text.assemble((clean(name), "bold"), clean(f":{words}"))
