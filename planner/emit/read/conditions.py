"""Whole-number arithmetic, tests and branches of a shell script, as far as their values are known."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
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


@dataclass(slots=True, kw_only=True)
class _Branch:
    """A branch of an `if` or `case`.

    is_taken: whether the branch runs; None if this is unknown.
    value: the word that a `case` compares.
    """

    is_taken: bool | None
    was_taken: bool
    value: str | None = None


class Branches:
    """The branches and loops around a position of a script.

    is_skipped: whether the test before `&&` or `||` skips the next command.
    """

    def __init__(self) -> None:
        self.open: list[_Branch] = []
        self.num_loops = 0
        self.is_skipped = False

    @property
    def is_off(self) -> bool:
        """Whether the current position is in a branch that is not taken."""
        return self.is_skipped or any(branch.is_taken is False for branch in self.open)

    @property
    def are_taken(self) -> bool:
        """Whether the position is in no loop and in no branch that may not run."""
        return not self.num_loops and all(branch.is_taken for branch in self.open)

    def runs(self, words: list[str], mark: str) -> bool:
        """Update the branches; returns whether the command runs. A command under an unknown condition counts as run."""
        first, *rest = words
        was_skipped, self.is_skipped = self.is_skipped, False
        if first == "case" and rest[1:2] == ["in"]:
            self.open.append(_Branch(is_taken=False, value=rest[0], was_taken=self.is_off))
        elif first in ("fi", "esac"):
            del self.open[-1:]
        elif first == "if":
            off = self.is_off
            is_true = False if off else truth_of(rest) if mark not in ("&&", "||") else None
            self.open.append(_Branch(is_taken=is_true, was_taken=off or is_true is True))
        elif first in ("elif", "else") and self.open:
            branch = self.open[-1]
            is_true = truth_of(rest) if first == "elif" else True
            branch.is_taken = False if branch.was_taken else is_true if branch.is_taken is False else None
            branch.was_taken = branch.was_taken or branch.is_taken is True
        elif not was_skipped and not self.is_off:
            if first not in ("[", "[["):
                if first == "done":
                    self.num_loops = max(self.num_loops - 1, 0)
                return first not in ("then", "do", "done", "{", "}", "!")
            is_true = truth_of(words)
            self.is_skipped = (mark == "&&" and is_true is False) or (mark == "||" and is_true is True)
        return False

    def compare(self, patterns: list[str]) -> None:
        """Record whether one of these patterns is that of the word which the innermost `case` compares."""
        branch = self.open[-1]
        value = "" if branch.value is None or UNSET.search(branch.value) else branch.value
        matches = any(fnmatchcase(value, each.strip(" \t\n\"'(")) for each in patterns)
        branch.is_taken = matches and not branch.was_taken
        branch.was_taken = branch.was_taken or matches
