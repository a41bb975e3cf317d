"""Rules that a layout must meet before anything is priced; each refusal names its rule.

The same predicates judge one layout of the user's and arrays of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.schedule import exists
from planner.specs.recipe import ADAM_RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.layout import Degrees, Layout
    from planner.specs.job import Job

__all__ = ["RULES", "Rule", "broken_rules", "why_broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition on layouts: `holds(job, degrees)` is true (or an array of truths) where it is met.

    reads: the degrees that it looks at, so that it can be applied as soon as they stand.
    """

    name: str
    reads: tuple[str, ...]
    holds: Callable[[Job, Degrees], Any]
    why: str


def _divides_model(job: Job, layout: Degrees) -> Any:
    model = job.model
    return (
        (model.num_heads % layout.tp == 0)
        & (model.num_kv_heads % layout.tp == 0)
        & (model.ffn_hidden_size % layout.tp == 0)
        & ((model.moe.shared_ffn_hidden_size if model.moe else 0) % layout.tp == 0)
    )


def _divides_vocabulary(job: Job, layout: Degrees) -> Any:
    return job.engine.pads_vocabulary | (job.model.vocab_size % layout.tp == 0)


def _tp_within(job: Job, layout: Degrees) -> Any:
    domain = job.cluster.scale_up_devices
    inside = domain % np.minimum(layout.tp, domain) == 0
    crossing = (np.asarray(layout.tp) > domain) & (layout.tp % domain == 0)
    return inside & (layout.tp <= domain) | (job.allow_tp_across_nodes & crossing)


def _microbatches(job: Job, layout: Degrees) -> Any:
    return job.training.global_batch_size // (layout.dp * layout.mbs)


def _zero_offered(job: Job, layout: Degrees) -> Any:
    alone = np.isin(layout.zero, job.engine.zero_stages)
    piped = np.isin(layout.zero, job.engine.zero_stages_with_pipeline)
    return np.where(np.greater(layout.pp, 1), piped, alone)


def _even_stages(job: Job, layout: Degrees) -> Any:
    return job.engine.uneven_stages | (job.model.num_layers % (layout.pp * layout.interleave) == 0)


