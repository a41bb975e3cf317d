"""Shipped models, clusters and engines as plain data: lists of all, or one complete document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from planner.cost.parameters import num_active_params, num_params
from planner.specs.by_name import engine_names, load_engine, load_model, model_names, model_source
from planner.specs.library import price_source

if TYPE_CHECKING:
    from planner.specs.cluster import AnyCluster, ClusterSpec, LinkSpec
    from planner.specs.engine import EngineSpec
    from planner.specs.model import ModelSpec

_OF_ENGINES: Final = {"axes", "precisions", "optimizers", "memory_recipes", "zero_stages", "recompute"}


def models() -> list[dict[str, Any]]:
    """Every shipped model with its size and source, as `planner models --json` prints it."""
    return [_model_entry(load_model(name), model_source(name)) for name in model_names()]


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
    """One model, by shipped name or file: the document as parsed, and the model's size."""
    model = load_model(name)
    source = {"source": model_source(name)} if name in model_names() else {}
    counts = {"num_params": num_params(model), "num_active_params": num_active_params(model)}
    return {**model.model_dump(mode="json"), **counts, **source}


def clusters() -> list[dict[str, Any]]:
    """Every shipped cluster with its device and links, as `planner clusters --json` prints it."""
    from planner.specs.cluster_documents import cluster_names, cluster_source, load_cluster

    return [_cluster_entry(load_cluster(name), cluster_source(name)) for name in cluster_names()]


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
        "usd_per_hour": cluster.price,
        "price_source": price_source(cluster.name) if cluster.price else "",
        "links": [_link_entry(link) for link in cluster.links],
    }


def _link_entry(link: LinkSpec) -> dict[str, Any]:
    return {"name": link.name, "bytes_per_second": link.bandwidth}


def one_cluster(name: str) -> dict[str, Any]:
    """One cluster, by shipped name or file: the document as parsed."""
    from planner.specs.cluster_documents import cluster_names, cluster_source, load_cluster

    source = {"source": cluster_source(name)} if name in cluster_names() else {}
    if listed := price_source(name):
        source["price_source"] = listed
    return {**load_cluster(name).model_dump(mode="json", exclude_none=True), **source}


def this_machine() -> dict[str, Any]:
    """The cluster document of this machine."""
    from planner.specs.this_machine import detected_cluster

    return detected_cluster().model_dump(mode="json", exclude_none=True)


def engine_profiles() -> list[dict[str, Any]]:
    """Every engine for which plans can be made: its program, and the features that the program supports."""
    return [_engine_entry(load_engine(name)) for name in engine_names()]


def _engine_entry(engine: EngineSpec) -> dict[str, Any]:
    from planner.specs.banned import bans_of, runs_of

    return {
        "name": engine.name,
        "program": engine.program,
        **engine.can.model_dump(mode="json", include=_OF_ENGINES),
        "schedules": list(engine.pipeline.schedules),
        "offload": list(engine.offload.what),
        "emits": list(engine.emits),
        "priced_only": sorted(bans_of(engine)),
        "runs": runs_of(engine),
    }


def one_engine(name: str) -> dict[str, Any]:
    """One engine's profile, by shipped name or file: the document as parsed."""
    return load_engine(name).model_dump(mode="json")
