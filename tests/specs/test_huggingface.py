"""Hugging Face config.json: counts against transformers' own modules, and refusals instead of guesses."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from planner.cli import cli
from planner.cost.parameters import num_params
from planner.errors import InputError
from planner.specs.blocks import RotaryScaling
from planner.specs.by_name import load_model, model_notes
from planner.specs.huggingface.table import defaults, table
from planner.specs.load import load_job

PUBLISHED = json.loads((Path(__file__).parents[1] / "published" / "huggingface.json").read_text())["models"]
LLAMA = PUBLISHED["llama-3.1-8b"]["config"]
QWEN3_MOE = PUBLISHED["qwen3-30b-a3b"]["config"]
Save = Callable[[Any], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(config: Any) -> Path:
        folder = tmp_path / "some-model"
        folder.mkdir(exist_ok=True)
        text = config if isinstance(config, str) else json.dumps(config, indent=1)
        (folder / "config.json").write_text(text, encoding="utf-8")
        return folder

    return write


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_model(str(folder))
    return str(caught.value)


QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "max_window_layers": 28,
}  # fmt: skip
LLAMA_4 = {
    "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202048, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_equal_those_of_the_modules_that_transformers_builds(save: Save, name: str) -> None:
    model = load_model(str(save(PUBLISHED[name]["config"])))
    assert num_params(model) == PUBLISHED[name]["num_params"]
    assert model.name == "some-model"


DEFAULTS = {
    name: each["keys"]
    for name, each in defaults().items()
    if name in table()["types"] and not name.endswith("_text") and name != "kimi_k2"
}


@pytest.mark.parametrize("model_type", sorted(DEFAULTS)[::4])
def test_a_missing_key_means_what_it_means_to_transformers(model_type: str) -> None:
    """Keys of older files, and keys that transformers fixes in its code, have no default in transformers."""
    transformers = pytest.importorskip("transformers")
    ours = DEFAULTS[model_type]
    config = json.loads(transformers.CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    assert {key: config.get(key) for key in ours} == ours


def test_a_file_is_read_like_its_folder(save: Save) -> None:
    folder = save(LLAMA)
    assert load_model(str(folder / "config.json")) == load_model(str(folder))


def test_what_the_documents_hold(save: Save) -> None:
    """Values that change no count, from the model cards."""
    gemma = load_model(str(save(PUBLISHED["gemma3-1b"]["config"] | {"sliding_window": 512, "rope_theta": 1e6})))
    assert (gemma.sliding_window, gemma.global_every, gemma.rope_theta) == (512, 6, 1e6)
    deepseek = load_model(str(save(PUBLISHED["deepseek-v3"]["config"] | {"num_nextn_predict_layers": 1})))
    assert deepseek.moe is not None
    assert deepseek.mla is not None
    assert (deepseek.mtp_layers, deepseek.moe.num_dense_layers, deepseek.mla.q_lora_rank) == (1, 3, 1536)
    assert (deepseek.moe.num_groups, deepseek.moe.groups_per_token) == (8, 4)
    gpt_oss = load_model(str(save(PUBLISHED["gpt-oss-20b"]["config"])))
    assert (gpt_oss.sliding_window, gpt_oss.global_every, gpt_oss.attention_sinks) == (128, 2, True)
    falcon = load_model(str(save(PUBLISHED["falcon-7b"]["config"])))
    assert (falcon.num_kv_heads, falcon.norms_per_layer, falcon.parallel_attention) == (1, 1, True)


@pytest.mark.parametrize(
    ("change", "window", "every"),
    [
        ({}, 4096, 0),  # the default of the class: every layer is local
        ({"sliding_window": None}, 0, 1),
        ({"sliding_window": 262144}, 0, 1),  # longer than the sequence
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 16}, 64, 2),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 32}, 64, 0),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 32}, 0, 1),
    ],
)
def test_sliding_windows(save: Save, change: dict[str, Any], window: int, every: int) -> None:
    model = load_model(str(save(PUBLISHED["mistral-7b"]["config"] | change)))
    assert (model.sliding_window, model.global_every) == (window, every)


@pytest.mark.parametrize("written", [["llama"], {"llama": 1}, 3, True])
def test_a_model_type_that_is_no_word_is_refused(save: Save, written: object) -> None:
    """Alone, together with each key that is read with it, and in the part that reads images."""
    outer = LLAMA | {"model_type": written}
    for beside in ({}, {"audio_config": {}}, {"vision_config": {}}):
        assert "model_type" in refusal(save(outer | beside))
    text = {"architectures": ["LlamaForCausalLM"], "text_config": LLAMA, "tie_word_embeddings": True}
    assert load_model(str(save(outer | text))).hidden_size == LLAMA["hidden_size"]  # its own type decides
    tower = {"model_type": written, "hidden_size": 64}
    assert "vision_config" in refusal(save({"model_type": "llava", "text_config": LLAMA, "vision_config": tower}))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_local_attention_in_some_layers_of_qwen_is_refused(save: Save, model_type: str) -> None:
    qwen = QWEN | {"model_type": model_type}
    kinds = ["full_attention"] * 27 + ["sliding_attention"]
    assert "some layers only" in refusal(save(qwen | {"layer_types": kinds}))
    assert "some layers only" in refusal(save(qwen | {"use_sliding_window": True, "max_window_layers": 20}))
    assert load_model(str(save(qwen | {"layer_types": ["full_attention"] * 28}))).sliding_window == 0


@pytest.mark.parametrize(
    ("change", "window", "every"),
    [
        ({}, 8192, 4),
        ({"attention_chunk_size": 4096}, 4096, 4),
        ({"max_position_embeddings": 8192}, 0, 1),
        ({"no_rope_layer_interval": 2}, 8192, 2),
        ({"no_rope_layers": [1, 1, 1, 1, 1, 0] * 8}, 8192, 6),  # 0: no rotary positions, so the layer is global
        ({"no_rope_layers": [1, 0] * 24, "layer_types": ["chunked_attention"] * 48}, 8192, 0),
    ],
)
def test_llama_4_attends_within_chunks(save: Save, change: dict[str, Any], window: int, every: int) -> None:
    model = load_model(str(save(LLAMA_4 | change)))
    assert (model.sliding_window, model.global_every) == (window, every)


def test_global_layers_of_llama_4_at_odd_places_are_refused(save: Save) -> None:
    config = save(LLAMA_4 | {"no_rope_layers": [0] + [1] * 47})
    assert "`layer_types` is no regular pattern" in refusal(config)
    assert "planner models --from" in refusal(config)


def test_an_irregular_pattern_is_refused(save: Save) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    assert "no regular pattern" in refusal(save(PUBLISHED["mistral-7b"]["config"] | {"layer_types": kinds}))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "phi3-mini"])
def test_a_list_of_layers_that_the_module_ignores_is_refused(save: Save, name: str) -> None:
    """Transformers 5.23, modeling_mixtral.py: with a window, every layer has it."""
    config = PUBLISHED[name]["config"] | {"sliding_window": 64, "max_position_embeddings": 4096}
    kinds = ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    assert load_model(str(save(config))).global_every == 0
    assert "this type gives every layer the window" in refusal(save(config | {"layer_types": kinds}))


@pytest.mark.parametrize("written", [3, "full_attention", {}, True])
def test_what_should_be_a_list_is_refused(save: Save, written: Any) -> None:
    assert "must be a list" in refusal(save(PUBLISHED["mistral-7b"]["config"] | {"layer_types": written}))


def test_a_mistake_stands_at_its_line_which_is_shown_alone(save: Save) -> None:
    folder = save(PUBLISHED["mistral-7b"]["config"] | {"num_hidden_layers": -1})
    lines = (folder / "config.json").read_text(encoding="utf-8").splitlines()
    (number,) = [index for index, line in enumerate(lines, start=1) if '"num_hidden_layers"' in line]
    first, quoted, *_ = refusal(folder).splitlines()
    assert f"config.json:{number}:2" in first
    assert quoted.strip() == lines[number - 1].strip()


def test_the_rotary_base_in_both_spellings(save: Save) -> None:
    old = load_model(str(save(LLAMA | {"rope_theta": 500000.0, "rope_scaling": {"factor": 8.0}})))
    new = load_model(str(save(LLAMA | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}})))
    assert old == new
    assert new.rope_theta == 500000.0


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_in_both_spellings(key: str, save: Save) -> None:
    scaling = {"rope_type": "llama3", "factor": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    whole = scaling | {"original_max_position_embeddings": 8192}
    wanted = RotaryScaling(factor=32, low_frequency=1, high_frequency=4, original_max_sequence_length=8192)
    assert load_model(str(save(LLAMA | {key: whole}))).rope_scaling == wanted
    assert "has no `original_max_position_embeddings`" in refusal(save(LLAMA | {key: scaling}))
    assert "is below low_frequency" in refusal(save(LLAMA | {key: whole | {"low_freq_factor": 4.5}}))


def test_another_scaling_is_said_to_be_left_out(save: Save) -> None:
    (note,) = model_notes(str(save(LLAMA | {"rope_scaling": {"type": "yarn", "factor": 40}})))
    assert "`rope_scaling` of type `yarn` is not read" in note


def test_an_unknown_type_says_what_it_lacks_or_which_is_near(save: Save) -> None:
    text = refusal(save({"model_type": "zaya"}))
    assert "config.json:2:2: no table reads model_type `zaya`" in text
    assert "`planner models --from " in text
    assert "did you mean `qwen3_moe`" in refusal(save({"model_type": "qwen3moe"}))
    assert "`model_type` is missing" in refusal(save({"hidden_size": 8}))


@pytest.mark.parametrize(
    "key", ["num_memory_experts", "attn_gate", "moe_layer_pattern", "kv_sharing", "mlp_extra_bias", "extra_layer_norms"]
)
def test_a_key_that_concerns_the_layers_is_never_ignored(save: Save, key: str) -> None:
    text = refusal(save(QWEN3_MOE | {key: 4}))
    assert f"`{key}` concerns the layers and is not read" in text
    assert "num_experts_per_tok" in text  # the keys that are read
    load_model(str(save(QWEN3_MOE | {key: None})))  # says nothing


def test_a_mix_of_dense_and_expert_layers(save: Save) -> None:
    leading = load_model(str(save(QWEN3_MOE | {"mlp_only_layers": [0, 1]})))
    assert leading.moe is not None
    assert leading.moe.num_dense_layers == 2
    assert "may only name the first layers" in refusal(save(QWEN3_MOE | {"mlp_only_layers": [5]}))
    stepped = load_model(str(save(QWEN3_MOE | {"decoder_sparse_step": 2})))
    assert stepped.moe is not None
    assert stepped.moe.layer_frequency == 2


@pytest.mark.parametrize(("leading", "step"), [(0, 1), (3, 1), (0, 2), (1, 2), (2, 2), (3, 2), (2, 3), (4, 3), (7, 3)])
def test_steps_count_from_the_first_layer_even_with_leading_dense_layers(save: Save, leading: int, step: int) -> None:
    """The layers with experts are those of Qwen3MoeDecoderLayer in transformers, modeling_qwen3_moe.py."""
    only = list(range(leading))
    spec = load_model(str(save(QWEN3_MOE | {"mlp_only_layers": only, "decoder_sparse_step": step})))
    theirs = [each not in only and (each + 1) % step == 0 for each in range(spec.num_layers)]
    assert [bool(spec.layer_has_experts(each)) for each in range(spec.num_layers)] == theirs


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("opt-6.7b", {"word_embed_proj_dim": 512}),
        ("opt-6.7b", {"do_layer_norm_before": False}),
        ("deepseek-v3", {"moe_layer_freq": 2}),
        ("qwen2.5-7b", {"use_sliding_window": True, "max_window_layers": 4}),
        ("llama-3.1-8b", {"hidden_act": "relu2"}),
        ("t5-3b", {"num_layers": "24"}),
        ("bert-large", {"add_cross_attention": True}),
    ],
)
def test_variants_that_no_field_holds_are_refused_at_their_line(save: Save, name: str, change: dict[str, Any]) -> None:
    config = change | PUBLISHED[name]["config"] | change
    text = refusal(save(config))
    assert "config.json:2:2: " in text
    assert f'"{next(iter(change))}"' in text


def test_rules_of_the_model_document_point_into_the_file(save: Save) -> None:
    text = refusal(save({"num_key_value_heads": 5} | LLAMA | {"num_key_value_heads": 5}))
    assert "config.json:2:2" in text
    assert '"num_key_value_heads": 5' in text
    assert "does not divide num_heads 32" in text
    text = refusal(save({**LLAMA, "num_hidden_layers": 0.5, "vocab_size": {}}))
    assert "`num_layers` must be a whole number, not `0.5`" in text
    assert "`vocab_size` must be a whole number" in text


def test_every_missing_key_is_named(save: Save) -> None:
    text = refusal(save({"model_type": "llama"}))
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"):
        assert f"`{key}` is missing" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ('{"model_type": "llama", // comment\n}', "not valid JSON"),
        ('{"a": NaN}', "not a finite number"),
        ('{"a": 1, "a": 2}', "`a` is given twice"),
        ("[1]", "expected an object"),
        ("1" * 5000, "too long"),
        ('{"a":' * 50 + "1" + "}" * 50, "nested more than"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than"),
        ('{"a": [' + "1," * 30_000 + "1]}", "more than 20000 values"),
        ('{"a": "' + "x" * 2**20 + '"}', "bytes; a document has at most"),
    ],
)
def test_only_strict_json_of_a_sane_size_is_read(save: Save, text: str, words: str) -> None:
    assert words in refusal(save(text))


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    assert "config.json does not exist" in refusal(tmp_path)


def test_notes_say_what_was_left_out(save: Save) -> None:
    text = LLAMA | {"model_type": "llama"}
    folder = save(
        {
            "model_type": "florence2",
            "architectures": ["LlamaForCausalLM"],
            "auto_map": {"AutoModel": "modeling.Thing"},
            "quantization_config": {"bits": 4},
            "vision_config": {"hidden_size": 9},
            "text_config": text | {"favourite_colour": "blue"},
        }
    )
    notes = " ".join(model_notes(str(folder)))
    for words in ("only text_config is read", "is not run", "precision", "favourite_colour"):
        assert words in notes
    assert num_params(load_model(str(folder))) == PUBLISHED["llama-3.1-8b"]["num_params"]
    assert model_notes("llama3-8b") == ()


def test_the_command_line_takes_a_folder_and_prints_the_notes(save: Save) -> None:
    folder = save(LLAMA | {"num_hidden_layers": 2, "auto_map": {"AutoModel": "x"}})
    arguments = ["dgx-a100", "--gpus", "2", "--global-batch", "8", "--seq-len", "1024", "--layout", "tp=2", "--json"]
    done = CliRunner().invoke(cli, ["explain", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"]["num_layers"] == 2
    assert "note: auto_map names code" in done.stderr


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("Qwen/Qwen2.5-14B", "qwen2.5-14b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),  # not Mistral-7B-v0.1-something
        ("meta-llama/meta-llama-3-8b", "llama3-8b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
    ],
)
def test_a_page_of_the_hub_is_the_shipped_model_of_that_source(page: str, name: str) -> None:
    assert load_model(page) == load_model(name)


def test_a_page_of_the_hub_that_is_not_shipped_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for page in ("mistralai/Mistral-7B-v0", "google-bert/bert-base-uncased"):
        with pytest.raises(InputError, match=r"is no shipped model and no file(\n|.)*config\.json"):
            load_model(page)
    with pytest.raises(InputError, match=r"did you mean `qwen2\.5-1\.5b` or `qwen2\.5-14b`"):
        load_model("Qwen/Qwen2.5-15B")
    assert load_model("https://huggingface.co/Qwen/Qwen2.5-14B/tree/main") == load_model("qwen2.5-14b")
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen2.5-14B").write_text("name: mine")  # a file of the user's goes first
    with pytest.raises(InputError, match="is missing"):
        load_model("Qwen/Qwen2.5-14B")


def test_settings_change_an_imported_model(save: Save) -> None:
    job = load_job(model=str(save(LLAMA)), cluster="dgx-a100", global_batch_size=8, settings=("model.num_layers=4",))
    assert job.model.num_layers == 4


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**12),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(([], {}, [0], ["a"])),
)


RULE_KEYS = [
    "layer_types",
    "mlp_only_layers",
    "moe_layers",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "sliding_window_pattern",
    "n_inner",
    "n_shared_experts",
    "num_decoder_layers",
    "max_window_layers",
    "use_sliding_window",
    "attention_chunk_size",
    "ffn_hidden_size",
    "num_ln_in_parallel_attn",
    "num_kv_heads",
    "decoder_sparse_step",
    "text_config",
    "model_type",
]


@given(st.sampled_from(sorted(PUBLISHED)), st.data())
def test_a_damaged_config_is_a_model_or_an_error_of_the_user(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    config = dict(PUBLISHED[name]["config"])
    for key in data.draw(st.lists(st.sampled_from(sorted({*config, *RULE_KEYS})), max_size=4)):
        config[key] = data.draw(values)
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config))
    with suppress(InputError):  # anything else is a bug
        assert num_params(load_model(str(path))) > 0


def test_a_layer_beside_an_indexer_must_be_one_that_is_known(save: Save) -> None:
    indexer = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
    latent = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    experts = {"moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 99,
    }
    config = {"model_type": "glm_moe_dsa", **sizes, **latent, **experts, **indexer, "first_k_dense_replace": 1}
    kinds = ["indexed_attention", "indexed_attention"]
    assert load_model(str(save(config | {"layer_types": kinds}))).sparse is not None
    assert "linear_attention" in refusal(save(config | {"layer_types": [kinds[0], "linear_attention"]}))
