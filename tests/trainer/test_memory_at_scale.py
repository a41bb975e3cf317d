"""The ledger's bytes at real sizes, compared with bytes that are alive in the trainer's own step on fake tensors."""

from __future__ import annotations

import pytest
from project_tools import load_tool

pytest.importorskip("torch")

from planner.trainer.rehearse import counted
from planner.verify import planned_bytes


@pytest.fixture(scope="module")
def tool():
    return load_tool("bench_memory")


def ratio(tool, model, layers, sequence, layout, rank, precision="bf16"):
    plan = tool.make_plan(model, layout, sequence=sequence, layers=layers, precision=precision)
    peak, _ = counted(plan, rank)
    return peak / sum(planned_bytes(plan, rank).values())


@pytest.mark.parametrize(
    ("model", "layers", "sequence", "layout", "rank"),
    [
        ("mpt-3b", 4, 2048, "dp=1,mbs=1,recompute=full", 0),
        ("llama3-8b", 4, 4096, "pp=4,mbs=2", 1),
        ("mixtral-8x7b", 2, 4096, "dp=8,ep=8,zero=1,mbs=1", 0),
        ("mixtral-8x7b", 2, 4096, "dp=1,mbs=1,recompute=full", 0),  # a layer's sum is copied on one rank, too
        ("llama3-8b", 4, 4096, "pp=2,interleave=2,schedule=zbv,mbs=1,recompute=full", 1),  # each layer once again
        pytest.param("llama3-8b", 2, 4096, "dp=8,zero=3,mbs=2", 0, marks=pytest.mark.slow),
        pytest.param("llama3-8b", 2, 4096, "dp=1,mbs=1", 0, marks=pytest.mark.slow),
        pytest.param("llama3-8b", 2, 4096, "dp=1,mbs=2,recompute=full", 0, marks=pytest.mark.slow),
        pytest.param("mpt-3b", 4, 2048, "dp=1,mbs=4", 0, marks=pytest.mark.slow),
        pytest.param("llama3-8b", 4, 4096, "pp=4,mbs=2", 3, marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_the_ledgers(model, layers, sequence, layout, rank, tool):
    assert ratio(tool, model, layers, sequence, layout, rank) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_every_case_of_the_table_is_the_ledgers(tool):
    assert {case: r for case in tool.CASES if abs((r := ratio(tool, *case)) - 1) > 0.05} == {}
