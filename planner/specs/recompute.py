"""Recompute policies: the activations that layers drop after the forward pass and compute again in the backward pass.

- `none`.
- `selective`: as the engine defines it.
- `full`: everything but a layer's input.
- Parts of a layer by name, joined by + in alphabetical order (`layernorm+moe_act`).
- `full:3`: full for 3 layers of each chunk.
- `every:2`: full for every second layer.

In arrays a policy is a whole number, its code.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

from pydantic import AfterValidator, WithJsonSchema

from planner.specs.text import did_you_mean, quoted

if TYPE_CHECKING:
    from planner.numbers import Flag, Number

Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
"""A part of a layer that can be recomputed alone. Source: Megatron-LM, transformer_config.py, recompute_modules."""

MODULES: Final[tuple[str, ...]] = get_args(Module)

NONE: Final = 0
SELECTIVE: Final = 1
FULL: Final = 2
_EVERY: Final = 3
_PLACE: Final = 4  # multiplies what follows the kind of policy: the number of layers, or a bit for each module
_NAMES: Final = ("none", "selective", "full", "every")
_PARTIAL: Final = re.compile(r"(full|every):0*([1-9][0-9]{0,4})", re.ASCII)


def canonical(text: str) -> str:
    """The policy in the single spelling that plans use: modules once and in order, numbers without leading zeros."""
    if match := _PARTIAL.fullmatch(text):
        return f"{match[1]}:{match[2]}"
    return "+".join(sorted(set(text.split("+"))))


def policy_fault(text: str) -> str | None:
    """A hint for a text that is no policy; None if the text is a policy."""
    if text in _NAMES[:3] or (_PARTIAL.fullmatch(text) and canonical(text) != "every:1"):
        return None
    known = (*MODULES, *_NAMES[:3])
    for part in text.split("+"):
        if part not in MODULES:
            parts = f"{', '.join(_NAMES[:3])}, full:K, every:N, or modules joined by +: {', '.join(MODULES)}"
            return did_you_mean(part, known, otherwise=f"known values: {parts}")
    return None


def _checked(text: str) -> str:
    if hint := policy_fault(text):
        raise ValueError(f"{quoted(text)} is no recompute policy; {hint}")
    return canonical(text)


_MODULE: Final = "|".join(MODULES)
_PATTERN: Final = rf"^(none|selective|full(:[1-9][0-9]*)?|every:[1-9][0-9]*|({_MODULE})(\+({_MODULE}))*)$"
Recompute = Annotated[str, AfterValidator(_checked), WithJsonSchema({"type": "string", "pattern": _PATTERN})]


@cache
def policy_code(text: str) -> int:
    """The number that represents a policy in arrays; the inverse of `policy_name`."""
    kind, _, number = text.partition(":")
    if kind in _NAMES:
        return _NAMES.index(kind) + _PLACE * int(number or 0)
    return _PLACE * sum(1 << MODULES.index(module) for module in set(text.split("+")))


def policy_name(code: int) -> str:
    """The policy that a number represents."""
    kind, rest = _NAMES[code % _PLACE], code // _PLACE
    if kind != "none" or not rest:
        return f"{kind}:{rest}" if rest else kind
    return "+".join(modules_in(code))


def whole_policy(code: int) -> int:
    """The policy of a layer that recomputes; `full` if only some layers do."""
    return FULL if code % _PLACE in (FULL, _EVERY) else code


def is_of_some_layers(code: int) -> bool:
    """Whether a policy recomputes only some layers of a stage: `full:k` or `every:n`."""
    return code != whole_policy(code)


def modules_in(code: int) -> tuple[str, ...]:
    """The parts of a layer that a policy names."""
    bits = 0 if code % _PLACE else code // _PLACE
    return tuple(module for bit, module in enumerate(MODULES) if bits >> bit & 1)


def number_of_layers(code: Number) -> tuple[Flag, Number]:
    """For `full:k` and `every:n`: whether the policy is `every:n`, and the number k or n."""
    return code % _PLACE == _EVERY, code // _PLACE
