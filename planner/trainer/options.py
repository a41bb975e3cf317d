"""Options of a rank: the run's options (`planner.run_arguments`), its plan, and its output folder."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from planner.run_arguments import RunArguments, option_name
from planner.trainer.data import Corpus, open_corpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(RunArguments):
    """How a run trains, and its folder; the plan says what it trains."""

    output: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.output / "checkpoints"


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments after `-m planner.trainer`; `planner launch` has explained and checked them before."""
    parser = argparse.ArgumentParser(prog="planner.trainer", allow_abbrev=False)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    for each in fields(RunArguments):
        name, read = option_name(each.name), each.metadata["read"]
        if each.default is False:
            parser.add_argument(name, action="store_true")
        elif each.default == ():
            parser.add_argument(name, action="append", type=read, default=[])
        else:
            parser.add_argument(name, type=read, default=each.default)
    return parser.parse_args(words)


def run_options(options: argparse.Namespace) -> RunOptions:
    """The options for the training loop."""
    given = {each.name: getattr(options, each.name) for each in fields(RunOptions)}
    return RunOptions(**{**given, "data": tuple(options.data)})


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
