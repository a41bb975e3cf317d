"""The list of transfers, compared with counts in papers, with counts by hand, and with the time ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.adapters import trained_params
from planner.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    ring_exchange_seconds,
)
from planner.cost.compute import memory_bound_seconds
from planner.cost.estimate import estimate
from planner.cost.groups import group
from planner.cost.ledger import LineName
from planner.cost.parameters import num_params
from planner.cost.stage import Stage, pool_indices, stages_of
from planner.cost.traffic import priced
from planner.cost.transfers import context_transfers, transfers
from planner.cost.transients import layer_backward_bytes
from planner.layout_text import parse_layout
from planner.specs.by_name import engine_names, priced_engine_names
from planner.specs.calibration import UNCALIBRATED
from planner.specs.job import each_pool
from planner.specs.load import load_job

LINES = {
    name: LineName(f"{name}_comm") for name in ("tp", "cp", "ep", "pp", "dp")
} | {"tied": LineName.TIED_EMBEDDING}  # fmt: skip
SENT = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
"""Bytes that a rank sends, divided by the bytes that it holds and by (n - 1) / n."""


@cache
def job_of(model="llama3-8b", engine="megatron", cluster="dgx-h100", **options):
    sizes = {"sequence_length": 1024, "global_batch_size": 64} | ({} if "mixed" in cluster else {"gpus": 64})
    job = load_job(model=model, engine=engine, cluster=cluster, **sizes | options)
    return each_pool(job, lambda pool: replace(pool, calibration=UNCALIBRATED))  # links as fast as their document says


def layout_of(job, text):
    pools = {pool.cluster.name: pool.num_devices for pool in job.pools}
    return parse_layout(text, num_layers=job.model.num_layers, num_devices=pools if len(pools) > 1 else 64)


def listed(job, layout, stage=0):
    """The actual transfers of one stage, with their number in a step."""
    m = layout.num_microbatches(job.training.global_batch_size)
    own = job.pools[pool_indices(job, layout)[stage]]
    for each in transfers(own, layout, stages_of(job, layout)):
        times = each.times_per_step(m, m if layout.schedule == "pipedream" else 1)
        if times_here := float(np.broadcast_to(times, layout.pp)[stage]):
            yield each, times_here


def counted(job, layout, stage=0):
    """Number of runs of each kind on a stage: `line kind size x stride`, `across` between pools."""
    found = Counter()
    for each, times in listed(job, layout, stage):
        where = f"{int(each.where.size)}x{int(each.where.stride)}" + " across" * each.where.across
        found[f"{next(k for k, v in LINES.items() if v == each.line)} {each.kind} {where}"] += times
    return dict(found)


CASES = {
    # 2 microbatches, 32 layers of 4 all-reduces (Megatron-LM, 2019, figure 4), 1 at each end
    "all-reduces": (
        {}, "tp=4,sp=0,mbs=2", {"tp all-reduce 4x1": 2 * (32 * 4 + 2), "dp all-reduce 16x4": 1},
    ),
    # a pair for each of them (Korthikanti et al., section 4.2.2), half as many again with full recompute; the backward
    # pass gathers the inputs of both blocks again
    "sequence parallel, full recompute": (
        {}, "tp=4,mbs=2,zero=1,recompute=full",
        {"tp all-gather 4x1": 2 * (32 * 8 + 2), "tp reduce-scatter 4x1": 2 * (32 * 6 + 2),
         "dp reduce-scatter 16x4": 1, "dp all-gather 16x4": 1},
    ),
    # PaLM (2022), section 2: attention and feed-forward block share their collectives
    "parallel attention": (
        {"model": "falcon-7b"}, "tp=4,sp=0,mbs=4",  # its one key-value head is gathered
        {"tp all-reduce 4x1": 32 * 2 + 2, "dp all-reduce 16x4": 1,
         "tp all-gather 4x1": 32, "tp reduce-scatter 4x1": 32},
    ),
    # 8 microbatches, c - 1 hops, gradients too on the way back; ZeRO-2 reduces after each of them, layer by layer
    "ring, ZeRO-2 in two replicas": (
        {}, "tp=2,cp=4,sp=0,zero=2,hsdp=2",
        {"tp all-reduce 2x1": 8 * (32 * 4 + 2), "cp ring exchange 4x2": 8 * 32 * 3 * 3,
         "dp reduce-scatter 16x2": 8 * 32, "dp all-reduce 2x32": 8 * 32, "dp all-gather 16x2": 1},
    ),
    # the gathering is repeated, the sum of gradients is not
    "gathered keys, full recompute": (
        {"engine": "torch"}, "cp=2,mbs=2,recompute=full",
        {"cp all-gather 2x1": 32 * 2, "cp reduce-scatter 2x1": 32, "dp all-reduce 64x1": 1},
    ),
    # queries, keys, values and outputs each way; ZeRO-3 gathers each of 32 layers for both passes of 4 microbatches
    "Ulysses, ZeRO-3": (
        {"engine": "deepspeed"}, "cp=4,zero=3",
        {"cp all-to-all 4x1": 4 * 32 * 4 * 2, "dp reduce-scatter 64x1": 4 * 32, "dp all-gather 64x1": 2 * 4 * 32},
    ),
    # GShard (2020): there and back, in two passes and once more; 8 layers on each of 4 stages
    "experts": (
        {"model": "mixtral-8x7b"}, "tp=2,pp=4,ep=4,etp=2,zero=1,recompute=full",
        {"tp all-gather 2x1": 8 * (8 * 8 + 1), "tp reduce-scatter 2x1": 8 * (8 * 6 + 1),
         "ep all-to-all 4x2": 8 * 8 * 6, "ep all-gather 2x1": 8 * 8 * 3, "ep reduce-scatter 2x1": 8 * 8 * 3,
         "pp send 4x16": 8 * 2, "dp reduce-scatter 8x2": 1, "dp all-gather 8x2": 1,
         "dp reduce-scatter 2x8": 1, "dp all-gather 2x8": 1},
    ),
    # an activation and a gradient for each of 3 chunks, gathered on arrival; both ends hold the embedding
    "interleaved, tied": (
        {"model": "gpt2"}, "tp=2,pp=2,sp=0,interleave=3",
        {"tp all-reduce 2x1": 4 * (6 * 4 + 1), "pp send 2x32": 4 * 3 * 2, "pp all-gather 2x1": 4 * 3 * 2,
         "dp all-reduce 16x2": 1, "tied all-reduce 2x32": 1},
    ),
    # PipeDream updates after each of 4 microbatches; the tied copies are on the first and on the fourth stage
    "pipedream": (
        {"model": "gpt2"}, "pp=4,schedule=pipedream",
        {"pp send 4x16": 4 * 2, "dp all-reduce 16x1": 4, "tied all-reduce 2x48": 4},
    ),
    # of the neighbours of the first stage one is in its pool, and one, the last stage, is not
    "two pools": (
        {"model": "gpt2", "cluster": "mixed-a100-h100"},
        "tp=2,pp=4,dp=2,interleave=3,mbs=8,zero=1,pools=h100/h100/a100/a100",
        {"tp all-gather 2x1": 4 * (3 * 6 + 1), "tp reduce-scatter 2x1": 4 * (3 * 4 + 1), "pp send 4x4": 4 * 3,
         "pp send 4x4 across": 4 * 3, "dp reduce-scatter 2x2": 1, "dp all-gather 2x2": 1,
         "tied all-reduce 2x12 across": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_transfers_of_the_first_stage_are_those_counted_by_hand(case):
    options, text, expected = CASES[case]
    job = job_of(**options)
    assert counted(job, layout_of(job, text)) == expected


def test_a_middle_stage_has_no_ends():
    job = job_of("gpt2")
    found = counted(job, layout_of(job, "tp=2,pp=4,sp=0,mbs=8"), stage=1)
    assert found == {"tp all-reduce 2x1": 3 * 4, "pp send 4x16": 2, "pp all-gather 2x1": 2, "dp all-reduce 8x2": 1}


def test_tokens_go_to_their_experts_in_8_bits_and_come_back_in_16():
    """DeepSeek-V3 (2024), section 3.3.2: 128 8-bit numbers share a 32-bit scale; a token has 8 experts of 7168 numbers.

    58 layers with experts and one MTP layer, each in two passes.
    """
    job = job_of("deepseek-v3", "hai-llm", precision="fp8")
    found = [(each.num_bytes, n) for each, n in listed(job, layout_of(job, "ep=8")) if each.line == LINES["ep"]]
    numbers = 1024 * 8 * 7168 * job.model.moe.imbalance
    assert found == [(pytest.approx(numbers * (1 + 4 / 128)), 59 * 2), (pytest.approx(numbers * 2), 59 * 2)]


# --- bytes ------------------------------------------------------------------------------------------------------


def sent_bytes(job, layout, name, stage=0):
    """Bytes that a rank sends in a step for a ledger line."""
    mine = ((each, times) for each, times in listed(job, layout, stage) if each.line == LINES[name])
    return sum(
        float(np.broadcast_to(each.num_bytes, layout.pp)[stage]) * times
        * (1 if each.kind == "send" else SENT[each.kind] * float((each.where.size - 1) / each.where.size))
        for each, times in mine
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "volume"),
    [
        *((f"zero={zero}", (3 if zero == 3 else 2) * 63 / 64) for zero in range(4)),
        ("zero=3,hsdp=8", 3 * 7 / 8 + 2 * 7 / 8 / 8),  # a shard is an eighth, and 8 replicas sum it
    ],
)
def test_volumes_of_the_zero_paper(text, volume):
    """ZeRO (SC 2020), section 7: 2 psi with stages 0 to 2 and 3 psi with stage 3, less a rank's own part."""
    job = job_of(engine="torch", precision="fp32")
    found = sent_bytes(job, layout_of(job, f"{text},mbs=1"), "dp")
    assert found == pytest.approx(volume * 4 * num_params(job.model), rel=1e-3)


