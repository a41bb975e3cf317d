"""The simplest of the layouts that are nearly as good: both methods against brute force, and each method broken."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, replace

import numpy as np
import pytest
from enumeration import long_forms
from test_solvers import all_choices, make_candidate

from planner.plan_parts import Keys
from planner.search import simplest
from planner.search.near_ties import keys_of, simpler_in
from planner.search.objectives import THROUGHPUT, Objective
from planner.search.optimum import simplest_dynamic_program, simplest_program
from planner.search.optimum.candidate import Disagreement
from planner.search.optimum.integer_program import columns_within
from planner.search.optimum.simplest_dynamic_program import Standing, least_of, most_even, simplest_choice
from planner.search.optimum.simplest_program import Contenders, solve_simplest
from planner.search.optimum.simplicity import Rated
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.load import load_job

FREE = Constraints()


def rate(rng, candidate):
    """A candidate with random keys that have few values, so many choices are equally simple.

    Often keys of the configuration alone decide.
    """
    columns, safe, once = candidate.num_columns, rng.random() < 0.6, rng.random() < 0.6
    whole = rng.random() < 0.5  # what recomputes does so with whole layers
    tenths = [10 * int(k) * rng.randint(0, 1) if whole else rng.randint(0, 10 * int(k)) for k in candidate.layers]
    tenths = [0] * columns if once else tenths
    return Rated(
        candidate=candidate,
        idle=rng.choice([0, 0, 0, 7]),
        interleave=rng.choice([0, 0, 1]),
        axes=rng.randint(1, 3),
        risk=np.array([0 if safe else rng.choice([0, 0, 1, 2]) for _ in range(columns)], dtype=np.int64),
        repeated=np.array(tenths, dtype=np.int64),
        alike=candidate.layers % rng.choice([1, 1, 1, 2]) == 0,
    )


def keys(rated, columns):
    """The keys of a choice, computed again."""
    inner = columns[1:-1]
    even = len({int(rated.candidate.layers[k]) for k in inner}) < 2 and all(rated.alike[k] for k in inner)
    tenths = sum(int(rated.repeated[k]) for k in columns) / rated.candidate.num_layers
    return (
        rated.idle,
        math.ceil(tenths - 1e-9),
        rated.interleave,
        int(not even),
        rated.axes,
        max(int(rated.risk[k]) for k in columns),
    )


def problem(rng):
    """Candidates that know the window, and the places of the choices within it; no choice is on its border."""
    candidates = [make_candidate(rng, max_stages=4, max_layers=5) for _ in range(rng.randint(1, 4))]
    choices = [(each, index) for index, one in enumerate(candidates) for each in all_choices(one, index)]
    times = sorted({round(choice.objective_seconds, 9) for choice, _ in choices})
    if not times:
        return [], []
    place = rng.randrange(len(times))
    window = times[place] + (min(times[place + 1] - times[place], 1.0) / 2 if place + 1 < len(times) else 1.0)
    rated = [rate(rng, replace(one, longest_seconds=window)) for one in candidates]
    inside = [(keys(rated[index], c.columns), c.objective_seconds) for c, index in choices]
    return rated, [each for each in inside if each[1] <= window]


def check(rng, *, program):
    rated, inside = problem(rng)
    if not rated:
        return False
    best = min(inside)
    found = None
    for each in rated:
        simple = simplest_choice(each, each.candidate.longest_seconds, before=found)
        if simple is not None:
            found, choice = simple
            assert each.candidate.is_choice(choice.columns)
            assert keys(each, choice.columns) == found.simplicity
            assert least_of(each) <= found.simplicity
    assert found.simplicity == best[0]
    assert found.seconds == pytest.approx(best[1], rel=1e-9)
    if program:
        kept = columns_within([each.candidate for each in rated], np.inf)
        left = [rated[index].keep(columns) for index, columns in kept.items()]
        if rng.random() < 0.5:
            contenders = Contenders()
            for each in left:  # one by one, so that what is tried rules out what comes later
                contenders.add([each])
            left = contenders.left()
        answer = solve_simplest(left)
        assert answer.status == "optimal"
        assert answer.simplicity == best[0]
        assert answer.choice.objective_seconds == pytest.approx(best[1], rel=1e-9)
    return len(set(inside)) > 1


@pytest.mark.parametrize("block", [0, *long_forms(*range(1, 60))])
def test_the_dynamic_program_finds_the_simplest_of_all_choices(block):
    told = [check(random.Random(seed), program=False) for seed in range(block * 60, block * 60 + 60)]
    assert sum(told) > 20, "few problems have anything to choose"


@pytest.mark.parametrize("block", [0, *long_forms(*range(1, 60))])
def test_the_integer_program_finds_the_simplest_of_all_choices(block):
    told = [check(random.Random(seed), program=True) for seed in range(10_022 + block * 8, 10_030 + block * 8)]
    assert any(told)


@pytest.mark.parametrize("block", [0, *long_forms(*range(1, 20))])
def test_no_choice_of_the_same_rank_is_more_even(block):
    """Among all choices with the least keys and step time, none has a larger smallest inner stage or smallest stage."""
    changed = 0
    for seed in range(block * 400, block * 400 + 400):
        rng = random.Random(f"even {seed}")
        candidate = make_candidate(rng, max_stages=5, max_layers=9)
        every = np.full(candidate.num_columns, 1.0)  # many choices tie where all columns cost the same
        candidate = replace(
            candidate, seconds=every, pass_seconds=every, tail_seconds=0 * every, slack_seconds=0 * every
        )
        rated = rate(rng, candidate)
        found = simplest_choice(rated, 1e9)
        if found is None:
            continue
        standing, choice = found
        even = most_even(rated, standing, choice)
        tied = [
            other.columns
            for other in all_choices(candidate, 0)
            if keys(rated, other.columns) == standing.simplicity
            and other.objective_seconds == pytest.approx(standing.seconds)
        ]
        assert even.columns in tied
        assert even.objective_seconds == pytest.approx(standing.seconds)
        mean = candidate.num_layers // candidate.num_stages
        sizes = [candidate.layers[list(columns)] for columns in tied]
        own = candidate.layers[list(even.columns)]
        if standing.simplicity.uneven:
            assert own[1:-1].min() >= min(mean, max(size[1:-1].min() for size in sizes))
            fewest = min(mean, int(own[1:-1].min()))
            assert own.min() >= fewest or all(size.min() < fewest for size in sizes)
        changed += even.columns != choice.columns
    assert changed > 3


def job(**given):
    documents = {"model": "llama3-8b", "cluster": "dgx-a100", "gpus": 8, "engine": "torch"}
    settings = ("model.num_layers=8", "device.memory=20 GiB")
    return load_job(**documents | {"settings": settings} | given, sequence_length=2048, global_batch_size=32)


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


@pytest.mark.parametrize("name", ["throughput", *long_forms("cost", "gpus", "memory")])
def test_the_plan_is_within_the_window_and_simpler(some_job, name):
    objective, within = Objective(name=name), 0.1
    least, plan = recommend(some_job, 0.0, objective), recommend(some_job, within, objective)
    assert least.layout == least.minimum.layout
    assert least.certificate.simplest is None
    assert plan.minimum.step_seconds == pytest.approx(least.step_seconds, rel=1e-9)
    assert plan.certificate.objective_seconds == pytest.approx(least.step_seconds, rel=1e-9)
    ranks = [objective.rank(each.step_seconds, each.layout.world_size) for each in (plan, least)]
    assert objective.is_near(*ranks, within * (1 + 1e-9))
    proof = plan.certificate.simplest
    assert proof.status == "optimal"
    assert proof.keys == keys_of(some_job, plan.layout)
    assert proof.seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert astuple(proof.keys) <= astuple(plan.minimum.keys)
    if plan.layout != least.layout:
        assert plan.minimum.reason == simpler_in(proof.keys, plan.minimum.keys) != ""


def test_a_wider_window_never_has_a_less_simple_plan(some_job):
    plans = [recommend(some_job, within) for within in (0.001, 0.02, 0.1)]
    found = [astuple(each.certificate.simplest.keys) for each in plans]
    assert found == sorted(found, reverse=True)
    assert any(each.layout != each.minimum.layout for each in plans)


def winner(plan):
    """The keys and the step of the plan, which each fault prevents one method from finding."""
    proof = plan.certificate.simplest
    return Standing(simplicity_of_keys(proof.keys), proof.seconds)


def simplicity_of_keys(found):
    return simplest.Simplicity(*astuple(found))


def is_winner(standing, plan):
    best = winner(plan)
    return standing.simplicity == best.simplicity and standing.seconds <= best.seconds * (1 + 1e-9)


def has_winner(rated, plan):
    """Whether a candidate reaches the plan's keys and step."""
    found = simplest_choice(rated, rated.candidate.longest_seconds)
    return found is not None and is_winner(found[0], plan)


