"""torchrun, quieter: `planner launch` starts this in place of `torchrun`, with the same arguments."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from planner.errors import ExitCode, PlannerError
from planner.plan import read_plan
from planner.trainer.options import corpus_of, parse_options
from planner.trainer.parent import die_with_parent
from planner.trainer.verdict import write_status

if TYPE_CHECKING:
    import argparse

ROWS_CHECKED = 64


def main() -> int:
    """Check the data, then run torchrun; ranks say why they fail, so its own report and traceback are left out."""
    die_with_parent()
    options = parse_options(sys.argv[sys.argv.index("planner.trainer") + 1 :])
    try:
        _check_data(options)
    except PlannerError as error:
        sys.stderr.write(f"error: {error}\n")
        options.output.mkdir(parents=True, exist_ok=True)
        write_status(options.output, "failed", 0, str(error), exit_code=int(error.exit_code))
        return error.exit_code
    logging.disable(logging.ERROR)  # of this process; the ranks are others
    try:
        torchrun(sys.argv[1:])
    except (ChildFailedError, SignalException):
        return ExitCode.RANK_FAILED
    return ExitCode.OK


def _check_data(options: argparse.Namespace) -> None:
    """Read the first batch before any rank starts; texts become token files here, without ranks that wait."""
    plan = read_plan(options.plan)
    corpus_of(plan, options).batch(0, min(ROWS_CHECKED, plan.training.global_batch_size))


if __name__ == "__main__":
    sys.exit(main())
