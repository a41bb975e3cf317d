"""Start the command line: `planner` and `python -m planner`."""

import os
import signal


def start() -> None:
    """Run the planner; Ctrl-C or SIGTERM during its import ends it at once, with the exit code of an interruption."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # an ignored signal stays ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    from planner.cli import run

    run()


if __name__ == "__main__":
    start()
