"""Why no layout meets the pins: refuse what no configuration can meet, before a search and after one in vain."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from planner.cost.schedule import EXECUTED
from planner.cost.stage import pattern_of
from planner.errors import InputError, Mistake
from planner.layout import Layout, balanced_chunks
from planner.search.space import degree_rules, list_rules
from planner.search.space.configurations import expert_options
from planner.search.space.placements import most_layers_on
from planner.search.space.rules import RULES, broken_rules
from planner.search.space.space import replica_counts
from planner.specs.banned import bans_of
from planner.specs.by_name import other_engines
from planner.specs.text import any_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.search.space.configurations import DegreeArrays, Refusals
    from planner.search.space.constraints import Constraints
    from planner.search.space.space import Space
    from planner.specs.job import Job
    from planner.specs.recipe import Schedule

_AT_ONCE: Final = (
    *(degree_rules.axes, degree_rules.schedule, degree_rules.offload),
    *(list_rules.policies, list_rules.modules, list_rules.policies_of_stages, list_rules.even_chunks),
)
"""Rules that a pinned value breaks whatever the values of other keys are."""

_MOST_NAMED: Final = 6  # values of a degree that a message lists
_SMALLEST: Final = Layout(recompute=("none",), layers_per_stage=(1,))


def check_pins(space: Space) -> None:
    """Refuse pins that no configuration can meet.

    Raises:
        InputError: the engine lacks a pinned value, or the search cannot choose a pinned list.
    """
    job, pins = space.job, space.constraints
    num_chunks = len((pins.value_of("recompute") or "").split("/"))
    faults = [(rule.fault(job, _pinned(pins, num_stages=num_chunks)), "") for rule in _AT_ONCE]
    if pins.value_of("pools") is not None:
        faults.append((list_rules.pools.fault(job, _pinned(pins, num_stages=_pinned_stages(pins))), ""))
    if pins.value_of("sp") == "1" and 1 not in job.engine.can.sp:
        elsewhere = other_engines("; have it: ", lambda engine: 1 in engine.can.sp)
        faults.append((f"engine {job.engine.name} has no sequence parallelism{elsewhere}", ""))
    if pins.value_of("mtp") and not job.model.mtp_layers:
        faults.append((f"{job.model.name} has no layers for multi-token prediction", ""))
    for axis, ban in bans_of(job.engine).items():
        if not pins.left_of(axis, [1]):
            faults.append((f"engine {job.engine.name}: {ban.words}", ban.way_out))
    faults = [each for each in faults if each[0]] or [*_of_lists(job, pins)] or [*_of_pools(job, pins)]
    if faults:
        raise InputError(*(Mistake(message=why, where="--pin", hint=hint) for why, hint in faults))


def _pinned(pins: Constraints, *, num_stages: int) -> Layout:
    """A layout of the pinned values, with one chunk for each of several stages; its other keys have no meaning."""
    values: dict[str, Any] = {pin.key: int(pin.value) for pin in pins.pins if pin.is_numeric and pin.sign == "="}
    recompute = (pins.value_of("recompute") or "none").split("/")
    layers = tuple(map(int, pins.per_chunk("layers_per_stage") or ("1",)))
    words: dict[str, Any] = {key: value for key in ("schedule", "offload") if (value := pins.value_of(key))}
    pools = tuple((pins.value_of("pools") or "").split("/"))
    if num_stages > 1:
        values |= {"pp": num_stages, "interleave": 1}
    return replace(_SMALLEST, **values, **words, recompute=tuple(recompute), layers_per_stage=layers, pools=pools)


def _pinned_stages(pins: Constraints) -> int:
    """Number of stages that the pins say, by pp or by the pools of the stages; 0 if they say none."""
    pools = pins.value_of("pools")
    return int(pins.value_of("pp") or (pools.count("/") + 1 if pools else 0))


def _of_pools(job: Job, pins: Constraints) -> Iterator[tuple[str, str]]:
    """What the search does not do on a mixed cluster."""
    schedule, most = pins.value_of("schedule"), most_layers_on(len(job.pools))
    if len(job.pools) > 1 and schedule in EXECUTED:
        hint = "`planner explain MODEL CLUSTER --layout pp=2,pools=...,schedule=...` prices it"
        yield f"schedule `{schedule}` is not searched on a mixed cluster", hint
    if len(job.pools) > 1 and job.model.num_layers > most:
        words = f"{job.cluster.name}: {len(job.pools)} pools are planned for models of up to {most} layers"
        yield f"{words}, not {job.model.num_layers}", "join pools that are much alike, or leave one out"


def _of_lists(job: Job, pins: Constraints) -> Iterator[tuple[str, str]]:
    """Pinned lists that the search cannot choose: they hold all layers, and a stage's chunks are equal."""
    schedule, price = pins.value_of("schedule"), "`planner explain MODEL CLUSTER --layout"
    if schedule in EXECUTED and pins.lists:
        hint = f"{price} schedule={schedule},...` prices any layers and recompute"
        yield f"`{pins.lists[0]}` is not chosen with schedule {schedule}", hint
        return
    for key in pins.lists:
        values = pins.per_chunk(key) or ()
        stages = _pinned_stages(pins) or len(values)
        v, wanted = len(values) // stages, values[:stages]
        wanted = wanted * v
        if key == "layers_per_stage":
            layers = [int(each) for each in values]
            if sum(layers) != job.model.num_layers:
                yield f"`layers_per_stage` sums to {sum(layers)}", f"the model has {job.model.num_layers} layers"
                return
            sums = tuple(sum(layers[stage::stages]) for stage in range(stages)) if v else ()
            balanced = balanced_chunks(sums, v) if v else ()
            if v > 1 and job.engine.pipeline.places_ends:  # the last chunks before an end of the model may be shorter
                balanced = balanced_chunks(sums, v, last=(*balanced[-stages:-2], *layers[-2:])[-stages:])
            wanted = tuple(map(str, balanced)) if v else wanted
        if values != wanted:
            hint = "pp * interleave entries; the chunks of one stage are alike, or first ones have one layer more"
            yield f"`{key}={'/'.join(values)}` cannot be planned", hint
        elif key == "layers_per_stage" and v > 1 and pattern_of(job).period > 1 and len(set(values)) > 1:
            hint = f"{price} layers_per_stage=...` prices any"
            yield f"kinds of layers repeat in {job.model.name}: its interleaved chunks are planned of equal size", hint


