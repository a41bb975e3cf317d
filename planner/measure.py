"""Computes a device and a cluster document from curves that the trainer's program timed on this machine.

The detected document of the machine is the start, and measured values replace its values. A GPU keeps the memory, peaks
and bandwidths of its data sheet, and the measurements become efficiencies. A CPU has no data sheet: its peak and
bandwidths are the best measured values.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.cost.layers import FLASH_BACKWARD
from planner.cost.operators import layer_of
from planner.errors import EnvironmentProblem, ExitCode, InputError, PlannerError
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from planner.emit.programs.torch import Host
    from planner.specs.cluster import ClusterSpec, DeviceSpec, LinkSpec, Precision
    from planner.specs.model import ModelSpec

_DEPTHS: Final = (16, 64, 256, 1024, 4096)
_HALF_DEPTHS: Final = tuple(2.0**power for power in range(11))
_CUT_COLLECTIVES: Final = 8
"""All-gathers and reduce-scatters of a layer under tensor and sequence parallelism, in both passes together."""
Curves = dict[str, Any]


class ProbeFailed(PlannerError):
    """The trainer's program ended without writing curves."""

    exit_code = ExitCode.RANK_FAILED


def request(model: ModelSpec, kind: str, seconds: float) -> dict[str, Any]:
    """Measurements to request from the trainer's program: the model's products, and sizes at which the curves bend."""
    gpu = kind == "cuda"
    tokens, square = ((4096, 16384), 8192) if gpu else ((256, 1024), 512)
    maps = [(int(each.width), each.inputs) for each in layer_of(model, experts=False).products]
    shapes = [(rows, *each) for rows in tokens for each in dict.fromkeys(maps)]
    shapes += [(square, square, depth) for depth in _DEPTHS if gpu or depth <= _DEPTHS[-2]]
    each = tokens[-1]
    groups = [
        (one.count, max(1, each * one.active // one.count), int(one.width), one.inputs)
        for one in layer_of(model, experts=True).products
        if one.count
    ]
    return {
        "kind": kind,
        "seconds": seconds,
        "model": model.model_dump(mode="json"),
        "precisions": ["bf16", "fp8"] if gpu else ["fp32"],
        "products": shapes,
        "grouped": groups,
        "stream": {"tokens": 4 * each},
        "attention": {
            "lengths": [1024, 2048, 4096, 8192, 16384] if gpu else [128, 256, 512],
            "batch": 1 if gpu else 4,
            "heads": model.num_heads,
            "size": model.head_size,
        },
        "cut_layers": {"width": 128, "tokens": 64, "sequences": [1, 64]},
        "messages": [2**power for power in (range(10, 31, 2) if gpu else range(10, 25, 2))],
        "copies": [2**power for power in range(16, 31, 2)],
    }


def run_probe(wanted: Mapping[str, Any], *, processes: int, hosts: int = 1, host: Host | None = None) -> Curves | None:
    """Start the trainer's program on this host and return its curves; None on hosts other than the first.

    Raises:
        EnvironmentProblem: torch is missing, or its build sees too few GPUs.
        ProbeFailed: a rank failed.
    """
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblem("torch is not installed", hint="pip install 'parallel-planner[train]'")
    with tempfile.TemporaryDirectory() as folder:
        asked, written = Path(folder) / "request.json", Path(folder) / "curves.json"
        asked.write_text(json.dumps(wanted), encoding="utf-8")
        place = ["--standalone", f"--nproc-per-node={processes}"]
        if host is not None:
            place = [f"--nnodes={hosts}", f"--nproc-per-node={processes}", f"--node-rank={host.number}"]
            place += [f"--master-addr={host.address}", f"--master-port={host.port}"]
        program = ["-m", "planner.trainer.probe", str(asked), f"--output={written}"]
        words = [sys.executable, "-m", "torch.distributed.run", *place, *program]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)  # noqa: S603 # our own
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "Error" in line] or ["it said nothing"]
            raise ProbeFailed(f"the measurement broke off: {said[0].strip()}", hint="check the GPUs, NCCL and torch")
        curves: Curves | None = json.loads(written.read_text(encoding="utf-8")) if written.exists() else None
        return curves


def measured_cluster(found: ClusterSpec, curves: Curves) -> ClusterSpec:
    """The detected cluster with the measured values of its device and its links.

    Raises:
        InputError: the curves are of another kind of machine, or too few were measured.
    """
    if curves["device_kind"] != found.kind:
        raise InputError(f"these curves are of a {curves['device_kind']} machine, and this one is {found.kind}")
    if not all(curves[key] for key in ("products", "streaming")):
        raise InputError("the time was up before there was enough to go by", hint="give more --seconds")
    device = _device(found.device, curves)
    links = tuple(_link(link, curves, device) for link in found.links)
    changes: dict[str, Any] = {"device": device, "links": links}
    if alone := curves.get("alone"):
        changes["alone"] = min(max(1.0, alone["together_seconds"] / alone["seconds"]), 16.0)
    return found.model_copy(update=changes)


