"""Rules that a layout must meet before it is priced; a refusal names the broken rule.

One set of predicates checks a user's layout as well as arrays of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.adapters import without_adapters
from planner.cost.mixers import mixer_heads
from planner.cost.schedule import exists
from planner.cost.segments import domain_devices, is_possible
from planner.cost.stage import pattern_of
from planner.layout import offloads_activations, offloads_optimizer
from planner.search.space import faults
from planner.specs.recipe import ADAM_RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.layout import Degrees, Layout
    from planner.numbers import Flag, Number
    from planner.specs.job import Job, PoolJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition on layouts: `holds(job, degrees)` says whether each layout meets it.

    reads: the degrees that the rule reads; the rule applies as soon as they are known.
    needs: the condition in words.
    fault: function that builds the message for a layout that breaks the rule, with legal values.
    left_out: layouts that the rule leaves out of the search only, in words, because the search could not price them
    exactly; they can run, and `explain` prices them. Empty for a rule that no layout may break.
    """

    name: str
    reads: tuple[str, ...]
    holds: Callable[[Job, Degrees], Flag]
    needs: str
    fault: Callable[[Job, Layout], str]
    left_out: str = ""


def _divides_model(job: Job, layout: Degrees) -> Flag:
    model = job.model
    repeated = np.equal(layout.tp % model.num_kv_heads, 0) & job.engine.can.repeats_kv_heads
    return (
        (model.num_heads % layout.tp == 0)
        & ((model.num_kv_heads % layout.tp == 0) | repeated)
        & (model.ffn_hidden_size % layout.tp == 0)
        & ((model.moe.shared_ffn_hidden_size if model.moe else 0) % layout.tp == 0)
        & (mixer_heads(model) % layout.tp == 0)
    )


def _divides_vocabulary(job: Job, layout: Degrees) -> Flag:
    return job.engine.can.pads_vocabulary | (job.model.vocab_size % layout.tp == 0)


def _tp_within(job: Job, layout: Degrees) -> Flag:
    return np.logical_or.reduce([tp_within_pool(pool, layout.tp, layout.segment) for pool in job.pools])


def tp_within_pool(job: PoolJob, tp: Number, segment: Number) -> Flag:
    """Whether tensor parallelism stays inside the used devices of one domain, or (if allowed) spans whole domains."""
    domain = domain_devices(job.cluster, segment)
    inside = domain % np.minimum(tp, domain) == 0
    crossing = (np.asarray(tp) > domain) & (tp % domain == 0)
    return inside & (tp <= domain) | (job.allow_tp_across_nodes & crossing)