def legal_degrees(space: Space, *, with_replicas: bool = True, smallest: bool = False) -> Iterator[DegreeArrays]:
    """Every outer configuration that the rules and the constraints allow, in blocks of one schedule and offload.

    with_replicas, smallest: as in `Space.blocks`.

    Raises:
        InputError: no legal configuration is left; the message names the rule that refused most.
    """
    refused: Refusals = {}
    none = True
    for degrees in space.blocks(refused, with_replicas=with_replicas, smallest=smallest):
        none = False
        yield space.with_policies(degrees)
    if none and smallest:  # the message counts configurations of all microbatches
        yield from legal_degrees(space, with_replicas=with_replicas)
    elif none:
        raise no_candidate(space, refused)


def no_candidate(space: Space, refused: Refusals) -> InputError:
    """The error for the user when the rules and the pins allow no layout."""
    job, asked = space.job, space.constraints
    worst = max(RULES, key=lambda rule: refused.get(rule.name, 0))
    # a rule that reads no degree has the same result for every layout
    why = worst.needs if worst.reads else worst.fault(job, _SMALLEST)
    if asked.forbidden and _leaves_some(space, replace(asked, forbidden=())):
        alone = [each for each in asked.forbidden if _leaves_some(space, asked.without(each))] or asked.forbidden
        named = " and ".join(",".join(map(str, each)) for each in alone)
        return InputError(f"every legal layout is forbidden, by {named}", where="--forbid", hint="forbid less")
    pins = ", ".join(map(str, asked.pins))
    without_pins: Refusals = {}
    free = space.under(replace(asked, pins=()))
    if pins and not any(True for _ in free.blocks(without_pins, with_replicas=False)):
        return no_candidate(free, without_pins)
    if not pins:
        remedy = "change the batch size or the number of devices" if worst.reads else ""
        return InputError(f"no legal layout exists: {why}", hint=remedy)
    of_each = [broken_rules(job, each, except_for=("pools",), searched=True) for each in _pinned_alone(job, asked)]
    why = "; ".join(dict.fromkeys(chain(*of_each)) if all(of_each) else (_legal_values(free, asked),))
    hint = f"{_pin_to_drop(space)}; `planner explain MODEL CLUSTER --layout ...` checks one layout"
    return InputError(Mistake(message=f"no layout meets the pins {pins}: {why}", where="--pin", rule=why, hint=hint))


