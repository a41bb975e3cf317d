"""Changes that make a job fit: each change is verified here by a separate search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from planner.answers.remedies import each_lifted, lifted_pins, remedies
from planner.cost.estimate import estimate
from planner.layout_text import parse_layout
from planner.search.least_memory import least_peak, within_share
from planner.search.search import NothingFits, search
from planner.search.space.constraints import Constraints
from planner.search.space.rules import broken_rules
from planner.search.space.space import Space
from planner.specs.change import change_job
from planner.specs.load import load_job


def job(nodes=2, **options):
    """A job with a plain limit; with `headroom=None`, with a limit by the chance of fitting."""
    arguments = {"model": "gpt3-175b", "cluster": "dgx-a100", "global_batch_size": 64, "sequence_length": 2048}
    return load_job(**{**arguments, "nodes": nodes, "headroom": 0.05, **options})


def find(found, words):
    return next(remedy for remedy in found if words in remedy.change)


PINNED = Constraints.parse(["recompute=full,tp=8"], [])


def test_more_hosts_are_as_few_as_can_be():
    found = find(remedies(job(), PINNED), "hosts instead of 2")
    hosts = int(found.change.split()[0])
    at_least = search(job(nodes=hosts), PINNED)
    assert at_least.fits
    assert found.step_seconds == pytest.approx(at_least.step_seconds)
    assert isinstance(search(job(nodes=hosts - 1), PINNED), NothingFits)


def test_shorter_sequences_see_as_many_tokens_and_the_longest_that_fit_are_named():
    asked = job(model="llama3-8b", nodes=1, sequence_length=131072, global_batch_size=8)
    free = Constraints.parse(["cp=1,pp=1,tp=1,recompute=none"], [])
    assert isinstance(search(asked, free), NothingFits)
    found = find(remedies(asked, free), "sequences of")
    batch, length = (int(word.replace(",", "")) for word in found.change.split() if word[0].isdigit())
    assert batch * length == 8 * 131072
    shorter = job(model="llama3-8b", nodes=1, sequence_length=length, global_batch_size=batch)
    assert search(shorter, free).step_seconds == pytest.approx(found.step_seconds)
    longer = job(model="llama3-8b", nodes=1, sequence_length=2 * length, global_batch_size=batch // 2)
    assert isinstance(search(longer, free), NothingFits)


def test_another_recipe_that_fits_is_found_and_verified():
    asked = job(model="llama2-13b", nodes=1, engine="megatron", sequence_length=4096)
    asked = within_share(asked, 0.9 * least_peak(Space(asked, Constraints())).share)
    assert isinstance(search(asked, Constraints()), NothingFits)
    found = find(remedies(asked, Constraints()), "memory_recipe")
    training = asked.training.model_copy(update={"memory_recipe": found.change.split()[-1]})
    again = search(replace(asked, training=training), Constraints())
    assert again.step_seconds == pytest.approx(found.step_seconds)


def test_remedies_are_sorted_by_what_a_token_costs():
    found = remedies(replace(job(nodes=12), headroom=0.6), Constraints())
    assert len(found) > 1
    costs = [each.layout.world_size / each.tokens_per_second for each in found]
    assert costs == sorted(costs)


def test_each_pin_is_priced_by_lifting_it_alone():
    asked = job(nodes=16)
    pins = Constraints.parse(["tp=1,cp=1,recompute=none"], ["zero=1"])
    assert isinstance(search(asked, pins), NothingFits)
    lifted = {each.constraint: each for each in lifted_pins(asked, each_lifted(pins))}
    assert list(lifted) == ["tp=1", "cp=1", "recompute=none", "forbidden zero=1"]
    without = {
        "tp=1": Constraints.parse(["cp=1,recompute=none"], ["zero=1"]),
        "cp=1": Constraints.parse(["tp=1,recompute=none"], ["zero=1"]),
        "recompute=none": Constraints.parse(["tp=1,cp=1"], ["zero=1"]),
        "forbidden zero=1": Constraints.parse(["tp=1,cp=1,recompute=none"], []),
    }
    for constraint, each in lifted.items():
        alone = search(asked, without[constraint])
        assert (each.remedy is None) == isinstance(alone, NothingFits)
        if each.remedy is not None:
            assert each.remedy.step_seconds == pytest.approx(alone.step_seconds)
        else:
            assert each.least.share > 1
    assert any(each.remedy is not None for each in lifted.values())


def test_of_several_forbidden_combinations_each_is_lifted_alone():
    asked, forbidden = job(nodes=6), ["recompute=full", "tp=8"]
    found = lifted_pins(asked, each_lifted(Constraints.parse(["cp=1"], forbidden)))
    assert [each.constraint for each in found] == ["cp=1", "forbidden recompute=full", "forbidden tp=8"]
    seconds = [None if each.remedy is None else each.remedy.step_seconds for each in found]
    alone = [search(asked, Constraints.parse(["cp=1"], [other])).step_seconds for other in reversed(forbidden)]
    assert seconds == [None, pytest.approx(alone[0]), pytest.approx(alone[1])]
    assert alone[0] != alone[1]


def test_offload_is_named_where_it_helps_and_a_pin_asks_for_it():
    asked = job(model="llama3-70b", nodes=1, engine="megatron")
    assert isinstance(search(asked, Constraints()), NothingFits)
    found = find(remedies(asked, Constraints()), "--allow-offload")
    allowed = search(replace(asked, allow_offload=True), Constraints())
    assert allowed.step_seconds == pytest.approx(found.step_seconds)
    pinned = search(asked, Constraints.parse([f"offload={found.layout.offload}"], []))
    assert pinned.layout == allowed.layout
    assert search(asked, Constraints.parse(["offload!=none"], [])).layout.offload == found.layout.offload
    assert not [each for each in remedies(job(cluster="hgx-mi300x", nodes=1), PINNED) if "offload" in each.change]


def test_on_a_mixed_cluster_hosts_of_each_pool_are_tried():
    settings = ("a100.device.memory=9GiB", "h100.device.memory=10GiB")
    mixed = load_job(
        model="llama3-8b",
        cluster="mixed-a100-h100",
        global_batch_size=32,
        sequence_length=2048,
        settings=settings,
        headroom=0.05,
    )
    pins = Constraints.parse(["tp=8,recompute=full"])
    assert isinstance(search(mixed, pins), NothingFits)
    found = remedies(mixed, pins)
    for pool in ("a100", "h100"):
        remedy = find(found, f"hosts of {pool} instead of 1")
        hosts = int(remedy.change.split()[0])
        at_least = search(change_job(mixed, f"{pool}.hosts={hosts}"), pins)
        assert remedy.step_seconds == pytest.approx(at_least.step_seconds)
        assert hosts == 2 or isinstance(search(change_job(mixed, f"{pool}.hosts={hosts - 1}"), pins), NothingFits)
    (lifted,) = [each for each in lifted_pins(mixed, each_lifted(pins)) if each.constraint == "tp=8"]
    assert (lifted.remedy is None) == (lifted.least.share > 1)


def test_adapters_are_named_and_train_beside_frozen_weights():
    asked = job(model="mixtral-8x7b", nodes=1, engine="deepspeed", sequence_length=4096, global_batch_size=32)
    pins = Constraints.parse(["tp=1,pp=1"])
    assert isinstance(search(asked, pins), NothingFits)
    found = find(remedies(asked, pins), "adapters")
    again = search(change_job(asked, "training.lora_rank=16"), pins)
    assert again.fits
    assert again.step_seconds == pytest.approx(found.step_seconds)


def test_where_no_single_change_fits_pairs_do_and_the_smallest_of_each_is_solved():
    asked = job(model="llama3-8b", nodes=1, engine="deepspeed", sequence_length=4096, global_batch_size=8, headroom=0.0)
    free = Constraints.parse(["cp=1,pp=1,tp=1,zero=3,recompute=none,mbs=1"])
    asked = within_share(asked, 0.28)
    assert isinstance(search(asked, free), NothingFits)
    found = [each for each in remedies(asked, free) if "hosts" not in each.change]
    assert found
    assert all(" and " in each.change for each in found)
    each = find(found, "optimizer")
    batch, length = (int(word.replace(",", "")) for word in each.change.split() if word[0].isdigit())
    optimizer = each.change.split()[-1]
    changes = f"seq_len={length},global_batch={batch},training.optimizer={optimizer}"
    assert search(change_job(asked, changes), free).step_seconds == pytest.approx(each.step_seconds)
    longer = f"seq_len={2 * length},global_batch={batch // 2},training.optimizer={optimizer}"
    assert isinstance(search(change_job(asked, longer), free), NothingFits)


@pytest.mark.parametrize(("model", "engine"), [("gpt3-175b", "torch"), ("mixtral-8x22b", "megatron")])
def test_what_comes_nearest_needs_no_more_of_a_device_than_any_layout_by_hand(model, engine):
    asked = job(nodes=1, model=model, engine=engine, global_batch_size=8)
    found = search(asked, Constraints())
    assert isinstance(found, NothingFits)
    share = max(stage.total_bytes / stage.limit_bytes for stage in found.memory)
    tried = []
    for tp, pp, zero, recompute in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (0, 1, 2, 3), ("none", "full")):
        if tp * pp <= 8:
            text = f"tp={tp},pp={pp},zero={zero},sp={int(tp > 1)},recompute={recompute},mbs=1"
            layout = parse_layout(text, num_layers=asked.model.num_layers, num_devices=8)
            if not broken_rules(asked, layout):
                memory = estimate(asked, layout).memory
                tried.append(max(stage.total_bytes / stage.limit_bytes for stage in memory))
    assert len(tried) > 10
    assert 1 < share <= min(tried) * (1 + 1e-9)
