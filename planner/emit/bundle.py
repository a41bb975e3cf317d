"""What `planner emit` writes: a script for a target and, beside it, the plan that it runs."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.emit.megatron import megatron_script
from planner.emit.slurm import slurm_script
from planner.emit.torchrun import torchrun_script
from planner.errors import EnvironmentProblem, InputError
from planner.plan import write_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.plan import Plan
    from planner.run_arguments import RunArguments

TARGETS: Final[dict[str, tuple[str, Callable[..., str]]]] = {
    "torchrun": ("run.sh", torchrun_script),
    "slurm": ("job.sbatch", slurm_script),
    "megatron": ("megatron.sh", megatron_script),
}
"""Target -> name of its script, and the function that writes it."""


def write_bundle(
    plan: Plan, target: str, folder: Path, *, arguments: RunArguments, force: bool = False
) -> tuple[Path, ...]:
    """Write the plan and a target's script into a folder, which is made if need be; returns both files.

    Data files are named by their absolute path: the script runs in its own folder.

    Raises:
        InputError: one of them exists and `force` is false, or is not a file; nothing is written then.
        EnvironmentProblem: the folder cannot be written.
    """
    plan_path, script = folder / "plan.json", folder / TARGETS[target][0]
    for path in (plan_path, script):
        if path.exists() and not (force and path.is_file()):
            why = "exists" if path.is_file() else "is not a file"
            raise InputError(f"{path} {why}", hint="add --force to replace a file, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(plan, plan_path, replace=force)
        script.write_text(TARGETS[target][1](plan, arguments=_absolute(arguments)), encoding="utf-8")
        script.chmod(0o755)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {folder}: {error.strerror}") from None
    return plan_path, script


def _absolute(arguments: RunArguments) -> RunArguments:
    """Paths as they are seen from the folder of the script; a data set of the hub has a name and no path."""
    data = tuple(each if each.startswith("hf:") else str(Path(each).absolute()) for each in arguments.data)
    given = {each.name: getattr(arguments, each.name) for each in fields(arguments)}
    paths: dict[str, Any] = {name: path.absolute() for name, path in given.items() if isinstance(path, Path)}
    return replace(arguments, data=data, **paths)
