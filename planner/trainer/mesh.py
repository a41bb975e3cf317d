"""One DeviceMesh, laid out by planner.layout: pp outermost, tp innermost, dp split into replicas of shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from planner.layout import Layout

__all__ = ["make_mesh", "num_replicas", "sharded_axes"]


def num_replicas(layout: Layout) -> int:
    """Copies of the ZeRO-sharded group: dp itself for ZeRO-0, else `hsdp`."""
    return layout.dp if layout.zero == 0 else layout.hsdp


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh with axes (pp, dp_replicate, dp_shard, tp); members of a shard group are neighbours."""
    ranks = torch.tensor(
        [
            layout.rank_of({"pp": pp, "dp": dp, "cp": 0, "tp": tp})
            for pp in range(layout.pp)
            for dp in range(layout.dp)
            for tp in range(layout.tp)
        ]
    )
    replicas = num_replicas(layout)
    return DeviceMesh(
        device_type,
        ranks.reshape(layout.pp, replicas, layout.dp // replicas, layout.tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"),
    )


def sharded_axes(layout: Layout) -> tuple[str, ...]:
    """Mesh axes that FSDP2 gets: two of them replicate and shard (HSDP), one of them shards."""
    return ("dp_replicate", "dp_shard") if num_replicas(layout) > 1 else ("dp_shard",)
