"""The progress that a search shows to a waiting user."""

import inspect
import io
import json
import math
import re
import time

import pytest

from planner.errors import EnvironmentProblem
from planner.search.reporter import Reporter
from planner.show import progress as module
from planner.show.progress import Progress, write_stats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def tell_everything(reporter: Reporter) -> None:
    reporter.candidates(120, 30)
    reporter.pruned("memory", 40)
    reporter.priced(3, math.inf)  # a bound ruled out all that was priced so far
    reporter.priced(7, 0.25)
    reporter.solving("cbc", 3)
    reporter.solved("optimal", 0.25, 0.0)


def test_every_event_of_the_search_is_heard() -> None:
    events = {name for name, _ in inspect.getmembers(Reporter, inspect.isfunction) if not name.startswith("_")}
    assert events <= set(vars(Progress))


def test_a_pipe_gets_nothing_of_a_quick_search() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        tell_everything(progress)
    assert stream.getvalue() == ""
    assert progress.stats["num_legal"] == 120


def test_a_quick_search_shows_nothing_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 3600.0)
    stream = Terminal()
    with Progress(stream) as progress:
        tell_everything(progress)
    assert stream.getvalue() == ""


def wait_for(stream: io.StringIO, text: str) -> None:
    """Wait until another thread has written a text."""
    end = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.01)


def test_a_slow_search_shows_where_it_is_and_wipes_it(monkeypatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with Progress(stream) as progress:
        tell_everything(progress)
        wait_for(stream, "CBC proves the best of 3")
    assert stream.getvalue().endswith("\x1b[2K")  # the line is erased


def test_a_note_stays_while_the_line_below_it_goes(monkeypatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with Progress(stream, "pricing") as progress:
        progress.noted("[b] is left out")
        wait_for(stream, "pricing")
        progress.noted("[c] too")
    notes = re.findall(r"note: .*", stream.getvalue())
    assert [note.strip() for note in notes] == ["note: [b] is left out", "note: [c] too"]


def test_a_slow_search_writes_plain_lines_into_a_pipe(monkeypatch) -> None:
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.01)
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.about("8 devices")
        progress.candidates(12_000, 0)
        progress.priced(7, 0.25)
        wait_for(stream, "8 devices: 7 of 12,000 configurations priced, best step 250 ms\n")
    assert stream.getvalue().replace("\n", "").isprintable()


def test_a_line_that_stays_the_same_is_written_more_and_more_rarely(monkeypatch) -> None:
    monkeypatch.setattr(module, "_LINE_SECONDS", 5.0)
    progress, waits = Progress(io.StringIO(), "counting"), []
    monkeypatch.setattr(progress._done, "wait", lambda seconds: waits.append(seconds) or len(waits) > 5)
    progress._write_lines()
    assert waits == [5.0, 5.0, 10.0, 20.0, 40.0, 80.0]
    assert progress._stream.getvalue() == 5 * "counting\n"


def test_a_reader_that_has_gone_ends_no_search(monkeypatch) -> None:
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with Progress(stream) as progress:
        stream.close()
        progress._thread.join()
        tell_everything(progress)
    assert progress.stats["status"] == "optimal"


def test_stats_are_counts_and_growing_times(tmp_path) -> None:
    with Progress(io.StringIO()) as progress:
        tell_everything(progress)
    write_stats(progress, tmp_path / "stats.json")
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["num_pruned"] == {"memory": 40}
    assert stats["status"] == "optimal"
    order = ["listed_after_seconds", "priced_after_seconds", "solved_after_seconds", "total_seconds"]
    assert [stats[name] for name in order] == sorted(stats[name] for name in order)


def test_stats_in_a_missing_folder_are_a_problem_of_the_environment(tmp_path) -> None:
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        write_stats(Progress(io.StringIO()), tmp_path / "missing" / "stats.json")
