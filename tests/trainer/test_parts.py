"""The parts of the trainer that need no process group: model, data, learning rate, legality."""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 # what follows imports torch

from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from planner.cost.parameters import num_params
from planner.errors import EnvironmentProblem, ExitCode, InputError
from planner.layout import even_split
from planner.search.optimum.pricing import layout_at
from planner.search.space.constraints import Constraints
from planner.search.space.refusals import legal_degrees
from planner.search.space.space import Space
from planner.specs.blocks import RotaryScaling
from planner.specs.load import load_job
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainer import __main__ as program
from planner.trainer import cross_entropy as loss
from planner.trainer.attention import rotary_frequencies, rotate
from planner.trainer.model import Transformer, initial_value
from planner.trainer.norms import RmsNorm
from planner.trainer.obstacles import check_plan
from planner.trainer.optimizer import learning_rate
from planner.trainer.unpickle import SafeReader

SHAPE = {"num_layers": 3, "hidden_size": 48, "num_heads": 6, "vocab_size": 300, "max_sequence_length": 40}


@pytest.mark.parametrize(
    "overrides",
    [
        {"architecture": "gpt", "ffn_hidden_size": 100},
        {"architecture": "gpt", "ffn_hidden_size": 100, "tied_embeddings": False, "mlp_bias": False},
        {"architecture": "llama", "ffn_hidden_size": 88, "num_kv_heads": 2},
        {"architecture": "llama", "ffn_hidden_size": 88, "tied_embeddings": True, "head_size": 16},
        {"architecture": "llama", "ffn_hidden_size": 88, "attention_bias": True, "num_kv_heads": 1},
        {"architecture": "qwen2", "ffn_hidden_size": 88, "num_kv_heads": 2},
        {"architecture": "gpt", "ffn_hidden_size": 100, "extra_positions": 2},
    ],
)
def test_the_model_has_the_parameters_that_the_plan_counts(overrides):
    spec = ModelSpec(name="m", **(SHAPE | overrides))
    with torch.device("meta"):
        model = Transformer(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_params(spec)


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_a_position_sees_only_those_before_it(architecture):
    spec = ModelSpec(name="m", architecture=architecture, ffn_hidden_size=64, **SHAPE)
    model = Transformer(spec)
    for name, parameter in model.named_parameters():
        parameter.data = initial_value(name, parameter.shape, spec, seed=1)
    tokens = torch.randint(0, 300, (1, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 300
    same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same[:12].all()
    assert not same[12:].any()


def test_the_first_loss_is_that_of_a_uniform_guess():
    spec = ModelSpec(name="m", architecture="llama", ffn_hidden_size=64, **SHAPE)
    model = Transformer(spec)
    for name, parameter in model.named_parameters():
        parameter.data = initial_value(name, parameter.shape, spec, seed=1)
    tokens = torch.randint(0, 300, (4, 33), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(300), abs=0.05)


def test_rotary_embedding_is_a_rotation_by_relative_position():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator).expand(2, 1, 1, 30, 8)
    scores = rotate(query, 10_000.0) @ rotate(key, 10_000.0).transpose(-1, -2)
    for distance in (-3, 0, 5):
        diagonal = scores[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    pairs = torch.view_as_complex(torch.stack((query[0, 0, 7, :4], query[0, 0, 7, 4:]), dim=-1).contiguous())
    turned = pairs * torch.exp(1j * 7 * 10_000.0 ** -(torch.arange(4) / 4))
    torch.testing.assert_close(rotate(query, 10_000.0)[0, 0, 7], torch.cat((turned.real, turned.imag)))


def test_scaled_rotary_frequencies_are_those_of_transformers():
    """Lengths with which some waves stay unchanged, some are blended, and the others are slowed down."""
    modeling = pytest.importorskip("transformers.modeling_rope_utils")
    configuration = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    wanted, _ = modeling.ROPE_INIT_FUNCTIONS["llama3"](configuration, torch.device("cpu"))
    scaling = RotaryScaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_max_sequence_length=8192)
    found = rotary_frequencies(64, 500_000.0, scaling)
    plain = rotary_frequencies(64, 500_000.0)
    torch.testing.assert_close(found, wanted)
    # pair i turns 8192 / (2 pi) * 500000^(-i / 32) times: more than 4 times up to i = 14, less than once from 18 on
    assert [int((found / plain).isclose(torch.tensor(each)).sum()) for each in (1.0, 1 / 8)] == [15, 14]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_the_lean_norm_is_torchs_norm(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    x, out_grad = (torch.randn(3, 5, 16, generator=generator).to(dtype) for _ in range(2))
    norm = RmsNorm(16, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(16, generator=generator).to(dtype)
    results = []
    for forward in (norm, lambda x: torch.nn.functional.rms_norm(x, (16,), norm.weight, 1e-5)):
        x = x.detach().requires_grad_()
        y = forward(x)
        results.append((y.detach(), *torch.autograd.grad(y, (x, norm.weight), out_grad)))
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=tolerance, atol=tolerance)


class _ByGetattr:
    """Pickles an enum member as Python 3.11.0 to 3.11.3 do: `getattr(owner, name)`."""

    def __init__(self, owner: object, name: str) -> None:
        self.parts = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.parts


def test_a_checkpoint_written_by_an_early_python_311_is_read(tmp_path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_ByGetattr(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")))
    assert SafeReader(tmp_path).read_metadata() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@pytest.mark.parametrize(
    "harmful",
    [_ByGetattr(_MEM_FORMAT_ENCODING, "__subclasses__"), _ByGetattr(torch.Size, "mro"), os.system],
    ids=["not a member", "of another class", "not of tensors"],
)
def test_metadata_that_reaches_for_more_is_refused(harmful, tmp_path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(harmful))
    with pytest.raises(EnvironmentProblem, match="which tensors do not need"):
        SafeReader(tmp_path).read_metadata()


def test_the_learning_rate_is_torchs_cosine():
    training = TrainingSpec(sequence_length=8, global_batch_size=8, learning_rate=0.5, warmup_steps=4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16, eta_min=0.05)
    assert [learning_rate(step, 20, training) for step in range(1, 5)] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    for step in range(5, 21):
        optimizer.step()
        cosine.step()
        assert learning_rate(step, 20, training) == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("layout", "training", "message"),
    [
        ("tp=2,sp=0,mbs=8", {}, "sequence parallelism"),
        ("tp=8,mbs=8", {}, "tp=8 does not divide"),
        ("pp=2,schedule=zb-h1,mbs=2", {}, "no schedule zb-h1"),
        ("pp=2,dp=2,zero=2,mbs=2", {}, "zero is 0 or 1"),
        ("pp=4,mbs=4", {}, "cannot fill 4 stages"),
        ("dp=1,mbs=3", {}, "does not divide the batch"),
        ("dp=1,interleave=2", {}, "interleave needs a pipeline"),
        ("dp=1,recompute=selective", {}, "none or full"),
        ("dp=1", {"precision": "fp4"}, "no fp4"),
        ("dp=1", {"precision": "fp8", "sequence_length": 20}, "take tokens by 16, and a rank has 20"),
        ("pp=2,schedule=zbv,interleave=1,mbs=2", {}, "two chunks per stage"),
        ("pp=2,schedule=dualpipev,mbs=4", {}, "dualpipev needs 4 microbatches"),
        ("dp=1", {"dropout": 0.1}, "no dropout"),
        ("dp=1", {"optimizer": "sgd"}, "no sgd"),
        ("dp=1", {"lora_rank": 4, "precision": "bf16"}, "without adapters(.|\n)*an engine that has them"),
        ("pp=4,mbs=2,layers_per_stage=1/0/2/1", {}, "between the first and the last needs a layer"),
        ("cp=3,mbs=8", {}, "cp=3 do not cut 32 positions"),
        ("ep=2,mbs=8", {}, "ep=2 does not divide the experts, 1"),
        ("etp=2,mbs=8", {}, "cuts no single expert"),
    ],
)
def test_what_the_trainer_cannot_run_is_refused(layout, training, message, make_plan):
    with pytest.raises(InputError, match=message):
        check_plan(make_plan(layout, **training))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
@pytest.mark.parametrize("batch", [2, 12])
@pytest.mark.parametrize("vocab_size", [500, 501])
def test_what_the_search_may_plan_the_trainer_runs(schedule, batch, vocab_size, make_plan):
    job = load_job(
        model="tiny-llama", cluster="dgx-a100", engine="torch", gpus=8, sequence_length=64, global_batch_size=batch,
        settings=("model.num_layers=8", f"model.vocab_size={vocab_size}"),
    )  # fmt: skip
    plan = replace(make_plan("dp=1"), model=job.model, cluster=job.cluster, training=job.training, engine=job.engine)
    legal = list(legal_degrees(Space(job, Constraints.parse([f"schedule={schedule}"], []))))
    assert legal
    for degrees in legal:
        for one in map(degrees.take, range(len(degrees))):
            split = even_split(8, one.pp, one.interleave)
            layers = [sum(split[stage :: one.pp]) for stage in range(one.pp)]
            check_plan(replace(plan, layout=layout_at(one, layers, [0] * one.pp)))


def _raise_wrapped() -> None:
    cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
    raise RuntimeError("[Stage 1] failed to run forward: args: ...") from cause


def _raise_allocator() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("fail", [_raise_wrapped, _raise_allocator])
def test_a_rank_without_memory_says_so_and_names_itself(fail, monkeypatch, tmp_path, capsys):
    """torch's pipeline hides errors of a stage; the CPU allocator's error is identified only by its text."""
    monkeypatch.setattr(program, "_train", lambda _: fail())
    monkeypatch.setattr(program, "die_with_parent", lambda: None)
    monkeypatch.setattr(program, "_quiet_torch", lambda: None)
    monkeypatch.setenv("RANK", "3")
    assert program.main(["plan.json", f"--output={tmp_path}"]) == ExitCode.RANK_FAILED
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["reason"].startswith("rank 3 is out of memory: ")
    assert (status["state"], status["rank"], status["exit_code"]) == ("failed", 3, 6)
    messages = capsys.readouterr().err
    assert "rank 3 is out of memory" in messages
    assert "Traceback" not in messages


@pytest.mark.parametrize(("tp", "cut"), [(1, {"query", "key", "value", "output"}), (2, {"query", "output"})])
def test_8_bits_are_for_the_layers_products_that_the_kernel_takes(tp, cut, make_plan):
    """With 2 key heads of 8 features, each of two ranks holds 8 columns, but the kernel needs 16."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    from planner.trainer.float8 import apply_float8

    plan = make_plan(f"tp={tp}", "moe")
    with torch.device("meta"):
        model = Transformer(plan.model)
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    apply_float8(model, plan.layout, emulate=True)
    found = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert {name.split(".")[-1] for name in found if ".attention." in name} == cut
    assert {name for name in found if ".ffn." in name} >= {f"layers.0.ffn.{each}" for each in ("gate", "up", "down")}
    assert not [name for name in found if "router" in name or "head" in name or "experts" in name]
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before


def test_without_torchao_fp8_says_what_to_install(make_plan, monkeypatch):
    from planner.trainer.float8 import apply_float8

    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    plan = make_plan("dp=1")
    with pytest.raises(EnvironmentProblem, match=r"needs torchao.*\n.*parallel-planner\[fp8\]"):
        apply_float8(Transformer(plan.model), plan.layout, emulate=True)


@pytest.mark.parametrize(
    ("overrides", "feature"),
    [
        ({"architecture": "bert"}, "encoder"),
        ({"architecture": "gpt", "position": "alibi"}, "alibi"),
        ({"architecture": "llama", "attention_sinks": True}, "sinks"),
        ({"architecture": "llama", "mtp_layers": 1}, "mtp"),
    ],
)
def test_a_model_that_the_trainer_lacks_is_refused(overrides, feature, make_plan):
    spec = ModelSpec(name="m", ffn_hidden_size=64, **SHAPE, **overrides)
    plan = make_plan("dp=1,layers_per_stage=4")
    with pytest.raises(InputError, match=feature):
        check_plan(replace(plan, model=spec, layout=replace(plan.layout, layers_per_stage=(3,))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 300, 10**6])  # a row at a time, blocks that do not come out even, all at once
def test_the_loss_is_torchs_and_its_gradient_takes_the_logits_place(dtype, elements, monkeypatch):
    monkeypatch.setattr(loss, "ELEMENTS_AT_ONCE", elements)
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(101, 5)
    targets = torch.randint(101, (7,))
    expected = torch.nn.functional.cross_entropy((hidden @ weight.T).to(dtype).float(), targets, reduction="sum")
    (wanted,) = torch.autograd.grad(3 * expected, hidden)
    logits = (hidden @ weight.T).to(dtype)
    found = loss.cross_entropy(logits, targets, None)
    torch.testing.assert_close(found, expected)
    place = logits.data_ptr()
    logits.register_hook(lambda gradient: None if gradient.data_ptr() == place else pytest.fail("a second tensor"))
    (gradient,) = torch.autograd.grad(3 * found, hidden)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)
