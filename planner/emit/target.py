"""Types for writing a plan as the settings of a program, and for reading such settings back.

The table of a program maps **fields** to **keys**. Fields are the planner's: `layout.tp`, `training.precision`,
`model.num_layers`. Keys are the program's, flat and dotted: `parallelism.tensor_parallel_degree`. A table refuses a
plan that it cannot express and never drops a field: every field has a setting or a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from planner.errors import InputError, Mistake
from planner.layout import Layout
from planner.run_arguments import RunArguments
from planner.specs.banned import bans_on
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

if TYPE_CHECKING:
    from planner.plan import Plan

T = TypeVar("T")

Value: TypeAlias = "str | int | float | bool | tuple[Any, ...] | None"
Values: TypeAlias = Mapping[str, Value]

_OF_THE_RUN: Final = {
    "tokens", "deadline", "budget", "price", "failures", "checkpoint_interval", "asynchronous_checkpoints",
    "objective", "reference", "forward_passes", "rollout_memory",
}  # fmt: skip
"""Training fields of the length and price of the whole run, and of objectives that no files are written for."""
_OF_THE_DOCUMENT: Final = {"name", "architecture", "head_outputs"}
"""Model fields without a setting: the name, an objective's head, and the architecture, which other fields express."""

FIELDS: Final = (
    *(f"layout.{each.name}" for each in fields(Layout)),
    *(f"training.{name}" for name in TrainingSpec.model_fields if name not in _OF_THE_RUN),
    *(f"model.{name}" for name in ModelSpec.model_fields if name not in _OF_THE_DOCUMENT),
)
"""All fields that the planner prices or trains with; each table must express or refuse each of these fields."""


class Doubt(NamedTuple):
    """Why the verdict on a file is unknown for one of its keys, and the field that settles it, if there is one."""

    why: str
    field: str = ""


