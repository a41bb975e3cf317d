"""Plans from files of LLaMA-Factory and Axolotl are written in these programs' keys, and read back as the plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from planner.api import plan_job
from planner.cli import main
from planner.emit.bundle import bundle_of
from planner.emit.read.front import read_foreign
from planner.emit.target import How
from planner.errors import ExitCode, InputError
from planner.plan_file import plan_from_file

FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
do_train: true
finetuning_type: full
deepspeed: zero3.json
dataset: ours
template: qwen
cutoff_len: 8192
packing: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
output_dir: out
"""
AXOLOTL = """
base_model: Qwen/Qwen2.5-7B
datasets: [{path: ours, type: completion}]
sequence_len: 4096
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
learning_rate: 0.0002
lr_scheduler: cosine
num_epochs: 1
bf16: true
adapter: ADAPTER
lora_r: 16
lora_target_linear: true
gradient_checkpointing: true
sdp_attention: true
fsdp_version: 2
fsdp_config: {reshard_after_forward: true}
"""
LORA_FACTORY = FACTORY.replace("finetuning_type: full", "finetuning_type: lora\nquantization_bit: 4")
PLAIN_AXOLOTL = AXOLOTL.partition("adapter")[0] + "deepspeed: zero3.json\ngradient_checkpointing: true\n"
FILES = {
    "factory": FACTORY, "factory-lora": LORA_FACTORY, "axolotl": AXOLOTL.replace("ADAPTER", "lora"),
    "axolotl-4-bit": AXOLOTL.replace("ADAPTER", "qlora"), "axolotl-deepspeed": PLAIN_AXOLOTL,
}  # fmt: skip
NAMES = {"factory": "llama_factory.yaml", "axolotl": "axolotl.yaml"}


def planned(text: str, folder: Path, *further: str) -> Path:
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}))
    (folder / "train.yaml").write_text(text)
    words = ["plan", "--from", str(folder / "train.yaml"), "dgx-h100", "--nodes", "1", "-o", str(folder / "plan.json")]
    assert main([*words, *further]) == 0
    return folder / "plan.json"


def emitted(name: str, folder: Path) -> Path:
    plan = planned(FILES[name], folder)
    assert main(["emit", str(plan), "-o", str(folder / "run")]) == 0
    return folder / "run" / NAMES[name.partition("-")[0]]


def test_llama_factory_gets_its_own_keys(tmp_path):
    path = emitted("factory", tmp_path)
    plan = plan_from_file(tmp_path / "plan.json")
    steps = 32 // (8 * plan.layout.mbs)
    recomputes = {"none": {"disable_gradient_checkpointing": True}, "full": {}}[plan.layout.recompute[0]]
    assert yaml.safe_load(path.read_text()) == {
        "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "DATASET", "template": "TEMPLATE",
        "output_dir": "run", "per_device_train_batch_size": plan.layout.mbs, "gradient_accumulation_steps": steps,
        "cutoff_len": 8192, "packing": True, "bf16": True, "fp16": False, "optim": "adamw_torch_fused",
        "learning_rate": 1e-5, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "num_train_epochs": 2.0,
        "weight_decay": 0.0, "max_grad_norm": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
        "seed": 42, "model_name_or_path": "Qwen/Qwen2.5-7B", "flash_attn": "sdpa", "enable_liger_kernel": False,
        "deepspeed": "deepspeed.json", **recomputes,
    }  # fmt: skip
    assert {each.name for each in path.parent.iterdir()} == {path.name, "deepspeed.json", "plan.json", "run.sh"}
    assert "-m llamafactory.launcher llama_factory.yaml" in (path.parent / "run.sh").read_text()


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_reads_back_as_the_plan(name, tmp_path):
    path = emitted(name, tmp_path)
    plan = plan_from_file(tmp_path / "plan.json")
    found = read_foreign(path, num_devices=8, per_host=8)
    assert found.engine == plan.engine.name
    for key in ("mbs", "zero", "hsdp", "tp", "cp", "offload"):
        assert found.layout.get(key, str(getattr(plan.layout, key))) == str(getattr(plan.layout, key)), key
    assert found.layout["recompute"] == plan.layout.recompute[0]
    said = dict(each.removeprefix("training.").partition("=")[::2] for each in found.settings)
    assert said["weights"] == "Qwen/Qwen2.5-7B"
    for key in ("sequence_length", "global_batch_size", "learning_rate", "warmup_ratio", "weight_decay", "epochs"):
        assert float(said.get(key, 0)) == pytest.approx(float(getattr(plan.training, key) or 0)), key
    for key in ("precision", "optimizer", "schedule", "frozen_weights"):
        assert said.get(key, getattr(plan.training, key)) == getattr(plan.training, key), key
    assert int(said.get("lora_rank", 0)) == plan.training.lora_rank


