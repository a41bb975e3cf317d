"""Comparisons of clusters: each plan equals the plan made alone, and marks agree with brute force over all pairs."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace

import pytest

import planner
from planner.answers.side_by_side import Choice, with_front
from planner.cli import main
from planner.cost.run import WholeRun
from planner.errors import InputError
from planner.show.page.charts import choices_chart

TINY = ["--precision", "bf16", "--global-batch", "8", "--seq-len", "64"]
WORK = {"precision": "bf16", "global_batch": 8, "seq_len": 64, "settings": "training.tokens=1e9"}


@pytest.fixture(scope="module")
def found():
    return planner.compare_clusters("tiny-gpt", ["p5", "rtx4090-box", "g6e", "dgx1-v100"], gpus=2, **WORK)


def test_each_choice_is_the_plan_of_its_cluster_alone(found) -> None:
    for each in found.choices[:3]:
        alone = planner.plan_job("tiny-gpt", each.cluster, gpus=2, **WORK)
        assert (each.plan.layout, each.plan.step_seconds) == (alone.layout, alone.step_seconds)
        assert each.run == alone.run
        assert each.plan.cluster.num_devices == 2


def test_what_cannot_be_planned_says_why_in_its_row(found) -> None:
    volta = found.choices[3]
    assert volta.plan is None
    assert "bf16" in volta.why_not
    assert not volta.on_front


def test_energy_counts_where_a_choice_has_no_price(found) -> None:
    assert found.measure == "kilowatt_hours"  # the box has no price
    priced = planner.compare_clusters("tiny-gpt", ["p5", "g6e"], gpus=2, **WORK)
    assert priced.measure == "usd"
    first = priced.choices[0]
    assert first.run.usd == pytest.approx(55.04 / 8 * first.plan.layout.world_size * first.run.seconds / 3600)


def with_limit(plan, limit_bytes):
    """The plan with this limit for every stage."""
    return replace(plan, memory=tuple(replace(stage, limit_bytes=limit_bytes) for stage in plan.memory))


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_what_no_pair_beats(seed: int, found, monkeypatch: pytest.MonkeyPatch) -> None:
    pick = random.Random(seed)
    plan = with_limit(found.choices[0].plan, 1e15)
    run = found.choices[0].run
    figures = [(pick.randint(1, 4), pick.randint(1, 4)) for _ in range(6)]
    runs = {n: replace(run, seconds=float(a), usd=float(b)) for n, (a, b) in enumerate(figures)}
    monkeypatch.setattr(Choice, "run", property(lambda each: runs[each.hosts]))
    marked = with_front(Choice(cluster="c", hosts=n, plan=plan) for n in runs)
    beaten = {
        i
        for i, j in itertools.permutations(range(6), 2)
        if figures[j] != figures[i] and all(x <= y for x, y in zip(figures[j], figures[i], strict=True))
    }
    assert {each.hosts for each in marked.choices if each.on_front} == set(range(6)) - beaten
    assert isinstance(marked.front[0].run, WholeRun)


def test_what_does_not_fit_neither_beats_nor_decides_what_counts(found) -> None:
    priced, free = (each.plan for each in found.choices[:2])
    quick = replace(with_limit(free, 1.0), step_seconds=priced.step_seconds / 100)
    marked = with_front([Choice(cluster="priced", plan=priced), Choice(cluster="quick", plan=quick)])
    assert marked.measure == "usd"
    assert [each.on_front for each in marked.choices] == [True, False]


def test_choices_are_drawn_where_their_time_and_cost_are(found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points fill both axes, and the middle of two figures is drawn in the middle of their two places."""
    plan, run = with_limit(found.choices[0].plan, 1e15), found.choices[0].run
    run = replace(run, low_seconds=None, high_seconds=None)
    figures = [(4000.0, 10.0), (8000.0, 2.0), (6000.0, 6.0)]
    runs = {n: replace(run, seconds=seconds, usd=usd) for n, (seconds, usd) in enumerate(figures)}
    monkeypatch.setattr(Choice, "run", property(lambda each: runs[each.hosts]))
    chart = choices_chart(with_front(Choice(cluster="c", hosts=n, plan=plan) for n in runs))
    quick, cheap, middle = chart["points"]
    frame = chart["frame"]
    for axis, first, last in (("x", "left", "right"), ("y", "bottom", "top")):
        low, high = sorted((frame[first], frame[last]))
        assert all(low <= point[axis] <= high for point in chart["points"])
        assert abs(quick[axis] - cheap[axis]) > (high - low) / 2
        assert middle[axis] == pytest.approx((quick[axis] + cheap[axis]) / 2, abs=0.2)
    assert quick["x"] < cheap["x"]


