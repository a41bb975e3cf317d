"""Tiny plans, and one server process that forks the ranks of every composition (torch is imported once)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.layout_text import parse_layout
from planner.plan import Plan, plan_to_dict
from planner.plan_parts import MadeBy, SearchOptions
from planner.specs.by_name import load_engine
from planner.specs.calibration import UNCALIBRATED
from planner.specs.cluster import ClusterSpec
from planner.specs.cluster_documents import load_cluster
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

SHAPE = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_hidden_size": 64,
    "vocab_size": 256,
    "max_sequence_length": 64,
}
MODELS = {
    "llama": ModelSpec(name="tiny", architecture="llama", num_kv_heads=2, **SHAPE),
    "tied-llama": ModelSpec(name="tiny", architecture="llama", num_kv_heads=4, tied_embeddings=True, **SHAPE),
    "deep-llama": ModelSpec(
        name="tiny", architecture="llama", num_kv_heads=2, tied_embeddings=True, **SHAPE | {"num_layers": 6}
    ),
    "gpt": ModelSpec(name="tiny", architecture="gpt", **SHAPE),
    "gemma": ModelSpec(
        name="tiny", architecture="gemma", num_kv_heads=2, head_size=16, qk_norm="head", sliding_window=5,
        global_every=2, **SHAPE,
    ),
    "neox": ModelSpec(name="tiny", architecture="neox", embedding_norm=True, **SHAPE),
    "falcon": ModelSpec(name="tiny", architecture="falcon", num_kv_heads=2, norms_per_layer=1, **SHAPE),
    "olmo": ModelSpec(name="tiny", architecture="qwen2", qk_norm="width", num_kv_heads=2, sliding_window=7, **SHAPE),
    "moe": ModelSpec(
        name="tiny", architecture="qwen3", num_kv_heads=2, **SHAPE,
        moe={"num_experts": 8, "experts_per_token": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16,
             "num_dense_layers": 1, "shared_gate": True, "router_bias": True, "expert_bias": True},
    ),
    "mla": ModelSpec(
        name="tiny", architecture="llama", **SHAPE,
        mla={"q_lora_rank": 24, "kv_lora_rank": 16, "nope_head_size": 8, "rope_head_size": 4, "value_head_size": 6},
        moe={"num_experts": 4, "experts_per_token": 2, "ffn_hidden_size": 24, "layer_frequency": 2},
    ),
}  # fmt: skip


def local_cluster() -> ClusterSpec:
    cluster = load_cluster("local-cpu")
    both = {"fp32": 1e11, "bf16": 2e11}
    return cluster.model_copy(
        update={"devices_per_host": 8, "device": cluster.device.model_copy(update={"peak": both})}
    )


def tiny_plan(layout: str, model: str = "llama", **training: Any) -> Plan:
    """A plan as the search would make it, without a ledger."""
    spec = MODELS[model]
    workload = {
        "sequence_length": 32,
        "global_batch_size": 8,
        "precision": "fp32",
        "warmup_steps": 2,
        "learning_rate": 3e-3,
    }
    return Plan(
        model=spec,
        cluster=local_cluster(),
        training=TrainingSpec(**(workload | training)),
        engine=load_engine("torch"),
        layout=parse_layout(layout, num_layers=spec.num_layers, num_devices=1),
        memory=(),
        time=(),
        step_seconds=1.0,
        low_step_seconds=None,
        high_step_seconds=None,
        calibration=(UNCALIBRATED,),
        tokens_per_second_per_device=1.0,
        mfu=0.0,
        hfu=0.0,
        flops_convention="none",
        made_by=MadeBy(planner_version="0.0.1", digest="written by hand", calibration="own"),
        options=SearchOptions(headroom=0.05, allow_tp_across_nodes=False, allow_offload=False),
    )


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return tiny_plan


@pytest.fixture(scope="session")
def run_job() -> Iterator[Callable[..., Any]]:
    """`run_job(kind, plan, **options)` runs a job of workers.py on the plan's number of ranks."""
    pytest.importorskip("torch")
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("workers.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin
    assert server.stdout

    def run(kind: str, plan: Plan, **options: Any) -> Any:
        job = {"kind": kind, "plan": plan_to_dict(plan), **options}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    yield run
    server.stdin.close()
    server.wait(timeout=30)
    server.stdout.close()
