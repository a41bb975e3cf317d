"""The views of a plan: their figures are the plan's figures, on every screen."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

import planner
from planner.answers.batch import Batch, EstimatedBatch, GlobalBatch, MicrobatchSize
from planner.answers.collectives import Algorithm, Asynchronous, Collectives, GroupReport, GroupUse
from planner.answers.difference import difference_of, difference_view, figures_of
from planner.answers.outcome import Outcome, Shortfall
from planner.answers.peak import ActivationPart, Alternative, StagePeak
from planner.answers.remedies import LiftedPin, Remedy
from planner.answers.report import Explanation, Sections
from planner.answers.scaling import Scaling, SizedPlan
from planner.answers.schedules import ScheduleRow, Schedules, sketch
from planner.answers.sweep import Point, Sweep
from planner.answers.waterfall import Rate, TimePart, Waterfall
from planner.answers.what_if import Gain, Sensitivity, WhatIf
from planner.answers.why_not import WhyNot
from planner.cost.band import Band
from planner.cost.ledger import LineName, total_exposed_seconds
from planner.evidence.compare.measured import Deviation
from planner.layout import Layout
from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.search.least_memory import LeastPeak
from planner.search.space.constraints import Constraints
from planner.show.explain import answers, explanation
from planner.show.library import cluster_table
from planner.show.measured import comparison
from planner.show.nothing_fits import nothing_fits, nothing_fits_to_dict, ways_out, ways_out_to_dict
from planner.show.screen import Screen, clean, stack, to_text
from planner.show.summary import next_commands, summary
from planner.show.sweep import sweep_to_dict, sweep_view
from planner.specs.batch import BatchRange
from planner.specs.by_name import load_engine
from planner.specs.job import PoolJob
from planner.specs.load import load_job
from planner.units import format_bytes

COMMAND = "planner plan gpt-95l dgx-a100 --nodes 17"
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def no_fit(found, remedies, pins):
    """What `planner plan` shows if nothing fits."""
    return stack(nothing_fits(found), ways_out(remedies, pins, "What would fit"))


@pytest.fixture
def nothing(make_plan, make_memory) -> tuple[planner.Plan, tuple[Remedy, ...], tuple[LiftedPin, ...]]:
    layout = Layout(tp=8, pp=2, dp=1, sp=1, recompute=("full",) * 2, layers_per_stage=(48, 47))
    memory = make_memory([(40.0, 40.0, 120.0, 9.0, 3.0, 1.5), (40.0, 40.0, 118.0, 6.0, 5.0, 1.5)])
    found = replace(make_plan(), layout=layout, memory=memory, certificate=None, engine=load_engine("fsdp"))
    changes = (
        Remedy(
            change="34 hosts instead of 17",
            layout=replace(layout, dp=4, zero=1),
            step_seconds=40.5,
            tokens_per_second=77_700,
            chance_of_fitting=0.97,
        ),
        Remedy(
            change="sequences of 1024 tokens",
            layout=replace(layout, dp=2),
            step_seconds=88.0,
            tokens_per_second=35_700,
            chance_of_fitting=0.999,
        ),
    )
    pins = (
        LiftedPin(constraint="tp=8", remedy=changes[0], least=LeastPeak(num_bytes=70e9, limit_bytes=81.6e9)),
        LiftedPin(constraint="pp<=2", remedy=None, least=LeastPeak(num_bytes=90e9, limit_bytes=81.6e9)),
        LiftedPin(constraint="forbidden zero=3", remedy=None, least=None),
    )
    return found, changes, pins


def explained(plan) -> Explanation:
    """A plan with sections written by hand, so that no change of the cost model changes them."""
    seconds = {"ideal compute": 17.0, "kernel efficiency": 9.5, "calibration": -0.5, "tp_comm": 4.5, "bubble": 9.0}
    parts = [
        TimePart(
            name=name, seconds=value, formula=f"how {name} comes about", numbers="2 x 3", source="a book", bound="x"
        )
        for name, value in seconds.items()
    ]
    tensors = (ActivationPart(name="layer input", num_bytes=9e9), ActivationPart(name="log-sum-exp", num_bytes=1e6))
    peaks = [
        StagePeak(
            stage=stage.stage,
            moment="start of the first backward pass",
            microbatches_in_flight=4.0,
            bytes_per_microbatch=2.5e9,
            activations=tensors,
        )
        for stage in plan.memory
    ]
    others = [("mbs=4", (), 9e10, 38.0), ("recompute=full", (), 4e10, 45.1), ("zero=3", ("a rule",), None, None)]
    alternatives = [
        Alternative(
            change=change,
            layout=plan.layout,
            broken_rules=rules,
            peak_bytes=size,
            fits=size == 4e10,
            step_seconds=step,
            missing_bytes=1e10 if size == 9e10 else 0.0,
            verdict="does not fit" if size == 9e10 else "fits",
        )
        for change, rules, size, step in others
    ]
    rate = Rate(
        name="MFU", convention="as counted", flops_per_step=1e18, flops_per_second_per_device=1.3e14, share_of_peak=0.42
    )
    sections = Sections(
        waterfall=Waterfall(parts=tuple(parts), step_seconds=39.5),
        rates=(rate,),
        peaks=tuple(peaks),
        alternatives=tuple(alternatives),
    )
    return Explanation(plan=plan, sections=sections)


def slower(make_plan, **changes):
    """Another plan, with a different bubble and different memory."""
    plan = make_plan()
    time = tuple(replace(each, busy_seconds=4.1) if each.name == "bubble" else each for each in plan.time)
    smaller = [tuple(replace(line, num_bytes=9e9) for line in stage.lines) for stage in plan.memory]
    memory = tuple(replace(stage, lines=lines) for stage, lines in zip(plan.memory, smaller, strict=True))
    return make_plan(step_seconds=41.2, time=time, memory=memory, **changes)


def answered(plan, make_plan) -> Explanation:
    """Every question with an answer of each kind, written by hand."""
    layout = plan.layout
    other = slower(make_plan, layout=replace(plan.layout, mbs=1), mfu=0.4)
    difference = difference_of(plan, other)
    nothing, found = {"rules": (), "shortfall": None, "difference": None}, difference
    missing = Shortfall(
        layout=layout,
        stage=2,
        needed_bytes=9.1e10,
        limit_bytes=8e10,
        missing_bytes=1.1e10,
        largest_line="optimizer_state",
        largest_line_bytes=5e10,
    )
    why = [
        WhyNot(asked="tp=4", pins=("pp=4", "tp=4"), outcome=Outcome(**{**nothing, "difference": found})),
        WhyNot(asked="cp=2", pins=("cp=2",), outcome=Outcome(**{**nothing, "rules": ("cp is 1 here", "[/bold]")})),
        WhyNot(asked="own/layout.json", pins=(), outcome=Outcome(**{**nothing, "shortfall": missing})),
        WhyNot(asked="tp=8", pins=("tp=8",), outcome=Outcome(**{**nothing, "difference": difference_of(plan, plan)})),
    ]
    what = WhatIf(
        asked="device.memory=x2",
        step_seconds=plan.step_seconds,
        best_step_seconds=None,
        same_layout=figures_of(plan),
        outcome=why[0].outcome,
    )
    gains = [("peak FLOP/s", 0.083, 0.083, False), ("memory", None, 0.021, True), ("nvlink latency", 0.0, 0.0, False)]
    sensitivity = Sensitivity(
        objective="throughput",
        step_seconds=39.5,
        gains=tuple(
            Gain(
                resource=name,
                change="x",
                before="80 GiB",
                after="88 GiB",
                same_layout_gain=same,
                gain=gain,
                step_seconds=39.0,
                layout=layout,
                other_layout=differs,
            )
            for name, same, gain, differs in gains
        ),
    )
    seconds = {"ring": 0.9, "tree": 1.1, "halving-doubling": 1.4, "in-network": None}
    group = GroupReport(
        line="dp_comm",
        experts=True,
        line_busy_seconds=0.9,
        line_hidden_seconds=0.65,
        size=64,
        stride=8,
        num_groups=8,
        first_ranks=tuple(range(0, 128, 8)),
        links=("nvlink", "infiniband"),
        bytes_per_second=2.2e10,
        uses=(GroupUse(operation="all-reduce", num_bytes=3e9, times_per_step=1.0, seconds=0.9, seconds_per_step=0.9),),
        algorithm_bytes=3e9,
        algorithms=tuple(Algorithm(name=n, seconds=s, chosen=n == "ring") for n, s in seconds.items()),
    )
    late = Asynchronous(
        saved_seconds=0.25, saved_share=0.0063, num_workers=64, staleness_updates=63, server_seconds=1.25
    )
    none = dict.fromkeys(
        ("layout", "step_seconds", "tokens_per_second", "efficiency", "grown_line", "grown_share"), None
    )
    sizes = [SizedPlan(num_devices=8, num_used=0, missing="nothing fits", **none)]
    for count, efficiency, line in ((16, 1.0, None), (32, 0.97, "bubble"), (4096, 0.7, "dp_comm")):
        sizes.append(
            SizedPlan(
                num_devices=count,
                num_used=count,
                layout=layout,
                step_seconds=1000 / count,
                tokens_per_second=count * 650 * efficiency,
                efficiency=efficiency,
                grown_line=line,
                grown_share=0.123,
                missing=None,
            )
        )
    nothing_known = dict.fromkeys(set(ScheduleRow.model_fields) - {"schedule", "engine_has_it", "textbook", "fits"})
    priced_row = {
        "layout": layout, "step_seconds": 39.5, "bubble_seconds": 2.4, "bubble_share": 0.061,
        "equal_stages_bubble_share": 0.064, "utilization": 0.94, "activation_bytes": 2.4e10, "peak_bytes": 6.5e10,
        "staleness_steps": 3, "weight_versions": 4,
    }  # fmt: skip
    row = {"schedule": "pipedream", "engine_has_it": False, "textbook": "(p - 1) / m", "fits": False}
    rows = (
        ScheduleRow(**{**row, **nothing_known, **priced_row}),
        ScheduleRow(**{**row, **nothing_known, "missing": "it needs more [/bold]"}),
    )
    size = {"sequences_per_second": 1.0, "step_seconds": 40.0, "peak_bytes": 9e10}
    batch = Batch(
        sizes=tuple(MicrobatchSize(mbs=b, of_best=b / 4, fits=b < 4, **size) for b in (1, 2, 4)),
        flat_from=4,
        batches=(
            GlobalBatch(
                sequences=1536,
                tokens=3145728,
                microbatches=192,
                bubble_share=0.06,
                tokens_per_second_per_device=622.0,
                tokens_factor=1.1,
                learning_rate_adam=3e-4,
                learning_rate_sgd=3e-4,
            ),
        ),
        estimates=(EstimatedBatch(name="noise scale", kind="critical", num_tokens=2e7, source="a paper [/bold]"),),
        run_tokens=3e11,
        learning_rate=3e-4,
    )
    sections = explained(plan).sections.model_copy(
        update={
            "schedules": Schedules(stages=4, microbatches=192, rows=rows, sketches=(sketch("zb-h1", 4, 1),)),
            "batch": batch,
            "why_not": tuple(why),
            "what_if": (what,),
            "sensitivity": sensitivity,
            "collectives": Collectives(groups=(group,), asynchronous=late),
            "scaling": Scaling(sizes=tuple(sizes), most_efficient=16, breaks_at=4096, breaks_by="dp_comm"),
        }
    )
    return Explanation(plan=plan, sections=sections)


def view_of(name, plan, nothing, make_plan) -> object:
    views = {
        "summary": lambda: summary(plan, next_commands(plan, COMMAND, None)),
        "explain": lambda: explanation(explained(plan)),
        "answers": lambda: answers(answered(plan, make_plan)),
        "diff": lambda: difference_view(
            difference_of(plan, slower(make_plan, training=plan.training.model_copy(update={"seed": 7}))),
            names=("A", "B"),
        ),
        "nothing_fits": lambda: no_fit(*nothing),
    }
    return views[name]()


@pytest.mark.parametrize("name", ["summary", "explain", "answers", "diff", "nothing_fits"])
def test_views_at_80_columns(name, plan, nothing, make_plan, golden) -> None:
    golden(f"{name}.txt", to_text(view_of(name, plan, nothing, make_plan), Screen()))


@pytest.mark.parametrize("name", ["summary", "explain", "answers"])
def test_views_on_a_narrow_plain_screen(name, plan, nothing, make_plan, golden) -> None:
    golden(f"{name}-narrow.txt", to_text(view_of(name, plan, nothing, make_plan), Screen(width=40, unicode=False)))


@pytest.mark.parametrize("width", [20, 33, 40, 57, 80, 120])
@pytest.mark.parametrize("name", ["summary", "explain", "answers", "diff", "nothing_fits"])
def test_no_screen_cuts_a_line_or_a_figure(name, width, plan, nothing, make_plan) -> None:
    view = view_of(name, plan, nothing, make_plan)
    text = to_text(view, Screen(width=width, unicode=False))
    assert text.isascii()
    assert all(len(line) <= width for line in text.splitlines())
    whole = set(NUMBER.findall(to_text(view, Screen(width=120, unicode=False))))
    assert set(NUMBER.findall(text)) <= whole, "a figure that the wide screen does not show was cut"


@pytest.mark.parametrize("name", ["summary", "explain", "answers", "diff", "nothing_fits"])
def test_colour_adds_nothing_but_colour(name, plan, nothing, make_plan) -> None:
    view = view_of(name, plan, nothing, make_plan)
    colored = to_text(view, Screen(color=True))
    assert "\x1b[" in colored
    plain = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert [line.rstrip() for line in plain.splitlines()] == to_text(view, Screen()).splitlines()


ESCAPES = re.compile("\x1b\\[[0-9;]*m|\x1b\\]8;;[^\x1b]*\x1b\\\\")


@pytest.mark.parametrize("name", ["summary", "explain", "answers", "diff"])
def test_hostile_text_is_shown_and_not_obeyed(name, plan, nothing, make_plan, hostile, hostile_text) -> None:
    """The only control characters on the terminal are our own colours and links, and the text is shown literally."""
    bad = hostile(plan, hostile_text)
    before, after = bad, replace(bad, model=bad.model.model_copy(update={"name": f"{hostile_text} 2"}))
    view = view_of(name, bad, nothing, make_plan) if name != "diff" else difference_view(
        difference_of(before, after), names=("A", hostile_text)
    )  # fmt: skip
    shown = to_text(view, Screen(color=True, links=True))
    plain = ESCAPES.sub("", shown)
    assert all(c.isprintable() or c == "\n" for c in plain)
    wanted = re.sub(r"\s", "", clean(hostile_text))
    assert wanted[:200] in re.sub(r"\s", "", plain)
    links = re.findall("\x1b\\]8;;([^\x1b]+)", shown)
    assert all(link.startswith("file:///") and "glossary.md#" in link for link in links)


def rows_of(text: str, title: str) -> list[list[str]]:
    """The rows of one section, label first; a label of several words becomes one word."""
    lines = text[text.index(f"\n{title}") :].splitlines()[2:]
    body = lines[: lines.index("")] if "" in lines else lines
    return [re.split(r"\s{2,}", line.strip()) for line in body]


def number(text: str) -> float:
    return 0.0 if text == "-" else float(text.replace(",", ""))


def test_explain_shows_each_stage_and_its_total_as_the_sum_of_lines(plan) -> None:
    rows = {row[0]: row[1:] for row in rows_of(to_text(explanation(explained(plan)), Screen()), "Memory of each stage")}
    assert rows["stage"] == ["0", "1", "2", "3"]
    for column, stage in enumerate(plan.memory):
        shown = {line.name: number(rows[line.name.replace("_", " ")][column]) for line in stage.lines}
        for line in stage.lines:
            assert shown[line.name] == pytest.approx(line.num_bytes / 2**30, abs=0.005)
        assert number(rows["total"][column]) == pytest.approx(sum(shown.values()), abs=0.03)
        assert number(rows["free"][column]) == pytest.approx(76.0 - number(rows["total"][column]), abs=0.01)
        assert int(rows["layers"][column]) == plan.layout.layers_of_stage(stage.stage)


def test_explain_shows_each_line_of_the_step_and_their_sum(plan) -> None:
    header, *rows, total = rows_of(to_text(explanation(explained(plan)), Screen(width=200)), "Time of a step")
    assert header == ["stage", "busy", "hidden", "exposed", "share", "bound by"]
    shown = {row[0]: [number(cell) for cell in row[1:5]] for row in rows}
    spent = [line for line in plan.time if line.busy_seconds]
    assert list(shown) == [line.name.replace("_", " ") for line in spent]
    for line, (stage, busy, hidden, exposed) in zip(spent, shown.values(), strict=True):
        assert stage == line.stage
        assert (busy, hidden) == (pytest.approx(line.busy_seconds), pytest.approx(line.hidden_seconds))
        assert exposed == pytest.approx(busy - hidden, abs=0.011)
    assert number(total[1]) == pytest.approx(sum(exposed for *_, exposed in shown.values()), abs=0.05)
    assert number(total[1]) == pytest.approx(total_exposed_seconds(plan.time), abs=0.005)


@pytest.mark.parametrize("title", ["Time, s", "Memory, GiB"])
def test_the_columns_of_a_difference_add_up(title, plan, make_plan) -> None:
    other = slower(make_plan)
    fuller = (replace(other.memory[0].lines[0], num_bytes=5e10), *other.memory[0].lines[1:])
    memory = (replace(other.memory[0], lines=fuller), *other.memory[1:])
    text = to_text(difference_view(difference_of(plan, replace(other, memory=memory)), names=("A", "B")), Screen())
    _, *rows, total = rows_of(text, title)
    assert total[0] == "total"
    for column in (1, 2, 3):
        assert number(total[column]) == pytest.approx(sum(number(row[column]) for row in rows), abs=0.011 * len(rows))


def test_explain_gives_every_formula_and_source(plan) -> None:
    text = to_text(explanation(explained(plan)), Screen())
    for line in (*plan.memory[0].lines, *plan.time):
        assert line.formula in text
        assert line.source in text


@pytest.mark.parametrize(("pp", "kinds"), [(1, 1), (8, 2), (8, 8), (9, 9), (64, 3), (64, 64), (61, 40)])
def test_folded_stages_name_every_stage_once_and_show_the_fullest(pp, kinds, make_plan, make_memory) -> None:
    sizes = [(10.0, 10.0, 10.0, 1.0 + stage * kinds // pp, 1.0, 1.0) for stage in range(pp)]
    memory = make_memory(sizes)
    layout = Layout(pp=pp, recompute=("none",) * pp, layers_per_stage=(1,) * pp)
    text = to_text(explanation(explained(make_plan(memory=memory, layout=layout)), ["memory"]), Screen())
    found = re.findall(r"stages? (\d+)(?:\.\.(\d+))? .* (\d+\.\d+) +\d+%", text)
    named = [stage for first, last, _ in found for stage in range(int(first), int(last or first) + 1)]
    assert named == list(range(pp))
    assert len(found) <= 10
    for first, last, shown in found:
        fullest = max(sum(sizes[stage]) for stage in range(int(first), int(last or first) + 1))
        assert float(shown) == pytest.approx(fullest, abs=0.01)


def test_explain_breaks_many_stages_into_blocks_that_hold_all(make_plan, make_memory) -> None:
    memory = make_memory([(10.0, 10.0, 10.0, 40.0 - stage, 1.0, 1.0) for stage in range(20)])
    layout = Layout(pp=20, recompute=("none",) * 20, layers_per_stage=(1,) * 20)
    text = to_text(explanation(explained(make_plan(memory=memory, layout=layout))), Screen())
    headers = re.findall(r"^  stage((?: +\d+)+)$", text, re.MULTILINE)
    assert [int(stage) for header in headers for stage in header.split()] == list(range(20))
    totals = [float(x) for line in re.findall(r"^  total((?: +[\d.]+)+)$", text, re.MULTILINE) for x in line.split()]
    assert totals == [pytest.approx(72.0 - stage) for stage in range(20)]


def test_summary_says_what_does_not_fit_and_what_is_idle(make_plan, make_memory) -> None:
    over = make_plan(memory=make_memory([(30.0, 30.0, 30.0, 1.0, 1.0, 1.0)] * 4))
    text = to_text(summary(over, (COMMAND,)), Screen())
    assert "does not fit: stage 0 needs 93.0 GiB" in text
    assert "8 of 136 devices" in text
    assert "idle" not in to_text(summary(make_plan(layout=replace(over.layout, dp=17, tp=2)), (COMMAND,)), Screen())


def test_a_search_without_runners_up_says_why(make_plan) -> None:
    text = " ".join(to_text(summary(make_plan(runners_up=()), (COMMAND,)), Screen(width=200)).split())
    assert "Runners-up None: no layout with another tp, pp, cp or ep is within 10%." in text


def test_runners_up_and_proof_are_left_out_where_there_are_none(make_plan) -> None:
    text = to_text(summary(make_plan(runners_up=(), certificate=None), (COMMAND,)), Screen())
    assert "Runners-up" not in text
    assert "proof" not in text


def test_warnings_of_the_solver_are_shown(make_plan, plan) -> None:
    warned = make_plan(certificate=replace(plan.certificate, warnings=("CBC stopped; [/bold] was the answer",)))
    assert "CBC stopped; [/bold] was the answer" in to_text(summary(warned, (COMMAND,)), Screen())


@pytest.mark.parametrize(
    ("hosts", "saved", "expected"),
    [
        (17, None, (f"{COMMAND} -o plan.json", "planner explain plan.json memory")),
        (17, "p.json", ("planner emit p.json", "planner explain p.json memory")),
        (1, "my plan.json", ("planner launch 'my plan.json'", "planner explain 'my plan.json' memory")),
    ],
)
def test_next_commands(hosts, saved, expected, make_plan, plan) -> None:
    changed = make_plan(cluster=plan.cluster.model_copy(update={"hosts": hosts}))
    assert next_commands(changed, COMMAND, saved) == expected


def test_nothing_fits_says_how_far_and_what_helps(nothing, monkeypatch) -> None:
    text = to_text(no_fit(*nothing), Screen())
    assert "138 GiB too much" in text  # 213.5 of 76 GiB
    assert "optimizer state, 120 GiB" in text
    assert "34 hosts instead of 17" in text
    assert "Notes" not in text
    assert "smaller model" in to_text(no_fit(nothing[0], (), ()), Screen())
    ban = SimpleNamespace(words="no run cut the matrices", way_out="tp=1")
    monkeypatch.setattr("planner.show.nothing_fits.bans_of", lambda _: {"tp": ban})
    assert "engine fsdp: no run cut the matrices; tp=1" in to_text(no_fit(*nothing), Screen())


def test_nothing_fits_as_a_document(nothing) -> None:
    document = nothing_fits_to_dict(nothing[0]) | ways_out_to_dict(*nothing[1:])
    assert document["fits"] is False
    assert document["dominating"] == "optimizer_state"
    assert [each["change"] for each in document["remedies"]] == ["34 hosts instead of 17", "sequences of 1024 tokens"]
    assert [(each["pin"], each["fits"]) for each in document["pins"]] == [
        ("tp=8", True),
        ("pp<=2", False),
        ("forbidden zero=3", False),
    ]
    assert document["pins"][0]["remedy"]["change"] == "34 hosts instead of 17"
    assert document["format"] == 3


def test_a_sweep_marks_what_is_best_and_thins_what_is_long(plan, golden) -> None:
    training = plan.training.model_copy(update={"deadline": 60 * 86400.0})
    job = PoolJob(model=plan.model, cluster=plan.cluster, training=training, engine=plan.engine)
    points = []
    for hosts in range(1, 41):
        layout = replace(plan.layout, tp=8, pp=1, dp=hosts, layers_per_stage=(95,), recompute=("none",))
        seconds = 4000 / (8 * hosts) * (1 + abs(hosts - 11) / 100)
        points.append(
            Point(
                hosts=hosts,
                layout=layout,
                step_seconds=seconds,
                peak_bytes=7e10,
                billed_devices=8 * hosts,
                global_batch_size=1536,
            )
        )
    sizes = ((1, None), *((point.hosts, point) for point in points[1:]))
    found = Sweep(job=job, sizes=sizes, front=tuple(points[1:]), constraints=Constraints())
    text = to_text(sweep_view(found), Screen(width=100))
    golden("sweep.txt", text)
    chosen = replace(found, job=replace(job, batch=BatchRange(least=768, most=1536)))
    of_range = to_text(sweep_view(chosen), Screen(width=100))
    assert re.search(r"hosts +devices +batch +step", of_range)
    assert re.search(r"\n +11 +88 +1,536 .*\n(?: +\S+\n)* +cheapest in time", of_range)
    assert re.search(r"\n +11 .*\n(?: +\S+\n)* +cheapest in time", text)
    assert "Nothing fits on fewer than 2 hosts" in " ".join(text.split())
    document = sweep_to_dict(found)
    assert len(document["front"]) == 39
    assert document["sizes"][0] == {"nodes": 1, "plan": None}
    cheapest = min(document["front"], key=lambda point: point["usd"])
    assert cheapest["nodes"] == 11
    assert cheapest["meets_deadline"] == (cheapest["run_seconds"] <= 60 * 86400)


def test_predicted_against_measured(golden) -> None:
    table = comparison(
        [
            Deviation(name="step", stage=None, planned=2.0, measured=2.5, unit="seconds", note="median of 8 steps"),
            Deviation(name="tp_comm", stage=None, planned=0.3, measured=None, unit="seconds", note="has no timer"),
            Deviation(name="pp_comm", stage=None, planned=0.0, measured=None, unit="seconds", note="has no timer"),
            Deviation(name="params", stage=0, planned=2.0**30, measured=2.0**30, unit="bytes"),
            Deviation(name="total", stage=1, planned=0.0, measured=3 * 2.0**29, unit="bytes", note="[/bold]"),
        ]
    )
    golden("comparison.txt", to_text(table, Screen()))


def test_a_long_note_is_folded_beside_its_mark() -> None:
    note = " ".join(f"word{i}" for i in range(40))
    step = Deviation(name="step", stage=None, planned=2.0, measured=2.5, unit="seconds", note=note)
    text = to_text(comparison([step]), Screen(width=50))
    assert note in " ".join(text.split())
    first = next(line for line in text.splitlines() if "word0" in line)
    assert first.split()[0] != "word0", "it stands beside its mark"


def with_limit(plan, *, fits):
    """The plan's memory with limits under which every stage fits, or none does."""
    return tuple(replace(stage, limit_bytes=stage.total_bytes * (2.0 if fits else 0.5)) for stage in plan.memory)


