"""`planner clusters`: lists the shipped clusters, and describes this machine as a cluster."""

from __future__ import annotations

from typing import Any

import click

from planner.commands.console import Console
from planner.commands.options import json_option
from planner.errors import ExitCode, InputError


def run(name: str | None = None, *, console: Console, detect: bool = False, as_json: bool = False) -> int:
    """Print the list of clusters, one cluster by its name or file, or this machine; return the exit code.

    Raises:
        PlannerError: an unknown name, or a document with mistakes.
    """
    from planner import shipped
    from planner.show.library import cluster_table, entries

    if name and detect:
        message = f"--detect describes this machine; leave out {name}, or --detect"
        raise InputError(message, hint="see `planner clusters --help`")
    if detect:
        found: Any = shipped.this_machine()
    else:
        found = shipped.one_cluster(name) if name else shipped.clusters()
    console.render(entries(found, cluster_table, as_json=as_json))
    return ExitCode.OK


@click.command("clusters")
@click.argument("name", required=False)
@click.option("--detect", is_flag=True, help="Print a cluster document for this machine.")
@json_option
def command(**options: Any) -> int:
    """List the shipped clusters, or print NAME in full."""
    return run(console=Console(), **options)
