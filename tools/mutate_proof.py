"""Break the proof of the search in stated ways and see whether `--check` notices: a report, never a gate.

Each change of mutants-proof.yaml is made in a copy of the tree, which then plans the five JOBS. A change is

    noticed   if the planner complained (an error, or the two methods disagree),
    harmless  if every job has the same plan, minimum and forecast as before,
    caught    if one of them differs, and `--check` complained,
    silent    if one of them differs, and nothing was said even with `--check`.
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
    from collections.abc import Iterable, Iterator

CHANGES: Final = TOOLS / "mutants-proof.yaml"
MOST_SECONDS: Final = 900  # of one run

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


def plan(name: str, *, check: bool) -> dict[str, Any]:
    """The plan, its step seconds and the minimum of a job."""
    from planner.api import plan_job
    from planner.layout import format_layout

    found = plan_job(**JOBS[name], check=check, top=0)
    least = found.minimum.layout if found.minimum and found.minimum.layout else found.layout
    return {"plan": format_layout(found.layout), "seconds": found.step_seconds, "minimum": format_layout(least)}


def planned(root: Path, names: Iterable[str], *, check: bool = False) -> list[dict[str, Any]] | None:
    """`plan` of jobs in another tree; None if the planner complained or did not end."""
    command = [sys.executable, str(TOOLS / "mutate_proof.py"), *(["--check"] if check else []), "--job", *names]
    environment = os.environ | {"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return [json.loads(line) for line in ran.stdout.splitlines()] if ran.returncode == 0 else None


def verdict(copy: Path, right: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """The outcome of the change that a copy has, and what differs."""
    found = planned(copy, right)
    if found is None:
        return "noticed", ""
    said = dict(zip(right, found, strict=True))
    differs = [name for name in right if said[name] != right[name]]
    for name in differs:
        if planned(copy, [name], check=True) is None:
            return "caught", f"{name}: {said[name]}"
    return ("silent", f"{differs[0]}: {said[differs[0]]}") if differs else ("harmless", "")


def outcomes(root: Path, only: str) -> Iterator[tuple[tuple[str, str, str], str, str]]:
    """Every change of the files whose path has a text, with its outcome and the plan that shows it."""
    copy, stamp = copied(root), int(time.time())
    found = planned(copy, JOBS)
    if found is None:
        sys.exit(f"a job has no plan without a change: python tools/mutate_proof.py --job {' '.join(map(repr, JOBS))}")
    right = dict(zip(JOBS, found, strict=True))
    for name, each in right.items():
        print(f"{name}: {each}", flush=True)
    for number, (path, before, after) in enumerate(each for each in changes() if only in each[0]):
        text = (copy / path).read_text(encoding="utf-8")
        with swapped(copy / path, text.replace(before, after), stamp + 2 * number):
            yield (path, before, after), *verdict(copy, right)


def main() -> None:
    """Plan some jobs, or make every change, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, nargs="+", help="print the plans of these jobs as JSON")
    parser.add_argument("--check", action="store_true", help="plan them with --check")
    parser.add_argument("--only", default="", metavar="TEXT", help="changes of the files whose path has this text")
    asked = parser.parse_args()
    if asked.job:
        for name in asked.job:
            print(json.dumps(plan(name, check=asked.check)), flush=True)
        return
    os.nice(5)
    counts: Counter[str] = Counter()
    for (path, before, after), outcome, where in outcomes(TOOLS.parent, asked.only):
        counts[outcome] += 1
        print(f"{outcome.upper()} {path}\n    - {before.strip()}\n    + {after.strip()}\n    {where}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
