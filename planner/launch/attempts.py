"""Attempts of a run: host 0 announces each attempt in a folder that all hosts see, and the other hosts follow.

Only host 0 numbers the attempts. Hosts must not count attempts themselves: after a restart of its launcher, or after a
loss of its ranks, such a host would wait in a rendezvous that no other host enters. A host enters an attempt once; to
rejoin the run, it requests the next attempt.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from planner.errors import EnvironmentProblem
from planner.launch.messages import say

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECONDS_BETWEEN_LOOKS: Final = 1.0
SECONDS_OF_PATIENCE: Final = 10.0
SECONDS_TO_MEET: Final = 600.0
"""Longest wait of hosts for each other; torchrun's rendezvous has the same timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of torchrun on every host.

    number: counts the attempts of all runs in a folder.
    start: a unique name.
    port: the port on which host 0 listens.
    resume: `auto` or a step.
    exit_code: the code with which host 0 ended the run; None while the run continues.
    """

    number: int
    start: str
    port: int
    resume: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Numbers of the last attempt that a host entered, and of the attempt that it requests; -1 means none."""

    entered: int = -1
    asked: int = -1


class Head:
    """The role of host 0, or of the only host: it begins the attempts."""

    def __init__(self, output: Path, num_hosts: int) -> None:
        self._folder, self._others = output / "attempts", range(1, num_hosts)
        self._attempt: Attempt | None = None
        self._began = self._looked = 0.0

    def begin(self, *, port: int, resume: str) -> Attempt:
        """Announce an attempt with a number that no earlier attempt had.

        Raises:
            EnvironmentProblem: the folder cannot be written.
        """
        newest = _read_newest(self._folder)
        entered = [_read_place(self._folder, host).entered for host in self._others]
        number = 1 + max([newest.number if newest else -1, *entered])
        self._attempt = Attempt(number=number, start=uuid.uuid4().hex, port=port, resume=resume)
        self._began = time.monotonic()
        _write(self._folder / "newest.json", self._attempt)
        return self._attempt

    def must_end(self) -> bool:
        """Whether another host requests the next attempt; also reports hosts that are late to enter this attempt."""
        now = time.monotonic()
        if not self._others or now - self._looked < SECONDS_BETWEEN_LOOKS:
            return False
        late = self._looked - self._began <= SECONDS_OF_PATIENCE < now - self._began
        self._looked = now
        missing, asking = self._others_state()
        if late and missing:
            say(f"waiting for {_name_hosts(missing)}, {SECONDS_TO_MEET:.0f} s at most")
        return bool(asking)

    def loss(self) -> str:
        """Describe which hosts made the attempt fail."""
        missing, asking = self._others_state()
        if missing:
            return f"{_name_hosts(missing)} did not come"
        return f"ranks of {_name_hosts(asking)} ended without a word" if asking else "a rank ended without a word"

    def _others_state(self) -> tuple[list[int], list[int]]:
        """Hosts that have not entered the current attempt, and hosts that request another attempt."""
        number = self._attempt.number if self._attempt else -1
        places = {host: _read_place(self._folder, host) for host in self._others}
        missing = [host for host, place in places.items() if place.entered < number]
        return missing, [host for host, place in places.items() if place.asked > number]

    def end(self, exit_code: int) -> None:
        """Announce to the other hosts that no attempt follows; a full disk must not hide why the run ended."""
        if self._attempt is not None:
            with contextlib.suppress(EnvironmentProblem):
                _write(self._folder / "newest.json", replace(self._attempt, exit_code=exit_code))


class Follower:
    """A host other than host 0: it enters the attempts that host 0 announces."""

    def __init__(self, output: Path, number: int) -> None:
        self._folder, self._number = output / "attempts", number
        self._entered: Attempt | None = None
        self._looked = 0.0
        newest = _read_newest(self._folder)
        self._before = newest if newest and newest.exit_code is not None else None  # the end of an earlier run

    def join(self, given_up: Callable[[], bool]) -> Attempt | None:
        """Wait until `look` returns an attempt; return None once `given_up` is true.

        Raises:
            EnvironmentProblem: host 0 announces no attempt within ten minutes, or the folder cannot be written.
        """
        began, told = time.monotonic(), False
        while not given_up():
            if (attempt := self.look()) is not None:
                return attempt
            if not told:
                say(f"host {self._number} waits for host 0 to begin an attempt, {SECONDS_TO_MEET:.0f} s at most")
                told = True
            if time.monotonic() - began > SECONDS_TO_MEET:
                raise EnvironmentProblem(
                    f"host 0 has begun no attempt in {self._folder.parent} for {SECONDS_TO_MEET:.0f} s",
                    hint="start `planner launch` on host 0 too, with an --output that all hosts see",
                )
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return None

    def look(self) -> Attempt | None:
        """Enter and return the newest attempt; return None and request another if this host has already entered it.

        An announcement that the run has ended is returned without being entered.

        Raises:
            EnvironmentProblem: the folder cannot be written.
        """
        newest, place = _read_newest(self._folder), _read_place(self._folder, self._number)
        if newest is None or newest == self._before:
            return None
        if newest.exit_code is not None:
            return newest
        if newest.number > place.entered:
            _write(self._folder / f"host-{self._number}", replace(place, entered=newest.number))
            say(f"host {self._number} enters attempt {newest.number}")
            self._entered = newest
            return newest
        if place.asked <= newest.number == place.entered:
            _write(self._folder / f"host-{self._number}", replace(place, asked=newest.number + 1))
        return None

    def must_end(self) -> bool:
        """Whether host 0 has begun another attempt, or has ended the run."""
        now = time.monotonic()
        if now - self._looked < SECONDS_BETWEEN_LOOKS:
            return False
        self._looked = now
        newest = _read_newest(self._folder)
        return newest is not None and newest != self._entered


def _name_hosts(numbers: list[int]) -> str:
    """Return `hosts 1, 2` for a message; of more than five hosts only the first five are named."""
    named = ", ".join(map(str, numbers[:5]))
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"host{'s' * (len(numbers) > 1)} {named}{more}"


def _read_newest(folder: Path) -> Attempt | None:
    try:
        attempt = Attempt(**json.loads((folder / "newest.json").read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    numbers = (attempt.number, attempt.port, 0 if attempt.exit_code is None else attempt.exit_code)
    good = all(type(each) is int for each in numbers) and isinstance(attempt.start, str)
    return attempt if good and isinstance(attempt.resume, str) else None


def _read_place(folder: Path, host: int) -> _Place:
    try:
        place = _Place(**json.loads((folder / f"host-{host}").read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return _Place()
    return place if type(place.entered) is int and type(place.asked) is int else _Place()


def _write(path: Path, content: Attempt | _Place) -> None:
    """Replace a file atomically, because other hosts may read it at any moment."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        draft.write_text(json.dumps(asdict(content)) + "\n")
        draft.replace(path)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from None