def test_a_dynamic_program_that_misses_the_simplest(monkeypatch, some_job):
    plan, honest = recommend(some_job), simplest_dynamic_program.simplest_choice

    def misses(rated, cutoff, *, before=None):
        found = honest(rated, cutoff, before=before)
        return None if found is not None and is_winner(found[0], plan) else found

    monkeypatch.setattr(simplest, "simplest_choice", misses)
    with pytest.raises(Disagreement):
        recommend(some_job)


def test_an_integer_program_that_misses_the_simplest(monkeypatch, some_job):
    plan, honest = recommend(some_job), simplest_program.solve_simplest

    def misses(rated, **given):
        return honest([each for each in rated if not has_winner(each, plan)], **given)

    monkeypatch.setattr(simplest, "solve_simplest", misses)
    with pytest.raises(Disagreement, match="by the integer program"):
        recommend(some_job)


@pytest.mark.parametrize("method", ["_by_dynamic_program", "_by_program"])
def test_a_method_that_leaves_the_window(monkeypatch, method):
    """One of the two methods looks beyond the window, and answers with a simpler layout from there."""
    some_job, honest = job(), getattr(simplest, method)

    def leaves(found, _inside, _longest, *others):
        return honest(found, np.arange(len(found.near)), np.full(len(found.near), np.inf), *others)

    monkeypatch.setattr(simplest, method, leaves)
    with pytest.raises(Disagreement, match="by the dynamic program is"):
        recommend(some_job, 0.001)


