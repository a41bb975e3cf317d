"""Read all inputs of a job; no other module does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planner.specs.by_name import (
    calibrations_of,
    engine_tree,
    load_calibration,
    model_tree,
    shipped_calibration,
    training_tree,
)
from planner.specs.cluster_documents import (
    LOCAL_CLUSTER,
    MAX_DEVICES,
    checked_cluster,
    cluster_tree,
    folder_of,
    on_this_machine,
    split_size,
    with_devices,
    with_hosts,
)
from planner.specs.engine import EngineSpec
from planner.specs.job import LEAST_RISK, MOST_RISK, RISK, job_on
from planner.specs.mistakes import Mistakes
from planner.specs.model import ModelSpec
from planner.specs.settings import apply_setting, with_value
from planner.specs.text import printable
from planner.specs.training_document import batch_range, check_training, with_default
from planner.specs.validate import validate
from planner.specs.yaml import Node, as_node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from planner.specs.cluster import ClusterSpec
    from planner.specs.document import Document
    from planner.specs.job import Job
    from planner.specs.training import TrainingSpec


def load_job(
    *,
    model: str | ModelSpec,
    cluster: str | ClusterSpec,
    training: str | TrainingSpec | None = None,
    engine: str = "torch",
    nodes: int | Mapping[str, int] | None = None,
    gpus: int | None = None,
    sequence_length: int | None = None,
    global_batch_size: int | str | None = None,
    precision: str | None = None,
    settings: Sequence[str] = (),
    risk: float = RISK,
    headroom: float | None = None,
    allow_tp_across_nodes: bool = False,
    allow_offload: bool = False,
    calibration: Path | None = None,
) -> Job:
    """Read everything that a job needs; options override `settings`, and both override the documents.

    model, cluster: a shipped name, the path of a YAML file, or a document that was read before. A model can also be the
    path of a Hugging Face config.json or of its folder.
    training: the path of a YAML file, or a document that was read before.
    nodes: number of hosts; for a mixed cluster a number for each pool's name.
    global_batch_size: a number of sequences, or a choice in the form that `specs.batch` reads.
    settings: `PATH=VALUE` changes, see `planner.specs.settings`.
    risk: accepted chance that a plan does not fit.
    headroom: share of device memory that a plan leaves free; this plain limit replaces the chance.
    calibration: a file of corrections that replace the shipped corrections.

    Raises:
        InputError: all mistakes of all documents and options at once, at most `MAX_MISTAKES`.
        EnvironmentProblem: a file cannot be read.
    """
    mistakes = Mistakes()
    own_size = split_size(cluster)[1] if isinstance(cluster, str) else ""
    _check_sizes(mistakes, nodes, gpus, {printable(str(cluster), 80): own_size})
    if headroom is not None and not 0 <= headroom < 1:
        mistakes.add(f"{headroom} is not a share of memory", "--headroom", "valid: 0% to less than 100%")
    if not LEAST_RISK <= risk <= MOST_RISK:
        mistakes.add(f"{risk} is not a risk", "--risk", f"valid: {LEAST_RISK:.4%} to {MOST_RISK:.0%}")
    trees = _read_trees(mistakes, model=model, cluster=cluster, training=training, engine=engine)
    if isinstance(cluster, str) and split_size(cluster)[0] == LOCAL_CLUSTER and "cluster" in trees:
        trees, gpus = _with_this_machine(mistakes, trees, nodes, gpus), None
    for setting in settings:
        trees = mistakes.attempt(apply_setting, setting, trees) or trees
    if isinstance(nodes, Mapping):
        for pool, hosts in nodes.items():
            trees = mistakes.attempt(with_hosts, trees, pool, hosts) or trees
    elif gpus is None:
        trees = _with_option(trees, "cluster", "hosts", nodes, "--nodes")
    trees = _with_option(trees, "training", "sequence_length", sequence_length, "--seq-len")
    trees = _with_option(trees, "training", "global_batch_size", global_batch_size, "--global-batch")
    trees = _with_option(trees, "training", "precision", precision, "--precision")
    limits = {"allow_tp_across_nodes": allow_tp_across_nodes, "allow_offload": allow_offload}
    return _checked_job(mistakes, trees, gpus, calibration, risk=risk, headroom=headroom, **limits)


def _check_sizes(
    mistakes: Mistakes, nodes: int | Mapping[str, int] | None, gpus: int | None, own: Mapping[str, str]
) -> None:
    """Report mistakes in the options for the cluster's size; own: the size in the cluster's name, by the name."""
    for option, count in (("--nodes", nodes), ("--gpus", gpus)):
        if isinstance(count, int) and not 1 <= count <= MAX_DEVICES:
            mistakes.add(f"{count} is no number of hosts or devices", f"{option} {count}", f"valid: 1 to {MAX_DEVICES}")
    sizes = {"--nodes": nodes, "--gpus": gpus, **own}
    if len(named := [option for option, size in sizes.items() if size]) > 1:
        mistakes.add(f"{' and '.join(named)} both give the size of the cluster", hint="give one of them")


def _read_trees(mistakes: Mistakes, **given: Any) -> dict[str, Node]:
    """All documents that can be read, before they are checked, including devices and pools of the cluster."""
    readers: dict[str, Callable[[Any], Node]] = {
        "model": model_tree,
        "cluster": cluster_tree,
        "training": training_tree,
        "engine": engine_tree,
    }
    trees = {name: _read_tree(mistakes, read, given[name]) for name, read in readers.items()}
    found = {name: tree for name, tree in trees.items() if tree is not None}
    if "cluster" in found and isinstance(given["cluster"], str):
        whole = mistakes.attempt(with_devices, found["cluster"], folder_of(given["cluster"]))
        found["cluster"] = whole or found["cluster"]
    return found


def _read_tree(mistakes: Mistakes, read: Callable[[Any], Node], given: str | Document | None) -> Node | None:
    if given is None or isinstance(given, str):
        return mistakes.attempt(read, given)
    return as_node(given.model_dump(mode="json"), getattr(given, "name", "training"))


def _with_this_machine(
    mistakes: Mistakes, trees: dict[str, Node], nodes: int | Mapping[str, int] | None, gpus: int | None
) -> dict[str, Node]:
    """The documents with this machine as the cluster, with `--gpus` processes."""
    hosts = nodes if isinstance(nodes, int) else trees["cluster"].plain.get("hosts", 1)
    if isinstance(hosts, int) and hosts > 1:
        mistakes.add(f"{LOCAL_CLUSTER} is this one machine", "--nodes", "--gpus N starts N processes on it")
    return {**trees, "cluster": on_this_machine(trees["cluster"], gpus if gpus and gpus > 0 else None)}


def _with_option(trees: dict[str, Node], document: str, key: str, value: Any, option: str) -> dict[str, Node]:
    if value is None or document not in trees:
        return trees
    where = f"{option} {printable(str(value), 40)}"
    return {**trees, document: with_value(trees[document], (key,), Node(data=value, where=where, key_where=where))}


def _checked_job(
    mistakes: Mistakes, trees: Mapping[str, Node], gpus: int | None, calibration: Path | None, **limits: Any
) -> Job:
    """The job from the documents; limits: fields of `Job` that limit memory and layouts.

    Every document is checked by its own rules; the training document is also checked against the other documents.

    Raises:
        InputError: all mistakes so far, and the mistakes found here.
    """
    model = mistakes.attempt(validate, ModelSpec, trees["model"]) if "model" in trees else None
    engine = mistakes.attempt(validate, EngineSpec, trees["engine"]) if "engine" in trees else None
    cluster = mistakes.attempt(checked_cluster, trees["cluster"], gpus) if "cluster" in trees else None
    training = batch = None
    if "training" in trees:
        tree = with_default(trees["training"], "sequence_length", model.max_sequence_length if model else 1)
        tree, batch = mistakes.attempt(batch_range, tree) or (tree, None)
        training = check_training(mistakes, tree, model, cluster.pools if cluster else (), engine)
    corrections = mistakes.attempt(load_calibration, calibration) if calibration else shipped_calibration()
    mistakes.raise_if_any()
    assert corrections is not None
    assert model is not None
    assert cluster is not None
    assert training is not None
    assert engine is not None
    if outputs := training.method.outputs:
        model = model.model_copy(update={"head_outputs": outputs, "tied_embeddings": False, "head_bias": False})
    return job_on(
        cluster,
        calibrations_of(cluster, model, training, engine, corrections),
        model=model,
        training=training,
        engine=engine,
        **limits,
        own_length="sequence_length" not in trees["training"].plain,
        batch=batch,
        evidence=corrections.evidence if len(cluster.pools) == 1 else (),  # no run on a mixed cluster is published
        spread=corrections.spread,
    )
