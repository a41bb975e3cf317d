"""torchrun, quieter: `planner launch` starts this in place of `torchrun`, with the same arguments."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from planner.errors import ExitCode
from planner.trainer.parent import die_with_parent


def main() -> int:
    """Run torchrun; the ranks have said why they failed, so its own report and traceback are left out."""
    die_with_parent()
    logging.disable(logging.ERROR)  # of this process; the ranks are others
    try:
        torchrun(sys.argv[1:])
    except (ChildFailedError, SignalException):
        return ExitCode.RANK_FAILED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
