"""Command lines as flat keys and values: options (`--seq-length 4096`) and overrides (`model.seq_length=4096`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from planner.emit.read import HOSTS, RANKS
from planner.emit.read.shell import is_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.emit.target import Value

_LAUNCHER: Final = {"nnodes": HOSTS, "num_nodes": HOSTS, "nproc_per_node": RANKS, "num_gpus": RANKS}
_PLACE: Final = (
    *("node_rank", "master_addr", "master_port", "rdzv_", "standalone"),
    *("max_restarts", "tee", "role", "redirects", "wait", "kill_on_bad_exit"),
)
_STARTED: Final = re.compile(r"-m|.*\.py")
"""Matches the program that a launcher starts; it ends the values of the launcher's last option."""
_OVERRIDE: Final = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)


def options_of(words: Sequence[str]) -> dict[str, Value]:
    """Options of a command as keys and values; a launcher's numbers of hosts and ranks get our own keys.

    Keys have `_` instead of `-`. The last of several options with the same name wins, as in argparse. An option without
    a value is True, and an option with several values is a tuple.
    """
    found: dict[str, Value] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("--") or len(word) < 3:
            continue
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while place < len(words) and not equals and not is_option(words[place]):
            if values and _STARTED.fullmatch(words[place]):
                break
            values.append(words[place])
            place += 1
        key = name.replace("-", "_")
        if key.startswith(_PLACE):
            continue
        if key in _LAUNCHER:
            values = values[:1]
        found[_LAUNCHER.get(key, key)] = True if not values else values[0] if len(values) == 1 else tuple(values)
    return found


def overrides_of(words: Sequence[str]) -> dict[str, Value]:
    """The overrides `a.b.c=value` (Hydra or OmegaConf) and the options of a command line, as keys and values."""
    found = options_of(words)
    for word in words:
        if match := _OVERRIDE.fullmatch(word):
            found[match[1]] = match[2].strip("'\"")
    return {key: None if value in ("null", "None") else value for key, value in found.items()}
