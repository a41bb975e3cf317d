"""Supervise torchrun: restart it when ranks die without a message, kill ranks that hang, pass on signals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, Final

from planner.errors import EnvironmentProblem, ExitCode, PlannerError
from planner.launch.attempts import Follower, Head
from planner.launch.messages import say
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from planner.launch.attempts import Attempt

ATTEMPTS_WITHOUT_PROGRESS: Final = 3
POLL_SECONDS: Final = 0.1
SECONDS_BETWEEN_LOOKS: Final = 1.0
SECONDS_OF_SILENCE: Final = 20.0
"""A rank without a heartbeat for this time is no longer running: its process was stopped, or its host hangs."""
_BUS_ERROR: Final = (-signal.SIGBUS, 128 + signal.SIGBUS)
"""Ends of torchrun's agent when this signal ends it, or one of its ranks (planner.trainer.agent)."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def lead(
    command_of: Callable[[Attempt], tuple[str, ...]], output: Path, *, num_hosts: int, port: int, resume: str
) -> int:
    """Run torchrun on host 0, or on a single host, until the ranks report how the run ended; returns the exit code.

    If a rank dies without a message (a kill, a lost machine), or another host requests a restart, the run restarts from
    the newest checkpoint, with a new rendezvous on the next port. The run ends when three attempts in a row save no new
    checkpoint.

    command_of: returns the torchrun command of an attempt.
    port: the port of the first attempt.
    resume: `auto` or a step; the step applies until the run has saved a later checkpoint.

    Raises:
        EnvironmentProblem: the folder cannot be written.
        PlannerError: from `command_of`.
    """
    head, code = Head(output, num_hosts), int(ExitCode.BUG)
    try:
        code = _lead(command_of, output, head, port, resume)
    except PlannerError as error:  # the other hosts end in the same way
        code = error.exit_code
        raise
    finally:
        head.end(code)
    return code


def _lead(command_of: Callable[[Attempt], tuple[str, ...]], output: Path, head: Head, port: int, resume: str) -> int:
    stopper, before = _Stopper(output), _stamp(output)
    failures, newest = 0, _newest_checkpoint(output)
    with stopper.listening():
        while True:
            attempt = head.begin(port=port, resume=resume)
            code = _run_once(command_of(attempt), attempt.start, stopper, output, head.must_end)
            if code is None:
                say(f"ended at once; {_saved_words(output)}")
                return stopper.exit_code
            state = _verdict(output, before)
            if state["state"] == "saved":
                say(f"stopped; {_saved_words(output)}")
            if state["state"] not in ("running", ""):
                return _exit_code(state)
            moved = _newest_checkpoint(output) != newest
            resume = "auto" if moved else resume
            failures = 1 if moved else failures + 1
            newest = _newest_checkpoint(output)
            # false if the hosts never met
            started = state["state"] == "running" or code in (ExitCode.RANK_FAILED, *_BUS_ERROR)
            loss = "a file was cut while it was mapped (SIGBUS)" if code in _BUS_ERROR else head.loss()
            if not started or stopper.times_asked or failures >= ATTEMPTS_WITHOUT_PROGRESS:
                say(f"{loss} at step {state['step']}; no progress since checkpoint {newest}")
                return stopper.exit_code if stopper.times_asked else ExitCode.RANK_FAILED
            say(f"{loss}; starting again from checkpoint {newest}")
            port += 1
            time.sleep(2.0 ** (failures - 1))


def follow(command_of: Callable[[Attempt], tuple[str, ...]], output: Path, *, host: int) -> int:
    """Run torchrun on a host other than host 0, in each attempt that host 0 begins; returns the run's exit code.

    Raises:
        EnvironmentProblem: host 0 begins no attempt, or the folder cannot be written.
    """
    follower, stopper, before = Follower(output, host), _Stopper(output), _stamp(output)
    with stopper.listening():
        while (attempt := follower.join(lambda: stopper.times_asked > 0)) is not None:
            if attempt.exit_code is None:
                code = _run_once(command_of(attempt), attempt.start, stopper, output, follower.must_end)
                if code is None:
                    break
            state = _verdict(output, before)
            if state["state"] not in ("running", ""):
                return _exit_code(state)
            if attempt.exit_code is not None:
                return attempt.exit_code
    return stopper.exit_code


def _run_once(
    command: tuple[str, ...], start: str, stopper: _Stopper, output: Path, must_end: Callable[[], bool]
) -> int | None:
    """Run torchrun once; returns its exit code, or None if a second signal of the user ended it.

    must_end: whether the hosts have moved on to another attempt; if so, this attempt counts as failed.
    """
    logs = _make_log_folder()
    arguments = [sys.executable, "-m", "planner.trainer.agent", f"--log-dir={logs}", *command[1:]]
    process = subprocess.Popen(arguments, start_new_session=True, env=_environment(start))  # noqa: S603 # our own module
    hearts = _Hearts(output)
    try:
        while process.poll() is None:
            if stopper.times_asked > 1:
                return None
            if must_end():
                return ExitCode.RANK_FAILED
            hearts.end_the_silent()
            time.sleep(POLL_SECONDS)
        return process.returncode
    finally:
        # the kernel kills the ranks when torchrun dies (PR_SET_PDEATHSIG), even if this process fails
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(logs, ignore_errors=True)


