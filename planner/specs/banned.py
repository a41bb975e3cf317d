"""Axes that a program does not run, although it has options for them: what happened when it was run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.specs.by_name import other_engines
from planner.specs.yaml import shipped_yaml

if TYPE_CHECKING:
    from planner.specs.engine import EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """An axis for which a run of a program's emitted files has shown that they do not do what they say.

    Published runs with the axis, of other versions and scripts, keep their price.

    program: the value of `--to`.
    tried: the versions that ran, on two ranks or more.
    seen: what the run showed.
    """

    program: str
    axis: str
    tried: str
    seen: str

    @property
    def words(self) -> str:
        """The reason."""
        return f"with {self.axis} > 1 a run of {self.tried} {self.seen}"

    @property
    def way_out(self) -> str:
        """The value, or the engines, to plan with instead."""
        others = other_engines(
            ", or ", lambda each: bool(each.emits) and self.axis in each.can.axes and self.axis not in bans_of(each)
        )
        return f"{self.axis}=1{others}"


_PROGRAMS: Any = shipped_yaml(Path(__file__).with_name("executed.yaml")).plain["programs"]


def _bans(programs: Any) -> tuple[Ban, ...]:
    return tuple(
        Ban(program=row.get("program", name), axis=axis, tried=row["tried"], seen=seen)
        for name, row in programs.items()
        for axis, seen in row.get("banned", {}).items()
    )


BANS: Final = _bans(_PROGRAMS)
"""Axes that a search leaves out, and that `planner emit` refuses; an executed test of the axis removes its row."""


def bans_on(program: str, layout: Any) -> list[Ban]:
    """The bans of a program that concern a layout."""
    return [each for each in BANS if each.program == program and getattr(layout, each.axis) > 1]


def bans_of(engine: EngineSpec) -> dict[str, Ban]:
    """Axis -> ban, for the axes that are banned for every program of the engine."""
    found = {each.axis: each for each in BANS if each.program in engine.emits}
    rows = {(each.program, each.axis) for each in BANS}
    return {axis: ban for axis, ban in found.items() if all((program, axis) in rows for program in engine.emits)}


def runs_of(engine: EngineSpec) -> dict[str, dict[str, dict[str, str]]]:
    """Program -> axis -> what tests did with it (executed, constructed) or its ban; versions, and the run."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for program in engine.emits:
        wanted = (program, engine.name)
        rows = (row for key, row in _PROGRAMS.items() if (row.get("program", key), row["engine"]) == wanted)
        row: Any = next(rows, {"tried": ""})  # other engines run the program with other options
        axes = {axis: {"state": "constructed", "tried": row["tried"]} for axis in row.get("constructed", ())}
        for axis, run in row.get("executed", {}).items():
            axes[axis] = {"state": "executed", "tried": row["tried"], "run": run}
        bans = (each for each in BANS if each.program == program)
        found[program] = axes | {ban.axis: {"state": "banned", "tried": ban.tried, "seen": ban.seen} for ban in bans}
    return found


def searched_axes(engine: EngineSpec) -> frozenset[str]:
    """Axes along which a search may divide the work."""
    return frozenset(engine.can.axes) - {*bans_of(engine)}
