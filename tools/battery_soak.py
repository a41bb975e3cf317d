"""Two hour-long runs, one with kills and one without, to find leaks; their losses must be equal bit by bit.

The two runs train by one plan, side by side. The undisturbed run keeps its processes for the whole time, so that a
rank's slow leak adds up. The other run loses a rank, or torchrun's agent, at random moments, so that a leak at each
new start adds up.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from battery_kills import TWO, Run, told, wait_for

from planner.errors import ExitCode
from planner.units import format_bytes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

SECONDS = 3600.0
SECONDS_BETWEEN_KILLS = 60.0
SECONDS_BETWEEN_LOOKS = 1.0
WARM_UP_SECONDS = 30.0
GROWTH = 0.05
PARTS = 5
"""The time is divided into this number of parts; the first part is compared with the last part."""

STEPS = 10_000_000
SAVE = ("--checkpoint-every", "20")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Seen:
    """Observations of the processes with one role, one after another: seconds, resident bytes, open descriptors."""

    times: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)

    def part(self, number: int) -> tuple[float, int]:
        """Median of the resident bytes, and least number of open descriptors in a part of the time.

        The least number leaves out files that are open only for a moment. number: index of the part; all parts have
        equally many observations.
        """
        looks = len(self.times)
        within = slice(looks * number // PARTS, looks * (number + 1) // PARTS)
        return statistics.median(self.resident[within]), min(self.open_files[within])

    @property
    def grows(self) -> bool:
        """Whether memory grew by more than the allowed amount, or a descriptor stayed open."""
        (before, files_before), (after, files_after) = self.part(0), self.part(PARTS - 1)
        return after > before * (1 + GROWTH) or files_after > files_before

    def __str__(self) -> str:
        (before, files_before), (after, files_after) = self.part(0), self.part(PARTS - 1)
        return (
            f"{format_bytes(before)} {after / before - 1:+.2%}, {files_before} to {files_after} descriptors, "
            f"{len(self.times):,} looks"
        )


class SoakedRun(Run):
    """A run without end whose processes are observed; its temporary files have a folder of their own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.temporary = folder / f"{name}-temporary"
        self.temporary.mkdir()
        super().__init__(TWO, folder, name, STEPS, *SAVE)
        self.seen: defaultdict[str, Seen] = defaultdict(Seen)
        self._born: dict[int, float] = {}

    def start(self, number: int = 0) -> subprocess.Popen[bytes]:
        """The launcher."""
        return self.launch(number, TMPDIR=str(self.temporary))

    def agents(self) -> list[int]:
        """Torchrun's own process."""
        launcher = self.launchers[0].pid
        return [int(each) for each in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]

    def roles(self) -> dict[int, str]:
        """The role of each process of the run, by process number; empty until all processes have started."""
        agents, ranks = self.agents(), self.ranks()
        hearts = sorted((self.output / "heartbeats").glob("rank-*"))
        named = {int(path.read_text(encoding="utf-8").split()[1]): path.name for path in hearts}
        found = {self.launchers[0].pid: "launcher", **dict.fromkeys(agents, "agent")}
        found |= {each: named[each] for each in ranks if each in named}
        return found if len(found) == 2 + self.kind.ranks else {}

    def look(self, now: float, warm_up: float) -> None:
        """Record memory and descriptors of the processes that are older than the warm-up."""
        with contextlib.suppress(OSError, ValueError, IndexError):  # a process may end or begin meanwhile
            for process, role in self.roles().items():
                if now - self._born.setdefault(process, now) < warm_up:
                    continue
                pages = int(Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1])
                descriptors = len(os.listdir(f"/proc/{process}/fd"))  # noqa: PTH208 - names only, and quickly
                seen = self.seen[role]
                seen.times.append(now)
                seen.resident.append(pages * PAGE_BYTES)
                seen.open_files.append(descriptors)

    def stop(self) -> int:
        """Ask the run to end, as a batch system does."""
        self.launchers[0].send_signal(signal.SIGTERM)
        return self.launchers[0].wait(timeout=120)

    def steps(self) -> list[tuple[int, float, float, float]]:
        """Step, loss, gradient norm and seconds of each line."""
        lines = map(json.loads, (self.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [(line["step"], line["loss"], line["grad_norm"], line["step_seconds"]) for line in lines]


def soaks(numbers: range, *, seconds: float = SECONDS, between_kills: float = SECONDS_BETWEEN_KILLS) -> Iterator[str]:
    """For each case number, a soak of this many seconds.

    between_kills: mean seconds between kills, counted from the first new checkpoint.
    """
    for number in numbers:
        rng = random.Random(f"soak {number}")  # noqa: S311 - no secret
        yield told(lambda rng=rng: _soak(rng, seconds, between_kills))  # type: ignore[misc]


def _soak(rng: random.Random, seconds: float, between_kills: float) -> str:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        calm, killed = (SoakedRun(Path(name), each) for each in ("calm", "killed"))
        stack.callback(calm.end)
        stack.callback(killed.end)
        began = time.monotonic()
        kills = _kill_and_look(calm, killed, rng, began + seconds, between_kills, min(WARM_UP_SECONDS, seconds / 6))
        lasted = time.monotonic() - began
        codes = [calm.stop(), killed.stop()]
        if codes != [ExitCode.PREEMPTED] * 2:
            return f"ended with {codes}: {calm.messages[-300:]!r} {killed.messages[-300:]!r}"
        return _judged(calm, killed, kills, lasted)


def _kill_and_look(
    calm: SoakedRun, killed: SoakedRun, rng: random.Random, end: float, between_kills: float, warm_up: float
) -> int:
    """Number of kills until the end; each kill waits for a checkpoint that is newer than the previous kill."""
    kills, newest, due = 0, -1, float("inf")
    while (now := time.monotonic()) < end:
        for run in (calm, killed):
            if (code := run.launchers[0].poll()) is not None:
                raise RuntimeError(f"{run.output.name} ended with {code} after {kills} kills: {run.messages[-300:]!r}")
            run.look(now, warm_up)
        step = max(killed.checkpoints(), default=-1)
        if due == float("inf") and step > newest:
            due = now + rng.expovariate(1 / between_kills)
        if now >= due and (victims := [*killed.agents(), *killed.ranks()]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
                kills, newest, due = kills + 1, step, float("inf")
        time.sleep(SECONDS_BETWEEN_LOOKS)
    wait_for(lambda: max(killed.checkpoints(), default=-1) > newest)
    return kills


def _judged(calm: SoakedRun, killed: SoakedRun, kills: int, seconds: float) -> str:
    """The fault of a soak, in words; prints the figures."""
    faults = []
    for run in (calm, killed):
        looked_at = {role: seen for role, seen in sorted(run.seen.items()) if len(seen.times) >= PARTS}
        if run is calm and len(looked_at) < 2 + run.kind.ranks:
            faults.append(f"only {', '.join(looked_at)} of the calm run were there for the warm-up")
        for role, seen in looked_at.items():
            figures = f"{run.output.name} {role}: {seen}"
            print(figures, flush=True)
            if seen.grows:
                faults.append(figures)
        # torch's cache of compiled kernels has the same name each time
        if left := sorted(path.name for path in run.temporary.iterdir() if not path.name.startswith("torchinductor_")):
            faults.append(f"{run.output.name}: {len(left)} temporary files are left, {left[:3]}")
        if run.ranks():
            faults.append(f"{run.output.name}: ranks are left: {run.ranks()}")
    ours, theirs = killed.steps(), calm.steps()
    both = min(len(ours), len(theirs))
    unlike = sum(one[:3] != other[:3] for one, other in zip(ours[:both], theirs[:both], strict=True))
    if unlike or [each[0] for each in ours] != list(range(1, len(ours) + 1)):
        faults.append(f"{unlike} of {both} steps differ")
    goodput, calm_goodput = (sum(each[3] for each in steps) / seconds for steps in (ours, theirs))
    print(
        f"{seconds:,.0f} s, {kills} kills, {len(ours):,} steps, {len(theirs):,} without kills, {both:,} compared; "
        f"goodput {goodput:.1%}, {calm_goodput:.1%} without kills",
        flush=True,
    )
    return "; ".join(faults)
