"""The whole search on small jobs against brute force over every layout, priced one by one."""

from __future__ import annotations

import itertools
import math
import random
import re
import tempfile
import time
from contextlib import contextmanager
from dataclasses import astuple, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from enumeration import (
    as_arrays,
    check_many,
    compositions,
    grouped,
    least_seconds,
    long_forms,
    obeying,
    policies_of,
    policies_of_some_layers,
    shrinks,
    step_seconds,
)

from planner.answers.remedies import remedies
from planner.cost.chance import chance_of_fitting, memory_limit_bytes
from planner.cost.estimate import estimate
from planner.cost.memory_band import memory_distribution
from planner.cost.prices import stage_bytes, stage_fits, stage_prices
from planner.cost.stage import stage_of
from planner.errors import InputError, SolverTrouble
from planner.layout import Layout, balanced_chunks, format_layout, of_chunks
from planner.search import recommendation
from planner.search.bounds import of_memory
from planner.search.bounds.even_splits import can_interleave, even_split_seconds
from planner.search.bounds.least_costs import LeastCosts, least_costs, least_transfer
from planner.search.bounds.of_layers import LayerBounds, most_layers
from planner.search.bounds.of_memory import Capacities, least_stage_bytes, may_fit
from planner.search.bounds.of_steps import (
    _forced_seconds,
    least_seconds_of_any_policy,
    lower_bound_seconds,
    replicas_bound_seconds,
)
from planner.search.found import Found
from planner.search.given import plan_for_layout
from planner.search.least_memory import least_peak
from planner.search.objectives import Objective
from planner.search.optimum.dynamic_program import best_choice
from planner.search.optimum.executed_schedules import busy_seconds, executed_candidates
from planner.search.optimum.pricing import layout_at, price_candidates
from planner.search.reporter import Reporter
from planner.search.search import NothingFits, fastest_layout, fits, search
from planner.search.space.arrays import TIE
from planner.search.space.configurations import can_be_smaller, with_ones
from planner.search.space.constraints import Constraints
from planner.search.space.degree_rules import interleave, tp_divides, whole_periods
from planner.search.space.refusals import legal_degrees
from planner.search.space.rules import RULES, broken_rules
from planner.search.space.space import Space
from planner.search.time_limit import OutOfTime
from planner.specs.by_name import load_engine
from planner.specs.calibration import UNCALIBRATED
from planner.specs.cluster_documents import load_cluster
from planner.specs.load import load_job
from planner.specs.recompute import FULL, policy_code

if TYPE_CHECKING:
    from collections.abc import Callable

NO_CONSTRAINTS = Constraints()


def small_job(seed, *, headroom=0.0, most_layers=6, most_gpus=8):
    """A random small job: few layers, few devices, memory from far too little to plenty."""
    pick = random.Random(seed)
    layers = pick.randint(2, most_layers)
    gpus = pick.choice([count for count in (1, 2, 3, 4, 6, 8) if count <= most_gpus])
    model = pick.choice(["tiny-gpt", "tiny-llama"])
    gib = pick.choice([0.005, 0.01, 0.02, 0.03, 0.05, 0.5])
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
            "engine.memory.communicator_memory=1 B",
            "engine.pipeline.places_ends=false",  # tests/search/test_ends.py has the others
            f"device.efficiency.layer_floor={pick.choice([1, 50])} us",
            f"nvlink.bandwidth={pick.choice([0.1, 1, 300])} GB/s",
        ),
        headroom=headroom,
    )


