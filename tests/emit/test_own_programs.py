"""Scripts that start a program of their own: what its text says beyond the options, and what only it can say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from planner.api import estimate_file
from planner.emit.read.front import read_foreign
from planner.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --bf16 True"
RUN = f"torchrun --nproc_per_node 8 train.py {OPTIONS} --model_max_length 2048 --deepspeed zero.json\n"
PLAIN = """from transformers import AutoModelForCausalLM, Trainer

def main():
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    # model = get_peft_model(model, settings)
    if args.use_lora:
        model = get_peft_model(model, settings)
    Trainer(model=model).train()
"""
OWN = {
    "adapters": "    model = get_peft_model(model, LoraConfig(r=8))",
    "frozen": "    for each in model.lower.parameters():\n        each.requires_grad = False",
    "second_model": "    teacher_model = AutoModelForCausalLM.from_pretrained(args.teacher)",
    "trainer": "class Mine(Trainer):\n    def compute_loss(self, model, inputs):\n        return 0",
    "model": "from own.blocks import BlocksForCausalLM",
    "library": "import jax.numpy as jnp",
    "loop": "    accelerator.backward(model(**batch).loss)",
}
"""What a program does beyond its options, and lines that do it."""


def folder(tmp_path: Path, program: str, script: str = RUN, name: str = "train.py") -> Path:
    """The script of a folder, whose program lies beside it."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(program)
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "run.sh").write_text(script)
    return tmp_path / "run.sh"


def open_keys(path: Path) -> set[str]:
    return {each.key for each in read_foreign(path, num_devices=8).assumed if each.kind == "open"}


def test_a_program_that_does_what_its_options_say_opens_nothing(tmp_path) -> None:
    """Branches that an option chooses are not taken, and comments do nothing."""
    path = folder(tmp_path, PLAIN)
    assert open_keys(path) == set()
    assert estimate_file(path, "dgx-h100").verdict == "fits"


@pytest.mark.parametrize("does", OWN)
def test_what_the_program_does_beyond_its_options_leaves_the_verdict_open(does, tmp_path) -> None:
    path = folder(tmp_path, f"{PLAIN}\n{OWN[does]}\n")
    assert open_keys(path) == {f"program.{does}"}
    plan = estimate_file(path, "dgx-h100")
    assert (plan.verdict, plan.layout.zero, plan.layout.mbs) == ("unknown", 2, 2)
    assert estimate_file(path, "dgx-h100", ignore=(f"program.{does}",)).verdict == "fits"


