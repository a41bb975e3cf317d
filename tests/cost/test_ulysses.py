"""Context parallelism that trades sequence for heads (DeepSpeed Ulysses)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.answers.operations import operations_of_step
from planner.cost.activations import activation_terms
from planner.cost.collectives import all_to_all_seconds
from planner.cost.estimate import estimate
from planner.cost.groups import group
from planner.cost.ledger import LineName
from planner.cost.traffic import busy_seconds
from planner.cost.transfers import context_bytes, context_transfers
from planner.layout_text import parse_layout
from planner.search.space.rules import broken_rules
from planner.specs.calibration import UNCALIBRATED


def case(make_job, text, **changes):
    job = make_job("llama3-8b", engine="deepspeed", sequence=8192, **changes)
    return job, parse_layout(text, num_layers=32, num_devices=job.cluster.num_devices)


def test_each_rank_sends_its_tokens_of_queries_keys_values_and_outputs(make_job):
    """By hand: 8192 / 4 tokens of 32 heads and 8 key-value heads, each with 128 numbers of 2 bytes."""
    job, layout = case(make_job, "cp=4,zero=3")
    tokens, head = 8192 // 4, 128 * 2
    assert [float(each) for each in context_bytes(job, layout)] == [tokens * heads * head for heads in (32, 8, 8, 32)]
    cut = context_bytes(*case(make_job, "tp=2,cp=4,zero=1"))
    assert [float(each) for each in cut] == [tokens * heads // 2 * head for heads in (32, 8, 8, 32)]
    job = replace(job, calibration=UNCALIBRATED)
    where = group(job.cluster, 4, 1)
    by_hand = sum(all_to_all_seconds(where, tokens * heads * head) for heads in (32, 8, 8, 32))
    busy = busy_seconds(job, context_transfers(job, layout))
    assert (busy["forward"], busy["backward"]) == pytest.approx((float(by_hand), float(by_hand)))


def test_bytes_shrink_with_the_ranks_where_those_of_a_ring_do_not(make_job):
    """Jacobs et al. (2023), section 3.2: 4 N h / P for a rank and layer, compared with N h for gathering."""
    four, eight = (sum(context_bytes(*case(make_job, f"cp={cp},zero=3"))) for cp in (4, 8))
    assert float(eight) == pytest.approx(float(four) / 2)
    repeated = context_bytes(*case(make_job, "cp=16,zero=3"))
    assert float(repeated[1]) == pytest.approx(8192 / 16 * 16 * 128 * 2)  # one key-value head for each rank


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cp=3,zero=3", "do not share 32 heads"),
        ("cp=64,zero=3", "do not share 32 heads"),
        ("cp=2,pp=2", "does not run cp 2 with a pipeline of 2 stages"),
    ],
)
def test_what_ulysses_cannot_cut_is_refused(make_job, text, words):
    job, layout = case(make_job, text)
    assert [why for why in broken_rules(job, layout) if words in why]
    assert broken_rules(*case(make_job, "cp=8,zero=3")) == ()


def test_it_is_on_the_ledger_and_among_the_collectives(make_job):
    job, layout = case(make_job, "cp=8,zero=3")
    priced = estimate(job, layout)
    (line,) = (line for line in priced.time if line.name == LineName.CP_COMM)
    busy = busy_seconds(job, context_transfers(job, layout))
    m = layout.num_microbatches(job.training.global_batch_size)
    assert line.busy_seconds == pytest.approx(m * 32 * float(busy["forward"] + busy["backward"]))
    assert line.hidden_seconds == 0
    found = [each for each in operations_of_step(job, layout, priced.time) if each.line == LineName.CP_COMM]
    assert {each.kind for each in found} == {"all-to-all"}


def test_activations_of_a_rank_are_those_of_its_part_of_the_sequence(make_job):
    """With twice as many ranks each rank holds half as much, because nothing is gathered."""

    def held(cp):
        return sum(float(term.num_bytes) for term in activation_terms(*case(make_job, f"cp={cp},zero=3")))

    assert held(8) == pytest.approx(held(4) / 2)


def test_a_ring_sends_keys_and_the_values_of_their_own_size(make_job):
    """By hand: 2048 / 4 tokens of 8 heads, divided among 2 ranks, with 128 numbers of a key and 64 of a value."""
    job = make_job("llama3-8b", engine="megatron", settings=("model.value_head_size=64",))
    layout = parse_layout("tp=2,cp=4,dp=8", num_layers=32, num_devices=64)
    assert [float(each) for each in context_bytes(job, layout)] == [2048 // 4 * 8 // 2 * (128 + 64) * 2]
