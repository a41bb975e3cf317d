"""The description of this machine: the kernel's figures, divided among the processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.specs import detect
from planner.specs.cluster_documents import load_cluster
from planner.specs.load import load_job


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 8 cores and 64 GiB; the returned folder replaces its control group."""
    monkeypatch.setattr(detect, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    sizes = {"SC_PHYS_PAGES": 2**24, "SC_PAGE_SIZE": 2**12}
    monkeypatch.setattr(os, "sysconf", lambda name: sizes[name])
    return tmp_path


def local(gpus: int | None, *settings: str) -> tuple[int, float, float, float]:
    cluster = load_job(model="tiny-gpt", cluster="local-cpu", global_batch_size=8, gpus=gpus, settings=settings).cluster
    device = cluster.device
    return cluster.num_devices, device.memory / 2**30, device.peak["fp32"] / 1e9, device.memory_bandwidth / 1e9


@pytest.mark.usefixtures("machine")
def test_one_process_for_each_core_shares_only_the_memory() -> None:
    assert local(None) == (8, 8, 180, 24)
    assert local(2) == (2, 32, 180, 24)
    assert load_cluster("local-cpu").num_devices == 8


@pytest.mark.usefixtures("machine")
def test_more_processes_than_cores_share_the_cores() -> None:
    assert local(16) == (16, 4, 90, 12)
    processes, memory, peak, bandwidth = local(12)
    assert (processes * peak, processes * bandwidth) == pytest.approx((8 * 180, 8 * 24))
    assert processes * memory <= 64


@pytest.mark.usefixtures("machine")
def test_host_work_takes_longer_where_processes_share_a_core() -> None:
    alone, shared = (load_job(model="tiny-gpt", cluster="local-cpu", global_batch_size=64, gpus=n) for n in (8, 32))
    for number in ("launch", "layer_floor"):
        before, after = (getattr(job.cluster.device.efficiency, number) for job in (alone, shared))
        assert after == pytest.approx(4 * before)
    (link,), (shared_link,) = alone.cluster.links, shared.cluster.links
    assert shared_link.latency == pytest.approx(4 * link.latency)
    assert shared_link.bandwidth == pytest.approx(link.bandwidth / 4)


@pytest.mark.usefixtures("machine")
def test_a_setting_overrides_what_was_detected() -> None:
    assert local(None, "device.memory=1 GiB", "device.peak.fp32=50 GFLOP/s") == (8, 1, 50, 24)


def test_a_container_gets_what_its_group_allows(machine: Path) -> None:
    (machine / "cpu.max").write_text("250000 100000\n")
    (machine / "memory.max").write_text(f"{6 * 2**30}\n")
    assert local(None) == (2, 3, 180, 24)
    (machine / "cpu.max").write_text("max 100000\n")
    (machine / "memory.max").write_text("max\n")
    assert local(None) == (8, 8, 180, 24)
    (machine / "cpu.max").write_text("10000 100000\n")
    assert local(None)[0] == 1


def test_this_machine_is_what_python_says() -> None:
    assert 1 <= detect.usable_cores() <= (os.cpu_count() or 1)
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii").split()
    assert detect.total_memory_bytes() <= int(meminfo[1]) * 1024
