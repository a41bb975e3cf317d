"""Keys of training programs' configuration classes, by release, and files that are refused by their program's name."""

from __future__ import annotations

import pytest

from planner.api import estimate_file
from planner.emit.read.front import read_foreign
from planner.errors import InputError


@pytest.fixture
def read(tmp_path):
    """What is read of a file with this text."""

    def reading(text, name="run.sh", **given):
        path = tmp_path / name
        path.write_text(text)
        return read_foreign(path, **{"model": "qwen2.5-7b", "num_devices": 8, "per_host": 8, **given})

    return reading


def opened(found) -> list[str]:
    return [each.key for each in found.assumed if each.kind == "open"]


ACTOR = "actor_rollout_ref.actor."
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_prompt_length=1024 "
    f"data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B {ACTOR}ppo_mini_batch_size=64 "
    f"{ACTOR}ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=8 "
)


@pytest.mark.parametrize(
    ("options", "layout", "settings"),
    [
        ("", "zero=3,mbs=2", ()),
        (f"{ACTOR}strategy=fsdp2 {ACTOR}fsdp_config.reshard_after_forward=False", "zero=2", ()),
        (f"{ACTOR}fsdp_config.model_dtype=bf16", "zero=3", ("training.memory_recipe=pure-bf16",)),
        (f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size=2", "cp=2", ()),
        (f"{ACTOR}megatron.tensor_model_parallel_size=2 {ACTOR}megatron.sequence_parallel=False", "tp=2,sp=0", ()),
        (f"model_engine=megatron {ACTOR}megatron.tensor_model_parallel_size=2", "tp=2,sp=1,zero=1", ()),
        ("--config-name=ppo_megatron_trainer.yaml", "zero=1", ()),
        (
            "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
            "zero=3",
            ("training.lora_rank=8", "training.lora_targets=[query,value]"),
        ),
        (
            (
                "--config-name=ppo_megatron_trainer actor_rollout_ref.model.lora.rank=16 "
                "actor_rollout_ref.model.lora.target_modules=['linear_qkv']"
            ),
            "zero=1",
            ("training.lora_rank=16", "training.lora_targets=[query,key,value]"),
        ),
    ],
)
def test_verl_of_each_release(options, layout, settings, read) -> None:
    """By hand from verl v0.2 to v0.7.0, trainer/config and workers/fsdp_workers.py."""
    found = read(f"{VERL}{options}\n")
    wanted = dict(part.split("=") for part in layout.split(","))
    assert {key: found.layout.get(key) for key in wanted} == wanted
    assert {*settings, "training.global_batch_size=256"} <= set(found.settings)
    assert not opened(found)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ("hinter.model.path=Qwen/Qwen3-4B", "hinter.model.path"),
        ("reward_model.prime_model.path=a/b", "reward_model.prime_model.path"),
        ("+actor_rollout_ref.rollout.limit_audios=8", "actor_rollout_ref.rollout.limit_audios"),
        ("actor_rollout_ref.model.mtp.enable=True", "actor_rollout_ref.model.mtp.enable"),
        ("critic.model.path=Qwen/Qwen2.5-7B reward_model.model.path=a/b", ""),  # neither is built without its switch
    ],
)
def test_a_second_model_beside_the_actor_leaves_the_verdict_open(options, key, read) -> None:
    assert opened(read(f"{VERL}{options}\n")) == ([key] if key else [])


def test_a_microbatch_of_all_ranks_is_of_prompts_or_of_answers_by_release(read) -> None:
    """Until release 0.2 fsdp_workers.py multiplied it by rollout.n, after the division by the ranks."""
    old = VERL.replace("ppo_micro_batch_size_per_gpu=2", "ppo_micro_batch_size=16")
    found = read(old)
    assert (found.layout["mbs"], opened(found)) == ("2", [f"{ACTOR}ppo_micro_batch_size"])
    assert not opened(read(old.replace("rollout.n=4", "rollout.n=1")))
    with pytest.raises(InputError, match="4 are fewer than one for each of 8 ranks"):
        read(old.replace("batch_size=16", "batch_size=4"))


def test_recomputation_of_verls_older_fine_tuning_is_open_unless_it_is_said(read) -> None:
    """sft_trainer.yaml: enable_gradient_checkpointing is False until v0.3.0, and True since v0.4.0."""
    text = "torchrun --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen2.5-7B "
    key = "model.enable_gradient_checkpointing"
    assert opened(read(text)) == [f"actor_rollout_ref.{key}"]
    for value, policy in (("True", "full"), ("False", "none")):
        found = read(f"{text} {key}={value}")
        assert (found.layout["recompute"], opened(found)) == (policy, [])


