"""What `planner models` and `planner clusters` print: what is shipped, or one entry whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml
from rich.text import Text

from planner.cost.parameters import num_active_params, num_params
from planner.show.columns import Columns
from planner.show.screen import clean
from planner.specs import load
from planner.specs.this_machine import detected_cluster
from planner.units import format_bytes, format_count, format_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from planner.specs.cluster import AnyCluster, ClusterSpec, LinkSpec
    from planner.specs.model import ModelSpec

__all__ = [
    "cluster_entries",
    "cluster_table",
    "entry_text",
    "model_entries",
    "model_table",
    "one_cluster",
    "one_model",
    "this_machine",
]

_DERIVED: Final = ("num_params", "num_active_params", "source")
"""Keys of an entry that no document has."""


def model_entries() -> list[dict[str, Any]]:
    """Every shipped model with its size and source."""
    return [_model_entry(load.load_model(name), load.model_source(name)) for name in load.model_names()]


def _model_entry(model: ModelSpec, source: str) -> dict[str, Any]:
    return {
        "name": model.name,
        "num_params": num_params(model),
        "num_active_params": num_active_params(model),
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "max_sequence_length": model.max_sequence_length,
        "source": source,
    }


def one_model(name: str) -> dict[str, Any]:
    """One model, by shipped name or file: the document as it was understood, and its size."""
    model = load.load_model(name)
    source = {"source": load.model_source(name)} if name in load.model_names() else {}
    counts = {"num_params": num_params(model), "num_active_params": num_active_params(model)}
    return {**model.model_dump(mode="json"), **counts, **source}


def cluster_entries() -> list[dict[str, Any]]:
    """Every shipped cluster with its device and links."""
    return [_cluster_entry(load.load_cluster(name), load.cluster_source(name)) for name in load.cluster_names()]


def _cluster_entry(cluster: AnyCluster, source: str) -> dict[str, Any]:
    if len(cluster.pools) > 1:
        pools = [_pool_entry(pool) for pool in cluster.pools]
        links = [_link_entry(cluster.between)] if cluster.between else []
        return {"name": cluster.name, "pools": pools, "links": links, "source": source}
    return {**_pool_entry(cluster.pools[0]), "source": source}


def _pool_entry(cluster: ClusterSpec) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "devices_per_host": cluster.devices_per_host,
        "memory_bytes": cluster.device.memory,
        "links": [_link_entry(link) for link in cluster.links],
    }


def _link_entry(link: LinkSpec) -> dict[str, Any]:
    return {"name": link.name, "bytes_per_second": link.bandwidth}


def one_cluster(name: str) -> dict[str, Any]:
    """One cluster, by shipped name or file: the document as it was understood."""
    source = {"source": load.cluster_source(name)} if name in load.cluster_names() else {}
    return {**load.load_cluster(name).model_dump(mode="json", exclude_none=True), **source}


def this_machine() -> dict[str, Any]:
    """The cluster document of this machine."""
    return detected_cluster().model_dump(mode="json", exclude_none=True)


def model_table(entries: Sequence[dict[str, Any]]) -> RenderableType:
    """The models as a table."""
    rows = [
        (
            Text(clean(entry["name"]), style="bold"),
            format_count(entry["num_params"]),
            format_count(entry["num_active_params"]),
            str(entry["num_layers"]),
            str(entry["hidden_size"]),
            str(entry["max_sequence_length"]),
        )
        for entry in entries
    ]
    return Columns(
        rows,
        right=(1, 2, 3, 4, 5),
        optional=(5, 4, 3, 2),
        header=("model", "parameters", "active", "layers", "hidden", "sequence"),
    )


def cluster_table(entries: Sequence[dict[str, Any]]) -> RenderableType:
    """The clusters as a table; bandwidths are per device, one way, of a mixed cluster between its pools."""
    rows = []
    for entry in entries:
        links = ", ".join(f"{clean(link['name'])} {format_rate(link['bytes_per_second'])}" for link in entry["links"])
        hosts = [f"{pool['devices_per_host']} x {clean(pool['device'])}" for pool in entry.get("pools", [entry])]
        memory = format_bytes(min(pool["memory_bytes"] for pool in entry.get("pools", [entry])))
        if len(hosts) > 1:
            hosts, links = [f"{len(hosts)} pools"], f"{' + '.join(hosts)}, {links}"
        rows.append((Text(clean(entry["name"]), style="bold"), hosts[0], memory, links))
    return Columns(
        rows, right=(2,), wrap=(3,), optional=(2,), header=("cluster", "host", "memory", "links, one device one way")
    )


def entry_text(entry: dict[str, Any]) -> str:
    """One entry as a document that can be saved, changed and planned with; what is derived stands in comments."""
    derived = {key: entry[key] for key in _DERIVED if key in entry}
    document = {key: value for key, value in entry.items() if key not in derived}
    comments = "".join(f"# {key}: {clean(value)}\n" for key, value in derived.items())
    return comments + yaml.safe_dump(document, sort_keys=False, width=1000)