def _make_log_folder() -> str:
    """Make a log folder for torchrun; without one torchrun makes a folder itself and never removes it."""
    try:
        return tempfile.mkdtemp(prefix="planner-launch-")
    except OSError as error:
        raise EnvironmentProblem(f"cannot make a temporary folder: {error.strerror}", hint="set TMPDIR") from None


def _environment(start: str) -> dict[str, str]:
    # one thread for each process, as the plan prices a CPU core; torchrun sets this only for two or more processes
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # planner.trainer.parent and .token_cache read variables of these names; nothing outside the trainer imports them
    own = {"PLANNER_PARENT_PID": str(os.getpid()), "PLANNER_START": start}
    return {**defaults, **os.environ, **own}


class _Hearts:
    """Heartbeats of this host's ranks: files that a thread of each rank touches every two seconds.

    A stopped process, or a process that hangs in a system call while it holds Python's global lock, has no heartbeat;
    peers would wait for such a process until the collective's timeout. Time without a heartbeat is measured with this
    process's monotonic clock, so no rank is killed because the whole machine was suspended.
    """

    def __init__(self, output: Path) -> None:
        self._folder = output / "heartbeats"
        self._beats: dict[Path, tuple[int, float]] = {}  # the file's last change, and when it was noticed
        self._looked = time.monotonic()
        for path in self._folder.glob("rank-*"):  # files of killed ranks, whose ids may have been reused
            if self._process_of(path) is not None:
                path.unlink(missing_ok=True)

    def end_the_silent(self) -> None:
        """Kill this host's ranks that have been without a heartbeat for too long.

        Torchrun notices the killed ranks and ends the others.
        """
        now = time.monotonic()
        if now - self._looked < SECONDS_BETWEEN_LOOKS:
            return
        self._looked = now
        for path in self._folder.glob("rank-*"):
            with contextlib.suppress(OSError):  # the rank may end at this moment
                changed = path.stat().st_mtime_ns
                before, seen = self._beats.get(path, (0, now))
                if changed != before:
                    self._beats[path] = changed, now
                elif now - seen > SECONDS_OF_SILENCE:
                    self._end(path)

    def _end(self, path: Path) -> None:
        del self._beats[path]
        process = self._process_of(path)
        if process is not None:
            say(f"{path.name} has not moved for {SECONDS_OF_SILENCE:.0f} s: ending process {process}")
            path.unlink()
            os.kill(process, signal.SIGKILL)

    @staticmethod
    def _process_of(path: Path) -> int | None:
        """Return the id of the process that writes this heartbeat; None for a process of another host."""
        try:
            host, process = path.read_text().split()
        except (OSError, ValueError):  # the rank may start or end at this moment
            return None
        return int(process) if host == os.uname().nodename else None


class _Stopper:
    """Handles signals: the first one asks the ranks to finish their step and save, the second one ends the ranks.

    The request is a file that the ranks look for after each step. A signal sent to torchrun would leave the ranks only
    30 seconds, and would kill ranks that are still starting.
    """

    def __init__(self, output: Path) -> None:
        self._request = output / "stop"
        self.times_asked = 0
        self._signal = signal.SIGTERM

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a run that a second signal ended."""
        return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.TERMINATED

    def _on_signal(self, number: int, _: object) -> None:
        self.times_asked += 1
        self._signal = signal.Signals(number)
        if self.times_asked == 1:
            if (self._request.parent / "plan.json").exists():  # else host 0 has not claimed the folder yet
                self._request.touch()
            say("stopping after this step; a second signal ends the run at once")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals inside the block."""
        before = {each: signal.signal(each, self._on_signal) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _stamp(output: Path) -> int:
    """Return the time of the last change of status.json, in nanoseconds; 0 if there is no such file."""
    try:
        return (output / "status.json").stat().st_mtime_ns
    except OSError:
        return 0


def _verdict(output: Path, before: int) -> dict[str, Any]:
    """Read the outcome that the ranks wrote; the state is empty while the file is from an earlier run."""
    silence = {"state": "", "step": 0}
    if _stamp(output) == before:
        return silence
    try:
        verdict: dict[str, Any] = json.loads((output / "status.json").read_text())
    except (OSError, ValueError):
        return silence
    return verdict


def _exit_code(verdict: dict[str, Any]) -> int:
    codes = {"done": ExitCode.OK, "saved": ExitCode.PREEMPTED, "diverged": ExitCode.DIVERGED}
    if verdict["state"] == "diverged":
        say(f"training diverged: {verdict['reason']}")
    return int(codes.get(verdict["state"], verdict.get("exit_code", ExitCode.RANK_FAILED)))


def _saved_words(output: Path) -> str:
    """Say which step is saved, and how the run goes on."""
    newest = _newest_checkpoint(output)
    if newest is None:
        return "nothing is saved; the same command begins at step 1"
    folder = printable(str(output / "checkpoints"))
    return f"step {newest} is saved in {folder}; the same command, with --resume auto (the default), goes on from there"


def _newest_checkpoint(output: Path) -> int | None:
    steps = (path.name.removeprefix("step-") for path in (output / "checkpoints").glob("step-*"))
    return max((int(step) for step in steps if step.isdigit()), default=None)
