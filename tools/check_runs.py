"""Plant slow-downs in runs of the trainer, and count how often `planner check --baseline` finds them.

`python tools/check_runs.py FOLDER [COUNT]` trains a small model on this machine's CPU, COUNT times (100) for 20
steps, and checks runs as they are and with each step 15 % longer: a run with the one before it as the baseline, and
several with several before them, wherever they begin. Runs that the folder has already are not trained again. What
else the machine does is in the times, so the load of its queue is printed too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

from planner.evidence.check import Reason, check_run, limit_of
from planner.evidence.inputs import read_runs
from planner.reading import read_plan

if TYPE_CHECKING:
    from planner.plan import Plan

SLOWER = 1.15
JOB = ("tiny-gpt", "local-cpu", "--gpus", "1", "--seq-len", "128", "--global-batch", "8", "--engine", "torch")
TOGETHER = ((1, 1), (5, 5), (10, 5), (10, 10), (20, 10), (20, 20))
"""Runs of the baseline, and runs that are checked with it."""


def planner(*arguments: object) -> int:
    """The exit code of a command."""
    command = [sys.executable, "-m", "planner", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


def trained(folder: Path, plan: Path, data: Path, number: int) -> Path:
    """The folder of a run of 20 steps."""
    run = folder / f"run-{number:03d}"
    if not (run / "metrics.jsonl").exists():
        assert planner("launch", plan, "--data", data, "--steps", 20, "--output", run) == 0
        print(f"run {number}, load {os.getloadavg()[0]:.1f}", flush=True)
    return run


def copied(runs: list[Path], folder: Path, factor: float = 1.0) -> Path:
    """A folder with copies of runs, each step of which is made longer."""
    for run in runs:
        (folder / run.name).mkdir(parents=True)
        shutil.copy(run / "plan.json", folder / run.name)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        longer = [{**line, "step_seconds": line["step_seconds"] * factor} for line in lines]
        text = "".join(json.dumps(line) + "\n" for line in longer)
        (folder / run.name / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def checked_files(plan: Plan, before: list[Path], after: list[Path], factor: float) -> bool:
    """Whether the check of copies of runs fails, each step of which is made longer."""
    with tempfile.TemporaryDirectory() as name:
        baseline, runs = copied(before, Path(name) / "before"), copied(after, Path(name) / "after", factor)
        return not check_run(runs, plan, baseline=baseline, fail_on=[Reason.SLOWER]).passed


def main(folder: Path, count: int) -> None:
    """Train, plant, check and count."""
    folder.mkdir(parents=True, exist_ok=True)
    plan, data = folder / "plan.json", folder / "data.txt"
    data.write_text("the quick brown fox jumps over the lazy dog\n" * 20_000, encoding="utf-8")
    assert plan.exists() or planner("plan", *JOB, "-o", plan) == 0
    runs = [trained(folder, plan, data, number) for number in range(count)]
    read = read_plan(plan)
    every = [read_runs(run, read)[0] for run in runs]
    for before, after in TOGETHER:
        starts = range(max(count - before - after + 1, 0))
        found = alarms = 0
        for start in starts:
            middle, end = start + before, start + before + after
            baseline, checked = every[start:middle], every[middle:end]
            limit, took = limit_of(baseline, checked), geometric_mean(each.seconds for each in checked)
            found, alarms = found + (took * SLOWER > limit), alarms + (took > limit)
            if start == 0:  # the command says the same of the files
                for factor in (1.0, SLOWER):
                    fails = checked_files(read, runs[:middle], runs[middle:end], factor)
                    assert fails == (took * factor > limit)
        words = f"{after} with {before} before: {found} of {len(starts)} planted slow-downs found"
        print(f"{words}; {alarms} of {len(starts)} others called slower", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
