"""The description of layouts beside the plan, and the choice of the layouts that are listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.estimate import estimate
from planner.layout import Layout
from planner.search.near_ties import differences, near_tie, runner_up, simpler_in, slower_by
from planner.search.objectives import WORTH_READING, Objective
from planner.search.ranking import keys_of
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.load import load_job

FREE = Constraints()


def job(model="llama3-8b", nodes=4, batch=64, length=1024):
    return load_job(model=model, cluster="dgx-a100", nodes=nodes, global_batch_size=batch, sequence_length=length)


def test_differences_are_named_key_by_key():
    one = Layout(tp=2, pp=2, dp=4, layers_per_stage=(16, 16), recompute=("none", "none"))
    assert differences(one, one) == ""
    assert differences(one, replace(one, tp=4, dp=2)) == "tp 2 -> 4, dp 4 -> 2"
    assert differences(one, replace(one, recompute=("full", "none"))) == "recompute none -> full/none"
    assert differences(one, replace(one, layers_per_stage=(15, 17))) == "other layers on each stage"


def test_a_near_tie_is_a_small_difference_either_way():
    assert near_tie(1.0, 1.029)
    assert near_tie(1.029, 1.0)
    assert not near_tie(1.0, 1.031)


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "as fast"), (1e-6, "as fast"), (3e-4, "0.03% slower"), (-3e-4, "0.03% faster"), (0.021, "2.1% slower"),
     (-0.021, "2.1% faster"), (4.2, "420% slower")],
)  # fmt: skip
def test_small_differences_keep_their_digits(share, words):
    assert slower_by(share) == words


def test_runners_up_say_the_one_reason():
    """By the ledgers of both layouts, the reason is the line that differs most in the direction of the step."""
    found = search(job(), FREE, top=6)
    own = estimate(job(), found.layout)
    mine = {line.name.value.replace("_", " "): float(line.exposed_seconds) for line in own.time}
    assert found.runners_up
    for runner in found.runners_up:
        theirs = estimate(job(), runner.layout)
        lines = {line.name.value.replace("_", " "): float(line.exposed_seconds) for line in theirs.time}
        head, _, cause = runner.reason.partition(": ")
        assert head == slower_by(runner.step_seconds / found.step_seconds - 1)
        most = max(lines, key=lambda name: lines[name] - mine[name])
        assert cause.startswith(f"loses {most} "), runner.reason


def test_runners_up_lose_by_the_objective():
    """With objective cost, figures are device seconds: a slower layout on fewer devices may be nearly as cheap."""
    asked, objective = job("llama3-70b", nodes=16, batch=1024, length=8192), Objective(name="cost")
    found = search(asked, FREE, objective=objective, top=2)
    own = found.step_seconds * found.layout.world_size
    assert any(runner.layout.world_size != found.layout.world_size for runner in found.runners_up)
    for runner in found.runners_up:
        cost = runner.step_seconds * runner.layout.world_size
        assert cost >= own
        if runner.layout.world_size != found.layout.world_size:
            said = float(runner.reason.split("%")[0]) / 100
            assert "dearer" in runner.reason.split(",")[0]
            assert said == pytest.approx(cost / own - 1, abs=6e-4)


def test_a_layout_that_is_faster_and_harder_to_run_says_in_what():
    settings = ("model.num_layers=8", "device.memory=20 GiB")
    documents = {"model": "llama3-8b", "cluster": "dgx-a100", "gpus": 8, "settings": settings}
    asked = load_job(**documents, sequence_length=2048, global_batch_size=32)
    found = search(asked, FREE, within=0.2)
    least = found.minimum.layout
    assert least != found.layout
    runner = runner_up(asked, found.layout, estimate(asked, found.layout), least, estimate(asked, least))
    head, _, why = runner.reason.partition(": the plan has ")
    assert head == slower_by(found.minimum.step_seconds / found.step_seconds - 1)
    assert why == simpler_in(keys_of(asked, found.layout), keys_of(asked, least)) == found.minimum.reason


@pytest.mark.parametrize("within", [0.0, 0.02])
def test_runners_up_are_other_ways_to_divide_the_model(within):
    """They differ in kind, are near the best, and are each the best of their kind by a search pinned to this kind."""
    found = search(job(), FREE, top=6, within=within)
    kinds = [kind(runner.layout) for runner in found.runners_up]
    assert len({kind(found.layout), *kinds}) == 1 + len(kinds) >= 2
    for runner in found.runners_up:
        assert runner.differs == differences(found.layout, runner.layout)
        assert runner.near_tie == near_tie(found.step_seconds, runner.step_seconds)
        assert runner.step_seconds <= found.minimum.step_seconds * (1 + WORTH_READING)
        tp, pp, cp, ep = kind(runner.layout)
        pins = Constraints.parse([f"tp={tp},pp={pp},cp={cp},ep={ep}"])
        best = search(job(), pins)
        assert runner.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "cluster", "hosts", "length", "engine"),
    [("llama3-70b", "dgx-a100", 16, 4096, "torch"), ("llama3-8b", "dgx-h100", 1, 8192, "megatron")],
)
def test_rows_go_to_other_ways_before_other_depths_of_the_pipeline(model, cluster, hosts, length, engine):
    """Of all kinds within reach, the best of each other way stand in the rows before a kind with another pp alone.

    The best layout of all has a row even if its way is the plan's.
    """
    asked = load_job(
        model=model, cluster=cluster, nodes=hosts, global_batch_size=512, sequence_length=length, engine=engine
    )
    every = search(asked, FREE, top=100, within=0.02)
    rows, repeated, ways = [], [], {way(every.layout)}
    for layout in (runner.layout for runner in every.runners_up):  # by time
        (repeated if way(layout) in ways and layout != every.minimum.layout else rows).append(layout)
        ways.add(way(layout))
    assert repeated
    for top in (1, 3):
        expected = [*rows, *repeated][:top]
        found = search(asked, FREE, top=top, within=0.02)
        assert found.layout == every.layout
        assert found.runners_up == tuple(each for each in every.runners_up if each.layout in expected)


def way(layout):
    """The kind of a layout without the depth of its pipeline."""
    return layout.tp, layout.cp, layout.ep


def kind(layout):
    """The way in which a layout divides the model."""
    return layout.tp, layout.pp, layout.cp, layout.ep
