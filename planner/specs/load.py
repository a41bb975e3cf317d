"""Finds, reads and checks the documents of a job; the only place that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from planner.errors import InputError, Mistake
from planner.specs import library
from planner.specs.batch import BatchRange, read_batch
from planner.specs.calibration import Calibration, CalibrationEntry, find_entry
from planner.specs.cluster import ClusterSpec, DeviceSpec, MixedClusterSpec, Precision
from planner.specs.detect import local_host
from planner.specs.engine import EngineSpec
from planner.specs.huggingface import CONFIG_NAME, read_config
from planner.specs.job import job_on
from planner.specs.model import ModelSpec
from planner.specs.settings import apply_setting, pool_names, with_value
from planner.specs.text import any_of, did_you_mean, printable, quoted
from planner.specs.training import TrainingSpec
from planner.specs.validate import validate
from planner.specs.yaml import MAX_MISTAKES, Node, read_yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.specs.cluster import AnyCluster
    from planner.specs.job import Job, PoolJob
    from planner.specs.library import Kind

LOCAL_CLUSTER: Final = "local-cpu"
NO_ONE_SIZE: Final = "a mixed cluster has no one size"
_PREFERRED: Final[tuple[Precision, ...]] = ("bf16", "fp16", "fp32")
_MAX_DEVICES: Final = 10_000_000
_SHIPPED_CALIBRATION: Final = Path(__file__).parents[1] / "calibration.json"
_SUFFIXES: Final = (".yaml", ".yml", ".json")
T = TypeVar("T")


def model_names() -> tuple[str, ...]:
    """Names of the shipped models."""
    return library.names("models")


def cluster_names() -> tuple[str, ...]:
    """Names of the shipped clusters."""
    return library.names("clusters")


def engine_names() -> tuple[str, ...]:
    """Names of the engine profiles."""
    return library.names("engines")


def model_source(name: str) -> str:
    """Where the shapes of a shipped model come from."""
    return library.header("models", name)


def cluster_source(name: str) -> str:
    """Where the figures of a shipped cluster come from."""
    return library.header("clusters", name)


def load_model(name: str) -> ModelSpec:
    """A model by shipped name or path: of a YAML file, a Hugging Face config.json or its folder.

    Raises:
        InputError: unknown name, or a document with mistakes.
    """
    return validate(ModelSpec, _model_tree(name))


def model_notes(name: str) -> tuple[str, ...]:
    """What a reader should know about a model that was read from a Hugging Face config.json: what it left out.

    Raises:
        InputError: a document with mistakes.
    """
    config = _config_path(name)
    return read_config(config, str(config)).notes if config else ()


def load_cluster(name: str) -> AnyCluster:
    """A cluster by shipped name or path; `local-cpu` describes this machine.

    Raises:
        InputError: unknown name, or a document with mistakes.
    """
    tree = _with_devices(_cluster_tree(name), _folder_of(name))
    return checked_cluster(_detected(tree, None) if name == LOCAL_CLUSTER else tree, None)


def load_device(name: str) -> DeviceSpec:
    """A shipped device by name.

    Raises:
        InputError: a document with mistakes.
    """
    return validate(DeviceSpec, read_yaml(library.path_of("clusters/devices", name)))


def load_engine(name: str) -> EngineSpec:
    """An engine profile by name.

    Raises:
        InputError: unknown name.
    """
    return validate(EngineSpec, _engine_tree(name))


def other_engines(before: str, has_it: Callable[[EngineSpec], bool]) -> str:
    """`before` and `--engine fsdp or torch`: the engines that have what another lacks; empty where none has it."""
    names = [engine.name for engine in _shipped_engines() if has_it(engine)]
    return f"{before}--engine {any_of(names)}" if names else ""


@cache
def _shipped_engines() -> tuple[EngineSpec, ...]:
    return tuple(map(load_engine, engine_names()))


@cache
def shipped_calibration() -> Calibration:
    """Corrections from published runs; written by `make calibrate`."""
    return Calibration.model_validate_json(_SHIPPED_CALIBRATION.read_text(encoding="utf-8"))


def load_calibration(path: Path) -> Calibration:
    """Corrections from a file of the user's.

    Raises:
        InputError: all mistakes of the document at once.
        EnvironmentProblem: the file cannot be read.
    """
    return validate(Calibration, read_yaml(path))


def uniform_job(job: Job) -> PoolJob:
    """The job, if its cluster is of one kind.

    Raises:
        InputError: it is a mixed cluster.
    """
    return _only(job.pools, job.cluster.name)


def uniform_cluster(cluster: AnyCluster) -> ClusterSpec:
    """The cluster, if it is of one kind.

    Raises:
        InputError: it is a mixed cluster.
    """
    return _only(cluster.pools, cluster.name)


def _only(pools: Sequence[T], cluster: str) -> T:
    if len(pools) > 1:
        raise InputError(f"{cluster} is a mixed cluster", hint="this is answered for clusters of one kind only")
    return pools[0]


def load_job(
    *,
    model: str,
    cluster: str,
    training: str | None = None,
    engine: str = "torch",
    nodes: int | Mapping[str, int] | None = None,
    gpus: int | None = None,
    sequence_length: int | None = None,
    global_batch_size: int | str | None = None,
    precision: str | None = None,
    settings: Sequence[str] = (),
    headroom: float = 0.05,
    allow_tp_across_nodes: bool = False,
    allow_offload: bool = False,
    calibration: Path | None = None,
) -> Job:
    """Read everything that a job needs; options override `settings`, and both override the documents.

    model, cluster: a shipped name or the path of a YAML file; a model also the path of a Hugging Face config.json
    or of its folder. training: the path of a YAML file.
    nodes: hosts, or of a mixed cluster those of its pools by name.
    global_batch_size: a number of sequences, or a choice as `specs.batch` reads it.
    settings: `PATH=VALUE` changes, see `planner.specs.settings`.
    headroom: share of device memory that a plan leaves free.
    calibration: a file of corrections in place of the shipped ones.

    Raises:
        InputError: all mistakes of all documents and options at once, at most `MAX_MISTAKES`.
        EnvironmentProblem: a file cannot be read.
    """
    mistakes = Mistakes()
    hosts_of, nodes = (nodes, None) if isinstance(nodes, Mapping) else ({}, nodes)
    mistakes.check_sizes(nodes, gpus, headroom)
    trees = _read_trees(mistakes, model, cluster, training, engine)
    if cluster == LOCAL_CLUSTER and "cluster" in trees:
        trees["cluster"] = _detected(trees["cluster"], gpus if gpus and gpus > 0 else None)
        gpus = None
        if nodes is not None and nodes > 1:
            mistakes.add(f"{LOCAL_CLUSTER} is this one machine", "--nodes", "--gpus N starts N processes on it")
    for setting in settings:
        trees = mistakes.attempt(apply_setting, setting, trees) or trees
    for pool, hosts in hosts_of.items():
        trees = mistakes.attempt(_with_hosts, trees, pool, hosts) or trees
    if nodes is not None and gpus is None:
        trees = _with_option(trees, "cluster", "hosts", nodes, "--nodes")
    trees = _with_option(trees, "training", "sequence_length", sequence_length, "--seq-len")
    trees = _with_option(trees, "training", "global_batch_size", global_batch_size, "--global-batch")
    trees = _with_option(trees, "training", "precision", precision, "--precision")

    model_spec = mistakes.attempt(validate, ModelSpec, trees["model"]) if "model" in trees else None
    engine_spec = mistakes.attempt(validate, EngineSpec, trees["engine"]) if "engine" in trees else None
    cluster_spec = mistakes.attempt(checked_cluster, trees["cluster"], gpus) if "cluster" in trees else None
    pools = cluster_spec.pools if cluster_spec else ()
    training_spec = batch = None
    if "training" in trees:
        tree = _with_default(trees["training"], "sequence_length", model_spec.max_sequence_length if model_spec else 1)
        tree, batch = mistakes.attempt(_batch_range, tree) or (tree, None)
        training_spec = check_training(mistakes, tree, model_spec, [pool.device for pool in pools], engine_spec)
    corrections = mistakes.attempt(load_calibration, calibration) if calibration else shipped_calibration()
    mistakes.raise_if_any()
    assert corrections is not None
    assert model_spec is not None
    assert cluster_spec is not None
    assert training_spec is not None
    assert engine_spec is not None
    return job_on(
        cluster_spec,
        calibrations_of(cluster_spec, model_spec, training_spec, engine_spec, corrections),
        model=model_spec,
        training=training_spec,
        engine=engine_spec,
        headroom=headroom,
        allow_tp_across_nodes=allow_tp_across_nodes,
        allow_offload=allow_offload,
        batch=batch,
        evidence=corrections.evidence if len(pools) == 1 else (),  # no run on a mixed cluster is published
    )


def calibrations_of(
    cluster: AnyCluster, model: ModelSpec, training: TrainingSpec, engine: EngineSpec, corrections: Calibration
) -> tuple[CalibrationEntry, ...]:
    """The corrections for the devices of each pool of the cluster; a uniform cluster is one pool."""
    return tuple(
        find_entry(
            corrections,
            device=pool.device.name,
            engine=engine.name,
            precision=training.precision,
            experts=model.moe is not None,
        )
        for pool in cluster.pools
    )


class Mistakes:
    """What is wrong so far, in all documents and options."""

    def __init__(self) -> None:
        self.found: list[Mistake] = []

    def add(self, message: str, where: str = "", hint: str = "") -> None:
        """One more, its text made safe to show."""
        self.found.append(Mistake(message=printable(message, 300), where=where, hint=printable(hint, 400)))

    def attempt(self, read: Callable[..., T], *arguments: Any) -> T | None:
        """The result of `read`, or None where it finds mistakes, which are kept."""
        try:
            return read(*arguments)
        except InputError as error:
            known = {mistake.where for mistake in self.found if mistake.where}
            # one mistake for each place: a device that was not found is no mapping either
            self.found += [each for each in error.mistakes if each.where not in known]
            return None

    def check_sizes(self, nodes: int | None, gpus: int | None, headroom: float) -> None:
        """Those in the options that give the size of the cluster and the memory to leave free."""
        for option, count in (("--nodes", nodes), ("--gpus", gpus)):
            if count is not None and not 1 <= count <= _MAX_DEVICES:
                self.add(
                    f"{count} is no number of hosts or devices", f"{option} {count}", f"valid: 1 to {_MAX_DEVICES}"
                )
        if nodes is not None and gpus is not None:
            self.add("--nodes and --gpus both give the size of the cluster", hint="give one of them")
        if not 0 <= headroom < 1:
            self.add(f"{headroom} is not a share of memory", "--headroom", "valid: 0% to less than 100%")

    def raise_if_any(self) -> None:
        """Report all of them.

        Raises:
            InputError: there are any.
        """
        if self.found:
            raise InputError(*self.found[:MAX_MISTAKES])


def _read_trees(mistakes: Mistakes, model: str, cluster: str, training: str | None, engine: str) -> dict[str, Node]:
    trees = {
        "model": mistakes.attempt(_model_tree, model),
        "cluster": mistakes.attempt(_cluster_tree, cluster),
        "training": mistakes.attempt(_training_tree, training),
        "engine": mistakes.attempt(_engine_tree, engine),
    }
    found = {name: tree for name, tree in trees.items() if tree is not None}
    if "cluster" in found:
        found["cluster"] = mistakes.attempt(_with_devices, found["cluster"], _folder_of(cluster)) or found["cluster"]
    return found


def _model_tree(name: str) -> Node:
    config = _config_path(name)
    return read_config(config, str(config)).tree if config else _named_tree("models", name)


def _config_path(name: str) -> Path | None:
    """The Hugging Face config.json that a model's name means, if it does: a JSON file, or a folder with one."""
    if name in model_names():
        return None
    path = Path(name)
    return path if path.suffix == ".json" else path / CONFIG_NAME if _is_folder(path) else None


