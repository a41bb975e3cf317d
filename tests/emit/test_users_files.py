"""Commands and files of users of transformers' Trainer, as the programs themselves take them; each rule by hand."""

from __future__ import annotations

import pytest

from planner.api import estimate_file
from planner.emit.read.front import read_foreign, shipped_model
from planner.errors import InputError

RUN = "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16 True"
ZERO = "--deepspeed ds.json"
OF_RLHF = "--pretrain Qwen/Qwen2.5-7B --max_len 512 --micro_train_batch_size 1 --lora_rank 8 --load_in_4bit"
OF_SWIFT = "--model Qwen/Qwen2.5-7B --max_length 512 --per_device_train_batch_size 2 --quant_method bnb"
OF_FACTORY = "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nper_device_train_batch_size: 2\nbf16: true\n"
NOT_NESTED = "bnb_config_kwargs: {bnb_4bit_use_double_quant: false}\n"
OF_AXOLOTL = "base_model: Qwen/Qwen2.5-7B\nsequence_len: 512\nmicro_batch_size: 2\nlora_r: 8\nadapter: qlora\n"


@pytest.fixture(autouse=True)
def file_of_deepspeed(tmp_path):
    """The file that commands name, beside them."""
    (tmp_path / "ds.json").write_text('{\n\t"zero_optimization": {\n\t\t"stage": 2\n\t}\n}\n')  # tabs are JSON's


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("python train.py", 1),
        ("nohup python3.11 -u train.py", 1),
        ("torchrun train.py", 1),  # torch, distributed/run.py: --nproc-per-node is 1
        ("torchrun --nproc_per_node 4 train.py", 4),
        ("deepspeed --include localhost:2,3 train.py", 2),
        ('deepspeed --include="localhost:4,5,6" train.py', 3),
        ("deepspeed --include=a:0,1@b:0,1 train.py", 0),  # several hosts
        ("export CUDA_VISIBLE_DEVICES=5,6\ndeepspeed --hostfile hosts train.py", 0),
        ("deepspeed --num_gpus 4 train.py", 4),
        ("deepspeed --hostfile hosts --num_gpus 4 train.py", 0),
        ("deepspeed --hostfile hosts --num_nodes 2 --num_gpus 4 train.py", 8),
        ("CUDA_VISIBLE_DEVICES=3 python train.py", 1),
        ("CUDA_VISIBLE_DEVICES=0,1 python train.py", 0),  # transformers, training_args.py: n_gpu is 2, in one process
        ("export CUDA_VISIBLE_DEVICES=5,6\ndeepspeed train.py", 2),
        ("# CUDA_VISIBLE_DEVICES=5,6\ndeepspeed train.py", 0),
        ("deepspeed train.py", 0),
        ("CUDA_VISIBLE_DEVICES=5,6 accelerate launch --multi_gpu train.py", 0),  # as its own file says
        ("python -m accelerate.commands.launch train.py", 0),
        ("srun python train.py", 0),
    ],
)
def test_a_launcher_without_a_number_starts_what_its_program_starts(command, ranks, written) -> None:
    assert read_foreign(written(f"{command} {RUN} {ZERO}"), num_devices=8).num_devices == ranks


def test_ms_swift_starts_one_rank_unless_its_environment_says_more(written) -> None:
    """ms-swift, cli/main.py: torchrun only with NPROC_PER_NODE or NNODES."""
    text = "swift sft --model Qwen/Qwen2.5-7B --max_length 512 --per_device_train_batch_size 2"
    assert read_foreign(written(text), num_devices=8).num_devices == 1
    assert read_foreign(written(f"NPROC_PER_NODE=4 {text}"), num_devices=8).num_devices == 4


