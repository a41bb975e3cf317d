"""Keys of foreign files that decide the answer: unpriced values, other models and engines, and methods without a price.

Meanings of keys are from the programs' own documents: verl, trainer/config; trl, trainer/grpo_config.py; ms-swift,
arguments/rlhf_args.py; torch, distributed/fsdp/api.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.api import estimate_file, explain_layout, plan_file
from planner.cli import main
from planner.cost.adapters import num_trained_params
from planner.emit.read.front import read_foreign, with_layout
from planner.emit.read.readers import READERS
from planner.errors import ExitCode, InputError
from planner.reading import read_plan
from planner.specs.training import TrainingSpec

NEOX = """
pipeline_parallel_size: 4
model_parallel_size: 2
num_layers: 44
hidden_size: 6144
train_micro_batch_size_per_gpu: 4
gradient_accumulation_steps: 32
checkpoint_activations: true
zero_optimization: {stage: 1}
"""
FACTORY_MEGATRON = """
model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
finetuning_type: full
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
tensor_model_parallel_size: 4
pipeline_model_parallel_size: 2
sequence_parallel: true
recompute_granularity: full
"""


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (NEOX, {"pipeline_parallel_size", "model_parallel_size", "checkpoint_activations"}),
    ],
    ids=["DeepSpeed"],
)
def test_keys_that_look_like_a_layout_stop_the_reading_and_are_named(text, keys, written):
    path = written(text, "run.yaml")
    with pytest.raises(InputError) as error:
        read_foreign(path, model="qwen2.5-7b")
    lines = text.split("\n")
    named = {each.message.partition(":")[0].rpartition(".")[2]: each for each in error.value.mistakes}
    assert set(named) == keys
    for key, mistake in named.items():
        assert lines[int(mistake.where.rpartition(":")[2]) - 1].startswith(key)
        assert "--layout" in mistake.hint
        assert "--ignore" in mistake.hint
    assert read_foreign(path, model="qwen2.5-7b", ignore=tuple(keys)).layout["zero"] in ("0", "1")


@pytest.mark.parametrize("value", ["1", "0", "false", "null"])
def test_a_degree_of_one_stops_nothing(value, written):
    path = written(FACTORY_MEGATRON.partition("tensor_model")[0] + f"pipeline_model_parallel_size: {value}\n", "a.yaml")
    assert read_foreign(path, model="qwen2.5-7b").layout["zero"] == "0"


RUN = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --seq-length 64 --bf16"


@pytest.mark.parametrize(
    ("more", "meant"),
    [
        ("--tensor-parallel-size 2", "tensor_model_parallel_size"),
        ("--tensor-model-paralel-size 2", "tensor_model_parallel_size"),
        ("--pipeline-model-parallel-siz 2", "pipeline"),
        ("--sequence-paralel", "sequence_parallel"),
    ],
)
def test_a_misspelt_degree_stops_the_reading_and_is_corrected(more, meant, written):
    with pytest.raises(InputError, match="layout may depend") as error:
        read_foreign(written(f"torchrun pretrain_gpt.py {RUN} {more}"))
    assert f"did you mean {meant}" in error.value.mistakes[0].hint


VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_prompt_length=1024 \\
  data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
  actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
  actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
  actor_rollout_ref.ref.fsdp_config.param_offload=True actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
  trainer.n_gpus_per_node=8 trainer.nnodes=1 """
REWARD = "reward_model.enable"


