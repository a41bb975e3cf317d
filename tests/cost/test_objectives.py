"""Objectives other than next tokens: passes, pairs, the weights of a reference model, and logits.

The counts are of TRL 1.9.2's own trainers, run on a CPU with a Llama of 3 layers, width 64, 4 heads (2 of keys), a
feed-forward block of 160 and untied ends, for 2 samples a step: calls of each model, FLOPs of matrix products
(torch.utils.flop_counter), bytes of parameters, and bytes of tensors as large as the logits at the peak.
"""

from __future__ import annotations

import pytest
import yaml

from planner.api import estimate_layout, plan_job
from planner.cost.flops import attention_flops_per_token, chunk_flops, model_flops_per_step
from planner.cost.ledger import LineName
from planner.cost.loss import bytes_moved_per_logit, logits_bytes, num_logits
from planner.layout_text import parse_layout
from planner.sums import sum_of

TINY = {
    "name": "tiny",
    "architecture": "llama",
    "num_layers": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 160,
    "max_sequence_length": 4096,
    "tied_embeddings": False,
}
PER_LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160  # weights of the matrix products
PARAMS = 583_424 // 4  # of TRL's policy, and of its reference model


@pytest.fixture
def priced(tmp_path):
    """The plan of a layout on one device: the tiny model, with a vocabulary of this size."""

    def price(objective="dpo", layout="zero=0,mbs=2,recompute=none", vocab_size=128, length=64, model=None, **more):
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "vocab_size": vocab_size}))
        given = {"engine": "deepspeed", "gpus": 1, "global_batch": 2, **more}
        settings = (f"training.objective={objective}", *given.pop("settings", ()))
        path = model or str(tmp_path / "tiny.yaml")
        return estimate_layout(path, "dgx-a100", layout=layout, seq_len=length, settings=settings, **given)

    return price


def lines_of(plan, stage=0):
    return {line.name: float(line.num_bytes) for line in plan.memory[stage].lines}


def seconds_of(plan):
    return {line.name: float(line.busy_seconds) for line in plan.time}


@pytest.mark.parametrize(
    ("objective", "sequences", "passes", "counted"),
    [
        ("dpo", 4, 4, 281_018_368),  # calls: the policy with 4 sequences, the reference with 4 without gradients
        ("kto", 2, 6, 210_763_776),  # each model with 2 sequences and, without gradients, with 2 of other prompts
        ("orpo", 4, 3, 286_507_008 * 64 / 87),  # TRL padded the pairs to 87 tokens
    ],
)
def test_flops_are_those_that_trl_counts(objective, sequences, passes, counted, priced):
    plan = priced(objective)
    attention = passes * attention_flops_per_token(plan.model, 64, causal=True) * plan.training.step_tokens
    found = model_flops_per_step(plan.model, plan.training) - attention  # fused attention counts as no product
    assert found == 2 * (3 * PER_LAYER + 128 * 64) * 64 * sequences * passes
    assert found == pytest.approx(counted, rel=1e-12)
    assert plan.training.step_tokens == 64 * sequences


def test_a_reward_model_has_one_output_and_pairs(priced):
    plan = priced("reward")
    assert plan.model.head_outputs == 1
    attention = 3 * attention_flops_per_token(plan.model, 64, causal=True) * plan.training.step_tokens
    assert model_flops_per_step(plan.model, plan.training) - attention == 3 * 2 * (3 * PER_LAYER + 64) * 256
    assert lines_of(plan)[LineName.PARAMS] == 2 * (PARAMS - 127 * 64)
    tied = priced("reward", model="tiny-llama", engine="fsdp", layout="zero=3,mbs=1", global_batch=1)
    assert not tied.model.tied_embeddings


def test_a_head_of_values_beside_the_vocabularys_leaves_that_without_gradients(priced, make_job):
    """TRL's AutoModelForCausalLMWithValueHead; a classifier of one output has no logits of the vocabulary."""
    forward, backward = 2 * (3 * PER_LAYER + 128 * 64) * 256, 2 * 2 * 3 * PER_LAYER * 256
    plan = priced("value-head")
    attention = 3 * attention_flops_per_token(plan.model, 64, causal=True) * plan.training.step_tokens
    assert model_flops_per_step(plan.model, plan.training) - attention == forward + backward
    for adapters in ((), ("training.lora_rank=8",)):
        more = {"settings": ("training.objective=value-head", *adapters), "engine": "fsdp", "gpus": 1, "batch": 4}
        job = make_job("llama3-8b", **more)
        passes = chunk_flops(job, parse_layout("zero=0,mbs=1", num_layers=32, num_devices=1))
        found = sum_of(float(passes[name][0]) for name in ("forward", "backward_input", "backward_weight"))
        assert found * 4 == pytest.approx(model_flops_per_step(job.model, job.training), rel=1e-12)
    assert lines_of(plan)[LineName.PARAMS] == 2 * PARAMS
    none, forward, both = (
        sum_of(seconds_of(priced(each, vocab_size=65_536)).values()) for each in ("reward", "value-head", "orpo")
    )
    assert 0 < forward - none < (both - none) / 3


