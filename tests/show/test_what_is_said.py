"""What an answer says of itself: whose sequence length, which devices are idle, in what other layouts differ."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import planner
from planner.api import estimate_file, plan_file
from planner.cli import main
from planner.errors import InputError
from planner.layout import Assumed, Layout
from planner.plan_file import plan_from_json
from planner.show.screen import Screen, to_text
from planner.show.summary import summary
from planner.show.words import layout_words

GIB = 2**30
EIGHT = {"gpus": 8, "seq_len": 4096, "global_batch": 64}
SMALL = ["tiny-llama", "dgx-a100", "--gpus", "2", "--global-batch", "8"]
SCRIPT = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 16 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 \\
  --tensor-model-parallel-size 8 --vocab-size 50304 --untie-embeddings-and-output-weights
"""


def said(capsys, *argv: str, code: int = 0) -> str:
    assert main(list(argv)) == code
    return capsys.readouterr().out


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]


# --- the sequence length ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", *SMALL],
        ["explain", *SMALL, "--layout", "tp=2"],
        ["plan", "tiny-llama", "dgx-a100", "--nodes", "1..2", "--global-batch", "16"],
        ["plan", "tiny-llama", "dgx-a100,dgx-h100", "--gpus", "2", "--global-batch", "8"],
    ],
    ids=["plan", "explain", "sizes", "clusters"],
)
def test_a_length_that_nobody_gave_is_said_first(argv, capsys) -> None:
    own = yaml.safe_load(Path("models/tiny-llama.yaml").read_text())["max_sequence_length"]
    head = " ".join(said(capsys, *argv).splitlines()[:4])
    assert f"sequence length {own:,} is the model's own; --seq-len" in head
    assert "the model's own" not in said(capsys, *argv, "--seq-len", str(own))


def test_a_length_that_nobody_gave_is_in_the_document(tmp_path, capsys) -> None:
    plan = planner.plan_job("tiny-llama", "dgx-a100", gpus=2, global_batch=8)
    assumed = {each["key"]: each for each in json.loads(plan.to_json())["assumed"]}
    assert assumed["sequence_length"]["value"] == str(plan.model.max_sequence_length)
    (tmp_path / "p.json").write_text(plan.to_json())
    assert "is the model's own" in said(capsys, "explain", str(tmp_path / "p.json"))
    given = planner.plan_job("tiny-llama", "dgx-a100", gpus=2, global_batch=8, seq_len=plan.model.max_sequence_length)
    assert not given.own_length
    assert given.assumed == ()


@pytest.mark.parametrize(
    "what", [["dgx-a100:1,dgx-h100:1"], ["dgx-a100", "--nodes", "1..2"]], ids=["clusters", "sizes"]
)
def test_a_length_that_nobody_gave_is_in_the_document_of_a_comparison(what, capsys) -> None:
    own = yaml.safe_load(Path("models/tiny-llama.yaml").read_text())["max_sequence_length"]
    argv = ["plan", "tiny-llama", *what, "--global-batch", "16", "--json"]
    (length,) = json.loads(said(capsys, *argv))["assumed"]
    assert (length["key"], length["value"]) == ("sequence_length", str(own))
    assert json.loads(said(capsys, *argv, "--seq-len", str(own)))["assumed"] == []


# --- devices ------------------------------------------------------------------------------------------------------


def test_a_comparison_says_which_devices_are_idle_and_what_they_would_cost(capsys) -> None:
    """Half of the 8 devices are in use, so whoever pays for all pays twice as much."""
    half = ["--pin", "tp=1,pp=1,dp=4,cp=1", "--set", "cluster.price=2 USD/h per device", "--seq-len", "512"]
    argv = ["plan", "tiny-llama", "dgx-a100:1,dgx-h100:1", "--global-batch", "8", *half]
    text = " ".join(said(capsys, *argv).split())
    assert "4 x a100-80gb, 4 idle" in text
    assert "on the devices in use" in text
    (first, _) = json.loads(said(capsys, *argv, "--json"))["choices"]
    assert (first["num_devices"], first["idle_devices"]) == (4, 4)
    assert first["usd_with_idle"] == pytest.approx(2 * first["usd"])
    assert f"{first['usd_with_idle']:.0f} USD if idle devices are paid for too" in text


# --- other layouts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def six() -> planner.Plan:
    job = {"nodes": 4, "seq_len": 4096, "global_batch": 256, "engine": "megatron"}
    found = planner.plan_job("mixtral-8x7b", "dgx-h100", **job, top=6, within=0)
    assert len(found.runners_up) > 3
    return found


