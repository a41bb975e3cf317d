"""Read all inputs of a job; no other module does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The arguments of `load_job`, with `nodes` in two fields: `nodes` (uniform cluster) and `hosts_of` (each pool)."""

    model: str | ModelSpec
    cluster: str | ClusterSpec
    training: str | TrainingSpec | None
    engine: str
    nodes: int | None
    hosts_of: Mapping[str, int]
    gpus: int | None
    sequence_length: int | None
    global_batch_size: int | str | None
    precision: str | None
    settings: Sequence[str]
    risk: float
    headroom: float | None
    allow_tp_across_nodes: bool
    allow_offload: bool
    calibration: Path | None


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
    given = _Given(
        model=model,
        cluster=cluster,
        training=training,
        engine=engine,
        nodes=None if isinstance(nodes, Mapping) else nodes,
        hosts_of=nodes if isinstance(nodes, Mapping) else {},
        gpus=gpus,
        sequence_length=sequence_length,
        global_batch_size=global_batch_size,
        precision=precision,
        settings=settings,
        risk=risk,
        headroom=headroom,
        allow_tp_across_nodes=allow_tp_across_nodes,
        allow_offload=allow_offload,
        calibration=calibration,
    )
    mistakes = Mistakes()
    _check_sizes(mistakes, given)
    trees = _read_trees(mistakes, given)
    if isinstance(cluster, str) and split_size(cluster)[0] == LOCAL_CLUSTER and "cluster" in trees:
        trees, given = _with_this_machine(mistakes, trees, given), replace(given, gpus=None)
    return _checked_job(mistakes, _with_options(mistakes, trees, given), given)


def _check_sizes(mistakes: Mistakes, given: _Given) -> None:
    """Report mistakes in the options for the cluster's size and for the memory that stays free."""
    for option, count in (("--nodes", given.nodes), ("--gpus", given.gpus)):
        if count is not None and not 1 <= count <= MAX_DEVICES:
            mistakes.add(f"{count} is no number of hosts or devices", f"{option} {count}", f"valid: 1 to {MAX_DEVICES}")
    own = isinstance(given.cluster, str) and split_size(given.cluster)[1]
    sizes = {"--nodes": given.nodes or given.hosts_of, "--gpus": given.gpus, printable(str(given.cluster), 80): own}
    if len(named := [option for option, size in sizes.items() if size]) > 1:
        mistakes.add(f"{' and '.join(named)} both give the size of the cluster", hint="give one of them")
    if given.headroom is not None and not 0 <= given.headroom < 1:
        mistakes.add(f"{given.headroom} is not a share of memory", "--headroom", "valid: 0% to less than 100%")
    if not LEAST_RISK <= given.risk <= MOST_RISK:
        mistakes.add(f"{given.risk} is not a risk", "--risk", f"valid: {LEAST_RISK:.4%} to {MOST_RISK:.0%}")


def _read_trees(mistakes: Mistakes, given: _Given) -> dict[str, Node]:
    """All documents that can be read, before they are checked, including devices and pools of the cluster."""
    trees = {
        "model": _read_tree(mistakes, model_tree, given.model),
        "cluster": _read_tree(mistakes, cluster_tree, given.cluster),
        "training": _read_tree(mistakes, training_tree, given.training),
        "engine": mistakes.attempt(engine_tree, given.engine),
    }
    found = {name: tree for name, tree in trees.items() if tree is not None}
    if "cluster" in found and isinstance(given.cluster, str):
        whole = mistakes.attempt(with_devices, found["cluster"], folder_of(given.cluster))
        found["cluster"] = whole or found["cluster"]
    return found


def _read_tree(mistakes: Mistakes, read: Callable[[Any], Node], given: str | Document | None) -> Node | None:
    if given is None or isinstance(given, str):
        return mistakes.attempt(read, given)
    return as_node(given.model_dump(mode="json"), getattr(given, "name", "training"))


def _with_this_machine(mistakes: Mistakes, trees: dict[str, Node], given: _Given) -> dict[str, Node]:
    """The documents with this machine as the cluster, with `--gpus` processes."""
    hosts = trees["cluster"].plain.get("hosts", 1) if given.nodes is None else given.nodes
    if isinstance(hosts, int) and hosts > 1:
        mistakes.add(f"{LOCAL_CLUSTER} is this one machine", "--nodes", "--gpus N starts N processes on it")
    num_processes = given.gpus if given.gpus and given.gpus > 0 else None
    return {**trees, "cluster": on_this_machine(trees["cluster"], num_processes)}


def _with_options(mistakes: Mistakes, trees: dict[str, Node], given: _Given) -> dict[str, Node]:
    """The documents after `settings` and then the options. `--gpus` is applied later, when the cluster is checked."""
    for setting in given.settings:
        trees = mistakes.attempt(apply_setting, setting, trees) or trees
    for pool, hosts in given.hosts_of.items():
        trees = mistakes.attempt(with_hosts, trees, pool, hosts) or trees
    if given.gpus is None:
        trees = _with_option(trees, "cluster", "hosts", given.nodes, "--nodes")
    trees = _with_option(trees, "training", "sequence_length", given.sequence_length, "--seq-len")
    trees = _with_option(trees, "training", "global_batch_size", given.global_batch_size, "--global-batch")
    return _with_option(trees, "training", "precision", given.precision, "--precision")


def _with_option(trees: dict[str, Node], document: str, key: str, value: Any, option: str) -> dict[str, Node]:
    if value is None or document not in trees:
        return trees
    where = f"{option} {printable(str(value), 40)}"
    return {**trees, document: with_value(trees[document], (key,), Node(data=value, where=where, key_where=where))}


def _checked_job(mistakes: Mistakes, trees: Mapping[str, Node], given: _Given) -> Job:
    """The job from the documents.

    Every document is checked by its own rules; the training document is also checked against the other documents.

    Raises:
        InputError: all mistakes so far, and the mistakes found here.
    """
    model = mistakes.attempt(validate, ModelSpec, trees["model"]) if "model" in trees else None
    engine = mistakes.attempt(validate, EngineSpec, trees["engine"]) if "engine" in trees else None
    cluster = mistakes.attempt(checked_cluster, trees["cluster"], given.gpus) if "cluster" in trees else None
    training = batch = None
    if "training" in trees:
        tree = with_default(trees["training"], "sequence_length", model.max_sequence_length if model else 1)
        tree, batch = mistakes.attempt(batch_range, tree) or (tree, None)
        training = check_training(mistakes, tree, model, cluster.pools if cluster else (), engine)
    corrections = mistakes.attempt(load_calibration, given.calibration) if given.calibration else shipped_calibration()
    mistakes.raise_if_any()
    assert corrections is not None
    assert model is not None
    assert cluster is not None
    assert training is not None
    assert engine is not None
    return job_on(
        cluster,
        calibrations_of(cluster, model, training, engine, corrections),
        model=model,
        training=training,
        engine=engine,
        risk=given.risk,
        headroom=given.headroom,
        allow_tp_across_nodes=given.allow_tp_across_nodes,
        allow_offload=given.allow_offload,
        own_length="sequence_length" not in trees["training"].plain,
        batch=batch,
        evidence=corrections.evidence if len(cluster.pools) == 1 else (),  # no run on a mixed cluster is published
        spread=corrections.spread,
    )
