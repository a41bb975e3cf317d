"""Rows of a table become jobs with the values that the row states; odd rows give a reason, never an exception."""

from __future__ import annotations

import csv
import io
import random
import re
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_runs import published_runs

from planner.cost.band import band
from planner.cost.flops import model_flops_per_step
from planner.cost.parameters import num_params
from planner.errors import InputError
from planner.evidence.compare.score import score
from planner.evidence.rows.jobs import Setup, Unsupported, job_of
from planner.evidence.rows.knowledge import knowledge
from planner.evidence.rows.models import model_of
from planner.evidence.rows.runs import REQUIRED_COLUMNS, Run, read_runs, run_of
from planner.specs.by_name import engine_names, load_engine, load_model, model_names, priced_engine_names
from planner.specs.cluster_documents import cluster_names
from planner.specs.engine import EngineSpec

PUBLISHED = Path(__file__).parents[1] / "published" / "measurements.csv"
CELLS = list(csv.DictReader(io.StringIO(PUBLISHED.read_text(encoding="utf-8"), newline="")))
RUNS = published_runs()
ODD = ["", "not stated", "see recipe", "-1", "0", "1e999", "nan", "0.5", "1/2", "999999999999", "\x00", "7", "yes", "é"]


def setup_of(**cells: str) -> Setup:
    """The setup of a plain row with these cells changed."""
    plain = {
        "id": "x", "framework": "Megatron-LM", "model": "Llama-3-8B", "arch": "dense", "gpu": "H100", "gpus": "64",
        "gpus_per_node": "8", "seq": "8192", "gbs": "128", "tp": "2", "pp": "2", "mbs": "1", "flash_attention": "1",
        "recompute_policy": "none", "precision": "bf16", "zero_stage": "1", "sp": "1", "interleave": "1",
    }  # fmt: skip
    found = job_of(run_of(plain | cells))
    assert isinstance(found, Setup), found
    return found


def reason_of(**cells: str) -> str:
    plain = {"model": "Llama-3-8B", "gpu": "H100", "gpus": "8", "seq": "8192", "gbs": "64"}
    found = job_of(run_of(plain | cells))
    assert isinstance(found, Unsupported), found
    return found.reason


# --- what a run measured of its own network ---------------------------------------------------------------------


def test_the_wait_for_each_rank_is_the_slope_of_the_runs_own_all_reduce() -> None:
    """nanotron times an all-reduce of 2^28 numbers of 4 bytes; NumPy's line through these times needs no step time."""
    times: dict[int, list[float]] = {}
    for run in RUNS:
        measured = re.search(r"all-reduce measured in the run ([\d.]+) GB/s over its nodes", run.interconnect)
        if measured and run.gpus and run.gpus >= 64:  # with fewer ranks the transfer takes longer than the wait
            found = job_of(run)
            wait = found.job.engine.communication.rank_wait if isinstance(found, Setup) else 0.0
            if wait:
                assert wait == pytest.approx(300e-6)
                seconds = 2 * (run.gpus - 1) / run.gpus * 2**30 / (float(measured[1]) * 1e9)
                times.setdefault(run.gpus, []).append(seconds)
    ranks, seconds_of_call = zip(*((ranks, each) for ranks, found in times.items() for each in found), strict=True)
    assert len(ranks) > 200
    assert np.polyfit(ranks, seconds_of_call, 1)[0] == pytest.approx(300e-6, rel=0.03)


# --- every published row ----------------------------------------------------------------------------------------


def test_every_published_row_is_read() -> None:
    assert [run.id for run in RUNS] == [row["id"] for row in CELLS]
    assert len(RUNS) == 2342 + 452


def test_layers_for_further_tokens_are_those_that_the_sources_own_flops_count() -> None:
    """Published FLOPs divided by published tokens (the time cancels), compared with a count from the shape."""
    seen = 0
    for run, row in zip(RUNS, CELLS, strict=True):
        setup = job_of(run) if run.model == "DeepSeek-V3" and row["tflops_gpu"] and row["tok_s_gpu"] else None
        if isinstance(setup, Setup) and run.id != "T0291":  # 254e9 FLOPs a token are of neither count
            training = setup.job.training
            tokens = training.sequence_length * training.global_batch_size
            stated = float(row["tflops_gpu"]) * 1e12 / float(row["tok_s_gpu"])
            assert stated == pytest.approx(model_flops_per_step(setup.job.model, training) / tokens, rel=0.015), run.id
            seen += 1
    assert seen > 35


