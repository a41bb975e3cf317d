"""Published pipeline layouts of Megatron-Core, read, priced, and written as they are."""

from __future__ import annotations

import re

import pytest

from planner.cost.estimate import estimate
from planner.emit.bundle import bundle_of
from planner.emit.read.facts import facts_of
from planner.emit.read.readers import READERS
from planner.emit.target import How
from planner.errors import InputError
from planner.layout_text import parse_layout
from planner.plan_parts import WITHIN
from planner.search.footprint import NothingFits
from planner.search.given import given_layout, plan_for_layout
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.load import load_job
from planner.specs.pipeline_letters import letters_of, pieces_of_letters

DEEPSEEK = "--tensor-model-parallel-size 2 --expert-model-parallel-size 64 --mtp-num-layers 1"
QWEN = "--tensor-model-parallel-size 4 --context-parallel-size 2 --expert-model-parallel-size 8"
ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
PUBLISHED = {
    # Megatron-Bridge 067f987d, recipes/deepseek/h100/deepseek_v3.py, layout_map of 16 stages
    "16 stages": (
        "deepseek-v3",
        f"{DEEPSEEK} --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout Et*4|(t*4|)*14tmL",
        "layers_per_stage=15*4/1",
        "Et*4|(t*4|)*14tmL",
    ),
    # Megatron-Bridge 067f987d, perf_recipes/deepseek/h100/deepseek_v3.py
    "32 chunks": (
        "deepseek-v3",
        f"{DEEPSEEK} --pipeline-model-parallel-size 8 --pipeline-model-parallel-layout Et|(tt|)*30mL",
        "interleave=4,layers_per_stage=1/30*2/0",
        "Et|(tt|)*30mL",
    ),
    # Megatron-LM d98e8a64, core/transformer/pipeline_parallel_layer_layout.py; Megatron-Bridge, mtp_standalone=True
    "prediction apart": (
        "deepseek-v3",
        f"{DEEPSEEK} --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout Et*3|(tt|)*29m|L",
        "interleave=2,layers_per_stage=3/29*2/0/0,mtp=30",
        "Et*3|(tt|)*29m|L",
    ),
    # Megatron-Bridge 067f987d, recipes/qwen/h100/qwen3_moe.py, pretraining on 256 H100
    "ends count as layers": (
        "qwen3-235b-a22b",
        f"{QWEN} --pipeline-model-parallel-size 16 {ENDS}",
        "layers_per_stage=5/14*6/5",
        "Et*5|(t*6|)*14t*5L",
    ),
    # the same options where the chunks hold one layer each: 94 layers and two ends in 96 chunks
    "a layer a chunk": (
        "qwen3-235b-a22b",
        f"{QWEN} --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 6 {ENDS}",
        "interleave=6,layers_per_stage=0/94*1/0",
        "E|(t|)*94L",
    ),
}


@pytest.mark.parametrize(
    ("to", "engine"), [("megatron", "megatron"), ("megatron-bridge", "megatron-bridge"), ("ms-swift", "megatron")]
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_pipeline_layouts_are_read_priced_and_written_as_they_are(name: str, to: str, engine: str) -> None:
    model, options, layout, letters = PUBLISHED[name]
    job = load_job(
        model=model, cluster="dgx-h100", nodes=128, engine=engine, global_batch_size=4096, sequence_length=4096
    )
    quoted = re.sub(r"layout (\S+)", r"layout '\1'", options)
    script = f"torchrun pretrain_gpt.py --num-layers {job.model.num_layers} {quoted}"
    reader = next(each for each in READERS if each.recognises(script))
    found = facts_of(reader.target, reader.values(script), model=job.model)
    assert not found.doubts
    pp = found.fields["layout.pp"]
    wanted = parse_layout(f"tp=2,pp={pp},ep=64,zero=1,{layout}", num_layers=job.model.num_layers, num_devices=1024)
    for key in ("interleave", "layers_per_stage", "mtp"):
        assert found.fields.get(f"layout.{key}", ()) == getattr(wanted, key), key
    plan = plan_for_layout(job, wanted)
    assert plan.step_seconds == pytest.approx(estimate(job, wanted).step_seconds)
    assert letters in bundle_of(plan, to, how=How(smoke=True), force_unfit=True).texts["run.sh"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-235b-a22b"])
def test_the_plan_is_at_most_a_hundredth_slower_than_a_published_pipeline_layout(model: str) -> None:
    job = load_job(
        model=model, cluster="dgx-h100", nodes=128, engine="megatron", global_batch_size=4096, sequence_length=4096
    )
    plan = search(job, Constraints(), within=WITHIN, top=0)
    assert not isinstance(plan, NothingFits)
    for _, options, layout, _ in (each for each in PUBLISHED.values() if each[0] == model):
        tp, ep, pp = (
            re.search(rf"--{axis}-model-parallel-size (\d+)", options)[1] for axis in ("tensor", "expert", "pipeline")
        )
        published, _ = given_layout(job, f"tp={tp},pp={pp},ep={ep},etp=1,zero=1,{layout}")
        own = estimate(job, published)
        assert plan.step_seconds <= 1.01 * own.step_seconds


@pytest.mark.parametrize("text", ["Et|tL|t", "Et|m|tL", "t|tL", "Et|t", "Et|tLL", "EEt|tL", "tE|tL"])
def test_letters_that_megatron_refuses_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="no pipeline layout"):
        pieces_of_letters(text)


@pytest.mark.parametrize(("layers", "number", "mtp"), [((3, 2, 0), 1, (2,)), ((0, 1, 2, 0, 0), 2, (3,)), ((5,), 0, ())])
def test_letters_are_the_inverse_of_the_pieces(layers: tuple[int, ...], number: int, mtp: tuple[int, ...]) -> None:
    found = pieces_of_letters(letters_of(layers, number, mtp))
    assert found.layers == layers
    assert set(found.mtp) == set(mtp)
    assert len(found.mtp) == number