def test_a_command_of_llama_factory_is_read_as_its_file(written) -> None:
    """LLaMA-Factory ff6d4d12, hparams: adapters of rank 8 on all matrices, recomputation, 2,048 tokens."""
    keys = {"stage": "sft", "model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": "2"}
    more = {"finetuning_type": "lora", "lora_rank": "4", "quantization_bit": "4"}
    for extra in ({"finetuning_type": "full", "bf16": "true"}, more):
        said = {**keys, **extra}
        of_file = read_foreign(written("".join(f"{key}: {said[key]}\n" for key in said), "a.yaml"), num_devices=4)
        options = " ".join(f"--{key} {value}" for key, value in said.items())
        for start, ranks in (
            ("CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train", 4),
            ("deepspeed --num_gpus 4 src/train.py", 4),
            ("python src/train_bash.py", 1),
            ("cp a.yml b.yml\nFORCE_TORCHRUN=1 NNODES=2 CUDA_VISIBLE_DEVICES=0,1 python -m llamafactory.cli train", 4),
        ):
            found = read_foreign(written(f"{start} {options}"), num_devices=4)
            told, wanted = ({each for each in one.settings if "engine." not in each} for one in (found, of_file))
            batches = {f"training.global_batch_size={2 * number}" for number in (ranks, 4)}
            assert told - batches == wanted - batches
            assert (found.layout["recompute"], found.num_devices) == ("full", ranks)
            assert "training.sequence_length=2048" in told


def test_accelerate_with_all_on_its_command_line(written) -> None:
    text = (
        f"accelerate launch --num_processes 8 --mixed_precision fp16 OPTIONS train.py {RUN.replace('--bf16 True', '')}"
    )
    for options, layout in (
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP", ("fsdp", "2", "none")),
        ("--use_fsdp --fsdp_version 2 --fsdp_offload_params true", ("fsdp", "3", "optimizer")),
        ("--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu", ("deepspeed", "3", "optimizer")),
        ("--multi_gpu", ("deepspeed", "0", "none")),
    ):
        found = read_foreign(written(text.replace("OPTIONS", options)))
        assert (found.engine, found.layout["zero"], found.layout["offload"], found.num_devices) == (*layout, 8)
        assert "training.precision=fp16" in found.settings
    with pytest.raises(InputError, match="no file says which program shards"):
        read_foreign(written(text.replace("OPTIONS", "")))


def test_newer_releases_of_trl_recompute_and_compute_in_16_bits(written) -> None:
    """TRL f2cd5771, trainer/base_config.py and sft_config.py; options of older releases mean older defaults."""
    run = "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2"
    for command in ("trl sft", "python trl/scripts/sft.py"):
        found = read_foreign(written(f"{command} {run}"))
        assert {"training.precision=bf16", "training.sequence_length=1024"} <= set(found.settings)
        assert found.layout["recompute"] == "full"
    for own in (f"python sft.py {run}", f"trl sft {run} --max_seq_length 1024", f"trl sft {run} --torch_dtype float32"):
        found = read_foreign(written(own))
        assert ("training.precision=fp32" in found.settings, found.layout["recompute"]) == (True, "none")
    found = read_foreign(written(f"trl sft {run} --fp16 --gradient_checkpointing false"))
    assert ("training.precision=fp16" in found.settings, found.layout["recompute"]) == (True, "none")


@pytest.mark.parametrize(
    "options",
    [
        "--vision_tower a/b",
        "--fix_vit True",
        "--moe_enable True",
        "--alpha 64",
        "--use_lora_adapter 1x",
        "--pre_seq_len 128",
        "--rank 256",
        "--has_memory True",
        "--use_fisher",
        "--quantization_bit 4",
        "--load_in_4bit",
        "--unfreeze_top 4",
    ],
)
def test_what_own_code_may_add_or_freeze_leaves_the_verdict_open(options, written) -> None:
    text = f"torchrun --nproc_per_node 8 train.py {RUN} --model_max_length 512 {ZERO} "
    assert estimate_file(written(text), "dgx-h100").verdict != "unknown"
    assert estimate_file(written(text + options), "dgx-h100").verdict == "unknown"
    assert estimate_file(written(text + options), "dgx-h100", ignore=[options.split()[0][2:]]).verdict != "unknown"


