"""Emitted programs under DeepSpeed: the model in stages or tiles equals the whole model, and a run of stages learns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planner.emit.bundle import write_bundle
from planner.emit.programs.hugging_face import FLASH
from planner.emit.programs.hugging_face_model import LAYERS
from planner.emit.target import How
from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.load import load_job

pytest.importorskip("deepspeed")
pytest.importorskip("datasets")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
PYTHON = os.environ.get("REAL_PYTHON", sys.executable)
OWN = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **EXPERTS, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
WINDOW = {"head_dim": 8, "sliding_window": 8}
KINDS = {
    **{kind: {} for kind in ("llama", "qwen2", "phi3", "nemotron", "olmo2", "mistral", "gpt_neox", "falcon")},
    "starcoder2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 8},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "q_lora_rank": 16, "first_k_dense_replace": 3},
    "gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 5, "n_head": 4},
}


@pytest.fixture(params=["full", "full:2"])
def emitted(tmp_path, request):
    """A small plan of two stages with three and five of eight layers, and the folder with its emitted files."""
    job = load_job(
        model="tiny-llama", cluster="local-cpu", engine="deepspeed", global_batch_size=8, sequence_length=32,
        gpus=2, settings=("training.steps=30", "training.learning_rate=0.003"),
    )  # fmt: skip
    text = f"pp=2,zero=1,recompute={request.param},mbs=2,layers_per_stage=3/5"
    layout = parse_layout(text, num_layers=8, num_devices=2)
    plan = plan_for_layout(job, layout)
    write_bundle(plan, tmp_path, how=How(smoke=True), force_unfit=True)
    return plan, tmp_path


def test_stages_of_each_kind_of_model_are_the_model(emitted):
    """Loss and parameters of the chain of stages equal those of transformers' own model with the same weights."""
    assert set(KINDS) == set(LAYERS)
    cases = [
        ({**SMALL, **own, "model_type": kind}, attention, [1, 3, 1])
        for kind, own in KINDS.items()
        for attention in (("eager",) if FLASH.get(kind, "sdpa") != "sdpa" else ("sdpa", "eager"))
    ]
    done = subprocess.run(
        [PYTHON, HERE / "deepspeed_stages.py", "--losses"],
        input=json.dumps(cases), cwd=emitted[1], env=OWN, capture_output=True, text=True, check=True, timeout=500,
    )  # fmt: skip
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    wrong = []
    for (config, attention, _), found in zip(cases, answers, strict=True):
        same = found["staged"] == pytest.approx(found["whole"], rel=1e-5)
        if not same or found["staged_params"] != found["whole_params"]:
            wrong.append((config["model_type"], attention, found))
    assert wrong == []


def test_a_run_of_two_stages_learns_and_keeps_the_layers_of_the_plan(emitted):
    """The emitted program runs under torchrun and DeepSpeed's own engine; its checkpoint shows each stage's layers."""
    plan, folder = emitted
    words = [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29611"]
    words += ["--redirects=2", f"--log_dir={folder / 'ranks'}"]
    words += [str(HERE / "deepspeed_stages.py"), "pipeline.py", "training.yaml"]
    done = subprocess.run(words, cwd=folder, env=OWN, capture_output=True, text=True, timeout=500, check=False)
    own = "\n".join(f"{path}: {path.read_text()[-2000:]}" for path in sorted(folder.glob("ranks/*/*/*/stderr.log")))
    assert done.returncode == 0, own or done.stderr  # of the ranks; torchrun alone tells that one failed
    told = [float(each) for each in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(told) == plan.training.steps // 10
    assert told[-1] < told[0]
    torch = pytest.importorskip("torch")
    held = []
    for stage in range(plan.layout.pp):
        (path,) = folder.glob(f"run/global_step*/layer_{stage + 1:02d}-model_states.pt")
        names = torch.load(path, weights_only=True)
        held.append(len({match[1] for name in names if (match := re.search(r"layers\.(\d+)\.", name))}))
    assert tuple(held) == plan.layout.layers_per_stage
    settings = yaml.safe_load((folder / "training.yaml").read_text())
    assert tuple(settings["pipeline"]["layers_per_stage"]) == plan.layout.layers_per_stage


TILES = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from train import compute_in_tiles

def measured(tiles):
    torch.manual_seed(1)
    config = AutoConfig.for_model("llama", **json.loads(sys.argv[1]))
    model = AutoModelForCausalLM.from_config(config)
    if tiles:
        compute_in_tiles(model, tiles)
    tokens = torch.arange(2 * 48).reshape(2, 48) % config.vocab_size
    wide = []
    def keep(tensor):
        if tensor.shape[-1:] == (config.intermediate_size,) and tensor.dim() == 3:
            wide.append(tensor.numel())
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    kept = sum(wide)
    loss.backward()
    return {"loss": float(loss), "norms": [float(p.grad.norm()) for p in model.parameters()], "kept": kept}

print(json.dumps([measured(tiles) for tiles in (0, 5)]))
"""


def test_feed_forward_blocks_in_tiles_are_the_blocks(tmp_path):
    """DeepSpeed's TiledMLP in the emitted train.py: loss and gradients are the same, and no inner tensor is kept."""
    job = load_job(
        model="tiny-llama", cluster="local-cpu", engine="deepspeed", global_batch_size=8, sequence_length=32,
        gpus=2, settings=("training.mlp_tiles=5",),
    )  # fmt: skip
    layout = parse_layout("zero=3,recompute=none", num_layers=8, num_devices=2)
    write_bundle(plan_for_layout(job, layout), tmp_path, how=How(smoke=True), force_unfit=True)
    assert yaml.safe_load((tmp_path / "training.yaml").read_text())["mlp_tiles"] == 5
    done = subprocess.run(
        [PYTHON, "-c", TILES, json.dumps(SMALL)],
        cwd=tmp_path, env=OWN | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    plain, tiled = json.loads(done.stdout.strip().splitlines()[-1])
    assert tiled["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert tiled["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert plain["kept"] >= 5 * 3 * 2 * 48 * SMALL["intermediate_size"]
    assert tiled["kept"] == 0
