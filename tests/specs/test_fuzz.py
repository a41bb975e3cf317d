"""After one edit, a shipped file gives a document or an InputError, never anything else."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.layout_text import parse_layout
from planner.search.space.constraints import Constraints
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.document import Document
from planner.specs.engine import EngineSpec
from planner.specs.load import load_job
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.specs.validate import validate
from planner.specs.yaml import as_node, parse_yaml

ROOT = Path(__file__).parents[2]
TRAINING = "sequence_length: 8192\nglobal_batch_size: 1024\nprecision: bf16\ntokens: 300e9\ndropout: 0.1\n"
SHIPPED: list[tuple[type[Document], str]] = [
    *((ModelSpec, path.read_text()) for path in sorted((ROOT / "models").glob("*.yaml"))),
    *((DeviceSpec, path.read_text()) for path in sorted((ROOT / "clusters/devices").glob("*.yaml"))),
    *((ClusterSpec, path.read_text()) for path in sorted((ROOT / "clusters").glob("*.yaml"))),
    *((EngineSpec, path.read_text()) for path in sorted((ROOT / "planner/engines").glob("*.yaml"))),
    *((EngineSpec, path.read_text()) for path in sorted((ROOT / "planner/evidence/profiles").glob("*.yaml"))),
    (TrainingSpec, TRAINING),
]
NASTY = [
    *("0", "-1", "1e999", ".nan", "true", "null", "''", "[]", "{}", "&a", "*a", "!!int", "\t", "\x00", "\ud7ff"),
    *("?", "- ", ": ", "#", "'", '"', "9" * 50, "0x", "1e9", "e", "GiB", "\xe9", "\x85", "<<", "---"),
]


def read(document: type[Document], text: str) -> str:
    """The document, or the mistakes, as text."""
    try:
        return repr(validate(document, parse_yaml(text, "x.yaml")))
    except InputError as error:
        return str(error)


def edited(rng: random.Random, text: str) -> str:
    """One insertion, deletion, replacement or swap."""
    at, nasty = rng.randrange(len(text)), rng.choice(NASTY)
    to = min(len(text), at + rng.choice([1, 1, 1, 3, 10]))
    lines = text.splitlines(keepends=True)
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[two] = lines[two], lines[one]
    variants = [text[:at] + nasty + text[at:], text[:at] + text[to:], text[:at] + nasty + text[to:]]
    return rng.choice([*variants, "".join(lines), text + lines[one]])


def check_edits(seed: int) -> None:
    rng = random.Random(seed)
    document, text = rng.choice(SHIPPED)
    shown = read(document, edited(rng, text))
    assert shown.replace("\n", "").isprintable()
    assert "pydantic" not in shown


@given(st.integers(0, 2**32))
@settings(max_examples=300)
def test_one_edit(seed: int) -> None:
    check_edits(seed)


@pytest.mark.slow
def test_many_edits() -> None:
    for seed in range(20_000):
        check_edits(seed)


@given(st.sampled_from(SHIPPED), st.data())
def test_any_value_at_any_key(shipped: tuple[type[Document], str], data: st.DataObject) -> None:
    document, text = shipped
    lines = text.splitlines()
    keyed = [number for number, line in enumerate(lines) if ": " in line and not line.startswith("#")]
    number = data.draw(st.sampled_from(keyed))
    value = data.draw(st.sampled_from(NASTY) | st.text(max_size=20) | st.floats().map(str) | st.integers().map(str))
    lines[number] = f"{lines[number].split(': ')[0]}: {value}"
    assert read(document, "\n".join(lines))


@given(st.text(max_size=40) | st.sampled_from(NASTY).map(lambda value: f"device.memory={value}"))
def test_any_setting(setting: str) -> None:
    try:
        shown = repr(load_job(model="tiny-gpt", cluster="dgx-a100", global_batch_size=8, settings=[setting]))
    except InputError as error:
        shown = str(error)
    assert shown.replace("\n", "").isprintable()


def test_every_misspelt_key_of_a_shipped_file_is_found_and_most_are_guessed() -> None:
    """One typing error in each key of each file: two letters swapped, one dropped, or one doubled."""
    rng = random.Random(0)
    guessed = total = 0
    for document, text in SHIPPED:
        for line in text.splitlines():
            key, colon, _ = line.partition(": ")
            if not colon or line.startswith(("#", " ", "-")) or len(key) < 4:
                continue
            at = rng.randrange(len(key) - 1)
            typos = {
                key[:at] + key[at + 1] + key[at] + key[at + 2 :],
                key[:at] + key[at + 1 :],
                key[: at + 1] + key[at:],
            }
            typo = rng.choice(sorted(typos - {key}))
            shown = read(document, re.sub(rf"^{key}: ", f"{typo}: ", text, count=1, flags=re.MULTILINE))
            total += 1
            assert f"unknown key `{typo}`" in shown
            guessed += f"did you mean `{key}`" in shown
    assert guessed >= 0.95 * total


@pytest.mark.parametrize(
    "text", ["m\x00=1", "tp\ufeff", "tp=\ufeff", "recompute=full\x1b[31m", "layers_per_stage!=\u202e"]
)
@pytest.mark.parametrize(
    "read", [lambda text: parse_layout(text, num_layers=4, num_devices=8), lambda text: Constraints.parse((text,))]
)
def test_a_message_about_a_layout_can_be_shown(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(InputError) as caught:
        read(text)
    assert str(caught.value).replace("\n", "").isprintable()


def test_an_option_that_a_script_repeats_is_a_list() -> None:
    """The readers of foreign files return a tuple for it: a list in the document, and not a single value."""
    assert as_node({"a": ("b", "c")}, "x").plain == {"a": ("b", "c")}
