"""Commands that the planner prints, to be typed next: each is typed here, and does what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import planner
from planner.cli import cli, main
from planner.errors import ExitCode
from planner.specs.by_name import load_device
from planner.specs.cluster import ClusterSpec
from planner.specs.cluster_documents import load_cluster

MODEL = """\
name: mini-8m
architecture: llama
num_layers: 2
hidden_size: 64
num_heads: 4
num_kv_heads: 2
ffn_hidden_size: 172
vocab_size: 260
max_sequence_length: 64
tied_embeddings: true
"""
JOB = ["local-cpu", "--gpus", "2", "--seq-len", "64", "--global-batch", "4", "--precision", "fp32"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a model whose file, named with a space, has another name than the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my models").mkdir()
    (tmp_path / "my models" / "l.yaml").write_text(MODEL)
    (tmp_path / "out here").mkdir()
    return tmp_path


def printed(text: str) -> list[list[str]]:
    """The words of each command that stands on a line of its own."""
    lines = text.replace(" \\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("  planner ")]


def test_the_next_command_saves_the_plan_and_the_one_after_it_uses_the_file(capsys) -> None:
    assert main(["plan", "my models/l.yaml", *JOB]) == ExitCode.OK
    save, look = printed(capsys.readouterr().out)
    assert main(save) == ExitCode.OK
    use, again = printed(capsys.readouterr().out)
    assert (use, again) == (["launch", "plan.json"], look)
    assert main([*use, "--dry-run"]) == ExitCode.OK
    assert main(look) == ExitCode.OK
    assert planner.read_plan("plan.json").model.name == "mini-8m"


@pytest.mark.parametrize(
    ("engine", "cluster", "verb"),
    [("torch", "local-cpu", "launch"), ("megatron", "dgx-a100", "emit"), ("megatron-2021", "dgx-a100", "explain")],
)
def test_a_plan_saved_in_another_folder(engine: str, cluster: str, verb: str, capsys) -> None:
    job = [cluster, "--gpus", "2", "--seq-len", "64", "--global-batch", "4", "--engine", engine]
    assert main(["plan", "my models/l.yaml", *job, "-o", "out here/my plan.json"]) == ExitCode.OK
    command, look = printed(capsys.readouterr().out)
    assert command == [verb, "out here/my plan.json"]
    assert main(command + ["--dry-run"] * (verb == "launch")) == ExitCode.OK
    assert main(look) == ExitCode.OK


def test_a_plan_of_another_planner_says_how_to_make_it_again(capsys) -> None:
    assert main(["plan", "tiny-gpt", *JOB, "-o", "old.json"]) == ExitCode.OK
    old = Path("old.json")
    old.write_text(old.read_text().replace('"format": 3', '"format": 2', 1))
    capsys.readouterr()
    assert main(["explain", "old.json"]) == ExitCode.BAD_INPUT
    (command,) = printed(capsys.readouterr().err)
    assert main(command) == ExitCode.OK


# --- planning without a cluster, and the job of a plan once more ----------------------------------------------------


@pytest.fixture
def without_accelerators(monkeypatch) -> None:
    monkeypatch.setattr("planner.specs.this_machine.detected_cluster", lambda: load_cluster("local-cpu"))


@pytest.mark.usefixtures("without_accelerators")
@pytest.mark.parametrize("model", ["my models/l.yaml", pytest.param("llama3-70b", marks=pytest.mark.slow)])
def test_without_a_cluster_it_names_some_that_hold_the_model(model: str, capsys) -> None:
    assert main(["plan", model, "--seq-len", "64"]) == ExitCode.BAD_INPUT
    commands = printed(capsys.readouterr().err)
    assert len(commands) == 3
    for command in commands:
        assert main(["-q", *command]) == ExitCode.OK
        assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("without_accelerators")
def test_what_was_said_of_size_and_batch_is_kept(capsys) -> None:
    assert main(["plan", "deepseek-v3", "--nodes", "2", "--global-batch", "64"]) == ExitCode.BAD_INPUT
    commands = printed(capsys.readouterr().err)
    assert commands[0] == ["plan", "deepseek-v3", "dgx-h100", "--nodes", "2", "--global-batch", "64"]
    assert main(["plan", "deepseek-v3"]) == ExitCode.BAD_INPUT
    (hosts,) = re.findall(r"deepseek-v3 dgx-b200 --nodes (\d+) ", capsys.readouterr().err)
    assert int(hosts) * 8 * 180 >= 671 * 32, "671 billion parameters with 32 bytes each, on devices of 180 GB"
    assert main(["plan", "no-such-model"]) == ExitCode.BAD_INPUT
    assert "unknown model" in capsys.readouterr().err


def test_accelerators_of_this_machine_are_the_cluster(monkeypatch, capsys) -> None:
    links = load_cluster("dgx-h100").links
    here = ClusterSpec(name="this-machine", device=load_device("h100-80gb"), devices_per_host=4, links=links)
    monkeypatch.setattr("planner.specs.this_machine.detected_cluster", lambda: here)
    assert main(["plan", "llama3-8b", "--seq-len", "2048", "--global-batch", "64"]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "4 x h100-80gb (this-machine, 1 host of 4)" in said
    save, _ = printed(said)
    assert main(save) == ExitCode.OK
    assert planner.read_plan("plan.json").cluster.num_devices == 4


@pytest.mark.parametrize(
    "asked",
    [
        ["--pin", "zero=1,mbs=1", "--objective", "memory", "--within", "0", "--headroom", "20%"],
        ["--global-batch", "4..5", "--pin", "dp=2,mbs<=2", "--forbid", "dp=2,zero=1", "--risk", "1%"],
    ],
)
def test_the_job_of_a_plan_is_planned_again_and_changed(asked: list[str], capsys) -> None:
    assert main(["plan", "my models/l.yaml", *JOB, *asked, "-o", "first.json"]) == ExitCode.OK
    assert main(["plan", "--from", "first.json", "-o", "again.json"]) == ExitCode.OK
    first, again = planner.read_plan("first.json"), planner.read_plan("again.json")
    assert again == first
    assert main(["plan", "--from", "first.json", "dgx-a100", "--precision", "bf16", "-o", "there.json"]) == ExitCode.OK
    there = planner.read_plan("there.json")
    assert (there.cluster.name, there.training.precision) == ("dgx-a100", "bf16")
    assert (there.model, there.options) == (first.model, first.options)
    capsys.readouterr()
    assert main(["plan", "--from", "first.json", "--define", "A=1"]) == ExitCode.BAD_INPUT
    assert "first.json is a plan" in capsys.readouterr().err


def test_examples_of_the_help_run_one_after_the_other() -> None:
    for command in printed(cli.epilog.replace("llama3-8b dgx-h100 --global-batch 512", f"tiny-gpt {shlex.join(JOB)}")):
        assert main(command) == ExitCode.OK
