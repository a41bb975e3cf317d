"""`planner check`: a run beside its plan's bands, beside an earlier run, and beside its plan's layout."""

from __future__ import annotations

import json
import math
import random
import statistics
from typing import TYPE_CHECKING, Any

import pytest

from planner import estimate_layout
from planner.cli import main
from planner.errors import ExitCode
from planner.evidence.check import limit_of
from planner.evidence.inputs import Measured
from planner.plan import plan_to_json

if TYPE_CHECKING:
    from pathlib import Path

    from planner.plan import Plan

LAYOUT = "tp=1,pp=1,dp=8,zero=3,mbs=1,recompute=full"
CELLS = "llama3-8b,H100,8,4096,64,torchtitan"


@pytest.fixture(scope="module")
def plan() -> Plan:
    options = {"nodes": 1, "global_batch": 64, "seq_len": 4096, "engine": "torchtitan"}
    return estimate_layout("llama3-8b", "dgx-h100", layout=LAYOUT, **options)


def log_of(plan: Plan, seconds: list[float], gib: float = 20.0) -> str:
    """A log of torchtitan: tokens per second of a device, and the reserved memory."""
    tokens = plan.training.global_batch_size * plan.training.sequence_length / plan.layout.world_size
    return "\n".join(
        f"step: {number}  loss:  8.1  grad_norm: 2.0  memory: {gib:.3f}GiB(50.0%)  tps: {tokens / took:.3f}  mfu: 40%"
        for number, took in enumerate(seconds, 1)
    )


def steps(seconds: float, *, noise: float = 0.01, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [seconds * (1 + rng.gauss(0, noise)) for _ in range(22)]


class Check:
    """`planner check` with the plan; the exit code and the document, or the exit code and what stderr says."""

    def __init__(self, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.plan, self.capsys = plan, capsys

    def __call__(self, run: Path, *options: str) -> tuple[int, dict[str, Any]]:
        code = main(["check", str(run), "--plan", self.plan, "--json", *options])
        return code, json.loads(self.capsys.readouterr().out)

    def refused(self, run: Path, *options: str) -> str:
        assert main(["check", str(run), "--plan", self.plan, *options]) == ExitCode.BAD_INPUT
        return self.capsys.readouterr().err


@pytest.fixture
def check(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan))
    return Check(str(path), capsys)


@pytest.mark.parametrize(
    ("end", "factor", "code"), [("low", 0.9, 0), ("low", 1.02, 0), ("high", 0.98, 0), ("high", 1.02, 7)]
)
def test_a_step_over_the_plans_band_fails_and_a_shorter_one_passes(
    check: Check, plan: Plan, tmp_path: Path, end: str, factor: float, code: int
) -> None:
    seconds = factor * (getattr(plan, f"{end}_step_seconds") or 0)
    (tmp_path / "a.log").write_text(log_of(plan, steps(seconds, noise=0)))
    found = check(tmp_path / "a.log")
    assert found[0] == code
    assert found[1]["passed"] == (code == 0)
    assert found[1]["step_seconds"] == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (1.02, 0), (1.15, 7), (0.8, 0)])
def test_a_run_slower_than_its_baseline_by_more_than_the_scatter_fails(
    check: Check, plan: Plan, tmp_path: Path, slower: float, code: int
) -> None:
    (tmp_path / "a.log").write_text(log_of(plan, steps(plan.step_seconds)))
    (tmp_path / "b.log").write_text(log_of(plan, steps(plan.step_seconds * slower, seed=1)))
    found = check(tmp_path / "b.log", "--baseline", str(tmp_path / "a.log"))
    assert found[0] == code
    noisy = log_of(plan, steps(plan.step_seconds, noise=0.1))  # a scatter of 10 % hides 15 %
    (tmp_path / "a.log").write_text(noisy)
    assert check(tmp_path / "b.log", "--baseline", str(tmp_path / "a.log"))[0] == 0


