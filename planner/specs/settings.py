"""`--set PATH=VALUE`: changes to the documents before they are checked, in the documents' own words.

`--what-if` has the same paths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.errors import InputError, Mistake
from planner.specs.text import did_you_mean, printable, quoted
from planner.specs.yaml import Node, parse_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["apply_setting", "value_at", "with_value"]

_ROOTS = ("model", "cluster", "device", "training", "engine")


def apply_setting(setting: str, trees: Mapping[str, Node], option: str = "--set") -> dict[str, Node]:
    """The trees after one `PATH=VALUE`.

    The path begins with `model`, `cluster`, `device`, `training`, `engine`, the name of one of the cluster's
    links, or `within_node` and `between_nodes`: its innermost and outermost link. In a mixed cluster it begins with
    the name of a pool, or `between`. A last key that the document does not know is reported when the document is
    checked.

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
    """The value that a path of `apply_setting` leads to, or None where the document leaves it out.

    Raises:
        InputError: an unknown path; `where` is what the message points at.
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
        raise InputError("not a setting", where=where, hint="write PATH=VALUE, for example training.dropout=0.1")
    return path


def _resolve(path: tuple[str, ...], trees: Mapping[str, Node], where: str) -> tuple[str, tuple[str | int, ...]]:
    """The tree that a path begins in, and the steps inside it."""
    root, *rest = path
    if root == "device":
        return "cluster", ("device", *rest)
    if root in _ROOTS:
        return root, tuple(rest)
    if "cluster" not in trees:
        return root, ()  # its links are not known: its own mistakes are reported instead
    pools = _names_of(trees["cluster"], "pools")
    if root in pools:
        return "cluster", ("pools", pools.index(root), *rest)
    if root == "between" and pools:
        return "cluster", path
    links = _names_of(trees["cluster"], "links")
    if root in links:
        return "cluster", ("links", links.index(root), *rest)
    ends = {"within_node": 0, "between_nodes": len(links) - 1} if links else {}
    if root in ends:
        return "cluster", ("links", ends[root], *rest)
    known = [*_ROOTS, *pools, *["between"] * bool(pools), *links, *ends]
    hint = did_you_mean(root, known, otherwise=f"paths begin with one of {', '.join(known)}")
    raise InputError(Mistake(message=f"unknown path {quoted(root)}", where=where, hint=printable(hint, 400)))


def _names_of(cluster: Node, key: str) -> list[str]:
    """Names of the cluster's links or pools."""
    entries = cluster.plain.get(key)
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
    if not isinstance(tree.data, dict) or (rest and step not in tree.data):
        known = list(tree.data) if isinstance(tree.data, dict) else []
        hint = did_you_mean(str(step), known, otherwise=f"keys here are {', '.join(known)}" if known else "")
        raise InputError(
            Mistake(message=f"unknown path: there is no {quoted(step)}", where=value.where, hint=printable(hint, 400))
        )
    inner = with_value(tree.data[str(step)], rest, value) if rest else value
    return replace(tree, data={**tree.data, str(step): inner})
