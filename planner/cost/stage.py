"""A pipeline stage in the cost model: how many layers of each kind it holds, and the parameters of these layers."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import lcm
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from planner.cost.parameters import HeldParams, end_params_on_device, layer_params_on_device
from planner.cost.recompute import recomputing_share
from planner.cost.shapes import by_part
from planner.layout import V_SHAPED, balanced_chunks, even_stages, head_stage, stage_of_chunk
from planner.once import once
from planner.specs.recompute import NONE, is_of_some_layers, policy_code, whole_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from planner.layout import Degrees, Layout
    from planner.numbers import Flag, IntArray, Number
    from planner.specs.job import Job, PoolJob

T = TypeVar("T")

_MANY_LAYERS: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage, or an array of stages; or a chunk of a stage.

    index: position in the pipeline.
    num_layers: layers of the stage.
    num_expert_layers: layers with experts.
    num_local_layers: layers with a sliding window.
    num_local_expert_layers: layers with experts and a sliding window.
    policy: code of the recompute policy (`planner.specs.recompute`).
    chunk: position in model order; None for a stage.
    num_mtp: layers for multi-token prediction; None if all of them stand beside the head.
    largest_chunk: layers of the largest chunk of an interleaved stage; None if its chunks are equal.
    last_chunk: layers of the last chunk of an interleaved stage.
    num_crossings: how many of the stage's two neighbours are in another pool.
    ends_apart: whether the model begins in one pool and ends in another.
    """

    index: Number
    num_layers: Number
    policy: Number
    num_expert_layers: Number = 0
    num_local_layers: Number = 0
    num_local_expert_layers: Number = 0
    chunk: Number | None = None
    num_mtp: Number | None = None
    largest_chunk: Number | None = None
    last_chunk: Number | None = None
    num_crossings: Number = 0
    ends_apart: Flag = False

    def number_of(self, has_experts: bool, is_local: bool) -> Number:
        """Number of the stage's layers of one kind."""
        both = self.num_local_expert_layers
        if has_experts:
            return both if is_local else self.num_expert_layers - both
        others = self.num_layers - self.num_expert_layers
        return self.num_local_layers - both if is_local else others - (self.num_local_layers - both)


@once
def holds_embedding(stage: Stage) -> Flag:
    """Whether the stage or chunk holds the embedding: the first stage, or the first chunk.

    Source: definition of a pipeline.
    """
    return np.equal(stage.index if stage.chunk is None else stage.chunk, 0)


@once
def holds_head(layout: Degrees, stage: Stage) -> Flag:
    """Whether the stage or chunk holds the head: the last stage (in a V the first stage), or the last chunk.

    Source: `planner.layout.head_stage`.
    """
    if stage.chunk is None:
        return np.equal(stage.index, head_stage(layout))
    return np.equal(stage.chunk, layout.pp * layout.interleave - 1)


@once
def policies_of(stage: Stage) -> tuple[int, ...]:
    """Codes of the recompute policies in these stages: first no recompute, then the other policies.

    Source: definition of `planner.specs.recompute`.
    """
    return (NONE, *sorted({whole_policy(code) for code in _codes(stage)} - {NONE}))


@once
def _codes(stage: Stage) -> list[int]:
    """The distinct recompute policies of the stages."""
    flat = np.ravel(stage.policy)
    codes: list[int] = np.flatnonzero(np.bincount(flat)).tolist() if flat.size > 1 else flat.tolist()
    return codes


def by_policy(layout: Degrees, stage: Stage, of_policy: Callable[[int], float]) -> Number:
    """For each stage, the value of its recompute policy; shaped like `stage.policy`.

    Source: definition of `planner.specs.recompute`.
    """
    return of_policies(layout, stage, known_values(tuple(map(of_policy, policies_of(stage)))))


@lru_cache(maxsize=512)
def known_values(in_order: tuple[float, ...]) -> tuple[float, ...]:
    """The values of recompute policies as the object that stands for equal values, so that they are counted once.

    Source: the argument.
    """
    return in_order


