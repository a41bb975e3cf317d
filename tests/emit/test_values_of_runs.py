"""Files of other programs, read, planned and emitted again: weights, learning rate, schedule, length and seed stay.

What the emitted file means is asked of the programs: transformers' own parser, and Megatron-LM's recorded parser.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_megatron import RECORDED, namespace_of

from planner.answers.what_if import fastest_seconds
from planner.api import estimate_file, plan_file
from planner.emit.bundle import bundle_of, not_carried
from planner.emit.programs import PROGRAMS
from planner.emit.programs.hugging_face import TRAIN
from planner.emit.read.front import read_foreign
from planner.emit.target import How, values_of
from planner.launch import launch
from planner.plan import write_plan
from planner.run_arguments import RunArguments
from planner.search.reporter import Reporter

RUN = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"),
    *("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "seed"),
)
FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
finetuning_type: full
deepspeed: ds_z3_config.json
template: qwen
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
TRAINER = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
deepspeed: zero3.json
per_device_train_batch_size: 1
model_max_length: 4096
bf16: true
"""
TRL = "torchrun --nproc_per_node 8 sft.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --deepspeed zero3.json \\\n"
TRL += "  --per_device_train_batch_size 1 --max_length 4096 --bf16 true"
MEGATRON = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 \\
  --seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000 --micro-batch-size 1 \\
  --global-batch-size 32 --bf16 --attention-dropout 0 --hidden-dropout 0 """


@pytest.fixture
def planned(tmp_path):
    """A function from a text to the plan of its own layout; the DeepSpeed files that the texts name lie beside it."""
    for name in ("zero3.json", "ds_z3_config.json"):
        (tmp_path / name).write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')

    def plan(text: str, name: str = "run.yaml", **more: Any):
        (tmp_path / name).write_text(text)
        return estimate_file(tmp_path / name, "dgx-h100", gpus=8, **more)

    return plan


def made(plan, how: How | None = None, to: str | None = None):
    return bundle_of(plan, to, how=how or How(), force_unfit=True)


def settings_of(plan, how: How | None = None) -> dict[str, Any]:
    """The settings in the file of the Trainer, or in that of LLaMA-Factory, which has the same names for them."""
    texts = made(plan, how).texts
    return yaml.safe_load(texts.get("training.yaml") or texts["llama_factory.yaml"])


def understood(settings: dict[str, Any]) -> dict[str, Any]:
    """The values of the run as transformers' own parser reads them, with its own defaults."""
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    words = [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"
             for key, value in settings.items() if key in RUN]  # fmt: skip
    found = vars(parser.parse_args([*words, "--output_dir=run"]))
    return {key: found[key] for key in RUN}


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        (FACTORY, {"learning_rate": 1e-5, "lr_scheduler_type": "cosine", "num_train_epochs": 2.5}),
        (FACTORY, {"weight_decay": 0.03}),
        (TRAINER, {"learning_rate": 3e-6, "lr_scheduler_type": "polynomial", "max_steps": 1234, "warmup_steps": 77}),
        (TRAINER, {"adam_beta1": 0.85, "adam_beta2": 0.98, "adam_epsilon": 1e-7, "max_grad_norm": 0.3, "seed": 0}),
        (TRAINER, {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.25, "seed": 7}),
        (
            TRAINER,
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
        ),
    ],
)  # fmt: skip
def test_the_trainer_is_told_what_its_file_says(text, stated, planned):
    """Every value of the run, stated or left out, is what the Trainer would read from the file itself."""
    settings = settings_of(planned(text + yaml.safe_dump(stated)))
    assert understood(settings) == understood(stated)
    assert settings["model_name_or_path" if text == FACTORY else "weights"] == "Qwen/Qwen2.5-7B-Instruct"


def test_a_file_that_states_nothing_runs_with_the_trainers_defaults(planned):
    for text in (FACTORY, TRAINER):
        assert understood(settings_of(planned(text))) == understood({})
    own = understood({}) | {"learning_rate": 2e-5}  # trl, SFTConfig
    assert understood(settings_of(planned(TRL, "run.sh"))) == own


def test_a_command_line_is_read_like_a_file(planned):
    stated = {"learning_rate": 2e-6, "lr_scheduler_type": "cosine", "weight_decay": 0.2, "num_train_epochs": 1.0}
    words = " ".join(f"--{key} {value}" for key, value in stated.items())
    settings = settings_of(planned(f"{TRL} {words} --warmup_ratio 0.05", "run.sh"))
    assert understood(settings) == understood(stated | {"warmup_steps": 0.05})


