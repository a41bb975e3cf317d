"""Public files drawn by a seed: their list is whole, and what they taught is kept by settings retyped as facts.

`python tools/drawn_files.py count CLONES` reads the files themselves; none is in this repository.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from planner.api import estimate_file, plan_file
from planner.emit.read.front import read_foreign
from planner.emit.read.shell import commands_of
from planner.errors import InputError

DRAWN = Path(__file__).parent / "drawn"


def test_every_drawn_file_has_one_answer_and_comes_from_a_listed_folder() -> None:
    listed = yaml.safe_load((DRAWN / "folders.yaml").read_text())
    names = enumerate(("fifth", "sixth", "seventh", "eighth", "ninth", "tenth"), 5)
    draws, of_users = listed["draws"], {number: listed[name] for number, name in names}
    owners = [{each["repository"] for each in folders} for folders in (draws, *of_users.values())]
    assert sum(map(len, owners)) == len(set.union(*owners))  # no draw has a repository of another
    rows = yaml.safe_load((DRAWN / "answers.yaml").read_text())
    assert len(rows) > 100
    assert len({(each["repository"], each["path"]) for each in rows}) == len(rows)
    found: Counter[int] = Counter()
    for row in rows:
        (draw,) = [
            number
            for number, each in enumerate(of_users.get(row.get("draw"), draws))
            if (each["repository"], each["commit"]) == (row["repository"], row["commit"])
            and re.fullmatch(each["paths"], row["path"])
            and not re.search(each.get("without", "$^"), row["path"])
        ][:1]
        found[draw] += 1
        assert row["answer"] in ("refuse", "unknown") or isinstance(row["answer"], dict)
        assert ("because" in row) == isinstance(row["answer"], str)
    later = sum(max(each["count"] // 3, 1) for each in draws)
    third = later + sum(each["count"] > 4 for each in draws)
    rows_of = Counter(row.get("draw", 1) for row in rows)
    assert rows_of[1] == sum(each["count"] for each in draws)
    assert later >= rows_of[2] > later * 0.9  # a folder may have no more files
    assert all(third >= rows_of[number] > third * 0.9 for number in (3, 4))
    for number, folders in of_users.items():
        assert rows_of[number] == sum(each["count"] for each in folders)
    assert sum(found.values()) == sum(rows_of.values())


RUN = "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --seq-length 64 --bf16"
SIZES = "model.seq_length=2048 train.global_batch_size=64 train.micro_batch_size=1"


@pytest.mark.parametrize(
    ("loop", "tp"),
    [
        ("IFS=',' read -r TP PP <<< \"$ONE\"", "4"),
        ('for each in "${LIST[@]}"; do\nIFS=, read -r TP PP <<< "$each"', "2"),
        ('for each in "${TWO[@]}"; do\nIFS=, read -r TP PP <<< "$each"', None),
    ],
)
def test_variables_of_read_and_of_a_loop_with_one_pass_are_followed(loop, tp, written) -> None:
    text = f'ONE=${{ONE:-4,1}}\nLIST=("2,1")\nTWO=("2,1" "4,1")\n{loop}\n'
    text += f"torchrun --nproc_per_node=8 run_recipe.py --recipe llama3_8b {SIZES} "
    text += "model.tensor_model_parallel_size=$TP model.pipeline_model_parallel_size=$PP"
    if tp is None:
        with pytest.raises(InputError, match=r"tensor_model_parallel_size is \$TP, which the file does not set"):
            read_foreign(written(text), model="llama3-8b")
    else:
        assert read_foreign(written(text), model="llama3-8b").layout["tp"] == tp


def test_a_backslash_continues_no_comment_and_quotes_for_another_shell_are_expanded(written) -> None:
    text = '# before: --nope \\\nOPTIONS="--tensor-model-parallel-size 2 \\\n"\n'
    text += f'export CMD="pretrain_gpt.py {RUN} $OPTIONS"\n'
    text += "srun --jobid $SLURM_JOBID bash -c 'torchrun --nproc_per_node 8 $CMD --micro-batch-size 1' 2>&1 | tee log\n"
    assert read_foreign(written(text)).layout["tp"] == "2"


def test_an_unset_variable_stops_only_keys_that_are_priced(written) -> None:
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {RUN} --micro-batch-size 1 --lr $1 --kill-switch-path $WORK/x "
    assert read_foreign(written(text)).layout["mbs"] == "1"
    with pytest.raises(InputError, match=r"global_batch_size is \$2, which the file does not set"):
        read_foreign(written(f"{text} --global-batch-size $2"))


def test_stages_of_unequal_depth_are_refused_as_megatron_refuses_them(written) -> None:
    """Megatron-LM, training/arguments.py: the number of layers is a multiple of the number of stages."""
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {RUN} --micro-batch-size 1 --pipeline-model-parallel-size 8"
    with pytest.raises(InputError, match="do not divide into 8 chunks"):
        read_foreign(written(text))
    found = read_foreign(written(text.replace("--pipeline-model-parallel-size 8", "--pipeline-model-parallel-size 4")))
    assert found.layout["pp"] == "4"


def test_recomputing_as_many_layers_as_there_are_is_full(written) -> None:
    options = "--micro-batch-size 1 --recompute-granularity full --recompute-method block --recompute-num-layers"
    for number, policy in ((12, "full"), (80, "full"), (3, "full:3"), (0, "none")):
        text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {RUN} {options} {number}"
        assert read_foreign(written(text)).layout["recompute"] == policy


def test_ranks_of_ms_swift_may_be_a_variable(written) -> None:
    text = "n=2\nNPROC_PER_NODE=$n \\\nswift sft --model Qwen/Qwen2.5-7B --per_device_train_batch_size 1 "
    text += "--gradient_accumulation_steps $(expr 16 / $n) --max_length 2048"
    plan = estimate_file(written(text), "dgx-h100")
    assert (plan.layout.dp, plan.training.global_batch_size) == (2, 16)


TRAINER = "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --max_length 1024"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model_name_or_path: a/Llama-3-8B-AQLM-2Bit-1x16\ncutoff_len: 512\nstage: sft\n", "launch.model"),
        (f"python finetune.py {TRAINER} --use_lora", "use_lora"),
        (f"torchrun train.py {TRAINER} --lora_enable True --lora_r 128", "lora_enable"),
        (
            f"swift sft --model Qwen/Qwen2.5-7B {TRAINER[36:]} --tuner_type lora --tuner_backend unsloth",
            "tuner_backend",
        ),
        ("model_name_or_path: x/y\ncutoff_len: 512\nstage: sft\nuse_unsloth: true\n", "use_unsloth"),
        ("base_model: x/y\nmicro_batch_size: 1\nsequence_len: 512\nqat: {weight_dtype: nvfp4}\n", "qat.weight_dtype"),
        (f"deepspeed train.py {TRAINER} --tune_mm_mlp_adapter True", "tune_mm_mlp_adapter"),
        (f"swift sft --model Qwen/Qwen2.5-7B {TRAINER[36:]} --task_type seq_cls --num_labels 2", "task_type"),
        ("base_model: x/y\nmicro_batch_size: 1\nsequence_len: 512\nnvfp4_merge_aware: true\n", "nvfp4_merge_aware"),
        ("model_name_or_path: x/y\ncutoff_len: 512\nstage: sft\nmixture_of_depths: convert\n", "mixture_of_depths"),
        ("model_name_or_path: x/y\ncutoff_len: 512\nstage: sft\nuse_adam_mini: true\n", "use_adam_mini"),
        (f"deepspeed own/train.py {TRAINER} --lora_r 8 --lora_alpha 16", "lora_r"),
        (f"torchrun own/train.py {TRAINER} --use_peft True --lora_rank 8 --target_modules all", "lora_rank"),
        (f"accelerate launch own/train.py {TRAINER} --use_qlora 1 --quant_bit 4", "use_qlora"),
        (f"accelerate launch own/train.py {TRAINER} --use_customized_optim 1", "use_customized_optim"),
        (f"accelerate launch own/train.py {TRAINER} --medusa_num_heads 5", "medusa_num_heads"),
        (
            f"torchrun train.py {RUN} --micro-batch-size 1 --vision-model-type internvit --freeze-LM",
            "vision_model_type",
        ),
    ],
)
def test_methods_and_parts_without_a_price_are_refused_by_their_key(text, key, written) -> None:
    with pytest.raises(InputError, match="no price here; it needs") as error:
        read_foreign(written(text), model="qwen2.5-7b")
    assert key in str(error.value)


@pytest.mark.parametrize("key", ["lora_r", "lora_rank"])
def test_adapters_that_are_off_have_no_rank(key, written) -> None:
    found = read_foreign(written(f"deepspeed train.py {TRAINER} --use_lora False --{key} 64"))
    assert not [each for each in found.settings if "lora" in each]


def test_adapters_run_with_a_shipped_file_that_offloads_states(written) -> None:
    """Axolotl's examples name it beside adapters; DeepSpeed runs them, and their states are a few MiB."""
    text = "base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 1\nsequence_len: 512\nadapter: lora\nlora_r: 8\n"
    plan = estimate_file(written(f"{text}deepspeed: deepspeed_configs/zero2.json\n"), "dgx-h100")
    assert (plan.layout.zero, plan.layout.offload, plan.training.lora_rank) == (2, "none", 8)


