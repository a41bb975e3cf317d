"""The user's constraints: pins and forbidden combinations, written with the keys of a layout."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.errors import InputError, Mistake
from planner.layout_text import check_value, parse_assignments
from planner.specs.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from planner.layout import Degrees
    from planner.numbers import Flag, Number

_OPERATORS: Final[dict[str, Callable[[Number, Number], Flag]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_CONDITION: Final = re.compile(r"\s*([a-z_]+)\s*(<=|>=|!=|<|>|=)\s*(\S+)\s*")
_UNIFORM: Final = ("schedule", "offload")
_NUMERIC: Final = ("tp", "pp", "dp", "cp", "ep", "etp", "zero", "hsdp", "mbs", "interleave", "sp", "segment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One comparison of a layout key with a value, such as `tp=8` or `mbs<=4`, or with another degree: `hsdp=dp`."""

    key: str
    sign: str
    value: str

    @property
    def is_numeric(self) -> bool:
        """Whether the key is a degree; the values of other keys are words and lists."""
        return self.key in _NUMERIC

    @property
    def keys(self) -> set[str]:
        """The keys that it reads."""
        return {self.key, *({self.value} & {*_NUMERIC})}

    def holds(self, degrees: Degrees) -> Flag:
        """Whether each layout of `degrees` meets this condition.

        The key must be numeric, or a key that all stages share.
        """
        if self.key in _UNIFORM:
            return np.asarray(_OPERATORS[self.sign](getattr(degrees, self.key), self.value))
        other = getattr(degrees, self.value, 1) if self.value in _NUMERIC else int(self.value)
        return _OPERATORS[self.sign](getattr(degrees, self.key, 1), other)

    def __str__(self) -> str:
        """The condition as written on the command line."""
        return f"{self.key}{self.sign}{self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Conditions on a plan: it meets all `pins`, and no combination in `forbidden`.

    whole_hosts: devices per host, if a plan on several hosts must use whole hosts; 0 if parts of hosts are allowed.
    """

    pins: tuple[Condition, ...] = ()
    forbidden: tuple[tuple[Condition, ...], ...] = ()
    whole_hosts: int = 0

    @classmethod
    def parse(cls, pins: Sequence[str] = (), forbids: Sequence[str] = (), *, option: str = "--pin") -> Constraints:
        """Read `--pin tp=8,mbs<=4` and `--forbid zero=3,recompute=full`; each option may be repeated.

        option: name of the pinning option in messages.

        Raises:
            InputError: every unknown key and bad value at once.
        """
        hint = "it may be a shell variable that is not set; leave the option out, or write tp=8"
        empty = [(option, text) for text in pins] + [("--forbid", text) for text in forbids]
        mistakes = [Mistake(message="it is empty", where=name, hint=hint) for name, text in empty if not text.strip()]
        pinned = [condition for text in pins for condition in _conditions(text, option, mistakes)]
        forbidden = [tuple(_conditions(text, "--forbid", mistakes)) for text in forbids]
        if mistakes:
            raise InputError(*mistakes)
        return cls(pins=tuple(pinned), forbidden=tuple(each for each in forbidden if each))

    def value_of(self, key: str) -> str | None:
        """The value that a pin fixes, or None."""
        return next((pin.value for pin in self.pins if pin.key == key and pin.sign == "="), None)

    def left_of(self, key: str, values: Iterable[int]) -> list[int]:
        """The values of a numeric key that its pins allow."""
        signs = [(_OPERATORS[pin.sign], int(pin.value)) for pin in self.pins if pin.key == key]
        return [value for value in values if all(holds(value, pinned) for holds, pinned in signs)]

    @property
    def lists(self) -> list[str]:
        """The keys whose pin gives a list, one entry for each chunk."""
        return [key for key in ("layers_per_stage", "recompute") if self.per_chunk(key)]

    def per_chunk(self, key: str) -> tuple[str, ...] | None:
        """The list that a pin gives to `layers_per_stage` or `recompute`, one entry for each chunk, or None."""
        value = self.value_of(key)
        return tuple(value.split("/")) if value and ("/" in value or key == "layers_per_stage") else None

    def allows_policy(self, policy: str, degrees: Degrees) -> Flag:
        """Whether a stage of these layouts may use a recompute policy."""
        allowed = np.asarray(True)
        for pin in self.pins:
            if pin.key == "recompute" and "/" not in pin.value:
                allowed = allowed & _OPERATORS[pin.sign](policy, pin.value)
        for combination in self.forbidden:
            words = [c for c in combination if c.key == "recompute"]
            if words and all(_OPERATORS[c.sign](policy, c.value) for c in words):
                rest = (c.holds(degrees) for c in combination if c.key != "recompute")
                allowed = allowed & ~reduce(np.logical_and, rest, np.asarray(True))
        return allowed

    def allowed(self, degrees: Degrees) -> Flag:
        """Mask of the layouts that all numeric pins and forbidden combinations allow."""
        mask = np.ones(np.shape(degrees.tp), dtype=bool)
        for key in self.lists:
            mask &= degrees.pp * degrees.interleave == len(self.per_chunk(key) or ())
        for pin in self.pins:
            if pin.is_numeric or pin.key in _UNIFORM:
                mask &= pin.holds(degrees)
        for combination in self.forbidden:
            if all(c.is_numeric or c.key in _UNIFORM for c in combination):
                mask &= ~np.logical_and.reduce([np.broadcast_to(c.holds(degrees), mask.shape) for c in combination])
        return mask

    def allows_ends(self, num_chunks: Number, mtp_before: Number) -> Flag:
        """Whether multi-token prediction, so many chunks before the last, and the loss stand in the pinned chunks."""
        mask = np.ones(np.shape(num_chunks), dtype=bool)
        for key, before in (("mtp", mtp_before), ("loss", 0)):
            for chunk in filter(None, (self.value_of(key) or "").split("/")):
                mask &= num_chunks - 1 - before == int(chunk)
        return mask

    def fills_hosts(self, num_devices: Number) -> Flag:
        """Whether a plan with `num_devices` devices uses whole hosts, if `whole_hosts` requires it; broadcasts."""
        whole = self.whole_hosts or 1
        return np.less_equal(num_devices, whole) | np.equal(np.remainder(num_devices, whole), 0)

    def mentions(self, key: str) -> bool:
        """Whether a pin or a forbidden combination is about this key."""
        return any(key in condition.keys for condition in (*self.pins, *chain(*self.forbidden)))

    def only(self, *keys: str) -> Constraints:
        """Constraints with only the pins on these keys, and the forbidden combinations that mention no other key."""
        forbidden = tuple(each for each in self.forbidden if all(condition.keys <= {*keys} for condition in each))
        return Constraints(pins=tuple(pin for pin in self.pins if pin.key in keys), forbidden=forbidden)

    def without(self, one: Condition | tuple[Condition, ...]) -> Constraints:
        """The same constraints without one pin, or without one forbidden combination."""
        pins = tuple(pin for pin in self.pins if pin is not one)
        return replace(self, pins=pins, forbidden=tuple(each for each in self.forbidden if each is not one))

    def to_dict(self) -> dict[str, tuple[str, ...]]:
        """The constraints as texts, for the plan's `SearchOptions`."""
        return {
            "pins": tuple(str(pin) for pin in self.pins),
            "forbidden": tuple(",".join(map(str, each)) for each in self.forbidden),
        }