class Given:
    """Keys and values of a foreign file; a key counts as understood as soon as a setting has read it.

    model: the model that the file trains; None while the model itself is being read.
    num_devices, per_host: devices of the job and of a host; 0 if unknown.
    known: keys of the program, those included whose value a setting has found to have no price.
    """

    def __init__(
        self, values: Values, *, model: ModelSpec | None = None, num_devices: int = 0, per_host: int = 0
    ) -> None:
        self.values, self.model, self.num_devices, self.per_host = dict(values), model, num_devices, per_host
        self.understood: set[str] = set()
        self.known: set[str] = set()
        self.doubts: dict[str, Doubt] = {}

    def doubt(self, key: str, why: str, field: str = "") -> None:
        """Note that a key decides the answer and that its value has no price.

        field: the planner's field that holds the key's meaning, such as `layout.offload`, if the user can give it.
        """
        self.doubts[key] = Doubt(why, field)

    def __contains__(self, key: str) -> bool:
        """Whether the file has a value for the key; the key then counts as understood."""
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value of a key, or the default if the file has no value."""
        self.understood.add(key)
        self.known.add(key)
        found = self.values.get(key)
        return default if found is None else found

    def text(self, key: str, default: str = "") -> str:
        """The value of a key as text."""
        return str(self.get(key, default))

    def flag(self, key: str, *, default: bool = False) -> bool:
        """The value of a key as a boolean; words such as `yes` and `off` are accepted."""
        found = self.get(key, default)
        if isinstance(found, str) and found.lower() in _SWITCHES:
            return _SWITCHES[found.lower()]
        if not isinstance(found, bool | int):
            raise InputError(f"{found!r} is neither true nor false", where=key)
        return bool(found)

    def choice(self, key: str, known: Mapping[str, T], default: str = "") -> T:
        """What the value of a key stands for; a value that is not known has no price."""
        text = self.text(key, default)
        if text not in known:
            raise InputError(f"{text[:80]!r} has no price here", where=key, hint=f"known: {', '.join(known)}")
        return known[text]

    def whole(self, key: str, default: int = 0) -> int:
        """The value of a key as a whole number of at least 0 and at most 12 digits."""
        found = self.get(key, default)
        text = str(found).replace("_", "")
        if isinstance(found, bool) or not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            raise InputError(f"{str(found)[:80]!r} is no whole number", where=key)
        return int(text)

    def number(self, key: str, default: float = 0.0) -> float:
        """The value of a key as a finite number."""
        found = self.get(key, default)
        try:
            number = float(found)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"{str(found)[:80]!r} is no number", where=key)
        return number


_SWITCHES: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_MOST_DIGITS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One decision of a plan, as keys and values of a program.

    says: the fields that the setting expresses; `model` alone means all fields of the model, and so on.
    write: function from a plan to keys and values.
    read: function from a file to fields and values, without the fields that the file leaves open; None if the key
    follows from other fields. Settings of the model are read first, so that the other settings can use `Given.model`.
    """

    says: tuple[str, ...]
    write: Callable[[Plan], Values]
    read: Callable[[Given], Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Fields for which a program has no option.

    fault: function that returns a message and a hint if a plan needs such an option, else None.
    """

    says: tuple[str, ...]
    fault: Callable[[Plan], tuple[str, str] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """Choices of the user that are not part of the plan.

    arguments: data and tokenizer, and other options of our own trainer.
    smoke: whether to train on mock data.
    """

    arguments: RunArguments = field(default_factory=RunArguments)
    smoke: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How a start command names one of several hosts; the fields are shell text, quoted if necessary.

    The text is a variable that the starter sets, or a plain number.

    hosts: number of hosts.
    ranks: number of ranks on this host.
    number: index of this host.
    address, port: where host 0 listens.
    """

    hosts: int
    ranks: str
    number: str
    address: str
    port: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A training program that can run plans.

    name: the value of `--to`, which an engine's profile lists in `emits`.
    program: the program's name and its supported versions, as text.
    settings: convert fields to the program's keys and back.
    refuse: fields that the program has no option for.
    render: returns the files, name -> text.
    command: shell text that starts the training on one host; `place` is None if the plan uses only one host.
    yours: placeholder -> meaning, for all values that the plan does not decide.
    advice: sentences about other values that the plan does not decide; the program also runs without them.
    takes: fields of RunArguments that fill placeholders.
    otherwise: the program whose files run the plans that this program refuses, if `emit` is not told one; empty: none.
    launcher: the command to run on each host; only for a program that finds the other hosts by itself.
    environment: environment variables that the program needs.
    ignores: patterns of keys that change neither bytes nor seconds; a reader does not report such keys.
    decides: pattern of a key that no setting prices and that decides the answer -> its doubt. A file with such a key
        has no verdict; these patterns come before those of `ignores`.
    switches: patterns of keys that may be on and change no figure; any other unread key that is on decides the answer.
    executable: the command that must be installed.
    install: how to install this command.
    """

    name: str
    program: str
    settings: tuple[Setting, ...]
    refuse: tuple[Refusal, ...] = ()
    render: Callable[[Values, Plan, How], dict[str, str]] = lambda values, plan, how: {}  # noqa: ARG005
    command: Callable[[Values, Plan, How, Place | None], str]
    yours: Callable[[Plan, How], Mapping[str, str]] = lambda plan, how: {}  # noqa: ARG005
    advice: Callable[[Plan, How], tuple[str, ...]] = lambda plan, how: ()  # noqa: ARG005
    takes: tuple[str, ...] = ()
    otherwise: str = ""
    launcher: Callable[[Plan, How], str] | None = None
    environment: Callable[[Plan], Mapping[str, str]] = lambda plan: {}  # noqa: ARG005
    ignores: tuple[str, ...] = ()
    decides: Mapping[str, Doubt] = field(default_factory=dict)
    switches: tuple[str, ...] = ("*",)
    executable: str = "torchrun"
    install: str = ""


def refusals(target: Target, plan: Plan) -> list[tuple[str, str]]:
    """What the target cannot express or does not run, each with a way out."""
    banned = [(ban.words, f"plan again with --pin {ban.way_out}") for ban in bans_on(target.name, plan.layout)]
    return [*banned, *(fault for each in target.refuse if (fault := each.fault(plan)))]


def values_of(target: Target, plan: Plan) -> dict[str, Value]:
    """All keys and values of a plan, in the order of the table.

    Raises:
        InputError: all fields that the target cannot express or does not run, each with the option to plan again with.
    """
    faults = refusals(target, plan)
    if (plan.training.objective, plan.model.head_outputs) != ("next-token", 0):
        why = "files are written for the objective next-token alone, and training.objective is "
        way = "put the layout into the files of a program that has this objective"
        faults.insert(0, (f"{why}{plan.training.objective}", way))
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


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits a key's whole name."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)