def test_a_model_whose_name_has_fewer_bits_may_be_priced_as_another(written) -> None:
    path = written("model_name_or_path: a/Qwen-7B-GPTQ-Int4\ncutoff_len: 512\nstage: sft\n", "a.yaml")
    found = read_foreign(path, model="qwen2.5-7b", ignore=("launch.model",))
    assert [each.value for each in found.assumed if each.rule == "--ignore"] == ["a/Qwen-7B-GPTQ-Int4"]


def test_accelerate_without_a_launcher_starts_one_process(written) -> None:
    path = written('distributed_type: "NO"\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n', "a.yaml")
    assert read_foreign(path, model="llama3-8b").num_devices == 1


def test_a_script_of_ms_swift_is_its_command(written) -> None:
    config = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_machines: 2\nnum_processes: 8\n"
    written(config, "multi.yaml")
    text = "accelerate launch --config_file multi.yaml swift/cli/sft.py --model Qwen/Qwen2.5-7B-Instruct "
    found = read_foreign(written(f"{text} --tuner_type lora --lora_rank 8 --max_length 2048"))
    assert (found.layout["zero"], found.num_devices, found.model.name) == ("3", 8, "qwen2.5-7b")
    assert "training.lora_rank=8" in found.settings


PRIMUS = """
modules:
  {module}:
    framework: {framework}
    config: {config}
    model: llama3.1_8B.yaml
    overrides:
{overrides}"""


def primus(framework: str, config: str, **overrides: object) -> str:
    lines = "".join(f"      {key}: {value}\n" for key, value in overrides.items())
    return PRIMUS.format(module="post_trainer", framework=framework, config=config, overrides=lines)


def test_fine_tuning_of_primus_has_adapters_and_the_batch_of_its_base_file(written) -> None:
    """By hand from modules/megatron/sft_trainer.yaml: one sequence of 2,048 tokens, of 128."""
    text = primus("megatron", "sft_trainer.yaml", stage="sft", tensor_model_parallel_size=2)
    text += "      lora: {enabled: true, dim: 32, alpha: 32, target_modules: [linear_qkv]}\n"
    plan = estimate_file(written(text, "a.yaml"), "hgx-mi300x", model="llama3-8b", gpus=8)
    assert (plan.layout.tp, plan.layout.mbs, plan.training.global_batch_size) == (2, 1, 128)
    assert (plan.training.lora_rank, plan.training.lora_targets) == (32, ("query", "key", "value"))
    text = text.replace("enabled: true", "enabled: false")
    assert estimate_file(written(text, "a.yaml"), "hgx-mi300x", model="llama3-8b", gpus=8).training.lora_rank == 0


def test_primus_over_other_programs(written) -> None:
    sections = {"parallelism": "{tensor_parallel_degree: 4}", "training": "{local_batch_size: 2, seq_len: 4096}"}
    text = primus("torchtitan", "pre_trainer.yaml", **sections, activation_checkpoint="{mode: full}")
    plan = estimate_file(written(text, "a.yaml"), "hgx-mi300x", model="llama3-8b", gpus=8)
    assert (plan.layout.tp, plan.layout.zero, plan.layout.mbs, plan.layout.recompute) == (4, 3, 2, ("full",))
    options = {"tensor_model_parallel_size": 8, "peft": "lora", "peft_dim": 16, "use_distributed_optimizer": "false"}
    options |= {"pipeline_model_parallel_size": 1, "context_parallel_size": 1, "micro_batch_size": 1}
    text = primus("megatron_bridge", "sft_trainer.yaml", **options, global_batch_size=128, seq_length=2048)
    plan = estimate_file(written(text, "a.yaml"), "hgx-mi300x", model="llama3-8b", gpus=8)
    assert (plan.layout.tp, plan.layout.zero, plan.training.lora_rank) == (8, 0, 16)
    assert plan.verdict == "unknown"  # the recipe's recomputation


