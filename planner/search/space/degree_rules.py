"""Rules of the degrees: how devices, batch, heads and layers may be divided."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.mixers import mixer_heads
from planner.cost.schedule import exists
from planner.cost.segments import domain_devices, is_possible, num_domains, segments_of
from planner.cost.stage import pattern_of
from planner.layout import divisors, offloads_activations, offloads_optimizer, offloads_params
from planner.search.space.rule import Rule, near, rule
from planner.specs.banned import searched_axes
from planner.specs.by_name import other_engines
from planner.specs.text import any_of

if TYPE_CHECKING:
    from planner.layout import Degrees
    from planner.numbers import Flag, Number
    from planner.search.space.rule import Checks
    from planner.specs.job import Job, PoolJob
    from planner.specs.recipe import Schedule

DEGREE_RULES: Final[list[Rule]] = []


def tp_within_pool(job: PoolJob, tp: Number, segment: Number) -> Flag:
    """Whether tensor parallelism stays inside the used devices of one domain, or (if allowed) spans whole domains."""
    domain = domain_devices(job.cluster, segment)
    inside = domain % np.minimum(tp, domain) == 0
    crossing = (np.asarray(tp) > domain) & (tp % domain == 0)
    return inside & (tp <= domain) | (job.allow_tp_across_nodes & crossing)


def stages_in_pool(job: PoolJob, layout: Degrees) -> Number:
    """Number of stages for which a pool has devices; 0 if its scale-up domain is too small for tp."""
    return tp_within_pool(job, layout.tp, layout.segment) * (job.num_devices // (layout.tp * layout.cp * layout.dp))


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


@rule(DEGREE_RULES, "tp pp cp dp")
def world(job: Job, x: Degrees) -> Checks:
    """tp * pp * cp * dp must be at most the number of devices"""
    stage = x.tp * x.cp * x.dp
    if len(job.pools) > 1:  # where tp has to fit into a domain of some pool
        if (yield x.pp > sum(stages_in_pool(pool, x) for pool in job.pools)):
            return f"the pools have no room for {x.pp} stages of {stage} devices each; lower a degree"
    elif (yield stage * x.pp > job.num_devices):
        product = f"tp {x.tp} * pp {x.pp} * cp {x.cp} * dp {x.dp} = {stage * x.pp:,} devices"
        hosts = -(-stage * x.pp // job.cluster.pools[0].devices_per_host)
        return f"{product}, and there are {job.num_devices:,}; lower a degree, or --nodes {hosts}"


@rule(DEGREE_RULES)
def batch(job: Job, dp: Number, mbs: Number) -> Checks:
    """dp * mbs must divide the global batch"""
    size, asked = job.training.global_batch_size, dp * mbs
    if (yield size % asked != 0):
        product, legal = f"dp {dp} * mbs {mbs} = {asked:,}", near(divisors(size), asked)
        others = f"make it {legal}, or --global-batch {-(-size // asked) * asked}"
        return f"{product} does not divide the global batch of {size:,}; {others}"


@rule(DEGREE_RULES)
def tp_divides(job: Job, tp: Number) -> Checks:
    """tp must divide the heads, the ffn width and the key-value heads, or be a multiple of the latter where the engine
    repeats them
    """
    model = job.model
    cut = {
        "heads": model.num_heads,
        "key-value heads": model.num_kv_heads,
        "ffn width": model.ffn_hidden_size,
        "width of the shared expert": model.moe.shared_ffn_hidden_size if model.moe else 0,
        "heads of the mixer": mixer_heads(model),
    }

    def is_cut(name: str, tp: Number) -> Flag:
        repeated = name == "key-value heads" and job.engine.can.repeats_kv_heads
        return (cut[name] % tp == 0) | (tp % cut[name] == 0 if repeated else False)

    if (yield np.logical_not(np.logical_and.reduce([is_cut(name, tp) for name in cut]))):
        uneven = any_of(f"{name} ({size:,})" for name, size in cut.items() if not is_cut(name, tp))
        degrees = range(1, job.cluster.scale_up_devices + 1)
        legal = near([each for each in degrees if all(is_cut(name, each) for name in cut)], tp)
        return f"tp {tp} does not divide the {uneven}; tp can be {legal}"


@rule(DEGREE_RULES)
def vocabulary(job: Job, tp: Number) -> Checks:
    """tp must divide the vocabulary, which this engine does not pad (see model.vocab_size)"""
    size, multiple = job.model.vocab_size, 128 * tp
    if (yield (size % tp != 0) & (not job.engine.can.pads_vocabulary)):
        padded = f"pad it yourself, --set model.vocab_size={-(-size // multiple) * multiple}"
        return (
            f"tp {tp} does not divide the vocabulary of {size:,}, which engine {job.engine.name} does not pad; {padded}"
        )


@rule(DEGREE_RULES)
def tp_within_node(job: Job, tp: Number, segment: Number) -> Checks:
    """tensor parallelism must stay inside the scale-up domain, unless --allow-tp-across-nodes"""
    if (yield np.logical_not(np.logical_or.reduce([tp_within_pool(pool, tp, segment) for pool in job.pools]))):
        domain = max(int(domain_devices(pool.cluster, segment)) for pool in job.pools)
        whole = f"the scale-up domain of {domain} devices"
        if tp <= domain:
            return f"tp {tp} does not divide {whole}; tp can be {near(divisors(domain), tp)}"
        if job.allow_tp_across_nodes:
            return f"tp {tp} is no multiple of {whole}, which it crosses; make it one"
        return f"tp {tp} leaves {whole}; lower it, or --allow-tp-across-nodes"


@rule(DEGREE_RULES)
def segment(job: Job, tp: Number, pp: Number, cp: Number, dp: Number, segment: Number) -> Checks:
    """as many hosts must be taken of every scale-up domain, or all of each, and there must be as many domains"""
    cluster, devices = job.cluster.pools[0], tp * pp * cp * dp
    if len(job.pools) > 1 or cluster.hosts_per_domain == 1:
        if (yield segment != 0):
            alone = f"a scale-up domain of {cluster.name} has one host"
            mixed = "of a mixed cluster the document of each pool says it"
            return f"segment {segment}: {mixed if len(job.pools) > 1 else alone}; leave it out"
    elif (yield np.logical_not(is_possible(cluster, devices, segment))):
        legal, asked, most = segments_of(cluster, devices), f"segment {segment}", cluster.hosts_per_domain
        hosts = -(-devices // cluster.devices_per_host)
        can_be = f"it can be {near(legal, segment)}" if legal else "no segment is possible"
        if cluster.segment and segment not in (0, cluster.segment):
            return f"{asked}: {cluster.name} has segment {cluster.segment} in its document; leave it out"
        if segment > most:
            return f"{asked} is more than the {most} hosts of a scale-up domain; {can_be}"
        if segment not in (0, most) and hosts % segment:
            return f"{asked} does not divide the {hosts:,} hosts of the layout; {can_be}"
        taken = num_domains(cluster, devices, segment)
        return f"{asked} takes hosts of {taken:,} domains, and there are {cluster.domains}; {can_be}"


@rule(DEGREE_RULES)
def sequence_parallel(job: Job, tp: Number, sp: Number, cp: Number) -> Checks:
    """sequence parallelism must have tp > 1 that divides the sequence, and this engine's tp must run so"""
    length, can = job.training.sequence_length // cp, job.engine.can.sp
    if (yield (tp == 1) & (sp != 0)):
        return "sequence parallelism goes along tensor parallelism, and tp is 1; sp=0, or a larger tp"
    if (yield (tp > 1) & ~np.isin(sp, can)):
        only = "without" if sp else "with"
        return f"engine {job.engine.name} runs tp {tp} {only} sequence parallelism only; sp={1 - sp}"
    if (yield (sp != 0) & (length % tp != 0)):
        off, of_cp = ", or sp=0" if 0 in can else "", " that context parallelism leaves" if cp > 1 else ""
        return f"tp {tp} does not divide the {length:,} tokens of a sequence{of_cp}; choose a tp that does{off}"


