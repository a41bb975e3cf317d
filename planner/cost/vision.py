"""Seconds and bytes of the vision tower on the first stage, by the formulas of layers.

Three things are assumed, because no published run with a tower gives its cost. Every rank of a tensor- or
context-parallel group holds the whole tower and computes it. The tower's layers keep all inputs of their backward pass,
under every recompute policy of the stage. The whole tower is trained, or the whole tower is frozen if the model trains
only adapters. A trace of a step with images would replace these assumptions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cost.activations import held_of_stage, layer_activation_bytes
from planner.cost.compute import PassSeconds, linear_seconds
from planner.cost.layers import layer_seconds
from planner.cost.microbatch import sequences_per_microbatch
from planner.cost.parameters import layer_matmul_params, num_matmul_params
from planner.cost.shapes import alone
from planner.cost.stage import holds_embedding
from planner.specs.recompute import NONE

if TYPE_CHECKING:
    from planner.cost.stage import Stage
    from planner.layout import Degrees, LayerDegrees
    from planner.numbers import Number
    from planner.specs.job import PoolJob
    from planner.specs.model import VisionTower


def _images(job: PoolJob, tower: VisionTower) -> PoolJob:
    """The job with the tower as its model; the sequences are the patches of an image."""
    own = {"sequence_length": tower.encoder.max_sequence_length, "mean_sample_tokens": 0}
    training = job.training.model_copy(update={**own, "lora_rank": 0, "dropout": 0.0})
    return replace(job, model=tower.encoder, training=training)


def tower_seconds(job: PoolJob, layout: LayerDegrees) -> PassSeconds:
    """Seconds of one microbatch in the tower and its projector; 0 without a tower.

    Source: layers.py, for an encoder; the projection of patches and the projector are linear layers.
    """
    tower = job.model.vision
    if tower is None:
        return PassSeconds()
    own, shape, encoder = _images(job, tower), alone(layout), tower.encoder
    sequences = sequences_per_microbatch(job, layout)
    patches = sequences * encoder.max_sequence_length
    layers = layer_seconds(own, shape).passes * encoder.num_layers
    ends = num_matmul_params(encoder) - encoder.num_layers * layer_matmul_params(encoder, experts=False)
    maps = linear_seconds(own, patches, ends / encoder.hidden_size, encoder.hidden_size)
    joined = linear_seconds(
        own, sequences * tower.tokens_per_image, tower.projector_params / encoder.hidden_size, encoder.hidden_size
    )
    passes = (layers + (maps + joined) * job.calibration.slowdown) * tower.images_per_sequence
    return PassSeconds(forward=passes.forward) if job.training.lora_rank else passes


def tower_bytes_at_peak(job: PoolJob, layout: Degrees, stage: Stage, num_microbatches: Number) -> Number:
    """Bytes that the tower keeps for its backward passes, on the stage where the model begins; 0 for a frozen tower.

    Source: activations.py, for an encoder's layers, and the microbatches that the first stage holds.
    """
    tower = job.model.vision
    if tower is None or job.training.lora_rank:
        return 0.0
    shape: Any = alone(layout)  # layers read no other degrees
    (one,) = layer_activation_bytes(_images(job, tower), shape, policies=(NONE,))
    moments = held_of_stage(job, layout, stage, num_microbatches)
    held = np.maximum.reduce(np.broadcast_arrays(*(before + waiting for before, waiting in moments)))
    return holds_embedding(stage) * held * one * tower.encoder.num_layers * tower.images_per_sequence
