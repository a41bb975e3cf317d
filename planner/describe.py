"""Reads a Hugging Face file that no table reads, by a program of the trainer that builds the library's own module.

The program never runs code that comes with a checkpoint; `planner.trainer.describe` says what it does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from planner.cost.parameters import num_params
from planner.errors import InputError
from planner.own_program import answer_of
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
    where = str(path)
    found = answer_of(
        "describe",
        where,
        needs=("torch", "transformers"),
        install="pip install 'parallel-planner[train]' transformers",
        broken=lambda words: InputError(f"the library's module cannot be described: {words}", where=where),
        limit_seconds=_LIMIT_SECONDS,
    )
    return _checked(found, where), tuple(found["notes"])


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