@pytest.mark.parametrize(
    "options", ["--train_type use_lora", "--tuning_method p-tuning", "--mode freeze", "--do_predict"]
)
def test_what_own_code_trains_is_refused_by_its_name(options, written) -> None:
    text = f"torchrun --nproc_per_node 8 train.py {RUN} --model_max_length 512 "
    key = options.split()[0][2:]
    with pytest.raises(InputError, match=key):
        read_foreign(written(text + options))
    read_foreign(written(f"{text}--train_type sft --do_predict --do_train"))


def test_options_of_adapters_that_are_off_change_nothing(written) -> None:
    text = f"torchrun --nproc_per_node 8 sft.py {RUN} --model_max_length 512"
    text += " --use_peft False"
    off = f"{text} --lora_r 8 --lora_alpha 16 --lora_target_modules q_proj"
    plain, found = read_foreign(written(text)), read_foreign(written(off))
    assert (plain.settings, plain.layout) == (found.settings, found.layout)
    assert not [each for each in found.assumed if each.kind == "open"]


def test_four_bits_of_ms_swift_and_stages_that_llama_factory_has_not(written) -> None:
    text = "swift sft --model Qwen/Qwen2.5-7B --max_length 512 --per_device_train_batch_size 2 "
    for options in ("--quant_bits 4 --quant_method bnb --bnb_4bit_quant_type nf4", "--quantization_bit 4"):
        assert "training.frozen_weights=nf4" in read_foreign(written(text + options)).settings
    keys = "model_name_or_path: Qwen/Qwen2.5-7B\nfinetuning_type: full\ncutoff_len: 512\nstage: "
    for stage in ("pt", "sft"):
        read_foreign(written(f"{keys}{stage}\n", "a.yaml"), num_devices=8)
    with pytest.raises(InputError, match="which is none of LLaMA-Factory"):
        read_foreign(written(f"{keys}lvm\n", "a.yaml"), num_devices=8)


@pytest.mark.parametrize(
    "options", ["--use_wandb True", "--load_best_model_at_end", "--use_flash_attention_2", "--a False"]
)
def test_switches_that_change_no_step_leave_the_verdict(options, written) -> None:
    text = f"torchrun --nproc_per_node 8 train.py {RUN} --model_max_length 512 {ZERO} {options}"
    assert estimate_file(written(text), "dgx-h100").verdict != "unknown"


@pytest.mark.parametrize("start", ["swift sft", "python -m swift.cli.sft", "python -m swift.cli.main sft"])
def test_ms_swift_has_several_ways_to_start(start, written) -> None:
    """ms-swift 3602360a, cli/main.py: `swift sft` runs the file cli/sft.py."""
    found = read_foreign(written(f"NPROC_PER_NODE=4 {start} {OF_SWIFT} --tuner_type full --deepspeed zero3"))
    assert (found.layout["zero"], found.num_devices) == ("3", 4)
    path = written(f"python -m swift.cli.main rlhf {OF_SWIFT} --rlhf_type grpo --tuner_type lora")
    assert "training.objective=grpo" in read_foreign(path, settings=["training.sequence_length=512"]).settings


def test_a_script_with_options_of_openrlhf_is_of_its_kind(written) -> None:
    text = f"deepspeed --num_gpus 2 ../train_dpo_local.py {OF_RLHF} --train_batch_size 8 --zero_stage 3"
    plan = estimate_file(written(text), "dgx-h100")
    assert (plan.layout.zero, plan.layout.mbs, plan.training.objective, plan.verdict) == (3, 1, "dpo", "unknown")


@pytest.mark.parametrize(
    ("model", "is_refused"),
    [
        ("openai/whisper-large-v3", True),
        ("facebook/mbart-large-50", True),
        ("/data/audio-vision/omni-runs/Qwen2.5-7B", False),  # folders above it are of somebody's project
        ("/own/llava-runs/llama/Qwen2.5-7B", False),
        ("/own/saves/qwen2-vl-7b/v1-20250101-120000/checkpoint-400", True),
        ("own/bartleby-7b-chat", False),
    ],
)
def test_a_model_s_own_name_tells_another_architecture(model, is_refused, written) -> None:
    text = f"torchrun --nproc_per_node 8 train.py {RUN} --model_max_length 512 {ZERO}".replace("Qwen/Qwen2.5-7B", model)
    if is_refused:
        with pytest.raises(InputError, match="has no price here"):
            read_foreign(written(text), model="qwen2.5-7b")
    else:
        assert read_foreign(written(text), model="qwen2.5-7b").num_devices == 8


