"""Files of forks: options, programs and methods that no release of a program has."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from planner.api import estimate_file
from planner.emit.names import names_beside
from planner.emit.read import facts
from planner.emit.read.front import read_foreign, shipped_model
from planner.emit.read.options import option_words
from planner.errors import InputError

_NAMES = names_beside(facts.__file__)
_SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 999 --seq-length 64"
MEGATRON = f"torchrun --nproc-per-node 8 pretrain_gpt.py {_SIZES} --micro-batch-size 1 --global-batch-size 8 --bf16"
FACTORY = """
model_name_or_path: Qwen/Qwen2.5-1.5B
stage: sft
finetuning_type: full
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
_LENGTH = "--max_length 1024 --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --num_train_epochs 1"
SWIFT = f"NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-1.5B --train_type full --deepspeed zero2 {_LENGTH}"
OPENRLHF = """
deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --max_len 2048 --train_batch_size 64 --zero_stage 2 --bf16 \\
  --micro_train_batch_size 1 --pretrain Qwen/Qwen2.5-1.5B
"""
FACTORY_COMMAND = "torchrun --nproc_per_node 8 src/train.py " + " ".join(
    f"--{line.replace(': ', ' ')}" for line in FACTORY.strip().splitlines()
)
VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B \\
  data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=4 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
"""
STRICT = {
    "Megatron-LM": (MEGATRON, "train.sh", "--{} {}"),
    "LLaMA-Factory": (FACTORY, "train.yaml", "{}: {}"),
    "LLaMA-Factory's command": (FACTORY_COMMAND, "train.sh", "--{} {}"),
    "ms-swift": (SWIFT, "train.sh", "--{} {}"),
    "OpenRLHF": (OPENRLHF, "train.sh", "--{} {}"),
}


def open_keys(path, **more) -> set[str]:
    return {each.key for each in read_foreign(path, num_devices=8, **more).assumed if each.kind == "open"}


@pytest.mark.parametrize("value", ["3", "true", "half"])
@pytest.mark.parametrize("program", STRICT)
def test_an_option_of_no_release_leaves_the_verdict_open_and_is_named(program, value, written):
    text, name, spelled = STRICT[program]
    assert open_keys(written(text, name)) == set()
    path = written(
        f"{text.rstrip()} {'' if ':' not in spelled else chr(10)}{spelled.format('memory_slots', value)}\n", name
    )
    assert open_keys(path) == {"memory_slots"}
    assert estimate_file(path, "dgx-h100", gpus=8).verdict == "unknown"
    assert open_keys(path, ignore=("memory_slots",)) == set()


@pytest.mark.parametrize("key", ["wandb_tag", "log_every", "custom_data_path", "output_dir", "eval_rounds"])
@pytest.mark.parametrize("program", STRICT)
def test_an_option_of_a_fork_whose_name_says_that_it_costs_nothing_opens_nothing(program, key, written):
    text, name, spelled = STRICT[program]
    path = written(f"{text.rstrip()} {'' if ':' not in spelled else chr(10)}{spelled.format(key, 'x')}\n", name)
    assert open_keys(path) == set()


def test_a_misspelt_option_is_corrected_rather_than_a_forks(written):
    found = read_foreign(written(MEGATRON + " --micro-batch-sizes 2\n"), num_devices=8)
    assert [(each.key, each.kind) for each in found.assumed if "micro" in each.key] == [
        ("micro_batch_sizes", "misspelt")
    ]


def test_every_option_of_the_programs_own_parsers_is_known():
    """The oracles are Megatron-LM's parser, whose options a document has, and the class of the installed Trainer."""
    parsed = json.loads((Path(__file__).parent / "megatron_defaults.json").read_text())
    own = {name.removeprefix("--").replace("-", "_") for name in parsed}
    own_trainers = {each.name for each in fields(TrainingArguments) if not each.name.startswith("_")}
    for group, names in (("megatron", own), ("trainer", own_trainers)):
        accepted = {*_NAMES["options"][group].split(), *_NAMES["wrappers"].split()}
        assert not {name for name in names - accepted if not facts.re.search(_NAMES["harmless"], name)}


@pytest.mark.parametrize(
    "option",
    [
        "--fp32-residual-connection",
        "--checkpoint-in-cpu",
        "--use-layer-wise-distributed-optimizer",
        "--num-microbatches-with-partial-activation-checkpoints 3",
        "--freeze-all-layers",
        "--export-kd-teacher-load there",
        "--num-layers-teacher 12",
        "--mtp-use-repeated-layer",
        "--moe-latent-size 512",
        "--mhc-num-residual-streams 4",
        "--dsa-indexer-topk 2048",
        "--expert-interval 2",
        "--vision-backbone-type vit",
    ],
)
def test_an_option_of_megatron_that_changes_the_price_and_is_not_read_leaves_the_verdict_open(option, written):
    """Meanings: Megatron-LM d98e8a64, training/arguments.py; Megatron-DeepSpeed, megatron/arguments.py."""
    key = option.split()[0].removeprefix("--").replace("-", "_")
    assert key in _NAMES["options"]["megatron"].split()
    assert open_keys(written(f"{MEGATRON} {option}\n")) == {key}


@pytest.mark.parametrize("module", ["verl.trainer.main_mix_ppo", "own.trainer.pair_main_ppo"])
def test_a_module_that_is_not_verls_leaves_the_verdict_open(module, written):
    assert "launch.script" not in open_keys(written(VERL))
    assert "launch.script" in open_keys(written(VERL.replace("verl.trainer.main_ppo", module)))


@pytest.mark.parametrize("method", ["dpo_ppi", "rm_pairs", "sft_twice"])
def test_a_method_that_begins_as_a_known_one_is_refused(method, written):
    with pytest.raises(InputError, match="has no price here"):
        read_foreign(written(OPENRLHF.replace("train_sft", f"train_{method}")), num_devices=8)


@pytest.mark.parametrize(
    "words",
    [
        "run --config_file=zero{1,2,3}.yaml --x 1",
        "run a{b,c}d --y",
        "run '{\"a\": 1,2}' --z",
        "run {a} --v",
    ],
)
def test_braces_are_the_words_that_bash_makes_of_them(words):
    told = subprocess.run(["bash", "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True, check=True)
    assert option_words(words) == told.stdout.splitlines()


def test_the_file_that_braces_name_last_is_read(written):
    text = f"accelerate launch --config_file=examples/accelerate_configs/deepspeed_zero{{1,2,3}}.yaml sft.py {_LENGTH}"
    found = read_foreign(written(f"{text} --model_name_or_path Qwen/Qwen2.5-1.5B\n"), num_devices=8)
    assert found.layout["zero"] == "3"


def test_olmoe_by_its_name_on_the_hub():
    assert (
        shipped_model("allenai/OLMoE-1B-7B-0924")
        == shipped_model("allenai/OLMoE-1B-7B-0924-Instruct")
        == "olmoe-7b-a1b"
    )