BASE = """
sft: {max_num_steps: 60}
policy:
  model_name: meta-llama/Llama-3.1-8B
  train_global_batch_size: 32
  train_micro_batch_size: 1
  max_total_sequence_length: 1024
  dtensor_cfg:
    enabled: true
    activation_checkpointing: false
    tensor_parallel_size: 1
    dp_replicate_size: 1
    lora_cfg: {enabled: false, dim: 8, target_modules: []}
  megatron_cfg:
    enabled: false
    activation_checkpointing: false
    recompute_granularity: full
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    pipeline_dtype: ${policy.precision}
    sequence_parallel: false
    optimizer: {use_distributed_optimizer: true}
    peft: {enabled: false, dim: 8, target_modules: []}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


@pytest.mark.parametrize(
    ("own", "layout"),
    [
        ("  dtensor_cfg: {tensor_parallel_size: 4, activation_checkpointing: true}\n", "tp=4,zero=3,recompute=full"),
        ("  dtensor_cfg: {dp_replicate_size: 2, cpu_offload: true}\n", "zero=3,hsdp=2,offload=optimizer"),
        (
            (
                "  dtensor_cfg: {enabled: false}\n  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, "
                "sequence_parallel: true, pipeline_model_parallel_size: 2}\n"
            ),
            "tp=2,pp=2,zero=1,sp=1,recompute=none",
        ),
    ],
)
def test_nemo_rl_inherits_from_the_file_that_it_names(own, layout, written) -> None:
    written(BASE, "sft.yaml")
    path = written(
        f"defaults: sft.yaml\npolicy:\n  train_micro_batch_size: 2\n{own}cluster:\n  num_nodes: 2\n", "a.yaml"
    )
    found = read_foreign(path, num_devices=16, per_host=8)
    wanted = dict(part.split("=") for part in layout.split(",")) | {"mbs": "2"}
    assert {key: found.layout.get(key) for key in wanted} == wanted
    assert (found.num_hosts, found.num_devices) == (2, 16)
    assert {"training.global_batch_size=32", "training.sequence_length=1024"} <= set(found.settings)


def test_adapters_of_nemo_rl_and_its_other_methods(written) -> None:
    written(BASE, "sft.yaml")
    path = written("defaults: sft.yaml\npolicy:\n  dtensor_cfg: {lora_cfg: {enabled: true}}\n", "a.yaml")
    assert "training.lora_rank=8" in read_foreign(path).settings
    with pytest.raises(InputError, match="this method of NeMo RL has no price"):
        read_foreign(written("defaults: sft.yaml\ndistillation: {topk: 64}\npolicy: {precision: bfloat16}\n", "a.yaml"))


@pytest.mark.parametrize(
    ("own", "settings", "doubts"),
    [
        ("dpo: {max_num_steps: 150}", ["objective=dpo", "reference=host"], []),
        ("rm: {max_num_steps: 150}", ["objective=reward"], []),
        ("grpo: {num_prompts_per_step: 8}", ["objective=grpo", "reference=host", "forward_passes=2"], []),
        (
            "grpo: {num_prompts_per_step: 8}\nloss_fn: {reference_policy_kl_penalty: 0, force_on_policy_ratio: true}",
            ["objective=grpo", "reference=none", "forward_passes=0"],
            [],
        ),
        (
            "grpo: {num_prompts_per_step: 8}\npolicy:\n  generation: {backend: megatron}",
            ["objective=grpo"],
            ["policy.generation.backend"],
        ),
    ],
)
def test_methods_of_nemo_rl_are_objectives(own, settings, doubts, written) -> None:
    """NeMo RL 7ea279ab, algorithms/grpo.py and dpo.py; a reference's weights are on the host meanwhile."""
    written(BASE.replace("sft: {max_num_steps: 60}\n", ""), "grpo.yaml")
    found = read_foreign(written(f"defaults: grpo.yaml\n{own}\n", "a.yaml"))
    assert {f"training.{each}" for each in settings} <= {*found.settings}
    assert [each.key for each in found.assumed if each.settled_by] == doubts


@pytest.mark.parametrize(
    ("own", "where"),
    [
        ("precision: float32", "policy.precision"),
        ("optimizer: {name: torch.optim.SGD}", "policy.optimizer.name"),
        ("dtensor_cfg: {enabled: false}", "policy"),
        ("generation: {colocated: {enabled: false}}", "policy.generation.colocated.enabled"),
        ("dtensor_cfg: {lora_cfg: {enabled: true, exclude_modules: [mlp]}}", "policy.dtensor_cfg.lora_cfg.exclude"),
    ],
)
def test_what_nemo_rl_is_not_priced_with_is_refused(own, where, written) -> None:
    written(BASE, "sft.yaml")
    with pytest.raises(InputError) as caught:
        read_foreign(written(f"defaults: sft.yaml\npolicy:\n  {own}\n", "a.yaml"))
    assert where in str(caught.value)


def test_sequence_parallelism_and_dropout_of_adapters_are_those_of_the_file(written) -> None:
    written(BASE, "sft.yaml")
    lora = "lora_cfg: {enabled: true, dropout: 0.1}"
    own = f"  dtensor_cfg: {{tensor_parallel_size: 4, sequence_parallel: false, {lora}}}\n"
    found = read_foreign(written(f"defaults: sft.yaml\npolicy:\n{own}", "a.yaml"), num_devices=8)
    assert found.layout["sp"] == "0"
    assert "training.lora_dropout=0.1" in found.settings


def test_nemo_rl_inherits_from_several_files_of_which_the_last_wins(written) -> None:
    """Source: NeMo RL 7ea279ab, nemo_rl/utils/config.py, load_config_with_inheritance; no name or key says `sft`."""
    written(BASE.replace("sft:", "logger:").replace("train_micro_batch_size: 1", "train_micro_batch_size: 4"), "a.yaml")
    written("policy:\n  train_micro_batch_size: 2\n", "b.yaml")
    path = written("defaults: [a.yaml, b.yaml]\npolicy:\n  dtensor_cfg: {tensor_parallel_size: 2}\n", "c.yaml")
    found = read_foreign(path, num_devices=8)
    assert (found.layout["mbs"], found.layout["tp"]) == ("2", "2")


def test_an_empty_section_of_nemo_rl_replaces_that_of_the_file_that_it_names(written) -> None:
    written(BASE.replace("dtensor_cfg:", "dtensor_cfg: {enabled: true}\n  other:"), "sft.yaml")
    path = written(
        "defaults: sft.yaml\npolicy:\n  dtensor_cfg: null\n"
        "  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, sequence_parallel: true}\n",
        "a.yaml",
    )
    assert read_foreign(path, num_devices=8).engine == "megatron"
    with pytest.raises(InputError, match="neither dtensor_cfg nor megatron_cfg"):
        read_foreign(written("defaults: sft.yaml\npolicy:\n  dtensor_cfg: null\n", "a.yaml"), num_devices=8)


