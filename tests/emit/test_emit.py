"""`planner emit`: scripts that bash and shellcheck accept, and that do what they say when they run."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli import main
from planner.emit import torchrun
from planner.emit.bundle import TARGETS, write_bundle
from planner.emit.megatron import megatron_script
from planner.emit.torchrun import check_engine
from planner.errors import EnvironmentProblem, ExitCode, InputError
from planner.layout import parse_layout
from planner.reading import read_plan
from planner.run_arguments import RunArguments
from planner.search.search import plan_for_layout
from planner.specs.load import load_job

HOSTILE = ("a b.txt", "$(touch owned)", "`touch owned`", "a\nb; touch owned", "'; touch owned; '", "--data")
NOTHING = RunArguments()


def on_one_host(plan):
    return replace(plan, layout=replace(plan.layout, tp=2, dp=1))


def with_a_smaller_last_host(plan):
    return replace(plan, layout=replace(plan.layout, tp=1, dp=3))


def on_two_pools(plan):  # noqa: ARG001 - as the others
    """One host of h100 and then two of a100, eight ranks each."""
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
    arguments = NOTHING if target == "megatron" else RunArguments(data=("/data/a b.txt",), steps=500)
    golden(f"emit-{TARGETS[target][0]}", TARGETS[target][1](plan, arguments=arguments))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data", [(), HOSTILE])
def test_bash_and_shellcheck_accept_it(target, shape, data, plan, tmp_path):
    if target == "megatron" and (data or shape is with_a_smaller_last_host):
        pytest.skip("Megatron-LM has data of its own and whole hosts")
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


def test_a_script_does_not_grow_with_its_hosts(plan, tmp_path, tools, monkeypatch):
    (host,) = torchrun.ranks_of_hosts(on_one_host(plan))
    ranks = [8] * 3 + [4] * 100_000 + [8, 2]
    monkeypatch.setattr(torchrun, "ranks_of_hosts", lambda _: tuple(replace(host, num_ranks=each) for each in ranks))
    script = tmp_path / "run.sh"
    script.write_text(torchrun.torchrun_script(plan, arguments=NOTHING))
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


@pytest.mark.parametrize(
    ("gpus", "segment", "line"),
    [(256, 16, ["#SBATCH --segment=16"]), (288, 18, ["#SBATCH --segment=18"]), (256, 18, []), (64, 0, [])],
)
def test_a_slurm_job_asks_for_the_plans_hosts_of_each_rack(gpus, segment, line, tmp_path):
    """Slurm refuses a segment that does not divide the hosts; racks that are packed full are its own way."""
    job = load_job(model="llama3-8b", cluster="gb200-nvl72", gpus=gpus, global_batch_size=2 * gpus)
    layout = parse_layout(f"dp={gpus},zero=1", num_layers=32, num_devices=gpus)
    write_bundle(plan_for_layout(job, replace(layout, segment=segment)), "slurm", tmp_path / "out", arguments=NOTHING)
    lines = (tmp_path / "out" / "job.sbatch").read_text().splitlines()
    assert [each for each in lines if "segment" in each and each.startswith("#SBATCH")] == line
    assert f"#SBATCH --nodes={gpus // 4}" in lines


def test_a_slurm_job_on_pools_numbers_its_hosts_in_the_order_of_the_ranks(plan, tmp_path, tools):
    """A part for each pool, whose hosts Slurm lists apart; each host starts with its place among all."""
    folder, mixed = tmp_path / "out", on_two_pools(plan)
    program(tools, "scontrol", 'case $3 in fast*) echo fast7;; slow*) printf "slow1\\nslow2\\n";; esac')
    program(tools, "srun", 'shift 2; for SLURMD_NODENAME in slow2 fast7 slow1; do export SLURMD_NODENAME; "$@"; done')
    program(tools, "planner", 'echo "$SLURMD_NODENAME ${*: -1} $MASTER_ADDR" >> "$TOLD"')
    write_bundle(mixed, "slurm", folder, arguments=NOTHING)
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
        write_bundle(plan, "slurm", tmp_path / "file" / "below", arguments=NOTHING)


def test_a_hostile_model_name_is_no_plan(plan_file, capsys):
    """The name stands in an #SBATCH line, where nothing can be quoted."""
    document = json.loads(plan_file.read_text())
    document["model"]["name"] = "a\n#SBATCH --wrap=x"
    plan_file.write_text(json.dumps(document))
    assert main(["emit", str(plan_file), "--to", "slurm"]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().out == ""


def test_hostile_text_reaches_a_script_as_it_is(plan, tmp_path, tools, hostile_text):
    if {"\x00", "\ud800"} & set(hostile_text):
        pytest.skip("no path of a file has it")
    _, script = write_bundle(
        on_one_host(plan), "torchrun", tmp_path / "out", arguments=RunArguments(data=(f"x/{hostile_text}",))
    )
    words = words_of(script, tools)
    shown = "".join(words[words.index("--output=run") + 1 :])
    assert shown == "".join(f"--data={Path(f'x/{hostile_text}').absolute()}".splitlines())
    assert not list(tmp_path.rglob("*owned*"))


@pytest.mark.parametrize("target", ["torchrun", "slurm", "megatron"])
def test_hostile_names_in_a_plan_reach_no_script(target, plan_file, capsys, hostile_text):
    for part in ("model", "cluster"):
        document = json.loads(plan_file.read_text())
        document[part]["name"] = hostile_text
        changed = plan_file.with_name("changed.json")
        changed.write_text(json.dumps(document))
        assert main(["emit", str(changed), "--to", target]) == ExitCode.BAD_INPUT
        assert capsys.readouterr().out == ""


def test_a_plan_of_another_engine_is_refused_with_a_way_out(plan):
    for name, way_out in (("megatron", "--to megatron"), ("deepspeed", "tp=8,")):
        other = plan.engine.model_copy(update={"name": name})
        with pytest.raises(InputError, match=f"made for {name}") as error:
            check_engine(replace(plan, engine=other))
        assert way_out in error.value.mistakes[0].hint


# --- Megatron-LM -------------------------------------------------------------------------------------------------


def megatron_options() -> argparse.ArgumentParser:
    """Names and types as in megatron/training/arguments.py (core_v0.16.1), of what a plan decides."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "tensor-model-parallel-size", "pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank",
        "context-parallel-size", "expert-model-parallel-size", "expert-tensor-parallel-size", "micro-batch-size",
        "global-batch-size", "seq-length", "recompute-num-layers", "num-distributed-optimizer-instances",
        "mtp-num-layers",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--recompute-granularity", choices=["full", "selective"])
    parser.add_argument("--recompute-method", choices=["uniform", "block"])
    parser.add_argument("--recompute-modules", nargs="+")
    parser.add_argument("--fp8-format", choices=["e4m3", "hybrid"])
    parser.add_argument("--pipeline-model-parallel-layout")
    for name in (
        "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather",
        "fp8-param-gather",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("bf16", "fp16"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--moe-token-dispatcher-type", choices=["allgather", "alltoall", "flex"], default="allgather")
    for name in ("attention-dropout", "hidden-dropout"):
        parser.add_argument(f"--{name}", type=float, default=0.1)
    return parser


def layers_of(letters: str) -> list[int]:
    """Layers of each chunk of a Megatron-LM pipeline layout such as `Et*3|t*4|t*3mL`."""
    return [int(re.sub("[EmLt*]", "", chunk)) for chunk in letters.split("|")]


MEGATRON = [
    ("gpt3-175b", 64, "tp=8,pp=8,interleave=4,zero=1,recompute=full"),
    ("llama3-8b", 2, "tp=2,pp=4,cp=2,layers_per_stage=7/2*9/7"),
    ("deepseek-v3", 32, "pp=16,ep=8,zero=1,layers_per_stage=13*4/3*3"),
    ("mixtral-8x7b", 4, "tp=2,pp=2,ep=4,etp=2,zero=1,hsdp=2,mbs=2"),
    ("llama3-8b", 1, "tp=1,zero=0,recompute=selective"),
    ("deepseek-v3", 32, "pp=16,ep=8,zero=1,layers_per_stage=13*4/3*3,recompute=mla_up_proj+moe_act"),
    ("llama3-8b", 1, "tp=1,zero=0,recompute=mlp"),
    ("gpt3-175b", 64, "tp=8,pp=8,interleave=4,zero=1,recompute=full:2"),
]


def recompute_of(found: argparse.Namespace) -> str:
    """The policy, as Megatron-LM understands its options (transformer_config.py, checkpointed_forward)."""
    if found.recompute_granularity == "selective":
        return "+".join(sorted(found.recompute_modules)) if found.recompute_modules else "selective"
    if found.recompute_granularity is None:
        return "none"
    assert found.recompute_modules is None
    block = found.recompute_method == "block"
    assert block or found.recompute_num_layers == 1
    return f"full:{found.recompute_num_layers}" if block else "full"


@pytest.mark.parametrize(("model", "nodes", "layout"), MEGATRON)
def test_megatron_reads_the_layout_back(model, nodes, layout, tmp_path, tools):
    size = {"global_batch_size": 256, "sequence_length": 2048}
    job = load_job(model=model, cluster="dgx-h100", nodes=nodes, engine="megatron", **size)
    wanted = parse_layout(layout, num_layers=job.model.num_layers, num_devices=8 * nodes)
    made = plan_for_layout(job, wanted)
    _, script = write_bundle(made, "megatron", tmp_path / "out", arguments=NOTHING)
    words = words_of(script, tools, "0", "10.0.0.1", "29400", "--data-path", "a b")
    program = words.index("pretrain_gpt.py")
    assert words[:program] == [
        f"--nnodes={nodes}", "--nproc-per-node=8", "--node-rank=0", "--master-addr=10.0.0.1", "--master-port=29400",
    ]  # fmt: skip
    found, rest = megatron_options().parse_known_args(words[program + 1 :])
    assert rest == ["--data-path", "a b"]
    assert found.tensor_model_parallel_size == wanted.tp
    assert found.sequence_parallel == (wanted.sp == 1)
    assert found.context_parallel_size == wanted.cp
    assert (found.expert_model_parallel_size or 1) == wanted.ep
    assert (found.expert_tensor_parallel_size or 1) == wanted.etp
    assert found.moe_token_dispatcher_type == ("alltoall" if wanted.ep > 1 else "allgather")
    assert found.attention_dropout == found.hidden_dropout == 0
    assert found.use_distributed_optimizer == (wanted.zero == 1)
    assert (found.num_distributed_optimizer_instances or 1) == wanted.hsdp
    assert (found.micro_batch_size, found.global_batch_size, found.seq_length) == (wanted.mbs, 256, 2048)
    assert {recompute_of(found)} == set(wanted.recompute)
    assert found.bf16
    # the stages, as Megatron-LM derives them
    stages = found.pipeline_model_parallel_size
    if found.pipeline_model_parallel_layout:
        layers = layers_of(found.pipeline_model_parallel_layout)
        assert found.num_virtual_stages_per_pipeline_rank is None
    else:
        chunks = stages * (found.num_virtual_stages_per_pipeline_rank or 1)
        layers = [job.model.num_layers // chunks] * chunks
    assert stages == wanted.pp
    assert tuple(layers) == wanted.layers_per_stage
    assert (found.mtp_num_layers or 0) == job.model.mtp_layers
    assert (found.pipeline_model_parallel_layout or "").count("m") == (job.model.mtp_layers if stages > 1 else 0)


@pytest.mark.parametrize(("zero", "given"), [(0, False), (1, True)])
def test_megatron_keeps_weights_in_8_bits_where_it_can(zero, given):
    """Priced so, and in all of Megatron-LM's own scripts for fp8; it needs the distributed optimizer."""
    job = load_job(model="llama3-8b", cluster="dgx-h100", global_batch_size=8, engine="megatron", precision="fp8")
    layout = parse_layout(f"tp=4,dp=2,zero={zero}", num_layers=32, num_devices=8)
    script = megatron_script(plan_for_layout(job, layout), arguments=NOTHING)
    assert ("--fp8-param-gather" in script) == given


@pytest.mark.parametrize(
    ("layout", "words"),
    [("pp=2,recompute=full/none", "--pin recompute=full"), ("pp=3,dp=5,layers_per_stage=10/2*11", "--gpus 16")],
)
def test_what_megatron_has_no_options_for_is_refused(layout, words):
    job = load_job(model="llama3-8b", cluster="dgx-h100", nodes=2, global_batch_size=240, engine="megatron")
    wanted = parse_layout(layout, num_layers=32, num_devices=16)
    made = plan_for_layout(job, replace(wanted, recompute=("full",) * wanted.num_chunks))
    with pytest.raises(InputError) as error:
        megatron_script(replace(made, layout=wanted), arguments=NOTHING)
    assert words in error.value.mistakes[0].hint


def test_megatron_offloads_what_the_layout_says():
    job = load_job(model="llama3-8b", cluster="dgx-h100", global_batch_size=64, engine="megatron")
    layout = parse_layout("tp=8,zero=1,offload=both", num_layers=32, num_devices=8)
    script = megatron_script(plan_for_layout(job, layout), arguments=NOTHING)
    assert "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer" in script
    assert "--cpu-offloading-num-layers 31" in script


@pytest.mark.parametrize(
    ("model", "setting", "options"),
    [
        ("mixtral-8x7b", "expert_overlap=true", "--overlap-moe-expert-parallel-comm"),
        ("mixtral-8x7b", "cuda_graphs=layers", "--cuda-graph-modules attn moe_router moe_preprocess"),
        ("deepseek-v2-lite", "cuda_graphs=layers", "--cuda-graph-modules attn moe_router moe_preprocess mlp"),
        ("llama3-8b", "cuda_graphs=layers", "--cuda-graph-modules attn mlp"),
        ("llama3-8b", "cuda_graphs=step", "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"),
    ],
)  # fmt: skip
def test_megatron_is_told_what_runs_at_once(model, setting, options):
    """transformer_config.py, cuda_graph_modules; arguments.py: a graph of the whole step checks no loss for NaN."""
    settings = (f"training.{setting}",)
    job = load_job(
        model=model, cluster="dgx-h100", nodes=1, global_batch_size=64, sequence_length=2048, engine="megatron",
        settings=settings,
    )  # fmt: skip
    text = "ep=8,zero=1" if job.model.moe else "zero=1"
    made = plan_for_layout(job, parse_layout(text, num_layers=job.model.num_layers, num_devices=8))
    script = megatron_script(made, arguments=NOTHING)
    assert f"{options} \\\n" in script
    assert f"CUDA_DEVICE_MAX_CONNECTIONS={32 if 'overlap' in setting else 1} " in script


AWARE = "--use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("settings", "layout", "words"),
    [
        (("memory_recipe=zero-16",), "zero=1", "  --grad-reduce-in-bf16 "),
        (("memory_recipe=precision-aware-fp32",), "zero=1", f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "),
        (("memory_recipe=fp8-moments",), "zero=1", f"{AWARE} --main-grads-dtype bf16 --exp-avg-dtype fp8 "),
        (("optimizer=muon",), "zero=1", "--optimizer muon "),
        (("precision=fp16",), "zero=1", "--accumulate-allreduce-grads-in-fp32 "),
        (("precision=fp16", "memory_recipe=zero-16"), "zero=1", ""),
        (("attention=unfused", "dropout=0.1"), "zero=1", "--attention-backend unfused "),
        (("memory_recipe=precision-aware",), "zero=0", None),
        (("memory_recipe=textbook-20",), "zero=1", None),
    ],
)
def test_megatron_keeps_what_was_priced(settings, layout, words):
    """arguments.py: bf16 sums in fp32 unless --grad-reduce-in-bf16; the other optimizer states need ZeRO."""
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", nodes=1, global_batch_size=64, sequence_length=2048, engine="megatron",
        settings=[f"training.{each}" for each in settings],
    )  # fmt: skip
    made = plan_for_layout(job, parse_layout(layout, num_layers=32, num_devices=8))
    if words is None:
        with pytest.raises(InputError, match=r"training\.memory_recipe is"):
            megatron_script(made, arguments=NOTHING)
        return
    script = megatron_script(made, arguments=NOTHING)
    assert words in script
    assert f"--attention-dropout {job.training.dropout:g} --hidden-dropout {job.training.dropout:g} " in script
    assert ("grad-reduce-in-bf16" in script) == (words == "  --grad-reduce-in-bf16 ")


def test_adapters_are_priced_for_megatron_and_not_emitted():
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", nodes=1, global_batch_size=64, sequence_length=2048, engine="megatron",
        precision="fp8", settings=("training.lora_rank=16",),
    )  # fmt: skip
    made = plan_for_layout(job, parse_layout("zero=1", num_layers=32, num_devices=8))
    with pytest.raises(InputError, match=r"training\.lora_rank is 16") as error:
        megatron_script(made, arguments=NOTHING)
    assert "--engine megatron-bridge" in error.value.mistakes[0].hint


def test_the_trainers_options_are_not_megatrons(plan):
    with pytest.raises(InputError, match="--steps=5"):
        megatron_script(plan, arguments=RunArguments(steps=5))
