"""The GPUs, NVLinks and network adapters of this machine, as its driver and kernel tell; nothing is timed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Iterable

_ADAPTERS = Path("/sys/class/infiniband")
_SIGNALLING: Final = {26.562: 25.0, 53.125: 50.0}
"""GB/s of a link that nvidia-smi shows -> GB/s that the data sheets of H100 and B200 give the same link."""
_PCIE_LANE: Final = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Generation -> GB/s of one lane in one direction, after its encoding (PCI-SIG)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: its name, and the bytes of memory that the driver leaves to programs."""

    name: str
    memory: float
    pcie_generation: int
    pcie_lanes: int


def nvidia_gpus() -> tuple[Gpu, ...] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, or None where there is no NVIDIA driver."""
    fields = "index,uuid,name,memory.total,memory.reserved,pcie.link.gen.max,pcie.link.width.max"
    answer = _ask(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if answer is None:
        return None
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.strip()]
    return tuple(_gpu(row) for row in rows if _is_visible(row[0], row[1]))


def _gpu(row: list[str]) -> Gpu:
    total, reserved, generation, lanes = (_number(text) for text in row[3:7])
    memory = parse_quantity(f"{total - reserved} MiB", "bytes")
    return Gpu(name=row[2], memory=memory, pcie_generation=int(generation), pcie_lanes=int(lanes))


def _number(text: str) -> float:
    """A number of nvidia-smi; 0 where it says [N/A], as old drivers do for what they keep for themselves."""
    return float(text) if re.fullmatch(r"[\d.]+", text) else 0.0


def _is_visible(index: str, uuid: str) -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    return any(each == index or (each and uuid.startswith(each)) for each in map(str.strip, visible.split(",")))


def nvlink_bytes_per_second() -> float:
    """Bandwidth of all active NVLinks of the first GPU together, one way; 0 without NVLink."""
    answer = _ask("nvlink", "--status", "--id=0") or ""
    links = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", answer)]
    return parse_quantity(f"{sum(_SIGNALLING.get(rate, rate) for rate in links)} GB/s", "bytes_per_second")


def pcie_bytes_per_second(gpu: Gpu) -> float:
    """Bandwidth of a GPU's PCIe slot, one way; 0 where the driver does not tell.

    Source: PCI-SIG, rates of the generations with their encoding.
    """
    return parse_quantity(f"{_PCIE_LANE.get(gpu.pcie_generation, 0.0) * gpu.pcie_lanes} GB/s", "bytes_per_second")


def adapter_bytes_per_second() -> tuple[float, str]:
    """Bandwidth of all active InfiniBand and RoCE ports together, one way, and the name of their network."""
    total, layers = 0.0, set()
    for port in sorted(_ADAPTERS.glob("*/ports/*")):
        rate = re.match(r"[\d.]+ Gb", _read(port / "rate"))
        if rate and "ACTIVE" in _read(port / "state"):
            total += parse_quantity(f"{rate[0]}/s", "bytes_per_second")
            layers.add(_read(port / "link_layer").lower())
    return total, _network(layers)


def _network(layers: Iterable[str]) -> str:
    return "ethernet" if "ethernet" in layers else "infiniband"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _ask(*arguments: str) -> str | None:
    """What nvidia-smi prints; None where it is missing, fails or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout
