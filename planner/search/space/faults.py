"""Messages for layouts that break a rule: the fault with its numbers, and legal values.

Each rule of `planner.search.space.rules` has one function here, which is called for layouts that break the rule.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final

from planner.cost.adapters import without_adapters
from planner.cost.mixers import mixer_heads
from planner.cost.recompute import absent_modules
from planner.cost.segments import domain_devices, num_domains, segments_of
from planner.cost.stage import pattern_of
from planner.layout import divisors, offloads_activations, offloads_params
from planner.specs.by_name import other_engines
from planner.specs.job import Job
from planner.specs.recipe import ADAM_RECIPES
from planner.specs.text import any_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from planner.layout import Layout
    from planner.specs.job import Job


def _near(values: Iterable[int], asked: int) -> str:
    """As text, the few legal values that are nearest to the value asked for."""
    return any_of(sorted(sorted(values, key=lambda value: abs(value - asked))[:_MOST_NAMED]))


_MOST_NAMED: Final = 4


def _microbatches(job: Job, layout: Layout) -> int:
    return layout.num_microbatches(job.training.global_batch_size)


# --- the model and the training on this engine --------------------------------------------------------------------


def _lacks(job: Job, what: str, setting: str, have: Iterable[str], elsewhere: str = "") -> str:
    """The engine lacks a value of a training setting; it has these values."""
    return f"engine {job.engine.name} {what}; --set training.{setting}={any_of(have)}{elsewhere}"


def features(job: Job, _: Layout) -> str:
    """The engine lacks a feature of the model."""
    missing = ", ".join(sorted(set(job.model.features) - set(job.engine.can.model_features)))
    elsewhere = other_engines("; ", lambda engine: set(job.model.features) <= set(engine.can.model_features))
    return f"engine {job.engine.name} does not run {missing}, which {job.model.name} needs{elsewhere}"


def dropout(job: Job, _: Layout) -> str:
    """The engine has no dropout."""
    asked = job.training.dropout
    return f"engine {job.engine.name} does not train with dropout, which is {asked:g}; --set training.dropout=0"


def loss(job: Job, _: Layout) -> str:
    """The engine does not compute the loss in the requested way."""
    elsewhere = other_engines(", or ", lambda engine: job.loss in engine.can.losses)
    return _lacks(job, f"has no {job.loss} loss", "loss", job.engine.can.losses, elsewhere)


def mlp_tiles(job: Job, _: Layout) -> str:
    """The engine does not compute feed-forward blocks in tiles, or the model has experts in their place."""
    without = "--set training.mlp_tiles=1"
    if job.engine.can.mlp_tiles:
        return f"experts are not computed in tiles, and {job.model.name} has experts; {without}"
    elsewhere = other_engines(", or ", lambda engine: engine.can.mlp_tiles)
    return f"engine {job.engine.name} computes a feed-forward block at once; {without}{elsewhere}"


def cuda_graphs(job: Job, _: Layout) -> str:
    """The engine cannot capture these CUDA graphs, or cannot combine them with another setting."""
    asked, have = job.training.cuda_graphs, job.engine.can.cuda_graphs
    if asked in have:
        return f"CUDA graphs of {asked} do not offload activations; --set training.cuda_graphs=none, or another offload"
    elsewhere = other_engines(", or ", lambda engine: asked in engine.can.cuda_graphs)
    return _lacks(job, f"captures no CUDA graphs of {asked}", "cuda_graphs", have, elsewhere)


def expert_overlap(job: Job, layout: Layout) -> str:
    """Expert exchanges cannot overlap with other microbatches."""
    without = "--set training.expert_overlap=false"
    if not job.engine.can.expert_overlap:
        elsewhere = other_engines(", or ", lambda engine: engine.can.expert_overlap)
        return f"engine {job.engine.name} runs exchanges of experts in line; {without}{elsewhere}"
    if layout.ep == 1:
        return f"there are no exchanges of experts to overlap with ep 1; {without}"
    if layout.pp > 1 and layout.interleave == 1:
        return f"exchanges of experts overlap in interleaved stages or without a pipeline; interleave=2, or {without}"
    return f"exchanges of experts overlap in 16 bits or less and with one layer for further tokens at most; {without}"


def optimizer(job: Job, _: Layout) -> str:
    """The engine lacks the optimizer."""
    asked = job.training.optimizer
    elsewhere = other_engines(", or ", lambda engine: asked in engine.can.optimizers)
    return _lacks(job, f"has no optimizer {asked}", "optimizer", job.engine.can.optimizers, elsewhere)


def frozen_weights(job: Job, _: Layout) -> str:
    """The engine cannot freeze weights, or does not store frozen weights in this format."""
    have = job.engine.can.frozen_weights
    if not have:
        kept = job.training.frozen_weights
        elsewhere = other_engines(
            ", or ", lambda engine: kept in engine.can.frozen_weights and not engine.can.adapters_priced_only
        )
        return f"engine {job.engine.name} trains every weight and has no adapters; lora_rank 0{elsewhere}"
    if job.training.frozen_weights in have:
        elsewhere = other_engines(
            ", or ", lambda engine: engine.can.fp8_adapters and not engine.can.adapters_priced_only
        )
        return (
            f"engine {job.engine.name} has no adapters beside weights that compute in {job.training.precision}; "
            f"--precision bf16{elsewhere}"
        )
    return _lacks(job, f"keeps no frozen weights in {job.training.frozen_weights}", "frozen_weights", have)


def adapters(job: Job, _: Layout) -> str:
    """The engine has no adapters of this kind."""
    return f"adapters cannot be planned: {without_adapters(job)}"


def memory_recipe(job: Job, _: Layout) -> str:
    """The engine lacks the memory recipe."""
    have = ("engine", *job.engine.can.memory_recipes, *ADAM_RECIPES)
    return _lacks(job, f"does not keep its states by recipe {job.training.memory_recipe}", "memory_recipe", have)


def axes(job: Job, layout: Layout) -> str:
    """The engine lacks an axis."""
    lacking = [axis for axis in ("tp", "pp", "dp", "cp", "ep", "etp") if axis not in job.engine.can.axes]
    asked = ", ".join(f"{axis}={getattr(layout, axis)}" for axis in lacking if getattr(layout, axis) > 1)
    return f"engine {job.engine.name} does not run {asked}; its axes are {', '.join(job.engine.can.axes)}"


def schedule(job: Job, layout: Layout) -> str:
    """The engine lacks the schedule."""
    have = any_of(job.engine.pipeline.schedules)
    return f"engine {job.engine.name} does not run schedule {layout.schedule}; it runs {have}"


def zero(job: Job, layout: Layout) -> str:
    """The engine lacks the ZeRO stage, or lacks it only with a pipeline."""
    alone, piped = job.engine.can.zero_stages, job.engine.pipeline.zero_stages
    where = f" with a pipeline of {layout.pp} stages" if layout.pp > 1 else ""
    ways = [f"zero={any_of(offered)}"] if (offered := piped if layout.pp > 1 else alone) else []
    ways += [f"pp=1 with zero={layout.zero}"] if layout.pp > 1 and layout.zero in alone else []
    return f"engine {job.engine.name} has no ZeRO-{layout.zero}{where}; {', or '.join(ways) or 'pp=1'}"


def no_full_recompute(job: Job) -> str:
    """The name of the setting that forbids full recompute; empty if no setting forbids it.

    Source: Megatron-LM, transformer_config.py (overlap_moe_expert_parallel_comm, cuda_graph_impl).
    """
    if job.training.expert_overlap:
        return "training.expert_overlap"
    return "training.cuda_graphs=layers" if job.training.cuda_graphs == "layers" else ""


def recompute(job: Job, layout: Layout) -> Iterator[str]:
    """The engine lacks the recompute: an unknown policy, or policies that differ by stage, or by chunk of a stage."""
    if "full" in layout.recompute and (why := no_full_recompute(job)):
        yield f"full recompute does not go with {why}"
    used = sorted(set(layout.recompute))
    for policy in used:
        if not job.engine.can.recomputes(policy):
            yield f"engine {job.engine.name} has no {policy} recompute; it has {job.engine.can.recompute_words}"
        for module, lacking in absent_modules(job.model).items():
            if module in policy.split("+"):
                yield f"recompute={policy}: {job.model.name} has no {lacking}"
    if len(used) > 1 and not job.engine.pipeline.recompute_per_stage:
        yield f"engine {job.engine.name} has one recompute policy for all stages, not {' and '.join(used)}"
    if len(used) == 1 or not job.engine.pipeline.recompute_per_stage:
        return
    for stage in range(layout.pp):
        policies = {layout.recompute[chunk] for chunk in layout.chunks_of_stage(stage)}
        if len(policies) > 1:
            yield f"the chunks of stage {stage} recompute {' and '.join(sorted(policies))}; give them one policy"
            return


def ends(job: Job, layout: Layout) -> Iterator[str]:
    """Chunks that hold neither a layer nor an end of the model, and ends where the engine cannot place them.

    Source: Megatron-LM, core/transformer/pipeline_parallel_layer_layout.py (validate_layer_layout).
    """
    last, places = layout.num_chunks - 1, job.engine.pipeline.places_ends
    pieces = {0, last, *layout.mtp} if places else set()
    for chunk, count in enumerate(layout.layers_per_stage):
        if not count and chunk not in pieces:
            is_end = chunk in (0, last, *layout.mtp)
            beside = f", and engine {job.engine.name} gives no end of the model a chunk of its own" if is_end else ""
            yield f"chunk {chunk} holds no layer{beside}; give each of the {layout.num_chunks} at least one"
            break
    if not layout.mtp:
        return
    written = "mtp=" + "/".join(map(str, layout.mtp))
    if not job.model.mtp_layers:
        yield f"{written}: {job.model.name} has no layers for multi-token prediction"
    elif not places:
        yield f"{written}: engine {job.engine.name} has them beside the loss; leave mtp out"
    elif len(layout.mtp) > 1:
        yield f"{written}: engine {job.engine.name} has all these layers in one chunk; name one"
    elif sum(layout.layers_per_stage[layout.mtp[0] + 1 :]):
        yield f"{written}: layers follow in later chunks, and multi-token prediction reads the output of the last"
    elif layout.mtp[0] < layout.pp * (layout.interleave - 1):
        yield f"{written}: they stand in the last chunk of a stage, {layout.pp * (layout.interleave - 1)} or later"


def offload(job: Job, layout: Layout) -> str:
    """The engine cannot offload these tensors to the host."""
    have = any_of(job.engine.offload.what)
    return f"engine {job.engine.name} cannot keep `{layout.offload}` in the host's memory; offload={have}"


def host(job: Job, _: Layout) -> str:
    """The cluster document does not describe the hosts."""
    return (
        f"{job.cluster.name} does not say what memory its hosts have; write it as `host:` of the cluster document, or "
        "offload=none"
    )


def offloaded_optimizer(job: Job, layout: Layout) -> str:
    """The host cannot run this optimizer update."""
    if job.training.lora_rank:
        return "the states of adapters are too small to offload; offload=none or activations"
    if job.training.optimizer not in ("adamw", "sgd"):
        return f"a host updates by adamw or sgd, not by {job.training.optimizer}; --set training.optimizer=adamw"
    if not layout.zero:
        return "a host updates shards of the states, and ZeRO-0 has none; zero=1 or more"
    if offloads_params(layout) and layout.zero < 3 and layout.pp == 1:
        return f"weights on the host are gathered by ZeRO-3, and zero is {layout.zero}; zero=3, or offload=optimizer"
    return f"engine {job.engine.name} offloads no optimizer under a pipeline of {layout.pp} stages; pp=1"


def offloaded_activations(job: Job, layout: Layout) -> str:
    """The engine offloads no activations of a pipeline."""
    return f"engine {job.engine.name} offloads no activations under a pipeline of {layout.pp} stages; pp=1"


def not_offloaded(job: Job, layout: Layout) -> Iterator[str]:
    """Policies whose activations the engine cannot offload."""
    if offloads_activations(layout):
        have = any_of(job.engine.offload.activations_of)
        for policy in sorted(set(layout.recompute) - set(job.engine.offload.activations_of)):
            yield f"engine {job.engine.name} offloads no activations with recompute={policy}; recompute={have}"


# --- degrees --------------------------------------------------------------------------------------------------------


def world(job: Job, layout: Layout) -> str:
    """The layout needs more devices than the cluster has, or more stages than the pools have room for."""
    if len(job.pools) > 1:
        return f"the pools have no room for {layout.pp} stages of {layout.stride('pp')} devices each; lower a degree"
    have, per_host = job.num_devices, job.pools[0].cluster.devices_per_host
    product = " * ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tp", "pp", "cp", "dp"))
    return (
        f"{product} = {layout.world_size:,} devices, and there are {have:,}; lower a degree, or "
        f"--nodes {-(-layout.world_size // per_host)}"
    )


def batch(job: Job, layout: Layout) -> str:
    """The global batch is not divisible by the number of replicas times the microbatch size."""
    size, asked = job.training.global_batch_size, layout.dp * layout.mbs
    return (
        f"dp {layout.dp} * mbs {layout.mbs} = {asked:,} does not divide the global batch of {size:,}; make it "
        f"{_near(divisors(size), asked)}, or --global-batch {-(-size // asked) * asked}"
    )


def tp_divides(job: Job, layout: Layout) -> str:
    """Tensor parallelism does not divide every dimension that it shards."""
    model = job.model
    cut = {"heads": model.num_heads, "key-value heads": model.num_kv_heads, "ffn width": model.ffn_hidden_size}
    if model.moe and model.moe.shared_ffn_hidden_size:
        cut["width of the shared expert"] = model.moe.shared_ffn_hidden_size
    if mixer_heads(model):
        cut["heads of the mixer"] = mixer_heads(model)

    def divides(name: str, size: int, tp: int) -> bool:
        repeated = name == "key-value heads" and job.engine.can.repeats_kv_heads and tp % size == 0
        return size % tp == 0 or repeated

    uneven = any_of(f"{name} ({size:,})" for name, size in cut.items() if not divides(name, size, layout.tp))
    degrees = range(1, job.cluster.scale_up_devices + 1)
    legal = [tp for tp in degrees if all(divides(name, size, tp) for name, size in cut.items())]
    return f"tp {layout.tp} does not divide the {uneven}; tp can be {_near(legal, layout.tp)}"


def vocabulary(job: Job, layout: Layout) -> str:
    """Tensor parallelism does not divide the vocabulary, and the engine does not pad."""
    size, multiple = job.model.vocab_size, 128 * layout.tp
    return (
        f"tp {layout.tp} does not divide the vocabulary of {size:,}, which engine {job.engine.name} does not pad; "
        f"pad it yourself, --set model.vocab_size={-(-size // multiple) * multiple}"
    )


def tp_within_node(job: Job, layout: Layout) -> str:
    """Tensor parallelism crosses the scale-up domain, or does not divide it."""
    domain = max(int(domain_devices(pool.cluster, layout.segment)) for pool in job.pools)
    if layout.tp <= domain:
        legal = _near(divisors(domain), layout.tp)
        return f"tp {layout.tp} does not divide the scale-up domain of {domain} devices; tp can be {legal}"
    if not job.allow_tp_across_nodes:
        return f"tp {layout.tp} leaves the scale-up domain of {domain} devices; lower it, or --allow-tp-across-nodes"
    return f"tp {layout.tp} is no multiple of the scale-up domain of {domain} devices, which it crosses; make it one"


def segment(job: Job, layout: Layout) -> str:
    """No scheduler can allocate the segment."""
    if len(job.pools) > 1:
        return f"segment {layout.segment}: of a mixed cluster the document of each pool says it; leave it out"
    cluster = job.pools[0].cluster
    most, hosts = cluster.hosts_per_domain, -(-layout.world_size // cluster.devices_per_host)
    if most == 1:
        return f"segment {layout.segment}: a scale-up domain of {cluster.name} has one host; leave it out"
    legal = segments_of(cluster, layout.world_size)
    can_be = f"it can be {_near(legal, layout.segment)}" if legal else "no segment is possible"
    if cluster.segment and layout.segment not in (0, cluster.segment):
        return f"segment {layout.segment}: {cluster.name} has segment {cluster.segment} in its document; leave it out"
    if layout.segment > most:
        return f"segment {layout.segment} is more than the {most} hosts of a scale-up domain; {can_be}"
    if layout.segment not in (0, most) and hosts % layout.segment:
        return f"segment {layout.segment} does not divide the {hosts:,} hosts of the layout; {can_be}"
    taken = num_domains(cluster, layout.world_size, layout.segment)
    return f"segment {layout.segment} takes hosts of {taken:,} domains, and there are {cluster.domains}; {can_be}"


def sequence_parallel(job: Job, layout: Layout) -> str:
    """Sequence parallelism is on without tensor parallelism, or the engine's tensor parallelism does not run so."""
    if layout.tp == 1:
        return "sequence parallelism goes along tensor parallelism, and tp is 1; sp=0, or a larger tp"
    if layout.sp not in job.engine.can.sp:
        only = "without" if layout.sp else "with"
        return f"engine {job.engine.name} runs tp {layout.tp} {only} sequence parallelism only; sp={1 - layout.sp}"
    length = job.training.sequence_length // layout.cp
    off = ", or sp=0" if 0 in job.engine.can.sp else ""
    of_cp = " that context parallelism leaves" if layout.cp > 1 else ""
    return f"tp {layout.tp} does not divide the {length:,} tokens of a sequence{of_cp}; choose a tp that does{off}"


