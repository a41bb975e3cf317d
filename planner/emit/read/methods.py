"""Training methods other than plain language modelling: which of them a file asks for, and what of them has no price.

A method that needs another model, or weights or states of another kind, is refused. A method whose answers are
generated on the same devices can be priced for its training step alone, so it leaves the verdict unknown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from planner.emit.names import listed, names_beside
from planner.emit.read import METHOD
from planner.emit.target import Doubt, matches
from planner.errors import InputError, Mistake
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planner.emit.target import Value, Values

_NAMES: Final = names_beside(__file__)
_SAYS: Final = rf"stage|rl|rlhf_type|{METHOD}"
_ON: Final = r"(?!(0(\.0*)?|false|none|null|no|off|\(\))$).*"
REFUSED: Final = tuple((row.get("key", _SAYS), row.get("value", _ON), row["needs"]) for row in _NAMES["refused"])
"""Pattern of a key, pattern of its value in lower case, and what would have to be priced."""

_ONLINE: Final = r"(vlm_)?(grpo|gspo|dapo|rloo|ppo|online_dpo|nash_md|xpo|reinforce)\w*"
GENERATION: Final = Doubt("what generates answers on the same devices has no price")
NAMES: Final = "online_dpo|dpo|kto|orpo|cpo|bco|gkd|grpo|rloo|ppo|prm|nash_md|xpo|reward"
"""Methods that TRL's commands and scripts have names for, beside supervised fine-tuning."""
_SCRIPT: Final = re.compile(rf"^[^#\n]*?(?:\btrl\s+({NAMES})\b|[\s/_]({NAMES})(?:_[a-z_]+)?\.py\b)", re.MULTILINE)
_SIGNS: Final = [(key, name) for name, keys in _NAMES["signs"].items() for key in listed(keys)]
"""Key that only files of some methods have -> one of these methods."""
_PROMPTS: Final = ("max_prompt_length", "max_prompt_len")
_ANSWERS: Final = ("max_completion_length", "trl.max_completion_length", "max_new_tokens", "response_length")


def with_method(text: str, values: Values) -> Values:
    """The values; a file that does not name its method gets the method of its script's name or of its keys."""
    if any(re.fullmatch(_SAYS, key) for key in values):
        return values
    script = _SCRIPT.search(text)
    sign = next((f"{name}, by {key}" for key, name in _SIGNS if values.get(key)), None)
    found = f"{script[1] or script[2]}, by the script's name" if script else sign
    return {**values, METHOD: found} if found else values


def check_method(values: Values, ignored: Sequence[str]) -> None:
    """Refuse methods without a price.

    Raises:
        InputError: all keys that ask for such a method, each with what would have to be priced.
    """
    mistakes = [
        Mistake(
            message=f"{printable(str(value), 40)} has no price here; it needs {needs}",
            where=key,
            hint=f"--ignore {key} prices the training without it",
        )
        for key, value in values.items()
        for keys, wanted, needs in REFUSED
        if re.fullmatch(keys, key) and re.fullmatch(wanted, _name(value)) and not matches(key, ignored)
    ]
    if mistakes:
        raise InputError(*mistakes)


def _name(value: Value) -> str:
    """The value in lower case, of several values the first."""
    return str(value).lower().partition(",")[0].strip("('\"[ ")


def online_key(values: Values, ignored: Sequence[str]) -> str:
    """The key that asks for a method that trains on answers which it generates itself; empty without one."""
    asks = [key for key, value in values.items() if re.fullmatch(_SAYS, key) and re.fullmatch(_ONLINE, _name(value))]
    return next((key for key in asks if not matches(key, ignored)), "")


def length_of(values: Values, length: int, answer: int) -> int:
    """Tokens of a prompt and its answer, 0 if either is unknown.

    length: the file's length of a sequence, which such programs apply to the prompt.
    answer: the program's default length of an answer, 0 for none.
    """
    prompt, answer = _first(values, _PROMPTS) or length, _first(values, _ANSWERS) or answer
    return prompt + answer if prompt and answer else 0


def _first(values: Mapping[str, Value], keys: Sequence[str]) -> int:
    found = next((text for key in keys if (text := str(values.get(key, ""))).isdecimal()), "0")
    return int(found[:9])