def _device(found: DeviceSpec, curves: Curves) -> DeviceSpec:
    is_cpu = found.kind == "cpu"
    core: Precision = "fp32" if is_cpu else "bf16"
    rows = [row for row in curves["products"] if row["precision"] == core]
    half_depth = _half_depth(rows)
    rates = [_rate(row) * (row["k"] + half_depth) / row["k"] for row in rows]
    peak = {"fp32": max(rates)} if is_cpu else {**found.peak}
    shares = [rate / peak[core] for rate in rates]
    bandwidth = found.memory_bandwidth
    if is_cpu:
        bandwidth = max(row["num_bytes"] / row["seconds"] for row in curves["streaming"])
    of_layer = [row for row in curves["streaming"] for _ in range(row["times"])]
    changes: dict[str, float] = {
        "matmul": min(1.0, statistics.median(shares)),
        "matmul_half_depth": half_depth,
        "memory": min(1.0, _total(of_layer, "num_bytes") / _total(of_layer, "seconds") / bandwidth),
        "launch": curves["launch_seconds"],
        "layer_floor": curves["layer_floor_seconds"],
    }
    if attention := curves["attention"]:  # both, because the forecast derives the backward pass from the forward pass
        seconds = _total(attention, "forward_seconds") + _total(attention, "backward_seconds")
        reached = (1 + FLASH_BACKWARD) * _total(attention, "flops") / seconds
        changes["attention"] = min(1.0, reached / peak[core])
    efficiency = found.efficiency.model_copy(update=changes)
    return found.model_copy(update={"peak": peak, "memory_bandwidth": bandwidth, "efficiency": efficiency})


def _rate(row: Mapping[str, float]) -> float:
    return 2.0 * row["m"] * row["n"] * row["k"] / row["seconds"]


def _total(rows: Iterable[Mapping[str, float]], key: str) -> float:
    return sum_of(row[key] for row in rows)


def _half_depth(rows: Sequence[Mapping[str, float]]) -> float:
    """Depth at which products reach half of their rate.

    With this depth, the corrected rates of square products scatter least.
    """
    sides = max((row["m"], row["n"]) for row in rows if row["m"] == row["n"]) if rows else (0, 0)
    same = [row for row in rows if (row["m"], row["n"]) == sides]

    def scatter(half: float) -> float:
        return statistics.pstdev(math.log(_rate(row) * (row["k"] + half) / row["k"]) for row in same)

    return min(_HALF_DEPTHS, key=scatter) if len(same) > 1 else 0.0


def _link(link: LinkSpec, curves: Curves, device: DeviceSpec) -> LinkSpec:
    """The link with its bandwidth and latency measured by the largest and smallest messages.

    Only messages of groups that cross this link and no link above it are used.
    """
    rows = [row for row in curves["collectives"] if _spans(link, row, curves)]
    if not rows:
        return link
    changes: dict[str, float] = {}
    sent = [row["num_bytes"] / row["seconds"] for row in rows if row["operation"] == "send"]
    if device.kind == "cpu" and sent:  # no data sheet states the bandwidth between two processes on one host
        changes["bandwidth"] = max(sent)
    bandwidth = changes.get("bandwidth", link.bandwidth)
    rates, starts = [], []
    for operation in ("all_gather", "reduce_scatter"):  # sharded weights and sequence parallelism use only these
        for ranks in sorted({row["ranks"] for row in rows}):
            curve = [row for row in rows if (row["operation"], row["ranks"]) == (operation, ranks)]
            if len(curve) < 2:
                continue
            small, large = min(curve, key=_size), max(curve, key=_size)
            moved = (ranks - 1) / ranks * (large["num_bytes"] - small["num_bytes"])
            rates.append(moved / max(1e-9, large["seconds"] - small["seconds"]))
            starts.append((small["seconds"], ranks))
    if rates:
        rate = statistics.geometric_mean(rates)
        if device.kind == "cpu":
            latency, in_layers = _in_layers(curves.get("cut_layers", ()))
            changes["latency"] = max(*(seconds / (ranks - 1) for seconds, ranks in starts), latency)
            rate = min(rate, in_layers)
        else:
            hops = ((seconds - (ranks - 1) * link.latency) for seconds, ranks in starts)
            changes["startup"] = max(0.0, statistics.median(hops))
        changes["efficiency"] = min(1.0, rate / bandwidth)
    return link.model_copy(update=changes)


def _size(row: Mapping[str, float]) -> float:
    return row["num_bytes"]


def _spans(link: LinkSpec, row: Mapping[str, float], curves: Curves) -> bool:
    """Whether the group fills this level's instances, or, on a small machine, a part larger than the level below."""
    if curves["device_kind"] == "cpu":
        return True
    most = link.num_devices or curves["ranks"]
    return bool(row["ranks"] == min(most, curves["ranks"]))


def _in_layers(rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Seconds that each collective adds to a small tensor-parallel layer, and the collectives' bytes/s in a large one.

    A small layer takes only host time, which tensor parallelism does not divide. The computing of a large layer is
    divided by the ranks. In Python, DTensor decides how each operator's inputs are placed. Each gather along the
    sequence copies its pieces. If the devices are the host's own cores, nothing hides this time.
    """
    if not rows:
        return 0.0, math.inf
    small, large = min(rows, key=_size), max(rows, key=_size)
    starts = max(0.0, small["seconds"] - small["whole_seconds"]) / _CUT_COLLECTIVES
    seconds = (large["seconds"] - large["whole_seconds"] / large["ranks"]) / _CUT_COLLECTIVES - starts
    moved = (large["ranks"] - 1) / large["ranks"] * (large["num_bytes"] - small["num_bytes"])
    return starts, moved / seconds if seconds > 0.0 else math.inf
