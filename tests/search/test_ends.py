"""The search with ends of the model as pieces of the pipeline, against every layout priced by its own ledger."""

from __future__ import annotations

import itertools
import random

import pytest
from enumeration import compositions, long_forms
from test_search import every_configuration

from planner.cost.estimate import estimate
from planner.layout import Layout, balanced_chunks, format_layout
from planner.search.footprint import NothingFits
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.search.space.rules import broken_rules
from planner.specs.load import load_job

PINNED = {"tp": 1, "cp": 1, "mbs": 1, "zero": 1, "hsdp": 1}


def job_with_ends(seed):
    """A small job whose head may take longer than several layers, with or without multi-token prediction."""
    pick = random.Random(seed)
    return load_job(
        model="tiny-llama",
        cluster="dgx-a100",
        engine="megatron",
        gpus=pick.choice([2, 3, 4, 6]),
        sequence_length=256,
        global_batch_size=pick.choice([4, 8, 12]),
        settings=(
            f"model.num_layers={pick.randint(2, 6)}",
            f"model.vocab_size={pick.choice([512, 4096, 16384, 65536])}",
            f"model.mtp_layers={seed % 2}",
            f"device.memory={pick.choice([0.05, 0.1, 0.5])} GiB",
            "device.reserved_memory=1 MiB",
            "engine.memory.communicator_memory=1 B",
            "device.efficiency.layer_floor=1 us",
            f"nvlink.bandwidth={pick.choice([0.1, 300])} GB/s",
        ),
        headroom=0.0,
    )


def every_layout_with_ends(job):
    """Every layout with the pinned degrees and no recompute: all splits, last chunks and places of prediction."""
    mtp, layers, found = job.model.mtp_layers, job.model.num_layers, {}
    for common in every_configuration(job, ends=2 + (mtp > 0)):
        pp, v = common["pp"], common["interleave"]
        if any(common[key] != value for key, value in PINNED.items()) or (pp == 1 and v > 1):
            continue
        for split, before in itertools.product(compositions(layers, pp, 0), (0, 1) if mtp and pp > 1 else (0,)):
            ends = {pp - 1, pp - 1 - before}
            sizes = [range(k // v + 1) if v > 1 and r in ends else [k // v] for r, k in enumerate(split)]
            for last in itertools.product(*sizes):
                layout = Layout(
                    **common,
                    layers_per_stage=balanced_chunks(split, v, last=last),
                    mtp=(pp * v - 2,) if before else (),
                    recompute=("none",) * (pp * v),
                )
                if not broken_rules(job, layout):
                    found[format_layout(layout)] = layout
    return found


def check_with_ends(seed):
    """The least step of all layouts is the search's; returns whether its minimum has a chunk without a layer."""
    job = job_with_ends(seed)
    pins = ",".join(f"{key}={value}" for key, value in PINNED.items()) + ",recompute=none"
    priced = {text: estimate(job, layout) for text, layout in every_layout_with_ends(job).items()}
    fitting = {text: each.step_seconds for text, each in priced.items() if each.fits}
    found = search(job, Constraints.parse([pins]), within=0)
    if not fitting:
        assert isinstance(found, NothingFits)
        return False
    best = min(fitting, key=lambda text: fitting[text])
    assert found.step_seconds == pytest.approx(fitting[best], rel=1e-9), (best, format_layout(found.layout))
    assert found.certificate.dynamic_program_seconds == pytest.approx(fitting[best], rel=1e-9)
    assert found.certificate.objective_seconds == pytest.approx(fitting[best], rel=1e-9)
    return 0 in found.layout.layers_per_stage


@pytest.mark.parametrize("block", [0, *long_forms(1, 2, 3, 4, 5)])
def test_the_search_equals_brute_force_with_ends_as_pieces(block):
    found = [check_with_ends(seed) for seed in range(8 * block, 8 * block + 8)]
    assert any(found)
