"""Adapters beside frozen weights (LoRA, QLoRA): the trained parameters, and the memory of the frozen weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.blocks import projections
from planner.cost.parameters import end_params_on_device, num_params
from planner.cost.stage import HeldParams, held_params, layer_kinds, layer_params
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.cost.stage import Stage
    from planner.layout import Degrees
    from planner.numbers import Number
    from planner.specs.job import Job, PoolJob
    from planner.specs.model import ModelSpec
    from planner.specs.training import TrainingSpec

_FROZEN_BYTES: Final = {"16-bit": 2.0, "nf4": 0.5 + 0.127 / 8}
"""Bytes per frozen weight. nf4 takes 4 bits, and 0.127 bits for the double-quantised constants (QLoRA, section 3)."""

_BY_ROWS: Final = ("output", "down")
"""Matrices that tensor parallelism divides along their input; it divides the other matrices along their output."""


def adapted_matrices(model: ModelSpec, training: TrainingSpec) -> tuple[tuple[str, int, int], ...]:
    """The matrices of one layer that have an adapter: name, inputs and outputs; empty if all weights are trained.

    Source: Hu et al., LoRA (2021), section 4.
    """
    h, shapes = model.hidden_size, projections(model)
    shapes |= {"up": (h, model.ffn_hidden_size), "down": (model.ffn_hidden_size, h)}
    shapes |= {"gate": (h, model.ffn_hidden_size)} if model.activation == "swiglu" else {}
    wanted = dict.fromkeys(training.lora_targets) if training.lora_rank else {}
    return tuple((name, *shapes[name]) for name in wanted if name in shapes)


def adapter_params(model: ModelSpec, training: TrainingSpec) -> int:
    """Parameters of all adapters: r (inputs + outputs) for each adapted matrix of each layer.

    Source: Hu et al., LoRA (2021), section 4.1: a matrix from the inputs to r, and one from r to the outputs.
    """
    sides = sum(inputs + outputs for _, inputs, outputs in adapted_matrices(model, training))
    return training.lora_rank * sides * model.num_layers


def num_trained_params(model: ModelSpec, training: TrainingSpec) -> int:
    """Parameters that the training changes: the adapters' parameters, or all parameters.

    Source: Hu et al., LoRA (2021), section 4.1.
    """
    return adapter_params(model, training) if training.lora_rank else num_params(model)


def adapter_params_on_device(job: PoolJob, layout: Degrees) -> Number:
    """Parameters of one layer's adapters on one device.

    An adapter has one matrix on the input side and one on the output side. Tensor parallelism divides the adapted
    matrix along one side, and divides the adapter's matrix on the same side. Each rank holds the adapter's other matrix
    whole.

    Source: Megatron-Bridge, peft/utils.py (ParallelLinearAdapter).
    """
    total: Number = 0.0
    for name, inputs, outputs in adapted_matrices(job.model, job.training):
        cut, whole = (inputs, outputs) if name in _BY_ROWS else (outputs, inputs)
        total = total + job.training.lora_rank * (cut / layout.tp + whole)
    return total


def trained_layer_params(job: PoolJob, layout: Degrees, *, experts: bool) -> HeldParams:
    """Parameters of one layer on one device that have gradients and optimizer states.

    Source: `layer_params`, or the adapters alone.
    """
    if not job.training.lora_rank:
        return layer_params(job, layout, experts=experts)
    return HeldParams(common=adapter_params_on_device(job, layout), experts=0.0)


def trained_params(job: PoolJob, layout: Degrees, stage: Stage) -> HeldParams:
    """Parameters on one device of a stage that have gradients and optimizer states, before ZeRO.

    Source: `held_params`, or the adapters alone.
    """
    if not job.training.lora_rank:
        return held_params(job, layout, stage)
    layers = sum_of(count for _, count in layer_kinds(job, layout, stage))
    return HeldParams(common=layers * adapter_params_on_device(job, layout), experts=0.0)


def frozen_bytes_per_param(job: PoolJob) -> float:
    """Bytes of a frozen weight of a layer, with its quantisation constants.

    Source: Dettmers et al., QLoRA (2023), section 3.
    """
    return _FROZEN_BYTES[job.training.frozen_weights]


def frozen_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> HeldParams:
    """Bytes of the frozen weights on one device of a stage, before ZeRO; 0 if all weights are trained.

    Embeddings, head and other weights outside the layers stay in 16 bits, or in fp32 if the layers are quantised.

    Source: Dettmers et al., QLoRA (2023), section 3; bitsandbytes replaces the linear layers; peft, utils/other.py
    (prepare_model_for_kbit_training).
    """
    if not job.training.lora_rank:
        return HeldParams(common=0.0, experts=0.0)
    held, ends = held_params(job, layout, stage), end_params_on_device(job.model, job.engine, layout, stage.index)
    each, outside = frozen_bytes_per_param(job), 2.0 if job.training.frozen_weights == "16-bit" else 4.0
    return HeldParams(common=each * np.maximum(held.common - ends, 0.0) + outside * ends, experts=each * held.experts)


def without_adapters(job: Job) -> str:
    """The reason why adapters of this job are not priced; empty if they are priced.

    Source: what `adapted_matrices` counts.
    """
    model, training = job.model, job.training
    have = [*projections(model)]
    have += ["up", "down", *(["gate"] if model.activation == "swiglu" else [])] if model.moe is None else []
    if model.mla is not None or model.kind == "encoder-decoder":
        return f"{model.name} has latent attention, or an encoder and a decoder"
    if model.layers or model.mixer is not None or not model.attends:
        return f"{model.name} has layers of several kinds, or a mixer in place of attention"
    if missing := [name for name in training.lora_targets if name not in have]:
        return f"{model.name} has no adapters beside {', '.join(missing)}; lora_targets are of {', '.join(have)}"
    if training.optimizer not in ("adamw", "adamw-8bit", "sgd"):
        return f"optimizer {training.optimizer} has no adapters; take adamw"
    return ""
