"""A layout as given: fill its missing keys, by the same rules for `--layout` and for published runs, and price it.

The rules assume the engine's defaults, and know nothing about the publication or the outcome of a run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planner.cost.band import band, chance_of_budget, chance_of_deadline
from planner.cost.chance import spread_for
from planner.cost.estimate import estimate, memory_of_stages
from planner.cost.flops import flops_convention
from planner.cost.recompute import absent_modules
from planner.cost.segments import with_segment
from planner.errors import InputError, Mistake
from planner.layout import V_SHAPED, Assumed, offloads_activations
from planner.layout_text import parse_assignments, parse_layout
from planner.made_by import made_by, with_corrections_of_any_engine
from planner.plan import Plan, length_assumed
from planner.plan_parts import EngineLabel, SearchOptions
from planner.search.space.rules import broken_rules
from planner.specs.job import each_pool
from planner.specs.recompute import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from planner.cost.estimate import Estimate
    from planner.layout import Layout
    from planner.specs.job import Job


class _Filled(NamedTuple):
    value: str
    rule: str


def plan_for_text(job: Job, text: str, *, option: str = "--layout") -> Plan:
    """Price the layout that `text` gives; missing keys are filled by rules and listed in `plan.assumed`.

    Raises:
        InputError: the text cannot be read, or the layout breaks rules; all broken rules are named.
    """
    layout, assumed = given_layout(job, text, option=option)
    return plan_for_layout(job, layout, assumed=assumed)


def plan_for_layout(job: Job, layout: Layout, *, assumed: tuple[Assumed, ...] = ()) -> Plan:
    """Price one layout without a search; its schedule may be one that the engine lacks, for comparisons.

    assumed: values of the layout that the user left out.

    Raises:
        InputError: the layout breaks rules; all of them are named.
    """
    broken = broken_rules(job, layout, except_for=("schedule",))
    divided, there = sum(layout.layers_per_stage), job.model.num_layers
    if divided != there:
        broken = (*broken, f"it divides {divided} layers, and the model has {there}")
    if broken:
        lead, where = "this layout cannot run", "--layout"
        raise InputError(*(Mistake(message=f"{lead}: {rule}", where=where, rule=rule) for rule in broken))
    return plan_of(job, layout, estimate(job, layout), assumed=assumed)


def plan_of(job: Job, layout: Layout, priced: Estimate, **extra: Any) -> Plan:
    """The plan of a layout and its price.

    extra: further fields of `Plan`; in `options`, further fields of `SearchOptions`.
    """
    spread = band(job, layout)
    return Plan(
        model=job.model,
        cluster=job.cluster,
        training=job.training,
        engine=job.engine,
        layout=layout,
        memory=priced.memory,
        time=priced.time,
        slowest_of_mean=priced.slowest_of_mean,
        step_seconds=priced.step_seconds,
        low_step_seconds=priced.step_seconds * spread.low if spread else None,
        high_step_seconds=priced.step_seconds * spread.high if spread else None,
        band=spread,
        engine_label=_engine_label(job, layout, priced),
        deadline_chance=chance_of_deadline(job, layout, priced.step_seconds),
        budget_chance=chance_of_budget(job, layout, priced.step_seconds),
        calibration=tuple(pool.calibration for pool in job.pools),
        memory_spread=spread_for(job),
        tokens_per_second_per_device=priced.tokens_per_second_per_device,
        mfu=priced.mfu,
        hfu=priced.hfu,
        flops_convention=flops_convention(job.training),
        assumed=(*length_assumed(job), *extra.pop("assumed", ())),
        made_by=made_by(job),
        options=SearchOptions(
            headroom=None if job.headroom is None else float(job.headroom),
            risk=float(job.risk),
            allow_tp_across_nodes=job.allow_tp_across_nodes,
            allow_offload=job.allow_offload,
            **extra.pop("options", {}),
        ),
        **extra,
    )


LABEL: Final = 0.05
"""A plan mentions the engine's own calibration if this calibration changes the step time by more than this share.

