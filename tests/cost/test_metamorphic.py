"""Relations that every correct cost model satisfies, whatever its constants: the sign of an effect is known in advance.

Each relation takes a random legal case (a model, a cluster, an engine, a workload and a layout) and compares two
estimates. The relations catch errors of sign, unit and scope, without any measured number.

Source of the method: Segura et al., A Survey on Metamorphic Testing (IEEE TSE 2016).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.cost.estimate import estimate
from planner.cost.flops import model_flops_per_step
from planner.cost.ledger import LineName
from planner.cost.limits import unpriced
from planner.cost.parameters import num_params
from planner.cost.schedule import is_one_round
from planner.layout import Layout, even_split
from planner.search.space.rules import broken_rules
from planner.specs.calibration import UNCALIBRATED
from planner.specs.load import load_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.cost.estimate import Estimate
    from planner.specs.job import PoolJob

SAME = 1e-9  # sums of floats in another order
STATES = (LineName.PARAMS, LineName.GRADS, LineName.OPTIMIZER_STATE)
SHAPES = [
    ("megatron-1.7b", "dgx-a100", 2048),
    ("gpt3-175b", "dgx-a100", 2048),
    ("llama3-8b", "dgx-h100", 8192),
    ("llama3-70b", "dgx-b200", 4096),
    ("qwen3-8b", "dgx1-v100", 1024),
    ("falcon-40b", "dgx-a100", 2048),
    ("gemma2-9b", "gb200-nvl72", 8192),
    ("mixtral-8x7b", "dgx-h100", 4096),
    ("qwen3-30b-a3b", "dgx-h200", 4096),
    ("deepseek-v3", "dgx-h100", 4096),
]
ENGINES = ("megatron", "torch", "torchtitan", "deepspeed")


@dataclass(frozen=True, slots=True)
class Case:
    """A job and a legal layout of it."""

    job: PoolJob
    layout: Layout

    def __repr__(self) -> str:
        job = self.job
        where = f"{job.model.name} on {job.cluster.num_devices} {job.cluster.device.name}, {job.engine.name}"
        return f"{where}, batch {job.training.global_batch_size}: {self.layout}"

    @property
    def cost(self) -> Estimate:
        return estimate(self.job, self.layout)

    def with_layout(self, **changes: Any) -> Case:
        return Case(self.job, replace(self.layout, **changes))

    def with_job(self, **changes: Any) -> Case:
        return Case(replace(self.job, **changes), self.layout)

    def with_model(self, **changes: Any) -> Case:
        return self.with_job(model=self.job.model.model_copy(update=changes))

    def with_training(self, **changes: Any) -> Case:
        return self.with_job(training=self.job.training.model_copy(update=changes))

    def with_cluster(self, **changes: Any) -> Case:
        return self.with_job(cluster=self.job.cluster.model_copy(update=changes))

    def with_device(self, **changes: Any) -> Case:
        return self.with_cluster(device=self.job.cluster.device.model_copy(update=changes))

    def with_links(self, change: Callable[[Any], dict[str, Any]], *levels: int) -> Case:
        links = self.job.cluster.links
        wanted = [level % len(links) for level in levels] or range(len(links))
        return self.with_cluster(
            links=tuple(x.model_copy(update=change(x)) if i in wanted else x for i, x in enumerate(links))
        )


@cache
def _job(model: str, cluster: str, engine: str, gpus: int, batch: int, sequence: int) -> PoolJob:
    precision = "fp16" if cluster == "dgx1-v100" else "bf16"
    return load_job(
        model=model,
        cluster=cluster,
        training=None,
        engine=engine,
        nodes=None,
        gpus=gpus,
        sequence_length=sequence,
        global_batch_size=batch,
        precision=precision,
        settings=(),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A random legal case."""
    model, cluster, sequence = draw(st.sampled_from(SHAPES))
    every_engine = model in ("megatron-1.7b", "gpt3-175b", "llama3-8b", "llama3-70b")
    engine = draw(st.sampled_from(ENGINES)) if every_engine else "megatron"
    tp, pp, dp, cp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 1, 1, 2)))
    per_node = 4 if cluster == "gb200-nvl72" else 8
    gpus = -(-tp * pp * dp * cp // per_node) * per_node
    batch = dp * draw(st.sampled_from([4, 8, 24]))
    job = _job(model, cluster, engine, gpus, batch, sequence)
    interleave = draw(st.sampled_from([1, 1, 2])) if pp > 1 else 1
    layers = job.model.num_layers
    experts = job.model.moe is not None
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=draw(st.sampled_from([1, 2, 4, 8])) if experts else 1,
        zero=draw(st.sampled_from([0, 1, 2, 3])) if pp == 1 else draw(st.sampled_from([0, 1])),
        mbs=draw(st.sampled_from([1, 2])),
        interleave=interleave,
        schedule="interleaved" if interleave > 1 else draw(st.sampled_from(["1f1b", "1f1b", "gpipe"])),
        sp=int(tp > 1 and draw(st.sampled_from([True, True, False]))),
        recompute=(draw(st.sampled_from(job.engine.can.recompute)),) * (pp * interleave),
        layers_per_stage=even_split(layers, pp, interleave),
    )
    assume(not broken_rules(job, layout) and not unpriced(job, layout))
    return Case(job, layout)


