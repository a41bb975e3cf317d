"""The program that torchrun starts on every device: `python -m planner.trainer PLAN --output DIR ...`."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from planner.errors import EnvironmentProblem, ExitCode, InputError, PlannerError
from planner.plan import plan_to_dict
from planner.plan_file import plan_from_file
from planner.trainer.network import VARIABLE, choose_interface
from planner.trainer.obstacles import check_plan
from planner.trainer.options import corpus_of, parse_options, run_options
from planner.trainer.parent import die_with_parent
from planner.trainer.train import run
from planner.trainer.trainer import Trainer
from planner.trainer.verdict import is_first_loss, record_failure

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from planner.plan import Plan

COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # torch's own 10 to 30 minutes would hide a hung peer for that long


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Run one rank.

    DIR/status.json has the verdict, because torchrun's exit code does not show whether a stopped run saved its state.
    """
    options = parse_options(arguments)
    if _is_fork():
        _forget_the_agent()
    die_with_parent()
    _quiet_torch()
    try:
        return _train(options)
    except PlannerError as error:
        if record_failure(options.output, str(error), error.exit_code, _rank()):
            sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 # the process ends here, and the launcher reads the verdict
        if (out_of_memory := _out_of_memory(error)) is not None:
            reason = f"rank {_rank()} is out of memory: {_first_line(out_of_memory)}"
            if record_failure(options.output, reason, ExitCode.RANK_FAILED, _rank()):
                sys.stderr.write(f"error: {reason}\n    help: plan again with more --headroom\n")
        elif _lost_a_peer(error):
            if is_first_loss(options.output):
                sys.stderr.write(f"rank {_rank()} lost a peer: {_first_line(error)}\n{_help_to_meet(error)}")
        elif record_failure(options.output, repr(error), ExitCode.RANK_FAILED, _rank()):
            sys.stderr.write(f"error: rank {_rank()} failed\n")
            traceback.print_exc()
        return ExitCode.RANK_FAILED


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """The out-of-memory error among `error` and its causes, or None.

    torch.distributed.pipelining wraps a stage's error in a plain RuntimeError. The CPU allocator, NCCL, and CUDA
    outside torch's allocator have no error type of their own, so the message decides.
    """
    words = ("out of memory", "can't allocate memory")
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(each in str(error) for each in words):
            return error
        error = error.__cause__
    return None


def _lost_a_peer(error: BaseException) -> bool:
    """Whether this rank only noticed that another rank is gone; the other rank is the cause, and a retry may help."""
    if isinstance(error, dist.DistError) or "gloo/" in str(error):
        return True
    # a pipeline schedule wraps what a collective raised inside a stage
    return error.__cause__ is not None and _lost_a_peer(error.__cause__)


def _help_to_meet(error: BaseException) -> str:
    """A hint for gloo ranks that could not connect to each other."""
    met = "connectFullMesh" not in str(error)
    return "" if met else f"    help: {VARIABLE} names the network interface that reaches the other hosts\n"


def _train(options: argparse.Namespace) -> ExitCode:
    plan = plan_from_file(options.plan)
    check_plan(plan)
    corpus = corpus_of(plan, options)
    device = _pick_device(plan)
    on_gpu = device.type == "cuda"
    choose_interface()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT, device_id=device if on_gpu else None
    )
    try:
        _check_same_plan(plan)
        trainer = Trainer(plan, corpus, device, num_steps=options.steps or plan.training.steps)
        return run(trainer, run_options(options))
    finally:
        dist.destroy_process_group()


def _check_same_plan(plan: Plan) -> None:
    """Refuse to start if a host has read another plan than host 0; every rank calls this function."""
    document = plan_to_dict(plan)
    decides = [document[key] for key in ("model", "cluster", "training", "engine", "layout")]
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    others = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if others:
        raise InputError(
            f"ranks {', '.join(map(str, others))} have another plan than rank 0",
            hint="give every host the same plan file",
        )


def _pick_device(plan: Plan) -> torch.device:
    """This rank's GPU, or one thread of the host, because a plan prices each CPU core as a device."""
    if plan.cluster.kind == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() <= index:
        raise EnvironmentProblem(
            f"the plan wants a CUDA device {index}, torch sees {torch.cuda.device_count()}",
            hint="check nvidia-smi and the CUDA build of torch, or plan for a cpu cluster",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _is_fork() -> bool:
    """Whether torchrun's agent forked this rank instead of starting a program."""
    return multiprocessing.parent_process() is not None


def _forget_the_agent() -> None:
    """Undo settings that a forked rank inherits from the agent: its signal handlers and its silenced output."""
    logging.disable(logging.NOTSET)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_DFL)


def _quiet_torch() -> None:
    """Silence torch's messages about its own internals; its errors are still shown."""
    for name in ("torch.distributed.tensor", "torchao"):  # torchao lists every kernel that its build lacks
        logging.getLogger(name).setLevel(logging.ERROR)
    # the embedding's output is never changed in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


if __name__ == "__main__":
    faulthandler.enable()  # shows what a rank was doing when a library aborts or crashes
    outcome = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if outcome or not _is_fork():  # a fork has to return, which tells torchrun that the fork is done
        os._exit(outcome)  # everything is on disk; torch's threads sometimes abort while the interpreter is torn down
