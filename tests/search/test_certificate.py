"""Each of the two methods notices a mistake of the other: each is broken here, and `search` must report it."""

from __future__ import annotations

import ast
import json
import random
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from enumeration import long_forms

from planner.cli import main
from planner.layout_text import parse_layout
from planner.search import best_first, bound_check, layout_check, near
from planner.search.bounds import of_layers, of_memory, of_pools, of_steps
from planner.search.near import Bounded, Near
from planner.search.objectives import THROUGHPUT, BestKinds, Objective
from planner.search.optimum import certificate, integer_program, pricing
from planner.search.optimum.candidate import Disagreement
from planner.search.optimum.dynamic_program import best_choice
from planner.search.optimum.pruning import LowerBounds
from planner.search.reporter import Reporter
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.search.space.space import Space
from planner.specs.load import load_job

OBJECTIVES = [
    THROUGHPUT,
    pytest.param(Objective(name="cost"), marks=pytest.mark.slow),
    Objective(name="gpus"),
    pytest.param(Objective(name="memory"), marks=pytest.mark.slow),
]
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


@pytest.fixture(params=JOBS, scope="module")
def job(request, tmp_path_factory):
    """A job whose optimum has a pipeline, so that splits and recompute are decided."""
    pools = tmp_path_factory.mktemp("clusters") / "pools.yaml"
    pools.write_text(POOLS, encoding="utf-8")
    given = JOBS[request.param]
    cluster = str(pools) if given["cluster"] == "POOLS" else given["cluster"]
    return load_job(**given | {"cluster": cluster}, sequence_length=2048, global_batch_size=16)


def best_of(job, objective=THROUGHPUT):
    return search(job, Constraints(), objective=objective)


@pytest.fixture(scope="module")
def honest_plan(job):
    """`honest_plan(objective)`, the plan of `job` that a search finds which nobody has broken; searched once for each.

    Ask for it before anything is broken.
    """
    return cache(lambda objective=THROUGHPUT: best_of(job, objective))


def seconds_of(candidate):
    """The optimum of one candidate; infinite if it has none."""
    choice = best_choice(candidate)
    return choice.objective_seconds if choice else np.inf


def is_best(plan, candidate):
    """Whether a candidate reaches the optimum that the plan's certificate states; several candidates may tie."""
    return seconds_of(candidate) <= plan.certificate.objective_seconds * (1 + 1e-9)


def without_best(candidates):
    """The candidates without those that reach the least optimum."""
    optima = [seconds_of(each) for each in candidates]
    return [each for each, seconds in zip(candidates, optima, strict=True) if seconds > min(optima) * (1 + 1e-9)]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: each.name)
def test_a_dynamic_program_that_misses_the_optimum(monkeypatch, job, honest_plan, objective):
    plan, honest = honest_plan(objective), best_first.best_choice

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


def test_an_integer_program_that_drops_columns_of_the_optimum(monkeypatch, job, honest_plan):
    plan, honest = honest_plan(), integer_program.columns_within

    def drops(candidates, _upper_bound):
        kept = honest(candidates, np.inf)
        return {index: columns for index, columns in kept.items() if not is_best(plan, candidates[index])}

    monkeypatch.setattr(integer_program, "columns_within", drops)
    with pytest.raises(Disagreement):
        best_of(job)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: each.name)
def test_a_prune_that_drops_the_winner(monkeypatch, job, honest_plan, objective):
    plan, honest = honest_plan(objective), best_first.prune

    def drops(candidates, upper_bound):
        masks = honest(candidates, upper_bound)
        return [mask & (not is_best(plan, each)) for each, mask in zip(candidates, masks, strict=True)]

    monkeypatch.setattr(best_first, "prune", drops)
    with pytest.raises(Disagreement):
        best_of(job, objective)


@pytest.mark.parametrize("name", ["even_split_seconds", "greedy_choice"])
def test_first_assignments_that_are_priced_too_low(monkeypatch, job, name):
    """First assignments set the cutoff, so a price that is too low could rule out the optimum."""
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


def test_columns_that_one_method_left_out_are_priced_for_the_other(monkeypatch, job, honest_plan):
    """The methods share prices but not cutoffs: here an earlier request priced only columns within half of the time."""
    plan, honest = honest_plan(), best_first._Search._price_part

    def after_low_cutoff(search, near, part):
        if len(part):
            assert near.candidates(part, near.seconds[part] * 0.5)
        return honest(search, near, part)

    monkeypatch.setattr(best_first._Search, "_price_part", after_low_cutoff)
    assert best_of(job).certificate == plan.certificate


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_a_candidate_that_is_known_is_the_one_that_is_priced(job, share):
    """Candidates priced before and after for other longest steps equal those of configurations not yet priced."""
    priced = best_first.best_first(Space(job, Constraints()), BestKinds(THROUGHPUT, 4, within=0.1), Reporter()).near
    positions = np.arange(len(priced))
    longest = priced.seconds * share
    fresh = Near(Space(job, Constraints()), blocks_of(priced))
    for steps in (longest * 1.2, longest, longest * 1.5):
        found, expected = by_position(priced, positions, steps), by_position(fresh, positions, steps)
        assert list(found) == list(expected)
        for position, candidate in expected.items():
            for field in fields(candidate):
                np.testing.assert_array_equal(getattr(found[position], field.name), getattr(candidate, field.name))
        fresh = Near(Space(job, Constraints()), blocks_of(priced))


