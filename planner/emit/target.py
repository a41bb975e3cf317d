"""Types for writing a plan as the settings of a program, and for reading such settings back.

The table of a program maps **fields** to **keys**. Fields are the planner's: `layout.tp`, `training.precision`,
`model.num_layers`. Keys are the program's, flat and dotted: `parallelism.tensor_parallel_degree`. A table refuses a
plan that it cannot express and never drops a field: every field has a setting or a refusal.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from planner.emit.read.conditions import UNSET
from planner.errors import InputError, Mistake
from planner.layout import Layout
from planner.run_arguments import RunArguments
from planner.specs.banned import bans_on
from planner.specs.model import ModelSpec
from planner.specs.text import printable
from planner.specs.training import NEVER_CLIPS, OF_THE_RUN, TrainingSpec

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
_OF_LEARNING: Final = {f"training.{name}" for name in OF_THE_RUN}
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
    if faults := [*filter(None, [_OF_NEXT_TOKENS.fault(plan)]), *refusals(target, plan)]:
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
    """The content of another program's file.

    fields: `layout.tp` -> value.
    doubts: key -> why its value leaves the verdict unknown.
    not_priced: keys that no setting has read.
    not_carried: keys that no setting has read and that change neither bytes nor seconds.
    misspelt: keys of `not_priced` that are nearly a key of the program -> that key.
    """

    fields: Mapping[str, Any]
    doubts: Mapping[str, Doubt] = field(default_factory=dict)
    not_priced: tuple[str, ...] = ()
    not_carried: tuple[str, ...] = ()
    misspelt: Mapping[str, str] = field(default_factory=dict)

    def of(self, document: str) -> dict[str, Any]:
        """The fields of one document (`layout`, `training` or `model`), without the document's name in front."""
        start = f"{document}."
        return {key.removeprefix(start): value for key, value in self.fields.items() if key.startswith(start)}


def facts_of(
    target: Target,
    values: Values,
    *,
    model: ModelSpec | None = None,
    num_devices: int = 0,
    per_host: int = 0,
    of_model: bool = False,
    ignored: Sequence[str] = (),
) -> Facts:
    """Read keys and values of a program back into fields; the inverse of `values_of`.

    model: the model, if it is known; the file's own model settings are then ignored.
    num_devices: number of devices of the cluster, or 0 if unknown; some programs derive values from this number.
    per_host: number of devices of a host, or 0 if unknown.
    of_model: whether to read only the model.
    ignored: patterns of further keys to count as harmless, by their whole name or its last part.

    Raises:
        InputError: all values that a setting could not read, and keys of the layout that no table of the program has.
    """
    given = Given(values, model=model, num_devices=num_devices, per_host=per_host)
    found: dict[str, Any] = {}
    mistakes: list[Mistake] = []
    is_read = True  # what a setting did not read before its first mistake is not strange
    for setting in target.settings:
        if of_model and not (setting.says and all(path.startswith("model.") for path in setting.says)):
            continue
        before = set(given.understood)
        try:
            found |= setting.read(given) if setting.read else {}
        except InputError as error:
            new = {key for key in given.understood - before if _unset(values.get(key))}
            if new and set(setting.says) <= _OF_LEARNING:
                given.understood -= new
            else:
                mistakes += error.mistakes
                is_read = is_read and not any(path.startswith("layout.") for path in setting.says)
    if unset := [not_set(key, text) for key in values if key in given.understood and (text := _unset(values[key]))]:
        raise InputError(*unset)
    doubts, rest, ignored_keys = left_over(given, target, ignored)
    misspelt = {key: near for key in rest if (near := _misspelt(key, given.understood))}
    if not of_model and is_read:
        strange = [
            key
            for key in rest
            if key not in given.known and any(_is_layout(each, values[key]) for each in (key, misspelt.get(key, "")))
        ]
        mistakes += [_of_layout(key, misspelt.get(key, "")) for key in strange]
    if mistakes:
        raise InputError(*dict.fromkeys(mistakes))  # several settings read one key
    return Facts(
        fields=found,
        doubts=doubts,
        not_priced=tuple(f"{key}={given.values[key]}" for key in rest),
        not_carried=ignored_keys,
        misspelt=misspelt,
    )


def _unset(value: Value) -> str:
    """The value as a text, if it has a variable or a command that only a shell can expand; else empty."""
    texts = [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, str)]
    return " ".join(texts) if any(map(UNSET.search, texts)) else ""


