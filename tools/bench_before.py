"""Compare the CPU seconds of the plans of docs/performance.md with those of an earlier version.

`python tools/bench_before.py CHECKOUT` runs each command of `bench.py` that plans with this version and with the one in
CHECKOUT in turn. It prints the medians of the ratios and their geometric mean. Run it from the root of this version.
The two may search different spaces: layouts that the earlier version did not know cost time in this one. `--both` and
`--now` add options, such as pins, to the commands of both versions and of this one.
"""

from __future__ import annotations

import argparse
import compileall
import statistics
from pathlib import Path

from bench import TARGETS, machine, measure
from rich.console import Console
from rich.table import Table


def main() -> None:
    """Print a row for each command, and the geometric mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=["llama3-8b"], metavar="WORD", help="commands to leave out")
    parser.add_argument("--both", default="", metavar="OPTIONS")
    parser.add_argument("--now", default="", metavar="OPTIONS")
    arguments = parser.parse_args()
    folders = {Path.cwd(): f"{arguments.both} {arguments.now}", arguments.checkout.resolve(): arguments.both}
    for folder in folders:
        compileall.compile_dir(folder / "planner", quiet=1)
    table = Table("command", "before, CPU s", "now, CPU s", "times as fast", caption=machine())
    ratios = []
    for command, *_ in TARGETS:
        if not command.startswith("plan ") or any(word in command for word in arguments.without):
            continue
        each = [(f"{command} {options}", folder) for folder, options in folders.items()]
        runs = [[measure(*words)[0] for words in each] for _ in range(arguments.repeats)]
        ratios.append(statistics.median(before / now for now, before in runs))
        now, before = (statistics.median(times) for times in zip(*runs, strict=True))
        table.add_row(command, f"{before:.2f}", f"{now:.2f}", f"{ratios[-1]:.2f}")
    table.add_row(f"geometric mean of {len(ratios)}", "", "", f"{statistics.geometric_mean(ratios):.2f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