def test_a_minimum_rate_a_constant_rate_and_no_clipping(planned):
    """transformers, optimization.py: min_lr is a rate, `constant` has no warm-up; Trainer: 0 clips nothing."""
    least = {"learning_rate": 1e-4, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}
    found = planned(TRAINER + yaml.safe_dump(least)).training
    assert found.min_learning_rate_ratio == pytest.approx(0.1)
    flat = planned(f"{TRAINER}lr_scheduler_type: constant\nwarmup_steps: 50\nmax_grad_norm: 0\n").training
    assert (flat.schedule, flat.warmup_steps, flat.warmup_ratio) == ("constant", 0, 0)
    assert flat.gradient_clip > 1e6


TUNE = (
    "--lr 2e-5 --min-lr 2e-6 --lr-decay-style linear --lr-warmup-fraction 0.05 --train-iters 500 --weight-decay 0.02 "
    "--adam-beta1 0.8 --adam-beta2 0.97 --adam-eps 1e-7 --clip-grad 0.5 --seed 99 --finetune --load '/ckpt/my model'"
)


@pytest.mark.parametrize(
    "stated",
    [
        TUNE,
        "--lr 1e-4 --train-iters 300",
        "--lr 1e-4 --train-iters 300 --lr-decay-style constant --lr-warmup-iters 20 --weight-decay 0",
        "--lr 1e-4 --train-iters 300 --lr-decay-style inverse-square-root --pretrained-checkpoint /base",
    ],
)
def test_megatron_is_told_what_its_script_says(stated, planned):
    """Both command lines, read by the recorded parser of Megatron-LM; a decay ends with the last step by default."""
    plan = planned(MEGATRON + stated, "run.sh")
    said = namespace_of(shlex.split(stated))
    words = [word for option in PROGRAMS["megatron"].settings for pair in option.write(plan).items() for word in pair]
    written = dict(zip(words[::2], words[1::2], strict=True))
    found = namespace_of(
        [word for key, value in written.items() if f"--{key.replace('_', '-')}" in RECORDED and value is not True
         for word in (f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,)))]
    )  # fmt: skip
    keys = ("lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction", "train_iters", "weight_decay")
    for key in (*keys, "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "seed"):
        assert found[key] == pytest.approx(said[key]), key
    assert found["lr_decay_iters"] == said["train_iters"]
    start = said["pretrained_checkpoint"] or (said["load"] if said["finetune"] else None)
    assert found["pretrained_checkpoint"] == start
    script = made(plan).texts["run.sh"]
    assert ("--pretrained-checkpoint" in script) == (start is not None)
    assert "--pretrained-checkpoint" not in made(plan, How(smoke=True)).texts["run.sh"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (TRAINER.replace("model_name_or_path: Qwen/Qwen2.5-7B-Instruct\n", ""), "run.yaml"),
        (TRL.replace("Qwen/Qwen2.5-7B-Instruct", "$BASE"), "run.sh"),
        (f"{MEGATRON} --lr 1e-4 --train-iters 9 --finetune --load $BASE", "run.sh"),
        (f"{MEGATRON} --lr 1e-4 --train-iters 9 --finetune", "run.sh"),
    ],
)
def test_weights_that_the_file_does_not_name_are_the_users(text, name, planned):
    model = None if "pretrain_gpt" in text else "qwen2.5-7b"
    found = made(planned(text, name, model=model))
    assert "MODEL_PATH" in found.still_yours
    assert any("MODEL_PATH" in each for file, each in found.texts.items() if file != "train.py")


def test_pretraining_starts_at_random(planned):
    script = TRL.replace("--model_name_or_path Qwen/Qwen2.5-7B-Instruct", "--config_name qwen")
    found = made(planned(script, "run.sh", model="qwen2.5-7b"))
    assert "weights" not in yaml.safe_load(found.texts["training.yaml"])
    assert "MODEL_PATH" not in found.still_yours
    plan = planned(f"{MEGATRON} --lr 1e-4 --train-iters 9 --save /ckpt --load /ckpt", "run.sh")
    assert plan.training.weights is None
    assert "pretrained" not in made(plan).texts["run.sh"]


def test_the_emitted_program_starts_from_exactly_the_files_weights(planned, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    text = TRAINER.replace("Qwen/Qwen2.5-7B-Instruct", str(tmp_path / "base")).replace("4096", "64")
    plan = planned(text, model="tiny-llama")
    texts = made(plan).texts
    config = json.loads(texts["config.json"])
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    )
    base.save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(texts["config.json"])
    program: dict[str, Any] = {"__name__": "train"}
    exec(TRAIN.replace("from datasets import", "# from datasets import"), program)
    torch.manual_seed(6)
    model, _ = program["model_of"](yaml.safe_load(texts["training.yaml"]))
    started, wanted = model.state_dict(), base.state_dict()
    assert started.keys() == wanted.keys()
    assert all(torch.equal(started[name], wanted[name]) for name in wanted)
    random, _ = program["model_of"](settings_of(plan, How(smoke=True)))
    assert not torch.equal(random.state_dict()["lm_head.weight"], wanted["lm_head.weight"])


