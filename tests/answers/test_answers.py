"""Why not, what if, sensitivity, scaling and collectives: each answer compared with planning by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.answers.batch import batch_of
from planner.answers.collectives import collectives_of
from planner.answers.deadline import search_in_time
from planner.answers.difference import difference_of
from planner.answers.plan_inputs import job_of
from planner.answers.scaling import scaling_of, sizes_between
from planner.answers.schedules import draw, schedules_of, sketch
from planner.answers.waterfall import waterfall_of
from planner.answers.what_if import fastest_seconds, sensitivity_of, what_if
from planner.answers.why_not import _recomputed, why_not
from planner.cli import main
from planner.cost.collectives import all_reduce_seconds
from planner.cost.estimate import estimate
from planner.cost.groups import group
from planner.cost.ledger import LineName
from planner.cost.schedule_comparison import SCHEDULES
from planner.errors import EnvironmentProblem, InputError
from planner.layout_text import parse_layout
from planner.plan import Plan, plan_to_json
from planner.plan_parts import CONFIDENCE, WITHIN, ObjectiveName
from planner.search.footprint import NothingFits
from planner.search.given import plan_for_layout, plan_for_text
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.change import change_job
from planner.specs.job import PoolJob
from planner.specs.load import load_job

JOB = {"model": "llama3.2-1b", "cluster": "dgx-a100", "gpus": 8, "sequence_length": 4096, "global_batch_size": 64}


def planned(
    job: PoolJob, constraints: Constraints, name: ObjectiveName = "throughput", confidence: float = CONFIDENCE
) -> Plan | NothingFits:
    """A plan as `planner plan` makes it."""
    return search_in_time(job, constraints, name, confidence=confidence, within=WITHIN)


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = planned(load_job(**JOB), Constraints())
    assert isinstance(found, Plan)
    return found


# --- why not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ("full:12", "12 of 32 layers recomputed (full:12)"),
        ("full:40", "all layers recomputed (full:40)"),
        ("every:3", "10 of 32 layers recomputed (every:3)"),
        ("full", "all layers recomputed (full)"),
    ],
)
def test_layers_that_recompute_are_counted(recompute: str, words: str) -> None:
    layout = parse_layout(f"dp=8,zero=3,recompute={recompute}", num_layers=32, num_devices=8)
    assert _recomputed(layout) == words


@pytest.mark.parametrize("asked", ["tp=2", "zero=3", "pp=2,mbs<=2", "recompute=full"])
def test_why_not_is_what_planning_with_that_pin_finds(asked: str, plan) -> None:
    alone = planned(job_of(plan), Constraints.parse([asked]))
    assert isinstance(alone, Plan)
    answer = why_not(plan, asked)
    found = answer.outcome
    assert (found.rules, found.shortfall) == ((), None)
    assert found.difference.after.layout == alone.layout
    assert found.difference.after.step_seconds == alone.step_seconds >= plan.step_seconds * (1 - WITHIN)
    assert {each.name: each.after for each in found.difference.time} == {
        line.name.value: line.exposed_seconds for line in alone.time
    }
    wanted = {pair.partition("=")[0].rstrip("<") for pair in asked.split(",")}
    said = {"recompute" if "recomputed" in words else words.partition("=")[0] for words in answer.also}
    degrees = {
        key for key in ("tp", "pp", "cp", "mbs", "zero") if getattr(plan.layout, key) != getattr(alone.layout, key)
    }
    assert said & {"tp", "pp", "dp", "cp", "mbs", "zero", "layers_per_stage", "sp", "hsdp"} == degrees - wanted
    assert not said & wanted
    if asked == "zero=3":  # nothing else changed, it is the plan's own layout with one key replaced
        own = plan_for_layout(job_of(plan), replace(plan.layout, zero=3))
        assert own.fits
        assert answer.alone_step_seconds == own.step_seconds


@pytest.mark.parametrize(
    ("own", "asked", "alone"),
    [
        ("zero=1", "tp=2", "tp=2,zero=1"),
        ("tp=2,zero=1", "tp=1", "zero=1"),
        ("tp=4,sp=0,zero=1", "mbs=2", "tp=4,sp=0,zero=1,mbs=2"),
        ("tp=2,zero=1", "tp=4,sp=0", "tp=4,sp=0,zero=1"),
    ],
)
def test_what_is_changed_alone_is_the_layout_that_the_option_layout_completes(own: str, asked: str, alone: str) -> None:
    job = load_job(**JOB, engine="megatron")
    found = why_not(plan_for_text(job, f"{own},recompute=full"), asked)
    assert found.alone_step_seconds == plan_for_text(job, f"{alone},recompute=full").step_seconds


def test_what_is_changed_alone_keeps_experts_divided_as_the_engine_does() -> None:
    options = {"cluster": "dgx-h100", "gpus": 16, "sequence_length": 4096, "global_batch_size": 64}
    job = load_job(model="mixtral-8x7b", engine="megatron", **options)
    found = why_not(plan_for_text(job, "tp=2,pp=2,ep=2,etp=2,zero=1,recompute=full"), "tp=4")
    own = plan_for_text(job, "tp=4,pp=2,ep=2,zero=1,recompute=full")
    assert own.layout.etp == 4
    assert found.alone_step_seconds == own.step_seconds


def test_what_is_not_allowed_alone_names_the_rule(capsys) -> None:
    job = load_job(**JOB)
    with pytest.raises(InputError) as error:
        plan_for_text(job, "pp=2,zero=3")
    found = why_not(plan_for_text(job, "zero=3"), "pp=2")
    (rule,) = found.alone_rules
    assert found.outcome.difference
    assert "no ZeRO-3 with a pipeline" in rule
    assert rule in str(error.value)
    sizes = ["--nodes", "1", "--seq-len", "4096", "--global-batch", "64"]
    assert main(["explain", "llama3.2-1b", "dgx-a100", *sizes, "--layout", "zero=3", "--why-not", "pp=2"]) == 0
    assert f"Changed alone it is not allowed: {rule}." in " ".join(capsys.readouterr().out.split())


def test_why_not_keeps_the_plan_s_own_pins_on_other_keys() -> None:
    pinned = planned(load_job(**JOB), Constraints.parse(["pp=2,tp=2"], ["mbs=1"]))
    assert isinstance(pinned, Plan)
    found = why_not(pinned, "tp=4")
    assert found.pins == ("pp=2", "tp=4")
    alone = planned(job_of(pinned), Constraints.parse(["pp=2,tp=4"], ["mbs=1"]))
    assert found.outcome.difference.after.layout == alone.layout
    allowed = why_not(pinned, "mbs=1").outcome.difference.after
    assert allowed.layout.mbs == 1


@pytest.mark.parametrize("asked", ["tp=3", "tp=16", "zero=1,hsdp=3,dp=8", "schedule=zb-h1", "dp=5"])
def test_why_not_names_the_rule_that_forbids_it(asked: str, plan) -> None:
    found = why_not(plan, asked).outcome
    assert found.rules
    assert not [
        rule for rule in found.rules if rule.startswith(("no layout", "this layout"))
    ]  # the answer says so once
    assert (found.shortfall, found.difference) == (None, None)


def test_why_not_names_the_stage_and_the_bytes_by_which_it_does_not_fit(plan) -> None:
    tight = change_job(job_of(plan), "device.memory=12GiB")
    made = planned(tight, Constraints())
    asked = "pp=2,zero=0,recompute=none,dp=4"
    nearest = planned(tight, Constraints.parse([asked]))
    assert isinstance(made, Plan)
    assert isinstance(nearest, NothingFits)
    found = why_not(made, asked).outcome
    assert (found.rules, found.difference) == ((), None)
    over = {stage.stage: stage.total_bytes - stage.limit_bytes for stage in nearest.memory}
    assert found.shortfall.missing_bytes == max(over.values()) == over[found.shortfall.stage] > 0
    assert found.shortfall.layout == nearest.layout
    lines = {line.name.value: line.num_bytes for line in nearest.memory[found.shortfall.stage].lines}
    assert found.shortfall.largest_line_bytes == max(lines.values()) == lines[found.shortfall.largest_line]


def test_why_not_a_file_prices_the_layout_in_it(plan, tmp_path) -> None:
    other = plan_for_layout(job_of(plan), parse_layout("tp=2,pp=2,zero=1", num_layers=16, num_devices=8))
    (tmp_path / "plan.json").write_text(plan_to_json(other))
    (tmp_path / "layout.json").write_text(json.dumps(json.loads(plan_to_json(other))["layout"]))
    for name in ("plan.json", "layout.json"):
        found = why_not(plan, str(tmp_path / name)).outcome.difference
        assert found == difference_of(plan, other)
    illegal = replace(other.layout, tp=4)
    (tmp_path / "layout.json").write_text(json.dumps({**json.loads(plan_to_json(other))["layout"], "tp": illegal.tp}))
    assert "= 16 devices, and there are 8" in " ".join(why_not(plan, str(tmp_path / "layout.json")).outcome.rules)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"layout": 3}', '{"layout": {"tp": 0}}', '{"tp": "x"}', "\x00", "[" * 9999]
)
def test_a_file_without_a_layout_is_refused(content: str, plan, tmp_path) -> None:
    (tmp_path / "layout.json").write_text(content)
    with pytest.raises(InputError):
        why_not(plan, str(tmp_path / "layout.json"))


@pytest.mark.parametrize("asked", ["sixteen", "tq=2", "tp=x", "missing.json"])
def test_what_is_no_alternative_is_refused(asked: str, plan) -> None:
    with pytest.raises((InputError, EnvironmentProblem)) as error:
        why_not(plan, asked)
    assert "--pin" not in str(error.value)


# --- what if ------------------------------------------------------------------------------------------------------

AS_SETTINGS = {
    "within_node.bandwidth=x2": "nvlink.bandwidth=600 GB/s",
    "nvlink.bandwidth=-50%": "nvlink.bandwidth=150 GB/s",
    "between_nodes.latency=16us": "infiniband.latency=16 us",
    "device.memory=141GiB": "device.memory=141GiB",
    "precision=fp32": "training.precision=fp32",
    "model.num_layers=x2": "model.num_layers=32",
    "device.peak.bf16=+100%": "device.peak.bf16=624 TFLOP/s",
}


@pytest.mark.parametrize("asked", AS_SETTINGS)
def test_a_changed_job_is_the_one_with_the_changed_document(asked: str) -> None:
    changed = change_job(load_job(**JOB), asked)
    assert changed == load_job(**JOB, settings=(AS_SETTINGS[asked],))
    assert changed != load_job(**JOB)


def test_changes_join_and_sizes_are_those_of_the_options() -> None:
    job = load_job(model="llama3.2-1b", cluster="dgx-a100", nodes=4, global_batch_size=64)
    wanted = {"model": "llama3.2-1b", "cluster": "dgx-a100", "global_batch_size": 64}
    assert change_job(job, "nodes=x2, headroom=10%") == load_job(**wanted, nodes=8, headroom=0.1)
    assert change_job(job, "seq_len=32k,global_batch=x2") == load_job(
        **{**wanted, "global_batch_size": 128}, nodes=4, sequence_length=32768
    )
    assert change_job(job, "gpus=2") == load_job(**wanted, gpus=2)
    assert change_job(job, "gpus=x0.25") == load_job(**wanted, gpus=8)
    assert change_job(job, "engine=megatron") == load_job(**wanted, nodes=4, engine="megatron")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("", "no change"),
        ("nvlink", "not a change"),
        ("plan.json", "before the option"),
        ("nvlnk.bandwidth=x2", "nvlink"),
        ("device.memroy=x2", "memory"),
        ("device.memory=80", "unit"),
        ("device.name=x2", "multiply"),
        ("nodes=0", "at least 1"),
        ("gpus=12", "whole number"),
        ("gpus=-1", "number of devices"),
        ("headroom=100%", "share"),
        ("precision=fp8", "fp8"),
        ("engine=torhc", "torch"),
        ("seq_len=banana", "number"),
        ("model.vocab_size=x-2", "number"),
    ],
)
def test_what_is_no_change_is_refused_by_name(asked: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        change_job(load_job(**JOB), asked)
    assert said in str(error.value)


@pytest.mark.parametrize("asked", ["device.memory=24GiB", "seq_len=8k,global_batch=64", "within_node.bandwidth=x0.01"])
def test_what_if_is_what_planning_the_changed_document_finds(asked: str, plan) -> None:
    job = change_job(job_of(plan), asked)
    alone = planned(job, Constraints())
    found = what_if(plan, asked)
    assert found.outcome.difference == difference_of(plan, alone) or isinstance(alone, NothingFits)
    assert found.same_layout.step_seconds == plan_for_layout(job, plan.layout).step_seconds
    if found.same_layout.fits:
        assert found.outcome.difference.after.step_seconds <= found.same_layout.step_seconds * (1 + WITHIN)


RUN = JOB | {"settings": ("training.tokens=10e9", "training.deadline=30h")}


@pytest.fixture(scope="module", params=[("gpus", CONFIDENCE), ("gpus", 0.5), ("cost", 0.9)])
def plan_in_time(request) -> Plan:
    """A plan by an objective that keeps a deadline."""
    found = planned(load_job(**RUN), Constraints(), *request.param)
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("asked", [f"training.{each}" for each in ("deadline=30h", "deadline=60h", "tokens=15e9")])
def test_what_if_keeps_objective_and_confidence_and_takes_the_changed_deadline(asked: str, plan_in_time) -> None:
    job, options = load_job(**RUN | {"settings": (*RUN["settings"], asked)}), plan_in_time.options
    alone = planned(job, Constraints(), options.objective, options.confidence)
    found = what_if(plan_in_time, asked).outcome.difference
    assert found == difference_of(plan_in_time, alone)
    if asked in RUN["settings"]:
        assert (found.inputs, found.layout) == ((), ())


def test_why_not_keeps_objective_and_confidence(plan_in_time) -> None:
    options = plan_in_time.options
    alone = planned(load_job(**RUN), Constraints.parse(["tp=2"]), options.objective, options.confidence)
    assert why_not(plan_in_time, "tp=2").outcome.difference == difference_of(plan_in_time, alone)


def test_what_if_of_a_given_layout_tells_the_change_from_planning(plan) -> None:
    job = job_of(plan)
    given = plan_for_layout(job, parse_layout("tp=4,pp=1,dp=2,zero=1,sp=1", num_layers=16, num_devices=8))
    found = what_if(given, "within_node.bandwidth=x0.5")
    best = search(job, Constraints(), within=0)
    assert found.step_seconds == given.step_seconds
    assert found.best_step_seconds == pytest.approx(best.step_seconds, rel=1e-12)
    assert what_if(plan, "within_node.bandwidth=x0.5").best_step_seconds is None


def test_what_if_answers_where_the_search_may_try_nothing(plan, monkeypatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise InputError("no layout is legal")

    monkeypatch.setattr("planner.answers.what_if.plan_again", refuses)
    given = plan_for_layout(job_of(plan), parse_layout("tp=4,pp=1,dp=2,zero=1,sp=1", num_layers=16, num_devices=8))
    found = what_if(given, "within_node.bandwidth=x0.5")
    assert found.best_step_seconds is None
    assert found.same_layout is not None


def test_what_if_of_something_too_small_says_what_is_missing(plan) -> None:
    assert what_if(plan, "device.memory=1GiB").outcome.shortfall.missing_bytes > 0
    assert what_if(plan, "gpus=2").same_layout is None


@pytest.mark.parametrize("model", ["llama3.2-1b", pytest.param("gpt2-xl", marks=pytest.mark.slow)])
def test_more_of_anything_is_never_slower(model: str) -> None:
    job = load_job(model=model, cluster="dgx-a100", nodes=2, sequence_length=1024, global_batch_size=64)
    found = search(job, Constraints.parse(["mbs<=2"]))
    assert isinstance(found, Plan)
    told: list[str] = []
    table = sensitivity_of(found, told.append)
    assert [each.gain for each in table.gains] == sorted((each.gain for each in table.gains), reverse=True)
    assert {each.resource for each in table.gains} >= {"peak FLOP/s", "memory", "hosts", "nvlink bandwidth"}
    for each in table.gains:
        assert each.gain >= -1e-12, each
        assert each.same_layout_gain is None or each.same_layout_gain >= -1e-12, each
        changed = search(change_job(job, each.change), Constraints.parse(["mbs<=2"]))
        assert each.step_seconds == pytest.approx(changed.step_seconds, rel=1e-9)
    assert len(told) == len(table.gains) + 1
    peak = next(each for each in table.gains if each.resource == "peak FLOP/s")
    assert 0 < peak.gain < 1 - 1 / 1.1 + 1e-9, "10 % more of one resource makes a step at most 9.1 % shorter"


def test_more_of_anything_counts_by_the_plan_s_objective(plan_in_time) -> None:
    options, job = plan_in_time.options, load_job(**RUN)
    quantity = {
        "gpus": lambda found: found.layout.world_size,
        "cost": lambda found: found.layout.world_size * found.step_seconds,
    }[options.objective]
    now = search_in_time(job, Constraints(), options.objective, confidence=options.confidence)
    table = sensitivity_of(plan_in_time)
    assert table.step_seconds == now.step_seconds
    assert table.objective == options.objective
    few = None if options.objective == "gpus" and options.confidence == CONFIDENCE else 2  # the largest gains
    for each in table.gains[:few]:
        then = search_in_time(
            change_job(job, each.change), Constraints(), options.objective, confidence=options.confidence
        )
        assert each.step_seconds == then.step_seconds, each
        saved = 1 - quantity(then) / quantity(now) or 1 - then.step_seconds / now.step_seconds
        assert each.gain == pytest.approx(saved), each
        own = plan_for_layout(change_job(job, each.change), plan_in_time.layout).step_seconds
        assert each.same_layout_gain == 1 - own / plan_in_time.step_seconds, each


def test_what_is_there_now_for_least_memory_is_the_smallest_layout() -> None:
    least = planned(load_job(**JOB), Constraints(), "memory")
    best = search_in_time(load_job(**JOB), Constraints(), "memory", confidence=CONFIDENCE)
    assert sensitivity_of(least).step_seconds == best.step_seconds


def test_sensitivity_of_a_layout_that_was_given_is_about_it(plan) -> None:
    worse = plan_for_layout(job_of(plan), parse_layout("tp=8,recompute=full", num_layers=16, num_devices=8))
    table = sensitivity_of(worse)
    assert table.step_seconds == pytest.approx(worse.step_seconds)
    for each in table.gains:
        assert each.gain == pytest.approx(1 - each.step_seconds / worse.step_seconds)
        assert not each.other_layout


def test_the_fastest_layout_beside_a_given_one(plan) -> None:
    worse = plan_for_layout(job_of(plan), parse_layout("tp=8,recompute=full", num_layers=16, num_devices=8))
    assert fastest_seconds(worse) == pytest.approx(plan.minimum.step_seconds)
    assert fastest_seconds(plan_for_layout(job_of(plan), plan.minimum.layout)) is None


def test_sensitivity_says_what_was_there_and_what_is_then() -> None:
    job = load_job(model="gpt2", cluster="dgx-a100", nodes=11, sequence_length=1024, global_batch_size=88)
    table = sensitivity_of(plan_for_layout(job, parse_layout("mbs=1", num_layers=12, num_devices=88)))
    for each in table.gains:
        if each.resource == "hosts":
            continue
        before, after = (float(text.split()[0]) for text in (each.before, each.after))
        less = "latency" in each.resource or each.resource == "host overhead"
        assert after / before == pytest.approx(0.9 if less else 1.1, rel=1e-5)
    assert {each.resource: (each.before, each.after) for each in table.gains}["hosts"] == ("11", "13")


# --- scaling ------------------------------------------------------------------------------------------------------


def test_scaling_is_the_best_plan_of_each_size(plan) -> None:
    found = scaling_of(plan, "1..32")
    assert [each.num_devices for each in found.sizes] == [1, 2, 4, 8, 16, 32]
    wanted = {key: value for key, value in JOB.items() if key != "gpus"}
    rates = []
    for each in found.sizes:
        alone = search(load_job(**wanted, gpus=each.num_devices), Constraints())
        assert each.step_seconds == pytest.approx(alone.step_seconds, rel=1e-9)
        rates.append(64 * 4096 / alone.step_seconds / each.num_devices)
    best = max(rates)
    assert [each.efficiency for each in found.sizes] == pytest.approx([rate / best for rate in rates])
    assert found.most_efficient == found.sizes[rates.index(best)].num_devices


def test_scaling_breaks_where_a_step_has_no_work_left(plan) -> None:
    """64 sequences for 512 devices: the devices cannot be kept busy, and the size names the line that grew most."""
    found = scaling_of(plan, "8..512")
    assert found.breaks_at is not None
    broken = next(each for each in found.sizes if each.num_devices == found.breaks_at)
    assert broken.efficiency < 0.8
    assert found.breaks_by == broken.grown_line is not None
    parts = []
    for size in (found.most_efficient, found.breaks_at):
        job = change_job(job_of(plan), f"gpus={size}")
        layout = next(each.layout for each in found.sizes if each.num_devices == size)
        waterfall = waterfall_of(job, layout, estimate(job, layout))
        parts.append({part.name: size * part.seconds for part in waterfall.parts})
    growth = {name: seconds - parts[0].get(name, 0.0) for name, seconds in parts[1].items()}
    name = max(growth, key=growth.get)
    assert (broken.grown_line, broken.grown_share) == (name, pytest.approx(growth[name] / sum(parts[1].values())))


def test_scaling_says_what_is_missing() -> None:
    job = load_job(model="llama3-70b", cluster="dgx-a100", nodes=8, global_batch_size=64)
    plan = plan_for_layout(job, parse_layout("tp=8,pp=8,recompute=full,zero=1", num_layers=80, num_devices=64))
    found = scaling_of(plan, "1..2")
    assert [each.missing for each in found.sizes] == ["nothing fits"] * 2
    assert found.most_efficient is None


@pytest.mark.parametrize("text", ["", "8", "8..4", "0..8", "a..b", "1..2..3", "1..99999999"])
def test_what_is_no_range_is_refused(text: str, plan) -> None:
    with pytest.raises(InputError):
        scaling_of(plan, text)


@given(st.integers(1, 100), st.integers(1, 5000), st.integers(0, 5000))
def test_sizes_are_those_that_a_cluster_can_have(per_host: int, low: int, more: int) -> None:
    job = load_job(**JOB)
    cluster = job.cluster.model_copy(update={"devices_per_host": per_host})
    sizes = list(sizes_between(f"{low}..{low + more}", replace(job, cluster=cluster)))
    assert sizes == sorted(set(sizes))
    assert all(low <= size <= low + more and (size < per_host or size % per_host == 0) for size in sizes)
    if low % per_host == 0:
        assert low in sizes


# --- collectives --------------------------------------------------------------------------------------------------


def test_groups_are_whole_and_their_seconds_are_the_ledger_s(any_plan) -> None:
    found = collectives_of(any_plan)
    for line in any_plan.time:
        mine = [each for each in found.groups if each.line == line.name]
        if line.name.value.endswith("_comm") and line.name != LineName.HOST_COMM:
            total = sum(use.seconds_per_step for each in mine for use in each.uses)
            assert total == pytest.approx(float(line.busy_seconds), rel=1e-9, abs=1e-12)
        for each in mine:
            layout = any_plan.layout
            in_pool = each.pool if each.stride < layout.stride("pp") else ""
            first = layout.pools.index(in_pool) * layout.stride("pp") if in_pool else 0
            assert each.first_ranks == tuple(range(first, first + each.size * each.stride, each.stride))[:16]
            if line.name in (LineName.TP_COMM, LineName.PP_COMM, LineName.EP_COMM, LineName.CP_COMM):
                stages = layout.pools.count(in_pool) if in_pool else layout.pp
                assert each.num_groups * each.size == stages * layout.stride("pp")


def test_groups_of_experts_stand_apart(any_plan) -> None:
    """Experts are replicated over dp * cp * tp / (ep * etp) ranks, all other parameters over dp * cp ranks."""
    layout = any_plan.layout
    found = [each for each in collectives_of(any_plan).groups if each.line == LineName.DP_COMM]
    for experts in (False, True):
        sizes = [each.size for each in found if each.experts == experts]
        ranks = layout.dp * layout.cp * (layout.tp if experts else 1) // (layout.ep * layout.etp if experts else 1)
        held = any_plan.model.moe is not None if experts else True
        assert math.prod(sizes) == (ranks if held else 1)


def test_replicas_of_experts_are_groups_of_their_own() -> None:
    job = load_job(
        model="mixtral-8x7b",
        cluster="dgx-h100",
        nodes=4,
        sequence_length=4096,
        global_batch_size=256,
        engine="megatron",
    )
    layout = parse_layout("tp=2,pp=2,ep=4,etp=1,zero=1", num_layers=32, num_devices=32)
    found = [each for each in collectives_of(plan_for_layout(job, layout)).groups if each.line == LineName.DP_COMM]
    assert {each.experts: (each.size, each.stride) for each in found} == {False: (8, 2), True: (4, 4)}


def test_groups_tell_what_of_their_line_is_hidden(any_plan) -> None:
    lines = {line.name: line for line in any_plan.time}
    for each in collectives_of(any_plan).groups:
        line = lines[each.line]
        assert each.line_busy_seconds == line.busy_seconds
        assert each.line_busy_seconds - each.line_hidden_seconds == pytest.approx(float(line.exposed_seconds))


def slower(link, times):
    delays = {name: times * getattr(link, name) for name in ("latency", "startup")}
    return link.model_copy(update={"bandwidth": link.bandwidth / times, **delays})


def test_the_algorithm_of_the_estimate_is_the_cheapest_that_the_library_has(any_plan) -> None:
    for each in collectives_of(any_plan).groups:
        chosen = [algorithm for algorithm in each.algorithms if algorithm.chosen]
        if each.algorithm_bytes:
            cluster, (entry, *_) = any_plan.cluster, any_plan.calibration  # links have the same factors on every device
            factors = (entry.scale_up, entry.network)
            if len(cluster.pools) > 1:
                pools = {pool.name: pool for pool in cluster.pools}
                if each.pool not in pools:
                    factors = (entry.network,)
                across = pools["h100"].model_copy(update={"links": (cluster.between,)})
                cluster = pools.get(each.pool, across)
            links = zip(cluster.links, factors, strict=False)
            cluster = cluster.model_copy(update={"links": tuple(slower(link, times) for link, times in links)})
            where = group(cluster, each.size, each.stride, segment=any_plan.layout.segment)
            (one,) = chosen
            assert one.seconds == pytest.approx(float(all_reduce_seconds(where, each.algorithm_bytes)), rel=1e-12)
        else:
            assert not each.algorithms


def test_not_waiting_saves_the_exposed_reduction_and_costs_staleness(any_plan) -> None:
    found = collectives_of(any_plan).asynchronous
    exposed = next(float(line.exposed_seconds) for line in any_plan.time if line.name == LineName.DP_COMM)
    if any_plan.layout.dp == 1:
        assert found is None
    else:
        assert found.saved_seconds == exposed
        assert found.saved_share * any_plan.step_seconds == pytest.approx(exposed)
        assert found.staleness_updates == any_plan.layout.dp - 1


# --- schedules ----------------------------------------------------------------------------------------------------


def equal_stages(m: int, schedule: str = "1f1b", interleave: int = 1) -> Plan:
    """8 stages with 4 layers each, equal except for embedding and head."""
    job = load_job(model="llama3-8b", cluster="dgx-a100", nodes=1, sequence_length=2048, global_batch_size=m)
    text = f"pp=8,schedule={schedule},interleave={interleave},zero=1"
    return plan_for_layout(job, parse_layout(text, num_layers=32, num_devices=8))


@pytest.mark.parametrize("m", [8, 32, 128])
def test_schedules_reproduce_the_textbook(m: int) -> None:
    """(p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) interleaved, p - 1 for naive; utilization is m / (m + p - 1)."""
    found = {row.schedule: row for row in schedules_of(equal_stages(m)).rows}
    p = 8
    for name, share in {
        "naive": p - 1,
        "gpipe": (p - 1) / m,
        "1f1b": (p - 1) / m,
        "interleaved": (p - 1) / (2 * m),
    }.items():
        assert found[name].equal_stages_bubble_share == pytest.approx(share, rel=1e-9), name
    equal = found["1f1b"].equal_stages_bubble_share
    assert 1 / (1 + equal) == pytest.approx(m / (m + p - 1))
    for row in found.values():
        if row.missing:
            assert (row.schedule, row.step_seconds) == ("dualpipev", None)
            continue
        assert row.utilization == pytest.approx(1 / (1 + row.bubble_share))
    assert found["gpipe"].bubble_share == pytest.approx(found["1f1b"].bubble_share, rel=0.2)
    more = found["gpipe"].activation_bytes / found["1f1b"].activation_bytes
    assert more == pytest.approx(m / min(m, p), rel=1e-9), "GPipe holds m microbatches, 1F1B p"
    assert (found["pipedream"].staleness_steps, found["1f1b"].staleness_steps) == (p - 1, 0)
    assert [found[name].engine_has_it for name in ("1f1b", "gpipe", "zbv")] == [True, True, True]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_textbook_s_words_are_the_bubble_of_the_sketch(schedule) -> None:
    """Equal passes, executed: the wait of a stage between its first and last pass, divided by its work."""
    row = next(each for each in schedules_of(equal_stages(32)).rows if each.schedule == schedule)
    stages, microbatches, chunks = 4, 8, 2
    names = {"p": stages, "m": microbatches, "v": chunks}
    words = row.textbook.replace("(v m)", "(v * m)").replace("(3 m)", "(3 * m)").replace("(6 m)", "(6 * m)")
    expected = eval(words, {}, names)
    found = sketch(schedule, stages, chunks)
    work = 3 * microbatches * found.interleave
    if schedule == "pipedream":
        assert expected == 0
        return
    span = max(each.end for each in found.passes)
    if schedule == "zbv":  # the zero of ZB-V counts from a stage's own first pass; the step is longer by the way there
        assert work <= span <= work * (1 + expected) + 2 * stages
        return
    assert span == pytest.approx(work * (1 + expected), rel=1e-9)


def test_a_sketch_runs_every_pass_once_and_none_at_the_same_time() -> None:
    for schedule in SCHEDULES:
        found = sketch(schedule, 4, 2)
        rows = draw(found)
        assert len({len(row) for row in rows}) == 1
        for stage, row in enumerate(rows):
            mine = [each for each in found.passes if each.stage == stage]
            assert len({(each.kind, each.microbatch, each.chunk) for each in mine}) == len(mine)
            work = sum(2 if each.kind == "B" else 1 for each in mine)
            assert len(row) - row.count(".") == work, (schedule, row)


def test_the_drawing_of_1f1b_is_the_textbook_s() -> None:
    assert draw(sketch("1f1b", 2, 1)) == ["12..AA3BB4CC5DD6EE7FF8GG.HH", ".1AA2BB3CC4DD5EE6FF7GG8HH.."]


# --- batch --------------------------------------------------------------------------------------------------------


def test_batches_are_those_that_pricing_finds(plan) -> None:
    found = batch_of(plan)
    job = job_of(plan)
    assert plan.layout.mbs in [each.mbs for each in found.sizes]
    for each in found.sizes:
        alone = plan_for_layout(job, replace(plan.layout, mbs=each.mbs))
        assert (each.step_seconds, each.fits) == (alone.step_seconds, alone.fits)
    best = max(found.sizes, key=lambda each: each.sequences_per_second)
    flat = next(each for each in found.sizes if each.mbs == found.flat_from)
    assert flat.sequences_per_second >= 0.95 * best.sequences_per_second
    assert all(each.of_best < 0.95 for each in found.sizes if each.mbs < found.flat_from)
    for each in found.batches:
        alone = plan_for_layout(change_job(job, f"global_batch={each.sequences}"), plan.layout)
        assert each.tokens_per_second_per_device == alone.tokens_per_second_per_device


@pytest.mark.parametrize("kind", ["uneven, recompute", "interleaved", "tied, without sequence parallelism"])
def test_speed_of_a_size_is_what_more_microbatches_cost(kind: str, plan_of_kind) -> None:
    """Bubble and tail do not depend on the length of the step, so the difference is the slowest stage's work."""
    plan = plan_of_kind(kind)
    found = batch_of(plan)
    assert len(found.sizes) >= 3
    speeds = []
    for each in found.sizes:
        twice, four_times = (
            plan_for_layout(
                change_job(job_of(plan), f"global_batch=x{times}"), replace(plan.layout, mbs=each.mbs)
            ).step_seconds
            for times in (2, 4)
        )
        sequences = plan.training.global_batch_size * 2 / plan.layout.dp
        speeds.append(sequences / (four_times - twice))
        assert each.sequences_per_second == pytest.approx(speeds[-1])
    assert [each.of_best for each in found.sizes] == pytest.approx([speed / max(speeds) for speed in speeds])
    flat = [each.mbs for each, speed in zip(found.sizes, speeds, strict=True) if speed >= 0.95 * max(speeds)]
    assert found.flat_from == flat[0]


