"""The fit of the calibration, on made-up runs for which the right answer is known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from project_tools import load_tool
from published_runs import published_runs

from planner.made_by import with_corrections_of_any_engine
from planner.specs.by_name import shipped_calibration
from planner.specs.calibration import UNCALIBRATED, Calibration, CalibrationEntry, find_entry
from planner.specs.load import load_job

TOOL = load_tool("calibrate")
Sample, calibrate, held_out_ratios = TOOL.Sample, TOOL.calibrate, TOOL.held_out_ratios

DEVICES = {"a100-80gb": 1.0, "h100-80gb": 1.3, "b200-180gb": 1.7}
ENGINES = {"megatron": 1.0, "fsdp": 1.25}
POINTS = np.array([0.6, 1.0, 1.6, 2.6])  # where the fit has prices; a slowdown is 1.2 times as much
FACTORS = ("slowdown", "core_attention", "scale_up", "network", "host")


def made_up(*, slowdown=None, source="someone", engine="megatron", device="a100-80gb", rest=1.0, **parts):
    """A run that took exactly rest + slowdown * compute seconds, plus seconds times factor for each further part.

    parts: seconds at a factor of 1, and the true factor; `compute`: seconds at a slowdown of 1.
    """
    slowdown = slowdown or DEVICES[device] * ENGINES[engine]
    compute = parts.pop("compute", 9.0)
    usual = rest + 1.2 * compute + sum(seconds for seconds, _ in parts.values())
    prices = np.full((len(FACTORS), len(POINTS)), usual)
    prices[0] += 1.2 * compute * (POINTS - 1)
    for name, (seconds, _) in parts.items():
        prices[FACTORS.index(name)] += seconds * (POINTS - 1)
    return Sample(
        run="-",
        source=source,
        keys={"device": device, "engine": engine, "precision": "16", "experts": False},
        axes="dp",
        measured_seconds=rest + slowdown * compute + sum(seconds * factor for seconds, factor in parts.values()),
        seconds=prices,
    )


def runs(times=12):
    return [
        made_up(device=device, engine=engine)
        for (device, engine), _ in itertools.product(itertools.product(DEVICES, ENGINES), range(times))
    ]


def folds_of(samples):
    return [number % 5 for number in range(len(samples))]


def test_a_combination_that_nobody_measured_leans_on_its_parts():
    seen = [run for run in runs(60) if (run.keys["device"], run.keys["engine"]) != ("b200-180gb", "fsdp")]
    fitted = calibrate(seen)
    same_device = find_entry(fitted, device="b200-180gb", engine="megatron", precision="bf16", experts=False)
    found = find_entry(fitted, device="b200-180gb", engine="fsdp", precision="bf16", experts=False)
    assert same_device.slowdown == pytest.approx(1.7, rel=0.03)
    assert same_device.slowdown < found.slowdown < 1.7 * 1.25  # held back, because nobody saw it


def test_runs_that_are_exact_are_forecast_exactly():
    ratios = held_out_ratios(runs(), folds_of(runs()))
    assert ratios == pytest.approx(np.ones(len(ratios)), abs=0.05)


def test_a_run_is_never_forecast_from_its_own_fold():
    samples = runs()
    folds = folds_of(samples)
    before = held_out_ratios(samples, folds)
    slower = [
        run if fold else replace(run, measured_seconds=3 * run.measured_seconds)
        for run, fold in zip(samples, folds, strict=True)
    ]
    after = held_out_ratios(slower, folds)
    held = np.array(folds) == 0
    assert after[held] == pytest.approx(3 * before[held])


@pytest.mark.parametrize(("name", "factor"), [("scale_up", 1.5), ("network", 1.5), ("host", 0.8)])
def test_links_and_the_host_are_slower_where_runs_that_use_them_are(name, factor):
    parts = [{name: (seconds, factor)} for seconds in np.linspace(0.0, 9.0, 60)]
    fitted = calibrate([made_up(slowdown=1.3, source=str(number % 4), **part) for number, part in enumerate(parts)])
    found = find_entry(fitted, device="a100-80gb", engine="megatron", precision="bf16", experts=False)
    assert getattr(found, name) == pytest.approx(factor, rel=0.05)  # held back a little by the penalty
    assert found.slowdown == pytest.approx(1.3, rel=0.03)


def test_the_core_of_attention_has_a_factor_of_its_own_beside_the_slowdown():
    # the core is slowed down too: at a slowdown of 1.3, c seconds take 1.3 * c * 1.4, and are priced at 1.2
    runs = [made_up(slowdown=1.3, core_attention=(1.2 * c, 1.3 / 1.2 * 1.4)) for c in np.linspace(0.0, 5.0, 60)]
    fitted = calibrate([replace(run, source=str(number % 4)) for number, run in enumerate(runs)])
    found = find_entry(fitted, device="a100-80gb", engine="megatron", precision="bf16", experts=False)
    assert (found.slowdown, found.core_attention) == (pytest.approx(1.3, rel=0.03), pytest.approx(1.4, rel=0.05))


def test_a_slow_kernel_of_attention_says_nothing_about_another():
    factors = {"flash-1": 1.6, "flash-2": 1.0}
    runs = [
        replace(made_up(slowdown=1.3, core_attention=(1.2 * c, 1.3 / 1.2 * factor)), kernel=kernel)
        for kernel, factor in factors.items()
        for c in np.linspace(0.0, 5.0, 40)
    ]
    fitted, asked = calibrate(runs), {"device": "a100-80gb", "engine": "megatron", "precision": "bf16"}
    for kernel, factor in factors.items():
        found = find_entry(fitted, experts=False, kernel=kernel, **asked)
        assert found.core_attention == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize(("fit", "has_errors"), [("bands", True), ("no", False)])
def test_sources_kept_for_validation_move_no_factor_and_bands_only_where_their_family_says_so(fit, has_errors):
    wild = [replace(made_up(slowdown=9.0, source="wild"), fit=fit) for _ in range(50)]
    found = calibrate([*runs(), *wild])
    assert found.entries[1:] == calibrate(runs()).entries[1:]
    assert any(each.source == "wild" for each in found.evidence) == has_errors


def test_the_table_of_families_says_what_each_source_teaches():
    teaches = {run.source_set: run.fit for run in published_runs()}
    assert {source for source, fit in teaches.items() if fit == "bands"} == {
        "megatron-sc21-t1", "megatron-sc21-t2", "korthikanti-t5"
    }  # fmt: skip
    assert {each.source for each in shipped_calibration().evidence}.isdisjoint(
        source for source, fit in teaches.items() if fit == "no"
    )
    assert set(teaches.values()) == {"", "bands", "no"}


def test_slowdowns_multiply_and_the_first_statement_counts():
    entries = (
        CalibrationEntry(device="a100-80gb", engine="megatron", slowdown=1.5, num_rows=7),
        CalibrationEntry(device="a100-80gb", slowdown=1.2, attention=0.5, num_rows=70),
        CalibrationEntry(device="h100-80gb", slowdown=9.0),
        CalibrationEntry(slowdown=2.0, attention=0.3),
    )
    asked = {"device": "a100-80gb", "engine": "megatron", "precision": "bf16", "experts": False}
    found = find_entry(Calibration(entries=entries), **asked)
    assert found.slowdown == pytest.approx(1.5 * 1.2 * 2.0)
    assert (found.attention, found.num_rows) == (0.5, 7)
    alone = (CalibrationEntry(engine="megatron", slowdown=1.1, alone=True), *entries)
    assert find_entry(Calibration(entries=alone), **asked).slowdown == 1.1
    assert find_entry(Calibration(entries=entries[2:3]), **asked) == UNCALIBRATED


def test_engines_around_one_library_share_what_its_layers_take():
    around = [replace(made_up(slowdown=1.6, engine="megatron-bridge"), layers="megatron") for _ in range(60)]
    fitted = calibrate([*around, *runs()])
    asked = {"device": "a100-80gb", "precision": "bf16", "experts": False}
    of_library = find_entry(fitted, engine="megatron-fsdp", layers_of="megatron", **asked)
    assert of_library.slowdown == find_entry(fitted, engine="megatron", **asked).slowdown
    assert of_library.slowdown == pytest.approx(1.6, rel=0.1)
    assert find_entry(fitted, engine="torchtitan", **asked).slowdown < 0.95 * of_library.slowdown


def test_programs_around_megatron_core_have_one_slowdown():
    engines = ("megatron", "megatron-bridge", "megatron-fsdp")
    given = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch_size": 64}
    jobs = [load_job(**given, sequence_length=4096, engine=engine) for engine in engines]
    assert len({job.pools[0].calibration.slowdown for job in jobs}) == 1
    plain = [with_corrections_of_any_engine(job).calibration for job in jobs]
    assert plain[0] == plain[1] == plain[2]


@pytest.mark.parametrize(("others", "rests_on"), [(0.0, "old"), (5.0, "")])
def test_a_correction_rests_on_a_family_if_no_other_has_runs_that_show_it(others, rests_on):
    """Both families ran the engine; without seconds in the core of attention, runs tell nothing about its factor."""

    def family(name, core):
        parts = [{"core_attention": (seconds, 1.2 * 1.6)} for seconds in np.linspace(0.0, core, 40)]
        return [replace(made_up(slowdown=1.2, source=name, **part), family=name) for part in parts]

    plain = [replace(run, family="third") for run in runs() if run.keys["engine"] == "fsdp"]
    found = find_entry(
        calibrate([*family("old", 5.0), *family("new", others), *plain]),
        device="a100-80gb",
        engine="megatron",
        precision="bf16",
        experts=False,
    )
    assert found.core_attention > 1.4
    assert found.family == rests_on