def test_verls_run_that_only_validates_is_refused(read) -> None:
    with pytest.raises(InputError, match="only validates"):
        read(f"{VERL}+trainer.val_only=True")


OWN = """
defaults: [ppo_trainer, _self_]
hydra: {searchpath: [pkg://verl.trainer.config]}
algorithm: {adv_estimator: grpo}
data: {max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B}
  actor:
    ppo_mini_batch_size: 32
    ppo_micro_batch_size_per_gpu: 4
    strategy: ${trainer.strategy}
  rollout: {n: 2}
trainer: {nnodes: 2, n_gpus_per_node: 4}
"""


def test_verls_own_file_is_read_alone_and_below_a_command(tmp_path, read) -> None:
    found = read(OWN, "mine.yaml", model=None)
    assert (found.layout["mbs"], found.num_hosts, found.num_devices, found.model.name) == ("4", 2, 8, "qwen2.5-7b")
    assert {"training.global_batch_size=64", "training.sequence_length=1536"} <= set(found.settings)
    command = f"python3 -m verl.trainer.main_ppo --config-path=. --config-name=mine {ACTOR}ppo_mini_batch_size=8"
    found = read(command)
    assert (found.layout["mbs"], found.num_devices) == ("4", 8)
    assert "training.global_batch_size=16" in found.settings
    (tmp_path / "mine.yaml").unlink()
    with pytest.raises(InputError, match=r"config names mine\.yaml, which is neither beside the file nor here"):
        read(command)


TITAN = '[model]\nname = "{name}"\nflavor = "8B"\n[training]\nseq_len = 2048\nbatch_size = 2\n{training}\n{rest}\n'


def titan(training="", rest="", name="llama3") -> str:
    return TITAN.format(training=training, rest=rest, name=name)


@pytest.mark.parametrize(
    ("text", "layout", "precision", "batch"),
    [
        (titan("enable_loss_parallel = true\ndata_parallel_type = 'fsdp'"), "zero=3", "bf16", 16),
        (titan("fsdp_reshard_after_forward = 'never'"), "zero=2", "bf16", 16),
        (titan("tensor_parallel_degree = 4\npipeline_parallel_degree = 1"), "tp=4", "bf16", 4),
        (titan("gradient_accumulation_steps = 3"), "mbs=2", "bf16", 48),
        (titan(rest="[float8]\nenable_float8_linear = true"), "zero=3", "fp8", 16),
        (titan(rest='[parallelism]\nexpert_parallel_comm_backend = "standard"'), "zero=3", "bf16", 16),
        (titan(rest="[experimental]\npipeline_parallel_split_points = []"), "zero=3", "bf16", 16),
    ],
)
def test_torchtitan_of_each_release(text, layout, precision, batch, read) -> None:
    """By hand from torchtitan's config_manager.py of 2024 and 2025, and config/job_config.py of 0.2.2."""
    found = read(text, "a.toml", model="llama3-8b")
    wanted = dict(part.split("=") for part in layout.split(","))
    assert {key: found.layout.get(key) for key in wanted} == wanted
    assert {f"training.precision={precision}", f"training.global_batch_size={batch}"} <= set(found.settings)
    assert not opened(found)


def test_another_vocabulary_or_another_encoder_of_torchtitan(read) -> None:
    assert opened(read(titan("vocab_size = 256"), "a.toml", model="llama3-8b")) == ["training.vocab_size"]
    with pytest.raises(InputError, match="an encoder beside the model"):
        read(titan(name="llama3-siglip2"), "a.toml", model="llama3-8b")


@pytest.mark.parametrize("key", ["grad_accum_steps", "gradient_accumulation_steps", "accumulate_grad_batches"])
def test_rounds_of_microbatches_that_no_table_has_stop_the_reading(key, read) -> None:
    with pytest.raises(InputError, match="the layout may depend on this key"):
        read(f"{VERL}{ACTOR}{key}=4")
    assert read(f"{VERL}{ACTOR}{key}=1").layout["mbs"] == "2"


