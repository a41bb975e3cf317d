"""Logs of other programs, in the lines that these programs print."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from planner.api import estimate_layout
from planner.errors import InputError
from planner.evidence.inputs import read_inputs
from planner.evidence.logs.programs import read_log
from planner.plan import Plan, write_plan
from planner.specs.by_name import load_model

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


@cache
def plan_of(engine: str, **options) -> Plan:
    common = {"layout": "tp=4,dp=2,mbs=1", "gpus": 8, "seq_len": SEQ, "global_batch": GBS} | options
    return estimate_layout("llama3-8b", "dgx-h100", engine=engine, **common)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("megatron")


@pytest.fixture(scope="module")
def of_trainer() -> Plan:
    return plan_of("fsdp", layout="dp=8,mbs=1,zero=3")


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


PROGRAMS = [(megatron, "megatron"), (titan, "torchtitan"), (deepspeed, "deepspeed"), (pipeline, "deepspeed")]


@pytest.mark.parametrize(("lines", "engine"), PROGRAMS)
def test_a_step_of_two_seconds_is_read_from_every_program(lines, engine: str, tmp_path) -> None:
    found, notes = time_of(tmp_path, plan_of(engine), lines(range(1, 20)))
    assert found == pytest.approx(2.0, rel=1e-4)
    assert notes == []


@pytest.mark.parametrize("seconds", [0.9, 2.0, 45.5])
def test_a_bar_is_read_by_its_clock_without_the_first_steps(seconds: float, of_trainer, tmp_path) -> None:
    found, _ = time_of(tmp_path, of_trainer, trainer(seconds))
    assert found == pytest.approx(seconds, rel=0.05)


def test_the_last_line_of_trainer_is_the_mean_of_the_run(of_trainer, tmp_path) -> None:
    line = "{'train_runtime': 123.4, 'train_samples_per_second': 32.1, 'train_steps_per_second': 0.5, 'epoch': 1.0}"
    found, notes = time_of(tmp_path, of_trainer, [line])
    assert found == 2.0
    assert "train.log:2: a mean of 62 steps" in notes[0]


def test_ranks_that_tell_the_same_step_are_one(tmp_path) -> None:
    lines = [line for line in titan(range(1, 5)) for _ in range(8)]
    with pytest.raises(InputError, match="2 of 4 logged steps count"):
        time_of(tmp_path, plan_of("torchtitan"), lines)


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


def test_a_bar_with_a_lost_loss_is_refused(of_trainer, tmp_path) -> None:
    with pytest.raises(InputError, match=r"0 of .* without .* loss is not finite"):
        time_of(tmp_path, of_trainer, trainer(2.0, loss="nan"))


OPTIONS = "  {name} {dots} {value}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  num_layers ........................................ 80", "num_layers is 80, and 32 in the plan"),
        ("  tensor_model_parallel_size ........................ 8", "tensor_model_parallel_size is 8, and 4"),
        ("[titan] - INFO - Model llama3 70B size: 70,553,706,496 total parameters", "70,553,706,496 total parameters"),
        (MEGATRON.format(n=1, ms=1.0, loss=1, gbs=128), "the global batch is 128, and 64 in the plan"),
    ],
)
def test_a_log_of_something_else_is_refused_by_line(line: str, words: str, plan) -> None:
    without_batch = [re.sub(r"global batch size: +\d+", "", each) for each in megatron(range(9))]
    with pytest.raises(InputError) as error:
        read_log("train.log", io.StringIO("\n".join(["first", line, *without_batch])), plan)
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
    assert len(read_log("train.log", io.StringIO("\n".join([*said, *megatron(range(3))])), plan).steps) == 3


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


# --- progress bars ------------------------------------------------------------------------------------------------


def bar(step: int, last: int, clock: int, *, words: str = "", unit: str = "s/it") -> str:
    shown = f"{clock // 3600}:{clock % 3600 // 60:02}:{clock % 60:02}"
    return f"{words}{100 * step // last:3}%|###   | {step}/{last} [{shown}<00:10,  1.23{unit}]"


LONG_BARS = [
    [bar(1000 * n, 10**6, 30 * n, words="Map (num_proc=8): ", unit=" examples/s") for n in range(1001)],
    [bar(1000 * n, 10**6, 30 * n, unit=" examples/s") for n in range(1001)],
    [bar(n, 40, 1000 * n, words="Loading checkpoint shards: ") for n in range(41)],
    [bar(n, 40, 1000 * n, words="[rank0]: Epoch 0: ") for n in range(41)],
]


@pytest.mark.parametrize("other", LONG_BARS)
@pytest.mark.parametrize("ends", ["\n", "\r", "\r\n"])
def test_a_bar_with_a_description_or_another_unit_is_no_training_bar(other, ends: str, of_trainer, tmp_path) -> None:
    found, _ = time_of(tmp_path, of_trainer, [ends.join([*other, *trainer(2.0)])])
    assert found == 2.0
    with pytest.raises(InputError, match="no line tells the time of a step"):
        time_of(tmp_path, of_trainer, other)


@pytest.mark.parametrize("mark", ["", "0: ", "[rank0]:", "[default0]: ", "2026-06-01T12:00:00.123Z "])
def test_a_mark_of_a_process_is_no_description(mark: str, of_trainer, tmp_path) -> None:
    found, _ = time_of(tmp_path, of_trainer, [bar(n, 60, 2 * n, words=mark) for n in range(61)])
    assert found == 2.0


def test_the_bar_with_trainers_number_of_steps_is_the_training_bar(of_trainer, tmp_path) -> None:
    longer = [bar(n, 500, 30 * n) for n in range(501)]
    found, _ = time_of(tmp_path, of_trainer, ["  Total optimization steps = 60", *longer, *trainer(2.0)])
    assert found == 2.0


# --- what the log says about its own run --------------------------------------------------------------------------

TRAINER_IS = (
    "[rank0]: - root - INFO - Trainer is initialized with local batch size {}, global batch size {}, gradient "
    "accumulation steps 8, sequence length {}, total steps 1000 (warmup 200)"
)
TOKENS_ARE = (
    "[rank0]: - root - INFO - Trainer is initialized with 2048 tokens per DP rank, {} tokens per train step, gradient "
    "accumulation steps 8, maximum context length {}, total steps 1000 (warmup 200)"
)
PREFIXES = [
    "",
    "2026-06-01T12:00:00.123Z ",
    "0: [default0]:",
    "[2026-06-01 12:00:00,123] [INFO] [config.py:1000:print] ",
]


def wrong(line: str, engine: str, **options) -> list[str]:
    """What is said against a log with one line in front of its steps."""
    lines = {"megatron": megatron, "torchtitan": titan, "deepspeed": deepspeed, "fsdp": lambda _: trainer(2.0)}[engine]
    with pytest.raises(InputError) as error:
        read_log("train.log", io.StringIO("\n".join([line, *lines(range(9))])), plan_of(engine, **options))
    assert all(re.fullmatch(r"train\.log:1:\d+", each.where) and each.hint for each in error.value.mistakes)
    return [each.message for each in error.value.mistakes]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ffn_hidden_size", 28672), ("num_query_groups", 1), ("data_parallel_size", 4), ("micro_batch_size", 2),
        ("expert_model_parallel_size", 8), ("virtual_pipeline_model_parallel_size", 4), ("num_experts", 8),
    ],
)  # fmt: skip
def test_an_argument_of_megatron_that_differs_is_refused(prefix: str, option: str, value: int) -> None:
    (said,) = wrong(f"{prefix}  {option} {'.' * (48 - len(option))} {value}", "megatron")
    assert said.startswith(f"{option} is {value}, and ")


@pytest.mark.parametrize(
    ("engine", "line", "words"),
    [
        ("torchtitan", TRAINER_IS.format(1, 128, SEQ), "global batch size is 128, and 64"),
        ("torchtitan", TRAINER_IS.format(2, 64, SEQ), "local batch size is 2, and 1"),
        ("torchtitan", TRAINER_IS.format(1, 64, 4096), "sequence length is 4096, and 2048"),
        ("torchtitan", TOKENS_ARE.format(262144, SEQ), "tokens per train step is 262144, and 131072"),
        ("torchtitan", TOKENS_ARE.format(131072, 4096), "maximum context length is 4096, and 2048"),
        ("torchtitan", "Building 2-D device mesh with ['dp_shard', 'tp'], [4, 2]", "tp is 2, and 4"),
        ("torchtitan", "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1",
         "tp is 2, and 4"),
        ("deepspeed", "[INFO] [config.py:1000:print]   train_batch_size ............. 256", "train_batch_size is 256"),
        ("deepspeed", "[INFO] [config.py:1000:print]   train_micro_batch_size_per_gpu  4", "gpu is 4, and 1"),
        ("deepspeed", "[INFO] [config.py:1000:print]   world_size ................... 16", "is 16, and 8 or 2"),
        ("deepspeed", "[INFO] [config.py:1000:print]   zero_optimization_stage ...... 3", "stage is 3, and"),
        ("fsdp", "  Total train batch size (w. parallel, distributed & accumulation) = 128", "is 128, and 64 "),
        ("fsdp", "  Instantaneous batch size per device = 4", "per device is 4, and 1"),
        ("fsdp", "  Number of trainable parameters = 70,553,706,496", "counts 70,553,706,496 trainable"),
    ],
)  # fmt: skip
def test_a_log_of_another_batch_or_layout_is_refused(engine: str, line: str, words: str) -> None:
    (said,) = wrong(line, engine)
    assert words in said


def test_parameters_of_adapters_are_compared_with_the_trained_ones() -> None:
    common = {"layout": "dp=8,mbs=1,zero=3", "settings": ("training.lora_rank=8",)}
    (said,) = wrong("Number of trainable parameters = 8,030,261,248", "fsdp", **common)
    assert "trainable parameters" in said
    lines = [
        "Number of trainable parameters = 3,407,872",
        *trainer(2.0),
    ]  # peft's count for q_proj and v_proj at rank 8
    assert read_log("train.log", io.StringIO("\n".join(lines)), plan_of("fsdp", **common)).steps


@pytest.mark.parametrize(
    ("engine", "lines"),
    [
        ("megatron", ["  num_query_groups ..... 8", "  num_experts ... None", *megatron(range(9))]),
        ("megatron", ["  data_parallel_size ..... 2", "  world_size ... 8", *megatron(range(9))]),
        ("megatron", [*megatron(range(9)), "  num_layers_per_virtual_pipeline_stage ... 3", "hidden_size of 5 GiB"]),
        ("deepspeed", ["[print]   world_size .... 2", "[print]   train_batch_size .... 64", *deepspeed(range(9))]),
        ("deepspeed", megatron(range(9))),  # Megatron-DeepSpeed
        ("deepspeed", trainer(2.0)),
        ("deepspeed", [*trainer(2.0), *deepspeed(range(9))]),
        ("megatron-bridge", megatron(range(9))),
        ("megatron", [bar(n, 60, 2 * n, words="Train: ") for n in range(61)]),  # ms-swift
        # transformers counts a rank's shard under FSDP
        ("fsdp", ["Number of trainable parameters = 4,015,130,624", *trainer(2.0)]),
    ],
)  # fmt: skip
def test_a_log_that_its_plan_can_print_is_read(engine: str, lines: list[str]) -> None:
    assert len(read_log("train.log", io.StringIO("\n".join(lines)), plan_of(engine)).steps) > 2


@pytest.mark.parametrize(("lines", "engine"), [*PROGRAMS, (lambda _: trainer(2.0), "fsdp")])
def test_lines_of_a_program_that_the_plan_does_not_use_are_refused(lines, engine: str, tmp_path) -> None:
    for other in {"megatron", "torchtitan", "fsdp"} - {engine}:
        with pytest.raises(InputError, match=rf"the plan's engine is {other} \(.*\)") as error:
            time_of(tmp_path, plan_of(other), lines(range(1, 60)))
        assert re.search(r"train\.log:\d+:\d+$", error.value.mistakes[0].where)
        assert engine in error.value.mistakes[0].hint


# --- times --------------------------------------------------------------------------------------------------------


def test_a_step_faster_than_the_devices_is_refused_and_one_far_off_is_noted(plan, tmp_path) -> None:
    with pytest.raises(InputError, match=r"would need \S+ times the peak") as error:
        time_of(tmp_path, plan, megatron(range(1, 20), seconds=0.002))
    assert "milliseconds" in error.value.mistakes[0].hint
    for times, words in [(2.0, ""), (4.9, ""), (5.2, "5.2 times as long"), (1000.0, "1000 times as long")]:
        _, notes = time_of(tmp_path, plan, megatron(range(1, 20), seconds=times * plan.step_seconds))
        assert [note for note in notes if "unit" in note] == notes
        assert words in "".join(notes)
        assert bool(notes) == bool(words)
    # faster than the devices' peak is faster than possible, whatever the forecast
    fastest = plan.mfu * plan.step_seconds
    time_of(tmp_path, plan, megatron(range(1, 20), seconds=1.01 * fastest))
    with pytest.raises(InputError, match="peak"):
        time_of(tmp_path, plan, megatron(range(1, 20), seconds=0.99 * fastest))


@pytest.mark.parametrize(
    ("text", "value"), [("2,000.0", 2.0), ("2000,0", None), ("2.000,0", None), ("20,00", None), ("2,000,000", 2000.0)]
)
def test_commas_stand_only_between_groups_of_three_digits(text: str, value: float | None, plan, tmp_path) -> None:
    good = megatron(range(1, 21))
    lines = [line.replace("2000.0", text) if n % 4 else line for n, line in enumerate(good)]
    found, notes = time_of(tmp_path, plan, lines)
    if value is None:
        assert found == 2.0
        assert any("train.log:3: 15 lines whose time is no number are left out" in note for note in notes)
        with pytest.raises(InputError, match=f"no line has a time that can be read: `{text}`") as error:
            time_of(tmp_path, plan, [line.replace("2000.0", text) for line in good])
        assert error.value.mistakes[0].where.endswith(f"train.log:2:{good[0].index('2000.0') + 1}")
    else:
        assert found == value


def test_validation_is_no_training(tmp_path) -> None:
    lines = [line.replace("step:", "validate step:").replace("tps: ", "tps: 9") for line in titan(range(1, 20))]
    found, notes = time_of(
        tmp_path,
        plan_of("torchtitan"),
        [each for pair in zip(lines, titan(range(1, 20)), strict=True) for each in pair],
    )
    assert found == pytest.approx(2.0, rel=1e-4)
    assert notes == []


@pytest.mark.parametrize(
    ("line", "seconds", "words"),
    [
        ("'train_samples_per_second': 0.16, 'train_steps_per_second': 0.003", 400.0, ""),
        ("'train_samples_per_second': 0.9, 'train_steps_per_second': 0.003", 1 / 0.003, "from 286 s to 400 s"),
        ("'train_steps_per_second': 0.003", 1 / 0.003, "from 286 s to 400 s"),
        ("'train_samples_per_second': '0.160', 'train_steps_per_second': '0.003'", 400.0, ""),
    ],
)  # fmt: skip
def test_a_rate_of_few_digits_gives_way_to_a_finer_figure(line, seconds, words, of_trainer, tmp_path) -> None:
    found, notes = time_of(tmp_path, of_trainer, [f"{{'train_runtime': 40000.0, {line}, 'epoch': 1.0}}"])
    assert found == pytest.approx(seconds)
    assert any(words in note and "rounded" in note for note in notes) == bool(words)


def test_the_number_of_steps_is_finer_than_a_rate(of_trainer, tmp_path) -> None:
    lines = ["  Total optimization steps = 123", "{'train_runtime': 40000.0, 'train_steps_per_second': 0.003}"]
    found, notes = time_of(tmp_path, of_trainer, lines)
    assert found == pytest.approx(40000 / 123)
    assert any("mean of 123 steps" in note for note in notes)


# --- ranks and restarts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", [("", ""), ("[rank0]:", "[rank1]:"), ("0: ", "1: ")])
@pytest.mark.parametrize("behind", [1, 2, 3])
def test_ranks_that_print_one_behind_the_other_are_no_restarts(marks, behind: int, plan, tmp_path) -> None:
    lines = megatron(range(1, 25))
    chunks = [lines[i : i + behind] for i in range(0, len(lines), behind)]
    printed = [f"{mark}{line}" for chunk in chunks for mark in marks for line in chunk]
    found, notes = time_of(tmp_path, plan, printed)
    assert found == 2.0
    assert notes == []


def test_steps_of_a_batch_that_still_grows_are_noted(plan, tmp_path) -> None:
    lines = [*megatron(range(1, 8), 0.5, gbs=16), *megatron(range(8, 12), 0.5, gbs=32), *megatron(range(12, 30))]
    found, notes = time_of(tmp_path, plan, lines)
    assert found == 2.0
    assert [note.rpartition("train.log")[2] for note in notes] == [
        ":2: 11 steps with another batch, up to step 11, are left out"
    ]


# --- lines that are hard to read ----------------------------------------------------------------------------------

NINES = "9" * 5000
PARTS = [
    "iteration 1/ ",
    "iteration" + " " * 99,
    "step: 1 loss: 2.0 ",
    "global_step=1,",
    "steps: 1 loss: 2.0 ",
    "50%|### ",
    "50%|###| 1/2 [00:",
    "'train_steps_per_second': ",
    "num_layers ",
    "Trainer is initialized with ",
    "mesh with parallelism: ",
    "device mesh with [",
    "1,",
    "\x1b[",
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ends", ["", "\r", "\n"])
def test_a_long_text_is_read_in_a_moment(part: str, ends: str, plan, tmp_path) -> None:
    found, _ = time_of(tmp_path, plan, [f"{part}{ends}" * 30_000, *megatron(range(1, 20))])
    assert found == 2.0


@pytest.mark.parametrize(
    "line",
    [
        MEGATRON.format(n=1, ms=1.0, loss=1, gbs=GBS).replace("iteration        1", f"iteration {NINES}"),
        MEGATRON.format(n=1, ms=1.0, loss=1, gbs=GBS).replace("(ms): 1.0", f"(ms): {NINES}"),
        MEGATRON.format(n=1, ms=1.0, loss=1, gbs=GBS).replace("batch size: ", f"batch size: {NINES}"),
        DEEPSPEED.format(n=NINES, rate=1.0),
        f"{NINES}%|##| {NINES}/{NINES} [{NINES}:00:10<00:20, 1.0s/it]",
        "{'train_runtime': 1,2,3, 'train_steps_per_second': 1e400}",
        "{'train_runtime': 1e400, 'train_steps_per_second': 1.0}",
        "{'train_runtime': 1e308, 'train_steps_per_second': 1e308}",
        "{'train_runtime': nan, 'train_steps_per_second': nan}",
        f"  num_layers ..... {NINES}",
        f"Number of trainable parameters = {NINES}",
    ],
)
def test_a_figure_that_is_none_is_refused_or_skipped(line: str, plan, of_trainer, tmp_path) -> None:
    found, _ = time_of(tmp_path, plan, [line, *megatron(range(1, 20))])
    assert found == 2.0
    with pytest.raises(InputError):
        time_of(tmp_path, of_trainer, [line])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("deepseek-v3", ["num_query_groups .... 1", "ffn_hidden_size .... 18432", "num_experts .... 256"]),
        ("qwen3-30b-a3b", ["num_query_groups .... 4", "ffn_hidden_size .... 768", "num_experts .... 128"]),
        ("gpt3-175b", ["num_query_groups .... 1", "ffn_hidden_size .... 49152", "num_experts .... None"]),
    ],
)
def test_arguments_that_megatron_prints_for_a_model_pass(model: str, said: list[str]) -> None:
    plan = replace(plan_of("megatron"), model=load_model(model))
    text = "\n".join(f"  {each}" for each in said)
    with pytest.raises(InputError, match="no line tells the time of a step"):
        read_log("train.log", io.StringIO(text), plan)
