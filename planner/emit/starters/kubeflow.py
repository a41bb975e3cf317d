"""Kubeflow Trainer v2: a TrainJob, whose controller passes to each host its number and the address of host 0.

Source: kubeflow/trainer 8c0f5059, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml; the readers of a TrainJob
accept unknown keys silently, so we write only keys of that file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from planner.emit.hosts import ranks_of_hosts, segment_of, uneven_hosts, yaml_file
from planner.emit.names import names_beside
from planner.emit.start import Starter
from planner.emit.starters import torchrun
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.emit.start import Start
    from planner.plan import Plan

SCRIPT: Final = "trainjob.yaml"
IMAGE: Final = "IMAGE"
FOLDER: Final = "/plan"
YOURS: Final = {IMAGE: f"a container image with the program, in a runtime that mounts this folder at {FOLDER}"}

_PLACE: Final = '"$PET_NODE_RANK" "$PET_MASTER_ADDR" "${PET_MASTER_PORT:-29500}"'


def train_job(start: Start) -> dict[str, str]:
    """The files of the TrainJob: the job itself, and the script that each host runs.

    Raises:
        InputError: hosts of several pools, or hosts with different numbers of ranks.
    """
    plan = start.plan
    ranks = alike_hosts(plan, "kubeflow")
    hosts = len(ranks_of_hosts(plan))
    files = {} if start.is_ours else torchrun.host_script(start)
    line = f"cd {FOLDER} && exec bash run.sh" + (f" {_PLACE}" if hosts > 1 else "")
    if start.target.launcher is not None:
        line = f"cd {FOLDER} && exec {start.target.launcher(plan, start.how)}"
    document = names_beside(__file__)
    document["metadata"]["name"] = _name(plan.model.name)
    trainer = document["spec"]["trainer"]
    trainer |= {"image": IMAGE, "numNodes": hosts, "numProcPerNode": ranks, "command": ["bash", "-c", line]}
    if plan.cluster.pools[0].kind == "cuda":
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(ranks)}}
    how = [f"kubectl create -f {SCRIPT}, with a runtime that mounts this folder at {FOLDER} on every host"]
    patches = document["spec"].pop("runtimePatches")
    if size := segment_of(ranks_of_hosts(plan), plan.layout.segment):
        (job,) = patches[0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        job["template"]["spec"]["template"]["metadata"]["annotations"][_SIZE] = str(size)
        document["spec"]["runtimePatches"] = patches
        how.append(f"Kueue places every {size} hosts in one rack; its topology needs the level {RACK}, or your own")
    return {SCRIPT: yaml_file(plan, document, *how), **files}


_SIZE: Final = "kueue.x-k8s.io/podset-slice-size"
RACK: Final = "nvidia.com/gpu.clique"
"""Label of nodes in one NVLink domain, by NVIDIA's GPU feature discovery; a Topology of Kueue must have this level."""


def alike_hosts(plan: Plan, starter: str) -> int:
    """Number of ranks per host, which is the same on all hosts.

    Raises:
        InputError: hosts of several pools, or hosts with different numbers of ranks.
    """
    hosts = ranks_of_hosts(plan)
    if len({host.pool.name for host in hosts}) > 1:
        hint = "--on slurm asks for each pool on its own"
        raise InputError("the plan's hosts are of several pools", where=f"--on {starter}", hint=hint)
    if fault := uneven_hosts(plan):
        raise InputError(fault[0], where=f"--on {starter}", hint=fault[1])
    return hosts[0].num_ranks


def _name(text: str) -> str:
    """A valid Kubernetes name made of the text: RFC 1035, at most 63 characters."""
    found = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:50].strip("-")
    return found if found[:1].isalpha() else f"train-{found}".rstrip("-")


STARTER: Final = Starter(script=SCRIPT, write=train_job, yours=YOURS)
