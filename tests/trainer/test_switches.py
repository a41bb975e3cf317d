"""Features that only make GPUs faster, tested without a GPU: each switch is set in the right place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 # what follows imports torch

from planner.trainer import trainer
from planner.trainer.optimizer import make_optimizer
from planner.trainer.parallelize import compiles


@pytest.mark.parametrize(
    ("device", "layout", "wanted"),
    [
        ("cuda", "dp=2", True),
        ("cuda", "tp=2,pp=2,mbs=2", True),
        ("cuda", "pp=2,mbs=2,schedule=zbv", False),
        ("cuda", "pp=2,mbs=1,schedule=dualpipev", False),
        ("cpu", "dp=2", False),
    ],
)
def test_layers_are_compiled_on_gpus(device, layout, wanted, make_plan):
    assert compiles(make_plan(layout).layout, torch.device(device)) is wanted


@pytest.mark.slow
def test_a_run_compiles_after_its_first_step(run_job, make_plan, tmp_path):
    """As on a GPU; the first step measures memory. The worker counts the compiled layers."""
    options = {"steps": 3, "output": str(tmp_path), "compile": "aot_eager"}
    assert run_job("train", make_plan("dp=2,zero=1,mbs=2"), **options) == 0


class Recorded:
    """A tensor that notes how it is copied."""

    def __init__(self):
        self.calls = []

    def pin_memory(self):
        self.calls.append("pinned")
        return self

    def to(self, device, **options):
        self.calls.append((device.type, options))
        return self


@pytest.mark.parametrize(
    ("device", "calls"), [("cuda", ["pinned", ("cuda", {"non_blocking": True})]), ("cpu", [("cpu", {})])]
)
def test_a_batch_goes_to_a_gpu_from_pinned_memory(device, calls):
    batch = Recorded()
    trainer._sent(batch, torch.device(device))
    assert batch.calls == calls


def test_the_optimizer_is_one_kernel(make_plan):
    optimizer = make_optimizer({"w": torch.nn.Parameter(torch.zeros(2, 2))}, make_plan("dp=1").training)
    assert all(group["fused"] for group in optimizer.param_groups)


def test_weights_are_gathered_ahead(run_job, make_plan):
    """The unit `all` holds head and norm; layer 0 of this model is dense, and the other layers have experts."""
    layers = [["layers.0"], *([f"layers.{n}", f"layers.{n}.ffn.experts"] for n in (1, 2, 3))]
    found = run_job("prefetched", make_plan("dp=2,ep=2,zero=3,mbs=4", "moe"), steps=1)
    chain = [["all"], ["embedding"], *layers]
    for at, (unit, *_) in enumerate(chain):
        ahead = chain[at + 1] if at + 1 < len(chain) else []
        behind = [[], [], *chain[1:]][at] if at else layers[-1]
        assert found[unit] == [ahead, behind], unit
    assert all(found[f"layers.{n}.ffn.experts"] == [[], []] for n in (1, 2, 3))


def test_pieces_of_tensors_travel_on_request(run_job, make_plan):
    assert run_job("async_tp", make_plan("tp=2,mbs=4"), steps=1) == [False, False, True, True]


def test_a_small_chunk_is_one_unit_and_trains_as_its_layers_apart(run_job, make_plan):
    plan = make_plan("dp=2,zero=1,mbs=2")
    assert [len(run_job("prefetched", plan, steps=1, **size)) for size in ({}, {"small_bytes": 0})] == [1, 6]
    one, several = (run_job("steps", plan, steps=3, **size) for size in ({}, {"small_bytes": 0}))
    assert [each for step in several for each in step] == pytest.approx([each for step in one for each in step])
