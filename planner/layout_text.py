"""Reads layouts that people write: `tp=8,pp=4,...`, with hints for unknown keys and bad values."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from planner.errors import InputError, Mistake
from planner.layout import COUNTS, KEYS, V_SHAPED, Layout, chunks_per_stage, even_split
from planner.specs.recipe import Offload, Schedule
from planner.specs.recompute import canonical, policy_fault
from planner.specs.text import quoted
from planner.specs.yaml import shipped_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_DUALPIPE: Final = "dualpipe"
"""DualPipe on pp stages, fed from both ends: two V schedules side by side, of pp / 2 stages with two chunks each."""
_LISTS: Final = ("layers_per_stage", "recompute", "pools")
"""Keys with one entry per chunk, or per stage (`pools`); `3*11` means `11/11/11`."""
_NAMES: Final = Path(__file__).with_suffix(".yaml")
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "schedule": (*get_args(Schedule), _DUALPIPE),
    "offload": get_args(Offload),
}


def _written_out(text: str) -> str:
    """The inverse of `shortened_list`; a part without a valid count stays as it is, for later checks to report."""
    parts = []
    for part in text.split("/"):
        count, star, value = part.partition("*")
        counted = bool(star) and count.isascii() and count.isdigit() and len(count) < 5 and int(count) > 0
        parts += [value] * int(count) if counted else [part]
    return "/".join(parts)


def parse_assignments(text: str, option: str) -> dict[str, str]:
    """Split `tp=8,pp=4` into a mapping and write its lists out; report every unknown or repeated key of `option`.

    Raises:
        InputError: the text has bad parts, one mistake for each of them.
    """
    found: dict[str, str] = {}
    mistakes = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, separator, value = part.partition("=")
        key = key.strip()
        if key not in KEYS:
            mistakes.append(Mistake(message=f"unknown layout key {quoted(key)}", where=option, hint=_known_key(key)))
        elif not separator or not value.strip():
            mistakes.append(Mistake(message=f"{quoted(part)} has no value", where=option, hint=f"write `{key}=...`"))
        elif key in found:
            mistakes.append(Mistake(message=f"`{key}` is given twice", where=option))
        else:
            found[key] = _written_out(value.strip()) if key in _LISTS else value.strip()
            if key == "recompute":
                found[key] = "/".join(map(canonical, found[key].split("/")))
            if key == "offload":
                found[key] = offload_of(found[key].split("+"))
    if mistakes:
        raise InputError(*mistakes)
    return found


def offload_of(words: Iterable[str]) -> str:
    """The value of `offload` for tensors on the host; other words stay as they are."""
    named = {"states" if each == "optimizer" else each for each in words}
    named = named - {"both"} | {"states", "activations"} if "both" in named else named
    joined = "+".join(sorted(named, key=lambda each: (each != "params", each != "states", each)))
    return {"states": "optimizer", "states+activations": "both"}.get(joined, joined)


def _known_key(word: str) -> str:
    """A hint for a word that is not a key: the key that was probably meant, or all keys."""
    plain, names = word.lower().replace("-", "_").removesuffix("_size"), shipped_yaml(_NAMES).plain
    if plain in names["accumulation"]:
        return "microbatches follow from --global-batch, dp and mbs: global batch / (dp * mbs)"
    near = difflib.get_close_matches(word, KEYS, n=1)
    if key := next((key for key, others in names["keys"].items() if plain in others), near[0] if near else ""):
        return f"did you mean `{key}`?"
    return f"known keys: {', '.join(KEYS)}"


def check_value(key: str, text: str, option: str) -> Mistake | None:
    """The mistake in the value of one layout key, or None."""
    if key in COUNTS or key in ("zero", "sp"):
        low, high = {"zero": (0, 3), "sp": (0, 1)}.get(key, (1, 10_000_000))
        if text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high:
            return None
        wanted = f"{low} to {high}" if key in ("zero", "sp") else "a whole number of at least 1"
        return Mistake(message=f"{quoted(f'{key}={text}')} is no legal value", where=option, hint=f"{key} is {wanted}")
    if key == "pools":  # names of pools are checked against the cluster, elsewhere
        return None
    if key == "recompute":
        faults = (fault for part in text.split("/") if (fault := policy_fault(part)))
        return next(
            (
                Mistake(message=f"{quoted(f'{key}={text}')} is no legal value", where=option, hint=hint)
                for hint in faults
            ),
            None,
        )
    allowed = _WORDS.get(key, ())
    for part in (text,) if key == "loss" else text.split("/"):
        if part in allowed or (not allowed and part.isascii() and part.isdigit() and len(part) < 6):
            continue
        near = difflib.get_close_matches(part, allowed, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known values: {', '.join(allowed) or 'whole numbers'}"
        return Mistake(message=f"{quoted(f'{key}={text}')} is no legal value", where=option, hint=hint)
    return None


def parse_layout(
    text: str, *, num_layers: int, num_devices: int | Mapping[str, int], option: str = "--layout"
) -> Layout:
    """Read `tp=8,pp=4,mbs=1,...`; a value that is left out is derived or gets its default.

    Defaults: every degree 1, zero 0, mbs 1, no recompute, sp 1 if tp > 1, schedule `interleaved` if interleave > 1 else
    `1f1b`, interleave 2 for the V-shaped schedules, dp = num_devices / (tp * pp * cp). Layers are divided as evenly as
    possible, and the first stages hold the remainder. The number of hosts used in a scale-up domain (segment) depends
    on the cluster: planner/cost/segments.py.

    num_devices: devices of the cluster, or of each pool of a mixed cluster. For a mixed cluster `pools` has to be
    given, and dp is the largest degree for which every pool has enough devices for its stages.

    Raises:
        InputError: unknown keys, bad values, or lists of the wrong length.
    """
    given = parse_assignments(text, option)
    mistakes = [bad for key, value in given.items() if (bad := check_value(key, value, option))]
    if mistakes:
        raise InputError(*mistakes)
    number: dict[str, int] = {key: int(given[key]) for key in (*COUNTS, "zero", "sp") if key in given}
    if given.get("schedule") == _DUALPIPE:
        given, number = _as_v(given, number, option)
    tp, pp, cp = number.get("tp", 1), number.get("pp", 1), number.get("cp", 1)
    schedule = cast("Schedule", given.get("schedule", "interleaved" if number.get("interleave", 1) > 1 else "1f1b"))
    interleave = number.setdefault("interleave", chunks_per_stage(schedule))
    pools = tuple(given["pools"].split("/")) if "pools" in given else ()
    number.setdefault("dp", max(1, _devices_per_stage(num_devices, pools, pp, option) // (tp * cp)))
    number.setdefault("sp", 1 if tp > 1 else 0)
    chunks = pp * interleave
    layers = _layers_of_chunks(given.get("layers_per_stage"), num_layers, pp, interleave, schedule, option)
    mtp = _mtp_chunks(given, chunks, option)
    recompute = tuple(given.get("recompute", "none").split("/"))
    recompute = recompute * chunks if len(recompute) == 1 else recompute
    _check_entries("recompute", recompute, chunks, option)
    return Layout(
        **number,
        schedule=schedule,
        recompute=recompute,
        offload=cast("Offload", given.get("offload", "none")),
        layers_per_stage=layers,
        mtp=mtp,
        pools=pools,
    )


def _mtp_chunks(given: Mapping[str, str], chunks: int, option: str) -> tuple[int, ...]:
    """The chunks of `mtp`, empty if all stand beside the loss; `loss` is checked, because it closes the model.

    Raises:
        InputError: a chunk that does not exist, or a loss before the last chunk.
    """
    last, hint = chunks - 1, f"chunks are numbered from 0 to {chunks - 1}, in model order"
    for key in ("mtp", "loss"):
        if beyond := [each for each in given.get(key, "").split("/") if each and int(each) > last]:
            raise InputError(f"`{key}={beyond[0]}` names no chunk", where=option, hint=hint)
    if int(given.get("loss", last)) != last:
        hint = f"leave `loss` out, or write loss={last}; the last chunk may hold the loss and no layer"
        raise InputError(f"`loss={given['loss']}`: the loss stands in the last chunk", where=option, hint=hint)
    mtp = tuple(map(int, filter(None, given.get("mtp", "").split("/"))))
    return () if set(mtp) == {last} else mtp[:1] if len(set(mtp)) == 1 else mtp


def _as_v(given: Mapping[str, str], number: Mapping[str, int], option: str) -> tuple[dict[str, str], dict[str, int]]:
    """`schedule=dualpipe` as two V schedules: each rank holds stages r and pp - 1 - r of one of two model replicas.

    Source: DeepSeek, DualPipe (README), DualPipeV ("cut in half").
    """
    pp = number.get("pp", 1)
    if pp % 2 or "interleave" in number or "dp" in number:
        raise InputError(
            Mistake(
                message="`schedule=dualpipe` needs an even pp, and neither interleave nor dp",
                where=option,
                hint="DualPipe on pp stages is two V's of half the stages: `schedule=dualpipev,pp=8` for 16",
            )
        )
    return {**given, "schedule": "dualpipev"}, {**number, "pp": pp // 2, "interleave": 2}


def _devices_per_stage(num_devices: int | Mapping[str, int], pools: tuple[str, ...], pp: int, option: str) -> int:
    """Devices that each stage can have."""
    if isinstance(num_devices, int):
        return num_devices // pp
    known = ", ".join(num_devices)
    if len(pools) != pp:
        message = f"`pools` has {len(pools)} entries" if pools else "which pool each stage runs on is not said"
        hint = f"pp = {pp} entries with / between, of the pools {known}"
        raise InputError(Mistake(message=message, where=option, hint=hint))
    unknown = sorted(set(pools) - set(num_devices))
    if unknown:
        raise InputError(Mistake(message=f"unknown pool `{unknown[0]}`", where=option, hint=f"pools are {known}"))
    return min(num_devices[pool] // pools.count(pool) for pool in pools)


def _layers_of_chunks(
    given: str | None, num_layers: int, pp: int, interleave: int, schedule: Schedule, option: str
) -> tuple[int, ...]:
    """Layers of each chunk, as given or divided as evenly as possible.

    Two chunks more than layers leave none for the first and the last chunk, which hold the model's ends.

    Raises:
        InputError: the list does not have pp * interleave entries that sum to the layers, or chunks outnumber layers.
    """
    chunks = pp * interleave
    if given is not None:
        layers = tuple(map(int, given.split("/")))
        _check_entries("layers_per_stage", layers, chunks, option)
        if sum(layers) != num_layers:
            hint = f"the model has {num_layers} layers"
            raise InputError(f"`layers_per_stage` sums to {sum(layers)}", where=option, hint=hint)
        return layers
    if chunks == num_layers + 2 and schedule not in V_SHAPED:
        return (0, *(1,) * num_layers, 0)
    if chunks > num_layers:
        message = f"pp {pp} * interleave {interleave} = {chunks} chunks of {num_layers} layers"
        raise InputError(message, where=option, hint="each chunk holds at least one layer; lower pp or interleave")
    return even_split(num_layers, pp, interleave, schedule)


def _check_entries(key: str, values: tuple[Any, ...], chunks: int, option: str) -> None:
    if len(values) != chunks:
        hint = f"pp * interleave = {chunks} entries are needed, in model order"
        raise InputError(f"`{key}` has {len(values)} entries", where=option, hint=hint)
