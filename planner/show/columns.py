"""Borderless tables that never truncate a figure: a narrow screen omits columns or shows a list instead."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.show.screen import linked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_GAP: Final = 2
_LEAST_TEXT: Final = 16
"""Smallest width of a column of running text, in characters; a narrower one would have one word per line."""


class Columns:
    """A table of rows and columns.

    right: columns of figures, aligned to the right.
    wrap: columns that may wrap or shrink; all other columns keep their width.
    optional: columns to omit on a narrow screen, the least important first.
    fold: instead of omitting them, write them in a line below the row, each after its heading; the last column alone
    wraps then.
    """

    def __init__(
        self,
        rows: Iterable[Iterable[RenderableType]],
        *,
        right: Iterable[int] = (),
        wrap: Iterable[int] = (),
        optional: Sequence[int] = (),
        fold: bool = False,
        header: Iterable[str] = (),
    ) -> None:
        cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        self._num_columns = max(map(len, cells), default=0)
        self._rows = [row + [Text("")] * (self._num_columns - len(row)) for row in cells]
        self._header = list(header) or [""] * self._num_columns
        self._right, self._wrap, self._optional, self._fold = set(right), set(wrap), optional, fold

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_LEAST_TEXT, options.max_width), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = list(range(self._num_columns))
        least = [self._least_width(column, console, options) for column in kept]
        for column in (None, *self._optional):
            kept = [each for each in kept if each != column]
            if sum(least[each] for each in kept) + _GAP * (len(kept) - 1) <= options.max_width:
                if self._fold and len(kept) < self._num_columns:
                    yield from self._folded({each: least[each] for each in kept}, options.max_width)
                else:
                    yield self._table(kept, self._rows)
                return
        yield from self._list()

    def _least_width(self, column: int, console: Console, options: ConsoleOptions) -> int:
        cells = [row[column] for row in self._rows]
        sizes = [Measurement.get(console, options, cell) for cell in cells]
        if column not in self._wrap:
            return max(len(self._header[column]), *(size.maximum for size in sizes))
        # a bar reports its own least width; text could break after every word, so it has a least width here
        least = [_LEAST_TEXT if isinstance(cell, Text | Group) else 0 for cell in cells]
        return max(max(size.minimum, min(size.maximum, wanted)) for size, wanted in zip(sizes, least, strict=True))

    def _table(
        self, kept: Sequence[int], rows: Sequence[Sequence[RenderableType]], widths: Mapping[int, int] | None = None
    ) -> Table:
        titled = any(self._header) and rows[0] is self._rows[0]
        table = Table(box=None, show_header=titled, header_style="dim", padding=(0, _GAP, 0, 0), pad_edge=False)
        for column in kept:
            table.add_column(
                Text(self._header[column]),
                justify="right" if column in self._right else "left",
                no_wrap=column not in self._wrap,
                overflow="fold",
                width=widths[column] if widths else None,
            )
        for row in rows:
            table.add_row(*(_named(row[column]) if column == 0 else row[column] for column in kept))
        return table

    def _folded(self, widths: dict[int, int], max_width: int) -> RenderResult:
        """Render each row as a table of its own, of equal widths, with the other cells in a line below."""
        last = max(widths)
        widths[last] += max_width - sum(widths.values()) - _GAP * (len(widths) - 1)
        for row in self._rows:
            yield self._table(list(widths), [row], widths)
            left = [(self._header[at], cell) for at, cell in enumerate(row) if at not in widths]
            named = [Text.assemble((f"{title} ", "dim"), c) for title, c in left if isinstance(c, Text) and c.plain]
            if named:
                yield Padding(Text("; ").join(named), (0, 0, 0, _GAP))

    def _list(self) -> RenderResult:
        """Render each row as its first cell, with the other cells below it, each after its column's heading."""
        for first, *others in self._rows:
            yield _named(first)
            for title, cell in zip(self._header[1:], others, strict=True):
                if not isinstance(cell, Text):
                    yield Padding(cell, (0, 0, 0, _GAP))
                elif cell.plain:
                    named = Text.assemble((f"{title} ", "dim"), cell) if title else cell
                    yield Padding(named, (0, 0, 0, _GAP))


def _named(cell: RenderableType) -> RenderableType:
    """Return the first cell of a row, which names the row's subject, linked to its glossary entry if there is one."""
    return linked(cell) if isinstance(cell, Text) else cell


class Flow:
    """Short items in running lines; a line breaks only between items."""

    def __init__(self, items: Iterable[Text], *, gap: int = _GAP) -> None:
        self._items = list(items)
        self._gap = gap

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [item.cell_len for item in self._items] or [0]
        whole = sum(widths) + self._gap * (len(widths) - 1)
        return Measurement(min(max(widths), options.max_width), min(whole, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text(overflow="fold")
        for item in self._items:
            gap = self._gap if line.cell_len else 0
            if line.cell_len and line.cell_len + gap + item.cell_len > options.max_width:
                yield line
                line, gap = Text(overflow="fold"), 0
            line.append(" " * gap)
            line.append_text(item)
        yield line


def assignments(text: str, style: str = "") -> Flow:
    """A layout text `tp=8,pp=4,recompute=full/3*none,...` whose lines break only after commas and slashes."""
    return Flow([Text(part, style=style) for part in re.findall("[^,/]*[,/]?", text) if part], gap=0)
