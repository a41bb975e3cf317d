"""Section on microbatch sizes and global batch sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from planner.show.columns import Columns
from planner.show.figures import StepBar
from planner.show.screen import clean, section, stack
from planner.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from planner.explain.batch import Batch
    from planner.plan import Plan


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
