"""How the search grows with devices and with layers: CPU seconds in one process, as bars of text."""

from __future__ import annotations

import statistics
import time

from planner.search.constraints import Constraints
from planner.search.search import search
from planner.specs.load import load_job

REPEATS = 3
WIDTH = 50  # characters of the longest bar
DEVICES = (64, 256, 1024, 4096, 16384, 65536, 262144)
LAYERS = (12, 24, 48, 96, 192, 384)


def _seconds(num_devices: int, num_layers: int) -> float:
    """CPU seconds of one search, the solver's process left out (it takes 0.02); GPT-3, 12 sequences for 8 devices."""
    job = load_job(
        model="gpt3-175b",
        cluster="dgx-a100",
        engine="torch",
        gpus=num_devices,
        sequence_length=2048,
        global_batch_size=max(96, num_devices * 3 // 2),
        settings=(f"model.num_layers={num_layers}",),
    )
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        search(job, Constraints())
        times.append(time.process_time() - start)
    return statistics.median(times)


def _bars(title: str, seconds: dict[int, float]) -> list[str]:
    longest = max(seconds.values())
    lines = [f"{size:>9,}  {value:5.2f}  {'#' * round(WIDTH * value / longest)}" for size, value in seconds.items()]
    return [title, *lines]


def growth() -> str:
    """Two plots: by devices for 96 layers, and by layers for 1,024 devices."""
    by_devices = {count: _seconds(count, 96) for count in DEVICES}
    by_layers = {count: _seconds(1024, count) for count in LAYERS}
    lines = _bars("  devices  CPU s, 96 layers of GPT-3", by_devices)
    return "\n".join([*lines, "", *_bars("   layers  CPU s, 1,024 devices", by_layers)])
