"""CPU seconds of pricing: the whole ledger of one layout, and all schedules of it. A part of `make bench`."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table

from planner.cost.estimate import estimate
from planner.cost.schedule_comparison import compare_schedules
from planner.layout import parse_layout
from planner.specs.load import load_job
from planner.specs.uniform import uniform_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.specs.job import PoolJob

REPEATS = 5

# model, GPUs, global batch, one layout
JOBS: tuple[tuple[str, int, int, str], ...] = (
    ("gpt3-175b", 1024, 1536, "tp=8,pp=8,mbs=1,zero=1"),
    ("megatron-1t", 3072, 3072, "tp=8,pp=64,mbs=1,recompute=full"),
    ("deepseek-v3", 2048, 4096, "tp=1,pp=16,ep=32,mbs=1,zero=1"),
)
MOST_SECONDS = {"ledger": 0.005}


def cpu_seconds(work: Callable[[], object]) -> float:
    """Median over some runs, after a run that fills the caches."""
    work()
    runs = []
    for _ in range(REPEATS):
        begin = time.process_time()
        work()
        runs.append(time.process_time() - begin)
    return statistics.median(runs)


def job_of(model: str, gpus: int, batch: int) -> PoolJob:
    """A training job on A100 nodes."""
    job = load_job(
        model=model,
        cluster="dgx-a100",
        training=None,
        engine="megatron",
        nodes=None,
        gpus=gpus,
        sequence_length=2048,
        global_batch_size=batch,
        precision=None,
        settings=(),
    )
    return uniform_job(job)


def pricing_table() -> Table:
    """Measure every job."""
    table = Table("job", "what", "CPU ms", "target", title="pricing, in one process")
    for model, gpus, batch, text in JOBS:
        job = job_of(model, gpus, batch)
        layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=gpus)
        rows: tuple[tuple[str, Callable[[], object], str], ...] = (
            ("ledger of one layout", partial(estimate, job, layout), "ledger"),
            ("all schedules of one layout", partial(compare_schedules, job, layout), ""),
        )
        for what, work, target in rows:
            most = f"{MOST_SECONDS[target] * 1e3:.0f}" if target else "-"
            table.add_row(model, what, f"{cpu_seconds(work) * 1e3:.1f}", most)
    return table