def test_a_command_without_options_names_its_file(written) -> None:
    keys = "model_name_or_path: Qwen/Qwen2.5-7B\nfinetuning_type: full\ncutoff_len: 512\nstage: sft\n"
    written(keys, "a.yaml")
    text = "cd LLaMA-Factory\nmkdir -p logs\nllamafactory-cli train a.yaml 2>&1 | tee logs/a.log\n"
    assert "training.sequence_length=512" in read_foreign(written(text), num_devices=8).settings


def test_a_script_with_options_of_deepspeed_of_its_own(written) -> None:
    text = f"deepspeed main.py {RUN} --max_seq_len 512 --zero_stage 3 --deepspeed"
    found = read_foreign(written(text), num_devices=8)
    assert (found.layout["zero"], "training.sequence_length=512" in found.settings) == ("3", True)
    with pytest.raises(InputError, match="offload: the layout may depend on this key"):
        read_foreign(written(f"{text} --offload"), num_devices=8)


@pytest.mark.parametrize(
    ("script", "is_own"),
    [
        ("trl/scripts/grpo.py", False),
        ("src/open_r1/grpo.py", False),
        ("src/own/grpo.py", True),
        ("src/grpo_agent.py", True),
        ("GRPO-train.py", True),
        ("grpo/main.py", True),
    ],
)
def test_generation_by_other_peoples_code_leaves_the_verdict_open(script, is_own, written) -> None:
    text = f"torchrun --nproc_per_node 8 {script} {RUN} --max_prompt_length 256 --max_completion_length 256 {ZERO}"
    plan = estimate_file(written(text), "dgx-h100")
    assert (plan.training.objective, plan.verdict == "unknown") == ("grpo", is_own)


def test_an_engine_on_a_device_of_its_own_takes_no_memory(written) -> None:
    """TRL 0.14 to 0.16, trainer/grpo_trainer.py: `auto` is the device behind those of the ranks."""
    text = f"torchrun --nproc_per_node 7 grpo.py {RUN} --max_prompt_length 256 --use_vllm "
    text += "--vllm_gpu_memory_utilization 0.7 "
    for device, is_open in (("auto", False), ("cuda:7", False), ("cuda:0", True)):
        plan = estimate_file(written(f"{text}{ZERO} --vllm_device {device}"), "dgx-h100", gpus=8)
        assert (plan.verdict == "unknown") == is_open


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("Qwen/Qwen2-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-Coder-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-Math-72B-Instruct", "qwen2.5-72b"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b-a35b"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama3-8b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", None),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("lmsys/vicuna-13b-v1.5", "llama2-13b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"),
        ("HuggingFaceH4/zephyr-7b-beta", "mistral-7b"),
        ("Qwen/Qwen2-VL-7B-Instruct", None),
        ("own/vicuna-33b-v1.3", None),
    ],
)
def test_models_of_the_same_shapes_have_other_names_on_the_hub(name, ours) -> None:
    assert shipped_model(name) == ours


def test_a_file_of_ms_swift_is_read_as_its_command(written) -> None:
    said = {"model": "Qwen/Qwen2.5-7B", "train_type": "lora", "max_length": "512", "deepspeed": "zero3"}
    found = read_foreign(written("".join(f"{key}: {said[key]}\n" for key in said), "a.yaml"), num_devices=8)
    command = " ".join(f"--{key} {value}" for key, value in said.items())
    of_command = read_foreign(written(f"NPROC_PER_NODE=8 swift sft {command}"), num_devices=8)
    assert (found.layout, found.settings) == (of_command.layout, of_command.settings)