The share is half of the typical error of a forecast.
"""


def _engine_label(job: Job, layout: Layout, priced: Estimate) -> EngineLabel | None:
    """How much the engine's own calibration changes the step time; None if the change is at most `LABEL`."""
    anybody = with_corrections_of_any_engine(job) if job.evidence else None
    share = 0.0 if anybody is None else priced.step_seconds / estimate(anybody, layout).step_seconds - 1
    if abs(share) <= LABEL:
        return None
    own = (job.engine.name, job.pools[0].cluster.device.name)
    return EngineLabel(
        share=share, num_runs=sum(len(each.ratios) for each in job.evidence if (each.engine, each.device) == own)
    )


def given_layout(job: Job, text: str, *, option: str = "--layout") -> tuple[Layout, tuple[Assumed, ...]]:
    """The complete layout of an incomplete text, and the list of filled keys with their rules.

    Missing degrees are 1, and dp uses all remaining devices; the list does not contain them.

    Raises:
        InputError: as `parse_layout`.
    """
    given = parse_assignments(text, option)
    assumed = []
    for key, fill in RULES.items():
        if key not in given and (filled := fill(job, _parsed(job, text, option), given)):
            text = f"{text},{key}={filled.value}"
            assumed.append(Assumed(key=key, value=filled.value, rule=filled.rule))
    return _parsed(job, text, option), tuple(assumed)


def _parsed(job: Job, text: str, option: str) -> Layout:
    pools = {pool.cluster.name: pool.num_devices for pool in job.pools}
    num_devices = pools if len(job.pools) > 1 else job.num_devices
    return parse_layout(text, num_layers=job.model.num_layers, num_devices=num_devices, option=option)


def _microbatch(*_: Any) -> _Filled:
    return _Filled("1", "one sequence, which every engine can")


def _zero(job: Job, layout: Layout, _: Mapping[str, str]) -> _Filled | None:
    stages = job.engine.pipeline.zero_stages if layout.pp > 1 else job.engine.can.zero_stages
    if not stages or (layout.dp * layout.cp == 1 and 0 in stages):
        return None
    stage = 1 if 1 in stages else max(stages)
    return _Filled(str(stage), f"ZeRO-{stage} is what users of {job.engine.name} have")


def _expert_tensor(job: Job, layout: Layout, _: Mapping[str, str]) -> _Filled | None:
    if job.model.moe is None or layout.tp == 1 or job.engine.defaults.etp == "1":
        return None
    ranks, etp = layout.tp * layout.cp * layout.dp, layout.tp
    if ranks % (layout.ep * etp) or job.model.moe.ffn_hidden_size % etp:
        return _Filled("1", "ep * tp does not divide tp * cp * dp")
    return _Filled(str(etp), f"etp = tp is the default of {job.engine.name}")


def _sequence_parallel(job: Job, layout: Layout, _: Mapping[str, str]) -> _Filled | None:
    if layout.tp == 1:
        return None
    on = job.engine.can.sp[0] and job.training.sequence_length // layout.cp % layout.tp == 0
    has = "sequence parallelism" if on else "no sequence parallelism"
    return _Filled(str(int(on)), f"{has} is what users of {job.engine.name} have with tp > 1")


def _interleave(job: Job, layout: Layout, given: Mapping[str, str]) -> _Filled | None:
    """The number of chunks, for a text that names the schedule `interleaved` without a number of chunks."""
    if given.get("schedule") != "interleaved" or "layers_per_stage" in given:
        return None
    per_stage, rest = divmod(job.model.num_layers, layout.pp)
    counts = (
        count for count in range(2, per_stage + 1) if per_stage % count == 0 and per_stage <= _MOST_LAYERS * count
    )
    count = 2 if rest else next(counts, 2)
    return _Filled(str(count), f"the fewest equal chunks of at most {_MOST_LAYERS} layers, as in published recipes")


_MOST_LAYERS: Final = 4
"""Largest number of layers per chunk in interleaved pipelines of published recipes (NeMo 24.07, Megatron-Bridge)."""


def _layers(job: Job, layout: Layout, _: Mapping[str, str]) -> _Filled | None:
    """Chunks that are equal if the embedding and the head count as layers; None if plain layers divide evenly."""
    split = split_with_ends(job.model.num_layers, job.model.mtp_layers, layout.num_chunks)
    if split is None or layout.schedule in V_SHAPED:
        return None
    ends = "MTP layers and output heads" if job.model.mtp_layers else "embedding and loss"
    return _Filled("/".join(map(str, split)), f"{ends} count as layers, so that chunks are equal")


