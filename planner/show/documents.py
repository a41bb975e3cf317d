"""The documents that commands print with --json; a plan, a difference and a check have types of their own.

Absent keys are `NotRequired`. Seconds and bytes are plain numbers, errors are shares.
"""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own only from Python 3.12 on

from planner.cost.goodput import Checkpoint, Goodput
from planner.cost.ledger import MemoryLine, Verdict
from planner.cost.run import WholeRun
from planner.evidence.compare.groups import Group
from planner.evidence.compare.report import Outcomes
from planner.evidence.compare.sweeps import Sweep
from planner.layout import Assumed, Layout
from planner.specs.cluster import AnyCluster
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

Nodes = int | dict[str, int]
"""Number of hosts; for a mixed cluster the number of each pool."""


class Run(TypedDict):
    """A whole run, or a billion tokens without a token budget; null without either."""

    run_seconds: float | None
    low_run_seconds: float | None
    high_run_seconds: float | None
    device_hours: float | None
    usd: float | None
    kilowatt_hours: float | None
    meets_deadline: bool | None
    deadline_chance: float | None
    meets_budget: bool | None
    budget_chance: float | None


class Memory(TypedDict):
    """A memory ledger, of a device or of its host."""

    total_bytes: float
    limit_bytes: float
    most_bytes: float
    lines: list[MemoryLine]


class Host(Memory):
    """The memory that one device keeps on its host; null where it is unknown whether the plan fits."""

    chance: float | None


class Stage(Memory):
    """The memory of one pipeline stage; null where it is unknown whether the plan fits."""

    stage: int
    fits: bool | None
    verdict: Verdict
    chance_of_fitting: float | None
    device_chance: float | None
    host: Host | None


class PlanFigures(TypedDict):
    """Keys of a plan document that follow from the others."""

    format: int
    world_size: int
    num_trained_params: int
    idle_devices: int
    fits: bool | None
    verdict: Verdict
    chance_of_fitting: float | None
    unknown_because: list[str]
    run: WholeRun | None
    goodput: Goodput | None
    checkpoint: Checkpoint
    memory: list[Stage]
    checksum: str


class Remedy(TypedDict):
    """A change with which a layout fits, or meets what was asked."""

    change: str
    step_seconds: float
    tokens_per_second: float
    chance_of_fitting: float
    num_devices: int
    layout: Layout


class Pin(TypedDict):
    """What happens without one pin."""

    pin: str
    fits: bool
    least_bytes: float | None
    limit_bytes: float | None
    remedy: Remedy | None


class WaysOut(TypedDict):
    """Keys of an answer that falls short of what was asked."""

    remedies: NotRequired[list[Remedy]]
    pins: NotRequired[list[Pin]]


class Unfit(WaysOut):
    """Keys of a plan that falls short of what was asked; dominating: the largest line of its memory."""

    dominating: NotRequired[str]
    notes: NotRequired[list[str]]


class Point(Run):
    """The fastest plan on one size of a cluster."""

    nodes: Nodes
    num_devices: int
    global_batch_size: int
    step_seconds: float
    tokens_per_second: float
    peak_bytes: float
    chance_of_fitting: float
    layout: Layout


class Size(TypedDict):
    """One size of a cluster; `plan` is null if nothing fits."""

    nodes: Nodes
    plan: Point | None


class BatchRange(TypedDict):
    """The batches that a range allows, and the one that the model's size suggests."""

    least: int
    most: int
    target: float | None


class Sizes(WaysOut):
    """`planner plan --nodes A..B`."""

    format: int
    model: ModelSpec
    cluster: AnyCluster
    training: TrainingSpec
    assumed: list[Assumed]
    batch: BatchRange | None
    engine: str
    fits: bool
    objective: str
    confidence: float | None
    front: list[Point]
    sizes: list[Size]


class Choice(Run, total=False):
    """A cluster that was compared; without a plan only the first keys stand."""

    cluster: str
    nodes: Nodes | None
    fits: bool
    on_front: bool
    why_not: str
    best: str
    num_devices: int
    idle_devices: int
    usd_with_idle: float | None
    on: str
    step_seconds: float
    days: float
    price_source: str
    chance_of_fitting: float | None
    layout: Layout


class Clusters(WaysOut):
    """`planner plan MODEL A,B,C`."""

    format: int
    model: str | None
    assumed: list[Assumed]
    tokens: float
    objective: str
    front_by: list[str]
    fits: bool
    choices: list[Choice]


class Link(TypedDict):
    """A link of a cluster, per device and one way."""

    name: str
    bytes_per_second: float


class Pool(TypedDict):
    """A uniform cluster, or a pool of a mixed one."""

    name: str
    device: str
    devices_per_host: int
    memory_bytes: float
    usd_per_hour: float | None
    price_source: str
    links: list[Link]


class ClusterEntry(Pool):
    """A shipped cluster."""

    source: str


class MixedEntry(TypedDict):
    """A shipped cluster of several pools."""

    name: str
    pools: list[Pool]
    links: list[Link]
    source: str


class ModelEntry(TypedDict):
    """A shipped model."""

    name: str
    num_params: int
    num_active_params: int
    num_layers: int
    hidden_size: int
    max_sequence_length: int
    source: str


class EngineEntry(TypedDict):
    """An engine for which plans can be made; runs: what executed each axis, by the names of the axes."""

    name: str
    program: str
    axes: list[str]
    precisions: list[str]
    optimizers: list[str]
    memory_recipes: list[str]
    zero_stages: list[int]
    recompute: list[str]
    schedules: list[str]
    offload: list[str]
    emits: list[str]
    priced_only: list[str]
    runs: Any


class Term(TypedDict):
    """An entry of the glossary."""

    terms: list[str]
    section: str
    text: str


class Row(TypedDict):
    """A run of a table, measured and predicted."""

    id: str
    supported: bool
    reason: str
    measured_step_s: float | None
    predicted_step_s: float | None
    low_step_s: float | None
    high_step_s: float | None
    measured_mem_bytes: float | None
    predicted_mem_bytes: float | None
    predicted_fits: bool | None
    predicted_verdict: str
    layout: str | None
    engine: str | None
    assumed: list[Assumed]
    null_step_s: float | None


class Accuracy(TypedDict):
    """`planner accuracy`."""

    rows: list[Row]
    groups: list[Group]
    memory_groups: list[Group]
    outcomes: Outcomes
    sweeps: list[Sweep]


class CountedLine(TypedDict):
    """A memory line as planned and as counted."""

    name: str
    planned_bytes: float
    counted_bytes: float


class Counted(TypedDict):
    """`planner verify`."""

    rank: int
    stage: int
    planned_bytes: float
    counted_bytes: float
    ratio: float
    agrees: bool
    lines: list[CountedLine]