def seconds(cost: Estimate, *names: LineName) -> float:
    """Exposed seconds of lines by name."""
    return sum(float(x.exposed_seconds) for x in cost.time if x.name in names)


def busy(cost: Estimate, *names: LineName) -> float:
    """Busy seconds of lines by name."""
    return sum(float(x.busy_seconds) for x in cost.time if x.name in names)


def num_bytes(cost: Estimate, *names: LineName) -> np.ndarray[Any, Any]:
    """Bytes of lines by name, one number for each stage."""
    return np.array([sum(float(x.num_bytes) for x in stage.lines if x.name in names) for stage in cost.memory])


def totals(cost: Estimate) -> np.ndarray[Any, Any]:
    """Bytes of every stage."""
    return np.array([stage.total_bytes for stage in cost.memory])


def at_most(low: Any, high: Any) -> None:
    """Everywhere `low <= high`, except for rounding."""
    assert np.all(np.asarray(low) <= np.asarray(high) * (1 + SAME) + 1e-12), (low, high)


def equal(one: Any, other: Any) -> None:
    """Equal everywhere, except for rounding."""
    assert np.allclose(one, other, rtol=SAME, atol=1e-12), (one, other)


def same(one: Estimate, other: Estimate) -> None:
    """The same ledger, word for word and number for number."""
    assert one.memory == other.memory
    assert one.time == other.time


RELATIONS: list[Callable[[Case], None]] = []


def relation(check: Callable[[Case], None]) -> Callable[[Case], None]:
    RELATIONS.append(check)
    return check


# --- the machine --------------------------------------------------------------------------------------------------


@relation
def twice_the_bandwidth_everywhere_is_never_slower(case: Case) -> None:
    faster = case.with_links(lambda link: {"bandwidth": 2 * link.bandwidth})
    at_most(faster.cost.step_seconds, case.cost.step_seconds)


@relation
def a_faster_innermost_link_is_never_slower(case: Case) -> None:
    faster = case.with_links(lambda link: {"bandwidth": 1.3 * link.bandwidth}, 0)
    at_most(faster.cost.step_seconds, case.cost.step_seconds)


@relation
def a_faster_outermost_link_is_never_slower(case: Case) -> None:
    faster = case.with_links(lambda link: {"bandwidth": 1.3 * link.bandwidth}, -1)
    at_most(faster.cost.step_seconds, case.cost.step_seconds)


@relation
def half_the_latency_is_never_slower(case: Case) -> None:
    quicker = case.with_links(lambda link: {"latency": link.latency / 2, "startup": link.startup / 2})
    at_most(quicker.cost.step_seconds, case.cost.step_seconds)


