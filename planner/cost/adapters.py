"""Adapters beside frozen weights (LoRA, QLoRA): the trained parameters, and the memory of the frozen weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.operators import layer_of
from planner.cost.parameters import HeldParams, layer_params_on_device, num_moe_layers, num_params
from planner.cost.stage import end_params, expert_padding, held_params, largest_of_layers, sum_over_layers
from planner.once import once
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.cost.operators import Product
    from planner.cost.stage import Stage
    from planner.layout import Degrees, LayerDegrees
    from planner.numbers import Number
    from planner.specs.job import Job, PoolJob
    from planner.specs.model import ModelSpec
    from planner.specs.training import TrainingSpec

_FROZEN_BYTES: Final = {"16-bit": 2.0, "nf4": 0.5}
_NOT_LINEAR: Final = ("router", "further")
"""Matrices that no program gives an adapter: those of routers, and those of which only the number is known."""


def matrices_of(model: ModelSpec) -> tuple[str, ...]:
    """Names of the matrices that can have an adapter, in any layer of the model.

    Source: `planner.cost.operators`.
    """
    layers = [layer_of(model, experts=each) for each in (False, True)]
    names = dict.fromkeys(name for layer in layers for each in layer.products for name in each.outputs)
    return tuple(name for name in names if name not in _NOT_LINEAR)


@once
def adapted_matrices(model: ModelSpec, training: TrainingSpec, *, experts: bool) -> tuple[tuple[Product, float], ...]:
    """The matrices of one layer that have an adapter: the product, and the matrix's outputs.

    `all-linear` are all matrices but those of routed experts, which programs keep in one tensor. There the gate and the
    up projection are one matrix, with one adapter for each expert.

    Source: Hu et al., LoRA (2021), section 4; PEFT, tuners/tuners_utils.py (all-linear) and tuners/lora/layer.py
    (ParamWrapper); Megatron-Bridge, peft/lora.py (linear_fc1).
    """
    if not training.lora_rank:
        return ()
    wanted, found = set(training.lora_targets), []
    for each in layer_of(model, experts=experts).products:
        if each.count:
            found += [(each, each.width)] if wanted & each.outputs.keys() else []
        else:
            every = "all-linear" in wanted
            found += [
                (each, size)
                for name, size in each.outputs.items()
                if name in wanted or (every and name not in _NOT_LINEAR)
            ]
    return tuple(found)


def adapter_params(model: ModelSpec, training: TrainingSpec, *, of_token: bool = False) -> int:
    """Parameters of all adapters: r (inputs + outputs) for each adapted matrix of each layer.

    of_token: of the adapters beside routed experts, count only those that a token uses.

    Source: Hu et al., LoRA (2021), section 4.1: a matrix from the inputs to r, and one from r to the outputs.
    """
    with_experts = num_moe_layers(model)
    total = 0.0
    for experts, layers in ((True, with_experts), (False, model.num_layers - with_experts)):
        for product, outputs in adapted_matrices(model, training, experts=experts) if layers else ():
            copies = product.share * product.active if of_token else product.num_held
            total += layers * copies * (product.inputs + outputs)
    return round(training.lora_rank * total)


def num_trained_params(model: ModelSpec, training: TrainingSpec) -> int:
    """Parameters that the training changes: the adapters' parameters, or all parameters.

    Source: Hu et al., LoRA (2021), section 4.1.
    """
    return adapter_params(model, training) if training.lora_rank else num_params(model)


def adapter_params_on_device(job: PoolJob, layout: LayerDegrees, *, experts: bool) -> HeldParams:
    """Parameters of one layer's adapters on one device.

    An adapter has one matrix on the input side and one on the output side. Tensor parallelism divides the adapted
    matrix along one side, and divides the adapter's matrix on the same side. Each rank holds the adapter's other matrix
    whole. Each routed expert has adapters of its own.

    Source: Megatron-Bridge, peft/utils.py (ParallelLinearAdapter).
    """
    common: Number = 0.0
    routed: Number = 0.0
    for product, outputs in adapted_matrices(job.model, job.training, experts=experts):
        size = job.training.lora_rank * product.num_held * sum_of(product.sides(layout, outputs))
        common, routed = (common, routed + size / layout.ep) if product.count else (common + size, routed)
    return HeldParams(common=common, experts=routed)


@once
def trained_layer_params(job: PoolJob, layout: Degrees, *, experts: bool) -> HeldParams:
    """Parameters of one layer on one device that have gradients and optimizer states.

    Source: `layer_params_on_device`, or the adapters alone.
    """
    if not job.training.lora_rank:
        return layer_params_on_device(job.model, layout, experts=experts)
    return adapter_params_on_device(job, layout, experts=experts)


@once
def trained_params(job: PoolJob, layout: Degrees, stage: Stage) -> HeldParams:
    """Parameters on one device of a stage that have gradients and optimizer states, before ZeRO.

    Source: `held_params`, or the adapters alone.
    """
    if not job.training.lora_rank:
        return held_params(job, layout, stage)
    return sum_over_layers(job, layout, stage, lambda kind: adapter_params_on_device(job, layout, experts=kind))


@once
def largest_layer(job: PoolJob, layout: Degrees, stage: Stage, *, trained: bool = False) -> Number:
    """Elements in a collective over the parameters of the largest kind of layer: all, or only `trained` parameters.

    Source: `planner.cost.stage.expert_padding`.
    """
    of_layer = partial(trained_layer_params, job) if trained else partial(layer_params_on_device, job.model)

    def elements(experts: bool) -> Number:
        held = of_layer(layout, experts=experts)
        return held.common + expert_padding(job, layout) * held.experts

    return largest_of_layers(job, layout, stage, elements)


def frozen_bytes_per_param(job: PoolJob) -> float:
    """Bytes of a frozen weight of a layer as it is sharded and gathered, without its quantisation constants.

    Frozen weights have no master weights, so engines that train in 8 or 4 bits can keep them in these bits alone.

    Source: Dettmers et al., QLoRA (2023), section 3; engine profile, fp8_frozen_bytes.
    """
    low = job.engine.memory.fp8_frozen_bytes * {"fp8": 1.0, "fp4": 0.5}.get(job.training.precision, 0.0)
    return low or _FROZEN_BYTES[job.training.frozen_weights]


def constant_bytes_per_param(job: PoolJob) -> float:
    """Bytes of the constants of a frozen weight in 4 bits, which every rank holds whole.

    Source: Dettmers et al., QLoRA (2023), section 3; bitsandbytes 0.50, nn/modules.py (Params4bit.quant_state): no
    parameter, which nothing shards; `planner verify` counts them; engine profile, quantised_constants.
    """
    quantised = job.training.lora_rank > 0 and job.training.frozen_weights != "16-bit"
    return job.engine.memory.quantised_constants * quantised


def widens_stream(job: PoolJob) -> bool:
    """Whether the sum to which quantised layers add is fp32, because embeddings and norms are.

    Sharded units compute in one precision, and DeepSpeed casts every module to 16 bits.

    Source: peft, utils/other.py (prepare_model_for_kbit_training); engine profile, widens_stream.
    """
    quantised = job.training.lora_rank > 0 and job.training.frozen_weights != "16-bit"
    return quantised and job.engine.memory.widens_stream and job.cluster.num_devices == 1


@once
def frozen_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> HeldParams:
    """Bytes of the frozen weights on one device of a stage, before ZeRO; 0 if all weights are trained.

    Embeddings, head and other weights outside the layers stay in 16 bits; programs may widen them if layers are
    quantised.

    Source: Dettmers et al., QLoRA (2023), section 3; bitsandbytes replaces the linear layers; engine profile,
    quantised_ends.
    """
    if not job.training.lora_rank:
        return HeldParams(common=0.0, experts=0.0)
    held, ends = held_params(job, layout, stage), end_params(job, layout, stage)
    quantised = job.training.frozen_weights != "16-bit"
    each, outside = frozen_bytes_per_param(job), job.engine.memory.quantised_ends if quantised else 2.0
    return HeldParams(common=each * np.maximum(held.common - ends, 0.0) + outside * ends, experts=each * held.experts)


def without_adapters(job: Job) -> str:
    """The reason why adapters of this job are not priced; empty if they are priced.

    Source: what `adapted_matrices` counts.
    """
    model, training = job.model, job.training
    have = matrices_of(model)
    if missing := [name for name in training.lora_targets if name not in (*have, "all-linear")]:
        return f"{model.name} has no adapters beside {', '.join(missing)}; lora_targets are of {', '.join(have)}"
    if training.optimizer not in ("adamw", "adamw-8bit", "sgd"):
        return f"optimizer {training.optimizer} has no adapters; take adamw"
    return ""