@pytest.mark.parametrize(
    ("before", "tp"),
    [
        ("export TP=4\n", "4"),
        ("TP=4\nexport MORE TP\n", "4"),
        ("export MORE=1 TP=4\n", "4"),
        ("export TP=2\nTP=4\n", "4"),
        ("declare -x TP=4\n", "4"),
        ("TP=4 ", "4"),
        ("TP=4\n", None),
        ("export MORE=1\nTP=4\n", None),
        ("MORE=1 TP=4 true\nTP=4\n", None),
    ],
)
def test_another_shell_has_the_variables_that_the_script_exports(before, tp) -> None:
    """Oracle: bash itself, which prints the same."""
    text = f"{before}bash -c 'echo torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --x $MORE'\n"
    told = subprocess.run(["/bin/bash", "-c", text], capture_output=True, text=True, check=True, env={}).stdout
    assert ("size 4 " in told) == (tp == "4")
    words = next(each for each in commands_of(text) if "-c" in each)
    assert words[words.index("--tensor-model-parallel-size") + 1] == (tp or "$TP")


def test_another_shell_has_arguments_of_its_own() -> None:
    text = "set -- 2\nexport A=1\nbash -c 'run --a $A --b $1 --c $0' name 8\n"
    assert commands_of(text)[-1][2:] == ["run", "--a", "1", "--b", "8", "--c", "name"]


VERL_SFT = "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer."


@pytest.mark.parametrize(
    ("own", "layout", "numbers", "loss"),
    [
        (
            "fsdp_sft_trainer data.micro_batch_size_per_gpu=4 model.enable_gradient_checkpointing=True",
            "dp=8,zero=3,cp=1,mbs=4,recompute=full",
            (256, 1024, 0),
            "engine",
        ),
        (
            "sft_trainer data.use_dynamic_bsz=False engine.param_offload=False",
            "dp=8,zero=3,cp=1,mbs=4,recompute=full",
            (256, 1024, 0),
            "fused",
        ),
        (
            (
                "fsdp_sft_trainer data.train_batch_size=64 data.max_length=2048 data.micro_batch_size=16 "
                "model.lora_rank=32 ulysses_sequence_parallel_size=2 model.enable_gradient_checkpointing=False"
            ),
            "dp=4,zero=3,cp=2,mbs=4,recompute=none",
            (64, 2048, 32),
            "engine",
        ),
        (
            (
                "sft_trainer engine=megatron engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2 "
                "data.use_dynamic_bsz=False data.train_batch_size=96"
            ),
            "dp=2,tp=2,pp=2,zero=1,mbs=4,recompute=none",
            (96, 1024, 0),
            "engine",
        ),
    ],
)
def test_fine_tuning_of_verl_has_the_values_of_its_own_files(own, layout, numbers, loss, written) -> None:
    """By hand from verl b178a3cd: trainer/config (sft_trainer.yaml, sft_trainer_engine.yaml), logprobs_from_logits."""
    text = f"{VERL_SFT}{own} model.{'path' if 'engine' in own else 'partial_pretrain'}=Qwen/Qwen2.5-7B"
    plan = estimate_file(written(text), "dgx-h100")
    told = {key: getattr(plan.layout, key) for key in ("dp", "tp", "pp", "cp", "zero", "mbs")}
    wanted = dict(part.split("=") for part in layout.split(","))
    assert {key: str(told[key]) for key in wanted if key != "recompute"} | {
        "recompute": plan.layout.recompute[0]
    } == wanted
    training = plan.training
    assert (training.global_batch_size, training.sequence_length, training.lora_rank) == numbers
    assert (training.objective, training.loss, training.reference_at) == ("next-token", loss, "none")
    assert plan.verdict != "unknown"


def test_microbatches_of_tokens_have_a_verdict_if_whole_sequences_fill_them(written) -> None:
    """The newer program has them unless it is told otherwise: 8,192 tokens are eight sequences of 1,024."""
    text = f"{VERL_SFT}sft_trainer model.path=Qwen/Qwen2.5-7B"
    plan = estimate_file(written(text), "dgx-h100")
    assert (plan.layout.mbs, plan.verdict) == (8, "fits")
    plan = estimate_file(written(f"{text} data.max_token_len_per_gpu=99999999"), "dgx-h100")
    assert (plan.layout.mbs, plan.verdict) == (32, "fits")  # all sequences of a rank
    plan = estimate_file(written(f"{text} engine.ulysses_sequence_parallel_size=2"), "dgx-h100")
    assert (plan.layout.mbs, plan.layout.cp, plan.verdict) == (16, 2, "fits")  # two ranks share 16,384 tokens
    path = written(f"{text} data.max_token_len_per_gpu=9000")
    plan = estimate_file(path, "dgx-h100")
    assert (plan.layout.mbs, plan.verdict) == (8, "unknown")
    assert [(each.key, each.settled_by) for each in plan.assumed if each.settled_by] == [
        ("data.use_dynamic_bsz", "--layout mbs=...")
    ]
    for settled in ({"layout": "mbs=2"}, {"ignore": ("data.use_dynamic_bsz",)}):
        assert estimate_file(path, "dgx-h100", **settled).verdict != "unknown"


def test_rare_exchanges_of_torchtitan_leave_no_verdict(written) -> None:
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n[fault_tolerance]\n'
    )
    for method, is_open in (("", False), ('semi_sync_method = "diloco"\n', True)):
        found = read_foreign(written(f"{text}enable = true\n{method}", "a.toml"), num_devices=8)
        assert bool([each for each in found.assumed if each.kind == "open"]) == is_open


@pytest.mark.parametrize(
    ("recipe", "layout", "batch", "length"),
    [
        ("llama3_70b_pretrain_config", "tp=4,pp=4,cp=2,sp=1,interleave=5,mbs=1,recompute=none", 512, 8192),
        ("qwen3_30b_a3b_pretrain_config", "tp=1,pp=1,cp=1,ep=16,etp=1,mbs=1,recompute=none", 1024, 4096),
        ("llama32_1b_pretrain_1gpu_h100_bf16_config", "tp=1,pp=1,cp=1,mbs=1,recompute=none", 512, 8192),
    ],
)
def test_a_recipe_of_megatron_bridge_is_known_by_its_name(recipe, layout, batch, length, written) -> None:
    """By hand from recipes/llama/h100/llama3.py and recipes/qwen/h100/qwen3_moe.py of 067f987d."""
    start = "torchrun --nproc_per_node=8 --nnodes=8 scripts/training/run_recipe.py --recipe"
    text = f"{start} {recipe} train.train_iters=10"
    known = {"model": "llama3.2-1b"} if "32_1b" in recipe else {}
    found = read_foreign(written(text), num_devices=64, per_host=8, **known)
    assert dict(part.split("=") for part in layout.split(",")).items() <= dict(found.layout).items()
    assert {f"training.global_batch_size={batch}", f"training.sequence_length={length}"} <= {*found.settings}
    (rule,) = [each.rule for each in found.assumed if each.key == "recompute"]
    assert rule.startswith("as the recipe of Megatron-Bridge 067f987d")
    own = read_foreign(
        written(f"{text} model.tensor_model_parallel_size=8 train.micro_batch_size=2"), num_devices=64, **known
    )
    assert (own.layout["tp"], own.layout["mbs"]) == ("8", "2")
    bare = read_foreign(Path(recipe), num_devices=64, per_host=8, **known)  # `--from NAME`, where no file has it
    assert (bare.layout, {*bare.settings}) == (found.layout, {*found.settings} - {"training.steps=10"})
    with pytest.raises(InputError, match="does not exist"):
        read_foreign(Path("mine_config"), num_devices=64)
    with pytest.raises(InputError, match="does not exist") as error:
        read_foreign(Path(recipe.replace("pretrain", "pretran")), num_devices=64)
    assert f"`{recipe}`" in error.value.mistakes[0].hint
    unknown = read_foreign(written(f"{start} mine_config {SIZES}"), num_devices=64, model="llama3-8b")
    assert "open" in {each.kind for each in unknown.assumed}


