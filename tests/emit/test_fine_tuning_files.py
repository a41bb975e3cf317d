"""Files of OpenRLHF's supervised fine-tuning and of LLaMA-Factory v1; methods without a price are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from planner.emit.read.front import read_foreign
from planner.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """\
set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --max_len 4096 \\
   --dataset a/b \\
   --input_key question \\
   --train_batch_size 64 \\
   --micro_train_batch_size 2 \\
   --pretrain meta-llama/Meta-Llama-3-8B \\
   --save_path ./out \\
   --zero_stage 3 \\
   --bf16 \\
   --flash_attn \\
   --learning_rate 5e-6 \\
   --packing_samples \\
   --gradient_checkpointing
EOF
deepspeed --module $training_commands
"""
DOTTED = """\
deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --model.model_name_or_path meta-llama/Meta-Llama-3-8B \\
  --data.dataset a/b --data.input_key prompt --data.max_len 4096 --train.batch_size 64 --train.micro_batch_size 2 \\
  --train.max_epochs 1 --adam.lr 5e-6 --ds.zero_stage 3 --ds.param_dtype bf16 --model.gradient_checkpointing_enable \\
  --ds.attn_implementation flash_attention_2 --ds.packing_samples
"""


V1 = """\
model: Qwen/Qwen2.5-7B
model_class: llm
kernel_config:
  name: auto
dist_config:
  name: fsdp2
  dcp_path: null
train_dataset: data/x.yaml
output_dir: outputs/x
micro_batch_size: 2
global_batch_size: 64
cutoff_len: 4096
max_steps: 10
"""


def read(tmp_path: Path, text: str, name: str = "run.sh") -> Any:
    path = tmp_path / name
    path.write_text(text)
    return read_foreign(path, num_devices=8, per_host=8)


@pytest.mark.parametrize("text", [SCRIPT, DOTTED], ids=["options", "options since 2026"])
def test_a_fine_tuning_has_the_layout_and_the_batch_that_it_states(tmp_path: Path, text: str) -> None:
    found = read(tmp_path, text)
    assert (found.program, found.engine, found.model.name) == ("a command line of OpenRLHF", "deepspeed", "llama3-8b")
    assert {"mbs": "2", "zero": "3", "recompute": "full", "tp": "1", "cp": "1"}.items() <= dict(found.layout).items()
    stated = {"training.global_batch_size=64", "training.sequence_length=4096", "training.precision=bf16"}
    assert stated <= {*found.settings}
    assert not [each for each in found.assumed if each.kind == "open"]


def test_what_a_command_leaves_out_is_the_programs_default(tmp_path: Path) -> None:
    short = "deepspeed --module openrlhf.cli.train_sft --pretrain meta-llama/Meta-Llama-3-8B --bf16\n"
    found = read(tmp_path, short)
    assert {"mbs": "8", "zero": "2", "recompute": "none"}.items() <= dict(found.layout).items()
    assert {"training.global_batch_size=128", "training.sequence_length=2048"} <= {*found.settings}


def test_the_type_of_the_weights_is_read(tmp_path: Path) -> None:
    assert "training.precision=fp16" in read(tmp_path, SCRIPT.replace("--bf16", "--param_dtype fp16")).settings
    with pytest.raises(InputError, match="has no price here"):
        read(tmp_path, SCRIPT.replace("--bf16", "--param_dtype int8"))


def test_a_switch_with_a_value_is_read_as_a_shell_writes_it(tmp_path: Path) -> None:
    found = read(tmp_path, SCRIPT.replace("--bf16", "--bf16 --adam_offload true --flash_attn true"))
    assert found.layout["offload"] == "optimizer"
    without = read(tmp_path, SCRIPT.replace("--bf16", "--bf16 --adam_offload false"))
    assert without.layout.get("offload", "none") == "none"


def test_an_empty_key_of_llama_factory_is_its_default(tmp_path: Path) -> None:
    text = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nfinetuning_type: full\ncutoff_len: 2048\nbf16: true\n"
    empty = f"{text}disable_gradient_checkpointing:\nflash_attn:\n"
    plain, found = read(tmp_path, text, "plain.yaml"), read(tmp_path, empty, "empty.yaml")
    assert found.layout["recompute"] == "full"
    assert (dict(found.layout), found.settings) == (dict(plain.layout), plain.settings)


AXOLOTL = "base_model: meta-llama/Meta-Llama-3-8B\nmicro_batch_size: 1\nsequence_len: 2048\nlora_r: 16\n"


def test_all_linear_layers_of_axolotl_are_more_than_its_list(tmp_path: Path) -> None:
    """Both keys stand in examples of Axolotl; the order in the file says nothing."""
    both = ["lora_target_linear: true\n", "lora_target_modules: [q_proj, v_proj]\n"]
    for lines in (both, both[::-1]):
        found = read(tmp_path, f"{AXOLOTL}adapter: lora\n{''.join(lines)}", "run.yaml")
        alone = read(tmp_path, f"{AXOLOTL}adapter: lora\n{both[0]}", "run.yaml")
        assert found.settings == alone.settings
    assert read(tmp_path, f"{AXOLOTL}adapter: lora\n{both[1]}", "run.yaml").settings != alone.settings


def test_only_adapters_with_a_price_are_read_from_axolotl(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'ia3' has no price here") as caught:
        read(tmp_path, f"{AXOLOTL}adapter: ia3\n", "run.yaml")
    assert caught.value.mistakes[0].hint == "known: lora, qlora"
    assert "training.lora_rank=16" not in read(tmp_path, f"{AXOLOTL}adapter:\n", "run.yaml").settings
    with pytest.raises(InputError, match="adapters need a rank"):
        read(tmp_path, AXOLOTL.replace("lora_r: 16\n", "") + "adapter: lora\n", "run.yaml")


def test_a_part_of_llama_factory_v1_is_keys_and_values(tmp_path: Path) -> None:
    plain = "model: Qwen/Qwen2.5-7B\nmodel_class: llm\ncutoff_len: 2048\n"
    for part in ("dist_config: fsdp2", "peft_config: lora", "quant_config: bnb"):
        with pytest.raises(InputError, match="expected keys and values"):
            read(tmp_path, f"{plain}{part}\n", "run.yaml")
    unused = read(tmp_path, f"{plain}dist_config:\n  name: fsdp2\n  config_file: none.json\n", "run.yaml")
    assert unused.engine == "fsdp"


def test_adapters_and_offload_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, SCRIPT.replace("--bf16", "--bf16 --lora_rank 16 --lora_alpha 32 --adam_offload"))
    assert "training.lora_rank=16" in found.settings
    assert found.layout["offload"] == "none"  # the states of adapters are small wherever they are
    without = read(tmp_path, SCRIPT.replace("--bf16", "--bf16 --lora_rank 0 --lora_alpha 32 --adam_offload"))
    assert not [each for each in without.settings if "lora" in each]
    assert without.layout["offload"] != "none"


@pytest.mark.parametrize(("method", "objective"), [("dpo", "dpo"), ("rm", "reward")])
def test_preferences_and_rewards_of_openrlhf_are_objectives(tmp_path: Path, method: str, objective: str) -> None:
    found = read(tmp_path, SCRIPT.replace("train_sft", f"train_{method}"))
    assert f"training.objective={objective}" in found.settings
    assert found.layout == read(tmp_path, SCRIPT).layout


def test_an_invented_degree_stops_the_reading(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layout may depend on this key"):
        read(tmp_path, SCRIPT.replace("--bf16", "--bf16 --head_parallel_size 2"))


def test_a_file_of_llama_factory_v1_has_the_layout_that_it_states(tmp_path: Path) -> None:
    found = read(tmp_path, V1, "sft.yaml")
    assert (found.program, found.engine, found.model.name) == ("a LLaMA-Factory file of v1", "fsdp", "qwen2.5-7b")
    assert {"mbs": "2", "zero": "3", "cp": "1", "recompute": "full"}.items() <= dict(found.layout).items()
    stated = {"training.global_batch_size=64", "training.sequence_length=4096", "training.precision=bf16"}
    assert stated <= {*found.settings}
    parts = read(tmp_path, f"{V1}cp_size: 2\nenable_activation_checkpointing: false\n", "sft.yaml")
    assert {"cp": "2", "recompute": "none"}.items() <= dict(parts.layout).items()


def test_plugins_of_llama_factory_v1_are_adapters_bits_and_sharding(tmp_path: Path) -> None:
    adapters = "peft_config:\n  name: lora\n  r: 16\n  target_modules: all\n"
    plugins = f"{adapters}quant_config:\n  name: bnb\n  quantization_bit: 4\n"
    found = read(tmp_path, V1 + plugins, "sft.yaml")
    assert {"training.lora_rank=16", "training.frozen_weights=nf4"} <= {*found.settings}
    (tmp_path / "z2.json").write_text('{"zero_optimization": {"stage": 2}}')
    sharded = V1.replace("name: fsdp2\n  dcp_path: null", "name: deepspeed\n  config_file: z2.json")
    found = read(tmp_path, sharded, "sft.yaml")
    assert (found.engine, found.layout["zero"]) == ("deepspeed", "2")
    inside = V1.replace("dcp_path: null", "cp_size: 2\n  offload_params: true")
    found = read(tmp_path, inside, "sft.yaml")
    assert found.layout["cp"] == "2"
    assert found.layout["offload"] != "none"
    eight = f"{V1}{adapters}quant_config:\n  name: bnb\n  quantization_bit: 8\n"
    for text in (V1.replace("fsdp2", "fsdpturbo"), f"{V1}peft_config:\n  name: freeze\n", eight):
        with pytest.raises(InputError, match=r"ha(s|ve) no price here"):
            read(tmp_path, text, "sft.yaml")
