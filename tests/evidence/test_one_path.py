"""The forecast of `planner accuracy` for a published row equals that of `planner explain` for the same values."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from published_runs import published_runs

from planner.api import estimate_layout
from planner.errors import PlannerError
from planner.evidence.compare.score import memory_by_class, score
from planner.evidence.rows.jobs import Question, question_of
from planner.evidence.rows.knowledge import UnpricedRun
from planner.evidence.rows.runs import Run

RUNS = published_runs()


def sample() -> list[Run]:
    """The first row of each source, and one row from its middle."""
    by_source = sorted(RUNS, key=lambda run: run.source_set)
    sources = (list(rows) for _, rows in groupby(by_source, key=lambda run: run.source_set))
    return list({run.id: run for rows in sources for run in (rows[0], rows[len(rows) // 2])}.values())


def typed(question: Question, folder: Path) -> tuple[list[str], dict]:
    """Arguments and keywords of `planner.api.estimate_layout` for a question, with its documents as files."""
    paths = []
    for name, document in (("model", question.model), ("cluster", question.cluster)):
        paths.append(str(folder / f"{name}.yaml"))
        Path(paths[-1]).write_text(json.dumps(document.model_dump(mode="json")), encoding="utf-8")
    names = {"sequence_length": "seq_len", "global_batch_size": "global_batch"}
    options = {names.get(key, key): value for key, value in question.options.items()}
    return paths, options | {"layout": question.layout}


def check(run: Run, folder: Path) -> None:
    """Price and verdict of the row equal, to the last bit, those of the API, which reads files and texts."""
    row = score(run)
    try:
        question = question_of(run)
        paths, options = typed(question, folder)
        plan = estimate_layout(*paths, **options)
    except (PlannerError, UnpricedRun):
        assert row.reason
        assert row.predicted_seconds is None
        return
    assert row.reason == ""
    assert row.setup is not None
    assert row.predicted_seconds == plan.step_seconds * question.share
    assert row.fits == plan.fits
    assert (row.low_seconds, row.high_seconds) == (
        plan.low_step_seconds and plan.low_step_seconds * question.share,
        plan.high_step_seconds and plan.high_step_seconds * question.share,
    )
    classes = [memory_by_class(row.setup.job, stage) for stage in plan.memory]
    assert row.predicted_memory_bytes == max(stage.get(run.mem_class, stage["device"]) for stage in classes)
    assert row.setup.layout == plan.layout
    assert row.setup.assumed == (*question.assumed, *plan.assumed)


@pytest.mark.parametrize("run", sample(), ids=lambda run: run.id)
def test_a_row_is_priced_as_if_it_were_typed(run: Run, tmp_path: Path) -> None:
    check(run, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_row_is_priced_as_if_it_were_typed(tmp_path: Path) -> None:
    for run in RUNS:
        check(run, tmp_path)


@pytest.mark.parametrize("name", ["T0002", "T0939", "N1285"])
def test_the_command_says_what_the_row_says(name: str, tmp_path: Path) -> None:
    run = next(run for run in RUNS if run.id == name)
    question, row = question_of(run), score(run)
    paths, options = typed(question, tmp_path)
    words = [f"--set={each}" for each in options.pop("settings")] + ["--allow-tp-across-nodes"]
    del options["allow_tp_across_nodes"]
    words += [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "planner", "explain", *paths, *words, "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["step_seconds"] == row.predicted_seconds
    assert found["fits"] == row.fits
    assert row.setup is not None
    assert [each["key"] for each in found["assumed"]] == [
        each.key for each in row.setup.assumed[len(question.assumed) :]
    ]