@pytest.mark.parametrize("fits", [True, False])
def test_what_would_make_a_layout_fit_is_said_where_it_does_not(fits, plan) -> None:
    said = to_text(explanation(explained(replace(plan, memory=with_limit(plan, fits=fits)))), Screen())
    assert ("What would make it fit" in said) == (not fits)


def test_a_mixed_cluster_has_the_memory_of_its_smallest_device() -> None:
    pool = {"devices_per_host": 8, "device": "a", "memory_bytes": 80 * 2**30}
    links = [{"name": "ib", "bytes_per_second": 25e9}]
    mixed = {"name": "both", "pools": [pool, pool | {"device": "b", "memory_bytes": 40 * 2**30}], "links": links}
    text = to_text(cluster_table([{"name": "one", **pool, "links": links}, mixed]), Screen(width=100))
    one, both = text.splitlines()[1:3]
    assert one.split() == ["one", "8", "x", "a", "80.0", "GiB", "ib", "25.0", "GB/s"]
    assert "2 pools" in both
    assert "40.0 GiB" in both
    assert both.endswith("8 x a + 8 x b, ib 25.0 GB/s")


def test_lines_that_took_no_time_are_left_out(make_plan) -> None:
    plan = make_plan()
    quiet = replace(plan.time[-1], name=LineName.EP_COMM, busy_seconds=0.0, hidden_seconds=0.0)
    one, other = (explained(each) for each in (plan, replace(plan, time=(*plan.time, quiet))))
    assert to_text(explanation(one), Screen(width=100)) == to_text(explanation(other), Screen(width=100))


