"""Every layout of small jobs, each priced once in a process, for the tests that rank them in different ways."""

from __future__ import annotations

import itertools
import random
from functools import cache

from enumeration import long_forms

from planner.cost.estimate import estimate
from planner.search.optimum.pricing import layout_at
from planner.search.space.constraints import Constraints
from planner.search.space.refusals import legal_degrees
from planner.search.space.space import Space
from planner.specs.load import load_job

FREE = Constraints()


def small_job(seed):
    """A random job of few layers and devices, with memory from hardly enough to plenty."""
    pick = random.Random(seed)
    return load_job(
        model="tiny-gpt",
        cluster="dgx-a100",
        engine=pick.choice(["torch", "megatron"]),
        gpus=pick.choice([3, 4, 5]),
        sequence_length=64,
        global_batch_size=pick.choice([4, 6, 8]),
        settings=(
            f"model.num_layers={pick.randint(2, 4)}",
            f"device.memory={pick.choice([0.018, 0.025, 0.03])} GiB",
            "device.reserved_memory=1 MiB",
            "engine.memory.communicator_memory=1 B",
            "engine.pipeline.places_ends=false",  # tests/search/test_ends.py has the others
            "device.efficiency.layer_floor=1 us",
            f"nvlink.bandwidth={pick.choice([0.1, 1, 300])} GB/s",
        ),
        headroom=0.0,
    )


def every_layout(job):
    """Each legal configuration with each split of its layers and each recompute policy of each stage."""
    for degrees in legal_degrees(Space(job, FREE)):
        for i in range(len(degrees)):
            one = degrees.take(i)
            policies = Space(job, FREE).policies(one)
            counts = range(one.interleave, job.model.num_layers + 1, one.interleave)
            for layers in itertools.product(counts, repeat=one.pp):
                if sum(layers) == job.model.num_layers:
                    for chosen in itertools.product(policies, repeat=one.pp):
                        yield layout_at(one, layers, chosen)


SEEDS = (0, 5, *long_forms(3, 8, 11))


@cache
def priced(seed):
    """Seconds, devices and peak bytes of every layout of a small job that fits."""
    job = small_job(seed)
    estimates = [(layout, estimate(job, layout)) for layout in every_layout(job)]
    return job, [(e.step_seconds, layout.world_size, e.peak_bytes) for layout, e in estimates if e.fits]


KEYS = {
    "throughput": lambda each: (each[0],),
    "cost": lambda each: (each[0] * each[1],),
    "gpus": lambda each: (each[1], each[0]),
    "memory": lambda each: (each[2], each[0]),
}
