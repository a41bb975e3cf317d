"""Texts and tables of the page of a plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from planner.plan import plan_to_dict
from planner.show.goodput import checkpoint_words, goodput_rows
from planner.show.rows import FACTS
from planner.show.words import certificate_sentence, cluster_words, fold_runs, minimum_words, saved_words, stage_range
from planner.sums import sum_of
from planner.units import format_bytes, format_count, format_seconds
from planner.verdict import chance_words

if TYPE_CHECKING:
    from planner.answers.executed import ExecutedStep
    from planner.answers.what_if import Sensitivity
    from planner.plan import Plan

_INPUTS: Final = ("model", "cluster", "training", "engine", "calibration", "options", "layout", "certificate")


def headline(plan: Plan) -> dict[str, Any]:
    """Return the title and the main figures of the page, each as (label, value, note)."""
    fullest = plan.worst_stage
    band = ""
    if plan.low_step_seconds and plan.high_step_seconds:
        band = f"8 of 10 runs: {format_seconds(plan.low_step_seconds)} to {format_seconds(plan.high_step_seconds)}"
    of_limit = f"{fullest.total_bytes / fullest.limit_bytes:.0%} of {format_bytes(fullest.limit_bytes)}"
    return {
        "model": plan.model.name,
        "cluster": cluster_words(plan.cluster),
        "fits": plan.fits,
        "verdict": plan.verdict,
        "unknown": "; ".join(f"{each.key}={each.value}, {each.rule}" for each in plan.assumed if each.settled_by),
        "figures": [
            ("step", format_seconds(plan.step_seconds), band),
            ("speed", f"{format_count(plan.tokens_per_second_per_device)} tokens/s", "per device"),
            ("MFU", f"{plan.mfu:.1%}", f"HFU {plan.hfu:.1%}, with what is computed again"),
            ("fullest stage", format_bytes(fullest.total_bytes), f"stage {fullest.stage}, {of_limit}"),
            ("chance of fitting", chance_words(plan.chance_of_fitting), plan.verdict),
        ],
    }


def facts_of(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, text) pairs that describe layout and workload in words."""
    said = {name: of(plan) for name, of in FACTS.items()} | dict(goodput_rows(plan))
    said |= {"checkpoint": checkpoint_words(plan), "minimum": minimum_words(plan), "proof": certificate_sentence(plan)}
    return [(name, str(words)) for name, words in said.items() if words]


def stage_rows(plan: Plan, step: ExecutedStep) -> list[tuple[str, ...]]:
    """Return the timeline as a table: stage, layers, passes, seconds of work and of waiting, and the stage's tail."""
    passes = step.timeline
    busy, held = passes.busy_seconds, passes.peak_in_flight
    rows = []
    for stage in range(passes.pp):
        tail = sum_of(seconds for _, seconds in step.tail[stage])
        rows.append(
            (
                plan.layout.layers_of_stage(stage),
                f"{int((passes.stage == stage).sum()):,}",
                format_seconds(float(busy[stage])),
                format_seconds(float(passes.seconds - busy[stage])),
                f"{held[stage]:.4g}",
                format_seconds(tail),
            )
        )
    groups = fold_runs(list(enumerate(rows)), lambda each: each[1])
    return [(stage_range([stage for stage, _ in each]), *map(str, each[0][1])) for each in groups]


def sensitivity_rows(found: Sensitivity, *, planned: bool) -> dict[str, Any]:
    """Return bars of the gain from 10 % more of each resource.

    planned: whether each was planned again; otherwise further hosts would stay idle, and have no bar.
    """
    gains = [each for each in found.gains if planned or not each.resource.endswith("hosts")]
    largest = max((abs(each.gain) for each in gains), default=0.0) or 1.0
    return {
        "planned": planned,
        "saved": saved_words(found.objective, found.step_seconds) if planned else "share of the step that is saved",
        "rows": [(each, f"{each.gain:+.2%}", _percent(each.gain / largest)) for each in gains],
    }


def _percent(share: float) -> str:
    return f"{max(0.0, share):.2%}"


def inputs_of(plan: Plan) -> list[tuple[str, str]]:
    """Return the complete input documents of the plan as JSON text."""
    document = plan_to_dict(plan)
    return [(name, json.dumps(document[name], indent=1, ensure_ascii=False)) for name in _INPUTS if document.get(name)]
