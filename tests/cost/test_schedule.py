"""The closed forms of the pipeline, compared with the execution of the schedules and with the textbook."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.activations import held_of_stage
from planner.cost.compute import PassSeconds
from planner.cost.pass_order import operations
from planner.cost.schedule import (
    bubble_of,
    bubble_seconds,
    chunk_terms,
    exists,
    held_microbatches,
    in_flight_microbatches,
    interleaved_bubble_seconds,
    round_size,
    staleness_steps,
    step_seconds,
    weight_versions,
)
from planner.cost.simulate import simulate
from planner.cost.stage import Stage
from planner.layout import balanced_chunks


def exact_pipeline_seconds(*args, **options) -> float:
    return simulate(*args, **options).seconds


SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
V_SHAPED = ("zbv", "dualpipev")
PASSES = ("forward", "backward_input", "backward_weight")
seconds = st.floats(0.1, 2.0)


def chunks_of(stages, interleave):
    """The chunks of stages that are cut into equal chunks; in V-shaped schedules all stages must be equal."""
    return PassSeconds(**{name: np.tile(np.asarray(each) / interleave, interleave) for name, each in stages.items()})


def run(schedule, stages, m, interleave=1):
    return simulate(schedule, chunks_of(stages, interleave), m, interleave=interleave)


@st.composite
def exact_shapes(draw):
    """Shapes for which the closed forms promise the executed time."""
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(1, 6))
    least = {"zb-h1": pp, "zbv": 2 * pp - 1, "dualpipev": 2 * pp}.get(schedule, 1)
    interleave = draw(st.integers(1, 4)) if schedule == "interleaved" else 2 if schedule in V_SHAPED else 1
    m = pp * draw(st.integers(1, 3)) if schedule == "interleaved" else draw(st.integers(least, 3 * pp + 4))
    times = draw(st.tuples(seconds, seconds, seconds))
    forward, backward_input, backward_weight = (
        (sorted(times)[1], max(times), min(times)) if schedule in V_SHAPED else times
    )
    stages = {
        "forward": np.full(pp, forward),
        "backward_input": np.full(pp, backward_input),
        "backward_weight": np.full(pp, backward_weight),
    }
    return schedule, pp, m, interleave, stages


@given(exact_shapes())
def test_equal_stages_take_the_executed_time(shape):
    schedule, _, m, interleave, stages = shape
    bubble = bubble_of(schedule, PassSeconds(**stages), num_microbatches=m, interleave=interleave)
    end = run(schedule, stages, m, interleave).seconds
    assert m * sum(stages.values())[0] + bubble == pytest.approx(end, rel=1e-9)


@given(exact_shapes())
def test_microbatches_in_flight_are_the_executed_ones(shape):
    schedule, pp, m, interleave, stages = shape
    closed = in_flight_microbatches(schedule, pp, np.arange(pp), m, interleave)
    assert np.broadcast_to(closed, pp) == pytest.approx(run(schedule, stages, m, interleave).peak_in_flight)


@pytest.mark.parametrize("schedule", [*(s for s in SCHEDULES if s != "dualpipev"), "pipedream"])
def test_microbatches_in_flight_are_the_executed_ones_of_every_shape(schedule):
    for pp in range(1, 6):
        for m in range(1, 15):
            interleave = 3 if schedule == "interleaved" else 2 if schedule in V_SHAPED else 1
            if schedule == "interleaved" and m % round_size(pp, m):
                continue
            executed = run(schedule, dict.fromkeys(PASSES, np.ones(pp)), m, interleave).peak_in_flight
            closed = in_flight_microbatches(schedule, pp, np.arange(pp), m, interleave)
            assert np.broadcast_to(closed, pp) == pytest.approx(executed), (pp, m)


def some_stages(draw, pp):
    return {name: np.array(draw(st.lists(seconds, min_size=pp, max_size=pp))) for name in PASSES}


@given(st.data(), st.integers(1, 5), st.integers(1, 10))
def test_naive_is_the_sum_and_gpipe_is_exact_for_stages_that_differ_by_a_factor(data, pp, m):
    stages = some_stages(data.draw, pp)
    slowest, total = np.max(sum(stages.values())), np.sum(sum(stages.values()))
    assert m * slowest + bubble_of("naive", PassSeconds(**stages), num_microbatches=m) == pytest.approx(m * total)
    assert run("naive", stages, m).seconds == pytest.approx(m * total)
    closed = m * slowest + bubble_of("gpipe", PassSeconds(**stages), num_microbatches=m)
    assert closed <= run("gpipe", stages, m).seconds * (1 + 1e-9)
    alike = {name: stages["forward"] * factor for name, factor in zip(PASSES, (1.0, 0.7, 1.3), strict=True)}
    closed = m * np.max(sum(alike.values())) + bubble_of("gpipe", PassSeconds(**alike), num_microbatches=m)
    assert closed == pytest.approx(run("gpipe", alike, m).seconds, rel=1e-9)


def executed_moments(schedule, pp, m, interleave):
    """Every (waiting for I, waiting for W) of each stage, in units of a stage; the end of I moves a microbatch."""
    for stage in range(pp):
        before = waiting = 0
        seen = set()
        for op in operations(schedule, pp, stage, m, interleave):
            before += {"F": 1, "B": -1, "I": -1}.get(op.kind, 0)
            waiting += {"I": 1, "W": -1}.get(op.kind, 0)
            seen.add((before / interleave, waiting / interleave))
        yield seen


@pytest.mark.parametrize("schedule", [*SCHEDULES, "pipedream"])
@pytest.mark.parametrize("whole", [1.0, 1.5, 10.0])
def test_what_a_stage_holds_while_gradients_of_weights_wait(schedule, whole):
    """A microbatch before its I weighs 1; a microbatch that waits for its W weighs `whole`, as with recompute."""
    interleave = 3 if schedule == "interleaved" else 2 if schedule in V_SHAPED else 1
    for pp in range(1, 6):
        for m in range(1, 15):
            if not exists(schedule, pp, m, interleave):
                continue
            moments = held_microbatches(schedule, pp, np.arange(pp), m, interleave)
            closed = np.max([np.broadcast_to(before + whole * waiting, pp) for before, waiting in moments], axis=0)
            executed = [
                max(before + whole * waiting for before, waiting in seen)
                for seen in executed_moments(schedule, pp, m, interleave)
            ]
            if schedule == "zbv" and m < 2 * pp - 1:
                assert np.all(closed >= np.array(executed) - 1e-12)
            else:
                assert closed == pytest.approx(executed), (pp, m)


@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=5), st.integers(1, 4))
def test_unequal_stages_under_1f1b_never_take_longer_than_the_closed_form(stages, rounds):
    m = rounds * len(stages)

    def both(forward):
        passes = dict.fromkeys(PASSES, np.array(forward))
        return run("1f1b", passes, m).seconds, step_seconds(m, 1, 3 * max(forward), 3 * sum(forward))

    end, closed = both(stages)
    assert end <= closed * (1 + 1e-9)
    assert end * (1 + 1e-9) >= closed - 3 * (sum(stages) - max(stages))  # a slow early stage fills at most its own wait
    end, closed = both(sorted(stages))
    assert end == pytest.approx(closed, rel=1e-9)


@given(st.data(), st.sampled_from(["1f1b", "interleaved", "zb-h1"]), st.integers(2, 5), st.integers(1, 4))
def test_no_step_is_shorter_than_its_slowest_stage_or_than_one_microbatch(data, schedule, pp, rounds):
    interleave = 2 if schedule == "interleaved" else 1
    stages = some_stages(data.draw, pp)
    end = run(schedule, stages, rounds * pp, interleave).seconds
    through = sum(stages["forward"] + stages["backward_input"]) + stages["backward_weight"][0]
    assert end >= max(rounds * pp * np.max(sum(stages.values())), through) * (1 - 1e-12)


def test_stages_broadcast_over_layouts():
    rng = np.random.default_rng(0)
    many = {name: np.sort(rng.uniform(0.1, 2.0, (7, 4))) for name in PASSES}
    m = np.arange(8, 15)
    for schedule in (*SCHEDULES, "pipedream"):
        together = bubble_of(schedule, PassSeconds(**many), num_microbatches=m, interleave=2)
        alone = [
            bubble_of(schedule, PassSeconds(**{k: x[n] for k, x in many.items()}), num_microbatches=m[n], interleave=2)
            for n in range(7)
        ]
        assert together == pytest.approx(alone)


@pytest.mark.parametrize("weight_slower", [0.5, 1.0])
def test_a_split_backward_pass_makes_the_bubble_smaller(weight_slower):
    stages = dict(zip(PASSES, (np.ones(4), np.ones(4), weight_slower * np.ones(4)), strict=True))
    one, h1, v, dual = (
        float(bubble_of(schedule, PassSeconds(**stages), num_microbatches=16))
        for schedule in ("1f1b", "zb-h1", "zbv", "dualpipev")
    )
    assert v < dual < one
    assert v < h1 < one


# --- the textbook -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "m", "v"), [(4, 8, 1), (8, 32, 1), (4, 8, 2), (8, 16, 4)])
def test_bubble_share_of_the_textbook(pp, m, v):
    bubble = bubble_seconds(pp * 1.0, 1.0, v)
    assert bubble / m == pytest.approx((pp - 1) / (v * m))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), [(4, 8), (8, 32), (2, 1)])
def test_utilisation_of_the_textbook(schedule, pp, m):
    timeline = run(schedule, dict.fromkeys(PASSES, np.ones(pp)), m)
    assert timeline.busy_seconds / timeline.seconds == pytest.approx(np.full(pp, m / (m + pp - 1)))


def test_naive_model_parallelism_leaves_all_but_one_stage_idle():
    timeline = run("naive", dict.fromkeys(PASSES, np.ones(4)), 8)
    assert (timeline.seconds - timeline.busy_seconds) / timeline.seconds == pytest.approx(np.full(4, 3 / 4))
    assert in_flight_microbatches("naive", 4, 0, 8, 1) == 1


@pytest.mark.parametrize(("pp", "m"), [(4, 12), (8, 16)])
def test_zero_bubble_has_a_third_of_the_bubble_where_its_passes_take_equal_times(pp, m):
    """(p - 1) / (3 m) of the work of zb-h1, against (p - 1) / m (Qi et al., 2023)."""
    equal = dict.fromkeys(PASSES, np.ones(pp))
    assert bubble_of("zb-h1", PassSeconds(**equal), num_microbatches=m) / (3 * m) == pytest.approx((pp - 1) / (3 * m))
    assert run("zb-h1", equal, m).seconds == 3 * m + pp - 1


def test_gpipe_and_1f1b_differ_in_memory_only():
    gpipe, one = (run(schedule, dict.fromkeys(PASSES, np.ones(4)), 16) for schedule in ("gpipe", "1f1b"))
    assert gpipe.seconds == one.seconds
    assert gpipe.peak_in_flight.tolist() == [16] * 4
    assert one.peak_in_flight.tolist() == [4, 3, 2, 1]


def test_first_stage_of_an_interleaved_pipeline_holds_what_korthikanti_says():
    """p (1 + (p - 1) / (p v)) microbatches."""
    assert in_flight_microbatches("interleaved", 8, 0, 64, 3) == pytest.approx(8 * (1 + 7 / 24))


@given(st.integers(1, 6), st.integers(1, 12))
def test_staleness_of_pipedream_is_the_executed_one(pp, m):
    timeline = run("pipedream", dict.fromkeys(PASSES, np.ones(pp)), m)
    stages, found = np.arange(pp), []
    for stage in stages:
        updates, begun, late = 0, {}, 0
        for kind, microbatch in zip(timeline.kind, timeline.microbatch + m * (timeline.stage != stage), strict=True):
            if microbatch < m and kind == "F":
                begun[microbatch] = updates
            elif microbatch < m:
                late, updates = max(late, updates - begun[microbatch]), updates + 1
        found.append(late)
    assert staleness_steps("pipedream", pp, stages, m).tolist() == found
    assert weight_versions("pipedream", pp, stages, m).tolist() == timeline.peak_in_flight.tolist()
    assert not np.any(staleness_steps("1f1b", pp, stages, m))


def test_pipedream_pays_no_bubble():
    assert bubble_of("pipedream", PassSeconds(**dict.fromkeys(PASSES, np.ones(4))), num_microbatches=8) == 0


def test_one_number_is_enough_for_the_ledger():
    chunk = PassSeconds(**dict.fromkeys(PASSES, np.ones(4)))
    assert exact_pipeline_seconds("1f1b", chunk, 8) == 3 * (8 + 3)


def test_an_unknown_schedule_is_not_priced_silently():
    with pytest.raises(ValueError, match="not priced"):
        in_flight_microbatches("breadth-first", 4, 0, 8, 2)
    with pytest.raises(ValueError, match="not priced"):
        bubble_of("breadth-first", PassSeconds(**dict.fromkeys(PASSES, np.ones(4))), num_microbatches=8)


# --- interleaved stages whose chunks differ -------------------------------------------------------------------


def uneven_stages(seed):
    """Interleaved stages with chunks that differ by a layer, some recomputed, and a head; times in units of a layer."""
    pick = random.Random(seed)
    pp, v, rounds = pick.choice([2, 3, 4, 6, 8, 12]), pick.choice([2, 3, 4, 6]), pick.choice([1, 1, 2, 4, 8])
    largest, spread = pick.randint(1, 6), pick.choice([1, v, 2 * v])
    layers = np.array([pick.randint(max(v, v * largest - spread), v * largest) for _ in range(pp)])
    layer = np.array([pick.choice([1, 1, 4 / 3]) for _ in range(pp)])
    return pp, v, pp * rounds, layers, layer, pick.choice([0, 0.3, 0.7, 1.5, 2.5])


def error_of_uneven_stages(seed):
    """How much longer the closed form is than the executed schedule, as a share."""
    pp, v, m, layers, layer, head = uneven_stages(seed)
    chunks = np.array(balanced_chunks(tuple(layers.tolist()), v), dtype=float)
    forward, backward = chunks / 3, (chunks.reshape(v, pp) * (layer - 1 / 3)).ravel()
    forward[-1] += head / 3
    backward[-1] += head * 2 / 3
    passes = PassSeconds(forward=forward, backward_input=backward / 2, backward_weight=backward / 2)
    is_last = np.arange(pp) == pp - 1
    stage = layers * layer + head * is_last
    fill, slack = chunk_terms(
        stage_seconds=stage,
        layer_seconds=layer,
        num_layers=layers,
        largest_chunk=-(-layers // v),
        last_chunk=layers // v,
        end_seconds=head * is_last,
        is_last=is_last,
        pp=pp,
        num_microbatches=m,
        interleave=v,
    )
    form = m * np.max(stage) + interleaved_bubble_seconds(stage, fill, slack, m, v)
    return form / exact_pipeline_seconds("interleaved", passes, m, interleave=v) - 1


def test_chunks_that_differ_take_about_the_executed_time():
    errors = np.array([error_of_uneven_stages(seed) for seed in range(120)])
    assert errors.min() > -0.10
    assert errors.max() < 0.21
    assert np.quantile(errors, 0.05) > -0.03
    assert np.quantile(errors, 0.95) < 0.10
    assert abs(np.median(errors)) < 0.02


@pytest.mark.slow
def test_chunks_that_differ_take_about_the_executed_time_in_many_shapes():
    errors = np.array([error_of_uneven_stages(seed) for seed in range(6000)])
    assert errors.min() > -0.10
    assert errors.max() < 0.21


@pytest.mark.parametrize("seed", range(24))
def test_a_stage_whose_chunks_differ_holds_no_more_than_it_is_said_to(seed):
    pp, v, m, layers, _, _ = uneven_stages(seed)
    chunks = np.array(balanced_chunks(tuple(layers.tolist()), v), dtype=float)
    ones = np.ones(len(chunks))
    run = simulate("interleaved", PassSeconds(forward=ones, backward_input=ones, backward_weight=ones), m, interleave=v)
    degrees = SimpleNamespace(schedule="interleaved", pp=pp, interleave=v)
    job = SimpleNamespace(training=SimpleNamespace(expert_overlap=False), model=SimpleNamespace(mtp_layers=0))
    stage = Stage(index=np.arange(pp), num_layers=layers, policy=0, largest_chunk=-(-layers // v))
    ((held, waiting),) = held_of_stage(job, degrees, stage, m)
    said, held = (held + waiting) * layers, run.peak_held(chunks)
    assert np.all(held <= said * (1 + 1e-12))
    assert np.all(said <= held * v * -(-layers // v) / layers * (1 + 1e-12))


@pytest.mark.parametrize(("pp", "largest"), [(8, 2), (16, 2), (16, 3), (16, 5)])
def test_a_round_waits_where_its_chunks_become_smaller(pp, largest):
    """Equal stages of a larger and a smaller chunk; without this wait, the closed form is too short."""
    m, is_last = 8 * pp, np.arange(pp) == pp - 1
    chunks = np.repeat([largest, largest - 1], pp) / 3
    layers = np.full(pp, 2 * largest - 1)
    fill, slack = chunk_terms(
        stage_seconds=layers * 1.0,
        layer_seconds=1.0,
        num_layers=layers,
        largest_chunk=largest,
        last_chunk=layers // 2,
        end_seconds=0.0,
        is_last=is_last,
        pp=pp,
        num_microbatches=m,
        interleave=2,
    )
    form = m * layers[0] + interleaved_bubble_seconds(layers * 1.0, fill, slack, m, 2)
    passes = PassSeconds(forward=chunks, backward_input=chunks, backward_weight=chunks)
    assert form == pytest.approx(exact_pipeline_seconds("interleaved", passes, m, interleave=2), rel=0.06)
    assert form >= exact_pipeline_seconds("interleaved", passes, m, interleave=2)


@given(st.integers(2, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_interleaved_bubbles_of_many_layouts_are_those_of_each(pp, interleave, seed):
    generator = np.random.default_rng(seed)
    stage, fill, slack = generator.uniform(0.1, 2.0, (3, 4, pp))
    many = interleaved_bubble_seconds(stage, fill, slack, np.array([4, 8, 12, 16]), interleave)
    each = [interleaved_bubble_seconds(stage[i], fill[i], slack[i], 4 * (i + 1), interleave) for i in range(4)]
    assert many == pytest.approx(each)
