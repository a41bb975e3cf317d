"""A plan on axes without published runs names the best layout on axes with such runs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from enumeration import long_forms

from planner.api import plan_job
from planner.cost.band import axes_of
from planner.plan_file import plan_from_json
from planner.search.objectives import Objective
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.search.space.space import Space
from planner.search.with_runs import with_runs
from planner.show.screen import Screen, to_text
from planner.show.summary import summary
from planner.specs.load import load_job

FREE = Constraints()


def job(**changes):
    job = load_job(
        model="qwen3-30b-a3b",
        cluster="dgx-h100",
        engine="megatron",
        nodes=1,
        sequence_length=4096,
        global_batch_size=64,
        settings=("model.num_layers=12",),
    )
    return replace(job, **changes)


@cache
def plain():
    """The plan of the job with all runs."""
    return search(job(), FREE, within=0.02)


def with_axes(asked, *axes):
    """The job, as if its engine's runs on layers with experts had these axes only."""
    own = next(each for each in asked.evidence if each.engine == "megatron" and each.experts)
    others = [each for each in asked.evidence if each.engine != "megatron" or not each.experts]
    return replace(asked, evidence=(*others, *(own.model_copy(update={"axes": each, "features": ()}) for each in axes)))


def best_with(asked, axes):
    """The step of the best layout with these axes, by one pinned search for each degree of data sharding."""
    signs = {axis: ">1" if axis in axes.split("+") else "=1" for axis in ("tp", "pp", "cp", "ep")}
    zero = "zero>=2" if "fsdp" in axes else "zero<=1"
    found = search(asked, Constraints.parse([",".join([zero, *(f"{axis}{sign}" for axis, sign in signs.items())])]))
    assert axes_of(found.layout) == axes
    return found.step_seconds


def fastest_with_runs(asked, plan):
    """The step of the layout with runs, if none may be slower and easier to run."""
    return with_runs(Space(asked, FREE), plan_objective(), plan.layout, plan.step_seconds, 0.0).step_seconds


def test_a_plan_with_runs_names_no_other_layout():
    asked = job()
    assert search(with_axes(asked, axes_of(plain().layout)), FREE, within=0.02).with_runs is None
    assert search(with_axes(asked), FREE, within=0.02).with_runs is None  # no run of its kind at all


def test_the_best_layout_with_runs_is_named_with_them():
    """A search that is pinned to these axes finds the same step."""
    axes = "ep" if axes_of(plain().layout) != "ep" else "pp+ep"
    asked = with_axes(job(), axes)
    plan = search(asked, FREE, within=0.02)
    assert plan.layout == plain().layout
    found = plan.with_runs
    assert found.axes == axes_of(found.layout) == axes
    assert fastest_with_runs(asked, plan) == pytest.approx(best_with(asked, axes), rel=1e-9)
    assert found.step_seconds <= best_with(asked, axes) * 1.02
    assert found.step_seconds <= plan.high_step_seconds
    runs = [each for each in asked.evidence if each.engine == "megatron" and each.experts]
    assert found.num_runs == sum(len(each.ratios) for each in runs)
    assert found.families == tuple({each.family for each in runs})
    assert plan_from_json(plan.to_json()).with_runs == found
    said = " ".join(to_text(summary(plan, ()), Screen()).split())
    assert f"has axes {axes_of(plan.layout)}" in said
    assert f"with axes {axes}, by {found.families[0]}" in said


def test_axes_with_runs_come_before_all_other_keys_but_the_hosts():
    """Wherever the fastest layout with these axes is in the window, by a pinned search, the plan has them."""
    within = 0.06
    for axes in ("ep", "tp+ep"):
        asked = with_axes(job(), axes)
        plan = search(asked, FREE, within=within, top=0)
        is_near = best_with(asked, axes) <= plan.minimum.step_seconds * (1 + within)
        assert (axes_of(plan.layout) == axes) == is_near


def test_of_several_axes_the_fastest_layout_counts():
    others = [each for each in ("ep", "pp+ep", "tp+ep") if each != axes_of(plain().layout)]
    asked = with_axes(job(), *others)
    fastest = fastest_with_runs(asked, search(asked, FREE, within=0.02))
    assert fastest == pytest.approx(min(best_with(asked, axes) for axes in others), rel=1e-9)


