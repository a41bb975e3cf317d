"""Runs one rank's step on fake tensors and compares the memory that it uses with the plan's ledger.

A program of the trainer counts the bytes. `planner.trainer.rehearse` runs the trainer's own step. Its neighbours run
the steps of other programs from the files that `planner emit` writes: transformers under Accelerate's FSDP2
(`rehearse_accelerate`), under DeepSpeed's ZeRO (`rehearse_deepspeed`), and torchtitan (`rehearse_torchtitan`). None of
them uses the planner's formulas.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.cost.ledger import LineName, worst_stage
from planner.emit.names import names_beside, refusals
from planner.emit.programs import PROGRAMS
from planner.emit.programs.hugging_face import is_named
from planner.emit.target import How, Refusal, Target, values_of
from planner.errors import ExitCode, InputError, PlannerError
from planner.own_program import answer_of
from planner.plan import write_plan
from planner.run_arguments import RunArguments
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.plan import Plan

WITHIN: Final = 0.03
"""Largest difference between count and ledger, as a share of all bytes that the layout holds on the rank."""


def _model_fault(plan: Plan) -> tuple[str, str] | None:
    if not is_named(plan):
        return None
    return f"{plan.model.name} is loaded by a name, which the plan does not know", "its run alone can tell"


_NAMES: Final = names_beside(__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A program of `planner.trainer` that counts the bytes of a step.

    target: the target whose files the program reads; None if the program reads the plan.
    packages: packages that the program needs.
    mock_data: whether the files can name mock data; otherwise the files name data that the program does not read.
    refuse: refusals of plans whose steps the program cannot run.
    """

    module: str
    target: Target | None = None
    packages: Sequence[str] = ()
    mock_data: bool = True
    refuse: tuple[Refusal, ...] = ()

    @property
    def install(self) -> str:
        """How to install the packages."""
        return self.target.install if self.target else "pip install 'parallel-planner[train]'"

    def write(self, plan: Plan, folder: Path) -> Path:
        """Write the program's input to a folder; return the input's path."""
        if self.target is None:
            path = folder / "plan.json"
            write_plan(plan, path)
            return path
        target = replace(self.target, refuse=(*self.target.refuse, *self.refuse))
        how = How(smoke=True) if self.mock_data else How(arguments=RunArguments(data=("hf:none",)))
        for name, text in target.render(values_of(target, plan), plan, how).items():
            (folder / name).write_text(text, encoding="utf-8")
        return folder


def _program(name: str, refused: Sequence[str] = (), **row: Any) -> _Program:
    """A program from a row of the document; models that are loaded by a name are known to transformers alone."""
    refuse = [each for part in refused for each in refusals(_NAMES["refused"][part])]
    refuse += [Refusal(says=(), fault=_model_fault)] * ("transformers" in row.get("packages", ()))
    return _Program(**row, target=PROGRAMS[name] if refused else None, refuse=tuple(refuse))


_PROGRAMS: Final = {name: _program(name, **row) for name, row in _NAMES["programs"].items()}
"""Programs whose steps can be counted, under their names in engine profiles (`emits`)."""


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
    def differing(self) -> tuple[LineName, ...]:
        """Lines whose count differs by more than 3 % of all the plan's bytes; transients are no count of their own."""
        own = {name: each for name, each in self.lines.items() if name != LineName.TRANSIENTS}
        return tuple(name for name, each in own.items() if not self._is_near(*each))

    @property
    def agrees(self) -> bool:
        """Whether the counted peak and each counted line differ from the ledger's by at most 3 % of all its bytes."""
        return self._is_near(self.planned_bytes, self.counted_bytes) and not self.differing

    def _is_near(self, planned: float, counted: float) -> bool:
        return abs(counted - planned) <= WITHIN * self.planned_bytes


def planned_bytes(plan: Plan, rank: int) -> dict[LineName, float]:
    """The ledger of this rank's stage by line, without the runtime's own memory."""
    lines = plan.memory[plan.layout.coordinates(rank)["pp"]].lines
    return {LineName(line.name): float(line.num_bytes) for line in lines if line.name != LineName.RUNTIME}


def verify(plan: Plan, rank: int | None = None) -> Verification:
    """Count the bytes that `rank` holds; None means the first rank of the plan's worst stage.

    Raises:
        InputError: steps of the plan's engine cannot be counted, the plan has no such rank, or a program refuses the
            plan.
        EnvironmentProblem: a library of the program is missing, or there is no space for temporary files.
        RehearsalFailed: the step failed.
    """
    program = next((_PROGRAMS[each] for each in plan.engine.emits if each in _PROGRAMS), None)
    if program is None:
        raise InputError(
            f"the plan is made for {plan.engine.name}, whose steps `planner verify` cannot count",
            hint="it counts those of --engine torch, fsdp, deepspeed and torchtitan; Megatron-LM's need a GPU, and of "
            "others a run alone can tell",
        )
    if rank is None:
        rank = worst_stage(plan.memory).stage * plan.layout.stride("pp")
    if not 0 <= rank < plan.layout.world_size:
        raise InputError(f"the plan has no rank {rank}", hint=f"its ranks are 0 to {plan.layout.world_size - 1}")
    planned, counted = planned_bytes(plan, rank), _counted(plan, rank, program)
    held = {LineName(name): float(num_bytes) for name, num_bytes in counted["lines"].items()}
    held[LineName.TRANSIENTS] = counted["peak_bytes"] - sum_of(held.values())
    return Verification(
        rank=rank,
        stage=plan.layout.coordinates(rank)["pp"],
        lines={name: (planned.get(name, 0.0), held.get(name, 0.0)) for name in {**planned, **held}},
        planned_bytes=sum_of(planned.values()),
        counted_bytes=float(counted["peak_bytes"]),
    )


def _counted(plan: Plan, rank: int, program: _Program) -> dict[str, Any]:
    """The output of the program that counts the bytes."""
    more = {"peft": program.target and plan.training.lora_rank, "bitsandbytes": plan.training.frozen_weights == "nf4"}
    with tempfile.TemporaryDirectory() as folder:
        words = (str(program.write(plan, Path(folder))), "--rank", str(rank))
        needs = ("torch", *program.packages, *(name for name, needed in more.items() if needed))
        return answer_of(program.module, *words, needs=needs, install=program.install, broken=_broken)


def _broken(words: str) -> RehearsalFailed:
    return RehearsalFailed(f"the step on fake tensors broke off: {words}", hint="a run may work all the same")
