"""Faults of a solver, and proof that nothing of it remains. The solvers here are small shell scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from planner.cost.stage import Pattern
from planner.errors import EnvironmentProblem, SolverTrouble
from planner.search import decision
from planner.search.best_first import best_first
from planner.search.decision import decide
from planner.search.found import Found
from planner.search.objectives import THROUGHPUT, BestKinds
from planner.search.optimum import certificate, integer_program, solver_process
from planner.search.optimum.candidate import Candidate, Choice, Disagreement
from planner.search.optimum.certificate import solve
from planner.search.optimum.dynamic_program import best_choice
from planner.search.optimum.integer_program import JointProgram, solve_program
from planner.search.optimum.pruning import lower_bounds
from planner.search.reporter import Reporter
from planner.search.space.space import Space
from planner.specs.load import load_job

pytestmark = pytest.mark.skipif(os.name != "posix", reason="shell scripts and process groups")


def two_stages() -> Candidate:
    """Six layers on two stages, of which the second is half as fast; the optimum is 4 + 2 layers.

    Two policies have equal prices, so that no bound leaves one choice, for which no solver would be started.
    """
    layers = np.tile(np.repeat(np.arange(1, 6), 2), 2)
    stage = np.repeat([0, 1], 10)
    return Candidate(
        name="two stages",
        num_layers=6,
        num_stages=2,
        steady_count=3.0,
        constant_seconds=0.5,
        stage=stage,
        pattern=Pattern(),
        total_load=6,
        start=0 * layers,
        layers=layers,
        last=layers,
        load=layers,
        policy=np.tile([0, 1], 10),
        seconds=layers * np.array([1.0, 2.0])[stage],
        pass_seconds=layers * np.array([1.0, 2.0])[stage],
        slack_seconds=np.zeros(20),
        tail_seconds=layers * np.float64(0.25),
    )


OPTIMUM_SECONDS = 0.5 + 3 * 4 + (4 + 4) + 4 * 0.25


@pytest.fixture
def fake_cbc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Replace CBC by a shell script; files of the solve go to a folder that the test can read."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))

    def install(script: str) -> Path:
        path = tmp_path / "cbc"
        path.write_text(f"#!/bin/sh\nfor solution; do :; done  # the last argument\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        monkeypatch.setattr(solver_process, "cbc_path", lambda: str(path))
        return scratch

    return install


def test_the_optimum_of_the_example() -> None:
    for solver in ("cbc", "highs"):
        assert solve([two_stages()], solver=solver).objective_seconds == pytest.approx(OPTIMUM_SECONDS)


def test_no_solver_starts_where_one_column_is_left_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimum of the example by hand, without a solver; with a second policy at its price there is a choice."""
    monkeypatch.setattr(integer_program, "run_solver", lambda *_: pytest.fail("a solver was started"))
    candidate = two_stages()
    one = candidate.keep(candidate.policy == 0)
    answer = solve_program([one], upper_bound=OPTIMUM_SECONDS)
    assert answer.choice is not None
    assert one.layers[list(answer.choice.columns)].tolist() == [4, 2]
    assert (answer.status, answer.num_columns) == ("optimal", 2)
    assert answer.choice.objective_seconds == answer.bound_seconds == pytest.approx(OPTIMUM_SECONDS)
    for more in ({"upper_bound": OPTIMUM_SECONDS, "bounded": False}, {}):
        with pytest.raises(pytest.fail.Exception):
            solve_program([one], **more)
    with pytest.raises(pytest.fail.Exception):
        solve_program([candidate], upper_bound=OPTIMUM_SECONDS)


