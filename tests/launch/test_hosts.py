"""The number of this host: from options, else from the variables that Slurm and Kubernetes set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.emit.programs.torch import Host
from planner.errors import EnvironmentProblem, InputError
from planner.launch.hosts import find_host

SLURM = {"SLURM_NODEID": "3", "SLURM_NNODES": "16", "SLURM_JOB_NODELIST": "node[07-22]", "SLURM_LOCALID": "0"}
KUBEFLOW = {
    "PET_NNODES": "16:16", "PET_NODE_RANK": "5", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400",
    "MASTER_ADDR": "elsewhere", "RANK": "9",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "options", "found"),
    [
        ({}, {"node_rank": 2, "master_addr": "head"}, (2, "head", 29500)),
        (SLURM, {"node_rank": 2, "master_addr": "head", "master_port": 1234}, (2, "head", 1234)),
        (SLURM | {"MASTER_ADDR": "node07", "MASTER_PORT": "20001"}, {}, (3, "node07", 20001)),
        (KUBEFLOW, {}, (5, "job-node-0-0.job", 29400)),
        ({"JOB_COMPLETION_INDEX": "15", "MASTER_ADDR": "job-0.svc"}, {}, (15, "job-0.svc", 29500)),
    ],
)
def test_a_host_finds_its_place(environment, options, found, plan):
    number, address, port = found
    assert find_host(plan, environment, **options) == Host(number=number, address=address, port=port)


def test_one_host_needs_no_place(plan):
    assert find_host(replace(plan, layout=replace(plan.layout, tp=2, dp=1)), SLURM) is None


def test_slurm_names_the_first_host(plan, tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[07-22]" ] && printf "node07\\nnode08\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_host(plan, SLURM) == Host(number=3, address="node07", port=29500)
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(EnvironmentProblem, match="scontrol show hostnames"):
        find_host(plan, SLURM)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "--node-rank and --master-addr are missing"),
        ({"RANK": "1"}, "nothing says which one this is: --master-addr"),
        ({"MASTER_ADDR": "head"}, "nothing says which one this is: --node-rank"),
        (KUBEFLOW | {"PET_NNODES": "4"}, "16 hosts, and this job has 4"),
        (KUBEFLOW | {"PET_NODE_RANK": "16"}, "this is host 16"),
        (KUBEFLOW | {"PET_NODE_RANK": "first"}, "PET_NODE_RANK is 'first'"),
        (SLURM | {"MASTER_ADDR": "node07", "SLURM_LOCALID": "1"}, "second task"),
    ],
)
def test_a_place_that_is_missing_or_wrong_is_told(environment, message, plan):
    with pytest.raises(InputError, match=message):
        find_host(plan, environment)
