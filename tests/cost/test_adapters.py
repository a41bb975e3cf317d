"""LoRA and QLoRA compared with the numbers of their papers, and properties that all adapters must have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.adapters import adapter_params, adapter_params_on_device, num_trained_params
from planner.cost.estimate import estimate
from planner.cost.flops import chunk_flops, model_flops_per_step
from planner.cost.layers import layer_seconds
from planner.cost.ledger import LineName
from planner.cost.parameters import num_params
from planner.cost.stage import stages_of
from planner.cost.transients import transient_bytes
from planner.layout_text import parse_layout
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.search.space.rules import broken_rules
from planner.specs.calibration import UNCALIBRATED

# Touvron et al., LLaMA (2023), table 2; the width of feed-forward blocks as in its code
LLAMA_65B = (
    "model.num_layers=80",
    "model.hidden_size=8192",
    "model.num_heads=64",
    "model.num_kv_heads=64",
    "model.ffn_hidden_size=22016",
)
EVERY = "[query, key, value, output, gate, up, down]"


def lora(rank, targets="[query, value]", *more):
    return (f"training.lora_rank={rank}", f"training.lora_targets={targets}", *more)


def layout_of(job, text):
    return parse_layout(text, num_layers=job.model.num_layers, num_devices=job.cluster.num_devices)


@pytest.mark.parametrize(
    ("model", "rank", "targets", "trained"),
    [
        ("llama2-7b", 8, "[query, value]", 4_194_304),  # peft, print_trainable_parameters
        ("llama2-7b", 16, EVERY, 39_976_960),  # the same
        ("llama3-8b", 16, EVERY, 41_943_040),  # the same
        ("gpt3-175b", 1, "[query, value]", 4_718_592),  # Hu et al. (2021), table 4: 4.7M
        ("gpt3-175b", 8, "[query, value]", 37_748_736),  # table 4: 37.7M
    ],
)
def test_trained_parameters_are_the_published_ones(make_job, model, rank, targets, trained):
    job = make_job(model, engine="fsdp", settings=lora(rank, targets))
    assert adapter_params(job.model, job.training) == num_trained_params(job.model, job.training) == trained


def test_a_checkpoint_of_gpt3s_adapters_has_35_mb_and_its_states_350_gb(make_job):
    # Hu et al. (2021), section 4.2: rank 4 beside queries and values; 1.2 TB of memory become 350 GB
    job = make_job("gpt3-175b", gpus=8, engine="fsdp", precision="fp16", settings=lora(4))
    assert 2 * adapter_params(job.model, job.training) == pytest.approx(35 * 2**20, rel=0.05)
    stage = estimate(job, layout_of(job, "dp=1,zero=2")).memory[0]
    states = sum(float(line.num_bytes) for line in stage.lines[:3])
    assert states == pytest.approx(350e9, rel=0.01)


def test_qlora_trains_65_billion_parameters_on_48_gb(make_job):
    # Dettmers et al. (2023), abstract and section 5: rank 64 beside every matrix, 16-bit adapters, sequences of 512
    recipe = ("training.memory_recipe=pure-bf16", "device.memory=48 GB", *LLAMA_65B)
    one = {"gpus": 1, "batch": 16, "sequence": 512, "engine": "fsdp"}
    job = make_job("llama2-7b", settings=lora(64, EVERY, *recipe, "training.frozen_weights=nf4"), **one)
    layout = layout_of(job, "dp=1,zero=2,recompute=full")
    assert num_params(job.model) == pytest.approx(65.2e9, rel=0.01)
    assert estimate(job, layout).verdict != "does not fit"
    in_16_bits = make_job("llama2-7b", settings=lora(64, EVERY, *recipe), **one)
    assert estimate(in_16_bits, layout).verdict == "does not fit"


@pytest.mark.parametrize(("ranks", "outside"), [(1, 2), (1, 4), (8, 2)])
def test_nf4_takes_4_bits_and_an_eighth(make_job, ranks, outside):
    """Dettmers et al. (2023), section 3: double quantisation leaves 0.127 bits a parameter for the constants.

    The constants are in no parameter that FSDP could shard (bitsandbytes, nn/modules.py, quant_state).
    """
    settings = lora(1, "[query]", "training.frozen_weights=nf4", f"engine.memory.quantised_ends={outside}")
    job = make_job("llama2-7b", gpus=ranks, engine="fsdp", settings=settings)
    params = float(estimate(job, layout_of(job, f"dp={ranks},zero=3")).memory[0].lines[0].num_bytes)
    ends = 2 * 32000 * 4096 + 4096
    inside = num_params(job.model) - ends
    assert params == pytest.approx(inside * (4 / 8 / ranks + 0.127 / 8) + outside * ends / ranks)
    once = make_job(
        "llama2-7b", gpus=ranks, engine="fsdp", settings=(*settings, "engine.memory.quantised_constants=0.0625")
    )
    more = float(estimate(once, layout_of(once, f"dp={ranks},zero=3")).memory[0].lines[0].num_bytes) - params
    assert more == pytest.approx(inside * (32 - 8 - 32 / 256) / 64 / 8, rel=1e-3)  # fp32 for each 64 weights


def test_frozen_products_have_no_second_backward_product(make_job):
    whole, lean = (make_job("llama2-7b", gpus=8, batch=64, engine="fsdp", settings=s) for s in ((), lora(8)))
    layout = layout_of(whole, "dp=8,zero=3")
    ratio = model_flops_per_step(lean.model, lean.training) / model_flops_per_step(whole.model, whole.training)
    assert 0.66 < ratio < 0.70  # 4 of 6, attention whole
    flops = chunk_flops(lean, layout)
    total = sum(flops[name].sum() for name in ("forward", "backward_input", "backward_weight"))
    assert total * 64 == pytest.approx(model_flops_per_step(lean.model, lean.training))
    exposed = [{x.name: x.busy_seconds for x in estimate(job, layout).time} for job in (whole, lean)]
    host = whole.cluster.device.efficiency.step_floor  # adapters' update is almost only launches
    assert exposed[1][LineName.OPTIMIZER] - host < (exposed[0][LineName.OPTIMIZER] - host) / 40
    assert exposed[1][LineName.DP_COMM] < exposed[0][LineName.DP_COMM]


def test_recomputed_share_is_the_forward_pass(make_job):
    job = make_job("llama2-7b", gpus=8, batch=64, engine="fsdp", settings=lora(8))
    priced = estimate(job, layout_of(job, "dp=8,zero=3,recompute=full"))
    layers = float(chunk_flops(job, layout_of(job, "dp=8"))["layers"].sum()) * 64
    assert priced.hfu / priced.mfu - 1 == pytest.approx(layers / model_flops_per_step(job.model, job.training))


@given(
    rank=st.integers(1, 256),
    targets=st.sets(st.sampled_from(["query", "key", "value", "output", "gate", "up", "down"]), min_size=1),
    tp=st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=40)
def test_cut_adapters_add_up_to_no_less_than_the_whole(make_job, rank, targets, tp):
    job = make_job("llama3-8b", engine="megatron-bridge", settings=lora(rank, f"[{', '.join(sorted(targets))}]"))
    each = float(adapter_params_on_device(job, layout_of(job, f"tp={tp}"), experts=False).total) * job.model.num_layers
    whole = adapter_params(job.model, job.training)
    assert whole / tp <= each <= whole
    assert tp > 1 or each == whole


@settings(max_examples=25)
@given(
    text=st.sampled_from(["dp=8,zero=2", "dp=8,zero=3", "dp=8,zero=3,recompute=full", "dp=4,zero=3,mbs=2"]),
    rank=st.sampled_from([1, 16, 64]),
)
def test_adapters_need_less_memory_than_all_weights_and_4_bits_less_than_16(make_job, text, rank):
    plain, lean, quantised = (
        make_job("llama3-8b", gpus=8, batch=32, engine="fsdp", settings=each)
        for each in ((), lora(rank), lora(rank, "[query, value]", "training.frozen_weights=nf4"))
    )
    peaks = [estimate(job, layout_of(job, text)).peak_bytes for job in (plain, lean, quantised)]
    assert peaks == sorted(peaks, reverse=True)
    steps = [estimate(job, layout_of(job, text)).step_seconds for job in (lean, quantised)]
    assert "zero=3" in text or steps[0] < steps[1]  # weights are dequantised; a gather of 4 bits slows the work less
    assert np.all(np.isfinite(steps))


def test_the_search_plans_what_full_training_cannot(make_job):
    sizes = {"gpus": 1, "batch": 16, "sequence": 2048, "cluster": "dgx-h100", "engine": "fsdp"}
    job = make_job("llama3-70b", settings=lora(16, EVERY, "training.frozen_weights=nf4"), **sizes)
    plan = search(job, Constraints())
    assert plan.fits
    assert "4 per frozen" in plan.flops_convention


@pytest.mark.parametrize(
    ("model", "engine", "more", "why"),
    [
        ("llama3-8b", "torch", (), "trains every weight"),
        ("llama3-8b", "megatron-bridge", ("training.frozen_weights=nf4",), "no frozen weights in nf4"),
        ("gpt3-175b", "fsdp", ("training.lora_targets=[gate]",), "no adapters beside gate"),
        ("deepseek-v2-lite", "fsdp", (), "no adapters beside value"),
        ("llama3-8b", "fsdp", ("training.optimizer=muon",), "optimizer muon"),
        (
            "llama3-8b",
            "fsdp",
            ("training.precision=fp8",),
            "compute in fp8; --precision bf16, or --engine megatron-b",
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused_with_the_reason(make_job, model, engine, more, why):
    job = make_job(model, "dgx-h100", gpus=8, engine=engine, settings=("training.lora_rank=8", *more))
    assert any(why in reason for reason in broken_rules(job, layout_of(job, "dp=8,zero=3")))


def test_frozen_weights_compute_in_8_bits_and_adapters_in_16(make_job):
    """Adapters do not use fp8 (Megatron-Bridge, peft/lora_layers.py); without casts, fp8 products take half as long."""
    quick = ("device.memory_bandwidth=1e9 TB/s", "device.efficiency.launch=0 us", "device.efficiency.layer_floor=0 us")
    seconds = {}
    for precision in ("bf16", "fp8"):
        for rank in (0, 4096):
            settings = (*quick, *(lora(rank) if rank else ()), "device.efficiency.matmul_half_depth=0")
            job = make_job(
                "llama3-8b", "dgx-h100", gpus=8, engine="megatron-bridge", precision=precision, sequence=8192,
                settings=settings,
            )  # fmt: skip
            job = replace(job, calibration=UNCALIBRATED)
            seconds[precision, rank] = layer_seconds(job, layout_of(job, "dp=8,zero=1,mbs=1"))
    passes = {key: (each.passes.forward - each.core.forward) for key, each in seconds.items()}
    assert passes["bf16", 0] == pytest.approx(2 * passes["fp8", 0], rel=0.01)
    adapters = [passes[precision, 4096] - passes[precision, 0] for precision in ("bf16", "fp8")]
    assert adapters[0] == pytest.approx(adapters[1], rel=0.01)


def test_frozen_weights_in_8_bits_have_no_copy_in_16(make_job):
    """Megatron-Bridge's fp8 recipes gather weights in 8 bits, and those of adapters keep no transpose."""
    recipe = lora(16, "[query, key, value, output]")
    sizes = {"gpus": 8, "sequence": 8192, "batch": 8, "engine": "megatron-bridge"}
    wide, narrow = (
        make_job("llama3-70b", "dgx-b200", precision=each, settings=recipe, **sizes) for each in (None, "fp8")
    )
    for text in ("dp=8,zero=1", "dp=8,zero=0"):
        held = [float(estimate(job, layout_of(job, text)).memory[0].lines[0].num_bytes) for job in (wide, narrow)]
        ends = 2 * 2 * 128256 * 8192
        assert held[1] - ends == pytest.approx((held[0] - ends) / 2, rel=1e-2)


