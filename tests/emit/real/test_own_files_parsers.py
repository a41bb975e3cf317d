"""LLaMA-Factory's parser and Axolotl's schema read the files that are written for plans from their files.

REAL_PYTHON is an interpreter that has one of them: `python tools/real_parsers.py llama-factory axolotl`.
"""

from __future__ import annotations

import json
import math
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


TINY = {
    "name": "tiny", "architecture": "llama", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2,
    "ffn_hidden_size": 128, "vocab_size": 260, "max_sequence_length": 128,
}  # fmt: skip


def test_llama_factory_takes_two_steps_on_two_ranks(tmp_path):
    """Under ZeRO-3; a model that knows nothing begins at the logarithm of its 260 tokens, and learns."""
    code = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('llamafactory'))"
    if subprocess.run([PYTHON, "-c", code], check=False).returncode:
        pytest.skip(f"{PYTHON} has no llamafactory")
    program, own = HERE / "llama_factory_steps.py", os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([PYTHON, program, "make"], cwd=tmp_path, env=own, check=True, capture_output=True)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    text = FACTORY.replace("Qwen/Qwen2.5-7B", str(tmp_path / "model")).replace("8192", "64")
    text = text.replace("num_train_epochs: 2.0", "max_steps: 2").replace("1.0e-5", "1.0e-3")
    text = text.replace("lr_scheduler_type: cosine\nwarmup_ratio: 0.1", "lr_scheduler_type: constant")
    (tmp_path / "train.yaml").write_text(text)
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    plan, more = tmp_path / "plan.json", ("--gpus", "2", "--pin", "zero=3,dp=2", "--model", str(tmp_path / "tiny.yaml"))
    assert main(["plan", "--from", str(tmp_path / "train.yaml"), "dgx-h100", *more, "-o", str(plan)]) == 0
    assert main(["emit", str(plan), "-o", str(tmp_path / "run"), "--force-unfit"]) == 0
    path = tmp_path / "run" / NAMES["factory"]
    values = yaml.safe_load(path.read_text()) | {"dataset": "ours", "template": "default", "logging_steps": 1}
    path.write_text(yaml.safe_dump(values | {"dataset_dir": str(tmp_path), "report_to": "none", "save_strategy": "no"}))
    words = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, path.name]
    done = subprocess.run(words, cwd=path.parent, env=own, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((path.parent / f"seen{rank}.json").read_text()) for rank in (0, 1)]
    layout = plan_from_file(plan).layout
    for steps in ranks:
        assert [shape for shape, _ in steps] == [[layout.mbs, 64]] * 2
    first, second = (sum(steps[number][1] for steps in ranks) / 2 for number in (0, 1))
    assert first == pytest.approx(math.log(260), abs=0.05)
    assert second < first - 0.1


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
