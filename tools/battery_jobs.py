"""Random commands: jobs, interrupts, hash seeds and other Pythons, secrets, and scripts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from battery_commands import ROOT, SECONDS, Planner

from planner.specs.by_name import engine_names, model_names
from planner.specs.cluster_documents import cluster_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAWS = 20
AVX512 = "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
"""NumPy's names of the features: X86_V4 since 2.4, the others in earlier versions."""
SECRET = "canary-7f3a9c51"  # noqa: S105 - planted, to be looked for
STARTERS = ("torchrun", "slurm", "kubeflow", "skypilot")
LAYOUTS = ("tp=2", "tp=8,pp=4,mbs=1", "zero=3,mbs=1", "pp=3", "cp=2,tp=2", "ep=8", "pp=2,schedule=zbv", "tp=3", "dp=7")


def job_words(rng: random.Random) -> list[str]:
    """Model, cluster and options of a job, most of them legal."""
    words = [rng.choice(model_names()), rng.choice(cluster_names())]
    words += [
        rng.choice(("--nodes", "--gpus")),
        str(rng.choice((1, 2, 3, 4, 6, 7, 8, 13, 16, 32, 61, 64, 100, 128, 384))),
    ]
    words += ["--global-batch", str(rng.choice((1, 7, 8, 16, 48, 64, 127, 256, 1024, 1536, 4096)))]
    words += ["--seq-len", rng.choice(("128", "1000", "2048", "4096", "8k", "32k", "128k"))]
    options = (
        ["--engine", rng.choice(engine_names())], ["--precision", rng.choice(("fp32", "fp16", "bf16", "fp8", "fp4"))],
        ["--failures"], ["--risk", rng.choice(("1%", "20%", "0.5"))], ["--headroom", rng.choice(("0", "5%", "40%"))],
        ["--allow-tp-across-nodes"], ["--allow-offload"], ["--set", "training.tokens=1e11"], ["--json"],
        ["--set", rng.choice(("cluster.price=2USD/h", "training.optimizer=adafactor", "device.memory=141GiB"))],
    )  # fmt: skip
    for option in rng.sample(options, rng.randrange(4)):
        words += option
    return words


def _command(rng: random.Random) -> list[str]:
    match rng.randrange(8):
        case 0:
            return ["explain", *job_words(rng), "--layout", rng.choice(LAYOUTS)]
        case 1:
            question = (
                ["--why-not", rng.choice(LAYOUTS)],
                ["--what-if", "device.memory=x2"],
                ["--schedules"],
                ["--batch"],
            )
            return ["explain", *job_words(rng), "--layout", rng.choice(LAYOUTS), *rng.choice(question)]
        case 2:
            return ["plan", *job_words(rng), rng.choice(("--pin", "--forbid")), rng.choice(LAYOUTS)]
        case _:
            return ["plan", *job_words(rng)]


def fault_of(done: subprocess.CompletedProcess[str], words: list[str], codes: tuple[int, ...] = (0, 2, 3)) -> str:
    """The fault of a finished command, in words; empty for an expected exit code without a traceback."""
    if done.returncode in codes and "Traceback" not in done.stderr:
        return ""
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"exit code {done.returncode}, {last[:160]!r}: planner {' '.join(words)}"


def planned(
    planner: Planner, folder: str, draw: Callable[[], list[str]]
) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """Draw commands until one is not refused, or shows a fault; returns this command and its result."""
    for _ in range(DRAWS):
        words = draw()
        done = planner.run(words, folder)
        if done.returncode != 2 or fault_of(done, words):
            break
    return words, done


def random_jobs(numbers: range) -> Iterator[str]:
    """Random commands end with the exit code of a result or of a mistake, and without a traceback.

    If a job is refused, another job is drawn.
    """
    with tempfile.TemporaryDirectory() as folder, Planner() as planner:
        for number in numbers:
            rng = random.Random(f"job {number}")  # noqa: S311 - no secret
            words, done = planned(planner, folder, lambda rng=rng: _command(rng))  # type: ignore[misc]
            yield fault_of(done, words)


PLAN = ("plan", "llama3-405b", "dgx-h100", "--nodes", "2048", "--seq-len", "8192", "--global-batch", "2048")


def interrupts(numbers: range) -> Iterator[str]:
    """SIGINT or SIGTERM at a random moment of a plan leaves nothing behind.

    The exit code is 130 or 143, or 0 if the plan ended before the signal.
    """
    seconds = 0.0  # duration of a plan that ends by itself
    for number in numbers:
        rng = random.Random(f"interrupt {number}")  # noqa: S311 - no secret
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
            if not seconds:
                began = time.monotonic()
                _start(folder, scratch).communicate(timeout=SECONDS)
                seconds = time.monotonic() - began
                Path(folder, "p.json").unlink()
            process = _start(folder, scratch)
            time.sleep(rng.uniform(0.3, seconds))
            sent = rng.choice((signal.SIGINT, signal.SIGTERM))
            process.send_signal(sent)
            _, messages = process.communicate(timeout=SECONDS)
            expected = (0, 128 + sent, -sent)  # -sent: the signal came before Python handles signals
            left = [path.name for each in (scratch, folder) for path in Path(each).iterdir() if path.name != "p.json"]
            if process.returncode not in expected or "Traceback" in messages:
                yield f"exit code {process.returncode} after {sent.name}: {messages[-160:]!r}"
            else:
                yield f"left behind: {left[:3]}" if left else ""