def every_configuration(job, schedule=None, ends=0):
    """All configurations that the rules allow, by nested loops that are independent of the search.

    schedule: a V-shaped schedule instead of 1F1B and interleaved.
    ends: how many chunks may hold an end of the model and no layer.
    """
    n, batch, layers = job.cluster.num_devices, job.training.global_batch_size, job.model.num_layers
    whole, experts = range(1, n + 1), range(1, n + 1) if job.model.moe else [1]
    context = whole if "cp" in job.engine.can.axes else [1]
    pipelines = [
        (p, v)
        for p in range(1, layers + ends + 1)
        for v in range(1, (layers + ends) // p + 1)
        if v < 3 or shrinks(p, v, layers)
    ]
    if schedule:
        pipelines = [(p, 2) for p in range(2, layers // 2 + 1)]
    found = []
    for tp, (pp, v), dp, mbs, cp in itertools.product(whole, pipelines, whole, range(1, batch + 1), context):
        if tp * pp * dp * cp > n or batch % (dp * mbs):
            continue
        can = tp > 1 and job.training.sequence_length // cp % tp == 0
        offloads = job.engine.offload.what if job.allow_offload else ["none"]
        segments = segments_of_partition(job, tp * pp * dp * cp)
        replicas = [(z, h) for z in range(4) for h in range(1, dp + 1) if h == 1 or (z and dp % h == 0 and h < dp * cp)]
        for (zero, hsdp), ep, etp, offload, segment in itertools.product(
            replicas, experts, experts, offloads, segments
        ):
            found.append({
                "tp": tp, "pp": pp, "dp": dp, "cp": cp, "mbs": mbs, "zero": zero, "hsdp": hsdp, "interleave": v,
                "sp": int(can), "ep": ep, "etp": etp, "schedule": schedule or ("interleaved" if v > 1 else "1f1b"),
                "offload": offload, "segment": segment,
            })  # fmt: skip
    return list(itertools.chain.from_iterable(runnable(job, alike) for alike in grouped(found).values()))


def segments_of_partition(job, world):
    """Possible numbers of hosts in each domain for these devices: all hosts, or a number that gives equal parts."""
    cluster = job.cluster
    most, hosts = cluster.links[0].num_devices // cluster.devices_per_host, -(-world // cluster.devices_per_host)
    if most < 2 or cluster.num_devices <= cluster.links[0].num_devices:
        return [0]
    alike = [size for size in range(1, most) if hosts % size == 0]
    return [size for size in [*alike, most] if cluster.domains is None or -(-hosts // size) <= cluster.domains]


def runnable(job, alike):
    """Configurations of one schedule that break no rule, including rules about the recompute policy."""
    policies, kept = policies_of(job, alike[0]["offload"]), obeying(job, alike)
    if not policies or not kept:
        return []
    num_chunks = kept[0]["pp"] * kept[0]["interleave"]
    probe = Layout(**kept[0], layers_per_stage=(1,) * num_chunks, recompute=(policies[0],) * num_chunks)
    return [] if broken_rules(job, probe) else kept


def assignments(job, common, some=()):
    """All layers and policies of the stages; some: policies of this configuration that recompute some layers."""
    layers, pp, v = job.model.num_layers, common["pp"], common["interleave"]
    splits = compositions(layers, pp, v) if job.engine.pipeline.uneven_stages else [(layers // pp,) * pp]
    dense = job.model.moe.num_dense_layers if job.model.moe else 0
    policies = [*policies_of(job, common["offload"]), *some]
    ways = list(itertools.product(policies, repeat=pp))
    for split in splits:
        equal = not dense and {k % (v * period(job)) for k in split} == {0} and len(set(split)) == 1
        if v == 1 or (equal if period(job) > 1 else -(-split[0] // v) >= dense):  # dense: in the first chunk
            for chosen in ways:
                if job.engine.pipeline.recompute_per_stage or len(set(chosen)) == 1:
                    yield split, chosen


def period(job):
    """Number of layers after which the kinds of layers repeat, not counting leading layers."""
    return _period(job.model, job.training.sequence_length)


@cache
def _period(model, sequence_length):
    kinds = [(model.layer_has_experts(k), model.window_of_layer(k) % sequence_length) for k in range(99)]
    kinds = kinds[model.moe.num_dense_layers if model.moe else 0 :]
    return next(p for p in range(1, 99) if kinds[p:] == kinds[:-p])


def brute_force_by_ledger(job):
    """The least step time of all layouts that fit, each priced by its own ledger, and the number of these layouts."""
    best, count = np.inf, 0
    for common, some in with_some_layers(job, every_configuration(job)):
        v = common["interleave"]
        for split, chosen in assignments(job, common, some):
            count += 1
            layout = Layout(**common, layers_per_stage=balanced_chunks(split, v), recompute=chosen * v)
            priced = estimate(job, layout)
            if priced.fits:
                best = min(best, priced.step_seconds)
    return best, count


def with_some_layers(job, configurations):
    """Each configuration with its policies that recompute some layers."""
    for alike in grouped(configurations).values():
        yield from zip(alike, policies_of_some_layers(job, alike), strict=True)


class Priced(NamedTuple):
    """A layout of the brute force: its step, keys and configuration, and what each stage has."""

    seconds: float
    keys: Callable[[], tuple[int, ...]]
    common: dict[str, int | str]
    split: tuple[int, ...]
    chosen: tuple[str, ...]

    @property
    def kind(self):
        return tuple(self.common.get(axis, 1) for axis in ("tp", "pp", "cp", "ep"))

    @property
    def layout(self):
        v = self.common["interleave"]
        return Layout(**self.common, layers_per_stage=balanced_chunks(self.split, v), recompute=self.chosen * v)


def brute_force(job):
    """The same by prices of single stages and the formula of the step, written again: a hundred times faster."""
    layouts = list(every_layout(job))
    return min((each.seconds for each in layouts if each), default=np.inf), len(layouts)


def every_layout(job):
    """Every layout with its step and its keys; None if it does not fit."""
    for here in grouped(every_configuration(job)).values():
        ways, owners = {}, {}
        for owner, (common, some) in enumerate(with_some_layers(job, here)):
            shape = (common["pp"], common["interleave"], *some)
            ways[shape] = ways.get(shape) or ways_of_stages(assignments(job, common, some))
            owners.setdefault(shape, []).append(owner)
        cells = {shape: number for shape, number in ways.items() if number[0]}
        if cells:
            yield from layouts_of_group(job, here, cells, owners)


def ways_of_stages(assigned):
    """The assignments, the different cells of their stages, and for each assignment the position of its cells.

    A cell is the stage, its layers, its policy, and the layers before it: stages alike in these have one price.
    """
    assigned, position = list(assigned), {}
    index = [
        [
            position.setdefault((stage, count, policy_code(policy), first), len(position))
            for stage, (count, policy, first) in enumerate(zip(split, chosen, begins(split), strict=True))
        ]
        for split, chosen in assigned
    ]
    return assigned, np.array([*position], dtype=np.int64), np.array(index, dtype=np.int64)


def layouts_of_group(job, here, ways, owners):
    """The layouts of configurations of one schedule, in which each cell of each configuration is priced once."""
    spread, whole = memory_distribution(job, Layout(layers_per_stage=(1,), recompute=("none",))), job.cluster.device
    counts = [len(ways[shape][1]) for shape in ways for _ in owners[shape]]
    owner = np.repeat([each for shape in ways for each in owners[shape]], counts)
    index, layers, policy, before = np.concatenate([ways[shape][1] for shape in ways for _ in owners[shape]]).T
    degrees = as_arrays(here).take(owner)
    stage = stage_of(job, index=index, num_layers=layers, policy=policy, first=before, layout=degrees)
    prices = stage_prices(job, degrees, stage)
    missing = 1 - chance_of_fitting(stage_bytes(job, degrees, stage), whole.memory, spread)
    missing = missing if job.headroom is None else 0 * missing  # a plain limit has no classes of risk
    fits, seconds, tails, ends, missing = (
        np.broadcast_to(each, owner.shape)
        for each in (
            stage_fits(job, degrees, stage), prices.microbatch_seconds, prices.tail_seconds, prices.ends, missing
        )
    )  # fmt: skip
    risks, begin = (missing > 0.01).astype(int) + (missing > 0.05), 0
    for shape, (assigned, own, cells) in ways.items():
        alike = [here[each] for each in owners[shape]]
        begins_at = begin + len(own) * np.arange(len(alike))
        begin += len(own) * len(alike)
        at = begins_at[:, None, None] + cells
        m = np.array([job.training.global_batch_size // (each["dp"] * each["mbs"]) for each in alike])
        prices = (each[at] for each in (seconds, tails, layers, ends))
        steps = step_seconds(m[:, None], shape[1], *prices, job.model.mtp_layers)
        columns = (fits[at].all(-1), steps, risks[at].max(-1))
        for common, *rows in zip(alike, *(each.tolist() for each in columns), strict=True):
            for (split, chosen), fit, step, risk in zip(assigned, *rows, strict=True):
                keys = partial(keys_of, job, common, split, chosen, risk)
                yield Priced(step, keys, common, split, chosen) if fit else None


def keys_of(job, common, split, chosen, risk):
    """The keys of a layout, computed independently of the search."""
    degrees = {axis: common.get(axis, 1) for axis in ("tp", "pp", "dp", "cp", "ep")}
    world, v, inner = math.prod([*degrees.values()]) // degrees["ep"], common["interleave"], split[1:-1]
    even = len(set(inner)) < 2 and all(count % v == 0 for count in inner)
    axes = sum(degree > 1 for axis, degree in degrees.items() if axis != "dp")
    by_hand = len(set(chosen)) > 1 or ":" in chosen[0]
    named = [axis for axis in ("tp", "pp", "cp", "ep") if degrees[axis] > 1]
    named += ["fsdp"] * (common["zero"] >= 2 and degrees["dp"] * degrees["cp"] > 1)
    lora, frozen = job.training.lora_rank > 0, job.training.frozen_weights != "16-bit"
    features = ("adapters",) * lora + ("quantised weights",) * (lora and frozen)
    features += ("offload",) * (common.get("offload", "none") != "none")
    runs = [each for each in job.evidence if (each.engine, each.experts) == (job.engine.name, bool(job.model.moe))]
    seen = {each.axes for each in runs if each.features == features}
    unseen = ("+".join(named) or "dp") not in seen
    return (
        math.ceil(world / job.cluster.devices_per_host),
        int(unseen),
        axes,
        int(by_hand),
        v,
        int(risk),
        int(not even),
    )


def closed_list(layouts, longest, fastest):
    """Of all layouts that fit, the list of the recommendation, from the layouts that it calls the fastest of a kind."""
    found, near = {}, [each for each in layouts if each.seconds <= longest]
    for base in fastest:
        rest = {key: value for key, value in base.common.items() if key not in ("zero", "interleave", "schedule")}
        layers, pp, v = sum(base.split), base.common["pp"], base.common["interleave"]
        for each in near:
            if not rest.items() <= each.common.items():
                continue
            chunks = each.common["interleave"]
            inner = chunks * math.ceil(layers / (pp * chunks))
            left = layers - inner * (pp - 2)
            even = max(each.split) - min(each.split) < 2 and list(each.split) == sorted(each.split, reverse=True)
            equal = pp > 2 and set(each.split[1:-1]) == {inner} and abs(each.split[0] - each.split[-1]) < 2 <= left
            is_listed = chunks in (1, 2, 4, 8, v) or layers % (pp * chunks) == 0
            is_listed &= each.split == base.split or even or equal
            if is_listed and (each.chosen == base.chosen or len(set(each.chosen)) == 1):
                found[each.layout] = each
    return found


def begins(split):
    """Number of layers before each stage of one chunk."""
    return [0, *itertools.accumulate(split[:-1])]


class _Finite(Reporter):
    """Checks that an incumbent is reported only if there is one."""

    def priced(self, num_priced, incumbent_seconds):
        assert num_priced > 0
        assert np.isfinite(incumbent_seconds)


def check_against_brute_force(job, within=0.02, **options):
    """Check the minimum, the list of layouts that are worse by at most a given share, and the choice."""
    return check_answer(job, [each for each in every_layout(job) if each], within, **options)


@contextmanager
def listings():
    """The calls of `shortlist` meanwhile: what was found, the window, and the list."""
    calls, honest = [], recommendation.shortlist

    def listed(found, window):
        calls.append((found, window, honest(found, window)))
        return calls[-1][2]

    with patch.object(recommendation, "shortlist", listed):
        yield calls


def check_answer(job, layouts, within, **options):
    """The same with all layouts that fit."""
    best = min((each.seconds for each in layouts), default=np.inf)
    with listings() as asked:
        found = search(job, NO_CONSTRAINTS, within=within, reporter=_Finite(), **options)
    if isinstance(found, NothingFits):
        assert best == np.inf, f"brute force found {best} s"
        return "nothing fits"
    if best == np.inf and job.headroom is None:  # the likeliest of those that may fit, as tests of the risk say
        assert found.verdict == "may not fit", format_layout(found.layout)
        return "may not fit"
    assert found.minimum.step_seconds == pytest.approx(best, rel=1e-9), format_layout(found.minimum.layout)
    assert found.certificate.objective_seconds == pytest.approx(best, rel=1e-9)
    longest = best * (1 + within) * (1 + 1e-12)
    of_search, window, answer = asked[0]  # a later call lists layouts on axes of runs
    listed = [of_search.layout_of(each) for each in answer]
    fastest = [of_search.layout_of(each) for each in recommendation.fastest_of_kinds(of_search, window)]
    of_kind, kinds = {}, [each.kind for each in layouts]
    for each, kind in zip(layouts, kinds, strict=True):
        of_kind[kind] = min(each.seconds, of_kind.get(kind, np.inf))
    tied = {
        each.layout: each
        for each, kind in zip(layouts, kinds, strict=True)
        if each.seconds <= min(of_kind[kind] * (1 + 1e-9), longest)
    }
    assert {tied[each].kind for each in fastest} == {kind for kind, seconds in of_kind.items() if seconds <= longest}
    expected = closed_list(layouts, longest, [tied[each] for each in fastest])
    assert sorted(map(format_layout, listed)) == sorted(map(format_layout, expected))
    ranks = {layout: (each.keys(), each.seconds) for layout, each in expected.items()}
    keys, seconds = min(ranks.values())
    told = found.certificate.recommendation
    assert told.num_listed == len(expected)
    assert astuple(told.keys) == ranks[found.layout][0] == keys, format_layout(found.layout)
    assert found.step_seconds == pytest.approx(seconds, rel=1e-9), format_layout(found.layout)
    for layout, (theirs, seconds) in ranks.items():  # what is slower and better in nothing never wins
        is_better = any(mine < other for mine, other in zip(keys, theirs, strict=True))
        assert is_better or found.step_seconds <= seconds * (1 + 1e-9), format_layout(layout)
    assert found.fits
    assert found.certificate.status == "optimal"
    assert not broken_rules(job, found.layout)
    return "found" if found.layout == found.minimum.layout else "easier"


@pytest.mark.parametrize("block", [0, 1])
def test_search_equals_brute_force(block):
    outcomes = [some_job_against_brute_force(seed) for seed in range(block * 6, block * 6 + 6)]
    assert "found" in outcomes  # the recommendation itself is compared in test_recommendation


SHARES = (0.02, 0.3, 1.0)
"""Windows of jobs with subsequent seeds."""


def some_job_against_brute_force(seed):
    return check_against_brute_force(small_job(seed), SHARES[seed % 3])


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_search_equals_brute_force_on_many_jobs():
    """Every second job has classes of risk; jobs are so small that a thousand take minutes."""

    def check(seed):
        job = small_job(seed, headroom=(0.0, None)[seed % 2], most_layers=4, most_gpus=4)
        return check_against_brute_force(job, SHARES[seed % 3], top=0)

    check_many(check)


@cache
def found_of(seed):
    """What a search of a small job finds."""
    return search(small_job(seed), NO_CONSTRAINTS)


@pytest.mark.parametrize("seed", range(6))
def test_a_known_layout_changes_no_answer(seed):
    job, found = small_job(seed), found_of(seed)
    least, _ = brute_force(job)
    if isinstance(found, NothingFits):
        assert fastest_layout(job, NO_CONSTRAINTS, known=found.layout) is None
        return
    for known in (found.layout, *(loser.layout for loser in found.runners_up)):
        layout, seconds = fastest_layout(job, NO_CONSTRAINTS, known=known)
        assert layout == found.layout
        assert seconds == pytest.approx(least, rel=1e-9)


def on_racks(job, seed):
    """The job on racks of several hosts, joined by a slower network."""
    pick = random.Random(-seed)
    gpus, each, rack = pick.choice([(8, 1, 6), (8, 2, 6), (6, 1, 5), (6, 1, 4), (8, 1, 3), (9, 3, 6)])
    near, far = job.cluster.links[0], load_cluster("dgx-a100").links[-1]
    near = near.model_copy(update={"spans": f"{rack} devices", "kind": "switch", "links_per_device": None})
    far = far.model_copy(update={"bandwidth": near.bandwidth * pick.choice([0.01, 0.1, 0.5])})
    racks = {"domains": pick.choice([None, None, -(-gpus // rack)])}
    sizes = {"devices_per_host": each, "hosts": gpus // each, "links": (near, far), "host": None}
    return replace(job, cluster=job.cluster.model_copy(update=sizes | racks))


@pytest.mark.parametrize("seed", [1, 2, 3, 5, *long_forms(0, 4, 6, 7)])
def test_search_on_racks_equals_brute_force(seed):
    """The result is the best of all segments, although the search tries few segments."""
    job = on_racks(small_job(seed), seed)
    check_against_brute_force(job)
    check_bounds(job)


@pytest.mark.parametrize("seed", [0, *long_forms(1)])
def test_search_on_racks_with_experts_equals_brute_force(seed):
    job = on_racks(small_mixture_job(0.02), seed)
    best, _ = brute_force(job)
    assert search(job, NO_CONSTRAINTS).step_seconds == pytest.approx(best, rel=1e-9)
    check_bounds(job)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_search_on_racks_equals_brute_force_on_many_jobs(seed):
    job = on_racks(small_job(seed), seed)
    check_against_brute_force(job)
    check_bounds(job)


def offloading(job, seed):
    """The job with permission to offload, on a host whose memory and links may be the limit."""
    pick = random.Random(-seed)
    engine = load_engine(pick.choice(["megatron", "deepspeed", "fsdp", "torchtitan"]))
    pipeline = engine.pipeline.model_copy(update={"places_ends": False})  # tests/search/test_ends.py has the others
    engine = engine.model_copy(update={"pipeline": pipeline})
    host = job.cluster.host.model_copy(
        update={
            "memory": pick.choice([2**18, 2**20, 2**22, 2**34]) * job.cluster.devices_per_host,
            "memory_bandwidth": pick.choice([1e8, 1e10, 4e11]),
            "bandwidth": pick.choice([1e7, 1e9, 1e11]),
        }
    )
    cluster = job.cluster.model_copy(update={"host": host})
    return replace(job, engine=engine, cluster=cluster, allow_offload=True)


@pytest.mark.parametrize("seed", [0, 2, 3, *long_forms(1, 4), 133])  # 133: full recompute does not fit, selective does
def test_search_with_offload_equals_brute_force(seed):
    job = offloading(small_job(seed), seed)
    check_against_brute_force(job)
    check_bounds(job)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 500))
def test_search_with_offload_equals_brute_force_on_many_jobs(seed):
    job = offloading(small_job(seed), seed)
    check_against_brute_force(job)
    check_bounds(job)


@pytest.mark.parametrize("seed", [0, 2, 3, *long_forms(1)])
def test_search_with_adapters_equals_brute_force(seed):
    pick, job = random.Random(seed), small_job(seed)
    engine = load_engine(pick.choice(["megatron-bridge", "deepspeed", "fsdp"]))
    frozen = pick.choice(engine.can.frozen_weights)
    lora = {"lora_rank": pick.choice([1, 8]), "lora_targets": ("query", "down"), "frozen_weights": frozen}
    training = job.training.model_copy(
        update={**lora, "precision": "bf16" if "bf16" in job.cluster.device.peak else "fp16"}
    )
    job = replace(job, engine=engine, training=training)
    check_against_brute_force(job)
    check_bounds(job)


@pytest.mark.parametrize("gib", [0.004, *long_forms(0.002)])
def test_search_with_offload_and_experts_equals_brute_force(gib):
    mixture = small_mixture_job(gib)
    job = replace(offloading(mixture, 1), engine=mixture.engine)
    best, _ = brute_force(job)
    found = search(job, NO_CONSTRAINTS)
    assert isinstance(found, NothingFits) == (best == np.inf)
    if best < np.inf:
        assert found.step_seconds == pytest.approx(best, rel=1e-9), format_layout(found.layout)
    check_bounds(job)


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


def small_mixture_job(gib=0.006, more=""):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny-moe.yaml"
        path.write_text(MIXTURE + more)
        return load_job(
            model=str(path),
            cluster="dgx-a100",
            engine="megatron",
            gpus=4,
            sequence_length=64,
            global_batch_size=4,
            settings=(
                f"device.memory={gib} GiB",
                "device.reserved_memory=1 MiB",
                "engine.memory.communicator_memory=1 B",
                "engine.pipeline.places_ends=false",  # tests/search/test_ends.py has the others
                "nvlink.bandwidth=1 GB/s",
            ),
            headroom=0.0,
        )


@pytest.mark.parametrize("gib", [0.004, 0.006, *long_forms(0.02)])
def test_search_equals_brute_force_with_experts(gib):
    job = small_mixture_job(gib)
    best, count = brute_force(job)
    assert count > 100
    found = search(job, NO_CONSTRAINTS)
    assert isinstance(found, NothingFits) == (best == np.inf)
    if best < np.inf:
        assert found.step_seconds == pytest.approx(best, rel=1e-9), format_layout(found.layout)


LATENT = "mla: {q_lora_rank: 16, kv_lora_rank: 16, nope_head_size: 16, rope_head_size: 8, value_head_size: 16}"
PARTS = (
    *("none", "full", "mla_up_proj", "layernorm+moe_act", "layernorm+mla_up_proj+moe_act", "moe", "shared_experts"),
    *("layernorm", "core_attn+moe+mlp"),
)
FEW_PARTS = ("none", "full", "mla_up_proj", "layernorm+mla_up_proj+moe_act", "core_attn+moe+mlp")


def job_of_parts(with_engine, gib, per_stage, parts=PARTS):
    """A job with latent attention, experts and a dense layer, in an engine that tries many sets of modules."""
    job = small_mixture_job(gib, LATENT)
    return with_engine(job, can={"recompute": parts}, pipeline={"recompute_per_stage": per_stage})


@pytest.mark.parametrize(
    ("gib", "per_stage", "check", "parts"),
    [
        (0.0032, False, False, PARTS), (0.0052, True, False, FEW_PARTS),
        *long_forms(*itertools.product((0.0031, 0.0033), (False,), (True,), (PARTS,))),
        *long_forms(*itertools.product((0.0052, 0.0054), (True,), (True,), (PARTS,))),
    ],
)  # fmt: skip
def test_search_equals_brute_force_over_the_parts_of_layers(with_engine, gib, per_stage, check, parts):
    job = job_of_parts(with_engine, gib, per_stage, parts)
    best, count = brute_force(job)
    assert count > 1000
    found = search(job, NO_CONSTRAINTS, check=check)
    assert found.step_seconds == pytest.approx(best, rel=1e-9), format_layout(found.layout)
    assert not {"none", "full"}.issuperset(found.layout.recompute)
    check_bounds(job)


def tight_job(gib, gpus):
    """A job whose layouts need recompute, which takes much time, in an engine that recomputes no modules."""
    return load_job(
        model="tiny-llama",
        cluster="dgx-a100",
        engine="megatron",
        gpus=gpus,
        sequence_length=256,
        global_batch_size=4,
        settings=(
            "model.num_layers=5",
            f"device.memory={gib} GiB",
            "device.reserved_memory=1 MiB",
            "engine.memory.communicator_memory=1 B",
            "engine.pipeline.places_ends=false",  # tests/search/test_ends.py has the others
            "nvlink.bandwidth=1 GB/s",
            "device.peak.bf16=0.5 TFLOP/s",
            "device.num_processors=1",
            'engine.can.recompute=["none","full"]',
        ),
        headroom=0.0,
    )


TIGHT = ((0.018, 2), (0.016, 2), (0.012, 4), (0.009, 4))


@pytest.mark.parametrize(
    ("gib", "gpus", "check"), [(0.012, 2, True), (0.018, 2, False), *long_forms(*((*each, True) for each in TIGHT))]
)
def test_search_equals_brute_force_where_some_layers_recompute(gib, gpus, check):
    job = tight_job(gib, gpus)
    best, _ = brute_force(job)
    found = search(job, NO_CONSTRAINTS, check=check)
    assert found.step_seconds == pytest.approx(best, rel=1e-9), format_layout(found.layout)
    assert gpus > 2 or found.layout.recompute[0].startswith("full:")
    check_bounds(job)


def test_memory_forces_the_cheapest_of_the_policies_that_follow():
    """Without recompute 2 of 4 layers fit into memory; each of the others takes at least a second more."""
    job = small_mixture_job()
    job = replace(job, model=job.model.model_copy(update={"moe": None}))
    degrees = with_ones(1, schedule="1f1b")
    seconds = np.array([[[1.0], [5.0], [2.0]]])  # of a layer under each policy, in the order in which they are listed
    none = dict.fromkeys(("send", "ends", "last", "tail", "most", "window", "update"), np.zeros(1))
    costs = LeastCosts(layer=seconds, num_main=1, **none)
    one = np.zeros(1, dtype=np.int64)
    held = Capacities(owner=one, is_last=one == 0, layers=np.array([[2.0], [4.0], [4.0]]))
    assert _forced_seconds(job, degrees, costs, held) == pytest.approx([2.0])


DIFFERENT = (  # layers that differ: leading dense ones, experts or windows that come back
    {"moe.num_dense_layers": 1},
    {"moe.num_dense_layers": 2},
    {"moe.layer_frequency": 2},
    {"moe.layer_frequency": 2, "moe.num_dense_layers": 1},
    {"moe.layer_frequency": 2, "sliding_window": 2, "global_every": 3},
    {"moe.num_dense_layers": 1, "sliding_window": 2, "global_every": 2},
    {"sliding_window": 2, "global_every": 2},
    {"sliding_window": 2, "global_every": 3},
    {"sliding_window": 2, "global_every": 0},
)


def job_of_different_layers(seed, engine="megatron", gpus=None):
    """A random small job whose layers differ: some kinds take several times as long as others, or need more memory.

    Launches are fast and attention kernels slow, so the time of a layer is the time that it computes.
    """
    pick = random.Random(seed)
    different = pick.choice(DIFFERENT)
    experts = any(key.startswith("moe") for key in different)
    mixture = {
        "moe.num_experts": 4, "moe.experts_per_token": pick.choice([1, 2, 4]),
        "moe.ffn_hidden_size": pick.choice([16, 64, 512]), "moe.shared_ffn_hidden_size": pick.choice([0, 64]),
    }  # fmt: skip
    text = "\n".join(
        (
            "name: tiny-different\narchitecture: llama\nhidden_size: 64\nnum_heads: 4\nvocab_size: 256",
            f"max_sequence_length: 4096\nnum_layers: {pick.randint(3, 5)}\nffn_hidden_size: {pick.choice([64, 512])}",
        )
    )
    values = (mixture if experts else {}) | different
    moe = {key.removeprefix("moe."): value for key, value in values.items() if key.startswith("moe")}
    text += "".join(f"\n{key}: {value}" for key, value in values.items() if not key.startswith("moe"))
    text += "\nmoe: {" + ", ".join(f"{key}: {value}" for key, value in moe.items()) + "}" if experts else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny-different.yaml"
        path.write_text(text)
        return load_job(
            model=str(path),
            cluster=pick.choice(["dgx-a100", "dgx1-v100"]),
            engine=engine,
            gpus=gpus or pick.choice([2, 2, 3, 4]),
            sequence_length=pick.choice([64, 2048]),
            global_batch_size=pick.choice([2, 4, 6]),
            settings=(
                f"device.memory={pick.choice([0.01, 0.02, 0.05, 0.5])} GiB",
                "device.reserved_memory=1 MiB",
                "engine.memory.communicator_memory=1 B",
                "engine.pipeline.places_ends=false",  # tests/search/test_ends.py has the others
                "device.efficiency.layer_floor=1 us",
                f"device.efficiency.attention={pick.choice([0.002, 0.02])}",
                f"nvlink.bandwidth={pick.choice([1, 300])} GB/s",
            ),
            headroom=0.0,
        )


@pytest.mark.parametrize("seed", [1, 2, 4, 5, *long_forms(0, 3, 6, 7)])
def test_search_equals_brute_force_where_layers_differ(seed):
    job = job_of_different_layers(seed)
    check_against_brute_force(job)


@pytest.mark.parametrize("seed", [1, 2, 4, 5, *long_forms(0, 3, 6, 7)])
def test_bounds_stay_below_the_exact_optimum_where_layers_differ(seed):
    check_bounds(job_of_different_layers(seed))


@pytest.mark.parametrize(
    ("layers", "dense", "gpus"), [(5, 1, 2), (5, 2, 2), *long_forms((7, 2, 2), (9, 2, 2), (7, 2, 3))]
)
def test_chunks_of_a_model_that_begins_dense_differ_by_a_layer(layers, dense, gpus):
    """On a pipeline that is hardly filled, interleaved stages are the fastest; these layers do not divide evenly."""
    job = small_mixture_job(0.5)
    job = replace(
        job,
        model=job.model.model_copy(
            update={"num_layers": layers, "moe": job.model.moe.model_copy(update={"num_dense_layers": dense})}
        ),
        cluster=job.cluster.model_copy(update={"hosts": 1, "devices_per_host": gpus}),
        training=job.training.model_copy(update={"global_batch_size": gpus, "sequence_length": 2048}),
    )
    pins, best = {"pp": gpus, "mbs": 1, "zero": 0}, {}
    for common in every_configuration(job):
        if all(common[key] == value for key, value in pins.items()):
            v = common["interleave"]
            for split, chosen in assignments(job, common):
                layout = Layout(**common, layers_per_stage=balanced_chunks(split, v), recompute=chosen * v)
                best[layout] = estimate(job, layout).step_seconds
    found = search(job, Constraints.parse([f"{key}={value}" for key, value in pins.items()], []))
    assert found.certificate.dynamic_program_seconds == pytest.approx(min(best.values()), rel=1e-9)
    assert found.certificate.objective_seconds == pytest.approx(min(best.values()), rel=1e-9)
    chunks = found.layout.layers_per_stage
    assert found.layout.interleave > 1, format_layout(found.layout)
    assert max(chunks) == min(chunks) + 1
    check_bounds(job)


@pytest.mark.parametrize("dense", [1, 2, 3])
def test_splits_into_chunks_that_the_search_prices_are_those_with_all_dense_layers_in_the_first(dense):
    """Each has the step of its own ledger, which counts the kinds of layers chunk by chunk."""
    job = small_mixture_job(0.5)
    moe = job.model.moe.model_copy(update={"num_dense_layers": dense})
    job = replace(job, model=job.model.model_copy(update={"num_layers": 9, "moe": moe}))
    pins = Constraints.parse(["pp=2,interleave=2,dp=1,tp=1,cp=1,mbs=1,zero=0,recompute=none"], [])
    (degrees,) = legal_degrees(Space(job, pins))
    policies = Space(job, pins).policies(degrees)
    (candidate,) = price_candidates(Space(job, pins), degrees, policies)
    priced = {}
    for columns in itertools.product(*(np.flatnonzero(candidate.stage == stage).tolist() for stage in (0, 1))):
        if candidate.is_choice(columns):
            split = candidate.layers[list(columns)].tolist()
            layout = layout_at(degrees.take(0), split, candidate.policy[list(columns)].tolist())
            assert candidate.step_seconds(columns) == pytest.approx(estimate(job, layout).step_seconds, rel=1e-9)
            priced[tuple(split)] = layout.layers_per_stage
    assert {*priced} == {s for s in compositions(9, 2, 2) if balanced_chunks(s, 2)[0] >= dense}


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, ""),
        ({"num_dense_layers": 1}, ""),
        ({"num_dense_layers": 2}, "whose first chunk does not hold all dense layers"),
        ({"layer_frequency": 2}, "whose chunks are not all alike"),
        ({"layer_frequency": 2, "num_dense_layers": 1}, "whose chunks are not all alike"),
    ],
)
def test_the_proof_names_interleaved_stages_that_were_not_searched(different, words):
    """It names some exactly if the model has chunks that can run, but that no search tries."""
    job = small_mixture_job(0.5)
    moe = job.model.moe.model_copy(update={"num_dense_layers": 0, **different})
    job = replace(job, model=job.model.model_copy(update={"num_layers": 7, "moe": moe}))
    common = {"pp": 2, "interleave": 2, "schedule": "interleaved", "offload": "none"}
    tried = {split for split, _ in assignments(job, common)}
    for split in compositions(7, 2, 2):
        chunks = {"layers_per_stage": balanced_chunks(split, 2), "recompute": ("none",) * 4}
        assert not broken_rules(job, Layout(**common, **chunks))
    small = "dp=1,cp=1,ep=1,mbs=1,zero=0"  # any values of these keys: the words are about chunks
    certificate = search(job, Constraints.parse([small])).certificate
    assert bool(certificate.not_searched) == (tried != set(compositions(7, 2, 2)))
    assert certificate.not_searched == (() if not words else (f"interleaved stages of this model {words}",))
    assert not search(job, Constraints.parse([f"{small},interleave=1"])).certificate.not_searched


def test_a_pin_that_leaves_no_layout_says_what_the_search_does_not_interleave():
    """Experts that overlap need chunks, and chunks of a model whose layers alternate are not searched here."""
    job = small_mixture_job(0.5)
    moe = job.model.moe.model_copy(update={"layer_frequency": 2})
    training = job.training.model_copy(update={"expert_overlap": True})
    job = replace(job, model=job.model.model_copy(update={"moe": moe}), training=training)
    with pytest.raises(InputError) as caught:
        search(job, Constraints.parse(["pp=2"], []))
    reasons = " ".join(mistake.message for mistake in caught.value.mistakes)
    assert "overlap in interleaved stages or without a pipeline" in reasons
    assert "kinds of layers repeat every 2 layers" in reasons
    assert "ep 1" not in reasons  # nobody asked for it


@pytest.mark.parametrize("seed", [18, 73, *long_forms(26)])
def test_the_least_memory_is_that_of_brute_force_where_layers_differ(seed):
    """Layers with experts need more memory, so stages that hold such layers hold fewer layers. On three stages."""
    job, least = job_of_different_layers(seed), np.inf
    for common in every_configuration(job):
        if common["pp"] != 3:
            continue
        v = common["interleave"]
        for split, chosen in assignments(job, common):
            layout = Layout(**common, layers_per_stage=balanced_chunks(split, v), recompute=chosen * v)
            least = min(least, estimate(job, layout).peak_bytes)
    found = least_peak(Space(job, Constraints.parse(["pp=3"], [])))
    assert found.num_bytes == pytest.approx(least, rel=1e-9)


def test_a_shard_group_of_one_rank_is_there_only_where_it_is_pinned():
    job = load_job(model="tiny-llama", cluster="dgx-a100", engine="fsdp", gpus=8, global_batch_size=64)
    for pins, expected in ((), {1, 2, 4}), (("hsdp=8",), {8}):
        found = list(legal_degrees(Space(job, Constraints.parse(["zero=3", "dp=8", *pins], []))))
        assert {int(replicas) for degrees in found for replicas in degrees.hsdp} == expected


@pytest.mark.parametrize("seed", range(8))
def test_no_stage_within_the_cutoff_has_more_than_the_most_layers(seed):
    job = job_of_different_layers(seed)
    for degrees in legal_degrees(Space(job)):
        policies = Space(job).policies(degrees)
        candidates = price_candidates(Space(job), degrees, policies)
        for at, candidate in enumerate(candidates[:20]):
            for stage, count in set(zip(candidate.stage.tolist(), candidate.layers.tolist(), strict=True)):
                choice = best_choice(candidate.keep((candidate.stage != stage) | (candidate.layers == count)))
                if choice:
                    assert most_layers(job, degrees, choice.objective_seconds)[at] >= count


@pytest.mark.parametrize("count", [12, 14, 20, 40])
def test_filling_the_pipeline_takes_time_from_the_fullest_stage(count):
    """Eight microbatches on eight stages: half of the step is the way of one microbatch through all stages."""
    job = load_job(
        model="gpt3-175b", cluster="dgx-h100", gpus=64, sequence_length=2048, global_batch_size=8,
        settings=("device.memory=2000GiB",),
    )  # fmt: skip
    pins = Constraints.parse(["tp=8,pp=8,interleave=1,cp=1,mbs=1,zero=0"])
    (degrees,) = (each for each in legal_degrees(Space(job, pins)) if len(each) == 1)
    (candidate,) = price_candidates(Space(job, pins), degrees, Space(job, pins).policies(degrees))
    best = best_choice(candidate.keep((candidate.stage != 3) | (candidate.layers == count)))
    assert count <= most_layers(job, degrees, best.objective_seconds) <= 1.3 * count


def slowed(job, slow, late):
    """The job with links of lower bandwidth and higher latency."""
    links = [
        link.model_copy(
            update={"bandwidth": link.bandwidth / slow, "latency": link.latency * late, "startup": link.startup * late}
        )
        for link in job.cluster.links
    ]
    return replace(job, cluster=job.cluster.model_copy(update={"links": tuple(links)}))


def somehow_slowed(job, seed):
    """The job on links so slow or late that transfers once a step may take most of the step."""
    pick = random.Random(-seed)
    return slowed(job, pick.choice([1, 10, 1000]), pick.choice([1, 3, 10, 100, 10000]))


def check_tails(job):
    """Compare the bound of the longest tail with all partitions of the model, each stage with its best policy."""
    for degrees in legal_degrees(Space(job)):
        policies = Space(job).policies(degrees)
        for pp, v in set(zip(degrees.pp.tolist(), degrees.interleave.tolist(), strict=True)):
            if pp == 1:  # has its own price
                continue
            rows = np.flatnonzero((degrees.pp == pp) & (degrees.interleave == v))
            x, least = degrees.take(rows), np.full(len(rows), np.inf)
            chosen = {policy: mask[rows] for policy, mask in policies.items()}
            for split in compositions(job.model.num_layers, pp, v):
                if v > 1 and not all(np.all(can_interleave(job, x, *each)) for each in enumerate(split)):
                    continue
                tails = [
                    np.broadcast_to(shortest_tail(job, x, chosen, index, sum(split[:index]), number), len(rows))
                    for index, number in enumerate(split)
                ]
                least = np.minimum(least, np.max(tails, axis=0))
            bound = least_costs(job, x, chosen, np.inf, any_replicas=False).tail
            assert np.all(bound <= least * (1 + 1e-12)), (pp, float((bound / least).max()))


def shortest_tail(job, degrees, policies, index, first, number):
    """Shortest tail of one stage over the policies that the stage may have, [n]."""
    tails = []
    for policy, mask in policies.items():
        stage = stage_of(job, index=index, num_layers=number, policy=policy, first=first, layout=degrees)
        tails.append(np.where(mask, stage_prices(job, degrees, stage).tail_seconds, np.inf))
    return np.min(tails, axis=0)


@pytest.mark.parametrize("seed", [0, 3, 14, 21])
def test_no_partition_of_the_model_has_shorter_tails_than_the_bound(seed):
    check_tails(predicting(somehow_slowed(job_of_different_layers(seed, gpus=8), seed), seed % 3))
    check_tails(somehow_slowed(small_job(seed), seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_no_partition_of_many_models_has_shorter_tails_than_the_bound(seed):
    engine = ["megatron", "torch", "torchtitan", "deepspeed"][seed % 4]
    check_tails(somehow_slowed(job_of_different_layers(seed, engine, gpus=8), seed))
    check_bounds(somehow_slowed(job_of_different_layers(seed, engine), seed))


def test_the_last_stage_hides_its_traffic_behind_layers_for_further_tokens_too():
    job = slowed(job_of_different_layers(346, "megatron-bridge"), 10, 3)
    training = job.training.model_copy(update={"sequence_length": 2048})
    check_tails(predicting(replace(job, training=training), 1))


def predicting(job, further):
    """The job with layers for multi-token prediction."""
    return replace(job, model=job.model.model_copy(update={"mtp_layers": further}))


def job_of_further_tokens(seed):
    return predicting(somehow_slowed(job_of_different_layers(seed), seed), 1 + seed % 2)


@pytest.mark.parametrize("seed", [1245, *long_forms(1, 5, 23)])
def test_search_equals_brute_force_with_layers_for_further_tokens(seed):
    job = job_of_further_tokens(seed)
    best, _ = brute_force(job)
    found = search(job, NO_CONSTRAINTS)
    assert isinstance(found, NothingFits) == (best == np.inf)
    assert best == np.inf or found.step_seconds == pytest.approx(best, rel=1e-9), format_layout(found.layout)
    check_bounds(job)


@pytest.mark.parametrize("seed", [1245, *long_forms(1, 5, 23, 104, 105, 106, 111, 119, 133)])
def test_brute_force_by_stages_is_brute_force_by_ledgers_with_layers_for_further_tokens(seed):
    job = job_of_further_tokens(seed)
    fast, slow = brute_force(job), brute_force_by_ledger(job)
    assert fast[1] == slow[1]
    assert fast[0] == pytest.approx(slow[0], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_search_equals_brute_force_with_layers_for_further_tokens_on_many_jobs(seed):
    test_search_equals_brute_force_with_layers_for_further_tokens(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 600))
def test_search_equals_brute_force_on_many_jobs_whose_layers_differ(seed):
    job = job_of_different_layers(seed)
    check_against_brute_force(job)
    check_bounds(job)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_search_equals_brute_force_on_ten_thousand_jobs(block):
    outcomes = [check_against_brute_force(small_job(seed)) for seed in range(1000 + block * 100, 1100 + block * 100)]
    assert {"found", "nothing fits"} <= set(outcomes)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("seed", [5, 24, *long_forms(0, 11, 35, 44)])
def test_an_executed_schedule_is_found_as_by_brute_force(seed, schedule, with_engine):
    """Every configuration, even split and recompute policy of each stage is executed, one by one."""
    job = small_job(seed)
    check_executed(with_engine(job, overlap={"paired_passes": seed % 2 == 1}), schedule)


@pytest.mark.parametrize("seed", [4, 5, 11, 16])
def test_an_executed_schedule_is_found_as_by_brute_force_where_layers_differ(seed):
    check_executed(job_of_different_layers(seed, engine="torch"), "zbv")


@pytest.mark.parametrize("seed", [*range(6), *long_forms(*range(6, 60))])
def test_each_legal_configuration_is_ruled_out_or_priced(seed):
    found = found_of(seed)
    if not isinstance(found, NothingFits):
        certificate = found.certificate
        assert sum(certificate.num_pruned.values()) + certificate.num_priced == certificate.num_legal


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "zb-h1"])
@pytest.mark.parametrize("seed", [5, 24, 35])
def test_no_bound_of_an_executed_schedule_exceeds_the_executed_step(seed, schedule, with_engine):
    job = with_engine(small_job(seed), overlap={"paired_passes": seed % 2 == 1}, pipeline={"schedules": (schedule,)})
    pinned, num = Constraints.parse([f"schedule={schedule}"], []), 0
    for degrees in legal_degrees(Space(job, pinned)):
        policies = Space(job, pinned).policies(degrees)
        executed = executed_candidates(job, degrees, policies)
        fits = np.array([each.stage.size > 0 for each in executed])
        exact = np.where(fits, [each.constant_seconds for each in executed], np.inf)
        bounds = busy_seconds(job, degrees, policies)
        assert np.array_equal(np.isfinite(bounds), fits)
        assert np.all(bounds <= exact * (1 + 1e-12))
        num += int(fits.sum())
    assert num > 0


def check_executed(job, schedule):
    best = np.inf
    for common in every_configuration(job, schedule):
        pp, layers = common["pp"], job.model.num_layers
        split = tuple(layers // pp + (stage < layers % pp) for stage in range(pp))
        chunks = balanced_chunks(split, 2, schedule)
        for chosen in itertools.product(["none", "full"], repeat=pp):
            priced = estimate(job, Layout(**common, layers_per_stage=chunks, recompute=of_chunks(chosen, 2, schedule)))
            if priced.fits:
                best = min(best, priced.step_seconds)
    found = search(job, Constraints.parse([f"schedule={schedule}"], []))
    assert not isinstance(found, NothingFits), f"brute force found {best} s"
    assert found.layout.schedule == schedule
    assert found.step_seconds == pytest.approx(best, rel=1e-9)


def check_bounds(job):
    """Compare every bound of every configuration with the least of all its choices, at tight and at loose cutoffs."""
    space, best = Space(job), np.inf
    for degrees in list(legal_degrees(space)):
        policies = space.policies(degrees)
        exact = np.array([least_seconds(each) for each in price_candidates(space, degrees, policies)])
        best = min(best, exact.min())
        fits = np.isfinite(exact)
        few = exact * (1 + 1e-12)
        lower = LayerBounds(job, degrees)
        assert np.all(lower.partition_bound_seconds(degrees) <= few)
        assert np.all(lower.timing_bound_seconds(degrees) <= few)
        assert np.all(lower.timing_bound_seconds(degrees, any_experts=True) <= lower.timing_bound_seconds(degrees))
        small = least_stage_bytes(job, degrees, list(policies)) <= memory_limit_bytes(job, degrees)
        assert np.all(small[fits])
        assert np.array_equal(may_fit(job, degrees, list(policies)), small)
        smallest = degrees.having("mbs", np.where(can_be_smaller(job, degrees), 1, degrees.mbs))
        no_more = least_stage_bytes(job, smallest, list(policies))
        assert np.all(no_more <= least_stage_bytes(job, degrees, list(policies)) * (1 + TIE))
        assert np.all(lower_bound_seconds(job, degrees, policies) <= few)
        unreplicated = replace(degrees, hsdp=np.ones_like(degrees.hsdp))
        assert np.all(lower_bound_seconds(job, unreplicated, policies, any_replicas=True) <= few)
        assert np.all(least_seconds_of_any_policy(job, unreplicated, np.inf) <= few)
        assert np.all(replicas_bound_seconds(job, degrees, policies, np.inf) <= few)
        assert np.all(even_split_seconds(job, degrees, policies) >= exact * (1 - 1e-12))
        for cutoff in {best, 1.3 * best, exact[fits].min(initial=np.inf)}:
            near = exact <= cutoff  # of the others, bounds only need to be above the cutoff
            if not near.any() or cutoff == np.inf:
                continue
            bounds = lower_bound_seconds(job, degrees, policies, cutoff_seconds=cutoff)
            assert np.all((bounds <= few)[near])
            assert np.all((least_seconds_of_any_policy(job, unreplicated, cutoff) <= few)[near])
            assert np.all((replicas_bound_seconds(job, degrees, policies, cutoff) <= few)[near])
            kept = np.flatnonzero(bounds <= cutoff * (1 + 1e-12))  # those that a search would price
            own = {policy: mask[kept] for policy, mask in policies.items()}
            narrow = price_candidates(space, degrees.take(kept), own, cutoff_seconds=cutoff)
            for candidate, seconds in zip(narrow, exact[kept].tolist(), strict=True):
                if seconds <= cutoff:
                    assert least_seconds(candidate) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("seed", [*range(6), *long_forms(*range(6, 12))])
def test_bounds_stay_below_the_exact_optimum(seed):
    check_bounds(small_job(seed))


def test_bounds_count_no_collective_that_runs_beside_its_product():
    small = ("model.num_layers=8", "model.vocab_size=1024", "nvlink.bandwidth=30 GB/s")
    settings = (*small, "engine.overlap.tensor_parallel=true")
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", gpus=4, sequence_length=2048, global_batch_size=4, settings=settings
    )
    check_bounds(job)


@pytest.mark.parametrize("gib", [0.006, *long_forms(0.004, 0.02)])
def test_bounds_stay_below_the_exact_optimum_with_experts(gib):
    check_bounds(small_mixture_job(gib))


def test_traffic_that_is_priced_once_is_the_traffic_of_each_configuration():
    """Configurations that differ in any degree are told apart; one alone has no other to be taken for."""
    asked = {"model": "mixtral-8x7b", "cluster": "dgx-a100", "engine": "torch", "gpus": 64}
    job = load_job(**asked, sequence_length=4096, global_batch_size=64)
    x = next(Space(job, Constraints.parse(["pp=2", "tp=2", "ep=2", "mbs=1"], [])).blocks(with_replicas=True))
    assert len(set(x.hsdp.tolist())) > 2
    least = least_costs(job, x, Space(job).policies(x), np.inf, any_replicas=True)
    alone = [least_transfer(job, x.take([row]), least.take([row]))[0] for row in range(len(x))]
    assert least_transfer(job, x, least).tolist() == alone


@pytest.mark.parametrize("seed", [1, 2, *long_forms(0)])
def test_brute_force_by_stages_is_brute_force_by_ledgers(seed):
    job = replace(small_job(seed), calibration=UNCALIBRATED)
    job = replace(job, cluster=job.cluster.model_copy(update={"hosts": 1, "devices_per_host": 2}))
    fast, slow = brute_force(job), brute_force_by_ledger(job)
    assert fast[1] == slow[1]
    assert fast[0] == pytest.approx(slow[0], rel=1e-12)


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
        (["tp=3"], r"tp 3 does not divide the heads \(32\).*tp can be 1, 2, 4 or 8"),
        (["tp=16"], r"key-value heads \(8\)"),
        (["tp=2,sp=0"], "tp 2 with sequence parallelism only; sp=1"),
        (["layers_per_stage=1/2"], "sums to 3"),
        (["zero=3,pp=2"], "no ZeRO-3 with a pipeline of 2 stages; zero=0 or 1, or pp=1 with zero=3"),
        (["tp=8,pp=4"], "= 32 devices, and there are 16; lower a degree, or --nodes 4"),
        (["dp=3"], "dp 3 \\* mbs 1 = 3 does not divide the global batch of"),
        (["schedule=zb-h1"], "does not run schedule zb-h1; it runs"),
        (["schedule=zbv", "pp=2", "recompute=none/full/full/none"], "`recompute` is not chosen with schedule zbv"),
        (["cp=2", "etp=2"], "does not run etp=2"),
    ],
)
def test_impossible_pins_are_named(job, pins, message):
    with pytest.raises(InputError, match=message):
        search(job, Constraints.parse(pins, []))


def test_dualpipe_is_found_without_a_pin_where_its_pairs_hide_exchanges():
    slow = ("nvlink.bandwidth=40 GB/s", "model.moe.num_dense_layers=0", "device.memory=200 GB")
    job = load_job(
        model="deepseek-v2-lite", cluster="hgx-h800", engine="hai-llm", gpus=16, sequence_length=4096,
        global_batch_size=64, settings=slow,
    )  # fmt: skip
    pins = ["pp=4", "ep=4", "mbs=1"]
    found, alone, paired = (
        search(job, Constraints.parse([*pins, *more], [])) for more in ([], ["schedule=1f1b"], ["schedule=dualpipev"])
    )
    assert found.layout == paired.layout
    assert found.step_seconds == paired.step_seconds < 0.9 * alone.step_seconds
    stages = search(job, Constraints.parse([*pins, "layers_per_stage=7/7/7/6"], []))
    assert stages.layout.schedule == "1f1b"  # DualPipeV has even stages


def test_a_loss_that_the_engine_lacks_is_refused_with_those_that_have_it():
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", engine="torch", gpus=8, sequence_length=1024, global_batch_size=8,
        settings=("training.loss=fused-linear",),
    )  # fmt: skip
    with pytest.raises(
        InputError, match=r"no fused-linear loss; --set training.loss=whole, or --engine deepspeed or fsdp"
    ):
        search(job, NO_CONSTRAINTS)


@pytest.mark.parametrize(("engine", "most"), [("megatron", 8), ("megatron-bridge", 8), ("torchtitan", 2), ("torch", 2)])
def test_key_value_heads_are_repeated_by_engines_that_do_it(engine, most):
    """Megatron-LM requires that tp or the number of heads divides the other (transformer_config.py).

    Other engines give whole heads to ranks.
    """
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", engine=engine, gpus=8, sequence_length=1024, global_batch_size=8,
        settings=("model.num_kv_heads=2",),
    )  # fmt: skip
    found = {tp for degrees in legal_degrees(Space(job)) for tp in degrees.tp.tolist()}
    assert max(found) == most


@pytest.mark.parametrize(
    "pins", ["tp=4,pp=4", "dp=3,mbs=2", "tp=3,dp=3", "tp=3", "tp=2,pp=2,dp=4", "mbs=8,dp=2", "tp=2,pp=2"]
)
def test_the_pin_to_drop_is_the_one_in_the_way(pins):
    """The oracle is the list of all configurations, which is independent of the search."""
    job = small_job(5)
    wanted = dict(pin.split("=") for pin in pins.split(","))
    everything = list(every_configuration(job))

    def is_possible(left_out):
        kept = {key: int(value) for key, value in wanted.items() if key != left_out}
        return any(kept.items() <= configuration.items() for configuration in everything)

    assert not is_possible(None)
    alone = [f"{key}={value}" for key, value in wanted.items() if is_possible(key)]
    with pytest.raises(InputError) as error:
        search(job, Constraints.parse([pins], []))
    hint = error.value.mistakes[-1].hint
    assert hint.startswith(f"drop {' or '.join(alone)};" if alone else "dropping one of them is not enough")


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
    assert max(stage.total_bytes for stage in found.memory) > memory_limit_bytes(job, found.layout)
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


class _Interrupting(Reporter):
    """Presses Ctrl-C at a given report."""

    def __init__(self, when):
        self._when = when

    def candidates(self, *_):
        self._interrupt("candidates")

    def priced(self, *_):
        self._interrupt("priced")

    def _interrupt(self, name):
        if name == self._when:
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["candidates", "priced"])
def test_ctrl_c_returns_the_incumbent_and_never_calls_it_optimal(when, job, best):
    found = search(job, NO_CONSTRAINTS, reporter=_Interrupting(when))
    assert found.certificate.status == "interrupted"
    assert found.certificate.dynamic_program_seconds is None
    assert found.step_seconds >= best.step_seconds * (1 - 1e-12)
    bound = found.step_seconds * (1 - found.certificate.gap)
    assert 0 < bound <= best.step_seconds * (1 + 1e-12)


@pytest.mark.parametrize("name", ["cost", "gpus", "memory"])
@pytest.mark.parametrize("when", ["candidates", "priced"])
def test_ctrl_c_keeps_the_incumbent_of_other_objectives_and_bounds_it_in_their_terms(when, name):
    """The oracle is the complete search: the bound is not above its optimum, and the incumbent is not below it."""
    job, objective = small_job(9), Objective(name=name)
    whole = search(job, NO_CONSTRAINTS, objective=objective)
    found = search(job, NO_CONSTRAINTS, objective=objective, reporter=_Interrupting(when))
    best, mine = (objective.rank(plan.step_seconds, plan.layout.world_size)[0] for plan in (whole, found))
    assert found.certificate.status == "interrupted"
    assert mine >= best * (1 - 1e-12)
    assert 0 < mine * (1 - found.certificate.gap) <= best * (1 + 1e-12)


def test_a_search_that_is_out_of_time_says_so_of_its_incumbent(job, best):
    class Late(Reporter):
        def priced(self, *_):
            raise OutOfTime

    found = search(job, NO_CONSTRAINTS, reporter=Late())
    assert found.certificate.status == "out of time"
    assert 0 < found.step_seconds * (1 - found.certificate.gap) <= best.step_seconds * (1 + 1e-12)


def test_a_time_limit_ends_a_search_that_finds_nothing(job, monkeypatch):
    monkeypatch.setattr("planner.search.space.space.Space.partitions", lambda *_a, **_k: time.sleep(60))
    with pytest.raises(SolverTrouble, match=r"within 0.1 s"):
        search(job, NO_CONSTRAINTS, time_limit=0.1)


@pytest.mark.parametrize(
    ("objective", "slow"),
    [("memory", "planner.search.search.least_peak"), ("throughput", "planner.search.search._where_likeliest")],
)
def test_a_time_limit_also_ends_the_parts_before_and_after_the_first_search(objective, slow, monkeypatch):
    monkeypatch.setattr(slow, lambda *_a, **_k: time.sleep(60))
    jobs = map(small_job, itertools.count())
    job = next(each for each in jobs if objective == "memory" or not fits(Space(each, NO_CONSTRAINTS)))
    with pytest.raises(SolverTrouble, match=r"within 2 s"):
        search(job, NO_CONSTRAINTS, objective=Objective(name=objective), time_limit=2.0)


def test_a_search_that_ends_early_without_a_layout_does_not_say_that_nothing_fits(job, monkeypatch):
    found = Found(Space(job))
    found.bound, found.is_out_of_time = 0.0, True
    monkeypatch.setattr("planner.search.search.best_first", lambda *_a, **_k: found)
    with pytest.raises(SolverTrouble, match="no layout was found"):
        search(job, NO_CONSTRAINTS, time_limit=60.0)
    found.is_out_of_time = False
    with pytest.raises(KeyboardInterrupt):
        search(job, NO_CONSTRAINTS)


def test_ctrl_c_while_the_solver_runs_returns_what_is_known(job, best, monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.search.decision.solve", interrupted)
    found = search(job, NO_CONSTRAINTS)
    assert found.certificate.status == "interrupted"
    assert found.step_seconds == pytest.approx(best.step_seconds, rel=1e-12)


def test_ctrl_c_before_anything_is_found_ends_the_search(job, monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.search.space.space.Space.partitions", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(job, NO_CONSTRAINTS)


def test_more_to_choose_from_is_never_worse_and_less_is_never_better(job, best, with_engine):
    rich = with_engine(job, can={"recompute": ("none", "selective", "full")})
    poor = with_engine(job, can={"axes": ("tp", "pp", "dp")})
    roomy = replace(job, headroom=0.0)
    seconds = best.step_seconds * (1 + 1e-12)
    assert search(rich, NO_CONSTRAINTS).step_seconds <= seconds
    assert search(roomy, NO_CONSTRAINTS).step_seconds <= seconds
    assert search(poor, NO_CONSTRAINTS).step_seconds >= best.step_seconds * (1 - 1e-12)
    fixed = with_engine(job, pipeline={"uneven_stages": False}, can={"replicates_shards": False})
    assert search(fixed, NO_CONSTRAINTS).step_seconds >= best.step_seconds * (1 - 1e-12)


def test_rules_read_no_more_than_they_say():
    """A rule is applied as soon as the keys that it reads are fixed; the other degrees must not change its answer."""
    job = small_mixture_job()
    job = replace(job, training=job.training.model_copy(update={"global_batch_size": 64}))
    pick = random.Random(0)
    keys = [f.name for f in fields(Layout) if f.name not in ("schedule", "recompute", "offload", "layers_per_stage")]
    for _ in range(300):
        layout = Layout(
            **{key: pick.choice([1, 2, 3, 4, 8]) for key in keys if key not in ("zero", "sp")},
            zero=pick.randint(0, 3), sp=pick.randint(0, 1), schedule=pick.choice(["1f1b", "interleaved"]),
            recompute=("none",), layers_per_stage=(1,),
        )  # fmt: skip
        for rule in RULES:
            others = {key: pick.choice([1, 2, 3, 4, 8]) for key in keys if key not in (*rule.reads, "zero", "sp")}
            assert bool(np.all(rule.holds(job, layout))) == bool(np.all(rule.holds(job, replace(layout, **others)))), (
                rule.name
            )


def test_a_layout_that_breaks_rules_is_refused_with_all_of_them(job):
    layout = Layout(tp=16, dp=3, sp=1, layers_per_stage=(32,), recompute=("none",))
    with pytest.raises(InputError) as error:
        plan_for_layout(job, layout)
    text = str(error.value)
    assert "tp 16 leaves the scale-up domain of 8 devices" in text
    assert "does not divide the global batch" in text
    assert "= 48 devices, and there are 16" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers_per_stage": (8, 8, 16, 0)}, "chunk 3 holds no layer"),
        ({"recompute": ("full", "none", "none", "none")}, "the chunks of stage 0 recompute full and none"),
        ({"recompute": ("full", "none", "full", "none")}, ""),  # chunks 0 and 2 are of one stage
    ],
)
def test_what_chunks_of_a_layout_cannot_be_is_said(change, words):
    job = load_job(model="llama3-8b", cluster="dgx-a100", engine="torch", sequence_length=512, global_batch_size=64)
    chunks = {"layers_per_stage": (8,) * 4, "recompute": ("none",) * 4} | change
    layout = Layout(pp=2, dp=4, interleave=2, schedule="interleaved", **chunks)
    broken = broken_rules(job, layout)
    assert [words in each for each in broken] == [True] * bool(words), broken


@pytest.mark.parametrize(("pp", "interleave", "is_whole"), [(3, 7, True), (7, 3, True), (2, 7, False), (14, 3, False)])
def test_chunks_of_a_model_whose_layers_alternate_hold_pairs_of_them(pp, interleave, is_whole):
    """Gemma 2 alternates local and global attention, and has 42 layers."""
    job = load_job(model="gemma2-9b", cluster="dgx-h100", sequence_length=8192, global_batch_size=64, engine="megatron")
    chunks = {
        "layers_per_stage": (42 // (pp * interleave),) * pp * interleave,
        "recompute": ("none",) * pp * interleave,
    }
    layout = Layout(pp=pp, interleave=interleave, schedule="interleaved", **chunks)
    assert bool(np.all(whole_periods.holds(job, layout))) == is_whole


@pytest.mark.parametrize("pp", [2, 4])
def test_as_many_microbatches_as_dualpipev_is_said_to_need_are_enough(job, pp):
    chunks = {"layers_per_stage": (16 // pp,) * (2 * pp), "recompute": ("none",) * (2 * pp)}
    layout = Layout(pp=pp, interleave=2, schedule="dualpipev", **chunks)

    def with_batch(size):
        return replace(job, training=job.training.model_copy(update={"global_batch_size": size}))

    needed = int(re.search(r"needs ([0-9]+) microbatches", interleave.fault(with_batch(1), layout))[1])
    assert interleave.holds(with_batch(needed), layout)
    assert not interleave.holds(with_batch(needed - 1), layout)


def test_what_needs_the_whole_memory_to_a_byte_is_looked_at(job, monkeypatch):
    """A limit of the least need rules out only what needs more."""
    degrees = next(iter(legal_degrees(Space(job))))
    policies = [FULL]
    needed = least_stage_bytes(job, degrees, policies)
    monkeypatch.setattr(of_memory, "memory_limit_bytes", lambda *_: needed.min())
    assert np.array_equal(may_fit(job, degrees, policies), needed == needed.min())


@pytest.mark.parametrize("engine", ["megatron", "torch"])
@pytest.mark.parametrize("tp", [4, 8, 16])
def test_a_fault_of_tensor_parallelism_offers_the_nearest_legal_degrees(engine, tp):
    """With 6 key-value heads, Megatron-LM repeats each head from tp 12 on; in other engines tp must divide them."""
    sizes = ("model.num_heads=48", "model.num_kv_heads=6", "model.hidden_size=6144", "model.ffn_hidden_size=12288")
    job = load_job(
        model="llama3-8b", cluster="gb200-nvl72", engine=engine, gpus=72, sequence_length=1024, global_batch_size=8,
        settings=sizes,
    )  # fmt: skip
    legal = {"megatron": (1, 2, 3, 6, 12, 24, 48), "torch": (1, 2, 3, 6)}[engine]
    fault = tp_divides.fault(job, Layout(tp=tp, layers_per_stage=(32,), recompute=("none",)))
    offered = [int(each) for each in re.findall(r"[0-9]+", fault.partition("; tp can be ")[2])]
    assert offered == sorted(sorted(legal, key=lambda each: abs(each - tp))[:4])


def test_what_the_search_does_not_interleave_is_named_and_priced_all_the_same():
    options = {"cluster": "dgx-h100", "nodes": 2, "sequence_length": 8192, "global_batch_size": 64}
    job = load_job(model="gemma3-4b", engine="megatron", **options)  # 34 layers, of which every sixth is global
    with pytest.raises(InputError, match=r"repeat every 6 layers, and with pp 2 \* interleave 2 chunks of 34 layers"):
        search(job, Constraints.parse(["pp=2,interleave=2"], []))
    with pytest.raises(InputError, match="planned of equal size"):
        search(job, Constraints.parse(["pp=2,interleave=2,layers_per_stage=9/9/8/8"], []))
    layout = Layout(pp=2, interleave=2, schedule="interleaved", layers_per_stage=(9, 9, 8, 8), recompute=("none",) * 4)
    assert plan_for_layout(job, layout).step_seconds > 0


def legal_and_not(job):
    """For each rule a layout that breaks it, found by trying; other tests cover the rules that read no degree."""
    pick, found = random.Random(1), {}
    keys = [f.name for f in fields(Layout) if f.name not in ("schedule", "recompute", "offload", "layers_per_stage")]
    for _ in range(1000):
        layout = Layout(
            **{key: pick.choice([1, 2, 3, 4, 8, 64]) for key in keys if key not in ("zero", "sp")},
            zero=pick.randint(0, 3), sp=pick.randint(0, 1),
            schedule=pick.choice(["1f1b", "interleaved", "zbv", "naive"]),
            recompute=("none",), layers_per_stage=(1,),
        )  # fmt: skip
        for rule in RULES:
            if rule.reads and not bool(np.all(rule.holds(job, layout))):
                found.setdefault(rule.name, []).append((rule, layout))
    return found


@pytest.mark.parametrize("engine", ["torch", "megatron", "deepspeed", "fsdp"])
def test_every_fault_names_the_values_that_are_wrong_and_a_way_out(engine):
    """The first half has a number or a name of the layout itself, the second half says what to write instead."""
    job = load_job(model="mixtral-8x7b", cluster="dgx-a100", global_batch_size=64, sequence_length=4096, engine=engine)
    broken = legal_and_not(job)
    assert len(broken) >= 9
    for cases in broken.values():
        for rule, layout in cases[:40]:
            wrong, _, way_out = rule.fault(job, layout).partition("; ")
            values = {str(getattr(layout, key)) for key in rule.reads} | {layout.schedule}
            assert any(value in re.findall(r"[\w-]+", wrong.replace("ZeRO-", "")) for value in values), wrong
            assert way_out, wrong