@relation
def a_network_outside_the_group_costs_nothing(case: Case) -> None:
    """Layouts that stay inside the innermost level do not feel the levels above it."""
    assume(case.layout.world_size <= case.job.cluster.scale_up_devices)
    slower = case.with_links(lambda link: {"bandwidth": link.bandwidth / 10}, -1)
    assume(len(case.job.cluster.links) > 1)
    equal(slower.cost.step_seconds, case.cost.step_seconds)


@relation
def a_stronger_device_is_never_slower(case: Case) -> None:
    """Ring exchange is excluded: its hops hide only behind attention, even if the host limits the layer."""
    assume(case.layout.cp == 1)
    peak = {name: 1.5 * value for name, value in case.job.cluster.device.peak.items()}
    at_most(case.with_device(peak=peak).cost.step_seconds, case.cost.step_seconds)


@relation
def a_stronger_device_has_a_lower_mfu(case: Case) -> None:
    """Everything except the products stays as slow, so a smaller share of the higher peak is reached."""
    peak = {name: 1.5 * value for name, value in case.job.cluster.device.peak.items()}
    at_most(case.with_device(peak=peak).cost.mfu, case.cost.mfu)


@relation
def faster_memory_is_never_slower(case: Case) -> None:
    bandwidth = 2 * case.job.cluster.device.memory_bandwidth
    at_most(case.with_device(memory_bandwidth=bandwidth).cost.step_seconds, case.cost.step_seconds)


@relation
def k_times_faster_hardware_is_at_most_k_times_faster(case: Case) -> None:
    device = case.job.cluster.device
    cluster = case.with_links(lambda link: {"bandwidth": 3 * link.bandwidth}).job.cluster
    faster_device = device.model_copy(
        update={
            "peak": {name: 3 * value for name, value in device.peak.items()},
            "memory_bandwidth": 3 * device.memory_bandwidth,
        }
    )
    both = Case(replace(case.job, cluster=cluster.model_copy(update={"device": faster_device})), case.layout)
    at_most(case.cost.step_seconds / 3, both.cost.step_seconds)


@relation
def time_has_its_unit(case: Case) -> None:
    """With hardware rates times k and delays divided by k, every second due to hardware is divided by k."""
    k = 4.0
    device = case.job.cluster.device
    quick = device.efficiency.model_copy(
        update={name: getattr(device.efficiency, name) / k for name in ("launch", "layer_floor", "step_floor")}
    )
    cluster = case.with_links(
        lambda link: {"bandwidth": k * link.bandwidth, "latency": link.latency / k, "startup": link.startup / k}
    ).job.cluster
    faster = device.model_copy(
        update={
            "peak": {name: k * value for name, value in device.peak.items()},
            "memory_bandwidth": k * device.memory_bandwidth,
            "efficiency": quick,
        }
    )
    scaled = Case(replace(case.job, cluster=cluster.model_copy(update={"device": faster})), case.layout)
    assert scaled.cost.step_seconds == pytest.approx(case.cost.step_seconds / k, rel=1e-6)


@relation
def more_device_memory_changes_no_second(case: Case) -> None:
    larger = case.with_device(memory=2 * case.job.cluster.device.memory)
    assert larger.cost.time == case.cost.time
    assert larger.cost.fits >= case.cost.fits


@relation
def more_headroom_never_makes_a_layout_fit(case: Case) -> None:
    tight = case.with_job(headroom=0.3)
    equal(totals(tight.cost), totals(case.cost))
    assert tight.cost.fits <= case.cost.fits


@relation
def links_hold_no_memory(case: Case) -> None:
    slower = case.with_links(lambda link: {"bandwidth": link.bandwidth / 7})
    assert slower.cost.memory == case.cost.memory


@relation
def names_price_and_power_are_not_priced_into_the_step(case: Case) -> None:
    renamed = case.with_cluster(name="another", price=7.0).with_device(power=123.0).with_model(name="other")
    same(renamed.cost, case.cost)


