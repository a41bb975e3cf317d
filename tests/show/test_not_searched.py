"""A given layout says which of its values no search tries without a pin."""

from __future__ import annotations

import numpy as np
import pytest

from planner.search.given import plan_for_text
from planner.search.space.constraints import Constraints
from planner.search.space.space import Space
from planner.show.screen import Screen, to_text
from planner.show.summary import answer
from planner.specs.load import load_job


def job(engine):
    sizes = {"nodes": 1, "sequence_length": 4096, "global_batch_size": 32}
    return load_job(model="llama3-8b", cluster="dgx-h100", engine=engine, **sizes)


def said(engine, layout):
    words = " ".join(to_text(answer(plan_for_text(job(engine), layout)), Screen()).split())
    return words.partition("not searched `planner plan` tries ")[2].partition(" only if pinned")[0]


def tries(engine, key, value, tp, *pins):
    """Whether any configuration of a search has this value, with this degree of tensor parallelism."""
    blocks = Space(job(engine), Constraints.parse([f"tp={tp}", *pins])).blocks(with_replicas=False)
    found = [each for each in blocks if len(each)]
    assert found
    return any(np.any(np.equal(getattr(each, key), value)) for each in found)


@pytest.mark.parametrize(
    ("engine", "layout", "tp", "key", "value"),
    [
        ("megatron", "tp=2,dp=4,zero=1,sp=0", 2, "sp", 0),
        ("torch", "pp=2,dp=4,schedule=gpipe", 1, "schedule", "gpipe"),
        ("megatron", "dp=8,zero=1,offload=optimizer", 1, "offload", "optimizer"),
    ],
)
def test_a_value_that_no_search_tries_is_named(engine, layout, tp, key, value):
    written = f"{key}={value}"
    assert said(engine, layout).removesuffix(" without --allow-offload") == written
    assert not tries(engine, key, value, tp)
    assert tries(engine, key, value, tp, written)


def test_a_policy_that_no_search_tries_is_named():
    assert said("deepspeed", "dp=8,zero=3,recompute=every:2") == "recompute=every:2"
    assert said("megatron", "tp=2,dp=4,zero=1,sp=0,recompute=mlp+layernorm") == "sp=0 and recompute=layernorm+mlp"


def test_an_option_that_allows_offload_is_named():
    asked = "tp=2,dp=4,zero=1,sp=0,offload=optimizer"
    assert said("megatron", asked) == "sp=0 and offload=optimizer without --allow-offload"


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("megatron", "tp=2,dp=4,zero=1"),
        ("megatron", "dp=8,zero=1,recompute=full:2"),
        ("megatron", "pp=2,dp=4,zero=1,interleave=2"),
        ("torchtitan", "dp=8,zero=3,recompute=selective"),
    ],
)
def test_what_a_search_tries_is_not_named(engine, layout):
    assert said(engine, layout) == ""