@rule(DEGREE_RULES)
def layers(job: Job, pp: Number, interleave: Number) -> Checks:
    """every chunk must hold a layer, or an end of the model where the engine can place it apart"""
    number = job.model.num_layers
    if (yield pp * interleave > number + num_ends(job)):
        chunks = f"pp {pp} * interleave {interleave} = {pp * interleave} chunks of {number} layers"
        apart = ", or an end of the model" if job.engine.pipeline.places_ends else ""
        return f"{chunks}, and each holds at least one{apart}; lower pp or interleave"


@rule(DEGREE_RULES)
def even_stages(job: Job, pp: Number, interleave: Number) -> Checks:
    """pp * interleave must divide the layers with this engine"""
    number, chunks = job.model.num_layers, pp * interleave
    if (yield (number % chunks != 0) & (not job.engine.pipeline.uneven_stages)):
        product = f"pp {pp} * interleave {interleave} = {chunks} does not divide the {number} layers"
        return f"{product}, and engine {job.engine.name} needs equal stages; make it {near(divisors(number), chunks)}"


@rule(DEGREE_RULES)
def interleave(job: Job, pp: Number, dp: Number, mbs: Number, interleave: Number, schedule: Schedule) -> Checks:
    """interleave > 1 must go with schedule interleaved, pp > 1 and microbatches in multiples of pp; zbv and dualpipev
    with interleave 2, and dualpipev with at least 2 pp microbatches
    """
    m, v = job.training.global_batch_size // (dp * mbs), interleave
    several = np.maximum(m, 1)  # dp * mbs may exceed the batch; another rule refuses this
    if schedule == "interleaved":
        if (yield v == 1):
            return "schedule interleaved has several chunks on each stage, and interleave is 1; interleave=2 or more"
        if (yield pp == 1):
            return f"interleave {v} needs a pipeline, and pp is 1; interleave=1, or a larger pp"
        if (yield several % pp != 0):
            return f"interleaved stages need microbatches in multiples of pp {pp}, and there are {m}; another dp or mbs"
    elif schedule in ("zbv", "dualpipev") and (yield v != 2):
        return f"schedule {schedule} has 2 chunks on each stage, not {v}; interleave=2"
    if (yield np.logical_not(exists(schedule, pp, several, v))):
        if schedule == "dualpipev":
            return f"schedule {schedule} needs {2 * pp} microbatches, 2 pp, and there are {m}; lower pp or mbs"
        return f"schedule {schedule} has 1 chunk on each stage, not {v}; schedule=interleaved"


