"""Change the code at random and see whether a test notices (`make mutate`): a report, never a gate.

Mutants are drawn by a seed from the folders of AREAS. The tests that execute the changed statement run in a copy of the
tree, fast ones first, until one fails. `--record` records once which test executes which line (up to half an hour on
one core), in build/mutate; changed tests are recorded again automatically.

A mutant is equivalent if no test can notice it, because the program still does the same. Such mutants are listed with
the reason in mutants-equivalent.yaml and reported separately.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coverage
import yaml

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

from mutants import Mutant, draw  # noqa: E402 - scripts beside this one
from mutate_pytest import swapped  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

AREAS = ("cost", "search", "specs", "answers", "show", "emit")
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "site")
PYTEST = ("-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not slow and not gpu", "--ignore", "tests/trainer")
TEST_SECONDS = 60  # a test that takes longer is considered to hang
STAMP = int(time.time())
AT_FIRST = 25  # tests in the first round; few tests kill most mutants
EQUIVALENT = "mutants-equivalent.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict (killed, survived, timeout or equivalent), the killing test or the reason, and the tests run."""

    verdict: str
    by: str
    num_run: int = 0
    num_tests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A mutant with the tests to run, and the number of tests that execute it.

    at_import: the mutated code also runs when the tests are imported.
    """

    mutant: Mutant
    tests: list[str]
    num_tests: int
    at_import: bool


# --- the tree, and what is recorded about it ---------------------------------------------------------------------


def sources(root: Path, folder: str) -> dict[str, str]:
    """Python files below a folder by their path."""
    paths = sorted((root / folder).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def lines_before(before: str, after: str, lines: range) -> set[int]:
    """The lines of an earlier text that correspond to these lines of a later text."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    found: set[int] = set()
    for tag, first, last, first_after, last_after in matcher.get_opcodes():
        within = range(max(lines.start, first_after + 1), min(lines.stop, last_after + 1))
        if tag == "equal":
            found.update(line - first_after + first for line in within)
        elif within:
            found.update(range(first, last + 2))  # and one line on either side
    return found