def stages_in_pool(job: PoolJob, layout: Degrees) -> Number:
    """Number of stages for which a pool has devices; 0 if its scale-up domain is too small for tp."""
    return tp_within_pool(job, layout.tp, layout.segment) * (job.num_devices // (layout.tp * layout.cp * layout.dp))


def _possible_segment(job: Job, layout: Degrees) -> Flag:
    cluster = job.pools[0].cluster
    if len(job.pools) > 1 or cluster.hosts_per_domain == 1:
        return np.equal(layout.segment, 0)
    return is_possible(cluster, layout.tp * layout.pp * layout.cp * layout.dp, layout.segment)


def _fits_devices(job: Job, layout: Degrees) -> Flag:
    if len(job.pools) == 1:  # tp has a rule of its own there
        return layout.tp * layout.pp * layout.cp * layout.dp <= job.num_devices
    return layout.pp <= sum(stages_in_pool(pool, layout) for pool in job.pools)


def _broken_pools(job: Job, layout: Layout) -> tuple[str, ...]:
    """Reasons why the stages cannot run on the pools that the layout names."""
    if len(job.pools) == 1:
        return ("the cluster has no pools",) if layout.pools else ()
    known = {pool.cluster.name: pool for pool in job.pools}
    if len(layout.pools) != layout.pp or not set(layout.pools) <= set(known):
        return (f"`pools` has an entry for each of the {layout.pp} stages, of {', '.join(known)}",)
    broken = []
    runs = [name for name, _ in groupby(layout.pools)]
    if len(set(runs)) < len(runs):
        broken.append("the stages of one pool are neighbours")
    for name in dict.fromkeys(runs):
        room, wanted = int(stages_in_pool(known[name], layout)), layout.pools.count(name)
        if wanted > room:
            devices = f"{layout.stride('pp')} devices, tp={layout.tp} inside a scale-up domain"
            broken.append(f"pool {name} has room for {room} stages of {devices}, not {wanted}")
    return tuple(broken)


def _microbatches(job: Job, layout: Degrees) -> Flag:
    return job.training.global_batch_size // (layout.dp * layout.mbs)


def _zero_offered(job: Job, layout: Degrees) -> Flag:
    alone = np.isin(layout.zero, job.engine.can.zero_stages)
    piped = np.isin(layout.zero, job.engine.pipeline.zero_stages)
    return np.where(np.greater(layout.pp, 1), piped, alone)


def _even_stages(job: Job, layout: Degrees) -> Flag:
    return job.engine.pipeline.uneven_stages | (job.model.num_layers % (layout.pp * layout.interleave) == 0)


def _sequence_parallel(job: Job, layout: Degrees) -> Flag:
    divides = np.equal(layout.sp, 0) | (job.training.sequence_length // layout.cp % layout.tp == 0)
    return np.where(np.equal(layout.tp, 1), np.equal(layout.sp, 0), np.isin(layout.sp, job.engine.can.sp) & divides)


def _interleaving(job: Job, layout: Degrees) -> Flag:
    microbatches = np.maximum(_microbatches(job, layout), 1)  # dp * mbs may exceed the batch; another rule refuses this
    possible = exists(layout.schedule, layout.pp, microbatches, layout.interleave)
    if layout.schedule != "interleaved":
        return possible
    return possible & np.greater(layout.pp, 1) & (microbatches % layout.pp == 0)


def _whole_periods(job: Job, layout: Degrees) -> Flag:
    """Whether all interleaved chunks are alike, so that a stage's number of layers determines its layers."""
    pattern = pattern_of(job)
    if layout.schedule != "interleaved" or pattern.period == 1:
        return np.ones(np.shape(layout.pp), dtype=bool)
    whole = job.model.num_layers % (layout.pp * layout.interleave * pattern.period) == 0
    return np.equal(pattern.leading, 0) & whole


def least_of_first_stage(job: Job, layout: Degrees) -> Number:
    """Fewest layers of the first stage, if its first chunk holds all leading layers, and the others at most one less.

    Source: derived here, from `planner.layout.balanced_chunks`; tested against every split.
    """
    leading = pattern_of(job).leading if layout.schedule == "interleaved" else 0
    return layout.interleave * max(leading - 1, 0) + 1


def _leading_in_first_chunk(job: Job, layout: Degrees) -> Flag:
    layers, others = job.model.num_layers, layout.interleave * (layout.pp - 1)
    too_many = layout.interleave + others > layers  # another rule says so
    return too_many | (least_of_first_stage(job, layout) + others <= layers)


def _fills_pipeline(job: Job, layout: Degrees) -> Flag:
    if not job.engine.pipeline.needs_filling or layout.schedule in ("naive", "gpipe"):
        return np.ones(np.shape(layout.pp), dtype=bool)
    return np.equal(layout.pp, 1) | (_microbatches(job, layout) >= layout.pp)


def _trades_heads(job: Job, layout: Degrees) -> Flag:
    """Whether every rank of tp and cp has whole heads, and key-value heads are divided or replicated evenly."""
    if job.engine.communication.context_exchange != "all-to-all":
        return np.equal(layout.cp, layout.cp)
    ranks, heads = layout.tp * layout.cp, job.model.num_heads
    shared = heads if job.model.mla is not None else job.model.num_kv_heads
    return np.equal(layout.cp, 1) | ((heads % ranks == 0) & ((shared % ranks == 0) | (ranks % shared == 0)))


def _spreads_experts(job: Job, layout: Degrees) -> Flag:
    one = np.equal(layout.ep * layout.etp, 1)
    if job.model.moe is None:
        return one
    ranks = layout.tp * layout.cp * layout.dp
    whole = (job.model.moe.num_experts % layout.ep == 0) & (job.model.moe.ffn_hidden_size % layout.etp == 0)
    return one | (whole & (ranks % (layout.ep * layout.etp) == 0))


def _replicates(job: Job, layout: Degrees) -> Flag:
    replicated = np.greater(layout.zero, 0) & job.engine.can.replicates_shards
    divides = (layout.dp % layout.hsdp == 0) & (np.equal(layout.hsdp, 1) | replicated)
    if job.model.moe is None:
        return divides
    copies = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
    return divides & (copies % layout.hsdp == 0)


def _offloads_optimizer(job: Job, layout: Degrees) -> Flag:
    if not offloads_optimizer(layout):
        return np.ones(np.shape(layout.pp), dtype=bool)
    if job.training.optimizer not in ("adamw", "sgd") or job.training.lora_rank:
        return np.zeros(np.shape(layout.pp), dtype=bool)
    alone = np.equal(layout.pp, 1) | (job.engine.offload.with_pipeline in ("optimizer", "both"))
    return alone & np.greater(layout.zero, 0)


def _offloads_activations(job: Job, layout: Degrees) -> Flag:
    free = job.engine.offload.with_pipeline in ("activations", "both") or not offloads_activations(layout)
    return np.equal(layout.pp, 1) | free


def _captures(job: Job, layout: Degrees) -> Flag:
    graphs = job.training.cuda_graphs
    keeps = graphs != "layers" or not offloads_activations(layout)
    return np.asarray(graphs in job.engine.can.cuda_graphs and keeps)


def _overlaps_experts(job: Job, layout: Degrees) -> Flag:
    if not job.training.expert_overlap:
        return np.ones(np.shape(layout.pp), dtype=bool)
    can = job.engine.can.expert_overlap and job.model.mtp_layers <= 1 and job.core_precision != "fp32"
    return np.greater(layout.ep, 1) & (np.equal(layout.pp, 1) | np.greater(layout.interleave, 1)) & can


def _axes_offered(job: Job, layout: Degrees) -> Flag:
    axes = ("tp", "pp", "dp", "cp", "ep", "etp")
    missing = [np.greater(getattr(layout, axis), 1) for axis in axes if axis not in job.engine.can.axes]
    return ~np.logical_or.reduce(missing) if missing else np.asarray(True)


LEADING_LAYERS: Final = "leading-layers"

RULES: Final = (
    # rules that can rule out every layout are first, so that a refusal names them
    Rule(
        name="features",
        reads=(),
        holds=lambda job, _: np.asarray(set(job.model.features) <= set(job.engine.can.model_features)),
        needs="the engine must run every feature of the model",
        fault=faults.features,
    ),
    Rule(
        name="dropout",
        reads=(),
        holds=lambda job, _: np.asarray(job.engine.can.dropout or not job.training.dropout),
        needs="the engine must train with dropout; --set training.dropout=0 goes without",
        fault=faults.dropout,
    ),
    Rule(
        name="loss",
        reads=(),
        holds=lambda job, _: np.asarray(job.loss in job.engine.can.losses),
        needs="the engine must compute the loss in this way",
        fault=faults.loss,
    ),
    Rule(
        name="mlp-tiles",
        reads=(),
        holds=lambda job, _: np.asarray(
            job.training.mlp_tiles == 1 or (job.engine.can.mlp_tiles and job.model.moe is None)
        ),
        needs="the engine must compute feed-forward blocks in tiles, and the model must have no experts",
        fault=faults.mlp_tiles,
    ),
    Rule(
        name="optimizer",
        reads=(),
        holds=lambda job, _: np.asarray(job.training.optimizer in job.engine.can.optimizers),
        needs="the engine must have the optimizer",
        fault=faults.optimizer,
    ),
    Rule(
        name="cuda-graphs",
        reads=("offload",),
        holds=_captures,
        needs="the engine must capture this in CUDA graphs, and graphs of layers must offload no activations",
        fault=faults.cuda_graphs,
    ),
    Rule(
        name="expert-overlap",
        reads=("pp", "interleave", "ep"),
        holds=_overlaps_experts,
        needs="exchanges of experts beside other microbatches must have ep > 1, interleaved stages or none, "
        "and an engine that does it",
        fault=faults.expert_overlap,
    ),
    Rule(
        name="frozen-weights",
        reads=(),
        holds=lambda job, _: np.asarray(
            not job.training.lora_rank
            or (
                job.training.frozen_weights in job.engine.can.frozen_weights
                and (job.training.precision != "fp8" or job.engine.can.fp8_adapters)
            )
        ),
        needs="the engine must train adapters beside such frozen weights, in this precision",
        fault=faults.frozen_weights,
    ),
    Rule(
        name="adapters",
        reads=(),
        holds=lambda job, _: np.asarray(not job.training.lora_rank or not without_adapters(job)),
        needs="adapters must stand beside matrices that the model has, and be updated by adamw, adamw-8bit or sgd",
        fault=faults.adapters,
    ),
    Rule(
        name="memory-recipe",
        reads=(),
        holds=lambda job, _: np.asarray(
            job.training.memory_recipe in ("engine", *ADAM_RECIPES, *job.engine.can.memory_recipes)
        ),
        needs="the engine must keep its states by this memory recipe; `engine` is what it does by default",
        fault=faults.memory_recipe,
    ),
    Rule(
        name="world",
        reads=("tp", "pp", "cp", "dp"),
        holds=_fits_devices,
        needs="tp * pp * cp * dp must be at most the number of devices",
        fault=faults.world,
    ),
    Rule(
        name="batch",
        reads=("dp", "mbs"),
        holds=lambda job, x: job.training.global_batch_size % (x.dp * x.mbs) == 0,
        needs="dp * mbs must divide the global batch",
        fault=faults.batch,
    ),
    Rule(
        name="tp-divides",
        reads=("tp",),
        holds=_divides_model,
        needs="tp must divide the heads, the ffn width and the key-value heads, or be a multiple of the latter where "
        "the engine repeats them",
        fault=faults.tp_divides,
    ),
    Rule(
        name="vocabulary",
        reads=("tp",),
        holds=_divides_vocabulary,
        needs="tp must divide the vocabulary, which this engine does not pad (see model.vocab_size)",
        fault=faults.vocabulary,
    ),
    Rule(
        name="tp-within-node",
        reads=("tp", "segment"),
        holds=_tp_within,
        needs="tensor parallelism must stay inside the scale-up domain, unless --allow-tp-across-nodes",
        fault=faults.tp_within_node,
    ),
    Rule(
        name="segment",
        reads=("tp", "pp", "cp", "dp", "segment"),
        holds=_possible_segment,
        needs="as many hosts must be taken of every scale-up domain, or all of each, and there must be as many domains",
        fault=faults.segment,
    ),
    Rule(
        name="sequence-parallel",
        reads=("tp", "sp", "cp"),
        holds=_sequence_parallel,
        needs="sequence parallelism must have tp > 1 that divides the sequence, and this engine's tp must run so",
        fault=faults.sequence_parallel,
    ),
    Rule(
        name="layers",
        reads=("pp", "interleave"),
        holds=lambda job, x: x.pp * x.interleave <= job.model.num_layers,
        needs="every chunk must hold at least one layer: pp * interleave at most the number of layers",
        fault=faults.layers,
    ),
    Rule(
        name="even-stages",
        reads=("pp", "interleave"),
        holds=_even_stages,
        needs="pp * interleave must divide the layers with this engine",
        fault=faults.even_stages,
    ),
    Rule(
        name="interleave",
        reads=("pp", "dp", "mbs", "interleave", "schedule"),
        holds=_interleaving,
        needs="interleave > 1 must go with schedule interleaved, pp > 1 and microbatches in multiples of pp; "
        "zbv and dualpipev with interleave 2, and dualpipev with at least 2 pp microbatches",
        fault=faults.interleave,
    ),
    Rule(
        name="whole-periods",
        reads=("pp", "interleave", "schedule"),
        holds=_whole_periods,
        needs="where kinds of layers repeat, interleaved chunks must all hold whole periods of them to be searched",
        fault=faults.whole_periods,
        left_out="interleaved stages of this model whose chunks are not all alike",
    ),
    Rule(
        name=LEADING_LAYERS,
        reads=("pp", "interleave", "schedule"),
        holds=_leading_in_first_chunk,
        needs="the first of interleaved chunks must hold all layers before the first with experts to be searched",
        fault=faults.leading_layers,
        left_out="interleaved stages of this model whose first chunk does not hold all dense layers",
    ),
    Rule(
        name="fill",
        reads=("pp", "dp", "mbs", "schedule"),
        holds=_fills_pipeline,
        needs="this engine's 1F1B must have at least as many microbatches as stages",
        fault=faults.fill,
    ),
    Rule(
        name="zero",
        reads=("pp", "zero"),
        holds=_zero_offered,
        needs="the engine must have this ZeRO stage with this pipeline",
        fault=faults.zero,
    ),
    Rule(
        name="schedule",
        reads=("schedule",),
        holds=lambda job, x: np.asarray(x.schedule in job.engine.pipeline.schedules),
        needs="the engine must run this schedule",
        fault=faults.schedule,
    ),
    Rule(
        name="hsdp",
        reads=("tp", "dp", "cp", "ep", "etp", "zero", "hsdp"),
        holds=_replicates,
        needs="hsdp must divide dp (and the copies of an expert), with ZeRO and an engine that shards within replicas",
        fault=faults.hsdp,
    ),
    Rule(
        name="encoder",
        reads=("pp",),
        holds=lambda job, x: np.equal(x.pp, 1) | (job.model.kind == "decoder"),
        needs="encoders and encoder-decoders must not be cut into pipeline stages",
        fault=faults.encoder,
    ),
    Rule(
        name="experts",
        reads=("tp", "cp", "dp", "ep", "etp"),
        holds=_spreads_experts,
        needs="ep must divide the experts, etp their width, and ep * etp must divide tp * cp * dp",
        fault=faults.experts,
    ),
    Rule(
        name="context",
        reads=("cp",),
        holds=lambda job, x: np.equal(x.cp, 1) | (job.training.sequence_length % (2 * x.cp) == 0),
        needs="context parallelism must cut the sequence into 2 cp equal parts",
        fault=faults.context,
    ),
    Rule(
        name="context-heads",
        reads=("tp", "cp"),
        holds=_trades_heads,
        needs="tp * cp must divide the heads with this engine, which trades a part of the sequence for heads",
        fault=faults.context_heads,
    ),
    Rule(
        name="context-pipeline",
        reads=("pp", "cp"),
        holds=lambda job, x: np.equal(x.cp, 1) | np.equal(x.pp, 1) | job.engine.pipeline.context_parallel,
        needs="cp > 1 must not be cut into pipeline stages with this engine",
        fault=faults.context_pipeline,
    ),
    Rule(
        name="offload",
        reads=("offload",),
        holds=lambda job, x: np.asarray(x.offload in job.engine.offload.what),
        needs="the engine must be able to keep this in the host's memory",
        fault=faults.offload,
    ),
    Rule(
        name="host",
        reads=("offload",),
        holds=lambda job, x: np.asarray(x.offload == "none" or job.has_hosts),
        needs="the cluster must describe its hosts to offload anything (`host:` in its document)",
        fault=faults.host,
    ),
    Rule(
        name="offloaded-optimizer",
        reads=("pp", "zero", "offload"),
        holds=_offloads_optimizer,
        needs="an offloaded optimizer must be adamw or sgd with ZeRO, and not every engine has it under a pipeline",
        fault=faults.offloaded_optimizer,
    ),
    Rule(
        name="offloaded-activations",
        reads=("pp", "offload"),
        holds=_offloads_activations,
        needs="this engine must have no pipeline to offload activations",
        fault=faults.offloaded_activations_of_pipeline,
    ),
    Rule(
        name="axes",
        reads=("tp", "pp", "dp", "cp", "ep", "etp"),
        holds=_axes_offered,
        needs="the engine must run every axis that is larger than 1",
        fault=faults.axes,
    ),
)


def broken_rules(
    job: Job, layout: Layout, *, except_for: tuple[str, ...] = (), searched: bool = False
) -> tuple[str, ...]:
    """Reasons why a layout cannot run, one sentence for each broken rule; empty when it can run.

    except_for: names of rules that are not checked. The last rule, `pools`, checks the pools on which the layout's
    stages run.
    searched: include reasons why the search leaves the layout out.
    """
    rules = [rule for rule in RULES if rule.name not in except_for and (searched or not rule.left_out)]
    broken = [rule.fault(job, layout) for rule in rules if not bool(np.all(rule.holds(job, layout)))]
    broken.extend(faults.recompute(job, layout))
    broken.extend(faults.offloaded_activations(job, layout))
    broken.extend(_broken_pools(job, layout) if "pools" not in except_for else ())
    if 0 in layout.layers_per_stage:
        empty = layout.layers_per_stage.index(0)
        broken.append(f"chunk {empty} holds no layer; give each of the {layout.num_chunks} at least one")
    return tuple(broken)