@pytest.mark.parametrize(
    ("gpus", "mbs", "gib"),
    [(1, 8, 30.2), (1, 16, 46.7), (2, 8, 31.8), (2, 16, 55.8), (4, 8, 28.3), (4, 16, 52.4)],
)
def test_frozen_units_of_fsdp1_hold_inputs_until_the_backward_pass_ends(make_job, gpus, mbs, gib):
    """Published peaks of Mistral-7B, rank 16 (fms-acceleration, a100_80gb_liger.csv): more GPUs do not need less.

    Its adapters have dropout, which is not priced.
    """
    more = ("engine.memory.norm_kernel=true", "engine.memory.holds_frozen_inputs=true", "training.loss=fused-linear")
    settings = lora(16, "[query, key, value, output]", *more)
    job = make_job("mistral-7b", gpus=gpus, batch=gpus * mbs, sequence=4096, engine="fsdp", settings=settings)
    stage = estimate(job, layout_of(job, f"dp={gpus},zero={3 if gpus > 1 else 0},mbs={mbs},recompute=full")).memory[0]
    lines = {each.name: float(each.num_bytes) for each in stage.lines}
    assert (stage.total_bytes - lines[LineName.RUNTIME]) / 2**30 == pytest.approx(gib, rel=0.14)


@pytest.mark.parametrize(("mbs", "gib"), [(4, 19.2), (8, 34.5)])
def test_inputs_of_quantised_layers_are_fp32_on_one_device(make_job, mbs, gib):
    """Published peaks of Mistral-7B in nf4, rank 16 (fms-acceleration, a100_80gb.csv, baseline-peft-bnb); dropout."""
    prepared = ("engine.memory.widens_stream=true", "engine.memory.quantised_ends=4")
    settings = lora(16, "[query, key, value, output]", "training.frozen_weights=nf4", *prepared)
    job = make_job("mistral-7b", gpus=1, batch=mbs, sequence=4096, engine="fsdp", settings=settings)
    stage = estimate(job, layout_of(job, f"dp=1,zero=2,mbs={mbs},recompute=full")).memory[0]
    lines = {each.name: float(each.num_bytes) for each in stage.lines}
    assert lines[LineName.ACTIVATIONS] == 32 * mbs * 4096 * 4096 * 4
    assert (stage.total_bytes - lines[LineName.RUNTIME]) / 2**30 == pytest.approx(gib, rel=0.08)


