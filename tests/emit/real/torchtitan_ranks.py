"""Run by an interpreter that has torchtitan and the planner: build ranks of emitted folders, and print what they hold.

torchtitan's Trainer makes the meshes in an imaginary world, and shards the model on fake tensors. No step runs.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch  # noqa: TID251 - of the other interpreter
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID251 - as above
from torch.distributed.tensor import DTensor, Replicate  # noqa: TID251 - as above

from planner.trainer.rehearse_torchtitan import FlexAttention, _config, _fake_world, torchtitan  # for a CPU

ATTENTION = FlexAttention.forward
"""The program's own, whose arguments name what it shards: no step needs the stand-in of a rehearsal."""

FSDP, CONTEXT = (import_module(f"torchtitan.distributed.{name}") for name in ("fsdp", "context_parallel"))
SHARD = FSDP.fully_shard


def _shard(module, *, mesh, dp_mesh_dims=None, **options):
    """torch's fully_shard, which in 2.13 wants parameters on the whole mesh; later releases put plain ones there."""
    for part in [each for whole in (module if isinstance(module, list) else [module]) for each in whole.modules()]:
        for name, weight in list(part.named_parameters(recurse=False)) if dp_mesh_dims else []:
            if not isinstance(weight, DTensor):
                whole = DTensor.from_local(weight.data, mesh, [Replicate()] * mesh.ndim, run_check=False)
                part.register_parameter(name, torch.nn.Parameter(whole))
    return SHARD(module, mesh=mesh, dp_mesh_dims=dp_mesh_dims, **options)


STAND_IN = mock.patch.object(FSDP, "fully_shard", _shard)


def held(folder: Path, num_ranks: int, rank: int) -> dict:
    """Bytes of parameters on a rank, sizes of its meshes, and layers of its stages."""
    sys.modules.pop("planned", None)
    config, mode = _config(folder), FakeTensorMode(allow_non_fake_inputs=True)
    sys.path.remove(str(folder))
    if config.parallelism.context_parallel_degree > 1 and hasattr(CONTEXT, "validate_cp_backend"):
        config.parallelism.spmd_backend = "spmd_types"  # the newest form's default, without which it refuses cp
    with _fake_world(num_ranks, rank, mode), mock.patch.object(FlexAttention, "forward", ATTENTION), STAND_IN:
        trainer = torchtitan.trainer.Trainer(config)
        parameters = [each for part in trainer.model_parts for each in part.parameters()]
        local = [getattr(each, "_local_tensor", each) for each in parameters]
        degrees = trainer.parallel_dims
        return {
            "bytes": sum(each.numel() * each.element_size() for each in local),
            "layers": [len(part.layers) for part in trainer.model_parts],
            "degrees": {key: getattr(degrees, key) for key in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")},
        }


def answer(folder: str, num_ranks: int, rank: int) -> dict | str:
    """What a rank holds, or why it was not built."""
    try:
        return held(Path(folder), num_ranks, rank)
    except Exception as error:  # noqa: BLE001 - the test shows it
        return f"{type(error).__name__}: {error}"[:600]


def main() -> None:
    """A line of answers for a line of jobs; each rank is a process, because torch remembers groups of former worlds."""
    jobs = [(folder, ranks, rank) for folder, ranks in json.loads(sys.stdin.read()) for rank in range(ranks)]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        sys.stdout.write(json.dumps(pool.starmap(answer, jobs, chunksize=1)) + "\n")


torch.set_num_threads(1)
main()
