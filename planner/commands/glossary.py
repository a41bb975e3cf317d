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
    import json

    from planner.show.glossary import glossary_to_dict, glossary_view
    from planner.specs.glossary import entries_of

    found = entries_of(words)
    console.render(json.dumps(glossary_to_dict(found), indent=1) + "\n" if as_json else glossary_view(found))
    return ExitCode.OK


@click.command("glossary")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@json_option
def command(**options: Any) -> int:
    """Explain WORD, a term of the output or of a layout, or all."""
    return run(console=Console(), **options)
