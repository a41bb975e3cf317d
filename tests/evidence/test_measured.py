"""Predicted and measured figures are joined by line name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.ledger import LineName, MemoryLine, StageMemory, TimeLine
from planner.evidence.compare.measured import compare


@pytest.fixture
def plan(make_plan):
    memory = tuple(
        StageMemory(
            stage=stage,
            limit_bytes=1e9,
            most_bytes=1e9,
            device_chance=1.0,
            lines=(
                MemoryLine(name=LineName.PARAMS, num_bytes=100.0 * (stage + 1), formula="", source=""),
                MemoryLine(name=LineName.RUNTIME, num_bytes=50.0, formula="", source=""),
            ),
        )
        for stage in range(2)
    )
    time = (TimeLine(name=LineName.OPTIMIZER, busy_seconds=0.5, hidden_seconds=0.1, formula="", source=""),)
    return replace(make_plan(), memory=memory, time=time, step_seconds=2.0)


MEASURED = {
    "step_seconds": 2.5,
    "peak_memory_bytes": [160, None],
    "time": {"optimizer": {"seconds": 0.6, "reason": ""}},
    "memory": {
        "params": {"num_bytes": [110, 190], "reason": ""},
        "runtime": {"num_bytes": None, "reason": "not visible"},
    },
}


def test_each_line_is_beside_its_measurement(plan):
    found = [(each.name, each.stage, each.planned, each.measured, each.unit) for each in compare(plan, MEASURED)]
    assert found == [
        ("step", None, 2.0, 2.5, "seconds"),
        ("optimizer", None, 0.4, 0.6, "seconds"),
        ("params", 0, 100.0, 110, "bytes"),
        ("runtime", 0, 50.0, None, "bytes"),
        ("total", 0, 150.0, 160, "bytes"),
        ("params", 1, 200.0, 190, "bytes"),
        ("runtime", 1, 50.0, None, "bytes"),
        ("total", 1, 250.0, None, "bytes"),
    ]


def test_a_deviation_knows_its_error_or_its_reason(plan):
    lines = {(each.name, each.stage): each for each in compare(plan, MEASURED)}
    assert lines["step", None].relative_error == pytest.approx(0.25)
    assert lines["params", 1].relative_error == pytest.approx(-0.05)
    assert lines["runtime", 0].relative_error is None
    assert lines["runtime", 0].note == "not visible"


def test_lines_that_are_measured_as_one_are_planned_as_one(plan):
    lines = tuple(
        TimeLine(name=name, busy_seconds=seconds, formula="", source="")
        for name, seconds in ((LineName.COMPUTE, 2.0), (LineName.RECOMPUTE, 0.5), (LineName.BUBBLE, 0.25))
    )
    measured = {"time": {"compute": {"seconds": 3.0, "includes": ["recompute", "grad_accumulation"], "reason": ""}}}
    found = {
        each.name: (each.planned, each.measured, each.note) for each in compare(replace(plan, time=lines), measured)
    }
    assert found["compute"] == (2.5, 3.0, "with recompute")
    assert "recompute" not in found
    assert found["bubble"] == (0.25, None, "not in the measurements")


def test_a_plan_without_measurements_has_reasons_only(plan):
    assert all(each.measured is None for each in compare(plan, {}))
    assert compare(plan, {})[1].note == "not in the measurements"
