"""The effect of the engine's name on a forecast: the same layout under corrections that name no engine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planner.search.given import LABEL, plan_for_text
from planner.show.rows import BAND, rows_of
from planner.show.screen import Screen, to_text
from planner.specs.by_name import shipped_calibration
from planner.specs.load import load_job

LAYOUT = "tp=2,pp=2,dp=4,mbs=1,zero=1,recompute=none"


def priced(engine, **given):
    documents = {"model": "llama3-8b", "cluster": "dgx-b200", "gpus": 16, "engine": engine}
    return plan_for_text(load_job(**documents | given, sequence_length=8192, global_batch_size=64), LAYOUT)


@pytest.fixture
def of_any_engine(tmp_path):
    """A calibration file with only those shipped entries that name no engine."""
    entries = [each for each in shipped_calibration().entries if not (each.engine or each.layers)]
    path = tmp_path / "any.json"
    path.write_text(json.dumps({"entries": [each.model_dump(mode="json") for each in entries]}), encoding="utf-8")
    return path


@pytest.mark.parametrize("engine", ["megatron", "megatron-bridge", "deepspeed"])
def test_the_name_of_the_engine_is_told_where_it_moves_the_step(engine, of_any_engine):
    plan, without = priced(engine), priced(engine, calibration=of_any_engine)
    share = plan.step_seconds / without.step_seconds - 1
    assert without.engine_label is None
    if abs(share) <= LABEL:
        assert plan.engine_label is None
    else:
        assert plan.engine_label.share == pytest.approx(share, rel=1e-6)
        ran = [e for e in shipped_calibration().evidence if (e.engine, e.device) == (engine, "b200-180gb")]
        assert plan.engine_label.num_runs == sum(len(each.ratios) for each in ran)


def test_some_engines_name_moves_the_step_and_the_band_says_so():
    plan = priced("megatron")
    assert plan.engine_label is not None
    said, silent = (to_text(rows_of(each, BAND), Screen()) for each in (plan, replace(plan, engine_label=None)))
    assert f"{plan.engine_label.num_runs} runs on" in " ".join(said.split())
    assert "which no feature" not in " ".join(silent.split())