RECIPE_CELLS = (
    "recompute_modules", "recompute_layers", "pipeline_layout", "cuda_graphs", "moe_a2a_overlap", "dispatcher",
    "cpu_offload", "fp8_recipe",
)  # fmt: skip
RECIPE_FILE = r"[\w.-]+/[\w.-]+:[^;@:]+\.(py|yaml|yml|sh|md)@[0-9a-f]{7,12}"
MODULES = {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"}


@pytest.mark.parametrize("run", [run for run in RUNS if run.recipe_ref], ids=lambda run: run.id)
def test_what_a_recipe_states_names_its_file_and_fits_the_row(run: Run) -> None:
    assert re.fullmatch(f"{RECIPE_FILE}(;{RECIPE_FILE})*", run.recipe_ref)
    modules = set(run.recompute_modules.split("+")) - {""}
    assert modules <= MODULES
    assert not modules or run.recompute_policy == "selective"
    assert run.recompute_layers is None or run.recompute_policy == "full"
    if run.pipeline_layout:
        chunks = [int(part) for part in run.pipeline_layout.split("|")]
        assert (sum(chunks), len(chunks)) == (run.layers, (run.pp or 1) * (run.interleave or 1))
    assert run.fp8_recipe == "" or run.precision_class in ("fp8", "fp4")
    assert run.dispatcher in ("", "alltoall", "deepep", "hybridep")
    assert run.moe_a2a_overlap in (None, 0, 1)


def test_no_cell_is_transcribed_without_its_file() -> None:
    assert [row["id"] for row in CELLS if any(row[key] for key in RECIPE_CELLS) and not row["recipe_ref"]] == []


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_nearly_every_published_row_becomes_a_job(every: int) -> None:
    reasons = Counter(found.reason for run in RUNS[::every] if isinstance(found := job_of(run), Unsupported))
    assert sum(reasons.values()) <= 7, reasons


@pytest.mark.parametrize("source", sorted({row["source_set"] for row in CELLS}))
def test_a_job_says_what_its_row_says(source: str) -> None:
    for row in CELLS:
        if row["source_set"] == source:
            check_job(row)


def matches(row: dict[str, str], entry: dict) -> bool:
    return all(fnmatchcase(row[name], pattern) for name, pattern in entry["match"].items())


def test_every_correction_and_recipe_is_of_some_row() -> None:
    for entry in knowledge("aliases")["corrections"]:
        assert any(matches(row, entry) for row in CELLS), entry
    for entry in knowledge("aliases")["recipes"]:
        assert any(row["source_set"] == entry["source_set"] for row in CELLS), entry


def test_a_source_states_its_memory_recipe_and_corrects_what_was_inferred() -> None:
    rows = {row["id"]: job_of(run_of(row)) for row in CELLS if row["id"] in ("T1193", "T1214", "T1156", "T0510")}
    assert rows["T1193"].job.training.memory_recipe == "precision-aware"
    assert rows["T1214"].job.training.memory_recipe == "engine"
    assert rows["T0510"].job.training.memory_recipe == "engine"
    assert (rows["T1156"].layout.tp, rows["T1156"].layout.dp) == (1, 64)


def check_job(row: dict[str, str]) -> None:
    found = job_of(run_of(row))
    if isinstance(found, Unsupported):
        assert found.reason
        return
    model, layout, training, cluster = found.job.model, found.layout, found.job.training, found.job.cluster
    stated = {
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "ffn": model.ffn_hidden_size,
        "vocab": model.vocab_size,
        "n_experts": model.moe.num_experts if model.moe else 0,
        "top_k": model.moe.experts_per_token if model.moe else 0,
        "moe_ffn": model.moe.ffn_hidden_size if model.moe else 0,
        "shared_ffn": model.moe.shared_ffn_hidden_size if model.moe else 0,
        "seq": training.sequence_length,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "interleave": layout.interleave,
        "microbatch": layout.mbs,
        "zero_stage": layout.zero if layout.dp * layout.cp > 1 else int(row["zero_stage"]),
    }
    corrected = {key for entry in knowledge("aliases")["corrections"] for key in entry["cells"] if matches(row, entry)}
    stated = {key: value for key, value in stated.items() if key not in corrected}
    wrong = {key: (row[key], value) for key, value in stated.items() if row[key] and int(row[key]) != value}
    assert not wrong, row["id"]
    assert layout.world_size == int(row["gpus"])
    assert int(row["gpus"]) <= cluster.num_devices < int(row["gpus"]) + cluster.devices_per_host
    assert (model.moe is not None, model.mla is not None) == ("moe" in row["arch"], "mla" in row["arch"])
    assert (model.activation == "swiglu") == (row["glu"] == "1")
    assert sum(layout.layers_per_stage) == model.num_layers
    assert min(layout.layers_per_stage) >= (0 if found.job.engine.pipeline.places_ends else 1)
    assert training.global_batch_size % (layout.dp * layout.mbs) == 0
    if row["gbs"]:
        assert training.global_batch_size * found.share == pytest.approx(int(row["gbs"]))
    else:
        assert row["oom"] == "1"
    kind = "fp8" if "precision" in corrected else row["precision_class"]  # FP8=True in the configuration that ran
    assert {"16": 2, "fp8": 1, "fp4": 0.5}[kind] == {"fp8": 1, "fp4": 0.5}.get(training.precision, 2)
    if row["inter_gb_s_per_gpu"] and "inter_gb_s_per_gpu" not in corrected:
        network = cluster.links[-1]
        assert (network.measured_bandwidth or network.bandwidth) == float(row["inter_gb_s_per_gpu"]) * 1e9
    assert cluster.device.memory / 2**30 == pytest.approx(float(row["gpu_mem_gb"]), rel=0.08)
    assert layout.zero == 0 or layout.dp * layout.cp > 1 or layout.offload != "none"


def test_a_network_that_a_row_names_has_its_own_latency() -> None:
    stated = {"interconnect": "NVLink4 + AWS EFA 400 Gb/s per GPU", "inter_gb_s_per_gpu": "25"}
    network = setup_of(**stated).job.cluster.links[-1]
    assert (network.latency, network.bandwidth) == (pytest.approx(164e-6), 25e9)
    assert setup_of().job.cluster.links[-1].latency == pytest.approx(14e-6)


# --- what a row leaves out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "memory", "device"),
    [
        ("NVIDIA H100-SXM5-80GB", "", "h100-80gb"),
        ("H100 PCIe", "80", "h100-pcie-80gb"),
        ("H100-96GB-HBM2e-500W", "96", "h100-96gb-hbm2e"),
        ("A100-SXM4-40GB", "", "a100-40gb"),
        ("A100", "40", "a100-40gb"),
        ("A100", "", "a100-80gb"),
        ("Tesla V100-SXM2-16GB", "", "v100-16gb"),
        ("AMD Instinct MI300X", "192", "mi300x-192gb"),
        ("GB300", "", "gb300-288gb"),
        ("H20", "96", "h20-96gb"),
        ("H800", "80", "h800-80gb"),
        ("H200", "141", "h200-141gb"),
        ("H200 NVL", "", "h200-nvl-141gb"),
        ("NVIDIA GH200 480GB", "", "gh200-96gb"),
        ("NVIDIA GeForce RTX 4090", "24", "rtx4090-24gb"),
        ("NVIDIA RTX A6000", "", "a6000-48gb"),
        ("RTX A5000", "24", "a5000-24gb"),
        ("GeForce RTX 5060 Ti", "16", "rtx5060ti-16gb"),
        ("A800", "80", "a100-80gb"),
        ("RTX 6000 Ada", "", "rtx6000-ada-48gb"),
        ("L40S", "48", "l40s-48gb"),
        ("NVIDIA L4", "", "l4-24gb"),
        ("A10G", "", "a10g-24gb"),
        ("rtx4090-24gb", "", "rtx4090-24gb"),
        ("RTX3090", "", "rtx3090-24gb"),
        ("a40-48gb", "", "a40-48gb"),
    ],
)
def test_gpu_names_find_their_device(gpu: str, memory: str, device: str) -> None:
    assert setup_of(gpu=gpu, gpu_mem_gb=memory).job.cluster.device.name == device


def test_a_rack_is_one_scale_up_domain() -> None:
    cluster = setup_of(gpu="GB200", gpus="144", gpus_per_node="4").job.cluster
    assert (cluster.scale_up_devices, cluster.devices_per_host, cluster.hosts) == (72, 4, 36)
    parts = {"128": 16, "256": 16, "96": 12, "64": 0}  # hosts of each rack, equal parts of several racks
    for gpus, hosts in parts.items():
        setup = setup_of(gpu="GB200", gpus=gpus, gpus_per_node="4")
        assert (setup.job.cluster.links[0].num_devices, setup.layout.segment) == (72, hosts)
    assert setup_of(gpu="V100-32", gpus="64", gpus_per_node="4").job.cluster.scale_up_devices == 4


