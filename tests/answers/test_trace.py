"""The trace: valid, and its slices add up to the estimate line by line."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from planner.answers.operations import operations_of_step
from planner.answers.plan_inputs import job_of
from planner.cli import main
from planner.cost.flops import model_flops_per_step
from planner.cost.ledger import LineName
from planner.cost.schedule_comparison import SCHEDULES, compare_schedules, with_schedule
from planner.errors import InputError
from planner.plan import plan_to_json
from planner.search.given import plan_for_layout
from planner.show import trace
from planner.show.trace import trace_text
from planner.show.words import line_label

NANOSECOND = 1e-9
PASSES = 1


def trace_events(plan, *, ranks: bool = False):
    return json.loads("".join(trace_text(plan, ranks=ranks)))["traceEvents"]


def slices(events, **wanted):
    return [e for e in events if e["ph"] == "X" and all(e[key] == value for key, value in wanted.items())]


def seconds(events) -> float:
    return sum(each["dur"] for each in events) * 1e-6


def under_schedule(plan, schedule):
    job = job_of(plan)
    return plan_for_layout(job, with_schedule(plan.layout, schedule))


@pytest.fixture(params=SCHEDULES)
def scheduled(request, plan_of_kind):
    return under_schedule(plan_of_kind("uneven, recompute"), request.param)


def check_format(events) -> None:
    """Complete events and metadata; slices of a thread nest or do not overlap, as Perfetto reads them."""
    threads, named = defaultdict(list), set()
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            named.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert event["name"]
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        begin = int(event["ts"] * 1000)  # Perfetto multiplies the double and cuts it off
        threads[event["pid"], event["tid"]].append((begin, begin + int(event["dur"] * 1000)))
    assert threads.keys() <= named
    for found in threads.values():
        open_until: list[int] = []
        for begin, end in sorted(found, key=lambda each: each[0]):  # stable: a pass stands before its parts
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_the_trace_keeps_to_the_format(any_plan) -> None:
    check_format(trace_events(any_plan))


def test_every_schedule_keeps_to_the_format(scheduled) -> None:
    check_format(trace_events(scheduled))


def test_the_ledger_track_is_the_estimate(any_plan) -> None:
    events = trace_events(any_plan)
    step, *lines = slices(events, pid=0, tid=1)
    assert step["dur"] * 1e-6 == pytest.approx(any_plan.step_seconds, abs=NANOSECOND)
    assert seconds(lines) == pytest.approx(any_plan.step_seconds, abs=NANOSECOND * len(lines))
    found = {each["name"]: each["dur"] * 1e-6 for each in lines}
    for line in any_plan.time:
        assert found.get(line_label(line.name), 0.0) == pytest.approx(line.exposed_seconds, abs=2 * NANOSECOND)


COMPUTING = (LineName.COMPUTE, LineName.RECOMPUTE, LineName.HEAD, LineName.ACCUMULATION)


def check_hidden_rows(plan) -> None:
    """Hidden parts are as long as in the ledger, end with the step at the latest, and stand beside computing."""
    events = trace_events(plan)
    hidden = [each for each in slices(events, pid=0) if each["tid"] != 1]
    expected = {line_label(line.name): line.hidden_seconds for line in plan.time if line.hidden_seconds > 0}
    assert {each["name"]: each["dur"] * 1e-6 for each in hidden} == pytest.approx(expected, abs=2 * NANOSECOND)
    work = sum(float(line.exposed_seconds) for line in plan.time if line.name in COMPUTING)
    for each in hidden:
        start, end = each["ts"] * 1e-6, (each["ts"] + each["dur"]) * 1e-6
        assert end <= plan.step_seconds + 2 * NANOSECOND
        assert end == pytest.approx(max(work, end - start), abs=2 * NANOSECOND)


def test_hidden_rows_of_the_ledger_end_with_the_step(any_plan) -> None:
    check_hidden_rows(any_plan)


def test_hidden_rows_end_with_the_step_under_every_schedule(scheduled) -> None:
    check_hidden_rows(scheduled)


def check_lines(plan) -> None:
    """For every line, the slices on its stage add up to the exposed and hidden seconds of the ledger."""
    events = trace_events(plan)
    for line in plan.time:
        if line.name == LineName.BUBBLE:  # nothing happens in it
            continue
        own = slices(events, pid=1 + line.stage, name=line_label(line.name))
        exposed, hidden = (
            seconds(each for each in own if (each["tid"] == PASSES) is in_passes) for in_passes in (True, False)
        )
        assert exposed == pytest.approx(line.exposed_seconds, rel=1e-6, abs=1e-7), line.name
        if line.name in (LineName.TP_COMM, LineName.DP_COMM):
            assert hidden == pytest.approx(line.hidden_seconds, rel=1e-6, abs=1e-7)


def test_slices_of_a_stage_add_up_to_the_ledger(any_plan) -> None:
    check_lines(any_plan)


def test_slices_add_up_under_every_schedule(scheduled) -> None:
    check_lines(scheduled)


def test_the_end_is_that_of_the_executed_schedule(scheduled) -> None:
    """`compare_schedules` executes the passes without the trace; its PipeDream never drains."""
    schedule = scheduled.layout.schedule
    told = json.loads("".join(trace_text(scheduled)))["otherData"]
    events = trace_events(scheduled)
    end = max(each["ts"] + each["dur"] for each in slices(events) if each["pid"] > 0) * 1e-6
    assert told["estimate_step_seconds"] == scheduled.step_seconds
    if schedule == "pipedream":
        assert end > scheduled.step_seconds
        return
    executed = compare_schedules(job_of(scheduled), scheduled.layout)[schedule].executed_step_seconds
    assert told["executed_step_seconds"] == pytest.approx(executed, rel=1e-12)
    hidden = [each for each in slices(events) if each["pid"] > 0 and each["tid"] != PASSES]
    latest = max((each["ts"] + each["dur"] for each in hidden), default=0.0) * 1e-6
    assert end == pytest.approx(max(executed, latest), abs=2 * NANOSECOND)


def test_without_a_pipeline_both_totals_are_the_same(any_plan) -> None:
    told = json.loads("".join(trace_text(any_plan)))["otherData"]
    if any_plan.layout.pp == 1:
        assert told["executed_step_seconds"] == pytest.approx(any_plan.step_seconds, rel=1e-12)


def test_flops_of_the_passes_are_those_of_the_model(any_plan) -> None:
    layout = any_plan.layout
    passes = [each for each in slices(trace_events(any_plan)) if each["cat"] in ("forward", "backward")]
    model = sum(each["args"]["model_flops"] for each in passes) * layout.tp * layout.cp * layout.dp
    again = sum(each["args"]["recomputed_flops"] for each in passes) * layout.tp * layout.cp * layout.dp
    assert model == pytest.approx(model_flops_per_step(any_plan.model, any_plan.training), rel=1e-9)
    if any_plan.model.moe is None:  # the estimate spreads what is computed again over layers as if all were alike
        assert 1 + again / model == pytest.approx(any_plan.hfu / any_plan.mfu, rel=1e-6)


def test_bytes_are_those_of_the_collectives(any_plan) -> None:
    job, events = job_of(any_plan), trace_events(any_plan)
    operations = operations_of_step(job, any_plan.layout, any_plan.time)
    for line in any_plan.time:
        if line.name in (LineName.BUBBLE, LineName.PP_COMM):  # of hidden sends, only those that exist are drawn
            continue
        own = slices(events, pid=1 + line.stage, name=line_label(line.name))
        expected = sum(each.times * each.num_bytes for each in operations if each.line == line.name)
        if line.busy_seconds > 0:
            found = sum(each["args"].get("num_bytes", 0) for each in own)
            assert found == pytest.approx(expected, rel=1e-3, abs=len(own)), line.name


def test_ranks_are_those_of_one_replica(plan_of_kind) -> None:
    plan = plan_of_kind("uneven, recompute")
    layout = plan.layout
    stages, ranks = trace_events(plan), trace_events(plan, ranks=True)
    processes = sorted({each["pid"] - 1 for each in slices(ranks) if each["pid"] > 0})
    assert processes == [rank for rank in range(layout.world_size) if layout.coordinates(rank)["dp"] == 0]
    for rank in processes:
        stage = layout.coordinates(rank)["pp"]
        same = [each | {"pid": 0} for each in slices(stages, pid=1 + stage)]
        assert [each | {"pid": 0} for each in slices(ranks, pid=1 + rank)] == same
    check_format(ranks)


def test_hidden_sends_go_to_neighbours_only(plan_of_kind, with_engine) -> None:
    plan = plan_of_kind("interleaved")
    job = with_engine(job_of(plan), overlap={"pipeline_sends": "all"})
    events = trace_events(plan_for_layout(job, plan.layout))
    sends = [each for each in slices(events, cat="send", tid=2) if each["pid"] > 0]
    chunks, m = plan.layout.num_chunks, plan.layout.num_microbatches(plan.training.global_batch_size)
    assert len(sends) == 2 * m * (chunks - 1)
    ways = [(send["pid"] - 1, send["args"]["to_stage"]) for send in sorted(sends, key=lambda each: each["ts"])]
    assert (ways[0], ways[-1]) == ((0, 1), (1, 0)), "activations leave the first stage first, gradients reach it last"
    assert all((to - stage) % plan.layout.pp in (1, plan.layout.pp - 1) for stage, to in ways)
    line = next(line for line in plan_for_layout(job, plan.layout).time if line.name == LineName.PP_COMM)
    each = float(line.hidden_seconds) / (m * 2 * plan.layout.interleave)
    assert each > 0
    assert [send["dur"] * 1e-6 for send in sends] == pytest.approx([each] * len(sends), abs=2 * NANOSECOND)
    check_format(events)


# --- the option -----------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(plan_of_kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan_of_kind("one device")), encoding="utf-8")
    return path


def test_the_option_writes_the_file_and_nothing_else(plan_file, capsys) -> None:
    assert main(["explain", "plan.json", "--trace", "t.json"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "wrote t.json\n"
    document = json.loads(plan_file.with_name("t.json").read_text(encoding="utf-8"))
    assert document["otherData"]["model"] == "gpt2-xl"
    assert sorted(path.name for path in plan_file.parent.iterdir()) == ["plan.json", "t.json"]


def test_the_option_keeps_files_and_answers(plan_file, capsys) -> None:
    (plan_file.parent / "t.json").write_text("mine", encoding="utf-8")
    assert main(["explain", "plan.json", "--trace", "t.json"]) == 2
    assert "add --force" in capsys.readouterr().err
    assert (plan_file.parent / "t.json").read_text(encoding="utf-8") == "mine"
    assert main(["explain", "plan.json", "--trace", "t.json", "--force", "--batch"]) == 0
    assert "microbatch" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--ranks"], ["--trace", "-", "--json"], ["--trace", "."], ["--trace", "plan.json"]])
def test_what_cannot_be_written_is_refused(plan_file, argv, capsys) -> None:
    before = plan_file.read_bytes()
    assert main(["explain", "plan.json", *argv]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert plan_file.read_bytes() == before


def test_more_than_a_viewer_takes_is_refused(plan_of_kind, monkeypatch) -> None:
    plan = plan_of_kind("interleaved")
    monkeypatch.setattr(trace, "_MOST_EVENTS", 50_000)
    with pytest.raises(InputError, match="too many") as caught:
        next(trace_text(plan, ranks=True))
    assert caught.value.mistakes[0].hint == "leave out --ranks"
    assert next(trace_text(plan))