def _pinned_alone(job: Job, pins: Constraints) -> Iterator[Layout]:
    """The simplest layout with the pinned degrees; if experts overlap in a pipeline, also the one with two chunks."""
    pinned = {pin.key: int(pin.value) for pin in pins.pins if pin.is_numeric and pin.sign == "="}
    overlaps = job.training.expert_overlap and pinned.get("pp", 1) > 1
    if overlaps and not {"ep", "dp"} & pinned.keys():
        pinned["ep"] = pinned["dp"] = next((ep for ep, _ in expert_options(job) if ep > 1), 1)
    for interleave in (1, 2) if overlaps and "interleave" not in pinned else (pinned.get("interleave", 1),):
        schedule: Schedule = "interleaved" if interleave > 1 else "1f1b"
        tp = pinned.get("tp", 1 + pinned.get("sp", 0))  # sequence parallelism needs some tensor parallelism
        values: dict[str, Any] = {"tp": tp, "pp": 1 if interleave == 1 else 2, "sp": job.engine.can.sp[0] * (tp > 1)}
        values |= pinned
        zeros = (job.engine.can if values["pp"] == 1 else job.engine.pipeline).zero_stages
        values = {"zero": min(zeros, default=0)} | values | {"interleave": interleave, "schedule": schedule}
        values["offload"] = pins.value_of("offload") or "none"
        chunks = values["pp"] * interleave
        yield Layout(**values, layers_per_stage=(1,) * chunks, recompute=("none",) * chunks)


def _legal_values(free: Space, asked: Constraints) -> str:
    """The values that pinned degrees can have in legal layouts, to explain why no legal layout meets the pins."""
    values: dict[str, set[int]] = {pin.key: set() for pin in asked.pins if pin.is_numeric}
    for degrees in free.blocks(with_replicas=False):
        for key in values:
            values[key] |= set(replica_counts(degrees) if key == "hsdp" else getattr(degrees, key).tolist())
    named = [
        f"{key} {any_of(sorted(each)) if len(each) <= _MOST_NAMED else f'{min(each)} to {max(each)}'}"
        for key, each in values.items()
        if not asked.left_of(key, each)
    ]
    return f"legal layouts have {', and '.join(named)}" if named else "no legal layout has all of them"


def _leaves_some(space: Space, constraints: Constraints) -> bool:
    """Whether the rules allow some layout under these constraints."""
    return any(True for _ in space.under(constraints).blocks(with_replicas=False))


def _pin_to_drop(space: Space) -> str:
    """The pins without which legal layouts exist."""
    pins = space.constraints.pins
    if len(pins) == 1:
        return f"drop {pins[0]}"
    alone = [str(pin) for pin in pins if _leaves_some(space, space.constraints.without(pin))]
    return f"drop {' or '.join(alone)}" if alone else "dropping one of them is not enough; drop two or more"
