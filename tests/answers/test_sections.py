"""The fixed sections of `planner explain`: their parts add up for every layout."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from planner.answers.collectives import collectives_of
from planner.answers.operations import operations_of_step
from planner.answers.peak import alternatives_of, peaks_of
from planner.answers.plan_inputs import constraints_of, job_of
from planner.answers.report import explain
from planner.answers.scaling import replicas_of
from planner.answers.waterfall import rates_of, waterfall_of
from planner.cost.estimate import estimate
from planner.cost.groups import group
from planner.cost.ledger import LineName
from planner.cost.schedule_comparison import SCHEDULES, with_schedule
from planner.errors import InputError
from planner.layout import Layout
from planner.layout_text import parse_layout
from planner.plan import plan_to_json
from planner.plan_file import plan_from_json
from planner.search.given import plan_for_layout
from planner.search.space.rules import broken_rules
from planner.show.explain import explanation
from planner.show.screen import Screen, to_text
from planner.specs.change import change_job
from planner.specs.load import load_job


def waterfall(plan):
    job = job_of(plan)
    return waterfall_of(job, plan.layout, estimate(job, plan.layout))


def part(plan, name: str) -> float:
    return sum(each.seconds for each in waterfall(plan).parts if each.name == name)


def test_the_waterfall_ends_at_the_step(any_plan) -> None:
    found = waterfall(any_plan)
    assert found.step_seconds == any_plan.step_seconds
    assert sum(each.seconds for each in found.parts) == pytest.approx(any_plan.step_seconds, rel=1e-12)


def test_the_waterfall_begins_at_the_utilization(any_plan) -> None:
    assert part(any_plan, "ideal compute") / any_plan.step_seconds == pytest.approx(any_plan.mfu, rel=1e-12)


def test_a_device_without_losses_needs_the_ideal_and_what_fused_attention_repeats(plan_of_kind, with_engine) -> None:
    """With whole tiles, kernels at peak, free memory traffic and a free host, the remaining time can be counted."""
    plan = plan_of_kind("whole tiles")
    losses = {"matmul_half_depth": 0.0, "launch": 0.0, "layer_floor": 0.0, "step_floor": 0.0}
    gains = {"matmul": 1.0, "attention": 1.0, "memory": 1.0}
    efficiency = plan.cluster.device.efficiency.model_copy(update=losses | gains)
    changes = {"efficiency": efficiency, "memory_bandwidth": 1e30, "num_processors": 1}
    cluster = plan.cluster.model_copy(update={"device": plan.cluster.device.model_copy(update=changes)})
    calibration = plan.calibration[0].model_copy(update={"slowdown": 1.0, "attention": None})
    job = with_engine(job_of(plan), compute={"accumulation_bytes": 0.0})
    job = replace(job, cluster=cluster, calibration=calibration)
    found = {each.name: each.seconds for each in waterfall_of(job, plan.layout, estimate(job, plan.layout)).parts}
    # the backward pass of fused attention does 2.5 times the products of its forward pass, model FLOPs count 2
    tokens, layers, hidden, length = 8 * 2048, 16, 2048, 2048
    again = 0.5 * layers * (4 * hidden * length / 2) * tokens / 312e12
    assert found["kernel efficiency"] == pytest.approx(again, rel=1e-6)
    assert {name for name, seconds in found.items() if seconds > 1e-12} == {"ideal compute", "kernel efficiency"}


SECONDS = {"d": 86400.0, "h": 3600.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "GB/s": 1e9, "TB/s": 1e12}
FLOPS = {"GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15, "EFLOP": 1e18}


def quantities(text: str, units: dict[str, float]) -> list[float]:
    """The numbers of a text that are followed by one of the units."""
    found = re.findall(rf"([\d,.]+) ({'|'.join(sorted(units, key=len, reverse=True))})(?![\w])", text)
    return [float(number.replace(",", "")) * units[unit] for number, unit in found]


def worked_out(name: str, numbers: str) -> list[float]:
    """The values of the terms in the printed arithmetic of a part, as a pocket calculator gives them."""
    times = [float(each.replace(",", "")) for each in re.findall(r"([\d,]+)(?: microbatch(?:es)?)? x ", numbers)]
    seconds = quantities(numbers, SECONDS)
    if name == "ideal compute":
        flops, peak = quantities(numbers, FLOPS)
        return [flops / (float(re.findall(r"([\d,]+) x", numbers)[0].replace(",", "")) * peak)]
    if name in ("kernel efficiency", "imbalance"):
        return [times[0] * seconds[0], -times[0] * seconds[1]]
    if name == "calibration":
        return [(float(numbers[1:6]) - 1) * seconds[0]]
    if name in ("optimizer", "host_comm"):
        num_bytes, rate = quantities(numbers, BYTES)
        return [num_bytes / rate, *(-t for t in seconds)]  # what is hidden
    if name == "bubble":
        v = float(re.findall(r"\) / (\d+)", numbers)[0])
        return [seconds[0] / v, -seconds[1] / v]
    if name.endswith("_comm"):
        hidden = quantities(numbers.partition(" each; ")[2].rpartition("; ")[2], SECONDS) if "hidden" in numbers else []
        each = seconds[: len(times)]
        return [*(n * t for n, t in zip(times, each, strict=True)), *(-t for t in hidden)]
    return [times[0] * seconds[0]]


def test_the_numbers_of_a_part_give_its_seconds(any_plan) -> None:
    """Each number is printed with three digits."""
    parts = {each.name: each for each in waterfall(any_plan).parts}
    for each in parts.values():
        if each.name == "calibration" or not each.numbers:
            continue  # a factor for each pool, and none for layers that wait for the host; bubbles that are executed
        terms = worked_out(each.name, each.numbers)
        assert sum(terms) == pytest.approx(each.seconds, abs=0.006 * sum(map(abs, terms)) + 5e-6), each.numbers
    ideal, kernels = parts["ideal compute"], parts["kernel efficiency"]
    assert ("on average" in ideal.numbers) == bool(any_plan.layout.pools)
    share = float(kernels.numbers.partition("%")[0]) / 100
    assert share == pytest.approx(ideal.seconds / (ideal.seconds + kernels.seconds), abs=6e-4)


@pytest.mark.parametrize("kind", ["whole tiles", "interleaved", "zero-2"])
def test_where_no_layer_waits_for_the_host_all_of_it_takes_the_slowdown_longer(kind, plan_of_kind) -> None:
    parts = {each.name: each for each in waterfall(plan_of_kind(kind)).parts}
    (seconds,) = worked_out("calibration", parts["calibration"].numbers)
    assert parts["calibration"].seconds == pytest.approx(seconds, rel=0.015)  # three digits of a slowdown near 1
    computed = ("ideal compute", "kernel efficiency", "memory-bound operators", "host and launches")
    (before,) = quantities(parts["calibration"].numbers, SECONDS)
    assert before == pytest.approx(sum(parts[name].seconds for name in computed), rel=6e-3)


def test_equal_stages_have_no_imbalance_but_that_of_the_ends(plan_of_kind) -> None:
    plan = plan_of_kind("uneven, recompute")
    job = job_of(plan)
    even = replace(plan.layout, layers_per_stage=(8, 8, 8, 8), recompute=("none",) * 4)
    without_ends = waterfall_of(job, even, estimate(job, even))
    uneven = part(plan, "imbalance")
    assert uneven > 2 * sum(each.seconds for each in without_ends.parts if each.name == "imbalance")


@pytest.mark.parametrize("kind", ["interleaved", "zero-3, hybrid", "experts"])
def test_a_cause_that_is_removed_takes_its_part_away(kind: str, plan_of_kind) -> None:
    """Remove slow memory from the machine itself, price the plan again, and compare with the part of that name."""
    plan = plan_of_kind(kind)
    slowdown = plan.calibration[0].slowdown
    job = job_of(plan)
    device = job.cluster.device.model_copy(update={"memory_bandwidth": 1e30})
    fast = replace(job, cluster=job.cluster.model_copy(update={"device": device}))
    work = (LineName.COMPUTE, LineName.HEAD)
    before, after = (
        sum(float(line.busy_seconds) for line in estimate(each, plan.layout).time if line.name in work)
        for each in (job, fast)
    )
    # the mean stage has less of the head than the last one, and the host's floor hides a part
    assert part(plan, "memory-bound operators") == pytest.approx((before - after) / slowdown, rel=0.5)


# --- operations -------------------------------------------------------------------------------------------------


def test_operations_add_up_to_the_busy_time_of_their_lines(any_plan) -> None:
    found = operations_of_step(job_of(any_plan), any_plan.layout, any_plan.time)
    for line in any_plan.time:
        if not line.name.value.endswith("_comm") or line.name == LineName.HOST_COMM:
            continue
        total = sum(each.times * each.seconds for each in found if each.line == line.name)
        assert total == pytest.approx(float(line.busy_seconds), rel=1e-9, abs=1e-12), line.name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["tied, without sequence parallelism", "uneven, recompute"])
def test_every_schedule_has_a_waterfall_and_operations_that_add_up(kind: str, schedule, plan_of_kind) -> None:
    plan = plan_of_kind(kind)
    job, layout = job_of(plan), with_schedule(plan.layout, schedule)
    priced = estimate(job, layout)
    parts = waterfall_of(job, layout, priced).parts
    assert sum(each.seconds for each in parts) == pytest.approx(priced.step_seconds, rel=1e-12)
    found = operations_of_step(job, layout, priced.time)
    for line in priced.time:
        if line.name.value.endswith("_comm"):
            total = sum(each.times * each.seconds for each in found if each.line == line.name)
            assert total == pytest.approx(float(line.busy_seconds), rel=1e-9, abs=1e-12), line.name
    peaks = peaks_of(job, layout)
    for peak, memory in zip(peaks, priced.memory, strict=True):
        stored = next(float(line.num_bytes) for line in memory.lines if line.name == LineName.ACTIVATIONS)
        assert sum(each.num_bytes for each in peak.activations) == pytest.approx(stored, rel=1e-12)


def test_a_ring_exchange_hides_behind_attention_and_a_gathering_one_does_not(plan_of_kind) -> None:
    """On a sufficiently fast link a ring exchange is hidden; its busy time is still the time of its hops."""
    for kind, hides in (("context", True), ("gathered context", False)):
        plan = plan_of_kind(kind)
        shown = next(line for line in plan.time if line.name == LineName.CP_COMM)
        assert shown.busy_seconds > 0
        assert (shown.hidden_seconds > 0) == hides


def test_groups_are_those_of_the_rank_order(any_plan) -> None:
    layout = any_plan.layout
    found = operations_of_step(job_of(any_plan), layout, any_plan.time)
    assert {each.where.pool for each in found if each.line == LineName.TP_COMM} <= (set(layout.pools) or {""})
    assert all(each.where.pool for each in found if each.line == LineName.TP_COMM) or not layout.pools
    for each in operations_of_step(job_of(any_plan), layout, any_plan.time):
        if each.line == LineName.TP_COMM:
            assert layout.group("tp", 0) == tuple(range(0, each.where.size * each.where.stride, each.where.stride))
        if each.line == LineName.PP_COMM and each.kind == "send":
            assert layout.group("pp", 0) == tuple(range(0, each.where.size * each.where.stride, each.where.stride))
        assert group(each.network, each.where.size, each.where.stride).size == each.where.size


def test_algorithms_are_compared_for_the_sum_of_gradients_and_not_for_the_weights_that_are_gathered() -> None:
    """Llama 3 8B with ZeRO-1: gradients are summed in 32 bits, and weights are gathered in 16 bits."""
    job = load_job(model="llama3-8b", cluster="dgx-h100", nodes=1, engine="megatron", global_batch_size=8)
    plan = plan_for_layout(job, parse_layout("dp=8,zero=1,recompute=full", num_layers=32, num_devices=8))
    (group_of_replicas,) = collectives_of(plan).groups
    assert group_of_replicas.algorithm_bytes == pytest.approx(4 * 8_030_261_248)


# --- memory -----------------------------------------------------------------------------------------------------


def test_tensors_add_up_to_the_activations_of_their_stage(any_plan) -> None:
    for peak, memory in zip(peaks_of(job_of(any_plan), any_plan.layout), any_plan.memory, strict=True):
        stored = next(float(line.num_bytes) for line in memory.lines if line.name == LineName.ACTIVATIONS)
        assert sum(each.num_bytes for each in peak.activations) == pytest.approx(stored, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensors_add_up_under_every_schedule(schedule, plan_of_kind) -> None:
    """Microbatches that wait for their weights' gradients hold all tensors, whatever the recompute policy keeps."""
    base = plan_of_kind("uneven, recompute")
    plan = plan_for_layout(job_of(base), with_schedule(base.layout, schedule))
    for peak, memory in zip(peaks_of(job_of(plan), plan.layout), plan.memory, strict=True):
        stored = next(float(line.num_bytes) for line in memory.lines if line.name == LineName.ACTIVATIONS)
        sizes = [each.num_bytes for each in peak.activations]
        assert sum(sizes) == pytest.approx(stored, rel=1e-12)
        assert sizes == sorted(sizes, reverse=True)


