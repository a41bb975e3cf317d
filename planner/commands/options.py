"""Options and arguments that several commands share."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.run_arguments import OF_OTHER_PROGRAMS, RunArguments, option_name
from planner.units import parse_length, parse_share

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from dataclasses import Field

    from planner.api import Nodes, Sizes


def read_by(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a click callback that applies `read` to an option's text; a default that is no string is unchanged."""

    def call(ctx: click.Context, param: click.Parameter, value: Any) -> Any:  # noqa: ARG001 - click's own signature
        try:
            return read(value) if isinstance(value, str) else value
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return call


def _read_length(text: str) -> int:
    length = parse_length(text)
    if length < 1:
        raise ValueError(f"{text!r}: a sequence has at least one token")
    return length


_MOST_SIZES = 10_000
_MOST_SIZES_OF_POOLS = 256
"""Largest number of combinations of pool sizes in one command; each combination costs one search."""


def _read_nodes(text: str, *, ranges: bool) -> Nodes | Sizes:
    """Read a number of hosts, numbers of hosts by pool name, or, with `ranges`, also a range `A..B`."""
    if "=" in text:
        pools = _read_pools(text, ranges=ranges)
        is_one_size = all(len(hosts) == 1 for hosts in pools.values())
        return {pool: hosts[0] for pool, hosts in pools.items()} if is_one_size else pools
    hosts = _read_hosts(text, ranges=ranges)
    return hosts if ".." in text else hosts[0]


def _read_hosts(text: str, *, ranges: bool) -> range:
    first, dots, last = text.partition("..")
    parts = [first, last] if dots else [first]
    if not all(re.fullmatch(r"-?[0-9]{1,12}", part) for part in parts):
        raise ValueError(f"{text!r} is no number of hosts; write 16{' or 4..64' if ranges else ''}")
    counts = [int(part) for part in parts]
    if dots and not ranges:
        raise ValueError(f"{text!r}: one number of hosts; `planner plan --nodes A..B` compares many")
    if dots and not 1 <= counts[0] <= counts[1] < counts[0] + _MOST_SIZES:
        raise ValueError(f"{text!r}: write A..B with 1 <= A <= B, at most {_MOST_SIZES:,} sizes")
    return range(counts[0], counts[-1] + 1)


def _read_pools(text: str, *, ranges: bool) -> dict[str, range]:
    """Read the hosts of each pool, as in `old=2,new=1..8`."""
    found: dict[str, range] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if not name or name in found or "=" in count:
            raise ValueError(f"{text!r}: write the hosts of each pool once, as in old=2,new=4")
        found[name] = _read_hosts(count, ranges=ranges)
    if math.prod(map(len, found.values())) > _MOST_SIZES_OF_POOLS:
        raise ValueError(f"{text!r}: at most {_MOST_SIZES_OF_POOLS} sizes of a mixed cluster are compared")
    return found


def nodes_option(*, ranges: bool) -> Callable[[Any], Any]:
    """Return the option `--nodes N`, on a mixed cluster `POOL=N`; with `ranges` also `A..B` and `POOL=A..B`."""
    hosts = "Number of hosts, or A..B to compare sizes" if ranges else "Number of hosts"
    metavar = "N | A..B | POOL=..." if ranges else "N | POOL=N"
    words = f"{hosts}; overrides the cluster document. On a mixed cluster, hosts of each pool, as in old=2,new=4."
    return click.option("--nodes", callback=read_by(partial(_read_nodes, ranges=ranges)), metavar=metavar, help=words)


def cluster_names_of(text: str) -> list[str]:
    """Split an argument `A,B,C` into cluster names without repeats; an existing file with a comma is one name."""
    from planner.specs.by_name import is_there

    names = [text] if is_there(Path(text)) else [name.strip() for name in text.split(",")]
    if not all(names) and len(names) > 1:
        raise click.UsageError(f"{text}: write the clusters with one comma between two, as in p5,g6e")
    return list(dict.fromkeys(names))


