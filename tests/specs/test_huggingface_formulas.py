"""The table of model types: its formulas, by hand, and rows that name nothing that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError
from planner.specs.blocks import LatentAttention, Mixer, MixtureOfExperts, PatchEmbedding
from planner.specs.huggingface import config_from_text
from planner.specs.huggingface.config import Config, NotInTable
from planner.specs.huggingface.formulas import Scope, names_in
from planner.specs.huggingface.rules import RULES
from planner.specs.huggingface.table import row, table
from planner.specs.model import ModelSpec

VALUES = {
    "wide": 100, "none": None, "zero": 0, "yes": True, "no": False, "word": "auto", "list": [1, 5, 7], "same": [4, 4],
    "part": {"depth": 3, "inside": {"size": 2}}, "ratio": 2.5,
}  # fmt: skip


def scope() -> Scope:
    config = Config(name="config.json", text=json.dumps(VALUES), values=dict(VALUES))
    config.document.update(hidden_size=12, num_heads=4, num_layers=6, ffn_hidden_size=48)
    return Scope(config=config, parts={"tower": config.part("part")}, letters={"t": lambda: 1_000})


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("=2*h + f - L**2", 24 + 48 - 36),
        ("=d + g", 12 // 4 + 4),  # sizes and key-value heads that the file leaves open
        ("=wide//7", 14),
        ("=wide//(zero or 0)", 100),
        ("=none or 7", 7),
        ("=zero or 7", 0),  # as the file says
        ("=absent or wide", 100),
        ("=yes and 5", 5),
        ("=no and 5", 0),
        ("=(absent or True) and 5", 5),
        ("=1 if no or True else 2", 2),  # the file says no
        ("=1 if not no else 2", 1),
        ("=1 if yes and no else 2", 2),
        ("=1 if word is 'auto' else 2", 1),
        ("=1 if absent is None else wide", 1),
        ("=flag(yes)", True),
        ("=len(list)", 3),
        ("=1 if len(list) > 3 else 0", 0),
        ("=below(list, L)", 2),
        ("=same(same)", 4),
        ("=same(wide)", 100),
        ("=product(list)", 35),
        ("=product(absent, 2, 2)", 4),
        ("=int(number(ratio, 1)*h)", 30),
        ("=rounded(wide, 64)", 128),
        ("=linear(3, 5)", 3 * 5 + 5),
        ("=two(3, 5, 2, False)", 3 * 5 + 5 * 2),
        ("=part.depth + part.inside.size", 5),
        ("=tower.depth*t", 3_000),
        ("plain", "plain"),
        (7, 7),
    ],
)
def test_a_formula_gives(formula: Any, value: object) -> None:
    assert scope().worked_out(formula) == value


@pytest.mark.parametrize(
    ("formula", "key"),
    [
        ("=word*2", "word"),
        ("=zero + 1", "zero"),
        ("=wide and 2", "wide"),
        ("=len(wide)", "wide"),
        ("=part + 1", "part"),
    ],
)
def test_a_wrong_value_is_refused_at_its_key(formula: str, key: str) -> None:
    with pytest.raises(InputError, match=f"`{key}` must be"):
        scope().worked_out(formula)


def test_a_key_has_a_largest_number() -> None:
    most = 10**9
    config = Config(name="config.json", text="", values={"large": most, "larger": most + 1})
    assert config.count("large") == most
    with pytest.raises(InputError, match="`larger` must be at most 1000000000"):
        config.count("larger")


def test_a_missing_key_is_noted_and_a_list_of_different_numbers_is_not_in_the_table() -> None:
    found = scope()
    found.worked_out("=absent*2 + part.absent")
    assert found.config.missing == ["absent", "part.absent"]
    with pytest.raises(NotInTable, match="differs from layer to layer"):
        found.worked_out("=same(list)")


def test_keys_behind_a_condition_are_read_too() -> None:
    assert names_in({"a": "=2*h if yes else wide", "b": ["=part.depth"]}) == {"yes", "wide", "part"}


ROWS = [("types", name) for name in table()["types"]] + [("towers", name) for name in table()["towers"]]
NESTED = {"moe": MixtureOfExperts, "mla": LatentAttention, "patches": PatchEmbedding, "mixer": Mixer}


@pytest.mark.parametrize(("section", "name"), ROWS)
def test_a_row_names_fields_and_rules_that_exist(section: str, name: str) -> None:
    found = row(name, section)
    for target in [*found.keys.values(), *found.fields, *found.then]:
        part, _, last = target.removeprefix("+").rpartition(".")
        assert last in (NESTED[part] if part else ModelSpec).model_fields, target
    for rule in found.rules:
        assert (rule if isinstance(rule, str) else next(iter(rule))) in RULES


def test_each_row_is_compared_with_a_module_of_the_library() -> None:
    """Those of T5 and ViT in tests/published/huggingface.json; Kimi K2 is built by DeepSeek-V3's class."""
    recorded = json.loads((Path(__file__).parents[1] / "published" / "huggingface_types.json").read_text())
    built = [
        each["config"] for part in ("causal", "image_text") for each in recorded[part].values() if "config" in each
    ]
    parts = [{"model_type": name} for part in ("causal", "image_text") for name in recorded[part]]
    parts += [part for each in built for part in (each, each.get("text_config"), each.get("vision_config")) if part]
    seen = {str(part.get("model_type")) for part in parts}
    rows = {*table()["types"], *table()["towers"], *table()["projectors"]}
    assert rows - seen == {"kimi_k2", "t5", "vit"}


@pytest.mark.parametrize("key", ["text_config", "vision_config", "audio_config"])
def test_a_part_that_holds_no_keys_is_refused(key: str) -> None:
    with pytest.raises(InputError, match=f"`{key}` must be keys and values, not `3`"):
        config_from_text(json.dumps({"model_type": "llama", key: 3}), "config.json")