def test_a_model_of_torchtitan_with_an_encoder_of_images_is_refused(written) -> None:
    text = '[model]\nname = "NAME"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n'
    assert read_foreign(written(text.replace("NAME", "llama3"), "a.toml"), num_devices=8).model.num_layers == 32
    with pytest.raises(InputError, match="needs an encoder beside the model"):
        read_foreign(written(text.replace("NAME", "vlm"), "a.toml"), model="llama3-8b", num_devices=8)


GRPO = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B \\\n"
ON_HOST = "optim.override_optimizer_config.optimizer_cpu_offload=True"
PER_GPU = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
OF_BATCH = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
)


@pytest.mark.parametrize(
    ("own", "offload", "doubts"),
    [
        ("ppo_micro_batch_size_per_gpu=1", "none", []),
        ("use_dynamic_bsz=True", "none", []),
        (f"use_dynamic_bsz=True {PER_GPU}=1500", "none", ["actor_rollout_ref.actor.use_dynamic_bsz"]),
        (ON_HOST, "optimizer", []),
        (
            f"{ON_HOST} actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=0.5",
            "optimizer",
            ["actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction"],
        ),
    ],
)
def test_states_on_the_host_and_microbatches_of_tokens_of_verl(own, offload, doubts, written) -> None:
    """By hand from verl b178a3cd, workers/megatron_workers.py, and Megatron-LM's OptimizerConfig."""
    found = read_foreign(written(f"{GRPO}{OF_BATCH} actor_rollout_ref.actor.{own}"), num_devices=8)
    assert found.layout["offload"] == offload
    told = [each.key.removesuffix("...") for each in found.assumed if each.kind == "open"]
    assert len(told) == len(doubts)
    assert all(doubt.startswith(key) for doubt, key in zip(doubts, told, strict=True))


@pytest.mark.filterwarnings("ignore:.*")  # what the file leaves open and what is not carried over
def test_a_plan_chooses_the_microbatch_that_verl_packs_by_tokens(written) -> None:
    """The doubt is about the layout alone, which a plan replaces and `--layout` settles."""
    path = written(f"{GRPO}{OF_BATCH} actor_rollout_ref.actor.use_dynamic_bsz=True {PER_GPU}=1500")
    assert estimate_file(path, "dgx-h100").verdict == "unknown"
    assert estimate_file(path, "dgx-h100", layout="mbs=1").verdict == "fits"
    assert plan_file(path, "dgx-h100").verdict == "fits"


def test_all_wrong_values_of_verl_are_told_and_no_right_key_is_blamed(written) -> None:
    wrong = ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=two", f"{MICRO}=2x")
    more = "actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.fsdp_size=-1"
    text = f"{GRPO}actor_rollout_ref.actor.ppo_mini_batch_size=64 {' '.join(wrong)} {more}"
    with pytest.raises(InputError) as error:
        read_foreign(written(text), num_devices=8)
    told = {each.message.partition(": ")[0] for each in error.value.mistakes}
    assert (len(error.value.mistakes), told) == (2, {each.partition("=")[0] for each in wrong})


MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


def test_wrong_degrees_of_verl_are_told_at_once(written) -> None:
    part = "actor_rollout_ref.actor.megatron"
    wrong = f"{part}.tensor_model_parallel_size=two {part}.pipeline_model_parallel_size=2x"
    text = f"{GRPO}actor_rollout_ref.actor.ppo_mini_batch_size=64 {wrong} {part}.expert_model_parallel_size=2 {MICRO}=1"
    with pytest.raises(InputError) as error:
        read_foreign(written(text), num_devices=8)
    assert sorted(each.message.rpartition(": ")[2] for each in error.value.mistakes) == [
        "'2x' is no whole number",
        "'two' is no whole number",
    ]


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        (
            "a.json",
            (
                '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "sequence_parallel_size": 2, '
                '"tensor_parallel": {"autotp_size": "2x"}}'
            ),
            "autotp_size",
        ),
        (
            "a.yaml",
            (
                "sft: {}\npolicy:\n  train_micro_batch_size: 1\n  max_total_sequence_length: 2048\n  dtensor_cfg:\n"
                "    enabled: true\n    tensor_parallel_size: 2x\n    context_parallel_size: 2\n"
            ),
            "tensor_parallel_size",
        ),
        (
            "a.toml",
            (
                '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n'
                '[parallelism]\npipeline_parallel_degree = "2x"\npipeline_parallel_schedule = "1F1B"\n'
            ),
            "pipeline_parallel_degree",
        ),
    ],
)
def test_a_wrong_degree_blames_no_right_key(name, text, wrong, written) -> None:
    more = {} if name == "a.toml" else {"model": "llama3-8b"}
    with pytest.raises(InputError) as error:
        read_foreign(written(text, name), num_devices=8, per_host=8, **more)
    (mistake,) = error.value.mistakes
    assert mistake.message.partition(": ")[0].endswith(wrong)


def test_adapters_of_trl_without_rank_and_targets_are_trls_and_pefts_own(written) -> None:
    """TRL, trainer/model_config.py (lora_r 16); PEFT, utils/constants.py (q_proj and v_proj of Qwen2)."""
    found = read_foreign(written(f"trl sft {TRAINER} --use_peft"))
    assert {"training.lora_rank=16", "training.lora_targets=[query,value]"} <= set(found.settings)
    assert not any(
        "lora" in each for each in read_foreign(written(f"trl sft {TRAINER} --lora_r 4 --use_peft no")).settings
    )


