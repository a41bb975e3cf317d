"""Runs one rank's step on fake tensors and compares the memory that it uses with the plan's ledger.

The trainer's program counts the bytes (`planner.trainer.rehearse`); it runs the trainer's step and uses no formulas.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.cost.ledger import LineName, worst_stage
from planner.errors import EnvironmentProblem, ExitCode, InputError, PlannerError
from planner.plan import write_plan
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.plan import Plan

WITHIN: Final = 0.03
"""Relative difference below which count and ledger agree."""

SLACK_BYTES: Final = 2**26  # 64 MiB
"""Absolute difference below which they agree too: 3 % of a model of a few megabytes is negligible on any GPU."""


class RehearsalFailed(PlannerError):
    """The trainer's program ended without a count."""

    exit_code = ExitCode.RANK_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Bytes of one rank by ledger line, each (planned, counted), and in total, without the runtime's own memory.

    A line is counted at its own peak; transients are the total peak less all other lines.
    """

    rank: int
    stage: int
    lines: dict[LineName, tuple[float, float]]
    planned_bytes: float
    counted_bytes: float

    @property
    def ratio(self) -> float:
        """Ratio counted / planned bytes."""
        return self.counted_bytes / self.planned_bytes

    @property
    def agrees(self) -> bool:
        """Whether the counted peak equals the ledger's within 3 % or 64 MiB."""
        difference = abs(self.counted_bytes - self.planned_bytes)
        return difference <= max(WITHIN * self.planned_bytes, SLACK_BYTES)


def planned_bytes(plan: Plan, rank: int) -> dict[LineName, float]:
    """The ledger of this rank's stage by line, without the runtime's own memory."""
    lines = plan.memory[plan.layout.coordinates(rank)["pp"]].lines
    return {LineName(line.name): float(line.num_bytes) for line in lines if line.name != LineName.RUNTIME}


def verify(plan: Plan, rank: int | None = None) -> Verification:
    """Count the bytes that `rank` holds; None means the first rank of the stage that decides whether the plan fits.

    Raises:
        InputError: the plan is for another engine, has no such rank, or is refused by the trainer.
        EnvironmentProblem: torch is missing, or there is no space for temporary files.
        RehearsalFailed: the step failed.
    """
    if plan.engine.name != "torch":
        raise InputError(
            f"the plan is made for {plan.engine.name}, and `planner verify` runs steps of the engine torch alone",
            hint="plan again with --engine torch; what a run of another program needs is known when it has run",
        )
    if rank is None:
        rank = worst_stage(plan.memory).stage * plan.layout.stride("pp")
    if not 0 <= rank < plan.layout.world_size:
        raise InputError(f"the plan has no rank {rank}", hint=f"its ranks are 0 to {plan.layout.world_size - 1}")
    planned, counted = planned_bytes(plan, rank), _counted(plan, rank)
    held = {LineName(name): float(num_bytes) for name, num_bytes in counted["lines"].items()}
    held[LineName.TRANSIENTS] = counted["peak_bytes"] - sum_of(held.values())
    return Verification(
        rank=rank,
        stage=plan.layout.coordinates(rank)["pp"],
        lines={name: (planned.get(name, 0.0), held.get(name, 0.0)) for name in {**planned, **held}},
        planned_bytes=sum_of(planned.values()),
        counted_bytes=float(counted["peak_bytes"]),
    )


def _counted(plan: Plan, rank: int) -> dict[str, Any]:
    """The output of the trainer's program."""
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblem("torch is not installed", hint="pip install 'parallel-planner[train]'")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_plan(plan, path)
        words = [sys.executable, "-m", "planner.trainer.rehearse", str(path), "--rank", str(rank)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 # our own program
    if done.returncode == ExitCode.BAD_INPUT:
        raise InputError(_said(done.stderr))
    if done.returncode == ExitCode.ENVIRONMENT:
        raise EnvironmentProblem(_said(done.stderr))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RehearsalFailed(f"the step on fake tensors broke off: {last}", hint="a run may work all the same")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _said(errors: str) -> str:
    return errors[errors.rfind("error: ") + len("error: ") :].strip()
