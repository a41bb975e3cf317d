"""What Accelerate, DeepSpeed, Kubeflow's client and SkyPilot read of emitted files, value by value."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_hugging_face import FSDP, ZERO, plan_of

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
    degrees = ParallelismConfig()
    assert (degrees.tp_size, degrees.cp_size, degrees.sp_size) == (layout.tp, layout.cp, 1)
    assert (degrees.dp_replicate_size, degrees.dp_shard_size) == (layout.hsdp, layout.dp // layout.hsdp)
    assert degrees.total_size == layout.world_size == arguments.num_processes
    assert arguments.num_machines == num_hosts(plan)
    sharded = FullyShardedDataParallelPlugin()
    assert sharded.fsdp_version == 2
    assert sharded.reshard_after_forward == (layout.zero == 3)
    assert sharded.activation_checkpointing == (layout.recompute[0] == "full")
    assert bool(getattr(sharded.cpu_offload, "pin_memory", False)) == (layout.offload == "optimizer")
    plain = training.memory_recipe == "pure-bf16" or training.precision == "fp32"
    assert arguments.mixed_precision == ("no" if plain else training.precision)


@pytest.mark.parametrize("case", ZERO, ids=str)
def test_deepspeed_reads_the_plan(case, tmp_path, monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda *_, **__: 0)
    plan = written(("deepspeed", *case), tmp_path)
    layout, training = plan.layout, plan.training

    class Groups:
        def get_data_parallel_world_size(self):
            return layout.dp

    read = config.DeepSpeedConfig(json.loads((tmp_path / "deepspeed.json").read_text()), mpu=Groups())
    assert read.train_batch_size == training.global_batch_size
    assert read.train_micro_batch_size_per_gpu == layout.mbs
    assert read.gradient_accumulation_steps == layout.num_microbatches(training.global_batch_size)
    assert read.gradient_clipping == training.gradient_clip
    assert read.zero_config.stage == layout.zero
    assert (read.zero_config.offload_optimizer is not None) == (layout.offload in ("optimizer", "both"))
    assert read.tensor_parallel_config.autotp_size in ((0, 1) if layout.tp == 1 else (layout.tp,))
    assert read.bfloat16_config.enabled == (training.precision == "bf16")
    assert read.bfloat16_config.bf16_master_weights_and_grads == (training.memory_recipe == "pure-bf16")


def test_kubeflow_reads_the_job(tmp_path):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    plan = written(("fsdp", *FSDP[0]), tmp_path, "kubeflow")
    document = yaml.safe_load((tmp_path / "trainjob.yaml").read_text())
    trainer = models.TrainerV1alpha1TrainJob.from_dict(document).spec.trainer
    assert trainer.num_nodes * trainer.num_proc_per_node == plan.layout.world_size
    assert document["spec"]["trainer"].keys() <= {each.alias or key for key, each in type(trainer).model_fields.items()}


def test_skypilot_reads_the_task(tmp_path):
    sky = pytest.importorskip("sky")
    plan = written(("deepspeed", *ZERO[0]), tmp_path, "skypilot")
    task = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    (resources,) = task.resources
    assert task.num_nodes * sum(resources.accelerators.values()) == plan.layout.world_size
