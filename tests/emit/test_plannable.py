"""Every plan of the search for an engine can be emitted: random legal layouts of six models."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.cli import main
from planner.emit.bundle import bundle_of
from planner.emit.plannable import check_plannable, not_run, unplannable, whole_hosts
from planner.emit.programs import PROGRAMS
from planner.emit.target import How
from planner.errors import ExitCode, InputError
from planner.layout import Layout, even_split
from planner.search.given import plan_for_layout
from planner.search.space.constraints import Constraints
from planner.search.space.rules import broken_rules
from planner.search.space.space import Space
from planner.specs.banned import searched_axes
from planner.specs.by_name import engine_names, load_engine, priced_engine_names
from planner.specs.load import load_job
from planner.specs.model import ModelSpec

MODELS = ("llama3-8b", "gpt3-175b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "qwen2.5-7b")
ENGINES = [name for name in engine_names() if any(each in PROGRAMS for each in load_engine(name).emits)]
NOTHING = {"megatron-2021"}
PRICED = {"kempnerforge", "hai-llm", "nanotron", "internevo", "megatron-2022", "aleph-alpha-scaling"}


def plannable(job) -> bool:
    try:
        check_plannable(job)
    except InputError:
        return False
    return True


def random_plans(engine: str, count: int, seed: int):
    """Plans with random layouts that the rules of the search allow."""
    draw = random.Random(seed)
    jobs = [
        load_job(model=model, cluster="dgx-h100", nodes=8, engine=engine, global_batch_size=256, sequence_length=2048)
        for model in MODELS
    ]
    jobs = [job for job in jobs if plannable(job)]
    found = 0
    for _ in range(400 * count):
        job = draw.choice(jobs)
        can, pipeline, axes = job.engine.can, job.engine.pipeline, searched_axes(job.engine)
        tp, pp, cp = (draw.choice((1, 1, 2, 4, 8)) if axis in axes else 1 for axis in ("tp", "pp", "cp"))
        if 64 % (tp * pp * cp):
            continue
        interleave = draw.choice((1, 1, 2)) if pp > 1 and "interleaved" in pipeline.schedules else 1
        chunks = pp * interleave
        layers = even_split(job.model.num_layers, pp, interleave)
        if pipeline.uneven_stages and chunks > 1 and draw.random() < 0.5 and layers[-1] > 1:
            layers = (layers[0] + 1, *layers[1:-1], layers[-1] - 1)
        experts = job.model.moe is not None and "ep" in axes
        zero = draw.choice(pipeline.zero_stages if pp > 1 and pipeline.zero_stages else can.zero_stages)
        layout = Layout(
            tp=tp, pp=pp, cp=cp, dp=64 // (tp * pp * cp), zero=zero, interleave=interleave,
            ep=draw.choice((1, 2, 4, 8)) if experts else 1,
            etp=draw.choice((1, tp)) if experts and "etp" in can.axes else 1,
            hsdp=draw.choice((1, 1, 2)), mbs=draw.choice((1, 2, 4)), sp=int(tp > 1 and draw.random() < 0.7),
            schedule="interleaved" if interleave > 1 else draw.choice(pipeline.schedules),
            recompute=(draw.choice(can.recompute),) * chunks, layers_per_stage=layers,
        )  # fmt: skip
        if layout.hsdp == layout.dp * layout.cp > 1:
            continue  # the search leaves it out as ZeRO-0 by another name
        if Constraints.parse((), unplannable(job, ())).allowed(layout) and not broken_rules(job, layout):
            found += 1
            yield plan_for_layout(job, layout)
        if found == count:
            return
    raise AssertionError(f"{engine}: {found} of {count} legal layouts found")


def refusals(engine: str, count: int, seed: int) -> list[str]:
    wrong = []
    for plan in random_plans(engine, count, seed):
        try:
            bundle_of(plan, how=How(), force_unfit=True)
        except InputError as error:
            wrong.append(f"{plan.model.name} {plan.layout}: {error}")
    return wrong


@pytest.mark.parametrize("engine", ENGINES)
def test_ten_random_plans_can_be_emitted(engine):
    assert refusals(engine, 10, seed=1) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_hundred_random_plans_can_be_emitted(engine):
    assert refusals(engine, 200, seed=2) == []


CUT = ("tp>=2,sp=1", "tp>=2,cp>=2")
"""What no program of transformers runs: neither AutoTP nor DistributedConfig cuts activations between the matrices."""

OF_PIPELINES = ("pp>=2,zero=0", "pp>=2,offload=activations")


@pytest.mark.parametrize(
    ("engine", "model", "left_out", "hosts"),
    [
        ("deepspeed", "llama3-8b", (*CUT, "tp>=2,pp>=2", "cp>=2,zero<=2", *OF_PIPELINES), 0),
        ("fsdp", "llama3-8b", (*CUT, "cp>=2,hsdp=dp"), 8),
        ("fsdp", "mixtral-8x7b", (*CUT, "ep>=2,tp>=2", "ep>=2,cp>=2", "ep>=2,hsdp>=2", "cp>=2,hsdp=dp"), 8),
        ("torchtitan", "qwen3-30b-a3b", (), 0),  # experts are spread
        ("megatron", "qwen3-30b-a3b", ("tp>=2,sp=0",), 8),
        ("megatron", "llama3-8b", (), 8),
    ],
)
def test_what_no_program_can_be_told_is_left_out_of_the_search(engine, model, left_out, hosts):
    job = load_job(model=model, cluster="dgx-h100", nodes=2, engine=engine, global_batch_size=64, sequence_length=1024)
    assert unplannable(job, ()) == left_out
    assert whole_hosts(job, ()) == hosts
    assert whole_hosts(job, ("tp",)) == 0


@pytest.mark.parametrize(
    ("setting", "left_out", "hosts"),
    [
        ("training.optimizer=sgd", ("zero>=1",), 8),
        ("training.precision=fp32", ("offload=optimizer",), 8),
        ("training.dropout=0.1", (), 8),  # ms-swift has none, and the others refuse hosts that are partly idle
    ],
)
def test_what_megatron_lm_has_for_some_trainings_is_left_out_of_others(setting, left_out, hosts):
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", nodes=2, engine="megatron", global_batch_size=64, sequence_length=1024,
        settings=(setting,),
    )  # fmt: skip
    check_plannable(job)
    assert (unplannable(job, ()), whole_hosts(job, ())) == (left_out, hosts)


@pytest.mark.parametrize("setting", ["training.loss=fused-linear", "training.lora_rank=16"])
def test_what_pipelines_and_cut_matrices_have_not_is_planned_without_them(setting):
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", nodes=2, engine="deepspeed", global_batch_size=64, sequence_length=1024,
        settings=(setting,),
    )  # fmt: skip
    assert unplannable(job, ()) == ("pp>=2", "tp>=2", "cp>=2,zero<=2")


def test_a_pin_of_pipelines_leaves_the_rest_to_the_search_that_emit_can_write():
    plan = plan_job("llama3-8b", "dgx-h100", engine="deepspeed", nodes=1, global_batch=16, seq_len=2048, pin=["pp>=2"])
    assert (plan.layout.pp > 1, plan.layout.tp, plan.layout.zero) == (True, 1, 1)
    assert "pipeline.py" in bundle_of(plan, how=How()).texts


def test_a_pin_of_tensor_parallelism_leaves_sequence_parallelism_to_what_emit_can_write():
    plan = plan_job(
        "llama3-8b", "a100-pcie-box", engine="deepspeed", gpus=4, global_batch=16, seq_len=2048, pin=["tp=2"]
    )
    assert (plan.layout.tp, plan.layout.sp) == (2, 0)
    assert bundle_of(plan, how=How()).texts


def test_no_host_is_left_partly_idle_where_no_program_can():
    """With hosts of eight, 20 devices would leave half of the third host idle."""
    degrees = Constraints(whole_hosts=8)
    assert [bool(degrees.fills_hosts(count)) for count in (4, 8, 12, 16, 20, 24)] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", nodes=3, engine="megatron", global_batch_size=60, sequence_length=1024
    )
    free, whole = (Space(job, Constraints(whole_hosts=size)).partitions().world_size for size in (0, 8))
    assert {12, 20} <= set(free.tolist())
    assert set(whole.tolist()) == {size for size in free.tolist() if size <= 8 or size % 8 == 0}


@pytest.mark.parametrize(
    ("engine", "model", "layout", "words"),
    [
        ("fsdp", "llama3-8b", "cp=2,hsdp=2,dp=2,zero=3", "each replica has one rank to shard over"),
        ("fsdp", "mixtral-8x7b", "ep=2,cp=2,dp=8,zero=3", "ep"),
        ("deepspeed", "llama3-8b", "pp=2,dp=8,zero=0", "zero"),
        ("fsdp", "llama3-8b", "cp=2,dp=8,zero=3,hsdp=2", ""),  # of the programs, accelerate runs it
        ("torch", "llama3-8b", "dp=16,zero=3", ""),
    ],
)
def test_explain_says_what_no_program_can_be_configured_for(engine, model, layout, words, capsys):
    told = ["explain", model, "dgx-h100", "--engine", engine, "--gpus", "16", "--layout", layout]
    told += ["--seq-len", "1024", "--global-batch", "64"]
    assert main([*told, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(told) == 0
    screen = " ".join(capsys.readouterr().out.split())
    if not words:
        assert "not_run" not in document
        assert "no emitted program runs this" not in screen
        return
    assert document["not_run"].startswith("no emitted program runs this: ")
    assert words in document["not_run"]
    assert document["not_run"] in screen


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_said_not_to_run_is_what_emit_refuses(engine):
    for plan in random_plans(engine, 10, seed=3):
        for other in (plan, replace(plan, layout=replace(plan.layout, hsdp=plan.layout.dp, offload="activations"))):
            refused = [isinstance(_bundle_or_error(other, name), InputError) for name in plan.engine.emits]
            assert bool(not_run(other)) == all(refused), other.layout


def _bundle_or_error(plan, program):
    try:
        return bundle_of(plan, program, how=How(), force_unfit=True)
    except InputError as error:
        return error


def test_old_programs_say_that_nothing_can_be_emitted():
    assert {name for name in engine_names() if not load_engine(name).emits} == NOTHING
    assert {*priced_engine_names()} == PRICED
    assert not any(load_engine(name).emits for name in PRICED)


@pytest.mark.parametrize("name", sorted(PRICED))
def test_a_profile_that_prices_published_runs_is_refused_by_plan_and_priced_by_explain(name, capsys):
    job = ["llama3-8b", "dgx-a100", "--gpus", "8", "--seq-len", "2048", "--global-batch", "64", "--engine", name]
    assert main(["plan", *job]) == ExitCode.BAD_INPUT
    told = " ".join(capsys.readouterr().err.split())
    assert f"profile {name} only prices published runs" in told
    assert "`planner engines` lists the programs to plan for" in told
    assert main(["explain", *job, "--layout", "dp=8"]) == ExitCode.OK
    assert f"engine {name}" in " ".join(capsys.readouterr().out.split())
    assert main(["engines"]) == ExitCode.OK
    assert name not in capsys.readouterr().out.split()
    assert main(["explain", *job[:-1], name[:-1], "--layout", "dp=8"]) == ExitCode.BAD_INPUT
    assert f"did you mean `{name}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "words"), [("falcon-7b", "parallel_attention"), ("bloom-7b", "alibi"), ("t5-3b", "kind")]
)
def test_what_megatron_prices_and_cannot_be_told_is_not_planned(model, words):
    with pytest.raises(InputError, match=words) as error:
        plan_job(model, "dgx-h100", engine="megatron", global_batch=64, seq_len=512)
    assert "explain --layout" in error.value.mistakes[0].hint


HYBRID = {"num_layers": 24, "mixer": {"kind": "gated-deltanet", "num_heads": 32, "key_size": 128, "value_size": 128}}
"""The kind of three out of four layers, as in Qwen3-Next."""


def test_a_model_that_only_transformers_builds_is_loaded_by_name():
    job = load_job(model="llama3-8b", cluster="dgx-h100", engine="fsdp", global_batch_size=64, sequence_length=2048)
    document = job.model.model_dump(mode="json") | {"layers": [HYBRID | {"attends": False}]}
    job = replace(job, model=ModelSpec.model_validate(document, strict=False))
    check_plannable(job)
    layout = Layout(tp=1, pp=1, dp=8, zero=3, layers_per_stage=(32,), recompute=("full",), mbs=1)
    texts = bundle_of(plan_for_layout(job, layout), how=How(), force_unfit=True).texts
    assert "model: MODEL_NAME" in texts["training.yaml"]
    assert "config.json" not in texts
    assert not any("transformer_layer_cls_to_wrap" in text for text in texts.values())


MIXER = {"kind": "mamba2", "num_heads": 64, "key_size": 128, "value_size": 64, "kernel": 4}
BLOCKS = {
    "norm_bias": {"norm": "layernorm", "norm_bias": False},
    "norm": {"norm": "unweighted"},
    "mixer": {"mixer": MIXER, "attends": False},
    "attends": {"mixer": MIXER, "attends": False},
    "layers": {"layers": [{"num_layers": 4, "mixer": MIXER, "attends": False}]},
    "sparse": {"sparse": {"num_heads": 4, "head_size": 64, "top_k": 512}},
    **{name: {name: True} for name in ("cross_attention", "keys_are_values", "shares_keys", "head_bias")},
    **{name: {name: 64} for name in ("value_head_size", "layer_matrix_params", "layer_vector_params", "table_params")},
    **{name: {name: 64} for name in ("input_matrix_params", "output_matrix_params")},
    **{name: {name: 64} for name in ("embedding_size", "head_input_size")},
    "shared_by": {"shared_by": 2},
    "attention_gate": {"attention_gate": "head"},
    "vector_params": {"moe": {"num_experts": 8, "experts_per_token": 2, "ffn_hidden_size": 512, "vector_params": 64}},
    "latent_size": {"moe": {"num_experts": 8, "experts_per_token": 2, "ffn_hidden_size": 512, "latent_size": 64}},
    "norms_per_layer": {"norms_per_layer": 3},
}
"""Blocks that few models have, by the field that a program must name if it cannot build them."""


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_that_megatron_and_our_trainer_lack_are_refused_by_name(name):
    job = load_job(model="llama3-8b", cluster="dgx-h100", global_batch_size=64, sequence_length=2048)
    document = job.model.model_dump(mode="json", exclude={"norm_bias", "attends"}) | BLOCKS[name]
    model = ModelSpec.model_validate(document, strict=False)
    for engine in ("megatron", "megatron-bridge"):
        with pytest.raises(InputError, match=rf"model\.\S*{name}"):
            check_plannable(replace(job, model=model, engine=load_engine(engine)))
    with pytest.raises(InputError, match="no model built"):
        check_plannable(replace(job, model=model, engine=load_engine("torchtitan")))
    layout = Layout(tp=1, pp=1, dp=8, layers_per_stage=(32,), recompute=("none",), mbs=1)
    broken = broken_rules(replace(job, model=model, engine=load_engine("torch")), layout)
    assert any("engine torch does not run" in text for text in broken)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_engines_that_a_hint_names_for_adapters_can_train_them(precision):
    """Engine megatron prices adapters, but pretrain_gpt.py has none, so engine megatron would refuse the plan too."""
    settings = ("training.lora_rank=16", "training.lora_targets=[query,key,value]")
    engine = "torch" if precision == "bf16" else "fsdp"
    job = load_job(model="llama3-8b", cluster="dgx-h100", engine=engine, precision=precision, global_batch_size=64,
                   settings=settings)  # fmt: skip
    layout = Layout(layers_per_stage=even_split(job.model.num_layers, 1, 1), recompute=("none",))
    (told,) = [each for each in broken_rules(job, layout) if "adapters" in each]
    named = set(re.findall(r"[a-z-]+", told.rpartition("--engine")[2])) - {"or"}
    assert "megatron" not in named
    assert "megatron-bridge" in named
    for name in named:
        check_plannable(replace(job, engine=load_engine(name)))