def copied(root: Path) -> Path:
    """A copy of the tree in a new folder."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-")) / root.name
    shutil.copytree(root, folder, ignore=NOT_COPIED)
    return folder


def pytest_lines(folder: Path, arguments: list[str], **asked: str) -> Iterator[str]:
    """Run tests of a copy with the plugin beside this file; yields the lines of its output."""
    environment = os.environ | asked | {"PYTHONPATH": f"{folder}{os.pathsep}{TOOLS}", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *PYTEST, "-p", "mutate_pytest", *arguments]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        yield from running.stdout
    if running.returncode == 5:
        sys.exit(f"pytest found no tests among {arguments}")


class Record:
    """The recorded lines that each test executes, and the recorded seconds of each test."""

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
        self._places = {name: place for place, name in enumerate(self._tests)}
        self._lines = coverage.CoverageData(str(folder / "coverage.sqlite"))
        self._lines.read()

    def tests_of(self, path: str, lines: range | None) -> tuple[list[str], bool]:
        """Tests that execute one of `lines`, fastest first; without `lines`, tests that execute any line of the file.

        The result also says whether importing the tests already executes the code.
        """
        if path not in self._then:
            sys.exit(f"{path} is newer than the record: python tools/mutate.py --record")
        own = f"tests/{Path(path).parts[1]}/"
        contexts = self._lines.contexts_by_lineno(path)
        then = lines_before(self._then[path], self._now[path], lines or range(0))
        wanted = set().union(*(contexts.get(line, ()) for line in then))
        at_import = lines is None or "" in wanted
        if lines is None or wanted == {""}:
            wanted = set().union(*contexts.values())
        wanted.discard("")
        if lines is None:  # no record has the lines that other modules use at import
            wanted |= {name for name in self._tests if name.startswith(own)} or set(self._tests)
        found = [
            name
            for name, test in self._tests.items()
            if name in wanted or any(f"fixture {fixture}" in wanted for fixture in test["fixtures"])
        ]
        cases: Counter[str] = Counter()
        order = {}
        for name in sorted(found, key=lambda name: (self.seconds(name), name)):
            function = name.partition("[")[0]
            # later cases of a test tell less than its first; tests in other folders test other code
            order[name] = (0.05 + self.seconds(name)) * (1 + cases[function]) * (1 if name.startswith(own) else 4)
            cases[function] += 1
        return sorted(order, key=lambda name: (order[name], name)), at_import

    def place(self, test: str) -> int:
        """The position of a test among all tests."""
        return self._places[test]

    def seconds(self, test: str) -> float:
        """The recorded seconds of a test."""
        return float(self._tests[test]["seconds"])


def record(root: Path, tests: list[str]) -> None:
    """Run tests (all if none are named) and store the lines that they execute."""
    kept = root / "build" / "mutate"
    if not tests:
        shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True, exist_ok=True)
    print("recording", *(tests or ["all tests"]), flush=True)
    before, copy = sources(root, "planner") | sources(root, "tests"), copied(root)
    try:
        said = list(pytest_lines(copy, tests, MUTATE_RECORD=str(kept)))
    finally:
        shutil.rmtree(copy.parent)
    print(said[-1].strip(), flush=True)
    known = json.loads((kept / "sources.json").read_text(encoding="utf-8")) if tests else {}
    known |= before if not tests else {path: text for path, text in before.items() if path.startswith("tests/")}
    (kept / "sources.json").write_text(json.dumps(known), encoding="utf-8")


# --- one mutant --------------------------------------------------------------------------------------------------


def claimed(root: Path) -> list[dict[str, str]]:
    """Mutants known to be equivalent: file, code (the line), change (or `any` for every change of the line), reason."""
    file = root / "tools" / EQUIVALENT
    return yaml.safe_load(file.read_text(encoding="utf-8")) or [] if file.exists() else []


def reason_of(mutant: Mutant, claims: list[dict[str, str]]) -> str | None:
    """The reason why no test can notice the mutant, if it is known to be equivalent."""
    alike = (each for each in claims if (each["file"], each["code"]) == (mutant.path, mutant.code))
    return next((each["reason"] for each in alike if each["change"] in (mutant.change, "any")), None)


def within(tests: list[str], known: Record, seconds: float) -> list[str]:
    """As many of the first tests as together take at most `seconds`, but at least one.

    All except the first few are sorted by file, so that tests with common fixtures run one after another.
    """
    chosen: list[str] = []
    for test in tests:
        seconds -= known.seconds(test)
        if chosen and seconds < 0:
            break
        chosen.append(test)
    return chosen[:AT_FIRST] + sorted(chosen[AT_FIRST:], key=known.place)


def judge_warm(copy: Path, tasks: list[Task]) -> Iterator[Outcome]:
    """Judge mutants of functions in one process that has imported all tests.

    The tests first run on the unchanged code, and must pass.
    """
    first = tasks[0].mutant
    control = {
        "source": (copy / first.path).read_text(encoding="utf-8"),
        "tests": [*{each.tests[0]: None for each in tasks}],
    }
    asked = [
        {"path": mutant.path, "function": mutant.function, "stamp": STAMP + 2 * number, **what}
        for number, (mutant, what) in enumerate(
            [(first, control), *((each.mutant, {"source": each.mutant.source, "tests": each.tests}) for each in tasks)]
        )
    ]
    file = copy.parent / "tasks.json"
    file.write_text(json.dumps(asked), encoding="utf-8")
    files = sorted({test.partition("::")[0] for each in tasks for test in each.tests})
    answers: Iterator[Task | None] = iter([None, *tasks])
    told: list[str] = []
    num_left = 1 + len(tasks)
    for line in pytest_lines(copy, ["-s", f"--timeout={TEST_SECONDS}", *files], MUTATE_TASKS=str(file)):
        told.append(line)
        if not line.startswith("MUTANT "):
            continue
        verdict, *by = line.split(maxsplit=2)[1:]
        num_left -= 1
        if each := next(answers):
            by_what = "".join(by).strip()
            yield Outcome(verdict=verdict, by=by_what, num_run=len(each.tests), num_tests=each.num_tests)
        elif verdict != "survived":
            sys.exit(f"without a change: {line}")
    if num_left:
        sys.exit(f"pytest ended before the last mutant:\n{''.join(told[-40:])}")


def judge_cold(copy: Path, task: Task, stamp: int) -> Outcome:
    """Judge a mutant of code that runs at import, with the tests imported again."""
    chosen = copy.parent / "tests.txt"
    failed, said = "", ""
    with swapped(copy / task.mutant.path, task.mutant.source, stamp):
        for part in filter(None, (task.tests[:AT_FIRST], task.tests[AT_FIRST:])):
            chosen.write_text("\n".join(part), encoding="utf-8")
            files = sorted({test.partition("::")[0] for test in part})
            said = "".join(pytest_lines(copy, ["-x", f"--timeout={TEST_SECONDS}", *files], MUTATE_TESTS=str(chosen)))
            if found := re.search(r"^(?:FAILED|ERROR) (\S+)|(Interrupted|ImportError)", said, flags=re.MULTILINE):
                failed = found[1] or "import"
                break
    verdict = ("timeout" if "Timeout (>" in said else "killed") if failed else "survived"
    return Outcome(verdict=verdict, by=failed, num_run=len(task.tests), num_tests=task.num_tests)


def outcomes(root: Path, mutants: list[Mutant], limit: float) -> Iterator[tuple[Mutant, Outcome]]:
    """Every mutant with its outcome, mutants of functions first."""
    known, claims = Record(root), claimed(root)
    tasks = []
    for mutant in mutants:
        tests, at_import = known.tests_of(mutant.path, mutant.lines)
        if reason := reason_of(mutant, claims):
            yield mutant, Outcome(verdict="equivalent", by=reason)
        elif not tests:
            yield mutant, Outcome(verdict="survived", by="no test executes it")
        else:
            chosen = within(tests, known, limit)
            tasks.append(Task(mutant=mutant, tests=chosen, num_tests=len(tests), at_import=at_import))
    copy = copied(root)
    try:
        left = [task for task in tasks if task.mutant.function is None]
        warm = [task for task in tasks if task.mutant.function is not None]
        for task, outcome in zip(warm, judge_warm(copy, warm) if warm else (), strict=True):
            if outcome.verdict == "unsure" or (outcome.verdict == "survived" and task.at_import):
                left.append(task)
            else:
                yield task.mutant, outcome
        for number, task in enumerate(left, start=len(warm) + 1):
            yield task.mutant, judge_cold(copy, task, STAMP + 2 * number)
    finally:
        shutil.rmtree(copy.parent)


# --- the report --------------------------------------------------------------------------------------------------


def words(mutant: Mutant, outcome: Outcome) -> str:
    """A mutant in four lines: its place, its outcome, and the change."""
    if outcome.verdict == "survived":
        said = f"SURVIVED {outcome.by or f'{outcome.num_run} of {outcome.num_tests} tests'}"
    else:
        said = f"{outcome.verdict}: {outcome.by}"
    where = f"{mutant.path}:{mutant.line}"
    return f"{where}  {said}\n    - {mutant.removed}\n    + {mutant.added}\n    ({mutant.change[:160]})"


def main() -> None:
    """Read the command line, draw, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", default="", help="folders or files below the repository, separated by commas")
    parser.add_argument("--limit", type=float, default=120.0, help="recorded seconds of tests for one mutant")
    parser.add_argument("--record", action="store_true", help="run all tests and keep which lines they execute")
    asked = parser.parse_args()
    root = Path.cwd()
    os.nice(5)
    if asked.record:
        record(root, [])
        return
    code = {path: text for area in AREAS for path, text in sources(root, f"planner/{area}").items()}
    code = {path: text for path, text in code.items() if path.startswith(tuple(asked.only.split(",")))}
    mutants = list(draw(code, asked.count, random.Random(asked.seed)))  # noqa: S311 - no secret
    counts: Counter[str] = Counter()
    for mutant, outcome in outcomes(root, mutants, asked.limit):
        counts[outcome.verdict] += 1
        print(words(mutant, outcome), flush=True)
    killed = counts["killed"] + counts["timeout"]
    print(dict(counts), f"killed {killed} of {killed + counts['survived']} that are not equivalent")


if __name__ == "__main__":
    main()
