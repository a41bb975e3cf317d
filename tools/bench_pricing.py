"""CPU seconds of pricing: the whole ledger of one layout, and all schedules of it. A part of `make bench`."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import CO_GENERATOR
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from planner.cost.estimate import estimate
from planner.cost.schedule_comparison import compare_schedules
from planner.layout_text import parse_layout
from planner.specs.job import Job
from planner.specs.load import load_job
from planner.specs.uniform import uniform_job

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from types import FrameType

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


def job_of(model: str, gpus: int, batch: int, cluster: str = "dgx-a100") -> PoolJob:
    """A training job on nodes of this cluster."""
    job = load_job(
        model=model,
        cluster=cluster,
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


def calls_of(work: Callable[[], object]) -> Counter[tuple[str, bool]]:
    """How often `work` runs each named function: by name, and whether an earlier call had equal arguments."""
    found: Counter[tuple[str, bool]] = Counter()
    seen: set[Hashable] = set()
    alive: list[object] = []
    begun: set[int] = set()  # frames of generators

    def key(value: object) -> Hashable:
        if isinstance(value, np.ndarray):
            return value.shape, value.tobytes()
        if isinstance(value, tuple | list):
            return tuple(map(key, value))
        if isinstance(value, dict):
            return tuple((key(name), key(each)) for name, each in value.items())
        if is_dataclass(value) and not isinstance(value, Job):
            return type(value).__name__, *(key(getattr(value, each.name, None)) for each in fields(value))
        alive.append(value)  # so that no other object gets its address
        return value if isinstance(value, int | float | str | frozenset) else id(value)

    def on_event(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        named = code.co_name != "asked" and not code.co_name.startswith(("<", "__"))
        if event != "call" or "/planner/" not in code.co_filename or not named:
            return
        if id(frame) in begun:
            return  # a generator that goes on
        if code.co_flags & CO_GENERATOR:
            begun.add(id(frame))
            alive.append(frame)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        call = code.co_qualname, key([frame.f_locals.get(name) for name in names])
        found[code.co_qualname, call in seen] += 1
        seen.add(call)

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


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
    job = job_of("llama3-70b", 128, 512, cluster="dgx-h100")
    layout = parse_layout("tp=4,pp=4", num_layers=job.model.num_layers, num_devices=128)
    calls = calls_of(partial(estimate, job, layout))
    again = sum(count for (_, repeats), count in calls.items() if repeats)
    table.add_row("llama3-70b", "calls of functions in one ledger, and repeats", f"{calls.total()}, {again}", "-")
    return table
