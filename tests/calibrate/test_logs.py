"""Logs of other programs, in the lines that these programs print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.api import estimate_layout
from planner.calibrate.inputs import read_inputs
from planner.calibrate.logs import read_log
from planner.errors import InputError
from planner.plan import Plan, write_plan

MEGATRON = (
    " [2026-03-01 10:00:{n:02}] iteration {n:8}/     100 | consumed samples: {n:12} | elapsed time per iteration (ms): "
    "{ms:.1f} | throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.5E-06 | global batch size: {gbs:5} | "
    "lm loss: {loss} | loss scale: 1.0 | grad norm: 0.231 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)
TITAN = (
    "[rank0]:\x1b[31m[titan] 2026-02-24 19:46:17,508 - root - INFO - \x1b[36mstep: {n:2}  \x1b[32mloss: {loss}  "
    "grad_norm: 26.6250  memory: 66.91GiB(37.51%)  \x1b[34mtps: {tps:,}  tflops: 314.71  mfu: 13.99%\x1b[39m"
)
DEEPSPEED = (
    "[2026-03-07 15:27:02,646] [INFO] [timer.py:260:stop] epoch=0/micro_step={n}/global_step={n}, "
    "RunningAvgSamplesPerSec=1.7, CurrSamplesPerSec={rate}, MemAllocated=6.01GB, MaxMemAllocated=19.52GB"
)
PIPELINE = "steps: {n} loss: {loss} iter time (s): {seconds:.3f} samples/sec: 53.694"
GBS, SEQ = 64, 2048


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate_layout(
        "llama3-8b", "dgx-h100", layout="tp=4,dp=2,mbs=1", gpus=8, seq_len=SEQ, global_batch=GBS, engine="megatron"
    )


def megatron(numbers, seconds=2.0, loss="2.5E+00", gbs=GBS) -> list[str]:
    return [MEGATRON.format(n=n, ms=1e3 * seconds, loss=loss, gbs=gbs) for n in numbers]


def titan(numbers) -> list[str]:
    return [TITAN.format(n=n, loss="7.62585", tps=round(GBS * SEQ / 8 / 2.0)) for n in numbers]


def deepspeed(numbers) -> list[str]:
    return [DEEPSPEED.format(n=n, rate=GBS / 2.0) for n in numbers]


def pipeline(numbers) -> list[str]:
    return [PIPELINE.format(n=n, loss=5.5, seconds=2.0) for n in numbers]


def trainer(seconds: float, *, last: int = 60, loss: str = "1.5") -> list[str]:
    """The bar of tqdm with whole seconds, a first step of 30 s, and Trainer's records."""
    lines = []
    for n in range(last + 1):
        clock = int(n and 30 + (n - 1) * seconds)
        bar = f"{100 * n // last:3}%|###   | {n}/{last} [{clock // 60:02}:{clock % 60:02}<01:00,  {seconds:.2f}s/it]"
        lines.append(f"\r{bar}{{'loss': {loss}, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}}")
    evaluation = "100%|####| 5/5 [00:09<00:00,  1.80s/it]"
    return [*lines, evaluation]


def time_of(tmp_path: Path, plan: Plan, lines: list[str]) -> tuple[float, list[str]]:
    write_plan(plan, tmp_path / "plan.json", replace=True)
    (tmp_path / "train.log").write_text("\n".join(["starting", *lines, ""]))
    notes: list[str] = []
    (found,) = read_inputs([tmp_path / "train.log"], tell=notes.append)
    return found.measured_seconds, notes


@pytest.mark.parametrize("lines", [megatron, titan, deepspeed, pipeline])
def test_a_step_of_two_seconds_is_read_from_every_program(lines, plan, tmp_path) -> None:
    found, notes = time_of(tmp_path, plan, lines(range(1, 20)))
    assert found == pytest.approx(2.0, rel=1e-4)
    assert notes == []


@pytest.mark.parametrize("seconds", [0.7, 2.0, 45.5])
def test_a_bar_is_read_by_its_clock_without_the_first_steps(seconds: float, plan, tmp_path) -> None:
    found, _ = time_of(tmp_path, plan, trainer(seconds))
    assert found == pytest.approx(seconds, rel=0.05)


