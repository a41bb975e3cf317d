"""torchtitan: the emitted Python file is run with stand-ins for the program's own modules, and read back."""

# ruff: noqa: ISC004 - files are long texts in a table
from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from tables import unsaid
from torchtitan_expected import CASES, FP8, FP8_OF_ITS_OWN, expected, plan_of, positions, recompute, shape_of

from planner.emit.bundle import bundle_of
from planner.emit.programs import PROGRAMS
from planner.emit.programs.hugging_face import flat
from planner.emit.read import MODEL
from planner.emit.read.facts import facts_of
from planner.emit.read.torchtitan import READER
from planner.emit.target import How
from planner.errors import InputError
from planner.layout_text import parse_layout
from planner.run_arguments import RunArguments
from planner.specs.by_name import load_model
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

TARGETS = ("torchtitan", "torchtitan-0.3")
MEANT = [*CASES, FP8, FP8_OF_ITS_OWN]


class Config(dict):
    """A configuration that remembers its class and its keywords."""

    def __init__(self, name, values):
        super().__init__(values)
        self.name = name


def recording(name):
    kind = SimpleNamespace(Config=lambda **values: Config(f"{name}.Config", values))
    return kind if name[0].isupper() and not name.endswith("Config") else lambda **values: Config(name, values)


def stand_in(monkeypatch, text):
    """Modules with recording classes for all imports of a file, and one layer of each kind in the model."""
    layer = {"RoPE": SimpleNamespace(scaling="yarn"), "RMSNorm": SimpleNamespace()}
    told, made = {}, {}

    def registry(*names, **more):
        told.update(names=names, **more)
        return SimpleNamespace(model=SimpleNamespace(traverse=lambda kind: [("", layer[kind], None, None)]))

    own = ModuleType("planned_model")
    own.model_of = registry
    monkeypatch.setitem(sys.modules, "planned_model", own)
    for line in [line for line in text.splitlines() if line.startswith("from torchtitan")]:
        name, words = line.removeprefix("from ").split(" import ")
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            part = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, part, made.setdefault(part, ModuleType(part)))
        module = made[name]
        for word in words.split(", "):
            setattr(module, word, recording(word))
        for known in (
            {"RoPE": SimpleNamespace(Config="RoPE"), "RMSNorm": SimpleNamespace(Config="RMSNorm")},
            {"model_registry": registry, "DATASETS": defaultdict(dict), "decoder_vocab_size": lambda _: 1},
        ):
            for word in known.keys() & set(words.split(", ")):
                setattr(module, word, known[word])
        if "model_registry" in words:
            told["package"] = parts[-1]
    return told, layer


def text_of(plan, to, **arguments):
    return bundle_of(plan, to, how=How(arguments=RunArguments(**arguments)), force_unfit=True).texts["planned.py"]


def configured(monkeypatch, text):
    told, layer = stand_in(monkeypatch, text)
    space = {"DATASET": "a data set"}  # what is the user's to name
    exec(compile(text, "planned.py", "exec"), space)
    return space["planned"](), told, layer


def found(config):
    """Dotted names and values, without the parts that are compared by class."""
    sections = {key: dict(value) if isinstance(value, Config) else value for key, value in config.items()}
    for key in ("model_spec", "dataloader", "activation_checkpoint"):
        sections.pop(key)
    sections["loss"].pop("loss_fn", None)
    sections["loss"].pop("global_vocab_size", None)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat(sections).items()}


def shape_faults(told, case):
    """Differences between a model's stated sizes and its config.json."""
    kind, wanted = shape_of(case) or (told.get("package"), {})
    sizes = {key: value for key, value in told.items() if key not in ("names", "package", "converters")}
    wrong = {key for key, value in {*map(repr_of, sizes.items())} ^ {*map(repr_of, wanted.items())}}
    return wrong | ({"kind"} if wanted and told["names"] != (kind, case[0]) else set())


def faults(monkeypatch, plan, to, case=None):
    """Differences between a file and the plan, by name."""
    config, told, layer = configured(monkeypatch, text_of(plan, to))
    release = to != "torchtitan"
    wrong = {key for key, value in {*map(repr_of, found(config).items())} ^ {*wanted_of(plan, release)}}
    kind = config["activation_checkpoint"]
    wrong |= {"recompute"} if recompute(plan) != (kind.name if kind is not None else "NoneType") else set()
    places = vars(layer["RoPE"])
    wrong |= {key for key, value in positions(plan, release=release).items() if places.get(key) != value}
    wrong |= {"eps"} if vars(layer["RMSNorm"]) != {"eps": plan.model.norm_epsilon} else set()
    wrong |= shape_faults(told, case) if case else set()
    wrong |= {"converters"} if bool(told.get("converters")) != (plan.training.precision == "fp8") else set()
    return wrong


def repr_of(item):
    return item[0], repr(item[1])


