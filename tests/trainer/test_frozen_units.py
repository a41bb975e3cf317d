"""Memory that torch's own FSDP holds at the end of a backward pass with frozen weights, counted on one fake rank.

The file is also the program that counts: `python test_frozen_units.py` prints a table as JSON.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, LAYERS = 512, 64, 8


class Live(TorchDispatchMode):
    """Bytes of the storages that were made inside the mode and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def num_bytes(self) -> int:
        return sum(size for alive, size in self.made.values() if not alive.expired())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                alive = StorageWeakRef(each.untyped_storage())
                self.made[alive.cdata] = alive, each.untyped_storage().nbytes()
        return found


class Adapter(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))


class Layer(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH, bias=False), Adapter()
        self.base.weight.requires_grad_(not frozen)

    def forward(self, x):
        return x + torch.relu(self.base(x) + self.adapter(x))


class Net(nn.Module):
    def __init__(self, frozen: bool, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(Layer(frozen) for _ in range(LAYERS)), reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def held_at_the_end(version: int, frozen: bool, reentrant: bool) -> float:
    """Tensors of the width alive when the first layer's backward pass ends, in the second step."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    net: nn.Module = Net(frozen, reentrant)
    if version == 1:
        units = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda each: isinstance(each, Layer | Adapter))
        net = FullyShardedDataParallel(net, auto_wrap_policy=units, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        for layer in (*net.layers, net):
            fully_shard(layer)
    held: list[float] = []
    for _ in range(2):
        with Live() as live:
            x = torch.randn(TOKENS, WIDTH, requires_grad=True)
            x.register_hook(lambda _, live=live: held.append(live.num_bytes() / (4 * TOKENS * WIDTH)))
            net(x).square().mean().backward()
    return held[-1]


def main() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    cases = (1, True, True), (1, True, False), (1, False, True), (2, True, True)  # version, frozen, reentrant
    sys.stdout.write(json.dumps([[*case, held_at_the_end(*case)] for case in cases]))
    dist.destroy_process_group()


def test_frozen_units_of_fsdp1_hold_inputs_and_gradients_of_reentrant_checkpoints():
    done = subprocess.run([sys.executable, str(Path(__file__))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    held = {tuple(case): number for *case, number in json.loads(done.stdout.splitlines()[-1])}
    # all inputs and their gradients, of which one pair is alive in any case
    assert held[1, True, True] - held[1, True, False] == pytest.approx(2 * (LAYERS - 1), abs=0.1)
    others = [number for case, number in held.items() if case != (1, True, True)]
    assert max(others) - min(others) < 1.5


if __name__ == "__main__":
    main()
