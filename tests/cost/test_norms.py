"""A norm without a kernel of its own: bytes that torch moves and keeps for Llama's RMSNorm, operator by operator."""

from __future__ import annotations

import pytest

from planner.api import estimate_layout
from planner.cost.layers import _NORM_BYTES_BY_OPERATOR

torch = pytest.importorskip("torch")

TOKENS, WIDTH = 64, 256


def norm(x, weight):
    """facebookresearch/llama, llama/model.py, RMSNorm."""
    whole = x.float()
    return (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight


def counter():
    """A mode that adds up the bytes of whole tensors that operators read and write; views move nothing."""
    leaves = pytest.importorskip("torch.utils._pytree").tree_leaves

    class Moved(pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            read, written = ([t for t in leaves(x) if isinstance(t, torch.Tensor)] for x in ((args, kwargs), out))
            if not {t.data_ptr() for t in read} & {t.data_ptr() for t in written}:
                whole = [t for t in (*read, *written) if t.numel() == TOKENS * WIDTH and 0 not in t.stride()]
                self.num_bytes += sum(t.element_size() for t in whole)
            return out

    return Moved()


def test_bytes_of_a_norm_are_those_that_torch_moves_and_keeps() -> None:
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, requires_grad=True)
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.element_size() if tensor.numel() == TOKENS * WIDTH else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), counter() as forward:
        y = norm(x, weight)
    gradient = torch.ones_like(y)
    with counter() as backward:
        y.backward(gradient)
    assert (forward.num_bytes, backward.num_bytes) == _NORM_BYTES_BY_OPERATOR
    assert sum(kept.values()) == 4 + 2
    assert x.data_ptr() not in kept


def test_two_norms_a_layer_keep_four_bytes_more_each_and_take_time() -> None:
    def plan(kernel: str, model: str = "llama2-7b"):
        return estimate_layout(
            model, "dgx-a100", layout="tp=8,sp=0,zero=0,recompute=none", seq_len=2048, global_batch=1,
            engine="megatron", settings=f"engine.memory.norm_kernel={kernel}",
        )  # fmt: skip

    def activations(found) -> float:
        return sum(line.num_bytes for line in found.memory[0].lines if line.name == "activations")

    one, many = plan("true"), plan("false")
    assert activations(many) - activations(one) == pytest.approx(32 * 2 * 4 * 2048 * 4096)  # whole on every rank of tp
    assert many.step_seconds > one.step_seconds
    assert (
        plan("true", "megatron-1.7b").memory == plan("false", "megatron-1.7b").memory
    )  # torch's LayerNorm is one operator
