"""The search with ends of the model as pieces of the pipeline, against every layout priced by its own ledger."""

from __future__ import annotations

import itertools
import random
from dataclasses import astuple, replace

import numpy as np
import pytest
from enumeration import check_many, compositions, long_forms
from test_search import every_configuration, listings

from planner.cost.estimate import estimate
from planner.layout import Layout, balanced_chunks, format_layout
from planner.search import recommendation
from planner.search.footprint import NothingFits
from planner.search.optimum.pricing import layout_at, price_candidates
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.search.space.refusals import legal_degrees
from planner.search.space.rules import broken_rules
from planner.search.space.space import Space
from planner.specs.load import load_job

SHARES = (0.02, 0.02, 0.3)
"""Windows of jobs with subsequent seeds."""

PINNED = {"tp": 1, "cp": 1, "mbs": 1, "zero": 1, "hsdp": 1}


LEVERS = (
    *("training.loss=whole", "training.loss=engine"),
    *("training.cuda_graphs=layers", "training.cuda_graphs=step", "training.attention=unfused"),
)
"""Settings that are one switch of the engine, of which each job has one."""


def job_with_ends(seed, *, most_layers=6, most_gpus=6):
    """A small job whose head may take longer than several layers, with or without multi-token prediction."""
    pick = random.Random(seed)
    return load_job(
        model="tiny-llama",
        cluster="dgx-a100",
        engine="megatron",
        gpus=pick.choice([count for count in (2, 3, 4, 6) if count <= most_gpus]),
        sequence_length=256,
        global_batch_size=pick.choice([4, 8, 12]),
        settings=(
            f"model.num_layers={pick.randint(2, most_layers)}",
            f"model.vocab_size={pick.choice([512, 4096, 16384, 65536])}",
            f"model.mtp_layers={seed % 2}",
            f"device.memory={pick.choice([0.05, 0.1, 0.5])} GiB",
            "device.reserved_memory=1 MiB",
            "engine.memory.communicator_memory=1 B",
            "device.efficiency.layer_floor=1 us",
            f"nvlink.bandwidth={pick.choice([0.1, 300])} GB/s",
            pick.choice(LEVERS),
        ),
        headroom=0.0,
    )