def test_bubble_shrinks_and_tokens_grow_with_the_batch() -> None:
    found = batch_of(equal_stages(32)).batches
    assert len(found) >= 3
    for less, more in pairwise(found):
        assert more.bubble_share < less.bubble_share
        assert more.tokens_factor > less.tokens_factor > 1
        assert more.learning_rate_sgd / less.learning_rate_sgd == pytest.approx(2)
        assert more.learning_rate_adam / less.learning_rate_adam == pytest.approx(2**0.5)


# --- differences --------------------------------------------------------------------------------------------------


def test_a_plan_does_not_differ_from_itself(any_plan) -> None:
    found = difference_of(any_plan, any_plan)
    assert (found.inputs, found.layout) == ((), ())
    assert all(each.before == each.after for each in (*found.time, *found.memory))


def test_a_difference_names_what_was_changed_and_adds_up(plan) -> None:
    job = change_job(job_of(plan), "nvlink.bandwidth=x0.1,device.memory=x0.5")
    other = plan_for_layout(job, parse_layout("tp=2,pp=2,zero=1", num_layers=16, num_devices=8))
    found, back = difference_of(plan, other), difference_of(other, plan)
    paths = {each.path for each in found.inputs}
    assert {"cluster.links.nvlink.bandwidth", "cluster.device.memory"} <= paths
    assert {each.path for each in found.layout} >= {"tp", "pp"}
    assert sum(each.after - each.before for each in found.time) == pytest.approx(other.step_seconds - plan.step_seconds)
    assert sum(each.after for each in found.memory) == pytest.approx(found.after.peak_bytes)
    assert (back.before, back.after) == (found.after, found.before)
    assert [(each.path, each.after, each.before) for each in back.layout] == [
        (each.path, each.before, each.after) for each in found.layout
    ]
