"""Read plans and tables of runs, which are larger than hand-written documents, and tell plans and scripts apart."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from planner.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

MAX_LARGE_BYTES: Final = 2**25
"""Size limit; a plan has a ledger for each pipeline stage, and a thousand stages take about 3 MB."""


def limited_text(file: BinaryIO, shown: str) -> str:
    """The text of an open file of at most `MAX_LARGE_BYTES` bytes; messages call the file `shown`.

    Raises:
        InputError: the file is longer, or is not UTF-8.
        OSError: the file cannot be read.
    """
    content = file.read(MAX_LARGE_BYTES + 1)
    if len(content) > MAX_LARGE_BYTES:
        raise InputError(f"{shown} has more than {MAX_LARGE_BYTES:,} bytes", hint="no plan or table is as large")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{shown} is not UTF-8 text", hint="save it as UTF-8") from None


def is_plan(path: Path) -> bool:
    """Whether a file is a plan; false if it cannot be read."""
    try:
        return path.is_file() and kind_of("", path.read_bytes()[:MAX_LARGE_BYTES].decode(errors="replace")) == "a plan"
    except OSError:
        return False


def kind_of(name: str, text: str) -> str:
    """What a file is, for a message that another kind was expected: `a plan`, `a script`, or an empty text."""
    if re.match(r"\s*\{\s*\"format\":\s*[0-9]", text) and '"layout"' in text:
        return "a plan"
    return "a script" if text.startswith("#!") or name.endswith((".sh", ".sbatch")) else ""
