"""Runs what is emitted for our own trainer, on a CPU; see ranks.py. With `reference` a job is one plain process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Bytes, Seen, serve, states_of

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from workers import reference

from planner.cost.ledger import LineName
from planner.plan_file import plan_from_file
from planner.trainer.__main__ import main
from planner.trainer.feed_forward import FeedForward, MixtureOfExperts
from planner.trainer.measure import MemoryMeter
from planner.trainer.parallelize import fsdp_modules
from planner.trainer.trainer import Trainer


def observe(job: dict[str, Any]) -> Seen:
    if job.get("reference"):
        return {"losses": [loss for loss, _ in reference(plan_from_file(Path("plan.json")), {"steps": job["steps"]})]}
    seen: Seen = {"losses": [], "rows": [], "calls": 0}
    step, batch = Trainer.step, Trainer._batch

    def watched(self: Trainer, **options: Any) -> Any:
        meter = MemoryMeter(self.chunks, self.optimizer)
        with meter.watch():
            result = step(self, **options)
        states = Bytes()  # shards of FSDP2 are the optimizer's master weights
        masters = self.parameters().values() if fsdp_modules(self.chunks) else ()
        states.add("states", [*masters, *states_of(self.optimizer)])
        seen["bytes"] = {**states.of, "params": meter.peak[LineName.PARAMS], "grads": meter.peak[LineName.GRADS]}
        seen["mesh"] = dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True))
        seen["losses"].append(result.loss)
        return result

    def read(self: Trainer, *arguments: Any) -> Any:
        found = batch(self, *arguments)
        seen["rows"].append(found[0].tolist())
        return found

    def count(module: torch.nn.Module, *_: Any) -> None:
        seen["calls"] += isinstance(module, FeedForward | MixtureOfExperts)

    Trainer.step, Trainer._batch = watched, read
    torch.nn.modules.module.register_module_forward_pre_hook(count)
    assert dist.is_available()
    assert main(job["words"][2:]) == 0
    return seen


if __name__ == "__main__":
    serve(observe)