@pytest.mark.parametrize("sp", [0, 1])
def test_volumes_of_megatron(sp):
    """Narayanan et al. (SC 2021), section 3.2: b s h between two stages and 8 b s h (t - 1) / t in a layer.

    With sequence parallelism the inputs of both blocks are gathered once more (Korthikanti et al., section 4.2.2).
    Section 4.1: a rank sends a t-th of it, here in either direction. Section 2.2.2: interleaving sends v times as much.
    """
    job = job_of("gpt2")
    activation = 2 * 4 * 1024 * 768  # 4 sequences in 16 bits
    once, thrice = (layout_of(job, f"tp=4,pp=4,dp=4,mbs=4,sp={sp},interleave={v}") for v in (1, 3))
    assert sent_bytes(job, once, "tp", stage=1) == 4 * 3 * (8 + 2 * sp) * activation * 3 / 4
    gathered = 2 * activation * 3 / 4 * (1 - sp)  # what arrives in parts
    assert sent_bytes(job, once, "pp", stage=1) == 4 * (2 * activation / 4 + gathered)
    assert sent_bytes(job, thrice, "pp", stage=1) == 3 * sent_bytes(job, once, "pp", stage=1)


# --- the ledger -------------------------------------------------------------------------------------------------

ENGINES = (*engine_names(), *priced_engine_names())
MODELS = ("llama3-8b", "gpt2", "mixtral-8x7b", "deepseek-v3", "falcon-7b")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zbv", "dualpipev", "pipedream")


