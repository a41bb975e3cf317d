"""A sweep over cluster sizes compared with single solves and with every layout."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from enumeration import long_forms
from hypothesis import given
from hypothesis import strategies as st

from planner.answers.batch_choice import AS_GOOD
from planner.answers.deadline import search_in_time
from planner.answers.sweep import sweep, sweep_pools
from planner.cost.estimate import estimate
from planner.cost.run import devices_in_use
from planner.errors import InputError
from planner.search.objectives import Objective, Staircase
from planner.search.optimum.pricing import layout_at
from planner.search.search import NothingFits, search
from planner.search.space.constraints import Constraints
from planner.search.space.refusals import legal_degrees
from planner.search.space.space import Space
from planner.specs.change import change_job
from planner.specs.job import each_pool
from planner.specs.load import load_job

FREE = Constraints()


def small_job(seed):
    """A tiny model on hosts of two devices; a domain has one host or two, so the sizes differ in geometry."""
    pick = random.Random(seed)
    return load_job(
        model="tiny-gpt",
        cluster="dgx-a100",
        engine=pick.choice(["torch", "megatron"]),
        sequence_length=64,
        global_batch_size=pick.choice([4, 6, 12]),
        settings=(
            f"model.num_layers={pick.randint(2, 3)}",
            "cluster.devices_per_host=2",
            f"nvlink.spans={pick.choice([2, 4])} devices",
            f"device.memory={pick.choice([0.016, 0.02, 0.03])} GiB",
            "device.reserved_memory=1 MiB",
            "engine.memory.communicator_memory=1 B",
            "engine.pipeline.places_ends=false",  # tests/search/test_ends.py has the others
            "device.efficiency.layer_floor=1 us",
            f"nvlink.bandwidth={pick.choice([1, 300])} GB/s",
        ),
        headroom=0.0,
    )


def on_hosts(job, hosts):
    return replace(job, cluster=job.cluster.model_copy(update={"hosts": hosts}))


def every_layout_that_fits(job):
    """(devices, seconds) of every layout."""
    for degrees in legal_degrees(Space(job, FREE)):
        for i in range(len(degrees)):
            one = degrees.take(i)
            counts = range(one.interleave, job.model.num_layers + 1, one.interleave)
            for layers in itertools.product(counts, repeat=one.pp):
                for chosen in itertools.product(Space(job, FREE).policies(one), repeat=one.pp):
                    if sum(layers) == job.model.num_layers:
                        priced = estimate(job, layout_at(one, layers, chosen))
                        if priced.fits:
                            yield one.world_size, priced.step_seconds


@pytest.mark.parametrize("seed", [0, 1, *long_forms(2, 3)])
def test_each_size_equals_its_single_solve(seed):
    job = small_job(seed)
    found = sweep(job, FREE, range(1, 6))
    assert [hosts for hosts, _ in found.sizes] == [1, 2, 3, 4, 5]
    for hosts, point in found.sizes:
        alone = search(on_hosts(job, hosts), FREE)
        if isinstance(alone, NothingFits):
            assert point is None
        else:
            assert point.step_seconds == pytest.approx(alone.step_seconds, rel=1e-9), (seed, hosts)
            assert point.num_devices <= 2 * hosts


@pytest.mark.parametrize(
    ("seed", "most"), [(4, 2), *(pytest.param(seed, 3, marks=pytest.mark.slow) for seed in (1, 3, 4))]
)
def test_the_front_misses_nothing_and_holds_nothing_dominated(seed, most):
    job = small_job(seed)
    sizes = range(1, most + 1)
    found = sweep(job, FREE, sizes)
    on_each = [list(every_layout_that_fits(on_hosts(job, hosts))) for hosts in sizes]
    # on the smallest cluster only its fastest layout counts
    first = min((s for _, s in on_each[0]), default=math.inf)
    layouts = [each for layouts in on_each for each in layouts]
    layouts = [(w, s) for w, s in layouts if w > 2 or s <= first * (1 + 1e-12)]
    wanted = [
        (w, s) for w, s in layouts if not any(v <= w and t < s * (1 - 1e-12) and (v, t) != (w, s) for v, t in layouts)
    ]
    fewest = {}
    for w, s in sorted(wanted):  # of equal times the one with fewer devices
        if not any(math.isclose(s, other, rel_tol=1e-12) for other in fewest.values()):
            fewest[w] = s
    assert {p.num_devices: p.step_seconds for p in found.front} == pytest.approx(fewest, rel=1e-9)
    for one, other in itertools.permutations(found.front, 2):
        better = (other.num_devices <= one.num_devices, other.step_seconds <= one.step_seconds)
        assert not all((*better, other.device_seconds <= one.device_seconds))


def test_the_front_holds_the_answer_to_every_objective():
    job = load_job(model="llama3-8b", cluster="dgx-a100", nodes=4, global_batch_size=96, sequence_length=4096)
    found = sweep(job, FREE, range(1, 5))
    assert found.front[-1].step_seconds == pytest.approx(search(job, FREE).step_seconds)
    cheapest = search(job, FREE, objective=Objective(name="cost"))
    by_search = cheapest.step_seconds / 96 * cheapest.layout.world_size
    # one host is the smallest cluster here, where only the fastest layout competes
    if cheapest.layout.world_size > 8:
        assert found.cheapest.device_seconds == pytest.approx(by_search)
    assert found.cheapest.device_seconds >= by_search * (1 - 1e-9)
    longest = found.front[len(found.front) // 2].step_seconds * 1.001
    fewest = search(job, FREE, objective=Objective(name="gpus", longest_step_seconds=longest))
    in_time = next(point for point in found.front if point.sequence_seconds <= longest / 96)
    assert in_time.num_devices == fewest.layout.world_size


@given(
    first=st.integers(1, 6),
    layouts=st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 10.0)), max_size=30),
)
def test_a_staircase_rules_out_what_a_list_of_all_layouts_does(first, layouts):
    stairs = Staircase(first)
    for index, (devices, seconds) in enumerate(layouts):
        stairs.add(None, devices, seconds)
        for asked in range(1, 14):
            seen = [s for d, s in layouts[: index + 1] if max(d, first) <= max(asked, first)]
            assert stairs.cutoff_seconds(asked) == min(seen, default=np.inf)


def test_sizes_of_a_mixed_cluster_are_what_searches_find_and_no_point_beats_another():
    """Each size is compared with its own search, and the front with all pairs of sizes."""
    job = load_job(
        model="llama3-8b",
        cluster="mixed-a100-h100",
        sequence_length=2048,
        global_batch_size=32,
        settings=(
            "a100.price=1 USD/h", "h100.price=3 USD/h", "a100.devices_per_host=2", "h100.devices_per_host=2",
            "a100.nvlink.spans=2 devices", "h100.nvlink.spans=2 devices",
        ),
    )  # fmt: skip
    found = sweep_pools(job, Constraints(), {"a100": range(1, 3), "h100": range(1, 3)})
    assert [hosts for hosts, _ in found.sizes] == [(a, h) for a in (1, 2) for h in (1, 2)]
    for (a100, h100), point in found.sizes:
        alone = search(change_job(job, f"a100.hosts={a100},h100.hosts={h100}"), Constraints())
        assert point.step_seconds == pytest.approx(alone.step_seconds, rel=1e-9)
        spent = sum({"a100": 1, "h100": 3}[pool.name] * n for pool, n in devices_in_use(alone.cluster, point.layout))
        assert point.device_seconds == pytest.approx(spent * point.step_seconds / 32)
    points = [point for _, point in found.sizes]
    values = [(each.num_devices, each.device_seconds, each.step_seconds) for each in points]
    pairs = itertools.product(values, values)
    beaten = {own for other, own in pairs if other != own and np.all(np.array(other) <= np.array(own))}
    best = set(values) - beaten
    assert {(each.num_devices, each.device_seconds, each.step_seconds) for each in found.front} == best
    assert found.fastest.step_seconds == min(each.step_seconds for each in points)


@pytest.mark.parametrize(
    ("model", "cluster", "hosts", "batch"),
    [
        pytest.param("gpt2-xl", "dgx-a100", {"dgx-a100": (1, 2, 3)}, "30..34", marks=pytest.mark.slow),
        ("gpt2-xl", "dgx-a100", {"dgx-a100": (1, 3)}, "20k tokens"),
        ("llama3.2-1b", "mixed-a100-h100", {"a100": (1, 2), "h100": (1,)}, "32..33"),
    ],
)
def test_of_a_range_of_batches_each_size_has_the_best(model, cluster, hosts, batch):
    """Compared with a search at each size with each batch."""
    load = {"model": model, "cluster": cluster, "sequence_length": 1024}
    job = load_job(**load, global_batch_size=batch)
    pools = {pool.cluster.name: hosts[pool.cluster.name] for pool in job.pools}
    found = sweep(job, FREE, hosts[cluster]) if len(pools) == 1 else sweep_pools(job, FREE, pools)
    of_size = {}
    for counts in itertools.product(*pools.values()):
        for size in job.batch.sizes():
            one = load_job(**load, global_batch_size=size)
            of_pool = dict(zip(pools, counts, strict=True))
            one = each_pool(one, lambda pool, of=of_pool: on_hosts(pool, of[pool.cluster.name]))
            of_size[counts, size] = search(one, FREE).step_seconds / size
    for counts, point in found.sizes:
        key = counts if isinstance(counts, tuple) else (counts,)
        seconds = {size: of_size[key, size] for size in job.batch.sizes()}
        good = [size for size in seconds if seconds[size] <= min(seconds.values()) * (1 + AS_GOOD)]
        target = job.batch.target
        wanted = min(good, key=lambda size: abs(size - target) if target else size)
        assert point.global_batch_size == wanted
        assert point.sequence_seconds == pytest.approx(seconds[wanted], rel=1e-9)
    for one, other in itertools.permutations(found.front, 2):
        better = (other.num_devices <= one.num_devices, other.sequence_seconds <= one.sequence_seconds)
        assert not all((*better, other.device_seconds <= one.device_seconds))


def test_a_range_of_batches_of_which_none_is_legal_says_why():
    job = load_job(model="gpt2-xl", cluster="dgx-a100", sequence_length=1024, global_batch_size="3..5")
    with pytest.raises(InputError):
        sweep(job, Constraints.parse(["dp=7"]), range(1, 3))


def test_the_fewest_devices_keep_to_the_deadline_with_the_confidence():
    """With one kind of layout left, the result equals that of a separate search."""
    job = load_job(model="llama3-8b", cluster="dgx-a100", nodes=4, global_batch_size=96, sequence_length=4096)
    pinned = Constraints.parse(["tp=2", "pp=1", "cp=1", "zero=1"])
    middle = sweep(job, pinned, range(1, 5)).front[-2]
    deadline = 1.1 * middle.step_seconds * 1e12 / (96 * 4096)
    asked = replace(job, training=job.training.model_copy(update={"tokens": 1e12, "deadline": deadline}))
    sure, unsure = (sweep(asked, pinned, range(1, 5), confidence=each) for each in (0.95, 0.05))
    fewest = [next(point for point in found.front if found.run(point).meets_deadline) for found in (sure, unsure)]
    for found, point in zip((sure, unsure), fewest, strict=True):
        alone = search_in_time(asked, pinned, "gpus", confidence=found.confidence)
        assert point.num_devices == alone.layout.world_size
        assert point.deadline_chance == pytest.approx(alone.run.deadline_chance)
        assert alone.run.meets_deadline
    assert fewest[0].num_devices > fewest[1].num_devices
    free = sweep(job, pinned, [4])
    assert [free.run(point).meets_deadline for point in free.front] == [None]