def test_the_last_line_of_trainer_is_the_mean_of_the_run(plan, tmp_path) -> None:
    line = "{'train_runtime': 123.4, 'train_samples_per_second': 32.1, 'train_steps_per_second': 0.5, 'epoch': 1.0}"
    found, notes = time_of(tmp_path, plan, [line])
    assert found == 2.0
    assert "train.log:2: a mean of 62 steps" in notes[0]


def test_ranks_that_tell_the_same_step_are_one(plan, tmp_path) -> None:
    lines = [line for line in titan(range(1, 5)) for _ in range(8)]
    with pytest.raises(InputError, match="2 of 4 logged steps count"):
        time_of(tmp_path, plan, lines)


def test_restarts_a_growing_batch_and_a_lost_loss_are_read_for_what_they_are(plan, tmp_path) -> None:
    lines = [
        *megatron(range(1, 4), 0.5, gbs=16),
        *megatron(range(4, 6), 60.0),
        *megatron(range(6, 12)),
        "a crash",
        *megatron(range(9, 11), 70.0),
        *megatron(range(11, 14)),
        *megatron(range(14, 40), 9.0, loss="NaN"),
    ]
    found, notes = time_of(tmp_path, plan, lines)
    assert found == 2.0
    assert any("started again 1 times (line 14)" in note for note in notes)
    assert any("train.log:19: 26 steps without a finite loss" in note for note in notes)


def test_a_bar_with_a_lost_loss_is_refused(plan, tmp_path) -> None:
    with pytest.raises(InputError, match=r"0 of .* without .* loss is not finite"):
        time_of(tmp_path, plan, trainer(2.0, loss="nan"))


OPTIONS = "  {name} {dots} {value}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  num_layers ........................................ 80", "num_layers is 80, and 32 in the plan"),
        ("  tensor_model_parallel_size ........................ 8", "tensor_model_parallel_size is 8, and 4"),
        ("[titan] - INFO - Model llama3 70B size: 70,553,706,496 total parameters", "70,553,706,496 parameters"),
        (MEGATRON.format(n=1, ms=1.0, loss=1, gbs=128), "the global batch is 128, and 64 in the plan"),
    ],
)
def test_a_log_of_something_else_is_refused_by_line(line: str, words: str, plan) -> None:
    with pytest.raises(InputError) as error:
        read_log("train.log", "\n".join(["first", line, *titan(range(9))]), plan)
    (mistake,) = error.value.mistakes
    assert re.fullmatch(r"train\.log:2:\d+", mistake.where)
    assert words in mistake.message
    assert mistake.hint


def test_a_log_of_the_plan_passes(plan) -> None:
    said = [
        "  num_layers ............. 32",
        "  hidden_size ....... 4096",
        "  lr ........ 0.1",
        "Model x size: 8,030,261,248 total parameters",
    ]
    assert len(read_log("train.log", "\n".join([*said, *megatron(range(3))]), plan)) == 3


@pytest.mark.parametrize(("time", "words"), [("nan", "took nan seconds"), ("0.0", "took 0.0 seconds")])
def test_a_time_that_is_none_is_refused_by_line(time: str, words: str, plan, tmp_path) -> None:
    lines = megatron(range(1, 9))
    lines[4] = lines[4].replace("2000.0", time)
    with pytest.raises(InputError, match=words) as error:
        time_of(tmp_path, plan, lines)
    assert error.value.mistakes[0].where.endswith(f"train.log:6:{lines[4].index(': ' + time) + 3}")


def test_a_log_without_times_or_without_a_plan_says_what_is_missing(plan, tmp_path) -> None:
    with pytest.raises(InputError, match="no line tells the time of a step"):
        time_of(tmp_path, plan, ["epoch 1", "epoch 2"])
    (tmp_path / "plan.json").unlink()
    with pytest.raises(InputError, match="a log does not say what ran") as error:
        read_inputs([tmp_path / "train.log"])
    assert "--plan" in error.value.mistakes[0].hint