def test_a_second_model_leaves_the_verdict_unknown_everywhere(written, capsys, tmp_path):
    path = written(VERL + f"{REWARD}=True")
    assert main(["explain", "--from", str(path), "dgx-h100", "--json"]) == ExitCode.OK
    text = capsys.readouterr().out
    data = json.loads(text)
    assert (data["fits"], data["chance_of_fitting"], data["verdict"]) == (None, None, "unknown")
    assert data["unknown_because"] == [REWARD]
    assert {(each["fits"], each["verdict"], each["chance_of_fitting"]) for each in data["memory"]} == {
        (None, "unknown", None)
    }
    assert main(["explain", "--from", str(path), "dgx-h100"]) == ExitCode.OK
    shown = capsys.readouterr().out
    first = next(line for line in shown.splitlines() if line.strip().startswith(("unknown", "layout")))
    assert REWARD in first
    assert main(["explain", "--from", str(path), "dgx-h100", "--section", "memory"]) == ExitCode.OK
    memory = capsys.readouterr().out.partition("Memory of a device")[2].partition("\n\n")[0]
    assert "unknown" in memory
    assert "99%" not in memory
    assert main(["explain", "--from", str(path), "dgx-h100", "--html", str(tmp_path / "page.html")]) == ExitCode.OK
    assert f"is unknown: {REWARD}=True" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    for command in (["emit", str(plan)], ["launch", str(plan), "--dry-run"], ["plan", "--from", str(path), "dgx-h100"]):
        assert main(command) == ExitCode.BAD_INPUT
        said = capsys.readouterr().err
        assert f"{REWARD}=True" in said
        assert f"--ignore {REWARD}" in said
    assert main(["emit", str(plan), "--force-unfit"]) == ExitCode.BAD_INPUT
    assert "training.objective is grpo" in capsys.readouterr().err
    assert main(["explain", "--from", str(path), "dgx-h100", "--ignore", REWARD, "--json"]) == ExitCode.OK
    alone = json.loads(capsys.readouterr().out)
    assert alone["verdict"] == "fits"
    assert {(each["key"], each["rule"]) for each in alone["assumed"]} >= {(REWARD, "--ignore")}
    assert alone["memory"][0]["total_bytes"] == data["memory"][0]["total_bytes"]


def test_verl_offloads_nothing_in_the_step_of_the_actor_except_by_its_policy(written):
    """verl, engine/fsdp.yaml: param_offload differs from offload_policy, which offloads during training."""
    plain = read_foreign(written(VERL))
    assert plain.layout["offload"] == "none"
    assert not plain.assumed
    policy = read_foreign(written(f"{VERL} actor_rollout_ref.actor.fsdp_config.offload_policy=True"))
    assert policy.layout["offload"] == "optimizer"


@pytest.mark.parametrize(
    "more",
    [
        "verifier.model.path=Qwen/Qwen2.5-7B",
        "reward_model.enable=True",
        "actor_rollout_ref.model.enable_activation_offload=True",
    ],
)
def test_other_models_of_verl_are_named(more, written):
    keys = {each.key for each in read_foreign(written(f"{VERL} {more}")).assumed if each.settled_by}
    assert keys == {more.partition("=")[0]}


MEGATRON = " actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
KL = " actor_rollout_ref.actor.use_kl_loss=True"


@pytest.mark.parametrize(
    ("more", "reference", "share", "passes"),
    [
        ("", "none", 0.0, 1),  # the log-probabilities before the update
        (KL, "host", 0.0, 2),
        (" algorithm.use_kl_in_reward=True", "host", 0.0, 2),
        (f"{KL} actor_rollout_ref.model.lora_rank=32", "policy", 0.0, 2),
        (KL + MEGATRON, "resident", 0.0, 2),
        (f"{KL}{MEGATRON} actor_rollout_ref.ref.megatron.param_offload=True", "host", 0.0, 2),
        (" actor_rollout_ref.rollout.free_cache_engine=False", "none", 0.5, 1),
        (
            " actor_rollout_ref.rollout.free_cache_engine=False actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
            "none",
            0.3,
            1,
        ),
    ],
)
def test_the_step_of_verl_s_actor_has_a_verdict(more, reference, share, passes, written):
    """verl, workers/fsdp_workers.py (CPUOffload of every reference), trainer/config/rollout (free_cache_engine)."""
    plan = estimate_file(written(VERL + more), "dgx-h100")
    training = plan.training
    assert (training.objective, training.reference_at, training.ungraded_passes) == ("grpo", reference, passes)
    assert training.rollout_memory == share
    assert plan.verdict != "unknown"


def test_a_critic_of_verl_leaves_the_verdict_unknown(written):
    """verl, trainer/ppo/utils.py (need_critic); advantages are estimated by a critic by default."""
    for text in (VERL.replace("=grpo", "=gae"), VERL.replace("algorithm.adv_estimator=grpo ", "")):
        assert [each.key for each in read_foreign(written(text)).assumed if each.settled_by] == [
            "algorithm.adv_estimator"
        ]


