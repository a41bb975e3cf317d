"""The choice of a batch size compared with a search at each size, and the notation of batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.answers.batch_choice import AS_GOOD, batch_report, choose_batch
from planner.answers.deadline import search_in_time
from planner.errors import InputError
from planner.search.objectives import Objective
from planner.search.search import NothingFits, search
from planner.search.space.constraints import Constraints
from planner.specs.batch import BatchRange, read_batch
from planner.specs.load import load_job

FREE = Constraints()


def job(batch, **options):
    return load_job(model="gpt2-xl", cluster="dgx-a100", sequence_length=1024, global_batch_size=batch, **options)


@pytest.mark.parametrize("name", ["throughput", "cost", "gpus"])
def test_the_best_size_is_that_of_single_searches(name):
    asked = job("30..32", nodes=1)
    chosen, tried = choose_batch(asked, FREE, name)
    assert [each.global_batch_size for each in tried] == list(range(30, 33))
    ranks = {}
    for each in tried:
        size = each.global_batch_size
        objective = Objective(name=name)
        alone = search(job(size, nodes=1), FREE, objective=objective)
        if isinstance(alone, NothingFits):
            assert each.tokens_per_second is None
            continue
        assert each.tokens_per_second == pytest.approx(size * 1024 / alone.step_seconds)
        ranks[size] = objective.rank(alone.step_seconds / size, alone.layout.world_size)
    best = min(ranks.values())
    good = [size for size, rank in ranks.items() if rank[0] <= best[0] * (1 + AS_GOOD)]
    if name == "gpus":
        good = [size for size in good if ranks[size][1] <= best[1] * (1 + AS_GOOD)]
    assert chosen.training.global_batch_size == min(good)


def test_a_number_of_tokens_is_met_within_its_tolerance_and_as_near_as_is_good():
    asked = job("100k tokens")
    chosen, tried = choose_batch(asked, FREE, "throughput")
    assert abs(chosen.training.global_batch_size * 1024 / 1e5 - 1) <= 0.05
    report = batch_report(chosen, tried)
    assert report.chosen == chosen.training.global_batch_size
    assert report.learning_rate.of_batch == pytest.approx(1e5 / 1024)


def test_where_nothing_fits_the_smallest_batch_is_left():
    asked = job("8..16", settings=("device.memory=1 GiB",))
    chosen, tried = choose_batch(asked, FREE, "throughput")
    assert chosen.training.global_batch_size == 8
    assert all(each.tokens_per_second is None for each in tried)


def test_the_smallest_memory_chooses_no_batch():
    with pytest.raises(InputError, match="does not choose a batch"):
        choose_batch(job("8..16"), FREE, "memory")


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("512..2048", 512, 2048),
        (" 512 .. 2k ", 512, 2000),
        ("7..7", 7, 7),
        ("4M tokens", 464, 512),  # 488.3 sequences of 8,192 tokens
        ("4194304 tokens", 487, 537),
        ("2M..4.2M tokens", 245, 512),
        ("8192 tokens", 1, 1),
    ],
)
def test_batches_are_read(text, least, most):
    found = read_batch(text, 8192)
    assert (found.least, found.most) == (least, most)


@pytest.mark.parametrize(
    "text",
    ["", "..", "512..", "..512", "2048..512", "4M", "tokens", "4X tokens", "100 tokens", "-4..8", "1..2..3", "0..0"],
)
def test_what_is_no_batch_is_refused(text):
    with pytest.raises(ValueError, match=r"batch|whole|count|begins with the larger"):
        read_batch(text, 8192)


@given(least=st.integers(1, 10**6), width=st.integers(0, 10**6))
def test_sizes_hold_both_ends_and_are_never_many(least, width):
    sizes = BatchRange(least=least, most=least + width).sizes()
    assert sizes[0] == least
    assert sizes[-1] == least + width
    assert sorted(set(sizes)) == list(sizes)
    assert min(width + 1, 16) <= len(sizes) <= 35


def test_a_range_in_a_document_is_read_and_mistakes_have_their_place(tmp_path):
    path = tmp_path / "training.yaml"
    path.write_text("global_batch_size: 512..2048\nsequence_length: 2048\n")
    read = load_job(model="llama2-7b", cluster="dgx-a100", training=str(path))
    assert (read.batch, read.training.global_batch_size) == (BatchRange(least=512, most=2048), 2048)
    assert replace(read, batch=None) == load_job(
        model="llama2-7b", cluster="dgx-a100", sequence_length=2048, global_batch_size=2048
    )
    path.write_text("global_batch_size: 512...2048\n")
    with pytest.raises(InputError, match=r"training.yaml:1:1: .*no batch size"):
        load_job(model="llama2-7b", cluster="dgx-a100", training=str(path))


def test_each_size_of_a_range_keeps_to_the_deadline_with_the_confidence():
    steps = 5e9 / (32 * 1024)
    fastest = search(job(32), FREE).step_seconds
    settings = ("training.tokens=5e9", f"training.deadline={1.35 * fastest * steps} s")
    found = {}
    for confidence in (0.1, 0.9):
        asked = job("31..33", settings=settings)
        _, tried = choose_batch(asked, FREE, "gpus", confidence=confidence)
        for each in tried:
            alone = search_in_time(job(each.global_batch_size, settings=settings), FREE, "gpus", confidence=confidence)
            assert each.num_devices == (alone.layout.world_size if alone.run.meets_deadline else None)
        found[confidence] = [each.num_devices for each in tried]
    assert found[0.1] != found[0.9]
