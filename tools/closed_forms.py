"""Compare the formulas of planner/cost with the numbers that papers print for the same quantities (`make accuracy`).

The papers computed most of these numbers with formulas, so agreement shows only that a formula is implemented as
published.
Agreement does not show how close the formula is to a measurement.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from planner.cost.activations import layer_activation_bytes
from planner.cost.flops import end_to_end_days
from planner.cost.model_states import state_bytes_per_param
from planner.cost.parameters import num_params
from planner.cost.schedule import in_flight_microbatches
from planner.layout_text import parse_layout
from planner.specs.by_name import load_model
from planner.specs.load import load_job
from planner.specs.uniform import uniform_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.layout import Layout
    from planner.specs.job import PoolJob

GIB = 2.0**30
GB = 1e9
BILLION = 1e9

Row = tuple[
    str, float, float, float
]  # quantity, published value, computed value, largest relative difference that rounding allows

# Narayanan et al. (SC 2021), table 1: billions of parameters
SC21_PARAMS = {
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18.4b": 18.4,
    "megatron-39.1b": 39.1,
    "megatron-76.1b": 76.1,
    "megatron-145.6b": 145.6,
    "megatron-310.1b": 310.1,
    "megatron-529.6b": 529.6,
    "megatron-1t": 1008.0,
}

# Rajbhandari et al., ZeRO (SC 2020), figure 1: GB of states of 7.5 B parameters on 64 devices, by stage
ZERO_GB = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}

# Korthikanti et al. (2022), figure 1: model -> (pp, interleave, microbatch, GiB of states,
# GiB of activations with tensor parallelism alone, the same with sequence parallelism and selective recompute).
# The exact values are those that Calculon's validation.py lists for the figure.
KORTHIKANTI_GIB = {
    "megatron-22b": (1, 1, 4, 45.5625, 59.25, 9.5625),
    "gpt3-175b": (8, 3, 1, 45.5625, 66.84375, 12.3515625),
    "megatron-529.6b": (35, 3, 1, 31.640625, 114.0234375, 23.076171875),
    "megatron-1t": (64, 1, 1, 32.958984375, 131.25, 26.5625),
}


def parameter_rows() -> Iterator[Row]:
    """Parameters of the SC'21 models; the table rounds to a tenth of a billion."""
    for name, published in SC21_PARAMS.items():
        computed = num_params(load_model(name)) / BILLION
        yield f"{name}, B parameters", published, computed, 0.05 / published + 1e-3


def zero_rows() -> Iterator[Row]:
    """States of 7.5 B parameters on 64 devices."""
    job = load_job(
        model="megatron-7.5b",
        cluster="dgx-a100",
        engine="deepspeed",
        nodes=8,
        sequence_length=2048,
        global_batch_size=64,
        settings=("training.memory_recipe=zero-16",),
    )
    for stage, published in ZERO_GB.items():
        layout = parse_layout(f"dp=64,zero={stage}", num_layers=job.model.num_layers, num_devices=64)
        num_bytes = sum(state_bytes_per_param(uniform_job(job), layout)) * 7.5 * BILLION
        yield f"7.5 B parameters, 64 devices, ZeRO-{stage}, GB", published, float(num_bytes) / GB, 0.05 / published


def korthikanti_job(model: str, microbatch_size: int) -> PoolJob:
    """The job of the paper: fp16 with dropout, unfused attention, 18 bytes for each parameter."""
    job = load_job(
        model=model,
        cluster="dgx-a100",
        engine="megatron",
        nodes=64,
        sequence_length=2048,
        global_batch_size=512 * microbatch_size,
        precision="fp16",
        settings=("training.memory_recipe=megatron-18", "training.attention=unfused", "training.dropout=0.1"),
    )
    return uniform_job(job)


def korthikanti_layout(job: PoolJob, pp: int, interleave: int, mbs: int, *, sequence_parallel: bool) -> Layout:
    """A layout with tensor parallel degree 8; `sequence_parallel` turns sequence parallelism on or off."""
    chunks = pp * interleave
    text = f"tp=8,pp={pp},dp=1,interleave={interleave},mbs={mbs},sp={int(sequence_parallel)}"
    layers = "/".join(str(job.model.num_layers // chunks) for _ in range(chunks))
    return parse_layout(f"{text},layers_per_stage={layers}", num_layers=job.model.num_layers, num_devices=8 * pp)


def korthikanti_rows() -> Iterator[Row]:
    """Memory of the first stage as the figure counts it: 12 h^2 parameters per layer, no embedding, biases or norms."""
    for name, (pp, interleave, mbs, states, tensor, selective) in KORTHIKANTI_GIB.items():
        job = korthikanti_job(name, mbs)
        layers = job.model.num_layers / pp
        for text, published, sequence_parallel in (
            ("tensor parallel", tensor, False),
            ("sequence parallel, selective", selective, True),
        ):
            layout = korthikanti_layout(job, pp, interleave, mbs, sequence_parallel=sequence_parallel)
            per_layer = layer_activation_bytes(job, layout)[int(sequence_parallel)]
            m = layout.num_microbatches(job.training.global_batch_size)
            in_flight = in_flight_microbatches(layout.schedule, pp, 0, m, interleave)
            yield f"{name}, activations, {text}, GiB", published, float(per_layer * layers * in_flight) / GIB, 1e-9
        params = 12.0 * job.model.hidden_size**2 * layers / 8
        yield (
            f"{name}, states, GiB",
            states,
            params * float(sum(state_bytes_per_param(uniform_job(job), layout))) / GIB,
            1e-9,
        )


def training_time_rows() -> Iterator[Row]:
    """Days of two long runs, from the TFLOP/s that the paper measured for each device.

    Narayanan et al. (SC 2021), section 5.1: 34 days and 84 days, rounded to days.
    """
    yield "GPT-3 175B, 300 B tokens, 1024 A100, days", 34.0, end_to_end_days(300e9, 175e9, 1024, 140e12), 0.02
    yield "1T, 450 B tokens, 3072 A100, days", 84.0, end_to_end_days(450e9, 1e12, 3072, 163e12), 0.02


def main() -> int:
    """Print the table; returns 1 if a row differs by more than rounding allows."""
    table = Table("quantity", "published", "computed", "difference", title="closed forms as published")
    wrong = 0
    for rows in (parameter_rows, zero_rows, korthikanti_rows, training_time_rows):
        for what, published, computed, allowed in rows():
            difference = computed / published - 1
            off = abs(difference) > allowed
            wrong += off
            table.add_row(
                what, f"{published:g}", f"{computed:.6g}", f"{difference:+.2%}", style="bold red" if off else ""
            )
        table.add_section()
    console = Console(width=110)
    console.print(table)
    console.print("Agreement shows that the formulas are implemented as published, not that forecasts are accurate.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
