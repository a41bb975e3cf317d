"""The check before a plan is written for a program or started: by verdict, with and without force."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.ledger import HostMemory
from planner.errors import ExitCode, InputError, NothingFitsError
from planner.layout import Assumed
from planner.verdict import chance_words, check_fits, fit_words


def with_limits(plan, limit, most, chance):
    stages = [replace(stage, limit_bytes=limit, most_bytes=most, device_chance=chance) for stage in plan.memory]
    return replace(plan, memory=tuple(stages))


def test_what_fits_passes_what_may_not_is_told_and_what_does_not_is_refused(plan):
    told = []
    check_fits(plan, tell=told.append)
    assert told == []
    unsure = with_limits(plan, 60 * 2**30, 70 * 2**30, 0.61)
    check_fits(unsure, tell=told.append)
    assert told == ["this plan may not fit into memory: stage 0 needs 64.8 GiB of 80.0 GiB; chance of fitting 61%"]
    large = with_limits(plan, 50 * 2**30, 60 * 2**30, 0.021)
    with pytest.raises(
        NothingFitsError, match=r"does not fit into memory: stage 0 .* 2%(.|\n)*--force-unfit"
    ) as caught:
        check_fits(large, tell=told.append)
    assert caught.value.exit_code == ExitCode.NOTHING_FITS
    check_fits(large, force_unfit=True, tell=told.append)
    assert len(told) == 2
    assert "does not fit" in told[1]


def test_a_host_that_overflows_is_told_as_the_host_s(plan):
    line = replace(plan.memory[2].lines[0], num_bytes=100 * 2**30)
    stage = replace(
        plan.memory[2], host=HostMemory(limit_bytes=85 * 2**30, most_bytes=90 * 2**30, chance=0.012, lines=(line,))
    )
    full = replace(plan, memory=(*plan.memory[:2], stage, plan.memory[3]))
    assert (full.verdict, full.chance_of_fitting) == ("does not fit", 0.012)
    words = "each device of stage 2 keeps 15.0 GiB too much in its host's memory; chance of fitting 1%"
    assert fit_words(full) == words
    unsure = replace(stage, host=replace(stage.host, most_bytes=101 * 2**30, chance=0.3))
    assert (unsure.verdict, unsure.chance_of_fitting) == ("may not fit", 0.3)
    assert replace(unsure, device_chance=0.1).chance_of_fitting == 0.1


def test_headroom_that_is_missed_says_what_is_left(plan):
    tight = with_limits(plan, 60 * 2**30, 60 * 2**30, 0.97)
    tight = replace(tight, options=replace(plan.options, headroom=0.25))
    assert "which leaves 19.1% free and not the 25.0% asked for" in fit_words(tight)


@pytest.mark.parametrize(
    ("chance", "words"),
    [(0.0, "0%"), (0.004, "<1%"), (0.0499, "4%"), (0.05, "5%"), (0.9499, "94%"), (0.95, "95%"), (0.996, ">99%")],
)
def test_a_chance_is_never_rounded_over_a_line(chance, words):
    assert chance_words(chance) == words


def test_a_plan_without_a_verdict_is_refused_with_the_keys_and_goes_on_by_force(plan):
    key = Assumed(
        key="some_engine", value="0.6", rule="it takes memory", kind="open", settled_by="--ignore some_engine"
    )
    filled = Assumed(key="sp", value="1", rule="the engine's default")
    unknown = replace(plan, assumed=(filled, key))
    assert (unknown.verdict, unknown.fits, unknown.chance_of_fitting) == ("unknown", None, None)
    assert unknown.unknown_because == ("some_engine",)
    assert (plan.verdict, plan.fits, plan.unknown_because) == ("fits", True, ())
    told = []
    with pytest.raises(InputError, match=r"some_engine=0.6 \(it takes memory\)(.|\n)*--ignore some_engine") as caught:
        check_fits(unknown, tell=told.append)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    check_fits(unknown, force_unfit=True, tell=told.append)
    assert len(told) == 1
    assert "%" not in told[0]
    assert chance_words(unknown.chance_of_fitting) == "unknown"
