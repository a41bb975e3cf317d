"""Slow and dead links between two hosts; each host is a network namespace, and this process is the cable between them.

A host has one network interface, a TUN device. This process reads every packet that leaves a device, delays it as the
link would, and writes it to the other host's device; a lost packet is never written. Rendezvous, stores and gloo's
connections all use this path, and TCP sees what it would see on a real link: lost packets and silence, but no closed
connections. `unshare` and `ip` make the namespaces; where the system permits it, no privileges are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from battery_kills import Kind, Run, calm_bits, ended, told, wait_for

from planner.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = "link0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PACKET_BYTES = 9000
SECONDS_QUEUED = 0.5
"""Packets that would wait longer for their turn on the link are dropped, as in a switch with full buffers."""

TWO_HOSTS = Kind(layout="dp=2,zero=1,mbs=2", hosts=2, ranks=2)
STEPS = 60
SAVE = ("--checkpoint-every", "5")
AT_ONCE = 8
"""Number of cases that run at the same time; most of the time a case only waits."""

NOTICED_SECONDS = 330.0
"""Five minutes, the trainer's limit for a collective, and half a minute until the launcher reports a restart."""

ENDED_SECONDS = 3600.0
"""The limit of a collective and three rendezvous of ten minutes, with a margin."""


@dataclass(slots=True)
class Way:
    """One direction of a link."""

    delay: float = 0.0
    bytes_per_second: float = 1e12
    lost: float = 0.0
    free_at: float = 0.0


class Link:
    """Two hosts and the link between them; ways[n] is the direction that begins at host n."""

    def __init__(self, rng: random.Random) -> None:
        self.ways = (Way(), Way())
        self._rng, self._devices = rng, {}  # type: ignore[var-annotated]
        self.packets = 0  # number of packets read, including lost packets
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()

    def set(self, *, lost: float = 0.0, delay: float = 0.0, rate: float = 1e12, of: tuple[int, ...] = (0, 1)) -> None:
        """Set the treatment of future packets: share of lost packets, delay in seconds, rate in bytes per second."""
        for number in of:
            way = self.ways[number]
            way.lost, way.delay, way.bytes_per_second = lost, delay, rate

    def attach(self, number: int, device: int) -> None:
        """Give host `number` this TUN device; a restarted host has a new device."""
        self._loop.call_soon_threadsafe(self._attach, number, device)

    def _attach(self, number: int, device: int) -> None:
        if (old := self._devices.get(number)) is not None:
            self._loop.remove_reader(old)
            os.close(old)
        os.set_blocking(device, False)
        self._devices[number] = device
        self._loop.add_reader(device, self._carry, number)

    def _carry(self, number: int) -> None:
        """Read the packets that host `number` has sent, and deliver each after its delay."""
        way, device = self.ways[number], self._devices[number]
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    packet = os.read(device, 65536)
                except OSError as error:
                    if isinstance(error, BlockingIOError):
                        raise
                    self._loop.remove_reader(device)  # the host is gone
                    return
                now = self._loop.time()
                waits = max(0.0, way.free_at - now)
                lost = self._rng.random() < way.lost or waits > SECONDS_QUEUED
                self.packets += 1
                if lost:
                    continue
                way.free_at = now + waits + len(packet) / way.bytes_per_second
                self._loop.call_at(way.free_at + way.delay, self._deliver, 1 - number, packet)

    def _deliver(self, number: int, packet: bytes) -> None:
        if (device := self._devices.get(number)) is not None:
            with contextlib.suppress(OSError):  # the host is gone, or accepts no more packets
                os.write(device, packet)

    def close(self) -> None:
        """Cut the link for good."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for device in self._devices.values():
            os.close(device)


class LinkedRun(Run):
    """A run on two hosts whose only connection is a link; the folder of the run is their shared storage."""

    address = ADDRESSES[0]

    def __init__(self, link: Link, folder: Path, name: str, steps: int, *options: str) -> None:
        self._link = link
        super().__init__(TWO_HOSTS, folder, name, steps, *options)

    def start(self, number: int = 0) -> subprocess.Popen[bytes]:
        """The launcher of a host, in its own namespace, which is connected to the link before the launcher begins."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            unshare = ["unshare", "--user", "--map-root-user", "--net", "--uts"]
            enter = [*unshare, sys.executable, __file__, str(number), str(theirs.fileno())]
            launcher = self.launch(number, within=enter, keep=(theirs.fileno(),))
            theirs.close()
            ours.settimeout(60)
            _, devices, _, _ = socket.recv_fds(ours, 1, 1)
        if not devices:
            launcher.wait()
            raise RuntimeError(f"this machine has no namespace for a host: {self.messages[-300:]}")
        self._link.attach(number, devices[0])
        return launcher


def enter_host(number: int, sock: socket.socket, command: list[str]) -> None:
    """Turn this process into host `number`: make its device in this namespace, pass the device on, run the command."""
    name, (own, other) = f"host-{number}", (ADDRESSES[number], ADDRESSES[1 - number])
    socket.sethostname(name)
    device = os.open("/dev/net/tun", os.O_RDWR)
    tunsetiff, tun, without_header = 0x400454CA, 0x0001, 0x1000
    fcntl.ioctl(device, tunsetiff, struct.pack("16sH22x", DEVICE.encode(), tun | without_header))
    for words in (
        ["addr", "add", own, "peer", other, "dev", DEVICE],
        ["link", "set", DEVICE, "mtu", str(PACKET_BYTES), "addrgenmode", "none", "up"],
        ["link", "set", "lo", "up"],
    ):
        subprocess.run(["ip", *words], check=True)  # noqa: S607
    socket.send_fds(sock, [b"x"], [device])
    sock.close()
    os.close(device)
    os.execvp(command[0], command)  # noqa: S606


