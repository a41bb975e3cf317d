"""Accelerate, DeepSpeed and the programs built on them: emitted files read back, and files of other authors."""

# ruff: noqa: ISC004 - files are long texts in a table
from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from planner.emit.bundle import bundle_of
from planner.emit.programs import PROGRAMS
from planner.emit.programs.deepspeed import PIPELINE
from planner.emit.programs.hugging_face import TRAIN
from planner.emit.programs.hugging_face_model import config_of
from planner.emit.read import HOSTS, MODEL, RANKS
from planner.emit.read import hugging_face as reader
from planner.emit.read.facts import facts_of
from planner.emit.read.front import read_foreign
from planner.emit.read.options import document_of
from planner.emit.read.readers import READERS
from planner.emit.settings import field_of
from planner.emit.target import How
from planner.errors import InputError
from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.by_name import load_model, model_names, model_source
from planner.specs.huggingface.writing import model_from
from planner.specs.load import load_job
from planner.specs.training import TrainingSpec


def merged(texts: dict[str, str]) -> dict[str, Any]:
    """The keys and values of all files that emit writes for Accelerate or DeepSpeed, read back into one mapping."""
    found: dict[str, Any] = {}
    if "accelerate.yaml" in texts:
        found |= reader._accelerate_values(texts["accelerate.yaml"])
    if "deepspeed.json" in texts:
        found |= reader._deepspeed_values(texts["deepspeed.json"])
    training = document_of(texts["training.yaml"])
    training.pop("deepspeed", None)
    model = reader.flat(document_of(texts["config.json"]), "config.")
    return {**found, **reader._of_trainer(reader.flat(training)), **model}


NUMBERS = tuple(
    f"training.{each}"
    for each in (
        *("learning_rate=1e-4", "min_learning_rate_ratio=0.05", "warmup_steps=200", "steps=1000", "seed=7"),
        *("weight_decay=0.05", "gradient_clip=0.5", "adam_beta1=0.8", "adam_beta2=0.99", "adam_epsilon=1e-6"),
    )
)
LORA = ("training.lora_rank=16", "training.lora_targets=[query,key,value,output]")
FSDP = (
    ("llama3-8b", "tp=2,hsdp=2,zero=3,sp=0,recompute=full", NUMBERS),
    ("llama3-8b", "cp=4,zero=2,mbs=2", ("training.memory_recipe=pure-bf16",)),
    ("llama3-8b", "zero=3,recompute=every:3", ()),
    ("qwen3-30b-a3b", "ep=8,zero=3,recompute=full", ()),
    ("mixtral-8x7b", "ep=4,zero=2", ()),
    ("gpt2-xl", "zero=2,recompute=full:7", ("training.dropout=0.1",)),
    ("qwen2.5-7b", "zero=3,offload=optimizer", ("training.loss=fused-linear", "training.attention=unfused")),
    ("qwen3-30b-a3b", "zero=3,recompute=full", ("training.loss=fused", "training.optimizer=adamw-8bit")),
    ("deepseek-v2-lite", "zero=3,recompute=full", ()),
    ("gpt2-xl", "zero=2", ("training.dropout=0.1", "training.precision=fp16")),
    ("llama2-7b", "zero=3", (*LORA, "training.frozen_weights=nf4")),
)
ZERO = (
    ("llama3-8b", "tp=2,zero=1,sp=0,recompute=full", NUMBERS),
    ("llama3-8b", "cp=2,zero=3,offload=both,recompute=full,mbs=2", ()),
    ("mistral-7b", "zero=0", ("training.precision=fp32",)),
    ("llama3-8b", "zero=2,offload=optimizer", ("training.memory_recipe=pure-bf16",)),
    ("llama3-8b", "zero=3", LORA),
    ("llama3-8b", "zero=3,recompute=full", ("training.mlp_tiles=8",)),
    ("llama3-8b", "pp=4,zero=1,recompute=full,mbs=2,layers_per_stage=9/8/8/7", NUMBERS),
    ("gpt2-xl", "pp=2,zero=1", ("training.dropout=0.1",)),
    ("llama3-8b", "pp=4,zero=1,recompute=full:3,layers_per_stage=9/8/8/7", ()),
    ("qwen2.5-7b", "zero=2,recompute=full:12", LORA),
    ("qwen3-30b-a3b", "pp=2,zero=0", ("training.precision=fp16", "training.attention=unfused")),
)
CASES = [*(("fsdp", *each) for each in FSDP), *(("deepspeed", *each) for each in ZERO)]