@rule(DEGREE_RULES, left_out="interleaved stages of this model whose chunks are not all alike")
def whole_periods(job: Job, pp: Number, interleave: Number, schedule: Schedule) -> Checks:
    """where kinds of layers repeat, interleaved chunks must all hold whole periods of them to be searched"""
    pattern, number = pattern_of(job), job.model.num_layers
    if schedule != "interleaved" or pattern.period == 1:
        return
    # the number of layers of a stage then determines which layers it holds
    if (yield (pattern.leading > 0) | (number % (pp * interleave * pattern.period) != 0)):
        chunks = f"with pp {pp} * interleave {interleave} chunks of {number} layers not each has whole periods"
        why = f"kinds of layers repeat every {pattern.period} layers, and {chunks}, as the search asks for"
        return f"{why}; interleave=1, or `planner explain --layout` to price it"


@rule(
    DEGREE_RULES,
    "pp interleave schedule",
    left_out="interleaved stages of this model whose first chunk does not hold all dense layers",
)
def leading_layers(job: Job, x: Degrees) -> Checks:
    """the first of interleaved chunks must hold all layers before the first with experts to be searched"""
    most = job.model.num_layers - x.interleave * (x.pp - 1) + max(searched_ends(job) - 1, 0)
    if (yield (x.interleave <= most) & (least_of_first_stage(job, x) > most)):  # with fewer another rule refuses
        chunks = f"with pp {x.pp} * interleave {x.interleave} the first of the chunks cannot hold them all"
        dense = f"{job.model.name} begins with {pattern_of(job).leading} dense layers"
        way_out = "a lower interleave, or `planner explain --layout` to price it"
        return f"{dense}, and {chunks}, as the search asks for; {way_out}"


@rule(DEGREE_RULES)
def fill(job: Job, pp: Number, dp: Number, mbs: Number, schedule: str) -> Checks:
    """this engine's 1F1B must have at least as many microbatches as stages"""
    m = job.training.global_batch_size // (dp * mbs)
    if not job.engine.pipeline.needs_filling or schedule in ("naive", "gpipe"):
        return
    if (yield (pp > 1) & (m < pp)):
        needs = f"engine {job.engine.name} needs a microbatch for each of the {pp} stages, and there are {m}"
        return f"{needs}; lower pp, dp or mbs, or take schedule=gpipe"


