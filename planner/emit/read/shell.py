"""Split a shell script into words and expand the variables that the script sets. Nothing is run.

Assignments, arrays, defaults (`${A:-8}`), whole-number arithmetic and tests are evaluated from top to bottom. A branch
is read if it is taken or if only a shell could evaluate its condition. Text that only a shell could expand stays
unchanged: `$(hostname)`, and variables that are not set. A `readonly` variable keeps its value if a command's output
would replace it. `set -- ...` sets the arguments `$1`, `$@` and `$#`, and `shift` outside loops drops the first, or
none if there are fewer. The words of `eval` are read once more, as a shell reads them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from planner.emit.read.conditions import UNSET, Branches, arguments_of, whole_number
from planner.errors import InputError

_MOST_CHARACTERS: Final = 2**21
_MOST_WORDS: Final = 50_000
_MOST_DEPTH: Final = 50
"""Deepest nesting of brackets and branches; each level costs time and a frame of Python's stack."""
_MOST_EVALS: Final = 3
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?]")
_BRACED: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*])(\[[^][]+\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_FUNCTION: Final = re.compile(r"(?:function\s+[\w:-]+\s*(?:\(\s*\))?|[A-Za-z_][\w:-]*\s*\(\s*\))\s*(?=\{)")
_DECLARES: Final = ("export", "local", "declare", "readonly", "typeset", "-a", "-x", "-r", "-i", "-A", "-g", "-rx")
_BEFORE_COMMANDS: Final = ("if", "!")
_BEFORE_ASSIGNMENTS: Final = {*_DECLARES, *_BEFORE_COMMANDS, "then", "do", "else", "{"}
_SIGN: Final = re.compile(r"&&|\|\||[()]")
_IS_SET: Final = re.compile(r"\b([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")  # in ((...)); its new value is not read
_END: Final = "\n;&|()"
_REDIRECTION: Final = re.compile(r"[0-9&]?>>?(&[0-9-]|[ \t]*(?![&(>])[^\s;&|()]+|(?=[ \t]*>?\())")
"""Matches `> FILE` and `2>&1`, and of `> >(COMMAND)` the part before the command."""
_COMMENT: Final = re.compile(r"^([ \t]*#.*?)\\+$", re.MULTILINE)
"""Matches a line that is a comment; a backslash at its end does not continue it."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def commands_of(text: str) -> list[list[str]]:
    """Words of each command of a script, in order.

    Raises:
        InputError: control characters, an unclosed quote or bracket, or more text than any script has.
    """
    return _Script(text=text).commands()


def _joined(done: list[str], part: str, pieces: list[str]) -> str:
    """The part of a word with the pieces behind it; of several pieces, all words but the last are done."""
    for piece in pieces[:-1]:
        done.append(part + piece)
        part = ""
    return part + (pieces[-1] if pieces else "")


@dataclass(slots=True, kw_only=True)
class _Script:
    """A script that is read; several share variables, budget and exports if one is inside another."""

    text: str
    values: dict[str, list[str]] = field(default_factory=dict)
    arguments: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    branches: Branches = field(default_factory=Branches)
    place: int = 0
    budget: list[int] = field(default_factory=lambda: [_MOST_CHARACTERS])
    num_evals: int = 0

    def __post_init__(self) -> None:
        if bad := _CONTROL.search(self.text):
            raise InputError(f"a control character in line {self._line(bad.start())}", hint="this is no script")
        self.text = _COMMENT.sub(r"\1", self.text.replace("\r\n", "\n")).replace("\\\n", " ")
        self.branches.has_other_text = "<<" in self.text

    def commands(self) -> list[list[str]]:
        found: list[list[str]] = []
        words: list[str] = []
        while self.place < len(self.text):
            if self._skip_blanks():
                continue
            here = self.text[self.place]
            if more := self._of_test(words):
                words += more
            elif here in _END:
                if here == ")" and self._closes_a_pattern():
                    words = []
                    continue
                mark = self.text[self.place : self.place + 2]
                mark = mark if mark in ("&&", "||", ";;") else here
                self.place += len(mark)
                if words and self._runs(words, mark):
                    found += self._ran([each for each in words if each not in _BEFORE_COMMANDS] or words)
                words, self.assigned = [], set()
                if mark == ";;" and self.branches.open:
                    self.branches.open[-1].is_taken = False
            elif set(words) <= _BEFORE_ASSIGNMENTS and (match := _ASSIGNMENT.match(self.text, self.place)):
                self._assign(match, is_export=not {"export", "-x"}.isdisjoint(words))
                self.branches.is_skipped = False
                self.fixed |= {match[1]} if "readonly" in words else set()
                words = [each for each in words if each in ("export", *_BEFORE_COMMANDS)]
            elif not words and self.arguments and (match := _FUNCTION.match(self.text, self.place)):
                self.place = match.end()
                found += self._inner(self._balanced(1, "}", "{"), {}).commands()  # a function has arguments of its own
            else:
                words = self._after_keyword(words + self._word())
            self._spend(_MOST_CHARACTERS // _MOST_WORDS)
        return [*found, *self._ran(words)] if words and self._runs(words, "\n") else found

    def _of_test(self, words: list[str]) -> list[str]:
        """The words at the current position if it is in a test: `((...))` as one with `[[`, or a sign between two."""
        if self.text.startswith("((", self.place) and not {*words} - {"if", "elif", "while", "!"}:
            inner, is_off = self._balanced(2, "))"), self.branches.is_off
            self.values |= {} if is_off else {name: [f"${name}"] for name in _IS_SET.findall(inner)}
            return ["[[", self._sum_of(inner), "-ne", "0", "]]"]
        sign = _SIGN.match(self.text, self.place) if "[[" in words and words[-1] != "]]" else None
        self.place = sign.end() if sign else self.place
        return [sign[0]] if sign else []

    def _after_keyword(self, words: list[str]) -> list[str]:
        if not words or words[0] not in ("then", "do", "else", "fi", "esac", "done"):
            return words
        self._runs([words[0]], ";")
        return words[1:]

    def _ran(self, words: list[str]) -> list[list[str]]:
        """The commands that a command is: itself, those of the text of `eval`, or none for `set --`."""
        if words[:2] == ["set", "--"]:
            self.arguments = arguments_of(words[2:])
            return []
        if words[0] == "export":
            self.exported |= {*words[1:]}
        if self._sets(words):
            return []
        place = next((at for at, each in enumerate(words[:-1]) if each == "-c"), 0)
        if place and UNSET.search(words[place + 1]):
            return [[*words[: place + 1], *each] for each in self._other_shell(*words[place + 1 :])]
        is_followed = all(each.is_taken for each in self.branches.open) and "@" in self.arguments
        count = whole_number((words[1:] or ["1"])[0]) if words[0] == "shift" and is_followed else None
        if count is not None:
            words = self.arguments["@"]
            self.arguments = arguments_of(words[count:]) if 0 <= count <= len(words) else self.arguments
            return []
        if self.arguments and {"shift", "getopts"} & set(words[:2]):
            hint = "--define NAME=VALUE sets the variables that the script takes from them, without --args"
            raise InputError(f"the script goes through its arguments ({words[0]}), which is not followed", hint=hint)
        if words[0] != "eval" or len(words) == 1:
            return [words]
        if self.num_evals == _MOST_EVALS:
            self._too_deep("evals", _MOST_EVALS)
        return self._inner(" ".join(words[1:]), self.arguments, 1).commands()

    def _other_shell(self, text: str, name: str = "bash", *words: str) -> list[list[str]]:
        """The commands of `bash -c TEXT NAME WORDS`: it has exported variables, and those set before its own name."""
        known = self.exported | self.assigned
        values = {each: value for each, value in self.values.items() if each in known}
        arguments = arguments_of(list(words)) | {"0": [name]}
        return self._inner(text, arguments, 1, values=values, exported={*values}).commands()

    def _sets(self, words: list[str]) -> bool:
        """Whether a command only sets variables: `for`, `let`, or `read` of a text, which IFS parts."""
        if words[0] == "for" and words[2:3] == ["in"]:
            self.values |= {words[1]: words[3:] if len(words) == 4 else [f"${words[1]}"]}  # one pass, or unknown
        elif words[0] == "let":
            sums = [each.partition("=") for each in words[1:]]
            self.values |= {name: [self._sum_of(value)] for name, equals, value in sums if equals}
        elif words[0] == "read" and "<<<" in words:
            place = words.index("<<<")
            names, text = [each for each in words[1:place] if not each.startswith("-")], " ".join(words[place + 1 :])
            mark = self.values.get("IFS", [""])[0]
            parts = text.split(mark if len(mark) == 1 else None, len(names) - 1)  # the last variable takes the rest
            self.values |= {name: [part] for name, part in zip(names, parts, strict=False) if not UNSET.search(text)}
        else:
            return False
        return True

    def _inner(self, text: str, arguments: dict[str, list[str]], num_evals: int = 0, **other: Any) -> _Script:
        """A script with arguments of its own, which shares the variables of this one."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in ("values", "exported", "budget", "fixed")}
        return _Script(text=text, arguments={**arguments}, num_evals=self.num_evals + num_evals, **{**shared, **other})

    def _runs(self, words: list[str], mark: str) -> bool:
        if len(self.branches.open) > _MOST_DEPTH:
            self._too_deep("branches", _MOST_DEPTH)
        if words[:2] == ["while", "getopts"] and not "".join(self.arguments.get("@", ["-"])[:1]).startswith("-"):
            self.values["OPTIND"], words = ["1"], ["while", "false"]  # no argument is an option
        return self.branches.runs(words, mark)

    def _closes_a_pattern(self) -> bool:
        """Whether this bracket ends a pattern of `case`; if so, the pattern's branch is taken or not."""
        if not self.branches.open or self.branches.open[-1].value is None:
            return False
        start = max(self.text.rfind(mark, 0, self.place) for mark in ("\n", ";;", " in "))
        self.branches.compare(self.text[start : self.place].replace(";;", "").strip().removeprefix("in ").split("|"))
        self.place += 1
        return True

    def _skip_blanks(self) -> bool:
        """Skip blanks, a redirection or a comment at the current position; returns whether any was skipped."""
        start = self.place
        while self.place < len(self.text) and self.text[self.place] in " \t":
            self.place += 1
        if self.text.startswith("#", self.place):
            end = self.text.find("\n", self.place)
            self.place = len(self.text) if end < 0 else end
        elif match := _REDIRECTION.match(self.text, self.place):
            self.place = match.end()
        return self.place > start

    def _assign(self, match: re.Match[str], *, is_export: bool) -> None:
        self.assigned |= set() if self.branches.is_off else {match[1]}
        self.exported |= self.assigned if is_export else set()
        self.place = match.end()
        before = self.values.get(match[1], []) if match[2] else []
        if self.text.startswith("(", self.place):
            self.place += 1
            items: list[str] = []
            while self.place < len(self.text) and self.text[self.place] != ")":
                if self._skip_blanks():
                    continue
                if self.text[self.place] in "\n;&|(":
                    self.place += 1
                    continue
                items += self._word()
            self.place += 1
            if not self.branches.is_off:
                self.values[match[1]] = [*before, *items]
            return
        value = " ".join(self._word(split=False)) if self._has_word() else ""
        if self.branches.is_off or (match[1] in self.fixed and re.search(r"\$\(|`", value)):
            # options that are not taken are none, and no variable of the environment
            self.values |= {match[1]: self.values.get(match[1], [""])} if value.lstrip().startswith("--") else {}
            return
        self.values[match[1]] = [*before[:-1], (before[-1] if before else "") + value] if match[2] else [value]

    def _has_word(self) -> bool:
        return self.place < len(self.text) and self.text[self.place] not in " \t" + _END

    def _word(self, *, split: bool = True) -> list[str]:
        """The words that one word of the text becomes after expansion: one, several, or none."""
        done: list[str] = []
        part, is_there = "", False
        while self._has_word():
            here = self.text[self.place]
            self.place += 1
            if here == "'":
                part, is_there = part + self._until("'"), True
            elif here == '"':
                pieces = self._quoted()
                part, is_there = _joined(done, part, pieces), is_there or bool(pieces)
            elif here == "\\":
                part, is_there = part + self.text[self.place : self.place + 1], is_there or self.place < len(self.text)
                self.place += 1
            elif here in "$`":
                values = self._expansion(here)
                pieces = [piece for value in values for piece in (_UNSPLIT.findall(value) if split else [value])]
                part, is_there = _joined(done, part, pieces), is_there or bool(pieces)
            else:
                part, is_there = part + here, True
        return [*done, part] if is_there else done

    def _until(self, mark: str) -> str:
        end = self.text.find(mark, self.place)
        if end < 0:
            self._endless(f"a {mark}", self.place)
        found, self.place = self.text[self.place : end], end + 1
        return found

    def _quoted(self) -> list[str]:
        """The words of a double-quoted text: usually one word, and one per entry for an array `"${A[@]}"`."""
        done: list[str] = []
        part, start = "", self.place
        while self.place < len(self.text):
            here = self.text[self.place]
            self.place += 1
            if here == '"':
                return [*done, part] if done or part or not self.text.startswith(('$@"', '${@}"'), start) else []
            if here == "\\" and self.text[self.place : self.place + 1] in ('"', "\\", "$", "`"):
                part += self.text[self.place]
                self.place += 1
            elif here in "$`":
                part = _joined(done, part, self._expansion(here))
            else:
                part += here
        return self._endless('a "', start)

    def _expansion(self, mark: str) -> list[str]:
        """The value of the expansion after a `$` or a backquote; an unknown expansion stays unchanged."""
        if mark == "`":
            inner = self._until("`")
            return [self._counted(inner) or f"`{inner}`"]
        if self.text.startswith("((", self.place):
            return [self._sum_of(self._balanced(2, "))"))]
        if self.text.startswith("(", self.place):
            inner = self._balanced(1, ")")
            return [self._counted(inner) or f"$({inner})"]
        if self.text.startswith("{", self.place):
            return self._braced(self._balanced(1, "}", "{"))
        name = _NAME.match(self.text, self.place)
        if name is None:
            return ["$"]
        self.place = name.end()
        return self._value(name[0])

    def _balanced(self, opened: int, closing: str, opening: str = "(") -> str:
        """The text between the bracket at the current position and its closing bracket."""
        start = self.place + opened
        depth, place = opened, start
        while place < len(self.text) and depth:
            if self.text[place] == opening:
                depth += 1
                if depth > _MOST_DEPTH:
                    self._too_deep("brackets", _MOST_DEPTH)
            elif self.text[place] == closing[0]:
                depth -= 1
            place += 1
        if depth:
            self._endless("a bracket", self.place)
        self.place = place
        return self.text[start : place - len(closing)]

    def _braced(self, inner: str) -> list[str]:
        match = _BRACED.fullmatch(inner)
        if match is None:
            return [f"${{{inner}}}"]
        name, kind, other = match[1], match[3] or "", match[4] or ""
        known = self._known(name)
        if known is not None and match[2] not in (None, "[@]", "[*]"):
            at = whole_number(self._sum_of(match[2][1:-1]))
            is_set_alone = re.search(rf"\b{name}(?:=\(\s*)?\[[^\]]*\]\+?=", self.text)
            return [f"${{{inner}}}"] if at is None or at < 0 or kind or is_set_alone else known[at : at + 1]
        is_set = known is not None and (known != [""] or not kind.startswith(":"))
        if kind.endswith("+"):
            return self._inside(other) if is_set else []
        if is_set or kind[-1:] not in ("-", "="):
            return self._value(name, whole=bool(match[2]) or name in "@*")
        found = self._inside(other)
        if kind.endswith("="):
            self.values[name] = found
        return found

    def _inside(self, text: str) -> list[str]:
        """The words of a default value, which may contain variables itself."""
        inner = self._inner(f"{text}\n", self.arguments)
        found: list[str] = []
        while inner.place < len(text):
            if not inner._has_word():  # noqa: SLF001 - of the same class
                inner.place += 1
                continue
            found += inner._word()  # noqa: SLF001 - of the same class
        return found

    def _value(self, name: str, *, whole: bool = True) -> list[str]:
        known = self._known(name)
        if known is None:
            return [] if name in "@*#?" else [""] if name.isdigit() and "@" in self.arguments else [f"${name}"]
        found = known if whole else known[:1]
        self._spend(sum(map(len, found)) + len(found))
        return list(found)

    def _known(self, name: str) -> list[str] | None:
        return self.arguments.get(name, self.values.get(name))

    def _sum_of(self, text: str) -> str:
        """The result of whole-number arithmetic, or the unchanged text `$((...))` if it cannot be computed."""
        spread = _OPERAND.sub(lambda m: " ".join(self._known(m[m.lastindex or 0]) or [m[0]]), text.replace("$((", "(("))
        number = whole_number(spread)
        return f"$(({text}))" if number is None else str(number)

    def _counted(self, command: str) -> str:
        """The output of a command such as `expr 16 / $N`, computed here; empty for any other command."""
        name, _, rest = command.strip().partition(" ")
        if name != "expr":
            return ""
        found = self._sum_of(rest.replace("\\*", "*"))
        return "" if found.startswith("$") else found

    def _endless(self, what: str, place: int) -> NoReturn:
        raise InputError(f"{what} of line {self._line(place)} has no end", hint="is the script whole?")

    def _too_deep(self, what: str, most: int) -> NoReturn:
        words = f"line {self._line(self.place)}: {what} are nested more than {most} deep"
        raise InputError(words, hint="is this a script?")

    def _line(self, place: int) -> int:
        return self.text.count("\n", 0, place) + 1

    def _spend(self, num_characters: int) -> None:
        self.budget[0] -= num_characters
        if self.budget[0] < 0:
            raise InputError("the script expands to more text than any command line has", hint="is it one?")


_UNSPLIT: Final = re.compile(r"(?:\$\((?:[^()]|\([^()]*\))*\)|\S)+")
"""Matches the words of a value; a command between brackets is part of one, as its output mostly is."""
_OPERAND: Final = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\b\}?|\$([0-9#])|\$\{([0-9]+)\}")
