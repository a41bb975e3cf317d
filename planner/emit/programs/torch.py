"""Our own trainer. It reads plan.json directly, so its table has only one setting."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.emit.hosts import ranks_of_hosts
from planner.emit.settings import not_carried
from planner.emit.starters.torchrun import torchrun_start
from planner.emit.target import Place, Setting, Target
from planner.run_arguments import RunArguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.emit.target import How, Values
    from planner.plan import Plan

NUMBER: Final = "NUMBER"
ADDRESS: Final = "HOST"
PORT: Final = "PORT"
PLACEHOLDERS: Final = (
    "On all hosts at once; NUMBER is the host's own, HOST an address of host 0 that the others reach,\n"
    "# and PORT a port that is free there."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of a run: its number, and the address and port where host 0 listens."""

    number: int
    address: str
    port: int | str


def torchrun_command(
    plan: Plan, plan_path: Path, *, output: Path, arguments: RunArguments, host: Host | None = None
) -> tuple[str, ...]:
    """Words of the `torchrun` command that runs the plan on one host; host: None if the plan uses only one host.

    torchrun does no restarts, because `planner launch` restarts the run itself, with a new rendezvous. The rendezvous
    of several hosts is static: with `c10d` torchrun ignores --node-rank, and ranks would differ from the plan.
    """
    hosts = ranks_of_hosts(plan)
    place = None
    if host is not None:
        ranks, address = str(hosts[host.number].num_ranks), shlex.quote(host.address)
        number, port = str(host.number), str(host.port)
        place = Place(hosts=len(hosts), ranks=ranks, number=number, address=address, port=port)
    start = torchrun_start(plan, place).replace("\\\n", "")
    return (*shlex.split(start), *_program(plan_path, output, arguments))


def torchrun_commands(plan: Plan, plan_path: Path, *, output: Path, arguments: RunArguments) -> str:
    """The shell text that starts the plan on its hosts (`commands_of_hosts`).

    Plan, data and output must be on storage that all hosts share.
    """
    program = shlex.join(_program(plan_path, output, arguments))
    ranks = [host.num_ranks for host in ranks_of_hosts(plan)]
    return commands_of_hosts(ranks, lambda place: f"{torchrun_start(plan, place)} {program}")


def commands_of_hosts(ranks: Sequence[int], command: Callable[[Place | None], str]) -> str:
    """A command for each run of hosts with as many ranks, below a comment that numbers the hosts.

    ranks: of each host, [hosts].
    command: returns the shell text for such hosts; `place` is None for an only host.
    """
    if len(ranks) == 1:
        return f"{command(None)}\n"
    text, first = f"# {PLACEHOLDERS}\n", 0
    for here, group in groupby(ranks):
        last = first + sum(1 for _ in group) - 1
        hosts, number = (f"hosts {first} to {last}", NUMBER) if last > first else (f"host {first}", str(first))
        place = Place(hosts=len(ranks), ranks=str(here), number=number, address=ADDRESS, port=PORT)
        text += f"# {hosts}:\n{command(place)}\n"
        first = last + 1
    return text


def _program(plan_path: Path, output: Path, arguments: RunArguments) -> tuple[str, ...]:
    program = ("--max-restarts=0", "-m", "planner.trainer", str(plan_path), f"--output={output}")
    return (*program, *arguments.options())


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:  # noqa: ARG001 - the plan says all
    program = _program(Path("plan.json"), Path("run"), how.arguments)
    return f"{torchrun_start(plan, place)} \\\n  {shlex.join(program)}"


def _launcher(plan: Plan, how: How) -> str:  # noqa: ARG001 - as the others
    return shlex.join(("planner", "launch", "plan.json", "--output=run", *how.arguments.options()))


def _advice(plan: Plan, how: How) -> tuple[str, ...]:  # noqa: ARG001 - as the others
    trial = "--data SOURCE: without it the run is a trial on the source of Python's standard library, bytes as tokens"
    return () if how.arguments.data else (trial,)


TARGET: Final = Target(
    name="torch",
    program="the planner's own trainer",
    settings=(
        Setting(says=("layout", "training", "model"), write=lambda plan: {}),  # noqa: ARG005 - plan.json says all
        not_carried(*(f"training.{name}" for name in ("weights", "schedule", "warmup_ratio", "epochs"))),
    ),
    command=_command,
    launcher=_launcher,
    advice=_advice,
    takes=tuple(each.name for each in fields(RunArguments)),
    install="pip install 'parallel-planner[train]'",
)
