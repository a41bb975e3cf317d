"""The Python API: its names are stable, importing it is cheap, and its answers equal those of the commands."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from xml.etree import ElementTree as ET

import pytest

import planner
from planner.cli import main
from planner.cost.estimate import estimate
from planner.errors import EnvironmentProblem, InputError
from planner.specs.by_name import engine_names
from planner.units import format_bytes

SMALL = {"gpus": 2, "global_batch": 8}
SMALL_WORDS = ["tiny-gpt", "dgx-a100", "--gpus", "2", "--global-batch", "8"]
NAMES = {
    "Plan", "PlannerError", "clusters", "compare_clusters", "compare_sizes", "engine_profiles",
    "estimate_layout", "explain_layout", "models", "plan_job", "read_plan", "shortfall",
}  # fmt: skip


def small_plan(**keywords) -> planner.Plan:
    return planner.plan_job("tiny-gpt", "dgx-a100", **SMALL, **keywords)


# --- names and imports --------------------------------------------------------------------------------------------


def test_names_stay() -> None:
    assert set(planner.__all__) == NAMES
    assert set(dir(planner)) >= NAMES
    assert all(getattr(planner, name).__doc__ for name in NAMES)
    assert (files("planner") / "py.typed").is_file()  # what makes type checkers read the annotations
    with pytest.raises(AttributeError, match="plan_jobs"):
        _ = planner.plan_jobs


def test_no_name_is_that_of_a_submodule() -> None:
    submodules = {module.name for module in pkgutil.iter_modules(planner.__path__)}
    assert {"plan", "commands", "api"} <= submodules
    assert not submodules & NAMES


def test_importing_planner_is_cheap() -> None:
    program = "import sys; before = set(sys.modules); import planner; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['planner', 'planner.version']"


CALLS = """
import importlib, pkgutil, random, sys, tempfile
import planner
modules = [each.name for each in pkgutil.walk_packages(planner.__path__, "planner.")]
modules = [each for each in modules if not each.startswith("planner.trainer.") and each != "planner.__main__"]
random.Random(int(sys.argv[1])).shuffle(modules)
for each in modules:
    importlib.import_module(each)
job = {"model": "tiny-gpt", "cluster": "dgx-a100", "global_batch": 8}
plan = planner.plan_job(**job, gpus=2)
assert isinstance(plan, planner.Plan)
assert planner.estimate_layout(**job, gpus=2, layout=plan.layout).step_seconds == plan.step_seconds
assert planner.explain_layout(plan).plan is plan
with tempfile.NamedTemporaryFile("w") as file:
    file.write(plan.to_json())
    file.flush()
    assert planner.read_plan(file.name).step_seconds == plan.step_seconds
