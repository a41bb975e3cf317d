"""Host offload compared with publications of ZeRO-Offload and DeepSpeed, and properties that any offload must have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.chance import spread_of
from planner.cost.estimate import estimate
from planner.cost.ledger import LineName
from planner.cost.limits import unpriced
from planner.cost.offload import host_update_seconds
from planner.cost.parameters import num_params
from planner.cost.prices import stage_fits
from planner.cost.stage import stages_of
from planner.layout_text import parse_layout
from planner.search.space.rules import broken_rules
from planner.specs.calibration import UNCALIBRATED

# Ren et al., ZeRO-Offload (USENIX ATC 2021), table 2: layers and hidden size by billions of parameters
SIZES = {1.4: (40, 1536), 4: (64, 2304), 13: (65, 4096)}
# the same, table 4: seconds in which CPU-Adam updates so many billions of parameters on two Xeon 8168 (256 GB/s)
CPU_ADAM = {1: 0.22, 2: 0.51, 4: 1.03, 8: 2.41, 10: 2.57}
ONE_V100 = {"gpus": 1, "sequence": 1024, "precision": "fp16", "engine": "deepspeed"}
ONE_HOST = ("cluster.host.memory_bandwidth=256 GB/s", "cluster.devices_per_host=1")


def gpt(layers, hidden):
    return (
        f"model.num_layers={layers}",
        f"model.hidden_size={hidden}",
        "model.num_heads=16",
        f"model.ffn_hidden_size={4 * hidden}",
    )


def layout_of(job, text):
    return parse_layout(text, num_layers=job.model.num_layers, num_devices=job.cluster.num_devices)


def lines_of(found):
    return {line.name: float(line.num_bytes) for line in found.lines}


def seconds_of(priced):
    return {line.name: line for line in priced.time}


@pytest.mark.parametrize(("billions", "seconds"), CPU_ADAM.items())
def test_the_host_updates_as_fast_as_cpu_adam(make_job, billions, seconds):
    job = make_job(
        "gpt2-xl", "dgx1-v100", gpus=1, sequence=1024, precision="fp16", engine="deepspeed", settings=ONE_HOST
    )
    update = host_update_seconds(job, billions * 1e9) / job.engine.offload.host_update_factor  # CPU-Adam alone
    assert update == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("billions", "offload", "fits"), [(13, "optimizer", True), (1.4, "none", True), (4, "none", False)]
)
def test_one_v100_trains_13_billion_parameters_with_offload_and_1_4_without(make_job, billions, offload, fits):
    sizes = (*gpt(*SIZES[billions]), "device.memory=32510 MiB", "cluster.host.memory=1.5 TB")
    job = make_job("gpt2-xl", "dgx1-v100", settings=sizes, **ONE_V100)
    layout = layout_of(job, f"zero=2,recompute=full,offload={offload}")
    assert (estimate(job, layout).memory[0].total_bytes <= job.whole_memory_bytes) == fits


@pytest.mark.parametrize("dp", [1, 4, 8])
def test_states_are_those_of_deepspeeds_own_estimator(make_job, dp):
    # runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs with cpu_offload: 2 bytes a parameter on
    # the device, and 16 of all parameters on the hosts
    job = make_job("gpt2-xl", sequence=1024, gpus=8, engine="deepspeed")
    stage = estimate(job, layout_of(job, f"dp={dp},zero=2,offload=optimizer")).memory[0]
    alone = estimate(job, layout_of(job, f"dp={dp},zero=2")).memory[0]
    num_params = lines_of(alone)[LineName.PARAMS] / 2
    assert lines_of(stage)[LineName.PARAMS] == 2 * num_params
    assert lines_of(stage)[LineName.GRADS] == lines_of(stage)[LineName.OPTIMIZER_STATE] == 0
    assert stage.host.total_bytes * dp == pytest.approx(16 * num_params)


@pytest.mark.parametrize("dp", [1, 4])
def test_weights_on_the_host_are_those_of_deepspeeds_own_estimator(make_job, dp):
    """estimate_zero3_model_states_mem_needs with cpu_offload_params: 18 bytes per parameter there, and none here."""
    job = make_job("gpt2-xl", "dgx-h100", gpus=dp, batch=dp, engine="deepspeed", sequence=1024)
    priced = estimate(job, layout_of(job, f"dp={dp},zero=3,offload=states+params"))
    (stage,) = priced.memory
    shard = num_params(job.model) / dp
    sums = 2 * shard  # of gradients, counted in runs of tests/executed; the estimator has a factor of 1.5 for buffers
    on_host = {LineName.OPTIMIZER_STATE: 16 * shard + sums, LineName.PARAMS: 2 * shard}
    assert lines_of(stage.host) == pytest.approx(on_host, rel=1e-3)
    assert lines_of(stage)[LineName.PARAMS] == 0


def test_weights_on_the_host_come_up_for_both_passes(make_job):
    """Two copies of the shard of weights in each microbatch, where offloaded states alone need one in a step."""
    job = make_job("gpt2-xl", "dgx-h100", gpus=4, batch=8, engine="deepspeed", sequence=1024)
    busy = {
        offload: seconds_of(estimate(job, layout_of(job, f"dp=4,zero=3,mbs=1,offload={offload}")))[LineName.HOST_COMM]
        for offload in ("optimizer", "params+states")
    }
    host, shard = job.cluster.host, 2 * num_params(job.model) / 4
    each = shard / (host.bandwidth * host.efficiency)
    more = busy["params+states"].busy_seconds - busy["optimizer"].busy_seconds
    assert more == pytest.approx((2 * 2 - 1) * each, rel=1e-3)  # less the copy after the update


def test_copies_and_update_by_hand(make_job):
    job = make_job("gpt2-xl", sequence=1024, gpus=8, batch=64, engine="deepspeed")
    job = replace(job, calibration=UNCALIBRATED)
    layout = layout_of(job, "dp=8,zero=1,recompute=full,offload=both")
    plain = estimate(job, replace(layout, offload="none"))
    own, lines = estimate(job, layout), seconds_of(estimate(job, layout))
    params = lines_of(own.memory[0])[LineName.PARAMS] / 2
    inputs = 48 * 2 * 1024 * 1600  # bytes of 48 layers' inputs of a sequence
    rate = 15.75e9 * 0.8
    copies = (4 + 2) * params / 8 / rate + 8 * 2 * inputs / rate
    assert lines[LineName.HOST_COMM].exposed_seconds == pytest.approx(copies)
    by_host = 2 * 30 * params / (409.6e9 * 0.45) + 4e-6 + 60e-3  # and a launch, and what the host does once a step
    assert lines[LineName.OPTIMIZER].busy_seconds == pytest.approx(by_host)
    assert own.memory[0].host.total_bytes == pytest.approx(16 * params / 8 + inputs)
    update = float(seconds_of(plain)[LineName.OPTIMIZER].busy_seconds)
    more = copies + by_host - update
    assert own.step_seconds - plain.step_seconds == pytest.approx(more)


def test_copies_hide_behind_work_where_the_engine_overlaps(make_job):
    slow, fast = (
        make_job("llama3-8b", gpus=8, batch=64, settings=(f"cluster.host.bandwidth={rate} GB/s",)) for rate in (1, 1000)
    )
    layout = layout_of(fast, "tp=8,offload=activations")
    line = seconds_of(estimate(fast, layout))[LineName.HOST_COMM]
    assert line.hidden_seconds == pytest.approx(line.busy_seconds)
    line = seconds_of(estimate(slow, layout))[LineName.HOST_COMM]
    assert 0 < line.hidden_seconds < line.exposed_seconds


def test_shards_of_fsdp_come_up_for_every_gathering(make_job):
    job = make_job("gpt2-xl", sequence=1024, gpus=8, batch=64, engine="fsdp")
    layout = layout_of(job, "dp=8,zero=3,offload=optimizer")
    priced = estimate(job, layout)
    params = priced.memory[0].host.total_bytes / 16
    per_microbatch = 8 + 4  # fp32 weights twice up, gradients down
    assert seconds_of(priced)[LineName.HOST_COMM].busy_seconds == pytest.approx(
        8 * per_microbatch * params / (15.75e9 * 0.8)
    )
    assert lines_of(priced.memory[0])[LineName.PARAMS] == 0


@pytest.mark.parametrize(("engine", "offload"), [("fsdp", "optimizer"), ("deepspeed", "states+params")])
def test_frozen_weights_wait_on_the_host_and_come_up_for_every_gathering(make_job, engine, offload):
    """CPUOffloadPolicy and offload_param move every parameter, trained or not; else the device holds a shard."""
    adapters = ("training.lora_rank=8", "training.lora_targets=[query, value]")
    job = make_job("llama3-8b", "dgx-h100", gpus=8, batch=16, engine=engine, settings=adapters)
    whole = layout_of(job, "dp=8,zero=3,mbs=1,recompute=full")
    moved = replace(whole, offload=offload)
    plain, priced = (estimate(job, layout) for layout in (whole, moved))
    shard = 2 * num_params(job.model) / 8  # 16 bits
    gone = lines_of(plain.memory[0])[LineName.PARAMS] - lines_of(priced.memory[0])[LineName.PARAMS]
    assert gone == pytest.approx(shard, rel=2e-3)
    assert lines_of(priced.memory[0].host)[LineName.PARAMS] == pytest.approx(shard, rel=2e-3)
    trained = 2 * 32 * 8 * (4096 + 4096 + 4096 + 1024) / 8  # bytes of a copy of the adapters' shard: nearly nothing
    host = job.cluster.host
    copies = 2 * 2 * shard / (host.bandwidth * host.efficiency)  # two microbatches of two passes
    found = seconds_of(priced)[LineName.HOST_COMM].busy_seconds
    assert copies <= found <= copies + 20 * trained / (host.bandwidth * host.efficiency)


LAYOUTS = st.builds(
    "tp={},pp={},dp={},zero=1,mbs={},recompute={}".format,
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from(["none", "selective"]),
)


@settings(max_examples=40)
@given(text=LAYOUTS, offload=st.sampled_from(["optimizer", "activations", "both"]))
def test_offloading_moves_bytes_and_takes_time(make_job, text, offload):
    job = make_job("mixtral-8x7b", gpus=16, batch=16)
    layout = layout_of(job, text)
    plain, moved = estimate(job, layout), estimate(job, replace(layout, offload=offload))
    assert moved.step_seconds >= plain.step_seconds
    for before, after in zip(plain.memory, moved.memory, strict=True):
        assert before.host is None
        assert after.total_bytes <= before.total_bytes
        gone = lines_of(before).items()
        left = lines_of(after)
        for name, num_bytes in gone:
            on_host = lines_of(after.host).get(name, 0.0)
            assert left[name] + on_host >= num_bytes * (1 - 1e-12) or name == LineName.RUNTIME


def test_the_hosts_memory_is_a_limit(make_job):
    job = make_job("llama3-8b", gpus=8, batch=8, settings=("cluster.host.memory=100 GB",))
    layout = layout_of(job, "dp=8,zero=1,offload=optimizer")
    assert not estimate(job, layout).fits  # 8 devices of 16 GB
    roomy = make_job("llama3-8b", gpus=8, batch=8)
    assert estimate(roomy, layout).fits


def test_the_hosts_memory_has_a_chance_like_the_devices(make_job):
    """A host as full as a device has the device's chance, and the chance at the two limits is theirs."""
    layout = layout_of(make_job("llama3-8b", gpus=8, batch=8), "dp=8,zero=1,offload=optimizer")
    whole = estimate(make_job("llama3-8b", gpus=8, batch=8), layout).memory[0]
    need, seen = whole.host.total_bytes, []
    for free in (0.5, 0.7, 0.9, 0.95, 1.05, 1.3, 2.0):
        size = 8 * need * free / 0.9  # the share that training can use
        job = make_job("llama3-8b", gpus=8, batch=8, settings=(f"cluster.host.memory={size!r} B",))
        (stage,) = estimate(job, layout).memory
        spread = spread_of(job, layout)
        assert stage.host.chance == pytest.approx(float(spread.chance(free)))
        assert stage.chance_of_fitting == min(stage.host.chance, stage.device_chance)
        assert stage.host.limit_bytes == pytest.approx(free * need / float(spread.quantile(0.95)))
        assert bool(stage_fits(job, layout, stages_of(job, layout))) == stage.fits
        seen.append(stage.verdict)
        plain = replace(job, headroom=0.0)
        assert estimate(plain, layout).fits == (free >= 1)
    assert seen == ["does not fit"] * 2 + ["may not fit"] * 3 + ["fits"] * 2