@pytest.mark.parametrize(("gpus", "hosts", "per_host"), [("4", 1, 4), ("8", 1, 8), ("12", 2, 8), ("16", 2, 8)])
def test_the_last_host_may_be_half_empty(gpus: str, hosts: int, per_host: int) -> None:
    found = setup_of(gpus=gpus, tp="1", pp="1", gbs="48")
    assert (found.job.cluster.hosts, found.job.cluster.devices_per_host) == (hosts, per_host)
    assert found.layout.world_size == int(gpus)


@pytest.mark.parametrize(
    ("framework", "cells", "engine"),
    [
        ("Megatron-LM", {"flash_attention": "0", "sp": "0", "zero_stage": "0"}, "megatron-2021"),
        ("Megatron-LM", {}, "megatron"),
        ("NeMo", {}, "megatron-bridge"),
        ("Megatron-DeepSpeed", {}, "deepspeed"),
        ("Composer/FSDP1", {"tp": "1", "pp": "1"}, "fsdp"),
        ("Paxml (JAX FSDP+DP)", {"tp": "1", "pp": "1"}, "fsdp"),
        ("torchtitan", {}, "torchtitan"),
        ("PyTorch FSDP", {"tp": "2", "pp": "1"}, "torchtitan"),
        ("AA-Scaling (Megatron-like, in house)", {"flash_attention": "0"}, "aleph-alpha-scaling"),
        ("nanotron", {}, "nanotron"),
        ("InternEvo (Megatron-like)", {}, "internevo"),
        ("nobody knows", {}, "megatron"),
    ],
)
def test_frameworks_find_their_engine(framework: str, cells: dict[str, str], engine: str) -> None:
    assert setup_of(framework=framework, **cells).job.engine.name == engine


def test_a_shape_that_is_not_stated_comes_from_the_shipped_model() -> None:
    blank = setup_of(model="Llama-3-70B").job.model
    assert (blank.num_layers, blank.hidden_size, blank.num_kv_heads) == (80, 8192, 8)
    truncated = setup_of(model="Llama-3-70B", layers="12").job.model
    assert (truncated.num_layers, truncated.hidden_size) == (12, 8192)


@pytest.mark.parametrize("name", [*model_names(), "Qwen/Qwen3-8B"])
def test_a_row_that_names_a_shipped_model_alone_is_that_model(name: str) -> None:
    own = model_of(run_of({"model": name, "seq": "128"}))
    assert own == load_model(name)


def test_experts_of_a_shipped_model_are_its_own_but_for_what_the_row_states() -> None:
    own, shipped = model_of(run_of({"model": "mixtral-8x7b", "top_k": "1"})).moe, load_model("mixtral-8x7b").moe
    assert own == shipped.model_copy(update={"experts_per_token": 1})


def test_head_sizes_and_latent_attention_have_no_column() -> None:
    shape = {"layers": "48", "hidden": "2048", "heads": "32", "kv_heads": "4", "ffn": "6144", "vocab": "151936"}
    assert setup_of(model="Qwen3-30B-A3B", **shape).job.model.head_size == 128
    latent = {"layers": "27", "hidden": "2048", "heads": "16", "ffn": "11264", "vocab": "163840", "arch": "moe-mla"}
    moe = {"n_experts": "64", "top_k": "6", "moe_ffn": "1408", "shared_ffn": "2816", "n_dense_layers": "1", "glu": "1"}
    model = setup_of(model="Moonlight-16B", **latent, **moe).job.model
    assert model.mla is not None
    assert (model.mla.q_lora_rank, model.mla.kv_lora_rank) == (0, 512)
    model = setup_of(model="Kimi-K2", **latent, **moe).job.model
    assert model.mla is not None
    assert model.mla.q_lora_rank == 1536


def test_a_batch_that_nothing_divides_is_rounded_up_and_scaled() -> None:
    found = setup_of(gbs="100", tp="1", pp="1", gpus="64", mbs="1")
    assert found.job.training.global_batch_size == 128
    assert found.share == 100 / 128
    half, whole = score(run_of(_cells(gbs="100"))), score(run_of(_cells(gbs="128")))
    assert half.predicted_seconds == pytest.approx(whole.predicted_seconds * 100 / 128)


def _cells(**cells: str) -> dict[str, str]:
    return {"model": "Llama-3-8B", "gpu": "H100", "gpus": "64", "seq": "2048", "recompute_policy": "full"} | cells


def test_hybrid_sharding_shards_in_a_part_of_the_ranks() -> None:
    found = setup_of(framework="FSDP1", tp="1", pp="1", zero="hsdp (shard 8 in node)", zero_stage="3", gpus="64")
    assert (found.layout.hsdp, found.layout.zero) == (8, 3)


def test_experts_are_cut_as_the_engine_cuts_them() -> None:
    shape = {"layers": "56", "hidden": "6144", "heads": "48", "ffn": "16384", "vocab": "32768", "arch": "moe"}
    fine = {**shape, "n_experts": "128", "top_k": "8", "moe_ffn": "768", "ep": "8", "glu": "1"}
    megatron, bridge = setup_of(**fine), setup_of(**fine, framework="Megatron-Bridge")
    assert [found.layout.etp for found in (megatron, bridge, setup_of(**fine, etp="1"))] == [2, 1, 1]
    assert setup_of(**fine, pp="1", zero_stage="3").layout.etp == 2  # Megatron-FSDP has Megatron-Core's default too


def test_stated_cells_win_and_assumptions_are_named() -> None:
    assert setup_of().assumed == ()
    found = setup_of(mbs="not stated", sp="", recompute_policy="", recompute="see recipe", zero_stage="", interleave="")
    assert {each.key: each.value for each in found.assumed} == {"mbs": "1", "zero": "1", "sp": "1", "recompute": "none"}


@pytest.mark.parametrize("oom", ["", "1"])
def test_recompute_that_is_not_stated_is_the_least_that_fits_however_the_run_ended(oom: str) -> None:
    cells = _cells(model="Llama-3-70B", gpus="64", tp="4", pp="4", gbs="64", mbs="4", interleave="1", seq="8192")
    blank, none, full = (
        score(run_of(cells | {"oom": oom, "recompute_policy": policy})) for policy in ("", "none", "full")
    )
    assert (none.verdict, full.verdict) == ("does not fit", "fits")
    assert blank.verdict != "does not fit"
    assert none.predicted_seconds < blank.predicted_seconds < full.predicted_seconds