@pytest.mark.parametrize(
    ("band", "short", "whole"),
    [
        (
            Band(low=0.9, high=1.1, num_near=12, axes="tp+pp"),
            "rests on 12 runs like it",
            "12 runs on a100-80gb, engine torch, axes tp+pp",
        ),
        (Band(low=0.9, high=1.1, num_near=1, axes="tp+pp"), "rests on 1 run like it", "1 run on a100-80gb"),
        (Band(low=0.9, high=1.1, axes="tp+pp"), "no run behind it is quite like it", "0 runs on a100-80gb"),
        (
            Band(low=0.9, high=1.1, unseen=("engine", "axes"), axes="tp+pp", family="a-firm"),
            "no run behind it has engine torch, axes tp+pp; one family of publishers, a-firm",
            "the corrections rest on one family of publishers, a-firm",
        ),
        (None, "none: no published run is on such devices", "none: no published run is on such devices"),
    ],
)
def test_a_band_says_what_it_rests_on(band, short, whole, make_plan) -> None:
    plan = make_plan(band=band)
    views = summary(plan, (COMMAND,)), explanation(explained(plan), ["band"])
    answer, section = (" ".join(to_text(each, Screen(width=200)).split()) for each in views)
    assert short in answer
    assert ("8 of 10 runs: " in answer) == (band is not None)
    assert whole in section