VALUES = (
    "learning_rate: 1.0e-5\nlr_scheduler_type: polynomial\nwarmup_ratio: 0.1\nnum_train_epochs: 3\nweight_decay: 0\n"
)


def test_what_a_program_is_not_told_is_named_with_both_values(planned):
    """A plan of a Trainer's file, for the other programs; none of them has epochs or a polynomial."""
    plan = planned(TRAINER + VALUES)
    assert not_carried(PROGRAMS["deepspeed"], plan, How()) == ()
    for name in ("torch", "torchtitan", "megatron", "megatron-bridge", "ms-swift"):
        told = "\n".join(not_carried(PROGRAMS[name], plan, How()))
        assert f"training.epochs=3, which {name} is not told; it has steps=100" in told
        assert f"training.schedule=polynomial, which {name} is not told; it has cosine" in told
        start = "MODEL_PATH" if name == "megatron" else "none"
        assert f"training.weights=Qwen/Qwen2.5-7B-Instruct, which {name} is not told; it has {start}" in told
        assert ("training.warmup_ratio=0.1" in told) == (name in ("torch", "torchtitan"))
        assert "weight_decay" not in told
    mine = not_carried(PROGRAMS["torch"], plan, How(arguments=RunArguments(weights=Path("base"))))
    assert not any("weights" in each for each in mine)
    split = planned(TRAINER + VALUES, layout="pp=2,zero=1")
    told = "\n".join(made(split).advice)
    assert "training.weights=Qwen/Qwen2.5-7B-Instruct, which deepspeed is not told; it has none" in told
    assert "training.epochs=3, which deepspeed is not told; it has steps=100" in told
    fsdp = {"engine": "fsdp", "layout": "zero=3", "settings": ("training.memory_recipe=engine",)}
    ours = planned(f"{MEGATRON} {TUNE}", "run.sh", model="qwen2.5-7b", **fsdp)
    assert any(
        "training.min_learning_rate_ratio=0.1" in each for each in not_carried(PROGRAMS["accelerate"], ours, How())
    )
    assert "MODEL_PATH" in made(ours).still_yours


def test_a_plan_of_our_own_is_told_whole(planned):
    """Values of the planner's defaults are written for every program, so that nothing has to be named."""
    plan = planned(TRAINER)
    plain = replace(plan, training=type(plan.training)(sequence_length=4096, global_batch_size=8))
    tuned = replace(plain, training=plain.training.model_copy(update={"weights": "a/model"}))
    for name, target in PROGRAMS.items():
        own = tuned if name.startswith(("llama-factory", "axolotl")) else plain  # they start from weights
        assert not_carried(target, own, How()) == (), name
    assert values_of(PROGRAMS["deepspeed"], plain)["lr_scheduler_type"] == "cosine_with_min_lr"


def test_the_values_of_a_run_change_no_price(planned):
    one, other = planned(TRAINER), planned(TRAINER + VALUES)
    assert one.training != other.training
    assert one.step_seconds == other.step_seconds
    assert (one.memory, one.time) == (other.memory, other.time)


def test_launching_says_what_our_trainer_is_not_told(planned, tmp_path, capsys):
    plan = planned(TRAINER + VALUES, engine="torch", model="tiny-llama")
    write_plan(plan, tmp_path / "plan.json", replace=False)
    launch(tmp_path / "plan.json", output=tmp_path / "run", dry_run=True, force_unfit=True)
    assert "training.weights=Qwen/Qwen2.5-7B-Instruct, which torch is not told; it has none" in capsys.readouterr().err


def test_steps_of_the_user_replace_the_files_epochs(planned):
    plan = planned(TRAINER + VALUES, settings=("training.steps=50",))
    assert understood(settings_of(plan))["max_steps"] == 50


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def noted(self, note: str) -> None:
        self.notes.append(note)


@pytest.mark.usefixtures("planned")
def test_an_axis_without_a_key_in_the_files_program_is_named(tmp_path):
    (tmp_path / "full.yaml").write_text(FACTORY)
    for pin, told in ("cp=2", True), ("cp=1", False):
        notes = Notes()
        pins = (pin, "tp=1", "zero=3", "recompute=full")
        plan_file(tmp_path / "full.yaml", "dgx-h100", gpus=8, engine="fsdp", pin=pins, reporter=notes)
        assert (
            any(f"the plan has {pin}, which a LLaMA-Factory file has no key for" in each for each in notes.notes)
            == told
        )


