"""A quieter and faster torchrun; `planner launch` starts it instead of `torchrun`, with the same arguments."""

from __future__ import annotations

import importlib
import logging
import signal
import sys

import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from planner.errors import ExitCode, PlannerError
from planner.plan_file import plan_from_file
from planner.trainer.options import corpus_of, parse_options
from planner.trainer.parent import die_with_parent
from planner.trainer.verdict import write_status

ROWS_CHECKED = 64


def main() -> int:
    """Check the data, then run torchrun without its own error report; the ranks already say why they fail."""
    die_with_parent()
    options = parse_options(sys.argv[sys.argv.index("planner.trainer") + 1 :])
    try:
        plan = plan_from_file(options.plan)
        # no rank waits while texts are turned into token files
        corpus_of(plan, options).batch(0, min(ROWS_CHECKED, plan.training.global_batch_size))
    except PlannerError as error:
        sys.stderr.write(f"error: {error}\n")
        options.output.mkdir(parents=True, exist_ok=True)
        write_status(options.output, "failed", 0, str(error), exit_code=int(error.exit_code))
        return error.exit_code
    logging.disable(logging.ERROR)  # only in this process, not in the ranks
    on_cpu = plan.cluster.kind == "cpu"
    try:
        torchrun(_forking(sys.argv[1:]) if on_cpu else sys.argv[1:])
    except ChildFailedError as error:
        cut = any(failure.exitcode == -signal.SIGBUS for failure in error.failures.values())
        return 128 + signal.SIGBUS if cut else ExitCode.RANK_FAILED  # planner.launch.supervise tells them apart
    except SignalException:
        return ExitCode.RANK_FAILED
    except DistError as error:  # the rendezvous failed: no rank was started
        sys.stderr.write(f"error: the hosts have not met: {str(error).partition(chr(10))[0]}\n")
        return ExitCode.ENVIRONMENT
    return ExitCode.OK


def _forking(words: list[str]) -> list[str]:
    """The arguments for ranks that are forks of this process, which has done all imports once for all of them.

    Imports cost a rank three CPU seconds. Ranks with a GPU are not forked, because CUDA does not survive a fork.
    """
    program = importlib.import_module("planner.trainer.__main__")
    torch.set_num_threads(1)  # OpenMP threads do not survive a fork either
    start = words.index("-m")
    return [*words[:start], "--start-method=fork", "--run-path", str(program.__file__), *words[start + 2 :]]


if __name__ == "__main__":
    sys.exit(main())