def _sequence_parallel(job: Job, layout: Degrees) -> Any:
    return np.where(
        np.equal(layout.sp, 1),
        np.greater(layout.tp, 1) & (job.training.sequence_length // layout.cp % layout.tp == 0),
        np.equal(layout.tp, 1) | job.engine.tp_without_sp,
    )


def _interleaving(job: Job, layout: Degrees) -> Any:
    microbatches = _microbatches(job, layout)
    possible = exists(layout.schedule, layout.pp, microbatches, layout.interleave)
    if layout.schedule != "interleaved":
        return possible
    return possible & np.greater(layout.pp, 1) & (microbatches % layout.pp == 0)


def _fills_pipeline(job: Job, layout: Degrees) -> Any:
    if not job.engine.microbatches_fill_pipeline or layout.schedule == "gpipe":
        return np.ones(np.shape(layout.pp), dtype=bool)
    return np.equal(layout.pp, 1) | (_microbatches(job, layout) >= layout.pp)


def _spreads_experts(job: Job, layout: Degrees) -> Any:
    one = np.equal(layout.ep * layout.etp, 1)
    if job.model.moe is None:
        return one
    ranks = layout.tp * layout.cp * layout.dp
    whole = (job.model.moe.num_experts % layout.ep == 0) & (job.model.moe.ffn_hidden_size % layout.etp == 0)
    return one | (whole & (ranks % (layout.ep * layout.etp) == 0))


def _replicates(job: Job, layout: Degrees) -> Any:
    replicated = np.greater(layout.zero, 0) & job.engine.replicates_shards
    divides = (layout.dp % layout.hsdp == 0) & (np.equal(layout.hsdp, 1) | replicated)
    if job.model.moe is None:
        return divides
    copies = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
    return divides & (copies % layout.hsdp == 0)


def _axes_offered(job: Job, layout: Degrees) -> Any:
    axes = ("tp", "pp", "dp", "cp", "ep", "etp")
    missing = [np.greater(getattr(layout, axis), 1) for axis in axes if axis not in job.engine.axes]
    return ~np.logical_or.reduce(missing) if missing else np.asarray(True)


RULES: Final = (
    # what no layout can help comes first, so that a refusal names it
    Rule(
        name="features",
        reads=(),
        holds=lambda job, _: np.asarray(set(job.model.features) <= set(job.engine.model_features)),
        why="the engine runs every feature of the model (--engine megatron runs most)",
    ),
    Rule(
        name="dropout",
        reads=(),
        holds=lambda job, _: np.asarray(job.engine.dropout or not job.training.dropout),
        why="the engine trains with dropout (this one does not: --set training.dropout=0)",
    ),
    Rule(
        name="optimizer",
        reads=(),
        holds=lambda job, _: np.asarray(job.training.optimizer in job.engine.optimizers),
        why="the engine runs the optimizer (--engine fsdp runs every one)",
    ),
    Rule(
        name="memory-recipe",
        reads=(),
        holds=lambda job, _: np.asarray(
            job.training.memory_recipe in ("engine", *ADAM_RECIPES, *job.engine.memory_recipes)
        ),
        why="the engine keeps its states by this memory recipe (`engine` is what it does by default)",
    ),
    Rule(
        name="world",
        reads=("tp", "pp", "cp", "dp"),
        holds=lambda job, x: x.tp * x.pp * x.cp * x.dp <= job.cluster.num_devices,
        why="tp * pp * cp * dp is at most the number of devices",
    ),
    Rule(
        name="batch",
        reads=("dp", "mbs"),
        holds=lambda job, x: job.training.global_batch_size % (x.dp * x.mbs) == 0,
        why="dp * mbs divides the global batch",
    ),
    Rule(
        name="tp-divides",
        reads=("tp",),
        holds=_divides_model,
        why="tp divides the heads, the key-value heads and the ffn width",
    ),
    Rule(
        name="vocabulary",
        reads=("tp",),
        holds=_divides_vocabulary,
        why="tp divides the vocabulary, which this engine does not pad (see model.vocab_size)",
    ),
    Rule(
        name="tp-within-node",
        reads=("tp",),
        holds=_tp_within,
        why="tensor parallelism stays inside the scale-up domain (lift with --allow-tp-across-nodes)",
    ),
    Rule(
        name="sequence-parallel",
        reads=("tp", "sp", "cp"),
        holds=_sequence_parallel,
        why="sequence parallelism needs tp > 1 that divides the sequence, and this engine's tp does not go without it",
    ),
    Rule(
        name="layers",
        reads=("pp", "interleave"),
        holds=lambda job, x: x.pp * x.interleave <= job.model.num_layers,
        why="every chunk holds at least one layer: pp * interleave is at most the number of layers",
    ),
    Rule(
        name="equal-chunks",
        reads=("interleave",),
        holds=lambda job, x: job.model.num_layers % x.interleave == 0,
        why="the chunks of a stage are equal, so that interleave divides the layers",
    ),
    Rule(
        name="even-stages",
        reads=("pp", "interleave"),
        holds=_even_stages,
        why="this engine needs pp * interleave to divide the layers",
    ),
    Rule(
        name="interleave",
        reads=("pp", "dp", "mbs", "interleave", "schedule"),
        holds=_interleaving,
        why="interleave > 1 goes with schedule interleaved, pp > 1 and microbatches in multiples of pp; "
        "zbv and dualpipev have interleave 2, and dualpipev at least 2 pp microbatches",
    ),
    Rule(
        name="fill",
        reads=("pp", "dp", "mbs", "schedule"),
        holds=_fills_pipeline,
        why="this engine's 1F1B needs at least as many microbatches as stages",
    ),
    Rule(
        name="zero",
        reads=("pp", "zero"),
        holds=_zero_offered,
        why="the engine offers this ZeRO stage with this pipeline",
    ),
    Rule(
        name="schedule",
        reads=("schedule",),
        holds=lambda job, x: np.asarray(x.schedule in job.engine.schedules),
        why="the engine runs this schedule",
    ),
    Rule(
        name="hsdp",
        reads=("tp", "dp", "cp", "ep", "etp", "zero", "hsdp"),
        holds=_replicates,
        why="hsdp divides dp (and the copies of an expert), needs ZeRO, and an engine that shards within replicas",
    ),
    Rule(
        name="encoder",
        reads=("pp",),
        holds=lambda job, x: np.equal(x.pp, 1) | (job.model.kind == "decoder"),
        why="encoders and encoder-decoders are not cut into pipeline stages",
    ),
    Rule(
        name="experts",
        reads=("tp", "cp", "dp", "ep", "etp"),
        holds=_spreads_experts,
        why="ep divides the experts, etp divides their width, and ep * etp divides tp * cp * dp",
    ),
    Rule(
        name="context",
        reads=("cp",),
        holds=lambda job, x: np.equal(x.cp, 1) | (job.training.sequence_length % (2 * x.cp) == 0),
        why="context parallelism cuts the sequence into 2 cp equal parts",
    ),
    Rule(
        name="axes",
        reads=("tp", "pp", "dp", "cp", "ep", "etp"),
        holds=_axes_offered,
        why="the engine runs every axis that is larger than 1",
    ),
)


def why_broken(rule: Rule, job: Job) -> str:
    """The rule in words; with the names of what the engine lacks."""
    if rule.name != "features":
        return rule.why
    missing = sorted(set(job.model.features) - set(job.engine.model_features))
    return f"the engine does not run {', '.join(missing)}, which {job.model.name} needs (--engine megatron runs most)"


def broken_rules(job: Job, layout: Layout, *, except_for: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Why a layout cannot run, one sentence for each broken rule but those named; empty when it can."""
    rules = [rule for rule in RULES if rule.name not in except_for]
    broken = [why_broken(rule, job) for rule in rules if not bool(np.all(rule.holds(job, layout)))]
    unknown = sorted(set(layout.recompute) - set(job.engine.recompute))
    broken.extend(f"the engine has no `{policy}` recompute" for policy in unknown)
    if 0 in layout.layers_per_stage:
        broken.append("every chunk holds at least one layer")
    for stage in range(layout.pp):
        if len({layout.recompute[chunk] for chunk in layout.chunks_of_stage(stage)}) > 1:
            broken.append("the chunks of one stage share a recompute policy")
            break
    return tuple(broken)