@pytest.mark.parametrize(
    ("program", "text", "way"),
    [
        ("torchtune", "tune run --nproc_per_node 8 full_finetune_distributed --config a.yaml", "planner explain"),
        ("litgpt", "litgpt finetune_lora Qwen/Qwen3-8B --devices 8", "planner explain"),
        ("litgpt", "litgpt pretrain --config config.yaml", "planner explain"),
        (
            "Composer and llm-foundry",
            "parameters:\n  global_train_batch_size: 16\n  device_train_microbatch_size: 1\n  fsdp_config: {}\n",
            "planner explain",
        ),
        ("EasyR1", "python3 -m verl.trainer.main config=a.yaml worker.actor.model.model_path=a/b", "main_ppo"),
        ("EasyR1", "worker:\n  actor:\n    global_batch_size: 128\n", "main_ppo"),
        ("NeMo 2", "import nemo_run as run\nfrom nemo.collections import llm\n", "Megatron-Bridge"),
    ],
)
def test_programs_that_are_not_read_are_named_with_a_way_out(program, text, way, read) -> None:
    with pytest.raises(InputError, match=f"is a file of {program}, which is not read") as caught:
        read(text, "a.txt")
    assert way in caught.value.mistakes[0].hint


def test_microbatches_of_nemo_rl_by_tokens_leave_the_verdict_open(tmp_path) -> None:
    text = (
        "sft: {max_num_steps: 60}\npolicy:\n  model_name: meta-llama/Llama-3.1-8B\n  train_global_batch_size: 32\n"
        "  train_micro_batch_size: 1\n  max_total_sequence_length: 1024\n  dynamic_batching: {enabled: true}\n"
        "  dtensor_cfg: {enabled: true, tensor_parallel_size: 2}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    (tmp_path / "a.yaml").write_text(text)
    plan = estimate_file(tmp_path / "a.yaml", "dgx-h100")
    assert (plan.layout.tp, plan.layout.mbs, plan.verdict) == (2, 1, "unknown")


RUN = "accelerate launch --num_processes 16 sft.py --model_name_or_path $MODEL --per_device_train_batch_size 1 "
RUN += "--bf16 --max_length 2048 --accelerate_config zero3"


@pytest.mark.parametrize(
    "text",
    [
        f"envs:\n  MODEL: Qwen/Qwen2.5-7B\n  TOKEN:\nsetup: |\n  echo it's\nrun: |\n  pip install trl\n  {RUN}\n",
        f"type: task\nnodes: 2\nenv:\n  - TOKEN\n  - MODEL=Qwen/Qwen2.5-7B\ncommands:\n  - cd x\n  - {RUN}\n",
        f"apiVersion: ray.io/v1\nkind: RayJob\nspec:\n  entrypoint: {RUN.replace('$MODEL', 'Qwen/Qwen2.5-7B')}\n",
        (
            "apiVersion: v1\nkind: Service\n---\napiVersion: batch/v1\nkind: Job\nspec:\n  template:\n    spec:\n"
            "      containers:\n      - env:\n        - {name: MODEL, value: Qwen/Qwen2.5-7B}\n"
            f"        command: [/bin/bash, -c]\n        args:\n        - |\n          set -e\n          {RUN}\n"
        ),
        (
            "apiVersion: batch/v1\nkind: Job\nspec:\n  template:\n    spec:\n      containers:\n      - command:\n"
            + "".join(f"        - {word}\n" for word in RUN.replace("$MODEL", "Qwen/Qwen2.5-7B").split()[:5])
            + "        args:\n"
            + "".join(f"        - {word!r}\n" for word in RUN.replace("$MODEL", "Qwen/Qwen2.5-7B").split()[5:])
        ),
    ],
    ids=["SkyPilot", "dstack", "RayJob", "script of a Job", "words of a Job"],
)
def test_commands_in_files_of_launchers_are_read(text, read) -> None:
    found = read(text, "job.yaml", model=None)
    assert (found.model.name, found.layout["zero"], found.layout["mbs"], found.num_devices) == (
        "qwen2.5-7b",
        "3",
        "1",
        16,
    )


@pytest.mark.parametrize(
    ("size", "devices"),
    [
        ("num_nodes: 2\nresources:\n  accelerators: H100:8", 16),
        ("num_nodes: 4\nresources:\n  accelerators: {A100-80GB: 4}", 16),
        ("resources: {accelerators: 'H100:8'}\nnum_nodes: 1", 8),
    ],
)
def test_sizes_of_a_launcher_are_the_variables_that_it_sets(size, devices, read) -> None:
    """SkyPilot, environment-variables.rst: SKYPILOT_NUM_NODES and SKYPILOT_NUM_GPUS_PER_NODE."""
    run = f"{VERL}trainer.nnodes=$SKYPILOT_NUM_NODES".replace("node=8", "node=$SKYPILOT_NUM_GPUS_PER_NODE")
    assert read(f"{size}\nrun: |\n  {run}\n", "sky.yaml", num_devices=0).num_devices == devices


@pytest.mark.parametrize(
    ("gpu", "devices"),
    [("8", 16), ("H100:8", 16), ("80GB:8", 16), ("{name: H100, count: 8}", 16), ("24GB", 0), ("A100:40GB", 0)],
)
def test_bytes_of_a_device_are_no_number_of_devices(gpu, devices, read) -> None:
    """dstack, task.md: `gpu` has a name, bytes and a number, of which each may be left out."""
    run = RUN.replace("_processes 16", "_processes $((2 * DSTACK_GPUS_PER_NODE))").replace("$MODEL", "Qwen/Qwen2.5-7B")
    text = f"type: task\nnodes: 2\ncommands: ['{run}']\nresources:\n  gpu: {gpu}\n"
    if devices:
        assert read(text, "job.yaml", model=None).num_devices == devices
        return
    with pytest.raises(InputError, match="DSTACK_GPUS_PER_NODE"):
        read(text, "job.yaml", model=None)


def test_a_variable_that_a_launcher_passes_on_has_no_value(read) -> None:
    with pytest.raises(InputError, match="MODEL"):
        read(f"type: task\nenv:\n  - MODEL\ncommands:\n  - {RUN}\n", "job.yaml", model=None)


@pytest.mark.parametrize("text", ["env: &env\n  A: 1\nrun: |\n  {}\n", "setup: *env\ncommands:\n  - {}\n"])
def test_anchors_in_a_launcher_s_file_are_not_swallowed(text, read) -> None:
    """The reader of YAML has none; the text had been read as if it were a script."""
    with pytest.raises(InputError, match="are not read") as caught:
        read(text.format(RUN), "sky.yaml")
    assert "sky.yaml:1" in caught.value.mistakes[0].where


@pytest.mark.parametrize(("agents", "batch"), [(1, 64), (3, 192), (5, 256)])
def test_answers_of_agents_are_samples_of_a_batch(agents, batch, read) -> None:
    """By hand from Search-R1: 64 prompts have `n_agent` answers each, of which one update takes at most 256."""
    text = VERL.replace("rollout.n=4", f"rollout.n_agent={agents}").replace("mini_batch_size=64", "mini_batch_size=256")
    found = read(f"{text} data.train_batch_size=64 {ACTOR}state_masking=True")
    assert f"training.global_batch_size={batch}" in found.settings
    assert not opened(found)


@pytest.mark.parametrize(
    ("section", "is_open"), [("[freezing]\nfreeze = true", True), ("[freezing]\nfreeze = false", False)]
)
def test_a_section_of_a_fork_of_torchtitan_leaves_the_verdict_open(section, is_open, read) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 1024\n' + section
    assert opened(read(text, "run.toml", model=None)) == (["freezing.freeze"] if is_open else [])


def test_lines_of_mistakes_are_those_of_the_launcher_s_file(read) -> None:
    with pytest.raises(InputError) as caught:
        read(f"name: a\nsetup: |\n  echo\nrun: |\n  {VERL}{ACTOR}fsdp_config.model_dtype=int8\n", "sky.yaml")
    assert caught.value.mistakes[0].where.endswith("sky.yaml:5")


NEMO = (
    "policy.model_name=Qwen/Qwen2.5-7B policy.train_global_batch_size=64 policy.train_micro_batch_size=2 "
    "policy.max_total_sequence_length=2048 policy.dtensor_cfg.enabled=True policy.dtensor_cfg.tensor_parallel_size=2 "
    "policy.precision=bfloat16 sft.max_num_steps=10 cluster.gpus_per_node=8 cluster.num_nodes=1"
)


@pytest.mark.parametrize(
    "text",
    [
        "uv run examples/run_sft.py --config a.yaml {}\n",
        'COMMAND="uv run ./examples/run_sft.py --config a.yaml {}" \\\nsbatch --nodes=1 ray.sub\n',
    ],
    ids=["command", "text for ray.sub"],
)
@pytest.mark.parametrize(("more", "offload"), [("", "none"), ("policy.dtensor_cfg.cpu_offload=True", "optimizer")])
def test_commands_of_nemo_rl_are_read(text, more, offload, tmp_path, read) -> None:
    (tmp_path / "a.yaml").write_text("policy: {precision: float32}\nsft: {max_num_epochs: 1}\n")
    found = read(text.format(f"{NEMO} {more}"), model=None)
    assert found.model.name == "qwen2.5-7b"
    expected = {"tp": "2", "mbs": "2", "zero": "3", "offload": offload}
    assert {"offload": "none", **found.layout}.items() >= expected.items()


OPENRLHF = (
    "deepspeed --module openrlhf.cli.{} --pretrain {} --zero_stage 3 --max_len 2048 --bf16 --micro_train_batch_size 1"
)


@pytest.mark.parametrize("trainer", ["train_ebft_ray", "train_compressor"])
def test_trainers_that_openrlhf_does_not_have_are_refused(trainer, read) -> None:
    with pytest.raises(InputError, match="this trainer, which is not the program's own"):
        read(OPENRLHF.format(trainer, "Qwen/Qwen2.5-7B"))
    assert read(OPENRLHF.format("train_sft", "Qwen/Qwen2.5-7B"), model=None).layout["zero"] == "3"


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-VL-7B-Instruct", "llava-hf/llava-1.5-7b-hf", "OpenGVLab/InternVL3-8B"])
def test_names_of_models_with_an_encoder_are_refused_unless_ignored(name, read) -> None:
    text = OPENRLHF.format("train_sft", name)
    with pytest.raises(InputError, match="an encoder of images or sound"):
        read(text)
    assert read(text, ignore=("launch.model",)).layout["zero"] == "3"


@pytest.mark.parametrize("option", ["mse_loss", "compress_rate", "distill_weight"])
def test_a_further_loss_of_own_code_leaves_the_verdict_open(option, tmp_path, read) -> None:
    (tmp_path / "z.json").write_text('{"zero_optimization": {"stage": 3}}')
    text = f"accelerate launch train.py --model_name_or_path Qwen/Qwen2.5-7B --bf16 --deepspeed z.json --{option} 4"
    assert option in opened(read(text))


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "grad_accumulation_steps", "grad_accum_steps"])
def test_rounds_of_microbatches_in_forks_of_torchtitan(key, read) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 2048\n'
    assert "training.global_batch_size=64" in read(f"{text}{key} = 4\n", "a.toml", model="llama3-8b").settings