@rule(DEGREE_RULES)
def zero(job: Job, pp: Number, zero: Number) -> Checks:
    """the engine must have this ZeRO stage with this pipeline"""
    alone, piped = job.engine.can.zero_stages, job.engine.pipeline.zero_stages
    if (yield ~np.where(np.greater(pp, 1), np.isin(zero, piped), np.isin(zero, alone))):
        ways = [f"zero={any_of(offered)}"] if (offered := piped if pp > 1 else alone) else []
        ways += [f"pp=1 with zero={zero}"] if pp > 1 and zero in alone else []
        where = f" with a pipeline of {pp} stages" if pp > 1 else ""
        return f"engine {job.engine.name} has no ZeRO-{zero}{where}; {', or '.join(ways) or 'pp=1'}"


@rule(DEGREE_RULES)
def schedule(job: Job, schedule: str) -> Checks:
    """the engine must run this schedule"""
    have = job.engine.pipeline.schedules
    if (yield schedule not in have):
        elsewhere = other_engines(", or ", lambda engine: schedule in engine.pipeline.schedules)
        return f"engine {job.engine.name} does not run schedule {schedule}; it runs {any_of(have)}{elsewhere}"


@rule(DEGREE_RULES)
def hsdp(job: Job, tp: Number, dp: Number, cp: Number, ep: Number, etp: Number, zero: Number, hsdp: Number) -> Checks:
    """hsdp must divide dp (and the copies of an expert), with ZeRO and an engine that shards within replicas"""
    copies = tp * cp * dp // (ep * etp) if job.model.moe else dp
    if (yield (hsdp > 1) & (zero == 0)):
        return f"hsdp {hsdp} counts replicas of a sharded group, and zero is 0; hsdp=1, or zero=1 to 3"
    if (yield (hsdp > 1) & (not job.engine.can.replicates_shards)):
        return f"engine {job.engine.name} does not shard within {hsdp} replicas; hsdp=1"
    if (yield dp % hsdp != 0):
        return f"hsdp {hsdp} does not divide dp {dp}; it can be {near(divisors(dp), hsdp)}"
    if (yield copies % hsdp != 0):
        legal = near(divisors(gcd(copies, dp)), hsdp)
        return f"hsdp {hsdp} does not divide the {copies} copies of an expert; it can be {legal}"


@rule(DEGREE_RULES)
def encoder(job: Job, pp: Number) -> Checks:
    """encoders and encoder-decoders must not be cut into pipeline stages"""
    if (yield (pp > 1) & (job.model.kind != "decoder")):
        return f"{job.model.name} is an {job.model.kind}, which is not cut into the {pp} pipeline stages; pp=1"


@rule(DEGREE_RULES)
def experts(job: Job, tp: Number, cp: Number, dp: Number, ep: Number, etp: Number) -> Checks:
    """ep must divide the experts, etp their width, and ep * etp must divide tp * cp * dp"""
    moe, ranks = job.model.moe, tp * cp * dp
    number, width = (moe.num_experts, moe.ffn_hidden_size) if moe else (1, 1)
    if (yield (ep * etp > 1) & (moe is None)):
        return f"{job.model.name} has no experts to cut into ep {ep} * etp {etp}; ep=1,etp=1"
    if (yield number % ep != 0):
        return f"ep {ep} does not divide the {number} experts; it can be {near(divisors(number), ep)}"
    if (yield width % etp != 0):
        return f"etp {etp} does not divide the width of an expert, {width:,}; choose one that does"
    if (yield ranks % (ep * etp) != 0):
        product, legal = f"ep {ep} * etp {etp} = {ep * etp}", near(divisors(ranks), ep * etp)
        return f"{product} does not divide the tp * cp * dp = {ranks} ranks of a stage; make it {legal}"


@rule(DEGREE_RULES)
def context(job: Job, cp: Number) -> Checks:
    """context parallelism must cut the sequence into 2 cp equal parts"""
    length, parts = job.training.sequence_length, 2 * cp
    if (yield (cp > 1) & (length % parts != 0)):
        why = f"cp {cp} cuts a sequence into {parts} equal parts, and {length:,} tokens are no multiple of that"
        return f"{why}; another cp, or --seq-len {-(-length // parts) * parts}"


