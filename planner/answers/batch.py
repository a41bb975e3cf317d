"""How the microbatch size changes the speed, and how the global batch changes bubble, tokens and learning rate."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from pydantic import Field
from rich.text import Text

from planner.answers.plan_inputs import job_of
from planner.cost.critical_batch import batch_advice, extra_tokens, linear_learning_rate, square_root_learning_rate
from planner.cost.estimate import estimate
from planner.cost.ledger import LineName
from planner.cost.prices import layout_prices
from planner.search.space.rules import broken_rules
from planner.show.columns import Columns
from planner.show.figures import StepBar
from planner.show.screen import clean, section, stack
from planner.specs.document import Document
from planner.specs.job import with_training
from planner.sums import sum_of
from planner.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Group, RenderableType

    from planner.layout import Layout
    from planner.plan import Plan
    from planner.specs.job import Job


_FLAT: Final = 0.95
_MOST: Final = 12


class MicrobatchSize(Document):
    """The plan's layout with another microbatch size."""

    mbs: int
    sequences_per_second: float = Field(
        description="sequences per second of the slowest stage alone, without bubble and reduction"
    )
    of_best: float = Field(description="this speed, divided by the best speed of all sizes")
    step_seconds: float
    peak_bytes: float
    fits: bool


class GlobalBatch(Document):
    """The plan's layout with another number of microbatches in a step."""

    sequences: int
    tokens: int
    microbatches: int
    bubble_share: float = Field(description="bubble divided by the step")
    tokens_per_second_per_device: float
    tokens_factor: float = Field(
        description="tokens to the same loss, divided by the smallest number of tokens: 1 + B / critical batch"
    )
    learning_rate_adam: float = Field(description="the plan's learning rate scaled by the square root of the batch")
    learning_rate_sgd: float = Field(description="the plan's learning rate scaled in proportion to the batch")


class EstimatedBatch(Document):
    """A batch size from the literature: `critical`, or `best` for the lowest loss.

    The critical batch needs twice the least possible number of tokens and twice the least possible number of steps.
    """

    name: str
    kind: str
    num_tokens: float
    source: str


class Batch(Document):
    """Microbatch sizes, global batches, and the literature's estimates of the largest useful batch."""

    sizes: tuple[MicrobatchSize, ...]
    flat_from: int = Field(description="smallest microbatch size within 5 % of the best")
    batches: tuple[GlobalBatch, ...]
    estimates: tuple[EstimatedBatch, ...]
    run_tokens: float = Field(description="token budget of the run; 20 tokens for each parameter if no budget is given")
    learning_rate: float


def batch_of(plan: Plan) -> Batch:
    """Price the plan's layout over microbatch sizes and over global batches.

    Raises:
        InputError: the plan's options are not valid.
    """
    job = job_of(plan)
    sizes = tuple(_sizes(job, plan.layout))
    best = max(each.sequences_per_second for each in sizes)
    sizes = tuple(each.model_copy(update={"of_best": each.sequences_per_second / best}) for each in sizes)
    advice = batch_advice(job.model, job.training)
    critical = next(each.num_tokens for each in advice.estimates if each.kind == "critical")
    return Batch(
        sizes=sizes,
        flat_from=next(each.mbs for each in sizes if each.of_best >= _FLAT),
        batches=tuple(_batches(job, plan.layout, critical)),
        estimates=tuple(EstimatedBatch(**asdict(each)) for each in advice.estimates),
        run_tokens=advice.run_tokens,
        learning_rate=job.training.learning_rate,
    )


def _sizes(job: Job, layout: Layout) -> Iterator[MicrobatchSize]:
    """Powers of two that divide a replica's share of the batch and break no rule, plus the plan's own size."""
    share = job.training.global_batch_size // layout.dp
    powers = {1 << n for n in range(_MOST) if share % (1 << n) == 0}
    for mbs in sorted({*powers, layout.mbs}):
        other = replace(layout, mbs=mbs)
        if mbs != layout.mbs and broken_rules(job, other):
            continue
        priced = estimate(job, other)
        slowest = float(np.max(layout_prices(job, other).microbatch_seconds))
        yield MicrobatchSize.of(priced, mbs=mbs, sequences_per_second=mbs / slowest, of_best=1.0)


