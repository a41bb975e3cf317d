"""A mistake in one of the two methods is noticed by the other: each is broken here, and `search` must say so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.search import best_first
from planner.search.objectives import THROUGHPUT, Objective
from planner.search.optimum import certificate, integer_program
from planner.search.optimum.candidate import Disagreement
from planner.search.optimum.dynamic_program import best_choice
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.load import load_job

OBJECTIVES = [THROUGHPUT, Objective(name="cost"), Objective(name="gpus"), Objective(name="memory")]
SMALL = ("model.num_layers=8",)
JOBS = {
    "pipeline": {
        "model": "megatron-22b",
        "cluster": "dgx-a100",
        "gpus": 4,
        "engine": "torch",
        "settings": (*SMALL, "device.memory=24 GiB"),
    },
    "experts": {"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "gpus": 4, "engine": "megatron", "settings": SMALL},
    "pools": {"model": "llama3-8b", "cluster": "POOLS", "engine": "torch", "settings": SMALL},
}
POOLS = """
name: two
pools:
  - {name: a100, cluster: dgx-a100, hosts: 1}
  - {name: h100, cluster: dgx-h100, hosts: 1}
between: {name: infiniband, spans: cluster, bandwidth: 25 GB/s, latency: 8 us, kind: fat-tree}
"""


@pytest.fixture(params=JOBS)
def job(request, tmp_path):
    """A job whose optimum has a pipeline, so that splits and recompute are to be decided."""
    (tmp_path / "pools.yaml").write_text(POOLS, encoding="utf-8")
    given = JOBS[request.param]
    cluster = str(tmp_path / "pools.yaml") if given["cluster"] == "POOLS" else given["cluster"]
    return load_job(**given | {"cluster": cluster}, sequence_length=2048, global_batch_size=16)


def best_of(job, objective=THROUGHPUT):
    return search(job, Constraints(), objective=objective)


def seconds_of(candidate):
    """The optimum of one candidate, infinite where it has none."""
    choice = best_choice(candidate)
    return choice.objective_seconds if choice else np.inf


def is_best(plan, candidate):
    """Whether a candidate reaches the optimum that a plan was certified with; several may tie."""
    return seconds_of(candidate) <= plan.certificate["objective_seconds"] * (1 + 1e-9)


def without_best(candidates):
    """The candidates less those of the least optimum."""
    optima = [seconds_of(each) for each in candidates]
    return [each for each, seconds in zip(candidates, optima, strict=True) if seconds > min(optima) * (1 + 1e-9)]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: each.name)
def test_a_dynamic_program_that_misses_the_optimum(monkeypatch, job, objective):
    plan, honest = best_of(job, objective), best_first.best_choice

    def misses(candidate, **given):
        return None if is_best(plan, candidate) else honest(candidate, **given)

    monkeypatch.setattr(best_first, "best_choice", misses)
    with pytest.raises(Disagreement, match="the integer program's best is "):
        best_of(job, objective)


def test_a_dynamic_program_that_finds_nothing_at_all(monkeypatch, job):
    monkeypatch.setattr(best_first, "best_choice", lambda *_, **__: None)
    with pytest.raises(Disagreement, match=r"dynamic program's \(inf, inf\)"):
        best_of(job)


def test_a_dynamic_program_that_says_less_than_its_layout_takes(monkeypatch, job):
    honest = best_first.best_choice

    def lies(candidate, **given):
        choice = honest(candidate, **given)
        return choice and replace(choice, objective_seconds=choice.objective_seconds * 0.97)

    monkeypatch.setattr(best_first, "best_choice", lies)
    with pytest.raises(Disagreement, match="or takes"):
        best_of(job)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: each.name)
def test_an_integer_program_that_misses_the_optimum(monkeypatch, job, objective):
    honest = certificate.solve_program

    def misses(candidates, **given):
        return honest(without_best(candidates), **given | {"upper_bound": None})

    monkeypatch.setattr(certificate, "solve_program", misses)
    with pytest.raises(Disagreement, match="the integer program"):
        best_of(job, objective)


def test_an_integer_program_that_drops_columns_of_the_optimum(monkeypatch, job):
    plan, honest = best_of(job), integer_program._columns_within

    def drops(candidates, _upper_bound):
        kept = honest(candidates, np.inf)
        return {index: columns for index, columns in kept.items() if not is_best(plan, candidates[index])}

    monkeypatch.setattr(integer_program, "_columns_within", drops)
    with pytest.raises(Disagreement):
        best_of(job)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: each.name)
def test_a_prune_that_drops_the_winner(monkeypatch, job, objective):
    plan, honest = best_of(job, objective), best_first.prune

    def drops(candidates, upper_bound):
        masks = honest(candidates, upper_bound)
        return [mask & (not is_best(plan, each)) for each, mask in zip(candidates, masks, strict=True)]

    monkeypatch.setattr(best_first, "prune", drops)
    with pytest.raises(Disagreement):
        best_of(job, objective)


@pytest.mark.parametrize("name", ["even_split_seconds", "greedy_choice"])
def test_first_fillings_that_are_priced_too_low(monkeypatch, job, name):
    """They make the cutoff, so that a low one could rule the optimum out."""
    honest = getattr(best_first, name)

    def low(*given, **named):
        found = honest(*given, **named)
        if isinstance(found, np.ndarray):
            return found * 0.5
        return found and replace(found, objective_seconds=found.objective_seconds * 0.5)

    is_used = (name == "greedy_choice") == (len(job.pools) > 1)
    monkeypatch.setattr(best_first, name, low)
    if is_used:
        with pytest.raises(Disagreement, match="a layout was tried"):
            best_of(job)


def test_what_both_decided_on_is_all_that_the_bounds_leave(job):
    """Counts of the certificate add up, and both methods had something to decide."""
    plan = best_of(job)
    found = plan.certificate
    assert found["status"] == "optimal"
    assert found["dynamic_program_seconds"] == found["objective_seconds"] == pytest.approx(plan.step_seconds, rel=1e-9)
    assert 0 < found["num_decided"] <= found["num_legal"] - found["num_pruned"]["memory"]
