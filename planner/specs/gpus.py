"""The GPUs, links and network adapters of this machine, as its drivers and its kernel report them; nothing is timed.

If a program is missing, fails or prints something unexpected, its answer is left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_ADAPTERS = Path("/sys/class/infiniband")
_SIGNALLING: Final = {26.562: 25.0, 53.125: 50.0}
"""Signalling rate of a link in nvidia-smi (GB/s) -> rate of the same link in the data sheets of H100 and B200 (GB/s).
"""
_PCIE_LANE: Final = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe generation -> rate of one lane in one direction after encoding, in GB/s (PCI-SIG)."""
_TRANSFERS: Final = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""Rate of a PCIe lane as lspci shows it (GT/s) -> PCIe generation."""
_UNDER_ONE_PORT: Final = ("PIX", "PXB")
"""nvidia-smi's words for paths over PCIe bridges below one root port, that is, without a host bridge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: its name, and the bytes of memory that the driver leaves to programs.

    index: its number in the driver's tables.
    bus: its PCIe address, such as `0000:17:00.0`, or empty.
    """

    name: str
    memory: float
    pcie_generation: int = 0
    pcie_lanes: int = 0
    index: int = 0
    bus: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """How the GPUs of a machine reach each other.

    joined: size of the smallest group of GPUs that NVLink or Infinity Fabric joins; 1 if there is neither, None if no
    driver reports it.
    under_port: size of the largest group of GPUs that share one PCIe root port.
    """

    joined: int | None = None
    under_port: int = 1


def nvidia_gpus() -> tuple[Gpu, ...] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible; None without an NVIDIA driver."""
    fields = "index,uuid,name,memory.total,memory.reserved,pcie.link.gen.max,pcie.link.width.max,pci.bus_id"
    answer = _ask("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if answer is None:
        return None
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.strip()]
    return tuple(_gpu(row) for row in rows if len(row) >= 7 and _is_visible(row[0], row[1]))


def _gpu(row: list[str]) -> Gpu:
    total, reserved, generation, lanes = (_number(text) for text in row[3:7])
    return Gpu(
        name=row[2],
        memory=parse_quantity(f"{total - reserved} MiB", "bytes"),
        pcie_generation=int(generation),
        pcie_lanes=int(lanes),
        index=int(_number(row[0])),
        bus=_address(row[7]) if len(row) > 7 else "",
    )


def _number(text: str) -> float:
    """A number from nvidia-smi; 0 for [N/A], which old drivers print in place of a value."""
    return float(text) if re.fullmatch(r"[\d.]+", text) else 0.0


def _address(text: str) -> str:
    """A PCIe address in the form of lspci -D; nvidia-smi writes eight digits for the domain, and capitals."""
    found = re.fullmatch(r"[0-9A-Fa-f]*([0-9A-Fa-f]{4}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", text)
    return f"{found[1]}:{found[2]}".lower() if found else ""


def _is_visible(index: str, uuid: str) -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    return any(each == index or (each and uuid.startswith(each)) for each in map(str.strip, visible.split(",")))


def amd_gpus() -> tuple[Gpu, ...] | None:
    """The GPUs that rocm-smi lists, one per die, with the PCIe slots that lspci shows; None without an AMD driver."""
    answer = _ask("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showbus", "--json")
    cards = _json(answer)
    if answer is None or not cards:
        return None
    slots = _slots()
    found = []
    for key, card in sorted(cards.items(), key=lambda item: _number(item[0].removeprefix("card"))):
        if not key.startswith("card") or not isinstance(card, dict):
            continue
        given = {name.lower(): str(value) for name, value in card.items()}
        memory = _number(given.get("vram total memory (b)", ""))
        name = given.get("card series") or given.get("card model") or "AMD GPU"
        bus = _address(given.get("pci bus", ""))
        generation, lanes = slots.get(bus, (0, 0))
        index = int(_number(key.removeprefix("card")))
        found.append(Gpu(name=name, memory=memory, pcie_generation=generation, pcie_lanes=lanes, index=index, bus=bus))
    return tuple(found)


