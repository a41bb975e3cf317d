"""Columns of numbers and bars."""

from bisect import bisect_right
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.ledger import LineName, MemoryLine, StageMemory
from planner.show.figures import FILLS, MemoryBar, Scale, StepBar, bytes_scale, edges, seconds_scale
from planner.show.screen import Screen, to_text

SIZES = st.floats(0, 1e12, allow_nan=False)


def draw_memory(sizes: list[float], limit: float, width: int, *, full: float | None = None) -> str:
    lines = tuple(
        MemoryLine(name=name, num_bytes=size, formula="", source="")
        for name, size in zip(list(LineName)[:6], sizes, strict=True)
    )
    memory = StageMemory(stage=0, limit_bytes=limit, most_bytes=limit, device_chance=0.5, lines=lines)
    bar = MemoryBar(memory=memory, full_bytes=full or max(limit, sum(sizes)), max_width=width)
    return to_text(bar, Screen(width=max(width, 20), unicode=False)).rstrip("\n")


@given(st.lists(SIZES, min_size=6, max_size=6), st.floats(1e3, 1e12), st.integers(10, 60))
def test_every_character_of_a_memory_bar_stands_for_its_line(sizes: list[float], limit: float, width: int) -> None:
    text = draw_memory(sizes, limit, width)
    mark, cells = text.index("|"), text.replace("|", "")
    full, ends = max(limit, sum(sizes)), list(accumulate(sizes))
    unit = full / (width - 1)
    assert abs(mark * unit - limit) <= unit / 2 * 1.0001  # the mark stands at the limit
    for place in range(width - 1):
        middle = (place + 0.5) * unit  # the value in the middle of this character
        if min(abs(middle - end) for end in ends) < unit * 1e-6:
            continue
        line = bisect_right(ends, middle)
        wanted = list(FILLS.values())[line].ascii if line < 6 else ""
        assert cells[place : place + 1].strip() == wanted


def test_memory_bar_over_the_limit_runs_through_the_mark() -> None:
    assert draw_memory([0, 0, 0, 20, 0, 0], 10, 21) == "AAAAAAAAAA|AAAAAAAAAA"
    assert draw_memory([5, 0, 0, 0, 0, 0], 10, 21) == "PPPPPPPPPP          |"
    assert draw_memory([10, 0, 0, 0, 0, 0], 10, 21) == "PPPPPPPPPPPPPPPPPPPP|"
    assert draw_memory([5, 5, 5, 5, 0, 0], 10, 21) == "PPPPPGGGGG|OOOOOAAAAA"


@pytest.mark.parametrize("unicode", [True, False])
def test_fills_differ_without_colour(unicode: bool) -> None:
    marks = [fill.mark if unicode else fill.ascii for fill in FILLS.values()]
    assert len(set(marks)) == len(marks) == len(FILLS) == 8
    assert all(len(mark) == 1 for mark in marks)


@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 100))
def test_bar_is_as_long_as_its_total_whatever_the_parts(parts: list[float], width: int) -> None:
    full = sum(parts) or 1.0
    ends = edges(parts, full=full, width=width)
    assert ends == sorted(ends)
    assert ends[-1] == (width if sum(parts) else 0)


@given(st.lists(st.floats(1e-6, 100), min_size=1, max_size=9), st.integers(20, 60))
def test_waterfall_pieces_follow_each_other(seconds: list[float], width: int) -> None:
    total, before, ends = sum(seconds), 0.0, []
    for piece in seconds:
        bar = StepBar(before_seconds=before, seconds=piece, full_seconds=total, max_width=width)
        text = to_text(bar, Screen(width=width, unicode=False)).rstrip("\n")
        assert text.strip(), "even the shortest line is visible"
        assert len(text) <= width
        ends.append((len(text) - len(text.lstrip()), len(text), "#" in text))
        before += piece
    blocks = [(start, end) for start, end, whole in ends if whole]
    assert all(b[0] >= a[1] for a, b in pairwise(blocks))
    assert sum(end - start for start, end in blocks) == width


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9))
@pytest.mark.parametrize("scale_of", [bytes_scale, seconds_scale])
def test_figures_below_each_other_add_up(scale_of, values: list[float]) -> None:
    total = sum(values)
    scale = scale_of([*values, total])
    shown = [float(scale(value).replace(",", "").replace("-", "0")) for value in (*values, total)]
    half = 0.5 * 10**-scale.digits
    for value, figure in zip((*values, total), shown, strict=True):
        assert abs(figure - value / scale.factor) <= half * 1.0001
    assert abs(sum(shown[:-1]) - shown[-1]) <= half * (len(values) + 1) * 1.0001


def test_units_follow_the_largest_value() -> None:
    def with_unit(scale: Scale, value: float) -> str:
        return f"{scale(value)} {scale.unit}"

    assert with_unit(bytes_scale([3, 2**31]), 2**31) == "2.000 GiB"
    assert with_unit(bytes_scale([70.25 * 2**30]), 70.25 * 2**30) == "70.25 GiB"
    assert with_unit(bytes_scale([3 * 2**40]), 3 * 2**40) == "3,072 GiB"
    assert with_unit(bytes_scale([17]), 17) == "17 B"
    assert with_unit(seconds_scale([0.0123]), 0.0123) == "12.30 ms"
    assert seconds_scale([0])(0) == "-"
