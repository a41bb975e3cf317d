"""torchtitan of commit b5bcd76c (2026-08-21) or later: a Python file that returns a `Trainer.Config`.

Release 0.3.0 has other names for batch and sequence (`local_batch_size`, `seq_len`) and is not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from planner.emit.hosts import head_lines
from planner.emit.starters.torchrun import torchrun_start
from planner.emit.target import Refusal, Setting, Target, follows, only
from planner.layout import offloads_optimizer
from planner.specs.by_name import load_model

if TYPE_CHECKING:
    from planner.emit.target import How, Place, Value, Values
    from planner.plan import Plan
    from planner.specs.model import ModelSpec

FILE: Final = "planned.py"
DATA: Final = "DATASET"
TOKENIZER: Final = "TOKENIZER_PATH"

_REGISTRY: Final = {
    "llama3.2-1b": ("llama3", "llama3_8b", "1B"),
    "llama3.2-3b": ("llama3", "llama3_8b", "3B"),
    "llama3-8b": ("llama3", "llama3_8b", "8B"),
    "llama3-70b": ("llama3", "llama3_70b", "70B"),
    "llama3-405b": ("llama3", "llama3_405b", "405B"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b", "0.6B"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b", "1.7B"),
    "qwen3-4b": ("qwen3", "qwen3_14b", "4B"),
    "qwen3-8b": ("qwen3", "qwen3_14b", "8B"),
    "qwen3-14b": ("qwen3", "qwen3_14b", "14B"),
    "qwen3-32b": ("qwen3", "qwen3_32b", "32B"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "qwen3_30b_a3b", "235B-A22B"),
    "deepseek-v2-lite": ("deepseek_v3", "deepseek_v3_16b", "16B"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b", "20b"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b", "120b"),
}
"""Our model -> package, the function of its config_registry, and the flavor of its model_registry."""
_SCHEDULES: Final = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_RECOMPUTE: Final = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
_NO_SHAPE: Final = {"name", "max_sequence_length", "rope_theta", "rope_scaling", "norm_epsilon", "moe"}
_OF_EXPERTS: Final = {"imbalance"}


def _shape(model: ModelSpec) -> dict[str, Any]:
    experts = model.moe.model_dump(exclude=_OF_EXPERTS) if model.moe else None
    return {**model.model_dump(exclude=_NO_SHAPE), "moe": experts}


def _entry(model: ModelSpec) -> tuple[str, str, str] | None:
    """The registry's model of this shape, whatever its name here; None: it has none."""
    shape = _shape(model)
    return next((entry for name, entry in _REGISTRY.items() if _shape(load_model(name)) == shape), None)


def _write_model(plan: Plan) -> Values:
    entry = _entry(plan.model)
    if entry is None:
        raise AssertionError("refused before")
    return dict(zip(("model.package", "model.config", "model.flavor"), entry, strict=True))


