"""Run a solver as a child process that leaves nothing behind.

The solver reads the model from an MPS file in a private folder. The child leads its own process group. Whether the wait
ends with an answer, a time limit, Ctrl-C or SIGTERM, the group is killed and the folder is removed. If the planner
itself is killed with SIGKILL, Linux kills the child, but the folder remains.

PuLP's own `solve` is not used. When the planner is terminated, PuLP leaves the solver running and the solver's files in
the temporary folder. PuLP also reports "Optimal" for a run that reached its time limit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from planner.errors import EnvironmentProblem, ExitCode, SolverTrouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    import pulp

_GRACE_SECONDS = 10.0  # a solver that overstays its own time limit by this much is killed
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# The gap is zero. The integer tolerance stays at its default of 1e-7: with 1e-9 CBC took ten times as long for the
# same answers.
_CBC_OPTIONS = ("-ratio", "0", "-allow", "0", "-timeMode", "elapsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer of a solver; `bound` is its proved lower bound, in the units of the problem."""

    status: Literal["optimal", "time limit", "infeasible"]
    values: dict[str, float] | None  # by variable name; None: no solution found
    bound: float | None = None


def run_solver(problem: pulp.LpProblem, solver: Literal["cbc", "highs"], time_limit: float | None) -> Outcome:
    """Solve a PuLP problem with CBC or HiGHS, one thread, to a gap of zero.

    Raises:
        SolverTrouble: the solver is missing, was killed, or gave an answer that cannot be read.
        EnvironmentProblem: HiGHS is asked for and highspy is not installed.
    """
    try:
        with _terminated_by_exception(), TemporaryDirectory(prefix="planner-solver-") as folder:
            start = time.monotonic()
            outcome = _solved(problem, solver, Path(folder), time_limit)
    except OSError as error:
        raise SolverTrouble(f"{solver} could not be run: {error}") from error
    if time_limit is not None and time.monotonic() - start >= time_limit:
        # The proof of a solver that reached its time limit does not count: CBC 2.10 reports a program as infeasible if
        # it is stopped while simplifying the program.
        return replace(outcome, status="time limit")
    return outcome


def default_solver() -> Literal["cbc", "highs"]:
    """CBC, or HiGHS if only HiGHS is installed: PuLP 3 contains CBC, PuLP 4 has it as an extra."""
    return "highs" if _cbc() is None and importlib.util.find_spec("highspy") else "cbc"


def cbc_path() -> str:
    """The CBC that comes with PuLP, so that equal inputs use the same solver; if it is missing, the CBC on PATH.

    Raises:
        EnvironmentProblem: there is no CBC.
    """
    if found := _cbc():
        return found
    hint = "pip install 'parallel-planner[highs]' (small), or pip install 'pulp[cbc]' (large)"
    raise EnvironmentProblem("CBC, the solver of the integer program, is not installed", hint=hint)


def _cbc() -> str | None:
    at = importlib.util.find_spec("pulp")
    usual = Path(at.origin).with_name("solverdir") / "cbc/linux/i64/cbc" if at and at.origin else Path("/no/pulp")
    if (sys.platform, platform.machine()) == ("linux", "x86_64") and usual.exists():
        return str(usual)  # without an import of PuLP, which few small jobs need
    import pulp

    bundled = getattr(pulp, "PULP_CBC_CMD", None)  # PuLP 4 has no such class, and looks for the extra itself
    found = str(bundled.pulp_cbc_path if bundled else pulp.COIN_CMD(msg=False).path)
    return found if Path(found).exists() else shutil.which("cbc")


def _cbc_command(model: Path, solution: Path, time_limit: float | None) -> list[str]:
    limit = () if time_limit is None else ("-seconds", str(time_limit))
    return [cbc_path(), str(model), *limit, *_CBC_OPTIONS, "-solve", "-solution", str(solution)]


