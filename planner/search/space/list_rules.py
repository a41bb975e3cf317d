"""Rules of a layout's lists: its recompute policies, its chunks' layers, and its stages' pools."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from planner.cost.recompute import absent_modules
from planner.layout import offloads_activations
from planner.search.space.degree_rules import stages_in_pool
from planner.search.space.rule import Rule, rule
from planner.specs.by_name import other_engines
from planner.specs.text import any_of

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.search.space.rule import Checks
    from planner.specs.job import Job

LIST_RULES: Final[list[Rule]] = []


def no_full_recompute(job: Job) -> str:
    """The name of the setting that forbids full recompute; empty if no setting forbids it.

    Source: Megatron-LM, transformer_config.py (overlap_moe_expert_parallel_comm, cuda_graph_impl).
    """
    if job.training.expert_overlap:
        return "training.expert_overlap"
    return "training.cuda_graphs=layers" if job.training.cuda_graphs == "layers" else ""


@rule(LIST_RULES)
def full_recompute(job: Job, recompute: tuple[str, ...]) -> Checks:
    """full recompute must go with the settings of the training"""
    why = no_full_recompute(job)
    if (yield "full" in recompute and bool(why)):
        return f"full recompute does not go with {why}"


@rule(LIST_RULES)
def policies(job: Job, recompute: tuple[str, ...]) -> Checks:
    """the engine must have the recompute policies"""
    lacking = [policy for policy in sorted(set(recompute)) if not job.engine.can.recomputes(policy)]
    if (yield bool(lacking)):
        elsewhere = other_engines(", or ", lambda engine: all(map(engine.can.recomputes, lacking)))
        ways_out = f"it has {job.engine.can.recompute_words}{elsewhere}"
        return f"engine {job.engine.name} has no {any_of(lacking)} recompute; {ways_out}"


@rule(LIST_RULES)
def modules(job: Job, recompute: tuple[str, ...]) -> Checks:
    """the model must have the modules that recompute"""
    absent = absent_modules(job.model)
    lacking = [(policy, part) for policy in sorted(set(recompute)) for part in policy.split("+") if part in absent]
    if (yield bool(lacking)):
        return "; ".join(f"recompute={policy}: {job.model.name} has no {absent[part]}" for policy, part in lacking)


@rule(LIST_RULES, "recompute pp interleave schedule")
def policies_of_stages(job: Job, layout: Layout) -> Checks:
    """stages must have one recompute policy together, or each its own, as the engine has it"""
    used = sorted(set(layout.recompute))
    if (yield len(used) > 1 and not job.engine.pipeline.recompute_per_stage):
        return f"engine {job.engine.name} has one recompute policy for all stages, not {' and '.join(used)}"
    if len(used) == 1:
        return
    own = [sorted({layout.recompute[chunk] for chunk in layout.chunks_of_stage(r)}) for r in range(layout.pp)]
    mixed = [stage for stage, policies in enumerate(own) if len(policies) > 1]
    if (yield bool(mixed)):
        return f"the chunks of stage {mixed[0]} recompute {' and '.join(own[mixed[0]])}; give them one policy"


@rule(LIST_RULES, "recompute offload")
def not_offloaded(job: Job, layout: Layout) -> Checks:
    """the engine must offload activations with these recompute policies"""
    have, name = job.engine.offload.activations_of, job.engine.name
    lacking = sorted(set(layout.recompute) - set(have)) if offloads_activations(layout) else []
    if (yield bool(lacking)):
        return f"engine {name} offloads no activations with recompute={any_of(lacking)}; recompute={any_of(have)}"


@rule(LIST_RULES, "pools pp tp cp dp segment")
def pools(job: Job, layout: Layout) -> Checks:
    """every stage must have a pool with room for it, and the stages of one pool are neighbours"""
    known = {pool.cluster.name: pool for pool in job.pools}
    if len(job.pools) == 1:
        if (yield bool(layout.pools)):
            return "the cluster has no pools"
        return
    if (yield not set(layout.pools) <= set(known)):
        return f"there is no pool {any_of(sorted(set(layout.pools) - set(known)))}; pools are {', '.join(known)}"
    if (yield len(layout.pools) != layout.pp):
        return f"`pools` has an entry for each of the {layout.pp} stages, of {', '.join(known)}"
    rooms = {name: int(stages_in_pool(known[name], layout)) for name in dict.fromkeys(layout.pools)}
    full = {name: room for name, room in rooms.items() if layout.pools.count(name) > room}
    apart = ["the stages of one pool are neighbours"] if len([*groupby(layout.pools)]) > len(rooms) else []
    if (yield bool(full or apart)):
        of = f"stages of {layout.stride('pp')} devices, tp={layout.tp} inside a scale-up domain"
        few = (f"pool {name} has room for {room} {of}, not {layout.pools.count(name)}" for name, room in full.items())
        ways_out = ["lower a degree" if job.allow_tp_across_nodes else "lower a degree, or --allow-tp-across-nodes"]
        return "; ".join((*apart, *few, *(ways_out if full else [])))


@rule(LIST_RULES)
def even_chunks(job: Job, layers_per_stage: tuple[int, ...]) -> Checks:
    """all chunks must hold as many layers with this engine"""
    if (yield not job.engine.pipeline.uneven_stages and len(set(layers_per_stage)) > 1):
        each, rest = divmod(sum(layers_per_stage), len(layers_per_stage))
        way_out = "another pp or interleave" if rest else f"{each} in each"
        sizes = any_of(sorted(set(layers_per_stage)))
        return f"engine {job.engine.name} needs equal stages, and chunks hold {sizes} layers; {way_out}"


@rule(LIST_RULES, "layers_per_stage mtp")
def chunks(job: Job, layout: Layout) -> Checks:
    """every chunk must hold a layer, or an end of the model where the engine can place it apart"""
    # as validate_layer_layout of Megatron-LM, core/transformer/pipeline_parallel_layer_layout.py
    ends = {0, layout.num_chunks - 1, *layout.mtp}
    empty = [chunk for chunk, count in enumerate(layout.layers_per_stage) if not count]
    empty = [chunk for chunk in empty if chunk not in ends or not job.engine.pipeline.places_ends]
    if (yield bool(empty)):
        beside = f", and engine {job.engine.name} gives no end of the model a chunk of its own"
        why = f"chunk {empty[0]} holds no layer{beside if empty[0] in ends else ''}"
        return f"{why}; give each of the {layout.num_chunks} at least one"


@rule(LIST_RULES, "layers_per_stage mtp")
def mtp(job: Job, layout: Layout) -> Checks:
    """layers for multi-token prediction must stand where the engine can place them"""
    if not layout.mtp:
        return
    written, chunk, last = "mtp=" + "/".join(map(str, layout.mtp)), layout.mtp[0], layout.pp * (layout.interleave - 1)
    if (yield not job.model.mtp_layers):
        return f"{written}: {job.model.name} has no layers for multi-token prediction"
    if (yield not job.engine.pipeline.places_ends):
        return f"{written}: engine {job.engine.name} has them beside the loss; leave mtp out"
    if (yield len(layout.mtp) > 1):
        return f"{written}: engine {job.engine.name} has all these layers in one chunk; name one"
    if (yield sum(layout.layers_per_stage[chunk + 1 :]) > 0):
        return f"{written}: layers follow in later chunks, and multi-token prediction reads the output of the last"
    if (yield chunk < last):
        return f"{written}: they stand in the last chunk of a stage, {last} or later"
