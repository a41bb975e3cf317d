"""Parameter counts compared with published closed forms, and placement with a count tensor by tensor."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.parameters import (
    end_params_on_device,
    layer_params,
    layer_params_on_device,
    mtp_params,
    num_active_params,
    num_matmul_params,
    num_moe_layers,
    num_params,
)
from planner.cost.stage import held_params, stages_of
from planner.cost.transfers import expert_transfers
from planner.layout_text import parse_layout
from planner.specs.by_name import load_model
from planner.specs.model import ModelSpec

SC21 = {
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18.4b": 18.4,
    "megatron-39.1b": 39.1,
    "megatron-76.1b": 76.1,
    "megatron-145.6b": 145.6,
    "megatron-310.1b": 310.1,
    "megatron-529.6b": 529.6,
    "megatron-1t": 1008.0,
}
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "llama4-maverick")


def layout_of(model, text, devices=64):
    return parse_layout(text, num_layers=model.num_layers, num_devices=devices)


@pytest.mark.parametrize(("name", "billions"), SC21.items())
def test_counts_of_the_sc21_table(make_job, name, billions):
    assert num_params(make_job(name).model) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize("name", SC21)
def test_gpt_equals_equation_2_of_sc21(make_job, name):
    m = make_job(name).model
    h, layers = m.hidden_size, m.num_layers
    closed = 12 * layers * h**2 * (1 + 13 / (12 * h) + (m.vocab_size + m.max_sequence_length) / (12 * layers * h))
    final_norm = 2 * h  # equation 2 leaves it out
    assert num_params(m) == pytest.approx(closed + final_norm, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b"])
@pytest.mark.parametrize("text", ["tp=1,pp=1", "tp=8,pp=8", "tp=4,pp=2,interleave=4", "tp=1,pp=16"])
def test_stages_add_up_to_the_model(make_job, name, text):
    job = make_job(name, settings=("engine.memory.vocab_multiple=1",))
    layout = layout_of(job.model, text, 128)
    held = held_params(job, layout, stages_of(job, layout)).total.sum()
    whole = 2 * 2 * job.model.hidden_size if job.model.norm == "layernorm" else 2 * job.model.hidden_size
    whole += 2 * job.model.hidden_size if job.model.attention_bias else 0
    norms_again = (layout.tp - 1) / layout.tp * whole * job.model.num_layers
    one_rank = job.model.num_layers * layer_params(job.model, experts=False) / layout.tp + norms_again
    on_rank = layer_params_on_device(job.model, layout, experts=False).total
    assert job.model.num_layers * on_rank == pytest.approx(one_rank)
    ends = num_params(job.model) - job.model.num_layers * layer_params(job.model, experts=False)
    matrix = job.model.vocab_size * job.model.hidden_size
    copies = 1 if job.model.tied_embeddings and layout.pp == 1 else 2
    stored = 1 if job.model.tied_embeddings else 2
    ends_held = ends - stored * matrix + copies * matrix / layout.tp
    assert held == pytest.approx(one_rank + ends_held, rel=1e-12)


# Every tensor of one layer as transformers names it: shape, and the axis that cuts it ("tp", "expert" or none).
# Shapes from the model classes; which are cut from Megatron-LM's column- and row-parallel layers.
DEEPSEEK_V3_MOE = {
    "input_layernorm": ((7168,), ""),
    "q_a_proj": ((7168, 1536), ""),
    "q_a_layernorm": ((1536,), ""),
    "q_b_proj": ((1536, 128 * 192), "tp"),
    "kv_a_proj_with_mqa": ((7168, 512 + 64), ""),
    "kv_a_layernorm": ((512,), ""),
    "kv_b_proj": ((512, 128 * 256), "tp"),
    "o_proj": ((128 * 128, 7168), "tp"),
    "post_attention_layernorm": ((7168,), ""),
    "gate": ((256, 7168), ""),
    "experts": ((256, 3, 7168, 2048), "expert"),
    "shared_experts": ((3, 7168, 2048), "tp"),
}
GPT_OSS_20B = {
    "input_layernorm": ((2880,), ""),
    "q_proj": ((2880 + 1, 64 * 64), "tp"),
    "k_proj": ((2880 + 1, 8 * 64), "tp"),
    "v_proj": ((2880 + 1, 8 * 64), "tp"),
    "o_proj": ((64 * 64, 2880), "tp"),
    "o_proj.bias": ((2880,), ""),
    "sinks": ((64,), "tp"),
    "post_attention_layernorm": ((2880,), ""),
    "router": ((2880 + 1, 32), ""),
    "gate_up_proj": ((32, 2880 + 1, 2 * 2880), "expert"),
    "down_proj": ((32, 2880 + 1, 2880), "expert"),
}
QWEN3_8B = {
    "input_layernorm": ((4096,), ""),
    "q_proj": ((4096, 32 * 128), "tp"),
    "k_proj": ((4096, 8 * 128), "tp"),
    "v_proj": ((4096, 8 * 128), "tp"),
    "o_proj": ((32 * 128, 4096), "tp"),
    "q_norm": ((128,), ""),
    "k_norm": ((128,), ""),
    "post_attention_layernorm": ((4096,), ""),
    "mlp": ((3, 4096, 12288), "tp"),
}


@pytest.mark.parametrize(
    ("name", "tensors"), [("deepseek-v3", DEEPSEEK_V3_MOE), ("gpt-oss-20b", GPT_OSS_20B), ("qwen3-8b", QWEN3_8B)]
)
@pytest.mark.parametrize("text", ["tp=1", "tp=8", "tp=2,ep=8,etp=2", "tp=4,ep=32"])
def test_a_layer_on_a_device_is_the_sum_of_its_shards(name, tensors, text):
    model = load_model(name)
    layout = layout_of(model, text)
    shares = {"": 1, "tp": layout.tp, "expert": layout.ep * layout.etp}
    held = sum(prod(shape) / shares[cut] for shape, cut in tensors.values())
    on_device = layer_params_on_device(model, layout, experts=True)
    assert on_device.total == pytest.approx(held, rel=1e-12)
    assert layer_params(model, experts=True) == sum(prod(shape) for shape, _ in tensors.values())
    routed = sum(prod(shape) / shares[cut] for shape, cut in tensors.values() if cut == "expert")
    assert on_device.experts == pytest.approx(routed)


@pytest.mark.parametrize("name", [*EXPERTS, "deepseek-v2-lite"])
def test_mixed_stacks_add_up(name):
    model = load_model(name)
    with_experts = num_moe_layers(model)
    moe, dense = (layer_params(model, experts=each) for each in (True, False))
    layers = with_experts * moe + (model.num_layers - with_experts) * dense
    ends = num_params(model) - layers
    assert ends == 2 * model.vocab_size * model.hidden_size + model.hidden_size  # embedding, head, last norm
    routed = layer_params_on_device(model, layout_of(model, "tp=1", 1), experts=True).experts
    idle = 1 - model.moe.experts_per_token / model.moe.num_experts
    assert num_active_params(model) == num_params(model) - with_experts * idle * routed


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("text", ["pp=1", "pp=4", "pp=8", "pp=4,interleave=3"])
def test_stages_of_a_model_with_experts_add_up(make_job, name, text):
    job = make_job(name, settings=("engine.memory.vocab_multiple=1",))
    layout = layout_of(job.model, text)
    held = held_params(job, layout, stages_of(job, layout)).total.sum()
    copies = job.model.vocab_size * job.model.hidden_size if job.model.mtp_layers and layout.pp > 1 else 0
    assert held == pytest.approx(num_params(job.model) + mtp_params(job.model) + copies, rel=1e-12)


def test_layers_of_one_set_of_weights_are_held_once_and_passed_each_time(make_job):
    """24 of 32 layers of Llama-3-8B share six layers: a token meets as many matrices; 18 fewer layers are held."""
    settings = ("engine.memory.vocab_multiple=1", "model.layers=[{num_layers: 24, shared_by: 4}]")
    plain, job = make_job("llama3-8b", settings=settings[:1]), make_job("llama3-8b", settings=settings)
    assert num_matmul_params(job.model) == num_matmul_params(plain.model)
    assert num_params(plain.model) - num_params(job.model) == 18 * 218_112_000
    layout = layout_of(job.model, "tp=1", 1)
    held = held_params(job, layout, stages_of(job, layout)).total.sum()
    assert held == pytest.approx(num_params(job.model), rel=1e-12)


def test_embeddings_narrower_than_the_model(make_job):
    """An embedding of width 512 and a head that reads 1024 numbers, for a vocabulary of 128,256."""
    settings = ("engine.memory.vocab_multiple=1", "model.embedding_size=512", "model.head_input_size=1024")
    plain, job = make_job("llama3-8b", settings=settings[:1]), make_job("llama3-8b", settings=settings)
    assert num_params(plain.model) - num_params(job.model) == 128_256 * (2 * 4096 - 512 - 1024)
    assert num_matmul_params(plain.model) - num_matmul_params(job.model) == 128_256 * (4096 - 1024)
    layout = layout_of(job.model, "tp=1", 1)
    held = held_params(job, layout, stages_of(job, layout)).total.sum()
    assert held == pytest.approx(num_params(job.model), rel=1e-12)


@pytest.mark.parametrize(
    "name", ["nemotron3-ultra-550b-a55b", "granite4-h-small", "glm-5", "mimo-v2-flash", "qwen3-next-80b-a3b"]
)
def test_one_device_holds_the_whole_of_a_hybrid(make_job, name):
    job = make_job(name, settings=("engine.memory.vocab_multiple=1", "model.mtp_layers=0"))
    layout = layout_of(job.model, "tp=1", 1)
    held = held_params(job, layout, stages_of(job, layout)).total.sum()
    assert held == pytest.approx(num_params(job.model), rel=1e-12)


def test_experts_behind_a_latent_multiply_and_send_its_width(make_job):
    """Experts read 512 numbers instead of Mixtral's 4096; two matrices lead to this width and back."""
    plain = make_job("mixtral-8x7b")
    job = make_job("mixtral-8x7b", settings=("model.moe.latent_size=512",))
    expert = 2 * 3 * 14336 * (4096 - 512) - 2 * 4096 * 512
    assert num_matmul_params(plain.model) - num_matmul_params(job.model) == 32 * expert
    layout = layout_of(job.model, "ep=8")
    sent = [sum(each.num_bytes for each in expert_transfers(one, layout)) for one in (plain, job)]
    assert sent[1] == sent[0] / 8


