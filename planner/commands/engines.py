"""`planner engines`: lists the training programs for which a plan can be made."""

from __future__ import annotations

from typing import Any

import click

from planner.commands.console import Console
from planner.commands.options import json_option
from planner.errors import ExitCode


def run(name: str | None = None, *, console: Console, as_json: bool = False) -> int:
    """Print the list of engines, or one engine's profile by its name or file; return the exit code.

    Raises:
        PlannerError: an unknown name, or a document with mistakes.
    """
    import json

    from planner import shipped
    from planner.show.library import engine_table, entry_text

    found = shipped.one_engine(name) if name else shipped.engine_profiles()
    if as_json:
        console.print(json.dumps(found, indent=1) + "\n")
    else:
        console.render(entry_text(found) if isinstance(found, dict) else engine_table(found))
    return ExitCode.OK


@click.command("engines")
@click.argument("name", required=False)
@json_option
def command(**options: Any) -> int:
    """List the programs for --engine, or print profile NAME in full."""
    return run(console=Console(), **options)