def _start(folder: str, scratch: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "planner", *PLAN, "-o", "p.json"], cwd=folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "TMPDIR": scratch},
    )  # fmt: skip


def hash_seeds(numbers: range) -> Iterator[str]:
    """The document is the same under another PYTHONHASHSEED without AVX-512, and under each of the other Pythons."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        first, *others = [
            stack.enter_context(Planner(python, PYTHONHASHSEED="0")) for python in (sys.executable, *other_pythons())
        ]
        for number in numbers:
            rng = random.Random(f"seed {number}")  # noqa: S311 - no secret
            words, one = planned(
                first,
                folder,
                lambda rng=rng: ["plan", *[each for each in job_words(rng) if each != "--json"], "--json"],  # type: ignore[misc]
            )
            with Planner(PYTHONHASHSEED=str(1 + number), NPY_DISABLE_CPU_FEATURES=AVX512) as seeded:
                unlike = [each.name for each in (seeded, *others) if not _alike(one, each.run(words, folder))]
            yield f"{unlike[0]} differs: planner {' '.join(words)}" if unlike else ""


def _alike(one: subprocess.CompletedProcess[str], other: subprocess.CompletedProcess[str]) -> bool:
    return (one.returncode, one.stdout) == (other.returncode, other.stdout)


def other_pythons() -> list[str]:
    """Interpreters that BATTERY_PYTHONS lists, separated by colons: other versions of Python or of NumPy."""
    return [each for each in os.environ.get("BATTERY_PYTHONS", "").split(os.pathsep) if each]


def secrets(numbers: range) -> Iterator[str]:
    """A planted secret appears in no output and in no file."""
    with Planner(**dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), SECRET)) as planner:
        for number in numbers:
            rng = random.Random(f"secret {number}")  # noqa: S311 - no secret
            with tempfile.TemporaryDirectory() as folder:
                words = ["tiny-gpt", "dgx-a100", "--gpus", str(rng.choice((1, 2, 4, 8))), "--global-batch", "8"]
                commands = (
                    ["plan", *words, "-o", "p.json"],
                    ["explain", "p.json", "--html", "p.html"],
                    ["emit", "p.json", "--on", rng.choice(STARTERS), "-o", "out"],
                    ["launch", "p.json", "--dry-run"],
                )
                runs = [planner.run(each, folder) for each in commands]
                texts = [text for run in runs for text in (run.stdout, run.stderr)]
                texts += [path.read_text(errors="replace") for path in Path(folder).rglob("*") if path.is_file()]
                faults = [fault_of(run, words, codes=(0,)) for run in runs]
                told = "the secret is in an output" if any(SECRET in text for text in texts) else ""
                yield told or next(filter(None, faults), "")


def scripts(numbers: range) -> Iterator[str]:
    """Emitted scripts pass `bash -n` and shellcheck."""
    with Planner() as planner:
        for number in numbers:
            rng = random.Random(f"script {number}")  # noqa: S311 - no secret
            with tempfile.TemporaryDirectory() as folder:
                yield _script_fault(planner, rng, folder)


def _script_fault(planner: Planner, rng: random.Random, folder: str) -> str:
    planned = None
    while planned is None or planned.returncode == 3:  # without a fitting plan there is no script
        model = rng.choice(("tiny-gpt", "llama3-8b", "llama2-7b", "mixtral-8x7b", "gpt3-175b"))
        length = "256" if model == "tiny-gpt" else "2048"  # the longest that the model allows
        words = [model, "dgx-h100", "--nodes", str(rng.choice((1, 2, 8, 64)))]
        words += ["--global-batch", "1024", "--seq-len", length]
        words += ["--engine", rng.choice(("torch", "megatron", "deepspeed", "fsdp", "megatron-bridge"))]
        planned = planner.run(["plan", *words, "-o", "p.json", "--force"], folder)
    emitted = planner.run(["emit", "p.json", "--on", rng.choice(STARTERS), "-o", "out"], folder)
    faults = [fault_of(each, words, codes=(0,)) for each in (planned, emitted)]
    return next(filter(None, faults), "") or _shell_faults(Path(folder))


_SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))  # this environment's, even if it is not on PATH


def _shell_faults(folder: Path) -> str:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.suffix in (".sh", ".sbatch") or path.read_bytes()[:12].startswith(b"#!/bin/bash")):
            for command in (["bash", "-n"], [_SHELLCHECK, "--severity=warning"]):
                done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
                if done.returncode:
                    return f"{command[0]} of {path.name}: {(done.stdout + done.stderr)[:200]!r}"
    return ""
