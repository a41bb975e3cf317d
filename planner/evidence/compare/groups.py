"""Errors by group: family of publishers, source, device, engine, kind of model, precision, and kind of layout."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from planner.evidence.compare.score import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Errors of the rows with one value of a key: median, mean and 90th percentile of the absolute error.

    ratio: median of measured over predicted, which shows the direction of the errors.
    null_median: median error of the null model on the rows that it can predict; None if there are none.
    """

    by: str
    value: str
    num_rows: int
    median: float
    mean: float
    p90: float
    ratio: float
    null_median: float | None = None


def _cut(row: Row) -> str:
    job, layout = _setup(row).job, _setup(row).layout
    if job.model.moe is not None:
        return "experts"
    if layout.cp > 1:
        return "context parallel"
    if layout.zero >= 3:
        return "ZeRO-3"
    return "dense 3D" if layout.tp * layout.pp > 1 else "data parallel"


_LONG: Final = 32_768
"""Tokens of a sequence from which a run counts as long."""


def kinds_of(row: Row) -> tuple[str, ...]:
    """The kinds of a run whose errors are reported apart, because few publishers have them; most runs have none."""
    run, job = row.run, _setup(row).job
    device = job.cluster.device.name
    tests = {
        "fine-tuning": run.task.lower().startswith(("sft", "lora")),
        "consumer cards": re.match(r"rtx\d0\d0(?:ti)?-\d", device) is not None,
        "AMD": device.startswith("mi"),
        "long sequences": (run.seq or 0) >= _LONG,
        "experts": job.model.moe is not None,
        "FSDP2": job.engine.name == "torchtitan",
    }
    return tuple(kind for kind, is_one in tests.items() if is_one)


_KEYS: Final[dict[str, Callable[[Row], str]]] = {
    "all": lambda _: "all",
    "family": lambda row: row.run.family or "-",
    "source": lambda row: row.run.source_set or "-",
    "device": lambda row: _setup(row).job.cluster.device.name,
    "engine": lambda row: _setup(row).job.engine.name,
    "architecture": lambda row: row.run.arch or "-",
    "precision": lambda row: row.run.precision_class or "-",
    "axes": _cut,
    "kind": lambda row: " + ".join(kinds_of(row)) or "others",
    "release": lambda row: f"{row.run.source_set} {row.run.release}".strip() if row.run.release else "-",
}


def _setup(row: Row) -> Any:
    assert row.setup is not None
    return row.setup


def time_groups(rows: Sequence[Row], null: Mapping[int, float]) -> tuple[Group, ...]:
    """Errors of tokens per second by every key, for rows that have a prediction.

    null: index of a row -> seconds that the null model predicts.
    """
    entries = [
        (row, _Entry(error=error, ratio=1 + error, null=_null_error(row, null.get(index))))
        for index, row in enumerate(rows)
        if (error := row.error) is not None
    ]
    return _grouped(_KEYS, entries)


def _null_error(row: Row, predicted: float | None) -> float | None:
    return abs(row.measured_seconds / predicted - 1) if row.measured_seconds and predicted else None


def memory_groups(rows: Iterable[Row]) -> tuple[Group, ...]:
    """Errors of the memory, by the counter of the measurement and by source; the ratio is measured over predicted."""
    keys: dict[str, Callable[[Row], str]] = {
        "memory": lambda row: row.run.mem_class or "not stated",
        "memory source": lambda row: f"{row.run.source_set} {row.run.mem_class}".strip(),
    }
    entries = [
        (row, _Entry(error=error, ratio=1 / (1 + error))) for row in rows if (error := row.memory_error) is not None
    ]
    return _grouped(keys, entries)


class _Entry(NamedTuple):
    error: float
    ratio: float  # measured / predicted
    null: float | None = None


def _grouped(keys: Mapping[str, Callable[[Row], str]], entries: Sequence[tuple[Row, _Entry]]) -> tuple[Group, ...]:
    found: list[Group] = []
    for by, key in keys.items():
        groups: dict[str, list[_Entry]] = defaultdict(list)
        for row, entry in entries:
            groups[key(row)].append(entry)
        found += [_group(by, value, members) for value, members in sorted(groups.items())]
    return tuple(found)


def _group(by: str, value: str, members: Sequence[_Entry]) -> Group:
    sizes = np.array([abs(entry.error) for entry in members])
    null = [entry.null for entry in members if entry.null is not None]
    return Group(
        by=by,
        value=value,
        num_rows=len(members),
        median=float(np.median(sizes)),
        mean=float(np.mean(sizes)),
        p90=float(np.quantile(sizes, 0.9)),
        ratio=float(np.median([entry.ratio for entry in members])),
        null_median=float(np.median(null)) if null else None,
    )
