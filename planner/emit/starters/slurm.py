"""A batch script for Slurm: every host runs the program. Our own trainer saves before the job's time limit."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.emit.hosts import ranks_of_hosts, script_head, segment_of
from planner.emit.start import Starter
from planner.emit.starters import torchrun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.emit.hosts import HostRanks
    from planner.emit.start import Start

SCRIPT: Final = "job.sbatch"
SECONDS_TO_SAVE: Final = 120
"""Seconds between Slurm's signal and the time limit; submitit uses 90 s, but a large checkpoint takes longer."""


def batch_script(start: Start) -> dict[str, str]:
    """The script for `sbatch`, to be submitted from the folder that contains the script and `plan.json`.

    Slurm chooses the hosts. Our own trainer is started by `planner launch`, which reads the host's number and the
    address of host 0 from Slurm's variables. Before the time limit Slurm signals the script. The script then creates
    the file `run/stop`, as `planner launch` does, so that the ranks save, and puts the job back into the queue. Any
    other program is started by the `run.sh` of this folder and gets no signal from Slurm. Values in #SBATCH lines
    cannot be quoted, so these lines contain only numbers and the model's name, which has no blanks.

    If the ranks use several pools, the job is a heterogeneous job with one component per pool. Slurm numbers the hosts
    of each component separately, so every host looks up its own name in the list of all hosts.
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
        body += f"\n{_srun_others(len(parts), num_hosts=sum(map(len, parts)))}\n"
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
    """The #SBATCH lines that request the hosts of one pool.

    segment: hosts per segment; 0 means the value of the cluster document.

    Slurm's block topology fills whole racks first if no segment size is given, and accepts a segment size only if it
    divides the number of hosts. Slurm orders hosts by name, so hosts of one rack need adjacent names to be neighbours.
    """
    pool, size = hosts[0].pool, segment_of(hosts, segment)
    gpus = f"#SBATCH --gpus-per-node={hosts[0].num_ranks}\n" if pool.kind == "cuda" else ""
    alike = f"#SBATCH --segment={size}\n" if size else ""
    return f"#SBATCH --nodes={len(hosts)}\n{alike}#SBATCH --ntasks-per-node=1\n{gpus}{_WHOLE}"


def _hosts(num_parts: int) -> str:
    """A command that prints the names of all hosts in the order of their ranks."""
    if num_parts == 1:
        return 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
    lists = (f'scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{part}"' for part in range(num_parts))
    return "\n".join(("", *(f"  {each}" for each in lists), ""))


def _srun(num_parts: int) -> str:
    """A command that starts `planner launch` on every host; in a heterogeneous job it passes the host's number."""
    if num_parts == 1:
        return f"srun --kill-on-bad-exit=0 {_CONTAINER}"
    numbered = _NUMBERED.replace("START", 'exec "$@" "--node-rank=$n"')
    return f"""ALL_HOSTS="${{hosts[*]}}" srun {_groups(num_parts)} --kill-on-bad-exit=0 {_CONTAINER} \\
  bash -c '{numbered}' bash"""


def _srun_others(num_parts: int, *, num_hosts: int) -> str:
    """A command that starts `run.sh` on every host, with the host's number if there are several hosts."""
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
"""An exclusive job gets all memory of its hosts only if the job requests it. Source: man sbatch, --exclusive."""

_WARNED: Final = f"#SBATCH --signal=B:USR1@{SECONDS_TO_SAVE}\n#SBATCH --requeue\n"

_CONTAINER: Final = '"${container[@]}"'

_NUMBERED: Final = (
    'n=0; for host in $ALL_HOSTS; do if [[ $host == "$SLURMD_NODENAME" ]]; then break; fi; n=$((n + 1)); done; START'
)

_HEAD, _OURS = (
    Path(__file__).with_name(f"slurm_{part}.sh.txt").read_text(encoding="utf-8") for part in ("head", "ours")
)
"""The script from its options on, and the part that runs our own trainer and asks for another turn."""


STARTER: Final = Starter(script=SCRIPT, write=batch_script)