def test_the_moment_of_the_peak(plan_of_kind) -> None:
    """Only the stage with the head has a loss; if layers are recomputed or gathered, the description says so."""
    uneven = plan_of_kind("uneven, recompute")
    *others, last = [peak.moment for peak in peaks_of(job_of(uneven), uneven.layout)]
    assert all("loss" not in moment for moment in others)
    assert last.startswith("loss")
    assert ["computed again" in moment for moment in others] == [True, True, False]
    gathered = plan_for_layout(job_of(uneven), parse_layout("zero=3,recompute=full", num_layers=32, num_devices=16))
    tall = replace(job_of(gathered), model=gathered.model.model_copy(update={"vocab_size": 128}))
    assert "gathered weights" in peaks_of(tall, gathered.layout)[0].moment


def test_replicas_are_what_planning_that_many_devices_says(any_plan) -> None:
    if any_plan.layout.pools:
        pytest.skip("a mixed cluster has no one size")
    found = replicas_of(any_plan)
    sizes = [each.num_devices for each in found]
    legal = []
    for dp in (any_plan.layout.dp * 2.0**power for power in range(-4, 5)):
        if dp.is_integer():
            other = replace(any_plan.layout, dp=int(dp))
            job = change_job(job_of(any_plan), f"gpus={other.world_size}")
            legal += [] if other != any_plan.layout and broken_rules(job, other) else [other.world_size]
    assert sizes == legal
    assert any_plan.layout.world_size in sizes
    for each in found:
        factor = each.num_devices / any_plan.layout.world_size
        assert math.log2(factor).is_integer()
        job = change_job(job_of(any_plan), f"gpus={each.num_devices}")
        alone = plan_for_layout(job, replace(any_plan.layout, dp=int(any_plan.layout.dp * factor)))
        assert (each.step_seconds, each.fits) == (alone.step_seconds, alone.fits)