def _cluster_tree(name: str) -> Node:
    return _named_tree("clusters", name)


def _engine_tree(name: str) -> Node:
    if name not in engine_names():
        known = ", ".join(engine_names())
        raise InputError(
            f"unknown engine {quoted(name)}",
            where=f"--engine {printable(name, 40)}",
            hint=did_you_mean(name, engine_names(), otherwise=f"engines are {known}"),
        )
    return read_yaml(library.path_of("engines", name), f"engines/{name}.yaml")


def _training_tree(path: str | None) -> Node:
    return Node(data={}, where="") if path is None else read_yaml(Path(path), path)


def _named_tree(kind: Kind, name: str) -> Node:
    """A document by shipped name, else by path."""
    known = library.names(kind)
    if name in known:
        return read_yaml(library.path_of(kind, name), f"{kind}/{name}.yaml")
    if "/" in name or name.endswith(_SUFFIXES) or _exists(Path(name)):
        return read_yaml(Path(name), name)
    listing = f"`planner {kind}` lists what is shipped; a path of your own ends in .yaml"
    raise InputError(
        f"unknown {kind.removesuffix('s')} {quoted(name)}", hint=did_you_mean(name, known, otherwise=listing)
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _folder_of(cluster: str) -> Path | None:
    """The folder of a user's own cluster file, where its devices may be."""
    return None if cluster in cluster_names() else Path(cluster).parent


def _with_devices(cluster: Node, folder: Path | None) -> Node:
    """The cluster, or each pool of a mixed one, with its device written out.

    A pool may name a cluster, whose keys it takes where it has none of its own.
    """
    assert isinstance(cluster.data, dict)
    pools = cluster.data.get("pools")
    if pools is None or not isinstance(pools.data, tuple):
        return _with_device(cluster, folder)
    whole = tuple(_pool(pool, folder) if isinstance(pool.data, dict) else pool for pool in pools.data)
    return replace(cluster, data={**cluster.data, "pools": replace(pools, data=whole)})


def _pool(pool: Node, folder: Path | None) -> Node:
    assert isinstance(pool.data, dict)
    named = pool.data.get("cluster")
    if named is None or not isinstance(named.data, str):
        return _with_device(pool, folder)
    try:
        base = _with_device(_cluster_tree(named.data), _folder_of(named.data))
    except InputError as error:
        raise InputError(*(named.mistake(each.message, each.hint) for each in error.mistakes)) from None
    assert isinstance(base.data, dict)
    own = {key: value for key, value in pool.data.items() if key != "cluster"}
    return _with_device(replace(pool, data={**base.data, **own}), folder)


def _with_device(cluster: Node, folder: Path | None) -> Node:
    """The cluster with the device file that it names in place of the name.

    A device file lies in `devices/` beside the user's own cluster file, or is shipped.
    """
    assert isinstance(cluster.data, dict)
    node = cluster.data.get("device")
    if node is None or not isinstance(node.data, str):
        return cluster  # written out in the cluster file, or reported when it is checked
    name = node.data
    own = {path.stem: path for path in (folder / "devices").glob("*.yaml")} if folder else {}
    shipped = library.names("clusters/devices")
    if name in own:
        device = read_yaml(own[name])
    elif name in shipped:
        device = read_yaml(library.path_of("clusters/devices", name), f"clusters/devices/{name}.yaml")
    else:
        known = [*own, *shipped]
        hint = did_you_mean(name, known, otherwise=f"devices are {', '.join(known)}, or a mapping written out here")
        raise InputError(node.mistake(f"unknown device {quoted(name)}", hint))
    return with_value(cluster, ("device",), device)


def _detected(cluster: Node, num_processes: int | None) -> Node:
    """The shipped description of a CPU host with this machine's cores and memory."""
    where = f"--gpus {num_processes}" if num_processes else "this machine"
    for path, value in local_host(validate(ClusterSpec, cluster), num_processes).items():
        cluster = with_value(cluster, path, Node(data=value, where=where, key_where=where))
    return cluster


def _with_hosts(trees: Mapping[str, Node], pool: str, hosts: int) -> dict[str, Node]:
    """The documents with so many hosts in a pool."""
    known = pool_names(trees["cluster"]) if "cluster" in trees else [pool]
    if pool not in known:
        hint = did_you_mean(pool, known, otherwise=f"pools are {', '.join(known)}") if known else "write --nodes N"
        why = f"unknown pool {quoted(pool)}" if known else "the cluster is of one kind and has no pools"
        raise InputError(why, where=f"--nodes {printable(pool, 40)}={hosts}", hint=hint)
    return apply_setting(f"{pool}.hosts={hosts}", trees, "--nodes")


def _with_option(trees: dict[str, Node], document: str, key: str, value: Any, option: str) -> dict[str, Node]:
    if value is None or document not in trees:
        return trees
    where = f"{option} {printable(str(value), 40)}"
    return {**trees, document: with_value(trees[document], (key,), Node(data=value, where=where, key_where=where))}


def checked_cluster(tree: Node, gpus: int | None) -> AnyCluster:
    """The cluster, of one kind or of pools.

    Raises:
        InputError: mistakes in the document, or one size for a mixed cluster.
    """
    assert isinstance(tree.data, dict)
    if "pools" not in tree.data:
        return sized_cluster(tree, gpus)
    sizes = {"--nodes": "hosts" in tree.data, "--gpus": gpus is not None}
    given = [option for option, is_given in sizes.items() if is_given]
    if given:
        raise InputError(NO_ONE_SIZE, where=given[0], hint="each pool has its own hosts, as in --nodes POOL=4")
    return validate(MixedClusterSpec, tree)


def sized_cluster(tree: Node, gpus: int | None) -> ClusterSpec:
    """The cluster with `gpus` devices: a part of one host, or whole hosts."""
    cluster = validate(ClusterSpec, tree)
    if gpus is None or not 1 <= gpus <= _MAX_DEVICES:
        return cluster
    per_host = cluster.devices_per_host
    if gpus > per_host and gpus % per_host:
        below = gpus // per_host * per_host
        raise InputError(
            f"{gpus} devices are no whole number of {cluster.name} hosts of {per_host}",
            where=f"--gpus {gpus}",
            hint=f"nearest: --gpus {below} or --gpus {below + per_host}",
        )
    for key, count in (("devices_per_host", min(gpus, per_host)), ("hosts", max(1, gpus // per_host))):
        tree = with_value(tree, (key,), Node(data=count, where=f"--gpus {gpus}", key_where=f"--gpus {gpus}"))
    return validate(ClusterSpec, tree)


def check_training(
    mistakes: Mistakes,
    tree: Node,
    model: ModelSpec | None,
    devices: Sequence[DeviceSpec],
    engine: EngineSpec | None,
) -> TrainingSpec | None:
    """The training document with its defaults, which depend on the model, the devices and the engine."""
    assert isinstance(tree.data, dict)
    if "global_batch_size" not in tree.data:
        hint = (
            "add the sequences of an optimizer step, --global-batch 1024, or its tokens, --global-batch '4M tokens'; a "
            "range, 512..2048, is chosen from; in TRAINING.yaml it is `global_batch_size: 1024`"
        )
        mistakes.found.append(tree.mistake("the global batch size is not given", hint))
        tree = _with_default(tree, "global_batch_size", 1)
    if devices and engine:
        of_all = [each for each in engine.can.precisions if all(each in device.peak for device in devices)]
        usual = (each for each in _PREFERRED if each in of_all)
        tree = _with_default(tree, "precision", next(usual, devices[0].precisions[0]))
        for device in devices:
            mistakes.attempt(_check_precision, tree, device, engine)
    if model:
        mistakes.attempt(_check_positions, tree, model)
    return mistakes.attempt(validate, TrainingSpec, tree)


def _batch_range(tree: Node) -> tuple[Node, BatchRange | None]:
    """The training document with the largest batch size, and the sizes to choose from where it is not one number."""
    assert isinstance(tree.data, dict)
    node, length = tree.data.get("global_batch_size"), _entry(tree, "sequence_length").data
    if node is None or not isinstance(node.data, str) or not isinstance(length, int) or length < 1:
        return tree, None
    try:
        batch = read_batch(node.data, length)
    except ValueError as error:
        raise InputError(node.mistake(str(error))) from None
    return with_value(tree, ("global_batch_size",), replace(node, data=batch.most)), batch


def _check_precision(tree: Node, device: DeviceSpec, engine: EngineSpec) -> None:
    node = _entry(tree, "precision")
    if node.data not in get_args(Precision):
        return  # reported by the document itself
    if node.data not in device.peak:
        has = ", ".join(device.precisions)
        raise InputError(node.mistake(f"{device.name} does not compute in {node.data}", f"it has {has}"))
    if node.data not in engine.can.precisions:
        has = ", ".join(engine.can.precisions)
        elsewhere = other_engines("; another is ", lambda each: node.data in each.can.precisions)
        hint = f"it has {has}{elsewhere}"
        raise InputError(node.mistake(f"engine {engine.name} does not train in {node.data}", hint))


def _check_positions(tree: Node, model: ModelSpec) -> None:
    """Rotary positions extend beyond the length that a model was made for; a learned table does not."""
    node, longest = _entry(tree, "sequence_length"), model.max_sequence_length
    if model.position == "learned" and isinstance(node.data, int) and node.data > longest:
        message = f"{model.name} has learned positions for {longest} tokens, not {node.data}"
        hint = f"at most {longest}, or --set model.max_sequence_length={node.data}"
        raise InputError(node.mistake(message, hint))


def _with_default(tree: Node, key: str, value: Any) -> Node:
    assert isinstance(tree.data, dict)
    if key in tree.data:
        return tree
    return replace(tree, data={**tree.data, key: Node(data=value, where="default")})


def _entry(tree: Node, key: str) -> Node:
    assert isinstance(tree.data, dict)
    return tree.data[key]
