"""Tools for agents over the Model Context Protocol (`planner serve`): what the commands answer with --json.

The server reads the files that a call names, and writes none. Standard output carries the protocol.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from planner import api, shipped
from planner.answers.report import Sections
from planner.errors import PlannerError
from planner.plan import plan_to_dict
from planner.show.nothing_fits import ways_out_to_dict
from planner.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

_ABOUT: Final = (
    "Plans distributed training of transformer models: memory, step time and the best layout, without a GPU. `plan` "
    "finds a layout, `price` and `explain` answer about a given one, `read` about a script of another program. Seconds "
    "and bytes are plain numbers. docs/schemas of the project describes the answers."
)
_READS: Final = ToolAnnotations(read_only_hint=True, open_world_hint=False)

Model = Annotated[str, Field(description="a shipped model (`models` lists them), a YAML file or a config.json")]
Cluster = Annotated[str, Field(description="a shipped cluster (`clusters` lists them) or a YAML file")]
Layout = Annotated[str, Field(description="tp=8,pp=4,mbs=1,zero=1,recompute=none ...; what is left out is assumed")]
Nodes = Annotated[int | None, Field(description="number of hosts")]
Gpus = Annotated[int | None, Field(description="number of GPUs, instead of nodes")]
Length = Annotated[int | None, Field(description="tokens of a sequence")]
Batch = Annotated[int | None, Field(description="sequences of a step")]
Engine = Annotated[str, Field(description="program: torch, megatron, megatron-bridge, torchtitan, deepspeed, fsdp ...")]
Settings = Annotated[list[str], Field(description="KEY=VALUE: training.tokens=15e12, training.lora_rank=16 ...")]
Pins = Annotated[list[str], Field(description="fixed values: tp=8 or mbs<=4")]


def _job(engine: str, settings: list[str], **given: Any) -> dict[str, Any]:
    """The keywords of `planner.api`; what a call leaves out is left out."""
    stated = {name: value for name, value in given.items() if value is not None}
    return stated | ({"engine": engine} if engine else {}) | {"settings": settings}


def plan(
    model: Model, cluster: Cluster, nodes: Nodes = None, gpus: Gpus = None, seq_len: Length = None,
    global_batch: Batch = None, engine: Engine = "", settings: Settings = [], pin: Pins = [],  # noqa: B006
    objective: Annotated[str, Field(description="throughput, cost, gpus or memory")] = "throughput",
) -> dict[str, Any]:  # fmt: skip
    """Find the best layout of a model on a cluster, and prove it; if nothing fits, `remedies` says what would help."""
    job = _job(engine, settings, nodes=nodes, gpus=gpus, seq_len=seq_len, global_batch=global_batch)
    choice: Any = objective
    found = api.plan_job(model, cluster, pin=pin, objective=choice, **job)
    lacking = api.shortfall(found, choice)
    return plan_to_dict(found) | (ways_out_to_dict(lacking.remedies(), lacking.lifted_pins()) if lacking else {})


def price(
    model: Model, cluster: Cluster, layout: Layout, nodes: Nodes = None, gpus: Gpus = None, seq_len: Length = None,
    global_batch: Batch = None, engine: Engine = "", settings: Settings = [],  # noqa: B006
) -> dict[str, Any]:  # fmt: skip
    """Memory, step time, cost and the chance of fitting of one layout, without a search."""
    job = _job(engine, settings, nodes=nodes, gpus=gpus, seq_len=seq_len, global_batch=global_batch)
    return plan_to_dict(api.estimate_layout(model, cluster, layout=layout, **job))


def explain(
    model: Model, cluster: Cluster, layout: Layout, nodes: Nodes = None, gpus: Gpus = None, seq_len: Length = None,
    global_batch: Batch = None, engine: Engine = "", settings: Settings = [],  # noqa: B006
    why_not: Annotated[list[str], Field(description="other values of the layout: tp=8")] = [],  # noqa: B006
    what_if: Annotated[list[str], Field(description="changes: nvlink.bandwidth=x2, device.memory=141GiB")] = [],  # noqa: B006
    scaling: Annotated[str | None, Field(description="numbers of hosts, 1..16")] = None,
) -> dict[str, Any]:  # fmt: skip
    """Where time and memory of a layout go, and questions about it: why not another one, what if, on other sizes."""
    job = _job(engine, settings, nodes=nodes, gpus=gpus, seq_len=seq_len, global_batch=global_batch)
    priced = api.estimate_layout(model, cluster, layout=layout, **job)
    questions: Any = {"why_not": why_not, "what_if": what_if, "scaling": scaling}
    asked = api.explain_layout(priced, **questions, search=False, parts=Sections.model_fields)
    document: dict[str, Any] = json.loads(asked.to_json())
    return document


def read(
    files: Annotated[list[str], Field(description="paths of one run's files: script, YAML, JSON, TOML")],
    cluster: Cluster, nodes: Nodes = None, gpus: Gpus = None, model: Model = "", layout: Layout = "",
    settings: Settings = [],  # noqa: B006
) -> dict[str, Any]:  # fmt: skip
    """Price what the files of another program run: Megatron-LM, torchtitan, DeepSpeed, Accelerate, TRL ..."""
    job = _job("", settings, nodes=nodes, gpus=gpus)
    return plan_to_dict(api.estimate_file(files, cluster, model=model or None, layout=layout, **job))


def models(name: Annotated[str, Field(description="one model, whole; none lists all")] = "") -> dict[str, Any]:
    """Shipped models with their sizes, or one model whole."""
    return shipped.one_model(name) if name else {"result": shipped.models()}


def clusters(name: Annotated[str, Field(description="one cluster, whole; none lists all")] = "") -> dict[str, Any]:
    """Shipped clusters with their devices, links and prices, or one cluster whole."""
    return shipped.one_cluster(name) if name else {"result": shipped.clusters()}


def _told(tool: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The tool, whose user mistakes reach the agent as text."""
    from functools import wraps

    @wraps(tool)
    def call(**arguments: Any) -> dict[str, Any]:
        try:
            return tool(**arguments)
        except PlannerError as error:
            raise ToolError("\n".join(each.text() for each in error.mistakes)) from None

    return call


def server() -> MCPServer:
    """The server with all tools."""
    found = MCPServer("planner", instructions=_ABOUT, version=VERSION, log_level="ERROR")
    for tool in (plan, price, explain, read, models, clusters):
        found.add_tool(_told(tool), name=tool.__name__, description=tool.__doc__, annotations=_READS)
    return found
