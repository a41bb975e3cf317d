"""The battery of tools/battery.py: its bookkeeping, and a few cases of its quick rows."""

from __future__ import annotations

import importlib
import signal
import socket
import subprocess
import sys
import time
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
    rows = (found.Row(id="A1", what="x", goal=5, cases=""), found.Row(id="B1", what="y", goal=3, cases=""))
    monkeypatch.setattr(found, "ROWS", rows)
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
        assert callable(getattr(tool(module), function))


def test_a_link_loses_what_it_is_told_to_lose(tool):
    """Sockets that keep packets apart stand for the devices of two hosts."""
    links = tool("battery_links")
    link = links.Link(links.random.Random(0))
    hosts = []
    try:
        for number in range(2):
            host, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            host.settimeout(5)
            hosts.append(host)
            link.attach(number, device.detach())
        for number, lost in enumerate([(), (0,), (1,), (0, 1), ()]):
            link.set()
            link.set(lost=1.0, of=lost)
            for host in hosts:
                host.send(b"%d" % number)
            while link.packets < 2 * (number + 1):
                time.sleep(0.001)
        for number in range(2):
            assert [hosts[1 - number].recv(9) for _ in range(3)] == [b"0", b"%d" % (2 - number), b"4"]
    finally:
        link.close()
        for host in hosts:
            host.close()


@pytest.mark.parametrize(
    ("bytes_of", "files_of", "grows"),
    [
        (lambda look: 300e6 + 1e6 * (look % 7), lambda look: 40 + 9 * (look > 350 and look % 2), False),
        (lambda look: 300e6 + 1e5 * look, lambda _: 40, True),
        (lambda _: 300e6, lambda look: 40 + look // 200 + look % 3, True),
    ],
    ids=["flat", "memory", "descriptors"],
)
def test_what_grows_is_told_from_what_wavers(tool, bytes_of, files_of, grows):
    looks = range(400)
    seen = tool("battery_soak").Seen(
        times=list(looks), resident=list(map(bytes_of, looks)), open_files=list(map(files_of, looks))
    )
    assert seen.grows is grows


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minutes_soak_is_flat_and_exact(tool):
    pytest.importorskip("torch")
    assert list(tool("battery_soak").soaks(range(1), seconds=60, between_kills=5)) == [""]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slow_link_and_one_that_comes_back_change_no_bit(tool):
    pytest.importorskip("torch")
    if subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    assert list(tool("battery_links").links(range(3))) == [""] * 3
