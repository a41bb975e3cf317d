"""This machine as the cluster `local-cpu`: only quantities that stay the same, and no timings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from planner.units import exact_quantity

if TYPE_CHECKING:
    from planner.specs.cluster import ClusterSpec

_CGROUP = Path("/sys/fs/cgroup")
_MEBIBYTE = 2**20


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity mask, limited by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def total_memory_bytes() -> int:
    """Bytes of memory of the machine, or of the container if the container has less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup("memory.max")
    return min(memory, int(limit)) if limit.isdigit() else memory


def _cgroup(name: str) -> str:
    try:
        return (_CGROUP / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):  # no cgroup version 2 here: nothing limits this process
        return ""


def local_host(cluster: ClusterSpec, num_processes: int | None) -> dict[tuple[str | int, ...], int | str]:
    """Values for the document of this machine, by path: one process per core unless `num_processes` is given.

    If there are more processes than cores, each process gets its part of the peak and of the memory bandwidth, and host
    work takes proportionally longer. Messages count as host work, because gloo copies them.
    """
    device, cores = cluster.device, usable_cores()
    processes = num_processes or cores
    share = min(1.0, cores / processes)
    memory = max(1, total_memory_bytes() // processes // _MEBIBYTE) * _MEBIBYTE
    efficiency = device.efficiency
    values: dict[tuple[str | int, ...], int | str] = {
        ("devices_per_host",): processes,
        ("device", "memory"): exact_quantity(memory, "bytes"),
        ("device", "memory_bandwidth"): exact_quantity(device.memory_bandwidth * share, "bytes_per_second"),
        ("device", "efficiency", "launch"): exact_quantity(efficiency.launch / share, "seconds"),
        ("device", "efficiency", "layer_floor"): exact_quantity(efficiency.layer_floor / share, "seconds"),
    }
    for precision, peak in device.peak.items():
        values["device", "peak", precision] = exact_quantity(peak * share, "flops_per_second")
    for index, link in enumerate(cluster.links):
        values["links", index, "bandwidth"] = exact_quantity(link.bandwidth * share, "bytes_per_second")
        values["links", index, "latency"] = exact_quantity(link.latency / share, "seconds")
    return values