@pytest.mark.parametrize(
    ("text", "name", "is_nested"),
    [
        (f"trl sft {RUN} --use_peft --load_in_4bit", "a.sh", False),  # trl, trainer/model_config.py
        (f"trl sft {RUN} --use_peft --load_in_4bit --use_bnb_nested_quant", "a.sh", True),
        (f"python sft.py {RUN} --use_peft --load_in_4bit --bnb_4bit_use_double_quant True", "a.sh", True),
        (f"deepspeed --num_gpus 2 --module openrlhf.cli.train_sft {OF_RLHF}", "a.sh", True),
        (f"swift sft {OF_SWIFT} --quant_bits 4", "a.sh", True),
        (f"swift sft {OF_SWIFT} --quant_bits 4 --bnb_4bit_use_double_quant false", "a.sh", False),
        (f"{OF_FACTORY}finetuning_type: lora\nquantization_bit: 4\n", "a.yaml", True),
        (f"{OF_FACTORY}finetuning_type: lora\nquantization_bit: 4\ndouble_quantization: false\n", "a.yaml", False),
        (f"{OF_AXOLOTL}lora_target_linear: true\nload_in_4bit: true\n", "a.yaml", True),
        (
            f"{OF_AXOLOTL}lora_target_linear: true\nload_in_4bit: true\n{NOT_NESTED}",
            "a.yaml",
            False,
        ),
    ],
)
def test_constants_of_4_bit_weights_are_those_that_the_program_keeps(text, name, is_nested, written) -> None:
    """transformers, BitsAndBytesConfig: double quantisation is off by default; then fp32 for each 64 weights."""
    settings = read_foreign(written(text, name), num_devices=8).settings
    assert "training.frozen_weights=nf4" in settings
    assert ("engine.memory.quantised_constants=0.0625" in settings) is not is_nested


@pytest.mark.parametrize("key", ["add_tokens", "add_special_tokens", "new_special_tokens_config"])
def test_new_tokens_train_embedding_and_head_in_whole_beside_adapters_of_llama_factory(key, written) -> None:
    """LLaMA-Factory, model/patcher.py and adapter.py: so for a larger vocabulary; full training has both anyway."""
    text = f"{OF_FACTORY}finetuning_type: lora\n{key}: own\n"
    found = read_foreign(written(text, "a.yaml"), num_devices=1)
    assert [each.key for each in found.assumed if each.kind == "open"] == ["modules_to_save"]
    found = read_foreign(written(text.replace(": lora", ": full"), "a.yaml"), num_devices=1)
    assert "modules_to_save" not in [each.key for each in found.assumed]


def test_fsdp2_of_ms_swift_is_its_own_file(written) -> None:
    """ms-swift, swift/config/fsdp2.json: version 2 of FSDP, all sharded, activations recomputed."""
    found = read_foreign(written(f"NPROC_PER_NODE=8 swift sft {OF_SWIFT} --tuner_type full --fsdp fsdp2"))
    assert (found.engine, found.layout["zero"], found.layout["recompute"]) == ("fsdp", "3", "full")


def test_axolotl_reads_no_options_of_accelerate_in_its_own_file(written) -> None:
    text = (
        f"{OF_AXOLOTL}lora_target_linear: true\ndeepspeed_config: {{zero_stage: 2, gradient_accumulation_steps: 8}}\n"
    )
    assert read_foreign(written(text, "a.yaml"), num_devices=1).layout["zero"] == "0"


def test_a_key_that_is_given_twice_with_one_value_says_one_thing(written) -> None:
    assert read_foreign(written(f"{OF_FACTORY}bf16: true\n", "a.yaml"), num_devices=1).num_devices == 0
    with pytest.raises(InputError, match="`bf16` is given twice"):
        read_foreign(written(f"{OF_FACTORY}bf16: false\n", "a.yaml"), num_devices=1)


@pytest.mark.parametrize(("script", "is_refused"), [("own/lora_model.py", True), ("lora_merge.py", False)])
def test_a_script_of_adapters_by_its_name_sets_their_rank(script, is_refused, written) -> None:
    path = written(f"deepspeed --num_gpus 2 {script} {RUN} {ZERO} --max_length 512")
    if is_refused:
        with pytest.raises(InputError, match="which the script's own code sets"):
            read_foreign(path)
    else:
        assert read_foreign(path).num_devices == 2