@pytest.mark.parametrize(
    ("script", "more", "objective"),
    [
        ("dpo.py", "", "dpo"),
        ("examples/scripts/dpo.py", "", "dpo"),
        ("own/dpo_cached.py", "", "dpo"),
        ("own/reward_modeling.py", "", "reward"),
        ("own/rm_train.py", "", "reward"),
        ("own/train.py", "--beta 2.0", "dpo"),
        ("own/main.py", "--prompt_max_length 512", "dpo"),
        ("own/train.py", "--gamma_beta_ratio 0.8", "orpo"),
    ],
)
def test_methods_of_other_peoples_code_leave_the_verdict_open(script, more, objective, written) -> None:
    path = written(f"torchrun --nproc_per_node 8 {script} {TRAINER} {more}")
    of_trl = script.endswith("dpo.py")
    plan = estimate_file(path, "dgx-h100")
    assert (plan.verdict == "unknown", plan.training.objective) == (not of_trl, objective)
    settled = estimate_file(path, "dgx-h100", settings=[f"training.objective={objective}"])
    assert settled.verdict != "unknown"


def test_a_shipped_file_that_is_not_here_is_known_and_a_file_beside_comes_first(written, tmp_path) -> None:
    text = "model_name_or_path: Qwen/Qwen2.5-7B\ncutoff_len: 512\nstage: sft\nfinetuning_type: full\ndeepspeed: "
    path = written(f"{text}examples/deepspeed/ds_z3_offload_config.json\n", "a.yaml")
    found = read_foreign(path, num_devices=8)
    assert (found.layout["zero"], found.layout["offload"]) == ("3", "params+states")
    assert any("ds_z3_offload_config.json is not here" in each.rule for each in found.assumed)
    (tmp_path / "examples/deepspeed").mkdir(parents=True)
    (tmp_path / "examples/deepspeed/ds_z3_offload_config.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert read_foreign(path, num_devices=8).layout["zero"] == "1"
    with pytest.raises(InputError, match="neither beside the file nor here"):
        read_foreign(written(f"{text}own/ds_z3_config.json\n", "b.yaml"), num_devices=8)


def test_a_definition_stands_in_for_the_output_of_a_command_alone(written) -> None:
    text = "N=$(nvidia-smi -L | wc -l)\nSTEPS=$((16/(N * 1)))\nM=8\n"
    path = written(f"{text}torchrun --nproc_per_node $N a.py {TRAINER} --gradient_accumulation_steps $STEPS\n")
    found = read_foreign(path, define=["N=4"])
    assert (found.num_devices, "training.global_batch_size=16" in found.settings) == (4, True)
    with pytest.raises(InputError, match="the file itself sets M"):
        read_foreign(path, define=["M=4"])
    doubled = written(f"N=$((N*2))\ntorchrun --nproc_per_node $N a.py {TRAINER}\n")
    assert read_foreign(doubled, define=["N=4"]).num_devices == 8  # as bash has it after N=4


def test_redirections_are_no_values_of_options(written) -> None:
    text = f"torchrun --nproc_per_node 8 a.py {TRAINER} --seed 42 "
    for redirected in ("> log 2>&1", "> >(tee log) 2> >(tee err >&2)", "2>&1 | tee log", "&> log"):
        assert "training.seed=42" in read_foreign(written(f"{text}{redirected}\n")).settings


def test_each_host_of_a_launcher_around_accelerate_has_its_processes(written) -> None:
    text = f"accelerate launch --multi_gpu --num_processes 8 a.py {TRAINER}"
    assert read_foreign(written(f"start.py --num_nodes 4 -- {text}")).num_devices == 32
    assert read_foreign(written(text.replace("8 a.py", "8 --num_machines 2 a.py"))).num_devices == 8


def test_recomputation_by_its_name_of_2022_and_options_of_megatron_llm(written) -> None:
    text = f"python pretrain_gpt.py {RUN} --micro-batch-size 1 --activations-checkpoint-method "
    for old, policy in (("uniform", "full"), ("block --activations-checkpoint-num-layers 3", "full:3")):
        assert read_foreign(written(text + old), num_devices=1).layout["recompute"] == policy
    lines = " \\\n  ".join(f"--{each.replace('-', '_')}" for each in text.split("--")[1:])
    found = read_foreign(written(f"python pretrain_gpt.py \\\n  {lines}uniform"), num_devices=1)
    assert found.layout["recompute"] == "full"


def test_lengths_and_names_that_scripts_give(written) -> None:
    text = "torchrun --nproc_per_node 8 a.py --model_name allenai/OLMo-2-1124-7B --per_device_train_batch_size 1 "
    found = read_foreign(written(f"{text}--block_size 2048"))
    assert (found.model.name, "training.sequence_length=2048" in found.settings) == ("olmo2-7b", True)


def test_slime_is_refused_by_its_name(written) -> None:
    text = f"ray job submit -- python3 train.py --colocate {RUN} --num-rollout 10 --rollout-batch-size 32"
    with pytest.raises(InputError, match="a file of slime, which is not read"):
        read_foreign(written(text))


def test_a_reward_model_of_verl_leaves_the_verdict_open_and_gradients_are_back_for_the_step(written) -> None:
    actor = "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
    text = f"{GRPO}{actor}actor_rollout_ref.actor.fsdp_config.grad_offload=True "
    assert not [each for each in read_foreign(written(text), num_devices=8).assumed if each.kind == "open"]
    (key,) = [
        each.key
        for each in read_foreign(written(f"{text}reward_model.own.path=a/b"), num_devices=8).assumed
        if each.kind == "open"
    ]
    assert key == "reward_model.own.path"


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.sh", f"{VERL_SFT}sft_trainer model.path=Qwen/Qwen2.5-7B data.max_length=2x", "data.max_length"),
        ("a.yaml", "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\ncutoff_len: 2x\n", "cutoff_len"),
        ("a.yaml", "base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 1\nsequence_len: 2x\n", "sequence_len"),
    ],
)
def test_a_mistake_names_the_key_of_the_file(name, text, key, written) -> None:
    with pytest.raises(InputError, match=f"{key}: '2x' is no whole number"):
        read_foreign(written(text, name), num_devices=8)


def test_adapters_of_other_peoples_scripts_have_a_rank_that_the_file_says(written) -> None:
    for script, is_own in (("train.py", True), ("examples/sft.py", False), ("scripts/run_sft.py", False)):
        path = written(f"torchrun --nproc_per_node 8 {script} {TRAINER} --use_peft")
        if is_own:
            with pytest.raises(InputError, match="the script's own code sets the rank of adapters"):
                read_foreign(path)
        else:
            assert "training.lora_rank=16" in read_foreign(path).settings
    assert read_foreign(written(f"torchrun --nproc_per_node 8 train.py {TRAINER} --use_peft False")).num_devices == 8


