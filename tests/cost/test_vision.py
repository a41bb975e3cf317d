"""The tower that reads images: counted by hand, and as a part of the first stage only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from counting_device import counting

from planner.cost.estimate import estimate
from planner.cost.flops import chunk_flops, model_flops_per_step
from planner.cost.parameters import vision_params
from planner.cost.prices import chunk_parts, stage_parts
from planner.cost.stage import stages_of
from planner.cost.vision import tower_bytes_at_peak, tower_seconds
from planner.errors import InputError
from planner.layout_text import parse_layout
from planner.specs.load import load_job
from planner.specs.model import ModelSpec

CLIP = {
    "name": "clip",
    "architecture": "vit",
    "num_layers": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "ffn_hidden_size": 4096,
    "vocab_size": 1,
    "max_sequence_length": 577,
    "embedding_norm": True,
    "patches": {"image_size": 336, "patch_size": 14, "bias": False},
}
PROJECTOR = 1024 * 4096 + 4096 + 4096 * 4096 + 4096


def job_with(images: float = 1.0, **training):
    """Llama 3 8B behind the tower and projector of LLaVA 1.5, or without both if there are no images."""
    job = load_job(model="llama3-8b", cluster="dgx-h100", global_batch_size=16, sequence_length=2048, engine="fsdp")
    tower = {"encoder": CLIP, "tokens_per_image": 576, "images_per_sequence": images, "projector_params": PROJECTOR}
    model = ModelSpec.model_validate(
        job.model.model_dump(mode="json") | ({"vision": tower} if images else {}), strict=False
    )
    return replace(job, model=model, training=job.training.model_copy(update=training))


def layout_of(job, text):
    return parse_layout(text, num_layers=job.model.num_layers, num_devices=8)


def test_parameters_and_flops_are_those_counted_by_hand():
    """CLIP ViT-L/14 at 336 pixels has 303.5 million parameters; 6 FLOPs for each that a patch meets, and attention."""
    job, plain = job_with(), job_with(0)
    layer = 4 * 1024 * 1024 + 2 * 1024 * 4096
    assert vision_params(job.model) == 303_507_456 + PROJECTOR
    matrices = 24 * layer + 3 * 14 * 14 * 1024
    attention = 24 * 4 * 577 * 1024  # scores and weighted sum over all patches
    of_image = 577 * (2 * matrices + attention) + 576 * 2 * PROJECTOR
    more = model_flops_per_step(job.model, job.training) - model_flops_per_step(plain.model, plain.training)
    assert more == pytest.approx(3 * 16 * of_image, rel=1e-12)


def test_seconds_are_flops_on_a_device_that_counts_them():
    """Patches of 16 make 441 patches and a class token; 2 FLOPs for each weight that a patch meets, and attention."""
    job, projector = job_with(2), 1024 * 4096 + 4096 * 4096
    patches = {"image_size": 336, "patch_size": 16, "bias": False}
    tower = job.model.vision
    encoder = ModelSpec.model_validate(CLIP | {"patches": patches, "max_sequence_length": 442}, strict=False)
    tower = tower.model_copy(update={"encoder": encoder, "tokens_per_image": 441, "projector_params": projector})
    job = counting(replace(job, model=job.model.model_copy(update={"vision": tower})), "flops")
    matrices = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096) + 3 * 16 * 16 * 1024
    attention = 24 * 4 * 442 * 1024
    of_image = 442 * (2 * matrices + attention) + 2 * 441 * projector
    found = tower_seconds(job, layout_of(job, "dp=8,zero=3,mbs=128"))  # whole tiles
    assert found.forward == pytest.approx(2 * 128 * of_image)
    assert found.backward_weight == pytest.approx(2 * 128 * (of_image - 442 * attention))


def test_only_the_first_stage_has_it():
    text = "pp=2,dp=4,zero=1,mbs=1,recompute=full"
    one, none = (replace(job_with(n), engine=load_job(model="llama3-8b", cluster="dgx-h100", global_batch_size=16,
        sequence_length=2048, engine="megatron").engine) for n in (1, 0))  # fmt: skip
    layout = layout_of(one, text)
    with_tower, without = (estimate(job, layout).memory for job in (one, none))
    added = [
        {line.name: float(line.num_bytes - other.num_bytes) for line, other in zip(a.lines, b.lines, strict=True)}
        for a, b in zip(with_tower, without, strict=True)
    ]
    assert added[0]["params"] == pytest.approx(2 * vision_params(one.model))
    assert added[0]["activations"] > 0
    assert set(added[1].values()) == {0.0}
    with_it, without_it = (sum(each.forward for each in chunk_parts(job, layout).values()) for job in (one, none))
    forward = with_it - without_it
    assert forward[0] > 0
    assert forward[1] == 0
    flops = sum(np.sum(chunk_flops(one, layout)[key]) for key in ("forward", "backward_input", "backward_weight"))
    assert flops * 16 == pytest.approx(model_flops_per_step(one.model, one.training), rel=1e-9)


def test_twice_the_images_are_twice_the_work_and_a_frozen_tower_has_no_backward_pass():
    layout = layout_of(job_with(), "dp=8,zero=3,mbs=1,recompute=full")

    def added(images, **training):
        with_images, without = (stage_parts(job_with(n, **training).pools[0], layout).lookup for n in (images, 0))
        return [
            float(getattr(with_images, each) - getattr(without, each))
            for each in ("forward", "backward_input", "backward_weight")
        ]

    assert added(2) == pytest.approx([2 * each for each in added(1)])
    assert added(1)[1] > 0
    assert added(1, lora_rank=8) == pytest.approx([added(1)[0], 0.0, 0.0])


def test_images_beyond_the_sequence_are_refused(tmp_path):
    path = tmp_path / "llava.yaml"
    path.write_text(job_with(4.0).model.model_dump_json(), encoding="utf-8")
    with pytest.raises(InputError, match="2,304 tokens"):
        load_job(model=str(path), cluster="dgx-h100", global_batch_size=16, sequence_length=2048, engine="fsdp")


def test_the_tower_s_tensors_stay_until_its_weights_have_their_gradients():
    """On the first of 4 stages, ZB-H1 and 1F1B both hold 4 microbatches, in ZB-H1 one of them for its weights alone."""
    job, held = job_with(), []
    for schedule in ("1f1b", "zb-h1"):
        layout = layout_of(job, f"pp=4,dp=2,schedule={schedule}")
        held.append(tower_bytes_at_peak(job, layout, stages_of(job, layout), 8))
    assert held[0][0] > 0
    assert np.array_equal(*held)