def wanted_of(plan, release):
    return map(repr_of, expected(plan, release=release).items())


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("case", MEANT, ids=lambda case: f"{case[0]}-{case[1]}")
def test_every_value_is_the_plans(case, to, monkeypatch):
    assert faults(monkeypatch, plan_of(case), to, case) == set()


@pytest.mark.parametrize("to", TARGETS)
def test_no_setting_can_be_left_out(to, monkeypatch):
    """Without any one setting, no setting expresses some field, or some file no longer has the expected values."""
    whole, plans = PROGRAMS[to], [plan_of(each) for each in (*(CASES[place] for place in (0, 1, 7, 8)), FP8)]
    assert unsaid(whole) == ()
    for place, setting in enumerate(whole.settings):
        less = replace(whole, settings=whole.settings[:place] + whole.settings[place + 1 :])
        table = "RELEASE" if to == "torchtitan-0.3" else "TARGET"
        monkeypatch.setattr(f"planner.emit.programs.torchtitan.{table}", less)
        written = [plan for plan in plans if setting.write(plan)]
        if not written:
            assert unsaid(less) or not setting.says, setting.says
            continue
        assert any(broken(monkeypatch, plan, to) for plan in written), setting.says


def broken(monkeypatch, plan, to):
    try:
        return faults(monkeypatch, plan, to)
    except (KeyError, InputError):
        return True


def read_back(text, plan):
    values = dict(READER.values(text))
    name = values.pop(MODEL)
    return name, facts_of(READER.target, values, model=plan.model, num_devices=16)


def assert_same(facts, plan, unsaid=()):
    """Check that the facts equal the plan; unsaid: fields of the model that the file does not have."""
    assert facts.not_priced == ()
    layout = ",".join(
        f"{key}={'/'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in facts.of("layout").items()
    )
    assert parse_layout(layout, num_layers=plan.model.num_layers, num_devices=16) == plan.layout
    training = facts.of("training")
    assert training == {key: getattr(plan.training, key) for key in training}
    own = plan.training.model_fields_set - {"tokens", "attention"}
    assert {key for key in own if getattr(plan.training, key) != TrainingSpec.model_fields[key].default} <= set(
        training
    )
    model = ModelSpec(name=plan.model.name, architecture="gpt", **facts.of("model"))
    known = {key: getattr(plan.model, key) for key in ("architecture", *unsaid)}
    assert model.model_copy(update=known) == plan.model


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("case", MEANT, ids=lambda case: f"{case[0]}-{case[1]}")
def test_what_is_emitted_reads_back_as_the_plan(case, to):
    plan = plan_of(case)
    name, facts = read_back(text_of(plan, to), plan)
    assert name == plan.model.name
    assert_same(facts, plan)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(
    ("data", "path"), [(("a.jsonl", "b.jsonl"), "json"), (("hf:allenai/c4",), "allenai/c4"), (("a'.txt",), "text")]
)
def test_data_and_tokenizer_are_filled_in(to, data, path, monkeypatch, tmp_path):
    text = text_of(plan_of(CASES[5]), to, data=data, tokenizer=tmp_path)
    datasets = ModuleType("datasets")
    datasets.load_dataset = print
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    config, _, _ = configured(monkeypatch, text)
    assert config["hf_assets_path"] == str(tmp_path)
    assert f"path={path!r}" in text
    assert all(each.removeprefix("hf:") in text for each in data)
    how = How(arguments=RunArguments(data=data, tokenizer=tmp_path))
    assert not bundle_of(plan_of(CASES[5]), to, how=how, force_unfit=True).still_yours


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (How(smoke=True), "mock data"),
        (How(arguments=RunArguments(data=("a.bin",))), "and not a file that ends in .bin"),
        (How(arguments=RunArguments(data=("corpus",))), "and not a file without an ending"),
        (How(arguments=RunArguments(data=("a.txt", "hf:x"))), "not a file that ends in .txt and 1 data set of the Hub"),
        (How(arguments=RunArguments(data=("hf:x", "hf:y"))), "and not 2 data sets of the Hub"),
    ],
)
def test_data_that_it_has_no_words_for_is_refused(how, words):
    with pytest.raises(InputError, match=words):
        bundle_of(plan_of(CASES[5]), how=how, force_unfit=True)


def test_a_data_set_that_nobody_named_stops_the_program(monkeypatch):
    text = text_of(plan_of(CASES[5]), None)
    stand_in(monkeypatch, text)
    space = {}
    exec(compile(text, "planned.py", "exec"), space)
    with pytest.raises(NameError, match="DATASET"):
        space["planned"]()


