"""Measure the commands against yardsticks of the same run (`make bench`): a report that names the machine.

Times are CPU seconds, because other work on the machine hardly changes CPU seconds, but does change wall seconds. The
speed of a machine varies by half within minutes, so no number of seconds is a target. Each command is compared with a
yardstick that runs in turn with it: a fixed piece of work, or a command whose search is the base of its own.
"""

from __future__ import annotations

import compileall
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from bench_pricing import pricing_table
from bench_search import growth, solvers
from bench_seeded import seeded
from bench_trainer import trainer_tables
from rich.console import Console
from rich.table import Table

import planner

REPEATS = 3
KIB = 2**10
MIB = 2**20
BIG = "--seq-len 4096 --global-batch 15360 --engine megatron"

START = "import numpy, pydantic"  # what every command that reads a document imports
ON_2048 = f"plan deepseek-v3 hgx-h800 --nodes 256 {BIG}"

# arguments of `planner`, the yardstick, at most how many times as long as the yardstick, and at most how many MiB
TARGETS: tuple[tuple[str, str, float | None, float | None], ...] = (
    ("--help", START, 0.5, None),
    ("models", START, 1.8, None),
    ("plan llama3-8b dgx-h100 --nodes 1 --global-batch 64", START, 2.5, None),
    ("plan megatron-22b dgx-a100 --nodes 1 --seq-len 2048 --global-batch 4", START, 2.5, None),
    ("plan gpt3-175b dgx-a100 --nodes 128 --seq-len 2048 --global-batch 1536", START, None, 250.0),
    ("plan megatron-1t dgx-a100 --nodes 384 --seq-len 2048 --global-batch 3072", START, None, None),
    ("plan llama3-405b dgx-h100 --nodes 2048 --seq-len 8192 --global-batch 2048", START, None, None),
    ("plan llama3-405b dgx-h100 --nodes 2048 --seq-len 131072 --global-batch 128 --engine megatron", START, None, None),
    (ON_2048, START, None, None),
    (f"plan deepseek-v3 gb200-nvl72 --gpus 11000 {BIG}", ON_2048, None, None),
    ("plan gpt3-175b dgx-a100 --nodes 12500 --seq-len 2048 --global-batch 100000", START, None, None),
    ("plan llama3-405b dgx-h100 --nodes 12500 --seq-len 8192 --global-batch 10000", START, None, None),
    (f"plan deepseek-v3 dgx-h100 --nodes 12500 {BIG}", ON_2048, None, None),
    (f"plan deepseek-v3 gb200-nvl72 --gpus 100000 {BIG}", ON_2048, 5.0, 250.0),
    ("plan megatron-22b dgx-a100 --nodes 12500 --seq-len 2048 --global-batch 100000", START, None, None),
    ("plan megatron-1t dgx-a100 --nodes 12500 --seq-len 2048 --global-batch 30720", START, None, None),
    (
        "plan llama3-405b dgx-h100 --nodes 12500 --seq-len 131072 --global-batch 1280 --engine megatron",
        START,
        None,
        None,
    ),
    ("plan llama3-70b tools/three-pools.yaml --seq-len 8192 --global-batch 1024", START, None, None),
    ("plan llama3-70b tools/three-pools.yaml --seq-len 8192 --global-batch 1024 --engine megatron", START, None, None),
)


def measure(arguments: str, checkout: Path | None = None) -> tuple[float, float]:
    """CPU seconds and peak resident bytes of one run of this version or a checkout's, solver processes included.

    The run is the only child of a new process. Otherwise the reported peak could be that of an earlier run.
    """
    program = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss)\n"
    )
    words = ["-c", "import numpy, pydantic"] if arguments == START else ["-m", "planner", *arguments.split()]
    command = [sys.executable, "-c", program, sys.executable, *words]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=checkout)
    seconds, kib = map(float, answer.stdout.split())
    return seconds, kib * KIB


def machine() -> str:
    """Cores, processor and load of the machine, which determine the numbers."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, {name}, Python {platform.python_version()}, load average {load}"


def main() -> None:
    """Print the tables; the last ones take minutes."""
    compileall.compile_dir(planner.__path__[0], quiet=1)  # as pip does on installation, whatever this shell sets
    table = Table(
        "command", "CPU s", "times the yardstick", "at most", "peak MiB", "at most", caption=machine(),
        title=f"medians of {REPEATS} runs in turn with the yardstick: `{START}`, or DeepSeek-V3 on 2,048 H800 (*)",
    )  # fmt: skip
    for arguments, yardstick, most_times, most_mib in TARGETS:
        pairs = [(measure(arguments), measure(yardstick)) for _ in range(REPEATS)]
        seconds = statistics.median(own for (own, _), _ in pairs)
        times = statistics.median(own / other for (own, _), (other, _) in pairs)
        peak = statistics.median(memory for (_, memory), _ in pairs) / MIB
        limits = [f"{most:g}" if most else "-" for most in (most_times, most_mib)]
        mark = "" if yardstick == START else " (*)"
        table.add_row(
            f"planner {arguments}", f"{seconds:.2f}", f"{times:.2f}{mark}", limits[0], f"{peak:.0f}", limits[1]
        )
    console = Console(width=110)
    console.print(table)
    console.print(pricing_table())
    console.print(seeded())
    console.print(solvers())
    console.print(growth())
    for each in trainer_tables():
        console.print(each)


if __name__ == "__main__":
    main()
