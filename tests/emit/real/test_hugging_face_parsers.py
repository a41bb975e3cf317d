"""What Accelerate, transformers, DeepSpeed, Kubeflow's client and SkyPilot read of emitted files, value by value.

TRAINJOB_CRD names the schema of the jobs, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml of kubeflow/trainer
(8c0f5059 was read); without it that test skips, saying so.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_hugging_face import CASES, FSDP, ZERO, plan_of

from planner.cost.parameters import num_params
from planner.emit.bundle import write_bundle
from planner.emit.hosts import num_hosts
from planner.emit.target import How

pytestmark = pytest.mark.slow


def written(case, folder, on="torchrun"):
    plan = plan_of(case)
    write_bundle(plan, folder, on=on, how=How(), force_unfit=True)
    return plan


@pytest.mark.parametrize("case", FSDP, ids=str)
def test_accelerate_reads_the_plan(case, tmp_path, monkeypatch):
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils.launch import prepare_multi_gpu_env

    plan = written(("fsdp", *case), tmp_path)
    layout, training = plan.layout, plan.training
    place = ["--machine_rank=0", "--main_process_ip=127.0.0.1", "--main_process_port=29500"]
    words = [f"--config_file={tmp_path / 'accelerate.yaml'}", *place, "train.py"]
    arguments, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    for key, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(key, value)
    assert arguments.num_machines == num_hosts(plan)
    plain = training.memory_recipe == "pure-bf16" or training.precision == "fp32"
    assert arguments.mixed_precision == ("no" if plain else training.precision)
    assert arguments.num_processes == layout.world_size
    if is_cut_at_load(layout):  # Accelerate has nothing to shard
        assert not arguments.use_fsdp
        from transformers.distributed import DistributedConfig

        own = yaml.safe_load((tmp_path / "training.yaml").read_text())
        sizes = DistributedConfig(**own["distributed_config"])
        assert (sizes.tp_size, sizes.ep_size, sizes.fsdp_size) == (layout.tp, layout.ep, layout.dp // layout.hsdp)
        assert (sizes.dp_replicate_size, own["reshard_after_forward"]) == (layout.hsdp, layout.zero == 3)
        return
    degrees = ParallelismConfig()
    assert (degrees.tp_size, degrees.cp_size, degrees.sp_size) == (layout.tp, layout.cp, 1)
    assert (degrees.dp_replicate_size, degrees.dp_shard_size) == (layout.hsdp, layout.dp // layout.hsdp)
    assert degrees.total_size == layout.world_size
    sharded = FullyShardedDataParallelPlugin()
    assert sharded.fsdp_version == 2
    assert sharded.reshard_after_forward == (layout.zero == 3)
    assert sharded.activation_checkpointing == (layout.recompute[0] == "full")
    assert bool(getattr(sharded.cpu_offload, "pin_memory", False)) == (layout.offload == "optimizer")
    assert str(sharded.state_dict_type).endswith("SHARDED_STATE_DICT")
    assert sharded.transformer_cls_names_to_wrap == [layer_name(tmp_path)]


def is_cut_at_load(layout):
    """Whether transformers cuts the model itself, while it loads it."""
    return layout.tp > 1 or layout.ep > 1


def config_of(folder):
    """The model's configuration as train.py makes it."""
    transformers = pytest.importorskip("transformers")
    values = json.loads((folder / "config.json").read_text())
    return transformers, transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def on_meta(folder):
    """The model of a folder, built without memory."""
    transformers, config = config_of(folder)
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def layer_name(folder):
    """The class of the built model's layers."""
    (layers,) = {type(each[0]) for name, each in on_meta(folder).named_modules() if name.endswith(("layers", ".h"))}
    return layers.__name__


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_transformers_builds_the_model_that_was_priced(case, tmp_path):
    """Every parameter, built without memory; and the attention and dropout that train.py requests."""
    plan = written(case, tmp_path)
    model = on_meta(tmp_path)
    assert sum(each.numel() for each in model.parameters()) == num_params(plan.model)
    config = model.config
    assert config.vocab_size == plan.model.vocab_size
    rates = [value for key, value in config.to_dict().items() if key.endswith(("_dropout", "pdrop"))]
    assert {each for each in rates if each} == ({plan.training.dropout} if plan.training.dropout else set())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_the_trainer_reads_the_training(case, tmp_path):
    """TrainingArguments with every key of the file that is one of its fields."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # without it TrainingArguments cannot be made
    plan = written(case, tmp_path)
    layout, training = plan.layout, plan.training
    settings = yaml.safe_load((tmp_path / "training.yaml").read_text())
    own = transformers.TrainingArguments.__dataclass_fields__.keys()
    of_train_py = {
        *("dtype", "attn_implementation", "weights", "data", "tokenizer", "max_length", "packing", "use_peft"),
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "mlp_tiles"),
        *("load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "recompute"),
        *("distributed_config", "reshard_after_forward", "offload_activations"),
    }
    assert settings.keys() - {"pipeline"} <= own | of_train_py
    assert ("pipeline" in settings) == (layout.pp > 1)
    given = {key: value for key, value in settings.items() if key in own - {"deepspeed", "parallelism_config"}}
    read = transformers.TrainingArguments(**given | {"use_cpu": True, "output_dir": str(tmp_path)})
    assert read.per_device_train_batch_size == layout.mbs
    assert read.gradient_accumulation_steps == layout.num_microbatches(training.global_batch_size)
    assert (read.learning_rate, read.max_steps, read.seed) == (training.learning_rate, training.steps, training.seed)
    assert read.warmup_steps == training.warmup_steps
    assert read.lr_scheduler_kwargs == {"min_lr_rate": training.min_learning_rate_ratio}
    assert read.weight_decay == training.weight_decay
    assert read.max_grad_norm == training.gradient_clip
    assert (read.adam_beta1, read.adam_beta2) == (training.adam_beta1, training.adam_beta2)
    assert read.adam_epsilon == training.adam_epsilon
    assert (read.bf16, read.fp16) == (
        training.precision == "bf16" and (training.memory_recipe != "pure-bf16" or plan.engine.name == "deepspeed"),
        training.precision == "fp16",
    )
    by_trainer = plan.engine.name == "deepspeed" or is_cut_at_load(layout)
    assert read.gradient_checkpointing == (by_trainer and layout.recompute[0] == "full")
    assert read.use_liger_kernel == (training.loss in ("fused", "fused-linear"))
    names = {"adamw": "adamw_torch_fused", "adamw-8bit": "adamw_bnb_8bit"}
    assert str(read.optim.value) == names[training.optimizer]


@pytest.mark.parametrize("case", ZERO, ids=str)
def test_deepspeed_reads_the_plan(case, tmp_path, monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda *_, **__: 0)
    plan = written(("deepspeed", *case), tmp_path)
    layout, training = plan.layout, plan.training

    class Groups:
        def get_data_parallel_world_size(self):
            return layout.dp

    document = json.loads((tmp_path / "deepspeed.json").read_text())
    read = config.DeepSpeedConfig(document, mpu=Groups())
    assert read.train_batch_size == training.global_batch_size
    assert read.train_micro_batch_size_per_gpu == layout.mbs
    assert read.gradient_accumulation_steps == layout.num_microbatches(training.global_batch_size)
    assert read.gradient_clipping == training.gradient_clip
    assert read.zero_allow_untested_optimizer is True
    assert read.zero_config.stage == layout.zero
    assert read.zero_config.overlap_comm == (layout.zero > 0 and layout.pp == 1)
    sums = "fp32" if layout.pp > 1 and training.precision == "bf16" else None
    assert read.grad_accum_dtype == sums
    offload = read.zero_config.offload_optimizer
    assert (offload is not None) == (layout.offload in ("optimizer", "both"))
    if offload is not None:
        assert (offload.device, offload.pin_memory) == ("cpu", True)
        assert read.zero_force_ds_cpu_optimizer is False
    assert read.zero_config.offload_param is None
    assert read.tensor_parallel_config.autotp_size in ((0, 1) if layout.tp == 1 else (layout.tp,))
    assert document.get("sequence_parallel_size", 1) == layout.cp
    assert read.bfloat16_config.enabled == (training.precision == "bf16")
    assert read.float16_config.enabled == (training.precision == "fp16")
    pure = training.memory_recipe == "pure-bf16"
    assert read.bfloat16_config.bf16_master_weights_and_grads == pure
    assert read.bfloat16_config.bf16_optimizer_states == pure


def test_kubeflow_reads_the_job(tmp_path):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    plan = written(("fsdp", *FSDP[0]), tmp_path, "kubeflow")
    document = yaml.safe_load((tmp_path / "trainjob.yaml").read_text())
    trainer = models.TrainerV1alpha1TrainJob.from_dict(document).spec.trainer
    assert (trainer.num_nodes, trainer.num_proc_per_node) == (num_hosts(plan), 8)
    assert trainer.num_nodes * trainer.num_proc_per_node == plan.layout.world_size
    assert trainer.resources_per_node.limits["nvidia.com/gpu"].actual_instance == "8"
    assert trainer.command[:2] == ["bash", "-c"]
    assert document["spec"]["trainer"].keys() <= {each.alias or key for key, each in type(trainer).model_fields.items()}


def test_the_schema_of_the_cluster_takes_the_job(tmp_path):
    """The cluster's own schema, which here also refuses keys that it does not name."""
    path = os.environ.get("TRAINJOB_CRD")
    if path is None:
        pytest.skip("TRAINJOB_CRD names no schema of kubeflow/trainer")
    jsonschema = pytest.importorskip("jsonschema")
    versions = yaml.safe_load(Path(path).read_text())["spec"]["versions"]
    (schema,) = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1alpha1"]
    for case, on in ((("fsdp", *FSDP[0]), "kubeflow"), (("deepspeed", *ZERO[0]), "kubeflow")):
        written(case, tmp_path / case[0], on)
        document = yaml.safe_load((tmp_path / case[0] / "trainjob.yaml").read_text())
        jsonschema.validate(document, closed(schema))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "spec": {**document["spec"], "numNodes": 2}}, closed(schema))


def closed(schema):
    """The schema without further keys in a job, its spec and its trainer; a cluster drops such keys silently."""
    spec = schema["properties"]["spec"]
    trainer = {**spec["properties"]["trainer"], "additionalProperties": False}
    spec = {**spec, "properties": {**spec["properties"], "trainer": trainer}, "additionalProperties": False}
    return {**schema, "properties": {**schema["properties"], "spec": spec}, "additionalProperties": False}


def test_skypilot_reads_the_task(tmp_path):
    sky = pytest.importorskip("sky")
    plan = written(("deepspeed", *ZERO[0]), tmp_path, "skypilot")
    task = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    (resources,) = task.resources
    assert task.num_nodes == num_hosts(plan)
    assert resources.accelerators == {"H100": 8}
    assert task.num_nodes * sum(resources.accelerators.values()) == plan.layout.world_size
    assert "run.sh" in task.run
