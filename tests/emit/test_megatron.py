"""Plans for Megatron-LM, read as Megatron-LM reads them: its recorded defaults, and the emitted options on top."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron_expected import differences
from megatron_plans import LAYOUTS, SHARDED, plan_of

from planner.cost.parameters import num_params
from planner.emit.bundle import bundle_of, write_bundle
from planner.emit.programs import PROGRAMS, megatron, megatron_family
from planner.emit.read.facts import facts_of
from planner.emit.read.readers import READERS
from planner.emit.settings import field_of
from planner.emit.target import How, values_of
from planner.errors import InputError
from planner.run_arguments import RunArguments
from planner.specs.model import ModelSpec
from planner.specs.pipeline_letters import letters_of, pieces_of_letters
from planner.specs.recipe import NAMED_RECIPES

RECORDED = json.loads((Path(__file__).parent / "megatron_defaults.json").read_text())
"""Option -> argument, action, type, number of values, default. Written by tools/real_parsers.py from d98e8a64."""
TARGET = PROGRAMS["megatron"]


def read(text: str, kind: str) -> Any:
    """One value, read by the type that Megatron-LM uses."""
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](text)
    if kind == "moe_freq_type" and "[" in text:
        return eval(text, {})
    if kind in ("tuple_type", "moe_freq_type"):
        return tuple(map(int, text.split(","))) if "," in text else int(text)
    return text


def namespace_of(words: list[str]) -> dict[str, Any]:
    """Arguments after these words, all others with their recorded defaults; an option without a record is a fault."""
    found = {argument: default for argument, *_, default in RECORDED.values()}
    place = 0
    while place < len(words):
        argument, action, kind, several, _ = RECORDED[words[place]]
        place += 1
        if action in ("StoreTrueAction", "StoreFalseAction"):
            found[argument] = action == "StoreTrueAction"
            continue
        values = []
        while place < len(words) and not words[place].startswith("--"):
            values.append(read(words[place], kind))
            place += 1
        assert len(values) == 1 or (values and several in ("+", "*")), words[place - 1]
        found[argument] = values if several in ("+", "*") else values[0]
    return found


def words_for(plan) -> list[str]:
    return [word for option in megatron.as_flags(values_of(TARGET, plan)) for word in option]


SOME = [LAYOUTS[i] for i in (1, 2, 4, 5, 15, 17, 19, 25, 30, 31, 37, 38, 50, 55, 58, -3, -2, -1)]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_megatron_understands_what_was_priced(case):
    plan = plan_of(case)
    assert differences(namespace_of(words_for(plan)), plan) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "engine"),
    [*((each, "megatron") for each in LAYOUTS), *((each, "megatron-fsdp") for each in SHARDED)],
    ids=str,
)
def test_megatron_understands_every_case(case, engine):
    plan = plan_of(case, engine)
    assert differences(namespace_of(words_for(plan)), plan) == []


def further(plan) -> dict[str, Any]:
    """Arguments that Megatron-LM needs beside those of `expected`; its validation changes some of them."""
    sharded, graphs = plan.engine.name == "megatron-fsdp", plan.training.cuda_graphs
    return {
        "gradient_accumulation_fusion": not sharded,
        "ckpt_format": "fsdp_dtensor" if sharded else "torch_dist",
        "check_for_nan_in_loss_and_grad": graphs != "step",
        "cuda_graph_modules": ["attn", "mlp"] if graphs == "layers" else [],
        "overlap_cpu_optimizer_d2h_h2d": plan.layout.offload in ("optimizer", "both"),
    }


def unlike(values, plan) -> list[str]:
    """Names of the arguments that differ from the plan's."""
    found = namespace_of([word for option in megatron.as_flags(values) for word in option])
    return [*differences(found, plan), *(name for name, value in further(plan).items() if found[name] != value)]