assert planner.compare_sizes(**job, nodes=[1]).fastest
assert planner.models() and planner.clusters() and planner.engine_profiles()
print(len(modules))
"""


@pytest.mark.parametrize("seed", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3))])
def test_names_hold_whatever_was_imported_before(seed: int) -> None:
    command = [sys.executable, "-c", CALLS, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


# --- answers of the commands --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "words", "path", "value"),
    [
        ({"nodes": 2, "global_batch": "16"}, "--nodes 2 --global-batch 16", "cluster.hosts", 2),
        ({"gpus": 2}, "--gpus 2", "cluster.devices_per_host", 2),
        ({"seq_len": "1k"}, "--seq-len 1k", "training.sequence_length", 1024),
        ({"seq_len": 128}, "--seq-len 128", "training.sequence_length", 128),
        ({"global_batch": "8..10"}, "--global-batch 8..10", "batch_choice.most", 10),
        ({"engine": "megatron"}, "--engine megatron", "engine.name", "megatron"),
        ({"precision": "fp16"}, "--precision fp16", "training.precision", "fp16"),
        ({"headroom": 0.5}, "--headroom 50%", "options.headroom", 0.5),
        ({"top": 1}, "--top 1", "runners_up.1", None),
        ({"pin": "tp=2,mbs<=1"}, "--pin tp=2,mbs<=1", "options.pins", ["tp=2", "mbs<=1"]),
        ({"pin": ["tp=2", "pp=1"]}, "--pin tp=2 --pin pp=1", "options.pins", ["tp=2", "pp=1"]),
        ({"forbid": ["zero=1", "mbs=1"]}, "--forbid zero=1 --forbid mbs=1", "options.forbidden", ["zero=1", "mbs=1"]),
        ({"objective": "gpus"}, "--objective gpus", "certificate.objective", "gpus"),
        ({"check": True, "pin": "tp=2"}, "--check --pin tp=2", "certificate.num_bounds_checked", 12),
        ({"solver": "highs"}, "--solver highs", "certificate.solver", "highs"),
        ({"settings": "device.memory=40GiB"}, "--set device.memory=40GiB", "cluster.device.memory", "40 GiB"),
        ({"settings": ["training.seed=7"]}, "--set training.seed=7", "training.seed", 7),
        ({"allow_tp_across_nodes": True}, "--allow-tp-across-nodes", "options.allow_tp_across_nodes", True),
        ({"allow_offload": True, "headroom": None}, "--allow-offload", "options.allow_offload", True),
        ({"training": "own.yaml"}, "own.yaml", "training.seed", 9),
        ({"calibration": "own.json"}, "--calibration own.json", "calibration.0.slowdown", 1.5),
    ],
)
def test_a_keyword_is_the_option_of_the_command(
    keywords, words: str, path: str, value: object, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("seed: 9\n")
    (tmp_path / "own.json").write_text('{"entries": [{"device": "a100-80gb", "slowdown": 1.5}]}')
    if "nodes" not in keywords:
        keywords, words = {"gpus": 2} | keywords, f"--gpus 2 {words}"
    text = planner.plan_job("tiny-llama", "dgx-a100", **({"global_batch": 8} | keywords)).to_json()
    assert main(["plan", "tiny-llama", "dgx-a100", "--global-batch", "8", *words.split(), "--json"]) == 0
    assert text == capsys.readouterr().out
    found = json.loads(text)
    for key in path.split("."):
        found = found[key] if isinstance(found, dict) else dict(enumerate(found)).get(int(key))
    assert found == value


def test_a_layout_is_priced_and_taken_apart_as_by_the_command(tmp_path, capsys) -> None:
    plan = planner.estimate_layout("tiny-gpt", "dgx-a100", layout="tp=2,mbs=2", **SMALL)
    assert (plan.layout.tp, plan.layout.mbs, plan.fits) == (2, 2, True)
    assert [each.key for each in plan.assumed] == ["sequence_length", "sp", "recompute"]
    whole = planner.estimate_layout("tiny-gpt", "dgx-a100", layout=plan.layout, **SMALL)
    assert whole == replace(plan, assumed=plan.assumed[:1])
    found = planner.explain_layout(plan, why_not="tp=1", what_if=["", "nvlink.bandwidth=x2"], collectives=True)
    words = ["--layout", "tp=2,mbs=2", "--why-not", "tp=1", "--what-if", "nvlink.bandwidth=x2", "--collectives"]
    assert main(["explain", *SMALL_WORDS, *words, "--what-if", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads(found.to_json()) == document
    assert document["sensitivity"]
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert planner.read_plan(str(tmp_path / "plan.json")).to_json() == plan.to_json()


def test_each_size_has_the_layout_that_a_search_of_its_own_finds() -> None:
    found = planner.compare_sizes("tiny-gpt", "dgx-a100", nodes=range(1, 4), global_batch=48, pin="tp=1")
    assert [hosts for hosts, _ in found.sizes] == [1, 2, 3]
    for hosts, point in found.sizes:
        alone = planner.plan_job("tiny-gpt", "dgx-a100", nodes=hosts, global_batch=48, pin="tp=1")
        assert point is not None
        assert point.step_seconds == pytest.approx(alone.certificate.objective_seconds)


def test_what_is_shipped_is_what_the_commands_list(capsys) -> None:
    for function, command in ((planner.models, "models"), (planner.clusters, "clusters")):
        assert main([command, "--json"]) == 0
        assert function() == json.loads(capsys.readouterr().out)
    engines = {each["name"]: each for each in planner.engine_profiles()}
    assert tuple(engines) == engine_names()
    assert "interleaved" in engines["megatron"]["schedules"]


# --- what cannot be done ------------------------------------------------------------------------------------------


def test_where_nothing_fits_the_plan_is_the_nearest_layout_and_its_shortfall_knows_what_would_fit() -> None:
    job = {"model": "llama3-8b", "cluster": "dgx-a100", "gpus": 8, "seq_len": 2048, "global_batch": 8}
    nearest = planner.plan_job(**job, pin="tp=1,pp=1,zero=0")
    assert (nearest.fits, nearest.layout.zero, nearest.certificate) == (False, 0, None)
    assert format_bytes(nearest.worst_stage.total_bytes) == "138 GiB"
    lacking = planner.shortfall(nearest)
    lifted = {each.constraint: each.remedy for each in lacking.lifted_pins()}
    alone = planner.plan_job(**job, pin="tp=1,pp=1")
    assert lifted["zero=0"].step_seconds == pytest.approx(alone.certificate.objective_seconds)
    # every copy of the states is whole
    assert not [each for each in lacking.remedies() if "adapters" not in each.change]


def test_limits_of_an_engines_programs_are_no_pins_of_the_user() -> None:
    job = {"cluster": "dgx-h100", "gpus": 8, "seq_len": 4096, "engine": "fsdp"}  # no program of it has sp=1
    nothing = planner.plan_job("llama3-70b", **job, global_batch=64, pin="mbs=1")
    assert [each.constraint for each in planner.shortfall(nothing).lifted_pins()] == ["mbs=1"]
    with pytest.raises(InputError) as illegal:
        planner.plan_job("llama3-8b", **job, global_batch=63, pin="dp=8")
    (mistake,) = illegal.value.mistakes
    assert mistake.message.startswith("no layout meets the pins dp=8: dp 8 * mbs 1 = 8 does not divide")


def test_forbidden_sequence_parallelism_leaves_tensor_parallelism() -> None:
    job = {"cluster": "dgx-h100", "gpus": 8, "seq_len": 4096, "global_batch": 64, "engine": "megatron"}
    layout = planner.plan_job("llama3-8b", **job, pin="tp=8", forbid="tp>=2,sp=1").layout
    assert (layout.tp, layout.sp) == (8, 0)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"objective": "speed"}, "--objective: 'speed'"),
        ({"solver": "guess"}, "--solver: 'guess'"),
        ({"nodes": "1..8"}, "compare_sizes"),
        ({"nodes": range(1, 9)}, "compare_sizes"),
        ({"seq_len": "long"}, "--seq-len"),
        ({"gpus": 3, "nodes": 1}, "--nodes and --gpus"),
        ({"headroom": 1.0}, "--headroom"),
        ({"pin": "tq=1"}, "tq"),
        ({"pin": ["tp=1", "tp=2"]}, "tp"),
    ],
)
def test_what_the_command_refuses_raises(keywords, words: str) -> None:
    with pytest.raises(InputError, match=words):
        planner.plan_job("tiny-gpt", "dgx-a100", **({"global_batch": 8} | keywords))


def test_a_misspelt_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="seqlen"):
        small_plan(seqlen=128)


def test_sizes_start_at_one_host_and_layouts_have_one_batch(tmp_path) -> None:
    with pytest.raises(InputError, match="at least one host"):
        planner.compare_sizes("tiny-gpt", "dgx-a100", nodes=range(3), global_batch=8)
    with pytest.raises(InputError, match="one batch size"):
        planner.estimate_layout("tiny-gpt", "dgx-a100", layout="tp=1", gpus=2, global_batch="8..16")
    with pytest.raises(EnvironmentProblem, match=r"missing\.json"):
        planner.read_plan(tmp_path / "missing.json")


def test_what_an_imported_model_leaves_out_is_a_warning_where_it_was_asked_for(tmp_path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
        "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 1024, "auto_map": {"AutoModel": "x"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="auto_map") as caught:
        planner.estimate_layout(str(tmp_path), "dgx-a100", layout="tp=1", **SMALL)
    assert {warning.filename for warning in caught} == {__file__}


# --- a plan in a notebook, and questions that only price ----------------------------------------------------------


def test_a_plan_is_a_line_and_a_table() -> None:
    job = {"cluster": "dgx-h100", "gpus": 8, "seq_len": 2048, "global_batch": 64}
    plan = planner.estimate_layout("llama3-8b", layout="tp=2,dp=4,zero=1", **job)
    assert repr(plan).startswith("<Plan: llama3-8b; 8 of 8 devices of dgx-h100; tp=2, dp=4, zero=1; ")
    assert "\n" not in repr(plan)
    assert len(repr(plan)) < 300
    hostile = replace(plan, model=plan.model.model_copy(update={"name": "<script>alert('&')</script>"}))
    table = ET.fromstring(hostile._repr_html_())
    rows = {row[0].text: row[1].text for row in table}
    assert rows["model"] == "<script>alert('&')</script>"
    assert rows["memory"].startswith("fits: ")
    assert [each.tag for each in table.iter()] == ["table", *["tr", "th", "td"] * len(rows)]


def test_a_question_may_only_price_the_layout(monkeypatch) -> None:
    """Without a search, the answer is the price of the same layout for the changed job."""
    job = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "seq_len": 2048, "layout": "tp=2,zero=1"}
    plan = planner.estimate_layout(**job, global_batch=64)
    monkeypatch.setattr("planner.search.search.search", None)  # whoever searches fails
    monkeypatch.setattr("planner.search.search.fastest_layout", None)
    monkeypatch.setattr("planner.answers.deadline.search_in_time", None)
    found = planner.explain_layout(plan, what_if=["global_batch=x2", ""], search=False).sections
    twice = planner.estimate_layout(**job, global_batch=128)
    (answer,) = found.what_if
    assert answer.same_layout.step_seconds == twice.step_seconds
    assert answer.outcome.difference.after.step_seconds == twice.step_seconds
    memory = next(each for each in found.sensitivity.gains if each.resource == "peak FLOP/s")
    assert "waterfall" not in found.model_fields_set
    faster = planner.estimate_layout(**job, global_batch=64, settings=["device.peak.bf16=1087.9TFLOP/s"])
    assert memory.gain == memory.same_layout_gain == pytest.approx(1 - faster.step_seconds / plan.step_seconds)


def test_a_question_that_only_prices_prices_once(monkeypatch) -> None:
    """Each price of a layout calls `estimate` once; the label of the engine's own corrections is another price."""
    plan = planner.estimate_layout("llama3-8b", "dgx-h100", gpus=8, seq_len=2048, layout="tp=2,zero=1", global_batch=64)
    asked = []
    monkeypatch.setattr("planner.search.given.estimate", lambda *given: asked.append(given) or estimate(*given))
    planner.explain_layout(plan, what_if="global_batch=x2", search=False)
    own = [job for job, layout in asked if layout == plan.layout and job.training.global_batch_size == 128]
    assert len(own) == len(asked) <= 2
