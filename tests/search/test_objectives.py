"""The choice of the search by each objective, compared with every layout priced one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_layouts import FREE, KEYS, SEEDS, priced

from planner.cost.run import longest_step_seconds
from planner.layout import Layout
from planner.plan_parts import ObjectiveName
from planner.search.objectives import WORTH_READING, BestKinds, Objective, objective_of
from planner.search.search import NothingFits, search
from planner.specs.load import load_job

OBJECTIVES = get_args(ObjectiveName)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_equals_brute_force(name, seed):
    job, layouts = priced(seed)
    found = search(job, FREE, objective=Objective(name=name))
    if not layouts:
        assert isinstance(found, NothingFits)
        return
    peak = max(stage.total_bytes for stage in found.memory)
    key = KEYS[name]((found.step_seconds, found.layout.world_size, peak))
    assert key == pytest.approx(min(map(KEYS[name], layouts)), rel=1e-8)
    assert found.certificate.status == "optimal"
    assert found.certificate.objective == name
    both = [found.certificate.dynamic_program_seconds, found.certificate.objective_seconds]
    assert both == [pytest.approx(found.step_seconds, rel=1e-6)] * 2
    assert bool(found.idle_reason) == (found.layout.world_size < job.cluster.num_devices)


def budgeted(job, deadline):
    training = job.training.model_copy(update={"tokens": 1e9, "deadline": deadline})
    return replace(job, training=training)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["cost", "gpus"])
def test_the_deadline_is_kept_and_a_longer_one_never_needs_more(name, seed):
    job, layouts = priced(seed)
    if not layouts:
        pytest.skip("nothing fits")
    fastest = min(layouts)[0] * 1e9 / (job.training.global_batch_size * job.training.sequence_length)
    before = math.inf
    for share in (1.01, 1.3, 2.0, 4.0, 100.0):
        asked = budgeted(job, share * fastest)
        in_time = [each for each in layouts if each[0] <= longest_step_seconds(asked.training)]
        found = search(asked, FREE, objective=objective_of(asked, name))
        key = KEYS[name]((found.step_seconds, found.layout.world_size, 0))
        assert key == pytest.approx(min(map(KEYS[name], in_time)), rel=1e-9)
        assert found.run.meets_deadline
        assert key[0] <= before * (1 + 1e-12)
        before = key[0]


def test_where_no_layout_meets_the_deadline_the_fastest_is_the_answer():
    job, layouts = priced(0)
    asked = budgeted(job, 1.0)
    found = search(asked, FREE, objective=objective_of(asked, "gpus"))
    assert found.run.meets_deadline is False
    assert found.step_seconds == pytest.approx(min(layouts)[0])


@pytest.fixture(scope="module")
def llama():
    return load_job(model="llama3-8b", cluster="dgx-a100", nodes=3, global_batch_size=96, sequence_length=4096)


def test_a_higher_price_never_lowers_the_cost_and_changes_no_layout(llama):
    plans = []
    for price in (1.0, 2.0, 7.5):
        training = llama.training.model_copy(update={"tokens": 1e11, "price": price})
        plans.append(search(replace(llama, training=training), FREE, objective=Objective(name="cost")))
    assert len({plan.layout for plan in plans}) == 1
    assert [plan.run.usd for plan in plans] == pytest.approx([price * plans[0].run.usd for price in (1.0, 2.0, 7.5)])


def test_each_objective_is_best_at_its_own(llama):
    plans = {name: search(llama, FREE, objective=Objective(name=name)) for name in OBJECTIVES}
    for name, key in KEYS.items():
        values = {
            other: key((p.step_seconds, p.layout.world_size, max(s.total_bytes for s in p.memory)))[0]
            for other, p in plans.items()
        }
        assert values[name] <= min(values.values()) * (1 + 1e-8), (name, values)


LAYOUTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8), st.floats(0.1, 10.0)), max_size=25)


@given(name=st.sampled_from(["throughput", "cost", "gpus"]), places=st.integers(1, 3), layouts=LAYOUTS)
def test_a_cutoff_lets_through_what_takes_a_place_and_nothing_else(name, places, layouts):
    objective = Objective(name=name)
    best = BestKinds(objective, places)
    ranks = {}
    for tp, devices, seconds in layouts:
        one = Layout(tp=tp, layers_per_stage=(1,), recompute=("none",))
        best.add(one, devices, seconds)
        ranks[tp] = min(objective.rank(seconds, devices), ranks.get(tp, (math.inf, math.inf)))
        last = sorted(ranks.values())[places - 1] if len(ranks) >= places else (math.inf, math.inf)
        near = min(ranks.values())
        worth = (math.inf, math.inf) if name == "gpus" else tuple(value * (1 + WORTH_READING) for value in near)
        last = min(last, worth)
        for asked in range(1, 10):
            cutoff = float(np.max(best.place_seconds(asked, Layout(tp=99, layers_per_stage=(1,), recompute=("none",)))))
            if cutoff > 0 and math.isfinite(cutoff):
                assert objective.rank(cutoff * (1 - 1e-9), asked)[0] <= last[0] * (1 + 1e-9)
                assert objective.rank(cutoff * (1 + 1e-9), asked) > last
            elif math.isfinite(cutoff):
                assert objective.rank(1e-300, asked) > last
            else:
                assert objective.rank(1e300, asked) < last or cutoff < 0
            own = float(np.max(best.place_seconds(asked, one)))  # what is no better than its own kind takes no place
            assert own <= cutoff
            if 0 < own < cutoff:
                assert objective.rank(own * (1 - 1e-9), asked) <= ranks[tp]
                assert objective.rank(own * (1 + 1e-9), asked) > ranks[tp]
