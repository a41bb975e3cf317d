"""The pytest plugin of `tools/mutate.py`: it records the lines that each test executes, or runs a chosen list.

With MUTATE_RECORD=FOLDER it writes the lines that each test executes (coverage.sqlite, one context per test) and the
seconds of each test that passed (tests.json). With MUTATE_TESTS=FILE it runs the tests that the file lists, in that
order. With MUTATE_TASKS=FILE it judges mutants, see `Judge`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import coverage
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

SHARED = "fixture "  # context of fixtures that several tests share
CHILD_SECONDS = 600.0


class Recorder:
    """Tells coverage which test is running, and stores the seconds of each test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = ""
        self.seconds: dict[str, float] = defaultdict(float)
        self.fixtures: dict[str, list[str]] = {}
        self.shared: dict[str, float] = {}
        self.test = ""
        self.failed: set[str] = set()
        self.coverage = coverage.Coverage(
            data_file=str(folder / "coverage.sqlite"), config_file=False, include=[f"{Path.cwd()}/*"]
        )
        self.coverage.set_option("run:relative_files", True)
        if (folder / "coverage.sqlite").exists():
            self.coverage.load()
        self.coverage.start()

    def _switch(self, context: str) -> str:
        before, self.context = self.context, context
        self.coverage.switch_context(context)
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Generator[None, Any, Any]:
        """Run a test after clearing the function caches in its own file tree."""
        _forget()
        self.fixtures[item.nodeid] = item.fixturenames
        self.test = item.nodeid
        self._switch(item.nodeid)
        result = yield
        self._switch("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """If several tests share a fixture, add its lines and seconds to each of these tests."""
        if fixturedef.scope == "function":
            return (yield)
        before, start = self._switch(SHARED + fixturedef.argname), time.perf_counter()
        try:
            return (yield)
        finally:
            self._switch(before)
            self.shared[fixturedef.argname] = time.perf_counter() - start
            self.seconds[self.test] -= self.shared[fixturedef.argname]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of setup, call and teardown."""
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write both files."""
        self.coverage.stop()
        self.coverage.save()
        file = self.folder / "tests.json"
        tests = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        tests |= {
            name: {
                "seconds": round(
                    max(0.0, seconds) + sum(self.shared.get(each, 0.0) for each in self.fixtures[name]), 4
                ),
                "fixtures": self.fixtures[name],
            }
            for name, seconds in self.seconds.items()
            if name not in self.failed
        }
        file.write_text(json.dumps(tests), encoding="utf-8")


def _forget() -> None:
    """Clear the caches of functools.cache in modules below the working directory."""
    here = f"{Path.cwd()}/"
    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(here):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


class Judge:
    """Collects all tests once, and runs the tests of each mutant in a child process with the mutant's code.

    A task is {path, function, source, tests, stamp}. The answer to a task is a line "MUTANT verdict test" on the
    terminal. The verdict is `unsure` if the code cannot be replaced in a process that has already imported it.
    """

    def __init__(self, tasks: list[dict[str, Any]]) -> None:
        self.tasks = tasks
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the test that failed."""
        if report.failed:
            self.failed = "timeout " if "Timeout (>" in str(report.longrepr) else "killed "
            self.failed += report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run one child process for each mutant."""
        for module in pkgutil.walk_packages([str(Path.cwd() / "planner")], "planner."):
            if not module.name.startswith("planner.trainer") and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        gc.unfreeze()  # tests/conftest.py froze the objects, and `get_objects` leaves these out
        functions = [each for each in gc.get_objects() if type(each) is FunctionType]  # isinstance runs objects' code
        items = {item.nodeid: item for item in session.items}
        for task in self.tasks:
            file = Path(task["path"]).absolute()
            live = [each for each in functions if each.__code__.co_filename == str(file)]
            with swapped(file, task["source"], task["stamp"]):
                said = _in_child(lambda: self._judge(task, live, items))  # noqa: B023 - it is called at once
            print(f"\nMUTANT {said}", flush=True)
        return True

    def _judge(self, task: dict[str, Any], live: list[FunctionType], items: dict[str, pytest.Item]) -> str:
        if not _replaced(live, compile(task["source"], task["path"], "exec"), task["function"]):
            return "unsure"
        _forget()
        tests = [items[name] for name in task["tests"] if name in items]
        for item, following in zip(tests, [*tests[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return self.failed
        return "survived"


def _replaced(live: list[FunctionType], module: CodeType, name: str) -> bool:
    """Give the module's code to functions of this name and to functions nested in them.

    The result is False if this is impossible.
    """
    codes, todo = defaultdict[str, list[CodeType]](list), [module]
    while todo:
        codes[todo[-1].co_qualname].append(todo[-1])
        todo = [*todo[:-1], *(each for each in todo[-1].co_consts if isinstance(each, CodeType))]
    changed = 0
    for function in live:
        own = function.__code__
        if own.co_qualname == name or own.co_qualname.startswith(f"{name}.<locals>."):
            found = codes[own.co_qualname]
            if len(found) != 1 or found[0].co_freevars != own.co_freevars:
                return False
            function.__code__ = found[0].replace(co_filename=own.co_filename)
            changed += 1
    return changed > 0


def _in_child(work: Callable[[], str]) -> str:
    """The result of the work in a separate process, which may run for CHILD_SECONDS."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        said = "killed by an exception outside a test"
        try:
            said = work()
        finally:
            os.write(writes, said.encode())
            os._exit(0)
    os.close(writes)
    ready, _, _ = select.select([reads], [], [], CHILD_SECONDS)
    said = os.read(reads, 10_000).decode() if ready else "timeout"
    os.close(reads)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return said or "killed by an end of the process"


@contextlib.contextmanager
def swapped(file: Path, source: str, stamp: int) -> Generator[None]:
    """Replace the contents of a file inside the `with` block.

    stamp: a modification time that no other version of the file had, so that Python recompiles the file.
    """
    original = file.read_text(encoding="utf-8")
    try:
        file.write_text(source, encoding="utf-8")
        os.utime(file, (stamp, stamp))
        yield
    finally:
        file.write_text(original, encoding="utf-8")
        os.utime(file, (stamp + 1, stamp + 1))


class Chosen:
    """Runs only the listed tests, in the order of the list."""

    def __init__(self, names: list[str]) -> None:
        self.place = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop tests that are not listed, and sort the others."""
        items[:] = sorted(
            (each for each in items if each.nodeid in self.place), key=lambda each: self.place[each.nodeid]
        )


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin class that the environment variables ask for."""
    if folder := os.environ.pop("MUTATE_RECORD", None):
        config.pluginmanager.register(Recorder(Path(folder)))
    if file := os.environ.pop("MUTATE_TASKS", None):
        config.pluginmanager.register(Judge(json.loads(Path(file).read_text(encoding="utf-8"))))
    if file := os.environ.pop("MUTATE_TESTS", None):
        config.pluginmanager.register(Chosen(Path(file).read_text(encoding="utf-8").splitlines()))