def test_no_setting_of_the_table_can_go_unnoticed():
    """Each setting that writes a key is needed: without it, some plan is understood differently."""
    plans = [plan_of(each) for each in SOME] + [plan_of(each, "megatron-fsdp") for each in SHARDED[1:3]]
    tables = [(setting, [setting.write(plan) for plan in plans]) for setting in TARGET.settings]
    written = [values_of(TARGET, plan) for plan in plans]
    unnoticed = []
    for setting, parts in tables:
        if not any(parts):
            continue
        rest = [{k: v for k, v in whole.items() if k not in part} for whole, part in zip(written, parts, strict=True)]
        if not any(unlike(values, plan) for values, plan in zip(rest, plans, strict=True)):
            unnoticed.append(setting.says)
    assert [unlike(values, plan) for values, plan in zip(written, plans, strict=True)] == [[] for _ in plans]
    assert unnoticed == []


@pytest.mark.parametrize("case", SOME, ids=str)
def test_what_is_emitted_reads_back_as_the_same_plan(case):
    plan = plan_of(case)
    found = facts_of(TARGET, values_of(TARGET, plan), model=plan.model)
    assert found.not_priced == ()
    for path, value in found.fields.items():
        if path.startswith("model."):
            continue
        wanted = field_of(plan, path)
        if path == "training.memory_recipe":
            wanted = "megatron-18" if wanted == "engine" else wanted
        assert value == (wanted[0] if path == "layout.recompute" else wanted), path
    said = {f"layout.{name}" for name in ("tp", "pp", "cp", "ep", "etp", "zero", "hsdp", "mbs", "interleave", "sp")}
    assert said | {"layout.recompute", "layout.offload", "layout.schedule", "layout.layers_per_stage"} <= set(
        found.fields
    )


