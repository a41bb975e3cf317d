"""Runs that several files describe: which files are opened, what they say together, and what is asked for."""

from __future__ import annotations

import json
import os
from itertools import permutations
from pathlib import Path

import pytest

from planner.api import estimate_file, plan_file
from planner.cli import main
from planner.emit.read.front import read_foreign
from planner.errors import ExitCode, InputError

TUNE = """\
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
finetuning_type: full
deepspeed: {}
template: qwen
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
ON_HOST = '"offload_optimizer": {"device": "cpu", "pin_memory": true}'
STAGE_2 = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, ' + ON_HOST + "}}"
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_offload_params: false
mixed_precision: bf16
num_machines: 4
num_processes: 32
"""
SFT = """\
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
torch_dtype: bfloat16
bf16: true
gradient_accumulation_steps: 4
gradient_checkpointing: true
learning_rate: 4.0e-05
max_length: 8192
per_device_train_batch_size: 1
output_dir: out
"""
RUN = "accelerate launch --config_file=fsdp.yaml --num_machines 4 src/sft.py --config sft.yaml --learning_rate=1e-5\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder of the run, which is not the working folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "run"


def write(folder: Path, **texts: str) -> dict[str, Path]:
    paths = {name: folder / name.replace("_", ".") for name in texts}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[name])
    return paths


def layout(found, *keys):
    return tuple(found.layout.get(key) for key in keys)


@pytest.mark.parametrize("where", ["run/zero3.json", "here/zero3.json"])
def test_a_deepspeed_file_says_what_is_in_it_and_not_what_its_name_says(where, folder):
    """The name says ZeRO-3 on the device; the file says ZeRO-2 with the optimizer on the host."""
    (folder.parent / where).write_text(STAGE_2)
    path = write(folder, tune_yaml=TUNE.format("zero3.json"))["tune_yaml"]
    found = read_foreign(path)
    assert (found.engine, *layout(found, "zero", "offload")) == ("deepspeed", "2", "optimizer")
    assert found.assumed == ()


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ("z.json", "base_model: x\nmicro_batch_size: 1\nsequence_len: 64\ndeepspeed: z.json\n"),
        ("z.json", "torchrun train.py --model_name_or_path x --deepspeed z.json --per_device_train_batch_size 1"),
        ("z.json", "swift sft --model x --train_type full --deepspeed z.json --per_device_train_batch_size 1"),
        ("z.yaml", "accelerate launch --config_file z.yaml train.py --per_device_train_batch_size 1"),
        ("z.yaml", "trl sft --model_name_or_path x --accelerate_config z.yaml"),
        ("z.toml", "torchrun -m torchtitan.train --job.config_file ./z.toml"),
    ],
)
def test_a_missing_file_is_asked_for_by_name_and_line(named, text, folder, capsys):
    path = write(folder, run_txt=text)["run_txt"]
    assert main(["explain", "--from", str(path), "--model", "tiny-gpt", "dgx-h100"]) == ExitCode.BAD_INPUT
    told = " ".join(capsys.readouterr().err.split())
    assert f"names {'./' * (named == 'z.toml')}{named}, which is neither beside the file nor here" in told
    assert f"--> {path}:{text[: text.index('z.')].count(chr(10)) + 1}" in told
    assert "one more --from gives it" in told


