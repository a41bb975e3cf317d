"""The cluster and device documents: the machines and the links between them."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from planner.specs.document import Bandwidth, Bytes, FlopsPerSecond, InputDocument, Name, Seconds, UsdPerHour, Watts
from planner.specs.failures import FailureSpec
from planner.specs.generations import with_defaults

if TYPE_CHECKING:
    from collections.abc import Iterator

Precision = Literal["fp32", "fp16", "bf16", "fp8", "fp4"]
Generation = Literal["volta", "ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna2", "cdna3", "cdna4"]
_FROM_GENERATION: Final = "or give `generation`, which supplies the value"


def _leave_out(schema: dict[str, Any]) -> None:
    """Make those keys optional that a device file may leave out if it gives a generation."""
    given = ("efficiency", "num_processors", "reserved_memory")
    required = schema.pop("required", [])
    if "memory_bandwidth" in required:
        schema["required"] = [key for key in required if key not in given]
        schema["anyOf"] = [{"required": ["generation"]}, {"required": list(given)}]


class Efficiency(InputDocument):
    """Shares of the data sheet's values that a device reaches, as measured; a comment in the file names the source.

    matmul: share of the peak that a large matrix product reaches; above 1 if the clock rises above the data sheet's.
    matmul_half_depth: depth K (inner dimension) at which a product reaches half of `matmul`; the share grows as K / (K
    + matmul_half_depth).
    attention: share of the 16-bit peak that fused attention reaches in both passes together, with a kernel written for
    the device's generation.
    attention_flash_2: the same share with FlashAttention-2, if it is lower.
    memory: share of the memory bandwidth that a memory-bound operator reaches.
    launch: host time per operator that the device cannot hide.
    """

    model_config = ConfigDict(json_schema_extra=_leave_out)

    matmul: float = Field(gt=0, le=1.25)
    matmul_half_depth: float = Field(ge=0, le=1e9)
    attention: float = Field(gt=0, le=1)
    attention_flash_2: float | None = Field(default=None, gt=0, le=1)
    flops_per_exponential: float = Field(
        default=0.0, ge=0, description="16-bit FLOPs of the matrix units in the time of one exponential of a score"
    )
    memory: float = Field(gt=0, le=1)
    grouped_products: bool = Field(
        default=True, description="whether one kernel computes the products of several experts"
    )
    launch: Seconds
    layer_floor: Seconds = Field(description="least host time of one layer's forward pass in eager mode")
    step_floor: Seconds = Field(
        default=0.0, ge=0, description="host time per step: clipping, launches of the optimizer, data, logging"
    )


class DeviceSpec(InputDocument):
    """One accelerator, or one process's share of a CPU host.

    The device's generation (clusters/generations) supplies the keys that the file leaves out.
    assumed: the keys that the generation supplied.
    """

    model_config = ConfigDict(json_schema_extra=_leave_out)

    name: Name
    kind: Literal["cuda", "cpu"] = "cuda"
    generation: Generation | None = None
    memory: Bytes = Field(description="what the driver lets a program use")
    peak: dict[Precision, FlopsPerSecond] = Field(
        min_length=1, description="FLOPs per second without sparsity, with sums in fp32"
    )
    memory_bandwidth: Bandwidth
    num_processors: int = Field(
        ge=1, le=1_000_000, description=f"streaming multiprocessors; 1 for a CPU; {_FROM_GENERATION}"
    )
    efficiency: Efficiency = Field(description=f"shares of peak and bandwidth that are reached; {_FROM_GENERATION}")
    reserved_memory: Bytes = Field(description=f"runtime: device context and communication buffers; {_FROM_GENERATION}")
    power: Watts | None = None
    assumed: tuple[str, ...] = Field(
        default=(), description="keys that the generation supplied; written by the planner"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return with_defaults(data) if isinstance(data, dict) else data

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions that the device computes in."""
        return tuple(self.peak)


@lru_cache(maxsize=256)  # asked for in every pricing of a group
def _read_span(value: str) -> int | None:
    if value == "cluster":
        return None
    match = re.fullmatch(r"\s*(\d+)\s+devices\s*", value)
    if match is None or int(match[1]) < 1:
        raise ValueError(
            f"spans: {value!r} is no span; write how many devices one such link joins, as in `8 devices`, or `cluster`"
        )
    return int(match[1])