TRL = "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 4\nbf16: true\nfsdp: full_shard\n"


@pytest.mark.parametrize(
    ("text", "name", "length"),
    [
        (f"{TRL}max_prompt_length: 512\nmax_completion_length: 768\nuse_vllm: true\n", "grpo.yaml", 1280),
        (f"{TRL}max_prompt_length: 512\nnum_generations: 8\nuse_vllm: true\n", "grpo.yaml", 512 + 256),
        (
            (
                "torchrun grpo.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 4 "
                "--max_prompt_length 512 --max_completion_length 768 --vllm_gpu_memory_utilization 0.3"
            ),
            "run.sh",
            1280,
        ),
        (
            (
                "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --train_type full --per_device_train_batch_size 1 "
                "--max_length 1024 --offload_model true --vllm_tensor_parallel_size 2"
            ),
            "run.sh",
            1024 + 512,
        ),
        (
            "megatron rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --max_length 1024 --max_completion_length 2048",
            "run.sh",
            3072,
        ),
        (
            f"{TRL}stage: ppo\ncutoff_len: 1024\nmax_new_tokens: 512\nreward_model: a/b\nfinetuning_type: full\n",
            "a.yaml",
            1536,
        ),
        (
            (
                "base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 1\nrl: grpo\nmax_prompt_len: 512\n"
                "trl: {use_vllm: true, max_completion_length: 256, vllm_tensor_parallel_size: 2}\n"
            ),
            "a.yaml",
            768,
        ),
    ],
)
def test_training_on_generated_answers_has_a_length_and_no_verdict(text, name, length, written):
    path = written(text, name)
    found = read_foreign(path, model="qwen2.5-7b")
    assert f"training.sequence_length={length}" in found.settings
    plan = estimate_file(path, "dgx-h100", model="qwen2.5-7b", global_batch=64, gpus=8)
    assert plan.verdict == "unknown"
    assert plan.training.sequence_length == length
    assert plan.training.objective == "grpo"


@pytest.mark.parametrize(
    ("more", "share", "passes"),
    [
        ("", 0.0, 0),  # the model itself generates; the update's own log-probabilities are those before it
        ("beta: 0.04\n", 0.0, 1),
        ("steps_per_generation: 64\n", 0.0, 1),
        ("use_vllm: true\nvllm_mode: server\n", 0.0, 1),
        ("use_vllm: true\nvllm_mode: colocate\nvllm_gpu_memory_utilization: 0.3\nbeta: 0.1\n", 0.3, 2),
        ("use_vllm: true\nvllm_mode: colocate\nvllm_enable_sleep_mode: true\nbeta: 0.1\n", 0.0, 2),
    ],
)
def test_a_step_on_generated_answers_has_a_verdict_if_the_engine_s_memory_is_known(
    more, share, passes, written, capsys
):
    """TRL, trainer/grpo_trainer.py: when log-probabilities are taken again, and what vLLM keeps meanwhile."""
    text = f"{TRL}num_generations: 8\nmax_prompt_length: 512\nmax_completion_length: 768\n{more}"
    plan = estimate_file(written(text, "grpo.yaml"), "dgx-h100", global_batch=64, gpus=8)
    assert plan.verdict != "unknown"
    assert (plan.training.rollout_memory, plan.training.ungraded_passes) == (share, passes)
    assert plan.training.reference_at == ("resident" if "beta" in more else "none")
    given = ["--from", str(written(text, "grpo.yaml")), "dgx-h100", "--gpus", "8", "--global-batch", "64"]
    assert main(["explain", *given]) == ExitCode.OK
    assert "the time of rollouts is not priced" in " ".join(capsys.readouterr().out.split())


def test_a_length_that_is_not_known_is_asked_for(written):
    """trl, trainer/grpo_config.py: a prompt has no largest length."""
    path = written(f"{TRL}max_completion_length: 768\nnum_generations: 8\n", "grpo.yaml")
    with pytest.raises(InputError, match="does not say the length") as error:
        estimate_file(path, "dgx-h100", model="llama3-8b")
    assert "--seq-len" in error.value.mistakes[0].hint
    assert estimate_file(path, "dgx-h100", model="llama3-8b", seq_len=2048).training.sequence_length == 2048


