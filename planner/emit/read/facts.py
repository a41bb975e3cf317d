"""Read the keys and values of a program back into fields, and say which keys have no price."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import names_beside
from planner.emit.read.conditions import UNSET
from planner.emit.target import Doubt, Given, matches
from planner.errors import InputError, Mistake
from planner.specs.text import printable
from planner.specs.training import OF_THE_RUN

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from planner.emit.target import Target, Value, Values
    from planner.specs.model import ModelSpec

_OF_LEARNING: Final = {f"training.{name}" for name in OF_THE_RUN}


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
    options: Sequence[str] = (),
) -> Facts:
    """Read keys and values of a program back into fields; the inverse of `values_of`.

    model: the model, if it is known; the file's own model settings are then ignored.
    num_devices: number of devices of the cluster, or 0 if unknown; some programs derive values from this number.
    per_host: number of devices of a host, or 0 if unknown.
    of_model: whether to read only the model.
    ignored: patterns of further keys to count as harmless, by their whole name or its last part.
    options: groups of the options that the program's parser accepts; without groups it accepts any.

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
    doubts, rest, ignored_keys = left_over(given, target, ignored, options)
    misspelt = {key: near for key in rest if (near := _misspelt(key, given.understood))}
    if not of_model and is_read:
        strange = {key: misspelt.get(key, "") for key in rest if key not in given.known}
        mistakes += [_of_layout(key, near) for key, near in strange.items() if _is_layout(f"{key} {near}", values[key])]
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


_LAYOUT: Final = re.compile(
    "parallel|degree|pipeline|stage|checkpoint_activ|activations_checkpoint|recompute|offload|shard"
    r"|(?:^|[_.])(?:[tpcde]p|world)(?:_size)?\b|accum\w*_(?:steps|grad_batches)\b"
)
"""Parts of names that programs give to degrees, stages, recomputation, offload, and rounds of microbatches."""
_PLAIN: Final = {"1", "0", "false", "none", "null"}


def _is_layout(names: str, value: Value) -> bool:
    plain = _PLAIN - {"1"} if names.partition(" ")[0].endswith("stage") else _PLAIN  # a stage 1 is none of many
    return _LAYOUT.search(names.lower().replace("-", "_")) is not None and str(value).lower() not in plain


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


_DEGREE: Final = re.compile("(parallel_size|offload|stage)$")


def _vouching(key: str, value: Value, patterns: Sequence[str]) -> Sequence[str]:
    """The patterns of harmless keys that count: of a degree with such a name, `eval.*` tells more than `eval_*`."""
    if not _DEGREE.search(key) or str(value).lower() in _PLAIN:
        return patterns
    return [each for each in patterns if (last := each.rpartition(".")[2]) == "*" or "*" not in last]


_SWITCH: Final = Doubt("what it switches on is not known here")
_OF_A_FORK: Final = Doubt("no release of the program has this option, and the fork that has it may cost more")


def _strange(key: str, given: Given, target: Target, groups: Sequence[str]) -> Doubt | None:
    """The doubt of a key that is on, or that a parser with these groups of options refuses in every release."""
    if str(given.values[key]).lower() == "true" and not matches(key, target.switches):
        return _SWITCH
    name = key.replace("-", "_")
    if not groups or not re.fullmatch(r"[\w.]+", name):  # a parser of any option, or no option
        return None
    accepted, harmless = _accepted(tuple(groups))
    is_known = not accepted.isdisjoint({name, name.partition(".")[0]}) or re.search(harmless, name)
    return None if is_known or _misspelt(key, given.understood) else _OF_A_FORK


@cache
def _accepted(groups: tuple[str, ...]) -> tuple[frozenset[str], str]:
    """The options of a parser with these groups, and the pattern of those that cost nothing in every parser."""
    names = names_beside(__file__)
    accepted = " ".join([names["wrappers"], *(names["options"][group] for group in groups)])
    return frozenset(accepted.split()), names["harmless"]


def left_over(
    given: Given, target: Target, ignored: Sequence[str] = (), options: Sequence[str] = ()
) -> tuple[dict[str, Doubt], tuple[str, ...], tuple[str, ...]]:
    """Keys without a price: those that decide the answer, those that may change it, and the harmless keys.

    Keys of disabled features are omitted.
    """
    off = (None, False, "false", "False", (), "")
    doubts: dict[str, Doubt] = {}
    rest: list[str] = []
    harmless: list[str] = []
    for key, value in given.values.items():
        if value in off or (key in given.understood and key not in given.doubts):
            continue
        named = next((doubt for pattern, doubt in target.decides.items() if matches(key, [pattern])), None)
        doubt = given.doubts.get(key) or (None if str(value).lower() in _PLAIN else named)
        if matches(key, ignored) or (doubt is None and matches(key, _vouching(key, value, target.ignores))):
            harmless.append(key)
        elif doubt := doubt or (None if _is_layout(key, value) else _strange(key, given, target, options)):
            doubts[key] = doubt
        else:
            rest.append(key)
    return doubts, tuple(rest), tuple(harmless)
