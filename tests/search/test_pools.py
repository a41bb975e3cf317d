"""The search on mixed clusters compared with brute force over every layout and every placement of its stages."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple, get_args

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
    shrinks,
    step_seconds,
)
from test_search import SHARES, Priced, check_answer
from test_search import keys_of as of_one_cluster

from planner.cost.chance import memory_limit_bytes
from planner.cost.estimate import estimate
from planner.cost.prices import stage_bytes, stage_prices
from planner.cost.run import devices_in_use
from planner.cost.stage import stage_of
from planner.errors import InputError
from planner.layout import Layout, balanced_chunks
from planner.plan_parts import ObjectiveName
from planner.search.bounds.of_memory import may_fit
from planner.search.bounds.of_pools import PoolBounds, placed
from planner.search.objectives import Objective
from planner.search.optimum.pricing import price_candidates
from planner.search.search import NothingFits, search
from planner.search.space.constraints import Constraints
from planner.search.space.placements import most_layers_on, orders_of, placement_codes, placements_of, stage_counts
from planner.search.space.refusals import legal_degrees
from planner.search.space.rules import broken_rules
from planner.search.space.space import Space
from planner.specs.cluster import MixedClusterSpec
from planner.specs.job import join_pools
from planner.specs.load import load_job
from planner.specs.recompute import policy_code

OBJECTIVES = get_args(ObjectiveName)
NO_CONSTRAINTS = Constraints()
DEVICES = ("dgx-a100", "dgx-h100", "dgx1-v100")


@cache
def part(cluster, gpus, model, engine, batch, settings):
    return load_job(
        model=model,
        cluster=cluster,
        engine=engine,
        gpus=gpus,
        sequence_length=64,
        global_batch_size=batch,
        precision="fp16",
        settings=settings,
        headroom=0.0,
    )


def joined(*jobs, rate="1 GB/s"):
    link = jobs[0].cluster.links[-1].model_copy(update={"bandwidth": float(rate.split()[0]) * 1e9, "name": "between"})
    clusters = tuple(job.cluster.model_copy(update={"name": f"pool{i}"}) for i, job in enumerate(jobs))
    pools = tuple(replace(job, cluster=each, between=link) for job, each in zip(jobs, clusters, strict=True))
    return join_pools(MixedClusterSpec(name="mixed", pools=clusters, between=link), pools)


WINDOWS = ("model.sliding_window=4", "device.efficiency.attention=0.002")  # global layers take several times as long


def small_job(seed, *, num_pools=None, different=False, most_layers=5):
    """A random small mixed job: two or three pools of one to four devices, each pool with its own memory.

    In three of four jobs devices are slow compared with their links, and pools are small, so that several pools often
    win.
    """
    pick = random.Random(seed)
    num_pools = num_pools or pick.choice([2, 2, 3])
    model, engine = pick.choice(["tiny-gpt", "tiny-llama"]), pick.choice(["torch", "megatron"])
    engine = "megatron" if different else engine  # runs windows in a pipeline too
    layers, batch, long = pick.randint(2, most_layers), pick.choice([4, 6, 8, 8]), pick.random() < 3 / 4
    jobs = []
    for _ in range(num_pools):
        settings = (
            f"model.num_layers={layers}",
            *((*WINDOWS, f"model.global_every={2 + seed % 2}") if different else ()),
            f"device.memory={pick.choice([0.01, 0.02, 0.05] if long else [0.005, 0.01, 0.02, 0.05, 0.5])} GiB",
            "device.reserved_memory=1 MiB",
            "engine.memory.communicator_memory=1 B",
            f"device.efficiency.layer_floor={1 if long else pick.choice([1, 50])} us",
            f"device.peak.fp16={pick.choice([0.3, 0.4, 0.6]) if long else 100} TFLOP/s",
            *(["device.num_processors=1"] if long else []),  # small microbatches are no slower
            f"device.memory_bandwidth={pick.choice([1300, 2000, 4000])} GB/s",
            f"nvlink.bandwidth={pick.choice([0.1, 1, 300])} GB/s",
        )
        gpus = pick.choice([1, 1, 1, 2] if long else [1, 2, 3, 4])
        jobs.append(part(pick.choice(DEVICES), gpus, model, engine, batch, settings))
    return joined(*jobs, rate=pick.choice(["1 GB/s", "100 GB/s"] if long else ["0.1 GB/s", "1 GB/s", "100 GB/s"]))


def every_configuration(job):
    """All configurations without placement, by nested loops that are independent of the search."""
    n, batch, layers = job.cluster.num_devices, job.training.global_batch_size, job.model.num_layers
    whole = range(1, n + 1)
    context = whole if "cp" in job.engine.can.axes else [1]
    pipelines = [
        (p, v) for p in range(1, layers + 1) for v in range(1, layers // p + 1) if v < 3 or shrinks(p, v, layers)
    ]
    found = []
    for tp, (pp, v), dp, mbs, cp in itertools.product(whole, pipelines, whole, range(1, batch + 1), context):
        if tp * pp * dp * cp > n or batch % (dp * mbs):
            continue
        can = tp > 1 and job.training.sequence_length // cp % tp == 0
        replicas = [(z, h) for z in range(4) for h in range(1, dp + 1) if h == 1 or (z and dp % h == 0 and h < dp * cp)]
        for zero, hsdp in replicas:
            found.append({
                "tp": tp, "pp": pp, "dp": dp, "cp": cp, "mbs": mbs, "zero": zero, "hsdp": hsdp, "interleave": v,
                "sp": int(can), "schedule": "interleaved" if v > 1 else "1f1b",
            })  # fmt: skip
    return itertools.chain.from_iterable(obeying(job, alike) for alike in grouped(found).values())


def every_place(job, common):
    """All ways to assign pools to stages: each pool's stages are neighbours, and the pool has devices for them."""
    group = common["tp"] * common["dp"] * common["cp"]
    room = [
        pool.cluster.num_devices // group if pool.cluster.scale_up_devices % common["tp"] == 0 else 0
        for pool in job.pools
    ]
    for count in range(1, len(job.pools) + 1):
        for order in itertools.permutations(range(len(job.pools)), count):
            for stages in compositions(common["pp"], count, 1):
                if all(stages[i] <= room[pool] for i, pool in enumerate(order)):
                    yield tuple(pool for pool, number in zip(order, stages, strict=True) for _ in range(number))


