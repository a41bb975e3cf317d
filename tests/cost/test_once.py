"""A stage is asked once: what a formula knows of a job, a layout and a stage is computed once in an estimate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import isfunction, signature
from pkgutil import iter_modules

import pytest
from project_tools import load_tool

import planner.cost
from planner.cost.estimate import estimate
from planner.layout_text import parse_layout
from planner.once import once

bench = load_tool("bench_pricing")


def functions_of_stages():
    found = set()
    for each in iter_modules(planner.cost.__path__, "planner.cost."):
        members = vars(import_module(each.name)).values()
        found |= {one.__name__ for one in members if isfunction(one) and "stage" in signature(one).parameters}
    return found


@pytest.mark.parametrize(
    ("model", "text"), [("llama3-70b", "tp=4,pp=4"), ("deepseek-v3", "pp=8,ep=8"), ("falcon-h1-34b", "tp=2,pp=2")]
)
def test_no_function_of_a_stage_is_computed_twice(make_job, model, text):
    job = replace(make_job(model, "dgx-h100", gpus=128, batch=512))
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=128)
    calls = bench.calls_of(partial(estimate, job, layout))
    of_stage = {"held_params", "trained_params", "layer_kinds", "activation_terms", "stages_of", "kept_bytes_of_layer"}
    assert {name for name, _ in calls} >= of_stage
    twice = {name for name, repeats in calls if repeats} & functions_of_stages()
    assert not twice


def test_the_same_objects_are_computed_once_and_equal_ones_again():
    asked = []

    @once
    def double(values, *, times=2):
        asked.append(times)
        return [times * value for value in values]

    values = [1.0, 2.0]
    assert double(values) is double(values)
    assert asked == [2]
    assert double([1.0, 2.0]) == double(values)
    assert double(values, times=3) == [3.0, 6.0]
    assert asked == [2, 2, 3]
    for number in range(5):
        double([number])
    double(values)
    assert len(asked) == 9  # it keeps the latest answers alone