def test_adapters_and_hosts_are_in_the_summary() -> None:
    """LoRA of rank 16 on queries and values of Llama 3 8B: 32 layers of 16 (4096 + 4096 + 4096 + 1024) parameters."""
    arguments = {"model": "llama3-8b", "cluster": "dgx-h100", "nodes": 1, "global_batch_size": 32}
    lora = ("training.lora_rank=16", "training.lora_targets=[query, value]", "training.frozen_weights=nf4")
    plans = []
    for options, layout in (
        ({"engine": "fsdp", "settings": lora}, "zero=3"),
        ({"engine": "megatron"}, "tp=2,zero=1,offload=optimizer"),
    ):
        job = load_job(**arguments, **options)
        plans.append(plan_for_layout(job, parse_layout(layout, num_layers=32, num_devices=8)))
    trained, hosted = (" ".join(to_text(summary(plan, (COMMAND,)), Screen(width=200)).split()) for plan in plans)
    assert 32 * 16 * (4096 + 4096 + 4096 + 1024) == 6_815_744
    assert (
        "trains 6.82 M of 8.03 B parameters: adapters of rank 16 beside query, value; the others are frozen in nf4"
        in (trained)
    )
    host = plans[1].memory[0].host
    sizes = ", ".join(f"{line.name.value.replace('_', ' ')} {format_bytes(line.num_bytes)}" for line in host.lines)
    assert f"on the host {sizes} of {format_bytes(host.limit_bytes)} for each device" in hosted
    assert "trains" not in hosted
    assert "on the host" not in trained


