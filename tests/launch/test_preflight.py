"""All reasons for which `launch` refuses a plan before any rank starts, in one message."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from planner.emit.programs.torch import Host
from planner.errors import EnvironmentProblem
from planner.launch import preflight
from planner.specs.gpus import Gpu

GIB = 2**30


def gpu(memory_gib: float) -> Gpu:
    return Gpu(name="NVIDIA A100-SXM4-80GB", memory=memory_gib * GIB, pcie_generation=4, pcie_lanes=16)


EIGHT = (gpu(80),) * 8


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A host on which the plan of conftest runs: a function that changes the host and runs the checks."""

    def check(plan, *, gpus=EIGHT, free=10**16, host=None):
        monkeypatch.setattr(preflight, "nvidia_gpus", lambda: gpus)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
        preflight.check(plan, tmp_path / "runs" / "new", host)

    return check


def test_a_host_that_has_everything_passes(machine, plan):
    machine(plan)


@pytest.mark.parametrize(
    ("lack", "message"),
    [
        ({"gpus": None}, "8 ranks of a100-80gb on this host, which has 0 GPUs"),
        ({"gpus": (gpu(80),) * 7}, "which has 7 GPUs"),
        ({"gpus": (*(gpu(80),) * 7, gpu(40))}, "a GPU of this host has 40.0 GiB"),
        ({"free": 1000}, "a checkpoint takes 1.89 TiB"),
    ],
)
def test_what_a_host_lacks_is_told(lack, message, machine, plan):
    with pytest.raises(EnvironmentProblem, match=message):
        machine(plan, **lack)


def test_everything_is_told_at_once(machine, plan):
    with pytest.raises(EnvironmentProblem) as problem:
        machine(plan, gpus=(gpu(40),), free=1000)
    assert len(problem.value.mistakes) == 3


def test_the_last_host_needs_only_its_own_ranks(machine, plan):
    plan = replace(plan, layout=replace(plan.layout, tp=1, dp=3))
    machine(plan, gpus=(gpu(80),) * 4, host=Host(number=1, address="head", port=1))


def test_a_cpu_host_needs_the_memory_of_all_ranks(machine, plan, monkeypatch):
    device = plan.cluster.device.model_copy(update={"kind": "cpu"})
    plan = replace(plan, cluster=plan.cluster.model_copy(update={"device": device}))
    needed = 8 * max(stage.total_bytes for stage in plan.memory)
    monkeypatch.setattr(preflight, "total_memory_bytes", lambda: needed)
    machine(plan, gpus=None)
    monkeypatch.setattr(preflight, "total_memory_bytes", lambda: needed - 1)
    with pytest.raises(EnvironmentProblem, match="8 ranks need"):
        machine(plan, gpus=None)


def test_a_port_that_somebody_has_is_told(machine, plan):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(EnvironmentProblem, match="cannot listen on port"):
            machine(plan, host=Host(number=0, address="here", port=taken.getsockname()[1]))
        machine(plan, host=Host(number=1, address="there", port=taken.getsockname()[1]))
