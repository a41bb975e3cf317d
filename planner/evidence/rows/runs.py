"""Read a table of measured runs (CSV) into records; any cell may be blank or contain words."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from planner.errors import EnvironmentProblem, InputError
from planner.specs.files import limited_text
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

REQUIRED_COLUMNS: Final = ("model", "gpu", "gpus", "seq", "gbs")
"""Columns without which no row can be priced. Every other column may be missing; its cells then count as blank."""

_MEASURED: Final = ("step_s", "tok_s_gpu", "measured_step_s", "mem_bytes", "oom")
"""Columns of what a run measured; rows of quality C lose them, so that they enter no fit and no score."""

_LARGEST: Final = 1e15
_WHOLE: Final = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"  # commas only between groups of three digits
_NUMBER: Final = re.compile(rf"\s*({_WHOLE}\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run, in the columns of tests/published/measurements.csv.

    A number is None if the source does not state it, or states it in words. A text is empty if the source does not
    state it.
    family: the family of publishers of the source, from `families.csv` beside the table; without one, the source.
    vpp: chunks of a stage; 0 if the cell says that the source does not state them.
    fit: what a calibration learns from the source, from `families.csv`: everything if empty, only the width of bands
    if `bands`, nothing if `no`.
    quality: C if the source itself says that its figures tell nothing about speed; such a row is priced, and what it
    measured counts as not stated.
    """

    id: str
    source_set: str
    family: str
    source_ref: str
    release: str
    framework: str
    task: str
    model: str
    arch: str
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocab: int | None
    glu: int | None
    seq: int | None
    n_experts: int | None
    top_k: int | None
    moe_ffn: int | None
    shared_ffn: int | None
    n_dense_layers: int | None
    gpu: str
    gpu_mem_gb: float | None
    gpus: int | None
    gpus_per_node: int | None
    precision: str
    precision_class: str
    tp: int | None
    pp: int | None
    vpp: int | None
    cp: int | None
    ep: int | None
    etp: int | None
    dp: int | None
    zero: str
    zero_stage: int | None
    mbs: int | None
    gbs: int | None
    recompute: str
    recompute_policy: str
    sp: int | None
    flags: str
    notes: str
    step_s: float | None
    tok_s_gpu: float | None
    oom: int | None
    offload: int | None
    interleave: int | None
    microbatch: int | None
    interconnect: str
    inter_gb_s_per_gpu: float | None
    flash_attention: int | None
    measured_step_s: float | None
    mem_bytes: float | None
    mem_class: str
    recipe_ref: str
    recompute_modules: str
    recompute_layers: int | None
    pipeline_layout: str
    cuda_graphs: str
    moe_a2a_overlap: int | None
    dispatcher: str
    cpu_offload: str
    fp8_recipe: str
    mtp_layers: int | None
    memory_recipe: str
    mean_sample_tokens: float | None
    pcie: str
    transport: str
    quality: str
    fit: str

    @property
    def measured_step_seconds(self) -> float | None:
        """Seconds of one optimizer step as published, or computed from tokens per second.

        The value is None if the row has neither a step time nor tokens per second.
        """
        stated = self.measured_step_s or self.step_s
        if stated:
            return stated
        if self.tok_s_gpu and self.gbs and self.seq and self.gpus:
            return self.gbs * self.seq / (self.gpus * self.tok_s_gpu)
        return None


def read_runs(path: Path) -> tuple[Run, ...]:
    """Read every row of a table, with the cells of its source in `families.csv` beside the table.

    Raises:
        InputError: as `read_cells`.
        EnvironmentProblem: a file cannot be read.
    """
    beside = path.with_name("families.csv")
    families = {cells.get("source_set"): cells for _, cells in _table(beside)[1]} if beside.is_file() else {}
    return tuple(
        run_of({**families.get(cells.get("source_set") or "", {}), **cells}, f"row {number}")
        for number, (_, cells) in enumerate(read_cells(path)[1], 1)
    )


_Cells = dict[str, Any]


def read_cells(path: Path) -> tuple[tuple[str, ...], list[tuple[int, _Cells]]]:
    """The columns of a table of runs, and the line and the cells of each row; blank lines are left out.

    Raises:
        InputError: the file does not exist, is too large, is not a CSV table, or lacks required columns (all are
        named).
        EnvironmentProblem: the file cannot be read.
    """
    columns, rows = _table(path)
    if missing := [name for name in REQUIRED_COLUMNS if name not in columns]:
        hint = "docs/formats.md describes the columns; a file needs at least " + ", ".join(REQUIRED_COLUMNS)
        raise InputError(f"lacks the columns {', '.join(missing)}", where=f"{printable(str(path))}:1", hint=hint)
    return columns, rows


def _table(path: Path) -> tuple[tuple[str, ...], list[tuple[int, _Cells]]]:
    """Any CSV table: column names in lower case with `_` for blanks, and the line and the cells of each row.

    The separator is a comma; a header without commas may have semicolons or tabs.
    """
    shown = printable(str(path))
    try:
        with path.open("rb") as file:
            text = limited_text(file, shown)
        header = text.lstrip().partition("\n")[0]
        separator = next((each for each in (",", ";", "\t") if each in header), ",")
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
        reader.fieldnames = [re.sub(r"\s+", "_", name.strip().lower()) for name in reader.fieldnames or ()]
        return tuple(reader.fieldnames), [(reader.line_num, row) for row in reader]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise InputError(f"{shown} is no file", hint="name a CSV table of runs") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {shown}: {error.strerror}") from None
    except (csv.Error, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(f"{shown} is not a CSV table: {printable(str(error))}") from None


def run_of(cells: Mapping[str, Any], fallback_id: str = "") -> Run:
    """One row as a record; a cell with the wrong kind of value counts as not stated."""
    values: dict[str, Any] = {}
    for field in fields(Run):
        text = cells.get(field.name)
        text = text.strip() if isinstance(text, str) else ""
        values[field.name] = text if field.type == "str" else _number(text, whole=field.type == "int | None")
    if "not stated" in (cells.get("vpp") or "").lower():
        values["vpp"] = 0
    values["id"] = values["id"] or fallback_id
    values["family"] = values["family"] or values["source_set"]
    if values["quality"].upper().startswith("C"):
        values |= dict.fromkeys(_MEASURED)
    return Run(**values)


def _number(text: str, *, whole: bool) -> float | int | None:
    """The number in a cell, or None.

    Words, numbers that are not finite, and fractions in a column of counts give None.
    """
    match = _NUMBER.fullmatch(text)
    value = float(match[1].replace(",", "")) if match else math.inf
    if value > _LARGEST:
        return None
    if not whole:
        return value
    return int(value) if value.is_integer() else None


def unread_cells(cells: Mapping[str, Any]) -> dict[str, str]:
    """The columns of numbers whose cells contain something else, and what they should contain."""
    kinds = {"int | None": "a whole number", "float | None": "a number"}
    columns = {field.name: kinds[str(field.type)] for field in fields(Run) if field.type in kinds}
    texts = {name: (cells.get(name) or "").strip() for name in columns}
    return {
        name: kind
        for name, kind in columns.items()
        if texts[name] and _number(texts[name], whole=kind == "a whole number") is None
    }
