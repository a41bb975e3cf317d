"""A batch script for Slurm: every host runs `planner launch`, and time that runs out is a saved stop."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from planner.emit.torchrun import num_hosts, ranks_of_hosts, script_head
from planner.errors import InputError
from planner.specs.cluster import MixedClusterSpec

if TYPE_CHECKING:
    from planner.emit.torchrun import RunArguments
    from planner.plan import Plan

__all__ = ["slurm_script"]

SECONDS_TO_SAVE: Final = 120
"""Slurm warns this long before the time limit; submitit asks for 90 s, a large checkpoint needs more."""


def slurm_script(plan: Plan, *, arguments: RunArguments) -> str:
    """The script for `sbatch`, to be submitted from the folder that holds it and `plan.json`.

    Slurm finds the hosts; `planner launch` reads its own number and host 0 from Slurm's variables. Before the time
    limit Slurm signals the script, which asks the ranks to save through the file `run/stop`, as `planner launch`
    does, and puts the job back into the queue. Values in #SBATCH lines cannot be quoted: only the model's name, which
    holds no blank, and numbers stand there.

    Raises:
        InputError: the cluster is a mixed one.
    """
    if isinstance(plan.cluster, MixedClusterSpec):
        raise InputError(
            f"{plan.cluster.name} is a mixed cluster, and a Slurm job asks for the same devices on every host",
            hint="`planner emit PLAN` prints the torchrun command of each host, to be started by hand",
        )
    gpus = f"#SBATCH --gpus-per-node={ranks_of_hosts(plan)[0].num_ranks}\n" if plan.cluster.kind == "cuda" else ""
    launch = shlex.join(("planner", "launch", "plan.json", "--output=run", *arguments.options()))
    return (
        f"{script_head(plan)}"
        "# Submit it from this folder, which all hosts see: sbatch job.sbatch\n"
        "# Partition, account and time limit are yours to say: sbatch --partition=... --time=... job.sbatch\n"
        f"#SBATCH --job-name={plan.model.name}\n"
        f"#SBATCH --nodes={num_hosts(plan)}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"{gpus}"
        "#SBATCH --exclusive\n"
        f"#SBATCH --signal=B:USR1@{SECONDS_TO_SAVE}\n"
        "#SBATCH --requeue\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --output=job-%j.log\n"
        f"{_BODY.replace('LAUNCH', launch)}"
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
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# the ranks finish their step and save; a warning before the time limit also asks for another turn
requeue=no
interrupted=no
trap 'requeue=yes; interrupted=yes; touch run/stop' USR1
trap 'interrupted=yes; touch run/stop' TERM
mkdir -p run

srun --kill-on-bad-exit=0 LAUNCH &
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
