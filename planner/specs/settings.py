"""`--set PATH=VALUE`: change documents before they are checked, under the documents' own key names.

`--what-if` uses the same paths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.errors import InputError, Mistake
from planner.specs.text import any_of, did_you_mean, printable, quoted
from planner.specs.yaml import Node, parse_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planner.specs.document import Document


_ROOTS = ("model", "cluster", "device", "training", "engine")
_ENDS = ("within_node", "between_nodes")
"""Names of the innermost and the outermost link."""
_ALL_DEFAULTS = "failures"
"""Parts of a document that may be missing as a whole, because all their keys have defaults."""


def apply_setting(setting: str, trees: Mapping[str, Node], option: str = "--set") -> dict[str, Node]:
    """The documents after one change `PATH=VALUE`.

    The path begins with `model`, `cluster`, `device`, `training`, `engine`, the name of one of the cluster's links, or
    `within_node` and `between_nodes`, the cluster's innermost and outermost link. In a mixed cluster a path begins with
    `between`, or with the name of a pool (optionally after `pools.`) and continues as in a cluster. A last key that the
    document does not know is reported when the document is checked.

    Raises:
        InputError: no `=`, an unknown path, or a value that cannot be read.
    """
    where = f"{option} {printable(setting)}"
    path_text, equals, value_text = setting.partition("=")
    path = _path(path_text if equals else "", where)
    value = replace(parse_value(value_text.strip(), where), key_where=where)
    root, steps = _resolve(path, trees, where)
    return {**trees, root: with_value(trees[root], steps, value)} if root in trees else dict(trees)


def value_at(path_text: str, trees: Mapping[str, Node], where: str) -> Node | None:
    """The value at a path of `apply_setting`; None if the document leaves it out.

    Raises:
        InputError: an unknown path; the message points at `where`.
    """
    root, steps = _resolve(_path(path_text, where), trees, where)
    node: Node | None = trees.get(root)
    for step in steps:
        data = node.data if node else None
        if isinstance(data, dict):
            node = data.get(str(step))
        else:
            node = data[step] if isinstance(data, tuple) and isinstance(step, int) else None
    return node


def _path(text: str, where: str) -> tuple[str, ...]:
    path = tuple(text.strip().split("."))
    if len(path) < 2 or not all(path):
        hint = _with_root(path) or "write PATH=VALUE, for example training.dropout=0.1"
        raise InputError("not a setting", where=where, hint=hint)
    return path


def _with_root(path: Sequence[str]) -> str:
    """A hint for a path without its document's name; empty if no document has the path's first key."""
    from planner.specs import cluster, model, training

    documents: dict[str, type[Document]] = {"cluster": cluster.ClusterSpec, "device": cluster.DeviceSpec}
    documents |= {"training": training.TrainingSpec, "model": model.ModelSpec}
    whole = [f"`{root}.{'.'.join(path)}`" for root, document in documents.items() if path[0] in document.model_fields]
    return printable(f"did you mean {any_of(whole)}?", 200) if whole else ""


def _resolve(path: tuple[str, ...], trees: Mapping[str, Node], where: str) -> tuple[str, tuple[str | int, ...]]:
    """The document in which a path begins, and the steps inside it."""
    root, *rest = path
    pools = pool_names(trees["cluster"]) if "cluster" in trees else []
    if root == "device" and not pools:
        return "cluster", path
    if root in _ROOTS and root != "device":
        return root, tuple(rest)
    if "cluster" not in trees:
        return root, ()  # the cluster's links are unknown: the cluster's own mistakes are reported instead
    if root == "pools" and rest:
        root, *rest = rest
    if root in pools:
        number = pools.index(root)
        pool = trees["cluster"].plain["pools"][number]
        return "cluster", ("pools", number, *(_in_link(rest, _links_of(pool)) or rest))
    if root == "between" and pools:
        return "cluster", path
    links = _links_of(trees["cluster"].plain)
    inside = _in_link([root, *rest], links)
    if inside:
        return "cluster", inside
    known = [*_ROOTS, *pools, *["between"] * bool(pools), *links, *_ENDS[: 2 * bool(links)]]
    of_pools = f"each pool has its own, as in {'.'.join((*pools[:1], *path))}"
    hint = of_pools if pools and root in ("device", *_ENDS) else ""
    hint = (
        hint or _with_root(path) or did_you_mean(root, known, otherwise=f"paths begin with one of {', '.join(known)}")
    )
    raise InputError(Mistake(message=f"unknown path {quoted(root)}", where=where, hint=printable(hint, 400)))


def _in_link(path: Sequence[str], links: Sequence[str]) -> tuple[str | int, ...]:
    """The steps from a cluster to the link that a path names; empty if it names no link."""
    name, *rest = path or ("",)
    ends = dict(zip(_ENDS, (0, len(links) - 1), strict=True)) if links else {}
    if name in links:
        return "links", links.index(name), *rest
    return ("links", ends[name], *rest) if name in ends else ()


def _links_of(cluster: Any) -> list[str]:
    """Names of a cluster's links."""
    return _names(cluster.get("links")) if isinstance(cluster, dict) else []


def pool_names(cluster: Node) -> list[str]:
    """Names of the pools in a cluster's document; empty if the cluster is uniform."""
    return _names(cluster.plain.get("pools"))


def _names(entries: Any) -> list[str]:
    if not isinstance(entries, tuple):
        return []  # reported when the cluster is checked
    return [str(each.get("name")) if isinstance(each, dict) else "" for each in entries]


def with_value(tree: Node, steps: Sequence[str | int], value: Node) -> Node:
    """A copy of `tree` with the node at `steps` replaced, or added as a new key.

    Raises:
        InputError: a step before the last does not exist.
    """
    if not steps:
        return value
    step, *rest = steps
    if isinstance(tree.data, tuple) and isinstance(step, int):
        entries = list(tree.data)
        entries[step] = with_value(entries[step], rest, value)
        return replace(tree, data=tuple(entries))
    if rest and step == _ALL_DEFAULTS and isinstance(tree.data, dict):
        tree = replace(tree, data={step: Node(data={}, where=value.where), **tree.data})
    if not isinstance(tree.data, dict) or (rest and step not in tree.data):
        known = list(tree.data) if isinstance(tree.data, dict) else []
        hint = did_you_mean(str(step), known, otherwise=f"keys here are {', '.join(known)}" if known else "")
        raise InputError(
            Mistake(message=f"unknown path: there is no {quoted(step)}", where=value.where, hint=printable(hint, 400))
        )
    inner = with_value(tree.data[str(step)], rest, value) if rest else value
    return replace(tree, data={**tree.data, str(step): inner})