def test_a_framework_that_nobody_knows_is_named() -> None:
    found = setup_of(framework="SuperTrain 3")
    assert found.unknown_framework
    assert found.job.engine.stands_for == "SuperTrain 3"
    assert "unknown framework" in band(found.job, found.layout).unseen
    assert [(each.key, each.value) for each in found.assumed] == [("engine", "megatron")]
    assert "SuperTrain 3 is not known" in found.assumed[0].rule
    assert setup_of(framework="Ours (Megatron-like)").unknown_framework
    assert not setup_of().unknown_framework
    assert "unknown framework" not in band(setup_of().job, setup_of().layout).unseen
    assert setup_of(framework="SuperTrain 3", zero_stage="3", tp="1", pp="1").job.engine.name == "fsdp"


def test_what_a_profile_lacks_and_a_run_shows_is_added_and_named() -> None:
    found = setup_of(framework="KempnerForge", pp="1", cp="2", zero_stage="3")
    assert "cp" in found.job.engine.can.axes
    assert [each.key for each in found.assumed] == ["engine.can.axes"]


def test_a_run_with_fewer_microbatches_than_stages_shows_that_its_program_can() -> None:
    found = setup_of(framework="torchtitan", pp="8", tp="1", gbs="32", zero_stage="1")
    assert not found.job.engine.pipeline.needs_filling
    assert [each.key for each in found.assumed] == ["engine.pipeline.needs_filling"]
    assert score(run_of(_cells(framework="torchtitan", pp="8", gbs="32", zero_stage="1"))).reason == ""


@pytest.mark.parametrize(
    ("words", "kind", "precision"),
    [
        ("bf16 (bf16 optimizer, fp32 grad accumulation)", "16", "bf16"),
        ("bf16, fp32 gradients", "", "bf16"),
        ("fp16 mixed", "16", "fp16"),
        ("bf16 not fp16", "16", "fp16"),
        ("bfloat16", "", "bf16"),
        ("float16", "", "fp16"),
        ("", "", "bf16"),
        ("fp32", "", "fp32"),
        ("mxfp8", "fp8", "fp8"),
        ("float8 rowwise", "", "fp8"),
    ],
)
def test_precisions_are_read_by_class_and_by_words(words: str, kind: str, precision: str) -> None:
    assert setup_of(precision=words, precision_class=kind).job.training.precision == precision


@pytest.mark.parametrize(
    ("flags", "schedule", "pp", "dp", "interleave"),
    [
        ("DualPipe; DeepEP", "dualpipev", 4, 8, 2),  # two V's of half the stages side by side
        ("DualPipeV", "dualpipev", 8, 4, 2),
        ("ZBV", "zbv", 8, 4, 2),
        ("zero bubble", "zb-h1", 8, 4, 1),
        ("interleaved, degree not stated", "interleaved", 8, 4, 2),  # 4 layers of a stage: two chunks of 2
        ("non-interleaved 1F1B", "1f1b", 8, 4, 1),
    ],
)
def test_words_name_the_schedule(flags: str, schedule: str, pp: int, dp: int, interleave: int) -> None:
    layout = setup_of(flags=flags, pp="8", tp="2", gbs="256", interleave="").layout
    assert (layout.schedule, layout.pp, layout.dp, layout.interleave) == (schedule, pp, dp, interleave)


@pytest.mark.parametrize(
    ("vpp", "framework", "schedule", "interleave"),
    [
        ("not stated", "Megatron-LM", "interleaved", 2),  # 4 layers of a stage: two chunks of 2
        ("", "Megatron-LM", "1f1b", 1),
        ("1", "Megatron-LM", "1f1b", 1),
        ("not stated", "Megatron-DeepSpeed", "1f1b", 1),  # which does not interleave
    ],
)
def test_a_source_that_does_not_state_its_chunks_has_them(vpp, framework, schedule, interleave) -> None:
    """The Mixtral-8x22B runs of arXiv 2504.14960, table 4, on 128 and on 1,024 GPUs, have 128 and 16 microbatches.

    16.81 and 2.454 s are 128.2 ms for each microbatch and 3.1 microbatches beside them. One chunk would idle for 7.
    """
    layout = setup_of(vpp=vpp, framework=framework, pp="8", tp="2", gbs="256", interleave="").layout
    assert (layout.schedule, layout.interleave) == (schedule, interleave)
    each = (16.81 - 2.454) / (128 - 16)
    assert 16.81 / each - 128 < 8 - 1


def test_chunks_are_those_that_a_recipe_lists() -> None:
    shape = {"layers": "30", "pp": "4", "tp": "1", "gpus": "8", "interleave": "2"}
    found = setup_of(**shape, pipeline_layout="3|4|4|4|4|4|4|3")
    assert (found.layout.interleave, found.layout.layers_per_stage) == (2, (3, 4, 4, 4, 4, 4, 4, 3))
    assert found.assumed == ()
    empty = setup_of(**shape, pipeline_layout="2|4|4|4|4|4|8|0")
    assert empty.layout.layers_per_stage == (2, 4, 4, 4, 4, 4, 8, 0)  # the loss alone
    assert empty.assumed == ()
    assert "pipeline layout" in reason_of(layers="30", pp="4", pipeline_layout="3|4|4")


@pytest.mark.parametrize(
    ("cells", "recompute"),
    [
        ({"recompute_policy": "selective", "recompute_modules": "mla_up_proj+mlp"}, "mla_up_proj+mlp"),
        ({"recompute_policy": "selective", "recompute": "selective:mlp"}, "mlp"),
        ({"recompute_policy": "selective", "recompute": "selective:layernorm,moe_act"}, "layernorm+moe_act"),
        ({"recompute_policy": "full", "recompute_layers": "5"}, "full:5"),
        ({"recompute_policy": "selective", "recompute": "selective (every other layer)"}, "every:2"),
        ({"recompute_policy": "selective", "recompute": "selective, every 3rd block"}, "every:3"),
        ({"recompute_policy": "selective", "recompute": "selective (op)"}, "selective"),
        ({"recompute_policy": "selective", "recompute": "selective (op)", "framework": "DeepSpeed"}, "none"),
        ({"recompute_policy": "full", "recompute": "full"}, "full"),
    ],
)
def test_recompute_is_read_by_modules_and_layers(cells: dict[str, str], recompute: str) -> None:
    assert set(setup_of(**cells).layout.recompute) == {recompute}


def test_activations_of_some_layers_on_the_host_are_named() -> None:
    found = setup_of(cpu_offload="40")
    assert found.layout.offload == "none"
    assert "activations of 40" in found.assumed[0].rule


