"""Measure the commands against their targets (`make bench`): a report that names the machine.

Times are CPU seconds, because other work on the machine hardly changes CPU seconds, but does change wall seconds.
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
from bench_trainer import trainer_tables
from rich.console import Console
from rich.table import Table

import planner

REPEATS = 3
KIB = 2**10
MIB = 2**20
BIG = "--seq-len 4096 --global-batch 15360 --engine megatron"

# arguments of `planner`, and the targets: at most these CPU seconds, and MiB of resident memory
TARGETS: tuple[tuple[str, float, float | None], ...] = (
    ("--help", 0.25, None),
    ("plan megatron-22b dgx-a100 --nodes 1 --seq-len 2048 --global-batch 4", 0.7, None),
    ("plan gpt3-175b dgx-a100 --nodes 128 --seq-len 2048 --global-batch 1536", 1.0, 250.0),
    ("plan megatron-1t dgx-a100 --nodes 384 --seq-len 2048 --global-batch 3072", 1.5, None),
    ("plan llama3-405b dgx-h100 --nodes 2048 --seq-len 8192 --global-batch 2048", 2.0, None),
    ("plan llama3-405b dgx-h100 --nodes 2048 --seq-len 131072 --global-batch 128 --engine megatron", 2.0, None),
    (f"plan deepseek-v3 hgx-h800 --nodes 256 {BIG}", 2.5, None),
    (f"plan deepseek-v3 gb200-nvl72 --gpus 11000 {BIG}", 2.5, None),
    ("plan gpt3-175b dgx-a100 --nodes 12500 --seq-len 2048 --global-batch 100000", 4.0, None),
    ("plan llama3-405b dgx-h100 --nodes 12500 --seq-len 8192 --global-batch 10000", 4.0, None),
    (f"plan deepseek-v3 dgx-h100 --nodes 12500 {BIG}", 4.0, None),
    (f"plan deepseek-v3 gb200-nvl72 --gpus 100000 {BIG}", 4.0, None),
    ("plan megatron-22b dgx-a100 --nodes 12500 --seq-len 2048 --global-batch 100000", 4.0, None),
    ("plan megatron-1t dgx-a100 --nodes 12500 --seq-len 2048 --global-batch 30720", 4.0, None),
    ("plan llama3-405b dgx-h100 --nodes 12500 --seq-len 131072 --global-batch 1280 --engine megatron", 4.0, None),
    ("plan llama3-70b tools/three-pools.yaml --seq-len 8192 --global-batch 1024", 5.0, None),
    ("plan llama3-70b tools/three-pools.yaml --seq-len 8192 --global-batch 1024 --engine megatron", 5.0, None),
)


def measure(arguments: str) -> tuple[float, float]:
    """CPU seconds and peak resident bytes of one run, solver processes included.

    The run is the only child of a new process. Otherwise the reported peak could be that of an earlier run.
    """
    program = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss)\n"
    )
    command = [sys.executable, "-c", program, sys.executable, "-m", "planner", *arguments.split()]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
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
        "command", "CPU s", "target", "peak MiB", "target", title=f"median of {REPEATS} runs", caption=machine()
    )
    for arguments, most_seconds, most_mib in TARGETS:
        runs = [measure(arguments) for _ in range(REPEATS)]
        seconds = statistics.median(run[0] for run in runs)
        peak = statistics.median(run[1] for run in runs) / MIB
        limit = f"{most_mib:.0f}" if most_mib else "-"
        table.add_row(f"planner {arguments}", f"{seconds:.2f}", f"{most_seconds:.2f}", f"{peak:.0f}", limit)
    console = Console(width=110)
    console.print(table)
    console.print(pricing_table())
    console.print(solvers())
    console.print(growth())
    for each in trainer_tables():
        console.print(each)


if __name__ == "__main__":
    main()
