"""The table of model types: what the keys of a Hugging Face config.json mean, in rows of types.yaml.

types.yaml explains the rows. Defaults come from the configuration classes in the transformers library: defaults.json,
which tools/hf_defaults.py writes. A key without a default is required.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

from planner.specs.huggingface.formulas import Scope, names_in
from planner.specs.huggingface.rules import RULES
from planner.specs.text import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.specs.huggingface.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How the keys of one model type, or of one vision tower, become a model document.

    keys: key of the file -> our field; `a|b` are two spellings; fields of nested documents begin with `moe.` or `mla.`.
    defaults: values of missing keys of classes that defaults.json does not have.
    must: keys for which only the values in the list are supported.
    fields: our field -> value or formula; with `+` before its name the value is added. null removes the field.
    rules: names of rules in Python, or {name: arguments}.
    counted: kinds of layers whose number, `num_layers`, is a formula.
    then: like `fields`, behind the rules.
    ignore: keys that change neither parameters nor prices.
    optional: our fields in `needed` whose keys may be missing, and lists of the file that may be missing.
    notes: sentences for the user.
    """

    architecture: str = "llama"
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    must: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[Any, ...] = ()
    counted: tuple[Mapping[str, Any], ...] = ()
    then: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def translate(self, config: Config) -> None:
        """Fill the model document of `config`.

        Raises:
            InputError: a required key is missing, or its value fits no field of ours.
        """
        scope = Scope(config=config)
        config.read.update(self.ignore)
        config.notes.extend(note for each in self.notes if (note := scope.worked_out(each)))
        config.put("architecture", self.architecture, "model_type")
        for key, target in self.keys.items():
            self._take(config, key, target)
        config.raise_if_missing()
        for key, allowed in self.must.items():
            _demand(scope, key, allowed if isinstance(allowed, list) else [allowed])
        _put(scope, self.fields)
        config.raise_if_missing()
        for rule in self.rules:
            name, arguments = next(iter(rule.items())) if isinstance(rule, dict) else (rule, {})
            RULES[name](config, **arguments)
        for kind in self.counted:
            if (number := scope.number(kind["num_layers"])) > 0:
                config.add_kind(**scope.worked_out({**kind, "num_layers": number}), origin="model_type")
        _put(scope, self.then)
        config.raise_if_missing()

    def _take(self, config: Config, key: str, target: str) -> None:
        spellings = key.split("|")
        config.read.update(spellings)
        found = next((each for each in spellings if each in config.values), "")
        value = config.values[found] if found else self.defaults.get(key)
        if not found and key not in self.defaults and target in table()["needed"] and target not in self.optional:
            config.missing.append(key)
        elif value is not None or (found and target in (*table()["needed"], *table()["never_null"])):
            config.put(target, value, found or "model_type")


def _demand(scope: Scope, key: str, allowed: list[Any]) -> None:
    """Refuse a value of `key` (`part.key` inside of a part) that is not one of the allowed ones."""
    config, (*parts, last) = scope.config, key.split(".")
    for part in parts:
        config = config.part(part)
    values = [scope.worked_out(each) for each in allowed]
    if config.get(last, values[0]) not in values:
        wanted = " or ".join(quoted(value) for value in values if value is not None)
        config.unsupported(last, f"`{last}` of {quoted(config.get(last))} is not supported", f"supported: {wanted}")


def _put(scope: Scope, fields: Mapping[str, Any]) -> None:
    config = scope.config
    for target, value in fields.items():
        if value is None:
            config.document.pop(target, None)
        elif target.startswith("+"):
            config.add(target[1:], scope.number(value))
        elif (found := scope.worked_out(value)) is not None:
            config.put(target, found, _origin(config, value))


def _origin(config: Config, value: Any) -> str:
    """The first key of the file that a formula names, which a message about the field points at."""
    words = re.findall(r"[A-Za-z_]\w+", value) if isinstance(value, str) and value.startswith("=") else ()
    return next((word for word in words if word in config.values), "model_type")


@cache
def table() -> dict[str, Any]:
    """The document types.yaml."""
    text = files("planner").joinpath("specs", "huggingface", "types.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - safe
    return found


@cache
def defaults() -> dict[str, dict[str, Any]]:
    """Default values of missing keys, by model type.

    Each entry has the `keys` with their values, and the keys that the class derives from others (`follows`), which a
    file must state. Entries `outer:TYPE`, `nested:TYPE` and `tower:TYPE` are those of models that read images: of the
    whole file, of its text and of its tower.

    Source: configuration classes of transformers 5.23, recorded by tools/hf_counts.py.
    """
    text = files("planner").joinpath("specs", "huggingface", "defaults.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


@cache
def row(name: str, section: str = "types") -> Row:
    """The row of a model type, or of a tower (`section` towers); `base` and the rows behind it are merged into it."""
    whole = _merged(section, name)
    whole["ignore"] = [*whole.get("ignore", ()), *sorted(names_in(whole))]
    parts: dict[str, Any] = {part: tuple(each) if isinstance(each, list) else each for part, each in whole.items()}
    return Row(**parts)


def _merged(section: str, name: str) -> dict[str, Any]:
    """A row with the parts of its base: mappings and lists are joined.

    The row's own keys replace the base's keys of the same field, and a null removes the base's key.
    """
    own = {**(table()[section].get(name) or table()["bases"][name])}
    whole = _merged(section, own.pop("base")) if "base" in own else {}
    for part, value in own.items():
        known = whole.get(part)
        if part == "keys" and known:
            known = {key: target for key, target in known.items() if target not in value.values()}
        joined = {**(known or {}), **value} if isinstance(value, dict) else value
        whole[part] = [*(known or ()), *value] if isinstance(value, list) else joined
    whole["keys"] = {key: target for key, target in whole["keys"].items() if target}
    return whole
