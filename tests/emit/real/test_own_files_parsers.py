"""LLaMA-Factory's parser and Axolotl's schema read the files that are written for plans from their files.

REAL_PYTHON is an interpreter that has one of them: `python tools/real_parsers.py llama-factory axolotl`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_own_files import FACTORY, FILES, NAMES, planned

from planner.cli import main
from planner.plan_file import plan_from_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
PYTHON = os.environ.get("REAL_PYTHON", sys.executable)
PURE = {"factory-pure": FACTORY.replace("deepspeed: zero3.json\n", "").replace("bf16: true", "pure_bf16: true")}
STAGES = {
    "factory-zero3": FACTORY,
    "factory-zero3-lora": FACTORY.replace("finetuning_type: full", "finetuning_type: lora"),
}
"""Files whose plans are pinned to ZeRO-3, which LLaMA-Factory refuses beside weights of 16 bits."""
OTHERS = {"sdp_attention": ("attn_implementation", "sdpa")}
"""Key that Axolotl renames -> its new name and value."""


def answers(program: str, module: str, folder: Path) -> list[tuple[dict, dict, object]]:
    """Of each file: its keys and values, the program's answer, and the plan."""
    code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec('{module}'))"
    if subprocess.run([PYTHON, "-c", code], check=False).returncode:
        pytest.skip(f"{PYTHON} has no {module}")
    paths, plans, own = [], [], program.rpartition("-")[2]
    for name, text in {**FILES, **PURE, **STAGES}.items():
        if not name.startswith(own):
            continue
        (folder / name).mkdir()
        plan = planned(text, folder / name, *(("--pin", "zero=3") if name in STAGES else ()))
        assert main(["emit", str(plan), "-o", str(folder / name / "run"), "--force-unfit"]) == 0
        paths.append(folder / name / "run" / NAMES[own])
        plans.append(plan_from_file(plan))
    done = subprocess.run(
        [PYTHON, HERE / "own_files.py", program], input=json.dumps([str(each) for each in paths]),
        capture_output=True, text=True, check=True, timeout=500, env=os.environ | {"PYTHONPATH": ""},
    )  # fmt: skip
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return [
        (yaml.safe_load(path.read_text()), answer, plan) for path, answer, plan in zip(paths, found, plans, strict=True)
    ]


def test_llama_factory_starts_with_every_value(tmp_path):
    cases = answers("llama-factory", "llamafactory", tmp_path)
    assert {(plan.layout.zero, plan.training.lora_rank > 0) for *_, plan in cases} >= {(3, False), (3, True)}
    for written, found, plan in cases:
        assert "refused" not in found, found
        written["dataset"] = [written["dataset"]]
        found["cutoff_len"] += found["packing"]  # where sequences are packed, it sets a token aside and adds it later
        assert {key: found[key] for key in written} == written
        assert found["pure_bf16"] == (plan.training.memory_recipe == "pure-bf16")
        assert found["compute_dtype"] == "torch.bfloat16"


def test_axolotl_accepts_every_key_and_value(tmp_path):
    for written, found, _ in answers("axolotl", "axolotl", tmp_path):
        assert "refused" not in found, found
        assert found["unknown"] == []
        (dataset,) = written.pop("datasets")
        assert found["datasets"][0].items() >= dataset.items()
        for key, value in written.items():
            name, wanted = OTHERS.get(key, (key, value))
            there = found[name]
            there = {each: there.get(each) for each in wanted} if isinstance(wanted, dict) else there
            assert there == wanted, key
