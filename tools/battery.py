"""Tests of robustness with random cases, row by row (`make battery`): a report that continues where it stopped.

Each row has an id, a goal and numbered cases. The number of a case is its seed, so that anybody can repeat it.
build/battery/ROW.json stores the results, and docs/reliability.md gets a table of them. A row without stored results
keeps its line on the page, which an earlier run wrote, or says `not run`.

`make battery ROWS=B1,B5 COUNT=2000` runs 2,000 further cases of these rows; without COUNT, all cases up to the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "battery"
PAGE = ROOT / "docs" / "reliability.md"
MARKS = ("<!-- battery -->", "<!-- battery: end -->")
KEPT_FAULTS = 20
SECONDS_BETWEEN_WRITES = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table.

    cases: "module:function" of tools; the function takes a range of case numbers and yields each case's fault, or an
    empty text.
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


def read_state(row: Row) -> dict[str, Any]:
    """Results of a row: count, faults, the text of the first fault, seconds, date and commit."""
    path = STATE / f"{row.id}.json"
    if path.exists():
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return state
    return {"count": 0, "faults": 0, "words": [], "seconds": 0.0, "date": "", "commit": ""}


def write_state(row: Row, state: dict[str, Any]) -> None:
    """Store the results of a row; if the process is killed, the previous file stays."""
    STATE.mkdir(parents=True, exist_ok=True)
    draft = STATE / f".{row.id}.tmp"
    draft.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    draft.replace(STATE / f"{row.id}.json")


def cases_of(row: Row, numbers: range) -> Iterator[str]:
    """The fault of each case; an empty text if there is none."""
    module, _, function = row.cases.partition(":")
    yield from getattr(import_module(module), function)(numbers)


def run_row(row: Row, count: int | None) -> None:
    """Run the remaining cases, or `count` further ones, and store the results at intervals."""
    state = read_state(row)
    first = state["count"]
    last = max(row.goal, first) if count is None else first + count
    try:
        run_cases(row, state, range(first, last))
    finally:
        if state["count"] > first:
            write_state(row, state)
    print(f"{row.id} {state['count']:,} of {row.goal:,}, {state['faults']} faults", flush=True)


def run_cases(row: Row, state: dict[str, Any], numbers: range) -> None:
    """Run cases and add their results to the state, which is stored at intervals."""
    began = written = time.monotonic()
    before = state["seconds"]
    for number, fault in zip(numbers, cases_of(row, numbers), strict=True):
        state["count"] = number + 1
        if fault:
            state["faults"] += 1
            state["words"] = (state["words"] + [f"case {number}: {fault}"])[:KEPT_FAULTS]
            print(f"{row.id} case {number}: {fault}", flush=True)
        state |= {"seconds": round(before + time.monotonic() - began, 1)}
        state |= {"date": datetime.now(UTC).date().isoformat(), "commit": commit()}
        if fault or time.monotonic() - written > SECONDS_BETWEEN_WRITES:
            written = time.monotonic()
            write_state(row, state)
            print(f"{row.id} {state['count']:,} of {row.goal:,}, {state['faults']} faults", flush=True)


_COMMIT: list[str] = []


def commit() -> str:
    """The short name of the commit, with + if files differ from it; empty outside a repository."""
    if not _COMMIT:
        words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=9", "--dirty=+"]
        _COMMIT.append(subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip())
    return _COMMIT[0]


def line_of(row: Row, state: dict[str, Any]) -> str:
    """A row of the table."""
    if not state["count"]:
        return f"| {row.id} | {row.what} | not run of {row.goal:,} | - | - | - |"
    command = f"`make battery ROWS={row.id}`"
    reached = f"{state['count']:,} of {row.goal:,}"
    return f"| {row.id} | {row.what} | {reached} | {state['faults']} | {state['date']}, {state['commit']} | {command} |"


def table(page: str) -> str:
    """The table; a row without results on this machine keeps its line of the page."""
    kept = {name: line for line, name in re.findall(r"^(\| ([A-C][0-9]+) \|.*)$", page, flags=re.MULTILINE)}
    lines = ["| | What | Cases | Faults | Date, commit | Command |", "|---|---|---:|---:|---|---|"]
    for row in ROWS:
        state = read_state(row)
        lines.append(line_of(row, state) if state["count"] else kept.get(row.id, line_of(row, state)))
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Put the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(MARKS[0])
    _, _, tail = rest.partition(MARKS[1])
    PAGE.write_text(f"{head}{MARKS[0]}\n{table(page)}{MARKS[1]}{tail}", encoding="utf-8")


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
    try:
        for row in [] if given.page else [known[each] for each in asked or known]:
            run_row(row, given.count)
    finally:
        write_page()


if __name__ == "__main__":
    main()
