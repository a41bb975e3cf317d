"""A folder of a run: what `planner emit` wrote is read back as it was planned, and presets of TRL are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.emit.read.front import read_foreign
from planner.errors import InputError

JOB = ("llama3-8b", "dgx-h100", "--nodes", "1", "--seq-len", "4096", "--global-batch", "64")
LAYOUTS = {
    "fsdp": "dp=8,zero=3,mbs=2,recompute=full",
    "deepspeed": "dp=8,zero=2,mbs=2,recompute=full",
    "megatron": "tp=2,pp=2,dp=2,zero=1,mbs=2,recompute=none",
    "megatron-bridge": "tp=2,pp=2,dp=2,zero=1,mbs=2,recompute=none",
    "torchtitan": "dp=8,zero=3,mbs=2,recompute=full",
}
KEYS = ("tp", "pp", "dp", "cp", "ep", "zero", "mbs", "recompute", "layers_per_stage", "sp")
TRL = """\
model_name_or_path: Qwen/Qwen2.5-7B
dataset_name: a/b
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_length: 4096
packing: true
gradient_checkpointing: true
"""


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("engine", LAYOUTS)
def test_an_emitted_folder_is_read_as_it_was_planned(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = answer(capsys, "explain", *JOB, "--engine", engine, "--layout", LAYOUTS[engine])
    (tmp_path / "plan.json").write_text(json.dumps(planned))
    assert main(["emit", str(tmp_path / "plan.json"), "-o", str(tmp_path / "run"), "--force"]) == 0
    capsys.readouterr()
    read = answer(capsys, "explain", "--from", str(tmp_path / "run"), "dgx-h100", "--nodes", "1")
    assert {key: read["layout"][key] for key in KEYS} == {key: planned["layout"][key] for key in KEYS}
    assert read["training"]["global_batch_size"] == 64
    assert read["step_seconds"] == pytest.approx(planned["step_seconds"], rel=0.02)


def test_a_folder_with_a_plan_alone_or_with_several_scripts_says_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": 3, "layout": {}}')
    with pytest.raises(InputError) as refused:
        read_foreign(tmp_path)
    assert "planner explain" in refused.value.mistakes[0].hint
    for name in ("a.sh", "b.sh"):
        (tmp_path / name).write_text("torchrun pretrain_gpt.py --num-layers 2 --micro-batch-size 1\n")
    with pytest.raises(InputError, match=r"several scripts: .*a\.sh, .*b\.sh"):
        read_foreign(tmp_path)


@pytest.mark.parametrize(
    ("preset", "engine", "zero"),
    [("zero3", "deepspeed", "3"), ("zero1", "deepspeed", "1"), ("fsdp1", "fsdp", "3"), ("fsdp2", "fsdp", "3")],
)
def test_a_command_of_trl_names_its_sharding(tmp_path: Path, preset: str, engine: str, zero: str) -> None:
    (tmp_path / "sft.yaml").write_text(TRL)
    script = tmp_path / "run.sh"
    script.write_text(f"trl sft --config sft.yaml --num_processes 4 --accelerate_config {preset}\n")
    found = read_foreign(script, per_host=8)
    assert (found.engine, found.layout["zero"], found.num_devices) == (engine, zero, 4)
    assert "training.global_batch_size=64" in found.settings  # 2 sequences x 8 microbatches x 4 devices
    (tmp_path / "whole.yaml").write_text(f"{TRL}accelerate_config: {preset}\n")
    whole = read_foreign(tmp_path / "whole.yaml", per_host=8)
    assert (whole.engine, whole.num_devices) == (engine, 8)  # the preset's own number


def test_a_command_of_trl_for_preferences_is_an_objective(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text(TRL)
    (tmp_path / "run.sh").write_text("trl dpo --config dpo.yaml --accelerate_config zero3\n")
    found = read_foreign(tmp_path / "run.sh", per_host=8)
    assert "training.objective=dpo" in found.settings
    assert found.layout["zero"] == "3"


def test_a_folder_is_read_by_its_script_whatever_else_lies_in_it(tmp_path: Path) -> None:
    options = "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --max_length 2048 --bf16 True"
    (tmp_path / "run.sh").write_text(f"deepspeed --num_gpus 8 train.py {options} --deepspeed z3.json\n")
    (tmp_path / "train.py").write_text('"""accelerate launch train.py --model_name_or_path X"""\n')
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "z2.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    (tmp_path / "tokenizer.json").write_text(json.dumps({"vocab": ["word"] * 200_000}))
    (tmp_path / "config.json").write_text("{}")  # of DeepSpeed or of anything, and no model
    found = read_foreign(tmp_path, num_devices=8, per_host=8)
    assert (found.model.name, found.layout["zero"], found.layout["offload"]) == ("qwen2.5-7b", "3", "none")
    (tmp_path / "run.sh").unlink()
    with pytest.raises(InputError, match=r"several files of one kind: .*z2\.json, .*z3\.json"):
        read_foreign(tmp_path, num_devices=8, per_host=8)


def test_a_folder_of_a_program_that_is_not_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text("model:\n  _component_: torchtune.models.llama3.llama3_8b\n")
    with pytest.raises(InputError, match="a file of torchtune, which is not read"):
        read_foreign(tmp_path)


def test_a_model_that_is_cut_at_load_is_read_for_fsdp(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    (tmp_path / "sft.yaml").write_text(f"{TRL}distributed_config:\n  tp_size: 2\n  fsdp_size: 4\n")
    found = read_foreign([tmp_path / "accelerate.yaml", tmp_path / "sft.yaml"], per_host=8)
    assert (found.engine, found.layout["tp"], found.layout["zero"]) == ("fsdp", "2", "3")