@pytest.mark.parametrize("model", ["gpt2-xl", "llama3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "qwen2.5-7b"])
def test_the_model_reads_back(model):
    """A model that was written and read back costs the same as the shipped model."""
    plan = plan_of((model, 32, "tp=1,pp=1,zero=1" if model == "gpt2-xl" else "tp=1,zero=1", ()))
    words = facts_of(TARGET, values_of(TARGET, plan)).of("model")
    found = ModelSpec.model_validate({"name": "read", "architecture": "llama", **words})
    assert num_params(found) == num_params(plan.model)
    assert found.features == plan.model.features
    assert found.sliding_window == plan.model.sliding_window


def script_words(plan, folder: Path, tools: Path, *arguments: str, how: How | None = None) -> list[str]:
    """The words of the command that the emitted script starts, after expansion by the shell."""
    paths, _ = write_bundle(plan, folder, how=how or How(smoke=True), force_unfit=True)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "MEGATRON_PATH": "/a b/Megatron-LM"}
    done = subprocess.run(["bash", paths[-1], *arguments], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_script_starts_megatron_on_each_host(tmp_path, tools):
    plan = plan_of(("llama3-8b", 2, "tp=2,pp=4,cp=2,zero=0,layers_per_stage=7/2*9/7", ()))
    words = script_words(plan, tmp_path / "out", tools, "1", "10.0.0.1", "29400", "--save", "a b")
    program = words.index("/a b/Megatron-LM/pretrain_gpt.py")
    assert words[:program] == [
        "--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29400",
    ]  # fmt: skip
    assert words[-2:] == ["--save", "a b"]
    found = namespace_of(words[program + 1 : -2])
    assert found["vocab_size"] == plan.model.vocab_size - 1  # NullTokenizer adds one
    assert differences({**found, "vocab_size": plan.model.vocab_size}, plan) == []


def test_slurm_starts_megatron_too():
    plan = plan_of(("llama3-8b", 2, "tp=2,pp=4,zero=1", ()))
    made = bundle_of(plan, on="slurm", how=How(), force_unfit=True)
    assert set(made.texts) == {"job.sbatch", "run.sh"}
    assert "planner launch" not in made.texts["job.sbatch"]
    assert "#SBATCH --mem=0\n" in made.texts["job.sbatch"]


def test_what_stays_the_users_is_a_placeholder_that_is_listed():
    plan = plan_of(("llama3-8b", 1, "tp=8,zero=1", ()))
    made = bundle_of(plan, how=How(), force_unfit=True)
    assert set(made.still_yours) == {"$MEGATRON_PATH", "DATA_PATH", "TOKENIZER_MODEL"}
    for name in ("DATA_PATH", "TOKENIZER_MODEL", "${MEGATRON_PATH:?"):
        assert name in made.texts["run.sh"]
    given = RunArguments(data=("/data/a b",), tokenizer=Path("/tokens"))
    filled = bundle_of(plan, how=How(arguments=given), force_unfit=True)
    assert set(filled.still_yours) == {"$MEGATRON_PATH"}
    assert "--data-path '/data/a b'" in filled.texts["run.sh"]
    assert set(bundle_of(plan, how=How(smoke=True), force_unfit=True).still_yours) == {"$MEGATRON_PATH"}


@pytest.mark.parametrize(
    ("case", "words", "way_out"),
    [
        (("grok-1", 16, "tp=4,pp=4,ep=8,zero=1", ()), "model.norms_per_layer is 4", "--engine"),
        (("llama3-8b", 1, "tp=4,zero=0", ("training.memory_recipe=precision-aware",)), "memory_recipe", "zero=1"),
        (("llama3-8b", 1, "tp=4,zero=1", ("training.memory_recipe=textbook-20",)), "memory_recipe", "=engine"),
        (("llama3-8b", 1, "zero=1", ("training.lora_rank=16",)), "training.lora_rank is 16", "megatron-bridge"),
        (("falcon-7b", 1, "tp=1,zero=1", ()), "parallel_attention", "--engine"),
        (("bloom-7b", 1, "tp=1,zero=1", ()), "alibi", "--engine"),
        (("t5-3b", 1, "tp=1,zero=1", ()), "model.kind is encoder-decoder", "explained"),
        (("gemma2-9b", 1, "tp=1,zero=1", ()), "norms_per_layer", "--engine"),
        (("llama3-8b", 2, "dp=12,zero=1", ()), "partly idle", "--gpus 16"),
    ],
    ids=str,
)  # fmt: skip
def test_what_megatron_cannot_be_told_is_refused(case, words, way_out):
    plan = plan_of(case)
    with pytest.raises(InputError) as error:
        bundle_of(plan, how=How(), force_unfit=True)
    mistake = next(each for each in error.value.mistakes if words in each.message)
    assert way_out in mistake.hint


def test_stages_that_recompute_differently_are_refused():
    plan = plan_of(("llama3-8b", 1, "pp=2,tp=1,zero=1,recompute=full", ()))
    wanted = replace(plan, layout=replace(plan.layout, recompute=("full", "none")))
    with pytest.raises(InputError, match="one policy for all") as error:
        bundle_of(wanted, how=How(), force_unfit=True)
    assert "--pin recompute=full" in error.value.mistakes[0].hint


FAMILY_PROGRAMS = ("megatron", "megatron-bridge", "ms-swift", "primus")


@pytest.mark.parametrize("name", FAMILY_PROGRAMS)
def test_the_programs_of_the_family_share_its_rows(name):
    """The three programs take the same options of Megatron-Core, and lack the same."""
    assert [row.says for row in megatron_family.FAMILY if row not in PROGRAMS[name].settings] == []
    assert [row.says for row in megatron_family.REFUSALS if row not in PROGRAMS[name].refuse] == []


def test_the_base_of_rotary_embeddings_counts_only_where_they_are():
    plan = plan_of(("mpt-1b", 1, "tp=2,zero=1", ()))
    changed = replace(plan, model=plan.model.model_copy(update={"rope_theta": 10000.5}))
    assert [text for row in PROGRAMS["megatron"].refuse if "rotary" in (text := str(row.fault(changed)))] == []


def test_adapters_beside_a_part_of_a_module_are_refused():
    """Megatron-Bridge's linear_qkv holds query, key and value."""
    refusals = PROGRAMS["megatron-bridge"].refuse
    for targets, refused in (("[query]", True), ("[gate]", True), ("[query,key,value]", False)):
        given = ("training.lora_rank=8", f"training.lora_targets={targets}")
        plan = plan_of(("llama3-8b", 1, "tp=1,zero=1", given), "megatron-bridge")
        assert any("hold several matrices" in str(row.fault(plan)) for row in refusals) == refused


@pytest.mark.parametrize(("graphs", "is_on"), [("layers", True), ("step", True), ("none", False)])
def test_bridges_models_with_graphs_have_the_generator_that_they_demand(graphs, is_on):
    """Megatron-LM d98e8a64, training/models/gpt.py: without it, Megatron-Bridge stops at the first model."""
    given = (f"training.cuda_graphs={graphs}",)
    plan = plan_of(("llama3-8b", 1, "tp=4,zero=1", given), "megatron-bridge")
    text = bundle_of(plan, how=How(smoke=True), force_unfit=True).texts["run.sh"]
    for key in ("model.transformer.use_te_rng_tracker=true", "rng.te_rng_tracker=true"):
        assert (key in text) == is_on


def test_the_trainers_options_are_not_megatrons():
    plan = plan_of(("llama3-8b", 1, "tp=8,zero=1", ()))
    with pytest.raises(InputError, match="--steps"):
        bundle_of(plan, how=How(arguments=RunArguments(steps=5)), force_unfit=True)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Et*3|(tt|)*29m|L", (3, *(2,) * 29, 0, 0)),
        ("Et|(tt|)*30mL", (1, *(2,) * 30, 0)),
        ("Ettt|tttt|tttmL", (3, 4, 3)),
        ("E|(t|)*4,L", (0, 1, 1, 1, 1, 0)),
        ("E|t*2|(t*3|)*2|L", (0, 2, 3, 3, 0, 0)),
        (letters_of((13, 14, 12), 1), (13, 14, 12)),
    ],
)
def test_letters_of_a_pipeline_are_counted(text, layers):
    assert pieces_of_letters(text).layers == layers