COUNTED = {
    # rank 0 of transformers 5.23, accelerate 1.15, deepspeed 0.19.8 and peft 0.19.1 on fake tensors, counted as
    # `planner verify` counts: Llama 3 8B with 4 layers, 2 steps of a pair of 2,048 tokens each, the loss of pairs;
    # `reward` with AutoModelForSequenceClassification, `value-head` with TRL 0.24's class
    ("reward", "full-one-none"): 26.612,
    ("reward", "lora-one-none"): 5.985,
    ("reward", "full-fsdp2-full"): 14.860,
    ("reward", "lora-fsdp2-none"): 5.017,
    ("reward", "full-zero2-none"): 18.364,
    ("reward", "full-zero3-full"): 16.376,
    ("reward", "lora-zero2-none"): 7.559,  # peft trains the head (SEQ_CLS), whose gradient comes first
    ("reward", "lora-zero3-none"): 7.461,
    ("value-head", "full-one-none"): 32.296,
    ("value-head", "lora-one-none"): 10.718,
    ("value-head", "full-fsdp2-full"): 17.823,
    ("value-head", "full-zero2-none"): 24.121,
    ("value-head", "full-zero3-full"): 22.154,
    ("value-head", "lora-zero3-none"): 10.769,
    ("value-head", "nf4-one-none"): 9.423,
}


@pytest.mark.parametrize(("objective", "case"), COUNTED)
def test_reward_models_take_the_bytes_of_the_real_modules(objective, case, priced):
    trained, where, recompute = case.split("-")
    engine, gpus, zero = {
        "one": ("fsdp", 1, 3),
        "fsdp2": ("fsdp", 2, 3),
        "zero2": ("deepspeed", 2, 2),
        "zero3": ("deepspeed", 2, 3),
    }[where]
    settings = ["model.num_layers=4", *["training.lora_rank=16"] * (trained != "full")]
    settings += ["training.frozen_weights=nf4"] * (trained == "nf4")
    more = {"engine": engine, "gpus": gpus, "global_batch": 2 * gpus, "length": 2048, "settings": settings}
    layout = f"dp={gpus},zero={zero},mbs=1,recompute={recompute}"
    lines = lines_of(priced(objective, layout, model="llama3-8b", **more))
    held = sum_of(each for name, each in lines.items() if name != LineName.RUNTIME)
    near = 0.02 if objective == "value-head" and where != "zero3" else 0.05  # 0.02: with the outputs of all layers
    assert held == pytest.approx(COUNTED[objective, case] * 1e9, rel=near)


@pytest.mark.parametrize(("precision", "moved", "held"), [("bf16", 6.0, 6.0), ("fp32", 0.0, 4.0)])
def test_logits_that_no_loss_reads_are_copied_to_fp32_unless_they_are(precision, moved, held, make_job):
    """TRL 0.24, models/modeling_value_head.py: `if lm_logits.dtype != torch.float32: lm_logits = lm_logits.float()`."""
    settings = ("training.objective=value-head", f"training.precision={precision}")
    job = make_job("llama3-8b", engine="fsdp", gpus=1, batch=4, settings=settings)
    layout = parse_layout("zero=0,mbs=1", num_layers=32, num_devices=1)
    assert bytes_moved_per_logit(job) == (moved, 0.0)
    assert float(logits_bytes(job, layout)) == held * num_logits(job, layout)


def test_the_weights_of_the_reference_are_on_every_device_unless_zero_3_shards_them(priced):
    plain = priced("next-token", "zero=0,mbs=2,recompute=none")
    whole = priced("dpo", "zero=2,mbs=1,recompute=none", gpus=2)
    shard = priced("dpo", "zero=3,mbs=1,recompute=none", gpus=2)
    assert LineName.REFERENCE_PARAMS not in lines_of(plain)
    assert lines_of(whole)[LineName.REFERENCE_PARAMS] == 2 * PARAMS
    assert lines_of(shard)[LineName.REFERENCE_PARAMS] == PARAMS
    fsdp = priced("dpo", "zero=2,mbs=1,recompute=none", gpus=2, engine="fsdp")  # gathered once, and never freed
    assert lines_of(fsdp)[LineName.REFERENCE_PARAMS] == 2 * PARAMS + PARAMS


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        (["training.lora_rank=8"], 1),  # the base model is the reference
        (["training.reference=none"], 0),  # log-probabilities from before the training
        (["training.reference=host"], 1),
        (["training.reference=none", "training.forward_passes=2"], 2),
    ],
)
def test_a_reference_without_weights_of_its_own_takes_no_memory(settings, passes, priced):
    plan = priced("dpo", settings=settings)
    assert LineName.REFERENCE_PARAMS not in lines_of(plan)
    assert plan.training.ungraded_passes == passes
    assert (LineName.UNGRADED in seconds_of(plan)) == (passes > 0)