def test_litgpt_has_a_head_beside_the_embedding_in_every_model() -> None:
    """litgpt, model.py (GPT): 1,235,814,400 parameters of Llama 3.2 1B, and 128,256 rows of 2,048 once more."""
    rows = [row for row in CELLS if row["model"] == "Llama-3.2-1B" and row["framework"].startswith("litgpt")]
    found = [job_of(run_of(row)) for row in rows]
    assert rows
    assert {num_params(each.job.model) for each in found if isinstance(each, Setup)} == {1_498_482_688}
    constants = {each.job.engine.memory.quantised_constants for each in found if isinstance(each, Setup)}
    assert constants == {4 / 64}  # bnb.nf4, one number in fp32 for 64 weights


@pytest.mark.parametrize(("flags", "beside"), [("TP_COMM_OVERLAP", True), ("compile; AsyncTP", True), ("", False)])
def test_collectives_beside_products_are_read_from_flags(flags: str, beside: bool) -> None:
    assert setup_of(flags=flags).job.engine.overlap.tensor_parallel == beside


def test_norms_have_a_kernel_where_the_program_has_one_or_the_row_says_so() -> None:
    library = {"framework": "AA-Scaling (Megatron-like, in house)"}
    assert not setup_of(**library, flags="kernel: flash_attention2").job.engine.memory.norm_kernel
    assert setup_of(**library, flags="kernel: flash_attention2 + RMS kernel").job.engine.memory.norm_kernel
    assert setup_of().job.engine.memory.norm_kernel


def test_kernels_are_read_from_words_and_from_the_age_of_a_program() -> None:
    eager, compiled = (setup_of(framework="torchtitan", flags=flags).job.engine for flags in ("eager", "torch.compile"))
    assert (eager.memory.norm_kernel, compiled.memory.norm_kernel) == (False, True)
    assert compiled.compute.attention_kernel == "flash-2"  # cuDNN came first in October 2025
    assert load_engine("torchtitan").compute.attention_kernel == "latest"
    of_2023 = setup_of(framework="Composer/FSDP1", pp="1").job.engine  # attn_impl: triton
    assert of_2023.compute.attention_kernel == "flash-1"
    # torch takes cuDNN first since 2.11, and took FlashAttention-2 before
    assert {load_engine(name).compute.attention_kernel for name in ("fsdp", "torch")} == {"latest"}
    older = setup_of(framework="HF Trainer + FSDP (fms-hf-tuning)", tp="1", pp="1").job.engine
    assert (older.name, older.compute.attention_kernel) == ("fsdp", "flash-2")
    old, new = (setup_of(framework="DeepSpeed", pp="1", flags=flags).job for flags in ("", "Liger kernel; FA3 on H200"))
    assert [job.engine.compute.attention_kernel for job in (old, new)] == ["flash-2", "latest"]


def test_fused_kernels_and_attention_in_8_bits_are_read_from_words() -> None:
    def engine_of(flags: str, **cells: str) -> EngineSpec:
        return setup_of(framework="HF Trainer + FSDP", tp="1", pp="1", flags=flags, **cells).job.engine

    plain, liger, foak = (
        engine_of(flags).memory for flags in ("", "liger kernel", "foak-fast-kernels; fused rope, RMS norm")
    )
    assert [each.norm_kernel for each in (plain, liger, foak)] == [False, True, True]
    assert [each.fused_swiglu for each in (plain, liger, foak)] == [False, True, False]
    assert setup_of(flags="FP8_DPA", precision="fp8").job.attention_precision == "fp8"
    assert setup_of(flags="", precision="fp8").job.attention_precision == "bf16"
    words = ("FP8_ACT", "FP8_ACTIVATION", "fp8 activations", "")
    assert [setup_of(flags=each).job.engine.memory.fp8_gates for each in words] == [True, True, False, False]


def test_mlperf_s_adapters_are_those_of_its_train_py_and_its_submitters_switches() -> None:
    """train.py: rank 16, dropout 0.1, linear_qkv and linear_proj; config_MI300X_1x8x1.sh: ACL=21, FP8_ACTIVATION."""
    runs = [each for each in RUNS if each.source_set == "mlperf-lora"]
    setups = {each.id: setup for each in runs if not isinstance(setup := job_of(each), Unsupported)}
    training = {key: setup.job.training for key, setup in setups.items()}
    assert {(each.lora_rank, each.lora_targets) for each in training.values()} == {(16, ("query", "output"))}
    assert (training["N2748"].lora_dropout, training["N2695"].lora_dropout) == (0.1, 0.0)  # tp of 1, and of 4
    gates = {key: setups[key].job.engine.memory.fp8_gates for key in ("N2748", "N2750", "N2695", "N2849", "N2860")}
    assert gates == {"N2748": True, "N2750": True, "N2695": False, "N2849": False, "N2860": True}
    layers = {key: setups[key].layout.recompute for key in ("N2745", "N2750", "N2748")}
    assert layers == {"N2745": ("full:21",), "N2750": ("full:21",), "N2748": ("none",)}
    # Transformer Engine's dropout since v5.1; AMD's program, that of v5.0, and tensor-parallel ranks have torch's
    masks = {key: setups[key].job.engine.memory.dropout_masks for key in ("N2885", "N2849", "N2748", "N2797", "N2807")}
    assert masks == {"N2885": 0.125, "N2849": 0.125, "N2748": 1.0, "N2797": 1.0, "N2807": 1.0}
    assert setups["N2885"].job.attention_precision == "fp8"


def test_recipes_of_whole_graphs_overlap_the_exchanges_of_experts() -> None:
    """perf_recipes/qwen/common.py, _enable_hybridep_full_iteration_mxfp8: the recipe of a card's weak scaling."""
    runs = [each for each in RUNS if each.source_set == "mbridge-cards-scale"]
    setups = [setup for each in runs if not isinstance(setup := job_of(each), Unsupported)]
    assert len(setups) == len(runs) == 4
    assert {setup.job.training.expert_overlap for setup in setups} == {True}


def test_a_loop_over_experts_is_read_from_words() -> None:
    cells = {"framework": "DeepSpeed (HF Trainer)", "tp": "1", "pp": "1", "zero_stage": "3"}
    loops = [
        setup_of(**cells, flags=flags).job.engine.compute.loops_over_experts for flags in ("", "HF loop over experts")
    ]
    assert loops == [False, True]


def test_tokens_of_deepseek_reach_few_groups_of_experts() -> None:
    """n_group and topk_group of the models' config.json on the Hub."""
    latent = {"layers": "61", "hidden": "7168", "heads": "128", "ffn": "18432", "vocab": "129280", "arch": "moe-mla"}
    moe = {"n_experts": "256", "top_k": "8", "moe_ffn": "2048", "glu": "1", "pp": "1"}
    found = {name: setup_of(model=name, **latent, **moe).job.model.moe for name in ("DeepSeek-V3", "Kimi-K2")}
    groups = {name: (moe.num_groups, moe.groups_per_token) for name, moe in found.items() if moe is not None}
    assert groups == {"DeepSeek-V3": (8, 4), "Kimi-K2": (1, 1)}


