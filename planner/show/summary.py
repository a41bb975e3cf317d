"""The short answer of `planner plan`, which `planner explain` shares: verdict, step, memory, runners-up, proof."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.text import Text

from planner.search.near_ties import NEAR_TIE
from planner.search.objectives import WORTH_READING
from planner.search.ranking import AXES
from planner.show.columns import Columns
from planner.show.rows import ANSWER, rows_of
from planner.show.screen import Command, OneScreen, clean, section, stack
from planner.show.words import cluster_words, length_words, work_words
from planner.specs.text import any_of
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from planner.plan import Plan, RunnerUp

_USUAL: Final = 3
"""Runners-up of a plan without --top."""
_MOST_KEYS: Final = 5
"""Keys of a runner-up that the short answer names: those that tell its kind are among the first."""
_LONGEST_KEY: Final = 40
"""Characters of a key with its values that the short answer spells out, as lists of recomputed parts may be longer."""
_FOLLOW: Final = ("dp ", "sp ", "schedule ")
"""Keys that follow from others; the short answer leaves them out."""


def summary(plan: Plan, commands: Sequence[str]) -> OneScreen:
    """Return the whole output of `planner plan`; `commands` are suggested as the next ones.

    If it has no room on a screen, the usual number of runners-up lose the cause that is given for each.
    """
    after = section("Next", *(Command(text=each) for each in commands))
    forms = (_few,) if len(plan.runners_up) > _USUAL else (_few, _fewest)
    return OneScreen(*(stack(answer(plan), runners_up(plan, each), after) for each in forms))


def answer(plan: Plan) -> Group:
    """Return the heading and the rows with which every answer begins."""
    return stack(heading(plan), rows_of(plan, ANSWER))


def next_commands(plan: Plan, command: str, saved_as: Path | None, name: str = "plan.json") -> tuple[str, str]:
    """Return two commands to suggest: save the plan, launch it or emit files for it; and open a part of it.

    name: a file name that is free, for a plan that is not saved yet.
    """
    saved = clean(shlex.quote(str(saved_as or name)))
    explain = f"planner explain {saved} memory"
    if saved_as is None:
        return f"{clean(command)} -o {saved}", explain
    verb = "emit" if plan.engine.emits else "explain"  # emit writes no files for old programs
    if plan.engine.name == "torch" and plan.cluster.hosts == 1:
        verb = "launch"
    return f"planner {verb} {saved}", explain


def learning_commands(run: Path) -> tuple[str, ...]:
    """Return the commands to suggest after a run in a folder: calibrate with the run, then plan its job again."""
    calibrate = ["planner", "calibrate", str(run), "-o", "mine.json"]
    again = ["planner", "plan", "--from", str(run / "plan.json"), "--calibration", "mine.json"]
    return clean(shlex.join(calibrate)), clean(shlex.join(again))


def heading(plan: Plan) -> Text:
    """Return the heading of a plan: the model, the machines and the work of a step."""
    training = plan.training
    text = Text(clean(plan.model.name), style="bold")
    text.append(f" on {clean(cluster_words(plan.cluster))}", style="not bold")
    if not plan.fits:
        text.append(f"  {plan.verdict}", style="bold red")
    work = f"\n{work_words(training)}, {training.precision}, engine {clean(plan.engine.name)}"
    text.append(work, style="not bold dim")
    text.append("\n" * bool(own := length_words(plan)) + own, style="not bold")
    return text


def runners_up(plan: Plan, about: Callable[[RunnerUp], RenderableType]) -> Group | None:
    """Show time and memory of each runner-up beside what is said `about` it; None without a search."""
    if not plan.runners_up:
        words = f"None: no layout with another tp, pp, cp or ep is within {WORTH_READING:.0%}."
        return section("Runners-up", Text(words, style="dim")) if plan.certificate else None
    rows = [(format_seconds(each.step_seconds), format_bytes(each.peak_bytes), about(each)) for each in plan.runners_up]
    ties = any(runner.near_tie for runner in plan.runners_up)
    notes = [f"near tie: less than {NEAR_TIE:.0%} apart"] * ties + [_settled(plan)] * bool(plan.certificate)
    return section("Runners-up", Columns(rows, right=(0, 1), wrap=(2,)), note="; ".join(notes))


def _settled(plan: Plan) -> str:
    """State what runs of the plan and of its first runners-up would decide that the forecasts leave open."""
    layouts = [plan.layout, *(each.layout for each in plan.runners_up[:_USUAL])]
    values = {axis: sorted({getattr(each, axis) for each in layouts}) for axis in AXES}
    still_open = ", ".join(f"{axis} {any_of(each)}" for axis, each in values.items() if len(each) > 1)
    return f"measured beside the plan, they settle {still_open}"


def with_reason(runner: RunnerUp, change: RenderableType) -> Group:
    """Return the change that makes a runner-up of the plan, above the reason why it is not the plan."""
    return Group(change, Text(clean(runner.reason + "; near tie" * runner.near_tie), style="dim"))


def _few(runner: RunnerUp) -> Group:
    return with_reason(runner, Text(_keys(runner)))


def _fewest(runner: RunnerUp) -> Text:
    keys, share = _keys(runner), f"{runner.reason.split(':')[0]}{', near tie' * runner.near_tie}"
    return Text.assemble(keys + "; " * bool(keys), (clean(share), "dim"))


def _keys(runner: RunnerUp) -> str:
    """Return the first keys in which a runner-up differs, without those that follow from others."""
    every = runner.differs.split(", ")
    keys = [each for each in every if not each.startswith(_FOLLOW)] or every
    keys = [each if len(each) <= _LONGEST_KEY else f"other {each.split()[0]}" for each in keys]
    return ", ".join(keys[:_MOST_KEYS]) + ", ..." * (len(keys) > _MOST_KEYS)
