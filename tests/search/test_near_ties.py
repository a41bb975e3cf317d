"""The recommendation among plans that are as good as equal, and how others are described."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.estimate import estimate
from planner.layout import Layout, parse_layout
from planner.search.near_ties import differences, near_tie, simplest, slower_by, why_simpler
from planner.search.objectives import Objective
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.load import load_job

FREE = Constraints()
JOBS = [("llama3-8b", 4, 64, 1024), ("llama2-13b", 4, 256, 4096), ("gpt2-xl", 4, 512, 1024)]


def job(model="llama3-8b", nodes=4, batch=64, length=1024):
    return load_job(model=model, cluster="dgx-a100", nodes=nodes, global_batch_size=batch, sequence_length=length)


@pytest.mark.parametrize("entry", JOBS, ids=lambda entry: entry[0])
@pytest.mark.parametrize("name", ["throughput", "cost", "gpus"])
def test_the_recommendation_is_near_the_optimum_and_no_more_complex(entry, name):
    asked, objective, within = job(*entry), Objective(name=name), 0.03
    best = search(asked, FREE, objective=objective)
    found = search(asked, FREE, objective=objective, simpler_within=within)
    assert not best.certificate.simpler
    assert found.certificate.objective_seconds == pytest.approx(best.step_seconds)
    rank = objective.rank(found.step_seconds, found.layout.world_size)
    optimum = objective.rank(best.step_seconds, best.layout.world_size)
    assert rank[0] <= optimum[0] * (1 + within)
    assert simplest(asked, [best.layout, found.layout]) == (
        found.layout if found.layout != best.layout else best.layout
    )
    if found.layout != best.layout:
        assert found.certificate.simpler == why_simpler(found.layout, best.layout)
        assert 0 <= found.certificate.above_optimum <= within
        assert str(best.layout) == found.certificate.optimum


def test_simpler_layouts_are_found_where_there_are_some():
    changed = [
        entry
        for entry in JOBS
        if search(job(*entry), FREE).layout != search(job(*entry), FREE, simpler_within=0.03).layout
    ]
    assert changed, "no job tells the recommendation from the optimum"


def test_fewer_chunks_of_a_stage_are_simpler():
    job = load_job(model="llama3-70b", cluster="dgx-a100", nodes=8, global_batch_size=512, engine="megatron")
    many = parse_layout("tp=4,pp=4,cp=2,zero=1,interleave=20", num_layers=80, num_devices=64)
    few = parse_layout("tp=4,pp=4,cp=2,zero=1,interleave=10", num_layers=80, num_devices=64)
    assert simplest(job, [many, few]) == few
    assert why_simpler(few, many) == "less interleaving"


def test_fewer_axes_go_before_less_recompute_and_more_memory():
    asked = job()
    plain = Layout(dp=32, zero=3, layers_per_stage=(32,), recompute=("full",))
    cut = Layout(tp=2, sp=1, dp=16, zero=3, layers_per_stage=(32,), recompute=("none",))
    assert simplest(asked, [cut, plain]) == plain
    assert why_simpler(plain, cut) == "fewer axes"
    whole = replace(plain, recompute=("none",))
    assert simplest(asked, [plain, whole]) == whole
    assert why_simpler(whole, plain) == "less recompute"
    small, large = replace(whole, mbs=1), replace(whole, mbs=2)
    assert estimate(asked, small).peak_bytes < estimate(asked, large).peak_bytes * 0.9
    assert simplest(asked, [large, small]) == small
    assert why_simpler(small, large) == "more free memory"


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


def test_runners_up_say_what_they_lose_and_what_they_save():
    """Against the ledgers of both layouts; every line named differs in the direction that is said."""
    found = search(job(), FREE, top=6)
    own = estimate(job(), found.layout)
    mine = {line.name.value.replace("_", " "): float(line.exposed_seconds) for line in own.time}
    both = 0
    for runner in found.runners_up:
        theirs = estimate(job(), runner.layout)
        lines = {line.name.value.replace("_", " "): float(line.exposed_seconds) for line in theirs.time}
        head, _, causes = runner.reason.partition(": ")
        assert head == slower_by(runner.step_seconds / found.step_seconds - 1)
        parts = dict(part.split(" ", 1) for part in filter(None, causes.split("; ")))
        for verb, names in parts.items():
            for name in names.split(", "):
                line = " ".join(name.split(" ")[:-2])
                if line == "memory":
                    assert theirs.peak_bytes < own.peak_bytes
                else:
                    assert (lines[line] > mine[line]) == (verb == "loses"), runner.reason
        most = max(lines, key=lambda name: abs(lines[name] - mine[name]))
        assert most in causes or abs(lines[most] - mine[most]) < 0.002 * found.step_seconds
        both += set(parts) == {"loses", "saves"}
    assert both, "no runner-up is better in anything"


def test_runners_up_lose_by_the_objective():
    """With cost the figures are device seconds: what is slower on fewer devices may be nearly as cheap."""
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


def test_top_lists_as_many_distinct_partitions_with_what_differs():
    found = search(job(), FREE, top=6)
    cuts = {(r.layout.tp, r.layout.pp, r.layout.dp, r.layout.cp, r.layout.ep, r.layout.zero) for r in found.runners_up}
    assert len(cuts) == len(found.runners_up) == 6
    for runner in found.runners_up:
        assert runner.differs == differences(found.layout, runner.layout)
        assert runner.near_tie == near_tie(found.step_seconds, runner.step_seconds)
