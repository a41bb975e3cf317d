"""Load clusters by name or path, with their devices and pools written out, in the requested size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.errors import InputError
from planner.specs import library
from planner.specs.by_name import is_there, named_tree
from planner.specs.cluster import ClusterSpec, MixedClusterSpec
from planner.specs.detect import local_host
from planner.specs.settings import apply_setting, pool_names, value_at, with_value
from planner.specs.text import did_you_mean, printable, quoted
from planner.specs.validate import validate
from planner.specs.yaml import Node, read_yaml, shipped_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.specs.cluster import AnyCluster

LOCAL_CLUSTER: Final = "local-cpu"
NO_ONE_SIZE: Final = "a mixed cluster has no one size"
MAX_DEVICES: Final = 10_000_000
_MOST_CHOICES: Final = 64
"""Largest number of pairs of a cluster and a size in one comparison; each pair needs its own search."""


def cluster_names() -> tuple[str, ...]:
    """Names of the shipped clusters."""
    return library.names("clusters")


def cluster_source(name: str) -> str:
    """The source of a shipped cluster's figures."""
    return library.header("clusters", name)


def check_num_choices(count: int) -> None:
    """Refuse a comparison of too many clusters and sizes.

    Raises:
        InputError: there are more than a comparison takes, or none.
    """
    if not 1 <= count <= _MOST_CHOICES:
        hint = "name fewer clusters, or a smaller range of --nodes"
        raise InputError(f"{count} clusters and sizes are not 1 to {_MOST_CHOICES}", hint=hint)


def load_cluster(name: str) -> AnyCluster:
    """Load a cluster by shipped name or path; `local-cpu` describes this machine.

    Raises:
        InputError: unknown name, or a document with mistakes.
    """
    tree = with_devices(cluster_tree(name), folder_of(name))
    return checked_cluster(on_this_machine(tree, None) if split_size(name)[0] == LOCAL_CLUSTER else tree, None)


def split_size(cluster: str) -> tuple[str, str]:
    """The name or path of a cluster, and the hosts after its last colon, as in `dgx-h100:64`; empty without a size.

    An existing file is a path, whatever colons are in its name; so is a path after the letter of a drive.
    """
    name, colon, hosts = cluster.rpartition(":")
    is_sized = hosts.isdecimal() or name in cluster_names() or name.endswith((".yaml", ".yml"))
    return (name, hosts or " ") if colon and is_sized and not is_there(Path(cluster)) else (cluster, "")


def cluster_tree(name: str) -> Node:
    """A cluster's document before it is checked, by shipped name or path; `NAME:N` has N hosts.

    Raises:
        InputError: unknown name, a document that cannot be read, or no number of hosts after the colon.
    """
    where, (name, hosts) = printable(name, 80), split_size(name)
    tree = named_tree("clusters", name)
    if not hosts:
        return tree
    if not re.fullmatch("0*[1-9][0-9]{0,7}", hosts) or int(hosts) > MAX_DEVICES:
        hint = f"write the hosts after the last colon, as in dgx-h100:64; valid: 1 to {MAX_DEVICES}"
        raise InputError(f"{quoted(hosts)} is no number of hosts", where=where, hint=hint)
    return with_value(tree, ("hosts",), Node(data=int(hosts), where=where, key_where=where))


def folder_of(cluster: str) -> Path | None:
    """The folder of the user's own cluster file; it may also contain device files."""
    name, _ = split_size(cluster)
    return None if name in cluster_names() else Path(name).parent


def with_devices(cluster: Node, folder: Path | None) -> Node:
    """The cluster, or each pool of a mixed cluster, with its device written out.

    A pool may name another cluster, which supplies the keys that the pool leaves out.

    Raises:
        InputError: a device or cluster that is not found.
    """
    pools = cluster.entries.get("pools")
    if pools is None or not isinstance(pools.data, tuple):
        return _with_device(cluster, folder)
    whole = tuple(_pool(pool, folder) if isinstance(pool.data, dict) else pool for pool in pools.data)
    return replace(cluster, data={**cluster.entries, "pools": replace(pools, data=whole)})


def _pool(pool: Node, folder: Path | None) -> Node:
    named = pool.entries.get("cluster")
    if named is None or not isinstance(named.data, str):
        return _with_device(pool, folder)
    try:
        base = _with_device(cluster_tree(named.data), folder_of(named.data))
    except InputError as error:
        raise InputError(*(named.mistake(each.message, each.hint) for each in error.mistakes)) from None
    own = {key: value for key, value in pool.entries.items() if key != "cluster"}
    return _with_device(replace(pool, data={**base.entries, **own}), folder)