SOLUTION = 'cat > "$solution"'
BAD_SOLVERS = {
    "killed": ("kill -9 $$", "killed by signal 9"),
    "failed": ("echo no licence; exit 3", "exit code 3: no licence"),
    "silent": ("exit 0", "no readable answer"),
    "empty answer": (f"{SOLUTION} </dev/null", "no readable answer"),
    "garbage": (f"printf '\\001\\002 garbage' | {SOLUTION}", "no readable answer"),
    "broken row": (f"printf 'Optimal - objective value 1\\n 0 X0000000 one 0\\n' | {SOLUTION}", "no readable answer"),
    "no choice": (f"printf 'Optimal - objective value 1\\n 0 X0000000 0 0\\n' | {SOLUTION}", "chose"),
    "unbounded": (f"echo 'Unbounded - objective value 0' | {SOLUTION}", "found no answer"),
}


@pytest.mark.parametrize("name", BAD_SOLVERS)
def test_a_bad_solver_is_trouble(name: str, fake_cbc: Callable[[str], Path]) -> None:
    script, message = BAD_SOLVERS[name]
    scratch = fake_cbc(script)
    for method in (solve, solve_program):
        with pytest.raises(SolverTrouble, match=message):
            method([two_stages()])
    assert list(scratch.iterdir()) == []


def test_the_dynamic_program_decides_where_the_solver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is the one that the integer program confirms, or nothing fits; a better layout tried is noticed."""
    job = load_job(model="llama3-8b", cluster="dgx-h100", nodes=1, sequence_length=4096, global_batch_size=64)
    best = BestKinds(THROUGHPUT, 1)
    found = best_first(Space(job), best, Reporter())
    confirmed = decide(found, best, "cbc", None)

    def fails(*_: object, **__: object) -> None:
        raise SolverTrouble("no licence")

    monkeypatch.setattr(decision, "solve", fails)
    alone = decide(found, best, "cbc", None)
    assert (alone.rank, alone.gap) == (confirmed.rank, 0.0)
    assert (alone.solution.solver, alone.solution.status) == ("dynamic program", "optimal")
    assert alone.solution.is_complete
    assert alone.solution.warnings == ("cbc failed, so the dynamic program decided alone: no licence",)
    assert decide(Found(Space(job)), BestKinds(THROUGHPUT, 1), "cbc", None).solution.status == "infeasible"
    best.first = (0.5 * best.first[0], 0.5 * best.first[1])
    with pytest.raises(Disagreement, match="a layout was tried"):
        decide(found, best, "cbc", None)


def test_a_missing_solver_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_process, "cbc_path", lambda: "/nowhere/cbc")
    with pytest.raises(SolverTrouble, match="cbc could not be run"):
        solve_program([two_stages()])


def test_without_any_cbc_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_process.shutil, "which", lambda _name: None)
    monkeypatch.setattr(solver_process.Path, "exists", lambda _path: False)
    assert solver_process.default_solver() == "highs"
    with pytest.raises(EnvironmentProblem, match="CBC, the solver of the integer program, is not installed"):
        solve([two_stages()])
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert solver_process.default_solver() == "cbc"


def test_a_folder_that_cannot_be_written_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(SolverTrouble, match="could not be run"):
        solve([two_stages()])


def test_highs_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'parallel-planner\[highs\]'"):
        solve([two_stages()], solver="highs")


def rows(choice: Choice, candidate: Candidate) -> str:
    """Rows of a CBC solution file for a choice; the numbers of the variables are PuLP's."""
    program = JointProgram([candidate], lower_bounds([candidate]))
    names = [variable.name for variable in program.problem.variables()]
    ones = {"w_0", *(f"y_0_{column}" for column in choice.columns)}
    return "".join(f"{i} X{i:07d} {int(name in ones)} 0\\n" for i, name in enumerate(names))


def test_an_incumbent_at_the_time_limit_is_never_called_optimal(
    fake_cbc: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "incumbent", lambda *_: None)  # no upper bound: the program is whole
    candidate = two_stages()
    best = best_choice(candidate)
    assert best is not None
    log = "echo 'Result - Stopped on time limit'; echo 'Lower bound:                    12.5'"
    fake_cbc(f"{log}; printf 'Stopped on time - objective value 1\\n{rows(best, candidate)}' | {SOLUTION}")
    answer = solve_program([candidate])
    assert (answer.status, answer.choice) == ("time limit", best)  # the very optimum, but not proved by the solver
    assert answer.bound_seconds <= best.objective_seconds
    solution = solve([candidate])
    assert solution.status == "time limit"
    assert solution.objective_seconds == best.objective_seconds
    assert len(solution.warnings) == 1


