"""Step times are not compared where no run of two families of publishers, or of the network, tells them apart."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path

import pytest
from published_runs import published_runs

from planner.answers.difference import difference_of, difference_view
from planner.answers.what_if import what_if, what_if_section
from planner.cost.band import band
from planner.cost.transfers import MEASURED_DISPATCH, unmeasured_dispatch
from planner.evidence.rows.jobs import Unsupported, job_of
from planner.search.given import plan_for_text
from planner.show.rows import BAND, rows_of
from planner.show.screen import Screen, to_text
from planner.specs.by_name import shipped_calibration
from planner.specs.load import load_job

PUBLISHED = Path(__file__).parents[1] / "published"
FAMILIES = {
    row["source_set"]: row["family"]
    for row in csv.DictReader((PUBLISHED / "families.csv").read_text(encoding="utf-8").splitlines())
}

FITTED = [run for run in published_runs() if run.fit != "no" and run.measured_step_seconds]
ON_H100 = [run for run in FITTED if run.gpu.startswith("H100")]


FLASH_1 = "engine.compute.attention_kernel=flash-1"  # one family ran it with fsdp on H100


def plan_of(engine, layout="dp=16,zero=3,mbs=1,recompute=full", **given):
    sizes = {"model": "qwen3-32b", "cluster": "dgx-h100", "gpus": 16, "sequence_length": 32768, "global_batch_size": 32}
    return plan_for_text(load_job(engine=engine, **{**sizes, **given}), layout)


def text_of(view):
    return " ".join(to_text(view, Screen()).split())


@cache
def families_of_kernels():
    """Families whose runs on H100 have a kernel of attention, counted in the table of runs itself."""
    found = {}
    for run in ON_H100:
        setup = job_of(run)
        if not isinstance(setup, Unsupported):
            own = setup.job.engine
            one = own.name, setup.job.cluster.device.name, own.compute.attention_kernel
            found.setdefault(one, set()).add(FAMILIES[run.source_set])
    return found


def test_every_source_of_the_evidence_has_its_family():
    assert {each.source: each.family for each in shipped_calibration().evidence}.items() <= FAMILIES.items()
    sources = {run.source_set for run in published_runs()}
    assert sources == set(FAMILIES)


def test_a_correction_of_one_family_is_named_and_engines_are_not_compared():
    old, new = plan_of("fsdp", settings=(FLASH_1,)), plan_of("torchtitan")
    family = old.band.family
    assert families_of_kernels()["fsdp", "h100-80gb", "flash-1"] == {family}
    assert family in text_of(rows_of(old, BAND))
    assert "than with the corrections that all engines share" not in text_of(rows_of(old, BAND))
    found = difference_of(new, old)
    assert any("fsdp" in reason and family in reason for reason in found.not_compared)
    said = text_of(difference_view(found, names=("new", "old")))
    assert "Step times are not compared" in said
    assert f"{old.step_seconds / new.step_seconds - 1:+.1%}" not in said
    asked = what_if(new, f"engine=fsdp,{FLASH_1}")
    assert asked.not_compared == found.not_compared
    assert "slower" not in text_of(what_if_section(asked))


def test_one_engine_is_compared_with_itself():
    before, after = plan_of("fsdp"), plan_of("fsdp", global_batch_size=64)
    found = difference_of(before, after)
    assert found.not_compared == ()
    assert f"{after.step_seconds / before.step_seconds - 1:+.0%}"[:2] in text_of(
        difference_view(found, names=("a", "b"))
    )


def test_the_band_of_one_family_is_wider_by_the_factor_of_the_evidence():
    sizes = {"gpus": 16, "global_batch_size": 32, "settings": (FLASH_1,)}
    job = load_job(model="qwen3-32b", cluster="dgx-h100", engine="fsdp", **sizes)
    layout = plan_of("fsdp").layout
    several = replace(job, calibration=job.calibration.model_copy(update={"family": ""}))
    one, both = band(job, layout), band(several, layout)
    assert (one.family, both.family) == (job.calibration.family, "")
    assert job.spread.one_family > 1
    wide, narrow = log(one.high / one.low), log(both.high / both.low)
    assert wide == pytest.approx(job.spread.one_family * narrow, rel=1e-6)


EXPERTS = {"model": "qwen3-30b-a3b", "gpus": 16, "sequence_length": 4096, "global_batch_size": 256}
LAYOUT = "dp=16,ep=16,mbs=1,zero=1"
ONCE = "engine.communication.dispatches_once_per_host=true"


def test_dispatchers_were_measured_on_the_links_that_the_rule_names():
    kinds = set()
    for run in FITTED:
        setup = job_of(run) if run.ep != 1 else Unsupported(reason="its experts are not divided")
        if isinstance(setup, Unsupported) or setup.layout.ep == 1:
            continue
        job, size = setup.job, setup.layout.ep * setup.layout.etp
        if job.engine.communication.dispatches_once_per_host:
            spanned = [each for each in job.cluster.links if (each.num_devices or job.num_devices) >= size]
            kinds.add(spanned[0].kind)
    assert kinds == set(MEASURED_DISPATCH)


@pytest.mark.parametrize(("cluster", "measured"), [("dgx-h100", True), ("p5", True), ("a3-mega", False)])
def test_the_gain_of_a_dispatcher_is_told_only_where_it_was_measured(cluster, measured):
    plan = plan_of("megatron", LAYOUT, cluster=cluster, **EXPERTS)
    asked = what_if(plan, ONCE)
    said = text_of(what_if_section(asked))
    assert (asked.not_compared == ()) == measured
    assert ("not compared" in said) != measured
    dispatched = plan_of("megatron-bridge", LAYOUT, cluster=cluster, **EXPERTS)
    assert ("not measured on" in text_of(rows_of(dispatched, BAND))) != measured
    assert "not measured on" not in text_of(rows_of(plan, BAND))


def test_a_dispatcher_inside_a_host_or_without_experts_needs_no_note():
    inside = plan_of("megatron-bridge", "dp=16,ep=8,mbs=1,zero=1", cluster="p5", **EXPERTS)
    dense = plan_of("megatron-bridge", "tp=8,dp=2,mbs=1", cluster="p5", model="llama3-8b", sequence_length=4096)
    for plan in (inside, dense):
        assert unmeasured_dispatch(plan.model, plan.engine, plan.cluster.pools[0], plan.layout) == ""
