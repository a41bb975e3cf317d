"""Choose the global batch size if the user gives a range: the size with the least time or cost per token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from planner.answers.deadline import fastest_in_time
from planner.cost.critical_batch import batch_advice, linear_learning_rate, square_root_learning_rate
from planner.errors import InputError
from planner.plan_parts import CONFIDENCE, BatchChoice, LearningRates, TriedBatch
from planner.search.objectives import objective_of
from planner.search.reporter import Reporter
from planner.specs.job import with_training

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planner.plan_parts import ObjectiveName
    from planner.search.objectives import Rank
    from planner.search.space.constraints import Constraints
    from planner.specs.batch import BatchRange
    from planner.specs.job import Job

AS_GOOD = 0.001
"""Batch sizes whose time for each token differs by no more than this share count as equally good."""


def choose_batch(
    job: Job,
    constraints: Constraints,
    name: ObjectiveName,
    reporter: Reporter | None = None,
    *,
    confidence: float = CONFIDENCE,
) -> tuple[Job, tuple[TriedBatch, ...]]:
    """The job with the best batch size of its range, and a list of the tried sizes.

    The best size has the least value of the objective per token. Of equally good sizes (`AS_GOOD`) the size nearest to
    the target is chosen. Without a target the smallest size is chosen, because a smaller batch learns more from each
    token. The dynamic program finds the optima. If no layout fits with any size, the job gets the smallest batch.
    confidence: required chance of meeting the deadline.

    Raises:
        InputError: the objective does not depend on the batch.
    """
    assert job.batch is not None, "the batch is given"
    if name == "memory":
        hint = "give one number of sequences, as in --global-batch 1024"
        raise InputError("the smallest memory does not choose a batch size", where="--objective memory", hint=hint)
    sizes = job.batch.sizes()
    reporter = reporter or Reporter()
    tried, ranks = [], {}
    for size in sizes:
        outcome = _best_of(with_training(job, global_batch_size=size), constraints, name, reporter, confidence)
        if outcome is None:
            tried.append(TriedBatch(global_batch_size=size))
            continue
        ranks[size], one = outcome
        tried.append(one)
    size = best_batch(ranks, job.batch, by_devices=name == "gpus") if ranks else job.batch.least
    return with_training(job, global_batch_size=size), tuple(tried)


def _best_of(
    job: Job, constraints: Constraints, name: ObjectiveName, reporter: Reporter, confidence: float
) -> tuple[Rank, TriedBatch] | None:
    """The rank per token of the best layout, and the batch that was tried; None if no layout is legal or fits."""
    objective = objective_of(job, name)
    try:
        best = fastest_in_time(job, constraints, name, confidence=confidence, reporter=reporter)
    except InputError:  # no legal layout with this batch
        return None
    if best is None:
        return None
    layout, seconds = best
    size = job.training.global_batch_size
    tokens = job.training.step_tokens
    rank = objective.rank(seconds / tokens, objective.devices_of(job, layout))
    one = TriedBatch(global_batch_size=size, tokens_per_second=tokens / seconds, num_devices=layout.world_size)
    return rank, one


def best_batch(ranks: Mapping[int, Rank], batch: BatchRange, *, by_devices: bool = False) -> int:
    """The batch size with the least rank per token.

    Of equally good sizes the result is the size nearest to the target, or without a target the smallest.

    ranks: seconds for each token (or sequence) and devices of the best layout, by batch size.
    """
    best = min(ranks.values())
    most = best[0] * (1 + AS_GOOD), (best[1] if by_devices else math.inf) * (1 + AS_GOOD)
    good = [size for size, rank in ranks.items() if rank[0] <= most[0] and rank[1] <= most[1]]
    target = batch.target
    return min(good, key=lambda size: (abs(size - target) if target else 0.0, size))


def batch_report(job: Job, tried: Sequence[TriedBatch]) -> BatchChoice:
    """The plan's report: the batch sizes tried, the literature's estimates for the chosen size, and its learning rates.

    The document's learning rate is assumed to be meant for the target batch, or without a target for the smallest
    batch.
    """
    training, batch = job.training, job.batch
    assert batch is not None, "the batch was given"
    of_batch = float(batch.least if batch.target is None else batch.target)
    rates = training.learning_rate, of_batch, training.global_batch_size
    return BatchChoice(
        chosen=training.global_batch_size,
        least=batch.least,
        most=batch.most,
        tried=tuple(tried),
        advice=batch_advice(job.model, training),
        learning_rate=LearningRates(
            given=training.learning_rate,
            of_batch=of_batch,
            linear=linear_learning_rate(*rates),
            square_root=square_root_learning_rate(*rates),
        ),
    )