def test_a_variable_of_a_job_without_a_value_is_no_variable(read) -> None:
    text = (
        "apiVersion: batch/v1\nkind: Job\nspec:\n  containers:\n  - env:\n    - {name: KEY, valueFrom: {a: b}}\n"
        f"    - {{name: MODEL, value: Qwen/Qwen2.5-7B}}\n    command: [bash, -c]\n    args: ['{VERL}']\n"
    )
    assert read(text, "job.yaml").layout["mbs"] == "2"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("run: first\nmodel_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_type: full\nbf16: true\n", "a.yaml"),
        (
            f"echo 'a fine-tune run'\n{RUN.replace('$MODEL', 'Qwen/Qwen2.5-7B')} --run_name full_finetune_distributed",
            "a.sh",
        ),
    ],
    ids=["a key `run` of a training", "words of torchtune in a title"],
)
def test_a_title_is_no_sign_of_another_program(text, name, read) -> None:
    batch = "per_device_train_batch_size: 1\n" if name == "a.yaml" else ""
    assert read(text + batch, name, model=None).layout["mbs"] == "1"


def test_ranks_of_a_job_s_replicas_are_not_those_of_one_command(read) -> None:
    """Kubeflow, pytorch/envvar.go: torchrun reads its numbers from PET_NNODES and PET_NPROC_PER_NODE."""
    words = RUN.replace("$MODEL", "Qwen/Qwen2.5-7B").replace(" --accelerate_config zero3", "").split()[5:]
    text = "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec:\n  pytorchReplicaSpecs:\n    Worker:\n      SIZE\n"
    text += f"      template: {{spec: {{containers: [{{command: [torchrun, train.py], args: {words!r}}}]}}}}\n"
    assert read(text.replace("SIZE", "replicas: 2"), "job.yaml", model=None, engine="deepspeed").num_devices == 0
    alone = text.replace("SIZE", "name: a")
    assert read(alone, "job.yaml", model=None, engine="deepspeed").num_devices == 1
