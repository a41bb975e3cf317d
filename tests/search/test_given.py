"""Missing values of a layout become the settings of the engine's users: each rule against its source, by hand."""

from __future__ import annotations

import pytest

from planner.api import estimate_layout
from planner.errors import InputError
from planner.layout import Assumed
from planner.layout_text import parse_layout
from planner.plan import Plan
from planner.plan_file import plan_from_json
from planner.search.given import RULES, split_with_ends
from planner.show.words import short_layout

DEEPSEEK = {"model": "deepseek-v3", "cluster": "gb200-nvl72", "engine": "megatron-bridge", "nodes": 64, "seq_len": 4096}
DEEPSEEK |= {"global_batch": 4096, "precision": "fp8"}


def plan_of(layout: str, **options: object) -> Plan:
    plain = {"model": "llama3-8b", "cluster": "dgx-h100", "engine": "megatron", "nodes": 2, "seq_len": 8192}
    return estimate_layout(layout=layout, **{**plain, "global_batch": 64, **options})


def assumed(plan: Plan) -> dict[str, str]:
    return {each.key: each.value for each in plan.assumed}


CASES = {
    "mbs": ("tp=2,pp=2", {}, "1"),
    # Megatron-LM: --use-distributed-optimizer; FSDP reshards after the forward pass; no ZeRO in Megatron of 2021
    "zero": ("tp=2", {}, "1"),
    # megatron/core/transformer/transformer_config.py: expert_tensor_parallel_size is tensor_model_parallel_size
    "etp": ("tp=4,pp=2,ep=2,recompute=full", {"model": "mixtral-8x7b"}, "4"),
    "sp": ("tp=2", {}, "1"),
    # 32 layers on 2 stages in chunks of at most 4 layers
    "interleave": ("tp=2,pp=2,schedule=interleaved", {}, "4"),
    # 32 layers, embedding and loss are 34: two stages of 17 need no help, 17 chunks of 2 do
    "layers_per_stage": ("tp=1,pp=17,dp=1,recompute=none", {"nodes": 3}, "/".join(["1", *["2"] * 15, "1"])),
    # 8,192 tokens x 8 sequences x 32 layers of Llama-3-8B do not fit into 80 GB unless all are recomputed
    # 256 GB200 in four racks of 72: groups of 64 experts are whole in 16 hosts of each
    "segment": ("tp=1,pp=4,ep=64", DEEPSEEK, "16"),
    "recompute": ("tp=1,pp=1,mbs=8", {"global_batch": 128, "engine": "deepspeed"}, "full"),
}


def test_there_is_a_case_for_each_rule() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("key", CASES)
def test_a_rule_fills_its_key(key: str) -> None:
    layout, options, value = CASES[key]
    plan = plan_of(layout, **options)
    assert assumed(plan)[key] == value
    found = getattr(plan.layout, key)
    listed = (
        "/".join(map(str, dict.fromkeys(found) if key == "recompute" else found))
        if isinstance(found, tuple)
        else str(found)
    )
    assert listed == value


@pytest.mark.parametrize("key", CASES)
def test_what_is_given_is_not_assumed(key: str) -> None:
    layout, options, value = CASES[key]
    assert key not in assumed(plan_of(f"{layout},{key}={value}", **options))


@pytest.mark.parametrize(
    ("engine", "layout", "key", "value"),
    [
        ("fsdp", "dp=16", "zero", "3"),
        ("fsdp", "dp=1", "zero", "3"),  # which has no ZeRO-0, on one device too
        ("torchtitan", "tp=2", "zero", "3"),
        ("torchtitan", "tp=2,pp=2", "zero", "1"),
        ("deepspeed", "tp=2", "sp", "0"),
        ("torchtitan", "tp=2", "recompute", "selective"),  # its default, though less would fit
        ("torch", "tp=2", "recompute", "none"),
    ],
)
def test_engines_differ(engine: str, layout: str, key: str, value: str) -> None:
    assert assumed(plan_of(layout, engine=engine))[key] == value


def test_recipes_of_bridge_leave_experts_whole() -> None:
    assert "etp" not in assumed(plan_of("tp=4,pp=2,ep=2", model="mixtral-8x7b", engine="megatron-bridge"))


def test_expert_tensor_parallelism_that_does_not_divide_is_left_out() -> None:
    found = assumed(plan_of("tp=4,dp=4,ep=8,zero=1,recompute=full", model="mixtral-8x7b"))
    assert found["etp"] == "1"


