"""Files of users, and scripts that replace the programs of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


def program(folder: Path, name: str, text: str) -> None:
    """A script in a folder at the front of the path."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path) -> Path:
    """A folder of scripts that replace torchrun, srun, scontrol and planner."""
    folder = tmp_path / "tools"
    folder.mkdir()
    program(folder, "torchrun", 'printf "%s\\n" "$@"')
    program(folder, "srun", 'printf "%s\\n" "$@" "$MASTER_ADDR" "$MASTER_PORT" > "$TOLD"; exec bash "$TRAINING"')
    program(
        folder, "scontrol", 'if [[ $1 == show ]]; then printf "node7\\nnode8\\n"; else echo "$@" > "$TOLD.requeued"; fi'
    )
    return folder


@pytest.fixture
def written(tmp_path) -> Callable[..., Path]:
    """A file with this text: `written(text, "train.sh")`."""

    def write(text: str, name: str = "train.sh") -> Path:
        path: Path = tmp_path / name
        path.write_text(text)
        return path

    return write
