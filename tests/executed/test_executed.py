"""What `planner emit` writes, run on a CPU: the layout, batches, bytes and losses of every rank are those of the plan.

Oracles: one process that trains on the same rows in a plain loop, and bytes of the storages that a rank holds. Our own
trainer runs in `make test`; other programs run in their environments: `python tools/real_parsers.py executed`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from cases import BATCH, LENGTH, STEPS, Case, drawn, plan_of, stated

from planner.cost.ledger import LineName
from planner.emit.bundle import write_bundle
from planner.emit.target import How

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from planner.plan import Plan

SLACK_BYTES = 256
LOOSER = {"losses": 1, "norms": 10}
"""By how much a figure may differ more than a loss."""
NEEDS = {"torch": "torch", "accelerate": "peft", "deepspeed": "deepspeed", "megatron": "triton"}
OF_TRAINER = ("logging_steps=1", "save_strategy=no", "report_to=[]", "disable_tqdm=true")
MORE = {
    "torch": (),
    "accelerate": OF_TRAINER,
    "deepspeed": OF_TRAINER,
    "megatron": (
        *("--distributed-backend", "gloo", "--use-cpu-initialization", "--transformer-impl", "local"),
        *("--attention-backend", "unfused", "--no-gradient-accumulation-fusion", "--no-rope-fusion"),
        *("--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"),
        *("--no-bias-dropout-fusion", "--no-persist-layer-norm", "--log-interval", "1", "--eval-iters", "0"),
    ),
}
"""Options behind those of the script: what a run tells, and for Megatron-LM the kernels that a CPU has."""


def cases() -> list[Any]:
    found = []
    for program, need in NEEDS.items():
        lacks = find_spec(need) is None or (program == "megatron" and "MEGATRON_LM" not in os.environ)
        why = f"{need} is not installed, or a checkout not named: python tools/real_parsers.py executed"
        marks = [pytest.mark.skipif(lacks, reason=why), *([] if program == "torch" else [pytest.mark.slow])]
        found += [pytest.param(each, id=str(each), marks=marks) for each in stated(program)]
        marks = [*marks, pytest.mark.slow]
        found += [pytest.param(each, id=str(each), marks=marks) for each in drawn(program)]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", cases())
def test_a_run_is_the_plans(case, tmp_path, ask, start):
    plan, is_ours = plan_of(case, tmp_path), case.program == "torch"
    job = job_of(case, plan, tmp_path / "emitted", start)
    ranks = ask(case.program, job)
    steps = rows_of_steps(plan, ranks)
    if case.program == "megatron":  # the same program on one rank
        same = tuple(each for each in case.settings if "optimizer" in each)
        alone = replace(case, layout=f"zero=0,mbs={plan.layout.mbs}", settings=same)
        job = job_of(alone, plan_of(alone, tmp_path), tmp_path / "alone", start)
        key = f"{case.model} {plan.layout.mbs} {same}"
    else:
        key = f"torch {case.model}" * is_ours
        job |= {"world": 1} | ({"reference": True, "steps": STEPS} if is_ours else {"rows": steps})
    (reference,) = ask(case.program, job, key=key)
    rows = batches_of(reference["rows"]) if case.program == "megatron" else []
    assert differences(case, plan, ranks, steps, reference, rows) == []


def job_of(case: Case, plan: Plan, folder: Path, start: Callable[[Path], Any]) -> dict[str, Any]:
    """What the emitted run.sh starts, and on how many ranks."""
    write_bundle(plan, folder, how=How(smoke=case.program != "torch"), force_unfit=True)
    words, variables = start(folder)
    first = next(number for number, word in enumerate(words[1:], 1) if word == "-m" or word.endswith(".py"))
    words = [*words[first:], *MORE[case.program]]
    return {"folder": str(folder), "world": plan.layout.world_size, "environment": variables, "words": words}


def rows_of_steps(plan: Plan, ranks: list[dict[str, Any]]) -> list[list[list[int]]]:
    """The sequences of each step; ranks of one sequence have equal rows, or parts of the rows."""
    layout, steps = plan.layout, []
    readers: dict[int, list[list[list[int]]]] = {}
    for rank in range(layout.world_size):
        where, rows = layout.coordinates(rank), ranks[rank]["rows"]
        if where["tp"] == where["pp"] == 0:
            begun = readers.setdefault(where["dp"], [[[] for _ in batch] for batch in rows])
            for batch, parts in zip(begun, rows, strict=True):
                for row, part in zip(batch, parts, strict=True):
                    row.extend(part[: LENGTH - len(row)])
    for step in range(STEPS):
        found = []
        for rows in readers.values():
            found += batches_of(rows)[step]
        steps.append(found)
    return steps


def batches_of(rows: list[list[list[int]]]) -> list[list[list[int]]]:
    """Rows of each step, from those of each microbatch."""
    each = len(rows) // STEPS
    return [[row for batch in rows[step * each : (step + 1) * each] for row in batch] for step in range(STEPS)]


def differences(
    case: Case,
    plan: Plan,
    ranks: list[dict[str, Any]],
    steps: list[list[list[int]]],
    reference: dict[str, Any],
    alone: list[list[list[int]]],
) -> list[str]:
    """Where a run differs from its plan; a text for each.

    alone: rows of the reference's steps, if the reference reads data itself; else a step has no row twice.
    """
    layout, wrong = plan.layout, []
    m = layout.num_microbatches(BATCH)
    for number, rows in enumerate(steps):
        is_right = sorted(rows) == sorted(alone[number]) if alone else len({tuple(row) for row in rows}) == BATCH
        if len(rows) != BATCH or not is_right:
            wrong.append(f"step {number} has {len({tuple(row) for row in rows})} different rows of {BATCH}")
    within = 1e-2 if plan.training.precision == "bf16" else 1e-4 if layout.tp > 1 else 1e-5
    for rank, seen in enumerate(ranks):
        stage = layout.coordinates(rank)["pp"]
        told = {"losses": STEPS, "norms": 1 if plan.training.precision == "bf16" else STEPS}
        wrong += [  # norms of gradients, because Adam's updates hide a wrong scale
            f"rank {rank}: {kind} {seen[kind]}, alone {reference[kind]}"
            for kind, count in told.items()
            if seen.get(kind)
            and not plan.training.dropout  # which draws other numbers on each layout
            and seen[kind][:count] != pytest.approx(reference[kind][:count], rel=within * LOOSER[kind])
        ]
        held, planned = seen["bytes"], planned_bytes(case, plan, stage)
        if case.program == "deepspeed" and layout.zero == 2:  # the ledger has the rank that keeps most of cut matrices
            held["grads"] = max(each["bytes"].get("grads", 0) for each in ranks)
        held["shards"] = held.get("params", 0) + held.get("states", 0)
        held["held"] = sum(held.get(kind, 0) for kind in ("params", "grads", "states"))
        wrong += [
            f"rank {rank}: {kind} {held.get(kind, 0)} bytes, planned {planned[kind]:.0f}"
            for kind in planned
            if abs(held.get(kind, 0) - planned[kind]) > SLACK_BYTES
        ]
        wanted = [plan.training.dropout] if plan.training.dropout else []
        if seen.get("dropout", []) != wanted:
            wrong.append(f"rank {rank}: dropout of {seen['dropout']}, planned {wanted}")
        on_host = STEPS * m * host_bytes(plan, stage, LineName.ACTIVATIONS)
        if seen.get("on_host", 0) != on_host:
            wrong.append(f"rank {rank}: {seen['on_host']} bytes went to the host, planned {on_host:.0f}")
        calls = STEPS * m * blocks(plan, stage)
        if seen["calls"] != calls:
            wrong.append(f"rank {rank}: blocks ran {seen['calls']} times, planned {calls}")
        batches = {len(batch) for batch in seen["rows"]}
        if seen["rows"] and (batches != {layout.mbs} and len(seen["rows"]) != STEPS):
            wrong.append(f"rank {rank}: microbatches of {batches} rows, planned {layout.mbs}")
        wrong += [f"rank {rank}: {each}" for each in place(case, plan, rank, seen)]
    if not ranks[-1]["losses"]:
        wrong.append("the last rank has no losses")
    return wrong


def blocks(plan: Plan, stage: int) -> int:
    """How often a stage runs its feed-forward blocks for a microbatch: again where it recomputes a layer."""
    layout = plan.layout
    kind, _, number = layout.recompute_of_stage(stage).partition(":")
    found = 0
    for chunk in layout.chunks_of_stage(stage):
        count = layout.layers_per_stage[chunk]
        again = {"none": 0, "full": min(int(number or count), count), "every": count // int(number or 1)}
        found += count + again[kind]
    return found


def planned_bytes(case: Case, plan: Plan, stage: int) -> dict[str, float]:
    """The ledger's bytes by kind of observation.

    Weights that FSDP gathers are copies, which nobody holds between the steps; its shards are master weights.
    """
    ledger = {line.name: float(line.num_bytes) for line in plan.memory[stage].lines}
    params, states = ledger[LineName.PARAMS], ledger[LineName.OPTIMIZER_STATE]
    found = {"grads": ledger[LineName.GRADS]}
    if plan.memory[stage].host:  # of a CPU, both are one memory; gradients of the update are among the states
        there = [host_bytes(plan, stage, name) for name in (LineName.PARAMS, LineName.OPTIMIZER_STATE)]
        return {"held": params + found["grads"] + states + sum(there)}
    if case.program == "accelerate":
        return found | {"shards": states + (params if plan.layout.zero == 3 else 0.0)}
    layout = plan.layout
    if (
        case.program == "torch"
        and layout.interleave > 1
        and layout.zero
        and layout.num_microbatches(BATCH) == layout.pp
    ):
        # the gradients of a chunk are sharded before those of the next exist; the ledger has those of more rounds
        return {"params": params, "states": states}
    if case.program == "torch" and plan.layout.zero == 3:  # gathered units are transients
        return found | {"states": states}
    return found | {"params": params, "states": states}


def host_bytes(plan: Plan, stage: int, name: LineName) -> float:
    """A line of the ledger of the host, of all microbatches in flight; 0 without offload."""
    host = plan.memory[stage].host
    return sum(float(line.num_bytes) for line in host.lines if line.name == name) if host else 0.0


def place(case: Case, plan: Plan, rank: int, seen: dict[str, Any]) -> list[str]:
    """Where the mesh, the placements or the ZeRO stage are not the plan's."""
    layout = plan.layout
    replicas = f"dp_replicate={layout.hsdp}:R " if layout.hsdp > 1 else ""
    if case.program == "accelerate" and (layout.tp > 1 or layout.ep > 1):
        sizes = {"tp": layout.tp, "ep": layout.ep, "fsdp": layout.dp // layout.hsdp, "dp_replicate": layout.hsdp}
        sizes["efsdp"] = sizes["fsdp"] * layout.tp // layout.ep if layout.ep > 1 else 1
        words = {
            tuple(axis.split(":")[0].split("=")) for each in seen["placements"] for axis in each.split() if ":" in axis
        }
        axes = {(name, str(size)) for name, size in sizes.items() if size > 1}
        return [] if {each for each in words if each[1] != "1"} == axes else [f"placements {seen['placements']}"]
    shards = layout.dp * layout.cp // layout.hsdp
    whole = layout.dp * layout.cp if layout.zero == 0 else layout.hsdp
    mesh = {"pp": layout.pp, "dp_replicate": whole, "dp_shard": layout.dp * layout.cp // whole, "tp": layout.tp}
    planned: dict[str, dict[str, Any]] = {
        "torch": {"mesh": mesh},
        "accelerate": {"placements": [f"{replicas}dp_shard_cp={shards}:S(0)" if shards > 1 else "=1:S(0)"]},
        "megatron": {
            "place": {axis: layout.coordinates(rank)[axis] for axis in ("tp", "pp", "dp", "cp")},
            "ep": layout.ep,
            "chunks": layout.num_chunks // layout.pp,
        },
        "deepspeed": {"zero": layout.zero, "dp": layout.dp * layout.cp, "stage": layout.coordinates(rank)["pp"]},
    }
    return [f"{key} {seen[key]}, planned {value}" for key, value in planned[case.program].items() if seen[key] != value]