def _parts(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Modules of each chunk in model order: the program's own split takes a layer off each end by default."""
    first, parts = 0, []
    for count in plan.layout.layers_per_stage:
        parts.append([f"layers.{number}" for number in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return tuple(tuple(part) for part in parts)


def _write_layout(plan: Plan) -> Values:
    layout = plan.layout
    found: dict[str, Value] = {
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.enable_sequence_parallel": bool(layout.sp),
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.data_parallel_replicate_degree": layout.hsdp,
        "parallelism.data_parallel_shard_degree": layout.dp // layout.hsdp,
        "parallelism.fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.expert_parallel_degree": layout.ep,
        "training.enable_cpu_offload": offloads_optimizer(layout),
        "activation_checkpoint": layout.recompute[0],
    }
    if layout.pp > 1:
        found |= {
            "parallelism.pipeline_parallel_schedule": _SCHEDULES[layout.schedule],
            "parallelism.num_pp_microbatches": layout.num_microbatches(plan.training.global_batch_size),
            "parallelism.module_fqns_per_model_part": _parts(plan),
        }
    return found


def _write_training(plan: Plan) -> Values:
    layout, training = plan.layout, plan.training
    length = training.sequence_length
    return {
        "training.num_tokens_per_microbatch_per_dp_rank": layout.mbs * length,
        "training.max_context_length": length,
        "training.num_tokens_per_train_step": training.global_batch_size * length,
        "training.steps": training.steps,
        "training.max_norm": training.gradient_clip,
        "training.dtype": "bfloat16" if training.memory_recipe == "pure-bf16" else "float32",
        "training.mixed_precision_param": "float32" if training.precision == "fp32" else "bfloat16",
        "training.disable_cuda_graphs": True,
        "optimizer.lr": training.learning_rate,
        "optimizer.betas": (training.adam_beta1, training.adam_beta2),
        "optimizer.eps": training.adam_epsilon,
        "optimizer.weight_decay": training.weight_decay,
        "lr_scheduler.warmup_steps": training.warmup_steps,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": training.min_learning_rate_ratio,
        "float8": training.precision == "fp8",
        "loss": 0 if training.loss == "whole" else training.loss_chunks,
        "debug.seed": training.seed,
    }


def _call(values: Values, section: str) -> str:
    start = f"{section}."
    given = {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
    return ", ".join(f"{key}={value!r}" for key, value in given.items())


def _python(value: Value) -> str:
    return repr([list(part) for part in value] if isinstance(value, tuple) else value)


def _render(values: Values, plan: Plan, how: How) -> dict[str, str]:
    package, function = values["model.package"], values["model.config"]
    registry = f"torchtitan.models.{package}"
    converters = ", converters=[Float8LinearConverter.Config()]" if values["float8"] else ""
    parallelism = "".join(
        f"        {key.removeprefix('parallelism.')}={_python(value)},\n"
        for key, value in values.items()
        if key.startswith("parallelism.")
    )
    lines = [f"config.{key} = {value!r}" for key, value in values.items() if key.startswith(("training.", "debug."))]
    loss = f"config.loss.num_chunks = {values['loss']}" if values["loss"] else "config.loss = config.loss.loss_fn"
    lines += [
        f"config.activation_checkpoint = {_RECOMPUTE[str(values['activation_checkpoint'])]}",
        f"config.optimizer = default_adamw({_call(values, 'optimizer')})",
        f"config.lr_scheduler = LRSchedulersContainer.Config({_call(values, 'lr_scheduler')})",
        loss,
        "config.compile.enable = False",
        f"config.hf_assets_path = {str(how.arguments.tokenizer or TOKENIZER)!r}",
        f"config.dataloader.dataset = {DATA}  # yours: a DatasetConfig; while the name is undefined nothing starts",
        "return config",
    ]
    imports = "from torchtitan.components.quantization import Float8LinearConverter\n" if values["float8"] else ""
    what = " ".join(head_lines(plan))
    text = (
        f'"""{what} (torchtitan of 2026-08-21 or later)"""\n\n'
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw\n"
        f"{imports}"
        "from torchtitan.config import ParallelismConfig\n"
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC\n"
        f"from {registry} import model_registry\n"
        f"from {registry}.config_registry import {function}\n\n\n"
        f"def planned():\n    config = {function}()\n"
        f"    config.model_spec = model_registry({values['model.flavor']!r}{converters})\n"
        f"    config.parallelism = ParallelismConfig(\n{parallelism}    )\n"
    )
    return {FILE: text + "".join(f"    {line}\n" for line in lines)}


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:  # noqa: ARG001 - the file says them
    return f"{torchrun_start(plan, place)} \\\n  -m torchtitan.train --module planned --config planned"


def _yours(plan: Plan, how: How) -> dict[str, str]:  # noqa: ARG001 - as the others
    found = {DATA: f"a DatasetConfig of torchtitan, to be named in {FILE}"}
    return found if how.arguments.tokenizer else {**found, TOKENIZER: f"the folder of the tokenizer, in {FILE}"}


def _model_fault(plan: Plan) -> tuple[str, str] | None:
    if _entry(plan.model):
        return None
    return f"torchtitan's registry has no model built as {plan.model.name}", f"it has {', '.join(_REGISTRY)}"


def _layout_fault(plan: Plan) -> tuple[str, str] | None:
    layout = plan.layout
    kinds = set(layout.recompute)
    if len(kinds) > 1 or not kinds <= set(_RECOMPUTE):
        return "layout.recompute is not one of none, full and selective in all stages", "plan with --pin recompute=full"
    if plan.model.tied_embeddings and layout.pp > 1:  # torchtitan, models/common/decoder.py
        return f"layout.pp is {layout.pp}, and tied embeddings have no pipeline", "plan again with --pin pp=1"
    if layout.zero == 0:
        return f"layout.zero is {layout.zero}, and FSDP2 shards gradients too", "plan again with --pin zero=2"
    if layout.dp // layout.hsdp * layout.cp * layout.tp % layout.ep:
        return f"layout.ep is {layout.ep}, which does not divide the sharded ranks", "plan again with --pin hsdp=1"
    return None


TARGET: Final = Target(
    name="torchtitan",
    program="torchtitan of commit b5bcd76c or later",
    settings=(
        Setting(says=("model",), write=_write_model),
        Setting(
            says=(
                *(f"layout.{key}" for key in ("tp", "pp", "dp", "cp", "ep", "zero", "hsdp", "interleave", "schedule")),
                *("layout.sp", "layout.recompute", "layout.offload", "layout.layers_per_stage"),
            ),
            write=_write_layout,
        ),
        Setting(
            says=(
                *("layout.mbs", "training.global_batch_size", "training.sequence_length", "training.precision"),
                *("training.memory_recipe", "training.loss", "training.loss_chunks", "training.learning_rate"),
                *("training.min_learning_rate_ratio", "training.warmup_steps", "training.steps", "training.seed"),
                *("training.weight_decay", "training.gradient_clip", "training.adam_beta1", "training.adam_beta2"),
                "training.adam_epsilon",
            ),
            write=_write_training,
        ),
        follows("layout.pools", "layout.segment"),
        follows("training.lora_targets", "training.frozen_weights"),  # without adapters they say nothing
        follows("training.failures", "training.checkpoint_interval", "training.asynchronous_checkpoints"),
    ),
    refuse=(
        Refusal(says=(), fault=_model_fault),
        Refusal(says=(), fault=_layout_fault),
        only("layout.etp", 1, why="torchtitan cuts no experts"),
        only("layout.offload", "none", "optimizer", why="torchtitan keeps activations on the device"),
        only("layout.schedule", *_SCHEDULES, why="torchtitan has no such schedule", pin="--pin schedule=1f1b"),
        only("training.precision", "bf16", "fp32", "fp8", why="torchtitan has no such precision"),
        only("training.memory_recipe", "engine", "pure-bf16", why="torchtitan does not keep it"),
        only("training.optimizer", "adamw", why="no other is written"),
        only("training.attention", "flash", why="its kernels keep no scores"),
        only("training.loss", "engine", "whole", "chunked", why="torchtitan has no fused loss"),
        only("training.cuda_graphs", "none", why="none are captured"),
        only("training.expert_overlap", False, why="torchtitan does not overlap them so"),
        only("training.dropout", 0.0, why="its models have none"),
        only("training.lora_rank", 0, why="adapters are not written"),
    ),
    render=_render,
    command=_command,
    yours=_yours,
    takes=("tokenizer",),
    install="torchtitan from its repository, at commit b5bcd76c or later",
)
