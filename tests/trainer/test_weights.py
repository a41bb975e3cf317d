"""Hugging Face checkpoints: models that are read compute as in transformers, and written files equal those read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
# ruff: noqa: E402 # what follows imports torch

from planner.errors import ExitCode, InputError
from planner.layout_text import parse_layout
from planner.specs.by_name import load_model
from planner.trainer.hugging_face import model_type_of, whole_config
from planner.trainer.weights import _check_config

LLAMA = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "gpt2": {"vocab_size": 256, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "n_inner": 96},
    "llama": LLAMA | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5},
    "llama-scaled": LLAMA
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama-tied-biased": LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": LLAMA | {"sliding_window": 8, "head_dim": 16},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 16},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": LLAMA
    | {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 16, "num_experts_per_tok": 2},
}
QUICK = ("qwen2",)
ROWS, LENGTH = 8, 32


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function from a key of MODELS to a folder that transformers wrote, with random weights, and its model."""
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(len(name))
            config = transformers.AutoConfig.for_model(name.partition("-")[0], **MODELS[name])
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():  # biases and norms start as zeros and ones, which would hide a wrong name
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            made[name] = tmp_path_factory.mktemp(name), model
            model.save_pretrained(made[name][0], max_shard_size="40KB" if name == "llama" else "5GB")
        return made[name]

    return make


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[str, torch.Tensor]:
    """A token file with as many windows as a batch has rows, and the tokens."""
    tokens = np.random.default_rng(0).integers(0, 256, ROWS * LENGTH + 1).astype(np.uint16)
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, tokens)
    return str(path), torch.from_numpy(tokens.astype(np.int64))


def plan_for(folder: Path, layout: str, make_plan, **training):
    spec = load_model(str(folder))
    plan = make_plan("dp=1", learning_rate=1e-30, weight_decay=0.0, **training)
    return replace(plan, model=spec, layout=parse_layout(layout, num_layers=spec.num_layers, num_devices=1))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in safetensors.load_file(file).items()}


def loss_of(model, tokens: torch.Tensor) -> float:
    inputs, targets = tokens[:-1].view(ROWS, LENGTH), tokens[1:].view(ROWS, LENGTH)
    with torch.no_grad():
        logits = model(inputs).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def runs(name: str, layout: str, *marks) -> object:
    return pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(runs(name, "dp=1,mbs=8", *([] if name in QUICK else [pytest.mark.slow])) for name in MODELS),
        runs("gpt2", "tp=2,mbs=4"),
        runs("gpt2", "tp=2,pp=2,mbs=2", pytest.mark.slow),
        runs("llama", "pp=2,dp=2,zero=1,mbs=2"),
        runs("llama-tied-biased", "tp=2,pp=2,dp=2,zero=1,mbs=2", pytest.mark.slow),
        runs("qwen3", "dp=2,zero=3,mbs=2"),
        runs("mixtral", "dp=2,ep=2,zero=1,mbs=2"),
        runs("qwen3_moe", "pp=2,mbs=4", pytest.mark.slow),
    ],
)
def test_a_checkpoint_computes_what_it_should_and_comes_back_as_it_was(
    name, layout, checkpoints, data, run_job, make_plan, tmp_path
):
    """The learning rate is so low that one step changes no fp32 weight; the step's loss is from before the update."""
    folder, model = checkpoints(name)
    options = {"weights": str(folder), "export": str(tmp_path / "out"), "output": str(tmp_path / "run")}
    code = run_job("train", plan_for(folder, layout, make_plan), steps=1, data=[data[0]], **options)
    assert code == ExitCode.OK
    step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert step["loss"] == pytest.approx(loss_of(model, data[1]), abs=2e-6)
    assert abs(step["loss"] - math.log(256)) > 0.05  # it is not the loss of weights that say nothing
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key


