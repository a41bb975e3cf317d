"""Run by an interpreter that has torchtitan: read each folder's planned.py as the program does, and print its values.

A folder's `mended` file has the undefined name of the data set in its head, as a user would write it.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from dataclasses import fields
from pathlib import Path


def positions(config):
    """Rotary positions and epsilons of all layers, each distinct value once."""
    from torchtitan.models.common import RMSNorm, RoPE

    ropes = [rope for _, rope, _, _ in config.model_spec.model.traverse(RoPE.Config)]
    norms = [norm for _, norm, _, _ in config.model_spec.model.traverse(RMSNorm.Config)]
    kinds = {each.name: sorted({str(getattr(rope, each.name)) for rope in ropes}) for each in fields(ropes[0])}
    return kinds, sorted({norm.eps for norm in norms})


def understood(folder: Path, world_size: int) -> dict:
    """The content of a file, as the program's own parser and meshes understand it."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    sys.path.insert(0, str(folder))
    sys.modules.pop("planned", None)
    importlib.invalidate_caches()
    config = ConfigManager().parse_args(["--module", "planned", "--config", "planned"])
    sys.path.pop(0)
    wanted = config.parallelism
    degrees = ParallelDims(
        dp_replicate=wanted.data_parallel_replicate_degree,
        dp_shard=wanted.data_parallel_shard_degree,
        cp=wanted.context_parallel_degree,
        tp=wanted.tensor_parallel_degree,
        pp=wanted.pipeline_parallel_degree,
        ep=wanted.expert_parallel_degree,
        world_size=world_size,
    )
    ropes, epsilons = positions(config)
    saved = config.to_dict()
    model = config.model_spec.model
    model.update_from_config(config=config)  # as the trainer does, with its checks
    import torch  # noqa: TID251 - of the other interpreter

    with torch.device("meta"):
        parameters = sum(each.numel() for each in model.build().parameters())
    return {
        "saved": saved,
        "degrees": [getattr(degrees, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")],
        "recompute": type(config.activation_checkpoint).__qualname__,
        "loss": type(config.loss).__qualname__,
        "rope": ropes,
        "epsilons": epsilons,
        "parameters": parameters,
    }


def main() -> None:
    """Answers for `[[folder, ranks], ...]` on standard input, as JSON."""
    logging.disable(logging.CRITICAL)
    answers = []
    for folder, world_size in json.loads(sys.stdin.read()):
        try:
            answers.append(understood(Path(folder), world_size))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the answer of one folder
            answers.append({"refused": f"{type(error).__name__}: {error}"})
    print(json.dumps(answers, default=str))  # noqa: T201


if __name__ == "__main__":
    main()
