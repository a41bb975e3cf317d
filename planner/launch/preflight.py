"""Checks before any rank starts: devices, memory, disk and port. All problems are reported together."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.cost.parameters import num_params
from planner.emit.hosts import ranks_of_hosts
from planner.errors import EnvironmentProblem, InputError, Mistake
from planner.specs.detect import total_memory_bytes
from planner.specs.gpus import nvidia_gpus
from planner.units import format_bytes
from planner.verdict import check_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.emit.hosts import HostRanks
    from planner.emit.programs.torch import Host
    from planner.plan import Plan

BYTES_SAVED_PER_PARAMETER: Final = 12  # fp32 weight and both moments of AdamW
_AMD: Final = Path("/dev/kfd")  # where a ROCm build of torch finds its GPUs


def check(plan: Plan, output: Path, host: Host | None) -> None:
    """Refuse a plan that cannot run on this host.

    The first batch is checked later, by torchrun's agent, which imports torch. Whether the plan fits into memory was
    checked before, by `planner.verdict.check_fits`.

    Raises:
        InputError: the plan is for another engine.
        EnvironmentProblem: the host lacks something; the error lists everything that is missing.
    """
    _check_engine(plan)
    own = ranks_of_hosts(plan)[host.number if host else 0]
    mistakes = [*_torch(plan), *_devices(plan, own), *_disk(plan, output), *_port(host)]
    if mistakes:
        raise EnvironmentProblem(*mistakes)


def _check_engine(plan: Plan) -> None:
    if plan.engine.name != "torch":
        emits = f"`planner emit PLAN -o DIR` writes what {plan.engine.program} runs" if plan.engine.emits else ""
        hint = emits or "plan again with --engine torch"
        raise InputError(f"the plan is made for {plan.engine.name}, and the planner starts the torch engine", hint=hint)
    check_schedule(plan)


def _torch(plan: Plan) -> Iterator[Mistake]:
    if importlib.util.find_spec("torch") is None:
        yield Mistake(message="torch is not installed", hint="pip install 'parallel-planner[train]'")
    if plan.training.precision == "fp8" and importlib.util.find_spec("torchao") is None:
        yield Mistake(
            message="precision fp8 needs torchao, which is not installed", hint="pip install 'parallel-planner[fp8]'"
        )


def _devices(plan: Plan, own: HostRanks) -> Iterator[Mistake]:
    ranks, of_stage = own.num_ranks, plan.layout.stride("pp")
    stages = plan.memory[own.first // of_stage : (own.first + ranks - 1) // of_stage + 1]
    needed = max((stage.total_bytes for stage in stages), default=0.0)
    if plan.cluster.kind == "cpu":
        memory = total_memory_bytes()
        if needed * ranks > memory:
            yield Mistake(
                message=f"{ranks} ranks need {format_bytes(needed * ranks)}, this machine has {format_bytes(memory)}",
                hint="plan on this machine: local-cpu describes it",
            )
        return
    gpus = nvidia_gpus()
    if gpus is None and _AMD.exists():  # AMD GPUs are not counted here; the ranks report missing devices
        return
    found = len(gpus or ())
    if found < ranks:
        yield Mistake(
            message=f"the plan runs {ranks} ranks of {own.pool.device.name} on this host, which has {found} GPUs",
            hint="check nvidia-smi and CUDA_VISIBLE_DEVICES, or plan again: `planner clusters --detect` describes it",
        )
    smallest = min((gpu.memory for gpu in gpus or ()), default=needed)
    if smallest < needed:
        yield Mistake(
            message=f"a rank needs {format_bytes(needed)}, and a GPU of this host has {format_bytes(smallest)}",
            hint="plan again with --set device.memory=..., or for the cluster that `planner clusters --detect` prints",
        )


def _disk(plan: Plan, output: Path) -> Iterator[Mistake]:
    """Check that the disk has room for one checkpoint; checkpoints of an earlier run in the folder count as used."""
    place = next(each for each in (output.absolute(), *output.absolute().parents) if each.exists())
    needed, free = BYTES_SAVED_PER_PARAMETER * num_params(plan.model), shutil.disk_usage(place).free
    if free < needed:
        yield Mistake(
            message=f"a checkpoint takes {format_bytes(needed)}, and {place} has {format_bytes(free)} left",
            hint="choose another --output",
        )


def _port(host: Host | None) -> Iterator[Mistake]:
    """Check that the port of host 0 is free; a port that is only in TIME_WAIT counts as free."""
    if host is None or host.number:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(host.port)))
        except OSError as error:
            yield Mistake(message=f"cannot listen on port {host.port}: {error.strerror}", hint="give --master-port")
