"""Rules of the model and the training: what the engine must have, whatever the layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.cost.adapters import without_adapters
from planner.layout import offloads_activations
from planner.search.space.rule import Rule, rule
from planner.specs.by_name import other_engines
from planner.specs.recipe import ADAM_RECIPES
from planner.specs.text import any_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from planner.layout import Degrees
    from planner.numbers import Number
    from planner.search.space.rule import Checks
    from planner.specs.engine import EngineAbilities, EngineSpec
    from planner.specs.job import Job

TRAINING_RULES: Final[list[Rule]] = []


def _lacks(
    job: Job, what: str, setting: str, have: Iterable[str], has_it: Callable[[EngineSpec], bool] | None = None
) -> str:
    """The engine lacks a value of a training setting, and has other values; some engines have the value."""
    elsewhere = other_engines(", or ", has_it) if has_it else ""
    return f"engine {job.engine.name} {what}; --set training.{setting}={any_of(have)}{elsewhere}"


@rule(TRAINING_RULES)
def features(job: Job) -> Checks:
    """the engine must run every feature of the model"""
    needed, have = set(job.model.features), set(job.engine.can.model_features)
    if (yield not needed <= have):
        elsewhere = other_engines("; ", lambda engine: needed <= set(engine.can.model_features))
        missing = ", ".join(sorted(needed - have))
        return f"engine {job.engine.name} does not run {missing}, which {job.model.name} needs{elsewhere}"


@rule(TRAINING_RULES)
def dropout(job: Job) -> Checks:
    """the engine must train with dropout; --set training.dropout=0 goes without"""
    asked = job.training.dropout
    if (yield asked > 0 and not job.engine.can.dropout):
        return f"engine {job.engine.name} does not train with dropout, which is {asked:g}; --set training.dropout=0"


@rule(TRAINING_RULES)
def loss(job: Job) -> Checks:
    """the engine must compute the loss in this way"""
    asked, have = job.loss, job.engine.can.losses
    if (yield asked not in have):
        return _lacks(job, f"has no {asked} loss", "loss", have, lambda engine: asked in engine.can.losses)


@rule(TRAINING_RULES)
def objective(job: Job) -> Checks:
    """a program that trains with the engine must have the objective"""
    asked, have = job.training.objective, job.engine.can.objectives
    if (yield asked not in have):
        return _lacks(job, f"has no program for {asked}", "objective", have, lambda each: asked in each.can.objectives)


@rule(TRAINING_RULES)
def mlp_tiles(job: Job) -> Checks:
    """the engine must compute feed-forward blocks in tiles, and the model must have no experts"""
    in_tiles, without = job.training.mlp_tiles > 1, "--set training.mlp_tiles=1"
    if (yield in_tiles and not job.engine.can.mlp_tiles):
        elsewhere = other_engines(", or ", lambda engine: engine.can.mlp_tiles)
        return f"engine {job.engine.name} computes a feed-forward block at once; {without}{elsewhere}"
    if (yield in_tiles and job.model.moe is not None):
        return f"experts are not computed in tiles, and {job.model.name} has experts; {without}"


@rule(TRAINING_RULES)
def optimizer(job: Job) -> Checks:
    """the engine must have the optimizer"""
    asked, have = job.training.optimizer, job.engine.can.optimizers
    if (yield asked not in have):
        return _lacks(job, f"has no optimizer {asked}", "optimizer", have, lambda each: asked in each.can.optimizers)


@rule(TRAINING_RULES, "offload")
def cuda_graphs(job: Job, layout: Degrees) -> Checks:
    """the engine must capture this in CUDA graphs, and graphs of layers must offload no activations"""
    asked, have, name = job.training.cuda_graphs, job.engine.can.cuda_graphs, "cuda_graphs"
    if (yield asked not in have):
        what = f"captures no CUDA graphs of {asked}"
        return _lacks(job, what, name, have, lambda engine: asked in engine.can.cuda_graphs)
    if (yield asked == "layers" and offloads_activations(layout)):
        return f"CUDA graphs of {asked} do not offload activations; --set training.{name}=none, or another offload"


@rule(TRAINING_RULES)
def expert_overlap(job: Job, pp: Number, interleave: Number, ep: Number) -> Checks:
    """exchanges of experts beside other microbatches must have ep > 1, interleaved stages or none, and an engine that
    does it
    """
    if not job.training.expert_overlap:
        return
    without, said = "--set training.expert_overlap=false", "exchanges of experts overlap in"
    if (yield not job.engine.can.expert_overlap):
        elsewhere = other_engines(", or ", lambda engine: engine.can.expert_overlap)
        return f"engine {job.engine.name} runs exchanges of experts in line; {without}{elsewhere}"
    if (yield ep == 1):
        return f"there are no exchanges of experts to overlap with ep 1; {without}"
    if (yield (pp > 1) & (interleave == 1)):
        return f"{said} interleaved stages or without a pipeline; interleave=2, or {without}"
    if (yield job.model.mtp_layers > 1 or job.core_precision == "fp32"):
        return f"{said} 16 bits or less and with one layer for further tokens at most; {without}"


@rule(TRAINING_RULES)
def frozen_weights(job: Job) -> Checks:
    """the engine must train adapters beside such frozen weights, in this precision"""
    if not job.training.lora_rank:
        return
    kept, have, precision = job.training.frozen_weights, job.engine.can.frozen_weights, job.training.precision
    if (yield not have):
        elsewhere = _trained_by(lambda can: kept in can.frozen_weights)
        return f"engine {job.engine.name} trains every weight and has no adapters; lora_rank 0{elsewhere}"
    if (yield kept not in have):
        return _lacks(job, f"keeps no frozen weights in {kept}", "frozen_weights", have)
    if (yield precision in ("fp8", "fp4") and not job.engine.can.fp8_adapters):
        beside = f"has no adapters beside weights that compute in {precision}; --precision bf16"
        return f"engine {job.engine.name} {beside}{_trained_by(lambda can: can.fp8_adapters)}"


def _trained_by(has_it: Callable[[EngineAbilities], bool]) -> str:
    """The engines that train adapters in this way."""
    return other_engines(", or ", lambda engine: has_it(engine.can) and not engine.can.adapters_priced_only)


@rule(TRAINING_RULES)
def adapters(job: Job) -> Checks:
    """adapters must stand beside matrices that the model has, and be updated by adamw, adamw-8bit or sgd"""
    why = without_adapters(job) if job.training.lora_rank else ""
    if (yield bool(why)):
        return f"adapters cannot be planned: {why}"


@rule(TRAINING_RULES)
def memory_recipe(job: Job) -> Checks:
    """the engine must keep its states by this memory recipe; `engine` is what it does by default"""
    asked, have = job.training.memory_recipe, ("engine", *job.engine.can.memory_recipes, *ADAM_RECIPES)
    if (yield asked not in have):
        return _lacks(job, f"does not keep its states by recipe {asked}", "memory_recipe", have)