@pytest.mark.parametrize("kind", ["interleaved", "uneven, recompute"])
def test_alternatives_are_the_best_value_of_each_key(plan_of_kind, kind) -> None:
    """Each value of a key is priced on its own: no value that fits is faster than the one that is listed."""
    plan = plan_of_kind(kind)
    job, layout = job_of(plan), plan.layout
    found = {each.change.partition("=")[0]: each for each in alternatives_of(job, layout)}
    assert {"sp", "zero", "interleave", "tp", "pp", "mbs", "recompute"} <= set(found)
    for key, values in (("mbs", range(1, 49)), ("zero", range(4)), ("sp", range(2))):
        others = [replace(layout, **{key: value}) for value in values if value != getattr(layout, key)]
        priced = [estimate(job, each) for each in others if not broken_rules(job, each)]
        steps = [each.step_seconds for each in priced if each.fits]
        assert found[key].fits == bool(steps)
        assert not steps or found[key].step_seconds == pytest.approx(min(steps))


def test_one_more_microbatch_in_flight_is_what_the_stage_before_holds_more(plan_of_kind) -> None:
    """1F1B: each stage holds one microbatch more than the next; apart from this, middle stages are equal."""
    plan = plan_of_kind("uneven, recompute")
    even = replace(plan.layout, layers_per_stage=(8,) * 4, recompute=("none",) * 4)
    priced = plan_for_layout(job_of(plan), even)
    more = priced.memory[1].total_bytes - priced.memory[2].total_bytes
    assert peaks_of(job_of(plan), even)[1].bytes_per_microbatch == pytest.approx(more, rel=1e-9)


