"""Describe this machine as a cluster document: `planner clusters --detect`."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.errors import EnvironmentProblem
from planner.specs import gpus
from planner.specs.by_name import load_device
from planner.specs.cluster import ClusterSpec, DeviceSpec, LinkSpec
from planner.specs.cluster_documents import LOCAL_CLUSTER, cluster_names, cluster_tree, load_cluster
from planner.specs.uniform import uniform_cluster
from planner.specs.yaml import shipped_yaml
from planner.units import exact_quantity

if TYPE_CHECKING:
    from collections.abc import Mapping

_UNMEASURED: Final[dict[str, dict[str, Any]]] = {
    "nvlink": {"latency": "3 us", "kind": "switch"},
    "infinity-fabric": {"latency": "3 us", "kind": "switch"},
    "pcie-switch": {"latency": "5.7 us", "kind": "switch", "efficiency": 0.76, "startup": "8.4 us"},
    "pcie": {"latency": "5.7 us", "kind": "pcie", "efficiency": 0.76, "startup": "8.4 us"},
    "infiniband": {"latency": "8 us", "kind": "fat-tree"},
    "ethernet": {"latency": "15 us", "kind": "ethernet"},
}
"""Values for a link that no shipped cluster with this device has; assumed to be as in the other shipped files."""
_WITHOUT_PEER_ACCESS: Final = r"GeForce"
"""Names of cards whose driver forbids one card to read another over PCIe, even below the same switch."""


def detected_cluster() -> ClusterSpec:
    """The document of this machine: its GPUs with their links, or else its cores and memory.

    The driver and the kernel report counts, memory and bandwidths. Peaks and efficiencies come from the shipped
    document of the device. Further values of a link come from the shipped cluster with this device.

    Raises:
        EnvironmentProblem: GPUs of several kinds, or of a kind whose data sheet is not shipped.
    """
    found = gpus.nvidia_gpus() or gpus.amd_gpus()
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
    patterns = shipped_yaml(Path(__file__).with_suffix(".yaml")).plain
    document = next((each for pattern, each in patterns.items() if re.search(pattern, name)), None)
    if document is None:
        raise EnvironmentProblem(
            f"no data sheet of {name!r} is shipped",
            hint="its document takes four numbers of its data sheet: docs/how-to/describe-your-own.md",
        )
    return load_device(document).model_copy(update={"memory": memory})


def _links(device: DeviceSpec, found: tuple[gpus.Gpu, ...]) -> tuple[LinkSpec, ...]:
    known = _shipped_links(device.name)
    levels = _levels(found, known)
    adapters, network = gpus.adapter_bytes_per_second()
    if adapters:  # one host needs no network, but the document may be used for several such hosts
        levels.append({"name": network, "bandwidth": adapters / len(found), "spans": "cluster"})
    levels = levels or [{"name": "pcie", "bandwidth": _slot(found[0]), "spans": "cluster"}]
    return tuple(_link(level, known.get(level["name"])) for level in levels)


def _slot(gpu: gpus.Gpu) -> float:
    """Bytes per second of the GPU's PCIe slot.

    PCIe 4.0 x16 is assumed if no program reports the slot, as in many virtual machines.
    """
    return gpus.pcie_bytes_per_second(gpu) or gpus.pcie_bytes_per_second(replace(gpu, pcie_generation=4, pcie_lanes=16))


@cache
def _shipped_links(device: str) -> dict[str, LinkSpec]:
    """The links of the shipped clusters with this device, by name."""
    with_it = [name for name in cluster_names() if cluster_tree(name).plain.get("device") == device]
    return {link.name: link for name in with_it for link in uniform_cluster(load_cluster(name)).links}


def _levels(found: tuple[gpus.Gpu, ...], known: Mapping[str, LinkSpec]) -> list[dict[str, Any]]:
    """The levels inside the host, innermost first: NVLink or Infinity Fabric, a PCIe switch, the host."""
    count, slot = len(found), _slot(found[0])
    paths, nvlink = gpus.paths(found), gpus.nvlink_bytes_per_second()
    name, bandwidth = "nvlink", nvlink
    if not nvlink and (fabric := known.get("infinity-fabric")):
        name, bandwidth = fabric.name, fabric.bandwidth
    inside, shared = 1, paths.under_port
    levels: list[dict[str, Any]] = []
    joined = count if paths.joined is None and nvlink else paths.joined or 1  # old drivers show links but no matrix
    if bandwidth and joined > 1:
        levels, inside = [{"name": name, "bandwidth": bandwidth, "spans": f"{joined} devices"}], joined
    if inside < shared and not re.search(_WITHOUT_PEER_ACCESS, found[0].name):
        levels.append({"name": "pcie-switch", "bandwidth": slot, "spans": f"{shared} devices"})
        inside = shared
    if inside < count:
        part = {"bandwidth": slot / shared, "devices_per_adapter": shared} if shared > 1 else {"bandwidth": slot}
        levels.append({"name": "pcie", "spans": f"{count} devices", **part})
    return levels


def _link(level: dict[str, Any], shipped: LinkSpec | None) -> LinkSpec:
    if shipped is not None:
        return shipped.model_copy(update=level)
    rate = exact_quantity(level["bandwidth"], "bytes_per_second")
    return LinkSpec.model_validate({**_UNMEASURED[level["name"]], **level, "bandwidth": rate})
