"""Build the cluster of a run from its GPU's name, the host size and the network's bandwidth."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any

from planner.evidence.rows.knowledge import UnpricedRun, first_match, knowledge, normalized
from planner.specs.by_name import load_device
from planner.specs.cluster_documents import load_cluster
from planner.specs.text import printable
from planner.specs.uniform import uniform_cluster
from planner.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.evidence.rows.runs import Run
    from planner.specs.cluster import ClusterSpec

_MAKER = re.compile(r"^(nvidia|amd|tesla|instinct)-|-(sxm|oam)\d?(?=-|$)")
_LARGEST_WORLD = 10_000_000


def cluster_of(run: Run, num_devices: int) -> ClusterSpec:
    """The cluster of `num_devices` devices; the last host, or the only one, may have fewer devices than a full host.

    The row's own cells take precedence: host size, and network bandwidth per device and direction. NVLink comes from
    the shipped cluster with the device, and a network that the row names from the shipped cluster with this network.

    Raises:
        UnpricedRun: no device file describes the GPU, or no cluster has this size.
    """
    if not 1 <= num_devices <= _LARGEST_WORLD:
        raise UnpricedRun(f"{num_devices} GPUs")
    entry = _entry(run)
    base = _base(entry["cluster"])
    per_host = run.gpus_per_node or base.devices_per_host
    if not 1 <= per_host <= 10_000:
        raise UnpricedRun(f"{per_host} GPUs per host")
    domain = max(entry.get("domain", 0), per_host)
    stated = {"network": f"{run.inter_gb_s_per_gpu} GB/s"} if run.inter_gb_s_per_gpu else {}
    network = _quantity({**entry, **stated}, "network")
    inner, outer = base.links[0], base.links[-1]
    if of_words := first_match(run.interconnect.lower(), knowledge("gpus")["networks"]):
        outer = _base(of_words["cluster"]).links[-1]
    changes: dict[str, Any] = {
        "spans": f"{domain} devices",
        "bandwidth": _quantity(entry, "scale_up") or inner.bandwidth,
    }
    host, slot = base.host, _slot(run)
    if slot and inner.kind in ("pcie", "shared-memory"):
        changes["bandwidth"] = slot
    if slot and host is not None:
        host = host.model_copy(update={"bandwidth": slot})
    if "kind" in entry:
        changes |= {"kind": entry["kind"], "in_network": None}
    if domain != inner.num_devices:  # 8 V100 are wired as a cube; each 4 of them are fully connected
        changes["wiring"] = "all-to-all"
    links = (
        inner.model_copy(update=changes),
        outer.model_copy(
            update=_network(run, network or outer.bandwidth, outer.bandwidth, -(-num_devices // per_host))
        ),
    )
    return base.model_copy(
        update={
            "device": _device(entry["device"]),
            "links": links,
            "host": host,
            "devices_per_host": min(per_host, num_devices),
            "hosts": -(-num_devices // per_host),
        }
    )


def _slot(run: Run) -> float | None:
    """Bytes per second and direction of a device's PCIe slot, as in `3.0 x4`; sixteen lanes unless it says less."""
    in_words = first_match(run.interconnect.lower(), knowledge("gpus")["slots"]) or {"pcie": ""}
    stated = re.fullmatch(r"\D*([3-6])(?:\.0)?\s*(?:x\s*(\d{1,2}))?", (run.pcie or in_words["pcie"]).lower())
    return stated and _quantity(knowledge("gpus")["pcie"], stated[1]) * int(stated[2] or 16)  # type: ignore[operator]


def _network(run: Run, stated: float, line_rate: float, num_hosts: int) -> dict[str, Any]:
    """The link with its stated bandwidth; a bandwidth measured between hosts is kept beside the line rate."""
    if "measured in the run" not in run.interconnect or stated >= line_rate or num_hosts < 2:
        return {"bandwidth": stated}
    return {"bandwidth": line_rate, "measured_bandwidth": stated, "measured_hosts": num_hosts}


def _entry(run: Run) -> Mapping[str, Any]:
    """The entry of gpus.yaml for the run's GPU: by its name, then by the nearest memory size."""
    name = normalized(run.gpu)
    for _ in range(3):  # "NVIDIA Tesla V100-SXM2-32GB"
        name = _MAKER.sub("", name)
    entries: list[Mapping[str, Any]] = knowledge("gpus")["gpus"]
    if same := next((entry for entry in entries if entry["device"] == name), None):
        return same
    found = next((each for each in entries if fnmatchcase(name, each["match"]) and not _is_longer(name, each)), None)
    if found is None:
        raise UnpricedRun(f"unknown GPU {printable(run.gpu, 40) or '(blank)'}")
    in_name = re.search(r"-(\d+)(?:gb)?(?:-|$)", name)
    memory = run.gpu_mem_gb or (float(in_name[1]) if in_name else None)
    if memory is None:
        return found
    return min(
        (entry for entry in entries if entry["match"] == found["match"]),
        key=lambda entry: abs(float(entry["memory_gb"]) - memory),
    )


def _is_longer(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether the name goes on with a digit where the entry's pattern ends, like `h1000` after `h100*`."""
    return re.search(rf"{re.escape(entry['match'].strip('*').split('*')[-1])}[0-9]", name) is not None


def _quantity(entry: Mapping[str, Any], key: str) -> float | None:
    return parse_quantity(entry[key], "bytes_per_second") if key in entry else None


@cache
def _base(name: str) -> ClusterSpec:
    return uniform_cluster(load_cluster(name))


_device = cache(load_device)
