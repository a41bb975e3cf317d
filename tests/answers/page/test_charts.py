"""The geometry of the page's charts: drawn lengths and places match the printed numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from planner.answers.executed import executed_step
from planner.answers.formulas import ledger_rows
from planner.answers.peak import Alternative, alternatives_of, peaks_of
from planner.answers.plan_inputs import job_of
from planner.answers.scaling import replicas_of
from planner.answers.waterfall import TimePart, Waterfall, waterfall_of
from planner.answers.what_if import Sensitivity, sensitivity_of
from planner.cost.estimate import estimate
from planner.show.page.charts import front_chart, memory_rows, scaling_chart, waterfall_rows
from planner.show.page.drawings import topology_data
from planner.show.page.facts import sensitivity_rows, stage_rows
from planner.show.page.render import _anchor
from planner.specs.glossary import entries
from planner.units import format_bytes, format_seconds


def percents(text: str) -> float:
    return float(text.removesuffix("%")) / 100


def test_bars_of_memory_are_as_long_as_what_they_show(any_plan) -> None:
    found = memory_rows(any_plan, peaks_of(job_of(any_plan), any_plan.layout))
    full = max(max(stage.total_bytes, stage.limit_bytes) for stage in any_plan.memory)
    shown = [
        stage for stage in any_plan.memory if format_bytes(stage.total_bytes) in {r["total"] for r in found["rows"]}
    ]
    assert max(any_plan.memory, key=lambda stage: stage.total_bytes) in shown
    for row in found["rows"]:
        stage = next(each for each in shown if format_bytes(each.total_bytes) == row["total"])
        at = 0.0
        for part, line in zip(row["parts"], stage.lines, strict=True):
            assert percents(part["x"]) == pytest.approx(at, abs=1e-4)
            assert percents(part["width"]) == pytest.approx(line.num_bytes / full, abs=1e-4)
            at += line.num_bytes / full
        assert percents(row["limit"]) == pytest.approx(stage.limit_bytes / full, abs=1e-4)
        assert row["over"] == (stage.total_bytes > stage.limit_bytes)
        assert row["free"] == format_bytes(stage.limit_bytes - stage.total_bytes)


def test_the_waterfall_starts_each_part_where_the_one_before_ends(any_plan) -> None:
    job = job_of(any_plan)
    found = waterfall_rows(waterfall_of(job, any_plan.layout, estimate(job, any_plan.layout)))
    *parts, step = found
    at = 0.0
    for row in parts:
        start, width = percents(row["x"]), percents(row["width"])
        assert (start + width if row["back"] else start) == pytest.approx(at, abs=1e-4)
        at = start if row["back"] else start + width
    assert at == pytest.approx(percents(step["width"]), abs=1e-3)


def test_a_part_that_gives_time_back_points_back() -> None:
    seconds = {"ideal compute": 8.0, "kernel efficiency": 4.0, "calibration": -2.0}
    same = {"formula": "", "numbers": "", "source": "", "bound": ""}
    parts = tuple(TimePart(name=name, seconds=value, **same) for name, value in seconds.items())
    rows = waterfall_rows(Waterfall(parts=parts, step_seconds=10.0))
    places = [(percents(row["x"]), percents(row["width"]), row["back"]) for row in rows]
    twelfths = [(0, 8, False), (8, 4, False), (10, 2, True), (0, 10, False)]
    assert places == [(pytest.approx(x / 12, abs=1e-5), pytest.approx(w / 12, abs=1e-5), b) for x, w, b in twelfths]


def test_the_line_joins_what_nothing_beats(plan_of_kind) -> None:
    """By brute force over all pairs; points further right are slower, points further down need less memory."""
    plan = plan_of_kind("interleaved")
    others = alternatives_of(job_of(plan), plan.layout)
    found = front_chart(plan, others)["points"]
    peak = max(stage.total_bytes for stage in plan.memory)
    values = [(plan.step_seconds, peak, plan.fits)]
    values += [(each.step_seconds, each.peak_bytes, each.fits) for each in others if each.step_seconds is not None]
    assert len(found) == len(values) > 2
    for point, (seconds, size, fits) in zip(found, values, strict=True):
        beaten = any(
            t <= seconds and b <= size and (t, b) != (seconds, size) for t, b, other_fits in values if other_fits
        )
        assert point["on_front"] == (fits and not beaten)
        assert (point["seconds"], point["memory"]) == (format_seconds(seconds), format_bytes(size))
    for axis, index in (("x", 0), ("y", 1)):  # in proportion between the least and the most
        drawn, true = [each[axis] for each in found], [each[index] for each in values]
        first, last = true.index(min(true)), true.index(max(true))
        for place, value in zip(drawn, true, strict=True):
            share = (value - true[first]) / (true[last] - true[first])
            assert place == pytest.approx(drawn[first] + share * (drawn[last] - drawn[first]), abs=0.02)
        assert abs(drawn[last] - drawn[first]) > 100
    for axis, index, sign in (("x", 0, 1), ("y", 1, -1)):
        ordered = sorted(range(len(values)), key=lambda each, index=index: values[each][index])
        for less, more in pairwise(ordered):
            assert sign * (found[more][axis] - found[less][axis]) >= 0


def test_what_fits_the_device_and_not_the_host_is_not_on_the_line(plan_of_kind) -> None:
    plan = plan_of_kind("zero-2")
    plan = replace(plan, memory=tuple(replace(stage, limit_bytes=1e15) for stage in plan.memory))
    layout, fast, small = plan.layout, plan.step_seconds / 2, plan.memory[0].total_bytes / 2
    for fits in (True, False):
        other = Alternative(
            change="offload=both", layout=layout, broken_rules=(), peak_bytes=small, fits=fits, step_seconds=fast
        )
        own, found = front_chart(plan, [other])["points"]
        assert (found["fits"], found["on_front"], own["on_front"]) == (fits, fits, not fits)


def test_scaling_is_drawn_against_the_most_efficient_size_that_fits(plan_of_kind) -> None:
    plan = plan_of_kind("uneven, recompute")
    replicas = replicas_of(plan)
    found = scaling_chart(plan, None, replicas)
    cost = [each.num_devices * each.step_seconds for each in replicas]
    best = min((value for value, each in zip(cost, replicas, strict=True) if each.fits), default=min(cost))
    assert [point["share"] for point in found["points"]] == [f"{best / value:.0%}" for value in cost]
    assert [point["here"] for point in found["points"]] == [r.num_devices == 16 for r in replicas]
    heights = sorted(zip(cost, (point["y"] for point in found["points"]), strict=True))
    assert [y for _, y in heights] == sorted(y for _, y in heights), "higher up is more efficient"


def test_bars_of_gains_compare_with_the_largest(plan_of_kind) -> None:
    found = sensitivity_of(plan_of_kind("zero-3, hybrid"), search=False)
    rows = sensitivity_rows(found, planned=False)["rows"]
    gains = [each for each in found.gains if each.resource != "hosts"]
    assert [each for each, *_ in rows] == gains
    largest = max(each.gain for each in gains)
    assert [percents(width) for *_, width in rows] == [
        pytest.approx(max(0.0, each.gain / largest), abs=1e-4) for each in gains
    ]
    none = Sensitivity(objective="throughput", step_seconds=1.0, gains=(gains[0].model_copy(update={"gain": 0.0}),))
    assert sensitivity_rows(none, planned=False)["rows"][0][-1] == "0.00%"


def test_stages_work_or_wait_all_the_time(plan_of_kind) -> None:
    plan = plan_of_kind("uneven, recompute")
    step = executed_step(job_of(plan), plan.layout)
    rows = stage_rows(plan, step)
    assert [row[0] for row in rows] == [f"stage {stage}" for stage in range(4)]
    for stage, (_, layers, passes, works, waits, _, _) in enumerate(rows):
        own = step.timeline.stage == stage
        busy = float((step.timeline.end - step.timeline.start)[own].sum())
        assert (works, waits) == (format_seconds(busy), format_seconds(step.pipeline_seconds - busy))
        assert (int(layers), int(passes)) == (plan.layout.layers_per_stage[stage], int(own.sum()))


def test_the_ledger_names_the_least_and_the_most_of_a_line(plan_of_kind) -> None:
    plan = plan_of_kind("uneven, recompute")
    job = job_of(plan)
    rows = ledger_rows(plan, waterfall_of(job, plan.layout, estimate(job, plan.layout)))
    memory = {row["name"]: row["value"] for row in rows if row["of"] == "memory"}
    for index, name in enumerate(("params", "grads", "optimizer state", "activations")):
        sizes = [float(stage.lines[index].num_bytes) for stage in plan.memory]
        assert memory[name] == " to ".join(dict.fromkeys((format_bytes(min(sizes)), format_bytes(max(sizes)))))
    times, others = ([row["name"] for row in rows if row["of"] == of] for of in ("time", "waterfall"))
    assert others
    assert len({*times, *others}) == len({*times}) + len(others)  # a line is shown once
    seconds = {row["name"]: row["value"] for row in rows if row["of"] == "time"}
    assert seconds["bubble"] == next(
        format_seconds(line.exposed_seconds) for line in plan.time if line.name == "bubble"
    )


@pytest.mark.parametrize("kind", ["interleaved", "experts", "mixed", "mixed, ends apart", "racks"])
def test_the_links_of_an_axis_are_those_between_its_ranks(kind: str, plan_of_kind) -> None:
    """Ranks of a group one by one: ranks of one host, or of its rack, meet on the first link, others on the network."""
    plan = plan_of_kind(kind)
    layout, shown = plan.layout, topology_data(plan)
    assert [(each["name"], each["degree"]) for each in shown["axes"]] == list(layout.degrees.items())
    for pool in shown["pools"]:
        (spec,) = [each for each in plan.cluster.pools if each.name == pool["name"] or len(shown["pools"]) == 1]
        ranks = range(pool["first"], pool["first"] + pool["num_ranks"])
        for axis in layout.degrees:
            groups = [layout.group(axis, rank) for rank in ranks]
            together = spec.devices_per_host * (pool["domain"]["hosts"] if pool["domain"] else 1)
            assert not pool["domain"] or together == 16 * 4, "16 hosts of each rack"
            hosts = [{rank // together for rank in group} for group in groups]
            if axis == "pp" and plan.layout.pools:
                expected = {plan.cluster.between.name}
            else:
                expected = {spec.links[1].name} if any(len(each) > 1 for each in hosts) else set()
                if any(len(group) > len(on) for group, on in zip(groups, hosts, strict=True)):
                    expected.add(spec.links[0].name)
            assert set(pool["links"][axis]) == expected, axis


def test_entries_of_the_glossary_have_places_of_their_own_that_an_address_can_name() -> None:
    places = [_anchor(entry) for entry in entries()]
    assert len({*places}) == len(places) > 20
    assert [each for each in places if not re.fullmatch("[a-z][a-z0-9-]*", each)] == []
