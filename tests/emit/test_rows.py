"""Each row of emit's tables by what it does to one plan or file, so that a removed row fails a test (rows.yaml)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tables import unsaid

from planner.emit.programs import PROGRAMS
from planner.emit.read.facts import facts_of
from planner.emit.target import Target
from planner.errors import InputError
from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.blocks import RotaryScaling
from planner.specs.by_name import load_engine, load_model
from planner.specs.load import load_job

ROWS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8"))
TABLES = tuple(name for name in PROGRAMS if name != "torch")  # its only settings are read from the plan itself
ENGINES = {"accelerate": ("fsdp", 3), "deepspeed": ("deepspeed", 3), "bridge": ("megatron-bridge", 1)}
OTHERS = {**dict.fromkeys(("megatron", "ms-swift", "primus"), ("megatron", 1)), "torchtitan": ("torchtitan", 3)}


def programs(by: str) -> tuple[str, ...]:
    return tuple(ROWS["groups"].get(by, (by,)))


def engine_of(name: str) -> tuple[str, int]:
    return ENGINES.get(name.rpartition("-")[2]) or OTHERS[name.removesuffix("-0.3")]


@cache
def plan_of(engine: str, zero: int) -> Any:
    options = {"global_batch_size": 64, "sequence_length": 1024, "settings": ("training.weights=a/model",)}
    job = load_job(model="llama3-8b", cluster="dgx-h100", nodes=2, engine=engine, **options)
    layout = parse_layout(f"dp=16,zero={zero}", num_layers=job.model.num_layers, num_devices=16)
    plan = plan_for_layout(job, layout)
    return {name: getattr(plan, name) for name in ("model", "training", "layout", "engine", "cluster")}


@cache
def shipped(name: str) -> Any:
    return load_model(name)


def changed(name: str, changes: dict[str, Any]) -> Any:
    """A program's plan with other values of fields, as far as a table reads a plan; values are not checked."""
    plan = SimpleNamespace(**plan_of(*engine_of(name)))
    for path, given in changes.items():
        part, _, field = path.partition(".")
        value = tuple(given) if isinstance(given, list) else given
        value = RotaryScaling(**value) if isinstance(value, dict) else value
        inner, _, field = field.rpartition(".")
        if not field:
            value = load_engine(value) if part == "engine" else shipped(value)
        elif inner:
            old = getattr(getattr(plan, part), inner)
            value = getattr(plan, part).model_copy(update={inner: old.model_copy(update={field: value})})
        elif part == "layout":
            value = replace(plan.layout, **{field: value})
        else:
            value = getattr(plan, part).model_copy(update={field: value})
        setattr(plan, part, value)
    return plan


def refusing(name: str, plan: Any, why: str) -> list[int]:
    """Places of the rows that refuse the plan in these words."""
    told = [row.fault(plan) for row in PROGRAMS[name].refuse]
    return [place for place, fault in enumerate(told) if fault and why in fault[0]]


def writing(name: str, plan: Any, keys: dict[str, Any]) -> list[int]:
    """Places of the rows that write one of the keys with its value."""
    wanted = {(key, tuple(value) if isinstance(value, list) else value) for key, value in keys.items()}
    return [place for place, row in enumerate(PROGRAMS[name].settings) if wanted & {*row.write(plan).items()}]


def is_read(target: Target, row: dict[str, Any]) -> bool:
    """Whether the file with the keys is read as the document says."""
    try:
        found = facts_of(target, row["keys"], model=shipped("llama3-8b"), num_devices=16)
    except InputError:  # a key that nothing reads may be one of the layout
        return False
    facts = row.get("finds", {}).items() <= found.fields.items() and {*row.get("doubts", ())} == {*found.doubts}
    return facts and not found.not_priced


REFUSED = [(group["by"], row) for group in ROWS["refuses"] for row in group["plans"]]


@pytest.mark.parametrize(("by", "row"), REFUSED, ids=str)
def test_a_plan_is_refused_for_its_reason_alone(by, row):
    for name in programs(by):
        assert refusing(name, changed(name, {}), "") == [], name
        assert len(refusing(name, changed(name, row["with"]), row["why"])) == 1, name


@pytest.mark.parametrize("row", ROWS["writes"], ids=str)
def test_a_plan_is_written_with_its_keys(row):
    for name in programs(row["by"]):
        assert len(writing(name, changed(name, row["with"]), row["keys"])) == 1, name


@pytest.mark.parametrize("row", ROWS["reads"], ids=str)
def test_a_file_is_read_with_its_keys(row):
    for name in programs(row["by"]):
        assert is_read(PROGRAMS[name], row), name


@pytest.mark.parametrize("name", TABLES)
def test_each_row_of_a_table_is_missed(name):
    """Without any one row, a field would be neither written nor refused, or a test above would fail."""
    target = PROGRAMS[name]
    refused = {each for by, row in REFUSED if name in programs(by)
               for each in refusing(name, changed(name, row["with"]), row["why"])}  # fmt: skip
    written = {each for row in ROWS["writes"] if name in programs(row["by"])
               for each in writing(name, changed(name, row["with"]), row["keys"])}  # fmt: skip
    reads = [row for row in ROWS["reads"] if name in programs(row["by"])]
    for place, row in enumerate(target.refuse):
        less = replace(target, refuse=target.refuse[:place] + target.refuse[place + 1 :])
        assert place in refused or unsaid(less), (place, row.says)
    for place, setting in enumerate(target.settings):
        less = replace(target, settings=target.settings[:place] + target.settings[place + 1 :])
        is_missed = place in written or unsaid(less) or not all(is_read(less, row) for row in reads)
        assert is_missed, (place, setting.says)
