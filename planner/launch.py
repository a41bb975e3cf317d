"""Run a plan on this host: start torchrun, pass on what the user asks, and turn the outcome into an exit code."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from planner.emit.torchrun import num_hosts, torchrun_command, torchrun_commands
from planner.errors import EnvironmentProblem, ExitCode, InputError, NothingFitsError
from planner.plan import plan_from_json, plan_to_dict, read_plan, write_plan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from planner.plan import Plan

__all__ = ["launch"]

ATTEMPTS_WITHOUT_PROGRESS: Final = 3
POLL_SECONDS: Final = 0.1
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def launch(
    plan_path: Path,
    *,
    output: Path,
    data: tuple[Path, ...] = (),
    steps: int | None = None,
    resume: str = "auto",
    dry_run: bool = False,
) -> int:
    """Train by the plan and return the exit code; `dry_run` only shows the commands, one line for each host.

    The run lives in `output`. A rank that dies without a word (a kill, a lost machine) is retried from the
    newest checkpoint, with a fresh rendezvous, until three attempts in a row bring no new checkpoint.

    Raises:
        InputError: the plan is for several hosts, or `output` holds another run, or a dry run of a plan without file.
        EnvironmentProblem: torch is missing, `output` cannot be written, or a run in it is under way.
    """
    from_input = str(plan_path) == "-"
    plan = plan_from_json(sys.stdin.buffer.read().decode("utf-8", "replace")) if from_input else read_plan(plan_path)
    options: dict[str, Any] = {"output": output, "data": data, "steps": steps}
    if dry_run and from_input:
        raise InputError("the command needs the plan's file", hint="write it first, `planner plan ... -o plan.json`")
    if dry_run:
        lines = torchrun_commands(plan, plan_path, resume=resume, **options)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return ExitCode.OK
    _check_environment(plan)
    with _locked(output):
        _claim(plan, output, resume)
        own_plan = output / "plan.json"
        command = torchrun_command(plan, own_plan, resume="auto" if resume == "never" else resume, **options)
        again = torchrun_command(plan, own_plan, **options)  # from the newest checkpoint
        return _supervise(command, again, output, _environment())


def _check_environment(plan: Plan) -> None:
    if plan.engine.name != "torch":
        raise InputError(
            f"the plan is made for {plan.engine.name}, and `launch` runs the torch engine",
            hint="plan again with --engine torch",
        )
    if not plan.fits:
        raise NothingFitsError("the plan does not fit into memory", hint="`planner explain PLAN` shows by how much")
    if num_hosts(plan) > 1:
        raise InputError(
            f"the plan fills {num_hosts(plan)} hosts and `launch` starts one",
            hint="run `planner launch --dry-run` for the command of each host",
        )
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblem("torch is not installed", hint="pip install 'parallel-planner[train]'")


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock goes away with it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / ".lock").open("w")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write to {output}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EnvironmentProblem(f"a run in {output} is under way", hint="choose another --output") from None
        yield


def _claim(plan: Plan, output: Path, resume: str) -> None:
    """Make `output` the folder of this plan's run, without overwriting another's.

    A run may go on under another layout or on another cluster: model and training must be the same.
    """
    own_plan = output / "plan.json"
    others = [path.name for path in output.iterdir() if path.name != ".lock"]
    if own_plan.exists():
        if _job(read_plan(own_plan)) != _job(plan):
            raise InputError(f"{output} holds the run of another plan", hint="choose another --output")
        if resume == "never":
            raise InputError(f"{output} holds a run already", hint="choose another --output, or --resume auto")
    elif others:
        raise InputError(f"{output} is not empty and holds no run", hint="choose another --output")
    for leftover in ("stop", "status.json"):
        (output / leftover).unlink(missing_ok=True)
    write_plan(plan, own_plan, replace=True)


def _job(plan: Plan) -> tuple[Any, Any]:
    document = plan_to_dict(plan)
    return document["model"], {key: value for key, value in document["training"].items() if key != "steps"}


def _environment() -> dict[str, str]:
    # one thread for each process, as the plan prices a CPU core; torchrun sets it only from two processes on
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # the name is planner.trainer.parent's, which nothing imports
    return {**defaults, **os.environ, "PLANNER_PARENT_PID": str(os.getpid())}


def _supervise(command: tuple[str, ...], again: tuple[str, ...], output: Path, environment: dict[str, str]) -> int:
    stopper = _Stopper(output)
    failures, newest = 0, _newest_checkpoint(output)
    with stopper.listening():
        while True:
            code = _run_once(command, stopper, environment)
            state = _verdict(output)
            if code is not None or state["state"] not in ("running", ""):
                return _exit_code(code, state)
            progressed = _newest_checkpoint(output) != newest
            failures = 1 if progressed else failures + 1
            newest = _newest_checkpoint(output)
            started = state["state"] == "running"
            if not started or stopper.asked or failures >= ATTEMPTS_WITHOUT_PROGRESS:
                _say(f"a rank ended without a word at step {state['step']}; no progress since checkpoint {newest}")
                return stopper.exit_code or ExitCode.RANK_FAILED
            _say(f"a rank ended without a word; starting again from checkpoint {newest}")
            command = again if progressed else command  # --resume STEP holds until a checkpoint follows it
            time.sleep(2.0 ** (failures - 1))


def _run_once(command: tuple[str, ...], stopper: _Stopper, environment: dict[str, str]) -> ExitCode | None:
    """One torchrun from start to end; returns a code only where the user ended it by force."""
    arguments = [sys.executable, "-m", "planner.trainer.agent", *command[1:]]
    process = subprocess.Popen(  # noqa: S603 # our own interpreter and module, arguments as a list
        arguments, start_new_session=True, env=environment
    )
    try:
        while process.poll() is None:
            if stopper.times_asked > 1:
                return stopper.exit_code
            time.sleep(POLL_SECONDS)
        return None
    finally:
        # ranks die with torchrun (PR_SET_PDEATHSIG), whatever happens here
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Stopper:
    """The first signal asks the ranks to finish their step and save; the second one ends them.

    Asked through a file that the ranks look for after each step: torchrun would give them 30 seconds only, and
    ranks that are still starting would die of the signal.
    """

    def __init__(self, output: Path) -> None:
        self._request = output / "stop"
        self.times_asked = 0
        self._signal = signal.SIGTERM

    @property
    def asked(self) -> bool:
        """Whether any signal came."""
        return self.times_asked > 0

    @property
    def exit_code(self) -> ExitCode | None:
        """The code of a run that ended by force."""
        if not self.asked:
            return None
        return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.TERMINATED

    def _on_signal(self, number: int, _: object) -> None:
        self.times_asked += 1
        self._signal = signal.Signals(number)
        if self.times_asked == 1:
            self._request.touch()
            _say("stopping after this step; a second signal ends the run at once")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals inside the block."""
        before = {each: signal.signal(each, self._on_signal) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _verdict(output: Path) -> dict[str, Any]:
    try:
        verdict: dict[str, Any] = json.loads((output / "status.json").read_text())
    except (OSError, ValueError):
        return {"state": "", "step": 0}
    return verdict


def _exit_code(forced: ExitCode | None, verdict: dict[str, Any]) -> int:
    if forced is not None:
        return forced
    codes = {"done": ExitCode.OK, "saved": ExitCode.PREEMPTED, "diverged": ExitCode.DIVERGED}
    if verdict["state"] == "diverged":
        _say(f"training diverged: {verdict['reason']}")
    return int(codes.get(verdict["state"], verdict.get("exit_code", ExitCode.RANK_FAILED)))


def _newest_checkpoint(output: Path) -> int | None:
    steps = (path.name.removeprefix("step-") for path in (output / "checkpoints").glob("step-*"))
    return max((int(step) for step in steps if step.isdigit()), default=None)


def _say(message: str) -> None:
    sys.stderr.write(f"planner launch: {message}\n")
