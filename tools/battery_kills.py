"""Kills, signals, full disks and damaged checkpoints in real runs, compared with an undisturbed run.

The runs train tiny models on CPU ranks of this machine and are started by `planner launch`. Runs that need a fault
inside a rank are jobs of tests/trainer/workers.py. Two runs are equal if the losses and gradient norms of all steps,
and the weights, have equal bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import ExitCode
from planner.plan import plan_to_dict, write_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from planner.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600.0
KILLS_OF_A_RUN = 20
STEPS_BETWEEN_KILLS = 5
RECOVERY_SECONDS = 15.0
CLI = (sys.executable, "-c", "from planner.cli import run; run()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A layout, and its number of hosts, each with its own launcher."""

    layout: str
    hosts: int = 1
    ranks: int = 4


KINDS = (
    Kind(layout="tp=2,pp=2,mbs=2"),
    Kind(layout="dp=2,cp=2,zero=1,mbs=2"),
    Kind(layout="dp=2,zero=3,mbs=2", hosts=2, ranks=2),
)
TWO = Kind(layout="dp=2,zero=1,mbs=2", ranks=2)


@cache
def _tests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trainer_conftest", ROOT / "tests" / "trainer" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plan_of(kind: Kind) -> Plan:
    """A plan of the tests' tiny model."""
    plan: Plan = _tests().tiny_plan(kind.layout)
    changes = {"devices_per_host": kind.ranks // kind.hosts, "hosts": kind.hosts}
    return replace(plan, cluster=plan.cluster.model_copy(update=changes)) if kind.hosts > 1 else plan


# --- runs under `planner launch` ------------------------------------------------------------------------------------


class Run:
    """A run in a folder, with a launcher for each host."""

    address = "127.0.0.1"

    def __init__(self, kind: Kind, folder: Path, name: str, steps: int, *options: str) -> None:
        self.output, self.weights, self.kind = folder / name, folder / f"{name}-weights", kind
        self._plan, self._messages = folder / "plan.json", folder / f"{name}-stderr"
        if not self._plan.exists():
            write_plan(plan_of(kind), self._plan)
        self._words = [*CLI, "launch", str(self._plan), "--output", str(self.output), "--steps", str(steps), *options]
        if kind.hosts > 1:
            self._words += ["--master-addr", self.address, "--master-port", str(free_port())]
        self.launchers = [self.start(number) for number in range(kind.hosts)]

    def start(self, number: int = 0) -> subprocess.Popen[bytes]:
        """The launcher of a host."""
        return self.launch(number)

    def launch(
        self, number: int, *, within: Sequence[str] = (), keep: tuple[int, ...] = (), **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start the launcher of a host behind the words `within`, with open descriptors and environment variables."""
        place = ["--node-rank", str(number)] if self.kind.hosts > 1 else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        words = [*within, *self._words, *place]
        with self._messages.open("ab") as messages:
            return subprocess.Popen(
                words, stdout=subprocess.DEVNULL, stderr=messages, env=environment, pass_fds=keep
            )  # fmt: skip

    def wait(self, seconds: float = SECONDS) -> list[int]:
        """Exit codes of the launchers."""
        end = time.monotonic() + seconds
        return [each.wait(timeout=max(0.0, end - time.monotonic())) for each in self.launchers]

    @property
    def messages(self) -> str:
        """The output of the launchers."""
        return self._messages.read_text(encoding="utf-8", errors="replace")

    def steps_done(self) -> int:
        """The number of lines in the metrics."""
        metrics = self.output / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def checkpoints(self) -> list[int]:
        """Steps that have a checkpoint with its final name."""
        return sorted(int(path.name[5:]) for path in (self.output / "checkpoints").glob("step-*"))

    def ranks(self) -> list[int]:
        """The processes that train: children of torchrun's agent, which has the same command line."""
        found = {process for process, words in _processes() if f"--output={self.output}" in words}
        return sorted(process for process in found if _parent(process) in found)

    def end(self) -> None:
        """Kill the remaining processes of the run."""
        for each in self.launchers:
            each.kill()
            each.wait()
        for process, words in _processes():
            if f"--output={self.output}" in words:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def bits(self) -> tuple[Any, dict[str, str]]:
        """Step, loss and gradient norm of each line, and the hashes of the weights."""
        lines = map(json.loads, (self.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        files = sorted(self.weights.glob("*.safetensors"))
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines], hashes


def _processes() -> list[tuple[int, list[str]]]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append((int(entry.name), (entry / "cmdline").read_bytes().decode().split("\0")))
    return found


def _parent(process: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return 0


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Return when `condition` holds; raises TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing happened in {seconds:.0f} s")
        time.sleep(0.05)


@contextlib.contextmanager
def _run(kind: Kind, folder: Path, name: str, steps: int, *options: str) -> Iterator[Run]:
    run = Run(kind, folder, name, steps, *options)
    try:
        yield run
    finally:
        run.end()


_CALM: dict[tuple[Kind, int], Any] = {}


def calm_bits(kind: Kind, steps: int, *options: str) -> Any:
    """The bits of an undisturbed run."""
    if (kind, steps) not in _CALM:
        with (
            tempfile.TemporaryDirectory() as name,
            _run(kind, Path(name), "calm", steps, "--export", f"{name}/calm-weights", *options) as run,
        ):
            if any(codes := run.wait()):
                raise RuntimeError(f"the run without kills ended with {codes}: {run.messages[-300:]}")
            _CALM[kind, steps] = run.bits()
            assert _CALM[kind, steps][1], "no weights were written"
    return _CALM[kind, steps]


def random_kills(numbers: range) -> Iterator[str]:
    """Up to twenty kills in each run, of random ranks at random steps; a fault of a run is told for its last kill."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(number // KILLS_OF_A_RUN, []).append(number)
    for group, members in groups.items():
        kind, rng = KINDS[group % len(KINDS)], random.Random(f"kills {members}")  # noqa: S311 - no secret
        kills = len(members)
        fault = told(lambda kind=kind, rng=rng, kills=kills: _killed_run(kind, rng, kills))  # type: ignore[misc]
        yield from [""] * (len(members) - 1)
        yield fault and f"{kind.layout}: {fault}"


def told(attempt: Callable[[], str]) -> str:
    """The fault that an attempt reports. An error of the run or machine counts as a fault; other errors are raised."""
    try:
        return attempt()
    except (TimeoutError, subprocess.TimeoutExpired, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def _killed_run(kind: Kind, rng: random.Random, kills: int) -> str:
    steps, save = kills * STEPS_BETWEEN_KILLS + STEPS_BETWEEN_KILLS, ("--checkpoint-every", "3")
    wanted = calm_bits(kind, steps, *save)
    with (
        tempfile.TemporaryDirectory() as name,
        _run(kind, Path(name), "killed", steps, "--export", f"{name}/killed-weights", *save) as run,
    ):
        for kill in range(kills):
            goal = kill * STEPS_BETWEEN_KILLS + rng.randint(1, STEPS_BETWEEN_KILLS)
            wait_for(lambda goal=goal: run.steps_done() >= goal and len(run.ranks()) == kind.ranks)  # type: ignore[misc]
            victim = rng.choice(run.ranks())
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda victim=victim: victim not in run.ranks())  # type: ignore[misc]
        return ended(run, wanted)


def ended(run: Run, wanted: Any) -> str:
    """Wait until a run is done; returns its difference from `calm_bits`, or what it left behind."""
    codes = run.wait()
    if any(codes):
        return f"ended with {codes}: {run.messages[-300:]!r}"
    found = run.bits()
    if found[0] != wanted[0]:
        unlike = sum(one != other for one, other in zip(found[0], wanted[0], strict=False))
        return f"{unlike} of {len(wanted[0])} steps differ, {len(found[0])} were done"
    return ("" if found[1] == wanted[1] else "the weights differ") or (
        f"ranks are left: {run.ranks()}" if run.ranks() else ""
    )


def stopped_ranks(numbers: range) -> Iterator[str]:
    """After SIGSTOP of a random rank, the launcher notices its silence, and the run continues with equal bits."""
    for number in numbers:
        yield told(lambda number=number: _disturbed(number, _stop))  # type: ignore[misc]


def _stop(run: Run, rng: random.Random) -> str:
    victim = rng.choice(run.ranks())
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: not Path(f"/proc/{victim}").exists(), 60)
    return "" if "has not moved for" in run.messages else "nothing was said"


def terminations(numbers: range) -> Iterator[str]:
    """After SIGTERM of the launcher the run is saved with exit code 75, and the next run loses no step."""
    for number in numbers:
        yield told(lambda number=number: _disturbed(number, _terminate))  # type: ignore[misc]


def _terminate(run: Run, rng: random.Random) -> str:
    time.sleep(rng.uniform(0, 0.5))
    run.launchers[0].send_signal(rng.choice((signal.SIGTERM, signal.SIGUSR1)))
    codes = run.wait()
    status = json.loads((run.output / "status.json").read_text(encoding="utf-8"))
    done = run.steps_done()
    if codes != [ExitCode.PREEMPTED] or status["state"] != "saved" or status["step"] != done:
        return f"ended with {codes}, {status} after {done} steps"
    run.launchers[0] = run.start()
    return ""


def _disturbed(number: int, disturb: Callable[[Run, random.Random], str]) -> str:
    rng, steps = random.Random(f"disturbed {number}"), 400  # noqa: S311 - no secret
    save = ("--checkpoint-every", "5")
    wanted = calm_bits(TWO, steps, *save)
    with (
        tempfile.TemporaryDirectory() as name,
        _run(TWO, Path(name), "run", steps, "--export", f"{name}/run-weights", *save) as run,
    ):
        goal = rng.randint(6, 150)
        wait_for(lambda: run.steps_done() >= goal and len(run.ranks()) == TWO.ranks)
        return disturb(run, rng) or ended(run, wanted)


def killed_launchers(numbers: range) -> Iterator[str]:
    """After SIGKILL of the launcher its ranks end within 10 s."""
    for _ in numbers:
        yield told(_killed_launcher)


def _killed_launcher() -> str:
    with tempfile.TemporaryDirectory() as name, _run(TWO, Path(name), "run", 100_000) as run:
        wait_for(lambda: run.steps_done() > 2)
        run.launchers[0].kill()
        run.launchers[0].wait()
        wait_for(lambda: not run.ranks(), 10)
    return ""


def taken_ports(numbers: range) -> Iterator[str]:
    """A run starts although another process listens on torchrun's usual port."""
    for _ in numbers:
        yield told(_taken_port)


def _taken_port() -> str:
    with tempfile.TemporaryDirectory() as name, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 29500))
        other.listen()
        with _run(TWO, Path(name), "run", 3) as run:
            codes = run.wait()
            return "" if codes == [0] and run.steps_done() == 3 else f"ended with {codes}: {run.messages[-300:]!r}"


def second_launchers(numbers: range) -> Iterator[str]:
    """A second launcher in the folder of a running run is refused."""
    with tempfile.TemporaryDirectory() as name, _run(TWO, Path(name), "run", 100_000) as run:
        wait_for(lambda: run.steps_done() > 2)
        for _ in numbers:
            code, before = run.start().wait(timeout=SECONDS), run.messages
            yield "" if code == ExitCode.ENVIRONMENT and "under way" in before else f"ended with {code}"


def recoveries(numbers: range) -> Iterator[str]:
    """Seconds from the kill of a rank to the first new step, in one run whose ranks are killed repeatedly."""
    with tempfile.TemporaryDirectory() as name, _run(TWO, Path(name), "run", 100_000, "--checkpoint-every", "3") as run:
        for number in numbers:
            yield told(lambda number=number: _recovery(run, number))  # type: ignore[misc]


def _recovery(run: Run, number: int) -> str:
    start = run.steps_done()
    wait_for(lambda: run.steps_done() > start + 6 and len(run.ranks()) == TWO.ranks)
    victim = random.Random(f"recovery {number}").choice(run.ranks())  # noqa: S311 - no secret
    os.kill(victim, signal.SIGKILL)
    began, done = time.monotonic(), run.steps_done()
    wait_for(lambda: victim not in run.ranks() and run.steps_done() > done + 1)  # it may have been writing a line
    seconds = time.monotonic() - began
    took = f"{seconds:.1f} s at a load of {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"case {number}: {took}", flush=True)
    return "" if seconds <= RECOVERY_SECONDS else took


# --- faults inside a rank ---------------------------------------------------------------------------------------------


class Workers:
    """Ranks forked from one process, so that torch is imported once; the error of a job is returned as text."""

    def __init__(self) -> None:
        program = [sys.executable, str(ROOT / "tests" / "trainer" / "workers.py")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._server = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip

    def train(self, plan: Plan, output: Path, **options: Any) -> str:
        """Train; returns an empty text, or the error with which the job ended."""
        assert self._server.stdin
        assert self._server.stdout
        job = {"kind": "train", "plan": plan_to_dict(plan), "output": str(output), "steps": 8, "checkpoint_every": 4}
        self._server.stdin.write(json.dumps(job | options) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        if "error" in answer:
            return str(answer["error"])
        return "" if answer["result"] == 0 else f"exit code {answer['result']}"

    def close(self) -> None:
        """End the server."""
        self._server.communicate(timeout=60)


def _losses(output: Path) -> dict[int, tuple[float, float]]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


def _checkpoint(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step-{step:08d}"


@contextlib.contextmanager
def _finished() -> Iterator[tuple[Workers, Plan, Path]]:
    """Workers, a plan, and a run of it: 8 steps, with checkpoints after 4 and 8."""
    plan, workers = _tests().tiny_plan("dp=2,zero=1,mbs=2", "tied-llama"), Workers()
    try:
        with tempfile.TemporaryDirectory() as name:
            if fault := workers.train(plan, Path(name) / "whole"):
                raise RuntimeError(fault)
            yield workers, plan, Path(name) / "whole"
    finally:
        workers.close()


def _copies(numbers: range, attempt: Callable[[Workers, Plan, Path, Path, int], str]) -> Iterator[str]:
    """For each number, the fault of an attempt on a copy of the finished run, in words."""
    with _finished() as (workers, plan, whole):
        for number in numbers:
            output = whole.parent / f"copy-{number}"
            shutil.copytree(whole, output)
            yield attempt(workers, plan, whole, output, number)
            shutil.rmtree(output)


def _goes_on(workers: Workers, plan: Plan, whole: Path, output: Path) -> str:
    if fault := workers.train(plan, output):
        return fault[:300]
    if _losses(output) != _losses(whole):
        return "losses differ"
    return "a draft is left" if list((output / "checkpoints").glob(".*")) else ""


MOMENTS = ("before its shard", "before the hashes", "before the state", "before the manifest", "before the new name")


def kills_in_saves(numbers: range) -> Iterator[str]:
    """After a kill during a save the earlier checkpoint is used, the draft is removed, and losses are equal."""

    def attempt(workers: Workers, plan: Plan, whole: Path, output: Path, number: int) -> str:
        moment = MOMENTS[number % len(MOMENTS)]
        rank = (number // len(MOMENTS)) % 2 if moment in MOMENTS[:2] else 0  # only rank 0 commits
        shutil.rmtree(_checkpoint(output, 8))
        workers.train(plan, output, dying_rank=rank, die=moment)
        left = sorted(path.name for path in (output / "checkpoints").iterdir())
        if left != [".step-00000008.tmp", "step-00000004"]:
            return f"rank {rank} killed {moment}: there are {left}"
        fault = _goes_on(workers, plan, whole, output)
        return fault and f"rank {rank} killed {moment}: {fault}"

    yield from _copies(numbers, attempt)


def full_disks(numbers: range) -> Iterator[str]:
    """With a limit on file sizes instead of a full disk, the earlier checkpoint is intact and the run continues."""

    def attempt(workers: Workers, plan: Plan, whole: Path, output: Path, number: int) -> str:
        shutil.rmtree(_checkpoint(output, 8))
        said = workers.train(plan, output, file_limit=random.Random(number).randrange(2_000, 60_000))  # noqa: S311
        if "cannot save" not in said or "are free there" not in said:
            return f"it said {said[:200]!r}"
        finished = [path.name for path in (output / "checkpoints").glob("step-*")]
        return _goes_on(workers, plan, whole, output) if finished == ["step-00000004"] else f"there are {finished}"

    yield from _copies(numbers, attempt)


def _damage(kind: int, folder: Path, rng: random.Random) -> str:
    shards = sorted(folder.glob("*.distcp"))
    victim = rng.choice([*shards, folder / ".metadata", folder / "state.json", folder / "manifest.json"])
    content = bytearray(victim.read_bytes())
    at = rng.randrange(len(content))
    match kind:
        case 0:
            content[at] ^= 1 << rng.randrange(8)
        case 1:
            del content[at:]
        case 2:
            content.clear()
        case 3:
            victim.unlink()
            return f"{victim.name} removed"
        case 4:
            content[at : at + 20] = rng.randbytes(20)
        case 5:
            (folder / "__9_0.distcp").write_bytes(bytes(content))
            return "a shard added"
        case _:
            victim, content = folder / "manifest.json", bytearray(rng.choice((b"{}", b"[1, 2]", b"", b"[" * 10**5)))
    if victim.read_bytes() == bytes(content):
        content += b"x"
    victim.write_bytes(bytes(content))
    return f"{victim.name} changed at {at}, kind {kind}"


def damaged_checkpoints(numbers: range) -> Iterator[str]:
    """The output names the rejected checkpoint and the one used instead, and losses are equal."""

    def attempt(workers: Workers, plan: Plan, whole: Path, output: Path, number: int) -> str:
        rng, messages = random.Random(f"damage {number}"), output.parent / f"stderr-{number}"  # noqa: S311
        what = _damage(number % 7, _checkpoint(output, 8), rng)
        if fault := workers.train(plan, output, stderr=str(messages)):
            return f"{what}: {fault[:300]}"
        told = [line for line in messages.read_text(encoding="utf-8").splitlines() if "is rejected" in line]
        if len(told) != 1:
            return f"{what}: {len(told)} lines about it"
        return "" if _losses(output) == _losses(whole) else f"{what}: losses differ"

    yield from _copies(numbers, attempt)


class _Attack:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, mark: Path, kind: int) -> None:
        self._call: tuple[Any, tuple[Any, ...]] = (
            (Path.touch, (mark,)),
            (os.system, (f"touch {mark}",)),
            (exec, (f"open({str(mark)!r}, 'w')",)),
            (subprocess.call, (["touch", str(mark)],)),
            (open, (str(mark), "w")),
        )[kind]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


def attacks(numbers: range) -> Iterator[str]:
    """Code in the metadata or in a shard, with a matching manifest, is refused and never runs."""

    def attempt(workers: Workers, plan: Plan, _: Path, output: Path, number: int) -> str:
        rng, mark = random.Random(f"attack {number}"), output.parent / f"ran-{number}"  # noqa: S311 - no secret
        attack, protocol = _Attack(mark, number // 2 % 5), rng.choice((0, 2, 4, 5))
        harmful = pickle.dumps(OrderedDict(a=attack) if rng.random() < 0.5 else attack, protocol=protocol)
        pickle.loads(harmful)  # noqa: S301 - our own attack: it must work where nothing refuses it
        if not mark.exists():
            return "the attack does not work"
        mark.unlink()
        folder = _checkpoint(output, 8)
        victim = folder / (".metadata" if number % 2 else "__0_0.distcp")
        whole = victim.read_bytes()
        victim.write_bytes(harmful if number % 2 else harmful + whole[len(harmful) :])
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest[victim.name] = hashlib.sha256(victim.read_bytes()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        said = workers.train(plan, output)
        if mark.exists():
            return f"the code in {victim.name} ran"
        return "" if "EnvironmentProblem: cannot load" in said else f"{victim.name}: it said {said[:200]!r}"

    yield from _copies(numbers, attempt)