def _batches(job: Job, layout: Layout, critical: float) -> Iterator[GlobalBatch]:
    """Legal batches with whole microbatches, from a quarter to four times the plan's batch."""
    own = job.training.global_batch_size
    for sequences in (own // 4, own // 2, own, own * 2, own * 4):
        other = with_training(job, global_batch_size=sequences)
        if sequences < 1 or broken_rules(other, layout):
            continue
        priced = estimate(other, layout)
        bubble = sum_of(float(line.exposed_seconds) for line in priced.time if line.name == LineName.BUBBLE)
        rates = job.training.learning_rate, own, sequences
        yield GlobalBatch(
            sequences=sequences,
            tokens=other.training.step_tokens,
            microbatches=layout.num_microbatches(sequences),
            bubble_share=bubble / priced.step_seconds,
            tokens_per_second_per_device=priced.tokens_per_second_per_device,
            tokens_factor=extra_tokens(other.training.step_tokens, critical),
            learning_rate_adam=square_root_learning_rate(*rates),
            learning_rate_sgd=linear_learning_rate(*rates),
        )


def batch_section(plan: Plan, found: Batch) -> Group:
    """Show the best microbatch size, and how bubble, tokens and learning rate change with a larger batch."""
    sizes: list[list[RenderableType]] = []
    for each in found.sizes:
        bar = StepBar(before_seconds=0.0, seconds=each.of_best, full_seconds=1.0, max_width=20)
        words = Text("the plan", style="bold") if each.mbs == plan.layout.mbs else Text("")
        if not each.fits:
            words = Text("too much", style="bold red")
        times = format_seconds(each.step_seconds), format_bytes(each.peak_bytes)
        sizes.append([str(each.mbs), f"{each.of_best:.0%}", bar, *times, words])
    header = ("mbs", "speed", "", "step", "memory", "")
    table = Columns(sizes, right=(0, 1, 3, 4), wrap=(2,), optional=(2,), header=header)
    flat = f"Flat from {found.flat_from} on: larger microbatches are less than 5 % faster."
    return stack(
        section("Microbatch size", table, Text(flat), note="speed of the slowest stage, without bubble and reduction"),
        _global_batches(plan, found),
    )


def _global_batches(plan: Plan, found: Batch) -> Group:
    rows = [
        (
            f"{each.sequences:,}",
            format_count(each.tokens),
            f"{each.microbatches:,}",
            f"{each.bubble_share:.1%}",
            format_count(each.tokens_per_second_per_device),
            f"{each.tokens_factor:.2f}",
            f"{each.learning_rate_adam:.2g}",
            f"{each.learning_rate_sgd:.2g}",
            Text("the plan" if each.sequences == plan.training.global_batch_size else "", style="bold"),
        )
        for each in found.batches
    ]
    header = ("batch", "tokens", "microb.", "bubble", "tokens/s", "needed", "lr, Adam", "lr, SGD", "")
    estimates = Columns(
        [
            (each.kind, format_count(each.num_tokens), Text(clean(f"{each.name}: {each.source}"), style="dim"))
            for each in found.estimates
        ],
        right=(1,),
        wrap=(2,),
        header=("", "tokens", f"of a run of {format_count(found.run_tokens)} tokens, an order of magnitude"),
    )
    own = f"{found.learning_rate:.2g} at the plan's {plan.training.global_batch_size:,}"
    words = (
        "Critical: a step of so many tokens takes twice the least tokens and twice the least steps to the same loss. "
        "Needed: tokens to the same loss over the least. Learning rates go with the square root of the batch for Adam "
        f"and in proportion for SGD, from {own}; warm up either."
    )
    table = Columns(rows, right=range(8), optional=(7, 2), header=header)
    return section("Global batch", table, estimates, Text(words, style="dim"), note="tokens/s of one device")


def chosen_batch_section(plan: Plan) -> Group | None:
    """State how the batch size was chosen, its cost in tokens, and the learning rate for it."""
    if plan.batch is None:
        return None
    batch, advice, rate = plan.batch, plan.batch.advice, plan.batch.learning_rate
    speeds = [each.tokens_per_second for each in batch.tried if each.tokens_per_second]
    length = plan.training.sequence_length
    assumed = f"{format_count(advice.run_tokens)} tokens assumed" if advice.run_tokens_assumed else ""
    sizes = f"{batch.chosen:,} of {batch.least:,} to {batch.most:,} sequences"
    rows: list[tuple[str, RenderableType]] = [("chosen", f"{sizes}, {len(batch.tried)} sizes tried")]
    if speeds:
        rows.append(("speed", f"{format_count(min(speeds))} to {format_count(max(speeds))} tokens/s over these sizes"))
    for each in advice.estimates:
        sequences = f"{format_count(each.num_tokens)} tokens, {each.num_tokens / length:,.0f} sequences"
        rows.append((each.kind, Text.assemble(sequences, (f"  {clean(each.source)}", "dim"))))
    extra = f"{advice.extra_tokens - 1:.0%} more tokens than a small batch for the same loss, by the critical one"
    rates = f"{rate.linear:.3g} by the linear, {rate.square_root:.3g} by the square root rule"
    given = f"  if {rate.given:.3g} is right for {rate.of_batch:,.0f} sequences"
    rows += [("price", extra), ("learning rate", Text.assemble(rates, (given, "dim")))]
    return section("Batch", Columns(rows, wrap=(1,)), note=assumed)
