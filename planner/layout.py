"""A layout, a point in the search space: its degrees, rules that need no cost, and the order of ranks.

Only this module defines the order of ranks: they are numbered over the axes (pp, dp, cp, tp) with tp fastest. The ranks
of a tensor-parallel group are therefore neighbours, and the pipeline crosses hosts. The cost model needs the order to
know which link a group crosses, and the trainer needs it to build its DeviceMesh; both use this module.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast, get_args

import numpy as np

from planner.errors import InputError, Mistake
from planner.once import once
from planner.specs.recipe import Offload, Schedule
from planner.specs.recompute import canonical, policy_fault
from planner.specs.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from planner.numbers import Number

AXES: Final = ("pp", "dp", "cp", "tp")
"""Mesh axes, slowest first."""

_DUALPIPE: Final = "dualpipe"
"""DualPipe on pp stages, fed from both ends: two V schedules side by side, of pp / 2 stages with two chunks each."""

_COUNTS: Final = ("tp", "pp", "dp", "cp", "ep", "etp", "hsdp", "mbs", "interleave", "segment")
_KEYS: Final = (*_COUNTS, "zero", "schedule", "sp", "recompute", "offload", "layers_per_stage", "mtp", "loss", "pools")
_LISTS: Final = ("layers_per_stage", "recompute", "pools")
"""Keys with one entry per chunk, or per stage (`pools`); `3*11` means `11/11/11`."""
_KEY_OF: Final = {
    **dict.fromkeys(("tensor", "tensor_parallel", "tensor_model_parallel", "tensor_parallel_degree"), "tp"),
    **dict.fromkeys(("pipeline", "pipeline_parallel", "pipeline_model_parallel", "pipeline_parallel_degree"), "pp"),
    **dict.fromkeys(("data", "data_parallel", "replicas"), "dp"),
    **dict.fromkeys(("context", "context_parallel", "ulysses", "ulysses_sequence_parallel"), "cp"),
    **dict.fromkeys(("expert", "expert_parallel", "expert_model_parallel"), "ep"),
    **dict.fromkeys(("micro_batch", "microbatch", "per_device_train_batch"), "mbs"),
    **dict.fromkeys(("vpp", "virtual_pipeline", "chunks"), "interleave"),
    **dict.fromkeys(("zero_stage", "zero1", "zero2", "zero3"), "zero"),
    **dict.fromkeys(("sequence_parallel", "sequence"), "sp"),
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing", "checkpointing"), "recompute"),
}
"""Other programs' names for a layout's keys (without `_size` at the end) -> our key."""
_ACCUMULATION: Final = ("gas", "ga", "grad_accum", "gradient_accumulation_steps", "accumulation")
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "schedule": (*get_args(Schedule), _DUALPIPE),
    "offload": get_args(Offload),
}


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


def _written_out(text: str) -> str:
    """The inverse of `shortened_list`; a part without a valid count stays as it is, for later checks to report."""
    parts = []
    for part in text.split("/"):
        count, star, value = part.partition("*")
        counted = bool(star) and count.isascii() and count.isdigit() and len(count) < 5 and int(count) > 0
        parts += [value] * int(count) if counted else [part]
    return "/".join(parts)


def format_layout(layout: Layout) -> str:
    """Write a layout as `tp=8,pp=4,...`; `parse_layout` reads the text back to an equal layout."""
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
    order = {key: index for index, key in enumerate(_KEYS)}
    return ",".join(f"{key}={text}" for key, text in sorted(parts, key=lambda part: order[part[0]]))


def parse_assignments(text: str, option: str) -> dict[str, str]:
    """Split `tp=8,pp=4` into a mapping and write its lists out; report every unknown or repeated key of `option`.

    Raises:
        InputError: the text has bad parts, one mistake for each of them.
    """
    found: dict[str, str] = {}
    mistakes = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, separator, value = part.partition("=")
        key = key.strip()
        if key not in _KEYS:
            mistakes.append(Mistake(message=f"unknown layout key {quoted(key)}", where=option, hint=_known_key(key)))
        elif not separator or not value.strip():
            mistakes.append(Mistake(message=f"{quoted(part)} has no value", where=option, hint=f"write `{key}=...`"))
        elif key in found:
            mistakes.append(Mistake(message=f"`{key}` is given twice", where=option))
        else:
            found[key] = _written_out(value.strip()) if key in _LISTS else value.strip()
            if key == "recompute":
                found[key] = "/".join(map(canonical, found[key].split("/")))
            if key == "offload":
                found[key] = offload_of(found[key].split("+"))
    if mistakes:
        raise InputError(*mistakes)
    return found


def offload_of(words: Iterable[str]) -> str:
    """The value of `offload` for tensors on the host; other words stay as they are."""
    named = {"states" if each == "optimizer" else each for each in words}
    named = named - {"both"} | {"states", "activations"} if "both" in named else named
    joined = "+".join(sorted(named, key=lambda each: (each != "params", each != "states", each)))
    return {"states": "optimizer", "states+activations": "both"}.get(joined, joined)


def _known_key(word: str) -> str:
    """A hint for a word that is not a key: the key that was probably meant, or all keys."""
    plain = word.lower().replace("-", "_").removesuffix("_size")
    if plain in _ACCUMULATION:
        return "microbatches follow from --global-batch, dp and mbs: global batch / (dp * mbs)"
    near = difflib.get_close_matches(word, _KEYS, n=1)
    if key := _KEY_OF.get(plain) or (near[0] if near else ""):
        return f"did you mean `{key}`?"
    return f"known keys: {', '.join(_KEYS)}"


def check_value(key: str, text: str, option: str) -> Mistake | None:
    """The mistake in the value of one layout key, or None."""
    if key in _COUNTS or key in ("zero", "sp"):
        low, high = {"zero": (0, 3), "sp": (0, 1)}.get(key, (1, 10_000_000))
        if text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high:
            return None
        wanted = f"{low} to {high}" if key in ("zero", "sp") else "a whole number of at least 1"
        return Mistake(message=f"{quoted(f'{key}={text}')} is no legal value", where=option, hint=f"{key} is {wanted}")
    if key == "pools":  # names of pools are checked against the cluster, elsewhere
        return None
    if key == "recompute":
        faults = (fault for part in text.split("/") if (fault := policy_fault(part)))
        return next(
            (
                Mistake(message=f"{quoted(f'{key}={text}')} is no legal value", where=option, hint=hint)
                for hint in faults
            ),
            None,
        )
    allowed = _WORDS.get(key, ())
    for part in (text,) if key == "loss" else text.split("/"):
        if part in allowed or (not allowed and part.isascii() and part.isdigit() and len(part) < 6):
            continue
        near = difflib.get_close_matches(part, allowed, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known values: {', '.join(allowed) or 'whole numbers'}"
        return Mistake(message=f"{quoted(f'{key}={text}')} is no legal value", where=option, hint=hint)
    return None


def parse_layout(
    text: str, *, num_layers: int, num_devices: int | Mapping[str, int], option: str = "--layout"
) -> Layout:
    """Read `tp=8,pp=4,mbs=1,...`; a value that is left out is derived or gets its default.

    Defaults: every degree 1, zero 0, mbs 1, no recompute, sp 1 if tp > 1, schedule `interleaved` if interleave > 1 else
    `1f1b`, interleave 2 for the V-shaped schedules, dp = num_devices / (tp * pp * cp). Layers are divided as evenly as
    possible, and the first stages hold the remainder. The number of hosts used in a scale-up domain (segment) depends
    on the cluster: planner/cost/segments.py.

    num_devices: devices of the cluster, or of each pool of a mixed cluster. For a mixed cluster `pools` has to be
    given, and dp is the largest degree for which every pool has enough devices for its stages.

    Raises:
        InputError: unknown keys, bad values, or lists of the wrong length.
    """
    given = parse_assignments(text, option)
    mistakes = [bad for key, value in given.items() if (bad := check_value(key, value, option))]
    if mistakes:
        raise InputError(*mistakes)
    number: dict[str, int] = {key: int(given[key]) for key in (*_COUNTS, "zero", "sp") if key in given}
    if given.get("schedule") == _DUALPIPE:
        given, number = _as_v(given, number, option)
    tp, pp, cp = number.get("tp", 1), number.get("pp", 1), number.get("cp", 1)
    schedule = cast("Schedule", given.get("schedule", "interleaved" if number.get("interleave", 1) > 1 else "1f1b"))
    interleave = number.setdefault("interleave", chunks_per_stage(schedule))
    pools = tuple(given["pools"].split("/")) if "pools" in given else ()
    number.setdefault("dp", max(1, _devices_per_stage(num_devices, pools, pp, option) // (tp * cp)))
    number.setdefault("sp", 1 if tp > 1 else 0)
    chunks = pp * interleave
    layers = _layers_of_chunks(given.get("layers_per_stage"), num_layers, pp, interleave, schedule, option)
    mtp = _mtp_chunks(given, chunks, option)
    recompute = tuple(given.get("recompute", "none").split("/"))
    recompute = recompute * chunks if len(recompute) == 1 else recompute
    _check_entries("recompute", recompute, chunks, option)
    return Layout(
        **number,
        schedule=schedule,
        recompute=recompute,
        offload=cast("Offload", given.get("offload", "none")),
        layers_per_stage=layers,
        mtp=mtp,
        pools=pools,
    )


def _mtp_chunks(given: Mapping[str, str], chunks: int, option: str) -> tuple[int, ...]:
    """The chunks of `mtp`, empty if all stand beside the loss; `loss` is checked, because it closes the model.

    Raises:
        InputError: a chunk that does not exist, or a loss before the last chunk.
    """
    last, hint = chunks - 1, f"chunks are numbered from 0 to {chunks - 1}, in model order"
    for key in ("mtp", "loss"):
        if beyond := [each for each in given.get(key, "").split("/") if each and int(each) > last]:
            raise InputError(f"`{key}={beyond[0]}` names no chunk", where=option, hint=hint)
    if int(given.get("loss", last)) != last:
        hint = f"leave `loss` out, or write loss={last}; the last chunk may hold the loss and no layer"
        raise InputError(f"`loss={given['loss']}`: the loss stands in the last chunk", where=option, hint=hint)
    mtp = tuple(map(int, filter(None, given.get("mtp", "").split("/"))))
    return () if set(mtp) == {last} else mtp[:1] if len(set(mtp)) == 1 else mtp


def _as_v(given: Mapping[str, str], number: Mapping[str, int], option: str) -> tuple[dict[str, str], dict[str, int]]:
    """`schedule=dualpipe` as two V schedules: each rank holds stages r and pp - 1 - r of one of two model replicas.

    Source: DeepSeek, DualPipe (README), DualPipeV ("cut in half").
    """
    pp = number.get("pp", 1)
    if pp % 2 or "interleave" in number or "dp" in number:
        raise InputError(
            Mistake(
                message="`schedule=dualpipe` needs an even pp, and neither interleave nor dp",
                where=option,
                hint="DualPipe on pp stages is two V's of half the stages: `schedule=dualpipev,pp=8` for 16",
            )
        )
    return {**given, "schedule": "dualpipev"}, {**number, "pp": pp // 2, "interleave": 2}


def _devices_per_stage(num_devices: int | Mapping[str, int], pools: tuple[str, ...], pp: int, option: str) -> int:
    """Devices that each stage can have."""
    if isinstance(num_devices, int):
        return num_devices // pp
    known = ", ".join(num_devices)
    if len(pools) != pp:
        message = f"`pools` has {len(pools)} entries" if pools else "which pool each stage runs on is not said"
        hint = f"pp = {pp} entries with / between, of the pools {known}"
        raise InputError(Mistake(message=message, where=option, hint=hint))
    unknown = sorted(set(pools) - set(num_devices))
    if unknown:
        raise InputError(Mistake(message=f"unknown pool `{unknown[0]}`", where=option, hint=f"pools are {known}"))
    return min(num_devices[pool] // pools.count(pool) for pool in pools)


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


def _layers_of_chunks(
    given: str | None, num_layers: int, pp: int, interleave: int, schedule: Schedule, option: str
) -> tuple[int, ...]:
    """Layers of each chunk, as given or divided as evenly as possible.

    Two chunks more than layers leave none for the first and the last chunk, which hold the model's ends.

    Raises:
        InputError: the list does not have pp * interleave entries that sum to the layers, or chunks outnumber layers.
    """
    chunks = pp * interleave
    if given is not None:
        layers = tuple(map(int, given.split("/")))
        _check_entries("layers_per_stage", layers, chunks, option)
        if sum(layers) != num_layers:
            hint = f"the model has {num_layers} layers"
            raise InputError(f"`layers_per_stage` sums to {sum(layers)}", where=option, hint=hint)
        return layers
    if chunks == num_layers + 2 and schedule not in V_SHAPED:
        return (0, *(1,) * num_layers, 0)
    if chunks > num_layers:
        message = f"pp {pp} * interleave {interleave} = {chunks} chunks of {num_layers} layers"
        raise InputError(message, where=option, hint="each chunk holds at least one layer; lower pp or interleave")
    return even_split(num_layers, pp, interleave, schedule)


def _check_entries(key: str, values: tuple[Any, ...], chunks: int, option: str) -> None:
    if len(values) != chunks:
        hint = f"pp * interleave = {chunks} entries are needed, in model order"
        raise InputError(f"`{key}` has {len(values)} entries", where=option, hint=hint)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, smallest first."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
