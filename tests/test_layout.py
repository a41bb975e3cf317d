"""The layout vocabulary, and the rank order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.layout import AXES, Layout, balanced_chunks, even_split, format_layout, shortened_list
from planner.layout_text import parse_layout

DEGREE = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw):
    pp, v = draw(DEGREE), draw(DEGREE)
    stages = tuple(draw(st.lists(st.integers(v, 9), min_size=pp, max_size=pp)))
    recompute = tuple(draw(st.lists(st.sampled_from(["none", "selective", "full"]), min_size=pp, max_size=pp)))
    return Layout(
        tp=draw(DEGREE),
        pp=pp,
        dp=draw(DEGREE),
        cp=draw(DEGREE),
        zero=draw(st.integers(0, 3)),
        mbs=draw(DEGREE),
        interleave=v,
        schedule="interleaved" if v > 1 else "1f1b",
        sp=draw(st.integers(0, 1)),
        recompute=recompute * v,
        layers_per_stage=balanced_chunks(stages, v),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layouts())
def test_a_written_layout_reads_back_equal(layout):
    layers = sum(layout.layers_per_stage)
    assert parse_layout(format_layout(layout), num_layers=layers, num_devices=10**6) == layout


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layouts())
def test_ranks_are_numbered_over_the_axes_with_tp_fastest(layout):
    """NumPy's own row-major order is the oracle."""
    grid = np.arange(layout.world_size).reshape([layout.degrees[axis] for axis in AXES])
    for rank in {0, layout.world_size - 1, layout.world_size // 2}:
        place = tuple(int(i[0]) for i in np.nonzero(grid == rank))
        assert tuple(layout.coordinates(rank)[axis] for axis in AXES) == place
        assert layout.rank_of(layout.coordinates(rank)) == rank
        for dim, axis in enumerate(AXES):
            line = np.take(np.moveaxis(grid, dim, -1).reshape(-1, grid.shape[dim]), range(grid.shape[dim]), axis=1)
            expected = next(row for row in line.tolist() if rank in row)
            assert list(layout.group(axis, rank)) == expected


def test_tensor_parallel_groups_are_neighbours():
    layout = Layout(tp=4, dp=2, pp=2, recompute=("none",) * 2, layers_per_stage=(1, 1))
    assert layout.group("tp", 5) == (4, 5, 6, 7)
    assert layout.group("dp", 5) == (1, 5)
    assert layout.group("pp", 5) == (5, 13)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 8))
def test_an_even_split_holds_every_layer_and_is_even(layers, pp, v):
    if layers < pp * v:
        return
    chunks = even_split(layers, pp, v)
    stages = [sum(chunks[r::pp]) for r in range(pp)]
    assert sum(chunks) == layers
    assert len(chunks) == pp * v
    assert max(stages) - min(stages) <= 1
    assert all(max(chunks[r::pp]) - min(chunks[r::pp]) <= 1 for r in range(pp))


def test_equal_neighbours_of_a_list_can_be_counted():
    written = parse_layout("pp=4,layers_per_stage=2*3/2*1,recompute=3*none/full", num_layers=8, num_devices=4)
    assert written == parse_layout(
        "pp=4,layers_per_stage=3/3/1/1,recompute=none/none/none/full", num_layers=8, num_devices=4
    )
    assert shortened_list("3/3/1/1") == "2*3/2*1"
    assert shortened_list("none") == "none"


def test_what_is_left_out_is_derived():
    layout = parse_layout("tp=4,pp=2", num_layers=5, num_devices=64)
    assert (layout.dp, layout.sp, layout.zero, layout.schedule) == (8, 1, 0, "1f1b")
    assert layout.layers_per_stage == (3, 2)
    assert parse_layout("pp=2,interleave=2", num_layers=4, num_devices=2).schedule == "interleaved"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=4,tpp=2", "did you mean `tp`"),
        ("tp=0", "at least 1"),
        ("tp=-1", "no legal value"),
        ("tp=4,tp=8", "given twice"),
        ("tp=", "has no value"),
        ("zero=9", "0 to 3"),
        ("schedule=1f1c", "did you mean `1f1b`"),
        ("pp=2,layers_per_stage=3/3/3", "2 entries are needed"),
        ("pp=2,layers_per_stage=3/3", "the model has 8 layers"),
        ("pp=2,recompute=full/none/none", "2 entries are needed"),
        ("tp=\u0663", "no legal value"),
        ("mbs=99999999999999999999", "no legal value"),
        ("pp=2,layers_per_stage=0*3/8", "no legal value"),
        ("pp=2,layers_per_stage=*4", "no legal value"),
        ("pp=2,layers_per_stage=99999*4", "no legal value"),
        ("pp=2,layers_per_stage=3*3", "2 entries are needed"),
        ("pp=2,recompute=2*ful", "did you mean `full`"),
        ("recompute=mlp+moe_atc", "did you mean `moe_act`"),
        ("recompute=selective+mlp", "did you mean `selective`"),
        ("recompute=every:1", "known values: none, selective, full, full:K, every:N, or modules joined by"),
        ("recompute=full:0", "did you mean `full`"),
        ("recompute=mlp+", "known values: none"),
        ("pp=11", "pp 11 \\* interleave 1 = 11 chunks of 8 layers"),
        ("pp=10000000", "10000000 chunks of 8 layers"),
        ("pp=4,interleave=10000000", "40000000 chunks of 8 layers"),
        ("pp=10000000,layers_per_stage=4/4", "10000000 entries are needed"),
        ("pp=10000000,recompute=full,layers_per_stage=8", "10000000 entries are needed"),
    ],
)
def test_bad_layouts_are_explained(text, message):
    with pytest.raises(InputError, match=message):
        parse_layout(text, num_layers=8, num_devices=8)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(InputError) as error:
        parse_layout("tp=x,pp=y,zero=7", num_layers=8, num_devices=8)
    assert len(error.value.mistakes) == 3
