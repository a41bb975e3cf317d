"""Remove rows of emit's tables, one at a time, and report the rows that no test notices: python tools/drawn_rows.py.

The rows are drawn by a seed from all settings and refusals of all programs. Each row is removed in a process of its
own, which runs the quick tests of emit until one fails (`removed_row.py` is the plugin that removes it).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.emit.programs import PROGRAMS

ROOT: Final = Path(__file__).resolve().parent.parent
if TYPE_CHECKING:
    from planner.emit.target import Refusal, Setting

FIRST: Final = ("tests/emit/test_rows.py", "tests/emit/test_emit.py::test_a_table_says_or_refuses_every_field")
"""Tests of every row, which run before all others of emit."""


def rows() -> list[tuple[str, str, int]]:
    """Every row: program, `settings` or `refuse`, and place."""
    return [
        (name, part, place)
        for name, target in PROGRAMS.items()
        for part in ("settings", "refuse")
        for place in range(len(getattr(target, part)))
    ]


def told(name: str, part: str, place: int) -> str:
    """A name for a row."""
    row: Setting | Refusal = getattr(PROGRAMS[name], part)[place]
    return f"{name} {part}[{place}] {', '.join(row.says[:3]) or 'no field of its own'}"


def noticed_by(name: str, part: str, place: int) -> str:
    """The test that fails without the row; empty if none does."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "not slow", "-p", "removed_row"]
    path = os.pathsep.join((str(ROOT / "tools"), str(ROOT)))
    environment = {**os.environ, "REMOVED_ROW": f"{name}:{part}:{place}", "PYTHONPATH": path}
    for tests in (FIRST, ("tests/emit",)):
        run = subprocess.run([*words, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if run.returncode == 1:
            failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return failed[0].partition(" - ")[0] if failed else "a test"
        if run.returncode:
            return f"the tests do not start: {(run.stdout + run.stderr).strip().splitlines()[-1][:100]}"
    return ""


def main() -> int:
    """Draw, remove and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args()
    drawn = random.Random(given.seed).sample(rows(), given.count)  # noqa: S311 - no secret
    unnoticed = 0
    for row in drawn:
        found = noticed_by(*row)
        unnoticed += not found
        print(f"{told(*row)}: {found or 'NOT NOTICED'}", flush=True)
    print(f"{given.count - unnoticed} of {given.count} rows of {len(rows())} noticed (seed {given.seed})")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
