"""Plans on racks: the search chooses the number of hosts per rack that a job takes, and obeys the user's choice."""

from __future__ import annotations

import json

import numpy as np
import pytest

from planner.api import estimate_layout
from planner.errors import InputError
from planner.plan import layout_to_dict
from planner.plan_file import layout_from_dict, plan_from_json
from planner.search.given import plan_for_layout
from planner.search.reporter import Reporter
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.search.space.segments import segments_to_try
from planner.show.words import segment_words, short_layout
from planner.specs.load import load_job

DEEPSEEK = {
    "model": "deepseek-v3", "cluster": "gb200-nvl72", "engine": "megatron-bridge", "gpus": 256, "precision": "fp8",
    "global_batch_size": 4096,
}  # fmt: skip
RECIPE = "tp=1,pp=4,ep=64,interleave=4,zero=1,mbs=1"


class _Notes(Reporter):
    def __init__(self):
        self.notes = []

    def noted(self, note):
        self.notes.append(note)


@pytest.fixture(scope="module")
def recipe():
    """The layout of a run on 256 GB200, priced as by `planner explain`."""
    reporter, given = _Notes(), {**DEEPSEEK, "global_batch": 4096, "seq_len": 4096}
    del given["global_batch_size"]
    plan = estimate_layout(**given, layout=RECIPE, reporter=reporter)
    return plan, reporter.notes


def plan(pins=(), forbids=(), **settings):
    job = load_job(**DEEPSEEK, sequence_length=4096, settings=tuple(f"cluster.{k}={v}" for k, v in settings.items()))
    return search(job, Constraints.parse(pins, forbids))


def test_a_plan_is_no_slower_than_the_recipe_whose_experts_stay_in_a_rack(recipe):
    priced, _ = recipe
    assert priced.layout.segment == 16
    assert {each.key: each.value for each in priced.assumed}["segment"] == "16"
    assert priced.step_seconds < 20, "34 s with experts that straddle racks"
    found = plan()
    assert found.step_seconds <= priced.step_seconds
    assert found.layout.segment == 16
    assert found.layout.world_size == 256


@pytest.mark.parametrize(
    ("pins", "forbids", "settings", "segments"),
    [
        (["segment=18"], [], {}, {18}),
        pytest.param(["segment=4"], [], {}, {4}, marks=pytest.mark.slow),
        (["segment<=8"], [], {}, {8}),
        ([], ["segment=16"], {}, {8, 18}),
        ([], [], {"segment": 8}, {8}),
        ([], [], {"domains": 4}, {16}),
    ],
)
def test_pins_and_the_cluster_document_decide(pins, forbids, settings, segments):
    found = plan([*pins, "tp=1,pp=4"], forbids, **settings)  # as the recipe divides the model
    assert found.layout.segment in segments


def test_a_pin_that_no_rack_can_give_is_refused():
    with pytest.raises(InputError, match="segment 20 is more than the 18 hosts of a scale-up domain"):
        plan(["segment=20"])
    with pytest.raises(InputError, match="segment 8 takes hosts of 8 domains, and there are 4"):
        plan(["segment=8", "pp=4", "dp=64"], domains=4)


def test_documents_and_words_have_the_segment(recipe):
    priced, _ = recipe
    assert "segment=16" in short_layout(priced.layout)
    assert json.loads(priced.to_json())["layout"]["segment"] == 16
    assert plan_from_json(priced.to_json()).layout == priced.layout
    (cluster,) = priced.cluster.pools
    words = "16 of the 18 hosts of each of 4 nvlink domains"
    assert segment_words(cluster, priced.layout) == f"{words}; as many are assumed to be free"
    assert segment_words(cluster.model_copy(update={"domains": 4}), priced.layout) == words
    without = {key: value for key, value in layout_to_dict(priced.layout).items() if key != "segment"}
    assert layout_from_dict(without).segment == 0, "as documents before there were segments: racks packed full"


def test_where_there_are_no_racks_no_segment_is_said():
    job = load_job(model="llama3-8b", cluster="gb200-nvl72", engine="megatron", gpus=64, global_batch_size=128)
    found = search(job, Constraints())
    assert found.layout.segment == 0
    assert "segment" not in json.loads(found.to_json())["layout"]
    assert plan_for_layout(job, found.layout).step_seconds == found.step_seconds


def test_only_segments_that_hold_whole_groups_of_tensor_parallelism_are_tried():
    """Hosts of 4: a tp group of 16 takes 4 hosts; 64 hosts are divided into 4, 8 or 16 each, or 18 and the rest."""
    job = load_job(**DEEPSEEK, sequence_length=4096).pools[0]
    tp, inner, pp = (np.array([each]) for each in (16, 64, 4))
    _, tried = segments_to_try(job, Constraints.parse([], ["segment=1"]), tp, inner, pp)
    assert {*tried.tolist()} == {4, 8, 16}
