"""The torchrun command of a plan: one for each host."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from planner.plan import Plan

__all__ = ["num_hosts", "torchrun_command", "torchrun_commands"]


def num_hosts(plan: Plan) -> int:
    """Hosts that the plan's devices fill: torchrun is started once on each."""
    return -(-plan.layout.world_size // plan.cluster.devices_per_host)


def torchrun_command(
    plan: Plan,
    plan_path: Path,
    *,
    output: Path,
    data: tuple[Path, ...] = (),
    steps: int | None = None,
    resume: str = "auto",
) -> tuple[str, ...]:
    """Arguments that run the plan on this host alone, `torchrun` first.

    No restarts by torchrun: `planner launch` starts again itself, with a fresh rendezvous.
    """
    rendezvous = ("--standalone", f"--nproc-per-node={plan.layout.world_size}")
    return ("torchrun", *rendezvous, *_program(plan_path, output, data, steps, resume))


def torchrun_commands(
    plan: Plan,
    plan_path: Path,
    *,
    output: Path,
    data: tuple[Path, ...] = (),
    steps: int | None = None,
    resume: str = "auto",
) -> tuple[str, ...]:
    """One shell line for each host, to be run on all hosts at once.

    HOST and PORT stand for an address of the first host that the others reach. Plan, data and output must be on
    storage that all hosts share. The rendezvous is static: with `c10d` torchrun ignores --node-rank, and ranks would
    not be numbered as the plan numbers them. Hosts are filled one after the other, as the plan prices them, so the
    last one may run fewer ranks.
    """
    program = _program(plan_path, output, data, steps, resume)
    hosts = num_hosts(plan)
    if hosts == 1:
        alone = ("torchrun", "--standalone", f"--nproc-per-node={plan.layout.world_size}")
        return (shlex.join((*alone, *program)),)
    per_host = plan.cluster.devices_per_host
    lines = []
    for host in range(hosts):
        rendezvous = (
            f"--nnodes={hosts}",
            f"--nproc-per-node={min(per_host, plan.layout.world_size - host * per_host)}",
            f"--node-rank={host}",
            "--master-addr=HOST",
            "--master-port=PORT",
        )
        lines.append(shlex.join(("torchrun", *rendezvous, *program)))
    return tuple(lines)


def _program(plan_path: Path, output: Path, data: tuple[Path, ...], steps: int | None, resume: str) -> tuple[str, ...]:
    arguments = ["--max-restarts=0", "-m", "planner.trainer", str(plan_path), f"--output={output}"]
    arguments += [f"--data={path}" for path in data]
    arguments += [f"--steps={steps}"] if steps is not None else []
    return (*arguments, f"--resume={resume}")
