"""Change the code at random and see whether a test notices (`make mutate`): a report, never a gate.

Mutants are drawn by a seed from the folders of AREAS. The tests that execute the changed statement run in a copy of the
tree, fastest first, until one fails. Which test executes which line is recorded once (`--record`, which takes about
twice the tests' time on one core) and kept in build/mutate; changed tests are recorded again by themselves.

A mutant that no test can notice, because the program means the same with it, stands with its reason in
mutants-equivalent.yaml and is set apart.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coverage
import yaml

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

from mutants import Mutant, draw  # noqa: E402 - a script beside this one

if TYPE_CHECKING:
    from collections.abc import Iterator

AREAS = ("cost", "search", "specs", "explain", "show", "emit")
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "site")
PYTEST = ("-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not slow and not gpu", "--ignore", "tests/trainer")
TEST_SECONDS = 60  # a test that takes longer with a mutant hangs
AT_FIRST = 25  # tests: most mutants meet one of few, and few files are quick to read
EQUIVALENT = "mutants-equivalent.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """killed, survived, timed out or equivalent; what did it or the reason; tests run, of those that could."""

    verdict: str
    by: str
    num_run: int = 0
    num_tests: int = 0


# --- the tree and what is known of it ----------------------------------------------------------------------------


def sources(root: Path, folder: str) -> dict[str, str]:
    """Python files below a folder by their path."""
    paths = sorted((root / folder).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def lines_before(before: str, after: str, lines: range) -> set[int]:
    """The lines of an earlier text that stand where these lines of a later one do."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    found: set[int] = set()
    for tag, first, last, first_after, last_after in matcher.get_opcodes():
        within = range(max(lines.start, first_after + 1), min(lines.stop, last_after + 1))
        if tag == "equal":
            found.update(line - first_after + first for line in within)
        elif within:
            found.update(range(first, last + 2))  # with a line on either side
    return found