@pytest.mark.parametrize(
    "name", [name if name in ("gpt2", "mixtral") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_transformers_reads_what_a_run_writes(name, checkpoints, data, run_job, make_plan, tmp_path):
    """With the configuration that the trainer makes, without the checkpoint's configuration; also with tied weights."""
    folder, model = checkpoints(name)
    plan = plan_for(folder, "dp=1,mbs=8", make_plan)
    options = {"export": str(tmp_path / "out"), "output": str(tmp_path / "run"), "data": [data[0]]}
    assert run_job("train", plan, steps=1, **options) == ExitCode.OK
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32").eval()
    assert type(read) is type(model)
    loss = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["loss"]
    assert loss_of(read, data[1]) == pytest.approx(loss, abs=2e-6)
    assert load_model(str(tmp_path / "out")).model_copy(update={"name": plan.model.name}) == plan.model


def test_a_checkpoint_of_another_model_is_refused(checkpoints, run_job, make_plan, tmp_path):
    folder, _ = checkpoints("qwen2")
    options = {"steps": 1, "weights": str(folder), "output": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match=r"InputError: .* holds, beside the model's, 12 tensors: .*k_proj.bias"):
        run_job("train", plan_for(checkpoints("llama")[0], "dp=1,mbs=8", make_plan), **options)
    tied = plan_for(checkpoints("llama-tied-biased")[0], "dp=1,mbs=8", make_plan)
    untied = replace(tied, model=tied.model.model_copy(update={"tied_embeddings": False}))
    with pytest.raises(RuntimeError, match=r"InputError: .* lacks 1 tensors: lm_head.weight"):
        run_job("train", untied, **options | {"weights": str(checkpoints("llama-tied-biased")[0])})
    with pytest.raises(RuntimeError, match=r"EnvironmentProblem: cannot read .* it is not there"):
        run_job("train", tied, **options | {"weights": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "type llama3, which the model of the plan has not"),
        ("llama-scaled", {"rope_parameters": None}, "type default, which the model of the plan has not"),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "type linear, which this trainer has not",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, "does not normalise"),
    ],
)
def test_blocks_that_compute_otherwise_are_refused(name, change, message, checkpoints, tmp_path):
    """Their tensors have the names and shapes of blocks that the trainer supports."""
    config, spec = json.loads((checkpoints(name)[0] / "config.json").read_text()), load_model(str(checkpoints(name)[0]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    _check_config(tmp_path, spec)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InputError, match=message):
        _check_config(tmp_path, spec)


def test_gpt2s_own_names_are_read_too(checkpoints, data, run_job, make_plan, tmp_path):
    """The published files lack the prefix `transformer.`, and contain the masks as buffers."""
    folder, model = checkpoints("gpt2")
    old = {name.removeprefix("transformer."): value for name, value in tensors_of(folder).items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 4, 4) for layer in range(4)}
    (tmp_path / "old").mkdir()
    safetensors.save_file(old, tmp_path / "old" / "model.safetensors")
    options = {"weights": str(tmp_path / "old"), "output": str(tmp_path / "run"), "data": [data[0]]}
    assert run_job("train", plan_for(folder, "dp=1,mbs=8", make_plan), steps=1, **options) == ExitCode.OK
    loss = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["loss"]
    assert loss == pytest.approx(loss_of(model, data[1]), abs=2e-6)


def test_bf16_training_writes_bf16(checkpoints, run_job, make_plan, tmp_path):
    folder, _ = checkpoints("llama")
    plan = plan_for(folder, "dp=2,mbs=4", make_plan, precision="bf16")
    options = {"weights": str(folder), "export": str(tmp_path / "out"), "output": str(tmp_path / "run")}
    assert run_job("train", plan, steps=1, **options) == ExitCode.OK
    assert {value.dtype for value in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["gemma2-2b", "deepseek-v2-lite", "gpt-neox-20b", "phi3-mini"])
def test_blocks_without_a_naming_are_refused(name):
    spec = load_model(name)
    if name == "phi3-mini":  # its blocks are Llama's, and its own files only name them otherwise
        assert model_type_of(spec) in ("llama", "mistral")
        return
    with pytest.raises(InputError, match="no Hugging Face naming"):
        model_type_of(spec)


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("mixtral-8x7b", {"ffn_hidden_size": 4096}, "mixtral"),  # every layer has experts, which have their own width
        ("mixtral-8x7b", {"moe": {"imbalance": 1.5}}, "mixtral"),
        ("qwen3-30b-a3b", {"moe": {"imbalance": 1.5}}, "qwen3_moe"),
        ("gpt2", {"rope_theta": 500_000.0}, "gpt2"),
        ("phi3-mini", {"max_sequence_length": 999}, "llama"),  # shorter than the window
        ("llama3-8b", {"architecture": "qwen3", "norm_bias": False}, "llama"),
        ("qwen2.5-7b", {"attention_bias": True}, "llama"),
    ],
)
def test_fields_that_the_blocks_do_not_use_refuse_no_export(name, change, kind):
    spec = load_model(name)
    if "moe" in change:
        change = {"moe": spec.moe.model_copy(update=change["moe"])}
    assert model_type_of(spec.model_copy(update=change)) == kind


def test_a_model_without_a_naming_is_refused_before_the_first_step(checkpoints, run_job, make_plan, tmp_path):
    plan = plan_for(checkpoints("llama")[0], "dp=1,mbs=8", make_plan)
    plan = replace(plan, model=plan.model.model_copy(update={"sliding_window": 8, "global_every": 2}))
    with pytest.raises(RuntimeError, match="no Hugging Face naming"):
        run_job("train", plan, steps=1, export=str(tmp_path / "out"), output=str(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_seed_oss_is_written_without_the_dropout_of_its_class():
    config = transformers.AutoConfig.for_model(**whole_config(load_model("seed-oss-36b"), "bfloat16"))
    assert (type(config).__name__, config.attention_dropout, config.residual_dropout) == ("SeedOssConfig", 0, 0)
