"""A plan for Megatron-LM: its cut of the training as options of `pretrain_gpt.py`, started by torchrun."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from planner.emit.torchrun import num_hosts, ranks_of_hosts, script_head
from planner.errors import InputError
from planner.layout import offloads_activations, offloads_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.plan import Plan
    from planner.run_arguments import RunArguments

_PRECISION: Final = {
    "fp32": "",
    "fp16": "--fp16",
    "bf16": "--bf16",
    "fp8": "--bf16 --fp8-format hybrid",
    "fp4": "--bf16 --fp4-format e2m1",
}

_STATES: Final = {
    "megatron-18": "",
    "zero-16": "--grad-reduce-in-bf16",
    "precision-aware-fp32": "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "precision-aware": "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16",
    "fp8-moments": "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
}
"""Memory recipes as options of 16-bit training with bf16; `engine` is megatron-18."""


def megatron_script(plan: Plan, *, arguments: RunArguments) -> str:
    """A bash script that starts `pretrain_gpt.py` with the plan's cut; options of model and data are added behind.

    Source: Megatron-LM, megatron/training/arguments.py.

    Raises:
        InputError: pretrain_gpt.py has no options for what the plan does, or options are of the planner's trainer.
    """
    if given := arguments.options():
        hint = "add Megatron-LM's own options behind the script's: bash megatron.sh 0 HOST PORT --data-path ..."
        raise InputError(f"{' '.join(given)}: options of the planner's own trainer", where="--to megatron", hint=hint)
    if plan.training.lora_rank:
        raise InputError(
            f"training.lora_rank is {plan.training.lora_rank}, and pretrain_gpt.py has no adapters",
            where="--to megatron",
            hint="plan with --engine megatron-bridge, or with training.lora_rank 0",
        )
    hosts = ranks_of_hosts(plan)
    if len(hosts) > 1 and any(host.num_ranks != hosts[0].pool.devices_per_host for host in hosts):
        whole = sum(host.pool.devices_per_host for host in hosts)
        pools = "pools whose hosts are used whole and have as many devices each"
        raise InputError(
            f"{plan.layout.world_size} ranks leave the last of {len(hosts)} hosts partly idle"
            if len(plan.cluster.pools) == 1
            else f"hosts run {' and '.join(str(count) for count in sorted({host.num_ranks for host in hosts}))} ranks",
            where="--to megatron",
            hint=f"plan with whole hosts, for example --gpus {whole}"
            if len(plan.cluster.pools) == 1
            else f"plan with {pools}",
        )
    connections = 32 if plan.training.expert_overlap else 1  # exchanges on a stream of their own
    options = "".join(f"  {option} \\\n" for option in _options(plan))
    return (
        f"{script_head(plan)}"
        "# In a checkout of Megatron-LM, on every host at once: bash megatron.sh NUMBER ADDRESS PORT OPTIONS...\n"
        f"# with the host's number from 0 to {num_hosts(plan) - 1}, the address of host 0 and a free port there.\n"
        "# OPTIONS describe model, data and optimizer; those below are what the plan decides.\n\n"
        'if (( $# < 3 )); then\n  echo "usage: bash megatron.sh NUMBER ADDRESS PORT OPTIONS..." >&2\n  exit 2\nfi\n'
        "set -euo pipefail\n"
        f"export CUDA_DEVICE_MAX_CONNECTIONS={connections} # Megatron-LM overlaps by the order of launches\n"
        f"exec torchrun --nnodes={num_hosts(plan)} --nproc-per-node={hosts[0].num_ranks} \\\n"
        '  --node-rank="$1" --master-addr="$2" --master-port="$3" pretrain_gpt.py \\\n'
        f'{options}  "${{@:4}}"\n'
    )


def _options(plan: Plan) -> Iterator[str]:
    """One line for each kind of parallelism, batch, recompute and precision."""
    layout, training = plan.layout, plan.training
    yield f"--tensor-model-parallel-size {layout.tp}{' --sequence-parallel' if layout.sp else ''}"
    yield f"--pipeline-model-parallel-size {layout.pp}{_chunks(plan)}"
    yield f"--context-parallel-size {layout.cp}"
    if plan.model.moe is not None:
        yield f"--expert-model-parallel-size {layout.ep} --expert-tensor-parallel-size {layout.etp}"
    if layout.ep > 1:
        yield "--moe-token-dispatcher-type alltoall"
    if plan.model.mtp_layers:
        yield f"--mtp-num-layers {plan.model.mtp_layers}"
    if layout.zero:
        instances = f" --num-distributed-optimizer-instances {layout.hsdp}" if layout.hsdp > 1 else ""
        in_8_bits = " --fp8-param-gather" if training.precision == "fp8" else ""
        yield f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather{instances}{in_8_bits}"
    else:
        yield "--overlap-grad-reduce"
    yield f"--micro-batch-size {layout.mbs} --global-batch-size {training.global_batch_size}"
    yield f"--seq-length {training.sequence_length}"
    overlap = "--overlap-moe-expert-parallel-comm" if training.expert_overlap else ""
    further = _recompute(plan), _offload(plan), overlap, _graphs(plan), _PRECISION[training.precision], _states(plan)
    yield from filter(None, further)
    yield f"--attention-dropout {training.dropout:g} --hidden-dropout {training.dropout:g}"
    if training.attention == "unfused":
        yield "--attention-backend unfused"


def _states(plan: Plan) -> str:
    """What the optimizer is and keeps, where it is not Adam with fp32 gradients, moments and master weights."""
    training = plan.training
    recipe = "megatron-18" if training.memory_recipe == "engine" else training.memory_recipe
    optimizer = "" if training.optimizer == "adamw" else f"--optimizer {training.optimizer}"
    if training.precision == "fp32":
        return optimizer
    options = _STATES.get(recipe)
    if options is None or (recipe not in ("megatron-18", "zero-16") and not plan.layout.zero):
        why = "" if options is None else " without ZeRO"
        raise InputError(
            f"training.memory_recipe is {recipe}, which Megatron-LM does not keep{why}",
            where="--to megatron",
            hint=f"plan with {'zero=1, or ' if why else ''}--set training.memory_recipe=engine",
        )
    if training.precision == "fp16" and recipe in ("megatron-18", "zero-16"):  # where 16-bit sums are the default
        options = "--accumulate-allreduce-grads-in-fp32" if recipe == "megatron-18" else ""
    return " ".join(filter(None, (optimizer, options)))


def _chunks(plan: Plan) -> str:
    """Layers of each chunk where they differ, in Megatron-LM's letters; else the number of chunks of a stage."""
    layout, layers = plan.layout, plan.layout.layers_per_stage
    if len(set(layers)) == 1 and not plan.model.mtp_layers:
        return f" --num-virtual-stages-per-pipeline-rank {layout.interleave}" if layout.interleave > 1 else ""
    if len(layers) == 1:
        return ""
    first, *middle, last = (f"t*{count}" for count in layers)
    letters = "|".join((f"E{first}", *middle, f"{last}{'m' * plan.model.mtp_layers}L"))
    return f" --pipeline-model-parallel-layout {shlex.quote(letters)}"


