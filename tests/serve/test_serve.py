"""`planner serve` through the SDK's own client: each question of an agent is answered rightly by one call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

mcp = pytest.importorskip("mcp", reason="the extra `serve` is not installed")
anyio = pytest.importorskip("anyio")

QUESTIONS = yaml.safe_load((Path(__file__).parent / "questions.yaml").read_text(encoding="utf-8"))
SCRIPT = """torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu \\
  --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \\
  --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 --bf16 \\
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \\
  --vocab-size 128256 --use-flash-attn --tokenizer-type NullTokenizer --recompute-activations
"""
SCHEMAS = {"plan": "plan", "price": "plan", "read": "plan", "explain": "explanation"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of all questions, from one server process in a folder with a script."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "train.sh").write_text(SCRIPT)

    async def ask() -> list[Any]:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        command = StdioServerParameters(command=sys.executable, args=["-m", "planner", "serve"], cwd=str(folder))
        async with Client(stdio_client(command)) as client:
            tools = {each.name for each in (await client.list_tools()).tools}
            assert tools == {"plan", "price", "explain", "read", "models", "clusters"}
            calls = [dict(each["call"]) for each in QUESTIONS]
            return [await client.call_tool(call.pop("tool"), call) for call in calls]

    found: list[Any] = anyio.run(ask)
    assert sorted(each.name for each in folder.iterdir()) == ["train.sh"]  # nothing was written
    return found


def at(document: Any, path: str) -> Any:
    """The value at a path; a name chooses an entry of a list, and a key at the end of a list all its values."""
    *inner, last = path.split(".")
    for key in inner:
        if isinstance(document, list):
            document = document[int(key)] if key.isdigit() else next(each for each in document if each["name"] == key)
        else:
            document = document[key]
    if isinstance(document, list):
        return document[int(last)] if last.isdigit() else [each[last] for each in document]
    return document[last]


@pytest.mark.parametrize("number", range(len(QUESTIONS)), ids=[each["ask"] for each in QUESTIONS])
def test_one_call_answers_the_question(answers: list[Any], number: int) -> None:
    question, result = QUESTIONS[number], answers[number]
    text = result.content[0].text
    if "error" in question:
        assert result.is_error
        assert question["error"] in text
        return
    assert not result.is_error, text
    document = result.structured_content
    assert json.loads(text) == document
    for path, wanted in question["answer"].items():
        found = at(document, path)
        if isinstance(wanted, list):
            assert wanted[0] <= found <= wanted[1], (path, found)
        elif isinstance(wanted, dict):
            assert (wanted["has"] in found) if "has" in wanted else bool(found), (path, found)
        else:
            assert found == wanted, (path, found)


def test_answers_follow_the_published_schemas(answers: list[Any], validator_of: Any) -> None:
    for question, result in zip(QUESTIONS, answers, strict=True):
        name, document = question["call"]["tool"], result.structured_content
        if not result.is_error:
            whole = document.get("result", document) if name in ("models", "clusters") else document
            validator_of(SCHEMAS.get(name, name)).validate(whole)


def test_there_are_twenty_questions() -> None:
    assert len(QUESTIONS) == 20
