"""Documents that `planner measure` writes from curves with known constants, and curves that it refuses."""

from __future__ import annotations

import io
import json
import subprocess

import pytest

from planner.commands import measure as command
from planner.commands import plan as plan_command
from planner.commands.console import Console
from planner.errors import ExitCode, InputError
from planner.measure import ProbeFailed, measured_cluster, request, run_probe
from planner.specs.by_name import load_model
from planner.specs.cluster_documents import checked_cluster, cluster_tree, load_cluster, with_devices
from planner.specs.this_machine import detected_cluster


@pytest.fixture
def console():
    return Console(out=io.StringIO(), err=io.StringIO())


def drawn(kind, wanted, *, peak, ranks, per_host, latency=20e-6):
    """Curves of a machine with known constants: half depth 64, 60 % of the peak, 30 % of it in attention."""
    precision = "bf16" if kind == "cuda" else "fp32"
    attained = 0.6 * peak

    def product(m, n, k):
        return {"precision": precision, "m": m, "n": n, "k": k, "seconds": 2 * m * n * k * (k + 64) / k / attained}

    def collective(operation, members, size, bandwidth):
        passes = 1 if operation == "send" else (members - 1) / members
        where = {"ranks": members, "hosts": max(1, members // per_host)}
        seconds = (members - 1) * latency + passes * size / bandwidth
        return {"operation": operation, **where, "num_bytes": size, "seconds": seconds}

    groups = [(per_host, 300e9)] + ([(ranks, 20e9)] if ranks > per_host else [])
    return {
        "device_kind": kind,
        "torch": "0",
        "ranks": ranks,
        "ranks_per_host": per_host,
        "launch_seconds": 4e-6,
        "layer_floor_seconds": 2e-4,
        "streaming": [
            {"operator": "copy", "times": 0, "num_bytes": 2e9, "seconds": 0.1},
            {"operator": "norm", "times": 2, "num_bytes": 1e9, "seconds": 0.1},
            {"operator": "gelu", "times": 1, "num_bytes": 1e9, "seconds": 0.2},
        ],
        "products": [product(*shape) for shape in wanted["products"]],
        "attention": [
            {"length": 1, "flops": 1e9, "forward_seconds": 1e9 / peak / 0.3, "backward_seconds": 2.5e9 / peak / 0.3}
        ],
        "collectives": [
            collective(operation, members, size, bandwidth)
            for members, bandwidth in groups
            for operation in ("all_gather", "reduce_scatter", "send")
            for size in (2**10, 2**24)
        ],
    }


def test_a_gpus_documents_have_the_constants_that_its_curves_were_drawn_from():
    found = load_cluster("dgx-h100").model_copy(update={"hosts": 2})
    wanted = request(load_model("llama3-8b"), "cuda", 1)
    peak = found.device.peak["bf16"]
    made = measured_cluster(found, drawn("cuda", wanted, peak=peak, ranks=16, per_host=8))
    efficiency = made.device.efficiency
    assert made.device.peak == found.device.peak
    assert made.device.memory_bandwidth == found.device.memory_bandwidth
    assert (efficiency.matmul, efficiency.matmul_half_depth) == (pytest.approx(0.6), 64)
    assert efficiency.attention == pytest.approx(0.3)
    assert efficiency.attention_flash_2 == found.device.efficiency.attention_flash_2  # torch runs cuDNN's kernel there
    assert efficiency.memory == pytest.approx(3e9 / 0.4 / made.device.memory_bandwidth)
    assert (efficiency.launch, efficiency.layer_floor) == (4e-6, 2e-4)
    reached = [link.efficiency * link.bandwidth for link in made.links]
    assert reached == [pytest.approx(300e9), pytest.approx(20e9)]
    starts = [link.startup + (ranks - 1) * link.latency for link, ranks in zip(made.links, (8, 16), strict=True)]
    assert starts == [pytest.approx(ranks * 20e-6, rel=0.05) for ranks in (7, 15)]


def test_a_cpu_has_no_data_sheet_and_takes_the_best_that_was_measured():
    wanted = request(load_model("tiny-gpt"), "cpu", 1)
    made = measured_cluster(detected_cluster(), drawn("cpu", wanted, peak=1e11, ranks=2, per_host=2, latency=1e-3))
    efficiency = made.device.efficiency
    assert efficiency.matmul * made.device.peak["fp32"] == pytest.approx(6e10)
    assert made.device.peak["fp32"] == pytest.approx(6e10)
    assert made.device.memory_bandwidth == pytest.approx(2e10)
    assert efficiency.memory == pytest.approx(3 / 0.4 / 20)
    assert made.links[0].latency == pytest.approx(1e-3, rel=0.01)


def test_a_collective_of_a_cpu_takes_what_it_adds_to_a_layer():
    """Eight collectives of 2.5 ms in both passes of a small layer, and 1 GB/s in a large one; gloo is faster."""
    curves = drawn("cpu", request(load_model("tiny-gpt"), "cpu", 1), peak=1e11, ranks=2, per_host=2, latency=1e-3)
    small = {"ranks": 2, "num_bytes": 2**15, "seconds": 0.021, "whole_seconds": 0.001}
    moved = (2**25 - 2**15) / 2
    large = {"ranks": 2, "num_bytes": 2**25, "seconds": 0.2 + 0.020 + 8 * moved / 1e9, "whole_seconds": 0.4}
    link = measured_cluster(detected_cluster(), {**curves, "cut_layers": [small, large]}).links[0]
    assert link.latency == pytest.approx(2.5e-3)
    assert link.bandwidth * link.efficiency == pytest.approx(1e9)
    fast = {**large, "seconds": 0.1}  # the collectives hide in the noise of the layer: gloo's own rate remains
    assert measured_cluster(detected_cluster(), {**curves, "cut_layers": [small, fast]}).links[0].efficiency == 1.0


def test_what_is_written_loads_is_planned_with_and_is_not_written_over(console, tmp_path, monkeypatch):
    def probe(wanted, **_):
        return drawn("cpu", wanted, peak=1e11, ranks=2, per_host=2)

    monkeypatch.setattr("planner.measure.run_probe", probe)
    monkeypatch.setattr("planner.specs.gpus.nvidia_gpus", lambda: None)
    monkeypatch.setattr("planner.specs.gpus.amd_gpus", lambda: None)
    assert command.run(tmp_path / "here", console=console) == ExitCode.OK
    assert json.loads((tmp_path / "here" / "curves.json").read_text())["launch_seconds"] == 4e-6
    written = tmp_path / "here" / "cluster.yaml"
    device = load_cluster(str(written)).device
    assert (device.efficiency.launch, device.efficiency.attention) == (4e-6, pytest.approx(0.3 / 0.6))
    console.out.truncate(console.out.seek(0))
    options = {"gpus": 1, "global_batch": 8, "as_json": True}
    assert plan_command.run("tiny-gpt", str(written), console=console, **options) == ExitCode.OK
    assert json.loads(console.out.getvalue())["cluster"]["device"]["efficiency"]["launch"] == "4 us"
    before = written.read_text()
    with pytest.raises(InputError, match=r"curves\.json exists"):
        command.run(tmp_path / "here", console=console)
    assert written.read_text() == before
    assert command.run(tmp_path / "here", console=console, force=True) == ExitCode.OK


def test_only_the_first_host_writes(console, tmp_path, monkeypatch):
    monkeypatch.setattr("planner.measure.run_probe", lambda *_, **__: None)
    place = {"nodes": 2, "node_rank": 1, "master_addr": "host-0"}
    assert command.run(tmp_path / "here", console=console, **place) == ExitCode.OK
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="the measurement fills 2 hosts, and nothing says which one this is"):
        command.run(tmp_path / "here", console=console, nodes=2)


def test_curves_of_another_machine_and_folders_that_are_files_are_refused(console, tmp_path):
    wanted = request(load_model("tiny-gpt"), "cpu", 1)
    with pytest.raises(InputError, match="curves are of a cpu machine"):
        measured_cluster(load_cluster("dgx-h100"), drawn("cpu", wanted, peak=1e11, ranks=2, per_host=2))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a folder"):
        command.run(tmp_path / "file", console=console)


def test_a_rank_that_fails_is_told_by_its_error(monkeypatch):
    pytest.importorskip("torch")
    broken = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no NCCL here\nmore\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: broken)
    with pytest.raises(ProbeFailed, match="RuntimeError: no NCCL here"):
        run_probe({}, processes=1)