def test_matmul_params_of_deepseek_v3_by_hand():
    """Every matrix that one token meets, from the shapes in the table above."""
    attention = sum(prod(DEEPSEEK_V3_MOE[key][0]) for key in DEEPSEEK_V3_MOE if key.endswith(("proj", "mqa")))
    expert = 3 * 7168 * 2048
    moe = attention + 9 * expert + 256 * 7168  # 8 routed, 1 shared, router
    dense = attention + 3 * 7168 * 18432
    head = 129280 * 7168
    assert (
        num_matmul_params(load_model("deepseek-v3").model_copy(update={"mtp_layers": 0})) == 58 * moe + 3 * dense + head
    )
    further = moe + 2 * 7168**2 + head
    assert num_matmul_params(load_model("deepseek-v3")) == 58 * moe + 3 * dense + head + further


def test_encoder_decoder_by_hand():
    """T5's decoder layers have two attention blocks; a device holds the mean of an encoder and a decoder layer."""
    model = load_model("t5-3b")
    attention, ffn, norm = 4 * 1024 * 4096, 2 * 1024 * 16384, 1024
    encoder, decoder = attention + ffn + 2 * norm, 2 * attention + ffn + 3 * norm
    assert layer_params(model, experts=False) == (encoder + decoder) / 2
    cut = layer_params_on_device(model, layout_of(model, "tp=8", 8), experts=False).total
    assert cut == pytest.approx((1.5 * attention + ffn) / 8 + 2.5 * norm)
    assert num_matmul_params(model) == 24 * (3 * attention + 2 * ffn) + 32128 * 1024


