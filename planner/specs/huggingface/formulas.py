"""Formulas of the table of model types: sums and products over the keys of a config.json.

    =2*h*laurel_rank              keys of the file, and letters for our own fields
    =n_shared_experts or 0        the number after `or` stands for a missing key, which is an error otherwise
    =attention_bias and h         0 unless the flag is true
    =1 if multi_query or True else a
    =qformer_config.hidden_size   a key inside of another

A formula is read with Python's grammar and never run: each key goes through the typed functions of `Config`, so that a
file with a wrong value is refused at the key.
"""

from __future__ import annotations

import ast
import math
import operator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from planner.specs.huggingface.config import Config

_OPERATIONS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: left // max(1, right),
    ast.Pow: operator.pow,
    ast.Gt: operator.gt,
}
_FIELDS: Final = {
    "h": "hidden_size",
    "f": "ffn_hidden_size",
    "a": "num_heads",
    "L": "num_layers",
    "s": "max_sequence_length",
    "p": "patches.patch_size",
    "S": "moe.shared_ffn_hidden_size",
}
"""Letters in formulas -> our fields, with the usual letters; `g` and `d` are worked out."""


def linear(inputs: int, outputs: int, bias: bool = True) -> int:
    """Parameters of a matrix and its bias."""
    return outputs * (inputs + bias)


def two(inputs: int, middle: int, outputs: int, bias: bool = True) -> int:
    """Parameters of two matrices, one behind the other, and their biases."""
    return linear(inputs, middle, bias) + linear(middle, outputs, bias)


def rounded(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // max(1, multiple)) * multiple


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {each.__name__: each for each in (linear, two, rounded, max, int)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Where a formula finds its names.

    config: the keys of the file that have no prefix, and the fields that letters mean.
    parts: parts of the file by their prefixes, such as `tower` in `tower.depth`.
    letters: further letters.
    """

    config: Config
    parts: Mapping[str, Config] = field(default_factory=dict)
    letters: Mapping[str, Callable[[], int]] = field(default_factory=dict)

    def worked_out(self, value: Any) -> Any:
        """A value of the table, or a document of such values, with its formulas replaced by what they give.

        Raises:
            InputError: a key that a formula needs is missing or has a wrong value.
        """
        if isinstance(value, dict):
            return {key: self.worked_out(each) for key, each in value.items()}
        if not isinstance(value, str) or not value.startswith("="):
            return value
        return self._value(_parsed(value))

    def number(self, formula: str) -> int:
        """The whole number that a formula gives."""
        return int(self.worked_out(formula))

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=letter) if (known := self._letter(letter)) is not None:
                return known
            case ast.Name() | ast.Attribute():
                config, key = self._key(node)
                return config.size(key)
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATIONS[type(op)](self._value(left), self._value(right))
            case ast.BoolOp(op=ast.And(), values=[flag, value]):
                return self._value(value) if self._is_true(flag) else 0
            case ast.BoolOp(op=ast.Or(), values=[value, other]):
                config, key = self._key(value)
                return self._value(other) if config.get(key) is None else config.count(key)
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._value(body if self._is_true(test) else other)
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self._called(name, arguments)
        raise AssertionError(ast.dump(node))

    def _called(self, name: str, arguments: list[ast.expr]) -> Any:
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(self._value, arguments))
        if name == "flag":
            return self._is_true(arguments[0])
        config, key = self._key(arguments[0])
        more = [self._value(each) for each in arguments[1:]]
        match name:
            case "len":
                return len(config.entries(key))
            case "below":  # numbers of a list that are below a limit
                return sum(each < more[0] for each in config.counts(key))
            case "same":  # a number, or a list that repeats one number
                first, *others = config.counts(key, *more, alone=True) or [0]
                if set(others) - {first}:
                    config.unsupported(key, f"`{key}` that differs from layer to layer is not supported")
                return first
            case "number":  # not only a whole one
                return config.number(key, *more)
            case "product":
                return math.prod(config.counts(key, *more, least=1))
        raise AssertionError(name)

    def _is_true(self, node: ast.expr) -> bool:
        match node:
            case ast.BoolOp(op=ast.Or(), values=[key, ast.Constant(value=bool() as default)]):
                config, word = self._key(key)
                return config.flag(word, default)
            case ast.BoolOp(op=op, values=values):
                return (all if isinstance(op, ast.And) else any)(map(self._is_true, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._is_true(operand)
            case ast.Compare(left=left, ops=[ast.Is()], comparators=[right]):  # the key's value as it is in the file
                config, word = self._key(left)
                return bool(config.get(word) == self._value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return bool(_OPERATIONS[type(op)](self._value(left), self._value(right)))
        config, word = self._key(node)
        return config.flag(word)

    def _letter(self, name: str) -> int | None:
        if name in self.letters:
            return self.letters[name]()
        if name in _FIELDS:
            return self.config.ours(_FIELDS[name])
        if name == "g":
            return self.config.ours("num_kv_heads") or self.config.ours("num_heads")
        if name == "d":
            return self.config.ours("head_size") or self._value(_parsed("=h//a"))
        return None

    def _key(self, node: ast.expr) -> tuple[Config, str]:
        """The part of the file and the key in it that a name means."""
        match node:
            case ast.Name(id=name):
                return self.config, name
            case ast.Attribute(value=ast.Name(id=name), attr=key):
                return self.parts[name] if name in self.parts else self.config.part(name), key
            case ast.Attribute(value=inner, attr=key):
                config, name = self._key(inner)
                return config.part(name), key
        raise AssertionError(ast.dump(node))


@cache
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula[1:].strip(), mode="eval").body


def names_in(value: Any) -> set[str]:
    """The keys of the file that the formulas of a value of the table name, also those that a condition rules out."""
    if isinstance(value, dict | list | tuple):
        return set().union(*map(names_in, value.values() if isinstance(value, dict) else value))
    if not isinstance(value, str) or not value.startswith("="):
        return set()
    return {node.id for node in ast.walk(_parsed(value)) if isinstance(node, ast.Name) and len(node.id) > 1}
