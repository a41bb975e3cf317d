"""Links of kind `pcie`, compared with a count of the bytes that cross each port and the host's memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from planner.cost.collectives import (
    all_to_all_seconds,
    reduce_scatter_seconds,
    ring_all_reduce_seconds,
    ring_exchange_seconds,
)
from planner.cost.estimate import estimate
from planner.cost.groups import group
from planner.layout_text import parse_layout
from planner.specs.cluster import ClusterSpec
from planner.specs.load import load_job

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOT = 32e9
CARDS = 8


def box(*, on_one_port: int = 1, memory: float = 1e12) -> ClusterSpec:
    """Cards whose root ports are as wide as their slots, without latency or losses."""
    device = {"name": "card", "generation": "ada", "memory": "24 GiB", "memory_bandwidth": "1 TB/s"}
    link = {
        "name": "pcie",
        "spans": f"{CARDS} devices",
        "kind": "pcie",
        "bandwidth": f"{SLOT / on_one_port!r} B/s",
        "devices_per_adapter": on_one_port,
        "latency": "0 us",
        "efficiency": 1.0,
    }
    document: dict[str, Any] = {
        "name": "box",
        "device": {**device, "peak": {"bf16": "100 TFLOP/s"}},
        "devices_per_host": CARDS,
        "links": (link,),
        "host": {"memory": "1 TB", "memory_bandwidth": f"{memory!r} B/s", "bandwidth": "32 GB/s"},
    }
    return ClusterSpec.model_validate(document)


def counted(sends: Iterator[tuple[int, int, float]], *, on_one_port: int, memory: float) -> float:
    """Seconds of simultaneous transfers (from, to, bytes): the fullest of slots, ports and memory limits the speed.

    Each transfer goes up from the slot through its port into memory, and down through the other port to the other slot.
    """
    up_slot, down_slot, up_port, down_port = (np.zeros(CARDS) for _ in range(4))
    in_memory = 0.0
    for source, target, num_bytes in sends:
        up_slot[source] += num_bytes
        down_slot[target] += num_bytes
        up_port[source // on_one_port] += num_bytes
        down_port[target // on_one_port] += num_bytes
        in_memory += 2 * num_bytes  # written, and read
    fullest = max(each.max() for each in (up_slot, down_slot, up_port, down_port))
    return float(max(fullest / SLOT, in_memory / memory))


def groups_of(size: int, stride: int) -> list[list[int]]:
    starts = [start for start in range(CARDS) if start // stride % size == 0]
    return [[start + stride * i for i in range(size)] for start in starts]


SHAPES = [(size, stride) for size, stride in itertools.product((2, 4, 8), (1, 2, 4)) if size * stride <= CARDS]


@pytest.mark.parametrize("on_one_port", [1, 2, 4, 8])
@pytest.mark.parametrize("memory", [1e12, 100e9])
@pytest.mark.parametrize(("size", "stride"), SHAPES)
def test_all_groups_at_once_take_what_their_bytes_take(on_one_port: int, memory: float, size: int, stride: int) -> None:
    where = group(box(on_one_port=on_one_port, memory=memory), size, stride)
    kept = {"on_one_port": on_one_port, "memory": memory}
    each = groups_of(size, stride)
    ring = [(ranks[i], ranks[(i + 1) % size]) for ranks in each for i in range(size)]
    step = counted(((a, b, 1e9 / size) for a, b in ring), **kept)
    assert float(reduce_scatter_seconds(where, 1e9)) == pytest.approx((size - 1) * step)
    assert float(ring_all_reduce_seconds(where, 1e9)) == pytest.approx(2 * (size - 1) * step)
    assert float(ring_exchange_seconds(where, 1e9)) == pytest.approx(counted(((a, b, 1e9) for a, b in ring), **kept))
    pairs = ((a, b, 1e9 / size) for ranks in each for a in ranks for b in ranks if a != b)
    assert float(all_to_all_seconds(where, 1e9)) == pytest.approx(counted(pairs, **kept))


@pytest.mark.parametrize("on_one_port", [1, 2, 4, 8])
@pytest.mark.parametrize(("size", "stride"), SHAPES)
def test_one_group_alone_has_the_ports_to_itself(on_one_port: int, size: int, stride: int) -> None:
    where = group(box(on_one_port=on_one_port), size, stride, alone=True)
    ranks = groups_of(size, stride)[0]
    ring = ((ranks[i], ranks[(i + 1) % size], 1e9 / size) for i in range(size))
    step = counted(ring, on_one_port=on_one_port, memory=1e12)
    assert float(reduce_scatter_seconds(where, 1e9)) == pytest.approx((size - 1) * step)


@pytest.mark.parametrize("k", [2, 4, 8])
def test_cards_on_one_root_port_gain_nothing_from_the_ring(k: int) -> None:
    """An all-reduce of n bytes over k cards that share a port of B bytes a second: 2 (k - 1) n / B."""
    shared, own = (float(ring_all_reduce_seconds(group(box(on_one_port=p), k, 1), 1e9)) for p in (CARDS, 1))
    assert shared == pytest.approx(2 * (k - 1) / k * 1e9 / (SLOT / CARDS))
    assert own == pytest.approx(2 * (k - 1) / k * 1e9 / SLOT)


@pytest.mark.parametrize("name", ["rtx4090-box", "l40s-box", "a40-box", "dgx-h100"])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_a_part_of_a_host_is_priced_as_a_layout_that_leaves_the_rest_idle(name, num_devices):
    """Both spellings are the same job on the same machine: links through host memory, updates and room on the host."""
    for keys in ("zero=0", "zero=1", "zero=2,offload=optimizer"):
        priced = []
        for gpus in (num_devices, 8):
            job = load_job(
                model="llama3.2-1b",
                cluster=name,
                gpus=gpus,
                engine="deepspeed",
                global_batch_size=16,
                sequence_length=2048,
                allow_offload=True,
            )
            layout = parse_layout(f"dp={num_devices},mbs=1,{keys}", num_layers=16, num_devices=8)
            priced.append(estimate(job, layout))
        part, whole = priced
        assert part.step_seconds == whole.step_seconds
        assert part.time == whole.time
        assert part.memory == whole.memory


def test_a_host_that_the_user_states_is_not_divided():
    """Four cards of a box whose host the user states are four cards alone on this host."""
    options = {"model": "llama3.2-1b", "cluster": "a100-pcie-box", "global_batch_size": 16, "sequence_length": 2048}
    stated = load_job(**options, gpus=4, settings=("cluster.host.memory=100GiB",))
    alone = load_job(**options, settings=("cluster.host.memory=100GiB", "cluster.devices_per_host=4"))
    assert stated.cluster.host.memory == alone.cluster.host.memory == 100 * 2**30
    share = load_job(**options, gpus=4).cluster.host.memory / load_job(**options).cluster.host.memory
    assert share == 4 / load_job(**options).cluster.devices_per_host