@pytest.mark.parametrize("width", [50, 80])
@pytest.mark.parametrize("is_default", [True, False])
def test_every_runner_up_says_in_what_it_differs(six, width, is_default) -> None:
    plan = replace(six, runners_up=six.runners_up[: 3 if is_default else 6])
    text = to_text(summary(plan, ("planner x",)), Screen(width=width))
    rows = re.split(r"\n  (?=\d)", text.partition("Runners-up")[2].partition("\nNext")[0])[1:]
    words = [" ".join(row.split()[4:]) for row in rows]
    assert len(set(words)) == len(plan.runners_up)
    assert all(re.match(r"(tp|pp|cp|ep|zero|devices|mbs) \d", each) for each in words)
    assert all("slower" in each or "faster" in each for each in words)
    if not is_default:  # who asks for more gets all of it
        assert all(re.search(r"loses|saves|the plan has", each) for each in words)


def test_the_line_that_loses_and_the_rest_add_up_to_the_difference(six) -> None:
    found = 0
    for runner in six.runners_up:
        parts = re.search(r"loses [a-z ]+ ([\d.]+ m?s)(?:, (and|saves) ([\d.]+ m?s) elsewhere)?", runner.reason)
        if parts:
            found += 1
            rest = {"and": 1, "saves": -1, None: 0}[parts[2]] * seconds(parts[3] or "0 s")
            whole = runner.step_seconds - six.step_seconds
            assert seconds(parts[1]) + rest == pytest.approx(whole, abs=0.01 * six.step_seconds)
    assert found


def test_fewer_devices_are_a_difference() -> None:
    from planner.search.near_ties import differences

    plan = planner.estimate_layout("llama3-8b", "dgx-h100", layout="tp=8,zero=0", **EIGHT)
    other = planner.estimate_layout("llama3-8b", "dgx-h100", layout="tp=4,dp=1,zero=0", **EIGHT)
    assert differences(plan.layout, other.layout) == "devices 8 -> 4, tp 8 -> 4"


# --- a file's own layout ------------------------------------------------------------------------------------------


def test_the_files_own_layout_stands_beside_the_best(tmp_path, capsys) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    own = estimate_file(tmp_path / "train.sh", "dgx-h100")
    plan = plan_file(tmp_path / "train.sh", "dgx-h100")
    assert plan.own is not None
    assert plan.own.layout == own.layout != plan.layout
    assert plan.own.step_seconds == pytest.approx(own.step_seconds)
    share = own.step_seconds / plan.step_seconds - 1
    assert share > 0.1
    assert plan_from_json(plan.to_json()) == plan
    (tmp_path / "p.json").write_text(plan.to_json())
    text = " ".join(said(capsys, "explain", str(tmp_path / "p.json")).split())
    assert re.search(rf"your file tp=8\S* .*{share:.0%} slower", text)
    text = said(capsys, "explain", "--from", str(tmp_path / "train.sh"), "dgx-h100")
    assert "planner plan --from" in " ".join(text.partition("\nNext")[2].split())


@pytest.mark.parametrize("asked", [["--what-if"], ["--what-if", "nvlink.bandwidth=x2", "--why-not=tp=4", "--batch"]])
def test_the_command_that_plans_a_files_job_is_one_that_plan_takes(tmp_path, monkeypatch, capsys, asked) -> None:
    from planner.commands.plan import command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(SCRIPT)
    monkeypatch.setattr("planner.answers.what_if.fastest_seconds", lambda plan, _: plan.step_seconds / 2)
    text = said(capsys, "explain", "--from", "train.sh", "dgx-h100", "--section", "others", *asked)
    printed = next(line for line in text.partition("\nNext")[2].splitlines() if "planner plan" in line)
    assert printed.split() == ["planner", "plan", "--from", "train.sh", "dgx-h100"]
    command.make_context("plan", printed.split()[2:], obj="")  # click refuses an option that plan does not have


