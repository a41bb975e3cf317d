"""The commands that a run prints at its end can be typed, wherever its model came from and its folder lies."""

from __future__ import annotations

import shlex

import pytest

import planner
from planner.cli import main
from planner.errors import ExitCode

MODEL = """\
{name: mini-8m, architecture: llama, num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2,
 ffn_hidden_size: 172, vocab_size: 260, max_sequence_length: 64, tied_embeddings: true}
"""
JOB = ["local-cpu", "--gpus", "2", "--seq-len", "64", "--global-batch", "4", "--precision", "fp32"]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a number of steps; return the commands that the launcher prints at the end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l.yaml").write_text(MODEL)

    def launch(steps: int) -> list[list[str]]:
        assert main(["plan", "l.yaml", *JOB, "-o", "l.json"]) == ExitCode.OK
        capfd.readouterr()
        assert main(["launch", "l.json", "--steps", str(steps), "--output", "my runs/one"]) == ExitCode.OK
        lines = capfd.readouterr().out.splitlines()
        return [shlex.split(line)[1:] for line in lines if line.startswith("  planner ")]

    return launch


def test_after_a_run_the_corrections_are_learnt_and_the_job_is_planned_again(run) -> None:
    learn, again = run(9)
    assert main(learn) == ExitCode.OK
    assert main([*again, "-o", "again.json"]) == ExitCode.OK
    first, second = planner.read_plan("l.json"), planner.read_plan("again.json")
    assert (second.model, second.cluster, second.training) == (first.model, first.cluster, first.training)
    assert second.made_by.calibration != first.made_by.calibration


def test_a_run_that_is_too_short_to_learn_from_suggests_nothing(run) -> None:
    assert run(3) == []
