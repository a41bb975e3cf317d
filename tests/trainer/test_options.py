"""The trainer reads the options that the command line writes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from planner.run_arguments import RunArguments

pytest.importorskip("torch")

from planner.trainer.options import RunOptions, parse_options, run_options


def test_the_words_of_a_run_are_read_back(run_arguments: RunArguments) -> None:
    options = parse_options(["plan.json", "--output=out", *run_arguments.options()])
    assert options.plan == Path("plan.json")
    assert run_options(options) == RunOptions(output=Path("out"), **asdict(run_arguments))