def test_both_methods_that_leave_the_window(monkeypatch):
    """At the end the layout itself is compared with the window."""
    honest = simplest._inside
    monkeypatch.setattr(simplest, "_inside", lambda found, window: honest(found, replace(window, within=0.6)))
    with pytest.raises(Disagreement, match="outside the window"):
        recommend(job(), 0.001)


def test_a_prune_of_the_dynamic_program_that_drops_the_winner(monkeypatch, some_job):
    plan, honest = recommend(some_job), simplest.prune
    best = plan.certificate.simplest.seconds

    def drops(candidates, upper_bound, **given):
        masks = honest(candidates, upper_bound, **given)
        return [mask & (not reaches(each, best)) for each, mask in zip(candidates, masks, strict=True)]

    monkeypatch.setattr(simplest, "prune", drops)
    with pytest.raises(Disagreement):
        recommend(some_job)


def test_a_prune_of_the_integer_program_that_drops_the_winner(monkeypatch, some_job):
    plan, honest = recommend(some_job), simplest.columns_within
    best = plan.certificate.simplest.seconds

    def drops(candidates, upper_bound):
        kept = honest(candidates, upper_bound)
        return {index: columns for index, columns in kept.items() if not reaches(candidates[index], best)}

    monkeypatch.setattr(simplest, "columns_within", drops)
    with pytest.raises(Disagreement):
        recommend(some_job)


def reaches(candidate, seconds):
    """Whether some choice of a candidate takes exactly these seconds."""
    return any(abs(c.objective_seconds - seconds) <= 1e-9 * seconds for c in some_choices(candidate))


def some_choices(candidate):
    return all_choices(candidate) if candidate.num_columns <= 60 else []


def test_keys_before_the_split_that_are_too_high(monkeypatch):
    """The keys of a configuration alone order the dynamic program's work, and let it stop."""
    some_job, honest = job(**JOBS["interleaved"]), simplest._alone
    monkeypatch.setattr(simplest, "_FIRST", 1)
    assert recommend(some_job).certificate.simplest.keys
    monkeypatch.setattr(simplest, "_alone", lambda alone: honest(alone)._replace(recomputed=9))
    with pytest.raises(Disagreement):
        recommend(some_job)


def test_layouts_of_the_first_solve_are_held_against_the_answer(monkeypatch):
    """Both methods miss configurations of the window for which the first solve has layouts."""
    honest = simplest._inside

    def only_the_fastest(found, window):
        inside, longest = honest(found, window)
        fastest = min(found.layouts, key=lambda each: each.seconds).degrees
        kept = np.array([found.near.one(position) == fastest for position in inside.tolist()])
        return inside[kept], longest[kept]

    monkeypatch.setattr(simplest, "_inside", only_the_fastest)
    with pytest.raises(Disagreement, match="is not the simplest"):
        recommend(job(), 0.1)


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ({"risk": 0}, {"risk": 1}, "a chance of at most 1% of not fitting in place of a chance of at most 5%"),
        ({"idle": 0, "axes": 4}, {"idle": 12}, "no idle devices in place of 12"),
        ({"recomputed": 0}, {"recomputed": 3}, "nothing computed again in place of 3 tenths"),
        ({"interleave": 0}, {"interleave": 2}, "1 chunk a stage in place of up to 8 chunks a stage"),
        ({"uneven": 0}, {"uneven": 1}, "even stages in place of uneven ones"),
        ({"axes": 2}, {"axes": 3}, "2 axes in place of 3"),
        ({"axes": 4, "risk": 0}, {"axes": 2, "risk": 1}, ""),
        ({}, {}, ""),
    ],
)
def test_the_first_key_that_is_less_says_what_is_simpler(mine, theirs, words):
    some = {"idle": 0, "recomputed": 0, "interleave": 0, "uneven": 0, "axes": 2, "risk": 0}
    assert simpler_in(Keys(**some | mine), Keys(**some | theirs)) == words