@once
def of_policies(layout: Degrees, stage: Stage, in_order: tuple[float, ...], *, recomputing: bool = False) -> Number:
    """For each stage, the value of its recompute policy; shaped like `stage.policy`.

    in_order: a value for each policy of `policies_of`.
    recomputing: whether to return the value of a recomputing layer. Else, if only some layers of a stage recompute, the
        result is the mean over its layers, with all kinds of layers spread evenly.

    Source: definition of `planner.specs.recompute`.
    """
    values = dict(zip(policies_of(stage), in_order, strict=True))
    if len(set(in_order)) == 1:
        return np.broadcast_to(values[NONE], np.shape(stage.policy))
    codes = _codes(stage)
    whole = np.zeros(max(codes) + 1)  # by the policy's code: (codes,)
    whole[codes] = [values[whole_policy(code)] for code in codes]
    found, is_partial = whole[stage.policy], np.zeros(len(whole), dtype=bool)
    is_partial[codes] = [is_of_some_layers(code) for code in codes]
    if recomputing or not is_partial.any():
        return found
    chunks = layout.interleave if stage.chunk is None else 1
    share = recomputing_share(stage.policy, stage.num_layers, chunks)
    return np.where(is_partial[stage.policy], values[NONE] + share * (found - values[NONE]), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Order of the kinds of layers: `leading` layers, then a sequence that repeats after every `period` layers.

    A position is the number of layers before it. Two positions have the same state if the same kinds of layers follow
    in the same order; the state's number is the first position that has it. A model whose layers are all alike has one
    state.
    """

    leading: int = 0
    period: int = 1

    @property
    def num_states(self) -> int:
        """Number of different states that positions can have."""
        return self.leading + self.period

    def state(self, position: Number) -> Number:
        """The state of a position."""
        behind = position - self.leading
        return np.where(np.less(behind, 0), position, self.leading + behind % self.period)

    def has_position(self, state: Number, earliest: Number, latest: Number) -> Flag:
        """Whether a position of this state exists from `earliest` to `latest`, both included."""
        stride = self.stride(state)
        return state + -(-np.maximum(earliest - state, 0) // stride) * stride <= latest

    def stride(self, state: Number) -> Number:
        """Distance between positions of a state.

        For a state of leading layers, which do not repeat, it is larger than any model.
        """
        return np.where(np.less(state, self.leading), _MANY_LAYERS, self.period)


@once
def pattern_of(job: Job) -> Pattern:
    """The pattern of a model's layers; a window at least as long as the sequences counts as no window.

    Source: definition of the model document.
    """
    model = job.model
    every = model.global_every if _has_windows(job) and model.global_every <= model.num_layers else 0
    if model.moe is None:
        return Pattern(period=every or 1)
    return Pattern(leading=model.moe.num_dense_layers, period=lcm(every or 1, model.moe.layer_frequency))


def _has_windows(job: Job) -> bool:
    return 0 < job.model.sliding_window < job.training.sequence_length


class LayerKind(NamedTuple):
    """A kind of layers in the model: whether they have experts, whether they have a window, and their number."""

    has_experts: bool
    is_local: bool
    number: int


@once
def kinds_of_model(job: Job) -> tuple[LayerKind, ...]:
    """The kinds of layers of a model, kinds with experts first; layers for multi-token prediction are not counted.

    Source: definition of the model document.
    """
    experts, local = _flags(job, job.model.num_layers)
    kinds = [LayerKind(e, w, int(np.sum((experts == e) & (local == w)))) for e in (True, False) for w in (False, True)]
    return tuple(kind for kind in kinds if kind.number)


def _flags(job: Job, num_layers: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each layer, whether it has experts and whether it has a window; two arrays of shape [num_layers]."""
    numbers = np.arange(num_layers)
    local = ~job.model.layer_is_global(numbers) if _has_windows(job) else numbers < 0
    return job.model.layer_has_experts(numbers), local


def _held(job: Job, first: Number, num_layers: Number) -> dict[str, Number]:
    """Number of layers of each kind among `num_layers` layers from position `first`, by the fields of `Stage`.

    Source: definition of the model document, counted layer by layer.
    """
    names = ("num_expert_layers", "num_local_layers", "num_local_expert_layers")
    pattern = pattern_of(job)
    if pattern.num_states == 1:
        (has_experts,), (is_local,) = _flags(job, 1)
        shares = int(has_experts), int(is_local), int(has_experts & is_local)
        return {name: num_layers * share for name, share in zip(names, shares, strict=True)}
    beyond = pattern.num_states + job.model.num_layers  # bounds may ask for layers after the last layer
    experts, local = _flags(job, job.model.num_layers + beyond)
    begin, end = (np.asarray(each, dtype=np.int64) for each in (first, first + num_layers))
    held = {}
    for name, flags in zip(names, (experts, local, experts & local), strict=True):
        before = np.concatenate([[0], np.cumsum(flags)])
        held[name] = before[end] - before[begin]
    return held


def stage_of(
    job: Job,
    *,
    index: Number,
    num_layers: Number,
    policy: Number,
    first: Number = 0,
    layout: Degrees | None = None,
    last_chunk: Number | None = None,
) -> Stage:
    """A stage of the search, with the number of its layers of each kind.

    first: number of layers of the model before the stage, if the stage has one chunk.
    layout: the layout of the stage; None if its chunks are equal.
    last_chunk: layers of the last chunk of an interleaved stage; None if all its chunks are balanced.

    In interleaved stages the leading layers are in the first chunk, and if kinds of layers repeat, each chunk holds
    whole periods. V-shaped schedules always have the chunks of the even split.
    """
    largest, last, num_mtp, pattern = None, None, None, pattern_of(job)
    if layout is not None and np.any(layout.mtp_before):
        num_mtp = np.where(np.equal(index, layout.pp - 1 - layout.mtp_before), job.model.mtp_layers, 0)
    if layout is not None and layout.schedule == "interleaved":
        last = num_layers // layout.interleave if last_chunk is None else last_chunk
        largest = np.maximum(-(-(num_layers - last) // (layout.interleave - 1)), last)
        first = np.where(np.equal(index, 0), 0, pattern.leading)
    if layout is not None and pattern.num_states > 1 and layout.schedule in V_SHAPED:
        held = _held_of_even_split(job, layout, index)
    else:
        held = _held(job, first, num_layers)
    chunks = {"largest_chunk": largest, "last_chunk": last, "num_mtp": num_mtp}
    return Stage(index=index, num_layers=num_layers, policy=policy, **chunks, **held)


def _held_of_even_split(job: Job, layout: Degrees, index: Number) -> dict[str, Number]:
    """The result of `_held` for all chunks of a stage, if the model's layers are split evenly."""
    pp, interleave, index = np.broadcast_arrays(layout.pp, layout.interleave, index)
    held: dict[str, Number] = {}
    for stages, chunks in set(zip(pp.ravel().tolist(), interleave.ravel().tolist(), strict=True)):
        rows = (pp == stages) & (interleave == chunks)
        layers = balanced_chunks(even_stages(job.model.num_layers, stages), chunks, layout.schedule)
        of_chunks = _held(job, np.cumsum(layers) - layers, np.array(layers))
        stage = stage_of_chunk(layout.schedule, stages, np.arange(stages * chunks))
        for name, numbers in of_chunks.items():
            of_stages = np.bincount(stage, weights=numbers)
            held.setdefault(name, np.zeros(pp.shape))[rows] = of_stages[index[rows]]
    return held


def with_borders(stage: Stage, layout: Degrees, pool_of: Callable[[Number], Number]) -> Stage:
    """The stages with `num_crossings` and `ends_apart` filled in; `pool_of` returns the pool of each stage index.

    Interleaved stages also send from the end of the pipeline to its beginning.
    """
    last, wraps = layout.pp - 1, layout.schedule == "interleaved"
    before = np.where(np.greater(stage.index, 0), stage.index - 1, last if wraps else 0)
    after = np.where(np.less(stage.index, last), stage.index + 1, 0 if wraps else last)
    own = pool_of(stage.index)
    crossings = np.not_equal(pool_of(before), own).astype(int) + np.not_equal(pool_of(after), own)
    apart = np.not_equal(pool_of(0 * stage.index), pool_of(head_stage(layout) + 0 * stage.index))
    return replace(stage, num_crossings=crossings, ends_apart=apart)


@once
def pool_indices(job: Job, layout: Layout) -> NDArray[np.int64]:
    """The pool of each stage of a layout, as its position in the list of the job's pools; shape (pp,).

    Source: definition of the layout.
    """
    if not layout.pools:
        return np.zeros(layout.pp, dtype=np.int64)
    names = [pool.cluster.name for pool in job.pools]
    return np.array([names.index(name) for name in layout.pools])


def by_pool(job: Job, pool: IntArray, price: Callable[[PoolJob], T]) -> T:
    """The result of `price` for an array of stages, each priced with the job on the stage's own pool.

    pool: the pool of each stage. The result of `price` may contain arrays in dataclasses, mappings and tuples; strings
    are those of the first pool.
    """
    if len(job.pools) == 1:
        return price(job.pools[0])

    def of_own(*prices: Any) -> Any:
        return prices[0] if isinstance(prices[0], str) else np.choose(pool, np.broadcast_arrays(pool, *prices)[1:])

    chosen: T = by_part(of_own, *map(price, job.pools))
    return chosen


@once
def stages_of(job: Job, layout: Layout) -> Stage:
    """All stages of a layout as arrays of shape (pp,)."""
    chunks = chunks_of(job, layout)

    def of_stages(numbers: Number) -> Number:
        return np.bincount(chunks.index, weights=numbers, minlength=layout.pp)

    found = Stage(
        index=np.arange(layout.pp),
        num_layers=np.asarray(of_stages(chunks.num_layers), dtype=np.int64),
        policy=np.array([policy_code(layout.recompute_of_stage(r)) for r in range(layout.pp)]),
        num_expert_layers=of_stages(chunks.num_expert_layers),
        num_local_layers=of_stages(chunks.num_local_layers),
        num_local_expert_layers=of_stages(chunks.num_local_expert_layers),
        num_mtp=None if chunks.num_mtp is None else of_stages(chunks.num_mtp),
        **_sizes_of_chunks(layout),
    )
    return with_borders(found, layout, pool_indices(job, layout).__getitem__) if layout.pools else found


def _sizes_of_chunks(layout: Layout) -> dict[str, Number]:
    """Layers of the largest and of the last chunk of each interleaved stage; shape (pp,) each."""
    if layout.schedule != "interleaved":
        return {}
    sizes = np.reshape(layout.layers_per_stage, (layout.interleave, layout.pp))
    return {"largest_chunk": np.max(sizes, axis=0), "last_chunk": sizes[-1]}


@once
def chunks_of(job: Job, layout: Layout) -> Stage:
    """All chunks of a layout in model order, as arrays of shape (pp * interleave,)."""
    layers, chunk = np.array(layout.layers_per_stage), np.arange(layout.num_chunks)
    return Stage(
        index=stage_of_chunk(layout.schedule, layout.pp, chunk),
        num_layers=layers,
        policy=np.array([policy_code(policy) for policy in layout.recompute]),
        chunk=chunk,
        num_mtp=_mtp_of_chunks(job, layout),
        **_held(job, np.cumsum(layers) - layers, layers),
    )


def _mtp_of_chunks(job: Job, layout: Layout) -> NDArray[np.float64] | None:
    """Layers for multi-token prediction in each chunk; one chunk in `layout.mtp` stands for all of them."""
    if not layout.mtp or not job.model.mtp_layers:
        return None
    each = np.bincount(layout.mtp, minlength=layout.num_chunks)
    return np.asarray(each * (job.model.mtp_layers / len(layout.mtp)), dtype=float)


@once
def layer_kinds(job: Job, layout: Degrees, stage: Stage) -> tuple[tuple[bool, Number], ...]:
    """Numbers of layers on a stage, as (has experts, number); kinds that the model does not have are left out.

    Layers for multi-token prediction are of the model's main kind.

    Source: DeepSeek-V3 (2024), section 2.2; definition of the model document.
    """
    moe = job.model.moe
    extra = mtp_layers(job, layout, stage)
    if moe is None:
        return ((False, stage.num_layers + extra),)
    experts = (True, stage.num_expert_layers + extra)
    if moe.num_dense_layers or moe.layer_frequency > 1:
        return (experts, (False, stage.num_layers - stage.num_expert_layers))
    return (experts,)


def timed_kinds(job: Job, layout: Degrees, stage: Stage) -> tuple[tuple[tuple[bool, bool], Number], ...]:
    """Numbers of layers on a stage by kind of computation, as ((has experts, has a window), number).

    Layers for multi-token prediction are counted as in `layer_kinds`, and attend to all tokens.

    Source: DeepSeek-V3 (2024), section 2.2; definition of the model document.
    """
    kinds = [(has_experts, is_local) for has_experts, is_local, _ in kinds_of_model(job)]
    further = (job.model.moe is not None, False)
    if job.model.mtp_layers and further not in kinds:
        kinds.append(further)
    extra = {further: mtp_layers(job, layout, stage)}
    return tuple((kind, stage.number_of(*kind) + extra.get(kind, 0)) for kind in kinds)


@once
def mtp_layers(job: Job, layout: Degrees, stage: Stage) -> Number:
    """Layers for multi-token prediction on a stage or chunk; without `Stage.num_mtp` they stand beside the head.

    Source: definition of the layout.
    """
    if stage.num_mtp is not None:
        return stage.num_mtp
    return holds_head(layout, stage) * job.model.mtp_layers if job.model.mtp_layers else 0


def sum_over_layers(job: Job, layout: Degrees, stage: Stage, of_layer: Callable[[bool], T]) -> T:
    """The sum of `of_layer` over the layers of a stage; its argument says whether a layer has experts.

    Source: definition.
    """
    of_kinds: list[Any] = [of_layer(kind) * count for kind, count in layer_kinds(job, layout, stage)]
    found: T = reduce(operator.add, of_kinds)
    return found


def largest_of_layers(job: Job, layout: Degrees, stage: Stage, of_layer: Callable[[bool], Number]) -> Number:
    """The largest value of `of_layer` among the layers of a stage; 0 on a stage without layers.

    Source: definition.
    """
    kinds = layer_kinds(job, layout, stage)
    return np.max(
        np.broadcast_arrays(*(np.where(np.greater(count, 0), of_layer(k), 0.0) for k, count in kinds)), axis=0
    )


@once
def end_params(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Parameters outside the layers on one device of a stage.

    Source: `planner.cost.parameters.end_params_on_device`.
    """
    return end_params_on_device(job.model, job.engine, layout, stage.index, mtp_layers(job, layout, stage))


@once
def held_params(job: PoolJob, layout: Degrees, stage: Stage) -> HeldParams:
    """Parameters that one device of a stage holds: its layers, and the embedding or head if the stage has it.

    Source: sum of the layers and the ends, parameters.py.
    """
    ends = HeldParams(common=end_params(job, layout, stage), experts=0.0)
    return ends + sum_over_layers(
        job, layout, stage, lambda experts: layer_params_on_device(job.model, layout, experts=experts)
    )


@once
def shard_degree(layout: Degrees) -> Number:
    """Ranks over which ZeRO spreads a device's states: dp * cp / hsdp, and 1 without ZeRO.

    Source: Rajbhandari et al., ZeRO (SC 2020); HSDP shards within a replica.
    """
    return np.where(np.equal(layout.zero, 0), 1, layout.dp * layout.cp / layout.hsdp)


@once
def expert_shard_degree(layout: Degrees) -> Number:
    """Ranks over which ZeRO spreads the states of routed experts: dp * cp * tp / (ep * etp), 1 without ZeRO.

    Source: Megatron-LM, expert data parallelism.
    """
    ranks = layout.dp * layout.cp * layout.tp / (layout.ep * layout.etp)
    return np.where(np.equal(layout.zero, 0), 1, np.maximum(1, ranks / layout.hsdp))


@once
def expert_shard_divisor(job: PoolJob, layout: Degrees) -> Number:
    """Routed experts of a device before ZeRO, divided by the routed experts in its fullest shard.

    For equal shards this is `expert_shard_degree`. If an engine stacks experts in one tensor and cuts the tensor along
    its first dimension, a shard contains whole experts. With more ranks than experts, some ranks hold one expert and
    others none.

    Source: transformers 5.23, models/mixtral/modeling_mixtral.py (MixtralExperts, one parameter); torch FSDP2,
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py (Shard(0) by default, uneven).
    """
    shards = expert_shard_degree(layout)
    if job.model.moe is None or not job.engine.memory.shards_whole_experts:
        return shards
    experts = job.model.moe.num_experts / layout.ep
    return experts / np.ceil(experts / shards)


def shard_of(job: PoolJob, layout: Degrees, held: HeldParams) -> Number:
    """One device's shard of what a device holds before ZeRO, parameters or bytes; experts have their own shard group.

    Source: `shard_degree` and `expert_shard_divisor`.
    """
    return held.common / shard_degree(layout) + held.experts / expert_shard_divisor(job, layout)


def expert_padding(job: PoolJob, layout: Degrees) -> Number:
    """Elements in a collective over shards of routed experts, divided by the experts' parameters: 1 for equal shards.

    All ranks send as many elements as the fullest shard has.

    Source: torch FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param.py (padded_sharded_param_size).
    """
    return expert_shard_degree(layout) / expert_shard_divisor(job, layout)
