"""The number of this host in a run and the address of host 0: from options, Slurm or Kubernetes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any, Final

from planner.emit.hosts import num_hosts
from planner.emit.programs.torch import Host
from planner.errors import EnvironmentProblem, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.plan import Plan

DEFAULT_PORT: Final = 29500  # torchrun's default
_NUMBER: Final = ("PET_NODE_RANK", "SLURM_NODEID", "NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")
_COUNT: Final = ("PET_NNODES", "SLURM_NNODES", "NNODES")
_ADDRESS: Final = ("PET_MASTER_ADDR", "MASTER_ADDR")
_PORT: Final = ("PET_MASTER_PORT", "MASTER_PORT")
"""Environment variables in order of precedence.

The names with PET_ are torchrun's names for its options, which the Kubeflow trainer sets. Kubeflow's PyTorchJob sets
MASTER_ADDR, MASTER_PORT and RANK for one process in each pod. An indexed Job of Kubernetes sets JOB_COMPLETION_INDEX.
"""


def find_host(plan: Plan, environment: Mapping[str, str], **place: Any) -> Host | None:
    """Return this host's place in the run, as `find_place`; None if the plan needs a single host."""
    return find_place(num_hosts(plan), environment, **place)


def find_place(
    hosts: int,
    environment: Mapping[str, str],
    *,
    what: str = "the plan",
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Host | None:
    """Return this host's place among `hosts` hosts; None for a single host. Options override the environment.

    Raises:
        InputError: neither options nor environment give the number of this host, or the number is out of range.
        EnvironmentProblem: Slurm does not report the names of its hosts.
    """
    if hosts == 1:
        return None
    number = node_rank if node_rank is not None else _integer(environment, _NUMBER)
    address = master_addr or _first(environment, _ADDRESS) or _head_of_slurm(environment)
    if number is None or address is None:
        lacking = [name for name, value in (("--node-rank", number), ("--master-addr", address)) if value is None]
        missing = f"{' and '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} missing"
        raise InputError(
            f"{what} fills {hosts} hosts, and nothing says which one this is: {missing}",
            hint="start `planner launch` on every host, with srun or with these options; --dry-run shows the commands",
        )
    count = _integer(environment, _COUNT) if node_rank is None else None
    if count not in (None, hosts):
        raise InputError(f"{what} fills {hosts} hosts, and this job has {count}", hint="ask for as many, or plan again")
    if not 0 <= number < hosts:
        raise InputError(f"this is host {number}, and {what} fills hosts 0 to {hosts - 1}")
    if environment.get("SLURM_LOCALID", "0") != "0" and node_rank is None:
        raise InputError("a second task runs `planner launch` on this host", hint="srun --ntasks-per-node=1")
    port = master_port or _integer(environment, _PORT) or DEFAULT_PORT
    return Host(number=number, address=address, port=port)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _integer(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return None
    text = environment[name].partition(":")[2] or environment[name]  # torchrun also accepts a range of hosts, as in 2:2
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{name} is {environment[name]!r}, which is no number")
    return int(text)


def _head_of_slurm(environment: Mapping[str, str]) -> str | None:
    """Return Slurm's name of the first host of a job."""
    hosts = environment.get("SLURM_JOB_NODELIST")
    if not hosts:
        return None
    command = ["scontrol", "show", "hostnames", hosts]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentProblem(
            f"`{' '.join(command[:3])}` does not answer: {error}", hint="give --master-addr"
        ) from None
    return next(iter(answer.stdout.split()), None)
