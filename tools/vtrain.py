"""Compare the cost model with vTrain's measured iterations and all-reduces, if these tables are available.

    python tools/vtrain.py [FOLDER]

FOLDER (by default ../shared/truth) holds vtrain_single_node.csv, vtrain_multi_node.csv and allreduce_a100_nvlink.csv of
vTrain (Bang et al., MICRO 2024; github.com/VIA-Research/vTrain, data/). The tables are not part of this project; if a
table is missing, the command says so and goes on without it. The shipped calibration does not use the tables. The only
fit here is one slowdown factor, fitted to the rows outside the scored fold. Errors are |measured / predicted - 1| in
percent.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from calibrate import fitted_ratios, held_out_ratios, read_samples
from rich.console import Console
from rich.table import Table

from planner.cost.collectives import all_reduce_seconds
from planner.cost.groups import group
from planner.evidence.rows.runs import run_of
from planner.specs.cluster_documents import load_cluster
from planner.specs.uniform import uniform_cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibrate import Sample
    from numpy.typing import NDArray

FOLDER = Path(__file__).parents[2] / "shared" / "truth"

# cells that all rows share: Megatron-DeepSpeed of 2022 on DGX A100 with four 200 Gb/s adapters a host
COMMON = {
    "source_set": "vtrain", "framework": "Megatron-DeepSpeed", "arch": "dense", "gpu": "A100-80", "gpus_per_node": "8",
    "inter_gb_s_per_gpu": "12.5", "precision": "fp16", "vocab": "51200", "recompute_policy": "full", "sp": "0",
    "flash_attention": "0", "interleave": "1", "zero_stage": "0", "glu": "0",
}  # fmt: skip


def samples_of(rows: Sequence[dict[str, str]]) -> list[Sample]:
    """Rows of a table of vTrain as samples for the fit; a sample's id is the number of its row."""
    runs = [
        run_of(
            {
                **COMMON,
                **{
                    key: row[key]
                    for key in ("gpus", "gbs", "mbs", "hidden", "heads", "layers", "seq", "tp", "dp", "pp")
                },
                "id": str(number),
                "model": f"gpt-{row['hidden']}x{row['layers']}",
                "microbatch": row["mbs"],
                "ffn": str(4 * int(row["hidden"])),
                "kv_heads": row["heads"],
                "measured_step_s": str(float(row["step_ms"]) / 1e3),
            }
        )
        for number, row in enumerate(rows)
    ]
    return read_samples(runs)


def regrets(rows: Sequence[dict[str, str]], ratios: dict[int, float]) -> NDArray[np.float64]:
    """Regret in percent of the layout with the best forecast, for each job with at least three layouts."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for number, ratio in ratios.items():
        row, measured = rows[number], float(rows[number]["step_ms"])
        job = tuple(row[key] for key in ("gpus", "gbs", "hidden", "layers", "seq"))
        groups[job].append((measured / ratio, measured))
    jobs = [members for members in groups.values() if len(members) >= 3]
    return np.array([100 * (min(members)[1] / min(m for _, m in members) - 1) for members in jobs])


def table_of(title: str, rows: Sequence[dict[str, str]], keys: Sequence[str]) -> Table:
    """Errors by each of `keys`, fitted to all rows and held out, with the regret of each."""
    samples = samples_of(rows)
    table = Table("fitted on", "n", "median %", "mean %", "p90 %", "jobs", "mean regret %", "worst %", title=title)

    def add(name: str, ratios: Any) -> None:
        errors = 100 * np.abs(ratios - 1)
        found = regrets(rows, {int(s.run): float(r) for s, r in zip(samples, ratios, strict=True)})
        figures = (np.median(errors), errors.mean(), np.quantile(errors, 0.9))
        own = [f"{each:.1f}" for each in figures]
        table.add_row(name, str(len(errors)), *own, str(len(found)), f"{found.mean():.1f}", f"{found.max():.1f}")

    add("all rows", fitted_ratios(samples))
    for key in keys:
        values = sorted({row[key] for row in rows})
        folds = [values.index(rows[int(sample.run)][key]) for sample in samples]
        add(f"other values of {key}", held_out_ratios(samples, folds))
    return table


def all_reduce_table(rows: Sequence[dict[str, str]]) -> Table:
    """Mean error of all-reduce on 2, 4 and 8 A100 over NVLink."""
    cluster = uniform_cluster(load_cluster("dgx-a100"))
    table = Table("GPUs", "n", "mean error %", "worst %", title="All-reduce over NVLink")
    for size in sorted({int(row["gpus"]) for row in rows}):
        own = [row for row in rows if int(row["gpus"]) == size]
        predicted = all_reduce_seconds(group(cluster, size, 1), np.array([float(row["bytes"]) for row in own]))
        errors = 100 * np.abs(np.array([float(row["time_ns"]) for row in own]) * 1e-9 / predicted - 1)
        table.add_row(str(size), str(len(own)), f"{errors.mean():.1f}", f"{errors.max():.1f}")
    return table


def main(arguments: Sequence[str]) -> None:
    """Print the comparison for the available tables."""
    folder = Path(arguments[0]) if arguments else FOLDER
    console = Console(width=110)
    for name, title, keys in (
        ("vtrain_single_node.csv", "Iterations on one host", ("layers", "gpus")),
        ("vtrain_multi_node.csv", "Iterations on 8 to 64 hosts", ("hidden",)),
        ("allreduce_a100_nvlink.csv", "", ()),
    ):
        path = folder / name
        if not path.is_file():
            console.print(f"{name} is absent; it is vTrain's, read it from github.com/VIA-Research/vTrain")
            continue
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        console.print(table_of(title, rows, keys) if keys else all_reduce_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
