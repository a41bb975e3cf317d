"""Reads a Hugging Face file that no table reads, by a program of the trainer that builds the library's own module.

The program never runs code that comes with a checkpoint; `planner.trainer.describe` says what it does.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from planner.cost.parameters import num_params
from planner.errors import EnvironmentProblem, InputError
from planner.specs.model import ModelSpec

if TYPE_CHECKING:
    from pathlib import Path

_LIMIT_SECONDS: Final = 600


def described(path: Path) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model of a config.json, as the module of the transformers library shows it, and notes for the user.

    Raises:
        InputError: the library has no module of it, or our model document cannot hold what the module is.
        EnvironmentProblem: torch or transformers is not installed.
    """
    missing = [each for each in ("torch", "transformers") if importlib.util.find_spec(each) is None]
    if missing:
        raise EnvironmentProblem(
            f"not installed: {', '.join(missing)}", hint="pip install 'parallel-planner[train]' transformers"
        )
    words = [sys.executable, "-m", "planner.trainer.describe", str(path)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT_SECONDS)  # noqa: S603 # our own program
    except subprocess.TimeoutExpired:
        raise InputError(f"the module is not built after {_LIMIT_SECONDS} s", where=str(path)) from None
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InputError(f"the library's module cannot be described: {last}", where=str(path)) from None
    if "error" in found:
        raise InputError(found["error"], where=str(path), hint=found["hint"])
    return _checked(found, str(path)), tuple(found["notes"])


def _checked(found: dict[str, Any], where: str) -> ModelSpec:
    """The model, if it has as many parameters as the module."""
    try:
        model = ModelSpec.model_validate_json(json.dumps(found["document"]))
    except ValidationError as error:
        raise InputError(f"a model document cannot hold this model: {error.errors()[0]['msg']}", where=where) from None
    if (counted := num_params(model)) != found["num_params"]:
        words = f"a model document cannot hold this model: it would have {counted:,} parameters"
        raise InputError(f"{words}, and the module has {found['num_params']:,}", where=where)
    return model
