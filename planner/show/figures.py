"""Numbers in columns and bars: one unit for a whole column, and bars that are legible without colour."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

from planner.cost.ledger import LineName

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    from planner.cost.ledger import StageMemory

_BYTES: Final = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_SECONDS: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The unit and the number of decimals of a column, so that its figures can be compared."""

    unit: str
    factor: float
    digits: int

    def __call__(self, value: float) -> str:
        """Format the number without its unit, which is in the heading; exactly zero becomes a dash."""
        return f"{value / self.factor:,.{self.digits}f}" if value else "-"


def bytes_scale(values: Iterable[float]) -> Scale:
    """Choose the binary unit for the largest value, and as many decimals as show four digits of it."""
    return _scale(max(values, default=0.0), [unit for unit in _BYTES if unit[0] != "TiB"])


def seconds_scale(values: Iterable[float]) -> Scale:
    """Choose s, ms or us for the largest value, and as many decimals as show four digits of it."""
    return _scale(max(values, default=0.0), _SECONDS)


def _scale(largest: float, units: Sequence[tuple[str, float]]) -> Scale:
    unit, factor = next((each for each in units if largest >= each[1]), units[-1])
    figures = math.floor(math.log10(largest / factor)) + 1 if largest > 0 else 1
    return Scale(unit=unit, factor=factor, digits=0 if unit == "B" else min(max(4 - figures, 0), 3))


class Fill(NamedTuple):
    """How one part of a bar is drawn: in Unicode, in ASCII and in colour."""

    mark: str
    ascii: str
    color: str


FILLS: Final = {
    LineName.PARAMS: Fill("█", "P", "blue"),
    LineName.GRADS: Fill("▓", "G", "cyan"),
    LineName.OPTIMIZER_STATE: Fill("▒", "O", "magenta"),
    LineName.ACTIVATIONS: Fill("░", "A", "green"),
    LineName.TRANSIENTS: Fill("▚", "T", "yellow"),
    LineName.RUNTIME: Fill("·", "R", "white"),
    LineName.REFERENCE_PARAMS: Fill("▞", "F", "blue"),
    LineName.ROLLOUT: Fill("≡", "E", "white"),
}
"""One fill for each line of memory; adjacent fills differ in darkness, so they are distinct without colour."""


def fill_of(name: LineName) -> Fill:
    """Return the fill of a ledger line; a line without an entry in FILLS has a plain fill."""
    return FILLS.get(name, Fill("=", "=", "white"))


def edges(parts: Iterable[float], *, full: float, width: int) -> list[int]:
    """Return the end of each part of a stacked bar, in characters; the value `full` fills `width` characters.

    The running sum is rounded, not each part, so the bar has the length of the rounded total.
    """
    ends, total = [], 0.0
    for part in parts:
        total += part
        ends.append(round(total / full * width))
    return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """A stacked bar of one stage's memory with a mark at the limit, as wide as its cell allows."""

    memory: StageMemory
    full_bytes: float
    max_width: int = 48

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the smallest useful width and the comfortable width of the bar."""
        return Measurement(8, max(8, min(self.max_width, options.max_width)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render one line of characters, with a mark at the limit."""
        width = min(self.max_width, options.max_width) - 1
        lines = self.memory.lines
        ends = edges((float(line.num_bytes) for line in lines), full=self.full_bytes, width=width)
        limit = round(self.memory.limit_bytes / self.full_bytes * width)
        cells: list[Segment] = []
        for line, end in zip(lines, ends, strict=True):
            fill = fill_of(line.name)
            cells += [Segment(fill.ascii if options.ascii_only else fill.mark, Style(color=fill.color))] * (
                end - len(cells)
            )
        cells += [Segment(" ")] * (limit - len(cells))
        cells.insert(limit, Segment("|" if options.ascii_only else "│", Style(bold=True)))
        yield from Segment.simplify(cells)
        yield Segment.line()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBar:
    """A bar of one time line of the step, which starts at the end of the previous line's bar."""

    before_seconds: float
    seconds: float
    full_seconds: float
    max_width: int = 48

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the smallest useful width and the comfortable width of the bar."""
        return Measurement(8, max(8, min(self.max_width, options.max_width)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render one line of characters; a part shorter than one full block becomes a thin block."""
        plain = options.ascii_only
        width = min(self.max_width, options.max_width)
        start, end = edges((self.before_seconds, self.seconds), full=self.full_seconds, width=width)
        block, thin = ("#", "|") if plain else ("█", "▏")
        text = block * (end - start) or (thin if self.seconds > 0 else "")
        yield Segment(" " * min(start, width - len(text)) + text, Style(color="blue"))
        yield Segment.line()