@st.composite
def layouts(draw, *, pools=()):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    schedule, pp = pick(*SCHEDULES), len(pools) or pick(1, 2, 4)
    text = f"schedule={schedule},pp={pp},tp={pick(1, 2)},cp={pick(1, 2)},dp=4,zero={pick(0, 1, 2, 3)},sp={pick(0, 1)}"
    text += f",mbs={pick(1, 2)},ep={pick(1, 2)},etp={pick(1, 2)},recompute={pick('none', 'full')}"
    text += ",interleave=3" if schedule == "interleaved" else ""
    text += ",hsdp=2" if "zero=0" not in text and "ep=1,etp=1" in text and draw(st.booleans()) else ""
    return text + (f",pools={'/'.join(pools)}" if pools else "")


def seconds_by_hand(job, each):
    network = job.across if each.where.across else job.cluster
    if each.kind == "send":
        share = job.engine.communication.send_share
        return ring_exchange_seconds(group(network, 2, each.where.stride), each.num_bytes / share)
    where = group(network, each.where.size, each.where.stride)
    if each.kind == "all-to-all":
        return all_to_all_seconds(where, each.num_bytes, copies=each.copies, groups=each.groups)
    price = {"all-gather": all_gather_seconds, "reduce-scatter": reduce_scatter_seconds,
             "all-reduce": all_reduce_seconds, "ring exchange": ring_exchange_seconds}[each.kind]  # fmt: skip
    return price(where, each.num_bytes)


