"""Whole-number arithmetic, tests, arguments and branches of a shell script, as far as their values are known."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from operator import add, eq, floordiv, ge, gt, le, lt, mod, mul, ne, sub
from typing import TYPE_CHECKING, Final

from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

UNSET: Final = re.compile(r"\$\{?[A-Za-z_0-9@*]|\$\(|`")
"""Matches the parts of a word that could not be expanded."""


def truth_of(words: list[str]) -> bool | None:
    """Whether a test such as `[ "$A" == 8 ]` holds; None if unknown. An unset variable is empty, as in a shell."""
    if words[:1] == ["!"]:
        inner = truth_of(words[1:])
        return None if inner is None else not inner
    is_test = words and words[0] in ("[", "[[") and words[-1] in ("]", "]]")
    return _of_parts(words[1:-1]) if is_test else {"true": True, "false": False}.get(" ".join(words))


def _joined(left: bool | None, joint: str, right: bool | None) -> bool | None:
    """Whether two conditions hold that `&&`, `||` or their names in `[` join."""
    decides = joint in ("||", "-o")
    return decides if decides in (left, right) else None if None in (left, right) else not decides


def _of_parts(words: list[str]) -> bool | None:
    depths = [*accumulate((word == "(") - (word == ")") for word in words)]
    for joints in (("||", "-o"), ("&&", "-a")):
        if at := next((at for at, word in enumerate(words) if at and word in joints and not depths[at]), 0):
            return _joined(_of_parts(words[:at]), words[at], _of_parts(words[at + 1 :]))
    if len(words) > 2 and (words[0], words[-1]) == ("(", ")"):
        return _of_parts(words[1:-1])
    parts = ["" if UNSET.match(each) and not each.startswith(("$(", "`")) else each for each in words]
    if parts[:1] == ["!"]:
        return truth_of(["!", "[", *parts[1:], "]"])
    if len(parts) < 3 and parts[:-1] in ([], ["-z"], ["-n"]) and not UNSET.search(parts[-1] if parts else ""):
        return (parts[-1:] in ([], [""])) == (parts[:-1] == ["-z"])
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


_SUM: Final = re.compile(r"(?!.*[0-9]{13})[0-9+*/%()<>=!\s-]+", re.DOTALL)
_OPERATORS: Final[Mapping[type[ast.AST], Callable[[int, int], int]]] = {
    ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: floordiv, ast.Mod: mod,
    ast.Eq: eq, ast.NotEq: ne, ast.Gt: gt, ast.GtE: ge, ast.Lt: lt, ast.LtE: le,
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
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_OPERATORS[type(node.ops[0])](_value_of(node.left), _value_of(node.comparators[0])))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value_of(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError


def arguments_of(words: list[str]) -> dict[str, list[str]]:
    """`$1` and so on; an argument that is its own unset variable stays unset, and with it `$@` and `$#`."""
    found = {str(place): [word] for place, word in enumerate(words, 1) if word != f"${place}"}
    if len(found) == len(words):
        found |= {"@": words, "*": [" ".join(words)], "#": [str(len(words))]}
    return found


@dataclass(slots=True, kw_only=True)
class _Branch:
    """A branch of an `if` or `case`, or the body of a loop.

    is_taken: whether the branch runs; None if this is unknown.
    end: the word that closes it.
    value: the word that a `case` compares.
    """

    is_taken: bool | None
    end: str
    was_taken: bool = False
    value: str | None = None


class Branches:
    """The branches and loops around a position of a script.

    is_skipped: whether the test before `&&` or `||` skips the next command.
    has_other_text: whether lines may be the input of a command, which are no commands.
    """

    def __init__(self) -> None:
        self.open: list[_Branch] = []
        self.is_skipped = False
        self.has_other_text = False
        self._part: tuple[bool | None, str] | None = None
        """The first part of a condition whose second part follows, and what joins them."""

    @property
    def is_off(self) -> bool:
        """Whether the current position is in a branch that is not taken."""
        return self.is_skipped or any(branch.is_taken is False for branch in self.open)

    def runs(self, words: list[str], mark: str) -> bool:
        """Update the branches; returns whether the command runs. A command under an unknown condition counts as run."""
        first, *rest = words
        was_skipped, self.is_skipped = self.is_skipped, False
        if self._part is not None:
            self._condition(_joined(*self._part, truth_of(words)), mark)
        elif first == "case" and "in" in rest:
            value = " ".join(rest[: rest.index("in")])
            self.open.append(_Branch(is_taken=False, end="esac", value=value, was_taken=self.is_off))
        elif first in ("for", "while", "until", "select"):
            off = self.is_off or (rest[1:] == ["in"]) or (first == "while" and truth_of(rest) is False)
            self.open.append(_Branch(is_taken=False if off else None, end="done"))
            return not off
        elif first in ("fi", "esac", "done"):
            if self.open and self.open[-1].end != first and not self.has_other_text:
                hint = "bash stops there, too; `bash -n` names the line"
                raise InputError(f"`{first}` closes what needs `{self.open[-1].end}`", hint=hint)
            del self.open[-1:]
        elif first in ("if", "elif", "else"):
            is_open = rest != [] and truth_of(rest) is None and {"[", "[["}.isdisjoint(rest)
            is_run = first == "if" and is_open and not self.is_off
            self.open += [_Branch(is_taken=False, end="fi", was_taken=self.is_off)] if first == "if" else []
            self._condition(first == "else" or truth_of(rest), mark)
            return is_run
        elif not was_skipped and not self.is_off:
            if first not in ("[", "[[", "true", "false"):
                return first not in ("then", "do", "{", "}", "!")
            is_true = truth_of(words)
            self.is_skipped = (mark == "&&" and is_true is False) or (mark == "||" and is_true is True)
        return False

    def _condition(self, is_true: bool | None, mark: str) -> None:
        """Record the condition of the innermost branch, or its first part."""
        self._part = (is_true, mark) if mark in ("&&", "||") else None
        for branch in self.open[-1:] if self._part is None else ():
            branch.is_taken = False if branch.was_taken else is_true if branch.is_taken is False else None
            branch.was_taken = branch.was_taken or branch.is_taken is True

    def compare(self, patterns: list[str]) -> None:
        """Record whether one of these patterns is that of the word which the innermost `case` compares."""
        branch = self.open[-1]
        value = "" if branch.value is None or UNSET.search(branch.value) else branch.value
        matches = any(fnmatchcase(value, each.strip(" \t\n\"'(")) for each in patterns)
        branch.is_taken = matches and not branch.was_taken
        branch.was_taken = branch.was_taken or matches
