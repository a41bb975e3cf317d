"""Whole-number arithmetic and the tests of a shell script, as far as their values are known."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from operator import add, eq, floordiv, ge, gt, le, lt, mod, mul, ne, sub
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

UNSET: Final = re.compile(r"\$\{?[A-Za-z_0-9@*]|\$\(|`")
"""Matches the parts of a word that could not be expanded."""


def truth_of(words: list[str]) -> bool | None:
    """Whether a test such as `[ "$A" == 8 ]` holds; None if unknown. An unset variable is empty, as in a shell."""
    if not words or words[0] not in ("[", "[[") or words[-1] not in ("]", "]]"):
        return None
    parts = ["" if UNSET.match(each) and not each.startswith(("$(", "`")) else each for each in words[1:-1]]
    if parts[:1] == ["!"]:
        inner = truth_of(["[", *parts[1:], "]"])
        return None if inner is None else not inner
    if len(parts) == 2 and parts[0] in ("-z", "-n"):
        return (parts[1] == "") == (parts[0] == "-z")
    if len(parts) != 3 or any(UNSET.search(each) for each in parts):
        return None
    left, operator, right = parts
    if operator in ("=", "==", "!="):
        return fnmatchcase(left, right) == (operator != "!=")
    numbers = whole_number(left), whole_number(right)
    if None in numbers or operator not in _COMPARISONS:
        return None
    return _COMPARISONS[operator](*numbers)


_COMPARISONS: Final[Mapping[str, Callable[..., bool]]] = {
    "-eq": eq, "-ne": ne, "-gt": gt, "-ge": ge, "-lt": lt, "-le": le,
}  # fmt: skip


_SUM: Final = re.compile(r"(?!.*[0-9]{13})[0-9+*/%()\s-]+", re.DOTALL)
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: floordiv, ast.Mod: mod,
}  # fmt: skip


def whole_number(text: str) -> int | None:
    """The value of a short expression with whole numbers, + - * / % and brackets; None for any other text."""
    text = _ZEROS.sub("", text.strip())
    if len(text) > _LONGEST_SUM or not _SUM.fullmatch(text):
        return None
    try:
        value = _value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if abs(value) < 10**15 else None


_LONGEST_SUM: Final = 1000
_ZEROS: Final = re.compile(r"\b0+(?=[0-9])")
"""Zeros in front of a number, with which Python would read no number."""


def _value_of(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value_of(node.left), _value_of(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value_of(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError
