"""YAML of Primus and of Megatron-Bridge is read into the layouts that it states; files of other programs are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from planner.cli import main
from planner.emit.read.front import read_foreign
from planner.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

PRIMUS = """\
work_group: ${TEAM:amd}
exp_name: mine
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${NAME:qwen3_30B_A3B}.yaml
    overrides:
      wandb_project: "mine"
      train_iters: 50
      micro_batch_size: 2
      global_batch_size: 256
      seq_length: ${LENGTH:4096}
      max_position_embeddings: 4096
      lr: 1.0e-5
      lr_decay_iters: null
      tensor_model_parallel_size: ${TP:2}
      pipeline_model_parallel_size: 4
      num_layers_per_virtual_pipeline_stage: 6
      expert_model_parallel_size: 8
      expert_tensor_parallel_size: 1
      enable_primus_turbo: true
      turbo_sync_free_moe_stage: 2
      recompute_granularity: full
      recompute_method: block
      recompute_num_layers: 4
"""
BRIDGE = """\
model:
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  context_parallel_size: 2
  recompute_granularity: null
  seq_length: 4096
  sequence_parallel: true
  expert_model_parallel_size: 4
  expert_tensor_parallel_size: 1
train:
  train_iters: 100
  global_batch_size: 256
  micro_batch_size: 1
ddp:
  grad_reduce_in_fp32: true
optimizer:
  lr: 0.0003
"""


def read(tmp_path: Path, text: str, **options: Any) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_foreign(path, num_devices=64, per_host=8, **options)


def test_an_experiment_of_primus_has_the_layout_that_it_states(tmp_path: Path) -> None:
    found = read(tmp_path, PRIMUS)
    assert (found.program, found.engine, found.model.name) == ("an experiment of Primus", "megatron", "qwen3-30b-a3b")
    wanted = {"tp": "2", "pp": "4", "ep": "8", "etp": "1", "interleave": "2", "mbs": "2", "zero": "1", "sp": "1"}
    assert wanted.items() <= dict(found.layout).items()
    assert found.layout["recompute"] == "full:4"
    assert {"training.global_batch_size=256", "training.sequence_length=4096"} <= {*found.settings}
    assert [each.key for each in found.assumed] == ["zero"]  # Primus' own file says it, and not the experiment


def test_what_primus_leaves_to_its_own_file_is_megatrons_only_where_the_experiment_says_so(tmp_path: Path) -> None:
    plain = read(tmp_path, f"{PRIMUS}      use_distributed_optimizer: false\n      sequence_parallel: 0\n")
    assert {"zero": "0", "sp": "0"}.items() <= dict(plain.layout).items()
    sharded = read(tmp_path, PRIMUS.replace("pipeline_model_parallel_size: 4", "use_torch_fsdp2: true")
                   .replace("      num_layers_per_virtual_pipeline_stage: 6\n", ""))  # fmt: skip
    assert (sharded.engine, sharded.layout["zero"]) == ("megatron-fsdp", "3")


@pytest.mark.parametrize("key", ["recompute_layer_ids: [0, 1]", "decoder_pipeline_manual_split_list: [1, 2, 3, 4]"])
def test_a_key_of_primus_that_decides_and_has_no_price_leaves_no_verdict(tmp_path: Path, key: str) -> None:
    found = read(tmp_path, f"{PRIMUS}      {key}\n")
    assert [each.key for each in found.assumed if each.kind == "open"] == [key.partition(":")[0]]


def test_an_invented_degree_stops_the_reading(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layout may depend on this key"):
        read(tmp_path, f"{PRIMUS}      tensor_slice_parallel_size: 4\n")


def test_another_framework_of_primus_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not maxtext"):
        read(tmp_path, PRIMUS.replace("framework: megatron", "framework: maxtext"))


def test_overrides_of_a_recipe_in_yaml_are_those_of_a_command(tmp_path: Path) -> None:
    found = read(tmp_path, BRIDGE, model="qwen3-30b-a3b")
    assert found.engine == "megatron-bridge"
    wanted = {"tp": "4", "pp": "2", "cp": "2", "ep": "4", "etp": "1", "mbs": "1", "sp": "1"}
    assert wanted.items() <= dict(found.layout).items()
    assert [each.key for each in found.assumed if each.kind == "open"] == [
        "recompute"
    ]  # null is the recipe's own value
    without = read(tmp_path, BRIDGE.replace("  expert_model_parallel_size: 4\n", ""), model="qwen3-30b-a3b")
    assert {each.key for each in without.assumed if each.kind == "open"} == {"ep", "recompute"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GPT-NeoX", '{\n  "pipe_parallel_size": 4,\n  "model_parallel_size": 2\n}\n'),
        ("GPT-NeoX", "pipe-parallel-size: 4\nzero_optimization:\n  stage: 1\n"),
        ("torchtune", "model:\n  _component_: torchtune.models.llama3.llama3_8b\nbatch_size: 2\n"),
        ("litgpt", "checkpoint_dir: checkpoints/x\ntrain:\n  global_batch_size: 8\n"),
        ("nanotron", "parallelism:\n  dp: 2\ntokens:\n  batch_accumulation_per_replica: 1\n"),
        ("LLaMA-Factory over Megatron-Core", "model_name_or_path: a/b\nstage: sft\ntensor_model_parallel_size: 2\n"),
    ],
)
def test_a_program_that_is_not_read_is_named_with_what_says_the_run(
    tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert main(["explain", "--from", str(path), "dgx-h100", "--gpus", "8"]) == 2
    said = capsys.readouterr().err
    assert f"a file of {name}, which is not read" in said
    assert "--layout tp=..,pp=.." in said or "megatron sft" in said


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("peft: none\n      peft_dim: 16", ""),
        ("peft_dim: 16\n      peft: none", ""),
        ("peft_dim: 16\n      peft: lora", "training.lora_rank=16"),
        ("precision_config: fp8_mixed", "'fp8_mixed' has no price here"),
    ],
)
def test_adapters_over_megatron_bridge_are_those_that_are_on(own: str, words: str, tmp_path: Path) -> None:
    part = "    framework: megatron_bridge\n    config: sft_trainer.yaml\n    model: llama3_8b.yaml\n    overrides:\n"
    keys = "tensor_model_parallel_size: 2\n      global_batch_size: 32\n      micro_batch_size: 1"
    path = tmp_path / "run.yaml"
    path.write_text(f"modules:\n  post_trainer:\n{part}      {keys}\n      seq_length: 4096\n      {own}\n")
    if "price" in words:
        with pytest.raises(InputError, match=words):
            read_foreign(path, num_devices=8)
    else:
        found = [each for each in read_foreign(path, num_devices=8).settings if "lora_rank" in each]
        assert found == ([words] if words else [])