def test_a_program_is_found_by_its_module_above_the_script_and_in_the_working_folder(tmp_path, monkeypatch) -> None:
    text = f"{PLAIN}\n{OWN['loop']}\n"
    module = RUN.replace("train.py", "-m own.train")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert open_keys(folder(tmp_path / "a", text, module, "own/train.py")) == {"program.loop"}
    path = folder(tmp_path / "b", text)
    (path.parent / "scripts").mkdir()
    (path.parent / "scripts" / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert open_keys(path.rename(path.parent / "scripts" / "run.sh")) == {"program.loop"}
    path = folder(tmp_path / "c", text)
    assert open_keys(path) == {"program.loop"}
    (path.parent / "train.py").rename(tmp_path / "here" / "train.py")
    assert open_keys(path) == {"program.loop"}
    (tmp_path / "here" / "train.py").unlink()
    assert open_keys(path) == set()  # as before: a program that is not here says nothing


def test_the_text_of_a_program_is_not_shown(tmp_path) -> None:
    """Only what a pattern matches is: a script can name any file."""
    path = folder(tmp_path, "password = 's3cret'\nimport jax\n\x00")
    assert "s3cret" not in " ".join(map(str, read_foreign(path, num_devices=8).assumed))


def test_a_length_that_no_file_says_is_the_programs_own(written) -> None:
    text = f"torchrun --nproc_per_node 8 own/train.py {OPTIONS}\n"
    assert open_keys(written(text)) == {"launch.length"}
    assert estimate_file(written(text), "dgx-h100").verdict == "unknown"
    plan = estimate_file(written(text), "dgx-h100", seq_len=1024)
    assert (plan.training.sequence_length, plan.verdict == "unknown") == (1024, False)


FACTORY = f"llamafactory-cli train --stage sft --finetuning_type full {OPTIONS}"


@pytest.mark.parametrize(
    "text",
    [
        f"accelerate launch --multi_gpu --num_processes 8 own/train.py {OPTIONS} --block_size 1024",
        f"trl sft {OPTIONS} --num_processes 8",  # 1,024 tokens: trl f2cd5771, trainer/sft_config.py
        FACTORY,  # 2,048: LLaMA-Factory 00577a85, hparams/data_args.py
    ],
)
def test_a_length_that_options_say_or_the_program_has_is_no_doubt(text, written) -> None:
    assert "launch.length" not in open_keys(written(text))


@pytest.mark.parametrize("key", ["method", "CL_method"])
def test_a_method_of_the_scripts_own_leaves_the_verdict_open(key, written) -> None:
    text = f"torchrun --nproc_per_node 8 own/train.py {OPTIONS} --max_length 1024 --{key} blocks\n"
    assert open_keys(written(text)) == {key}


def test_examples_in_jax_are_refused_by_name(written) -> None:
    with pytest.raises(InputError, match="transformers' examples for JAX, which is not read"):
        read_foreign(written(f"python3 run_clm_flax.py {OPTIONS} --block_size 512\n"), num_devices=8)


SWIFT = (
    "--model Qwen/Qwen2.5-7B --train_type lora --lora_rank 16 --per_device_train_batch_size 2 --deepspeed zero2 "
    "--max_length 2048 --gradient_accumulation_steps 4"
)


@pytest.mark.parametrize(
    "start",
    [
        "NPROC_PER_NODE=4 swift sft",
        'SWIFT_BIN="$(command -v swift)"\nNPROC_PER_NODE=4 "${SWIFT_BIN}" sft',
        "torchrun --nproc_per_node 4 $(python -c 'import swift; print(swift.__path__[0])')/cli/sft.py",
    ],
)
def test_ms_swift_is_known_by_its_options_wherever_its_program_lies(start, written) -> None:
    """Its own defaults: recomputation, and adapters on all linear layers."""
    plan = estimate_file(written(f"{start} {SWIFT}\n"), "dgx-h100")
    assert (plan.layout.dp, plan.layout.zero, plan.layout.recompute[0]) == (4, 2, "full")
    assert (plan.training.lora_rank, plan.training.global_batch_size) == (16, 32)


VERL = "model.partial_pretrain=Qwen/Qwen2.5-7B data.train_batch_size=64 data.micro_batch_size_per_gpu=4"


def test_verls_fine_tuning_is_known_by_its_path(written) -> None:
    path = written(f"torchrun --nproc_per_node 8 /opt/verl/verl/trainer/fsdp_sft_trainer.py {VERL}\n")
    plan = estimate_file(path, "dgx-h100")
    assert (plan.layout.zero, plan.layout.mbs, plan.training.global_batch_size) == (3, 4, 64)


def test_verl_offloads_weights_only_with_its_switch_of_offload(written) -> None:
    """Source: verl b178a3cd, trainer/fsdp_sft_trainer.py: without `cpu_offload` no policy is made."""
    start = (
        f"torchrun --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer {VERL} model.enable_gradient_checkpointing=True"
    )
    assert open_keys(written(f"{start} model.fsdp_config.offload_params=True\n")) == set()
    both = "model.fsdp_config.cpu_offload=True model.fsdp_config.offload_params=True"
    assert open_keys(written(f"{start} {both}\n")) == {"model.fsdp_config.cpu_offload"}