def test_a_layout_beyond_the_band_is_not_named():
    """With runs of pure tensor parallelism only, the plan is faster for all that its band leaves open."""
    asked = with_axes(job(), "tp+cp")
    plan = search(asked, FREE, within=0.02)
    slow = best_with(asked, "tp+cp")
    found = with_runs(Space(asked, FREE), plan_objective(), plan.layout, plan.step_seconds, 0.0)
    assert (found is None) == (slow > plan.high_step_seconds)
    beyond = plan.step_seconds * slow / plan.high_step_seconds / 1.01
    for within in (0.0, 0.02):
        assert with_runs(Space(asked, FREE), plan_objective(), plan.layout, beyond, within) is None
        assert with_runs(Space(asked, FREE), plan_objective(), plan.layout, beyond * 1.02, within) is not None


@pytest.mark.parametrize("name", ["cost", "gpus"])
def test_a_layout_with_runs_stays_in_the_band_under_every_objective(name):
    """A cheaper layout on fewer devices takes longer than the band of a plan on all devices allows."""
    axes, pin = ("ep", "pp=1") if axes_of(plain().layout) != "ep" else ("pp+ep", "pp>=2")
    asked = with_axes(job(), axes)
    plan = search(asked, FREE, within=0.02)
    assert plan.layout.world_size == 8
    cheapest = search(asked, Constraints.parse([f"tp=1,{pin},cp=1,ep>=2,zero<=1"]), objective=Objective(name=name))
    assert cheapest.layout.world_size < 8
    assert cheapest.step_seconds > plan.high_step_seconds
    found = with_runs(Space(asked, FREE), Objective(name=name), plan.layout, plan.step_seconds, 0.02)
    assert found.step_seconds <= plan.high_step_seconds


def plan_objective():
    from planner.search.objectives import THROUGHPUT

    return THROUGHPUT


def kind(layout):
    return layout.tp, layout.pp, layout.cp, layout.ep


@pytest.mark.parametrize(
    ("model", "cluster", "nodes", "length", "batch", "engine"),
    [
        ("llama3-70b", "dgx-h100", 16, 8192, 512, "megatron"),
        ("deepseek-v2-lite", "dgx-h100", 2, 4096, 256, "megatron"),
        *long_forms(
            ("llama3-8b", "dgx-a100", 2, 4096, 128, "torch"),
            ("llama3-8b", "rtx4090-box", 1, 4096, 64, "torchtitan"),
            ("qwen3-30b-a3b", "dgx-h100", 8, 4096, 512, "megatron"),
            ("mixtral-8x7b", "p4d", 16, 4096, 512, "megatron"),
            ("llama3-70b", "hgx-mi300x", 8, 8192, 256, "megatron"),
        ),
    ],
)
def test_the_first_three_runners_up_are_of_three_kinds_and_one_line_says_what_they_settle(
    model, cluster, nodes, length, batch, engine
):
    """Where there are three other kinds at all: a search for a hundred runners-up finds them."""
    asked = {"nodes": nodes, "seq_len": length, "global_batch": batch, "engine": engine}
    plan, every = plan_job(model, cluster, **asked), plan_job(model, cluster, **asked, top=100)
    assert plan.layout == every.layout
    others = {kind(each.layout) for each in every.runners_up} - {kind(plan.layout)}
    layouts = [plan.layout, *(each.layout for each in plan.runners_up)]
    assert len({kind(each) for each in layouts}) == len(layouts) == 1 + min(3, len(others))
    said = " ".join(to_text(summary(plan, ()), Screen()).split()).partition("they settle ")[2]
    named = dict.fromkeys(("tp", "pp", "cp", "ep"), "")
    for axis in named:
        first, *rest = np.unique([getattr(each, axis) for each in layouts]).tolist()
        named[axis] = f"{axis} {', '.join(map(str, [first, *rest[:-1]]))} or {rest[-1]}" if rest else ""
    assert said.startswith(", ".join(filter(None, named.values())))