FACTORY = "model_name_or_path: Qwen/Qwen2.5-7B\ncutoff_len: 1024\nper_device_train_batch_size: 1\n"
AXOLOTL = "base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 1\nsequence_len: 1024\n"
SCRIPT = "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --max_length 1024"
SWIFT = "--model Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --max_length 1024 --train_type full"


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (f"swift rlhf --rlhf_type gkd {SWIFT}", "gkd"),
        (f"{FACTORY}use_galore: true\nfinetuning_type: full\n", "True"),
        (f"{FACTORY}use_badam: true\nfinetuning_type: full\n", "True"),
        (f"{AXOLOTL}lisa_n_layers: 4\n", "4"),
        (f"swift sft {SWIFT} --quant_bits 2", "2"),
        (f"swift sft {SWIFT} --freeze_parameters_ratio 0.5", "0.5"),
        (f"{AXOLOTL}adapter: lora\nlora_r: 8\nload_in_8bit: true\n", "True"),
    ],
)
def test_methods_without_a_price_are_refused_by_name(text, method, written):
    with pytest.raises(InputError, match="no price here; it needs") as error:
        read_foreign(written(text), model="qwen2.5-7b")
    (mistake,) = error.value.mistakes
    assert method.removeprefix("run_") in mistake.message
    key = mistake.hint.split()[1]
    assert read_foreign(written(text), model="qwen2.5-7b", ignore=(key,)).layout["mbs"] == "1"


@pytest.mark.parametrize(
    ("text", "objective", "more"),
    [
        (f"{FACTORY}stage: dpo\nfinetuning_type: full\n", "dpo", ["engine.memory.log_probability_bytes=4"]),
        (f"{FACTORY}stage: dpo\nfinetuning_type: full\nref_model: Qwen/Qwen2.5-7B\n", "dpo", []),
        (f"{FACTORY}stage: dpo\nfinetuning_type: full\npref_loss: simpo\n", "orpo", []),
        (f"{FACTORY}stage: rm\nfinetuning_type: full\n", "value-head", []),
        (f"{FACTORY}stage: kto\nfinetuning_type: full\n", "kto", ["engine.memory.log_probability_bytes=4"]),
        *((f"{AXOLOTL}rl: {name}\n", "dpo", []) for name in ("dpo", "ipo")),
        *((f"{AXOLOTL}rl: {name}\n", "orpo", []) for name in ("orpo", "simpo")),
        (f"{AXOLOTL}rl: kto\n", "kto", []),
        *((f"torchrun {name}.py {SCRIPT}", name.removeprefix("run_"), []) for name in ("dpo", "kto", "run_orpo")),
        (f"torchrun cpo.py {SCRIPT}", "orpo", []),
        (f"trl dpo {SCRIPT}", "dpo", ["engine.memory.reference_bytes=4"]),
        (f"trl dpo {SCRIPT} --precompute_ref_log_probs true", "dpo", ["training.reference=none"]),
        (f"trl kto {SCRIPT} --loss_type apo_zero_unpaired", "kto", ["training.forward_passes=1"]),
        (f"python examples/scripts/reward_modeling.py {SCRIPT}", "reward", []),
        (f"torchrun train.py {SCRIPT} --loss_type sigmoid_norm", "dpo", []),
        (f"swift rlhf {SWIFT}", "dpo", []),
        (f"swift rlhf --rlhf_type kto {SWIFT}", "kto", []),
        ("megatron rlhf --model Qwen/Qwen2.5-7B --max_length 1024", "dpo", []),
        ("megatron rlhf --rlhf_type rm --model Qwen/Qwen2.5-7B --max_length 1024", "reward", []),
    ],
)
def test_preferences_and_rewards_are_objectives(text, objective, more, written):
    path = written(text)
    found = read_foreign(path, model="qwen2.5-7b")
    assert {f"training.objective={objective}", "training.sequence_length=1024", *more} <= {*found.settings}
    assert not [each for each in found.assumed if each.settled_by]
    plan = estimate_file(path, "dgx-h100", model="qwen2.5-7b", global_batch=64, gpus=8)
    assert plan.training.objective == objective
    key = {"stage": "stage", "rl": "rl", "--rlhf": "rlhf_type"}
    (asks,) = [name for word, name in key.items() if f"{word}: " in text or f"{word}_type " in text] or [
        "launch.method"
    ]
    if "loss_type sigmoid" not in text:
        alone = read_foreign(path, model="qwen2.5-7b", ignore=("rlhf_type" if "rlhf" in text else asks,))
        assert f"training.objective={objective}" not in alone.settings