def test_the_bound_of_the_log_is_the_gap(fake_cbc: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = two_stages()
    best = best_choice(candidate)
    assert best is not None
    unit = 10.0 / 1e4  # the slowest column takes 10 s
    bound = 0.97 * best.objective_seconds
    log = f"echo 'Lower bound:                    {bound / unit}'"
    monkeypatch.setattr(certificate, "incumbent", lambda *_: None)  # no upper bound: the program is whole
    fake_cbc(f"{log}; printf 'Stopped on time - objective value 1\\n{rows(best, candidate)}' | {SOLUTION}")
    assert solve([candidate]).gap == pytest.approx(0.03)


def test_a_time_limit_without_an_incumbent_gives_the_heuristic_choice(
    fake_cbc: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solver_process, "_GRACE_SECONDS", 1.0)
    stopped = f"echo Stopped on time; echo 'Stopped on time - no solution' | {SOLUTION}"
    stopped_early = f"sleep 0.2; echo 'Infeasible - objective value 0' | {SOLUTION}"  # as CBC 2.10 does
    for script in (stopped, stopped_early, "sleep 1000"):
        scratch = fake_cbc(script)
        solution = solve([two_stages()], time_limit=0.1)
        assert solution.status == "time limit"
        assert solution.choice is not None
        assert 0 <= solution.gap < 1
        assert list(scratch.iterdir()) == []


def test_a_feasible_program_that_is_called_infeasible_is_a_bug(fake_cbc: Callable[[str], Path]) -> None:
    """A wrong constraint would look the same, so nothing is blamed on the solver."""
    fake_cbc(f"echo 'Infeasible - objective value 0' | {SOLUTION}")
    with pytest.raises(Disagreement, match="a greedy assignment takes"):
        solve([two_stages()])


def test_a_real_time_limit_is_passed_on() -> None:
    for solver in ("cbc", "highs"):
        solution = solve([two_stages()], solver=solver, time_limit=60.0)
        assert solution.status == "optimal"


PLANNING = """
import sys
from pathlib import Path
import importlib.util
spec = importlib.util.spec_from_file_location("example", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
example.solver_process.cbc_path = lambda: sys.argv[2]
example.solve([example.two_stages()])
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_planner_ends_the_solver_and_removes_its_files(number: signal.Signals, tmp_path: Path) -> None:
    scratch, pid_file, script = tmp_path / "scratch", tmp_path / "pid", tmp_path / "cbc"
    scratch.mkdir()
    script.write_text(f"#!/bin/sh\necho $$ > {pid_file}.new; mv {pid_file}.new {pid_file}\nexec sleep 1000\n")
    script.chmod(0o755)
    planner = subprocess.Popen(
        [sys.executable, "-c", PLANNING, __file__, str(script)],
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(pid_file.exists)
        solver = int(pid_file.read_text(encoding="utf-8"))
        assert is_running(solver)
        assert os.getpgid(solver) == solver  # a group of its own
        planner.send_signal(number)
        code = planner.wait(60)
    finally:
        planner.kill()
        planner.wait()
    assert code == {signal.SIGTERM: 143}.get(number, -number)
    wait_until(lambda: not is_running(solver))
    assert (list(scratch.iterdir()) == []) == (number != signal.SIGKILL)


AT_FORK = """
import os
import signal
import sys
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), int(sys.argv[3])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_signal_while_the_solver_starts_is_not_lost(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Python ignores exceptions that a handler raises at that moment."""
    script = tmp_path / "cbc"
    script.write_text("#!/bin/sh\nexec sleep 5\n")
    script.chmod(0o755)
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", AT_FORK + PLANNING, __file__, str(script), str(int(number))],
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")}, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert list((tmp_path / "scratch").iterdir()) == []