def _cannot_obey(condition: Condition, part: str, option: str) -> Mistake | None:
    """The mistake if a list is in a condition other than a pin, which the search would silently ignore; else None."""
    if condition.key == "mtp" and "/" in condition.value:
        hint = "multi-token prediction is planned in one chunk, which may be pinned: mtp=30"
        return Mistake(message=f"{quoted(part)} cannot be planned", where=option, hint=hint)
    if condition.key in ("mtp", "loss") and (option == "--forbid" or condition.sign != "="):
        return Mistake(message=f"{quoted(part)} cannot be planned", where=option, hint="--pin mtp=30 fixes one chunk")
    is_list = condition.key in ("layers_per_stage", "pools") or "/" in condition.value
    if not is_list or (option != "--forbid" and condition.sign == "="):
        return None
    hint = f"`--pin {condition.key}=...` fixes the whole list"
    if option == "--forbid":
        hint = "forbid a degree that the layout has, or one policy; a whole layout cannot be forbidden"
    return Mistake(message=f"{quoted(part)}: a list for {condition.key} can only be pinned", where=option, hint=hint)


def _conditions(text: str, option: str, mistakes: list[Mistake]) -> list[Condition]:
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _CONDITION.fullmatch(part)
        key, sign, value = match.groups() if match else (part.partition("=")[0].strip(), "=", part.partition("=")[2])
        try:
            value = parse_assignments(f"{key}={value}", option).get(key, value)
        except InputError as error:
            mistakes.extend(error.mistakes)
            continue
        condition = Condition(key=key, sign=sign, value=value)
        is_between = option == "--forbid" and condition.is_numeric and value in _NUMERIC
        bad = None if is_between else check_value(key, value, option) or _cannot_obey(condition, part, option)
        if bad is None and sign not in ("=", "!=") and not condition.is_numeric:
            bad = Mistake(
                message=f"{quoted(part)}: {key} has no order", where=option, hint=f"write {quoted(f'{key}={value}')}"
            )
        if bad:
            mistakes.append(bad)
        else:
            found.append(condition)
    return found
