"""The page: its figures are those of the plan, it loads nothing, and it works in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from planner.answers.executed import executed_step
from planner.answers.plan_inputs import job_of
from planner.answers.report import explain
from planner.answers.scaling import replicas_of
from planner.answers.what_if import sensitivity_of
from planner.cli import main
from planner.commands.explain import _page
from planner.cost.estimate import timeline
from planner.cost.schedule_comparison import with_schedule
from planner.layout_text import parse_layout
from planner.plan import plan_to_json
from planner.search.given import plan_for_layout
from planner.show.explain import answers
from planner.show.page.drawings import timeline_data
from planner.show.page.render import page_text
from planner.show.screen import Screen, clean, to_text
from planner.show.trace import trace_text
from planner.specs.load import load_job
from planner.units import format_bytes, format_seconds

LARGEST = 1_000_000


class Reader(HTMLParser):
    """Elements with their attributes, the text, and the contents of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.raw = "", []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):  # noqa: ARG002 - the signature of the parser
        self._inside = ""

    def handle_data(self, data):
        if self._inside in ("script", "style"):
            self.raw.append((self._inside, data))
        else:
            self.text += data


def page_of(plan, **questions) -> str:
    return "".join(_page(explain(plan, **questions)))


@pytest.fixture(scope="module")
def any_page(any_plan) -> str:
    return page_of(any_plan)


@pytest.fixture(scope="module")
def interleaved(plan_of_kind):
    return plan_of_kind("interleaved")


@pytest.fixture(scope="module")
def largest():
    """64 stages and 512 microbatches."""
    job = load_job(model="megatron-1t", cluster="dgx-a100", nodes=512, sequence_length=2048, global_batch_size=4096)
    return plan_for_layout(job, parse_layout("tp=8,pp=64,zero=1,recompute=full", num_layers=128, num_devices=4096))


@pytest.fixture(scope="module")
def largest_page(largest):
    return page_of(largest)


# --- the text -------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_plan_says(any_plan, any_page) -> None:
    text = Reader(any_page).text
    assert any_plan.model.name in text
    assert format_seconds(any_plan.step_seconds) in text
    for stage in any_plan.memory:
        if any_plan.layout.pp <= 16:
            assert format_bytes(stage.total_bytes) in text
    for line in any_plan.time:
        assert line.formula in text
        assert line.source in text


def test_the_page_may_load_nothing_and_run_only_its_own_script(any_page) -> None:
    page = Reader(any_page)
    policy = next(each["content"] for tag, each in page.elements if each.get("http-equiv"))
    allowed = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert allowed["default-src"] == "'none'"
    hashes = {"script-src": set(), "style-src": set()}
    for kind, text in page.raw:
        if kind == "script" and text.startswith('{"timeline"'):
            json.loads(text)
            continue
        hashes[f"{kind}-src"].add("'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'")
    assert {key: {allowed[key]} for key in hashes} == hashes
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not [name for name in attributes if name in ("src", "style") or name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")


@pytest.mark.parametrize("kind", ["interleaved", "experts", "mixed"])
def test_pages_are_reproducible(kind, plan_of_kind) -> None:
    assert page_of(plan_of_kind(kind)) == page_of(plan_of_kind(kind))


def test_the_largest_page_is_small(largest_page) -> None:
    assert len(largest_page.encode()) <= LARGEST


def test_every_answer_stands_on_the_page_as_in_the_terminal(plan_of_kind) -> None:
    plan = plan_of_kind("zero-2")
    asked = {
        "why_not": ("tp=3",),
        "what_if": ("", "seq_len=1k"),
        "schedules": True,
        "collectives": True,
        "batch": True,
        "scaling": "4..8",
    }
    found = explain(plan, **asked)
    text = "".join(_page(found))
    printed = re.sub(r"\s", "", Reader(text).text)
    for paragraph in to_text(answers(found), Screen(width=100)).split("\n\n")[2:]:
        assert re.sub(r"\s", "", paragraph) in printed
    without = page_of(plan)
    assert "Answers" not in without
    assert "plans each size anew" in without
    assert "plans each size anew" not in text
    assert "Planned again" in text


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zbv"])
def test_the_arrays_are_the_executed_step(plan_of_kind, schedule) -> None:
    """Read back by hand and compared with `timeline`, which is independent of the page."""
    base = plan_of_kind("uneven, recompute")
    job, layout = job_of(base), with_schedule(base.layout, schedule)
    plan_for_layout(job, layout)
    data, expected = timeline_data(executed_step(job, layout)), timeline(job, layout)
    packed, n = zlib.decompress(base64.b64decode(data["passes"])), data["num_passes"]
    waits, microbatches = np.frombuffer(packed, "<f4", n), np.frombuffer(packed, "<u4", n, 4 * n)
    kinds = [data["kinds"][index] for index in np.frombuffer(packed, "<u2", n, 8 * n)]
    assert [kind["letter"] for kind in kinds] == expected.kind.tolist()
    assert [kind["chunk"] for kind in kinds] == expected.chunk.tolist()
    assert microbatches.tolist() == expected.microbatch.tolist()
    index = 0
    for count in data["counts"]:
        now = 0.0
        for _ in range(count):
            now += float(waits[index])
            assert now == pytest.approx(expected.start[index], rel=1e-5, abs=1e-6)
            now += kinds[index]["seconds"]
            assert now == pytest.approx(expected.end[index], rel=1e-5, abs=1e-6)
            index += 1


# --- hostile text ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile_page(plan_of_kind, hostile):
    """Figures that are priced again use the plain names, because no document accepts other names."""
    plan = plan_of_kind("zero-2")
    found, replicas = sensitivity_of(plan, search=False), replicas_of(plan)
    step = executed_step(job_of(plan), plan.layout)

    def page(text: str) -> str:
        texts = {"resource": text, "before": text, "after": text}
        gains = found.model_copy(update={"gains": tuple(each.model_copy(update=texts) for each in found.gains)})
        return page_text(explain(hostile(plan, text)), step, replicas=replicas, gains=gains)

    return page


@pytest.fixture(scope="module")
def harmless(hostile_page):
    return Reader(hostile_page("plain"))


@pytest.mark.parametrize("part", range(6))
def test_hostile_text_is_shown_and_makes_no_element(hostile_page, harmless, hostile_texts, part) -> None:
    """Each page has every fifth text, one after another; the longest text has a page of its own."""
    *short, longest = hostile_texts
    text = "\n".join(short[part::5]) if part < 5 else longest
    source = hostile_page(text)
    page = Reader(source)
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in harmless.elements]
    assert [sorted(each) for _, each in page.elements] == [sorted(each) for _, each in harmless.elements]
    shown = "".join(map(clean, text.split("\n"))).strip()
    assert re.sub(r"\s", "", shown) in re.sub(r"\s", "", page.text)
    assert not set(source) & set("\x00\x07\x1b\x7f\x9b\u202e\u2066\u2028\u2029\ud800")