@relation
def idle_devices_cost_no_time(case: Case) -> None:
    """Racks and pipelines are excluded: there, groups are priced as if the layout filled the cluster."""
    assume(case.job.cluster.scale_up_devices <= case.job.cluster.devices_per_host and case.layout.pp == 1)
    same(case.with_cluster(hosts=case.job.cluster.hosts * 3).cost, case.cost)


# --- the workload -------------------------------------------------------------------------------------------------


def doubled_batch(case: Case) -> Case:
    return case.with_training(global_batch_size=2 * case.job.training.global_batch_size)


@relation
def a_larger_batch_takes_longer_but_less_than_in_proportion(case: Case) -> None:
    one, two = case.cost.step_seconds, doubled_batch(case).cost.step_seconds
    at_most(one, two)
    at_most(two, 2 * one)


@relation
def a_larger_batch_raises_mfu(case: Case) -> None:
    at_most(case.cost.mfu, doubled_batch(case).cost.mfu)


@relation
def computing_grows_in_proportion_to_the_batch(case: Case) -> None:
    names = (LineName.COMPUTE, LineName.RECOMPUTE, LineName.HEAD, LineName.TP_COMM, LineName.EP_COMM)
    equal(2 * busy(case.cost, *names), busy(doubled_batch(case).cost, *names))


@relation
def the_bubble_does_not_grow_with_the_batch(case: Case) -> None:
    assume(case.layout.interleave == 1)  # chunks wait in every round where the model's end takes longer than a layer
    equal(seconds(case.cost, LineName.BUBBLE), seconds(doubled_batch(case).cost, LineName.BUBBLE))


@relation
def the_share_of_the_bubble_shrinks_with_the_batch(case: Case) -> None:
    assume(case.layout.pp > 1)
    one, two = case.cost, doubled_batch(case).cost
    assert seconds(two, LineName.BUBBLE) / two.step_seconds < seconds(one, LineName.BUBBLE) / one.step_seconds


@relation
def states_know_nothing_of_the_batch(case: Case) -> None:
    """Chunks whose microbatches are one round reduce their gradients early; a larger batch has several rounds."""
    layout = case.layout
    one_round = is_one_round(layout.pp, layout.num_microbatches(case.job.training.global_batch_size))
    assume(layout.schedule != "interleaved" or not one_round)
    larger = case.with_training(global_batch_size=6 * case.job.training.global_batch_size)
    equal(num_bytes(larger.cost, *STATES), num_bytes(case.cost, *STATES))


@relation
def only_gpipe_stores_activations_of_the_whole_batch(case: Case) -> None:
    """If the pipeline is full, other schedules hold equally many microbatches, however many follow."""
    m = case.layout.num_microbatches(case.job.training.global_batch_size)
    assume(case.layout.pp > 1 and m >= 3 * case.layout.pp)
    one, two = (num_bytes(x.cost, LineName.ACTIVATIONS) for x in (case, doubled_batch(case)))
    if case.layout.schedule == "gpipe":
        assert np.all(two > one)
    else:
        equal(one, two)


@relation
def a_longer_sequence_takes_longer_and_more_memory(case: Case) -> None:
    longer = case.with_training(sequence_length=2 * case.job.training.sequence_length).cost
    at_most(case.cost.step_seconds, longer.step_seconds)
    at_most(num_bytes(case.cost, LineName.ACTIVATIONS), num_bytes(longer, LineName.ACTIVATIONS))


@relation
def a_longer_sequence_costs_at_least_its_tokens(case: Case) -> None:
    """Attention makes computing grow faster than the tokens, never slower."""
    longer = case.with_training(sequence_length=4 * case.job.training.sequence_length)
    model = case.job.model
    at_most(4 * model_flops_per_step(model, case.job.training), model_flops_per_step(model, longer.job.training))


@relation
def fp32_is_slower_and_larger(case: Case) -> None:
    assume("fp32" in case.job.engine.can.precisions)
    whole = case.with_training(precision="fp32").cost
    at_most(case.cost.step_seconds, whole.step_seconds)
    at_most(num_bytes(case.cost, LineName.ACTIVATIONS), num_bytes(whole, LineName.ACTIVATIONS))


