"""All legal outer configurations as arrays, cheap bounds on them, and the prices of the ones that remain."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cost.compute import head_seconds
from planner.cost.layers import layer_seconds
from planner.cost.optimizers import optimizer_seconds
from planner.cost.parameters import layer_params_on_device
from planner.cost.prices import num_microbatches, stage_bytes, stage_prices
from planner.cost.stage import POLICIES, Stage, shard_degree, stage_of
from planner.cost.traffic import tensor_parallel_seconds
from planner.errors import InputError
from planner.layout import Layout, balanced_chunks, of_chunks
from planner.search.candidate import Candidate
from planner.search.legality import RULES, broken_rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from planner.search.constraints import Constraints
    from planner.search.legality import Rule
    from planner.specs.engine import Recompute, Schedule
    from planner.specs.job import Job

__all__ = [
    "DegreeArrays",
    "allowed_policies",
    "layout_at",
    "least_stage_bytes",
    "legal_degrees",
    "lower_bound_seconds",
    "price_candidate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeArrays:
    """Many outer configurations; every field but `schedule` is an array of one length."""

    tp: Any
    pp: Any
    dp: Any
    cp: Any
    ep: Any
    etp: Any
    zero: Any
    hsdp: Any
    mbs: Any
    interleave: Any
    sp: Any
    schedule: Schedule

    def __len__(self) -> int:
        """Number of configurations."""
        return len(self.tp)

    @property
    def world_size(self) -> Any:
        """Devices that each configuration uses."""
        return self.tp * self.pp * self.cp * self.dp

    def take(self, index: Any) -> DegreeArrays:
        """The configurations at `index` (a mask, positions, or one position, which gives plain integers)."""
        taken = {name: getattr(self, name)[index] for name in _ARRAYS}
        if np.ndim(index) == 0:
            taken = {name: int(value) for name, value in taken.items()}
        return DegreeArrays(**taken, schedule=self.schedule)


_ARRAYS = tuple(f.name for f in fields(DegreeArrays) if f.name != "schedule")


def _with_ones(length: int, *, schedule: Schedule, **given: Any) -> DegreeArrays:
    """Configurations whose degrees are 1 where nothing is given (0 for sp)."""
    ones, zeros = np.ones(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
    defaults = {name: zeros if name in ("sp", "zero") else ones for name in _ARRAYS}
    return DegreeArrays(**(defaults | given), schedule=schedule)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _product(*options: tuple[int, Sequence[tuple[int, ...]]]) -> Iterator[NDArray[np.int64]]:
    """Columns of the Cartesian product of lists of tuples; each list comes with the length of its tuples."""
    tables = [np.array(option, dtype=np.int64).reshape(len(option), width) for width, option in options]
    grids = np.meshgrid(*(np.arange(len(table)) for table in tables), indexing="ij")
    for table, grid in zip(tables, grids, strict=True):
        for column in range(table.shape[1]):
            yield table[grid.ravel(), column]


def legal_degrees(job: Job, constraints: Constraints) -> tuple[list[DegreeArrays], dict[str, int]]:
    """Every outer configuration that the rules and the user's constraints leave, one entry for each schedule.

    Also returned: how many configurations each rule refused, the first broken rule counting.

    Raises:
        InputError: no legal configuration is left; the message names the rule that refused most.
    """
    refused: dict[str, int] = {}
    legal = [_degrees_of(job, constraints, schedule, refused) for schedule in _schedules(job, constraints)]
    if not sum(map(len, legal)):
        _explain_no_candidate(job, refused, constraints)
    return [each for each in legal if len(each)], refused


def _schedules(job: Job, constraints: Constraints) -> tuple[Schedule, ...]:
    """Schedules to consider: GPipe takes the time of 1F1B and more memory, so it is only used when pinned."""
    pinned = constraints.value_of("schedule")
    usual = tuple(s for s in job.engine.schedules if s in ("1f1b", "interleaved"))
    return tuple(s for s in job.engine.schedules if s == pinned) if pinned else usual


def _tensor_options(job: Job, constraints: Constraints, refused: dict[str, int]) -> list[tuple[int, int]]:
    """Legal (tp, sp) pairs. Sequence parallelism is on wherever it can be, unless it is pinned."""
    options = [t for t in _divisors(job.model.num_heads) if t <= job.cluster.num_devices]
    pinned = constraints.value_of("sp")
    tp = np.array(options)
    sp = (
        np.full_like(tp, int(pinned)) if pinned else np.where((tp > 1) & (job.training.sequence_length % tp == 0), 1, 0)
    )
    left = _with_ones(len(tp), schedule="1f1b", tp=tp, sp=sp)
    left = left.take(constraints.only("tp", "sp").allowed(left))
    left = _obey(job, left, [rule for rule in RULES if rule.name in _TENSOR_RULES], refused)
    return list(zip(left.tp.tolist(), left.sp.tolist(), strict=True))


_TENSOR_RULES = ("tp-divides", "vocabulary", "tp-within-node", "sequence-parallel")


def _obey(job: Job, degrees: DegreeArrays, rules: Sequence[Rule], refused: dict[str, int]) -> DegreeArrays:
    """The configurations that meet the rules; counts what each rule refuses."""
    for rule in rules:
        holds = np.broadcast_to(rule.holds(job, degrees), (len(degrees),))
        refused[rule.name] = refused.get(rule.name, 0) + int(len(degrees) - holds.sum())
        degrees = degrees.take(holds)
    return degrees


def _expert_degrees(job: Job) -> list[int]:
    """Degrees of expert parallelism that divide the experts, where the engine has the axis."""
    if job.model.moe is None or "ep" not in job.engine.axes:
        return [1]
    return [e for e in _divisors(job.model.moe.num_experts) if e <= job.cluster.num_devices]


def _degrees_of(job: Job, constraints: Constraints, schedule: Schedule, refused: dict[str, int]) -> DegreeArrays:
    num_devices, layers = job.cluster.num_devices, job.model.num_layers
    batch = job.training.global_batch_size
    tensor = _tensor_options(job, constraints, refused)
    if schedule == "interleaved":
        pipeline = [(p, v) for p in range(2, min(layers, num_devices) + 1) for v in range(2, layers // p + 1)]
    else:
        pipeline = [(p, 1) for p in range(1, min(layers, num_devices) + 1)]
    hsdp = int(constraints.value_of("hsdp") or 1)
    data = [(d, b, hsdp) for d in _divisors(batch) if d <= num_devices for b in _divisors(batch // d)]
    zero = [(z,) for z in sorted({*job.engine.zero_stages, *job.engine.zero_stages_with_pipeline})]
    experts = [(e, int(constraints.value_of("etp") or 1)) for e in _expert_degrees(job)]
    context = [(int(constraints.value_of("cp") or 1),)]  # used only where it is pinned
    names = ("tp", "sp", "pp", "interleave", "dp", "mbs", "hsdp", "zero", "ep", "etp", "cp")
    tables = ((2, tensor), (2, pipeline), (3, data), (1, zero), (2, experts), (1, context))
    arrays = dict(zip(names, _product(*tables), strict=True))
    everything = _with_ones(len(arrays["tp"]), schedule=schedule, **arrays)
    left = everything.take(arrays["tp"] * arrays["pp"] * arrays["dp"] * arrays["cp"] <= num_devices)
    left = left.take(constraints.allowed(left))
    return _obey(job, left, RULES, refused)


def _explain_no_candidate(job: Job, refused: dict[str, int], constraints: Constraints) -> None:
    why = {rule.name: rule.why for rule in RULES}
    worst = max(why, key=lambda name: refused.get(name, 0))
    pins = ", ".join(map(str, constraints.pins))
    if not pins:
        raise InputError(f"no legal layout exists: {why[worst]}", hint="change the batch size or the number of devices")
    pinned = {pin.key: int(pin.value) for pin in constraints.pins if pin.is_numeric and pin.sign == "="}
    chunks = pinned.get("pp", 1) * pinned.get("interleave", 1)
    schedule: Schedule = "interleaved" if pinned.get("interleave", 1) > 1 else "1f1b"
    policies: tuple[Recompute, ...] = tuple("none" for _ in range(chunks))
    degrees: dict[str, Any] = {**pinned}
    degrees.setdefault("sp", 1 if pinned.get("tp", 1) > 1 else 0)
    alone = Layout(**degrees, schedule=schedule, layers_per_stage=(1,) * chunks, recompute=policies)
    broken = "; ".join(broken_rules(job, alone))
    raise InputError(
        f"no layout meets the pins {pins}: {broken or why[worst]}",
        where="--pin",
        hint="drop one of the pins; `planner explain MODEL CLUSTER --layout ...` checks one layout",
    )


def allowed_policies(job: Job, constraints: Constraints, degrees: Any) -> list[int]:
    """Indices into `POLICIES` that the engine has and the constraints allow for one configuration.

    Selective recompute of fused attention saves nothing that counts, so it is offered for unfused attention only.
    """
    offered = [p for p in POLICIES if p in job.engine.recompute]
    pinned = constraints.value_of("recompute") or ""
    of_core = job.engine.selective_recompute == "attention-core"
    if of_core and job.training.attention == "flash" and "selective" not in pinned.split("/"):
        offered = [p for p in offered if p != "selective"]
    return [POLICIES.index(p) for p in offered if bool(np.all(constraints.allows_policy(p, degrees)))]


def lower_bound_seconds(job: Job, degrees: DegreeArrays) -> NDArray[np.float64]:
    """A step of these configurations takes at least this long, however layers and recompute are chosen.

    No stage recomputes, communication of data and pipeline parallelism is free. The slowest of S stages takes
    at least the mean of all work, and at least ceil(L / S) layers; the last stage at least one layer a chunk
    and the head. So T >= (m - 1/v) * slowest + all work / v + the optimizer's share of the mean stage.

    Source: derived here; tested to stay below the exact optimum.
    """
    keys = [degrees.tp, degrees.mbs, degrees.sp, degrees.cp, degrees.ep, degrees.etp]
    key, position = np.unique(np.stack(keys), axis=1, return_inverse=True)
    unique = _with_ones(
        key.shape[1], schedule=degrees.schedule, tp=key[0], mbs=key[1], sp=key[2], cp=key[3], ep=key[4], etp=key[5]
    )
    comm = sum(tensor_parallel_seconds(job, unique))
    kinds = [layer_seconds(job, unique, experts=experts) for experts in _kinds(job)]
    each = np.minimum.reduce([k.passes.total for k in kinds])
    each = np.broadcast_to(each + comm, key.shape[1:])[position.ravel()]
    head = np.broadcast_to(head_seconds(job, unique).total, key.shape[1:])[position.ravel()]
    m, v, layers = num_microbatches(job, degrees), degrees.interleave, job.model.num_layers
    work = layers * each + head
    fullest = np.ceil(layers / degrees.pp) * each
    slowest = np.maximum.reduce([work / degrees.pp, fullest, v * each + head])
    bound = (m - 1 / v) * slowest + work / v
    if job.model.moe is not None:
        return np.asarray(bound)  # experts are sharded otherwise; their optimizer is left out
    params = layer_params_on_device(job.model, degrees) * layers / degrees.pp
    return np.asarray(bound + optimizer_seconds(job, params / shard_degree(degrees)))


def least_stage_bytes(job: Job, degrees: DegreeArrays, policies: Sequence[int]) -> NDArray[np.float64]:
    """The fullest stage of these configurations needs at least this many bytes, however layers are split.

    Some stage holds ceil(L / S) layers or more. Middle stages need less the later they are, so the least of
    the first, the last but one and the last stage bounds them all.

    Source: derived here; tested against the priced columns.
    """
    layers = np.ceil(job.model.num_layers / degrees.pp)
    least = np.full(len(degrees), np.inf)
    for policy in policies:
        for stage in (np.zeros_like(degrees.pp), np.maximum(degrees.pp - 2, 0), degrees.pp - 1):
            shape = stage_of(job, index=stage, num_layers=layers, policy=policy)
            least = np.minimum(least, stage_bytes(job, degrees, shape))
    return least


def price_candidate(
    job: Job,
    degrees: DegreeArrays,
    policies: Sequence[int],
    *,
    constraints: Constraints | None = None,
    cutoff_seconds: float = np.inf,
) -> Candidate:
    """Prices of every way to fill each stage of one configuration, those that fit into memory.

    `cutoff_seconds`: fillings that alone make the step longer are left out.
    """
    stages, smallest = degrees.pp, degrees.interleave
    m = float(num_microbatches(job, degrees))
    counts = _layer_counts(job, degrees, cutoff_seconds / max(m - 1 / smallest, 1e-9))
    index, layers, policy = (
        grid.ravel() for grid in np.meshgrid(np.arange(stages), counts, np.asarray(policies), indexing="ij")
    )
    shape = stage_of(job, index=index, num_layers=layers, policy=policy)
    prices = stage_prices(job, degrees, shape)
    seconds = np.broadcast_to(prices.microbatch_seconds, index.shape)
    tail = np.broadcast_to(prices.tail_seconds, index.shape)
    keep = np.broadcast_to(stage_bytes(job, degrees, shape), index.shape) <= job.memory_limit_bytes
    if job.model.moe is not None:  # the leading dense layers all lie in the first chunk, as `stage_of` prices them
        dense = np.where(index == 0, job.model.moe.num_dense_layers, 0)
        keep = keep & (layers // smallest >= dense)
    if constraints:
        keep = keep & _meets_lists(constraints, degrees, shape)
    return Candidate(
        name=f"tp={degrees.tp},pp={stages},dp={degrees.dp},zero={degrees.zero},mbs={degrees.mbs},v={smallest}",
        num_layers=job.model.num_layers,
        num_stages=stages,
        steady_count=m - 1 / smallest,
        sum_weight=1 / smallest,
        constant_seconds=0.0,
        stage=index[keep],
        layers=layers[keep],
        policy=policy[keep],
        seconds=np.asarray(seconds[keep], dtype=float),
        tail_seconds=np.asarray(tail[keep], dtype=float),
    )


def _kinds(job: Job) -> tuple[bool, ...]:
    """Kinds of layers that the model has: without experts, with experts."""
    moe = job.model.moe
    if moe is None:
        return (False,)
    return (False, True) if moe.num_dense_layers or moe.layer_frequency > 1 else (True,)


def _layer_counts(job: Job, degrees: DegreeArrays, slowest_seconds: float) -> NDArray[np.int64]:
    """Numbers of layers that a stage may hold: as many in each of its chunks, and no slower than the bound.

    Chunks of one stage that differ make the bubble longer than its closed form, by up to 9 % of the step in the
    event simulation, so that the search does not use them.
    """
    if not job.engine.uneven_stages:
        return np.array([job.model.num_layers // degrees.pp])
    smallest = degrees.interleave
    counts = np.arange(smallest, job.model.num_layers - smallest * (degrees.pp - 1) + 1, smallest)
    each = min(float(k.passes.total) for k in (layer_seconds(job, degrees, experts=e) for e in _kinds(job)))
    return counts[counts * each <= slowest_seconds * (1 + 1e-9)]


def _meets_lists(constraints: Constraints, degrees: DegreeArrays, stage: Stage) -> Any:
    """Whether stages agree with lists that the user pinned, one entry for each chunk.

    A list that no filling of these stages gives (`layout_at`) leaves nothing.
    """
    keep = np.ones(np.shape(stage.index), dtype=bool)
    layers, recompute = constraints.per_chunk("layers_per_stage"), constraints.per_chunk("recompute")
    if layers:
        counts = np.array(layers, dtype=int).reshape(degrees.interleave, degrees.pp)
        keep &= (stage.num_layers == counts.sum(axis=0)[stage.index]) & (counts == counts[0]).all()
    if recompute:
        policies = np.array([POLICIES.index(p) for p in recompute]).reshape(degrees.interleave, degrees.pp)
        keep &= (stage.policy == policies[0][stage.index]) & (policies == policies[0]).all()
    return keep


def layout_at(degrees: DegreeArrays, layers: Sequence[int], policies: Sequence[int]) -> Layout:
    """The layout of one configuration with these layers and recompute policies for each stage."""
    recompute: tuple[Recompute, ...] = tuple(POLICIES[p] for p in policies)
    return Layout(
        **{name: getattr(degrees, name) for name in _ARRAYS},
        schedule=degrees.schedule,
        layers_per_stage=balanced_chunks(tuple(int(k) for k in layers), degrees.interleave, degrees.schedule),
        recompute=of_chunks(recompute, degrees.interleave, degrees.schedule),
    )
