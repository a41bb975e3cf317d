"""The Python file that passes a plan to torchtitan: a function that returns a `Trainer.Config`."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.emit.hosts import head_lines
from planner.emit.names import names_beside
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.emit.target import How, Value, Values
    from planner.plan import Plan

FILE: Final = "planned.py"
MODEL_FILE: Final = "planned_model.py"
MODEL: Final = files("planner.emit.programs").joinpath("torchtitan_model.py.txt").read_text(encoding="utf-8")
"""Source text of the module that builds models missing from torchtitan's registry."""
_TEMPLATE: Final = files("planner.emit.programs").joinpath("torchtitan.py.jinja").read_text(encoding="utf-8")
DATA: Final = "DATASET"
TOKENIZER: Final = "TOKENIZER_PATH"
V_0_3: Final = "torchtitan-0.3"

_SECTIONS: Final[dict[str, str]] = names_beside(__file__)
_KINDS: Final = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_OLD_NAMES: Final = {"max_context_length": "max_seq_len"}
"""Field of rotary positions -> name of this field in release 0.3.0."""


def check_data(how: How) -> None:
    """Refuse mock data, which exists only in torchtitan's repository, and a mix of several kinds of data."""
    if how.smoke:
        hint = "in its checkout, --tokenizer tests/assets/tokenizer --data tests/assets/c4_test/data.json run at once"
        raise InputError("--smoke: torchtitan has no mock data of its own", where="--to torchtitan", hint=hint)
    if how.arguments.data:
        _kind(how.arguments.data)


def _kind(data: tuple[str, ...]) -> str:
    """The first argument of `load_dataset`: a name on the Hub, or the kind of the data files."""
    if data[0].startswith("hf:") and len(data) == 1:
        return data[0].removeprefix("hf:")
    kinds = {"hub" if each.startswith("hf:") else Path(each).suffix for each in data}
    if len(kinds) > 1 or not kinds <= set(_KINDS):
        num_sets = sum(each.startswith("hf:") for each in data)
        words = {"": "a file without an ending", "hub": f"{num_sets} data set{'s' * (num_sets > 1)} of the Hub"}
        shown = " and ".join(words.get(kind, f"a file that ends in {kind}") for kind in sorted(kinds))
        hint = f"give files of one kind ({', '.join(_KINDS)}) with a column `text`, or one hf:NAME"
        raise InputError(
            f"torchtitan reads files of one kind or one data set, and not {shown}", where="--data", hint=hint
        )
    return _KINDS[kinds.pop()]


def render(values: Values, plan: Plan, how: How, *, release: str) -> dict[str, str]:
    """The text of the Python file, with all keys of the table, data and tokenizer, by file name."""
    from jinja2 import Environment, StrictUndefined

    space = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)  # noqa: S701 - Python
    space.filters["literal"] = _literal
    of = partial(_of, values)
    is_old, data, shape = release == V_0_3, how.arguments.data, of("model_spec.shape")
    names = _OLD_NAMES if is_old else {}
    rope = {names.get(key, key): value for key, value in of("model_spec.rope").items()}
    text = space.from_string(_TEMPLATE).render(
        head=head_lines(plan),
        version="torchtitan 0.3.0" if is_old else "torchtitan of 2026-08-21 or later",
        release=is_old,
        data=bool(data),
        path=_kind(data) if data else "",
        files=() if not data or data[0].startswith("hf:") else list(data),
        name=values["model_spec.name"],
        flavor=values["model_spec.flavor"],
        shape=shape.items(),
        converters="model_spec.converters" in values,
        parts=(("rope", "RoPE", rope.items()), ("norm", "RMSNorm", of("model_spec.norm").items())),
        sections=[(section, kind, of(section).items()) for section, kind in _SECTIONS.items()],
        recompute="" if values["activation_checkpoint"] == "none" else values["activation_checkpoint"],
        chunks=values.get("loss.num_chunks"),
        tokenizer=str(how.arguments.tokenizer or TOKENIZER),
    )
    return {FILE: f"{text}\n", **({MODEL_FILE: MODEL} if shape else {})}


def _of(values: Values, section: str) -> dict[str, Value]:
    start = f"{section}."
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}


def _literal(value: Any) -> str:
    """The Python literal of a value; nested tuples become lists, as torchtitan's dataclasses require."""
    nested = isinstance(value, tuple) and any(isinstance(each, tuple) for each in value)
    return repr([list(each) for each in value]) if nested else repr(value)