@rule(DEGREE_RULES)
def context_heads(job: Job, tp: Number, cp: Number) -> Checks:
    """tp * cp must divide the heads with this engine, which trades a part of the sequence for heads"""
    if job.engine.communication.context_exchange != "all-to-all":
        return
    heads, groups, ranks = job.model.num_heads, job.model.num_kv_heads, tp * cp
    shared = groups if job.model.mla is None else heads
    # every rank has whole heads, and key-value heads are divided or replicated evenly
    if (yield (cp > 1) & ((heads % ranks != 0) | ((shared % ranks != 0) & (ranks % shared != 0)))):
        why = f"engine {job.engine.name} trades a part of the sequence for heads, and tp {tp} * cp {cp} = {ranks} ranks"
        return f"{why} do not share {heads} heads and {groups} key-value heads evenly; another cp"


@rule(DEGREE_RULES)
def context_pipeline(job: Job, pp: Number, cp: Number) -> Checks:
    """cp > 1 must not be cut into pipeline stages with this engine"""
    if (yield (cp > 1) & (pp > 1) & (not job.engine.pipeline.context_parallel)):
        return f"engine {job.engine.name} does not run cp {cp} with a pipeline of {pp} stages; pp=1 or cp=1"


@rule(DEGREE_RULES)
def offload(job: Job, offload: str) -> Checks:
    """the engine must be able to keep this in the host's memory"""
    have = job.engine.offload.what
    if (yield offload not in have):
        ways_out = f"offload={any_of(have)}{other_engines(', or ', lambda engine: offload in engine.offload.what)}"
        return f"engine {job.engine.name} cannot keep `{offload}` in the host's memory; {ways_out}"


@rule(DEGREE_RULES)
def host(job: Job, offload: str) -> Checks:
    """the cluster must describe its hosts to offload anything (`host:` in its document)"""
    if (yield offload != "none" and not job.has_hosts):
        way_out = "write it as `host:` of the cluster document, or offload=none"
        return f"{job.cluster.name} does not say what memory its hosts have; {way_out}"


@rule(DEGREE_RULES, "pp zero offload")
def offloaded_optimizer(job: Job, x: Degrees) -> Checks:
    """an offloaded optimizer must be adamw or sgd with ZeRO (with weights, ZeRO-3), and not every engine has it under a
    pipeline
    """
    if not offloads_optimizer(x):
        return
    asked = job.training.optimizer
    if (yield job.training.lora_rank > 0):
        return "the states of adapters are too small to offload; offload=none or activations"
    if (yield asked not in ("adamw", "sgd")):
        return f"a host updates by adamw or sgd, not by {asked}; --set training.optimizer=adamw"
    if (yield x.zero == 0):
        return "a host updates shards of the states, and ZeRO-0 has none; zero=1 or more"
    if (yield (x.pp > 1) & (job.engine.offload.with_pipeline not in ("optimizer", "both"))):
        return f"engine {job.engine.name} offloads no optimizer under a pipeline of {x.pp} stages; pp=1"
    if (yield (x.zero < 3) & offloads_params(x)):
        return f"weights on the host are gathered by ZeRO-3, and zero is {x.zero}; zero=3, or offload=optimizer"


@rule(DEGREE_RULES, "pp offload")
def offloaded_activations(job: Job, x: Degrees) -> Checks:
    """this engine must have no pipeline to offload activations"""
    can = job.engine.offload.with_pipeline in ("activations", "both")
    if (yield (x.pp > 1) & (offloads_activations(x) and not can)):
        return f"engine {job.engine.name} offloads no activations under a pipeline of {x.pp} stages; pp=1"


@rule(DEGREE_RULES)
def axes(job: Job, tp: Number, pp: Number, dp: Number, cp: Number, ep: Number, etp: Number) -> Checks:
    """the engine must run every axis that is larger than 1"""
    have, degrees = job.engine.can.axes, {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "etp": etp}
    lacking = {axis: degree for axis, degree in degrees.items() if axis not in have}
    if lacking and (yield np.logical_or.reduce([np.greater(degree, 1) for degree in lacking.values()])):
        asked = {axis: degree for axis, degree in lacking.items() if degree > 1}
        words = ", ".join(f"{axis}={degree}" for axis, degree in asked.items())
        elsewhere = other_engines(", or ", lambda engine: {*asked} <= searched_axes(engine))
        return f"engine {job.engine.name} does not run {words}; its axes are {', '.join(have)}{elsewhere}"
