"""torchtitan: the Python file that is emitted, run against stand-ins for the program's own modules."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from planner.emit.bundle import bundle_of
from planner.emit.target import How
from planner.errors import InputError
from planner.layout import parse_layout
from planner.search.search import plan_for_layout
from planner.specs.load import load_job


def plan_of(layout, model="llama3-8b", settings=()):
    job = load_job(
        model=model, cluster="dgx-h100", nodes=2, engine="torchtitan", global_batch_size=64, sequence_length=1024,
        settings=list(settings),
    )  # fmt: skip
    return plan_for_layout(job, parse_layout(layout, num_layers=job.model.num_layers, num_devices=16))


def configured(monkeypatch, plan):
    text = bundle_of(plan, how=How(), force_unfit=True).texts["planned.py"]
    module = MagicMock()
    module.ParallelismConfig = dict
    names = [line.split()[1] for line in text.splitlines() if line.startswith("from torchtitan")]
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType("package"))
    for name in names:
        monkeypatch.setitem(sys.modules, name, module)
    space = {}
    space["DATASET"] = "a data set"  # what is the user's to name
    exec(compile(text, "planned.py", "exec"), space)
    return space["planned"](), module


def test_a_pipeline_is_said_whole(monkeypatch):
    config, module = configured(monkeypatch, plan_of("tp=2,pp=2,zero=1,sp=1,interleave=2,schedule=interleaved,mbs=2"))
    parts = config.parallelism.pop("module_fqns_per_model_part")
    assert config.parallelism == {
        "tensor_parallel_degree": 2, "enable_sequence_parallel": True, "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B", "num_pp_microbatches": 8,
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": "never",
        "context_parallel_degree": 1, "expert_parallel_degree": 1,
    }  # fmt: skip
    whole = ["tok_embeddings", *(f"layers.{number}" for number in range(32)), "norm", "lm_head"]
    assert len(parts) == 4
    assert [name for part in parts for name in part] == whole
    training = config.training
    assert training.num_tokens_per_microbatch_per_dp_rank == 2 * 1024
    assert (training.num_tokens_per_train_step, training.max_context_length) == (64 * 1024, 1024)
    module.model_registry.assert_called_once_with("8B")


@pytest.mark.parametrize(
    ("layout", "model", "settings", "words"),
    [
        ("zero=3", "gpt2-xl", (), "registry"),
        ("zero=3", "llama3-8b", ("model.num_layers=30",), "registry"),
        ("pp=2,zero=1", "llama3.2-1b", (), "tied"),
        ("zero=3,recompute=every:2", "llama3-8b", (), "recompute"),
        ("zero=3", "llama3-8b", ("training.dropout=0.1",), "training.dropout"),
    ],
)
def test_what_torchtitan_cannot_say_is_refused(layout, model, settings, words):
    with pytest.raises(InputError) as error:
        bundle_of(plan_of(layout, model, settings), how=How(), force_unfit=True)
    assert any(words in each.message for each in error.value.mistakes)
