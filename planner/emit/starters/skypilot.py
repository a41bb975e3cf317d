"""SkyPilot 0.14: a task that starts the program on every host. SkyPilot refuses a task with unknown keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from planner.emit.hosts import ranks_of_hosts, segment_of, yaml_file
from planner.emit.start import Starter
from planner.emit.starters import torchrun
from planner.emit.starters.kubeflow import alike_hosts
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.emit.start import Start
    from planner.plan import Plan

SCRIPT: Final = "task.yaml"

_WITH_SIZE: Final = {"v100-32gb", "a100-80gb"}
"""Devices whose size is part of SkyPilot's name; of other devices it has the first word, in capitals: H100, MI300X."""

_FIRST: Final = '"$(head -n1 <<< "$SKYPILOT_NODE_IPS")"'


def task(start: Start) -> dict[str, str]:
    """The files of the SkyPilot task: the task itself, and the script that each host runs.

    Raises:
        InputError: hosts of several pools, hosts with different numbers of ranks, hosts without GPUs, or several
            segments.
    """
    plan = start.plan
    ranks = alike_hosts(plan, "skypilot")
    hosts = len(ranks_of_hosts(plan))
    if size := segment_of(ranks_of_hosts(plan), plan.layout.segment):
        words = (
            f"the plan places every {size} of {hosts} hosts in one rack (segment={size}), which SkyPilot cannot ask for"
        )
        raise InputError(words, where="--on skypilot", hint="--on slurm and --on kubeflow ask for it")
    files = {} if start.is_ours else torchrun.host_script(start)
    line = "bash run.sh" + (f' "$SKYPILOT_NODE_RANK" {_FIRST} 29500' if hosts > 1 else "")
    if start.target.launcher is not None:
        place = f' --node-rank="$SKYPILOT_NODE_RANK" --master-addr={_FIRST} --master-port=29500' if hosts > 1 else ""
        line = f"{start.target.launcher(plan, start.how)}{place}"
    resources: dict[str, Any] = {"accelerators": f"{_accelerator(plan)}:{ranks}"}
    if hosts > 1:
        resources["network_tier"] = "best"
    document = {
        "name": plan.model.name.replace("_", "-"),
        "num_nodes": hosts,
        "resources": resources,
        "workdir": ".",
        "run": f"{line}\n",
    }
    how = f"In this folder: sky launch {SCRIPT}; `setup:` for what has to be installed is yours to add"
    return {SCRIPT: yaml_file(plan, document, how), **files}


def _accelerator(plan: Plan) -> str:
    pool = plan.cluster.pools[0]
    if pool.kind != "cuda":
        raise InputError("the plan's hosts have no GPUs", where="--on skypilot", hint="--on torchrun starts it by hand")
    name = pool.device.name
    return (name if name in _WITH_SIZE else name.partition("-")[0]).upper()


STARTER: Final = Starter(script=SCRIPT, write=task)
