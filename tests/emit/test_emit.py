"""`planner emit`: bash and shellcheck accept the scripts, and the scripts do what their text says."""

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
import yaml
from tables import unsaid

from planner.cli import main
from planner.emit.bundle import bundle_of, target_of, write_bundle
from planner.emit.hosts import ranks_of_hosts
from planner.emit.programs import PROGRAMS
from planner.emit.starters import STARTERS, torchrun
from planner.emit.target import How, Setting, values_of
from planner.errors import EnvironmentProblem, ExitCode, InputError, NothingFitsError
from planner.layout_text import parse_layout
from planner.reading import read_plan
from planner.run_arguments import RunArguments
from planner.search.given import plan_for_layout
from planner.specs.load import load_job

HOSTILE = ("a b.txt", "$(touch owned)", "`touch owned`", "a\nb; touch owned", "'; touch owned; '", "--data")


def written(plan, folder, on="torchrun", **arguments):
    """The script of a starter's bundle that starts the run."""
    paths, _ = write_bundle(plan, folder, on=on, how=How(arguments=RunArguments(**arguments)))
    return paths[-1]


def test_each_starter_is_a_module_and_each_module_a_starter():
    modules = {path.stem for path in Path(torchrun.__file__).parent.glob("*.py")} - {"__init__"}
    assert {name for name in STARTERS if STARTERS[name].script} == modules


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_table_says_or_refuses_every_field(name):
    assert not unsaid(PROGRAMS[name])


def on_one_host(plan):
    return replace(plan, layout=replace(plan.layout, tp=2, dp=1))


def with_a_smaller_last_host(plan):
    return replace(plan, layout=replace(plan.layout, tp=1, dp=3))


def on_two_pools(plan):  # noqa: ARG001 - as the others
    """One host of h100, then two hosts of a100, with eight ranks each."""
    job = load_job(model="llama3-8b", cluster="mixed-a100-h100", global_batch_size=64, settings=("a100.hosts=2",))
    layout = parse_layout(
        "pp=3,dp=8,zero=1,pools=h100/a100/a100", num_layers=job.model.num_layers, num_devices={"a100": 16, "h100": 8}
    )
    return plan_for_layout(job, layout)


SHAPES = [lambda plan: plan, on_one_host, with_a_smaller_last_host, on_two_pools]


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("on", ["torchrun", "slurm"])
def test_the_script_is_the_golden_one(on, plan, golden):
    made = bundle_of(plan, on=on, how=How(arguments=RunArguments(data=("/data/a b.txt",), steps=500)))
    golden(f"emit-{made.script}", made.texts[made.script])