def _cbc_outcome(written: str, names: list[str], log: str) -> Outcome:
    """Read CBC's solution file: a line with the status, then a line for each column that is not zero.

    The file is read here, because PuLP 3 and 4 read it by different functions. Its first line distinguishes a proved
    optimum from an incumbent at the time limit. A later line has the column's number, name, value and reduced cost; a
    model's columns are PuLP's variables, in order.
    """
    status, _, rows = written.partition("\n")
    values = dict.fromkeys(names, 0.0)
    for row in rows.splitlines():
        number, _, value, *_ = row.removeprefix("**").split()
        values[names[int(number)]] = float(value)
    if status.startswith("Optimal"):
        return Outcome(status="optimal", values=values)
    if status.startswith(("Infeasible", "Integer infeasible")):
        return Outcome(status="infeasible", values=None)
    bound = re.search(r"^Lower bound:\s+(\S+)", log, re.MULTILINE)
    proved = float(bound[1]) if bound else None
    if re.match(r"Stopped on \w+ - objective", status):
        return Outcome(status="time limit", values=values, bound=proved)
    if "Stopped on time" in log:  # without a solution of whole numbers
        return Outcome(status="time limit", values=None, bound=proved)
    if status.startswith(("Stopped", "Unbounded")):
        raise SolverTrouble(f"cbc found no answer: {_last_line(log)}")
    raise ValueError(f"it begins with {status[:40]!r}")


def _highs_command(model: Path, solution: Path, time_limit: float | None) -> list[str]:
    if importlib.util.find_spec("highspy") is None:
        raise EnvironmentProblem("HiGHS is not installed", hint="pip install 'parallel-planner[highs]'")
    limit = "inf" if time_limit is None else str(time_limit)
    return [sys.executable, "-m", "planner.search.optimum.highs_process", str(model), str(solution), limit]


def _highs_outcome(written: str, names: list[str], log: str) -> Outcome:  # noqa: ARG001 - as of CBC
    answer = json.loads(written)
    status, columns, bound = answer["status"], answer["values"], float(answer["bound"])
    if status not in ("optimal", "time limit", "infeasible"):
        raise SolverTrouble(f"highs found no answer: {status}")
    values = dict(zip(names, map(float, columns), strict=True)) if columns else None
    return Outcome(status=status, values=values, bound=bound)


_SOLVERS = {"cbc": (_cbc_command, _cbc_outcome), "highs": (_highs_command, _highs_outcome)}


def _solved(problem: pulp.LpProblem, solver: str, folder: Path, time_limit: float | None) -> Outcome:
    """The answer that a solver writes for a model; a model's columns are PuLP's variables, in order."""
    command, outcome = _SOLVERS[solver]
    model, solution = folder / "model.mps", folder / "solution"
    problem.writeMPS(str(model), rename=True)
    log = _run(command(model, solution, time_limit), folder, time_limit)
    if log is None:
        return Outcome(status="time limit", values=None)
    try:
        return outcome(solution.read_text(encoding="utf-8"), [each.name for each in problem.variables()], log)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SolverTrouble(f"{solver} wrote no readable answer ({error}): {_last_line(log)}") from error


def _run(command: list[str], folder: Path, time_limit: float | None) -> str | None:
    """The solver's output; None where the solver exceeded its time limit and was killed."""
    log = folder / "log.txt"
    with log.open("wb") as output, _signals_held() as release:
        process = subprocess.Popen(  # noqa: S603 - our own argument list, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
            env=_environment(),
            preexec_fn=_die_with_parent(),  # noqa: PLW1509 - one system call, looked up before the fork
        )
        try:
            release()
            code = process.wait(None if time_limit is None else time_limit + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_group(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    if code != 0:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise SolverTrouble(f"{Path(command[0]).name} {how}: {_last_line(text)}")
    return text


def _environment() -> dict[str, str]:
    """The child's environment, with this package on PYTHONPATH, because the child starts in its own folder."""
    package = str(Path(__file__).resolve().parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of the child's group and reap the child."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux, a call that makes the kernel kill this process when its parent dies."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the clean-up for Ctrl-C also runs after SIGTERM.

    A SIGTERM handler of another program stays in place. Only the main thread may install a handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _signals_held() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C and SIGTERM wait until the yielded function is called, or until the end.

    Python ignores an exception that is raised in a hook of fork. An exception that is raised before the new process is
    known would leave the process behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    arrived: list[int] = []
    numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not None]
    before = {number: signal.signal(number, lambda arriving, _: arrived.append(arriving)) for number in numbers}

    def release() -> None:
        for number in list(before):
            signal.signal(number, before.pop(number))
        while arrived:
            signal.raise_signal(arrived.pop())

    try:
        yield release
    finally:
        release()


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(int(ExitCode.TERMINATED))


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