@pytest.mark.slow
def test_this_machine_is_measured(console, tmp_path):
    pytest.importorskip("torch")
    assert command.run(tmp_path, console=console, seconds=60) == ExitCode.OK
    curves = json.loads((tmp_path / "curves.json").read_text())
    rows = [row for value in curves.values() if isinstance(value, list) for row in value]
    assert all(value >= 0 for row in rows for key, value in row.items() if key.endswith("seconds"))
    assert {row["operator"] for row in curves["streaming"]} == {"copy", "adamw", "norm", "residual", "gelu"}
    assert load_cluster(str(tmp_path / "cluster.yaml")).name == "this-machine"


def test_without_time_for_all_collectives_the_rest_is_measured(console, tmp_path, monkeypatch):
    def cut(wanted, **_):
        curves = drawn("cpu", wanted, peak=1e11, ranks=2, per_host=2)
        kept = [row for row in curves["collectives"] if row["operation"] == "all_gather"]
        assert kept
        return curves | {"collectives": kept}

    monkeypatch.setattr("planner.measure.run_probe", cut)
    machine = detected_cluster().model_copy(update={"devices_per_host": 2})
    monkeypatch.setattr("planner.specs.this_machine.detected_cluster", lambda: machine)
    assert command.run(tmp_path / "here", console=console) == ExitCode.OK
    found = load_cluster(str(tmp_path / "here" / "cluster.yaml"))
    assert found.links[0].bandwidth == machine.links[0].bandwidth


@pytest.mark.parametrize("cores", [2, 4])
def test_a_device_alone_is_faster_than_among_busy_ones(cores, console, tmp_path, monkeypatch):
    """Cores take 1.6 times as long while all compute; the time grows evenly with each further busy core."""
    alone = {"alone": {"together_seconds": 1.6, "seconds": 1.0}}
    monkeypatch.setattr(
        "planner.measure.run_probe",
        lambda wanted, **_: drawn("cpu", wanted, peak=1e11, ranks=cores, per_host=cores) | alone,
    )
    machine = detected_cluster().model_copy(update={"devices_per_host": cores})
    monkeypatch.setattr("planner.specs.this_machine.detected_cluster", lambda: machine)
    assert command.run(tmp_path / "here", console=console) == ExitCode.OK
    tree = with_devices(cluster_tree(str(tmp_path / "here" / "cluster.yaml")), tmp_path / "here")
    sizes = range(1, cores + 1)
    rates = [checked_cluster(tree, gpus).device.peak["fp32"] for gpus in sizes]
    assert [rates[0] / rate for rate in rates] == pytest.approx([1.0 + 0.6 * (n - 1) / (cores - 1) for n in sizes])
    part = checked_cluster(tree, 2)
    assert rates[1] * part.alone == pytest.approx(rates[0])  # one of these two is as fast as one of all
