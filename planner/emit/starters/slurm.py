"""A batch script for Slurm: every host runs the program; of our own trainer, time that runs out is a saved stop."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from planner.emit.hosts import ranks_of_hosts, script_head
from planner.emit.starters import torchrun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.emit.hosts import HostRanks
    from planner.emit.start import Start

SCRIPT: Final = "job.sbatch"
SECONDS_TO_SAVE: Final = 120
"""Slurm warns this long before the time limit; submitit asks for 90 s, a large checkpoint needs more."""


def batch_script(start: Start) -> dict[str, str]:
    """The script for `sbatch`, to be submitted from the folder that holds it and `plan.json`.

    Slurm finds the hosts. Our own trainer is started by `planner launch`, which reads its own number and host 0 from
    Slurm's variables; before the time limit Slurm signals the script, which asks the ranks to save through the file
    `run/stop`, as `planner launch` does, and puts the job back into the queue. Another program is started by its
    `run.sh`, which this folder has too, and Slurm tells it nothing. Values in #SBATCH lines cannot be quoted: only the
    model's name, which holds no blank, and numbers stand there.

    Where the ranks lie in several pools the job is a heterogeneous one, with a part for each pool. Slurm numbers the
    hosts of each part on their own, so every host looks for its name in the list of all.
    """
    plan, ours = start.plan, start.target.launcher
    parts = [list(hosts) for _, hosts in groupby(ranks_of_hosts(plan), key=lambda host: host.pool.name)]
    where = "Partition, account and time limit are yours to say: sbatch --partition=... --time=... job.sbatch"
    if len(parts) > 1:
        pools = ", ".join(hosts[0].pool.name for hosts in parts)
        where = f"Each part of the request is for a pool: {pools}. Add its own partition to each"
    further = "".join(f"#SBATCH hetjob\n{_request(hosts, 0)}" for hosts in parts[1:])
    body = _HEAD.replace("HOSTS", _hosts(len(parts)))
    if ours:
        body += _OURS.replace("SRUN", _srun(len(parts))).replace("LAUNCH", ours(plan, start.how))
    else:
        body += _OTHERS.replace("SRUN", _srun_others(len(parts), num_hosts=sum(map(len, parts))))
    text = (
        f"{script_head(plan)}"
        "# Submit it from this folder, which all hosts see: sbatch job.sbatch\n"
        f"# {where}\n"
        "# A container of pyxis: CONTAINER_IMAGE=... sbatch job.sbatch; GPUs counted by GRES: sbatch --gres=gpu:N\n"
        f"#SBATCH --job-name={plan.model.name}\n"
        f"{_request(parts[0], plan.layout.segment)}"
        f"{_WARNED if ours else ''}"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --output=job-%j.log\n"
        f"{further}"
        f"{body}"
    )
    return {SCRIPT: text} if ours else {SCRIPT: text, **torchrun.host_script(start)}


def _request(hosts: Sequence[HostRanks], segment: int) -> str:
    """What is asked for of one pool, in segments of so many hosts, or as the cluster document fixes it.

    Slurm's block topology takes whole racks first where no segment is named, and a segment only where it divides the
    hosts. It numbers hosts by name, so that those of one rack are neighbours where their names are.
    """
    pool = hosts[0].pool
    gpus = f"#SBATCH --gpus-per-node={hosts[0].num_ranks}\n" if pool.kind == "cuda" else ""
    size = segment or pool.segment or len(hosts)
    alike = f"#SBATCH --segment={size}\n" if size < len(hosts) and len(hosts) % size == 0 else ""
    return f"#SBATCH --nodes={len(hosts)}\n{alike}#SBATCH --ntasks-per-node=1\n{gpus}{_WHOLE}"


def _hosts(num_parts: int) -> str:
    """A command that prints the names of all hosts in the order of their ranks."""
    if num_parts == 1:
        return 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
    lists = (f'scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{part}"' for part in range(num_parts))
    return "\n".join(("", *(f"  {each}" for each in lists), ""))


def _srun(num_parts: int) -> str:
    """A command that starts another one on every host; of several parts with the number of the host as an option."""
    if num_parts == 1:
        return f"srun --kill-on-bad-exit=0 {_CONTAINER}"
    numbered = _NUMBERED.replace("START", 'exec "$@" "--node-rank=$n"')
    return f"""ALL_HOSTS="${{hosts[*]}}" srun {_groups(num_parts)} --kill-on-bad-exit=0 {_CONTAINER} \\
  bash -c '{numbered}' bash"""


def _srun_others(num_parts: int, *, num_hosts: int) -> str:
    """A command that starts `run.sh` on every host, with its number where there are several."""
    if num_hosts == 1:
        return f'srun --kill-on-bad-exit=1 {_CONTAINER} bash run.sh "$@"'
    number = 'exec bash run.sh {} "$MASTER_ADDR" "$MASTER_PORT" "$@"'
    if num_parts == 1:
        start = number.format('"$SLURM_NODEID"')
        return f"""srun --kill-on-bad-exit=1 {_CONTAINER} \\\n  bash -c '{start}' bash "$@\""""
    numbered = _NUMBERED.replace("START", number.format('"$n"'))
    return f"""ALL_HOSTS="${{hosts[*]}}" srun {_groups(num_parts)} --kill-on-bad-exit=1 {_CONTAINER} \\
  bash -c '{numbered}' bash "$@\""""


def _groups(num_parts: int) -> str:
    return f"--het-group={','.join(map(str, range(num_parts)))}"


_WHOLE: Final = "#SBATCH --exclusive\n#SBATCH --mem=0\n"
"""A job that has hosts for itself gets all their memory only where it asks for it. Source: man sbatch, --exclusive."""

_WARNED: Final = f"#SBATCH --signal=B:USR1@{SECONDS_TO_SAVE}\n#SBATCH --requeue\n"

_CONTAINER: Final = '"${container[@]}"'

_NUMBERED: Final = (
    'n=0; for host in $ALL_HOSTS; do if [[ $host == "$SLURMD_NODENAME" ]]; then break; fi; n=$((n + 1)); done; START'
)

_HEAD: Final = """\
set -euo pipefail

# Slurm runs a copy of this script: the plan is where sbatch was called
cd "$SLURM_SUBMIT_DIR"
if [[ ! -f plan.json ]]; then
  echo "no plan.json in $SLURM_SUBMIT_DIR: submit from the folder of this script" >&2
  exit 5
fi
container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
  container=(--container-image="$CONTAINER_IMAGE" --container-mounts="$PWD:$PWD" --container-workdir="$PWD")
fi

# host 0 of the job, and a port that no other job of this script has
mapfile -t hosts < <(HOSTS)
export MASTER_ADDR=${hosts[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
"""

_OTHERS: Final = """
SRUN
"""

_OURS: Final = """
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