class LinkSpec(InputDocument):
    """One level of the network; a group of devices is priced on the levels that it spans.

    bandwidth: bytes per second of one device in one direction, from the data sheet.
    latency: time of one hop.
    startup: time of one pass of a collective in addition to its hops (launch, filling of buffers).
    efficiency: share of the bandwidth that collectives reach; the default is an assumption for links that nobody
    measured.
    half_peers: number of peers at which half of the efficiency is reached; the efficiency grows as peers / (peers +
    half_peers).
    in_network: share of the bandwidth that reductions inside the switch reach (NVLS, SHARP); without a value the switch
    cannot reduce.
    message: time that a proxy on the host takes to pass one message of a device on, for networks without transfers that
    devices start themselves; exchanges that send each token as a message of its own wait for it.
    devices_per_adapter: devices that share one network adapter or one PCIe root port; `bandwidth` is the share of one
        device.
    kind: topology of the level; `pcie` joins cards without a common switch, which exchange data through the host's
    memory.
    measured_bandwidth: bytes per second that each device got in a collective over `measured_hosts` hosts, for networks
    that deliver less than `bandwidth`; `efficiency` is not applied to it. Groups over fewer hosts get more, up to
    `efficiency` times `bandwidth` over two hosts. Groups over more hosts get the measured bandwidth.
    measured_hosts: number of hosts in the measurement of `measured_bandwidth`.
    links_per_device, wiring: number and arrangement of a mesh's links; `bandwidth` is the sum over all links of a
    device.
    """

    name: Name
    spans: Annotated[str, BeforeValidator(lambda v: v)] = Field(
        description="devices that one such link joins: `8 devices`, or `cluster`"
    )
    bandwidth: Bandwidth
    latency: Seconds = Field(
        le=60, description="time of one hop; NCCL counts 3.4 us for NVLink, 5.7 us for PCIe and 14 us for a network"
    )
    kind: Literal["switch", "mesh", "fat-tree", "ethernet", "shared-memory", "pcie"]
    efficiency: float = Field(default=0.8, gt=0, le=1)
    startup: Seconds = Field(default=0.0, ge=0)
    message: Seconds = Field(default=0.0, ge=0)
    half_peers: float = Field(default=0.0, ge=0)
    in_network: float | None = Field(default=None, gt=0, le=1)
    devices_per_adapter: int = Field(default=1, ge=1, le=10_000)
    links_per_device: int | None = Field(default=None, ge=1, le=10_000)
    wiring: Literal["all-to-all", "hybrid-cube"] = "all-to-all"
    measured_bandwidth: Bandwidth | None = None
    measured_hosts: int | None = Field(default=None, ge=2, le=10_000_000)

    @property
    def num_devices(self) -> int | None:
        """Devices that one instance of this level joins; None means the whole cluster."""
        return _read_span(self.spans)

    def _mistakes(self) -> Iterator[str]:
        _read_span(self.spans)
        if self.kind != "mesh" and (self.links_per_device is not None or self.wiring != "all-to-all"):
            yield "links_per_device and wiring describe a mesh; write `kind: mesh`"
        if self.wiring == "hybrid-cube" and (self.links_per_device, self.num_devices) != (6, 8):
            yield "the hybrid cube mesh joins 8 devices with 6 links each"
        if (self.measured_bandwidth is None) != (self.measured_hosts is None):
            yield "measured_bandwidth and measured_hosts belong together; write both or neither"
        if self.measured_bandwidth is not None and self.measured_bandwidth > self.bandwidth:
            yield "measured_bandwidth is more than bandwidth, the line rate; correct one of them"
        if self.in_network is not None and self.kind not in ("switch", "fat-tree"):
            yield f"a link of kind {self.kind} has no switch that could reduce (in_network)"


class HostSpec(InputDocument):
    """The memory of a host, shared by its devices, and the path to it; offloading depends on both.

    memory, memory_bandwidth: values of the whole host, all sockets together, from the data sheet.
    usable_share: share of the memory that training may pin; the rest is for the system and the loading of data. The
    default is an assumption.
    memory_efficiency: share of the memory bandwidth that an optimizer's update reaches. CPU-Adam updates 10e9
    parameters in 2.57 s, 30 bytes each, on two Xeon 8168 of 256 GB/s (Ren et al., ZeRO-Offload, USENIX ATC 2021, table
    4).
    bandwidth: bandwidth between one device and the host's memory in one direction, while all devices of the host copy
    at once.
    efficiency: share of `bandwidth` that copies of pinned memory reach; the default is an assumption.
    """

    memory: Bytes
    usable_share: float = Field(default=0.9, gt=0, le=1)
    memory_bandwidth: Bandwidth
    memory_efficiency: float = Field(default=0.45, gt=0, le=1)
    bandwidth: Bandwidth
    efficiency: float = Field(default=0.8, gt=0, le=1)


