"""Number of floating-point operations of a step, and the convention by which they are counted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.adapters import adapter_params
from planner.cost.layers import attention_span, head_widths, indexer_flops_per_token, is_local
from planner.cost.mixers import mixer_shape
from planner.cost.operators import layer_of
from planner.cost.parameters import head_width, layer_matmul_params, num_matmul_params, num_outputs
from planner.cost.recompute import modules_of, repeats_part
from planner.cost.stage import by_policy, chunks_of, layer_kinds, mtp_layers, timed_kinds
from planner.once import once
from planner.specs.recompute import FULL
from planner.sums import sum_of
from planner.units import UNITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.layout import Layout
    from planner.specs.job import Job
    from planner.specs.model import ModelSpec
    from planner.specs.training import TrainingSpec

MODEL_FLOPS_CONVENTION: Final = (
    "model FLOPs: 6 per matmul parameter and token, attention counted causal (half the square), no recompute"
)


def flops_convention(training: TrainingSpec) -> str:
    """The convention of `model_flops_per_step` in words."""
    each = "4 per frozen and 6 per trained" if training.lora_rank else "6 per"
    ungraded = ", forward passes without gradients counted" * (training.ungraded_passes > 0)
    return MODEL_FLOPS_CONVENTION.replace("6 per", each) + ungraded


@once
def attention_core_flops_per_token(model: ModelSpec, sequence_length: int, *, causal: bool, local: bool) -> float:
    """Forward FLOPs of one layer's attention core (scores and weighted sum) per token.

    The full square has 4 s a d FLOPs, its causal part half as many, and the sliding window of a `local` layer fewer. In
    latent attention keys and values have different widths. The count includes an indexer's scores and a mixer's core.
    For several kinds of layers the result is the mean.

    Source: Narayanan et al. (SC 2021), appendix; Megatron-LM, num_floating_point_operations (causal half).
    """
    if model.layers:
        kinds = (
            (num, attention_core_flops_per_token(kind, sequence_length, causal=causal, local=local or is_local(kind)))
            for num, kind in model.kinds()
        )
        return sum_of(num / model.num_layers * flops for num, flops in kinds)
    found = mixer_shape(model).core_flops
    if not model.attends:
        return found
    span = attention_span(model, sequence_length, causal=causal, local=local)
    found += indexer_flops_per_token(model, sequence_length)
    return found + 2.0 * span * model.num_heads * head_widths(model)


def attention_flops_per_token(model: ModelSpec, sequence_length: int, *, causal: bool) -> float:
    """Forward FLOPs of all layers' attention cores per token, without layers for multi-token prediction.

    Source: sum over the layers.
    """
    whole, local = (
        attention_core_flops_per_token(model, sequence_length, causal=causal, local=each) for each in (False, True)
    )
    num_global = int(np.sum(model.layer_is_global(np.arange(model.num_layers))))
    return num_global * whole + (model.num_layers - num_global) * local


def tower_flops(model: ModelSpec) -> float:
    """Forward FLOPs of the images of one sequence in the tower and its projector.

    Source: as `model_flops_per_step`; attention between the patches of an image is the full square.
    """
    tower = model.vision
    if tower is None:
        return 0.0
    patches = tower.encoder.max_sequence_length
    core = attention_flops_per_token(tower.encoder, patches, causal=True)
    products = patches * (2.0 * num_matmul_params(tower.encoder) + core)
    return tower.images_per_sequence * (products + 2.0 * tower.projector_params * tower.tokens_per_image)


def model_flops_per_step(model: ModelSpec, training: TrainingSpec) -> float:
    """FLOPs that one optimizer step needs, without recomputation (the numerator of MFU).

    The count is 3 (forward + 2 backward) * 2 FLOPs for each matmul parameter and token, plus the causal attention core.
    With adapters, frozen parameters have no second backward product, and the adapters' products are added. A frozen
    vision tower has no backward pass. Passes without gradients, of the policy or its reference, are counted without
    adapters.

    Source: Chowdhery et al., PaLM (2022), appendix B; attention as Megatron-LM counts it since 2024.
    """
    s, attended = training.sequence_length, training.attended_tokens
    further = model.mtp_layers * attention_core_flops_per_token(model, attended, causal=True, local=False)
    core = attention_flops_per_token(model, attended, causal=True) + further
    products = 2.0 if training.lora_rank else 3.0
    trained = 3.0 * adapter_params(model, training, of_token=True)
    graded = products * num_matmul_params(model) - (products - 1.0) * _ungraded_head_params(model, training)
    per_token = 2.0 * (graded + trained) + 3.0 * core
    per_token += training.ungraded_passes * (2.0 * num_matmul_params(model) + core)
    images = (training.ungraded_passes + (1.0 if training.lora_rank else 3.0)) * tower_flops(model)
    return (per_token * s + images) * training.global_batch_size * training.method.sequences


def _ungraded_head_params(model: ModelSpec, training: TrainingSpec) -> int:
    """Parameters of a head whose logits no loss reads, so that it has no backward pass."""
    return 0 if training.method.reads_logits else num_outputs(model) * head_width(model)


def chunk_flops(job: Job, layout: Layout) -> dict[str, NDArray[np.float64]]:
    """Model FLOPs of one microbatch in each chunk, by pass, over all ranks of the replica; shape (chunks,) each.

    forward, backward_input, backward_weight: FLOPs of the three passes. Matrix products have the same number of FLOPs
    in each pass, and a vision tower is assumed to have the same, too. Both backward products of the attention core
    count as gradients of inputs.
    layers: the forward pass without the model's ends.
    repeated: the part of `layers` that recompute repeats (0 for recompute by operators).

    The last chunk includes the heads, and the first chunk includes patches and the tower. The projection of a layer for
    multi-token prediction is counted where this layer is.

    Source: the terms of `model_flops_per_step`, which is their sum.
    """
    model, training, chunks = job.model, job.training, chunks_of(job, layout)
    params, again = np.zeros(layout.num_chunks), np.zeros(layout.num_chunks)
    for experts, count in layer_kinds(job, layout, chunks):
        params = params + count * layer_matmul_params(model, experts=experts)
        again = again + count * by_policy(layout, chunks, partial(_repeated_params, job, experts=experts))
    ends = np.zeros(layout.num_chunks)
    ends += 2.0 * model.hidden_size**2 * mtp_layers(job, layout, chunks)
    ends[0 if model.patches else -1] += num_matmul_params(model) - params.sum() - ends.sum()
    adapters = adapter_params(model, training, of_token=True) / model.num_layers * chunks.num_layers
    core = sum_of(
        count * attention_core_flops_per_token(model, training.attended_tokens, causal=True, local=local)
        for (_, local), count in timed_kinds(job, layout, chunks)
    )
    whole = by_policy(layout, chunks, lambda policy: float(policy == FULL))
    cores = by_policy(layout, chunks, lambda policy: float(policy == FULL or "core_attn" in modules_of(job, policy)))
    tokens = training.sequence_length * layout.mbs * training.method.sequences
    products = 2.0 * tokens * (params + ends + adapters)
    images = np.zeros(layout.num_chunks)
    images[0] = layout.mbs * training.method.sequences * tower_flops(model)
    trained = 0.0 if training.lora_rank else images
    graded = products.copy()
    graded[-1] -= 2.0 * tokens * _ungraded_head_params(model, training)
    ungraded = training.ungraded_passes * (2.0 * tokens * (params + ends) + tokens * core + images)
    return {
        "forward": products + tokens * core + images + ungraded,
        "backward_input": graded + 2.0 * tokens * core + trained,
        "backward_weight": 2.0 * tokens * adapters if training.lora_rank else graded + trained,
        "layers": tokens * (2.0 * (params + adapters) + core),
        "repeated": tokens * (2.0 * (again + whole * adapters) + cores * core),
    }


def _repeated_params(job: Job, policy: int, *, experts: bool) -> float:
    """Parameters of one layer whose products the backward pass repeats under a recompute policy."""
    whole = float(policy == FULL)
    products = layer_of(job.model, experts=experts).products
    return sum_of(each.params_of_token * (whole + repeats_part(job, policy, each.modules)) for each in products)


def sc21_flops_per_step(model: ModelSpec, training: TrainingSpec) -> float:
    """FLOPs by the convention of the SC'21 table: full recompute included, attention as the full square.

    96 B s L h^2 (1 + s/(6h) + V/(16Lh)). The recomputed forward pass is a quarter of the layers' part.

    Source: Narayanan et al. (SC 2021), equation 3.
    """
    b, s, h = training.global_batch_size, training.sequence_length, model.hidden_size
    layers, v = model.num_layers, model.vocab_size
    return 96.0 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))


def end_to_end_days(tokens: float, num_params: float, num_devices: int, flops_per_second_per_device: float) -> float:
    """Days to train on `tokens` tokens: 8 T P / (n X); the factor 8 includes recompute.

    Source: Narayanan et al. (SC 2021), section 5.1, equation 4.
    """
    seconds = 8.0 * tokens * num_params / (num_devices * flops_per_second_per_device)
    return seconds / UNITS["seconds"]["d"]