def blocks_of(near):
    """The configurations of `near`, each as one block."""
    return [
        Bounded(degrees=near.one(position).at_once(), seconds=near.seconds[[position]]) for position in range(len(near))
    ]


def by_position(near, positions, longest):
    return dict(zip(positions.tolist(), near.candidates(positions, longest), strict=True))


def test_what_both_decided_on_is_all_that_the_bounds_leave(honest_plan):
    """The counts of the certificate add up, and both methods had candidates to decide among."""
    plan = honest_plan()
    found = plan.certificate
    assert found.status == "optimal"
    assert found.dynamic_program_seconds == found.objective_seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert 0 < found.num_decided <= found.num_legal - found.num_pruned["memory"]


HIGH = {
    "step": (of_pools, "lower_bound_seconds", 1.03),
    "memory": (of_memory, "least_stage_bytes", 1.03),
    "columns": (bound_check, "lower_bounds", 1.03),
    "layers": (of_layers, "step_seconds", 1.5),  # a bound before memory is looked at, further from the optimum
}


@pytest.fixture(scope="module")
def small_pipeline():
    """A job for which the check confirms the unchanged bounds."""
    job = load_job(**JOBS["pipeline"], sequence_length=2048, global_batch_size=16)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layout_check, "check_layouts", lambda *_: 0)  # it has tests of its own
        assert search(job, Constraints(), check=True).certificate.num_bounds_checked == bound_check.NUM_CHECKED
    return job


@pytest.mark.parametrize("name", HIGH)
def test_bounds_that_are_too_high_are_noticed_by_the_check(monkeypatch, small_pipeline, name):
    """Both methods share the bounds: the check notices a wrong bound, or a layout that was tried beats the optimum."""
    module, function, factor = HIGH[name]
    honest = getattr(module, function)

    def high(*given, **named):
        found = honest(*given, **named)
        if isinstance(found, LowerBounds):
            columns = tuple(each * factor for each in found.columns)
            return replace(found, candidate=found.candidate * factor, columns=columns)
        return found * factor

    monkeypatch.setattr(module, function, high)
    with pytest.raises(Disagreement, match=r"bound|a layout was tried"):
        search(small_pipeline, Constraints(), check=True)


def test_stages_that_hold_a_layer_less_by_the_bound_are_noticed_by_the_check(monkeypatch, small_pipeline):
    """The bound of a configuration whose stages could not hold all layers then is infinite."""
    honest = of_steps.capacities_of_stages

    def low(*given):
        found = honest(*given)
        return replace(found, layers=np.maximum(found.layers - 1, found.layers > 0))

    monkeypatch.setattr(of_steps, "capacities_of_stages", low)
    with pytest.raises(Disagreement, match="its bound is infinite"):
        search(small_pipeline, Constraints(), check=True)


def without(name):
    """The integer program without one kind of constraint."""
    return {name: lambda *_: None}


def scaled(factor):
    """The integer program with other coefficients of the pass seconds."""
    honest = integer_program.JointProgram._step_time

    def terms(program, c):
        w, slowest, tail, *passes = honest(program, c)
        return [w, slowest, tail, *((variable, factor * seconds) for variable, seconds in passes)]

    return {"_step_time": terms}


WRONG_PROGRAMS = {
    "no layers": without("_place_every_layer"),
    "no slowest stage": without("_wait_for_the_slowest_stage"),
    "no longest tail": without("_wait_for_the_longest_tail"),
    "no candidate": without("_choose_one_candidate"),
    "half the passes": scaled(0.5),
    "passes twice": scaled(2.0),
}


@pytest.fixture(scope="module")
def asked_check():
    """`asked_check(count)` checks the bounds of an honest search, whose programs are right, as `search` asks for it."""
    settings = {"model": "megatron-22b", "cluster": "dgx-a100", "gpus": 4, "engine": "torch"}
    job = load_job(**settings, settings=("model.num_layers=12",), sequence_length=2048, global_batch_size=16)
    asked, honest = [], bound_check.check_bounds

    def keep(*given, **named):
        asked.append(partial(honest, *given, **named))
        return 0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bound_check, "check_bounds", keep)
        patched.setattr(layout_check, "check_layouts", lambda *_: 0)  # it has tests of its own
        search(job, Constraints.parse(["pp>=2"]), check=True)
    (check,) = asked
    assert check(count=6) == 6
    return check


