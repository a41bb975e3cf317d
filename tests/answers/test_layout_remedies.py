"""Changes that make a layout fit, compared with layouts written and priced by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.answers.layout_remedies import layout_remedies
from planner.cost.estimate import estimate
from planner.layout_text import parse_layout
from planner.search.space.rules import broken_rules
from planner.specs.by_name import load_engine
from planner.specs.change import change_job
from planner.specs.load import load_job

BASE = {"tp": 1, "pp": 2, "cp": 1, "zero": 1, "mbs": 4, "recompute": "none"}
VALUES = {
    "tp": (2, 4, 8), "pp": (1, 4, 8), "cp": (2, 4, 8), "zero": (0, 2, 3), "mbs": (1, 2),
    "recompute": ("selective", "full"),
}  # fmt: skip


def job_with(gib, **options):
    found = load_job(
        model="llama2-7b", cluster="dgx-a100", nodes=1, global_batch_size=64, sequence_length=4096, engine="torch",
        headroom=0.0, **options,
    )  # fmt: skip
    return change_job(found, f"device.memory={gib}GiB")


def layout_of(values):
    return parse_layout(",".join(f"{key}={value}" for key, value in values.items()), num_layers=32, num_devices=8)


def by_hand(job, values):
    """Seconds of a layout, if it is legal and fits."""
    if values["tp"] * values["pp"] * values["cp"] > 8:
        return None
    layout = layout_of(values)
    if broken_rules(job, layout):
        return None
    found = estimate(job, layout)
    return found.step_seconds if found.fits else None


@pytest.mark.parametrize("gib", [48, 40])
def test_single_keys_are_all_tried_and_the_fastest_of_each_is_told(gib):
    job = job_with(gib)
    assert not estimate(job, layout_of(BASE)).fits
    told = [each for each in layout_remedies(job, layout_of(BASE)) if "," not in each.change]
    found = {each.change.partition("=")[0]: each for each in told}
    for key, values in VALUES.items():
        fitting = [seconds for value in values if (seconds := by_hand(job, BASE | {key: value}))]
        assert (key in found) == bool(fitting), key
        if fitting:
            assert found[key].step_seconds <= min(fitting) * (1 + 1e-12)
    seconds = [each.step_seconds for each in told]
    assert seconds == sorted(seconds)


def test_pairs_are_tried_where_no_single_key_is_enough():
    job = job_with(30)
    found = layout_remedies(job, layout_of(BASE))
    assert found
    assert all("," in each.change for each in found)
    singles = [by_hand(job, BASE | {key: value}) for key, values in VALUES.items() for value in values]
    assert not any(singles)
    for each in found:
        assert not broken_rules(job, each.layout)
        keys = dict(part.split("=", 1) for part in each.change.split(",") if "=" in part)
        if len(keys) == 2 and set(keys) <= set(VALUES):
            assert by_hand(job, BASE | keys | {k: int(v) for k, v in keys.items() if v.isdigit()}) == pytest.approx(
                each.step_seconds
            )


def test_adapters_are_among_the_changes_and_never_of_a_pair():
    job = replace(job_with(20), engine=load_engine("deepspeed"))
    layout = layout_of({"zero": 1, "mbs": 1, "recompute": "full"})
    found = layout_remedies(job, layout)
    assert any(each.change.startswith("adapters alone") for each in found)
    assert not [each for each in found if "adapters" in each.change and " and " in each.change]


def test_adapters_are_no_change_where_no_program_of_the_engine_trains_them():
    for name, has_them in (("megatron-bridge", True), ("megatron", False)):
        job = replace(job_with(20), engine=load_engine(name))
        found = layout_remedies(job, layout_of({"zero": 1, "mbs": 1, "recompute": "full"}))
        assert any(each.change.startswith("adapters alone") for each in found) == has_them, name


def test_a_switch_of_the_loss_saves_a_degree_of_context_parallelism():
    """Where cp=8 alone makes it fit, the loss with less cp does as well, and is faster; all degrees by hand."""
    job = change_job(
        load_job(
            model="llama3-8b", cluster="dgx-h100", nodes=1, global_batch_size=8, sequence_length=65536, engine="fsdp",
            headroom=0.0,
        ),
        "device.memory=45GiB",
    )  # fmt: skip
    given = parse_layout("tp=1,dp=8,zero=3,recompute=full", num_layers=32, num_devices=8)
    told = {each.change: each.step_seconds for each in layout_remedies(job, given)}
    seconds = {}
    for cp in (1, 2, 4, 8):
        layout = parse_layout(f"tp=1,cp={cp},dp={8 // cp},zero=3,recompute=full", num_layers=32, num_devices=8)
        for loss in job.engine.can.losses:
            found = estimate(change_job(job, f"training.loss={loss}"), layout)
            if found.fits:
                seconds[cp, loss] = found.step_seconds
    assert (8, "whole") in seconds
    assert min(cp for cp, loss in seconds if loss != "whole") in (2, 4)
    pairs = {words: value for words, value in told.items() if words.startswith("cp=") and ",loss " in words}
    assert min(pairs.values()) == pytest.approx(min(seconds.values()))
    assert min(pairs.values()) < told["cp=8"]


def test_a_kernel_of_attention_is_named_alone_and_beside_a_degree():
    """Scores of unfused attention fill the memory; a layout fits beside the switch exactly if its ledger says so."""
    unfused = ("training.attention=unfused",)
    for gib in (40, 60):
        job = job_with(gib, settings=unfused)
        told = {each.change: each.step_seconds for each in layout_remedies(job, layout_of(BASE))}
        flash = change_job(job, "training.attention=flash")
        for key, value in (("recompute", "full"), ("mbs", 1), ("tp", 4)):
            words, seconds = f"{key}={value},attention flash", by_hand(flash, BASE | {key: value})
            assert words not in told or told[words] == pytest.approx(seconds)
        assert any(words.endswith(",attention flash") for words in told)
    told = layout_remedies(job_with(60, settings=unfused), layout_of(BASE | {"mbs": 1}))
    assert "attention flash" in {each.change for each in told}