def test_hostile_text_stays_text_in_json_and_trace(plan_of_kind, hostile, hostile_text) -> None:
    text = hostile_text
    plan = hostile(plan_of_kind("zero-2"), text)
    printed = explain(plan).to_json()
    traced = "".join(trace_text(plan))
    assert printed.isascii()
    assert traced.isascii()
    assert json.loads(printed)["model"]["name"] == text
    assert json.loads(traced)["otherData"]["model"] == text


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(browser, tmp_path):
    def write_and_open(plan, text=None, **options):
        path = tmp_path / "page.html"
        path.write_text(text or page_of(plan), encoding="utf-8")
        browser.open(path, **options)
        return browser

    yield write_and_open
    assert browser.messages == []
    assert [url for url in browser.requests if not url.startswith("file:///")] == []
    assert len(browser.requests) == 1


def test_hostile_text_does_nothing_in_a_browser(opened, plan_of_kind, hostile_page, hostile_texts) -> None:
    names = [text for text in hostile_texts if "\ud800" not in text]
    browser = opened(plan_of_kind("zero-2"), hostile_page("".join(names)))
    assert browser.evaluate("window.owned") is None
    assert "onerror" in browser.evaluate("document.title")


@pytest.mark.parametrize("kind", ["one device", "interleaved", "zero-3, hybrid", "experts", "context"])
def test_every_kind_of_plan_opens(opened, plan_of_kind, kind) -> None:
    browser = opened(plan_of_kind(kind))
    assert browser.evaluate("document.querySelectorAll('section').length") == 10


def test_terms_lead_to_their_entry_on_the_page(opened, interleaved) -> None:
    browser = opened(interleaved)
    links = browser.evaluate("[...document.querySelectorAll('a.term')].map((a) => [a.hash, a.title, a.textContent])")
    assert {text for _, _, text in links} >= {"MFU", "schedule", "optimizer state", "kernel efficiency", "tp comm"}
    for target, title, text in links:
        entry = browser.evaluate(f"document.querySelector('{target}').textContent")
        assert re.sub(r"\W", "", entry) == re.sub(r"\W", "", title)
        assert text.lower().replace(" ", "_") in entry.lower().replace(" ", "_")
    browser.evaluate("document.querySelector('.legend a.term').click()")
    assert browser.evaluate("document.querySelector(':target dt').textContent") == "params"