def test_alternatives_are_what_planning_that_layout_says(any_plan) -> None:
    job = job_of(any_plan)
    found = alternatives_of(job, any_plan.layout)
    assert found
    for each in found:
        layout = each.layout
        key, _, value = each.change.partition("=")
        if not hasattr(Layout, key):  # a change of the training document
            assert layout == any_plan.layout
            continue
        now = layout.recompute if key == "recompute" else (getattr(layout, key),)
        assert set(map(str, now)) == {value}
        if each.broken_rules:
            with pytest.raises(InputError):
                plan_for_layout(job, layout)
        else:
            priced = plan_for_layout(job, layout)
            assert (priced.step_seconds, priced.fits) == (each.step_seconds, each.fits)
            assert max(stage.total_bytes for stage in priced.memory) == each.peak_bytes
            most = max(stage.total_bytes - stage.limit_bytes for stage in priced.memory)
            assert (each.missing_bytes > 0) == (not each.fits), each.change
            assert each.missing_on_host or each.missing_bytes == max(0.0, most)


# --- rates ------------------------------------------------------------------------------------------------------


def test_rates_are_those_of_the_plan(any_plan) -> None:
    job = job_of(any_plan)
    rates = {each.name: each for each in rates_of(job, any_plan.layout, estimate(job, any_plan.layout))}
    assert rates["MFU"].share_of_peak == pytest.approx(any_plan.mfu)
    assert rates["HFU"].share_of_peak == pytest.approx(any_plan.hfu)


