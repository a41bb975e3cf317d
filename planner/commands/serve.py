"""`planner serve`: tools for agents over standard input and output."""

from __future__ import annotations

import click

from planner.errors import EnvironmentProblem, ExitCode


def run() -> int:
    """Serve until standard input closes, and return the exit code.

    Raises:
        EnvironmentProblem: the SDK of the Model Context Protocol is not installed.
    """
    try:
        from planner.serve import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        words = "the SDK of the Model Context Protocol is not installed"
        raise EnvironmentProblem(words, hint="pip install 'parallel-planner[serve]'") from None
    server().run("stdio")
    return ExitCode.OK


@click.command("serve")
def command() -> int:
    """Serve the answers of the planner to agents, as tools.

    The Model Context Protocol runs over standard input and output. Only files that a call names are read, and none is
    written. Needs the extra `serve`.
    """
    return run()
