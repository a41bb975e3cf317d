"""Functions that every brute force over layouts needs; they share rules and prices with the search, nothing else."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from planner.cost.prices import stage_fits
from planner.cost.stage import Pattern, stage_of
from planner.search.space.configurations import OWN, DegreeArrays
from planner.search.space.rules import RULES
from planner.specs.recompute import NONE


def long_forms(*values):
    """Further values of a parameter, for `make prove`."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


def check_many(check):
    """Call `check` with each seed and report all that fail: BRUTE_FORCE_JOBS seeds from BRUTE_FORCE_SEED on."""
    first, count = int(os.environ.get("BRUTE_FORCE_SEED", "48")), int(os.environ.get("BRUTE_FORCE_JOBS", "60"))
    wrong, outcomes = {}, Counter()
    for seed in range(first, first + count):
        try:
            outcomes[check(seed)] += 1
        except AssertionError as error:  # a `Disagreement` too
            wrong[seed] = str(error)
    print(f"{sum(outcomes.values())} of {count} jobs are equal from seed {first} on: {dict(outcomes)}")  # noqa: T201 - the result
    assert not wrong


def all_alike(layers, num_layers):
    """A candidate's data on columns with these numbers of layers, if all layers of the model are alike."""
    layers = np.asarray(layers, dtype=np.int64)
    return {
        "pattern": Pattern(),
        "total_load": num_layers,
        "start": 0 * layers,
        "layers": layers,
        "last": layers,
        "load": layers,
    }


def state_of(position, leading, period):
    """The first position from which the stack continues in the same way as from this one."""
    while position >= leading + period:
        position -= period
    return position


def grouped(configurations):
    """Configurations by schedule and offload, which are the same within an array of configurations."""
    groups = {}
    for each in configurations:
        groups.setdefault((each["schedule"], each.get("offload", "none")), []).append(each)
    return groups


def as_arrays(alike):
    """Configurations of one group in the form that the cost model reads."""
    names = ("tp", "pp", "dp", "cp", "mbs", "zero", "hsdp", "interleave", "sp")
    arrays = {name: np.array([each[name] for each in alike]) for name in names}
    experts = {name: np.array([each.get(name, 1) for each in alike]) for name in ("ep", "etp")}
    segment = np.array([each.get("segment", 0) for each in alike])
    schedule, offload = alike[0]["schedule"], alike[0].get("offload", "none")
    before = np.array([each.get("mtp_before", 0) for each in alike])
    rest = {
        "segment": segment,
        "placement": 0 * segment,
        "mtp_before": before,
        "schedule": schedule,
        "offload": offload,
    }
    return DegreeArrays(**arrays, **experts, **rest, recompute=np.full(len(alike), OWN))


def obeying(job, alike):
    """Configurations of one group that break no rule of legality."""
    x, obeys = as_arrays(alike), np.ones(len(alike), dtype=bool)
    for rule in RULES:
        obeys &= np.broadcast_to(rule.holds(job, x), obeys.shape)
    return [each for each, kept in zip(alike, obeys, strict=True) if kept]


