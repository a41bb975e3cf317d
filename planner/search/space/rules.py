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
from planner.layout import offloads_activations, offloads_optimizer, offloads_params
from planner.search.space import faults
from planner.specs.recipe import ADAM_RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.layout import Degrees, Layout
    from planner.numbers import Flag, Number
    from planner.specs.job import Job, PoolJob

    Holds = Callable[[Job, Degrees], Flag]


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
    holds: Holds
    needs: str
    fault: Callable[[Job, Layout], str]
    left_out: str = ""


def tp_within_pool(job: PoolJob, tp: Number, segment: Number) -> Flag:
    """Whether tensor parallelism stays inside the used devices of one domain, or (if allowed) spans whole domains."""
    domain = domain_devices(job.cluster, segment)
    inside = domain % np.minimum(tp, domain) == 0
    crossing = (np.asarray(tp) > domain) & (tp % domain == 0)
    return inside & (tp <= domain) | (job.allow_tp_across_nodes & crossing)


def stages_in_pool(job: PoolJob, layout: Degrees) -> Number:
    """Number of stages for which a pool has devices; 0 if its scale-up domain is too small for tp."""
    return tp_within_pool(job, layout.tp, layout.segment) * (job.num_devices // (layout.tp * layout.cp * layout.dp))


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


def num_ends(job: Job) -> int:
    """Chunks that may hold an end of the model and no layer: embedding, loss, and layers for multi-token prediction.

    Source: definition of the engine profile, places_ends.
    """
    return job.engine.pipeline.places_ends * (2 + (job.model.mtp_layers > 0))


def searched_ends(job: Job) -> int:
    """Chunks for an end of the model alone that the search makes: none on a mixed cluster, nor where kinds repeat.

    Source: `num_ends`.
    """
    return num_ends(job) * (len(job.pools) == 1 and pattern_of(job).period == 1)


def least_of_first_stage(job: Job, layout: Degrees) -> Number:
    """Fewest layers of the first stage, if its first chunk holds all leading layers, and the others at most one less.

    Source: derived here, from `planner.layout.balanced_chunks`; tested against every split.
    """
    leading = pattern_of(job).leading if layout.schedule == "interleaved" else 0
    return layout.interleave * max(leading - 1, 0) + 1


_RULES: list[Rule] = []


def _rule(reads: str, needs: str, *, left_out: str = "") -> Callable[[Holds], Holds]:
    """Make a rule of the function below, which says whether it holds; `faults` has a function with the same name.

    Rules that can rule out every layout are first, so that a refusal names them.
    """

    def add(holds: Holds) -> Holds:
        name = holds.__name__.strip("_")
        words = {"name": name.replace("_", "-"), "needs": needs, "left_out": left_out}
        _RULES.append(Rule(reads=tuple(reads.split()), holds=holds, fault=getattr(faults, name), **words))
        return holds

    return add


@_rule("", "the engine must run every feature of the model")
def _features(job: Job, _: Degrees) -> Flag:
    return set(job.model.features) <= set(job.engine.can.model_features)


@_rule("", "the engine must train with dropout; --set training.dropout=0 goes without")
def _dropout(job: Job, _: Degrees) -> Flag:
    return job.engine.can.dropout or not job.training.dropout


@_rule("", "the engine must compute the loss in this way")
def _loss(job: Job, _: Degrees) -> Flag:
    return job.loss in job.engine.can.losses


@_rule("", "the engine must compute feed-forward blocks in tiles, and the model must have no experts")
def _mlp_tiles(job: Job, _: Degrees) -> Flag:
    return job.training.mlp_tiles == 1 or (job.engine.can.mlp_tiles and job.model.moe is None)


@_rule("", "the engine must have the optimizer")
def _optimizer(job: Job, _: Degrees) -> Flag:
    return job.training.optimizer in job.engine.can.optimizers


@_rule("offload", "the engine must capture this in CUDA graphs, and graphs of layers must offload no activations")
def _cuda_graphs(job: Job, layout: Degrees) -> Flag:
    graphs = job.training.cuda_graphs
    keeps = graphs != "layers" or not offloads_activations(layout)
    return graphs in job.engine.can.cuda_graphs and keeps


@_rule(
    "pp interleave ep",
    "exchanges of experts beside other microbatches must have ep > 1, interleaved stages or none, and an "
    "engine that does it",
)
def _expert_overlap(job: Job, layout: Degrees) -> Flag:
    if not job.training.expert_overlap:
        return True
    can = job.engine.can.expert_overlap and job.model.mtp_layers <= 1 and job.core_precision != "fp32"
    return np.greater(layout.ep, 1) & (np.equal(layout.pp, 1) | np.greater(layout.interleave, 1)) & can


@_rule("", "the engine must train adapters beside such frozen weights, in this precision")
def _frozen_weights(job: Job, _: Degrees) -> Flag:
    training, can = job.training, job.engine.can
    low = training.precision in ("fp8", "fp4")
    beside = training.frozen_weights in can.frozen_weights and (can.fp8_adapters or not low)
    return not training.lora_rank or beside


@_rule("", "adapters must stand beside matrices that the model has, and be updated by adamw, adamw-8bit or sgd")
def _adapters(job: Job, _: Degrees) -> Flag:
    return not job.training.lora_rank or not without_adapters(job)


@_rule("", "the engine must keep its states by this memory recipe; `engine` is what it does by default")
def _memory_recipe(job: Job, _: Degrees) -> Flag:
    return job.training.memory_recipe in ("engine", *ADAM_RECIPES, *job.engine.can.memory_recipes)


@_rule("tp pp cp dp", "tp * pp * cp * dp must be at most the number of devices")
def _world(job: Job, layout: Degrees) -> Flag:
    if len(job.pools) == 1:  # tp has a rule of its own there
        return layout.tp * layout.pp * layout.cp * layout.dp <= job.num_devices
    return layout.pp <= sum(stages_in_pool(pool, layout) for pool in job.pools)


@_rule("dp mbs", "dp * mbs must divide the global batch")
def _batch(job: Job, x: Degrees) -> Flag:
    return job.training.global_batch_size % (x.dp * x.mbs) == 0


@_rule(
    "tp",
    "tp must divide the heads, the ffn width and the key-value heads, or be a multiple of the latter where the "
    "engine repeats them",
)
def _tp_divides(job: Job, layout: Degrees) -> Flag:
    model = job.model
    repeated = np.equal(layout.tp % model.num_kv_heads, 0) & job.engine.can.repeats_kv_heads
    return (
        (model.num_heads % layout.tp == 0)
        & ((model.num_kv_heads % layout.tp == 0) | repeated)
        & (model.ffn_hidden_size % layout.tp == 0)
        & ((model.moe.shared_ffn_hidden_size if model.moe else 0) % layout.tp == 0)
        & (mixer_heads(model) % layout.tp == 0)
    )


@_rule("tp", "tp must divide the vocabulary, which this engine does not pad (see model.vocab_size)")
def _vocabulary(job: Job, layout: Degrees) -> Flag:
    return job.engine.can.pads_vocabulary | (job.model.vocab_size % layout.tp == 0)


@_rule("tp segment", "tensor parallelism must stay inside the scale-up domain, unless --allow-tp-across-nodes")
def _tp_within_node(job: Job, layout: Degrees) -> Flag:
    return np.logical_or.reduce([tp_within_pool(pool, layout.tp, layout.segment) for pool in job.pools])


@_rule(
    "tp pp cp dp segment",
    "as many hosts must be taken of every scale-up domain, or all of each, and there must be as many domains",
)
def _segment(job: Job, layout: Degrees) -> Flag:
    cluster = job.pools[0].cluster
    if len(job.pools) > 1 or cluster.hosts_per_domain == 1:
        return np.equal(layout.segment, 0)
    return is_possible(cluster, layout.tp * layout.pp * layout.cp * layout.dp, layout.segment)


@_rule("tp sp cp", "sequence parallelism must have tp > 1 that divides the sequence, and this engine's tp must run so")
def _sequence_parallel(job: Job, layout: Degrees) -> Flag:
    divides = np.equal(layout.sp, 0) | (job.training.sequence_length // layout.cp % layout.tp == 0)
    return np.where(np.equal(layout.tp, 1), np.equal(layout.sp, 0), np.isin(layout.sp, job.engine.can.sp) & divides)


@_rule("pp interleave", "every chunk must hold a layer, or an end of the model where the engine can place it apart")
def _layers(job: Job, x: Degrees) -> Flag:
    return x.pp * x.interleave <= job.model.num_layers + num_ends(job)


@_rule("pp interleave", "pp * interleave must divide the layers with this engine")
def _even_stages(job: Job, layout: Degrees) -> Flag:
    return job.engine.pipeline.uneven_stages | (job.model.num_layers % (layout.pp * layout.interleave) == 0)


@_rule(
    "pp dp mbs interleave schedule",
    "interleave > 1 must go with schedule interleaved, pp > 1 and microbatches in multiples of pp; zbv and "
    "dualpipev with interleave 2, and dualpipev with at least 2 pp microbatches",
)
def _interleave(job: Job, layout: Degrees) -> Flag:
    microbatches = np.maximum(_microbatches(job, layout), 1)  # dp * mbs may exceed the batch; another rule refuses this
    possible = exists(layout.schedule, layout.pp, microbatches, layout.interleave)
    if layout.schedule != "interleaved":
        return possible
    return possible & np.greater(layout.pp, 1) & (microbatches % layout.pp == 0)


@_rule(
    "pp interleave schedule",
    "where kinds of layers repeat, interleaved chunks must all hold whole periods of them to be searched",
    left_out="interleaved stages of this model whose chunks are not all alike",
)
def _whole_periods(job: Job, layout: Degrees) -> Flag:
    """Whether all interleaved chunks are alike, so that a stage's number of layers determines its layers."""
    pattern = pattern_of(job)
    if layout.schedule != "interleaved" or pattern.period == 1:
        return True
    whole = job.model.num_layers % (layout.pp * layout.interleave * pattern.period) == 0
    return np.equal(pattern.leading, 0) & whole


@_rule(
    "pp interleave schedule",
    "the first of interleaved chunks must hold all layers before the first with experts to be searched",
    left_out="interleaved stages of this model whose first chunk does not hold all dense layers",
)
def _leading_layers(job: Job, layout: Degrees) -> Flag:
    layers, others = job.model.num_layers, layout.interleave * (layout.pp - 1) - max(searched_ends(job) - 1, 0)
    too_many = layout.interleave + others > layers  # another rule says so
    return too_many | (least_of_first_stage(job, layout) + others <= layers)


@_rule("pp dp mbs schedule", "this engine's 1F1B must have at least as many microbatches as stages")
def _fill(job: Job, layout: Degrees) -> Flag:
    if not job.engine.pipeline.needs_filling or layout.schedule in ("naive", "gpipe"):
        return True
    return np.equal(layout.pp, 1) | (_microbatches(job, layout) >= layout.pp)


@_rule("pp zero", "the engine must have this ZeRO stage with this pipeline")
def _zero(job: Job, layout: Degrees) -> Flag:
    alone = np.isin(layout.zero, job.engine.can.zero_stages)
    piped = np.isin(layout.zero, job.engine.pipeline.zero_stages)
    return np.where(np.greater(layout.pp, 1), piped, alone)


@_rule("schedule", "the engine must run this schedule")
def _schedule(job: Job, x: Degrees) -> Flag:
    return x.schedule in job.engine.pipeline.schedules


@_rule(
    "tp dp cp ep etp zero hsdp",
    "hsdp must divide dp (and the copies of an expert), with ZeRO and an engine that shards within replicas",
)
def _hsdp(job: Job, layout: Degrees) -> Flag:
    replicated = np.greater(layout.zero, 0) & job.engine.can.replicates_shards
    divides = (layout.dp % layout.hsdp == 0) & (np.equal(layout.hsdp, 1) | replicated)
    if job.model.moe is None:
        return divides
    copies = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
    return divides & (copies % layout.hsdp == 0)


@_rule("pp", "encoders and encoder-decoders must not be cut into pipeline stages")
def _encoder(job: Job, x: Degrees) -> Flag:
    return np.equal(x.pp, 1) | (job.model.kind == "decoder")


@_rule("tp cp dp ep etp", "ep must divide the experts, etp their width, and ep * etp must divide tp * cp * dp")
def _experts(job: Job, layout: Degrees) -> Flag:
    one = np.equal(layout.ep * layout.etp, 1)
    if job.model.moe is None:
        return one
    ranks = layout.tp * layout.cp * layout.dp
    whole = (job.model.moe.num_experts % layout.ep == 0) & (job.model.moe.ffn_hidden_size % layout.etp == 0)
    return one | (whole & (ranks % (layout.ep * layout.etp) == 0))


@_rule("cp", "context parallelism must cut the sequence into 2 cp equal parts")
def _context(job: Job, x: Degrees) -> Flag:
    return np.equal(x.cp, 1) | (job.training.sequence_length % (2 * x.cp) == 0)


@_rule("tp cp", "tp * cp must divide the heads with this engine, which trades a part of the sequence for heads")
def _context_heads(job: Job, layout: Degrees) -> Flag:
    """Whether every rank of tp and cp has whole heads, and key-value heads are divided or replicated evenly."""
    if job.engine.communication.context_exchange != "all-to-all":
        return np.equal(layout.cp, layout.cp)
    ranks, heads = layout.tp * layout.cp, job.model.num_heads
    shared = heads if job.model.mla is not None else job.model.num_kv_heads
    return np.equal(layout.cp, 1) | ((heads % ranks == 0) & ((shared % ranks == 0) | (ranks % shared == 0)))


@_rule("pp cp", "cp > 1 must not be cut into pipeline stages with this engine")
def _context_pipeline(job: Job, x: Degrees) -> Flag:
    return np.equal(x.cp, 1) | np.equal(x.pp, 1) | job.engine.pipeline.context_parallel


@_rule("offload", "the engine must be able to keep this in the host's memory")
def _offload(job: Job, x: Degrees) -> Flag:
    return x.offload in job.engine.offload.what


@_rule("offload", "the cluster must describe its hosts to offload anything (`host:` in its document)")
def _host(job: Job, x: Degrees) -> Flag:
    return x.offload == "none" or job.has_hosts


@_rule(
    "pp zero offload",
    "an offloaded optimizer must be adamw or sgd with ZeRO (with weights, ZeRO-3), and not every engine has it under a "
    "pipeline",
)
def _offloaded_optimizer(job: Job, layout: Degrees) -> Flag:
    if not offloads_optimizer(layout):
        return True
    if job.training.optimizer not in ("adamw", "sgd") or job.training.lora_rank:
        return False
    alone = np.equal(layout.pp, 1) | (job.engine.offload.with_pipeline in ("optimizer", "both"))
    return alone & np.greater_equal(layout.zero, 3 if offloads_params(layout) else 1)


@_rule("pp offload", "this engine must have no pipeline to offload activations")
def _offloaded_activations(job: Job, layout: Degrees) -> Flag:
    free = job.engine.offload.with_pipeline in ("activations", "both") or not offloads_activations(layout)
    return np.equal(layout.pp, 1) | free


@_rule("tp pp dp cp ep etp", "the engine must run every axis that is larger than 1")
def _axes(job: Job, layout: Degrees) -> Flag:
    axes = ("tp", "pp", "dp", "cp", "ep", "etp")
    missing = [np.greater(getattr(layout, axis), 1) for axis in axes if axis not in job.engine.can.axes]
    return ~np.logical_or.reduce(missing) if missing else True


RULES: Final = tuple(_RULES)
LEADING_LAYERS: Final = "leading-layers"


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
    broken.extend(faults.not_offloaded(job, layout))
    broken.extend(_broken_pools(job, layout) if "pools" not in except_for else ())
    broken.extend(faults.ends(job, layout))
    return tuple(broken)
