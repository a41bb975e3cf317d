"""Run commands of the planner in forks of a process that has already imported it: no command waits for imports.

A fork has its own memory and descriptors and runs the code of `python -m planner`. A job is therefore as independent of
earlier jobs as a process of its own. Run as a program, this file is the process that forks; it needs no package except
the planner's dependencies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300
WARM_UP = ("plan", "tiny-gpt", "dgx-a100", "--gpus", "8", "--global-batch", "8", "--json")


class Planner:
    """The planner under an interpreter, with further environment variables."""

    def __init__(self, python: str = sys.executable, **environment: str) -> None:
        self.name = " ".join([python, *(f"{key}={value}" for key, value in environment.items())])
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **environment}
        self._server = subprocess.Popen(
            [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )

    def run(self, words: Sequence[str], folder: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder. After `SECONDS` the alarm kills it; its exit code is then -SIGALRM."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps([list(words), str(folder)]) + "\n")
        self._server.stdin.flush()
        code, output, messages = json.loads(self._server.stdout.readline())
        return subprocess.CompletedProcess(words, code, output, messages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.communicate()


def _in_a_fork(words: Sequence[str], folder: str) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as messages:
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(messages.fileno(), 2)
            sys.argv = ["planner", *words]
            from planner.__main__ import start

            start()
        _, status = os.waitpid(child, 0)
        texts = []
        for stream in (output, messages):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
        return os.waitstatus_to_exitcode(status), texts[0], texts[1]


def _serve() -> None:
    """Run the command of each input line (words and folder), and print its exit code, output and messages."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from planner.cli import main

    main(WARM_UP)
    for line in sys.stdin:
        answers.write(json.dumps(_in_a_fork(*json.loads(line))) + "\n")


if __name__ == "__main__":
    _serve()
