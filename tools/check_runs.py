"""Plant slow-downs in runs of the trainer, and count how often `planner check --baseline` finds them.

`python tools/check_runs.py FOLDER [COUNT]` trains a small model COUNT times (100) for 20 steps each on this machine's
CPU. In every second run each step time is made 15 % longer, and every run is checked with the last run that was left as
it is. On a machine that does other work, the times scatter more, so that fewer slow-downs are found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SLOWER = 1.15
JOB = ("tiny-gpt", "local-cpu", "--gpus", "1", "--seq-len", "128", "--global-batch", "8", "--engine", "torch")


def planner(*arguments: object) -> int:
    """The exit code of a command."""
    command = [sys.executable, "-m", "planner", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


def trained(folder: Path, plan: Path, data: Path, number: int) -> Path:
    """The folder of a run of 20 steps."""
    run = folder / f"run-{number:03d}"
    if not (run / "metrics.jsonl").exists():
        assert planner("launch", plan, "--data", data, "--steps", 20, "--output", run) == 0
    return run


def plant(run: Path) -> None:
    """Make every step of a run longer."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    longer = [{**line, "step_seconds": line["step_seconds"] * SLOWER} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in longer), encoding="utf-8")


def main(folder: Path, count: int) -> None:
    """Train, plant, check and count."""
    folder.mkdir(parents=True)
    plan, data = folder / "plan.json", folder / "data.txt"
    data.write_text("the quick brown fox jumps over the lazy dog\n" * 20_000, encoding="utf-8")
    assert planner("plan", *JOB, "-o", plan) == 0
    baseline = trained(folder, plan, data, 0)
    found = alarms = 0
    for number in range(1, count + 1):
        run, is_planted = trained(folder, plan, data, number), number % 2 == 1
        if is_planted:
            plant(run)
        code = planner("check", run, "--plan", plan, "--baseline", baseline)
        assert code in (0, 7), code
        found += is_planted and code == 7
        alarms += not is_planted and code == 7
        baseline = baseline if is_planted else run
    print(f"{found} of {(count + 1) // 2} planted slow-downs found; {alarms} of {count // 2} others called slower")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
