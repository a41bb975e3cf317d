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
    from planner import shipped
    from planner.show.library import engine_table, entries

    found = shipped.one_engine(name) if name else shipped.engine_profiles()
    console.render(entries(found, engine_table, as_json=as_json))
    return ExitCode.OK


@click.command("engines")
@click.argument("name", required=False)
@json_option
def command(**options: Any) -> int:
    """List the programs for --engine, or print profile NAME in full."""
    return run(console=Console(), **options)