def kept_by_layers(job, text="dp=1,zero=2"):
    lines = estimate(job, layout_of(job, text)).memory[0].lines
    return next(float(line.num_bytes) for line in lines if line.name == LineName.ACTIVATIONS)


def test_dropout_gives_each_adapter_an_input_and_a_mask_of_its_own(make_job):
    """peft, tuners/lora/layer.py: lora_A(dropout(x)); 2 bytes and a mask of 1 byte; nothing reads x itself again."""
    sizes = {"gpus": 1, "batch": 1, "sequence": 2048, "engine": "fsdp"}
    plain, dropped = (
        make_job("mistral-7b", settings=lora(16, EVERY, f"training.lora_dropout={each}"), **sizes) for each in (0, 0.1)
    )
    h, f, tokens, layers = 4096, 14336, 2048, 32
    shared = 2 * (h + h + f)  # inputs of attention, of gate and up, and of down; the core keeps that of the output
    own = 3 * (3 * h + h + 2 * h + f)
    assert kept_by_layers(dropped) - kept_by_layers(plain) == layers * tokens * (own - shared)
    queries = (
        make_job("mistral-7b", settings=lora(16, "[query]", f"training.lora_dropout={p}"), **sizes) for p in (0, 0.1)
    )
    few, dropped_few = map(kept_by_layers, queries)
    assert dropped_few - few == layers * tokens * (3 - 2) * h
    bits = lora(16, "[query]", "training.lora_dropout=0.1", "engine.memory.dropout_masks=0.125")
    of_bits = kept_by_layers(make_job("mistral-7b", settings=bits, **sizes))
    assert dropped_few - of_bits == layers * tokens * (1 - 1 / 8) * h


