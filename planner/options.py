"""Options and arguments that several commands share."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.units import parse_length

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "count_option",
    "file_option",
    "json_option",
    "nodes_option",
    "place_options",
    "plan_argument",
    "question_options",
    "report_options",
    "run_options",
    "workload_options",
]


def _read_share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:  # noqa: ARG001
    """A share of one, written `10%` or `0.1`; click calls this for `--headroom`."""
    if value is None:
        return None
    try:
        share = float(value.strip().removesuffix("%")) / (100 if value.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise click.BadParameter(f"{value!r} is no share; write a percentage from 0% to below 100%")
    return share


def _read_batch(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:  # noqa: ARG001
    """A whole number, else the text of a choice, which the job reads; click calls this for `--global-batch`."""
    return int(value) if value and re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()) else value


def _read_length(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:  # noqa: ARG001
    """Tokens of a sequence; click calls this for `--seq-len`."""
    if value is None:
        return None
    try:
        length = parse_length(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if length < 1:
        raise click.BadParameter(f"{value!r}: a sequence has at least one token")
    return length


def _read_held_out(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """As `_read_share`, up to a half; click calls this for `--validation`."""
    share = _read_share(ctx, param, value) or 0.0
    if share > 1 / 2:
        raise click.BadParameter(f"{value!r} leaves less for training than for validation")
    return share


def _read_resume(ctx: click.Context, param: click.Parameter, value: str) -> str:  # noqa: ARG001
    """`auto`, `never` or a step; click calls this for `--resume`."""
    if value not in ("auto", "never") and not (value.isascii() and value.isdigit()):
        raise click.BadParameter(f"{value!r} is neither auto nor never nor a step")
    return value


_MOST_SIZES = 10_000
_MOST_SIZES_OF_POOLS = 256
"""Each size of a mixed cluster takes a search of its own."""


def _read_nodes(value: str | None, *, ranges: bool) -> int | range | dict[str, range] | None:
    """A number of hosts, or with `ranges` also `A..B`, which becomes a range; or such numbers of named pools."""
    if value is None:
        return None
    if "=" in value:
        return _read_pools(value, ranges=ranges)
    first, dots, last = value.partition("..")
    parts = [first, last] if dots else [first]
    if not all(re.fullmatch(r"-?[0-9]{1,12}", part) for part in parts):
        raise click.BadParameter(f"{value!r} is no number of hosts; write 16{' or 4..64' if ranges else ''}")
    counts = [int(part) for part in parts]
    if not dots:
        return counts[0]
    if not ranges:
        raise click.BadParameter(f"{value!r}: one number of hosts; `planner plan --nodes A..B` compares many")
    if not 1 <= counts[0] <= counts[1] < counts[0] + _MOST_SIZES:
        raise click.BadParameter(f"{value!r}: write A..B with 1 <= A <= B, at most {_MOST_SIZES:,} sizes")
    return range(counts[0], counts[1] + 1)


def _read_pools(value: str, *, ranges: bool) -> dict[str, range]:
    """Hosts of pools, as in `old=2,new=1..8`."""
    found: dict[str, range] = {}
    for part in value.split(","):
        name, _, count = part.strip().partition("=")
        hosts = _read_nodes(count, ranges=ranges) if "=" not in count else None
        if not name or name in found or not isinstance(hosts, int | range):
            raise click.BadParameter(f"{value!r}: write the hosts of each pool once, as in old=2,new=4")
        found[name] = range(hosts, hosts + 1) if isinstance(hosts, int) else hosts
    if math.prod(map(len, found.values())) > _MOST_SIZES_OF_POOLS:
        raise click.BadParameter(f"{value!r}: at most {_MOST_SIZES_OF_POOLS} sizes of a mixed cluster are compared")
    return found


def nodes_option(*, ranges: bool) -> Callable[[Any], Any]:
    """`--nodes N`, and with `ranges` also `--nodes A..B`; on a mixed cluster `--nodes POOL=N` or `POOL=A..B`."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:  # noqa: ARG001
        return _read_nodes(value, ranges=ranges)

    hosts = "Hosts, or A..B to compare sizes" if ranges else "Hosts"
    metavar = "N | A..B | POOL=..." if ranges else "N | POOL=N"
    words = f"{hosts}; overrides the cluster's own count. On a mixed cluster those of its pools, as in old=2,new=4."
    return click.option("--nodes", callback=read, metavar=metavar, help=words)


def file_option(*names: str, help: str) -> Callable[[Any], Any]:  # noqa: A002 - click's own name
    """An option that takes a file name."""
    return click.option(*names, type=click.Path(path_type=Path), metavar="FILE", help=help)


def count_option(*names: str, help: str) -> Callable[[Any], Any]:  # noqa: A002 - click's own name
    """An option that takes a number of at least one."""
    return click.option(*names, type=click.IntRange(min=1), metavar="N", help=help)


