"""The battery of tools/battery.py: its bookkeeping, and a few cases of its quick rows."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.fixture
def battery(tool, monkeypatch, tmp_path):
    found = tool("battery")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{found.MARKS[0]}\n{found.MARKS[1]}\nafter\n")
    monkeypatch.setattr(found, "STATE", tmp_path / "state")
    monkeypatch.setattr(found, "PAGE", page)
    monkeypatch.setattr(found, "ROWS", (found.Row(id="A1", what="x", goal=5), found.Row(id="B1", what="y", goal=3)))
    return found


def test_a_row_goes_on_where_it_was_stopped(battery, monkeypatch):
    asked = []

    def cases(_, numbers):
        for number in numbers:
            if number == 3 and not asked.count(3):
                asked.append(number)
                raise KeyboardInterrupt
            asked.append(number)
            yield "broken" if number == 1 else ""

    monkeypatch.setattr(battery, "cases_of", cases)
    row = battery.ROWS[0]
    battery.run_row(row, 2)
    with pytest.raises(KeyboardInterrupt):
        battery.run_row(row, None)
    battery.run_row(row, None)
    state = battery.read_state(row)
    assert (state["count"], state["faults"], state["words"]) == (5, 1, ["case 1: broken"])
    assert [asked.count(number) for number in range(5)] == [1, 1, 1, 2, 1]
    battery.write_page()
    text = battery.PAGE.read_text()
    assert "| A1 | x | 5 of 5 | 1 |" in text
    assert "| B1 | y | not run of 3 | - |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_the_page_keeps_what_ran_elsewhere(battery):
    battery.write_page()
    line = "| B1 | y | 2 of 3 | 0 | 2026-01-01, abc | `make battery ROWS=B1` |"
    text = battery.PAGE.read_text()
    battery.PAGE.write_text(text.replace(next(each for each in text.splitlines() if "| B1 |" in each), line))
    battery.write_page()
    assert line in battery.PAGE.read_text()


def test_fuzzed_inputs_are_read_or_refused(tool, tmp_path):
    fuzz = tool("battery_fuzz")
    before = signal.signal(signal.SIGPROF, fuzz._alarm)
    try:
        quick = [each for each in fuzz.READERS if each[0] is not fuzz._plan]
        fuzz.READERS = tuple(quick)
        assert [fault for number in range(80) if (fault := fuzz.check(number, tmp_path))] == []
    finally:
        signal.signal(signal.SIGPROF, before)
        sys.modules.pop("battery_fuzz")


def test_a_reader_that_breaks_or_hangs_is_noticed(tool, tmp_path, monkeypatch):
    fuzz = tool("battery_fuzz")

    def hang(*_):
        while True:
            pass

    before = signal.signal(signal.SIGPROF, fuzz._alarm)
    try:
        monkeypatch.setattr(fuzz, "CPU_SECONDS", 0.1)
        for reader, word in ((lambda *_: 1 / 0, "ZeroDivisionError"), (hang, "processor time")):
            monkeypatch.setattr(fuzz, "READERS", ((reader, 1),))
            assert word in fuzz.check(0, tmp_path)
    finally:
        signal.signal(signal.SIGPROF, before)


def test_documents_that_are_read_once_stay_as_they_are(tool):
    fuzz = tool("battery_fuzz")
    given = {"model": "tiny-gpt", "cluster": "dgx-a100", "global_batch_size": 8}
    untouched = fuzz.load_job(**given)
    with fuzz.shipped_read_once():
        for setting in ("device.memory=141GiB", "nvlink.latency=1 us", "model.num_layers=4"):
            fuzz.load_job(**given, settings=[setting])
        assert fuzz.load_job(**given) == untouched


def test_every_row_has_its_cases(tool):
    for row in tool("battery").ROWS:
        module, _, function = row.cases.partition(":")
        assert not row.cases or callable(getattr(tool(module), function))