@pytest.mark.parametrize("on", ["torchrun", "slurm"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data", [(), HOSTILE])
def test_bash_and_shellcheck_accept_it(on, shape, data, plan, tmp_path):
    script = written(shape(plan), tmp_path / "out", on, data=data)
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
    script = written(on_one_host(plan), tmp_path / "out", data=HOSTILE)
    words = words_of(script, tools)
    shown = "\n".join(words[words.index("--output=run") + 1 :])
    assert shown == "\n".join(f"--data={Path(name).absolute()}" for name in HOSTILE)
    assert not list(tmp_path.rglob("owned"))


def test_a_tokenizer_of_the_hub_keeps_its_name(tmp_path, monkeypatch):
    """A local folder of the same name has precedence, as in transformers; our own trainer accepts only files."""
    monkeypatch.chdir(tmp_path)

    def tokenizer_of(to, name):
        how = How(arguments=RunArguments(tokenizer=Path(name)))
        job = load_job(model="llama3-8b", cluster="dgx-h100", nodes=1, global_batch_size=64, engine=to)
        layout = parse_layout(f"tp=2,dp=4,zero={2 if to == 'torchtitan' else 1}", num_layers=32, num_devices=8)
        return "\n".join(bundle_of(plan_for_layout(job, layout), how=how, force_unfit=True).texts.values())

    for to in ("megatron", "torchtitan"):
        text = tokenizer_of(to, "meta-llama/Meta-Llama-3-8B")
        assert "meta-llama/Meta-Llama-3-8B" in text
        assert str(tmp_path) not in text
        assert f"{tmp_path}/a/b/c" in tokenizer_of(to, "a/b/c")
        assert f"{tmp_path}/./a" in tokenizer_of(to, "./a") or f"{tmp_path}/a" in tokenizer_of(to, "./a")
    assert f"{tmp_path}/meta-llama/x" in tokenizer_of("torch", "meta-llama/x")
    (tmp_path / "own" / "words").mkdir(parents=True)
    assert f"{tmp_path}/own/words" in tokenizer_of("megatron", "own/words")


def test_each_host_gets_its_number_and_its_ranks(plan, tmp_path, tools):
    script = written(with_a_smaller_last_host(plan), tmp_path / "out")
    for number, ranks in (("0", 8), ("1", 4)):
        words = words_of(script, tools, number, "10.0.0.1", "29400")
        assert {f"--nproc-per-node={ranks}", f"--node-rank={number}", "--master-addr=10.0.0.1"} <= set(words)
    refused = subprocess.run(["bash", script, "0"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_script_does_not_grow_with_its_hosts(plan, tmp_path, tools, monkeypatch):
    (host,) = ranks_of_hosts(on_one_host(plan))
    ranks = [8] * 3 + [4] * 100_000 + [8, 2]
    monkeypatch.setattr(torchrun, "ranks_of_hosts", lambda _: tuple(replace(host, num_ranks=each) for each in ranks))
    script = tmp_path / "run.sh"
    script.write_text(bundle_of(plan, how=How()).texts["run.sh"])
    assert len(script.read_text()) < 2000
    for number in (0, 2, 3, 100_002, 100_003, 100_004):
        assert f"--nproc-per-node={ranks[number]}" in words_of(script, tools, str(number), "10.0.0.1")


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
    written(plan, folder, "slurm")
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


@pytest.mark.parametrize(
    ("gpus", "segment", "line"),
    [(256, 16, ["#SBATCH --segment=16"]), (288, 18, ["#SBATCH --segment=18"]), (256, 18, []), (64, 0, [])],
)
def test_a_slurm_job_asks_for_the_plans_hosts_of_each_rack(gpus, segment, line, tmp_path):
    """Slurm refuses a segment that does not divide the hosts, and fills whole racks if no segment is given."""
    job = load_job(model="llama3-8b", cluster="gb200-nvl72", gpus=gpus, global_batch_size=2 * gpus)
    layout = parse_layout(f"dp={gpus},zero=1", num_layers=32, num_devices=gpus)
    written(plan_for_layout(job, replace(layout, segment=segment)), tmp_path / "out", "slurm")
    lines = (tmp_path / "out" / "job.sbatch").read_text().splitlines()
    assert [each for each in lines if "segment" in each and each.startswith("#SBATCH")] == line
    assert f"#SBATCH --nodes={gpus // 4}" in lines


@pytest.mark.parametrize(("gpus", "segment", "size"), [(256, 16, "16"), (288, 18, "18"), (256, 18, ""), (64, 0, "")])
def test_other_starters_place_a_plans_segments_or_refuse_them(gpus, segment, size):
    """Kueue's words are of its documentation: a slice is a number of pods that one topology domain must hold."""
    job = load_job(model="llama3-8b", cluster="gb200-nvl72", gpus=gpus, global_batch_size=2 * gpus)
    layout = parse_layout(f"dp={gpus},zero=1", num_layers=32, num_devices=gpus)
    plan = plan_for_layout(job, replace(layout, segment=segment))
    spec = yaml.safe_load(bundle_of(plan, on="kubeflow", how=How()).texts["trainjob.yaml"])["spec"]
    if not size:
        assert "runtimePatches" not in spec
        bundle_of(plan, on="skypilot", how=How())
        return
    (patch,) = spec["runtimePatches"]
    (job_of_hosts,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job_of_hosts["name"] == "node"
    assert job_of_hosts["template"]["spec"]["template"]["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-slice-required-topology": "nvidia.com/gpu.clique",
        "kueue.x-k8s.io/podset-slice-size": size,
    }
    with pytest.raises(InputError, match=f"segment={size}"):
        bundle_of(plan, on="skypilot", how=How())


def test_a_slurm_job_on_pools_numbers_its_hosts_in_the_order_of_the_ranks(plan, tmp_path, tools):
    """The job has one part for each pool, with its own list of hosts; each host starts with its number among all."""
    folder, mixed = tmp_path / "out", on_two_pools(plan)
    program(tools, "scontrol", 'case $3 in fast*) echo fast7;; slow*) printf "slow1\\nslow2\\n";; esac')
    program(tools, "srun", 'shift 2; for SLURMD_NODENAME in slow2 fast7 slow1; do export SLURMD_NODENAME; "$@"; done')
    program(tools, "planner", 'echo "$SLURMD_NODENAME ${*: -1} $MASTER_ADDR" >> "$TOLD"')
    written(mixed, folder, "slurm")
    environment = {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "fast7", "SLURM_JOB_NODELIST_HET_GROUP_1": "slow[1-2]",
        "TOLD": str(tmp_path / "told"),
    }  # fmt: skip
    subprocess.run(["bash", folder / "job.sbatch"], env=environment, cwd="/", check=True)
    told = sorted((tmp_path / "told").read_text().splitlines())
    assert told == ["fast7 --node-rank=0 fast7", "slow1 --node-rank=1 fast7", "slow2 --node-rank=2 fast7"]
    lines = (folder / "job.sbatch").read_text().splitlines()
    asked = [[int(line.split("=")[1]) for line in lines if line.startswith(f"#SBATCH --{key}=")] for key in _ASKED]
    assert asked == [[1, 2], [8, 8]]


_ASKED = ("nodes", "gpus-per-node")


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
        written(plan, tmp_path / "file" / "below")


def test_a_hostile_model_name_is_no_plan(plan_file, capsys):
    """The name is in an #SBATCH line, where nothing can be quoted."""
    document = json.loads(plan_file.read_text())
    document["model"]["name"] = "a\n#SBATCH --wrap=x"
    plan_file.write_text(json.dumps(document))
    assert main(["emit", str(plan_file), "--to", "slurm"]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().out == ""


def test_hostile_text_reaches_a_script_as_it_is(plan, tmp_path, tools, hostile_text):
    if {"\x00", "\ud800"} & set(hostile_text):
        pytest.skip("no path of a file has it")
    script = written(on_one_host(plan), tmp_path / "out", data=(f"x/{hostile_text}",))
    words = words_of(script, tools)
    shown = "".join(words[words.index("--output=run") + 1 :])
    assert shown == "".join(f"--data={Path(f'x/{hostile_text}').absolute()}".splitlines())
    assert not list(tmp_path.rglob("*owned*"))


@pytest.mark.parametrize("target", ["torchrun", "slurm", "torch"])
def test_hostile_names_in_a_plan_reach_no_script(target, plan_file, capsys, hostile_text):
    for part in ("model", "cluster"):
        document = json.loads(plan_file.read_text())
        document[part]["name"] = hostile_text
        changed = plan_file.with_name("changed.json")
        changed.write_text(json.dumps(document))
        assert main(["emit", str(changed), "--to", target]) == ExitCode.BAD_INPUT
        assert capsys.readouterr().out == ""


def test_a_plan_of_another_engine_is_refused_with_a_way_out(plan):
    for changes, way_out in (({"emits": ("of-no-table", "torch")}, ""), ({"emits": ()}, "another --engine")):
        other = replace(plan, engine=plan.engine.model_copy(update=changes))
        if not way_out:
            assert target_of(other, None).name == "torch"
            continue
        with pytest.raises(InputError, match="nothing can be emitted for engine") as error:
            target_of(other, None)
        assert way_out in error.value.mistakes[0].hint


def test_the_way_out_of_another_program_is_what_is_emitted_without_a_name(plan):
    both = replace(plan, engine=plan.engine.model_copy(update={"emits": ("torch", "torchtitan")}))
    with pytest.raises(InputError, match="is another program") as error:
        target_of(both, "deepspeed")
    assert f"--to {target_of(both, None).name}`" in error.value.mistakes[0].hint


def test_two_settings_that_disagree_about_a_key_are_a_bug_of_the_table(plan):
    settings = tuple(Setting(says=(), write=lambda _, value=value: {"key": value}) for value in (1, 1, 2))
    target = replace(PROGRAMS["torch"], refuse=(), settings=settings[:2])
    assert values_of(target, plan) == {"key": 1}
    with pytest.raises(AssertionError, match="two settings write key"):
        values_of(replace(target, settings=settings), plan)


def test_a_plan_that_does_not_fit_is_written_by_force_only(plan):
    stage = replace(plan.memory[0], device_chance=0.01, limit_bytes=1.0, most_bytes=1.0)
    large = replace(plan, memory=(stage, *plan.memory[1:]))
    with pytest.raises(NothingFitsError, match="does not fit"):
        bundle_of(large, how=How())
    assert bundle_of(large, how=How(), force_unfit=True).texts