def plan_of(case):
    engine, model, layout, settings = case
    precision = next((each.partition("=")[2] for each in settings if each.startswith("training.precision=")), "bf16")
    rest = [each for each in settings if not each.startswith("training.precision=")]
    job = load_job(
        model=model,
        cluster="dgx-h100",
        nodes=2,
        engine=engine,
        global_batch_size=64,
        sequence_length=1024,
        precision=precision,
        settings=rest,
    )
    return plan_for_layout(job, parse_layout(layout, num_layers=job.model.num_layers, num_devices=16))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_what_is_emitted_reads_back_as_the_plan(case):
    plan = plan_of(case)
    texts = bundle_of(plan, how=How(), force_unfit=True).texts
    for name in ("train.py", "pipeline.py"):
        compile(texts.get(name, ""), name, "exec")
    assert ("pipeline.py" in texts) == (plan.layout.pp > 1)
    assert ("pipeline.py training.yaml" in texts["run.sh"]) == (plan.layout.pp > 1)
    values = {key: value for key, value in merged(texts).items() if key not in (HOSTS, RANKS, MODEL)}
    facts = facts_of(PROGRAMS[plan.engine.emits[0]], values, num_devices=16)
    assert facts.not_priced == ()
    written = {
        key: "/".join(map(str, value)) if isinstance(value, tuple) else value
        for key, value in facts.of("layout").items()
    }
    layout = ",".join(f"{key}={value}" for key, value in written.items())
    assert parse_layout(layout, num_layers=plan.model.num_layers, num_devices=16) == plan.layout
    fields = {key: value for key, value in facts.fields.items() if not key.startswith("layout.")}
    assert fields == {key: field_of(plan, key) for key in fields}
    own = {f"training.{name}" for name in plan.training.model_fields_set} - {"training.tokens"}
    assert {key for key in own if field_of(plan, key) != TrainingSpec.model_fields[key[9:]].default} <= set(fields)
    assert {"training.precision", "training.dropout", "model.num_layers"} <= set(fields)


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_adapters_on_every_linear_layer_are_a_word(engine):
    """PEFT, tuners/tuners_utils.py (_maybe_include_all_linear_layers) knows it as text; in a list it is a module."""
    settings = ("training.lora_rank=16", "training.lora_targets=[all-linear]")
    texts = bundle_of(plan_of((engine, "llama3-8b", "zero=3", settings)), how=How(), force_unfit=True).texts
    assert merged(texts)["lora_target_modules"] == "all-linear"


SIZES = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 5}


