"""Shapes of plain attention reach every count: torch's saved tensors and linear layers are the oracle."""

from __future__ import annotations

import pytest

from planner.cost.activations import activation_terms
from planner.cost.adapters import adapted_matrices, adapter_params, without_adapters
from planner.cost.flops import chunk_flops
from planner.cost.layers import layer_seconds
from planner.cost.operators import layer_of
from planner.cost.optimizers import layer_matrices
from planner.cost.parameters import layer_params, layer_params_on_device
from planner.cost.transfers import context_bytes
from planner.layout_text import parse_layout

torch = pytest.importorskip("torch")
nn = torch.nn

SIZES = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_size": 16, "ffn_hidden_size": 96}
LENGTH, BATCH = 32, 3
TARGETS = "training.lora_targets=[query, key, value, output]"

CHANGES = {
    "num_heads": 8,
    "num_kv_heads": 1,
    "head_size": 32,
    "value_head_size": 8,
    "keys_are_values": True,
    "shares_keys": True,
}
"""Fields that shape the projections of plain attention."""


class Attention(nn.Module):
    """Attention operator by operator, with rotated queries and keys; `given`: keys and values of an earlier layer."""

    def __init__(self, hidden_size, num_heads, num_kv_heads, head_size, value_head_size=0, device=None, **given):
        super().__init__()
        self.groups, self.size, self.value_size = num_kv_heads, head_size, value_head_size or head_size
        self.query = nn.Linear(hidden_size, num_heads * head_size, bias=False, device=device)
        if not given.get("shares_keys"):
            self.key = nn.Linear(hidden_size, num_kv_heads * head_size, bias=False, device=device)
            if not given.get("keys_are_values"):
                self.value = nn.Linear(hidden_size, num_kv_heads * self.value_size, bias=False, device=device)
        self.output = nn.Linear(num_heads * self.value_size, hidden_size, bias=False, device=device)

    def heads(self, x, size):
        return (
            x.unflatten(-1, (self.groups, -1, size)).permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()
        )  # (b, g, a/g s, size)

    def forward(self, x, angles, given=None):
        query = self.heads(self.query(x) * angles[: self.query.out_features], self.size)
        if given is None:
            keys = self.key(x)
            values = self.value(x) if hasattr(self, "value") else keys
            keys = keys * angles[: self.key.out_features]
            given = self.heads(keys, self.size), self.heads(values, self.value_size)
        found = torch.softmax(query @ given[0].mT, -1) @ given[1]
        return self.output(found.unflatten(2, (-1, x.shape[1])).permute(0, 3, 1, 2, 4).flatten(2)), given


def sizes_of(change):
    return {**SIZES, **change}


def attention(change, device=None):
    own = {name: value for name, value in sizes_of(change).items() if name != "ffn_hidden_size"}
    return Attention(**own, device=device)


def saved_bytes(layers):
    """Bytes of the distinct tensors that torch keeps for the backward pass of these layers, each after the one before.

    Weights and the table of angles are not counted.
    """
    kept, angles = {}, torch.rand(512)
    known = {each.untyped_storage().data_ptr() for layer in layers for each in (angles, *layer.parameters())}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    x, given = torch.rand(BATCH, LENGTH, SIZES["hidden_size"], requires_grad=True), None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in layers:
            x, given = layer(x, angles, given if not hasattr(layer, "key") else None)
    return sum(each.nbytes() for each in kept.values())


@pytest.fixture
def job_of(make_job):
    def job(change, *more, precision="fp32"):
        settings = [f"model.{name}={str(value).lower()}" for name, value in sizes_of(change).items()]
        settings += ["training.attention=unfused", "model.max_sequence_length=4096", *more]
        extra = {"gpus": 8, "batch": 24, "sequence": LENGTH, "engine": "torch", "precision": precision}
        return make_job("llama3-8b", settings=tuple(settings), **extra)

    return job


def layout_of(job, text):
    return parse_layout(text, num_layers=job.model.num_layers, num_devices=8)


def kept_bytes(job, text):
    names = ("attention input", "queries, keys and values", "attention output", "softmax")
    return sum(float(term.num_bytes) for term in activation_terms(job, layout_of(job, text)) if term.name in names)