def every_layout_with_ends(job):
    """Every layout with the pinned degrees and no recompute: all splits, last chunks and places of prediction."""
    mtp, layers, found = job.model.mtp_layers, job.model.num_layers, {}
    for common in every_configuration(job, ends=2 + (mtp > 0)):
        pp, v = common["pp"], common["interleave"]
        if any(common[key] != value for key, value in PINNED.items()) or (pp == 1 and v > 1):
            continue
        for split, before in itertools.product(compositions(layers, pp, 0), (0, 1) if mtp and pp > 1 else (0,)):
            ends = {pp - 1, pp - 1 - before}
            sizes = [range(k // v + 1) if v > 1 and r in ends else [k // v] for r, k in enumerate(split)]
            for last in itertools.product(*sizes):
                layout = Layout(
                    **common,
                    layers_per_stage=balanced_chunks(split, v, last=last),
                    mtp=(pp * v - 2,) if before else (),
                    recompute=("none",) * (pp * v),
                )
                if not broken_rules(job, layout):
                    found[format_layout(layout)] = layout
    return found


def stages_of(layout):
    """Layers of each stage, and of each stage's last chunk."""
    chunks = layout.layers_per_stage
    return tuple(sum(chunks[r :: layout.pp]) for r in range(layout.pp)), chunks[-layout.pp :]


def closed_list(priced, longest, fastest):
    """The list of the recommendation by its definition, from the layouts that it calls the fastest of a kind."""
    found = set()
    for text in fastest:
        base = priced[text][0]
        own, layers = stages_of(base), sum(base.layers_per_stage)
        for other, (each, seconds) in priced.items():
            alike = replace(base, **{key: getattr(each, key) for key in VARIED})
            mtp = (each.num_chunks - 1 - base.mtp_before,) if base.mtp else ()
            is_listed = each.interleave in (1, 2, 4, 8, base.interleave) or layers % each.num_chunks == 0
            if seconds > longest or each != replace(alike, mtp=mtp) or not is_listed:
                continue
            (split, last), inner = stages_of(each), each.interleave * -(-layers // (each.pp * each.interleave))
            even = max(split) - min(split) < 2 and list(split) == sorted(split, reverse=True)
            left = layers - inner * (each.pp - 2)
            equal = each.pp > 2 and set(split[1:-1]) == {inner} and abs(split[0] - split[-1]) < 2 and left >= 0
            whole = last == tuple(count // each.interleave for count in split)
            if (split, last) == own or (whole and (split == own[0] or even or equal)):
                found.add(other)
    return found


VARIED = ("interleave", "schedule", "layers_per_stage", "recompute")
"""Keys in which variants differ, where all others are pinned."""


def keys_of(layout):
    """The keys of a layout on one host without classes of risk, computed independently of the search."""
    inner = {size for chunk, size in enumerate(layout.layers_per_stage) if 0 < chunk % layout.pp < layout.pp - 1}
    return (1, 0, int(layout.pp > 1), 0, layout.interleave, 0, int(len(inner) > 1))


def check_with_ends(job, within=0.02, **options):
    """Compare minimum, list and choice with all layouts; returns whether the minimum has a chunk without a layer."""
    pins = ",".join(f"{key}={value}" for key, value in PINNED.items()) + ",recompute=none"
    every = {text: (layout, estimate(job, layout)) for text, layout in every_layout_with_ends(job).items()}
    priced = {text: (layout, each.step_seconds) for text, (layout, each) in every.items() if each.fits}
    with listings() as asked:
        found = search(job, Constraints.parse([pins]), within=within, **options)
    if not priced:
        assert isinstance(found, NothingFits)
        return False
    least, best = min((seconds, text) for text, (_, seconds) in priced.items())
    assert found.minimum.step_seconds == pytest.approx(least, rel=1e-9), (best, format_layout(found.layout))
    assert found.certificate.dynamic_program_seconds == pytest.approx(least, rel=1e-9)
    assert found.certificate.objective_seconds == pytest.approx(least, rel=1e-9)
    longest, (of_search, window, listed) = least * (1 + within) * (1 + 1e-12), asked[0]
    fastest = [format_layout(of_search.layout_of(each)) for each in recommendation.fastest_of_kinds(of_search, window)]
    of_depth = {}
    for layout, seconds in priced.values():
        of_depth[layout.pp] = min(seconds, of_depth.get(layout.pp, seconds))
    for text in fastest:
        assert priced[text][1] == pytest.approx(of_depth[priced[text][0].pp], rel=1e-9)
    assert {priced[text][0].pp for text in fastest} == {pp for pp, seconds in of_depth.items() if seconds <= longest}
    expected = closed_list(priced, longest, fastest)
    assert {format_layout(of_search.layout_of(each)) for each in listed} == expected
    chosen = format_layout(found.layout)
    assert found.certificate.recommendation.num_listed == len(expected)
    ranks = {text: (keys_of(priced[text][0]), priced[text][1]) for text in expected}
    assert ranks[chosen][0] == astuple(found.certificate.recommendation.keys) == min(ranks.values())[0]
    assert found.step_seconds == pytest.approx(min(ranks.values())[1], rel=1e-9)
    return 0 in found.minimum.layout.layers_per_stage


@pytest.mark.parametrize("block", [0, *long_forms(1, 2, 3, 4, 5)])
def test_the_search_equals_brute_force_with_ends_as_pieces(block):
    found = [check_with_ends(job_with_ends(seed), SHARES[seed % 3]) for seed in range(8 * block, 8 * block + 8)]
    assert any(found)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_search_equals_brute_force_with_ends_on_many_jobs():
    check_many(lambda seed: check_with_ends(job_with_ends(seed, most_layers=5, most_gpus=4), SHARES[seed % 3], top=0))


@pytest.mark.parametrize("pin", ["loss=3", "loss=5", "mtp=4"])
def test_a_pinned_end_holds_in_the_recommendation(monkeypatch, pin):
    """Variants with fewer chunks are easier to run, and would have the end in another chunk."""
    job, pins, honest = job_with_ends(7), Constraints.parse([f"pp=2,{pin}"]), Space.legal
    key, chunk = pin.split("=")

    def place(found):
        ends = {"loss": found.layout.num_chunks - 1, "mtp": found.layout.num_chunks - 1 - found.layout.mtp_before}
        return ends[key]

    assert place(search(job, pins, within=1.0)) == int(chunk)

    def forgets_the_pin(space, degrees):
        return honest(Space(space.job, Constraints.parse(["pp=2"])), degrees)

    monkeypatch.setattr(Space, "legal", forgets_the_pin)
    assert place(search(job, pins, within=1.0)) != int(chunk)


@pytest.mark.parametrize("interleave", [2, 3])
def test_a_stage_with_leading_layers_begins_with_them(interleave):
    """The search prices each choice as its ledger does: a dense layer follows no chunk with the embedding alone."""
    mixture = "{num_experts: 4, experts_per_token: 2, ffn_hidden_size: 512, num_dense_layers: 1}"
    job = load_job(
        model="tiny-llama",
        cluster="dgx-a100",
        engine="megatron",
        gpus=2,
        sequence_length=512,
        global_batch_size=6,
        settings=("model.num_layers=6", f"model.moe={mixture}", "device.efficiency.layer_floor=1 us"),
    )
    pins = Constraints.parse([f"pp=2,interleave={interleave},dp=1,tp=1,cp=1,mbs=1,zero=0,recompute=none"], [])
    degrees = next(iter(legal_degrees(Space(job, pins))))
    (candidate, *_) = price_candidates(Space(job, pins), degrees, Space(job, pins).policies(degrees))
    num_priced = 0
    for columns in itertools.product(*(np.flatnonzero(candidate.stage == stage).tolist() for stage in (0, 1))):
        if candidate.is_choice(columns):
            chosen = [values[list(columns)].tolist() for values in (candidate.layers, candidate.policy, candidate.last)]
            layout = layout_at(degrees.take(0), *chosen[:2], last=chosen[2])
            assert candidate.step_seconds(columns) == pytest.approx(estimate(job, layout).step_seconds, rel=1e-9)
            num_priced += 1
    assert num_priced
