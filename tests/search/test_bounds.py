"""Bounds of the search by themselves, against all ways to divide the layers and against searches that check them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from planner.api import plan_job
from planner.search.bounds.of_layers import layers_of_slowest


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