def test_a_dispatcher_is_read_by_its_column() -> None:
    shape = {"layers": "48", "hidden": "2048", "heads": "32", "ffn": "6144", "vocab": "151936", "arch": "moe"}
    cells = {**shape, "n_experts": "128", "top_k": "8", "moe_ffn": "768", "ep": "8", "framework": "Megatron-Bridge"}
    once = [
        setup_of(**cells, dispatcher=name).job.engine.communication.dispatches_once_per_host
        for name in ("alltoall", "deepep", "")
    ]
    assert once == [False, True, True]


def test_a_library_that_fills_its_pipeline_has_as_many_microbatches_as_stages() -> None:
    cells = {"tp": "1", "pp": "4", "gpus": "32", "gbs": "128", "mbs": "", "microbatch": "", "interleave": ""}
    old, new = (setup_of(framework="torchtitan", release=release, **cells) for release in ("2024-09", "2026-01"))
    assert (old.layout.mbs, new.layout.mbs) == (4, 1)
    assert "as many microbatches as stages" in next(each.rule for each in old.assumed if each.key == "mbs")


def test_adapters_are_priced_and_their_rank_is_said() -> None:
    found = setup_of(task="lora", framework="Megatron-Bridge", flags="rank 16, linear_qkv", zero_stage="1")
    training = found.job.training
    assert (training.lora_rank, training.lora_targets) == (16, ("query", "key", "value"))
    assert found.assumed == ()
    assumed = setup_of(task="peft", framework="Megatron-Bridge").assumed
    assert [(each.key, each.value) for each in assumed] == [("training.lora_rank", "8")]
    assert setup_of(task="sft").job.training.lora_rank == 0


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"gpu": "TPU v5p"}, "unknown GPU"),
        ({"gpu": ""}, "unknown GPU"),
        ({"gpu": "H1000"}, "unknown GPU"),
        ({"model": "nobody knows"}, "does not state layers"),
        ({"gbs": ""}, "global batch"),
        ({"gbs": "2"}, "global batch 2 is less"),
        ({"seq": "not stated"}, "sequence length"),
        ({"gpus": "", "dp": ""}, "number of GPUs"),
        ({"tp": "3"}, "does not divide"),
        ({"arch": "mamba"}, "architecture"),
        ({"task": "inference"}, "task"),
        ({"task": "RLHF rollout"}, "task"),
        ({"precision": "tf32"}, "precision"),
        ({"pp": "8", "layers": "4"}, "pipeline stages"),
        ({"arch": "moe"}, "experts"),
    ],
)
def test_what_cannot_be_priced_says_why(cells: dict[str, str], words: str) -> None:
    assert words in reason_of(**cells)


def test_a_precision_that_the_device_lacks_is_no_estimate() -> None:
    row = score(run_of(_cells(gpu="A100-80", precision="fp8", precision_class="fp8", gbs="64")))
    assert row.predicted_seconds is None
    assert "fp8" in row.reason


# --- odd cells and files ----------------------------------------------------------------------------------------


def check_edits(seed: int) -> None:
    rng = random.Random(seed)
    row = dict(rng.choice(CELLS))
    other = rng.choice(CELLS)
    for key in rng.sample(list(row), rng.randint(1, 6)):
        row[key] = rng.choice([rng.choice(ODD), other[key], rng.choice(list(other.values()))])
    scored = score(run_of(row))
    if scored.reason:
        assert scored.predicted_seconds is None
        assert scored.reason.isprintable()
    else:
        assert scored.predicted_seconds is not None
        assert 0 < scored.predicted_seconds < float("inf")
        assert scored.predicted_memory_bytes is not None
        assert 0 < scored.predicted_memory_bytes < float("inf")


@given(st.integers(0, 2**32))
def test_edited_rows_give_a_price_or_a_reason(seed: int) -> None:
    check_edits(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_edited_rows_give_a_price_or_a_reason() -> None:
    for seed in range(20_000):
        check_edits(seed)


once = cache(score)  # a row without a column that is blank there is the whole row again


@pytest.mark.parametrize("name", [name for name in Run.__dataclass_fields__ if name not in ("id", "oom")])
def test_any_column_may_be_missing(name: str) -> None:
    for row in CELLS[::400]:
        without = {key: value for key, value in row.items() if key != name}
        once(run_of(without))


def test_columns_that_are_needed_are_all_named(tmp_path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("id,model,gpu\n1,x,H100\n")
    with pytest.raises(InputError, match="gpus, seq, gbs"):
        read_runs(table)
    table.write_text(",".join(REQUIRED_COLUMNS) + "\n\nLlama-3-8B,H100,8,8192,64,extra,cells\nshort\n")
    runs = read_runs(table)
    assert [run.id for run in runs] == ["row 1", "row 2"]
    assert runs[0].gpus == 8


def test_families_beside_a_table_are_joined_by_source_and_any_other_file_of_that_name_is_ignored(tmp_path) -> None:
    table, beside = tmp_path / "runs.csv", tmp_path / "families.csv"
    table.write_text("source_set,model,gpu,gpus,seq,gbs\nours,x,H100,8,8192,64\n,x,H100,8,8192,64\n")
    beside.write_text("source_set,family,fit\nours,kin,bands\n")
    assert [(run.family, run.fit) for run in read_runs(table)] == [("kin", "bands"), ("", "")]
    beside.write_text("family,members\nkin,3\n")
    assert [run.family for run in read_runs(table)] == ["ours", ""]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'"' + b"x" * 200_000, b"model,gpu\x00\n"])
def test_what_is_no_table_is_a_mistake_of_the_user(content: bytes, tmp_path) -> None:
    table = tmp_path / "runs.csv"
    table.write_bytes(content)
    with pytest.raises(InputError):
        read_runs(table)
    with pytest.raises(InputError):
        read_runs(tmp_path)
    with pytest.raises(InputError):
        read_runs(tmp_path / "none.csv")


def test_a_table_without_end_is_refused_at_once() -> None:
    with pytest.raises(InputError, match=r"/dev/zero has more than 33,554,432 bytes"):
        read_runs(Path("/dev/zero"))


def test_the_step_follows_from_tokens_where_it_is_not_stated() -> None:
    run = run_of({"gbs": "64", "seq": "1024", "gpus": "8", "tok_s_gpu": "4096"})
    assert run.measured_step_seconds == 2.0
    assert replace(run, step_s=1.5).measured_step_seconds == 1.5


