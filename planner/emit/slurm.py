"""A batch script for Slurm: every host runs `planner launch`, and time that runs out is a saved stop."""

from __future__ import annotations

import shlex
from itertools import groupby
from typing import TYPE_CHECKING, Final

from planner.emit.torchrun import ranks_of_hosts, script_head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.emit.torchrun import HostRanks
    from planner.plan import Plan
    from planner.run_arguments import RunArguments

SECONDS_TO_SAVE: Final = 120
"""Slurm warns this long before the time limit; submitit asks for 90 s, a large checkpoint needs more."""


def slurm_script(plan: Plan, *, arguments: RunArguments) -> str:
    """The script for `sbatch`, to be submitted from the folder that holds it and `plan.json`.

    Slurm finds the hosts; `planner launch` reads its own number and host 0 from Slurm's variables. Before the time
    limit Slurm signals the script, which asks the ranks to save through the file `run/stop`, as `planner launch`
    does, and puts the job back into the queue. Values in #SBATCH lines cannot be quoted: only the model's name, which
    holds no blank, and numbers stand there.

    Where the ranks lie in several pools the job is a heterogeneous one, with a part for each pool. Slurm numbers the
    hosts of each part on their own, so every host looks for its name in the list of all.
    """
    parts = [list(hosts) for _, hosts in groupby(ranks_of_hosts(plan), key=lambda host: host.pool.name)]
    launch = shlex.join(("planner", "launch", "plan.json", "--output=run", *arguments.options()))
    where = "Partition, account and time limit are yours to say: sbatch --partition=... --time=... job.sbatch"
    if len(parts) > 1:
        pools = ", ".join(hosts[0].pool.name for hosts in parts)
        where = f"Each part of the request is for a pool: {pools}. Add its own partition to each"
    further = "".join(f"#SBATCH hetjob\n{_request(hosts, 0)}" for hosts in parts[1:])
    body = _BODY.replace("HOSTS", _hosts(len(parts))).replace("SRUN", _srun(len(parts))).replace("LAUNCH", launch)
    return (
        f"{script_head(plan)}"
        "# Submit it from this folder, which all hosts see: sbatch job.sbatch\n"
        f"# {where}\n"
        f"#SBATCH --job-name={plan.model.name}\n"
        f"{_request(parts[0], plan.layout.segment)}"
        f"#SBATCH --signal=B:USR1@{SECONDS_TO_SAVE}\n"
        "#SBATCH --requeue\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --output=job-%j.log\n"
        f"{further}"
        f"{body}"
    )


def _request(hosts: Sequence[HostRanks], segment: int) -> str:
    """What is asked for of one pool, in segments of so many hosts, or as the cluster document fixes it.

    Slurm's block topology takes whole racks first where no segment is named, and a segment only where it divides the
    hosts. It numbers hosts by name, so that those of one rack are neighbours where their names are.
    """
    pool = hosts[0].pool
    gpus = f"#SBATCH --gpus-per-node={hosts[0].num_ranks}\n" if pool.kind == "cuda" else ""
    size = segment or pool.segment or len(hosts)
    alike = f"#SBATCH --segment={size}\n" if size < len(hosts) and len(hosts) % size == 0 else ""
    return f"#SBATCH --nodes={len(hosts)}\n{alike}#SBATCH --ntasks-per-node=1\n{gpus}#SBATCH --exclusive\n"


def _hosts(num_parts: int) -> str:
    """A command that prints the names of all hosts in the order of their ranks."""
    if num_parts == 1:
        return 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
    lists = (f'scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{part}"' for part in range(num_parts))
    return "\n".join(("", *(f"  {each}" for each in lists), ""))


def _srun(num_parts: int) -> str:
    """A command that starts another one on every host; of several parts with the number of the host as an option."""
    if num_parts == 1:
        return "srun --kill-on-bad-exit=0"
    groups = ",".join(map(str, range(num_parts)))
    return f"""ALL_HOSTS="${{hosts[*]}}" srun --het-group={groups} --kill-on-bad-exit=0 bash -c '{_NUMBERED}' bash"""


_NUMBERED: Final = (
    'n=0; for host in $ALL_HOSTS; do if [[ $host == "$SLURMD_NODENAME" ]]; then break; fi; n=$((n + 1)); done; '
    'exec "$@" "--node-rank=$n"'
)

_BODY: Final = """\
set -euo pipefail

# Slurm runs a copy of this script: the plan is where sbatch was called
cd "$SLURM_SUBMIT_DIR"
if [[ ! -f plan.json ]]; then
  echo "no plan.json in $SLURM_SUBMIT_DIR: submit from the folder of this script" >&2
  exit 5
fi

# host 0 of the job, and a port that no other job of this script has
mapfile -t hosts < <(HOSTS)
export MASTER_ADDR=${hosts[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# the ranks finish their step and save; a warning before the time limit also asks for another turn
requeue=no
interrupted=no
trap 'requeue=yes; interrupted=yes; touch run/stop' USR1
trap 'interrupted=yes; touch run/stop' TERM
mkdir -p run

SRUN LAUNCH &
training=$!
while :; do
  interrupted=no
  code=0
  wait "$training" || code=$?
  [[ $interrupted == yes ]] || break # a signal cuts the wait short
done

if [[ $code == 75 && $requeue == yes ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