def assignments(job, pp, v):
    splits = compositions(job.model.num_layers, pp, v) if job.engine.pipeline.uneven_stages else []
    splits = splits or [(job.model.num_layers // pp,) * pp]
    for split in splits:
        whole = {k % (v * job.model.global_every) for k in split} == {0} and len(set(split)) == 1
        if v > 1 and job.model.sliding_window and not whole:
            continue
        for chosen in itertools.product(policies_of(job, "none"), repeat=pp):
            if job.engine.pipeline.recompute_per_stage or len(set(chosen)) == 1:
                yield split, chosen


def borders(places, v):
    """For each stage, the number of neighbours in another pool; if stages interleave, the two ends are neighbours."""
    last = len(places) - 1
    for r, own in enumerate(places):
        before = places[r - 1] if r > 0 else places[last] if v > 1 else own
        after = places[r + 1] if r < last else places[0] if v > 1 else own
        yield int(before != own) + int(after != own)


class Placed(NamedTuple):
    """A layout of the brute force with the devices of each stage's pool, and its fullest share of a limit."""

    priced: Priced
    devices: dict[int, int]
    share: float

    @property
    def seconds(self):
        return self.priced.seconds


def ways_of(job, common):
    """Each way to choose pools, layers and policies of a configuration's stages, and the cell of each stage."""
    v = common["interleave"]
    for places in every_place(job, common):
        crossings, apart = list(borders(places, v)), places[0] != places[-1]
        for split, chosen in assignments(job, common["pp"], v):
            cells = [
                (r, k, policy_code(p), places[r], crossings[r], apart, sum(split[:r]))
                for r, (k, p) in enumerate(zip(split, chosen, strict=True))
            ]
            yield places, split, chosen, cells


def cell_prices(job, alike, cells):
    """(position of the configuration, cell of `ways_of`) -> what `step_seconds` reads, then the share of the limit.

    The cells are priced as arrays, and those that do not fit are left out.
    """
    found = {}
    for pool, own in enumerate(job.pools):
        here = [(c, cell) for c, cell in cells if cell[3] == pool]
        if not here:
            continue
        owner = np.array([c for c, _ in here])
        index, layers, policy, _, crossings, apart, first = (
            np.array(each) for each in zip(*(cell for _, cell in here), strict=True)
        )
        degrees = as_arrays(alike).take(owner)
        stage = stage_of(own, index=index, num_layers=layers, policy=policy, first=first, layout=degrees)
        stage = replace(stage, num_crossings=crossings, ends_apart=apart)
        prices = stage_prices(own, degrees, stage)
        share = stage_bytes(own, degrees, stage) / memory_limit_bytes(own, degrees)
        columns = (prices.microbatch_seconds, prices.tail_seconds, layers, prices.ends, share)
        columns = [np.broadcast_to(each, owner.shape).tolist() for each in columns]
        found.update((each, values) for each, *values in zip(here, *columns, strict=True) if values[-1] <= 1)
    return found


def every_layout(job):
    """Each layout by prices of single stages; None for a layout that does not fit."""
    names = [pool.cluster.name for pool in job.pools]
    for alike in grouped(every_configuration(job)).values():
        ways = [list(ways_of(job, common)) for common in alike]
        of_cell = cell_prices(
            job, alike, sorted({(c, cell) for c, own in enumerate(ways) for *_, cells in own for cell in cells})
        )
        for c, (common, own) in enumerate(zip(alike, ways, strict=True)):
            m, v = job.training.global_batch_size // (common["dp"] * common["mbs"]), common["interleave"]
            stages = [[of_cell.get((c, cell)) for cell in cells] for *_, cells in own]
            fitting = [(*way, each) for way, each in zip(own, stages, strict=True) if None not in each]
            yield from [None] * (len(own) - len(fitting))
            if not fitting:
                continue
            *prices, shares = np.moveaxis(np.array([each for *_, each in fitting]), -1, 0)
            steps, fullest = step_seconds(np.array(m), v, *prices).tolist(), shares.max(-1).tolist()
            for (places, split, chosen, *_), step, share in zip(fitting, steps, fullest, strict=True):
                devices = {pool: places.count(pool) * common["tp"] * common["dp"] * common["cp"] for pool in places}
                placed_at = {**common, "pools": tuple(names[pool] for pool in places)}
                keys = partial(keys_of, job, common, split, chosen, devices)
                yield Placed(Priced(step, keys, placed_at, split, chosen), devices, share)


def keys_of(job, common, split, chosen, devices):
    """The keys of a layout without classes of risk, computed independently of the search: machines of every pool."""
    machines = sum(math.ceil(count / job.pools[pool].cluster.devices_per_host) for pool, count in devices.items())
    return (machines, *of_one_cluster(job.pools[0], common, split, chosen, 0)[1:])


def brute_force(job):
    """The least step time of all layouts that fit, and how many layouts there are."""
    layouts = list(every_layout(job))
    return min((each.seconds for each in layouts if each), default=np.inf), len(layouts)


def with_prices(job, seed):
    """The job with a price for a device of each pool; the prices are equal to very different."""
    prices = random.Random(seed).choices([1.0, 1.0, 2.0, 3.5, 20.0], k=len(job.pools))
    clusters = [each.cluster.model_copy(update={"price": price}) for each, price in zip(job.pools, prices, strict=True)]
    pools = tuple(replace(each, cluster=cluster) for each, cluster in zip(job.pools, clusters, strict=True))
    return join_pools(job.cluster, pools), prices


def check_against_brute_force(seed, **options):
    """Check the fastest layout, the cheapest, the layout on fewest devices, and the layout with most free memory."""
    job, prices = with_prices(small_job(seed, **options), seed)
    layouts = [each for each in every_layout(job) if each]
    top = 3 * (seed % 4 == 0)  # without runners-up the search is cheaper, and drops all that is worse than the best
    found = {name: search(job, NO_CONSTRAINTS, objective=Objective(name=name), top=top) for name in OBJECTIVES}
    if not layouts:
        assert all(isinstance(each, NothingFits) for each in found.values())
        return 0
    fastest = min(each.seconds for each in layouts)
    assert found["throughput"].step_seconds == pytest.approx(fastest, rel=1e-9)
    usd = min(x.seconds * sum(prices[pool] * count for pool, count in x.devices.items()) for x in layouts)
    in_use = devices_in_use(job.cluster, found["cost"].layout)
    spent = sum(prices[int(pool.name[-1])] * count for pool, count in in_use)
    assert found["cost"].step_seconds * spent == pytest.approx(usd, rel=1e-9)
    fewest = min((sum(each.devices.values()), each.seconds) for each in layouts)
    assert (found["gpus"].layout.world_size, found["gpus"].step_seconds) == pytest.approx(fewest, rel=1e-9)
    least = min(each.share for each in layouts)
    share = max(stage.total_bytes / stage.limit_bytes for stage in found["memory"].memory)
    assert share == pytest.approx(least, rel=1e-6)
    fastest = min(each.seconds for each in layouts if each.share <= least * (1 + 1e-9))
    assert found["memory"].step_seconds <= fastest * (1 + 1e-9)
    for each in found.values():
        assert each.certificate.status == "optimal"
        assert each.fits
        assert not broken_rules(job, each.layout)
    return len(set(found["throughput"].layout.pools))


@pytest.mark.parametrize("seed", [0, 2, *long_forms(1, 5)])
def test_search_equals_brute_force_by_every_objective(seed):
    assert check_against_brute_force(seed) > 0


@pytest.mark.parametrize("seed", [15, *long_forms(7)])
def test_search_equals_brute_force_where_layers_differ(seed):
    assert check_against_brute_force(seed, different=True) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_search_equals_brute_force_on_many_jobs_whose_layers_differ(seed):
    check_against_brute_force(seed, different=True)


def list_against_brute_force(seed, job=None, **options):
    """Minimum, list of the recommendation and choice of a mixed job, against every layout and placement."""
    job = job or small_job(seed)
    return check_answer(job, [each.priced for each in every_layout(job) if each], SHARES[seed % 3], **options)


@pytest.mark.parametrize("seed", [2, *long_forms(0, 1, 5, 7)])
def test_the_recommendation_equals_brute_force(seed):
    assert list_against_brute_force(seed) != "nothing fits"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_recommendation_equals_brute_force_on_many_jobs():
    def check(seed):
        job = small_job(seed, num_pools=2 + (seed % 4 == 0), most_layers=4)
        return list_against_brute_force(seed, job, top=0)

    check_many(check)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(200))
def test_search_equals_brute_force_on_a_thousand_jobs(block):
    for seed in range(1000 + block * 5, 1005 + block * 5):
        check_against_brute_force(seed)


@pytest.mark.slow
def test_several_pools_are_best_in_a_quarter_of_the_random_jobs():
    """Otherwise the thousand jobs would hardly test mixed clusters."""
    found = [search(small_job(seed), NO_CONSTRAINTS) for seed in range(1000, 1200)]
    pools = [len(set(each.layout.pools)) for each in found if not isinstance(each, NothingFits)]
    assert sum(count > 1 for count in pools) >= len(found) / 4


@pytest.mark.parametrize("seed", [0, *long_forms(2)])
def test_brute_force_by_stages_is_brute_force_by_ledgers(seed):
    job = small_job(seed, num_pools=2)
    jobs = [replace(pool, cluster=pool.cluster.model_copy(update={"devices_per_host": 1})) for pool in job.pools]
    job = join_pools(job.cluster, tuple(jobs))
    best, count = np.inf, 0
    names = [pool.cluster.name for pool in job.pools]
    for common in every_configuration(job):
        v = common["interleave"]
        for places in every_place(job, common):
            for split, chosen in assignments(job, common["pp"], v):
                count += 1
                layout = Layout(
                    **common,
                    layers_per_stage=balanced_chunks(split, v),
                    recompute=chosen * v,
                    pools=tuple(names[pool] for pool in places),
                )
                priced = estimate(job, layout)
                best = min(best, priced.step_seconds if priced.fits else np.inf)
    fast = brute_force(job)
    assert fast[1] == count
    assert fast[0] == pytest.approx(best, rel=1e-12)


def every_placement(job, degrees):
    """The configurations with every placement, without any bound."""
    rows, stages = stage_counts(job, degrees)
    again, order = orders_of(stages)
    return replace(degrees.take(rows[again]), placement=placement_codes(job, order, stages[again])), rows[again]


@pytest.mark.parametrize("seed", [0, 2, 4, 5, 7, *long_forms(1, 3, 6)])
def test_bounds_stay_below_the_exact_optimum(seed):
    """Each bound alone: of partitions, of configurations without placement, and of placements at several cutoffs."""
    job, best = small_job(seed), np.inf
    for degrees in legal_degrees(Space(job)):
        everything, rows = every_placement(job, degrees)
        policies = Space(job).policies(everything)
        candidates = price_candidates(Space(job), everything, policies)
        exact = np.array([least_seconds(candidate) for candidate in candidates])
        of_degrees = np.full(len(degrees), np.inf)
        np.minimum.at(of_degrees, rows, exact)
        best, few = min(best, exact.min()), of_degrees * (1 + 1e-12)
        lower = PoolBounds(job, degrees)
        assert np.all(lower.partition_bound_seconds(degrees) <= few)
        assert np.all(lower.timing_bound_seconds(degrees) <= few)
        assert np.all(lower.timing_bound_seconds(degrees, any_experts=True) <= few)
        policies = Space(job).policies(degrees)
        assert np.all(may_fit(job, degrees, list(policies))[np.isfinite(of_degrees)])
        for cutoff in (np.inf, best, 1.3 * best):
            found, bounds = placed(Space(job), degrees, policies, np.full(len(degrees), cutoff))
            keys = zip(*(getattr(found, name).tolist() for name in _KEYS), strict=True)
            bound_of = dict(zip(keys, bounds.tolist(), strict=True))
            for key, seconds in zip(
                zip(*(getattr(everything, name).tolist() for name in _KEYS), strict=True), exact.tolist(), strict=True
            ):
                if np.isfinite(seconds) and seconds <= cutoff:
                    assert bound_of[key] <= seconds * (1 + 1e-12)
            narrow = price_candidates(
                Space(job),
                everything,
                Space(job).policies(everything),
                cutoff_seconds=cutoff,
            )
            for candidate, seconds in zip(narrow, exact.tolist(), strict=True):
                if np.isfinite(seconds) and seconds <= cutoff:
                    assert least_seconds(candidate) == pytest.approx(seconds, rel=1e-12)


_KEYS = ("tp", "pp", "dp", "cp", "zero", "hsdp", "mbs", "interleave", "recompute", "placement")


def test_placements_are_read_back_and_counted_once():
    job = small_job(1, num_pools=3)
    degrees = next(iter(legal_degrees(Space(job))))
    everything, rows = every_placement(job, degrees)
    place = placements_of(job, everything)
    for i in range(0, len(everything), max(1, len(everything) // 50)):
        stages = np.arange(everything.pp[i])
        pools = place.pool_of(np.full(len(stages), i), stages).tolist()
        one = degrees.take(int(rows[i]))
        assert tuple(pools) in set(every_place(job, {**one.numbers()}))
        assert place.last[i] == pools[-1]
    for row in range(len(degrees)):
        one = degrees.take(row)
        assert (rows == row).sum() == len(list(every_place(job, {**one.numbers()})))


@pytest.fixture(scope="module")
def job():
    a100, h100 = (
        load_job(
            model="llama3-8b",
            cluster=cluster,
            nodes=1,
            global_batch_size=64,
            sequence_length=4096,
            settings=(f"device.memory={memory}",),
        )
        for cluster, memory in (("dgx-a100", "40 GiB"), ("dgx-h100", "80 GiB"))
    )
    return joined(a100, h100, rate="25 GB/s")


@pytest.fixture(scope="module")
def best(job):
    return search(job, NO_CONSTRAINTS)


def test_the_faster_pool_takes_more_layers_and_the_proof_is_complete(best):
    layout = best.layout
    layers = {name: [] for name in ("pool0", "pool1")}
    for stage, pool in enumerate(layout.pools):
        layers[pool].append(layout.layers_of_stage(stage))
    assert min(layers["pool1"]) > max(layers["pool0"])  # pool1 is the H100s
    assert best.certificate.dynamic_program_seconds == pytest.approx(best.certificate.objective_seconds, rel=1e-9)


def test_a_mixed_cluster_is_faster_than_each_of_its_pools(job, best):
    for pool in job.pools:
        alone = search(replace(pool, between=None), NO_CONSTRAINTS)
        assert best.step_seconds < alone.step_seconds


def test_more_devices_in_a_pool_are_never_worse(job, best):
    more = replace(job.pools[0], cluster=job.pools[0].cluster.model_copy(update={"hosts": 2}))
    bigger = join_pools(job.cluster, (more, job.pools[1]))
    assert search(bigger, NO_CONSTRAINTS).step_seconds <= best.step_seconds * (1 + 1e-9)


def test_pools_of_a_uniform_cluster_are_no_better_than_the_cluster():
    """With whole hosts as pools, the uniform cluster can run everything that stages in pools can, at the same price."""
    whole = load_job(model="llama3-8b", cluster="dgx-a100", nodes=2, global_batch_size=32, sequence_length=2048)
    half = replace(whole, cluster=whole.cluster.model_copy(update={"hosts": 1}))
    link = whole.cluster.links[-1]
    found = search(joined(half, half, rate=f"{link.bandwidth / 1e9} GB/s"), Constraints.parse(["pp>=2"]))
    assert len(whole.pools) == 1
    assert found.step_seconds >= search(whole, NO_CONSTRAINTS).step_seconds * (1 - 1e-9)


def test_pins_on_pools_are_kept_and_never_help(job, best):
    found = search(job, Constraints.parse(["pools=pool1/pool0"]))
    assert found.layout.pools == ("pool1", "pool0")
    assert found.step_seconds >= best.step_seconds * (1 - 1e-9)
    with pytest.raises(InputError, match="there is no pool other; pools are pool0, pool1"):
        search(job, Constraints.parse(["pools=pool1/other"]))
    with pytest.raises(InputError, match="neighbours"):
        search(job, Constraints.parse(["pools=pool1/pool0/pool1"]))


@pytest.mark.parametrize("pins", ["interleave=2,recompute=none/full/none/full", "recompute=full/full"])
def test_pools_go_with_a_policy_for_each_chunk(job, pins):
    found = search(job, Constraints.parse(["pools=pool1/pool0", "pp=2", *pins.split(",")]))
    assert found.layout.pools == ("pool1", "pool0")
    assert "/".join(found.layout.recompute) == pins.partition("recompute=")[2]


@pytest.mark.parametrize("pin", ["layers_per_stage=16/16", "recompute=full/none"])
def test_what_a_pinned_list_says_and_is_forbidden_is_refused(job, pin):
    with pytest.raises(InputError, match="every legal layout is forbidden, by pp=2"):
        search(job, Constraints.parse([pin], ["pp=2"]))


def test_policies_for_other_stages_than_the_pools_say_are_refused(job):
    with pytest.raises(InputError, match="cannot be planned"):
        search(job, Constraints.parse(["pools=pool0/pool0/pool1/pool1", "recompute=none/full"]))


def test_the_deepest_model_on_six_pools_is_carried_and_a_deeper_one_refused(job):
    deepest = most_layers_on(6)
    assert deepest > 400
    for layers, allowed in ((deepest, True), (deepest + 1, False)):
        model = job.model.model_copy(update={"num_layers": layers})
        six = joined(*(replace(job.pools[0], model=model, between=None) for _ in range(6)))
        if allowed:
            order, stages = np.array([719]), np.full((1, 6), layers)
            degrees = next(iter(legal_degrees(Space(job)))).take(slice(0, 1))
            found = placements_of(six, replace(degrees, placement=placement_codes(six, order, stages)))
            assert found.stages.tolist() == stages.tolist()
            assert found.order.tolist() == [[5, 4, 3, 2, 1, 0]]
        else:
            with pytest.raises(InputError, match=f"up to {deepest} layers, not {layers}"):
                search(six, NO_CONSTRAINTS)


def test_equal_inputs_give_equal_plans(job, best):
    assert search(job, NO_CONSTRAINTS) == best


def test_nothing_fits_names_the_layout_that_comes_nearest(job):
    tiny = tuple(
        replace(
            pool,
            cluster=pool.cluster.model_copy(update={"device": pool.cluster.device.model_copy(update={"memory": 2e9})}),
        )
        for pool in job.pools
    )
    found = search(join_pools(job.cluster, tiny), NO_CONSTRAINTS)
    assert isinstance(found, NothingFits)
    assert len(found.layout.pools) == found.layout.pp


@pytest.mark.parametrize(("hosts", "per_host"), [(7, 8), (4, 6), (1, 7)])
def test_odd_numbers_of_hosts_and_devices_are_planned(hosts, per_host):
    """Uniform clusters whose sizes are no powers of two: devices may idle, and the plan states how many and why."""
    whole = load_job(model="llama3-8b", cluster="dgx-a100", nodes=hosts, global_batch_size=48, sequence_length=2048)
    job = replace(whole, cluster=whole.cluster.model_copy(update={"devices_per_host": per_host}))
    found = search(job, NO_CONSTRAINTS)
    assert found.layout.world_size <= hosts * per_host
    assert bool(found.idle_reason) == (found.layout.world_size < hosts * per_host)
    assert not broken_rules(job, found.layout)


def test_a_host_with_a_dead_device_is_a_pool_of_its_own():
    whole = load_job(model="llama3-8b", cluster="dgx-a100", nodes=3, global_batch_size=48, sequence_length=2048)
    broken = replace(whole, cluster=whole.cluster.model_copy(update={"hosts": 1, "devices_per_host": 7}))
    found = search(joined(whole, broken, rate="25 GB/s"), NO_CONSTRAINTS)
    fewer = search(whole, NO_CONSTRAINTS)
    assert found.step_seconds <= fewer.step_seconds * (1 + 1e-9)
    assert bool(found.idle_reason) == (found.layout.world_size < 31)
