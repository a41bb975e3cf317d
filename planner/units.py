"""All conversions between quantities as people write them and numbers as the planner computes with them.

Internal units are bytes, seconds, FLOPs, watts, and US dollars per hour of one device. A quantity in a document is a
number and a unit ("80 GiB"). A number without a unit is an error, because GB and GiB, or bits and bytes, could not be
told apart.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _bytes_units() -> dict[str, float]:
    return {f"{p}B": f for p, f in _DECIMAL.items() if p != "K"} | {f"{p}B": f for p, f in _BINARY.items()}


def _rates() -> dict[str, float]:
    bits = {f"{p}b{per}": f / 8 for per in ("/s", "ps") for p, f in _DECIMAL.items() if p in ("G", "T", "M")}
    return {f"{unit}/s": factor for unit, factor in _bytes_units().items()} | bits | {"Gbit/s": 1e9 / 8}


UNITS: Final[dict[str, dict[str, float]]] = {
    "bytes": _bytes_units(),
    "bytes_per_second": _rates(),
    "flops_per_second": {f"{p}FLOP/s": f for p, f in _DECIMAL.items() if p != "K"}
    | {f"{p}FLOPS": f for p, f in _DECIMAL.items() if p in ("T", "P", "G")},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "watts": {"W": 1.0, "kW": 1e3},
    "joules": {"J": 1.0, "kWh": 3.6e6},
    "usd_per_hour": {"USD/h": 1.0},
    "usd": {"USD": 1.0, "kUSD": 1e3, "MUSD": 1e6, "BUSD": 1e9},
}
"""Kind of quantity -> unit -> factor to the base unit (the first unit of the table is the base unit)."""

KINDS: Final = {kind: kind.replace("_", " ") for kind in UNITS} | {
    "usd_per_hour": "US dollars per hour of one device",
    "usd": "US dollars",
}
"""Kind of quantity -> its name in messages and documents."""

_RARE: Final = ("k", "P", "E", "Ki")  # prefixes that messages leave out
_QUANTITY: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]+)?(\s+per device)?\s*")
_LONGEST: Final = 400
"""Longest text, in characters, that is read as a quantity, because matching takes time quadratic in the length."""


_LENGTH: Final = re.compile(r"([0-9]{1,12})\s*([kKM]?)")


def parse_quantity(text: str, kind: str) -> float:
    """Read "80 GiB", "300 GB/s", "312 TFLOP/s" or "3 us" as a float in the base unit of `kind`.

    Raises:
        ValueError: the text has no number, no unit, or a unit of another kind; the message lists units of this kind.
    """
    table = UNITS[kind]
    examples = ", ".join(unit for unit in table if not unit.startswith(_RARE))
    text = text.replace("\N{MICRO SIGN}", "u").replace("\N{GREEK SMALL LETTER MU}", "u")
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{text!r} is not a quantity; write a number and a unit ({examples})")
    number, unit, each = match.groups()
    if each and kind == "usd":
        raise ValueError(f"{text!r} is not of one device; write the whole amount, as in 2 MUSD")
    if unit is None:
        raise ValueError(f"{text!r} has no unit; write one of {examples}")
    if unit not in table:
        other = next((name for name, units in UNITS.items() if unit in units), None)
        kind_of = f"is a unit of {KINDS[other]}" if other else "is not a known unit"
        meant = "".join(f" (did you mean {name}?)" for name in table if name.lower() == unit.lower())
        raise ValueError(f"{unit!r} {kind_of}{meant}; {KINDS[kind]} are written in {examples}")
    value = float(number) * table[unit]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is too large")
    return value


def exact_quantity(value: float, kind: str) -> str:
    """Write `value` in the largest unit whose text is read back as exactly the same float."""
    table = UNITS[kind]
    in_bytes = [item for item in table.items() if not item[0].startswith(("Mb", "Gb", "Tb"))]
    for unit, factor in sorted(in_bytes, key=lambda item: (-item[1], item[0])):
        number = f"{value / factor:.6g}"
        if abs(value) >= factor and float(number) * factor == value:
            return f"{number} {unit}"
    base = next(unit for unit, factor in table.items() if factor == 1.0)
    return f"{value!r} {base}"


def format_bytes(num_bytes: float) -> str:
    """A number of bytes as text for people, in binary units: "38.2 GiB"."""
    return _in_units(num_bytes, {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}, "B")


def format_seconds(seconds: float) -> str:
    """A time as text for people: "3.21 s", "14.0 ms", "2.5 h"."""
    for unit, factor in (("d", 86400.0 * 2), ("h", 3600.0 * 2), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{_three_digits(seconds / UNITS['seconds'][unit])} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def format_usd(usd: float) -> str:
    """Money as text for people, in a form that documents accept: "2.10 MUSD", "950 USD"."""
    for unit in ("BUSD", "MUSD", "kUSD"):
        if abs(usd) >= UNITS["usd"][unit]:
            return f"{_three_digits(usd / UNITS['usd'][unit])} {unit}"
    return f"{_three_digits(usd)} USD"


def format_rate(bytes_per_second: float) -> str:
    """A bandwidth as text for people, in decimal units: "300 GB/s"."""
    return _in_units(bytes_per_second, {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6}, "B/s")


_COUNT: Final = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([kKMBGT]?)\s*")


def parse_count(text: str) -> float:
    """Read "4M", "1.5e6" or "512" as a number; B and G both mean a thousand million.

    Raises:
        ValueError: the text has no number, or a suffix other than k, M, B, G and T.
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no count; write 512, 4M or 1.5e6")
    value = float(match[1]) * (_DECIMAL | {"B": 1e9})[match[2]]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is too large")
    return value


