"""Parameter counts against the published closed form, and placement against the whole."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.parameters import layer_params, layer_params_on_device, num_params, stage_params_on_device
from planner.layout import parse_layout

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
    job = make_job(name, settings=("engine.vocab_multiple=1",))
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=128)
    index = np.arange(layout.pp)
    layers = np.array([layout.layers_of_stage(r) for r in range(layout.pp)])
    held = stage_params_on_device(job.model, job.engine, layout, index, layers).sum()
    whole = 2 * 2 * job.model.hidden_size if job.model.norm == "layernorm" else 2 * job.model.hidden_size
    whole += 2 * job.model.hidden_size if job.model.attention_bias else 0
    norms_again = (layout.tp - 1) / layout.tp * whole * job.model.num_layers
    one_rank = job.model.num_layers * layer_params(job.model) / layout.tp + norms_again
    assert job.model.num_layers * layer_params_on_device(job.model, layout) == pytest.approx(one_rank)
    ends = num_params(job.model) - job.model.num_layers * layer_params(job.model)
    matrix = job.model.vocab_size * job.model.hidden_size
    copies = 1 if job.model.tied_embeddings and layout.pp == 1 else 2
    stored = 1 if job.model.tied_embeddings else 2
    ends_held = ends - stored * matrix + copies * matrix / layout.tp
    assert held == pytest.approx(one_rank + ends_held, rel=1e-12)
