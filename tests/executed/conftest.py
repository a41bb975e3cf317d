"""Runs the script that `planner emit` wrote, with ranks that are forks of one process for each program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
RUNNERS = {"torch": "run_torch.py", "accelerate": "run_hugging_face.py", "deepspeed": "run_hugging_face.py"}
RUNNERS["megatron"] = "run_megatron.py"
STARTER = f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv, dict(os.environ)]))\n"
"""Stands for torchrun and accelerate: tells how run.sh calls it."""


class Runner:
    """A process that answers jobs, one after the other."""

    def __init__(self, program: str) -> None:
        words = [sys.executable, str(HERE / program)]
        own = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=own
        )

    def ask(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError("\n".join(answer.values()))
        return answer


@pytest.fixture(scope="session")
def ask() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """`ask(program, job)`: what each rank saw; jobs of one `key` have one answer."""
    runners: dict[str, Runner] = {}
    known: dict[str, Any] = {}

    def answer(program: str, job: dict[str, Any], key: str = "") -> list[dict[str, Any]]:
        name = RUNNERS[program]
        if name not in runners:
            runners[name] = Runner(name)
        found = known.get(key) or runners[name].ask(job)
        if key:
            known[key] = found
        return found

    yield answer
    for each in runners.values():
        assert each.process.stdin
        assert each.process.stdout
        each.process.stdin.close()
        each.process.wait(timeout=120)
        each.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Callable[[Path], tuple[list[str], dict[str, str]]]:
    """`start(folder)`: the words and new variables with which run.sh calls torchrun or accelerate."""
    for name in ("torchrun", "accelerate"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(STARTER, encoding="utf-8")
        path.chmod(0o755)

    def called(folder: Path) -> tuple[list[str], dict[str, str]]:
        own = {
            **os.environ,
            "MEGATRON_PATH": os.environ.get("MEGATRON_LM", ""),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        }
        done = subprocess.run(["bash", folder / "run.sh"], env=own, capture_output=True, text=True, check=True)
        words, variables = json.loads(done.stdout)
        return words, {k: v for k, v in variables.items() if k not in {*own, "SHLVL", "_", "OLDPWD", "PWD"}}

    return called
