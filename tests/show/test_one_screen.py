"""The answer of `plan` and the summary of `explain` fit on a screen; sections open by name and hold all the rest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import planner
from planner.answers.report import Sections
from planner.cli import main
from planner.errors import ExitCode
from planner.layout import Assumed, Layout
from planner.search.near_ties import differences
from planner.show.explain import SECTIONS, explanation, overview
from planner.show.screen import Screen, to_text
from planner.units import format_seconds

EIGHT = ["llama3-8b", "dgx-h100", "--gpus", "8", "--seq-len", "8192"]
SEVENTY = ["llama3-70b", "dgx-h100", "--seq-len", "8192", "--global-batch"]
LORA = ["--set", "training.lora_rank=16", "--set", "training.frozen_weights=nf4"]
RUN = ["--failures", "--set", "training.tokens=15T", "--set", "training.deadline=10d"]
LARGE = ["--gpus", "2048", "--seq-len", "4096", "--global-batch", "15360", "--precision", "fp8", "--engine", "megatron"]
JOBS = {
    "8B": ([*EIGHT, "--global-batch", "256"], 0),
    "a batch of a range, a missed deadline and failures": ([*EIGHT, "--global-batch", "64..96", *RUN], 0),
    "adapters": (["llama3-8b", "g6e", "--global-batch", "64", "--engine", "fsdp", *LORA], 0),
    "offload": ([*SEVENTY, "32", "--engine", "megatron", "--allow-offload"], 0),
    "a card that nobody measured": (["llama3-8b", "rtx6000-ada-box", "--seq-len", "4096", "--global-batch", "64"], 0),
    "may not fit": ([*EIGHT[:2], "--gpus", "2", "--seq-len", "8192", "--global-batch", "64", "--risk", "1%"], 3),
    "nothing fits": ([*SEVENTY, "32"], 3),
    "mixed": pytest.param(["llama3-8b", "mixed-a100-h100", "--seq-len", "8192", "--global-batch", "64"], 0),
    "70B": pytest.param([*SEVENTY, "512", "--nodes", "16", "--engine", "megatron"], 0, marks=pytest.mark.slow),
    "DeepSeek-V3": pytest.param(["deepseek-v3", "dgx-h100", *LARGE], 0, marks=pytest.mark.slow),
}


def said(capsys, *argv: str, code: int = 0) -> str:
    assert main(list(argv)) == code
    return capsys.readouterr().out


@pytest.mark.parametrize(("job", "code"), JOBS.values(), ids=JOBS)
def test_a_plan_is_answered_in_thirty_lines(job, code, capsys) -> None:
    text = said(capsys, "plan", *job, code=code)
    assert len(text.splitlines()) <= 30
    assert "fits" in text
    assert ("What would fit on" in text) == (code == 3)


@pytest.mark.slow
def test_a_long_answer_with_an_idle_host_and_assumed_rates_has_thirty_lines(capsys) -> None:
    """The list of recomputed parts of a runner-up is longer than a line; the whole answer still fits."""
    step = ["--nodes", "256", "--seq-len", "4096", "--global-batch", "15360", "--engine", "megatron"]
    text = said(capsys, "plan", "deepseek-v3", "hgx-h800", *step)
    assert len(text.splitlines()) <= 30
    assert "idle " in text
    assert "narrower " in text


def plan_of(layout: str = "tp=2,pp=2,zero=1", **keywords) -> planner.Plan:
    given = {"seq_len": 4096, "global_batch": 64, "gpus": 8} | keywords
    return planner.estimate_layout("llama3-8b", "dgx-h100", layout=layout, **given)


@pytest.mark.parametrize("layout", ["tp=2,pp=2,zero=1", "tp=1,zero=0"])
def test_the_summary_lists_every_section_and_names_no_other(layout) -> None:
    plan = plan_of(layout)
    text = to_text(overview(planner.explain_layout(plan, parts=["fitting_changes"])), Screen())
    assert len(text.splitlines()) <= 30
    assert [name for name in SECTIONS if f"  {name}" not in text] == []
    assert ("What would make it fit" in text) == (not plan.fits)
    assert format_seconds(plan.step_seconds) in text


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_computes_what_it_names_and_no_other_part(name) -> None:
    """A part that is missing raises an error where it is read."""
    plan = plan_of("tp=1,zero=0")
    found = planner.explain_layout(plan, parts=SECTIONS[name].parts)
    assert found.sections.model_fields_set <= set(SECTIONS[name].parts) <= set(Sections.model_fields)
    assert to_text(explanation(found, [name]), Screen()) == to_text(
        explanation(planner.explain_layout(plan), [name]), Screen()
    )


def test_all_holds_every_section(tmp_path, capsys) -> None:
    (tmp_path / "p.json").write_text(plan_of().to_json())
    whole = said(capsys, "explain", str(tmp_path / "p.json"), "--all")
    for name in SECTIONS:
        section = said(capsys, "explain", str(tmp_path / "p.json"), name)
        heading, _, body = section.partition("\n\n")
        assert whole.startswith(heading)
        assert body in whole or SECTIONS[name].none in body


def test_sections_open_by_name_after_a_plan_and_by_an_option_after_a_cluster(tmp_path, capsys) -> None:
    (tmp_path / "p.json").write_text(plan_of().to_json())
    workload = ["--gpus", "8", "--seq-len", "4096", "--global-batch", "64", "--layout", "tp=2,pp=2,zero=1"]
    one = said(capsys, "explain", str(tmp_path / "p.json"), "memory", "time")
    assert one == said(capsys, "explain", "llama3-8b", "dgx-h100", *workload, "--section", "memory,time")
    assert one == said(capsys, "explain", str(tmp_path / "p.json"), "--section", "memory", "--section", "time")
    assert one.index("Memory of each stage") < one.index("Time of a step")
    assert "Rates" not in one


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["p.json", "memry"], "did you mean `memory`"),
        (["p.json", "memory,tme"], "no section `tme`"),
        (["p.json", "dgx-h100"], "--layout"),
        (["llama3-8b", "dgx-h100"], "say which layout to price"),
        (["llama3-8b", "dgx-h100", "--layout", "tp=8", "--global-batch", "8", "--section", "x"], "sections are layout"),
        (["p.json", "memory", "--json"], "--json"),
        (["p.json", "memory", "--all"], "--all"),
        (["p.json", "memory", "--nodes", "2"], "a plan is priced already"),
    ],
)
def test_a_wrong_section_is_a_mistake_with_a_way_out(argv, message, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text(plan_of().to_json())
    assert main(["explain", *argv]) == ExitCode.BAD_INPUT
    assert message in capsys.readouterr().err


def test_sections_of_a_plan_that_is_absent_say_what_is_missing(capsys) -> None:
    assert main(["explain", "absent.json", "memory"]) == ExitCode.ENVIRONMENT
    assert "cannot read absent.json" in capsys.readouterr().err


def test_what_would_mislead_stands_in_the_short_answer() -> None:
    plan = plan_of("tp=2,zero=1,dp=2", engine="megatron", settings=["training.tokens=15T", "training.deadline=1d"])
    unknown = [
        Assumed(key="use_fancy", value="true", rule="it may need memory", kind="open", settled_by="--ignore use_fancy"),
        Assumed(key="zzz", value="1", rule="did you mean zz?", kind="misspelt"),
    ]
    plan = replace(plan, assumed=(*unknown, *plan.assumed))
    text = " ".join(to_text(overview(planner.explain_layout(plan, parts=())), Screen()).split())
    assert "use_fancy=true: it may need memory (--ignore use_fancy)" in text
    assert "zzz=1 (did you mean zz?)" in text
    assert "MISSES the deadline" in text
    assert "idle 4 of 8 devices" in text
    assert f"{len(plan.assumed) - 2} assumed (" in text


def test_a_checkpoint_has_its_bytes_in_explain_and_json(tmp_path, capsys) -> None:
    """30.5 B parameters: 2 bytes of weights, and 12 of master weights and moments; two hosts write 1 GB/s each."""
    workload = {"nodes": 2, "seq_len": 4096, "global_batch": 64, "engine": "megatron"}
    layout = "tp=2,ep=8,zero=1,mbs=1,recompute=full"
    plan = planner.estimate_layout("qwen3-30b-a3b", "dgx-h100", layout=layout, **workload)
    (tmp_path / "p.json").write_text(plan.to_json())
    found = json.loads(plan.to_json())["checkpoint"]
    assert found["weight_bytes"] == pytest.approx(30.5e9 * 2, rel=0.002)
    assert found["optimizer_bytes"] == pytest.approx(30.5e9 * 12, rel=0.002)
    assert found["seconds"] == pytest.approx(found["num_bytes"] / 2e9)
    words = "398 GiB (weights 56.9 GiB, optimizer 341 GiB); 214 s at 2.00 GB/s"
    for sections in ([], ["run"]):
        assert words in " ".join(said(capsys, "explain", str(tmp_path / "p.json"), *sections).split())


def test_what_narrows_the_band_is_told_where_card_or_program_have_no_evidence() -> None:
    def words(cluster: str, **keywords) -> str:
        given = {"layout": "tp=1,zero=3", "seq_len": 4096, "global_batch": 64, "gpus": 8} | keywords
        plan = planner.estimate_layout("llama3-8b", cluster, **given)
        return " ".join(to_text(overview(planner.explain_layout(plan, parts=())), Screen()).split())

    assert "planner calibrate" not in words("dgx-h100", engine="torchtitan")
    assert "planner calibrate" in words("dgx-h100", engine="torch")
    assert "planner measure" not in words("dgx-h100", engine="torch")
    assert "planner measure" in words("rtx6000-ada-box", engine="torchtitan")


def test_a_key_that_reads_alike_is_no_difference() -> None:
    """The same recompute on more stages is the same word."""
    one = Layout(pp=2, dp=4, recompute=("none",) * 2, layers_per_stage=(16, 16))
    other = Layout(pp=4, dp=2, recompute=("none",) * 4, layers_per_stage=(8, 8, 8, 8))
    assert differences(one, other) == "pp 2 -> 4, dp 4 -> 2"
    assert differences(one, replace(one, layers_per_stage=(15, 17))) == "other layers on each stage"