def file_option(*names: str, help: str, multiple: bool = False) -> Callable[[Any], Any]:  # noqa: A002 - click's name
    """Return an option whose value is a file name."""
    return click.option(*names, type=click.Path(path_type=Path), metavar="FILE", help=help, multiple=multiple)


def share_option(*names: str, help: str, default: str | None = None) -> Callable[[Any], Any]:  # noqa: A002 - click's name
    """Return an option whose value is a fraction, written as 2% or 0.02."""
    shown = default is not None
    return click.option(
        *names, callback=read_by(parse_share), metavar="SHARE", default=default, show_default=shown, help=help
    )


class _Count(click.IntRange):
    """A whole number of at least 1; a message for ranges, which only `--nodes` and `--global-batch` take."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the number."""
        if ".." in str(value):
            self.fail(f"{value!r} is a range, and this option takes one number; ranges: --nodes A..B", param, ctx)
        return super().convert(value, param, ctx)


def count_option(*names: str, help: str) -> Callable[[Any], Any]:  # noqa: A002 - click's own name
    """Return an option whose value is a whole number of at least 1."""
    return click.option(*names, type=_Count(min=1), metavar="N", help=help)


calibration_option = file_option(
    "--calibration", help="Corrections from your own runs (`planner calibrate`), instead of the shipped ones."
)
_WORKLOAD = (
    count_option("--gpus", help="Number of devices, instead of --nodes."),
    click.option(
        "--seq-len",
        callback=read_by(_read_length),
        metavar="N | Nk",
        help="Tokens per sequence; 32k is 32,768.",
    ),
    click.option(
        "--global-batch",
        metavar="N | A..B | 'N tokens'",
        help="Sequences per optimizer step; `planner plan` chooses from a range.",
    ),
    click.option(
        "--precision",
        type=click.Choice(["fp32", "fp16", "bf16", "fp8", "fp4"]),
        help="Precision in which the model computes.",
    ),
    click.option("--engine", default="torch", show_default=True, metavar="NAME", help="The program that will train."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="PATH=VALUE",
        help="Change one value of a document, as in device.memory=141GiB.",
    ),
    click.option("--failures", is_flag=True, help="Count failures and checkpoints in the length of the run."),
    click.option(
        "--risk",
        callback=read_by(parse_share),
        metavar="SHARE",
        help="Accepted chance of running out of memory; 5% by default.",
    ),
    click.option(
        "--headroom",
        callback=read_by(parse_share),
        metavar="SHARE",
        help="Share of memory to leave free, a plain limit instead of --risk.",
    ),
    calibration_option,
    click.option("--allow-tp-across-nodes", is_flag=True, help="Let tensor parallelism cross scale-up domains."),
    click.option(
        "--allow-offload", is_flag=True, help="Let optimizer states and activations be kept in the hosts' memory."
    ),
)
_QUESTIONS = (
    click.option(
        "--why-not",
        multiple=True,
        metavar="LAYOUT|FILE",
        help="Compare with the best plan that has these values, as in tp=4 or zero=3.",
    ),
    click.option(
        "--what-if",
        multiple=True,
        is_flag=False,
        flag_value="",
        metavar="[PATH=VALUE]",
        help="Plan again with this change, as in nvlink.bandwidth=x2; without a value, 10 % more of each resource.",
    ),
    click.option("--schedules", is_flag=True, help="Compare and draw all pipeline schedules for this job."),
    click.option(
        "--collectives", is_flag=True, help="Show the communication of each group, and other algorithms for it."
    ),
    click.option("--batch", is_flag=True, help="Show how microbatch size and global batch change speed and learning."),
    click.option("--scaling", metavar="A..B", help="Show the best plan for each number of devices from A to B."),
)
_REPORTS = (
    file_option("--html", help="Write an HTML page that works offline: charts, timeline, ledger."),
    file_option("--trace", help="Write the step as a timeline that Perfetto opens."),
    click.option("--ranks", is_flag=True, help="In the timeline, show every rank of a replica instead of each stage."),
    click.option("--force", is_flag=True, help="Replace files that exist."),
)
_FOREIGN = (
    file_option(
        *("--from", "from_file"),
        multiple=True,
        help="A command line, script or configuration of another program; repeat it for further files of the run.",
    ),
    click.option("--model", "from_model", metavar="MODEL", help="With --from: use this model instead of the file's."),
    click.option(
        "--define", multiple=True, metavar="NAME=VALUE", help="With --from: set a variable that the file does not set."
    ),
    click.option("--args", metavar="'A B ...'", help="With --from: the arguments with which the script is called."),
    click.option("--ignore", multiple=True, metavar="KEY", help="With --from: price the file without this key."),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the document instead of text.")
_PLACE = (
    click.option(
        "--node-rank",
        type=click.IntRange(min=0),
        metavar="N",
        help="Number of this host, from 0, if there are several.",
    ),
    click.option("--master-addr", metavar="ADDRESS", help="Address at which the other hosts reach host 0."),
    click.option("--master-port", type=click.IntRange(1, 65535), metavar="PORT", help="A free port on host 0."),
)
force_unfit_option = click.option("--force-unfit", is_flag=True, help="Continue with a plan that does not fit.")
plan_argument = click.argument("plan_path", type=click.Path(path_type=Path), metavar="PLAN")


def workload_options(command: Any) -> Any:
    """Add the options that describe a workload."""
    return _with(command, _WORKLOAD)


class _OfOurTrainer(click.Option):
    """An option that only the planner's own trainer supports."""


class RunCommand(click.Command):
    """A command with the options of a run; its help lists the options of the planner's own trainer separately."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: D102 - click's own
        lines: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                lines[isinstance(param, _OfOurTrainer)].append(record)
        for title, records in (
            ("Options", lines[False]),
            ("Options for plans of engine torch (the planner's own trainer)", lines[True]),
        ):
            with formatter.section(title):
                formatter.write_dl(records)


def run_options(command: Any) -> Any:
    """Add the options of a run: the fields of `RunArguments`."""
    return _with(command, [_run_option(each) for each in fields(RunArguments)])


def _run_option(each: Field[Any]) -> Callable[[Any], Any]:
    """Return the option of one field of `RunArguments`; click parses paths and counts itself."""
    name, text, read = option_name(each.name), each.metadata["help"], each.metadata["read"]
    cls = click.Option if each.name in OF_OTHER_PROGRAMS else _OfOurTrainer
    if each.default is False:
        return click.option(name, cls=cls, is_flag=True, help=text)
    types = {Path: click.Path(path_type=Path), int: click.IntRange(min=1)}
    return click.option(
        name,
        cls=cls,
        type=types.get(read, str),
        multiple=each.default == (),
        default=each.default,
        show_default=bool(each.default),
        callback=None if read in types else read_by(read),
        metavar=each.metadata["metavar"],
        help=text,
    )


def with_run_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command, with all options of a run joined into one value `arguments`."""
    names = {each.name for each in fields(RunArguments)}
    arguments = RunArguments(**{name: options[name] for name in names})
    return {name: value for name, value in options.items() if name not in names} | {"arguments": arguments}


def place_options(command: Any) -> Any:
    """Add the options that give this host's number and the address of host 0."""
    return _with(command, _PLACE)


def question_options(command: Any) -> Any:
    """Add the options that ask about a plan, with the names that `planner.explain.report.Questions` has."""
    return _with(command, _QUESTIONS)


def foreign_options(command: Any) -> Any:
    """Add the options that read a configuration file of another program."""
    return _with(command, _FOREIGN)


def report_options(command: Any) -> Any:
    """Add the options that write the explanation of a plan to files."""
    return _with(command, _REPORTS)


def refuse_options(ctx: click.Context, names: Collection[str | None], why: str) -> None:
    """Refuse options that the user gave and that would otherwise be ignored silently.

    Raises:
        click.UsageError: the user gave one of these options.
    """
    given = [
        param.opts[0]
        for param in ctx.command.params
        if param.name in names and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: {why}")


def _with(command: Any, options: Sequence[Callable[[Any], Any]]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command
