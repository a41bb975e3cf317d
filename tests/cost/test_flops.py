"""FLOPs and days against published figures."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.flops import end_to_end_days, model_flops_per_step, sc21_flops_per_step
from planner.cost.layers import attention_span
from planner.cost.parameters import num_params


@pytest.mark.parametrize(
    ("tokens", "params", "gpus", "teraflops", "days"),
    [(300e9, 175e9, 1024, 140, 34), (450e9, 1.008e12, 3072, 163, 84)],
)
def test_days_of_the_sc21_paper(tokens, params, gpus, teraflops, days):
    assert end_to_end_days(tokens, params, gpus, teraflops * 1e12) == pytest.approx(days, abs=0.5)


def test_sc21_equation_counts_four_passes_and_the_full_square(make_job):
    """96 B s L h^2 is 4 passes of 24 h^2 per token and layer; this test adds attention and the head by hand."""
    job = make_job("megatron-22b", batch=4)
    m, s = job.model, 2048
    h, layers, tokens = m.hidden_size, m.num_layers, 4 * s
    by_hand = 4 * tokens * layers * (24 * h * h + 4 * s * h) + 3 * 2 * tokens * h * m.vocab_size
    assert sc21_flops_per_step(m, job.training) == pytest.approx(by_hand)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b", "llama2-7b"])
def test_model_flops_are_about_six_per_parameter_and_token(make_job, name):
    job = make_job(name)
    six = 6 * num_params(job.model) * 64 * 2048
    assert six * 0.9 < model_flops_per_step(job.model, job.training) < six * 1.15


# Multiplications for each token of a forward pass, product by product: sizes as the published configurations have
# them. The core is two products of the queries' width with the keys that a query sees.
def gpt2_xl(s):
    return 48 * (3 * 1600**2 + 1600**2 + 2 * 1600 * 6400 + 2 * 1600 * s / 2) + 1600 * 50257


def llama3_8b(s):
    attention = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096
    return 32 * (attention + 3 * 4096 * 14336 + 2 * 4096 * s / 2) + 4096 * 128256


def mixtral_8x7b(s):
    attention = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096
    return 32 * (attention + 4096 * 8 + 2 * 3 * 4096 * 14336 + 2 * 4096 * s / 2) + 4096 * 32000


def deepseek_v3(s):
    """Latents of 1536 and 512 + 64, 128 heads with keys of 192 and values of 128; 3 dense layers; one layer for MTP."""
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    core = 128 * (192 + 128) * s / 2
    experts = 7168 * 256 + 9 * 3 * 7168 * 2048
    head = 7168 * 129280
    layers = 61 * (attention + core) + 3 * 3 * 7168 * 18432 + 58 * experts
    further = attention + core + experts + 2 * 7168 * 7168 + head
    return layers + head + further


def bert_large(s):
    """Every token attends to every other token; the small heads of pre-training are not part of the model."""
    return 24 * (4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024 * s)


def vit_large(s):
    return 24 * (4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024 * s) + 3 * 16 * 16 * 1024


def t5_large(s):
    """24 encoder layers, and 24 decoder layers with cross-attention to equally many positions."""
    encoder = 4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024 * s
    decoder = 8 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024 * s / 2 + 2 * 1024 * s
    return 24 * (encoder + decoder) + 1024 * 32128


@pytest.mark.parametrize(
    ("by_hand", "s"),
    [
        (gpt2_xl, 1024),
        (llama3_8b, 8192),
        (mixtral_8x7b, 4096),
        (deepseek_v3, 4096),
        (bert_large, 512),
        (vit_large, 197),
        (t5_large, 512),
    ],
)
def test_flops_are_those_counted_by_hand(make_job, by_hand, s):
    job = make_job(by_hand.__name__.replace("_", "-"), batch=8, sequence=s)
    assert model_flops_per_step(job.model, job.training) == pytest.approx(3 * 2 * by_hand(s) * s * 8, rel=2e-3)


def pairs(s, *, causal, window):
    """Mean number of keys that a query attends to, counted in a mask."""
    query, key = np.meshgrid(np.arange(s), np.arange(s), indexing="ij")
    return np.mean(np.sum((~causal | (key <= query)) & (key > query - window), axis=1))


@pytest.mark.parametrize("s", [256, 1000])
@pytest.mark.parametrize("model", ["llama3-8b", "mistral-7b", "gemma2-9b", "gpt-oss-20b", "bert-large", "t5-large"])
def test_the_span_of_attention_is_counted_in_masks(make_job, model, s):
    """The counts may differ by half a key, because the usual formulas leave out half of the diagonal."""
    job = make_job(model, sequence=256, settings=("model.sliding_window=100",) if model in WINDOWED else ())
    m = job.model
    window = m.sliding_window or s
    total = found = 0.0
    for layer in range(m.num_layers):
        encodes = m.kind == "encoder" or layer < m.num_encoder_layers
        wide = not m.sliding_window or (m.global_every and (layer + 1) % m.global_every == 0)
        total += pairs(s, causal=np.asarray(not encodes), window=s if wide else window)
        total += s if m.kind == "encoder-decoder" and not encodes else 0.0
        found += attention_span(m, s, causal=True, local=not wide)
    assert found / m.num_layers == pytest.approx(total / m.num_layers, abs=0.51)


WINDOWED = ("mistral-7b", "gemma2-9b", "gpt-oss-20b")
