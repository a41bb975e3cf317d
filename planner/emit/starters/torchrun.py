"""A script that a user starts by hand on each host: `bash run.sh NUMBER ADDRESS [PORT]`."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from planner.emit.hosts import GO_THERE, num_hosts, ranks_of_hosts, script_head
from planner.emit.start import Starter
from planner.emit.target import Place

if TYPE_CHECKING:
    from planner.emit.start import Start
    from planner.plan import Plan

SCRIPT: Final = "run.sh"
_FURTHER: Final = "# Further options of the program come behind: bash run.sh OPTIONS...\n"


def torchrun_start(plan: Plan, place: Place | None) -> str:
    """The torchrun command and its options for one of several hosts; `place` is None for the only host."""
    if place is None:
        return f"torchrun --standalone --nproc-per-node={plan.layout.world_size}"
    return (
        f"torchrun --nnodes={place.hosts} --nproc-per-node={place.ranks} --node-rank={place.number} \\\n"
        f"  --master-addr={place.address} --master-port={place.port}"
    )


def host_script(start: Start) -> dict[str, str]:
    """A bash script that starts the program on one host and passes its remaining arguments on to the program.

    With several hosts, the first arguments are the host's number, the address of host 0, and a port.
    """
    plan = start.plan
    exports = "".join(f"export {name}={value}\n" for name, value in start.target.environment(plan).items())
    hosts, head = num_hosts(plan), f"{script_head(plan)}# For {start.target.program}.\n"
    if hosts == 1:
        how, further = ("", "") if start.is_ours else (_FURTHER, ' \\\n  "$@"')
        return {SCRIPT: f"{head}{how}\n{GO_THERE}{exports}exec {start.command(None)}{further}\n"}
    ranks = [host.num_ranks for host in ranks_of_hosts(plan)]
    changes = ((n, here) for n, (before, here) in enumerate(pairwise(ranks), 1) if here != before)
    others_ranks = "".join(f"if [[ $1 -ge {n} ]]; then ranks={here}; fi\n" for n, here in changes)
    place = Place(hosts=hosts, ranks='"$ranks"', number='"$1"', address='"$2"', port='"${3:-29500}"')
    further = "" if start.is_ours else ' \\\n  "${@:4}"'
    command = start.command(place)
    counts = f"ranks={ranks[0]}\n{others_ranks}" if place.ranks in command else ""  # Accelerate counts all of them
    more = "" if start.is_ours else "# Further options of the program come behind these three.\n"
    return {
        SCRIPT: f"{head}"
        f"# On every host at once: bash run.sh NUMBER ADDRESS [PORT], with its number from 0 to {hosts - 1},\n"
        "# the address of host 0, and a port that is free there. All hosts see this folder.\n"
        f"{more}\n"
        'if (( $# < 2 )); then\n  echo "usage: bash run.sh NUMBER ADDRESS [PORT]" >&2\n  exit 2\nfi\n'
        f"{GO_THERE}{exports}{counts}exec {command}{further}\n"
    }


STARTER: Final = Starter(script=SCRIPT, write=host_script)