@pytest.mark.parametrize("text", ["", "tt;rm -rf", "E(t|)*99999*99999L", "((((t*9999)*9999)*9999)*9999)"])
def test_hostile_letters_are_refused(text):
    with pytest.raises(InputError):
        pieces_of_letters(text)


@pytest.mark.parametrize(
    ("to", "engine"), [("megatron", "megatron"), ("megatron-bridge", "megatron-bridge"), ("ms-swift", "megatron")]
)
def test_every_rendering_of_the_table_reads_back_as_the_same_plan(to, engine):
    """The emitted script, read by its reader, gives the same layout and training; keys have the program's own names."""
    adapters = ("training.lora_rank=16", "training.lora_targets=[query,key,value,output]")
    num_read = 0
    for case in (*SOME, ("llama3-8b", 1, "tp=2,zero=1", adapters)):
        try:
            plan = plan_of(case, engine)
            made = bundle_of(plan, to, how=How(smoke=True), force_unfit=True)
        except InputError:
            continue
        text = made.texts["run.sh"]
        reader = next(each for each in READERS if each.recognises(text))
        assert reader.target.name == to
        values = {key: value for key, value in reader.values(text).items() if not key.startswith("launch.")}
        found = facts_of(reader.target, values, model=plan.model)
        assert found.not_priced == ()
        kept = plan.engine.memory.states["mixed"]
        for path, value in found.fields.items():
            wanted = field_of(plan, path)
            if path.startswith("model.") or (path == "training.memory_recipe" and NAMED_RECIPES[value] == kept):
                continue
            if path in ("training.loss", "training.lora_targets") and wanted in ("engine", "whole"):
                continue
            if path == "engine.overlap.tensor_parallel" and not plan.layout.sp:
                continue  # without sequence parallelism it has no effect, and is off
            assert value == (wanted[0] if path == "layout.recompute" else wanted), (case, path)
        num_read += 1
    assert num_read >= 9