@relation
def eight_bits_compute_no_slower_than_sixteen(case: Case) -> None:
    assume({"fp8", "bf16"} <= set(case.job.cluster.device.peak) and "fp8" in case.job.engine.can.precisions)
    assume(case.job.training.precision == "bf16")
    # products of few tokens wait for memory in any precision, and casts to 8 bits take memory's time on top of that
    free = case.with_device(memory_bandwidth=1e3 * case.job.cluster.device.memory_bandwidth)
    free = free.with_job(calibration=UNCALIBRATED)
    at_most(busy(free.with_training(precision="fp8").cost, LineName.COMPUTE), busy(free.cost, LineName.COMPUTE))


# --- the model ----------------------------------------------------------------------------------------------------


@relation
def more_layers_take_more_of_everything(case: Case) -> None:
    more = case.job.model.num_layers + case.layout.num_chunks
    deeper = case.with_model(num_layers=more).with_layout(
        layers_per_stage=tuple(layers + 1 for layers in case.layout.layers_per_stage)
    )
    at_most(case.cost.step_seconds, deeper.cost.step_seconds)
    at_most(totals(case.cost), totals(deeper.cost))
    assert num_params(case.job.model) < num_params(deeper.job.model)


@relation
def a_wider_ffn_takes_more_of_everything(case: Case) -> None:
    assume(case.job.model.moe is None)
    wider = case.with_model(ffn_hidden_size=2 * case.job.model.ffn_hidden_size)
    at_most(case.cost.step_seconds, wider.cost.step_seconds)
    at_most(totals(case.cost), totals(wider.cost))


@relation
def a_larger_vocabulary_is_never_cheaper(case: Case) -> None:
    larger = case.with_model(vocab_size=2 * case.job.model.vocab_size)
    at_most(case.cost.step_seconds, larger.cost.step_seconds)
    at_most(totals(case.cost), totals(larger.cost))


@relation
def more_experts_cost_memory_and_no_flops(case: Case) -> None:
    moe = case.job.model.moe
    assume(moe is not None)
    more = case.with_model(moe=moe.model_copy(update={"num_experts": 2 * moe.num_experts}))
    at_most(num_bytes(case.cost, *STATES), num_bytes(more.cost, *STATES))
    assert num_params(case.job.model) < num_params(more.job.model)
    flops, again = (model_flops_per_step(x.job.model, x.job.training) for x in (case, more))
    assert again == pytest.approx(flops, rel=0.02)  # the router's own products


@relation
def more_experts_for_each_token_cost_time(case: Case) -> None:
    moe = case.job.model.moe
    assume(moe is not None and 2 * moe.experts_per_token <= moe.num_experts)
    more = case.with_model(moe=moe.model_copy(update={"experts_per_token": 2 * moe.experts_per_token}))
    at_most(case.cost.step_seconds, more.cost.step_seconds)


# --- the layout ---------------------------------------------------------------------------------------------------


@relation
def zero_stages_never_raise_states(case: Case) -> None:
    stages = [z for z in case.job.engine.can.zero_stages if not broken_rules(case.job, replace(case.layout, zero=z))]
    held = [num_bytes(case.with_layout(zero=z).cost, *STATES) for z in stages]
    for more, less in pairwise(held):
        at_most(less, more)


@relation
def zero_3_sends_no_less_than_zero_1(case: Case) -> None:
    assume({1, 3} <= set(case.job.engine.can.zero_stages) and case.layout.pp == 1)
    one, three = case.with_layout(zero=1).cost, case.with_layout(zero=3).cost
    at_most(busy(one, LineName.DP_COMM), busy(three, LineName.DP_COMM))


@relation
def recompute_never_raises_activations_nor_lowers_time(case: Case) -> None:
    policies = [p for p in ("none", "selective", "full") if p in case.job.engine.can.recompute]
    chunks = case.layout.num_chunks
    costs = [case.with_layout(recompute=(policy,) * chunks).cost for policy in policies]
    for less, more in pairwise(costs):
        at_most(num_bytes(more, LineName.ACTIVATIONS), num_bytes(less, LineName.ACTIVATIONS))
        at_most(less.step_seconds, more.step_seconds)
        equal(busy(less, LineName.COMPUTE), busy(more, LineName.COMPUTE))