def test_search_shows_the_lines_that_have_all_words(opened, interleaved) -> None:
    browser = opened(interleaved)
    lines = browser.evaluate("[...document.getElementById('lines').rows].map((row) => row.textContent)")
    browser.evaluate("document.getElementById('search').focus()")
    browser.call("Input.insertText", text="ZeRO rajbhandari")
    shown = browser.evaluate("[...document.getElementById('lines').rows].filter((r) => r.offsetHeight).length")
    expected = sum("zero" in line.lower() and "rajbhandari" in line.lower() for line in lines)
    assert 0 < shown == expected < len(lines)
    assert browser.evaluate("document.getElementById('found').textContent") == f"{expected} of {len(lines)} lines"


def spot(browser, plan, index: int) -> tuple[float, float]:
    """The position of the middle of a drawn pass."""
    box = browser.evaluate(
        "(() => { const c = document.getElementById('canvas');"
        " c.scrollIntoView({block: 'center', behavior: 'instant'});"
        " const b = c.getBoundingClientRect();"
        " return [b.left, b.top, c.clientWidth, c.clientHeight, c.clientLeft] })()"
    )
    step = browser.evaluate("JSON.parse(document.getElementById('data').textContent).timeline.step_seconds")
    passes = timeline(job_of(plan), plan.layout)
    middle = (passes.start[index] + passes.end[index]) / 2
    height = (box[3] - 20) / plan.layout.pp
    return box[0] + box[4] + 34 + middle / step * (box[2] - 34), box[1] + (passes.stage[index] + 0.5) * height


def reading(browser) -> str:
    return browser.evaluate("document.getElementById('reading').textContent")


def test_hovering_tells_stage_microbatch_and_time(opened, plan_of_kind) -> None:
    plan = plan_of_kind("uneven, recompute")
    browser, passes = opened(plan), timeline(job_of(plan), plan.layout)
    for index in (0, len(passes.kind) // 2, len(passes.kind) - 1):
        browser.hover(*spot(browser, plan, index))
        kind = {"F": "forward", "B": "backward"}[str(passes.kind[index])]
        expected = f"Stage {passes.stage[index]}, {kind}, microbatch {passes.microbatch[index]}: "
        assert reading(browser).startswith(expected)
        numbers = re.findall(r"([\d.]+) (s|ms|us)\b", reading(browser))
        told = [float(value) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit] for value, unit in numbers]
        assert told[0] == pytest.approx(passes.start[index], rel=1e-3, abs=1e-9)
        assert told[1] == pytest.approx(passes.end[index], rel=1e-3)


def test_keys_go_from_pass_to_pass(opened, plan_of_kind) -> None:
    browser = opened(plan_of_kind("uneven, recompute"))
    browser.evaluate("document.getElementById('canvas').focus()")
    browser.press("ArrowRight")
    assert reading(browser).startswith("Stage 0, forward, microbatch 0")
    browser.press("ArrowRight")
    assert reading(browser).startswith("Stage 0, forward, microbatch 1")
    browser.press("ArrowDown")
    assert reading(browser).startswith("Stage 1, ")
    for key in ("+", "+", "ArrowRight", "-", "0", "ArrowLeft", "ArrowUp"):
        browser.press(key)
    assert reading(browser).startswith("Stage 0, ")


