"""Attacks that the planner must withstand, row by row (`make battery`); a later run continues after the last case.

Each row has an id, a goal and numbered cases. Case N is drawn from the seed N, so anybody can repeat it. The table of
docs/reliability.md says how many cases of a row have run, on any machine; the next run starts after these cases.

`make battery ROWS=B1,B5 COUNT=2000` runs this number of further cases of these rows; without COUNT, it runs all cases
up to the goal.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
MARKS = ("<!-- battery -->", "<!-- battery: end -->")
SECONDS_BETWEEN_WRITES = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table.

    cases: "module:function" in tools/. The function gets a range of case numbers, and yields the fault of each case in
    words, or an empty text.
    """

    id: str
    what: str
    goal: int
    cases: str


ROWS = (
    Row(id="A1", what="SIGKILL of a random rank at a random step, with tp2 x pp2, dp2 x cp2 and ZeRO-3 on two hosts: "
        "losses, gradient norms and weights are equal bit by bit to those of a run without kills", goal=200,
        cases="battery_kills:random_kills"),
    Row(id="A3", what="Time from a kill to the next step: at most 15 s on an idle machine", goal=20,
        cases="battery_kills:recoveries"),
    Row(id="A5", what="SIGKILL at each point of a save: before a shard, the hashes, the state, the manifest, the name",
        goal=50, cases="battery_kills:kills_in_saves"),
    Row(id="A7", what="A damaged checkpoint: one bit flipped, truncated, emptied, a file missing, a bad manifest or "
        "bad metadata", goal=140, cases="battery_kills:damaged_checkpoints"),
    Row(id="A9", what="The disk is full in the middle of a save", goal=10, cases="battery_kills:full_disks"),
    Row(id="A11", what="SIGSTOP of a rank: the rank is ended and started again, and the bits are equal", goal=20,
        cases="battery_kills:stopped_ranks"),
    Row(id="A12", what="SIGTERM at a random moment: the run saves, exits with code 75 and continues later, and the "
        "bits are equal", goal=20, cases="battery_kills:terminations"),
    Row(id="A14", what="SIGKILL of the launcher: no rank is left after 10 s", goal=20,
        cases="battery_kills:killed_launchers"),
    Row(id="A17", what="Port 29500 is taken: the run starts and ends", goal=20, cases="battery_kills:taken_ports"),
    Row(id="A18", what="A second launcher in a folder that is in use: refused with exit code 5", goal=10,
        cases="battery_kills:second_launchers"),
    Row(id="A19", what="An hour's soak with a kill each minute on average, beside a run without kills: memory (to 5 "
        "%) and open files of all processes stay constant, and losses are equal bit by bit", goal=1,
        cases="battery_soak:soaks"),
    Row(id="A20", what="A slow or dead link between two hosts whose packets go through a program. A slow link only "
        "slows the run. A dead link is noticed within 330 s; then the run continues with equal bits, or ends with "
        "exit code 6 (5 without host 0)", goal=20, cases="battery_links:links"),
    Row(id="B1", what="Fuzzed inputs for every reader: no traceback, at most 2 s of processor time, at most 1 GiB",
        goal=1_000_000, cases="battery_fuzz:inputs"),
    Row(id="B7", what="Random jobs through the command line: exit code 0, 2 or 3, no traceback", goal=500,
        cases="battery_jobs:random_jobs"),
    Row(id="B11", what="SIGINT and SIGTERM of `plan` at random moments: exit code 130 or 143, or done; nothing is "
        "left behind", goal=100, cases="battery_jobs:interrupts"),
    Row(id="B15", what="Hostile texts through terminal, JSON, YAML, HTML, SVG and shell: shown unchanged, or refused",
        goal=1_000, cases="battery_texts:texts"),
    Row(id="B16", what="Plans are equal in bytes for different PYTHONHASHSEED, and for the installed versions of "
        "Python and NumPy", goal=100, cases="battery_jobs:hash_seeds"),
    Row(id="C1", what="Code in a checkpoint: refused, never run", goal=10, cases="battery_kills:attacks"),
    Row(id="C2", what="A secret in the environment: appears in no output", goal=20, cases="battery_jobs:secrets"),
    Row(id="C4", what="Emitted scripts: `bash -n` and shellcheck find nothing", goal=50,
        cases="battery_jobs:scripts"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The cases of a row that have run, the faults among them, and the date and commit of the last one."""

    count: int = 0
    faults: int = 0
    date: str = ""
    commit: str = ""


def read_result(row: Row) -> Result:
    """The result of a row that the page states."""
    line = rf"^\| {row.id} \|.*\| ([0-9,]+) of [0-9,]+ \| ([0-9]+) \| ([0-9-]+), (\S*) \|"
    if not (found := re.search(line, PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)):
        return Result()
    count, faults, date, at = found.groups()
    return Result(count=int(count.replace(",", "")), faults=int(faults), date=date, commit=at)


def cases_of(row: Row, numbers: range) -> Iterator[str]:
    """The fault of each case in words; an empty text if there is no fault."""
    module, _, function = row.cases.partition(":")
    yield from getattr(import_module(module), function)(numbers)


def run_row(row: Row, count: int | None) -> None:
    """Run the remaining cases, or `count` further cases, and write their results to the page from time to time."""
    before = result = read_result(row)
    numbers = range(before.count, max(row.goal, before.count) if count is None else before.count + count)
    written = time.monotonic()
    try:
        for number, fault in zip(numbers, cases_of(row, numbers), strict=True):
            faults, today = result.faults + bool(fault), datetime.now(UTC).date().isoformat()
            result = Result(count=number + 1, faults=faults, date=today, commit=commit())
            if fault:
                print(f"{row.id} case {number}: {fault}", flush=True)
            if fault or time.monotonic() - written > SECONDS_BETWEEN_WRITES:
                written = time.monotonic()
                write_page({row.id: result})
                print(said(row, result), flush=True)
    finally:
        if result != before:
            write_page({row.id: result})
    print(said(row, result), flush=True)


def said(row: Row, result: Result) -> str:
    """A line on the progress of a row."""
    return f"{row.id} {result.count:,} of {row.goal:,}, {result.faults} faults"


_COMMIT: list[str] = []


def commit() -> str:
    """The commit's short name, with + if any file but a page has changed; an empty text outside a repository."""
    if not _COMMIT:
        git = ["git", "-C", str(ROOT)]
        name = subprocess.run([*git, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, check=False)
        unlike = subprocess.run(
            [*git, "diff", "--quiet", "HEAD", "--", ".", ":!docs"], capture_output=True, check=False
        )
        _COMMIT.append(name.stdout.strip() + "+" * (unlike.returncode == 1))
    return _COMMIT[0]


def line_of(row: Row, result: Result) -> str:
    """A row of the table."""
    if not result.count:
        return f"| {row.id} | {row.what} | not run of {row.goal:,} | - | - | - |"
    command = f"`make battery ROWS={row.id}`"
    reached = f"{result.count:,} of {row.goal:,}"
    return f"| {row.id} | {row.what} | {reached} | {result.faults} | {result.date}, {result.commit} | {command} |"


def write_page(new: Mapping[str, Result]) -> None:
    """Write the table to the page, with new results of some rows; other batteries may write other rows meanwhile."""
    with PAGE.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = ["| | What | Cases | Faults | Date, commit | Command |", "|---|---|---:|---:|---|---|"]
        lines += [line_of(row, new.get(row.id) or read_result(row)) for row in ROWS]
        head, _, rest = file.read().partition(MARKS[0])
        _, _, tail = rest.partition(MARKS[1])
        file.seek(0)
        file.write("\n".join([f"{head}{MARKS[0]}", *lines, f"{MARKS[1]}{tail}"]))
        file.truncate()


def main() -> None:
    """Run rows and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="ids with commas between; all by default")
    parser.add_argument("--count", type=int, help="further cases of each row; up to the goal by default")
    parser.add_argument("--page", action="store_true", help="write the page only")
    given = parser.parse_args()
    asked = [each.strip() for each in given.rows.split(",") if each.strip()]
    known = {row.id: row for row in ROWS}
    if unknown := [each for each in asked if each not in known]:
        sys.exit(f"no such row: {', '.join(unknown)}; there are {', '.join(known)}")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends running commands; finished cases are still written
    write_page({})
    for row in [] if given.page else [known[each] for each in asked or known]:
        run_row(row, given.count)


if __name__ == "__main__":
    main()
