"""Settings and refusals that most tables of programs use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from planner.emit.target import Refusal, Setting
from planner.specs.training import NEVER_CLIPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from planner.emit.target import Given, Value, Values
    from planner.plan import Plan


def field_of(plan: Plan, path: str) -> Any:
    """The value that a plan has for a field such as `layout.tp`; None for a field of a part that the plan has not."""
    found: Any = plan
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return found


Condition: TypeAlias = "Callable[[Plan], object]"


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


def fixed(values: Values, when: Condition | None = None) -> Setting:
    """Keys that follow from the plan: they have these values if a condition holds or is not given, else no value."""
    return Setting(says=(), write=lambda plan: values if when is None or when(plan) else {}, read=known(*values).read)


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


def not_carried(*paths: str) -> Setting:
    """A setting for values of the run that the program has no key for; it trains with the planner's default."""
    return Setting(says=paths, write=lambda plan: {}, read=lambda given: {})  # noqa: ARG005 - as the others


def follows(*paths: str) -> Setting:
    """A setting for fields without a key, because they follow from other fields or from the start command."""
    return Setting(says=paths, write=lambda plan: {})  # noqa: ARG005 - as the others
