"""The recommendation: what its list and its ranking promise, and mistakes that the search notices.

`test_search` compares list and ranking with brute force over small jobs.
"""

from __future__ import annotations

import random
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from enumeration import long_forms

from planner.cost.estimate import estimate
from planner.errors import InputError
from planner.evidence.rows.jobs import Unsupported, job_of
from planner.evidence.rows.runs import read_runs
from planner.layout_text import parse_layout
from planner.plan_parts import Keys
from planner.search import recommendation
from planner.search.footprint import NothingFits
from planner.search.near_ties import simpler_in
from planner.search.objectives import THROUGHPUT, Objective
from planner.search.optimum.candidate import Disagreement
from planner.search.ranking import keys_of
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.load import load_job

FREE = Constraints()


def job(**given):
    documents = {"model": "llama3-8b", "cluster": "dgx-a100", "gpus": 8, "engine": "torch"}
    settings = ("model.num_layers=8", "device.memory=20 GiB")
    sizes = {"sequence_length": 2048, "global_batch_size": 32}
    return load_job(**documents | {"settings": settings} | sizes | given)


INTERLEAVED = ("model.num_layers=16", "device.memory=44 GiB")
EXPERTS = ("model.num_layers=8", "device.memory=40 GiB")
JOBS = {
    "recompute per stage": {},
    "interleaved": {"model": "megatron-22b", "engine": "megatron", "settings": INTERLEAVED},
    "experts": {"model": "qwen3-30b-a3b", "engine": "megatron", "gpus": 4, "settings": EXPERTS},
}


@pytest.fixture(params=["recompute per stage", *long_forms("interleaved", "experts")])
def some_job(request):
    return job(**JOBS[request.param])


def recommend(some_job, within=0.1, objective=THROUGHPUT):
    return search(some_job, FREE, objective=objective, within=within)


def listed(monkeypatch, some_job, within=0.1, **options):
    """The plan, and the list from which it was chosen, as layouts."""
    seen, honest = [], recommendation.shortlist

    def spy(found, window):
        seen.append((found, honest(found, window)))
        return seen[0][1]

    with monkeypatch.context() as patched:
        patched.setattr(recommendation, "shortlist", spy)
        plan = search(some_job, FREE, within=within, **options)
    (found, layouts), *_ = seen
    return plan, [found.layout_of(each) for each in layouts]


@pytest.mark.parametrize("name", ["throughput", *long_forms("cost", "gpus", "memory")])
def test_the_plan_is_in_the_window_and_no_harder_to_run(some_job, name):
    objective, within = Objective(name=name), 0.1
    least, plan = recommend(some_job, 0.0, objective), recommend(some_job, within, objective)
    assert least.layout == least.minimum.layout
    assert least.certificate.recommendation is None
    assert plan.minimum.step_seconds == pytest.approx(least.step_seconds, rel=1e-9)
    assert plan.certificate.objective_seconds == pytest.approx(least.step_seconds, rel=1e-9)
    ranks = [objective.rank(each.step_seconds, each.layout.world_size) for each in (plan, least)]
    assert objective.is_near(*ranks, within * (1 + 1e-9))
    told = plan.certificate.recommendation
    assert told.within == within
    assert told.keys == keys_of(some_job, plan.layout) <= plan.minimum.keys
    if plan.layout != least.layout:
        assert plan.minimum.reason == simpler_in(told.keys, plan.minimum.keys) != ""


def test_a_wider_window_has_a_longer_list_and_never_a_plan_that_is_harder_to_run(some_job):
    plans = [recommend(some_job, within) for within in (0.001, 0.02, 0.2)]
    told = [each.certificate.recommendation for each in plans]
    assert [each.num_listed for each in told] == sorted(each.num_listed for each in told)
    assert [each.keys for each in told] == sorted((each.keys for each in told), reverse=True)
    assert any(each.layout != each.minimum.layout for each in plans)


def test_the_list_does_not_depend_on_how_many_runners_up_are_asked_for(monkeypatch, some_job):
    lists = [set(listed(monkeypatch, some_job, top=top)[1]) for top in (0, 3, 100)]
    assert len(lists[0]) > 1
    assert lists[0] == lists[1] == lists[2]


def check_nothing_listed_beats_the_plan(monkeypatch, some_job, within):
    """No layout of the list, nor the minimum, is faster than the plan and no worse in every key."""
    plan, layouts = listed(monkeypatch, some_job, within)
    mine, step = astuple(keys_of(some_job, plan.layout)), plan.step_seconds
    assert plan.minimum.layout in layouts
    assert plan.layout in layouts
    for layout in layouts:
        priced = estimate(some_job, layout)
        assert priced.fits
        assert priced.step_seconds <= plan.minimum.step_seconds * (1 + within) * (1 + 1e-9)
        if priced.step_seconds < step * (1 - 1e-9):
            theirs = astuple(keys_of(some_job, layout))
            assert any(own < other for own, other in zip(mine, theirs, strict=True)), layout
    return len(layouts)


@pytest.mark.parametrize("name", JOBS)
def test_nothing_listed_is_faster_and_no_worse_in_any_key(monkeypatch, name):
    assert check_nothing_listed_beats_the_plan(monkeypatch, job(**JOBS[name]), 0.1) > 2


TABLE = Path(__file__).parents[1] / "published" / "measurements.csv"