@pytest.mark.parametrize(("policy", "again"), [("full:2", 2), ("every:2", 2), ("every:5", 1), ("full:9", 5)])
@pytest.mark.parametrize(
    "config",
    [{"model_type": "llama", "intermediate_size": 56, **SIZES}, {"model_type": "gpt2", "n_inner": 56, **SIZES}],
    ids=["llama", "gpt2"],
)
def test_the_emitted_program_recomputes_some_layers(config, policy, again, tmp_path, monkeypatch):
    """Loss and gradients equal those without recompute; recomputed layers keep no inner tensor."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    program: dict[str, Any] = {"__name__": "train"}
    exec(TRAIN.replace("from datasets import", "# from datasets import"), program)

    def step(settings):
        torch.manual_seed(1)
        model, _ = program["model_of"]({"dtype": "float32", "attn_implementation": "eager", **settings})
        tokens, inner = torch.arange(2 * 48).reshape(2, 48) % 96, []

        def keep(tensor):
            inner.extend([tensor.numel()] if tensor.shape[-1:] == (56,) and tensor.numel() == 2 * 48 * 56 else [])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model.eval()(input_ids=tokens, labels=tokens).loss
        kept = len(inner)
        loss.backward()
        return loss, [each.grad for each in model.parameters()], kept

    (loss, grads, kept), (same, again_grads, fewer) = step({}), step({"recompute": policy})
    assert torch.equal(loss, same)
    torch.testing.assert_close(again_grads, grads)
    assert fewer * 5 == kept * (5 - again) < 5 * kept


def test_the_program_of_pipelines_calls_functions_as_they_are():
    """Python binds the calls of `pipeline.py` to the functions of `train.py`: short tests have no DeepSpeed."""
    bare = [each for each in ast.parse(TRAIN).body if isinstance(each, ast.FunctionDef)]
    for each in bare:
        each.body = ast.parse("pass").body
    functions: dict[str, Any] = {}
    exec(compile(ast.Module(bare, []), "train.py", "exec"), functions)
    nodes = list(ast.walk(ast.parse(PIPELINE)))
    imports = [each for each in nodes if isinstance(each, ast.ImportFrom) and each.module == "train"]
    taken = {name.name for each in imports for name in each.names}
    calls = [each for each in nodes if isinstance(each, ast.Call) and getattr(each.func, "id", "") in taken]
    assert {each.func.id for each in calls} < taken <= {*functions}  # recomputed is handed on, not called
    for each in calls:
        inspect.signature(functions[each.func.id]).bind(*each.args, **{word.arg: word for word in each.keywords})


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4},
        {"model_type": "gemma3_text", "intermediate_size": 56, "num_key_value_heads": 2, "head_dim": 8, **SIZES},
        {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64, **SIZES},
    ],
    ids=lambda config: config["model_type"],
)
def test_the_emitted_program_finds_the_layers_of_other_models(config, tmp_path, monkeypatch):
    """Blocks that FSDP keeps whole are not always the layers: a block of mamba holds another such block."""
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    program: dict[str, Any] = {"__name__": "train"}
    exec(TRAIN.replace("from datasets import", "# from datasets import"), program)
    found = []
    program["recompute_some"] = lambda layers, policy, _: found.append((layers, policy))
    model, _ = program["model_of"]({"dtype": "float32", "attn_implementation": "eager", "recompute": "full:2"})
    ((layers, policy),) = found
    assert (len(layers), policy) == (config["num_hidden_layers"], "full:2")
    inside = sum(each.numel() for each in layers.parameters())
    outside = {
        name.split(".")[-2]
        for name, each in model.named_parameters()
        if id(each) not in set(map(id, layers.parameters()))
    }
    assert inside > 0
    assert outside <= {"embeddings", "embed_tokens", "embed_positions", "norm_f", "norm", "final_layer_norm", "lm_head"}
    assert all(isinstance(each, torch.nn.Module) for each in layers)


@pytest.fixture
def emitted(tmp_path, monkeypatch):
    """The emitted train.py as a module, in a folder with the other emitted files of a small model."""
    pytest.importorskip("transformers")
    plan = plan_of(("fsdp", "llama3-8b", "zero=3", ("training.seed=7",)))
    config = {"model_type": "llama", "intermediate_size": 56, **SIZES}
    for name, text in bundle_of(plan, how=How(smoke=True), force_unfit=True).texts.items():
        (tmp_path / name).write_text(json.dumps(config) if name == "config.json" else text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    program: dict[str, Any] = {"__name__": "train"}
    source = (tmp_path / "train.py").read_text(encoding="utf-8")
    exec(source.replace("from datasets import", "# from datasets import"), program)
    return program


def test_two_runs_of_a_plan_start_at_the_same_weights(emitted, monkeypatch):
    """The weights are those that torch draws with the plan's seed, and not with another seed."""
    torch = pytest.importorskip("torch")
    begun = []
    emitted["Trainer"] = lambda model, **_: begun.append(model.state_dict()) or SimpleNamespace(train=lambda: None)
    emitted["TrainingArguments"] = lambda **_: None
    emitted["data_of"] = lambda settings, vocabulary: ()  # noqa: ARG005 - as train.py calls it
    for draws, seed in ((0, 7), (5, 7), (0, 8)):
        torch.rand(draws)  # whatever the process drew before
        monkeypatch.setattr("sys.argv", ["train.py", "training.yaml", f"seed={seed}"])
        emitted["main"]()
    first, second, other = begun
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    torch.manual_seed(7)
    alone, _ = emitted["model_of"]({"dtype": "float32", "attn_implementation": "eager"})
    assert all(torch.equal(first[name], each) for name, each in alone.state_dict().items())