def layers(job: Job, layout: Layout) -> str:
    """The layout has more chunks than the model has layers, and ends that may stand alone."""
    apart = ", or an end of the model" if job.engine.pipeline.places_ends else ""
    return (
        f"pp {layout.pp} * interleave {layout.interleave} = {layout.num_chunks} chunks of {job.model.num_layers} "
        f"layers, and each holds at least one{apart}; lower pp or interleave"
    )


def even_stages(job: Job, layout: Layout) -> str:
    """The stages would hold different numbers of layers, which the engine cannot run."""
    legal = _near(divisors(job.model.num_layers), layout.num_chunks)
    return (
        f"pp {layout.pp} * interleave {layout.interleave} = {layout.num_chunks} does not divide the "
        f"{job.model.num_layers} layers, and engine {job.engine.name} needs equal stages; make it {legal}"
    )


def whole_periods(job: Job, layout: Layout) -> str:
    """The search could not derive from a stage's number of layers which layers it holds."""
    period = pattern_of(job).period
    return (
        f"kinds of layers repeat every {period} layers, and with pp {layout.pp} * interleave {layout.interleave} chunks"
        f" of {job.model.num_layers} layers not each has whole periods, as the search asks for; interleave=1, or "
        "`planner explain --layout` to price it"
    )