def test_memory_is_compared_by_the_counter_of_the_log(check: Check, plan: Plan, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(log_of(plan, steps(plan.step_seconds), gib=1.0))
    code, found = check(log)
    assert (code, found["memory_counter"], found["memory_bytes"]) == (0, "reserved", 2**30)
    over = found["high_memory_bytes"] / 2**30
    for gib, code in ((over - 0.1, 0), (over + 0.1, 7)):
        log.write_text(log_of(plan, steps(plan.step_seconds), gib=gib))
        assert check(log)[0] == code
    assert check(log, "--fail-on", "slower,layout")[0] == 0


def test_another_layout_fails_and_says_where(check: Check, plan: Plan, tmp_path: Path) -> None:
    said = "Trainer is initialized with local batch size 1, global batch size 32, gradient accumulation steps 1\n"
    (tmp_path / "a.log").write_text(said + log_of(plan, steps(plan.step_seconds)))
    code, found = check(tmp_path / "a.log")
    assert code == ExitCode.DIFFERS
    assert [each["reason"] for each in found["findings"]] == ["layout"]
    assert "a.log:1:" in found["findings"][0]["text"]
    assert "\n" not in found["findings"][0]["text"]  # its view is one line
    assert "global batch size is 32" in check.refused(tmp_path / "a.log", "--fail-on", "slower")


def test_a_folder_is_of_the_plan_whatever_its_run_costs(check: Check, plan: Plan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": n, "loss": 1.0, "step_seconds": s} for n, s in enumerate(steps(plan.step_seconds), 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"nodes": 1, "global_batch": 64, "seq_len": 4096, "engine": "torchtitan"}
    priced = ("training.price=2 USD/h", "training.tokens=1e9")
    ran = estimate_layout("llama3-8b", "dgx-h100", layout=LAYOUT, settings=priced, **options)
    (run / "plan.json").write_text(plan_to_json(ran))
    assert check(run)[0] == 0
    longer = estimate_layout("llama3-8b", "dgx-h100", layout=LAYOUT, **{**options, "seq_len": 2048})
    (run / "plan.json").write_text(plan_to_json(longer))
    code, found = check(run)
    assert code == ExitCode.DIFFERS
    assert {each["reason"] for each in found["findings"]} == {"layout"}
    assert "scatter" in check.refused(run, "--baseline", str(tmp_path / "runs.csv"))


def test_a_folder_of_logs_is_refused_beside_what_is_wrong_with_the_run(
    check: Check, plan: Plan, tmp_path: Path
) -> None:
    for name in ("run", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(log_of(plan, steps(plan.step_seconds)))
    said = check.refused(tmp_path / "run", "--baseline", str(tmp_path / "logs"))
    assert said.count("no run: plan.json is missing") == said.count("a log is named itself") == 2
    table = check.refused(tmp_path / "run", "--baseline", "runs.csv")
    assert "no run: plan.json is missing" in table
    assert "has no scatter" in table


def test_a_row_of_a_table_is_checked_by_its_id(check: Check, plan: Plan, tmp_path: Path) -> None:
    seconds = plan.step_seconds
    head = "id,model,gpu,gpus,seq,gbs,framework,tp,pp,dp,mbs,step_s\n"
    rows = f"a,{CELLS},1,1,8,1,{seconds}\nb,{CELLS},2,1,4,1,{seconds}\n"
    (tmp_path / "runs.csv").write_text(head + rows)
    table = tmp_path / "runs.csv"
    assert check(table, "--row", "a")[0] == 0
    code, found = check(table, "--row", "b")
    assert code == ExitCode.DIFFERS
    assert {each["text"].split(": ")[1] for each in found["findings"]} == {
        "tp is 2, and 1 in the plan",
        "dp is 4, and 8 in the plan",
    }
    assert "no row with the id" in check.refused(table, "--row", "c")


def test_what_cannot_be_compared_is_said_and_refused_if_it_is_asked_for(
    check: Check, plan: Plan, tmp_path: Path
) -> None:
    text = log_of(plan, steps(plan.step_seconds)).replace("memory:", "store:")
    (tmp_path / "a.log").write_text(text)
    code, found = check(tmp_path / "a.log")
    assert code == 0
    assert [each["text"][:12] for each in found["findings"] if each["reason"] == "memory"] == ["not compared"]
    assert "tells no peak" in check.refused(tmp_path / "a.log", "--fail-on", "memory")
    misspelt = check.refused(tmp_path / "a.log", "--fail-on", "slow,layuot")
    assert "did you mean `layout`" in misspelt
    assert "did you mean `slower`" in misspelt


def of_runs(folder: Path, plan: Plan, medians: list[float]) -> str:
    """A folder of run folders, each step of which takes as long as its run says."""
    for number, seconds in enumerate(medians):
        run = folder / f"run-{number}"
        run.mkdir(parents=True)
        (run / "plan.json").write_text(plan_to_json(plan))
        lines = [{"step": n, "loss": 1.0, "step_seconds": seconds} for n in range(1, 8)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_runs_that_differ_are_compared_by_students_test(check: Check, plan: Plan, tmp_path: Path) -> None:
    """The one-sided 99 % quantile of six degrees of freedom is 3.143 (Student's table)."""
    before, after = [1.0, 1.1, 0.95, 1.05, 0.9], [1.0, 1.08, 0.96]
    baseline = of_runs(tmp_path / "before", plan, before)
    sides = [[math.log(each) for each in side] for side in (before, after)]
    variance = (4 * statistics.variance(sides[0]) + 2 * statistics.variance(sides[1])) / 6
    error = math.sqrt(variance * (1 / 5 + 1 / 3))
    for number, (quantile, code) in enumerate(((3.10, 0), (3.18, 7))):
        slower = math.exp(statistics.fmean(sides[0]) - statistics.fmean(sides[1]) + quantile * error)
        of_runs(tmp_path / str(number), plan, [slower * each for each in after])
        assert check(tmp_path / str(number), "--baseline", baseline, "--fail-on", "slower")[0] == code
    steady = of_runs(tmp_path / "steady", plan, [1.0, 1.0, 1.0])
    for number, (seconds, code) in enumerate(((1.02, 0), (1.04, 7))):
        of_runs(tmp_path / f"one-{number}", plan, [seconds])
        assert check(tmp_path / f"one-{number}", "--baseline", steady, "--fail-on", "slower")[0] == code


@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_runs_as_fast_as_their_baseline_are_rarely_called_slower(spread: float) -> None:
    """Of logarithms with a normal scatter, Student's test of 1 % calls 1 % slower, whatever the scatter is."""
    rng = random.Random(0)
    for before, after in ((4, 1), (10, 10), (20, 20)):
        alarms = found = 0
        for _ in range(2000):
            drawn = [Measured(math.exp(rng.gauss(0, spread))) for _ in range(before + after)]
            limit = limit_of(drawn[:before], drawn[before:])
            took = statistics.geometric_mean(each.seconds for each in drawn[before:])
            alarms, found = alarms + (took > limit), found + (1.15 * took > limit)
        assert alarms / 2000 < 0.015
        assert found / 2000 > (0.95 if before > 4 and (spread < 0.1 or before > 10) else 0.05)