@pytest.mark.parametrize("name", WRONG_PROGRAMS)
def test_wrong_programs_are_noticed_by_the_check(monkeypatch, asked_check, name):
    """In the search itself bounds often leave one choice; without them, a wrong program chooses or says another."""
    for method, wrong in WRONG_PROGRAMS[name].items():
        monkeypatch.setattr(integer_program.JointProgram, method, wrong)
    with pytest.raises(Disagreement):
        asked_check(count=12)


def test_a_partition_that_the_search_forgets_is_noticed_by_drawn_layouts(monkeypatch, small_pipeline):
    """Both methods read the same list of partitions; layouts drawn by the rules of `explain` do not."""
    best, honest = search(small_pipeline, Constraints()), Space.partitions
    used = (best.layout.tp, best.layout.pp)

    def forgets(*given):
        found = honest(*given)
        return found.take((found.tp != used[0]) | (found.pp != used[1]))

    monkeypatch.setattr(Space, "partitions", forgets)
    other = search(small_pipeline, Constraints())
    assert other.certificate.status == "optimal"
    assert other.step_seconds > best.step_seconds * 1.0001
    monkeypatch.setattr(bound_check, "check_bounds", lambda *_, **__: 0)
    with pytest.raises(Disagreement, match="drawn by the rules of"):
        search(small_pipeline, Constraints(), check=True)


def small_with_ends(engine="megatron", mtp_layers=1):
    return load_job(
        model="deepseek-v2-lite",
        cluster="hgx-h800",
        gpus=4,
        engine=engine,
        sequence_length=4096,
        global_batch_size=16,
        settings=(f"model.mtp_layers={mtp_layers}", "model.num_layers=9"),
    )


FORGOTTEN = {
    "prediction beside the loss only": (Space, "replicas", lambda x: x.take(x.mtp_before == 0)),
    "no policy for each stage of one device": (Space, "zero", lambda x: x.take(x.tp > 1)),
    "no last chunk without a layer": (pricing, "_last_chunks", lambda x: (x[0][x[1] > 0], x[1][x[1] > 0])),
}


@pytest.mark.parametrize("name", ["prediction beside the loss only", *long_forms(*[*FORGOTTEN][1:])])
def test_an_end_that_the_search_forgets_is_noticed_by_drawn_layouts(monkeypatch, name):
    (where, function, forget), job = FORGOTTEN[name], small_with_ends()
    pins, honest = Constraints.parse(["pp>=2,ep=1"]), getattr(where, function)
    best = search(job, pins)
    monkeypatch.setattr(where, function, lambda *given, **named: forget(honest(*given, **named)))
    other = search(job, pins)
    assert other.step_seconds > best.step_seconds * 1.0001
    monkeypatch.setattr(bound_check, "check_bounds", lambda *_, **__: 0)
    with pytest.raises(Disagreement, match="drawn by the rules of"):
        search(job, pins, check=True)


SHORT = {
    "pp": slice(0, 3),
    "ep": slice(0, 1),
    "tp": slice(0, 1),
    "zero": slice(0, 1),
    "interleave": slice(1, None),
    "dp": slice(1, None),
    "mbs": slice(1, 2),
}
"""Key -> the part of its values that a search offers by mistake."""


@pytest.fixture(scope="module")
def job_with_experts():
    """A job for which the drawn layouts confirm the unchanged search."""
    job = load_job(**JOBS["experts"], sequence_length=2048, global_batch_size=16)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bound_check, "check_bounds", lambda *_, **__: 0)
        assert search(job, Constraints(), check=True).certificate.num_layouts_drawn > 50
    return job


@pytest.mark.parametrize("key", ["pp", "ep", *long_forms(*[*SHORT][1:])])
def test_a_value_that_no_configuration_has_is_noticed_whatever_it_costs(monkeypatch, job_with_experts, key):
    """The layouts without the value may be worse or may not fit; the search has to try them all the same."""
    honest = Space._cross

    def short(space, degrees, name, options):
        return honest(space, degrees, name, list(options)[SHORT[key]] if name == key else options)

    monkeypatch.setattr(bound_check, "check_bounds", lambda *_, **__: 0)
    monkeypatch.setattr(Space, "_cross", short)
    with pytest.raises(Disagreement, match="the search does not try it"):
        search(job_with_experts, Constraints(), check=True)