def test_plans_from_these_files_are_made_for_their_programs(tmp_path):
    plan = plan_from_file(planned(FILES["axolotl"], tmp_path))
    assert plan.engine.emits == ("axolotl-accelerate", "accelerate")
    assert plan.layout.recompute in (("none",), ("full",))
    with pytest.raises(InputError, match="data are files of your own"):
        bundle_of(plan, how=How(smoke=True), force_unfit=True)
    words = ["emit", str(tmp_path / "plan.json"), "--to", "accelerate", "--smoke", "-o", str(tmp_path / "run")]
    assert main(words) == 0
    plain = plan_job("llama3-8b", "dgx-h100", engine="fsdp", gpus=8, global_batch=8, seq_len=1024)
    with pytest.raises(InputError, match="axolotl-accelerate is another program") as error:
        bundle_of(plain, "axolotl-accelerate", how=How())
    assert "or plan from the program's own file: `planner plan --from FILE`" in error.value.mistakes[0].hint


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("factory", "--set training.optimizer=sgd", "training.optimizer is sgd"),
        ("axolotl", "--pin tp=2,sp=0 --set training.lora_rank=0", "layout.tp is 2"),
        ("axolotl", "--model olmoe-7b-a1b --pin ep=2 --set training.lora_rank=0", "layout.ep is 2"),
        ("axolotl", "--pin cp=2,zero=3", "layout.cp is 2"),
        ("axolotl-deepspeed", "--pin cp=2,zero=3", "layout.cp is 2"),
        (
            "factory", "--set training.memory_recipe=pure-bf16 --pin zero=3",
            "training.memory_recipe is pure-bf16, layout.zero is 3",
        ),
    ],
)  # fmt: skip
def test_a_plan_without_own_keys_is_written_for_the_program_below(name, words, why, tmp_path, capsys):
    """Whatever `planner plan --from` recommends, the `planner emit` that it names writes it, and says for what."""
    plan = planned(FILES[name], tmp_path, *words.split())
    own, below = plan_from_file(plan).engine.emits
    assert main(["emit", str(plan), "-o", str(tmp_path / "run"), "--force-unfit"]) == 0
    said = capsys.readouterr().err
    assert f"{own} does not run this plan: {why}, and" in said
    assert f"these are files of {below}" in said
    written = {each.name for each in (tmp_path / "run").iterdir()}
    assert "train.py" in written
    assert not written & {*NAMES.values()}
    words = ["emit", str(plan), "--to", own, "-o", str(tmp_path / "own"), "--force-unfit"]
    assert main(words) == ExitCode.BAD_INPUT
    assert why in capsys.readouterr().err


def test_frozen_weights_in_16_bits_are_not_adapters_in_16_bits(tmp_path):
    """LLaMA-Factory loads frozen weights in bf16 by itself, and refuses pure_bf16 beside ZeRO-3."""
    for name in ("factory-lora", "axolotl"):
        written = yaml.safe_load(emitted(name, tmp_path).read_text())
        assert written["bf16"] is True
        assert "pure_bf16" not in written
        (tmp_path / "plan.json").unlink()
        shutil.rmtree(tmp_path / "run")


def test_weights_in_16_bits_are_written_as_llama_factory_says_them(tmp_path):
    pure = FACTORY.replace("deepspeed: zero3.json\n", "").replace("bf16: true", "pure_bf16: true")
    plan = plan_from_file(planned(pure, tmp_path))
    assert plan.training.memory_recipe == "pure-bf16"
    assert main(["emit", str(tmp_path / "plan.json"), "-o", str(tmp_path / "run"), "--force-unfit"]) == 0
    written = yaml.safe_load((tmp_path / "run" / "llama_factory.yaml").read_text())
    assert (written["pure_bf16"], written["bf16"]) == (True, True)  # transformers compares bf16 with deepspeed.json
    found = read_foreign(tmp_path / "run" / "llama_factory.yaml", num_devices=8, per_host=8)
    assert "training.memory_recipe=pure-bf16" in found.settings
