"""What has to survive a crash of the machine."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def sync(path: Path) -> None:
    """Return once the disk has the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, data: Any) -> None:
    """Write a document, and return once the disk has it."""
    path.write_text(json.dumps(data, indent=1) + "\n")
    sync(path)