def leading_layers(job: Job, layout: Layout) -> str:
    """The first chunk cannot hold all dense layers if every other chunk is to hold a layer, too."""
    return (
        f"{job.model.name} begins with {pattern_of(job).leading} dense layers, and with pp {layout.pp} * interleave "
        f"{layout.interleave} the first of the chunks cannot hold them all, as the search asks for; a lower interleave,"
        " or `planner explain --layout` to price it"
    )


def interleave(job: Job, layout: Layout) -> str:
    """The interleave does not fit the schedule or the number of microbatches."""
    m = _microbatches(job, layout)
    if layout.schedule in ("zbv", "dualpipev"):
        if layout.interleave != 2:
            return f"schedule {layout.schedule} has 2 chunks on each stage, not {layout.interleave}; interleave=2"
        return (
            f"schedule {layout.schedule} needs {2 * layout.pp} microbatches, 2 pp, and there are {m}; lower pp or mbs"
        )
    if layout.schedule != "interleaved":
        return f"schedule {layout.schedule} has 1 chunk on each stage, not {layout.interleave}; schedule=interleaved"
    if layout.interleave == 1:
        return "schedule interleaved has several chunks on each stage, and interleave is 1; interleave=2 or more"
    if layout.pp == 1:
        return f"interleave {layout.interleave} needs a pipeline, and pp is 1; interleave=1, or a larger pp"
    return f"interleaved stages need microbatches in multiples of pp {layout.pp}, and there are {m}; another dp or mbs"