def test_the_trainer_divides_a_loss_by_the_labels_that_it_has(emitted):
    """It counts one label fewer in each row where `loss_type` says so, which the class of GPT-2 leaves open."""
    losses = pytest.importorskip("transformers.loss.loss_utils")
    Path("config.json").write_text(json.dumps({"model_type": "gpt2", "n_inner": 56, **SIZES}), encoding="utf-8")
    model, _ = emitted["model_of"]({"dtype": "float32", "attn_implementation": "eager"})
    assert losses.LOSS_MAPPING[model.loss_type] is losses.ForCausalLMLoss


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("save_strategy=no", "no"),
        ("eval_strategy=no", "no"),
        ("run_name=2024-11-25", "2024-11-25"),
        ("output_dir=007", "007"),
        ("report_to=none", "none"),
        ("dtype=on", "on"),
        ("tokenizer=123", "123"),
        ("hub_revision=1e3", "1e3"),
        ("learning_rate=1e-4", 1e-4),
        ("save_steps=1_000", 1000),
        ("max_steps=20", 20),
        ("bf16=no", False),
        ("gradient_checkpointing=true", True),
        ("hub_token=null", None),
        ("lr_scheduler_kwargs={min_lr_rate: 0.2}", {"min_lr_rate": 0.2}),
        ("report_to=[tensorboard, wandb]", ["tensorboard", "wandb"]),
        ("data=[a.txt, b.txt]", ["a.txt", "b.txt"]),
        ("run_name=a=b", "a=b"),
    ],
)
def test_a_change_on_the_command_line_has_the_type_of_its_setting(emitted, change, value):
    """The types are those that transformers documents: `save_strategy` is one of `no`, `steps`, `epoch` and `best`."""
    found = emitted["read"]("training.yaml", [change])[change.partition("=")[0]]
    assert (type(found), found) == (type(value), value)


def test_models_are_those_of_transformers():
    """Models without a config.json are encoders, encoder-decoders, or have blocks of no plain class of transformers.

    A model that was made from a page's own config.json is loaded from this page.
    """
    pages = json.loads((Path(__file__).parents[1] / "published" / "hub_configs.json").read_text())["checkpoints"]
    made = {name for name in model_names() for page in pages if f"huggingface.co/{page} (" in model_source(name)}
    without = {name for name in model_names() if config_of(load_model(name)) is None} - made
    kinds = ("bert", "t5", "vit", "palm", "grok", "nemotron", "llama4", "falcon")
    assert {name for name in without if not name.startswith(kinds)} == set()
    kinds = {name: config_of(load_model(name))["model_type"] for name in ("deepseek-v2", "deepseek-v2-lite", "kimi-k2")}
    assert kinds == {"deepseek-v2": "deepseek_v2", "deepseek-v2-lite": "deepseek_v2", "kimi-k2": "deepseek_v3"}
    config = config_of(load_model("deepseek-v3"))
    assert (config["model_type"], config["n_routed_experts"], config["q_lora_rank"]) == ("deepseek_v3", 256, 1536)
    assert model_from(config, "deepseek-v3") == load_model("deepseek-v3")


@pytest.mark.parametrize(
    ("engine", "layout", "settings", "words"),
    [
        ("fsdp", "zero=3,offload=both,recompute=full", (), "offload"),
        ("fsdp", "zero=3", ("training.optimizer=muon",), "optimizer"),
        ("fsdp", "zero=3", ("training.loss=chunked",), "chunks"),
        ("fsdp", "zero=3", ("training.dropout=0.1",), "dropout"),
        ("deepspeed", "tp=2,pp=2,zero=1,sp=0", (), "layout.tp is 2"),
        ("deepspeed", "pp=2,zero=0", (), "zero=1"),
        ("deepspeed", "pp=2,zero=1,offload=activations,recompute=full", (), "offload=none"),
        ("deepspeed", "pp=2,zero=1", LORA, "lora_rank=0"),
        ("deepspeed", "pp=2,zero=1", ("training.loss=fused",), "loss=engine"),
        ("deepspeed", "pp=2,zero=1", ("training.memory_recipe=pure-bf16",), "memory_recipe=engine"),
        ("deepspeed", "pp=2,zero=1", ("training.mlp_tiles=4",), "mlp_tiles=1"),
        ("deepspeed", "tp=2,zero=1,sp=1", (), "sp"),
    ],
)
def test_what_the_trainer_cannot_say_is_refused(engine, layout, settings, words):
    with pytest.raises(InputError) as error:
        bundle_of(plan_of((engine, "llama3-8b", layout, settings)), how=How(), force_unfit=True)
    found = error.value.mistakes[0]
    assert words in f"{found.message} {found.hint}"


