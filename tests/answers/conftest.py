"""Layouts of all kinds for which the sections of `planner explain` must be correct."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from planner.layout_text import parse_layout
from planner.plan import Plan
from planner.search.given import plan_for_layout
from planner.specs.load import load_job


def priced(model: str, cluster: str, layout: str, **options: Any) -> Plan:
    job = load_job(model=model, cluster=cluster, **options)
    pools = {pool.cluster.name: pool.num_devices for pool in job.pools}
    num_devices = pools if len(pools) > 1 else job.num_devices
    return plan_for_layout(job, parse_layout(layout, num_layers=job.model.num_layers, num_devices=num_devices))


KINDS: dict[str, dict[str, Any]] = {
    "one device": {"model": "gpt2-xl", "cluster": "dgx-a100", "layout": "mbs=2", "gpus": 1, "global_batch_size": 8},
    "whole tiles": {
        "model": "llama3.2-1b", "cluster": "dgx-a100", "gpus": 1, "sequence_length": 2048, "global_batch_size": 8,
        "layout": "mbs=1",
    },
    "interleaved": {
        "model": "gpt3-175b", "cluster": "dgx-a100", "nodes": 128, "sequence_length": 2048, "global_batch_size": 1536,
        "layout": "tp=8,pp=4,mbs=2,interleave=8,zero=1",
    },
    "uneven, recompute": {
        "model": "llama3-8b", "cluster": "dgx-a100", "nodes": 2, "global_batch_size": 64,
        "layout": "tp=2,pp=4,zero=1,layers_per_stage=10/8/8/6,recompute=full/full/none/none",
    },
    "zero-3, hybrid": {
        "model": "llama3-8b", "cluster": "dgx-h100", "nodes": 2, "global_batch_size": 64, "layout": "zero=3,hsdp=2",
    },
    "zero-2": {"model": "llama3-8b", "cluster": "dgx-h100", "nodes": 1, "global_batch_size": 64, "layout": "zero=2"},
    "tied, without sequence parallelism": {
        "model": "gpt2", "cluster": "dgx-a100", "nodes": 1, "global_batch_size": 64, "engine": "megatron",
        "layout": "tp=2,pp=2,sp=0",
    },
    "experts": {
        "model": "mixtral-8x7b", "cluster": "dgx-h100", "nodes": 4, "global_batch_size": 256, "engine": "megatron",
        "sequence_length": 4096, "layout": "tp=2,pp=4,ep=4,etp=2,zero=1",
    },
    "racks": {
        "model": "mixtral-8x7b", "cluster": "gb200-nvl72", "nodes": 32, "global_batch_size": 256, "engine": "megatron",
        "sequence_length": 4096, "layout": "tp=2,pp=2,ep=8,zero=1,segment=16",
    },
    "latent attention": {
        "model": "deepseek-v2-lite", "cluster": "dgx-h100", "nodes": 2, "global_batch_size": 64, "engine": "megatron",
        "layout": "ep=8,pp=2,zero=1,recompute=full",
    },
    "context": {
        "model": "llama3-8b", "cluster": "dgx-h100", "nodes": 2, "global_batch_size": 32, "engine": "megatron",
        "sequence_length": 65536, "layout": "tp=4,cp=4,zero=1,recompute=full",
    },
    "gathered context": {
        "model": "llama3-8b", "cluster": "dgx-h100", "nodes": 2, "global_batch_size": 32, "sequence_length": 32768,
        "layout": "tp=4,cp=2,zero=1,recompute=full",
    },
    "unfused": {
        "model": "gpt2", "cluster": "dgx-a100", "nodes": 1, "global_batch_size": 64, "engine": "megatron",
        "settings": ("training.attention=unfused", "training.dropout=0.1"), "layout": "tp=2,recompute=selective",
    },
    "offloaded": {
        "model": "llama3-8b", "cluster": "dgx-h100", "nodes": 1, "global_batch_size": 32, "engine": "megatron",
        "sequence_length": 4096, "layout": "tp=2,zero=1,offload=both",
    },
    "adapters": {
        "model": "llama3-8b", "cluster": "dgx-h100", "nodes": 1, "global_batch_size": 32, "engine": "fsdp",
        "settings": ("training.lora_rank=16", "training.frozen_weights=nf4"), "layout": "zero=3,recompute=full",
    },
    "paired passes": {
        "model": "deepseek-v2-lite", "cluster": "dgx-h100", "nodes": 2, "global_batch_size": 64, "engine": "megatron",
        "sequence_length": 4096, "settings": ("engine.pipeline.schedules=[dualpipev]",),
        "layout": "ep=8,pp=2,zero=1,schedule=dualpipev,recompute=selective",
    },
    "mixed": {
        "model": "llama3-8b", "cluster": "mixed-a100-h100", "global_batch_size": 64, "sequence_length": 4096,
        "settings": ("a100.hosts=2",),
        "layout": "tp=2,pp=3,dp=4,zero=1,layers_per_stage=9/10/13,recompute=full/none/none,pools=a100/a100/h100",
    },
    "mixed, ends apart": {
        "model": "gpt2", "cluster": "mixed-a100-h100", "global_batch_size": 64, "engine": "megatron",
        "layout": "tp=2,pp=4,dp=2,sp=0,interleave=3,schedule=interleaved,zero=1,pools=h100/h100/a100/a100",
    },
}  # fmt: skip


@pytest.fixture(params=KINDS, scope="session")
def any_plan(request: pytest.FixtureRequest) -> Plan:
    """One plan of each kind."""
    return priced(**KINDS[request.param])


@pytest.fixture(scope="session")
def plan_of_kind() -> Any:
    """The plan of one of `KINDS`."""
    return cache(lambda kind: priced(**KINDS[kind]))