def compositions(total, parts, least):
    """All ways to write `total` as an ordered sum of a given number of parts, each at least `least`."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total - least * (parts - 1) + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield (first, *rest)


def shrinks(pp, v, layers):
    """Whether the largest chunk of an even split is smaller than with one chunk less per stage."""
    return -(-layers // (pp * v)) < -(-layers // (pp * (v - 1)))


def step_seconds(m, v, times, tails, layers, ends, further=0):
    """The formula of the step, written again; arrays have the stages along their last axis.

    m: microbatches, for each row. times: seconds of a microbatch. ends: seconds of the stage's end of the model.
    further: layers for multi-token prediction, which are part of the last stage's last chunk.
    """
    p, longest = times.shape[-1], tails.max(-1)
    if v == 1:
        slowest = times.max(-1)
        return m * slowest + times.sum(-1) - slowest + longest
    rounds = m[..., None] / p
    after = further * (np.arange(p) == p - 1)
    layer = (times - ends) / (layers + after)
    ends = ends + after * layer
    small, large = layer * (layers // v), layer * -(-layers // v)
    passes = v * large + ends
    stalls = ((rounds - 1) * np.maximum(0.0, large - small - large / p)).sum(-1)
    wait = small[..., -1:] + ends[..., -1:] - small - large / p * (1 - 1 / rounds)
    wait[..., -1] = 0.0
    bottleneck = (times + np.maximum(0.0, wait)).max(-1)
    return m * bottleneck + (passes.sum(-1) - bottleneck) / v + stalls + longest


def least_seconds(candidate):
    """The least step of all choices of a candidate, which are listed from the last stage on; infinite without any."""
    left, last = np.array([candidate.num_layers]), candidate.num_stages - 1
    passes, longest, slowest, end = (np.zeros(1) for _ in range(4))  # end: the time of the last chunk
    for stage in reversed(range(candidate.num_stages)):
        here = np.flatnonzero(candidate.stage == stage)
        before = left[:, None] - candidate.layers[here]
        follows = (
            (before >= 0) & (candidate.start[here] == candidate.pattern.state(before)) & ((before == 0) | (stage > 0))
        )
        way, column = np.nonzero(follows)
        column = here[column]
        slack, left = candidate.slack_seconds[column], before[follows]
        end = slack if stage == last else end[way]
        seconds = candidate.seconds[column] + np.maximum(0.0, end - slack)
        slowest = np.maximum(slowest[way], seconds)
        longest = np.maximum(longest[way], candidate.tail_seconds[column])
        passes = passes[way] + candidate.pass_seconds[column]
    steps = candidate.constant_seconds + candidate.steady_count * slowest + passes + longest
    return steps.min(initial=np.inf)


def policies_of(job, offload):
    """Recompute policies that may occur with this offload."""
    model = job.model
    without = {"core_attn"} if job.training.attention == "flash" else set()
    without |= {"mla_up_proj"} if model.mla is None else set()
    without |= {"moe", "moe_act"} if model.moe is None else set()
    without |= {"layernorm"} if model.mla is None and model.moe is None else set()
    experts = sum(model.layer_has_experts(k) for k in range(model.num_layers))
    without |= {"mlp"} if 2 * experts > model.num_layers else set()
    of_core = job.engine.memory.selective_recompute == "attention-core"
    light = {"activation", "layernorm", "mla_up_proj"} if job.engine.memory.selective_recompute == "light" else set()
    names = {"selective": {"core_attn"} if of_core else light}
    lacking = {"mla_up_proj": model.mla, "moe": model.moe, "moe_act": model.moe}  # a program refuses these by name
    policies = [
        p
        for p in job.engine.can.recompute
        if not (names.get(p, set(p.split("+"))) or {p}) <= without
        and all(lacking.get(part, model) is not None for part in p.split("+"))
    ]
    with_activations = offload in ("activations", "both")
    return [each for each in policies if not with_activations or each in job.engine.offload.activations_of]


def policies_of_some_layers(job, alike):
    """For each configuration, full recompute of some layers, if an even split does not fit without recompute."""
    layers, x = job.model.num_layers, as_arrays(alike)
    if "full" not in job.engine.can.recompute_some or x.offload in ("activations", "both"):
        return [[] for _ in alike]
    fits = np.ones(len(alike), dtype=bool)
    for stage in (np.zeros_like(x.pp), np.minimum(1, x.pp - 1), x.pp - 1):
        held = [even(layers, pp) for pp in x.pp.tolist()]
        own = np.array([split[r] for split, r in zip(held, stage.tolist(), strict=True)])
        before = np.array([sum(split[:r]) for split, r in zip(held, stage.tolist(), strict=True)])
        fits &= stage_fits(job, x, stage_of(job, index=stage, num_layers=own, policy=NONE, first=before, layout=x))
    return [
        [] if fit else [f"full:{count}" for count in (1, 2, 3, 4, 6, 8, 12, 16) if count * pp * v < layers]
        for fit, pp, v in zip(fits.tolist(), x.pp.tolist(), x.interleave.tolist(), strict=True)
    ]


def even(layers, pp):
    """Layers of each stage of an even split, larger stages first."""
    return [layers // pp + (stage < layers % pp) for stage in range(pp)]