def test_recompute_takes_the_first_policy_that_fits_and_the_last_where_none_does() -> None:
    words = {each.key: each.rule for each in plan_of("tp=1,mbs=1,pp=2").assumed}
    assert words["recompute"] == "the default of megatron"
    assert assumed(plan_of("tp=1,mbs=1,pp=2"))["recompute"] == "none"
    nothing = plan_of("tp=1,pp=1", model="llama3-70b")
    assert (nothing.fits, assumed(nothing)["recompute"]) == (False, "full")
    less = plan_of("tp=1,pp=1,mbs=8,recompute=none", global_batch=128)
    assert not less.fits


def test_less_recompute_comes_before_more() -> None:
    """The chosen policy more likely fits than not, and no policy before it does."""
    longer = DEEPSEEK | {"seq_len": 10240}
    plan = plan_of("tp=1,pp=4,ep=64", **longer)
    assert assumed(plan)["recompute"] == "layernorm+mla_up_proj+moe_act"
    assert plan.chance_of_fitting >= 0.5
    for policy in ("none", "selective", "mla_up_proj", "layernorm+moe_act"):
        assert plan_of(f"tp=1,pp=4,ep=64,recompute={policy}", **longer).chance_of_fitting < 0.5


def test_the_fewest_layers_that_fit_recompute() -> None:
    assert assumed(plan_of("tp=1,pp=1", seq_len=4096))["recompute"] == "none"
    longer = plan_of("tp=1,pp=1", seq_len=5632)
    assert assumed(longer)["recompute"] == "mlp"
    assert plan_of("tp=1,pp=1,recompute=none", seq_len=5632).chance_of_fitting < 0.5 <= longer.chance_of_fitting
    taken = assumed(plan_of("tp=1,pp=1,mbs=2"))["recompute"]
    kind, _, number = taken.partition(":")
    assert kind == "full"
    assert plan_of(f"tp=1,pp=1,mbs=2,recompute={taken}").chance_of_fitting >= 0.5
    assert plan_of(f"tp=1,pp=1,mbs=2,recompute=full:{int(number) - 1}").chance_of_fitting < 0.5


@pytest.mark.parametrize(
    ("layers", "mtp", "chunks", "split"),
    [
        (61, 1, 16, (*(4,) * 15, 1)),  # DeepSeek-V3 with MTP: Megatron-Bridge, recipes/deepseek/deepseek_v3.py
        (61, 1, 8, (*(8,) * 7, 5)),  # the same
        (61, 1, 4, (16, 16, 16, 13)),  # the same
        (61, 1, 32, None),
        (126, 0, 64, (1, *(2,) * 62, 1)),  # Llama 3.1 405B (2024), section 3.3.2: 126 layers on 16 stages of 8
        (70, 0, 12, (5, *(6,) * 10, 5)),  # BLOOM: 70 layers and two embeddings on 12 stages
        (96, 0, 8, None),
        (61, 0, 4, None),
        (126, 0, 128, None),
    ],
)
def test_ends_count_as_layers_where_that_makes_equal_chunks(
    layers: int, mtp: int, chunks: int, split: tuple[int, ...] | None
) -> None:
    assert split_with_ends(layers, mtp, chunks) == split


def test_what_is_assumed_is_kept_in_the_plan() -> None:
    plan = plan_of("tp=2")
    assert plan_from_json(plan.to_json()).assumed == plan.assumed
    assert Assumed(key="mbs", value="1", rule="one sequence, which every engine can") in plan.assumed


@pytest.mark.parametrize("engine", ["megatron", "megatron-bridge", "torch"])
@pytest.mark.parametrize(
    "layout", ["tp=2,pp=2", "tp=1,pp=2,mbs=2,zero=1", "dp=16", "tp=2,pp=2,schedule=1f1b", "tp=2,pp=2,interleave=4"]
)
def test_a_layout_that_is_shown_leaves_nothing_to_the_engine(engine: str, layout: str) -> None:
    plan = plan_of(layout, engine=engine)
    shown = short_layout(plan.layout)
    assert parse_layout(shown, num_layers=32, num_devices=16) == plan.layout
    assert plan_of(shown, engine=engine).layout == plan.layout


def test_mistakes_in_a_layout_are_named_as_before() -> None:
    with pytest.raises(InputError, match="unknown layout key"):
        plan_of("tq=2")
    with pytest.raises(InputError, match="does not divide the global batch"):
        plan_of("dp=16,mbs=3")