def test_tables_of_names_point_at_what_is_shipped() -> None:
    gpus = knowledge("gpus")["gpus"]
    assert {entry["cluster"] for entry in gpus} <= set(cluster_names())
    named = {entry["engine"] for entry in knowledge("aliases")["frameworks"]} | {"megatron-2022"}  # by `engine_of`
    assert {*priced_engine_names()} <= named <= {*engine_names(), *priced_engine_names()}


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "mtp", "split"),
    [
        (
            "61",
            "16",
            "1",
            "1",
            (*(4,) * 15, 1),
        ),  # 61 layers, a layer for further tokens and two output heads are 16 x 4
        ("126", "8", "8", "", (1, *(2,) * 62, 1)),
        ("126", "16", "8", "", (1, *(2,) * 62, 1)),  # 128 chunks for 126 layers: 64 hold some
        ("96", "8", "1", "", (12,) * 8),
        ("61", "4", "1", "", (16, 15, 15, 15)),
    ],
)
def test_ends_count_as_layers_where_that_makes_equal_chunks(
    layers: str, pp: str, chunks: str, mtp: str, split: tuple[int, ...]
) -> None:
    found = setup_of(layers=layers, pp=pp, interleave=chunks, tp="1", gpus=pp, mtp_layers=mtp)
    assert found.layout.layers_per_stage == split


ATTENTION = ("query", "key", "value", "output")
MIXTURE = {"arch": "moe", "n_experts": "8", "top_k": "2", "moe_ffn": "14336", "ep": "8", "pp": "1", "tp": "1"}


@pytest.mark.parametrize(
    ("flags", "scope"),
    [
        ("full-iteration CUDA graph", "step"),
        ("full_iteration CUDA graphs", "step"),
        ("FULL_CUDA_GRAPH", "step"),
        ("MCORE_CUDA_GRAPH", "layers"),
        ("no CUDA graphs", "none"),
        ("fp8", "none"),
    ],
)
def test_the_scope_of_graphs_is_read_in_each_spelling(flags: str, scope: str) -> None:
    assert setup_of(framework="Megatron-Bridge", flags=flags).job.training.cuda_graphs == scope


@pytest.mark.parametrize(
    ("flags", "cell", "overlaps"),
    [
        ("EP overlapped with 1F1B", "", True),
        ("HybridEP; overlapped expert communication", "", True),
        ("MOE_A2A_OVERLAP", "", True),
        ("EP overlap off", "", False),
        ("overlap grad reduce/param gather; tp-comm-overlap", "", False),
        ("EP overlapped with 1F1B", "0", False),  # the column decides
    ],
)
def test_overlapped_exchanges_of_experts_are_read_from_words(flags: str, cell: str, overlaps: bool) -> None:
    found = setup_of(framework="Megatron-Bridge", flags=flags, moe_a2a_overlap=cell, **MIXTURE)
    assert found.job.training.expert_overlap == overlaps


@pytest.mark.parametrize(("vpp", "overlaps"), [("not stated", True), ("2", True), ("1", False), ("", False)])
def test_exchanges_of_experts_overlap_in_pipelines_whose_stages_are_interleaved(vpp: str, overlaps: bool) -> None:
    shape = {**MIXTURE, "pp": "2", "ep": "4", "interleave": "", "vpp": vpp}
    found = setup_of(framework="Megatron-Bridge", moe_a2a_overlap="1", **shape)
    assert (found.layout.interleave > 1, found.job.training.expert_overlap) == (overlaps, overlaps)


@pytest.mark.parametrize(
    "flags",
    [
        "pipeline layout 3|4|4|4|4|4|4|3",
        "PP layout: 3|4*6|3; GA=4",
        "pipeline_model_parallel_layout=Et*3|(tttt|)*6tttL",
    ],
)
def test_a_pipeline_layout_is_read_from_words(flags: str) -> None:
    found = setup_of(layers="30", pp="4", tp="1", gpus="8", interleave="2", flags=flags)
    assert (found.layout.interleave, found.layout.layers_per_stage) == (2, (3, 4, 4, 4, 4, 4, 4, 3))


@pytest.mark.parametrize(("pp", "layers"), [("2", (11, 5)), ("4", (6, 5, 5, 0)), ("8", (3, 3, 2, 3, 2, 2, 1, 0))])
def test_nanotron_divides_a_pipeline_by_parameters(pp: str, layers: tuple[int, ...]) -> None:
    """By hand: the head, 2048 x 131072, counts as 4 of the layers; stages end above 20 / pp, 40 / pp and so on.

    With 8 stages nanotron's have 3, 3, 2, 3, 2 and 3 layers, and the last two hold the head and the loss alone.
    """
    shape = {"layers": "16", "hidden": "2048", "ffn": "8192", "heads": "32", "kv_heads": "32", "vocab": "131072"}
    found = setup_of(framework="nanotron", model="Llama-3.2-1B", pp=pp, **shape)
    assert found.layout.layers_per_stage == layers


def test_rows_of_mlperf_run_what_their_configurations_say() -> None:
    """config_common.sh has FP8=True, and the configurations of B200 and GB300 have cp_comm_type a2a."""
    seen = {}
    for run in RUNS:
        if run.id in ("N2733", "N2740", "N2830", "N2864", "N2896"):
            found = job_of(run)
            assert isinstance(found, Setup)
            exchange = found.job.engine.communication.context_exchange
            seen[run.id] = (found.job.training.precision, found.job.attention_precision, exchange)
    assert seen == {
        "N2733": ("fp8", "bf16", "ring"),  # the table had guessed bf16
        "N2740": ("fp8", "bf16", "ring"),
        "N2830": ("fp8", "fp8", "ring"),  # no configuration was found
        "N2864": ("fp4", "fp8", "all-to-all"),
        "N2896": ("fp8", "fp8", "all-to-all"),
    }


def test_hai_llm_has_a_profile_of_its_own() -> None:
    assert setup_of(framework="HAI-LLM").job.engine.name == "hai-llm"


@pytest.mark.parametrize(
    ("flags", "cell", "recipe"),
    [
        ("none; weights, gradients and Adam moments all bf16", "", "pure-bf16"),
        ("pure bf16 (bf16-true)", "", "pure-bf16"),
        ("pure bf16 (bf16-true)", "zero-16", "zero-16"),  # the column decides
        ("", "precision-aware", "precision-aware"),
        ("", "", "engine"),
    ],
)
def test_the_memory_recipe_is_read_from_its_column_or_from_words(flags: str, cell: str, recipe: str) -> None:
    assert setup_of(flags=flags, memory_recipe=cell).job.training.memory_recipe == recipe


