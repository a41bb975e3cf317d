"""`planner verify`: the bytes that it counts, the plans that it refuses, and the exit code for a wrong ledger."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from planner.commands import plan as plan_command
from planner.commands import verify as verify_command
from planner.commands.console import Console
from planner.cost.ledger import LineName
from planner.errors import EnvironmentProblem, ExitCode, InputError
from planner.plan_file import plan_from_file
from planner.verify import _PROGRAMS, RehearsalFailed, Verification, _counted, verify


@pytest.fixture
def console():
    return Console(out=io.StringIO(), err=io.StringIO())


def make(console, path, *, engine="torch", gpus=2, pin=(), settings=()):
    options = {
        "gpus": gpus,
        "global_batch": 8,
        "seq_len": 128,
        "engine": engine,
        "pin": [f"dp={gpus}", *pin],
        "settings": settings,
    }
    assert plan_command.run("tiny-llama", "dgx-a100", console=console, output=path, **options) == ExitCode.OK
    console.out.truncate(console.out.seek(0))
    return path


def test_the_command_counts_a_step_beside_the_ledger(console, tmp_path):
    pytest.importorskip("torch")
    path = make(console, tmp_path / "plan.json")
    verify_command.run(str(path), console=console, rank=1, as_json=True)
    found = json.loads(console.out.getvalue())
    lines = {each["name"]: each["counted_bytes"] for each in found["lines"]}
    model = plan_from_file(path).model
    layer = model.hidden_size * (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_size
    layer += 3 * model.hidden_size * model.ffn_hidden_size + 2 * model.hidden_size
    weights = model.num_layers * layer + 2 * model.vocab_size * model.hidden_size + model.hidden_size
    assert (found["rank"], found["stage"]) == (1, 0)
    assert lines["params"] == 2 * weights  # gathered, in 16 bits
    assert sum(lines.values()) == found["counted_bytes"]


def test_a_ledger_that_is_wrong_ends_with_the_code_of_a_bug(console, tmp_path, monkeypatch):
    path = make(console, tmp_path / "plan.json")
    counts = dict.fromkeys(("params", "grads"), (100e9, 100e9))
    found = Verification(rank=0, stage=0, lines=counts, planned_bytes=200e9, counted_bytes=207e9)
    monkeypatch.setattr("planner.verify.verify", lambda *_: found)
    assert verify_command.run(str(path), console=console) == ExitCode.BUG
    assert "differs from the plan by 3.5%" in console.out.getvalue()
    small = replace(found, lines={}, planned_bytes=1e6, counted_bytes=1.031e6)  # 31 kB apart are much for 1 MB
    monkeypatch.setattr("planner.verify.verify", lambda *_: small)
    assert verify_command.run(str(path), console=console) == ExitCode.BUG
    moved = {"params": (100e9, 107e9), "grads": (100e9, 93e9), "transients": (0.0, 0.0)}  # the sum hides it
    shifted = replace(found, lines={LineName(name): each for name, each in moved.items()}, counted_bytes=200e9)
    monkeypatch.setattr("planner.verify.verify", lambda *_: shifted)
    assert verify_command.run(str(path), console=console) == ExitCode.BUG
    assert "differs from the plan in params, grads" in " ".join(console.out.getvalue().split())
    rest = replace(shifted, lines={LineName.TRANSIENTS: (9e9, -9e9)})  # what is left of the whole peak
    for agreeing in (replace(found, counted_bytes=194.5e9), rest):
        monkeypatch.setattr("planner.verify.verify", lambda *_, found=agreeing: found)
        assert verify_command.run(str(path), console=console) == ExitCode.OK


def test_plans_of_other_programs_and_ranks_that_are_not_there_are_refused(console, tmp_path):
    with pytest.raises(InputError, match="made for megatron"):
        verify(plan_from_file(make(console, tmp_path / "other.json", engine="megatron")))
    with pytest.raises(InputError, match="no rank 2"):
        verify(plan_from_file(make(console, tmp_path / "plan.json")), rank=2)


def test_what_the_trainers_program_says_is_said(console, tmp_path, monkeypatch):
    found = plan_from_file(make(console, tmp_path / "plan.json"))

    class Done:
        returncode, stderr = ExitCode.BAD_INPUT, "a warning\n"
        stdout = "a note\n" + json.dumps({"error": "no such optimizer\n    help: adamw"}) + "\n"

    monkeypatch.setattr("subprocess.run", lambda *_, **__: Done)
    with pytest.raises(InputError, match=r"^no such optimizer\n    help: adamw$"):
        _counted(found, 0, _PROGRAMS["torch"])
    Done.returncode, Done.stdout, Done.stderr = 1, "", "Traceback\nValueError: what"
    with pytest.raises(RehearsalFailed, match="broke off: ValueError: what"):
        _counted(found, 0, _PROGRAMS["torch"])


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 8), ("full:3", 3), ("every:3", 2)])
def test_steps_of_transformers_under_accelerate_are_counted(console, tmp_path, recompute, again):
    for needed in ("torch", "transformers", "accelerate", "datasets"):
        pytest.importorskip(needed)
    pins = ["mbs=1", "zero=3", f"recompute={recompute}"]
    plan = plan_from_file(make(console, tmp_path / "plan.json", engine="fsdp", gpus=4, pin=pins))
    found = verify(plan, rank=1)
    counted = {name: each[1] for name, each in found.lines.items()}
    model, tokens = plan.model, 128
    h, f, keys = model.hidden_size, model.ffn_hidden_size, model.num_kv_heads * model.head_size
    weights = model.num_layers * (2 * h * (h + keys) + 3 * h * f + 2 * h) + 2 * model.vocab_size * h + h
    assert counted["params"] == 2 * (model.vocab_size * h + h)  # Accelerate keeps the head gathered, with the last norm
    assert counted["grads"] == 4 * weights / 4  # both microbatches are reduced at once, else 2 * weights
    assert counted["optimizer_state"] == pytest.approx(12 * weights / 4, rel=1e-2)  # and rotary frequencies
    norms = 2 * (4 * h + 2 * h + 2 * h + 4)  # in fp32, divided, times its weight; one number for each token
    attention = 2 * (2 * h + 2 * keys) + 4 * model.num_heads
    kept = (model.num_layers - again) * (norms + attention + 2 * 4 * f) + again * 2 * h
    assert counted["activations"] == pytest.approx(tokens * kept, rel=0.02)  # and sines and cosines
    assert sum(counted.values()) == found.counted_bytes


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_steps_of_transformers_under_deepspeed_are_counted(console, tmp_path, zero):
    for needed in ("torch", "deepspeed", "transformers", "accelerate", "datasets"):
        pytest.importorskip(needed)
    pins = ["mbs=1", f"zero={zero}", "recompute=none"]
    plan = plan_from_file(make(console, tmp_path / "plan.json", engine="deepspeed", gpus=4, pin=pins))
    found = verify(plan, rank=1)
    counted = {name: each[1] for name, each in found.lines.items()}
    model, tokens = plan.model, 128
    h, f, keys = model.hidden_size, model.ffn_hidden_size, model.num_kv_heads * model.head_size
    weights = model.num_layers * (2 * h * (h + keys) + 3 * h * f + 2 * h) + 2 * model.vocab_size * h + h
    # ZeRO-3 keeps tensors of less than 1e5 elements whole, which all of this model are, beside their parts
    assert counted["params"] == pytest.approx(2 * weights * (1.25 if zero == 3 else 1), rel=1e-3)
    assert counted["optimizer_state"] == pytest.approx(12 * weights / 4, rel=1e-3)
    if zero == 3:  # the part of a matrix that is another rank's is a gradient of ZeRO-1 and 2 too
        assert counted["grads"] == pytest.approx(2 * weights / 4, rel=1e-2)  # and values that are read
    norms = 2 * (4 * h + 2 * h + 2 * h + 4)  # in fp32, divided, times its weight; one number for each token
    attention = 2 * (2 * h + 2 * keys) + 4 * model.num_heads
    a_layer = tokens * (norms + attention + 2 * 4 * f)
    assert counted["activations"] == pytest.approx(model.num_layers * a_layer, rel=0.02)  # and sines and cosines
    buffers = 2 * 5e8 * (1 if zero == 3 else 2)  # DeepSpeed's bucket, twice where one is reduced while one fills
    assert counted["transients"] == pytest.approx(buffers, rel=0.05)
    assert sum(counted.values()) == found.counted_bytes


@pytest.mark.slow
def test_products_of_zero_3_keep_the_inputs_of_frozen_weights(console, tmp_path):
    for needed in ("torch", "deepspeed", "transformers", "accelerate", "datasets", "peft"):
        pytest.importorskip(needed)
    kept = {}
    for zero in (2, 3):
        pins = ["mbs=1", f"zero={zero}", "recompute=none"]
        options = {"engine": "deepspeed", "gpus": 4, "pin": pins, "settings": ("training.lora_rank=8",)}
        plan = plan_from_file(make(console, tmp_path / f"{zero}.json", **options))
        kept[zero] = verify(plan).lines["activations"]
    inputs = plan.model.num_layers * 128 * 2 * (plan.model.hidden_size + plan.model.ffn_hidden_size)
    for planned_or_counted in (0, 1):  # adapters of attention alone: the feed-forward block's two inputs are new
        found = kept[3][planned_or_counted] - kept[2][planned_or_counted]
        assert found == pytest.approx(inputs, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["full", "lora", "nf4"])
@pytest.mark.parametrize(
    ("engine", "gpus", "zero"), [("fsdp", 1, 3), ("fsdp", 2, 3), ("deepspeed", 2, 2), ("deepspeed", 2, 3)]
)
def test_the_ledger_of_fine_tuning_is_what_the_programs_hold(console, tmp_path, engine, gpus, zero, trained):
    needs = ["torch", "transformers", "accelerate", "datasets", "deepspeed"][: 5 if engine == "deepspeed" else 4]
    for needed in (*needs, *(["peft"] if trained != "full" else []), *(["bitsandbytes"] if trained == "nf4" else [])):
        pytest.importorskip(needed)
    pins = ["tp=1", f"dp={gpus}", "mbs=1", f"zero={zero}", "recompute=none"]
    settings = {"full": [], "lora": ["training.lora_rank=16"]}
    settings["nf4"] = [*settings["lora"], "training.frozen_weights=nf4"]
    options = {"gpus": gpus, "global_batch": 2 * gpus, "seq_len": 2048, "engine": engine, "pin": pins}
    options["settings"] = ["model.num_layers=4", *settings[trained]]
    path = tmp_path / "plan.json"
    assert plan_command.run("llama3-8b", "dgx-h100", console=console, output=path, **options) == ExitCode.OK
    assert verify(plan_from_file(path)).ratio == pytest.approx(1, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("pins", [("recompute=none",), ("recompute=full",), ("recompute=none", "tp=2"), ("cp=2",)])
def test_steps_of_torchtitan_are_counted(console, tmp_path, pins):
    for needed in ("torch", "torchtitan", "triton"):
        pytest.importorskip(needed)
    degree = 2 if pins[-1] in ("tp=2", "cp=2") else 1
    pins = ["mbs=1", "zero=3", f"dp={4 // degree}", *pins, *([] if "recompute" in pins[0] else ["recompute=none"])]
    options = {"gpus": 4, "global_batch": 8, "seq_len": 128, "engine": "torchtitan", "pin": pins}
    path = tmp_path / "plan.json"
    assert plan_command.run("tiny-llama", "dgx-a100", console=console, output=path, **options) == ExitCode.OK
    plan = plan_from_file(path)
    found = verify(plan, rank=1)
    counted = {name: each[1] for name, each in found.lines.items()}
    model, tokens, tp = plan.model, 128 / plan.layout.cp, plan.layout.tp
    h, f, keys = model.hidden_size, model.ffn_hidden_size, model.num_kv_heads * model.head_size
    weights = model.num_layers * (2 * h * (h + keys) + 3 * h * f + 2 * h) + 2 * model.vocab_size * h + h
    positions = model.num_layers * 128 * model.head_size // 2 * 8  # complex, in each layer
    assert counted["params"] == 0  # the loss frees the head
    assert counted["grads"] == pytest.approx(4 * weights / 4, rel=1e-2)  # norms are whole on each rank of tp
    assert counted["optimizer_state"] == pytest.approx(12 * weights / 4 + positions, rel=1e-2)
    if plan.layout.cp == 1:
        # inputs of two norms and blocks, those of the blocks gathered; queries, keys, values and output; SwiGLU's four
        a_layer = 2 * (2 * h / tp + 2 * h + (2 * h + 2 * keys + 4 * f) / tp) + 4 * model.num_heads / tp + 2 * 4 / tp
        a_layer += 4 * model.head_size  # rotary positions, complex
        expected = 2 * h if plan.layout.recompute[0] == "full" else a_layer
        assert counted["activations"] == pytest.approx(model.num_layers * tokens * expected, rel=0.02)
    assert sum(counted.values()) == found.counted_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "recompute", "sequence"),
    [
        ("llama3.2-1b", 8, "none", 4096),  # tied
        ("llama3.2-1b", 8, "full", 512),
        ("llama3-8b", 8, "none", 1024),
        ("qwen3-8b", 8, "none", 4096),  # norms of queries and keys
        ("qwen3-30b-a3b", 32, "full", 4096),  # experts
        ("llama3-8b", 8, "full", 512),  # the head's gradient is the largest
        ("mixtral-8x7b", 2, "full", 2048),  # of two layers one is gathered ahead or reduced, never both
        ("mixtral-8x7b", 16, "full", 2048),  # more ranks than experts: all send as much as the fullest
        ("llama3-8b", 16, "full", 512),  # two replicas, whose sums are kept
    ],
)
def test_the_ledger_of_fsdp_is_what_transformers_hold(console, tmp_path, model, gpus, recompute, sequence):
    for needed in ("torch", "transformers", "accelerate", "datasets"):
        pytest.importorskip(needed)
    pins = [
        "tp=1",
        "ep=1",
        "mbs=1",
        "zero=3",
        f"recompute={recompute}",
        f"hsdp={2 if (model, gpus) == ('llama3-8b', 16) else 1}",
    ]
    settings = [f"model.num_layers={2 if gpus == 2 else 8}"] if model == "mixtral-8x7b" else []
    options = {"gpus": gpus, "global_batch": 2 * gpus, "seq_len": sequence, "engine": "fsdp", "pin": pins}
    options["settings"] = settings
    path = tmp_path / "plan.json"
    assert plan_command.run(model, "dgx-h100", console=console, output=path, **options) == ExitCode.OK
    assert verify(plan_from_file(path)).ratio == pytest.approx(1, abs=0.03)


def test_steps_that_no_cpu_can_run_are_refused_one_by_one(console, tmp_path):
    pytest.importorskip("torch")
    settings = ["training.loss=fused", "training.optimizer=adamw-8bit"]
    plan = plan_from_file(make(console, tmp_path / "plan.json", engine="fsdp", settings=settings))
    with pytest.raises(InputError, match=r"training.optimizer is adamw-8bit(.|\n)*training.loss is fused"):
        _PROGRAMS["accelerate"].write(plan, tmp_path)


@pytest.mark.parametrize(
    ("engine", "pins", "why"),
    [
        ("deepspeed", ("dp=2", "pp=2", "zero=1"), "tell each other shapes"),
        ("torchtitan", ("dp=2", "pp=2"), "since 2.14"),
        ("fsdp", ("dp=2", "tp=2"), "while it loads it"),
    ],
)
def test_layouts_that_a_program_cannot_count_are_refused_with_the_reason(console, tmp_path, engine, pins, why):
    pytest.importorskip("torch")
    options = {"gpus": 4, "global_batch": 8, "seq_len": 128, "engine": engine, "pin": pins}
    path = tmp_path / "plan.json"
    assert plan_command.run("tiny-llama", "dgx-a100", console=console, output=path, **options) == ExitCode.OK
    plan = plan_from_file(path)
    program = next(_PROGRAMS[each] for each in plan.engine.emits if each in _PROGRAMS)
    with pytest.raises(InputError, match=why):
        program.write(plan, tmp_path)


def test_what_a_count_needs_is_named(console, tmp_path, monkeypatch):
    plan = plan_from_file(make(console, tmp_path / "plan.json", engine="fsdp"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "accelerate" else name)
    with pytest.raises(EnvironmentProblem, match="not installed: accelerate"):
        verify(plan)