def test_drawn_layouts_have_ends_apart_and_several_policies():
    """The oracle is the meaning of the lists; each of the three kinds is drawn often."""
    ends = parse_layout("tp=1,pp=2,dp=2,mbs=2,interleave=2", num_layers=9, num_devices=4)
    pick, job, by_stage = np.random.default_rng(3), small_with_ends(), small_with_ends("torch", 0)
    drawn = [layout_check._drawn(job, ends, pick, keeps_most=number % 2 > 0) for number in range(200)]
    found = [each for each in drawn if each]
    assert sum(0 in each.layers_per_stage for each in found) > 5
    assert sum(bool(each.mtp) for each in found) > 5
    assert all(sum(each.layers_per_stage) == 9 for each in found)
    drawn = [layout_check._drawn(by_stage, ends, pick, keeps_most=True) for _ in range(200)]
    assert sum(len(set(each.recompute)) > 1 for each in drawn if each) > 5


def test_layouts_without_all_dense_layers_in_the_first_chunk_are_not_drawn():
    """The rule `leading_layers` says that the search leaves them out; chunks of three layers hold all of them."""
    job = load_job(
        model="deepseek-v3", cluster="gb200-nvl72", gpus=64, engine="megatron", sequence_length=4096,
        global_batch_size=512, settings=("model.num_layers=8",),
    )  # fmt: skip
    searched = {}
    for split in ("3/2/2/1", "4*2"):
        keys = f"pp=2,dp=32,ep=32,zero=1,interleave=2,layers_per_stage={split}"
        layout = parse_layout(keys, num_layers=8, num_devices=64)
        searched[split] = layout_check._is_searched(Space(job, Constraints()), layout)
    assert searched == {"3/2/2/1": True, "4*2": False}


def test_a_minimum_that_no_rule_allows_is_noticed(monkeypatch, small_pipeline):
    monkeypatch.setattr(layout_check, "broken_rules", lambda *_, **__: ("no chunk may be empty",))
    monkeypatch.setattr(bound_check, "check_bounds", lambda *_, **__: 0)
    with pytest.raises(Disagreement, match="cannot run: no chunk may be empty"):
        search(small_pipeline, Constraints(), check=True)


@pytest.mark.parametrize("factor", [1.1, 1.5])
def test_arrays_that_price_the_best_too_high_are_noticed(monkeypatch, small_pipeline, factor):
    """Another layout seems best, and its ledger is right; only the ledger of the best layout can tell."""
    best, honest = search(small_pipeline, Constraints()).layout, near.price_candidates

    def dear(space, degrees, *given, **named):
        own = (degrees.tp == best.tp) & (degrees.pp == best.pp)
        found = zip(honest(space, degrees, *given, **named), own, strict=True)
        return [each.weighted(factor, each.longest_seconds) if is_own else each for each, is_own in found]

    monkeypatch.setattr(near, "price_candidates", dear)
    with pytest.raises(Disagreement):
        search(small_pipeline, Constraints(), check=True)


@pytest.mark.parametrize("seed", [0, *long_forms(*range(1, 20))])
def test_no_drawn_layout_of_an_honest_search_is_better(seed):
    pick = random.Random(seed)
    documents = {"model": pick.choice(["llama3-8b", "qwen3-30b-a3b"]), "cluster": "dgx-h100", "nodes": 1}
    job = load_job(
        **documents,
        engine=pick.choice(["megatron", "torch", "torchtitan", "deepspeed"]),
        sequence_length=2048,
        global_batch_size=pick.choice([24, 32]),
        settings=(f"model.num_layers={pick.choice([6, 8, 12])}",),
    )
    assert search(job, Constraints(), check=True).certificate.num_layouts_drawn > 50


def test_the_check_draws_the_same_configurations_by_the_same_seed(monkeypatch, small_pipeline):
    drawn = []
    monkeypatch.setattr(bound_check, "_check", lambda *given: drawn.append(str(given[-1])))
    monkeypatch.setattr(layout_check, "check_layouts", lambda *_: 0)
    for _ in range(2):
        search(small_pipeline, Constraints(), check=True)
    half = len(drawn) // 2
    assert drawn[:half] == drawn[half:]
    assert len(set(drawn[:half])) == half == bound_check.NUM_CHECKED


BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench.py"


def jobs_of_the_bench():
    """Arguments of `planner plan` that `make bench` times; read from its source, because the bench imports torch."""
    tree = ast.parse(BENCH.read_text(encoding="utf-8"))
    value = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    targets = next(node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "TARGETS")
    known = {}
    for name, node in (*((name, value[name]) for name in ("BIG", "START", "ON_2048")), ("targets", targets)):
        known[name] = eval(compile(ast.Expression(node), str(BENCH), "eval"), known)
    found = [each[0] for each in known["targets"]]
    return [arguments for arguments in found if arguments.startswith("plan ")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arguments", jobs_of_the_bench())
def test_bounds_are_below_the_optima_that_the_check_finds(arguments, monkeypatch, capsys):
    monkeypatch.chdir(BENCH.parents[1])
    assert main([*arguments.split(), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["certificate"]["num_bounds_checked"] == bound_check.NUM_CHECKED
