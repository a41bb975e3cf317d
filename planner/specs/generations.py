"""Values that a device takes from its generation if its own document leaves them out."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from planner.specs import library
from planner.specs.yaml import shipped_yaml
from planner.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIXTEEN_BITS: Final = ("bf16", "fp16")
_OTHER_BITS: Final = ("fp32", "fp8", "fp4")


def with_defaults(device: Mapping[str, Any]) -> dict[str, Any]:
    """A device's document with the missing keys filled in; `assumed` lists the keys that the generation supplied.

    If the document already has `assumed`, its entries stay as long as their values equal the generation's. Without a
    generation nothing is filled in. An unknown generation is reported later, when the device is checked. Until then the
    values of some known generation stand in, so that the check does not also report missing keys.
    """
    generation, before = device.get("generation"), device.get("assumed")
    if isinstance(before, list):  # of JSON
        device = {**device, "assumed": tuple(before)}
    if not isinstance(generation, str):
        return dict(device)
    known = _generations()
    defaults = _flat(_defaults_of(generation if generation in known else known[0]))
    processors = _num_processors(device.get("peak"), str(defaults.pop("processor")))
    if processors:
        defaults["num_processors"] = processors
    given = _flat(device)
    still = {key for key in before or () if given.get(key) == defaults.get(key)}
    assumed = [key for key in defaults if key not in given or key in still]
    efficiency = device.get("efficiency", {})
    filled = {key: value for key, value in defaults.items() if "." not in key} | dict(device)
    if isinstance(efficiency, dict):
        parts = {key.partition(".")[2]: value for key, value in defaults.items() if "." in key}
        filled["efficiency"] = {**parts, **efficiency}
    return {**filled, "assumed": tuple(sorted(assumed))}


@cache
def _generations() -> tuple[str, ...]:
    return library.names("clusters/generations")


@cache
def _defaults_of(generation: str) -> dict[str, Any]:
    found = shipped_yaml(library.path_of("clusters/generations", generation)).plain
    assert isinstance(found, dict)
    return found


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a generation can supply; keys of `efficiency` are written `efficiency.KEY`."""
    found = {key: value for key, value in document.items() if key in ("processor", "num_processors", "reserved_memory")}
    efficiency = document.get("efficiency")
    parts = efficiency if isinstance(efficiency, dict) else {}
    return found | {f"efficiency.{key}": value for key, value in parts.items()}


def _num_processors(peak: Any, of_one: str) -> int | None:
    """The number of processors that together have this 16-bit peak; None if the peak is missing or invalid."""
    given = [peak[precision] for precision in _SIXTEEN_BITS if isinstance(peak, dict) and precision in peak]
    if not given and isinstance(peak, dict) and not set(peak) <= set(_OTHER_BITS):
        return 1  # likewise: the check reports the misspelt precision
    try:
        rate = parse_quantity(str(given[0]), "flops_per_second") if given else 0.0
    except ValueError:
        return 1  # the check of the device reports the bad peak, and must not also report a missing number
    return max(1, round(rate / parse_quantity(of_one, "flops_per_second"))) if rate > 0 else None
