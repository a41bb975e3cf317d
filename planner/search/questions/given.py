"""Fill the missing keys of an incomplete layout, by the same rules for `--layout` and for published runs.

The rules assume the engine's defaults, and know nothing about the publication or the outcome of a run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planner.cost.estimate import memory_of_stages
from planner.cost.recompute import absent_modules
from planner.cost.segments import with_segment
from planner.layout import V_SHAPED, Assumed, offloads_activations, parse_assignments, parse_layout
from planner.search.search import plan_for_layout
from planner.search.space.rules import broken_rules
from planner.specs.job import each_pool
from planner.specs.recompute import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from planner.layout import Layout
    from planner.plan import Plan
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


def _with_policy(layout: Layout, policy: str) -> Layout:
    return replace(layout, recompute=(policy,) * layout.num_chunks)


def _is_legal(job: Job, layout: Layout, policy: str) -> bool:
    return not broken_rules(job, _with_policy(layout, policy), except_for=("schedule",))


def _fits(job: Job, layout: Layout, policy: str) -> bool:
    likely = each_pool(job, lambda pool: replace(pool, risk=0.5))
    return all(stage.fits for stage in memory_of_stages(likely, _with_policy(layout, policy)))


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
