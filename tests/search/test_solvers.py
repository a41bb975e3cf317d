"""Every method compared with brute force: all choices of small random instances, priced by an independent formula."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from enumeration import all_alike, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.stage import Pattern
from planner.search.least_memory import least_maximum
from planner.search.optimum import certificate, dynamic_program
from planner.search.optimum.candidate import Candidate, Choice, dominated
from planner.search.optimum.certificate import solve
from planner.search.optimum.integer_program import Answer, SolverName, solve_program
from planner.search.optimum.pruning import greedy_choice, incumbent, lower_bounds, prune
from planner.search.space.arrays import TIE

RANDOMS = st.randoms(use_true_random=False)


def make_candidate(rng: random.Random, *, max_stages: int = 4, max_layers: int = 7) -> Candidate:
    """A small candidate with gaps in its columns; half of the candidates have prices on a coarse grid, so choices tie.

    In half of the candidates layers differ: they follow a pattern of one to five states, each with its own prices.
    """
    num_stages = rng.randint(1, max_stages)
    num_layers = rng.randint(max(1, num_stages - 1), max_layers)  # too few layers for the stages: no choice
    coarse, grid = rng.random() < 0.5, rng.choice([1.0, 0.1])  # on the finer grid equal sums round differently

    def price(most: float) -> float:
        return grid * rng.randint(0, 4) if coarse else rng.uniform(0, most)

    density, power, noise = rng.choice([0.4, 0.8, 1.0]), rng.choice([1, 2]), rng.choice([0.0, 0.0, 1.0])
    alike = rng.random() < 0.3  # all stages cost the same: permutations tie
    offsets, slopes = ([price(3.0) for _ in range(1 if alike else num_stages)] for _ in range(2))
    leading, period = rng.choice([(0, 1), (0, 1), (0, 2), (0, 3), (1, 1), (2, 1), (1, 2), (2, 3)])
    dearer = [price(2.0) for _ in range(leading + period)]  # what a layer costs more in each state
    loads = [rng.randint(1, 5) for _ in range(leading + period)]
    states = [state_of(position, leading, period) for position in range(num_layers + leading + period)]
    rows = [
        (
            stage,
            start,
            layers,
            sum(loads[states[each]] for each in range(start, start + layers)),
            policy,
            offsets[stage % len(offsets)]
            + slopes[stage % len(slopes)] * layers**power
            + sum(dearer[states[each]] for each in range(start, start + layers) if leading + period > 1)
            + noise * price(3.0),
            price(2.0),
        )
        for stage in range(num_stages)
        for layers in range(rng.randint(0, 1), num_layers + 1)
        for start in range(leading + period if stage else 1)
        for policy in range(rng.randint(1, 2))
        if rng.random() < density
    ]
    stage, start, layers, load, policy, seconds, tail = zip(*rows, strict=True) if rows else ((),) * 7
    chunks, waits = rng.choice([1, 1, 2]), rng.choice([0.0, 0.0, 1.0])
    return Candidate(
        name="small",
        num_layers=num_layers,
        num_stages=num_stages,
        steady_count=rng.choice([0.0, 0.5, 1.0, 7.0]) if coarse else rng.uniform(0, rng.choice([1.0, 3.0, 30.0])),
        constant_seconds=0.1 + price(5.0),  # a step takes some time
        pattern=Pattern(leading=leading, period=period),
        total_load=sum(loads[states[each]] for each in range(num_layers)),
        stage=np.array(stage, dtype=np.int64),
        start=np.array(start, dtype=np.int64),
        layers=np.array(layers, dtype=np.int64),
        last=np.array(layers, dtype=np.int64),
        load=np.array(load, dtype=np.int64),
        policy=np.array(policy, dtype=np.int64),
        seconds=np.array(seconds, dtype=np.float64),
        pass_seconds=np.array([each / chunks + (chunks - 1) * price(0.5) for each in seconds], dtype=np.float64),
        slack_seconds=np.array([waits * (each / 2 + price(1.0)) for each in seconds], dtype=np.float64),
        tail_seconds=np.array(tail, dtype=np.float64),
    )


def make_candidates(rng: random.Random, most: int = 4) -> list[Candidate]:
    candidates = [make_candidate(rng, max_stages=3, max_layers=5) for _ in range(rng.randint(1, most))]
    return candidates + [rng.choice(candidates)] * rng.randint(0, 1)  # sometimes one twice: candidates tie


def all_choices(candidate: Candidate, index: int = 0) -> list[Choice]:
    start, layers, seconds, passes, slack, tail = (
        array.tolist()
        for array in (
            candidate.start,
            candidate.layers,
            candidate.seconds,
            candidate.pass_seconds,
            candidate.slack_seconds,
            candidate.tail_seconds,
        )
    )
    ways: list[tuple[tuple[int, ...], int]] = [((), 0)]  # to fill the stages so far, and layers that they hold
    for stage in range(candidate.num_stages):
        here = np.flatnonzero(candidate.stage == stage).tolist()
        ways = [
            ((*columns, column), held + layers[column])
            for columns, held in ways
            for column in here
            if start[column] == state_of(held, candidate.pattern.leading, candidate.pattern.period)
            and held + layers[column] <= candidate.num_layers
        ]
    found = []
    for columns, held in ways:
        if held == candidate.num_layers:
            last_chunk = slack[columns[-1]]
            bottleneck = max(seconds[column] + max(0.0, last_chunk - slack[column]) for column in columns)
            step = candidate.constant_seconds + candidate.steady_count * bottleneck
            step += math.fsum(passes[column] for column in columns) + max(tail[column] for column in columns)
            found.append(Choice(candidate=index, columns=columns, objective_seconds=step))
    return found


def brute_force(candidates: list[Candidate]) -> list[Choice]:
    """All choices of all candidates."""
    return [choice for index, each in enumerate(candidates) for choice in all_choices(each, index)]


def best_seconds(choices: list[Choice]) -> float:
    return min((choice.objective_seconds for choice in choices), default=math.inf)


def layers_of(candidates: list[Candidate], choice: Choice) -> tuple[int, ...]:
    return tuple(candidates[choice.candidate].layers[list(choice.columns)].tolist())


def by_dynamic_program(candidates: list[Candidate]) -> Choice | None:
    """The best choice of all candidates; of equal step times the smallest number of a candidate wins."""
    found = [(dynamic_program.best_choice(each), index) for index, each in enumerate(candidates)]
    choices = [replace(choice, candidate=index) for choice, index in found if choice]
    limit = best_seconds(choices) * (1 + TIE)
    return next((choice for choice in choices if choice.objective_seconds <= limit), None)


def check_dynamic_program(rng: random.Random) -> None:
    candidates = make_candidates(rng)
    choices = brute_force(candidates)
    best = by_dynamic_program(candidates)
    if not choices:
        assert best is None
        return
    assert best is not None
    assert candidates[best.candidate].is_choice(best.columns)
    seconds = best_seconds(choices)
    assert best.objective_seconds == pytest.approx(seconds, rel=2 * TIE)
    tied = [choice for choice in choices if choice.objective_seconds <= seconds * (1 + TIE / 2)]
    first = min(tied, key=lambda choice: (choice.candidate, layers_of(candidates, choice)))
    assert (best.candidate, layers_of(candidates, best)) == (first.candidate, layers_of(candidates, first))


def check_bounds(rng: random.Random) -> None:
    candidates = make_candidates(rng)
    bounds = lower_bounds(candidates)
    for index, candidate in enumerate(candidates):
        choices = all_choices(candidate, index)
        through = np.full(candidate.num_columns, np.inf)  # least step time of the choices that use a column
        for choice in choices:
            through[list(choice.columns)] = np.minimum(through[list(choice.columns)], choice.objective_seconds)
        assert bounds.candidate[index] <= best_seconds(choices) * (1 + 1e-12)
        assert np.all(bounds.columns[index] <= through * (1 + 1e-12))
        for choice in choices:
            columns = list(choice.columns)
            assert bounds.bottleneck[index] <= candidate.seconds[columns].max()  # and the bottleneck is no shorter
            assert bounds.tail[index] <= candidate.tail_seconds[columns].max()


def check_pruning(rng: random.Random) -> None:
    candidates = make_candidates(rng)
    best = best_seconds(brute_force(candidates))
    for upper_bound in (best, best * 1.05, math.inf):
        masks = prune(candidates, upper_bound)
        kept = [candidate.keep(mask) for candidate, mask in zip(candidates, masks, strict=True)]
        assert best_seconds(brute_force(kept)) == best
    if best < math.inf:
        nothing = prune(candidates, best * 0.5 - 1e-3)
        assert best_seconds(brute_force([c.keep(m) for c, m in zip(candidates, nothing, strict=True)])) >= best


def check_integer_program(rng: random.Random, solvers: tuple[SolverName, ...]) -> None:
    candidates = make_candidates(rng)
    best = best_seconds(brute_force(candidates))
    for solver in solvers:
        upper_bound = rng.choice([None, best if best < math.inf else None])
        answer = solve_program(candidates, upper_bound=upper_bound, solver=solver)
        assert (answer.choice is None) == (best == math.inf)
        assert answer.status == ("infeasible" if best == math.inf else "optimal")
        if answer.choice is not None:
            assert candidates[answer.choice.candidate].is_choice(answer.choice.columns)
            assert answer.choice.objective_seconds == pytest.approx(best, rel=1e-9)
            assert answer.bound_seconds == pytest.approx(best, rel=1e-9)


def check_whole(rng: random.Random) -> None:
    candidates = make_candidates(rng, most=6)
    best = best_seconds(brute_force(candidates))
    solution = solve(candidates)
    assert solution.objective_seconds == pytest.approx(best, rel=1e-12)
    assert solution.status == ("infeasible" if best == math.inf else "optimal")
    assert (solution.gap, solution.solver, solution.warnings) == (0.0, "cbc", ())


@given(rng=RANDOMS)
@settings(max_examples=75, deadline=None)
def test_dynamic_program_finds_the_first_best_choice(rng: random.Random) -> None:
    check_dynamic_program(rng)


@given(rng=RANDOMS)
@settings(max_examples=50, deadline=None)
def test_the_least_maximum_is_that_of_all_choices(rng: random.Random) -> None:
    candidate = make_candidate(rng)
    values = np.array([rng.random() for _ in range(candidate.num_columns)])
    maxima = [values[list(choice.columns)].max() for choice in all_choices(candidate)]
    assert least_maximum(candidate, values) == min(maxima, default=math.inf)


def simple(seconds: list[list[float]], num_layers: int, steady_count: float) -> Candidate:
    """Stages that hold 1, 2, ... layers in the given seconds, without tails."""
    stage = np.repeat(np.arange(len(seconds)), [len(times) for times in seconds])
    return Candidate(
        name="simple",
        num_layers=num_layers,
        num_stages=len(seconds),
        steady_count=steady_count,
        constant_seconds=1.0,
        stage=stage,
        **all_alike(np.concatenate([np.arange(1, len(times) + 1) for times in seconds]), num_layers),
        policy=np.zeros(len(stage), dtype=np.int64),
        seconds=np.concatenate([np.asarray(times) for times in seconds]),
        pass_seconds=np.concatenate([np.asarray(times) for times in seconds]),
        slack_seconds=np.zeros(len(stage)),
        tail_seconds=np.zeros(len(stage)),
    )


def check_exactly(candidate: Candidate) -> None:
    best, choices = dynamic_program.best_choice(candidate), all_choices(candidate)
    tied = [choice for choice in choices if choice.objective_seconds <= best_seconds(choices) * (1 + TIE / 2)]
    assert best is not None
    assert layers_of([candidate], best) == min(layers_of([candidate], choice) for choice in tied)


@pytest.mark.parametrize("steady_count", np.linspace(0.0, 3.0, 31))
def test_a_slower_stage_may_buy_a_smaller_sum(steady_count: float) -> None:
    """The optimal bottleneck is strictly between the least bottleneck and that of the least sum, and it moves."""
    check_exactly(simple([[layers**2 for layers in range(1, 16)], [12.0 * k for k in range(1, 16)]], 16, steady_count))


@pytest.mark.parametrize(("num_stages", "num_layers"), [(3, 5), (3, 6), (4, 9), (4, 11), (5, 12)])
def test_sums_that_differ_by_rounding_tie(num_stages: int, num_layers: int) -> None:
    times = [0.1 * layers + 0.3 for layers in range(1, 5)]
    check_exactly(simple([times] * num_stages, num_layers, 0.0))


@given(rng=RANDOMS)
@settings(max_examples=75, deadline=None)
def test_bounds_are_never_above_what_they_bound(rng: random.Random) -> None:
    check_bounds(rng)


@pytest.mark.parametrize("steady_count", [0.0, 1.0])
def test_stages_that_cannot_hold_the_load_have_no_choice(steady_count: float) -> None:
    """The number of layers would fit; with one microbatch nothing waits for the slowest stage, which takes forever."""
    possible = simple([[1.0, 2.0], [1.0, 2.0]], 4, steady_count)
    short = replace(possible, total_load=possible.total_load + 1)
    bounds = lower_bounds([possible, short])
    assert np.isfinite(bounds.candidate[0])
    assert bounds.candidate[1] == math.inf
    assert np.all(bounds.columns[1] == math.inf)
    assert not prune([possible, short], math.inf)[1].any()


@given(rng=RANDOMS)
@settings(max_examples=75, deadline=None)
def test_pruning_keeps_the_optimum(rng: random.Random) -> None:
    check_pruning(rng)


@pytest.mark.parametrize("part", range(2))
def test_integer_program_with_cbc_equals_brute_force(part: int) -> None:
    for seed in range(30 * part, 30 * (part + 1)):
        check_integer_program(random.Random(seed), ("cbc",))


def test_integer_program_with_highs_equals_brute_force() -> None:
    for seed in range(8):
        check_integer_program(random.Random(seed), ("highs",))


@pytest.mark.parametrize("part", range(2))
def test_whole_solve_equals_brute_force(part: int) -> None:
    for seed in range(20 * part, 20 * (part + 1)):
        check_whole(random.Random(1000 + seed))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100))
def test_ten_thousand_instances(part: int) -> None:
    for seed in range(100 * part, 100 * (part + 1)):
        for check in (check_dynamic_program, check_bounds, check_pruning, check_whole):
            check(random.Random(seed))
        check_integer_program(random.Random(seed), ("cbc", "highs") if seed % 50 == 0 else ("cbc",))


@given(rng=RANDOMS)
@settings(max_examples=50, deadline=None)
def test_dominated_columns_are_needed_by_no_optimum_and_the_rest_are_better_in_something(rng: random.Random) -> None:
    candidate = make_candidate(rng)
    kept = candidate.keep(~dominated(candidate))
    assert best_seconds(all_choices(kept)) == best_seconds(all_choices(candidate))
    for stage, start, layers in {*zip(kept.stage.tolist(), kept.start.tolist(), kept.layers.tolist(), strict=True)}:
        here = (kept.stage == stage) & (kept.start == start) & (kept.layers == layers)
        slack = kept.slack_seconds[here] * (1 if stage == kept.num_stages - 1 else -1)
        prices = [*zip(kept.seconds[here], kept.pass_seconds[here], kept.tail_seconds[here], slack, strict=True)]
        for one, other in itertools.permutations(prices, 2):
            assert any(mine < theirs for mine, theirs in zip(one, other, strict=True))


@given(rng=RANDOMS)
@settings(max_examples=50, deadline=None)
def test_greedy_choice_is_a_choice(rng: random.Random) -> None:
    candidates = make_candidates(rng)
    for index, candidate in enumerate(candidates):
        choice = greedy_choice(candidate, index)
        if choice is not None:
            assert candidate.is_choice(choice.columns)
            assert choice.objective_seconds >= best_seconds(all_choices(candidate)) * (1 - 1e-12)
    found = incumbent(candidates, lower_bounds(candidates).candidate)
    greedy = [greedy_choice(candidate) for candidate in candidates]
    assert (found is None) == (greedy == [None] * len(greedy))


def pipeline(num_layers: int, num_stages: int, num_microbatches: int, seed: int) -> Candidate:
    """A candidate of realistic size: the first stages must recompute, and the last stage computes the loss."""
    rng = np.random.default_rng(seed)
    even = num_layers / num_stages
    base = rng.uniform(0, 0.3, num_stages) + np.where(np.arange(num_stages) == num_stages - 1, 1.5, 0.0)
    rows = [
        (stage, layers, policy, 0.01 * (base[stage] + layers * slower), 0.01 + 0.003 * layers)
        for stage in range(num_stages)
        for layers in range(1, min(int(2 * even) + 2, num_layers))
        for policy, (slower, fits) in enumerate([(1.0, 0.75 + 0.5 * stage / num_stages), (1.04, 1.2), (1.33, 4.0)])
        if layers <= even * fits
    ]
    columns = np.array(rows)
    return Candidate(
        name=f"{num_layers} layers on {num_stages} stages",
        num_layers=num_layers,
        num_stages=num_stages,
        steady_count=num_microbatches - 1.0,
        constant_seconds=0.01,
        stage=columns[:, 0].astype(np.int64),
        **all_alike(columns[:, 1], num_layers),
        policy=columns[:, 2].astype(np.int64),
        seconds=columns[:, 3],
        pass_seconds=columns[:, 3],
        slack_seconds=np.zeros(len(columns)),
        tail_seconds=columns[:, 4],
    )


@pytest.mark.parametrize(("num_layers", "num_stages"), [(96, 8), (96, 16), (128, 64)])
def test_methods_agree_at_real_sizes_with_and_without_an_upper_bound(num_layers: int, num_stages: int) -> None:
    candidates = [pipeline(num_layers, num_stages, 2 * num_stages, seed) for seed in range(3)]
    certificate = by_dynamic_program(candidates)
    assert certificate is not None
    for upper_bound in (None, certificate.objective_seconds * 1.02):
        answer = solve_program(candidates, upper_bound=upper_bound)
        assert answer.choice is not None
        assert answer.choice.objective_seconds == pytest.approx(certificate.objective_seconds, rel=1e-9)


def test_equal_inputs_give_equal_answers_and_ties_go_to_the_first() -> None:
    flat = pipeline(10, 4, 8, seed=1)
    flat = flat.keep(flat.policy == 2)
    same = {"seconds": flat.layers * 1.0, "pass_seconds": flat.layers * 1.0, "tail_seconds": flat.layers * 0.0}
    candidate = Candidate(**{name: same.get(name, getattr(flat, name)) for name in Candidate.__dataclass_fields__})
    choice = by_dynamic_program([candidate, candidate])
    assert choice is not None
    assert (choice.candidate, layers_of([candidate], choice)) == (0, (1, 3, 3, 3))
    for solver in ("cbc", "highs"):
        assert solve([candidate, candidate], solver=solver).objective_seconds == pytest.approx(choice.objective_seconds)


def test_no_candidates_and_empty_candidates_are_infeasible() -> None:
    empty = pipeline(8, 2, 4, seed=0).keep(np.zeros(pipeline(8, 2, 4, seed=0).num_columns, dtype=np.bool_))
    for candidates in ([], [empty]):
        solution = solve(candidates)
        assert (solution.status, solution.choice, solution.objective_seconds) == ("infeasible", None, math.inf)


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_no_choice_although_fractions_would_do(solver: SolverName) -> None:
    """Three stages of one or three layers hold an odd number of layers; six layers are infeasible only in integers."""
    whole = simple([[1.0, 2.0, 3.0]] * 3, 6, 1.0)
    odd = whole.keep(whole.layers != 2)
    assert prune([odd], math.inf)[0].all()  # no bound sees it
    solution = solve([odd], solver=solver)
    assert (solution.status, solution.solver, solution.warnings) == ("infeasible", solver, ())


def test_a_wrong_answer_of_the_integer_program_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = pipeline(16, 4, 8, seed=2)
    best = dynamic_program.best_choice(candidate)
    assert best is not None
    worse = Choice(candidate=0, columns=best.columns, objective_seconds=best.objective_seconds * 2)
    answer = Answer(choice=worse, status="optimal", bound_seconds=worse.objective_seconds, num_columns=1)
    monkeypatch.setattr(certificate, "solve_program", lambda *_args, **_options: answer)
    with pytest.raises(AssertionError, match="greedy assignment takes"):
        solve([candidate])