def test_zooming_shows_a_part_and_all_again(opened, plan_of_kind) -> None:
    """When less time is shown, the same place on the screen belongs to another pass."""
    plan = plan_of_kind("uneven, recompute")
    browser, num_passes = opened(plan), len(timeline(job_of(plan), plan.layout).kind)
    here, there = (spot(browser, plan, index) for index in (2, num_passes // 4 - 3))  # both on stage 0

    def seen() -> str:
        browser.hover(*here)
        browser.hover(*there)
        found = reading(browser)
        browser.hover(*here)
        return found

    whole = seen()
    for zoom_in, back in (("+", "-"), ("+", "0"), ("zoom-in", "zoom-out"), ("zoom-in", "zoom-all")):
        for control in (zoom_in, back):
            if len(control) == 1:
                browser.evaluate("document.getElementById('canvas').focus({preventScroll: true})")
                browser.press(control)
            else:
                browser.evaluate(f"document.getElementById('{control}').click()")
            # the browser may draw a frame later than it answers: the pointer comes again
            assert any((seen() == whole) == (control == back) for _ in range(5)), control


def test_the_drawing_has_the_colors_of_its_legend(opened, interleaved) -> None:
    browser, passes = opened(interleaved), timeline(job_of(interleaved), interleaved.layout)
    for index in (0, int(np.flatnonzero(passes.kind == "B")[-1])):
        x, y = spot(browser, interleaved, index)
        key = "forward" if passes.kind[index] == "F" else "backward"
        color = browser.evaluate(f"getComputedStyle(document.querySelector('[data-key={key}] rect')).fill")
        legend = [int(value) for value in re.findall(r"\d+", color)]
        end = time.monotonic() + 60
        while True:  # a frame may be drawn later on a busy machine
            found = browser.evaluate(
                f"(() => {{ const c = document.getElementById('canvas'), b = c.getBoundingClientRect();"
                f" const x = {x} - b.left - c.clientLeft, y = {y} - b.top - 6;"
                f" const copy = new OffscreenCanvas(1, 1).getContext('2d', {{willReadFrequently: true}});"
                f" copy.drawImage(c, x, y, 1, 1, 0, 0, 1, 1);"
                f" return [...copy.getImageData(0, 0, 1, 1).data] }})()"
            )
            if all(0.8 * whole - 2 <= part <= whole + 1 for part, whole in zip(found, legend, strict=False)):
                break
            assert time.monotonic() < end, (found, legend)
            time.sleep(0.2)  # else asking leaves no time to draw
            time.sleep(0.1)
    browser.messages.clear()  # a hint that reading pixels back is slow, which only this test does


def test_64_stages_and_512_microbatches_are_drawn(opened, largest, largest_page) -> None:
    browser = opened(largest, largest_page)
    assert browser.evaluate("JSON.parse(document.getElementById('data').textContent).timeline.num_passes") == 65_536
    browser.hover(*spot(browser, largest, 40_000))
    assert reading(browser).startswith(f"Stage {timeline(job_of(largest), largest.layout).stage[40_000]}, ")


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_nothing_is_wider_than_the_window(opened, interleaved, width) -> None:
    browser = opened(interleaved, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark_follow_the_system_and_the_button(opened, interleaved) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    browser = opened(interleaved, dark=True)
    dark = browser.evaluate(ground)
    browser.evaluate("document.getElementById('theme').click()")
    light = browser.evaluate(ground)
    assert light != dark
    assert browser.evaluate("document.getElementById('theme').textContent") == "Dark"
    opened(interleaved)
    assert browser.evaluate(ground) == light


def test_groups_of_a_rank_are_those_of_the_layout(opened, interleaved) -> None:
    browser, layout = opened(interleaved), interleaved.layout
    browser.evaluate("document.querySelector('[data-rank=\"11\"]').click()")
    told = browser.evaluate("document.getElementById('groups').textContent")
    for axis in ("tp", "pp"):
        assert ", ".join(map(str, layout.group(axis, 11))) in told
    assert f"{layout.group('dp', 11)[8]}, ... {layout.group('dp', 11)[-1]}" in told
    framed = browser.evaluate("[...document.querySelectorAll('[data-group~=tp]')].map((b) => Number(b.dataset.rank))")
    assert sorted([*framed, 11]) == list(layout.group("tp", 11))


def test_every_control_can_be_reached_and_named(opened, interleaved) -> None:
    browser = opened(interleaved)
    for node in browser.call("Accessibility.getFullAXTree")["nodes"]:
        if node.get("role", {}).get("value") in ("button", "link", "searchbox", "application", "img"):
            assert node["name"]["value"].strip(), node
    assert browser.evaluate("[...document.querySelectorAll('[tabindex]')].every((e) => e.tabIndex >= 0)")


def test_the_page_can_be_printed(opened, interleaved) -> None:
    assert base64.b64decode(opened(interleaved).call("Page.printToPDF")["data"]).startswith(b"%PDF")


# --- the option -----------------------------------------------------------------------------------------------------


def test_the_option_writes_both_files(plan_of_kind, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(plan_to_json(plan_of_kind("one device")), encoding="utf-8")
    assert main(["explain", "plan.json", "--html", "p.html", "--trace", "t.json"]) == 0
    assert capsys.readouterr() == ("", "wrote p.html\nwrote t.json\n")
    assert main(["explain", "plan.json", "--html", "p.html"]) == 2
    assert "add --force" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "first"), [("--html", "<!doctype html>"), ("--trace", '{"displayTimeUnit"')])
def test_a_report_can_go_to_standard_output(plan_of_kind, tmp_path, monkeypatch, capsys, option, first) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(plan_to_json(plan_of_kind("one device")), encoding="utf-8")
    assert main(["explain", "plan.json", option, "-", "--batch"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(first)
    assert "Microbatch size" not in re.split("<section id=.answers", out)[0]  # nothing but the report
    assert err == ""
    assert main(["explain", "plan.json", option, "-", "--json"]) == 2
    assert not (tmp_path / "-").exists()
