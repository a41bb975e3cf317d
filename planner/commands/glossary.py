"""`planner glossary`: explains the terms of the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from planner.commands.console import Console
from planner.commands.options import json_option
from planner.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(words: Sequence[str] = (), *, console: Console, as_json: bool = False) -> int:
    """Print the glossary entries of these words, or all entries; return the exit code.

    Raises:
        InputError: the glossary has no entry for a word.
    """
    from planner.show.library import entries, glossary_view
    from planner.specs.glossary import entries_of

    found = [{"terms": list(each.terms), "section": each.section, "text": each.text} for each in entries_of(words)]
    console.render(entries(found, glossary_view, as_json=as_json))
    return ExitCode.OK


@click.command("glossary")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@json_option
def command(**options: Any) -> int:
    """Explain WORD, a term of the output or of a layout, or all."""
    return run(console=Console(), **options)
