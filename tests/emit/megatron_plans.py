"""Plans of the Megatron family: one plan for each decision that a table must express, and combinations of decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.load import load_job

if TYPE_CHECKING:
    from planner.plan import Plan

Case = tuple[str, int, str, tuple[str, ...]]

_UNFUSED = ("training.dropout=0.1", "training.attention=unfused")
_THREE = "recompute=layernorm+mla_up_proj+moe_act"

LAYOUTS: tuple[Case, ...] = (
    ("gpt3-175b", 64, "tp=8,pp=8,interleave=4,zero=1,recompute=full", ()),
    ("gpt3-175b", 64, "tp=8,pp=8,interleave=4,zero=1,recompute=full:2", ()),
    (
        "gpt3-175b",
        64,
        "tp=8,pp=8,zero=0,recompute=selective,sp=0",
        ("training.dropout=0.1", "training.attention=unfused"),
    ),
    ("gpt2-xl", 1, "tp=1,zero=0", ("training.dropout=0.1",)),
    ("gpt2-xl", 1, "tp=1,zero=1,mbs=4", ("training.precision=fp16",)),
    ("gpt2", 1, "tp=1,zero=1", ("training.precision=fp32",)),
    ("megatron-7.5b", 4, "tp=4,pp=2,zero=1,mbs=2,recompute=full", ()),
    ("megatron-1t", 384, "tp=8,pp=64,zero=1,recompute=full", ()),
    ("mt-nlg-530b", 35, "tp=8,pp=35,zero=1,recompute=full", ()),
    ("llama2-7b", 1, "tp=1,zero=1,recompute=selective", ()),
    ("llama2-13b", 2, "tp=2,pp=2,zero=1,interleave=2", ()),
    ("llama2-70b", 8, "tp=8,pp=4,zero=1,recompute=mlp", ()),
    ("llama3-8b", 1, "tp=1,zero=0,recompute=selective", ()),
    ("llama3-8b", 1, "tp=1,zero=0,recompute=mlp", ()),
    ("llama3-8b", 1, "tp=2,zero=1,cp=2,mbs=2", ()),
    ("llama3-8b", 2, "tp=2,pp=4,cp=2,zero=0,layers_per_stage=7/2*9/7", ()),
    ("llama3-8b", 2, "tp=2,pp=2,zero=1,interleave=2,layers_per_stage=7/9/9/7", ()),
    ("llama3-8b", 1, "tp=4,zero=1", ("training.precision=fp8",)),
    ("llama3-8b", 1, "tp=4,zero=0", ("training.precision=fp8",)),
    ("llama3-8b", 1, "tp=8,zero=1,offload=optimizer", ()),
    ("llama3-8b", 1, "tp=8,zero=1,offload=both", ()),
    ("llama3-8b", 1, "tp=8,zero=1,offload=activations", ()),
    ("llama3-8b", 1, "tp=4,zero=1", ("training.memory_recipe=zero-16",)),
    ("llama3-8b", 1, "tp=4,zero=0", ("training.memory_recipe=zero-16",)),
    ("llama3-8b", 1, "tp=4,zero=1", ("training.memory_recipe=precision-aware-fp32",)),
    ("llama3-8b", 1, "tp=4,zero=1", ("training.memory_recipe=precision-aware",)),
    ("llama3-8b", 1, "tp=4,zero=1", ("training.memory_recipe=fp8-moments",)),
    ("llama3-8b", 1, "tp=4,zero=0", ("training.optimizer=sgd",)),
    ("llama3-8b", 1, "tp=4,zero=1", ("training.optimizer=muon",)),
    ("llama3-8b", 1, "tp=4,zero=1", ("training.attention=unfused",)),
    ("llama3-8b", 1, "tp=4,zero=1", ("training.cuda_graphs=layers",)),
    ("llama3-8b", 1, "tp=4,zero=1", ("training.cuda_graphs=step",)),
    ("llama3-8b", 1, "tp=8,zero=1", ("training.learning_rate=1e-4", "training.min_learning_rate_ratio=0.05")),
    ("llama3-8b", 1, "tp=8,zero=1", ("training.warmup_steps=200", "training.steps=1000", "training.seed=7")),
    (
        "llama3-8b",
        1,
        "tp=8,zero=1",
        ("training.adam_beta1=0.8", "training.adam_beta2=0.99"),
    ),
    ("llama3-8b", 1, "tp=8,zero=1", ("training.gradient_clip=0.5", "training.adam_epsilon=1e-6")),
    ("llama3-8b", 4, "tp=2,zero=1,hsdp=2", ()),
    ("llama3-70b", 8, "tp=4,pp=4,cp=2,zero=1,interleave=5", ()),
    ("llama3-70b", 8, "tp=8,pp=4,zero=1,recompute=full:3,layers_per_stage=19/21/21/19", ()),
    ("llama3-405b", 64, "tp=8,pp=16,zero=1,recompute=full,layers_per_stage=7/14*8/7", ()),
    ("llama3.2-1b", 1, "tp=1,zero=1,mbs=4", ()),
    ("llama3.2-3b", 1, "tp=2,zero=1", ()),
    ("mistral-7b", 1, "tp=4,zero=1", ()),
    ("qwen2.5-7b", 1, "tp=4,zero=1", ()),
    ("qwen2.5-72b", 8, "tp=8,pp=4,zero=1", ()),
    ("qwen3-8b", 1, "tp=4,zero=1", ()),
    ("qwen3-0.6b", 1, "tp=1,zero=0,mbs=8", ()),
    ("qwen3-30b-a3b", 2, "tp=1,ep=8,zero=1", ()),
    ("qwen3-30b-a3b", 2, "tp=2,pp=2,ep=4,zero=1,recompute=layernorm+moe_act", ()),
    ("qwen3-30b-a3b", 2, "tp=2,pp=2,ep=4,zero=1,recompute=layernorm+moe_act", ("training.precision=fp8",)),
    ("qwen3-235b-a22b", 16, "tp=2,pp=8,ep=8,zero=1,layers_per_stage=11/6*12/11", ()),
    ("mixtral-8x7b", 4, "tp=2,pp=2,ep=4,etp=2,zero=1,hsdp=2,mbs=2", ()),
    ("mixtral-8x7b", 4, "tp=1,pp=4,ep=8,zero=1,interleave=2", ("training.expert_overlap=true",)),
    ("mixtral-8x7b", 4, "tp=2,ep=8,zero=1", ("training.cuda_graphs=layers",)),
    ("mixtral-8x22b", 16, "tp=2,pp=8,ep=8,zero=1,interleave=7", ()),
    ("deepseek-v2-lite", 1, "tp=1,ep=8,zero=1", ()),
    ("deepseek-v2-lite", 1, "ep=8,zero=1", ("training.cuda_graphs=layers", "training.expert_overlap=true")),
    ("deepseek-v3", 32, "pp=16,ep=8,zero=1,layers_per_stage=13*4/3*3", ()),
    ("deepseek-v3", 32, "pp=16,ep=8,zero=1,layers_per_stage=13*4/3*3,recompute=mla_up_proj+moe_act", ()),
    (
        "deepseek-v3",
        128,
        "tp=2,pp=16,ep=64,zero=1,layers_per_stage=13*4/3*3,recompute=layernorm+mla_up_proj+moe_act",
        (),
    ),
    ("gpt-oss-20b", 1, "tp=1,ep=8,zero=1", ()),
    ("gpt-oss-20b", 2, "tp=2,ep=8,zero=1", ()),
    ("moonlight-16b", 2, "tp=1,ep=8,zero=1", ()),
    ("kimi-k2", 64, "pp=16,ep=32,zero=1,layers_per_stage=13*4/3*3", ()),
    ("llama4-scout", 16, "tp=4,pp=4,ep=8,zero=1", ()),
    ("phi4", 2, "tp=2,pp=2,zero=1", ()),
    ("nemotron3-8b", 1, "tp=4,zero=1", ()),
    ("opt-6.7b", 1, "tp=4,zero=1", ()),
    ("llama3-70b", 4, "tp=4,pp=2,zero=1", ("engine.overlap.tensor_parallel=true",)),
    ("llama3-70b", 4, "tp=4,pp=2,zero=1,sp=0", ("engine.overlap.tensor_parallel=true",)),
    (
        *("qwen2.5-7b", 1, "tp=4,zero=1"),
        tuple(
            f"training.{each}"
            for each in (
                *("optimizer=muon", "seed=7", "learning_rate=1e-4", "weight_decay=0.05", "gradient_clip=0.5"),
                *("adam_beta1=0.8", "adam_beta2=0.99", "adam_epsilon=1e-6", "steps=1000", "warmup_steps=200"),
            )
        ),
    ),
)
"""Model, hosts of dgx-h100, layout, settings."""

SHARDED: tuple[Case, ...] = (
    ("llama3-8b", 1, "tp=1,zero=3,recompute=full", ()),
    ("llama3-8b", 1, "tp=2,zero=2", ()),
    ("llama3-8b", 2, "tp=1,zero=3,hsdp=2", ()),
    ("mixtral-8x7b", 4, "tp=1,ep=8,zero=3,recompute=full", ()),
    ("deepseek-v2-lite", 1, "ep=8,zero=1", ()),
    ("llama3-8b", 1, "cp=2,zero=3", ()),
    ("mixtral-8x7b", 4, "tp=2,ep=4,etp=2,zero=3", ()),
)
"""The same for engine megatron-fsdp."""


def plan_of(case: Case, engine: str = "megatron") -> Plan:
    """The plan of a case: its layout with its price, even if the layout does not fit."""
    model, nodes, layout, settings = case
    of_engine = [each for each in settings if each.startswith("engine.")]
    given = dict(each.removeprefix("training.").split("=") for each in settings if each not in of_engine)
    job = load_job(
        model=model,
        cluster="dgx-h100",
        nodes=nodes,
        engine=engine,
        global_batch_size=1536 if nodes != 35 else 1120,
        sequence_length=1024 if model.startswith("gpt2") else 2048,
        precision=given.pop("precision", "bf16"),
        settings=[*of_engine, *(f"training.{key}={value}" for key, value in given.items())],
    )
    return plan_for_layout(job, parse_layout(layout, num_layers=job.model.num_layers, num_devices=8 * nodes))
