"""`planner models`: the models that are shipped."""

from __future__ import annotations

from typing import Any

import click

from planner.commands.console import Console
from planner.commands.options import json_option
from planner.errors import ExitCode


def run(name: str | None = None, *, console: Console, as_json: bool = False) -> int:
    """Print the list, or one model by its name or file; return the exit code.

    Raises:
        PlannerError: an unknown name, or a document with mistakes.
    """
    import json

    from planner import shipped
    from planner.show.library import entry_text, model_table

    found = shipped.one_model(name) if name else shipped.models()
    if as_json:
        console.print(json.dumps(found, indent=1) + "\n")
    else:
        console.render(entry_text(found) if isinstance(found, dict) else model_table(found))
    return ExitCode.OK


@click.command("models")
@click.argument("name", required=False)
@json_option
def command(**options: Any) -> int:
    """List the models that are shipped, or show NAME whole."""
    return run(console=Console(), **options)