class ClusterSpec(InputDocument):
    """Hosts with equal devices; `links` start with the innermost.

    The span of the first link is the scale-up domain: tensor parallelism stays inside it unless the user lifts the
    rule. If a domain is larger than a host (a rack of NVL72), the layout also decides how many hosts of each domain the
    job uses.

    alone: how many times as fast a device is while the other devices of its host are idle. Cores of a processor share
    caches and memory, and two may be threads of one core. Without the key a device is equally fast in both cases.
    segment: number of hosts that the job uses in each domain, if the scheduler fixes this number.
    domains: number of domains; without it a job gets as many domains as its segments need.
    """

    name: Name
    device: DeviceSpec
    devices_per_host: int = Field(ge=1, le=10_000)
    hosts: int = Field(default=1, ge=1, le=10_000_000)
    links: tuple[LinkSpec, ...] = Field(min_length=1)
    price: UsdPerHour | None = None
    host: HostSpec | None = Field(default=None, description="memory of one host; without this key nothing is offloaded")
    alone: float | None = Field(default=None, ge=1, le=16)
    segment: int | None = Field(default=None, ge=1, description="hosts that a job takes in each scale-up domain")
    domains: int | None = Field(
        default=None, ge=1, description="number of scale-up domains; without this key as many as a job takes"
    )
    failures: FailureSpec = Field(
        default=FailureSpec(), description="how often devices fail, and what failures cost a run"
    )

    @property
    def num_devices(self) -> int:
        """Devices in the whole cluster."""
        return self.devices_per_host * self.hosts

    @property
    def hosts_per_domain(self) -> int:
        """Whole hosts in one scale-up domain: 18 in an NVL72 rack; 1 if the domain is one host or the whole cluster."""
        return max(1, (self.links[0].num_devices or 1) // self.devices_per_host)

    @property
    def most_hosts(self) -> float:
        """Hosts that a job can use in all domains together; infinite if the number of domains is not given."""
        return math.inf if self.domains is None else self.domains * (self.segment or self.hosts_per_domain)

    @property
    def pools(self) -> tuple[ClusterSpec, ...]:
        """The cluster as its only pool."""
        return (self,)

    @property
    def between(self) -> None:
        """The link to other pools: None, because there are no other pools."""

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """Whether the devices are GPUs or cores of a CPU."""
        return self.device.kind

    @property
    def scale_up_devices(self) -> int:
        """Devices in one scale-up domain (8 on a DGX, 72 on NVL72), at most the number in the whole cluster."""
        return min(self.links[0].num_devices or self.num_devices, self.num_devices)

    def _mistakes(self) -> Iterator[str]:
        spans = [link.num_devices for link in self.links]
        inner = [span for span in spans if span is not None]
        of_devices = self.device.memory_bandwidth * max(8, self.devices_per_host)  # part of a host keeps its memory
        if self.host is not None and 2 * self.host.memory_bandwidth > of_devices:
            yield "host: memory_bandwidth is more than half of that of eight devices; it is of one host, all sockets"
        if None in spans[:-1] or inner != sorted(set(inner)):
            yield "links: list the levels innermost first, each spanning more than the one before"
        if spans[-1] is not None and spans[-1] < self.num_devices:
            yield (
                f"links: the outermost level {self.links[-1].name} spans {spans[-1]} devices of {self.num_devices}; "
                "add a level that spans the cluster"
            )
        most = self.hosts_per_domain
        for key in ("segment", "domains"):
            if getattr(self, key) is not None and most == 1:
                yield f"{key}: no scale-up domain of this cluster has several hosts; leave it out"
        if (self.segment or 1) > most:
            yield f"segment: a scale-up domain has {most} hosts, not {self.segment}"
        if self.hosts > self.most_hosts:
            taken = f"{self.domains} with {self.segment or most} hosts each"
            yield f"domains: {taken} are fewer than the cluster's {self.hosts} hosts"


class MixedClusterSpec(InputDocument):
    """Pools of hosts that differ in their devices, in the number of devices per host, or in their links.

    Each pool is a cluster of its own; a pipeline stage runs within one pool. `between` is the link from a device to the
    devices of other pools; if the pools have different adapters, it is the link of the slower adapter.
    """

    name: Name
    pools: tuple[ClusterSpec, ...] = Field(min_length=2, max_length=6)
    between: LinkSpec

    @property
    def num_devices(self) -> int:
        """Devices in all pools."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def hosts(self) -> int:
        """Hosts in all pools."""
        return sum(pool.hosts for pool in self.pools)

    @property
    def scale_up_devices(self) -> int:
        """Devices in the largest scale-up domain of any pool."""
        return max(pool.scale_up_devices for pool in self.pools)

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """Whether the devices of all pools are GPUs or cores of a CPU."""
        return self.pools[0].kind

    def _mistakes(self) -> Iterator[str]:
        if len({pool.kind for pool in self.pools}) > 1:
            yield "pools: devices are all of kind cuda, or all of kind cpu"
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            yield "pools: each pool needs a name of its own"
        taken = [name for name in names if "." in name or name in _ROOTS]
        if taken:
            yield f"pools: `{taken[0]}` is no name of a pool: paths as in h100.hosts=4 begin with the name"
        if self.between.num_devices is not None:
            yield "between: the link between pools spans the cluster; write `spans: cluster`"


_ROOTS: Final = ("model", "cluster", "device", "training", "engine", "pools", "between")
"""First words of paths, which cannot be names of pools (specs/settings.py)."""

AnyCluster: TypeAlias = ClusterSpec | MixedClusterSpec
