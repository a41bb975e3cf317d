"""A rank knows for which axis it waits."""

from __future__ import annotations

import json

import pytest

from planner.errors import ExitCode

LAYOUTS = [
    ("llama", "dp=1,mbs=4", {"tp_comm"}),  # the end of the step alone
    ("llama", "tp=2,mbs=4", {"tp_comm"}),
    ("tied-llama", "pp=2,mbs=2,schedule=zbv", {"bubble"}),
    ("tied-llama", "pp=2,dp=2,zero=0,mbs=2,interleave=2", {"bubble", "dp_comm", "tied_embedding_comm"}),
    ("gemma", "cp=2,mbs=4", {"cp_comm", "dp_comm"}),
    ("moe", "dp=2,ep=2,zero=3,mbs=4", {"ep_comm", "dp_comm"}),
]
MORE_LAYOUTS = [
    ("llama", "tp=2,pp=2,dp=2,zero=1,mbs=2", {"tp_comm", "bubble", "dp_comm"}),
    ("gemma", "cp=2,tp=2,mbs=4,recompute=full", {"cp_comm", "tp_comm", "dp_comm"}),
]


@pytest.mark.parametrize(
    ("model", "layout", "lines"), [*LAYOUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_LAYOUTS)]
)
def test_every_wait_has_the_line_of_its_axis(model, layout, lines, run_job, make_plan):
    """Stop at each wait of a step (FSDP2, DTensor, the schedules, our own collectives), and ask for its line."""
    found = run_job("waits", make_plan(layout, model), steps=2)
    assert set(found["lines"]) == lines
    assert found["unknown"] == []


def test_the_lines_of_a_run_add_up_to_its_step(run_job, make_plan, tmp_path):
    plan = make_plan("tp=2,pp=2,mbs=2")
    assert run_job("train", plan, steps=3, output=str(tmp_path)) == ExitCode.OK
    measured = json.loads((tmp_path / "measurements.json").read_text())
    times = measured["time"]
    known = {name: line["seconds"] for name, line in times.items() if line["seconds"] is not None}
    assert sum(known.values()) == pytest.approx(measured["step_seconds"])
    assert all(known[name] > 0 for name in ("compute", "tp_comm", "bubble", "optimizer"))
    assert known["cp_comm"] == known["ep_comm"] == 0
    unmeasured = {name: line["reason"] for name, line in times.items() if line["seconds"] is None}
    together = {other: first for first, line in times.items() for other in line["includes"]}
    assert unmeasured == {other: f"measured together with {first}" for other, first in together.items()}


def test_a_lost_peer_inside_a_pipeline_stage_is_a_lost_peer():
    """The schedule wraps the error that the collective raised; a bug in a stage still counts as a bug."""
    pytest.importorskip("torch")
    from planner.trainer.__main__ import _lost_a_peer  # needs torch

    for cause, lost in (
        (RuntimeError("[/gloo/transport/tcp/pair.cc] reset by peer"), True),
        (RuntimeError("x"), False),
    ):
        wrapped = RuntimeError("[Stage 0] failed to run forward")
        wrapped.__cause__ = cause
        assert _lost_a_peer(wrapped) == lost