@pytest.mark.parametrize(
    ("more", "reference"),
    [("", "resident"), ("--use_peft --lora_r 8", "policy"), ("--precompute_ref_log_probs true", "none")],
)
def test_the_reference_of_adapters_is_the_model_without_them(more, reference, written):
    plan = estimate_file(
        written(f"trl dpo {SCRIPT} {more} --accelerate_config zero3 --gradient_accumulation_steps 4"),
        "dgx-h100",
        gpus=8,
    )
    assert plan.training.reference_at == reference
    assert (plan.training.global_batch_size, plan.layout.mbs) == (32, 1)  # pairs, as TRL counts them


def test_pairs_of_trl_without_a_length_have_its_own(written):
    text = "trl dpo --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --accelerate_config zero3"
    assert "training.sequence_length=1024" in read_foreign(written(text)).settings


def test_a_reference_of_another_model_leaves_the_verdict_unknown(written):
    text = f"{FACTORY}stage: dpo\nfinetuning_type: full\nref_model: Qwen/Qwen2.5-14B\n"
    assert [each.key for each in read_foreign(written(text), model="qwen2.5-7b").assumed if each.settled_by] == [
        "ref_model"
    ]


def test_no_files_are_written_for_preferences(written, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    path = written(f"trl dpo {SCRIPT} --accelerate_config zero3 --gradient_accumulation_steps 4")
    assert main(["plan", "--from", str(path), "dgx-h100", "--gpus", "8", "-o", str(plan)]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "1 forward pass without gradients" in shown
    assert main(["emit", str(plan)]) == ExitCode.BAD_INPUT
    assert "training.objective is dpo" in capsys.readouterr().err
    assert main(["launch", str(plan), "--dry-run"]) == ExitCode.BAD_INPUT
    assert "training.objective is dpo" in capsys.readouterr().err


def test_an_engine_without_a_program_for_an_objective_refuses_it(capsys):
    job = ["llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "64", "--set", "training.objective=dpo"]
    assert main(["plan", *job, "--engine", "torch"]) == ExitCode.BAD_INPUT
    assert "has no program for dpo" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        f"{FACTORY}stage: sft\nfinetuning_type: full\nuse_galore: false\n",
        f"torchrun sft.py {SCRIPT} --loss_type nll # not dpo.py",
        f"swift sft {SWIFT} --freeze_vit true --freeze_parameters_ratio 0",
        f"{AXOLOTL}adapter: qlora\nlora_r: 8\nload_in_8bit: false\n",
    ],
)
def test_plain_training_is_not_refused(text, written):
    assert not [each for each in read_foreign(written(text), model="qwen2.5-7b").assumed if each.settled_by]


FSDP = """
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: {strategy}
mixed_precision: bf16
num_machines: 4
num_processes: 32
"""


@pytest.mark.parametrize(
    ("strategy", "zero", "hsdp"),
    [
        ("FULL_SHARD", "3", "1"), ("SHARD_GRAD_OP", "2", "1"), ("NO_SHARD", "0", "1"),
        ("HYBRID_SHARD", "3", "4"), ("_HYBRID_SHARD_ZERO2", "2", "4"), ("HYBRID_SHARD_ZERO2", "2", "4"),
        ("1", "3", "1"), ("2", "2", "1"), ("3", "0", "1"), ("4", "3", "4"), ("5", "2", "4"),
    ],
)  # fmt: skip
def test_a_strategy_of_fsdp_shards_over_all_ranks_or_in_each_host(strategy, zero, hsdp, written):
    path = written(FSDP.format(strategy=strategy), "fsdp.yaml")
    found = read_foreign(path, model="llama3-8b", num_devices=32, per_host=8)
    assert (found.layout["zero"], found.layout["hsdp"]) == (zero, hsdp)
    options = f"--model_name_or_path x --per_device_train_batch_size 1 --fsdp '{strategy.lower()} auto_wrap'"
    if strategy.startswith(("FULL", "HYBRID")):
        found = read_foreign(
            written(f"torchrun --nproc_per_node 8 --nnodes 4 t.py {options}"), model="llama3-8b", per_host=8
        )
        assert (found.layout["zero"], found.layout["hsdp"]) == (zero, hsdp)


def test_the_numbers_of_strategies_are_those_of_torch():
    api = pytest.importorskip("torch.distributed.fsdp.api")
    from planner.emit.programs.hugging_face import _STRATEGIES

    named = {each.value: each.name.strip("_").lower() for each in api.ShardingStrategy}
    assert dict(enumerate(_STRATEGIES, 1)) == named


def test_a_strategy_that_fsdp_does_not_have_is_refused(written):
    with pytest.raises(InputError, match="no strategy of FSDP"):
        read_foreign(written(FSDP.format(strategy="SOMETHING"), "fsdp.yaml"), model="llama3-8b")


def test_a_hybrid_strategy_on_hosts_of_unknown_size_leaves_the_verdict_unknown(written):
    path = written(FSDP.format(strategy="HYBRID_SHARD"), "fsdp.yaml")
    (only,) = read_foreign(path, model="llama3-8b", num_devices=32).assumed
    assert (only.settled_by, only.value) == ("--layout hsdp=...", "HYBRID_SHARD")
    (decided,) = with_layout(read_foreign(path, model="llama3-8b", num_devices=32), "hsdp=4").assumed
    assert (decided.key, decided.settled_by, decided.rule) == (only.key, "", "decided by --layout")


def test_adapters_beside_experts_are_read_and_counted(written):
    """By hand: rank 64 beside gate and up, which are one matrix of 4096 x 3072, and down, in 128 experts of 94 layers.

    Attention has 64 heads of 128 and 4 key-value heads.
    """
    options = "--target_modules all-linear --micro_batch_size 1 --global_batch_size 16 --max_length 1024"
    path = written(f"megatron sft --model Qwen/Qwen3-235B-A22B --tuner_type lora --lora_rank 64 {options}")
    found = read_foreign(path)
    assert found.assumed == ()
    experts = 128 * ((4096 + 2 * 1536) + (1536 + 4096))
    attention = (4096 + 8192) + 2 * (4096 + 512) + (8192 + 4096)
    targets = next(each for each in found.settings if each.startswith("training.lora_targets="))
    names = tuple(targets.partition("=")[2].strip("[]").replace(" ", "").split(","))
    training = TrainingSpec.model_construct(lora_rank=64, lora_targets=names)
    assert num_trained_params(found.model, training) == 64 * 94 * (experts + attention)
    text = "base_model: mistralai/Mixtral-8x7B-v0.1\nmicro_batch_size: 1\nsequence_len: 512\nadapter: lora\nlora_r: 8\n"
    found = read_foreign(written(f"{text}lora_target_linear: true\n", "a.yaml"), model="mixtral-8x7b", engine="fsdp")
    (targets,) = [each for each in found.settings if each.startswith("training.lora_targets=")]
    assert "expert" not in targets  # PEFT's all-linear has none
    assert "output" in targets


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_doubt_about_the_layout_does_not_stop_the_search_for_one(written):
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {RUN} --micro-batch-size 1 --global-batch-size 8 "
    path = written(
        f"{text} --max-position-embeddings 64 --use-distributed-optimizer "
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
    )
    assert estimate_file(path, "dgx-h100").unknown_because == ("optimizer_offload_fraction",)
    assert estimate_file(path, "dgx-h100", layout="offload=optimizer").verdict == "fits"
    assert plan_file(path, "dgx-h100").verdict == "fits"


def test_a_key_to_ignore_that_is_not_there_is_refused(written):
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {RUN} --micro-batch-size 1"
    with pytest.raises(InputError, match="no key nonsense without a price"):
        read_foreign(written(text), ignore=("nonsense",))
    with pytest.raises(InputError, match="no key num_layers without a price"):
        read_foreign(written(text), ignore=("num_layers",))


def test_many_keys_without_a_price_are_counted_in_one_line(written, capsys):
    text = "base_model: x/y\nmicro_batch_size: 1\nsequence_len: 512\n"
    text += "".join(f"strange_{letter}: 7\n" for letter in "abcdefghijkl")
    path = written(text, "a.yaml")
    assert main(["explain", "--from", str(path), "dgx-h100", "--model", "llama3-8b", "--gpus", "8"]) == ExitCode.OK
    shown = " ".join(capsys.readouterr().out.split())
    assert "12 not priced (strange_a=7, strange_b=7, strange_c=7, ...)" in shown


def test_a_plan_without_a_verdict_stays_without_one_when_it_is_read_again(written, tmp_path, capsys):
    assert main(["explain", "--from", str(written(f"{VERL}{REWARD}=True")), "dgx-h100", "--json"]) == ExitCode.OK
    path = Path(tmp_path / "plan.json")
    path.write_text(capsys.readouterr().out)
    assert read_plan(path).unknown_because == (REWARD,)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"{AXOLOTL}bf16: maybe\nfsdp_config: {{fsdp_version: 2}}\n", "bf16"),
        (f"{AXOLOTL}fsdp_config: [1, 2]\n", "fsdp_config"),
        ('{"zero_optimization": 3, "train_micro_batch_size_per_gpu": 1}', "zero_optimization"),
    ],
)
def test_a_value_of_another_kind_is_refused_where_it_decides(text, key, written):
    with pytest.raises(InputError) as error:
        read_foreign(written(text, "a.yaml"), model="qwen2.5-7b")
    assert key in str(error.value)


