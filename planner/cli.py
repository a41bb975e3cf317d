"""The command line as a process: signals, closed streams, exit codes. `planner.commands` holds the commands.

Results are written to standard output, everything else to standard error. A command's module is imported when the
command is named, and slow modules when it runs, so that `planner --help` answers at once.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shlex
import signal
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from planner.commands.console import Console
from planner.errors import EnvironmentProblem, ExitCode, InputError, PlannerError
from planner.later import Later, at
from planner.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

_OBJECTS_BETWEEN_COLLECTIONS: Final = 100_000


class _Terminated(BaseException):
    """SIGTERM arrived; raised in the main thread so that every `finally` runs."""


class _InOrder(click.Group):
    """A group that lists its commands in order of use instead of alphabetically."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's own signature
        return list(self.commands)


def _hush(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001 - click's own
    """Drop what a command writes to standard error; `_report` runs after it, so errors remain."""
    if value:
        ctx.with_resource(contextlib.redirect_stderr(io.StringIO()))


def _quiet(*, hidden: bool = False) -> click.Option:
    words = "No progress and no notes; errors remain."
    names = ["-q", "--quiet"]
    return click.Option(names, is_flag=True, expose_value=False, callback=_hush, hidden=hidden, help=words)


_EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "plan": (
        "planner plan llama3-70b dgx-h100 --nodes 16 --global-batch 512 -o plan.json",
        "planner plan gpt3-175b dgx-a100 --nodes 64..128 --global-batch 1536",
        "planner plan config.json dgx-h100,dgx-a100 --gpus 64 --global-batch 256",
    ),
    "explain": (
        "planner explain plan.json --why-not tp=8",
        "planner explain llama3-8b dgx-h100 --global-batch 64 --layout dp=8,zero=3",
        "planner explain --from train.sh dgx-h100 --gpus 64",
    ),
    "diff": ("planner diff before.json after.json",),
    "verify": ("planner verify plan.json",),
    "launch": ("planner launch plan.json --data text.jsonl --tokenizer tokenizer.json",),
    "emit": ("planner emit plan.json --on slurm -o run/",),
    "accuracy": ("planner accuracy runs.csv",),
    "measure": ("planner measure -o measured/ --model llama3-8b",),
    "calibrate": ("planner calibrate runs/ -o mine.json", "planner calibrate train.log --plan plan.json -o mine.json"),
    "check": (
        "planner check runs/plan --plan plan.json",
        "planner check train.log --plan plan.json --baseline last-week.log --fail-on slower",
    ),
    "models": ("planner models llama3-70b", "planner models --from Qwen3-8B/config.json -o qwen3-8b.yaml"),
    "clusters": ("planner clusters gb200-nvl72", "planner clusters --detect > mine.yaml"),
    "engines": ("planner engines", "planner engines megatron"),
    "glossary": ("planner glossary bubble",),
    "serve": ("planner serve",),
}
"""The commands in order of use, with examples of each."""

_FIRST: Final = (
    "planner plan llama3-8b dgx-h100 --global-batch 512 -o plan.json",
    "planner explain plan.json",
    "planner emit plan.json --on slurm -o run",
)


def _epilog(examples: Sequence[str]) -> str:
    return "\b\nFor example:\n" + "\n".join(f"  {example}" for example in examples)


@cache
def _command(name: str) -> click.Command:
    found: click.Command = at(f"commands.{name}:command")
    found.params.append(_quiet(hidden=True))  # `planner plan -q` works like `planner -q plan`
    found.epilog = _epilog(_EXAMPLES[name])
    return found


_COMMANDS: Final[Any] = Later(_EXAMPLES, _command)


@click.group(
    cls=_InOrder,
    commands=_COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_epilog(_FIRST),
)
@click.version_option(VERSION, prog_name="planner")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Plan, explain and run the distributed training of transformer models."""
    if ctx.invoked_subcommand is None:
        Console().print(ctx.get_help() + "\n")


cli.params.insert(0, _quiet())


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; an exception that escapes is a bug."""
    try:
        code = _invoke(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output closed it
        return ExitCode.OK
    except OSError as error:
        if error.filename is not None:  # a file error that a command should have handled
            raise
        return _report(EnvironmentProblem(f"cannot write the output: {error.strerror}"))
    return code


def _invoke(argv: Sequence[str]) -> int:
    command = shlex.join(["planner", *argv])
    try:
        return int(cli.main(list(argv), prog_name="planner", standalone_mode=False, obj=command) or ExitCode.OK)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "planner"
        hint = f"see `{path} --help`"
        if isinstance(error, click.MissingParameter) and error.ctx and error.ctx.command.epilog:
            examples = (line.strip() for line in error.ctx.command.epilog.splitlines()[2:])
            hint = "\n".join((f"{hint}, as in", *examples))
        return _report(InputError(error.format_message(), hint=hint))
    except PlannerError as error:
        return _report(error)
    except MemoryError:
        hint = "free some memory, or raise the limit of this process (`ulimit -v`)"
        return _report(EnvironmentProblem("this machine has too little free memory for the command", hint=hint))
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except _Terminated:
        return ExitCode.TERMINATED
    except SystemExit:  # from click, when the reader has closed our output; no command raises it
        return ExitCode.OK


def _report(error: PlannerError) -> int:
    from planner.show.mistakes import mistakes_text
    from planner.show.screen import Screen

    with contextlib.suppress(OSError):  # if the message cannot be written, the exit code still reports the error
        sys.stderr.write(mistakes_text(error, Screen.of(sys.stderr)))
    return error.exit_code


def _terminate(signum: int, frame: object) -> NoReturn:  # noqa: ARG001 - the signature of a signal handler
    raise _Terminated


def _open_missing_streams() -> None:
    """Open the null device for each closed standard stream; else the next opened file would receive our output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - open as long as the process runs
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def _drop_unwritable_output() -> None:
    """Send output that a stream still buffers and cannot write to the null device.

    Otherwise the interpreter would try to write again at its end, and exit with 120 instead of our code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run() -> NoReturn:
    """The console entry: `main` with the arguments, signals and streams of this process.

    Nearly all objects that live as long as this short process are created by imports. A garbage collection after every
    700 new objects would take a tenth of the time of a plan, and the interpreter's own collections at its end another
    tenth.
    """
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else it looks for some in every installed package
    _open_missing_streams()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    finally:
        _drop_unwritable_output()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is out: nothing is left to interrupt
    gc.freeze()  # the objects go with the process
    sys.exit(code)