@pytest.mark.parametrize(
    ("objective", "engine", "counted"),
    [
        *[("dpo", "deepspeed", 7.99), ("dpo", "fsdp", 15.98), ("kto", "fsdp", 15.98)],
        *[("orpo", "fsdp", 19.99), ("orpo", "deepspeed", 7.01)],
    ],
)
def test_logits_take_the_bytes_that_trl_holds_at_its_peak(objective, engine, counted, priced):
    """Accelerate converts the outputs of a model under FSDP to 32 bits, and DeepSpeed's stay in 16 bits."""
    layout = f"zero={3 if engine == 'fsdp' else 0},mbs=2,recompute=none"
    small, large = (priced(objective, layout, vocab, 512, engine=engine) for vocab in (16_384, 32_768))
    more = lines_of(large)[LineName.TRANSIENTS] - lines_of(small)[LineName.TRANSIENTS]
    logits = 16_384 * 512 * 2 * large.training.method.sequences
    ends = 16_384 * 64 * (8 if engine == "fsdp" else 0)  # gathered rows of the head and their gradients
    assert more / logits == pytest.approx(counted, rel=0.01, abs=ends / logits)


def test_pairs_cost_as_many_seconds_as_twice_the_sequences(priced):
    pairs = priced("orpo", "zero=0,mbs=1,recompute=full", global_batch=4)
    alone = priced("next-token", "zero=0,mbs=2,recompute=full", global_batch=8)
    assert seconds_of(pairs) == seconds_of(alone)
    assert lines_of(pairs)[LineName.ACTIVATIONS] == lines_of(alone)[LineName.ACTIVATIONS]


@pytest.mark.parametrize(
    "layout", ["tp=2,pp=2,zero=1,mbs=1", "pp=4,interleave=2,zero=1,mbs=1", "tp=4,cp=2,zero=1,mbs=1"]
)
def test_forward_passes_without_gradients_add_a_forward_pass_each(layout, priced):
    """Their seconds are proportional to their number, in every line of work and of communication."""
    more = {"model": "llama3-8b", "engine": "megatron", "gpus": 16, "global_batch": 32, "length": 4096}
    none, one, two = (
        priced("dpo", layout, settings=["training.reference=none", f"training.forward_passes={number}"], **more)
        for number in (0, 1, 2)
    )
    plain, once, twice = map(seconds_of, (none, one, two))
    assert twice[LineName.UNGRADED] == pytest.approx(2 * once[LineName.UNGRADED])
    assert once[LineName.COMPUTE] == plain[LineName.COMPUTE]
    assert 0.25 < once[LineName.UNGRADED] / once[LineName.COMPUTE] < 0.45
    for name in (LineName.TP_COMM, LineName.PP_COMM, LineName.CP_COMM):
        assert twice[name] - once[name] == pytest.approx(once[name] - plain[name])
        assert once[name] - plain[name] <= plain[name] / 2 * (1 + 1e-9)
    assert once[LineName.PP_COMM] == pytest.approx(1.5 * plain[LineName.PP_COMM])  # the activation again, no gradient
    assert two.step_seconds - one.step_seconds == pytest.approx(one.step_seconds - none.step_seconds, rel=0.05)


def test_zero_3_gathers_the_weights_of_the_reference_for_its_pass(priced):
    more = {"model": "llama3-8b", "engine": "fsdp", "gpus": 16, "global_batch": 16, "length": 4096}
    none, one = (
        seconds_of(priced("orpo", "zero=3,mbs=1,recompute=full", settings=[f"training.forward_passes={n}"], **more))
        for n in (0, 1)
    )
    gathers = one[LineName.DP_COMM] - none[LineName.DP_COMM]
    assert 0.2 * none[LineName.DP_COMM] < gathers < 0.5 * none[LineName.DP_COMM]  # of two gathers and a reduction


def test_a_reference_that_is_one_unit_is_gathered_whole(priced):
    """TRL wraps the reference of FSDP2 without wrapping its layers (models/utils.py, prepare_fsdp)."""
    more = {"model": "llama3-8b", "engine": "fsdp", "gpus": 8, "global_batch": 8, "length": 1024}
    layers, whole = (
        lines_of(
            priced(
                "dpo", "zero=3,mbs=1,recompute=full", settings=[f"engine.memory.gathers_whole_reference={on}"], **more
            )
        )
        for on in ("false", "true")
    )
    assert whole[LineName.TRANSIENTS] - layers[LineName.TRANSIENTS] > 0.8 * 16e9