def test_the_activation_functions_input_has_8_bits_in_fp4_too(make_job):
    """Megatron-LM, fusions/fused_bias_swiglu.py: with activation_func_fp8_input_store it is kept as float8_e4m3fn."""

    def kept(precision, gates):
        settings = lora(8, "[query]", f"engine.memory.fp8_gates={str(gates).lower()}")
        sizes = {"gpus": 1, "batch": 1, "sequence": 2048, "engine": "megatron", "precision": precision}
        return kept_by_layers(make_job("llama2-7b", "dgx-b200", settings=settings, **sizes), "dp=1")

    found = {precision: kept(precision, False) - kept(precision, True) for precision in ("bf16", "fp8", "fp4")}
    assert found == {"bf16": 0.0, **dict.fromkeys(("fp8", "fp4"), 32 * 2048 * 2 * 11008)}


def test_products_of_quantised_weights_may_keep_their_inputs(make_job):
    """bitsandbytes 0.42, autograd/_functions.py (MatMul4Bit): ctx.tensors = (A, B); 0.43 has (None, B)."""
    sizes = {"gpus": 1, "batch": 1, "sequence": 2048, "engine": "fsdp"}
    settings = lora(16, "[query, value]", "training.frozen_weights=nf4")
    new = make_job("mistral-7b", settings=settings, **sizes)
    old = make_job("mistral-7b", settings=(*settings, "engine.memory.quantised_keep_inputs=true"), **sizes)
    h, f, tokens, layers = 4096, 14336, 2048, 32
    assert kept_by_layers(old) - kept_by_layers(new) == layers * tokens * 2 * (h + f)  # of gate and up, and of down