@pytest.mark.parametrize("number", [5, 120, 333, *long_forms(*range(10, 400, 12))])
def test_nothing_listed_beats_the_plan_on_published_jobs(monkeypatch, number):
    """Jobs that people ran, drawn from the table; those too large for a test, or without a plan, are passed over."""
    runs = list(read_runs(TABLE))
    random.Random(number).shuffle(runs)
    for run in runs:
        setup = job_of(run)
        if isinstance(setup, Unsupported) or setup.job.num_devices > 512:
            continue
        try:
            plan = search(setup.job, FREE, within=0.02)
        except InputError:
            continue
        if not isinstance(plan, NothingFits) and plan.fits:
            assert check_nothing_listed_beats_the_plan(monkeypatch, setup.job, 0.02)
            return


def test_a_list_that_leaves_the_window(monkeypatch):
    """Layouts from beyond the window are easier to run; at the end the ledger is compared with the window."""
    honest = recommendation.shortlist
    monkeypatch.setattr(recommendation, "shortlist", lambda found, window: honest(found, replace(window, within=0.6)))
    with pytest.raises(Disagreement, match="above the minimum"):
        recommend(job(), 0.001)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_price_of_the_list_that_is_not_the_ledgers(monkeypatch, factor):
    honest = recommendation.shortlist

    def mispriced(*given):
        return [replace(each, seconds=each.seconds * factor) for each in honest(*given)]

    monkeypatch.setattr(recommendation, "shortlist", mispriced)
    with pytest.raises(Disagreement, match="the solvers saw"):
        recommend(job())


LAYOUTS = {
    "plain": "dp=8,zero=1",
    "idle devices of a host": "dp=4,zero=1",
    "two axes": "tp=2,pp=2,dp=2,zero=1,sp=1",
    "one set of modules": "pp=2,dp=4,zero=1,recompute=core_attn",
    "some layers": "pp=2,dp=4,zero=1,recompute=full:1",
    "stages that differ": "pp=2,dp=4,zero=1,recompute=full/none",
    "ends": "pp=4,dp=2,zero=1,layers_per_stage=7/9/9/7",
    "inner stages": "pp=4,dp=2,zero=1,layers_per_stage=8/9/8/7",
    "chunks": "pp=4,dp=2,zero=1,interleave=2,layers_per_stage=4/5/5*4/3",
}


@pytest.mark.parametrize(
    ("name", "machines", "axes", "by_hand", "chunks", "uneven"),
    [
        ("plain", 1, 0, 0, 1, 0),
        ("idle devices of a host", 1, 0, 0, 1, 0),  # a host is one machine, however many of its devices are in use
        ("two axes", 1, 2, 0, 1, 0),
        ("one set of modules", 1, 1, 0, 1, 0),
        ("some layers", 1, 1, 1, 1, 0),
        ("stages that differ", 1, 1, 1, 1, 0),
        ("ends", 1, 1, 0, 1, 0),
        ("inner stages", 1, 1, 0, 1, 1),
        ("chunks", 1, 1, 0, 2, 1),
    ],
)
def test_keys_by_hand(name, machines, axes, by_hand, chunks, uneven):
    asked = load_job(model="llama3-8b", cluster="dgx-h100", gpus=8, engine="megatron", global_batch_size=32)
    layout = parse_layout(LAYOUTS[name], num_layers=32, num_devices=8)
    found = replace(keys_of(asked, layout), risk=0)
    expected = Keys(machines=machines, unseen=0, axes=axes, by_hand=by_hand, chunks=chunks, risk=0, uneven=uneven)
    assert found == expected


@pytest.mark.parametrize(("cluster_hosts", "used"), [(4, 3), (37, 37), (256, 252), (256, 241), (256, 240)])
def test_hosts_in_use_count_one_by_one(cluster_hosts, used):
    asked = load_job(model="llama3-8b", cluster="dgx-h100", nodes=cluster_hosts, engine="megatron", global_batch_size=8)
    layout = parse_layout(f"dp={8 * used},zero=1", num_layers=32, num_devices=8 * used)
    assert keys_of(asked, layout).machines == used


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ({"risk": 0}, {"risk": 1}, "a chance of at most 1% of not fitting in place of a chance of at most 5%"),
        (
            {"unseen": 0, "axes": 4},
            {"unseen": 1, "axes": 3},
            "axes that published runs have in place of axes that none",
        ),
        ({"machines": 3, "axes": 4}, {"machines": 4}, "3 hosts in place of 4 hosts"),
        ({"by_hand": 0}, {"by_hand": 1}, "one switch for recompute in place of recompute layer by layer"),
        ({"chunks": 1}, {"chunks": 2}, "1 chunk a stage in place of 2 chunks a stage"),
        ({"uneven": 0}, {"uneven": 1}, "even stages in place of uneven ones"),
        ({"axes": 2}, {"axes": 3}, "2 axes in place of 3 axes"),
        ({"axes": 4, "risk": 0}, {"axes": 2, "risk": 1}, ""),
        ({}, {}, ""),
    ],
)
def test_the_first_key_that_is_less_says_what_is_better(mine, theirs, words):
    some = {"machines": 1, "unseen": 0, "axes": 2, "by_hand": 0, "chunks": 1, "risk": 0, "uneven": 0}
    assert simpler_in(Keys(**some | mine), Keys(**some | theirs)).startswith(words)
    assert bool(words) == bool(simpler_in(Keys(**some | mine), Keys(**some | theirs)))
