"""The plan document: complete, reproducible, and never overwritten by accident."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import pytest

from planner.cost.estimate import estimate
from planner.errors import EnvironmentProblem, ExitCode, InputError
from planner.plan import layout_to_dict, plan_to_json, write_plan
from planner.plan_file import plan_from_json
from planner.reading import read_plan
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.job import PoolJob
from planner.specs.load import load_job


@pytest.fixture(scope="module")
def made():
    job = load_job(
        model="llama2-7b",
        cluster="dgx-a100",
        training=None,
        engine="torch",
        nodes=2,
        gpus=None,
        sequence_length=4096,
        global_batch_size=64,
        precision=None,
        settings=("cluster.price=2.35 USD/h",),
    )
    return search(job, Constraints.parse(["pp=2", "mbs<=2"], ["tp=8"]))


def test_a_written_plan_reads_back_equal(made):
    again = plan_from_json(plan_to_json(made))
    assert again == made
    assert plan_to_json(again) == plan_to_json(made)


def test_a_plan_of_an_older_planner_may_have_a_deadline_without_tokens(made, tmp_path):
    plan = replace(made, training=made.training.model_copy(update={"deadline": 3600.0}))
    assert plan.training.tokens is None
    assert plan_from_json(plan_to_json(plan)) == plan
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").training.deadline == 3600.0


def test_the_documents_inside_are_whole(made):
    again = plan_from_json(plan_to_json(made))
    job = PoolJob(
        model=again.model,
        cluster=again.cluster,
        training=again.training,
        engine=again.engine,
        calibration=again.calibration[0],
        headroom=again.options.headroom,
        spread=again.memory_spread,
    )
    assert estimate(job, again.layout).step_seconds == made.step_seconds
    assert estimate(job, again.layout).memory == made.memory


def test_the_keys_of_the_contract_are_there(made):
    data = json.loads(plan_to_json(made))
    contract = {
        "format", "model", "cluster", "training", "engine", "layout", "fits", "verdict", "chance_of_fitting",
        "step_seconds", "low_step_seconds",
        "high_step_seconds", "tokens_per_second_per_device", "mfu", "hfu", "memory", "time", "runners_up",
        "certificate",
    }  # fmt: skip
    assert contract <= set(data)
    stage_keys = {"stage", "total_bytes", "limit_bytes", "lines", "fits", "verdict", "chance_of_fitting"}
    assert stage_keys <= set(data["memory"][0])
    assert {"name", "stage", "num_bytes", "formula", "source"} <= set(data["memory"][0]["lines"][0])
    assert {"name", "stage", "busy_seconds", "hidden_seconds", "formula", "source"} <= set(data["time"][0])
    assert data["layout"] == layout_to_dict(made.layout)
    assert data["options"]["pins"] == ["pp=2", "mbs<=2"]
    assert "time" not in data["certificate"]


def test_totals_in_the_document_are_sums_of_its_lines(made):
    data = json.loads(plan_to_json(made))
    for stage in data["memory"]:
        assert stage["total_bytes"] == pytest.approx(sum(line["num_bytes"] for line in stage["lines"]), rel=1e-12)
    exposed = sum(line["busy_seconds"] - line["hidden_seconds"] for line in data["time"])
    assert data["step_seconds"] == pytest.approx(exposed, rel=1e-12)


def test_an_existing_file_is_kept(made, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("mine")
    with pytest.raises(InputError, match="--force"):
        write_plan(made, path)
    assert path.read_text() == "mine"
    write_plan(made, path, replace=True)
    assert read_plan(path) == made
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert stat.S_ISREG(path.stat().st_mode)


def test_what_is_no_file_is_never_replaced(made, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="not a file"):
        write_plan(made, tmp_path / "folder", replace=True)


def test_a_folder_that_cannot_be_written_is_an_environment_problem(made, tmp_path):
    with pytest.raises(EnvironmentProblem) as error:
        write_plan(made, tmp_path / "missing" / "plan.json")
    assert error.value.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 3}',
        '{"format": 2}',
        '{"format": 1}',
        "[" * 100_000,
        '{"format": 1, "model": 3}',
        '"x"',
        "NaN",
    ],
)
def test_what_is_no_plan_is_refused_without_a_traceback(text):
    with pytest.raises(InputError):
        plan_from_json(text)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"traceEvents": []}, "it is a timeline"),
        ({"format": 1, "front": [], "sizes": []}, "it is a comparison of cluster sizes"),
        ({"model_type": "llama"}, "give it as MODEL, with CLUSTER and --layout"),
        (
            {"format": 7, "layout": {}},
            "not a valid plan document of format 3, which this planner reads: it has format 7",
        ),
        ({"name": "llama", "num_layers": 3}, "its keys are name, num_layers"),
        ({}, "its keys are none"),
        ([], "a JSON list"),
        ({"\x1b[2J": 1}, "its keys are \\\\x1b"),
    ],
)
def test_another_document_is_named_and_what_to_give_instead(document, words):
    with pytest.raises(InputError, match=words) as error:
        plan_from_json(json.dumps(document), name="it.json")
    assert error.value.mistakes[0].hint
    assert str(error.value).replace("\n", "").isprintable()


def test_a_file_that_is_not_json_names_both_ways():
    with pytest.raises(InputError, match="not JSON") as error:
        plan_from_json("name: llama3-8b")
    assert "-o plan.json" in error.value.mistakes[0].hint
    assert "--layout" in error.value.mistakes[0].hint


@pytest.mark.parametrize("key", ["model", "cluster", "training", "engine", "layout", "memory", "time", "fits"])
def test_a_damaged_plan_is_refused(made, key):
    data = json.loads(plan_to_json(made))
    data[key] = {"name": "[/bold]", "unknown": 1}
    if key == "fits":
        del data[key]
    with pytest.raises(InputError):
        plan_from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("layout",), 8),
        (("layout", "tp"), "8"),
        (("layout", "pp"), 0),
        (("layout", "mbs"), 1.5),
        (("layout", "layers_per_stage", 0), None),
        (("layout", "recompute"), []),
        (("layout", "schedule"), "fast"),
        (("runners_up", 0, "layout", "dp"), -1),
        (("step_seconds",), 0),
        (("high_step_seconds",), "1"),
        (("mfu",), None),
        (("memory", 0, "limit_bytes"), 0),
        (("memory", 0, "lines", 0, "num_bytes"), "1"),
        (("time", 0, "busy_seconds"), "1"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_where_it_is_read(made, path, value):
    data = json.loads(plan_to_json(made))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(InputError, match="not a valid plan document"):
        plan_from_json(json.dumps(data))


def test_missing_and_binary_files_are_explained(tmp_path):
    with pytest.raises(EnvironmentProblem, match="cannot read"):
        read_plan(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_plan(tmp_path / "binary")
