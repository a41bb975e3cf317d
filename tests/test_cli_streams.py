"""The command line as a process: pipes, terminals, closed streams, full disks and signals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from planner.cli import main
from planner.errors import ExitCode

PLAN = ["tiny-gpt", "dgx-a100", "--gpus", "2", "--global-batch", "8"]


def run_process(
    *argv: str, stdin: str = "", env: dict[str, str] | None = None, shell: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command as users start it; `shell` redirects or pipes "$@"."""
    command = [sys.executable, "-m", "planner", *argv]
    if shell:
        command = ["bash", "-o", "pipefail", "-c", f'"$@" {shell}', "bash", *command]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False
    )


def test_a_plan_comes_from_standard_input(plan_file) -> None:
    done = run_process("explain", "-", "--json", stdin=plan_file.read_text())
    assert done.returncode == 0
    assert json.loads(done.stdout).items() >= json.loads(plan_file.read_text()).items()


def test_a_reader_that_has_seen_enough_is_no_error(plan_file) -> None:
    done = run_process("explain", str(plan_file), "--json", shell="| head -1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


@pytest.mark.parametrize("argv", [["--help"], ["explain", "PLAN"], ["explain", "PLAN", "--json"], ["nonsense"]])
def test_a_reader_that_has_gone_before_the_first_line_is_no_error(argv: list[str], plan_file) -> None:
    argv = [str(plan_file) if part == "PLAN" else part for part in argv]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-m", "planner", *argv], stdout=writing, stderr=writing, check=False)
    finally:
        os.close(writing)
    assert done.returncode in (0, ExitCode.BAD_INPUT)


@pytest.mark.parametrize("shell", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error_and_no_file_takes_their_place(shell: str, plan_file) -> None:
    before = plan_file.read_text()
    done = run_process("explain", str(plan_file), shell=shell)
    assert done.returncode == 0
    assert done.stderr == ""
    assert plan_file.read_text() == before


@pytest.mark.parametrize("argv", [["--help"], ["explain", "PLAN"], ["launch", "PLAN", "--dry-run"]])
def test_a_full_disk_behind_standard_output_ends_with_5(argv: list[str], plan_file) -> None:
    argv = [str(plan_file) if part == "PLAN" else part for part in argv]
    done = run_process(*argv, shell="> /dev/full")
    assert done.returncode == ExitCode.ENVIRONMENT
    *notes, error = done.stderr.splitlines()
    assert error == "error: cannot write the output: No space left on device"
    assert all(each.startswith("note: ") for each in notes)


def test_a_full_disk_behind_both_streams_ends_with_5(plan_file) -> None:
    assert run_process("explain", str(plan_file), shell="> /dev/full 2>&1").returncode == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(  # tests/show has the whole grid; here is what only a process shows
    ("columns", "env"),
    [(20, {"LC_ALL": "C", "PYTHONUTF8": "0"}), (40, {"LC_ALL": "C"}), (80, {"TERM": "dumb"}), (200, {"NO_COLOR": "1"})],
)
def test_output_in_a_pipe(columns: int, env: dict[str, str], plan_file) -> None:
    done = run_process("explain", str(plan_file), env={"COLUMNS": str(columns), **env})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert all(len(line) <= min(columns, 120) for line in done.stdout.splitlines())
    if env.keys() & {"LC_ALL", "TERM"}:
        assert done.stdout.isascii()


def test_what_a_terminal_cannot_say_is_written_out(plan_file, stamped) -> None:
    document = json.loads(plan_file.read_text())
    document["memory"][0]["lines"][0]["formula"] = "2 \u00d7 params"
    plan_file.write_text(stamped(document))
    done = run_process(
        "explain", str(plan_file), "formulas", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 \\xd7 params" in done.stdout


def read_terminal(argv: list[str], env: dict[str, str]) -> str:
    """The output of a command on a real terminal."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "planner", *argv], stdout=slave, stderr=slave, env={**os.environ, **env}
    ) as process:
        os.close(slave)
        found = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # Linux: the last writer has gone
                break
            if not part:
                break
            found += part
    os.close(master)
    assert process.returncode == 0
    return found.decode()


@pytest.mark.parametrize(
    ("env", "color"), [({"TERM": "xterm-256color"}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_output_on_a_terminal(env: dict[str, str], color: bool, plan_file) -> None:
    text = read_terminal(["explain", str(plan_file), "memory"], {"COLUMNS": "80", "TERM": "xterm", **env})
    assert ("\x1b[" in text) is color
    assert "Memory of a device" in text


def test_a_bug_keeps_its_traceback_and_ends_with_1() -> None:
    code = "from planner import api, cli\ndef f(*_, **__): return 1/0\napi.plan_job = f\ncli.run()"
    done = subprocess.run([sys.executable, "-c", code, "plan", *PLAN], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.BUG
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_quietly_and_runs_what_must_be_undone(number: int, code: int) -> None:
    program = """if True:
        import sys, time
        from planner import api, cli
        def wait(*_, **__):
            try:
                print("ready", file=sys.stderr, flush=True)
                time.sleep(60)
            finally:
                print("undone", file=sys.stderr, flush=True)
        api.plan_job = wait
        cli.run()"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, "plan", *PLAN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.strip() == "undone"
    assert out == ""


@pytest.mark.slow
def test_plan_launch_and_compare_on_this_machine(tmp_path, monkeypatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    plan = ["plan", "tiny-gpt", "local-cpu", "--gpus", "2", "--global-batch", "8", "--seq-len", "64"]
    assert run_process(*plan, "-o", "p.json").returncode == 0
    done = run_process("launch", "p.json", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Time, predicted against measured")
    assert "optimizer state" in done.stdout
    assert (tmp_path / "runs" / "p" / "metrics.jsonl").read_text().count("\n") == 3


# --- what runs out ------------------------------------------------------------------------------------------------


def limited(limit: str, *argv: str, cwd) -> subprocess.CompletedProcess[str]:
    """Run the command under a limit of `ulimit`; OpenBLAS would reserve memory for each core."""
    command = ["bash", "-c", f'ulimit {limit}; "$@"', "bash", sys.executable, "-m", "planner", *argv]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_a_full_disk_leaves_no_folder_behind(plan_file, tmp_path) -> None:
    """A limit on the size of files replaces the full disk."""
    for output in ("new", "new/and/deep"):
        done = limited("-f 8", "emit", str(plan_file), "-o", output, cwd=tmp_path)
        assert (done.returncode, "cannot write" in done.stderr) == (ExitCode.ENVIRONMENT, True)
        assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("mine")
    limited("-f 8", "emit", str(plan_file), "-o", "new", cwd=tmp_path)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.txt"]


def test_too_little_memory_is_told_without_a_traceback(monkeypatch, capsys) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("planner.api.plan_job", exhausted)
    assert main(["plan", *PLAN]) == ExitCode.ENVIRONMENT
    said = capsys.readouterr().err
    assert "too little free memory" in said
    assert "Traceback" not in said