def fill(job: Job, layout: Layout) -> str:
    """The step has fewer microbatches than the pipeline has stages."""
    m = _microbatches(job, layout)
    return (
        f"engine {job.engine.name} needs a microbatch for each of the {layout.pp} stages, and there are {m}; lower pp, "
        "dp or mbs, or take schedule=gpipe"
    )


def hsdp(job: Job, layout: Layout) -> str:
    """The number of replicas of the sharded group is impossible."""
    if not layout.zero:
        return f"hsdp {layout.hsdp} counts replicas of a sharded group, and zero is 0; hsdp=1, or zero=1 to 3"
    if not job.engine.can.replicates_shards:
        return f"engine {job.engine.name} does not shard within {layout.hsdp} replicas; hsdp=1"
    if layout.dp % layout.hsdp:
        return f"hsdp {layout.hsdp} does not divide dp {layout.dp}; it can be {_near(divisors(layout.dp), layout.hsdp)}"
    copies = max(1, layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp))
    legal = _near(divisors(gcd(copies, layout.dp)), layout.hsdp)
    return f"hsdp {layout.hsdp} does not divide the {copies} copies of an expert; it can be {legal}"


def encoder(job: Job, layout: Layout) -> str:
    """The layout has a pipeline, which models with an encoder do not support."""
    return f"{job.model.name} is an {job.model.kind}, which is not cut into the {layout.pp} pipeline stages; pp=1"


