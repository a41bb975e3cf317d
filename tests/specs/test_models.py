"""Shipped models compared with published counts, and the rules of the model document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from planner.cost.parameters import mtp_params, num_active_params, num_params
from planner.errors import InputError
from planner.specs.by_name import load_model, model_names, model_source
from planner.specs.model import ModelSpec

PUBLISHED = json.loads((Path(__file__).parents[1] / "published" / "huggingface.json").read_text())["models"]
CHECKPOINTS = json.loads((Path(__file__).parents[1] / "published" / "hub_configs.json").read_text())["checkpoints"]
RENAMED = {"llama-3.1-8b": "llama3-8b", "llama-3.1-70b": "llama3-70b", "llama-2-7b": "llama2-7b"}
SHIPPED = [name for name in PUBLISHED if name != "t5-v1.1-xl"]  # only read from its config.json

# Exact: `n_params` that MosaicML's llm-foundry prints in its benchmark tables, at a sequence length of 2048.
LLM_FOUNDRY = {
    "mpt-125m": 125_311_488,
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-13b": 12_853_954_560,
    "mpt-70b": 64_862_437_376,
}

# Billions as published; the source stands in the comment before each group.
ADVERTISED = {
    # Hugging Face, parameter count beside the checkpoint; T5 and BERT papers for what is older
    "llama3.2-1b": 1.24,
    "llama3.2-3b": 3.21,
    "tinyllama-1.1b": 1.1,
    "smollm2-1.7b": 1.71,
    "mistral-small-24b": 23.6,
    "mistral-large-123b": 123,
    "mixtral-8x22b": 141,
    "phi4": 14.7,
    "olmo2-7b": 7.3,
    "olmo2-13b": 13.7,
    "pythia-6.9b": 6.86,
    "pythia-12b": 11.8,
    "falcon-180b": 180,
    "gpt2": 0.124,
    "bloom-7b": 7.07,
    "moonlight-16b": 16.0,
    "grok-1": 314,
    "t5-large": 0.738,
    "t5-11b": 11.3,
    "bert-base": 0.110,
    # Dosovitskiy et al., ViT (2021), table 1
    "vit-base": 0.086,
    "vit-huge": 0.632,
    # Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388), and their model cards
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-235b-a22b": 235,
    # Gemma 2 (arXiv 2408.00118), table 2, and Gemma 3 (arXiv 2503.19786), table 1: embedding + the rest
    "gemma2-2b": 0.590 + 2.024,
    "gemma2-27b": 1.180 + 26.047,
    "gemma3-4b": 0.675 + 3.209,
    "gemma3-12b": 1.012 + 10.759,
    "gemma3-27b": 1.416 + 25.600,
    # model cards of gpt-oss, DeepSeek-V2, Kimi K2, Llama 4 (whose 109 and 400 include an image encoder)
    "gpt-oss-120b": 116.8,
    "deepseek-v2": 236,
    "kimi-k2": 1026,
    "llama4-scout": 109 - 0.9,
    "llama4-maverick": 400,
    # Zhang et al., OPT (2022), names of the models; Hugging Face for the 13b
    "opt-1.3b": 1.316,
    "opt-13b": 12.85,
    "opt-30b": 30,
    "opt-66b": 66,
    "opt-175b": 175,
    # Chowdhery et al., PaLM (2022), table 1; Smith et al., MT-NLG (2022); NVIDIA's performance tables
    "palm-540b": 540.35,
    "mt-nlg-530b": 530,
    "gpt3-5b": 5.0,
    "nemotron3-8b": 8.5,
    "nemotron4-15b": 15.6,
    "nemotron4-340b": 341,
}
# Billions that a token passes through, as the model's card or report gives them.
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.0,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.0,
    "deepseek-v2": 21.0,
    "deepseek-v3": 37.0,
    "kimi-k2": 32.6,
    "llama4-scout": 17.0,
    "llama4-maverick": 17.0,
    "gpt-oss-20b": 3.6 + 0.58,  # 3.6 and 5.1 leave out the embedding of 0.58
    "gpt-oss-120b": 5.1 + 0.58,
}
SHAPE: dict[str, Any] = {
    "name": "small",
    "architecture": "llama",
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "ffn_hidden_size": 128,
    "vocab_size": 256,
    "max_sequence_length": 128,
}
MOE = {"num_experts": 8, "experts_per_token": 2, "ffn_hidden_size": 32}
MLA = {"kv_lora_rank": 16, "nope_head_size": 8, "rope_head_size": 4, "value_head_size": 8}


@pytest.mark.parametrize("published", SHIPPED)
def test_counts_equal_those_of_transformers_modules(published: str) -> None:
    assert num_params(load_model(RENAMED.get(published, published))) == PUBLISHED[published]["num_params"]


@pytest.mark.parametrize(("name", "expected"), LLM_FOUNDRY.items())
def test_counts_equal_those_of_llm_foundry(name: str, expected: int) -> None:
    assert num_params(load_model(name)) == expected


@pytest.mark.parametrize(("name", "billions"), ADVERTISED.items())
def test_counts_are_within_one_percent_of_what_was_published(name: str, billions: float) -> None:
    assert num_params(load_model(name)) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("name", "billions"), ACTIVE.items())
def test_active_counts_agree_with_what_was_published(name: str, billions: float) -> None:
    assert num_active_params(load_model(name)) / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_module_for_further_tokens_of_deepseek_v3() -> None:
    """README_WEIGHTS.md of the checkpoint: 11.5 billion parameters in addition to the shared embedding and head."""
    assert mtp_params(load_model("deepseek-v3")) / 1e9 == pytest.approx(11.5, rel=0.01)


def test_at_least_fifty_models_are_shipped_and_all_are_checked() -> None:
    sources = {name: model_source(name) for name in model_names()}
    of_pages = {name for name in sources if any(f"huggingface.co/{page} (" in sources[name] for page in CHECKPOINTS)}
    exact = {RENAMED.get(name, name) for name in PUBLISHED} | set(LLM_FOUNDRY) | of_pages  # test_hub_configs.py
    rest = set(model_names()) - exact - set(ADVERTISED)
    assert all(name.startswith(("megatron-", "llama", "gpt3-", "tiny-")) for name in rest), rest  # test_library.py
    assert len(model_names()) >= 50


def test_a_dense_model_is_active_as_a_whole() -> None:
    for name in model_names():
        model = load_model(name)
        has_experts = num_active_params(model) < num_params(model)
        assert has_experts == (model.moe is not None) == ("moe" in model.features)


def test_an_architecture_is_only_a_default() -> None:
    model = ModelSpec(**SHAPE | {"architecture": "bert", "final_norm": True})
    assert (model.kind, model.final_norm, model.output_head) == ("encoder", True, False)


def test_head_size_of_latent_attention_follows_from_its_parts() -> None:
    assert ModelSpec(**SHAPE | {"mla": MLA, "hidden_size": 63}).head_size == 12
    with pytest.raises(ValidationError, match="head_size: 16 is not"):
        ModelSpec(**SHAPE | {"mla": MLA, "head_size": 16})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moe": MOE | {"num_dense_layers": 4}}, "moe: of 4 layers none has experts"),
        ({"moe": MOE | {"layer_frequency": 5}}, "moe: of 4 layers none has experts"),
        ({"moe": MOE | {"experts_per_token": 9}}, "experts_per_token: 9 is more than num_experts 8"),
        ({"mla": MLA, "qkv_bias": True}, "mla: latent attention has no"),
        ({"num_encoder_layers": 2}, "num_encoder_layers: this is of an encoder-decoder"),
        ({"kind": "encoder-decoder"}, "num_encoder_layers: must be 1 to 3"),
        ({"kind": "encoder-decoder", "num_encoder_layers": 4}, "num_encoder_layers: must be 1 to 3"),
        ({"kind": "encoder", "moe": MOE}, "kind: moe, mla and mtp_layers are of decoders"),
        ({"output_head": False}, "kind: a decoder has an output_head"),
        ({"pooler": True}, "kind: a decoder has an output_head"),
        ({"position": "relative"}, "position: relative is of encoder-decoders"),
        ({"patches": {"image_size": 224, "patch_size": 15}}, "patch_size: 15 does not divide image_size 224"),
    ],
)
def test_models_that_cannot_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ModelSpec(**SHAPE | change)


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("moe: {num_experts: 8, experts_per_token: 9, ffn_hidden_size: 32}", "9:23", "is more than num_experts"),
        ("moe: {num_experts: 8, expert_per_token: 2, ffn_hidden_size: 32}", "9:23", "did you mean `experts_per_token`"),
        ("moe: {num_experts: 8, experts_per_token: two, ffn_hidden_size: 32}", "9:23", "must be a whole number"),
        ("moe: 8", "9:1", "`moe` must be a mapping"),
        ("mla: {nope_head_size: 8, rope_head_size: 4, value_head_size: 8}", "9:1", "`mla.kv_lora_rank` is missing"),
        ("mtp_layers: -1", "9:1", "`mtp_layers` must be at least 0"),
        ("kind: coder", "9:1", "`kind` cannot be `coder`"),
    ],
)
def test_mistakes_in_nested_documents_stand_at_their_line(tmp_path: Path, text: str, where: str, words: str) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in SHAPE.items()) + text + "\n")
    with pytest.raises(InputError) as caught:
        load_model(str(path))
    message = str(caught.value)
    assert f"model.yaml:{where}" in message
    assert words in message
