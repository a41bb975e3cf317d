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
from planner.units import parse_length, parse_share, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from dataclasses import Field

    from planner.asked import Nodes, Sizes


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
    parts = [str(whole_of(part)) for part in parts]
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


def cluster_names_of(text: str) -> list[str]:
    """Split an argument `A,B,C` into cluster names without repeats; an existing file with a comma is one name."""
    from planner.specs.by_name import is_there

    names = [text] if is_there(Path(text)) else [name.strip() for name in text.split(",")]
    if not all(names) and len(names) > 1:
        raise click.UsageError(f"{text}: write the clusters with one comma between two, as in p5,g6e")
    return list(dict.fromkeys(names))


def file_option(*names: str, help: str, metavar: str = "FILE", **more: Any) -> Callable[[Any], Any]:  # noqa: A002 - click's
    """Return an option whose value is the name of a file or folder."""
    return click.option(*names, type=click.Path(path_type=Path), metavar=metavar, help=help, **more)


def share_option(*names: str, help: str, default: str | None = None) -> Callable[[Any], Any]:  # noqa: A002 - click's name
    """Return an option whose value is a fraction, written as 2% or 0.02."""
    how: Any = {} if default is None else {"default": default, "show_default": True}
    return click.option(*names, callback=read_by(parse_share), metavar="SHARE", help=help, **how)


class _Count(click.IntRange):
    """A whole number of at least 1; a message for ranges, which only `--nodes` and `--global-batch` take."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the number."""
        if ".." in str(value):
            self.fail(f"{value!r} is a range, and this option takes one number; ranges: --nodes A..B", param, ctx)
        return super().convert(whole_of(value), param, ctx)


def group(title: str, *options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds options to a command, under a heading of their own in the help of a `Command`."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
            command.__click_params__[-1].group = title
        return command

    return add


class Command(click.Command):
    """A command whose help has a section for each `group` of options, and one for the options without a group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: D102 - click's own
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections.setdefault(getattr(param, "group", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


help_option = click.help_option("-h", "--help", help="Show this message and exit.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the document instead of text.")
force_option = click.option("--force", is_flag=True, help="Replace files that exist.")
calibration_option = file_option("--calibration", help="Corrections that `planner calibrate` wrote.")
workload_options = group(
    "Workload",
    file_option(*("--from", "from_file"), multiple=True, help="Files of another program's run; repeatable."),
    click.option("--model", "from_model", metavar="MODEL", help="With --from: this model, not the file's."),
    click.option(
        "--define", multiple=True, metavar="NAME=VALUE", help="With --from: a variable that the file does not set."
    ),
    click.option("--args", metavar="'A B ...'", help="With --from: the arguments of the script."),
    click.option("--ignore", multiple=True, metavar="KEY", help="With --from: price the file without this key."),
    click.option("--seq-len", callback=read_by(_read_length), metavar="N", help="Tokens per sequence; 32k is 32,768."),
    click.option("--global-batch", metavar="N", help="Sequences of a step, A..B to choose, or 'N tokens'."),
    click.option(
        "--precision",
        type=click.Choice(["fp32", "fp16", "bf16", "fp8", "fp4"]),
        metavar="NAME",
        help="Of the computation: fp32, fp16, bf16, fp8 or fp4.",
    ),
    click.option("--engine", default="torch", show_default=True, metavar="NAME", help="The program that will train."),
    click.option(
        *("--set", "settings"),
        multiple=True,
        metavar="PATH=VALUE",
        help="Change a document, as in device.memory=141GiB.",
    ),
    click.option("--failures", is_flag=True, help="Count failures and checkpoints in the run's length."),
)


def machine_options(*, ranges: bool) -> Callable[[Any], Any]:
    """Return the options of the machines; `--nodes` takes N or POOL=N, with `ranges` also A..B and POOL=A..B."""
    hosts = f"Hosts, {'A..B to compare, ' * ranges}or of pools: old=2,new=4."
    return group(
        "Machine",
        click.option("--nodes", callback=read_by(partial(_read_nodes, ranges=ranges)), metavar="N", help=hosts),
        click.option("--gpus", type=_Count(min=1), metavar="N", help="Devices, instead of --nodes."),
        share_option("--risk", help="Accepted chance of running out of memory; 5%."),
        share_option("--headroom", help="Memory to leave free, instead of --risk."),
        calibration_option,
        click.option("--allow-tp-across-nodes", is_flag=True, help="Let tp cross scale-up domains."),
        click.option("--allow-offload", is_flag=True, help="Let states, weights and activations go to the hosts."),
    )


question_options = group(
    "Questions",
    click.option(
        "--why-not", multiple=True, metavar="LAYOUT|FILE", help="Compare the best plan with tp=4, or a file's layout."
    ),
    click.option(
        "--what-if",
        multiple=True,
        is_flag=False,
        flag_value="",
        metavar="[PATH=VALUE]",
        help="Plan again, as with nvlink.bandwidth=x2; without a value, with 10 % more of each resource.",
    ),
    click.option("--schedules", is_flag=True, help="Compare and draw all pipeline schedules."),
    click.option("--collectives", is_flag=True, help="Show the communication of each group."),
    click.option("--batch", is_flag=True, help="Show how batch sizes change speed and learning."),
    click.option("--scaling", metavar="A..B", help="Show the best plan for A to B devices."),
)
report_options = group(
    "Output",
    json_option,
    file_option("--html", help="Write a page that works offline: charts, ledger."),
    file_option("--trace", help="Write the step as a timeline for Perfetto."),
    click.option("--ranks", is_flag=True, help="In the timeline, every rank of a replica."),
    force_option,
    help_option,
)
place_options = group(
    "Options",
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


def run_options(command: Any) -> Any:
    """Add the options of a run: the fields of `RunArguments`."""
    for each in reversed(fields(RunArguments)):
        command = _run_option(each)(command)
        if each.name not in OF_OTHER_PROGRAMS:
            command.__click_params__[-1].group = "Options for plans of engine torch (the planner's own trainer)"
    return command


def _run_option(each: Field[Any]) -> Callable[[Any], Any]:
    """Return the option of one field of `RunArguments`; click parses paths and counts itself."""
    name, text, read = option_name(each.name), each.metadata["help"], each.metadata["read"]
    if each.default is False:
        return click.option(name, is_flag=True, help=text)
    types = {Path: click.Path(path_type=Path), int: _Count(min=1)}
    return click.option(
        name,
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


def is_given(ctx: click.Context, name: str | None) -> bool:
    """Whether the user gave an option or argument."""
    return name is not None and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def given_options(ctx: click.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options and arguments that the user gave; functions have their own defaults for the others."""
    return {name: value for name, value in options.items() if is_given(ctx, name)}


def refuse_options(ctx: click.Context, names: Collection[str | None], why: str) -> None:
    """Refuse options that the user gave and that would otherwise be ignored silently.

    Raises:
        click.UsageError: the user gave one of these options.
    """
    if given := [each.opts[0] for each in ctx.command.params if each.name in names and is_given(ctx, each.name)]:
        raise click.UsageError(f"{', '.join(given)}: {why}")