def experts(job: Job, layout: Layout) -> str:
    """Expert parallelism does not divide every dimension that it shards."""
    moe = job.model.moe
    if moe is None:
        return f"{job.model.name} has no experts to cut into ep {layout.ep} * etp {layout.etp}; ep=1,etp=1"
    if moe.num_experts % layout.ep:
        legal = _near(divisors(moe.num_experts), layout.ep)
        return f"ep {layout.ep} does not divide the {moe.num_experts} experts; it can be {legal}"
    if moe.ffn_hidden_size % layout.etp:
        return f"etp {layout.etp} does not divide the width of an expert, {moe.ffn_hidden_size:,}; choose one that does"
    ranks = layout.tp * layout.cp * layout.dp
    return (
        f"ep {layout.ep} * etp {layout.etp} = {layout.ep * layout.etp} does not divide the "
        f"tp * cp * dp = {ranks} ranks of a stage; make it {_near(divisors(ranks), layout.ep * layout.etp)}"
    )


def context_heads(job: Job, layout: Layout) -> str:
    """The heads cannot be divided among the ranks of tp and cp."""
    return (
        f"engine {job.engine.name} trades a part of the sequence for heads, and tp {layout.tp} * cp {layout.cp} = "
        f"{layout.tp * layout.cp} ranks do not share {job.model.num_heads} heads and {job.model.num_kv_heads} "
        "key-value heads evenly; another cp"
    )


def context_pipeline(job: Job, layout: Layout) -> str:
    """The engine's pipeline does not support context parallelism."""
    both = f"cp {layout.cp} with a pipeline of {layout.pp} stages"
    return f"engine {job.engine.name} does not run {both}; pp=1 or cp=1"


def context(job: Job, layout: Layout) -> str:
    """Context parallelism does not divide the sequence."""
    length = job.training.sequence_length
    longer = -(-length // (2 * layout.cp)) * 2 * layout.cp
    return (
        f"cp {layout.cp} cuts a sequence into {2 * layout.cp} equal parts, and {length:,} tokens are no multiple of "
        f"that; another cp, or --seq-len {longer}"
    )
