"""A layout, a point in the search space: its degrees, rules that need no cost, and the order of ranks.

Only this module defines the order of ranks: they are numbered over the axes (pp, dp, cp, tp) with tp fastest. The ranks
of a tensor-parallel group are therefore neighbours, and the pipeline crosses hosts. The cost model needs the order to
know which link a group crosses, and the trainer needs it to build its DeviceMesh; both use this module.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from planner.once import once
from planner.specs.recipe import Offload, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.numbers import Number

AXES: Final = ("pp", "dp", "cp", "tp")
"""Mesh axes, slowest first."""


COUNTS: Final = ("tp", "pp", "dp", "cp", "ep", "etp", "hsdp", "mbs", "interleave", "segment")
KEYS: Final = (*COUNTS, "zero", "schedule", "sp", "recompute", "offload", "layers_per_stage", "mtp", "loss", "pools")


LENGTH: Final = "sequence_length"
"""The key of a sequence length that nobody gave, in `Assumed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """A value that the user did not give: its key, the assumed value, and the rule that chose it.

    kind: `not priced` is a foreign file's key that changes no figure of the forecast, `misspelt` one that resembles a
    key of the format, and `open` one that leaves the verdict unknown.
    settled_by: the option that settles an open key; empty for all others.
    """

    key: str
    value: str
    rule: str
    kind: Literal["assumed", "not priced", "misspelt", "open"] = "assumed"
    settled_by: str = ""

    def __str__(self) -> str:
        """The key and value as the command line writes them, followed by the rule in parentheses."""
        return f"{self.key}={shortened_list(self.value)} ({self.rule})"


class LayerDegrees(Protocol):
    """Values that determine a device's share of one layer and microbatch: numbers, or arrays that broadcast."""

    @property
    def tp(self) -> Number: ...  # noqa: D102
    @property
    def cp(self) -> Number: ...  # noqa: D102
    @property
    def ep(self) -> Number: ...  # noqa: D102
    @property
    def etp(self) -> Number: ...  # noqa: D102
    @property
    def mbs(self) -> Number: ...  # noqa: D102
    @property
    def sp(self) -> Number: ...  # noqa: D102
    @property
    def segment(self) -> Number: ...  # noqa: D102


class Degrees(LayerDegrees, Protocol):
    """Values of a layout that the cost model reads: numbers, or arrays of many layouts that broadcast."""

    @property
    def pp(self) -> Number: ...  # noqa: D102
    @property
    def dp(self) -> Number: ...  # noqa: D102
    @property
    def zero(self) -> Number: ...  # noqa: D102
    @property
    def hsdp(self) -> Number: ...  # noqa: D102
    @property
    def interleave(self) -> Number: ...  # noqa: D102
    @property
    def schedule(self) -> Schedule: ...  # noqa: D102
    @property
    def offload(self) -> Offload: ...  # noqa: D102
    @property
    def mtp_before(self) -> Number: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a training step is divided among the devices.

    `layers_per_stage` and `recompute` have pp * interleave entries, one per chunk in model order; `stage_of_chunk`
    returns the stage on which a chunk runs. The first chunk also holds the embedding and the last chunk the loss, so
    these two may hold no layer. `mtp` is the chunk of each layer for multi-token prediction, or one chunk for all of
    them; empty if they stand beside the loss. `hsdp` is the number of replicas of the ZeRO-sharded group. On a mixed
    cluster, `pools` names the pool of each stage. The stages of one pool are neighbours, and the first device of the
    pool's first stage is the first device of the pool. `segment` is the number of hosts that the layout uses in each
    scale-up domain. It is 0, which means all hosts of a domain, if a domain has only one host or the layout has only
    one domain.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    hsdp: int = 1
    mbs: int = 1
    interleave: int = 1
    schedule: Schedule = "1f1b"
    sp: int = 0
    recompute: tuple[str, ...]
    offload: Offload = "none"
    layers_per_stage: tuple[int, ...]
    mtp: tuple[int, ...] = ()
    pools: tuple[str, ...] = ()
    segment: int = 0

    @property
    def degrees(self) -> dict[str, int]:
        """Size of each mesh axis, slowest axis first."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    @property
    def world_size(self) -> int:
        """Devices that the layout uses: pp * dp * cp * tp."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def mtp_before(self) -> int:
        """Chunks between the first chunk of `mtp` and the loss; 0 if multi-token prediction stands beside the loss."""
        return self.num_chunks - 1 - min(self.mtp, default=self.num_chunks - 1)

    @property
    def num_chunks(self) -> int:
        """Model chunks: pp * interleave."""
        return self.pp * self.interleave

    def num_microbatches(self, global_batch_size: int) -> int:
        """Microbatches of one optimizer step on one data-parallel rank: B / (dp * mbs)."""
        return global_batch_size // (self.dp * self.mbs)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours of a group along `axis`."""
        inner = AXES[AXES.index(axis) + 1 :]
        stride = 1
        for name in inner:
            stride *= self.degrees[name]
        return stride

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on each axis; the inverse of `rank_of`."""
        return {axis: rank // self.stride(axis) % self.degrees[axis] for axis in AXES}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates."""
        return sum(coordinates[axis] * self.stride(axis) for axis in AXES)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """All ranks that differ from `rank` only along `axis`."""
        here = self.coordinates(rank)
        return tuple(self.rank_of({**here, axis: i}) for i in range(self.degrees[axis]))

    def chunks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Chunks (in model order) that pipeline stage `stage` holds."""
        stages = stage_of_chunk(self.schedule, self.pp, np.arange(self.num_chunks))
        return tuple(np.flatnonzero(stages == stage).tolist())

    def layers_of_stage(self, stage: int) -> int:
        """Layers that pipeline stage `stage` holds, over all its chunks."""
        return sum(self.layers_per_stage[chunk] for chunk in self.chunks_of_stage(stage))

    def recompute_of_stage(self, stage: int) -> str:
        """Recompute policy of a stage; plans of the search have the same policy for all chunks of a stage."""
        return self.recompute[stage]

    def __str__(self) -> str:
        """The layout as the command line writes it."""
        return format_layout(self)


V_SHAPED: Final = ("zbv", "dualpipev")


def chunks_per_stage(schedule: Schedule) -> int:
    """Chunks of a stage if interleave is not given: two for a V-shaped schedule, one for any other."""
    return 2 if schedule in V_SHAPED else 1


def stage_of_chunk(schedule: Schedule, pp: Number, chunk: Number) -> Number:
    """The stage that holds a chunk: chunk % pp, or in a V-shaped schedule first forwards, then backwards.

    Source: Narayanan et al. (SC 2021), section 2.2.2; Qi et al. (2023), ZB-V.
    """
    return np.minimum(chunk, 2 * pp - 1 - chunk) if schedule in V_SHAPED else chunk % pp


def head_stage(layout: Degrees) -> Number:
    """The stage that holds the end of the model: the first stage of a V-shaped schedule, else the last stage."""
    return stage_of_chunk(layout.schedule, layout.pp, layout.pp * layout.interleave - 1)


@once
def offloads_optimizer(layout: Degrees) -> bool:
    """Whether the host's memory holds the optimizer states, and the host updates the weights."""
    return layout.offload == "both" or bool({"optimizer", "states"} & {*layout.offload.split("+")})


@once
def offloads_activations(layout: Degrees) -> bool:
    """Whether the host's memory holds the activations until the backward pass."""
    return layout.offload == "both" or "activations" in layout.offload.split("+")


@once
def offloads_params(layout: Degrees) -> bool:
    """Whether the host's memory also holds the shards of the weights that the device computes with."""
    return "params" in layout.offload.split("+")


def of_chunks(of_stages: tuple[Any, ...], interleave: int, schedule: Schedule) -> tuple[Any, ...]:
    """Values of stages, repeated for each chunk in model order."""
    pp = len(of_stages)
    return tuple(of_stages[int(stage_of_chunk(schedule, pp, chunk))] for chunk in range(pp * interleave))


def balanced_chunks(
    layers_of_stage: tuple[int, ...],
    interleave: int,
    schedule: Schedule = "interleaved",
    last: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Cut each stage's layers into `interleave` chunks that differ by at most one, and list them in model order.

    The larger chunks come first; but a first stage with fewer layers than chunks leaves the embedding alone.
    last: layers of each stage's last chunk, if the other chunks of the stage are balanced without it.
    """
    first, *_ = layers_of_stage
    sizes = [
        even_stages(layers, interleave)
        if last is None or interleave == 1
        else (*even_stages(layers - last[stage], interleave - 1), last[stage])
        for stage, layers in enumerate(layers_of_stage)
    ]
    if first < interleave and schedule == "interleaved":
        sizes[0] = tuple(sorted(sizes[0]))
    pp = len(sizes)
    stages = of_chunks(tuple(range(pp)), interleave, schedule)
    return tuple(sizes[stage][chunk // pp] for chunk, stage in enumerate(stages))


def last_chunks(layout: Layout) -> tuple[int, ...]:
    """Layers of each stage's last chunk, as the search may choose them: fewer only in a chunk that holds an end."""
    pp, first = layout.pp, layout.num_chunks - layout.pp
    even = [layout.layers_of_stage(stage) // layout.interleave for stage in range(pp)]
    own = layout.layers_per_stage[first:]
    return tuple(
        min(own[stage], even[stage]) if first + stage in (layout.num_chunks - 1, *layout.mtp) else even[stage]
        for stage in range(pp)
    )


def _collapse(values: tuple[Any, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else shortened_list("/".join(map(str, values)))


def shortened_list(text: str) -> str:
    """A list in which each run of equal entries is written with its length: `9/11/11/11/8` becomes `9/3*11/8`."""
    runs = [(value, len(list(same))) for value, same in groupby(text.split("/"))]
    return "/".join(f"{count}*{value}" if count > 1 else value for value, count in runs)


def format_layout(layout: Layout) -> str:
    """Write a layout as `tp=8,pp=4,...`; `planner.layout_text` reads the text back to an equal layout."""
    parts = []
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if field.name in ("mtp", "pools", "segment") and not value:
            continue
        if field.name in ("layers_per_stage", "pools"):
            text = shortened_list("/".join(map(str, value)))
        else:
            text = _collapse(value) if isinstance(value, tuple) else str(value)
        parts.append((field.name, text))
    order = {key: index for index, key in enumerate(KEYS)}
    return ",".join(f"{key}={text}" for key, text in sorted(parts, key=lambda part: order[part[0]]))


def even_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers per stage, divided as evenly as possible; the first stages hold the remainder."""
    base, extra = divmod(num_layers, pp)
    return tuple(base + (1 if stage < extra else 0) for stage in range(pp))


def even_split(num_layers: int, pp: int, interleave: int, schedule: Schedule = "1f1b") -> tuple[int, ...]:
    """Layers per chunk, divided as evenly as possible: stages differ by at most one layer, as do a stage's chunks.

    The first stages hold the remainder. In a V-shaped schedule the last stages hold the remainder, because the first
    stage also holds the head.
    """
    stages = even_stages(num_layers, pp)
    return balanced_chunks(stages[::-1] if schedule in V_SHAPED else stages, interleave, schedule)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, smallest first."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
