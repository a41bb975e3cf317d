"""Encoders and encoder-decoders, priced as a whole on one stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.activations import layer_activation_bytes
from planner.cost.collectives import all_reduce_seconds
from planner.cost.estimate import estimate
from planner.cost.groups import group
from planner.cost.layers import _light_operators, layer_seconds
from planner.cost.ledger import LineName
from planner.cost.traffic import busy_seconds
from planner.cost.transfers import tensor_transfers
from planner.layout_text import parse_layout
from planner.search.space.rules import broken_rules
from planner.specs.calibration import UNCALIBRATED


def job_and_layout(make_job, model, text, **options):
    job = make_job(model, gpus=8, batch=64, sequence=options.pop("sequence", 512), **options)
    return job, parse_layout(text, num_layers=job.model.num_layers, num_devices=8)


@pytest.mark.parametrize(
    ("model", "sequence"), [("bert-large", 512), ("vit-large", 197), ("t5-large", 512), ("t5-11b", 512)]
)
@pytest.mark.parametrize("text", ["dp=8", "dp=8,zero=1,recompute=full", "tp=4,dp=2,sp=0"])
def test_encoders_are_priced_on_one_stage_only(make_job, model, sequence, text):
    job, layout = job_and_layout(make_job, model, text, sequence=sequence)
    assert broken_rules(job, layout) == ()
    priced = estimate(job, layout)
    assert 0.005 < priced.mfu <= priced.hfu < 0.8
    _, piped = job_and_layout(make_job, model, "pp=2", sequence=sequence)
    assert any("which is not cut into the 2 pipeline stages" in why for why in broken_rules(job, piped))


def test_a_mean_layer_of_t5_stores_half_of_the_cross_attention(make_job):
    """Tensors of h 16-bit numbers per token, counted by hand; half of the layers belong to the decoder."""
    job, layout = job_and_layout(make_job, "t5-large", "dp=8")
    h, heads, tokens = 1024, 16, 512
    self_attention = 2 * (1 + 1 + 3 + 1 + 1) * h + 4 * heads  # input, its norm, q k v, output, residual; log-sum-exp
    feed_forward = 2 * (1 + 4 + 4) * h
    cross = 2 * (1 + 3 + 1 + 1) * h + 4 * heads
    everything, _, full = layer_activation_bytes(job, layout)
    assert everything == pytest.approx(tokens * (self_attention + feed_forward + cross / 2))
    assert full == pytest.approx(tokens * 2 * h)


def test_cross_attention_has_one_more_pair_of_collectives(make_job):
    job, layout = job_and_layout(make_job, "t5-11b", "tp=4,dp=2,sp=0")
    job = replace(job, calibration=UNCALIBRATED)
    one = all_reduce_seconds(group(job.cluster, 4, 1), 512 * job.model.hidden_size * 2)
    busy = busy_seconds(job, tensor_transfers(job, layout))
    assert (busy["forward"], busy["backward"]) == pytest.approx((2.5 * one, 2.5 * one))


def test_a_decoder_of_t5_takes_more_time_than_its_encoder(make_job):
    """With more layers in the encoder there is less cross-attention, and more attention over the full square."""
    job, layout = job_and_layout(make_job, "t5-11b", "dp=8")
    seconds = []
    for encoders in (4, 24, 44):
        model = job.model.model_copy(update={"num_encoder_layers": encoders})
        seconds.append(layer_seconds(replace(job, model=model), layout))
    forward = [float(np.asarray(each.passes.forward)) for each in seconds]
    assert forward == sorted(forward, reverse=True)
    assert forward[0] - forward[1] == pytest.approx(forward[1] - forward[2])
    line = next(x for x in estimate(job, layout).time if x.name == LineName.COMPUTE)
    assert line.busy_seconds == pytest.approx(8 * 48 * float(seconds[1].passes.total))


def test_additions_to_the_stream_move_what_they_read_and_write(make_job):
    """Two inputs and an output in 16 bits, 6 bytes; backward 8, as a gradient is added. T5 has 2 or 3 a layer."""
    job, layout = job_and_layout(make_job, "t5-large", "dp=8")
    found = [
        (forward, backward, share) for _, forward, backward, _, share in _light_operators(job, layout, experts=False)
    ]
    added = [(backward, share) for forward, backward, share in found if forward == 6.0]
    assert [backward for backward, _ in added] == [8.0, 8.0]
    assert sum(share for _, share in added) == pytest.approx(2 + 0.5)  # half of the layers attend to the encoder
