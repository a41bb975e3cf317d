"""Our own trainer. It reads plan.json directly, so its table has only one setting."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.emit.hosts import ranks_of_hosts
from planner.emit.starters.torchrun import torchrun_start
from planner.emit.target import Setting, Target, not_carried
from planner.run_arguments import RunArguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.emit.hosts import HostRanks
    from planner.emit.target import How, Place, Values
    from planner.plan import Plan

LINES_SHOWN: Final = 100
ADDRESS: Final = "HOST"
PORT: Final = "PORT"
PLACEHOLDERS: Final = (
    "HOST and PORT stand for an address of host 0 that the others reach, and for a port that is free there"
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
    program = _program(plan_path, output, arguments)
    if host is not None:
        return ("torchrun", *_rendezvous(ranks_of_hosts(plan), host), *program)
    return ("torchrun", "--standalone", f"--nproc-per-node={plan.layout.world_size}", *program)


def torchrun_commands(plan: Plan, plan_path: Path, *, output: Path, arguments: RunArguments) -> tuple[str, ...]:
    """One shell line for each host, to be run on all hosts at once; with many hosts, a comment replaces most lines.

    HOST and PORT are placeholders for an address and port of host 0 that the other hosts can reach. Plan, data and
    output must be on storage that all hosts share.
    """
    hosts, program = ranks_of_hosts(plan), _program(plan_path, output, arguments)

    def words(host: Host | None) -> Sequence[str]:
        if host is None:
            return torchrun_command(plan, plan_path, output=output, arguments=arguments)
        return ("torchrun", *_rendezvous(hosts, host), *program)

    return lines_of_hosts(len(hosts), words, number="--node-rank=")


def lines_of_hosts(
    hosts: int, words: Callable[[Host | None], Sequence[str]], *, number: str = "host "
) -> tuple[str, ...]:
    """One shell line for each host; with many hosts, a comment replaces most lines.

    words: returns the command for a host, or for None if there is only one host.
    number: text before the numbers of hosts in the comment.
    """
    if hosts == 1:
        return (shlex.join(words(None)),)
    last = hosts - 1
    shown = range(hosts) if hosts <= LINES_SHOWN else (*range(LINES_SHOWN - 1), last)
    lines = [shlex.join(words(Host(number=each, address=ADDRESS, port=PORT))) for each in shown]
    if left_out := hosts - len(lines):
        lines.insert(-1, f"# and {left_out:,} more hosts, with {number}{LINES_SHOWN - 1} to {last - 1}")
    return tuple(lines)


def _rendezvous(hosts: tuple[HostRanks, ...], host: Host) -> tuple[str, ...]:
    return (
        f"--nnodes={len(hosts)}",
        f"--nproc-per-node={hosts[host.number].num_ranks}",
        f"--node-rank={host.number}",
        f"--master-addr={host.address}",
        f"--master-port={host.port}",
    )


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
