"""Plans and tables of runs: larger than the documents that people write, and limited all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.errors import InputError

if TYPE_CHECKING:
    from typing import BinaryIO

MAX_LARGE_BYTES: Final = 2**25
"""A plan has a ledger for each pipeline stage: a thousand stages take some 3 MB."""


def limited_text(file: BinaryIO, shown: str) -> str:
    """The text of an open file of at most `MAX_LARGE_BYTES`; messages call it `shown`.

    Raises:
        InputError: it is longer, or not UTF-8.
        OSError: it cannot be read.
    """
    content = file.read(MAX_LARGE_BYTES + 1)
    if len(content) > MAX_LARGE_BYTES:
        raise InputError(f"{shown} has more than {MAX_LARGE_BYTES:,} bytes", hint="no plan or table is as large")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{shown} is not UTF-8 text", hint="save it as UTF-8") from None