def test_ends_of_models_without_a_vocabulary_or_a_head(make_job, with_engine):
    engine = make_job().engine
    vit, bert = load_model("vit-large"), load_model("bert-large")
    one = layout_of(vit, "tp=1", 1)
    patches, classes, positions = (3 * 16 * 16 + 1) * 1024, 1024, 197 * 1024
    assert end_params_on_device(vit, engine, one, 0, 0) == patches + classes + positions + 2 * 1024 + 1024 * 1025
    bare = with_engine(make_job(), memory={"vocab_multiple": 1}).engine
    words = (30522 + 512 + 2) * 1024
    assert end_params_on_device(bert, bare, one, 0, 0) == words + 2 * 1024 + 1024 * 1025


shapes = st.fixed_dictionaries(
    {
        "num_layers": st.integers(4, 12),
        "num_kv_heads": st.sampled_from([1, 2, 4]),
        "norms_per_layer": st.sampled_from([1, 2, 4]),
        "qk_norm": st.sampled_from(["none", "head", "width"]),
        "qkv_bias": st.booleans(),
        "attention_sinks": st.booleans(),
        "tied_embeddings": st.booleans(),
        "norm": st.sampled_from(["rmsnorm", "layernorm"]),
        "activation": st.sampled_from(["swiglu", "gelu"]),
    }
)
mixtures = st.fixed_dictionaries(
    {
        "num_experts": st.just(8),
        "experts_per_token": st.integers(1, 8),
        "ffn_hidden_size": st.sampled_from([16, 64]),
        "shared_ffn_hidden_size": st.sampled_from([0, 32]),
        "num_dense_layers": st.integers(0, 2),
        "layer_frequency": st.sampled_from([1, 2]),
        "expert_bias": st.booleans(),
        "router_bias": st.booleans(),
    }
)


@given(shapes, mixtures)
def test_properties_of_models_with_experts(shape, mixture):
    model = ModelSpec(
        name="x", architecture="llama", hidden_size=64, num_heads=4, ffn_hidden_size=96, vocab_size=128,
        max_sequence_length=64, moe=mixture, **shape,
    )  # fmt: skip
    assert (num_active_params(model) == num_params(model)) == (mixture["experts_per_token"] == 8)
    assert num_matmul_params(model) <= num_active_params(model) + 128 * 64  # a tied head is used twice
    layouts = [layout_of(model, f"tp={t},ep={e}") for t, e in ((1, 1), (2, 1), (2, 2))]
    halves = [layer_params_on_device(model, each, experts=True).total for each in layouts]
    whole = layer_params(model, experts=True)
    assert halves[0] == whole
    assert np.all(np.diff(halves) < 0)
    assert min(halves) >= whole / 2 / 2
