"""Hosts meet again, whichever host is lost: the files of the attempts, with simulated launchers."""

from __future__ import annotations

import json
import random

import pytest

from planner.errors import EnvironmentProblem
from planner.launch import attempts
from planner.launch.attempts import Follower, Head

NUM_HOSTS = 4


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS_BETWEEN_LOOKS", 0.0)


class Cluster:
    """Launchers that are killed and started, and ranks that notice after some time that other ranks are gone."""

    def __init__(self, folder, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.launchers: dict[int, Head | Follower] = {}
        self.attempt_of: dict[int, str | None] = dict.fromkeys(range(NUM_HOSTS))
        self.entered: set[tuple[int, str]] = set()
        self.met: set[str] = set()

    def start(self, host: int) -> None:
        self.kill(host)
        self.launchers[host] = Follower(self.folder, host) if host else Head(self.folder, NUM_HOSTS)

    def kill(self, host: int) -> None:
        self.launchers.pop(host, None)
        self.attempt_of[host] = None

    def lose_ranks(self, host: int) -> None:
        self.attempt_of[host] = None

    def look(self, host: int) -> None:
        launcher = self.launchers[host]
        here = self.attempt_of[host]
        if here is None:
            found = launcher.look() if host else launcher.begin(port=1, resume="auto")
            if found is not None:
                assert (host, found.start) not in self.entered, "a rendezvous is met once"
                self.entered.add((host, found.start))
                self.attempt_of[host] = found.start
        elif launcher.must_end() or (self.is_broken(here) and self.chance.random() < 0.3):
            self.attempt_of[host] = None
        if self.are_together():
            self.met.add(self.attempt_of[0])

    def is_broken(self, start: str) -> bool:
        return start in self.met and any(each != start for each in self.attempt_of.values())

    def are_together(self) -> bool:
        return len(set(self.attempt_of.values())) == 1 and self.attempt_of[0] is not None


@pytest.mark.parametrize("seed", range(50))
def test_hosts_meet_again_after_any_losses(seed, tmp_path, capsys):
    """Launchers come and go and ranks die, also several at a time and on host 0; at the end all of them are alive."""
    chance = random.Random(seed)
    cluster = Cluster(tmp_path, chance)
    for _ in range(40):
        host = chance.randrange(NUM_HOSTS)
        chance.choice((cluster.start, cluster.kill, cluster.lose_ranks))(host)
        for _ in range(chance.randrange(6)):
            if cluster.launchers:
                cluster.look(chance.choice(sorted(cluster.launchers)))
    for host in set(range(NUM_HOSTS)) - cluster.launchers.keys():
        cluster.start(host)
    for _ in range(400):
        cluster.look(chance.randrange(NUM_HOSTS))
    assert cluster.are_together()
    start = cluster.attempt_of[0]
    for _ in range(40):
        cluster.look(chance.randrange(NUM_HOSTS))
    assert set(cluster.attempt_of.values()) == {start}
    assert "Traceback" not in capsys.readouterr().err


def test_what_an_earlier_run_left_is_neither_an_attempt_nor_the_end(tmp_path):
    head, follower = Head(tmp_path, 2), Follower(tmp_path, 1)
    first = head.begin(port=7, resume="auto")
    assert follower.look() == first
    head.end(0)
    assert follower.look().exit_code == 0
    later = Follower(tmp_path, 1)
    assert later.look() is None
    second = Head(tmp_path, 2).begin(port=7, resume="auto")
    assert later.look() == second
    assert second.number > first.number
    assert second.start != first.start


def test_a_host_is_told_port_and_step_by_host_0(tmp_path):
    """The host gets them from the last attempt that host 0 began, even if no host entered the attempt before."""
    for number, port in enumerate((29500, 29503)):
        assert Head(tmp_path, 2).begin(port=port, resume="12").number == number
    found = Follower(tmp_path, 1).look()
    assert (found.port, found.resume) == (29503, "12")


def test_hosts_that_ask_at_the_same_time_get_one_attempt(tmp_path):
    head, followers = Head(tmp_path, 3), [Follower(tmp_path, number) for number in (1, 2)]
    first = head.begin(port=1, resume="auto")
    assert [each.look() for each in followers] == [first, first]
    assert not head.must_end()
    assert [each.look() for each in followers] == [None, None]
    assert head.must_end()
    assert head.loss() == "ranks of hosts 1, 2 ended without a word"
    second = head.begin(port=2, resume="auto")
    assert second.number == first.number + 1
    assert [each.look() for each in followers] == [second, second]
    assert not head.must_end()


def test_a_host_waits_so_long_and_says_for_what(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attempts, "SECONDS_TO_MEET", 0.0)
    with pytest.raises(EnvironmentProblem, match=r"host 0 has begun no attempt in .*\n.*on host 0 too"):
        Follower(tmp_path, 1).join(lambda: False)
    assert capsys.readouterr().err.count("host 1 waits for host 0 to begin an attempt") == 1
    assert Follower(tmp_path, 1).join(lambda: True) is None


def test_host_0_says_once_who_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attempts, "SECONDS_OF_PATIENCE", 0.0)
    head = Head(tmp_path, 10)
    head.begin(port=1, resume="auto")
    Follower(tmp_path, 4).look()
    assert [head.must_end() for _ in range(3)] == [False] * 3
    messages = capsys.readouterr().err
    assert messages.count("waiting for hosts 1, 2, 3, 5, 6 and 3 more, 600 s at most") == 1
    assert head.loss() == "hosts 1, 2, 3, 5, 6 and 3 more did not come"


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[" * 100_000, "[]", "{}", '{"number": 3}', '{"entered": 3, "asked": null}',
        '{"number": "3", "start": "a", "port": 1, "resume": "auto"}',
        '{"number": 3, "start": "a", "port": true, "resume": "auto"}',
        '{"number": 3, "start": ["a"], "port": 1, "resume": "auto", "exit_code": null}',
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_none(text, tmp_path):
    (tmp_path / "attempts").mkdir()
    for name in ("newest.json", "host-1"):
        (tmp_path / "attempts" / name).write_text(text)
    follower = Follower(tmp_path, 1)
    assert follower.look() is None
    begun = Head(tmp_path, 2).begin(port=1, resume="auto")
    assert begun.number == 0
    assert follower.look() == begun
    assert json.loads((tmp_path / "attempts" / "host-1").read_text()) == {"entered": 0, "asked": -1}


def test_numbers_go_on_where_host_0_has_lost_its_file(tmp_path):
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "host-1").write_text('{"entered": 7, "asked": 8}')
    begun = Head(tmp_path, 2).begin(port=1, resume="auto")
    assert Follower(tmp_path, 1).look() == begun
