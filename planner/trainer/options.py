"""The options of a rank: the fields of `planner.emit.torchrun.RunArguments`, and where the run lives."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from planner.trainer.data import Corpus, open_corpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.plan import Plan

__all__ = ["RunOptions", "corpus_of", "parse_options", "run_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run; what to run is the plan's.

    resume: `auto` (newest intact checkpoint, if any), `never`, or the step of a checkpoint.
    checkpoint_every: steps between checkpoints; None: by the clock, every ten minutes. The end of a run
    always saves.
    keep_checkpoints: newest ones that stay. async_save: write them while the training goes on.
    async_tp: compiled layers pass pieces between the ranks of tp while they multiply.
    validate_every: steps between the losses of the held-out samples, if there are any; the end of a run always does.
    profile: number of a step to record with torch's profiler.
    tensorboard: write DIR/tensorboard. wandb: project of Weights & Biases.
    weights: a Hugging Face checkpoint to start from where there is nothing to resume; export: where to write one
    after the last step.
    """

    output: Path
    resume: str = "auto"
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    async_save: bool = False
    async_tp: bool = False
    validate_every: int = 100
    profile: int | None = None
    tensorboard: bool = False
    wandb: str | None = None
    weights: Path | None = None
    export: Path | None = None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.output / "checkpoints"


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the words behind `-m planner.trainer`; `planner launch` has explained and checked them."""
    parser = argparse.ArgumentParser(prog="planner.trainer", allow_abbrev=False)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--data", action="append", default=[])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--document-mask", action="store_true")
    parser.add_argument("--validation", type=float, default=0.0)
    parser.add_argument("--keep-checkpoints", type=int, default=2)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--async-tp", action="store_true")
    parser.add_argument("--validate-every", type=int, default=100)
    parser.add_argument("--profile", type=int)
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--wandb")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--checkpoint-every", type=int)
    return parser.parse_args(words)


def run_options(options: argparse.Namespace) -> RunOptions:
    """What the training loop is told."""
    return RunOptions(**{field.name: getattr(options, field.name) for field in fields(RunOptions)})


def corpus_of(plan: Plan, options: argparse.Namespace) -> Corpus:
    """Open the data of a run; raises as `open_corpus` does."""
    return open_corpus(
        tuple(options.data),
        sequence_length=plan.training.sequence_length,
        vocab_size=plan.model.vocab_size,
        seed=plan.training.seed,
        tokenizer=options.tokenizer,
        validation=options.validation,
        document_mask=options.document_mask,
        cache=options.output / "tokens",
    )
