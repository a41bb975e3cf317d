"""The whole search on small jobs against brute force over every layout, priced one by one."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from planner.cost.estimate import estimate
from planner.cost.stage import POLICIES
from planner.errors import InputError
from planner.layout import Layout, balanced_chunks, format_layout
from planner.search.candidates import (
    allowed_policies,
    least_stage_bytes,
    legal_degrees,
    lower_bound_seconds,
    price_candidate,
)
from planner.search.constraints import Constraints
from planner.search.dynamic_program import best_choice
from planner.search.legality import broken_rules
from planner.search.remedies import remedies
from planner.search.search import NothingFits, plan_for_layout, search
from planner.specs.load import load_job

NO_CONSTRAINTS = Constraints()


def small_job(seed):
    """A random small job: few layers, few devices, memory from far too little to plenty."""
    pick = random.Random(seed)
    layers = pick.randint(2, 6)
    gpus = pick.choice([1, 2, 3, 4, 6, 8])
    model = pick.choice(["tiny-gpt", "tiny-llama"])
    gib = pick.choice([0.02, 0.03, 0.05, 0.1, 0.5])
    return load_job(
        model=model,
        cluster=pick.choice(["dgx-a100", "dgx1-v100"]),
        training=None,
        engine=pick.choice(["torch", "torch", "megatron"]),
        nodes=None,
        gpus=gpus,
        sequence_length=pick.choice([64, 256]),
        global_batch_size=pick.choice([4, 6, 8, 12]),
        precision=None,
        settings=(
            f"model.num_layers={layers}",
            f"device.memory={gib} GiB",
            "device.reserved_memory=1 MiB",
            f"device.efficiency.layer_floor={pick.choice([1, 50])} us",
            f"nvlink.bandwidth={pick.choice([0.1, 1, 300])} GB/s",
        ),
        headroom=0.0,
    )


def compositions(total, parts, least):
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total - least * (parts - 1) + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield (first, *rest)


def every_layout(job):
    """All layouts that the rules allow, by nested loops that know nothing of the search."""
    n, batch, layers = job.cluster.num_devices, job.training.global_batch_size, job.model.num_layers
    policies = ["none", "full"] if job.training.attention == "flash" else list(job.engine.recompute)
    for tp, pp, v in itertools.product(range(1, n + 1), range(1, layers + 1), range(1, layers + 1)):
        if tp * pp > n or pp * v > layers:
            continue
        experts = range(1, n + 1) if job.model.moe else [1]
        for dp, mbs, zero, ep in itertools.product(range(1, n + 1), range(1, batch + 1), range(4), experts):
            if tp * pp * dp > n or batch % (dp * mbs):
                continue
            common = {
                "tp": tp, "pp": pp, "dp": dp, "mbs": mbs, "zero": zero, "interleave": v, "sp": int(tp > 1), "ep": ep,
                "schedule": "interleaved" if v > 1 else "1f1b",
            }  # fmt: skip
            probe = Layout(**common, layers_per_stage=(1,) * (pp * v), recompute=("none",) * (pp * v))
            if broken_rules(job, probe):
                continue
            splits = compositions(layers, pp, v) if job.engine.uneven_stages else [(layers // pp,) * pp]
            dense = job.model.moe.num_dense_layers if job.model.moe else 0  # all in the first chunk
            splits = [split for split in splits if all(k % v == 0 for k in split) and split[0] // v >= dense]
            for split, chosen in itertools.product(splits, itertools.product(policies, repeat=pp)):
                yield Layout(**common, layers_per_stage=balanced_chunks(split, v), recompute=chosen * v)


def brute_force(job):
    """The least step time of all layouts that fit, and how many layouts there are."""
    best, count = np.inf, 0
    for layout in every_layout(job):
        count += 1
        priced = estimate(job, layout)
        if priced.fits:
            best = min(best, priced.step_seconds)
    return best, count


def check_against_brute_force(seed):
    job = small_job(seed)
    best, count = brute_force(job)
    found = search(job, NO_CONSTRAINTS)
    if isinstance(found, NothingFits):
        assert best == np.inf, f"seed {seed}: brute force found {best} s among {count} layouts"
        return "nothing fits"
    assert found.step_seconds == pytest.approx(best, rel=1e-9), f"seed {seed}: {format_layout(found.layout)}"
    assert found.fits
    assert found.certificate["status"] == "optimal"
    assert not broken_rules(job, found.layout)
    return "found"


@pytest.mark.parametrize("block", range(4))
def test_search_equals_brute_force(block):
    outcomes = [check_against_brute_force(seed) for seed in range(block * 6, block * 6 + 6)]
    assert "found" in outcomes


MIXTURE = """
name: tiny-moe
architecture: llama
num_layers: 4
hidden_size: 64
num_heads: 4
ffn_hidden_size: 128
vocab_size: 256
max_sequence_length: 64
moe: {num_experts: 4, experts_per_token: 2, ffn_hidden_size: 64, shared_ffn_hidden_size: 64, num_dense_layers: 1}
"""


@pytest.mark.parametrize("gib", [0.004, 0.006, 0.02])
def test_search_equals_brute_force_with_experts(gib, tmp_path):
    (tmp_path / "tiny-moe.yaml").write_text(MIXTURE)
    job = load_job(
        model=str(tmp_path / "tiny-moe.yaml"),
        cluster="dgx-a100",
        engine="megatron",
        gpus=4,
        sequence_length=64,
        global_batch_size=4,
        settings=(f"device.memory={gib} GiB", "device.reserved_memory=1 MiB", "nvlink.bandwidth=1 GB/s"),
        headroom=0.0,
    )
    best, count = brute_force(job)
    assert count > 100
    found = search(job, NO_CONSTRAINTS)
    assert isinstance(found, NothingFits) == (best == np.inf)
    if best < np.inf:
        assert found.step_seconds == pytest.approx(best, rel=1e-9), format_layout(found.layout)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_search_equals_brute_force_on_many_jobs(block):
    outcomes = [check_against_brute_force(seed) for seed in range(1000 + block * 12, 1012 + block * 12)]
    assert "found" in outcomes


@pytest.mark.parametrize("seed", range(12))
def test_bounds_stay_below_the_exact_optimum(seed):
    job = small_job(seed)
    policies = [POLICIES.index(p) for p in job.engine.recompute]
    for degrees in legal_degrees(job, NO_CONSTRAINTS)[0]:
        bounds = lower_bound_seconds(job, degrees)
        least = least_stage_bytes(job, degrees, policies)
        for i in range(len(degrees)):
            one = degrees.take(i)
            candidate = price_candidate(job, one, allowed_policies(job, NO_CONSTRAINTS, one))
            choice = best_choice(candidate)
            if choice is not None:
                assert bounds[i] <= choice.objective_seconds * (1 + 1e-12), candidate.name
                assert least[i] <= job.memory_limit_bytes, candidate.name


@pytest.fixture(scope="module")
def job():
    return load_job(
        model="llama3-8b",
        cluster="dgx-h100",
        training=None,
        engine="torch",
        nodes=2,
        gpus=None,
        sequence_length=4096,
        global_batch_size=64,
        precision=None,
    )


@pytest.fixture(scope="module")
def best(job):
    return search(job, NO_CONSTRAINTS)


@pytest.mark.parametrize(
    "pin", ["tp=2", "pp=2", "zero=0,pp=1", "mbs<=1", "recompute=full", "interleave=2", "schedule=gpipe", "dp>=4,dp<8"]
)
def test_a_pin_is_kept_and_never_helps(job, best, pin):
    found = search(job, Constraints.parse([pin], []))
    assert not isinstance(found, NothingFits)
    assert found.step_seconds >= best.step_seconds * (1 - 1e-12)
    for condition in Constraints.parse([pin], []).pins:
        if condition.key == "recompute":
            assert set(found.layout.recompute) == {"full"}
        else:
            assert bool(condition.holds(found.layout)), (str(condition), format_layout(found.layout))


def test_pinned_lists_are_kept(job):
    layers, recompute = "6/8/9/9", "full/full/none/none"
    found = search(job, Constraints.parse([f"pp=4,interleave=1,layers_per_stage={layers},recompute={recompute}"], []))
    assert found.layout.layers_per_stage == (6, 8, 9, 9)
    assert found.layout.recompute == ("full", "full", "none", "none")


def test_what_is_forbidden_is_not_used(job, best):
    layout = best.layout
    found = search(job, Constraints.parse([], [f"tp={layout.tp},pp={layout.pp}"]))
    assert (found.layout.tp, found.layout.pp) != (layout.tp, layout.pp)
    assert found.step_seconds >= best.step_seconds


def test_runners_up_are_different_slower_and_say_why(best):
    cuts = {(x.layout.tp, x.layout.pp, x.layout.dp, x.layout.zero) for x in best.runners_up}
    assert len(cuts) == len(best.runners_up) == 3
    for runner in best.runners_up:
        assert runner.step_seconds >= best.step_seconds
        assert runner.reason


def test_equal_inputs_give_equal_plans(job, best):
    assert search(job, NO_CONSTRAINTS) == best


def test_both_solvers_give_the_same_plan(job, best):
    pytest.importorskip("highspy")
    found = search(job, NO_CONSTRAINTS, solver="highs")
    assert found.layout == best.layout


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (["tp=3"], "tp divides the heads"),
        (["tp=16"], "key-value heads"),
        (["tp=2,sp=0"], "sequence parallelism"),
        (["layers_per_stage=1/2"], "sums to 3"),
        (["zero=3,pp=2"], "ZeRO stage"),
        (["tp=8,pp=4"], "number of devices"),
        (["dp=3"], "divides the global batch"),
        (["schedule=zb-h1"], "schedule `zb-h1` is not available"),
        (["cp=2", "etp=2"], "`etp=2` is not available"),
    ],
)
def test_impossible_pins_are_named(job, pins, message):
    with pytest.raises(InputError, match=message):
        search(job, Constraints.parse(pins, []))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp=2", "did you mean `tp`"),
        ("tp", "has no value"),
        ("tp=two", "no legal value"),
        ("zero=4", "0 to 3"),
        ("recompute=ful", "did you mean `full`"),
        ("schedule<=1f1b", "has no order"),
    ],
)
def test_bad_pins_are_explained(text, message):
    with pytest.raises(InputError, match=message):
        Constraints.parse([text], [])


def test_nothing_fits_names_a_way_out():
    job = load_job(
        model="gpt3-175b",
        cluster="dgx-a100",
        training=None,
        engine="torch",
        nodes=2,
        gpus=None,
        sequence_length=2048,
        global_batch_size=64,
        precision=None,
    )
    found = search(job, Constraints.parse(["recompute=full"], []))
    assert isinstance(found, NothingFits)
    assert max(stage.total_bytes for stage in found.memory) > job.memory_limit_bytes
    hosts = [remedy for remedy in remedies(job, Constraints.parse(["recompute=full"], [])) if "hosts" in remedy.change]
    assert len(hosts) == 1
    more = int(hosts[0].change.split()[0])
    bigger = load_job(
        model="gpt3-175b",
        cluster="dgx-a100",
        training=None,
        engine="torch",
        nodes=more,
        gpus=None,
        sequence_length=2048,
        global_batch_size=64,
        precision=None,
    )
    again = search(bigger, Constraints.parse(["recompute=full"], []))
    assert again.fits
    assert again.step_seconds == pytest.approx(hosts[0].step_seconds)


def test_a_layout_that_breaks_rules_is_refused_with_all_of_them(job):
    layout = Layout(tp=16, dp=3, sp=1, layers_per_stage=(32,), recompute=("none",))
    with pytest.raises(InputError) as error:
        plan_for_layout(job, layout)
    text = str(error.value)
    assert "scale-up domain" in text
    assert "divides the global batch" in text
    assert "number of devices" in text
