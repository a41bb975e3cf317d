"""Layouts and stages in words."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.layout import Layout, balanced_chunks
from planner.layout_text import parse_layout
from planner.plan import Minimum
from planner.plan_parts import Keys, MadeBy, Recommendation
from planner.search.space.constraints import Constraints
from planner.show.words import (
    certificate_sentence,
    change,
    fold_runs,
    layers_words,
    layout_words,
    percent,
    recompute_words,
    run_words,
    short_layout,
    stage_range,
)

POLICIES = st.sampled_from(["none", "selective", "full"])
DEGREES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp, interleave = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3]))
    layers = draw(st.lists(st.integers(interleave, 9), min_size=pp, max_size=pp))
    tp = draw(DEGREES)
    return Layout(
        tp=tp,
        pp=pp,
        dp=draw(DEGREES),
        cp=draw(DEGREES),
        zero=draw(st.integers(0, 3)),
        mbs=draw(DEGREES),
        interleave=interleave,
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "interleaved"])),
        sp=draw(st.sampled_from([0, 1])),
        recompute=tuple(draw(st.lists(POLICIES, min_size=pp, max_size=pp))) * interleave,
        layers_per_stage=balanced_chunks(tuple(layers), interleave),
    )


@given(layouts())
def test_short_layout_can_be_given_back_to_the_command_line(layout: Layout) -> None:
    text = short_layout(layout)
    assert parse_layout(text, num_layers=sum(layout.layers_per_stage), num_devices=layout.world_size) == layout


def test_short_layout_leaves_out_what_is_assumed() -> None:
    layout = Layout(tp=2, pp=2, dp=4, sp=1, recompute=("none",) * 2, layers_per_stage=(4, 4))
    assert short_layout(layout) == "tp=2,pp=2,dp=4,zero=0,sp=1,recompute=none"  # these three are the engine's


def test_lists_are_counted() -> None:
    layout = Layout(pp=4, recompute=("none", "full", "full", "full"), layers_per_stage=(9, 1, 1, 2))
    assert short_layout(layout) == "tp=1,pp=4,dp=1,recompute=none/3*full,layers_per_stage=9/2*1/2"


@given(layouts())
def test_short_layout_can_be_pinned(layout: Layout) -> None:
    pinned = Constraints.parse([short_layout(layout)])
    layers = pinned.per_chunk("layers_per_stage")
    assert layers is None or layers == tuple(map(str, layout.layers_per_stage))
    recompute = pinned.value_of("recompute")
    policies = layout.recompute if recompute and "/" in recompute else layout.recompute[:1]
    assert recompute is None or tuple(recompute.split("/")) == policies


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20))
def test_layers_in_words_say_every_stage(layers: list[int]) -> None:
    words = layers_words(layers)
    runs = re.findall(r"(?:(\d+) x )?(\d+)", words)
    said = [int(value) for count, value in runs for _ in range(int(count or 1))]
    assert (said * len(layers) if "each" in words else said) == layers


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        (("full",), "full"),
        (("none", "none"), "none"),
        (("full", "full", "none", "selective"), "full on stages 0..1, none on stage 2, selective on stage 3"),
    ],
)
def test_recompute_in_words(policies: tuple[str, ...], words: str) -> None:
    layout = Layout(pp=len(policies), recompute=policies, layers_per_stage=(1,) * len(policies))
    assert recompute_words(layout) == words


def test_layout_in_words() -> None:
    one = Layout(recompute=("none",), layers_per_stage=(1,))
    assert layout_words(one) == "one device"
    many = Layout(tp=8, pp=2, dp=4, cp=2, zero=3, hsdp=2, recompute=("none",) * 2, layers_per_stage=(1, 1))
    assert layout_words(many) == (
        "8-way tensor parallel, 2-stage pipeline, 2-way context parallel, 4-way data parallel, ZeRO-3 in 2 replicas"
    )


@given(st.lists(st.integers(0, 2), max_size=30))
def test_folded_runs_lose_nothing_and_are_alike(values: list[int]) -> None:
    groups = fold_runs(values, lambda value: value)
    assert [value for group in groups for value in group] == values
    assert all(len(set(group)) == 1 for group in groups)
    assert all(a[-1] != b[0] for a, b in pairwise(groups))


def test_stage_range() -> None:
    assert stage_range([3]) == "stage 3"
    assert stage_range([2, 3, 4]) == "stages 2..4"


def test_certificate_claims_the_optimum_only_when_it_is_proved(make_plan) -> None:
    plan = make_plan()
    proved = certificate_sentence(plan)
    assert proved.startswith("Optimal: by the forecast no other layout in the search space is faster.")
    assert "1,234 configurations" in proved
    stopped = replace(plan, certificate=replace(plan.certificate, status="time limit", gap=0.031))
    said = certificate_sentence(stopped)
    assert said.startswith("Not proved optimal (time limit)")
    assert "may be up to 3.10% faster" in said
    assert "ptimal:" not in said
    for objective, words in (("cost", "cost up to 3.10% less"), ("gpus", "need up to 3.10% fewer devices")):
        other = replace(stopped, certificate=replace(stopped.certificate, objective=objective))
        assert words in certificate_sentence(other)
    none = tuple(replace(stage, limit_bytes=1.0) for stage in plan.memory)
    assert certificate_sentence(replace(stopped, memory=none)).startswith("None fits. Not proved optimal")
    assert certificate_sentence(replace(plan, certificate=None)) == ""
    assert "Not searched" not in proved
    partial = replace(plan, certificate=replace(plan.certificate, not_searched=("some stages", "other stages")))
    assert certificate_sentence(partial) == f"{proved} Not searched: some stages; other stages."


def test_what_others_proved_is_not_said_of_the_figures_shown(make_plan) -> None:
    other = MadeBy(planner_version="0.0.9", digest="0" * 16, calibration="shipped")
    said = certificate_sentence(make_plan(proved_by=other))
    assert said.startswith("Proved by planner 0.0.9 with other formulas, not of the figures shown")
    assert "CBC and a dynamic program decided" in said


@pytest.mark.parametrize("objective", ["throughput", "cost", "gpus", "memory"])
def test_a_plan_that_is_easier_to_run_is_not_called_optimal(objective: str, make_plan) -> None:
    """The window is stated, and `minimum` can be passed to the command line again."""
    least = Layout(pp=2, recompute=("none",) * 2, layers_per_stage=(5, 3))
    keys = Keys(machines=1, unseen=0, axes=2, by_hand=0, chunks=1, risk=0, uneven=0)
    minimum = Minimum(layout=least, step_seconds=4.0, peak_bytes=1e9, keys=keys, above=0.01, reason="fewer axes")
    told = Recommendation(within=0.02, num_listed=3, keys=keys)
    plan = make_plan()
    certificate = replace(plan.certificate, objective=objective, recommendation=told)
    sentence = certificate_sentence(replace(plan, certificate=certificate, minimum=minimum))
    assert sentence.startswith(
        "The easiest to run of 3 layouts within 2% of the proven minimum: by the forecast no layout"
    )
    assert "Optimal" not in sentence
    assert f"{short_layout(least)} (4.00 s)" in sentence


def test_whole_run_takes_steps_times_seconds(make_plan) -> None:
    # 300e9 tokens / (1536 * 2048 tokens) = 95,368 steps of 39.5 s = 43.6 days; 128 devices in use at 2 USD/h
    words = run_words(make_plan(low_step_seconds=None))
    assert words == "300 B tokens in 43.6 d: 134 k device hours, 268 k USD of the devices in use"
    # 37.1 s and 42.3 s a step
    assert run_words(make_plan()).startswith("300 B tokens in 43.6 d (41.0 d to 46.7 d in 8 of 10 runs): 134 k device")


def test_whole_run_says_whether_the_deadline_is_met(make_plan, plan) -> None:
    def words(days: float) -> str:
        deadline = {"deadline": days * 86400.0, "price": 3.0}
        return run_words(make_plan(training=plan.training.model_copy(update=deadline)))

    assert words(44).endswith("402 k USD of the devices in use; meets the deadline of 44.0 d")
    assert words(43).endswith("402 k USD of the devices in use; MISSES the deadline of 43.0 d")
    assert run_words(make_plan(training=plan.training.model_copy(update={"tokens": None}))) == ""


@pytest.mark.parametrize(
    ("chance", "asked", "said"),
    [
        (0.83, 0.8, "meets the deadline of 44.0 d in 8 of 10 runs"),
        (0.79, 0.8, "MISSES the deadline of 44.0 d: met in 7 of 10 runs"),
        (0.99, 0.8, "meets the deadline of 44.0 d in 9 of 10 runs"),
        (1.0, 0.8, "meets the deadline of 44.0 d in more than 9 of 10 runs"),
        (0.03, 0.8, "MISSES the deadline of 44.0 d: met in fewer than 1 of 10 runs"),
        (0.6, None, "meets the deadline of 44.0 d in 6 of 10 runs"),
    ],
)
def test_a_deadline_is_met_in_so_many_of_ten_runs(chance, asked, said, make_plan, plan) -> None:
    training = plan.training.model_copy(update={"deadline": 44 * 86400.0})
    options = replace(plan.options, confidence=asked)
    assert run_words(make_plan(training=training, deadline_chance=chance, options=options)).endswith(said)


def test_counts_of_a_certificate_are_said_and_those_of_nothing_are_not(make_plan) -> None:
    plan = make_plan()
    proved = replace(
        plan.certificate,
        num_cuts=6157,
        num_cuts_pruned=5062,
        num_legal=1200,
        num_decided=29,
        num_pruned={"memory": 1001, "time bound": 170},
    )

    def sentence(**changes: object) -> str:
        return certificate_sentence(replace(plan, certificate=replace(proved, **changes)))

    for words in (
        "5,062 of 6,157 ways",
        "1,171 of 1,200 configurations",
        "1,001 cannot fit",
        "170 cannot be",
        "the 29",
    ):
        assert words in sentence()
    assert "ways to cut" not in sentence(num_cuts_pruned=0)
    assert "cannot fit" not in sentence(num_pruned={"memory": 0})
    assert "the one that is left" in sentence(num_decided=1)
    assert "solved all the same" not in sentence()
    assert "64 of these were solved all the same" in sentence(num_bounds_checked=64)
    assert "A dynamic program alone decided" in sentence(solver="dynamic program")
    assert "CBC did not finish on the 29" in sentence(status="time limit")
    assert "decided" not in sentence(status="interrupted")


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "0%"), (0.004, "<1%"), (0.005, "0%"), (0.006, "1%"), (0.25, "25%"), (1.0, "100%")]
)
def test_what_is_too_little_to_see_is_not_nothing(share: float, words: str) -> None:
    assert percent(share) == words


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "-"), (0.0004, "-"), (-0.0004, "-"), (0.031, "+3.1%"), (-0.031, "-3.1%"), (-0.12, "-12%"), (0.0996, "+10%")],
)
def test_growth_has_a_sign(share: float, words: str) -> None:
    assert change(share) == words
