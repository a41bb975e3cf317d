"""From a plan to a run on this host: check the host, claim the folder, start the ranks and supervise them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.data_files import RECORD, confirmed, write_record
from planner.emit.bundle import not_carried
from planner.emit.hosts import num_hosts
from planner.emit.programs.torch import TARGET as TORCH
from planner.emit.programs.torch import Host, torchrun_command, torchrun_commands
from planner.emit.target import How
from planner.errors import EnvironmentProblem, ExitCode, InputError
from planner.launch.attempts import SECONDS_TO_MEET
from planner.launch.hosts import find_host
from planner.launch.others import launch_other
from planner.launch.preflight import check
from planner.launch.supervise import follow, lead
from planner.plan import folder_for, write_plan
from planner.plan_file import saved_documents
from planner.reading import read_plan
from planner.run_arguments import RunArguments
from planner.verdict import check_fits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from planner.launch.attempts import Attempt
    from planner.plan import Plan
    from planner.specs.model import ModelSpec
    from planner.specs.training import TrainingSpec


def launch(
    plan_path: Path,
    *,
    output: Path,
    arguments: RunArguments | None = None,
    dry_run: bool = False,
    force_unfit: bool = False,
    smoke: bool = False,
    further: Sequence[str] = (),
    **place: Any,
) -> int:
    """Train by the plan and return the exit code; `dry_run` only prints the commands of the hosts.

    A plan for another program is started with the files that `planner emit` writes. `smoke` and `further` apply to such
    plans only.

    `output` is the folder of the run. If the plan needs several hosts, each host calls this function, and host 0 holds
    the folder's lock.
    force_unfit: also start a plan that does not fit into memory.
    place: `node_rank`, `master_addr` and `master_port` of `find_host`.

    Raises:
        InputError: this host has no place in the plan, `output` holds another run, or a dry run has a plan without a
            file.
        EnvironmentProblem: something that the run needs is missing, or another run in `output` is still going on.
        NothingFitsError: the plan does not fit, and `force_unfit` is false.
    """
    arguments = arguments or RunArguments()
    plan = read_plan(plan_path, tell=_note)
    if plan.engine.name != "torch" and plan.engine.emits:
        how: dict[str, Any] = {
            "smoke": smoke,
            "dry_run": dry_run,
            "further": further,
            "force_unfit": force_unfit,
            **place,
        }
        return launch_other(plan, output=output, arguments=arguments, tell=_note, **how)
    if smoke or further:
        raise InputError("--smoke and options behind -- are for plans of other programs", hint="leave them out")
    if dry_run and str(plan_path) == "-":
        raise InputError("the command needs the plan's file", hint="write it first, `planner plan ... -o plan.json`")
    check_fits(plan, force_unfit=force_unfit, tell=_note)
    for each in not_carried(TORCH, plan, How(arguments=arguments)):
        _note(f"still yours: {each}")
    if dry_run:
        sys.stdout.write(torchrun_commands(plan, plan_path, output=output, arguments=arguments))
        return ExitCode.OK
    if arguments.async_tp and (plan.layout.tp == 1 or plan.cluster.kind == "cpu"):
        raise InputError("--async-tp is for tensor parallelism on GPUs, and this plan has none", hint="leave it out")
    host = find_host(plan, os.environ, **place)
    check(plan, output, host)
    if host is not None and host.number > 0:
        return follow(_command_of(plan, plan_path, output, arguments, host), output, host=host.number)
    with contextlib.ExitStack() as held:
        with folder_for(output):
            held.enter_context(_locked(output))
            _claim(plan, output, arguments)
        resume = "auto" if arguments.resume == "never" else arguments.resume  # `_claim` has cleared the folder
        command_of = _command_of(plan, output / "plan.json", output, arguments, host)
        port = int(host.port) if host else 0
        return lead(command_of, output, num_hosts=num_hosts(plan), port=port, resume=resume)


def _command_of(
    plan: Plan, plan_path: Path, output: Path, arguments: RunArguments, host: Host | None
) -> Callable[[Attempt], tuple[str, ...]]:
    """Return a function from an attempt to the torchrun command; it raises if the data have changed meanwhile.

    The rendezvous has the attempt's name, so that a late host cannot join the rendezvous of the next attempt. The
    command sets the launchers' timeout for the rendezvous, because torchrun's own timeout of 15 minutes is longer.
    """

    def command(attempt: Attempt) -> tuple[str, ...]:
        confirmed(arguments.data, output)
        place = host and replace(host, port=attempt.port)
        chosen = replace(arguments, resume=attempt.resume)
        words = torchrun_command(plan, plan_path, output=output, arguments=chosen, host=place)
        patience = (f"--rdzv-conf=timeout={SECONDS_TO_MEET:.0f}",) if host else ()
        return (words[0], f"--rdzv-id={attempt.start}", *patience, *words[1:])

    return command


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Lock the folder for this process; the lock is released when the process ends."""
    try:
        lock = (output / ".lock").open("w")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write to {output}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EnvironmentProblem(f"a run in {output} is under way", hint="choose another --output") from None
        yield


def _claim(plan: Plan, output: Path, arguments: RunArguments) -> None:
    """Make `output` the folder of this plan's run, without overwriting another run, and record its data files.

    A run may resume under another layout or on another cluster, but model and training must be the same.
    """
    own_plan = output / "plan.json"
    others = [path.name for path in output.iterdir() if path.name != ".lock"]
    if own_plan.exists():
        if _without_steps(*saved_documents(own_plan, "model", "training")) != _without_steps(plan.model, plan.training):
            raise InputError(f"{output} holds the run of another plan", hint="choose another --output")
        if arguments.resume == "never":
            raise InputError(f"{output} holds a run already", hint="choose another --output, or --resume auto")
    elif others:
        raise InputError(f"{output} is not empty and holds no run", hint="choose another --output")
    if not _has_trained(output):  # what an earlier start was given does not matter
        (output / RECORD).unlink(missing_ok=True)
    write_record(confirmed(arguments.data, output), output)
    for leftover in ("stop", "status.json"):
        (output / leftover).unlink(missing_ok=True)
    write_plan(plan, own_plan, replace=True)


def _has_trained(output: Path) -> bool:
    metrics = output / "metrics.jsonl"
    return any(output.glob("checkpoints/step-*")) or (metrics.exists() and metrics.stat().st_size > 0)


def _without_steps(model: ModelSpec, training: TrainingSpec) -> tuple[ModelSpec, TrainingSpec]:
    return model, training.model_copy(update={"steps": 1})


def _note(news: str) -> None:
    sys.stderr.write(f"note: {news}\n")
