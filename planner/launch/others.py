"""Launch a plan for another program: start the emitted files, or name the command that installs the program."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from planner.emit.bundle import bundle_of, not_carried, target_of, write_bundle
from planner.emit.hosts import num_hosts
from planner.emit.programs.torch import commands_of_hosts
from planner.emit.target import How
from planner.errors import EnvironmentProblem, ExitCode
from planner.launch.hosts import find_host
from planner.specs.mistakes import Mistakes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from planner.emit.bundle import Bundle
    from planner.emit.programs.torch import Host
    from planner.emit.target import Place
    from planner.plan import Plan
    from planner.run_arguments import RunArguments


def launch_other(
    plan: Plan,
    *,
    output: Path,
    arguments: RunArguments,
    further: Sequence[str] = (),
    smoke: bool = False,
    dry_run: bool = False,
    force_unfit: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    **place: Any,
) -> int:
    """Write the program's files into `output`, start them on this host, and return the program's exit code.

    dry_run: print the command of each host and start nothing; the number of this host is not needed then.
    further: options of the program, added after the options that the script has.
    force_unfit, tell: as `planner.verdict.check_fits`.
    place: as `planner.launch.hosts.find_host`.

    Raises:
        InputError: a placeholder of the files has no value, or the program has no option for a value of the plan.
        EnvironmentProblem: the program is not installed; the hint has the command that installs it.
        NothingFitsError: the plan does not fit into memory.
    """
    target, how = target_of(plan, None), How(arguments=arguments, smoke=smoke)
    made = bundle_of(plan, how=how, force_unfit=force_unfit, tell=tell)
    for each in not_carried(target, plan, how):
        tell(f"still yours: {each}")
    if dry_run:
        is_placed = any(each is not None for each in place.values())
        own = find_host(plan, os.environ, **place) if is_placed else None
        hosts = [0] if is_placed else [0, *[1] * (num_hosts(plan) - 1)]  # host 0 has another folder
        sys.stdout.write(
            commands_of_hosts(hosts, lambda place: shlex.join(_words(output, made, own or place, further)))
        )
        return ExitCode.OK
    host = find_host(plan, os.environ, **place)
    words = _words(output, made, host, further)
    _check_filled(made.still_yours, further, where=target.program)
    if shutil.which(target.executable) is None:
        hint = f"{target.install}; or `planner emit` writes the files for another machine"
        raise EnvironmentProblem(f"{target.executable} is not installed, which starts {target.program}", hint=hint)
    folder = _folder(output, host)
    write_bundle(plan, folder, how=how, force=(folder / "plan.json").exists(), force_unfit=force_unfit)
    return _run(words)


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SECONDS_TO_END: Final = 30.0
"""Seconds between the first signal and the end of a program that ignores it; torchrun gives its ranks as long."""
_POLL_SECONDS: Final = 0.1


def _run(words: Sequence[str]) -> int:
    """Run a command, and return its exit code, with no process of it left.

    The command has a process group of its own. A signal is handed on to the whole group, once. The group ends at a
    second signal, or if processes of it are left `SECONDS_TO_END` later.
    """
    taken: list[int] = []
    before = {each: signal.signal(each, lambda number, _: taken.append(number)) for each in _SIGNALS}
    process = subprocess.Popen(words, start_new_session=True)  # noqa: S603 - the script that was just written
    try:
        told, end = False, math.inf
        while process.poll() is None or (told and _tell_group(process.pid, 0)):
            if taken and not told:
                told, end = True, time.monotonic() + SECONDS_TO_END
                _tell_group(process.pid, taken[0])
            if len(taken) > 1 or time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        _tell_group(process.pid, signal.SIGKILL)
        code = process.wait()
        for each, handler in before.items():
            signal.signal(each, handler)
    if taken:
        return ExitCode.INTERRUPTED if taken[0] == signal.SIGINT else ExitCode.TERMINATED
    return code if code >= 0 else 128 - code


def _tell_group(group: int, number: int) -> bool:
    """Send a signal to every process of a group, 0 for none; returns whether there is one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _folder(output: Path, host: Host | Place | None) -> Path:
    return output if host is None or str(host.number) == "0" else output / f"host-{host.number}"


def _words(output: Path, made: Bundle, host: Host | Place | None, further: Sequence[str]) -> list[str]:
    """Return the command of one host; `host` is None if the run has a single host."""
    place = [] if host is None else [str(host.number), host.address, str(host.port)]
    return ["bash", str(_folder(output, host) / made.script), *place, *further]


def _check_filled(still_yours: dict[str, str], further: Sequence[str], *, where: str) -> None:
    """Refuse to start while the files hold a placeholder without a value; `$NAME` may be set in the environment."""
    given = " ".join(further)
    mistakes = Mistakes()
    for placeholder, meaning in still_yours.items():
        if placeholder.startswith("$"):
            is_set, hint = bool(os.environ.get(placeholder.removeprefix("$"))), "set it in the environment"
        else:
            is_set = f"--{placeholder.lower().replace('_', '-')}" in given
            hint = "--data, --tokenizer, or options behind --"
        if not is_set:
            mistakes.add(f"{placeholder} is still yours: {meaning}", where, hint)
    mistakes.raise_if_any()
