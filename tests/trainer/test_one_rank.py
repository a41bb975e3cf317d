"""Memory of torch's own FSDP2 while it reduces the gradient of one matrix, counted in a fake world of 1 and 2 ranks.

The file is also the program that counts: `python test_one_rank.py` prints the counts as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

WIDTH, TOKENS = 4096, 8


def peak_bytes_of_a_parameter(num_ranks: int) -> float:
    """Peak of one step for each parameter of a matrix: fp32 shards, computed and reduced in 16 bits."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from planner.trainer.rehearse import Counter

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (num_ranks,))
    counter = Counter(mode := FakeTensorMode(allow_non_fake_inputs=True))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with counter.watch():
        with mode:
            net = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh, mp_policy=policy)
            counter.peak = 0  # the matrix was made whole
            net(torch.empty(TOKENS, WIDTH)).sum().backward()
        found = counter.peak / WIDTH**2
    dist.destroy_process_group()
    return found


def test_a_gradient_outlives_its_copy_only_on_several_ranks():
    """One rank: shard 4, copy 2, its sum 2, in fp32 4. Two ranks: the gradient 2 and the copy 2; of the others half.

    torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (foreach_reduce): `unsharded_grad`, the name in
    the loop of several ranks, still refers to the last gradient when the list of gradients is cleared.
    """
    done = subprocess.run([sys.executable, str(Path(__file__))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [pytest.approx(12, rel=0.01), pytest.approx(9, rel=0.01)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps([peak_bytes_of_a_parameter(1), peak_bytes_of_a_parameter(2)]))
