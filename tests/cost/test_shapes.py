"""Layers of equal shape are priced once: the prices equal those of each configuration priced alone."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.prices import _parts_of_stage, stage_parts
from planner.cost.shapes import distinct_rows, spread
from planner.search.space.configurations import DegreeArrays

DEGREES = {
    "tp": (1, 2, 8),
    "cp": (1, 2, 4),
    "ep": (1, 4, 16),
    "etp": (1, 2, 4),
    "mbs": (1, 2, 3),
    "sp": (0, 1),
    "pp": (1, 4, 8),
    "dp": (1, 2, 16),
    "zero": (0, 1, 3),
    "hsdp": (1, 2),
    "interleave": (1, 2),
    "segment": (0, 0),
    "placement": (0,),
    "mtp_before": (0,),
    "recompute": (0,),
}


def leaves(price):
    """All arrays of a price, by their position in it."""
    if is_dataclass(price):
        return [x for f in fields(price) for x in leaves(getattr(price, f.name))]
    if isinstance(price, dict):
        return [x for key in sorted(price) for x in leaves(price[key])]
    return [x for part in price for x in leaves(part)] if isinstance(price, tuple) else [np.asarray(price)]


def random_degrees(rng, size, *, among=2):
    drawn = {key: rng.choice(rng.choice(values, among), size) for key, values in DEGREES.items()}
    return DegreeArrays(**drawn, schedule="1f1b")


@pytest.mark.parametrize("case", ["deepseek-v3 megatron", "mixtral-8x7b torchtitan", "llama3-8b deepspeed"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(100, 400))
def test_parts_of_equal_shapes_are_those_of_each_configuration(make_job, case, seed, size):
    model, engine = case.split()
    job = make_job(model, "dgx-h100", engine=engine, gpus=1024, batch=768, sequence=4096)
    degrees = random_degrees(np.random.default_rng(seed), size)
    once = stage_parts(job, degrees)
    plain = _parts_of_stage(job, degrees, list(once.layers))
    for found, wanted in zip(leaves(once), leaves(plain), strict=True):
        assert found.tobytes() == wanted.tobytes()


def test_every_degree_of_a_shape_counts(make_job):
    """Configurations whose layers differ in only one degree have different prices."""
    job = make_job("deepseek-v3", "dgx-h100", gpus=1024, batch=768, sequence=4096)
    same = DegreeArrays(**{key: np.full(300, values[min(1, len(values) - 1)]) for key, values in DEGREES.items()},
                        schedule="1f1b")  # fmt: skip
    for key in ("tp", "cp", "ep", "etp", "mbs", "sp"):
        values = np.tile(DEGREES[key][:2], 150)
        parts = stage_parts(job, replace(same, **{key: values}))
        assert any(x.ndim and x[0] != x[1] for x in leaves(parts)), key


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=50), st.sampled_from([1, 10**6, 2**50]))
def test_distinct_rows_are_those_of_numpy(rows, scale):
    """This holds for numbers of any size: their product may exceed 64 bits."""
    columns = [np.array([row[i] * scale for row in rows], dtype=np.int64) for i in range(3)]
    first, position = distinct_rows(columns)
    table = np.stack(columns, axis=1)
    wanted, wanted_first, wanted_position = np.unique(table, axis=0, return_index=True, return_inverse=True)
    assert np.array_equal(table[first], wanted)
    assert np.array_equal(first, wanted_first)
    assert np.array_equal(position, wanted_position.ravel())


def test_numbers_are_those_of_all():
    found = spread({"a": (np.array([1.0, 2.0]), 3.0)}, np.array([1, 1, 0]))
    assert found["a"][0].tolist() == [2.0, 2.0, 1.0]
    assert found["a"][1] == 3.0
