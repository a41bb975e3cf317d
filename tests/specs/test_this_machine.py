"""`planner clusters --detect`: the answers of a driver and a kernel become a cluster document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import EnvironmentProblem
from planner.specs import gpus
from planner.specs.cluster_documents import load_cluster
from planner.specs.this_machine import detected_cluster

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) cat "{folder}/gpus" ;;
  nvlink) cat "{folder}/links" ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that makes a machine: lines of GPUs, lines of NVLinks of one GPU, and ports with their rate."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_ADAPTERS", tmp_path / "infiniband")

    def make(names: list[str], *, memory="81559, 551", links=(), ports=()) -> None:
        rows = [f"{i}, GPU-{i}f, {name}, {memory}, 5, 16\n" for i, name in enumerate(names)]
        (tmp_path / "gpus").write_text("".join(rows))
        head = f"GPU 0: {names[0]} (UUID: GPU-0f)\n" if names else ""
        (tmp_path / "links").write_text(head + "".join(f"\t Link {i}: {rate}\n" for i, rate in enumerate(links)))
        for number, (rate, state) in enumerate(ports):
            port = tmp_path / "infiniband" / f"mlx5_{number}" / "ports" / "1"
            port.mkdir(parents=True)
            for file, text in (("rate", rate), ("state", state), ("link_layer", "InfiniBand")):
                (port / file).write_text(f"{text}\n")

    return make


def test_a_dgx_is_what_is_shipped(machine):
    """Eight H100, 18 NVLinks each, eight NDR ports; the shipped dgx-h100 comes from data sheets."""
    machine(
        ["NVIDIA H100 80GB HBM3"] * 8,
        links=["26.562 GB/s"] * 18,
        ports=[("400 Gb/sec (4X NDR)", "4: ACTIVE")] * 8 + [("100 Gb/sec (4X EDR)", "1: DOWN")],
    )
    found, shipped = detected_cluster(), load_cluster("dgx-h100")
    assert found.devices_per_host == 8
    assert found.device.memory == (81559 - 551) * 2**20
    assert found.device.memory == pytest.approx(shipped.device.memory, rel=2e-3)
    assert found.device.peak == shipped.device.peak
    assert found.links == shipped.links


def test_a_single_gpu_has_its_slot_for_a_link(machine):
    machine(["NVIDIA A100 80GB PCIe"], memory="81920, 535")
    found = detected_cluster()
    assert (found.device.name, found.num_devices) == ("a100-pcie-80gb", 1)
    assert [link.name for link in found.links] == ["pcie"]
    assert found.links[0].bandwidth == pytest.approx(63e9, rel=0.01)  # PCIe 5.0 x16


def test_inactive_links_do_not_count(machine):
    machine(["NVIDIA H100 80GB HBM3"] * 2, links=["<inactive>"] * 18)
    assert [link.name for link in detected_cluster().links] == ["pcie"]


@pytest.mark.parametrize(("visible", "count"), [("0,2", 2), ("GPU-1", 1), ("1", 1)])
def test_only_visible_gpus_count(visible, count, machine, monkeypatch):
    machine(["NVIDIA H200"] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detected_cluster().num_devices == count


@pytest.mark.parametrize(
    ("names", "message"),
    [(["NVIDIA TITAN RTX"], "no data sheet"), (["NVIDIA H200", "NVIDIA A100-SXM4-40GB"], "several kinds")],
)
def test_what_cannot_be_described_is_told(names, message, machine):
    machine(names)
    with pytest.raises(EnvironmentProblem, match=message):
        detected_cluster()


def test_without_a_gpu_it_is_cores_and_memory(machine):
    machine([])
    assert detected_cluster() == load_cluster("local-cpu")


def test_the_document_can_be_planned_with(machine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    machine(["NVIDIA H200"] * 2, memory="143771, 591", links=["26.562 GB/s"] * 18)
    assert main(["clusters", "--detect"]) == 0
    (tmp_path / "own.yaml").write_text(capsys.readouterr().out)
    assert main(["clusters", "--detect", "--json"]) == 0
    detected = json.loads(capsys.readouterr().out)
    assert main(["clusters", "own.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == detected
    assert main(["plan", "tiny-gpt", "own.yaml", "--global-batch", "8"]) == 0
    assert main(["clusters", "dgx-a100", "--detect"]) == 2