def test_an_accelerate_run_of_three_files_is_one_run(folder, capsys):
    paths = write(folder, run_sh=RUN, fsdp_yaml=FSDP, sft_yaml=SFT)
    plan = estimate_file(paths["run_sh"], "dgx-h100")
    assert (plan.engine.name, plan.layout.zero, plan.cluster.num_devices) == ("fsdp", 3, 32)
    assert (plan.training.global_batch_size, plan.training.sequence_length) == (32 * 4, 8192)
    assert plan.training.learning_rate == 1e-5  # the command line's own value wins
    named = [part for path in (paths["run_sh"], paths["fsdp_yaml"]) for part in ("--from", str(path))]
    assert main(["explain", *named, "dgx-h100", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["layout"]["zero"] == 3


def test_files_that_lie_elsewhere_are_given_in_any_order(folder):
    paths = [write(folder / name, **{name: text})[name] for name, text in
             (("run_sh", RUN), ("fsdp_yaml", FSDP), ("sft_yaml", SFT))]  # fmt: skip
    found = [read_foreign(each, num_devices=32) for each in permutations(paths)]
    assert all(each == found[0] for each in found)
    assert (found[0].engine, found[0].num_devices, *layout(found[0], "zero", "hsdp")) == ("fsdp", 32, "3", "1")
    for missing in paths[1:]:
        with pytest.raises(InputError, match=f"names {missing.name}, which is neither"):
            read_foreign([each for each in paths if each != missing])


def test_of_files_with_one_name_the_one_in_the_named_folder_is_meant(folder):
    run = write(folder, run_sh=RUN.replace("=fsdp.yaml", "=b/x.yaml").replace("sft.yaml", "a/x.yaml"))["run_sh"]
    for name, text in (("a", SFT), ("b", FSDP)):
        write(folder / "far" / name, x_yaml=text)
    for order in (("a", "b"), ("b", "a")):
        found = read_foreign([run, *(folder / "far" / name / "x.yaml" for name in order)])
        assert (found.engine, found.num_devices) == ("fsdp", 32)


def test_of_files_that_no_file_names_the_first_wins(folder):
    paths = write(folder, b_yaml=SFT, a_yaml=SFT.replace("8192", "4096"), fsdp_yaml=FSDP)
    found = read_foreign(list(paths.values()))
    assert "training.sequence_length=8192" in found.settings
    assert found.engine == "fsdp"


def test_files_of_two_programs_are_no_run(folder):
    paths = write(folder, run_sh="torchrun pretrain_gpt.py --num-layers 2 --micro-batch-size 1", fsdp_yaml=FSDP)
    with pytest.raises(InputError, match=r"is an Accelerate file, and .* is a command line of Megatron-LM"):
        read_foreign(list(paths.values()))


def test_a_chain_of_files_is_followed_and_a_circle_ends(folder):
    launch = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: z.json\nnum_processes: 8\n"
    paths = write(folder, run_sh=RUN, fsdp_yaml=launch, sft_yaml=SFT, z_json=STAGE_2)
    assert layout(read_foreign(paths["run_sh"]), "zero", "offload") == ("2", "optimizer")
    paths["sft_yaml"].write_text(SFT + "config: sft.yaml\n")
    with pytest.raises(InputError, match="more than 4 files name each other"):
        read_foreign(paths["run_sh"])


def test_only_small_regular_files_of_settings_are_opened_because_a_file_names_them(folder):
    path = folder / "tune.yaml"
    secret = "machine example.org password s3cret: [\n"
    (folder / "netrc").write_text(secret)
    (folder / "settings").write_text(STAGE_2)
    (folder / "bad.json").write_text(secret)
    (folder / "list.json").write_text('["s3cret"]')
    (folder / "large.json").write_text(" " * (2**20 + 1))
    os.mkfifo(folder / "pipe.json")
    (folder / "zero.json").symlink_to("/dev/zero")
    for name in (
        "netrc",
        "settings",
        "bad.json",
        "list.json",
        "large.json",
        "pipe.json",
        "zero.json",
        "/dev/zero",
        ".",
    ):
        path.write_text(TUNE.format(name))
        with pytest.raises(InputError) as error:
            read_foreign(path)
        shown = "".join(each.text() for each in error.value.mistakes)
        assert "s3cret" not in shown
        assert name in shown
    path.write_text(TUNE.format("list.json"))
    with pytest.raises(InputError, match="s3cret"):  # a file that the user names is shown
        read_foreign([path, folder / "list.json"])


@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    [
        *((f"{start}zero{stage}", stage, "none") for start in ("", "default-") for stage in (2, 3)),
        *((f"zero2{mark}offload", 2, "optimizer") for mark in "_-"),
        *((f"zero3{mark}offload", 3, "params+states") for mark in "_-"),
    ],
)
def test_names_of_ms_swifts_own_files_are_known(name, stage, offload, folder):
    """By hand from ms-swift, swift/config/*.json, and from release 2, swift/llm/ds_config/*.json."""
    run = f"NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --train_type full --deepspeed {name} --max_length 2048"
    found = read_foreign(write(folder, run_sh=f"{run} --per_device_train_batch_size 1")["run_sh"])
    assert layout(found, "zero", "offload") == (str(stage), offload)
    assert not found.assumed


@pytest.mark.parametrize(
    ("start", "options", "engine", "zero", "offload"),
    [
        ("torchrun train.py", "--fsdp 'full_shard auto_wrap' --fsdp_config f.json", "fsdp", "2", "none"),
        ("swift sft --train_type full", "--fsdp f.json", "fsdp", "2", "optimizer"),
    ],
)
def test_a_file_of_fsdp_s_settings_is_read(start, options, engine, zero, offload, folder):
    """ms-swift has the text of `--fsdp` and the settings of `--fsdp_config` in one file."""
    settings = {"fsdp_version": 2, "reshard_after_forward": False}
    text = json.dumps(settings if "fsdp_config" in options else {"fsdp": "full_shard offload", "fsdp_config": settings})
    run = (
        f"{start} --model Qwen/Qwen2.5-7B --model_name_or_path Qwen/Qwen2.5-7B {options} --max_length 2048 --bf16 true"
    )
    found = read_foreign(write(folder, run_sh=f"{run} --per_device_train_batch_size 1", f_json=text)["run_sh"])
    assert (found.engine, *layout(found, "zero", "offload")) == (engine, zero, offload)


def test_arguments_alone_do_not_say_who_shards(folder, capsys):
    path = write(folder, sft_yaml=SFT)["sft_yaml"]
    for command in ("explain", "plan"):
        assert main([command, "--from", str(path), "dgx-h100"]) == ExitCode.BAD_INPUT
        told = capsys.readouterr().err
        assert "no file says which program shards the model" in told
        assert "--from" in told
        assert "--engine" in told
    plan = estimate_file(path, "dgx-h100", engine="fsdp")
    assert (plan.layout.zero, [each.key for each in plan.assumed]) == (3, ["zero"])
    assert [each.key for each in estimate_file(path, "dgx-h100", engine="fsdp", layout="zero=2").assumed] == []


@pytest.mark.parametrize(
    ("launch", "is_known"),
    [
        ("torchrun --nproc_per_node 8 train.py", True),
        ("accelerate launch --multi_gpu --num_processes 8 train.py", True),
        ("accelerate launch --num_processes 8 train.py", False),  # its file lies in the user's home
    ],
)
def test_plain_data_parallelism_is_said_to_be_assumed(launch, is_known, folder):
    run = f"{launch} --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --max_length 2048 --bf16 true"
    path = write(folder, run_sh=run)["run_sh"]
    if not is_known:
        with pytest.raises(InputError, match="no file says which program shards"):
            read_foreign(path)
        return
    assumed = {each.key: each.value for each in estimate_file(path, "dgx-h100").assumed}
    assert assumed == {"engine": "deepspeed", "zero": "0"}


def test_a_file_that_stands_alone_among_the_words_is_that_of_the_program(folder):
    paths = write(folder, run_sh="llamafactory-cli train a/tune.yaml cutoff_len=4096\n", z_json=STAGE_2)
    write(folder / "a", tune_yaml=TUNE.format("z.json"))
    with pytest.raises(InputError, match=r"deepspeed names z\.json"):  # neither in a/ nor in the working folder
        read_foreign(paths["run_sh"])
    found = read_foreign(list(paths.values()))
    assert layout(found, "zero") == ("2",)
    assert "training.sequence_length=4096" in found.settings


TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
"""


def test_a_command_line_of_torchtitan_changes_its_file(folder):
    run = "CONFIG_FILE=${CONFIG_FILE:-./t.toml}\ntorchrun --nproc_per_node=8 --tee 3 -m torchtitan.train "
    more = "--job.config_file ${CONFIG_FILE} --parallelism.pipeline_parallel_degree 2 --training.seq-len=4096"
    paths = write(folder, run_sh=run + more, t_toml=TITAN)
    found = read_foreign(paths["run_sh"])
    assert (found.model.num_layers, found.num_devices, *layout(found, "tp", "pp")) == (32, 8, "2", "2")
    assert "training.sequence_length=4096" in found.settings
    for other in ("--module llama3 --config llama3_8b", "--job.config_file t.toml --model.flavor 70B"):
        paths["run_sh"].write_text(run + other)
        with pytest.raises(InputError, match="torchtitan's own code"):
            read_foreign(paths["run_sh"])


RECIPE = "torchrun --nproc_per_node=8 run_recipe.py --recipe qwen3_8b_pretrain_config train.global_batch_size=16"


@pytest.mark.filterwarnings("ignore:")
def test_a_layout_that_a_recipe_holds_is_asked_for(folder):
    path = write(folder, run_sh=f"{RECIPE.replace('pretrain', 'pretrain_own')} train.micro_batch_size=1")["run_sh"]
    with pytest.raises(InputError, match="the layout is that of a recipe") as error:
        estimate_file(path, "dgx-h100")
    assert (error.value.mistakes[0].where, "--layout" in error.value.mistakes[0].hint) == (str(path), True)
    assumed = {each.key for each in estimate_file(path, "dgx-h100", layout="tp=2,pp=1").assumed}
    assert {"cp", "recompute"} <= assumed
    assert not {"tp", "pp"} & assumed
    assert plan_file(path, "dgx-h100", top=1).layout.tp  # the search needs no layout of the file
