"""Changes of one value in the training document of a job that save memory, by kind and from the smallest on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import ValidationError

from planner.specs.job import with_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from planner.specs.job import Job


class Change(NamedTuple):
    """A change of a job: its kind, its description, and the changed job (None if the documents forbid the change)."""

    kind: str
    words: str
    of: Callable[[Job], Job | None]


def _tiles(job: Job) -> Iterator[Change]:
    """Feed-forward blocks in tiles of as many tokens as the hidden size (the number in DeepSpeed's own example)."""
    tiles = math.ceil(job.training.sequence_length / job.model.hidden_size)
    if job.engine.can.mlp_tiles and job.training.mlp_tiles == 1 < tiles:
        yield change_of_training(f"mlp_tiles {tiles}", mlp_tiles=tiles)


def _other_recipes(job: Job) -> Iterator[Change]:
    """Other memory recipes of the engine, starting with most bytes per parameter."""
    if job.training.precision == "fp32":
        return
    others = [each for each in job.engine.can.memory_recipes if each not in (job.training.memory_recipe, "engine")]
    kept = {each: _state_bytes(with_training(job, memory_recipe=each)) for each in others}
    for each in sorted(others, key=lambda each: -kept[each]):
        yield change_of_training(f"memory_recipe {each}", memory_recipe=each)


_RANK: Final = 16
"""The rank of proposed adapters: the most common value of papers and recipes."""


def _adapters(job: Job) -> Iterator[Change]:
    """Adapters instead of training all weights; the frozen weights have 16 bits first, then fewer."""
    if job.training.lora_rank or job.engine.can.adapters_priced_only:
        return
    for each in job.engine.can.frozen_weights:
        kept = "" if each == "16-bit" else f", frozen_weights {each}"
        yield change_of_training(
            f"adapters alone (lora_rank {_RANK}{kept})", lora_rank=_RANK, frozen_weights=each, memory_recipe="engine"
        )


def change_of_training(words: str, **changes: Any) -> Change:
    """A change of values in the training document; the job is None if the document forbids these values together."""

    def changed(job: Job) -> Job | None:
        values = job.training.model_dump() | changes
        try:
            checked = type(job.training).model_validate(values)
        except ValidationError:
            return None
        return with_training(job, **{key: getattr(checked, key) for key in changes})

    return Change(next(iter(changes)), words, changed)


def kinds_of_training(job: Job) -> tuple[Iterator[Change], ...]:
    """Changes of the loss, of feed-forward blocks, of one switch, of the optimizer's state, and to adapters alone.

    Losses and optimizers are in the engine's order; another optimizer has the engine's own recipe. Exchanges of experts
    lose the second microbatch beside them, whose activations take memory, and attention loses its scores.
    """
    losses = (each for each in job.engine.can.losses if each != job.loss)
    optimizers = (each for each in job.engine.can.optimizers if each != job.training.optimizer)
    return (
        (change_of_training(f"loss {each}", loss=each) for each in losses),
        _tiles(job),
        (change_of_training("expert_overlap false", expert_overlap=False) for _ in range(job.training.expert_overlap)),
        (change_of_training("attention flash", attention="flash") for _ in range(job.training.attention != "flash")),
        _other_recipes(job),
        (change_of_training(f"optimizer {each}", optimizer=each, memory_recipe="engine") for each in optimizers),
        _adapters(job),
    )


def _state_bytes(job: Job) -> float:
    states = job.pools[0].state_bytes  # the engine keeps the same states on every pool
    return states.weights + states.grads + states.grad_copy + states.master + 2 * states.moment
