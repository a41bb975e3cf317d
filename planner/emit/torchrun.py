"""The torchrun command of a plan, and the script that runs it on hosts without the planner's launcher."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.cost.run import devices_in_use
from planner.errors import InputError
from planner.layout import format_layout

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.run_arguments import RunArguments
    from planner.specs.cluster import ClusterSpec

LINES_SHOWN: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host's place among those of a run: its number, and where host 0 listens."""

    number: int
    address: str
    port: int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanks:
    """The ranks of one host: `first` and those after it. pool: the cluster, or the pool of a mixed one."""

    pool: ClusterSpec
    first: int
    num_ranks: int


def ranks_of_hosts(plan: Plan) -> tuple[HostRanks, ...]:
    """The hosts that the plan's devices fill, in the order of their ranks; torchrun is started once on each.

    Hosts are filled one after the other, as the plan prices them, so the last of a pool may have fewer ranks.
    """
    used = {pool.name: (pool, count) for pool, count in devices_in_use(plan.cluster, plan.layout)}
    order = dict.fromkeys(plan.layout.pools) or used
    found: list[HostRanks] = []
    first = 0
    for pool, count in (used[name] for name in order):
        end = first + count
        while first < end:
            found.append(HostRanks(pool=pool, first=first, num_ranks=min(pool.devices_per_host, end - first)))
            first += found[-1].num_ranks
    return tuple(found)


def num_hosts(plan: Plan) -> int:
    """Hosts that the plan's devices fill."""
    return len(ranks_of_hosts(plan))


def torchrun_command(
    plan: Plan, plan_path: Path, *, output: Path, arguments: RunArguments, host: Host | None = None
) -> tuple[str, ...]:
    """Words of the command that runs the plan on one host, `torchrun` first; without `host` it is the only one.

    No restarts by torchrun: `planner launch` starts again itself, with a fresh rendezvous. The rendezvous of several
    hosts is static: with `c10d` torchrun ignores --node-rank, and ranks would not be numbered as the plan numbers them.
    """
    program = _program(plan_path, output, arguments)
    if host is not None:
        return ("torchrun", *_rendezvous(ranks_of_hosts(plan), host), *program)
    return ("torchrun", "--standalone", f"--nproc-per-node={plan.layout.world_size}", *program)


def torchrun_commands(plan: Plan, plan_path: Path, *, output: Path, arguments: RunArguments) -> tuple[str, ...]:
    """One shell line for each host, to be run on all hosts at once; of many hosts a comment stands for most.

    HOST and PORT stand for an address of the first host that the others reach. Plan, data and output must be on
    storage that all hosts share.
    """
    hosts = ranks_of_hosts(plan)
    if len(hosts) == 1:
        return (shlex.join(torchrun_command(plan, plan_path, output=output, arguments=arguments)),)
    program, last = _program(plan_path, output, arguments), len(hosts) - 1
    shown = range(len(hosts)) if len(hosts) <= LINES_SHOWN else (*range(LINES_SHOWN - 1), last)
    places = (Host(number=number, address="HOST", port="PORT") for number in shown)
    lines = [shlex.join(("torchrun", *_rendezvous(hosts, place), *program)) for place in places]
    if left_out := len(hosts) - len(lines):
        lines.insert(-1, f"# and {left_out:,} more hosts, with --node-rank={LINES_SHOWN - 1} to {last - 1}")
    return tuple(lines)


def _rendezvous(hosts: tuple[HostRanks, ...], host: Host) -> tuple[str, ...]:
    return (
        f"--nnodes={len(hosts)}",
        f"--nproc-per-node={hosts[host.number].num_ranks}",
        f"--node-rank={host.number}",
        f"--master-addr={host.address}",
        f"--master-port={host.port}",
    )


def torchrun_script(plan: Plan, *, arguments: RunArguments) -> str:
    """A bash script that runs the plan beside it, `plan.json`, into the folder `run` beside it."""
    command = _program(Path("plan.json"), Path("run"), arguments)
    hosts = num_hosts(plan)
    if hosts == 1:
        alone = ("torchrun", "--standalone", f"--nproc-per-node={plan.layout.world_size}")
        return f"{script_head(plan)}\n{GO_THERE}\nexec {shlex.join(alone)} \\\n  {shlex.join(command)}\n"
    ranks = [host.num_ranks for host in ranks_of_hosts(plan)]
    changes = ((n, here) for n, (before, here) in enumerate(pairwise(ranks), 1) if here != before)
    others = "".join(f"if [[ $1 -ge {n} ]]; then ranks={here}; fi\n" for n, here in changes)
    return (
        f"{script_head(plan)}"
        f"# On every host at once: bash run.sh NUMBER ADDRESS [PORT], with its number from 0 to {hosts - 1},\n"
        "# the address of host 0, and a port that is free there. All hosts see this folder.\n\n"
        'if (( $# < 2 )); then\n  echo "usage: bash run.sh NUMBER ADDRESS [PORT]" >&2\n  exit 2\nfi\n'
        f"{GO_THERE}ranks={ranks[0]}\n{others}"
        f'exec torchrun --nnodes={hosts} --nproc-per-node="$ranks" --node-rank="$1" \\\n'
        '  --master-addr="$2" --master-port="${3:-29500}" \\\n'
        f"  {shlex.join(command)}\n"
    )


def check_engine(plan: Plan, engine: str = "torch") -> None:
    """Refuse a plan that is not for the program that is to run it: the planner's own trainer, or `engine`.

    Raises:
        InputError: it is made for another engine, or `explain` priced a schedule that the engine does not have.
    """
    if plan.engine.name != engine:
        wanted = "the planner starts the torch engine" if engine == "torch" else f"this is for {engine}"
        raise InputError(f"the plan is made for {plan.engine.name}, and {wanted}", hint=_way_out(plan, engine))
    if plan.layout.schedule not in plan.engine.pipeline.schedules:
        raise InputError(
            f"the plan's schedule is {plan.layout.schedule}, which engine {plan.engine.name} does not run",
            hint=f"it runs {', '.join(plan.engine.pipeline.schedules)}",
        )


def _way_out(plan: Plan, engine: str) -> str:
    """What to do with a plan of another engine: its own script, its own options by hand, or a plan for this one."""
    if plan.engine.name in ("torch", "megatron"):
        own = "torchrun" if plan.engine.name == "torch" else "megatron"
        return f"`planner emit PLAN --to {own}` writes the script for it; this one needs a plan of --engine {engine}"
    return (
        f"set the plan's layout in the configuration of {plan.engine.program}: {format_layout(plan.layout)}; "
        f"or plan again with --engine {engine}"
    )


def script_head(plan: Plan) -> str:
    """The first lines of every script: what it runs, and that any failure ends it."""
    hosts = Counter(host.pool.name for host in ranks_of_hosts(plan))
    devices = Counter[str]()
    for pool, count in devices_in_use(plan.cluster, plan.layout):
        devices[pool.device.name] += count
    where = " + ".join(f"{count} x {name}" for name, count in hosts.items())
    what = " + ".join(f"{count} {name}" for name, count in devices.items())
    return f"#!/usr/bin/env bash\n# {plan.model.name} on {where}, {what}:\n# {format_layout(plan.layout)}\n"


GO_THERE = 'set -euo pipefail\ncd "$(dirname "$0")"\n'


def _program(plan_path: Path, output: Path, arguments: RunArguments) -> tuple[str, ...]:
    program = ("--max-restarts=0", "-m", "planner.trainer", str(plan_path), f"--output={output}")
    return (*program, *arguments.options())