def test_rates_of_gpt3_are_those_of_the_papers(plan_of_kind) -> None:
    plan = plan_of_kind("interleaved")
    job = job_of(plan)
    rates = {each.name: each for each in rates_of(job, plan.layout, estimate(job, plan.layout))}
    assert rates["MFU"].share_of_peak == pytest.approx(plan.mfu)
    assert rates["HFU"].share_of_peak == pytest.approx(plan.hfu)
    # PaLM counts 6 N + 12 L h s for each token; embeddings are looked up, not multiplied
    tokens, layers, hidden, length = 1536 * 2048, 96, 12288, 2048
    per_token = 6 * (12 * layers * hidden**2 + 51200 * hidden) + 12 * layers * hidden * length
    assert rates["MFU, whole square"].flops_per_step == pytest.approx(per_token * tokens, rel=2e-3)
    # equation 3 of SC'21
    sc21 = 96 * 1536 * length * layers * hidden**2 * (1 + length / (6 * hidden) + 51200 / (16 * layers * hidden))
    assert rates["SC'21"].flops_per_step == pytest.approx(sc21, rel=2e-3)


# --- the plan behind it -----------------------------------------------------------------------------------------


def test_the_job_of_a_plan_prices_it_again(any_plan) -> None:
    again = plan_from_json(plan_to_json(any_plan))
    assert estimate(job_of(again), again.layout).step_seconds == any_plan.step_seconds
    assert constraints_of(again).pins == ()


def test_the_job_of_a_plan_has_the_options_of_the_plan(plan) -> None:
    options = {"headroom": 0.25, "risk": 0.2, "allow_tp_across_nodes": True, "allow_offload": True}
    job = job_of(replace(plan, options=replace(plan.options, **options)))
    assert {name: getattr(job, name) for name in options} == options
    assert job.spread == plan.memory_spread


def test_the_document_follows_its_published_schema(any_plan, validator_of) -> None:
    text = explain(any_plan).to_json()
    document = json.loads(text)
    validator_of("explanation").validate(document)
    assert plan_from_json(text) == any_plan
    broken = {"waterfall": {"parts": [], "step_seconds": "long"}}
    assert any(list(each.path)[:1] == ["waterfall"] for each in validator_of("explanation").iter_errors(broken))


@pytest.mark.parametrize("mbs", [1, 8])
def test_sixteen_stages_stand_in_tables_at_80_columns(mbs) -> None:
    """This holds whether the stages fit or not; a table that is too wide would turn into a list."""
    job = load_job(model="gpt3-175b", cluster="dgx-a100", nodes=32, sequence_length=2048, global_batch_size=1536)
    plan = plan_for_layout(job, parse_layout(f"tp=8,pp=16,mbs={mbs}", num_layers=96, num_devices=256))
    text = to_text(explanation(explain(plan)), Screen(width=80))
    table = text.split("Memory of each stage")[1].split("Time of a step")[0]
    stages = [word for line in table.splitlines() if line.strip().startswith("stage ") for word in line.split()[1:]]
    assert stages == list(map(str, range(16)))


def test_a_table_of_stages_has_as_many_columns_as_the_screen_is_wide() -> None:
    job = load_job(model="gpt3-175b", cluster="dgx-a100", nodes=32, sequence_length=2048, global_batch_size=1536)
    found = explain(plan_for_layout(job, parse_layout("tp=8,pp=16,mbs=1", num_layers=96, num_devices=256)))
    for width in range(56, 140, 4):
        text = to_text(explanation(found), Screen(width=width))
        table = text.split("Memory of each stage")[1].split("Time of a step")[0]
        blocks = [block.splitlines() for block in table.split("stage   ")[1:]]
        used = [max(len("  stage   " + block[0]), *map(len, block[1:])) for block in blocks]
        column = 2 + len("16.11")
        assert max(used) <= width
        assert all(width - column < each for each in used[:-1]), "one more would fit"