def test_what_a_comment_quotes_is_no_sign_of_the_kind_of_a_file(written) -> None:
    text = "model:\n  seq_length: 2048\n  tensor_model_parallel_size: 2\ntrain:\n  global_batch_size: 64\n"
    text += "  micro_batch_size: 1\n"
    for comment in ("", "# try it with train.train_iters=5, or torchrun --nproc_per_node 8 --micro-batch-size 4\n"):
        found = read_foreign(written(f"{comment}{text}", "a.yaml"), model="llama3-8b", num_devices=8)
        assert (found.layout["tp"], "training.global_batch_size=64" in found.settings) == ("2", True)


def test_numbers_that_yaml_tags_as_numbers_are_read(written) -> None:
    text = "model_name_or_path: Qwen/Qwen2.5-7B\ncutoff_len: 512\nstage: sft\nfinetuning_type: full\nlearning_rate: "
    found = read_foreign(written(f"{text}!!float 3e-6\n", "a.yaml"), num_devices=8)
    assert "training.learning_rate=3e-06" in found.settings
    with pytest.raises(InputError, match="tags are not read"):
        read_foreign(written(f"{text}!!int 3\n", "a.yaml"), num_devices=8)


def test_degrees_of_torchtitan_before_its_section_of_them(written) -> None:
    """torchtitan of 2024, torchtitan/config_manager.py: its degrees lay in [training] and [experimental]."""
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 3\nseq_len = 2048\ncompile = true\n'
        "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4\ntensor_parallel_degree = 8\n"
        "[experimental]\ncontext_parallel_degree = 2\npipeline_parallel_degree = 4\n"
    )
    layout = read_foreign(written(text, "a.toml"), num_devices=512).layout
    assert [layout[key] for key in ("tp", "cp", "pp", "hsdp")] == ["8", "2", "4", "2"]
    layout = read_foreign(written(text.partition("[experimental]")[0], "a.toml"), num_devices=64).layout
    assert (layout["mbs"], layout["zero"]) == ("3", "3")


def test_degrees_in_short_and_runs_without_training_are_refused(written) -> None:
    text = f"python pretrain_gpt.py {RUN} --micro-batch-size 1 "
    for key in ("--fake-tp 4", "--my-world-size 8"):
        with pytest.raises(InputError, match="the layout may depend on this key"):
            read_foreign(written(text + key), num_devices=1)
    assert read_foreign(written(f"{text}--my-tp 1"), num_devices=1).layout["tp"] == "1"
    with pytest.raises(InputError, match="needs a training, and this run only evaluates"):
        read_foreign(written(f"torchrun --nproc_per_node 8 a.py {TRAINER} --do_train False"))


def test_policies_of_openrlhf_have_the_lengths_and_devices_of_its_options(written) -> None:
    """By hand from OpenRLHF, cli/train_ppo_ray.py: the actor's own devices, and tokens of a prompt and its answer."""
    text = (
        "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-7B --actor_num_nodes 2 "
        "--actor_num_gpus_per_node 4 --critic_num_nodes 1 --critic_num_gpus_per_node 8 --prompt_max_len 1024 "
        "--generate_max_len 3072 --micro_train_batch_size 4 --train_batch_size 256 --zero_stage 3 --adam_offload"
    )
    plan = estimate_file(written(text), "dgx-h100")
    told = (plan.layout.dp, plan.layout.zero, plan.layout.offload, plan.layout.mbs, plan.training.sequence_length)
    assert (told, plan.training.global_batch_size) == ((8, 3, "optimizer", 4, 4096), 256)
    assert (plan.training.objective, plan.verdict) == ("grpo", "unknown")


def test_dotted_options_of_openrlhf_are_those_without_dots(written) -> None:
    """By hand from OpenRLHF 3c3be623, cli/train_ppo_ray.py: data.max_len holds a prompt and its answer together."""
    text = (
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen2.5-7B --actor.num_nodes 2 "
        "--actor.num_gpus_per_node 4 --data.max_len 4096 --rollout.max_new_tokens 1024 --train.micro_batch_size 4 "
        "--train.batch_size 256 --ds.zero_stage 3 --ds.adam_offload --actor.gradient_checkpointing_enable"
    )
    plan = estimate_file(written(text), "dgx-h100")
    told = (plan.layout.dp, plan.layout.zero, plan.layout.offload, plan.layout.mbs, plan.training.sequence_length)
    assert (told, plan.training.global_batch_size) == ((8, 3, "optimizer", 4, 4096), 256)
    assert (plan.layout.recompute[0], plan.training.objective) == ("full", "grpo")


@pytest.mark.parametrize(("line", "recompute"), [("", "full"), ("disable_gradient_checkpointing: true", "none")])
def test_the_trainers_key_does_not_turn_recompute_of_llama_factory_off(line, recompute, written) -> None:
    """By hand from LLaMA-Factory ff6d4d12, model/model_utils/checkpointing.py; the user may name the model."""
    text = f"finetuning_type: lora\nlora_rank: 8\ncutoff_len: 512\n{line}\ngradient_checkpointing: false\nbf16: true\n"
    path = written(f"{text}per_device_train_batch_size: 1\n", "a.yaml")
    plan = estimate_file(path, "dgx-h100", model="qwen2.5-1.5b", gpus=1)
    assert plan.layout.recompute[0] == recompute


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ("torchrun --nproc_per_node 8 a.py --query_max_len 512 --passage_max_len 512", "the encodings of both parts"),
        ("python qlora.py --source_max_len 512 --target_max_len 64", "which the script's own code sets"),
    ],
)
def test_scripts_of_embeddings_and_of_qlora_are_refused(words, needs, written) -> None:
    with pytest.raises(InputError, match=needs):
        read_foreign(written(f"{words} {TRAINER}"), num_devices=8)


def test_models_with_a_tower_are_priced_under_zero_3_of_deepspeed(written) -> None:
    """A tower has the degrees of its shape alone, which no question about adapters may ask for more."""
    text = "model_name_or_path: x/y\ncutoff_len: 512\nstage: sft\nfinetuning_type: full\ndeepspeed: "
    path = written(f"{text}examples/deepspeed/ds_z3_config.json\nper_device_train_batch_size: 1\n", "a.yaml")
    plan = estimate_file(path, "dgx-h100", model="qwen3-vl-8b", gpus=8)
    assert (plan.layout.zero, plan.verdict) == (3, "fits")