def test_an_unknown_memory_recipe_is_the_reason_why_a_row_is_not_priced() -> None:
    assert "memory_recipe" in reason_of(memory_recipe="pure-bf61")


@pytest.mark.parametrize(
    ("flags", "targets"),
    [
        ("lora rank=16; targets q_proj k_proj v_proj o_proj", ATTENTION),
        ("lora rank=32; targets query value; bf16-true", ("query", "value")),
        ("qlora nf4; rank=64; all linear (no output projection)", ("query", "key", "value", "gate", "up", "down")),
        ("lora rank=8; targets query key value projection mlp head", (*ATTENTION, "gate", "up", "down")),
        ("lora rank=8 of attention", ATTENTION),
        ("lora rank=8", ("query", "value")),  # the default of peft
    ],
)  # fmt: skip
def test_matrices_with_adapters_are_those_that_the_flags_name(flags: str, targets: tuple[str, ...]) -> None:
    found = setup_of(framework="FSDP", task="lora", flags=flags, tp="1", pp="1", zero_stage="3", sp="")
    assert found.job.training.lora_targets == targets


def test_one_device_offloads_the_shards_that_it_has_alone() -> None:
    cells = {"framework": "DeepSpeed", "gpus": "1", "tp": "1", "pp": "1", "sp": "", "offload": "1", "interleave": ""}
    found = {stage: setup_of(**cells, zero_stage=stage).layout for stage in ("2", "3", "")}
    assert {stage: (layout.zero, layout.offload) for stage, layout in found.items()} == {
        "2": (2, "optimizer"), "3": (3, "optimizer"), "": (1, "optimizer")
    }  # fmt: skip
    predicted = score(run_of({"model": "Llama-3-8B", "gpu": "H100", "seq": "4096", "gbs": "8", "zero": "3", **cells}))
    assert predicted.reason == ""


def test_a_program_offloads_what_its_row_says_even_if_its_profile_does_not() -> None:
    cells = {"framework": "HF Trainer + FSDP2", "tp": "1", "pp": "1", "sp": "", "zero_stage": "3"}
    found = setup_of(**cells, recompute_policy="full", flags="ring attention; chunked_nll; checkpoint-in-cpu")
    assert (found.layout.offload, found.job.training.loss) == ("activations", "chunked")
    assert [each.key for each in found.assumed if "offload" in each.key] == ["engine.offload.what"]


@pytest.mark.parametrize(
    ("slot", "rate"), [("3.0 x4", 3.94e9), ("PCIe 4", 31.504e9), ("5.0 x8", 31.504e9), ("old", 31.5e9)]
)
def test_a_slot_of_pcie_gives_the_rate_between_cards_and_to_the_host(slot: str, rate: float) -> None:
    """PCI-SIG: 0.985, 1.969 and 3.938 GB/s a lane and direction; the box has 31.5 GB/s."""
    cluster = setup_of(gpu="RTX 3090", gpu_mem_gb="24", gpus="2", gpus_per_node="2", pp="1", pcie=slot).job.cluster
    assert cluster.host is not None
    assert (cluster.links[0].bandwidth, cluster.host.bandwidth) == pytest.approx((rate, rate), rel=1e-3)
    fast = setup_of(gpus="8", pcie=slot).job.cluster
    assert fast.links[0].bandwidth == 450e9  # NVLink joins the GPUs of this host
    words = setup_of(gpu="RTX 3090", gpu_mem_gb="24", gpus="2", pp="1", interconnect="PCIe, slow lanes").job.cluster
    assert words.links[0].bandwidth == pytest.approx(3.94e9)  # 3.0 x4


def test_a_glm_has_heads_of_128() -> None:
    """config.json of zai-org/GLM-4.5 and GLM-4.5-Air: head_dim 128, use_qk_norm true and false."""
    shape = {"layers": "46", "hidden": "4096", "heads": "96", "kv_heads": "8", "ffn": "10944", "vocab": "151552"}
    small, large = (setup_of(model=name, **shape, pp="1").job.model for name in ("GLM-4.5-Air", "GLM-4.6"))
    assert (small.head_size, small.qk_norm, large.head_size, large.qk_norm) == (128, "none", 128, "head")


def test_rows_of_quality_c_are_priced_and_never_scored() -> None:
    cells = {"model": "Llama-3-8B", "gpu": "H100", "gpus": "8", "seq": "8192", "gbs": "64", "measured_step_s": "3"}
    good, bad = (score(run_of({**cells, "mem_bytes": "5e9", "oom": "1", "quality": each})) for each in ("B", "C"))
    assert (good.measured_seconds, good.measured_memory_bytes, good.run.oom) == (3.0, 5e9, 1)
    assert bad.is_unmeasured
    assert bad.predicted_seconds == good.predicted_seconds
    assert {row["source_set"] for row in CELLS if row["quality"] == "C"} > {"mbridge-cards-ft"}


def test_a_dispatcher_in_the_flags_sends_once_to_each_host() -> None:
    moe = {"arch": "moe", "n_experts": "8", "top_k": "2", "moe_ffn": "14336"}
    assert setup_of(flags="TE + DeepEP; GA=4", **moe).job.engine.communication.dispatches_once_per_host
    assert not setup_of(**moe).job.engine.communication.dispatches_once_per_host


@pytest.mark.parametrize(
    ("row", "within"),
    [("P0801", 0.07), ("P0803", 0.05), ("P0799", 0.05), ("P0222", 0.15), ("P0066", 0.05), ("P0127", 0.05)],
)
def test_peaks_of_fine_tuning_are_near_the_published_ones(row: str, within: float) -> None:
    """A million tokens under TRL with parts of 256 tokens at the loss, adapters under FSDP1, and whole models."""
    found = score(next(run for run in RUNS if run.id == row))
    if found.run.oom:
        assert found.peak_bytes is not None
        assert found.peak_bytes > 80e9
    else:
        assert found.memory_error == pytest.approx(0, abs=within)


@pytest.mark.parametrize(("row", "tiles"), [("P0744", 1), ("P0745", 113), ("P0747", 123), ("P0802", 26)])
def test_a_tiled_feed_forward_block_has_as_many_tiles_as_its_program_makes(row: str, tiles: int) -> None:
    """ALST runs 3.7 million tokens on a host of H100 where a whole block runs 2.4 million (its table 1)."""
    found = score(next(run for run in RUNS if run.id == row))
    assert found.setup is not None
    assert found.setup.job.training.mlp_tiles == tiles
    assert found.verdict != "does not fit"