def not_set(key: str, text: str) -> Mistake:
    """The mistake of a value that has a variable without a value."""
    hint = "--define NAME=VALUE sets a variable of a script, and --args 'A B' its arguments; or write the value"
    return Mistake(message=f"{printable(key, 80)} is {printable(text, 60)}, which the file does not set", hint=hint)


_LAYOUT: Final = re.compile("parallel|degree|pipeline|stage|checkpoint_activ|recompute|offload|shard")
"""Parts of names that programs give to degrees, stages of ZeRO or of a pipeline, recomputation and offload."""
_PLAIN: Final = {"1", "0", "false", "none", "null"}


def _is_layout(key: str, value: Value) -> bool:
    return _LAYOUT.search(key.lower().replace("-", "_")) is not None and str(value).lower() not in _PLAIN


def _of_layout(key: str, near: str) -> Mistake:
    meant = f"did you mean {near}? " if near else ""
    hint = f"{meant}--layout tp=...,pp=... says the layout, and --ignore {key} prices the file without this key"
    return Mistake(message="the layout may depend on this key, which is not known here", where=key, hint=hint)


def _misspelt(key: str, known: Collection[str]) -> str:
    """The known key of which `key` may be a misspelling; empty for a longer name, another number, or a negation."""
    unread = [each for each in known if each != f"no_{key}" and not key.startswith(f"{each}_")]
    near = next(iter(difflib.get_close_matches(key[:100], sorted(unread), n=1, cutoff=_NEAR)), "")
    return near if _DIGITS.findall(near) == _DIGITS.findall(key) else ""


_NEAR: Final = 0.85
"""Smallest similarity of a misspelt key to the key that was meant.

`tensor_parallel_size` and Megatron-LM's `tensor_model_parallel_size` have 0.87.
"""
_DIGITS: Final = re.compile(r"[0-9]+")


def left_over(
    given: Given, target: Target, ignored: Sequence[str] = ()
) -> tuple[dict[str, Doubt], tuple[str, ...], tuple[str, ...]]:
    """Keys without a price: those that decide the answer, those that may change it, and the harmless keys.

    Keys of disabled features are omitted.
    """
    off = (None, False, "false", "False")
    doubts: dict[str, Doubt] = {}
    rest: list[str] = []
    harmless: list[str] = []
    for key, value in given.values.items():
        if value in off or (key in given.understood and key not in given.doubts):
            continue
        named = next((doubt for pattern, doubt in target.decides.items() if fnmatchcase(key, pattern)), None)
        doubt = given.doubts.get(key) or (None if str(value).lower() in _PLAIN else named)
        if matches(key, ignored) or (doubt is None and matches(key, target.ignores)):
            harmless.append(key)
        elif doubt is not None:
            doubts[key] = doubt
        else:
            rest.append(key)
    return doubts, tuple(rest), tuple(harmless)


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits a key's whole name."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


# --- settings and refusals that most tables use ------------------------------------------------------------------


def field_of(plan: Plan, path: str) -> Any:
    """The value that a plan has for a field such as `layout.tp`; None for a field of a part that the plan has not."""
    found: Any = plan
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return found


Condition: TypeAlias = "Callable[[Plan], object]"


def always(plan: Plan) -> bool:  # noqa: ARG001 - as other conditions
    """The condition that holds for every plan."""
    return True


OPEN: Final = object()
"""Default of a field that a file without its key leaves open."""


def one(
    path: str,
    key: str,
    read: Callable[[Given], Any],
    *,
    default: Any = OPEN,
    absent: Any = OPEN,
    told: Callable[[Any], Value] = lambda value: value,
) -> Setting:
    """A setting for one field under one key.

    read: function from a file with the key to the field's value; `told` is its inverse.
    default: the field's value for a file without the key.
    absent: the field's value that is not written.
    """

    def found(given: Given) -> Mapping[str, Any]:
        value = read(given) if key in given else default
        return {} if value is OPEN else {path: value}

    def write(plan: Plan) -> Values:
        value = field_of(plan, path)
        return {} if value == absent else {key: told(value)}

    return Setting(says=(path,), write=write, read=found)


def pair(says: str, write: Callable[[Plan], Values], read: Callable[[Given], Mapping[str, Any]] | None) -> Setting:
    """A setting for fields, with blanks between them, that share keys or decide about keys together."""
    return Setting(says=tuple(says.split()), write=write, read=read)


def same(path: str, key: str) -> Setting:
    """A setting for a field whose value is written unchanged under one key."""
    return one(path, key, lambda given: given.get(key))


