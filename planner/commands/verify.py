"""`planner verify`: runs one rank's step on fake tensors and compares its memory with the plan's ledger."""

from __future__ import annotations

from typing import Any

import click

from planner.commands.console import Console
from planner.commands.options import json_option
from planner.errors import ExitCode


def run(plan_path: str, *, console: Console, rank: int | None = None, as_json: bool = False) -> int:
    """Print the memory of one rank's step by ledger line, planned and counted; return the exit code.

    The exit code is BUG if count and ledger differ by more than 3 % of the rank's bytes, in all or in one line, because
    then the forecast or the program is wrong.

    Raises:
        PlannerError: as `planner.verify.verify`, or the file is no plan.
    """
    import json

    from planner.show.verify import verification_to_dict, verification_view
    from planner.verify import verify

    plan = console.read_plan(plan_path)
    with console.progress("running a step on fake tensors"):
        found = verify(plan, rank)
    console.render(json.dumps(verification_to_dict(found), indent=1) + "\n" if as_json else verification_view(found))
    return ExitCode.OK if found.agrees else ExitCode.BUG


@click.command("verify")
@click.argument("plan_path", metavar="PLAN")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Rank to count; by default one of the fullest stage."
)
@json_option
def command(**options: Any) -> int:
    """Count the memory of a step on fake tensors, and compare.

    One rank of PLAN runs its real program with tensors that have no data and a network that sends nothing. This
    takes seconds to minutes, and needs no GPU. The exit code is 1 if the count differs from the forecast by more
    than 3 %. PLAN must be for engine torch. If their packages are installed, plans for fsdp, deepspeed and torchtitan
    are counted too, with these programs' own code.
    """
    return run(console=Console(), **options)