# --- cases ------------------------------------------------------------------------------------------------------------


def links(numbers: range) -> Iterator[str]:
    """Five kinds of faults, one after another, at random moments and rates, in random directions."""
    wanted = calm_bits(TWO_HOSTS, STEPS, *SAVE)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda number: told(lambda: _case(number, wanted)), numbers)


def _case(number: int, wanted: object) -> str:
    rng, began = random.Random(f"link {number}"), time.monotonic()  # noqa: S311 - no secret
    attempt = CASES[number % len(CASES)]
    link = Link(rng)
    try:
        with tempfile.TemporaryDirectory() as name:
            run = LinkedRun(link, Path(name), "run", STEPS, "--export", f"{name}/run-weights", *SAVE)
            try:
                fault = attempt(link, run, rng) or ended(run, wanted)
            finally:
                run.end()
    finally:
        link.close()
    seconds = time.monotonic() - began
    print(f"case {number}: {attempt.__name__}, {seconds:.0f} s, {link.packets:,} packets", flush=True)
    return fault and f"{attempt.__name__}: {fault}"


def _slow(link: Link, run: LinkedRun, rng: random.Random) -> str:
    """Delay and throttle the link from the start, sometimes with lost packets: the run only becomes slower."""
    link.set(delay=rng.uniform(0.001, 0.02), rate=rng.uniform(2e6, 2e7), lost=rng.choice((0.0, 0.0, 0.01)))
    return _not_started_again(run)


def _interrupted(link: Link, run: LinkedRun, rng: random.Random) -> str:
    """Interrupt the link for less than a minute: TCP sends again, and the run continues."""
    _cut(link, run, rng)
    time.sleep(rng.uniform(5, 45))
    link.set()
    return _not_started_again(run)


def _interrupted_at_the_start(link: Link, run: LinkedRun, rng: random.Random) -> str:
    """Interrupt the link while the hosts meet, and restore it before they give up."""
    time.sleep(rng.uniform(0, 8))
    link.set(lost=1.0, of=_directions(rng))
    time.sleep(rng.uniform(5, 60))
    link.set()
    return _not_started_again(run)


def _dead_for_a_while(link: Link, run: LinkedRun, rng: random.Random) -> str:
    """Interrupt the link until the ranks give up: the run restarts when the link is back."""
    _cut(link, run, rng)
    wait_for(lambda: "starting again" in run.messages, NOTICED_SECONDS)
    time.sleep(rng.uniform(0, 60))
    link.set()
    return ""


def _dead_for_good(link: Link, run: LinkedRun, rng: random.Random) -> str:
    """Cut the link for good: both launchers exit with 6, and the next run continues from the newest checkpoint."""
    if rng.random() < 0.5:
        _cut(link, run, rng)
    else:
        time.sleep(rng.uniform(0, 8))
        link.set(lost=1.0, of=_directions(rng))
    return _both_end(link, run, [ExitCode.RANK_FAILED] * 2)


def _lost_host(link: Link, run: LinkedRun, rng: random.Random) -> str:
    """Remove host 0 with its link: host 1 waits ten minutes for the next attempt, and ends with exit code 5."""
    if rng.random() < 0.5:
        _cut(link, run, rng)
    else:
        time.sleep(rng.uniform(0, 8))
        link.set(lost=1.0)
    run.launchers[0].kill()
    return _both_end(link, run, [-signal.SIGKILL, ExitCode.ENVIRONMENT])


CASES = (_slow, _interrupted, _interrupted_at_the_start, _dead_for_a_while, _dead_for_good, _lost_host)


def _cut(link: Link, run: LinkedRun, rng: random.Random) -> None:
    """Cut the link at a random step, in one direction or in both."""
    goal = rng.randint(6, STEPS - 10)
    wait_for(lambda: run.steps_done() >= goal)
    link.set(lost=1.0, of=_directions(rng))


def _directions(rng: random.Random) -> tuple[int, ...]:
    return rng.choice(((0, 1), (0, 1), (0,), (1,)))


def _not_started_again(run: LinkedRun) -> str:
    run.wait()
    return "it started again" if "starting again" in run.messages else ""


def _both_end(link: Link, run: LinkedRun, wanted: list[int]) -> str:
    """Wait for both launchers, check their output, restore the link, and start both again."""
    before = run.checkpoints()
    began, codes = time.monotonic(), run.wait(ENDED_SECONDS)
    print(f"ended after {time.monotonic() - began:.0f} s with {codes}", flush=True)
    if codes != wanted:
        return f"ended with {codes}: {run.messages[-300:]!r}"
    if run.ranks():
        return f"ranks are left: {run.ranks()}"
    if max(before, default=0) > max(run.checkpoints(), default=0):
        return f"of the checkpoints {before} there are {run.checkpoints()}"
    link.set()
    run.launchers = [run.start(number) for number in range(TWO_HOSTS.hosts)]
    return ""


if __name__ == "__main__":
    enter_host(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
