"""The simulation compared with the definition of an earliest start, with torch's orders, and with the papers."""

from __future__ import annotations

import itertools
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.compute import PassSeconds
from planner.cost.pass_order import Operation, operations
from planner.cost.simulate import _peaks, simulate
from planner.layout import stage_of_chunk


def exact_pipeline_seconds(*args, **options) -> float:
    return simulate(*args, **options).seconds


def in_flight_of_chunk(timeline):
    return _peaks(timeline._changes(1.0), timeline.chunk)


SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "pipedream")
TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def uniform(chunks, forward=1.0, backward_input=1.0, backward_weight=1.0):
    """Chunks that all take the same time."""
    return PassSeconds(
        forward=np.full(chunks, forward),
        backward_input=np.full(chunks, backward_input),
        backward_weight=np.full(chunks, backward_weight),
    )


@st.composite
def shapes(draw, schedules=SCHEDULES):
    """A valid combination of schedule, stages, microbatches and chunks of a stage."""
    schedule = draw(st.sampled_from(schedules))
    pp = draw(st.integers(1, 5))
    m = draw(st.integers(2 * pp if schedule == "dualpipev" else 1, 14))
    interleave = draw(st.integers(1, 3)) if schedule == "interleaved" else 2 if schedule in ("zbv", "dualpipev") else 1
    if interleave > 1 and schedule == "interleaved":
        m -= m % max(1, m // pp)  # equal rounds
    return schedule, pp, m, interleave


@st.composite
def runs(draw):
    """A timeline of unequal chunks and sends, with all its inputs."""
    schedule, pp, m, interleave = draw(shapes())
    chunks = pp * interleave
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    passes = ("forward", "backward_input", "backward_weight")
    seconds = PassSeconds(**{name: rng.uniform(0.1, 2.0, chunks) for name in passes})
    sends = rng.uniform(0.0, 0.5, chunks - 1) * rng.integers(0, 2)
    share = draw(st.sampled_from([1.0, 0.7]))
    timeline = simulate(schedule, seconds, m, interleave=interleave, send_seconds=sends, overlapped_share=share)
    return timeline, seconds, sends, share, m


def table(timeline):
    """Each operation's (start, end) by (kind, microbatch, chunk); a whole backward pass is listed as I and as W."""
    found = {}
    columns = (timeline.kind, timeline.microbatch, timeline.chunk, timeline.start, timeline.end)
    for kind, i, j, start, end in zip(*(column.tolist() for column in columns), strict=True):
        for each in {"B": "IW"}.get(kind, kind):
            assert (each, i, j) not in found, "twice"
            found[each, i, j] = (start, end)
    return found


@given(runs())
def test_every_pass_runs_once_on_its_own_stage(run):
    timeline, seconds, _, _, m = run
    chunks = len(seconds.forward)
    assert set(table(timeline)) == set(itertools.product("FIW", range(m), range(chunks)))
    assert np.array_equal(timeline.stage, stage_of_chunk(timeline.schedule, timeline.pp, timeline.chunk))
    assert Counter(timeline.stage.tolist()) == {
        r: len(operations(timeline.schedule, timeline.pp, r, m, timeline.interleave)) for r in range(timeline.pp)
    }


def needed(kind, i, j, last, sends, passes, crosses):
    """The time at which the input of a pass has arrived, from the times of the other passes."""
    if kind == "F":
        return passes["F", i, j - 1][1] + sends[j - 1] * crosses[j - 1] if j else 0.0
    if kind == "W":
        return passes["I", i, j][1]
    return passes["I", i, j + 1][1] + sends[j] * crosses[j] if j < last else passes["F", i, j][1]


@given(runs())
def test_every_operation_starts_as_early_as_its_inputs_and_its_stage_let_it(run):
    timeline, seconds, sends, share, _ = run
    last = len(seconds.forward) - 1
    crosses = np.diff(stage_of_chunk(timeline.schedule, timeline.pp, np.arange(last + 1))) != 0
    passes = table(timeline)
    for stage in range(timeline.pp):
        here = np.flatnonzero(timeline.stage == stage).tolist()
        clock = 0.0
        while here:
            block = [here.pop(0)]
            if timeline.overlapped[block[0]]:
                block.append(here.pop(0))
                assert sorted(timeline.kind[block]) == ["B", "F"]
            work, ready = 0.0, clock
            for op in block:
                kind, i, j = timeline.kind[op], timeline.microbatch[op], timeline.chunk[op]
                backward = seconds.backward_input[j] * (kind in "IB") + seconds.backward_weight[j] * (kind in "WB")
                work += seconds.forward[j] if kind == "F" else backward
                ready = max(ready, needed(kind, i, j, last, sends, passes, crosses))
            clock = ready + work * (share if len(block) == 2 else 1.0)
            assert timeline.start[block] == pytest.approx(ready, rel=1e-12)
            assert timeline.end[block] == pytest.approx(clock, rel=1e-12)


@given(runs())
def test_busy_and_idle_seconds_fill_the_step(run):
    timeline, seconds, _, share, m = run
    total = seconds.forward + seconds.backward_input + seconds.backward_weight
    stages = stage_of_chunk(timeline.schedule, timeline.pp, np.arange(len(total)))
    work = m * np.bincount(stages, weights=total)
    if share == 1.0 or timeline.schedule != "dualpipev":
        assert timeline.busy_seconds == pytest.approx(work)
    assert np.all(timeline.busy_seconds <= work * (1 + 1e-12))
    assert np.all((timeline.seconds - timeline.busy_seconds) >= -1e-9)


@given(runs(), st.floats(0, 1))
def test_the_peak_is_what_is_held_at_the_fullest_moment(run, share_until_weight):
    timeline, seconds, _, _, _ = run
    size = np.arange(1.0, 1.0 + len(seconds.forward))
    passes = table(timeline)
    for stage in range(timeline.pp):
        mine = [key for key in passes if stage_of_chunk(timeline.schedule, timeline.pp, key[2]) == stage]
        held = [
            sum(
                size[j]
                * (
                    (1 - share_until_weight) * (passes["I", i, j][1] > now)
                    + share_until_weight * (passes["W", i, j][1] > now)
                )
                for kind, i, j in mine
                if kind == "F" and passes["F", i, j][0] <= now
            )
            for now in {passes[key][0] for key in mine if key[0] == "F"}
        ]
        assert timeline.peak_held(size, share_until_weight)[stage] == pytest.approx(max(held))


@given(shapes(), st.integers(0, 2**32 - 1))
def test_faster_stages_never_make_a_longer_step(shape, seed):
    schedule, pp, m, interleave = shape
    rng = np.random.default_rng(seed)
    slow = {name: rng.uniform(0.1, 2.0, pp * interleave) for name in ("forward", "backward_input", "backward_weight")}
    fast = {name: each * rng.uniform(0.5, 1.0, pp * interleave) for name, each in slow.items()}
    slower, faster = (
        exact_pipeline_seconds(schedule, PassSeconds(**each), m, interleave=interleave) for each in (slow, fast)
    )
    assert faster <= slower * (1 + 1e-12)
    doubled = PassSeconds(**{name: 2 * each for name, each in slow.items()})
    assert exact_pipeline_seconds(schedule, doubled, m, interleave=interleave) == pytest.approx(2 * slower)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_shape_deadlocks(schedule):
    counts = (1, 2, 3) if schedule == "interleaved" else (2,) if schedule in ("zbv", "dualpipev") else (1,)
    for pp, m, v in itertools.product(range(1, 7), range(1, 14), counts):
        if m >= 2 * pp if schedule == "dualpipev" else v == 1 or schedule == "zbv" or m % max(1, m // pp) == 0:
            assert simulate(schedule, uniform(pp * v), m, interleave=v).seconds >= 3 * m * v


# --- torch as the second oracle -----------------------------------------------------------------------------

SHAPES = [(1, 2), (2, 2), (2, 5), (3, 3), (4, 8), (4, 10), (4, 20), (5, 15), (8, 16), (8, 32)]


def torch_actions(schedule, pp, m, interleave):
    """torch's own order of every rank, without processes; None if torch does not support the shape."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    if schedule in ("interleaved", "zb-h1") and m % max(1, m // pp):
        return None
    if m < (2 * pp if schedule == "dualpipev" else pp):
        return None
    if schedule != "zb-h1":
        return visualizer.get_schedule_ops(TORCH[schedule], pp, m, interleave)
    stage = mock.create_autospec(pipelining.PipelineStage, instance=True)  # the visualiser has no single chunk
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, pp, pp, None
    return list(pipelining.ScheduleInterleavedZeroBubble([stage], m).pipeline_order.values())


def as_operations(actions, *, renumber):
    """torch's actions as our operations; torch counts the last stage's forward passes of GPipe and 1F1B from 1."""
    found, forwards = [], itertools.count()
    for action in filter(None, actions):
        for part in action.sub_actions or (action,):
            kind = part.computation_type.value
            if kind in "FBIW":
                i = next(forwards) if renumber and kind == "F" else part.microbatch_index
                found.append(Operation(kind, i, part.stage_index, action.sub_actions is not None))
    return tuple(found)


CASES = [(schedule, 1 if schedule in ("gpipe", "1f1b", "zb-h1") else 2) for schedule in TORCH] + [("interleaved", 4)]


@pytest.mark.parametrize(("schedule", "interleave"), CASES)
def test_the_order_of_operations_is_the_one_of_torch(schedule, interleave):
    compared = 0
    for pp, m in SHAPES:
        theirs = torch_actions(schedule, pp, m, interleave)
        for stage, actions in enumerate(theirs or ()):
            ours = operations(schedule, pp, stage, m, interleave)
            assert ours == as_operations(actions, renumber=schedule == "1f1b"), (pp, m, stage)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize(("schedule", "interleave"), [case for case in CASES if case[0] not in ("1f1b", "dualpipev")])
def test_times_are_those_of_the_visualiser_of_torch(schedule, interleave, capsys):
    """torch's event loop counts in units of F, I and W. It runs overlapped pairs differently, and does not run 1F1B."""
    spacing = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer").add_schedule_op_spacing
    for pp, m in [(2, 4), (4, 8), (3, 9), (4, 16)]:
        ranks = torch_actions(schedule, pp, m, interleave)
        theirs = {}
        for row in spacing([[a for a in rank if a and a.computation_type.value in "FBIW"] for rank in ranks]):
            now = 0
            for action in row:
                kind = action.computation_type.value if action else ""
                if action:  # by action: what is left when a rank has finished, torch puts into another rank's row
                    theirs[kind, action.microbatch_index, action.stage_index] = now
                now += 2 if kind == "B" else 1
        t = simulate(schedule, uniform(pp * interleave), m, interleave=interleave)
        columns = (t.kind, t.microbatch, t.chunk, t.start)
        assert theirs == {(k, i, j): start for k, i, j, start in zip(*(c.tolist() for c in columns), strict=True)}
    capsys.readouterr()  # torch prints its steps


# --- what the papers say ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zb_h1_holds_what_table_2_of_zero_bubble_says(pp):
    """Device i of p holds (p - i + 1) M_B + (i - 1) M_W; M_W is the part that the weight gradients need."""
    peak = simulate("zb-h1", uniform(pp), 4 * pp).peak_held(1.0, share_until_weight=0.25)
    assert peak == pytest.approx([pp - i + 1 + (i - 1) * 0.25 for i in range(1, pp + 1)])


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_a_stage_of_zbv_never_waits_between_its_first_and_its_last_operation(pp):
    timeline = simulate("zbv", uniform(2 * pp), 4 * pp, interleave=2)
    for stage in range(pp):
        mine = timeline.stage == stage
        span = timeline.end[mine].max() - timeline.start[mine].min()
        assert span == timeline.busy_seconds[stage] == 3 * 2 * 4 * pp


@pytest.mark.parametrize("share", [1.0, 0.9, 0.8])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_the_last_stage_of_dualpipev_waits_as_its_authors_say(pp, share):
    """(PP / 2 - 1) (F&B + B - 3 W) with PP = 2 p chunks."""
    timeline = simulate("dualpipev", uniform(2 * pp), 5 * pp, interleave=2, overlapped_share=share)
    assert (timeline.seconds - timeline.busy_seconds)[-1] == pytest.approx((pp - 1) * (share * 3 + 2 - 3))


@pytest.mark.parametrize(("exchange", "taken"), [(0.0, 0.1), (0.3, None), (0.3, 0.1), (0.9, 0.2)])
def test_overlapped_pairs_hide_what_they_exchange(exchange, taken):
    """F + B = 3, of which C = 2 x exchange is communication; the pair takes max(C, 3 - C + taken C)."""
    pp, m, comm = 4, 20, 2 * exchange
    given = {"exchange": PassSeconds(forward=exchange, backward_input=exchange)}
    given |= {} if taken is None else {"exchange_share": taken}
    found = simulate("dualpipev", uniform(2 * pp), m, interleave=2, **given)
    together = max(comm, 3 - comm + (taken or 0.0) * comm)
    same = simulate("dualpipev", uniform(2 * pp), m, interleave=2, overlapped_share=together / 3)
    assert found.seconds == pytest.approx(same.seconds)
    assert np.all(found.busy_seconds + np.bincount(found.stage, found.hidden) == pytest.approx(3 * 2 * m))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_pipedream_has_no_bubble_once_it_is_full(pp, rounds, seed):
    rng = np.random.default_rng(seed)
    passes = {name: rng.uniform(0.1, 2.0, pp) for name in ("forward", "backward_input", "backward_weight")}
    seconds = PassSeconds(**passes)
    first, more = 20 * pp, rounds * pp
    longer = exact_pipeline_seconds("pipedream", seconds, first + more)
    in_between = longer - exact_pipeline_seconds("pipedream", seconds, first)
    assert in_between == pytest.approx(more * np.max(sum(passes.values())), rel=1e-9)


def test_sends_of_1f1b_are_felt_though_they_keep_nobody_busy_and_those_of_interleaving_are_not():
    """A microbatch goes down and up again while p - r others are in flight, which costs each 2 c (p - 1) / p."""
    pp, c = 4, 0.1

    def each(schedule, interleave):
        seconds = uniform(pp * interleave, *[1 / interleave] * 3)
        short, long = (
            exact_pipeline_seconds(schedule, seconds, m, interleave=interleave, send_seconds=c)
            for m in (8 * pp, 16 * pp)
        )
        return (long - short) / (8 * pp)

    assert each("1f1b", 1) == pytest.approx(3 + 2 * c * (pp - 1) / pp)
    assert each("interleaved", 2) == pytest.approx(3)


def test_the_arrays_draw_a_timeline():
    timeline = simulate("1f1b", uniform(2), 2)
    assert timeline.stage.tolist() == [0] * 4 + [1] * 4
    assert timeline.kind.tolist() == ["F", "F", "B", "B", "F", "B", "F", "B"]
    assert timeline.start.tolist() == [0, 1, 4, 7, 1, 2, 4, 5]
    assert timeline.end.tolist() == [1, 2, 6, 9, 2, 4, 5, 7]
    assert in_flight_of_chunk(timeline).tolist() == [2, 1]


@pytest.mark.parametrize(("schedule", "interleave"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)])
def test_a_chunk_holds_a_microbatch_from_its_forward_pass_to_the_end_of_its_last(schedule, interleave):
    pp, m = 3, 9
    timeline = simulate(schedule, uniform(pp * interleave), m, interleave=interleave)
    held = {}
    for chunk, microbatch, start, end in zip(
        timeline.chunk, timeline.microbatch, timeline.start, timeline.end, strict=True
    ):
        first, last = held.get((chunk, microbatch), (start, end))
        held[chunk, microbatch] = (min(first, start), max(last, end))
    times = np.unique([timeline.start, timeline.end])
    for chunk in range(pp * interleave):
        spans = [span for (own, _), span in held.items() if own == chunk]
        most = max(sum(a < t < b for a, b in spans) for t in (times[1:] + times[:-1]) / 2)
        assert in_flight_of_chunk(timeline)[chunk] == most
