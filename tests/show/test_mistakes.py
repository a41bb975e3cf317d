"""How mistakes are shown."""

import pytest

from planner.errors import InputError, Mistake
from planner.show.mistakes import mistakes_text
from planner.show.screen import Screen

PLAIN = Screen(unicode=False)


def test_message_place_line_caret_and_help(golden) -> None:
    error = InputError(
        Mistake(
            message="unknown key `num_layer`",
            where="my.yaml:14:3",
            hint="did you mean `num_layers`?",
            source_line="  num_layer: 32",
        ),
        Mistake(message="`mbs=x` is no legal value", where="--pin", hint="mbs is a whole number of at least 1"),
        "the batch does not divide",
    )
    golden("mistakes.txt", mistakes_text(error, PLAIN))


@pytest.mark.parametrize("column", [1, 5, 70, 200, 399])
@pytest.mark.parametrize("width", [20, 80])
def test_caret_stands_under_the_column(column: int, width: int) -> None:
    line = "".join(chr(ord("a") + i % 26) for i in range(400))
    error = InputError(Mistake(message="bad", where=f"f.yaml:7:{column}", source_line=line))
    quoted, caret = mistakes_text(error, Screen(width=width)).splitlines()[2:]
    assert quoted[caret.index("^")] == line[column - 1]
    assert len(quoted) <= max(width, 20)


def test_caret_stands_right_behind_tabs() -> None:
    error = InputError(Mistake(message="bad", where="f.yaml:1:3", source_line="\t\tkey: 1"))
    quoted, caret = mistakes_text(error, PLAIN).splitlines()[2:]
    assert quoted[caret.index("^")] == "k"


def test_every_mistake_up_to_twenty_is_shown() -> None:
    text = mistakes_text(InputError(*(f"mistake {i}." for i in range(25))), PLAIN)
    assert [f"mistake {i}." in text for i in range(25)] == [True] * 20 + [False] * 5
    assert "and 5 more" in text


def test_long_messages_are_broken_at_words_on_a_terminal_only() -> None:
    words = [f"word-{i}" for i in range(40)]
    error = InputError(" ".join(words), hint=" ".join(words))
    pipe = mistakes_text(error, Screen(width=40))
    assert len(pipe.splitlines()) == 2
    window = mistakes_text(error, Screen(width=40, terminal=True))
    assert window.split() == pipe.split()
    assert all(len(line) <= 40 for line in window.splitlines())


def test_colour_only_where_there_is_colour() -> None:
    error = InputError(Mistake(message="bad", where="f:1:1", source_line="x", hint="good"))
    colored = mistakes_text(error, Screen(color=True))
    assert "\x1b[1;31merror:" in colored
    assert "\x1b" not in mistakes_text(error, Screen())


@pytest.mark.parametrize("text", ["\x1b[2J", "[/bold]", "a\u202eb", "\ud800", "\x9b0m"])
def test_hostile_text_is_written_out(text: str) -> None:
    error = InputError(Mistake(message=text, where=f"{text}:1:1", source_line=text, hint=text))
    shown = mistakes_text(error, PLAIN)
    assert shown.replace("\n", "").isprintable()


def test_a_command_in_a_mistake_can_be_pasted_from_any_screen() -> None:
    command = f"planner plan llama3-8b dgx-h100 {'--pin tp=8 ' * 20}".strip()
    error = InputError("the plan has format 1", hint=f"plan again, which takes a moment on a laptop:\n{command}")
    text = mistakes_text(error, Screen(width=40, terminal=True))
    assert command in [line.strip() for line in text.splitlines()]
    assert max(len(line) for line in text.splitlines() if command not in line) <= 40
