"""Compare, for many layouts, the memory in the ledger with that of the trainer's step, counted by `planner verify`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich.console import Console

from planner.cost.ledger import LineName
from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.load import load_job
from planner.trainer.rehearse import counted
from planner.verify import planned_bytes

if TYPE_CHECKING:
    from planner.plan import Plan

GIB = 2**30
CASES: Final = (
    # model, layers (None: all), sequence, layout, rank, precision
    ("llama3-8b", None, 4096, "dp=1,mbs=1,recompute=full", 0, "bf16"),
    ("llama3-8b", 4, 4096, "dp=1,mbs=1", 0, "bf16"),
    ("llama3-8b", 4, 4096, "dp=1,mbs=2", 0, "bf16"),
    ("llama3-8b", 4, 4096, "dp=1,mbs=2,recompute=full", 0, "bf16"),
    ("llama3.2-1b", 8, 4096, "dp=1,mbs=1", 0, "bf16"),
    ("llama3.2-1b", 8, 4096, "dp=1,mbs=4,recompute=full", 0, "bf16"),
    ("mpt-3b", 8, 2048, "dp=1,mbs=2", 0, "bf16"),
    ("mpt-3b", 8, 2048, "dp=1,mbs=4,recompute=full", 0, "bf16"),
    ("llama3-8b", 4, 4096, "dp=8,zero=1,mbs=2", 0, "bf16"),
    ("llama3-8b", 4, 4096, "dp=8,zero=3,mbs=2", 0, "bf16"),
    ("llama3-8b", 4, 4096, "tp=8,mbs=2", 0, "bf16"),
    ("llama3-8b", 4, 4096, "tp=2,dp=4,zero=3,mbs=2", 0, "bf16"),
    ("llama3-8b", 8, 4096, "pp=4,mbs=2", 0, "bf16"),
    ("llama3-8b", 8, 4096, "pp=4,mbs=2", 1, "bf16"),
    ("llama3-8b", 8, 4096, "pp=4,mbs=2", 3, "bf16"),
    ("llama3-8b", 8, 4096, "pp=2,interleave=2,mbs=2", 0, "bf16"),
    ("llama3-8b", 4, 4096, "dp=8,zero=2,mbs=2", 0, "bf16"),
    ("llama3-8b", 4, 4096, "dp=8,zero=3,hsdp=2,mbs=2", 0, "bf16"),
    ("llama3-8b", 4, 4096, "cp=4,dp=2,zero=1,mbs=2", 0, "bf16"),
    ("llama3-8b", 4, 8192, "cp=2,tp=2,dp=2,zero=1,mbs=2", 0, "bf16"),
    ("llama3-8b", 4, 16384, "cp=4,dp=2,zero=3,mbs=1", 0, "bf16"),
    ("llama3-8b", 4, 4096, "dp=1,mbs=2", 0, "fp8"),
    ("llama3-8b", 4, 4096, "dp=8,zero=3,mbs=2", 0, "fp8"),
    ("llama3-8b", 4, 4096, "tp=8,mbs=2", 0, "fp8"),
    ("llama3.2-1b", 4, 2048, "dp=1,mbs=1", 0, "fp32"),
    ("gemma2-9b", 4, 4096, "dp=8,zero=1,mbs=1", 0, "bf16"),
    ("mixtral-8x7b", 2, 4096, "dp=1,mbs=1", 0, "bf16"),
    ("mixtral-8x7b", 2, 4096, "dp=1,mbs=1,recompute=full", 0, "bf16"),
    ("mixtral-8x7b", 2, 4096, "dp=8,ep=8,zero=1,mbs=1", 0, "bf16"),
    ("mixtral-8x7b", 2, 4096, "dp=8,ep=4,zero=3,mbs=1", 0, "bf16"),
    ("mixtral-8x7b", 2, 4096, "tp=2,dp=4,ep=8,zero=1,mbs=1", 0, "bf16"),
    ("mixtral-8x7b", 4, 4096, "pp=2,dp=4,ep=4,zero=1,mbs=1", 0, "bf16"),
    ("qwen3-30b-a3b", 4, 4096, "dp=8,ep=8,zero=1,mbs=2", 0, "bf16"),
    ("qwen3-30b-a3b", 4, 4096, "dp=8,ep=8,zero=1,mbs=2,recompute=full", 0, "bf16"),
    ("qwen3-30b-a3b", 4, 4096, "dp=8,ep=8,zero=1,mbs=2", 0, "fp8"),
    ("deepseek-v2-lite", 4, 4096, "dp=8,ep=8,zero=1,mbs=1", 0, "bf16"),
    ("llama3-8b", 8, 4096, "pp=4,mbs=1,schedule=gpipe", 0, "bf16"),
    ("llama3-8b", 8, 4096, "pp=2,interleave=2,schedule=zbv,mbs=1", 0, "bf16"),
    ("llama3-8b", 8, 4096, "pp=2,interleave=2,schedule=zbv,mbs=1,recompute=full", 1, "bf16"),
    ("llama3-8b", 8, 4096, "pp=2,interleave=2,schedule=dualpipev,mbs=1", 0, "bf16"),
)


def make_plan(model: str, layout: str, *, sequence: int, layers: int | None = None, precision: str = "bf16") -> Plan:
    """The plan of a layout on DGX H100; `layers` cuts the model to its first layers.

    The plan has twice as many microbatches as stages, and at least four. The first stage therefore has gradients in
    memory at its peak.
    """
    sizes = dict(part.split("=") for part in layout.split(","))
    microbatches = max(4, 2 * int(sizes.get("pp", "1")))
    batch = microbatches * int(sizes.get("dp", "1")) * int(sizes["mbs"])
    job = load_job(
        model=model, cluster="dgx-h100", gpus=8, sequence_length=sequence, global_batch_size=batch, precision=precision
    )
    if layers is not None:
        job = replace(job, model=job.model.model_copy(update={"num_layers": layers}))
    return plan_for_layout(job, parse_layout(layout, num_layers=job.model.num_layers, num_devices=1))


def main() -> None:
    """Print the table, a line at a time."""
    console = Console(width=200)
    console.print("GiB planned / counted; lines each at its own peak, transients what the whole peak leaves to them")
    for model, layers, sequence, layout, rank, precision in CASES:
        plan = make_plan(model, layout, sequence=sequence, layers=layers, precision=precision)
        forecast, (peak, lines) = planned_bytes(plan, rank), counted(plan, rank, lines=True)
        whole = sum(forecast.values())
        lines[LineName.TRANSIENTS] = peak - sum(lines.values())
        cells = [f"{forecast[name] / GIB:.2f} / {lines[name] / GIB:.2f}" for name in forecast]
        name = f"{model}, {plan.model.num_layers} layers, {sequence}, {precision} | {layout} | {rank}"
        total = f"{whole / GIB:.2f} / {peak / GIB:.2f} | {peak / whole:.3f}"
        console.print(f"| {name} | {' | '.join(cells)} | {total} |", highlight=False)


if __name__ == "__main__":
    main()
