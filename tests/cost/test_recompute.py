"""Recompute part by part: bytes by the published formula, seconds and transfers by hand, and the order of policies."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from planner.cost.activations import kept_activation_bytes, layer_activation_bytes
from planner.cost.estimate import estimate
from planner.cost.flops import attention_core_flops_per_token, model_flops_per_step
from planner.cost.ledger import LineName
from planner.cost.prices import stage_bytes, stage_prices
from planner.cost.recompute import idle_modules
from planner.cost.stage import Stage, chunks_of, stages_of
from planner.cost.transfers import transfers
from planner.cost.transients import recompute_bytes
from planner.layout import Layout, format_layout
from planner.layout_text import parse_layout
from planner.plan import layout_to_dict
from planner.plan_file import layout_from_dict
from planner.search.space.rules import broken_rules
from planner.specs.recompute import MODULES, policy_code, policy_name

OLD_GPT = ("training.attention=unfused", "training.dropout=0.1")


def kept(job, layout, text, *, experts=False):
    (found,) = layer_activation_bytes(job, layout, experts=experts, policies=(policy_code(text),))
    return float(found)


# Korthikanti et al. (2022), section 4.1, in units of s b h bytes: of 34 + 5as/h the MLP keeps its input 2, GELU's 8 and
# the second product's input 8, and a mask 1, which is of the residual addition behind it; the attention core 5as/h.
# Megatron-LM computes the norm with the product behind it, so that the MLP's checkpoint holds that too.
@pytest.mark.parametrize(
    ("text", "fused", "apart"),
    [
        ("core_attn", 34, 34),
        ("mlp", (16, 5), (18, 5)),
        ("layernorm", (34, 5), (30, 5)),
        ("core_attn+mlp", 16, 18),
        ("core_attn+layernorm+mlp", 16, 14),
    ],
)
def test_a_layer_of_gpt_drops_the_terms_of_its_parts(make_job, with_engine, text, fused, apart):
    job = make_job("megatron-22b", engine="megatron", settings=OLD_GPT)
    layout = parse_layout("tp=1", num_layers=job.model.num_layers, num_devices=1)
    h, a, s = job.model.hidden_size, job.model.num_heads, 2048
    for each, wanted in ((job, fused), (with_engine(job, memory={"fused_norms": False}), apart)):
        others, core = wanted if isinstance(wanted, tuple) else (wanted, 0)
        assert kept(each, layout, text) == pytest.approx(s * h * (others + core * a * s / h))


def test_a_layer_of_deepseek_v3_drops_the_tensors_of_its_parts(make_job):
    """Bytes per token: 128 heads, latents of 1536 and 512, 8 choices of 2048 among 256 experts, one shared expert."""
    job = make_job("deepseek-v3", engine="megatron", sequence=4096, settings=("model.moe.imbalance=1.0",))
    layout = parse_layout("ep=8", num_layers=61, num_devices=64)
    h, products, choices = 7168, 128 * (192 + 128 + 128 + 192), 8
    inner = {"moe_act": 2 * choices * 2048, "shared_experts": 2 * 3 * 2048}
    outputs = 2 * choices * h * job.engine.memory.keeps_expert_outputs
    of_experts = 8 * 256 + 2 * choices * (h + 3 * 2048) + outputs + inner["shared_experts"]
    dropped = {
        "mla_up_proj": 2 * (1536 + 512 + products),
        "layernorm": 2 * 2 * h,
        "mlp": 0,
        **inner,
        "moe": of_experts,
        "moe+moe_act+shared_experts": of_experts,
        "moe_act+shared_experts": sum(inner.values()),
        "layernorm+mla_up_proj+moe_act": 2 * (1536 + 512 + products) + 2 * 2 * h + inner["moe_act"],
    }
    everything = kept(job, layout, "none", experts=True)
    for text, num_bytes in dropped.items():
        assert everything - kept(job, layout, text, experts=True) == pytest.approx(4096 * num_bytes), text
    dense = kept(job, layout, "none") - kept(job, layout, "mlp")
    assert dense == pytest.approx(4096 * 2 * (h + 3 * 18432))
    assert kept(job, layout, "moe") == kept(job, layout, "moe_act") == kept(job, layout, "none")


JOBS = {
    "deepseek-v3": ("tp=2,pp=4,ep=8,mbs=1", {"sequence": 4096}),
    "qwen3-30b-a3b": ("tp=1,pp=4,cp=2,ep=8", {"sequence": 4096}),
    "llama3-70b": ("tp=4,pp=4,cp=2,interleave=5", {"sequence": 8192}),
    "gpt3-175b": ("tp=8,pp=8,sp=0", {"settings": OLD_GPT}),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_more_parts_the_less_memory_and_the_more_time(make_job, name):
    text, options = JOBS[name]
    job = make_job(name, engine="megatron", gpus=64, **options)
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=64)
    some = [parts for size in range(len(MODULES) + 1) for parts in combinations(MODULES, size)]
    codes = {frozenset(parts): policy_code("+".join(parts) or "none") for parts in some}
    policy = np.array([*codes.values(), policy_code("full")])[:, np.newaxis]
    stage = replace(stages_of(job, layout), policy=policy)
    num_bytes = np.broadcast_to(stage_bytes(job, layout, stage), (len(policy), layout.pp))
    activations = np.broadcast_to(kept_activation_bytes(job, layout, stage)[0], (len(policy), layout.pp))
    seconds = np.broadcast_to(stage_prices(job, layout, stage).microbatch_seconds, (len(policy), layout.pp))
    row = {parts: index for index, parts in enumerate(codes)}
    for parts, index in row.items():
        for module in set(MODULES) - parts:
            more = row[parts | {module}]
            assert np.all(num_bytes[more] <= num_bytes[index] * (1 + 1e-12)), (parts, module)
            assert np.all(seconds[more] >= seconds[index] * (1 - 1e-12)), (parts, module)
    assert np.all(activations[-1] < activations.min(axis=0) * (1 + 1e-12))
    assert np.all(seconds[-1] >= seconds.max(axis=0) * (1 - 1e-12))
    for parts in (frozenset(), frozenset(("mlp",)), frozenset(("layernorm", "moe_act")), frozenset(MODULES)):
        alone = stages_of(job, replace(layout, recompute=("+".join(sorted(parts)) or "none",) * layout.num_chunks))
        assert np.array_equal(num_bytes[row[parts]], np.broadcast_to(stage_bytes(job, layout, alone), layout.pp))
        one = np.broadcast_to(stage_prices(job, layout, alone).microbatch_seconds, layout.pp)
        assert np.array_equal(seconds[row[parts]], one)


# how often the all-gathers of tensor parallelism, the exchanges of experts and of contexts run in the backward pass of
# 4 layers, of which the first is dense; each layer has 2, 2 and 6 (3 hops of gradients) without recompute
@pytest.mark.parametrize(
    ("text", "tp", "ep", "cp"),
    [
        ("none", 8, 6, 24),
        ("mlp", 9, 6, 24),
        ("moe", 11, 12, 24),
        ("mlp+moe", 12, 12, 24),
        ("core_attn", 8, 6, 36),
        ("selective", 8, 6, 36),
        ("mla_up_proj+moe_act", 8, 6, 24),
        ("full", 16, 12, 36),
        ("full:1", 10, 7.5, 27),
    ],
)
def test_parts_repeat_the_collectives_inside_them(make_job, text, tp, ep, cp):
    settings = ("model.num_layers=4", "model.moe.num_dense_layers=1", "model.mtp_layers=0")
    job = make_job("deepseek-v3", engine="megatron", gpus=64, sequence=4096, settings=settings)
    layout = parse_layout(f"tp=2,cp=4,ep=8,recompute={text}", num_layers=4, num_devices=64)
    found = {}
    for each in transfers(job, layout, stages_of(job, layout)):
        found.setdefault((each.line, each.kind), float(np.squeeze(each.times.get("backward", 0))))
    ends, inputs = 1, 4 * 2  # half an all-gather at each; inputs of both blocks of 4 layers for the weights' gradients
    assert found[LineName.TP_COMM, "all-gather"] == pytest.approx(tp + ends + inputs)
    assert found[LineName.EP_COMM, "all-to-all"] == pytest.approx(ep)
    assert found[LineName.CP_COMM, "ring exchange"] == pytest.approx(cp)


@pytest.mark.parametrize(
    ("text", "layers"),  # that recompute, of chunks with 10, 10, 9 and 9 layers; two chunks each
    [("full:3", (6, 6)), ("full:10", (19, 19)), ("every:3", (6, 6)), ("every:2", (9, 9)), ("full:99", (19, 19))],
)
def test_some_layers_recompute_and_the_others_do_not(make_job, text, layers):
    job = make_job("llama3-8b", engine="megatron", settings=("model.num_layers=38",))
    layouts = [
        parse_layout(f"pp=2,interleave=2,recompute={each}", num_layers=38, num_devices=2)
        for each in (text, "none", "full")
    ]
    some, none, full = (kept_activation_bytes(job, each, chunks_of(job, each))[0] for each in layouts)
    again = np.round((none - some) / ((none - full) / np.array([10, 10, 9, 9])), 9)
    assert tuple(again[:2] + again[2:]) == layers
    chunk, whole = (stage_prices(job, each, stages_of(job, each)).recompute.sum() for each in (layouts[0], layouts[2]))
    assert chunk == pytest.approx(whole * sum(layers) / 38, rel=1e-9)
    back = [float(np.max(recompute_bytes(job, each, stages_of(job, each)))) for each in (layouts[0], layouts[2])]
    assert back[0] == back[1]


def test_kinds_of_layers_recompute_as_if_spread_evenly(make_job):
    job = make_job("deepseek-v3", engine="megatron", settings=("model.num_layers=8", "model.moe.num_dense_layers=4"))
    layout = parse_layout("ep=8", num_layers=8, num_devices=8)
    stage = Stage(
        index=0, num_layers=8, num_expert_layers=4, policy=np.array(list(map(policy_code, ("full:2", "none", "full"))))
    )
    some, none, full = kept_activation_bytes(job, layout, stage)[0]
    assert some == pytest.approx(none + (full - none) / 4)


# parameters that a token meets once more, over all layers
REPEATED = {
    ("llama3-8b", "mlp"): 32 * 3 * 4096 * 14336,
    ("llama3-8b", "layernorm"): 0,
    ("deepseek-v3", "moe"): 58 * (256 * 7168 + 3 * 7168 * 2048 * (8 + 1)),
    ("deepseek-v3", "shared_experts"): 58 * 3 * 7168 * 2048,
    ("deepseek-v3", "moe_act"): 0,
    ("deepseek-v3", "mla_up_proj+mlp"): 61 * 128 * (1536 * 192 + 512 * 256) + 3 * 3 * 7168 * 18432,
}


@pytest.mark.parametrize(("name", "text"), REPEATED)
def test_hardware_flops_count_what_is_repeated(make_job, name, text):
    settings = ("model.mtp_layers=0",) if name == "deepseek-v3" else ()
    job = make_job(name, engine="megatron", gpus=64, batch=64, sequence=4096, settings=settings)
    ep = ",ep=8" if job.model.moe else ""
    layout = parse_layout(f"tp=8{ep},recompute={text}", num_layers=job.model.num_layers, num_devices=64)
    priced = estimate(job, layout)
    flops = 2 * REPEATED[name, text] * 64 * 4096
    assert priced.hfu / priced.mfu - 1 == pytest.approx(flops / model_flops_per_step(job.model, job.training))


def test_every_second_layer_repeats_half_of_the_forward_pass(make_job):
    job = make_job("llama3-8b", engine="torchtitan", gpus=8, batch=64)
    every, full, core = (
        estimate(job, parse_layout(f"zero=3,recompute={text}", num_layers=32, num_devices=8))
        for text in ("every:2", "full", "core_attn")
    )
    assert every.hfu / every.mfu - 1 == pytest.approx((full.hfu / full.mfu - 1) / 2)
    of_core = 32 * attention_core_flops_per_token(job.model, 2048, causal=True, local=False) * 64 * 2048
    assert core.hfu / core.mfu - 1 == pytest.approx(of_core / model_flops_per_step(job.model, job.training))
    times = [next(x.busy_seconds for x in e.time if x.name == LineName.RECOMPUTE) for e in (every, full)]
    assert times[0] == pytest.approx(times[1] / 2)


@pytest.mark.parametrize(
    ("name", "engine", "policy", "fault"),
    [
        ("llama3-8b", "megatron", "mla_up_proj", "llama3-8b has no latent attention"),
        ("llama3-8b", "megatron", "mlp+moe_act", "llama3-8b has no experts"),
        ("mixtral-8x7b", "megatron", "shared_experts", "mixtral-8x7b has no shared experts"),
        ("llama3-8b", "torch", "mlp", "engine torch has no mlp recompute; it has none or full"),
        ("llama3-8b", "megatron", "every:2", "full, full:K for K layers of each chunk or any of core_attn, layernorm"),
        ("deepseek-v3", "megatron", "core_attn+layernorm+mla_up_proj+mlp+moe+moe_act+shared_experts", ""),
        ("llama3-8b", "megatron", "core_attn+layernorm+mlp", ""),
        ("llama3-8b", "megatron", "full:2", ""),
        ("llama3-8b", "torchtitan", "every:2", ""),
        ("llama3-8b", "fsdp", "every:4", ""),
        ("llama3-8b", "fsdp", "full:4", ""),
        ("llama3-8b", "torchtitan", "full:4", "it has none, selective, full or every:N for every N-th layer"),
    ],
)
def test_what_an_engine_or_a_model_does_not_have_is_refused(make_job, name, engine, policy, fault):
    job = make_job(name, engine=engine, gpus=8)
    layout = parse_layout(f"recompute={policy}", num_layers=job.model.num_layers, num_devices=8)
    broken = [each for each in broken_rules(job, layout) if "recompute" in each]
    assert [fault in each for each in broken] == [True] * bool(fault), broken


@pytest.mark.parametrize(("name", "frequent"), [("llama3-8b", False), ("mixtral-8x7b", True), ("deepseek-v3", True)])
def test_parts_are_idle_that_drop_nothing_of_the_kind_of_layer_that_is_most_frequent(make_job, name, frequent):
    """frequent: whether the most frequent kind of layer has experts; 58 of DeepSeek-V3's 61 layers have."""
    job = make_job(name, engine="megatron")
    layout = parse_layout("tp=1", num_layers=job.model.num_layers, num_devices=64)
    everything = kept(job, layout, "none", experts=frequent)
    idle = {part for part in MODULES if kept(job, layout, part, experts=frequent) == everything}
    alone = idle - {"moe_act", "shared_experts", "moe"} if frequent else idle
    assert alone <= idle_modules(job)
    assert not idle_modules(job) - idle