def parse_length(text: str) -> int:
    """Read a sequence length in tokens: "8192", or "32k", which means 32 x 1,024 as is usual for context lengths.

    An M means 1,024 x 1,024.

    Raises:
        ValueError: the text has neither form.
    """
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no sequence length; write 8192 or 32k")
    return int(match[1]) << {"": 0, "M": 20}.get(match[2], 10)


def whole_of(value: Any, name: str = "") -> Any:
    """The whole number that "128k" or "4M" stands for: 128,000, or 131,072 if `name` is that of a sequence's length.

    Any other value is returned as it is; the document that has it reports it.
    """
    if not isinstance(value, str) or not value[-1:].isalpha():
        return value
    try:
        count = parse_length(value) if name.endswith("sequence_length") else parse_count(value)
    except ValueError:
        return value
    return round(count) if math.isclose(count, round(count), rel_tol=1e-12) else value


def parse_clock(text: str) -> int:
    """Convert `MM:SS` or `HH:MM:SS`, as a progress bar shows it, to seconds."""
    seconds = 0
    for part in text.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


def parse_share(text: str) -> float:
    """Read a fraction, written "10%" or "0.1".

    Raises:
        ValueError: the text is no number, or the number is not from 0 to below 1.
    """
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f"{text!r} is no share; write a percentage from 0% to below 100%")
    return share


def format_count(count: float) -> str:
    """A large count as text for people: "175 B", "1.01 T", "6.74 B"; counts below 10,000 without a suffix."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(count) >= factor:
            return f"{_three_digits(count / (1e3 if unit == 'k' else factor))} {unit}"
    return f"{count:.0f}"


def format_flops(flops: float) -> str:
    """A number of floating-point operations as text for people, in decimal units: "312 TFLOP"."""
    steps = {"Z": 1e21, "E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6}
    return _in_units(flops, {f"{prefix}FLOP": factor for prefix, factor in steps.items()}, "FLOP")


def _in_units(value: float, steps: Mapping[str, float], base: str) -> str:
    """The value in the first of the units of which it has at least one, else as a whole number of `base`."""
    for unit, factor in steps.items():
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{value:.0f} {base}"


def _three_digits(number: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(abs(number)))) if number else 0
    return f"{number:,.{digits}f}"