def test_quantised_layers_are_gathered_in_4_bits(make_job):
    settings = lora(1, "[query]", "training.frozen_weights=nf4")
    job = make_job("llama3.2-3b", gpus=8, engine="fsdp", sequence=16, settings=settings)
    layout = layout_of(job, "dp=8,zero=3,mbs=1")
    found = transient_bytes(job, layout, stages_of(job, layout), 0.0)
    # shapes of the model: hidden 3072, feed-forward 8192, 24 heads and 8 key-value heads of 128, vocabulary 128256
    layer = 3072 * (2 * 3072 + 2 * 1024 + 3 * 8192)
    ends, two_layers, one_matrix = 2 * 128256 * 3072, 2 * layer * 0.5, 2 * 3072 * 8192
    assert float(found[0]) == pytest.approx(ends + two_layers + one_matrix, rel=0.01)


def test_dropout_moves_the_input_of_each_adapter_and_a_mask(make_job):
    sizes = {"gpus": 1, "sequence": 2048, "engine": "fsdp"}
    jobs = [
        make_job("llama2-7b", settings=lora(8, "[query, down]", f"training.lora_dropout={p}"), **sizes)
        for p in (0, 0.1)
    ]
    passes = [
        layer_seconds(replace(job, calibration=UNCALIBRATED), layout_of(job, "dp=1,mbs=2")).passes for job in jobs
    ]
    # two inputs of bf16, 4096 and 11008 wide: torch's dropout reads 2 and writes 2 + 1 bytes, its derivative the same
    moved = 2 * 2048 * (4096 + 11008) * (2 + 2 + 1)
    device = jobs[0].cluster.device
    seconds = moved / (device.memory_bandwidth * device.efficiency.memory) + 2 * device.efficiency.launch
    assert float(passes[1].forward - passes[0].forward) == pytest.approx(seconds)
    assert float(passes[1].backward - passes[0].backward) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("model", "layers", "recompute", "frozen", "counted"),
    [
        ("llama3-8b", 1, "none", "nf4", 6.730e9),
        ("llama3-8b", 4, "none", "nf4", 8.145e9),
        ("llama3-8b", 16, "none", "nf4", 13.834e9),
        ("llama3-8b", 4, "full", "nf4", 8.099e9),  # the embedding, too, whose output has a gradient
        ("llama3-8b", 4, "none", "16-bit", 9.654e9),
        ("llama3-8b", 4, "full", "16-bit", 8.243e9),
        ("llama3-70b", 3, "none", "16-bit", 13.208e9),  # the head alone is more than DeepSpeed gathers ahead
    ],
)
def test_deepspeed_holds_weights_that_the_backward_pass_needs(make_job, model, layers, recompute, frozen, counted):
    """Counts of `planner verify` of transformers with PEFT and bitsandbytes 0.50 under DeepSpeed 0.19.8, on 2 ranks.

    DeepSpeed drops its reference to gathered weights, and bitsandbytes' products keep theirs, with recompute, too.
    """
    settings = (f"model.num_layers={layers}", *lora(16, "[query, value]", f"training.frozen_weights={frozen}"))
    job = make_job(model, "dgx-h100", engine="deepspeed", gpus=2, batch=4, sequence=2048, settings=settings)
    layout = parse_layout(f"dp=2,zero=3,mbs=1,recompute={recompute}", num_layers=layers, num_devices=2)
    (stage,) = estimate(job, layout).memory
    lines = {line.name: float(line.num_bytes) for line in stage.lines}
    assert stage.total_bytes - lines[LineName.RUNTIME] == pytest.approx(counted, rel=0.012)
