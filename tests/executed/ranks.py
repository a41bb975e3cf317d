"""What every runner of emitted programs shares: ranks are forks of one process, which has imported the libraries.

A runner is a program of its own: `python run_NAME.py` reads jobs from stdin, one JSON object a line, and answers each
with a line: a list of what each rank observed, or {"error": ...}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FORK = multiprocessing.get_context("fork")
SECONDS = 240
"""A rank that has not answered by then waits for another that will not come."""

Seen = dict[str, Any]
"""What a rank observed: losses, rows of each step, bytes, degrees."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


class Bytes:
    """Bytes of tensors on this rank by kind; one storage counts once, under its first kind, and whole."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.of: dict[str, int] = {}

    def add(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        for each in tensors:
            if each is None:
                continue
            mine = local(each).untyped_storage()
            if mine.nbytes() and mine.data_ptr() not in self.seen:
                self.seen.add(mine.data_ptr())
                self.of[kind] = self.of.get(kind, 0) + mine.nbytes()


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state, without counters of steps."""
    return [
        each
        for state in optimizer.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor) and each.dim()
    ]


def note_dropout(seen: Seen) -> None:
    """Note the probabilities with which a rank drops values in training; all programs call torch's two functions."""
    functions, kinds = torch.nn.functional, {"dropout": ("p", 1), "scaled_dot_product_attention": ("dropout_p", 4)}
    seen["dropout"] = []

    def noted(name: str) -> Any:
        plain, (key, place) = getattr(functions, name), kinds[name]

        def call(*arguments: Any, **options: Any) -> Any:
            share = options.get(key, arguments[place] if len(arguments) > place else 0.0)
            is_on = share and (name != "dropout" or options.get("training", (*arguments, True, True, True)[2]))
            seen["dropout"] = sorted({*seen["dropout"], *([share] if is_on else [])})
            return plain(*arguments, **options)

        return call

    for name in kinds:
        setattr(functions, name, noted(name))


def run_program(words: list[str]) -> None:
    """Run a program as torchrun does."""
    sys.argv = words
    sys.path.insert(0, ".")
    runpy.run_path(words[0], run_name="__main__")


def _rank(number: int, job: dict[str, Any], observe: Callable[[dict[str, Any]], Seen], port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": job["world"], "LOCAL_WORLD_SIZE": job["world"]}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **job.get("environment", {})}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.chdir(job["folder"])
    log = Path(f"rank{number}.log").open("w", buffering=1)  # noqa: SIM115 # until the rank ends
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        with contextlib.suppress(SystemExit):
            answer = observe(job)
        if dist.is_initialized():
            dist.barrier()  # who leaves with bytes unread resets the connection, also for what the peer has yet to read
    except BaseException as error:  # noqa: BLE001 # the test that asked wants to see any of them
        answer = {"error": f"rank {number}: {type(error).__name__}: {error}", "trace": traceback.format_exc()}
        sys.stderr.flush()
        answer["log"] = Path(f"rank{number}.log").read_text()[-2000:]
    answers.put((number, json.dumps(answer)))
    os._exit(0)  # peers may be gone: no clean shutdown is wanted


def run_job(job: dict[str, Any], observe: Callable[[dict[str, Any]], Seen]) -> Any:
    """What each rank saw, or the first error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = FORK.SimpleQueue()
    ranks = [FORK.Process(target=_rank, args=(n, job, observe, port, answers)) for n in range(job["world"])]
    for each in ranks:
        each.start()
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        if not answers._reader.poll(SECONDS):
            found[-1] = {"error": f"ranks {sorted({*range(len(ranks))} - {*found})} have not answered"}
            break
        number, answer = answers.get()
        found[number] = json.loads(answer)
        if "error" in found[number]:
            break
    for each in ranks:
        if len(found) < len(ranks) or -1 in found:
            each.kill()
        each.join()
    failed = [answer for answer in found.values() if "error" in answer]
    return failed[0] if failed else [found[number] for number in range(len(ranks))]


def serve(observe: Callable[[dict[str, Any]], Seen]) -> None:
    """Answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")  # programs print to stdout
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(run_job(json.loads(line), observe)) + "\n")
        answers.flush()
