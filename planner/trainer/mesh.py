"""The meshes of a job, in the order of planner.layout: pp outermost, then dp, cp, and tp innermost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from planner.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Groups of ranks for each kind of sharing.

    dense: mesh with axes (pp, dp_replicate, dp_shard, tp); cp ranks shard states in the same way as dp ranks.
    experts: mesh with axes (pp, dp_replicate, dp_shard, ep) for the routed experts; None without experts.
    context: ranks that divide the positions of a sequence (cp).
    sequence: ranks that hold parts of the same sequences (cp and tp).
    Groups of one rank are None.
    """

    dense: DeviceMesh
    experts: DeviceMesh | None
    context: ProcessGroup | None
    sequence: ProcessGroup | None


def num_replicas(layout: Layout) -> int:
    """Copies of the group over which ZeRO shards: all of dp and cp for ZeRO-0, else `hsdp`."""
    return layout.dp * layout.cp if layout.zero == 0 else layout.hsdp


def _num_expert_replicas(layout: Layout) -> int:
    copies = layout.dp * layout.cp * layout.tp // layout.ep
    return copies if layout.zero == 0 else layout.hsdp


def make_meshes(layout: Layout, device_type: str, *, has_experts: bool) -> Meshes:
    """All meshes that a layout needs; neighbouring ranks form shard groups and expert groups."""
    world = torch.arange(layout.world_size)  # ranks count through (pp, dp, cp, tp), tp fastest: planner.layout
    axes = ("pp", "dp_replicate", "dp_shard")

    def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        return DeviceMesh(device_type, world.reshape(shape), mesh_dim_names=names)

    outer, cut = layout.pp * layout.dp, layout.cp * layout.tp
    context = mesh((outer, layout.cp, layout.tp), ("outer", "cp", "tp")) if layout.cp > 1 else None
    sequence = mesh((outer, cut), ("outer", "cut")) if has_experts and cut > 1 else None
    experts = (layout.pp, _num_expert_replicas(layout), -1, layout.ep)
    return Meshes(
        dense=mesh((layout.pp, num_replicas(layout), -1, layout.tp), (*axes, "tp")),
        experts=mesh(experts, (*axes, "ep")) if has_experts else None,
        context=context.get_group("cp") if context else None,
        sequence=sequence.get_group("cut") if sequence else None,
    )


def sharded_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """The mesh axes for FSDP2: one axis shards, and with HSDP another axis replicates."""
    return ("dp_replicate", "dp_shard") if mesh["dp_replicate"].size() > 1 else ("dp_shard",)
