"""Pinned lists are kept exactly, and lists that cannot be kept are refused instead of ignored."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.search.given import plan_for_text
from planner.search.search import NothingFits, search
from planner.search.space.constraints import Constraints
from planner.search.space.space import Space
from planner.specs.load import load_job


def small_job(engine="torch"):
    return load_job(
        model="tiny-llama", cluster="dgx-a100", engine=engine, gpus=8, sequence_length=256, global_batch_size=16,
        settings=("model.num_layers=8",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pin", "layers"),
    [
        ("layers_per_stage=1/3/2/2", (1, 3, 2, 2)),
        ("layers_per_stage=1/1/3/3", (1, 1, 3, 3)),
        ("layers_per_stage=8", (8,)),
        ("pp=2,layers_per_stage=3/1/3/1", (3, 1, 3, 1)),
    ],
)
def test_a_pinned_list_of_layers_comes_back_as_it_was_written(pin, layers):
    found = search(small_job(), Constraints.parse([pin], []))
    assert not isinstance(found, NothingFits)
    assert found.layout.layers_per_stage == layers


@pytest.mark.parametrize("policies", ["full/none/full/none", "none/none/none/full"])
def test_a_pinned_list_of_policies_comes_back_as_it_was_written(policies):
    found = search(small_job(), Constraints.parse([f"recompute={policies}"], []))
    assert not isinstance(found, NothingFits)
    assert found.layout.recompute == tuple(policies.split("/"))


def test_a_pinned_list_may_use_a_policy_that_is_not_offered_by_itself():
    found = search(small_job("megatron"), Constraints.parse(["pp=2,recompute=selective/selective"], []))
    assert not isinstance(found, NothingFits)
    assert found.layout.recompute[:2] == ("selective", "selective")


def test_a_pinned_list_of_policies_that_differ_is_refused_where_the_engine_has_one_for_all():
    with pytest.raises(InputError, match="one recompute policy for all stages"):
        search(small_job("megatron"), Constraints.parse(["pp=2,recompute=none/full"], []))


def test_any_set_of_modules_can_be_pinned():
    found = search(small_job("megatron"), Constraints.parse(["recompute=mlp+core_attn"], []))
    assert not isinstance(found, NothingFits)
    assert set(found.layout.recompute) == {"core_attn+mlp"}


def test_recompute_of_some_layers_can_be_pinned():
    found = search(small_job("megatron"), Constraints.parse(["recompute=full:2", "pp=1"], []))
    assert set(found.layout.recompute) == {"full:2"}


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("recompute=every:2", "has no every:2 recompute"),
        ("recompute=mlp+moe_act", r"recompute=mlp\+moe_act: .* has no experts"),
        ("recompute=mla_up_proj", "has no latent attention"),
        ("pp=2,recompute=none/mla_up_proj", "has no latent attention"),
    ],
)
def test_a_pin_of_modules_that_no_plan_can_keep_is_refused(pin, message):
    with pytest.raises(InputError, match=message):
        search(small_job("megatron"), Constraints.parse([pin], []))


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("pp=2,interleave=2,recompute=full/none/none/full", "cannot be planned"),
        ("pp=2,layers_per_stage=1/3/3/1", "cannot be planned"),
        ("layers_per_stage=1/3/3", "sums to 7"),
        ("recompute=selective", "has no selective recompute"),
        ("recompute=selective/none", "has no selective recompute"),
        ("pp>=99", "pp>=99: legal layouts have pp 1"),
        ("zero>=2,zero<=1", "legal layouts have zero 0"),
        ("mtp=3", "no layers for multi-token prediction"),
        ("pp=8,layers_per_stage=4/4", "cannot be planned"),
    ],
)
def test_a_pin_that_no_plan_can_keep_is_refused(pin, message):
    with pytest.raises(InputError, match=message):
        search(small_job(), Constraints.parse([pin], []))


@pytest.mark.parametrize(
    ("layers", "words"),
    [("7/3", "equal stages, and chunks hold 3 or 7 layers; 5 in each"), ("5/5", "")],
)
def test_an_engine_of_equal_stages_is_priced_and_planned_with_these_alone(layers, words):
    """`megatron-2021` has no option for the layers of a stage (engine profile, uneven_stages)."""
    job = load_job(
        model="tiny-llama", cluster="dgx-a100", engine="megatron-2021", gpus=8, sequence_length=256,
        global_batch_size=16, settings=("model.num_layers=10",), precision="fp16",
    )  # fmt: skip
    text = f"pp=2,layers_per_stage={layers}"
    for ask in (
        lambda: plan_for_text(job, f"{text},dp=4,mbs=1,recompute=none"),
        lambda: search(job, Constraints.parse([text])),
    ):
        if not words:
            assert ask().layout.layers_per_stage == (5, 5)
            continue
        with pytest.raises(InputError, match=words):
            ask()


@pytest.mark.parametrize(
    ("pins", "forbids"),
    [
        ([], ["layers_per_stage=32"]),
        ([], ["tp=2,layers_per_stage=8/8/8/8"]),
        ([], ["recompute=full/none"]),
        (["recompute!=full/none"], []),
        (["layers_per_stage!=8"], []),
    ],
)
def test_lists_that_would_be_ignored_are_refused(pins, forbids):
    with pytest.raises(InputError, match="can only be pinned"):
        Constraints.parse(pins, forbids)


@pytest.mark.parametrize(
    "forbidden", ["recompute=none,zero=0", "recompute!=full,tp>=2", "tp=1,pp=1,dp=8,zero=2,recompute=none"]
)
def test_a_policy_is_forbidden_beside_other_keys(forbidden):
    (combination,) = Constraints.parse(forbids=[forbidden]).forbidden
    free, plan = search(small_job(), Constraints()), search(small_job(), Constraints(forbidden=(combination,)))
    assert plan.step_seconds >= free.step_seconds * (1 - 1e-12)
    policies = {policy: {"=": policy == "none", "!=": policy != "full"} for policy in plan.layout.recompute}
    held = [
        any(each[condition.sign] for each in policies.values())
        if condition.key == "recompute"
        else condition.holds(plan.layout)
        for condition in combination
    ]
    assert not all(held)


@pytest.mark.parametrize("forbids", [["tp>=1"], ["tp=1", "tp=2", "tp=4", "tp=8"]])
def test_what_forbids_every_layout_is_named(forbids):
    with pytest.raises(InputError, match="every legal layout is forbidden") as error:
        search(small_job(), Constraints.parse(forbids=forbids))
    assert forbids[0] in str(error.value)


@pytest.mark.parametrize("given", [{"pins": [""]}, {"forbids": [" "]}])
def test_an_empty_option_is_refused(given):
    with pytest.raises(InputError, match="it is empty"):
        Constraints.parse(**given)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_what_is_no_time_limit_is_refused(seconds):
    with pytest.raises(InputError, match="is no time limit"):
        search(small_job(), Constraints(), time_limit=seconds)


def test_a_plan_keeps_a_pinned_chunk_of_the_loss():
    job = load_job(model="llama3-8b", cluster="dgx-h100", engine="megatron", gpus=8, global_batch_size=64)
    assert search(job, Constraints.parse(["loss=3"], [])).layout.num_chunks == 4
    with pytest.raises(InputError, match="cannot be planned"):
        Constraints.parse([], ["loss=3"])


def test_two_degrees_can_be_compared_in_what_is_forbidden():
    job = small_job()
    forbidden = Constraints.parse((), ["tp>=2,hsdp=dp", "pp=tp"])
    degrees = [each.take(i) for each in Space(job, forbidden).blocks(with_replicas=True) for i in range(len(each))]
    assert any(each.tp > 1 and each.hsdp > 1 for each in degrees)
    assert not any((each.tp > 1 and each.hsdp == each.dp) or each.pp == each.tp for each in degrees)
    free = [each.take(i) for each in Space(job).blocks(with_replicas=True) for i in range(len(each))]
    assert len(degrees) == sum(not ((x.tp > 1 and x.hsdp == x.dp) or x.pp == x.tp) for x in free)


@pytest.mark.parametrize(("pins", "forbids"), [(["hsdp=dp"], []), ([], ["recompute=dp"]), ([], ["hsdp=recompute"])])
def test_only_numbers_are_compared_and_only_in_what_is_forbidden(pins, forbids):
    with pytest.raises(InputError, match="is no legal value"):
        Constraints.parse(pins, forbids)
