"""Bounds of the search by themselves, against all ways to divide the layers and against searches that check them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from planner.api import plan_job
from planner.cost.prices import stage_fits, stage_parts
from planner.cost.shapes import by_part
from planner.cost.stage import stage_of
from planner.search.bounds.of_layers import forget_shapes, layer_shapes, layers_of_slowest
from planner.search.bounds.of_memory import capacities_of_stages
from planner.search.bounds.of_steps import lower_bound_seconds
from planner.search.near import candidates_of
from planner.search.optimum.dynamic_program import best_choice
from planner.search.space.constraints import Constraints
from planner.search.space.space import Space
from planner.specs.load import load_job


def least_of_all_splits(num_layers: int, ends: list[float]) -> float:
    """Least time of the slowest stage over all splits; `ends` has each stage's other work, in units of a layer."""
    counts = itertools.product(range(num_layers + 1), repeat=len(ends))
    splits = (split for split in counts if sum(split) == num_layers)
    return min(max(held + end for held, end in zip(split, ends, strict=True)) for split in splits)


@pytest.mark.parametrize("num_ends", [1, 2, 3])
def test_the_slowest_stage_takes_what_the_best_split_gives_it(num_ends: int) -> None:
    drawn = random.Random(num_ends)
    for _ in range(60):
        num_layers, num_stages = drawn.randint(1, 7), drawn.randint(num_ends, 4)
        ends = [drawn.choice((0.0, 1.0, 2.0, drawn.uniform(0, 4))) for _ in range(num_ends)]
        told = layers_of_slowest(num_layers, np.array([num_stages]), [np.array([end]) for end in ends])
        least = least_of_all_splits(num_layers, [*ends, *[0.0] * (num_stages - num_ends)])
        assert told[0] == pytest.approx(least, abs=1e-9), (num_layers, num_stages, ends)


def test_shapes_priced_block_by_block_have_the_prices_of_all_at_once() -> None:
    job = load_job(model="deepseek-v3", cluster="gb200-nvl72", engine="megatron", gpus=144, global_batch_size=96)
    (pool,), degrees = job.pools, next(iter(Space(job).blocks(with_replicas=False)))
    forget_shapes()
    for rows in (slice(0, 600, 3), slice(0, 600, 2), slice(300, 301), slice(None)):
        part = degrees.take(rows)
        by_part(np.testing.assert_array_equal, layer_shapes(pool, part).of_each(), stage_parts(pool, part))


def test_offloaded_activations_cost_least_where_they_are_recomputed() -> None:
    """The check compares the bound of any policy with the optimum, whose policy spares copies to the host."""
    plan = plan_job(
        "llama3-8b",
        "dgx-a100",
        engine="deepspeed",
        gpus=8,
        seq_len=4096,
        global_batch=16,
        allow_offload=True,
        pin="pp=4,offload=activations",
        check=True,
    )
    assert plan.layout.offload == "activations"


def test_stages_can_hold_at_least_what_fits_into_each() -> None:
    """Memory of a pipeline of 28 stages is no line from the second to the last but one."""
    job = load_job(
        model="gpt3-175b", cluster="dgx-a100", engine="torch", nodes=14, sequence_length=2048, global_batch_size=1536
    )  # fmt: skip
    space = Space(job, Constraints.parse(["tp=1,pp=28,dp=4,cp=1,mbs=1,zero=1,interleave=1,sp=0"]))
    (degrees,) = (each.take([0]) for each in space.blocks(with_replicas=False) if each.schedule == "1f1b")
    capacities = capacities_of_stages(job.pools[0], degrees, space.policies(degrees))
    held = capacities.layers.max(axis=0)
    for index, most in enumerate(held.tolist()):
        fits = [
            count
            for count, policy in itertools.product(range(1, 9), space.policies(degrees))
            if stage_fits(job, degrees, stage_of(job, index=index, num_layers=count, policy=policy))
        ]
        assert most >= max(fits), index
    assert held[14] == 4.0  # as a line it would be 3


def test_exchanges_that_passes_hide_are_no_part_of_the_least_price_of_further_layers() -> None:
    """Layers for multi-token prediction exchange with experts, too; pairs of passes hide these exchanges."""
    job = load_job(
        model="deepseek-v3", cluster="gb300-nvl72", engine="megatron-bridge", gpus=256, sequence_length=4096,
        global_batch_size=15360, precision="fp8", settings=("training.expert_overlap=true",),
    )  # fmt: skip
    space, num_compared = Space(job, Constraints.parse(["tp=1,pp=2,cp=1,ep=64,mbs=1"])), 0
    for block in space.blocks(with_replicas=False):
        for row, candidate in enumerate(candidates_of(space, block, np.full(len(block), np.inf))):
            one, choice = block.take([row]), best_choice(candidate)
            if choice is not None:
                cutoff = np.array([choice.objective_seconds * (1 + 1e-9)])
                bound = lower_bound_seconds(job.pools[0], one, space.policies(one), cutoff_seconds=cutoff)
                assert bound <= cutoff, candidate.name
                num_compared += 1
    assert num_compared > 20
