"""Break the proof of the search in stated ways and see whether `--check` notices (`make mutate-proof`): a report.

Each change of mutants-proof.yaml is made in a copy of the tree. There the five JOBS are planned with `--check`, each in
its turn, until one shows the change. The unchanged tree then prices the plan. A change is

    noticed   if the planner complained (an error, or the two methods disagree),
    harmless  if all plans are as good as before,
    silent    if a plan is worse or its forecast is wrong, and nothing was said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

TOOLS: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

from mutate import copied  # noqa: E402 - scripts beside this one
from mutate_pytest import swapped  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

CHANGES: Final = TOOLS / "mutants-proof.yaml"
MOST_SECONDS: Final = 900  # of one job

JOBS: Final[dict[str, dict[str, Any]]] = {
    "pipeline": {
        "model": "megatron-22b",
        "cluster": "dgx-a100",
        "nodes": 1,
        "seq_len": 2048,
        "global_batch": 16,
        "engine": "megatron",
        "pin": "tp<=2",
    },
    "ends": {
        "model": "deepseek-v2-lite",
        "cluster": "hgx-h800",
        "gpus": 8,
        "seq_len": 4096,
        "global_batch": 32,
        "engine": "megatron",
        "pin": "pp>=2",
        "settings": "model.mtp_layers=1",
    },
    "pools": {
        "model": "llama3-8b",
        "cluster": "mixed-a100-h100",
        "nodes": {"a100": 1, "h100": 1},
        "seq_len": 4096,
        "global_batch": 64,
    },
    "deadline": {
        "model": "qwen3-30b-a3b",
        "cluster": "dgx-h100",
        "gpus": 8,
        "seq_len": 4096,
        "global_batch": 64,
        "engine": "megatron",
        "objective": "cost",
        "settings": ("training.tokens=1e10", "training.deadline=3d"),
    },
    "one stage": {
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "nodes": 1,
        "seq_len": 8192,
        "global_batch": 32,
        "engine": "torch",
        "pin": "pp=1",
    },
}
"""The keywords of `planner.api.plan_job` for each job."""


def changes() -> list[tuple[str, str, str]]:
    """Each change: a file of the repository, a text that it has once, and the text that replaces it.

    Raises:
        ValueError: a file does not have a text exactly once.
    """
    found = []
    for each in yaml.safe_load(CHANGES.read_text(encoding="utf-8")):
        path = f"planner/{each['file']}"
        text = (TOOLS.parent / path).read_text(encoding="utf-8")
        for before, after in each["changes"]:
            if text.count(before) != 1:
                raise ValueError(f"{path} has {text.count(before)} times: {before!r}")
            found.append((path, before, after))
    return found


def plan(name: str) -> dict[str, Any]:
    """The plan and the minimum of a job, each as a layout with its step seconds."""
    from planner.api import plan_job
    from planner.layout import format_layout

    found = plan_job(**JOBS[name], check=True, top=0)
    least = found.minimum.layout if found.minimum and found.minimum.layout else found.layout
    return {
        "plan": format_layout(found.layout),
        "seconds": found.step_seconds,
        "minimum": format_layout(least),
    }


def planned(root: Path, name: str) -> dict[str, Any] | None:
    """`plan` of a job in another tree; None if the planner complained or did not end."""
    command = [sys.executable, str(TOOLS / "mutate_proof.py"), "--job", name]
    environment = os.environ | {"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return json.loads(ran.stdout) if ran.returncode == 0 else None


def price(name: str, layout: str) -> float:
    """Step seconds of a layout of a job, by the ledger of this tree."""
    from planner.api import estimate_layout

    asked = {key: value for key, value in JOBS[name].items() if key not in ("pin", "objective")}
    return estimate_layout(**asked, layout=layout).step_seconds


def verdict(name: str, right: dict[str, Any], said: dict[str, Any]) -> str:
    """What is wrong with a plan of the changed tree; empty if it is as good as the right one."""
    if said == right:
        return ""
    wrong = [f"{key} {said[key]} instead of {right[key]}" for key in right if said[key] != right[key]]
    worse = price(name, said["minimum"]) / price(name, right["minimum"]) - 1
    return f"{name}: {'; '.join(wrong)} (its minimum is {worse:+.2%})"


def outcomes(root: Path) -> Iterator[tuple[tuple[str, str, str], str, str]]:
    """Every change with its outcome and where it showed."""
    copy, stamp = copied(root), int(time.time())
    right = {name: planned(copy, name) for name in JOBS}
    for name, each in right.items():
        if each is None:
            sys.exit(f"without a change the job {name!r} has no plan: python tools/mutate_proof.py --job {name!r}")
        print(f"{name}: {each['plan']}", flush=True)
    for number, (path, before, after) in enumerate(changes()):
        text = (copy / path).read_text(encoding="utf-8")
        outcome, where = "harmless", ""
        with swapped(copy / path, text.replace(before, after), stamp + 2 * number):
            for name, known in right.items():
                said = planned(copy, name)
                if said is None:
                    outcome, where = "noticed", name
                    break
                if wrong := verdict(name, known or {}, said):
                    outcome, where = "silent", wrong  # unless another job notices
        yield (path, before, after), outcome, where


def main() -> None:
    """Run one job, or every change, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, help="print the plan of one job as JSON")
    asked = parser.parse_args()
    if asked.job:
        print(json.dumps(plan(asked.job)))
        return
    os.nice(5)
    counts: Counter[str] = Counter()
    for (path, before, after), outcome, where in outcomes(TOOLS.parent):
        counts[outcome] += 1
        print(f"{outcome.upper()} {path}\n    - {before.strip()}\n    + {after.strip()}\n    {where}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
