"""The hosts that a plan uses, and the first lines of every script."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import yaml

from planner.cost.run import devices_in_use
from planner.layout import format_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from planner.plan import Plan
    from planner.specs.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanks:
    """The ranks of one host: `num_ranks` consecutive ranks from `first` on.

    pool: the cluster, or one pool of a mixed cluster.
    """

    pool: ClusterSpec
    first: int
    num_ranks: int


def ranks_of_hosts(plan: Plan) -> tuple[HostRanks, ...]:
    """The hosts that the plan uses, in the order of their ranks; the program is started once on each host.

    Hosts are filled one after the other, as in the plan's cost, so the last host of a pool may have fewer ranks.
    """
    used = {pool.name: (pool, count) for pool, count in devices_in_use(plan.cluster, plan.layout)}
    order = dict.fromkeys(plan.layout.pools) or used
    found: list[HostRanks] = []
    first = 0
    for pool, count in (used[name] for name in order):
        end = first + count
        while first < end:
            found.append(HostRanks(pool=pool, first=first, num_ranks=min(pool.devices_per_host, end - first)))
            first += found[-1].num_ranks
    return tuple(found)


def segment_of(hosts: Sequence[HostRanks], segment: int) -> int:
    """Number of hosts in each segment of a pool; 0 if the hosts are one segment, or no whole number of segments.

    segment: the plan's hosts per segment; 0 means the value of the cluster document.
    """
    size = segment or hosts[0].pool.segment or len(hosts)
    return size if size < len(hosts) and len(hosts) % size == 0 else 0


def num_hosts(plan: Plan) -> int:
    """Number of hosts that the plan uses."""
    return len(ranks_of_hosts(plan))


def uneven_hosts(plan: Plan) -> tuple[str, str] | None:
    """Message and hint if there are several hosts with different numbers of ranks, or with idle devices; else None."""
    hosts = ranks_of_hosts(plan)
    if len(hosts) == 1 or all(host.num_ranks == hosts[0].pool.devices_per_host for host in hosts):
        return None
    if len(plan.cluster.pools) == 1:
        whole = sum(host.pool.devices_per_host for host in hosts)
        message = f"{plan.layout.world_size} ranks leave the last of {len(hosts)} hosts partly idle"
        return message, f"plan with whole hosts, for example --gpus {whole}"
    counts = " and ".join(str(count) for count in sorted({host.num_ranks for host in hosts}))
    return f"hosts run {counts} ranks", "plan with pools whose hosts are used whole and have as many devices each"


def script_head(plan: Plan) -> str:
    """The first lines of every script: the interpreter, and comments that name the model, the hosts and the layout."""
    return "#!/usr/bin/env bash\n" + _comments(head_lines(plan))


def yaml_file(plan: Plan, document: Any, *further: str) -> str:
    """A YAML file, behind comments that describe the plan, and further comments."""
    return _comments((*head_lines(plan), *further)) + yaml.safe_dump(document, sort_keys=False, width=1000)


def _comments(lines: Iterable[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def head_lines(plan: Plan) -> tuple[str, ...]:
    """Lines that describe a file: first the model, hosts and devices, then the layout."""
    hosts = Counter(host.pool.name for host in ranks_of_hosts(plan))
    devices = Counter[str]()
    for pool, count in devices_in_use(plan.cluster, plan.layout):
        devices[pool.device.name] += count
    where = " + ".join(f"{count} x {name}" for name, count in hosts.items())
    what = " + ".join(f"{count} {name}" for name, count in devices.items())
    return f"{plan.model.name} on {where}, {what}:", format_layout(plan.layout)


GO_THERE: Final = 'set -euo pipefail\ncd "$(dirname "$0")"\n'