def test_attention_is_one_that_the_model_has():
    """Capped scores and sinks need special kernels; transformers has no kernel for ALiBi."""
    flash = {}
    for model in ("llama3-8b", "gpt-oss-20b"):
        texts = bundle_of(plan_of(("fsdp", model, "zero=3", ())), how=How(), force_unfit=True).texts
        flash[model] = yaml.safe_load(texts["training.yaml"])["attn_implementation"]
    assert flash == {"llama3-8b": "sdpa", "gpt-oss-20b": "kernels-community/vllm-flash-attn3"}
    with pytest.raises(InputError, match="which bloom has not"):
        bundle_of(plan_of(("fsdp", "bloom-7b", "zero=3", ())), how=How(), force_unfit=True)
    assert bundle_of(
        plan_of(("fsdp", "bloom-7b", "zero=3", ("training.attention=unfused",))), how=How(), force_unfit=True
    )


@pytest.mark.parametrize("case", [CASES[0], CASES[len(FSDP)]], ids=str)
def test_starters_ask_for_the_plans_hosts(case):
    plan = plan_of(case)
    job = yaml.safe_load(bundle_of(plan, on="kubeflow", how=How(), force_unfit=True).texts["trainjob.yaml"])
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert set(job["spec"]) == {"runtimeRef", "trainer"}
    task = yaml.safe_load(bundle_of(plan, on="skypilot", how=How(), force_unfit=True).texts["task.yaml"])
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "H100:8", "network_tier": "best"})


def test_deepspeeds_batches_multiply_to_the_whole():
    """The whole is left out where transformers and Accelerate count ranks that share a batch (runs of 0.19.8)."""
    for case in ZERO:
        plan = plan_of(("deepspeed", *case))
        document = json.loads(bundle_of(plan, how=How(), force_unfit=True).texts["deepspeed.json"])
        each = document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"]
        shares = plan.layout.tp * plan.layout.cp > 1
        assert document.get("train_batch_size") == (None if shares else each * plan.layout.dp)
        assert each * plan.layout.dp == 64


NAMED = {
    "examples/deepspeed/ds_z3_config.json": '{"zero_optimization": {"stage": 3}}',
    "examples/deepspeed/ds_z3_offload_config.json": '{"zero_optimization": {"stage": 3, "offload_optimizer": '
    '{"device": "cpu"}, "offload_param": {"device": "cpu"}}}',
}


def facts_in(text, num_devices):
    reader = next(each for each in READERS if each.recognises(text))
    values = dict(reader.values(text))
    if name := values.pop("deepspeed", None):
        values |= reader.files["deepspeed"](NAMED[name])
    values = dict(reader.complete(values))
    hosts, ranks, model = (values.pop(key, None) for key in (HOSTS, RANKS, MODEL))
    spec = load_model("llama3-8b")
    facts = facts_of(reader.target, values, model=spec, num_devices=num_devices or int(hosts or 1) * int(ranks or 0))
    return reader.name, reader.engine(values), model, facts


