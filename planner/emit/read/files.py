"""The files of one run of another program: those that the user gives, and those that these files name.

They are looked for among the files that the user gave, beside the naming file and in the working folder. They are
parsed, and never run.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from os.path import exists, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from planner.emit.names import names_beside
from planner.emit.read import PROGRAM, THE_FILE, has_all
from planner.emit.read.conditions import UNSET
from planner.emit.read.facts import not_set
from planner.emit.read.launchers import script_of
from planner.emit.read.methods import of_program
from planner.emit.read.overrides import recipe_names, recipe_of
from planner.emit.read.readers import READERS
from planner.emit.read.slurm import with_srun
from planner.errors import InputError, Mistake, PlannerError
from planner.specs.files import kind_of, limited_text
from planner.specs.text import did_you_mean, printable
from planner.specs.yaml import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from planner.emit.read import Reader
    from planner.emit.target import Value, Values

Read = TypeVar("Read")
_MOST_FILES: Final = 4
"""Longest chain of files that name each other; a script, its configuration and the configuration's own file are 3."""
_NAMED_KINDS: Final = (".json", ".yaml", ".yml", ".toml")
"""Endings of files that are opened because a file names them, so that no script can show another kind of file."""


class File(NamedTuple):
    """A file of a run; `shown` is its name in messages, and `whole` the text around the script that it has."""

    path: Path
    shown: str
    text: str
    whole: str = ""

    def where(self, key: str) -> str:
        """The file, with the last line that has the key outside comments, as an option or in YAML, if there is one."""
        line = next(filter(None, map(self._line, (key, key.rpartition(".")[2]))), 0) if key else 0
        return f"{self.shown}:{line}" if line else self.shown

    def _line(self, key: str) -> int:
        spelled = re.compile(rf"(?<![\w-])(--)?{re.escape(key).replace('_', '[-_]')}(?![\w-])")
        lines = enumerate((self.whole or self.text).split("\n"), 1)
        return max((number for number, line in lines if spelled.search(re.split(r"(?:^|\s)#", line)[0])), default=0)


def opened(path: Path) -> File:
    """The file of a path; `-` is standard input, and the name of a recipe is its command."""
    if not exists(path) and recipe_of(str(path)):  # noqa: PTH110 - it accepts names of any length
        return File(path, str(path), f"run_recipe.py --recipe {path}\n")
    shown = "standard input" if str(path) == "-" else printable(str(path), 1000)
    is_name = shown.endswith("_config") and not isfile(path)  # noqa: PTH113 - it accepts names of any length
    if is_name and (hint := did_you_mean(shown, recipe_names())):
        raise InputError(f"{shown} does not exist, and is no recipe that is known here", hint=hint)
    text = limited_text(sys.stdin.buffer, shown) if str(path) == "-" else read_text(path, shown)
    return File(path, shown, script_of(text, shown), text)


def in_folder(folder: Path) -> list[File]:
    """The files in a folder that describe its run: a script, which names the others, or one file of each kind.

    Raises:
        InputError: there is none, or only a plan, or several scripts or files of one kind.
    """
    shown = printable(str(folder), 200)
    names = sorted(each for each in folder.iterdir() if each.suffix in _KINDS and isfile(each))  # noqa: PTH113
    files = [file for each in names[:_MOST_NAMES] if (file := readable(each))]
    plans = [file for file in files if kind_of(file.shown, file.text) == "a plan"]
    found = [(file, each) for file in files if file not in plans and (each := _known(file))]
    for wanted in (
        [file for file, _ in found if file.path.suffix == ".py"],  # a whole configuration
        [file for file, each in found if each.is_shell],
    ):
        if len(wanted) > 1:
            listed = ", ".join(file.shown for file in wanted)
            raise InputError(f"{shown} holds several scripts: {listed}", hint="--from names one of them")
        if wanted:
            return wanted
    kinds = [each.name for _, each in found]
    if twice := [file.shown for file, each in found if kinds.count(each.name) > 1]:
        hint = "--from names the files of one run"
        raise InputError(f"{shown} holds several files of one kind: {', '.join(twice)}", hint=hint)
    if not found:
        for file in files:
            _check_read(file)
        own = f"`planner explain {shown}/plan.json` explains its plan"
        raise InputError(
            f"no file in {shown} is of a kind that is known here",
            hint=own if plans else "--from names the files of the run",
        )
    return [file for file, _ in found]


def readable(path: Path) -> File | None:
    """The file, unless it is too large or no text: a tokenizer, for instance."""
    try:
        return opened(path)
    except PlannerError:
        return None


_KINDS: Final = (*_NAMED_KINDS, ".sh", ".slurm", ".sbatch", ".py")
_MOST_NAMES: Final = 100


