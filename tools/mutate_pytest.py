"""The plugin of pytest that `tools/mutate.py` runs tests with: it records who executes what, or runs a chosen list.

With MUTATE_RECORD=FOLDER it writes the lines that each test executes (coverage.sqlite, one context a test) and the
seconds of each test that passed (tests.json). With MUTATE_TESTS=FILE it runs the tests that the file lists, in
that order.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coverage
import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

SHARED = "fixture "  # context of what is set up once for several tests


class Recorder:
    """Tells coverage which test is running, and keeps what each test took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = ""
        self.seconds: dict[str, float] = defaultdict(float)
        self.fixtures: dict[str, list[str]] = {}
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
        """A test, with the functions of its own file tree that keep results emptied."""
        _forget()
        self.fixtures[item.nodeid] = item.fixturenames
        self._switch(item.nodeid)
        result = yield
        self._switch("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """A fixture that several tests share counts for each of them, not for the first alone."""
        if fixturedef.scope == "function":
            return (yield)
        before = self._switch(SHARED + fixturedef.argname)
        try:
            return (yield)
        finally:
            self._switch(before)

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
            name: {"seconds": round(seconds, 4), "fixtures": self.fixtures[name]}
            for name, seconds in self.seconds.items()
            if name not in self.failed
        }
        file.write_text(json.dumps(tests), encoding="utf-8")


def _forget() -> None:
    """Empty what functools.cache keeps in modules below the working directory."""
    here = f"{Path.cwd()}/"
    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(here):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


class Chosen:
    """Runs only the listed tests, in the order of the list."""

    def __init__(self, names: list[str]) -> None:
        self.place = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop what is not listed, and sort."""
        items[:] = sorted(
            (each for each in items if each.nodeid in self.place), key=lambda each: self.place[each.nodeid]
        )


def pytest_configure(config: pytest.Config) -> None:
    """Register what the environment asks for."""
    if folder := os.environ.pop("MUTATE_RECORD", None):
        config.pluginmanager.register(Recorder(Path(folder)))
    if file := os.environ.pop("MUTATE_TESTS", None):
        config.pluginmanager.register(Chosen(Path(file).read_text(encoding="utf-8").splitlines()))
