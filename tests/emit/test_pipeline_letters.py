"""Published pipeline layouts of Megatron-Core, read, priced, and written as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from project_tools import load_tool

from planner.cost.estimate import estimate
from planner.emit.bundle import bundle_of
from planner.emit.read.facts import facts_of
from planner.emit.read.readers import READERS
from planner.emit.target import How
from planner.errors import InputError
from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.load import load_job
from planner.specs.pipeline_letters import letters_of, pieces_of_letters

PUBLISHED = yaml.safe_load(Path("tests/published/pipeline_layouts.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("to", "engine"), [("megatron", "megatron"), ("megatron-bridge", "megatron-bridge"), ("ms-swift", "megatron")]
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_pipeline_layouts_are_read_priced_and_written_as_they_are(name: str, to: str, engine: str) -> None:
    recipe = PUBLISHED[name]
    job = load_job(
        model=recipe["model"],
        cluster="dgx-h100",
        nodes=128,
        engine=engine,
        global_batch_size=4096,
        sequence_length=4096,
    )
    quoted = re.sub(r"layout (\S+)", r"layout '\1'", recipe["options"])
    script = f"torchrun pretrain_gpt.py --num-layers {job.model.num_layers} {quoted}"
    reader = next(each for each in READERS if each.recognises(script))
    found = facts_of(reader.target, reader.values(script), model=job.model)
    assert not found.doubts
    text = f"{recipe['degrees']},{recipe['places']}"
    wanted = parse_layout(text, num_layers=job.model.num_layers, num_devices=1024)
    for key in ("tp", "pp", "cp", "ep"):
        assert found.fields.get(f"layout.{key}", 1) == getattr(wanted, key), key
    for key in ("interleave", "layers_per_stage", "mtp"):
        assert found.fields.get(f"layout.{key}", ()) == getattr(wanted, key), key
    plan = plan_for_layout(job, wanted)
    assert plan.step_seconds == pytest.approx(estimate(job, wanted).step_seconds)
    assert recipe["letters"] in bundle_of(plan, to, how=How(smoke=True), force_unfit=True).texts["run.sh"]


@pytest.mark.slow
def test_the_plan_is_at_most_a_hundredth_slower_than_a_published_pipeline_layout() -> None:
    slower = load_tool("plans").published_pipelines()
    assert {*slower} == {*PUBLISHED}
    assert max(slower.values()) <= 1.01


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