def split_with_ends(num_layers: int, mtp_layers: int, num_chunks: int) -> tuple[int, ...] | None:
    """Layers of each chunk when the model's ends count as layers; None if this is unnecessary or impossible.

    Without MTP, embedding and loss count as one layer each. With MTP, each MTP layer and each output head counts as a
    layer; the embedding, a lookup, does not.

    Source: Megatron-LM, --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split;
    Megatron-Bridge, src/megatron/bridge/recipes/deepseek/deepseek_v3.py, layout_map (4, 8 and 16 chunks).
    """
    first = 0 if mtp_layers else 1
    last = 1 + 2 * mtp_layers
    each, rest = divmod(num_layers + first + last, num_chunks)
    if num_chunks == 1 or num_layers % num_chunks == 0 or rest or each <= last:
        return None
    return (each - first, *(each,) * (num_chunks - 2), each - last)


def _segment(job: Job, layout: Layout, _: Mapping[str, str]) -> _Filled | None:
    placed = with_segment(job.cluster, layout)
    return None if placed == layout else _Filled(str(placed.segment), "with it most ranks of a group share a domain")


def _recompute(job: Job, layout: Layout, _: Mapping[str, str]) -> _Filled | None:
    """The engine's default policy, or the policy with the least recompute that is likely to fit.

    A policy is likely to fit if its chance of fitting is at least one half, because a layout that somebody runs
    probably fits. If the user sets headroom, a policy is likely to fit if its peak stays within the limit that the
    headroom gives.
    """
    policies = policies_of(job, layout)
    if not policies or not _is_legal(job, layout, policies[0]):
        return None
    fitting = (policy for policy in policies if _fits(job, layout, policy) and _is_legal(job, layout, policy))
    policy = next(fitting, None)
    if policy is None:
        most = next(policy for policy in reversed(policies) if _is_legal(job, layout, policy))
        return _Filled(most, "no policy makes it fit; this one needs least memory")
    why = f"the default of {job.engine.name}" if policy == policies[0] else "the least that is likely to fit"
    return _Filled(policy, why)


_CHEAP_MODULES: Final = ("moe_act", "layernorm", "mla_up_proj")
"""Modules whose recompute costs least time for the memory it saves: elementwise operators, and two small products.

Source: Megatron-LM, transformer_config.py, recompute_modules; the recipes of Megatron-Bridge use the same modules.
"""


def policies_of(job: Job, layout: Layout) -> tuple[str, ...]:
    """The engine's policies from its default on, by increasing recompute: named policies, modules, layers, `full`."""
    can, default, absent = job.engine.can, job.engine.defaults.recompute, absent_modules(job.model)
    words = [each for each in can.recompute if each != "full"]
    found = words[words.index(default) :] if default in words else words
    modules = [each for each in _CHEAP_MODULES if each in can.recompute_modules and each not in absent]
    found += [canonical("+".join(modules[: count + 1])) for count in range(len(modules))]
    if "full" in can.recompute_some and not can.recompute_some_on_request:
        found += [f"full:{count}" for count in range(1, max(layout.layers_per_stage))]
    found += [each for each in can.recompute if each == "full"]
    if offloads_activations(layout):
        found = [each for each in found if each in job.engine.offload.activations_of]
    return tuple(found)


def with_policy(layout: Layout, policy: str) -> Layout:
    """The layout with one recompute policy on all stages."""
    return replace(layout, recompute=(policy,) * layout.num_chunks)


def _is_legal(job: Job, layout: Layout, policy: str) -> bool:
    return not broken_rules(job, with_policy(layout, policy), except_for=("schedule",))


def _fits(job: Job, layout: Layout, policy: str) -> bool:
    likely = each_pool(job, lambda pool: replace(pool, risk=0.5))
    return all(stage.fits for stage in memory_of_stages(likely, with_policy(layout, policy)))


RULES: Final[dict[str, Callable[[Job, Layout, Mapping[str, str]], _Filled | None]]] = {
    "mbs": _microbatch,
    "zero": _zero,
    "etp": _expert_tensor,
    "sp": _sequence_parallel,
    "interleave": _interleave,
    "layers_per_stage": _layers,
    "segment": _segment,
    "recompute": _recompute,
}
"""The rule that fills each key of a layout, in this order.

A rule that returns None keeps the value of `parse_layout`.
"""