@pytest.mark.usefixtures("planned")
def test_a_plan_has_no_axis_that_the_files_program_lacks(tmp_path):
    """At 65,536 tokens the search takes context parallelism, which LLaMA-Factory has no key for."""
    (tmp_path / "full.yaml").write_text(FACTORY)
    options = {"gpus": 8, "engine": "fsdp", "seq_len": 65536, "global_batch": 16}
    bound, notes = {}, Notes()
    for pins in ((), ("cp>=1",)):
        bound[pins] = plan_file(tmp_path / "full.yaml", "dgx-h100", pin=pins, reporter=notes, **options).layout
    assert (bound[()].tp, bound[()].pp, bound[()].cp) == (1, 1, 1)
    assert bound["cp>=1",].cp > 1
    (told, other) = [each for each in notes.notes if "which the search leaves out" in each]
    assert "no key for tp, pp, cp, ep" in told
    assert "no key for tp, pp, ep, which" in other
    assert told.endswith("--pin tp=N plans it for the programs of `planner emit`")
    (tmp_path / "full.yaml").write_text(FACTORY.replace("type: full", "type: lora\nlora_rank: 8"))
    notes = Notes()
    plan_file(tmp_path / "full.yaml", "dgx-h100", reporter=notes, gpus=8, engine="deepspeed")
    (told,) = [each for each in notes.notes if "which the search leaves out" in each]
    assert told.endswith("--pin cp=N plans it for the programs of `planner emit`")  # adapters have neither tp nor pp


@pytest.mark.usefixtures("planned")
def test_the_fastest_layout_beside_a_file_has_no_axis_that_its_program_lacks(tmp_path):
    """It is the minimum of `planner plan --from`, which a search without the program's limits would beat."""
    (tmp_path / "full.yaml").write_text(FACTORY)
    options = {"gpus": 8, "engine": "fsdp", "seq_len": 16384, "global_batch": 8}
    own = estimate_file(tmp_path / "full.yaml", "dgx-h100", layout="recompute=full", **options)
    bound = plan_file(tmp_path / "full.yaml", "dgx-h100", reporter=Notes(), **options)
    freed = replace(own, options=replace(own.options, forbidden=()))
    assert own.options.forbidden == ("tp>=2", "pp>=2", "cp>=2", "ep>=2")
    assert fastest_seconds(own) == pytest.approx(bound.minimum.step_seconds)
    assert fastest_seconds(freed) < 0.9 * bound.minimum.step_seconds


def test_other_programs_files_name_the_weights_and_what_they_leave_open(tmp_path):
    (tmp_path / "axolotl.yaml").write_text("base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 1\nsequence_len: 2048\n")
    found = read_foreign(tmp_path / "axolotl.yaml", num_devices=8, engine="fsdp")
    assert "training.weights=Qwen/Qwen2.5-7B" in found.settings
    (unsaid,) = [each for each in found.left_behind if "does not say" in each]
    assert "weight_decay=0.1" in unsaid
    assert "adam_beta2=0.95" in unsaid


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(("line", "told"), [("", True), ("packing: false\n", True), ("packing: true\n", False)])
def test_samples_that_the_file_does_not_pack_are_named(line, told, tmp_path):
    """The emitted run packs samples into whole sequences."""
    (tmp_path / "run.yaml").write_text(TRAINER + line)
    assert ("packing=false" in read_foreign(tmp_path / "run.yaml").left_behind) is told


SHARDED = """
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: Qwen2DecoderLayer
  state_dict_type: FULL_STATE_DICT
"""
"""Keys by which Axolotl fills Accelerate's file, which `planner emit` writes anew."""


@pytest.mark.parametrize("flash", [True, False])
def test_a_kernel_that_files_do_not_carry_is_named_and_keys_that_they_write_anew_are_not(tmp_path, flash):
    text = "base_model: Qwen/Qwen2.5-7B\nsequence_len: 4096\nmicro_batch_size: 1\n"
    (tmp_path / "run.yaml").write_text(f"{text}flash_attention: {str(flash).lower()}\n{SHARDED}", encoding="utf-8")
    left = read_foreign(tmp_path / "run.yaml").left_behind
    assert any("attn_implementation=flash_attention_2" in each for each in left) is flash
    assert not [each for each in left for key in ("fsdp", "auto_wrap", "state_dict", "accelerate.") if key in each]
