"""The battery of tools/battery.py: its bookkeeping, and a few cases of its quick rows."""

from __future__ import annotations

import contextlib
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
    assert [asked.count(number) for number in range(5)] == [1, 1, 1, 2, 1]
    text = battery.PAGE.read_text()
    assert "| A1 | x | 5 of 5 | 1 |" in text
    assert "| B1 | y | not run of 3 | - |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_cases_that_ran_on_another_machine_do_not_run_again(battery, monkeypatch):
    """The page has the results of another machine, and nothing else records them here."""
    battery.write_page({"B1": battery.Result(count=1_000, faults=2, date="2026-01-01", commit="abc+")})
    line = "| B1 | y | 1,000 of 3 | 2 | 2026-01-01, abc+ | `make battery ROWS=B1` |"
    assert line in battery.PAGE.read_text()
    asked = []
    monkeypatch.setattr(battery, "cases_of", lambda _, numbers: (asked.append(each) or "" for each in numbers))
    battery.run_row(battery.ROWS[1], None)
    assert asked == []
    assert line in battery.PAGE.read_text()
    battery.run_row(battery.ROWS[1], 2)
    assert asked == [1_000, 1_001]
    assert "| B1 | y | 1,002 of 3 | 2 | 20" in battery.PAGE.read_text()


def test_a_command_in_a_fork_ends_as_a_process_would(tool, tmp_path):
    commands = tool("battery_commands")
    with commands.Planner(PYTHONHASHSEED="7") as planner:
        job = ["plan", "tiny-gpt", "dgx-a100", "--gpus", "2", "--global-batch", "8"]
        done = planner.run([*job, "-o", "p.json"], tmp_path)
        assert done.returncode == 0
        assert (tmp_path / "p.json").exists()
        plain = [sys.executable, "-m", "planner"]
        for words in (["explain", "p.json"], ["plan", "nope"], ["--version"]):
            done = planner.run(words, tmp_path)
            other = subprocess.run([*plain, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (other.returncode, other.stdout, other.stderr)


def test_a_command_that_breaks_is_noticed(tool, tmp_path):
    """A broken planner replaces the real one."""
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").touch()
    (tmp_path / "planner" / "cli.py").write_text("main = len")
    ends = {"right": "sys.exit(3)", "wrong": "sys.exit(5)", "broken": "1 / 0", "killed": "os.kill(os.getpid(), 11)"}
    (tmp_path / "planner" / "__main__.py").write_text(
        f"import os, sys\ndef start():\n    print('here')\n    exec({ends!r}[sys.argv[1]])\n"
    )
    jobs, commands = tool("battery_jobs"), tool("battery_commands")
    with commands.Planner(PYTHONPATH=str(tmp_path)) as planner:
        told = {each: jobs.fault_of(planner.run([each], tmp_path), [each]) for each in ends}
        assert planner.run(["right"], tmp_path).stdout == "here\n"
    assert told["right"] == ""
    assert told["wrong"].startswith("exit code 5")
    assert told["broken"].startswith("exit code 1, 'ZeroDivisionError")
    assert told["killed"].startswith("exit code -11")


def test_a_refused_job_is_followed_by_another(tool, tmp_path):
    jobs, commands = tool("battery_jobs"), tool("battery_commands")
    job = ["plan", "tiny-gpt", "dgx-a100", "--gpus", "1", "--global-batch", "8"]
    drawn = iter([["plan", "nope", "dgx-a100"], [*job, "--precision", "int4"], job, ["plan"]])
    with commands.Planner() as planner:
        words, done = jobs.planned(planner, str(tmp_path), lambda: next(drawn))
    assert (words, done.returncode) == (job, 0)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", ["random_jobs", "hash_seeds", "secrets", "scripts"])
def test_commands_at_random(tool, row, count):
    assert list(getattr(tool("battery_jobs"), row)(range(count))) == [""] * count


@pytest.mark.slow
def test_interrupts_at_random(tool):
    assert list(tool("battery_jobs").interrupts(range(3))) == [""] * 3


@pytest.mark.slow  # tests/trainer has each of the parts: a killed rank, a killed launcher, bits of a resumed run
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_twice_has_the_bits_of_one_that_is_not(tool, tmp_path):
    """First a rank is killed, then the launcher; torchrun's usual port is taken all the time."""
    pytest.importorskip("torch")
    kills = tool("battery_kills")
    calm = kills.Workers()
    with socket.socket() as other, contextlib.ExitStack() as stack:
        stack.callback(calm.close)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else has taken it
            other.bind(("127.0.0.1", 29500))
            other.listen()
        run = kills.Run(kills.TWO, tmp_path, "run", 60, "--checkpoint-every", "5")
        stack.callback(run.end)
        kills.wait_for(lambda: run.steps_done() >= 5)
        kills.os.kill(run.ranks()[1], signal.SIGKILL)
        before = run.steps_done()
        kills.wait_for(lambda: run.steps_done() > before + 5)
        run.launchers[0].kill()
        run.launchers[0].wait()
        kills.wait_for(lambda: not run.ranks(), 10)
        assert run.steps_done() < 60
        run.launchers[0] = run.start()
        assert run.wait() == [0], run.messages
        assert calm.train(kills.plan_of(kills.TWO), tmp_path / "calm", steps=60, checkpoint_every=1000) == ""
    assert kills._losses(run.output) == kills._losses(tmp_path / "calm")
    assert len(kills._losses(run.output)) == 60


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
    for setting in ("device.memory=141GiB", "nvlink.latency=1 us", "model.num_layers=4"):
        fuzz.load_job(**given, settings=[setting])
    assert fuzz.load_job(**given) == untouched


def test_every_row_has_its_cases(tool):
    for row in tool("battery").ROWS:
        module, _, function = row.cases.partition(":")
        assert callable(getattr(tool(module), function))


def test_a_link_loses_what_it_is_told_to_lose(tool):
    """Sockets that preserve packet boundaries replace the devices of two hosts."""
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
