"""`planner launch` with a plan for another program starts the emitted file, or names what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import ExitCode

SMALL = ["tiny-llama", "dgx-h100", "--engine", "megatron", "--global-batch", "8", "--seq-len", "128", "--gpus", "8"]


@pytest.fixture
def megatron_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", *SMALL, "-o", str(path)]) == ExitCode.OK
    capsys.readouterr()
    return path


def program(folder, name, text):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def test_what_is_still_the_users_is_listed_before_anything_starts(megatron_plan, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MEGATRON_PATH", raising=False)
    assert main(["launch", str(megatron_plan), "--output", str(tmp_path / "run")]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    for name in ("MEGATRON_PATH", "DATA_PATH", "TOKENIZER_MODEL"):
        assert f"{name} is still yours" in told
    assert not (tmp_path / "run").exists()


def test_a_program_that_is_missing_is_named_with_what_installs_it(megatron_plan, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_PATH", "/m")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    code = main(["launch", str(megatron_plan), "--output", str(tmp_path / "run"), "--smoke"])
    assert code == ExitCode.ENVIRONMENT
    told = capsys.readouterr().err
    assert "torchrun is not installed" in told
    assert "git clone" in told


def test_the_program_starts_by_the_emitted_file(megatron_plan, tmp_path, monkeypatch):
    told = tmp_path / "told"
    program(tmp_path / "bin", "torchrun", f'printf "%s\\n" "$@" > {told}; exit 9')
    monkeypatch.setenv("MEGATRON_PATH", "/m")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    code = main(
        ["launch", str(megatron_plan), "--output", str(tmp_path / "run"), "--smoke", "--", "--log-interval", "1"]
    )
    assert code == 9
    words = told.read_text().splitlines()
    assert "--mock-data" in words
    assert words[-2:] == ["--log-interval", "1"]
    assert "/m/pretrain_gpt.py" in words


def test_a_dry_run_of_several_hosts_shows_a_line_for_each(tmp_path, capsys, monkeypatch):
    for name in ("PET_NODE_RANK", "SLURM_NODEID", "NODE_RANK", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    words = ["tiny-llama", "dgx-h100", "--engine", "megatron", "--seq-len", "128", "--nodes", "2", "--json"]
    assert main(["explain", *words, "--global-batch", "16", "--layout", "dp=16,mbs=1"]) == ExitCode.OK
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    folder = tmp_path / "run"
    assert main(["launch", str(path), "--output", str(folder), "--smoke", "--dry-run"]) == ExitCode.OK
    told = capsys.readouterr()
    *what, one, first, other, second = told.out.splitlines()
    assert "HOST an address of host 0" in what[0]
    assert (one, other) == ("# host 0:", "# host 1:")
    assert first.split() == ["bash", str(folder / "run.sh"), "0", "HOST", "PORT"]
    assert second.split() == ["bash", str(folder / "host-1" / "run.sh"), "1", "HOST", "PORT"]
    assert not folder.exists()


STUBBORN = """
trap '' INT TERM HUP
(trap '' INT TERM HUP; echo $BASHPID > {folder}/rank; while :; do sleep 0.1; done) &
echo $$ > {folder}/leader
while [[ ! -s {folder}/rank ]]; do sleep 0.05; done
touch {folder}/ready
{last}
"""


def is_running(process: int) -> bool:
    """Whether a process runs; a zombie that nobody waits for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("last", "signals", "patience"),
    [
        ("while :; do sleep 0.1; done", [signal.SIGTERM, signal.SIGTERM], 600),
        ("while :; do sleep 0.1; done", [signal.SIGINT], 0.5),
        ("trap 'exit 1' TERM; while :; do sleep 0.1; done", [signal.SIGTERM], 0.5),
        ("exit 3", [], 600),
    ],
    ids=["two-signals", "one-signal", "the-leader-ends", "no-signal"],
)
def test_a_stopped_program_leaves_no_rank(last, signals, patience, megatron_plan, tmp_path):
    """The program's ranks ignore the first signal; they end at the second, or when the time to end is over."""
    program(tmp_path / "bin", "torchrun", STUBBORN.format(folder=tmp_path, last=last))
    words = ["launch", str(megatron_plan), "--output", str(tmp_path / "run"), "--smoke"]
    start = f"import planner.cli, planner.launch.others as o; o.SECONDS_TO_END = {patience}; "
    environment = {**os.environ, "MEGATRON_PATH": "/m", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    run = subprocess.Popen(
        [sys.executable, "-c", f"{start}raise SystemExit(planner.cli.main({words}))"], env=environment
    )
    try:
        until(lambda: (tmp_path / "ready").exists() or run.poll() is not None)
        ranks = [int((tmp_path / name).read_text()) for name in ("leader", "rank")]
        for number in signals:
            run.send_signal(number)
            time.sleep(0.5)  # two signals at once may arrive as one
        code = run.wait(timeout=60)
    finally:
        run.kill()
    until(lambda: not any(map(is_running, ranks)))
    wanted = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGINT: ExitCode.INTERRUPTED}
    assert code == (wanted[signals[0]] if signals else 3)
