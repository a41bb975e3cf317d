"""Change a job in the words of `--set`: more of a resource, or another workload."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from planner.errors import InputError
from planner.specs.by_name import calibrations_of, load_engine, shipped_calibration
from planner.specs.cluster_documents import NO_ONE_SIZE, checked_cluster
from planner.specs.engine import EngineSpec
from planner.specs.job import LEAST_RISK, MOST_RISK, PoolJob, each_pool, job_on
from planner.specs.mistakes import Mistakes
from planner.specs.model import ModelSpec
from planner.specs.settings import apply_setting, value_at
from planner.specs.text import printable
from planner.specs.training_document import check_training
from planner.specs.validate import validate
from planner.specs.yaml import Node, as_node
from planner.units import whole_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.specs.calibration import CalibrationEntry
    from planner.specs.cluster import AnyCluster
    from planner.specs.document import Document
    from planner.specs.job import Job

_SHORT: Final = {
    "nodes": "cluster.hosts",
    "seq_len": "training.sequence_length",
    "global_batch": "training.global_batch_size",
    "precision": "training.precision",
}
"""Short names of paths."""

_FACTOR: Final = re.compile(r"(?:x\s*(?P<times>\d+\.?\d*|\.\d+)|(?P<percent>[+-]\d+\.?\d*)\s*%)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(?P<number>[0-9.]+(?:[eE][+-]?[0-9]+)?)(?P<unit>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edited:
    """The documents of a job while they are changed."""

    trees: dict[str, Node]
    job: Job
    gpus: int | None = None


def change_job(job: Job, changes: str, *, option: str = "--what-if") -> Job:
    """The job after one change `PATH=VALUE`, or after several, separated by commas.

    PATH is a path of `--set`, or one of `nodes`, `gpus`, `seq_len` (32k is 32,768), `global_batch`, `precision`,
    `engine`, `headroom` and `risk`. A mixed cluster has no `nodes` and `gpus`; its pools have `hosts`. VALUE replaces
    the present value, or changes it by a factor: `x2`, `x0.5`, `+10%`. The calibration stays the same, unless the
    device, the engine or the precision changes.

    Raises:
        InputError: an unknown path, or a value that the document refuses; the message names `option`.
    """
    edited = _Edited(trees={name: _tree(spec, option) for name, spec in _documents(job).items()}, job=job)
    parts = [part.strip() for part in changes.split(",") if part.strip()]
    if not parts:
        raise InputError("no change is given", where=option, hint="write PATH=VALUE, for example device.memory=x2")
    for part in parts:
        edited = _apply(edited, part, option)
    return _checked(edited, f"{option} {printable(changes)}")


def _documents(job: Job) -> dict[str, Document]:
    return {"model": job.model, "cluster": job.cluster, "training": job.training, "engine": job.engine}


def _tree(document: Document, where: str) -> Node:
    return as_node(document.model_dump(mode="json"), where)


def _apply(edited: _Edited, part: str, option: str) -> _Edited:
    where = f"{option} {printable(part)}"
    path, equals, value = (each.strip() for each in part.partition("="))
    if not equals or not value:
        hint = "write PATH=VALUE, for example nvlink.bandwidth=x2; other arguments stand before the option"
        raise InputError("not a change", where=where, hint=hint)
    if path == "engine":
        engine = _tree(load_engine(value), where)
        return replace(edited, trees={**edited.trees, "engine": engine})
    if path in ("headroom", "risk"):
        share: dict[str, Any] = {path: _share(value, where, path)}
        return replace(edited, job=each_pool(edited.job, lambda pool: replace(pool, **share)))
    if path in ("nodes", "gpus") and len(edited.job.pools) > 1:
        pool = edited.job.pools[0].cluster
        raise InputError(NO_ONE_SIZE, where=where, hint=f"{pool.name}.hosts={pool.hosts + 1} changes one pool")
    if path == "gpus":
        return replace(edited, gpus=_count(value, edited.job.cluster.num_devices, where))
    path = _SHORT.get(path, path)
    factor = _FACTOR.fullmatch(value)
    if factor and (present := value_at(path, edited.trees, where)):  # else the document reports the gap
        value = _scaled(present, _times(factor), where)
    return replace(edited, trees=apply_setting(f"{path}={value}", edited.trees, option))


def _times(match: re.Match[str]) -> float:
    return float(match["times"]) if match["times"] else 1 + float(match["percent"]) / 100


def _scaled(node: Node, factor: float, where: str) -> str:
    """A number, or a quantity with its unit, times a factor; whole numbers stay whole."""
    data = node.data
    if isinstance(data, int) and not isinstance(data, bool):
        return str(round(data * factor))
    match = _NUMBER.fullmatch(str(data)) if isinstance(data, str | float) else None
    if match is None:
        raise InputError("there is no number here to multiply", where=where, hint="write the value itself")
    return f"{float(match['number']) * factor!r}{match['unit']}"


def _count(value: str, now: int, where: str) -> int:
    factor = _FACTOR.fullmatch(value)
    if factor:
        return max(1, round(now * _times(factor)))
    value = str(whole_of(value))
    if not (value.isascii() and value.isdigit() and len(value) <= 8 and 0 < int(value) <= 10_000_000):
        raise InputError(f"`{printable(value, 40)}` is no number of devices", where=where)
    return int(value)


def _share(value: str, where: str, path: str) -> float:
    try:
        share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if path == "risk" and not LEAST_RISK <= share <= MOST_RISK:
        raise InputError("not a risk", where=where, hint=f"from {LEAST_RISK:.4%} to {MOST_RISK:.0%}")
    if not 0 <= share < 1:
        raise InputError("headroom is a share of memory", where=where, hint="from 0% to below 100%")
    return share


def _checked(edited: _Edited, where: str) -> Job:
    """The job from the changed documents, checked against the rules between documents."""
    mistakes = Mistakes()
    trees, before = edited.trees, edited.job
    model = mistakes.attempt(validate, ModelSpec, trees["model"])
    engine = mistakes.attempt(validate, EngineSpec, trees["engine"])
    cluster = mistakes.attempt(_cluster, trees["cluster"], edited.gpus, where)
    training = check_training(mistakes, trees["training"], model, cluster.pools if cluster else (), engine)
    mistakes.raise_if_any()
    assert model is not None
    assert engine is not None
    assert cluster is not None
    assert training is not None
    own = before.pools[0].own_length and training.sequence_length == before.training.sequence_length
    common = {"model": model, "engine": engine, "training": training, "own_length": own}
    fresh = calibrations_of(cluster, model, training, engine, shipped_calibration())
    after = _on(before, cluster, fresh, **common)
    if list(_calibrated_for(before)) != list(_calibrated_for(after)):
        return after
    return _on(before, cluster, [pool.calibration for pool in before.pools], **common)


def _on(before: Job, cluster: AnyCluster, calibrations: Sequence[CalibrationEntry], **changes: Any) -> Job:
    """The job on another cluster, with `changes` to the fields that all pools share.

    Other fields keep the values of the first pool of `before`.
    """
    own = {"cluster", "calibration", "between", *changes}
    kept = {each.name: getattr(before.pools[0], each.name) for each in fields(PoolJob) if each.name not in own}
    return job_on(cluster, calibrations, **changes, **kept)


def _cluster(tree: Node, gpus: int | None, where: str) -> AnyCluster:
    try:
        return checked_cluster(tree, gpus)
    except InputError as error:
        raise InputError(*(replace(each, where=each.where or where) for each in error.mistakes)) from None


def _calibrated_for(job: Job) -> Iterator[Any]:
    yield from (pool.cluster.device.name for pool in job.pools)
    yield from (job.engine.name, job.training.precision, job.model.moe is not None)
