"""Cluster documents from the output of nvidia-smi, rocm-smi, lspci and ibstat; tests/specs/recorded has the sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.search.given import plan_for_text
from planner.specs import gpus
from planner.specs.cluster import ClusterSpec
from planner.specs.cluster_documents import load_cluster
from planner.specs.load import load_job
from planner.specs.this_machine import detected_cluster

RECORDED = Path(__file__).parent / "recorded"
MACHINES = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())
FILES = {
    ("nvidia-smi", "--query-gpu"): "query",
    ("nvidia-smi", "topo"): "topo",
    ("nvidia-smi", "nvlink"): "nvlink",
    ("rocm-smi", "--showproductname"): "rocm-cards",
    ("rocm-smi", "--showtopotype"): "rocm-topology",
    ("lspci", "-D -PP"): "lspci-tree",
    ("lspci", "-D -vv"): "lspci-links",
    ("ibstat", ""): "ibstat",
}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A function that replaces this machine by a recorded one, without some programs or with changed output of some."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_ADAPTERS", tmp_path / "infiniband")

    def make(machine: str, *, without: tuple[str, ...] = (), prints: str | None = None) -> ClusterSpec:
        def ask(program: str, *arguments: str) -> str | None:
            said = " ".join(arguments)
            name = next(name for (who, how), name in FILES.items() if who == program and said.startswith(how))
            path = RECORDED / machine / name
            if program in without or name in without:
                return prints
            return path.read_text(encoding="utf-8") if path.exists() else None

        monkeypatch.setattr(gpus, "_ask", ask)
        return detected_cluster()

    return make


def levels(cluster: ClusterSpec) -> list[tuple[str, str, str, float, int]]:
    """Name, kind, span, GB/s and devices that share a port, of each link."""
    return [
        (each.name, each.kind, each.spans, round(each.bandwidth / 1e9, 1), each.devices_per_adapter)
        for each in cluster.links
    ]


# PCIe 4.0 x16 is 31.5 GB/s (PCI-SIG); NVLink bridges of the A6000 are 112.5 GB/s both ways (data sheet).
EXPECTED = {
    "8-h100-sxm": [("nvlink", "switch", "8 devices", 450.0, 1), ("infiniband", "fat-tree", "cluster", 50.0, 1)],
    "8-l40s-two-switches": [
        ("pcie-switch", "switch", "4 devices", 31.5, 1),
        ("pcie", "pcie", "8 devices", 7.9, 4),
        ("ethernet", "ethernet", "cluster", 6.2, 1),
    ],
    "4-rtx4090": [("pcie", "pcie", "4 devices", 31.5, 1)],
    "4-rtx4090-one-switch": [("pcie", "pcie", "4 devices", 7.9, 4)],
    "4-a6000-bridges": [("nvlink", "switch", "2 devices", 56.2, 1), ("pcie", "pcie", "4 devices", 31.5, 1)],
    "8-mi300x": [
        ("infinity-fabric", "mesh", "8 devices", 448.0, 1),
        ("ethernet", "ethernet", "cluster", 50.0, 1),
    ],
}


@pytest.mark.parametrize("machine", MACHINES)
def test_links_are_those_of_the_machine(machine: str, on) -> None:
    assert levels(on(machine)) == EXPECTED[machine]


def test_the_dgx_is_what_is_shipped(on) -> None:
    assert on("8-h100-sxm").links == load_cluster("dgx-h100").links


def test_devices_and_memory_are_those_of_the_driver(on) -> None:
    found = {machine: on(machine) for machine in MACHINES}
    assert {machine: (each.device.name, each.num_devices) for machine, each in found.items()} == {
        "8-h100-sxm": ("h100-80gb", 8),
        "8-l40s-two-switches": ("l40s-48gb", 8),
        "4-rtx4090": ("rtx4090-24gb", 4),
        "4-rtx4090-one-switch": ("rtx4090-24gb", 4),
        "4-a6000-bridges": ("a6000-48gb", 4),
        "8-mi300x": ("mi300x-192gb", 8),
    }
    assert found["8-mi300x"].device.memory == 206141652992
    assert found["4-rtx4090"].device.memory == 24564 * 2**20  # nothing is known of what the driver keeps


PROGRAMS = ["topo", "nvlink", "ibstat", "lspci", "rocm-topology"]


@pytest.mark.parametrize("prints", [None, "", "NVIDIA-SMI has failed\n", "{", "[]", "GPU0\tGPU1\nGPU0\t X\n"])
@pytest.mark.parametrize("missing", PROGRAMS)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_program_that_is_missing_or_broken_is_no_failure(machine: str, missing: str, prints: str | None, on) -> None:
    found = on(machine, without=(missing,), prints=prints)
    assert found.num_devices == int(machine[0])
    assert found.links


@pytest.mark.parametrize("machine", MACHINES)
def test_all_of_them_may_be_missing_but_for_the_list_of_gpus(machine: str, on) -> None:
    found = on(machine, without=("topo", "nvlink", "ibstat", "lspci", "rocm-topology"))
    (link,) = found.links
    slot = 63.0 if machine == "8-h100-sxm" else 31.5  # AMD cards: lspci alone tells, and PCIe 4.0 x16 is taken
    assert (link.name, link.kind, round(link.bandwidth / 1e9, 1)) == ("pcie", "pcie", slot)


def test_without_the_matrix_the_tree_of_lspci_tells_who_shares_a_port(on) -> None:
    assert levels(on("8-l40s-two-switches", without=("topo",))) == EXPECTED["8-l40s-two-switches"]


def test_the_document_can_be_planned_with(on, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    on("8-l40s-two-switches")
    assert main(["clusters", "--detect"]) == 0
    (tmp_path / "own.yaml").write_text(capsys.readouterr().out)
    assert main(["clusters", "own.yaml", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["links"]) == 3
    assert main(["plan", "tiny-gpt", "own.yaml", "--global-batch", "8"]) == 0


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "describe-your-own.md"
BOXES = {"l40s-server": (8, [("pcie-switch", 4), ("pcie", 8), ("ethernet", None)]), "four-4090": (4, [("pcie", 4)])}


@pytest.mark.parametrize("name", BOXES)
def test_the_boxes_of_the_page_are_short_and_can_be_planned_with(name: str, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- file: {name}.yaml -->\n```yaml\n")[2].partition("```")[0]
    assert 3 < len(text.splitlines()) <= 15
    path = tmp_path / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    job = load_job(model="llama3.2-1b", cluster=str(path), global_batch_size=8, sequence_length=2048)
    count, links = BOXES[name]
    assert (job.cluster.num_devices, [(link.name, link.num_devices) for link in job.cluster.links]) == (count, links)
    assert plan_for_text(job, f"tp=1,zero=2,dp={count},mbs=1").step_seconds > 0
