"""Single changes of every configuration: each file is read as a model or refused with a message, never a traceback.

The configurations are the defaults of the library's own classes (tests/published/huggingface_types.json). One key, also
of a nested part, is removed or gets a value that does not belong there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from planner.cost.parameters import num_active_params, num_params
from planner.errors import InputError
from planner.specs.huggingface import config_from_text
from planner.specs.model import ModelSpec
from planner.specs.validate import validate

RECORDED: Final = json.loads((Path(__file__).parents[1] / "published" / "huggingface_types.json").read_text())
CONFIGS: Final = [
    each["config"] for part in ("causal", "image_text") for each in RECORDED[part].values() if "config" in each
]
REMOVED: Final = object()
VALUES: Final = (REMOVED, "text", ["a"], {}, -1, 0, None, 1.5)
FURTHER: Final = ("4096", float("inf"), 1e300, 2**63, 10**30, True, [], [[]], [1.5], [-1], {"a": 1})
NEVER_RIGHT: Final = ("text", ["a"], {}, -1, 1.5, "4096", [[]], [1.5], [-1], {"a": 1})
"""Values that cannot make another key wrong, as a missing value or a large number can."""

Keys = tuple[str, ...]


def keys_of(part: dict[str, Any], above: Keys = ()) -> Iterator[Keys]:
    for key, value in part.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, key))


def changed(part: dict[str, Any], keys: Keys, value: Any) -> dict[str, Any]:
    first, *rest = keys
    if rest:
        return part | {first: changed(part[first], tuple(rest), value)}
    return {key: each for key, each in part.items() if key != first} if value is REMOVED else part | {first: value}


def at(part: Any, keys: Keys) -> Any:
    return at(part[keys[0]], keys[1:]) if keys else part


def read(config: dict[str, Any]) -> ModelSpec:
    return validate(ModelSpec, config_from_text(json.dumps(config, indent=1), "config.json").tree)


@cache
def is_read(number: int) -> bool:
    try:
        read(CONFIGS[number])
    except InputError:
        return False
    return True


def changes(values: tuple[Any, ...]) -> list[tuple[int, Keys, Any]]:
    return [
        (number, keys, value) for number, config in enumerate(CONFIGS) for keys in keys_of(config) for value in values
    ]


def check(number: int, keys: Keys, value: Any) -> None:
    shown = f"{CONFIGS[number]['model_type']}: {'.'.join(keys)} = {'removed' if value is REMOVED else value!r}"
    try:
        model = read(changed(CONFIGS[number], keys, value))
    except InputError as error:
        text = "\n".join(f"{mistake.message}\n{mistake.source_line}" for mistake in error.mistakes)
        is_wrong = value in NEVER_RIGHT and not (
            isinstance(value, dict) and isinstance(at(CONFIGS[number], keys), dict)
        )
        assert keys[-1] in text or not is_wrong or not is_read(number), f"{shown}\n{text}"
    except Exception as error:
        raise AssertionError(shown) from error
    else:
        assert 0 < num_active_params(model) <= num_params(model) < 10**19, shown


@pytest.mark.parametrize("part", range(5))
def test_a_changed_key_gives_a_model_or_its_own_mistake(part: int) -> None:
    for change in random.Random(part).sample(changes(VALUES), 1_000):
        check(*change)


def test_strange_values_are_refused_at_their_key() -> None:
    for change in random.Random(1).sample(changes(FURTHER), 1_000):
        check(*change)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_every_changed_key_gives_a_model_or_its_own_mistake(part: int) -> None:
    for change in changes((*VALUES, *FURTHER))[part::16]:
        check(*change)


@pytest.mark.parametrize(
    ("name", "keys", "value", "message"),
    [
        ("idefics2", ("perceiver_config",), {"resampler_depth": 3}, "`perceiver_config.resampler_head_dim` is missing"),
        ("dbrx", ("ffn_config", "ffn_hidden_size"), "768", "`ffn_hidden_size` must be a whole number, not `768`"),
        ("idefics2", ("perceiver_config", "resampler_depth"), 0, "`resampler_depth` must be at least 1, not `0`"),
        ("internvl", ("downsample_ratio",), 0, "`downsample_ratio` must be more than 0"),
        ("mpt", ("expansion_ratio",), float("inf"), "`expansion_ratio` must be more than 0 and less than 1e+09"),
        ("mamba2", ("num_heads",), None, "`num_heads` is missing"),
        ("glm_moe_dsa", ("index_topk",), None, "`index_topk` is missing"),
        ("llava", ("text_config",), [], "`text_config` must be keys and values, not a list"),
        (
            "qwen3_next",
            ("linear_num_value_heads",),
            True,
            "`linear_num_value_heads` must be a whole number, not `true`",
        ),
    ],
)
def test_the_message_says_what_is_wrong_there(name: str, keys: Keys, value: Any, message: str) -> None:
    config = (RECORDED["image_text"].get(name) or RECORDED["causal"][name])["config"]
    with pytest.raises(InputError) as refused:
        read(changed(config, keys, value))
    assert message in str(refused.value)


def test_the_place_is_inside_of_the_part_with_the_key() -> None:
    """The key stands in both parts, first in that of the text."""
    config = {key: value for key, value in RECORDED["image_text"]["llava"]["config"].items() if "_config" not in key}
    config |= {part: RECORDED["image_text"]["llava"]["config"][part] for part in ("text_config", "vision_config")}
    text = json.dumps(changed(config, ("vision_config", "num_hidden_layers"), "text"), indent=1)
    with pytest.raises(InputError) as refused:
        read(json.loads(text))
    line = next(number for number, each in enumerate(text.splitlines(), 1) if '"num_hidden_layers": "text"' in each)
    assert refused.value.mistakes[0].where == f"config.json:{line}:3"
