"""This machine as a cluster document: `planner clusters --detect`."""

from __future__ import annotations

import re
from typing import Final

from planner.errors import EnvironmentProblem
from planner.specs import gpus
from planner.specs.by_name import load_device
from planner.specs.cluster import ClusterSpec, DeviceSpec, LinkSpec
from planner.specs.cluster_documents import LOCAL_CLUSTER, cluster_names, load_cluster
from planner.specs.uniform import uniform_cluster

_DATA_SHEETS: Final = {
    r"GB300": "gb300-288gb",
    r"GB200": "gb200-186gb",
    r"B300": "b300-288gb",
    r"B200": "b200-180gb",
    r"H200": "h200-141gb",
    r"H800": "h800-80gb",
    r"H20\b": "h20-96gb",
    r"H100.*PCIe": "h100-pcie-80gb",
    r"H100": "h100-80gb",
    r"A100.*80GB.*PCIe|A100-PCIE-80GB": "a100-pcie-80gb",
    r"A100.*80GB": "a100-80gb",
    r"A100.*40GB": "a100-40gb",
    r"V100.*32GB": "v100-32gb",
    r"V100.*16GB": "v100-16gb",
}
"""Name that the driver gives a GPU (a pattern) -> its shipped device document; the first that matches counts."""
_UNMEASURED: Final = {
    "nvlink": ("3 us", "switch"),
    "pcie": ("5 us", "switch"),
    "infiniband": ("8 us", "fat-tree"),
    "ethernet": ("15 us", "ethernet"),
}
"""Latency and kind of a link that no shipped cluster with this device has; assumptions, as in the shipped files."""


def detected_cluster() -> ClusterSpec:
    """The document of this machine: its GPUs with their links, or else its cores and memory.

    Counts, memory and bandwidths are those of the driver and the kernel; peaks and efficiencies come from the shipped
    document of the device, and what is known of a kind of link from the shipped cluster with this device.

    Raises:
        EnvironmentProblem: GPUs of several kinds, or of a kind whose data sheet is not shipped.
    """
    found = gpus.nvidia_gpus()
    if not found:
        return uniform_cluster(load_cluster(LOCAL_CLUSTER))
    names = sorted({gpu.name for gpu in found})
    if len(names) > 1:
        raise EnvironmentProblem(
            f"this machine has GPUs of several kinds: {', '.join(names)}",
            hint="choose equal ones with CUDA_VISIBLE_DEVICES",
        )
    device = _device(names[0], min(gpu.memory for gpu in found))
    return ClusterSpec(name="this-machine", device=device, devices_per_host=len(found), links=_links(device, found))


def _device(name: str, memory: float) -> DeviceSpec:
    document = next((each for pattern, each in _DATA_SHEETS.items() if re.search(pattern, name)), None)
    if document is None:
        raise EnvironmentProblem(
            f"no data sheet of {name!r} is shipped",
            hint="write its document after the pattern of `planner clusters dgx-a100`, with `device:` written out",
        )
    return load_device(document).model_copy(update={"memory": memory})


def _links(device: DeviceSpec, found: tuple[gpus.Gpu, ...]) -> tuple[LinkSpec, ...]:
    nvlink, (adapters, network) = gpus.nvlink_bytes_per_second(), gpus.adapter_bytes_per_second()
    inner = ("nvlink", nvlink) if nvlink else ("pcie", gpus.pcie_bytes_per_second(found[0]))
    levels = [(*inner, f"{len(found)} devices")] if len(found) > 1 else []
    # one host needs no network to be planned for, yet the document is to be used for several of its kind
    levels += [(network, adapters / len(found), "cluster")] if adapters else []
    known = {
        link.name: link
        for name in cluster_names()
        if isinstance(cluster := load_cluster(name), ClusterSpec) and cluster.device.name == device.name
        for link in cluster.links
    }
    links = [_link(name, bandwidth, spans, known.get(name)) for name, bandwidth, spans in levels if bandwidth]
    return tuple(links) or (_link("pcie", inner[1] or gpus.pcie_bytes_per_second(found[0]), "cluster", None),)


def _link(name: str, bandwidth: float, spans: str, shipped: LinkSpec | None) -> LinkSpec:
    if shipped is not None:
        return shipped.model_copy(update={"bandwidth": bandwidth, "spans": spans})
    latency, kind = _UNMEASURED[name]
    return LinkSpec.model_validate(
        {"name": name, "bandwidth": f"{bandwidth!r} B/s", "latency": latency, "spans": spans, "kind": kind}
    )
