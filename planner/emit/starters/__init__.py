"""The starters, which start a program on the hosts; `--on` selects one."""

from __future__ import annotations

from typing import Final

from planner.emit.start import Starter
from planner.emit.starters import kubeflow, skypilot, slurm, torchrun

STARTERS: Final[dict[str, Starter]] = {
    each.name: each
    for each in (
        Starter(name="torchrun", script=torchrun.SCRIPT, write=torchrun.host_script),
        Starter(name="slurm", script=slurm.SCRIPT, write=slurm.batch_script),
        Starter(name="kubeflow", script=kubeflow.SCRIPT, write=kubeflow.train_job, yours=kubeflow.YOURS),
        Starter(name="skypilot", script=skypilot.SCRIPT, write=skypilot.task),
    )
}