def test_a_script_after_why_not_is_told_where_it_goes(tmp_path, capsys) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    argv = ["explain", *SMALL, "--layout", "tp=2", "--why-not", str(tmp_path / "train.sh")]
    assert main(argv) == 2
    assert "planner plan --from FILE CLUSTER" in capsys.readouterr().err


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["torch", "deepspeed", "fsdp", "megatron", "torchtitan"])
@pytest.mark.parametrize("layout", ["tp=1,zero=3", "tp=2,zero=1,recompute=full", "tp=1,zero=3,mbs=2,recompute=full"])
def test_transients_are_the_sum_of_their_parts(engine, layout) -> None:
    try:
        plan = planner.estimate_layout("llama3-8b", "dgx-h100", layout=layout, engine=engine, **EIGHT)
    except InputError:
        pytest.skip("the engine has no such layout")
    (peak,) = planner.explain_layout(plan, parts=("peaks",)).sections.peaks
    line = next(float(each.num_bytes) for each in plan.worst_stage.lines if each.name == "transients")
    assert sum(each.num_bytes for each in peak.transients) == pytest.approx(line)
    assert all(each.num_bytes > 0 for each in peak.transients)


def test_transients_of_zero_3_are_ends_loss_and_layers(tmp_path, capsys) -> None:
    """Llama 3 8B has 2 x 128,256 x 4,096 parameters in its ends, and a norm of 4,096; all of it is gathered in bf16."""
    ends = (2 * 128_256 * 4096 + 4096) * (2 + 2)
    plan = planner.estimate_layout("llama3-8b", "dgx-h100", layout="tp=1,zero=3", seq_len=8192, gpus=8, global_batch=64)
    (peak,) = planner.explain_layout(plan, parts=("peaks",)).sections.peaks
    parts = {each.name: each.num_bytes for each in peak.transients}
    assert parts["embedding, head and buffers"] == pytest.approx(ends)
    (tmp_path / "p.json").write_text(plan.to_json())
    text = said(capsys, "explain", str(tmp_path / "p.json"), "memory")
    assert f"{ends / GIB:.3f}" in text
    assert "the only weights kept are the optimizer's" in " ".join(text.split())


def test_a_chance_that_is_unknown_is_null_everywhere() -> None:
    plan = planner.estimate_layout("llama3-8b", "dgx-h100", layout="tp=1,zero=3", **EIGHT)
    doubt = Assumed(key="x", value="1", rule="it takes memory", kind="open", settled_by="--ignore x")
    found = json.loads(replace(plan, assumed=(doubt,)).to_json())
    assert found["memory"][0]["device_chance"] is None
    assert found["memory"][0]["chance_of_fitting"] is None
    read = plan_from_json(replace(plan, assumed=(doubt,)).to_json())
    assert (read.fits, read.chance_of_fitting) == (None, None)
    assert json.loads(plan.to_json())["memory"][0]["device_chance"] > 0


# --- errors and commands ------------------------------------------------------------------------------------------


def test_the_next_command_writes_a_file_that_is_not_there(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text("mine")
    text = said(capsys, "plan", *SMALL, "--seq-len", "512").replace("\\\n", "")
    command = text.partition("\nNext\n")[2].splitlines()[0]
    assert main(command.split()[1:]) == 0
    assert (tmp_path / "plan.json").read_text() == "mine"
    assert json.loads((tmp_path / "plan2.json").read_text())["format"] == 3


def test_one_pin_that_breaks_several_rules_is_one_error(capsys) -> None:
    assert main(["plan", "llama3-8b", "dgx-h100", "--seq-len", "4096", "--global-batch", "64", "--pin", "tp=3"]) == 2
    err = capsys.readouterr().err
    assert err.count("error:") == err.count("help:") == 1
    assert "divide the heads" in err
    assert "scale-up domain" in err


def test_a_long_value_of_a_runner_up_is_named_and_not_spelt_out(six) -> None:
    """`explain PLAN others` has the whole layout."""
    parts = "layernorm+mla_up_proj+moe_act"
    runner = replace(six.runners_up[0], differs=f"tp 1 -> 2, recompute {parts} -> {parts}+mlp, zero 1 -> 3")
    text = " ".join(to_text(summary(replace(six, runners_up=(runner,)), ()), Screen(width=200)).split())
    assert "tp 1 -> 2, other recompute, zero 1 -> 3" in text
    assert parts not in text


def test_a_layout_on_one_device_says_so_whatever_its_zero_stage() -> None:
    assert layout_words(Layout(layers_per_stage=(8,), recompute=("none",), zero=3)) == "one device, ZeRO-3"


def test_the_hint_for_a_missing_batch_is_read_in_a_pipe(capsys) -> None:
    assert main(["plan", "tiny-llama", "dgx-a100"]) == 2
    told = capsys.readouterr().err
    assert "--global-batch 1024" in told
    assert "\\n" not in told