@relation
def full_recompute_repeats_at_most_one_forward_pass(case: Case) -> None:
    full = case.with_layout(recompute=("full",) * case.layout.num_chunks).cost
    at_most(busy(full, LineName.RECOMPUTE), busy(full, LineName.COMPUTE) / 2)


@relation
def larger_microbatches_store_more(case: Case) -> None:
    assume(case.job.training.global_batch_size % (case.layout.dp * case.layout.mbs * 2) == 0)
    assume(case.layout.pp == 1)
    larger = case.with_layout(mbs=2 * case.layout.mbs).cost
    at_most(num_bytes(case.cost, LineName.ACTIVATIONS), num_bytes(larger, LineName.ACTIVATIONS))


@relation
def larger_microbatches_compute_no_slower_for_each_token(case: Case) -> None:
    assume(case.job.training.global_batch_size % (case.layout.dp * case.layout.mbs * 2) == 0)
    names = (LineName.COMPUTE, LineName.HEAD)
    larger = case.with_layout(mbs=2 * case.layout.mbs).cost
    at_most(busy(larger, *names), busy(case.cost, *names))


@relation
def gpipe_takes_the_time_of_1f1b_and_no_less_memory(case: Case) -> None:
    assume(case.layout.interleave == 1)
    gpipe, one = case.with_layout(schedule="gpipe").cost, case.with_layout(schedule="1f1b").cost
    equal(gpipe.step_seconds, one.step_seconds)
    at_most(totals(one), totals(gpipe))


@relation
def interleaving_shrinks_the_bubble_and_stores_more(case: Case) -> None:
    layout, layers = case.layout, case.job.model.num_layers
    assume(layout.interleave == 1 and layers % (2 * layout.pp) == 0)
    pieces = case.with_layout(
        interleave=2,
        schedule="interleaved",
        recompute=layout.recompute * 2,
        layers_per_stage=even_split(layers, layout.pp, 2),
    )
    whole = case.with_layout(schedule="1f1b")
    assume(not broken_rules(pieces.job, pieces.layout) and not broken_rules(whole.job, whole.layout))
    assert seconds(pieces.cost, LineName.BUBBLE) < seconds(whole.cost, LineName.BUBBLE)
    at_most(num_bytes(whole.cost, LineName.ACTIVATIONS)[0], num_bytes(pieces.cost, LineName.ACTIVATIONS)[0])


@relation
def sequence_parallelism_stores_no_more(case: Case) -> None:
    assume(case.layout.sp == 1 and 0 in case.job.engine.can.sp)
    at_most(num_bytes(case.cost, LineName.ACTIVATIONS), num_bytes(case.with_layout(sp=0).cost, LineName.ACTIVATIONS))


@relation
def an_axis_of_one_is_silent(case: Case) -> None:
    layout, cost = case.layout, case.cost
    silent = {LineName.TP_COMM: layout.tp, LineName.CP_COMM: layout.cp, LineName.PP_COMM: layout.pp}
    replicas = layout.dp * layout.cp * (1 if case.job.model.moe is None else layout.tp)  # of experts, over tp too
    silent |= {LineName.BUBBLE: layout.pp, LineName.DP_COMM: replicas}
    if case.job.model.moe is None:
        silent[LineName.EP_COMM] = 1
    for name, degree in silent.items():
        assert degree > 1 or busy(cost, name) == 0, name


@relation
def replicas_of_the_sharded_group_raise_states(case: Case) -> None:
    assume(case.layout.dp % 2 == 0 and case.layout.zero > 0 and case.layout.hsdp == 1)
    at_most(num_bytes(case.cost, *STATES), num_bytes(case.with_layout(hsdp=2).cost, *STATES))