@pytest.mark.parametrize("ties", [(), (0,), (1,), (0, 1)])
def test_near_ties_are_explained_where_there_is_one(ties, make_plan) -> None:
    plan = make_plan()
    runners = tuple(replace(each, near_tie=index in ties) for index, each in enumerate(plan.runners_up))
    text = " ".join(to_text(summary(replace(plan, runners_up=runners), (COMMAND,)), Screen(width=200)).split())
    assert text.count("; near tie") == len(ties)
    assert ("near tie: less than 3% apart" in text) == bool(ties)


def red(view) -> list[str]:
    """The text that is bold red on a screen with colours."""
    found = re.findall("\x1b\\[1;31m([^\x1b]*)", to_text(view, Screen(width=120, color=True)))
    return [each.strip() for each in found]


def test_what_does_not_go_is_red(make_plan, make_memory, nothing) -> None:
    plan = make_plan()
    assert red(summary(plan, (COMMAND,))) == red(explanation(explained(plan)))[1:] == []
    assert red(explanation(explained(plan)))[0].endswith("too much")
    full = make_plan(memory=make_memory([(40.0, 20.0, 20.0, 1.0, 1.0, 1.0)] + [(10.0,) * 6] * 3))
    assert red(summary(full, (COMMAND,))) == ["does not fit", "does not fit"]
    assert {"109%", "30%"} <= set(red(explanation(explained(full), ["memory"])))
    assert "-7.00" in red(explanation(explained(full)))
    said = red(answers(answered(plan, make_plan)))
    assert {"No legal layout:", "too much"} <= set(said)
    assert [each for each in said if each.startswith("Does not fit: 10.2 GiB")]
    assert red(no_fit(*nothing))[0] == "Nothing fits:"


def test_a_narrow_list_of_clusters_does_without_memory() -> None:
    pool = {"devices_per_host": 8, "device": "a100-80gb", "memory_bytes": 80 * 2**30}
    entry = {"name": "a-cluster", **pool, "links": [{"name": "infiniband", "bytes_per_second": 25e9}]}
    wide, narrow = (to_text(cluster_table([entry]), Screen(width=width)) for width in (80, 48))
    assert "80.0 GiB" in wide
    assert "80.0 GiB" not in narrow
    assert "8 x a100-80gb" in narrow
    assert "infiniband" in narrow