def test_a_cluster_without_hosts_says_so(make_job):
    job = make_job("llama3-8b", "hgx-mi300x", gpus=8, batch=8)
    layout = layout_of(job, "dp=8,zero=1,offload=optimizer")
    assert unpriced(job, layout) == ("offload: hgx-mi300x does not say what memory its hosts have",)
    assert any("does not say what memory its hosts have" in why for why in broken_rules(job, layout))


@pytest.mark.parametrize(
    ("engine", "text", "why"),
    [
        ("megatron-2021", "dp=8,offload=optimizer", "cannot keep"),
        ("torchtitan", "dp=8,zero=3,offload=activations", "cannot keep"),
        ("megatron", "dp=8,zero=0,offload=optimizer", "ZeRO-0 has none"),
        ("megatron", "pp=2,dp=4,zero=1,offload=activations", "no activations under a pipeline"),
        ("megatron", "dp=8,zero=1,recompute=full,offload=activations", "no activations with recompute=full"),
        ("deepspeed", "dp=8,zero=1,recompute=none,offload=activations", "no activations with recompute=none"),
        ("deepspeed", "pp=2,dp=4,zero=1,recompute=full,offload=both", "under a pipeline"),
    ],
)
def test_what_an_engine_cannot_offload_is_refused_with_the_reason(make_job, engine, text, why):
    job = make_job("gpt2-xl", sequence=1024, gpus=8, batch=8, engine=engine)
    assert any(why in reason for reason in broken_rules(job, layout_of(job, text)))


@pytest.mark.parametrize(
    ("engine", "text", "runs"),
    [
        ("deepspeed", "dp=8,zero=1,offload=optimizer", True),
        ("deepspeed", "pp=2,dp=4,zero=1,offload=optimizer", False),
        ("megatron", "pp=2,dp=4,zero=1,offload=optimizer", True),
        ("megatron", "dp=8,zero=0,offload=optimizer", False),
        ("megatron", "dp=8,zero=1,offload=activations", True),
        ("megatron", "pp=2,dp=4,zero=1,offload=activations", False),
    ],
)
def test_what_offloads_under_a_pipeline(make_job, engine, text, runs):
    job = make_job("gpt2-xl", sequence=1024, gpus=8, batch=64, engine=engine)
    assert (broken_rules(job, layout_of(job, text)) == ()) is runs


def test_replicas_of_what_is_not_sharded_are_refused(make_job):
    job = make_job("gpt2-xl", sequence=1024, gpus=8, batch=64, engine="fsdp")
    assert any("zero is 0" in why for why in broken_rules(job, layout_of(job, "dp=8,zero=0,hsdp=2")))
    assert broken_rules(job, layout_of(job, "dp=8,zero=3,hsdp=2")) == ()
