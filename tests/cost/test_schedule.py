"""The closed forms of the pipeline against an event simulation that executes the schedules operation by operation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.schedule import bubble_seconds, in_flight_microbatches, pipeline_seconds


def operations(schedule, pp, stage, m, v):
    """The order in which a stage runs its forward ("F") and backward ("B") passes, as (kind, microbatch, chunk)."""
    forward = [(k, i) for g in range(0, m, pp) for k in range(v) for i in range(g, min(g + pp, m))]
    backward = [(v - 1 - k, i) for k, i in forward]
    if schedule == "gpipe":
        warmup = m
    elif schedule == "1f1b":
        warmup = min(m, pp - stage - 1)
    else:  # interleaved, as Megatron-LM and torch warm up
        warmup = min(m * v, 2 * (pp - stage - 1) + (v - 1) * pp)
    order = [("F", i, k) for k, i in forward[:warmup]]
    rest = forward[warmup:]
    for (kf, i), (kb, j) in zip(rest, backward, strict=False):
        order += [("F", i, kf), ("B", j, kb)]
    return order + [("B", j, kb) for kb, j in backward[len(rest) :]]


def simulate(schedule, forward_seconds, m, v=1):
    """Run the schedule; a backward pass takes twice its forward pass. Returns the end, and the peak in flight."""
    pp = len(forward_seconds)
    orders = [operations(schedule, pp, r, m, v) for r in range(pp)]
    done, clock, position = {}, [0.0] * pp, [0] * pp
    held, peak = [0] * pp, [0] * pp
    last = pp * v - 1
    while any(position[r] < len(orders[r]) for r in range(pp)):
        progressed = False
        for r in range(pp):
            if position[r] == len(orders[r]):
                continue
            kind, i, k = orders[r][position[r]]
            chunk = k * pp + r
            if kind == "F":
                needs = None if chunk == 0 else ("F", i, chunk - 1)
            else:
                needs = ("F", i, chunk) if chunk == last else ("B", i, chunk + 1)
            if needs is not None and needs not in done:
                continue
            seconds = forward_seconds[r] / v * (1 if kind == "F" else 2)
            clock[r] = max(clock[r], done.get(needs, 0.0)) + seconds
            done[kind, i, chunk] = clock[r]
            held[r] += 1 if kind == "F" else -1
            peak[r] = max(peak[r], held[r])
            position[r] += 1
            progressed = True
        assert progressed, "the schedule deadlocks"
    return max(clock), peak


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 10))
def test_equal_stages_take_the_simulated_time(schedule, pp, m, t):
    end, _ = simulate(schedule, [t] * pp, m)
    assert pipeline_seconds(m, np.full(pp, 3 * t), 1) == pytest.approx(end, rel=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=5), st.integers(1, 10))
def test_unequal_stages_take_the_simulated_time(stages, m):
    end, _ = simulate("gpipe", stages, m)
    assert pipeline_seconds(m, 3 * np.array(stages), 1) == pytest.approx(end, rel=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=5), st.integers(1, 4))
def test_unequal_stages_under_1f1b_never_take_longer_than_the_closed_form(stages, rounds):
    m = rounds * len(stages)
    end, _ = simulate("1f1b", stages, m)
    closed = pipeline_seconds(m, 3 * np.array(stages), 1)
    assert end <= closed * (1 + 1e-9)
    assert end >= closed - 3 * (sum(stages) - max(stages))  # a slow early stage fills at most its own wait
    slowest_last = sorted(stages)
    end, _ = simulate("1f1b", slowest_last, m)
    assert end == pytest.approx(pipeline_seconds(m, 3 * np.array(slowest_last), 1), rel=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4), st.floats(0.1, 10))
def test_interleaved_stages_take_the_simulated_time(pp, v, rounds, t):
    m = pp * rounds
    end, _ = simulate("interleaved", [t] * pp, m, v)
    assert pipeline_seconds(m, np.full(pp, 3 * t), v) == pytest.approx(end, rel=1e-9)


@pytest.mark.parametrize(("pp", "m", "v"), [(4, 8, 1), (8, 32, 1), (4, 8, 2), (8, 16, 4)])
def test_bubble_share_of_the_textbook(pp, m, v):
    bubble = bubble_seconds(pp * 1.0, 1.0, v)
    assert bubble / m == pytest.approx((pp - 1) / (v * m))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12))
def test_microbatches_in_flight_are_the_simulated_ones(schedule, pp, m):
    _, peak = simulate(schedule, [1.0] * pp, m)
    for r in range(pp):
        assert in_flight_microbatches(schedule, pp, r, m, 1) == peak[r]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4))
def test_interleaved_microbatches_in_flight_are_the_simulated_ones(pp, v, rounds):
    m = pp * rounds
    _, peak = simulate("interleaved", [1.0] * pp, m, v)
    for r in range(pp):
        assert in_flight_microbatches("interleaved", pp, r, m, v) * v == pytest.approx(peak[r])


def test_gpipe_and_1f1b_differ_in_memory_only():
    gpipe, one = simulate("gpipe", [1.0] * 4, 16), simulate("1f1b", [1.0] * 4, 16)
    assert gpipe[0] == one[0]
    assert max(gpipe[1]) == 16
    assert max(one[1]) == 4


def test_naive_model_parallelism_holds_one_microbatch():
    assert in_flight_microbatches("naive", 4, 0, 8, 1) == 1


def test_an_unknown_schedule_is_not_priced_silently():
    with pytest.raises(ValueError, match="not priced"):
        in_flight_microbatches("zbv", 4, 0, 8, 2)
