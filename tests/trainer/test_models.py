"""The modules of the trainer's models compared with plainly written formulas, and their size with the planner's."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 # what follows imports torch

from planner.cost.parameters import num_params
from planner.specs import library
from planner.specs.by_name import load_engine, load_model
from planner.specs.model import ModelSpec
from planner.trainer import mesh
from planner.trainer.attention import attend, rotate
from planner.trainer.context_parallel import held_positions
from planner.trainer.feed_forward import MixtureOfExperts
from planner.trainer.loss_scale import GROWS_AFTER, LossScale
from planner.trainer.model import Transformer, initial_value

SHAPE = {"num_layers": 4, "hidden_size": 48, "num_heads": 6, "vocab_size": 300, "max_sequence_length": 40}
MIXTURE = {"num_experts": 8, "experts_per_token": 3, "ffn_hidden_size": 20}


def torch_models() -> list[str]:
    runs = set(load_engine("torch").can.model_features)
    return [name for name in library.names("models") if set(load_model(name).features) <= runs]


def num_elements(spec: ModelSpec) -> int:
    with torch.device("meta"):
        model = Transformer(spec)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", torch_models())
def test_a_shipped_model_has_the_parameters_that_the_plan_counts(name):
    assert num_elements(load_model(name)) == num_params(load_model(name))


def test_every_kind_of_layer_has_the_parameters_that_the_plan_counts():
    assert len(torch_models()) > 60
    for name in torch_models():
        spec = load_model(name)
        every = spec.num_layers if not spec.moe else spec.moe.num_dense_layers + spec.moe.layer_frequency
        short = spec.model_copy(update={"num_layers": min(spec.num_layers, every, 3)})
        assert num_elements(short) == num_params(short), name


def build(spec: ModelSpec, seed: int = 1) -> Transformer:
    model = Transformer(spec)
    for name, parameter in model.named_parameters():
        parameter.data = initial_value(name, parameter.shape, spec, seed=seed)
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [0, 1, 3, 8, 19, 20, 50])
@pytest.mark.parametrize("cp", [1, 2, 5])
def test_attention_sees_its_window_and_nothing_later(window, cp):
    query, key, value = randn(2, 4, 20, 8), randn(2, 2, 20, 8, seed=1), randn(2, 2, 20, 6, seed=2)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) / math.sqrt(8)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    seen = (distance >= 0) & (distance < (window or 20))
    wanted = scores.masked_fill(~seen, -math.inf).softmax(-1) @ value.repeat_interleave(2, dim=1)
    found = torch.empty_like(wanted)
    for rank in range(cp):
        held = held_positions(20, cp, rank)
        rows = torch.cat([torch.arange(run.start, run.stop) for run in held])
        found[:, :, rows] = attend(query[:, :, rows], key, value, held, window)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_context_parallel_ranks_share_positions_and_work(cp):
    rows = [[row for run in held_positions(24, cp, rank) for row in run] for rank in range(cp)]
    assert sorted(row for own in rows for row in own) == list(range(24))
    assert len({sum(own) for own in rows}) == 1  # position i attends to i + 1 keys


@pytest.mark.parametrize("rank", [0, 16])
def test_latent_attention_is_its_formula(rank):
    """DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19, head by head."""
    mla = {"q_lora_rank": rank, "kv_lora_rank": 12, "nope_head_size": 8, "rope_head_size": 4, "value_head_size": 6}
    spec = ModelSpec(name="m", architecture="llama", ffn_hidden_size=64, mla=mla, **SHAPE)
    block = build(spec).layers["0"].attention
    x = randn(2, 10, 48)

    def norm(y, module):
        return y / (y.square().mean(-1, keepdim=True) + spec.norm_epsilon).sqrt() * module.weight

    latent = norm(x @ block.query_down.weight.T, block.query_norm) if rank else x
    shared = rotate((x @ block.rotary_key.weight.T)[:, None], spec.rope_theta)[:, 0]
    compressed = norm(x @ block.key_value_down.weight.T, block.key_value_norm)
    heads = []
    for head in range(6):
        query = latent @ block.query_up.weight[head * 12 : (head + 1) * 12].T
        turned = rotate(query[:, None, :, 8:], spec.rope_theta)[:, 0]
        up = compressed @ block.key_value_up.weight[head * 14 : (head + 1) * 14].T
        scores = (query[..., :8] @ up[..., :8].transpose(1, 2) + turned @ shared.transpose(1, 2)) / math.sqrt(12)
        later = torch.ones(10, 10).triu(1).bool()
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ up[..., 8:])
    torch.testing.assert_close(block(x), torch.cat(heads, -1) @ block.output.weight.T)


def mixture(**overrides) -> MixtureOfExperts:
    moe = MIXTURE | {"expert_bias": True, "router_bias": True, "shared_ffn_hidden_size": 16, "shared_gate": True}
    spec = ModelSpec(name="m", architecture="llama", ffn_hidden_size=64, moe=moe | overrides, **SHAPE)
    return build(spec).layers["0"].ffn


def expert(block: MixtureOfExperts, index: int, x: torch.Tensor) -> torch.Tensor:
    own = block.experts
    gate = x @ own.gate[index] + own.gate_bias[index]
    inner = gate * gate.sigmoid() * (x @ own.up[index] + own.up_bias[index])
    return inner @ own.down[index] + own.down_bias[index]


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_a_token_is_the_weighted_sum_of_its_experts(top_k):
    block, x = mixture(experts_per_token=top_k), randn(2, 7, 48)
    found = block(x)
    for token, result in zip(x.flatten(0, 1), found.flatten(0, 1), strict=True):
        scores = block.router(token).softmax(-1)
        chosen = scores.argsort(descending=True)[:top_k].tolist()
        total = scores[chosen].sum() if top_k > 1 else 1
        wanted = sum(scores[each] / total * expert(block, each, token) for each in chosen)
        wanted = wanted + block.shared(token) * block.shared_gate(token).sigmoid()
        torch.testing.assert_close(result, wanted)


def test_the_balance_loss_acts_as_if_it_were_added_to_the_loss():
    block, x = mixture(), randn(2, 7, 48)
    scores = block.router(x).softmax(-1)
    chosen = torch.zeros(2, 7, 8).scatter_(-1, scores.topk(3, dim=-1).indices, 1.0)
    added = (chosen.mean(1) * 8 / 3 * scores.mean(1)).sum()
    (wanted,) = torch.autograd.grad(block(x).square().sum() + 0.3 * added, block.router.weight)
    block.balance_weight = 0.3
    (found,) = torch.autograd.grad(block(x).square().sum(), block.router.weight)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("overrides", "formula"),
    [
        ({"architecture": "neox"}, lambda b, x: x + b.attention(b.attention_norm(x)) + b.ffn(b.ffn_norm(x))),
        (
            {"architecture": "falcon", "norms_per_layer": 1},
            lambda b, x: x + b.attention(b.attention_norm(x)) + b.ffn(b.attention_norm(x)),
        ),
        (
            {"architecture": "gemma"},
            lambda b, x: (
                (y := x + b.attention_post_norm(b.attention(b.attention_norm(x))))
                + b.ffn_post_norm(b.ffn(b.ffn_norm(y)))
            ),
        ),
    ],
)
def test_a_block_joins_its_parts_as_its_family_does(overrides, formula):
    block = build(ModelSpec(name="m", ffn_hidden_size=64, **SHAPE, **overrides)).layers["1"]
    x = randn(2, 9, 48)
    torch.testing.assert_close(block(x), formula(block, x))


def test_layers_are_global_and_have_experts_where_the_papers_say():
    gemma, llama, deepseek = load_model("gemma3-1b"), load_model("llama4-maverick"), load_model("deepseek-v2-lite")
    assert [gemma.window_of_layer(n) for n in range(7)] == [512] * 5 + [0, 512]
    assert [llama.layer_has_experts(n) for n in range(4)] == [False, True, False, True]
    assert [deepseek.layer_has_experts(n) for n in range(3)] == [False, True, True]


@pytest.mark.parametrize(
    "layout", ["tp=2,pp=2,dp=4,zero=1,hsdp=2,mbs=1", "tp=2,cp=2,dp=2,ep=4,zero=3", "cp=2,dp=4,ep=2", "tp=2,dp=4,ep=4"]
)
def test_the_meshes_have_the_rank_order_of_the_layout(layout, make_plan, monkeypatch):
    """dense: pp, then dp and cp, then tp; experts: runs of ep ranks, as `planner.cost.traffic` prices them."""

    class Recorder(mesh.DeviceMesh):
        def __init__(self, _: str, ranks: torch.Tensor, mesh_dim_names: tuple[str, ...]) -> None:
            self.ranks = ranks
            made[mesh_dim_names] = ranks

        def get_group(self, _: str) -> None:
            return None

    made: dict[tuple[str, ...], torch.Tensor] = {}
    monkeypatch.setattr(mesh, "DeviceMesh", Recorder)
    cut = make_plan(layout, "moe").layout
    mesh.make_meshes(cut, "cpu", has_experts=True)
    dense = made["pp", "dp_replicate", "dp_shard", "tp"]
    assert dense.shape == (cut.pp, cut.dp * cut.cp if not cut.zero else cut.hsdp, dense.shape[2], cut.tp)
    for rank in range(cut.world_size):
        pp, replica, shard, tp = (dense == rank).nonzero()[0].tolist()
        here = cut.coordinates(rank)
        assert (pp, tp) == (here["pp"], here["tp"])
        assert divmod(replica * dense.shape[2] + shard, cut.cp) == (here["dp"], here["cp"])
    experts = made["pp", "dp_replicate", "dp_shard", "ep"]
    assert torch.equal(experts.flatten(), torch.arange(cut.world_size))
    assert experts.shape[::3] == (cut.pp, cut.ep)


def test_first_values_differ_between_names_and_between_seeds():
    spec, shape = load_model("tiny-llama"), torch.Size((40, 40))
    values = [
        initial_value(name, shape, spec, seed=seed)
        for name in ("layers.0.attention.query.weight", "layers.0.attention.key.weight")
        for seed in (0, 1, 2**32)
    ]
    for index, one in enumerate(values):
        assert all(float((one * other).mean()) < 1e-4 for other in values[:index])  # 0.02^2 where they are equal


def test_the_loss_scale_halves_at_once_and_grows_slowly():
    scale = LossScale("fp16")
    first = scale.factor
    assert scale.shrinks()
    for _ in range(GROWS_AFTER):
        assert scale.factor == first / 2
        scale.note_good_step()
    assert scale.state == [first, 0]
    scale.state = [1.0, 5]
    assert not scale.shrinks()
    assert not LossScale("bf16").shrinks()
