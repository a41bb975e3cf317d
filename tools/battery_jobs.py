"""Random commands as processes: jobs, interrupts, hash seeds, secrets and scripts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from planner.specs.by_name import engine_names, model_names
from planner.specs.cluster_documents import cluster_names

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300
SECRET = "canary-7f3a9c51"  # noqa: S105 - planted, to be looked for
STARTERS = ("torchrun", "slurm", "kubeflow", "skypilot")
LAYOUTS = ("tp=2", "tp=8,pp=4,mbs=1", "zero=3,mbs=1", "pp=3", "cp=2,tp=2", "ep=8", "pp=2,schedule=zbv", "tp=3", "dp=7")


def _planner(
    words: list[str], folder: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "planner", *words], cwd=folder, env=_environment(**environment), capture_output=True,
        text=True, check=False, timeout=SECONDS,
    )  # fmt: skip


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **more}


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
        ["--set", "device.memory=x2"], ["--set", rng.choice(("cluster.price=2USD/h", "training.optimizer=adafactor"))],
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
    """The fault in how a command ended."""
    if done.returncode in codes and "Traceback" not in done.stderr:
        return ""
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"exit code {done.returncode}, {last[:160]!r}: planner {' '.join(words)}"


def random_jobs(numbers: range) -> Iterator[str]:
    """Random jobs, which must end with the exit code of a result or of a mistake, and without a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            words = _command(random.Random(f"job {number}"))  # noqa: S311 - no secret
            try:
                yield fault_of(_planner(words, folder), words)
            except subprocess.TimeoutExpired:
                yield f"more than {SECONDS} s: planner {' '.join(words)}"


def interrupts(numbers: range) -> Iterator[str]:
    """SIGINT or SIGTERM after a random time: the exit code must be 130, 143 or the command's own; no files remain."""
    for number in numbers:
        rng = random.Random(f"interrupt {number}")  # noqa: S311 - no secret
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
            words = [
                "plan",
                "llama3-405b",
                "dgx-h100",
                "--nodes",
                "2048",
                "--seq-len",
                "8192",
                "--global-batch",
                "2048",
            ]
            process = subprocess.Popen(
                [sys.executable, "-m", "planner", *words, "-o", "p.json"], cwd=folder, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, env=_environment(TMPDIR=scratch), start_new_session=True,
            )  # fmt: skip
            time.sleep(rng.uniform(0.3, 8.0))
            number_of_signal = rng.choice((signal.SIGINT, signal.SIGTERM))
            process.send_signal(number_of_signal)
            _, messages = process.communicate(timeout=SECONDS)
            expected = (0, 3, 130 if number_of_signal == signal.SIGINT else 143)
            left = [path.name for path in Path(scratch).iterdir()] + [
                path.name for path in Path(folder).iterdir() if path.name != "p.json"
            ]
            if process.returncode not in expected or "Traceback" in messages:
                yield f"exit code {process.returncode} after {number_of_signal.name}: {messages[-160:]!r}"
            else:
                yield f"left behind: {left[:3]}" if left else ""


def hash_seeds(numbers: range) -> Iterator[str]:
    """The same document must result under another PYTHONHASHSEED, and under every other available Python."""
    pythons = [sys.executable, *other_pythons()]
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            rng = random.Random(f"seed {number}")  # noqa: S311 - no secret
            words = ["plan", *[each for each in job_words(rng) if each != "--json"], "--json"]
            found = {}
            for seed, python in (
                ("0", sys.executable),
                (str(1 + number), sys.executable),
                *(("0", p) for p in pythons[1:]),
            ):
                done = subprocess.run(
                    [python, "-m", "planner", *words], cwd=folder, env=_environment(PYTHONHASHSEED=seed),
                    capture_output=True, text=True, check=False, timeout=SECONDS,
                )  # fmt: skip
                found[f"{python} with PYTHONHASHSEED={seed}"] = (done.returncode, done.stdout)
            one, *others = found.items()
            unlike = [name for name, other in others if other != one[1]]
            yield f"{unlike[0]} differs: planner {' '.join(words)}" if unlike else ""


def other_pythons() -> list[str]:
    """Interpreters named in BATTERY_PYTHONS, separated by colons: other versions of Python or of NumPy."""
    return [each for each in os.environ.get("BATTERY_PYTHONS", "").split(os.pathsep) if each]


def secrets(numbers: range) -> Iterator[str]:
    """A planted secret must not appear in any output or file."""
    for number in numbers:
        rng = random.Random(f"secret {number}")  # noqa: S311 - no secret
        with tempfile.TemporaryDirectory() as folder:
            words = ["tiny-gpt", "dgx-a100", "--gpus", str(rng.choice((1, 2, 4, 8))), "--global-batch", "8"]
            planted = {"WANDB_API_KEY": SECRET, "HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}
            runs = [
                _planner(["plan", *words, "-o", "p.json"], folder, **planted),
                _planner(["explain", "p.json", "--html", "p.html"], folder, **planted),
                _planner(["emit", "p.json", "--on", rng.choice(STARTERS), "-o", "out"], folder, **planted),
                _planner(["launch", "p.json", "--dry-run"], folder, **planted),
            ]
            texts = [text for run in runs for text in (run.stdout, run.stderr)]
            texts += [path.read_text(errors="replace") for path in Path(folder).rglob("*") if path.is_file()]
            faults = [fault_of(run, words, codes=(0,)) for run in runs]
            yield (
                "the secret is in an output"
                if any(SECRET in text for text in texts)
                else next(filter(None, faults), "")
            )


def scripts(numbers: range) -> Iterator[str]:
    """Emitted scripts must pass `bash -n` and shellcheck."""
    for number in numbers:
        rng = random.Random(f"script {number}")  # noqa: S311 - no secret
        with tempfile.TemporaryDirectory() as folder:
            yield _script_fault(rng, folder)


def _script_fault(rng: random.Random, folder: str) -> str:
    planned = None
    while planned is None or planned.returncode == 3:  # does not fit: there is no script
        model = rng.choice(("tiny-gpt", "llama3-8b", "llama2-7b", "mixtral-8x7b", "gpt3-175b"))
        length = "256" if model == "tiny-gpt" else "2048"  # its longest
        words = [model, "dgx-h100", "--nodes", str(rng.choice((1, 2, 8, 64)))]
        words += ["--global-batch", "1024", "--seq-len", length]
        words += ["--engine", rng.choice(("torch", "megatron", "deepspeed", "fsdp", "megatron-bridge"))]
        planned = _planner(["plan", *words, "-o", "p.json"], folder)
    emitted = _planner(["emit", "p.json", "--on", rng.choice(STARTERS), "-o", "out"], folder)
    faults = [fault_of(each, words, codes=(0,)) for each in (planned, emitted)]
    return next(filter(None, faults), "") or _shell_faults(Path(folder))


def _shell_faults(folder: Path) -> str:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.suffix in (".sh", ".sbatch") or path.read_bytes()[:12].startswith(b"#!/bin/bash")):
            for command in (["bash", "-n"], ["shellcheck", "--severity=warning"]):
                done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
                if done.returncode:
                    return f"{command[0]} of {path.name}: {(done.stdout + done.stderr)[:200]!r}"
    return ""