def test_a_rollout_engine_that_does_not_sleep_keeps_its_share(priced):
    plan = priced("grpo", "zero=3,mbs=1,recompute=full", settings=["training.rollout_memory=0.3"], gpus=2)
    assert lines_of(plan)[LineName.ROLLOUT] == pytest.approx(0.3 * plan.cluster.pools[0].device.memory)
    assert LineName.ROLLOUT not in lines_of(priced("grpo", "zero=3,mbs=1,recompute=full", gpus=2))


def test_the_search_takes_the_reference_into_account():
    def plan(objective):
        return plan_job("llama3-8b", "dgx-a100", gpus=8, seq_len=4096, global_batch=32, engine="megatron",
                        settings=[f"training.objective={objective}"], check=True)  # fmt: skip

    plain, preferences = plan("next-token"), plan("dpo")
    assert preferences.fits
    assert lines_of(preferences)[LineName.REFERENCE_PARAMS] > 0
    again = estimate_layout("llama3-8b", "dgx-a100", gpus=8, seq_len=4096, global_batch=32, engine="megatron",
                            settings=["training.objective=dpo"], layout=preferences.layout)  # fmt: skip
    assert again.step_seconds == pytest.approx(preferences.step_seconds)
    assert preferences.step_seconds > 2.4 * plain.step_seconds  # two sequences, four passes in place of three


def test_weights_on_the_host_are_copied_again_for_each_pass_of_the_policy(priced):
    def copied(objective, passes):
        more = {"model": "llama3-8b", "gpus": 8, "global_batch": 8, "length": 1024}
        settings = [f"training.forward_passes={passes}"]
        plan = priced(objective, "zero=3,mbs=1,recompute=full,offload=params+states", settings=settings, **more)
        return seconds_of(plan)[LineName.HOST_COMM]

    none, one, two = (copied("grpo", passes) for passes in range(3))
    assert two - one == pytest.approx(one - none)
    assert one - none == pytest.approx(8.03e9 * 2 / 8 / (15.75e9 * 0.8), rel=0.02)
    assert copied("dpo", 1) - copied("dpo", 0) == pytest.approx(one - none)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_the_shards_of_a_reference_are_where_the_policy_has_its_own(engine, priced):
    """TRL, models/utils.py: prepare_deepspeed copies the configuration, prepare_fsdp takes the plugin's cpu_offload."""

    def held(objective, offload):
        layout = f"zero=3,mbs=1,recompute=full,offload={offload}"
        plan = priced(objective, layout, gpus=2, engine=engine, settings=["training.loss=whole"])
        return lines_of(plan), plan.memory[0].host

    states = "params+states" if engine == "deepspeed" else "optimizer"
    plain, moved = held("orpo", states), held("dpo", states)
    assert held("dpo", "none")[0][LineName.REFERENCE_PARAMS] == PARAMS  # two bytes each, on two ranks
    assert moved[0][LineName.REFERENCE_PARAMS] == 0
    assert moved[1].total_bytes - plain[1].total_bytes == pytest.approx(PARAMS)


def test_a_gather_after_the_update_hides_behind_one_pass_of_the_policy(priced):
    """Its modules start and await their own gathers: the pass of a reference, before or after, hides none of them."""
    more = {"model": "llama3-8b", "engine": "megatron", "gpus": 64, "global_batch": 64, "length": 512}

    def exposed(passes):
        plan = priced("dpo", "zero=1,mbs=1,recompute=none", settings=[f"training.forward_passes={passes}"], **more)
        line = next(each for each in plan.time if each.name == LineName.DP_COMM)
        return float(line.exposed_seconds), float(line.hidden_seconds)

    assert exposed(0)[1] > 0
    assert exposed(2) == pytest.approx(exposed(0))


def test_heads_for_further_tokens_run_in_passes_without_gradients(priced):
    """Megatron-LM computes the logits of all heads in evaluation, too (process_mtp_loss)."""
    more = {"model": "llama3-8b", "engine": "megatron", "gpus": 1, "global_batch": 1, "length": 512}

    def seconds(mtp_layers, vocab):
        settings = ["training.forward_passes=1", f"model.mtp_layers={mtp_layers}", f"model.vocab_size={vocab}"]
        plan = priced("dpo", "zero=0,mbs=1,recompute=none", settings=settings, **more)
        return seconds_of(plan)[LineName.UNGRADED]

    one, two = (seconds(mtp_layers, 256_000) - seconds(mtp_layers, 128_000) for mtp_layers in (0, 1))
    assert two == pytest.approx(2 * one)