@pytest.mark.parametrize("asked", [{"why_not": "zero=2"}, {"what_if": ""}, {"batch": True}, {"scaling": "8..16"}])
def test_nothing_is_said_of_what_fits_where_that_is_unknown(asked, written):
    plan = estimate_file(written(f"{VERL}{REWARD}=True"), "dgx-h100")
    assert plan.verdict == "unknown"
    with pytest.raises(InputError, match=f"whether it fits is unknown: {REWARD}"):
        explain_layout(plan, **asked)


def test_an_old_negation_of_megatron_is_known(written):
    """`--no-position-embedding` (dest add_position_embedding) gave way to --position-embedding-type."""
    found = read_foreign(written(f"torchrun pretrain_gpt.py {RUN} --no-position-embedding"))
    assert [each for each in found.assumed if each.kind == "misspelt"] == []


OF_EACH_FORMAT = {
    "a torchtitan file (TOML of 0.2, saved JSON, emitted Python)": (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n'
        "[parallelism]\ntensor_parallel_degree = 1\nKEY = 2\n"
    ),
    "a command line of torchtitan": "torchrun -m torchtitan.train --job.config_file job.toml --parallelism.KEY 2\n",
    "a command line of verl": (
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B data.train_batch_size=64 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
        "actor_rollout_ref.actor.fsdp_config.KEY=2\n"
    ),
    "a file over verl's own": (
        "data: {train_batch_size: 64}\nactor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 64\n"
        "    ppo_micro_batch_size_per_gpu: 1\n    fsdp_config:\n      KEY: 2\n"
    ),
    "a command line of verl's fine-tuning": (
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen2.5-7B data.train_batch_size=64 "
        "data.use_dynamic_bsz=False engine.KEY=2\n"
    ),
    "a command line of ms-swift": (
        "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --max_length 2048 "
        "--deepspeed zero3 --KEY 2\n"
    ),
    "an ms-swift file": (
        "model: Qwen/Qwen2.5-7B\ntrain_type: full\nper_device_train_batch_size: 1\nmax_length: 2048\nKEY: 2\n"
    ),
    "a command line of LLaMA-Factory": (
        "llamafactory-cli train --model_name_or_path Qwen/Qwen2.5-7B --finetuning_type full --cutoff_len 2048 "
        "--per_device_train_batch_size 1 --KEY 2\n"
    ),
    "overrides of a Megatron-Bridge recipe": (
        "python run_recipe.py --recipe llama3_8b model.tensor_model_parallel_size=2 train.global_batch_size=64 "
        "train.micro_batch_size=1 model.seq_length=2048 model.KEY=2\n"
    ),
    "an experiment of Primus": (
        "modules:\n  pre_trainer:\n    framework: megatron\n    model: llama3_8B.yaml\n    overrides:\n      KEY: 2\n"
    ),
    "a command line of Primus": "primus-cli direct -- train pretrain --config primus.yaml --KEY 2\n",
    "an experiment of Primus over torchtitan": (
        "modules:\n  pre_trainer:\n    framework: torchtitan\n    model: llama3_8B.yaml\n    overrides:\n"
        "      parallelism:\n        tensor_parallel_degree: 1\n        KEY: 2\n"
    ),
    "an experiment of Primus over Megatron-Bridge": (
        "modules:\n  post_trainer:\n    framework: megatron_bridge\n    model: llama3_8B.yaml\n    overrides:\n"
        "      tensor_model_parallel_size: 2\n      KEY: 2\n"
    ),
    "a command line of NeMo RL": (
        "uv run examples/run_sft.py policy.train_micro_batch_size=1 policy.max_total_sequence_length=2048 "
        "policy.dtensor_cfg.enabled=true policy.dtensor_cfg.KEY=2\n"
    ),
    "a file of NeMo RL": (
        "sft:\n  seed: 1\npolicy:\n  train_micro_batch_size: 1\n  max_total_sequence_length: 2048\n"
        "  dtensor_cfg:\n    enabled: true\n    KEY: 2\n"
    ),
    "YAML overrides of a Megatron-Bridge recipe": (
        "model:\n  tensor_model_parallel_size: 2\n  seq_length: 2048\n  KEY: 2\ntrain:\n  global_batch_size: 64\n"
    ),
    "a command line of Megatron-LM": (
        "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --vocab-size 50304 --bf16 --KEY 2\n"
    ),
    "an Axolotl file": "base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 1\nsequence_len: 2048\nKEY: 2\n",
    "a LLaMA-Factory file": (
        "model_name_or_path: Qwen/Qwen2.5-7B\ncutoff_len: 2048\nper_device_train_batch_size: 1\nKEY: 2\n"
    ),
    "a LLaMA-Factory file of v1": "model: Qwen/Qwen2.5-7B\nmodel_class: llm\ncutoff_len: 2048\nKEY: 2\n",
    "an Accelerate file": "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  KEY: 2\n",
    "a DeepSpeed file": '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "KEY": 2}}',
    "a file of TrainingArguments": "per_device_train_batch_size: 1\nmax_length: 2048\nKEY: 2\n",
    "a command line of OpenRLHF": (
        "deepspeed --module openrlhf.cli.train_sft --pretrain Qwen/Qwen2.5-7B --bf16 --max_len 2048 --KEY 2\n"
    ),
    "a command line of Trainer or TRL": (
        "accelerate launch train.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --KEY 2\n"
    ),
}


@pytest.mark.parametrize(
    "key", ["head_parallel_size", "data_parallel_size", "expert_offload", "save_offload", "shard_stage", "eval_stage"]
)
@pytest.mark.parametrize("name", OF_EACH_FORMAT)
def test_an_invented_key_of_a_layout_stops_every_format(written, name: str, key: str) -> None:
    written('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n', "job.toml")
    written(OF_EACH_FORMAT["an experiment of Primus"].replace("      KEY: 2\n", "      seed: 1\n"), "primus.yaml")
    ending = ".sh" if "command" in name or "overrides of a M" in name[:15] else ".yaml"
    options = {"num_devices": 8, "per_host": 8, "model": "llama3-8b", "engine": "deepspeed"}
    if "torchtitan" in name or "egatron" in name or "Primus" in name:
        del options["engine"]
    path = written(OF_EACH_FORMAT[name].replace("KEY", key), f"run{ending}")
    with pytest.raises(InputError) as refused:
        read_foreign(path, **options)
    assert any(key in each.message for each in refused.value.mistakes), refused.value


def test_every_format_has_its_invented_key() -> None:
    assert {*OF_EACH_FORMAT} == {each.name for each in READERS}