def copied(root: Path) -> Path:
    """A copy of the tree in a new folder."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-")) / root.name
    shutil.copytree(root, folder, ignore=NOT_COPIED)
    return folder


def pytest_in(folder: Path, arguments: list[str], **asked: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy with the plugin beside this file."""
    environment = os.environ | asked | {"PYTHONPATH": f"{folder}{os.pathsep}{TOOLS}"}
    command = [sys.executable, "-m", "pytest", *PYTEST, "-p", "mutate_pytest", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


class Record:
    """Which test executes which line, and how long each test takes; as it was when it was recorded."""

    def __init__(self, root: Path) -> None:
        folder = root / "build" / "mutate"
        if not (folder / "sources.json").exists():
            sys.exit("nothing is recorded yet: python tools/mutate.py --record")
        self._then: dict[str, str] = json.loads((folder / "sources.json").read_text(encoding="utf-8"))
        self._now = sources(root, "planner") | sources(root, "tests")
        changed = [path for path, text in self._now.items() if self._then.get(path) != text]
        if code := [path for path in changed if path.startswith("planner/")]:
            print(f"changed since the record, so that lines are matched by their text: {', '.join(code)}")
        tests = [path if Path(path).name.startswith("test_") else str(Path(path).parent) for path in changed]
        if tests := [path for path in tests if path.startswith("tests/") and not path.startswith("tests/trainer")]:
            record(root, tests)
        self._tests: dict[str, Any] = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
        self._lines = coverage.CoverageData(str(folder / "coverage.sqlite"))
        self._lines.read()

    def tests_of(self, path: str, lines: range | None) -> list[str]:
        """Tests that execute one of the lines, or any function of the file: fast ones first, and few cases of each."""
        if path not in self._then:
            sys.exit(f"{path} is newer than the record: python tools/mutate.py --record")
        contexts = self._lines.contexts_by_lineno(path)
        then = lines_before(self._then[path], self._now[path], lines or range(0))
        wanted = set().union(*(contexts.get(line, ()) for line in then))
        if lines is None or wanted == {""}:  # it runs at import
            wanted = set().union(*contexts.values())
        wanted.discard("")
        found = [
            name
            for name, test in self._tests.items()
            if name in wanted or any(f"fixture {fixture}" in wanted for fixture in test["fixtures"])
        ]
        cases: Counter[str] = Counter()
        order = {}
        for name in sorted(found, key=lambda name: (self.seconds(name), name)):
            function = name.partition("[")[0]
            order[name] = (0.05 + self.seconds(name)) * (1 + cases[function])  # the n-th case says less than the first
            cases[function] += 1
        return sorted(order, key=lambda name: (order[name], name))

    def seconds(self, test: str) -> float:
        """Of a test when it was recorded."""
        return float(self._tests[test]["seconds"])


def record(root: Path, tests: list[str]) -> None:
    """Run tests, all if none are named, and keep which lines they execute."""
    kept = root / "build" / "mutate"
    if not tests:
        shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True, exist_ok=True)
    print("recording", *(tests or ["all tests"]), flush=True)
    before, copy = sources(root, "planner") | sources(root, "tests"), copied(root)
    try:
        ran = pytest_in(copy, tests, MUTATE_RECORD=str(kept))
    finally:
        shutil.rmtree(copy.parent)
    print(ran.stdout.strip().rpartition("\n")[2])
    if ran.returncode > 1:
        sys.exit(f"the tests cannot be run:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    known = json.loads((kept / "sources.json").read_text(encoding="utf-8")) if tests else {}
    known |= before if not tests else {path: text for path, text in before.items() if path.startswith("tests/")}
    (kept / "sources.json").write_text(json.dumps(known), encoding="utf-8")


# --- one mutant --------------------------------------------------------------------------------------------------


def claimed(root: Path) -> list[dict[str, str]]:
    """Mutants that somebody showed to be equivalent: file, code, change, reason."""
    file = root / "tools" / EQUIVALENT
    return yaml.safe_load(file.read_text(encoding="utf-8")) or [] if file.exists() else []


def reason_of(mutant: Mutant, claims: list[dict[str, str]]) -> str | None:
    """Why no test can notice it, if that is known."""
    own = (mutant.path, mutant.code, mutant.change)
    return next((each["reason"] for each in claims if (each["file"], each["code"], each["change"]) == own), None)


def within(tests: list[str], known: Record, seconds: float) -> list[str]:
    """As many of the tests as take no longer than that together, one at least."""
    chosen: list[str] = []
    for test in tests:
        seconds -= known.seconds(test)
        if chosen and seconds < 0:
            break
        chosen.append(test)
    return chosen


def run(copy: Path, mutant: Mutant, tests: list[str], num_tests: int, stamp: int) -> Outcome:
    """Put the mutant into the copy, run the tests, and put the file back.

    stamp: a time that no other version of the file had, by which Python tells a compiled file that is out of date.
    """
    file, chosen = copy / mutant.path, copy.parent / "tests.txt"
    original = file.read_text(encoding="utf-8")
    found = Outcome(verdict="survived", by="")
    try:
        file.write_text(mutant.source, encoding="utf-8")
        os.utime(file, (stamp, stamp))
        for part in filter(None, (tests[:AT_FIRST], tests[AT_FIRST:])):
            chosen.write_text("\n".join(part), encoding="utf-8")
            files = sorted({test.partition("::")[0] for test in part})
            ran = pytest_in(copy, ["-x", "--tb=line", f"--timeout={TEST_SECONDS}", *files], MUTATE_TESTS=str(chosen))
            found = verdict(ran, len(tests), num_tests)
            if found.verdict != "survived":
                break
    finally:
        file.write_text(original, encoding="utf-8")
        os.utime(file, (stamp + 1, stamp + 1))
    return found


def verdict(ran: subprocess.CompletedProcess[str], num_run: int, num_tests: int) -> Outcome:
    """What the tests said."""
    if ran.returncode == 0:
        return Outcome(verdict="survived", by="", num_run=num_run, num_tests=num_tests)
    if ran.returncode not in (1, 2, 3):
        sys.exit(f"pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, flags=re.MULTILINE)
    timed_out = "Timeout" in ran.stdout and "Timeout (>" in ran.stdout
    return Outcome(
        verdict="timed out" if timed_out else "killed", by=failed[1] if failed else "import", num_run=num_run
    )


def outcomes(root: Path, mutants: list[Mutant], jobs: int, limit: float) -> Iterator[tuple[Mutant, Outcome]]:
    """Every mutant with its outcome, in the order of the mutants."""
    known, claims, copies = Record(root), claimed(root), queue.SimpleQueue[Path]()
    folders = [copied(root) for _ in range(jobs)]
    for folder in folders:
        copies.put(folder)

    def judge(number: int, mutant: Mutant) -> Outcome:
        if reason := reason_of(mutant, claims):
            return Outcome(verdict="equivalent", by=reason)
        tests = known.tests_of(mutant.path, mutant.lines)
        if not tests:
            return Outcome(verdict="survived", by="no test executes it")
        copy = copies.get()
        try:
            return run(copy, mutant, within(tests, known, limit), len(tests), started + 2 * number)
        finally:
            copies.put(copy)

    started = int(time.time())
    try:
        with ThreadPoolExecutor(jobs) as pool:
            yield from zip(mutants, pool.map(judge, range(len(mutants)), mutants), strict=True)
    finally:
        for folder in folders:
            shutil.rmtree(folder.parent)


# --- the report --------------------------------------------------------------------------------------------------


def words(mutant: Mutant, outcome: Outcome) -> str:
    """A mutant in four lines: where, what became of it, and the change."""
    ran = f" {outcome.num_run} of {outcome.num_tests} tests" if outcome.num_tests else ""
    by = f" by {outcome.by}" if outcome.verdict in ("killed", "timed out") else f" {outcome.by}".rstrip()
    return (
        f"{mutant.path}:{mutant.line}  {outcome.verdict.upper() if outcome.verdict == 'survived' else outcome.verdict}"
        f"{ran}{by}\n    - {mutant.removed}\n    + {mutant.added}\n    ({mutant.change[:160]})"
    )


def main() -> None:
    """Read the command line, draw, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", default="", help="a folder or file below the repository")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120.0, help="recorded seconds of tests for one mutant")
    parser.add_argument("--record", action="store_true", help="run all tests and keep which lines they execute")
    asked = parser.parse_args()
    root = Path.cwd()
    os.nice(5)
    if asked.record:
        record(root, [])
        return
    code = {path: text for area in AREAS for path, text in sources(root, f"planner/{area}").items()}
    code = {path: text for path, text in code.items() if path.startswith(asked.only)}
    mutants = list(draw(code, asked.count, random.Random(asked.seed)))  # noqa: S311 - no secret
    counts: Counter[str] = Counter()
    for mutant, outcome in outcomes(root, mutants, asked.jobs, asked.limit):
        counts[outcome.verdict] += 1
        print(words(mutant, outcome), flush=True)
    killed = counts["killed"] + counts["timed out"]
    print(dict(counts), f"killed {killed} of {killed + counts['survived']} that are not equivalent")


if __name__ == "__main__":
    main()