def busy_by_hand(job, layout, time):
    """Seconds of each line: those of the slowest stage for every microbatch, those of the last to end once a step."""
    m = layout.num_microbatches(job.training.global_batch_size)
    updates = m if layout.schedule == "pipedream" else 1
    stage_of = {line.name: line.stage for line in time}
    stages, found = stages_of(job, layout), Counter(dict.fromkeys(LINES.values(), 0.0))
    for stage, counts in ((stage_of[LineName.COMPUTE], (m, 0)), (stage_of[LineName.DP_COMM], (0, updates))):
        own = job.pools[pool_indices(job, layout)[stage]]
        for each in transfers(own, layout, stages):
            seconds = each.times_per_step(*counts) * seconds_by_hand(own, each)
            found[each.line] += float(np.broadcast_to(seconds, layout.pp)[stage])
    copied = own.engine.compute.reduction_bytes
    if copied and layout.zero <= 1 and layout.dp * layout.cp > 1:  # copies within the device
        held = np.broadcast_to(trained_params(own, layout, stages).total, layout.pp)[stage]
        found[LineName.DP_COMM] += updates * float(memory_bound_seconds(own, copied * held))
    return found


@settings(max_examples=100)
@given(st.data())
def test_transfers_add_up_to_the_busy_seconds_of_the_ledger(data):
    engine, model = data.draw(st.sampled_from(ENGINES)), data.draw(st.sampled_from(MODELS))
    pools = data.draw(st.sampled_from([(), ("h100", "a100"), ("a100", "a100", "h100")]))
    job = job_of(model, engine, "mixed-a100-h100" if pools else "dgx-h100")
    layout = layout_of(job, data.draw(layouts(pools=pools)))
    time = estimate(job, layout).time
    found = busy_by_hand(job, layout, time)
    for line in time:
        if line.name in found:
            assert found[line.name] == pytest.approx(float(line.busy_seconds), rel=1e-9, abs=1e-15), line.name


@settings(max_examples=30)
@given(st.data())
def test_arrays_of_layouts_have_the_transfers_of_each_of_them(data):
    job = job_of(data.draw(st.sampled_from(MODELS)), data.draw(st.sampled_from(ENGINES)))
    each = [layout_of(job, data.draw(layouts())) for _ in range(5)]
    degrees = ("tp", "pp", "dp", "cp", "ep", "etp", "zero", "hsdp", "mbs", "sp", "interleave", "segment")
    whole = SimpleNamespace(**{key: np.array([getattr(one, key) for one in each]) for key in degrees}, schedule="1f1b")
    stage = Stage(index=0, num_layers=5, num_expert_layers=3, policy=2)
    for row, layout in enumerate(each):
        one = SimpleNamespace(**{key: getattr(layout, key) for key in degrees}, schedule="1f1b")
        for found, wanted in zip(transfers(job, whole, stage), transfers(job, one, stage), strict=True):
            assert (found.line, found.kind, found.times.keys()) == (wanted.line, wanted.kind, wanted.times.keys())
            for a, b in [
                (found.where.size, wanted.where.size),
                (found.where.stride, wanted.where.stride),
                (found.num_bytes, wanted.num_bytes),
                *((found.times[when], wanted.times[when]) for when in found.times),
            ]:
                assert np.broadcast_to(a, 5)[row] == b


def test_messages_that_say_what_the_next_one_is_cost_a_send_without_bytes():
    """nanotron describes each tensor in two messages; forward it also sends the mask beside hidden states (p2p.py)."""
    job = job_of(engine="nanotron")
    layout = layout_of(job, "pp=4,dp=16,mbs=1,zero=1")  # 4 microbatches
    assert counted(job, layout, stage=1)["pp send 4x16"] == 4 * (6 + 3)
    sends = [each for each, _ in listed(job, layout, stage=1) if each.line == LineName.PP_COMM]
    assert sorted(float(each.num_bytes) for each in sends) == [0, 1024 * 4096 * 2]
    link = job.cluster.links[-1]
    seconds = [next(s for t, s in priced(job, sends) if t.num_bytes == size) for size in {0, 1024 * 4096 * 2}]
    assert min(map(float, seconds)) == pytest.approx(link.latency + link.startup)