# --- the language -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("moe_act+layernorm", "layernorm+moe_act"),
        ("mlp+mlp", "mlp"),
        ("full:03", "full:3"),
        ("every:2", "every:2"),
        ("2*moe+core_attn/2*full:2", "2*core_attn+moe/2*full:2"),
    ],
)
def test_policies_are_read_in_any_order_and_written_in_one(written, read):
    layout = parse_layout(f"pp=4,recompute={written}", num_layers=8, num_devices=4)
    assert f"recompute={read}," in format_layout(layout)
    assert parse_layout(format_layout(layout), num_layers=8, num_devices=4) == layout
    assert layout_from_dict(layout_to_dict(layout)) == layout


def test_every_policy_has_a_number_of_its_own():
    some = ["+".join(parts) for size in range(1, len(MODULES) + 1) for parts in combinations(MODULES, size)]
    texts = ["none", "selective", "full", "full:1", "full:2", "full:99999", "every:2", "every:3", *some]
    codes = [policy_code(text) for text in texts]
    assert len(set(codes)) == len(codes)
    assert [policy_name(code) for code in codes] == texts
    assert list(MODULES) == sorted(MODULES)


def test_a_layout_names_the_policies_that_its_plan_holds():
    layout = Layout(pp=2, recompute=("mla_up_proj+moe_act", "full:2"), layers_per_stage=(4, 4))
    assert "recompute=mla_up_proj+moe_act/full:2," in format_layout(layout)
