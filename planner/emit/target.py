"""The vocabulary of emit: how a plan is said in the words of a program, and how those words are read back.

A program's table maps **fields** to **keys**. Fields are those of our documents, `layout.tp`, `training.precision`,
`model.num_layers`; keys are the program's own, flat and dotted: `parallelism.tensor_parallel_degree`. What a table
cannot say is refused, never dropped: every field is said by a setting or stands in a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from planner.errors import InputError, Mistake
from planner.layout import Layout
from planner.run_arguments import RunArguments
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

if TYPE_CHECKING:
    from planner.plan import Plan

Value: TypeAlias = "str | int | float | bool | tuple[Any, ...] | None"
Values: TypeAlias = Mapping[str, Value]

_OF_THE_RUN: Final = {
    "tokens", "deadline", "price", "failures", "checkpoint_interval", "asynchronous_checkpoints"
}  # fmt: skip
"""Of the training document: what says how long and how dear the whole run is, and changes no step of it."""
_OF_THE_DOCUMENT: Final = {"name", "architecture"}
"""Of the model document: its name, and what stands for other fields."""

FIELDS: Final = (
    *(f"layout.{each.name}" for each in fields(Layout)),
    *(f"training.{name}" for name in TrainingSpec.model_fields if name not in _OF_THE_RUN),
    *(f"model.{name}" for name in ModelSpec.model_fields if name not in _OF_THE_DOCUMENT),
)
"""Everything that is priced or trained with: what each table says or refuses."""


class Given:
    """Keys and values that a foreign file gives; a key that was asked for counts as understood.

    model: the model that the settings of the layout are of; None while the model itself is being read.
    """

    def __init__(self, values: Values, *, model: ModelSpec | None = None, num_devices: int = 0) -> None:
        self.values, self.model, self.num_devices = dict(values), model, num_devices
        self.understood: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the file has the key with a value; the key counts as understood."""
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key as the file has it."""
        self.understood.add(key)
        found = self.values.get(key)
        return default if found is None else found

    def text(self, key: str, default: str = "") -> str:
        """The value as text."""
        return str(self.get(key, default))

    def flag(self, key: str, *, default: bool = False) -> bool:
        """The value as a switch."""
        found = self.get(key, default)
        if isinstance(found, str) and found.lower() in _SWITCHES:
            return _SWITCHES[found.lower()]
        if not isinstance(found, bool | int):
            raise InputError(f"{found!r} is neither true nor false", where=key)
        return bool(found)

    def whole(self, key: str, default: int = 0) -> int:
        """The value as a whole number of at least 0 and at most 12 digits."""
        found = self.get(key, default)
        text = str(found).replace("_", "")
        if isinstance(found, bool) or not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            raise InputError(f"{str(found)[:80]!r} is no whole number", where=key)
        return int(text)

    def number(self, key: str, default: float = 0.0) -> float:
        """The value as a finite number."""
        found = self.get(key, default)
        try:
            number = float(found)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"{str(found)[:80]!r} is no number", where=key)
        return number


_SWITCHES: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_MOST_DIGITS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that a plan decides, in the words of a program.

    says: the fields that it expresses; `model` alone stands for all fields of the model, and so on.
    write: keys and values of a plan. read: back to fields and values, without those that the file leaves open; None
    where the key follows from other fields. Model fields are read first, so that `Given.model` is known to the others.
    """

    says: tuple[str, ...]
    write: Callable[[Plan], Values]
    read: Callable[[Given], Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a program cannot be told. fault: message and hint of a plan that needs it, None of any other plan."""

    says: tuple[str, ...]
    fault: Callable[[Plan], tuple[str, str] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What is asked for beside the plan.

    arguments: data and tokenizer; more where the program is our own trainer. smoke: fill in mock data.
    """

    arguments: RunArguments = field(default_factory=RunArguments)
    smoke: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One host of several as shell text, quoted where need be: a starter's own variables, or plain numbers.

    ranks: on this host; number: of this host; address, port: where host 0 listens.
    """

    hosts: int
    ranks: str
    number: str
    address: str
    port: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A program that carries plans out.

    name: the value of `--to`, which an engine's profile lists in `emits`.
    program: its name and the supported versions, in words.
    settings: both ways between our documents and its keys. refuse: what it cannot say.
    render: further files, name -> text.
    command: shell text that starts the training on one host; `place` is None where the plan fills one host only.
    yours: placeholder -> what it stands for, of all that the plan does not decide.
    takes: fields of RunArguments that fill placeholders.
    launcher: the command for each host, where the program finds the other hosts by itself.
    environment: environment variables that the program needs.
    ignores: patterns of keys that change neither bytes nor seconds; a reader does not report them.
    executable: the command that must be installed. install: how to install it.
    """

    name: str
    program: str
    settings: tuple[Setting, ...]
    refuse: tuple[Refusal, ...] = ()
    render: Callable[[Values, Plan, How], dict[str, str]] = lambda values, plan, how: {}  # noqa: ARG005
    command: Callable[[Values, Plan, How, Place | None], str]
    yours: Callable[[Plan, How], Mapping[str, str]] = lambda plan, how: {}  # noqa: ARG005
    takes: tuple[str, ...] = ()
    launcher: Callable[[Plan, How], str] | None = None
    environment: Callable[[Plan], Mapping[str, str]] = lambda plan: {}  # noqa: ARG005
    ignores: tuple[str, ...] = ()
    executable: str = "torchrun"
    install: str = ""


def values_of(target: Target, plan: Plan) -> dict[str, Value]:
    """All keys and values of a plan, in the order of the table.

    Raises:
        InputError: all that the target cannot say, with the field and what to plan with.
    """
    faults = [fault for each in target.refuse if (fault := each.fault(plan))]
    if faults:
        where = f"--to {target.name}"
        raise InputError(*(Mistake(message=message, where=where, hint=hint) for message, hint in faults))
    found: dict[str, Value] = {}
    for setting in target.settings:
        for key, value in setting.write(plan).items():
            if key in found and found[key] != value:
                raise AssertionError(f"two settings write {key}")
            found[key] = value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a foreign file says. fields: `layout.tp` -> value; not_priced: its keys that nothing was read from."""

    fields: Mapping[str, Any]
    not_priced: tuple[str, ...] = ()

    def of(self, document: str) -> dict[str, Any]:
        """The fields of `layout`, `training` or `model`, without that word in front."""
        start = f"{document}."
        return {key.removeprefix(start): value for key, value in self.fields.items() if key.startswith(start)}


def facts_of(
    target: Target, values: Values, *, model: ModelSpec | None = None, num_devices: int = 0, of_model: bool = False
) -> Facts:
    """Read keys and values of a program back into fields; the inverse of `values_of`.

    model: where it is known; then what the file says of the model is read and not used. num_devices: of the cluster,
    for what a program derives from it; 0: not known. of_model: read the model alone.

    Raises:
        InputError: all values that are none.
    """
    given = Given(values, model=model, num_devices=num_devices)
    found: dict[str, Any] = {}
    mistakes: list[Mistake] = []
    for setting in target.settings:
        if of_model and not all(path.startswith("model.") for path in setting.says):
            continue
        try:
            found |= setting.read(given) if setting.read else {}
        except InputError as error:
            mistakes += error.mistakes
    if mistakes:
        raise InputError(*mistakes)
    return Facts(fields=found, not_priced=left_over(given, target.ignores))


def left_over(given: Given, ignores: Sequence[str]) -> tuple[str, ...]:
    """Keys that no setting asked for and that may change bytes or seconds, with their values; none that are off."""
    off = (None, False, "false", "False")
    rest = (key for key, value in given.values.items() if key not in given.understood and value not in off)
    shown = (key for key in rest if not any(fnmatchcase(key, pattern) for pattern in ignores))
    return tuple(f"{key}={given.values[key]}" for key in shown)


def unsaid(target: Target) -> tuple[str, ...]:
    """Fields that a table neither says nor refuses: there must be none."""
    says = [each.says for each in target.settings] + [each.says for each in target.refuse]
    said = {path for each in says for path in each}
    return tuple(each for each in FIELDS if not {each, each.partition(".")[0]} & said)


# --- what most tables are made of --------------------------------------------------------------------------------


def field_of(plan: Plan, path: str) -> Any:
    """The value of a field such as `layout.tp` in a plan."""
    found: Any = plan
    for name in path.split("."):
        found = getattr(found, name)
    return found


def same(path: str, key: str) -> Setting:
    """A field that is a key with the same value."""

    def read(given: Given) -> Mapping[str, Any]:
        return {path: given.get(key)} if key in given else {}

    return Setting(says=(path,), write=lambda plan: {key: field_of(plan, path)}, read=read)


def words(path: str, key: str, names: Mapping[Any, Value]) -> Setting:
    """A field whose values have other names in the program; None: the key is left out. Others are for a refusal."""
    back = {str(name): value for value, name in names.items() if name is not None}

    def read(given: Given) -> Mapping[str, Any]:
        if key not in given:
            return {}
        if given.text(key) not in back:
            raise InputError(f"{given.text(key)[:80]!r} has no price here", where=key, hint=f"known: {', '.join(back)}")
        return {path: back[given.text(key)]}

    def write(plan: Plan) -> Values:
        name = names.get(field_of(plan, path))
        return {} if name is None else {key: name}

    return Setting(says=(path,), write=write, read=read)


def only(path: str, *values: Any, why: str, pin: str = "") -> Refusal:
    """Refuses other values of a field. pin: what to plan with, as in `--pin pp=1`; by default the first value."""

    def fault(plan: Plan) -> tuple[str, str] | None:
        found = field_of(plan, path)
        if found in values:
            return None
        return f"{path} is {found}, and {why}", f"plan again with {pin or _pin(path, values[0])}"

    return Refusal(says=(path,), fault=fault)


def _pin(path: str, value: Any) -> str:
    document, _, name = path.partition(".")
    shown = "/".join(map(str, value)) if isinstance(value, tuple) else value
    return f"--pin {name}={shown}" if document == "layout" else f"--set {path}={str(shown).lower()}"


def follows(*paths: str) -> Setting:
    """Fields that no key says, because they follow from the others or from what starts the program."""
    return Setting(says=paths, write=lambda plan: {})  # noqa: ARG005 - as the others