class Run:
    """The files that describe one run: those that the user gave, and those that these files name.

    files: the files that were read, in order.
    """

    def __init__(self, given: Sequence[File]) -> None:
        self._given = given
        self.files: list[File] = []
        self._renamed: dict[str, str] = {}

    def read(self, with_variables: Callable[[str], str]) -> tuple[Reader, dict[str, Value]]:
        """The reader of the run, and the values of all its files; a command line comes first, and the first wins."""
        found: dict[str, Value] = {}
        first: Reader | None = None
        for file in sorted(self._given, key=lambda each: not _reader_of(each, READERS[0]).is_shell):
            if file in self.files:
                continue  # another file names it
            reader = _reader_of(file)
            first = first or reader
            self._renamed |= reader.renamed
            if reader.target is not first.target:
                message = f"{file.shown} is {reader.name}, and {self.files[0].shown} is {first.name}"
                raise InputError(message, hint="several --from describe one run")
            text = with_variables(file.text) if reader.is_shell else file.text
            values = self._values(file, text, reader, reader.values)
            found = {**(with_srun(file.text, values) if reader.is_shell else values), **found}
        assert first is not None
        return first, dict(first.complete(found))

    def _values(
        self, file: File, text: str, reader: Reader, read: Callable[[str], Values], depth: int = 1
    ) -> dict[str, Value]:
        """The values of a file and of the files that it names; its own values win."""
        self.files.append(file)
        try:
            found = dict(read(text))
        except InputError as error:
            mistakes = [replace(each, where=each.where.replace(THE_FILE, file.shown)) for each in error.mistakes]
            if file not in self._given:  # its text is not shown, because the user did not name it
                hint = f"--from {file.shown} says why"
                mistakes = [Mistake(message="this file cannot be read", where=file.shown, hint=hint)]
            raise InputError(*mistakes) from None
        own = str(found.pop(PROGRAM, None) or "")
        places = (each for folder in (*file.path.parents[:2], Path()) if own and isfile(each := folder / own))  # noqa: PTH113
        found |= next((of_program(program.text) for path in places if (program := readable(path))), {})
        for key, read_named in reader.files.items():
            names = found.pop(key, None) or ()
            for name in reversed(names if isinstance(names, tuple) else (names,)):  # of several, the last wins
                if depth == _MOST_FILES:
                    raise InputError(f"more than {_MOST_FILES} files name each other", where=file.where(key))
                named = self._named(str(name), key, file)
                below = self._values(named, named.text, reader, read_named, depth + 1)
                empty = tuple(f"{each}." for each, value in found.items() if value is None)  # a section that is off
                found = {**{each: value for each, value in below.items() if not each.startswith(empty)}, **found}
        return found

    def _named(self, name: str, key: str, file: File) -> File:
        """The file that a value names: one that the user gave, or beside the naming file, or here, or shipped."""
        wanted = Path(name)
        if alike := [each for each in self._given if each.path.name == wanted.name and each is not file]:
            return min(alike, key=lambda each: each.path.parent.name != wanted.parent.name)
        for path in (file.path.parent / name, wanted):
            if name.endswith(_NAMED_KINDS) and isfile(path):  # noqa: PTH113 - it accepts names of any length
                return opened(path)
        if shipped := next((each for each in _NAMES["shipped"] if f"/{name}".endswith(f"/{each}")), ""):
            return File(wanted, name, json.dumps({**_NAMES["shipped"][shipped], "shipped": shipped}))
        if UNSET.search(name):
            raise InputError(replace(not_set(key, name), where=file.where(key)))
        message = f"{key.rpartition('.')[2]} names {printable(name, 200)}, which is neither beside the file nor here"
        hint = "one more --from gives it, as in --from run.sh --from fsdp.yaml"
        raise InputError(message, where=file.where(key), hint=hint)

    @property
    def shown(self) -> str:
        """The name of the first file."""
        return self.files[0].shown

    def of(self, read: Callable[[], Read]) -> Read:
        """The result of `read`; mistakes about a key name the key, the file and the line."""
        try:
            return read()
        except InputError as error:
            raise InputError(*map(self._placed, error.mistakes)) from None

    def _placed(self, mistake: Mistake) -> Mistake:
        own = (each for each, key in self._renamed.items() if key == mistake.where and any(self._places(each)))
        mistake = replace(mistake, where=next(own, mistake.where))
        key = f"{mistake.where}: " if mistake.where else ""
        return replace(mistake, message=f"{key}{mistake.message}", where=next(self._places(mistake.where), self.shown))

    def _places(self, key: str) -> Iterator[str]:
        return (place for each in self.files if (place := each.where(key)) != each.shown)


_NAMES: Final = names_beside(__file__)


def _check_read(file: File) -> None:
    """Refuse, by its name, a program whose files are not read."""
    rows = (each for each in _NAMES["refused"] if has_all((f"^{line}" for line in each["lines"]), file.text))
    if row := next(rows, None):
        message = f"{file.shown} is a file of {row['program']}, which is not read"
        said = "`planner explain MODEL CLUSTER --gpus N --seq-len S --global-batch B --layout tp=..,pp=..` says the run"
        raise InputError(message, hint=row.get("instead", said))


def _known(file: File) -> Reader | None:
    """The reader that recognises a file; the options of a program in Python are known when it runs alone."""
    known = (each for each in READERS if each.recognises(file.text))
    return next((each for each in known if not (each.is_shell and file.path.suffix == ".py")), None)


def _reader_of(file: File, otherwise: Reader | None = None) -> Reader:
    """The reader that recognises a file, else `otherwise`.

    Raises:
        InputError: there is neither.
    """
    _check_read(file)
    if reader := _known(file) or otherwise:
        return reader
    if kind_of(file.shown, file.text) == "a plan":
        raise InputError(f"{file.shown} is a plan", hint=f"`planner explain {file.shown}` explains it, without --from")
    kinds = "; ".join(dict.fromkeys(reader.name for reader in READERS))
    raise InputError(f"{file.shown} is of no kind that is known here", hint=f"known: {kinds}")
