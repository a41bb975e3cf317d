"""Each answer in JSON against its published schema, with the schema closed: an unknown key is an error, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from planner.cli import cli, main

SMALL = ("--global-batch", "64")
UNFIT = ("llama3-70b", "dgx-h100", "--nodes", "1", *SMALL)
LATE = ("--set", "training.tokens=1e15", "--set", "training.deadline=1 h")
RUNS = """id,model,gpu,gpus,seq,gbs,framework,precision,tp,pp,dp,mbs,zero_stage,recompute_policy,step_s
a,llama3-8b,H100,8,8192,64,torchtitan,bf16,1,1,8,1,3,full,9.9
b,no such model,H100,8,8192,64,torchtitan,bf16,2,1,4,1,3,full,11.2
"""
LAYOUT = ("llama3-8b", "dgx-h100", "--nodes", "1", "--seq-len", "8192", *SMALL, "--engine", "torchtitan")
CASES = (
    ("plan", 0, "plan", "tiny-gpt", "dgx-h100", "--gpus", "8", *SMALL),
    ("plan", 0, "plan", "tiny-gpt", "dgx-h100", "--gpus", "8", "--global-batch", "32..64", "--failures"),
    ("plan", 3, "plan", *UNFIT, "--pin", "tp=4"),
    ("explanation", 0, "explain", *LAYOUT, "--layout", "dp=8,zero=3"),
    ("explanation", 0, "explain", "plan.json", "--schedules", "--collectives", "--what-if", "nvlink.bandwidth=x2"),
    ("plan-sizes", 0, "plan", "tiny-gpt", "dgx-h100", "--nodes", "1..2", *SMALL),
    ("plan-sizes", 3, "plan", *UNFIT, "--nodes", "1..2", *LATE),
    ("plan-clusters", 0, "plan", "tiny-gpt", "dgx-h100:1,dgx-a100:1", *SMALL),
    ("diff", 0, "diff", "plan.json", "plan.json"),
    ("check", 0, "check", "runs.csv", "--plan", "plan.json", "--row", "a"),
    ("accuracy", 0, "accuracy", "runs.csv"),
    ("models", 0, "models"),
    ("models", 0, "models", "deepseek-v3"),
    ("clusters", 0, "clusters"),
    ("clusters", 0, "clusters", "gb200-nvl72"),
    ("clusters", 0, "clusters", "--detect"),
    ("engines", 0, "engines"),
    ("engines", 0, "engines", "megatron"),
    ("glossary", 0, "glossary", "bubble"),
)  # fmt: skip


def closed(schema: Any) -> Any:
    """The schema, in which an object with named keys has no others."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **found} if "properties" in found else found


@pytest.fixture(scope="module")
def validators(schemas_of_answers: dict[str, Any]) -> dict[str, Any]:
    closed_ones = {name: closed(schema) for name, schema in schemas_of_answers.items()}
    for each in closed_ones.values():
        jsonschema.Draft202012Validator.check_schema(each)
    return {name: jsonschema.Draft202012Validator(each) for name, each in closed_ones.items()}


@pytest.fixture(scope="module")
def plan() -> str:
    answer = CliRunner().invoke(cli, ["explain", *LAYOUT, "--layout", "dp=8,zero=3,mbs=1,recompute=full", "--json"])
    return answer.stdout


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs.csv").write_text(RUNS)
    Path("plan.json").write_text(plan)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[2:5]))
def test_an_answer_has_the_keys_and_kinds_of_its_schema(
    case: tuple[Any, ...], validators: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    name, code, *arguments = case
    assert main([*arguments, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    validators[name].validate(document)


def test_a_count_has_the_keys_of_its_schema(validators: dict[str, Any]) -> None:
    from planner.show.verify import verification_to_dict
    from planner.verify import Verification

    found = Verification(rank=0, stage=0, lines={"params": (1.0, 2.0)}, planned_bytes=1.0, counted_bytes=2.0)
    document = verification_to_dict(found)
    validators["verify"].validate(document)


ANSWERS = {case[0] for case in CASES} | {"verify"}


def test_every_command_with_json_is_here(schemas_of_answers: dict[str, Any]) -> None:
    commands = {name for name, each in cli.commands.items() if any("--json" in param.opts for param in each.params)}
    assert commands == {case[2] for case in CASES} | {"verify"}
    assert {*schemas_of_answers} == ANSWERS


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_the_published_schema_is_the_one_of_the_code(name: str, schemas_of_answers: dict[str, Any]) -> None:
    published = Path(__file__).parents[2] / "docs" / "schemas" / f"{name}.json"
    assert json.loads(published.read_text()) == schemas_of_answers[name], "run `make docs`"


def test_a_missing_key_is_an_error(validators: dict[str, Any]) -> None:
    document = json.loads(Path("plan.json").read_text())
    for key in ("verdict", "memory", "step_seconds"):
        without = {name: value for name, value in document.items() if name != key}
        with pytest.raises(jsonschema.ValidationError, match=key):
            validators["explanation"].validate(without)
