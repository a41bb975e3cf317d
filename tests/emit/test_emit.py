"""`planner emit`: scripts that bash and shellcheck accept, and that do what they say when they run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli import main
from planner.emit.bundle import TARGETS, write_bundle
from planner.emit.torchrun import RunArguments, check_engine
from planner.errors import EnvironmentProblem, ExitCode, InputError
from planner.plan import read_plan

HOSTILE = ("a b.txt", "$(touch owned)", "`touch owned`", "a\nb; touch owned", "'; touch owned; '", "--data")
NOTHING = RunArguments()


def on_one_host(plan):
    return replace(plan, layout=replace(plan.layout, tp=2, dp=1))


def with_a_smaller_last_host(plan):
    return replace(plan, layout=replace(plan.layout, tp=1, dp=3))


SHAPES = [lambda plan: plan, on_one_host, with_a_smaller_last_host]


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path) -> Path:
    """A folder of programs that stand for torchrun, srun, scontrol and planner."""
    folder = tmp_path / "tools"
    folder.mkdir()
    program(folder, "torchrun", 'printf "%s\\n" "$@"')
    program(folder, "srun", 'printf "%s\\n" "$@" "$MASTER_ADDR" "$MASTER_PORT" > "$TOLD"; exec bash "$TRAINING"')
    program(
        folder, "scontrol", 'if [[ $1 == show ]]; then printf "node7\\nnode8\\n"; else echo "$@" > "$TOLD.requeued"; fi'
    )
    return folder


@pytest.mark.parametrize("target", TARGETS)
def test_the_script_is_the_golden_one(target, plan, golden):
    arguments = RunArguments(data=("/data/a b.txt",), steps=500)
    golden(f"emit-{TARGETS[target][0]}", TARGETS[target][1](plan, arguments=arguments))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data", [(), HOSTILE])
def test_bash_and_shellcheck_accept_it(target, shape, data, plan, tmp_path):
    _, script = write_bundle(shape(plan), target, tmp_path / "out", arguments=RunArguments(data=data))
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    # SC2016: what looks like an expansion inside single quotes is the point of hostile names
    found = subprocess.run([shellcheck, "--exclude=SC2016", script], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def words_of(script: Path, tools: Path, *arguments: str) -> list[str]:
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script, *arguments], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_hostile_names_reach_the_trainer_as_they_are(plan, tmp_path, tools):
    _, script = write_bundle(on_one_host(plan), "torchrun", tmp_path / "out", arguments=RunArguments(data=HOSTILE))
    words = words_of(script, tools)
    shown = "\n".join(words[words.index("--output=run") + 1 :])
    assert shown == "\n".join(f"--data={Path(name).absolute()}" for name in HOSTILE)
    assert not list(tmp_path.rglob("owned"))


def test_each_host_gets_its_number_and_its_ranks(plan, tmp_path, tools):
    _, script = write_bundle(with_a_smaller_last_host(plan), "torchrun", tmp_path / "out", arguments=NOTHING)
    for number, ranks in (("0", 8), ("1", 4)):
        words = words_of(script, tools, number, "10.0.0.1", "29400")
        assert {f"--nproc-per-node={ranks}", f"--node-rank={number}", "--master-addr=10.0.0.1"} <= set(words)
    refused = subprocess.run(["bash", script, "0"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")


@pytest.mark.parametrize(
    ("training", "warned", "code", "requeued"),
    [
        ("exit 0", False, 0, False),
        ("exit 6", False, 6, False),
        ("until [[ -e run/stop ]]; do sleep 0.05; done; exit 75", True, 75, True),
        ("until [[ -e run/stop ]]; do sleep 0.05; done; exit 17", True, 17, False),
    ],
)
def test_a_slurm_job_saves_before_its_time_is_up(training, warned, code, requeued, plan, tmp_path, tools):
    folder = tmp_path / "out"
    write_bundle(plan, "slurm", folder, arguments=NOTHING)
    (tmp_path / "training").write_text(training)
    spooled = shutil.copy(folder / "job.sbatch", tmp_path / "slurm_script")  # Slurm runs a copy elsewhere
    environment = {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "31234567", "TOLD": str(tmp_path / "told"),
        "TRAINING": str(tmp_path / "training"),
    }  # fmt: skip
    job = subprocess.Popen(["bash", spooled], env=environment, cwd="/")
    end = time.monotonic() + 30
    while not (tmp_path / "told").exists() and job.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    if warned:
        job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == code
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["--kill-on-bad-exit=0", "planner", "launch", "plan.json", "--output=run", "node7", "24567"]
    assert (tmp_path / "told.requeued").exists() == requeued


def test_nothing_is_overwritten_without_force(plan_file, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["emit", str(plan_file), "--to", "slurm", "-o", str(folder)]) == 0
    assert capsys.readouterr().out == ""
    assert read_plan(folder / "plan.json") == read_plan(plan_file)
    (folder / "job.sbatch").write_text("mine")
    assert main(["emit", str(plan_file), "--to", "slurm", "-o", str(folder)]) == ExitCode.BAD_INPUT
    assert (folder / "job.sbatch").read_text() == "mine"
    assert main(["emit", str(plan_file), "--to", "slurm", "-o", str(folder), "--force"]) == 0
    assert (folder / "job.sbatch").read_text() != "mine"


def test_a_folder_that_cannot_be_written_is_told(plan, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["emit", "missing.json", "-o", str(tmp_path / "x")]) == ExitCode.ENVIRONMENT
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        write_bundle(plan, "slurm", tmp_path / "file" / "below", arguments=NOTHING)


def test_a_hostile_model_name_is_no_plan(plan_file, capsys):
    """The name stands in an #SBATCH line, where nothing can be quoted."""
    document = json.loads(plan_file.read_text())
    document["model"]["name"] = "a\n#SBATCH --wrap=x"
    plan_file.write_text(json.dumps(document))
    assert main(["emit", str(plan_file), "--to", "slurm"]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().out == ""


def test_a_plan_of_another_engine_is_refused(plan):
    other = plan.engine.model_copy(update={"name": "megatron"})
    with pytest.raises(InputError, match="made for megatron"):
        check_engine(replace(plan, engine=other))
