"""Features that this trainer cannot run: the last check of a plan from any source."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from planner.errors import InputError, Mistake

if TYPE_CHECKING:
    from planner.plan import Plan

_Obstacle = tuple[bool, str, str]
"""Whether the obstacle exists, its description, and a remedy."""

AGAIN = "make a plan for `--engine torch`"
OTHER = "choose another model or engine"


def check_plan(plan: Plan) -> None:
    """Refuse a plan that this trainer cannot run, before any process group exists.

    Raises:
        InputError: the plan has obstacles; the error names all of them.
    """
    obstacles = [*_of_model(plan), *_of_training(plan), *_of_mesh(plan), *_of_pipeline(plan)]
    mistakes = [Mistake(message=message, hint=hint) for bad, message, hint in obstacles if bad]
    if mistakes:
        raise InputError(*mistakes)


def _of_model(plan: Plan) -> list[_Obstacle]:
    layout, model = plan.layout, plan.model
    strange = set(model.features) - set(plan.engine.can.model_features)
    return [
        (bool(strange), f"the trainer has no {', '.join(sorted(strange))}", OTHER),
        (not model.output_head, "the model needs an output head", OTHER),
        (0 in layout.layers_per_stage[1:-1], "a chunk between the first and the last needs a layer", AGAIN),
        (sum(layout.layers_per_stage) != model.num_layers, "layers_per_stage does not sum to the layers", AGAIN),
        (
            plan.training.sequence_length > model.max_sequence_length and model.position == "learned",
            f"sequence_length is above the {model.max_sequence_length} learned positions",
            "shorten --seq-len",
        ),
    ]


def _of_training(plan: Plan) -> list[_Obstacle]:
    layout, training = plan.layout, plan.training
    tokens = layout.mbs * training.sequence_length // (layout.cp * layout.tp)
    return [
        (training.objective != "next-token", f"the trainer has no {training.objective}", "choose another engine"),
        ("selective" in layout.recompute, "recompute is none or full", AGAIN),
        (
            training.precision not in plan.engine.can.precisions,
            f"the trainer has no {training.precision}",
            f"use {', '.join(plan.engine.can.precisions)}",
        ),
        (
            training.precision == "fp8" and tokens % 16 > 0,
            f"products in 8 bits take tokens by 16, and a rank has {tokens} of a microbatch",
            "use bf16, or another --seq-len",
        ),
        (training.optimizer != "adamw", f"the trainer has no {training.optimizer}", "set training.optimizer to adamw"),
        (
            training.lora_rank > 0,
            "the trainer trains every weight, without adapters",
            "plan for an engine that has them, or set training.lora_rank to 0",
        ),
        (
            training.loss not in ("engine", "whole"),
            f"the trainer has no {training.loss} loss",
            "set training.loss to whole",
        ),
        (training.mlp_tiles > 1, "the trainer computes feed-forward blocks at once", "set training.mlp_tiles to 1"),
        (training.mean_sample_tokens > 0, "its attention crosses samples", "set training.mean_sample_tokens to 0"),
        (training.dropout > 0, "this trainer has no dropout", "set training.dropout to 0"),
        (
            training.global_batch_size % (layout.dp * layout.mbs) > 0,
            f"dp * mbs = {layout.dp * layout.mbs} does not divide the batch {training.global_batch_size}",
            AGAIN,
        ),
    ]


def _of_mesh(plan: Plan) -> list[_Obstacle]:
    layout, model, length = plan.layout, plan.model, plan.training.sequence_length
    experts, shared = (model.moe.num_experts, model.moe.shared_ffn_hidden_size) if model.moe else (1, 0)
    vocab = model.vocab_size if layout.tp > 1 else 0
    widths = (model.num_heads, model.num_kv_heads, model.ffn_hidden_size, shared, vocab)
    runs = 2 * layout.cp if layout.cp > 1 else 1
    copies, left = divmod(layout.dp * layout.cp * layout.tp, layout.ep)
    return [
        (layout.tp > 1 and layout.sp == 0, "tensor parallelism comes with sequence parallelism", "set sp=1"),
        (any(width % layout.tp for width in widths), f"tp={layout.tp} does not divide {widths}", AGAIN),
        (
            length % math.lcm(runs, layout.cp * layout.tp) > 0,
            f"tp={layout.tp} and cp={layout.cp} do not cut {length} positions evenly",
            AGAIN,
        ),
        (layout.etp > 1, "the trainer cuts no single expert", "set etp=1"),
        (experts % layout.ep > 0, f"ep={layout.ep} does not divide the experts, {experts}", AGAIN),
        (left > 0, f"ep={layout.ep} does not divide tp * cp * dp", AGAIN),
        (layout.zero > 0 and layout.dp % layout.hsdp > 0, "hsdp must divide dp", AGAIN),
        (
            layout.zero > 0 and model.moe is not None and copies % layout.hsdp > 0,
            f"hsdp must divide the {copies} copies of an expert",
            AGAIN,
        ),
    ]


def _of_pipeline(plan: Plan) -> list[_Obstacle]:
    layout = plan.layout
    microbatches = layout.num_microbatches(plan.training.global_batch_size)
    rounds = max(1, microbatches // layout.pp)
    v_shaped = layout.schedule in ("zbv", "dualpipev")
    return [
        (layout.schedule not in plan.engine.pipeline.schedules, f"no schedule {layout.schedule}", AGAIN),
        (layout.schedule == "1f1b" and layout.interleave > 1, "1f1b has one chunk per stage", "use interleaved"),
        (v_shaped and layout.interleave != 2, f"{layout.schedule} has two chunks per stage", "set interleave=2"),
        (
            layout.schedule == "dualpipev" and microbatches < layout.num_chunks,
            f"dualpipev needs {layout.num_chunks} microbatches, one for each chunk, and has {microbatches}",
            AGAIN,
        ),
        (layout.interleave > 1 and layout.pp == 1, "interleave needs a pipeline", "set interleave=1"),
        (layout.pp > 1 and layout.zero > 1, "a pipeline keeps gradients whole: zero is 0 or 1", AGAIN),
        (
            layout.pp > 1 and microbatches < layout.pp and layout.schedule != "gpipe",
            f"{microbatches} microbatches cannot fill {layout.pp} stages",
            AGAIN,
        ),
        (
            layout.schedule == "interleaved" and microbatches % rounds > 0,
            f"{microbatches} microbatches are not a multiple of {rounds} rounds",
            AGAIN,
        ),
    ]