def _json(text: str | None) -> dict[str, object]:
    try:
        found = json.loads(text or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _slots() -> dict[str, tuple[int, int]]:
    """PCIe generation and number of lanes of each device by address, where lspci is permitted to read them."""
    found, address = {}, ""
    for line in (_ask("lspci", "-D", "-vv") or "").splitlines():
        if head := re.match(r"([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ", line):
            address = head[1]
        elif link := re.search(r"LnkCap:.*Speed ([\d.]+)GT/s.*Width x(\d+)", line):
            found[address] = (_TRANSFERS.get(link[1].removesuffix(".0"), 0), int(link[2]))
    return found


def paths(gpus: tuple[Gpu, ...]) -> Paths:
    """How these GPUs reach each other, from `nvidia-smi topo -m`, or else from rocm-smi and lspci's PCIe tree."""
    kinds = _nvidia_topology() or _amd_topology()
    of = {frozenset((a, b)): kind for (a, b), kind in kinds.items()}
    indices = [gpu.index for gpu in gpus]
    joined = [_near(i, indices, of, lambda kind: kind.startswith("NV") or kind == "XGMI") for i in indices]
    ports = _root_ports()
    if any(kind in _UNDER_ONE_PORT for kind in of.values()) or not ports:
        shared = [_near(i, indices, of, lambda kind: kind in _UNDER_ONE_PORT) for i in indices]
    else:
        known = [ports.get(gpu.bus, gpu.bus or str(gpu.index)) for gpu in gpus]
        shared = [known.count(port) for port in known]
    return Paths(joined=min(joined, default=1) if kinds else None, under_port=max(shared, default=1))


def _near(index: int, indices: list[int], kinds: Mapping[frozenset[int], str], counts: Callable[[str], bool]) -> int:
    """Number of GPUs that the GPU `index` reaches by a path of one of these kinds, itself included."""
    return 1 + sum(counts(kinds.get(frozenset((index, other)), "")) for other in indices if other != index)


def _nvidia_topology() -> dict[tuple[int, int], str]:
    """The kind of path between each two GPUs: NV18, PIX, PXB, PHB, NODE or SYS."""
    columns: list[str] = []
    found = {}
    for line in (_ask("nvidia-smi", "topo", "-m") or "").splitlines():
        words = re.sub(r"\x1b\[[\d;]*m", "", line).split()
        if not columns and words[:1] == ["GPU0"] and words[1:2] != ["X"]:
            columns = words
        elif columns and words and re.fullmatch(r"GPU\d+", words[0]):
            for column, kind in zip(columns, words[1:], strict=False):
                if re.fullmatch(r"GPU\d+", column) and column != words[0]:
                    found[int(words[0][3:]), int(column[3:])] = kind
    return found


def _amd_topology() -> dict[tuple[int, int], str]:
    """The kind of path between each two GPUs: XGMI or PCIE."""
    answer = _json(_ask("rocm-smi", "--showtopotype", "--json")).get("system", {})
    found = {}
    for key, kind in (answer if isinstance(answer, dict) else {}).items():
        if pair := re.search(r"Link type between DRM devices (\d+) and (\d+)", key):
            found[int(pair[1]), int(pair[2])] = str(kind)
    return found


def _root_ports() -> dict[str, str]:
    """The root port above each device, by the device's address: the first step of the paths that `lspci -PP` prints."""
    found = {}
    for line in (_ask("lspci", "-D", "-PP") or "").splitlines():
        path = line.split(" ", 1)[0].split("/")
        if len(path) > 1:
            domain = path[0].partition(":")[0]
            found[f"{domain}:{path[-1]}"] = path[0]
    return found


def nvlink_bytes_per_second() -> float:
    """Bandwidth of the first GPU's active NVLinks together, in one direction; 0 without NVLink."""
    answer = _ask("nvidia-smi", "nvlink", "--status", "--id=0") or ""
    links = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", answer)]
    return parse_quantity(f"{sum(_SIGNALLING.get(rate, rate) for rate in links)} GB/s", "bytes_per_second")


def pcie_bytes_per_second(gpu: Gpu) -> float:
    """Bandwidth of a GPU's PCIe slot in one direction; 0 if the driver does not report it.

    Source: PCI-SIG, rates of the generations with their encoding.
    """
    return parse_quantity(f"{_PCIE_LANE.get(gpu.pcie_generation, 0.0) * gpu.pcie_lanes} GB/s", "bytes_per_second")


def adapter_bytes_per_second() -> tuple[float, str]:
    """Bandwidth of all active InfiniBand and RoCE ports together, in one direction, and the name of their network.

    The kernel reports the ports; if it reports none, ibstat is asked.
    """
    ports = [
        (_read(port / "rate").partition(" ")[0], _read(port / "state"), _read(port / "link_layer"))
        for port in sorted(_ADAPTERS.glob("*/ports/*"))
    ]
    if not ports:
        ports = _ibstat_ports(_ask("ibstat") or "")
    active = [(rate, layer) for rate, state, layer in ports if "ACTIVE" in state.upper() and _number(rate)]
    total = parse_quantity(f"{sum(_number(rate) for rate, _ in active)} Gb/s", "bytes_per_second")
    return total, _network(layer.lower() for _, layer in active)


def _ibstat_ports(answer: str) -> list[tuple[str, str, str]]:
    """Rate in Gb/s, state and link layer of each port."""
    ports = []
    for port in re.split(r"^\s*Port \d+:\s*$", answer, flags=re.MULTILINE)[1:]:
        keys = dict(re.findall(r"^\s*(Rate|State|Link layer):\s*(\S+)", port, flags=re.MULTILINE))
        ports.append((keys.get("Rate", ""), keys.get("State", ""), keys.get("Link layer", "")))
    return ports


def _network(layers: Iterable[str]) -> str:
    return "ethernet" if "ethernet" in layers else "infiniband"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _ask(name: str, *arguments: str) -> str | None:
    """The output of a program; None if the program is missing, fails or does not answer."""
    program = shutil.which(name)
    if program is None:
        return None
    try:
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return answer.stdout
