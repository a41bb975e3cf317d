"""The time table says whose lines it holds, and how far this stage is from the others; the oracle executes the step."""

from __future__ import annotations

import json

import numpy as np
import pytest

import planner
from planner.answers.plan_inputs import job_of
from planner.answers.report import explain
from planner.cli import main
from planner.cost.estimate import timeline
from planner.plan_file import plan_from_json
from planner.show.explain import explanation
from planner.show.screen import Screen, to_text

LAYOUTS = {
    "last stage has the head": ("llama3-8b", "dgx-h100", "tp=2,pp=4,mbs=1,recompute=none"),
    "uneven": ("llama3-8b", "dgx-h100", "tp=2,pp=4,layers_per_stage=11/7/7/7,recompute=full"),
    "interleaved": ("llama3-8b", "dgx-h100", "tp=2,pp=4,interleave=2,schedule=interleaved"),
    "two kinds of devices": ("llama3-8b", "mixed-a100-h100", "tp=8,pp=2,recompute=full,pools=a100/h100"),
}
ONE_LINE = Screen(width=400)


def plan_of(model: str, cluster: str, layout: str) -> planner.Plan:
    keywords = {"seq_len": 4096, "global_batch": 64, "engine": "megatron"}
    return planner.estimate_layout(model, cluster, layout=layout, **keywords)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_table_names_the_stage_and_its_share_of_the_mean(name: str) -> None:
    plan = plan_of(*LAYOUTS[name])
    busy = timeline(job_of(plan), plan.layout).busy_seconds
    slowest, times = int(np.argmax(busy)), float(busy.max() / busy.mean())
    assert plan.slowest_of_mean == pytest.approx(times, rel=1e-6)
    assert json.loads(plan.to_json())["slowest_of_mean"] == plan.slowest_of_mean
    assert plan_from_json(plan.to_json()) == plan
    words = f"stage {slowest}, {times:.2f} times the mean of all stages"
    said = to_text(explanation(explain(plan), ["time"]), ONE_LINE).splitlines()
    assert sum(words in line for line in said if line.startswith(("Time of a step", "From peak"))) == 2


def test_lines_after_the_last_microbatch_name_their_own_stage() -> None:
    plan = plan_of("llama3-8b", "dgx-h100", "tp=2,pp=4,layers_per_stage=8/10/8/6,recompute=full,zero=0")
    stages = {line.name: line.stage for line in plan.time}
    assert stages["compute"] != stages["optimizer"], "stage 0 has the embedding, stage 1 the most layers"
    said = to_text(explanation(explain(plan), ["time"]), ONE_LINE).splitlines()
    heading = next(line for line in said if line.startswith("Time of"))
    assert f"lines of stage {stages['compute']}, " in heading
    assert heading.endswith(f"after the last microbatch, of stage {stages['optimizer']}")


def test_the_page_names_the_stage(tmp_path) -> None:
    plan = plan_of(*LAYOUTS["last stage has the head"])
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert main(["explain", str(tmp_path / "plan.json"), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert f"lines of stage 3, {plan.slowest_of_mean:.2f} times the mean of all stages" in page


def test_one_stage_needs_no_words() -> None:
    plan = plan_of("llama3-8b", "dgx-h100", "tp=8,pp=1")
    assert plan.slowest_of_mean == 1
    assert "times the mean" not in to_text(explanation(explain(plan)), ONE_LINE)
