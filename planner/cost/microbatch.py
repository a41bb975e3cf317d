"""The size of a microbatch in tokens, and how many of them a step has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.once import once

if TYPE_CHECKING:
    from planner.layout import Degrees, LayerDegrees
    from planner.numbers import Number
    from planner.specs.job import Job


def sequences_per_microbatch(job: Job, layout: LayerDegrees) -> Number:
    """Sequences of one microbatch: its samples, times the sequences of a sample.

    Source: `planner.specs.objective`.
    """
    return layout.mbs * job.training.method.sequences


@once
def tokens_per_microbatch(job: Job, layout: LayerDegrees) -> Number:
    """Tokens of one microbatch on one context-parallel rank: s b / c.

    Source: definition of context parallelism.
    """
    return job.training.sequence_length * sequences_per_microbatch(job, layout) / layout.cp


def num_microbatches(job: Job, layout: Degrees) -> Number:
    """Microbatches of one step on one data-parallel rank: B / (dp * mbs).

    Source: Narayanan et al. (SC 2021), section 3.
    """
    return job.training.global_batch_size / (layout.dp * layout.mbs)