@pytest.mark.parametrize("change", [{}, *({name: value} for name, value in CHANGES.items() if name != "shares_keys")])
def test_kept_bytes_are_torchs_saved_tensors(job_of, change):
    """Equal keys and values are two tensors, because only keys are rotated."""
    assert kept_bytes(job_of(change), f"dp=8,mbs={BATCH}") == saved_bytes([attention(change)])


@pytest.mark.parametrize("size", [8, 16, 24])
def test_a_layer_that_shares_keys_keeps_none_of_its_own(job_of, size):
    plain, shared = {"value_head_size": size}, {"value_head_size": size, "shares_keys": True}
    ours = sum(kept_bytes(job_of(each), f"dp=8,mbs={BATCH}") for each in (plain, shared))
    assert ours == saved_bytes([attention(plain), attention(shared)])


@pytest.mark.parametrize("change", [{}, *({name: value} for name, value in CHANGES.items())])
def test_parameters_adapters_and_muons_matrices_are_those_of_torchs_linear_layers(job_of, change):
    """An adapter of rank r has r (inputs + outputs) parameters for each linear layer that it stands beside."""
    layers = dict(attention(change, device="meta").named_children())
    targets = f"training.lora_targets=[{', '.join(layers)}]"
    job = job_of(change, "training.lora_rank=8", targets, precision="bf16")
    own = {
        name: (each.inputs, size)
        for each in layer_of(job.model, experts=False).products
        for name, size in each.outputs.items()
    }
    assert {name: own[name] for name in layers} == {
        name: (layer.in_features, layer.out_features) for name, layer in layers.items()
    }
    sides = sum(layer.in_features + layer.out_features for layer in layers.values())
    assert adapter_params(job.model, job.training) == 8 * sides * job.model.num_layers
    matrices = sorted(tuple(layer.weight.shape) for layer in layers.values())
    common, _ = layer_matrices(job.model, experts=False)
    assert sorted((rows, columns) for rows, columns, _ in common[: len(layers)]) == matrices
    assert not without_adapters(job)
    if missing := {"query", "key", "value", "output"} - set(layers):
        every = job_of(change, "training.lora_rank=8", TARGETS, precision="bf16")
        assert all(name in without_adapters(every) for name in missing)
        adapted = adapted_matrices(every.model, every.training, experts=False)
        assert len(adapted) == len(layers)


def folds(job):
    layout = layout_of(job, "dp=8,mbs=3")
    lean = job.model, job.training.model_copy(update={"lora_rank": 8, "lora_targets": tuple(_PROJECTIONS)})
    passes = layer_seconds(job, layout).passes
    return {
        "parameters": layer_params(job.model, experts=False),
        "parameters of a rank": float(
            layer_params_on_device(job.model, layout_of(job, "tp=2,dp=4"), experts=False).total
        ),
        "FLOPs": float(chunk_flops(job, layout)["forward"].sum()),
        "seconds": float(passes.forward + passes.backward),
        "kept bytes": sum(float(term.num_bytes) for term in activation_terms(job, layout)),
        "Muon": sum((rows + columns) * count for rows, columns, count in layer_matrices(job.model, experts=False)[0]),
        "adapters": adapter_params(*lean),
        "context parallelism": sum(float(each) for each in context_bytes(job, layout_of(job, "cp=2,dp=4"))),
    }


_PROJECTIONS = ("query", "key", "value", "output")
UNMOVED = {
    "num_heads": {"context parallelism"},
    "keys_are_values": {"kept bytes", "context parallelism"},  # rotated keys are a tensor of their own
    "shares_keys": {"context parallelism"},  # the core reads keys and values from the other ranks all the same
}
"""Counts that a field of `CHANGES` leaves as they are."""


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_of_attention_moves_every_count(job_of, field):
    """On a device whose layers do not wait for the host."""
    free = ("device.efficiency.layer_floor=0 us", "device.efficiency.launch=0 us")
    before, after = (folds(job_of(change, *free)) for change in ({}, {field: CHANGES[field]}))
    unmoved = {name for name, value in after.items() if value == before[name]}
    assert unmoved == UNMOVED.get(field, set())