@pytest.mark.parametrize(("ranks", "broadcasts"), [(8, 8), (64, 64), (512, 224)])
def test_ranks_that_keep_whole_tensors_broadcast_them_one_after_another(ranks: int, broadcasts: int):
    """InternEvo, broadcast_params: 32 layers of 5 matrices (joint projection, output, SwiGLU) and 2 norms."""
    job = job_of(engine="internevo", cluster="dgx-a100", gpus=ranks, global_batch_size=ranks)
    layout = parse_layout(f"dp={ranks},zero=1,mbs=1", num_layers=32, num_devices=ranks)
    params = num_params(job.model)
    assert [(each.kind, float(np.max(each.num_bytes)), times) for each, times in listed(job, layout)] == [
        ("all-reduce", 2 * params, 1),  # 16-bit gradients, whole
        ("all-gather", pytest.approx(2 * params / broadcasts), broadcasts),
    ]
    _, seconds = list(priced(job, [each for each, _ in listed(job, layout)]))[1]
    [line] = [line for line in estimate(job, layout).time if line.name == LineName.DP_COMM]
    assert line.exposed_seconds > broadcasts * float(np.max(seconds))  # nothing computes beside them


def test_tensors_of_experts_are_broadcast_apart_from_the_others():
    """32 layers of Mixtral: joint projection, output, router and 2 norms, and 3 matrices of each of 8 experts."""
    ranks = 1024
    job = job_of(model="mixtral-8x7b", engine="internevo", cluster="dgx-a100", gpus=ranks, global_batch_size=ranks)
    for ep in (1, 4):
        layout = parse_layout(f"dp={ranks},zero=1,mbs=1,ep={ep}", num_layers=32, num_devices=ranks)
        gathers = [times for each, times in listed(job, layout) if each.kind == "all-gather"]
        assert gathers == [32 * 5, min(32 * 3 * 8 // ep, ranks // ep)]


@pytest.mark.parametrize(("cluster", "hides"), [("local-cpu", False), ("dgx-h100", True)])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_cpu_hides_no_transfers(cluster: str, hides: bool, zero: int):
    """The cores that compute also move the messages."""
    job = job_of(model="tiny-llama", engine="torch", cluster=cluster, gpus=2, global_batch_size=8, precision="fp32")
    layout = parse_layout(f"dp=2,zero={zero},mbs=2", num_layers=8, num_devices=2)
    [line] = [line for line in estimate(job, layout).time if line.name == LineName.DP_COMM]
    assert line.busy_seconds > 0
    assert (line.hidden_seconds > 0) == hides


def test_key_value_heads_on_more_ranks_than_there_are_heads_are_gathered():
    """Megatron-LM, attention.py:353: all ranks' queries, keys and values; the backward pass sums their gradients."""
    job = job_of(settings=("model.num_kv_heads=2",))
    for tp, times in ((2, 0), (8, 2 * 32)):  # 2 microbatches of 4 sequences, 32 layers
        layout = layout_of(job, f"tp={tp},dp=8,mbs=4")
        heads = [
            (each.kind, float(each.num_bytes), times) for each, times in listed(job, layout) if each.line == LINES["tp"]
        ]
        width = (32 + 2 * 2) * 128  # in place of the hidden size, 4096
        gathered = [entry for entry in heads if entry[1] == 4 * 1024 * width * 2]
        assert (
            gathered
            == [("all-gather", 4 * 1024 * width * 2, times), ("reduce-scatter", 4 * 1024 * width * 2, times)][
                : 2 * bool(times)
            ]
        )


@pytest.mark.parametrize(
    ("engine", "text", "reductions"),
    [
        ("fsdp", "dp=16,zero=3", 4),
        ("kempnerforge", "dp=16,zero=3", 1),  # training/grad.py, maybe_no_sync
        ("torchtitan", "pp=4,dp=16,zero=3", 1),  # torch, pipelining/stage.py: the last backward pass of a stage reduces
    ],
)
def test_whole_gradients_that_add_up_are_reduced_once(engine, text, reductions):
    """With 4 microbatches, FSDP gathers the weights twice for each microbatch."""
    job = job_of(engine=engine)
    layout = layout_of(job, f"{text},mbs=1")
    found, layers = counted(job, layout), 32 // layout.pp
    assert found["dp reduce-scatter 16x1"] == reductions * layers
    assert found["dp all-gather 16x1"] == 2 * 4 * layers


def test_torch_gathers_keys_and_values_in_both_passes_and_sends_fp32_gradients_round(make_job, with_engine):
    """Four ranks of 2,048 tokens: 1,024 elements of keys and of values each, gathered twice; four hops of gradients.

    As torch's _templated_ring_attention and its backward do: the last hop brings gradients to the rank that owns them.
    """
    job = with_engine(
        make_job("llama3-8b", engine="torchtitan", sequence=8192), communication={"context_exchange": "gathered-ring"}
    )
    layout = parse_layout("cp=4,dp=16", num_layers=32, num_devices=64)
    gathered, round_the_ring = context_transfers(job, layout)
    assert (gathered.kind, float(gathered.num_bytes)) == ("all-gather", 4 * 2048 * 2 * 1024 * 2)
    assert {moment: float(times) for moment, times in gathered.times.items() if times} == {"forward": 1, "backward": 1}
    assert (round_the_ring.kind, float(round_the_ring.num_bytes)) == ("ring exchange", 2048 * 2 * 1024 * 4)
    assert {moment: float(times) for moment, times in round_the_ring.times.items()} == {"backward": 4}


@pytest.mark.parametrize("width", [256, 14_336])
def test_the_layer_at_work_holds_the_gathered_keys_and_values(make_job, with_engine, width):
    """Of all ranks; of the rank's own, two gradients in fp32 and one in 16 bits; of queries 4 + 2 + 2 bytes.

    A wide feed-forward block needs more before, and its four tensors and two gradients are freed by then.
    """
    held = []
    for exchange in ("ring", "gathered-ring"):
        settings = (f"model.ffn_hidden_size={width}",)
        job = make_job("llama3-8b", engine="torchtitan", sequence=8192, settings=settings)
        job = with_engine(job, communication={"context_exchange": exchange})
        layout = parse_layout("cp=4,dp=16", num_layers=32, num_devices=64)
        held.append(float(layer_backward_bytes(job, layout, stages_of(job, layout))[0]))
    own = 2048 * 2 * 1024
    assert held[1] - held[0] == pytest.approx(max(0, (8 + 8 + 2) * own + 8 * 2048 * 4096 - 12 * 2048 * width))


def test_layers_that_mix_no_tokens_exchange_no_keys_and_values(make_job):
    """Nemotron 3 Nano (NVIDIA, 2025), table 1: 23 layers with Mamba-2, 23 with experts, 6 with attention."""
    job = make_job("nemotron3-nano-30b-a3b", gpus=8, engine="megatron")
    layout = parse_layout("cp=4,dp=2", num_layers=52, num_devices=8)
    (ring,) = context_transfers(job, layout)
    assert ring.times["forward"] == pytest.approx((23 + 6) / 52 * 3)


def test_each_kind_of_layers_exchanges_its_own_heads(make_job):
    """MiMo-V2-Flash (Xiaomi, 2025), config.json: 9 layers with 4 key-value heads, 39 with windows and 8; 192 + 128."""
    job = make_job("mimo-v2-flash", gpus=8, engine="megatron", sequence=4096)
    rings = context_transfers(job, parse_layout("cp=4,dp=2", num_layers=48, num_devices=8))
    tokens = 4096 // 4 * 2
    sizes = [(round(each.times["forward"] / 3 * 48), float(each.num_bytes)) for each in rings]
    assert sorted(sizes) == [(9, tokens * 4 * (192 + 128)), (39, tokens * 8 * (192 + 128))]


def test_layers_without_experts_exchange_no_tokens(make_job):
    """Nemotron 3 Nano (NVIDIA, 2025), table 1: 23 of 52 layers have experts, each with two exchanges in each pass."""
    job = make_job("nemotron3-nano-30b-a3b", gpus=8, engine="megatron")
    layout = parse_layout("dp=8,ep=8", num_layers=52, num_devices=8)
    exchanges = [each for each in transfers(job, layout, stages_of(job, layout)) if each.kind == "all-to-all"]
    assert sum(float(each.times["forward"][0]) for each in exchanges) == pytest.approx(2 * 23)
