"""Shipped models, clusters and engines as plain data: lists of all, or one complete document."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.specs import library

if TYPE_CHECKING:
    from planner.specs.cluster import AnyCluster, ClusterSpec, LinkSpec
    from planner.specs.engine import EngineSpec

MODELS: Final = Path(__file__).with_name("models.json")
"""The list of shipped models, which `make docs` writes: to read and count 134 documents takes most of a second."""
_OF_ENGINES: Final = {"axes", "precisions", "optimizers", "memory_recipes", "zero_stages", "recompute"}


def models() -> list[dict[str, Any]]:
    """Every shipped model with its size and source, as `planner models --json` prints it."""
    kept = json.loads(MODELS.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = kept["models"] if kept["digest"] == _digest() else counted_models()["models"]
    return found


def counted_models() -> dict[str, Any]:
    """The list of shipped models from their documents, and the digest of these."""
    from planner.cost.parameters import num_active_params, num_params
    from planner.specs.by_name import load_model, model_source

    named = ("num_layers", "hidden_size", "max_sequence_length")
    found = []
    for name in library.names("models"):
        model = load_model(name)
        counts = {"num_params": num_params(model), "num_active_params": num_active_params(model)}
        shape = {key: getattr(model, key) for key in named}
        found.append({"name": name, **counts, **shape, "source": model_source(name)})
    return {"digest": _digest(), "models": found}


def _digest() -> str:
    """Hash of the documents of all shipped models."""
    paths = (library.path_of("models", name) for name in library.names("models"))
    return hashlib.sha256(b"\n".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def one_model(name: str) -> dict[str, Any]:
    """One model, by shipped name or file: the document as parsed, and the model's size."""
    from planner.cost.parameters import num_active_params, num_params
    from planner.specs.by_name import load_model, model_names, model_source

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
        "price_source": library.price_source(cluster.name) if cluster.price else "",
        "links": [_link_entry(link) for link in cluster.links],
    }


def _link_entry(link: LinkSpec) -> dict[str, Any]:
    return {"name": link.name, "bytes_per_second": link.bandwidth}


def one_cluster(name: str) -> dict[str, Any]:
    """One cluster, by shipped name or file: the document as parsed."""
    from planner.specs.cluster_documents import cluster_names, cluster_source, load_cluster

    source = {"source": cluster_source(name)} if name in cluster_names() else {}
    if listed := library.price_source(name):
        source["price_source"] = listed
    return {**load_cluster(name).model_dump(mode="json", exclude_none=True), **source}


def this_machine() -> dict[str, Any]:
    """The cluster document of this machine."""
    from planner.specs.this_machine import detected_cluster

    return detected_cluster().model_dump(mode="json", exclude_none=True)


def engine_profiles() -> list[dict[str, Any]]:
    """Every engine for which plans can be made: its program, and the features that the program supports."""
    from planner.specs.by_name import engine_names, load_engine

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
    from planner.specs.by_name import load_engine

    return load_engine(name).model_dump(mode="json")
