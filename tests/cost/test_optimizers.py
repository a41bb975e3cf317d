"""The states of optimizers compared with those of torch's own optimizers, and relations between recipes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.ledger import LineName
from planner.cost.memory import memory_lines
from planner.cost.model_states import state_bytes_per_param
from planner.cost.optimizers import layer_matrices, newton_schulz_seconds, optimizer_seconds
from planner.cost.parameters import layer_params, num_params
from planner.cost.stage import stages_of
from planner.layout_text import parse_layout
from planner.search.space.rules import broken_rules
from planner.specs.recipe import NAMED_RECIPES


def optimizer_bytes(job, text="tp=1", num_devices=1):
    """The optimizer's line of every stage."""
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=num_devices)
    lines = {line.name: line.num_bytes for line in memory_lines(job, layout, stages_of(job, layout))}
    return lines[LineName.OPTIMIZER_STATE].sum()


@pytest.mark.parametrize("name", ["tiny-gpt", pytest.param("tiny-llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon"])
def test_states_are_those_that_torch_makes(make_job, name, optimizer):
    torch = pytest.importorskip("torch")
    from planner.trainer.model import Transformer

    # megatron's fp32 profile updates the weights themselves, as torch.optim does
    job = make_job(
        name, engine="megatron", batch=8, sequence=32, precision="fp32", settings=(f"training.optimizer={optimizer}",)
    )
    spec = job.model.model_copy(update={"vocab_size": 128 * (job.model.vocab_size // 128)})  # nothing is padded
    job = type(job)(model=spec, cluster=job.cluster, training=job.training, engine=job.engine)
    module = Transformer(spec, flash=False)
    assert sum(p.numel() for p in module.parameters()) == num_params(spec)
    matrices, others = [], []
    for parameter_name, parameter in module.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        in_layer = parameter.ndim == 2 and "layers" in parameter_name
        (matrices if in_layer else others).append(parameter)
    if optimizer == "muon":
        made = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    elif optimizer == "sgd":
        made = [torch.optim.SGD(matrices + others, momentum=0.9)]
    else:
        made = [{"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}[optimizer](matrices + others)]
    num_bytes = 0
    for each in made:
        each.step()
        tensors = [v for state in each.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim]
        num_bytes += sum(v.numel() * v.element_size() for v in tensors)
    assert optimizer_bytes(job) == pytest.approx(num_bytes, rel=1e-12)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"])
def test_matrices_hold_almost_all_parameters_of_a_layer(make_job, name):
    model = make_job(name).model
    for experts in (False, True) if model.moe else (False,):
        size = sum(
            rows * columns * count for part in layer_matrices(model, experts=experts) for rows, columns, count in part
        )
        whole = layer_params(model, experts=experts)
        assert 0.998 * whole < size <= whole


# Mixtral 8x7B, https://huggingface.co/mistralai/Mixtral-8x7B-v0.1: shapes of the tensors of its checkpoint
LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (8, 4096)]
EXPERT = [(14336, 4096), (4096, 14336), (14336, 4096)]
ENDS = [(32000, 4096), (32000, 4096)]
VECTORS = 32 * 2 * 4096 + 4096


@pytest.mark.parametrize(("text", "devices", "ep"), [("tp=1", 1, 1), ("tp=1,ep=4,dp=4,zero=0", 4, 4)])
def test_states_of_a_mixture_are_those_of_its_tensors(make_job, text, devices, ep):
    """Muon keeps one mean of a matrix, two of other weights; Adafactor keeps row and column sums, and whole vectors."""
    found = {
        each: optimizer_bytes(
            make_job("mixtral-8x7b", precision="fp32", settings=(f"training.optimizer={each}",)), text, devices
        )
        for each in ("muon", "adafactor", "adamw")
    }
    matrices, experts = 32 * LAYER, 32 * 8 * EXPERT
    size = sum(a * b for a, b in matrices) + sum(a * b for a, b in experts) / ep
    others = sum(a * b for a, b in ENDS) + VECTORS
    assert found["adamw"] == pytest.approx(4 * 2 * (size + others))
    assert found["muon"] == pytest.approx(4 * (size + 2 * others))
    sums = sum(a + b for a, b in matrices + ENDS) + sum(a + b for a, b in experts) / ep
    assert found["adafactor"] == pytest.approx(4 * (sums + VECTORS))


RECIPE_BYTES = {  # for each parameter on one device: weights, gradients, optimizer state of AdamW
    "zero-16": 16,
    "textbook-20": 20,
    "megatron-18": 18,
    "pure-bf16": 8,
    "precision-aware-fp32": 14,
    "precision-aware": 10,
    "fp8-moments": 8,
}


@pytest.mark.parametrize("recipe", NAMED_RECIPES)
def test_bytes_of_named_recipes(make_job, recipe):
    job = make_job(settings=(f"training.memory_recipe={recipe}",))
    layout = parse_layout("tp=1", num_layers=96, num_devices=1)
    assert sum(float(b) for b in state_bytes_per_param(job, layout)) == RECIPE_BYTES[recipe]


@pytest.mark.parametrize("recipe", NAMED_RECIPES)
def test_all_of_a_named_recipe_is_sharded_by_zero_3(make_job, recipe):
    job = make_job("llama3-8b", engine="fsdp", settings=(f"training.memory_recipe={recipe}",))
    layout = parse_layout("dp=64,zero=3", num_layers=32, num_devices=64)
    assert sum(float(b) for b in state_bytes_per_param(job, layout)) == pytest.approx(RECIPE_BYTES[recipe] / 64)


OPTIMIZERS = ("adamw", "adamw-8bit", "sgd", "adafactor", "muon")


@given(
    name=st.sampled_from(["llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v2-lite"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 3]),
    dp=st.sampled_from([1, 8]),
    zero=st.sampled_from([0, 1, 3]),
)
def test_no_optimizer_keeps_more_than_adamw(make_job, name, optimizer, tp, pp, dp, zero):
    text = f"tp={tp},pp={pp},dp={dp},zero={zero}"
    kept, adamw = (
        optimizer_bytes(make_job(name, engine="fsdp", settings=(f"training.optimizer={each}",)), text, tp * pp * dp)
        for each in (optimizer, "adamw")
    )
    assert 0 < kept <= adamw * (1 + 1e-12)


@given(
    recipe=st.sampled_from(sorted(NAMED_RECIPES)),
    dp=st.sampled_from([1, 2, 16]),
    pp=st.sampled_from([1, 4]),
    name=st.sampled_from(["llama3-8b", "mixtral-8x7b"]),
)
def test_states_of_a_recipe_never_grow_with_the_zero_stage(make_job, recipe, dp, pp, name):
    job = make_job(name, engine="deepspeed", settings=(f"training.memory_recipe={recipe}",))
    totals = []
    for zero in range(4):
        layout = parse_layout(f"pp={pp},dp={dp},zero={zero}", num_layers=32, num_devices=64)
        totals.append(sum(float(b) for b in state_bytes_per_param(job, layout)))
    if recipe == "pure-bf16":  # from ZeRO-1 on, DeepSpeed clones its shard of such weights
        totals = totals[1:]
    assert totals == sorted(totals, reverse=True)
    assert dp > 1 or len(set(totals)) == 1


def test_an_update_of_adamw_moves_52_bytes_and_muon_multiplies_matrices(make_job):
    seconds = {
        each: optimizer_seconds(make_job(engine="fsdp", settings=(f"training.optimizer={each}",)), 1e9)
        for each in OPTIMIZERS
    }
    job = make_job(engine="fsdp")
    device = job.cluster.device
    per_byte = 1e9 / (device.memory_bandwidth * device.efficiency.memory)
    assert seconds["adamw"] == pytest.approx(52 * per_byte, rel=1e-3)
    assert max(seconds.values()) == seconds["adamw"]
    layout = parse_layout("dp=1", num_layers=96, num_devices=1)
    assert newton_schulz_seconds(job, layout, stages_of(job, layout)) == 0
    muon = make_job(engine="fsdp", settings=("training.optimizer=muon",))
    h, layers = muon.model.hidden_size, muon.model.num_layers
    # four square matrices: 4 h^3 + 2 h^3 an iteration; two of (h, 4h): 16 h^3 + 2 h^3; 5 iterations
    flops = 5 * layers * (3 * 6 + 2 * 18 + 6) * h**3
    rate = device.peak["bf16"] * device.efficiency.matmul
    assert newton_schulz_seconds(muon, layout, stages_of(muon, layout))[0] == pytest.approx(flops / rate)


@pytest.mark.parametrize(
    ("engine", "setting", "words"),
    [
        ("torch", "training.optimizer=muon", "no optimizer muon"),
        ("torch", "training.memory_recipe=pure-bf16", "by recipe pure-bf16"),
        ("fsdp", "training.memory_recipe=precision-aware", "by recipe precision-aware"),
    ],
)
def test_what_an_engine_does_not_run_is_refused(make_job, engine, setting, words):
    job = make_job("llama3-8b", engine=engine, settings=(setting,))
    layout = parse_layout("dp=64,zero=2", num_layers=32, num_devices=64)
    assert [why for why in broken_rules(job, layout) if words in why]
    assert not [why for why in broken_rules(make_job("llama3-8b", engine=engine), layout) if words in why]
