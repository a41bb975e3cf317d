"""The screens on which text is shown, and characters that never reach a terminal."""

import io
import re
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from planner.show.columns import Columns, Flow, assignments
from planner.show.screen import Screen, clean, section, stack, to_text

HOSTILE = [
    "[/bold]",
    "[red]evil[/red]",
    "\x1b]0;title\x07",
    "\x1b[2J",
    "a\u202eb",
    "\x9b31m",
    "$(id)",
    "a\nb",
    "\ud800",
]


class Stream(io.StringIO):
    def __init__(self, *, tty: bool = True, encoding: str = "utf-8") -> None:
        super().__init__()
        self.tty, self.code = tty, encoding

    def isatty(self) -> bool:
        return self.tty

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.code


@pytest.mark.parametrize(
    ("environ", "tty", "encoding", "expected"),
    [
        ({"COLUMNS": "100"}, True, "utf-8", (100, True, True)),
        ({"COLUMNS": "100", "NO_COLOR": "1"}, True, "utf-8", (100, False, True)),
        ({"COLUMNS": "100", "NO_COLOR": ""}, True, "utf-8", (100, True, True)),  # no-color.org: present and not empty
        ({"COLUMNS": "100", "TERM": "dumb"}, True, "utf-8", (100, False, False)),
        ({"COLUMNS": "100", "LC_ALL": "C"}, True, "utf-8", (100, True, False)),
        ({"COLUMNS": "100"}, True, "latin-1", (100, True, False)),
        ({}, False, "utf-8", (80, False, True)),
        ({"COLUMNS": "40"}, False, "ascii", (40, False, False)),
        ({"COLUMNS": "5"}, False, "utf-8", (20, False, True)),
        ({"COLUMNS": "500"}, False, "utf-8", (120, False, True)),
        ({"COLUMNS": "wide"}, False, "utf-8", (80, False, True)),
        ({"COLUMNS": "0"}, False, "utf-8", (80, False, True)),
        ({"COLUMNS": "-3"}, False, "utf-8", (80, False, True)),
    ],
)
def test_screen_of_a_stream(environ, tty, encoding, expected) -> None:
    screen = Screen.of(Stream(tty=tty, encoding=encoding), environ)
    assert (screen.width, screen.color, screen.unicode) == expected


@given(st.text(st.characters()))
def test_clean_text_is_printable_and_printable_text_is_kept(text: str) -> None:
    assert clean(text).isprintable()
    if text.isprintable():
        assert clean(text) == text


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("color", [True, False])
def test_hostile_text_is_shown_and_not_obeyed(text: str, color: bool) -> None:
    shown = to_text(section("title", Text(clean(text))), Screen(color=color))
    assert clean(text) in shown
    assert not set(shown.replace("\x1b[1m", "").replace("\x1b[0m", "")) & {"\x1b", "\x07", "\x9b", "\u202e", "\ud800"}


def test_plain_screen_gets_no_escape_bytes() -> None:
    assert "\x1b" not in to_text(Text("x", style="bold red"), Screen())
    assert "\x1b" in to_text(Text("x", style="bold red"), Screen(color=True))


VTE = {"TERM": "xterm-256color", "VTE_VERSION": "7600"}


@pytest.mark.parametrize(
    ("environ", "tty", "expected"),
    [
        (VTE, True, True),
        (VTE, False, False),
        ({**VTE, "NO_COLOR": "1"}, True, False),
        ({**VTE, "TERM": "dumb"}, True, False),
        ({**VTE, "TERM": "tmux-256color"}, True, False),
        ({**VTE, "SSH_CONNECTION": "a 1 b 22"}, True, False),
        ({**VTE, "VTE_VERSION": "5000"}, True, False),
        ({**VTE, "VTE_VERSION": "new"}, True, False),
        ({**VTE, "FORCE_HYPERLINK": "0"}, True, False),
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "xterm", "FORCE_HYPERLINK": "1"}, True, True),
        ({"TERM": "xterm", "FORCE_HYPERLINK": "1"}, False, False),
        ({"TERM": "xterm-kitty"}, True, True),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, True, True),
        ({"TERM": "xterm-256color", "WT_SESSION": "x"}, True, True),
    ],
)
def test_links_are_for_terminals_that_show_them(environ, tty, expected) -> None:
    assert Screen.of(Stream(tty=tty), environ).links is expected


OSC8 = re.compile("\x1b\\]8;;([^\x1b]*)\x1b\\\\")


def test_terms_lead_to_the_glossary_and_nothing_else_does() -> None:
    view = section("Bubble", Columns([("tp comm", "bubble"), ("[/bold]", "1"), (clean("\x1b]8;;x"), "2")]))
    text = to_text(view, Screen(color=True, links=True))
    starts = [target for target in OSC8.findall(text) if target]
    assert [target.rpartition("#")[2] for target in starts] == ["time", "time"]
    assert all(Path(url2pathname(urlsplit(target).path)).read_text().startswith("# Glossary") for target in starts)
    assert len(OSC8.findall(text)) == 2 * len(starts), "every link ends"
    assert to_text(view, Screen(color=True, links=True)) == text, "equal input gives equal bytes"
    assert OSC8.sub("", text) == to_text(view, Screen(color=True))
    assert "\x1b]" not in to_text(view, Screen(color=True))


@pytest.mark.parametrize("text", ["[/bold]", "[red]x[/red]", ":smile:"])
def test_plain_strings_are_not_markup(text: str) -> None:
    assert to_text(text, Screen()) == f"{text}\n"
    assert to_text(Columns([(text, text)]), Screen()) == f"{text}  {text}\n"


def test_stack_leaves_out_what_is_missing() -> None:
    assert to_text(stack(Text("a"), None, Text("b")), Screen()) == "a\n\nb\n"


FIGURES = st.integers(0, 10**9).map(str)


@given(st.lists(st.tuples(st.text("ab ", max_size=20), FIGURES, FIGURES), min_size=1, max_size=5), st.integers(20, 90))
def test_columns_never_cut_a_figure(rows: list[tuple[str, str, str]], width: int) -> None:
    text = to_text(Columns(rows, right=(1, 2), header=("", "first", "second")), Screen(width=width))
    words = text.split()
    for _, first, second in rows:
        assert first in words
        assert second in words
    assert all(len(line) <= width for line in text.splitlines())


def test_optional_columns_go_first() -> None:
    table = Columns([("name", "1234567890", "42")], right=(1, 2), optional=(1,), header=("", "long", "short"))
    assert "1234567890" in to_text(table, Screen(width=40))
    narrow = to_text(table, Screen(width=20))
    assert "1234567890" not in narrow
    assert "42" in narrow


@given(st.lists(st.text("abc=,", min_size=1, max_size=12), min_size=1, max_size=9), st.integers(20, 60))
def test_flow_breaks_between_items_only(items: list[str], width: int) -> None:
    lines = to_text(Flow([Text(item) for item in items]), Screen(width=width)).splitlines()
    assert " ".join(lines).split() == items
    assert all(len(line) <= width for line in lines)


def test_assignments_break_after_commas_and_join_to_the_same_text() -> None:
    text = "tp=8,pp=4,dp=32,layers_per_stage=12/12/12/11,recompute=full"
    lines = to_text(assignments(text), Screen(width=30)).splitlines()
    assert "".join(lines) == text
    assert all(line.endswith(",") for line in lines[:-1])