def test_commands_of_ms_swift_2_have_its_names_and_its_adapters(written) -> None:
    """By hand from ms-swift 546e6dc7, swift/llm/utils/argument.py: batch_size is that of a device."""
    text = "NPROC_PER_NODE=2 swift sft --model_type qwen2-7b --model_id_or_path Qwen/Qwen2.5-7B --batch_size 4 "
    text += "--max_length 1024 --dtype AUTO --deepspeed default-zero2 --gradient_accumulation_steps 8 --sft_type "
    for kind, adapters in (
        ("full", (0, 0)),
        ("lora", (8, 3)),
        ("lora --lora_target_modules ALL --lora_rank 16", (16, 7)),
    ):
        plan = estimate_file(written(text + kind), "dgx-h100")
        assert (plan.layout.mbs, plan.layout.zero, plan.training.global_batch_size) == (4, 2, 64)
        trained = plan.training.lora_rank or 0
        assert (trained, len(plan.training.lora_targets) if trained else 0) == adapters
    text = f"{text}full".replace("--gradient_accumulation_steps 8", "")  # release 2 then accumulates 16 sequences
    with pytest.raises(InputError, match="does not say the global batch"):
        estimate_file(written(text), "dgx-h100", model="qwen2.5-7b")


def test_a_step_of_verl_has_no_more_sequences_than_were_generated(written) -> None:
    """By hand from verl b178a3cd, workers/actor/dp_actor.py: a mini batch splits the batch of generated answers."""
    own = "actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
    for mini, batch in ((16, 64), (1024, 128)):
        sizes = f"data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size={mini}"
        assert estimate_file(written(f"{GRPO}{own}{sizes}"), "dgx-h100").training.global_batch_size == batch


def test_the_output_of_a_command_is_one_word_of_a_path() -> None:
    """As bash has it after `HERE=/x`: the variable with the command's output stays one word."""
    text = 'HERE=$(cd "$(dirname $0)"; pwd)\nOPTIONS="--seed 42 --output_dir $HERE/out --max_steps 9"\n'
    text += "N=$(nvidia-smi -L | wc -l)\npython a.py $OPTIONS --deepspeed ${HERE}/z.json --x $(($((2 * N)) + 1))\n"
    (words,) = commands_of(text.replace("$(nvidia-smi -L | wc -l)", "8"))
    place = words.index("--output_dir")
    assert words[place - 2 : place + 4 : 2] == ["--seed", "--output_dir", "--max_steps"]
    assert (words[-3].endswith("/z.json"), words[-4:][::2], words[-1]) == (True, ["--deepspeed", "--x"], "17")


@pytest.mark.parametrize("script", ["train_lora.py", "src/train/finetune_clm_qlora.py", "run_sft_peft.py"])
def test_scripts_whose_name_says_adapters_need_their_rank(script, written) -> None:
    with pytest.raises(InputError, match="needs the rank and the targets of adapters"):
        read_foreign(written(f"deepspeed {script} {TRAINER}"))
    found = read_foreign(written(f"deepspeed {script} {TRAINER} --use_peft true --lora_r 8"))
    assert "training.lora_rank=8" in found.settings
    merged = written(f"deepspeed train.py {TRAINER}\npython merge_lora.py --base x\n")
    assert not [each for each in read_foreign(merged).settings if "lora" in each]


def test_batch_sizes_in_yaml_make_no_file_of_deepspeed(written) -> None:
    """DeepSpeed's own file is JSON; programs of other people have its keys in YAML, beside others."""
    text = "train_micro_batch_size_per_gpu: 4\ngradient_accumulation_steps: 2\nlearning_rate: 3.0e-4\n"
    with pytest.raises(InputError, match="is of no kind that is known here"):
        read_foreign(written(text, "a.yaml"), model="qwen3-0.6b", num_devices=2)
    found = read_foreign(written('{"train_micro_batch_size_per_gpu": 4}', "a.json"), model="qwen3-0.6b", num_devices=2)
    assert found.layout["mbs"] == "4"


def test_convolutions_in_the_layers_of_a_fork_have_no_price(written) -> None:
    text = f"torchrun --nproc_per_node 8 pretrain_own.py {RUN} --micro-batch-size 1 --use-gate --gate-conv2d-group 1"
    with pytest.raises(InputError, match="needs the convolutions in each layer"):
        read_foreign(written(text))


def test_files_of_nemo_rl_that_only_inherit_are_known_by_what_they_inherit(written) -> None:
    base = written(BASE, "sft_own.yaml")
    for start in ("defaults: sft_own.yaml", "defaults:\n  - sft_own.yaml", "defaults: [sft_own.yaml]"):
        own = written(f"{start}\ndata:\n  dataset_name: x\n", "a.yaml")
        found = read_foreign([own, base], model="llama3-8b")
        assert (found.layout["mbs"], found.num_devices) == ("1", 8)


TRAINED = "train.py --model_name_or_path Qwen/Qwen3-0.6B --max_length 64 --bf16 --per_device_train_batch_size 2"


@pytest.mark.parametrize("launcher", ["accelerate launch --multi_gpu --num_processes 4", "torchrun --nproc_per_node 4"])
def test_a_plain_python_beside_a_launcher_does_not_train(launcher, written) -> None:
    """The data's program has more options than the training, which a launcher starts with four ranks."""
    data = "CUDA_VISIBLE_DEVICES=0 python data.py --a 1 --b 2 --c 3 --d 4 --e 5 --f 6 --g 7 --per_device_batch_size 9\n"
    plan = estimate_file(written(f"{data}{launcher} {TRAINED}"), "dgx-h100")
    assert (plan.layout.dp, plan.layout.mbs) == (4, 2)


def test_workers_of_ray_are_the_devices_of_llama_factory(written) -> None:
    """By hand from LLaMA-Factory (a fork at 2319e43b), train/trainer_utils.py: ScalingConfig, if USE_RAY is set."""
    text = "finetuning_type: lora\ncutoff_len: 512\nper_device_train_batch_size: 2\nbf16: true\nray_num_workers: 4\n"
    plan = estimate_file(written(text, "a.yaml"), "dgx-h100", model="qwen2.5-1.5b")
    assert (plan.layout.dp, plan.verdict) == (4, "unknown")


@pytest.mark.parametrize(
    ("before", "command", "dp"),
    [
        ('W="-i worker-0:0,1"\n', "deepspeed $W pretrain_gpt.py --deepspeed", 2),
        ("", "deepspeed -i worker-0:2,3,5,7 pretrain_gpt.py --deepspeed --num-experts 1", 4),
        ("export CUDA_VISIBLE_DEVICES=1\n", "/a/bin/python pretrain_gpt.py", 1),
        ("# under srun, SLURM_PROCID is the rank\nexport TORCH_COMPILE=0\n", "python pretrain_gpt.py", 1),
        ("export RANK=$SLURM_PROCID\n", "python pretrain_gpt.py", 8),
    ],
)
def test_megatron_without_a_number_of_ranks_has_the_devices_that_it_is_shown(before, command, dp, written) -> None:
    """DeepSpeed 0.19.8, launcher/runner.py (-i); a process alone is one rank, unless Slurm starts it for each."""
    text = f"{before}{command} {RUN} --micro-batch-size 1 --global-batch-size 8 --max-position-embeddings 64"
    assert estimate_file(written(text), "dgx-h100", gpus=None if dp < 8 else 8).layout.dp == dp
