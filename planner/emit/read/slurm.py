"""The size of a job that a script asks of Slurm in lines `#SBATCH`, as the variables that Slurm sets in the job.

Source: Slurm, doc/man/man1/sbatch.1 (INPUT and OUTPUT ENVIRONMENT VARIABLES).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from planner.emit.read import HOSTS, RANKS
from planner.emit.read.launchers import NAMES

if TYPE_CHECKING:
    from planner.emit.target import Value, Values

_LINE: Final = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_STARTS: Final = re.compile(r"^[^#\n]*\bsrun\b", re.MULTILINE)
_OPTION: Final = re.compile(r"(?<!\S)(?:--([a-z-]+)(?:=|[ \t]+)|-N[ \t]*)[\"']?([\w:.-]+)")
_VARIABLES: Final[dict[str, list[str]]] = NAMES["slurm"]


def variables_of(text: str, hosts: int = 0) -> dict[str, str]:
    """Variables that Slurm sets for the sizes that a script asks for; a range of hosts, as in 4-8, sets none.

    hosts: the number of hosts that the user gave, which replaces the script's number.
    """
    asked = _asked(text) | ({"nodes": str(hosts)} if hosts else {})
    return {name: asked[option] for option, names in _VARIABLES.items() if option in asked for name in names}


def with_srun(text: str, values: Values) -> dict[str, Value]:
    """The values; hosts and ranks are added if srun starts the ranks and no other launcher's options name them."""
    asked = _asked(text)
    ranks = asked.get("ntasks-per-node") or asked.get("gpus-per-node")
    if "nodes" not in asked or not {HOSTS, RANKS}.isdisjoint(values) or not _STARTS.search(text):
        return dict(values)
    return {**values, HOSTS: asked["nodes"], **({RANKS: ranks} if ranks else {})}


def _asked(text: str) -> dict[str, str]:
    """Option of sbatch -> whole number; of several lines with one option, the last wins."""
    found: dict[str, str] = {}
    for line in _LINE.findall(text):
        for option, value in _OPTION.findall(line.partition(" #")[0]):
            named = "gpus-per-node" if option == "gres" and value.startswith("gpu:") else option or "nodes"
            if named in _VARIABLES and (count := re.fullmatch(r"(?:\S*:)?([0-9]{1,7})", value)):  # as in h100:8
                found[named] = count[1]
    return found