def _graphs(plan: Plan) -> str:
    """CUDA graphs of both passes, or of the modules of layers whose sizes do not change."""
    moe = plan.model.moe
    if plan.training.cuda_graphs == "none":
        return ""
    if plan.training.cuda_graphs == "step":
        return "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
    modules = ["attn", *(["moe_router", "moe_preprocess"] if moe else [])]
    if moe is None or moe.num_dense_layers or moe.layer_frequency > 1:
        modules.append("mlp")
    return f"--cuda-graph-impl transformer_engine --cuda-graph-modules {' '.join(modules)}"


def _offload(plan: Plan) -> str:
    """Optimizer states on the host, and activations of all layers but the last."""
    options = []
    if offloads_optimizer(plan.layout):
        options += ["--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"]
    if offloads_activations(plan.layout):
        options += [f"--cpu-offloading-num-layers {plan.model.num_layers - 1}"]
    return " ".join(options)


def _recompute(plan: Plan) -> str:
    policies = sorted(set(plan.layout.recompute))
    if len(policies) > 1:
        raise InputError(
            f"stages recompute {' and '.join(policies)}, and Megatron-LM has one policy for all",
            where="--to megatron",
            hint=f"plan again with --pin recompute={policies[0]}, or another of them",
        )
    (policy,) = policies
    kind, _, number = policy.partition(":")
    if policy in ("none", "selective"):
        return "" if policy == "none" else "--recompute-granularity selective"
    if kind == "full":
        method = f"block --recompute-num-layers {number}" if number else "uniform --recompute-num-layers 1"
        return f"--recompute-granularity full --recompute-method {method}"
    return f"--recompute-granularity selective --recompute-modules {policy.replace('+', ' ')}"