FACTORY = (
    "model_name_or_path: {model}\nstage: sft\nfinetuning_type: {kind}\ncutoff_len: {length}\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: {steps}\nlearning_rate: {rate}\n{more}\n"
)
FILES = {
    # hiyouga/LlamaFactory issue 5977, 8 RTX 3090: ran out of memory; with ds_z3_offload_config.json it ran
    "LlamaFactory-5977": (
        FACTORY.format(
            model="Meta-Llama-3-8B-Instruct",
            kind="full",
            length=1024,
            steps=2,
            rate="1.0e-5",
            more="deepspeed: examples/deepspeed/ds_z3_config.json\nfp16: true",
        ),
        8,
        "deepspeed",
        {"zero": 3, "recompute": "full", "mbs": 1, "offload": "none"},
        {"sequence_length": 1024, "global_batch_size": 16, "precision": "fp16"},
    ),
    "LlamaFactory-5977-offload": (
        FACTORY.format(
            model="Meta-Llama-3-8B-Instruct",
            kind="full",
            length=1024,
            steps=2,
            rate="1.0e-5",
            more="deepspeed: examples/deepspeed/ds_z3_offload_config.json\nfp16: true",
        ),
        8,
        "deepspeed",
        {"zero": 3, "recompute": "full", "mbs": 1, "offload": "params+states"},
        {"sequence_length": 1024, "global_batch_size": 16, "precision": "fp16"},
    ),
    # hiyouga/LLaMA-Factory examples/train_full/llama3_full_sft.yaml
    "LLaMA-Factory-full": (
        FACTORY.format(
            model="meta-llama/Meta-Llama-3-8B-Instruct",
            kind="full",
            length=2048,
            steps=2,
            rate="1.0e-5",
            more="deepspeed: examples/deepspeed/ds_z3_config.json\nbf16: true",
        ),
        8,
        "deepspeed",
        {"zero": 3, "recompute": "full", "mbs": 1},
        {"sequence_length": 2048, "global_batch_size": 16, "precision": "bf16", "learning_rate": 1e-5},
    ),
    # hiyouga/LlamaFactory issue 3914, two A6000
    "LlamaFactory-3914": (
        FACTORY.format(
            model="Meta-Llama-3-8B-Instruct",
            kind="lora",
            length=1024,
            steps=1,
            rate="0.0001",
            more="lora_target: q_proj,v_proj\nfp16: true",
        ),
        2,
        "deepspeed",
        {"zero": 0, "recompute": "full", "mbs": 1},
        {"lora_rank": 8, "lora_targets": ("query", "value"), "precision": "fp16", "global_batch_size": 2},
    ),
    # axolotl-ai-cloud/axolotl examples/llama-3/fft-8b.yaml
    "axolotl-fft-8b": (
        "base_model: meta-llama/Meta-Llama-3-8B\nload_in_4bit: false\nsequence_len: 8192\nsample_packing: true\n"
        "gradient_accumulation_steps: 8\nmicro_batch_size: 1\noptimizer: paged_adamw_8bit\nlearning_rate: 2e-5\n"
        "bf16: auto\ngradient_checkpointing: true\nflash_attention: true\nwarmup_steps: 100\nweight_decay: 0.0\n",
        1,
        "deepspeed",
        {"zero": 0, "recompute": "full", "mbs": 1},
        {"optimizer": "adamw-8bit", "sequence_length": 8192, "global_batch_size": 8, "precision": "bf16"},
    ),
    # axolotl-ai-cloud/axolotl examples/llama-3/qlora-fsdp-70b.yaml
    "axolotl-qlora-70b": (
        "base_model: casperhansen/llama-3-70b-fp16\nload_in_4bit: true\nadapter: qlora\nsequence_len: 512\nlora_r: 8\n"
        "lora_alpha: 16\nlora_dropout: 0.05\nlora_target_linear: true\ngradient_accumulation_steps: 4\n"
        "micro_batch_size: 1\noptimizer: adamw_torch\nlearning_rate: 0.00001\nbf16: auto\n"
        "gradient_checkpointing: true\nflash_attention: true\n"
        "fsdp:\n  - full_shard\n  - auto_wrap\nfsdp_config:\n  fsdp_offload_params: true\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n",
        2,
        "fsdp",
        {"zero": 3, "offload": "optimizer", "recompute": "full"},
        {"lora_rank": 8, "frozen_weights": "nf4", "sequence_length": 512, "global_batch_size": 8},
    ),
    # huggingface/trl examples/accelerate_configs/fsdp2.yaml
    "trl-fsdp2": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_activation_checkpointing: false\n  fsdp_offload_params: false\n  fsdp_reshard_after_forward: true\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n",
        0,
        "fsdp",
        {"zero": 3, "recompute": "none", "offload": "none", "hsdp": 1},
        {"precision": "bf16"},
    ),
    # hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_offload_config.json
    "ds-z3-offload": (
        '{"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, '
        '"offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu"}, '
        '"sub_group_size": 1e9}}',
        8,
        "deepspeed",
        {"zero": 3, "offload": "params+states"},
        {},
    ),
    # lm-sys/FastChat issue 3310, four A100: ran out of memory
    "FastChat-3310": (
        (
            "# four A100\n"
            "torchrun --nproc_per_node=4 train.py --model_name_or_path meta-llama/Meta-Llama-3-8B-Instruct --bf16 True "
            '--per_device_train_batch_size 1 --gradient_accumulation_steps 1 --learning_rate 1e-5 --fsdp "full_shard '
            'auto_wrap" --model_max_length 4096 --gradient_checkpointing True\n'
        ),
        0,
        "fsdp",
        {"zero": 3, "recompute": "full", "mbs": 1, "offload": "none"},
        {"sequence_length": 4096, "global_batch_size": 4, "precision": "bf16"},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_others_are_read_as_by_hand(name):
    text, num_devices, engine, layout, training = FILES[name]
    _, found, _, facts = facts_in(text, num_devices)
    assert found == engine
    assert {key: value for key, value in facts.of("layout").items() if key in layout} == layout
    assert {key: value for key, value in facts.of("training").items() if key in training} == training


def test_keys_without_a_price_are_listed():
    text = FILES["axolotl-fft-8b"][0] + "unfrozen_parameters: 3\n"
    assert "unfrozen_parameters=3" in facts_in(text, 1)[3].not_priced


@pytest.mark.parametrize(
    "text",
    [
        "base_model: &a [x]\nmicro_batch_size: 1\nb: [*a, *a]\n",
        "base_model: x\nmicro_batch_size: \x001\n",
        "base_model: x\nmicro_batch_size: $(touch owned)\n",
        "base_model: x\nmicro_batch_size: 1\nd: " + "[" * 5000 + "]" * 5000 + "\n",
        "base_model: x\nmicro_batch_size: 1" + "0" * 5000 + "\n",
    ],
)
def test_hostile_files_are_refused(text):
    with pytest.raises(InputError):
        facts_in(text, 1)


@pytest.mark.parametrize("key", ["max_steps", "warmup_steps", "seed"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "many", "[]"])
def test_a_number_that_is_none_is_told(key: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(f'{{"per_device_train_batch_size": 2, "bf16": true, "fsdp": "full_shard", "{key}": "{value}"}}')
    with pytest.raises(InputError, match="is no"):
        read_foreign(path, model="tiny-gpt")


def test_values_of_the_wrong_kind_are_told() -> None:
    wrong = {"accelerate": {"config.model_type": "llama", "config.attention_dropout": "much"}}
    wrong["torchtitan"] = {"optimizer.betas": 3}
    for name, values in wrong.items():
        with pytest.raises(InputError, match="number"):
            facts_of(PROGRAMS[name], values)


@pytest.mark.parametrize("name", ["\\u202e.json", "[1]", "\\0", "a" * 5000 + ".json", "../x.json", "."])
def test_a_file_that_is_not_there_is_asked_for_whatever_its_name_is(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    quoted = name if name == "[1]" else f'"{name}"'
    path.write_text(f"model_name_or_path: x\ncutoff_len: 4096\nbf16: true\ndeepspeed: {quoted}\n")
    with pytest.raises(InputError, match=r"deepspeed names .*, which is neither") as error:
        read_foreign(path, model="tiny-gpt")
    (mistake,) = error.value.mistakes
    assert (mistake.where, mistake.message.isprintable()) == (f"{path}:4", True)
    assert "--from" in mistake.hint


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_the_gates_of_qwen3_add_up_to_one(name):
    """ISEEKYAN/mbridge, mbridge/models/qwen3moe.py: softmax over the chosen experts (moe_router_pre_softmax=False)."""
    assert config_of(load_model(name))["norm_topk_prob"] is True


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3-8b", {"sliding_window": 128, "global_every": 2}),  # modeling_mistral.py windows every layer
        ("mixtral-8x7b", {"sliding_window": 128, "global_every": 2}),
        ("phi3-mini", {"global_every": 2}),
        # Qwen's steps count from the first layer of the model, so that experts in layers 2, 4, 6 cannot be written
        ("qwen3-30b-a3b", {"moe.num_dense_layers": 1, "moe.layer_frequency": 2}),
    ],
)
def test_what_the_classes_of_transformers_compute_otherwise_is_not_written(name, change):
    spec = load_model(name)
    of_experts = {key.removeprefix("moe."): value for key, value in change.items() if key.startswith("moe.")}
    changed = change if not of_experts else {"moe": spec.moe.model_copy(update=of_experts)}
    assert config_of(spec) is not None
    assert config_of(spec.model_copy(update=changed)) is None


def test_every_nth_layer_has_experts_behind_a_multiple_of_n_dense_layers():
    spec = load_model("qwen3-30b-a3b")
    steps = spec.moe.model_copy(update={"num_dense_layers": 2, "layer_frequency": 2})
    config = config_of(spec.model_copy(update={"moe": steps}))
    assert (config["decoder_sparse_step"], config["mlp_only_layers"]) == (2, [0, 1])
