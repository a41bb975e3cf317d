"""Log files as bytes: line ends, control sequences, long lines, gzip, pipes and files that are no logs."""

from __future__ import annotations

import gzip
import io
import os
import threading
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.evidence.logs import lines
from planner.evidence.logs.lines import LONGEST, lines_of, opened


def texts(path: Path) -> list[str]:
    with opened(path) as file:
        return [line.text for line in lines_of(file, path.name)]


@pytest.mark.parametrize("content", ["a\nb\n", "a\r\nb", "a\rb\r", "\ufeffa\nb", "\x1b[1;31ma\x1b[K\n\x1b[?25hb\x1b[A"])
@pytest.mark.parametrize("pack", [lambda each: each, gzip.compress])
def test_lines_are_read_as_a_terminal_shows_them(content: str, pack, tmp_path) -> None:
    (tmp_path / "a.log").write_bytes(pack(content.encode()))
    assert texts(tmp_path / "a.log") == ["a", "b"]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16"])
def test_a_byte_of_another_encoding_spoils_one_letter(encoding: str, tmp_path) -> None:
    (tmp_path / "a.log").write_bytes("café\nb".encode(encoding))
    first, second = texts(tmp_path / "a.log")
    assert first[:3] == "caf"
    assert second == "b"


def test_places_are_those_of_an_editor() -> None:
    text = "one\ntwo\rthree\r\nfour\n"
    rows = text.split("\n")
    for line in lines_of(io.StringIO(text, newline="")):
        assert rows[line.number - 1][line.start :].startswith(line.text)


def test_the_end_of_a_long_line_is_not_read(tmp_path) -> None:
    (tmp_path / "a.log").write_text(f"a {'12345 ' * 10**5}\nb\n")
    first, second = texts(tmp_path / "a.log")
    assert second == "b"
    assert LONGEST - 6 <= len(first) <= LONGEST
    assert set(first.split()) == {"a", "12345"}


def test_a_log_larger_than_a_plan_is_read(tmp_path) -> None:
    (tmp_path / "a.log").write_text(f"{'x' * 99}\n" * 400_000)
    with opened(tmp_path / "a.log") as file:
        assert sum(1 for _ in lines_of(file)) == 400_000


@pytest.mark.parametrize("line", [b"\n", b"x" * 9_999 + b"\n"])
@pytest.mark.parametrize("pack", [lambda each: each, gzip.compress])
def test_a_log_has_a_largest_size_when_it_is_unpacked(line: bytes, pack, tmp_path, monkeypatch) -> None:
    """400 MB of line ends are 0.4 MB in gzip."""
    monkeypatch.setattr(lines, "MOST", 2**23)
    (tmp_path / "a.log").write_bytes(pack(line * (2**23 // max(128, len(line)) - 1)))
    assert len(texts(tmp_path / "a.log")) == 2**23 // max(128, len(line)) - 1
    (tmp_path / "a.log").write_bytes(pack(line * (2**23 // max(128, len(line)) + 1)))
    with pytest.raises(InputError, match=r"a\.log is longer than 8,388,608 characters, or has too many lines"):
        texts(tmp_path / "a.log")


def test_a_pipe_is_read_once(tmp_path) -> None:
    os.mkfifo(tmp_path / "a.log")
    writer = threading.Thread(target=(tmp_path / "a.log").write_text, args=("a\n" * 50_000,))
    writer.start()
    assert len(texts(tmp_path / "a.log")) == 50_000
    writer.join()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bytes(range(256)), "is binary, and no log"),
        (gzip.compress(bytes(range(256))), "is binary, and no log"),
        (gzip.compress(b"a\n" * 10**5)[:-20], "is a damaged gzip file"),
        (b"\x1f\x8b and then text", "is a damaged gzip file"),
        (b"#!/bin/sh\n", "is a script"),
    ],
)
def test_a_file_that_is_no_log_is_refused(content: bytes, words: str, tmp_path) -> None:
    (tmp_path / "a.log").write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        texts(tmp_path / "a.log")
    assert error.value.mistakes[0].hint
