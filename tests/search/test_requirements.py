"""Requirements of a job, compared with every layout of small jobs, and with plain sums over rows."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace

import pytest
from small_layouts import FREE, KEYS, SEEDS, priced

import planner
from planner.answers.deadline import is_kept
from planner.cli import main
from planner.cost.run import WholeRun
from planner.errors import InputError
from planner.plan_file import plan_from_json
from planner.search.objectives import objective_of
from planner.search.search import search
from planner.show.comparison_rows import Row, marks
from planner.specs import library
from planner.specs.cluster_documents import load_cluster, split_size
from planner.specs.job import with_training
from planner.specs.load import load_job
from planner.units import parse_quantity

TOKENS = 1e9
WORK = {"global_batch": 8, "seq_len": 64, "precision": "bf16"}


def usd_of(job, seconds, devices):
    """Money of the run: steps of `seconds` on `devices` devices at 2 USD an hour each."""
    steps = math.ceil(TOKENS / (job.training.global_batch_size * job.training.sequence_length))
    return steps * seconds * devices * 2 / 3600


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["throughput", "cost", "gpus"])
def test_the_budget_is_kept_as_by_brute_force(name, seed):
    job, layouts = priced(seed)
    if not layouts:
        pytest.skip("nothing fits")
    money = [usd_of(job, seconds, devices) for seconds, devices, _ in layouts]
    for share in (1.001, 1.2, 3.0):
        asked = with_training(job, tokens=TOKENS, price=2.0, budget=share * min(money))
        found = search(asked, FREE, objective=objective_of(asked, name))
        within = [each for each, usd in zip(layouts, money, strict=True) if usd <= share * min(money)]
        key = KEYS[name]((found.step_seconds, found.layout.world_size, 0))
        assert key == pytest.approx(min(map(KEYS[name], within)), rel=1e-9), share
        assert found.run.usd == pytest.approx(usd_of(job, found.step_seconds, found.layout.world_size))
        assert found.run.meets_budget
    poor = with_training(job, tokens=TOKENS, price=2.0, budget=0.99 * min(money))
    found = search(poor, FREE, objective=objective_of(poor, name))
    assert found.run.missed == ("budget",)
    assert found.run.usd == pytest.approx(min(money))


def test_a_budget_is_met_with_the_confidence_and_the_fastest_that_meets_it_is_chosen():
    job = {"model": "llama3-8b", "global_batch": 256, "seq_len": 4096, "engine": "megatron"}
    settings = ["training.tokens=1e12", "training.price=2 USD/h"]
    free = planner.plan_job(**job, cluster="dgx-h100:4", settings=settings)
    runs = {}
    for confidence in (0.3, 0.8):
        own = [*settings, f"training.budget={free.run.usd * 1.05:.0f} USD"]
        plan = planner.plan_job(**job, cluster="dgx-h100:4", settings=own, confidence=confidence)
        chance = plan.run.budget_chance
        assert plan.run.meets_budget == (chance >= confidence)
        assert is_kept(load_job(model="llama3-8b", cluster="dgx-h100:4", engine="megatron", global_batch_size=256,
                                sequence_length=4096, settings=own), plan.layout, plan.step_seconds,
                       "throughput", confidence) == plan.run.meets_budget  # fmt: skip
        runs[confidence] = plan.run
    assert runs[0.3].seconds <= runs[0.8].seconds


def test_a_budget_that_no_layout_meets_ends_with_3_and_ways_out(capsys):
    words = ["plan", "tiny-gpt", "dgx-a100", "--global-batch", "8", "--seq-len", "64"]
    words += ["--set", "training.tokens=1e12", "--set", "training.price=2 USD/h"]
    assert main([*words, "--set", "training.budget=1 USD", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["run"]["meets_budget"] is False
    ways = {each["change"].partition(" ")[0]: each["change"] for each in document["remedies"]}
    enough = ways["budget"].partition(" ")[2]
    assert main([*words, "--set", f"training.budget={enough}"]) == 0
    assert f"meets the budget of {enough}" in " ".join(capsys.readouterr().out.split())
    fewer = ways["tokens"].partition(" ")[2]
    assert main([*words, "--set", "training.budget=1 USD", "--set", f"training.tokens={fewer}", "--json"]) == 0
    capsys.readouterr()
    assert main([*words, "--set", "training.budget=1 USD", "--objective", "memory"]) == 0  # told, as a deadline is
    assert "MISSES the budget of 1.00 USD" in " ".join(capsys.readouterr().out.split())


def test_an_explained_layout_says_whether_it_meets_the_budget():
    settings = ["training.tokens=1e9", "training.price=2 USD/h", "training.budget=5 USD"]
    plan = planner.estimate_layout("tiny-gpt", "dgx-a100:1", layout="tp=1,dp=8", settings=settings, **WORK)
    assert plan.run.meets_budget == (plan.run.usd <= 5)
    assert plan_from_json(plan.to_json()).to_json() == plan.to_json()


@pytest.mark.parametrize(
    ("text", "usd"), [("2 MUSD", 2e6), ("2e6 USD", 2e6), ("1.5 kUSD", 1500.0), ("2000000 USD", 2e6), ("1 BUSD", 1e9)]
)
def test_money_is_written_with_its_unit(text, usd):
    assert parse_quantity(text, "usd") == usd


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["training.budget=2 MUSD"], "`budget` needs the token budget"),
        (["training.budget=2 MUSD", "training.tokens=1e9"], "`budget` needs a price, and dgx-a100 has none"),
        (["training.budget=2000000", "training.tokens=1e9", "cluster.price=1 USD/h"], "has no unit"),
        (["training.budget=2 MUSD per device", "training.tokens=1e9", "cluster.price=1 USD/h"], "is not of one device"),
    ],
)
def test_a_budget_without_what_it_needs_is_refused(settings, said):
    with pytest.raises(InputError, match=re.escape(said)):
        load_job(model="tiny-gpt", cluster="dgx-a100", global_batch_size=8, settings=settings)


def test_hosts_follow_the_last_colon(tmp_path):
    for cluster, hosts in (("dgx-h100:3", 3), ("dgx-h100", 1), ("gb200-nvl72:18", 18)):
        assert load_cluster(cluster).hosts == hosts
    own = tmp_path / "mine:4"
    own.write_text(library.path_of("clusters", "dgx-h100").read_text())
    assert split_size(str(own)) == (str(own), "")
    assert load_cluster(str(own)).hosts == 1
    assert load_cluster(f"{own}:2").hosts == 2
    assert split_size("C:\\clusters\\mine.yaml") == ("C:\\clusters\\mine.yaml", "")
    assert split_size("C:\\clusters\\mine.yaml:8") == ("C:\\clusters\\mine.yaml", "8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dgx-h100:x"], "`x` is no number of hosts"),
        (["dgx-h100:0"], "`0` is no number of hosts"),
        (["dgx-h100:2", "--nodes", "3"], "--nodes and dgx-h100:2 both give the size"),
        (["dgx-h100:2", "--gpus", "8"], "--gpus and dgx-h100:2 both give the size"),
        (["dgx-h100:2,p5", "--nodes", "3"], "--nodes and dgx-h100:2 both give the size"),
        (["local-cpu:2"], "is this one machine"),
        (["dgx-h10:2"], "unknown cluster `dgx-h10`"),
    ],
)
def test_sizes_that_cannot_be_read_or_are_given_twice_are_refused(words, said, capsys):
    assert main(["plan", "tiny-gpt", *words, "--global-batch", "8", "--seq-len", "64"]) == 2
    assert said in capsys.readouterr().err


def test_too_many_choices_are_refused_before_anything_is_read(capsys):
    files = ",".join(f"none-{number}.yaml" for number in range(65))
    assert main(["plan", "none.yaml", files, "--global-batch", "8"]) == 2
    said = capsys.readouterr().err
    assert "65 clusters and sizes are not 1 to 64" in said
    assert "none-0" not in said


def test_rows_have_names_and_cards_of_clusters_and_say_whose_the_prices_are(tmp_path, capsys):
    for number, name in enumerate(("ours", "theirs", "theirs"), start=1):
        text = library.path_of("clusters", "dgx-a100").read_text()
        text = re.sub(r"^name: .*", f"name: {name}", text, flags=re.MULTILINE)
        text = re.sub(r"^price: .*\n", "", text, flags=re.MULTILINE)
        (tmp_path / f"c{number}.yaml").write_text(f"{text}\nprice: {number}.5 USD/h per device\n")
    files = [str(tmp_path / f"c{number}.yaml") for number in (1, 2, 3)]
    job = ["--global-batch", "8", "--seq-len", "64", "--precision", "bf16", "--set", "training.tokens=1e9"]
    assert main(["plan", "tiny-gpt", ",".join(files[:2]), *job]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"ours [1-8] x a100-80gb", said)
    assert "ours: the price of your file or of --set, 1.5 USD/h for each device" in said
    assert "list price" not in said
    assert files[0] not in said
    found = planner.compare_clusters("tiny-gpt", files, settings="training.tokens=1e9", **WORK)
    assert [found.name_of(each) for each in found.choices] == ["ours", *files[1:]]


def figures_in(text):
    return set(re.findall(r"\d[\d.,]*", text))


def searched_once(monkeypatch, *names):
    """Answer these functions of the API from memory, for commands that show one answer in several ways."""
    for name in names:
        answers, honest = {}, getattr(planner.api, name)

        def remembered(*given, answers=answers, honest=honest, **named):
            del named["reporter"]  # another one for each command
            key = repr((given, sorted(named.items())))
            return answers[key] if key in answers else answers.setdefault(key, honest(*given, **named))

        monkeypatch.setattr(planner.api, name, remembered)


@pytest.mark.parametrize("words", [["dgx-h100:1,dgx-h100:2,p5"], ["dgx-h100", "--nodes", "1..3"]])
def test_no_figure_of_a_comparison_is_lost_on_a_narrow_screen(words, capsys, monkeypatch):
    job = ["--global-batch", "16", "--seq-len", "64", "--precision", "bf16", "--set", "training.tokens=1e12"]
    job += ["--set", "training.deadline=300d", "--set", "training.price=2 USD/h", "--set", "training.budget=3 MUSD"]
    searched_once(monkeypatch, "compare_clusters", "compare_sizes")
    shown = {}
    for width in (240, 120, 80, 60, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["plan", "tiny-gpt", *words, *job]) == 0
        shown[width] = capsys.readouterr().out
        assert max(map(len, shown[width].splitlines())) <= width
    assert "meets 300 d" in shown[240]
    assert "8 of 10" in shown[240]
    for width, text in shown.items():
        assert figures_in(shown[240]) == figures_in(text), width


def run_of(seconds, usd, *, chance=None):
    met = None if chance is None else chance > 0.8
    times = {"seconds": seconds, "device_hours": 8 * seconds, "closed_form_days": 1.0, "deadline_seconds": None}
    money = {"usd": usd, "kilowatt_hours": None}
    return WholeRun(tokens=1e9, steps=1, meets_deadline=met, deadline_chance=chance, **times, **money)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("limited", [False, True])
def test_marks_are_the_least_of_what_meets_the_requirements(seed, limited):
    pick = random.Random(seed)
    figures = [(pick.randint(1, 3), pick.randint(1, 3), pick.choice([0.1, 0.9])) for _ in range(6)]
    rows = [
        Row(names=(str(n),), run=run_of(a, b, chance=c if limited else None)) for n, (a, b, c) in enumerate(figures)
    ]
    rows[0] = replace(rows[0], fits=False)
    said = marks(rows, "usd")
    able = [n for n in range(1, 6) if not limited or figures[n][2] > 0.8] or list(range(1, 6))
    cheapest = min(able, key=lambda n: (figures[n][1], figures[n][0], n))
    fastest = min(able, key=lambda n: (figures[n][0], figures[n][1], n))
    assert [n for n in range(6) if "cheapest" in said[n]] == [cheapest]
    assert [n for n in range(6) if "fastest" in said[n]] == [fastest]
    in_time = limited and any(figures[n][2] > 0.8 for n in range(1, 6))
    assert said[cheapest].endswith(" in time") == in_time


def test_a_comparison_that_meets_no_deadline_ends_with_3_if_the_objective_needs_it(capsys):
    job = ["--global-batch", "8", "--seq-len", "64", "--precision", "bf16", "--set", "training.tokens=1e12"]
    late = ["--set", "training.deadline=1 s"]
    for words in (["p5,p4d"], ["p5", "--nodes", "1..2"]):
        assert main(["plan", "tiny-gpt", *words, *job, *late]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "None of them is in time" in out
        assert "meets 1 s" in out
        assert main(["plan", "tiny-gpt", *words, *job, *late, "--objective", "cost", "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["remedies"]


def test_sizes_by_least_memory_are_searched_one_by_one(capsys):
    job = ["--global-batch", "16", "--seq-len", "64", "--precision", "bf16", "--objective", "memory"]
    assert main(["plan", "tiny-gpt", "p5", "--nodes", "1..2", *job, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    for each in choices:
        assert main(["plan", "tiny-gpt", f"p5:{each['nodes']}", *job, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["layout"] == each["layout"]
    assert sum("least memory" in each["best"] for each in choices) == 1