def test_what_does_not_fit_is_told_and_not_on_the_front(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "llama3.2-3b", "g6,p5", "--gpus", "1", "--seq-len", "2048", "--global-batch", "8", "--json"]
    assert main(line) == 0
    small, large = json.loads(capsys.readouterr().out)["choices"]
    assert (small["fits"], small["on_front"], large["on_front"]) == (False, False, True)
    assert re.fullmatch(r"it does not fit: \d+\.\d GiB too much", small["why_not"])
    assert main([*line[:2], "g6,g5", *line[3:]]) == 3
    assert [each["fits"] for each in json.loads(capsys.readouterr().out)["choices"]] == [False, False]


def test_unknown_names_are_all_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny-gpt", "p5,dgx-h10,rtx490-box", *TINY]) == 2
    said = capsys.readouterr().err
    assert said.count("unknown cluster") == 2
    assert "`dgx-h100`" in said
    assert "`rtx4090-box`" in said


def test_sizes_and_clusters_are_crossed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny-gpt", "p5,p4d", "--nodes", "1..2", *TINY, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(each["cluster"], each["nodes"]) for each in document["choices"]] == [
        ("p5", 1), ("p5", 2), ("p4d", 1), ("p4d", 2),
    ]  # fmt: skip
    assert main(["plan", "tiny-gpt", "p5,a4x", "--gpus", "12", *TINY]) == 0  # 12 are no whole hosts of 8, and 3 of 4
    said = capsys.readouterr().out
    assert "12 devices are no whole number of p5 hosts of 8" in " ".join(said.split())


def test_prices_name_their_list_unless_they_were_changed(capsys: pytest.CaptureFixture[str]) -> None:
    for settings, listed in (([], True), (["--set", "cluster.price=1 USD/h"], False)):
        assert main(["plan", "tiny-gpt", "p5,rtx4090-box", *TINY, *settings]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("on demand, us-east-1, 55.04 USD/h a host, list of 2026-07-20" in said) == listed


def test_a_mistake_that_all_share_is_told_once() -> None:
    with pytest.raises(InputError) as caught:
        planner.compare_clusters("tiny-gpt", ["p5", "p4d"], **{**WORK, "settings": "training.dropuot=1"})
    assert [each.message for each in caught.value.mistakes] == ["unknown key `dropuot`"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["p5,p4d", "-o", "plan.json"], "belongs to one cluster"),
        (["p5", "--html", "page.html"], "is of several clusters"),
        (["p5,,p4d"], "one comma between two"),
        (["p5,p4d", "--nodes", "1..40"], "are not 1 to 64"),
    ],
)
def test_options_that_a_list_has_no_use_for_are_refused(options: list[str], said: str, capsys) -> None:
    assert main(["plan", "tiny-gpt", *options, *TINY]) == 2
    assert said in capsys.readouterr().err


def test_the_page_shows_each_choice_and_loads_nothing(tmp_path, capsys) -> None:
    page = tmp_path / "page.html"
    line = ["plan", "tiny-gpt", "p5,g6e,dgx1-v100", *TINY, "--set", "training.tokens=1e9", "--html", str(page)]
    assert main(line) == 0
    assert main(line) == 5 or "--force" in capsys.readouterr().err
    text = page.read_text(encoding="utf-8")
    assert text.count("<circle") == 2
    assert all(name in text for name in ("p5", "g6e", "dgx1-v100", "bf16"))
    assert "<script" not in text
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