def _with_device(cluster: Node, folder: Path | None) -> Node:
    """The cluster with its device written out, if it only names a device file.

    The device file is in `devices/` beside the user's own cluster file, or is shipped.
    """
    node = cluster.entries.get("device")
    if node is None or not isinstance(node.data, str):
        return _open(cluster)  # written out in the cluster file, or reported when it is checked
    name = node.data
    own = {path.stem: path for path in (folder / "devices").glob("*.yaml")} if folder else {}
    shipped = library.names("clusters/devices")
    if name in own:
        device = read_yaml(own[name])
    elif name in shipped:
        device = shipped_yaml(library.path_of("clusters/devices", name), f"clusters/devices/{name}.yaml")
    else:
        known = [*own, *shipped]
        hint = did_you_mean(name, known, otherwise=f"devices are {', '.join(known)}, or a mapping written out here")
        raise InputError(node.mistake(f"unknown device {quoted(name)}", hint))
    return _open(with_value(cluster, ("device",), device))


def _open(cluster: Node) -> Node:
    """The cluster with an `efficiency` key in its device.

    Settings can then change the values of `efficiency` even if the generation supplies all of them.
    """
    device = cluster.entries.get("device")
    if (
        device is None
        or not isinstance(device.data, dict)
        or {"generation", "efficiency"} & {*device.data} != {"generation"}
    ):
        return cluster
    return with_value(cluster, ("device", "efficiency"), Node(data={}, where=device.where, key_where=device.key_where))


def on_this_machine(cluster: Node, num_processes: int | None) -> Node:
    """The shipped description of a CPU host, with this machine's cores and memory."""
    where = f"--gpus {num_processes}" if num_processes else "this machine"
    for path, value in local_host(validate(ClusterSpec, cluster), num_processes).items():
        cluster = with_value(cluster, path, Node(data=value, where=where, key_where=where))
    return cluster


def with_hosts(trees: Mapping[str, Node], pool: str, hosts: int) -> dict[str, Node]:
    """The documents with `hosts` hosts in one pool.

    Raises:
        InputError: the cluster has no such pool.
    """
    known = pool_names(trees["cluster"]) if "cluster" in trees else [pool]
    if pool not in known:
        hint = did_you_mean(pool, known, otherwise=f"pools are {', '.join(known)}") if known else "write --nodes N"
        why = f"unknown pool {quoted(pool)}" if known else "the cluster is of one kind and has no pools"
        raise InputError(why, where=f"--nodes {printable(pool, 40)}={hosts}", hint=hint)
    return apply_setting(f"{pool}.hosts={hosts}", trees, "--nodes")


def checked_cluster(tree: Node, gpus: int | None) -> AnyCluster:
    """The checked cluster, uniform or mixed.

    Raises:
        InputError: mistakes in the document, or a single size for a mixed cluster.
    """
    if "pools" not in tree.entries:
        return sized_cluster(tree, gpus)
    hosts = tree.entries.get("hosts")
    given = [*([hosts.key_where or "--nodes"] if hosts else []), *(["--gpus"] if gpus is not None else [])]
    if given:
        raise InputError(NO_ONE_SIZE, where=given[0], hint="each pool has its own hosts, as in --nodes POOL=4")
    return validate(MixedClusterSpec, tree)


def sized_cluster(tree: Node, gpus: int | None) -> ClusterSpec:
    """The cluster with `gpus` devices: a part of one host, whose other devices are idle, or several whole hosts.

    A part of a host has its devices' share of the host's memory and bandwidth, as it has in a layout that leaves the
    other devices idle; values of `--set` hold as they are.
    """
    cluster = validate(ClusterSpec, tree)
    if gpus is None or not 1 <= gpus <= MAX_DEVICES:
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
    cluster = _with_idle_devices(validate(ClusterSpec, tree), per_host)
    if cluster.host is None or gpus >= per_host:
        return cluster
    keys = ("memory", "memory_bandwidth")
    said = {key: value_at(f"cluster.host.{key}", {"cluster": tree}, "") for key in keys}
    of_file = [key for key, node in said.items() if node and not node.where.startswith("--set")]
    share = {key: getattr(cluster.host, key) * gpus / per_host for key in of_file}
    return cluster.model_copy(update={"host": cluster.host.model_copy(update=share)})


def _with_idle_devices(cluster: ClusterSpec, devices_per_host: int) -> ClusterSpec:
    """The cluster with devices at the speed that they reach while the host's remaining devices are idle.

    An operator is assumed to slow down evenly with each busy device: with all devices busy, it takes `alone` times as
    long as with one.
    """
    busy, others, alone = cluster.devices_per_host, devices_per_host - 1, cluster.alone
    if alone is None or busy > others:
        return cluster
    slower = 1.0 + (alone - 1.0) * (busy - 1) / others
    faster, device = alone / slower, cluster.device
    host = {name: getattr(device.efficiency, name) / faster for name in ("launch", "layer_floor", "step_floor")}
    changes = {
        "peak": {precision: rate * faster for precision, rate in device.peak.items()},
        "memory_bandwidth": device.memory_bandwidth * faster,
        "efficiency": device.efficiency.model_copy(update=host),
    }
    return cluster.model_copy(update={"device": device.model_copy(update=changes), "alone": slower})