@relation
def more_replicas_of_the_same_work_cost_no_computing(case: Case) -> None:
    """Weak scaling: twice the replicas and twice the batch do the same work on each device."""
    scaled = case.with_cluster(hosts=2 * case.job.cluster.hosts).with_layout(dp=2 * case.layout.dp)
    scaled = doubled_batch(scaled)
    names = (LineName.COMPUTE, LineName.RECOMPUTE, LineName.HEAD)
    equal(busy(scaled.cost, *names), busy(case.cost, *names))
    tensors = [name for name in LineName if name != LineName.RUNTIME]  # a first replica needs a communicator
    at_most(num_bytes(scaled.cost, *tensors), num_bytes(case.cost, *tensors))


@relation
def tensor_parallelism_cuts_states(case: Case) -> None:
    more = replace(case.layout, tp=2 * case.layout.tp, sp=1)
    bigger = case.with_cluster(hosts=2 * case.job.cluster.hosts)
    assume(not broken_rules(bigger.job, more) and case.layout.ep == 1)
    at_most(num_bytes(Case(bigger.job, more).cost, *STATES), num_bytes(case.cost, *STATES))


@relation
def context_parallelism_cuts_activations(case: Case) -> None:
    assume("cp" in case.job.engine.can.axes)
    more = replace(case.layout, cp=2 * case.layout.cp)
    bigger = case.with_cluster(hosts=2 * case.job.cluster.hosts)
    assume(not broken_rules(bigger.job, more) and not unpriced(bigger.job, more))
    at_most(num_bytes(Case(bigger.job, more).cost, LineName.ACTIVATIONS), num_bytes(case.cost, LineName.ACTIVATIONS))


@relation
def expert_parallelism_never_raises_states(case: Case) -> None:
    assume(case.job.model.moe is not None)
    more = replace(case.layout, ep=2 * case.layout.ep)
    assume(not broken_rules(case.job, more) and case.layout.zero == 0)
    at_most(num_bytes(case.with_layout(ep=2 * case.layout.ep).cost, *STATES), num_bytes(case.cost, *STATES))


# --- the ledger ---------------------------------------------------------------------------------------------------


@relation
def totals_are_sums_and_nothing_is_negative(case: Case) -> None:
    cost = case.cost
    equal(cost.step_seconds, sum(line.busy_seconds - line.hidden_seconds for line in cost.time))
    equal(totals(cost), [sum(line.num_bytes for line in stage.lines) for stage in cost.memory])
    for line in cost.time:
        assert 0 <= line.hidden_seconds <= line.busy_seconds * (1 + SAME), line
    assert all(line.num_bytes >= 0 for stage in cost.memory for line in stage.lines)


@relation
def every_line_says_where_it_comes_from(case: Case) -> None:
    lines = [*case.cost.time, *(line for stage in case.cost.memory for line in stage.lines)]
    assert all(line.formula and line.source for line in lines)


@relation
def no_step_beats_the_peak_of_its_devices(case: Case) -> None:
    cost = case.cost
    assert 0 < cost.mfu <= cost.hfu <= 1


@relation
def rates_are_those_of_the_step(case: Case) -> None:
    job, cost = case.job, case.cost
    tokens = job.training.global_batch_size * job.training.sequence_length
    equal(cost.tokens_per_second_per_device, tokens / cost.step_seconds / case.layout.world_size)
    peak = job.cluster.device.peak[job.training.precision] * case.layout.world_size
    equal(cost.mfu, model_flops_per_step(job.model, job.training) / peak / cost.step_seconds)


@relation
def pricing_is_a_function(case: Case) -> None:
    same(case.cost, case.cost)


@pytest.mark.parametrize("check", RELATIONS, ids=lambda check: check.__name__)
@settings(max_examples=4, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_relation(check, case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("check", RELATIONS, ids=lambda check: check.__name__)
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_relation_on_many_cases(check, case):
    check(case)


def test_there_are_at_least_forty():
    assert len({check.__name__ for check in RELATIONS}) == len(RELATIONS) >= 40