@pytest.mark.parametrize(
    ("layout", "model", "settings", "words"),
    [
        ("zero=3", "gpt2-xl", (), "registry"),
        ("zero=3", "olmo2-7b", (), "written without model.qk_norm"),
        ("zero=3", "mixtral-8x7b", ("model.rope_scaling={factor: 4}",), "rope_scaling"),
        ("zero=3", "qwen3-8b", ("model.rope_scaling={factor: 4}",), "rope_scaling"),
        ("pp=2,zero=1", "llama3.2-1b", (), "tied"),
        ("zero=3,hsdp=16", "llama3-8b", (), "one rank"),
        ("zero=3,recompute=every:2", "llama3-8b", (), "recompute"),
        ("zero=3", "llama3-8b", ("training.dropout=0.1",), "training.dropout"),
    ],
)
def test_what_torchtitan_cannot_say_is_refused(layout, model, settings, words):
    with pytest.raises(InputError) as error:
        bundle_of(plan_of((model, layout, settings)), how=How(), force_unfit=True)
    assert any(words in each.message for each in error.value.mistakes)


# --- files of releases up to 0.2 ---------------------------------------------------------------------------------

# pytorch/torchtitan v0.2.2, torchtitan/models/llama3/train_configs/llama3_70b.toml and llama3_405b.toml, retyped; and
# settings of issues, by number
FILES = {
    "llama3_70b": (
        '[job]\ndescription = "x"\n[model]\nname = "llama3"\nflavor = "70B"\n[optimizer]\nname = "AdamW"\nlr = 1.5e-4\n'
        "eps = 1e-8\n[lr_scheduler]\nwarmup_steps = 200\n[training]\nlocal_batch_size = 8\nseq_len = 8192\n"
        'max_norm = 1.0\nsteps = 1000\ndataset = "c4"\n[parallelism]\ndata_parallel_replicate_degree = 1\n'
        "data_parallel_shard_degree = -1\ntensor_parallel_degree = 8\npipeline_parallel_degree = 1\n"
        '[compile]\nenable=false\n[activation_checkpoint]\nmode = "full"\n',
        256,
        "llama3-70b",
        {"tp": 8, "pp": 1, "zero": 3, "hsdp": 1, "mbs": 8, "sp": 1, "recompute": "full", "offload": "none"},
        {"global_batch_size": 256, "sequence_length": 8192, "precision": "bf16", "learning_rate": 1.5e-4},
        (),
    ),
    "llama3_405b": (
        '[model]\nname = "llama3"\nflavor = "405B"\nconverters = ["float8"]\n[optimizer]\nlr = 8e-5\n[training]\n'
        "local_batch_size = 2\nseq_len = 8192\nsteps = 3000\n[parallelism]\ntensor_parallel_degree = 8\n"
        "enable_async_tensor_parallel = true\n[activation_checkpoint]\nmode = 'full'\n[compile]\nenable=true\n"
        'components = ["model", "loss"]\n[quantize.linear.float8]\nfilter_fqns = ["output"]\n',
        512,
        "llama3-405b",
        {"tp": 8, "zero": 3, "mbs": 2, "recompute": "full"},
        {"precision": "fp8", "global_batch_size": 128, "steps": 3000, "warmup_steps": 200},
        ("parallelism.enable_async_tensor_parallel=True", "compile.enable=True"),
    ),
    "pipeline": (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 16\nglobal_batch_size = 64\n'
        "seq_len = 4096\n[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_microbatch_size = 2\n"
        'pipeline_parallel_schedule = "1F1B"\n[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"\n',
        16,
        "llama3-8b",
        # 32 layers and two ends on four stages: 9, 9, 8 and 8, of which the ends take one each
        {"pp": 4, "mbs": 2, "zero": 1, "layers_per_stage": (8, 9, 8, 7), "recompute": "every:2", "schedule": "1f1b"},
        {"global_batch_size": 64},
        (),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_toml_is_read_as_by_hand(name):
    text, num_devices, model, layout, training, not_priced = FILES[name]
    values = dict(READER.values(text))
    assert READER.recognises(text)
    assert values.pop(MODEL) == model
    facts = facts_of(READER.target, values, model=load_model(model), num_devices=num_devices)
    assert {key: value for key, value in facts.of("layout").items() if key in layout} == layout
    assert {key: value for key, value in facts.of("training").items() if key in training} == training
    assert facts.not_priced == not_priced


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[training]\nseq_len = \n", "cannot be read"),
        ("[training]\nseq_len = '$(touch owned)'\n", "the file does not set"),
        ("[training]\na = " + "[" * 5000 + "]" * 5000, "cannot be read"),
        ('{"data_parallel_shard_degree": ' + "[" * 50000, "cannot be read"),
        (
            "from torchtitan import x\n\ndef planned():\n    return __import__('os').system('touch owned')\n",
            "only Python",
        ),
        ("from torchtitan import x\n\ndef planned():\n    " + "(" * 5000 + "\n", "cannot be read"),
        ("[training]\n[activation_checkpoint]\nmode = 'memory_budget'\n", "no price"),
        ("[training]\n[optimizer]\nname = 'Shampoo'\n", "no price"),
    ],
    ids=lambda text: text[:30],
)
def test_hostile_and_foreign_files_are_refused(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert READER.recognises(text)
    with pytest.raises(InputError, match=words):
        facts_of(READER.target, {k: v for k, v in READER.values(text).items() if k != MODEL})
    assert not list(tmp_path.iterdir())