_WORKLOAD = (
    count_option("--gpus", help="Devices, instead of --nodes."),
    click.option(
        "--seq-len",
        "sequence_length",
        callback=_read_length,
        metavar="N | Nk",
        help="Tokens per sequence; 32k is 32,768.",
    ),
    click.option(
        "--global-batch",
        "global_batch_size",
        callback=_read_batch,
        metavar="N | A..B | 'N tokens'",
        help="Sequences per optimizer step; plan chooses from a range.",
    ),
    click.option(
        "--precision", type=click.Choice(["fp32", "fp16", "bf16", "fp8", "fp4"]), help="What the model computes in."
    ),
    click.option("--engine", default="torch", show_default=True, metavar="NAME", help="The program that will train."),
    click.option("--set", "settings", multiple=True, metavar="PATH=VALUE", help="As in device.memory=141GiB."),
    click.option("--headroom", callback=_read_share, metavar="SHARE", help="Memory to leave free; 5% by default."),
    file_option("--calibration", help="Corrections from your own runs, in place of the shipped ones."),
    click.option("--allow-tp-across-nodes", is_flag=True, help="Let tensor parallelism leave the scale-up domain."),
    click.option("--allow-offload", is_flag=True, help="Let states and activations go to the hosts' memory."),
)
_QUESTIONS = (
    click.option("--why-not", multiple=True, metavar="LAYOUT|FILE", help="Force this instead, as in tp=4 or zero=3."),
    click.option(
        "--what-if",
        multiple=True,
        is_flag=False,
        flag_value="",
        metavar="[PATH=VALUE]",
        help="Plan again with this changed, as in nvlink.bandwidth=x2; alone, the gain of 10 % more of everything.",
    ),
    click.option("--schedules", is_flag=True, help="All pipeline schedules on this job, side by side and drawn."),
    click.option("--collectives", is_flag=True, help="What each group communicates, and how else it could."),
    click.option("--batch", is_flag=True, help="What microbatch size and global batch do to speed and learning."),
    click.option("--scaling", metavar="A..B", help="The best plan for each number of devices from A to B."),
)
_REPORTS = (
    file_option("--html", help="Write a page that opens from disk: charts, timeline, ledger."),
    file_option("--trace", help="Write the step as a timeline that Perfetto opens."),
    click.option("--ranks", is_flag=True, help="In the timeline, every rank of a replica in place of each stage."),
    click.option("--force", is_flag=True, help="Replace files that exist."),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the document instead of text.")
_RUN = (
    click.option("--data", multiple=True, metavar="SOURCE", help="Text, .jsonl, .parquet or .npy file, or hf:NAME."),
    click.option("--tokenizer", type=click.Path(path_type=Path), metavar="PATH", help="A tokenizer.json; else bytes."),
    click.option("--document-mask", is_flag=True, help="Packed documents do not attend to each other."),
    click.option(
        "--validation", callback=_read_held_out, default="0%", metavar="SHARE", help="Samples to hold out; up to 50%."
    ),
    click.option(
        "--weights", type=click.Path(path_type=Path), metavar="DIR", help="A Hugging Face model to start from."
    ),
    click.option(
        "--export", type=click.Path(path_type=Path), metavar="DIR", help="Write one here after the last step."
    ),
    count_option("--steps", help="Optimizer steps; the plan's own number by default."),
    click.option(
        "--resume",
        default="auto",
        show_default=True,
        callback=_read_resume,
        metavar="auto|never|STEP",
        help="Which checkpoint to start from.",
    ),
    count_option("--checkpoint-every", help="Steps between checkpoints; every ten minutes by default."),
    click.option(
        "--keep-checkpoints",
        type=click.IntRange(min=1),
        default=2,
        show_default=True,
        metavar="N",
        help="How many stay.",
    ),
    click.option("--async-save", is_flag=True, help="Write checkpoints while the training goes on."),
    click.option("--async-tp", is_flag=True, help="Compiled layers multiply while pieces arrive; on GPUs, with tp."),
    click.option(
        "--validate-every",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        metavar="N",
        help="Steps between losses of the held-out samples.",
    ),
    count_option("--profile", help="Record step N with torch's profiler."),
    click.option("--tensorboard", is_flag=True, help="Write metrics for TensorBoard too."),
    click.option("--wandb", metavar="PROJECT", help="Send metrics to Weights & Biases too."),
)
_PLACE = (
    click.option("--node-rank", type=click.IntRange(min=0), metavar="N", help="Number of this host, of several."),
    click.option("--master-addr", metavar="ADDRESS", help="Where the other hosts reach host 0."),
    click.option("--master-port", type=click.IntRange(1, 65535), metavar="PORT", help="A port that is free there."),
)
plan_argument = click.argument("plan_path", type=click.Path(path_type=Path), metavar="PLAN")


def workload_options(command: Any) -> Any:
    """Add the options that describe a workload."""
    return _with(command, _WORKLOAD)


def run_options(command: Any) -> Any:
    """Add the options of a run: the fields of `planner.emit.torchrun.RunArguments`."""
    return _with(command, _RUN)


def place_options(command: Any) -> Any:
    """Add the options that say which of several hosts this one is."""
    return _with(command, _PLACE)


def question_options(command: Any) -> Any:
    """Add the options that ask about a plan; their names are those of `planner.explain.report.Questions`."""
    return _with(command, _QUESTIONS)


def report_options(command: Any) -> Any:
    """Add the options that write what is known about a plan to files."""
    return _with(command, _REPORTS)


def _with(command: Any, options: Sequence[Callable[[Any], Any]]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command