def number(path: str, key: str, zero: float = 0.0, default: Any = OPEN) -> Setting:
    """A setting for a number; zero: the planner's value for the program's 0; default: as in `one`."""
    return one(path, key, lambda given: given.number(key) or zero, default=default)


def numbers(rows: Mapping[str, str]) -> tuple[Setting, ...]:
    """Settings for numbers, from field -> key, of a program that clips no gradients at a norm of 0."""
    zeros = {"training.gradient_clip": NEVER_CLIPS}
    return tuple(number(path, key, zeros.get(path, 0.0)) for path, key in rows.items())


def whole(path: str, key: str, default: Any = OPEN, *, absent: Any = OPEN) -> Setting:
    """A setting for a whole number; default, absent: as in `one`."""
    return one(path, key, lambda given: given.whole(key), default=default, absent=absent)


def switch(path: str, key: str, *, on: Any, off: Any, default: bool = False) -> Setting:
    """A setting for a field with two values, of which the program's switch says whether it is `on`.

    default: the program's value if the file does not give the key.
    """

    def read(given: Given) -> Any:
        return on if given.flag(key, default=default) else off

    return one(path, key, read, default=on if default else off, told=lambda value: value == on)


def flag(path: str, key: str, *, on: Any = True, off: Any = False) -> Setting:
    """A switch that is written only if it is on."""
    return replace(
        switch(path, key, on=on, off=off), write=fixed({key: True}, lambda plan: field_of(plan, path) == on).write
    )


def choice(path: str, key: str, names: Mapping[Any, Value], default: Any = OPEN, **more: Any) -> Setting:
    """A setting for a field whose values have other names in the program.

    names: our value -> the program's value; None: the key is left out. A refusal must cover values not in `names`.
    more: further values of the program that files have -> our value.
    """
    back = {str(name): value for value, name in names.items() if name is not None} | more
    setting = one(path, key, lambda given: given.choice(key, back), default=default, told=names.get)

    def write(plan: Plan) -> Values:
        return {key: name for key, name in setting.write(plan).items() if name is not None}

    return replace(setting, write=write)


def fixed(values: Values, when: Condition = always) -> Setting:
    """Keys that follow from the plan: they have these values if the condition holds, and are not written otherwise."""
    return Setting(says=(), write=lambda plan: values if when(plan) else {}, read=known(*values).read)


def known(*keys: str) -> Setting:
    """Keys that are read, because they have no price or because other keys decide, and that are not written."""

    def read(given: Given) -> Mapping[str, Any]:
        for key in keys:
            given.get(key)
        return {}

    return Setting(says=(), write=lambda plan: {}, read=read)  # noqa: ARG005 - as the others


def parts_of(document: Any, names: Mapping[str, Sequence[Any]]) -> Values:
    """Keys and values for those fields of a document that are not 0; names: field -> key and default."""
    return {key: value for name, (key, _) in names.items() if (value := getattr(document, name))}


def parts_from(given: Given, names: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The fields of a document; names: field -> key and default, which is a whole number if the field is one."""
    read = {int: given.whole, float: given.number}
    return {name: read[type(default)](key, default) for name, (key, default) in names.items()}


def absent_unless(condition: Condition, *settings: Setting) -> tuple[Setting, ...]:
    """Settings that are written only if the condition holds; they are always read."""

    def limited(setting: Setting) -> Setting:
        return replace(setting, write=lambda plan: setting.write(plan) if condition(plan) else {})

    return tuple(map(limited, settings))


def refuse(condition: Condition, why: str, hint: str, *says: str) -> Refusal:
    """A refusal of the plans for which the condition holds.

    why: the message, in which `{plan.layout.tp}` stands for a field.
    """
    return Refusal(says=says, fault=lambda plan: (why.format(plan=plan), hint) if condition(plan) else None)


_OF_NEXT_TOKENS: Final = refuse(
    lambda plan: (plan.training.objective, plan.model.head_outputs) != ("next-token", 0),
    "files are written for the objective next-token alone, and training.objective is {plan.training.objective}",
    "put the layout into the files of a program that has this objective",
)


def not_carried(*paths: str) -> Setting:
    """A setting for values of the run that the program has no key for; it trains with the planner's default."""
    return Setting(says=paths, write=lambda plan: {}, read=lambda given: {})  # noqa: ARG005 - as the others


def follows(*paths: str) -> Setting:
    """A setting for fields without a key, because they follow from other fields or from the start command."""
    return Setting(says=paths, write=lambda plan: {})  # noqa: ARG005 - as the others
