"""Destinations of a step's numbers: DIR/metrics.jsonl always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from planner.errors import EnvironmentProblem
from planner.layout import format_layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from planner.plan import Plan


class Logger(Protocol):
    """Receives the record of each step, which has a number for each name."""

    def log(self, record: Mapping[str, float | None]) -> None:
        """Store the record of one step; `step` is its number."""
        ...

    def close(self) -> None:
        """Write all pending records."""
        ...


def make_loggers(output: Path, plan: Plan, *, tensorboard: bool, wandb: str | None) -> list[Logger]:
    """The loggers of a run; only rank 0 has any.

    wandb: name of the project.

    Raises:
        EnvironmentProblem: a library is missing.
    """
    loggers: list[Logger] = [_JsonLines(output / "metrics.jsonl")]
    try:
        if tensorboard:
            loggers.append(_TensorBoard(output / "tensorboard"))
        if wandb:
            loggers.append(_WeightsAndBiases(output, plan, wandb))
    except ImportError as error:
        raise EnvironmentProblem(
            f"{error.name} is not installed", hint="pip install 'parallel-planner[logging]'"
        ) from None
    return loggers


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, record: Mapping[str, float | None]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Do nothing, because each line is complete when it is written."""


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, record: Mapping[str, float | None]) -> None:
        for name, value in record.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run with the name of its folder, so that a resumed run continues it."""

    def __init__(self, output: Path, plan: Plan, project: str) -> None:
        import wandb

        config = {"model": plan.model.name, "layout": format_layout(plan.layout), **plan.training.model_dump()}
        self._run: Any = wandb.init(
            project=project, id=output.absolute().name, resume="allow", dir=str(output), config=config
        )

    def log(self, record: Mapping[str, float | None]) -> None:
        self._run.log({name: value for name, value in record.items() if value is not None}, step=record["step"])

    def close(self) -> None:
        self._run.finish()
